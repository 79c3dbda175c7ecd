//! Writing of tensors to `*.safetensors` files, in pieces and in shards of bounded size.

use super::atomic;
use super::error::FilesError;
use super::header::LENGTH_BYTES;
use plimsoll_core::{Bytes, DType};
use rustix::fs::FallocateFlags;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Size limit of one `*.safetensors` file of a saved model (a shard); the default of transformers.
pub const MAX_SHARD_BYTES: Bytes = Bytes(5_000_000_000);

/// A tensor to be written to a `*.safetensors` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// The name of the tensor in the file.
    pub name: String,
    /// The type of the tensor's elements in the file.
    pub dtype: DType,
    /// The shape of the tensor.
    pub shape: Vec<u64>,
}

impl StoredTensor {
    /// Returns the size of the tensor in the file, in bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }

    fn dtype_name(&self) -> &'static str {
        match self.dtype {
            DType::F64 => "F64",
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
            DType::F16 => "F16",
            DType::I32 => "I32",
            DType::U8 => "U8",
        }
    }
}

/// A writer of one or more `*.safetensors` files. Tensors may be written in any order, each from its beginning to its
/// end. The files are complete once [`WeightWriter::finish`] has returned.
#[derive(Debug)]
pub struct WeightWriter {
    shards: Vec<(PathBuf, File)>,
    tensors: HashMap<String, TensorCursor>,
}

/// The write position of a tensor: its shard, and offsets in the shard's file.
#[derive(Debug)]
struct TensorCursor {
    shard: usize,
    next: u64,
    end: u64,
}

impl WeightWriter {
    /// Creates the files in `dir`. Tensors of at most `max_shard` bytes together go to `STEM.safetensors`. Larger ones
    /// go to `STEM-00001-of-00002.safetensors` and so on, with `STEM.safetensors.index.json`. The disk space is
    /// reserved here, so a full disk is reported before any tensor is written.
    ///
    /// # Errors
    /// A full disk, or a file that cannot be created or written.
    pub fn create(
        dir: &Path,
        stem: &str,
        tensors: &[StoredTensor],
        max_shard: Bytes,
    ) -> Result<WeightWriter, FilesError> {
        let shards = split_into_shards(tensors, max_shard.0);
        let file_name = |number: usize| match shards.len() {
            1 => format!("{stem}.safetensors"),
            several => format!("{stem}-{:05}-of-{several:05}.safetensors", number + 1),
        };
        let mut writer = WeightWriter { shards: Vec::new(), tensors: HashMap::new() };
        let mut weight_map = Map::new();
        for (number, tensors) in shards.iter().enumerate() {
            writer.create_shard(dir.join(file_name(number)), tensors)?;
            weight_map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), json!(file_name(number)))));
        }
        if shards.len() > 1 {
            let total: u64 = tensors.iter().map(StoredTensor::bytes).sum();
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            atomic::write_file(&dir.join(format!("{stem}.safetensors.index.json")), &pretty_json(&index))?;
        }
        Ok(writer)
    }

    /// Creates a shard and writes its header.
    fn create_shard(&mut self, path: PathBuf, tensors: &[&StoredTensor]) -> Result<(), FilesError> {
        let failed = |e| FilesError::io(&path, "write", e);
        let (header, data_bytes) = build_header(tensors);
        let data = LENGTH_BYTES + header.len() as u64;
        let file = File::create(&path).map_err(failed)?;
        reserve_space(&file, &path, data + data_bytes)?;
        file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).map_err(failed)?;
        file.write_all_at(&header, LENGTH_BYTES).map_err(failed)?;
        let mut next = data;
        for tensor in tensors {
            let slot = TensorCursor { shard: self.shards.len(), next, end: next + tensor.bytes() };
            next = slot.end;
            let duplicate = self.tensors.insert(tensor.name.clone(), slot);
            assert!(duplicate.is_none(), "two tensors named `{}`", tensor.name);
        }
        self.shards.push((path, file));
        Ok(())
    }

    /// Writes the next bytes of a tensor.
    ///
    /// # Errors
    /// A failed write.
    ///
    /// # Panics
    /// If the writer has no tensor `name`, or `bytes` exceed the rest of the tensor.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), FilesError> {
        let slot = self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor named `{name}` is stored here"));
        let next = slot.next + bytes.len() as u64;
        assert!(next <= slot.end, "more bytes than tensor `{name}` has");
        let (path, file) = &self.shards[slot.shard];
        file.write_all_at(bytes, slot.next).map_err(|e| FilesError::io(path, "write", e))?;
        slot.next = next;
        Ok(())
    }

    /// Syncs the files to disk, after which they are complete.
    ///
    /// # Errors
    /// A failed sync.
    ///
    /// # Panics
    /// If a tensor has not been written to its end.
    pub fn finish(self) -> Result<(), FilesError> {
        for (name, slot) in &self.tensors {
            assert!(slot.next == slot.end, "tensor `{name}` lacks {} bytes", slot.end - slot.next);
        }
        for (path, file) in &self.shards {
            file.sync_all().map_err(|e| FilesError::io(path, "sync", e))?;
        }
        Ok(())
    }
}

/// Splits tensors into shards as transformers does: in the given order, with a new shard when the next tensor would
/// exceed `max_shard` bytes. Within a shard, wide element types come first.
fn split_into_shards(tensors: &[StoredTensor], max_shard: u64) -> Vec<Vec<&StoredTensor>> {
    let mut shards: Vec<Vec<&StoredTensor>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        if bytes > 0 && bytes + tensor.bytes() > max_shard {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += tensor.bytes();
        shards.last_mut().expect("the list starts with one shard").push(tensor);
    }
    for shard in &mut shards {
        // Wide element types first aligns every tensor to its element size.
        shard.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bytes()));
    }
    shards
}

/// Returns the JSON header of a `*.safetensors` file with these tensors, padded to align the data, and the size of the
/// data in bytes.
fn build_header(tensors: &[&StoredTensor]) -> (Vec<u8>, u64) {
    let mut map = Map::new();
    // transformers refuses a file without the `format` entry.
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut begin = 0;
    for tensor in tensors {
        let end = begin + tensor.bytes();
        let entry = json!({"dtype": tensor.dtype_name(), "shape": tensor.shape, "data_offsets": [begin, end]});
        map.insert(tensor.name.clone(), entry);
        begin = end;
    }
    let mut json = Value::Object(map).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    (json, begin)
}

/// Reserves `bytes` bytes of disk space for the file, if the file system supports it. Otherwise only sets the file's
/// length.
fn reserve_space(file: &File, path: &Path, bytes: u64) -> Result<(), FilesError> {
    use rustix::io::Errno;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::NOSPC | Errno::DQUOT) => {
            Err(FilesError::DiskFull { path: path.to_owned(), needed: Some(Bytes(bytes)) })
        }
        Err(_) => file.set_len(bytes).map_err(|e| FilesError::io(path, "write", e)),
    }
}

/// Formats JSON with indentation and a final line break.
pub(super) fn pretty_json(value: &Value) -> Vec<u8> {
    let mut text = format!("{value:#}").into_bytes();
    text.push(b'\n');
    text
}
