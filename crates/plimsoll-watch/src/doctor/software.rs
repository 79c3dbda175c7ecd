//! Checks of NVIDIA's driver and libraries.

use super::{Finding, FindingId, Readings, Severity};
use plimsoll_core::format_count;
use plimsoll_device::cuda::libraries::Library;
use plimsoll_device::machine::{DriverFailure, LibraryState, Nvidia};

/// Codes (`CUresult`) of a driver that sees no GPU: the driver library is the stub of the CUDA toolkit, or there is none.
const NO_GPU_CODES: [u32; 2] = [34, 100];
/// Mend of a GPU that is hidden from this process or container.
const SHOW_GPUS: &str = "unset CUDA_VISIBLE_DEVICES\nin a container: docker run --gpus all";
/// Cost of a GPU that cannot be used.
const NO_GPU: &str = "no run uses a GPU; runs train on the processor";

/// Returns the findings about driver and libraries.
pub(super) fn findings(readings: &Readings) -> Vec<Finding> {
    let nvidia = &readings.machine.nvidia;
    if nvidia.driver.is_none() {
        return vec![no_driver(nvidia)];
    }
    let mut findings: Vec<Finding> = nvidia.libraries.iter().filter_map(missing_library).collect();
    findings.extend(nvml(readings));
    findings.extend(nccl(readings));
    findings.extend(hidden_gpus(readings));
    findings
}

/// Explains why this machine has no working driver.
fn no_driver(nvidia: &Nvidia) -> Finding {
    let driver = nvidia.library(Library::Driver);
    let remedy = driver.remedy.clone().unwrap_or_default();
    if let Some(failure) = &nvidia.failure {
        return driver_fails(failure, nvidia.cards_on_bus);
    }
    if nvidia.library(Library::Nvml).path.is_some() {
        let missing = driver.missing.as_deref().unwrap_or("the NVIDIA driver was not found");
        let text = format!("NVML is installed, but the CUDA driver is not usable: {missing}");
        return Finding::new(FindingId::DriverIncomplete, Severity::Error, text, NO_GPU, remedy);
    }
    if nvidia.cards_on_bus > 0 {
        let cards = format_count(nvidia.cards_on_bus as u64, "NVIDIA card");
        let text = format!("{cards} on the PCI bus, and no NVIDIA driver");
        return Finding::new(FindingId::DriverMissing, Severity::Warning, text, NO_GPU, remedy);
    }
    let mend = "none is needed; to plan for a GPU that is not present: plimsoll plan run.toml --devices rtx3090";
    Finding::new(FindingId::NoNvidiaGpu, Severity::Note, "no NVIDIA GPU", NO_GPU, mend)
}

/// Returns the finding about a driver that does not start. One that sees no GPU is as it should be where there is none.
fn driver_fails(failure: &DriverFailure, cards_on_bus: usize) -> Finding {
    let DriverFailure { code, text, remedy } = failure;
    let sees_no_gpu = code.is_some_and(|code| NO_GPU_CODES.contains(&code));
    let (severity, mend) = match (sees_no_gpu, cards_on_bus) {
        (true, 0) => (Severity::Note, SHOW_GPUS),
        (true, _) => (Severity::Warning, SHOW_GPUS),
        (false, _) => (Severity::Error, remedy.as_str()),
    };
    Finding::new(FindingId::DriverFails, severity, text, NO_GPU, mend)
}

/// Returns a finding if a library is missing without which GPUs cannot be used.
fn missing_library(state: &LibraryState) -> Option<Finding> {
    let missing = state.missing.as_ref().filter(|_| state.library.is_required())?;
    let mend = state.remedy.clone().unwrap_or_default();
    Some(Finding::new(FindingId::LibraryMissing, Severity::Error, missing, NO_GPU, mend))
}

/// Returns a finding if NVML does not work although the driver does.
fn nvml(readings: &Readings) -> Option<Finding> {
    readings.has_nvml.filter(|has_nvml| !has_nvml)?;
    let state = readings.machine.nvidia.library(Library::Nvml);
    let text = state.missing.clone().unwrap_or_else(|| "NVML is installed, but does not start".to_owned());
    let cost = "free memory, temperature, clocks and the processes on a GPU are unknown; plans assume that all of its \
                memory is free";
    let mend = state.remedy.clone().unwrap_or_else(|| "check that it works: nvidia-smi".to_owned());
    Some(Finding::new(FindingId::NvmlMissing, Severity::Warning, text, cost, mend))
}

/// Returns a finding if several GPUs have no NCCL.
fn nccl(readings: &Readings) -> Option<Finding> {
    let gpus = readings.usable_gpus().count();
    if gpus < 2 || readings.nccl_version.is_some() {
        return None;
    }
    let state = readings.machine.nvidia.library(Library::Nccl);
    let text = state.missing.clone().unwrap_or_else(|| "NCCL cannot be loaded or is too old".to_owned());
    let mend = state.remedy.clone().unwrap_or_else(|| "pip install --upgrade nvidia-nccl-cu12".to_owned());
    let cost = format!("the {gpus} GPUs exchange gradients through host memory, which is slower than directly");
    Some(Finding::new(FindingId::NcclMissing, Severity::Warning, text, cost, mend))
}

/// Returns a finding if the driver lists fewer GPUs than the bus has.
fn hidden_gpus(readings: &Readings) -> Option<Finding> {
    let listed = readings.machine.devices.iter().filter(|device| device.gpu.is_some()).count();
    let on_bus = readings.machine.nvidia.cards_on_bus;
    (listed < on_bus).then(|| {
        let text =
            format!("the driver lists {listed} of {} on the PCI bus", format_count(on_bus as u64, "NVIDIA card"));
        Finding::new(FindingId::GpuHidden, Severity::Note, text, "runs cannot use the others", SHOW_GPUS)
    })
}
