//! Teams of unequal simulated devices, drawn at random: what the plan says fits runs with every line held, and is the
//! experiment of one device. While devices refuse memory, are lost, fall silent or refuse for ever, a run ends done or can
//! be gone on with, on the same samples, and no step is done twice whose state survives. Starts are processes of their
//! own under a watchdog (`runs`).

use super::case::Draw;
use super::runs::{Asked, Left, STEPS, small};
use super::tally::Tally;
use super::whole::OFF_BYTES;
use anyhow::{Context, ensure};
use plimsoll_core::{Event, Plan, RunResult, RunStatus, Sharing};
use plimsoll_train::fault_injection::Injection;
use std::fs;
use std::path::Path;

/// One in so many teams is run.
const RUN_EVERY: u64 = 3;
/// So often is each of these disturbed.
const DISTURBED: u64 = 2;
/// A device that refuses the same so often is left out: there are fewer rungs and tries.
const FOR_EVER: usize = 40;
/// After so many seconds without a sign of life a device is lost.
const SILENCE_SECONDS: u64 = 2;

/// Devices of a team are drawn so often until the planner shares the work in the way that is wanted.
const DRAWS: u64 = 8;

/// What a team is drawn for; cases take turns. What comes of it is the planner's choice.
#[derive(Clone, Copy)]
enum Sort {
    /// Any devices, any of which may hold the model.
    Any,
    /// One device is slow, or holds no model.
    OneTooMany,
    /// None holds the model, and its state can be shared over a fast link.
    Near,
    /// None holds the model, and its layers can be shared over a slow link.
    Far,
}

const SORTS: [Sort; 4] = [Sort::Any, Sort::Near, Sort::OneTooMany, Sort::Far];

/// Two to four devices.
fn devices(draw: &mut Draw) -> String {
    let count = draw.from(2, 4);
    let device = |number: u64, draw: &mut Draw| {
        let budget = draw.of(&[64, 72, 80, 96, 128]);
        let pace = draw.of(&["0.4", "0.3", "0.2", "0.12", "0.08"]);
        let link = draw.of(&["16GB/s", "1GB/s", "125MB/s+100us"]);
        format!("virtual:d{number}={budget}MiB@{pace}:16GB/s:{link}")
    };
    let list: Vec<String> = (0..count).map(|number| device(number, draw)).collect();
    let host = draw.of(&["", ",host=64MiB"]);
    format!("{}{host}", list.join(","))
}

/// Two devices, and a third that is slow, behind a slow link, or too small for anything.
fn one_too_many(draw: &mut Draw) -> String {
    let odd = draw.of(&["96MiB@0.01", "96MiB@0.2:16GB/s:1MB/s+900us", "12MiB@0.3"]);
    let pace = draw.of(&["0.4", "0.2"]);
    format!("virtual:d0=96MiB@0.4:16GB/s:1GB/s,virtual:d1=80MiB@{pace}:16GB/s:1GB/s,virtual:odd={odd}")
}

/// A model that takes about as much as such devices have beside what a process holds.
fn large(draw: &mut Draw) -> [u64; 6] {
    let hidden = draw.of(&[128, 192]);
    [hidden, draw.from(8, 14), 4, 2, 2 * hidden, draw.of(&[500, 900])]
}

/// One that holds nothing.
fn none(_: &mut Draw) -> String {
    "virtual:none=1MiB@0.4,host=1MiB".to_owned()
}

/// Two or three devices, none of which holds what a run takes on one, and whose host holds next to nothing: so drawn that
/// the work is shared in this way, where some draws of a few are.
fn too_small(asked: &mut Asked, wanted: Sharing, draw: &mut Draw) -> anyhow::Result<()> {
    let (plan, _) = asked.plan()?;
    let alone = plan.needs.first().context("a refusal says what would do")?.budget_bytes;
    let charges = plan.devices[0].charges_bytes;
    let arena_mib = (alone.saturating_sub(charges).0 as f64) / f64::from(1 << 20);
    // The state in parts wants a fast link, and pipelines can do with a slow one.
    let links = match wanted {
        Sharing::State => ["16GB/s", "8GB/s", "4GB/s"],
        _ => ["125MB/s+100us", "50MB/s+100us", "20MB/s+900us"],
    };
    for _ in 0..DRAWS {
        let link = draw.of(&links);
        let device = |number: u64, draw: &mut Draw| {
            let share = draw.of(&[0.5, 0.6, 0.7, 0.8, 0.9]);
            // Of several, each is charged with rows of its own, too.
            let budget = (charges.0 >> 20) + 4 + (arena_mib * share) as u64;
            let pace = draw.of(&["0.5", "0.4", "0.3"]);
            format!("virtual:d{number}={budget}MiB@{pace}:16GB/s:{link}")
        };
        let list: Vec<String> = (0..draw.from(2, 3)).map(|number| device(number, draw)).collect();
        let devices = format!("{},host=1MiB", list.join(","));
        asked.label = asked.label.replace(&asked.devices, &devices);
        asked.settings.push(format!("run.devices={devices}"));
        asked.devices = devices;
        if asked.plan()?.0.sharing == Some(wanted) {
            break;
        }
    }
    Ok(())
}

fn draw(binary: &Path, seed: u64, number: u64) -> anyhow::Result<Asked> {
    let mut draw = Draw::new(seed ^ 13, number);
    let on = |sizes: &dyn Fn(&mut Draw) -> [u64; 6], devices: &dyn Fn(&mut Draw) -> String| {
        let silence = format!("run.heartbeat_seconds={SILENCE_SECONDS}");
        Ok::<_, anyhow::Error>(
            Asked::on(binary, (seed ^ 11, number), sizes, devices)?.with(&["run.fallback=none", &silence]),
        )
    };
    let mut asked = match SORTS[number as usize % SORTS.len()] {
        Sort::Any => on(&small, &devices)?,
        Sort::OneTooMany => on(&small, &one_too_many)?,
        Sort::Near => {
            let mut asked = on(&large, &none)?;
            too_small(&mut asked, Sharing::State, &mut draw)?;
            asked
        }
        Sort::Far => {
            let mut asked = on(&large, &none)?;
            too_small(&mut asked, Sharing::Layers, &mut draw)?;
            asked
        }
    };
    if draw.chance(0.5) {
        asked.settings.push("run.team=all".to_owned());
    }
    asked.label = asked.label.replace(&format!("--seed {}", seed ^ 11), &format!("--seed {seed}"));
    Ok(asked)
}

/// One team, planned; every third is trained, undisturbed and disturbed.
pub fn run_team(binary: &Path, seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let asked = draw(binary, seed, number);
    let label = asked.as_ref().map_or_else(|_| format!("--seed {seed} --case {number}"), |asked| asked.label.clone());
    let result = asked.and_then(|asked| {
        let shown = planned(&asked, &mut Draw::new(seed ^ 12, number), number, &mut tally);
        let _ = fs::remove_dir_all(&asked.folder);
        shown
    });
    tally.check("teams end done or resumable", result.is_ok(), || format!("{label}: {:#}", result.unwrap_err()));
    tally
}

/// How a plan shares the work.
fn way(plan: &Plan) -> String {
    match plan.sharing {
        _ if !plan.fits => "refused".to_owned(),
        Some(sharing) => sharing.to_string(),
        None => "one device".to_owned(),
    }
}

fn names(plan: &Plan) -> Vec<String> {
    plan.devices.iter().map(|device| device.name.clone()).collect()
}

fn planned(asked: &Asked, draw: &mut Draw, number: u64, tally: &mut Tally) -> anyhow::Result<()> {
    let (plan, said) = asked.plan()?;
    let way = way(&plan);
    tally.cover("all: planned");
    tally.cover(&format!("{way}: planned"));
    if !plan.fits {
        tally.check("a no says what would do", said.contains("hint: "), || format!("{}: {said}", asked.label));
        return Ok(());
    }
    for device in &plan.devices {
        tally.check("every plan is under its line", device.peak_bytes <= device.budget_bytes, || {
            format!("{}: {device:?}", asked.label)
        });
    }
    if !number.is_multiple_of(RUN_EVERY) {
        return Ok(());
    }
    tally.cover("all: run");
    tally.cover(&format!("{way}: run"));
    if !plan.left_out.is_empty() {
        tally.cover("a device left out: run");
    }
    ensure!(asked.train("plain", &[])?.is_none(), "the undisturbed team stopped");
    ended(asked, "plain", RunStatus::Done, tally)?;
    let did: Plan = serde_json::from_slice(&fs::read(asked.folder.join("plain/plan.json"))?)?;
    let same = did.sharing == plan.sharing && names(&did) == names(&plan);
    tally.check("what is planned is what is trained", same, || {
        format!("{}: {:?} {:?}, {:?} {:?}", asked.label, plan.sharing, names(&plan), did.sharing, names(&did))
    });
    ensure!(asked.with(&["run.devices=cpu"]).train("alone", &[])?.is_none(), "one device stopped");
    let [alone, plain] = ["alone", "plain"].map(|run| Left::read(&asked.folder.join(run)));
    let (alone, plain) = (alone?, plain?);
    asked.same_samples(&alone, &plain, tally);
    asked.near("of a team and one device", &alone, &plain, tally);
    for disturbed in 0..DISTURBED {
        let mut injections = disturbances(asked, &names(&plan), draw, tally);
        let beside = did.left_out.iter().find(|out| out.evaluates.is_some());
        injections.extend(beside.into_iter().flat_map(|out| disturbances_beside(&out.device, draw, tally)));
        tally.cover("all: disturbed");
        tally.cover(&format!("{way}: disturbed"));
        let words = injections.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let disturbed = format!("disturbed-{disturbed}");
        let mut asked = asked.with(&[]);
        asked.label = format!("{}: {words}", asked.label);
        under(&asked, &disturbed, &injections, &plain, tally).context(words)?;
        fs::remove_dir_all(asked.folder.join(disturbed))?;
    }
    Ok(())
}

/// What shall happen to these devices.
fn disturbances(asked: &Asked, names: &[String], draw: &mut Draw, tally: &mut Tally) -> Vec<Injection> {
    let device = |draw: &mut Draw| names[draw.from(0, names.len() as u64 - 1) as usize].clone();
    let programs = [None, Some("forward"), Some("backward"), Some("norm"), Some("update")];
    let mut injections = Vec::new();
    while draw.chance(0.4) {
        let (device, step, program) = (device(draw), draw.from(1, STEPS), draw.of(&programs).map(str::to_owned));
        injections.push(Injection::Loss { device, step, program });
        tally.cover("disturbed by a loss");
    }
    if names.len() > 1 && draw.chance(0.2) {
        let (device, step, forever) = (device(draw), draw.from(1, STEPS), draw.chance(0.2));
        let opening = draw.chance(0.25);
        let step = if opening { 0 } else { step };
        injections.push(Injection::Silence { device, step, opening, forever });
        tally.cover(if forever { "disturbed by silence for good" } else { "disturbed by silence" });
        if opening {
            tally.cover("disturbed by silence while a device is opened");
        }
    }
    if draw.chance(0.25) {
        let (device, step, program) = (device(draw), draw.from(1, STEPS), draw.of(&programs[1..]).map(str::to_owned));
        let refuses = Injection::At { device: Some(device), step, program, op: None };
        injections.extend(std::iter::repeat_n(refuses, FOR_EVER));
        tally.cover("disturbed by refusals for ever");
    }
    if injections.is_empty() || draw.chance(0.5) {
        injections.push(Injection::Random { share: asked.share.min(0.1) });
        tally.cover("disturbed by refusals at random");
    }
    injections
}

/// What shall happen to the device that evaluates beside them.
fn disturbances_beside(device: &str, draw: &mut Draw, tally: &mut Tally) -> Vec<Injection> {
    tally.cover("a device evaluates beside the team: disturbed");
    let (device, step) = (device.to_owned(), draw.from(1, STEPS));
    let program = Some(draw.of(&["renew", "evaluate"]).to_owned());
    match draw.from(0, 4) {
        0 => vec![Injection::Loss { device, step, program }],
        1 => vec![Injection::Silence { device, step, opening: false, forever: draw.chance(0.5) }],
        2 => vec![Injection::At { device: Some(device), step, program, op: None }; FOR_EVER],
        3 => vec![Injection::At { device: Some(device), step, program, op: None }],
        _ => vec![],
    }
}

/// One disturbed run, to its end.
fn under(asked: &Asked, run: &str, what: &[Injection], plain: &Left, tally: &mut Tally) -> anyhow::Result<()> {
    let stopped = asked.train(run, what)?;
    let begun = asked.folder.join(run).join("run.toml").exists();
    if begun {
        ended(asked, run, if stopped.is_some() { RunStatus::Stopped } else { RunStatus::Done }, tally)?;
    }
    if let Some(said) = &stopped {
        tally.cover("stopped and resumed");
        tally.check("what stops says how to go on", said.contains("--resume") || !begun, || {
            format!("{}: {said}", asked.label)
        });
        ensure!(asked.train(run, &[]).context("resumed")?.is_none(), "the resumed team stopped");
        ended(asked, run, RunStatus::Done, tally)?;
    }
    let left = Left::read(&asked.folder.join(run))?;
    asked.same_samples(plain, &left, tally);
    asked.near("of a disturbed team", plain, &left, tally);
    // An update that was half done, a device that had all there was: the state is gone.
    let gone = ["`update`", "no other device works on this run"];
    let survives = !stopped.is_some_and(|said| gone.iter().any(|gone| said.contains(gone)));
    let wrong = done_once(&left.events, survives);
    tally.check("no finished step is lost where its state survives", wrong.is_none(), || {
        format!("{}: {}", asked.label, wrong.unwrap_or_default())
    });
    for event in &left.events {
        let Event::Lost { device, why, .. } = event else { continue };
        let meant = what.iter().any(|injection| match injection {
            Injection::Loss { device: of, .. } | Injection::Silence { device: of, .. } => of == device,
            Injection::At { .. } | Injection::Random { .. } => why.contains("refused"),
            Injection::Slow { .. } => false,
        });
        tally.check("only what is gone is lost", meant, || format!("{}: {device}: {why}", asked.label));
        tally.cover("devices lost");
    }
    Ok(())
}

/// Whether each step follows the one before it, but for those that went with a part of the state; in words where not. A
/// stop takes finished steps with it only where the state does not survive it.
fn done_once(events: &[Event], survives: bool) -> Option<String> {
    let (mut done, mut saved) = (0, 0);
    for event in events {
        let next = done + 1;
        match event {
            Event::Start { step, .. } if *step == next || !survives && *step == saved + 1 => done = step - 1,
            Event::Start { step, .. } => return Some(format!("goes on with step {step}, {done} were done")),
            Event::Step { step, .. } if *step == next => done = *step,
            Event::Step { step, .. } => return Some(format!("step {step} after step {done}")),
            Event::Checkpoint { step, .. } => saved = *step,
            Event::Lost { back_to: Some(back_to), .. } if *back_to == saved => done = saved,
            Event::Lost { back_to: Some(back_to), .. } => {
                return Some(format!("back to step {back_to}, but {saved} was saved"));
            }
            _ => {}
        }
    }
    None
}

/// A run that ended in order says how, and that its arenas were as large as planned and no device above its line.
fn ended(asked: &Asked, run: &str, status: RunStatus, tally: &mut Tally) -> anyhow::Result<()> {
    let path = asked.folder.join(run).join("result.json");
    let result: RunResult = serde_json::from_slice(&fs::read(path).context("result.json")?)?;
    tally.check("result.json says how it ended", result.status == status, || {
        format!("{}: {:?} for {status:?}", asked.label, result.status)
    });
    for memory in &result.memory {
        tally.check("no arena is larger than planned", memory.arena_measured_bytes <= memory.arena_bytes, || {
            format!("{}: {memory:?}", asked.label)
        });
        tally.check("every plan is under its line", memory.predicted_bytes <= memory.budget_bytes, || {
            format!("{}: {memory:?}", asked.label)
        });
        let held = memory.measured_bytes.context("what the process holds")?;
        let over = held.saturating_sub(memory.budget_bytes).as_mib();
        let (kind, most) = match run {
            // As near to its prediction as a whole process is promised to be; the arenas are held to the byte.
            "plain" => ("whole process: above its line, MiB", memory.predicted_bytes.0 / 100 + OFF_BYTES),
            // What plans anew while it is under way holds what planning takes, too.
            _ => ("whole process: above its line while it plans anew, MiB", u64::MAX),
        };
        let near = held.saturating_sub(memory.predicted_bytes).0 <= most;
        tally.figure(kind, over, near, || format!("{}: {memory:?}", asked.label));
    }
    Ok(())
}
