//! [`FileSpace`] implementations over safetensors files: reading a pretrained model, reading and writing checkpoints,
//! merging adapters. A file-space tensor is named `GROUP:NAME`, where NAME is its name in the file.

use super::Engine;
use super::failure::DeviceFailure;
use crate::config::RunConfig;
use crate::files::{FilesError, ModelWeights, StoredTensor, TensorEntry, WeightFiles, WeightWriter, has_non_finite};
use crate::resolve::Model;
use plimsoll_device::device::FileSpace;
use plimsoll_program::ProgramKind;
use plimsoll_program::ProgramSet;
use std::collections::HashMap;
use std::io;

/// Largest number of bytes in one message when a thread passes a tensor to another thread, in pieces.
pub(crate) const CHUNK_BYTES: usize = 128 << 10;

/// Read-only source of the tensors of a pretrained model (`model:NAME`) and of adapters (`adapter:NAME`). Reading fails
/// if a weight is NaN or infinite; the message names the file.
pub struct ModelSource<'a> {
    entries: HashMap<&'a str, (&'a WeightFiles, &'a TensorEntry)>,
}

impl<'a> ModelSource<'a> {
    /// Creates a source of the tensors in these model and adapter directories.
    pub fn new(directories: impl IntoIterator<Item = &'a ModelWeights>) -> ModelSource<'a> {
        let all = directories.into_iter().flat_map(|weights| {
            weights.parameters.iter().map(|(p, entry)| (p.hf_name.as_str(), (&weights.files, entry)))
        });
        ModelSource { entries: all.collect() }
    }
}

/// Fills the engine with the weights that a run starts from: those of the model and its adapters, read from files or
/// drawn at random.
///
/// # Errors
/// A file cannot be read or contains NaN or infinite values, or the device fails.
pub(crate) fn load_weights(engine: &mut Engine, model: &Model, config: &RunConfig) -> Result<(), DeviceFailure> {
    let adapter = model.adapter.as_ref().map(|adapter| &adapter.weights);
    let directories = model.weights(config).into_iter().chain(adapter);
    Ok(engine.move_files(ProgramKind::Load, &mut ModelSource::new(directories))?)
}

/// Returns the tensors that a Program reads from files or writes to files, with their names and shapes in the files.
pub fn stored_tensors(set: &ProgramSet, program: ProgramKind) -> Vec<StoredTensor> {
    let files = set.files(program).into_iter();
    files
        .map(|file| StoredTensor {
            name: strip_group(&file.name).to_owned(),
            dtype: file.dtype,
            shape: file.shape.clone(),
        })
        .collect()
}

/// Removes the prefix `GROUP:` from a tensor name such as `model:NAME`. Returns a name without prefix unchanged.
pub(crate) fn strip_group(tensor: &str) -> &str {
    tensor.split_once(':').map_or(tensor, |(_, name)| name)
}

fn unknown(tensor: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("there is no tensor `{tensor}`"))
}

/// Returns the error as one of input and output. A full disk stays recognizable.
pub(crate) fn as_io(error: FilesError) -> io::Error {
    match error {
        FilesError::DiskFull { .. } => io::Error::new(io::ErrorKind::StorageFull, error),
        other => io::Error::other(other),
    }
}

/// Fills `into` with values of a tensor, from byte `offset` of the tensor on. Fails if one is NaN or infinite.
fn read_finite(files: &WeightFiles, entry: &TensorEntry, offset: u64, into: &mut [u8]) -> io::Result<()> {
    files.read_at(entry, offset, into).map_err(as_io)?;
    if entry.dtype().is_some_and(|dtype| has_non_finite(dtype, into)) {
        let file = files.paths()[entry.file].display();
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{file} holds NaN or infinite weights")));
    }
    Ok(())
}

impl FileSpace for ModelSource<'_> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let &(files, entry) = self.entries.get(strip_group(tensor)).ok_or_else(|| unknown(tensor))?;
        read_finite(files, entry, offset, into)
    }

    fn write(&mut self, tensor: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is read-only")))
    }
}

/// Read-only source of the tensors in the files of a checkpoint. Reading fails at NaN and infinite values.
pub struct CheckpointReader<'a>(pub &'a WeightFiles);

impl FileSpace for CheckpointReader<'_> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let entry = self.0.entry(strip_group(tensor)).ok_or_else(|| unknown(tensor))?;
        if offset + into.len() as u64 > entry.bytes {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("`{tensor}` is shorter than planned")));
        }
        read_finite(self.0, entry, offset, into)
    }

    fn write(&mut self, tensor: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is read-only")))
    }
}

/// Write-only target that writes tensors to safetensors files. Each tensor is written in order, from its first to its
/// last byte.
pub struct TensorWriter<'a>(pub &'a mut WeightWriter);

impl FileSpace for TensorWriter<'_> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is write-only")))
    }

    fn write(&mut self, tensor: &str, _: u64, from: &[u8]) -> io::Result<()> {
        self.0.write(strip_group(tensor), from).map_err(as_io)
    }
}

/// Files of a merge of adapters into a model. Tensors named `model:NAME` and `adapter:NAME` are read from the first
/// field, tensors named `merged:NAME` are written to the second.
pub struct MergeFiles<'a, W: FileSpace>(pub ModelSource<'a>, pub W);

impl<W: FileSpace> FileSpace for MergeFiles<'_, W> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read(tensor, offset, into)
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        self.1.write(tensor, offset, from)
    }
}
