//! The demand of a run: the least memory on a device that leaves the run fast, and the time that it takes. `plimsoll sweep`
//! packs runs by it. It is measured in a process of its own with model and data open, because the charges of a process can
//! only be measured there.

use super::prepare::{PreparedRun, prepare};
use crate::config::{Length, RunConfig};
use crate::data::{BatchSampler, RowOrder};
use crate::resolve::RunRequest;
use crate::resolve::charges::CHARGE_GRANULARITY;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure, RunDemand};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::{LeastMemoryPlan, least_memory_plan};
use plimsoll_program::ProgramKind;
use std::time::Instant;

/// Share by which less memory may slow a run down.
const MAX_SLOWDOWN: f64 = 0.02;

/// Plans a run for the one device that it names, with the least memory that leaves it at most 2 % slower. `start` is when the
/// command started; the time to reach the device counts as preparation.
///
/// # Errors
/// An invalid run file, model or data.
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
    let seconds = |kind: ProgramKind| {
        let program = outcome.set.program(kind);
        program.map_or(0.0, |program| prices.program_seconds(&outcome.set, program, true))
    };
    let micro_batches = eval.as_ref().map_or(0, |eval| eval.rows().div_ceil(u64::from(plan.recipe.micro_batch)));
    Ok(RunDemand {
        fits: plan.fits,
        bytes,
        host_bytes: plan.host.arena_bytes,
        rungs: plan.rungs.clone(),
        rows: train.rows(),
        step_seconds: plan.predicted.step_seconds,
        fastest_step_seconds,
        evaluate_seconds: micro_batches as f64 * seconds(ProgramKind::Evaluate),
        checkpoint_seconds: seconds(ProgramKind::Checkpoint),
        files_seconds: seconds(ProgramKind::Load) + seconds(ProgramKind::InitOptimizer) + seconds(ProgramKind::Save),
        prepare_seconds,
    })
}

/// Predicted seconds of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunSeconds {
    /// Seconds of work on the device if the run has the device to itself.
    pub work: f64,
    /// Seconds that do not depend on the run's share of the device.
    pub fixed: f64,
}

/// Returns the remaining seconds of a run that has finished `done` steps, if a step takes `step_seconds` of the device. A run
/// with a length in hours takes that long, whatever its share of the device.
pub fn run_seconds(run: &RunConfig, demand: &RunDemand, step_seconds: f64, done: u64) -> RunSeconds {
    let order = RowOrder { seed: 0, rows: demand.rows, shuffle: false };
    let end = |epochs: f64| Some(order.rows_of_epochs(epochs).max(1));
    let steps = match run.length() {
        Some(Length::Steps(steps)) => steps,
        Some(Length::Epochs(epochs)) => {
            BatchSampler { order, rows: run.batch_sequences(), row_limit: end(epochs) }.steps().unwrap_or(0)
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

/// Returns a key that is equal for runs with the same demand: the run file without learning rates, seeds, lengths and other
/// settings that do not change the demand.
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
    key.run.dir = String::new();
    key.to_toml()
}

/// Bytes by which the load line of a run is raised if the run did not fit into its demand.
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
        for other in ["train.batch_tokens=1024", "train.method=lora", "memory.allow=bf16", "recipe.micro_batch=2"] {
            assert_ne!(key(other), key("train.seed=2"), "{other}");
        }
    }
}
