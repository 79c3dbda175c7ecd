//! `cargo xtask wheel`: builds the wheel for pip, with the Python package, its native library and the command line.

use crate::program;
use anyhow::{Context, bail};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const USAGE: &str = "usage: cargo xtask wheel [FOLDER]

Builds the command line and the Python library, and writes plimsoll_train-VERSION-….whl into FOLDER (target/wheels).
Needs maturin (pip install maturin) on the path, or in the Python that PLIMSOLL_PYTHON names.";

/// Builds the command line and the wheel that contains it. The only argument is the folder of the wheel, and may be
/// missing.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the workspace")?;
    let folder = match arguments {
        [] => root.join("target/wheels"),
        [folder] if !folder.starts_with('-') => PathBuf::from(folder),
        _ => bail!("{USAGE}"),
    };
    let folder = std::path::absolute(folder)?;
    let program = program::release()?;
    // The wheel installs the files of this folder as scripts.
    let scripts = root.join("python/data/scripts");
    fs::create_dir_all(&scripts)?;
    fs::copy(program, scripts.join("plimsoll")).context("cannot copy the command line")?;
    let mut maturin = match std::env::var_os("PLIMSOLL_PYTHON") {
        Some(python) => {
            let mut command = Command::new(python);
            command.args(["-m", "maturin"]);
            command
        }
        None => Command::new("maturin"),
    };
    let options = ["build", "--release", "--locked", "--features", "workspace", "--manifest-path"];
    maturin.args(options).arg(root.join("python/Cargo.toml"));
    done(maturin.arg("--out").arg(folder).current_dir(root))
}

/// Runs a command to its end. Fails if the command cannot be started or fails.
fn done(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let words: Vec<&OsStr> = command.get_args().collect();
    let words = words.join(OsStr::new(" ")).to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot start {name}\n\n{USAGE}"))?;
    if !status.success() {
        bail!("{name} {words}: {status}");
    }
    Ok(())
}
