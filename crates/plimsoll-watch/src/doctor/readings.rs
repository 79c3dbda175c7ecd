//! Figures of a machine and of a run, read before the work and not judged here. Figures that the system does not report
//! are `None`.

use crate::cluster::ClusterCheck;
use plimsoll_core::{Bytes, Failure, Plan, Recommendation};
use plimsoll_device::cuda::gpus::{self, CudaInstallation};
use plimsoll_device::cuda::nvml::Reference;
use plimsoll_device::machine::{DeviceInfo, Machine};
use plimsoll_device::probe::{
    CpuTemperature, CpuUsage, MemoryLimit, PhysicalMemory, has_infiniband, is_wsl, memory_limits, sees_all_processes,
    sysfs,
};
use plimsoll_device::process::{Limits, UserThreads};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Time over which the load of the processor is measured.
const LOAD_PERIOD: Duration = Duration::from_millis(300);

/// The figures of one check-up.
#[derive(Clone, Debug)]
pub struct Readings {
    /// Devices of this machine and NVIDIA's software.
    pub machine: Machine,
    /// Further figures of the GPUs in `machine`.
    pub gpus: Vec<GpuReadings>,
    /// Whether NVML was found and started; `None` without a working driver.
    pub has_nvml: Option<bool>,
    /// Version of NCCL; `None` if it is missing, cannot be loaded or is too old.
    pub nccl_version: Option<String>,
    /// Memory and swap of the whole machine.
    pub physical: PhysicalMemory,
    /// Memory limits of the control groups of this process.
    pub memory_limits: Vec<MemoryLimit>,
    /// Limits of this process (`ulimit`).
    pub limits: Limits,
    /// Threads of the present user.
    pub user_threads: Option<UserThreads>,
    /// Whether the machine is Linux on Windows.
    pub is_wsl: bool,
    /// Whether the machine has an InfiniBand adapter.
    pub has_infiniband: bool,
    /// Whether this process sees all processes of the machine. In most containers it does not.
    pub sees_all_processes: Option<bool>,
    /// Fraction of the processor's time, 0 to 1, that was busy.
    pub cpu_load: Option<f64>,
    /// Temperature of the processor in degrees Celsius.
    pub cpu_celsius: Option<f64>,
    /// The cluster that this machine has joined, or the reason why it cannot be read; `None` if it has joined none.
    pub cluster: Option<Result<ClusterCheck, Failure>>,
    /// The run; `None` if only the machine is checked.
    pub run: Option<RunReadings>,
}

/// Figures of a GPU that only the doctor uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuReadings {
    /// Name of the GPU, such as `cuda:0`.
    pub name: String,
    /// Figures with which its condition is compared.
    pub reference: Reference,
}

/// A run file, and the plan of its run if it is valid.
#[derive(Clone, Debug)]
pub struct RunReadings {
    /// Name of the run file.
    pub run_file: String,
    /// The command that starts the run.
    pub train_command: String,
    /// The command that plans the run on all GPUs of this machine.
    pub all_gpus_command: String,
    /// Reasons for which the run would be refused.
    pub failures: Vec<Failure>,
    /// The plan; `None` if the run cannot be planned.
    pub planned: Option<PlanReadings>,
}

/// The plan of a run, and the folder that the run would write.
#[derive(Clone, Debug)]
pub struct PlanReadings {
    /// The plan. It may not fit.
    pub plan: Plan,
    /// Changes that the planner predicts to make the run faster, in the order of plans.
    pub recommendations: Vec<Recommendation>,
    /// The refusal of a plan that does not fit, with commands that do fit as its hints; `None` if the plan fits.
    pub refusal: Option<Failure>,
    /// The run folder.
    pub folder: String,
    /// Whether the run folder can be written.
    pub is_writable: Option<bool>,
    /// Free bytes of its disk.
    pub disk_free_bytes: Option<Bytes>,
    /// Number of checkpoints that the run keeps (`train.keep`).
    pub checkpoints_kept: u32,
    /// Most bytes of a file of weights or optimizer state.
    pub file_bytes_max: Bytes,
}

impl Readings {
    /// Reads the figures of this machine, without cluster and run. Takes a few tenths of a second, in which it measures the load
    /// of the processor.
    pub fn read() -> Readings {
        let root = Path::new("/");
        let usage_before = CpuUsage::read();
        thread::sleep(LOAD_PERIOD);
        let usage = CpuUsage::read();
        let machine = Machine::read();
        let cuda = gpus::installation().ok();
        Readings {
            gpus: cuda.map_or(vec![], |cuda| read_gpus(cuda, &machine.devices)),
            machine,
            has_nvml: cuda.map(CudaInstallation::has_nvml),
            // The library is loaded only where GPUs could use it.
            nccl_version: cuda
                .filter(|cuda| cuda.gpus.len() > 1)
                .and_then(CudaInstallation::nccl_version)
                .map(str::to_owned),
            physical: PhysicalMemory::read(root),
            memory_limits: memory_limits(root),
            limits: Limits::read(),
            user_threads: UserThreads::read(root),
            is_wsl: is_wsl(root),
            has_infiniband: has_infiniband(root),
            sees_all_processes: sees_all_processes(root),
            cpu_load: usage.zip(usage_before).map(|(usage, before)| usage.usage_since(before)),
            cpu_celsius: CpuTemperature::read(&sysfs()).celsius,
            cluster: None,
            run: None,
        }
    }

    /// Returns the GPUs of this machine that a run can use.
    pub fn usable_gpus(&self) -> impl Iterator<Item = &DeviceInfo> {
        self.machine.devices.iter().filter(|device| device.gpu.as_ref().is_some_and(|gpu| gpu.unusable.is_none()))
    }
}

/// Reads the further figures of the GPUs among `devices`.
fn read_gpus(cuda: &CudaInstallation, devices: &[DeviceInfo]) -> Vec<GpuReadings> {
    let named = devices.iter().filter_map(|device| {
        let uuid = &device.gpu.as_ref()?.uuid;
        Some((device, cuda.gpus.iter().find(|gpu| gpu.uuid == *uuid)?))
    });
    let read = named.map(|(device, gpu)| GpuReadings { name: device.name.clone(), reference: cuda.reference(gpu) });
    read.collect()
}
