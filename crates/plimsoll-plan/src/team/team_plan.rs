//! The plan of a team, put together from the plans of its workers.

use super::hosts::Machine;
use super::pipeline::step_seconds;
use super::stage::StageSeconds;
use super::{PlannedWorker, TeamRequest, slowest_link};
use crate::price::{Prices, Rank, StepPhases, data_parallel_seconds};
use crate::search::{PlanOutcome, PlanRequest, checkpoint_bytes};
use plimsoll_core::{
    Bytes, Class, DevicePlan, Link, MachineHost, Parallelism, Plan, Predicted, PredictedGeneration, WorkerPlan,
};

/// A link that takes no time.
const INSTANT_LINK: Link = Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 };

/// The predicted time of a worker in a step.
#[derive(Clone, Copy)]
struct WorkerSeconds {
    /// Seconds that the step takes the worker without others to wait for: computation, copies, work of the host
    /// and, in a data parallel team, the all-reduce of the loss.
    busy: f64,
    /// Seconds in which the worker waits for others, and for collectives.
    waiting: f64,
}

/// Puts the plan of a team together. The plan fits if each worker fits on its device, and all together fit on the host.
/// In the plan of each worker, the function sets the worker's portion of the host and its predicted time in the team.
pub(super) fn assemble(team: &TeamRequest, workers: &mut [PlannedWorker]) -> Plan {
    let fits_on_hosts = divide_hosts(team, workers);
    let link = slowest_link(workers.iter().map(|worker| team.devices[worker.device].device.team_link));
    let seconds = worker_seconds(team, workers, link);
    let seconds_without_link = step_seconds_of(&worker_seconds(team, workers, INSTANT_LINK));
    for (worker, seconds) in workers.iter_mut().zip(&seconds) {
        let request = &team.devices[worker.device];
        let step_seconds = seconds.busy + seconds.waiting;
        let tokens = (worker.sequences * request.sequence) as f64;
        worker.outcome.plan.predicted = Predicted { step_seconds, tokens_per_second: tokens / step_seconds };
    }
    let (first, parallelism) = (&workers[0].outcome.plan, workers[0].share.parallelism);
    let is_team = parallelism.is_some();
    let step_seconds = step_seconds_of(&seconds);
    let machine_hosts = machine_hosts(team, workers);
    let worker_plan = |(worker, seconds): (&PlannedWorker, &WorkerSeconds)| {
        worker_plan(team, worker, seconds.busy, step_seconds - seconds.busy)
    };
    Plan {
        fits: fits_on_hosts && workers.iter().all(|worker| worker.outcome.plan.fits),
        class: if is_team { first.class.max(Class::Reordered) } else { first.class },
        devices: workers.iter().map(|worker| worker.outcome.plan.devices[0].clone()).collect(),
        parallelism,
        team: if is_team { workers.iter().zip(&seconds).map(worker_plan).collect() } else { vec![] },
        link_seconds: is_team.then_some((step_seconds - seconds_without_link).max(0.0)),
        // Each stage of a pipeline saves its own weights.
        checkpoint_bytes: match parallelism {
            Some(Parallelism::Pipeline) => checkpoint_bytes(workers.iter().map(|worker| &worker.outcome.set)),
            _ => first.checkpoint_bytes,
        },
        host: host_plan(team, workers, &machine_hosts),
        machine_hosts,
        predicted: Predicted { step_seconds, tokens_per_second: team.tokens_per_step() / step_seconds },
        generation: predict_generation(parallelism, workers),
        smallest: None,
        ..first.clone()
    }
}

/// Predicts the speed of generation by a team. Data parallel workers each generate a part, by their shares of a step, so the
/// one that ends last sets the pace. Other workers generate the same sequences together: pipeline stages one after another,
/// sharded workers at the pace of the slowest.
fn predict_generation(parallelism: Option<Parallelism>, workers: &[PlannedWorker]) -> Option<PredictedGeneration> {
    let all = workers.iter().map(|worker| worker.outcome.plan.generation).collect::<Option<Vec<_>>>()?;
    let seconds = all.iter().map(|one| one.token_seconds);
    let slowest = seconds.clone().fold(0.0, f64::max);
    let sequences = all.first()?.sequences;
    Some(match parallelism {
        Some(Parallelism::Data) => {
            let step: u64 = workers.iter().map(|worker| worker.sequences).sum();
            let share = |worker: &PlannedWorker| worker.sequences as f64 / step.max(1) as f64;
            let seconds =
                workers.iter().zip(&all).map(|(worker, one)| share(worker) * one.token_seconds / one.sequences as f64);
            let sequences = all.iter().map(|one| one.sequences).sum();
            PredictedGeneration { sequences, token_seconds: sequences as f64 * seconds.fold(0.0, f64::max) }
        }
        Some(Parallelism::Pipeline) => PredictedGeneration { sequences, token_seconds: seconds.sum() },
        Some(Parallelism::Sharded) | None => PredictedGeneration { sequences, token_seconds: slowest },
    })
}

/// Returns the entry of a worker in the plan of its team.
fn worker_plan(team: &TeamRequest, worker: &PlannedWorker, busy_seconds: f64, idle_seconds: f64) -> WorkerPlan {
    let request = &team.devices[worker.device];
    let own_layers = worker.share.own_layers(request.config.layers);
    let is_stage = worker.share.parallelism == Some(Parallelism::Pipeline);
    WorkerPlan {
        device: request.device.name.clone(),
        recipe: worker.outcome.plan.recipe.clone(),
        sequences: worker.sequences,
        layers: is_stage.then_some([own_layers.start, own_layers.end]),
        shard_1024ths: worker.share.own_state_share(),
        reason: None,
        algorithms: None,
        busy_seconds,
        idle_seconds,
        ladder: vec![],
    }
}

/// Sets the host budget of each worker that has one: its arena, and an equal part of the free memory of its host for each
/// worker there. Returns whether the host arenas of all workers fit on the hosts together.
fn divide_hosts(team: &TeamRequest, workers: &mut [PlannedWorker]) -> bool {
    for machine in team.machines() {
        let is_here = |worker: &PlannedWorker| machine.devices.contains(&worker.device);
        let here = || workers.iter().filter(|worker| is_here(worker));
        let used: Bytes = here().map(|worker| worker.outcome.plan.host.arena_bytes).sum();
        let free_each = machine.host.saturating_sub(used).0 / (here().count() as u64).max(1);
        for worker in workers.iter_mut().filter(|worker| is_here(worker)) {
            let host = &mut worker.outcome.plan.host;
            if host.budget_bytes > Bytes::ZERO {
                host.budget_bytes = host.arena_bytes + Bytes(free_each);
            }
        }
    }
    let used = workers.iter().map(|worker| (worker.device, worker.outcome.plan.host.arena_bytes));
    team.crowded_devices(&used.collect::<Vec<_>>()).is_empty()
}

/// Predicts the busy and waiting seconds of each worker in a step, with `team_link` between the workers.
fn worker_seconds(team: &TeamRequest, workers: &[PlannedWorker], team_link: Link) -> Vec<WorkerSeconds> {
    match workers[0].share.parallelism {
        Some(Parallelism::Pipeline) => pipeline_seconds(team, workers, team_link),
        Some(Parallelism::Sharded) => sharded_seconds(team, workers, team_link),
        _ => all_reduce_seconds(team, workers, team_link),
    }
}

/// Predicts the time of each worker of a sharded team in a step. All gather each layer from all shards, so none begins
/// its passes before the slowest has updated its shard, and the slowest passes delay every update.
fn sharded_seconds(team: &TeamRequest, workers: &[PlannedWorker], team_link: Link) -> Vec<WorkerSeconds> {
    let phases = |worker: &PlannedWorker, link: Link| {
        let prices = prices(&team.devices[worker.device], &worker.outcome, link);
        prices.step_phases(&worker.outcome.set, micro_batches(worker), true)
    };
    let own: Vec<StepPhases> = workers.iter().map(|worker| phases(worker, team_link)).collect();
    let slowest = |phase: fn(&StepPhases) -> f64| own.iter().map(phase).fold(0.0, f64::max);
    let step = slowest(|own| own.passes) + slowest(|own| own.update);
    let busy = |worker: &PlannedWorker| {
        let StepPhases { passes, update } = phases(worker, INSTANT_LINK);
        passes + update
    };
    let seconds = |busy: f64| WorkerSeconds { busy, waiting: (step - busy).max(0.0) };
    workers.iter().map(|worker| seconds(busy(worker))).collect()
}

/// Returns the number of micro-batches that a worker computes in a step.
fn micro_batches(worker: &PlannedWorker) -> u32 {
    worker.share.micro_batches_of(worker.sequences, worker.outcome.plan.recipe.micro_batch) as u32
}

/// Returns the seconds of a step: the most that any worker takes, with waiting.
fn step_seconds_of(workers: &[WorkerSeconds]) -> f64 {
    workers.iter().map(|seconds| seconds.busy + seconds.waiting).fold(0.0, f64::max)
}

/// Predicts the time of each stage of a pipeline in a step.
fn pipeline_seconds(team: &TeamRequest, workers: &[PlannedWorker], team_link: Link) -> Vec<WorkerSeconds> {
    let stage = |worker: &PlannedWorker| {
        StageSeconds::of(&worker.outcome.set, &prices(&team.devices[worker.device], &worker.outcome, team_link))
    };
    let first = &workers[0];
    let micro_batches = micro_batches(first);
    let stages: Vec<StageSeconds> = workers.iter().map(stage).collect();
    let step = step_seconds(&stages, micro_batches);
    let busy = stages.iter().map(|stage| stage.busy(micro_batches));
    busy.map(|busy| WorkerSeconds { busy, waiting: (step - busy).max(0.0) }).collect()
}

/// Predicts the time of each data parallel worker, or of one that works alone.
fn all_reduce_seconds(team: &TeamRequest, workers: &[PlannedWorker], team_link: Link) -> Vec<WorkerSeconds> {
    let ranks: Vec<Rank> = workers.iter().map(|worker| data_parallel_rank(team, worker, team_link)).collect();
    let seconds = |(rank, step): (&Rank, f64)| {
        let busy = rank.prices.step_seconds(rank.set, rank.micro_batches, false);
        WorkerSeconds { busy, waiting: (step - busy).max(0.0) }
    };
    ranks.iter().zip(data_parallel_seconds(&ranks)).map(seconds).collect()
}

/// Returns a worker with its prices, for the prediction of its time.
fn data_parallel_rank<'r>(team: &'r TeamRequest, worker: &'r PlannedWorker, team_link: Link) -> Rank<'r> {
    Rank {
        prices: prices(&team.devices[worker.device], &worker.outcome, team_link),
        set: &worker.outcome.set,
        micro_batches: micro_batches(worker),
    }
}

/// Returns the rates from which the seconds of an outcome's Programs are predicted on the device of `request`, with
/// `team_link` between the workers.
pub(super) fn prices<'r>(request: &'r PlanRequest, outcome: &PlanOutcome, team_link: Link) -> Prices<'r> {
    Prices { rates: &request.device.rates, host: &request.host, precision: outcome.precision, team_link }
}

/// Adds up the host arenas of all workers, on all machines. `machine_hosts` has the host of each, if there are several.
fn host_plan(team: &TeamRequest, workers: &[PlannedWorker], machine_hosts: &[MachineHost]) -> DevicePlan {
    let name = if machine_hosts.is_empty() { "host" } else { "hosts" };
    let mut sum = DevicePlan { name: name.into(), budget_bytes: team.host, ..DevicePlan::default() };
    for host in workers.iter().map(|worker| &worker.outcome.plan.host) {
        sum.simulated |= host.simulated;
        sum.arena_bytes += host.arena_bytes;
        sum.charges_bytes += host.charges_bytes;
        sum.peak_bytes += host.peak_bytes;
        sum.lower_bound_bytes += host.lower_bound_bytes;
        for (category, bytes) in &host.by_category {
            *sum.by_category.entry(*category).or_default() += *bytes;
        }
        for (work, bytes) in &host.by_program {
            *sum.by_program.entry(*work).or_default() += *bytes;
        }
    }
    sum
}

/// Returns the host memory of each machine; nothing if at most one machine has any.
fn machine_hosts(team: &TeamRequest, workers: &[PlannedWorker]) -> Vec<MachineHost> {
    let with_host: Vec<Machine> = team.machines().into_iter().filter(|machine| machine.host > Bytes::ZERO).collect();
    match with_host.len() {
        0 | 1 => vec![],
        _ => with_host.iter().map(|machine| machine_host(team, workers, machine)).collect(),
    }
}

/// Returns the use of one machine's host memory.
fn machine_host(team: &TeamRequest, workers: &[PlannedWorker], machine: &Machine) -> MachineHost {
    let machine_name = team.devices[machine.devices[0]].device.remote_host();
    let here = workers.iter().filter(|worker| machine.devices.contains(&worker.device));
    MachineHost {
        name: machine_name.map_or("host".to_owned(), |name| format!("{name}/host")),
        budget_bytes: machine.host,
        arena_bytes: here.map(|worker| worker.outcome.plan.host.arena_bytes).sum(),
    }
}

#[cfg(test)]
mod tests {
    use crate::search::{PinnedChoices, PlanRequest};
    use crate::team::{TeamConstraint, TeamRequest, plan_team};
    use crate::testing::{device, request};
    use plimsoll_core::{Bytes, HostSpec, Link, Offload, Parallelism};
    use plimsoll_program::models::{ModelConfig, preset};

    #[test]
    fn update_of_storage_worker_delays_the_team() {
        let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
        let devices = [(1.0, 110), (0.03, 300)].map(|(pace, mib)| device(pace, Bytes::mib(mib), Link::MEMORY));
        let train = |device| PlanRequest { evaluate: true, ..request(&config, device, 256, 3) };
        let team = TeamRequest {
            devices: devices.iter().map(train).collect(),
            host: Bytes::ZERO,
            require_all: true,
            constraint: Some(TeamConstraint::Parallelism(Parallelism::Sharded)),
            evaluations: None,
        };
        let plan = plan_team(&team).plan;
        assert!(plan.fits && plan.team[1].sequences == 0, "{:?}", plan.team);
        let [computing, storing] = [&plan.team[0], &plan.team[1]].map(|worker| worker.busy_seconds);
        let step = plan.predicted.step_seconds;
        assert!(storing > 0.2 * computing, "the update of {storing} s is too short to tell");
        assert!(
            step > 0.9 * (computing + storing),
            "{step} s for {computing} s of passes and an update of {storing} s"
        );
    }

    /// The slow device has one sequence and the fast one three, so it begins its last backward pass first. With offloaded
    /// gradients it stops after two layers, until the fast device has reached them, and computes the others at its own pace.
    #[test]
    fn ranks_with_offloaded_gradients_wait_for_each_other() {
        let config = ModelConfig { layers: 6, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
        let devices = [1.0, 0.4].map(|pace| device(pace, Bytes::gib(2), Link::MEMORY));
        let step_of_busiest = |gradients: u32| {
            let offload = Offload { optimizer: 6, gradients, ..Offload::NOTHING };
            let pins = PinnedChoices { micro_batch: Some(1), offload: Some(offload), ..PinnedChoices::default() };
            let host = HostSpec { budget: Bytes::gib(4), ..HostSpec::NONE };
            let train = |device| PlanRequest { host, pins: pins.clone(), ..request(&config, device, 256, 4) };
            let team = TeamRequest {
                devices: devices.iter().map(train).collect(),
                host: Bytes::gib(4),
                require_all: true,
                constraint: Some(TeamConstraint::Parallelism(Parallelism::Data)),
                evaluations: None,
            };
            let plan = plan_team(&team).plan;
            let sequences: Vec<u64> = plan.team.iter().map(|worker| worker.sequences).collect();
            assert_eq!((plan.fits, sequences), (true, vec![3, 1]), "{:?}", plan.team);
            let busiest = plan.team.iter().map(|worker| worker.busy_seconds).fold(0.0, f64::max);
            plan.predicted.step_seconds / busiest
        };
        // The slower device also takes longer for its update.
        let (on_device, offloaded) = (step_of_busiest(0), step_of_busiest(6));
        assert!(on_device < 1.06 && offloaded > 1.2, "{on_device} and {offloaded} times the busiest rank");
    }
}
