//! A Hugging Face model directory: `config.json`, weights that match it, and side files (tokenizer, generation, chat).

use super::atomic;
use super::error::{FilesError, NO_DIRECTORY};
use super::read::{TensorEntry, WeightFiles, is_rotary_frequency, read_small};
use super::write::{StoredTensor, WeightWriter, pretty_json};
use plimsoll_core::{Bytes, DType, format_count};
use plimsoll_device::regular_file;
use plimsoll_program::models::decoder::WeightSource;
use plimsoll_program::models::{ConfigError, ModelConfig, Parameter, TextPart};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Size limit of a `config.json`. A larger file is not a model configuration.
pub(super) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Name of the output head in the weight files.
const HEAD: &str = "lm_head.weight";
/// Name of the embedding in the weight files.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Name of the file with the generation settings.
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";

/// Names of the files of the tokenizer, generation settings and chat templates. A saved model gets copies, in which
/// only the end tokens may change.
pub(crate) const SIDE_FILES: [&str; 11] = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    GENERATION_CONFIG,
    CHAT_TEMPLATES[0],
    CHAT_TEMPLATES[1],
    CHAT_TEMPLATES[2],
];
/// The file of a chat template. It has precedence over the entry in `tokenizer_config.json`.
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Names of the files and folders of chat templates.
const CHAT_TEMPLATES: [&str; 3] = ["chat_template.json", CHAT_TEMPLATE, "additional_chat_templates"];

/// An opened Hugging Face model directory, whose configuration and weights match.
#[derive(Debug)]
pub struct ModelDir {
    /// Path of the directory.
    pub path: PathBuf,
    /// The model's configuration.
    pub config: ModelConfig,
    /// The parsed `config.json`, with the keys that Plimsoll does not use. A saved model keeps them. Of a model with other
    /// parts, the text part's.
    pub raw_config: Value,
    /// The parts of the model that are left out; `None` if the model is of text alone.
    pub other_parts: Option<OtherParts>,
    /// The weights; `None` if the directory holds only a configuration.
    pub weights: Option<ModelWeights>,
    /// Path of `tokenizer.json`; `None` if there is none.
    pub tokenizer_path: Option<PathBuf>,
}

/// The parts of a model besides that of text, such as an image encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherParts {
    /// `model_type` of the whole model, such as `gemma3`.
    pub whole: String,
    /// Number of tensors of these parts in the weight files.
    pub tensors: usize,
}

/// A parsed `config.json`.
#[derive(Debug)]
pub struct ReadConfig {
    /// The model's configuration.
    pub config: ModelConfig,
    /// The JSON itself. Of a model with other parts, the text part's.
    pub raw: Value,
    /// `model_type` of the whole model if it has other parts.
    pub whole: Option<String>,
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

/// Reads a `config.json` without weights. Keys that Plimsoll does not know are errors, unless `ignore_keys` names them.
///
/// # Errors
/// A file that cannot be read, or that does not configure a model that Plimsoll supports.
pub fn read_config(path: &Path, ignore_keys: &[String]) -> Result<ReadConfig, FilesError> {
    let invalid = |source| FilesError::Config { path: path.to_owned(), source: Box::new(source) };
    let text = String::from_utf8(read_small(path, MAX_CONFIG_BYTES)?)
        .map_err(|_| invalid(ConfigError::Json { message: "it is not UTF-8".into() }))?;
    let config = ModelConfig::from_json(&text, ignore_keys).map_err(invalid)?;
    let raw: Map<String, Value> =
        serde_json::from_str(&text).map_err(|e| invalid(ConfigError::Json { message: e.to_string() }))?;
    Ok(match TextPart::find(&raw).map_err(invalid)? {
        Some(TextPart { whole, config: raw }) => ReadConfig { config, raw: Value::Object(raw), whole: Some(whole) },
        None => ReadConfig { config, raw: Value::Object(raw), whole: None },
    })
}

/// Returns the end tokens in the `generation_config.json` of a directory, and `None` if it has no such file.
///
/// # Errors
/// A file that cannot be read, or whose `eos_token_id` holds no tokens.
pub(super) fn read_generation_end_tokens(dir: &Path) -> Result<Option<Vec<i64>>, FilesError> {
    let path = dir.join(GENERATION_CONFIG);
    if !regular_file::is_present(&path) {
        return Ok(None);
    }
    let text = read_small(&path, MAX_CONFIG_BYTES)?;
    let end_tokens = ModelConfig::generation_end_tokens(&String::from_utf8_lossy(&text));
    end_tokens.map(Some).map_err(|source| FilesError::Config { path, source: Box::new(source) })
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
            let problem = if is_file_name { "no such file" } else { NO_DIRECTORY };
            return Err(FilesError::BadPath { path: path.to_owned(), problem });
        }
        let ReadConfig { mut config, raw: raw_config, whole } = read_config(&path.join("config.json"), ignore_keys)?;
        if let Some(end_tokens) = read_generation_end_tokens(path)? {
            config.eos = end_tokens;
        }
        let mut files = WeightFiles::open(path)?;
        let other_parts = match (whole, &mut files) {
            (Some(whole), Some(files)) => Some(OtherParts { whole, tensors: files.rename(name_in_text_part)? }),
            (whole, _) => whole.map(|whole| OtherParts { whole, tensors: 0 }),
        };
        let weights = files.map(|files| match_weights(path, &config, files)).transpose()?;
        let tokenizer_path = Some(path.join("tokenizer.json")).filter(|file| file.is_file());
        Ok(ModelDir { path: path.to_owned(), config, raw_config, other_parts, weights, tokenizer_path })
    }

    /// Returns a note if tensors of other parts of the model are left out, else `None`.
    pub fn other_parts_note(&self) -> Option<String> {
        let OtherParts { whole, tensors } = self.other_parts.as_ref().filter(|parts| parts.tensors > 0)?;
        let (path, model_type) = (self.path.display(), self.config.model_type);
        let tensors = format_count(*tensors as u64, "tensor");
        Some(format!(
            "{path}: the text part of a {whole} model is a {model_type} model; {tensors} of other parts are left out"
        ))
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

/// Returns the name that a tensor of the text part of a larger model has in a model of text alone. Returns `None` for tensors
/// of other parts. transformers has used both prefixes.
fn name_in_text_part(name: &str) -> Option<String> {
    if name == HEAD {
        return Some(name.to_owned());
    }
    let newer = name.strip_prefix("model.language_model.").map(|rest| format!("model.{rest}"));
    newer.or_else(|| name.strip_prefix("language_model.").map(str::to_owned))
}

/// Finds every parameter of `config` in `files`, and refuses missing or unexpected tensors.
fn match_weights(dir: &Path, config: &ModelConfig, files: WeightFiles) -> Result<ModelWeights, FilesError> {
    let mut unused: BTreeSet<&str> = files.entries().map(|(name, _)| name).collect();
    let mut missing = Vec::new();
    let mut matched = Vec::new();
    for parameter in config.hf_parameters() {
        // A tied model may be stored with its head alone.
        let tied_head = || files.entry_with_name(HEAD).filter(|_| config.tied && parameter.hf_name == EMBEDDING);
        match find_parameter(&files, &parameter.hf_name).or_else(tied_head) {
            Some((name, entry)) => {
                unused.remove(name);
                check_tensor(&files, name, entry, &parameter)?;
                matched.push((parameter, entry.clone()));
            }
            None => missing.push(parameter.hf_name),
        }
    }
    unused.retain(|name| !is_rotary_frequency(name));
    let has_redundant_head = config.tied && unused.remove(HEAD);
    if !missing.is_empty() || !unused.is_empty() {
        let extra = unused.into_iter().map(String::from).collect();
        return Err(FilesError::WeightNames { dir: dir.to_owned(), missing, extra });
    }
    if has_redundant_head {
        // transformers ties head and embedding only if they are equal.
        let (_, embedding) = &matched[0];
        let head = files.entry(HEAD).expect("checked above");
        if !tensors_equal(&files, embedding, head)? {
            return Err(FilesError::HeadNotTied { dir: dir.to_owned(), name: HEAD.into() });
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

/// Files that a saved model gets beside its weights and its `config.json`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SideFiles<'a> {
    /// The directory whose tokenizer, generation settings and chat templates are copied; `None` copies nothing.
    pub from: Option<&'a Path>,
    /// The text of a chat template that replaces those of `from`.
    pub template: Option<&'a str>,
}

/// Writes a model directory and replaces an existing one. `config` becomes `config.json`, and `write_weights` writes
/// `tensors` in files of at most `max_shard` bytes. Tokenizer, generation settings and chat templates are those of `side_files`.
/// Generation settings get the end tokens of `model`.
///
/// # Errors
/// A failure of `write_weights` or of a file operation. An existing directory is then kept.
pub fn write_model_dir<E: From<FilesError>>(
    path: &Path,
    model: &ModelConfig,
    config: &Value,
    tensors: &[StoredTensor],
    max_shard: Bytes,
    side_files: SideFiles,
    write_weights: impl FnOnce(&mut WeightWriter) -> Result<(), E>,
) -> Result<(), E> {
    atomic::write_dir(path, |dir| {
        let mut writer = WeightWriter::create(dir, "model", tensors, max_shard)?;
        write_weights(&mut writer)?;
        writer.finish()?;
        atomic::write_file(&dir.join("config.json"), &pretty_json(config))?;
        for name in SIDE_FILES {
            let is_replaced = side_files.template.is_some() && CHAT_TEMPLATES.contains(&name);
            if let Some(from) = side_files.from.filter(|_| !is_replaced) {
                copy_if_present(&from.join(name), &dir.join(name))?;
            }
        }
        if let Some(template) = side_files.template {
            atomic::write_file(&dir.join(CHAT_TEMPLATE), template.as_bytes())?;
        }
        match read_generation_end_tokens(dir)? {
            Some(found) if found != model.eos => Ok(write_generation_config(dir, model)?),
            _ => Ok(()),
        }
    })
}

/// Writes the end tokens of `model` into the `generation_config.json` of a directory. The other keys of an existing
/// file are kept.
///
/// # Errors
/// A file that cannot be read or written.
pub(super) fn write_generation_config(dir: &Path, model: &ModelConfig) -> Result<(), FilesError> {
    let path = dir.join(GENERATION_CONFIG);
    let mut settings = match path.exists() {
        true => serde_json::from_slice(&read_small(&path, MAX_CONFIG_BYTES)?).unwrap_or_else(|_| json!({})),
        false => json!({}),
    };
    settings["eos_token_id"] = model.end_tokens_to_json();
    atomic::write_file(&path, &pretty_json(&settings))
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
