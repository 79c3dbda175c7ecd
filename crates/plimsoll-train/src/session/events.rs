//! `events.jsonl`: one object a line, appended as things happen, and handed to whoever watches. Who
//! holds the log holds the run folder: two programs never train in the same one.

use crate::files::FilesError;
use plimsoll_core::{EVENTS_VERSION, Event, Failure, Record};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Where the events of a run go.
pub struct EventLog<'a> {
    path: PathBuf,
    file: File,
    watch: &'a mut dyn FnMut(&Record),
}

impl<'a> EventLog<'a> {
    /// Appends to the log of a run folder, and holds the folder until the program ends, however it ends.
    ///
    /// # Errors
    /// A log that cannot be written, or that another program holds.
    pub fn open(run_dir: &Path, watch: &'a mut dyn FnMut(&Record)) -> Result<EventLog<'a>, Failure> {
        let path = run_dir.join("events.jsonl");
        let failed = |error| Failure::from(FilesError::io(&path, "write", error));
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(&path).map_err(failed)?;
        lock(&file, FlockOperation::NonBlockingLockExclusive, run_dir)?;
        // A line that a kill cut off must not swallow the next one.
        if cut_off(&mut file).map_err(failed)? {
            file.write_all(b"\n").map_err(failed)?;
        }
        Ok(EventLog { path, file, watch })
    }

    /// Whether the log tells of an evaluation after this step.
    ///
    /// # Errors
    /// A log that cannot be read.
    pub fn has_evaluation(&mut self, of: u64) -> Result<bool, Failure> {
        let mut text = Vec::new();
        let read = self.file.rewind().and_then(|()| self.file.read_to_end(&mut text));
        read.map_err(|error| FilesError::io(&self.path, "read", error))?;
        let told = |line: &[u8]| match serde_json::from_slice(line) {
            Ok(Record { event: Event::Evaluation { step, .. }, .. }) => step == of,
            // Cut off by a kill.
            _ => false,
        };
        Ok(text.split(|byte| *byte == b'\n').any(told))
    }

    /// Something happened.
    pub fn emit(&mut self, event: Event) -> Result<(), Failure> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let record = Record { version: EVENTS_VERSION, time, event };
        let mut line = serde_json::to_vec(&record).expect("plain data has a JSON form");
        line.push(b'\n');
        (self.watch)(&record);
        self.file.write_all(&line).map_err(|error| FilesError::io(&self.path, "write", error).into())
    }
}

/// That nobody trains in a run folder now, found out before anything is planned.
///
/// # Errors
/// Another program holds it.
pub fn check_free(run_dir: &Path) -> Result<(), Failure> {
    match File::open(run_dir.join("events.jsonl")) {
        Ok(file) => lock(&file, FlockOperation::NonBlockingLockShared, run_dir),
        Err(_) => Ok(()),
    }
}

/// Locks the log of a run folder, for as long as it is open.
fn lock(file: &File, how: FlockOperation, run_dir: &Path) -> Result<(), Failure> {
    // A file system without locks (some network ones) refuses in other words: there nothing guards the folder.
    let held = || flock(file, how) == Err(Errno::WOULDBLOCK);
    let looked_at = || {
        // Whoever looks whether the folder is free holds it for a moment.
        thread::sleep(Duration::from_millis(20));
        !held()
    };
    if held() && !looked_at() {
        let message = format!("run.dir: another plimsoll trains in {} now", run_dir.display());
        return Err(Failure::input(message).hint("wait until it ends, or stop it first"));
    }
    Ok(())
}

/// Whether the last line lacks its end.
fn cut_off(file: &mut File) -> io::Result<bool> {
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(false);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}
