//! Writing of tensors to `*.safetensors` files, in pieces and in shards of bounded size.

use super::atomic;
use super::error::FilesError;
use super::header::LENGTH_BYTES;
use super::values::{FileSummary, has_non_finite};
use plimsoll_core::{Bytes, DType};
use rustix::fs::FallocateFlags;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
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
    shards: Vec<Shard>,
    tensors: HashMap<String, TensorCursor>,
    /// Name and summary of the index file; `None` for a single shard.
    index: Option<(String, FileSummary)>,
}

/// A `*.safetensors` file being written.
#[derive(Debug)]
struct Shard {
    name: String,
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Checksum of the length field and the header.
    header: crc32fast::Hasher,
}

/// The write position of a tensor: its shard, and offsets in the shard's file.
#[derive(Debug)]
struct TensorCursor {
    shard: usize,
    next: u64,
    end: u64,
    dtype: DType,
    /// Checksum of the bytes written so far.
    checksum: crc32fast::Hasher,
    /// Whether a value written so far is NaN or infinite.
    non_finite: bool,
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
        let mut writer = WeightWriter { shards: Vec::new(), tensors: HashMap::new(), index: None };
        let mut weight_map = Map::new();
        for (number, tensors) in shards.iter().enumerate() {
            writer.create_shard(dir, file_name(number), tensors)?;
            weight_map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), json!(file_name(number)))));
        }
        if shards.len() > 1 {
            let total: u64 = tensors.iter().map(StoredTensor::bytes).sum();
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            let (name, text) = (format!("{stem}.safetensors.index.json"), pretty_json(&index));
            atomic::write_file(&dir.join(&name), &text)?;
            writer.index = Some((name, FileSummary::of(&text)));
        }
        Ok(writer)
    }

    /// Creates a shard and writes its header.
    fn create_shard(&mut self, dir: &Path, name: String, tensors: &[&StoredTensor]) -> Result<(), FilesError> {
        let path = dir.join(&name);
        let failed = |e| FilesError::io(&path, "write", e);
        let (header, data_bytes) = build_header(tensors);
        let data = LENGTH_BYTES + header.len() as u64;
        let file = File::create(&path).map_err(failed)?;
        reserve_space(&file, &path, data + data_bytes)?;
        let text = [&(header.len() as u64).to_le_bytes(), &header[..]].concat();
        file.write_all_at(&text, 0).map_err(failed)?;
        let mut next = data;
        for tensor in tensors {
            let slot = TensorCursor {
                shard: self.shards.len(),
                next,
                end: next + tensor.bytes(),
                dtype: tensor.dtype,
                checksum: crc32fast::Hasher::new(),
                non_finite: false,
            };
            next = slot.end;
            let duplicate = self.tensors.insert(tensor.name.clone(), slot);
            assert!(duplicate.is_none(), "two tensors named `{}`", tensor.name);
        }
        let mut header = crc32fast::Hasher::new();
        header.update(&text);
        self.shards.push(Shard { name, path, file, bytes: data + data_bytes, header });
        Ok(())
    }

    /// Writes the next values of a tensor. NaN and infinite values are reported by [`WeightWriter::finish`].
    ///
    /// # Errors
    /// A failed write.
    ///
    /// # Panics
    /// If the writer has no tensor `name`, or `bytes` exceed the rest of the tensor or end inside a value.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), FilesError> {
        let slot = self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor named `{name}` is stored here"));
        let next = slot.next + bytes.len() as u64;
        assert!(next <= slot.end, "more bytes than tensor `{name}` has");
        assert!((bytes.len() as u64).is_multiple_of(slot.dtype.bytes()), "tensor `{name}` is cut inside a value");
        let shard = &self.shards[slot.shard];
        shard.file.write_all_at(bytes, slot.next).map_err(|e| FilesError::io(&shard.path, "write", e))?;
        slot.checksum.update(bytes);
        slot.non_finite |= has_non_finite(slot.dtype, bytes);
        slot.next = next;
        Ok(())
    }

    /// Syncs the files to disk, after which they are complete. Returns size and checksum of each file by its name.
    ///
    /// # Errors
    /// A tensor holds NaN or infinite values, or a failed sync.
    ///
    /// # Panics
    /// If a tensor has not been written to its end.
    pub fn finish(self) -> Result<BTreeMap<String, FileSummary>, FilesError> {
        let mut tensors: Vec<(String, TensorCursor)> = self.tensors.into_iter().collect();
        tensors.sort_by_key(|(_, slot)| (slot.shard, slot.end));
        let mut checksums: Vec<crc32fast::Hasher> = self.shards.iter().map(|shard| shard.header.clone()).collect();
        for (tensor, slot) in tensors {
            assert!(slot.next == slot.end, "tensor `{tensor}` lacks {} bytes", slot.end - slot.next);
            if slot.non_finite {
                return Err(FilesError::NotFinite { path: self.shards[slot.shard].path.clone(), tensor });
            }
            checksums[slot.shard].combine(&slot.checksum);
        }
        let mut files: BTreeMap<String, FileSummary> = self.index.into_iter().collect();
        for (shard, checksum) in self.shards.into_iter().zip(checksums) {
            shard.file.sync_all().map_err(|e| FilesError::io(&shard.path, "sync", e))?;
            files.insert(shard.name, FileSummary { bytes: Bytes(shard.bytes), crc32: checksum.finalize() });
        }
        Ok(files)
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
pub(crate) fn reserve_space(file: &File, path: &Path, bytes: u64) -> Result<(), FilesError> {
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
