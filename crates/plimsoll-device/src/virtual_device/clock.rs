//! The clock of a simulated device: planned ends of work, and waiting for them. Deadlines accumulate, so a sleep that
//! was too long or an op that was slow once does not change the total.

use std::time::{Duration, Instant};

/// Sleeps shorter than this are skipped, because the system would extend them. The sleep until the next deadline is
/// then longer.
const MIN_SLEEP_SECONDS: f64 = 100e-6;

/// The largest lag behind the planned times that a device catches up by running faster than its simulated pace. A
/// larger lag, from a busy machine or late data, delays all later planned times.
pub(super) const MAX_LAG_SECONDS: f64 = 20e-3;

/// The clock of a simulated device, with the planned end of the device's work so far.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch: Instant,
    planned_end: f64,
}

impl Clock {
    /// Creates a clock that counts time from now.
    pub fn start() -> Clock {
        Clock { epoch: Instant::now(), planned_end: 0.0 }
    }

    /// Creates a clock that counts time from `epoch`, the common start of the clocks of a communication group. The
    /// planned end of work is now.
    pub fn with_epoch(epoch: Instant) -> Clock {
        Clock { epoch, planned_end: epoch.elapsed().as_secs_f64() }
    }

    /// Returns the planned start of work that begins now, in seconds of this clock: the planned end of earlier work. If
    /// the device lags further behind than it can catch up, the start is later.
    pub fn next_start(&self) -> f64 {
        self.planned_end.max(self.now() - MAX_LAG_SECONDS)
    }

    /// Returns the planned end of all work so far, in seconds of this clock.
    #[cfg(test)]
    pub fn planned_end(&self) -> f64 {
        self.planned_end
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }

    /// Sleeps until a planned time, in seconds of this clock. Returns at once if that time has passed or is less than
    /// 0.1 ms ahead.
    pub fn wait_until(&self, planned_end: f64) {
        let remaining = planned_end - self.now();
        if remaining >= MIN_SLEEP_SECONDS {
            std::thread::sleep(Duration::from_secs_f64(remaining));
        }
    }

    /// Moves the planned end of work to this time, in seconds of this clock, unless it is already later.
    pub fn advance_to(&mut self, planned_end: f64) {
        self.planned_end = self.planned_end.max(planned_end);
    }

    /// Simulates work of some seconds, which begins at the planned end of earlier work, or now if that is later. Waits
    /// for the end of the work.
    pub fn spend(&mut self, seconds: f64) {
        let end = self.now().max(self.planned_end) + seconds;
        self.wait_until(end);
        self.advance_to(end);
    }
}
