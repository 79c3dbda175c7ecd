//! Failures speak of keys of the run file. A command that has no run file and no `--set` has flags for some of these keys:
//! what it says names those, and no key that nobody could set.

use crate::args::Cli;
use clap::CommandFactory;
use plimsoll_core::Failure;

/// Flags that stand for a key in commands without a run file.
const FLAGS: [(&str, &str); 9] = [
    ("data.sequence", "sequence"),
    ("data.eval", "data"),
    ("data.format", "format"),
    ("memory.allow", "allow"),
    ("memory.budget", "budget"),
    ("model.adapter", "adapter"),
    ("model.ignore_config_keys", "ignore-config-key"),
    ("run.devices", "devices"),
    ("run.threads", "threads"),
];

/// The sections of a run file.
const SECTIONS: [&str; 7] = ["data", "lora", "memory", "model", "recipe", "run", "train"];

/// What failed in the command that these words name, in its own flags.
pub fn in_flags_of(command: &[&str], failure: Failure) -> Failure {
    let cli = Cli::command();
    let found = command.iter().try_fold(&cli, |command, word| command.find_subcommand(word));
    let has =
        |flag: &str| found.is_some_and(|found| found.get_arguments().any(|argument| argument.get_long() == Some(flag)));
    if has("set") {
        return failure;
    }
    let known = FLAGS.into_iter().filter(|(_, flag)| has(flag));
    let said = |text: String| known.clone().fold(text, |text, (key, flag)| with_flag(&text, key, flag));
    let hints = failure.hints.into_iter().map(&said).filter(|hint| !sets_a_key(hint)).collect();
    Failure { message: said(failure.message), hints, ..failure }
}

/// A text with a flag in the place of a key, also where the key is set to something. Names of files are left alone.
fn with_flag(text: &str, key: &str, flag: &str) -> String {
    let of_a_word = |letter: char| letter.is_ascii_alphanumeric() || "_/-".contains(letter);
    let (mut said, mut rest) = (String::new(), text);
    while let Some((before, behind)) = rest.split_once(key) {
        let begins = !before.ends_with(|letter| of_a_word(letter) || letter == '.');
        // A dot ends a sentence, or goes on to a file's ending.
        let ends = !behind.strip_prefix('.').unwrap_or(behind).starts_with(of_a_word);
        rest = behind;
        if !(begins && ends) {
            said += before;
            said += key;
            continue;
        }
        said += before.strip_suffix("--set ").unwrap_or(before);
        said += &format!("--{flag}");
        if let Some(value) = behind.strip_prefix(" = ").or_else(|| behind.strip_prefix('=')) {
            said.push(' ');
            rest = value;
            // A shell needs no quotes around a word.
            let quoted = value.strip_prefix('"').and_then(|value| value.split_once('"'));
            if let Some((word, behind)) = quoted.filter(|(word, _)| word.chars().all(of_a_word)) {
                said += word;
                rest = behind;
            }
        }
    }
    said + rest
}

/// Whether a text says to set a key of the run file.
fn sets_a_key(text: &str) -> bool {
    let key = |word: &str| word.split_once('.').is_some_and(|(section, _)| SECTIONS.contains(&section));
    let words: Vec<&str> = text.split_whitespace().collect();
    let set = |pair: &[&str]| key(pair[0]) && pair[1] == "=" || pair[0] == "--set" || pair[0] == "set" && key(pair[1]);
    words.windows(2).any(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_word_and_no_part_of_a_name() {
        let said = |text| with_flag(text, "data.eval", "data");
        assert_eq!(said("data.eval: no file matches data.eval.jsonl"), "--data: no file matches data.eval.jsonl");
        assert_eq!(
            said("my-data.eval, /data.eval, data.evaluated, data.eval/x"),
            "my-data.eval, /data.eval, data.evaluated, data.eval/x"
        );
        assert_eq!(
            said("--set data.eval=a, or data.eval = b. Look at data.eval."),
            "--data a, or --data b. Look at --data."
        );
        assert_eq!(said("data.eval = \"a\", data.eval = \"two words\""), "--data a, --data \"two words\"");
    }

    #[test]
    fn a_command_speaks_of_its_own_flags_and_of_no_key_that_it_cannot_set() {
        let failure = Failure::input("data.sequence is 128, but a takes no more than 64")
            .hint("set data.sequence to 64 or less")
            .hint("take fewer: --set run.threads=1")
            .hint("set data.sequence = 7 or more, or data.long = \"split\"")
            .hint("to start from random weights: --set model.init=random")
            .hint("name the folder of a run (run.dir), or set eos_token in config.json");
        let eval = in_flags_of(&["eval"], failure.clone());
        assert_eq!(eval.message, "--sequence is 128, but a takes no more than 64");
        let kept = "name the folder of a run (run.dir), or set eos_token in config.json";
        assert_eq!(eval.hints, ["set --sequence to 64 or less", "take fewer: --threads 1", kept]);
        assert_eq!(in_flags_of(&["merge"], failure.clone()).hints, [kept]);
        for with_set in [&["train"][..], &["plan"], &["bench", "models"]] {
            assert_eq!(in_flags_of(with_set, failure.clone()), failure);
        }
    }
}
