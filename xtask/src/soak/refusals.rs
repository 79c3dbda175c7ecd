//! Small runs on a device that refuses memory at random. Every run ends done or resumable, none hangs, and all train on
//! the same samples as the undisturbed run. If only identical rungs were taken, every bit is equal.

use super::case::Rng;
use super::runs::{RandomRun, RunRecord, small_model};
use super::tally::Tally;
use anyhow::{Context, ensure};
use plimsoll_core::Class;
use plimsoll_train::fault_injection::Injection;
use std::fs;
use std::path::Path;

/// Returns one random device, as a value of `--devices`.
fn device(rng: &mut Rng) -> String {
    rng.pick(&["cpu=512MiB", "virtual:a=64MiB@1.0", "virtual:a=64MiB@1.0:16GB/s,host=32MiB"]).to_owned()
}

/// Trains one random run twice, undisturbed and with random out-of-memory errors, and compares both.
pub fn run_refusals(binary: &Path, seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let case = RandomRun::on(binary, (seed, number), &small_model, &device);
    // Half of the runs sample completions.
    let mut rng = Rng::new(seed ^ 10, number);
    let case = case.and_then(|case| if rng.chance(0.5) { case.with_sampled_completions(&mut rng) } else { Ok(case) });
    let label = case.as_ref().map_or_else(|_| number.to_string(), |case| case.label.clone());
    let result = case.and_then(|case| {
        let checked = check_run(&case, &mut tally);
        let _ = fs::remove_dir_all(&case.folder);
        checked
    });
    tally.check("runs end done or resumable", result.is_ok(), || format!("{label}: {:#}", result.unwrap_err()));
    tally
}

fn check_run(case: &RandomRun, tally: &mut Tally) -> anyhow::Result<()> {
    let label = &case.label;
    ensure!(case.train("plain", &[])?.is_none(), "the undisturbed run stopped");
    let mut resumed = false;
    if case
        .train("refused", &[Injection::RandomOutOfMemory { probability: case.share }])
        .context("under refusals")?
        .is_some()
    {
        resumed = true;
        tally.cover("stopped and resumed");
        ensure!(case.train("refused", &[]).context("resumed")?.is_none(), "the resumed run stopped");
    }
    let [plain, refused] = ["plain", "refused"].map(|run| RunRecord::read(&case.folder.join(run)));
    let (plain, refused) = (plain?, refused?);
    let classes = refused.classes();
    tally.cover(if classes.is_empty() { "never refused" } else { "refused" });
    if !plain.rounds.is_empty() {
        tally.cover("rounds of completions");
        classes.iter().for_each(|_| tally.cover("recoveries in runs that sample"));
        check_rounds(case, &plain, &refused, tally);
    }
    if !resumed && classes.iter().all(|class| *class == Class::Identical) {
        tally.cover("identical rungs only");
        case.check_same_samples(&plain, &refused, tally);
        tally.check("identical rungs keep every completion", plain.rounds == refused.rounds, || label.clone());
        tally.check("identical rungs keep every bit", plain.tensors == refused.tensors, || label.clone());
        tally.check("identical rungs keep every loss", plain.steps == refused.steps, || label.clone());
        return Ok(());
    }
    if plain.rounds.is_empty() {
        case.check_same_samples(&plain, &refused, tally);
        case.compare_losses("over other rungs", &plain, &refused, tally);
    }
    Ok(())
}

/// Checks that no completion of a round is lost or doubled: each round has the same prompts, and each completion its rewards.
fn check_rounds(case: &RandomRun, plain: &RunRecord, refused: &RunRecord, tally: &mut Tally) {
    let prompts =
        |record: &RunRecord| record.rounds.iter().flatten().map(|sample| sample.prompt.clone()).collect::<Vec<_>>();
    tally.check("no completion is lost or doubled", prompts(plain) == prompts(refused), || case.label.clone());
    // Sums in another order may draw another token, which is another completion.
    let pairs = plain.rounds.iter().flatten().zip(refused.rounds.iter().flatten());
    let mut same = pairs.filter(|(one, other)| one.tokens == other.tokens);
    let have_rewards = same.all(|(one, other)| one.rewards == other.rewards && !one.rewards[0].is_null());
    tally.check("equal completions have equal rewards", have_rewards, || case.label.clone());
}
