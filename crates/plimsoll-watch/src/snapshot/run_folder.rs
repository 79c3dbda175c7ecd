//! The folder of a run as a viewer reads it: its events, its plan and its result.

use super::RunState;
use super::run_log::{NewRecords, RunLog};
use super::run_state::RunEvents;
use plimsoll_core::{Failure, Plan, RunResult};
use plimsoll_device::regular_file;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The folder of a run. [`RunFolder::refresh`] reads what is new in it.
pub struct RunFolder {
    path: PathBuf,
    log: RunLog,
    /// The events so far.
    pub events: RunEvents,
    plan: StoredFile<Plan>,
    result: StoredFile<RunResult>,
    is_locked: bool,
}

/// A JSON file that the run replaces from time to time.
struct StoredFile<T> {
    path: PathBuf,
    changed: Option<SystemTime>,
    content: Option<T>,
}

impl<T: DeserializeOwned> StoredFile<T> {
    fn new(path: PathBuf) -> StoredFile<T> {
        StoredFile { path, changed: None, content: None }
    }

    /// Reads the file if it has changed. The content becomes `None` if the file is missing or is not valid.
    fn refresh(&mut self) {
        let changed = std::fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok();
        if changed.is_some() && changed == self.changed {
            return;
        }
        let text = regular_file::read(&self.path).ok();
        (self.changed, self.content) = (changed, text.and_then(|text| serde_json::from_slice(&text).ok()));
    }
}

impl RunFolder {
    /// Opens the folder of a run. Its files may still be missing.
    ///
    /// # Errors
    /// There is no such folder, or it holds no run.
    pub fn open(path: &Path) -> Result<RunFolder, Failure> {
        let shown = path.display();
        if !path.is_dir() {
            let message = format!("{shown}: no such run folder");
            return Err(Failure::input(message).hint("give the folder that run.dir names, such as runs/sums"));
        }
        let is_run = ["events.jsonl", "plan.json", "run.toml"].iter().any(|name| path.join(name).exists());
        if !is_run {
            let message = format!("{shown}: holds no run (no events.jsonl, plan.json or run.toml)");
            return Err(Failure::input(message).hint("give the folder that run.dir names, such as runs/sums"));
        }
        Ok(RunFolder {
            path: path.to_owned(),
            log: RunLog::new(path.join("events.jsonl")),
            events: RunEvents::default(),
            plan: StoredFile::new(path.join("plan.json")),
            result: StoredFile::new(path.join("result.json")),
            is_locked: false,
        })
    }

    /// Reads what the run has written since the last call.
    ///
    /// # Errors
    /// The event log exists and cannot be read.
    pub fn refresh(&mut self) -> Result<(), Failure> {
        let failed = |error| Failure::input(format!("{}: cannot read events.jsonl: {error}", self.path.display()));
        let NewRecords { from_start, records } = self.log.read_new().map_err(failed)?;
        if from_start {
            self.events = RunEvents::default();
        }
        records.iter().for_each(|record| self.events.update(record));
        self.plan.refresh();
        self.result.refresh();
        self.is_locked = self.log.is_locked();
        Ok(())
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the plan that the run follows; `None` if there is no valid one.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.content.as_ref()
    }

    /// Returns the result of the run; `None` while it trains.
    pub fn result(&self) -> Option<&RunResult> {
        self.result.content.as_ref().filter(|_| self.events.ended.is_some())
    }

    /// Returns whether the run is under way, and how it ended.
    pub fn state(&self) -> RunState {
        match self.events.ended.as_deref() {
            _ if self.is_locked && self.events.newest_time.is_none() => RunState::Starting,
            None if self.is_locked => RunState::Running,
            Some("done") => RunState::Done,
            Some(_) => RunState::Stopped,
            None if self.events.newest_time.is_none() => RunState::Starting,
            None => RunState::Died,
        }
    }
}
