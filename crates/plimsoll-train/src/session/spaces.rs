//! The files behind file-space tensors: a model that is loaded, and files that are written.

use crate::files::{Entry, FilesError, ModelWeights, StoredTensor, WeightFiles, WeightWriter};
use plimsoll_core::DType;
use plimsoll_device::device::FileSpace;
use plimsoll_program::ProgramSet;
use std::collections::HashMap;
use std::io;

/// Tensors of a pretrained model, `model:NAME`, and of adapters, `adapter:NAME`. Weights that are no numbers are
/// refused here, where the file can still be named.
pub struct ModelSource<'a> {
    entries: HashMap<&'a str, (&'a WeightFiles, &'a Entry)>,
}

impl<'a> ModelSource<'a> {
    /// The weights of some directories.
    pub fn new(directories: impl IntoIterator<Item = &'a ModelWeights>) -> ModelSource<'a> {
        let all = directories.into_iter().flat_map(|weights| {
            weights.parameters.iter().map(|(p, entry)| (p.hf_name.as_str(), (&weights.files, entry)))
        });
        ModelSource { entries: all.collect() }
    }
}

/// The tensors of files that a Program reads or writes, as they are stored.
pub fn stored(set: &ProgramSet, program: &str) -> Vec<StoredTensor> {
    let files = set.files(program).into_iter();
    files
        .map(|file| StoredTensor {
            name: without_group(&file.name).to_owned(),
            dtype: file.dtype,
            shape: file.shape.clone(),
        })
        .collect()
}

/// The group that a file-space tensor's name starts with, taken off.
fn without_group(tensor: &str) -> &str {
    tensor.split_once(':').map_or(tensor, |(_, name)| name)
}

fn unknown(tensor: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("there is no tensor `{tensor}`"))
}

fn as_io(error: FilesError) -> io::Error {
    match error {
        FilesError::DiskFull { .. } => io::Error::new(io::ErrorKind::StorageFull, error),
        other => io::Error::other(other),
    }
}

/// Whether some number among the bytes is NaN or infinite: all bits of its exponent are set.
fn has_no_number(dtype: DType, bytes: &[u8]) -> bool {
    let sixteen = |mask: u16| bytes.as_chunks::<2>().0.iter().any(|b| u16::from_le_bytes(*b) & mask == mask);
    match dtype {
        DType::F64 => bytes.as_chunks::<8>().0.iter().any(|b| !f64::from_le_bytes(*b).is_finite()),
        DType::F32 => bytes.as_chunks::<4>().0.iter().any(|b| !f32::from_le_bytes(*b).is_finite()),
        DType::Bf16 => sixteen(0x7f80),
        DType::F16 => sixteen(0x7c00),
        DType::I32 | DType::U8 => false,
    }
}

impl FileSpace for ModelSource<'_> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let &(files, entry) = self.entries.get(without_group(tensor)).ok_or_else(|| unknown(tensor))?;
        files.read_at(entry, offset, into).map_err(as_io)?;
        if entry.dtype().is_some_and(|dtype| has_no_number(dtype, into)) {
            let file = files.paths()[entry.file].display();
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{file} holds NaN or infinite weights")));
        }
        Ok(())
    }

    fn write(&mut self, tensor: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is only read")))
    }
}

/// Tensors of a safetensors file, by their names: a checkpoint that is read.
pub struct Stored<'a>(pub &'a WeightFiles);

impl FileSpace for Stored<'_> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let entry = self.0.entry(without_group(tensor)).ok_or_else(|| unknown(tensor))?;
        if offset + into.len() as u64 > entry.bytes {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("`{tensor}` is shorter than the plan says"),
            ));
        }
        self.0.read_at(entry, offset, into).map_err(as_io)
    }

    fn write(&mut self, tensor: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is only read")))
    }
}

/// Tensors that are written, in order, each from its beginning to its end.
pub struct Storing<'a>(pub &'a mut WeightWriter);

impl FileSpace for Storing<'_> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is only written")))
    }

    fn write(&mut self, tensor: &str, _: u64, from: &[u8]) -> io::Result<()> {
        self.0.write(without_group(tensor), from).map_err(as_io)
    }
}

/// A model that becomes another one: `model:` and `adapter:` are read, `merged:` is written.
pub struct Merging<'a>(pub ModelSource<'a>, pub Storing<'a>);

impl FileSpace for Merging<'_> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read(tensor, offset, into)
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        self.1.write(tensor, offset, from)
    }
}
