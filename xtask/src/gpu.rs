//! `cargo xtask gpu-check`: packs what travels to a machine with a GPU: the program, these chores (for the soak), and the
//! script that runs both there. `--rehearse` runs that script here, in small, on the stand-in for a GPU.

use crate::{program, stand_in};
use anyhow::{Context, ensure};
use clap::Parser;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The most that travels, packed.
const PACKED_BYTES_MAX: u64 = 60 << 20;

/// Packs the check for a machine with a GPU; there, `python3 gpu_check.py` needs neither Rust nor a network.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask gpu-check", no_binary_name = true)]
struct Options {
    /// Where the folder and its .tar.gz go.
    #[arg(long, default_value = "target/gpu-check")]
    out: PathBuf,
    /// The PyTorch script that the speed table is held against; packed where it is.
    #[arg(long, default_value = "../shared/peers/torch_step.py")]
    peer: PathBuf,
    /// Runs the script's whole flow here, in small, on a stand-in for a GPU (runs on the CPU).
    #[arg(long)]
    rehearse: bool,
    /// Only these sections of the rehearsal.
    #[arg(long, requires = "rehearse")]
    only: Option<String>,
}

/// The chore.
///
/// # Errors
/// When something does not build, is too large, or the rehearsal fails.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let options = Options::try_parse_from(arguments).unwrap_or_else(|error| error.exit());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's root")?;
    program::release()?;
    let folder = root.join(&options.out);
    pack(root, &folder, &options.peer)?;
    if options.rehearse { rehearse(root, &folder, options.only.as_deref()) } else { Ok(()) }
}

/// The folder, and the same as one file.
fn pack(root: &Path, folder: &Path, peer: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    let mut glibc = (0, 0);
    for (built, name) in [("plimsoll", "plimsoll"), ("xtask", "plimsoll-check")] {
        let to = folder.join(name);
        fs::copy(root.join("target/release").join(built), &to)?;
        stand_in::succeed(Command::new("strip").arg(&to))?;
        glibc = glibc.max(glibc_of(&fs::read(&to)?));
    }
    fs::copy(root.join("parity/cuda/gpu_check.py"), folder.join("gpu_check.py"))?;
    let peer = root.join(peer);
    if peer.exists() {
        fs::copy(&peer, folder.join("torch_step.py"))?;
    } else {
        println!("no {}: the speed table will have no peer", peer.display());
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
        "{}: {:.1} MiB, needs {needs} and python3; there: python3 gpu_check.py",
        packed.display(),
        bytes as f64 / 1048576.0
    );
    Ok(())
}

/// The newest version of glibc that a program asks for: of all `GLIBC_2.34` in it, the largest.
fn glibc_of(program: &[u8]) -> (u32, u32) {
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

/// The commit, and whether more than that was built.
fn commit(root: &Path) -> anyhow::Result<String> {
    let said = |arguments: &[&str]| -> anyhow::Result<String> {
        let output = Command::new("git").args(arguments).current_dir(root).output().context("running git")?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed = if said(&["status", "--porcelain", "--untracked-files=no"])?.is_empty() { "" } else { ", changed" };
    Ok(format!("{}{changed}", said(&["rev-parse", "--short", "HEAD"])?))
}

fn rehearse(root: &Path, folder: &Path, only: Option<&str>) -> anyhow::Result<()> {
    let libraries = stand_in::build(root)?;
    // torch and transformers, where parity has them.
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
    fn the_newest_glibc_that_is_asked_for_is_found() {
        let program = b"\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.2.5\0GLIBC_PRIVATE\0";
        assert_eq!(glibc_of(program), (2, 34));
        assert_eq!(glibc_of(b"nothing"), (0, 0));
    }
}
