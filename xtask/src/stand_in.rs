//! Builds the stand-in for a GPU, which runs on the CPU. The chores `stand-in` and `gpu-check --rehearse` use it.

use anyhow::{Context, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a command to its end.
///
/// # Errors
/// Fails if the command cannot be started or fails.
pub fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Builds the libraries that stand in for NVIDIA's, and returns their folder, for `LD_LIBRARY_PATH`.
///
/// # Errors
/// Fails if `g++` is missing or fails.
pub fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let folder = root.join("target/stand-in");
    succeed(Command::new(root.join("crates/plimsoll-device/tests/cuda_stand_in/build")).arg(&folder))?;
    Ok(folder)
}
