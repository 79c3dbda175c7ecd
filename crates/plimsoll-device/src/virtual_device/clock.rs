//! The time of the device that is played: what is planned to end when, and waiting until then. Work is paced by deadlines
//! that add up, so that a sleep that was too long, or an op that was slow once, changes nothing in the long run.

use std::time::{Duration, Instant};

/// Sleeps shorter than this are left out: the system would make them longer, and the next deadline makes up for it.
const SLEEP_LEAST: f64 = 100e-6;

/// How far what really happens may lie behind the plan and still catch up. What is lost beyond it, because the machine
/// was busy or the data were late, is lost.
pub(super) const LAG_MOST: f64 = 20e-3;

/// When the last thing that the device did was planned to end.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch: Instant,
    planned: f64,
}

impl Clock {
    /// A clock that begins now.
    pub fn start() -> Clock {
        Clock { epoch: Instant::now(), planned: 0.0 }
    }

    /// A clock that keeps the time of a team which began at `epoch`; all before now is over.
    pub fn of_team(epoch: Instant) -> Clock {
        Clock { epoch, planned: epoch.elapsed().as_secs_f64() }
    }

    /// When work that begins now is planned to begin, in seconds of this clock.
    pub fn begin(&self) -> f64 {
        self.planned.max(self.now() - LAG_MOST)
    }

    /// When everything so far was planned to end.
    #[cfg(test)]
    pub fn planned(&self) -> f64 {
        self.planned
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_secs_f64()
    }

    /// Waits until a planned moment, where it has not passed.
    pub fn wait_until(&self, planned: f64) {
        let left = planned - self.now();
        if left >= SLEEP_LEAST {
            std::thread::sleep(Duration::from_secs_f64(left));
        }
    }

    /// Everything so far was planned to end then.
    pub fn end(&mut self, planned: f64) {
        self.planned = self.planned.max(planned);
    }

    /// Something takes that long from now on.
    pub fn take(&mut self, seconds: f64) {
        let end = self.now().max(self.planned) + seconds;
        self.wait_until(end);
        self.end(end);
    }
}
