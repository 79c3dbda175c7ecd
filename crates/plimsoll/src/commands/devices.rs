//! `plimsoll devices` and `plimsoll bench devices`: what is here, and how fast it is.

use crate::args::{BenchDevicesArgs, DevicesArgs};
use crate::say;
use plimsoll_core::{Exit, Failure};
use plimsoll_device::{bench, calibration, probe};
use plimsoll_watch::devices;
use std::fs;

/// Shows the devices of this machine.
///
/// # Errors
/// A terminal that cannot be drawn on.
pub fn show(args: &DevicesArgs) -> Result<Exit, Failure> {
    if args.watch {
        devices::watch().map_err(|error| Failure::input(format!("the terminal cannot be drawn on: {error}")))?;
    } else if args.json {
        say::answer(&devices::json(&probe::machine()));
    } else {
        say::answer(&devices::table(&probe::machine()));
    }
    Ok(Exit::Done)
}

/// Measures the devices, and keeps the rates for the planner.
///
/// # Errors
/// Memory or threads that are refused; a file that cannot be written.
pub fn measure(args: &BenchDevicesArgs) -> Result<Exit, Failure> {
    let measured = bench::devices(args.duration, say::stage)?;
    calibration::store(&measured);
    say::answer(&devices::bench_table(&measured));
    if let Some(path) = &args.json {
        fs::write(path, devices::bench_json(&measured))
            .map_err(|error| Failure::input(format!("cannot write {}: {error}", path.display())))?;
    }
    Ok(Exit::Done)
}
