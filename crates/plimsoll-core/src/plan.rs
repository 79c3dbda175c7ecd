//! The plan: `plan.json`, and the output of `plimsoll plan --json`.
//!
//! This module holds [`Plan`] with its predictions for devices, rungs and speed, and the remedies of a refusal. Recipes
//! are in `recipe`, workers of a team in `team`, memory spaces and categories in `space`.

use crate::{
    Alternative, Bytes, Category, Class, ExcludedDevice, FasterAlone, Parallelism, Recipe, Rung, ScalingEfficiency,
    TimelinePoint, WorkKind, WorkerPlan,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Predicted memory of a device, of the host or of the scratch file under a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DevicePlan {
    /// The name of the device; `host` for the host, `file` for the scratch file.
    pub name: String,
    /// Whether figures of this device come from a simulation.
    pub simulated: bool,
    /// The load line: the most bytes that arena and charges may hold together.
    pub budget_bytes: Bytes,
    /// Bytes of the arena, the only allocation for tensors.
    pub arena_bytes: Bytes,
    /// Bytes held outside the arena: CUDA context, kernels, library workspaces, and the process itself.
    pub charges_bytes: Bytes,
    /// Bytes of arena and charges together.
    pub peak_bytes: Bytes,
    /// Bytes of the tensors in the arena by category, at the moment when the arena is fullest. Empty if no tensor lies
    /// in it.
    pub by_category: BTreeMap<Category, Bytes>,
    /// Most bytes of the arena in use during each kind of work. Empty if no tensor lies in the arena.
    pub by_program: BTreeMap<WorkKind, Bytes>,
    /// The arena over one step, in at most 32 points: loading, forward pass, backward pass, update, evaluation,
    /// generation and saving, in this order. The peak of each kind of work is among them, except of `re-plan`, which
    /// runs no ops. Empty for the host and the scratch file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<TimelinePoint>,
    /// Largest sum of the bytes of simultaneously live tensors. No placement of the tensors needs a smaller arena.
    pub lower_bound_bytes: Bytes,
}

/// The predicted speed of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Predicted {
    /// Seconds of one optimizer step; if nothing is trained, seconds of one evaluation.
    pub step_seconds: f64,
    /// Tokens (including padding) per second.
    pub tokens_per_second: f64,
}

/// The predicted speed at which several sequences are generated at once, as in a run that samples completions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PredictedGeneration {
    /// Sequences that are generated at once, on all devices together.
    pub sequences: u64,
    /// Seconds for one more token of each of them. The choice of the tokens, on the host, comes on top.
    pub token_seconds: f64,
}

/// The recipe of the smallest peak, for a run that samples completions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SmallestRecipe {
    /// The recipe.
    pub recipe: Recipe,
    /// Completions that it samples at once.
    pub slots: u64,
    /// The lowest load line under which it fits.
    pub peak_bytes: Bytes,
    /// Most bytes of the arena in use during each kind of work.
    pub by_program: BTreeMap<WorkKind, Bytes>,
    /// Predicted seconds of one optimizer step.
    pub step_seconds: f64,
}

/// The cuBLASLt algorithm of each matrix product of a run on a GPU. The algorithm decides the last bits of a product,
/// so it is chosen once and stored with plan and checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GemmAlgorithms {
    /// Version of cuBLASLt as reported by the library.
    pub library: u64,
    /// The GPU's model name, as reported by the driver.
    pub gpu: String,
    /// Newest CUDA version supported by the driver: 12040 is 12.4.
    pub driver: u32,
    /// The algorithm of each matrix product, 64 bytes in hexadecimal, by the name of the product.
    pub chosen: BTreeMap<String, String>,
    /// Whether further algorithms are those that the library proposes first, which are the same each time. Otherwise
    /// they are chosen by their measured time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untimed: bool,
}

impl GemmAlgorithms {
    /// Returns whether the algorithms in `self` and `other` were chosen with the same library and driver on the same
    /// GPU model. Only then may one replace the other.
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

/// A change of settings with its predicted effect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Recommendation {
    /// The change and its effect, one line.
    pub text: String,
    /// The command that applies it.
    pub command: String,
    /// Predicted change of the peaks of all devices together, in bytes; negative if they fall.
    pub bytes: i64,
    /// Predicted speed after the change divided by that before it.
    pub speedup: f64,
}

/// A remedy for a run that does not fit: the smallest budget that fits if the given lossy rungs are allowed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Remedy {
    /// Lossy rungs that must be allowed; empty if the remedy needs none.
    pub allow: Vec<Rung>,
    /// Smallest load line under which the run fits with the rungs in `allow`: of the device, or of a team's first
    /// device.
    pub budget_bytes: Bytes,
    /// Required host memory; `None` if the host's present load line is enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<Bytes>,
    /// Required size of the scratch file; `None` if the file's present load line is enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<Bytes>,
    /// Predicted peak of the device with the rungs in `allow`. `None` for a team, and if the remedy also needs a higher
    /// load line, more host memory or a larger scratch file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<Bytes>,
    /// Required load lines of the team's devices other than the first, by device name; empty if none has to change. If
    /// several devices share a name, each of them that has a lower load line is raised to this one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other_budget_bytes: BTreeMap<String, Bytes>,
}

impl Remedy {
    /// Creates a remedy that allows these lossy rungs and sets the load line of the device. All other load lines stay
    /// as they are, and the peak is unknown.
    pub fn new(allow: Vec<Rung>, budget_bytes: Bytes) -> Remedy {
        Remedy {
            allow,
            budget_bytes,
            host_bytes: None,
            file_bytes: None,
            peak_bytes: None,
            other_budget_bytes: BTreeMap::new(),
        }
    }

    /// Returns the remedy with all load lines lower by `less` bytes.
    #[must_use]
    pub fn with_lower_load_lines(&self, less: Bytes) -> Remedy {
        let others = self.other_budget_bytes.iter().map(|(name, line)| (name.clone(), line.saturating_sub(less)));
        Remedy {
            budget_bytes: self.budget_bytes.saturating_sub(less),
            peak_bytes: self.peak_bytes.map(|peak| peak.saturating_sub(less)),
            other_budget_bytes: others.collect(),
            ..self.clone()
        }
    }
}

/// The replacement of the requested device by the CPU (`run.fallback`). It takes place if no permitted recipe fits on
/// the requested device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Fallback {
    /// The name of the device that the CPU replaces; of several, that of the first in the refused plan.
    pub device: String,
    /// The requested device's load line.
    pub budget_bytes: Bytes,
    /// Smallest load line of the requested device under which the run would fit on it.
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RungPrice {
    /// Name of the rung: `micro_batch`, `recompute`, an offload such as `offload.optimizer`, or a lossy rung such as
    /// `nf4`.
    pub rung: String,
    /// Effect of the rung on the numbers.
    pub class: Class,
    /// The loss of accuracy, in words.
    pub accuracy_impact: String,
    /// Whether the planner may take the rung. Always true for a rung that is not lossy.
    pub allowed: bool,
    /// Effect of taking this rung in full on the plain recipe (one micro-batch, no recompute, no offload). No other
    /// rung is taken, except one that it requires.
    pub alone: RungEffect,
    /// Effect of this rung in the plan, compared with the same plan without the rung. `None` if the plan does not take
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_plan: Option<RungEffect>,
}

/// The predicted effect of taking a rung.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RungEffect {
    /// Bytes freed on the device; negative if the device holds more.
    pub freed_bytes: i64,
    /// Bytes added on the host; negative if the host holds less.
    pub host_bytes: i64,
    /// Bytes added in the scratch file; negative if the file holds less.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub file_bytes: i64,
    /// Seconds added to a step; negative if the step is faster.
    pub added_seconds: f64,
    /// Predicted tokens (including padding) per second with the rung.
    pub tokens_per_second: f64,
}

fn is_zero(bytes: &i64) -> bool {
    *bytes == 0
}

/// The workload that a plan was made for. A run with another workload cannot use the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlannedWorkload {
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Number of tokens per sequence.
    pub sequence: u64,
    /// Number of tokens per optimizer step, including padding.
    pub batch_tokens: u64,
}

impl fmt::Display for PlannedWorkload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlannedWorkload { parameters, sequence, batch_tokens } = self;
        write!(f, "{parameters} parameters, {batch_tokens} tokens a step in sequences of {sequence}")
    }
}

/// The host memory of one machine of a team.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MachineHost {
    /// The host as named in `--devices`: `pc1/host`, or `host` for the devices without a machine.
    pub name: String,
    /// The load line of the host for offloaded tensors.
    pub budget_bytes: Bytes,
    /// Bytes that the devices of the machine offload to it.
    pub arena_bytes: Bytes,
}

/// A plan, or a refusal with the remedies that would make the run fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Plan {
    /// Whether the run fits under every load line.
    pub fits: bool,
    /// The chosen recipe; of a team, the recipe of rank 0. If nothing fits, the smallest recipe.
    pub recipe: Recipe,
    /// Effect of the plan's rungs on the results of the run, compared with the plain recipe.
    pub class: Class,
    /// Lossy rungs taken; empty if the plan loses no accuracy.
    #[serde(default)]
    pub rungs: Vec<Rung>,
    /// Bytes of a checkpoint on disk.
    #[serde(default)]
    pub checkpoint_bytes: Bytes,
    /// Memory of each device that takes part, by rank. If nothing fits, memory of one device only.
    pub devices: Vec<DevicePlan>,
    /// The parallelism of the team; `None` for a single device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<Parallelism>,
    /// The workers of the team by rank; empty for a single device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<WorkerPlan>,
    /// Throughput of the team compared with its devices. `None` for a single device, a sharded team, a pipeline, or
    /// workers taken over from an earlier plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling_efficiency: Option<ScalingEfficiency>,
    /// Predicted seconds that the links of the team add to a step; `None` for a single device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_seconds: Option<f64>,
    /// A device, or a host with its devices, that would be faster alone than the whole team. `None` if there is none.
    /// Also `None` if the planner may exclude slow devices itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_alone: Option<FasterAlone>,
    /// Devices that take no part, with the reason; empty if all take part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<ExcludedDevice>,
    /// The plan and its alternatives for the team. Those that fit come first; among equals, faster ones come first.
    /// Filled with `--explain`, else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Alternative>,
    /// Memory of the host. On several machines, the sum of their hosts.
    pub host: DevicePlan,
    /// Memory of the host of each machine; empty if only one machine has host memory for offloaded tensors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub machine_hosts: Vec<MachineHost>,
    /// The scratch file; `None` if the plan does not use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<DevicePlan>,
    /// Predicted speed.
    pub predicted: Predicted,
    /// Predicted speed of generation; `None` unless several sequences are generated at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<PredictedGeneration>,
    /// The recipe of the smallest peak. Filled by `plimsoll plan` for a run that samples completions on one device, else
    /// `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub smallest: Option<SmallestRecipe>,
    /// Remedies if the run does not fit, least loss first; empty if it fits.
    pub needs: Vec<Remedy>,
    /// The workload that was planned; `None` if only a part of a run was planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned_for: Option<PlannedWorkload>,
    /// A note that other programs used the CPU while its rates were measured, with the consequence and the remedy.
    /// `None` if the measurement was undisturbed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention_note: Option<String>,
    /// A note on limits that earlier runs found and that this plan respects: a device could not hold all of its free
    /// memory, or was slower than calibrated. `None` if no limit applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortfall_note: Option<String>,
    /// The algorithms of the GPU's matrix products; `None` before the GPU was opened, and for other devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<GemmAlgorithms>,
    /// The fallback from the requested device to the CPU; `None` if the requested device is planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// Predicted effect of each rung. Filled with `--explain` for a single device, else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<RungPrice>,
    /// Changes of settings that the planner predicts to make the run faster. Those that keep the results come first; among
    /// equals, the fastest comes first. Filled with `--advise`, else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recommendations: Vec<Recommendation>,
}
