//! Other processes that hold memory of the GPUs of a run, as NVML lists them.

use super::RunRequest;
use super::gpus::usable_gpus;
use plimsoll_core::Bytes;
use plimsoll_device::cuda::gpus::{CudaInstallation, GpuInfo};
use plimsoll_device::cuda::nvml::Process;
use plimsoll_plan::device_request::DeviceRequest;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Another process that holds memory of GPUs of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// Process id, as NVML lists it. In a container it may be that of the host.
    pub pid: u32,
    /// Process name, often with its arguments; `None` if it is not visible.
    pub name: Option<String>,
    /// Whether the process draws, as a display server does.
    pub draws: bool,
    /// Bytes that the process holds, by name of the GPU.
    pub held_bytes: BTreeMap<String, Bytes>,
}

impl GpuProcess {
    /// Returns the bytes that the process holds on all GPUs of the run.
    pub fn total_bytes(&self) -> Bytes {
        self.held_bytes.values().copied().sum()
    }
}

/// Returns the other processes that hold memory of the GPUs of a run, those with the most first. GPUs whose load line is
/// a fixed amount are left out: no process changes it. Empty without NVML.
pub(crate) fn processes_on_gpus(run: &RunRequest) -> Vec<GpuProcess> {
    let mut processes: BTreeMap<u32, GpuProcess> = BTreeMap::new();
    for (cuda, gpu) in gpus_of_run(run) {
        let name = format!("cuda:{}", gpu.index);
        if run.effective_budget(&name, Some(run.budget_of(&name))).amount().is_some() {
            continue;
        }
        let others = cuda.processes(gpu).into_iter().filter(|process| process.pid != std::process::id());
        for Process { pid, name: program, held_bytes, draws } in others {
            let Some(held) = held_bytes.filter(|held| *held > Bytes::ZERO) else { continue };
            let named = GpuProcess { pid, name: program, draws: false, held_bytes: BTreeMap::new() };
            let process = processes.entry(pid).or_insert(named);
            process.draws |= draws;
            process.held_bytes.insert(name.clone(), held);
        }
    }
    let mut processes: Vec<GpuProcess> = processes.into_values().collect();
    processes.sort_by_key(|process| Reverse(process.total_bytes()));
    processes
}

/// Returns the GPUs of this machine that a run names or uses by default, each once.
fn gpus_of_run(run: &RunRequest) -> Vec<(&'static CudaInstallation, &'static GpuInfo)> {
    let requested = run.devices().devices;
    let indices = requested.iter().filter_map(|device| match device {
        DeviceRequest::Cuda { index, .. } => Some(*index),
        _ => None,
    });
    let indices: Vec<Option<u32>> = if requested.is_empty() { vec![None] } else { indices.collect() };
    let named = indices.into_iter().flat_map(|index| usable_gpus(index).unwrap_or_default());
    let gpus: BTreeMap<u32, _> = named.map(|(cuda, gpu)| (gpu.index, (cuda, gpu))).collect();
    gpus.into_values().collect()
}
