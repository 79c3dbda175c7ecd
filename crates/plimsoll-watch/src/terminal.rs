//! Watchers that display a run on standard output: a live terminal line, whole lines, or JSON. All receive the same
//! records. A closed output never stops a run. Lines for people are [printable](plimsoll_core::printable).

use crate::progress::{LONG_STEP_SECONDS, Progress};
use crate::text::clock;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use plimsoll_core::printable::printable_message;
use plimsoll_core::{Event, Record};
use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::Duration;

/// Interval at which a terminal shows the elapsed time of a long step.
const TICK: Duration = Duration::from_secs(1);

/// Receives all events of a run, in order.
pub trait Watcher: Send {
    /// Handles the next event.
    fn observe(&mut self, record: &Record);
}

/// Returns the watcher for standard output. With `json`, it prints JSON lines. Else with `quiet`, it prints only
/// warnings, on standard error. Otherwise it rewrites one line on a terminal, and prints whole lines elsewhere.
pub fn for_stdout(json: bool, quiet: bool) -> Box<dyn Watcher> {
    match () {
        () if json => Box::new(Json(io::stdout())),
        () if quiet => Box::new(Quiet),
        () if io::stdout().is_terminal() => Box::new(Terminal::new(ProgressDrawTarget::stdout())),
        () => Box::new(Lines::new(io::stdout())),
    }
}

/// Returns the watcher for standard error: as that for standard output without flags.
pub fn for_stderr() -> Box<dyn Watcher> {
    if io::stderr().is_terminal() {
        Box::new(Terminal::new(ProgressDrawTarget::stderr()))
    } else {
        Box::new(Lines::new(io::stderr()))
    }
}

/// A watcher that prints only warnings, on standard error.
struct Quiet;

impl Watcher for Quiet {
    fn observe(&mut self, record: &Record) {
        if let Event::Warning { message } = &record.event {
            let _ = writeln!(io::stderr(), "warning: {}", printable_message(message));
        }
    }
}

/// A watcher that shows one line, rewrites it at each step, and prints other events above it. During a long step the
/// line also shows the time since the newest event.
pub struct Terminal {
    bar: ProgressBar,
    progress: Progress,
}

impl Terminal {
    /// Creates a watcher that draws on `target`, such as standard output.
    pub fn new(target: ProgressDrawTarget) -> Terminal {
        let bar = ProgressBar::with_draw_target(Some(0), target);
        let style = ProgressStyle::with_template("{wide_msg}{step_time}").expect("a template of our own");
        bar.set_style(style.with_key("step_time", write_step_time));
        let shown = bar.downgrade();
        // Without this thread, the time is updated at events only.
        let _ = thread::Builder::new().name("progress".into()).stack_size(128 << 10).spawn(move || {
            while let Some(bar) = shown.upgrade().filter(|bar| !bar.is_finished()) {
                if bar.elapsed().as_secs_f64() >= LONG_STEP_SECONDS {
                    bar.tick();
                }
                drop(bar);
                thread::sleep(TICK);
            }
        });
        Terminal { bar, progress: Progress::default() }
    }
}

/// Writes the time since the newest event, if it is long.
fn write_step_time(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    let seconds = state.elapsed().as_secs_f64();
    if seconds >= LONG_STEP_SECONDS {
        let _ = write!(out, "  next step: {}", clock(seconds));
    }
}

impl Watcher for Terminal {
    fn observe(&mut self, record: &Record) {
        let line = self.progress.update(&record.event);
        self.bar.reset_elapsed();
        match (&record.event, line) {
            (Event::End { .. }, _) => {
                let (done, steps) = self.progress.steps_done_and_total();
                if steps > 0 && done > 0 {
                    self.bar.finish();
                } else {
                    self.bar.finish_and_clear();
                }
            }
            (Event::Step { .. }, _) | (_, None) => self.bar.set_message(self.progress.line()),
            (event, Some(line)) => {
                self.bar.println(printable_message(&line));
                if matches!(event, Event::Start { .. }) {
                    self.bar.set_message(self.progress.line());
                }
            }
        }
    }
}

/// A watcher that prints a line for each event for which [`Progress::update`] returns one. Most steps have none.
pub struct Lines<W> {
    out: W,
    progress: Progress,
}

impl<W: Write + Send> Lines<W> {
    /// Creates a watcher that writes to `out`.
    pub fn new(out: W) -> Lines<W> {
        Lines { out, progress: Progress::default() }
    }
}

impl<W: Write + Send> Watcher for Lines<W> {
    fn observe(&mut self, record: &Record) {
        if let Some(line) = self.progress.update(&record.event) {
            let line = printable_message(&line) + "\n";
            let _ = self.out.write_all(line.as_bytes()).and_then(|()| self.out.flush());
        }
    }
}

/// A watcher that prints each record as a JSON object on its own line, as in `events.jsonl`.
pub struct Json<W>(pub W);

impl<W: Write + Send> Watcher for Json<W> {
    fn observe(&mut self, record: &Record) {
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

    const FIRST: &str = "1/2  loss 1.2346  rate 1.9e-3  51.2 k tok/s  38 % of peak  0:00 left  40.00 MiB on cpu";
    const SECOND: &str = "2/2  loss 1.2346  rate 1.9e-3  51.2 k tok/s  38 % of peak  0:00 left  40.00 MiB on cpu";

    #[test]
    fn pipe_receives_whole_lines() {
        let mut lines = Lines::new(Vec::new());
        run().iter().for_each(|record| lines.observe(record));
        let text = String::from_utf8(lines.out).unwrap();
        assert_eq!(text, format!("{FIRST}\nwarning: the disk is slow\n{SECOND}\n"));
    }

    #[test]
    fn terminal_prints_events_above_progress_line() {
        let screen = InMemoryTerm::new(10, 100);
        let mut terminal = Terminal::new(ProgressDrawTarget::term_like(Box::new(screen.clone())));
        run().iter().for_each(|record| terminal.observe(record));
        assert_eq!(screen.contents(), format!("warning: the disk is slow\n{SECOND}"));
    }

    #[test]
    fn event_text_reaches_no_terminal_raw() {
        let message = format!("tensor x\u{1b}]0;t\u{7}\u{202e}\nerror: {} is odd", "n".repeat(70_000));
        let record = Record { version: EVENTS_VERSION, time: 0.0, event: Event::Warning { message } };
        let shown = [r"warning: tensor x\u{1b}]0;t\u{7}\u{202e}\nerror: nn", "nn is odd"];
        let mut lines = Lines::new(Vec::new());
        lines.observe(&record);
        let text = String::from_utf8(lines.out).unwrap();
        assert!(text.starts_with(shown[0]) && text.trim_end().ends_with(shown[1]) && text.len() < 400, "{text}");
        let screen = InMemoryTerm::new(10, 500);
        Terminal::new(ProgressDrawTarget::term_like(Box::new(screen.clone()))).observe(&record);
        assert!(screen.contents().starts_with(shown[0]), "{}", screen.contents());
    }

    #[test]
    fn json_output_is_exactly_all_records() {
        let mut json = Json(Vec::new());
        run().iter().for_each(|record| json.observe(record));
        let text = String::from_utf8(json.0).unwrap();
        let read: Vec<Record> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, run());
    }

    #[test]
    fn closed_output_does_not_stop_the_run() {
        struct ClosedOutput;
        impl Write for ClosedOutput {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let mut lines = Lines::new(ClosedOutput);
        let mut json = Json(ClosedOutput);
        run().iter().for_each(|record| {
            lines.observe(record);
            json.observe(record);
        });
    }
}
