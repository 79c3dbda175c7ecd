//! The plan as it is written down: `plan.json`, and what `plimsoll plan --json` prints.
//!
//! Here are the plan itself, what it predicts of devices, rungs and speed, and what it answers where nothing fits. The
//! choices are in `recipe`, the parts of a team in `team`, and the words for memory in `space`.

use crate::{
    Alternative, Bytes, Category, Class, FasterAlone, LeftOut, Member, Recipe, Rung, Sharing, WorkName, Worth,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What a device (or the host) holds under a plan. All bytes are predicted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// The device's name.
    pub name: String,
    /// Whether figures of this device come from a simulation.
    pub simulated: bool,
    /// The load line.
    pub budget_bytes: Bytes,
    /// The one allocation.
    pub arena_bytes: Bytes,
    /// Held outside the arena.
    pub charges_bytes: Bytes,
    /// Arena and charges.
    pub peak_bytes: Bytes,
    /// Bytes by category at the moment the arena is fullest.
    pub by_category: BTreeMap<Category, Bytes>,
    /// Peak of the arena while each Program runs.
    pub by_program: BTreeMap<WorkName, Bytes>,
    /// The largest sum of live tensors: no packing can be below it.
    pub lower_bound_bytes: Bytes,
}

/// Predicted speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// One optimizer step.
    pub step_seconds: f64,
    /// Tokens (padding counted) a second.
    pub tokens_per_second: f64,
}

/// Which algorithms a library of products does the products of a run with: with others, last bits differ. Chosen once,
/// then kept with plan and checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// The library's version, as it says it itself.
    pub library: u64,
    /// The GPU's name.
    pub gpu: String,
    /// The newest CUDA that the driver knows: 12040 is 12.4.
    pub driver: u32,
    /// By the product's name: the algorithm, 64 bytes in hexadecimal.
    pub chosen: BTreeMap<String, String>,
}

impl Algorithms {
    /// Whether both were chosen by the same library and driver on the same kind of GPU: only then one may be used for
    /// the other.
    pub fn of_the_same(&self, other: &Algorithms) -> bool {
        let of = |these: &Algorithms| (these.library, these.gpu.clone(), these.driver);
        of(self) == of(other)
    }
}

impl fmt::Display for Algorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Algorithms { library, gpu, driver, .. } = self;
        write!(f, "{gpu}, driver for CUDA {}.{}, cuBLASLt {library}", driver / 1000, driver % 1000 / 10)
    }
}

/// A budget that would fit when the named rungs are allowed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Need {
    /// The lossy rungs that must be allowed.
    pub allow: Vec<Rung>,
    /// The smallest load line that then fits.
    pub budget_bytes: Bytes,
    /// What it then takes on the host, where that is more than the host's load line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<Bytes>,
    /// What it then takes of a scratch file, where that is more than was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<Bytes>,
    /// What the plan then holds on the device, where the present load line is enough and there is one device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<Bytes>,
    /// Load lines that other devices of a team need then, too, by their names: all of a name that have less.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub others: BTreeMap<String, Bytes>,
}

/// The last rung: a device that cannot hold the run by any rung that may be taken, and whose work the processor does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback {
    /// The device that was asked for.
    pub device: String,
    /// Its load line.
    pub budget_bytes: Bytes,
    /// The smallest load line that would have done there.
    pub needs_bytes: Bytes,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fallback { device, budget_bytes, needs_bytes } = self;
        write!(f, "fallback to CPU: {device} would have to hold {needs_bytes}, and its load line is {budget_bytes}")
    }
}

/// A rung of the ladder: what it frees and costs. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RungPrice {
    /// `micro_batch`, `recompute`, what waits on the host as `offload.optimizer`, or the name of a lossy rung.
    pub rung: String,
    /// What it does to the numbers.
    pub class: Class,
    /// What is lost, in words.
    pub loses: String,
    /// Whether the planner may take it.
    pub allowed: bool,
    /// As far as it goes and nothing else, against the plain recipe: one micro-batch, nothing computed again, nothing on
    /// the host.
    pub alone: Effect,
    /// As far as the plan takes it, against the same plan without it; none where the plan does without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_plan: Option<Effect>,
}

/// What taking a rung does. All figures are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Bytes that the device holds less.
    pub freed_bytes: i64,
    /// Bytes that the host holds more.
    pub host_bytes: i64,
    /// Bytes that the scratch file holds more.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub file_bytes: i64,
    /// Seconds that a step takes longer.
    pub costs_seconds: f64,
    /// Tokens (padding counted) a second with it.
    pub tokens_per_second: f64,
}

fn is_zero(bytes: &i64) -> bool {
    *bytes == 0
}

/// What a plan was made for: a run of anything else cannot follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOf {
    /// Parameters of the model.
    pub parameters: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Tokens of an optimizer step.
    pub batch_tokens: u64,
}

impl fmt::Display for PlanOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanOf { parameters, sequence, batch_tokens } = self;
        write!(f, "{parameters} parameters, {batch_tokens} tokens a step in sequences of {sequence}")
    }
}

/// A plan, or the word that there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Whether the run fits under every load line.
    pub fits: bool,
    /// The choices; where nothing fits, those of the smallest recipe.
    pub recipe: Recipe,
    /// What the rungs taken do to the numbers, against the plain recipe.
    pub class: Class,
    /// The lossy rungs taken.
    #[serde(default)]
    pub rungs: Vec<Rung>,
    /// The tensors of a checkpoint, in a file.
    #[serde(default)]
    pub checkpoint_bytes: Bytes,
    /// Every device that takes part, in the order of ranks.
    pub devices: Vec<DevicePlan>,
    /// How they share the work; none where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// What each of them is given, in the same order; empty where there is one. The recipe of the plan is the first one's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<Member>,
    /// What they are worth together, where it was planned and is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worth: Option<Worth>,
    /// What a team's links cost: seconds that a step would take less if they took none, predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_seconds: Option<f64>,
    /// Where all have to take part: a device that would be faster without the others, or over several hosts one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_alone: Option<FasterAlone>,
    /// The devices that take no part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// Other ways to share out, fastest first, where somebody asked (`--explain`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Alternative>,
    /// The host.
    pub host: DevicePlan,
    /// The scratch file, where something waits in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<DevicePlan>,
    /// Predicted speed.
    pub predicted: Predicted,
    /// The smallest budgets that would fit, where it does not fit.
    pub needs: Vec<Need>,
    /// What was planned; none where only a part of a run was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<PlanOf>,
    /// That other programs took the processor while its rates were measured, with what follows from it and what would help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disturbed: Option<String>,
    /// What earlier runs found out about the device, where the plan follows it: that it could not hold what was free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<String>,
    /// What the products of a GPU are done with, once it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<Algorithms>,
    /// The device that was asked for, where the processor does its work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// What each rung frees and costs, where somebody asked (`--explain`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<RungPrice>,
}
