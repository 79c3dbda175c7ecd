//! Reads `events.jsonl` while a run writes it.

use plimsoll_core::Record;
use plimsoll_device::regular_file;
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

/// New content of a log.
#[derive(Debug, Default, PartialEq)]
pub struct NewRecords {
    /// Whether the log was replaced or shortened, so that the records begin with its first.
    pub from_start: bool,
    /// The records, in order. Lines that are no record of this version are left out.
    pub records: Vec<Record>,
}

impl RunLog {
    /// Returns the log at `path`, of which nothing has been read. It may be missing until the run writes it.
    pub fn new(path: PathBuf) -> RunLog {
        RunLog { path, open: None }
    }

    /// Reads the records that are new since the last call. A line that is cut off is read once it is complete.
    ///
    /// # Errors
    /// The log exists and cannot be read, or is no regular file.
    pub fn read_new(&mut self) -> io::Result<NewRecords> {
        let present = match std::fs::metadata(&self.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(NewRecords { from_start: self.open.take().is_some(), records: vec![] });
            }
            Err(error) => return Err(error),
        };
        let is_same = |open: &OpenLog| open.inode == present.ino() && open.offset <= present.len();
        let from_start = !self.open.as_ref().is_some_and(is_same);
        if from_start {
            let file = regular_file::open(&self.path)?;
            let inode = file.metadata()?.ino();
            self.open = Some(OpenLog { file, inode, offset: 0, partial: vec![], skips_line: false });
        }
        let open = self.open.as_mut().expect("it was just opened");
        Ok(NewRecords { from_start, records: open.read_new()? })
    }

    /// Returns whether a process trains in the folder: it holds an exclusive lock on the log.
    pub fn is_locked(&self) -> bool {
        // The lock that this takes is released at once, when the file is closed.
        let file = regular_file::open(&self.path);
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }
}

impl OpenLog {
    fn read_new(&mut self) -> io::Result<Vec<Record>> {
        self.file.seek(SeekFrom::Start(self.offset))?;
        let mut records = Vec::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let length = self.file.read(&mut chunk)?;
            if length == 0 {
                return Ok(records);
            }
            self.offset += length as u64;
            self.take(&chunk[..length], &mut records);
        }
    }

    /// Takes the next bytes of the log, and adds the records of all complete lines.
    fn take(&mut self, bytes: &[u8], records: &mut Vec<Record>) {
        let mut lines = bytes.split(|byte| *byte == b'\n').peekable();
        while let Some(line) = lines.next() {
            if !self.skips_line {
                self.partial.extend_from_slice(line);
            }
            if self.partial.len() > MAX_LINE_BYTES {
                self.skips_line = true;
                self.partial.clear();
            }
            // The last part has no line break yet.
            if lines.peek().is_none() {
                return;
            }
            let line = std::mem::take(&mut self.partial);
            if !std::mem::take(&mut self.skips_line) {
                records.extend(serde_json::from_slice::<Record>(&line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{EVENTS_VERSION, Event};
    use std::fs;
    use std::io::Write;

    fn line(message: &str) -> String {
        let event = Event::Warning { message: message.to_owned() };
        serde_json::to_string(&Record { version: EVENTS_VERSION, time: 1.0, event }).unwrap() + "\n"
    }

    fn messages(new: &NewRecords) -> Vec<String> {
        let message = |record: &Record| match &record.event {
            Event::Warning { message } => message.clone(),
            other => panic!("{other:?}"),
        };
        new.records.iter().map(message).collect()
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
        assert_eq!(log.read_new().unwrap(), NewRecords::default());
        let text = line("one") + &line("two");
        fs::write(&path, &text[..text.len() - 7]).unwrap();
        let new = log.read_new().unwrap();
        assert!(new.from_start);
        assert_eq!(messages(&new), ["one"]);
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&text.as_bytes()[text.len() - 7..]).unwrap();
        let new = log.read_new().unwrap();
        assert!(!new.from_start);
        assert_eq!(messages(&new), ["two"]);
        assert_eq!(log.read_new().unwrap(), NewRecords::default());
    }

    #[test]
    fn replaced_log_is_read_from_its_start() {
        let (_folder, path, mut log) = log();
        fs::write(&path, line("old") + &line("older")).unwrap();
        assert_eq!(messages(&log.read_new().unwrap()).len(), 2);
        fs::write(&path, line("new")).unwrap();
        let new = log.read_new().unwrap();
        assert!(new.from_start);
        assert_eq!(messages(&new), ["new"]);
        fs::remove_file(&path).unwrap();
        assert!(log.read_new().unwrap().from_start);
    }

    #[test]
    fn lines_that_are_no_events_are_left_out() {
        let (_folder, path, mut log) = log();
        let long = "x".repeat(3 * MAX_LINE_BYTES);
        fs::write(&path, format!("{{\"half\n\n{long}\n{}\u{0}\n{}", line("one"), line("two"))).unwrap();
        assert_eq!(messages(&log.read_new().unwrap()), ["one", "two"]);
    }

    #[test]
    fn lock_of_a_writer_is_seen() {
        let (_folder, path, log) = log();
        assert!(!log.is_locked());
        fs::write(&path, "").unwrap();
        let writer = File::open(&path).unwrap();
        writer.try_lock().unwrap();
        assert!(log.is_locked());
        drop(writer);
        assert!(!log.is_locked());
    }
}
