//! The clock of a simulated device: planned ends of work, and waiting for them. Deadlines accumulate, so a sleep that
//! was too long or an op that was slow once does not change the total.

use std::time::{Duration, Instant};

/// Sleeps shorter than this are skipped: the system would extend them, and the next deadline compensates.
const MIN_SLEEP_SECONDS: f64 = 100e-6;

/// The lag behind the plan that a device can still catch up. Larger lags, from a busy machine or late data, delay the
/// plan.
pub(super) const MAX_LAG_SECONDS: f64 = 20e-3;

/// Planned end of the device's work so far.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch: Instant,
    planned_end: f64,
}

impl Clock {
    /// Creates a clock that starts now.
    pub fn start() -> Clock {
        Clock { epoch: Instant::now(), planned_end: 0.0 }
    }

    /// Creates a clock of a group with time counted from `epoch`. Its planned end is now.
    pub fn with_epoch(epoch: Instant) -> Clock {
        Clock { epoch, planned_end: epoch.elapsed().as_secs_f64() }
    }

    /// Returns the planned start of work that begins now, in seconds of this clock.
    pub fn next_start(&self) -> f64 {
        self.planned_end.max(self.now() - MAX_LAG_SECONDS)
    }

    /// Returns the planned end of all work so far.
    #[cfg(test)]
    pub fn planned_end(&self) -> f64 {
        self.planned_end
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }

    /// Waits until a planned time, unless it has passed.
    pub fn wait_until(&self, planned_end: f64) {
        let remaining = planned_end - self.now();
        if remaining >= MIN_SLEEP_SECONDS {
            std::thread::sleep(Duration::from_secs_f64(remaining));
        }
    }

    /// Extends the planned end to at least this time.
    pub fn advance_to(&mut self, planned_end: f64) {
        self.planned_end = self.planned_end.max(planned_end);
    }

    /// Spends some seconds from now on.
    pub fn spend(&mut self, seconds: f64) {
        let end = self.now().max(self.planned_end) + seconds;
        self.wait_until(end);
        self.advance_to(end);
    }
}
