//! Alarms of a run over completions: signs in the figures of its newest steps that it no longer learns, with settings to
//! change.

use crate::config::GrpoSection;
use plimsoll_core::RoundFigures;
use std::collections::VecDeque;

/// Number of steps over which figures are averaged.
const WINDOW: usize = 10;
/// Number of gradient norms that are kept, those of the window among them.
const NORMS_MAX: usize = 100;
/// Share of groups with equal rewards from which an alarm is raised.
const EQUAL_REWARDS_MIN: f64 = 0.8;
/// Share of completions without an end token from which an alarm is raised.
const CLIPPED_MIN: f64 = 0.5;
/// Entropy at which an alarm is raised, as a fraction of that of the first steps.
const ENTROPY_MAX: f64 = 0.1;
/// KL divergence of a token, in nats, from which an alarm is raised.
const KL_MIN: f64 = 1.0;
/// Ratio of gradient norms to those before from which an alarm is raised.
const NORM_GROWTH_MIN: f64 = 10.0;

/// A sign that a run over completions no longer learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AlarmKind {
    EqualRewards,
    LowEntropy,
    ClippedCompletions,
    HighKl,
    LargeNorms,
}

/// The figures of one step.
#[derive(Clone, Copy, Debug)]
struct StepFigures {
    reward: f64,
    equal_rewards: f64,
    entropy: Option<f64>,
    clipped: f64,
    kl: Option<f64>,
}

/// The alarms of a run, with the figures of its newest steps. Nothing is raised before ten steps are known.
#[derive(Debug, Default)]
pub(crate) struct Alarms {
    /// Figures of the newest steps, at most [`WINDOW`].
    steps: VecDeque<StepFigures>,
    /// Gradient norms of the newest steps, at most [`NORMS_MAX`].
    norms: VecDeque<f64>,
    /// Mean entropy of the first steps, once there are [`WINDOW`] of them.
    first_entropy: Option<f64>,
    /// Alarms that were raised, and whose reason still holds.
    raised: Vec<AlarmKind>,
}

impl Alarms {
    /// Adds the figures of a step with its gradient norm. Returns a message for each new alarm: an alarm is repeated only
    /// after its reason has ceased.
    pub fn observe(&mut self, figures: &RoundFigures, norm: f64, settings: &GrpoSection) -> Vec<String> {
        let RoundFigures { reward, frac_reward_zero_std, entropy, kl, completions, .. } = figures;
        if self.steps.len() == WINDOW {
            self.steps.pop_front();
        }
        self.steps.push_back(StepFigures {
            reward: *reward,
            equal_rewards: *frac_reward_zero_std,
            entropy: *entropy,
            clipped: completions.clipped_ratio,
            kl: *kl,
        });
        if self.norms.len() == NORMS_MAX {
            self.norms.pop_front();
        }
        // Without any advantage, the gradient is that of the KL penalty alone, or zero.
        if *frac_reward_zero_std < 1.0 {
            self.norms.push_back(norm);
        }
        if self.steps.len() < WINDOW {
            return Vec::new();
        }
        if self.first_entropy.is_none() {
            self.first_entropy = self.mean_of(|step| step.entropy);
        }
        let found = self.find(settings);
        let is_new = |(kind, _): &(AlarmKind, String)| !self.raised.contains(kind);
        let messages = found.iter().filter(|alarm| is_new(alarm)).map(|(_, message)| message.clone()).collect();
        self.raised = found.into_iter().map(|(kind, _)| kind).collect();
        messages
    }

    /// Forgets the newest steps, which the run repeats. The entropy of its first steps stays known.
    pub fn forget_steps(&mut self) {
        self.steps.clear();
        self.norms.clear();
    }

    /// Returns the alarms for which there is a reason, with their messages.
    fn find(&self, settings: &GrpoSection) -> Vec<(AlarmKind, String)> {
        let mut found = Vec::new();
        let equal_rewards = self.mean_of(|step| Some(step.equal_rewards)).unwrap_or(0.0);
        if equal_rewards >= EQUAL_REWARDS_MIN {
            let reward = self.mean_of(|step| Some(step.reward)).unwrap_or(f64::NAN);
            let message = format!(
                "in {:.0} % of the groups of the last {WINDOW} steps, all rewards are equal (mean reward {reward:.2}): these \
                 groups teach nothing. If the reward is as high as it gets, stop the run or take harder prompts; else take \
                 easier ones, raise grpo.num_generations, or add a reward with grades",
                100.0 * equal_rewards
            );
            found.push((AlarmKind::EqualRewards, message));
        }
        let entropy = self.first_entropy.zip(self.mean_of(|step| step.entropy));
        if let Some((first, entropy)) =
            entropy.filter(|(first, entropy)| *first > 0.0 && *entropy <= ENTROPY_MAX * first)
        {
            let message = format!(
                "the mean entropy of completions fell from {first:.3} to {entropy:.3} nats: those of a group hardly differ. \
                 Unless the task is solved, lower train.learning_rate, or raise grpo.epsilon_high or grpo.beta"
            );
            found.push((AlarmKind::LowEntropy, message));
        }
        let clipped = self.mean_of(|step| Some(step.clipped)).unwrap_or(0.0);
        if clipped >= CLIPPED_MIN {
            let message = format!(
                "{:.0} % of the completions of the last {WINDOW} steps have no end token within \
                 grpo.max_completion_length = {}: raise it, add the reward `length_penalty`, or set \
                 grpo.mask_truncated_completions = true",
                100.0 * clipped,
                settings.max_completion_length
            );
            found.push((AlarmKind::ClippedCompletions, message));
        }
        if let Some(kl) = self.mean_of(|step| step.kl).filter(|kl| *kl >= KL_MIN) {
            let message = format!(
                "the mean KL divergence from the initial weights is {kl:.2} nats for each token: raise grpo.beta = {}, or \
                 lower train.learning_rate",
                settings.beta
            );
            found.push((AlarmKind::HighKl, message));
        }
        if let Some((before, now)) = self.norm_growth().filter(|(before, now)| *now >= NORM_GROWTH_MIN * before) {
            let message = format!(
                "the gradient norm rose from {before:.3} to {now:.3} (medians): lower train.learning_rate, or continue \
                 from an earlier checkpoint"
            );
            found.push((AlarmKind::LargeNorms, message));
        }
        found
    }

    /// Returns the mean of a figure over the newest steps; `None` if one of them has none.
    fn mean_of(&self, figure: impl Fn(&StepFigures) -> Option<f64>) -> Option<f64> {
        let values = self.steps.iter().map(figure).collect::<Option<Vec<f64>>>()?;
        Some(values.iter().sum::<f64>() / values.len() as f64)
    }

    /// Returns the medians of the gradient norms before the window and within it; `None` before there are as many.
    fn norm_growth(&self) -> Option<(f64, f64)> {
        let before = self.norms.len().checked_sub(WINDOW).filter(|count| *count >= WINDOW)?;
        let median = |mut norms: Vec<f64>| {
            norms.sort_by(f64::total_cmp);
            norms[norms.len() / 2]
        };
        let (first, last) = (self.norms.iter().take(before), self.norms.iter().skip(before));
        let before = median(first.copied().collect());
        (before > 0.0).then(|| (before, median(last.copied().collect())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{CompletionFigures, RoundSeconds};
    use std::collections::BTreeMap;

    fn healthy() -> RoundFigures {
        RoundFigures {
            reward: 0.5,
            reward_std: 0.5,
            frac_reward_zero_std: 0.1,
            rewards: BTreeMap::new(),
            kl: Some(0.01),
            entropy: Some(2.0),
            clip_ratio: None,
            sampling_difference: None,
            completions: CompletionFigures { clipped_ratio: 0.1, ..CompletionFigures::default() },
            seconds: RoundSeconds::default(),
        }
    }

    /// Returns the messages of `count` equal steps, each with its number among them.
    fn observe(alarms: &mut Alarms, count: usize, figures: &RoundFigures, norm: f64) -> Vec<(usize, String)> {
        let settings = GrpoSection { beta: 0.04, ..GrpoSection::default() };
        let mut messages = Vec::new();
        for step in 1..=count {
            messages.extend(alarms.observe(figures, norm, &settings).into_iter().map(|message| (step, message)));
        }
        messages
    }

    #[test]
    fn healthy_steps_raise_nothing() {
        assert_eq!(observe(&mut Alarms::default(), 200, &healthy(), 0.5), []);
    }

    #[test]
    fn each_sign_raises_its_alarm_once_until_it_ceases() {
        let clipped = CompletionFigures { clipped_ratio: 0.9, ..CompletionFigures::default() };
        let cases = [
            (RoundFigures { frac_reward_zero_std: 1.0, ..healthy() }, 0.5, "all rewards are equal"),
            (RoundFigures { entropy: Some(0.01), ..healthy() }, 0.5, "fell from 2.000 to"),
            (RoundFigures { completions: clipped, ..healthy() }, 0.5, "grpo.max_completion_length = 512"),
            (RoundFigures { kl: Some(4.0), ..healthy() }, 0.5, "raise grpo.beta = 0.04"),
            (healthy(), 20.0, "rose from 0.500 to 20.000"),
        ];
        for (figures, norm, expected) in cases {
            let mut alarms = Alarms::default();
            observe(&mut alarms, 50, &healthy(), 0.5);
            let messages = observe(&mut alarms, 30, &figures, norm);
            assert!(matches!(&messages[..], [(2..=10, message)] if message.contains(expected)), "{messages:?}");
            observe(&mut alarms, 200, &healthy(), 0.5);
            assert_eq!(observe(&mut alarms, 30, &figures, norm).len(), 1, "{expected}");
            alarms.forget_steps();
            assert_eq!(observe(&mut alarms, 9, &figures, norm), [], "{expected}");
        }
    }

    #[test]
    fn first_steps_raise_nothing() {
        let figures = RoundFigures { frac_reward_zero_std: 1.0, kl: Some(9.0), ..healthy() };
        let messages = observe(&mut Alarms::default(), 10, &figures, 1e3);
        assert!(messages.iter().all(|(step, _)| *step == 10) && messages.len() == 2, "{messages:?}");
    }
}
