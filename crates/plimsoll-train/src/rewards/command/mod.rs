//! Rewards that a command of the user, or a function in Python, computes.
//!
//! A long-lived process reads a line for each completion and writes a line with its reward ([`protocol`]). [`process`]
//! starts it, moves bytes through its pipes and ends it; [`exchange`](mod@exchange) sends the completions of a call and
//! collects the rewards. This file restarts a failed process, and repeats the completions without a reward.

mod exchange;
mod pipe;
mod process;
mod protocol;

use super::{Call, Completion};
use exchange::{Problem, exchange};
use plimsoll_core::Failure;
use plimsoll_core::printable::shortened;
use process::RewardProcess;
use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The program that serves a function in Python.
const SERVER: &str = include_str!("reward_server.py");
/// Environment variable with the path of the Python interpreter of functions. `plimsoll.train` sets it.
const PYTHON: &str = "PLIMSOLL_REWARD_PYTHON";
/// Most characters of a command in a message.
const SHOWN_CHARS: usize = 200;

/// The program of a reward.
enum Program {
    /// A command line for `sh`.
    Shell(String),
    /// Arguments of [`SERVER`].
    Python(Vec<String>),
}

impl Program {
    /// Returns the command that starts the program.
    fn command(&self) -> Command {
        let mut command = match self {
            Program::Shell(_) => Command::new("sh"),
            Program::Python(_) => Command::new(interpreter()),
        };
        match self {
            Program::Shell(line) => command.args(["-c", line]),
            Program::Python(arguments) => command.args(["-c", SERVER]).args(arguments),
        };
        command
    }
}

/// Returns the Python interpreter of functions: the one that the environment names, else the one in the folder of this
/// program, else the one in `PATH`.
fn interpreter() -> PathBuf {
    let named = env::var_os(PYTHON).filter(|path| !path.is_empty()).map(PathBuf::from);
    let beside = || Some(env::current_exe().ok()?.parent()?.join("python3")).filter(|path| path.is_file());
    named.or_else(beside).unwrap_or_else(|| "python3".into())
}

/// A reward of a command, with its process.
pub(super) struct CommandReward {
    name: String,
    program: Program,
    timeout: Duration,
    /// `None` before the first call, and after a failure.
    process: Option<RewardProcess>,
    warnings: Vec<String>,
}

impl CommandReward {
    /// Creates the reward of a command for `sh`, without starting it. `timeout` is the longest permitted time until the
    /// next line.
    pub fn new(name: &str, command: &str, timeout: Duration) -> CommandReward {
        CommandReward::of_program(name, Program::Shell(command.to_owned()), timeout)
    }

    /// Creates the reward of a function in Python: `arguments` are those of `reward_server.py`.
    pub fn of_python(name: &str, arguments: &[String], timeout: Duration) -> CommandReward {
        CommandReward::of_program(name, Program::Python(arguments.to_vec()), timeout)
    }

    fn of_program(name: &str, program: Program, timeout: Duration) -> CommandReward {
        let name = shortened(name, SHOWN_CHARS).into_owned();
        CommandReward { name, program, timeout, process: None, warnings: Vec::new() }
    }

    /// Computes the reward of each completion, in order. After a problem that may pass, restarts the process and
    /// repeats the completions without a reward.
    ///
    /// # Errors
    /// The system refuses a process, the process fails without a restart being left, or the caller asked to stop
    /// (exit 4).
    pub fn score(&mut self, completions: &[Completion], call: &mut Call) -> Result<Vec<Option<f64>>, Failure> {
        let mut rewards = Vec::with_capacity(completions.len());
        while rewards.len() < completions.len() {
            let mut process = match self.process.take() {
                Some(process) => process,
                None => self.start()?,
            };
            let problem = match exchange(&mut process, completions, &mut rewards, self.timeout, call.stops) {
                Ok(()) => {
                    self.process = Some(process);
                    break;
                }
                Err(problem) => problem,
            };
            if let Problem::Stop = problem {
                process.end(Duration::ZERO);
                return Err(Failure::stopped(format!("reward {}: the command {problem}", self.name)));
            }
            let report = describe(&problem, process, rewards.len(), completions.len());
            if !problem.may_pass() || call.restarts_left == 0 {
                return Err(self.failure(&problem, &report));
            }
            call.restarts_left -= 1;
            self.warnings.push(format!("reward {}: restarted, because the command {report}", self.name));
        }
        Ok(rewards)
    }

    /// Removes and returns the warnings since the last call.
    pub fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Starts the process.
    ///
    /// # Errors
    /// The system refuses a process.
    fn start(&self) -> Result<RewardProcess, Failure> {
        let mut command = self.program.command();
        RewardProcess::start(&mut command).map_err(|error| {
            let program = command.get_program().display();
            Failure::stopped(format!("reward {}: cannot start {program}: {error}", self.name))
                .hint("check that the program exists, and the limits of processes and memory (ulimit -u, ulimit -v)")
        })
    }

    /// Returns the failure of a call after its last restart.
    fn failure(&self, problem: &Problem, report: &str) -> Failure {
        let is_function = matches!(self.program, Program::Python(_));
        let failure = Failure::stopped(format!("reward {}: the command {report}", self.name));
        let failure = match problem {
            Problem::Unasked { .. } => failure.hint(
                "write exactly one line to stdout for each line of stdin, and everything else to stderr; rewards since \
                 the last restart may belong to other completions",
            ),
            Problem::Silent { .. } => failure.hint("answer each line at once, and flush the output after it"),
            _ if is_function => failure,
            _ => failure.hint("run the command by hand, and give it a line of the form in docs/rewards.md"),
        };
        let part = if is_function { "function" } else { "command" };
        failure.hint(format!("correct the {part}, then continue the run with --resume"))
    }
}

/// Ends a process, and describes its problem with the end of its stderr: "ended (exit status: 1) after 3 of 8
/// completions; …".
fn describe(problem: &Problem, mut process: RewardProcess, done: usize, count: usize) -> String {
    let cause = match (problem, process.end(problem.patience())) {
        (Problem::OutputClosed, Some(status)) => format!("ended ({status})"),
        _ => problem.to_string(),
    };
    let mut report = format!("{cause} after {done} of {count} completions");
    if let Some(expected) = problem.expected() {
        report += &format!(", expected {expected}");
    }
    if let Some(line) = process.incomplete_line() {
        report += &format!("; its last line has no end: {line:?}");
    }
    match process.stderr_lines() {
        [] => report += "; its stderr is empty",
        lines => report += &format!("; its stderr ends with: {}", lines.join(" | ")),
    }
    report
}

#[cfg(test)]
mod tests;
