//! The output of `plimsoll generate --prompts`: a JSON lines file of answers, and beside it a file with the settings
//! that the answers depend on.

use crate::args::AnswerSettings;
use plimsoll_core::Failure;
use plimsoll_device::regular_file;
use plimsoll_train::inference::generation::GeneratedText;
use serde_json::{Map, Value, json};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The longest line of a file of answers.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A JSON lines file of answers: the keys of each record with `text`, `tokens` and `end`.
pub struct AnswerFile<'a> {
    path: &'a Path,
    file: File,
}

impl AnswerFile<'_> {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// A path that cannot be written, or is no regular file.
    pub fn open(path: &Path) -> Result<AnswerFile<'_>, Failure> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| Failure::input(format!("{}: cannot write it: {error}", path.display())))?;
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(Failure::input(format!("{}: not a regular file", path.display())));
        }
        Ok(AnswerFile { path, file })
    }

    /// Returns the number of answers that the file has, and removes a last line that is incomplete.
    ///
    /// # Errors
    /// An answer that does not belong to the record in its place.
    pub fn read_written<'r>(
        &mut self,
        records: impl Iterator<Item = &'r Map<String, Value>>,
    ) -> Result<usize, Failure> {
        let path = self.path;
        let foreign = |line: usize| {
            Failure::input(format!("{}:{line}: it is no answer to prompt {line}", path.display()))
                .hint("name another file, or delete this one")
        };
        let (mut records, mut count, mut bytes) = (records, 0, 0);
        let mut reader = BufReader::new(&self.file);
        loop {
            let mut line = Vec::new();
            let read = io::Read::take(&mut reader, ANSWER_BYTES_MAX).read_until(b'\n', &mut line);
            read.map_err(|error| self.failed("read", &error))?;
            if line.is_empty() || !line.ends_with(b"\n") {
                break;
            }
            let answer: Option<Map<String, Value>> = serde_json::from_slice(&line).ok();
            let record = records.next();
            let (Some(answer), Some(record)) = (answer, record) else { return Err(foreign(count + 1)) };
            if !belongs(&answer, record) {
                return Err(foreign(count + 1));
            }
            (count, bytes) = (count + 1, bytes + line.len() as u64);
        }
        let kept = self.file.set_len(bytes).and_then(|()| self.file.seek(SeekFrom::Start(bytes)));
        kept.map_err(|error| self.failed("write", &error))?;
        Ok(count)
    }

    /// Checks that the settings are those of the answers in the file, which has `written` of them. Without answers,
    /// writes the settings beside it.
    ///
    /// # Errors
    /// Settings that differ, or are unknown; a file that cannot be read or written.
    pub fn check_settings(&self, settings: &AnswerSettings, written: usize) -> Result<(), Failure> {
        let path = settings_path(self.path);
        let settings = serde_json::to_value(settings).expect("settings are plain data");
        if written == 0 {
            let text = format!("{settings:#}\n");
            let stored = regular_file::write(&path, text.as_bytes());
            return stored.map_err(|error| Failure::input(format!("{}: cannot write it: {error}", path.display())));
        }
        let refuse = |reason: String| Failure::input(reason).hint("name another file with --out, or delete this one");
        let text = fs::read(&path)
            .map_err(|error| refuse(format!("{}: cannot read the settings of its answers: {error}", path.display())))?;
        let of_answers: Map<String, Value> = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("{}: not the settings of answers: {error}", path.display())))?;
        let differs =
            settings.as_object().into_iter().flatten().find(|(key, value)| of_answers.get(*key) != Some(value));
        let Some((key, value)) = differs else { return Ok(()) };
        let before = of_answers.get(key).unwrap_or(&Value::Null);
        let place = self.path.display();
        Err(refuse(format!("{place}: its {written} answers have {key} {before}, but this command has {value}")))
    }

    /// Writes an answer.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn append(&mut self, record: &Map<String, Value>, answer: GeneratedText) -> Result<(), Failure> {
        let mut line = record.clone();
        for (key, value) in answer_keys(answer) {
            line.insert(key.to_owned(), value);
        }
        let line = format!("{}\n", Value::Object(line));
        self.file.write_all(line.as_bytes()).map_err(|error| self.failed("write", &error))
    }

    fn failed(&self, action: &str, error: &io::Error) -> Failure {
        Failure::input(format!("{}: cannot {action} it: {error}", self.path.display()))
    }
}

/// The keys that an answer adds to its record.
fn answer_keys(answer: GeneratedText) -> [(&'static str, Value); 3] {
    [("text", answer.text.into()), ("tokens", answer.tokens.into()), ("end", json!(answer.end))]
}

/// Returns whether an answer has all keys of a record, apart from those that are answered.
fn belongs(answer: &Map<String, Value>, record: &Map<String, Value>) -> bool {
    let is_added = |key: &str| matches!(key, "text" | "tokens" | "end");
    let is_complete = ["text", "tokens", "end"].iter().all(|key| answer.contains_key(*key));
    is_complete && record.iter().all(|(key, value)| is_added(key) || answer.get(key) == Some(value))
}

/// Returns the path of the settings of a file of answers: `ANSWERS.settings.json`.
fn settings_path(answers: &Path) -> PathBuf {
    let mut name = answers.as_os_str().to_owned();
    name.push(".settings.json");
    name.into()
}
