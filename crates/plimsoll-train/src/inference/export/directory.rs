//! Export to a Hugging Face directory, in the types of the model or in one type. Memory holds the adapters and a piece of a
//! tensor.

use super::{ExportProgress, ExportSource, Observer, check_unused};
use crate::engine::tensor_files::{as_io, strip_group};
use crate::files::{MAX_SHARD_BYTES, SideFiles, StoredTensor, WeightWriter, convert_floats, write_model_dir};
use crate::inference::merged_model::MergedModel;
use plimsoll_core::{Bytes, DType, Failure};
use plimsoll_device::device::FileSpace;
use plimsoll_program::models::decoder::STAGING_BYTES;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;

/// A request to export a model to a Hugging Face directory.
#[derive(Clone, Debug)]
pub struct DirectoryRequest {
    /// The model and its adapters, in local directories.
    pub source: ExportSource,
    /// Path of the directory, which must not exist yet.
    pub out: PathBuf,
    /// Type of all weights: f32, bf16 or f16. `None` keeps the types of the model.
    pub dtype: Option<DType>,
    /// Largest size of a file of weights; a larger tensor has a file of its own. `None` is the limit of transformers.
    pub max_shard: Option<Bytes>,
}

/// An exported directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExportedDirectory {
    /// Path of the directory.
    pub directory: PathBuf,
    /// Size of the weights.
    pub bytes: Bytes,
    /// Predicted peak of the buffers in host memory: adapters and a piece of a tensor in both types.
    pub predicted_peak_bytes: Bytes,
    /// Properties that the user should know, such as adapters that name no base model.
    pub notes: Vec<String>,
}

/// Exports a model to a Hugging Face directory, and calls `observe` after each piece.
///
/// # Errors
/// A model that cannot be read, an output that exists, a value that the type cannot store, or a full disk.
pub fn export_directory(request: &DirectoryRequest, observe: Observer) -> Result<ExportedDirectory, Failure> {
    check_unused(&request.out)?;
    let merged = request.source.open()?;
    let stored = merged.tensors()?;
    let in_type =
        |tensor: &StoredTensor| StoredTensor { dtype: request.dtype.unwrap_or(tensor.dtype), ..tensor.clone() };
    let tensors: Vec<StoredTensor> = stored.iter().map(in_type).collect();
    let total_bytes = tensors.iter().map(StoredTensor::bytes).sum();
    let MergedModel { model, .. } = &merged;
    let mut config = model.raw_config.clone();
    if let Some(dtype) = request.dtype {
        set_dtype(&mut config, dtype);
    }
    let template = merged.template()?;
    let side_files = SideFiles { from: Some(&model.path), template: template.as_deref() };
    let shard = request.max_shard.unwrap_or(MAX_SHARD_BYTES);
    write_model_dir(&request.out, &model.config, &config, &tensors, shard, side_files, |writer| {
        let dtypes = stored.iter().zip(&tensors).map(|(from, to)| (&*from.name, (from.dtype, to.dtype))).collect();
        let mut failure = None;
        let sink = ConvertingWriter { writer, dtypes, observe, done_bytes: 0, total_bytes, failure: &mut failure };
        let streamed = merged.stream(sink);
        failure.map_or_else(|| Ok(streamed?), Err)
    })?;
    Ok(ExportedDirectory {
        directory: request.out.clone(),
        bytes: Bytes(total_bytes),
        predicted_peak_bytes: Bytes(merged.stream_bytes()? + 2 * STAGING_BYTES),
        notes: merged.notes(),
    })
}

/// Names the type of the weights in a `config.json`, under the key that it has: `dtype`, or `torch_dtype` as written by
/// transformers 4.
fn set_dtype(config: &mut serde_json::Value, dtype: DType) {
    let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let name = match dtype {
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    config[key] = name.into();
}

/// Write-only target that converts tensors, and writes them to safetensors files.
struct ConvertingWriter<'a> {
    writer: &'a mut WeightWriter,
    /// Type of each tensor as it arrives, and in its file.
    dtypes: HashMap<&'a str, (DType, DType)>,
    observe: Observer<'a>,
    done_bytes: u64,
    total_bytes: u64,
    /// A value that its type cannot store. Programs report errors of files as text only.
    failure: &'a mut Option<Failure>,
}

impl FileSpace for ConvertingWriter<'_> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is write-only")))
    }

    fn write(&mut self, tensor: &str, _: u64, from: &[u8]) -> io::Result<()> {
        let name = strip_group(tensor);
        let &(arrives, stored) =
            self.dtypes.get(name).ok_or_else(|| io::Error::other(format!("no tensor `{name}`")))?;
        let bytes = match arrives == stored {
            true => Cow::Borrowed(from),
            false => Cow::Owned(convert_floats(arrives, stored, from).map_err(|value| {
                let message = format!("`{name}` has the value {value}, which {stored} cannot store");
                *self.failure = Some(Failure::input(&message).hint("choose `--type bf16` or `--type f32`"));
                io::Error::other(message)
            })?),
        };
        self.writer.write(name, &bytes).map_err(as_io)?;
        self.done_bytes += bytes.len() as u64;
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        (self.observe)(ExportProgress { tensor: name, done_bytes, total_bytes });
        Ok(())
    }
}
