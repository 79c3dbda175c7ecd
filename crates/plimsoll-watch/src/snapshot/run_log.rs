//! Reads `events.jsonl` while a run writes it.

use super::step_line;
use plimsoll_core::{EVENTS_VERSION, Record};
use plimsoll_device::regular_file;
use std::fs::{File, TryLockError};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
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
    line: PartialLine,
}

/// The line that is being read, and may still be written.
#[derive(Default)]
struct PartialLine {
    /// Its bytes so far, with its line break.
    bytes: Vec<u8>,
    /// Whether they are the rest of a line that is too long, and are skipped.
    is_skipped: bool,
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
            self.open = Some(OpenLog { file, inode, offset: 0, line: PartialLine::default() });
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
        let OpenLog { file, offset, line, .. } = self;
        file.seek(SeekFrom::Start(*offset))?;
        let mut reader = BufReader::with_capacity(CHUNK_BYTES, file);
        loop {
            // A line with its line break.
            let room = MAX_LINE_BYTES + 1 - line.bytes.len();
            let length = reader.by_ref().take(room as u64).read_until(b'\n', &mut line.bytes)?;
            if length == 0 {
                return Ok(());
            }
            *offset += length as u64;
            line.finish().into_iter().for_each(|record| take(LogPart::Record(record)));
        }
    }
}

impl PartialLine {
    /// Ends the line if its line break has been read. Returns its record; `None` if it is not complete, or no record.
    fn finish(&mut self) -> Option<Record> {
        let mut record = None;
        match self.bytes.strip_suffix(b"\n") {
            Some(_) if self.is_skipped => self.is_skipped = false,
            Some(line) => record = parse_record(line),
            None if self.bytes.len() > MAX_LINE_BYTES => self.is_skipped = true,
            None => return None,
        }
        self.bytes.clear();
        record
    }
}

/// Parses a line; `None` if it is no record of this version.
fn parse_record(line: &[u8]) -> Option<Record> {
    let record = step_line::parse(line).or_else(|| Record::from_line(line).ok());
    record.filter(|record| record.version == EVENTS_VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Event;
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
