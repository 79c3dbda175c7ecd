//! The demand of a run: the least memory on a device that leaves the run fast, and the time that it takes. `plimsoll
//! sweep` packs runs by it. It is measured in a process of its own with model and data open, because the charges of a
//! process can only be measured there.

use super::prepare::{PreparedRun, prepare};
use crate::config::{DpoLoss, DpoSection, GrpoSection, Length, RunConfig};
use crate::data::{BatchSampler, RowOrder};
use crate::resolve::RunRequest;
use crate::resolve::charges::CHARGE_GRANULARITY;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure, RunDemand};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::{LeastMemoryPlan, least_memory_plan};
use plimsoll_program::{ProgramKind, ProgramSet};
use std::time::Instant;

/// Largest slowdown that less memory may cause, as a fraction of the fastest step time.
const MAX_SLOWDOWN: f64 = 0.02;

/// Plans a run for the one device that it names, and returns the memory and time that the run needs. The memory is the
/// least under which a step takes at most 2 % longer than under the fastest plan. Preparation time is measured from
/// `start`, when the command began.
///
/// # Errors
/// The run file, the model or the data are invalid.
pub fn demand(run: RunRequest, start: Instant) -> Result<RunDemand, Failure> {
    let PreparedRun { run, resolved, train, eval, planned, .. } = prepare(run, None)?;
    let prepare_seconds = start.elapsed().as_secs_f64();
    let mut assignment = planned.assignments.into_iter().next().expect("a run has at least one device");
    if assignment.device.kind != DeviceKind::Cuda {
        // The process that trains may be charged one granule more, and must fit into the same memory.
        assignment.device.charges += CHARGE_GRANULARITY;
    }
    let request = assignment.plan_request(&run, &resolved.model)?;
    let LeastMemoryPlan { mut outcome, mut fastest_step_seconds } = least_memory_plan(&request, MAX_SLOWDOWN);
    let mut bytes = outcome.plan.devices[0].peak_bytes;
    if !outcome.plan.fits && assignment.outcome.plan.fits {
        // It fits with the measured charges only, so it needs the whole load line.
        outcome = assignment.outcome.clone();
        (bytes, fastest_step_seconds) = (assignment.device.budget, outcome.plan.predicted.step_seconds);
    }
    let plan = &outcome.plan;
    if let Some(least) = plan.needs.first().filter(|_| !plan.fits) {
        bytes = least.budget_bytes;
    }
    let DeviceSpec { rates, team_link, .. } = request.device;
    let prices = Prices { rates, host: &request.host, team_link: *team_link, precision: outcome.precision };
    let seconds = |kind: ProgramKind| program_seconds(&prices, &outcome.set, kind);
    let micro_batches = eval.as_ref().map_or(0, |eval| eval.rows().div_ceil(u64::from(plan.recipe.micro_batch)));
    Ok(RunDemand {
        fits: plan.fits,
        bytes,
        host_bytes: plan.host.arena_bytes,
        rungs: plan.rungs.clone(),
        rows: train.rows(),
        step_seconds: plan.predicted.step_seconds,
        fastest_step_seconds,
        evaluate_seconds: micro_batches as f64 * (seconds(ProgramKind::Evaluate) + seconds(ProgramKind::Score)),
        checkpoint_seconds: seconds(ProgramKind::Checkpoint),
        files_seconds: seconds(ProgramKind::Load) + seconds(ProgramKind::InitOptimizer) + seconds(ProgramKind::Save),
        prepare_seconds,
    })
}

/// Returns the predicted seconds of one run of the Program `kind`; 0 if `set` has no Program of this kind.
fn program_seconds(prices: &Prices, set: &ProgramSet, kind: ProgramKind) -> f64 {
    set.program(kind).map_or(0.0, |program| prices.program_seconds(set, program, true))
}

/// Predicted seconds of a run, in two parts. Other runs that share the device lengthen only the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunSeconds {
    /// Seconds of work on the device if the run has the device to itself.
    pub work: f64,
    /// Seconds that other runs on the device do not lengthen, such as opening model and data.
    pub fixed: f64,
}

/// Returns the predicted remaining seconds of a run that has finished `done` steps. A step takes `step_seconds` if the
/// run has the device to itself. For a run with a length in hours, ignores `done` and returns its whole length.
pub fn run_seconds(run: &RunConfig, demand: &RunDemand, step_seconds: f64, done: u64) -> RunSeconds {
    let order = RowOrder { seed: 0, rows: demand.rows, shuffle: false };
    let end = |epochs: f64| Some(order.rows_of_epochs(epochs).max(1).next_multiple_of(run.rows_per_group()));
    let steps = match run.length() {
        Some(Length::Steps(steps)) => steps,
        Some(Length::Epochs(epochs)) => {
            let (rows, steps_per_batch) = (run.batch_rows(), run.steps_per_batch());
            BatchSampler { order, rows, row_limit: end(epochs), steps_per_batch }.steps().unwrap_or(0)
        }
        Some(Length::Hours(hours)) => {
            return RunSeconds { work: 0.0, fixed: hours * 3600.0 + demand.prepare_seconds };
        }
        None => 0,
    };
    let left = steps.saturating_sub(done);
    // Every run evaluates and saves once at its end.
    let times = |every: u64| 1 + left.saturating_sub(1).checked_div(every).unwrap_or(0);
    let work = left as f64 * step_seconds
        + times(run.train.eval_every) as f64 * demand.evaluate_seconds
        + times(run.train.save_every) as f64 * demand.checkpoint_seconds
        + demand.files_seconds;
    RunSeconds { work, fixed: demand.prepare_seconds }
}

/// Returns a key that is equal for runs that need the same memory and seconds per step. The key is the text of the run
/// file, with default values for settings that change neither, such as learning rates, seeds and lengths.
pub fn demand_key(run: &RunConfig) -> String {
    let mut key = run.clone();
    let defaults = RunConfig::default().train;
    let train = &mut key.train;
    (train.steps, train.epochs, train.hours) = (None, None, None);
    (train.learning_rate, train.schedule, train.warmup_steps) =
        (defaults.learning_rate, defaults.schedule, defaults.warmup_steps);
    (train.weight_decay, train.eps, train.clip_norm) = (defaults.weight_decay, defaults.eps, defaults.clip_norm);
    (train.seed, train.eval_every, train.save_every) = (defaults.seed, defaults.eval_every, defaults.save_every);
    (train.save_every_minutes, train.keep) = (defaults.save_every_minutes, defaults.keep);
    let objective = &mut key.dpo;
    (objective.beta, objective.label_smoothing) = (DpoSection::default().beta, 0.0);
    objective.loss_type = DpoLoss::default();
    let grpo = &run.grpo;
    key.grpo = GrpoSection {
        num_generations: grpo.num_generations,
        prompts_per_step: grpo.prompts_per_step,
        max_prompt_length: grpo.max_prompt_length,
        max_completion_length: grpo.max_completion_length,
        num_iterations: grpo.num_iterations,
        // Above 0, each step begins with a score.
        beta: f64::from(u8::from(grpo.beta > 0.0)),
        ..GrpoSection::default()
    };
    key.run.dir = String::new();
    key.to_toml()
}

/// Bytes by which `plimsoll sweep` raises the load line of a run that did not fit under its predicted load line.
pub const DEMAND_INCREMENT: Bytes = Bytes(2 * CHARGE_GRANULARITY.0);

#[cfg(test)]
mod tests {
    use super::*;

    fn run(settings: &[&str]) -> RunConfig {
        let model = "model.preset=smollm2-135m";
        let settings: Vec<String> = [&[model], settings].concat().into_iter().map(str::to_owned).collect();
        RunConfig::parse("run.toml", "", &settings).unwrap()
    }

    const DEMAND: RunDemand = RunDemand {
        fits: true,
        bytes: Bytes::mib(20),
        host_bytes: Bytes::ZERO,
        rungs: vec![],
        rows: 10,
        step_seconds: 1.0,
        fastest_step_seconds: 0.5,
        evaluate_seconds: 100.0,
        checkpoint_seconds: 1000.0,
        files_seconds: 1e4,
        prepare_seconds: 7.0,
    };

    #[test]
    fn run_seconds_count_steps_evaluations_checkpoints_and_files() {
        let with = |settings: &[&str], done| {
            let seconds = run_seconds(&run(settings), &DEMAND, DEMAND.step_seconds, done);
            assert_eq!(seconds.fixed, 7.0);
            seconds.work
        };
        assert_eq!(with(&["train.steps=20"], 0), 11_120.0);
        assert_eq!(with(&["train.steps=20"], 15), 11_105.0);
        assert_eq!(with(&["train.steps=20", "train.eval_every=5", "train.save_every=10"], 0), 12_420.0);
        // Ten rows, two per step.
        let epochs = ["train.epochs=3", "data.sequence=4", "train.batch_tokens=8"];
        assert_eq!(with(&epochs, 0), 11_115.0);
        let hours = run_seconds(&run(&["train.hours=0.5"]), &DEMAND, 1.0, 0);
        assert_eq!(hours, RunSeconds { work: 0.0, fixed: 1807.0 });
    }

    #[test]
    fn demand_key_ignores_rates_seeds_and_lengths() {
        let key = |setting: &str| demand_key(&run(&["train.steps=3", setting]));
        assert_eq!(key("train.learning_rate=1e-3"), key("train.seed=2"));
        assert_eq!(key("train.steps=9"), key("run.dir=another"));
        assert_eq!(key("dpo.beta=0.5"), key("dpo.loss_type=ipo"));
        assert_eq!(key("grpo.epsilon=0.5"), key("grpo.rewards=[\"numeric\"]"));
        assert_ne!(key("grpo.epsilon=0.5"), key("grpo.num_generations=4"));
        for other in ["train.batch_tokens=1024", "train.method=lora", "memory.allow=bf16", "recipe.micro_batch=2"] {
            assert_ne!(key(other), key("train.seed=2"), "{other}");
        }
    }
}
