//! Detection of stragglers: devices with a measured compute time that deviates from the plan, for example because of heat or
//! another user. One slow device delays all others, so the work is then rebalanced. Small or short deviations change
//! nothing.

use crate::session::step_times::quantile;
use std::collections::{BTreeSet, VecDeque};

/// Largest deviation of a device's speed from the team mean, relative to the plan, that is tolerated.
const MAX_DEVIATION: f64 = 0.05;
/// Fewest steps that a deviation is judged by; their median counts.
const MIN_STEPS: usize = 16;
/// Shortest window in seconds that a deviation is judged by, so that a short load is ignored.
const MIN_WINDOW_SECONDS: f64 = 1.0;
/// Steps between two changes, doubled after each. A larger deviation shortens the wait in proportion to
/// [`MAX_DEVIATION`].
const COOLDOWN_STEPS: u64 = 32;

/// Predicted compute seconds below which a measurement says nothing, because overhead dominates.
pub(crate) const MIN_PREDICTED_SECONDS: f64 = 0.02;

/// Window of recent measurements, and the time of the last change.
#[derive(Clone, Debug, Default)]
pub struct StragglerDetector {
    /// Recent steps: compute seconds of the slowest worker, and for each worker the measured over the predicted time.
    window: VecDeque<(f64, Vec<f64>)>,
    /// Step of the last change, or of the start.
    last_change: u64,
    /// Steps to wait after the last change, for deviations up to [`MAX_DEVIATION`].
    cooldown: u64,
    /// Number of reviews so far; each one doubles the cooldown.
    reviews: u32,
    /// Names of the devices that computed sequences at any time.
    ever_active: BTreeSet<String>,
    /// Whether a device that was too slow was given sequences again. It is judged as soon as the window is full.
    on_probation: bool,
}

impl StragglerDetector {
    /// Starts anew with the shares of this step; the next change has to wait.
    pub fn restart(&mut self, step: u64) {
        self.window.clear();
        self.last_change = step;
        self.cooldown = if self.on_probation { 0 } else { COOLDOWN_STEPS << self.reviews.min(16) };
    }

    /// Records that these devices compute sequences now.
    pub fn record_active(&mut self, devices: &[String]) {
        self.ever_active.extend(devices.iter().cloned());
    }

    /// Returns the devices that computed sequences at any time.
    pub fn ever_active(&self) -> impl Iterator<Item = &String> {
        self.ever_active.iter()
    }

    /// Whether an idle device may be given sequences again in this step: the cooldown is over and no device is on
    /// probation.
    pub fn may_retry_idle(&self, step: u64) -> bool {
        !self.on_probation && step >= self.last_change + self.cooldown
    }

    /// Adds the measured and predicted compute seconds of each worker in a step; none for storage-only workers. Returns
    /// the slowdown of each worker against its plan if the work should be rebalanced, or if an idle device may be tried
    /// again (`has_idle_candidate`). Several computing workers are compared with each other, a single one with its
    /// plan.
    pub fn observe(&mut self, step: u64, times: &[Option<(f64, f64)>], has_idle_candidate: bool) -> Option<Vec<f64>> {
        let may_retry_idle = has_idle_candidate && self.may_retry_idle(step);
        let retry_only = || may_retry_idle.then(|| vec![1.0; times.len()]);
        let computed = || times.iter().flatten();
        if computed().any(|(_, predicted)| *predicted < MIN_PREDICTED_SECONDS) {
            return retry_only();
        }
        let slowest = computed().map(|(measured, _)| *measured).fold(0.0, f64::max);
        let factor = |times: &Option<(f64, f64)>| times.map_or(1.0, |(measured, predicted)| measured / predicted);
        self.window.push_back((slowest, times.iter().map(factor).collect()));
        let mut seconds: f64 = self.window.iter().map(|(seconds, _)| seconds).sum();
        while self.window.len() > MIN_STEPS && seconds - self.window[0].0 >= MIN_WINDOW_SECONDS {
            seconds -= self.window.pop_front().map_or(0.0, |(seconds, _)| seconds);
        }
        if self.window.len() < MIN_STEPS || seconds < MIN_WINDOW_SECONDS {
            return retry_only();
        }
        let slowdowns_of = |rank: usize| self.window.iter().map(|(_, slowdowns)| slowdowns[rank]).collect::<Vec<_>>();
        let slowdowns: Vec<f64> = (0..times.len()).map(|rank| quantile(&slowdowns_of(rank), 0.5)).collect();
        let compared = |rank: &usize| times[*rank].is_some() || computed().count() == 1;
        let compared: Vec<f64> = (0..times.len()).filter(compared).map(|rank| slowdowns[rank]).collect();
        let mean = compared.iter().sum::<f64>() / compared.len() as f64;
        let deviation = compared.iter().map(|factor| (factor / mean - 1.0).abs()).fold(0.0, f64::max);
        let cooldown_over = step.saturating_sub(self.last_change) as f64
            >= self.cooldown as f64 * MAX_DEVIATION / deviation.max(MAX_DEVIATION);
        let deviates = deviation > MAX_DEVIATION && cooldown_over;
        if self.on_probation && !deviates {
            self.on_probation = false;
            self.restart(step);
        }
        (deviates || may_retry_idle).then_some(slowdowns)
    }

    /// Records that the shares were reviewed in this step, and whether an idle device received sequences again. The
    /// next review must wait twice as long.
    pub fn record_review(&mut self, step: u64, idle_readmitted: bool) {
        self.on_probation = idle_readmitted;
        if !idle_readmitted {
            self.reviews += 1;
        }
        self.restart(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns measurements of workers with these slowdowns.
    fn took(slowdowns: &[f64]) -> Vec<Option<(f64, f64)>> {
        slowdowns.iter().map(|factor| Some((0.5 * factor, 0.5))).collect()
    }

    #[test]
    fn slow_device_is_noticed_and_slow_step_is_not() {
        let mut stragglers = StragglerDetector::default();
        for step in 1..50 {
            let slowdowns = if step == 20 { [1.0, 1.3] } else { [1.0, 1.01] };
            assert_eq!(stragglers.observe(step, &took(&slowdowns), false), None, "step {step}");
        }
        let noticed = (50..80)
            .find(|&step| stragglers.observe(step, &took(&[1.0, 1.3]), false).is_some())
            .expect("it stays slow");
        assert!((57..66).contains(&noticed), "{noticed}");
    }

    #[test]
    fn common_slowdown_changes_nothing() {
        let mut stragglers = StragglerDetector::default();
        assert!((1..100).all(|step| stragglers.observe(step, &took(&[1.4, 1.42, 1.38]), false).is_none()));
    }

    #[test]
    fn cooldown_is_shorter_for_larger_deviation() {
        let stragglers = StragglerDetector { reviews: 1, ..StragglerDetector::default() };
        let noticed = |slow: f64| {
            let mut stragglers = stragglers.clone();
            stragglers.restart(100);
            (101..).find(|&step| stragglers.observe(step, &took(&[1.0, slow]), false).is_some()).unwrap()
        };
        // The cooldown is 64 steps; twice the deviation halves it.
        let (near, further, far) = (noticed(1.1053), noticed(1.2223), noticed(3.0));
        assert!((162..=164).contains(&near) && (131..=133).contains(&further), "{near} {further}");
        assert_eq!(far, 100 + MIN_STEPS as u64);
    }

    #[test]
    fn short_load_at_start_is_ignored() {
        let mut stragglers = StragglerDetector::default();
        for step in 1..100 {
            // Seven slow steps while another program starts, then fast steps, so that the window is limited by seconds.
            let factor = if step <= 7 { 4.5 } else { 1.0 };
            assert_eq!(
                stragglers.observe(step, &[Some((0.03 * factor, 0.03)), Some((0.03, 0.03))], false),
                None,
                "step {step}"
            );
        }
    }

    #[test]
    fn very_short_compute_times_are_ignored() {
        let mut stragglers = StragglerDetector::default();
        assert!(
            (1..100)
                .all(|step| stragglers.observe(step, &[Some((0.002, 0.001)), Some((0.001, 0.001))], false).is_none())
        );
    }

    #[test]
    fn single_computing_worker_is_compared_with_plan() {
        let mut stragglers = StragglerDetector::default();
        assert!((1..50).all(|step| stragglers.observe(step, &[Some((0.51, 0.5)), None, None], false).is_none()));
        let noticed = (50..80)
            .find_map(|step| stragglers.observe(step, &[Some((1.0, 0.5)), None, None], false))
            .expect("it is slow");
        assert_eq!(noticed, [2.0, 1.0, 1.0]);
        // The window is judged by the compute time of the working device.
        assert!(
            (80..180)
                .all(|step| StragglerDetector::default().observe(step, &[Some((0.002, 0.001)), None], false).is_none())
        );
    }

    #[test]
    fn computing_workers_are_compared_with_each_other() {
        let mut stragglers = StragglerDetector::default();
        let alike = [Some((0.7, 0.5)), None, Some((0.71, 0.5))];
        assert!((1..100).all(|step| stragglers.observe(step, &alike, false).is_none()));
        let apart = [Some((0.7, 0.5)), None, Some((0.5, 0.5))];
        assert!((100..130).any(|step| stragglers.observe(step, &apart, false).is_some()));
    }

    #[test]
    fn idle_device_is_retried_after_doubling_cooldown() {
        let mut stragglers = StragglerDetector::default();
        let alone = [Some((0.5, 0.5)), None];
        let mut step = (1..).find(|&step| stragglers.observe(step, &took(&[1.0, 3.0]), false).is_some()).unwrap();
        for cooldown in [64, 128, 256] {
            stragglers.record_review(step, false);
            let retried_at = (step + 1..).find(|&step| stragglers.observe(step, &alone, true).is_some()).unwrap();
            assert_eq!(retried_at, step + cooldown);
            // The device computes again and is as slow as before.
            stragglers.record_review(retried_at, true);
            step =
                (retried_at + 1..).find(|&step| stragglers.observe(step, &took(&[1.0, 3.0]), false).is_some()).unwrap();
            assert_eq!(step, retried_at + MIN_STEPS as u64);
        }
        // The device was not readmitted: no retry before the next cooldown is over.
        stragglers.record_review(step, false);
        stragglers.record_review(step + 512, false);
        assert!((step + 513..step + 1536).all(|step| stragglers.observe(step, &alone, true).is_none()));
    }

    #[test]
    fn large_deviation_does_not_retry_idle_during_cooldown() {
        let mut stragglers = StragglerDetector { reviews: 3, ..StragglerDetector::default() };
        stragglers.restart(10);
        let noticed = (11..).find(|&step| stragglers.observe(step, &took(&[1.0, 3.0]), true).is_some()).unwrap();
        assert!(
            noticed < 100 && !stragglers.may_retry_idle(noticed) && stragglers.may_retry_idle(10 + 256),
            "{noticed}"
        );
    }

    #[test]
    fn recovered_device_stays_and_others_are_retried() {
        let mut stragglers = StragglerDetector::default();
        stragglers.record_active(&["b".to_owned(), "a".to_owned()]);
        stragglers.record_active(&["a".to_owned()]);
        assert!(stragglers.ever_active().eq(["a", "b"]));
        stragglers.record_review(20, false);
        // A single worker is not measured.
        let retried_at = (21..).find(|&step| stragglers.observe(step, &[Some((0.0, 0.0))], true).is_some()).unwrap();
        assert_eq!(retried_at, 84);
        stragglers.record_review(retried_at, true);
        // A third device is still too slow.
        let found =
            (retried_at + 1..).find(|&step| stragglers.observe(step, &took(&[1.0, 1.01]), true).is_some()).unwrap();
        assert_eq!(found, retried_at + MIN_STEPS as u64 + 64);
    }
}
