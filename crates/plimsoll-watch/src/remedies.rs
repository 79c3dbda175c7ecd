//! Remedies for a plan that does not fit on this machine, each with the settings that apply it, least loss first. The
//! caller writes the settings as a command line, or as arguments of a Python call.

use crate::plan::does_not_fit;
use plimsoll_core::{Budget, Bytes, Failure, Plan, Remedy, Rung};
use plimsoll_device::gpu;
use plimsoll_device::probe::Memory;
use plimsoll_plan::device_request::{DeviceRequest, DevicesRequest};
use plimsoll_plan::paper;

/// A remedy with the settings that apply it.
#[derive(Clone, Debug, PartialEq)]
pub struct RemedySettings {
    /// The remedy: the rungs to allow and the load lines with which the run fits.
    pub remedy: Remedy,
    /// The load line that these settings give to the device that is too small.
    pub budget_bytes: Bytes,
    /// The settings that apply the remedy, with their new values.
    pub settings: Vec<Setting>,
}

/// A setting to change, as a command-line flag and as a run-file key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The command-line flag, such as `--budget`; `--set` for a key without a flag of its own.
    pub flag: &'static str,
    /// The run-file key with the same effect, such as `memory.budget`.
    pub key: &'static str,
    /// The new value, as written after the flag.
    pub value: String,
}

impl Setting {
    /// Returns the setting of a run-file key, with the key's own flag if it has one.
    pub fn of_key(key: &'static str, value: String) -> Setting {
        let flag = match key {
            "run.devices" => DEVICES.0,
            "memory.budget" => "--budget",
            "memory.allow" => "--allow",
            _ => SET,
        };
        Setting { flag, key, value }
    }

    /// Returns the words of the setting on a command line.
    pub fn words(&self) -> [String; 2] {
        let value = if self.flag == SET { format!("{}={}", self.key, self.value) } else { self.value.clone() };
        [self.flag.to_owned(), value]
    }
}

/// The flag that sets any key.
pub const SET: &str = "--set";

/// Returns the remedies of a plan that does not fit, with their settings. Leaves out those for which this machine has
/// too little memory, and those that lose more accuracy than another one without needing less memory. `request` is the
/// request for the plan's devices.
pub fn remedies(request: &DevicesRequest, plan: &Plan) -> Vec<RemedySettings> {
    let free = device_memory(plan).free;
    let mut remedies: Vec<RemedySettings> = Vec::new();
    for remedy in plan.needs.iter().filter_map(|remedy| with_settings(remedy, request, plan, free)) {
        if !remedies.iter().any(|before| makes_needless(before, &remedy)) {
            remedies.push(remedy);
        }
    }
    remedies
}

/// Returns the failure for a plan that does not fit. Each pair of a remedy and its command becomes a hint, in the given
/// order. If `numbered`, each hint begins with a number, by which the user chooses a remedy.
pub fn refusal(plan: &Plan, remedies: &[(RemedySettings, String)], numbered: bool) -> Failure {
    let refusal = does_not_fit(plan, remedies, Some(device_memory(plan).total), numbered);
    plan.shortfall_note.iter().cloned().fold(refusal, Failure::hint)
}

/// Returns the failure for a run whose preparation took `peak` bytes, more than the load lines of these `devices`, and
/// the settings that give each of them enough. `request` is the request for the plan's devices.
pub fn refusal_of_preparation(
    request: &DevicesRequest,
    peak: Bytes,
    devices: &[(String, Bytes)],
) -> (Failure, Vec<Setting>) {
    let passed: Vec<String> = devices.iter().map(|(name, line)| format!("{line} of {name}")).collect();
    let message = format!(
        "data and plan of this run take {peak} while they are prepared, more than the load line of {}",
        passed.join(" and of ")
    );
    // The peak varies from start to start; the settings leave room for that.
    let enough = Bytes::mib(peak.0.div_ceil(1 << 20) + 2);
    let several = request.devices.len() > 1;
    let target = |name: &String| if several { LineTarget::Named(name.clone()) } else { LineTarget::All };
    let lines = devices.iter().map(|(name, _)| (target(name), enough)).collect();
    (Failure::does_not_fit(message), settings(request, &Change { lines, ..Change::default() }))
}

/// Returns whether the remedy `less` makes the remedy `more` needless. For that, `less` must have no higher load line,
/// no rung that `more` lacks, and no new load line for the host or the scratch file. Load lines are rounded up, and may
/// be equal although the predicted bytes differ.
fn makes_needless(less: &RemedySettings, more: &RemedySettings) -> bool {
    let Remedy { allow, host_bytes: None, file_bytes: None, .. } = &less.remedy else { return false };
    less.budget_bytes <= more.budget_bytes && allow.iter().all(|rung| more.remedy.allow.contains(rung))
}

/// Returns a remedy with its settings. Returns `None` if the device or the host has less memory than the remedy needs,
/// or if the plan has no device. `free` is the free memory of the plan's first device.
fn with_settings(remedy: &Remedy, request: &DevicesRequest, plan: &Plan, free: Bytes) -> Option<RemedySettings> {
    let device = plan.devices.first()?;
    let line = device.budget_bytes;
    let round_up = |bytes: Bytes| Bytes::mib(bytes.0.div_ceil(1 << 20));
    // The memory of the process outside its arena varies from start to start; the settings leave room for that.
    let budget = (remedy.budget_bytes > line).then(|| round_up(remedy.budget_bytes) + Bytes::mib(1));
    let host = remedy.host_bytes.map(round_up);
    // The host of paper devices has any size.
    let host_free = if request.has_paper_devices() { Bytes(u64::MAX) } else { Memory::read().free };
    if budget.is_some_and(|bytes| bytes > free) || host.is_some_and(|bytes| bytes > host_free) {
        return None;
    }
    let several = request.devices.len() > 1;
    let target = if several { LineTarget::One(device.name.clone()) } else { LineTarget::All };
    let own = budget.map(|budget| (target, budget));
    let others = remedy.other_budget_bytes.iter().map(|(name, line)| (LineTarget::Named(name.clone()), *line));
    let lines = own.into_iter().chain(others).collect();
    let host = host.map(|line| (device.name.clone(), line));
    let change = Change { allow: remedy.allow.clone(), lines, host, file: remedy.file_bytes.map(round_up) };
    let settings = settings(request, &change);
    // A list that names one memory for several machines is refused, so it is no remedy.
    let is_refused = |setting: &Setting| setting.key == DEVICES.1 && setting.value.parse::<DevicesRequest>().is_err();
    let budget_bytes = budget.unwrap_or(line);
    (!settings.iter().any(is_refused)).then(|| RemedySettings { remedy: remedy.clone(), budget_bytes, settings })
}

/// Free and total bytes of a device's memory.
struct DeviceMemory {
    free: Bytes,
    total: Bytes,
}

/// Returns the memory of a plan's first device. If its name is that of no paper device and of no GPU of this machine,
/// returns the memory of this machine.
fn device_memory(plan: &Plan) -> DeviceMemory {
    let device = plan.devices.first().map(|device| device.name.as_str()).unwrap_or_default();
    let of_paper_device = paper::usable_memory(device).map(|bytes| DeviceMemory { free: bytes, total: bytes });
    let of_host = Memory::read();
    of_paper_device.or_else(|| gpu_memory(device)).unwrap_or(DeviceMemory { free: of_host.free, total: of_host.total })
}

/// Returns the memory of a GPU of this machine by its name, such as `cuda:0`. Returns `None` if this machine has no
/// such GPU, or if its free memory cannot be read.
fn gpu_memory(device: &str) -> Option<DeviceMemory> {
    let index = device.strip_prefix("cuda:")?.parse().ok()?;
    let (here, card) = gpu::find_gpu(index).ok()?;
    Some(DeviceMemory { free: gpu::free_bytes(here, card).ok()?, total: card.memory_bytes })
}

/// The devices that get a load line.
#[derive(Clone, Debug, PartialEq)]
enum LineTarget {
    /// Every device.
    All,
    /// The device of this name. If several have the name, only the one with the highest load line gets the new one.
    One(String),
    /// The device of this name. If several have the name, each with a load line below the new one gets it.
    Named(String),
}

/// A change of load lines and allowed rungs.
#[derive(Clone, Debug, Default, PartialEq)]
struct Change {
    /// The rungs to allow.
    allow: Vec<Rung>,
    /// New load lines, each with the devices that get it; empty if none changes.
    lines: Vec<(LineTarget, Bytes)>,
    /// The new load line of a host, with the name of a device beside it; `None` leaves all as they are.
    host: Option<(String, Bytes)>,
    /// The new load line of the scratch file; `None` leaves it as it is.
    file: Option<Bytes>,
}

/// The flag and the run-file key of the devices.
const DEVICES: (&str, &str) = ("--devices", "run.devices");

/// Returns the settings that make a change. `request` is the present request for the devices.
fn settings(request: &DevicesRequest, change: &Change) -> Vec<Setting> {
    let Change { allow, lines, host, file } = change;
    let in_devices = devices_have_budgets(request) || lines.iter().any(|(target, _)| *target != LineTarget::All);
    let mut settings = Vec::new();
    if !allow.is_empty() {
        let names: Vec<String> = allow.iter().map(Rung::to_string).collect();
        settings.push(Setting { flag: "--allow", key: "memory.allow", value: names.join(",") });
    }
    if let ([(LineTarget::All, bytes)], false) = (&lines[..], in_devices) {
        let value = Budget::Amount(*bytes).to_string();
        settings.push(Setting { flag: "--budget", key: "memory.budget", value });
    }
    if host.is_some() || file.is_some() || !lines.is_empty() && in_devices {
        let mut request = request.clone();
        for (target, bytes) in lines.iter().filter(|_| in_devices) {
            set_load_line(&mut request, target, *bytes);
        }
        if let Some((device, line)) = host {
            request.set_host_beside(device, Budget::Amount(*line));
        }
        request.file = file.map(Budget::Amount).or(request.file);
        settings.push(Setting { flag: DEVICES.0, key: DEVICES.1, value: request.to_string() });
    }
    settings
}

/// Returns whether the request itself sets the load line of at least one device, as `cpu=1GiB` does. `memory.budget`
/// does not change such a load line.
fn devices_have_budgets(request: &DevicesRequest) -> bool {
    request.devices.iter().any(|device| device.budget().is_some())
}

/// Sets the load line of the devices that `target` names in the request to `bytes`.
fn set_load_line(request: &mut DevicesRequest, target: &LineTarget, bytes: Bytes) {
    let all = 0..request.devices.len();
    let named = |name: &String| all.clone().filter(|&at| request.devices[at].name() == *name).collect::<Vec<_>>();
    let targets = match target {
        LineTarget::All => all.collect(),
        LineTarget::One(name) => {
            let lines = named(name).into_iter().rev();
            lines.max_by_key(|&at| paper_load_line(&request.devices[at])).into_iter().collect()
        }
        LineTarget::Named(name) => match &named(name)[..] {
            [one] => vec![*one],
            several => several.iter().copied().filter(|&at| paper_load_line(&request.devices[at]) < bytes).collect(),
        },
    };
    targets.into_iter().for_each(|at| request.devices[at].set_budget(Budget::Amount(bytes)));
}

/// Returns the load line of a requested paper device, with the default budget if it names none. Returns zero for any
/// other device.
fn paper_load_line(device: &DeviceRequest) -> Bytes {
    device.paper_spec(Budget::DEVICE).map_or(Bytes::ZERO, |device| device.budget)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_load_lines_are_raised_alone() {
        let raised = |devices: &str, passed: &[(&str, u64)]| {
            let passed: Vec<_> = passed.iter().map(|(name, line)| ((*name).to_owned(), Bytes::mib(*line))).collect();
            let (failure, settings) = refusal_of_preparation(&devices.parse().unwrap(), Bytes(33_000_000), &passed);
            let settings: Vec<_> =
                settings.iter().map(|setting| format!("{} {}", setting.flag, setting.value)).collect();
            (failure.message, settings.join(" "))
        };
        let (message, settings) = raised("virtual:a=48MiB@1,virtual:b=30MiB@0.5", &[("virtual:b", 30)]);
        let expected = "data and plan of this run take 31.47 MiB while they are prepared, more than the load line of 30.00 \
                        MiB of virtual:b";
        assert_eq!(message, expected);
        assert_eq!(settings, "--devices virtual:a=48MiB@1,virtual:b=34MiB@0.5");
        assert_eq!(raised("cpu", &[("cpu", 30)]).1, "--budget 34MiB");
        assert_eq!(raised("cpu=30MiB", &[("cpu", 30)]).1, "--devices cpu=34MiB");
    }

    #[test]
    fn settings_change_the_flag_that_set_the_line() {
        let host = Some(("pc2/rtx3070".to_owned(), Bytes::gib(3)));
        let lines = vec![(LineTarget::All, Bytes::mib(41))];
        let line_and_host = Change { lines, host, ..Change::default() };
        let flags = |devices: &str, change: &Change| {
            let settings = settings(&devices.parse().unwrap(), change);
            settings.iter().map(|setting| format!("{} {}", setting.flag, setting.value)).collect::<Vec<_>>().join(" ")
        };
        let line = Change { host: None, ..line_and_host.clone() };
        assert_eq!(flags("auto", &line), "--budget 41MiB");
        assert_eq!(flags("cpu", &line), "--budget 41MiB");
        assert_eq!(flags("cpu=1GiB", &line), "--devices cpu=41MiB");
        assert_eq!(flags("virtual:a=600MiB@0.5,host=1GiB", &line), "--devices virtual:a=41MiB@0.5,host=1GiB");
        assert_eq!(flags("rtx3070", &line_and_host), "--budget 41MiB --devices rtx3070,host=3GiB");
        let line_of = |name: &str, mib| (LineTarget::Named(name.to_owned()), Bytes::mib(mib));
        let one = Change { lines: vec![line_of("rtx3070", 41)], ..line.clone() };
        assert_eq!(flags("rtx3090,rtx3070", &one), "--devices rtx3090,rtx3070=41MiB");
        let two = Change { lines: vec![line_of("rtx3070", 41), line_of("rtx3090", 43)], ..line.clone() };
        assert_eq!(flags("rtx3090,rtx3070", &two), "--devices rtx3090=43MiB,rtx3070=41MiB");
        assert_eq!(flags("rtx3070=6GiB,rtx3070=12MiB", &one), "--devices rtx3070=6GiB,rtx3070=41MiB");
        let most = Change { lines: vec![(LineTarget::One("rtx3070".to_owned()), Bytes::mib(41))], ..line.clone() };
        assert_eq!(flags("rtx3070=9MiB,rtx3070=12MiB", &most), "--devices rtx3070=9MiB,rtx3070=41MiB");
        let file = Change { file: Some(Bytes::gib(9)), ..Change::default() };
        assert_eq!(flags("auto", &file), "--devices auto,file=9GiB");
        assert_eq!(flags("rtx3070,host=2GiB,file=1GiB", &file), "--devices rtx3070,host=2GiB,file=9GiB");
        let host = Change { lines: vec![], ..line_and_host };
        assert_eq!(flags("virtual:a=600MiB@0.5,host=1GiB", &host), "--devices virtual:a=600MiB@0.5,host=3GiB");
        assert_eq!(flags("pc1/h200,pc2/rtx3070,pc2/host=1GiB", &host), "--devices pc1/h200,pc2/rtx3070,pc2/host=3GiB");
        let allow = Change { allow: vec![Rung::Lora, Rung::Nf4], ..Change::default() };
        assert_eq!(flags("cpu=1GiB", &allow), "--allow lora,nf4");
    }

    #[test]
    fn remedy_with_needless_loss_is_dropped() {
        let remedy = |allow: &[Rung], mib, host_bytes| RemedySettings {
            remedy: Remedy {
                allow: allow.to_vec(),
                budget_bytes: Bytes::mib(mib),
                host_bytes,
                file_bytes: None,
                peak_bytes: None,
                other_budget_bytes: std::collections::BTreeMap::new(),
            },
            budget_bytes: Bytes::mib(mib),
            settings: vec![],
        };
        let lora = remedy(&[Rung::Lora], 41, None);
        let with_nf4 = |mib| remedy(&[Rung::Lora, Rung::Nf4], mib, None);
        assert!(makes_needless(&lora, &with_nf4(41)) && makes_needless(&lora, &with_nf4(42)));
        assert!(!makes_needless(&lora, &with_nf4(40)), "more is lost for a lower line");
        assert!(!makes_needless(&lora, &remedy(&[Rung::Adam8bit], 41, None)), "it loses something else");
        assert!(
            !makes_needless(&remedy(&[Rung::Lora], 41, Some(Bytes::gib(1))), &with_nf4(41)),
            "the host may be short"
        );
    }
}
