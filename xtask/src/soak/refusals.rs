//! Devices that refuse memory at random while small runs are under way: every run ends done or can be gone on with,
//! none hangs, none trains on other samples, and where only identical rungs were taken every bit is that of the
//! undisturbed run.

use super::case::Draw;
use super::runs::{Asked, Left, small};
use super::tally::Tally;
use anyhow::{Context, ensure};
use plimsoll_core::Class;
use plimsoll_train::fault_injection::Injection;
use std::fs;
use std::path::Path;

/// A device alone.
fn device(draw: &mut Draw) -> String {
    draw.of(&["cpu=512MiB", "virtual:a=64MiB@1.0", "virtual:a=64MiB@1.0:16GB/s,host=32MiB"]).to_owned()
}

/// One run undisturbed, and the same under refusals.
pub fn run_refusals(binary: &Path, seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let asked = Asked::on(binary, (seed, number), &small, &device);
    let label = asked.as_ref().map_or_else(|_| number.to_string(), |asked| asked.label.clone());
    let result = asked.and_then(|asked| {
        let shown = show(&asked, &mut tally);
        let _ = fs::remove_dir_all(&asked.folder);
        shown
    });
    tally.check("runs end done or resumable", result.is_ok(), || format!("{label}: {:#}", result.unwrap_err()));
    tally
}

fn show(asked: &Asked, tally: &mut Tally) -> anyhow::Result<()> {
    let label = &asked.label;
    ensure!(asked.train("plain", &[])?.is_none(), "the undisturbed run stopped");
    let mut resumed = false;
    if asked.train("refused", &[Injection::Random { share: asked.share }]).context("under refusals")?.is_some() {
        resumed = true;
        tally.cover("stopped and resumed");
        ensure!(asked.train("refused", &[]).context("resumed")?.is_none(), "the resumed run stopped");
    }
    let [plain, refused] = ["plain", "refused"].map(|run| Left::read(&asked.folder.join(run)));
    let (plain, refused) = (plain?, refused?);
    let classes = refused.classes();
    tally.cover(if classes.is_empty() { "never refused" } else { "refused" });
    asked.same_samples(&plain, &refused, tally);
    if !resumed && classes.iter().all(|class| *class == Class::Identical) {
        tally.cover("identical rungs only");
        tally.check("identical rungs leave every bit", plain.tensors == refused.tensors, || label.clone());
        tally.check("identical rungs leave every loss", plain.steps == refused.steps, || label.clone());
        return Ok(());
    }
    asked.near("over other rungs", &plain, &refused, tally);
    Ok(())
}
