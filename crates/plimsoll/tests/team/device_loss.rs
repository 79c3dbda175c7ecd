//! Devices that are lost or excluded during a run: the others continue, an excluded device replaces the last one, or the run
//! stops and can be resumed.

use super::helpers::{
    QUICK, assert_same_experiment, assert_same_weights, assert_within_load_lines, lost_device, model_for_two,
    one_layer_model, persistent_oom, read_weights, step_losses, train, train_plain, trio_with_plain_run, worker_names,
};
use crate::common::Workspace;
use serde_json::Value;

/// Two devices of which the second one would only slow down the first.
const WITH_SPARE: &str = "virtual:a=64MiB@0.4,virtual:b=48MiB@0.1::1MB/s";

#[test]
fn lost_device_continues_from_last_finished_step() {
    let (workspace, words) = trio_with_plain_run(&[]);
    for (number, at) in ["virtual:b:3", "virtual:a:4:update", "virtual:c:1", "virtual:b:5:backward"].iter().enumerate()
    {
        let run = format!("run-{number}");
        let result = train(&workspace, &run, &[&words[..], &["--inject-loss", at]].concat());
        let lost: Vec<&str> = at.splitn(3, ':').take(2).collect();
        assert!(!worker_names(&result).contains(&lost.join(":").as_str()), "{at}");
        let events = workspace.events(&run);
        assert_eq!(events.iter().filter(|event| event["event"] == "device_lost").count(), 1, "{at}");
        assert_same_experiment(&workspace, "plain", &run, 1e-4);
    }
    // Two devices are lost one after the other; one remains.
    let lost = [&words[..], &["--inject-loss", "virtual:a:2", "--inject-loss", "virtual:c:4"]].concat();
    let result = train(&workspace, "last", &lost);
    assert_eq!(result["status"], "done");
    assert_same_experiment(&workspace, "plain", "last", 1e-4);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn device_with_persistent_oom_is_excluded() {
    let (workspace, words) = trio_with_plain_run(&[]);
    for (number, at) in ["virtual:b/3:update", "virtual:c/4:update:4", "virtual:a/5:backward", "virtual:a/4:checkpoint"]
        .iter()
        .enumerate()
    {
        let run = format!("run-{number}");
        let result = train(&workspace, &run, &[&words[..], &persistent_oom(at)].concat());
        assert_eq!(result["status"], "done", "{at}");
        let (device, reason, resumed_from_step) = lost_device(&workspace, &run);
        assert_eq!((&device[..], resumed_from_step), (&at[..9], None), "{at}");
        assert!(reason.contains(&device) && reason.contains("refusals in a row"), "{at}: {reason}");
        assert!(worker_names(&result).len() == 2 && !worker_names(&result).contains(&&at[..9]), "{at}: {result}");
        assert_same_experiment(&workspace, "plain", &run, 1e-4);
    }
}

#[test]
fn losing_the_only_device_stops_resumable() {
    let workspace = Workspace::new(&QUICK);
    for (run, device, named, at) in
        [("cpu", "cpu", "cpu", "cpu:6:backward"), ("virtual", "virtual:a=64MiB@1.0", "virtual:a", "virtual:a:6:update")]
    {
        let plain = format!("{run}-plain");
        train(&workspace, &plain, &["--devices", device]);
        let dir = format!("run.dir={run}");
        let words = ["train", "run.toml", "--quiet", "--set", &dir, "--devices", device, "--inject-loss", at];
        let said = workspace.expect_refusal(4, &words);
        assert!(said.contains(&format!("step 6: {named} is lost")) && said.contains("--resume"), "{said}");
        let result = workspace.json(&format!("{run}/result.json"));
        assert_eq!((&result["status"], &result["steps"]), (&"stopped".into(), &5.into()), "{result}");
        let lost = serde_json::json!([{ "device": named, "step": 6, "resumed_from_step": 4 }]);
        assert_eq!((&result["lost"], &result["memory"]), (&lost, &Value::Array(vec![])), "{result}");
        assert_eq!(lost_device(&workspace, run).2, Some(4));
        workspace.succeed(&["train", "--resume", run, "--quiet"]);
        assert_eq!(workspace.json(&format!("{run}/result.json"))["status"], "done");
        let done: Vec<u64> = step_losses(&workspace, run).iter().map(|(step, ..)| *step).collect();
        assert_eq!(done, [1, 2, 3, 4, 5, 5, 6, 7, 8]);
        assert!(read_weights(&workspace, run) == read_weights(&workspace, &plain));
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn excluded_device_replaces_lost_one() {
    let workspace = Workspace::new(&QUICK);
    let (_, words) = train_plain(&workspace, &["--devices", WITH_SPARE, "--set", "run.heartbeat_seconds=1"]);
    let plan = workspace.json("plain/plan.json");
    assert_eq!(plan["excluded"][0]["device"], "virtual:b", "{plan}");
    assert!(
        plan["team"].as_array().is_none_or(Vec::is_empty) && plan["excluded"][0]["evaluator_plan"].is_null(),
        "{plan}"
    );
    // Reference: the run is stopped and resumed on the other device by hand.
    train(&workspace, "by-hand", &["--devices", "virtual:a=64MiB@0.4", "--set", "train.steps=4"]);
    let text = workspace
        .read("by-hand/run.toml")
        .replace("steps = 4", "steps = 8")
        .replace("virtual:a=64MiB@0.4", "virtual:b=48MiB@0.1");
    workspace.write("by-hand/run.toml", text);
    workspace.succeed(&["train", "--resume", "by-hand", "--quiet"]);
    for (run, injected, step, finished, resumed_from_step) in [
        ("in-a-step", ["--inject-loss", "virtual:a:6:backward"], 6, 5, Some(4)),
        ("in-an-update", ["--inject-loss", "virtual:a:7:update"], 7, 6, Some(4)),
        ("silent", ["--inject-silence", "virtual:a:6:forever"], 6, 5, Some(4)),
        ("at-the-end", ["--inject-loss", "virtual:a:8:save"], 8, 8, Some(8)),
        ("early", ["--inject-loss", "virtual:a:2"], 2, 1, Some(0)),
        ("filled", ["--inject-loss", "virtual:a:0:load"], 0, 0, Some(0)),
        ("opened", ["--inject-loss", "virtual:a:0"], 0, 0, None),
    ] {
        let result = train(&workspace, run, &[&words[..], &injected].concat());
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &8.into()), "{run}: {result}");
        let (device, _, to) = lost_device(&workspace, run);
        assert_eq!(
            (&device[..], to, &result["lost"][0]["step"]),
            ("virtual:a", resumed_from_step, &step.into()),
            "{run}"
        );
        let events = workspace.events(run);
        let at = |event: &str| events.iter().position(|found| found["event"] == event);
        let lost = at("device_lost").unwrap();
        assert_eq!(events[lost]["remaining_devices"], serde_json::json!(["virtual:b"]), "{run}");
        let told = "the run continues with virtual:b, which was excluded before";
        assert!(events[lost..].iter().any(|event| event["message"] == told), "{run}: {events:?}");
        let done: Vec<u64> = step_losses(&workspace, run).iter().map(|(step, ..)| *step).collect();
        assert_eq!(done, (1..=finished).chain(resumed_from_step.unwrap_or(0) + 1..=8).collect::<Vec<u64>>(), "{run}");
        let memory: Vec<&Value> = result["memory"].as_array().unwrap().iter().map(|memory| &memory["device"]).collect();
        assert_eq!(memory, ["virtual:b"], "{run}");
        if resumed_from_step != Some(8) {
            assert_within_load_lines(&result);
        }
        assert_same_weights(&workspace, "plain", run, 1e-3);
        if resumed_from_step == Some(4) {
            assert_same_weights(&workspace, "by-hand", run, f32::MIN_POSITIVE);
        }
    }
    // A device that always refuses memory is excluded like a lost one, but its state is saved first.
    let result = train(&workspace, "refuses", &[&words[..], &persistent_oom("virtual:a/6:backward")].concat());
    assert_eq!((&result["status"], lost_device(&workspace, "refuses").2), (&"done".into(), Some(5)), "{result}");
    assert_same_weights(&workspace, "plain", "refuses", 1e-3);
}

#[test]
fn excluded_device_replaces_last_silent_worker() {
    let workspace = Workspace::new(&QUICK);
    let words = ["--devices", "virtual:a=64MiB@0.3,virtual:b=64MiB@0.3,virtual:c=48MiB@0.1::1MB/s"];
    let (result, words) = train_plain(&workspace, &[&words[..], &["--set", "run.heartbeat_seconds=1"]].concat());
    assert_eq!(
        (worker_names(&result), &result["parallelism"]),
        (vec!["virtual:a", "virtual:b"], &"data".into()),
        "{result}"
    );
    let lost = ["--inject-loss", "virtual:b:3", "--inject-silence", "virtual:a:6:forever"];
    let result = train(&workspace, "run", &[&words[..], &lost].concat());
    let lost: Vec<Value> =
        workspace.events("run").into_iter().filter(|event| event["event"] == "device_lost").collect();
    let left: Vec<&Value> = lost.iter().map(|event| &event["remaining_devices"]).collect();
    assert_eq!(left, [&serde_json::json!(["virtual:a"]), &serde_json::json!(["virtual:c"])], "{result}");
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &8.into()), "{result}");
    assert_same_weights(&workspace, "plain", "run", 1e-3);
}

#[test]
fn losing_last_device_stops_without_replacement() {
    let workspace = model_for_two();
    let (_, words) =
        train_plain(&workspace, &["--devices", "virtual:a=128MiB@0.4,virtual:b=40MiB@0.1::1MB/s,host=1MiB"]);
    let start = ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--inject-loss", "virtual:a:5"];
    let said = workspace.expect_refusal(4, &[&start[..], &words].concat());
    assert!(
        said.contains("step 5: virtual:a is lost") && said.contains("no recipe fits on the excluded devices"),
        "{said}"
    );
    let lost = workspace.events("run").into_iter().find(|event| event["event"] == "device_lost").unwrap();
    assert_eq!((&lost["remaining_devices"], &lost["resumed_from_step"]), (&serde_json::json!([]), &3.into()), "{lost}");
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_same_weights(&workspace, "plain", "run", f32::MIN_POSITIVE);
}

#[test]
fn loss_before_first_step_is_resumable() {
    let workspace = Workspace::new(&QUICK);
    let words = ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--devices", "virtual:a=64MiB@0.4"];
    let said = workspace.expect_refusal(4, &[&words[..], &["--inject-loss", "virtual:a:0:load"]].concat());
    assert!(said.contains("virtual:a is lost") && said.contains("--resume"), "{said}");
    let result = workspace.json("run/result.json");
    assert_eq!(
        (&result["status"], &result["steps"], &result["lost"][0]["device"]),
        (&"stopped".into(), &0.into(), &"virtual:a".into())
    );
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_eq!(workspace.json("run/result.json")["status"], "done");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn lost_device_memory_is_not_charged_to_others() {
    let workspace = one_layer_model();
    let devices = "virtual:a=180MiB@0.8,virtual:b=180MiB@0.6,host=1MiB";
    // A silent device releases its memory only after it has been declared lost.
    let ways = [
        ("lost", &["--inject-loss", "virtual:b:3"][..]),
        ("silent", &["--set", "run.heartbeat_seconds=1", "--inject-silence", "virtual:b:3"]),
    ];
    for (run, how) in ways {
        let result = train(&workspace, run, &[&["--devices", devices], how].concat());
        assert_eq!(result["lost"][0]["device"], "virtual:b", "{result}");
        assert_within_load_lines(&result);
        let memory = &result["memory"][0];
        let over = memory["measured_bytes"].as_f64().unwrap() / memory["predicted_bytes"].as_f64().unwrap();
        assert!(over < 1.1, "{memory}");
    }
}
