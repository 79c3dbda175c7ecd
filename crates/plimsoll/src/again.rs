//! The command that was typed, written down once more with other load lines or permissions: for hints that can be
//! copied as they are, and taken where somebody says so.

use plimsoll_core::{Budget, Bytes, Rung};
use plimsoll_plan::request::{DeviceRequest, DevicesRequest};
use plimsoll_watch::text::shell_word;

/// What is other in the command.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// The rungs that are allowed.
    pub allow: Vec<Rung>,
    /// The load line of every device, or of those of one name.
    pub budget: Option<Bytes>,
    /// That name.
    pub device: Option<String>,
    /// The load line of the host.
    pub host: Option<Bytes>,
    /// That of the scratch file.
    pub file: Option<Bytes>,
}

/// The words of a command with a change. `request` is what the command's devices come to.
pub fn changed(words: impl Iterator<Item = String>, request: &DevicesRequest, change: &Change) -> Vec<String> {
    let Change { allow, budget, device, host, file } = change;
    let in_devices = devices_have_budgets(request) || device.is_some();
    let mut flags: Vec<(&str, &str, String)> = Vec::new();
    if !allow.is_empty() {
        let names: Vec<String> = allow.iter().map(Rung::to_string).collect();
        flags.push(("--allow", "memory.allow", names.join(",")));
    }
    if let (Some(bytes), false) = (*budget, in_devices) {
        flags.push(("--budget", "memory.budget", Budget::Amount(bytes).to_string()));
    }
    if host.is_some() || file.is_some() || budget.is_some() && in_devices {
        let mut request = request.clone();
        if let (Some(bytes), true) = (*budget, in_devices) {
            give(&mut request, device.as_deref(), bytes);
        }
        request.host = host.map(Budget::Amount).or(request.host);
        request.file = file.map(Budget::Amount).or(request.file);
        flags.push(("--devices", "run.devices", request.to_string()));
    }
    let mut command = without(words, &flags.iter().map(|(flag, key, _)| (*flag, *key)).collect::<Vec<_>>());
    command.extend(flags.into_iter().flat_map(|(flag, _, value)| [flag.to_owned(), value]));
    command
}

/// Words as a shell reads them.
pub fn quoted(words: &[String]) -> String {
    words.iter().map(|word| shell_word(word)).collect::<Vec<_>>().join(" ")
}

/// The command's words without the flags that are given anew. `--set` of the same keys goes too: it would win over the
/// flag.
fn without(words: impl Iterator<Item = String>, anew: &[(&str, &str)]) -> Vec<String> {
    let key = |setting: &str| setting.split('=').next().unwrap_or_default().trim().to_owned();
    let mut command = vec!["plimsoll".to_owned()];
    let mut words = words.skip(1);
    while let Some(word) = words.next() {
        let (flag, joined) = match word.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (&*word, None),
        };
        let of_flag = anew.iter().any(|&(known, _)| known == flag);
        if !of_flag && flag != "--set" {
            command.push(word);
            continue;
        }
        let apart = joined.is_none();
        let Some(value) = joined.or_else(|| words.next()) else { continue };
        if of_flag || anew.iter().any(|&(_, known)| known == key(&value)) {
            continue;
        }
        command.push(word);
        command.extend(apart.then_some(value));
    }
    command
}

/// Whether a device has a load line of its own, which `--budget` does not move.
pub fn devices_have_budgets(request: &DevicesRequest) -> bool {
    request.devices.iter().any(|device| match device {
        DeviceRequest::Cpu { budget } | DeviceRequest::Cuda { budget, .. } | DeviceRequest::Paper { budget, .. } => {
            budget.is_some()
        }
        DeviceRequest::Virtual { .. } => true,
    })
}

/// Gives every device this load line, or those of one name.
fn give(request: &mut DevicesRequest, name: Option<&str>, bytes: Bytes) {
    let amount = Budget::Amount(bytes);
    for device in request.devices.iter_mut().filter(|device| name.is_none_or(|name| device.name() == name)) {
        match device {
            DeviceRequest::Cpu { budget }
            | DeviceRequest::Cuda { budget, .. }
            | DeviceRequest::Paper { budget, .. } => *budget = Some(amount),
            DeviceRequest::Virtual { budget, .. } => *budget = amount,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNGS: &[Rung] = &[Rung::Lora, Rung::Nf4];

    fn again(line: &[&str], devices: &str, change: &Change) -> String {
        quoted(&changed(line.iter().map(|word| (*word).to_owned()), &devices.parse().unwrap(), change))
    }

    #[test]
    fn a_command_is_written_again_with_what_is_other_and_nothing_else() {
        let budget = Change { budget: Some(Bytes::mib(41)), ..Change::default() };
        let allow = Change { allow: RUNGS.to_vec(), ..Change::default() };
        let line =
            ["/bin/plimsoll", "plan", "my run.toml", "--budget", "1GiB", "--allow=bf16", "--set", "train.steps=2"];
        let same = "plimsoll plan 'my run.toml'";
        assert_eq!(again(&line, "cpu", &budget), format!("{same} --allow=bf16 --set train.steps=2 --budget 41MiB"));
        assert_eq!(again(&line, "cpu", &allow), format!("{same} --budget 1GiB --set train.steps=2 --allow lora,nf4"));
        let line = ["plimsoll", "train", "--devices", "cpu=1GiB", "it's"];
        assert_eq!(again(&line, "cpu=1GiB", &allow), r"plimsoll train --devices cpu=1GiB 'it'\''s' --allow lora,nf4");
        assert_eq!(again(&line, "cpu=1GiB", &budget), r"plimsoll train 'it'\''s' --devices cpu=41MiB");
    }

    #[test]
    fn settings_that_would_win_over_the_change_are_left_out() {
        let change = Change { allow: RUNGS.to_vec(), budget: Some(Bytes::mib(41)), ..Change::default() };
        let line = ["plimsoll", "plan", "--set", "memory.budget=1GiB", "--set=memory.allow=[]", "--set", "run.dir=a b"];
        assert_eq!(again(&line, "cpu", &change), "plimsoll plan --set 'run.dir=a b' --allow lora,nf4 --budget 41MiB");
        let line =
            ["plimsoll", "plan", "--set=run.devices=cpu=1GiB", "--set=train.steps=2", "--set", " run.devices = cpu"];
        assert_eq!(
            again(&line, "cpu=1GiB", &change),
            "plimsoll plan --set=train.steps=2 --allow lora,nf4 --devices cpu=41MiB"
        );
    }

    #[test]
    fn load_lines_are_given_where_they_are_taken_from() {
        let line = ["plimsoll", "plan"];
        let (budget, host) = (Some(Bytes::mib(41)), Some(Bytes::gib(3)));
        let both = Change { budget, host, ..Change::default() };
        let flags = |devices: &str, change: &Change| again(&line, devices, change)["plimsoll plan ".len()..].to_owned();
        let line = Change { host: None, ..both.clone() };
        assert_eq!(flags("auto", &line), "--budget 41MiB");
        assert_eq!(flags("cpu", &line), "--budget 41MiB");
        assert_eq!(flags("cpu=1GiB", &line), "--devices cpu=41MiB");
        assert_eq!(flags("virtual:a=600MiB@0.5,host=1GiB", &line), "--devices virtual:a=41MiB@0.5,host=1GiB");
        assert_eq!(flags("rtx3070", &both), "--budget 41MiB --devices rtx3070,host=3GiB");
        let one = Change { device: Some("rtx3070".into()), ..line.clone() };
        assert_eq!(
            again(&["plimsoll", "plan"], "rtx3090,rtx3070", &one),
            "plimsoll plan --devices rtx3090,rtx3070=41MiB"
        );
        let file = Change { file: Some(Bytes::gib(9)), ..Change::default() };
        assert_eq!(flags("auto", &file), "--devices auto,file=9GiB");
        assert_eq!(flags("rtx3070,host=2GiB,file=1GiB", &file), "--devices rtx3070,host=2GiB,file=9GiB");
        let host = Change { budget: None, ..both };
        assert_eq!(flags("virtual:a=600MiB@0.5,host=1GiB", &host), "--devices virtual:a=600MiB@0.5,host=3GiB");
    }
}
