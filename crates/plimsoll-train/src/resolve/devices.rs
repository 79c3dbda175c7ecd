//! The devices that a run file names, here, on paper or in a cluster: whether they are there, what they hold under their load
//! lines and how fast they are, from what was measured before or is measured now. What is planned on them is not here.

use super::example::{example_pair, model_is_example};
use crate::config::RunFile;
use crate::planning::charges::{charges, rounded};
use crate::remote;
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Failure, Link, NcclSpec, Rates};
use plimsoll_device::calibration::{self, Short, Shortfall};
use plimsoll_device::cuda::gpus::{Card, Here};
use plimsoll_device::device::DeviceError;
use plimsoll_device::probe::{Cpu, Memory, auto_pace};
use plimsoll_device::{cuda, process};
use plimsoll_plan::paper;
use plimsoll_plan::request::{DeviceRequest, DevicesRequest, LinkRequest};
use serde::Serialize;

/// The devices that a run file names, at least one, with their load lines.
///
/// # Errors
/// Devices that are not here, or cannot be used together.
pub fn devices(file: &RunFile) -> Result<Vec<DeviceSpec>, Failure> {
    let mut devices = open_devices(file)?;
    for device in &mut devices {
        // What a virtual device was made with, or one on another host has, is the most that its line comes to.
        let bounded = device.kind == DeviceKind::Virtual || device.host().is_some();
        if let Some(moved) = file.moved.get(&device.name).filter(|_| bounded) {
            device.budget = device.budget.min(moved.of(device.budget));
        }
        for short in calibration::shortfalls(device) {
            match short.of {
                Short::LineBytes(line) => device.budget = device.budget.min(line),
                Short::Slower(times) => device.rates = device.rates.paced(1.0 / times),
            }
        }
    }
    Ok(devices)
}

/// What the plan of a device follows that earlier runs have found out, in words.
pub(crate) fn learned(device: &DeviceSpec) -> Option<String> {
    let name = &device.name;
    let of = |short: &Shortfall| match short.of {
        Short::LineBytes(line) if line != device.budget => None,
        Short::LineBytes(line) => {
            Some(format!("{name} is held to {line}, because a run fell short of more ({})", short.why))
        }
        Short::Slower(times) => Some(format!("{name} is {times} times slower than it measured ({})", short.why)),
    };
    let all: Vec<String> = calibration::shortfalls(device).iter().filter_map(of).collect();
    (!all.is_empty()).then(|| format!("learned: {}; plimsoll devices --forget takes that back", all.join("; ")))
}

/// That rates were measured just now beside other programs, in words.
pub fn disturbed() -> Option<String> {
    calibration::disturbed().map(|share| {
        format!(
            "rates: others took {:.0} % of the processor's time while it was measured, so predicted times may be far off, and \
             no share of the peak is told; it is measured again after some minutes, until it is left alone; plimsoll bench \
             devices, on a machine that is, does so once and for all",
            100.0 * share
        )
    })
}

/// What can be said of the devices that are asked for before any is looked at.
///
/// # Errors
/// Devices that want more of this machine's cores or memory than there is.
pub fn check_asked(file: &RunFile) -> Result<(), Failure> {
    let devices = file.devices().devices;
    check_paces(&devices, Cpu::read().usable_cores())?;
    check_lines(file, &devices, Memory::read().total)
}

/// A device of this machine that is named, with its load line: what is known of it before anything is measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Named {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Its load line.
    pub budget: Bytes,
}

/// The devices that a run file names one by one. Nothing is measured: who joins a cluster needs no rates.
///
/// # Errors
/// Devices that are not here, or cannot be used.
pub fn named(file: &RunFile) -> Result<Vec<Named>, Failure> {
    check_asked(file)?;
    let mut found = Vec::new();
    let mut add = |name: String, kind, own, free| {
        let budget = file.line_of(&name, own).of(free);
        found.push(Named { name, kind, budget });
    };
    for asked in &file.devices().devices {
        let (name, own, memory) = (asked.name(), asked.budget(), Memory::read().free);
        match asked {
            DeviceRequest::Cpu { .. } => add(name, DeviceKind::Cpu, own, memory),
            DeviceRequest::Virtual { .. } => add(name, DeviceKind::Virtual, own, memory),
            DeviceRequest::Paper { .. } => add(name, DeviceKind::Paper, own, Bytes::ZERO),
            DeviceRequest::Cuda { index, .. } => {
                for (here, card) in cards(*index)? {
                    add(format!("cuda:{}", card.index), DeviceKind::Cuda, own, free_on(here, card, file, own)?);
                }
            }
            DeviceRequest::Elsewhere { .. } | DeviceRequest::Ray { .. } => {
                return Err(Failure::input(format!("run.devices: `{name}` is a device of a cluster"))
                    .hint("name devices of this machine, such as cuda:0 or cpu; plimsoll devices lists them"));
            }
        }
    }
    Ok(found)
}

/// That amounts which are given as load lines are there. A share always is.
///
/// # Errors
/// Those in this machine's memory are more than `total`: nothing would hold the devices under them.
fn check_lines(file: &RunFile, devices: &[DeviceRequest], total: Bytes) -> Result<(), Failure> {
    let of_machine =
        |asked: &&DeviceRequest| matches!(asked, DeviceRequest::Cpu { .. } | DeviceRequest::Virtual { .. });
    // Of one that was moved while the run was under way its new place is what counts.
    let named = |asked: &DeviceRequest| {
        let budget = (!file.moved.contains_key(&asked.name())).then(|| asked.budget().unwrap_or(file.memory.line()));
        budget.and_then(Budget::amount).map(|line| (asked.name(), line))
    };
    let given: Vec<(String, Bytes)> = devices.iter().filter(of_machine).filter_map(named).collect();
    let own = devices.iter().filter(of_machine).any(|asked| asked.budget().is_some());
    above(if own { "run.devices" } else { "memory.budget" }, &given, "this machine", total)?;
    if devices.iter().any(|asked| matches!(asked, DeviceRequest::Cuda { .. } | DeviceRequest::Virtual { .. })) {
        let key = if file.devices().host.is_some() { "run.devices" } else { "memory.host" };
        let given = file.host().amount().map(|line| ("host".to_owned(), line));
        above(key, given.as_slice(), "this machine", total)?;
    }
    Ok(())
}

/// That load lines are no more than `total`, which `place` has.
fn above(key: &str, given: &[(String, Bytes)], place: &str, total: Bytes) -> Result<(), Failure> {
    let sum: Bytes = given.iter().map(|(_, line)| *line).sum();
    // Where the system does not say what there is, nobody knows better.
    if sum <= total || total == Bytes::ZERO {
        return Ok(());
    }
    let names: Vec<&str> = given.iter().map(|(name, _)| &**name).collect();
    let message = format!("{key}: {} may hold {sum}, and {place} has {total}", names.join(" and "));
    Err(Failure::input(message).hint("name amounts that are there, or shares of what is free, such as 50%"))
}

/// What a load line of a GPU may be a share of, for a device of which an amount is no more than there is.
///
/// # Errors
/// It is more, or the driver refuses.
fn free_on(here: &'static Here, card: &Card, file: &RunFile, own: Option<Budget>) -> Result<Bytes, Failure> {
    let name = format!("cuda:{}", card.index);
    let key = if own.is_some() { "run.devices" } else { "memory.budget" };
    let given = own.unwrap_or(file.memory.line()).amount().filter(|_| !file.moved.contains_key(&name));
    let given = given.map(|line| (name, line));
    above(key, given.as_slice(), &card.name, card.memory_bytes)?;
    Ok(cuda::open::free_bytes(here, card)?)
}

/// Measures what nobody has measured of this processor yet, for the one device that a run file names, in what that device's
/// load line leaves this process.
///
/// # Errors
/// As [`named`], and where memory or threads are refused.
pub(crate) fn rates_under_line(file: &RunFile) -> Result<(), Failure> {
    let threads = |kind| match kind {
        DeviceKind::Cpu => Ok(Some(Cpu::read().threads_for(file.run.threads.asked())?)),
        DeviceKind::Virtual => Ok(Some(1)),
        DeviceKind::Cuda | DeviceKind::Paper => Ok::<_, Failure>(None),
    };
    for device in named(file)? {
        if let Some(threads) = threads(device.kind)? {
            let room = device.budget.saturating_sub(process::resident().unwrap_or(Bytes::ZERO));
            calibration::cpu_within(threads, room)?;
            process::give_back();
        }
    }
    Ok(())
}

/// The same with what is free on each.
fn open_devices(file: &RunFile) -> Result<Vec<DeviceSpec>, Failure> {
    let request = file.devices();
    if request.devices.is_empty() {
        // What is there is used: the GPUs, else the processor.
        return match gpus(file, None) {
            Ok(gpus) if !gpus.is_empty() => Ok(gpus),
            _ if model_is_example(file) && !a_gpu_could_be_used() => {
                let mut pair = file.clone();
                pair.run.devices = example_pair(file);
                open_devices(&pair)
            }
            // Nobody who has a GPU shall wonder why it idles.
            Err(failure) if a_gpu_could_be_used() => Err(failure.hint("or leave it alone: --devices cpu")),
            _ => {
                check_lines(file, &[DeviceRequest::Cpu { budget: None }], Memory::read().total)?;
                Ok(vec![cpu(file, None)?])
            }
        };
    }
    check_asked(file)?;
    let mut devices = Vec::new();
    for asked in &request.devices {
        match asked {
            DeviceRequest::Cuda { index: None, budget } => devices.extend(gpus(file, *budget)?),
            asked => devices.push(device(file, asked)?),
        }
    }
    measure_links(file, &request, &mut devices)?;
    Ok(devices)
}

/// Measures how fast hosts reach each other, where devices are on several and nobody has said what their links are. The
/// devices of a host have its link together.
fn measure_links(file: &RunFile, request: &DevicesRequest, devices: &mut [DeviceSpec]) -> Result<(), Failure> {
    let unknown = |asked: &DeviceRequest| match asked {
        DeviceRequest::Elsewhere { device, team_link, .. } => {
            team_link.is_none() && !matches!(&**device, DeviceRequest::Virtual { team_link: Some(_), .. })
        }
        _ => false,
    };
    let unknown: Vec<String> = request.devices.iter().filter(|asked| unknown(asked)).map(DeviceRequest::name).collect();
    let Some(hosts) = file.elsewhere.hosts().filter(|_| devices.len() > 1 && !unknown.is_empty()) else {
        return Ok(());
    };
    let mut places: Vec<Option<&str>> = devices.iter().map(DeviceSpec::host).collect();
    places.sort_unstable();
    places.dedup();
    let several = places.len() > 1;
    // Of each host one, or of the only one all.
    let away: Vec<&DeviceSpec> = devices.iter().filter(|device| device.host().is_some()).collect();
    let first = |device: &&&DeviceSpec| away.iter().find(|other| other.host() == device.host()) == Some(*device);
    let measuring: Vec<&DeviceSpec> = away.iter().filter(|device| !several || first(device)).copied().collect();
    let connections =
        measuring.iter().map(|device| file.elsewhere.connection(&device.name)).collect::<Result<Vec<_>, _>>()?;
    let lost = |(rank, error): (usize, DeviceError)| {
        let name = measuring.get(rank).map_or("this machine", |device| &device.name);
        let failure = remote::out_of_reach(error);
        Failure {
            message: format!("run.devices: the links of {name} cannot be measured: {}", failure.message),
            ..failure
        }
    };
    let links = remote::links::slowest(&connections, places[0].is_none(), &*hosts).map_err(lost)?;
    let of_host: Vec<(String, Link)> =
        measuring.iter().zip(&links).map(|(device, link)| (device.name.clone(), *link)).collect();
    for at in 0..devices.len() {
        let (host, name) = (devices[at].host(), &devices[at].name);
        if !unknown.contains(name) {
            continue;
        }
        let own = |(measured, _): &&(String, Link)| match several {
            true => measured.split_once('/').map(|(host, _)| host) == host,
            false => measured == name,
        };
        let together = if several { devices.iter().filter(|other| other.host() == host).count() } else { 1 };
        let Some((_, link)) = of_host.iter().find(own) else { continue };
        let bytes_per_second = link.bytes_per_second / together as f64;
        devices[at].team_link = Link { bytes_per_second, ..*link };
        devices[at].link_measured = true;
    }
    Ok(())
}

/// The GPU of this number, or every one that Plimsoll can use.
///
/// # Errors
/// There is none, and why.
fn cards(index: Option<u32>) -> Result<Vec<(&'static Here, &'static Card)>, Failure> {
    let (here, cards) = match index {
        Some(index) => cuda::open::card(index).map(|(here, card)| (here, std::slice::from_ref(card)))?,
        None => cuda::gpus::here().map(|here| (here, &*here.cards))?,
    };
    let usable: Vec<_> =
        cards.iter().filter(|card| card.architecture.check().is_ok()).map(|card| (here, card)).collect();
    match cards.first() {
        Some(card) if usable.is_empty() => Err(unusable(card)),
        _ => Ok(usable),
    }
}

/// The same, as they are planned for.
fn gpus(file: &RunFile, budget: Option<Budget>) -> Result<Vec<DeviceSpec>, Failure> {
    cards(None)?.into_iter().map(|(here, card)| gpu(file, here, card, budget)).collect()
}

/// Whether there is a GPU that Plimsoll has kernels for, whatever else is missing.
pub(crate) fn a_gpu_could_be_used() -> bool {
    cuda::gpus::here().is_ok_and(|here| here.cards.iter().any(|card| card.architecture.check().is_ok()))
}

fn unusable(card: &Card) -> Failure {
    let why = card.architecture.check().err().unwrap_or_default();
    Failure::input(format!("run.devices: cuda:{} ({}) cannot be used: {why}", card.index, card.name))
        .hint("run on another device: --devices cpu; plimsoll devices lists them")
}

/// A GPU of this machine: its load line is of what others leave of it, its charges are those that a run has measured
/// on such a GPU, else assumed.
fn gpu(file: &RunFile, here: &'static Here, card: &Card, budget: Option<Budget>) -> Result<DeviceSpec, Failure> {
    if card.architecture.check().is_err() {
        return Err(unusable(card));
    }
    // What is missing is said before anything is measured.
    here.nvrtc()?;
    here.cublaslt()?;
    let name = format!("cuda:{}", card.index);
    let free = free_on(here, card, file, budget)?;
    let charges = calibration::charges(here, card).map(rounded);
    let rates = calibration::gpu(here, card)?.rates;
    Ok(DeviceSpec {
        budget: file.line_of(&name, budget).of(free),
        name,
        kind: DeviceKind::Cuda,
        charges: charges.unwrap_or(paper::ASSUMED_CHARGES),
        charges_measured: charges.is_some(),
        link_measured: false,
        nccl: here.nccl_version().map(|version| NcclSpec { version: version.to_owned(), bytes: cuda::nccl::CHARGES }),
        // To the others over the host.
        team_link: rates.host_link,
        // For what the processor does beside it.
        threads: Cpu::read().threads_for(file.run.threads.asked())?,
        rates,
    })
}

/// Decides how the devices of a run exchange: by NCCL where all are GPUs that have the same one, which then has its part of
/// their charges; else by memory of the host.
pub(crate) fn exchange_by_nccl(file: &RunFile, devices: &mut [DeviceSpec]) {
    let version = |device: &DeviceSpec| device.nccl.as_ref().map(|nccl| nccl.version.clone());
    let first = devices.first().and_then(version);
    let alike =
        file.run.nccl && devices.len() > 1 && first.is_some() && devices.iter().all(|device| version(device) == first);
    for device in devices.iter_mut() {
        device.charges += device.nccl_bytes();
    }
    if !alike {
        exchange_by_host(devices);
    }
}

/// Takes NCCL, and its part of their charges, from devices.
pub(crate) fn exchange_by_host<'a>(devices: impl IntoIterator<Item = &'a mut DeviceSpec>) {
    for device in devices {
        device.charges = device.charges.saturating_sub(device.nccl_bytes());
        device.nccl = None;
    }
}

/// That virtual devices leave this machine a fifth of its cores.
fn check_paces(devices: &[DeviceRequest], cores: f64) -> Result<(), Failure> {
    let pace = |device: &DeviceRequest| match device {
        DeviceRequest::Virtual { pace, .. } => *pace,
        _ => 0.0,
    };
    let (paces, most) = (devices.iter().map(pace).sum::<f64>(), 0.8 * cores);
    // Decimal paces that add up to the limit do not always do so in binary.
    if paces <= most * (1.0 + 1e-9) {
        return Ok(());
    }
    let message = format!("run.devices: virtual devices of {paces:.2} cores in all; this machine gives them {most:.2}");
    Err(Failure::input(message).hint(format!(
        "that is 0.8 of its {} cores: choose smaller paces behind the `@`",
        (cores * 100.0).round() / 100.0
    )))
}

/// The link to another host, where nobody has said what it is: assumed.
const ASSUMED_GBIT: f64 = 1.0;

fn device(file: &RunFile, asked: &DeviceRequest) -> Result<DeviceSpec, Failure> {
    match asked {
        DeviceRequest::Elsewhere { device, team_link, .. } => {
            let mut there = file.clone();
            there.run.devices = device.to_string();
            // Nothing waits there.
            there.memory.host = Budget::HOST;
            let name = asked.name();
            let spec = file.elsewhere.describe(&name, there)?;
            let given = match &**device {
                DeviceRequest::Virtual { team_link, .. } => *team_link,
                _ => *team_link,
            };
            Ok(DeviceSpec { team_link: given.map_or(paper::ethernet(ASSUMED_GBIT), LinkRequest::link), ..spec })
        }
        DeviceRequest::Ray { word } => {
            Err(Failure::input(format!("run.devices: `{word}` is for a cluster to say, and nothing here reaches one"))
                .hint("plimsoll train, plan and sweep reach the cluster that this machine has joined (docs/ray.md)"))
        }
        DeviceRequest::Cpu { budget } => cpu(file, *budget),
        DeviceRequest::Virtual { name, budget, pace, link, team_link } => {
            let device = virtual_device(file, name, *budget, *pace, link.unwrap_or(LinkRequest::DEFAULT))?;
            Ok(DeviceSpec { team_link: team_link.map_or(device.team_link, LinkRequest::link), ..device })
        }
        DeviceRequest::Paper { name, budget, team_link } => {
            let device = paper::paper(name, budget.unwrap_or(file.memory.line()));
            let device = device.expect("requests name devices of the table");
            Ok(DeviceSpec { team_link: team_link.map_or(device.team_link, LinkRequest::link), ..device })
        }
        DeviceRequest::Cuda { index, budget } => {
            let of_key = |failure: Failure| Failure {
                message: format!("run.devices: {}: {}", asked.name(), failure.message),
                ..failure
            };
            let (here, card) = cuda::open::card(index.unwrap_or(0)).map_err(|error| of_key(error.into()))?;
            gpu(file, here, card, *budget)
        }
    }
}

fn assumed_charges(file: &RunFile) -> Bytes {
    charges(file.batch_sequences(), u64::from(file.data.sequence))
}

pub(crate) fn cpu(file: &RunFile, budget: Option<Budget>) -> Result<DeviceSpec, Failure> {
    let threads = Cpu::read().threads_for(file.run.threads.asked())?;
    let (rates, pace) = (calibration::cpu(threads)?.rates, pace(file, threads));
    Ok(DeviceSpec {
        name: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        budget: file.line_of("cpu", budget).of(Memory::read().free),
        charges: assumed_charges(file),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads,
        rates: rates.paced(pace),
    })
}

/// The share of the time in which a training run on the processor computes: all of it where the user has said how
/// many threads, else as much as leaves the machine usable.
pub fn pace(file: &RunFile, threads: u32) -> f64 {
    if file.run.threads.asked().is_some() { 1.0 } else { auto_pace(Cpu::read().usable_cores(), threads) }
}

/// A part of this processor, as large as its pace says.
fn virtual_device(
    file: &RunFile,
    name: &str,
    budget: Budget,
    pace: f64,
    link: LinkRequest,
) -> Result<DeviceSpec, Failure> {
    let core = calibration::cpu(1)?.rates;
    Ok(DeviceSpec {
        name: format!("virtual:{name}"),
        kind: DeviceKind::Virtual,
        budget: budget.of(Memory::read().free),
        charges: assumed_charges(file),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads: pace.ceil().max(1.0) as u32,
        rates: Rates { host_link: link.link(), measured: false, ..core.paced(pace) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::{file, refusal};

    #[test]
    fn load_lines_above_the_memory_that_there_is_are_refused() {
        let asked = |settings: &[&str]| {
            let file = file(&[&["model.preset=smollm2-135m"], settings].concat());
            check_lines(&file, &file.devices().devices, Bytes::gib(16)).map_err(|failure| failure.message)
        };
        for (settings, said) in [
            (&["run.devices=cpu=900GiB"][..], "run.devices: cpu may hold 900.00 GiB, and this machine has 16.00 GiB"),
            (
                &["run.devices=virtual:a=10GiB@0.2,virtual:b=8GiB@0.2"],
                "run.devices: virtual:a and virtual:b may hold 18.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=cpu", "memory.budget=17GiB"],
                "memory.budget: cpu may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=virtual:a=1GiB@0.2,host=17GiB"],
                "run.devices: host may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=cuda:0", "memory.host=17GiB"],
                "memory.host: host may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
        ] {
            assert_eq!(asked(settings), Err(said.to_owned()));
        }
        assert_eq!(asked(&["run.devices=cpu=16GiB", "memory.host=17GiB"]), Ok(()));
        assert_eq!(asked(&["run.devices=cpu,virtual:a=16GiB@0.2"]), Ok(()));
        assert_eq!(asked(&["run.devices=rtx3090=23GiB,host=64GiB"]), Ok(()));
        // Where a line was moved to while the run was under way is what counts.
        let mut moved = file(&["model.preset=smollm2-135m", "run.devices=cpu=900GiB"]);
        moved.moved.insert("cpu".to_owned(), "64MiB".parse().unwrap());
        assert!(check_lines(&moved, &moved.devices().devices, Bytes::gib(16)).is_ok());
        let settings = &["model.preset=smollm2-135m", "run.devices=virtual:a=64MiB@0.2,virtual:b=921600GiB@0.2"];
        assert!(refusal(settings).starts_with("run.devices: virtual:a and virtual:b may hold 900.00 TiB, and this"));
    }

    #[test]
    fn virtual_devices_leave_a_fifth_of_the_cores() {
        let checked = |devices: &str, cores| {
            let request: DevicesRequest = devices.parse().unwrap();
            check_paces(&request.devices, cores)
        };
        let three = "virtual:a=1GiB@0.3,virtual:b=1GiB@0.3,virtual:c=1GiB@0.2";
        assert!(checked(three, 1.0).is_ok());
        assert!(checked("cpu", 1.0).is_ok());
        assert_eq!(
            checked("virtual:a=1GiB,virtual:b=1GiB@0.7", 2.0).unwrap_err().to_string(),
            "run.devices: virtual devices of 1.70 cores in all; this machine gives them 1.60\n  \
             hint: that is 0.8 of its 2 cores: choose smaller paces behind the `@`"
        );
    }
}
