//! Detection of stragglers: devices with a measured compute time that deviates from the plan, for example because of
//! heat or another user. One slow device delays all others, so the work is then rebalanced. Small or short deviations
//! change nothing: the smaller a deviation is, the longer it has to last.

use crate::step_times::quantile;
use plimsoll_core::{DeviceSpec, Rates};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

/// Largest tolerated deviation of a worker's slowdown from the mean of the team; 0.05 is 5 %. A slowdown is the
/// measured compute time divided by the planned one.
const MAX_DEVIATION: f64 = 0.05;
/// Smallest number of recent steps from which the slowdown of a worker is judged. Its slowdown is the median over these
/// steps.
const MIN_STEPS: usize = 16;
/// Windows of recent steps over which slowdowns are judged: the least compute time of the slowest workers, in seconds, that
/// their steps add up to. The last is the longest.
const WINDOW_SECONDS: [f64; 5] = [1.0, 2.0, 4.0, 7.0, 10.0];
/// Number of parts of a window, each of which has to show a deviation. A load that begins or ends within the window then
/// changes nothing.
const WINDOW_PARTS: usize = 4;
/// Least time that a deviation must have cost in a window, in seconds: the deviation times the seconds of the window. A
/// deviation of 50 % is judged after 1 s, and one of 5 % after 10 s. A short load by another program changes nothing.
const MIN_COST_SECONDS: f64 = 0.5;
/// Smallest number of steps between two changes of the workers' shares. It doubles each time that the shares are
/// planned anew and no idle device gets work. A slowdown that deviates by more than [`MAX_DEVIATION`] shortens it in
/// proportion: a deviation of twice that value halves it.
const COOLDOWN_STEPS: u64 = 32;

/// Predicted compute seconds of a worker in a step, below which the detector ignores measurements because overhead
/// dominates.
pub(crate) const MIN_PREDICTED_SECONDS: f64 = 0.02;

/// Detector of workers that are slower or faster than planned. It holds recent measurements, and the step in which the
/// shares last changed.
#[derive(Clone, Debug, Default)]
pub struct StragglerDetector {
    /// Recent steps: compute seconds of the slowest worker, and for each worker the ratio of measured to predicted
    /// compute time.
    window: VecDeque<(f64, Vec<f64>)>,
    /// Step in which the workers' shares were last changed or planned anew; 0 at the start.
    last_change: u64,
    /// Number of steps to wait after the last change of the shares. Large deviations from the plan shorten the wait.
    cooldown: u64,
    /// Number of times that the shares were planned anew and no idle device got work. Each time doubles the cooldown.
    reviews: u32,
    /// Names of the devices that computed sequences at any time.
    ever_active: BTreeSet<String>,
    /// Whether a device that was too slow has just been given sequences again. It is then judged as soon as there are
    /// enough measurements, without a cooldown.
    on_probation: bool,
}

impl StragglerDetector {
    /// Forgets all measurements, because the workers' shares were changed or planned anew in `step`. The next change
    /// must wait for the cooldown, unless an idle device has just been given sequences again.
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

    /// Whether a device that was too slow for any work may be given sequences again in this step. The cooldown must be
    /// over, and no other such device may be on probation.
    pub fn may_retry_idle(&self, step: u64) -> bool {
        !self.on_probation && step >= self.last_change + self.cooldown
    }

    /// Records the compute time of each worker in a step, and decides whether the work should be rebalanced. `times`
    /// holds the measured and predicted seconds per worker; `None` for a storage-only worker. `has_idle_candidate`
    /// tells whether an idle device could be given sequences again.
    ///
    /// Returns the slowdown (measured divided by predicted time) of each worker if the work should be rebalanced. Also
    /// returns slowdowns if an idle device may be tried again now; without enough measurements, they are then all 1.
    /// Otherwise returns `None`.
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
        self.drop_old_steps();
        let is_compared: Vec<bool> = times.iter().map(|times| times.is_some() || computed().count() == 1).collect();
        if self.steps_of(WINDOW_SECONDS[0]).is_none() {
            return retry_only();
        }
        let acts = |found: &Judgement| self.is_worth_acting(step, found);
        let costliest = self.costliest_deviation(&is_compared).filter(acts);
        if self.on_probation && costliest.is_none() {
            self.on_probation = false;
            self.restart(step);
        }
        let of_all_steps = || may_retry_idle.then(|| self.slowdowns_in(0..self.window.len()));
        costliest.map(|found| found.slowdowns).or_else(of_all_steps)
    }

    /// Whether a deviation has cost enough, and the cooldown is over that belongs to it.
    fn is_worth_acting(&self, step: u64, found: &Judgement) -> bool {
        let waited = step.saturating_sub(self.last_change) as f64;
        let cooldown_over = waited >= self.cooldown as f64 * MAX_DEVIATION / found.deviation;
        (found.cost_seconds >= MIN_COST_SECONDS || self.on_probation) && cooldown_over
    }

    /// Removes steps that the longest window does not need.
    fn drop_old_steps(&mut self) {
        let longest = WINDOW_SECONDS[WINDOW_SECONDS.len() - 1];
        let mut seconds: f64 = self.window.iter().map(|(seconds, _)| seconds).sum();
        while self.window.len() > MIN_STEPS && seconds - self.window[0].0 >= longest {
            seconds -= self.window.pop_front().map_or(0.0, |(seconds, _)| seconds);
        }
    }

    /// Judges the slowdowns in each window that the recent steps fill, and returns the judgement in which the deviation
    /// has cost most. Compares the workers that `is_compared` selects. Returns `None` if no deviation is too large.
    fn costliest_deviation(&self, is_compared: &[bool]) -> Option<Judgement> {
        let windows = WINDOW_SECONDS.iter().filter_map(|&seconds| self.steps_of(seconds));
        let judged = windows.filter_map(|(steps, seconds)| self.judge_steps(steps, seconds, is_compared));
        judged.max_by(|a, b| a.cost_seconds.total_cmp(&b.cost_seconds))
    }

    /// Returns the number of the most recent steps that add up to at least `seconds`, and their seconds. Returns `None` if
    /// all recorded steps add up to less, or if there are too few.
    fn steps_of(&self, seconds: f64) -> Option<(usize, f64)> {
        let mut sum = 0.0;
        for (number, (own, _)) in self.window.iter().rev().enumerate() {
            sum += own;
            if number + 1 >= MIN_STEPS && sum >= seconds {
                return Some((number + 1, sum));
            }
        }
        None
    }

    /// Computes the slowdown of each worker over the last `steps` steps, which took `seconds`. The deviation is one that
    /// every part of these steps shows. Returns `None` if it is at most [`MAX_DEVIATION`]: mostly the newest part tells,
    /// and the others are not looked at.
    fn judge_steps(&self, steps: usize, seconds: f64, is_compared: &[bool]) -> Option<Judgement> {
        let first = self.window.len() - steps;
        let mut deviation = f64::INFINITY;
        for part in (0..WINDOW_PARTS).rev() {
            let part = first + part * steps / WINDOW_PARTS..first + (part + 1) * steps / WINDOW_PARTS;
            deviation = deviation.min(largest_deviation(&self.slowdowns_in(part), is_compared));
            if deviation <= MAX_DEVIATION {
                return None;
            }
        }
        let slowdowns = self.slowdowns_in(first..self.window.len());
        let deviation = deviation.min(largest_deviation(&slowdowns, is_compared));
        (deviation > MAX_DEVIATION).then_some(Judgement { slowdowns, deviation, cost_seconds: deviation * seconds })
    }

    /// Returns the median slowdown of each worker over the recorded steps in a range.
    fn slowdowns_in(&self, steps: Range<usize>) -> Vec<f64> {
        let ranks = self.window.front().map_or(0, |(_, slowdowns)| slowdowns.len());
        let of_rank = |rank| self.window.range(steps.clone()).map(|(_, slowdowns)| slowdowns[rank]).collect::<Vec<_>>();
        (0..ranks).map(|rank| quantile(&of_rank(rank), 0.5)).collect()
    }

    /// Records that the workers' shares were planned anew in this step, and whether an idle device received sequences
    /// again. If none did, doubles the number of steps that must pass before later changes.
    pub fn record_review(&mut self, step: u64, idle_readmitted: bool) {
        self.on_probation = idle_readmitted;
        if !idle_readmitted {
            self.reviews += 1;
        }
        self.restart(step);
    }
}

/// Returns the largest deviation of a slowdown from the mean, among the workers that `is_compared` selects; 0.1 is 10 %.
fn largest_deviation(slowdowns: &[f64], is_compared: &[bool]) -> f64 {
    let compared = || slowdowns.iter().zip(is_compared).filter(|(_, is_compared)| **is_compared).map(|(s, _)| *s);
    let mean = compared().sum::<f64>() / compared().count() as f64;
    compared().map(|slowdown| (slowdown / mean - 1.0).abs()).fold(0.0, f64::max)
}

/// The slowdowns of the workers in a window of recent steps.
struct Judgement {
    /// The median slowdown of each worker.
    slowdowns: Vec<f64>,
    /// The largest deviation of a worker that every part of the window shows; 0.1 is 10 %.
    deviation: f64,
    /// The deviation times the seconds of the window.
    cost_seconds: f64,
}

/// Reaction to workers that are slower or faster than planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StragglerAction {
    /// Divide the work anew.
    Rebalance,
    /// Keep the shares, and warn the user with this message.
    Report(String),
    /// Keep the shares.
    Keep,
}

/// Decides what to do about the slowdowns of computing workers, each with the device's name. A deterministic run keeps
/// its shares, and reports workers that are slower than the mean.
pub fn decide_after_slowdown(deterministic: bool, slowdowns: &[(&str, f64)]) -> StragglerAction {
    if !deterministic {
        return StragglerAction::Rebalance;
    }
    let mean = match slowdowns {
        // A single worker is compared with its plan.
        [_] => 1.0,
        _ => slowdowns.iter().map(|(_, times)| times).sum::<f64>() / slowdowns.len() as f64,
    };
    let slow = slowdowns.iter().filter(|(_, times)| times / mean > 1.0 + MAX_DEVIATION);
    let described: Vec<String> =
        slow.map(|(device, times)| format!("{device} takes {times:.2} times the planned time")).collect();
    match described.is_empty() {
        true => StragglerAction::Keep,
        false => StragglerAction::Report(format!(
            "{}; it keeps its share, because run.deterministic = true",
            described.join(", ")
        )),
    }
}

/// Sets the rates in `workers` and `idle` (devices outside the team) that the planner assumes for new shares.
/// `slowdowns` holds, for each worker, its measured compute time divided by the planned one; `None` for a worker that
/// computes no sequences. Returns one description for each slowdown other than 1.
///
/// A worker that computes gets its present rates divided by its slowdown. Every other device gets the rates that it had
/// before the run. If several workers compute, those rates are divided by the smallest slowdown of these workers since
/// the start.
pub fn assume_rates<'a>(
    workers: &mut [DeviceSpec],
    idle: &mut [DeviceSpec],
    slowdowns: &[Option<f64>],
    rates_before_run: impl Fn(&str) -> &'a Rates,
) -> Vec<String> {
    let (mut reasons, mut since_start) = (Vec::new(), Vec::new());
    for (worker, slowdown) in workers.iter_mut().zip(slowdowns) {
        let Some(slowdown) = *slowdown else { continue };
        worker.rates = worker.rates.paced(1.0 / slowdown);
        since_start.push(rates_before_run(&worker.name).f32_flops / worker.rates.f32_flops);
        if slowdown != 1.0 {
            reasons.push(format!("{} takes {slowdown:.2} times the planned time", worker.name));
        }
    }
    let several = since_start.len() > 1;
    let common_slowdown = if several { since_start.into_iter().fold(f64::INFINITY, f64::min) } else { 1.0 };
    let without_sequences = workers.iter_mut().zip(slowdowns).filter(|(_, slowdown)| slowdown.is_none());
    for device in without_sequences.map(|(worker, _)| worker).chain(idle) {
        device.rates = rates_before_run(&device.name).paced(1.0 / common_slowdown);
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Budget, Bytes};
    use plimsoll_plan::paper::paper;

    #[test]
    fn idle_devices_share_common_slowdown() {
        let device = |name: &str| {
            let device = paper("rtx3090", Budget::Amount(Bytes::gib(8))).expect("the table has this device");
            DeviceSpec { name: name.to_owned(), ..device }
        };
        let before = device("any").rates;
        // Slowdowns of the workers, then the expected paces of three workers and of an idle device.
        let rows: [([Option<f64>; 3], [f64; 4], usize); 4] = [
            ([Some(2.0), Some(1.0), None], [0.5, 1.0, 1.0, 1.0], 1),
            ([Some(4.0), Some(2.0), None], [0.25, 0.5, 0.5, 0.5], 2),
            ([Some(2.0), Some(2.0), Some(2.0)], [0.5, 0.5, 0.5, 0.5], 3),
            // A single computing worker says nothing about the others.
            ([Some(2.0), None, None], [0.5, 1.0, 1.0, 1.0], 1),
        ];
        for (slowdowns, paces, reasons) in rows {
            let (mut workers, mut idle) = (["a", "b", "c"].map(device), [device("d")]);
            let described = assume_rates(&mut workers, &mut idle, &slowdowns, |_| &before);
            assert_eq!(described.len(), reasons, "{described:?}");
            let all = workers.iter().chain(&idle).map(|device| device.rates.f32_flops / before.f32_flops);
            assert_eq!(all.collect::<Vec<_>>(), paces, "{slowdowns:?}");
        }
    }

    #[test]
    fn deterministic_run_reports_stragglers_only() {
        let report = |text: &str| {
            StragglerAction::Report(format!("{text}; it keeps its share, because run.deterministic = true"))
        };
        type Row<'a> = (bool, &'a [(&'a str, f64)], StragglerAction);
        let rows: [Row; 6] = [
            (false, &[("a", 1.0), ("b", 2.0)], StragglerAction::Rebalance),
            (false, &[("a", 1.0)], StragglerAction::Rebalance),
            (true, &[("a", 1.0), ("b", 2.0)], report("b takes 2.00 times the planned time")),
            (true, &[("a", 1.5)], report("a takes 1.50 times the planned time")),
            // All are equally slow, or one is faster than the others.
            (true, &[("a", 2.0), ("b", 2.0)], StragglerAction::Keep),
            (true, &[("a", 0.5)], StragglerAction::Keep),
        ];
        for (deterministic, slowdowns, action) in rows {
            assert_eq!(decide_after_slowdown(deterministic, slowdowns), action, "{slowdowns:?}");
        }
    }

    /// Returns compute times of workers with these slowdowns: measured and predicted seconds.
    fn took(slowdowns: &[f64]) -> Vec<Option<(f64, f64)>> {
        slowdowns.iter().map(|factor| Some((0.5 * factor, 0.5))).collect()
    }

    #[test]
    fn slow_device_is_noticed_but_not_slow_step() {
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
    fn smaller_deviation_has_to_last_longer() {
        // Slowdown of one of two workers, and the seconds after which it is noticed. The first waits for 16 steps.
        for (factor, least, most) in [(4.0, 1.9, 2.0), (2.0, 1.9, 2.3), (1.3, 3.9, 4.4), (1.13, 9.9, 10.5)] {
            let mut stragglers = StragglerDetector::default();
            let noticed = (1..2000)
                .find(|&step| {
                    stragglers.observe(step, &[Some((0.03 * factor, 0.03)), Some((0.03, 0.03))], false).is_some()
                })
                .expect("it stays slow");
            let seconds = noticed as f64 * 0.03 * factor;
            assert!((least..most).contains(&seconds), "{factor}: {seconds} s");
        }
    }

    #[test]
    fn slowdown_of_five_seconds_is_ignored() {
        let mut stragglers = StragglerDetector::default();
        for step in 1..1000 {
            let factor = if (100..260).contains(&step) { 1.13 } else { 1.0 };
            let times = [Some((0.03 * factor, 0.03)), Some((0.03, 0.03))];
            assert_eq!(stragglers.observe(step, &times, false), None, "step {step}");
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
