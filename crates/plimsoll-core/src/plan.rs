//! The plan: `plan.json`, and the output of `plimsoll plan --json`.
//!
//! This module holds [`Plan`] with its predictions for devices, rungs and speed, and the remedies of a refusal. Recipes
//! are in `recipe`, workers of a team in `team`, memory spaces and categories in `space`.

use crate::{
    Alternative, Bytes, Category, Class, ExcludedDevice, FasterAlone, Parallelism, Recipe, Rung, ScalingEfficiency,
    WorkKind, WorkerPlan,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Predicted memory of a device, of the host or of the scratch file under a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// The name of the device or space.
    pub name: String,
    /// Whether figures of this device come from a simulation.
    pub simulated: bool,
    /// The load line.
    pub budget_bytes: Bytes,
    /// Bytes of the arena, the only allocation for tensors.
    pub arena_bytes: Bytes,
    /// Bytes held outside the arena.
    pub charges_bytes: Bytes,
    /// Arena and charges.
    pub peak_bytes: Bytes,
    /// Bytes by category at the moment when the arena is fullest.
    pub by_category: BTreeMap<Category, Bytes>,
    /// Peak of the arena by kind of work.
    pub by_program: BTreeMap<WorkKind, Bytes>,
    /// Largest sum of simultaneously live tensors: no packing needs fewer bytes.
    pub lower_bound_bytes: Bytes,
}

/// Predicted speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// Seconds of one optimizer step.
    pub step_seconds: f64,
    /// Tokens (including padding) per second.
    pub tokens_per_second: f64,
}

/// The cuBLASLt algorithm of each matrix product of a run on a GPU. The algorithm decides the last bits of a product,
/// so it is chosen once and stored with plan and checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GemmAlgorithms {
    /// Version of cuBLASLt as reported by the library.
    pub library: u64,
    /// The GPU's name.
    pub gpu: String,
    /// Newest CUDA version supported by the driver: 12040 is 12.4.
    pub driver: u32,
    /// Algorithm by name of the matrix product: 64 bytes in hexadecimal.
    pub chosen: BTreeMap<String, String>,
}

impl GemmAlgorithms {
    /// Returns whether both were chosen by the same library and driver on the same GPU model. Only then the algorithms
    /// of one are valid for the other.
    pub fn is_compatible_with(&self, other: &GemmAlgorithms) -> bool {
        (self.library, &self.gpu, self.driver) == (other.library, &other.gpu, other.driver)
    }
}

impl fmt::Display for GemmAlgorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GemmAlgorithms { library, gpu, driver, .. } = self;
        write!(f, "{gpu}, driver for CUDA {}.{}, cuBLASLt {library}", driver / 1000, driver % 1000 / 10)
    }
}

/// A remedy for a run that does not fit: the smallest budget that fits if the given lossy rungs are allowed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remedy {
    /// Lossy rungs that must be allowed.
    pub allow: Vec<Rung>,
    /// Smallest load line of the device that fits with these rungs.
    pub budget_bytes: Bytes,
    /// Required host memory, if it exceeds the host's load line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<Bytes>,
    /// Required size of the scratch file, if it exceeds the file's load line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<Bytes>,
    /// Peak of the device with these rungs, if a single device fits under its present load line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<Bytes>,
    /// Required load lines of other devices of the team, by name; they apply to all devices of that name with less.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other_budget_bytes: BTreeMap<String, Bytes>,
}

/// The last rung, `run.fallback`: the requested device cannot hold the run under any permitted recipe, and the CPU
/// replaces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback {
    /// The requested device.
    pub device: String,
    /// The requested device's load line.
    pub budget_bytes: Bytes,
    /// Smallest load line with which the requested device would fit.
    pub required_bytes: Bytes,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fallback { device, budget_bytes, required_bytes } = self;
        write!(f, "fallback to CPU: {device} would have to hold {required_bytes}, and its load line is {budget_bytes}")
    }
}

/// A rung of the memory ladder with its predicted effects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RungPrice {
    /// `micro_batch`, `recompute`, an offload such as `offload.optimizer`, or the name of a lossy rung.
    pub rung: String,
    /// Effect of the rung on the numbers.
    pub class: Class,
    /// The loss of accuracy, in words.
    pub accuracy_impact: String,
    /// Whether the planner may take the rung.
    pub allowed: bool,
    /// Effect of the rung alone, taken as far as possible. The comparison is the plain recipe: one micro-batch, no
    /// recompute, no offload.
    pub alone: RungEffect,
    /// Effect of the rung as far as the plan takes it, compared with the same plan without it. `None` if the plan does
    /// not take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_plan: Option<RungEffect>,
}

/// The predicted effect of taking a rung.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RungEffect {
    /// Bytes freed on the device.
    pub freed_bytes: i64,
    /// Bytes added on the host.
    pub host_bytes: i64,
    /// Bytes added in the scratch file.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub file_bytes: i64,
    /// Seconds added to a step.
    pub added_seconds: f64,
    /// Tokens (including padding) per second with the rung.
    pub tokens_per_second: f64,
}

fn is_zero(bytes: &i64) -> bool {
    *bytes == 0
}

/// The workload that a plan was made for. A run with another workload cannot use the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedWorkload {
    /// Parameters of the model.
    pub parameters: u64,
    /// Tokens per sequence.
    pub sequence: u64,
    /// Tokens per optimizer step.
    pub batch_tokens: u64,
}

impl fmt::Display for PlannedWorkload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlannedWorkload { parameters, sequence, batch_tokens } = self;
        write!(f, "{parameters} parameters, {batch_tokens} tokens a step in sequences of {sequence}")
    }
}

/// A plan, or a refusal with the remedies that would make the run fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Whether the run fits under every load line.
    pub fits: bool,
    /// The chosen recipe (of a team: of rank 0); the smallest recipe if nothing fits.
    pub recipe: Recipe,
    /// Effect of the rungs taken on the numbers, compared with the plain recipe.
    pub class: Class,
    /// Lossy rungs taken.
    #[serde(default)]
    pub rungs: Vec<Rung>,
    /// Bytes of a checkpoint on disk.
    #[serde(default)]
    pub checkpoint_bytes: Bytes,
    /// Devices that take part, by rank.
    pub devices: Vec<DevicePlan>,
    /// The parallelism of the team; `None` for a single device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<Parallelism>,
    /// The workers of the team by rank; empty for a single device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<WorkerPlan>,
    /// Throughput of the team compared with its devices; `None` for a single device or a team given by the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling_efficiency: Option<ScalingEfficiency>,
    /// Predicted seconds that the links of the team add to a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_seconds: Option<f64>,
    /// A device or host that would be faster alone, if all devices must take part or if the team spans several hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_alone: Option<FasterAlone>,
    /// Devices that take no part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<ExcludedDevice>,
    /// Alternatives for the team, fastest first; filled with `--explain` only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Alternative>,
    /// Memory of the host.
    pub host: DevicePlan,
    /// The scratch file, if the plan uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<DevicePlan>,
    /// Predicted speed.
    pub predicted: Predicted,
    /// Remedies if the run does not fit, least loss first; empty if it fits.
    pub needs: Vec<Remedy>,
    /// The workload that was planned; `None` for the plan of a part of a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned_for: Option<PlannedWorkload>,
    /// A note that other programs used the CPU while its rates were measured, with the consequence and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention_note: Option<String>,
    /// A note on limits found by earlier runs and applied here: the device could not hold all of its free memory, or
    /// was slower than calibrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortfall_note: Option<String>,
    /// GEMM algorithms of the GPU, once it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<GemmAlgorithms>,
    /// The fallback from the requested device to the CPU, if it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// Predicted effect of each rung; filled with `--explain` only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<RungPrice>,
}
