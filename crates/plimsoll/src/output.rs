//! Terminal output: results go to stdout; errors, notes and progress to stderr. A closed pipe is not an error, but any
//! other failed write to stdout is ([`unwritten`]).
//!
//! Text for people is made [printable](plimsoll_core::printable) here, because it contains names from files and of other
//! machines. JSON and the text that a model generates for another program are printed as they are.

use clap::error::{ContextKind, ContextValue};
use plimsoll_core::printable::{printable_message, printable_text};
use plimsoll_core::{Exit, Failure};
use plimsoll_watch::data_report::TextStyle;
use plimsoll_watch::view::Abilities;
use serde_json::json;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;

/// Prints a result for people to stdout.
pub fn print(text: &str) {
    print_unchanged(&printable_text(text));
}

/// Prints text like [`print()`], and returns whether the reader still takes it.
pub fn print_while_open(text: &str) -> bool {
    print_unchanged_while_open(&printable_text(text))
}

/// Prints JSON like [`print_json`], and returns whether the reader still takes it.
pub fn print_json_while_open(json: &str) -> bool {
    print_unchanged_while_open(&format!("{json}\n"))
}

/// Prints a result for people to stdout that is printable already and may have styles.
pub fn print_styled(text: &str) {
    print_unchanged(text);
}

/// Returns the style of text on stdout: dimmed on a terminal with colors, and ASCII unless the locale is UTF-8.
pub fn text_style() -> TextStyle {
    TextStyle { dims: supports_color(&io::stdout()), unicode: Abilities::of_environment().unicode }
}

fn print_unchanged_while_open(text: &str) -> bool {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(error) => {
            let _ = ignore_closed_pipe(error).map_err(|error| WRITE_ERROR.set(error));
            false
        }
    }
}

/// Prints JSON to stdout, with a line break.
pub fn print_json(json: &str) {
    print_unchanged(&format!("{json}\n"));
}

/// Prints text that a model generated to stdout: printable on a terminal, unchanged elsewhere.
pub fn print_generated(text: &str) {
    if io::stdout().is_terminal() { print(text) } else { print_unchanged(text) }
}

/// First error of a write to stdout, other than a closed pipe.
static WRITE_ERROR: OnceLock<io::Error> = OnceLock::new();

fn print_unchanged(text: &str) {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    // A closed pipe means that the reader has enough.
    if let Err(error) = written.or_else(ignore_closed_pipe) {
        let _ = WRITE_ERROR.set(error);
    }
}

fn ignore_closed_pipe(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) }
}

/// Returns the failure of a command whose output did not reach stdout, as on a full disk; `None` if all did.
pub fn unwritten() -> Option<Failure> {
    let error = WRITE_ERROR.get()?;
    Some(
        Failure::input(format!("standard output: cannot write the result: {error}"))
            .hint("write to another file or disk"),
    )
}

/// Prints the help to stdout, or an error about arguments to stderr.
pub fn print_usage(mut usage: clap::Error) {
    // Clap also suggests hidden commands.
    let suggested = usage.get(ContextKind::SuggestedSubcommand).map(ContextValue::to_string);
    if suggested.is_some_and(|names| names.contains("measure-rates")) {
        usage.remove(ContextKind::SuggestedSubcommand);
    }
    let text = usage.render().to_string();
    let printable: String = text.lines().map(|line| printable_message(line) + "\n").collect();
    // Clap prints in color, and prints arguments as they were typed.
    let _ = if usage.use_stderr() && printable.trim_end() != text.trim_end() {
        io::stderr().write_all(printable.as_bytes())
    } else {
        usage.print()
    };
}

/// Prints a failure to stderr and, with `json`, also as a JSON object to stdout.
pub fn print_failure(failure: &Failure, json: bool) {
    print_error(failure);
    if json {
        let object =
            json!({"error": {"exit": failure.exit as i32, "message": failure.message, "hints": failure.hints}});
        print_json(&object.to_string());
    }
}

/// Prints a failure to stderr only.
pub fn print_error(failure: &Failure) {
    let word = if failure.exit == Exit::Stopped { "stopped" } else { "error" };
    let word = if supports_color(&io::stderr()) { format!("\x1b[1;31m{word}:\x1b[0m") } else { format!("{word}:") };
    let _ = writeln!(io::stderr(), "{word} {failure}");
}

/// Returns whether the user can answer a prompt: both stdin and stderr are terminals.
pub fn is_interactive() -> bool {
    io::stdin().is_terminal() && is_error_terminal()
}

/// Asks the user on the terminal for a number from 1 to `count`, and returns it minus 1; `None` for any other input.
pub fn prompt_choice(count: usize) -> Option<usize> {
    let numbers = if count == 1 { "1".to_owned() } else { format!("1 to {count}") };
    let _ = write!(io::stderr(), "run one of them? {numbers}, or Enter for none: ");
    let mut line = String::new();
    io::stdin().read_line(&mut line).ok()?;
    parse_choice(&line, count)
}

/// Parses a number from 1 to `count`, and returns it minus 1; `None` for any other text.
fn parse_choice(line: &str, count: usize) -> Option<usize> {
    let number: usize = line.trim().parse().ok()?;
    (1..=count).contains(&number).then(|| number - 1)
}

/// Returns whether errors and notes go to a terminal.
pub fn is_error_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Prints a note about a signal to stderr. On a terminal the note leaves the progress line and the echo of the key.
pub fn print_signal_note(note: &str) {
    if is_error_terminal() {
        let _ = writeln!(io::stderr());
    }
    print_note(note);
}

/// Prints a note to stderr.
pub fn print_note(note: &str) {
    let _ = writeln!(io::stderr(), "note: {}", printable_message(note));
}

/// Prints the state of a long command to stderr.
pub fn print_status(status: &str) {
    let _ = writeln!(io::stderr(), "{}", printable_message(status));
}

/// Prints to stderr that a long operation starts, if stderr is a terminal.
pub fn print_progress(operation: &str) {
    if is_error_terminal() {
        let _ = writeln!(io::stderr(), "{} ...", printable_message(operation));
    }
}

/// Returns whether to use colors: the output is a terminal, and neither `NO_COLOR` (no-color.org) nor `TERM=dumb` is
/// set.
fn supports_color(output: &impl IsTerminal) -> bool {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    output.is_terminal() && !plain && !dumb
}

/// Work before a bug report is printed.
static BEFORE_BUG_REPORT: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Sets work to do before a bug report is printed; the first one set is kept. It must not wait for a lock that a
/// panicking thread may hold.
pub fn before_bug_report(work: impl Fn() + Send + Sync + 'static) {
    let _ = BEFORE_BUG_REPORT.set(Box::new(work));
}

/// Makes a panic in any thread print a bug report and end the program with exit code 1.
///
/// Files are written to a temporary name and then renamed, so an abrupt end damages no saved file.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        // A view that covers the terminal would hide the report.
        if let Some(close) = BEFORE_BUG_REPORT.get() {
            close();
        }
        let backtrace = Backtrace::capture();
        let has_backtrace = backtrace.status() == BacktraceStatus::Captured;
        if has_backtrace {
            let _ = writeln!(io::stderr(), "{backtrace}");
        }
        print_error(&panic_failure(panic, has_backtrace));
        std::process::exit(Exit::Bug as i32);
    }));
}

/// Describes a panic as a bug in Plimsoll, with its source location and hints for a report.
fn panic_failure(panic: &PanicHookInfo, has_backtrace: bool) -> Failure {
    let text = panic.payload().downcast_ref::<&str>().copied();
    let message = text.or(panic.payload().downcast_ref::<String>().map(|text| &**text)).unwrap_or("no message");
    let location = panic.location().map(|at| format!(" ({}:{})", at.file(), at.line())).unwrap_or_default();
    let bug = Failure::bug(format!("this is a bug in plimsoll: {message}{location}"));
    let bug = if has_backtrace { bug } else { bug.hint("set RUST_BACKTRACE=1 for a backtrace") };
    bug.hint(concat!("please report it: ", env!("CARGO_PKG_REPOSITORY"), "/issues"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic;
    use std::sync::{Arc, Mutex};

    #[test]
    fn choice_requires_a_listed_number() {
        assert_eq!((parse_choice("2\n", 3), parse_choice(" 1 \n", 1)), (Some(1), Some(0)));
        for line in ["", "\n", "y\n", "0\n", "4\n", "1 2\n", "-1\n"] {
            assert_eq!(parse_choice(line, 3), None, "{line:?}");
        }
    }

    #[test]
    fn panic_reports_location_and_issue_tracker() {
        let seen: Arc<Mutex<Option<Failure>>> = Arc::default();
        let hook_seen = Arc::clone(&seen);
        let previous_hook = panic::take_hook();
        panic::set_hook(Box::new(move |panic| *hook_seen.lock().unwrap() = Some(panic_failure(panic, false))));
        let caught = panic::catch_unwind(|| panic!("tensor {} has no shape", 7));
        panic::set_hook(previous_hook);
        assert!(caught.is_err());
        let bug = seen.lock().unwrap().take().expect("the hook was called");
        assert_eq!(bug.exit as i32, 1);
        let expected = format!("this is a bug in plimsoll: tensor 7 has no shape ({}:", file!());
        assert!(bug.message.starts_with(&expected), "{bug}");
        assert!(bug.hints.iter().any(|hint| hint.starts_with("please report it: https://")), "{bug}");
    }
}
