//! Comparisons of a planned team with other teams: the alternatives and memory ladders of `--explain`, and a device or
//! host that would be faster alone.

use super::candidate::{TeamCandidate, TeamSearch};
use super::data_parallel::{BatchSplitter, Split};
use super::measurements::Measurements;
use super::packed::pack_candidate;
use super::pipeline::Pipeline;
use super::sharded::Sharded;
use super::{PlannedWorker, TeamOutcome, TeamRequest, slowest_link, team_plan};
use crate::search::{PlanRequest, RecipeMeasurements, ladder, smallest_recipe, with_lossy};
use plimsoll_core::{
    Alternative, Bytes, DeviceSpec, FasterAlone, Parallelism, Plan, Predicted, Recipe, Rung, format_count,
};
use plimsoll_program::Share;
use std::sync::Arc;

/// Factor on the estimated largest throughput of some devices. They are compared with the team only if the product
/// exceeds the team's throughput.
const BOUND_MARGIN: f64 = 1.1;

/// Finds the device, or the host with its devices, that would be fastest without the others. Returns `None` if it is
/// not faster than the plan, or if not all devices have to take part.
pub(super) fn faster_alone(team: &TeamRequest, plan: &Plan, measurements: &Measurements) -> Option<FasterAlone> {
    if !team.require_all || plan.team.is_empty() {
        return None;
    }
    let all: Vec<usize> = (0..team.devices.len()).collect();
    let sharded = Sharded::new(team, &plan.rungs, measurements);
    let mut subsets = independent_subsets(team, &all);
    subsets.retain(|(_, devices)| {
        BOUND_MARGIN * sharded.approximate_max_tokens_per_second(devices) > plan.predicted.tokens_per_second
    });
    if subsets.is_empty() {
        return None;
    }
    let requests = team.requests_by_speed(&plan.rungs, &vec![team.host; team.devices.len()]);
    let mut splitter = BatchSplitter::new(
        &requests,
        team.machines(),
        team.sequences_per_step(),
        &measurements.with_rungs(&plan.rungs),
    );
    splitter.refine_baselines();
    let tokens_per_second = |devices: &[usize]| {
        let are_able = devices.iter().all(|device| splitter.able_devices().contains(device));
        splitter.split(devices).filter(|_| are_able).map(|split| team.tokens_per_step() / split.seconds)
    };
    let rated = subsets
        .into_iter()
        .filter_map(|(name, devices)| Some(FasterAlone { name, tokens_per_second: tokens_per_second(&devices)? }));
    let best = rated.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second))?;
    (best.tokens_per_second > plan.predicted.tokens_per_second).then_some(best)
}

/// Returns named subsets of `devices` that could work without the others. They are the devices of each host, or each
/// single device if all are on one host.
fn independent_subsets(team: &TeamRequest, devices: &[usize]) -> Vec<(String, Vec<usize>)> {
    let host = |device: usize| team.devices[device].device.remote_host().unwrap_or("this machine").to_owned();
    let mut hosts: Vec<(String, Vec<usize>)> = Vec::new();
    for &device in devices {
        match hosts.iter_mut().find(|(name, _)| *name == host(device)) {
            Some((_, devices)) => devices.push(device),
            None => hosts.push((host(device), vec![device])),
        }
    }
    match hosts.len() {
        1 => devices.iter().map(|&device| (team.devices[device].device.name.clone(), vec![device])).collect(),
        _ => hosts,
    }
}

/// Lists the plan itself and the other teams that were possible: those that fit first, fastest first.
///
/// - each device alone,
/// - data parallel over the fastest n devices, for each n, and with an even split over all,
/// - sharded, also with other storage-only workers,
/// - a pipeline.
///
/// Bytes of other teams are lower bounds, without packing. A data parallel team that seems faster than the plan is
/// packed, because the exact time of its all-reduce is only known then. `measurements` has those of the plan.
pub fn alternatives(team: &TeamRequest, plan: &Plan, measurements: &Measurements) -> Vec<Alternative> {
    let requests = team.requests_by_speed(&plan.rungs, &vec![team.host; team.devices.len()]);
    let mut splitter = BatchSplitter::new(
        &requests,
        team.machines(),
        team.sequences_per_step(),
        &measurements.with_rungs(&plan.rungs),
    );
    splitter.refine_baselines();
    let able = splitter.able_devices();
    if let Some(split) = splitter.split(&able) {
        splitter.refine(&split);
    }
    let splits = splits_to_compare(&splitter, &able);
    let sharded = Sharded::new(team, &plan.rungs, measurements);
    let fastest = sharded.fastest();
    let other_roles = fastest.as_ref().and_then(|candidate| sharded.with_other_roles(candidate));
    let sharded = fastest.filter(|_| plan.parallelism != Some(Parallelism::Sharded)).into_iter().chain(other_roles);
    let pipeline = Pipeline::new(team, &plan.rungs, measurements)
        .fastest()
        .filter(|_| plan.parallelism != Some(Parallelism::Pipeline));
    let candidates = splits.iter().map(|split| splitter.candidate(split, team.host)).chain(sharded).chain(pipeline);
    let seems_faster = |candidate: &TeamCandidate| {
        candidate.parallelism == Some(Parallelism::Data) && candidate.seconds < plan.predicted.step_seconds
    };
    let describe = |candidate: TeamCandidate| match seems_faster(&candidate) {
        true => describe_packed(team, &plan.rungs, &candidate),
        false => describe_bounds(team, &candidate),
    };
    let mut list: Vec<Alternative> = candidates.map(describe).collect();
    let unable = team.distinct_devices().into_iter().filter(|device| !able.contains(device));
    list.extend(unable.map(|device| describe_too_small(team, &plan.rungs, device, &measurements.recipes)));
    let planned = describe_plan(plan);
    let sequences =
        |alternative: &Alternative| alternative.shares.iter().map(|share| first_word(share)).collect::<Vec<_>>();
    let identity =
        |alternative: &Alternative| (alternative.parallelism, alternative.devices.clone(), sequences(alternative));
    list.retain(|alternative| identity(alternative) != identity(&planned));
    list.push(planned);
    list.sort_by(|a, b| b.fits.cmp(&a.fits).then(a.predicted.step_seconds.total_cmp(&b.predicted.step_seconds)));
    list
}

/// Returns each device alone, and the splits over the fastest n devices; identical devices alone count once.
fn splits_to_compare(splitter: &BatchSplitter, able: &[usize]) -> Vec<Split> {
    let mut splits: Vec<Split> = able.iter().filter_map(|&device| splitter.split(&[device])).collect();
    splits.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let by_speed: Vec<usize> = splits.iter().map(|split| split.devices[0]).collect();
    splits.dedup_by(|a, b| splitter.are_alike(a.devices[0], b.devices[0]));
    for number in 2..=by_speed.len() {
        let mut devices = by_speed[..number].to_vec();
        devices.sort_unstable();
        let split = splitter.split(&devices);
        if number == by_speed.len() {
            let sequences = split.as_ref().map(|split| &split.sequences);
            splits.extend(splitter.split_evenly(&devices).filter(|even| Some(&even.sequences) != sequences));
        }
        splits.extend(split);
    }
    splits
}

/// Fills in the memory ladder of each worker of a plan: the bytes that each rung frees, and the seconds that it adds.
/// Workers with identical devices, shares and recipes have the same ladder.
pub fn fill_ladders(team: &TeamRequest, outcome: &mut TeamOutcome) {
    let TeamOutcome { workers, plan, .. } = outcome;
    let team_link = slowest_link(workers.iter().map(|worker| team.devices[worker.device].device.team_link));
    for rank in 0..plan.team.len() {
        let worker = &workers[rank];
        plan.team[rank].ladder = match (0..rank).find(|&before| have_same_ladder(team, &workers[before], worker)) {
            Some(before) => plan.team[before].ladder.clone(),
            None => {
                let request = team.request_for(worker.device, &worker.share, worker.sequences, team.host);
                let device = &DeviceSpec { team_link, ..request.device.clone() };
                ladder(&PlanRequest { device, ..request }, &worker.outcome.plan.recipe).rungs
            }
        };
    }
}

/// Returns whether two workers have the same memory ladder, because their devices, shares and recipes are identical.
/// Always false for stages of a pipeline.
fn have_same_ladder(team: &TeamRequest, one: &PlannedWorker, other: &PlannedWorker) -> bool {
    let identity =
        |worker: &PlannedWorker| (team.first_alike(worker.device), worker.sequences, worker.share.own_state_share());
    let is_stage = one.share.parallelism == Some(Parallelism::Pipeline);
    !is_stage && identity(one) == identity(other) && one.outcome.plan.recipe == other.outcome.plan.recipe
}

fn first_word(text: &str) -> String {
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// Describes the plan itself as an entry of the list of alternatives.
fn describe_plan(plan: &Plan) -> Alternative {
    let alone = [describe_share(None, 0, None, &plan.recipe)];
    let shares = plan
        .team
        .iter()
        .map(|worker| describe_share(plan.parallelism, worker.sequences, worker.shard_1024ths, &worker.recipe));
    Alternative {
        parallelism: plan.parallelism,
        devices: plan.devices.iter().map(|device| device.name.clone()).collect(),
        shares: if plan.team.is_empty() { alone.to_vec() } else { shares.collect() },
        fits: plan.fits,
        peak_bytes: plan.devices.iter().map(|device| device.peak_bytes).collect(),
        predicted: plan.predicted,
    }
}

/// Describes a candidate, which is not packed, by the lower bounds of its bytes and by its predicted seconds.
fn describe_bounds(team: &TeamRequest, candidate: &TeamCandidate) -> Alternative {
    let spec = |device: usize| team.devices[device].device;
    let workers = || candidate.workers.iter();
    Alternative {
        parallelism: candidate.parallelism,
        devices: workers().map(|worker| spec(worker.device).name.clone()).collect(),
        shares: workers()
            .map(|worker| {
                describe_share(candidate.parallelism, worker.sequences, worker.share.own_state_share(), &worker.recipe)
            })
            .collect(),
        fits: team
            .crowded_devices(&workers().map(|worker| (worker.device, Bytes(worker.host_bytes))).collect::<Vec<_>>())
            .is_empty(),
        peak_bytes: workers().map(|worker| Bytes(worker.device_bytes) + spec(worker.device).charges).collect(),
        predicted: Predicted {
            step_seconds: candidate.seconds,
            tokens_per_second: team.tokens_per_step() / candidate.seconds,
        },
    }
}

/// Packs a candidate and describes it by its exact bytes and seconds. If a recipe does not fit after packing, describes
/// the candidate by its lower bounds.
fn describe_packed(team: &TeamRequest, rungs: &[Rung], candidate: &TeamCandidate) -> Alternative {
    let bounds = describe_bounds(team, candidate);
    let Ok(mut workers) = pack_candidate(team, rungs, candidate) else { return bounds };
    let Plan { fits, predicted, devices, .. } = team_plan::assemble(team, &mut workers);
    let peak_bytes = devices.into_iter().map(|device| device.peak_bytes).collect();
    Alternative { fits, predicted, peak_bytes, ..bounds }
}

/// Describes the share and the recipe of a device in words. The first word is the number of layers of a pipeline stage,
/// `all` for a device alone, else the number of sequences. `shard` is in 1024ths.
fn describe_share(parallelism: Option<Parallelism>, sequences: u64, shard: Option<u64>, recipe: &Recipe) -> String {
    match (parallelism, shard) {
        (None, _) => format!("all sequences, {recipe}"),
        (Some(Parallelism::Pipeline), _) => format!("{}, {recipe}", format_count(recipe.recompute.len(), "layer")),
        (Some(_), None) => format!("{}, {recipe}", format_count(sequences, "sequence")),
        (Some(_), Some(parts)) => {
            format!("{}, a shard of {parts}/1024, {recipe}", format_count(sequences, "sequence"))
        }
    }
}

/// Describes a device that cannot hold the model, with its smallest recipe.
fn describe_too_small(
    team: &TeamRequest,
    rungs: &[Rung],
    device: usize,
    measurements: &Arc<RecipeMeasurements>,
) -> Alternative {
    let request =
        with_lossy(&team.request_for(device, &Share::SINGLE_DEVICE, team.sequences_per_step(), team.host), rungs);
    let smallest = smallest_recipe(&request, &[], measurements);
    Alternative {
        parallelism: None,
        devices: vec![request.device.name.clone()],
        shares: vec![format!("all sequences, {}", smallest.recipe)],
        fits: false,
        peak_bytes: vec![Bytes(smallest.bytes.device) + request.device.charges],
        predicted: Predicted {
            step_seconds: smallest.step_seconds,
            tokens_per_second: team.tokens_per_step() / smallest.step_seconds,
        },
    }
}
