//! Signals that end a run early. The first one asks for an end after the step; a second SIGINT ends
//! the program at once, and the newest checkpoint stands. The end of standard input does as the first one, where that
//! is asked for.

use plimsoll_core::Exit;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// True when the run is to finish its step, save and end.
pub type StopFlag = Arc<AtomicBool>;

/// From now on SIGINT, SIGTERM and SIGHUP raise the flag that is returned.
///
/// # Errors
/// What the system says when a handler cannot be set.
pub fn install() -> io::Result<StopFlag> {
    let stop = StopFlag::default();
    let interrupted = StopFlag::default();
    // In this order: the first SIGINT finds `interrupted` down and raises it, the second finds it up.
    register_conditional_shutdown(SIGINT, Exit::Stopped as i32, Arc::clone(&interrupted))?;
    register(SIGINT, interrupted)?;
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// From now on the end of standard input raises the flag, too. A process that was started with a pipe so learns that
/// whoever holds the other end is gone, however that came.
pub fn stop_on_eof(stop: &StopFlag) {
    let stop = Arc::clone(stop);
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        stop.store(true, Ordering::Relaxed);
    });
}
