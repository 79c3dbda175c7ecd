//! One attempt at the completions of a call: requests to a process, and its replies.

use super::super::Completion;
use super::process::{RewardProcess, shown};
use super::protocol::{parse_reply, request_line};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest time until `stop` is checked again.
const STOP_POLL: Duration = Duration::from_millis(50);
/// Time after which a process that has closed its stdin counts as failed.
const CLOSED_INPUT_GRACE: Duration = Duration::from_secs(1);
/// Time in which a process that has closed its stdout may end, for its exit status.
const EXIT_PATIENCE: Duration = Duration::from_millis(500);
/// Number of bytes at which a line is too long.
const LINE_BYTES_MAX: usize = 1 << 20;

/// The reason for which a process ends before it has replied to all completions. The text follows "the command".
#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    /// The caller asked to stop.
    #[error("was stopped before it replied to all completions")]
    Stop,
    /// The process has exited, or closed its stdout.
    #[error("closed its stdout")]
    OutputClosed,
    /// The process has closed its stdin, and neither exits nor replies.
    #[error("closed its stdin")]
    InputClosed,
    /// No line came in time.
    #[error("wrote no line for {} s", .timeout.as_secs_f64())]
    Silent {
        /// Longest permitted time.
        timeout: Duration,
    },
    /// A line is no reply.
    #[error("wrote the line {line:?}")]
    Reply {
        /// The line, shortened.
        line: String,
    },
    /// A line has more than [`LINE_BYTES_MAX`].
    #[error("wrote a line of more than 1 MiB: {line:?}")]
    LongLine {
        /// The line, shortened.
        line: String,
    },
    /// A line came without a request.
    #[error("wrote the line {line:?} without a request")]
    Unasked {
        /// The line, shortened.
        line: String,
    },
    /// The system cannot wait for the pipes.
    #[error("cannot be waited for: {0}")]
    Wait(io::Error),
}

impl Problem {
    /// Returns whether another attempt may succeed. After a line without a request it is unknown to which completions
    /// the earlier lines belong.
    pub fn may_pass(&self) -> bool {
        !matches!(self, Problem::Stop | Problem::Unasked { .. })
    }

    /// Returns the description of a valid line; `None` if the problem is another one.
    pub fn expected(&self) -> Option<&'static str> {
        let is_reply = matches!(self, Problem::Reply { .. });
        is_reply.then_some("a finite number, null, or an object with one of them as \"reward\"")
    }

    /// Returns the time in which the process may still exit on its own.
    pub fn patience(&self) -> Duration {
        if matches!(self, Problem::OutputClosed) { EXIT_PATIENCE } else { Duration::ZERO }
    }
}

/// Sends the completions that have no reward yet to a process, and adds their rewards in order.
///
/// # Errors
/// The first problem. The rewards before it have been added.
pub(super) fn exchange(
    process: &mut RewardProcess,
    completions: &[Completion],
    rewards: &mut Vec<Option<f64>>,
    timeout: Duration,
    stops: &[&AtomicBool],
) -> Result<(), Problem> {
    let mut requests = completions[rewards.len()..].iter();
    // Number of rewards when all requests that were sent whole have a reply.
    let mut asked = rewards.len();
    let mut is_sending = false;
    let (mut last_line, mut input_was_open) = (Instant::now(), true);
    // Lines of earlier calls, or written at the start.
    let mut limit = Duration::ZERO;
    loop {
        process.transfer(limit).map_err(Problem::Wait)?;
        if is_sending && process.is_sent() {
            (asked, is_sending) = (asked + 1, false);
        }
        while let Some(line) = process.next_line() {
            if rewards.len() == asked {
                return Err(Problem::Unasked { line: shown(&line) });
            }
            rewards.push(parse_reply(&line).ok_or_else(|| Problem::Reply { line: shown(&line) })?);
            last_line = Instant::now();
        }
        if let Some(line) = process.incomplete_line() {
            match process.incomplete_bytes() {
                _ if rewards.len() == asked && !is_sending => return Err(Problem::Unasked { line }),
                LINE_BYTES_MAX.. => return Err(Problem::LongLine { line }),
                _ => {}
            }
        }
        if rewards.len() == completions.len() {
            return Ok(());
        }
        if stops.iter().any(|stop| stop.load(Ordering::Relaxed)) {
            return Err(Problem::Stop);
        }
        if process.has_closed_output() {
            return Err(Problem::OutputClosed);
        }
        if process.has_closed_input() && input_was_open {
            (last_line, input_was_open) = (Instant::now(), false);
        }
        let (patience, problem) = match input_was_open {
            true => (timeout, Problem::Silent { timeout }),
            false => (timeout.min(CLOSED_INPUT_GRACE), Problem::InputClosed),
        };
        let Some(rest) = patience.checked_sub(last_line.elapsed()).filter(|rest| !rest.is_zero()) else {
            return Err(problem);
        };
        if !is_sending && let Some(completion) = requests.next() {
            process.send(request_line(completion));
            is_sending = true;
        }
        limit = rest.min(STOP_POLL);
    }
}
