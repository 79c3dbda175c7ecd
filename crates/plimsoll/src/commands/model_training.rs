//! The training process of a model in `plimsoll bench models`: its progress, and its end after a signal.
//!
//! The standard input of the process is a pipe. The process stops when the pipe is closed: after a signal, or because
//! the benchmark has died. A process group of its own keeps signals of the terminal away from it.

use crate::signals::OnSignal;
use plimsoll_core::Record;
use plimsoll_watch::stopping::StopOutlook;
use plimsoll_watch::terminal::Watcher;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which the end of a process is awaited after its output has ended.
const END_POLL: Duration = Duration::from_millis(10);
/// Attempts to remove a folder in which another thread may still create a file.
const REMOVE_ATTEMPTS: u32 = 8;

/// The model in progress. The main thread and the thread of the signals share it.
#[derive(Clone, Default)]
pub struct ModelInProgress(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Name of the model.
    model: String,
    /// Temporary folder of the model; `None` before the first model.
    folder: Option<PathBuf>,
    /// Command for this model and those after it.
    rest: String,
    /// Whether a signal asked the benchmark to stop.
    stopping: bool,
    /// Training process; `None` while none runs.
    process: Option<Child>,
    outlook: StopOutlook,
}

impl ModelInProgress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the model `model` with its temporary folder. `rest` is the command for this model and those after it.
    pub fn begin(&self, model: &str, folder: PathBuf, rest: String) {
        let mut state = self.state();
        (state.model, state.folder, state.rest) = (model.to_owned(), Some(folder), rest);
        state.outlook = StopOutlook::default();
    }

    /// Whether a signal asked the benchmark to stop.
    pub fn is_stopping(&self) -> bool {
        self.state().stopping
    }

    /// Runs a training process that prints events as JSON, shows them on `watcher`, and returns its exit.
    ///
    /// # Errors
    /// The system refuses a process, or its output cannot be read.
    pub fn train(&self, command: &mut Command, watcher: &mut dyn Watcher) -> io::Result<ExitStatus> {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn()?;
        let output = process.stdout.take().expect("the output is a pipe");
        let mut state = self.state();
        if state.stopping {
            process.stdin = None;
        }
        state.process = Some(process);
        drop(state);
        for line in BufReader::new(output).lines() {
            // The last line is the result.
            let Ok(record) = Record::from_line(line?.as_bytes()) else { continue };
            self.state().outlook.update(&record.event, Instant::now());
            watcher.observe(&record);
        }
        loop {
            let mut state = self.state();
            let process = state.process.as_mut().expect("the process was started above");
            if let Some(status) = process.try_wait()? {
                state.process = None;
                return Ok(status);
            }
            drop(state);
            thread::sleep(END_POLL);
        }
    }
}

impl OnSignal for ModelInProgress {
    fn finish(&self) -> Option<String> {
        let mut state = self.state();
        state.stopping = true;
        let State { model, process, outlook, .. } = &mut *state;
        Some(match process {
            Some(process) => {
                process.stdin = None;
                format!("{model}, {}", outlook.work_left(Instant::now()))
            }
            None => format!("the plan of {model}"),
        })
    }

    fn end(&self) -> Option<String> {
        let mut state = self.state();
        if let Some(process) = &mut state.process {
            let _ = process.kill();
            let _ = process.wait();
        }
        let folder = state.folder.as_ref()?;
        let _ = (0..REMOVE_ATTEMPTS).try_for_each(|_| match fs::remove_dir_all(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Ok(()),
            _ => Err(()),
        });
        Some(rest_hint(&state.rest))
    }
}

/// Returns the hint of an interrupted `plimsoll bench models`. `command` is the command line for the models that have
/// no result yet.
pub fn rest_hint(command: &str) -> String {
    format!("for the others: {command}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_interrupt_ends_process_and_removes_folder() {
        let model = ModelInProgress::default();
        assert_eq!(model.end(), None);
        let folder = tempfile::tempdir().unwrap().keep();
        fs::write(folder.join("run.toml"), "").unwrap();
        model.begin("7b", folder.clone(), "plimsoll bench models 7b".to_owned());
        assert_eq!((model.finish(), model.is_stopping()), (Some("the plan of 7b".to_owned()), true));
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        model.state().process = Some(process);
        assert_eq!(model.end().as_deref(), Some("for the others: plimsoll bench models 7b"));
        assert!(!folder.exists());
        assert!(model.state().process.as_mut().unwrap().try_wait().unwrap().is_some(), "the process has ended");
    }

    #[test]
    fn process_stops_at_signal_before_its_start() {
        let model = ModelInProgress::default();
        model.finish();
        let mut watcher = plimsoll_watch::terminal::Json(io::sink());
        // `cat` ends when its input does.
        assert!(model.train(&mut Command::new("cat"), &mut watcher).unwrap().success());
    }
}
