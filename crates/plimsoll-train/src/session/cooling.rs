//! A device that is too warm rests between two steps until it has cooled down. Nothing about the run changes but how long
//! it takes.

use crate::session::events::EventLog;
use crate::session::training::Trainer;
use plimsoll_core::{Event, Failure};
use plimsoll_device::probe::{Heat, ProcessorHeat, sysfs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// So many degrees below the limit a device is cool again.
const COOLER: f64 = 5.0;
/// How often it is looked at while it rests.
const LOOK: Duration = Duration::from_millis(250);
/// How often it is looked at while it works, at most.
const LOOK_AT_WORK: Duration = Duration::from_secs(1);
/// The longest rest. A device that does not cool down in that time does a step: the run goes on, slowly.
const REST: Duration = Duration::from_secs(60);

/// What is known of the warmth of a run's device.
pub struct Cooling {
    limit: f64,
    sysfs: PathBuf,
    slowed: u64,
    looked: Option<Instant>,
    /// Whether the user has been told that no sensor answers.
    told: bool,
    /// Seconds rested so far.
    pub seconds: f64,
}

impl Cooling {
    /// A run that rests above `limit` degrees Celsius; without one it is never looked.
    pub fn new(limit: Option<f64>) -> Cooling {
        let sysfs = sysfs();
        let slowed = ProcessorHeat::read(&sysfs).slowed;
        Cooling { limit: limit.unwrap_or(f64::INFINITY), sysfs, slowed, looked: None, told: false, seconds: 0.0 }
    }

    /// The processor's warmth. It counts how often it was slowed down: more often than at the last look is now.
    fn processor(&mut self) -> Option<Heat> {
        let ProcessorHeat { celsius, slowed } = ProcessorHeat::read(&self.sysfs);
        let before = std::mem::replace(&mut self.slowed, slowed);
        Some(Heat { celsius: celsius?, throttled: slowed > before })
    }

    /// Whether a device that works has to rest.
    fn too_warm(&self, heat: &Heat) -> bool {
        heat.throttled || heat.celsius >= self.limit
    }

    /// Whether a device that rests may work again.
    fn cool(&self, heat: &Heat) -> bool {
        !heat.throttled && heat.celsius <= self.limit - COOLER
    }
}

impl Trainer {
    /// The warmest device of the team.
    fn heat(&mut self) -> Option<(String, Heat)> {
        let cooling = &mut self.cooling;
        let of = self.team.workers().iter().filter_map(|worker| {
            let heat = match worker.engine.gpu() {
                Some(gpu) => gpu.heat(),
                None => cooling.processor(),
            };
            Some((worker.device.name.clone(), heat?))
        });
        of.max_by(|(_, a), (_, b)| a.throttled.cmp(&b.throttled).then(a.celsius.total_cmp(&b.celsius)))
    }

    /// Between two steps: a device that is too warm, or was slowed down for it, rests. `stop` ends the rest.
    pub(crate) fn cool_down(&mut self, stop: &AtomicBool, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let lately = self.cooling.looked.is_some_and(|looked| start.duration_since(looked) < LOOK_AT_WORK);
        if self.cooling.limit.is_infinite() || lately {
            return Ok(());
        }
        self.cooling.looked = Some(start);
        let Some((device, heat)) = self.heat() else {
            if std::mem::replace(&mut self.cooling.told, true) {
                return Ok(());
            }
            let message = "run.max_temperature: no sensor says how warm a device is, so none ever rests".to_owned();
            return log.emit(Event::Warning { message });
        };
        if !self.cooling.too_warm(&heat) {
            return Ok(());
        }
        let mut now = heat.clone();
        while start.elapsed() < REST && !stop.load(Ordering::Relaxed) && !self.cooling.cool(&now) {
            thread::sleep(LOOK);
            // A sensor that answers no more holds nothing up.
            let Some((_, next)) = self.heat() else { break };
            now = next;
        }
        let seconds = start.elapsed().as_secs_f64();
        self.cooling.seconds += seconds;
        self.cooling.looked = Some(Instant::now());
        log.emit(Event::Rest {
            step: self.info.step,
            device,
            celsius: heat.celsius,
            throttled: heat.throttled,
            celsius_after: now.celsius,
            max_celsius: self.cooling.limit,
            seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_rests_from_the_limit_on_and_works_again_well_below_it() {
        let cooling = Cooling::new(Some(80.0));
        let heat = |celsius, throttled| Heat { celsius, throttled };
        assert!(!cooling.too_warm(&heat(79.9, false)) && cooling.too_warm(&heat(80.0, false)));
        assert!(cooling.too_warm(&heat(60.0, true)));
        assert!(!cooling.cool(&heat(75.1, false)) && cooling.cool(&heat(75.0, false)));
        assert!(!cooling.cool(&heat(60.0, true)));
    }
}
