//! A worker of a sweep: `plimsoll train` in a process of its own, so that a crash does not affect other runs.
//!
//! The standard input of the worker is a pipe from the sweep. The worker stops when the pipe is closed: on request, or
//! because the sweep process has died.

use super::PROGRAM;
use super::folder::SweepFolder;
use plimsoll_core::Failure;
use plimsoll_device::{private_file, regular_file};
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

/// Parameters for the start of a training process.
pub struct WorkerStart {
    /// Index of the run in the sweep.
    pub run: usize,
    /// Index of the run's device among the devices of the sweep.
    pub device: usize,
    /// `KEY=VALUE` settings of the run: its share of the device and of the host memory.
    pub settings: Vec<String>,
    /// Name and value of the environment variable with the reservation of a device in the cluster; `None` for a device
    /// of this machine.
    pub environment: Option<(&'static str, String)>,
    /// Places of out-of-memory errors to inject, as `--inject-oom` of `plimsoll train` takes them.
    pub injections: Vec<String>,
}

/// A training process of a sweep, which trains one run on one device.
pub struct Worker {
    /// Index of the run in the sweep.
    pub run: usize,
    /// Index of the run's device among the devices of the sweep.
    pub device: usize,
    child: Child,
    log: PathBuf,
    /// Offset in the log at which the output of this process begins.
    log_start: u64,
    started_at: Instant,
}

/// Exit of a training process.
pub struct WorkerExit {
    /// Exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    /// Exit code or signal and error message of the process in one line; `None` if it succeeded.
    pub reason: Option<String>,
}

impl Worker {
    /// Starts a run, or resumes it if it has been started before.
    ///
    /// # Errors
    /// The system refuses a process or a file.
    pub fn start(start: WorkerStart, folder: &SweepFolder, name: &str) -> Result<Worker, Failure> {
        let log = folder.log(name);
        let failed = |error: io::Error| Failure::input(format!("cannot start {name}: {error}"));
        let log_file = private_file::append(&log).map_err(failed)?;
        let log_start = log_file.metadata().map_err(failed)?.len();
        let mut command = Command::new(PROGRAM);
        command.arg("train");
        if folder.run(name).join("run.toml").exists() {
            command.arg("--resume").arg(folder.run(name));
        } else {
            command.arg(folder.run_file(name));
        }
        command.args(["--quiet", "--stop-on-eof"]);
        command.args(start.settings.iter().flat_map(|setting| ["--set", setting]));
        command.args(start.injections.iter().flat_map(|place| ["--inject-oom", place]));
        command.envs(start.environment);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log_file).spawn().map_err(failed)?;
        let WorkerStart { run, device, .. } = start;
        Ok(Worker { run, device, child, log, log_start, started_at: Instant::now() })
    }

    /// Returns the id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the seconds since the process was started.
    pub fn seconds(&self) -> f64 {
        self.started_at.elapsed().as_secs_f64()
    }

    /// Asks the process to finish its step, save and end.
    pub fn stop(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Returns the exit of the process; `None` while it runs.
    pub fn try_exit(&mut self) -> Option<WorkerExit> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(WorkerExit { code: status.code(), reason: describe_exit(status, &self.read_log()) })
    }

    /// Returns the part of the log that this process has written, or an empty text if the log cannot be read. Removes
    /// an empty log.
    fn read_log(&self) -> String {
        self.try_read_log().unwrap_or_default()
    }

    fn try_read_log(&self) -> io::Result<String> {
        let mut text = Vec::new();
        let mut file = regular_file::open(&self.log)?;
        file.seek(SeekFrom::Start(self.log_start))?;
        file.read_to_end(&mut text)?;
        if text.is_empty() && self.log_start == 0 {
            fs::remove_file(&self.log)?;
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// Describes a failed process in one line: the exit code and its first error message, or the signal. Returns `None` for
/// exit code 0.
fn describe_exit(status: ExitStatus, log: &str) -> Option<String> {
    let line = log.lines().find_map(|line| line.strip_prefix("error: ").or(line.strip_prefix("stopped: ")));
    match (status.code(), line) {
        (Some(0), _) => None,
        (Some(code), Some(line)) => Some(format!("exit {code}: {line}")),
        (Some(code), None) => Some(format!("exit {code}")),
        (None, _) => Some(format!("ended by signal {}", status.signal().unwrap_or_default())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_worker_is_described_in_one_line() {
        let described = |raw, words| describe_exit(ExitStatus::from_raw(raw), words);
        assert_eq!(described(0, "warning: it is warm\n"), None);
        assert_eq!(described(3 << 8, "error: it does not fit\n  hint: a\n").unwrap(), "exit 3: it does not fit");
        assert_eq!(described(4 << 8, "stopped: after step 3\n").unwrap(), "exit 4: after step 3");
        assert_eq!(described(9, "whatever").unwrap(), "ended by signal 9");
    }
}
