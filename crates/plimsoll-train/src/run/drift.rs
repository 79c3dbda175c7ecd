//! Whether the devices of a team are as fast as the plan says, from the seconds that their work took. One that is slowed
//! down (by heat, by another user) holds up all the others: then the shares are drawn anew. Small and short deviations
//! change nothing.

/// How far a device's speed, against that of the others, may be from the plan before anything is done.
const MOST: f64 = 0.05;
/// Steps in a row in which that must be so.
const PATIENCE: u32 = 8;
/// Steps after a change before the next one, doubled each time.
const REST: u64 = 32;

/// Work that is predicted to take less than this says nothing of a device's speed: what lies between counts for more.
pub(super) const SECONDS_LEAST: f64 = 0.02;

/// What was seen of each device's speed.
#[derive(Clone, Debug)]
pub struct Drift {
    /// Measured over predicted seconds of each device's own work, smoothed.
    factors: Vec<f64>,
    /// Steps in a row in which one was too far from the others.
    apart: u32,
    /// No change before this step.
    not_before: u64,
}

impl Drift {
    /// A team of so many that has just begun with its shares.
    pub fn new(devices: usize) -> Drift {
        Drift { factors: vec![f64::NAN; devices], apart: 0, not_before: 0 }
    }

    /// The same, after the shares were changed in this step: the next change has to wait.
    pub fn rested(devices: usize, step: u64, times: u32) -> Drift {
        Drift { not_before: step + (REST << times.min(16)), ..Drift::new(devices) }
    }

    /// The own work of each device took so many seconds of a step, measured and predicted. Says by how much each is slower
    /// than its plan, where the shares should be changed for it.
    pub fn see(&mut self, step: u64, passed: &[(f64, f64)]) -> Option<Vec<f64>> {
        if passed.iter().any(|(_, predicted)| *predicted < SECONDS_LEAST) {
            return None;
        }
        for (smooth, (measured, predicted)) in self.factors.iter_mut().zip(passed) {
            let now = measured / predicted;
            *smooth = if smooth.is_nan() { now } else { 0.75 * *smooth + 0.25 * now };
        }
        let mean = self.factors.iter().sum::<f64>() / self.factors.len() as f64;
        let far = self.factors.iter().any(|factor| (factor / mean - 1.0).abs() > MOST);
        self.apart = if far { self.apart + 1 } else { 0 };
        (self.apart >= PATIENCE && step >= self.not_before).then(|| self.factors.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices that take so many times what was predicted.
    fn took(factors: &[f64]) -> Vec<(f64, f64)> {
        factors.iter().map(|factor| (0.5 * factor, 0.5)).collect()
    }

    #[test]
    fn a_device_that_stays_slow_is_noticed_and_one_slow_step_is_not() {
        let mut drift = Drift::new(2);
        for step in 1..50 {
            let factors = if step == 20 { [1.0, 1.3] } else { [1.0, 1.01] };
            assert_eq!(drift.see(step, &took(&factors)), None, "step {step}");
        }
        let noticed = (50..80).find(|&step| drift.see(step, &took(&[1.0, 1.3])).is_some()).expect("it stays slow");
        assert!((57..66).contains(&noticed), "{noticed}");
    }

    #[test]
    fn all_devices_slower_alike_change_nothing() {
        let mut drift = Drift::new(3);
        assert!((1..100).all(|step| drift.see(step, &took(&[1.4, 1.42, 1.38])).is_none()));
    }

    #[test]
    fn after_a_change_it_takes_longer() {
        let mut drift = Drift::rested(2, 100, 1);
        let noticed = (101..).find(|&step| drift.see(step, &took(&[1.0, 1.3])).is_some()).unwrap();
        assert_eq!(noticed, 164);
    }

    #[test]
    fn passes_of_no_time_say_nothing() {
        let mut drift = Drift::new(2);
        assert!((1..100).all(|step| drift.see(step, &[(0.002, 0.001), (0.001, 0.001)]).is_none()));
    }
}
