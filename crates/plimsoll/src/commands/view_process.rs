//! The view of `plimsoll watch` on the terminal of a run (`train --progress tui`). It is a process of its own, so it takes
//! no memory of the run and delays none of its steps.

use crate::output;
use plimsoll_core::{Event, Failure, Record};
use plimsoll_watch::terminal::Watcher;
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The progress of a run on standard output: the view, or a watcher.
pub struct ProgressDisplay {
    view: RunView,
    /// Creates the watcher. One that draws a line must not exist beside the view.
    create: fn() -> Box<dyn Watcher>,
    /// The watcher; `None` as long as the view is shown.
    watcher: Option<Box<dyn Watcher>>,
    /// The newest start event, which the watcher needs for the length of the run.
    start: Option<Record>,
    /// Warnings that are in no event log, and therefore not in the view. The watcher shows them after the view.
    warnings: Vec<Record>,
}

impl ProgressDisplay {
    /// Creates a display that shows `view`, and after it the watcher that `create` returns.
    pub fn new(view: RunView, create: fn() -> Box<dyn Watcher>) -> ProgressDisplay {
        ProgressDisplay { view, create, watcher: None, start: None, warnings: Vec::new() }
    }

    /// Shows an event.
    pub fn observe(&mut self, record: &Record) {
        if self.view.is_shown() {
            if matches!(record.event, Event::Start { .. }) {
                self.start = Some(record.clone());
            }
            return;
        }
        let (create, start) = (self.create, self.start.take());
        let watcher = self.watcher.get_or_insert_with(create);
        if let Some(start) = start {
            watcher.observe(&start);
        }
        std::mem::take(&mut self.warnings).iter().chain([record]).for_each(|record| watcher.observe(record));
    }

    /// Shows warnings that are in no event log: now, or when the view is closed.
    pub fn warn(&mut self, warnings: Vec<Record>) {
        self.warnings.extend(warnings);
        if self.warnings.is_empty() || self.view.is_shown() {
            return;
        }
        let watcher = self.watcher.get_or_insert_with(self.create);
        std::mem::take(&mut self.warnings).iter().for_each(|warning| watcher.observe(warning));
    }
}

/// The view of a run, shared by the threads of the run and of the signals.
#[derive(Clone)]
pub struct RunView(Arc<Mutex<View>>);

/// State of the view of a run.
enum View {
    /// The view of the run in this folder is to be shown from the first event on, when the folder holds the run.
    Wanted(PathBuf),
    Open(ViewProcess),
    /// There is no view: the watcher shows the events.
    None,
}

impl RunView {
    /// Returns the view of the run in a folder; `None` for no view.
    pub fn of(folder: Option<PathBuf>) -> RunView {
        RunView(Arc::new(Mutex::new(folder.map_or(View::None, View::Wanted))))
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the view is shown. Starts it at the first call; if that fails, a note says so.
    fn is_shown(&self) -> bool {
        let mut view = self.lock();
        if let View::Wanted(folder) = &*view {
            *view = match ViewProcess::start(folder) {
                Ok(process) => View::Open(process),
                Err(failure) => {
                    output::print_note(&failure.message);
                    View::None
                }
            };
        }
        let is_shown = if let View::Open(process) = &mut *view { process.is_open() } else { false };
        if !is_shown {
            *view = View::None;
        }
        is_shown
    }

    /// Returns whether the view covers the terminal now.
    pub fn is_open(&self) -> bool {
        if let View::Open(process) = &mut *self.lock() { process.is_open() } else { false }
    }

    /// Closes the view for good, and waits until the terminal is restored.
    pub fn close(&self) {
        let view = std::mem::replace(&mut *self.lock(), View::None);
        view.close();
    }

    /// Closes the view like [`RunView::close`], unless another thread uses it now.
    pub fn try_close(&self) {
        let view = self.0.try_lock().map(|mut view| std::mem::replace(&mut *view, View::None));
        if let Ok(view) = view {
            view.close();
        }
    }
}

impl View {
    fn close(self) {
        if let View::Open(process) = self {
            process.close();
        }
    }
}

/// Time that the view has to restore the terminal before it is killed.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// The process that shows a run on this terminal. It ends when the user closes the view, or with the run.
struct ViewProcess(Child);

impl ViewProcess {
    /// Starts the view of the run in a folder.
    ///
    /// # Errors
    /// The process cannot be started.
    fn start(folder: &Path) -> Result<ViewProcess, Failure> {
        let failed = |error| Failure::input(format!("the view cannot be started: {error}")).hint("--progress line");
        let program = std::env::current_exe().map_err(failed)?;
        let own = std::process::id().to_string();
        let child = Command::new(program).args(["watch", "--of-process", &own]).arg(folder).spawn().map_err(failed)?;
        Ok(ViewProcess(child))
    }

    /// Returns whether the view is still shown.
    fn is_open(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }

    /// Closes the view, and waits until the terminal is restored.
    fn close(mut self) {
        let began = Instant::now();
        while self.is_open() {
            // A view that hangs, such as in a driver, must not keep the run from ending.
            let signal = if began.elapsed() < CLOSE_TIME { Signal::TERM } else { Signal::KILL };
            let _ = kill_process(Pid::from_child(&self.0), signal);
            thread::sleep(CLOSE_TIME / 100);
        }
    }
}
