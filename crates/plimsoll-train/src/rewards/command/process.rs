//! The process of a command: its start, its pipes and its end.
//!
//! One thread moves the bytes of all three pipes, and waits with `poll`. No pipe blocks, so neither full pipes nor a
//! process that left the group can make Plimsoll hang.

use super::pipe::{LastLines, Lines, PipeReader};
use plimsoll_core::printable::shortened;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Time after SIGTERM until SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(1);
/// Time in which an unused process may end on its own after its input has ended.
const DROP_PATIENCE: Duration = Duration::from_millis(500);
/// Interval at which the end of a process is checked.
const END_POLL: Duration = Duration::from_millis(5);
/// Largest number of reads of the stderr of a process that has ended.
const LAST_READS_MAX: usize = 16;
/// Most characters of a line in a message.
const SHOWN_CHARS: usize = 120;

/// A running command, the first process of a group of its own.
pub(super) struct RewardProcess {
    child: Child,
    /// `None` after the process, or [`RewardProcess::end`], has closed it.
    input: Option<ChildStdin>,
    /// Bytes of a request that the pipe has not taken yet.
    unsent: Vec<u8>,
    output: PipeReader<ChildStdout>,
    output_lines: Lines,
    errors: PipeReader<ChildStderr>,
    error_lines: LastLines,
    has_ended: bool,
}

impl RewardProcess {
    /// Starts a command in the current directory and in a process group of its own.
    ///
    /// # Errors
    /// The system refuses a process.
    pub fn start(command: &mut Command) -> io::Result<RewardProcess> {
        let mut child = command
            // Python would otherwise hold replies back until it has some kilobytes of them.
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let process = RewardProcess {
            input: child.stdin.take(),
            unsent: Vec::new(),
            output: PipeReader::new(child.stdout.take().expect("stdout is a pipe")),
            output_lines: Lines::default(),
            errors: PipeReader::new(child.stderr.take().expect("stderr is a pipe")),
            error_lines: LastLines::default(),
            has_ended: false,
            child,
        };
        let pipes = [process.input.as_ref().map(AsFd::as_fd), process.output.descriptor(), process.errors.descriptor()];
        pipes.into_iter().flatten().try_for_each(|pipe| ioctl_fionbio(pipe, true))?;
        Ok(process)
    }

    /// Gives the process a line to read. The previous one must be [sent](RewardProcess::is_sent).
    pub fn send(&mut self, line: Vec<u8>) {
        self.unsent = line;
    }

    /// Returns whether the pipe has taken the whole line of [`RewardProcess::send`].
    pub fn is_sent(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Returns whether the process has closed its stdin. This is noticed when a line is sent.
    pub fn has_closed_input(&self) -> bool {
        self.input.is_none()
    }

    /// Returns whether the process has closed its stdout, and all of it has been read.
    pub fn has_closed_output(&self) -> bool {
        self.output.has_ended()
    }

    /// Removes and returns the next line of stdout that [`RewardProcess::transfer`] has read.
    pub fn next_line(&mut self) -> Option<Vec<u8>> {
        self.output_lines.next_line()
    }

    /// Returns the number of bytes of stdout after its last line break.
    pub fn incomplete_bytes(&self) -> usize {
        self.output_lines.incomplete().len()
    }

    /// Returns the text of stdout after its last line break, shortened; `None` if it is empty.
    pub fn incomplete_line(&self) -> Option<String> {
        let line = self.output_lines.incomplete();
        (!line.is_empty()).then(|| shown(line))
    }

    /// Returns the last lines of stderr.
    pub fn stderr_lines(&mut self) -> &[String] {
        self.error_lines.lines()
    }

    /// Waits until a pipe is ready, at most `limit`. Then reads and writes what is possible at once.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn transfer(&mut self, limit: Duration) -> io::Result<()> {
        self.wait(limit)?;
        self.read();
        self.write();
        Ok(())
    }

    fn wait(&self, limit: Duration) -> io::Result<()> {
        let (output, errors) = (self.output.descriptor(), self.errors.descriptor());
        let mut pipes: Vec<PollFd> =
            [output, errors].into_iter().flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let input = self.input.as_ref().filter(|_| !self.is_sent());
        pipes.extend(input.map(|input| PollFd::from_borrowed_fd(input.as_fd(), PollFlags::OUT)));
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        match poll(&mut pipes, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&mut self) {
        self.output.read(|bytes| self.output_lines.push(bytes));
        self.errors.read(|bytes| self.error_lines.push(bytes));
    }

    fn write(&mut self) {
        let Some(input) = &mut self.input else { return };
        let mut sent = 0;
        while sent < self.unsent.len() {
            match input.write(&self.unsent[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.input = None;
                    return;
                }
            }
        }
        self.unsent.drain(..sent);
    }

    /// Ends all processes of the group: closes stdin, waits `patience`, then sends SIGTERM, and SIGKILL a second later.
    /// Returns the exit status if the process has ended on its own. The second call does nothing.
    pub fn end(&mut self, patience: Duration) -> Option<ExitStatus> {
        if std::mem::replace(&mut self.has_ended, true) {
            return None;
        }
        self.input = None;
        self.await_end(patience, false);
        let ended_alone = self.has_exited();
        // The id of the group stays reserved until `wait`: these signals cannot reach other processes.
        let group = Pid::from_child(&self.child);
        let _ = kill_process_group(group, Signal::TERM);
        self.await_end(TERM_GRACE, true);
        let _ = kill_process_group(group, Signal::KILL);
        let status = self.child.wait().ok();
        for _ in 0..LAST_READS_MAX {
            self.errors.read(|bytes| self.error_lines.push(bytes));
        }
        self.error_lines.finish();
        status.filter(|_| ended_alone)
    }

    /// Waits until the process has exited and, if `with_output`, all processes have closed stdout; at most `limit`.
    /// Discards the output.
    fn await_end(&mut self, limit: Duration, with_output: bool) {
        let begin = Instant::now();
        while begin.elapsed() < limit && !(self.has_exited() && (!with_output || self.output.has_ended())) {
            self.errors.read(|bytes| self.error_lines.push(bytes));
            if self.output.read(|_| ()) == 0 {
                thread::sleep(END_POLL);
            }
        }
    }

    /// Returns whether the process has exited, without releasing its id.
    fn has_exited(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error says that the system has already released it.
        waitid(WaitId::Pid(Pid::from_child(&self.child)), options).map_or(true, |status| status.is_some())
    }
}

impl Drop for RewardProcess {
    fn drop(&mut self) {
        self.end(DROP_PATIENCE);
    }
}

/// Returns a line as text, shortened.
pub(super) fn shown(line: &[u8]) -> String {
    shortened(&String::from_utf8_lossy(line), SHOWN_CHARS).into_owned()
}
