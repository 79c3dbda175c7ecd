//! The command that was typed, written down once more with another budget: for hints that can be
//! copied as they are.

use plimsoll_core::{Budget, Bytes};
use plimsoll_plan::request::{DeviceRequest, DevicesRequest};
use plimsoll_watch::text::shell_word;

/// The command's words without the flags that a hint gives anew, quoted for a shell. `--set` of the same
/// keys goes too: it would win over the flag.
pub fn command(words: impl Iterator<Item = String>, devices_have_budgets: bool) -> String {
    const ANEW: [(&str, &str); 3] =
        [("--budget", "memory.budget"), ("--allow", "memory.allow"), ("--devices", "run.devices")];
    let anew = if devices_have_budgets { &ANEW[..] } else { &ANEW[..2] };
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
            command.push(shell_word(&word));
            continue;
        }
        let apart = joined.is_none();
        let Some(value) = joined.or_else(|| words.next()) else { continue };
        if of_flag || anew.iter().any(|&(_, known)| known == key(&value)) {
            continue;
        }
        match apart {
            true => command.extend([shell_word(&word), shell_word(&value)]),
            false => command.push(shell_word(&word)),
        }
    }
    command.join(" ")
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

/// The flag that gives every device this budget.
pub fn budget_flag(request: &DevicesRequest, bytes: Bytes) -> String {
    let amount = Budget::Amount(bytes);
    if !devices_have_budgets(request) {
        return format!("--budget {amount}");
    }
    let mut request = request.clone();
    for device in &mut request.devices {
        match device {
            DeviceRequest::Cpu { budget }
            | DeviceRequest::Cuda { budget, .. }
            | DeviceRequest::Paper { budget, .. } => *budget = Some(amount),
            DeviceRequest::Virtual { budget, .. } => *budget = amount,
        }
    }
    format!("--devices {request}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(line: &[&str], with_devices: bool) -> String {
        command(line.iter().map(|word| (*word).to_owned()), with_devices)
    }

    #[test]
    fn a_command_is_written_again_without_what_the_hint_gives() {
        let line =
            ["/bin/plimsoll", "plan", "my run.toml", "--budget", "1GiB", "--allow=bf16", "--set", "train.steps=2"];
        assert_eq!(again(&line, false), "plimsoll plan 'my run.toml' --set train.steps=2");
        let line = ["plimsoll", "train", "--devices", "cpu=1GiB", "it's"];
        assert_eq!(again(&line, false), r"plimsoll train --devices cpu=1GiB 'it'\''s'");
        assert_eq!(again(&line, true), r"plimsoll train 'it'\''s'");
    }

    #[test]
    fn settings_that_would_win_over_the_hint_are_left_out() {
        let line = ["plimsoll", "plan", "--set", "memory.budget=1GiB", "--set=memory.allow=[]", "--set", "run.dir=a b"];
        assert_eq!(again(&line, false), "plimsoll plan --set 'run.dir=a b'");
        let line =
            ["plimsoll", "plan", "--set=run.devices=cpu=1GiB", "--set=train.steps=2", "--set", " run.devices = cpu"];
        assert_eq!(
            again(&line, false),
            "plimsoll plan --set=run.devices=cpu=1GiB --set=train.steps=2 --set ' run.devices = cpu'"
        );
        assert_eq!(again(&line, true), "plimsoll plan --set=train.steps=2");
    }

    #[test]
    fn a_budget_is_given_where_the_device_takes_it_from() {
        let flag = |devices: &str| budget_flag(&devices.parse().unwrap(), Bytes::mib(41));
        assert_eq!(flag("auto"), "--budget 41MiB");
        assert_eq!(flag("cpu"), "--budget 41MiB");
        assert_eq!(flag("cpu=1GiB"), "--devices cpu=41MiB");
        assert_eq!(flag("virtual:a=600MiB@0.5,host=1GiB"), "--devices virtual:a=41MiB@0.5,host=1GiB");
    }
}
