//! `plimsoll sweep`: runs share devices within the load lines, fail without affecting each other, and a stopped or killed
//! sweep can be resumed.

use crate::common::{Running, Shape, Workspace, config};
use serde_json::Value;
use std::process::Command;

/// A short run with steps of about a millisecond.
const QUICK: Shape =
    Shape { hidden: 32, sequence: 16, steps: 12, batch_sequences: 4, save_every: 4, threads: "\"auto\"" };

/// A run that is long enough to be interrupted.
const LONG: Shape = Shape { steps: 600, save_every: 50, ..QUICK };

/// Two devices; the charges of a process leave room for a few workers on the larger one.
const PAIR: [&str; 2] = ["--devices", "virtual:a=150MiB@0.6,virtual:b=50MiB@0.2"];

fn report(workspace: &Workspace) -> Value {
    workspace.json("sweep/sweep.json")
}

fn row<'a>(report: &'a Value, name: &str) -> &'a Value {
    let rows = report["runs"].as_array().unwrap();
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}: {report}"))
}

fn steps(workspace: &Workspace, name: &str) -> usize {
    workspace.events(&format!("sweep/{name}")).iter().filter(|event| event["event"] == "step").count()
}

/// Returns the arguments of a sweep on [`PAIR`] in the folder `sweep`.
fn sweep_args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["sweep"], more, &PAIR, &["--dir", "sweep"]].concat()
}

/// Waits until runs are under way and returns their process ids.
fn wait_until_running(workspace: &Workspace, sweep: &mut Running, names: &[&str]) -> Vec<u64> {
    assert!(sweep.wait_until(|| names.iter().all(|name| steps(workspace, name) > 5)), "it ended before");
    let report = report(workspace);
    names.iter().map(|name| row(&report, name)["pid"].as_u64().unwrap_or_else(|| panic!("{report}"))).collect()
}

/// Checks that runs at the same time never exceed the load line of a device, and that each run had its assigned budget.
fn check_load_lines(workspace: &Workspace, report: &Value) {
    let rows = report["runs"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
    for row in rows {
        let name = row["name"].as_str().unwrap();
        let budget_bytes = number(&row["budget_bytes"]);
        assert_eq!(
            number(&workspace.json(&format!("sweep/{name}/plan.json"))["devices"][0]["budget_bytes"]),
            budget_bytes
        );
        assert!(number(&row["measured_bytes"]) <= budget_bytes, "{row}");
        assert!(number(&row["predicted_bytes"]) <= budget_bytes, "{row}");
        let started = number(&row["started"]);
        let concurrent = rows.iter().filter(|other| {
            let other_started = number(&other["started"]);
            other["device"] == row["device"]
                && other_started <= started
                && started < other_started + number(&other["seconds"]) - 0.05
        });
        let (mut bytes, mut share) = (0.0, 0.0);
        for other in concurrent {
            bytes += number(&other["budget_bytes"]);
            share += number(&other["share"]);
        }
        let device = report["devices"].as_array().unwrap().iter().find(|device| device["name"] == row["device"]);
        assert!(bytes <= number(&device.unwrap()["budget_bytes"]), "{report}");
        assert!(share <= 1.0 + 1e-9, "{report}");
    }
}

#[test]
fn grid_trains_within_all_load_lines() {
    let workspace = Workspace::new(&QUICK);
    let grid = [
        "run.toml",
        "--set",
        "train.learning_rate=1e-2,1e-3,1e-4",
        "--set",
        "train.seed=1,2",
        "--set",
        "recipe.micro_batch=2",
    ];
    let done = workspace.succeed(&[&sweep_args(&grid)[..], &["--json", "report.json"]].concat());
    let report = report(&workspace);
    assert_eq!(workspace.json("report.json"), report);
    let rows = report["runs"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let name = row["name"].as_str().unwrap();
        assert_eq!((row["state"].as_str(), row["steps"].as_u64()), (Some("done"), Some(12)), "{row}");
        assert_eq!((row["retries"].as_u64(), row["exit"].as_i64()), (Some(0), Some(0)), "{row}");
        assert!(workspace.path(&format!("sweep/{name}/model/config.json")).exists());
        assert!(!workspace.path(&format!("sweep/{name}.log")).exists(), "no warnings or errors");
    }
    check_load_lines(&workspace, &report);
    let workers = |device: usize| report["devices"][device]["workers"].as_u64().unwrap();
    assert!(workers(0) > 1, "bytes for several: {report}");
    assert!(done.stdout.contains("6 of 6 runs done (100.0 %), 0 retries"), "{}", done.stdout);
    assert!(done.stdout.contains("virtual:a (simulated)"), "{}", done.stdout);
    // The device does not change the result.
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
    workspace.succeed(&alone);
    assert_eq!(workspace.json("run/result.json")["loss"], workspace.json(&format!("sweep/{name}/result.json"))["loss"]);
    // A finished sweep stays unchanged.
    let again = workspace.succeed(&["sweep", "--resume", "sweep"]);
    assert!(again.stderr.contains("nothing was changed"), "{}", again.stderr);
    assert_eq!(self::report(&workspace), report);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn failing_sweep_runs_do_not_stop_others() {
    let workspace = Workspace::new(&QUICK);
    std::fs::create_dir(workspace.path("big")).unwrap();
    workspace.write("big/config.json", config(1024).to_string());
    workspace.write("big.toml", workspace.read("run.toml").replace("\"model\"", "\"big\""));
    workspace.write("wrong.toml", workspace.read("run.toml").replace("train.jsonl", "nowhere.jsonl"));
    let done = workspace.run(&sweep_args(&["big.toml", "wrong.toml", "run.toml"]));
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    assert!(done.stderr.starts_with("error: 2 of 3 runs not done\n  hint: "), "{}", done.stderr);
    let report = report(&workspace);
    let big = row(&report, "big");
    assert_eq!((big["state"].as_str(), big["exit"].as_i64()), (Some("does_not_fit"), Some(3)));
    assert!(big["reason"].as_str().unwrap().contains("virtual:b has 50.00 MiB, the run needs at least "), "{big}");
    let wrong = row(&report, "wrong");
    assert_eq!((wrong["state"].as_str(), wrong["exit"].as_i64()), (Some("failed"), Some(2)));
    assert!(wrong["reason"].as_str().unwrap().contains("nowhere.jsonl"), "{wrong}");
    assert_eq!(row(&report, "run")["state"], "done");
    assert!(done.stdout.contains("1 of 3 runs done (33.3 %)"), "{}", done.stdout);
}

#[test]
fn killed_worker_restarts_without_affecting_others() {
    let workspace = Workspace::new(&LONG);
    let mut sweep = workspace.start(&sweep_args(&["run.toml", "--set", "train.seed=1,2"]));
    let pids = wait_until_running(&workspace, &mut sweep, &["run-seed=1", "run-seed=2"]);
    assert!(sweep.wait_until(|| steps(&workspace, "run-seed=1") > 60), "it ended before");
    assert!(Command::new("kill").args(["-KILL", &pids[0].to_string()]).status().unwrap().success());
    let done = sweep.wait();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let report = report(&workspace);
    let (killed, other) = (row(&report, "run-seed=1"), row(&report, "run-seed=2"));
    assert_eq!((killed["state"].as_str(), killed["retries"].as_u64()), (Some("done"), Some(1)), "{killed}");
    assert_eq!((other["state"].as_str(), other["retries"].as_u64()), (Some("done"), Some(0)), "{other}");
    assert!(
        done.stdout.contains("retry  run-seed=1: ") && done.stdout.contains("ended by signal 9"),
        "{}",
        done.stdout
    );
    // The run continued from its checkpoint.
    assert!(steps(&workspace, "run-seed=1") < 600 + 120, "{}", steps(&workspace, "run-seed=1"));
    assert_eq!(steps(&workspace, "run-seed=2"), 600);
}

#[test]
fn oom_in_one_worker_does_not_affect_others() {
    let workspace = Workspace::new(&QUICK);
    let grid = ["run.toml", "--set", "train.seed=1,2,3", "--set", "recipe.micro_batch=2"];
    let persistent_oom = [["--inject-oom", "run-seed=3=6:update"]; 12].concat();
    let untriggered = ["--inject-oom", "run-seed=1=3:evaluate"];
    let done = workspace.succeed(
        &[&sweep_args(&grid)[..], &["--inject-oom", "run-seed=2=3:backward"], &untriggered, &persistent_oom].concat(),
    );
    assert!(done.stderr.contains("run-seed=1: --inject-oom 3:evaluate was not triggered"), "{}", done.stderr);
    let report = report(&workspace);
    let of = |name: &str, key: &str| row(&report, name)[key].as_u64().unwrap();
    assert_eq!([1, 2, 3].map(|seed| of(&format!("run-seed={seed}"), "steps")), [12, 12, 12]);
    assert_eq!((of("run-seed=1", "recoveries"), of("run-seed=1", "retries")), (0, 0));
    assert_eq!((of("run-seed=2", "recoveries"), of("run-seed=2", "retries")), (1, 0));
    assert_eq!(of("run-seed=3", "retries"), 1);
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "train.seed=1", "--set", "recipe.micro_batch=2"]);
    assert_eq!(workspace.json("run/result.json")["loss"], workspace.json("sweep/run-seed=1/result.json")["loss"]);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn stopped_sweep_saves_and_resumes() {
    let workspace = Workspace::new(&LONG);
    // Equal devices: with unequal ones, both runs might wait for the faster one.
    let equal_devices = ["--devices", "virtual:a=50MiB@0.3,virtual:b=50MiB@0.3", "--workers", "1", "--dir", "sweep"];
    let mut sweep = workspace.start(&[&["sweep", "run.toml", "--set", "train.seed=1,2"], &equal_devices[..]].concat());
    wait_until_running(&workspace, &mut sweep, &["run-seed=1", "run-seed=2"]);
    sweep.signal("INT");
    let done = sweep.wait();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    assert!(done.stderr.starts_with("note: stopping: finishing the step of each run; "), "{}", done.stderr);
    assert!(done.stderr.contains("plimsoll sweep --resume "), "{}", done.stderr);
    let stopped = report(&workspace);
    for name in ["run-seed=1", "run-seed=2"] {
        let row = row(&stopped, name);
        assert_eq!(row["state"], "stopped", "{row}");
        assert!(row["pid"].is_null() && row["exit"] == 4, "{row}");
        assert_eq!(workspace.json(&format!("sweep/{name}/result.json"))["status"], "stopped");
    }
    workspace.succeed(&["sweep", "--resume", "sweep", "--quiet"]);
    let report = report(&workspace);
    assert!(report["runs"].as_array().unwrap().iter().all(|row| row["state"] == "done"), "{report}");
    assert!(report["workers"] == 1 && report["devices"][0]["workers"] == 1, "{report}");
    // No step was repeated.
    assert_eq!([steps(&workspace, "run-seed=1"), steps(&workspace, "run-seed=2")], [600, 600]);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn workers_of_killed_sweep_stop_and_sweep_resumes() {
    let workspace = Workspace::new(&LONG);
    let mut sweep = workspace.start(&sweep_args(&["run.toml", "--set", "train.seed=1,2"]));
    let pids = wait_until_running(&workspace, &mut sweep, &["run-seed=1", "run-seed=2"]);
    sweep.kill();
    // The workers may still be saving, and the resumed sweep has to wait for them.
    workspace.succeed(&["sweep", "--resume", "sweep"]);
    // A zombie counts as exited: its new parent process may not have reaped it yet.
    let state = |pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let has_exited = |stat: String| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'));
    assert!(pids.iter().all(|pid| has_exited(state(pid))));
    let report = report(&workspace);
    assert!(report["runs"].as_array().unwrap().iter().all(|row| row["state"] == "done"), "{report}");
    assert_eq!([steps(&workspace, "run-seed=1"), steps(&workspace, "run-seed=2")], [600, 600]);
}

#[test]
fn sweep_takes_devices_and_lines_of_training() {
    let workspace = Workspace::new(&QUICK);
    let memory =
        |line: &str| format!("{}devices = \"cpu\"\n[memory]\nbudget = \"{line}\"\n", workspace.read("run.toml"));
    let (own, other) = (memory("70MiB"), memory("60MiB"));
    workspace.write("own.toml", own);
    workspace.write("other.toml", other);
    let sweep = |more: &[&str]| {
        let _ = std::fs::remove_dir_all(workspace.path("sweep"));
        let done = workspace.succeed(&[&["sweep", "own.toml", "--dir", "sweep"], more].concat());
        let device = report(&workspace)["devices"][0].clone();
        assert_eq!(device["name"], "cpu", "{device}");
        (device["budget_bytes"].as_u64().unwrap() >> 20, done.stderr.contains("[memory] budget and host are ignored"))
    };
    assert_eq!(sweep(&[]), (70, false));
    assert_eq!(sweep(&["--budget", "64MiB"]), (64, true));
    assert!(sweep(&["other.toml"]).1, "the load lines differ");
}

#[test]
fn sweep_usage_errors_come_first() {
    let workspace = Workspace::new(&QUICK);
    let refusal =
        |more: &[&str]| workspace.expect_refusal(2, &[&["sweep", "run.toml", "--dir", "sweep"], more].concat());
    assert!(refusal(&["--set", "run.dir=a,b"]).contains("--dir"));
    assert!(refusal(&["--set", "train.seeds=1,2"]).contains("did you mean `train.seed`"));
    assert!(refusal(&["--devices", "rtx3090"]).contains("a sweep cannot run on paper devices"));
    assert!(refusal(&["--devices", "virtual:a=1GiB@9999"]).contains("cores"));
    assert!(refusal(&["--inject-oom", "run"]).contains("RUN=STEP"));
    assert!(workspace.expect_refusal(2, &["sweep", "--resume", "nowhere"]).contains("sweep.json"));
    assert!(workspace.file_names("sweep").is_empty());
}
