//! Signals that end a run early.
//!
//! - First SIGINT, SIGTERM or SIGHUP: the run finishes its step, saves a checkpoint and ends.
//! - Second SIGINT: the program ends immediately; the newest checkpoint stays valid.
//! - End of standard input, with `--stop-on-eof`: like the first signal.

use plimsoll_core::Exit;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Flag that is true once the run has to finish its step, save and end.
pub type StopFlag = Arc<AtomicBool>;

/// Installs handlers for SIGINT, SIGTERM and SIGHUP and returns the flag that they set. A second SIGINT ends the
/// program at once.
///
/// # Errors
/// The system refuses to install a handler.
pub fn install() -> io::Result<StopFlag> {
    let stop = StopFlag::default();
    let interrupted = StopFlag::default();
    // Handlers run in this order: the first SIGINT finds `interrupted` unset and sets it, the second finds it set.
    register_conditional_shutdown(SIGINT, Exit::Stopped as i32, Arc::clone(&interrupted))?;
    register(SIGINT, interrupted)?;
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// Sets the flag at the end of standard input, too. A parent process that holds the other end of the pipe can stop the
/// run this way, and the run also stops if that process dies.
pub fn stop_on_eof(stop: &StopFlag) {
    let stop = Arc::clone(stop);
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        stop.store(true, Ordering::Relaxed);
    });
}
