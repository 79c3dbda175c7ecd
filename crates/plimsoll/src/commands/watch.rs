//! `plimsoll watch`: the devices of this machine and a run, live.

use super::advice::recommendations_for_run;
use crate::args::WatchArgs;
use crate::output;
use plimsoll_core::{Exit, Failure, Recommendation};
use plimsoll_watch::snapshot::source::Source;
use plimsoll_watch::snapshot::{RunState, Snapshot};
use plimsoll_watch::view::{self, Viewer, lines};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGTERM};
use signal_hook::flag::register;
use std::io::{self, IsTerminal};
use std::os::unix::process::parent_id;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time between the two readings of a single snapshot, from which the load of the processor follows.
const LOAD_PERIOD: Duration = Duration::from_millis(200);

/// Shows snapshots: one as JSON, a live view on a terminal, else lines until the run ends or the output is closed.
///
/// # Errors
/// There is no such run folder, or the terminal cannot be drawn on.
pub fn run(args: &WatchArgs) -> Result<Exit, Failure> {
    let mut source = match &args.run_dir {
        Some(path) => Source::run_folder(path)?,
        None => Source::machine(),
    };
    let period = Duration::from_secs_f64(args.interval);
    if !args.json && io::stdout().is_terminal() {
        show(source, args)?;
        return Ok(Exit::Done);
    }
    if let Some(folder) = args.run_dir.as_deref().filter(|_| args.advise) {
        source.recommendations = recommendations_for_run(folder);
    }
    if args.json {
        thread::sleep(LOAD_PERIOD);
        output::print_json(&lines::json(&source.snapshot()?));
    } else {
        print_lines(&mut source, period)?;
    }
    Ok(Exit::Done)
}

/// The view of a run or of this machine on the terminal of this process.
struct TerminalViewer {
    source: Source,
    /// The thread that computes recommendations; `None` if there is none, and once they are shown.
    advice: Option<JoinHandle<Vec<Recommendation>>>,
    /// The process of the run that started this one; `None` if the user did.
    of_process: Option<u32>,
    /// Whether a signal asked this process to end.
    stop: Arc<AtomicBool>,
}

impl Viewer for TerminalViewer {
    fn take(&mut self) -> Result<Option<Snapshot>, Failure> {
        if let Some(ended) = self.advice.take_if(|thread| thread.is_finished()) {
            // A panic of the planner is printed by its thread; the view goes on without recommendations.
            self.source.recommendations = ended.join().unwrap_or_default();
        }
        self.source.snapshot().map(Some)
    }

    fn is_over(&self) -> bool {
        let is_orphan = self.of_process.is_some_and(|process| process != parent_id());
        is_orphan || self.stop.load(Ordering::Relaxed)
    }

    fn interrupt(&mut self) -> bool {
        let run = self.of_process.and_then(|process| Pid::from_raw(process as i32));
        let passed = run.is_some_and(|run| kill_process(run, Signal::INT).is_ok());
        // The run ends after its step, and this view with it.
        !passed
    }
}

/// Draws the view until the user quits, a signal ends this process, or the process of the run ends.
fn show(source: Source, args: &WatchArgs) -> Result<(), Failure> {
    let advice = args.run_dir.clone().filter(|_| args.advise);
    let advice = advice.map(|folder| thread::spawn(move || recommendations_for_run(&folder)));
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        // If the handler cannot be installed, the signal ends the process without restoring the terminal.
        let _ = register(signal, Arc::clone(&stop));
    }
    let mut viewer = TerminalViewer { source, advice, of_process: args.of_process, stop };
    view::show(Duration::from_secs_f64(args.interval), &mut viewer)
}

/// Prints the lines of a snapshot each `period`, until the run has ended or the output is closed.
fn print_lines(source: &mut Source, period: Duration) -> Result<(), Failure> {
    loop {
        thread::sleep(period.min(LOAD_PERIOD));
        let snapshot = source.snapshot()?;
        let is_over = snapshot
            .run
            .as_ref()
            .is_some_and(|run| matches!(run.state, RunState::Done | RunState::Stopped | RunState::Died));
        if !output::print_while_open(&lines::lines(&snapshot)) || is_over {
            return Ok(());
        }
        thread::sleep(period.saturating_sub(LOAD_PERIOD));
    }
}
