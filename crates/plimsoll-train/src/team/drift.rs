//! Whether the devices of a team are as fast as the plan says, from the seconds that their work took. One that is slowed
//! down (by heat, by another user) holds up all the others: then the shares are drawn anew. Small and short deviations
//! change nothing.

use crate::session::pace::quantile;
use std::collections::{BTreeSet, VecDeque};

/// How far a device's speed, against that of the others, may be from the plan before anything is done.
const MOST: f64 = 0.05;
/// That is judged by the median of so many steps at least,
const STEPS_LEAST: usize = 16;
/// and of so many seconds: a machine that is busy for a moment is no reason.
const SECONDS_SEEN: f64 = 1.0;
/// Steps after a change before the next one, doubled each time; fewer by as many times as a device is further from the plan
/// than [`MOST`].
const REST: u64 = 32;

/// Work that is predicted to take less than this says nothing of a device's speed: what lies between counts for more.
pub(crate) const SECONDS_LEAST: f64 = 0.02;

/// What was seen of each device's speed, and what came of it.
#[derive(Clone, Debug, Default)]
pub struct Drift {
    /// The newest steps: seconds of the slowest device's own work, and for each device measured over predicted.
    seen: VecDeque<(f64, Vec<f64>)>,
    /// The last change was in this step, or the first.
    since: u64,
    /// The next one that is no larger than [`MOST`] has to wait for so many.
    rest: u64,
    /// How often the shares were looked at anew.
    looks: u32,
    /// Whoever had sequences at some time.
    have_worked: BTreeSet<String>,
    /// One that was too slow for any has some again: whether it is as fast as it was is seen as soon as can be.
    on_trial: bool,
}

impl Drift {
    /// A team begins with its shares in this step: after a change the next one has to wait.
    pub fn begins(&mut self, step: u64) {
        self.seen.clear();
        self.since = step;
        self.rest = if self.on_trial { 0 } else { REST << self.looks.min(16) };
    }

    /// These have sequences now.
    pub fn work(&mut self, devices: &[String]) {
        self.have_worked.extend(devices.iter().cloned());
    }

    /// Those that had some at some time.
    pub fn have_worked(&self) -> impl Iterator<Item = &String> {
        self.have_worked.iter()
    }

    /// Whether who was too slow may be asked again in this step: its rest is over, and nobody else is on trial.
    pub fn asks_again(&self, step: u64) -> bool {
        !self.on_trial && step >= self.since + self.rest
    }

    /// The own work of each device took so many seconds of a step, measured and predicted; of who computes nothing that is not
    /// known. Says by how much each is slower than its plan, where the shares should be changed for it, or where there is
    /// somebody who `may_work` again. Devices that compute are compared with each other; one that does so alone with its plan.
    pub fn see(&mut self, step: u64, passed: &[Option<(f64, f64)>], may_work: bool) -> Option<Vec<f64>> {
        let asks_again = may_work && self.asks_again(step);
        let as_planned = || asks_again.then(|| vec![1.0; passed.len()]);
        let computed = || passed.iter().flatten();
        if computed().any(|(_, predicted)| *predicted < SECONDS_LEAST) {
            return as_planned();
        }
        let slowest = computed().map(|(measured, _)| *measured).fold(0.0, f64::max);
        let factor = |passed: &Option<(f64, f64)>| passed.map_or(1.0, |(measured, predicted)| measured / predicted);
        self.seen.push_back((slowest, passed.iter().map(factor).collect()));
        let mut seconds: f64 = self.seen.iter().map(|(seconds, _)| seconds).sum();
        while self.seen.len() > STEPS_LEAST && seconds - self.seen[0].0 >= SECONDS_SEEN {
            seconds -= self.seen.pop_front().map_or(0.0, |(seconds, _)| seconds);
        }
        if self.seen.len() < STEPS_LEAST || seconds < SECONDS_SEEN {
            return as_planned();
        }
        let of_device = |rank: usize| self.seen.iter().map(|(_, factors)| factors[rank]).collect::<Vec<_>>();
        let factors: Vec<f64> = (0..passed.len()).map(|rank| quantile(&of_device(rank), 0.5)).collect();
        let compared = |rank: &usize| passed[*rank].is_some() || computed().count() == 1;
        let compared: Vec<f64> = (0..passed.len()).filter(compared).map(|rank| factors[rank]).collect();
        let mean = compared.iter().sum::<f64>() / compared.len() as f64;
        let drift = compared.iter().map(|factor| (factor / mean - 1.0).abs()).fold(0.0, f64::max);
        let rested = step.saturating_sub(self.since) as f64 >= self.rest as f64 * MOST / drift.max(MOST);
        let drifts = drift > MOST && rested;
        if self.on_trial && !drifts {
            self.on_trial = false;
            self.begins(step);
        }
        (drifts || asks_again).then_some(factors)
    }

    /// The shares were looked at anew in this step, and somebody who had none has some again, perhaps. The next time has to
    /// wait, twice as long as the last time.
    pub fn looked(&mut self, step: u64, somebody_is_back: bool) {
        self.on_trial = somebody_is_back;
        if !somebody_is_back {
            self.looks += 1;
        }
        self.begins(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices that take so many times what was predicted.
    fn took(factors: &[f64]) -> Vec<Option<(f64, f64)>> {
        factors.iter().map(|factor| Some((0.5 * factor, 0.5))).collect()
    }

    #[test]
    fn a_device_that_stays_slow_is_noticed_and_one_slow_step_is_not() {
        let mut drift = Drift::default();
        for step in 1..50 {
            let factors = if step == 20 { [1.0, 1.3] } else { [1.0, 1.01] };
            assert_eq!(drift.see(step, &took(&factors), false), None, "step {step}");
        }
        let noticed =
            (50..80).find(|&step| drift.see(step, &took(&[1.0, 1.3]), false).is_some()).expect("it stays slow");
        assert!((57..66).contains(&noticed), "{noticed}");
    }

    #[test]
    fn all_devices_slower_alike_change_nothing() {
        let mut drift = Drift::default();
        assert!((1..100).all(|step| drift.see(step, &took(&[1.4, 1.42, 1.38]), false).is_none()));
    }

    #[test]
    fn after_a_change_it_takes_longer_but_not_for_one_that_is_far_from_the_plan() {
        let drift = Drift { looks: 1, ..Drift::default() };
        let noticed = |slow: f64| {
            let mut drift = drift.clone();
            drift.begins(100);
            (101..).find(|&step| drift.see(step, &took(&[1.0, slow]), false).is_some()).unwrap()
        };
        // Of 64 steps; one that is twice as far from the plan waits half as long.
        let (near, further, far) = (noticed(1.1053), noticed(1.2223), noticed(3.0));
        assert!((162..=164).contains(&near) && (131..=133).contains(&further), "{near} {further}");
        assert_eq!(far, 100 + STEPS_LEAST as u64);
    }

    #[test]
    fn a_first_moment_of_other_work_is_forgotten() {
        let mut drift = Drift::default();
        for step in 1..100 {
            // Seven slow steps while a program starts beside it; quick steps, so that the seconds decide.
            let factor = if step <= 7 { 4.5 } else { 1.0 };
            assert_eq!(drift.see(step, &[Some((0.03 * factor, 0.03)), Some((0.03, 0.03))], false), None, "step {step}");
        }
    }

    #[test]
    fn passes_of_no_time_say_nothing() {
        let mut drift = Drift::default();
        assert!((1..100).all(|step| drift.see(step, &[Some((0.002, 0.001)), Some((0.001, 0.001))], false).is_none()));
    }

    #[test]
    fn beside_those_that_only_hold_the_one_that_computes_is_noticed() {
        let mut drift = Drift::default();
        assert!((1..50).all(|step| drift.see(step, &[Some((0.51, 0.5)), None, None], false).is_none()));
        let noticed =
            (50..80).find_map(|step| drift.see(step, &[Some((1.0, 0.5)), None, None], false)).expect("it is slow");
        assert_eq!(noticed, [2.0, 1.0, 1.0]);
        // What it computes decides how long is looked, as ever.
        assert!((80..180).all(|step| Drift::default().see(step, &[Some((0.002, 0.001)), None], false).is_none()));
    }

    #[test]
    fn beside_one_that_only_holds_those_that_compute_are_compared_with_each_other() {
        let mut drift = Drift::default();
        let alike = [Some((0.7, 0.5)), None, Some((0.71, 0.5))];
        assert!((1..100).all(|step| drift.see(step, &alike, false).is_none()));
        let apart = [Some((0.7, 0.5)), None, Some((0.5, 0.5))];
        assert!((100..130).any(|step| drift.see(step, &apart, false).is_some()));
    }

    #[test]
    fn who_was_too_slow_is_asked_again_after_a_rest_that_doubles_each_time() {
        let mut drift = Drift::default();
        let alone = [Some((0.5, 0.5)), None];
        let mut step = (1..).find(|&step| drift.see(step, &took(&[1.0, 3.0]), false).is_some()).unwrap();
        for rest in [64, 128, 256] {
            drift.looked(step, false);
            let asked = (step + 1..).find(|&step| drift.see(step, &alone, true).is_some()).unwrap();
            assert_eq!(asked, step + rest);
            // It computes again, and is as slow as it was.
            drift.looked(asked, true);
            step = (asked + 1..).find(|&step| drift.see(step, &took(&[1.0, 3.0]), false).is_some()).unwrap();
            assert_eq!(step, asked + STEPS_LEAST as u64);
        }
        // Where it does not come back, nobody asks before the next rest is over.
        drift.looked(step, false);
        drift.looked(step + 512, false);
        assert!((step + 513..step + 1536).all(|step| drift.see(step, &alone, true).is_none()));
    }

    #[test]
    fn one_that_is_far_from_the_plan_asks_nobody_back_before_the_rest_is_over() {
        let mut drift = Drift { looks: 3, ..Drift::default() };
        drift.begins(10);
        let noticed = (11..).find(|&step| drift.see(step, &took(&[1.0, 3.0]), true).is_some()).unwrap();
        assert!(noticed < 100 && !drift.asks_again(noticed) && drift.asks_again(10 + 256), "{noticed}");
    }

    #[test]
    fn one_that_is_as_fast_as_it_was_stays_and_the_others_are_asked_again() {
        let mut drift = Drift::default();
        drift.work(&["b".to_owned(), "a".to_owned()]);
        drift.work(&["a".to_owned()]);
        assert!(drift.have_worked().eq(["a", "b"]));
        drift.looked(20, false);
        // One that works alone is not measured.
        let asked = (21..).find(|&step| drift.see(step, &[Some((0.0, 0.0))], true).is_some()).unwrap();
        assert_eq!(asked, 84);
        drift.looked(asked, true);
        // There is a third one that is too slow.
        let found = (asked + 1..).find(|&step| drift.see(step, &took(&[1.0, 1.01]), true).is_some()).unwrap();
        assert_eq!(found, asked + STEPS_LEAST as u64 + 64);
    }
}
