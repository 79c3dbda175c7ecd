//! How a run ended: `result.json`. Other tools rely on these names.

use crate::{Bytes, Class, Fallback, Recipe, Sharing};
use serde::{Deserialize, Deserializer, Serialize};

/// `result.json`. All figures are measured unless their name says predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// `done` or `stopped`.
    pub status: RunStatus,
    /// Optimizer steps done, those before a resume included.
    pub steps: u64,
    /// The training loss.
    pub loss: LossSpan,
    /// Tokens (padding counted) a second, over all steps since the last start and nothing but them.
    pub tokens_per_second: f64,
    /// Seconds of an optimizer step.
    pub step_seconds: StepSeconds,
    /// The last evaluation; none where there is nothing to evaluate on.
    pub eval: Option<EvalResult>,
    /// Every device that took part.
    pub memory: Vec<DeviceMemory>,
    /// The recipe of the last step; of a team, its first device's.
    pub recipe: Recipe,
    /// How a team shared the work in the last step; none for one device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// What each device of the team did in the last step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<MemberResult>,
    /// What a device that was left out of the steps did beside them; none where it did nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluator: Option<EvaluatorResult>,
    /// Rungs that were taken while the run was under way, since it was last started.
    pub retreats: Vec<Retreat>,
    /// Devices that were lost, since the run was last started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostDevice>,
    /// Rehearsals that were asked for and never came about, since the run was last started: as they were typed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_rehearsed: Vec<String>,
    /// Seconds in which a device that was too warm rested, since the run was last started.
    #[serde(default)]
    pub rested_seconds: f64,
    /// The device that was asked for, where the processor did its work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
}

/// A device that was lost while a run was under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LostDevice {
    /// Its name.
    pub device: String,
    /// While this step was done, or between it and the next.
    pub step: u64,
    /// The step of the checkpoint from which others went on, 0 for the beginning; none where no finished step was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_to: Option<u64>,
    /// After this step it was there again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_after: Option<u64>,
}

/// What a device of a team did in the last step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberResult {
    /// The device's name.
    pub device: String,
    /// Whether its figures come from a simulation.
    pub simulated: bool,
    /// Sequences of the step that it computed.
    pub sequences: u64,
    /// Its recipe.
    pub recipe: Recipe,
    /// What it computed in a step took, measured, over what was predicted: the median over the steps since the run was last
    /// started. What it waited for does not count. 0 without sequences.
    pub passes_over_predicted: f64,
    /// How it exchanged with the others, where it has NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collectives: Option<CollectivesBy>,
}

/// How a GPU exchanges with the others of its team.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "lowercase")]
pub enum CollectivesBy {
    /// By NCCL, out of its own memory.
    Nccl,
    /// Through pinned memory of the host, though all have NCCL.
    Host {
        /// Why, where this GPU is the reason.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
}

/// What a device did that evaluated beside the steps, since the run was last started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluatorResult {
    /// The device's name.
    pub device: String,
    /// Whether its figures come from a simulation.
    pub simulated: bool,
    /// How many rows at once.
    pub recipe: Recipe,
    /// So many of them.
    pub evaluations: u64,
    /// Seconds of one: the median.
    pub seconds: f64,
    /// What the plan said.
    pub predicted_seconds: f64,
    /// Seconds in which the others handed over the weights, once: the median.
    pub hand_over_seconds: f64,
    /// What the plan said.
    pub predicted_hand_over_seconds: f64,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// All steps are done.
    Done,
    /// Stopped early; it can go on.
    Stopped,
}

/// The training loss at both ends of a run; means over the labelled tokens of a step. No number (`null`) where no step was
/// done.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossSpan {
    /// Of the first step.
    #[serde(deserialize_with = "number_or_none")]
    pub first: f64,
    /// Of the last step.
    #[serde(deserialize_with = "number_or_none")]
    pub last: f64,
}

/// JSON has no word for what is not a number: `null` is written for it, and read as it.
fn number_or_none<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Seconds of an optimizer step, measured and predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSeconds {
    /// Half of the steps took no longer.
    pub median: f64,
    /// 95 of 100 steps took no longer.
    pub p95: f64,
    /// What the plan said.
    pub predicted: f64,
}

/// An evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalResult {
    /// Mean over the labelled tokens.
    pub loss: f64,
    /// Share of samples whose labelled tokens were all predicted right, where samples have labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
}

/// What a device held, beside what the plan said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// The device's name.
    pub device: String,
    /// The load line under which it held most.
    pub budget_bytes: Bytes,
    /// The load line at the end, where it was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_bytes_at_end: Option<Bytes>,
    /// The arena, as planned.
    pub arena_bytes: Bytes,
    /// The arena, as its high-water mark was measured.
    pub arena_measured_bytes: Bytes,
    /// Arena and charges, as planned.
    pub predicted_bytes: Bytes,
    /// The most that the device (CPU: the process) held; none where nothing on this machine tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// How that is known, where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_by: Option<MeasuredBy>,
}

/// How it is known what a device holds for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredBy {
    /// The system, or the GPU's driver, says what this process holds.
    Process,
    /// A GPU's free memory, now and before the run: where the driver hides what a process holds (WSL, containers), so
    /// that what others have taken or given back meanwhile is in it.
    FreeMemory,
}

/// A step down in memory while the run was under way, or back up when room returned. Where the recipe is the
/// same before and after, what was refused was simply done again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retreat {
    /// While this step was done, or between it and the next.
    pub step: u64,
    /// The device that gave way.
    pub device: String,
    /// What gave way, and why.
    pub why: String,
    /// The recipe that was left.
    pub from: Recipe,
    /// The recipe that was taken.
    pub to: Recipe,
    /// Sequences of a step that the device computed before, and computes from then on, where the step was shared out anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequences: Option<[u64; 2]>,
    /// What that does to the numbers.
    pub class: Class,
    /// The arena before, as planned.
    pub arena_bytes_before: Bytes,
    /// The arena from then on, as planned.
    pub arena_bytes: Bytes,
    /// What the device (CPU: the process) held before, measured; none where nothing was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes_before: Option<Bytes>,
    /// The same from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<Bytes>,
    /// How long it took, measured, what had to be done again left out.
    pub seconds: f64,
    /// Predicted seconds of a step before.
    pub predicted_step_seconds_before: f64,
    /// Predicted seconds of a step from then on.
    pub predicted_step_seconds: f64,
    /// Measured seconds of a step since the retreat before this one: the median, where a step was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_seconds_before: Option<f64>,
    /// Measured seconds of a step from then on, until the next one: known when the run ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_seconds: Option<f64>,
}
