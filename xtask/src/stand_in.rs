//! The stand-in for a GPU (it runs on the CPU): built here, used by `cuda-check` and by the rehearsal of `gpu-check`.

use anyhow::{Context, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a command, which must succeed.
///
/// # Errors
/// When it cannot be started, or fails.
pub fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("running {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Builds the libraries, and gives the folder that `LD_LIBRARY_PATH` is to name.
///
/// # Errors
/// When g++ is missing or fails.
pub fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let folder = root.join("target/stand-in");
    succeed(Command::new(root.join("crates/plimsoll-device/tests/cuda_stand_in/build")).arg(&folder))?;
    Ok(folder)
}
