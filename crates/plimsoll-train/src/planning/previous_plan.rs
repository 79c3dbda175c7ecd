//! The plan of an earlier part of a run, or a stored plan, and the checks that a run can use it again.

use super::plan_check::{PlannedWork, ReusedParts, check_parts};
use crate::resolve::{Model, RunRequest};
use plimsoll_core::{Bytes, DeviceSpec, GemmAlgorithms, Parallelism, Plan, Recipe, WorkerPlan};

/// The parts that planning needs of a previous plan: that of an earlier part of the run, or a stored one. The run uses
/// it again if it still fits.
#[derive(Clone, Debug, PartialEq)]
pub struct PreviousPlan {
    /// Recipe of the first device.
    pub recipe: Recipe,
    /// Charges (bytes outside the arena) of the first device.
    pub charges_bytes: Bytes,
    /// Matrix product algorithms of a plan for one device. `None` if that device is no GPU, or for a team, whose
    /// workers have their own in `team`.
    pub algorithms: Option<GemmAlgorithms>,
    /// Parallelism of the team; `None` for one device.
    pub parallelism: Option<Parallelism>,
    /// Plan of each worker, in rank order; empty for one device.
    pub team: Vec<WorkerPlan>,
}

impl PreviousPlan {
    /// Takes over a plan for use as a previous plan. Returns `None` if `plan` has no devices.
    pub fn from_plan(plan: &Plan) -> Option<PreviousPlan> {
        Some(PreviousPlan {
            recipe: plan.recipe.clone(),
            charges_bytes: plan.devices.first()?.charges_bytes,
            algorithms: plan.algorithms.clone(),
            parallelism: plan.parallelism,
            team: plan.team.clone(),
        })
    }

    /// Returns the recipe of this plan's first device, for a run on one device. Returns `None` if the recipe does not
    /// comply with the run file, or if that device only stored a shard.
    pub(super) fn recipe_for(&self, run: &RunRequest, model: &Model) -> Option<&Recipe> {
        let complies = self.recipe.micro_batch > 0
            && self.is_consistent(run, model)
            && is_recipe_of_run(&self.recipe, None, run, model);
        complies.then_some(&self.recipe)
    }

    /// Returns the workers of this plan, for a run on `devices`. Returns `None` if this plan is for one device or does
    /// not comply with the run file, or if a worker's device is not among `devices`.
    pub(super) fn team_for(&self, devices: &[DeviceSpec], run: &RunRequest, model: &Model) -> Option<&[WorkerPlan]> {
        let workers_on = |name: &str| self.team.iter().filter(|worker| worker.device == name).count();
        let devices_named = |name: &str| devices.iter().filter(|device| device.name == name).count();
        let has_device = |worker: &WorkerPlan| workers_on(&worker.device) <= devices_named(&worker.device);
        let complies = !self.team.is_empty()
            && self.is_consistent(run, model)
            && run.run.parallelism.pinned().is_none_or(|pinned| self.parallelism.is_none_or(|own| own == pinned))
            && self.team.iter().all(has_device)
            && self.team.iter().all(|worker| is_recipe_of_run(&worker.recipe, worker.layers, run, model));
        complies.then_some(&self.team)
    }

    /// Whether the values of this plan agree with each other and with the run. Those of a damaged file may not.
    fn is_consistent(&self, run: &RunRequest, model: &Model) -> bool {
        let work = PlannedWork { sequences: run.batch_sequences(), layers: model.config.layers };
        check_parts(&self.parts(), work).is_ok()
    }

    /// Returns the parts that [`check_parts`] checks.
    pub(super) fn parts(&self) -> ReusedParts<'_> {
        ReusedParts {
            recipe: &self.recipe,
            charges_bytes: self.charges_bytes,
            parallelism: self.parallelism,
            team: &self.team,
        }
    }

    /// Returns the matrix product algorithms of the worker on the device with this name. Returns `None` if no worker of
    /// this plan is on it, or if the device is no GPU.
    pub(super) fn algorithms_of_worker(&self, device: &str) -> Option<&GemmAlgorithms> {
        self.team.iter().find(|worker| worker.device == device).and_then(|worker| worker.algorithms.as_ref())
    }
}

/// Whether a recipe complies with the run file, which may have changed since the recipe was made. `layers` holds the
/// first layer of a pipeline stage and the one after its last layer; `None` means all layers. A micro-batch of 0, that
/// of a storage-only worker, complies with each pinned micro-batch.
fn is_recipe_of_run(recipe: &Recipe, layers: Option<[u64; 2]>, run: &RunRequest, model: &Model) -> bool {
    let [first, end] = layers.unwrap_or([0, model.config.layers]);
    let all = &run.recipe.recompute;
    let pinned = all.get(first as usize..end as usize).unwrap_or(all);
    let as_pinned = |level| pinned.is_empty() || pinned.len() == 1 && pinned[0] == level;
    u64::from(recipe.micro_batch) <= run.batch_sequences()
        && recipe.recompute.len() as u64 == end.saturating_sub(first)
        && run.recipe.micro_batch.is_none_or(|pin| pin == recipe.micro_batch || recipe.micro_batch == 0)
        && run.train.rungs.as_ref().is_none_or(|rungs| *rungs == recipe.rungs)
        && (pinned == recipe.recompute || recipe.recompute.iter().all(|&level| as_pinned(level)))
}
