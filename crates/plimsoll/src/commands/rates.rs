//! `plimsoll measure-rates`, a hidden command: measures the rates of the processor in a process of its own.
//!
//! A full measurement takes about 200 MiB, more than a small load line. The process that trains therefore leaves it to
//! a child, and finds the rates in the cache.

use crate::args::MeasureRatesArgs;
use plimsoll_core::{Exit, Failure};
use plimsoll_device::{cache, calibration};
use std::process::{Command, Stdio};

/// Measures the rates with each number of threads in `args`, and caches them.
///
/// # Errors
/// The system refuses memory or threads.
pub fn run(args: &MeasureRatesArgs) -> Result<Exit, Failure> {
    for threads in &args.threads {
        calibration::cpu(*threads)?;
    }
    Ok(Exit::Done)
}

/// Measures the rates of the processor with a number of threads in a child process, for
/// [`RunRequest::measure_rates`](plimsoll_train::resolve::RunRequest::measure_rates). Does nothing without a cache.
pub fn measure_in_child(threads: u32) {
    let Ok(program) = std::env::current_exe() else { return };
    if cache::folder().is_none() {
        return;
    }
    let mut child = Command::new(program);
    child.arg("measure-rates").arg(threads.to_string());
    // After a failure, the caller measures and has a message.
    let _ = child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}
