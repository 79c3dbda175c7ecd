//! What is printed, and where: answers to stdout, failures to stderr. A reader who has gone away is
//! no failure.

use plimsoll_core::{Exit, Failure};
use serde_json::json;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::panic::PanicHookInfo;

/// Prints an answer.
pub fn answer(text: &str) {
    // A closed pipe means that nobody wants to read on; there is nobody to tell, either.
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints a failure for a person to stderr and, where a program listens, as an object to stdout.
pub fn failure(failure: &Failure, json: bool) {
    complain(failure);
    if json {
        let object =
            json!({"error": {"exit": failure.exit as i32, "message": failure.message, "hints": failure.hints}});
        answer(&format!("{object}\n"));
    }
}

/// Prints a failure to stderr alone.
pub fn complain(failure: &Failure) {
    let word = if failure.exit == Exit::Stopped { "stopped" } else { "error" };
    let word = if colours(&io::stderr()) { format!("\x1b[1;31m{word}:\x1b[0m") } else { format!("{word}:") };
    let _ = writeln!(io::stderr(), "{word} {failure}");
}

/// Whether a person can be asked: one who reads what is complained, and types.
pub fn is_somebody_there() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks which of so many, counted from 1, is to be taken; answers with its place. Nothing is taken unless it is named.
pub fn ask_which(count: usize) -> Option<usize> {
    let all = if count == 1 { "1".to_owned() } else { format!("1 to {count}") };
    let _ = write!(io::stderr(), "take one? {all}, or enter for none: ");
    let mut line = String::new();
    io::stdin().read_line(&mut line).ok()?;
    chosen(&line, count)
}

fn chosen(line: &str, count: usize) -> Option<usize> {
    let number: usize = line.trim().parse().ok()?;
    (1..=count).contains(&number).then(|| number - 1)
}

/// Says on stderr what should be known beside the answer.
pub fn note(what: &str) {
    let _ = writeln!(io::stderr(), "note: {what}");
}

/// Tells a person what takes a while.
pub fn stage(what: &str) {
    if io::stderr().is_terminal() {
        let _ = writeln!(io::stderr(), "{what} ...");
    }
}

/// Whether the output takes colours: a terminal that is not told otherwise (no-color.org).
fn colours(output: &impl IsTerminal) -> bool {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    output.is_terminal() && !plain && !dumb
}

/// From now on a panic, in any thread, says that it is a bug of ours and ends the program with exit
/// code 1. Files are written aside and renamed, so ending anywhere loses nothing that was saved.
pub fn own_our_bugs() {
    std::panic::set_hook(Box::new(|panic| {
        let backtrace = Backtrace::capture();
        let traced = backtrace.status() == BacktraceStatus::Captured;
        if traced {
            let _ = writeln!(io::stderr(), "{backtrace}");
        }
        complain(&our_bug(panic, traced));
        std::process::exit(Exit::Bug as i32);
    }));
}

/// What a panic is called towards the user.
fn our_bug(panic: &PanicHookInfo, traced: bool) -> Failure {
    let text = panic.payload().downcast_ref::<&str>().copied();
    let message = text.or(panic.payload().downcast_ref::<String>().map(|text| &**text)).unwrap_or("no message");
    let place = panic.location().map(|place| format!(" ({}:{})", place.file(), place.line())).unwrap_or_default();
    let bug = Failure::bug(format!("this is a bug in plimsoll: {message}{place}"));
    let bug = if traced { bug } else { bug.hint("RUST_BACKTRACE=1 shows where it comes from") };
    bug.hint(concat!("please report it: ", env!("CARGO_PKG_REPOSITORY"), "/issues"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic;
    use std::sync::{Arc, Mutex};

    #[test]
    fn what_is_not_named_is_not_taken() {
        assert_eq!((chosen("2\n", 3), chosen(" 1 \n", 1)), (Some(1), Some(0)));
        for line in ["", "\n", "y\n", "0\n", "4\n", "1 2\n", "-1\n"] {
            assert_eq!(chosen(line, 3), None, "{line:?}");
        }
    }

    #[test]
    fn a_panic_is_owned_as_our_bug_with_its_place_and_where_to_report_it() {
        let seen: Arc<Mutex<Option<Failure>>> = Arc::default();
        let sees = Arc::clone(&seen);
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| *sees.lock().unwrap() = Some(our_bug(panic, false))));
        let caught = panic::catch_unwind(|| panic!("tensor {} has no shape", 7));
        panic::set_hook(before);
        assert!(caught.is_err());
        let bug = seen.lock().unwrap().take().expect("the hook was called");
        assert_eq!(bug.exit as i32, 1);
        let place = format!("this is a bug in plimsoll: tensor 7 has no shape ({}:", file!());
        assert!(bug.message.starts_with(&place), "{bug}");
        assert!(bug.hints.iter().any(|hint| hint.starts_with("please report it: https://")), "{bug}");
    }
}
