//! Several runs on one set of devices, through the real binary: packed by bytes under lines that hold, one failing
//! without the others, stopped and killed and gone on with.

mod common;

use common::{Place, Running, Shape, config};
use serde_json::Value;
use std::process::Command;

/// A step takes a millisecond or so.
const QUICK: Shape =
    Shape { hidden: 32, sequence: 16, steps: 12, batch_sequences: 4, save_every: 4, threads: "\"auto\"" };

/// As long as it takes to be caught at it.
const LONG: Shape = Shape { steps: 600, save_every: 50, ..QUICK };

/// Two devices; what a process is charged with leaves room for a few workers on the larger one.
const PAIR: [&str; 2] = ["--devices", "virtual:a=150MiB@0.6,virtual:b=50MiB@0.2"];

fn report(place: &Place) -> Value {
    place.json("sweep/sweep.json")
}

fn row<'a>(report: &'a Value, name: &str) -> &'a Value {
    let rows = report["runs"].as_array().unwrap();
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}: {report}"))
}

fn steps(place: &Place, name: &str) -> usize {
    place.events(&format!("sweep/{name}")).iter().filter(|event| event["event"] == "step").count()
}

/// A sweep in the folder `sweep`.
fn words<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["sweep"], more, &PAIR, &["--dir", "sweep"]].concat()
}

/// Waits until runs are under way, and gives their processes.
fn under_way(place: &Place, sweep: &mut Running, names: &[&str]) -> Vec<u64> {
    assert!(sweep.until(|| names.iter().all(|name| steps(place, name) > 5)), "it ended before");
    let report = report(place);
    names.iter().map(|name| row(&report, name)["pid"].as_u64().unwrap_or_else(|| panic!("{report}"))).collect()
}

/// Adds up what lies over each other in time: never more than a device has. What ran is what was given.
fn check_lines(place: &Place, report: &Value) {
    let rows = report["runs"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
    for row in rows {
        let name = row["name"].as_str().unwrap();
        let given = number(&row["predicted_bytes"]);
        assert_eq!(number(&place.json(&format!("sweep/{name}/plan.json"))["devices"][0]["budget_bytes"]), given);
        assert!(number(&row["measured_bytes"]) <= given, "{row}");
        let started = number(&row["started"]);
        let beside = rows.iter().filter(|other| {
            let began = number(&other["started"]);
            other["device"] == row["device"] && began <= started && started < began + number(&other["seconds"]) - 0.05
        });
        let (mut bytes, mut share) = (0.0, 0.0);
        for other in beside {
            bytes += number(&other["predicted_bytes"]);
            share += number(&other["share"]);
        }
        let device = report["devices"].as_array().unwrap().iter().find(|device| device["name"] == row["device"]);
        assert!(bytes <= number(&device.unwrap()["budget_bytes"]), "{report}");
        assert!(share <= 1.0 + 1e-9, "{report}");
    }
}

#[test]
fn a_grid_is_trained_side_by_side_on_unequal_devices_and_no_line_is_crossed() {
    let place = Place::new(&QUICK);
    let grid = [
        "run.toml",
        "--set",
        "train.learning_rate=1e-2,1e-3,1e-4",
        "--set",
        "train.seed=1,2",
        "--set",
        "recipe.micro_batch=2",
    ];
    let done = place.succeed(&[&words(&grid)[..], &["--json", "report.json"]].concat());
    let report = report(&place);
    assert_eq!(place.json("report.json"), report);
    let rows = report["runs"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let name = row["name"].as_str().unwrap();
        assert_eq!((row["state"].as_str(), row["steps"].as_u64()), (Some("done"), Some(12)), "{row}");
        assert_eq!((row["retries"].as_u64(), row["exit"].as_i64()), (Some(0), Some(0)), "{row}");
        assert!(place.path(&format!("sweep/{name}/model/config.json")).exists());
        assert!(!place.path(&format!("sweep/{name}.log")).exists(), "nobody complained");
    }
    check_lines(&place, &report);
    let workers = |device: usize| report["devices"][device]["workers"].as_u64().unwrap();
    assert!(workers(0) > 1, "bytes for several: {report}");
    assert!(done.stdout.contains("6 of 6 runs done (100.0 %), 0 retries"), "{}", done.stdout);
    assert!(done.stdout.contains("virtual:a (simulated)"), "{}", done.stdout);
    // Where a run happens to run changes no bit of it.
    let name = "run-learning_rate=1e-3-seed=2";
    let alone = [
        "train",
        "run.toml",
        "--quiet",
        "--set",
        "train.learning_rate=1e-3",
        "--set",
        "train.seed=2",
        "--set",
        "recipe.micro_batch=2",
    ];
    place.succeed(&alone);
    assert_eq!(place.json("run/result.json")["loss"], place.json(&format!("sweep/{name}/result.json"))["loss"]);
    // What is done stays done.
    let again = place.succeed(&["sweep", "--resume", "sweep"]);
    assert!(again.stderr.contains("nothing was changed"), "{}", again.stderr);
    assert_eq!(self::report(&place), report);
}

#[test]
fn a_run_that_fits_nowhere_or_is_wrong_is_told_and_the_others_go_on() {
    let place = Place::new(&QUICK);
    std::fs::create_dir(place.path("big")).unwrap();
    place.write("big/config.json", config(1024).to_string());
    place.write("big.toml", place.read("run.toml").replace("\"model\"", "\"big\""));
    place.write("wrong.toml", place.read("run.toml").replace("train.jsonl", "nowhere.jsonl"));
    let done = place.run(&words(&["big.toml", "wrong.toml", "run.toml"]));
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    assert!(done.stderr.starts_with("error: 2 of 3 runs not done\n  hint: "), "{}", done.stderr);
    let report = report(&place);
    let big = row(&report, "big");
    assert_eq!((big["state"].as_str(), big["exit"].as_i64()), (Some("does_not_fit"), Some(3)));
    assert!(
        big["why"].as_str().unwrap().contains("virtual:b has 50.00 MiB, the least that would do there is "),
        "{big}"
    );
    let wrong = row(&report, "wrong");
    assert_eq!((wrong["state"].as_str(), wrong["exit"].as_i64()), (Some("failed"), Some(2)));
    assert!(wrong["why"].as_str().unwrap().contains("nowhere.jsonl"), "{wrong}");
    assert_eq!(row(&report, "run")["state"], "done");
    assert!(done.stdout.contains("1 of 3 runs done (33.3 %)"), "{}", done.stdout);
}

#[test]
fn a_worker_that_is_killed_goes_on_and_its_neighbour_never_notices() {
    let place = Place::new(&LONG);
    let mut sweep = place.start(&words(&["run.toml", "--set", "train.seed=1,2"]));
    let pids = under_way(&place, &mut sweep, &["run-seed=1", "run-seed=2"]);
    assert!(sweep.until(|| steps(&place, "run-seed=1") > 60), "it ended before");
    assert!(Command::new("kill").args(["-KILL", &pids[0].to_string()]).status().unwrap().success());
    let done = sweep.end();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let report = report(&place);
    let (killed, other) = (row(&report, "run-seed=1"), row(&report, "run-seed=2"));
    assert_eq!((killed["state"].as_str(), killed["retries"].as_u64()), (Some("done"), Some(1)), "{killed}");
    assert_eq!((other["state"].as_str(), other["retries"].as_u64()), (Some("done"), Some(0)), "{other}");
    assert!(
        done.stdout.contains("again  run-seed=1: ") && done.stdout.contains("ended by signal 9"),
        "{}",
        done.stdout
    );
    // It went on from its checkpoint.
    assert!(steps(&place, "run-seed=1") < 600 + 120, "{}", steps(&place, "run-seed=1"));
    assert_eq!(steps(&place, "run-seed=2"), 600);
}

#[test]
fn a_refusal_in_one_worker_does_not_touch_the_others_and_one_that_gives_up_is_started_again() {
    let place = Place::new(&QUICK);
    let grid = ["run.toml", "--set", "train.seed=1,2,3", "--set", "recipe.micro_batch=2"];
    let stubborn = [["--inject-oom", "run-seed=3=6:update"]; 12].concat();
    let never = ["--inject-oom", "run-seed=1=3:evaluate"];
    let done =
        place.succeed(&[&words(&grid)[..], &["--inject-oom", "run-seed=2=3:backward"], &never, &stubborn].concat());
    assert!(done.stderr.contains("run-seed=1: --inject-oom 3:evaluate was never reached"), "{}", done.stderr);
    let report = report(&place);
    let of = |name: &str, key: &str| row(&report, name)[key].as_u64().unwrap();
    assert_eq!([1, 2, 3].map(|seed| of(&format!("run-seed={seed}"), "steps")), [12, 12, 12]);
    assert_eq!((of("run-seed=1", "retreats"), of("run-seed=1", "retries")), (0, 0));
    assert_eq!((of("run-seed=2", "retreats"), of("run-seed=2", "retries")), (1, 0));
    assert_eq!(of("run-seed=3", "retries"), 1);
    place.succeed(&["train", "run.toml", "--quiet", "--set", "train.seed=1", "--set", "recipe.micro_batch=2"]);
    assert_eq!(place.json("run/result.json")["loss"], place.json("sweep/run-seed=1/result.json")["loss"]);
}

#[test]
fn a_sweep_that_is_stopped_saves_all_and_goes_on() {
    let place = Place::new(&LONG);
    // Two of a kind, or the slower one would be left for the faster.
    let alike = ["--devices", "virtual:a=50MiB@0.3,virtual:b=50MiB@0.3", "--workers", "1", "--dir", "sweep"];
    let mut sweep = place.start(&[&["sweep", "run.toml", "--set", "train.seed=1,2"], &alike[..]].concat());
    under_way(&place, &mut sweep, &["run-seed=1", "run-seed=2"]);
    sweep.signal("INT");
    let done = sweep.end();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    assert!(done.stderr.contains("plimsoll sweep --resume "), "{}", done.stderr);
    let stopped = report(&place);
    for name in ["run-seed=1", "run-seed=2"] {
        let row = row(&stopped, name);
        assert_eq!(row["state"], "stopped", "{row}");
        assert!(row["pid"].is_null() && row["exit"] == 4, "{row}");
        assert_eq!(place.json(&format!("sweep/{name}/result.json"))["status"], "stopped");
    }
    place.succeed(&["sweep", "--resume", "sweep", "--quiet"]);
    let report = report(&place);
    assert!(report["runs"].as_array().unwrap().iter().all(|row| row["state"] == "done"), "{report}");
    assert!(report["workers"] == 1 && report["devices"][0]["workers"] == 1, "{report}");
    // Nothing was done twice.
    assert_eq!([steps(&place, "run-seed=1"), steps(&place, "run-seed=2")], [600, 600]);
}

#[test]
fn workers_of_a_sweep_that_was_killed_stop_and_another_one_goes_on() {
    let place = Place::new(&LONG);
    let mut sweep = place.start(&words(&["run.toml", "--set", "train.seed=1,2"]));
    let pids = under_way(&place, &mut sweep, &["run-seed=1", "run-seed=2"]);
    sweep.kill();
    // At once, while they may still be saving: it waits for them.
    place.succeed(&["sweep", "--resume", "sweep"]);
    // Whoever inherits them may not have asked yet how they ended: they count as gone.
    let state = |pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let gone = |stat: String| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'));
    assert!(pids.iter().all(|pid| gone(state(pid))));
    let report = report(&place);
    assert!(report["runs"].as_array().unwrap().iter().all(|row| row["state"] == "done"), "{report}");
    assert_eq!([steps(&place, "run-seed=1"), steps(&place, "run-seed=2")], [600, 600]);
}

#[test]
fn wrong_words_are_told_before_anything_runs() {
    let place = Place::new(&QUICK);
    let refuse = |more: &[&str]| place.refuse(2, &[&["sweep", "run.toml", "--dir", "sweep"], more].concat());
    assert!(refuse(&["--set", "run.dir=a,b"]).contains("--dir"));
    assert!(refuse(&["--set", "train.seeds=1,2"]).contains("did you mean `train.seed`"));
    assert!(refuse(&["--devices", "rtx3090"]).contains("devices on paper can only be planned for"));
    assert!(refuse(&["--devices", "virtual:a=1GiB@9999"]).contains("cores"));
    assert!(refuse(&["--inject-oom", "run"]).contains("RUN=STEP"));
    assert!(place.refuse(2, &["sweep", "--resume", "nowhere"]).contains("sweep.json"));
    assert!(place.names("sweep").is_empty());
}
