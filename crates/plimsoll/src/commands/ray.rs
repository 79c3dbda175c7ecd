//! `plimsoll join`, `leave`, `cluster` and `verify`: several machines, on Ray. Ray speaks Python, and so do these: they are
//! handed over, words and all, to `plimsoll.ray` of the wheel that this program came in. A run whose devices are the cluster's
//! stays here, and reaches them through a process of that Python.

use crate::args::HandedOver;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::config::RunFile;
use plimsoll_train::remote;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names the Python that has the wheel, where this program does not stand beside it.
const PYTHON: &str = "PLIMSOLL_PYTHON";

/// Becomes that program.
///
/// # Errors
/// There is no Python with the wheel.
pub fn run(command: &str, args: &HandedOver) -> Result<Exit, Failure> {
    let python = with_wheel(command)?;
    let error = in_module(&python).arg(command).args(&args.words).exec();
    Err(Failure::bug(format!("{} cannot be started: {error}", python.display())))
}

/// The same run, with the way to its devices where some are of the cluster.
///
/// # Errors
/// There is no Python with the wheel, no cluster, no such device, or no room on it.
pub fn reached(mut file: RunFile) -> Result<RunFile, Failure> {
    if file.devices().elsewhere() {
        remote::ray::reach(&mut file, &with_wheel("ray")?)?;
    }
    Ok(file)
}

/// The same for a sweep, whose runs find their devices kept.
///
/// # Errors
/// As above.
pub fn kept(mut file: RunFile) -> Result<(RunFile, Option<remote::ray::Kept>), Failure> {
    let kept = match file.devices().elsewhere() {
        true => Some(remote::ray::keep(&mut file, &with_wheel("ray")?)?),
        false => None,
    };
    Ok((file, kept))
}

/// The interpreter, which has what is asked of it.
fn with_wheel(command: &str) -> Result<PathBuf, Failure> {
    let program = std::env::current_exe().ok();
    let (first, other) = pythons(std::env::var_os(PYTHON), program.as_deref());
    let Err(failure) = check(command, &first) else { return Ok(first) };
    other.filter(|other| check(command, other).is_ok()).ok_or(failure)
}

/// The interpreter that is named and no other; else the one that this program was installed beside, or the one that the shell
/// finds: a `pip install --user` puts the program into a folder that has no interpreter.
fn pythons(named: Option<OsString>, program: Option<&Path>) -> (PathBuf, Option<PathBuf>) {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return (PathBuf::from(named), None);
    }
    let beside = program.and_then(Path::parent).map(|folder| folder.join("python3"));
    let found = PathBuf::from("python3");
    match beside.filter(|path| path.is_file()) {
        Some(beside) => (beside, Some(found)),
        None => (found, None),
    }
}

/// That the interpreter has the wheel: what it says itself of a missing module is no answer to a user.
fn check(command: &str, python: &Path) -> Result<(), Failure> {
    let found = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('plimsoll') else 3)";
    let mut looks = Command::new(python);
    looks.args(["-c", found]).env("PYTHONSAFEPATH", "1").stdin(Stdio::null()).stderr(Stdio::null());
    match looks.status() {
        Err(error) => Err(needs_wheel(&format!("{} cannot be started: {error}", python.display()))),
        Ok(status) if !status.success() => {
            Err(needs_wheel(&format!("{} has no package plimsoll, which `{command}` is in", python.display())))
        }
        Ok(_) => Ok(()),
    }
}

fn needs_wheel(why: &str) -> Failure {
    Failure::input(format!("several machines need Python with Plimsoll's wheel: {why}"))
        .hint("build the wheel with cargo xtask wheel, pip install it with [ray], and run the plimsoll that comes with it")
        .hint(format!("or name the Python that has it: {PYTHON}=/path/to/python3"))
}

/// The module, whatever lies in the working directory.
fn in_module(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "plimsoll.ray"]).env("PYTHONSAFEPATH", "1");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_python_that_is_named_comes_before_the_one_beside_and_that_before_the_one_of_the_shell() {
        let folder = tempfile::tempdir().unwrap();
        let (program, beside) = (folder.path().join("plimsoll"), folder.path().join("python3"));
        assert_eq!(pythons(None, Some(&program)), ("python3".into(), None));
        std::fs::write(&beside, "").unwrap();
        assert_eq!(pythons(None, Some(&program)), (beside.clone(), Some("python3".into())));
        assert_eq!(pythons(Some("".into()), Some(&program)), (beside, Some("python3".into())));
        assert_eq!(pythons(Some("/opt/python".into()), Some(&program)), ("/opt/python".into(), None));
    }

    #[test]
    fn a_python_without_the_wheel_is_told() {
        let nothing = check("join", Path::new("/nonexistent/python3")).unwrap_err();
        assert!(nothing.message.contains("/nonexistent/python3 cannot be started"), "{nothing}");
        assert!(nothing.to_string().contains("PLIMSOLL_PYTHON="), "{nothing}");
        let without = check("join", Path::new("/bin/false")).unwrap_err();
        assert!(without.message.ends_with("/bin/false has no package plimsoll, which `join` is in"), "{without}");
    }
}
