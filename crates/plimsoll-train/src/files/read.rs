//! Reading of tensors from `*.safetensors` files, in pieces at any offset.

use super::error::{FilesError, HeaderError};
use super::header::{self, LENGTH_BYTES};
use super::stored_blocks::StoredBlocks;
use plimsoll_core::{Bytes, DType};
use plimsoll_device::regular_file;
use safetensors::Dtype;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::mem;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The type and shape of a stored tensor, and its place in the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// The type of the tensor's elements, as they are read.
    pub dtype: Dtype,
    /// The shape of the tensor.
    pub shape: Vec<u64>,
    /// Index of the file in [`WeightFiles::paths`].
    pub file: usize,
    /// Offset of the tensor's first byte in the file.
    pub begin: u64,
    /// Size of the tensor in bytes, as it is read.
    pub bytes: u64,
    /// The form of the tensor in the file if it is not read as it is stored.
    pub blocks: Option<StoredBlocks>,
}

impl TensorEntry {
    /// Returns the element type as a [`DType`], and `None` if Plimsoll does not support the type.
    pub fn dtype(&self) -> Option<DType> {
        Some(match self.dtype {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::Bf16,
            Dtype::F16 => DType::F16,
            Dtype::I32 => DType::I32,
            Dtype::U8 => DType::U8,
            _ => return None,
        })
    }
}

/// One or more files of weights, open for reading: `*.safetensors`, or a GGUF file. Their headers are checked: every tensor lies inside its file,
/// and no two overlap.
#[derive(Debug)]
pub struct WeightFiles {
    paths: Vec<PathBuf>,
    files: Vec<File>,
    entries: BTreeMap<String, TensorEntry>,
}

impl WeightFiles {
    /// Opens the weights of a model directory: `model.safetensors`, else the files of `model.safetensors.index.json`,
    /// else every `*.safetensors`. Returns `None` if the directory has none.
    ///
    /// # Errors
    /// An invalid index or header, or a file that cannot be read.
    pub fn open(dir: &Path) -> Result<Option<WeightFiles>, FilesError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        if regular_file::is_present(&single) {
            return WeightFiles::open_files(vec![single]).map(Some);
        }
        if regular_file::is_present(&index) {
            return WeightFiles::open_indexed(dir, &index).map(Some);
        }
        let mut paths = Vec::new();
        for file in fs::read_dir(dir).map_err(|e| FilesError::io(dir, "list", e))? {
            let path = file.map_err(|e| FilesError::io(dir, "list", e))?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                paths.push(path);
            }
        }
        paths.sort();
        if paths.is_empty() { Ok(None) } else { WeightFiles::open_files(paths).map(Some) }
    }

    /// Opens the given files.
    ///
    /// # Errors
    /// A file that cannot be read, an invalid header, or a tensor that is in two files.
    pub fn open_files(paths: Vec<PathBuf>) -> Result<WeightFiles, FilesError> {
        let mut weights = WeightFiles { paths: Vec::new(), files: Vec::new(), entries: BTreeMap::new() };
        for path in paths {
            for (name, entry) in weights.add_file(path)? {
                let second = entry.file;
                if let Some(first) = weights.entries.insert(name.clone(), entry) {
                    let [first, second] = [first.file, second].map(|file| weights.paths[file].clone());
                    return Err(FilesError::Duplicate { name, first, second });
                }
            }
        }
        Ok(weights)
    }

    /// Returns the tensors of an open file of another format. `entries` have their places, by name.
    pub(crate) fn of_file(path: PathBuf, file: File, entries: BTreeMap<String, TensorEntry>) -> WeightFiles {
        WeightFiles { paths: vec![path], files: vec![file], entries }
    }

    /// Opens the files that the index (`*.safetensors.index.json`) lists. The index decides the file from which each
    /// tensor is read.
    fn open_indexed(dir: &Path, index: &Path) -> Result<WeightFiles, FilesError> {
        let invalid = |problem: String| FilesError::Index { path: index.to_owned(), problem };
        let text = read_small(index, header::MAX_HEADER_BYTES)?;
        let Index { weight_map } = serde_json::from_slice(&text).map_err(|e| invalid(e.to_string()))?;
        let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in &weight_map.0 {
            by_file.entry(file).or_default().push(name);
        }
        let mut weights = WeightFiles { paths: Vec::new(), files: Vec::new(), entries: BTreeMap::new() };
        for (file, names) in by_file {
            if Path::new(file).file_name().is_none_or(|name| name != file) {
                return Err(invalid(format!("`{file}` is not the name of a file in this directory")));
            }
            if !dir.join(file).exists() {
                return Err(invalid(format!("`{file}` does not exist")));
            }
            let mut in_file: BTreeMap<String, TensorEntry> = weights.add_file(dir.join(file))?.into_iter().collect();
            for name in names {
                match in_file.remove_entry(name) {
                    Some((name, entry)) => drop(weights.entries.insert(name, entry)),
                    None if is_rotary_frequency(name) => {}
                    None => return Err(invalid(format!("tensor `{name}` is not in `{file}`"))),
                }
            }
        }
        Ok(weights)
    }

    /// Opens a file and adds it to the list. Returns the name and entry of each tensor in it.
    fn add_file(&mut self, path: PathBuf) -> Result<Vec<(String, TensorEntry)>, FilesError> {
        let invalid = |source: HeaderError| FilesError::Header { path: path.clone(), source: Box::new(source) };
        let (file, file_bytes) = open_regular(&path)?;
        if file_bytes < LENGTH_BYTES {
            return Err(invalid(HeaderError::TooShort { bytes: file_bytes }));
        }
        let mut prefix = [0; LENGTH_BYTES as usize];
        file.read_exact_at(&mut prefix, 0).map_err(|e| FilesError::io(&path, "read", e))?;
        // A pointer begins with its version.
        if prefix == *b"version " {
            return Err(invalid(HeaderError::LfsPointer));
        }
        let header_bytes = header::check_header_bytes(prefix, file_bytes).map_err(invalid)?;
        let mut json = vec![0; header_bytes as usize];
        file.read_exact_at(&mut json, LENGTH_BYTES).map_err(|e| FilesError::io(&path, "read", e))?;
        let data = LENGTH_BYTES + header_bytes;
        let tensors = header::parse_header(&json, file_bytes - data).map_err(invalid)?;
        let file_index = self.paths.len();
        self.paths.push(path);
        self.files.push(file);
        let entry = |tensor: header::HeaderEntry| {
            let header::HeaderEntry { name, dtype, shape, begin, bytes } = tensor;
            (name, TensorEntry { dtype, shape, file: file_index, begin: data + begin, bytes, blocks: None })
        };
        Ok(tensors.into_iter().map(entry).collect())
    }

    /// Renames all tensors, and leaves out those for which `rename` returns `None`. Returns the number left out.
    ///
    /// # Errors
    /// Two tensors get the same name.
    pub(super) fn rename(&mut self, rename: impl Fn(&str) -> Option<String>) -> Result<usize, FilesError> {
        let (mut excluded, mut renamed) = (0, BTreeMap::new());
        for (name, entry) in mem::take(&mut self.entries) {
            let Some(name) = rename(&name) else {
                excluded += 1;
                continue;
            };
            let second = entry.file;
            if let Some(first) = renamed.insert(name.clone(), entry) {
                let [first, second] = [first.file, second].map(|file| self.paths[file].clone());
                return Err(FilesError::Duplicate { name, first, second });
            }
        }
        self.entries = renamed;
        Ok(excluded)
    }

    /// Returns the paths of the files. [`TensorEntry::file`] is an index into them.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Returns type, shape and place of the tensor named `name`, and `None` if no file has it.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.get(name)
    }

    /// Returns the entry of the tensor named `name` (type, shape and place), and the name once more, borrowed from
    /// these files. Returns `None` if no file has the tensor.
    pub(super) fn entry_with_name(&self, name: &str) -> Option<(&str, &TensorEntry)> {
        self.entries.get_key_value(name).map(|(name, entry)| (name.as_str(), entry))
    }

    /// Returns each tensor's name with its type, shape and place, ordered by name.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Returns the total size of all tensors in the files.
    pub fn bytes(&self) -> Bytes {
        self.entries.values().map(|entry| Bytes(entry.bytes)).sum()
    }

    /// Fills `into` with bytes of a tensor, from byte `offset` of the tensor on.
    ///
    /// # Errors
    /// A failed read, such as after another process truncated the file.
    ///
    /// # Panics
    /// If the piece is not inside the tensor.
    pub fn read_at(&self, entry: &TensorEntry, offset: u64, into: &mut [u8]) -> Result<(), FilesError> {
        let end = offset.checked_add(into.len() as u64);
        assert!(end.is_some_and(|end| end <= entry.bytes), "read past the end of a tensor");
        let file = &self.files[entry.file];
        match &entry.blocks {
            Some(blocks) => blocks.read_at(file, entry.begin, offset, into),
            None => file.read_exact_at(into, entry.begin + offset),
        }
        .map_err(|e| FilesError::io(&self.paths[entry.file], "read", e))
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        header::unique_map(deserializer, "tensor", &[]).map(WeightMap)
    }
}

/// Returns whether a tensor holds rotary frequencies. Old versions of transformers stored them; they are always
/// recomputed.
pub(super) fn is_rotary_frequency(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

/// Opens a regular file for reading and returns it with its size in bytes.
pub(super) fn open_regular(path: &Path) -> Result<(File, u64), FilesError> {
    let problem = |problem| FilesError::BadPath { path: path.to_owned(), problem };
    let file = regular_file::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => problem("no such file"),
        _ => FilesError::io(path, "read", e),
    })?;
    let bytes = file.metadata().map_err(|e| FilesError::io(path, "read", e))?.len();
    Ok((file, bytes))
}

/// Reads a whole file. Fails if it is larger than `max_bytes` bytes.
pub(super) fn read_small(path: &Path, max_bytes: u64) -> Result<Vec<u8>, FilesError> {
    let (file, bytes) = open_regular(path)?;
    if bytes > max_bytes {
        return Err(FilesError::BadPath {
            path: path.to_owned(),
            problem: "too large for a configuration or index file",
        });
    }
    let mut text = vec![0; bytes as usize];
    file.read_exact_at(&mut text, 0).map_err(|e| FilesError::io(path, "read", e))?;
    Ok(text)
}
