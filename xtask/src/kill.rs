//! `cargo xtask kill`: the full count of the tests that kill a run. The body is
//! `crates/plimsoll/tests/kill.rs`, so that the count and the tests cannot drift apart.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use std::process::Command;

/// Kill runs at random moments, also again and again, and compare what they end with, byte for byte.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask kill")]
struct Args {
    /// Where the moments are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs that are killed, each at least once
    #[arg(long, default_value_t = 20)]
    runs: u64,
}

/// Runs the count and lets it print its table.
///
/// # Errors
/// A run that did not end as an undisturbed one, or a build that fails.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("kill").chain(arguments.iter().map(String::as_str)));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["test", "-p", "plimsoll", "--test", "kill", "--"])
        .args(["--exact", "killed_runs_in_full", "--ignored", "--nocapture"])
        .env("PLIMSOLL_KILL_SEED", args.seed.to_string())
        .env("PLIMSOLL_KILL_RUNS", args.runs.to_string())
        .status()
        .context("cargo cannot be started")?;
    ensure!(status.success(), "a killed run did not end as an undisturbed one");
    Ok(())
}
