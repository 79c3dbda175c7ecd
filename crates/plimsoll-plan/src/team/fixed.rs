//! Plans for a team with given shares. A resumed run keeps its plan. After a change of load lines, a run keeps its
//! shares if they still fit.

use super::exclusion::exclude;
use super::{
    PlannedWorker, TeamOutcome, TeamRequest, data_parallel, evaluator, pipeline, plan_team, sharded, team_plan,
};
use crate::search::{PinnedChoices, PlanOutcome, PlanRequest, plan_recipe, plan_recipe_like, search, with_lossy};
use plimsoll_core::{Parallelism, Recipe, WorkerPlan};
use plimsoll_program::Share;

/// Plans a team with the shares and recipes of an earlier plan, without regard to load lines: for a resumed run.
/// Workers are matched to devices by name.
///
/// # Panics
/// If a worker is not a device of the request.
pub fn plan_fixed_team(team: &TeamRequest, workers: &[WorkerPlan]) -> TeamOutcome {
    plan_workers(team, workers, plan_recipe)
}

/// Plans a team anew after its load lines changed. Every worker keeps its share, and its recipe if that still fits. The
/// other workers get the fastest recipe that fits their share. If a worker has none, the whole step is planned anew.
///
/// # Panics
/// If a worker is not a device of the request.
pub fn replan_team(team: &TeamRequest, workers: &[WorkerPlan]) -> TeamOutcome {
    let kept = plan_workers(team, workers, |request, recipe| {
        let kept = plan_recipe(request, recipe);
        if kept.plan.fits { kept } else { search(&keep_micro_batch(with_lossy(request, &recipe.rungs), recipe)) }
    });
    if kept.plan.fits { kept } else { plan_team(team) }
}

/// Pins the micro-batch of `recipe` in the request of a sharded rank or of a pipeline stage, because all ranks must
/// have the same number of micro-batches. Other requests are returned unchanged.
pub fn keep_micro_batch<'a>(request: PlanRequest<'a>, recipe: &Recipe) -> PlanRequest<'a> {
    match request.share.parallelism {
        Some(Parallelism::Sharded | Parallelism::Pipeline) => {
            let pins = PinnedChoices { micro_batch: Some(recipe.micro_batch), ..request.pins.clone() };
            PlanRequest { pins, ..request }
        }
        _ => request,
    }
}

/// Plans every worker of an earlier plan by calling `plan` with its request and recipe, and puts the team's plan
/// together. Identical workers are planned once.
fn plan_workers(
    team: &TeamRequest,
    workers: &[WorkerPlan],
    plan: impl Fn(&PlanRequest, &Recipe) -> PlanOutcome,
) -> TeamOutcome {
    let shares = shares_of_plan(workers);
    let mut assigned: Vec<PlannedWorker> = Vec::new();
    for (worker, share) in workers.iter().zip(shares) {
        let has_name = |request: &PlanRequest| request.device.name == worker.device;
        // Several paper devices may have one name.
        let is_free = |device: &usize| assigned.iter().all(|other| other.device != *device);
        let device = (0..team.devices.len()).filter(is_free).find(|&device| has_name(&team.devices[device]));
        let device = device.expect("a worker is a device of the request");
        let request = team.request_for(device, &share, worker.sequences, team.host);
        let is_alike = |other: &&PlannedWorker| {
            data_parallel::are_alike(&team.devices[other.device], &team.devices[device])
                && (other.sequences, other.share.own_state_share()) == (worker.sequences, share.own_state_share())
                && other.outcome.plan.recipe == worker.recipe
        };
        let outcome = match assigned.iter().find(is_alike) {
            Some(other) => plan_recipe_like(&request, &worker.recipe, &other.outcome),
            None => plan(&request, &worker.recipe),
        };
        assigned.push(PlannedWorker { device, share, sequences: worker.sequences, outcome });
    }
    let mut plan = team_plan::assemble(team, &mut assigned);
    plan.team.iter_mut().zip(workers).for_each(|(worker, before)| worker.reason.clone_from(&before.reason));
    let others = (0..team.devices.len()).filter(|device| assigned.iter().all(|worker| worker.device != *device));
    let exclude_unused = |device: usize| exclude(team, device, "it has no share in this plan".to_owned());
    plan.excluded = others.map(exclude_unused).collect();
    evaluator::add_evaluator(team, TeamOutcome { workers: assigned, plan, evaluator: None })
}

/// Returns the shares of the workers of a stored plan.
fn shares_of_plan(workers: &[WorkerPlan]) -> Vec<Share> {
    let sequences: Vec<u64> = workers.iter().map(|worker| worker.sequences).collect();
    let shards: Option<Vec<u64>> = workers.iter().map(|worker| worker.shard_1024ths).collect();
    let micro_batches = |worker: &WorkerPlan| worker.recipe.micro_batches(worker.sequences);
    let layer_ends: Option<Vec<u64>> = workers.iter().map(|worker| worker.layers.map(|[_, end]| end)).collect();
    if let Some(ends) = layer_ends.filter(|ends| ends.len() > 1) {
        return pipeline::shares(&[vec![0], ends].concat());
    }
    match shards {
        _ if workers.len() < 2 => vec![Share::SINGLE_DEVICE],
        Some(shards) => sharded::shares(&sequences, &shards, workers.iter().map(micro_batches).max().unwrap_or(1)),
        None => data_parallel::shares(&sequences),
    }
}
