//! `cargo xtask memory cuda:0`: prints the memory of a GPU by NVML and by the driver, from before a context to after
//! its end. `gpu_check.py` runs it.

use crate::soak::case::Case;
use crate::soak::test_device::TestDevice;
use anyhow::{Context, bail};
use plimsoll_core::{Bytes, DType, RecomputeLevel};
use plimsoll_device::gpu;
use plimsoll_plan::search::plan_recipe;

/// Prints the memory of a GPU by NVML and by the driver at each moment of a run, as one line of JSON: before the
/// context, with context, libraries, kernels and arena, and after its end. The Programs are those of a small model
/// whose attention heads have a usual size.
///
/// # Errors
/// Fails if the argument is no GPU, or the GPU cannot be opened.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let [device] = arguments else { bail!("usage: cargo xtask memory cuda:0") };
    let number = device.strip_prefix("cuda:").context("a GPU such as cuda:0")?.parse()?;
    let case = Case::attention(1, 0).on(TestDevice::Cuda(number), DType::Bf16);
    let spec = case.device_spec(Bytes(1 << 40), 1);
    let outcome = plan_recipe(&case.request(&spec, DType::Bf16), &case.uniform(1, RecomputeLevel::Nothing));
    let ledger = gpu::memory_ledger(number, DType::Bf16, outcome.set, outcome.layout.placement)?;
    println!("{}", serde_json::to_string(&ledger)?);
    Ok(())
}
