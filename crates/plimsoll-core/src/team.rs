//! The part of a plan that describes a team: its parallelism, the plan of each worker, excluded devices with the
//! reason, and alternatives. The plan that contains these types is in `plan`.

use crate::{Bytes, DevicePlan, GemmAlgorithms, Predicted, Recipe, RungPrice};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The parallelism of a team: how its devices divide the work of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Parallelism {
    /// Data parallel: every device holds the whole model and computes some of the sequences.
    Data,
    /// Sharded (FSDP, ZeRO-3): every device computes some of the sequences. Weights, gradients and optimizer state are
    /// split over all devices in shards of unequal size.
    Sharded,
    /// Pipeline parallel: every device holds and computes consecutive layers (a stage).
    Pipeline,
}

impl Parallelism {
    /// Returns the name for messages to the user, such as `data parallel`.
    pub fn describe(self) -> &'static str {
        match self {
            Parallelism::Data => "data parallel",
            Parallelism::Sharded => "sharded (FSDP/ZeRO-3)",
            Parallelism::Pipeline => "pipeline parallel",
        }
    }
}

impl fmt::Display for Parallelism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Parallelism::Data => "data",
            Parallelism::Sharded => "sharded",
            Parallelism::Pipeline => "pipeline",
        })
    }
}

/// The plan of one worker (device) of a team. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerPlan {
    /// The device's name.
    pub device: String,
    /// The recipe of this worker.
    pub recipe: Recipe,
    /// Number of sequences that the worker computes in each optimizer step. In a pipeline, these are all sequences. 0
    /// for a storage-only worker.
    pub sequences: u64,
    /// Layers of the worker's pipeline stage, as two indices: its first layer, and the layer after its last. `None`
    /// unless the team is a pipeline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<[u64; 2]>,
    /// The worker's shard of weights, gradients and optimizer state in 1024ths. `None` unless the team is sharded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_1024ths: Option<u64>,
    /// The reason why a storage-only worker computes no sequences; `None` for a worker that computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The algorithms of the GPU's matrix products; `None` before the GPU was opened, and for other devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<GemmAlgorithms>,
    /// Seconds of a step in which the worker computes.
    pub busy_seconds: f64,
    /// Seconds of a step in which the worker communicates or waits for other workers.
    pub idle_seconds: f64,
    /// Effect of each rung on this worker. Filled with `--explain`, else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<RungPrice>,
}

/// A requested or detected device that takes no part in the training steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExcludedDevice {
    /// The device's name.
    pub device: String,
    /// Index of the device, from 0, among all requested devices. Several paper devices may share a name.
    #[serde(default)]
    pub device_index: usize,
    /// The reason for the exclusion.
    pub reason: String,
    /// Command-line settings with which the device would take part; `None` if the planner found none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// Predicted tokens (including padding) per second of the team with this device; `None` if it cannot take part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// The plan of the evaluations that the device does while the team trains; `None` if the device stays idle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluator_plan: Option<EvaluatorPlan>,
}

/// The plan of an evaluator: a device outside the team that evaluates while the team trains. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvaluatorPlan {
    /// The recipe of the evaluator. Its micro-batch is the number of rows that one forward pass evaluates.
    pub recipe: Recipe,
    /// Planned memory of the evaluator, under its own load line. The evaluator holds weights and activations only.
    pub device: DevicePlan,
    /// Number of rows of an evaluation; `None` if the evaluation data have not been read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Seconds of a whole evaluation on the evaluator. If the number of rows is unknown, seconds per row of a long
    /// evaluation.
    pub seconds: f64,
    /// Seconds of a whole evaluation if the team itself evaluates. If the number of rows is unknown, seconds per row.
    pub team_seconds: f64,
    /// Seconds in which the team sends its weights to the evaluator, once per evaluation.
    pub weight_transfer_seconds: f64,
}

impl EvaluatorPlan {
    /// Computes the seconds that the team saves per evaluation, if it can train for `meanwhile_seconds` before it needs
    /// the result. Negative if the evaluator costs time.
    pub fn saved_seconds(&self, meanwhile_seconds: f64) -> f64 {
        let wait_seconds = (self.seconds - meanwhile_seconds).max(0.0);
        self.team_seconds - self.weight_transfer_seconds - wait_seconds
    }

    /// Computes the smallest number of rows of an evaluation for which the evaluator saves time. Valid only if `rows`
    /// is `None`: the seconds of the plan are then per row.
    pub fn break_even_rows(&self) -> u64 {
        (self.weight_transfer_seconds / self.team_seconds).ceil().max(1.0) as u64
    }
}

/// The throughput of the devices of a data parallel team if each runs alone, and the upper bound for the team. All
/// figures are predicted tokens (including padding) per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ScalingEfficiency {
    /// Sum of the throughputs of all devices of the team, each running the whole step alone.
    pub single_device_tokens_per_second: f64,
    /// Throughput of the fastest data parallel split over these devices if the all-reduce took no time; 0 if no split
    /// is possible. It is below the sum of the single devices for two reasons. Sequences are not divided, so shares
    /// only approximate the speeds. Every device executes the whole optimizer update.
    pub upper_bound_tokens_per_second: f64,
}

/// A part of the team that would be faster alone than the whole team.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FasterAlone {
    /// The name of a device, or of a host that stands for all of its devices.
    pub name: String,
    /// Predicted tokens (including padding) per second of that part.
    pub tokens_per_second: f64,
}

/// A plan for the team that the planner compared with others. `--explain` lists all of them, the chosen one included.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Alternative {
    /// The parallelism of this alternative; `None` if it is a single device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<Parallelism>,
    /// Names of the devices that take part, by rank.
    pub devices: Vec<String>,
    /// The work and the recipe of each device in words, by rank, such as `3 sequences, micro-batch 3, …`.
    pub shares: Vec<String>,
    /// Whether every device stays under its load line.
    pub fits: bool,
    /// Predicted peak of each device in bytes, by rank, with charges. It is exact for the chosen plan, and for a data
    /// parallel team that seemed faster and was packed. For all others it is a lower bound.
    pub peak_bytes: Vec<Bytes>,
    /// Predicted speed of the alternative.
    pub predicted: Predicted,
}
