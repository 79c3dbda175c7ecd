//! Random teams of unequal simulated devices.
//!
//! A plan that fits runs within all load lines and gives the result of a single device. With injected faults (refused
//! memory, lost, silent and permanently failing devices) a run ends done or resumable, on the same samples. No step is
//! repeated if its state survives. Each start is a process of its own under a watchdog (`runs`).

use super::case::Rng;
use super::runs::{RandomRun, RunRecord, STEPS, small_model};
use super::tally::Tally;
use super::whole_process::{ModelSizes, TOLERANCE_BYTES};
use anyhow::{Context, ensure};
use plimsoll_core::{Bytes, Event, Parallelism, Plan, RunResult, RunStatus};
use plimsoll_program::ProgramKind;
use plimsoll_train::fault_injection::Injection;
use std::fs;
use std::path::Path;

/// One team in this many is not only planned, but also trained.
const RUN_EVERY: u64 = 3;
/// Number of runs with injected faults per team.
const FAULTY_RUNS: u64 = 2;
/// Number of equal out-of-memory faults that make a device fail for good. It exceeds the number of rungs and retries of
/// a run, so the run goes on without the device.
const PERSISTENT_COUNT: usize = 40;
/// Seconds without a heartbeat after which a device counts as lost (`run.heartbeat_seconds`).
const HEARTBEAT_SECONDS: u64 = 2;

/// Largest number of random teams that are drawn in search of one for which the planner chooses the wanted parallelism.
const DRAWS: u64 = 8;

/// The kind of team that a case intends. Cases take turns between the kinds; the planner decides on the parallelism.
#[derive(Clone, Copy)]
enum TeamKind {
    /// Random devices; each may be large enough for the model.
    Any,
    /// One device is slow or too small for the model.
    WithOutlier,
    /// Each device is too small for the model, and a fast link suits sharding.
    FastLink,
    /// Each device is too small for the model, and a slow link suits a pipeline.
    SlowLink,
}

const TEAM_KINDS: [TeamKind; 4] = [TeamKind::Any, TeamKind::FastLink, TeamKind::WithOutlier, TeamKind::SlowLink];

/// Returns two to four random devices, as a value of `--devices`.
fn devices(rng: &mut Rng) -> String {
    let count = rng.range(2, 4);
    let list: Vec<String> = (0..count).map(|number| random_device(number, rng)).collect();
    let host = rng.pick(&["", ",host=64MiB"]);
    format!("{}{host}", list.join(","))
}

/// Returns the device with this number, with random limits, as part of a value of `--devices`.
fn random_device(number: u64, rng: &mut Rng) -> String {
    let budget = rng.pick(&[64, 72, 80, 96, 128]);
    let pace = rng.pick(&["0.4", "0.3", "0.2", "0.12", "0.08"]);
    let link = rng.pick(&["16GB/s", "1GB/s", "125MB/s+100us"]);
    format!("virtual:d{number}={budget}MiB@{pace}:16GB/s:{link}")
}

/// Returns two devices and a third one that is slow, behind a slow link, or too small for any model, as a value of
/// `--devices`.
fn devices_with_outlier(rng: &mut Rng) -> String {
    let odd = rng.pick(&["96MiB@0.01", "96MiB@0.2:16GB/s:1MB/s+900us", "12MiB@0.3"]);
    let pace = rng.pick(&["0.4", "0.2"]);
    format!("virtual:d0=96MiB@0.4:16GB/s:1GB/s,virtual:d1=80MiB@{pace}:16GB/s:1GB/s,virtual:odd={odd}")
}

/// Returns random sizes of a model for teams whose devices are each too small for it.
fn large_model(rng: &mut Rng) -> ModelSizes {
    let hidden = rng.pick(&[128, 192]);
    let (layers, vocab) = (rng.range(8, 14), rng.pick(&[500, 900]));
    ModelSizes { hidden, layers, heads: 4, kv_heads: 2, ffn: 2 * hidden, vocab }
}

/// Returns a device that is too small for any model, as a value of `--devices`.
fn too_small_device(_: &mut Rng) -> String {
    "virtual:none=1MiB@0.4,host=1MiB".to_owned()
}

/// Gives the case two or three devices that are each too small for its model, without host memory. Draws devices up to
/// [`DRAWS`] times, until the planner chooses the parallelism `wanted`. If it never does, the case keeps the last
/// devices.
fn draw_devices_too_small_alone(case: &mut RandomRun, wanted: Parallelism, rng: &mut Rng) -> anyhow::Result<()> {
    let (plan, _) = case.plan()?;
    let alone = plan.needs.first().context("a refusal says what would do")?.budget_bytes;
    let charges = plan.devices[0].charges_bytes;
    let arena_mib = (alone.saturating_sub(charges).0 as f64) / f64::from(1 << 20);
    // Sharding needs a fast link; a pipeline works with a slow one.
    let links = match wanted {
        Parallelism::Sharded => ["16GB/s", "8GB/s", "4GB/s"],
        _ => ["125MB/s+100us", "50MB/s+100us", "20MB/s+900us"],
    };
    for _ in 0..DRAWS {
        let link = rng.pick(&links);
        let numbers = 0..rng.range(2, 3);
        let list: Vec<String> = numbers.map(|number| device_for_part(number, charges, arena_mib, link, rng)).collect();
        let devices = format!("{},host=1MiB", list.join(","));
        case.label = case.label.replace(&case.devices, &devices);
        case.settings.push(format!("run.devices={devices}"));
        case.devices = devices;
        if case.plan()?.0.parallelism == Some(wanted) {
            break;
        }
    }
    Ok(())
}

/// Returns device `number` as part of a value of `--devices`. It has memory for `charges` and 50 to 90 % of an arena of
/// `arena_mib` MiB, and is connected by `link`.
fn device_for_part(number: u64, charges: Bytes, arena_mib: f64, link: &str, rng: &mut Rng) -> String {
    let share = rng.pick(&[0.5, 0.6, 0.7, 0.8, 0.9]);
    // In a team, each worker has charges for its own rows.
    let budget = (charges.0 >> 20) + 4 + (arena_mib * share) as u64;
    let pace = rng.pick(&["0.5", "0.4", "0.3"]);
    format!("virtual:d{number}={budget}MiB@{pace}:16GB/s:{link}")
}

fn random_team(binary: &Path, seed: u64, number: u64) -> anyhow::Result<RandomRun> {
    let mut rng = Rng::new(seed ^ 13, number);
    let silence = format!("run.heartbeat_seconds={HEARTBEAT_SECONDS}");
    let on = |sizes: &dyn Fn(&mut Rng) -> ModelSizes, devices: &dyn Fn(&mut Rng) -> String| {
        let case = RandomRun::on(binary, (seed ^ 11, number), sizes, devices)?;
        anyhow::Ok(case.with(&["run.fallback=none", &silence]))
    };
    let mut case = match TEAM_KINDS[number as usize % TEAM_KINDS.len()] {
        TeamKind::Any => on(&small_model, &devices)?,
        TeamKind::WithOutlier => on(&small_model, &devices_with_outlier)?,
        TeamKind::FastLink => {
            let mut case = on(&large_model, &too_small_device)?;
            draw_devices_too_small_alone(&mut case, Parallelism::Sharded, &mut rng)?;
            case
        }
        TeamKind::SlowLink => {
            let mut case = on(&large_model, &too_small_device)?;
            draw_devices_too_small_alone(&mut case, Parallelism::Pipeline, &mut rng)?;
            case
        }
    };
    if rng.chance(0.5) {
        case.settings.push("run.parallelism=all".to_owned());
    }
    case.label = case.label.replace(&format!("--seed {}", seed ^ 11), &format!("--seed {seed}"));
    Ok(case)
}

/// Plans one random team. One team in [`RUN_EVERY`] is also trained, both undisturbed and with injected faults.
pub fn run_team(binary: &Path, seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let case = random_team(binary, seed, number);
    let label = case.as_ref().map_or_else(|_| format!("--seed {seed} --case {number}"), |case| case.label.clone());
    let result = case.and_then(|case| {
        let shown = check_team(&case, &mut Rng::new(seed ^ 12, number), number, &mut tally);
        let _ = fs::remove_dir_all(&case.folder);
        shown
    });
    tally.check("teams end done or resumable", result.is_ok(), || format!("{label}: {:#}", result.unwrap_err()));
    tally
}

/// Returns the name of a plan's parallelism, `one device` without a team, or `refused` if the plan does not fit.
fn parallelism_name(plan: &Plan) -> String {
    match plan.parallelism {
        _ if !plan.fits => "refused".to_owned(),
        Some(parallelism) => parallelism.to_string(),
        None => "one device".to_owned(),
    }
}

fn device_names(plan: &Plan) -> Vec<String> {
    plan.devices.iter().map(|device| device.name.clone()).collect()
}

fn check_team(case: &RandomRun, rng: &mut Rng, number: u64, tally: &mut Tally) -> anyhow::Result<()> {
    let (plan, said) = case.plan()?;
    let parallelism = parallelism_name(&plan);
    tally.cover("all: planned");
    tally.cover(&format!("{parallelism}: planned"));
    if !plan.fits {
        tally.check("refusals print hints", said.contains("hint: "), || format!("{}: {said}", case.label));
        return Ok(());
    }
    for device in &plan.devices {
        tally.check("every plan is within its load line", device.peak_bytes <= device.budget_bytes, || {
            format!("{}: {device:?}", case.label)
        });
    }
    if !number.is_multiple_of(RUN_EVERY) {
        return Ok(());
    }
    tally.cover("all: run");
    tally.cover(&format!("{parallelism}: run"));
    if !plan.excluded.is_empty() {
        tally.cover("a device is excluded: run");
    }
    ensure!(case.train("plain", &[])?.is_none(), "the undisturbed team stopped");
    check_result(case, "plain", RunStatus::Done, tally)?;
    let trained_plan: Plan = serde_json::from_slice(&fs::read(case.folder.join("plain/plan.json"))?)?;
    let same = trained_plan.parallelism == plan.parallelism && device_names(&trained_plan) == device_names(&plan);
    tally.check("runs use the planned parallelism", same, || {
        format!(
            "{}: {:?} {:?}, {:?} {:?}",
            case.label,
            plan.parallelism,
            device_names(&plan),
            trained_plan.parallelism,
            device_names(&trained_plan)
        )
    });
    ensure!(case.with(&["run.devices=cpu"]).train("alone", &[])?.is_none(), "one device stopped");
    let [alone, plain] = ["alone", "plain"].map(|run| RunRecord::read(&case.folder.join(run)));
    let (alone, plain) = (alone?, plain?);
    case.check_same_samples(&alone, &plain, tally);
    case.compare_losses("of a team and one device", &alone, &plain, tally);
    for disturbed in 0..FAULTY_RUNS {
        let mut injections = random_faults(case, &device_names(&plan), rng, tally);
        let beside = trained_plan.excluded.iter().find(|out| out.evaluator_plan.is_some());
        injections.extend(beside.into_iter().flat_map(|out| random_evaluator_faults(&out.device, rng, tally)));
        tally.cover("all: with faults");
        tally.cover(&format!("{parallelism}: with faults"));
        let words = injections.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let disturbed = format!("disturbed-{disturbed}");
        let mut case = case.with(&[]);
        case.label = format!("{}: {words}", case.label);
        check_with_faults(&case, &disturbed, &injections, &plain, tally).context(words)?;
        fs::remove_dir_all(case.folder.join(disturbed))?;
    }
    Ok(())
}

/// Returns random faults for the devices of a team with these names, and counts their kinds in `tally`.
fn random_faults(case: &RandomRun, names: &[String], rng: &mut Rng, tally: &mut Tally) -> Vec<Injection> {
    let device = |rng: &mut Rng| names[rng.range(0, names.len() as u64 - 1) as usize].clone();
    let programs = [
        None,
        Some(ProgramKind::Forward.name()),
        Some(ProgramKind::Backward.name()),
        Some(ProgramKind::GradientNorm.name()),
        Some(ProgramKind::Update.name()),
    ];
    let mut injections = Vec::new();
    while rng.chance(0.4) {
        let (device, step, program) = (device(rng), rng.range(1, STEPS), rng.pick(&programs).map(str::to_owned));
        injections.push(Injection::Loss { device, step, program });
        tally.cover("with a lost device");
    }
    if names.len() > 1 && rng.chance(0.2) {
        let (device, step, forever) = (device(rng), rng.range(1, STEPS), rng.chance(0.2));
        let opening = rng.chance(0.25);
        let step = if opening { 0 } else { step };
        injections.push(Injection::Silence { device, step, opening, forever });
        tally.cover(if forever { "with a permanently silent device" } else { "with a silent device" });
        if opening {
            tally.cover("with a device that is silent while it is opened");
        }
    }
    if rng.chance(0.25) {
        let (device, step, program) = (device(rng), rng.range(1, STEPS), rng.pick(&programs[1..]).map(str::to_owned));
        let out_of_memory = Injection::OutOfMemory { device: Some(device), step, program, op: None };
        injections.extend(std::iter::repeat_n(out_of_memory, PERSISTENT_COUNT));
        tally.cover("with persistent out-of-memory errors");
    }
    if injections.is_empty() || rng.chance(0.5) {
        injections.push(Injection::RandomOutOfMemory { probability: case.share.min(0.1) });
        tally.cover("with random out-of-memory errors");
    }
    injections
}

/// Returns random faults for the evaluator of a team; none in one case of five.
fn random_evaluator_faults(device: &str, rng: &mut Rng, tally: &mut Tally) -> Vec<Injection> {
    tally.cover("a device evaluates for the team: with faults");
    let (device, step) = (device.to_owned(), rng.range(1, STEPS));
    let program = Some(rng.pick(&[ProgramKind::ReloadWeights, ProgramKind::Evaluate]).name().to_owned());
    match rng.range(0, 4) {
        0 => vec![Injection::Loss { device, step, program }],
        1 => vec![Injection::Silence { device, step, opening: false, forever: rng.chance(0.5) }],
        2 => vec![Injection::OutOfMemory { device: Some(device), step, program, op: None }; PERSISTENT_COUNT],
        3 => vec![Injection::OutOfMemory { device: Some(device), step, program, op: None }],
        _ => vec![],
    }
}

/// Trains the case in the run folder `run` with the faults `what`, and resumes it if it stops. Compares it with the
/// undisturbed run `plain`.
fn check_with_faults(
    case: &RandomRun,
    run: &str,
    what: &[Injection],
    plain: &RunRecord,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let stopped = case.train(run, what)?;
    let begun = case.folder.join(run).join("run.toml").exists();
    if begun {
        check_result(case, run, if stopped.is_some() { RunStatus::Stopped } else { RunStatus::Done }, tally)?;
    }
    if let Some(said) = &stopped {
        tally.cover("stopped and resumed");
        tally.check("stopped runs name the resume command", said.contains("--resume") || !begun, || {
            format!("{}: {said}", case.label)
        });
        ensure!(case.train(run, &[]).context("resumed")?.is_none(), "the resumed team stopped");
        check_result(case, run, RunStatus::Done, tally)?;
    }
    let left = RunRecord::read(&case.folder.join(run))?;
    case.check_same_samples(plain, &left, tally);
    case.compare_losses("of a team with faults", plain, &left, tally);
    // A half-done update, or the loss of the only device, destroys the state.
    let state_lost_messages = ["`update`", "no other device works on this run"];
    let survives = !stopped.is_some_and(|said| state_lost_messages.iter().any(|message| said.contains(message)));
    let wrong = find_repeated_step(&left.events, survives);
    tally.check("no finished step is lost if its state survives", wrong.is_none(), || {
        format!("{}: {}", case.label, wrong.unwrap_or_default())
    });
    for event in &left.events {
        let Event::DeviceLost { device, reason, .. } = event else { continue };
        let meant = what.iter().any(|injection| match injection {
            Injection::Loss { device: of, .. } | Injection::Silence { device: of, .. } => of == device,
            Injection::OutOfMemory { .. } | Injection::RandomOutOfMemory { .. } => reason.contains("out of memory"),
            Injection::Slow { .. } => false,
        });
        tally.check("only faulty devices are lost", meant, || format!("{}: {device}: {reason}", case.label));
        tally.cover("devices lost");
    }
    Ok(())
}

/// Describes the first step that does not follow the previous one; `None` if each does. A return to the checkpoint is
/// permitted after the loss of a device with a shard. It is also permitted after a stop that destroyed the state (not
/// `survives`).
fn find_repeated_step(events: &[Event], survives: bool) -> Option<String> {
    let (mut done, mut saved) = (0, 0);
    for event in events {
        let next = done + 1;
        match event {
            Event::Start { step, .. } if *step == next || !survives && *step == saved + 1 => done = step - 1,
            Event::Start { step, .. } => return Some(format!("resumes with step {step}, but {done} steps are done")),
            Event::Step { step, .. } if *step == next => done = *step,
            Event::Step { step, .. } => return Some(format!("step {step} after step {done}")),
            Event::Checkpoint { step, .. } => saved = *step,
            Event::DeviceLost { resumed_from_step: Some(resumed_from_step), .. } if *resumed_from_step == saved => {
                done = saved
            }
            Event::DeviceLost { resumed_from_step: Some(resumed_from_step), .. } => {
                return Some(format!("back to step {resumed_from_step}, but {saved} was saved"));
            }
            _ => {}
        }
    }
    None
}

/// Checks `result.json` of a run: whether it has this status, and whether each device held no more than planned and
/// permitted.
fn check_result(case: &RandomRun, run: &str, status: RunStatus, tally: &mut Tally) -> anyhow::Result<()> {
    let path = case.folder.join(run).join("result.json");
    let result: RunResult = serde_json::from_slice(&fs::read(path).context("result.json")?)?;
    tally.check("result.json has the final status", result.status == status, || {
        format!("{}: {:?} for {status:?}", case.label, result.status)
    });
    for memory in &result.memory {
        tally.check("no arena is larger than planned", memory.arena_measured_bytes <= memory.arena_bytes, || {
            format!("{}: {memory:?}", case.label)
        });
        tally.check("every plan is within its load line", memory.predicted_bytes <= memory.budget_bytes, || {
            format!("{}: {memory:?}", case.label)
        });
        let held = memory.measured_bytes.context("what the process holds")?;
        let over = held.saturating_sub(memory.budget_bytes).as_mib();
        let (kind, most) = match run {
            // The tolerance that is promised for a whole process. Arenas are exact to the byte.
            "plain" => ("whole process: above its load line, MiB", memory.predicted_bytes.0 / 100 + TOLERANCE_BYTES),
            // A run that plans again needs memory for planning as well.
            _ => ("whole process: above its load line while it replans, MiB", u64::MAX),
        };
        let near = held.saturating_sub(memory.predicted_bytes).0 <= most;
        tally.figure(kind, over, near, || format!("{}: {memory:?}", case.label));
    }
    Ok(())
}
