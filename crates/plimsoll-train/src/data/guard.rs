//! Runs the code of foreign parsers so that it cannot end the process: a panic becomes a message, and work on another
//! thread has a limit of time.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Once, mpsc};
use std::thread;
use std::time::Duration;

thread_local! {
    /// Whether this thread runs guarded work, so that its panics are not reported as bugs of the program.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` on this thread. A panic is returned as its message; the panic hook of the program does not see it.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(silence_guarded_panics);
    let outer = GUARDED.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    result.map_err(|payload| message(&*payload))
}

/// Runs `work` on a thread of its own, and returns a message if it panics or takes longer than `limit`. A thread that
/// takes longer cannot be ended, so the caller should end the process soon.
pub fn run_limited<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let (done, finished) = mpsc::channel();
    let run = move || drop(done.send(catch_panic(work)));
    thread::Builder::new().spawn(run).map_err(|error| format!("cannot start a thread: {error}"))?;
    receive_limited(&finished, limit)?
}

/// Waits for the result of work that sends it over `finished`, at most for `limit`.
pub fn receive_limited<T>(finished: &mpsc::Receiver<T>, limit: Duration) -> Result<T, String> {
    finished.recv_timeout(limit).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => format!("it does not end within {} s", limit.as_secs()),
        mpsc::RecvTimeoutError::Disconnected => "it ended without a result".to_owned(),
    })
}

/// Makes the panic hook of the program ignore panics of guarded work.
fn silence_guarded_panics() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if !GUARDED.get() {
            report(panic);
        }
    }));
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or(payload.downcast_ref::<String>().map(|text| &**text)).unwrap_or("it panics without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_messages() {
        assert_eq!(catch_panic(|| 7), Ok(7));
        let inner =
            || catch_panic(|| panic!("inner {}", 1)).unwrap_or_else(|message: String| panic!("outer, {message}"));
        assert_eq!(catch_panic(inner), Err("outer, inner 1".to_owned()));
        assert_eq!(run_limited(Duration::from_secs(60), || -> u8 { panic!("far") }), Err("far".to_owned()));
    }

    #[test]
    fn endless_work_ends_as_message() {
        let endless = || loop {
            thread::sleep(Duration::from_millis(5));
        };
        let stopped: Result<(), String> = run_limited(Duration::from_millis(1), endless);
        assert_eq!(stopped, Err("it does not end within 0 s".to_owned()));
    }
}
