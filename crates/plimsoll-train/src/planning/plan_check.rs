//! The check of a plan that comes from a file: whether its values agree with each other and with the run. Planning and
//! devices rely on it.

use plimsoll_core::printable::shortened;
use plimsoll_core::{Bytes, Offload, Parallelism, Plan, Recipe, WorkerPlan, format_count};
use plimsoll_plan::device_request::MAX_DEVICES;
use plimsoll_plan::paper;

/// The most charges that a plan may state. No device has so much memory.
const MAX_CHARGES: Bytes = Bytes::gib(1 << 20);
/// The sum of the shards of a sharded team, in 1024ths.
const ALL_SHARDS: u64 = 1024;
/// The most characters of a device's name in a message.
const NAME_CHARS: usize = 60;

/// A value of a plan that contradicts another one or the run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` {message}")]
pub struct PlanFault {
    /// Place of the value, such as `team[1].sequences`.
    pub key: String,
    /// The contradiction, as the rest of a sentence that begins with the key.
    pub message: String,
}

/// The parts of a run that a plan has to divide among its devices.
#[derive(Clone, Copy, Debug)]
pub struct PlannedWork {
    /// Number of sequences of an optimizer step.
    pub sequences: u64,
    /// Number of layers of the model.
    pub layers: u64,
}

/// Checks a whole plan as it was read from a file.
///
/// # Errors
/// The first value that contradicts another one or `work`.
pub fn check_plan(plan: &Plan, work: PlannedWork) -> Result<(), PlanFault> {
    let Some(first) = plan.devices.first() else {
        return Err(fault("devices", "is empty"));
    };
    let parts = ReusedParts {
        recipe: &plan.recipe,
        charges_bytes: first.charges_bytes,
        parallelism: plan.parallelism,
        team: &plan.team,
    };
    check_parts(&parts, work)?;
    let workers = plan.team.len().max(1);
    if plan.devices.len() != workers {
        let (devices, workers) = (format_count(plan.devices.len(), "device"), format_count(workers, "worker"));
        return Err(fault("devices", format!("lists {devices}, and the plan has {workers}")));
    }
    Ok(())
}

/// The parts of a plan that a run uses again.
pub(super) struct ReusedParts<'a> {
    /// Recipe of the first device.
    pub recipe: &'a Recipe,
    /// Charges (bytes outside the arena) of the first device.
    pub charges_bytes: Bytes,
    /// Parallelism of the team; `None` for one device.
    pub parallelism: Option<Parallelism>,
    /// Plan of each worker, in rank order; empty for one device.
    pub team: &'a [WorkerPlan],
}

/// Checks the parts of a plan that a run uses again.
///
/// # Errors
/// As [`check_plan`].
pub(super) fn check_parts(plan: &ReusedParts, work: PlannedWork) -> Result<(), PlanFault> {
    if plan.charges_bytes > MAX_CHARGES {
        return Err(fault("devices[0].charges_bytes", format!("is above {MAX_CHARGES}")));
    }
    check_recipe("recipe", plan.recipe, work)?;
    let team = plan.team;
    if team.len() > MAX_DEVICES {
        return Err(fault("team", format!("has {} workers, and a team has at most {MAX_DEVICES}", team.len())));
    }
    let parallelism = match plan.parallelism {
        None if team.len() < 2 => Parallelism::Data,
        None => return Err(fault("parallelism", "is missing, and the plan has a team")),
        Some(_) if team.is_empty() => return Err(fault("parallelism", "is given, and the plan has no team")),
        Some(parallelism) => parallelism,
    };
    for (rank, worker) in team.iter().enumerate() {
        check_worker(rank, worker, parallelism, work)?;
        let is_same = |other: &WorkerPlan| other.device == worker.device;
        // A paper device that is named several times stands for several devices.
        if team[..rank].iter().any(is_same) && !paper::is_paper_name(&worker.device) {
            let name = shortened(&worker.device, NAME_CHARS);
            return Err(fault(format!("team[{rank}].device"), format!("names `{name}` a second time")));
        }
    }
    match parallelism {
        _ if team.is_empty() => Ok(()),
        Parallelism::Data => check_sequence_sum(team, work),
        Parallelism::Sharded => {
            check_sequence_sum(team, work)?;
            let shards = team.iter().map(|worker| worker.shard_1024ths.unwrap_or_default());
            check_sum("shard_1024ths", shards, ALL_SHARDS, "the whole")
        }
        Parallelism::Pipeline => check_stages(team, work),
    }
}

/// Checks one worker by itself.
fn check_worker(
    rank: usize,
    worker: &WorkerPlan,
    parallelism: Parallelism,
    work: PlannedWork,
) -> Result<(), PlanFault> {
    let key = |name: &str| format!("team[{rank}].{name}");
    check_recipe(&key("recipe"), &worker.recipe, work)?;
    if worker.sequences > work.sequences {
        let message = format!("is {}, and a step has {}", worker.sequences, format_count(work.sequences, "sequence"));
        return Err(fault(key("sequences"), message));
    }
    let stores_only = parallelism == Parallelism::Sharded && worker.sequences == 0;
    if worker.sequences == 0 && !stores_only {
        return Err(fault(key("sequences"), "is 0, and only a sharded team has workers without sequences"));
    }
    if worker.recipe.micro_batch == 0 && !stores_only {
        return Err(fault(key("recipe.micro_batch"), "is 0, and the worker computes sequences"));
    }
    if worker.layers.is_some() != (parallelism == Parallelism::Pipeline) {
        return Err(fault(key("layers"), "is for a pipeline, and each of its workers needs it"));
    }
    if worker.shard_1024ths.is_some() != (parallelism == Parallelism::Sharded) {
        return Err(fault(key("shard_1024ths"), "is for a sharded team, and each of its workers needs it"));
    }
    Ok(())
}

/// Checks that no count of a recipe exceeds those of the run.
fn check_recipe(key: &str, recipe: &Recipe, work: PlannedWork) -> Result<(), PlanFault> {
    let Recipe { micro_batch, recompute, offload, .. } = recipe;
    if u64::from(*micro_batch) > work.sequences {
        let message = format!("is {micro_batch}, and a step has {}", format_count(work.sequences, "sequence"));
        return Err(fault(format!("{key}.micro_batch"), message));
    }
    if recompute.len() as u64 > work.layers {
        let message = format!("has {} levels, and the model has {} layers", recompute.len(), work.layers);
        return Err(fault(format!("{key}.recompute"), message));
    }
    let Offload { optimizer, gradients, weights, inputs, file, .. } = *offload;
    let counts = [
        ("optimizer", optimizer, work.layers),
        ("gradients", gradients, work.layers),
        ("weights", weights, work.layers),
        ("inputs", inputs, work.layers),
        ("file.optimizer", file.optimizer, u64::from(optimizer)),
        ("file.gradients", file.gradients, u64::from(gradients)),
        ("file.weights", file.weights, u64::from(weights)),
    ];
    match counts.into_iter().find(|(_, count, most)| u64::from(*count) > *most) {
        Some((name, count, most)) => {
            Err(fault(format!("{key}.offload.{name}"), format!("is {count}, and at most {most} layers are possible")))
        }
        None => Ok(()),
    }
}

fn check_sequence_sum(team: &[WorkerPlan], work: PlannedWork) -> Result<(), PlanFault> {
    check_sum("sequences", team.iter().map(|worker| worker.sequences), work.sequences, "a step")
}

/// Checks that the values of all workers under `key` add up to `whole`.
fn check_sum(key: &str, values: impl Iterator<Item = u64>, whole: u64, of: &str) -> Result<(), PlanFault> {
    let sum: u128 = values.map(u128::from).sum();
    if sum == u128::from(whole) {
        return Ok(());
    }
    Err(fault(format!("team[].{key}"), format!("adds up to {sum}, and {of} is {whole}")))
}

/// Checks that the stages of a pipeline divide the model, and that each computes all sequences.
fn check_stages(team: &[WorkerPlan], work: PlannedWork) -> Result<(), PlanFault> {
    let mut next = 0;
    for (rank, worker) in team.iter().enumerate() {
        let [first, end] = worker.layers.unwrap_or_default();
        if first != next || end <= first || end > work.layers {
            let message = format!("is [{first}, {end}], and the stages divide {} layers in order", work.layers);
            return Err(fault(format!("team[{rank}].layers"), message));
        }
        if worker.sequences != work.sequences {
            let message = format!("is {}, and a stage computes all {}", worker.sequences, work.sequences);
            return Err(fault(format!("team[{rank}].sequences"), message));
        }
        if worker.recipe.micro_batch != team[0].recipe.micro_batch {
            let message = format!("is {}, and rank 0 has another", worker.recipe.micro_batch);
            return Err(fault(format!("team[{rank}].recipe.micro_batch"), message));
        }
        next = end;
    }
    match next == work.layers {
        true => Ok(()),
        false => Err(fault("team[].layers", format!("ends at {next}, and the model has {} layers", work.layers))),
    }
}

fn fault(key: impl Into<String>, message: impl Into<String>) -> PlanFault {
    PlanFault { key: key.into(), message: message.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::previous_plan::PreviousPlan;
    use plimsoll_core::RecomputeLevel;

    const WORK: PlannedWork = PlannedWork { sequences: 8, layers: 4 };

    fn worker(device: &str, sequences: u64, layers: u64) -> WorkerPlan {
        WorkerPlan {
            device: device.to_owned(),
            recipe: Recipe::on_device(1, vec![RecomputeLevel::Nothing; layers as usize]),
            sequences,
            layers: None,
            shard_1024ths: None,
            reason: None,
            algorithms: None,
            busy_seconds: 0.0,
            idle_seconds: 0.0,
            ladder: Vec::new(),
        }
    }

    fn plan(parallelism: Parallelism, team: Vec<WorkerPlan>) -> PreviousPlan {
        PreviousPlan {
            recipe: team[0].recipe.clone(),
            charges_bytes: Bytes::mib(60),
            algorithms: None,
            parallelism: Some(parallelism),
            team,
        }
    }

    fn data(sequences: [u64; 2]) -> PreviousPlan {
        plan(Parallelism::Data, vec![worker("a", sequences[0], 4), worker("b", sequences[1], 4)])
    }

    fn sharded(shards: [u64; 2]) -> PreviousPlan {
        let mut plan = plan(Parallelism::Sharded, data([8, 0]).team);
        plan.team.iter_mut().zip(shards).for_each(|(worker, shard)| worker.shard_1024ths = Some(shard));
        plan.team[1].recipe.micro_batch = 0;
        plan
    }

    fn pipeline(layers: [[u64; 2]; 2]) -> PreviousPlan {
        let mut plan = plan(Parallelism::Pipeline, vec![worker("a", 8, 2), worker("b", 8, 2)]);
        plan.team.iter_mut().zip(layers).for_each(|(worker, own)| worker.layers = Some(own));
        plan
    }

    /// Returns the key of the value that is refused; empty if the plan is in order.
    fn key(plan: &PreviousPlan) -> String {
        check_parts(&plan.parts(), WORK).err().map(|fault| fault.key).unwrap_or_default()
    }

    #[test]
    fn shares_must_add_up_to_whole() {
        assert_eq!(key(&data([3, 5])), "");
        for wrong in [[3, 6], [3, 4]] {
            assert_eq!(key(&data(wrong)), "team[].sequences");
        }
        assert_eq!(key(&data([1 << 63, (1 << 63) + 8])), "team[0].sequences");
        assert_eq!(key(&data([8, 0])), "team[1].sequences");
        assert_eq!(key(&sharded([1000, 24])), "");
        assert_eq!(key(&sharded([1000, 1000])), "team[].shard_1024ths");
        assert_eq!(key(&sharded([u64::MAX, 1025])), "team[].shard_1024ths");
    }

    #[test]
    fn stages_must_divide_the_layers() {
        assert_eq!(key(&pipeline([[0, 2], [2, 4]])), "");
        for (layers, wrong) in [
            ([[0, 2], [0, 2]], "team[1].layers"),
            ([[0, 2], [2, 3]], "team[].layers"),
            ([[0, 2], [3, 4]], "team[1].layers"),
            ([[0, 0], [0, 4]], "team[0].layers"),
            ([[0, 2], [2, u64::MAX]], "team[1].layers"),
        ] {
            assert_eq!(key(&pipeline(layers)), wrong, "{layers:?}");
        }
    }

    #[test]
    fn worker_devices_must_be_distinct_and_few() {
        let named = |name: &str| plan(Parallelism::Data, vec![worker(name, 4, 4), worker(name, 4, 4)]);
        assert_eq!(key(&named("virtual:a")), "team[1].device");
        assert_eq!(key(&named("rtx3090")), "");
        let mut many = data([4, 4]);
        many.team = std::iter::repeat_n(many.team, 1000).flatten().collect();
        assert_eq!(key(&many), "team");
    }

    #[test]
    fn recipe_counts_must_not_exceed_the_run() {
        let wrong = |change: fn(&mut Recipe)| {
            let mut plan = data([4, 4]);
            change(&mut plan.team[1].recipe);
            key(&plan)
        };
        assert_eq!(wrong(|recipe| recipe.micro_batch = 0), "team[1].recipe.micro_batch");
        assert_eq!(wrong(|recipe| recipe.micro_batch = u32::MAX), "team[1].recipe.micro_batch");
        assert_eq!(wrong(|recipe| recipe.recompute = recipe.recompute.repeat(2)), "team[1].recipe.recompute");
        assert_eq!(wrong(|recipe| recipe.offload.weights = 5), "team[1].recipe.offload.weights");
        assert_eq!(wrong(|recipe| recipe.offload.file.weights = 1), "team[1].recipe.offload.file.weights");
    }

    #[test]
    fn keys_of_another_parallelism_are_refused() {
        let mut missing = pipeline([[0, 2], [2, 4]]);
        missing.team[1].layers = None;
        assert_eq!(key(&missing), "team[1].layers");
        let mut foreign = data([4, 4]);
        foreign.team[0].shard_1024ths = Some(1024);
        assert_eq!(key(&foreign), "team[0].shard_1024ths");
        assert_eq!(key(&PreviousPlan { parallelism: None, ..data([4, 4]) }), "parallelism");
        assert_eq!(key(&PreviousPlan { team: Vec::new(), ..data([4, 4]) }), "parallelism");
    }
}
