//! Opening of one device: selects the executor for a [`DeviceSpec`], returns its liveness probe, and measures the
//! charges of a GPU.

use crate::remote::device::Connection;
use crate::resolve::charges::round_up_charges;
use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, GemmAlgorithms, HostSpec, Link};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::Device;
use plimsoll_device::error::DeviceError;
use plimsoll_device::gpu::{self, GpuMonitor, OpenOptions};
use plimsoll_device::virtual_device::{self, VirtualDeviceSpec};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::{Op, Placement, ProgramSet};
use std::path::Path;
use std::sync::Arc;

/// Opens a device of this process with the Programs of a plan. Returns the device, and for a GPU its monitor.
/// `algorithms` fixes the matrix product algorithms of a GPU; with `None` its library chooses them. `scratch` is the
/// folder of the scratch file; `None` without one.
///
/// # Errors
/// The device cannot be opened, or no executor supports it.
pub fn open_device(
    spec: &DeviceSpec,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&GemmAlgorithms>,
    scratch: Option<&Path>,
) -> Result<(Box<dyn Device>, Option<GpuMonitor>), DeviceError> {
    let threads = spec.threads as usize;
    match spec.kind {
        DeviceKind::Cpu if scratch.is_none() => Ok((executor::open(set, placement, precision, threads, None)?, None)),
        DeviceKind::Cpu => Ok((virtual_device::open(cpu_with_queues(spec, scratch), set, placement, precision)?, None)),
        DeviceKind::Virtual => {
            let what =
                VirtualDeviceSpec { scratch_folder: scratch.map(Path::to_owned), ..virtual_device_of(spec, precision) };
            Ok((virtual_device::open(what, set, placement, precision)?, None))
        }
        DeviceKind::Cuda => {
            let options = OpenOptions { scratch, ..open_options(spec, precision, algorithms) };
            let (device, gpu) = gpu::open_for_run(&options, set, placement)?;
            Ok((device, Some(gpu)))
        }
        DeviceKind::Paper => Err(DeviceError::Unsupported { op: "a run", device: "a device on paper" }),
    }
}

/// Returns a function that asks a device for a sign of life and returns whether the device responds. The function works
/// before the device is opened and during all its work. It asks a remote device through `connection`, which is `None`
/// for a device of this process. A CPU or virtual device of this process always responds.
pub(crate) fn liveness_probe(
    spec: &DeviceSpec,
    connection: Option<Arc<Connection>>,
) -> Arc<dyn Fn() -> bool + Send + Sync> {
    match (connection, spec.kind) {
        (Some(connection), _) => Arc::new(move || connection.is_responsive()),
        (None, DeviceKind::Cuda) => Arc::new(gpu::liveness_probe(gpu_index(spec))),
        // The CPU answers for as long as threads run.
        _ => Arc::new(|| true),
    }
}

/// Returns the number that the driver gives a GPU, such as 1 for `cuda:1`.
fn gpu_index(spec: &DeviceSpec) -> u32 {
    let index = spec.name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
    index.expect("GPUs are named by the driver's numbers")
}

fn open_options<'a>(spec: &DeviceSpec, precision: DType, algorithms: Option<&'a GemmAlgorithms>) -> OpenOptions<'a> {
    OpenOptions {
        index: gpu_index(spec),
        threads: spec.threads as usize,
        precision,
        algorithms,
        // NCCL allocates its memory later.
        charges: spec.charges_measured.then_some(spec.charges.saturating_sub(spec.nccl_bytes())),
        scratch: None,
    }
}

/// Measures the charges of a GPU (bytes outside its arena). Opens the GPU with the Programs of `answer`, which was
/// planned with assumed charges, and stores the measured charges in `spec`. Returns true if it stored charges; then a
/// new plan is needed.
///
/// Returns false, and leaves `spec` unchanged, for other devices, GPUs of other hosts, GPUs with measured charges, and
/// a GPU that runs out of memory.
///
/// # Errors
/// The GPU cannot be opened for another reason than an out-of-memory error.
pub fn measure_gpu_charges(
    spec: &mut DeviceSpec,
    answer: &PlanOutcome,
    scratch: Option<&Path>,
) -> Result<bool, DeviceError> {
    if spec.kind != DeviceKind::Cuda || spec.charges_measured || spec.remote_host().is_some() {
        return Ok(false);
    }
    let options = OpenOptions { scratch, ..open_options(spec, answer.precision, None) };
    match gpu::measure_charges(&options, answer.set.clone(), answer.layout.placement.clone()) {
        Ok(charges) => {
            (spec.charges, spec.charges_measured) = (round_up_charges(charges) + spec.nccl_bytes(), true);
            Ok(true)
        }
        Err(error) if error.is_out_of_memory() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the settings that open a virtual device without a scratch file. Each op takes its predicted time on it.
fn virtual_device_of(spec: &DeviceSpec, precision: DType) -> VirtualDeviceSpec {
    let (rates, team_link) = (spec.rates.clone(), spec.team_link);
    let price = move |set: &ProgramSet, op: &Op| {
        Prices { rates: &rates, host: &HostSpec::NONE, precision, team_link }.op_seconds(set, op)
    };
    VirtualDeviceSpec {
        name: spec.name.clone(),
        arena_budget: spec.arena_budget(),
        threads: spec.threads as usize,
        price: Box::new(price),
        link: spec.rates.host_link,
        scratch_folder: None,
    }
}

/// Returns the settings of a virtual device that stands for the CPU, without simulated delays. Unlike the plain CPU
/// device it has queues, and computes while another thread reads and writes the scratch file.
fn cpu_with_queues(spec: &DeviceSpec, scratch: Option<&Path>) -> VirtualDeviceSpec {
    VirtualDeviceSpec {
        name: spec.name.clone(),
        arena_budget: Bytes(u64::MAX),
        threads: spec.threads as usize,
        price: Box::new(|_, _| 0.0),
        link: Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 },
        scratch_folder: scratch.map(Path::to_owned),
    }
}
