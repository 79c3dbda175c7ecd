//! Several unequal devices work on one run: the same experiment as on one, every load line held, and none of them holds up
//! the others when it refuses, is slow or is gone.

mod common;

use common::{Place, SMALL, Shape};
use serde_json::Value;

/// Few steps, each as quick as it can be.
const QUICK: Shape = Shape { steps: 8, batch_sequences: 32, threads: "1", ..SMALL };

/// Three devices of other size and pace each.
const TRIO: &str = "virtual:a=64MiB@0.4,virtual:b=56MiB@0.2,virtual:c=48MiB@0.1";

fn train(place: &Place, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    place.succeed(&[&["train", "run.toml", "--quiet", "--set", &dir], more].concat());
    place.json(&format!("{run}/result.json"))
}

/// Steps, counts of tokens and losses, in order.
fn steps(place: &Place, run: &str) -> Vec<(u64, u64, f64)> {
    let events = place.events(run);
    let steps = events.iter().filter(|event| event["event"] == "step");
    let number = |event: &Value, key: &str| event[key].as_u64().unwrap();
    steps
        .map(|event| (number(event, "step"), number(event, "labelled_tokens"), event["loss"].as_f64().unwrap()))
        .collect()
}

/// That two runs are the same experiment: the same samples in every step, and losses as near as other orders of sums are.
fn same_experiment(place: &Place, one: &str, other: &str, apart: f64) {
    let (one, other) = (steps(place, one), steps(place, other));
    assert_eq!(one.len(), other.len());
    for ((step, tokens, loss), (also_step, also_tokens, also_loss)) in one.iter().zip(&other) {
        assert_eq!((step, tokens), (also_step, also_tokens));
        assert!((loss - also_loss).abs() <= apart * loss.abs(), "step {step}: {loss} and {also_loss}");
    }
}

fn names(result: &Value) -> Vec<&str> {
    result["team"].as_array().map_or(vec![], |team| team.iter().map(|m| m["device"].as_str().unwrap()).collect())
}

/// Arenas as planned, and every line held.
fn holds(result: &Value) {
    for memory in result["memory"].as_array().unwrap() {
        assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"], "{memory}");
        let bytes = |key: &str| memory[key].as_u64().unwrap();
        assert!(bytes("measured_bytes") <= bytes("budget_bytes"), "{memory}");
    }
}

#[test]
fn unequal_devices_do_the_same_experiment_as_one() {
    let place = Place::new(&QUICK);
    train(&place, "alone", &["--devices", "cpu"]);
    let result = train(&place, "team", &["--devices", TRIO, "--set", "run.team=all"]);
    assert_eq!(names(&result), ["virtual:a", "virtual:b", "virtual:c"]);
    assert_eq!(result["sharing"], "batch");
    holds(&result);
    same_experiment(&place, "alone", "team", 1e-4);
    let shares: Vec<u64> =
        result["team"].as_array().unwrap().iter().map(|member| member["sequences"].as_u64().unwrap()).collect();
    assert!(shares.is_sorted_by(|a, b| a >= b), "the faster one does more: {shares:?}");
}

#[test]
fn a_killed_team_goes_on_with_the_same_bits() {
    let place = Place::new(&QUICK);
    let words = ["--devices", TRIO, "--set", "run.team=all", "--set", "train.save_every=2"];
    train(&place, "whole", &words);
    train(&place, "cut", &[&words[..], &["--set", "train.steps=4"]].concat());
    let text = place.read("cut/run.toml").replace("steps = 4", "steps = 8");
    place.write("cut/run.toml", text);
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    let result = place.json("cut/result.json");
    assert_eq!(names(&result), ["virtual:a", "virtual:b", "virtual:c"]);
}

#[test]
fn what_one_device_refuses_is_dropped_by_all_and_done_again() {
    let place = Place::new(&QUICK);
    let words = ["--devices", TRIO, "--set", "run.team=all"];
    train(&place, "plain", &words);
    for (number, at) in
        ["virtual:b/2:backward:9", "virtual:c/3:norm", "virtual:a/3:update:3", "virtual:b/4:begin", "virtual:c/0:load"]
            .iter()
            .enumerate()
    {
        let run = format!("run-{number}");
        let result = train(&place, &run, &[&words[..], &["--inject-oom", at]].concat());
        let retreats = result["retreats"].as_array().unwrap();
        let device = at.split('/').next().unwrap();
        assert!(retreats.iter().any(|retreat| retreat["device"] == device), "{at}: {retreats:?}");
        same_experiment(&place, "plain", &run, 1e-4);
    }
}

#[test]
fn a_device_that_is_gone_leaves_the_others_to_go_on_from_the_last_finished_step() {
    let place = Place::new(&QUICK);
    let words = ["--devices", TRIO, "--set", "run.team=all"];
    train(&place, "plain", &words);
    for (number, at) in ["virtual:b:3", "virtual:a:4:update", "virtual:c:1", "virtual:b:5:backward"].iter().enumerate()
    {
        let run = format!("run-{number}");
        let result = train(&place, &run, &[&words[..], &["--inject-loss", at]].concat());
        let gone: Vec<&str> = at.splitn(3, ':').take(2).collect();
        assert!(!names(&result).contains(&gone.join(":").as_str()), "{at}");
        let events = place.events(&run);
        assert_eq!(events.iter().filter(|event| event["event"] == "lost").count(), 1, "{at}");
        same_experiment(&place, "plain", &run, 1e-4);
    }
    // One after the other, until one is left.
    let lost = [&words[..], &["--inject-loss", "virtual:a:2", "--inject-loss", "virtual:c:4"]].concat();
    let result = train(&place, "last", &lost);
    assert_eq!(result["status"], "done");
    same_experiment(&place, "plain", "last", 1e-4);
}

#[test]
fn a_device_that_becomes_slow_is_given_less_to_do() {
    let place = Place::new(&Shape { steps: 80, ..QUICK });
    let words = ["--devices", "virtual:a=64MiB@0.03,virtual:b=64MiB@0.03", "--set", "run.team=all"];
    let result = train(&place, "even", &words);
    assert_eq!(result["retreats"], Value::Array(vec![]), "nothing drifts");
    let result = train(&place, "slow", &[&words[..], &["--inject-slow", "virtual:b:5:2.0"]].concat());
    let sequences = |rank: usize| result["team"][rank]["sequences"].as_u64().unwrap();
    assert!(sequences(0) > sequences(1), "{result}");
    same_experiment(&place, "even", "slow", 1e-4);
}

#[test]
fn the_line_of_one_device_is_moved_by_its_name() {
    let place = Place::new(&Shape { steps: 400, ..QUICK });
    let running = place.start(&[
        "train",
        "run.toml",
        "--quiet",
        "--set",
        "run.dir=run",
        "--devices",
        TRIO,
        "--set",
        "run.team=all",
    ]);
    let mut running = running;
    assert!(running.until(|| place.events("run").iter().any(|event| event["event"] == "step")));
    assert!(place.refuse(3, &["budget", "run", "40MiB"]).contains("name the device"));
    assert!(place.refuse(3, &["budget", "run", "40MiB", "--device", "virtual:x"]).contains("virtual:a, virtual:b"));
    place.succeed(&["budget", "run", "50MiB", "--device", "virtual:b"]);
    running.end();
    let result = place.json("run/result.json");
    assert_eq!(result["memory"][1]["device"], "virtual:b");
    assert_eq!(result["status"], "done");
}
