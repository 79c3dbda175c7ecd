//! `train`: the run has a thread of its own, and the thread that called gets its events, one after another, and signals.

use crate::failure::{guarded, raised, refusal};
use crate::{json, reached, run_file};
use plimsoll_core::{Failure, RunStatus};
use plimsoll_train::config::RunFile;
use plimsoll_train::session::start::{Outcome, Resumed, Run};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use serde_json::json;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// How often signals are looked for.
const PERIOD: Duration = Duration::from_millis(50);

/// As much as a program's first thread has.
const STACK_BYTES: usize = 8 << 20;

/// What the run's thread says.
enum Said {
    /// A line of `events.jsonl`.
    Event(String),
    /// How it ended.
    Ended(Result<Ended, Failure>),
}

struct Ended {
    folder: String,
    stopped: bool,
    answer: String,
}

/// What is trained, and how.
struct Work {
    path: Option<PathBuf>,
    settings: Vec<String>,
    resume: Option<PathBuf>,
    saves: bool,
}

/// `plimsoll train`. `on_event` is called with each line of `events.jsonl`; where it answers `False`, or raises, the run
/// ends after its step, as after an interrupt: saved.
#[pyfunction]
pub fn train(
    py: Python<'_>,
    path: Option<PathBuf>,
    settings: Vec<String>,
    resume: Option<PathBuf>,
    saves: bool,
    on_event: Option<Py<PyAny>>,
) -> PyResult<String> {
    let (says, said) = channel();
    let (said, stop) = (Mutex::new(said), Arc::new(AtomicBool::new(false)));
    let (work, stops) = (Work { path, settings, resume, saves }, Arc::clone(&stop));
    let run = move || {
        let ended = guarded(|| work.run(&says, &stops));
        // Nobody listens any more where the caller was interrupted twice.
        let _ = says.send(Said::Ended(ended));
    };
    thread::Builder::new().name("plimsoll-train".into()).stack_size(STACK_BYTES).spawn(run)?;
    let mut halted: Option<PyErr> = None;
    loop {
        match py.detach(|| next(&said)) {
            Ok(Said::Event(line)) if halted.is_none() => {
                let answer = on_event.as_ref().map(|on_event| on_event.bind(py).call1((line,)));
                match answer {
                    Some(Ok(answer)) if answer.is(&*pyo3::types::PyBool::new(py, false)) => {
                        stop.store(true, Ordering::Relaxed);
                    }
                    Some(Err(error)) => halted = Some(error),
                    _ => {}
                }
            }
            Ok(Said::Ended(ended)) => return answer(py, ended, halted),
            Ok(Said::Event(_)) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(raised(py, &Failure::bug("the run ended unseen"))),
        }
        match py.check_signals() {
            // The second time: the newest checkpoint stands.
            Err(error) if halted.is_some() => return Err(error),
            Err(error) => halted = Some(error),
            Ok(()) => {}
        }
        if halted.is_some() {
            stop.store(true, Ordering::Relaxed);
        }
    }
}

fn next(said: &Mutex<Receiver<Said>>) -> Result<Said, RecvTimeoutError> {
    said.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(PERIOD)
}

/// What the caller is told in the end. Who was interrupted learns how the run goes on.
fn answer(py: Python<'_>, ended: Result<Ended, Failure>, halted: Option<PyErr>) -> PyResult<String> {
    match (ended, halted) {
        (Ok(ended), Some(error)) if ended.stopped && error.is_instance_of::<PyKeyboardInterrupt>(py) => {
            let message = format!("stopped and saved; it goes on with plimsoll.train(resume={:?})", ended.folder);
            Err(PyKeyboardInterrupt::new_err(message))
        }
        (_, Some(error)) => Err(error),
        (Ok(ended), None) => Ok(ended.answer),
        (Err(failure), None) => Err(raised(py, &failure)),
    }
}

impl Work {
    fn run(self, says: &Sender<Said>, stop: &AtomicBool) -> Result<Ended, Failure> {
        let mut run = match &self.resume {
            Some(folder) => match Run::resume(reached(RunFile::resume(folder, &self.settings)?)?)? {
                Resumed::Goes(run) => *run,
                Resumed::Done(outcome) => return Ok(ended(*outcome)),
            },
            None => {
                let file = run_file(self.path.as_deref(), &self.settings)?;
                file.check_trainable()?;
                Run::new(file)?
            }
        };
        if !self.saves {
            run.save_nothing();
        }
        let prepared = run.prepared();
        let plan = &prepared.planned.plan;
        if !plan.fits {
            let refusal = refusal(&prepared.run.devices(), plan);
            return Err(match prepared.left_over {
                true => refusal
                    .hint("making tokens has left this process with more: they are made now, so try again in another"),
                false => refusal,
            });
        }
        let mut watch = |record: &_| {
            let _ = says.send(Said::Event(json(record)));
        };
        Ok(ended(run.start(&mut watch, stop)?))
    }
}

/// What a run has left, as a caller reads it.
fn ended(outcome: Outcome) -> Ended {
    let Outcome { result, samples, model, folder } = outcome;
    let samples: Vec<_> = samples
        .iter()
        .map(|sample| json!({"prompt": sample.prompt, "expected": sample.expected, "answer": sample.answer}))
        .collect();
    let folder = folder.display().to_string();
    let model = model.map(|path| path.display().to_string());
    let answer = json!({"result": result, "samples": samples, "model": model, "folder": folder});
    Ended { stopped: result.status == RunStatus::Stopped, answer: answer.to_string(), folder }
}
