//! The Ray cluster that this machine has joined, for `plimsoll doctor` and `plimsoll watch`. A Python process reads it
//! (`plimsoll.ray.inspection`), because Ray is a Python library.

use super::ray::find_python;
use plimsoll_core::{Exit, Failure};
use plimsoll_watch::cluster::{ClusterCheck, ClusterState};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Most bytes of a line of the Python process. A node takes about a kilobyte.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// Time that the Python process has to end after its standard input is closed.
const END_TIME: Duration = Duration::from_secs(5);
/// Shortest time between two readings of a cluster.
const PERIOD_MIN: Duration = Duration::from_secs(2);
/// Time beside two periods after which a state that is not replaced counts as unknown, as after the loss of the head.
const SILENT_TIME: Duration = Duration::from_secs(10);
/// Environment variable with the address of a cluster that `plimsoll join` did not join.
const RAY_ADDRESS: &str = "RAY_ADDRESS";

/// Checks the cluster of this machine; `None` if it belongs to none. Takes some seconds: a process starts on each node.
pub fn check() -> Option<Result<ClusterCheck, Failure>> {
    is_member().then(|| Inspection::start(&["check"])?.read_line())
}

/// Returns whether this machine has joined a cluster and not left it, or the environment names one.
fn is_member() -> bool {
    let named = std::env::var_os(RAY_ADDRESS).is_some_and(|address| !address.is_empty());
    named || state_folder().is_some_and(|folder| folder.join("joined.json").is_file())
}

/// Returns the folder in which `plimsoll join` records the cluster, as `plimsoll.ray.local_state` does.
fn state_folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    state_folder_in(variable, host.trim_end())
}

/// Returns that folder on the machine with this host name and these environment variables.
fn state_folder_in(variable: impl Fn(&str) -> Option<OsString>, host: &str) -> Option<PathBuf> {
    if let Some(named) = variable("PLIMSOLL_RAY_STATE") {
        return Some(PathBuf::from(named));
    }
    let state = variable("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| Some(Path::new(&variable("HOME")?).join(".local/state")))?;
    Some(state.join("plimsoll/ray").join(host))
}

/// The process that reads the cluster. It ends when it is dropped, and its processes on the nodes with it.
struct Inspection {
    child: Child,
    /// Its output; `None` once a thread reads it.
    output: Option<BufReader<ChildStdout>>,
}

/// A line of that process.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line<T> {
    Failed { error: Refusal },
    Read(T),
}

/// A failure of that process.
#[derive(Deserialize)]
struct Refusal {
    message: String,
    hints: Vec<String>,
}

impl Inspection {
    /// Starts the process with these arguments.
    ///
    /// # Errors
    /// No Python with the Plimsoll wheel.
    fn start(args: &[&str]) -> Result<Inspection, Failure> {
        let python = find_python("ray")?;
        let mut command = Command::new(&python);
        command.args(["-m", "plimsoll.ray.inspection"]).args(args).env("PYTHONSAFEPATH", "1");
        // A process group of its own: it ends its processes on the nodes also after Ctrl-C.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let not_started = |error| Failure::input(format!("{} cannot be started: {error}", python.display()));
        let mut child = command.spawn().map_err(not_started)?;
        let output = child.stdout.take().map(BufReader::new);
        Ok(Inspection { child, output })
    }

    /// Reads the next line.
    ///
    /// # Errors
    /// The process failed or ended.
    fn read_line<T: DeserializeOwned>(mut self) -> Result<T, Failure> {
        let mut output = self.output.take().expect("no thread reads the output");
        read_line(&mut output)
    }
}

/// Reads the next line of the process.
fn read_line<T: DeserializeOwned>(output: &mut BufReader<ChildStdout>) -> Result<T, Failure> {
    let ended =
        || Failure::input("the process that reads the cluster has ended").hint("see its state: plimsoll cluster");
    let mut line = Vec::new();
    output.take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(|_| ended())?;
    match serde_json::from_slice(&line) {
        Ok(Line::Read(read)) => Ok(read),
        Ok(Line::Failed { error: Refusal { message, hints } }) => Err(Failure { exit: Exit::Input, message, hints }),
        Err(_) => Err(ended()),
    }
}

impl Drop for Inspection {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let began = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && began.elapsed() < END_TIME {
            thread::sleep(END_TIME / 500);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The newest state of the cluster, which a thread reads.
pub struct ClusterWatch {
    newest: Arc<Newest>,
    /// Time between two readings.
    period: Duration,
    /// The process; `None` if it could not be started.
    _process: Option<Inspection>,
}

/// A state of the cluster or the reason why there is none, with the time of its arrival.
type Arrival = (Result<ClusterState, Failure>, Instant);

/// The newest state; `None` before the first.
#[derive(Default)]
struct Newest {
    state: Mutex<Option<Arrival>>,
    arrived: Condvar,
}

impl Newest {
    fn lock(&self) -> MutexGuard<'_, Option<Arrival>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: Result<ClusterState, Failure>) {
        *self.lock() = Some((state, Instant::now()));
        self.arrived.notify_all();
    }

    /// Returns the state at the time `now`. One that has not been replaced for some periods is no state.
    fn at(&self, now: Instant, period: Duration) -> Option<Result<ClusterState, Failure>> {
        let (state, arrived) = self.lock().clone()?;
        let is_old = state.is_ok() && now.saturating_duration_since(arrived) > SILENT_TIME + 2 * period;
        Some(if is_old { Err(Failure::input("it does not answer")) } else { state })
    }
}

impl ClusterWatch {
    /// Starts to read the cluster of this machine each `period`; `None` if it belongs to none.
    pub fn start(period: Duration) -> Option<ClusterWatch> {
        let period = period.max(PERIOD_MIN);
        is_member().then(|| ClusterWatch::of(Inspection::start(&["watch", &period.as_secs_f64().to_string()]), period))
    }

    fn of(started: Result<Inspection, Failure>, period: Duration) -> ClusterWatch {
        let newest = Arc::new(Newest::default());
        let read = Arc::clone(&newest);
        let process = started.and_then(|mut process| {
            let output = process.output.take().expect("no thread reads the output");
            let thread = thread::Builder::new().name("cluster".into()).stack_size(256 << 10);
            thread.spawn(move || read_all(output, &read)).map_err(|_| Failure::no_thread("to read the cluster"))?;
            Ok(process)
        });
        let process = process.map_err(|failure| newest.set(Err(failure))).ok();
        ClusterWatch { newest, period, _process: process }
    }

    /// Returns the newest state, or the reason why there is none; `None` before the first.
    pub fn newest(&self) -> Option<Result<ClusterState, Failure>> {
        self.newest.at(Instant::now(), self.period)
    }

    /// Waits for the first state, at most for `time`.
    pub fn wait(&self, time: Duration) {
        let waited = self.newest.arrived.wait_timeout_while(self.newest.lock(), time, |state| state.is_none());
        drop(waited);
    }
}

/// Reads states until the process ends or fails.
fn read_all(mut output: BufReader<ChildStdout>, newest: &Newest) {
    loop {
        let state = read_line(&mut output);
        let is_over = state.is_err();
        newest.set(state);
        if is_over {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_folder_follows_the_environment() {
        let of = |variables: &[(&str, &str)]| {
            let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            state_folder_in(value, "alpha")
        };
        assert_eq!(of(&[("HOME", "/home/me")]), Some("/home/me/.local/state/plimsoll/ray/alpha".into()));
        assert_eq!(of(&[("HOME", "/home/me"), ("XDG_STATE_HOME", "/s")]), Some("/s/plimsoll/ray/alpha".into()));
        assert_eq!(of(&[("XDG_STATE_HOME", "/s"), ("PLIMSOLL_RAY_STATE", "/own")]), Some("/own".into()));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn old_states_are_unknown() {
        let newest = Newest::default();
        let at = |newest: &Newest, seconds| newest.at(Instant::now() + Duration::from_secs(seconds), PERIOD_MIN);
        assert_eq!(at(&newest, 60), None);
        newest.set(Ok(ClusterState::default()));
        assert_eq!(at(&newest, 13), Some(Ok(ClusterState::default())));
        assert_eq!(at(&newest, 15).unwrap().unwrap_err().message, "it does not answer");
        // A reason for no state stays.
        newest.set(Err(Failure::input("no Ray")));
        assert_eq!(at(&newest, 60).unwrap().unwrap_err().message, "no Ray");
    }
}
