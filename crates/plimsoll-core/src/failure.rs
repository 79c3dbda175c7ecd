//! What the user sees when something fails: one message, a hint, and the exit code.
//!
//! Libraries have their own `thiserror` enums, with the fields that a message needs; each says how
//! it becomes a `Failure` (`impl From<TheirError> for Failure`), and the binary only prints it.

use std::fmt;

/// Why the program ends; the number is its exit code (see the book, "exit codes").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// All was done.
    Done = 0,
    /// A bug of ours.
    Bug = 1,
    /// The user's input is wrong.
    Input = 2,
    /// It does not fit under the load line.
    DoesNotFit = 3,
    /// Stopped early; `--resume` goes on.
    Stopped = 4,
}

/// A failure as the user sees it. Messages are short and lower-case and name what and where; the
/// hints say what to do, one line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    /// What is wrong, and where.
    pub message: String,
    /// What to do about it.
    pub hints: Vec<String>,
}

impl Failure {
    /// The user's input is wrong (exit 2).
    pub fn input(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Input, message: message.into(), hints: Vec::new() }
    }

    /// A bug of ours (exit 1).
    pub fn bug(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Bug, message: message.into(), hints: Vec::new() }
    }

    /// Something the run needs does not fit (exit 3).
    pub fn does_not_fit(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::DoesNotFit, message: message.into(), hints: Vec::new() }
    }

    /// Stopped early, resumable (exit 4).
    pub fn stopped(message: impl Into<String>) -> Failure {
        Failure { exit: Exit::Stopped, message: message.into(), hints: Vec::new() }
    }

    /// The same failure with one more hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hints.push(hint.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        for hint in &self.hints {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}
