//! `events.jsonl`: one object a line, appended as things happen, and handed to whoever watches.

use plimsoll_core::{EVENTS_VERSION, Event, Failure, Record};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Where the events of a run go.
pub struct EventLog<'a> {
    path: PathBuf,
    file: File,
    watch: &'a mut dyn FnMut(&Record),
}

impl<'a> EventLog<'a> {
    /// Appends to the log of a run folder.
    pub fn open(run_dir: &Path, watch: &'a mut dyn FnMut(&Record)) -> Result<EventLog<'a>, Failure> {
        let path = run_dir.join("events.jsonl");
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let mut file = file.map_err(|e| Failure::input(format!("{}: {e}", path.display())))?;
        // A line that a kill cut off must not swallow the next one.
        let cut_off = std::fs::read(&path).is_ok_and(|bytes| bytes.last().is_some_and(|last| *last != b'\n'));
        if cut_off {
            let _ = file.write_all(b"\n");
        }
        Ok(EventLog { path, file, watch })
    }

    /// Something happened.
    pub fn emit(&mut self, event: Event) -> Result<(), Failure> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let record = Record { version: EVENTS_VERSION, time, event };
        let mut line = serde_json::to_vec(&record).expect("plain data has a JSON form");
        line.push(b'\n');
        (self.watch)(&record);
        self.file.write_all(&line).map_err(|e| {
            Failure::stopped(format!("{}: {e}", self.path.display())).hint("free some disk space and resume")
        })
    }
}
