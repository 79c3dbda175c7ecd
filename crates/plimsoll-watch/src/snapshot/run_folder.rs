//! The folder of a run as a viewer reads it: its events, its plan and its result.

use super::RunState;
use super::assemble::RunReadings;
use super::run_log::{LogPart, RunLog};
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
    /// Whether a process trains in the folder; `None` if the file system has no locks.
    is_locked: Option<bool>,
}

/// A JSON file that the run replaces from time to time.
pub(crate) struct StoredFile<T> {
    path: PathBuf,
    changed: Option<SystemTime>,
    content: Option<T>,
}

impl<T: DeserializeOwned> StoredFile<T> {
    /// Returns a file that has not been read.
    pub(crate) fn new(path: PathBuf) -> StoredFile<T> {
        StoredFile { path, changed: None, content: None }
    }

    /// Reads the file if it has changed. The content becomes `None` if the file is missing or is not valid.
    pub(crate) fn refresh(&mut self) {
        let changed = std::fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok();
        if changed.is_some() && changed == self.changed {
            return;
        }
        let text = regular_file::read(&self.path).ok();
        (self.changed, self.content) = (changed, text.and_then(|text| serde_json::from_slice(&text).ok()));
    }

    /// Returns the content at the newest reading; `None` if there was no valid one.
    pub(crate) fn content(&self) -> Option<&T> {
        self.content.as_ref()
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
            is_locked: Some(false),
        })
    }

    /// Reads what the run has written since the last call.
    ///
    /// # Errors
    /// The event log exists and cannot be read.
    pub fn refresh(&mut self) -> Result<(), Failure> {
        self.is_locked = self.log.is_locked();
        // A run writes its last event before it gives up the lock, so the log is read after the lock.
        let events = &mut self.events;
        let read = self.log.read_new(&mut |part| match part {
            LogPart::Start => *events = RunEvents::default(),
            LogPart::Record(record) => events.update(&record),
        });
        read.map_err(|error| Failure::input(format!("{}: cannot read events.jsonl: {error}", self.path.display())))?;
        // A run that has started in between is no run that has died.
        if self.state() == RunState::Died {
            self.is_locked = self.log.is_locked();
        }
        self.plan.refresh();
        self.result.refresh();
        Ok(())
    }

    /// Returns what has been read of the run.
    pub(crate) fn readings(&self) -> RunReadings<'_> {
        RunReadings {
            folder: self.path.display().to_string(),
            state: self.state(),
            events: &self.events,
            plan: self.plan(),
            result: self.result(),
        }
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the plan that the run follows; `None` if there is no valid one.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.content()
    }

    /// Returns the result of the run; `None` while it trains.
    pub fn result(&self) -> Option<&RunResult> {
        self.result.content().filter(|_| matches!(self.state(), RunState::Done | RunState::Stopped))
    }

    /// Returns whether the run is under way, and how it ended.
    pub fn state(&self) -> RunState {
        let has_events = self.events.newest_time.is_some();
        match (self.events.ended.as_deref(), self.is_locked) {
            (_, Some(true)) if has_events => RunState::Running,
            (Some("done"), _) => RunState::Done,
            (Some(_), _) => RunState::Stopped,
            (None, Some(true)) => RunState::Starting,
            // Without locks, a run that is silent may still be alive.
            (None, None) if has_events => RunState::Running,
            (None, None) => RunState::Starting,
            (None, Some(false)) if has_events || self.log_exists() => RunState::Died,
            (None, Some(false)) => RunState::Starting,
        }
    }

    /// Returns whether the run has created its log.
    fn log_exists(&self) -> bool {
        self.path.join("events.jsonl").exists()
    }
}
