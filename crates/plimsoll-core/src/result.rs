//! The result of a run: `result.json`. The field names are a stable interface for other tools.

use crate::{Bytes, Class, Fallback, Parallelism, Recipe};
use serde::{Deserialize, Deserializer, Serialize};

/// The content of `result.json`. Figures are measured, except fields with `predicted` in their name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Whether the run is done or stopped early.
    pub status: RunStatus,
    /// Completed optimizer steps, including those before a resume.
    pub steps: u64,
    /// The training loss of the first and the last step.
    pub loss: LossSpan,
    /// Tokens (including padding) per second over all steps since the last start; time outside steps does not count.
    pub tokens_per_second: f64,
    /// Seconds of an optimizer step.
    pub step_seconds: StepSeconds,
    /// The last evaluation; `None` without evaluation data.
    pub eval: Option<EvalResult>,
    /// Memory of every device that took part.
    pub memory: Vec<DeviceMemory>,
    /// The recipe of the last step; of a team, the recipe of rank 0.
    pub recipe: Recipe,
    /// The parallelism of the last step; `None` for a single device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<Parallelism>,
    /// The workers of the team in the last step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<WorkerResult>,
    /// The device that evaluated while the team trained; `None` without such a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluator: Option<EvaluatorResult>,
    /// Recoveries since the last start of the run.
    pub recoveries: Vec<Recovery>,
    /// Devices lost since the last start of the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostDevice>,
    /// Injected faults (`--inject-…`) that were never triggered since the last start, as given on the command line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults_not_triggered: Vec<String>,
    /// Seconds of pauses for devices that were too warm, since the last start of the run.
    #[serde(default)]
    pub thermal_pause_seconds: f64,
    /// The fallback from the requested device to the CPU, if it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
}

/// A device lost during a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LostDevice {
    /// The device's name.
    pub device: String,
    /// The step during or after which the device was lost.
    pub step: u64,
    /// Step of the checkpoint from which training continued on the other devices, 0 for the start of the run. `None` if
    /// no completed step was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_from_step: Option<u64>,
    /// Last step before the device joined the team again; `None` if it did not return.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned_after_step: Option<u64>,
}

/// A worker of the team in the last step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerResult {
    /// The device's name.
    pub device: String,
    /// Whether the figures come from a simulation.
    pub simulated: bool,
    /// Sequences of the step that the worker computed.
    pub sequences: u64,
    /// The worker's recipe.
    pub recipe: Recipe,
    /// Measured compute time of a step divided by the predicted time: the median over the steps since the last start.
    /// Time spent waiting does not count. 0 for a worker without sequences.
    pub compute_slowdown: f64,
    /// The backend of the worker's collectives; `None` for a device without NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collectives: Option<CollectiveBackend>,
}

/// The backend by which a GPU exchanges with the other GPUs of its team.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "backend", rename_all = "lowercase")]
pub enum CollectiveBackend {
    /// NCCL, on device memory.
    Nccl,
    /// Staging through pinned host memory, although all GPUs have NCCL.
    Host {
        /// The reason, if this GPU is the cause.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

/// A device that evaluated while the team trained, since the last start of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluatorResult {
    /// The device's name.
    pub device: String,
    /// Whether the figures come from a simulation.
    pub simulated: bool,
    /// The recipe: rows per evaluation batch.
    pub recipe: Recipe,
    /// Number of evaluations.
    pub evaluations: u64,
    /// Median seconds of an evaluation.
    pub seconds: f64,
    /// Predicted seconds of an evaluation.
    pub predicted_seconds: f64,
    /// Median seconds in which the team sent its weights to the evaluator once.
    pub weight_transfer_seconds: f64,
    /// Predicted seconds of one transfer of the weights.
    pub predicted_weight_transfer_seconds: f64,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// All steps completed.
    Done,
    /// Stopped early; the run can be resumed.
    Stopped,
}

/// The training loss at both ends of a run, each the mean over the labelled tokens of a step. NaN, in JSON `null`, if
/// no step completed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossSpan {
    /// Loss of the first step.
    #[serde(deserialize_with = "nan_from_null")]
    pub first: f64,
    /// Loss of the last step.
    #[serde(deserialize_with = "nan_from_null")]
    pub last: f64,
}

/// Reads `null` as NaN. JSON has no NaN: serde_json writes it as `null`.
fn nan_from_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Seconds of an optimizer step, measured and predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSeconds {
    /// Measured median.
    pub median: f64,
    /// Measured 95th percentile.
    pub p95: f64,
    /// Seconds predicted by the plan.
    pub predicted: f64,
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalResult {
    /// Mean loss over the labelled tokens.
    pub loss: f64,
    /// Share of samples with all labelled tokens predicted correctly; `None` if samples have no labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
}

/// Planned and measured memory of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// The device's name.
    pub device: String,
    /// The load line at the time of the largest use.
    pub budget_bytes: Bytes,
    /// The load line at the end, if it was moved during the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_bytes_at_end: Option<Bytes>,
    /// Planned bytes of the arena.
    pub arena_bytes: Bytes,
    /// Measured high-water mark of the arena.
    pub arena_measured_bytes: Bytes,
    /// Planned bytes of arena and charges.
    pub predicted_bytes: Bytes,
    /// Measured peak of the device (CPU: of the process); `None` if the machine cannot measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// The source of `measured_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_by: Option<MeasuredBy>,
}

/// The source of a device's measured memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredBy {
    /// The memory of this process, reported by the system or by the GPU driver.
    Process,
    /// The decrease of a GPU's free memory since the start of the run. Used if the driver hides the memory of processes
    /// (WSL, containers). Allocations of other processes in the meantime are included.
    FreeMemory,
}

/// A change of recipe during a run: down the ladder after an out-of-memory error or under memory pressure, or up again.
/// If `from` equals `to`, the refused work was only retried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// The step during or after which the recovery took place.
    pub step: u64,
    /// The device that changed its recipe.
    pub device: String,
    /// The cause of the recovery.
    pub reason: String,
    /// The recipe before.
    pub from: Recipe,
    /// The recipe after.
    pub to: Recipe,
    /// Sequences per step of the device before and after, if the step was divided anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequences: Option<[u64; 2]>,
    /// Effect of the change on the numbers.
    pub class: Class,
    /// Planned bytes of the arena before.
    pub arena_bytes_before: Bytes,
    /// Planned bytes of the arena after.
    pub arena_bytes: Bytes,
    /// Measured bytes of the device (CPU: of the process) before; `None` if no memory was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes_before: Option<Bytes>,
    /// Measured bytes of the device (CPU: of the process) after; `None` if no memory was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<Bytes>,
    /// Measured seconds of the recovery, without the repeated work.
    pub seconds: f64,
    /// Predicted seconds of a step before.
    pub predicted_step_seconds_before: f64,
    /// Predicted seconds of a step after.
    pub predicted_step_seconds: f64,
    /// Measured median seconds of a step between the previous recovery and this one; `None` without a completed step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_seconds_before: Option<f64>,
    /// Measured median seconds of a step from this recovery to the next one; set at the end of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_seconds: Option<f64>,
}
