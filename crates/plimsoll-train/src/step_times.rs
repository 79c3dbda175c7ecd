//! Measured step durations: over the whole run, and between two changes of the plan. Pure arithmetic.

/// Seconds of each step since the run was last started, in order.
#[derive(Clone, Debug, Default)]
pub struct StepTimes {
    seconds: Vec<f64>,
    /// Changes of the plan: each has the number of steps before it, and the index of the first step entirely under the
    /// new plan.
    plan_changes: Vec<(usize, usize)>,
}

impl StepTimes {
    /// Appends the duration of a step in seconds.
    pub fn push(&mut self, seconds: f64) {
        self.seconds.push(seconds);
    }

    /// Forgets all but the first `steps` steps, because the run restarted from a checkpoint.
    pub fn truncate(&mut self, steps: usize) {
        self.seconds.truncate(steps);
        for (until, first) in &mut self.plan_changes {
            (*until, *first) = ((*until).min(steps), (*first).min(steps));
        }
    }

    /// Returns whether no step has been recorded.
    pub fn is_empty(&self) -> bool {
        self.seconds.is_empty()
    }

    /// Returns the mean number of steps per second; `None` before the first step.
    pub fn steps_per_second(&self) -> Option<f64> {
        let seconds: f64 = self.seconds.iter().sum();
        (seconds > 0.0).then(|| self.seconds.len() as f64 / seconds)
    }

    /// Returns the duration in seconds below which this fraction of the steps lies; 0 before the first step.
    pub fn quantile(&self, fraction: f64) -> f64 {
        quantile(&self.seconds, fraction)
    }

    /// Records a change of the plan. Returns the median step time in seconds since the previous change, or `None` if no
    /// step ran since. `in_step` tells that the change happens in the middle of a step, which then counts for neither
    /// plan.
    pub fn record_plan_change(&mut self, in_step: bool) -> Option<f64> {
        let (until, first) = (self.seconds.len(), self.plan_changes.last().map_or(0, |&(_, first)| first));
        self.plan_changes.push((until, until + usize::from(in_step)));
        median(self.seconds.get(first..until)?)
    }

    /// Returns the median step time in seconds after each change of the plan, in order; `None` where no step followed.
    pub fn medians_after_plan_changes(&self) -> impl Iterator<Item = Option<f64>> + '_ {
        let ends = self.plan_changes.iter().skip(1).map(|&(until, _)| until).chain([self.seconds.len()]);
        self.plan_changes.iter().zip(ends).map(|(&(_, first), end)| median(self.seconds.get(first..end)?))
    }
}

fn median(seconds: &[f64]) -> Option<f64> {
    (!seconds.is_empty()).then(|| quantile(seconds, 0.5))
}

/// Returns the value below which this fraction of `values` lies; 0 for no values.
pub fn quantile(values: &[f64], fraction: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(((sorted.len() as f64 - 1.0) * fraction).round() as usize).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_step_lowers_mean_rate_not_median() {
        let mut times = StepTimes::default();
        assert_eq!(times.steps_per_second(), None);
        [0.1, 0.1, 0.1, 0.7].into_iter().for_each(|seconds| times.push(seconds));
        assert!((times.steps_per_second().unwrap() - 4.0).abs() < 1e-9 && times.quantile(0.5) == 0.1);
    }

    #[test]
    fn plan_change_separates_medians_and_skips_interrupted_step() {
        let mut times = StepTimes::default();
        assert_eq!(times.record_plan_change(true), None);
        // The plan changed during the first step.
        [9.0, 2.0, 4.0, 3.0].into_iter().for_each(|seconds| times.push(seconds));
        assert_eq!(times.record_plan_change(false), Some(3.0));
        assert_eq!((times.record_plan_change(true), times.record_plan_change(true)), (None, None));
        [8.0, 5.0].into_iter().for_each(|seconds| times.push(seconds));
        assert_eq!(times.medians_after_plan_changes().collect::<Vec<_>>(), [Some(3.0), None, None, Some(5.0)]);
        assert_eq!(times.quantile(1.0), 9.0);
        // The run restarts after step 2: repeated steps are counted once, under the plan that repeats them.
        times.truncate(2);
        times.push(1.0);
        assert_eq!((times.quantile(0.0), times.quantile(1.0)), (1.0, 9.0));
        assert_eq!(times.medians_after_plan_changes().collect::<Vec<_>>(), [Some(2.0), None, None, Some(1.0)]);
    }
}
