//! Signals that end a run early.
//!
//! - First SIGINT, SIGTERM or SIGHUP: a note says so at once; the run finishes its step, saves a checkpoint and ends.
//! - Second SIGINT: the program ends immediately, with a message; the newest checkpoint stays valid.
//! - End of standard input, with `--stop-on-eof`: like the first signal, without a note.
//!
//! A file that reaches the limit of `ulimit -f` ends no run by itself: the write fails with an error.

use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::session::control;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag::{register, register_conditional_shutdown};
use signal_hook::iterator::Signals;
use signal_hook::low_level::exit;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Flag that is true once the run has to finish its step, save and end.
pub type StopFlag = Arc<AtomicBool>;

/// The texts about a signal.
pub struct SignalTexts {
    /// The note after the first signal: what is finished before the end. `None` prints none.
    pub note: Option<String>,
    /// The message with which a second SIGINT ends the program, and the way to resume.
    pub ended: Failure,
}

impl SignalTexts {
    /// Creates the texts of a command that finishes `work` after the first signal. With `quiet`, the note is printed on
    /// a terminal only.
    pub fn new(work: &str, quiet: bool) -> SignalTexts {
        let note = format!("stopping: {work} first; a second Ctrl-C ends at once");
        SignalTexts {
            note: (!quiet || output::is_error_terminal()).then_some(note),
            ended: Failure::stopped("at once, by a second Ctrl-C"),
        }
    }
}

/// Installs handlers for SIGINT, SIGTERM and SIGHUP and returns the flag that they set. A second SIGINT ends the
/// program at once.
///
/// # Errors
/// The system refuses to install a handler or to start a thread.
pub fn install(texts: SignalTexts) -> Result<StopFlag, Failure> {
    register_handlers(texts).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => Failure::no_thread("to watch for signals"),
        _ => Failure::bug(format!("signals cannot be caught: {error}")),
    })
}

fn register_handlers(texts: SignalTexts) -> io::Result<StopFlag> {
    let (stop, ending) = (StopFlag::default(), StopFlag::default());
    // If the message of the second SIGINT cannot be written, a third one ends the program.
    register_conditional_shutdown(SIGINT, Exit::Stopped as i32, Arc::clone(&ending))?;
    let all = [SIGINT, SIGTERM, SIGHUP];
    for signal in all {
        register(signal, Arc::clone(&stop))?;
    }
    let mut signals = Signals::new(all)?;
    let thread = thread::Builder::new().name("signals".into()).stack_size(128 << 10);
    thread.spawn(move || {
        let SignalTexts { mut note, ended } = texts;
        let mut interrupted = false;
        for signal in signals.forever() {
            if signal == SIGINT && interrupted {
                ending.store(true, Ordering::Relaxed);
                end_at_once(&ended);
            }
            interrupted |= signal == SIGINT;
            if let Some(note) = note.take() {
                output::print_signal_note(&note);
            }
        }
    })?;
    Ok(stop)
}

/// Ends the program without finishing its step.
fn end_at_once(ended: &Failure) -> ! {
    control::remove_open_sockets();
    output::print_error(ended);
    exit(ended.exit as i32)
}

/// Sets the flag at the end of standard input, too. A parent process that holds the other end of the pipe can stop the
/// run this way, and the run also stops if that process dies.
///
/// # Errors
/// The system refuses to start a thread.
pub fn stop_on_eof(stop: &StopFlag) -> Result<(), Failure> {
    let stop = Arc::clone(stop);
    let thread = thread::Builder::new().name("stdin".into()).stack_size(128 << 10);
    let started = thread.spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        stop.store(true, Ordering::Relaxed);
    });
    started.map(drop).map_err(|_| Failure::no_thread("to read standard input"))
}

/// Keeps the program alive when a file reaches the limit of `ulimit -f`. The write then fails with an error, which names
/// the file.
pub fn fail_writes_at_file_limit() {
    // If the handler cannot be installed, the signal ends the program, as without it.
    let _ = register(SIGXFSZ, StopFlag::default());
}
