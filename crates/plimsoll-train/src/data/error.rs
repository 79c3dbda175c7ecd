//! Errors of the user's data, with their messages and hints.

use plimsoll_core::{Bytes, Failure, format_count, is_disk_full};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A position in the user's data files, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    /// Path of the data file.
    pub file: PathBuf,
    /// Line in the file, counted from 1; `None` for the file as a whole.
    pub line: Option<u64>,
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        match self.line {
            Some(line) => write!(f, ":{line}"),
            None => Ok(()),
        }
    }
}

/// An error while data is found, read, tokenized or cached.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A pattern is neither a file nor a valid glob.
    #[error("`{pattern}` is neither a file nor a valid glob pattern: {reason}")]
    InvalidPattern {
        /// The pattern from the run file.
        pattern: String,
        /// The message of the glob parser.
        reason: String,
    },
    /// The list of patterns is empty.
    #[error("no data file is given")]
    NoPatterns,
    /// No file matches a pattern.
    #[error("no file matches `{pattern}`")]
    NoFiles {
        /// The pattern from the run file.
        pattern: String,
    },
    /// More files, or folders on the way to them, match a glob than Plimsoll takes.
    #[error("more than {limit} files or folders match `{pattern}`")]
    TooManyFiles {
        /// The pattern from the run file.
        pattern: String,
        /// The most files or folders that a glob may match.
        limit: usize,
    },
    /// A data file is a folder, is neither `.jsonl` nor `.txt`, or is `.txt` although `data.format` is "tokens".
    #[error("{}: expected {expected}", file.display())]
    UnsupportedFile {
        /// Path of the refused file or folder.
        file: PathBuf,
        /// Description of the files that the data format allows, for the message.
        expected: &'static str,
    },
    /// The system refuses the thread that reads the batches.
    #[error("the system refuses a thread to read the data")]
    NoThread,
    /// Reading or writing failed.
    #[error("cannot {action} {}: {source}", file.display())]
    Io {
        /// The failed operation as a verb: "read", "write" and so on.
        action: &'static str,
        /// Path of the file or folder that the operation failed on.
        file: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The folder of token caches cannot be created or written.
    #[error("cannot write the token cache in {}: {source}", folder.display())]
    CacheFolder {
        /// Path of the folder of token caches.
        folder: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The text is not UTF-8.
    #[error("{location}: not UTF-8")]
    NotUtf8 {
        /// Place of the text that is not UTF-8.
        location: SourceLocation,
    },
    /// A line is not a JSON object of the expected form.
    #[error("{location}: {reason}")]
    MalformedLine {
        /// Place of the malformed line.
        location: SourceLocation,
        /// The message of the JSON parser.
        reason: String,
        /// The data format that the line should follow.
        format: super::Format,
    },
    /// A line is longer than the reader's limit.
    #[error("{location}: the line is longer than {limit}")]
    LineTooLong {
        /// Place of the line that is too long.
        location: SourceLocation,
        /// Size limit of a line.
        limit: Bytes,
    },
    /// The number of labels differs from the number of tokens.
    #[error("{location}: {} for {}", format_count(*labels, "label"), format_count(*tokens, "token"))]
    LabelCount {
        /// Place of the document whose counts differ.
        location: SourceLocation,
        /// Number of tokens of the document: the length of its `input_ids`.
        tokens: usize,
        /// Number of labels of the document: the length of its `labels`.
        labels: usize,
    },
    /// A line has a key that changes the loss in a way that Plimsoll does not follow.
    #[error("{location}: `{key}` {problem}")]
    TokenKey {
        /// Place of the document.
        location: SourceLocation,
        /// Key of the line.
        key: String,
        /// Description of the problem with its value.
        problem: String,
    },
    /// A data file holds another format than its name says, such as compressed data.
    #[error("{}: expected text, found {found}", file.display())]
    ForeignFormat {
        /// Path of the data file.
        file: PathBuf,
        /// Description of the content.
        found: &'static str,
        /// Hint how to get text from it.
        remedy: &'static str,
    },
    /// The tokenizer turns a text into a token outside the model's vocabulary.
    #[error(
        "{location}: tokenizer.json makes token {id} of this text, outside the model's vocabulary of {vocab} tokens"
    )]
    TextTokenOutOfRange {
        /// Place of the document.
        location: SourceLocation,
        /// The id that is outside the vocabulary.
        id: u32,
        /// Number of tokens in the model's vocabulary.
        vocab: u64,
    },
    /// A token or label is outside the model's vocabulary.
    #[error("{location}: {id_kind} {id} is outside the model's vocabulary of {vocab} tokens")]
    IdOutOfRange {
        /// Place of the document that holds the id.
        location: SourceLocation,
        /// Kind of the id: "token" or "label".
        id_kind: &'static str,
        /// The id that is outside the vocabulary.
        id: i64,
        /// Number of tokens in the model's vocabulary.
        vocab: u64,
    },
    /// A document needs more than one row (training sequence), which `data.long = "refuse"` forbids.
    #[error("{location}: a document of {} does not fit in a row of {}", format_count(*tokens, "token"), format_count(*sequence, "position"))]
    DocumentTooLong {
        /// Place of the document that is too long.
        location: SourceLocation,
        /// Number of tokens of the document.
        tokens: u64,
        /// T: number of input positions of a row.
        sequence: u64,
    },
    /// No document has a token to predict: each has fewer than two tokens, or no label after the first.
    #[error("no data: nothing to predict in {} ({})", describe_files(files), format_count(*skipped, "document"))]
    Empty {
        /// The files that were read.
        files: Vec<PathBuf>,
        /// Number of documents, all of which were skipped.
        skipped: u64,
    },
    /// The data are text (`data.format = "text"`), but the model has no tokenizer.
    #[error("the text format needs a tokenizer.json")]
    NoTokenizer,
    /// The data are text (`data.format = "text"`), but the model's files define no end token.
    #[error("no end token is defined for {}", tokenizer.display())]
    NoEndToken {
        /// Path of the `tokenizer.json`.
        tokenizer: PathBuf,
    },
    /// The tokenizer, or a configuration file beside it, cannot be parsed.
    #[error("{} cannot be used: {reason}", file.display())]
    Tokenizer {
        /// Path of the `tokenizer.json` or configuration file that cannot be parsed.
        file: PathBuf,
        /// The message of the parser.
        reason: String,
    },
    /// The tokenizer cannot encode or decode a text.
    #[error("{}tokenizer error: {reason}", location.as_ref().map(|location| format!("{location}: ")).unwrap_or_default())]
    Encode {
        /// Place of the text in the data files; `None` if it comes from elsewhere, such as a prompt.
        location: Option<SourceLocation>,
        /// The message of the tokenizer.
        reason: String,
    },
    /// The tokenizer has more tokens than the model's vocabulary.
    #[error("{} has {tokenizer_vocab} tokens, but the model has {vocab}", file.display())]
    TokenizerVocab {
        /// Path of the `tokenizer.json`.
        file: PathBuf,
        /// Number of tokens in the tokenizer's vocabulary.
        tokenizer_vocab: u64,
        /// Number of tokens in the model's vocabulary.
        vocab: u64,
    },
    /// `data.sequence`, the number of positions of a row, is below 1 or above its limit.
    #[error("sequence = {sequence} is not between 1 and {limit}")]
    SequenceOutOfRange {
        /// Refused value of `data.sequence`.
        sequence: u64,
        /// The largest allowed value.
        limit: u64,
    },
    /// A data file changed while it was read.
    #[error("{} was changed while it was read", file.display())]
    FileChanged {
        /// Path of the data file that changed.
        file: PathBuf,
    },
    /// A file of the token cache on disk is incomplete or has impossible content, such as ids outside the vocabulary.
    #[error("the token cache {} is damaged", file.display())]
    DamagedCache {
        /// Path of the damaged cache file.
        file: PathBuf,
    },
    /// The caller's progress callback asked to stop.
    #[error("stopped while reading the data")]
    Stopped,
}

fn describe_files(files: &[PathBuf]) -> String {
    match files {
        [one] => one.display().to_string(),
        [first, rest @ ..] => format!("{} and {}", first.display(), format_count(rest.len(), "more file")),
        [] => "no files".to_owned(),
    }
}

impl DataError {
    /// Returns a closure for `map_err` that reports a failed `action` on `file`.
    pub(super) fn io(action: &'static str, file: &Path) -> impl FnOnce(io::Error) -> DataError {
        let file = file.to_owned();
        move |source| DataError::Io { action, file, source }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Failure {
        let hint = match &error {
            DataError::Stopped => return Failure::stopped(error.to_string()),
            DataError::NoThread => return Failure::no_thread("to read the data"),
            DataError::InvalidPattern { .. } | DataError::NoFiles { .. } => {
                Some("paths are relative to the directory in which plimsoll was started; a glob looks like `data/*.jsonl`".to_owned())
            }
            DataError::TooManyFiles { .. } => {
                Some("name a smaller folder, or join the documents in .jsonl files".to_owned())
            }
            DataError::UnsupportedFile { .. } => Some("data files end in .jsonl or, in the text format, .txt".to_owned()),
            DataError::Io { source, .. } if is_disk_full(source) => Some(
                "free disk space or set another folder: run.dir for the run, PLIMSOLL_CACHE for the token cache (4 bytes per token, 8 with labels)"
                    .to_owned(),
            ),
            DataError::CacheFolder { .. } => {
                Some("set a writable folder: PLIMSOLL_CACHE=/path plimsoll ...".to_owned())
            }
            DataError::NotUtf8 { .. } => {
                Some("convert the file to UTF-8, for example with `iconv -t utf-8`".to_owned())
            }
            DataError::MalformedLine { format: super::Format::Text, .. } => {
                Some(
                r#"data.format = "text" expects {"text": "..."} on each line; for {"input_ids": [..]} use data.format = "tokens""#
                    .to_owned(),
            )
            }
            DataError::MalformedLine { format: super::Format::Tokens, .. } => Some(
                r#"data.format = "tokens" expects {"input_ids": [..], "labels": [..]} on each line; labels are optional"#
                    .to_owned(),
            ),
            DataError::LineTooLong { .. } => {
                Some("split the document over several lines, or put it into a .txt file of its own".to_owned())
            }
            DataError::LabelCount { .. } => {
                Some("give one label per token of input_ids, not shifted; -100 marks tokens that are not predicted".to_owned())
            }
            DataError::TokenKey { .. } => Some(
                "write one document per line, with -100 in labels for tokens that are not predicted, and remove the key"
                    .to_owned(),
            ),
            DataError::ForeignFormat { remedy, .. } => Some((*remedy).to_owned()),
            DataError::Empty { .. } => Some(
                "give documents of two tokens or more; in the text format, a tokenizer.json that keeps the text; in the tokens format, a label other than -100 after the first token"
                    .to_owned(),
            ),
            DataError::IdOutOfRange { .. } => Some(
                "tokenize the data with the model's own tokenizer, or correct vocab_size in config.json"
                    .to_owned(),
            ),
            DataError::TokenizerVocab { .. } | DataError::TextTokenOutOfRange { .. } => {
                Some("use the tokenizer.json that belongs to the model, or a model with a larger vocab_size".to_owned())
            }
            DataError::DocumentTooLong { tokens, .. } => {
                Some(format!("set data.sequence = {} or more, or data.long = \"split\"", tokens - 1))
            }
            DataError::NoTokenizer => {
                Some(r#"put tokenizer.json into the model's folder, or use data.format = "tokens""#.to_owned())
            }
            DataError::NoEndToken { .. } => Some(
                "set eos_token in tokenizer_config.json or eos_token_id in config.json, beside tokenizer.json"
                    .to_owned(),
            ),
            DataError::DamagedCache { file } => Some(format!("remove {} and start again: the cache is rebuilt", file.display())),
            DataError::FileChanged { .. } => Some("start again once no other process writes to the file".to_owned()),
            _ => None,
        };
        let failure = Failure::input(error.to_string());
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}
