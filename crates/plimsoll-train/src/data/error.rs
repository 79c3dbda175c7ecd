//! Errors of the user's data, with their messages and hints.

use super::record_format::RecordFormat;
use super::template_error::TemplateError;
use crate::config::{Objective, Split};
use plimsoll_core::{Bytes, Failure, format_count, is_disk_full};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A position in the user's data files, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    /// Path of the data file.
    pub file: PathBuf,
    /// Place in the file.
    pub place: Place,
}

impl SourceLocation {
    /// Returns the location of a whole file.
    pub fn whole(file: &Path) -> SourceLocation {
        SourceLocation { file: file.to_owned(), place: Place::File }
    }
}

/// A place in a data file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// The file as a whole.
    #[default]
    File,
    /// A line, counted from 1.
    Line(u64),
    /// An element of a list or a row of a table, counted from 1.
    Record(u64),
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        match self.place {
            Place::File => Ok(()),
            Place::Line(line) => write!(f, ":{line}"),
            Place::Record(record) => write!(f, ", record {record}"),
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
    /// No file is of the split that a source names.
    #[error("no name tells that a file has the split \"{}\"; the files are {}", split.name(), list_some(files))]
    NoSplit {
        /// The split.
        split: Split,
        /// The files that there are.
        files: Vec<PathBuf>,
    },
    /// More files, or folders on the way to them, match a glob than Plimsoll takes.
    #[error("more than {limit} files or folders match `{pattern}`")]
    TooManyFiles {
        /// The pattern from the run file.
        pattern: String,
        /// The most files or folders that a glob may match.
        limit: usize,
    },
    /// A data file is a folder, has another extension than those of data, or is `.txt` although `data.format` is not text.
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
    /// A text has bytes that are zero.
    #[error("{location}: NUL bytes")]
    NulByte {
        /// Place of the text.
        location: SourceLocation,
    },
    /// A compressed or binary file, or UTF-16 text, that cannot be decoded.
    #[error("{} is damaged: {reason}", file.display())]
    DamagedFile {
        /// Path of the data file.
        file: PathBuf,
        /// The message of the decoder.
        reason: String,
    },
    /// A record is not of the expected form.
    #[error("{location}: {reason}")]
    MalformedRecord {
        /// Place of the malformed record.
        location: SourceLocation,
        /// Description of the problem.
        reason: String,
        /// The format that the record should follow; `None` if its container is malformed.
        format: Option<RecordFormat>,
    },
    /// A record of a file of prompts has no prompt.
    #[error("{location}: {reason}")]
    MalformedPrompt {
        /// Place of the record.
        location: SourceLocation,
        /// Description of the problem.
        reason: String,
    },
    /// A record fits no format.
    #[error("{location}: the record fits no format; {}", describe_keys(keys))]
    NoMatchingFormat {
        /// Place of the record.
        location: SourceLocation,
        /// The first keys of the record.
        keys: Vec<String>,
    },
    /// A record fits several formats.
    #[error("{location}: the record fits two formats, {first} and {second}")]
    SeveralFormats {
        /// Place of the record.
        location: SourceLocation,
        /// One of the formats.
        first: RecordFormat,
        /// Another of the formats.
        second: RecordFormat,
    },
    /// A record fits another format than those before it.
    #[error("{location}: the format of the record is {found}, that of the records before it is {expected}")]
    MixedRecords {
        /// Place of the record.
        location: SourceLocation,
        /// Format of the record.
        found: RecordFormat,
        /// Format of the records before it.
        expected: RecordFormat,
    },
    /// A file has records of a format that the training objective does not use.
    #[error(
        "{}: its format is {format}, {}", file.display(),
        match objective {
            Objective::Dpo => "but train.objective = \"dpo\" takes preference",
            Objective::Grpo => "but train.objective = \"grpo\" takes prompt or rollouts",
            Objective::Supervised if *format == RecordFormat::Preference => "which only train.objective = \"dpo\" takes",
            Objective::Supervised => "which only train.objective = \"grpo\" takes",
        }
    )]
    OtherObjective {
        /// Path of the data file.
        file: PathBuf,
        /// Format of its records.
        format: RecordFormat,
        /// The objective.
        objective: Objective,
    },
    /// A pair of answers is longer than a row.
    #[error(
        "{location}: the pair needs {} positions (prompt with chosen answer, prompt with rejected answer), more than a row \
         has (data.sequence = {sequence})", tokens - 1
    )]
    AnswersTooLong {
        /// Place of the pair.
        location: SourceLocation,
        /// Tokens of both documents, each with the prompt.
        tokens: u64,
        /// T, the number of positions of a row.
        sequence: u64,
    },
    /// A record has one completion with a verdict (unpaired preference), where an objective takes two answers.
    #[error(
        "{location}: expected `chosen` and `rejected`, found one `completion` with a `label` (unpaired preference)"
    )]
    Unpaired {
        /// Place of the record.
        location: SourceLocation,
    },
    /// A conversation cannot be rendered, or there is no template for it.
    #[error("{}{source}", location.as_ref().map_or(String::new(), |location| format!("{location}: ")))]
    Template {
        /// Place of the conversation; `None` if the template fails without one.
        location: Option<SourceLocation>,
        /// The error of the template.
        source: TemplateError,
    },
    /// A prompt and its completion are longer than what is tokenized at once.
    #[error("{location}: the prompt with its completion or longer answer is longer than {limit}")]
    CompletionTooLong {
        /// Place of the record.
        location: SourceLocation,
        /// Size limit of both together.
        limit: Bytes,
    },
    /// A record is longer than the reader's limit.
    #[error("{location}: the {} is longer than {limit}", if matches!(location.place, Place::Line(_)) { "line" } else { "record" })]
    RecordTooLong {
        /// Place of the record that is too long.
        location: SourceLocation,
        /// Size limit of a record.
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
    #[error("{}: expected {expected}, found {found}", file.display())]
    ForeignFormat {
        /// Path of the data file.
        file: PathBuf,
        /// Description of the content that its name promises.
        expected: &'static str,
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
    /// The data are text, but the model has no tokenizer.
    #[error("data other than token ids need a tokenizer.json")]
    NoTokenizer,
    /// The data are text, but the model's files define no end token.
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

/// Describes the keys of a record.
fn describe_keys(keys: &[String]) -> String {
    match keys {
        [] => "it has no keys".to_owned(),
        keys => format!("its keys are {}", keys.join(", ")),
    }
}

fn describe_files(files: &[PathBuf]) -> String {
    match files {
        [one] => one.display().to_string(),
        [first, rest @ ..] => format!("{} and {}", first.display(), format_count(rest.len(), "more file")),
        [] => "no files".to_owned(),
    }
}

/// Lists the first files by name.
fn list_some(files: &[PathBuf]) -> String {
    const LISTED: usize = 3;
    let names: Vec<String> = files.iter().take(LISTED).map(|file| file.display().to_string()).collect();
    match files.len().saturating_sub(LISTED) {
        0 => names.join(", "),
        more => format!("{} and {}", names.join(", "), format_count(more, "more file")),
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
        match &error {
            DataError::Stopped => return Failure::stopped(error.to_string()),
            DataError::NoThread => return Failure::no_thread("to read the data"),
            _ => {}
        }
        let failure = Failure::input(error.to_string());
        match hint(&error) {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

/// Returns what to do about an error; `None` if its message says it.
fn hint(error: &DataError) -> Option<String> {
    let hint = match error {
        DataError::InvalidPattern { .. } | DataError::NoFiles { .. } => {
            "paths are relative to the directory in which plimsoll was started; a glob looks like `data/*.jsonl`"
        }
        DataError::NoSplit { .. } => {
            "a split is told by a word in the name of a file or its folder; leave split out to take all files"
        }
        DataError::TooManyFiles { .. } => "name a smaller folder, or join the documents in .jsonl files",
        DataError::UnsupportedFile { .. } => {
            "data files end in .jsonl, .json, .csv, .tsv, .parquet or .txt; all but .parquet also with .gz or .zst"
        }
        DataError::Io { source, .. } if is_disk_full(source) => {
            "free disk space or set another folder: run.dir for the run, PLIMSOLL_CACHE for the token cache (4 bytes per token, 8 with labels)"
        }
        DataError::CacheFolder { .. } => "set a writable folder: PLIMSOLL_CACHE=/path plimsoll ...",
        DataError::NotUtf8 { .. } => "convert the file to UTF-8, for example with `iconv -t utf-8`",
        DataError::NulByte { .. } => "the file is damaged or no text; write it again",
        DataError::DamagedFile { .. } => "download or write the file again",
        DataError::NoMatchingFormat { .. } => {
            r#"rename the keys: {"prompt": "...", "completion": "..."} for a question and its answer, {"text": "..."} for a text; docs/data.md lists the keys of each format"#
        }
        DataError::SeveralFormats { first, second, .. } => {
            return Some(format!(r#"name one of them: data.format = "{first}" or "{second}""#));
        }
        DataError::MixedRecords { .. } => "write the records of each format into a file of their own",
        DataError::OtherObjective { objective: Objective::Supervised, format: RecordFormat::Preference, .. } => {
            r#"to train on pairs, set train.objective = "dpo"; to use the chosen answers alone, write each as "completion" beside its "prompt""#
        }
        DataError::OtherObjective { objective: Objective::Supervised, .. } => {
            r#"to sample completions and reward them, set train.objective = "grpo"; to train on answers, write each as "completion" beside its "prompt""#
        }
        DataError::OtherObjective { objective: Objective::Dpo, .. } => {
            r#"give each prompt two answers: {"prompt": "...", "chosen": "...", "rejected": "..."}"#
        }
        DataError::OtherObjective { objective: Objective::Grpo, .. } => {
            r#"write each prompt as "prompt", a text or a list of messages; data.format = "prompt" ignores keys of other formats"#
        }
        DataError::AnswersTooLong { tokens, .. } => {
            return Some(format!("set data.sequence to {} or more, or shorten the record", tokens - 1));
        }
        DataError::Unpaired { .. } => r#"give each prompt two answers, "chosen" and "rejected""#,
        DataError::CompletionTooLong { .. } => "shorten the record, split it, or write it as text",
        DataError::MalformedRecord { format: Some(format), .. } => {
            return Some(format!(r#"data.format = "{format}" expects {}"#, format.expected_keys()));
        }
        DataError::MalformedRecord { format: None, .. } => {
            "correct the record or leave it out, or write the file again"
        }
        DataError::MalformedPrompt { .. } => {
            r#"a prompt is {"prompt": "..."} or {"messages": [..]} with a last message of the user; docs/generate.md has examples"#
        }
        DataError::RecordTooLong { .. } => {
            "split the document over several records, or put it into a .txt file of its own"
        }
        DataError::LabelCount { .. } => {
            "give one label per token of input_ids, not shifted; -100 marks tokens that are not predicted"
        }
        DataError::TokenKey { .. } => {
            "write one document per record, with -100 in labels for tokens that are not predicted, and remove the key"
        }
        DataError::ForeignFormat { remedy, .. } => remedy,
        DataError::DocumentTooLong { tokens, .. } => {
            return Some(format!("set data.sequence = {} or more, or data.long = \"split\"", tokens - 1));
        }
        DataError::DamagedCache { file } => {
            return Some(format!("remove {} and start again: the cache is rebuilt", file.display()));
        }
        DataError::Template { source, .. } => return source.hint(),
        DataError::FileChanged { .. } => "start again once no other process writes to the file",
        error => return model_hint(error).map(str::to_owned),
    };
    Some(hint.to_owned())
}

/// Returns what to do about data that do not fit the model.
fn model_hint(error: &DataError) -> Option<&'static str> {
    Some(match error {
        DataError::Empty { skipped: 0, .. } => {
            "the files have no records: check their paths, or write a record per line"
        }
        DataError::Empty { .. } => {
            "give documents of two tokens or more; in conversations, a message of the assistant; in text, a tokenizer.json that keeps the text; in token ids, a label other than -100 after the first token"
        }
        DataError::IdOutOfRange { .. } => {
            "tokenize the data with the model's own tokenizer, or correct vocab_size in config.json"
        }
        DataError::TokenizerVocab { .. } | DataError::TextTokenOutOfRange { .. } => {
            "use the tokenizer.json that belongs to the model, or a model with a larger vocab_size"
        }
        DataError::NoTokenizer => {
            r#"put tokenizer.json into the model's folder, or give token ids: {"input_ids": [..]}"#
        }
        DataError::NoEndToken { .. } => {
            "set eos_token in tokenizer_config.json or eos_token_id in config.json, beside tokenizer.json"
        }
        _ => return None,
    })
}
