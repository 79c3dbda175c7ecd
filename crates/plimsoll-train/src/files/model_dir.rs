//! A Hugging Face model directory: `config.json`, weights that match it, and side files (tokenizer, generation, chat).

use super::atomic;
use super::error::FilesError;
use super::read::{TensorEntry, WeightFiles, read_small};
use super::write::{MAX_SHARD_BYTES, StoredTensor, WeightWriter, pretty_json};
use plimsoll_core::{Bytes, DType};
use plimsoll_program::models::decoder::WeightSource;
use plimsoll_program::models::{ConfigError, ModelConfig, Parameter};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Size limit of a `config.json`. A larger file is not a model configuration.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Names of the files of the tokenizer, generation settings and chat templates. A saved model gets unchanged copies.
const SIDE_FILES: [&str; 11] = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
];

/// An opened Hugging Face model directory, whose configuration and weights match.
#[derive(Debug)]
pub struct ModelDir {
    /// Path of the directory.
    pub path: PathBuf,
    /// The model's configuration.
    pub config: ModelConfig,
    /// The parsed `config.json`, with the keys that Plimsoll does not use. A saved model keeps them.
    pub raw_config: Value,
    /// The weights; `None` if the directory holds only a configuration.
    pub weights: Option<ModelWeights>,
    /// Path of `tokenizer.json`; `None` if there is none.
    pub tokenizer_path: Option<PathBuf>,
}

/// The open weight files of a model, with the place of each parameter. They match a configuration: every parameter
/// exists with its shape, stored as F32, BF16 or F16.
#[derive(Debug)]
pub struct ModelWeights {
    /// The open files.
    pub files: WeightFiles,
    /// Every parameter with its place in the files, in the order of [`ModelConfig::hf_parameters`]. For adapters, in
    /// the order of [`ModelConfig::adapter_parameters`].
    pub parameters: Vec<(Parameter, TensorEntry)>,
}

impl ModelWeights {
    /// Returns the stored type of each parameter, from which the Programs that load these files are built.
    pub fn source(&self) -> WeightSource {
        let dtype = |entry: &TensorEntry| entry.dtype().expect("opened weights are floats");
        WeightSource::Files { dtypes: self.parameters.iter().map(|(_, entry)| dtype(entry)).collect() }
    }

    /// Returns the size of all parameters in the files.
    pub fn bytes(&self) -> Bytes {
        self.parameters.iter().map(|(_, entry)| Bytes(entry.bytes)).sum()
    }

    /// Returns the set of element types in which parameters are stored.
    pub fn dtypes(&self) -> BTreeSet<DType> {
        self.parameters.iter().filter_map(|(_, entry)| entry.dtype()).collect()
    }
}

/// Reads a `config.json` without weights. Returns the model's configuration and the parsed JSON. Keys that Plimsoll
/// does not know are errors, unless `ignore_keys` names them.
///
/// # Errors
/// A file that cannot be read, or that does not configure a model that Plimsoll supports.
pub fn read_config(path: &Path, ignore_keys: &[String]) -> Result<(ModelConfig, Value), FilesError> {
    let invalid = |source| FilesError::Config { path: path.to_owned(), source: Box::new(source) };
    let text = String::from_utf8(read_small(path, MAX_CONFIG_BYTES)?)
        .map_err(|_| invalid(ConfigError::Json { message: "it is not UTF-8".into() }))?;
    let config = ModelConfig::from_json(&text, ignore_keys).map_err(invalid)?;
    let raw = serde_json::from_str(&text).map_err(|e| invalid(ConfigError::Json { message: e.to_string() }))?;
    Ok((config, raw))
}

impl ModelDir {
    /// Opens a model directory and checks that its weights match its configuration. For `ignore_keys` see
    /// [`ModelConfig::from_json`].
    ///
    /// # Errors
    /// An invalid configuration, an invalid header of a weight file, or weights that do not match the configuration.
    pub fn open(path: &Path, ignore_keys: &[String]) -> Result<ModelDir, FilesError> {
        if !path.is_dir() {
            let is_file_name = path.extension().is_some_and(|extension| extension == "json");
            let problem = if is_file_name { "no such file" } else { "no such directory" };
            return Err(FilesError::BadPath { path: path.to_owned(), problem });
        }
        let (config, raw_config) = read_config(&path.join("config.json"), ignore_keys)?;
        let weights = match WeightFiles::open(path)? {
            Some(files) => Some(match_weights(path, &config, files)?),
            None => None,
        };
        let tokenizer_path = Some(path.join("tokenizer.json")).filter(|file| file.is_file());
        Ok(ModelDir { path: path.to_owned(), config, raw_config, weights, tokenizer_path })
    }

    /// Returns the weights; their absence is an error.
    ///
    /// # Errors
    /// The directory holds only a configuration.
    pub fn require_weights(&self) -> Result<&ModelWeights, FilesError> {
        self.weights.as_ref().ok_or_else(|| {
            let formats = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.ckpt"];
            let other = formats.into_iter().find(|name| self.path.join(name).exists()).map(String::from);
            FilesError::NoWeights { dir: self.path.clone(), other }
        })
    }
}

/// Finds every parameter of `config` in `files`, and refuses missing or unexpected tensors.
fn match_weights(dir: &Path, config: &ModelConfig, files: WeightFiles) -> Result<ModelWeights, FilesError> {
    let mut unused: BTreeSet<&str> = files.entries().map(|(name, _)| name).collect();
    let mut missing = Vec::new();
    let mut matched = Vec::new();
    for parameter in config.hf_parameters() {
        match find_parameter(&files, &parameter.hf_name) {
            Some((name, entry)) => {
                unused.remove(name);
                check_tensor(&files, name, entry, &parameter)?;
                matched.push((parameter, entry.clone()));
            }
            None => missing.push(parameter.hf_name),
        }
    }
    // Rotary frequencies were stored by old versions of transformers. They are always recomputed.
    unused.retain(|name| !name.ends_with("rotary_emb.inv_freq"));
    let has_redundant_head = config.tied && unused.remove("lm_head.weight");
    if !missing.is_empty() || !unused.is_empty() {
        let extra = unused.into_iter().map(String::from).collect();
        return Err(FilesError::WeightNames { dir: dir.to_owned(), missing, extra });
    }
    if has_redundant_head {
        // transformers ties head and embedding only if they are equal.
        let (_, embedding) = &matched[0];
        let head = files.entry("lm_head.weight").expect("checked above");
        if !tensors_equal(&files, embedding, head)? {
            return Err(FilesError::HeadNotTied { dir: dir.to_owned(), name: "lm_head.weight".into() });
        }
    }
    Ok(ModelWeights { parameters: matched, files })
}

/// Finds the tensor named `name`, or else the one with that name without the prefix `model.`. A model that was saved
/// without its head has such names, which transformers accepts, too. Returns `None` if there is neither.
fn find_parameter<'a>(files: &'a WeightFiles, name: &str) -> Option<(&'a str, &'a TensorEntry)> {
    files.entry_with_name(name).or_else(|| files.entry_with_name(name.strip_prefix("model.")?))
}

/// Checks that a tensor has the parameter's shape and is stored as F32, BF16 or F16.
pub(super) fn check_tensor(
    files: &WeightFiles,
    name: &str,
    entry: &TensorEntry,
    parameter: &Parameter,
) -> Result<(), FilesError> {
    let path = || files.paths()[entry.file].clone();
    if entry.shape != parameter.shape {
        let (found, expected) = (entry.shape.clone(), parameter.shape.clone());
        return Err(FilesError::WeightShape { path: path(), name: name.to_owned(), found, expected });
    }
    match entry.dtype() {
        Some(DType::F32 | DType::Bf16 | DType::F16) => Ok(()),
        _ => Err(FilesError::WeightType { path: path(), name: name.to_owned(), found: entry.dtype.to_string() }),
    }
}

/// Returns whether two tensors have the same type, shape and bytes.
fn tensors_equal(files: &WeightFiles, a: &TensorEntry, b: &TensorEntry) -> Result<bool, FilesError> {
    const PIECE: u64 = 1 << 18;
    if a.dtype != b.dtype || a.shape != b.shape {
        return Ok(false);
    }
    let (mut a_bytes, mut b_bytes) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
    for offset in (0..a.bytes).step_by(PIECE as usize) {
        let length = PIECE.min(a.bytes - offset) as usize;
        files.read_at(a, offset, &mut a_bytes[..length])?;
        files.read_at(b, offset, &mut b_bytes[..length])?;
        if a_bytes[..length] != b_bytes[..length] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes a model directory and replaces an existing one. `config` becomes `config.json`, and `write_weights` writes
/// `tensors`. Tokenizer, generation settings and chat templates are copied from `side_files_from`, if it is given.
///
/// # Errors
/// A failure of `write_weights` or of a file operation. An existing directory is then kept.
pub fn write_model_dir<E: From<FilesError>>(
    path: &Path,
    config: &Value,
    tensors: &[StoredTensor],
    side_files_from: Option<&Path>,
    write_weights: impl FnOnce(&mut WeightWriter) -> Result<(), E>,
) -> Result<(), E> {
    atomic::write_dir(path, |dir| {
        let mut writer = WeightWriter::create(dir, "model", tensors, MAX_SHARD_BYTES)?;
        write_weights(&mut writer)?;
        writer.finish()?;
        atomic::write_file(&dir.join("config.json"), &pretty_json(config))?;
        if let Some(from) = side_files_from {
            copy_side_files(from, dir)?;
        }
        Ok(())
    })
}

/// Copies the files of the tokenizer, generation settings and chat templates from one model directory to another.
///
/// # Errors
/// A file that cannot be read or written.
pub fn copy_side_files(from: &Path, to: &Path) -> Result<(), FilesError> {
    for name in SIDE_FILES {
        copy_if_present(&from.join(name), &to.join(name))?;
    }
    Ok(())
}

/// Copies a file, or a directory with the files directly in it. A missing source is skipped.
fn copy_if_present(from: &Path, to: &Path) -> Result<(), FilesError> {
    if from.is_file() {
        fs::copy(from, to).map_err(|e| FilesError::io(to, "write", e))?;
    } else if from.is_dir() {
        fs::create_dir_all(to).map_err(|e| FilesError::io(to, "create", e))?;
        for child in fs::read_dir(from).map_err(|e| FilesError::io(from, "list", e))? {
            let name = child.map_err(|e| FilesError::io(from, "list", e))?.file_name();
            if from.join(&name).is_file() {
                copy_if_present(&from.join(&name), &to.join(&name))?;
            }
        }
    }
    Ok(())
}
