//! Replaces run-file keys by command-line flags in failures.
//!
//! The libraries name keys of the run file in their messages (`data.sequence`). Commands without a run file and without
//! `--set`, such as `eval`, have flags for some of these keys. Their messages must name the flags (`--sequence`), and
//! hints that set any other key are dropped.

use crate::args::Cli;
use clap::CommandFactory;
use plimsoll_core::Failure;

/// Keys of the run file with the flag that sets them in commands without a run file.
const FLAGS: [(&str, &str); 14] = [
    ("data.sequence", "sequence"),
    ("data.eval", "data"),
    ("data.format", "format"),
    ("data.template", "template"),
    ("data.train", "data"),
    ("memory.allow", "allow"),
    ("memory.budget", "budget"),
    ("memory.host", "host"),
    ("model.adapter", "adapter"),
    ("model.ignore_config_keys", "ignore-config-key"),
    ("run.devices", "devices"),
    ("run.dir", "run-dir"),
    ("run.threads", "threads"),
    ("train.batch_tokens", "batch-tokens"),
];

/// The sections of a run file.
const SECTIONS: [&str; 8] = ["data", "lora", "memory", "model", "recipe", "run", "train", "watch"];

/// Replaces run-file keys in a failure by flags of the command, and drops hints that set other keys. `path` holds the
/// words of the command: `["bench", "devices"]`. A command that has `--set` keeps its failure unchanged.
pub fn with_flags_for_keys(path: &[&str], failure: Failure) -> Failure {
    let cli = Cli::command();
    let command = path.iter().try_fold(&cli, |command, word| command.find_subcommand(word));
    let has_flag = |flag: &str| {
        command.is_some_and(|command| command.get_arguments().any(|argument| argument.get_long() == Some(flag)))
    };
    if has_flag("set") {
        return failure;
    }
    let flags = FLAGS.into_iter().filter(|(_, flag)| has_flag(flag));
    let translate = |text: String| flags.clone().fold(text, |text, (key, flag)| replace_key(&text, key, flag));
    let hints = failure.hints.into_iter().map(&translate).filter(|hint| !sets_key(hint)).collect();
    Failure { message: translate(failure.message), hints, ..failure }
}

/// Replaces a key of the run file by a flag in a text, and `key = value` by `--flag value`. A key that is part of a
/// file name stays.
fn replace_key(text: &str, key: &str, flag: &str) -> String {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || "_/-".contains(letter);
    let (mut translated, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(key) {
        let starts_word = !before.ends_with(|letter| is_word(letter) || letter == '.');
        // A dot either ends a sentence or starts a file extension.
        let ends_word = !after.strip_prefix('.').unwrap_or(after).starts_with(is_word);
        rest = after;
        if !(starts_word && ends_word) {
            translated += before;
            translated += key;
            continue;
        }
        translated += before.strip_suffix("--set ").unwrap_or(before);
        translated += &format!("--{flag}");
        if let Some(value) = after.strip_prefix(" = ").or_else(|| after.strip_prefix('=')) {
            translated.push(' ');
            rest = value;
            // A single word needs no quotes in a shell.
            let quoted = value.strip_prefix('"').and_then(|value| value.split_once('"'));
            if let Some((word, after)) = quoted.filter(|(word, _)| word.chars().all(is_word)) {
                translated += word;
                rest = after;
            }
        }
    }
    translated + rest
}

/// Returns whether a hint tells the user to set a key of the run file.
fn sets_key(text: &str) -> bool {
    let is_key = |word: &str| word.split_once('.').is_some_and(|(section, _)| SECTIONS.contains(&section));
    let words: Vec<&str> = text.split_whitespace().collect();
    words.windows(2).any(|pair| match pair {
        ["--set", _] => true,
        ["set", key] => is_key(key),
        [key, "="] => is_key(key),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_inside_file_names_stay() {
        let replaced = |text| replace_key(text, "data.eval", "data");
        assert_eq!(replaced("data.eval: no file matches data.eval.jsonl"), "--data: no file matches data.eval.jsonl");
        assert_eq!(
            replaced("my-data.eval, /data.eval, data.evaluated, data.eval/x"),
            "my-data.eval, /data.eval, data.evaluated, data.eval/x"
        );
        assert_eq!(
            replaced("--set data.eval=a, or data.eval = b. Look at data.eval."),
            "--data a, or --data b. Look at --data."
        );
        assert_eq!(replaced("data.eval = \"a\", data.eval = \"two words\""), "--data a, --data \"two words\"");
    }

    #[test]
    fn failures_name_flags_of_commands_without_set() {
        let failure = Failure::input("data.sequence is 128, but a takes no more than 64")
            .hint("set data.sequence to 64 or less")
            .hint("take fewer: --set run.threads=1")
            .hint("set data.sequence = 7 or more, or data.long = \"split\"")
            .hint("to start from random weights: --set model.init=random")
            .hint("name the folder of a run (run.dir), or set eos_token in config.json");
        let eval = with_flags_for_keys(&["eval"], failure.clone());
        assert_eq!(eval.message, "--sequence is 128, but a takes no more than 64");
        let kept = "name the folder of a run (run.dir), or set eos_token in config.json";
        assert_eq!(eval.hints, ["set --sequence to 64 or less", "take fewer: --threads 1", kept]);
        assert_eq!(with_flags_for_keys(&["export"], failure.clone()).hints, [kept]);
        for with_set in [&["train"][..], &["plan"], &["bench", "models"]] {
            assert_eq!(with_flags_for_keys(with_set, failure.clone()), failure);
        }
    }
}
