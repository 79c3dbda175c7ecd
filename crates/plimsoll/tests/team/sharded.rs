//! Sharded training (weights, gradients and optimizer state split over devices), storage-only workers and resharding.

use super::helpers::{
    NO_SAVES_OR_EVALS, assert_same_experiment, assert_same_weights, assert_within_load_lines, lost_device,
    model_for_two, persistent_oom, step_losses, train, train_plain, train_with_oom_at, worker_names,
};
use crate::common::{Turn, Workspace};
use serde_json::Value;

/// Two devices that are too small for that model, without host memory. The sequences divide well by their speeds, so that
/// sharding is faster than a pipeline.
const PAIR: &str = "virtual:a=62MiB@1.0,virtual:b=58MiB@0.5,host=1MiB";

/// Two devices: the first is too small for the model, and the second is too slow for a single sequence.
const WITH_STORAGE_ONLY: &str = "virtual:a=62MiB@1.0,virtual:b=58MiB@0.03,host=1MiB";

/// Returns the sequences of each worker in the last plan of a run.
fn sequence_shares(workspace: &Workspace, run: &str) -> Vec<u64> {
    let plan = workspace.json(&format!("{run}/plan.json"));
    plan["team"].as_array().unwrap().iter().map(|worker| worker["sequences"].as_u64().unwrap()).collect()
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn model_larger_than_each_device_trains_sharded() {
    let workspace = model_for_two();
    for device in PAIR.split(',').take(2) {
        let device = format!("{device},host=1MiB");
        let words =
            ["train", "run.toml", "--quiet", "--set", "run.dir=no", "--set", "run.fallback=none", "--devices", &device];
        assert!(workspace.expect_refusal(3, &words).contains("does not fit"));
    }
    train(&workspace, "alone", &["--devices", "cpu"]);
    let result = train(&workspace, "team", &["--devices", PAIR]);
    assert_eq!(worker_names(&result), ["virtual:a", "virtual:b"]);
    assert_eq!(result["parallelism"], "sharded");
    assert_within_load_lines(&result);
    assert_same_experiment(&workspace, "alone", "team", 1e-4);
    assert_same_weights(&workspace, "alone", "team", 1e-3);
    let loss = |run: &str| workspace.json(&format!("{run}/result.json"))["eval"]["loss"].as_f64().unwrap();
    assert!((loss("alone") / loss("team") - 1.0).abs() < 1e-4);

    // A team resumes the checkpoint of a single device, and the other way round.
    let cut = |run: &str, devices: &str, then: &str| {
        train(&workspace, run, &["--devices", devices, "--set", "train.steps=3"]);
        let text = workspace.read(&format!("{run}/run.toml")).replace("steps = 3", "steps = 6");
        let text = text.replace(&format!("devices = \"{devices}\""), &format!("devices = \"{then}\""));
        workspace.write(&format!("{run}/run.toml"), text);
        workspace.succeed(&["train", "--resume", run, "--quiet"]);
        let result = workspace.json(&format!("{run}/result.json"));
        assert_eq!(result["parallelism"] == "sharded", then != "cpu", "{result}");
    };
    cut("one", PAIR, "cpu");
    cut("two", "cpu", PAIR);
    cut("same", PAIR, PAIR);
    assert!(step_losses(&workspace, "same") == step_losses(&workspace, "team"), "the same team, the same bits");
    for run in ["one", "two", "same"] {
        assert_same_weights(&workspace, "alone", run, 1e-3);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn slow_device_becomes_storage_only_worker() {
    let workspace = model_for_two();
    train(&workspace, "alone", &["--devices", "cpu"]);
    let said = workspace.succeed(&["plan", "run.toml", "--devices", WITH_STORAGE_ONLY]).stdout;
    let first = said.lines().take(10).map(str::trim).collect::<Vec<_>>().join(" ");
    assert!(first.contains("virtual:b (simulated) stores "), "{said}");
    assert!(first.contains("of the state and computes no sequences: with sequences of its own"), "{said}");
    let explained = workspace.succeed(&["plan", "run.toml", "--devices", WITH_STORAGE_ONLY, "--explain"]).stdout;
    let ways = explained.lines().filter(|line| line.starts_with("sharded over virtual:a, virtual:b ("));
    assert!(ways.clone().any(|way| way.contains("(6 : 0)") && way.ends_with("taken")), "{explained}");
    assert!(ways.clone().any(|way| !way.contains(" : 0)") && way.ends_with("fits")), "{explained}");

    let result = train(&workspace, "team", &["--devices", WITH_STORAGE_ONLY]);
    assert_eq!((&result["parallelism"], worker_names(&result)), (&"sharded".into(), vec!["virtual:a", "virtual:b"]));
    assert_eq!((&result["team"][1]["sequences"], &result["team"][1]["recipe"]["micro_batch"]), (&0.into(), &0.into()));
    assert_within_load_lines(&result);
    assert_same_experiment(&workspace, "alone", "team", 1e-4);
    assert_same_weights(&workspace, "alone", "team", 1e-3);
    let loss = |run: &str| workspace.json(&format!("{run}/result.json"))["eval"]["loss"].as_f64().unwrap();
    assert!((loss("alone") / loss("team") - 1.0).abs() < 1e-4);

    // The run resumes from a checkpoint. The first device writes the files, also if it only stores.
    train(&workspace, "cut", &["--devices", WITH_STORAGE_ONLY, "--set", "train.steps=3", "--plan", "team/plan.json"]);
    let text = workspace.read("cut/run.toml").replace("steps = 3", "steps = 6");
    workspace.write("cut/run.toml", text);
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert!(step_losses(&workspace, "cut") == step_losses(&workspace, "team"), "the same team, the same bits");
    let turned = "virtual:b=58MiB@0.03,virtual:a=62MiB@1.0,host=1MiB";
    let result = train(&workspace, "turned", &["--devices", turned, "--inject-oom", "virtual:b/3:checkpoint"]);
    assert_eq!(result["team"][0]["sequences"], 0, "{result}");
    for run in ["cut", "turned"] {
        assert_same_weights(&workspace, "alone", run, 1e-3);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn failing_storage_only_worker_is_reported() {
    let workspace = model_for_two();
    let trio = "virtual:a=62MiB@0.75,virtual:b=58MiB@0.5,virtual:c=58MiB@0.03,host=1MiB";
    let (result, words) = train_plain(&workspace, &["--devices", trio, "--set", "run.parallelism=all"]);
    assert_eq!(result["team"][2]["sequences"], 0, "{result}");
    assert_within_load_lines(&result);
    let result = train(&workspace, "lost", &[&words[..], &["--inject-loss", "virtual:c:5:backward"]].concat());
    let lost = serde_json::json!([{ "device": "virtual:c", "step": 5, "resumed_from_step": 3 }]);
    assert_eq!((&result["status"], &result["lost"]), (&"done".into(), &lost));
    assert_eq!(worker_names(&result), ["virtual:a", "virtual:b"]);
    let refused = ["--inject-oom", "virtual:c/2:backward:3", "--inject-oom", "virtual:c/4:update:2"];
    let result = train(&workspace, "refused", &[&words[..], &refused].concat());
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &6.into()));
    for run in ["lost", "refused"] {
        assert_same_weights(&workspace, "plain", run, 1e-3);
    }
}

#[test]
fn sharded_worker_oom_repeats_step() {
    let workspace = model_for_two();
    let (_, words) = train_plain(&workspace, &["--devices", PAIR]);
    let places = ["virtual:b/2:backward:9", "virtual:a/3:norm", "virtual:a/4:update:3", "virtual:b/3:checkpoint"];
    let result = train_with_oom_at(&workspace, "run", &words, &places);
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &6.into()), "{result}");
    assert_same_weights(&workspace, "plain", "run", 1e-3);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn lost_shard_restarts_from_checkpoint() {
    let workspace = model_for_two();
    let trio = "virtual:a=62MiB@0.75,virtual:b=58MiB@0.5,virtual:c=58MiB@0.25,host=1MiB";
    let (_, words) = train_plain(&workspace, &["--devices", trio, "--set", "run.parallelism=all"]);
    for (run, at, step, resumed_from_step) in [
        ("first", "virtual:c:2", 2, 0),
        ("later", "virtual:a:5:backward", 5, 3),
        ("update", "virtual:b:5:update", 5, 3),
    ] {
        let result = train(&workspace, run, &[&words[..], &["--inject-loss", at]].concat());
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &6.into()), "{at}");
        let lost = serde_json::json!([{ "device": &at[..9], "step": step, "resumed_from_step": resumed_from_step }]);
        assert_eq!(result["lost"], lost, "{at}");
        assert!(worker_names(&result).len() == 2 && !worker_names(&result).contains(&&at[..9]), "{at}: {result}");
        let done: Vec<u64> = step_losses(&workspace, run).iter().map(|(step, ..)| *step).collect();
        let whole: Vec<u64> = (1..step).chain(resumed_from_step + 1..=6).collect();
        assert_eq!(done, whole, "{at}");
        // A repeated step counts once in the statistics.
        let events = workspace.events(run);
        let took = |step: u64| events.iter().rfind(|event| event["event"] == "step" && event["step"] == step);
        let mut seconds: Vec<f64> = (1..=6).map(|step| took(step).unwrap()["seconds"].as_f64().unwrap()).collect();
        seconds.sort_by(f64::total_cmp);
        assert_eq!(result["step_seconds"]["median"].as_f64(), Some(seconds[3]), "{at}: {seconds:?}");
        assert_same_weights(&workspace, "plain", run, 1e-3);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn silent_shard_stops_when_rest_is_too_small() {
    let workspace = model_for_two();
    let (_, words) = train_plain(&workspace, &["--devices", PAIR, "--set", "run.heartbeat_seconds=1"]);
    for (run, at, left) in [("start", "virtual:b:0:forever", 0), ("step", "virtual:a:5:forever", 3)] {
        let dir = format!("run.dir={run}");
        let start = ["train", "run.toml", "--quiet", "--set", &dir, "--inject-silence", at];
        let said = workspace.expect_refusal(4, &[&start[..], &words].concat());
        assert!(said.contains("sent no heartbeat") && said.contains("fits on the remaining devices"), "{said}");
        assert!(said.contains("plimsoll train --resume ") && said.contains(&format!("/{run}\n")), "{said}");
        let result = workspace.json(&format!("{run}/result.json"));
        assert_eq!(
            (&result["status"], &result["lost"][0]["resumed_from_step"]),
            (&"stopped".into(), &left.into()),
            "{result}"
        );
        assert!(!workspace.path(&format!("{run}/control.sock")).exists());
        workspace.succeed(&["train", "--resume", run, "--quiet"]);
        assert_same_weights(&workspace, "plain", run, f32::MIN_POSITIVE);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn shard_is_saved_before_worker_is_excluded() {
    let workspace = model_for_two();
    let trio = "virtual:a=62MiB@0.7,virtual:b=58MiB@0.5,virtual:c=58MiB@0.3,host=1MiB";
    let (_, words) = train_plain(&workspace, &["--devices", trio, "--set", "run.parallelism=all"]);
    // A step with a half-done update cannot be saved.
    for (run, at, resumed_from_step) in [("whole", "virtual:c/6:backward", 5), ("half", "virtual:b/6:update:4", 3)] {
        let result = train(&workspace, run, &[&words[..], &persistent_oom(at)].concat());
        assert_eq!(result["status"], "done", "{at}");
        let (device, _, to) = lost_device(&workspace, run);
        assert_eq!((&device[..], to), (&at[..9], Some(resumed_from_step)), "{at}");
        let done: Vec<u64> = step_losses(&workspace, run).iter().map(|(step, ..)| *step).collect();
        assert_eq!(done, (1..=5).chain(resumed_from_step + 1..=6).collect::<Vec<u64>>(), "{at}");
        assert_same_weights(&workspace, "plain", run, 1e-3);
    }
    // The other device cannot hold the model alone: the run stops and saves all finished steps.
    let at = persistent_oom("virtual:b/3:backward");
    let words = ["train", "run.toml", "--quiet", "--set", "run.dir=pair", "--devices", PAIR];
    let done = workspace.run(&[&words[..], &at].concat());
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let says = ["virtual:b: ", "no recipe of this run fits on the remaining devices", "of step 2: no step is lost"];
    assert!(says.iter().all(|says| done.stderr.contains(says)), "{}", done.stderr);
    assert_eq!(workspace.json("pair/result.json")["status"], "stopped");
    workspace.succeed(&["train", "--resume", "pair", "--quiet"]);
    assert_same_weights(&workspace, "plain", "pair", 1e-3);
}

#[test]
fn repeated_resharding_terminates() {
    let workspace = model_for_two();
    let trio = "virtual:a=62MiB@0.7,virtual:b=58MiB@0.5,virtual:c=58MiB@0.3,host=1MiB";
    let words =
        ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--set", "run.parallelism=all", "--devices", trio];
    // No step ever succeeds. Returning to an earlier state does not count as progress.
    let done = workspace.run(&[&words[..], &["--inject-oom", "random:0.3"]].concat());
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let lost = workspace.events("run").iter().filter(|event| event["event"] == "device_lost").count();
    assert!(lost > 0 && done.stderr.contains("stopped: "), "{}", done.stderr);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn slow_sharded_worker_keeps_its_shard() {
    let _alone = Turn::alone();
    let workspace = model_for_two();
    let words = ["--devices", "virtual:a=62MiB@0.25,virtual:b=62MiB@0.25,host=1MiB"];
    let length = ["--set", "train.steps=20", "--set", "data.sequence=24", "--set", "train.batch_tokens=96"];
    let (result, words) = train_plain(&workspace, &[&words[..], &length, &NO_SAVES_OR_EVALS].concat());
    assert_eq!(
        (&result["parallelism"], &result["recoveries"]),
        (&"sharded".into(), &Value::Array(vec![])),
        "no straggler is reported"
    );
    assert!(workspace.events("plain").iter().all(|event| event["event"] != "warning"), "no straggler is reported");
    let even = sequence_shares(&workspace, "plain");
    assert_eq!(even[0], even[1]);
    let result = train(&workspace, "slow", &[&words[..], &["--inject-slow", "virtual:b:2:3.0"]].concat());
    assert_eq!((&result["parallelism"], &result["status"]), (&"sharded".into(), &"done".into()));
    let shares = sequence_shares(&workspace, "slow");
    assert!(shares[0] > shares[1], "{shares:?}");
    let parts = |run: &str| {
        let plan = workspace.json(&format!("{run}/plan.json"));
        plan["team"]
            .as_array()
            .unwrap()
            .iter()
            .map(|worker| worker["shard_1024ths"].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(parts("plain"), parts("slow"));
    assert_same_experiment(&workspace, "plain", "slow", 1e-4);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn storage_only_worker_computes_when_other_slows() {
    let _alone = Turn::alone();
    let workspace = model_for_two();
    let devices = ["--devices", "virtual:a=62MiB@0.4,virtual:b=58MiB@0.054,host=1MiB"];
    let length = ["--set", "train.steps=20", "--set", "data.sequence=16", "--set", "train.batch_tokens=96"];
    let (_, words) = train_plain(&workspace, &[&devices[..], &length, &NO_SAVES_OR_EVALS].concat());
    assert_eq!(sequence_shares(&workspace, "plain"), [6, 0]);
    assert!(workspace.events("plain").iter().all(|event| event["event"] != "warning"), "no straggler is reported");
    let result = train(&workspace, "slow", &[&words[..], &["--inject-slow", "virtual:a:2:3"]].concat());
    assert_eq!((&result["parallelism"], &result["status"]), (&"sharded".into(), &"done".into()));
    let shares = sequence_shares(&workspace, "slow");
    assert!(shares[0] > 0 && shares[1] > 0, "{shares:?}");
    assert_same_experiment(&workspace, "plain", "slow", 1e-4);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn recovered_straggler_computes_again() {
    let _alone = Turn::alone();
    let workspace = model_for_two();
    let words = ["--devices", "virtual:a=62MiB@0.4,virtual:b=62MiB@0.4,host=1MiB"];
    let length = ["--set", "train.steps=84", "--set", "data.sequence=24", "--set", "train.batch_tokens=48"];
    // A low learning rate: with two sequences per step the loss is noisy, which amplifies differences in the order of sums.
    let (_, words) = train_plain(
        &workspace,
        &[&words[..], &length, &NO_SAVES_OR_EVALS, &["--set", "train.learning_rate=1e-5"]].concat(),
    );
    let slow = ["--inject-slow", "virtual:b:2:4", "--inject-slow", "virtual:b:30:1"];
    assert_eq!(sequence_shares(&workspace, "plain"), [1, 1]);
    let result = train(&workspace, "slow", &[&words[..], &slow].concat());
    assert!(
        result["status"] == "done" && result["faults_not_triggered"].as_array().is_none_or(Vec::is_empty),
        "{result}"
    );
    let had =
        |recovery: &Value| recovery["device"] == "virtual:b" && recovery["sequences"] == serde_json::json!([1, 0]);
    assert!(result["recoveries"].as_array().unwrap().iter().any(had), "{result}");
    assert_eq!(sequence_shares(&workspace, "slow"), [1, 1]);
    assert_same_experiment(&workspace, "plain", "slow", 1e-4);
}
