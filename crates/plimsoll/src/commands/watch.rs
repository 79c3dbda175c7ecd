//! `plimsoll watch`: the devices of this machine and a run, live.

use crate::args::WatchArgs;
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_watch::snapshot::RunState;
use plimsoll_watch::snapshot::source::Source;
use plimsoll_watch::view::{self, lines};
use std::io::{self, IsTerminal};
use std::thread;
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
    if args.json {
        thread::sleep(LOAD_PERIOD);
        output::print_json(&lines::json(&source.snapshot()?));
    } else if io::stdout().is_terminal() {
        view::show(period, || source.snapshot())?;
    } else {
        print_lines(&mut source, period)?;
    }
    Ok(Exit::Done)
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
