//! `plimsoll watch --pid`: the memory of any process, until it ends.

use crate::args::WatchArgs;
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_watch::process::source::ProcessSource;
use plimsoll_watch::process::{ProcessReading, ProcessState, lines};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::register;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait before the end of the process, or a signal, is noticed.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// Fewest readings of a window. A shorter window is extended, because its growth would never be known.
const READINGS_MIN: f64 = 10.0;

/// Prints readings of the process `pid` until it ends, a signal arrives or the output is closed, then a summary.
///
/// # Errors
/// There is no such process.
pub fn run(pid: u32, args: &WatchArgs) -> Result<Exit, Failure> {
    let mut source = ProcessSource::open(pid, args.window.max(READINGS_MIN * args.interval))?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // If the handler cannot be installed, the signal ends this command without a summary.
        let _ = register(signal, Arc::clone(&stop));
    }
    let mut warned = Vec::new();
    loop {
        let reading = source.take();
        let is_last = reading.state == ProcessState::Ended || stop.load(Ordering::Relaxed);
        let is_open = match args.json {
            true => output::print_json_while_open(&reading.json()),
            false => output::print_while_open(&text(&reading, is_last, &mut warned)),
        };
        if is_last || !is_open {
            return Ok(Exit::Done);
        }
        wait(&source, Duration::from_secs_f64(args.interval), &stop);
    }
}

/// Formats a reading, or the summary if it is the last one. A warning is repeated when it changes; `warned` holds those
/// before.
fn text(reading: &ProcessReading, is_last: bool, warned: &mut Vec<String>) -> String {
    if is_last {
        return lines::summary(reading);
    }
    let mut text = lines::lines(reading);
    // The figures of a leak change with each reading, and its first words do not.
    let start = |warning: &String| warning.split(" by ").next().unwrap_or_default().to_owned();
    let new = reading.warnings.iter().filter(|warning| !warned.contains(&start(warning)));
    text.extend(new.map(|warning| format!("warning: {warning}\n")));
    *warned = reading.warnings.iter().map(start).collect();
    text
}

/// Waits for `period`, or until the process ends or a signal arrives.
fn wait(source: &ProcessSource, period: Duration, stop: &AtomicBool) {
    let end = Instant::now() + period;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        if stop.load(Ordering::Relaxed) || source.has_ended() {
            return;
        }
        thread::sleep(left.min(MAX_WAIT));
    }
}
