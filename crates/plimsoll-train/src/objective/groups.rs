//! The loss of groups of completions (GRPO): advantages from rewards, and the loss of each token with its derivative with
//! respect to its log-probability. Names and formulas are those of TRL's `GRPOTrainer`.

use crate::config::{GrpoLoss, GrpoSection, ImportanceLevel, RewardScale};

/// Added to the standard deviation that divides advantages.
const DEVIATION_OFFSET: f64 = 1e-4;
/// Standard deviation up to which rewards count as equal.
const DEVIATION_ZERO: f64 = 1e-8;

/// The advantages of the completions of a round, and figures of their rewards.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Advantages {
    /// Advantage of each completion; 0 for one without a reward.
    pub values: Vec<f64>,
    /// Mean of the rewards; NaN without any.
    pub reward: f64,
    /// Standard deviation of the rewards; NaN for fewer than two.
    pub reward_std: f64,
    /// Share of completions, 0 to 1, whose rewards have no deviation: those of their group, or all with `batch`.
    pub frac_reward_zero_std: f64,
}

impl Advantages {
    /// Computes the advantages of a round. `rewards` has one weighted reward for each completion, `None` for one without;
    /// each `group` of them has the same prompt.
    pub fn new(rewards: &[Option<f64>], group: usize, scale: RewardScale) -> Advantages {
        let (reward, reward_std) = mean_and_deviation(rewards);
        let (mut values, mut without_deviation) = (Vec::with_capacity(rewards.len()), 0);
        for group in rewards.chunks(group) {
            let (mean, own) = mean_and_deviation(group);
            let deviation = if scale == RewardScale::Batch { reward_std } else { own };
            without_deviation += if deviation.abs() <= DEVIATION_ZERO { group.len() } else { 0 };
            let divisor = if scale == RewardScale::None { 1.0 } else { deviation + DEVIATION_OFFSET };
            let advantage = |reward: &Option<f64>| reward.map_or(0.0, |reward| (reward - mean) / divisor);
            // A group with one reward has no deviation.
            values.extend(group.iter().map(advantage).map(|value| if value.is_nan() { 0.0 } else { value }));
        }
        let frac_reward_zero_std = without_deviation as f64 / rewards.len().max(1) as f64;
        Advantages { values, reward, reward_std, frac_reward_zero_std }
    }
}

/// Returns mean and standard deviation of a sample; NaN where there are too few values.
fn mean_and_deviation(values: &[Option<f64>]) -> (f64, f64) {
    let count = values.iter().flatten().count() as f64;
    let mean = values.iter().flatten().sum::<f64>() / count;
    let squares = values.iter().flatten().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, if count > 1.0 { (squares / (count - 1.0)).sqrt() } else { f64::NAN })
}

/// Log-probabilities of the tokens of a completion, all of the same length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenScores<'a> {
    /// Under the current weights.
    pub policy: &'a [f64],
    /// When the completion was sampled, or at the first step of its round; `None` for the current weights.
    pub old: Option<&'a [f64]>,
    /// Under the initial weights; `None` without KL penalty.
    pub reference: Option<&'a [f64]>,
}

/// The divisors of the loss of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossScale {
    /// Number of completions of the step.
    pub completions: usize,
    /// Number of tokens of all completions that are in the loss.
    pub tokens: usize,
}

/// The loss of a completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CompletionLoss {
    /// Part of the loss of the step.
    pub loss: f64,
    /// Loss weight of each token: minus the derivative of the loss with respect to its log-probability. With them, the
    /// gradient of the weighted cross entropy is that of the loss.
    pub weights: Vec<f64>,
    /// Sum over tokens of the KL divergence from the reference, as estimated by the penalty; 0 without reference.
    pub kl: f64,
    /// Number of tokens whose ratio is clipped; with ratios of completions 1 if that of the completion is.
    pub clipped: usize,
}

impl CompletionLoss {
    /// Computes the loss of a completion, of which `tokens` tokens are in the loss: all or none. `scores` may be `None` if old and current weights are the same
    /// and there is no reference.
    pub fn new(
        settings: &GrpoSection,
        advantage: f64,
        tokens: usize,
        scores: Option<TokenScores>,
        scale: LossScale,
    ) -> CompletionLoss {
        let divisor = match settings.loss_type {
            GrpoLoss::Grpo => scale.completions * tokens.max(1),
            GrpoLoss::Bnpo | GrpoLoss::Dapo => scale.tokens.max(1),
            GrpoLoss::DrGrpo => scale.completions * settings.max_completion_length as usize,
        };
        let share = 1.0 / divisor as f64;
        let log_ratios: Vec<f64> = match scores {
            Some(TokenScores { policy, old: Some(old), .. }) => {
                policy.iter().zip(old).take(tokens).map(|(policy, old)| policy - old).collect()
            }
            _ => vec![0.0; tokens],
        };
        let ratios: Vec<f64> = match settings.importance_sampling_level {
            ImportanceLevel::Token => log_ratios.into_iter().map(f64::exp).collect(),
            ImportanceLevel::Sequence => {
                let mean = log_ratios.iter().sum::<f64>() / tokens.max(1) as f64;
                vec![mean.exp(); tokens]
            }
        };
        let [low, high] = settings.ratio_range();
        let penalty = scores.and_then(|scores| KlPenalty::new(settings, &scores, &ratios));
        let kl = penalty.as_ref().map_or(0.0, |penalty| penalty.values.iter().sum());
        let mut found = CompletionLoss { kl, ..CompletionLoss::default() };
        for (token, ratio) in ratios.into_iter().enumerate() {
            let (plain, clipped) = (ratio * advantage, ratio.clamp(low, high) * advantage);
            let is_clipped = (ratio < low && advantage < 0.0) || (ratio > high && advantage > 0.0);
            found.clipped += usize::from(is_clipped);
            let mut loss = -plain.min(clipped);
            let mut weight = if is_clipped { 0.0 } else { plain };
            if let Some(penalty) = &penalty {
                loss += settings.beta * penalty.values[token];
                weight -= settings.beta * penalty.derivatives[token];
            }
            found.loss += share * loss;
            found.weights.push(share * weight);
        }
        if settings.importance_sampling_level == ImportanceLevel::Sequence {
            found.clipped = found.clipped.min(1);
        }
        found
    }
}

/// The KL penalty of the tokens of a completion: e^d − d − 1, for the difference d of the log-probabilities under the initial
/// and the current weights. With bias correction, it is multiplied by the ratio.
struct KlPenalty {
    values: Vec<f64>,
    /// Derivative of the sum of `values` with respect to the log-probability of each token.
    derivatives: Vec<f64>,
}

impl KlPenalty {
    /// Computes the penalty; `None` without log-probabilities under the initial weights.
    fn new(settings: &GrpoSection, scores: &TokenScores, ratios: &[f64]) -> Option<KlPenalty> {
        let both = scores.reference?.iter().zip(scores.policy).take(ratios.len());
        let differences: Vec<f64> = both.map(|(reference, policy)| reference - policy).collect();
        let plain: Vec<f64> = differences.iter().map(|difference| difference.exp() - difference - 1.0).collect();
        let slopes = differences.iter().map(|difference| 1.0 - difference.exp());
        if !settings.use_bias_correction_kl {
            return Some(KlPenalty { derivatives: slopes.collect(), values: plain });
        }
        // The ratio of a completion depends on all of its tokens alike.
        let mean = plain.iter().sum::<f64>() / plain.len().max(1) as f64;
        let by_ratio = |token: usize| match settings.importance_sampling_level {
            ImportanceLevel::Token => plain[token],
            ImportanceLevel::Sequence => mean,
        };
        let derivatives = slopes.enumerate().map(|(token, slope)| ratios[token] * (slope + by_ratio(token))).collect();
        let values = plain.iter().zip(ratios).map(|(kl, ratio)| kl * ratio).collect();
        Some(KlPenalty { values, derivatives })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: [f64; 3] = [-0.9, -2.0, -0.2];
    const OLD: [f64; 3] = [-1.4, -1.7, -0.25];
    const REFERENCE: [f64; 3] = [-1.0, -1.5, -0.4];
    const SCALE: LossScale = LossScale { completions: 4, tokens: 11 };

    fn loss(settings: &GrpoSection, advantage: f64, policy: &[f64]) -> CompletionLoss {
        let scores = TokenScores { policy, old: Some(&OLD), reference: Some(&REFERENCE) };
        CompletionLoss::new(settings, advantage, 3, Some(scores), SCALE)
    }

    #[test]
    fn advantages_are_relative_to_their_group() {
        let rewards = [Some(1.0), Some(0.0), Some(0.5), Some(0.5)];
        let found = Advantages::new(&rewards, 2, RewardScale::Group);
        let deviation = 0.5f64.sqrt() + 1e-4;
        assert_eq!(found.values, [0.5 / deviation, -0.5 / deviation, 0.0, 0.0]);
        assert_eq!((found.reward, found.frac_reward_zero_std), (0.5, 0.5));
        assert!((found.reward_std - (0.5f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(Advantages::new(&rewards, 2, RewardScale::None).values, [0.5, -0.5, 0.0, 0.0]);
        let batch = Advantages::new(&rewards, 2, RewardScale::Batch);
        assert_eq!((batch.values[0], batch.frac_reward_zero_std), (0.5 / (found.reward_std + 1e-4), 0.0));
    }

    #[test]
    fn completions_without_reward_have_no_advantage() {
        let found = Advantages::new(&[Some(2.0), None, Some(0.0), None, None, Some(1.0)], 3, RewardScale::Group);
        assert_eq!(found.values[1], 0.0);
        assert!(found.values[0] > 0.0 && found.values[2] < 0.0);
        assert_eq!(found.values[3..], [0.0; 3], "a group with one reward has no deviation");
        assert_eq!(found.reward, 1.0);
        let none = Advantages::new(&[None, None], 2, RewardScale::Batch);
        assert!(none.values == [0.0; 2] && none.reward.is_nan());
    }

    #[test]
    fn weights_are_derivatives_of_the_loss() {
        for loss_type in [GrpoLoss::Grpo, GrpoLoss::Bnpo, GrpoLoss::DrGrpo, GrpoLoss::Dapo] {
            for importance_sampling_level in [ImportanceLevel::Token, ImportanceLevel::Sequence] {
                for (advantage, beta, use_bias_correction_kl) in
                    [(0.7, 0.0, true), (-0.7, 0.0, true), (0.7, 0.3, true), (-0.7, 0.3, true), (-0.7, 0.3, false)]
                {
                    let base = GrpoSection { loss_type, importance_sampling_level, ..GrpoSection::default() };
                    let settings = GrpoSection { beta, use_bias_correction_kl, ..base };
                    let found = loss(&settings, advantage, &POLICY);
                    for token in 0..3 {
                        let at = |step: f64| {
                            let mut policy = POLICY;
                            policy[token] += step;
                            loss(&settings, advantage, &policy).loss
                        };
                        let derivative = (at(1e-6) - at(-1e-6)) / 2e-6;
                        assert!((found.weights[token] + derivative).abs() < 1e-8, "{settings:?}: {token}");
                    }
                }
            }
        }
    }

    #[test]
    fn ratios_are_clipped_where_the_advantage_pushes() {
        let settings = GrpoSection { loss_type: GrpoLoss::Bnpo, ..GrpoSection::default() };
        // The ratios are 1.65, 0.74 and 1.05.
        let (rising, falling) = (loss(&settings, 1.0, &POLICY), loss(&settings, -1.0, &POLICY));
        assert_eq!((rising.clipped, falling.clipped), (1, 1));
        assert_eq!(rising.weights.iter().map(|weight| *weight == 0.0).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(falling.weights.iter().map(|weight| *weight == 0.0).collect::<Vec<_>>(), [false, true, false]);
        let wide = GrpoSection { epsilon_high: Some(0.7), ..settings };
        assert_eq!(loss(&wide, 1.0, &POLICY).clipped, 0);
    }

    #[test]
    fn current_weights_have_ratio_one_and_masked_completions_no_loss() {
        let settings = GrpoSection { loss_type: GrpoLoss::Grpo, ..GrpoSection::default() };
        let found = CompletionLoss::new(&settings, 2.0, 5, None, SCALE);
        let expected = CompletionLoss { loss: -0.5, weights: vec![2.0 / 20.0; 5], ..CompletionLoss::default() };
        assert!((found.loss - expected.loss).abs() < 1e-12);
        assert_eq!(found.weights, expected.weights);
        let scores = TokenScores { policy: &POLICY, old: Some(&OLD), reference: Some(&REFERENCE) };
        for scores in [None, Some(scores)] {
            assert_eq!(CompletionLoss::new(&settings, 2.0, 0, scores, SCALE), CompletionLoss::default(), "masked");
        }
    }
}
