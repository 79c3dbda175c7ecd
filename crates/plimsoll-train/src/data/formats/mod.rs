//! Formats of records: the meaning of the keys of a record, independent of its container.
//!
//! | module | format | keys |
//! |---|---|---|
//! | (here) | `text` | `text` |
//! | `token_line` of `data` | `tokens` | `input_ids`, `labels` and masks |
//! | `messages` | `messages` | `messages` or `conversations`, with `role` and `content` |
//! | `sharegpt` | `sharegpt` | `conversations` or `messages`, with `from` and `value` |
//! | `alpaca` | `alpaca` | `instruction`, `input`, `output`, `system`, `history` |
//! | `completion` | `prompt_completion` | `prompt` and `completion` |
//! | `preference` | `preference` | `chosen` and `rejected`, with or without `prompt` |
//! | (here) | `prompt` | `prompt`, with any other keys |
//! | `rollouts` of `data` | `rollouts` | `prompt_ids`, `completion_ids`, `rewards`, `old_logps` |
//!
//! `detect` recognizes the format of a file by its records.

mod alpaca;
mod completion;
mod detect;
mod messages;
mod preference;
mod sharegpt;
#[cfg(test)]
mod tests;

pub(super) use preference::PreferencePair;

use super::containers::{Container, Record, file_type};
use super::conversation::{Conversation, Message, Prompt};
use super::error::DataError;
use super::record_format::RecordFormat;
use super::rollouts::Rollout;
use super::token_line::TokenLine;
use crate::config::Format;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::PathBuf;

pub(super) use detect::check_reading;

/// A data file with the format of its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataFile {
    pub path: PathBuf,
    /// Format of the records; `None` for a file without records.
    pub format: Option<RecordFormat>,
    /// Whether the format was recognized by the records. Each record is then checked against it.
    pub is_detected: bool,
}

/// Finds the format of each file: that of the run file, or that of the file's first records.
///
/// # Errors
/// With `auto`, a file whose first records cannot be read, fit no format, or fit several.
pub(crate) fn resolve_formats(files: Vec<PathBuf>, format: Format) -> Result<Vec<DataFile>, DataError> {
    files.into_iter().map(|path| resolve_format(path, format)).collect()
}

/// Finds the format of a file.
fn resolve_format(path: PathBuf, format: Format) -> Result<DataFile, DataError> {
    let is_text = file_type(&path)?.container == Container::PlainText;
    let named = if is_text { Some(RecordFormat::Text) } else { format.named() };
    Ok(match named {
        Some(_) => DataFile { path, format: named, is_detected: false },
        None => DataFile { format: detect::detect_file(&path)?, path, is_detected: true },
    })
}

/// A document as a record describes it.
#[derive(Debug)]
pub(super) enum Document<'a> {
    Text(Cow<'a, str>),
    Tokens(TokenLine),
    /// A prompt without labels, and its completion with labels.
    Pair {
        prompt: String,
        completion: String,
    },
    Conversation(Box<Conversation>),
    /// A prompt with a chosen and a rejected answer.
    Preference(PreferencePair),
    /// A prompt whose completions are sampled.
    Prompt(Prompt),
    /// A checked completion with a verdict, which no objective uses.
    Verdict,
    /// A conversation without messages.
    Empty,
}

/// Reads a record of the format `format`.
///
/// # Errors
/// The reason for which the record is not of the format, in words.
pub(super) fn parse_record(record: Record, format: RecordFormat) -> Result<Document, String> {
    match format {
        RecordFormat::Text => {
            #[derive(Deserialize)]
            struct Line<'a> {
                #[serde(borrow)]
                text: Cow<'a, str>,
            }
            record.parse().map(|line: Line| Document::Text(line.text))
        }
        RecordFormat::Tokens => record.parse().map(Document::Tokens),
        RecordFormat::Messages => messages::parse(&mut keys_of(record)?),
        RecordFormat::Sharegpt => sharegpt::parse(&mut keys_of(record)?),
        RecordFormat::Alpaca => alpaca::parse(&mut keys_of(record)?),
        RecordFormat::PromptCompletion => completion::parse(&mut keys_of(record)?),
        RecordFormat::Preference => preference::parse(&mut keys_of(record)?),
        RecordFormat::Prompt => parse_prompt(&keys_of(record)?).map(Document::Prompt),
        RecordFormat::Rollouts => {
            let rollout: Rollout = record.parse()?;
            rollout.check()?;
            Ok(Document::Tokens(rollout.into()))
        }
    }
}

/// Returns the keys of a record that are not null.
fn keys_of(record: Record) -> Result<Map<String, Value>, String> {
    let mut keys: Map<String, Value> = record.parse()?;
    keys.retain(|_, value| !value.is_null());
    Ok(keys)
}

/// Reads a prompt: a record with `messages` or `conversations`, or with `prompt`, which is a text or a list of messages.
///
/// # Errors
/// The reason for which the record is no prompt, in words.
pub(super) fn parse_prompt(record: &Map<String, Value>) -> Result<Prompt, String> {
    let mut keys = record.clone();
    keys.retain(|_, value| !value.is_null());
    match keys.get("prompt") {
        Some(Value::String(text)) => return Ok(Prompt::Text(text.clone())),
        Some(Value::Array(_)) => {
            let messages = keys.remove("prompt").unwrap_or_default();
            keys.insert("messages".to_owned(), messages);
        }
        Some(other) => return Err(format!("`prompt` is {}, expected a text or a list of messages", kind_of(other))),
        None if keys.contains_key("messages") || keys.contains_key("conversations") => {}
        None => return Err("missing field `prompt` or `messages`".to_owned()),
    }
    let is_sharegpt = keys.contains_key("conversations");
    let document = if is_sharegpt { sharegpt::parse(&mut keys)? } else { messages::parse(&mut keys)? };
    match document {
        Document::Conversation(conversation)
            if conversation.messages.last().is_some_and(Message::is_from_assistant) =>
        {
            Err("the last message is from the assistant; end with one of the user".to_owned())
        }
        Document::Conversation(conversation) => Ok(Prompt::Conversation(conversation)),
        _ => Err("it has no messages".to_owned()),
    }
}

/// Removes a key that must hold a text.
fn take_text(keys: &mut Map<String, Value>, key: &str) -> Result<String, String> {
    take_optional_text(keys, key)?.ok_or_else(|| format!("missing field `{key}`"))
}

/// Removes a key that holds a text if it is there.
fn take_optional_text(keys: &mut Map<String, Value>, key: &str) -> Result<Option<String>, String> {
    match keys.remove(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("`{key}` is {}, expected a text", kind_of(&other))),
    }
}

/// Describes the type of a value.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
