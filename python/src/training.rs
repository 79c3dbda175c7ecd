//! The Python function `train`. The run has a thread of its own. The calling thread delivers its events to `on_event`
//! and handles signals.

use crate::failure::{catch_panic, refusal, refusal_of_preparation, to_exception};
use crate::{json, load_run, with_files_and_devices};
use plimsoll_core::{Failure, Record, RunStatus};
use plimsoll_serve::run_logs::RunLogs;
use plimsoll_train::resolve::{HubNeed, RunRequest};
use plimsoll_train::session::outcome::Outcome;
use plimsoll_train::session::start::{Resumed, Run};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Interval at which the calling thread checks for signals.
const SIGNAL_PERIOD: Duration = Duration::from_millis(50);

/// Stack of the run's thread, as large as that of a main thread.
const STACK_BYTES: usize = 8 << 20;

/// A message from the run's thread.
enum RunMessage {
    /// An event of the run: a line of `events.jsonl`.
    Event(String),
    /// The end of the run.
    Ended(Result<Ended, Failure>),
}

/// An ended run.
struct Ended {
    folder: String,
    stopped: bool,
    /// The result as JSON.
    result: String,
}

/// The arguments of `train`.
struct TrainRequest {
    /// The run file. `None` for the built-in example, for a run that `settings` alone describe, and for a resumed run.
    path: Option<PathBuf>,
    /// Settings as `KEY=VALUE`.
    settings: Vec<String>,
    /// The folder of the run to resume; `None` for a new run.
    resume: Option<PathBuf>,
    /// Whether the run writes checkpoints and a model.
    saves: bool,
}

/// Trains and returns the result as JSON. Calls `on_event` with each line of `events.jsonl`. If `on_event` returns
/// `False` or raises, the run saves and ends after its step, as after an interrupt.
#[pyfunction]
pub fn train(
    py: Python<'_>,
    path: Option<PathBuf>,
    settings: Vec<String>,
    resume: Option<PathBuf>,
    saves: bool,
    on_event: Option<Py<PyAny>>,
) -> PyResult<String> {
    let (sender, messages) = channel();
    let (messages, stop) = (Mutex::new(messages), Arc::new(AtomicBool::new(false)));
    let (request, run_stop) = (TrainRequest { path, settings, resume, saves }, Arc::clone(&stop));
    let run = move || {
        let ended = catch_panic(|| request.run(&sender, &run_stop));
        // The receiver is gone if the caller was interrupted twice.
        let _ = sender.send(RunMessage::Ended(ended));
    };
    thread::Builder::new().name("plimsoll-train".into()).stack_size(STACK_BYTES).spawn(run)?;
    let mut interrupt: Option<PyErr> = None;
    loop {
        match py.detach(|| next(&messages)) {
            Ok(RunMessage::Event(line)) if interrupt.is_none() => {
                let answer = on_event.as_ref().map(|on_event| on_event.bind(py).call1((line,)));
                match answer {
                    Some(Ok(answer)) if answer.is(&*pyo3::types::PyBool::new(py, false)) => {
                        stop.store(true, Ordering::Relaxed);
                    }
                    Some(Err(error)) => interrupt = Some(error),
                    _ => {}
                }
            }
            Ok(RunMessage::Ended(ended)) => return outcome_for_caller(py, ended, interrupt),
            Ok(RunMessage::Event(_)) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(to_exception(py, &Failure::bug("the thread of the run ended without a result")));
            }
        }
        match py.check_signals() {
            // The second interrupt returns at once; the newest checkpoint remains.
            Err(error) if interrupt.is_some() => return Err(error),
            Err(error) => interrupt = Some(error),
            Ok(()) => {}
        }
        if interrupt.is_some() {
            stop.store(true, Ordering::Relaxed);
        }
    }
}

fn next(messages: &Mutex<Receiver<RunMessage>>) -> Result<RunMessage, RecvTimeoutError> {
    messages.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_PERIOD)
}

/// Returns the result of an ended run, or raises its failure. After an exception of `on_event` or an interrupt, raises
/// that instead; if the run was stopped by Ctrl-C, the message says how to resume.
fn outcome_for_caller(py: Python<'_>, ended: Result<Ended, Failure>, interrupt: Option<PyErr>) -> PyResult<String> {
    match (ended, interrupt) {
        (Ok(ended), Some(error)) if ended.stopped && error.is_instance_of::<PyKeyboardInterrupt>(py) => {
            let message = format!("stopped and saved; to resume: plimsoll.train(resume={:?})", ended.folder);
            Err(PyKeyboardInterrupt::new_err(message))
        }
        (_, Some(error)) => Err(error),
        (Ok(ended), None) => Ok(ended.result),
        (Err(failure), None) => Err(to_exception(py, &failure)),
    }
}

impl TrainRequest {
    fn run(self, sender: &Sender<RunMessage>, stop: &AtomicBool) -> Result<Ended, Failure> {
        let mut run = match &self.resume {
            Some(folder) => {
                match Run::resume(with_files_and_devices(RunRequest::resume(folder, &self.settings)?, HubNeed::Run)?)? {
                    Resumed::Continue(run) => *run,
                    Resumed::Done(outcome) => return Ok(ended(*outcome)),
                }
            }
            None => {
                let request = load_run(self.path.as_deref(), &self.settings, HubNeed::Run)?;
                request.check_trainable()?;
                Run::new(request)?
            }
        };
        if !self.saves {
            run.save_nothing();
        }
        let prepared = run.prepared();
        let plan = &prepared.planned.plan;
        let devices = prepared.run.devices();
        let passed = prepared.passed_load_lines();
        if !plan.fits || passed.is_some() {
            let refusal = match passed.filter(|_| plan.fits) {
                Some(passed) => refusal_of_preparation(&devices, &passed),
                None => refusal(&devices, plan),
            };
            return Err(match prepared.needs_fresh_process() {
                true => refusal
                    .hint("tokenizing has increased the memory of this process; its result is cached, so try again in a new process"),
                false => refusal,
            });
        }
        let mut logs = RunLogs::start(&prepared.log_request())?;
        let send = |record: &Record| {
            let _ = sender.send(RunMessage::Event(json(record)));
        };
        let mut observer = |record: &_| {
            send(record);
            logs.observe(record).iter().for_each(send);
        };
        let outcome = run.start(&mut observer, stop);
        logs.finish(outcome.as_ref().map(|outcome| &outcome.result)).iter().for_each(send);
        Ok(ended(outcome?))
    }
}

/// Returns the parts of a run's outcome that the Python caller needs.
fn ended(outcome: Outcome) -> Ended {
    Ended {
        stopped: outcome.result.status == RunStatus::Stopped,
        result: json(&outcome),
        folder: outcome.folder.display().to_string(),
    }
}
