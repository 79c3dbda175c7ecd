//! The loss of a step over the completions of a round, with its figures.

use super::groups::{Advantages, CompletionLoss, LossScale, TokenScores};
use super::rounds::{Sample, is_truncated};
use crate::config::{GrpoSection, ImportanceLevel};
use crate::rewards::weighted_sum;
use plimsoll_core::{CompletionFigures, RoundFigures, RoundSeconds};
use std::collections::BTreeMap;

/// The loss of a step over the completions of a round.
#[derive(Debug)]
pub(crate) struct RoundLoss {
    /// The loss.
    pub loss: f64,
    /// Loss weight of each token of each completion.
    pub weights: Vec<Vec<f64>>,
    /// Figures of the step, without seconds.
    pub figures: RoundFigures,
}

/// Log-probabilities of the tokens of all completions of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundScores<'a> {
    /// Under the current weights. `None` if those have sampled the completions, and there is no KL penalty.
    pub policy: Option<&'a [Vec<f64>]>,
    /// Under the initial weights; empty lists without KL penalty.
    pub reference: &'a [Vec<f64>],
}

impl RoundLoss {
    /// Computes the loss of `samples`. Completions without one of `end_tokens` count as truncated.
    pub fn new(settings: &GrpoSection, samples: &[Sample], scores: RoundScores, end_tokens: &[i64]) -> RoundLoss {
        let reward = |sample: &Sample| weighted_sum(&sample.rewards, &settings.reward_weights);
        let rewards: Vec<Option<f64>> = samples.iter().map(reward).collect();
        let advantages = Advantages::new(&rewards, settings.num_generations as usize, settings.scale_rewards);
        let truncated: Vec<bool> =
            samples.iter().map(|sample| is_truncated(&sample.completion_ids, end_tokens)).collect();
        let is_masked = |row: usize| settings.mask_truncated_completions && truncated[row];
        let length = |row: usize| if is_masked(row) { 0 } else { samples[row].completion_ids.len() };
        let tokens = (0..samples.len()).map(length).sum();
        let scale = LossScale { completions: samples.len(), tokens };
        let losses: Vec<CompletionLoss> = (0..samples.len())
            .map(|row| {
                let scores = scores.policy.map(|policy| TokenScores {
                    policy: &policy[row],
                    old: samples[row].old_logps.as_deref(),
                    reference: Some(&scores.reference[row][..]).filter(|reference| !reference.is_empty()),
                });
                CompletionLoss::new(settings, advantages.values[row], length(row), scores, scale)
            })
            .collect();
        let mut weights: Vec<Vec<f64>> = losses.iter().map(|loss| loss.weights.clone()).collect();
        // Tokens of a masked completion have no weight.
        weights.iter_mut().zip(samples).for_each(|(row, sample)| row.resize(sample.completion_ids.len(), 0.0));
        let figures = RoundFigures {
            reward: advantages.reward,
            reward_std: advantages.reward_std,
            frac_reward_zero_std: advantages.frac_reward_zero_std,
            rewards: means_of_rewards(settings, samples),
            kl: (settings.beta > 0.0).then(|| losses.iter().map(|loss| loss.kl).sum::<f64>() / tokens.max(1) as f64),
            entropy: mean(samples.iter().filter_map(|sample| sample.entropy)),
            clip_ratio: scores.policy.map(|_| clip_ratio(settings, &losses, scale)),
            sampling_difference: mean(samples.iter().flat_map(sampling_differences)),
            completions: CompletionFigures {
                count: samples.len() as u64,
                mean_length: mean(samples.iter().map(|sample| sample.completion_ids.len() as f64)).unwrap_or(0.0),
                clipped_ratio: mean(truncated.iter().map(|&truncated| f64::from(u8::from(truncated)))).unwrap_or(0.0),
            },
            seconds: RoundSeconds::default(),
        };
        RoundLoss { loss: losses.iter().map(|loss| loss.loss).sum(), weights, figures }
    }
}

/// Returns the share of tokens, or of completions, whose ratio is clipped.
fn clip_ratio(settings: &GrpoSection, losses: &[CompletionLoss], scale: LossScale) -> f64 {
    let units = match settings.importance_sampling_level {
        ImportanceLevel::Token => scale.tokens,
        ImportanceLevel::Sequence => scale.completions,
    };
    losses.iter().map(|loss| loss.clipped as f64).sum::<f64>() / units.max(1) as f64
}

/// Returns the mean of each reward under its name; empty if the rewards have no names.
fn means_of_rewards(settings: &GrpoSection, samples: &[Sample]) -> BTreeMap<String, f64> {
    let of = |index: usize| samples.iter().filter_map(move |sample| *sample.rewards.get(index)?);
    let named = settings.rewards.iter().enumerate();
    named.map(|(index, name)| (name.clone(), mean(of(index)).unwrap_or(f64::NAN))).collect()
}

/// Returns the absolute differences between the log-probabilities of the sampler and those of the loss.
fn sampling_differences(sample: &Sample) -> Vec<f64> {
    let (sampled, old) = (sample.sampling_logps.as_deref(), sample.old_logps.as_deref());
    sampled.zip(old).map_or(vec![], |(sampled, old)| sampled.iter().zip(old).map(|(s, o)| (s - o).abs()).collect())
}

/// Returns the mean of some values; `None` without any.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    (count > 0.0).then(|| sum / count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GrpoLoss;

    fn sample(completion: &[i32], reward: f64) -> Sample {
        Sample {
            prompt: None,
            completion: None,
            prompt_ids: vec![1],
            completion_ids: completion.to_vec(),
            rewards: vec![Some(reward)],
            old_logps: None,
            reference_logps: None,
            sampling_logps: None,
            entropy: None,
        }
    }

    fn settings(mask: bool) -> GrpoSection {
        GrpoSection { num_generations: 2, mask_truncated_completions: mask, ..GrpoSection::default() }
    }

    #[test]
    fn masked_completions_have_no_loss() {
        let samples = [sample(&[5, 9], 1.0), sample(&[5, 6, 7], 0.0)];
        let scores = RoundScores { policy: None, reference: &[vec![], vec![]] };
        let all = RoundLoss::new(&settings(false), &samples, scores, &[9]);
        let masked = RoundLoss::new(&settings(true), &samples, scores, &[9]);
        assert!(all.weights.iter().flatten().all(|weight| *weight != 0.0));
        assert_eq!(masked.weights[1], [0.0; 3]);
        assert!((masked.weights[0][0] - all.weights[0][0] * 2.5).abs() < 1e-12, "two of five tokens remain");
        for figures in [&all.figures, &masked.figures] {
            assert_eq!((figures.completions.clipped_ratio, figures.completions.mean_length), (0.5, 2.5));
            assert_eq!((figures.reward, figures.clip_ratio, figures.kl), (0.5, None, None));
        }
    }

    #[test]
    fn figures_compare_sampler_and_loss() {
        let mut samples = [sample(&[5, 9], 1.0), sample(&[6, 9], 0.0)];
        (samples[0].sampling_logps, samples[0].old_logps) = (Some(vec![-1.0, -2.0]), Some(vec![-1.5, -2.0]));
        (samples[0].entropy, samples[1].entropy) = (Some(0.5), Some(1.0));
        let policy = [vec![-1.5, -3.0], vec![-1.0, -1.0]];
        let scores = RoundScores { policy: Some(&policy), reference: &[vec![], vec![]] };
        let settings = GrpoSection { loss_type: GrpoLoss::Grpo, ..settings(false) };
        let figures = RoundLoss::new(&settings, &samples, scores, &[9]).figures;
        assert_eq!((figures.sampling_difference, figures.entropy), (Some(0.25), Some(0.75)));
        // The second token of the first completion became less likely, which its advantage opposes: no clipping.
        assert_eq!(figures.clip_ratio, Some(0.0));
        samples[0].rewards[0] = Some(-1.0);
        let scores = RoundScores { policy: Some(&policy), reference: &[vec![], vec![]] };
        assert_eq!(RoundLoss::new(&settings, &samples, scores, &[9]).figures.clip_ratio, Some(0.25));
    }
}
