//! Signals that end a run early.
//!
//! - First SIGINT, SIGTERM or SIGHUP: a note says so at once; the run finishes its step, saves a checkpoint and ends.
//! - Second SIGINT: the program ends immediately, and its message names the newest checkpoint, which stays valid.
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

/// The reaction of a command to signals. The thread that waits for signals calls these functions.
pub trait OnSignal: Send + 'static {
    /// Describes the work that the command finishes after the first signal, such as `step 13, about 40 s`. May ask
    /// other processes of the command to stop. `None` if no note may be printed, because a view covers the terminal.
    fn finish(&self) -> Option<String>;

    /// Ends other processes of the command and removes its temporary files, before a second SIGINT ends the program.
    /// Returns the way to continue later, as a hint; `None` if there is none.
    fn end(&self) -> Option<String>;
}

/// Where the note after the first signal is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notes {
    /// On standard error.
    Always,
    /// On standard error if it is a terminal.
    OnTerminal,
}

/// Installs handlers for SIGINT, SIGTERM and SIGHUP and returns the flag that they set. A second SIGINT ends the
/// program at once. `notes` says where the note after the first signal is printed.
///
/// # Errors
/// The system refuses to install a handler or to start a thread.
pub fn install(command: impl OnSignal, notes: Notes) -> Result<StopFlag, Failure> {
    let prints_note = match notes {
        Notes::Always => true,
        Notes::OnTerminal => output::is_error_terminal(),
    };
    register_handlers(command, prints_note).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => Failure::no_thread("to watch for signals"),
        // Only a limit of the process, such as that of open files, makes the system refuse.
        _ => Failure::input(format!("signals cannot be caught: {error}"))
            .hint("raise the limit of open files: ulimit -n 1024"),
    })
}

fn register_handlers(command: impl OnSignal, prints_note: bool) -> io::Result<StopFlag> {
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
        let (mut stopping, mut interrupted) = (false, false);
        for signal in signals.forever() {
            if signal == SIGINT && interrupted {
                ending.store(true, Ordering::Relaxed);
                end_at_once(&command);
            }
            interrupted |= signal == SIGINT;
            if !std::mem::replace(&mut stopping, true) {
                let work = command.finish().filter(|_| prints_note);
                work.into_iter().for_each(|work| output::print_signal_note(&stop_note(&work)));
            }
        }
    })?;
    Ok(stop)
}

/// Calls `end` once at the first SIGINT, SIGTERM or SIGHUP, for a command that has nothing to finish.
///
/// # Errors
/// The system refuses to install a handler or to start a thread.
pub fn on_first(end: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let refused = |_| Failure::no_thread("to watch for signals");
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(refused)?;
    let thread = thread::Builder::new().name("signals".into()).stack_size(128 << 10);
    let waiting = thread.spawn(move || {
        signals.forever().next();
        end();
    });
    waiting.map(drop).map_err(refused)
}

/// Formats the note after the first signal.
fn stop_note(work: &str) -> String {
    format!("stopping: finishing {work}; Ctrl-C again to stop now")
}

/// Ends the program without finishing its step.
fn end_at_once(command: &impl OnSignal) -> ! {
    control::remove_open_sockets();
    let ended = command.end().into_iter().fold(Failure::stopped("at once, by a second Ctrl-C"), Failure::hint);
    output::print_error(&ended);
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
