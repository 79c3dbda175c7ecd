//! Whether the devices of a team are as fast as the plan says, from the seconds that their work took. One that is slowed
//! down (by heat, by another user) holds up all the others: then the shares are drawn anew. Small and short deviations
//! change nothing.

use super::pace::quantile;
use std::collections::VecDeque;

/// How far a device's speed, against that of the others, may be from the plan before anything is done.
const MOST: f64 = 0.05;
/// That is judged by the median of so many steps at least,
const STEPS_LEAST: usize = 16;
/// and of so many seconds: a machine that is busy for a moment is no reason.
const SECONDS_SEEN: f64 = 1.0;
/// Steps after a change before the next one, doubled each time.
const REST: u64 = 32;

/// Work that is predicted to take less than this says nothing of a device's speed: what lies between counts for more.
pub(super) const SECONDS_LEAST: f64 = 0.02;

/// What was seen of each device's speed.
#[derive(Clone, Debug)]
pub struct Drift {
    /// The newest steps: seconds of the slowest device's own work, and for each device measured over predicted.
    seen: VecDeque<(f64, Vec<f64>)>,
    /// No change before this step.
    not_before: u64,
}

impl Drift {
    /// A team that has just begun with its shares.
    pub fn new() -> Drift {
        Drift { seen: VecDeque::new(), not_before: 0 }
    }

    /// The same, after the shares were changed in this step: the next change has to wait.
    pub fn rested(step: u64, times: u32) -> Drift {
        Drift { not_before: step + (REST << times.min(16)), ..Drift::new() }
    }

    /// The own work of each device took so many seconds of a step, measured and predicted. Says by how much each is slower
    /// than its plan, where the shares should be changed for it.
    pub fn see(&mut self, step: u64, passed: &[(f64, f64)]) -> Option<Vec<f64>> {
        if passed.iter().any(|(_, predicted)| *predicted < SECONDS_LEAST) {
            return None;
        }
        let slowest = passed.iter().map(|(measured, _)| *measured).fold(0.0, f64::max);
        self.seen.push_back((slowest, passed.iter().map(|(measured, predicted)| measured / predicted).collect()));
        let mut seconds: f64 = self.seen.iter().map(|(seconds, _)| seconds).sum();
        while self.seen.len() > STEPS_LEAST && seconds - self.seen[0].0 >= SECONDS_SEEN {
            seconds -= self.seen.pop_front().map_or(0.0, |(seconds, _)| seconds);
        }
        if self.seen.len() < STEPS_LEAST || seconds < SECONDS_SEEN || step < self.not_before {
            return None;
        }
        let of_device = |rank: usize| self.seen.iter().map(|(_, factors)| factors[rank]).collect::<Vec<_>>();
        let factors: Vec<f64> = (0..passed.len()).map(|rank| quantile(&of_device(rank), 0.5)).collect();
        let mean = factors.iter().sum::<f64>() / factors.len() as f64;
        factors.iter().any(|factor| (factor / mean - 1.0).abs() > MOST).then_some(factors)
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
        let mut drift = Drift::new();
        for step in 1..50 {
            let factors = if step == 20 { [1.0, 1.3] } else { [1.0, 1.01] };
            assert_eq!(drift.see(step, &took(&factors)), None, "step {step}");
        }
        let noticed = (50..80).find(|&step| drift.see(step, &took(&[1.0, 1.3])).is_some()).expect("it stays slow");
        assert!((57..66).contains(&noticed), "{noticed}");
    }

    #[test]
    fn all_devices_slower_alike_change_nothing() {
        let mut drift = Drift::new();
        assert!((1..100).all(|step| drift.see(step, &took(&[1.4, 1.42, 1.38])).is_none()));
    }

    #[test]
    fn after_a_change_it_takes_longer() {
        let mut drift = Drift::rested(100, 1);
        let noticed = (101..).find(|&step| drift.see(step, &took(&[1.0, 1.3])).is_some()).unwrap();
        assert_eq!(noticed, 164);
    }

    #[test]
    fn a_first_moment_of_other_work_is_forgotten() {
        let mut drift = Drift::new();
        for step in 1..100 {
            // Seven slow steps while a program starts beside it; quick steps, so that the seconds decide.
            let factor = if step <= 7 { 4.5 } else { 1.0 };
            assert_eq!(drift.see(step, &[(0.03 * factor, 0.03), (0.03, 0.03)]), None, "step {step}");
        }
    }

    #[test]
    fn passes_of_no_time_say_nothing() {
        let mut drift = Drift::new();
        assert!((1..100).all(|step| drift.see(step, &[(0.002, 0.001), (0.001, 0.001)]).is_none()));
    }
}
