//! What can be wrong with data, and how the user sees it.

use plimsoll_core::{Bytes, Failure, counted};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Where in the user's files something is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// The line, counted from 1; none when the whole file is meant.
    pub line: Option<u64>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        match self.line {
            Some(line) => write!(f, ":{line}"),
            None => Ok(()),
        }
    }
}

/// What can be wrong with data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The pattern is not a glob.
    #[error("`{pattern}` is no file and no glob: {reason}")]
    Pattern {
        /// As given.
        pattern: String,
        /// What the glob reader says.
        reason: String,
    },
    /// Not even a pattern.
    #[error("no data file is named")]
    NoPatterns,
    /// Nothing has this name.
    #[error("no file matches `{pattern}`")]
    NoFiles {
        /// As given.
        pattern: String,
    },
    /// Neither `.jsonl` nor `.txt`, or `.txt` in the tokens format.
    #[error("{}: expected {expected}", file.display())]
    Kind {
        /// The file.
        file: PathBuf,
        /// What was expected.
        expected: &'static str,
    },
    /// Reading or writing failed.
    #[error("cannot {doing} {}: {source}", file.display())]
    Io {
        /// "read", "write", ...
        doing: &'static str,
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The folder of token caches cannot be made or written.
    #[error("cannot keep tokens in {}: {source}", folder.display())]
    CacheFolder {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not UTF-8.
    #[error("{place}: not UTF-8")]
    NotUtf8 {
        /// Where.
        place: Place,
    },
    /// A line that is no JSON object of the expected form.
    #[error("{place}: {reason}")]
    Line {
        /// Where.
        place: Place,
        /// What the JSON reader says.
        reason: String,
        /// What the line should hold.
        format: super::Format,
    },
    /// A line longer than the reader's limit.
    #[error("{place}: the line is longer than {limit}")]
    LineTooLong {
        /// Where.
        place: Place,
        /// The limit.
        limit: Bytes,
    },
    /// Labels of another length than the tokens.
    #[error("{place}: {} for {}", counted(*labels, "label"), counted(*tokens, "token"))]
    LabelCount {
        /// Where.
        place: Place,
        /// Number of `input_ids`.
        tokens: usize,
        /// Number of `labels`.
        labels: usize,
    },
    /// A token or label that the model does not know.
    #[error("{place}: {what} {id} is outside the model's vocabulary of {vocab} tokens")]
    TokenRange {
        /// Where.
        place: Place,
        /// "token" or "label".
        what: &'static str,
        /// The id.
        id: i64,
        /// The model's vocabulary.
        vocab: u64,
    },
    /// A document that needs more than one row, with `long = "refuse"`.
    #[error("{place}: a document of {} does not fit in a row of {}", counted(*tokens, "token"), counted(*sequence, "position"))]
    Long {
        /// Where.
        place: Place,
        /// Its tokens.
        tokens: u64,
        /// T.
        sequence: u64,
    },
    /// No document with something to predict.
    #[error("no data: nothing to predict in {} ({skipped} empty documents)", files_named(files))]
    Empty {
        /// The files.
        files: Vec<PathBuf>,
        /// Documents with fewer than two tokens.
        skipped: u64,
    },
    /// No label is to be predicted.
    #[error("no data: all {tokens} tokens of {} have the label -100", files_named(files))]
    NoLabels {
        /// The files.
        files: Vec<PathBuf>,
        /// Tokens read.
        tokens: u64,
    },
    /// The text format without a tokenizer.
    #[error("data of the text format needs a tokenizer.json")]
    NoTokenizer,
    /// The text format without an end token.
    #[error("no end token is known for {}", tokenizer.display())]
    NoEndToken {
        /// The tokenizer.
        tokenizer: PathBuf,
    },
    /// The tokenizer, or a file beside it, is not what it should be.
    #[error("{} cannot be used: {reason}", file.display())]
    Tokenizer {
        /// The file.
        file: PathBuf,
        /// What the reader says.
        reason: String,
    },
    /// The tokenizer fails on a text.
    #[error("{}the tokenizer fails: {reason}", place.as_ref().map(|place| format!("{place}: ")).unwrap_or_default())]
    Encode {
        /// Where, when it is text of a file.
        place: Option<Place>,
        /// What it says.
        reason: String,
    },
    /// The tokenizer knows more tokens than the model.
    #[error("{} knows {tokenizer_vocab} tokens, the model {vocab}", file.display())]
    TokenizerVocab {
        /// The tokenizer.
        file: PathBuf,
        /// Its vocabulary.
        tokenizer_vocab: u64,
        /// The model's vocabulary.
        vocab: u64,
    },
    /// A number of positions that cannot be.
    #[error("sequence = {sequence} is not between 1 and {limit}")]
    Sequence {
        /// As given.
        sequence: u64,
        /// The largest.
        limit: u64,
    },
    /// A file was changed while it was read.
    #[error("{} was changed while it was read", file.display())]
    Changed {
        /// The file.
        file: PathBuf,
    },
    /// The cache holds what cannot be.
    #[error("the token cache {} is damaged", file.display())]
    Damaged {
        /// The cache file.
        file: PathBuf,
    },
    /// The caller asked to stop.
    #[error("stopped while reading the data")]
    Stopped,
}

fn files_named(files: &[PathBuf]) -> String {
    match files {
        [one] => one.display().to_string(),
        [first, rest @ ..] => format!("{} and {}", first.display(), counted(rest.len(), "more file")),
        [] => "no files".to_owned(),
    }
}

impl DataError {
    /// For `map_err`: reading or writing `file` failed.
    pub(super) fn io(doing: &'static str, file: &Path) -> impl FnOnce(io::Error) -> DataError {
        let file = file.to_owned();
        move |source| DataError::Io { doing, file, source }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Failure {
        let hint = match &error {
            DataError::Stopped => return Failure::stopped(error.to_string()),
            DataError::Pattern { .. } | DataError::NoFiles { .. } => {
                Some("paths are relative to where plimsoll was started; globs look like `data/*.jsonl`".to_owned())
            }
            DataError::Kind { .. } => Some("data files end in .jsonl or, in the text format, .txt".to_owned()),
            DataError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => Some(
                "free some space there, or name another folder: run.dir for a run; PLIMSOLL_CACHE for tokens, 4 bytes each, 8 with labels"
                    .to_owned(),
            ),
            DataError::CacheFolder { .. } => {
                Some("name a folder that can be written: PLIMSOLL_CACHE=/path plimsoll ...".to_owned())
            }
            DataError::NotUtf8 { .. } => {
                Some("convert the file to UTF-8, for example with `iconv -t utf-8`".to_owned())
            }
            DataError::Line { format: super::Format::Text, .. } => {
                Some(
                r#"data.format = "text" expects {"text": "..."} on each line; for {"input_ids": [..]} use data.format = "tokens""#
                    .to_owned(),
            )
            }
            DataError::Line { format: super::Format::Tokens, .. } => Some(
                r#"data.format = "tokens" expects {"input_ids": [..], "labels": [..]} on each line; labels may be left out"#
                    .to_owned(),
            ),
            DataError::LineTooLong { .. } => {
                Some("split the document over several lines, or put it into a .txt file of its own".to_owned())
            }
            DataError::LabelCount { .. } => {
                Some("labels are as long as input_ids and not shifted; -100 marks what is not predicted".to_owned())
            }
            DataError::TokenRange { .. } => Some(
                "the data was made with another tokenizer than the model's, or the model's vocab_size is wrong"
                    .to_owned(),
            ),
            DataError::TokenizerVocab { .. } => {
                Some("use the tokenizer.json that belongs to the model, or a model with a larger vocab_size".to_owned())
            }
            DataError::Long { tokens, .. } => {
                Some(format!("set data.sequence = {} or more, or data.long = \"split\"", tokens - 1))
            }
            DataError::NoTokenizer => {
                Some(r#"put tokenizer.json into the model's folder, or use data.format = "tokens""#.to_owned())
            }
            DataError::NoEndToken { .. } => Some(
                "set eos_token in tokenizer_config.json or eos_token_id in config.json, beside tokenizer.json"
                    .to_owned(),
            ),
            DataError::Damaged { file } => Some(format!("remove {} and start again: it is made anew", file.display())),
            DataError::Changed { .. } => Some("start again when nothing writes to it any more".to_owned()),
            _ => None,
        };
        let failure = Failure::input(error.to_string());
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}
