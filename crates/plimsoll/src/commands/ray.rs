//! `plimsoll join`, `leave`, `cluster` and `verify`: several machines in a Ray cluster.
//!
//! Ray is a Python library, so the Python package `plimsoll.ray` implements these commands and gets their arguments
//! unchanged. A run on devices of the cluster stays in this process and reaches the devices through a Python process.

use crate::args::PassthroughArgs;
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::remote;
use plimsoll_train::resolve::RunRequest;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Environment variable with the path of a Python interpreter that has the Plimsoll wheel installed. Needed if that
/// interpreter is neither in the folder of this program nor in `PATH`.
const PYTHON: &str = "PLIMSOLL_PYTHON";

/// Replaces this process by the Python implementation of a command, or prints the help of the command. Returns only
/// after the latter, or if the former fails.
///
/// # Errors
/// No Python interpreter with the Plimsoll wheel is found.
pub fn run(command: &str, args: &PassthroughArgs) -> Result<Exit, Failure> {
    if let Some(help) = args.help(command) {
        output::print(&help);
        return Ok(Exit::Done);
    }
    let python = find_python(command)?;
    let error = ray_module_command(&python).arg(command).args(&args.arguments).exec();
    Err(Failure::bug(format!("{} cannot be started: {error}", python.display())))
}

/// Connects a run to its devices in the cluster. A run without such devices is returned unchanged.
///
/// # Errors
/// No Python with the Plimsoll wheel, no cluster, an unknown device, or too little free memory on it.
pub fn with_remote_devices(mut request: RunRequest) -> Result<RunRequest, Failure> {
    if request.devices().has_remote_devices() {
        request.remote = remote::ray::connect_cluster(&request.config, &find_python("ray")?)?;
    }
    Ok(request)
}

/// Connects a sweep to its devices in the cluster and reserves them, so that its runs find them free. The reservation
/// is `None` if all devices are in this machine.
///
/// # Errors
/// No Python with the Plimsoll wheel, no cluster, an unknown device, or too little free memory on it.
pub fn reserve_devices(mut request: RunRequest) -> Result<(RunRequest, Option<remote::ray::Reservation>), Failure> {
    if !request.devices().has_remote_devices() {
        return Ok((request, None));
    }
    let (remote, reservation) = remote::ray::reserve(&request.config, &find_python("ray")?)?;
    request.remote = remote;
    Ok((request, Some(reservation)))
}

/// Returns the first Python interpreter that has the Plimsoll wheel. If none has it, the failure names `command` as the
/// command that needs it.
pub(super) fn find_python(command: &str) -> Result<PathBuf, Failure> {
    let program = std::env::current_exe().ok();
    let (first, other) = python_candidates(std::env::var_os(PYTHON), program.as_deref());
    let Err(failure) = check_wheel(command, &first) else { return Ok(first) };
    other.filter(|other| check_wheel(command, other).is_ok()).ok_or(failure)
}

/// Returns the one or two Python interpreters to try, in this order.
///
/// If `named` (from the environment) is set, it is the only one. Otherwise the interpreter in the folder of `program`
/// comes first, then the one in `PATH`: `pip install --user` installs the program into a folder without an interpreter.
fn python_candidates(named: Option<OsString>, program: Option<&Path>) -> (PathBuf, Option<PathBuf>) {
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

/// Checks that the interpreter has the Plimsoll wheel. Otherwise fails with a message that names `command` as the
/// command that needs it. Python's own message about a missing module would not help a user.
fn check_wheel(command: &str, python: &Path) -> Result<(), Failure> {
    let script = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('plimsoll') else 3)";
    let mut check = Command::new(python);
    check.args(["-c", script]).env("PYTHONSAFEPATH", "1").stdin(Stdio::null()).stderr(Stdio::null());
    match check.status() {
        Err(error) => Err(missing_wheel(&format!("{} cannot be started: {error}", python.display()))),
        Ok(status) if !status.success() => {
            Err(missing_wheel(&format!("{} has no package plimsoll, which `{command}` needs", python.display())))
        }
        Ok(_) => Ok(()),
    }
}

fn missing_wheel(reason: &str) -> Failure {
    Failure::input(format!("cluster commands need Python with the Plimsoll wheel: {reason}"))
        .hint(
            "build the wheel with cargo xtask wheel, pip install it with [ray], and run the plimsoll that it installs",
        )
        .hint(format!("or name the Python that has the wheel: {PYTHON}=/path/to/python3"))
}

/// Returns a command that runs `plimsoll.ray` and ignores modules in the working directory.
fn ray_module_command(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "plimsoll.ray"]).env("PYTHONSAFEPATH", "1");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_candidates_prefer_named_then_neighbor_then_path() {
        let folder = tempfile::tempdir().unwrap();
        let (program, beside) = (folder.path().join("plimsoll"), folder.path().join("python3"));
        assert_eq!(python_candidates(None, Some(&program)), ("python3".into(), None));
        std::fs::write(&beside, "").unwrap();
        assert_eq!(python_candidates(None, Some(&program)), (beside.clone(), Some("python3".into())));
        assert_eq!(python_candidates(Some("".into()), Some(&program)), (beside, Some("python3".into())));
        assert_eq!(python_candidates(Some("/opt/python".into()), Some(&program)), ("/opt/python".into(), None));
    }

    #[test]
    fn python_without_wheel_is_refused() {
        let nothing = check_wheel("join", Path::new("/nonexistent/python3")).unwrap_err();
        assert!(nothing.message.contains("/nonexistent/python3 cannot be started"), "{nothing}");
        assert!(nothing.to_string().contains("PLIMSOLL_PYTHON="), "{nothing}");
        let without = check_wheel("join", Path::new("/bin/false")).unwrap_err();
        assert!(without.message.ends_with("/bin/false has no package plimsoll, which `join` needs"), "{without}");
    }
}
