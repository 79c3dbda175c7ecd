//! What would make a plan fit on this machine: ways, cheapest loss first, each as the settings that take it. Whoever
//! asked writes them down as a command, or as the arguments of a call.

use crate::plan::does_not_fit;
use plimsoll_core::{Budget, Bytes, Failure, Need, Plan, Rung};
use plimsoll_device::cuda;
use plimsoll_device::probe::Memory;
use plimsoll_plan::paper;
use plimsoll_plan::request::{DeviceRequest, DevicesRequest};

/// A way to make a plan fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Way {
    /// What it takes.
    pub need: Need,
    /// The load line that the settings give the device.
    pub line_bytes: Bytes,
    /// What is set.
    pub settings: Vec<Setting>,
}

/// A key that is given another value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The flag of a command.
    pub flag: &'static str,
    /// The key of the run file.
    pub key: &'static str,
    /// The value, as it is written behind the flag.
    pub value: String,
}

/// All ways that this machine has room for. `request` is what the plan's devices were asked for with.
pub fn ways(request: &DevicesRequest, plan: &Plan) -> Vec<Way> {
    let (free, _) = memory_of(plan);
    let mut ways: Vec<Way> = Vec::new();
    for found in plan.needs.iter().filter_map(|need| way(need, request, plan, free)) {
        if !ways.iter().any(|before| is_enough(before, &found)) {
            ways.push(found);
        }
    }
    ways
}

/// Says that a plan does not fit, with the words that take each way, ready to be copied; numbered where somebody is asked
/// which one to take.
pub fn refusal(plan: &Plan, ways: &[(Way, String)], numbered: bool) -> Failure {
    let refusal = does_not_fit(plan, ways, Some(memory_of(plan).1), numbered);
    plan.learned.iter().cloned().fold(refusal, Failure::hint)
}

/// Whether rungs of a way alone fit under the load line of another's settings, which name them and more: those
/// would take no more than these. Lines of settings are rounded up, so two may be one that differ by less.
fn is_enough(less: &Way, more: &Way) -> bool {
    let Need { allow, host_bytes: None, file_bytes: None, .. } = &less.need else { return false };
    less.line_bytes <= more.line_bytes && allow.iter().all(|rung| more.need.allow.contains(rung))
}

fn way(need: &Need, request: &DevicesRequest, plan: &Plan, free: Bytes) -> Option<Way> {
    let device = plan.devices.first()?;
    let line = device.budget_bytes;
    let whole = |bytes: Bytes| Bytes::mib(bytes.0.div_ceil(1 << 20));
    // What the process holds beside its arena wavers from start to start: the ready settings have room for that.
    let budget = (need.budget_bytes > line).then(|| whole(need.budget_bytes) + Bytes::mib(1));
    let host = need.host_bytes.map(whole);
    // On paper there is as much of the host as one writes down.
    let host_has = if request.on_paper() { Bytes(u64::MAX) } else { Memory::read().free };
    if budget.is_some_and(|bytes| bytes > free) || host.is_some_and(|bytes| bytes > host_has) {
        return None;
    }
    let several = request.devices.len() > 1;
    let whose = if several { Whose::One(device.name.clone()) } else { Whose::All };
    let own = budget.map(|budget| (whose, budget));
    let others = need.others.iter().map(|(name, line)| (Whose::Named(name.clone()), *line));
    let lines = own.into_iter().chain(others).collect();
    let change = Change { allow: need.allow.clone(), lines, host, file: need.file_bytes.map(whole) };
    Some(Way { need: need.clone(), line_bytes: budget.unwrap_or(line), settings: settings(request, &change) })
}

/// What is free of the memory of a plan's device, and how much it has.
fn memory_of(plan: &Plan) -> (Bytes, Bytes) {
    let device = plan.devices.first().map(|device| device.name.as_str()).unwrap_or_default();
    let alone = paper::usable(device).map(|bytes| (bytes, bytes));
    let memory = Memory::read();
    alone.or_else(|| memory_of_gpu(device)).unwrap_or((memory.free, memory.total))
}

/// What is free of the memory of a GPU of this machine, by its name, and how much it has.
fn memory_of_gpu(device: &str) -> Option<(Bytes, Bytes)> {
    let index = device.strip_prefix("cuda:")?.parse().ok()?;
    let (here, card) = cuda::open::card(index).ok()?;
    Some((cuda::open::free_bytes(here, card).ok()?, card.memory_bytes))
}

/// Whose load line it is.
#[derive(Clone, Debug, PartialEq)]
enum Whose {
    /// That of every device.
    All,
    /// That of the device of this name; of several, the one that has most.
    One(String),
    /// That of all of this name.
    Named(String),
}

/// What is other in a way.
#[derive(Clone, Debug, Default, PartialEq)]
struct Change {
    /// The rungs that are allowed.
    allow: Vec<Rung>,
    /// Load lines.
    lines: Vec<(Whose, Bytes)>,
    /// The load line of the host.
    host: Option<Bytes>,
    /// That of the scratch file.
    file: Option<Bytes>,
}

/// The settings of a change. `request` is what the devices were asked for with.
fn settings(request: &DevicesRequest, change: &Change) -> Vec<Setting> {
    let Change { allow, lines, host, file } = change;
    let in_devices = devices_have_budgets(request) || lines.iter().any(|(whose, _)| *whose != Whose::All);
    let mut settings = Vec::new();
    if !allow.is_empty() {
        let names: Vec<String> = allow.iter().map(Rung::to_string).collect();
        settings.push(Setting { flag: "--allow", key: "memory.allow", value: names.join(",") });
    }
    if let ([(Whose::All, bytes)], false) = (&lines[..], in_devices) {
        let value = Budget::Amount(*bytes).to_string();
        settings.push(Setting { flag: "--budget", key: "memory.budget", value });
    }
    if host.is_some() || file.is_some() || !lines.is_empty() && in_devices {
        let mut request = request.clone();
        for (whose, bytes) in lines.iter().filter(|_| in_devices) {
            give(&mut request, whose, *bytes);
        }
        request.host = host.map(Budget::Amount).or(request.host);
        request.file = file.map(Budget::Amount).or(request.file);
        settings.push(Setting { flag: "--devices", key: "run.devices", value: request.to_string() });
    }
    settings
}

/// Whether a device has a load line of its own, which `memory.budget` does not move.
fn devices_have_budgets(request: &DevicesRequest) -> bool {
    request.devices.iter().any(|device| device.budget().is_some())
}

/// Gives devices this load line. Of several on paper that have one name, who has more keeps it.
fn give(request: &mut DevicesRequest, whose: &Whose, bytes: Bytes) {
    let line = |device: &DeviceRequest| match device {
        DeviceRequest::Paper { name, budget, .. } => {
            paper::paper(name, budget.unwrap_or(Budget::DEVICE)).map_or(Bytes::ZERO, |device| device.budget)
        }
        _ => Bytes::ZERO,
    };
    let all = 0..request.devices.len();
    let of = |name: &String| all.clone().filter(|&at| request.devices[at].name() == *name).collect::<Vec<_>>();
    let given = match whose {
        Whose::All => all.collect(),
        Whose::One(name) => {
            of(name).into_iter().rev().max_by_key(|&at| line(&request.devices[at])).into_iter().collect()
        }
        Whose::Named(name) => match &of(name)[..] {
            [one] => vec![*one],
            several => several.iter().copied().filter(|&at| line(&request.devices[at]) < bytes).collect(),
        },
    };
    given.into_iter().for_each(|at| request.devices[at].give(Budget::Amount(bytes)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_lines_are_given_where_they_are_taken_from() {
        let (lines, host) = (vec![(Whose::All, Bytes::mib(41))], Some(Bytes::gib(3)));
        let both = Change { lines, host, ..Change::default() };
        let flags = |devices: &str, change: &Change| {
            let settings = settings(&devices.parse().unwrap(), change);
            settings.iter().map(|setting| format!("{} {}", setting.flag, setting.value)).collect::<Vec<_>>().join(" ")
        };
        let line = Change { host: None, ..both.clone() };
        assert_eq!(flags("auto", &line), "--budget 41MiB");
        assert_eq!(flags("cpu", &line), "--budget 41MiB");
        assert_eq!(flags("cpu=1GiB", &line), "--devices cpu=41MiB");
        assert_eq!(flags("virtual:a=600MiB@0.5,host=1GiB", &line), "--devices virtual:a=41MiB@0.5,host=1GiB");
        assert_eq!(flags("rtx3070", &both), "--budget 41MiB --devices rtx3070,host=3GiB");
        let of = |name: &str, mib| (Whose::Named(name.to_owned()), Bytes::mib(mib));
        let one = Change { lines: vec![of("rtx3070", 41)], ..line.clone() };
        assert_eq!(flags("rtx3090,rtx3070", &one), "--devices rtx3090,rtx3070=41MiB");
        let two = Change { lines: vec![of("rtx3070", 41), of("rtx3090", 43)], ..line.clone() };
        assert_eq!(flags("rtx3090,rtx3070", &two), "--devices rtx3090=43MiB,rtx3070=41MiB");
        assert_eq!(flags("rtx3070=6GiB,rtx3070=12MiB", &one), "--devices rtx3070=6GiB,rtx3070=41MiB");
        let most = Change { lines: vec![(Whose::One("rtx3070".to_owned()), Bytes::mib(41))], ..line.clone() };
        assert_eq!(flags("rtx3070=9MiB,rtx3070=12MiB", &most), "--devices rtx3070=9MiB,rtx3070=41MiB");
        let file = Change { file: Some(Bytes::gib(9)), ..Change::default() };
        assert_eq!(flags("auto", &file), "--devices auto,file=9GiB");
        assert_eq!(flags("rtx3070,host=2GiB,file=1GiB", &file), "--devices rtx3070,host=2GiB,file=9GiB");
        let host = Change { lines: vec![], ..both };
        assert_eq!(flags("virtual:a=600MiB@0.5,host=1GiB", &host), "--devices virtual:a=600MiB@0.5,host=3GiB");
        let allow = Change { allow: vec![Rung::Lora, Rung::Nf4], ..Change::default() };
        assert_eq!(flags("cpu=1GiB", &allow), "--allow lora,nf4");
    }

    #[test]
    fn settings_that_would_take_less_than_they_name_are_not_named() {
        let way = |allow: &[Rung], mib, host_bytes| Way {
            need: Need {
                allow: allow.to_vec(),
                budget_bytes: Bytes::mib(mib),
                host_bytes,
                file_bytes: None,
                peak_bytes: None,
                others: std::collections::BTreeMap::new(),
            },
            line_bytes: Bytes::mib(mib),
            settings: vec![],
        };
        let lora = way(&[Rung::Lora], 41, None);
        let with_nf4 = |mib| way(&[Rung::Lora, Rung::Nf4], mib, None);
        assert!(is_enough(&lora, &with_nf4(41)) && is_enough(&lora, &with_nf4(42)));
        assert!(!is_enough(&lora, &with_nf4(40)), "more is lost for a lower line");
        assert!(!is_enough(&lora, &way(&[Rung::Adam8bit], 41, None)), "it loses something else");
        assert!(!is_enough(&way(&[Rung::Lora], 41, Some(Bytes::gib(1))), &with_nf4(41)), "the host may be short");
    }
}
