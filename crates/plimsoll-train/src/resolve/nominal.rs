//! Nominal figures of devices: the same at each start of a command, and on each machine of the same kind. They follow
//! from the kind of a device and never from a measurement. `planning::nominal` chooses the plan of a deterministic run
//! by them.

use super::RunRequest;
use super::charges::PROCESS_BYTES;
use crate::data::Loader;
use plimsoll_core::{Budget, Bytes, Link, OpRates, Rates};
use plimsoll_device::cuda::gpus::GpuInfo;
use plimsoll_device::probe::Memory;
use plimsoll_plan::paper;

/// Memory bandwidth of a CPU in bytes per second, with any number of threads.
pub(crate) const HOST_BYTES_PER_SECOND: f64 = 20e9;
/// Operations per second of f32 matrix products on a core.
const CORE_FLOPS: f64 = 50e9;
/// Operations per second of f32 matrix products on a multiprocessor: 128 multiplications and additions at 1.7 GHz.
const MULTIPROCESSOR_FLOPS: f64 = 2.0 * 128.0 * 1.7e9;
/// Bytes per second between a multiprocessor and the memory of the GPU.
const MULTIPROCESSOR_BYTES_PER_SECOND: f64 = 11e9;

/// Returns the memory of this machine that a plan may count on: the free part, or all of it if the run has nominal
/// figures.
pub(crate) fn plannable_memory(run: &RunRequest) -> Bytes {
    let memory = Memory::read();
    if run.nominal { memory.total } else { memory.free }
}

/// Returns the nominal charges (bytes outside the arena) of a CPU or virtual device in this process. The memory of a
/// process depends on caches and on its earlier work. A process that trains on tokenized data holds less than this.
pub(super) fn process_charges(run: &RunRequest) -> Bytes {
    PROCESS_BYTES + Loader::max_bytes(run.buffered_sequences(), u64::from(run.data.sequence))
}

/// Returns the nominal rates of a CPU with `threads` threads.
pub(super) fn cpu_rates(threads: u32) -> Rates {
    let flops = CORE_FLOPS * f64::from(threads);
    Rates {
        f32_flops: flops,
        bf16_flops: flops,
        memory_bytes_per_second: HOST_BYTES_PER_SECOND,
        op_seconds: 2e-6,
        host_link: Link { bytes_per_second: HOST_BYTES_PER_SECOND / 2.0, latency_seconds: 2e-6 },
        measured: false,
        ops: OpRates::default(),
    }
}

/// Returns the nominal rates of a GPU: those of the paper device with the same chip, or else by its number of
/// multiprocessors.
pub(super) fn gpu_rates(gpu: &GpuInfo) -> Rates {
    if let Some(device) = paper_name(&gpu.name).and_then(|name| paper::paper(name, Budget::DEVICE)) {
        return device.rates;
    }
    let multiprocessors = f64::from(gpu.multiprocessors);
    Rates {
        f32_flops: MULTIPROCESSOR_FLOPS * multiprocessors,
        bf16_flops: 2.0 * MULTIPROCESSOR_FLOPS * multiprocessors,
        memory_bytes_per_second: MULTIPROCESSOR_BYTES_PER_SECOND * multiprocessors,
        op_seconds: 5e-6,
        host_link: paper::pcie(4, 16).unwrap_or(Link::MEMORY),
        measured: false,
        ops: OpRates::default(),
    }
}

/// Returns the paper device with the chip of a GPU that the driver calls `name`; `None` if no paper device has it. The
/// longest match decides, of whole names and of their parts before the first hyphen; of two equal ones the whole name.
fn paper_name(name: &str) -> Option<&'static str> {
    let words = name.split_whitespace().filter(|word| !["NVIDIA", "GeForce"].contains(word));
    let chip = words.collect::<String>().to_lowercase();
    let whole = paper::names().map(|paper| (paper.replace('-', ""), true, paper));
    let chips = paper::names().map(|paper| (paper.split('-').take(1).collect::<String>(), false, paper));
    let alike = whole.chain(chips).filter(|(part, ..)| chip.starts_with(part));
    alike.max_by_key(|(part, whole, _)| (part.len(), *whole)).map(|(.., paper)| paper)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_has_rates_of_its_chip() {
        let rows = [
            ("NVIDIA GeForce RTX 3090", Some("rtx3090")),
            ("NVIDIA GeForce RTX 4060 Ti", Some("rtx4060ti")),
            ("NVIDIA GeForce RTX 4070 SUPER", Some("rtx4070-super")),
            ("NVIDIA GeForce RTX 4070", Some("rtx4070")),
            ("NVIDIA A100-SXM4-80GB", Some("a100-80g")),
            ("NVIDIA A10", Some("a10")),
            ("NVIDIA H100 80GB HBM3", Some("h100-sxm")),
            ("NVIDIA L40S", Some("l40s")),
            ("Tesla V100-SXM2-16GB", None),
        ];
        for (name, paper) in rows {
            assert_eq!(paper_name(name), paper, "{name}");
        }
    }

    #[test]
    fn nominal_speed_grows_with_threads() {
        let ratio = cpu_rates(4).f32_flops / cpu_rates(1).f32_flops;
        assert!(ratio == 4.0 && !cpu_rates(1).measured);
    }
}
