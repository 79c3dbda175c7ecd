//! Adapters folded into their model: a Hugging Face directory with the same parameters in the same types. The model
//! streams through; only the adapters stand in memory.

use crate::files::{AdapterDir, ModelDir, StoredTensor, WeightWriter, write_model_dir};
use crate::session::spaces::{Merging, ModelSource, Storing};
use crate::session::trouble::Trouble;
use plimsoll_core::{DType, Failure};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Call, Unobserved};
use plimsoll_device::probe::Cpu;
use plimsoll_plan::layout::lay_out;
use plimsoll_program::models::decoder;
use plimsoll_program::workspace::Kernels;
use std::path::Path;

/// Writes `out`: the model of `base` with the adapters of `adapter` folded in, and all that lies beside its weights.
/// Keys of the model's `config.json` that are in `ignore_keys` may be unknown. Gives what should be known of the adapters.
///
/// # Errors
/// Directories that do not go together or cannot be read, and something that is there already.
pub fn merge(base: &Path, adapter: &Path, out: &Path, ignore_keys: &[String]) -> Result<Option<String>, Failure> {
    if out.exists() {
        let message = format!("{} is there already", out.display());
        return Err(Failure::input(message).hint("name a folder that is not there yet"));
    }
    let model = ModelDir::open(base, ignore_keys)?;
    let adapter = AdapterDir::open(adapter, &model.config);
    let of_nothing = adapter.as_ref().ok().and_then(AdapterDir::of_nothing);
    let without = |error| of_nothing.iter().cloned().fold(Failure::from(error), Failure::hint);
    let weights = model.need_weights().map_err(without)?;
    let adapter = adapter?;
    let parameters = weights.parameters.iter();
    let tensors: Vec<StoredTensor> = parameters
        .map(|(parameter, entry)| StoredTensor {
            name: parameter.hf_name.clone(),
            dtype: entry.dtype().expect("opened weights are floats"),
            shape: parameter.shape.clone(),
        })
        .collect();
    let dtypes: Vec<DType> = tensors.iter().map(|tensor| tensor.dtype).collect();
    let threads = Cpu::read().threads_for(None)?;
    let set =
        decoder::merge(&model.config, &adapter.lora(0.0, 0), Kernels::Cpu { threads: u64::from(threads) }, &dtypes);
    let layout = lay_out(&set);
    let mut device = executor::open(set, layout.placement, DType::F32, threads as usize, None)?;
    let source = || ModelSource::new([weights, &adapter.weights]);
    device.run_observed(Call::of("load"), &mut source(), &mut Unobserved)?;
    write_model_dir(
        out,
        &model.raw_config,
        &tensors,
        Some(base),
        |writer: &mut WeightWriter| -> Result<(), Trouble> {
            Ok(device.run_observed(Call::of("merge"), &mut Merging(source(), Storing(writer)), &mut Unobserved)?)
        },
    )?;
    Ok(of_nothing)
}
