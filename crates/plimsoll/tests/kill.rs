//! Runs that are killed, stopped by a signal, or have a damaged checkpoint: `--resume` ends with the files of an
//! undisturbed run, bit for bit.

use crate::common::{Rng, Running, SMALL, Shape, Workspace};
use plimsoll_device::cache::sealed_json;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A run on one thread in which the optimizer update takes a tenth of each step, measured with a profiler.
const UPDATES: Shape = Shape { hidden: 384, sequence: 8, steps: 30, batch_sequences: 1, save_every: 10, threads: "1" };

/// The moment at which a run is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Time after the start.
    Time(Duration),
    /// Time after the event log has grown by a number of lines.
    Line(usize, Duration),
    /// During the update of the step after a number of new lines, estimated from the duration of the previous step.
    Update(usize),
    /// Time after a save has begun.
    Save(Duration),
    /// Time after the program has begun to write the model.
    Model(Duration),
}

impl Moment {
    /// Waits for the moment. Returns false if the run ends before.
    fn wait(self, workspace: &Workspace, run: &mut Running) -> bool {
        let has_partial_file = |folder: &str, name: &str| {
            let names = fs::read_dir(workspace.path(folder)).into_iter().flatten().flatten();
            let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.any(|file| file.starts_with(name) && file.ends_with(".partial"))
        };
        let lines = || workspace.events("run").len();
        let (started_at, before) = (Instant::now(), lines());
        let (reached, delay) = match self {
            Moment::Time(after) => (run.wait_until(|| started_at.elapsed() >= after), Duration::ZERO),
            Moment::Line(line, delay) => (run.wait_until(|| lines() >= before + line), delay),
            Moment::Update(line) => {
                let bytes = || fs::metadata(workspace.path("run/events.jsonl")).map_or(0, |file| file.len());
                run.wait_until(|| lines() >= before + line);
                let now = bytes();
                let reached = run.wait_until(|| bytes() > now);
                let seconds = workspace.events("run").iter().rev().find_map(|event| event["seconds"].as_f64());
                (reached, Duration::from_secs_f64(0.93 * seconds.unwrap_or(0.0)))
            }
            Moment::Save(delay) => (run.wait_until(|| has_partial_file("run/checkpoints", ".step-")), delay),
            Moment::Model(delay) => (run.wait_until(|| has_partial_file("run", ".model")), delay),
        };
        std::thread::sleep(delay);
        reached
    }

    /// Returns a random moment; the kinds alternate with `number`. The run takes `duration` and logs `lines` lines.
    fn random(number: usize, rng: &mut Rng, duration: Duration, lines: usize) -> Moment {
        let mut micros = |end: u64| Duration::from_micros(rng.below(end));
        match number % 8 {
            0 | 4 => Moment::Save(micros(20_000)),
            2 => Moment::Line(1 + micros(lines as u64).as_micros() as usize, micros(5_000)),
            3 | 6 => Moment::Update(1 + micros(lines as u64).as_micros() as usize),
            5 => Moment::Model(micros(10_000)),
            _ => Moment::Time(micros(duration.as_micros() as u64)),
        }
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Moment::Time(after) => write!(f, "{after:.1?} after the start"),
            Moment::Line(line, delay) => write!(f, "{delay:.1?} after line {line}"),
            Moment::Update(line) => write!(f, "near the update after line {line}"),
            Moment::Save(delay) => write!(f, "{delay:.1?} into a save"),
            Moment::Model(delay) => write!(f, "{delay:.1?} into writing the model"),
        }
    }
}

/// Reads the files that have to be identical: the last checkpoint and the model. Times and measured charges in
/// `checkpoint.json` are removed.
fn last_files(workspace: &Workspace, run: &str, steps: u32) -> BTreeMap<PathBuf, Vec<u8>> {
    let last = format!("{run}/checkpoints/step-{steps}");
    let mut files = workspace.read_files(&last);
    let mut info: Value = serde_json::from_slice(&files[&PathBuf::from("checkpoint.json")]).unwrap();
    // Charges are measured again at every start. The checksum covers them and the time.
    for key in ["elapsed_seconds", "charges_bytes", "crc32"] {
        info.as_object_mut().unwrap().remove(key).unwrap();
    }
    files.insert("checkpoint.json".into(), info.to_string().into_bytes());
    files.extend(
        workspace
            .read_files(&format!("{run}/model"))
            .into_iter()
            .map(|(path, bytes)| (PathBuf::from("model").join(path), bytes)),
    );
    assert!(files.len() >= 6, "{:?}", files.keys());
    files
}

/// Starts the run, or resumes it if it exists.
fn start_or_resume(workspace: &Workspace) -> Running {
    if workspace.path("run/run.toml").exists() {
        workspace.start(&["train", "--resume", "run", "--quiet"])
    } else {
        workspace.start(&["train", "run.toml", "--quiet"])
    }
}

/// Returns the last step with a completed checkpoint in the log.
fn last_saved_step(events: &[Value]) -> u64 {
    let last_saved_step = events.iter().filter(|event| event["event"] == "checkpoint");
    last_saved_step.map(|event| event["step"].as_u64().unwrap()).max().unwrap_or(0)
}

/// The warning of a resumed run that was killed before its first checkpoint.
const NO_CHECKPOINT: &str = "warning: the run has no checkpoint yet, so it begins at step 1\n";

/// Kills a run at each moment in turn, lets it finish, and compares its files. Returns one table row per kill.
fn kill_and_compare(shape: &Shape, moments: &[Moment], undisturbed: &BTreeMap<PathBuf, Vec<u8>>) -> Vec<String> {
    let workspace = Workspace::new(shape);
    let mut lines_about_kills = Vec::new();
    for moment in moments {
        let mut run = start_or_resume(&workspace);
        let reached = moment.wait(&workspace, &mut run);
        run.kill();
        let events = workspace.events("run");
        let steps = events.iter().filter(|event| event["event"] == "step");
        let step = steps.map(|event| event["step"].as_u64().unwrap()).max().unwrap_or(0);
        let aside = workspace.file_names("run/checkpoints").into_iter().chain(workspace.file_names("run"));
        let aside: Vec<String> = aside.filter(|name| name.ends_with(".partial")).collect();
        let how = if reached { "killed" } else { "ended before" };
        lines_about_kills.push(format!(
            "| {moment} | {how} | {step} | {} | {} |",
            last_saved_step(&events),
            aside.join(", ")
        ));
    }
    let before = workspace.events("run");
    let was_done = workspace.path("run/result.json").exists();
    let last = start_or_resume(&workspace).wait();
    assert_eq!(last.code, Some(0), "{}: {lines_about_kills:?}", last.stderr);
    let may_say = ["", NO_CHECKPOINT];
    assert!(may_say.contains(&&*last.stderr), "{}: {lines_about_kills:?}", last.stderr);
    let events = workspace.events("run");
    match events[before.len()..].iter().find(|event| event["event"] == "start") {
        Some(start) => {
            assert!(
                start["step"].as_u64().unwrap() > last_saved_step(&before),
                "saved steps are not repeated: {lines_about_kills:?}"
            );
            assert_eq!(events.last().unwrap()["event"], "end");
        }
        // Every kill came after the end of the run.
        None => assert!(was_done && events == before, "the run did not resume: {lines_about_kills:?}"),
    }
    let left: Vec<String> =
        workspace.file_names("run").into_iter().chain(workspace.file_names("run/checkpoints")).collect();
    assert!(left.iter().all(|name| !name.starts_with('.')), "{left:?}");
    let files = last_files(&workspace, "run", shape.steps);
    assert_eq!(files.keys().collect::<Vec<_>>(), undisturbed.keys().collect::<Vec<_>>());
    for (path, bytes) in &files {
        assert!(*bytes == undisturbed[path], "{} differs: {lines_about_kills:?}", path.display());
    }
    lines_about_kills
}

/// Returns the files and the duration of a run that is not killed.
fn undisturbed(shape: &Shape) -> (BTreeMap<PathBuf, Vec<u8>>, Duration) {
    let workspace = Workspace::new(shape);
    let started_at = Instant::now();
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let duration = started_at.elapsed();
    (last_files(&workspace, "run", shape.steps), duration)
}

#[test]
fn killed_run_resumes_to_identical_files() {
    let (files, duration) = undisturbed(&SMALL);
    kill_and_compare(&SMALL, &[Moment::Save(Duration::from_millis(1)), Moment::Line(12, Duration::ZERO)], &files);
    kill_and_compare(&SMALL, &[Moment::Time(duration / 2), Moment::Model(Duration::ZERO)], &files);
    let (files, _) = undisturbed(&UPDATES);
    kill_and_compare(&UPDATES, &[Moment::Update(14)], &files);
}

/// The long version with random moments, run by `cargo xtask kill --seed N --runs M`.
#[test]
#[ignore = "takes minutes: cargo xtask kill"]
fn killed_runs_in_full() {
    let number = |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (seed, runs) = (number("PLIMSOLL_KILL_SEED", 1), number("PLIMSOLL_KILL_RUNS", 20));
    let mut rng = Rng(seed);
    let mut kills = 0;
    println!("| run | steps | killed | | last step in the log | last checkpoint in the log | left aside |");
    println!("|---|---|---|---|---|---|---|");
    let longer = [("saves", Shape { steps: 60, ..SMALL }), ("updates", Shape { steps: 90, save_every: 30, ..UPDATES })];
    for (name, shape) in longer {
        let (files, duration) = undisturbed(&shape);
        for run in 0..runs.div_ceil(2) as usize {
            // Every third run is killed four times, each time early in its remaining part.
            let times = if run % 3 == 2 { 4 } else { 1 };
            let part = duration * 3 / 4 / times as u32;
            let lines = shape.steps as usize / times;
            let mut moments: Vec<Moment> =
                (0..times).map(|time| Moment::random(run + time, &mut rng, part, lines)).collect();
            // After the model is written the run is over, so that moment comes last.
            moments.sort_by_key(|moment| matches!(moment, Moment::Model(_)));
            for row in kill_and_compare(&shape, &moments, &files) {
                kills += u32::from(row.contains("| killed |"));
                println!("| {name} {} | {} {row}", run + 1, shape.steps);
            }
        }
    }
    let runs = 2 * runs.div_ceil(2);
    println!("\nseed {seed}: {kills} kills in {runs} runs; all ended with the bytes of an undisturbed run");
    assert!(u64::from(kills) >= runs, "too many runs ended before they were killed");
}

#[test]
fn signals_save_and_name_resume_command() {
    // Long enough that the run does not end before the signal is sent.
    let long = Shape { steps: 400, save_every: 100, ..SMALL };
    let (files, _) = undisturbed(&long);
    let workspace = Workspace::new(&long);
    for signal in ["INT", "TERM", "HUP"] {
        let before = workspace.events("run").len();
        let mut run = start_or_resume(&workspace);
        assert!(run.wait_until(|| workspace.events("run").len() > before + 3), "{signal}");
        run.signal(signal);
        let message = run.wait().refusal(4);
        assert!(message.contains("\n  hint: to resume: plimsoll train --resume "), "{message}");
        let step = workspace.json("run/result.json")["steps"].as_u64().unwrap();
        assert_eq!(workspace.json("run/result.json")["status"], "stopped");
        assert!(workspace.path(&format!("run/checkpoints/step-{step}")).is_dir(), "{signal}");
        let events = workspace.events("run");
        let last = events.iter().rfind(|event| event["event"] == "step").unwrap();
        assert_eq!((last["step"].as_u64(), last_saved_step(&events)), (Some(step), step), "the last step is saved");
    }
    assert_eq!(start_or_resume(&workspace).wait().code, Some(0));
    assert!(last_files(&workspace, "run", long.steps) == files, "stopped three times, and the same bytes");
}

#[test]
fn second_interrupt_stops_immediately() {
    // One step takes far longer than the time between the two signals.
    let workspace = Workspace::new(&Shape { batch_sequences: 1 << 17, ..SMALL });
    let mut run = workspace.start(&["train", "run.toml", "--set", "recipe.micro_batch=8"]);
    assert!(run.wait_until(|| workspace.events("run").iter().any(|event| event["event"] == "start")));
    run.signal("INT");
    let stderr = || workspace.read("1.stderr");
    assert!(run.wait_until(|| stderr().ends_with('\n')), "{}", stderr());
    let note = stderr();
    assert!(note.starts_with("note: stopping: finishing step 1") && note.lines().count() == 1, "{note}");
    assert!(note.ends_with("; Ctrl-C again to stop now\n"), "{note}");
    assert!(workspace.path("run/control.sock").exists());
    run.signal("INT");
    let done = run.wait();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let ended = &done.stderr[note.len()..];
    let hint = "  hint: there is no checkpoint yet; to start from step 0: plimsoll train --resume ";
    assert!(ended.starts_with(&format!("stopped: at once, by a second Ctrl-C\n{hint}")), "{ended}");
    assert!(!workspace.path("run/control.sock").exists(), "no socket of an ended run stays");
    assert!(workspace.events("run").iter().all(|event| event["event"] == "start"), "no step was finished");
    // Nothing was saved, so a new run may take the folder.
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "train.batch_tokens=256"]);
}

#[test]
fn run_stopped_before_training_is_named() {
    let workspace = Workspace::new(&SMALL);
    // The device never opens, so the run writes no run.toml.
    let silent = ["--devices", "virtual:a=64MiB@0.4", "--inject-silence", "virtual:a:0:open:forever"];
    let wait = ["--set", "run.heartbeat_seconds=100"];
    let mut run = workspace.start(&[&["train", "run.toml"], &silent[..], &wait].concat());
    assert!(run.wait_until(|| workspace.path("run/control.sock").exists()));
    let stderr = || workspace.read("1.stderr");
    run.signal("INT");
    assert!(run.wait_until(|| stderr().contains("note: stopping: finishing the next step; ")), "{}", stderr());
    run.signal("INT");
    let done = run.wait();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    assert!(
        done.stderr.ends_with("  hint: the run had not started yet; give the same command again\n"),
        "{}",
        done.stderr
    );
    assert_eq!(workspace.file_names("run"), ["events.jsonl"]);
    let refusal = workspace.expect_refusal(2, &["train", "--resume", "run"]);
    let message = "run: this run ended before it began to train, so there is nothing to resume\n";
    assert!(refusal.contains(message), "{refusal}");
    // The folder takes a new run.
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "train.steps=1"]);
}

/// Damages the newest checkpoint in several ways, and resumes the run each time.
#[test]
fn damaged_checkpoint_falls_back_to_previous() {
    let (files, _) = undisturbed(&SMALL);
    let workspace = Workspace::new(&SMALL);
    let newest = |name: &str| workspace.path("run/checkpoints/step-24").join(name);
    let cut = |name: &str, bytes: u64| {
        let file = OpenOptions::new().write(true).open(newest(name)).unwrap();
        file.set_len(file.metadata().unwrap().len() - bytes).unwrap();
    };
    let flip = |name: &str, back: usize| {
        let mut bytes = fs::read(newest(name)).unwrap();
        let at = bytes.len() - back;
        bytes[at] ^= 0x40;
        fs::write(newest(name), bytes).unwrap();
    };
    let damages: [(&str, &dyn Fn()); 7] = [
        ("state.safetensors: its checksum does not match", &|| flip("state.safetensors", 100)),
        ("state.safetensors has ", &|| cut("state.safetensors", 1)),
        ("state.safetensors: ", &|| fs::remove_file(newest("state.safetensors")).unwrap()),
        ("checkpoint.json: ", &|| fs::remove_file(newest("checkpoint.json")).unwrap()),
        ("checkpoint.json: ", &|| fs::write(newest("checkpoint.json"), "}garbage{").unwrap()),
        ("checkpoint.json: ", &|| cut("checkpoint.json", 20)),
        ("state.safetensors: ", &|| {
            let bytes = fs::read(newest("state.safetensors")).unwrap();
            fs::write(newest("state.safetensors"), vec![b'x'; bytes.len()]).unwrap();
        }),
    ];
    workspace.succeed(&["train", "run.toml"]);
    for (problem, damage) in damages {
        damage();
        let done = workspace.succeed(&["train", "--resume", "run", "--quiet"]);
        let warning = &done.stderr;
        assert!(warning.starts_with("warning: ") && warning.contains("step-24 is not whole: "), "{warning}");
        assert!(warning.contains(problem) && warning.contains("resumes from "), "{problem}: {warning}");
        assert!(warning.trim_end().ends_with("checkpoints/step-20"), "{warning}");
        assert!(last_files(&workspace, "run", SMALL.steps) == files, "{problem}");
    }
    // All checkpoints are damaged: the run does not restart from the beginning by itself.
    for step in ["step-20", "step-24"] {
        workspace.write(&format!("run/checkpoints/{step}/checkpoint.json"), "");
    }
    let before = workspace.read_files("run");
    let refusal = workspace.expect_refusal(2, &["train", "--resume", "run"]);
    assert!(refusal.contains("no checkpoint is whole") && refusal.contains("step-20"), "{refusal}");
    assert!(before == workspace.read_files("run"), "nothing is touched");
    // Without any checkpoint the run starts from the beginning.
    fs::remove_dir_all(workspace.path("run/checkpoints")).unwrap();
    let resumed = workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_eq!(resumed.stderr, NO_CHECKPOINT);
    assert!(last_files(&workspace, "run", SMALL.steps) == files);
}

#[test]
fn broken_later_checkpoint_deletes_no_valid_one() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml"]);
    fs::create_dir(workspace.path("run/checkpoints/step-1000")).unwrap();
    fs::remove_dir_all(workspace.path("run/checkpoints/step-24")).unwrap();
    workspace.succeed(&["train", "--resume", "run", "--set", "train.keep=1"]);
    assert_eq!(workspace.file_names("run/checkpoints"), ["step-1000", "step-24"]);
}

#[test]
fn resume_replans_recipe_that_no_longer_fits() {
    let workspace = Workspace::new(&Shape { batch_sequences: 128, ..SMALL });
    let mut run = workspace.start(&["train", "run.toml", "--quiet"]);
    assert!(run.wait_until(|| workspace.path("run/checkpoints/step-4").exists()));
    run.signal("TERM");
    assert_eq!(run.wait().code, Some(4));
    let peak = workspace.json("run/plan.json")["devices"][0]["peak_bytes"].as_u64().unwrap();
    let budget = format!("{}B", peak - 1);
    let done = workspace.succeed(&["train", "--resume", "run", "--budget", &budget, "--quiet"]);
    assert!(done.stderr.starts_with("warning: the plan changed (micro-batch "), "{}", done.stderr);
    assert!(done.stderr.contains("results may differ in the last bits"), "{}", done.stderr);
    // A recipe that is invalid for this model is replaced as well.
    let text =
        workspace.read("run/checkpoints/step-20/checkpoint.json").replace("\"micro_batch\": ", "\"micro_batch\": 99");
    let sealed = sealed_json::seal(&serde_json::from_str::<Value>(&text).unwrap()).unwrap();
    workspace.write("run/checkpoints/step-20/checkpoint.json", sealed.to_string());
    fs::remove_dir_all(workspace.path("run/checkpoints/step-24")).unwrap();
    workspace.succeed(&["train", "--resume", "run"]);
}
