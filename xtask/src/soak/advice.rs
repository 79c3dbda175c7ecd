//! Recommendations of `plimsoll plan --advise` for random runs with a setting that costs speed. Each recommended command
//! is run as printed: its plan has the bytes and the speed that the recommendation states. Some of the runs are also
//! trained, before and after the change, on virtual devices far slower than the processor.

use super::case::Rng;
use super::runs::RandomRun;
use super::tally::Tally;
use super::whole_process::ModelSizes;
use crate::program::{self, ProgramOutput};
use anyhow::{Context, ensure};
use plimsoll_core::{Bytes, Exit, Plan, Recommendation, RunResult};
use std::fs;
use std::path::Path;
use std::process::Command;

/// One case in this many is not only planned, but also trained.
const TRAIN_EVERY: u64 = 4;
/// Largest difference of a measured from a predicted step, as a fraction of the prediction.
const MAX_TIME_ERROR: f64 = 0.1;
/// Least predicted speedup of a recommendation.
const MIN_SPEEDUP: f64 = 1.02;
/// Largest difference of a stated speedup from that of the two plans.
const MAX_ROUNDING: f64 = 1e-9;
/// Memory of the process that planning takes under the load line, and that no plan counts: a run whose preparation passes
/// its load line is refused.
const PLANNING_BYTES: Bytes = Bytes::mib(4);
/// Seconds after which a command counts as hanging.
const COMMAND_SECONDS_MAX: u64 = 180;
/// A shell function that runs the program of the soak.
const SHELL_FUNCTION: &str = "plimsoll() { \"$PROGRAM\" \"$@\"; }; ";

/// Returns the sizes of a random model of about half a million parameters.
fn model_sizes(rng: &mut Rng) -> ModelSizes {
    let hidden = rng.pick(&[64, 128]);
    ModelSizes { hidden, layers: rng.range(2, 5), heads: 4, kv_heads: rng.pick(&[2, 4]), ffn: 2 * hidden, vocab: 600 }
}

/// Plans a random run with `--advise` and checks each recommendation. With `trains`, one case in [`TRAIN_EVERY`] is also
/// trained.
pub fn run_advice(binary: &Path, seed: u64, number: u64, trains: bool) -> Tally {
    let mut tally = Tally::default();
    let case = AdviceCase::new(binary, seed, number);
    let result = case.and_then(|case| {
        let checked = case.check(trains && number.is_multiple_of(TRAIN_EVERY), &mut tally);
        let _ = fs::remove_dir_all(&case.run.folder);
        checked.with_context(|| case.run.label.clone())
    });
    tally.check("commands end", result.is_ok(), || format!("--seed {seed} --case {number}: {:#}", result.unwrap_err()));
    tally
}

/// A random run with settings that may cost speed.
struct AdviceCase {
    binary: std::path::PathBuf,
    run: RandomRun,
}

impl AdviceCase {
    fn new(binary: &Path, seed: u64, number: u64) -> anyhow::Result<AdviceCase> {
        let mut rng = Rng::new(seed ^ 13, number);
        let two = rng.chance(0.4);
        let mut run = RandomRun::on(binary, (seed, number), &model_sizes, &|_| "cpu".to_owned())?;
        let is_replaced = |setting: &String| {
            ["recipe.", "train.rungs", "train.save_every", "train.eval_every", "train.steps", "run.devices"]
                .iter()
                .any(|key| setting.starts_with(key))
        };
        run.settings.retain(|setting| !is_replaced(setting));
        let sequence = rng.pick(&[32, 64]);
        run.settings.extend([
            "train.steps=10".to_owned(),
            "train.save_every=0".to_owned(),
            "train.eval_every=0".to_owned(),
            format!("data.sequence={sequence}"),
            format!("train.batch_tokens={}", sequence * rng.pick(&[8, 12, 16])),
        ]);
        if rng.chance(0.5) {
            run.settings.push(format!("recipe.micro_batch={}", rng.pick(&[1, 2])));
        }
        if rng.chance(0.4) {
            run.settings.push(format!("recipe.recompute={}", rng.pick(&["block", "attention", "feed_forward"])));
        }
        if two && rng.chance(0.5) {
            run.settings.push(format!("run.parallelism={}", rng.pick(&["data", "sharded", "pipeline"])));
        }
        let case = AdviceCase { binary: binary.to_owned(), run };
        let place = rng.fraction();
        let line = case.load_line(two, place)?;
        let mut run = case.run.with(&[&devices(two, line)]);
        run.label = format!("--seed {seed} --case {number}: {:?}", run.settings);
        Ok(AdviceCase { run, ..case })
    }

    /// Returns a load line between the smallest with room for planning (`place` = 0) and that of the fastest recipe (1).
    fn load_line(&self, two: bool, place: f64) -> anyhow::Result<Bytes> {
        let peak = |line: Bytes| -> anyhow::Result<Bytes> {
            let (plan, _) = self.run.with(&[&devices(two, line)]).plan()?;
            plan.devices.iter().map(|device| device.peak_bytes).max().context("a plan has devices")
        };
        let (least, most) = (peak(Bytes::mib(8))? + PLANNING_BYTES, peak(Bytes::gib(1))?);
        Ok(least + Bytes((most.saturating_sub(least).0 as f64 * place) as u64))
    }

    /// Checks all recommendations for the run; with `trains`, also by training.
    fn check(&self, trains: bool, tally: &mut Tally) -> anyhow::Result<()> {
        let (before, _) = self.run.plan()?;
        if !before.fits {
            tally.cover("refused");
            return Ok(());
        }
        let output = program::start(
            &mut self.run.command(&["plan", "--json", "--advise"], true),
            &self.run.folder,
            COMMAND_SECONDS_MAX,
        )?;
        let advised: Plan = serde_json::from_str(&output.stdout).context("the plan with recommendations")?;
        tally.cover(if advised.recommendations.is_empty() { "no recommendation" } else { "recommendations" });
        for recommendation in &advised.recommendations {
            self.check_plan(&before, recommendation, tally)?;
        }
        let Some(first) = advised.recommendations.first().filter(|_| trains) else { return Ok(()) };
        let unchanged = self.words_of_run();
        let measured = self.train(&unchanged, "before", tally)?;
        let changed = self.train(&first.command, "after", tally)?;
        let slowdown = changed / measured - 1.0;
        tally.figure("part by which a recommended change slows a step", slowdown, slowdown <= 0.0, || {
            format!("{}: {first:?}, {measured} s before and {changed} s after", self.run.label)
        });
        Ok(())
    }

    /// Runs the command of a recommendation, and compares its plan with what the recommendation states.
    fn check_plan(&self, before: &Plan, recommendation: &Recommendation, tally: &mut Tally) -> anyhow::Result<()> {
        let output = self.shell(&recommendation.command)?;
        ensure!(output.code == Some(Exit::Done as i32), "{} ended with {:?}", recommendation.command, output.code);
        let after: Plan = serde_json::from_str(&output.stdout).context("the plan of a recommended command")?;
        let described = || format!("{}: {recommendation:?}", self.run.label);
        let peak = |plan: &Plan| plan.devices.iter().map(|device| device.peak_bytes.0 as i64).sum::<i64>();
        let speedup = before.predicted.step_seconds / after.predicted.step_seconds;
        tally.check("recommended commands fit", after.fits, described);
        tally.check(
            "stated bytes are those of the plan",
            recommendation.bytes == peak(&after) - peak(before),
            described,
        );
        let is_stated = (recommendation.speedup - speedup).abs() < MAX_ROUNDING;
        tally.check("the stated speedup is that of the plan", is_stated, described);
        tally.check("no recommendation is slower by its plan", speedup >= MIN_SPEEDUP, described);
        Ok(())
    }

    /// Returns the command that plans the run unchanged.
    fn words_of_run(&self) -> String {
        let settings = self.run.settings.iter().map(|setting| format!(" --set '{setting}'"));
        std::iter::once("plimsoll plan run.toml --json".to_owned()).chain(settings).collect()
    }

    /// Trains the run of a command that plans, in a folder of its own. Compares bytes and seconds with their
    /// predictions. Returns the measured median of a step, in seconds.
    fn train(&self, command: &str, folder: &str, tally: &mut Tally) -> anyhow::Result<f64> {
        let command = command.replacen("plimsoll plan", "plimsoll train --quiet", 1).replace(" --json", "");
        let output = self.shell(&format!("{command} --set run.dir={folder}"))?;
        ensure!(output.code == Some(0), "{command} ended with {:?}: {}", output.code, output.stderr);
        let read = |name: &str| fs::read_to_string(self.run.folder.join(folder).join(name));
        let result: RunResult = serde_json::from_str(&read("result.json")?)?;
        let described = || format!("{}: {command}", self.run.label);
        let is_exact = result.memory.iter().all(|device| device.arena_measured_bytes == device.arena_bytes);
        tally.check("measured arenas have the planned bytes", is_exact, described);
        let seconds = &result.step_seconds;
        let error = (seconds.median / seconds.predicted - 1.0).abs();
        tally.figure("part by which a step differs from its prediction", error, error <= MAX_TIME_ERROR, || {
            format!("{}: {} s, predicted {} s", described(), seconds.median, seconds.predicted)
        });
        Ok(seconds.median)
    }

    /// Runs a command of the program by a shell, as a user would type it.
    fn shell(&self, command: &str) -> anyhow::Result<ProgramOutput> {
        let folder = &self.run.folder;
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(SHELL_FUNCTION.to_owned() + command).current_dir(folder);
        shell.env("PROGRAM", &self.binary).env("PLIMSOLL_CACHE", folder.join("cache"));
        program::start(&mut shell, folder, COMMAND_SECONDS_MAX)
    }
}

/// Returns one or two virtual devices with a load line of `line` each, as a setting. They are at most a tenth as fast as
/// a core, so that the processor keeps their pace beside other work.
fn devices(two: bool, line: Bytes) -> String {
    let bytes = line.0;
    match two {
        false => format!("run.devices=virtual:a={bytes}B@0.1"),
        true => format!("run.devices=virtual:a={bytes}B@0.1,virtual:b={bytes}B@0.05"),
    }
}
