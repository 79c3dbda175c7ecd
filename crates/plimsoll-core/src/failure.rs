//! [`Failure`]: the message, the hints and the exit code that the user sees when a command fails.
//!
//! Each library has its own `thiserror` enum with the fields that its message needs, and converts it by
//! `impl From<ItsError> for Failure`. The binary only prints the `Failure`.

use crate::printable::{printable_line, printable_message};
use std::{fmt, io};

/// Returns whether an error of the operating system says that a file cannot grow: the disk is full, a quota is used up,
/// or the process has reached its limit of the file size (`ulimit -f`).
pub fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}

/// The outcome of a command. The discriminant is the exit code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command completed.
    Done = 0,
    /// A bug in Plimsoll.
    Bug = 1,
    /// Wrong input by the user.
    Input = 2,
    /// The run does not fit under the load line.
    DoesNotFit = 3,
    /// The run stopped early; `--resume` continues it.
    Stopped = 4,
}

/// A failure as the user sees it. The message is short, lower-case, and names the cause and the place. Each hint is one
/// line with an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    /// The cause and the place of the failure.
    pub message: String,
    /// Actions that remedy the failure, one line each; empty if none is known.
    pub hints: Vec<String>,
}

impl Failure {
    /// Creates a failure for wrong input (exit 2), without hints.
    pub fn input(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Input, message: message.into(), hints: Vec::new() }
    }

    /// Creates a failure for a bug in Plimsoll (exit 1), without hints.
    pub fn bug(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Bug, message: message.into(), hints: Vec::new() }
    }

    /// Creates a failure for a run that does not fit under a load line (exit 3), without hints.
    pub fn does_not_fit(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::DoesNotFit, message: message.into(), hints: Vec::new() }
    }

    /// Creates a failure for a run that stopped early and can be resumed (exit 4), without hints.
    pub fn stopped(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Stopped, message: message.into(), hints: Vec::new() }
    }

    /// Creates a failure for a thread that the system refuses (exit 2). `work` is its work, such as `to read the data`.
    pub fn no_thread(work: &str) -> Failure {
        Failure::input(format!("the system refuses a thread {work}"))
            .hint("raise the limit of threads or memory (ulimit -u, ulimit -v, or those of the container)")
            .hint("use fewer threads: --set run.threads=1")
    }

    /// Adds a hint and returns the failure.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hints.push(hint.into());
        self
    }
}

/// Formats a failure for a terminal or a log, where it is [printable](crate::printable). `message` and `hints`
/// themselves stay as they are.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable_message(&self.message))?;
        for hint in &self.hints {
            // A hint may contain a command to copy, so long words stay whole.
            write!(f, "\n  hint: {}", printable_line(hint))?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}
