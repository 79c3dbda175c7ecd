//! The objectives of training with their settings: the sections `[dpo]` and `[grpo]` of a run file.

use serde::{Deserialize, Serialize};

/// The objective of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// The labelled tokens of the data are made more likely.
    #[default]
    Supervised,
    /// Direct preference optimization (Rafailov et al., 2023): chosen answers are made more likely than rejected ones, compared
    /// to the model with its initial weights.
    Dpo,
    /// Group relative policy optimization (Shao et al., 2024): completions that the model samples are made more likely or less
    /// likely, by their rewards compared with those of the other completions of the same prompt.
    Grpo,
}

/// The section `[dpo]` of a run file: settings of direct preference optimization.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DpoSection {
    /// Strength of the implicit KL penalty towards the reference model, the model with its initial weights.
    pub beta: f64,
    /// The loss of a pair of answers.
    pub loss_type: DpoLoss,
    /// Assumed share of pairs with chosen and rejected answer swapped; only with the loss `sigmoid`.
    pub label_smoothing: f64,
    /// Whether the reference model is left out: its log-probabilities then count as 0.
    pub reference_free: bool,
}

impl Default for DpoSection {
    fn default() -> DpoSection {
        DpoSection { beta: 0.1, loss_type: DpoLoss::Sigmoid, label_smoothing: 0.0, reference_free: false }
    }
}

/// The loss of a pair of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DpoLoss {
    /// −log σ(β · margin), of DPO.
    #[default]
    Sigmoid,
    /// max(0, 1 − β · margin), of SLiC (Zhao et al., 2023).
    Hinge,
    /// (margin − 1/(2β))², of IPO (Azar et al., 2023), with means over tokens in place of sums.
    Ipo,
}

/// The section `[grpo]` of a run file: settings of group relative policy optimization. Names and defaults are those of TRL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrpoSection {
    /// Number of completions of each prompt: a group.
    pub num_generations: u64,
    /// Number of prompts of a round.
    pub prompts_per_step: u64,
    /// Largest number of tokens of a prompt.
    pub max_prompt_length: u32,
    /// Largest number of tokens of a completion.
    pub max_completion_length: u32,
    /// Softmax temperature of sampling. Log-probabilities of the loss have the same temperature.
    pub temperature: f64,
    /// Probability of the most likely tokens from which the next one is drawn; 1 for all.
    pub top_p: f64,
    /// Number of the most likely tokens from which the next one is drawn; 0 for all.
    pub top_k: u32,
    /// Smallest probability of a token that is drawn, as a share of that of the most likely one; 0 for all.
    pub min_p: f64,
    /// Divisor of positive logits of tokens that were there before, and factor of negative ones; 1 changes none.
    pub repetition_penalty: f64,
    /// Strength of the KL penalty towards the reference model, the model with its initial weights; 0 for none.
    pub beta: f64,
    /// Whether the KL penalty of a token is multiplied by its ratio, which makes the gradient of the penalty unbiased.
    pub use_bias_correction_kl: bool,
    /// Largest decrease of the probability of a token, relative to that at sampling, that the loss rewards.
    pub epsilon: f64,
    /// Largest such increase; `None` for that of `epsilon`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epsilon_high: Option<f64>,
    /// Number of steps that use the completions of a round.
    pub num_iterations: u64,
    /// Division of the loss.
    pub loss_type: GrpoLoss,
    /// Rewards whose standard deviation divides advantages.
    pub scale_rewards: RewardScale,
    /// Unit of which the loss compares the probability with that at sampling.
    pub importance_sampling_level: ImportanceLevel,
    /// Whether completions without an end token are left out of the loss.
    pub mask_truncated_completions: bool,
    /// Rewards of completions, such as `exact_match`.
    pub rewards: Vec<String>,
    /// Weight of each reward; all 1 if empty.
    pub reward_weights: Vec<f64>,
    /// Seconds without an answer after which a command of `rewards` counts as hung.
    pub reward_timeout_seconds: f64,
}

impl Default for GrpoSection {
    fn default() -> GrpoSection {
        GrpoSection {
            num_generations: 8,
            prompts_per_step: 8,
            max_prompt_length: 512,
            max_completion_length: 512,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            beta: 0.0,
            use_bias_correction_kl: true,
            epsilon: 0.2,
            epsilon_high: None,
            num_iterations: 1,
            loss_type: GrpoLoss::Dapo,
            scale_rewards: RewardScale::Group,
            importance_sampling_level: ImportanceLevel::Token,
            mask_truncated_completions: false,
            rewards: Vec::new(),
            reward_weights: Vec::new(),
            reward_timeout_seconds: 120.0,
        }
    }
}

impl GrpoSection {
    /// Returns the number of tokens into which each prompt with its completion fits.
    pub fn sequence(&self) -> u32 {
        self.max_prompt_length.saturating_add(self.max_completion_length)
    }

    /// Returns the number of completions of a round.
    pub fn completions(&self) -> u64 {
        self.prompts_per_step.saturating_mul(self.num_generations)
    }

    /// Returns the range that the ratio of a token's probability to that at sampling is clipped to.
    pub fn ratio_range(&self) -> [f64; 2] {
        [1.0 - self.epsilon, 1.0 + self.epsilon_high.unwrap_or(self.epsilon)]
    }
}

/// The division of the loss of completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrpoLoss {
    /// Mean over the tokens of each completion, then over completions.
    Grpo,
    /// Mean over all tokens of a step.
    Bnpo,
    /// Sum over all tokens, divided by completions × `max_completion_length`.
    DrGrpo,
    /// Mean over all tokens of a round.
    #[default]
    Dapo,
}

/// The rewards whose standard deviation divides advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardScale {
    /// Those of the completion's group.
    #[default]
    Group,
    /// Those of the whole round.
    Batch,
    /// None: advantages are differences of rewards.
    None,
}

/// The unit of which the loss compares the probability with that at sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceLevel {
    /// Each token.
    #[default]
    Token,
    /// The completion: the geometric mean over its tokens, as in GSPO (Zheng et al., 2025).
    Sequence,
}
