//! Who draws a run: a terminal, whole lines, or JSON. All see the same records and none knows who
//! makes them. A reader who has gone away never stops a run.

use crate::progress::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use plimsoll_core::{Event, Record};
use std::io::{self, IsTerminal, Write};

/// Sees all that happens in a run, in order.
pub trait Watcher: Send {
    /// Something happened.
    fn see(&mut self, record: &Record);
}

/// The watcher for standard output: nothing when `quiet`, JSON lines for programs, else one line
/// that is rewritten on a terminal and whole lines anywhere else.
pub fn for_stdout(json: bool, quiet: bool) -> Box<dyn Watcher> {
    match () {
        () if json => Box::new(Json(io::stdout())),
        () if quiet => Box::new(Quiet),
        () if io::stdout().is_terminal() => Box::new(Terminal::new(ProgressDrawTarget::stdout())),
        () => Box::new(Lines::new(io::stdout())),
    }
}

/// Shows warnings alone, on standard error.
struct Quiet;

impl Watcher for Quiet {
    fn see(&mut self, record: &Record) {
        if let Event::Warning { message } = &record.event {
            let _ = writeln!(io::stderr(), "warning: {message}");
        }
    }
}

/// One line at the bottom that is rewritten each step; what stays stands above it.
pub struct Terminal {
    bar: ProgressBar,
    progress: Progress,
}

impl Terminal {
    /// Draws on the target.
    pub fn new(target: ProgressDrawTarget) -> Terminal {
        let bar = ProgressBar::with_draw_target(Some(0), target);
        bar.set_style(ProgressStyle::with_template("{wide_msg}").expect("a template of our own"));
        Terminal { bar, progress: Progress::default() }
    }
}

impl Watcher for Terminal {
    fn see(&mut self, record: &Record) {
        let told = self.progress.see(&record.event);
        match (&record.event, told) {
            (Event::End { .. }, _) => {
                let (done, steps) = self.progress.place();
                if steps > 0 && done > 0 {
                    self.bar.finish();
                } else {
                    self.bar.finish_and_clear();
                }
            }
            (Event::Step { .. }, _) | (_, None) => self.bar.set_message(self.progress.line()),
            (_, Some(line)) => self.bar.println(line),
        }
    }
}

/// One whole line at a time, as [`Progress::see`] finds them worth it.
pub struct Lines<W> {
    out: W,
    progress: Progress,
}

impl<W: Write + Send> Lines<W> {
    /// Writes to `out`.
    pub fn new(out: W) -> Lines<W> {
        Lines { out, progress: Progress::default() }
    }
}

impl<W: Write + Send> Watcher for Lines<W> {
    fn see(&mut self, record: &Record) {
        if let Some(line) = self.progress.see(&record.event) {
            let _ = self.out.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.out.flush());
        }
    }
}

/// Each record as an object on a line of its own, as in `events.jsonl`.
pub struct Json<W>(pub W);

impl<W: Write + Send> Watcher for Json<W> {
    fn see(&mut self, record: &Record) {
        let line = serde_json::to_string(record).expect("records are plain data") + "\n";
        let _ = self.0.write_all(line.as_bytes()).and_then(|()| self.0.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::tests::{start, step};
    use indicatif::InMemoryTerm;
    use plimsoll_core::EVENTS_VERSION;

    fn run() -> Vec<Record> {
        let warning = Event::Warning { message: "the disk is slow".into() };
        let end = Event::End { status: "done".into(), step: 2 };
        let events = [start(2), step(1, 0.08), warning, step(2, 0.08), end];
        events.map(|event| Record { version: EVENTS_VERSION, time: 0.0, event }).to_vec()
    }

    const FIRST: &str = "1/2  loss 1.2346  rate 1.9e-3  51.2 k tok/s  38 % of peak  40.00 MiB  0:00 left";
    const SECOND: &str = "2/2  loss 1.2346  rate 1.9e-3  51.2 k tok/s  38 % of peak  40.00 MiB  0:00 left";

    #[test]
    fn somebody_without_a_terminal_gets_whole_lines() {
        let mut lines = Lines::new(Vec::new());
        run().iter().for_each(|record| lines.see(record));
        let text = String::from_utf8(lines.out).unwrap();
        assert_eq!(text, format!("{FIRST}\nwarning: the disk is slow\n{SECOND}\n"));
    }

    #[test]
    fn a_terminal_keeps_what_stays_above_the_one_line_that_is_rewritten() {
        let screen = InMemoryTerm::new(10, 100);
        let mut terminal = Terminal::new(ProgressDrawTarget::term_like(Box::new(screen.clone())));
        run().iter().for_each(|record| terminal.see(record));
        assert_eq!(screen.contents(), format!("warning: the disk is slow\n{SECOND}"));
    }

    #[test]
    fn a_program_gets_every_record_and_nothing_else() {
        let mut json = Json(Vec::new());
        run().iter().for_each(|record| json.see(record));
        let text = String::from_utf8(json.0).unwrap();
        let read: Vec<Record> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, run());
    }

    #[test]
    fn a_reader_who_has_gone_away_does_not_stop_the_run() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let mut lines = Lines::new(Gone);
        let mut json = Json(Gone);
        run().iter().for_each(|record| {
            lines.see(record);
            json.see(record);
        });
    }
}
