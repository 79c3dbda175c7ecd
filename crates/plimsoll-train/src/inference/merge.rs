//! Merging of adapters into their model. The result is a Hugging Face directory with the parameters and types of the
//! model.

use super::merged_model::MergedModel;
use crate::engine::tensor_files::TensorWriter;
use crate::files::{WeightWriter, write_model_dir};
use plimsoll_core::Failure;
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
    let merged = MergedModel::open(base, Some(adapter), ignore_keys)?;
    let (tensors, model) = (merged.tensors()?, &merged.model);
    write_model_dir(out, &model.config, &model.raw_config, &tensors, Some(base), |writer: &mut WeightWriter| {
        merged.stream(TensorWriter(writer))
    })?;
    Ok(merged.note())
}
