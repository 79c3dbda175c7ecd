//! `cargo xtask kill`: a long version of the tests that kill runs. The code is in `crates/plimsoll/tests/kill.rs`, so
//! that both share one implementation.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use std::process::Command;

/// Kill runs at random moments, some of them repeatedly, and compare their final files byte by byte.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask kill")]
struct Args {
    /// Seed of the random moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of runs, each killed at least once
    #[arg(long, default_value_t = 20)]
    runs: u64,
}

/// Runs the long test of killed runs, which prints a table.
///
/// # Errors
/// Fails if a killed run does not end like an undisturbed one, or if the build fails.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("kill").chain(arguments.iter().map(String::as_str)));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["test", "--release", "--workspace", "--test", "cli", "--"])
        .args(["--exact", "kill::killed_runs_in_full", "--ignored", "--nocapture"])
        .env("PLIMSOLL_KILL_SEED", args.seed.to_string())
        .env("PLIMSOLL_KILL_RUNS", args.runs.to_string())
        .status()
        .context("cargo cannot be started")?;
    ensure!(status.success(), "a killed run did not end as an undisturbed one");
    Ok(())
}
