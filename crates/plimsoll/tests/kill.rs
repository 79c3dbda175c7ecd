//! Nothing is lost: after `kill -9` at any moment `--resume` ends with the files of a run that was
//! never killed, signals end a run that can go on, and a checkpoint that the disk lost gives way to
//! the one before.

mod common;

use common::{Draw, Place, Running, SMALL, Shape};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Steps on one thread, without pauses, that end with an update of a tenth of their time (as profiled).
const UPDATES: Shape = Shape { hidden: 384, sequence: 8, steps: 30, batch_sequences: 1, save_every: 10, threads: "1" };

/// When a run is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// So long after its start.
    Time(Duration),
    /// So long after its log has so many more lines.
    Line(usize, Duration),
    /// Where the update of the step after so many more lines should be: late in a step as long as the one before it.
    Update(usize),
    /// So long after a save has begun.
    Save(Duration),
    /// So long after the model has begun to be written.
    Model(Duration),
}

impl Moment {
    /// Waits for it; false where the run ends before.
    fn wait(self, place: &Place, run: &mut Running) -> bool {
        let left_aside = |folder: &str, name: &str| {
            let names = fs::read_dir(place.path(folder)).into_iter().flatten().flatten();
            let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.any(|found| found.starts_with(name) && found.ends_with(".partial"))
        };
        let lines = || place.events("run").len();
        let (began, before) = (Instant::now(), lines());
        let (came, then) = match self {
            Moment::Time(after) => (run.until(|| began.elapsed() >= after), Duration::ZERO),
            Moment::Line(line, then) => (run.until(|| lines() >= before + line), then),
            Moment::Update(line) => {
                let bytes = || fs::metadata(place.path("run/events.jsonl")).map_or(0, |file| file.len());
                run.until(|| lines() >= before + line);
                let now = bytes();
                let came = run.until(|| bytes() > now);
                let seconds = place.events("run").iter().rev().find_map(|event| event["seconds"].as_f64());
                (came, Duration::from_secs_f64(0.93 * seconds.unwrap_or(0.0)))
            }
            Moment::Save(then) => (run.until(|| left_aside("run/checkpoints", ".step-")), then),
            Moment::Model(then) => (run.until(|| left_aside("run", ".model")), then),
        };
        std::thread::sleep(then);
        came
    }

    /// Moments of all kinds in turn. A run takes `whole` and logs `lines`.
    fn draw(number: usize, draw: &mut Draw, whole: Duration, lines: usize) -> Moment {
        let mut micros = |end: u64| Duration::from_micros(draw.below(end));
        match number % 8 {
            0 | 4 => Moment::Save(micros(20_000)),
            2 => Moment::Line(1 + micros(lines as u64).as_micros() as usize, micros(5_000)),
            3 | 6 => Moment::Update(1 + micros(lines as u64).as_micros() as usize),
            5 => Moment::Model(micros(10_000)),
            _ => Moment::Time(micros(whole.as_micros() as u64)),
        }
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Moment::Time(after) => write!(f, "{after:.1?} after the start"),
            Moment::Line(line, then) => write!(f, "{then:.1?} after line {line}"),
            Moment::Update(line) => write!(f, "near the update after line {line}"),
            Moment::Save(then) => write!(f, "{then:.1?} into a save"),
            Moment::Model(then) => write!(f, "{then:.1?} into writing the model"),
        }
    }
}

/// What must be the same: the last checkpoint and the model. Of `checkpoint.json` all but the time that it took.
fn last_files(place: &Place, run: &str, steps: u32) -> BTreeMap<PathBuf, Vec<u8>> {
    let last = format!("{run}/checkpoints/step-{steps}");
    let mut files = place.files(&last);
    let mut info: Value = serde_json::from_slice(&files[&PathBuf::from("checkpoint.json")]).unwrap();
    info.as_object_mut().unwrap().remove("elapsed_seconds").unwrap();
    // Measured anew where a run begins anew.
    info.as_object_mut().unwrap().remove("charges_bytes").unwrap();
    files.insert("checkpoint.json".into(), info.to_string().into_bytes());
    files.extend(
        place
            .files(&format!("{run}/model"))
            .into_iter()
            .map(|(path, bytes)| (PathBuf::from("model").join(path), bytes)),
    );
    assert!(files.len() >= 6, "{:?}", files.keys());
    files
}

/// Starts the run, or goes on with it where there is one.
fn go_on(place: &Place) -> Running {
    if place.path("run/run.toml").exists() {
        place.start(&["train", "--resume", "run", "--quiet"])
    } else {
        place.start(&["train", "run.toml", "--quiet"])
    }
}

/// The last step whose checkpoint the log calls complete.
fn saved(events: &[Value]) -> u64 {
    let saved = events.iter().filter(|event| event["event"] == "checkpoint");
    saved.map(|event| event["step"].as_u64().unwrap()).max().unwrap_or(0)
}

/// Kills a run at each moment in turn, lets it end, and compares. Gives a line about each kill.
fn kill_and_compare(shape: &Shape, moments: &[Moment], undisturbed: &BTreeMap<PathBuf, Vec<u8>>) -> Vec<String> {
    let place = Place::new(shape);
    let mut told = Vec::new();
    for moment in moments {
        let mut run = go_on(&place);
        let came = moment.wait(&place, &mut run);
        run.kill();
        let events = place.events("run");
        let steps = events.iter().filter(|event| event["event"] == "step");
        let step = steps.map(|event| event["step"].as_u64().unwrap()).max().unwrap_or(0);
        let aside = place.names("run/checkpoints").into_iter().chain(place.names("run"));
        let aside: Vec<String> = aside.filter(|name| name.ends_with(".partial")).collect();
        let how = if came { "killed" } else { "ended before" };
        told.push(format!("| {moment} | {how} | {step} | {} | {} |", saved(&events), aside.join(", ")));
    }
    let before = place.events("run");
    let was_done = place.path("run/result.json").exists();
    let last = go_on(&place).end();
    assert_eq!(last.code, Some(0), "{}: {told:?}", last.stderr);
    assert_eq!(last.stderr, "", "nothing to warn of: {told:?}");
    let events = place.events("run");
    match events[before.len()..].iter().find(|event| event["event"] == "start") {
        Some(start) => {
            assert!(start["step"].as_u64().unwrap() > saved(&before), "what was saved is not done again: {told:?}");
            assert_eq!(events.last().unwrap()["event"], "end");
        }
        // Every kill came too late, and nothing was left to do.
        None => assert!(was_done && events == before, "it goes on: {told:?}"),
    }
    let left: Vec<String> = place.names("run").into_iter().chain(place.names("run/checkpoints")).collect();
    assert!(left.iter().all(|name| !name.starts_with('.')), "{left:?}");
    let found = last_files(&place, "run", shape.steps);
    assert_eq!(found.keys().collect::<Vec<_>>(), undisturbed.keys().collect::<Vec<_>>());
    for (path, bytes) in &found {
        assert!(*bytes == undisturbed[path], "{} differs: {told:?}", path.display());
    }
    told
}

/// The files of a run that is not killed, and how long it takes.
fn undisturbed(shape: &Shape) -> (BTreeMap<PathBuf, Vec<u8>>, Duration) {
    let place = Place::new(shape);
    let began = Instant::now();
    place.succeed(&["train", "run.toml", "--quiet"]);
    let whole = began.elapsed();
    (last_files(&place, "run", shape.steps), whole)
}

#[test]
fn a_killed_run_ends_with_the_files_of_one_that_was_not() {
    let (files, whole) = undisturbed(&SMALL);
    kill_and_compare(&SMALL, &[Moment::Save(Duration::from_millis(1)), Moment::Line(12, Duration::ZERO)], &files);
    kill_and_compare(&SMALL, &[Moment::Time(whole / 2), Moment::Model(Duration::ZERO)], &files);
    let (files, _) = undisturbed(&UPDATES);
    kill_and_compare(&UPDATES, &[Moment::Update(14)], &files);
}

/// The full count: `cargo xtask kill --seed N --runs M` runs this and says what it prints.
#[test]
#[ignore = "the full count takes minutes: cargo xtask kill"]
fn killed_runs_in_full() {
    let number = |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (seed, runs) = (number("PLIMSOLL_KILL_SEED", 1), number("PLIMSOLL_KILL_RUNS", 20));
    let mut draw = Draw(seed);
    let mut kills = 0;
    println!("| run | steps | killed | | last step in the log | last checkpoint in the log | left aside |");
    println!("|---|---|---|---|---|---|---|");
    let longer = [("saves", Shape { steps: 60, ..SMALL }), ("updates", Shape { steps: 90, save_every: 30, ..UPDATES })];
    for (name, shape) in longer {
        let (files, whole) = undisturbed(&shape);
        for run in 0..runs.div_ceil(2) as usize {
            // Every third run is killed again and again, each time early in what is left of it.
            let times = if run % 3 == 2 { 4 } else { 1 };
            let part = whole * 3 / 4 / times as u32;
            let lines = shape.steps as usize / times;
            let mut moments: Vec<Moment> =
                (0..times).map(|time| Moment::draw(run + time, &mut draw, part, lines)).collect();
            // Once the model is written there is nothing left to kill.
            moments.sort_by_key(|moment| matches!(moment, Moment::Model(_)));
            for told in kill_and_compare(&shape, &moments, &files) {
                kills += u32::from(told.contains("| killed |"));
                println!("| {name} {} | {} {told}", run + 1, shape.steps);
            }
        }
    }
    let runs = 2 * runs.div_ceil(2);
    println!("\nseed {seed}: {kills} kills in {runs} runs; all ended with the bytes of an undisturbed run");
    assert!(u64::from(kills) >= runs, "too many runs ended before they were killed");
}

#[test]
fn signals_finish_the_step_save_and_say_how_to_go_on() {
    // Long enough that no machine ends it before the signal is sent.
    let long = Shape { steps: 400, save_every: 100, ..SMALL };
    let (files, _) = undisturbed(&long);
    let place = Place::new(&long);
    for signal in ["INT", "TERM", "HUP"] {
        let before = place.events("run").len();
        let mut run = go_on(&place);
        assert!(run.until(|| place.events("run").len() > before + 3), "{signal}");
        run.signal(signal);
        let message = run.end().refusal(4);
        assert!(message.contains("\n  hint: it goes on with: plimsoll train --resume "), "{message}");
        let step = place.json("run/result.json")["steps"].as_u64().unwrap();
        assert_eq!(place.json("run/result.json")["status"], "stopped");
        assert!(place.path(&format!("run/checkpoints/step-{step}")).is_dir(), "{signal}");
        let events = place.events("run");
        let last = events.iter().rfind(|event| event["event"] == "step").unwrap();
        assert_eq!((last["step"].as_u64(), saved(&events)), (Some(step), step), "no step was done for nothing");
    }
    assert_eq!(go_on(&place).end().code, Some(0));
    assert!(last_files(&place, "run", long.steps) == files, "stopped three times, and the same bytes");
}

#[test]
fn a_second_interrupt_stops_at_once() {
    // A step that takes far longer than the time between the two.
    let place = Place::new(&Shape { batch_sequences: 1 << 17, ..SMALL });
    let mut run = place.start(&["train", "run.toml", "--set", "recipe.micro_batch=8"]);
    assert!(run.until(|| place.events("run").iter().any(|event| event["event"] == "start")));
    run.signal("INT");
    std::thread::sleep(Duration::from_millis(100));
    run.signal("INT");
    assert_eq!(run.end().code, Some(4));
    assert!(place.events("run").iter().all(|event| event["event"] == "start"), "no step was finished");
}

/// Cuts off the newest checkpoint, in one way or another, and lets the run go on.
#[test]
fn a_checkpoint_that_is_not_whole_gives_way_to_the_one_before() {
    let (files, _) = undisturbed(&SMALL);
    let place = Place::new(&SMALL);
    let newest = |name: &str| place.path("run/checkpoints/step-24").join(name);
    let cut = |name: &str, bytes: u64| {
        let file = OpenOptions::new().write(true).open(newest(name)).unwrap();
        file.set_len(file.metadata().unwrap().len() - bytes).unwrap();
    };
    let harms: [(&str, &dyn Fn()); 6] = [
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
    place.succeed(&["train", "run.toml"]);
    for (problem, harm) in harms {
        harm();
        let done = place.succeed(&["train", "--resume", "run", "--quiet"]);
        let warning = &done.stderr;
        assert!(warning.starts_with("warning: ") && warning.contains("step-24 is not whole: "), "{warning}");
        assert!(warning.contains(problem) && warning.contains("goes on from "), "{problem}: {warning}");
        assert!(warning.trim_end().ends_with("checkpoints/step-20"), "{warning}");
        assert!(last_files(&place, "run", SMALL.steps) == files, "{problem}");
    }
    // None is whole: nothing begins anew on its own.
    for step in ["step-20", "step-24"] {
        place.write(&format!("run/checkpoints/{step}/checkpoint.json"), "");
    }
    let before = place.files("run");
    let refusal = place.refuse(2, &["train", "--resume", "run"]);
    assert!(refusal.contains("no checkpoint is whole") && refusal.contains("step-20"), "{refusal}");
    assert!(before == place.files("run"), "nothing is touched");
    // With none at all it begins from the start.
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    place.succeed(&["train", "--resume", "run"]);
    assert!(last_files(&place, "run", SMALL.steps) == files);
}

#[test]
fn a_broken_checkpoint_of_a_later_step_costs_no_good_one() {
    let place = Place::new(&SMALL);
    place.succeed(&["train", "run.toml"]);
    fs::create_dir(place.path("run/checkpoints/step-1000")).unwrap();
    fs::remove_dir_all(place.path("run/checkpoints/step-24")).unwrap();
    place.succeed(&["train", "--resume", "run", "--set", "train.keep=1"]);
    assert_eq!(place.names("run/checkpoints"), ["step-1000", "step-24"]);
}

#[test]
fn a_recipe_that_does_not_fit_any_more_is_planned_anew_and_says_so() {
    let place = Place::new(&Shape { batch_sequences: 128, ..SMALL });
    let mut run = place.start(&["train", "run.toml", "--quiet"]);
    assert!(run.until(|| place.path("run/checkpoints/step-4").exists()));
    run.signal("TERM");
    assert_eq!(run.end().code, Some(4));
    let peak = place.json("run/plan.json")["devices"][0]["peak_bytes"].as_u64().unwrap();
    let budget = format!("{}B", peak - 1);
    let done = place.succeed(&["train", "--resume", "run", "--budget", &budget, "--quiet"]);
    assert!(done.stderr.starts_with("warning: planned anew (micro-batch "), "{}", done.stderr);
    assert!(done.stderr.contains("last bits may differ"), "{}", done.stderr);
    // A recipe that is nonsense for this model is planned anew, too.
    let text =
        place.read("run/checkpoints/step-20/checkpoint.json").replace("\"micro_batch\": ", "\"micro_batch\": 99");
    place.write("run/checkpoints/step-20/checkpoint.json", text);
    fs::remove_dir_all(place.path("run/checkpoints/step-24")).unwrap();
    place.succeed(&["train", "--resume", "run"]);
}
