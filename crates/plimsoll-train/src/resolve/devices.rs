//! The devices that a run names, local, on paper or in a cluster: whether they exist, their load lines, and their rates, which
//! are taken from earlier measurements or measured now. Checks that need no measurement are in `device_checks`, the links
//! between hosts in `host_links`.

use super::RunRequest;
use super::charges::{process_charges, round_up_charges};
use super::device_checks::{check_budgets, check_total, check_virtual_paces};
use super::example::{example_devices, model_is_example};
use super::host_links::measure_host_links;
use crate::config::RunConfig;
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Failure, Link, NcclSpec, Rates};
use plimsoll_device::calibration::{self, Shortfall, ShortfallKind};
use plimsoll_device::cuda::gpus::{CudaInstallation, GpuInfo};
use plimsoll_device::probe::{Cpu, Memory, auto_pace};
use plimsoll_device::{cuda, process};
use plimsoll_plan::device_request::{DeviceRequest, LinkRequest};
use plimsoll_plan::paper;
use serde::Serialize;

/// Resolves the devices that a run names, at least one, with load lines and rates. Load lines and rates are corrected by what
/// earlier runs have learned.
///
/// # Errors
/// Devices that do not exist or cannot be used together.
pub fn resolve_devices(run: &RunRequest) -> Result<Vec<DeviceSpec>, Failure> {
    let mut devices = find_devices(run)?;
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

/// Returns a note about the corrections of a device that earlier runs have learned.
pub(crate) fn shortfall_note(device: &DeviceSpec) -> Option<String> {
    let name = &device.name;
    let note = |shortfall: &Shortfall| match shortfall.kind {
        ShortfallKind::LoadLineBytes(line) if line != device.budget => None,
        ShortfallKind::LoadLineBytes(line) => {
            Some(format!("{name} has a load line of {line}, because a run could not get more ({})", shortfall.reason))
        }
        ShortfallKind::Slowdown(times) => {
            Some(format!("{name} is {times} times slower than measured ({})", shortfall.reason))
        }
    };
    let notes: Vec<String> = calibration::shortfalls(device).iter().filter_map(note).collect();
    (!notes.is_empty()).then(|| format!("learned: {}; to forget it: plimsoll devices --forget", notes.join("; ")))
}

/// Returns a note if other programs used the processor while rates were measured.
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

/// A local device with its load line, without measured rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NamedDevice {
    /// Name of the device.
    pub name: String,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Its load line.
    pub budget: Bytes,
}

/// Lists the local devices that a run names, without measuring rates. A machine that joins a cluster uses it.
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

/// Returns the free bytes of a GPU, and checks that its load line does not exceed its memory.
///
/// # Errors
/// A load line that exceeds the memory of the GPU, or an error of the driver.
fn gpu_free_bytes(
    cuda: &'static CudaInstallation,
    gpu: &GpuInfo,
    run: &RunRequest,
    own: Option<Budget>,
) -> Result<Bytes, Failure> {
    let name = format!("cuda:{}", gpu.index);
    let key = if own.is_some() { "run.devices" } else { "memory.budget" };
    let amount = own.unwrap_or(run.memory.device_budget()).amount();
    let amount = amount.filter(|_| !run.budget_overrides.contains_key(&name)).map(|line| (name, line));
    check_total(key, amount.as_slice(), &gpu.name, gpu.memory_bytes)?;
    Ok(cuda::open::free_bytes(cuda, gpu)?)
}

/// Measures the rates of this processor that are not known yet, for the local device that a run names, within the memory that
/// the device's load line leaves to this process.
///
/// # Errors
/// The errors of [`list_named_devices`], or the system refuses memory or threads.
pub(crate) fn measure_rates_within_budget(run: &RunRequest) -> Result<(), Failure> {
    for device in list_named_devices(run)? {
        let threads = match device.kind {
            DeviceKind::Cpu => Cpu::read().threads_for(run.run.threads.requested())?,
            DeviceKind::Virtual => 1,
            DeviceKind::Cuda | DeviceKind::Paper => continue,
        };
        let available = device.budget.saturating_sub(process::resident().unwrap_or(Bytes::ZERO));
        calibration::cpu_within_memory(threads, available)?;
        process::trim_heap();
    }
    Ok(())
}

/// Resolves the devices that a run names. If it names none, uses the GPUs of this machine, else the processor.
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
    measure_host_links(&run.remote, &request, &mut devices)?;
    Ok(devices)
}

/// Returns the GPU with this index, or every GPU that Plimsoll has kernels for.
///
/// # Errors
/// There is no such GPU.
fn usable_gpus(index: Option<u32>) -> Result<Vec<(&'static CudaInstallation, &'static GpuInfo)>, Failure> {
    let (cuda, gpus) = match index {
        Some(index) => cuda::open::find_gpu(index).map(|(cuda, gpu)| (cuda, std::slice::from_ref(gpu)))?,
        None => cuda::gpus::installation().map(|cuda| (cuda, &*cuda.gpus))?,
    };
    let usable: Vec<_> = gpus.iter().filter(|gpu| gpu.architecture.check().is_ok()).map(|gpu| (cuda, gpu)).collect();
    match gpus.first() {
        Some(gpu) if usable.is_empty() => Err(unusable_gpu(gpu)),
        _ => Ok(usable),
    }
}

/// Resolves every GPU that Plimsoll has kernels for.
fn all_gpus(run: &RunRequest, budget: Option<Budget>) -> Result<Vec<DeviceSpec>, Failure> {
    usable_gpus(None)?.into_iter().map(|(cuda, gpu)| gpu_device(run, cuda, gpu, budget)).collect()
}

/// Returns whether this machine has a GPU that Plimsoll has kernels for, even if libraries are missing.
pub(crate) fn has_usable_gpu() -> bool {
    cuda::gpus::installation().is_ok_and(|cuda| cuda.gpus.iter().any(|gpu| gpu.architecture.check().is_ok()))
}

fn unusable_gpu(gpu: &GpuInfo) -> Failure {
    let reason = gpu.architecture.check().err().unwrap_or_default();
    Failure::input(format!("run.devices: cuda:{} ({}) cannot be used: {reason}", gpu.index, gpu.name))
        .hint("run on another device: --devices cpu; plimsoll devices lists them")
}

/// Resolves a GPU of this machine. Its load line refers to the memory that other programs leave free. Its charges are those that
/// a run has measured on such a GPU, else assumed.
fn gpu_device(
    run: &RunRequest,
    cuda: &'static CudaInstallation,
    gpu: &GpuInfo,
    budget: Option<Budget>,
) -> Result<DeviceSpec, Failure> {
    if gpu.architecture.check().is_err() {
        return Err(unusable_gpu(gpu));
    }
    // Missing libraries are reported before anything is measured.
    cuda.nvrtc()?;
    cuda.cublaslt()?;
    let name = format!("cuda:{}", gpu.index);
    let free = gpu_free_bytes(cuda, gpu, run, budget)?;
    let charges = calibration::stored_charges(cuda, gpu).map(round_up_charges);
    let rates = calibration::gpu(cuda, gpu)?.rates;
    Ok(DeviceSpec {
        budget: run.effective_budget(&name, budget).load_line(free),
        name,
        kind: DeviceKind::Cuda,
        charges: charges.unwrap_or(paper::ASSUMED_CHARGES),
        charges_measured: charges.is_some(),
        link_measured: false,
        nccl: cuda.nccl_version().map(|version| NcclSpec { version: version.to_owned(), bytes: cuda::nccl::CHARGES }),
        // Transfers to other devices go through host memory.
        team_link: rates.host_link,
        // Threads for work of the processor beside the GPU.
        threads: Cpu::read().threads_for(run.run.threads.requested())?,
        rates,
    })
}

/// Decides how the devices of a run exchange: by NCCL if all are GPUs with the same NCCL version, else through host memory. The
/// memory of NCCL is charged.
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

/// Makes devices exchange through host memory, and removes the charges of NCCL.
pub(crate) fn use_host_exchange<'a>(devices: impl IntoIterator<Item = &'a mut DeviceSpec>) {
    for device in devices {
        device.charges = device.charges.saturating_sub(device.nccl_bytes());
        device.nccl = None;
    }
}

/// Assumed bandwidth between hosts, in Gbit/s, if the user gives none and it cannot be measured.
const ASSUMED_GBIT: f64 = 1.0;

/// Resolves one requested device.
fn resolve_device(run: &RunRequest, requested: &DeviceRequest) -> Result<DeviceSpec, Failure> {
    match requested {
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
        DeviceRequest::Paper { name, budget, team_link } => {
            let device = paper::paper(name, budget.unwrap_or(run.memory.device_budget()));
            let device = device.expect("requests name devices of the table");
            Ok(DeviceSpec { team_link: team_link.map_or(device.team_link, LinkRequest::link), ..device })
        }
        DeviceRequest::Cuda { index, budget } => {
            let with_key = |failure: Failure| Failure {
                message: format!("run.devices: {}: {}", requested.name(), failure.message),
                ..failure
            };
            let (cuda, gpu) = cuda::open::find_gpu(index.unwrap_or(0)).map_err(|error| with_key(error.into()))?;
            gpu_device(run, cuda, gpu, *budget)
        }
    }
}

/// Returns the charges of a device in this process before model and data are open.
fn assumed_charges(config: &RunConfig) -> Bytes {
    process_charges(config.batch_sequences(), u64::from(config.data.sequence))
}

/// Resolves the processor of this machine. `budget` is its own load line, if the user gave one.
pub(crate) fn cpu_device(run: &RunRequest, budget: Option<Budget>) -> Result<DeviceSpec, Failure> {
    let threads = Cpu::read().threads_for(run.run.threads.requested())?;
    let rates = calibration::cpu(threads)?.rates.paced(cpu_duty(run, threads));
    Ok(DeviceSpec {
        name: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        budget: run.effective_budget("cpu", budget).load_line(Memory::read().free),
        charges: assumed_charges(run),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads,
        rates,
    })
}

/// Returns the share of the time in which training on the processor computes: 1 if the user set the number of threads, else a
/// share that leaves the machine usable.
pub fn cpu_duty(config: &RunConfig, threads: u32) -> f64 {
    if config.run.threads.requested().is_some() { 1.0 } else { auto_pace(Cpu::read().usable_cores(), threads) }
}

/// Resolves a virtual device: a part of this processor, of the size that `pace` gives in cores.
fn virtual_device(
    run: &RunRequest,
    name: &str,
    budget: Budget,
    pace: f64,
    link: LinkRequest,
) -> Result<DeviceSpec, Failure> {
    let core = calibration::cpu(1)?.rates;
    Ok(DeviceSpec {
        name: format!("virtual:{name}"),
        kind: DeviceKind::Virtual,
        budget: budget.load_line(Memory::read().free),
        charges: assumed_charges(run),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads: pace.ceil().max(1.0) as u32,
        rates: Rates { host_link: link.link(), measured: false, ..core.paced(pace) },
    })
}
