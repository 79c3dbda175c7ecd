//! Merging of adapters into their model. The result is a Hugging Face directory with the parameters and types of the
//! model. The model's weights are streamed; only the adapters stay in memory.

use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::{MergeFiles, ModelSource, TensorWriter};
use crate::files::{AdapterDir, ModelDir, StoredTensor, WeightWriter, write_model_dir};
use plimsoll_core::{DType, Failure};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Device, NoObserver, ProgramCall};
use plimsoll_device::probe::Cpu;
use plimsoll_plan::layout::lay_out;
use plimsoll_program::ProgramKind;
use plimsoll_program::models::decoder;
use plimsoll_program::workspace::Kernels;
use std::path::Path;

/// Writes the model directory `out`: the weights of `base` with the adapters of `adapter` merged, and the side files of
/// `base`. Unknown keys of the model's `config.json` are accepted if they are in `ignore_keys`. Returns a note if the
/// adapters name no base model, else `None`.
///
/// # Errors
/// Directories that cannot be read or do not match, or an `out` that exists.
pub fn merge(base: &Path, adapter: &Path, out: &Path, ignore_keys: &[String]) -> Result<Option<String>, Failure> {
    if out.exists() {
        let message = format!("{} already exists", out.display());
        return Err(Failure::input(message).hint("choose an output folder that does not exist"));
    }
    let mut model = ModelDir::open(base, ignore_keys)?;
    let adapter = AdapterDir::open(adapter, &model.config);
    let note = adapter.as_ref().ok().and_then(AdapterDir::unknown_base_note);
    let with_note = |error| note.iter().cloned().fold(Failure::from(error), Failure::hint);
    model.require_weights().map_err(with_note)?;
    let adapter = adapter?;
    if let Some(end_tokens) = &adapter.end_tokens
        && *end_tokens != model.config.eos
    {
        model.config.eos.clone_from(end_tokens);
        model.raw_config["eos_token_id"] = model.config.end_tokens_to_json();
    }
    let weights = model.require_weights()?;
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
    device.run_observed(ProgramCall::of(ProgramKind::Load), &mut source(), &mut NoObserver)?;
    write_model_dir(out, &model.config, &model.raw_config, &tensors, Some(base), |writer: &mut WeightWriter| {
        run_merge(&mut *device, source(), writer)
    })?;
    Ok(note)
}

/// Runs the Program that merges adapters into their model. It reads both from `source`, and writes the parameters to
/// `writer`.
fn run_merge(device: &mut dyn Device, source: ModelSource, writer: &mut WeightWriter) -> Result<(), DeviceFailure> {
    let mut files = MergeFiles(source, TensorWriter(writer));
    Ok(device.run_observed(ProgramCall::of(ProgramKind::Merge), &mut files, &mut NoObserver)?)
}
