//! The plan of a run as a snapshot shows it.

use crate::plan::describe_class;
use crate::text::count;
use plimsoll_core::{ExcludedDevice, Plan, Recipe, WorkerPlan, format_count};
use serde::{Deserialize, Serialize};

/// The choices of the newest plan of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanSnapshot {
    /// How the devices share the work, such as `data parallel`, or `single device`.
    pub parallelism: String,
    /// Effect of the plan's rungs on the results of the run.
    pub effect: String,
    /// Predicted tokens (including padding) per second.
    pub predicted_tokens_per_second: f64,
    /// The work of each device, in the order of the plan.
    pub workers: Vec<WorkerSnapshot>,
    /// Devices that take no part, each with its reason.
    pub excluded: Vec<String>,
}

/// The work of a device of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerSnapshot {
    /// Name of the device.
    pub device: String,
    /// Sequences of a step that the device computes; `None` for a single device, which computes all.
    pub sequences: Option<u64>,
    /// The layers of a pipeline stage: the first one, and the one after the last. `None` for other devices.
    pub layers: Option<[u64; 2]>,
    /// Micro-batch, recompute and offload.
    pub recipe: String,
}

impl PlanSnapshot {
    /// Returns the choices of a plan.
    pub(super) fn of(plan: &Plan) -> PlanSnapshot {
        let single = || plan.devices.first().map(|device| WorkerSnapshot::single(&device.name, &plan.recipe));
        PlanSnapshot {
            parallelism: plan.parallelism.map_or("single device", |parallelism| parallelism.describe()).to_owned(),
            effect: describe_class(plan.class).to_owned(),
            predicted_tokens_per_second: plan.predicted.tokens_per_second,
            workers: match plan.team.is_empty() {
                true => single().into_iter().collect(),
                false => plan.team.iter().map(WorkerSnapshot::of).collect(),
            },
            excluded: plan.excluded.iter().map(describe_excluded).collect(),
        }
    }

    /// Returns the plan as lines: the parallelism with the predicted speed, each device, and those that take no part.
    pub fn lines(&self) -> Vec<String> {
        let rate = count(self.predicted_tokens_per_second);
        let head = format!("plan: {}, {rate} tok/s (predicted); {}", self.parallelism, self.effect);
        let workers = self.workers.iter().map(|worker| format!("{}: {}", worker.device, worker.work()));
        let excluded = self.excluded.iter().map(|excluded| format!("excluded: {excluded}"));
        [head].into_iter().chain(workers).chain(excluded).collect()
    }
}

/// Returns a device that takes no part, with the reason and its other work.
fn describe_excluded(excluded: &ExcludedDevice) -> String {
    let evaluates = if excluded.evaluator_plan.is_some() { "; it evaluates beside the run" } else { "" };
    format!("{}: {}{evaluates}", excluded.device, excluded.reason)
}

impl WorkerSnapshot {
    fn single(device: &str, recipe: &Recipe) -> WorkerSnapshot {
        WorkerSnapshot { device: device.to_owned(), sequences: None, layers: None, recipe: recipe.to_string() }
    }

    fn of(worker: &WorkerPlan) -> WorkerSnapshot {
        let alone = WorkerSnapshot::single(&worker.device, &worker.recipe);
        WorkerSnapshot { sequences: Some(worker.sequences), layers: worker.layers, ..alone }
    }

    /// Returns the work of the device in words: `6 sequences, micro-batch 2, recompute nothing`.
    fn work(&self) -> String {
        // The recipe of a device without sequences says so.
        let sequences = self.sequences.filter(|count| *count > 0);
        let sequences = sequences.map(|count| format_count(count, "sequence"));
        let layers = self.layers.map(|[first, end]| format!("layers {first} to {}", end.saturating_sub(1)));
        let parts = sequences.into_iter().chain(layers).chain([self.recipe.clone()]);
        parts.collect::<Vec<_>>().join(", ")
    }
}
