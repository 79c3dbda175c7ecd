//! Errors of model files, with messages and hints.

use plimsoll_core::{Bytes, Failure};
use plimsoll_program::models::{ConfigError, preset};
use std::io;
use std::path::{Path, PathBuf};

/// An error while a file or directory is read, checked or written.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A file operation failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// Path of the file or directory that the operation failed on.
        path: PathBuf,
        /// The failed operation as a verb: `read`, `write` and so on.
        action: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The disk or the quota is full. The previous version of the file is kept.
    #[error("{}: no space left on the disk{}", path.display(), needed.map_or(String::new(), |n| format!(" for {n}")))]
    DiskFull {
        /// The file that could not be written.
        path: PathBuf,
        /// Size that the whole file would have had; `None` if it is not known.
        needed: Option<Bytes>,
    },
    /// A path that is missing, or that is not the expected kind of file.
    #[error("{}: {problem}", path.display())]
    BadPath {
        /// The missing or unsuitable path.
        path: PathBuf,
        /// The reason, such as `no such directory` or `not a regular file`.
        problem: &'static str,
    },
    /// A `generation_config.json` has an invalid rule of sampling.
    #[error("{}: {reason}", path.display())]
    GenerationConfig {
        /// Path of the file.
        path: PathBuf,
        /// The key with its value, and the expected one.
        reason: String,
    },
    /// A `*.safetensors` file has an invalid header.
    #[error("{}: {source}", path.display())]
    Header {
        /// Path of the file with the invalid header.
        path: PathBuf,
        /// The error that was found in the header.
        source: Box<HeaderError>,
    },
    /// A `*.safetensors.index.json` is invalid, or does not match its files.
    #[error("{}: {problem}", path.display())]
    Index {
        /// Path of the `*.safetensors.index.json`.
        path: PathBuf,
        /// Description of what is invalid or does not match.
        problem: String,
    },
    /// Values to be written to a file are NaN or infinite.
    #[error("{}: not written, because tensor `{tensor}` holds NaN or infinite values", path.display())]
    NotFinite {
        /// Path of the file that would have held the tensor.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// Two files hold a tensor of the same name.
    #[error("tensor `{name}` is in both {} and {}", first.display(), second.display())]
    Duplicate {
        /// Name of the tensor that two files hold.
        name: String,
        /// Path of the first file with this tensor.
        first: PathBuf,
        /// Path of the second file with this tensor.
        second: PathBuf,
    },
    /// The `config.json` is invalid, or its model is not supported.
    #[error("{}: {source}", path.display())]
    Config {
        /// Path of the `config.json`.
        path: PathBuf,
        /// The error that was found in the configuration.
        source: Box<ConfigError>,
    },
    /// A model directory has no weights, but the run needs them.
    #[error("{}: no *.safetensors file{}", dir.display(), other.as_ref().map_or(String::new(), |o| format!(", only {o}")))]
    NoWeights {
        /// Path of the model directory.
        dir: PathBuf,
        /// Name of a weight file of an unsupported format in the directory; `None` if there is none.
        other: Option<String>,
    },
    /// The weight files lack tensors that the configuration asks for, or hold tensors that it does not.
    #[error("{}: the weights do not match config.json: {}", dir.display(), describe_mismatch(missing, extra))]
    WeightNames {
        /// Path of the model directory.
        dir: PathBuf,
        /// Names of the tensors that the configuration asks for and no file has.
        missing: Vec<String>,
        /// Names of the tensors that are in the files and not in the configuration.
        extra: Vec<String>,
    },
    /// A tensor's shape differs from the configuration.
    #[error("{}: tensor `{name}` has shape {found:?}, but config.json says {expected:?}", path.display())]
    WeightShape {
        /// Path of the file with the tensor.
        path: PathBuf,
        /// Name of the tensor with the wrong shape.
        name: String,
        /// Shape of the tensor in the file.
        found: Vec<u64>,
        /// Shape of the tensor according to the configuration.
        expected: Vec<u64>,
    },
    /// A weight is not stored as F32, BF16 or F16.
    #[error("{}: tensor `{name}` is stored as {found}, expected F32, BF16 or F16", path.display())]
    WeightType {
        /// Path of the file with the tensor.
        path: PathBuf,
        /// Name of the tensor with the unsupported element type.
        name: String,
        /// Element type of the tensor in the file.
        found: String,
    },
    /// The adapters are of an unsupported kind, or their files are invalid.
    #[error("{}: {problem}", path.display())]
    Adapter {
        /// Path of the adapter file that is refused.
        path: PathBuf,
        /// Description of what is unsupported or invalid.
        problem: String,
        /// Hint for the user: a way to avoid the problem.
        hint: String,
    },
    /// The adapters do not match the model's projections. Both lists are empty if the file has no adapters at all.
    #[error("{}: the adapters do not match the model: {}", dir.display(), describe_adapter_mismatch(missing, extra))]
    AdapterNames {
        /// Path of the adapter directory.
        dir: PathBuf,
        /// Names of the adapter tensors that should exist and do not.
        missing: Vec<String>,
        /// Names of the adapter tensors that belong to no projection of the model.
        extra: Vec<String>,
    },
    /// The configuration ties head and embedding (`tie_word_embeddings`), but the files hold a head that differs from
    /// the embedding.
    #[error("{}: `tie_word_embeddings` is true, but `{name}` differs from the embedding", dir.display())]
    HeadNotTied {
        /// Path of the model directory.
        dir: PathBuf,
        /// Name of the head's tensor.
        name: String,
    },
}

/// Formats up to three missing and three unexpected names of tensors, with the number of further ones.
fn describe_mismatch(missing: &[String], extra: &[String]) -> String {
    let lists = [format_names("missing", missing), format_names("unexpected", extra)];
    lists.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// Formats up to three names after `what`, with the number of further ones; `None` without names.
fn format_names(what: &str, names: &[String]) -> Option<String> {
    const SHOWN: usize = 3;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => None,
        n if n <= SHOWN => Some(format!("{what} {shown}")),
        n => Some(format!("{what} {shown} and {} more", n - SHOWN)),
    }
}

fn describe_adapter_mismatch(missing: &[String], extra: &[String]) -> String {
    match missing.is_empty() && extra.is_empty() {
        true => "the file has no adapters".to_owned(),
        false => describe_mismatch(missing, extra),
    }
}

/// The problem of a path that names no directory.
pub(super) const NO_DIRECTORY: &str = "no such directory";

/// Suggests another source of a model whose directory does not exist: a preset or a repository of the hub.
fn suggest_source(path: &Path) -> Option<String> {
    let given = std::env::current_dir().ok().and_then(|here| Some(path.strip_prefix(here).ok()?.to_owned()));
    let name = given.as_deref().unwrap_or(path).to_str()?.to_owned();
    if preset(&name).is_some() {
        return Some(format!("{name} is a preset, which has no weights: name a directory or a model of the hub"));
    }
    let (owner, repository) = name.split_once('/').filter(|(_, rest)| !rest.contains('/'))?;
    let owner = match owner {
        "" | "." | ".." | "~" | "runs" => return None,
        // `models/gpt2` is meant as a folder here, not as a repository of the owner `models`.
        "models" => "OWNER",
        _ if Path::new(owner).is_dir() => "OWNER",
        _ => owner,
    };
    Some(format!("for a model of the Hugging Face Hub: hub:{owner}/{repository}"))
}

/// Returns a hint for a directory that is not a model: the model or the adapters in it to use instead. Returns `None`
/// if it has neither.
fn suggest_model(dir: &Path) -> Option<String> {
    let adapter = |dir: &Path| dir.join("adapter_config.json").is_file();
    if dir.join("model/config.json").is_file() {
        return Some(format!("this is a run folder; its model is {}", dir.join("model").display()));
    }
    let run_adapter = dir.join("adapter");
    let adapters = [dir, &run_adapter].into_iter().find(|dir| adapter(dir))?;
    Some(format!("these are adapters: name the base model, and add --adapter {}", adapters.display()))
}

impl FilesError {
    /// Converts an error of the operating system that occurred when `action` (a verb) was done to `path`. A full disk
    /// or quota becomes [`FilesError::DiskFull`].
    pub fn io(path: &Path, action: &'static str, source: io::Error) -> FilesError {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                FilesError::DiskFull { path: path.to_owned(), needed: None }
            }
            _ => FilesError::Io { path: path.to_owned(), action, source },
        }
    }

    fn hints(&self) -> Vec<String> {
        match self {
            FilesError::DiskFull { .. } => {
                vec!["free disk space or write to another disk; the previous version is intact".into()]
            }
            FilesError::Io { source, .. } if source.kind() == io::ErrorKind::FileTooLarge => {
                vec!["raise the limit of the file size (ulimit -f); the previous version is intact".into()]
            }
            FilesError::BadPath { path, .. } if path.ends_with("config.json") => {
                path.parent().and_then(suggest_model).into_iter().collect()
            }
            FilesError::BadPath { path, problem: NO_DIRECTORY } => suggest_source(path).into_iter().collect(),
            FilesError::Header { .. } | FilesError::Index { .. } => {
                vec!["the file may be damaged or incomplete: download it again".into()]
            }
            FilesError::NotFinite { .. } => {
                vec!["the weights left the range of their type; files saved earlier are intact".into()]
            }
            FilesError::Config { source, .. } => source.hints(),
            FilesError::NoWeights { other: Some(_), .. } => {
                vec!["convert the weights with transformers: save_pretrained(..., safe_serialization=True)".into()]
            }
            FilesError::NoWeights { other: None, .. } => {
                vec![
                    "name a directory with *.safetensors files".into(),
                    "to start from random weights: --set model.init=random".into(),
                ]
            }
            FilesError::Adapter { hint, .. } => vec![hint.clone()],
            FilesError::AdapterNames { .. } => {
                vec!["supported are adapters on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, as adapter_config.json names them".into()]
            }
            FilesError::HeadNotTied { .. } => {
                vec!["if the head has its own weights, set tie_word_embeddings to false in config.json".into()]
            }
            _ => Vec::new(),
        }
    }
}

impl From<FilesError> for Failure {
    fn from(error: FilesError) -> Failure {
        error.hints().into_iter().fold(Failure::input(error.to_string()), Failure::hint)
    }
}

/// An error in the header of a `*.safetensors` file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The file is too short for the length field, its first 8 bytes.
    #[error("a safetensors file has at least 8 bytes, this one has {bytes}")]
    TooShort {
        /// Size of the file in bytes.
        bytes: u64,
    },
    /// The file is a placeholder, as a clone without Git LFS leaves it.
    #[error("it is a pointer of Git LFS, not the file itself (`git lfs pull` fetches it)")]
    LfsPointer,
    /// The length field states a header longer than the format allows.
    #[error("the header claims {bytes} bytes, but the format allows at most {max_bytes}")]
    TooLarge {
        /// Length of the header in bytes, as the length field states it.
        bytes: u64,
        /// Longest header in bytes that the format allows.
        max_bytes: u64,
    },
    /// The length field states a header longer than the rest of the file.
    #[error("the header claims {bytes} bytes, but {left} follow: the file is truncated or not a safetensors file")]
    Truncated {
        /// Length of the header in bytes, as the length field states it.
        bytes: u64,
        /// Number of bytes that follow the length field in the file.
        left: u64,
    },
    /// The header is not JSON of the expected form.
    #[error("invalid header: {message}")]
    Json {
        /// The message of the parser.
        message: String,
    },
    /// A tensor has an element type that the format does not define.
    #[error("tensor `{tensor}` has the unknown type `{dtype}`")]
    UnknownDType {
        /// Name of the tensor.
        tensor: String,
        /// Element type that the header names.
        dtype: String,
    },
    /// A tensor's type and shape need a different number of bytes than its offsets span.
    #[error("tensor `{tensor}` ({dtype} {shape:?}) spans {spanned} bytes{}", match needed {
        Some(needed) => format!(", but needs {needed}"),
        None => ", but its shape is too large".to_owned(),
    })]
    SizeMismatch {
        /// Name of the tensor.
        tensor: String,
        /// Element type of the tensor, as the header names it.
        dtype: String,
        /// Shape of the tensor, as the header states it.
        shape: Vec<u64>,
        /// Number of bytes from the tensor's first offset to its second; negative if they are swapped.
        spanned: i128,
        /// Number of bytes that type and shape need; `None` if it is not a whole number or is 2^64 or more.
        needed: Option<u64>,
    },
    /// A tensor's data does not begin where the previous tensor's data ends: they overlap or leave a gap.
    #[error("tensor `{tensor}` begins at byte {begin} of the data, but the previous tensor ends at {expected}")]
    WrongOffset {
        /// Name of the tensor that begins at the wrong offset.
        tensor: String,
        /// Offset in bytes, from the start of the data, at which this tensor begins.
        begin: u64,
        /// Offset at which the previous tensor ends, or 0 for the first tensor: where this tensor should begin.
        expected: u64,
    },
    /// The tensors need more or fewer bytes of data than the file has.
    #[error("the tensors need {needed} bytes of data, but the file has {found}{}",
        if found < needed { ": it is truncated" } else { "" })]
    WrongDataLength {
        /// Number of bytes of data that the header describes.
        needed: u64,
        /// Number of bytes that follow the header in the file.
        found: u64,
    },
}
