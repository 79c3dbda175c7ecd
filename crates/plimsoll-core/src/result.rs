//! The result of a run: `result.json`. The field names are a stable interface for other tools.

use crate::{Bytes, Category, Class, Fallback, Parallelism, PreferenceFigures, Recipe, RoundFigures};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// The content of `result.json`. Figures are measured, except fields with `predicted` in their name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunResult {
    /// Whether the run is done or stopped early.
    pub status: RunStatus,
    /// Number of completed optimizer steps, including those before a resume.
    pub steps: u64,
    /// The training loss of the first and the last step.
    pub loss: LossSpan,
    /// Number of steps without any label, including those before a resume; `None` if every step had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unlabelled_steps: Option<u64>,
    /// Tokens (including padding) per second over all steps since the last start of the run. Time outside steps does
    /// not count.
    pub tokens_per_second: f64,
    /// Seconds of an optimizer step, measured and predicted.
    pub step_seconds: StepSeconds,
    /// The last evaluation; `None` without evaluation data.
    pub eval: Option<EvalResult>,
    /// Figures of the steps over sampled completions since the last start of the run, at most the last 1,000; empty for other
    /// objectives. All are in `events.jsonl`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<RoundFigures>,
    /// Memory of every device that took part.
    pub memory: Vec<DeviceMemory>,
    /// The recipe of the last step; of a team, the recipe of rank 0.
    pub recipe: Recipe,
    /// The parallelism of the last step; `None` for a single device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<Parallelism>,
    /// The workers of the team in the last step, by rank; empty for a single device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<WorkerResult>,
    /// The device that evaluated while the team trained; `None` without such a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluator: Option<EvaluatorResult>,
    /// Recoveries since the last start of the run; empty if there was none.
    pub recoveries: Vec<Recovery>,
    /// Devices lost since the last start of the run; empty if none was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostDevice>,
    /// Injected faults (`--inject-…`) that did not occur since the last start of the run, as given on the command line;
    /// empty if all occurred.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults_not_triggered: Vec<String>,
    /// Sum of the seconds in which training paused because a device was too warm, since the last start of the run.
    #[serde(default)]
    pub thermal_pause_seconds: f64,
    /// The fallback from the requested device to the CPU; `None` if the requested device ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// Whether the same command gives the same bits on the same kind of machine.
    #[serde(default)]
    pub reproducible: bool,
    /// The reasons why the run is reproducible, or why it is not.
    #[serde(default)]
    pub reproducible_because: Vec<String>,
}

/// A device lost during a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LostDevice {
    /// The device's name.
    pub device: String,
    /// The step during or after which the device was lost.
    pub step: u64,
    /// Step of the checkpoint from which training continued on the other devices; 0 if it began anew. `None` if
    /// training continued without going back, because no completed step was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_from_step: Option<u64>,
    /// Last step that the team completed before the device joined it again; `None` if the device did not return.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned_after_step: Option<u64>,
}

/// A worker of the team in the last step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerResult {
    /// The device's name.
    pub device: String,
    /// Whether the figures come from a simulation.
    pub simulated: bool,
    /// Number of sequences that the worker computed in the last step.
    pub sequences: u64,
    /// The worker's recipe.
    pub recipe: Recipe,
    /// Measured compute time of a step divided by the predicted one: the median over the steps since the last start of
    /// the run. Time spent waiting does not count. 0 for a worker without sequences.
    pub compute_slowdown: f64,
    /// The backend of the worker's collectives. `None` for a device without NCCL, and for a team that does not exchange
    /// by NCCL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collectives: Option<CollectiveBackend>,
}

/// The backend by which a GPU exchanges with the other GPUs of its team.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "backend", rename_all = "lowercase")]
pub enum CollectiveBackend {
    /// NCCL, directly between the memories of the GPUs.
    Nccl,
    /// Staging through pinned host memory. All GPUs have NCCL, but at least one of them cannot exchange by it.
    Host {
        /// The reason why this GPU cannot exchange by NCCL; `None` if another GPU of the team is the cause.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

/// A device that evaluated while the team trained, since the last start of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvaluatorResult {
    /// The device's name.
    pub device: String,
    /// Whether the figures come from a simulation.
    pub simulated: bool,
    /// The recipe of the evaluator. Its micro-batch is the number of rows that one forward pass evaluates.
    pub recipe: Recipe,
    /// Number of evaluations since the last start of the run.
    pub evaluations: u64,
    /// Measured median of the seconds of an evaluation.
    pub seconds: f64,
    /// Predicted seconds of an evaluation.
    pub predicted_seconds: f64,
    /// Measured median of the seconds in which the team sent its weights to the evaluator once.
    pub weight_transfer_seconds: f64,
    /// Predicted seconds in which the team sends its weights to the evaluator once.
    pub predicted_weight_transfer_seconds: f64,
}

/// The way in which a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// The run completed all steps.
    Done,
    /// The run stopped early and can be resumed.
    Stopped,
}

/// The training loss at both ends of a run, each the mean over the labelled tokens of a step. NaN, in JSON `null`, if
/// no step with a label completed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LossSpan {
    /// Loss of the first step with a label.
    #[serde(deserialize_with = "nan_from_null")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub first: f64,
    /// Loss of the last step with a label.
    #[serde(deserialize_with = "nan_from_null")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub last: f64,
}

/// Reads `null` as NaN. JSON has no NaN: serde_json writes it as `null`.
///
/// # Errors
/// The value is neither a number nor `null`.
pub fn nan_from_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Seconds of an optimizer step, measured and predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StepSeconds {
    /// Measured median over the steps since the last start of the run, in seconds.
    pub median: f64,
    /// Measured 95th percentile over the steps since the last start of the run, in seconds.
    pub p95: f64,
    /// Seconds of a step that the plan predicts.
    pub predicted: f64,
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvalResult {
    /// Mean loss over the labelled tokens. NaN, in JSON `null`, for sampled completions, which have a reward.
    #[serde(deserialize_with = "nan_from_null")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub loss: f64,
    /// Share of answers, 0 to 1, with all tokens predicted correctly; `None` if the data are not all prompts with one
    /// short answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
    /// Preferences between pairs of answers; `None` for other data. The loss is then that of the objective, per pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preferences: Option<PreferenceFigures>,
    /// Mean reward of the most likely completions; `None` for other objectives, and if none has a reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
}

/// Planned and measured memory of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceMemory {
    /// The device's name.
    pub device: String,
    /// The device's load line at the time when the device held the most bytes.
    pub budget_bytes: Bytes,
    /// The device's load line at the end of the run; `None` if it did not move during the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_bytes_at_end: Option<Bytes>,
    /// Planned bytes of the arena.
    pub arena_bytes: Bytes,
    /// Measured high-water mark of the arena in bytes.
    pub arena_measured_bytes: Bytes,
    /// Measured bytes of the arena by category at the moment when the most bytes of tensors were in use. Gaps between
    /// tensors count as workspace, so the sum is `arena_measured_bytes`. `None` if they were not measured, as on remote
    /// devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arena_measured_by_category: Option<BTreeMap<Category, Bytes>>,
    /// Planned bytes of arena and charges together.
    pub predicted_bytes: Bytes,
    /// Measured peak of the device (CPU: of the process) in bytes; `None` if the machine cannot measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// The source of `measured_bytes`; `None` without a measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_by: Option<MeasuredBy>,
    /// Measured bytes by which this process passed the load line at any time since its start; `None` if it did not. For
    /// the CPU and virtual devices, the preparation of data and plan counts too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_load_line_bytes: Option<Bytes>,
}

impl DeviceMemory {
    /// Compares the measured bytes with the load line, and stores the difference if they pass it. `before` is the peak
    /// of this process before the run held arenas; zero for a device outside this process. Memory of other processes
    /// does not count.
    pub fn compare_with_load_line(&mut self, before: Bytes) {
        let own = self.measured_bytes.filter(|_| self.measured_by == Some(MeasuredBy::Process));
        let over = own.unwrap_or_default().max(before).saturating_sub(self.budget_bytes);
        self.over_load_line_bytes = Some(over).filter(|over| *over > Bytes::ZERO);
    }

    /// Describes a device that passed its load line; `None` if it did not.
    pub fn over_load_line_note(&self) -> Option<String> {
        let over = self.over_load_line_bytes?;
        let (device, line) = (&self.device, self.budget_bytes);
        Some(format!("{device}: this process held {}, {over} more than the load line of {line}", line + over))
    }
}

/// The source of a device's measured memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MeasuredBy {
    /// The memory of this process, reported by the system or by the GPU driver.
    Process,
    /// The decrease of a GPU's free memory since the start of the run, which includes allocations of other processes.
    /// Used if the driver hides the memory of single processes (WSL, containers).
    FreeMemory,
}

/// A change of a device's recipe during a run: to one with less memory after an out-of-memory error or under memory
/// pressure, or back to a faster one. If `from` equals `to`, the device only repeated the work for which memory was
/// refused, or its share of the sequences changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Recovery {
    /// The step during or after which the recovery took place.
    pub step: u64,
    /// The device that changed its recipe.
    pub device: String,
    /// The cause of the recovery.
    pub reason: String,
    /// The recipe before the recovery.
    pub from: Recipe,
    /// The recipe after the recovery.
    pub to: Recipe,
    /// Number of sequences that the device computes per step, before and after the recovery. `None` if this number did
    /// not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequences: Option<[u64; 2]>,
    /// Effect of the change on the results of the run.
    pub class: Class,
    /// Planned bytes of the device's arena before the recovery.
    pub arena_bytes_before: Bytes,
    /// Planned bytes of the device's arena after the recovery.
    pub arena_bytes: Bytes,
    /// Measured bytes that the device (CPU: the process) held before the recovery; `None` if the device kept its plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes_before: Option<Bytes>,
    /// Measured bytes that the device (CPU: the process) held after the recovery; `None` if the device kept its plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<Bytes>,
    /// Measured seconds of the recovery, without the repeated work.
    pub seconds: f64,
    /// Predicted seconds of a step under the recipe before the recovery.
    pub predicted_step_seconds_before: f64,
    /// Predicted seconds of a step under the recipe after the recovery.
    pub predicted_step_seconds: f64,
    /// Measured median seconds of a step between the previous recovery and this one; `None` if no step completed
    /// between them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_seconds_before: Option<f64>,
    /// Measured median seconds of a step between this recovery and the next one, or the end of the run. `None` until
    /// the run has ended, and if no step completed between them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_seconds: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_memory_passes_a_load_line() {
        let memory = |measured: u64, by| DeviceMemory {
            device: "cpu".to_owned(),
            budget_bytes: Bytes::mib(46),
            budget_bytes_at_end: None,
            arena_bytes: Bytes::mib(26),
            arena_measured_bytes: Bytes::mib(26),
            arena_measured_by_category: None,
            predicted_bytes: Bytes::mib(46),
            measured_bytes: Some(Bytes::mib(measured)),
            measured_by: Some(by),
            over_load_line_bytes: None,
        };
        // Measured MiB, their source, the MiB before the run, and the MiB above the line.
        let cases = [
            (46, MeasuredBy::Process, 0, None),
            (49, MeasuredBy::Process, 0, Some(3)),
            (40, MeasuredBy::Process, 203, Some(157)),
            (90, MeasuredBy::FreeMemory, 0, None),
        ];
        for (measured, by, before, over) in cases {
            let mut memory = memory(measured, by);
            memory.compare_with_load_line(Bytes::mib(before));
            assert_eq!(memory.over_load_line_bytes, over.map(Bytes::mib), "{measured} by {by:?}, {before} before");
            assert_eq!(memory.over_load_line_note().is_some(), over.is_some());
        }
    }
}
