//! `cargo xtask gpu-check`: packs a check that runs on a machine with a GPU: the program, the chores (for the soak),
//! and the script that runs both. `--rehearse` runs a small version of that script here, on the stand-in for a GPU.

use crate::{program, stand_in};
use anyhow::{Context, ensure};
use clap::Parser;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Largest permitted size of the archive in bytes.
const PACKED_BYTES_MAX: u64 = 60 << 20;

/// Pack a check for a machine with a GPU. On that machine, `python3 gpu_check.py` needs neither Rust nor a network.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask gpu-check", no_binary_name = true)]
struct Options {
    /// Folder to write; its .tar.gz is written beside it.
    #[arg(long, default_value = "target/gpu-check")]
    out: PathBuf,
    /// PyTorch script that is timed for comparison; packed if it exists.
    #[arg(long, default_value = "../shared/peers/torch_step.py")]
    peer: PathBuf,
    /// Also run a small version of `gpu_check.py` here, on a stand-in for a GPU (runs on the CPU).
    #[arg(long = "rehearse")]
    dry_run: bool,
    /// With --rehearse, run only these sections of `gpu_check.py`.
    #[arg(long, requires = "dry_run")]
    only: Option<String>,
}

/// Builds the program and packs the check for a machine with a GPU. With `--rehearse`, also runs a small version of the
/// check here.
///
/// # Errors
/// Fails if a build fails, if the archive is too large, or if the check fails.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let options = Options::try_parse_from(arguments).unwrap_or_else(|error| error.exit());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's root")?;
    let program = program::release()?;
    let folder = root.join(&options.out);
    pack(root, &program, &folder, &options.peer)?;
    if options.dry_run { run_on_stand_in(root, &folder, options.only.as_deref()) } else { Ok(()) }
}

/// Fills `folder` with the programs and scripts of the check, and packs it into an archive beside it. `program` is the
/// release build of `plimsoll`; the release build of `xtask` lies in the same folder. `peer` is the PyTorch script,
/// which may be missing.
fn pack(root: &Path, program: &Path, folder: &Path, peer: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    let mut glibc = (0, 0);
    for (built, name) in [("plimsoll", "plimsoll"), ("xtask", "plimsoll-check")] {
        let to = folder.join(name);
        fs::copy(program.with_file_name(built), &to)?;
        stand_in::succeed(Command::new("strip").arg(&to))?;
        glibc = glibc.max(newest_glibc(&fs::read(&to)?));
    }
    for script in ["gpu_check.py", "gpu_inputs.py"] {
        fs::copy(root.join("parity/cuda").join(script), folder.join(script))?;
    }
    let peer = root.join(peer);
    if peer.exists() {
        fs::copy(&peer, folder.join("torch_step.py"))?;
    } else {
        println!("no {}: the speed table will not include PyTorch", peer.display());
    }
    let needs = format!("glibc {}.{}", glibc.0, glibc.1);
    let about = json!({ "commit": commit(root)?, "needs": needs });
    fs::write(folder.join("about.json"), format!("{about:#}\n"))?;

    let name = folder.file_name().context("a folder's name")?;
    let packed = folder.with_extension("tar.gz");
    let parent = folder.parent().context("a folder around it")?;
    stand_in::succeed(Command::new("tar").arg("-czf").arg(&packed).arg("-C").arg(parent).arg(name))?;
    let bytes = fs::metadata(&packed)?.len();
    ensure!(bytes <= PACKED_BYTES_MAX, "{} is too large: {bytes} bytes", packed.display());
    println!(
        "{}: {:.1} MiB, needs {needs} and python3; run it with: python3 gpu_check.py",
        packed.display(),
        bytes as f64 / 1048576.0
    );
    Ok(())
}

/// Returns the newest glibc version that a program requires: the largest of its `GLIBC_2.34` symbols.
fn newest_glibc(program: &[u8]) -> (u32, u32) {
    let word = b"GLIBC_";
    let versions =
        program.windows(word.len()).enumerate().filter(|(_, window)| window == word).filter_map(|(at, _)| {
            let rest = &program[at + word.len()..];
            let end = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
            let (major, minor) = std::str::from_utf8(&rest[..end]).ok()?.split_once('.')?;
            let minor = minor.split('.').next()?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        });
    versions.max().unwrap_or((0, 0))
}

/// Returns the short hash of the commit, followed by `, changed` if the working tree has changes.
fn commit(root: &Path) -> anyhow::Result<String> {
    let said = |arguments: &[&str]| -> anyhow::Result<String> {
        let output = Command::new("git").args(arguments).current_dir(root).output().context("running git")?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed = if said(&["status", "--porcelain", "--untracked-files=no"])?.is_empty() { "" } else { ", changed" };
    Ok(format!("{}{changed}", said(&["rev-parse", "--short", "HEAD"])?))
}

/// Runs a small version of `gpu_check.py` in `folder`, which [`pack`] filled, on the stand-in for a GPU. `only` names
/// sections of the check; `None` runs all.
fn run_on_stand_in(root: &Path, folder: &Path, only: Option<&str>) -> anyhow::Result<()> {
    let libraries = stand_in::build(root)?;
    // Prefer the venv of the parity tests, which has torch and transformers.
    let venv = env::var_os("PLIMSOLL_PARITY_VENV").map_or_else(|| root.join("parity/.venv"), PathBuf::from);
    let python = Some(venv.join("bin/python")).filter(|python| python.exists()).unwrap_or_else(|| "python3".into());
    let mut command = Command::new(python);
    command.arg(folder.join("gpu_check.py")).arg("--rehearse").arg("--libraries").arg(libraries);
    command.args(only.map(|only| format!("--only={only}")));
    command.arg("--out").arg(folder.with_extension("out"));
    stand_in::succeed(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_required_glibc_is_found() {
        let program = b"\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.2.5\0GLIBC_PRIVATE\0";
        assert_eq!(newest_glibc(program), (2, 34));
        assert_eq!(newest_glibc(b"nothing"), (0, 0));
    }
}
