//! A worker: `plimsoll train` in a process of its own, so that whatever becomes of it hurts no other. It holds one end
//! of a pipe and stops when the other one is closed: because it shall, or because the sweep is gone.

use super::PROGRAM;
use super::folder::Folder;
use plimsoll_core::Failure;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

/// What a worker is started with.
pub struct Start {
    /// Which run.
    pub run: usize,
    /// Which device.
    pub device: usize,
    /// What it is given.
    pub settings: Vec<String>,
    /// What else it is told, in its environment.
    pub environment: Option<(&'static str, String)>,
    /// Where its device shall refuse memory.
    pub injections: Vec<String>,
}

/// A process that trains.
pub struct Worker {
    /// Which run.
    pub run: usize,
    /// On which device.
    pub device: usize,
    child: Child,
    log: PathBuf,
    /// Where its words begin in the log.
    from: u64,
    began: Instant,
}

/// How a process ended.
pub struct Ended {
    /// None where a signal ended it.
    pub code: Option<i32>,
    /// What it complained of, in a line.
    pub why: Option<String>,
}

impl Worker {
    /// Starts a run, or goes on with it where it has been started before.
    ///
    /// # Errors
    /// A process or a file that the system refuses.
    pub fn start(start: Start, folder: &Folder, name: &str) -> Result<Worker, Failure> {
        let log = folder.log(name);
        let failed = |error: io::Error| Failure::input(format!("cannot start {name}: {error}"));
        let words = OpenOptions::new().create(true).append(true).open(&log).map_err(failed)?;
        let from = words.metadata().map_err(failed)?.len();
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
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(words).spawn().map_err(failed)?;
        let Start { run, device, .. } = start;
        Ok(Worker { run, device, child, log, from, began: Instant::now() })
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How long it has been there.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// It shall finish its step, save and end.
    pub fn stop(&mut self) {
        drop(self.child.stdin.take());
    }

    /// How it ended, where it has.
    pub fn ended(&mut self) -> Option<Ended> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(Ended { code: status.code(), why: why(status, &self.words()) })
    }

    fn words(&self) -> String {
        let read = || -> io::Result<String> {
            let mut text = Vec::new();
            let mut file = File::open(&self.log)?;
            file.seek(SeekFrom::Start(self.from))?;
            file.read_to_end(&mut text)?;
            if text.is_empty() && self.from == 0 {
                // Nobody misses a log without a word.
                fs::remove_file(&self.log)?;
            }
            Ok(String::from_utf8_lossy(&text).into_owned())
        };
        read().unwrap_or_default()
    }
}

/// What a process said when it did not end well, in a line.
fn why(status: ExitStatus, words: &str) -> Option<String> {
    let line = words.lines().find_map(|line| line.strip_prefix("error: ").or(line.strip_prefix("stopped: ")));
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
    fn a_run_that_did_not_end_well_is_told_in_a_line() {
        let told = |raw, words| why(ExitStatus::from_raw(raw), words);
        assert_eq!(told(0, "warning: it is warm\n"), None);
        assert_eq!(told(3 << 8, "error: it does not fit\n  hint: a\n").unwrap(), "exit 3: it does not fit");
        assert_eq!(told(4 << 8, "stopped: after step 3\n").unwrap(), "exit 4: after step 3");
        assert_eq!(told(9, "whatever").unwrap(), "ended by signal 9");
    }
}
