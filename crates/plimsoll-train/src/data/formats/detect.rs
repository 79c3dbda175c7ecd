//! Recognition of a file's format by the keys of its records.
//!
//! A key whose value is null counts as absent. A record that fits several formats is refused, because each would train on
//! something else.

use super::super::containers::{ByteCounter, PlacedRecord, Record, RecordReader};
use super::super::error::{DataError, SourceLocation};
use super::super::record_format::RecordFormat;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::path::Path;

/// The most records by which a format is recognized.
const RECORDS_MAX: u64 = 64;
/// Bytes of records after which no more are read to recognize a format.
const RECORD_BYTES_MAX: usize = 1 << 20;
/// The most keys of a record that a message names.
const NAMED_KEYS_MAX: usize = 8;

/// Returns the format of a file's first records; `None` if it has no record.
///
/// # Errors
/// Records that cannot be read, fit no format or several, or fit different formats.
pub(super) fn detect_file(file: &Path) -> Result<Option<RecordFormat>, DataError> {
    let mut records = RecordReader::open(file, &ByteCounter::default())?;
    let (mut format, mut bytes) = (None, 0);
    for _ in 0..RECORDS_MAX {
        let Some(PlacedRecord { place, record }) = records.read_next()? else { break };
        let location = || SourceLocation { file: file.to_owned(), place };
        format = Some(check_reading(&record, format, location)?);
        bytes += match &record {
            Record::Json(text) => text.len(),
            Record::Row(row) => row.to_string().len(),
        };
        if bytes >= RECORD_BYTES_MAX {
            break;
        }
    }
    Ok(format)
}

/// Returns the format of a record, which must be `expected` unless that is `None`.
///
/// # Errors
/// A record that is no object, fits no format or several, or fits another format than `expected`.
pub(in super::super) fn check_reading(
    record: &Record,
    expected: Option<RecordFormat>,
    location: impl Fn() -> SourceLocation,
) -> Result<RecordFormat, DataError> {
    let malformed = |reason| DataError::MalformedRecord { location: location(), reason, format: expected };
    let keys: KeyScan = record.peek().map_err(malformed)?;
    match keys.matching_formats(expected)[..] {
        [] => Err(DataError::NoMatchingFormat { location: location(), keys: keys.names }),
        [first, second, ..] => Err(DataError::SeveralFormats { location: location(), first, second }),
        [found] => match expected.filter(|&expected| expected != found) {
            Some(expected) => Err(DataError::MixedRecords { location: location(), found, expected }),
            None => Ok(found),
        },
    }
}

/// The keys of a record by which formats differ.
#[derive(Default)]
struct KeyScan {
    /// The first keys of the record.
    names: Vec<String>,
    /// The formats of its lists of messages; `None` for an empty list, which fits both.
    messages: Vec<Option<RecordFormat>>,
    text: bool,
    input_ids: bool,
    instruction: bool,
    output: bool,
    prompt: bool,
    completion: bool,
    label: bool,
    chosen: bool,
    rejected: bool,
    prompt_ids: bool,
    completion_ids: bool,
}

impl KeyScan {
    /// Returns the formats that the record fits. A list without messages is of the format `expected`.
    fn matching_formats(&self, expected: Option<RecordFormat>) -> Vec<RecordFormat> {
        let of_empty = expected.filter(|&format| format == RecordFormat::Sharegpt).unwrap_or(RecordFormat::Messages);
        let has_messages = |format| self.messages.iter().any(|found| found.unwrap_or(of_empty) == format);
        let has_verdict = self.prompt && self.completion && self.label;
        let mut formats = Vec::new();
        let mut add = |fits: bool, format| formats.extend(fits.then_some(format));
        add(self.text, RecordFormat::Text);
        add(self.input_ids, RecordFormat::Tokens);
        add(has_messages(RecordFormat::Messages), RecordFormat::Messages);
        add(has_messages(RecordFormat::Sharegpt), RecordFormat::Sharegpt);
        add(self.instruction && self.output, RecordFormat::Alpaca);
        // Files of rounds have their texts, too.
        let is_rollout = self.prompt_ids && self.completion_ids;
        add(self.prompt && self.completion && !self.label && !is_rollout, RecordFormat::PromptCompletion);
        add(has_verdict || (self.chosen && self.rejected), RecordFormat::Preference);
        add(is_rollout, RecordFormat::Rollouts);
        // A prompt beside keys of other formats belongs to one of them.
        if formats.is_empty() && self.prompt && self.messages.is_empty() && !self.has_other_key() {
            formats.push(RecordFormat::Prompt);
        }
        formats
    }
}

impl KeyScan {
    /// Returns whether a key other than `prompt` tells the format.
    fn has_other_key(&self) -> bool {
        let KeyScan { text, input_ids, completion, chosen, rejected, prompt_ids, .. } = self;
        [text, input_ids, completion, chosen, rejected, prompt_ids].into_iter().any(|flag| *flag)
    }
}

impl<'de> Deserialize<'de> for KeyScan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<KeyScan, D::Error> {
        deserializer.deserialize_map(KeyVisitor)
    }
}

struct KeyVisitor;

impl<'de> Visitor<'de> for KeyVisitor {
    type Value = KeyScan;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<KeyScan, A::Error> {
        let mut keys = KeyScan::default();
        while let Some(key) = map.next_key::<String>()? {
            let flag = match &*key {
                "messages" | "conversations" => {
                    let list: Option<MessageScan> = map.next_value()?;
                    keys.messages.extend(list.map(|MessageScan(format)| format));
                    keys.name(key);
                    continue;
                }
                "text" => Some(&mut keys.text),
                "input_ids" => Some(&mut keys.input_ids),
                "instruction" => Some(&mut keys.instruction),
                "output" => Some(&mut keys.output),
                "prompt" => Some(&mut keys.prompt),
                "completion" => Some(&mut keys.completion),
                "label" => Some(&mut keys.label),
                "chosen" => Some(&mut keys.chosen),
                "rejected" => Some(&mut keys.rejected),
                "prompt_ids" => Some(&mut keys.prompt_ids),
                "completion_ids" => Some(&mut keys.completion_ids),
                _ => None,
            };
            let is_present = map.next_value::<Option<IgnoredAny>>()?.is_some();
            if let Some(flag) = flag {
                *flag = is_present;
            }
            keys.name(key);
        }
        Ok(keys)
    }
}

impl KeyScan {
    /// Remembers a key for messages.
    fn name(&mut self, key: String) {
        if self.names.len() < NAMED_KEYS_MAX {
            self.names.push(key);
        }
    }
}

/// The format of a list of messages, by the keys of its first message; `None` for an empty list.
struct MessageScan(Option<RecordFormat>);

impl<'de> Deserialize<'de> for MessageScan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<MessageScan, D::Error> {
        deserializer.deserialize_any(MessageVisitor)
    }
}

struct MessageVisitor;

impl<'de> Visitor<'de> for MessageVisitor {
    type Value = MessageScan;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<MessageScan, A::Error> {
        let first: Option<FirstMessage> = list.next_element()?;
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(MessageScan(first.map(|first| match first {
            FirstMessage { from: Some(_), role: None } => RecordFormat::Sharegpt,
            _ => RecordFormat::Messages,
        })))
    }
}

/// The keys of a message that name its author.
#[derive(Deserialize)]
#[serde(expecting = "a message with `role` or `from`")]
struct FirstMessage {
    from: Option<IgnoredAny>,
    role: Option<IgnoredAny>,
}
