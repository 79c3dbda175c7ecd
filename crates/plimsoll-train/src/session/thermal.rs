//! Thermal pauses: between two steps, a run waits until an overheated device has cooled down. Pauses change only the
//! duration of a run. The limit is `run.max_temperature`.

use crate::events::EventLog;
use crate::team::Team;
use plimsoll_core::{Event, Failure};
use plimsoll_device::probe::{CpuTemperature, Temperature, sysfs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Degrees Celsius below the limit at which work resumes.
const COOL_MARGIN_CELSIUS: f64 = 5.0;
/// Interval between two temperature readings during a pause.
const PAUSE_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Shortest interval between two temperature readings during training.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Longest pause. A device that is still too hot afterwards runs one more step, so that the run progresses slowly.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Temperature limit and sensor state of a run.
pub struct ThermalGuard {
    limit: f64,
    sysfs: PathBuf,
    throttle_count: u64,
    last_poll: Option<Instant>,
    /// Whether the user was told that no temperature sensor is available.
    warned: bool,
    /// Total seconds of all pauses so far.
    pub seconds: f64,
}

impl ThermalGuard {
    /// Creates a guard that pauses the run when a device reaches `limit` degrees Celsius or is throttled. Without a
    /// limit (`None`), the guard never pauses the run.
    pub fn new(limit: Option<f64>) -> ThermalGuard {
        let sysfs = sysfs();
        let throttle_count = CpuTemperature::read(&sysfs).throttle_count;
        ThermalGuard {
            limit: limit.unwrap_or(f64::INFINITY),
            sysfs,
            throttle_count,
            last_poll: None,
            warned: false,
            seconds: 0.0,
        }
    }

    /// Reads the CPU temperature; `None` without a sensor. The CPU counts as throttled when its throttle counter rose
    /// since the previous reading.
    fn read_cpu(&mut self) -> Option<Temperature> {
        let CpuTemperature { celsius, throttle_count } = CpuTemperature::read(&self.sysfs);
        let before = std::mem::replace(&mut self.throttle_count, throttle_count);
        Some(Temperature { celsius: celsius?, throttled: throttle_count > before })
    }

    /// Whether a working device with this temperature must pause: it is throttled, or has reached the limit.
    fn must_pause(&self, heat: &Temperature) -> bool {
        heat.throttled || heat.celsius >= self.limit
    }

    /// Whether a paused device with this temperature may continue: it is not throttled, and [`COOL_MARGIN_CELSIUS`] or
    /// more below the limit.
    fn may_resume(&self, heat: &Temperature) -> bool {
        !heat.throttled && heat.celsius <= self.limit - COOL_MARGIN_CELSIUS
    }

    /// Returns name and temperature of the hottest device of the team; `None` if no device has a sensor. A throttled
    /// device counts as hotter than any that is not throttled.
    fn hottest_device(&mut self, team: &Team) -> Option<(String, Temperature)> {
        let of = team.workers().iter().filter_map(|worker| {
            let heat = match worker.engine.gpu() {
                Some(gpu) => gpu.heat(),
                None => self.read_cpu(),
            };
            Some((worker.device.name.clone(), heat?))
        });
        of.max_by(|(_, a), (_, b)| a.throttled.cmp(&b.throttled).then(a.celsius.total_cmp(&b.celsius)))
    }

    /// Pauses after `step` while a device is too hot or throttled, for at most [`LONGEST_PAUSE`], and logs the pause.
    /// Ends it when `stop` becomes true. Does nothing if the last reading is less than [`POLL_INTERVAL`] old.
    pub(crate) fn pause_if_too_hot(
        &mut self,
        team: &Team,
        step: u64,
        stop: &AtomicBool,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        let lately = self.last_poll.is_some_and(|last_poll| start.duration_since(last_poll) < POLL_INTERVAL);
        if self.limit.is_infinite() || lately {
            return Ok(());
        }
        self.last_poll = Some(start);
        let Some((device, heat)) = self.hottest_device(team) else {
            if std::mem::replace(&mut self.warned, true) {
                return Ok(());
            }
            let message = "run.max_temperature has no effect: no device has a temperature sensor".to_owned();
            return log.emit(Event::Warning { message });
        };
        if !self.must_pause(&heat) {
            return Ok(());
        }
        let mut latest = heat.clone();
        while start.elapsed() < LONGEST_PAUSE && !stop.load(Ordering::Relaxed) && !self.may_resume(&latest) {
            thread::sleep(PAUSE_POLL_INTERVAL);
            // A sensor that no longer answers must not block the run.
            let Some((_, next)) = self.hottest_device(team) else { break };
            latest = next;
        }
        let seconds = start.elapsed().as_secs_f64();
        self.seconds += seconds;
        self.last_poll = Some(Instant::now());
        log.emit(Event::ThermalPause {
            step,
            device,
            celsius: heat.celsius,
            throttled: heat.throttled,
            celsius_after: latest.celsius,
            max_celsius: self.limit,
            seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_starts_at_limit_and_ends_below_margin() {
        let cooling = ThermalGuard::new(Some(80.0));
        let heat = |celsius, throttled| Temperature { celsius, throttled };
        assert!(!cooling.must_pause(&heat(79.9, false)) && cooling.must_pause(&heat(80.0, false)));
        assert!(cooling.must_pause(&heat(60.0, true)));
        assert!(!cooling.may_resume(&heat(75.1, false)) && cooling.may_resume(&heat(75.0, false)));
        assert!(!cooling.may_resume(&heat(60.0, true)));
    }
}
