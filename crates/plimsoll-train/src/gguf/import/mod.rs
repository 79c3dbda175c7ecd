//! A GGUF file as a model: its keys become `config.json`, its tokenizer the files of a Hugging Face directory, and its
//! tensors are read as the weights of that directory.
//!
//! | module | content |
//! |---|---|
//! | `settings` | keys to `config.json` |
//! | `tokenizer` | the tokenizer to `tokenizer.json` and `tokenizer_config.json` |
//!
//! The small files are written to the cache once. Weights stay in the GGUF file. Those in blocks are converted to f32 while
//! they are read, piece by piece.

mod settings;
mod tokenizer;

use crate::block_types::BlockType;
use crate::files::{
    FilesError, ModelDir, ModelWeights, ReadConfig, StoredBlocks, TensorEntry, WeightFiles, atomic, read_config,
};
use crate::gguf::architecture::{is_rotated, name_architecture, name_tensor, rotates_neighbours, stores_one_more};
use crate::gguf::error::GgufError;
use crate::gguf::file::{GgufFile, StoredTensor};
use plimsoll_device::cache;
use plimsoll_program::models::{ModelConfig, Parameter};
use safetensors::Dtype;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tokenizer::TokenizerFiles;

/// Changes with the content of the files that are written to the cache, and with the models that are refused.
const CACHE_VERSION: u32 = 3;
/// Name of the tensor with divisors of rotary frequencies.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// Opens a model: a Hugging Face directory, or a GGUF file, whose name ends in `.gguf`.
///
/// # Errors
/// See [`ModelDir::open`]. A GGUF file that is damaged, or of a model or a type that is not supported.
pub fn open_directory_or_file(path: &Path, ignore_keys: &[String]) -> Result<ModelDir, GgufError> {
    match path.extension().is_some_and(|extension| extension == "gguf") {
        true => open_model(path, ignore_keys),
        false => Ok(ModelDir::open(path, ignore_keys)?),
    }
}

/// Opens a GGUF file as a model. Keys of `ignore_keys` are ignored as in [`ModelDir::open`].
///
/// # Errors
/// A file that cannot be read or is damaged; a model, a tokenizer or a type of tensors that is not supported; no folder for
/// the cache.
fn open_model(path: &Path, ignore_keys: &[String]) -> Result<ModelDir, GgufError> {
    let file = GgufFile::open(path)?;
    let refuse = |part: String| GgufError::UnsupportedModel { path: path.to_owned(), part };
    if file.keys.get("split.count").and_then(Value::as_u64).is_some_and(|count| count > 1) {
        return Err(refuse("it is one of several parts".to_owned()));
    }
    let folder = cache_folder(&file)?;
    let config_path = folder.join("config.json");
    if !config_path.is_file() {
        write_folder(&file, &folder).map_err(|error| error.at(path))?;
    }
    let ReadConfig { mut config, raw: raw_config, .. } = read_config(&config_path, ignore_keys)?;
    config.eos = settings::end_tokens(&file);
    let entries = match_tensors(&file, &config).map_err(refuse)?;
    let tokenizer_path = Some(folder.join("tokenizer.json")).filter(|file| file.is_file());
    let by_name = entries.iter().map(|(parameter, entry)| (parameter.hf_name.clone(), entry.clone())).collect();
    let files = WeightFiles::of_file(file.path, file.file, by_name);
    let weights = Some(ModelWeights { files, parameters: entries });
    Ok(ModelDir { path: folder, config, raw_config, other_parts: None, weights, tokenizer_path })
}

/// Returns the folder in the cache for the small files of a model. Its name changes with the file.
fn cache_folder(file: &GgufFile) -> Result<PathBuf, GgufError> {
    let path = &file.path;
    let cache = cache::folder().ok_or_else(|| GgufError::NoCache { path: path.clone() })?;
    let metadata = file.file.metadata().map_err(|error| FilesError::io(path, "read", error))?;
    let absolute = path.canonicalize().map_err(|error| FilesError::io(path, "read", error))?;
    let facts = format!(
        "{CACHE_VERSION} {} {} {}.{:09}",
        absolute.display(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec()
    );
    let digest = Sha256::digest(facts.as_bytes());
    let name: String = digest[..12].iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(cache.join("gguf").join(name))
}

/// The reason why the small files of a model cannot be made.
pub(super) enum ImportError {
    Files(FilesError),
    Unsupported(String),
}

impl ImportError {
    fn at(self, path: &Path) -> GgufError {
        match self {
            ImportError::Files(error) => error.into(),
            ImportError::Unsupported(part) => GgufError::UnsupportedModel { path: path.to_owned(), part },
        }
    }
}

/// Reads the `config.json` of a model, and its tokenizer if it has one.
pub(super) fn read_parts(file: &GgufFile) -> Result<(Value, Option<TokenizerFiles>), ImportError> {
    let divisors = rope_divisors(file).map_err(ImportError::Files)?;
    let tokenizer = tokenizer::read_tokenizer(file).map_err(ImportError::Unsupported)?;
    let config = settings::read_settings(file, &divisors).map_err(ImportError::Unsupported)?;
    Ok((config, tokenizer))
}

/// Writes the small files of a model; `config.json` is the last one.
fn write_folder(file: &GgufFile, folder: &Path) -> Result<(), ImportError> {
    let (config, tokenizer) = read_parts(file)?;
    let write =
        |name: &str, text: String| atomic::write_file(&folder.join(name), text.as_bytes()).map_err(ImportError::Files);
    fs::create_dir_all(folder).map_err(|error| ImportError::Files(FilesError::io(folder, "create", error)))?;
    if let Some(files) = tokenizer {
        write("tokenizer.json", files.tokenizer.to_string())?;
        write("tokenizer_config.json", files.config.to_string())?;
        for (name, text) in files.templates {
            write_template(folder, &name, &text).map_err(ImportError::Files)?;
        }
    }
    write("generation_config.json", json!({ "eos_token_id": settings::end_tokens(file) }).to_string())?;
    write("config.json", format!("{config:#}"))
}

/// Writes a chat template, into a folder of its own unless it is the default one.
fn write_template(folder: &Path, name: &str, text: &str) -> Result<(), FilesError> {
    if name == "default" {
        return atomic::write_file(&folder.join("chat_template.jinja"), text.as_bytes());
    }
    let is_name =
        !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-".contains(letter));
    if !is_name {
        return Ok(());
    }
    let others = folder.join("additional_chat_templates");
    fs::create_dir_all(&others).map_err(|error| FilesError::io(&others, "create", error))?;
    atomic::write_file(&others.join(format!("{name}.jinja")), text.as_bytes())
}

/// Reads the divisors of rotary frequencies; none if the file has no such tensor.
fn rope_divisors(file: &GgufFile) -> Result<Vec<f32>, FilesError> {
    let Some(tensor) = file.tensors.get(ROPE_DIVISORS).filter(|tensor| tensor.block_type == BlockType::F32) else {
        return Ok(Vec::new());
    };
    let elements: u64 = tensor.shape.iter().product();
    let stored = StoredBlocks { block_type: BlockType::F32, columns: elements, head_rows: None, adds_one: false };
    let mut bytes = vec![0; 4 * elements as usize];
    let read = stored.read_at(&file.file, tensor.begin, 0, &mut bytes);
    read.map_err(|error| FilesError::io(&file.path, "read", error))?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Finds the tensor of each parameter.
///
/// # Errors
/// A description of a tensor that is missing, has another shape, or belongs to no parameter.
fn match_tensors(file: &GgufFile, config: &ModelConfig) -> Result<Vec<(Parameter, TensorEntry)>, String> {
    let architecture = name_architecture(config.model_type);
    let mut unused: BTreeSet<&str> = file.tensors.keys().map(String::as_str).collect();
    unused.remove(ROPE_DIVISORS);
    let mut matched = Vec::new();
    for parameter in config.hf_parameters() {
        let name = name_tensor(architecture, &parameter.hf_name);
        let tensor = file.tensors.get(&name).ok_or_else(|| format!("tensor `{name}` is missing"))?;
        if tensor.shape != parameter.shape {
            return Err(format!("tensor `{name}` has shape {:?}, expected {:?}", tensor.shape, parameter.shape));
        }
        unused.remove(&*name);
        let is_interleaved = rotates_neighbours(architecture) && is_rotated(&parameter);
        let head_rows = is_interleaved.then_some(config.head_dim);
        let entry = to_entry(tensor, head_rows, stores_one_more(config, &parameter));
        matched.push((parameter, entry));
    }
    match unused.first() {
        Some(name) => Err(format!("tensor `{name}` belongs to no part of a {} model", config.model_type)),
        None => Ok(matched),
    }
}

/// Returns the place of a tensor. Floats in the form of Hugging Face files are read as they are, all others as f32.
/// `head_rows` and `adds_one` are those of [`StoredBlocks`].
fn to_entry(tensor: &StoredTensor, head_rows: Option<u64>, adds_one: bool) -> TensorEntry {
    let StoredTensor { shape, block_type, begin } = tensor;
    let elements: u64 = shape.iter().product();
    let plain = match block_type {
        BlockType::F32 => Some(Dtype::F32),
        BlockType::F16 => Some(Dtype::F16),
        BlockType::Bf16 => Some(Dtype::BF16),
        _ => None,
    };
    let plain = plain.filter(|_| head_rows.is_none() && !adds_one);
    // A vector, such as a bias, has an element for each row of its matrix.
    let columns = shape.get(1).copied().unwrap_or(1);
    let blocks = plain.is_none().then_some(StoredBlocks { block_type: *block_type, columns, head_rows, adds_one });
    TensorEntry {
        dtype: plain.unwrap_or(Dtype::F32),
        shape: shape.clone(),
        file: 0,
        begin: *begin,
        bytes: plain.map_or(4 * elements, |_| block_type.bytes(elements)),
        blocks,
    }
}
