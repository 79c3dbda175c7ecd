//! A Hugging Face model directory: `config.json`, weights that match it, and the files beside them.

use super::atomic;
use super::error::FilesError;
use super::read::{Entry, WeightFiles, read_small};
use super::write::{MAX_SHARD_BYTES, StoredTensor, WeightWriter, pretty};
use plimsoll_core::{Bytes, DType};
use plimsoll_program::models::decoder::Source;
use plimsoll_program::models::{ConfigError, ModelConfig, Parameter};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A larger `config.json` is something else.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// What belongs to a tokenizer, to generation and to chat: kept as it is.
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

/// A model directory whose parts go together.
#[derive(Debug)]
pub struct ModelDir {
    /// The directory.
    pub path: PathBuf,
    /// What the model is.
    pub config: ModelConfig,
    /// `config.json` as it stands, to be written again with what it says besides.
    pub raw_config: Value,
    /// The weights; none where the directory holds only a configuration.
    pub weights: Option<ModelWeights>,
    /// `tokenizer.json`, where there is one.
    pub tokenizer_path: Option<PathBuf>,
}

/// Weights that match a configuration: every parameter is there, with its shape, as a float.
#[derive(Debug)]
pub struct ModelWeights {
    /// The open files.
    pub files: WeightFiles,
    /// Every parameter and where it lies, in the order of [`ModelConfig::hf_parameters`].
    pub parameters: Vec<(Parameter, Entry)>,
}

impl ModelWeights {
    /// As a Program reads them.
    pub fn source(&self) -> Source {
        let dtype = |entry: &Entry| entry.dtype().expect("opened weights are floats");
        Source::Files { dtypes: self.parameters.iter().map(|(_, entry)| dtype(entry)).collect() }
    }

    /// Bytes of all parameters in the files.
    pub fn bytes(&self) -> Bytes {
        self.parameters.iter().map(|(_, entry)| Bytes(entry.bytes)).sum()
    }

    /// The types that occur, each once.
    pub fn dtypes(&self) -> BTreeSet<DType> {
        self.parameters.iter().filter_map(|(_, entry)| entry.dtype()).collect()
    }
}

/// Reads a `config.json` alone: what it means, and as it stands.
///
/// # Errors
/// A file that cannot be read, or is not the configuration of a model that Plimsoll computes.
pub fn read_config(path: &Path, ignore_keys: &[String]) -> Result<(ModelConfig, Value), FilesError> {
    let bad = |source| FilesError::Config { path: path.to_owned(), source: Box::new(source) };
    let text = String::from_utf8(read_small(path, MAX_CONFIG_BYTES)?)
        .map_err(|_| bad(ConfigError::Json { message: "it is not UTF-8".into() }))?;
    let config = ModelConfig::from_json(&text, ignore_keys).map_err(bad)?;
    let raw = serde_json::from_str(&text).map_err(|e| bad(ConfigError::Json { message: e.to_string() }))?;
    Ok((config, raw))
}

impl ModelDir {
    /// Opens a model directory and checks that its parts go together. `ignore_keys` as in
    /// [`ModelConfig::from_json`].
    ///
    /// # Errors
    /// What is wrong with the configuration, a header, or how they match.
    pub fn open(path: &Path, ignore_keys: &[String]) -> Result<ModelDir, FilesError> {
        if !path.is_dir() {
            let names_file = path.extension().is_some_and(|extension| extension == "json");
            let problem = if names_file { "no such file" } else { "no such directory" };
            return Err(FilesError::NoFile { path: path.to_owned(), problem });
        }
        let (config, raw_config) = read_config(&path.join("config.json"), ignore_keys)?;
        let weights = match WeightFiles::open(path)? {
            Some(files) => Some(match_weights(path, &config, files)?),
            None => None,
        };
        let tokenizer_path = Some(path.join("tokenizer.json")).filter(|file| file.is_file());
        Ok(ModelDir { path: path.to_owned(), config, raw_config, weights, tokenizer_path })
    }

    /// The weights, where a run cannot do without.
    ///
    /// # Errors
    /// There are none.
    pub fn need_weights(&self) -> Result<&ModelWeights, FilesError> {
        self.weights.as_ref().ok_or_else(|| {
            let other = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.ckpt"];
            let other = other.into_iter().find(|name| self.path.join(name).exists()).map(String::from);
            FilesError::NoWeights { dir: self.path.clone(), other }
        })
    }
}

fn match_weights(dir: &Path, config: &ModelConfig, files: WeightFiles) -> Result<ModelWeights, FilesError> {
    let mut unused: BTreeSet<&str> = files.entries().map(|(name, _)| name).collect();
    let mut missing = Vec::new();
    let mut found = Vec::new();
    for parameter in config.hf_parameters() {
        match find(&files, &parameter.hf_name) {
            Some((name, entry)) => {
                unused.remove(name);
                check(&files, name, entry, &parameter)?;
                found.push((parameter, entry.clone()));
            }
            None => missing.push(parameter.hf_name),
        }
    }
    // Frequencies of the rotary positions, stored by old versions and recomputed by all since.
    unused.retain(|name| !name.ends_with("rotary_emb.inv_freq"));
    let spare_head = config.tied && unused.remove("lm_head.weight");
    if !missing.is_empty() || !unused.is_empty() {
        let extra = unused.into_iter().map(String::from).collect();
        return Err(FilesError::Names { dir: dir.to_owned(), missing, extra });
    }
    if spare_head {
        // transformers ties them only where they are equal.
        let (_, embedding) = &found[0];
        let head = files.entry("lm_head.weight").expect("seen above");
        if !equal(&files, embedding, head)? {
            return Err(FilesError::HeadNotTied { dir: dir.to_owned(), name: "lm_head.weight".into() });
        }
    }
    Ok(ModelWeights { parameters: found, files })
}

/// A model saved without its head has names without the prefix; transformers loads it, too.
fn find<'a>(files: &'a WeightFiles, name: &str) -> Option<(&'a str, &'a Entry)> {
    files.named(name).or_else(|| files.named(name.strip_prefix("model.")?))
}

/// That a tensor is a float of the parameter's shape.
pub(super) fn check(files: &WeightFiles, name: &str, entry: &Entry, parameter: &Parameter) -> Result<(), FilesError> {
    let path = || files.paths()[entry.file].clone();
    if entry.shape != parameter.shape {
        let (found, expected) = (entry.shape.clone(), parameter.shape.clone());
        return Err(FilesError::Shape { path: path(), name: name.to_owned(), found, expected });
    }
    match entry.dtype() {
        Some(DType::F32 | DType::Bf16 | DType::F16) => Ok(()),
        _ => Err(FilesError::Type { path: path(), name: name.to_owned(), found: entry.dtype.to_string() }),
    }
}

/// Whether two tensors hold the same bytes.
fn equal(files: &WeightFiles, a: &Entry, b: &Entry) -> Result<bool, FilesError> {
    const PIECE: u64 = 1 << 18;
    if a.dtype != b.dtype || a.shape != b.shape {
        return Ok(false);
    }
    let (mut of_a, mut of_b) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
    for offset in (0..a.bytes).step_by(PIECE as usize) {
        let length = PIECE.min(a.bytes - offset) as usize;
        files.read_at(a, offset, &mut of_a[..length])?;
        files.read_at(b, offset, &mut of_b[..length])?;
        if of_a[..length] != of_b[..length] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes a model directory whole, in place of what may be there: `config` as its `config.json`, the `tensors` that
/// `write_weights` writes, and the side files of `side_files_from`.
///
/// # Errors
/// What `write_weights` or the system says; an older directory is then still there.
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
        atomic::write_file(&dir.join("config.json"), &pretty(config))?;
        if let Some(from) = side_files_from {
            copy_side_files(from, dir)?;
        }
        Ok(())
    })
}

/// Copies what a model directory holds for tokenizers, generation and chat.
///
/// # Errors
/// What the system says.
pub fn copy_side_files(from: &Path, to: &Path) -> Result<(), FilesError> {
    for name in SIDE_FILES {
        copy(&from.join(name), &to.join(name))?;
    }
    Ok(())
}

/// Copies a file, or a directory of files; what is not there is passed over.
fn copy(from: &Path, to: &Path) -> Result<(), FilesError> {
    if from.is_file() {
        fs::copy(from, to).map_err(|e| FilesError::io(to, "write", e))?;
    } else if from.is_dir() {
        fs::create_dir_all(to).map_err(|e| FilesError::io(to, "create", e))?;
        for found in fs::read_dir(from).map_err(|e| FilesError::io(from, "list", e))? {
            let name = found.map_err(|e| FilesError::io(from, "list", e))?.file_name();
            if from.join(&name).is_file() {
                copy(&from.join(&name), &to.join(&name))?;
            }
        }
    }
    Ok(())
}
