//! What can be wrong with files, and what the user can do about it.

use plimsoll_core::{Bytes, Failure};
use plimsoll_program::models::ConfigError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a file or directory could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The system refused.
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// `read`, `write`, ...
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// No room left (or no quota). What was there before is untouched.
    #[error("{}: no space left on the disk{}", path.display(), needed.map_or(String::new(), |n| format!(" for {n}")))]
    DiskFull {
        /// The file that could not be written.
        path: PathBuf,
        /// Its size, where it is known.
        needed: Option<Bytes>,
    },
    /// Not there, or not what was expected there.
    #[error("{}: {problem}", path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
        /// `no such directory`, `not a regular file`, ...
        problem: &'static str,
    },
    /// A `*.safetensors` file whose header is wrong.
    #[error("{}: {source}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<HeaderError>,
    },
    /// A `*.safetensors.index.json` that cannot be followed.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Two files hold a tensor of the same name.
    #[error("tensor `{name}` is in both {} and {}", first.display(), second.display())]
    Duplicate {
        /// The tensor.
        name: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The `config.json` is not one that Plimsoll computes.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<ConfigError>,
    },
    /// A model directory without weights, where weights are needed.
    #[error("{}: no *.safetensors file{}", dir.display(), other.as_ref().map_or(String::new(), |o| format!(", only {o}")))]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// Weights in another format that do lie there.
        other: Option<String>,
    },
    /// Tensors that the configuration asks for are not there, or others are.
    #[error("{}: the weights do not match config.json: {}", dir.display(), mismatch(missing, extra))]
    Names {
        /// The directory.
        dir: PathBuf,
        /// Absent tensors.
        missing: Vec<String>,
        /// Tensors that the configuration has no place for.
        extra: Vec<String>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{}: tensor `{name}` has shape {found:?}, but config.json says {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<u64>,
        /// The shape by the configuration.
        expected: Vec<u64>,
    },
    /// A weight is not stored as a float that Plimsoll reads.
    #[error("{}: tensor `{name}` is stored as {found}, expected F32, BF16 or F16", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its type in the file.
        found: String,
    },
    /// The `adapter_config.json` of adapters that Plimsoll does not compute, or adapters that cannot be read.
    #[error("{}: {problem}", path.display())]
    Adapter {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// Adapters of parts that the model has not, or that have none here.
    #[error("{}: the adapters do not go with the model: {}", dir.display(), adapters_mismatch(missing, extra))]
    AdapterNames {
        /// The directory.
        dir: PathBuf,
        /// Absent tensors.
        missing: Vec<String>,
        /// Tensors without a place.
        extra: Vec<String>,
    },
    /// `tie_word_embeddings` is true, but the file's head is not its embedding.
    #[error("{}: `tie_word_embeddings` is true, but `{name}` differs from the embedding", dir.display())]
    HeadNotTied {
        /// The directory.
        dir: PathBuf,
        /// The head.
        name: String,
    },
}

fn mismatch(missing: &[String], extra: &[String]) -> String {
    let list = |what: &str, names: &[String]| {
        const SHOWN: usize = 3;
        let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        match names.len() {
            0 => None,
            n if n <= SHOWN => Some(format!("{what} {shown}")),
            n => Some(format!("{what} {shown} and {} more", n - SHOWN)),
        }
    };
    [list("missing", missing), list("not expected", extra)].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

fn adapters_mismatch(missing: &[String], extra: &[String]) -> String {
    match missing.is_empty() && extra.is_empty() {
        true => "there are none".to_owned(),
        false => mismatch(missing, extra),
    }
}

/// What a directory is that is no model, where a run has left it.
fn what_it_is_instead(dir: &Path) -> Option<String> {
    let adapter = |dir: &Path| dir.join("adapter_config.json").is_file();
    if dir.join("model/config.json").is_file() {
        return Some(format!("this is the folder of a run, and its model is {}", dir.join("model").display()));
    }
    let of_run = dir.join("adapter");
    let adapters = [dir, &of_run].into_iter().find(|dir| adapter(dir))?;
    Some(format!("these are adapters: name the model that they belong to, with --adapter {}", adapters.display()))
}

impl FilesError {
    /// An error of the system, with a full disk told apart.
    pub fn io(path: &Path, doing: &'static str, source: io::Error) -> FilesError {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                FilesError::DiskFull { path: path.to_owned(), needed: None }
            }
            _ => FilesError::Io { path: path.to_owned(), doing, source },
        }
    }

    fn hints(&self) -> Vec<String> {
        match self {
            FilesError::DiskFull { .. } => {
                vec!["free some space or write to another disk; what was saved before is intact".into()]
            }
            FilesError::NoFile { path, .. } if path.ends_with("config.json") => {
                path.parent().and_then(what_it_is_instead).into_iter().collect()
            }
            FilesError::Header { .. } | FilesError::Index { .. } => {
                vec!["the file may be damaged or half downloaded: fetch it again".into()]
            }
            FilesError::Config { source, .. } => source.hints(),
            FilesError::NoWeights { other: Some(_), .. } => {
                vec!["convert it: load and save_pretrained(..., safe_serialization=True) in transformers".into()]
            }
            FilesError::NoWeights { other: None, .. } => {
                vec![
                    "name a directory with *.safetensors files".into(),
                    "to start from random weights: --set model.init=random".into(),
                ]
            }
            FilesError::Adapter { hint, .. } => vec![hint.clone()],
            FilesError::AdapterNames { .. } => {
                vec!["adapters are read on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, of every layer".into()]
            }
            FilesError::HeadNotTied { .. } => vec!["if the head is its own, set tie_word_embeddings to false".into()],
            _ => Vec::new(),
        }
    }
}

impl From<FilesError> for Failure {
    fn from(error: FilesError) -> Failure {
        error.hints().into_iter().fold(Failure::input(error.to_string()), Failure::hint)
    }
}

/// What is wrong with the header of a `*.safetensors` file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not even the length of a header.
    #[error("a safetensors file has at least 8 bytes, this one has {bytes}")]
    Short {
        /// Bytes of the file.
        bytes: u64,
    },
    /// The header claims a size that no header has.
    #[error("the header claims {bytes} bytes, at most {largest} are allowed")]
    Large {
        /// What it claims.
        bytes: u64,
        /// The format's limit.
        largest: u64,
    },
    /// The header claims more than the file holds.
    #[error("the header claims {bytes} bytes, but {left} follow: the file is cut off or no safetensors file")]
    CutOff {
        /// What it claims.
        bytes: u64,
        /// What follows.
        left: u64,
    },
    /// The header is not the JSON it should be.
    #[error("the header is wrong: {message}")]
    Json {
        /// What the parser says.
        message: String,
    },
    /// A type that the format does not have.
    #[error("tensor `{tensor}` has the unknown type `{dtype}`")]
    DType {
        /// The tensor.
        tensor: String,
        /// The type.
        dtype: String,
    },
    /// Type and shape need other bytes than the offsets span.
    #[error("tensor `{tensor}` ({dtype} {shape:?}) spans {spanned} bytes{}", match needed {
        Some(needed) => format!(", but needs {needed}"),
        None => ", but its shape is not a size".to_owned(),
    })]
    Size {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes between its offsets.
        spanned: i128,
        /// Bytes by type and shape; none where they are no whole number below 2^64.
        needed: Option<u64>,
    },
    /// Tensors overlap, or leave a gap.
    #[error("tensor `{tensor}` begins at byte {begin} of the data, but the one before it ends at {expected}")]
    Offset {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where it should.
        expected: u64,
    },
    /// The tensors end before or after the file.
    #[error("the tensors need {needed} bytes of data, the file has {found}{}",
        if found < needed { ": it is cut off" } else { "" })]
    End {
        /// Bytes of data by the header.
        needed: u64,
        /// Bytes of data in the file.
        found: u64,
    },
}
