//! What a run needs of a device: found out in a process like the one that it will be trained in, with model and data
//! open, because what a process holds beside its arena can only be measured there. `plimsoll sweep` packs by it.

use crate::config::{Length, RunFile};
use crate::data::{Batches, Order};
use crate::planning::charges::ROUNDING_BYTES;
use crate::planning::prepare::{Prepared, prepare};
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure, RunDemand};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::lean;
use std::time::Instant;

/// A worker is given as little memory as makes it no slower than this: 2 %.
const SLOWER: f64 = 0.02;

/// Plans a run for the one device that its file names, with as little memory as leaves it fast. `began` is when it was asked
/// to: reaching the device counts.
///
/// # Errors
/// What is wrong with the run file, the model or the data.
pub fn demand(run: RunFile, began: Instant) -> Result<RunDemand, Failure> {
    let Prepared { run, resolved, train, eval, planned, .. } = prepare(run, None)?;
    let prepare_seconds = began.elapsed().as_secs_f64();
    let mut part = planned.parts.into_iter().next().expect("a run is done by somebody");
    if part.device.kind != DeviceKind::Cuda {
        // The next process may be charged a step more, and has to find the same room.
        part.device.charges += ROUNDING_BYTES;
    }
    let question = part.question(&run, &resolved.model)?;
    let (mut answer, mut fastest_step_seconds) = lean(&question, SLOWER);
    let mut bytes = answer.plan.devices[0].peak_bytes;
    if !answer.plan.fits && part.answer.plan.fits {
        // It fits with what this process is charged with: then it has the device to itself.
        answer = part.answer.clone();
        (bytes, fastest_step_seconds) = (part.device.budget, answer.plan.predicted.step_seconds);
    }
    let plan = &answer.plan;
    if let Some(least) = plan.needs.first().filter(|_| !plan.fits) {
        bytes = least.budget_bytes;
    }
    let DeviceSpec { rates, team_link, .. } = question.device;
    let prices = Prices { rates, host: &question.host, team_link: *team_link, precision: answer.precision };
    let seconds =
        |name: &str| answer.set.program(name).map_or(0.0, |program| prices.program_seconds(&answer.set, program, true));
    let times = eval.as_ref().map_or(0, |eval| eval.rows().div_ceil(u64::from(plan.recipe.micro_batch)));
    Ok(RunDemand {
        fits: plan.fits,
        bytes,
        host_bytes: plan.host.arena_bytes,
        rungs: plan.rungs.clone(),
        rows: train.rows(),
        step_seconds: plan.predicted.step_seconds,
        fastest_step_seconds,
        evaluate_seconds: times as f64 * seconds("evaluate"),
        checkpoint_seconds: seconds("checkpoint"),
        files_seconds: seconds("load") + seconds("fresh") + seconds("save"),
        prepare_seconds,
    })
}

/// Predicted seconds of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunSeconds {
    /// Of its device, all of whose time it has.
    pub work: f64,
    /// That take as long however much of the device it has.
    pub fixed: f64,
}

/// How long a run takes that has done so many steps, each step taking `step_seconds` of the device. A run whose length
/// is written in hours takes these, whatever its part of the device is.
pub fn run_seconds(run: &RunFile, demand: &RunDemand, step_seconds: f64, done: u64) -> RunSeconds {
    let order = Order { seed: 0, rows: demand.rows, shuffle: false };
    let end = |epochs: f64| Some(order.rows_of_epochs(epochs).max(1));
    let steps = match run.length() {
        Some(Length::Steps(steps)) => steps,
        Some(Length::Epochs(epochs)) => {
            Batches { order, rows: run.batch_sequences(), end: end(epochs) }.steps().unwrap_or(0)
        }
        Some(Length::Hours(hours)) => {
            return RunSeconds { work: 0.0, fixed: hours * 3600.0 + demand.prepare_seconds };
        }
        None => 0,
    };
    let left = steps.saturating_sub(done);
    // The last one is done at the end, where all runs do one.
    let times = |every: u64| 1 + left.saturating_sub(1).checked_div(every).unwrap_or(0);
    let work = left as f64 * step_seconds
        + times(run.train.eval_every) as f64 * demand.evaluate_seconds
        + times(run.train.save_every) as f64 * demand.checkpoint_seconds
        + demand.files_seconds;
    RunSeconds { work, fixed: demand.prepare_seconds }
}

/// What a sweep of other rates, seeds and lengths does not change: runs that agree in it need the same of a device.
pub fn same_demand(run: &RunFile) -> String {
    let mut same = run.clone();
    let defaults = RunFile::default().train;
    let train = &mut same.train;
    (train.steps, train.epochs, train.hours) = (None, None, None);
    (train.learning_rate, train.schedule, train.warmup_steps) =
        (defaults.learning_rate, defaults.schedule, defaults.warmup_steps);
    (train.weight_decay, train.eps, train.clip_norm) = (defaults.weight_decay, defaults.eps, defaults.clip_norm);
    (train.seed, train.eval_every, train.save_every) = (defaults.seed, defaults.eval_every, defaults.save_every);
    (train.save_every_minutes, train.keep) = (defaults.save_every_minutes, defaults.keep);
    same.run.dir = String::new();
    same.to_toml()
}

/// What a demand asks for, in a line's bytes more: of a run that turned out not to fit under what it was given.
pub const MORE_BYTES: Bytes = Bytes(2 * ROUNDING_BYTES.0);

#[cfg(test)]
mod tests {
    use super::*;

    fn run(settings: &[&str]) -> RunFile {
        let model = "model.preset=smollm2-135m";
        let settings: Vec<String> = [&[model], settings].concat().into_iter().map(str::to_owned).collect();
        RunFile::parse("run.toml", "", &settings).unwrap()
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
    fn a_run_takes_its_steps_its_evaluations_its_checkpoints_and_its_files() {
        let with = |settings: &[&str], done| {
            let seconds = run_seconds(&run(settings), &DEMAND, DEMAND.step_seconds, done);
            assert_eq!(seconds.fixed, 7.0);
            seconds.work
        };
        assert_eq!(with(&["train.steps=20"], 0), 11_120.0);
        assert_eq!(with(&["train.steps=20"], 15), 11_105.0);
        assert_eq!(with(&["train.steps=20", "train.eval_every=5", "train.save_every=10"], 0), 12_420.0);
        // Ten rows, two a step.
        let epochs = ["train.epochs=3", "data.sequence=4", "train.batch_tokens=8"];
        assert_eq!(with(&epochs, 0), 11_115.0);
        let hours = run_seconds(&run(&["train.hours=0.5"]), &DEMAND, 1.0, 0);
        assert_eq!(hours, RunSeconds { work: 0.0, fixed: 1807.0 });
    }

    #[test]
    fn runs_of_other_rates_and_seeds_need_the_same_and_those_of_another_batch_do_not() {
        let of = |setting: &str| same_demand(&run(&["train.steps=3", setting]));
        assert_eq!(of("train.learning_rate=1e-3"), of("train.seed=2"));
        assert_eq!(of("train.steps=9"), of("run.dir=elsewhere"));
        for other in ["train.batch_tokens=1024", "train.method=lora", "memory.allow=bf16", "recipe.micro_batch=2"] {
            assert_ne!(of(other), of("train.seed=2"), "{other}");
        }
    }
}
