//! Event log of a run, `events.jsonl`: one JSON object per line, appended as events happen, and passed to an observer.
//! An exclusive lock on the log is the lock of the run folder: two processes never train in the same folder.

use crate::files::FilesError;
use plimsoll_core::{EVENTS_VERSION, Event, Failure, Record};
use plimsoll_device::{private_file, regular_file};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Event log of a run, open for appending. An observer receives each record that is appended.
pub struct EventLog<'a> {
    path: PathBuf,
    file: File,
    observer: &'a mut dyn FnMut(&Record),
}

impl<'a> EventLog<'a> {
    /// Opens the log of a run folder for appending, and locks the folder. The lock lasts until the log is dropped.
    /// `observer` receives each record that is appended.
    ///
    /// # Errors
    /// The log cannot be opened or written, or another process has locked it.
    pub fn open(run_dir: &Path, observer: &'a mut dyn FnMut(&Record)) -> Result<EventLog<'a>, Failure> {
        let path = run_dir.join("events.jsonl");
        let failed = |error| Failure::from(FilesError::io(&path, "write", error));
        let mut file = private_file::append(&path).map_err(failed)?;
        lock(&file, FlockOperation::NonBlockingLockExclusive, run_dir)?;
        // A killed run may have left a partial line: the next record starts on a line of its own.
        if ends_mid_line(&mut file).map_err(failed)? {
            file.write_all(b"\n").map_err(failed)?;
        }
        Ok(EventLog { path, file, observer })
    }

    /// Whether the log contains the evaluation that followed step `after_step`.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn has_evaluation(&mut self, after_step: u64) -> Result<bool, Failure> {
        let mut text = Vec::new();
        let read = self.file.rewind().and_then(|()| self.file.read_to_end(&mut text));
        read.map_err(|error| FilesError::io(&self.path, "read", error))?;
        let is_that_evaluation = |line: &[u8]| match Record::from_line(line) {
            Ok(Record { event: Event::Evaluation { step, .. }, .. }) => step == after_step,
            // A partial line of a killed run.
            _ => false,
        };
        Ok(text.split(|byte| *byte == b'\n').any(is_that_evaluation))
    }

    /// Appends an event with the current time, and passes it to the observer.
    ///
    /// # Errors
    /// The log cannot be written.
    pub fn emit(&mut self, event: Event) -> Result<(), Failure> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let record = Record { version: EVENTS_VERSION, time, event };
        let mut line = serde_json::to_vec(&record).expect("plain data has a JSON form");
        line.push(b'\n');
        (self.observer)(&record);
        self.file.write_all(&line).map_err(|error| FilesError::io(&self.path, "write", error).into())
    }
}

/// Checks that no process trains in a run folder. Accepts a folder without a readable log.
///
/// # Errors
/// Another process has locked the folder.
pub fn ensure_not_running(run_dir: &Path) -> Result<(), Failure> {
    match regular_file::open(&run_dir.join("events.jsonl")) {
        Ok(file) => lock(&file, FlockOperation::NonBlockingLockShared, run_dir),
        Err(_) => Ok(()),
    }
}

/// Takes the lock `how` (shared or exclusive) on `file`, the log of the run folder `run_dir`. The lock lasts until the
/// file is closed. On a file system without locks, does nothing.
///
/// # Errors
/// Another process has locked the file.
fn lock(file: &File, how: FlockOperation, run_dir: &Path) -> Result<(), Failure> {
    // File systems without locks, such as some network file systems, return another error. Such a folder is not
    // protected.
    let held = || flock(file, how) == Err(Errno::WOULDBLOCK);
    let checked_again = || {
        // A process that only checks the folder holds a shared lock for a moment: wait and try again.
        thread::sleep(Duration::from_millis(20));
        !held()
    };
    if held() && !checked_again() {
        let message = format!("run.dir: another plimsoll process trains in {}", run_dir.display());
        return Err(Failure::input(message).hint("wait until it ends, or stop it"));
    }
    Ok(())
}

/// Whether the last line of the file has no line feed at its end. False for an empty file.
fn ends_mid_line(file: &mut File) -> io::Result<bool> {
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(false);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}
