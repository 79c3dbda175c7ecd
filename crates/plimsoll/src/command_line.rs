//! Rewrites the typed command with other settings, for hints that the user can copy and that the prompt can execute.

use plimsoll_watch::remedies::{SET, Setting};
use plimsoll_watch::text::shell_word;

/// Returns the words of a command with `settings` appended as flags. Earlier flags of the command for the same keys are
/// removed.
pub fn with_settings(words: impl Iterator<Item = String>, settings: &[Setting]) -> Vec<String> {
    let mut command = without_settings(words, settings);
    command.extend(settings.iter().flat_map(Setting::words));
    command
}

/// Joins words to a line that a shell splits into the same words.
pub fn shell_quoted(words: &[String]) -> String {
    words.iter().map(|word| shell_word(word)).collect::<Vec<_>>().join(" ")
}

/// Returns the words of a command line, with `plimsoll` in place of the program's path. Leaves out the flags of
/// `settings` and each `--set` of their keys, with their values: a remaining `--set` would override the new flag.
fn without_settings(words: impl Iterator<Item = String>, settings: &[Setting]) -> Vec<String> {
    let key = |setting: &str| setting.split('=').next().unwrap_or_default().trim().to_owned();
    let mut command = vec!["plimsoll".to_owned()];
    let mut words = words.skip(1);
    while let Some(word) = words.next() {
        let (flag, joined) = match word.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (&*word, None),
        };
        let is_replaced = flag != SET && settings.iter().any(|setting| setting.flag == flag);
        if !is_replaced && flag != SET {
            command.push(word);
            continue;
        }
        let is_separate = joined.is_none();
        let Some(value) = joined.or_else(|| words.next()) else { continue };
        if is_replaced || settings.iter().any(|setting| setting.key == key(&value)) {
            continue;
        }
        command.push(word);
        command.extend(is_separate.then_some(value));
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOW: Setting = Setting { flag: "--allow", key: "memory.allow", value: String::new() };
    const BUDGET: Setting = Setting { flag: "--budget", key: "memory.budget", value: String::new() };
    const DEVICES: Setting = Setting { flag: "--devices", key: "run.devices", value: String::new() };

    fn rewritten(line: &[&str], settings: &[(Setting, &str)]) -> String {
        let with_value = |(setting, value): &(Setting, &str)| Setting { value: (*value).to_owned(), ..setting.clone() };
        let settings: Vec<Setting> = settings.iter().map(with_value).collect();
        shell_quoted(&with_settings(line.iter().map(|word| (*word).to_owned()), &settings))
    }

    #[test]
    fn only_replaced_flags_change() {
        let line =
            ["/bin/plimsoll", "plan", "my run.toml", "--budget", "1GiB", "--allow=bf16", "--set", "train.steps=2"];
        let same = "plimsoll plan 'my run.toml'";
        assert_eq!(
            rewritten(&line, &[(BUDGET, "41MiB")]),
            format!("{same} --allow=bf16 --set train.steps=2 --budget 41MiB")
        );
        assert_eq!(
            rewritten(&line, &[(ALLOW, "lora,nf4")]),
            format!("{same} --budget 1GiB --set train.steps=2 --allow lora,nf4")
        );
        let line = ["plimsoll", "train", "--devices", "cpu=1GiB", "it's"];
        let allowed = r#"plimsoll train --devices cpu=1GiB "it's" --allow lora,nf4"#;
        assert_eq!(rewritten(&line, &[(ALLOW, "lora,nf4")]), allowed);
        assert_eq!(rewritten(&line, &[(DEVICES, "cpu=41MiB")]), r#"plimsoll train "it's" --devices cpu=41MiB"#);
    }

    #[test]
    fn set_of_replaced_keys_is_removed() {
        let line = ["plimsoll", "plan", "--set", "memory.budget=1GiB", "--set=memory.allow=[]", "--set", "run.dir=a b"];
        assert_eq!(
            rewritten(&line, &[(ALLOW, "lora,nf4"), (BUDGET, "41MiB")]),
            "plimsoll plan --set 'run.dir=a b' --allow lora,nf4 --budget 41MiB"
        );
        let line =
            ["plimsoll", "plan", "--set=run.devices=cpu=1GiB", "--set=train.steps=2", "--set", " run.devices = cpu"];
        assert_eq!(
            rewritten(&line, &[(ALLOW, "lora,nf4"), (DEVICES, "cpu=41MiB")]),
            "plimsoll plan --set=train.steps=2 --allow lora,nf4 --devices cpu=41MiB"
        );
    }
}
