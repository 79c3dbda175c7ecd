//! Shared helpers of the team tests: devices, runs in a workspace, and comparisons of runs.

use crate::common::{Running, SMALL, Shape, Workspace};
use serde_json::Value;

/// A run of few and short steps.
pub const QUICK: Shape = Shape { steps: 8, batch_sequences: 32, threads: "1", ..SMALL };

/// Three devices of different size and pace.
pub const TRIO: &str = "virtual:a=64MiB@0.4,virtual:b=56MiB@0.2,virtual:c=48MiB@0.1";

/// Trains in the run folder `run` with more arguments, and returns `result.json`.
pub fn train(workspace: &Workspace, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    workspace.succeed(&[&["train", "run.toml", "--quiet", "--set", &dir], more].concat());
    workspace.json(&format!("{run}/result.json"))
}

/// Trains several runs at the same time, in the folders `name-0`, `name-1`, … with the arguments in `each`. Their
/// heartbeat timeouts elapse in parallel.
pub fn train_together(workspace: &Workspace, name: &str, words: &[&str], each: &[&[&str]]) -> Vec<Value> {
    let runs: Vec<String> = (0..each.len()).map(|number| format!("{name}-{number}")).collect();
    let start = |(run, more): (&String, &&[&str])| {
        let dir = format!("run.dir={run}");
        workspace.start(&[&["train", "run.toml", "--quiet", "--set", &dir], words, more].concat())
    };
    let running: Vec<Running> = runs.iter().zip(each).map(start).collect();
    for (running, more) in running.into_iter().zip(each) {
        let done = running.wait();
        assert_eq!(done.code, Some(0), "{more:?}: {}", done.stderr);
    }
    runs.iter().map(|run| workspace.json(&format!("{run}/result.json"))).collect()
}

/// Arguments of a data parallel team of all three devices. A sharded team may be slightly faster.
pub const ALL: [&str; 4] = ["--devices", TRIO, "--set", "run.parallelism=data"];

/// Trains an undisturbed run in the folder `plain`. Returns its result, and arguments that start with its plan, so that
/// later runs do not search for one. Its shares may change. For a single device, following a plan also pins the recipe.
pub fn train_plain<'a>(workspace: &Workspace, words: &[&'a str]) -> (Value, Vec<&'a str>) {
    let result = train(workspace, "plain", words);
    (result, [words, &["--plan", "plain/plan.json", "--set", "run.deterministic=false"]].concat())
}

/// Creates a workspace with an undisturbed run of all three devices, and arguments that follow its plan.
pub fn trio_with_plain_run(more: &[&'static str]) -> (Workspace, Vec<&'static str>) {
    let workspace = Workspace::new(&QUICK);
    let (_, words) = train_plain(&workspace, &[&ALL[..], more].concat());
    (workspace, words)
}

/// Trains a run with one out-of-memory error at each of these places.
pub fn train_with_oom_at(workspace: &Workspace, run: &str, words: &[&str], places: &[&str]) -> Value {
    let injected: Vec<&str> = places.iter().flat_map(|at| ["--inject-oom", at]).collect();
    let result = train(workspace, run, &[words, &injected].concat());
    assert!(result["faults_not_triggered"].as_array().is_none_or(Vec::is_empty), "{result}");
    result
}

/// Returns step, number of labelled tokens and loss of each step in the log.
pub fn step_losses(workspace: &Workspace, run: &str) -> Vec<(u64, u64, f64)> {
    let events = workspace.events(run);
    let steps = events.iter().filter(|event| event["event"] == "step");
    let number = |event: &Value, key: &str| event[key].as_u64().unwrap();
    steps
        .map(|event| (number(event, "step"), number(event, "labelled_tokens"), event["loss"].as_f64().unwrap()))
        .collect()
}

/// Asserts that two runs saw the same samples in every step, with losses that only differ by the order of sums.
pub fn assert_same_experiment(workspace: &Workspace, one: &str, other: &str, tolerance: f64) {
    let (one, other) = (step_losses(workspace, one), step_losses(workspace, other));
    assert_eq!(one.len(), other.len());
    for ((step, tokens, loss), (also_step, also_tokens, also_loss)) in one.iter().zip(&other) {
        assert_eq!((step, tokens), (also_step, also_tokens));
        assert!((loss - also_loss).abs() <= tolerance * loss.abs(), "step {step}: {loss} and {also_loss}");
    }
}

/// Returns the devices of the team in a result.
pub fn worker_names(result: &Value) -> Vec<&str> {
    result["team"].as_array().map_or(vec![], |team| team.iter().map(|m| m["device"].as_str().unwrap()).collect())
}

/// Asserts that arenas have their planned size and no device exceeds its load line.
pub fn assert_within_load_lines(result: &Value) {
    for memory in result["memory"].as_array().unwrap() {
        assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"], "{memory}");
        let bytes = |key: &str| memory[key].as_u64().unwrap();
        assert!(bytes("measured_bytes") <= bytes("budget_bytes"), "{memory}");
        let categories = memory["arena_measured_by_category"].as_object().unwrap();
        let sum: u64 = categories.values().map(|bytes| bytes.as_u64().unwrap()).sum();
        assert_eq!(sum, bytes("arena_measured_bytes"), "{memory}");
    }
}

/// Returns flags for an out-of-memory error that repeats more often than a run tries.
pub fn persistent_oom(at: &str) -> Vec<&str> {
    [["--inject-oom", at]; 40].concat()
}

/// Returns the device of the only loss event, the reason, and the step from which the others resumed.
pub fn lost_device(workspace: &Workspace, run: &str) -> (String, String, Option<u64>) {
    let lost: Vec<Value> = workspace.events(run).into_iter().filter(|event| event["event"] == "device_lost").collect();
    assert_eq!(lost.len(), 1, "{lost:?}");
    let text = |key: &str| lost[0][key].as_str().unwrap().to_owned();
    (text("device"), text("reason"), lost[0]["resumed_from_step"].as_u64())
}

/// Creates a workspace with a model of 2.4 million parameters, which takes 36 MiB with gradients and optimizer state.
pub fn model_for_two() -> Workspace {
    let workspace = Workspace::new(&Shape { hidden: 256, steps: 6, batch_sequences: 6, save_every: 3, ..QUICK });
    let mut config: Value = serde_json::from_str(&workspace.read("model/config.json")).unwrap();
    config["num_hidden_layers"] = 4.into();
    workspace.write("model/config.json", config.to_string());
    workspace
}

/// Asserts that the saved weights of two runs differ by less than `tolerance`.
pub fn assert_same_weights(workspace: &Workspace, one: &str, other: &str, tolerance: f32) {
    let read = |run: &str| std::fs::read(workspace.path(&format!("{run}/model/model.safetensors"))).unwrap();
    let (one, other) = (read(one), read(other));
    assert_eq!(one.len(), other.len());
    let header = 8 + u64::from_le_bytes(one[..8].try_into().unwrap()) as usize;
    assert_eq!(one[..header], other[..header], "the safetensors headers are equal");
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes[header..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let furthest = numbers(&one).iter().zip(numbers(&other)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest < tolerance, "{furthest}");
}

/// Arguments of runs that test stragglers: only training steps.
pub const NO_SAVES_OR_EVALS: [&str; 4] = ["--set", "train.save_every=0", "--set", "train.eval_every=0"];

/// Two devices: the second would slow down the first, because its link is too slow for the gradients of every step, but it
/// is fast enough for the weights of an evaluation.
pub const WITH_EVALUATOR: &str = "virtual:a=64MiB@0.4,virtual:b=48MiB@0.07::34MB/s";

/// Arguments that evaluate after every second step. Several devices train data parallel.
pub const EVAL_EVERY_TWO: [&str; 4] = ["--set", "train.eval_every=2", "--set", "run.parallelism=data"];

/// Reads the saved model of a run.
pub fn read_weights(workspace: &Workspace, run: &str) -> Vec<u8> {
    std::fs::read(workspace.path(&format!("{run}/model/model.safetensors"))).unwrap()
}

/// Creates a workspace with a model of one layer, which excludes pipelines. It takes 86 MiB to train, and a quarter of
/// that to evaluate.
pub fn one_layer_model() -> Workspace {
    let workspace = Workspace::new(&Shape { hidden: 768, steps: 6, batch_sequences: 6, ..QUICK });
    let mut config: Value = serde_json::from_str(&workspace.read("model/config.json")).unwrap();
    config["num_hidden_layers"] = 1.into();
    workspace.write("model/config.json", config.to_string());
    workspace
}
