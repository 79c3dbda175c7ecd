//! The devices that a run names, local, on paper or in a cluster: whether they exist, their load lines, and their rates, which
//! are taken from earlier measurements or measured now. GPUs are in `gpus`, checks that need no measurement in `device_checks`,
//! the links between hosts in `host_links`.

use super::RunRequest;
use super::charges::{charges_of, process_bytes};
use super::device_checks::{check_budgets, check_virtual_paces};
use super::example::{example_devices, model_is_example};
use super::gpus::{all_gpus, gpu_device, gpu_free_bytes, has_usable_gpu, usable_gpus};
use super::host_links::{ASSUMED_GBIT, measure_host_links, set_paper_links};
use super::nominal::{self, plannable_memory};
use crate::config::RunConfig;
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Failure, Link, Rates};
use plimsoll_device::calibration::{self, Shortfall, ShortfallKind};
use plimsoll_device::probe::{Cpu, Memory, auto_pace};
use plimsoll_device::{gpu, process};
use plimsoll_plan::device_request::{DeviceRequest, LinkRequest};
use plimsoll_plan::paper;
use serde::Serialize;

/// Returns the devices that a run names, at least one, with load lines and rates. Both are lowered where an earlier run
/// found that a device has less memory or speed, unless the run has nominal figures.
///
/// # Errors
/// Devices that do not exist or cannot be used together.
pub fn resolve_devices(run: &RunRequest) -> Result<Vec<DeviceSpec>, Failure> {
    let mut devices = find_devices(run)?;
    if run.nominal {
        return Ok(devices);
    }
    for device in &mut devices {
        // The size of a virtual or remote device is an upper bound: a changed load line can only lower it.
        let bounded = device.kind == DeviceKind::Virtual || device.remote_host().is_some();
        if let Some(budget) = run.budget_overrides.get(&device.name).filter(|_| bounded) {
            device.budget = device.budget.min(budget.load_line(device.budget));
        }
        for shortfall in calibration::shortfalls(device) {
            match shortfall.kind {
                ShortfallKind::LoadLineBytes(line) => device.budget = device.budget.min(line),
                ShortfallKind::Slowdown(times) => device.rates = device.rates.paced(1.0 / times),
            }
        }
    }
    Ok(devices)
}

/// Returns a note if this run plans with less memory or speed than the device reports, because earlier runs found less.
/// Otherwise returns `None`.
pub(crate) fn shortfall_note(device: &DeviceSpec) -> Option<String> {
    let shortfalls = calibration::shortfalls(device);
    let notes: Vec<String> = shortfalls.iter().filter_map(|shortfall| describe_shortfall(device, shortfall)).collect();
    (!notes.is_empty()).then(|| format!("learned: {}; to forget it: plimsoll devices --forget", notes.join("; ")))
}

/// Describes a shortfall: memory or speed that the device lacked in an earlier run. Returns `None` for a lack of memory
/// that does not determine the device's present load line.
fn describe_shortfall(device: &DeviceSpec, shortfall: &Shortfall) -> Option<String> {
    let name = &device.name;
    match shortfall.kind {
        ShortfallKind::LoadLineBytes(line) if line != device.budget => None,
        ShortfallKind::LoadLineBytes(line) => {
            Some(format!("{name} has a load line of {line}, because a run could not get more ({})", shortfall.reason))
        }
        ShortfallKind::Slowdown(times) => {
            Some(format!("{name} is {times} times slower than measured ({})", shortfall.reason))
        }
    }
}

/// Returns a note if other programs used the processor while its rates were measured; otherwise `None`.
pub fn contention_note() -> Option<String> {
    calibration::max_contention().map(|share| {
        format!(
            "rates: other programs used {:.0} % of the processor's time during the measurement, so predicted times may be far \
             off, and no share of the peak is reported; the measurement is repeated after some minutes; to repeat it now, on \
             an idle machine: plimsoll bench devices",
            100.0 * share
        )
    })
}

/// Checks the requested devices as far as possible without looking at any device.
///
/// # Errors
/// Devices that need more cores or memory than this machine has.
pub fn check_requested_devices(run: &RunRequest) -> Result<(), Failure> {
    let devices = run.devices().devices;
    check_virtual_paces(&devices, Cpu::read().usable_cores())?;
    check_budgets(run, &devices, Memory::read().total)
}

/// A device of this machine with its load line, without measured rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NamedDevice {
    /// Name of the device.
    pub name: String,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Load line of the device: the most bytes that it may hold.
    pub budget: Bytes,
}

/// Lists the devices of this machine that a run names, without measuring rates. `plimsoll join` offers them to a
/// cluster.
///
/// # Errors
/// Devices that do not exist, cannot be used, or are remote.
pub fn list_named_devices(run: &RunRequest) -> Result<Vec<NamedDevice>, Failure> {
    check_requested_devices(run)?;
    let mut devices = Vec::new();
    let mut add = |name: String, kind, own, free| {
        let budget = run.effective_budget(&name, own).load_line(free);
        devices.push(NamedDevice { name, kind, budget });
    };
    for requested in &run.devices().devices {
        let (name, own, memory) = (requested.name(), requested.budget(), Memory::read().free);
        match requested {
            DeviceRequest::Cpu { .. } => add(name, DeviceKind::Cpu, own, memory),
            DeviceRequest::Virtual { .. } => add(name, DeviceKind::Virtual, own, memory),
            DeviceRequest::Paper { .. } => add(name, DeviceKind::Paper, own, Bytes::ZERO),
            DeviceRequest::Cuda { index, .. } => {
                for (cuda, gpu) in usable_gpus(*index)? {
                    add(format!("cuda:{}", gpu.index), DeviceKind::Cuda, own, gpu_free_bytes(cuda, gpu, run, own)?);
                }
            }
            DeviceRequest::Remote { .. } | DeviceRequest::Ray { .. } => {
                return Err(Failure::input(format!("run.devices: `{name}` is a device of a cluster"))
                    .hint("name devices of this machine, such as cuda:0 or cpu; plimsoll devices lists them"));
            }
        }
    }
    Ok(devices)
}

/// Returns the rates of this processor with `threads` threads: those that are known, or measured now. The measurement
/// is that of [`RunRequest::measure_rates`]. Without it or after it failed, this process measures, with at most the
/// bytes of the load line `line` that it does not hold already. If the run has nominal figures, returns the nominal
/// rates.
fn rates_within(run: &RunRequest, line: Bytes, threads: u32) -> Result<Rates, Failure> {
    if run.nominal {
        return Ok(nominal::cpu_rates(threads));
    }
    if let Some(measure) = run.measure_rates.filter(|_| !calibration::knows_cpu(threads)) {
        measure(threads);
    }
    let available = line.saturating_sub(process::resident().unwrap_or(Bytes::ZERO));
    let measured = calibration::cpu_within_memory(threads, available)?;
    process::trim_heap();
    Ok(measured.rates)
}

/// Returns the devices that a run names. If it names none, returns the GPUs of this machine, or else the processor. The
/// built-in example gets virtual devices instead of the processor.
fn find_devices(run: &RunRequest) -> Result<Vec<DeviceSpec>, Failure> {
    let request = run.devices();
    if request.devices.is_empty() {
        return match all_gpus(run, None) {
            Ok(gpus) if !gpus.is_empty() => Ok(gpus),
            _ if model_is_example(run) && !has_usable_gpu() => {
                let mut example = run.clone();
                example.run.devices = example_devices(run);
                find_devices(&example)
            }
            // A GPU that cannot be used is reported, so that it does not stay idle unnoticed.
            Err(failure) if has_usable_gpu() => Err(failure.hint("or train without the GPU: --devices cpu")),
            _ => {
                check_budgets(run, &[DeviceRequest::Cpu { budget: None }], Memory::read().total)?;
                Ok(vec![cpu_device(run, None)?])
            }
        };
    }
    check_requested_devices(run)?;
    let mut devices = Vec::new();
    for requested in &request.devices {
        match requested {
            DeviceRequest::Cuda { index: None, budget } => devices.extend(all_gpus(run, *budget)?),
            requested => devices.push(resolve_device(run, requested)?),
        }
    }
    set_paper_links(&request, &mut devices);
    measure_host_links(&run.remote, &request, &mut devices)?;
    Ok(devices)
}

/// Decides how the devices of a run exchange data: by NCCL if all are GPUs with the same NCCL version, else through
/// host memory. If they use NCCL, its memory is added to their charges (bytes outside the arena).
pub(crate) fn choose_nccl(run: &RunRequest, devices: &mut [DeviceSpec]) {
    let version = |device: &DeviceSpec| device.nccl.as_ref().map(|nccl| nccl.version.clone());
    let first = devices.first().and_then(version);
    let same_version =
        run.run.nccl && devices.len() > 1 && first.is_some() && devices.iter().all(|device| version(device) == first);
    for device in devices.iter_mut() {
        device.charges += device.nccl_bytes();
    }
    if !same_version {
        use_host_exchange(devices);
    }
}

/// Makes devices exchange data through host memory, and removes the memory of NCCL from their charges (bytes outside
/// the arena).
pub(crate) fn use_host_exchange<'a>(devices: impl IntoIterator<Item = &'a mut DeviceSpec>) {
    for device in devices {
        device.charges = device.charges.saturating_sub(device.nccl_bytes());
        device.nccl = None;
    }
}

/// Returns one requested device with its load line and rates. A GPU without an index stands for GPU 0.
fn resolve_device(run: &RunRequest, requested: &DeviceRequest) -> Result<DeviceSpec, Failure> {
    let paper = || requested.paper_spec(run.memory.device_budget()).expect("requests name devices of the table");
    match requested {
        DeviceRequest::Paper { .. } => Ok(paper()),
        DeviceRequest::Remote { device, .. } if device.is_paper() => Ok(paper()),
        DeviceRequest::Remote { device, team_link, .. } => {
            let mut remote_config = run.config.clone();
            remote_config.run.devices = device.to_string();
            // Remote devices do not offload, so a host load line of the user does not apply.
            remote_config.memory.host = Budget::HOST;
            let spec = run.remote.describe(&requested.name(), remote_config)?;
            let given = match &**device {
                DeviceRequest::Virtual { team_link, .. } => *team_link,
                _ => *team_link,
            };
            Ok(DeviceSpec { team_link: given.map_or(paper::ethernet(ASSUMED_GBIT), LinkRequest::link), ..spec })
        }
        DeviceRequest::Ray { word } => Err(Failure::input(format!(
            "run.devices: `{word}` names devices of a cluster, and this command reaches none"
        ))
        .hint("plimsoll train, plan and sweep reach the cluster that this machine has joined (docs/ray.md)")),
        DeviceRequest::Cpu { budget } => cpu_device(run, *budget),
        DeviceRequest::Virtual { name, budget, pace, link, team_link } => {
            let device = virtual_device(run, name, *budget, *pace, link.unwrap_or(LinkRequest::DEFAULT))?;
            Ok(DeviceSpec { team_link: team_link.map_or(device.team_link, LinkRequest::link), ..device })
        }
        DeviceRequest::Cuda { index, budget } => {
            let with_key = |failure: Failure| Failure {
                message: format!("run.devices: {}: {}", requested.name(), failure.message),
                ..failure
            };
            let (cuda, gpu) = gpu::find_gpu(index.unwrap_or(0)).map_err(|error| with_key(error.into()))?;
            gpu_device(run, cuda, gpu, *budget)
        }
    }
}

/// Returns the charges (bytes outside the arena) that are assumed for a device in this process until model and data are
/// open. If the run has nominal figures, returns the nominal ones.
fn assumed_charges(run: &RunRequest) -> Bytes {
    if run.nominal {
        return nominal::process_charges(run);
    }
    let held = run.process_bytes.unwrap_or_else(process_bytes);
    charges_of(held, run.buffered_sequences(), u64::from(run.data.sequence))
}

/// Returns the processor of this machine as a device. `budget` is its load line in `run.devices`, if the user gave one
/// there.
pub(crate) fn cpu_device(run: &RunRequest, budget: Option<Budget>) -> Result<DeviceSpec, Failure> {
    let threads = Cpu::read().threads_for(run.run.threads.requested())?;
    let budget = run.effective_budget("cpu", budget).load_line(plannable_memory(run));
    let rates = rates_within(run, budget, threads)?.paced(cpu_duty(run, threads));
    Ok(DeviceSpec {
        name: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        budget,
        charges: assumed_charges(run),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads,
        rates,
    })
}

/// Returns the fraction of the time in which training on the processor computes; it sleeps for the rest. The fraction
/// is 1 if the user set the number of threads, else one that leaves the machine usable.
pub fn cpu_duty(config: &RunConfig, threads: u32) -> f64 {
    if config.run.threads.requested().is_some() { 1.0 } else { auto_pace(Cpu::read().usable_cores(), threads) }
}

/// Returns a virtual device: a part of this processor. `pace` is its size in cores.
fn virtual_device(
    run: &RunRequest,
    name: &str,
    budget: Budget,
    pace: f64,
    link: LinkRequest,
) -> Result<DeviceSpec, Failure> {
    let budget = budget.load_line(plannable_memory(run));
    let core = rates_within(run, budget, 1)?;
    Ok(DeviceSpec {
        name: format!("virtual:{name}"),
        kind: DeviceKind::Virtual,
        budget,
        charges: assumed_charges(run),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads: pace.ceil().max(1.0) as u32,
        rates: Rates { host_link: link.link(), measured: false, ..core.paced(pace) },
    })
}
