//! The reading ends of the pipes of a process, which never block.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};

/// Largest number of bytes that one call of [`PipeReader::read`] takes.
const READ_BYTES_MAX: usize = 64 << 10;

/// The reading end of a pipe. Reading returns at once.
pub(super) struct PipeReader<P> {
    /// `None` after the end.
    pipe: Option<P>,
}

impl<P: Read + AsFd> PipeReader<P> {
    /// Takes the reading end of a pipe, whose descriptor must not block.
    pub fn new(pipe: P) -> PipeReader<P> {
        PipeReader { pipe: Some(pipe) }
    }

    /// Returns the descriptor; `None` after the end.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Returns whether all writers have closed the pipe.
    pub fn has_ended(&self) -> bool {
        self.pipe.is_none()
    }

    /// Reads at most 64 KiB that have arrived, and returns how many bytes `take` received.
    pub fn read(&mut self, take: impl FnOnce(&[u8])) -> usize {
        let mut buffer = [0; READ_BYTES_MAX];
        let Some(pipe) = &mut self.pipe else { return 0 };
        match pipe.read(&mut buffer) {
            Ok(count) if count > 0 => {
                take(&buffer[..count]);
                return count;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // After the end, and after an error, nothing more comes.
            Ok(_) | Err(_) => self.pipe = None,
        }
        0
    }
}

/// Bytes cut into lines.
#[derive(Default)]
pub(super) struct Lines {
    complete: VecDeque<Vec<u8>>,
    /// Bytes after the last line break.
    incomplete: Vec<u8>,
}

impl Lines {
    /// Adds bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.incomplete.extend_from_slice(part);
            if self.incomplete.pop_if(|last| *last == b'\n').is_some() {
                self.complete.push_back(std::mem::take(&mut self.incomplete));
            }
        }
    }

    /// Removes and returns the first complete line, without its line break.
    pub fn next_line(&mut self) -> Option<Vec<u8>> {
        self.complete.pop_front()
    }

    /// Returns the bytes after the last line break.
    pub fn incomplete(&self) -> &[u8] {
        &self.incomplete
    }
}

/// The last lines of a text, each shortened. Empty lines do not count. A carriage return ends a line, too, because
/// progress bars write many of them.
#[derive(Default)]
pub(super) struct LastLines {
    lines: VecDeque<String>,
    incomplete: Vec<u8>,
}

impl LastLines {
    /// Number of lines that are kept.
    const COUNT: usize = 20;
    /// Number of bytes that are kept of a line.
    const LINE_BYTES: usize = 300;

    /// Adds bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let has_end = part.ends_with(b"\n") || part.ends_with(b"\r");
            let kept = part.len().min(Self::LINE_BYTES.saturating_sub(self.incomplete.len()));
            self.incomplete.extend_from_slice(&part[..kept]);
            if has_end {
                self.finish();
            }
        }
    }

    /// Ends the last line.
    pub fn finish(&mut self) {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.incomplete)).trim().to_owned();
        if line.is_empty() {
            return;
        }
        if self.lines.len() == Self::COUNT {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// Returns the complete lines.
    pub fn lines(&mut self) -> &[String] {
        self.lines.make_contiguous()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_across_reads() {
        let mut lines = Lines::default();
        ["1", "2\n\n3", "\n", "4"].iter().for_each(|part| lines.push(part.as_bytes()));
        let complete: Vec<_> = std::iter::from_fn(|| lines.next_line()).collect();
        assert_eq!(complete, [b"12".to_vec(), Vec::new(), b"3".to_vec()]);
        assert_eq!(lines.incomplete(), b"4");
    }

    #[test]
    fn last_lines_are_few_and_short() {
        let mut last = LastLines::default();
        (0..1000).for_each(|line| last.push(format!("{line}\r\n\n").as_bytes()));
        last.push("ü".repeat(100_000).as_bytes());
        last.finish();
        let lines = last.lines();
        assert_eq!((lines.len(), &*lines[0], &*lines[18], &*lines[19]), (20, "981", "999", &*"ü".repeat(150)));
    }
}
