//! Pipeline parallel training of a model that fits on no single device: same result as on one large device, within all
//! load lines, with checkpoints that a single device can resume.

use crate::common::{SMALL, Shape, Turn, Workspace};
use serde_json::Value;

/// A model that is large compared with the charges of a process, and enough sequences to keep all stages busy.
const WIDE: Shape = Shape { hidden: 256, steps: 6, batch_sequences: 6, threads: "1", save_every: 3, ..SMALL };

/// Two devices that are too small for the model; the host is too small for offload.
const PAIR: &str = "virtual:a=82MiB@0.6::1.5gbit,virtual:b=64MiB@0.45::1.5gbit,host=1MiB";

fn workspace() -> Workspace {
    let workspace = Workspace::new(&WIDE);
    let mut config = crate::common::config(WIDE.hidden);
    config["num_hidden_layers"] = 8.into();
    workspace.write("model/config.json", config.to_string());
    workspace
}

fn train(workspace: &Workspace, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    workspace.succeed(&[&["train", "run.toml", "--quiet", "--set", &dir], more].concat());
    workspace.json(&format!("{run}/result.json"))
}

/// Returns the losses of every step and of the last evaluation.
fn losses(workspace: &Workspace, run: &str) -> Vec<f64> {
    let events = workspace.events(run);
    let of = |name: &str| -> Vec<f64> {
        let events = events.iter().filter(|event| event["event"] == name);
        events.map(|event| event["loss"].as_f64().unwrap()).collect()
    };
    let evaluations = of("evaluation");
    of("step").into_iter().chain(evaluations.last().copied()).collect()
}

fn same_experiment(workspace: &Workspace, one: &str, other: &str) {
    let (one, other) = (losses(workspace, one), losses(workspace, other));
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(&other) {
        assert!((one - other).abs() <= 1e-4 * one.abs(), "{one} and {other}");
    }
}

/// Returns the device and the number of layers of each stage in the last plan of a run.
fn stages(workspace: &Workspace, run: &str) -> Vec<(String, u64)> {
    let plan = workspace.json(&format!("{run}/plan.json"));
    let of = |worker: &Value| {
        let [first, end] = [0, 1].map(|at| worker["layers"][at].as_u64().unwrap());
        (worker["device"].as_str().unwrap().to_owned(), end - first)
    };
    plan["team"].as_array().unwrap().iter().map(of).collect()
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn slow_stage_hands_layers_to_others() {
    let _alone = Turn::alone();
    let workspace = workspace();
    let words = ["--devices", "virtual:a=90MiB@0.4::0.4gbit,virtual:b=90MiB@0.4::0.4gbit,host=1MiB"];
    // Enough steps to detect a straggler, and enough remaining steps for a new plan to pay off.
    let words = [&words[..], &["--set", "train.steps=60", "--set", "train.save_every=0"]].concat();
    let words = [&words[..], &["--set", "data.sequence=16", "--set", "train.batch_tokens=64"]].concat();
    let result = train(&workspace, "even", &words);
    let words = [&words[..], &["--plan", "even/plan.json", "--set", "run.deterministic=false"]].concat();
    assert_eq!((&result["parallelism"], &result["recoveries"]), (&"pipeline".into(), &Value::Array(vec![])));
    assert!(workspace.events("even").iter().all(|event| event["event"] != "warning"), "no straggler warnings");
    let layers = |run: &str| stages(&workspace, run).into_iter().find(|(device, _)| device == "virtual:b").unwrap().1;
    let result = train(&workspace, "slow", &[&words[..], &["--inject-slow", "virtual:b:2:6.0"]].concat());
    assert_eq!(result["status"], "done");
    assert!(layers("slow") < layers("even"), "{:?} {:?}", stages(&workspace, "even"), stages(&workspace, "slow"));
    same_experiment(&workspace, "even", "slow");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn model_larger_than_each_device_trains_as_pipeline() {
    let workspace = workspace();
    for alone in PAIR.split(',').take(2) {
        let line = format!("{alone},host=1MiB");
        workspace.expect_refusal(3, &["train", "run.toml", "--quiet", "--devices", &line, "--set", "run.dir=none"]);
    }
    train(&workspace, "alone", &["--devices", "cpu"]);
    let result = train(&workspace, "pair", &["--devices", PAIR]);
    assert_eq!(result["parallelism"], "pipeline");
    for memory in result["memory"].as_array().unwrap() {
        assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"], "{memory}");
        let bytes = |key: &str| memory[key].as_u64().unwrap();
        assert!(bytes("measured_bytes") <= bytes("budget_bytes"), "{memory}");
        let plan = workspace.json("pair/plan.json");
        let plan = plan["devices"].as_array().unwrap().iter().find(|plan| plan["name"] == memory["device"]).unwrap();
        assert_eq!(memory["arena_measured_by_category"], plan["by_category"]);
    }
    same_experiment(&workspace, "alone", "pair");
}

/// Two devices that are too small even together, so that optimizer state is offloaded to the host.
const SMALL_PAIR: &str = "virtual:a=59MiB@0.6::1.5gbit,virtual:b=51MiB@0.45::1.5gbit,host=56MiB";

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn stages_offload_to_host() {
    let workspace = workspace();
    train(&workspace, "alone", &["--devices", "cpu"]);
    let known = ["--plan", "pair/plan.json"];
    let again = [&known[..], &["--inject-oom", "virtual:b/2:backward:9"]].concat();
    for (run, more) in [("pair", &[][..]), ("again", &again)] {
        let result = train(&workspace, run, &[&["--devices", SMALL_PAIR], more].concat());
        assert_eq!(result["parallelism"], "pipeline");
        let memory = result["memory"].as_array().unwrap();
        for memory in memory {
            assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"], "{memory}");
            let bytes = |key: &str| memory[key].as_u64().unwrap();
            assert!(bytes("measured_bytes") <= bytes("budget_bytes"), "{memory}");
        }
        let waits = result["team"].as_array().unwrap().iter();
        let waits = waits.filter(|worker| worker["recipe"]["offload"]["optimizer"].as_u64().unwrap() > 0);
        assert!(waits.count() > 0, "{result}");
        same_experiment(&workspace, "alone", run);
    }
    // A single device resumes a pipeline with offloaded state.
    train(&workspace, "cut", &[&known[..], &["--devices", SMALL_PAIR, "--set", "train.steps=3"]].concat());
    let text = workspace.read("cut/run.toml").replace("steps = 3", "steps = 6").replace(SMALL_PAIR, "cpu");
    workspace.write("cut/run.toml", text);
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    same_experiment(&workspace, "alone", "cut");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn pipeline_checkpoint_resumes_on_one_device_or_pipeline() {
    let workspace = workspace();
    train(&workspace, "whole", &["--devices", PAIR]);
    for (run, devices) in [("same", PAIR), ("one", "cpu")] {
        train(&workspace, run, &["--devices", PAIR, "--set", "train.steps=3", "--plan", "whole/plan.json"]);
        let text = workspace.read(&format!("{run}/run.toml")).replace("steps = 3", "steps = 6").replace(PAIR, devices);
        workspace.write(&format!("{run}/run.toml"), text);
        workspace.succeed(&["train", "--resume", run, "--quiet"]);
        let result = workspace.json(&format!("{run}/result.json"));
        assert_eq!(result["parallelism"] == "pipeline", devices == PAIR, "{result}");
        same_experiment(&workspace, "whole", run);
    }
    let whole = workspace.read_files("whole/model");
    assert!(whole == workspace.read_files("same/model"), "the bits of an undisturbed run");
    assert!(whole.keys().eq(workspace.read_files("one/model").keys()));
}

#[test]
fn out_of_memory_stage_repeats_step_on_all() {
    let workspace = workspace();
    train(&workspace, "plain", &["--devices", PAIR]);
    let words = ["--devices", PAIR, "--plan", "plain/plan.json"];
    let places = [
        ("virtual:b", 0, "virtual:b/0:load"),
        ("virtual:a", 2, "virtual:a/2:backward:9"),
        ("virtual:b", 3, "virtual:b/3:forward:4"),
        ("virtual:a", 4, "virtual:a/4:norm"),
        ("virtual:b", 5, "virtual:b/5:update:3"),
    ];
    let injected = places.map(|(.., at)| ["--inject-oom", at]).concat();
    let result = train(&workspace, "run", &[&words[..], &injected].concat());
    assert!(result["faults_not_triggered"].as_array().is_none_or(Vec::is_empty), "{result}");
    let recoveries = result["recoveries"].as_array().unwrap();
    for (device, step, at) in places {
        let here = |recovery: &Value| recovery["device"] == device && recovery["step"] == step;
        assert!(recoveries.iter().any(here), "{at}: {recoveries:?}");
    }
    same_experiment(&workspace, "plain", "run");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn lost_stage_restarts_from_checkpoint_or_stops() {
    let workspace = workspace();
    train(&workspace, "plain", &["--devices", PAIR]);
    let trio = PAIR.replace(",host", ",virtual:c=56MiB@0.45::1.5gbit,host");
    let lost = ["--devices", &trio, "--set", "run.parallelism=all", "--inject-loss", "virtual:c:5"];
    let result = train(&workspace, "trio", &lost);
    let names: Vec<&str> = result["team"].as_array().unwrap().iter().map(|m| m["device"].as_str().unwrap()).collect();
    assert_eq!((names.len(), names.contains(&"virtual:c")), (2, false), "{result}");
    assert_eq!((&result["parallelism"], &result["lost"][0]["resumed_from_step"]), (&"pipeline".into(), &3.into()));
    let last = |run: &str| losses(&workspace, run).pop().unwrap();
    assert!((last("plain") - last("trio")).abs() <= 1e-4 * last("plain").abs());
    // The remaining device cannot hold the model.
    let lost = ["train", "run.toml", "--quiet", "--devices", PAIR, "--plan", "plain/plan.json"];
    let lost = [&lost[..], &["--inject-loss", "virtual:b:5"]].concat();
    let message = workspace.expect_refusal(4, &lost);
    assert!(message.contains("no recipe of this run fits on the remaining devices"), "{message}");
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_eq!(workspace.json("run/result.json")["status"], "done");
}
