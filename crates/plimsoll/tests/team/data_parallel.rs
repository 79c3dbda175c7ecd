//! Data parallel training on unequal devices: the same result as on one device, out-of-memory errors, rebalancing and load lines.

use super::helpers::{
    ALL, NO_SAVES_OR_EVALS, QUICK, TRIO, assert_same_experiment, assert_within_load_lines, train, train_plain,
    train_with_oom_at, trio_with_plain_run, worker_names,
};
use crate::common::{Shape, Turn, Workspace};
use serde_json::Value;

#[test]
fn unequal_team_matches_single_device() {
    let workspace = Workspace::new(&QUICK);
    train(&workspace, "alone", &["--devices", "cpu"]);
    let result = train(&workspace, "team", &ALL);
    assert_eq!(worker_names(&result), ["virtual:a", "virtual:b", "virtual:c"]);
    assert_eq!(result["parallelism"], "data");
    assert_within_load_lines(&result);
    assert_same_experiment(&workspace, "alone", "team", 1e-4);
    let shares: Vec<u64> =
        result["team"].as_array().unwrap().iter().map(|worker| worker["sequences"].as_u64().unwrap()).collect();
    assert!(shares.is_sorted_by(|a, b| a >= b), "faster devices get more sequences: {shares:?}");
}

#[test]
fn stopped_team_resumes() {
    let workspace = Workspace::new(&QUICK);
    let (_, words) = train_plain(&workspace, &[&ALL[..], &["--set", "train.save_every=2"]].concat());
    train(&workspace, "cut", &[&words[..], &["--set", "train.steps=4"]].concat());
    let text = workspace.read("cut/run.toml").replace("steps = 4", "steps = 8");
    workspace.write("cut/run.toml", text);
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    let result = workspace.json("cut/result.json");
    assert_eq!(worker_names(&result), ["virtual:a", "virtual:b", "virtual:c"]);
}

#[test]
fn oom_on_one_device_repeats_step_on_all() {
    let (workspace, words) = trio_with_plain_run(&[]);
    let places = [
        ("virtual:c", 0, "virtual:c/0:load"),
        ("virtual:b", 2, "virtual:b/2:backward:9"),
        ("virtual:c", 3, "virtual:c/3:norm"),
        ("virtual:a", 4, "virtual:a/4:update:3"),
        ("virtual:b", 5, "virtual:b/5:begin"),
    ];
    let result = train_with_oom_at(&workspace, "run", &words, &places.map(|(.., at)| at));
    let recoveries = result["recoveries"].as_array().unwrap();
    for (device, step, at) in places {
        let here = |recovery: &Value| recovery["device"] == device && recovery["step"] == step;
        assert!(recoveries.iter().any(here), "{at}: {recoveries:?}");
    }
    assert_same_experiment(&workspace, "plain", "run", 1e-4);
}

#[test]
fn rebalancing_after_oom_keeps_load_lines() {
    let (workspace, words) = trio_with_plain_run(&[]);
    let places = ["3", "3:re-plan", "virtual:b/3:re-plan"];
    let result = train_with_oom_at(&workspace, "refused", &words, &places);
    let lines = |of: &Value| -> Vec<Value> {
        of["devices"].as_array().unwrap().iter().map(|device| device["budget_bytes"].clone()).collect()
    };
    assert!(!result["recoveries"].as_array().unwrap().is_empty(), "{result}");
    assert_eq!(lines(&workspace.json("refused/plan.json")), lines(&workspace.json("plain/plan.json")));
    assert_same_experiment(&workspace, "plain", "refused", 1e-4);
}

#[test]
fn slow_device_gets_fewer_sequences() {
    let _alone = Turn::alone();
    let workspace = Workspace::new(&Shape { steps: 24, ..QUICK });
    let words = ["--devices", "virtual:a=64MiB@0.05,virtual:b=64MiB@0.05", "--set", "run.parallelism=all"];
    let (result, words) = train_plain(&workspace, &[&words[..], &NO_SAVES_OR_EVALS].concat());
    assert_eq!(result["recoveries"], Value::Array(vec![]), "no straggler is reported");
    let result = train(&workspace, "slow", &[&words[..], &["--inject-slow", "virtual:b:2:2.0"]].concat());
    let sequences = |rank: usize| result["team"][rank]["sequences"].as_u64().unwrap();
    assert!(sequences(0) > sequences(1), "{result}");
    assert_same_experiment(&workspace, "plain", "slow", 1e-4);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn deterministic_command_repeats_its_bits() {
    let _alone = Turn::alone();
    let workspace = Workspace::new(&Shape { steps: 20, ..QUICK });
    let pair = ["--devices", "virtual:a=64MiB@0.1,virtual:b=64MiB@0.05"];
    let words = [&pair[..], &NO_SAVES_OR_EVALS, &["--set", "run.deterministic=true"]].concat();
    let first = train(&workspace, "first", &[&words[..], &["--inject-slow", "virtual:a:2:3.0"]].concat());
    // Another calibration, and another device is slow.
    let rates = workspace.read("cache/devices.json").replace("50000000000.0", "9000000000.0");
    workspace.write("cache/devices.json", rates);
    let second = train(&workspace, "second", &[&words[..], &["--inject-slow", "virtual:b:2:2.0"]].concat());
    assert!(workspace.read_files("first/model") == workspace.read_files("second/model"));
    for result in [&first, &second] {
        assert_eq!((&result["reproducible"], &result["recoveries"]), (&true.into(), &serde_json::json!([])));
    }
    let warns =
        |event: &Value| event["message"].as_str().is_some_and(|message| message.starts_with("virtual:a takes "));
    assert!(workspace.events("first").iter().any(warns), "the straggler is reported");
    let third = train(&workspace, "third", &[&pair[..], &["--set", "train.steps=2"]].concat());
    assert_eq!(third["reproducible"], false);
    assert!(third["reproducible_because"][0].as_str().unwrap().contains("run.deterministic = true"), "{third}");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn budget_command_selects_device_by_name() {
    let workspace = Workspace::new(&Shape { steps: 250, ..QUICK });
    let running = workspace.start(&[
        "train",
        "run.toml",
        "--quiet",
        "--set",
        "run.dir=run",
        "--devices",
        TRIO,
        "--set",
        "run.parallelism=all",
    ]);
    let mut running = running;
    assert!(running.wait_until(|| workspace.events("run").iter().any(|event| event["event"] == "step")));
    assert!(workspace.expect_refusal(2, &["budget", "run", "40MiB"]).contains("choose one of"));
    assert!(
        workspace
            .expect_refusal(2, &["budget", "run", "40MiB", "--device", "virtual:x"])
            .contains("virtual:a, virtual:b")
    );
    workspace.succeed(&["budget", "run", "50MiB", "--device", "virtual:b"]);
    running.wait();
    let result = workspace.json("run/result.json");
    assert_eq!(result["memory"][1]["device"], "virtual:b");
    assert_eq!(result["status"], "done");
}
