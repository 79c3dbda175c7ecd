//! The command that was typed, written down once more with other settings: for hints that can be
//! copied as they are, and taken where somebody says so.

use plimsoll_watch::text::shell_word;
use plimsoll_watch::ways::Setting;

/// The words of a command with other settings.
pub fn changed(words: impl Iterator<Item = String>, settings: &[Setting]) -> Vec<String> {
    let mut command = without(words, settings);
    command.extend(settings.iter().flat_map(|setting| [setting.flag.to_owned(), setting.value.clone()]));
    command
}

/// Words as a shell reads them.
pub fn quoted(words: &[String]) -> String {
    words.iter().map(|word| shell_word(word)).collect::<Vec<_>>().join(" ")
}

/// The command's words without the flags that are given anew. `--set` of the same keys goes too: it would win over the
/// flag.
fn without(words: impl Iterator<Item = String>, anew: &[Setting]) -> Vec<String> {
    let key = |setting: &str| setting.split('=').next().unwrap_or_default().trim().to_owned();
    let mut command = vec!["plimsoll".to_owned()];
    let mut words = words.skip(1);
    while let Some(word) = words.next() {
        let (flag, joined) = match word.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (&*word, None),
        };
        let of_flag = anew.iter().any(|setting| setting.flag == flag);
        if !of_flag && flag != "--set" {
            command.push(word);
            continue;
        }
        let apart = joined.is_none();
        let Some(value) = joined.or_else(|| words.next()) else { continue };
        if of_flag || anew.iter().any(|setting| setting.key == key(&value)) {
            continue;
        }
        command.push(word);
        command.extend(apart.then_some(value));
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOW: Setting = Setting { flag: "--allow", key: "memory.allow", value: String::new() };
    const BUDGET: Setting = Setting { flag: "--budget", key: "memory.budget", value: String::new() };
    const DEVICES: Setting = Setting { flag: "--devices", key: "run.devices", value: String::new() };

    fn again(line: &[&str], settings: &[(Setting, &str)]) -> String {
        let given = |(setting, value): &(Setting, &str)| Setting { value: (*value).to_owned(), ..setting.clone() };
        let settings: Vec<Setting> = settings.iter().map(given).collect();
        quoted(&changed(line.iter().map(|word| (*word).to_owned()), &settings))
    }

    #[test]
    fn a_command_is_written_again_with_what_is_other_and_nothing_else() {
        let line =
            ["/bin/plimsoll", "plan", "my run.toml", "--budget", "1GiB", "--allow=bf16", "--set", "train.steps=2"];
        let same = "plimsoll plan 'my run.toml'";
        assert_eq!(
            again(&line, &[(BUDGET, "41MiB")]),
            format!("{same} --allow=bf16 --set train.steps=2 --budget 41MiB")
        );
        assert_eq!(
            again(&line, &[(ALLOW, "lora,nf4")]),
            format!("{same} --budget 1GiB --set train.steps=2 --allow lora,nf4")
        );
        let line = ["plimsoll", "train", "--devices", "cpu=1GiB", "it's"];
        let allowed = r"plimsoll train --devices cpu=1GiB 'it'\''s' --allow lora,nf4";
        assert_eq!(again(&line, &[(ALLOW, "lora,nf4")]), allowed);
        assert_eq!(again(&line, &[(DEVICES, "cpu=41MiB")]), r"plimsoll train 'it'\''s' --devices cpu=41MiB");
    }

    #[test]
    fn settings_that_would_win_over_the_change_are_left_out() {
        let line = ["plimsoll", "plan", "--set", "memory.budget=1GiB", "--set=memory.allow=[]", "--set", "run.dir=a b"];
        assert_eq!(
            again(&line, &[(ALLOW, "lora,nf4"), (BUDGET, "41MiB")]),
            "plimsoll plan --set 'run.dir=a b' --allow lora,nf4 --budget 41MiB"
        );
        let line =
            ["plimsoll", "plan", "--set=run.devices=cpu=1GiB", "--set=train.steps=2", "--set", " run.devices = cpu"];
        assert_eq!(
            again(&line, &[(ALLOW, "lora,nf4"), (DEVICES, "cpu=41MiB")]),
            "plimsoll plan --set=train.steps=2 --allow lora,nf4 --devices cpu=41MiB"
        );
    }
}
