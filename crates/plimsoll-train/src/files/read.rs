//! Weights from `*.safetensors` files, read in pieces by position.

use super::error::{FilesError, HeaderError};
use super::header::{self, LENGTH_BYTES};
use plimsoll_core::{Bytes, DType};
use safetensors::Dtype;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The type of its elements in the file.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The file, by its number in [`WeightFiles::paths`].
    pub file: usize,
    /// Its first byte in the file.
    pub begin: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl Entry {
    /// The type in the words of Plimsoll, if it is one that tensors have.
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

/// One or several `*.safetensors` files, open for reading. Their headers were checked: every entry
/// lies inside its file, and no two overlap.
#[derive(Debug)]
pub struct WeightFiles {
    paths: Vec<PathBuf>,
    files: Vec<File>,
    entries: BTreeMap<String, Entry>,
}

impl WeightFiles {
    /// The weights of a model directory: `model.safetensors`, else what
    /// `model.safetensors.index.json` names, else every `*.safetensors`. None where there are none.
    ///
    /// # Errors
    /// Anything wrong with an index or a header.
    pub fn open(dir: &Path) -> Result<Option<WeightFiles>, FilesError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        if single.exists() {
            return WeightFiles::open_files(vec![single]).map(Some);
        }
        if index.exists() {
            return WeightFiles::open_index(dir, &index).map(Some);
        }
        let mut paths = Vec::new();
        for found in fs::read_dir(dir).map_err(|e| FilesError::io(dir, "list", e))? {
            let path = found.map_err(|e| FilesError::io(dir, "list", e))?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                paths.push(path);
            }
        }
        paths.sort();
        if paths.is_empty() { Ok(None) } else { WeightFiles::open_files(paths).map(Some) }
    }

    /// These very files.
    ///
    /// # Errors
    /// A file that cannot be read, a header that is wrong, a name that is in two files.
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

    /// The files that an index names. The index decides which file a tensor is read from.
    fn open_index(dir: &Path, index: &Path) -> Result<WeightFiles, FilesError> {
        let bad = |problem: String| FilesError::Index { path: index.to_owned(), problem };
        let text = read_small(index, header::MAX_HEADER_BYTES)?;
        let Index { weight_map } = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
        let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in &weight_map.0 {
            by_file.entry(file).or_default().push(name);
        }
        let mut weights = WeightFiles { paths: Vec::new(), files: Vec::new(), entries: BTreeMap::new() };
        for (file, names) in by_file {
            if Path::new(file).file_name().is_none_or(|name| name != file) {
                return Err(bad(format!("`{file}` is not the name of a file in this directory")));
            }
            if !dir.join(file).exists() {
                return Err(bad(format!("it names `{file}`, which is not there")));
            }
            let mut found: BTreeMap<String, Entry> = weights.add_file(dir.join(file))?.into_iter().collect();
            for name in names {
                let (name, entry) = found
                    .remove_entry(name)
                    .ok_or_else(|| bad(format!("it says that `{name}` is in `{file}`, but it is not")))?;
                weights.entries.insert(name, entry);
            }
        }
        Ok(weights)
    }

    fn add_file(&mut self, path: PathBuf) -> Result<Vec<(String, Entry)>, FilesError> {
        let bad = |source: HeaderError| FilesError::Header { path: path.clone(), source: Box::new(source) };
        let (file, file_bytes) = open_regular(&path)?;
        if file_bytes < LENGTH_BYTES {
            return Err(bad(HeaderError::Short { bytes: file_bytes }));
        }
        let mut prefix = [0; LENGTH_BYTES as usize];
        file.read_exact_at(&mut prefix, 0).map_err(|e| FilesError::io(&path, "read", e))?;
        let header_bytes = header::header_bytes(prefix, file_bytes).map_err(bad)?;
        let mut json = vec![0; header_bytes as usize];
        file.read_exact_at(&mut json, LENGTH_BYTES).map_err(|e| FilesError::io(&path, "read", e))?;
        let data = LENGTH_BYTES + header_bytes;
        let places = header::parse(&json, file_bytes - data).map_err(bad)?;
        let number = self.paths.len();
        self.paths.push(path);
        self.files.push(file);
        let entry = |place: header::Place| {
            let header::Place { name, dtype, shape, begin, bytes } = place;
            (name, Entry { dtype, shape, file: number, begin: data + begin, bytes })
        };
        Ok(places.into_iter().map(entry).collect())
    }

    /// The files, in the order of their numbers.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The tensor of that name.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// The tensor of that name, with the name as it is kept here.
    pub(super) fn named(&self, name: &str) -> Option<(&str, &Entry)> {
        self.entries.get_key_value(name).map(|(name, entry)| (name.as_str(), entry))
    }

    /// All tensors by name.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> Bytes {
        self.entries.values().map(|entry| Bytes(entry.bytes)).sum()
    }

    /// Fills `into` with the bytes of a tensor of these files, from byte `offset` of the tensor on.
    ///
    /// # Errors
    /// What the system says; the file may have been changed under us.
    ///
    /// # Panics
    /// When the piece is not inside the tensor.
    pub fn read_at(&self, entry: &Entry, offset: u64, into: &mut [u8]) -> Result<(), FilesError> {
        let end = offset.checked_add(into.len() as u64);
        assert!(end.is_some_and(|end| end <= entry.bytes), "read past the end of a tensor");
        self.files[entry.file]
            .read_exact_at(into, entry.begin + offset)
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

/// Opens a file for reading, with its size. Anything else than a regular file could block or never end.
pub(super) fn open_regular(path: &Path) -> Result<(File, u64), FilesError> {
    let problem = |problem| FilesError::NoFile { path: path.to_owned(), problem };
    let metadata = fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => problem("no such file"),
        _ => FilesError::io(path, "read", e),
    })?;
    if !metadata.is_file() {
        return Err(problem("not a regular file"));
    }
    let file = File::open(path).map_err(|e| FilesError::io(path, "read", e))?;
    Ok((file, metadata.len()))
}

/// The whole of a file that must not be larger than `most` bytes.
pub(super) fn read_small(path: &Path, most: u64) -> Result<Vec<u8>, FilesError> {
    let (file, bytes) = open_regular(path)?;
    if bytes > most {
        return Err(FilesError::NoFile { path: path.to_owned(), problem: "too large to be what it should be" });
    }
    let mut text = vec![0; bytes as usize];
    file.read_exact_at(&mut text, 0).map_err(|e| FilesError::io(path, "read", e))?;
    Ok(text)
}
