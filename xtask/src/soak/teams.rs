//! Teams of unequal simulated devices, drawn at random: what the plan says fits runs with every line held, and is the
//! experiment of one device; under refusals and losses at random a run ends done or can be gone on with, with the same
//! samples, and none hangs (the soak's watch over its cases).

use super::case::Draw;
use super::refusals::{Asked, Left, Refused, STEPS, small};
use super::tally::Tally;
use anyhow::{Context, ensure};
use plimsoll_core::{Bytes, RunResult};
use plimsoll_train::run::rehearsal::Injection;
use plimsoll_train::run::training::Run;
use std::fs;
use std::path::Path;

/// Two to four devices.
fn devices(draw: &mut Draw) -> String {
    let count = draw.from(2, 4);
    let device = |number: u64, draw: &mut Draw| {
        let budget = draw.of(&[64, 72, 80, 96, 128]);
        let pace = draw.of(&["0.1", "0.07", "0.05", "0.03", "0.02"]);
        let link = draw.of(&["16GB/s", "1GB/s", "125MB/s+100us"]);
        format!("virtual:d{number}={budget}MiB@{pace}:16GB/s:{link}")
    };
    let list: Vec<String> = (0..count).map(|number| device(number, draw)).collect();
    let host = draw.of(&["", ",host=64MiB"]);
    format!("{}{host}", list.join(","))
}

/// A model that takes about as much as such devices have beside what this process holds.
fn large(draw: &mut Draw) -> [u64; 6] {
    let hidden = draw.of(&[128, 192]);
    [hidden, draw.from(8, 14), 4, 2, 2 * hidden, draw.of(&[500, 900])]
}

/// One that holds nothing.
fn none(_: &mut Draw) -> String {
    "virtual:none=1MiB@0.4,host=1MiB".to_owned()
}

/// Two or three devices, none of which holds what a run takes on one, and whose host holds next to nothing.
fn too_small(asked: &mut Asked, draw: &mut Draw) -> anyhow::Result<()> {
    let refused = Run::new(asked.file(&asked.folder.join("none"))?)?;
    let plan = &refused.prepared().planned.plan;
    let alone = plan.needs.first().context("a refusal says what would do")?.budget_bytes;
    let charges = plan.devices[0].charges_bytes;
    let arena_mib = (alone.saturating_sub(charges).0 as f64) / f64::from(1 << 20);
    let device = |number: u64, draw: &mut Draw| {
        let share = draw.of(&[0.5, 0.6, 0.7, 0.8, 0.9]);
        // Of several, each is charged with rows of its own, too; and a later start in this process finds it some MiB larger.
        let budget = (charges.0 >> 20) + 12 + (arena_mib * share) as u64;
        let pace = draw.of(&["0.4", "0.3", "0.2"]);
        let link = draw.of(&["16GB/s", "1GB/s", "125MB/s+100us"]);
        format!("virtual:d{number}={budget}MiB@{pace}:16GB/s:{link}")
    };
    let list: Vec<String> = (0..draw.from(2, 3)).map(|number| device(number, draw)).collect();
    let devices = format!("{},host=1MiB", list.join(","));
    asked.label = asked.label.replace(&none(draw), &devices);
    asked.settings.push(format!("run.devices={devices}"));
    Ok(())
}

/// One team, undisturbed and disturbed.
pub fn run_team(seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let mut draw = Draw::new(seed ^ 13, number);
    let asked = match draw.chance(0.4) {
        true => Asked::on(seed ^ 11, number, &large, &none).and_then(|mut asked| {
            too_small(&mut asked, &mut draw)?;
            Ok(asked)
        }),
        false => Asked::on(seed ^ 11, number, &small, &devices),
    };
    let label = asked.as_ref().map_or_else(|_| number.to_string(), |asked| asked.label.clone());
    let result = asked.and_then(|asked| show(asked, seed, number, &mut tally));
    tally.check("teams end done or resumable", result.is_ok(), || format!("{label}: {:#}", result.unwrap_err()));
    tally
}

fn show(mut asked: Asked, seed: u64, number: u64, tally: &mut Tally) -> anyhow::Result<()> {
    let mut draw = Draw::new(seed ^ 12, number);
    if draw.chance(0.8) {
        asked.settings.push("run.team=all".to_owned());
    }
    let mut charges = Vec::new();
    let shown = in_folder(&asked, &mut draw, &mut charges, tally);
    let _ = fs::remove_dir_all(&asked.folder);
    // All starts are made in this process, which grows by some MiB from one to the next: a later one may have less room
    // under its lines than the first was planned with.
    let grown = |refused: &Refused| refused.charges.iter().zip(&charges).any(|(now, before)| now > before);
    match shown {
        Err(error) if error.downcast_ref().is_some_and(grown) => {
            tally.cover("cut short: this process holds more than at the first start");
            Ok(())
        }
        shown => shown,
    }
}

fn in_folder(asked: &Asked, draw: &mut Draw, charges: &mut Vec<Bytes>, tally: &mut Tally) -> anyhow::Result<()> {
    let [alone, plain, disturbed] = ["alone", "plain", "disturbed"].map(|name| asked.folder.join(name));
    let planned = Run::new(asked.file(&plain)?)?;
    let plan = &planned.prepared().planned.plan;
    tally.cover("planned");
    if !plan.fits {
        tally.cover("refused");
        let said = !plan.needs.is_empty() || !plan.left_out.is_empty();
        tally.check("a no says what would do", said, || asked.label.clone());
        return Ok(());
    }
    charges.extend(plan.devices.iter().map(|device| device.charges_bytes));
    let names: Vec<String> = plan.devices.iter().map(|device| device.name.clone()).collect();
    let sharing =
        plan.sharing.map_or("one device".to_owned(), |sharing| format!("{sharing} in a team of {}", names.len()));
    tally.cover(&sharing);
    drop(planned);

    let ended = asked.train(&plain, &[], false)?;
    ensure!(ended.is_none(), "the undisturbed team stopped");
    lines_are_held(asked, &plain, tally)?;
    let mut one = asked.settings.clone();
    one.push("run.devices=cpu".to_owned());
    let single = Asked { settings: one, folder: asked.folder.clone(), label: asked.label.clone(), ..*asked };
    ensure!(single.train(&alone, &[], false)?.is_none(), "one device stopped");
    let (alone, undisturbed) = (Left::read(&alone)?, Left::read(&plain)?);
    same_samples(asked, &alone, &undisturbed, tally);
    asked.near("of a team and one device", &alone, &undisturbed, tally);

    let mut injections = vec![Injection::Random { share: asked.share.min(0.1) }];
    while names.len() > 1 && draw.chance(0.5) {
        let device = names[draw.from(0, names.len() as u64 - 1) as usize].clone();
        let program = draw.of(&[None, Some("forward"), Some("backward"), Some("norm"), Some("update")]);
        injections.push(Injection::Loss { device, step: draw.from(1, STEPS), program: program.map(str::to_owned) });
    }
    tally.cover(if injections.len() > 1 { "with losses" } else { "with refusals alone" });
    if asked.train(&disturbed, &injections, false).context("disturbed")?.is_some() {
        tally.cover("stopped and resumed");
        ensure!(asked.train(&disturbed, &[], true).context("resumed")?.is_none(), "the resumed team stopped");
    }
    lines_are_held(asked, &disturbed, tally)?;
    let disturbed = Left::read(&disturbed)?;
    same_samples(asked, &undisturbed, &disturbed, tally);
    asked.near("of a disturbed team", &undisturbed, &disturbed, tally);
    Ok(())
}

fn same_samples(asked: &Asked, one: &Left, other: &Left, tally: &mut Tally) {
    let samples = |left: &Left| left.steps.iter().map(|(step, (labelled, ..))| (*step, *labelled)).collect::<Vec<_>>();
    tally.check("the samples of every step are the same", samples(one) == samples(other), || {
        format!("{}: {:?} was {:?}", asked.label, samples(other), samples(one))
    });
}

/// Arenas are as large as planned, and with what the process holds beside them under each device's line.
fn lines_are_held(asked: &Asked, run: &Path, tally: &mut Tally) -> anyhow::Result<()> {
    let result: RunResult = serde_json::from_slice(&fs::read(run.join("result.json"))?)?;
    for memory in &result.memory {
        tally.check("no arena is larger than planned", memory.arena_measured_bytes <= memory.arena_bytes, || {
            format!("{}: {memory:?}", asked.label)
        });
        tally.check("every plan is under its line", memory.predicted_bytes <= memory.budget_bytes, || {
            format!("{}: {memory:?}", asked.label)
        });
    }
    Ok(())
}
