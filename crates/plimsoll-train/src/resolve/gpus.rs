//! The GPUs of this machine that a run names or uses by default.

use super::RunRequest;
use super::charges::round_up_charges;
use super::device_checks::check_total;
use super::nominal;
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Failure, NcclSpec};
use plimsoll_device::cuda::gpus::{CudaInstallation, GpuInfo};
use plimsoll_device::probe::Cpu;
use plimsoll_device::{cache, calibration, cuda, gpu};
use plimsoll_plan::paper;

/// Returns the GPU with this index; for `None`, every GPU that Plimsoll has kernels for.
///
/// # Errors
/// There is no such GPU, or Plimsoll has kernels for none of them.
pub(super) fn usable_gpus(index: Option<u32>) -> Result<Vec<(&'static CudaInstallation, &'static GpuInfo)>, Failure> {
    let (cuda, gpus) = match index {
        Some(index) => gpu::find_gpu(index).map(|(cuda, gpu)| (cuda, std::slice::from_ref(gpu)))?,
        None => cuda::gpus::installation().map(|cuda| (cuda, &*cuda.gpus))?,
    };
    let usable: Vec<_> = gpus.iter().filter(|gpu| gpu.architecture.check().is_ok()).map(|gpu| (cuda, gpu)).collect();
    match gpus.first() {
        Some(gpu) if usable.is_empty() => Err(unusable_gpu(gpu)),
        _ => Ok(usable),
    }
}

/// Returns every GPU of this machine that Plimsoll has kernels for, with load lines and rates.
pub(super) fn all_gpus(run: &RunRequest, budget: Option<Budget>) -> Result<Vec<DeviceSpec>, Failure> {
    usable_gpus(None)?.into_iter().map(|(cuda, gpu)| gpu_device(run, cuda, gpu, budget)).collect()
}

/// Returns whether this machine has a GPU that Plimsoll has kernels for, even if libraries of CUDA are missing.
pub(super) fn has_usable_gpu() -> bool {
    cuda::gpus::installation().is_ok_and(|cuda| cuda.gpus.iter().any(|gpu| gpu.architecture.check().is_ok()))
}

fn unusable_gpu(gpu: &GpuInfo) -> Failure {
    let reason = gpu.architecture.check().err().unwrap_or_default();
    Failure::input(format!("run.devices: cuda:{} ({}) cannot be used: {reason}", gpu.index, gpu.name))
        .hint("run on another device: --devices cpu; plimsoll devices lists them")
}

/// Returns a GPU of this machine with its load line and rates. A load line that is a share refers to the memory that
/// other programs leave free. The charges (bytes outside the arena) are those that a run measured on such a GPU before,
/// else assumed. If the run has nominal figures, rates and charges are not measured, and the share refers to all
/// memory.
pub(super) fn gpu_device(
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
    let measured = (!run.nominal).then(|| gpu_free_bytes(cuda, gpu, run, budget)).transpose()?;
    let free = measured.unwrap_or(gpu.memory_bytes);
    let charges = cache::stored_charges(cuda, gpu).filter(|_| !run.nominal).map(round_up_charges);
    let rates = if run.nominal { nominal::gpu_rates(gpu) } else { calibration::gpu(cuda, gpu)?.rates };
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

/// Returns the free bytes of a GPU, after a check that its load line does not exceed its memory. `own` is its load line
/// in `run.devices`, if the user gave one there. Bytes that the run counts as freed are among them.
///
/// # Errors
/// A load line that exceeds the memory of the GPU, or an error of the driver.
pub(super) fn gpu_free_bytes(
    cuda: &'static CudaInstallation,
    gpu: &GpuInfo,
    run: &RunRequest,
    own: Option<Budget>,
) -> Result<Bytes, Failure> {
    let name = format!("cuda:{}", gpu.index);
    let key = if own.is_some() { "run.devices" } else { "memory.budget" };
    let amount = own.unwrap_or(run.memory.device_budget()).amount();
    let amount = amount.filter(|_| !run.budget_overrides.contains_key(&name)).map(|line| (name.clone(), line));
    check_total(key, amount.as_slice(), &gpu.name, gpu.memory_bytes)?;
    let free = gpu::free_bytes(cuda, gpu)?;
    let freed = run.freed_bytes.get(&name).copied().unwrap_or_default();
    Ok((free + freed).min(gpu.memory_bytes.max(free)))
}
