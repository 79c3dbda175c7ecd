//! What steps took, measured: of the whole run, and before and after each of its retreats. Numbers only.

/// Seconds of the steps of a run since it was last started, in order.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    seconds: Vec<f64>,
    /// Where the run turned to another plan: steps until then, and the first one that was done under it as a whole.
    turns: Vec<(usize, usize)>,
}

impl Pace {
    /// A step took so long.
    pub fn push(&mut self, seconds: f64) {
        self.seconds.push(seconds);
    }

    /// The run went back: only so many of its first steps stand, the others are done again.
    pub fn back_to(&mut self, steps: usize) {
        self.seconds.truncate(steps);
        for (until, first) in &mut self.turns {
            (*until, *first) = ((*until).min(steps), (*first).min(steps));
        }
    }

    /// Whether no step was done.
    pub fn is_empty(&self) -> bool {
        self.seconds.is_empty()
    }

    /// Steps a second, over all; none where no step was done.
    pub fn steps_per_second(&self) -> Option<f64> {
        let seconds: f64 = self.seconds.iter().sum();
        (seconds > 0.0).then(|| self.seconds.len() as f64 / seconds)
    }

    /// The value below which `share` of all lie.
    pub fn quantile(&self, share: f64) -> f64 {
        quantile(&self.seconds, share)
    }

    /// The run turns to another plan; `in_step` says that it is in the middle of a step, which is of neither plan. The median
    /// since the last turn, if there was a step.
    pub fn turns(&mut self, in_step: bool) -> Option<f64> {
        let (until, first) = (self.seconds.len(), self.turns.last().map_or(0, |&(_, first)| first));
        self.turns.push((until, until + usize::from(in_step)));
        median(self.seconds.get(first..until)?)
    }

    /// The median from each turn to the next, in order.
    pub fn after_turns(&self) -> impl Iterator<Item = Option<f64>> + '_ {
        let ends = self.turns.iter().skip(1).map(|&(until, _)| until).chain([self.seconds.len()]);
        self.turns.iter().zip(ends).map(|(&(_, first), end)| median(self.seconds.get(first..end)?))
    }
}

fn median(seconds: &[f64]) -> Option<f64> {
    (!seconds.is_empty()).then(|| quantile(seconds, 0.5))
}

/// The value below which `share` of the values lie; 0 where there is none.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(((sorted.len() as f64 - 1.0) * share).round() as usize).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_took_longer_counts_in_the_rate_of_all() {
        let mut pace = Pace::default();
        assert_eq!(pace.steps_per_second(), None);
        [0.1, 0.1, 0.1, 0.7].into_iter().for_each(|seconds| pace.push(seconds));
        assert!((pace.steps_per_second().unwrap() - 4.0).abs() < 1e-9 && pace.quantile(0.5) == 0.1);
    }

    #[test]
    fn steps_before_and_after_a_turn_are_told_apart_and_one_in_which_it_happened_is_of_neither() {
        let mut pace = Pace::default();
        assert_eq!(pace.turns(true), None);
        // The first step was done in both ways.
        [9.0, 2.0, 4.0, 3.0].into_iter().for_each(|seconds| pace.push(seconds));
        assert_eq!(pace.turns(false), Some(3.0));
        assert_eq!((pace.turns(true), pace.turns(true)), (None, None));
        [8.0, 5.0].into_iter().for_each(|seconds| pace.push(seconds));
        assert_eq!(pace.after_turns().collect::<Vec<_>>(), [Some(3.0), None, None, Some(5.0)]);
        assert_eq!(pace.quantile(1.0), 9.0);
        // Only the first two steps stand: what is done again is counted once, under the plan that it is done under.
        pace.back_to(2);
        pace.push(1.0);
        assert_eq!((pace.quantile(0.0), pace.quantile(1.0)), (1.0, 9.0));
        assert_eq!(pace.after_turns().collect::<Vec<_>>(), [Some(2.0), None, None, Some(1.0)]);
    }
}
