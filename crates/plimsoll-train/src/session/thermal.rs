//! Thermal pauses: between two steps, a run waits until an overheated device has cooled down. Pauses change only the
//! duration of a run. The limit is `run.max_temperature`.

use crate::session::events::EventLog;
use crate::session::training::Session;
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
    /// Creates a guard that pauses at `limit` degrees Celsius; without a limit it never reads a sensor.
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

    /// Reads the CPU temperature. The CPU counts as throttled when its throttle counter rose since the previous
    /// reading.
    fn read_cpu(&mut self) -> Option<Temperature> {
        let CpuTemperature { celsius, throttle_count } = CpuTemperature::read(&self.sysfs);
        let before = std::mem::replace(&mut self.throttle_count, throttle_count);
        Some(Temperature { celsius: celsius?, throttled: throttle_count > before })
    }

    /// Whether a working device must pause.
    fn must_pause(&self, heat: &Temperature) -> bool {
        heat.throttled || heat.celsius >= self.limit
    }

    /// Whether a paused device may continue.
    fn may_resume(&self, heat: &Temperature) -> bool {
        !heat.throttled && heat.celsius <= self.limit - COOL_MARGIN_CELSIUS
    }
}

impl Session {
    /// Returns name and temperature of the hottest device of the team; none without a sensor.
    fn hottest_device(&mut self) -> Option<(String, Temperature)> {
        let cooling = &mut self.thermal;
        let of = self.team.workers().iter().filter_map(|worker| {
            let heat = match worker.engine.gpu() {
                Some(gpu) => gpu.heat(),
                None => cooling.read_cpu(),
            };
            Some((worker.device.name.clone(), heat?))
        });
        of.max_by(|(_, a), (_, b)| a.throttled.cmp(&b.throttled).then(a.celsius.total_cmp(&b.celsius)))
    }

    /// Pauses between two steps while a device is too hot or throttled. `stop` ends the pause.
    pub(crate) fn pause_if_too_hot(&mut self, stop: &AtomicBool, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let lately = self.thermal.last_poll.is_some_and(|last_poll| start.duration_since(last_poll) < POLL_INTERVAL);
        if self.thermal.limit.is_infinite() || lately {
            return Ok(());
        }
        self.thermal.last_poll = Some(start);
        let Some((device, heat)) = self.hottest_device() else {
            if std::mem::replace(&mut self.thermal.warned, true) {
                return Ok(());
            }
            let message = "run.max_temperature has no effect: no device has a temperature sensor".to_owned();
            return log.emit(Event::Warning { message });
        };
        if !self.thermal.must_pause(&heat) {
            return Ok(());
        }
        let mut latest = heat.clone();
        while start.elapsed() < LONGEST_PAUSE && !stop.load(Ordering::Relaxed) && !self.thermal.may_resume(&latest) {
            thread::sleep(PAUSE_POLL_INTERVAL);
            // A sensor that no longer answers must not block the run.
            let Some((_, next)) = self.hottest_device() else { break };
            latest = next;
        }
        let seconds = start.elapsed().as_secs_f64();
        self.thermal.seconds += seconds;
        self.thermal.last_poll = Some(Instant::now());
        log.emit(Event::ThermalPause {
            step: self.info.step,
            device,
            celsius: heat.celsius,
            throttled: heat.throttled,
            celsius_after: latest.celsius,
            max_celsius: self.thermal.limit,
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
