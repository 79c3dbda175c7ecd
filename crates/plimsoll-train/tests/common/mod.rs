//! Shared helpers of the tests of runs: a watchdog.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Ends the process where a test hangs.
pub struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    #[allow(clippy::new_without_default, reason = "it is started, not made up")]
    pub fn new() -> Watchdog {
        let done = Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        std::thread::spawn(move || {
            for _ in 0..3000 {
                std::thread::sleep(Duration::from_millis(100));
                if seen.load(Ordering::Relaxed) {
                    return;
                }
            }
            eprintln!("a device hangs");
            std::process::abort();
        });
        Watchdog(done)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
