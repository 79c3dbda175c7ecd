//! The evaluator: an excluded device that runs the evaluations while the team goes on with training.
//!
//! It holds weights and the activations of an evaluation on its device, nothing on the host, and gets the trained
//! weights before each evaluation. A device becomes the evaluator only where that saves time.

use super::team_plan::prices;
use super::{EvaluationSchedule, PlannedWorker, TeamOutcome, TeamRequest, slowest_link};
use crate::search::{PlanOutcome, PlanRequest, has_fitting_recipe, plan_recipe, with_lossy};
use plimsoll_core::{
    Bytes, EvaluatorPlan, FileSpec, HostSpec, Link, Offload, Parallelism, Recipe, RecomputeLevel, Rung, Space,
};
use plimsoll_program::models::decoder::{Method, Scores, WeightSource};
use plimsoll_program::{Block, Op, OpKind, ProgramKind, ProgramSet, Share};

/// Number of rows that an evaluation is taken to have if the data have not been read.
const LONG_EVALUATION_ROWS: u64 = 1 << 16;

/// Derives the request of an evaluator from that of a training run: one device, no optimizer, no offload and no further
/// lossy rungs. The weights come from the devices that train.
#[must_use]
pub fn evaluation_request<'a>(request: &PlanRequest<'a>) -> PlanRequest<'a> {
    let mut request = request.clone();
    request.lossy.lora.source = WeightSource::LiveRun;
    match &mut request.lossy.method {
        Method::Full => request.source = WeightSource::LiveRun,
        Method::Lora(lora) => lora.source = WeightSource::LiveRun,
    }
    request.pins.offload = Some(Offload::NOTHING);
    request.host = HostSpec { budget: Bytes::ZERO, file: FileSpec::NONE, ..request.host };
    (request.lossy.allow, request.lossy.offer) = (vec![], vec![]);
    PlanRequest {
        optimizer: None,
        evaluate: true,
        scores: Scores::None,
        generation: None,
        share: Share::SINGLE_DEVICE,
        ..request
    }
}

/// Makes the fastest excluded device the evaluator, if one saves time.
pub(super) fn add_evaluator(team: &TeamRequest, mut outcome: TeamOutcome) -> TeamOutcome {
    let Some(evaluations) = team.evaluations.filter(|_| outcome.plan.fits) else { return outcome };
    let takes_part = |device: &usize| outcome.workers.iter().any(|worker| worker.device == *device);
    let mut others: Vec<usize> = (0..team.devices.len()).filter(|device| !takes_part(device)).collect();
    others.dedup_by_key(|device| team.first_alike(*device));
    let planned = others.into_iter().filter_map(|device| plan_evaluator(team, &outcome, device, evaluations));
    let fastest = planned.min_by(|(_, one), (_, other)| one.seconds.total_cmp(&other.seconds));
    if let Some((worker, evaluator_plan)) = fastest {
        let mut excluded = outcome.plan.excluded.iter_mut();
        if let Some(device) = excluded.find(|device| device.device_index == worker.device) {
            (device.evaluator_plan, outcome.evaluator) = (Some(evaluator_plan), Some(worker));
        }
    }
    outcome
}

/// Plans one device as the evaluator of a team; `None` if the device cannot hold the weights, or saves no time.
fn plan_evaluator(
    team: &TeamRequest,
    outcome: &TeamOutcome,
    device: usize,
    evaluations: EvaluationSchedule,
) -> Option<(PlannedWorker, EvaluatorPlan)> {
    let TeamOutcome { workers, plan, .. } = outcome;
    let request = evaluation_request(&with_lossy(&team.devices[device], &plan.rungs));
    let own = plan_evaluation_recipe(&request, workers, &plan.rungs)?;
    let link = slowest_link(workers.iter().map(|worker| team.devices[worker.device].device.team_link));
    let team_seconds =
        |worker: &PlannedWorker, program| program_seconds(&team.devices[worker.device], &worker.outcome, program, link);
    let own_seconds = |program| program_seconds(&request, &own, program, Link::MEMORY);
    // The stages of a pipeline evaluate the same rows together, and each of them saves its own weights.
    let is_pipeline = plan.parallelism == Some(Parallelism::Pipeline);
    let (groups, savers) = if is_pipeline { (1, workers.len()) } else { (workers.len(), 1) };
    let micro_batches = |worker: &PlannedWorker| evaluation_micro_batches(workers, worker, evaluations.rows);
    let passes_per_micro_batch =
        |worker: &PlannedWorker| worker.outcome.plan.recipe.micro_batch.div_ceil(own.plan.recipe.micro_batch);
    // Between two machines the weights cross the slower of their links.
    let between = slowest_link([link, team.devices[device].device.team_link].into_iter());
    let link_seconds =
        between.latency_seconds + bytes_read(&own, ProgramKind::ReloadWeights) / between.bytes_per_second;
    let save_seconds: f64 = workers[..savers].iter().map(|worker| team_seconds(worker, ProgramKind::Save)).sum();
    let evaluator_plan = EvaluatorPlan {
        recipe: own.plan.recipe.clone(),
        device: own.plan.devices[0].clone(),
        rows: evaluations.rows,
        seconds: workers[..groups]
            .iter()
            .map(|worker| {
                micro_batches(worker) * f64::from(passes_per_micro_batch(worker)) * own_seconds(ProgramKind::Evaluate)
            })
            .sum(),
        team_seconds: workers
            .iter()
            .map(|worker| micro_batches(worker) * team_seconds(worker, ProgramKind::Evaluate))
            .fold(0.0, f64::max),
        // Pieces are transferred one after the other.
        weight_transfer_seconds: save_seconds + link_seconds + own_seconds(ProgramKind::ReloadWeights),
    };
    let seconds_between = evaluations.every as f64 * plan.predicted.step_seconds;
    let saves_time = match evaluations.rows {
        Some(_) => evaluator_plan.saved_seconds(seconds_between) > 0.0,
        // With an unknown number of rows: whether there is a number with which it saves time.
        None => {
            let most_rows = seconds_between / evaluator_plan.seconds;
            evaluator_plan.seconds < evaluator_plan.team_seconds
                || most_rows * evaluator_plan.team_seconds > evaluator_plan.weight_transfer_seconds
        }
    };
    let sequences = u64::from(own.plan.recipe.micro_batch);
    saves_time
        .then_some((PlannedWorker { device, share: Share::SINGLE_DEVICE, sequences, outcome: own }, evaluator_plan))
}

/// Plans an evaluation on a device. The micro-batch is the largest of the team, which gives the same bits as an
/// evaluation by the team. If that does not fit, it is halved until it does. Returns `None` if no micro-batch fits.
fn plan_evaluation_recipe(request: &PlanRequest, workers: &[PlannedWorker], rungs: &[Rung]) -> Option<PlanOutcome> {
    let most = workers.iter().map(|worker| worker.outcome.plan.recipe.micro_batch).max()?;
    if !has_fitting_recipe(&PlanRequest { sequences: u64::from(most), ..request.clone() }) {
        return None;
    }
    let halves = std::iter::successors(Some(most), |rows| (*rows > 1).then(|| rows.div_ceil(2)));
    let mut outcomes = halves.map(|micro_batch| {
        let request = PlanRequest { sequences: u64::from(micro_batch), ..request.clone() };
        let recompute = vec![RecomputeLevel::Nothing; request.config.layers as usize];
        plan_recipe(&request, &Recipe { micro_batch, recompute, offload: Offload::NOTHING, rungs: rungs.to_vec() })
    });
    outcomes.find(|outcome| outcome.plan.fits)
}

/// Returns the number of micro-batches that a worker computes in an evaluation of `rows` rows. If `rows` is `None`,
/// returns the number per row of a long evaluation.
fn evaluation_micro_batches(workers: &[PlannedWorker], worker: &PlannedWorker, rows: Option<u64>) -> f64 {
    let total_sequences: u64 = workers.iter().map(|worker| worker.sequences).sum();
    let all_rows = rows.unwrap_or(LONG_EVALUATION_ROWS);
    let own_rows = match worker.share.parallelism {
        Some(Parallelism::Pipeline) => all_rows,
        _ => (u128::from(all_rows) * u128::from(worker.sequences)).div_ceil(u128::from(total_sequences)) as u64,
    };
    let micro_batches = worker.outcome.plan.recipe.micro_batches(own_rows) as f64;
    if rows.is_some() { micro_batches } else { micro_batches / all_rows as f64 }
}

/// Returns the bytes that a Program reads from files; 0 if the outcome has no such Program.
fn bytes_read(outcome: &PlanOutcome, program: ProgramKind) -> f64 {
    let bytes_of_op = |op: &Op| bytes_read_by(&outcome.set, op);
    let bytes_of_block = |block: &Block| f64::from(block.repeat) * block.ops.iter().map(bytes_of_op).sum::<f64>();
    outcome.set.program(program).map_or(0.0, |program| program.blocks.iter().map(bytes_of_block).sum())
}

/// Returns the bytes that an operation reads from a file.
fn bytes_read_by(set: &ProgramSet, op: &Op) -> f64 {
    match &op.kind {
        OpKind::TransferStart { from, elements, .. } if set.tensor(from.tensor).space == Space::File => {
            (elements * set.tensor(from.tensor).dtype.bytes()) as f64
        }
        _ => 0.0,
    }
}

/// Predicts the seconds of one run of a Program on the device of `request`, with `team_link` between the workers.
/// Returns 0 if the outcome has no such Program.
fn program_seconds(request: &PlanRequest, outcome: &PlanOutcome, program: ProgramKind, team_link: Link) -> f64 {
    let prices = prices(request, outcome, team_link);
    outcome.set.program(program).map_or(0.0, |program| prices.program_seconds(&outcome.set, program, true))
}
