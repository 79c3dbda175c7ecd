//! Devices without a heartbeat, during a run and while they are opened. Slow devices are never declared lost.

use super::helpers::{
    EVAL_EVERY_TWO, QUICK, TRIO, WITH_EVALUATOR, assert_same_experiment, lost_device, train, train_together,
    trio_with_plain_run, worker_names,
};
use crate::common::{Shape, Workspace};

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn only_missed_heartbeats_declare_device_lost() {
    let (workspace, words) = trio_with_plain_run(&["--set", "run.heartbeat_seconds=1"]);
    let result = train(&workspace, "silent", &[&words[..], &["--inject-silence", "virtual:b:3"]].concat());
    assert!(!worker_names(&result).contains(&"virtual:b"), "{result}");
    let lost = workspace.events("silent").into_iter().find(|event| event["event"] == "device_lost").unwrap();
    assert_eq!(
        (&lost["device"], &lost["reason"]),
        (&"virtual:b".into(), &"virtual:b sent no heartbeat for 1 s".into())
    );
    assert_same_experiment(&workspace, "plain", "silent", 1e-4);
    // Two devices are lost; the last one is not supervised, so its silence is ignored and it finishes the run.
    let all = ["--inject-loss", "virtual:a:2:update", "--inject-silence", "virtual:b:3"];
    let alone = [&words[..], &all, &["--inject-silence", "virtual:c:5:forever"]].concat();
    let result = train(&workspace, "alone", &alone);
    assert_eq!(result["status"], "done");
    assert_eq!(result["faults_not_triggered"], serde_json::json!(["--inject-silence virtual:c:5:forever"]));
    assert_same_experiment(&workspace, "plain", "alone", 1e-4);
    // The passes of this device take far longer than the heartbeat timeout, but it sends heartbeats.
    let slow = [&words[..], &["--inject-slow", "virtual:b:6:300", "--set", "train.steps=6"]].concat();
    let result = train(&workspace, "slow", &slow);
    assert!(worker_names(&result).contains(&"virtual:b"), "{result}");
    assert!(workspace.events("slow").iter().all(|event| event["event"] != "device_lost"));
    let slowest = result["step_seconds"]["p95"].as_f64().unwrap();
    assert!(slowest > 1.0, "{slowest} s: nothing was slow");
    // A device that hangs forever is abandoned: before the first step, in a step, and at the end.
    let hang = [("virtual:b", 0), ("virtual:a", 0), ("virtual:b", 5), ("virtual:a", 8)];
    let at = hang.map(|(device, step)| format!("{device}:{step}:forever"));
    let at: Vec<[&str; 2]> = at.iter().map(|at| ["--inject-silence", at]).collect();
    let each: Vec<&[&str]> = at.iter().map(|at| &at[..]).collect();
    let results = train_together(&workspace, "hangs", &words, &each);
    for (number, ((device, step), result)) in hang.iter().zip(results).enumerate() {
        let run = format!("hangs-{number}");
        assert_eq!(
            (&result["status"], lost_device(&workspace, &run).0.as_str()),
            (&"done".into(), *device),
            "{result}"
        );
        assert_eq!(result["lost"][0]["step"].as_u64(), Some(*step), "{result}");
        assert!(!worker_names(&result).contains(device), "{result}");
        assert_same_experiment(&workspace, "plain", &run, 1e-4);
    }
}

#[test]
fn all_devices_silent_stops_resumable() {
    let (workspace, words) = trio_with_plain_run(&["--set", "run.heartbeat_seconds=1"]);
    let silent = ["virtual:a:3", "virtual:b:3:forever", "virtual:c:3"].map(|at| ["--inject-silence", at]);
    let said = workspace.expect_refusal(
        4,
        &[&["train", "run.toml", "--quiet", "--set", "run.dir=silent"], &words[..], &silent.concat()].concat(),
    );
    assert!(said.contains("sent no heartbeat for 1 s") && said.contains("plimsoll train --resume"), "{said}");
    let result = workspace.json("silent/result.json");
    assert_eq!((&result["status"], result["lost"].as_array().unwrap().len()), (&"stopped".into(), 3), "{result}");
    workspace.succeed(&["train", "--resume", "silent", "--quiet"]);
    assert_eq!(workspace.json("silent/result.json")["status"], "done");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn loss_while_opening_continues_or_stops_resumable() {
    let (workspace, words) = trio_with_plain_run(&[]);
    let result = train(&workspace, "run", &[&words[..], &["--inject-loss", "virtual:a:0"]].concat());
    assert_eq!(
        (&result["status"], lost_device(&workspace, "run").0.as_str()),
        (&"done".into(), "virtual:a"),
        "{result}"
    );
    assert_same_experiment(&workspace, "plain", "run", 1e-4);
    let lost = ["virtual:a:0", "virtual:b:0:open", "virtual:c:0:load"].map(|at| ["--inject-loss", at]).concat();
    let start = ["train", "run.toml", "--quiet", "--set", "run.dir=all-lost"];
    let said = workspace.expect_refusal(4, &[&start[..], &words, &lost].concat());
    assert!(said.contains("virtual:c is lost") && said.contains("--resume"), "{said}");
    let result = workspace.json("all-lost/result.json");
    assert_eq!((&result["status"], result["lost"].as_array().unwrap().len()), (&"stopped".into(), 3), "{result}");
    assert!(!workspace.path("all-lost/control.sock").exists());
    workspace.succeed(&["train", "--resume", "all-lost", "--quiet"]);
    assert_same_experiment(&workspace, "plain", "all-lost", 1e-4);
    let refused = workspace.expect_refusal(2, &["train", "run.toml", "--set", "run.dir=no", "--inject-oom", "0:open"]);
    assert!(refused.contains("can only be lost or silent"), "{refused}");
    let later = ["train", "run.toml", "--set", "run.dir=no", "--devices", TRIO, "--inject-silence", "virtual:b:3:open"];
    assert!(workspace.expect_refusal(2, &later).contains("devices are opened in step 0"));
}

#[test]
fn hang_while_opening_does_not_block_team() {
    let beats = ["--set", "run.heartbeat_seconds=1"];
    let (workspace, words) = trio_with_plain_run(&beats);
    let hang = ["virtual:a:0:open", "virtual:b:0:open:forever"];
    let each = hang.map(|at| ["--inject-silence", at]);
    let results = train_together(&workspace, "run", &words, &[&each[0], &each[1]]);
    for (number, (at, result)) in hang.iter().zip(results).enumerate() {
        let run = &format!("run-{number}");
        let (device, reason, _) = lost_device(&workspace, run);
        assert_eq!((&result["status"], &device[..]), (&"done".into(), &at[..9]), "{result}");
        assert_eq!(reason, format!("{device} sent no heartbeat for 1 s"));
        assert!(worker_names(&result).len() == 2 && !worker_names(&result).contains(&&at[..9]), "{result}");
        assert_same_experiment(&workspace, "plain", run, 1e-4);
    }
    // A single device is supervised by the run itself while it is opened. The run stops and can be resumed.
    let alone = ["train", "run.toml", "--quiet", "--set", "run.dir=alone", "--devices", "virtual:a=64MiB@0.4"];
    let said =
        workspace.expect_refusal(4, &[&alone[..], &beats, &["--inject-silence", "virtual:a:0:open:forever"]].concat());
    assert!(said.contains("step 0: virtual:a sent no heartbeat for 1 s") && said.contains("--resume"), "{said}");
    let result = workspace.json("alone/result.json");
    assert_eq!((&result["status"], &result["lost"][0]["device"]), (&"stopped".into(), &"virtual:a".into()));
    workspace.succeed(&["train", "--resume", "alone", "--quiet"]);
    assert_same_experiment(&workspace, "plain", "alone", 1e-4);
}

#[test]
fn signal_ends_run_with_silent_devices() {
    let workspace = Workspace::new(&Shape { steps: 100_000, ..QUICK });
    let runs = [
        ("beside", WITH_EVALUATOR, "virtual:b:0:forever"),
        ("team", TRIO, "virtual:a:0:forever"),
        ("opened", TRIO, "virtual:a:0:open:forever"),
        ("alone", "virtual:a=64MiB@0.4", "virtual:a:0:open:forever"),
    ];
    let started = runs.map(|(run, devices, silent)| {
        let dir = format!("run.dir={run}");
        let words = ["train", "run.toml", "--quiet", "--set", &dir, "--devices", devices, "--inject-silence", silent];
        let mut running =
            workspace.start(&[&words[..], &EVAL_EVERY_TWO, &["--set", "run.heartbeat_seconds=1"]].concat());
        // Signal handlers are installed before the event log is created.
        assert!(running.wait_until(|| workspace.path(run).join("events.jsonl").exists()));
        running.signal("TERM");
        running.signal("TERM");
        running
    });
    for ((run, _, silent), running) in runs.into_iter().zip(started) {
        let done = running.wait();
        assert_eq!(done.code, Some(4), "{}", done.stderr);
        let result = workspace.json(&format!("{run}/result.json"));
        assert_eq!(
            (&result["status"], &result["lost"][0]["device"]),
            (&"stopped".into(), &silent[..9].into()),
            "{result}"
        );
        assert!(!workspace.path(run).join("control.sock").exists());
    }
}
