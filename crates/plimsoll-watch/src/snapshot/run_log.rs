//! Reads `events.jsonl` while a run writes it.

use plimsoll_core::{Bytes, EVENTS_VERSION, Event, HeldMemory, Record};
use plimsoll_device::regular_file;
use serde::Deserialize;
use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Longest line that is read. Longer ones are no events of Plimsoll.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Bytes that are read at once.
const CHUNK_BYTES: usize = 1 << 16;

/// The event log of a run, and the place up to which it has been read.
pub struct RunLog {
    path: PathBuf,
    open: Option<OpenLog>,
}

/// An open log.
struct OpenLog {
    file: File,
    inode: u64,
    /// Bytes that have been read.
    offset: u64,
    /// Bytes after the last line break: a line that is still being written.
    partial: Vec<u8>,
    /// Whether the rest of a line that is too long is being skipped.
    skips_line: bool,
}

/// A part of a log, in the order in which it is read.
#[derive(Debug, PartialEq)]
pub enum LogPart {
    /// The log is new, or was replaced or shortened: what follows begins with its first record.
    Start,
    /// The next record. Lines that are no record of this version are left out.
    Record(Record),
}

impl RunLog {
    /// Returns the log at `path`, of which nothing has been read. It may be missing until the run writes it.
    pub fn new(path: PathBuf) -> RunLog {
        RunLog { path, open: None }
    }

    /// Reads the records that are new since the last call, and gives each to `take`. A line that is cut off is read once
    /// it is complete.
    ///
    /// # Errors
    /// The log exists and cannot be read, or is no regular file.
    pub fn read_new(&mut self, take: &mut dyn FnMut(LogPart)) -> io::Result<()> {
        let present = match std::fs::metadata(&self.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if self.open.take().is_some() {
                    take(LogPart::Start);
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let is_same = |open: &OpenLog| open.inode == present.ino() && open.offset <= present.len();
        if !self.open.as_ref().is_some_and(is_same) {
            take(LogPart::Start);
            let file = regular_file::open(&self.path)?;
            let inode = file.metadata()?.ino();
            self.open = Some(OpenLog { file, inode, offset: 0, partial: vec![], skips_line: false });
        }
        self.open.as_mut().expect("it was just opened").read_new(take)
    }

    /// Returns whether a process trains in the folder: it holds an exclusive lock on the log. `None` if the file system
    /// has no locks. A missing log is not locked.
    pub fn is_locked(&self) -> Option<bool> {
        // The lock that this takes is released at once, when the file is closed.
        match regular_file::open(&self.path).map(|file| file.try_lock_shared()) {
            Ok(Err(TryLockError::WouldBlock)) => Some(true),
            Ok(Err(TryLockError::Error(_))) => None,
            Ok(Ok(())) | Err(_) => Some(false),
        }
    }
}

impl OpenLog {
    fn read_new(&mut self, take: &mut dyn FnMut(LogPart)) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.offset))?;
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let length = self.file.read(&mut chunk)?;
            if length == 0 {
                return Ok(());
            }
            self.offset += length as u64;
            self.take_bytes(&chunk[..length], take);
        }
    }

    /// Takes the next bytes of the log, and gives the records of all complete lines to `take`.
    fn take_bytes(&mut self, bytes: &[u8], take: &mut dyn FnMut(LogPart)) {
        let mut lines = bytes.split(|byte| *byte == b'\n').peekable();
        while let Some(line) = lines.next() {
            // The last part has no line break yet.
            let is_whole = lines.peek().is_some();
            if is_whole && self.partial.is_empty() && !self.skips_line {
                parse_record(line).into_iter().for_each(|record| take(LogPart::Record(record)));
                continue;
            }
            if !self.skips_line {
                self.partial.extend_from_slice(line);
            }
            if self.partial.len() > MAX_LINE_BYTES {
                self.skips_line = true;
                self.partial.clear();
            }
            if is_whole && !std::mem::take(&mut self.skips_line) {
                parse_record(&self.partial).into_iter().for_each(|record| take(LogPart::Record(record)));
                self.partial.clear();
            }
        }
    }
}

/// Parses a line; `None` if it is no record of this version.
fn parse_record(line: &[u8]) -> Option<Record> {
    let record = StepLine::parse(line).map(Record::from).or_else(|| serde_json::from_slice(line).ok());
    record.filter(|record| record.version == EVENTS_VERSION)
}

/// The record of a step, without the levels of [`Record`]. Most lines are steps, and are parsed several times as fast by
/// these fields than as a [`Record`], which keeps all fields until it knows the kind of the event.
#[derive(Deserialize)]
struct StepLine<'a> {
    version: u32,
    time: f64,
    event: &'a str,
    step: u64,
    loss: Option<f64>,
    norm: f64,
    learning_rate: f64,
    tokens: u64,
    labelled_tokens: u64,
    seconds: f64,
    bytes: Bytes,
    #[serde(default)]
    memory: Option<Vec<HeldMemory>>,
}

impl<'a> StepLine<'a> {
    /// Parses a line; `None` if it is no step.
    fn parse(line: &'a [u8]) -> Option<StepLine<'a>> {
        serde_json::from_slice(line).ok().filter(|line: &StepLine| line.event == "step")
    }
}

impl From<StepLine<'_>> for Record {
    fn from(line: StepLine<'_>) -> Record {
        let StepLine {
            version, time, step, norm, learning_rate, tokens, labelled_tokens, seconds, bytes, memory, ..
        } = line;
        let loss = line.loss.unwrap_or(f64::NAN);
        let event = Event::Step { step, loss, norm, learning_rate, tokens, labelled_tokens, seconds, bytes, memory };
        Record { version, time, event }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;

    fn line(message: &str) -> String {
        let event = Event::Warning { message: message.to_owned() };
        serde_json::to_string(&Record { version: EVENTS_VERSION, time: 1.0, event }).unwrap() + "\n"
    }

    /// Reads a log, and returns the messages in it. A new start of the log is `start`.
    fn messages(log: &mut RunLog) -> Vec<String> {
        let mut messages = Vec::new();
        log.read_new(&mut |part| match part {
            LogPart::Start => messages.push("start".to_owned()),
            LogPart::Record(Record { event: Event::Warning { message }, .. }) => messages.push(message),
            LogPart::Record(other) => panic!("{other:?}"),
        })
        .unwrap();
        messages
    }

    /// Returns a log in a new folder, which is missing at first.
    fn log() -> (tempfile::TempDir, PathBuf, RunLog) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        (folder, path.clone(), RunLog::new(path))
    }

    #[test]
    fn cut_off_line_is_read_once_complete() {
        let (_folder, path, mut log) = log();
        assert!(messages(&mut log).is_empty());
        let text = line("one") + &line("two");
        fs::write(&path, &text[..text.len() - 7]).unwrap();
        assert_eq!(messages(&mut log), ["start", "one"]);
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&text.as_bytes()[text.len() - 7..]).unwrap();
        assert_eq!(messages(&mut log), ["two"]);
        assert!(messages(&mut log).is_empty());
    }

    #[test]
    fn replaced_log_is_read_from_its_start() {
        let (_folder, path, mut log) = log();
        fs::write(&path, line("old") + &line("older")).unwrap();
        assert_eq!(messages(&mut log), ["start", "old", "older"]);
        fs::write(&path, line("new")).unwrap();
        assert_eq!(messages(&mut log), ["start", "new"]);
        fs::remove_file(&path).unwrap();
        assert_eq!(messages(&mut log), ["start"]);
    }

    #[test]
    fn lines_that_are_no_events_are_left_out() {
        let (_folder, path, mut log) = log();
        let long = "x".repeat(3 * MAX_LINE_BYTES);
        let later = line("later").replace("\"version\":1", "\"version\":2");
        assert!(later.contains(":2,"), "{later}");
        fs::write(&path, format!("{{\"half\n\n{long}\n{}\u{0}\n{later}{}", line("one"), line("two"))).unwrap();
        assert_eq!(messages(&mut log), ["start", "one", "two"]);
    }

    #[test]
    fn steps_are_parsed_as_all_records() {
        let held =
            HeldMemory { device: "cpu".to_owned(), held_bytes: Bytes(5), peak_bytes: None, arena_by_category: None };
        for (loss, memory) in [(0.1 + 0.2, None), (f64::NAN, Some(vec![held]))] {
            let event = Event::Step {
                step: 7,
                loss,
                norm: 1e-300,
                learning_rate: 3e-4,
                tokens: 64,
                labelled_tokens: 63,
                seconds: 0.25,
                bytes: Bytes(1 << 40),
                memory,
            };
            let record = Record { version: EVENTS_VERSION, time: 1795806062.427775, event };
            let line = serde_json::to_string(&record).unwrap();
            assert!(StepLine::parse(line.as_bytes()).is_some(), "{line}");
            // Not by equality, because NaN differs from itself.
            assert_eq!(format!("{:?}", parse_record(line.as_bytes()).unwrap()), format!("{record:?}"));
        }
        assert!(StepLine::parse(line("none").as_bytes()).is_none());
    }

    #[test]
    fn lock_of_a_writer_is_seen() {
        let (_folder, path, log) = log();
        assert_eq!(log.is_locked(), Some(false));
        fs::write(&path, "").unwrap();
        let writer = File::open(&path).unwrap();
        writer.try_lock().unwrap();
        assert_eq!(log.is_locked(), Some(true));
        drop(writer);
        assert_eq!(log.is_locked(), Some(false));
    }
}
