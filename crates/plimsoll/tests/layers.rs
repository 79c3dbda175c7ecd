//! A model that fits no device trains on several as a pipeline: the same experiment as on one that holds it, every load line
//! held, with files that one device goes on from.

mod common;

use common::{Place, SMALL, Shape};
use serde_json::Value;

/// A model of some layers that is large beside what a process holds anyway, and enough sequences for stages to work at the
/// same time.
const WIDE: Shape = Shape { hidden: 256, steps: 6, batch_sequences: 6, threads: "1", save_every: 3, ..SMALL };

/// Neither holds the model, and nothing may wait on the host.
const PAIR: &str = "virtual:a=78MiB@0.6::1.5gbit,virtual:b=60MiB@0.45::1.5gbit,host=1MiB";

fn place() -> Place {
    let place = Place::new(&WIDE);
    let mut config = common::config(WIDE.hidden);
    config["num_hidden_layers"] = 8.into();
    place.write("model/config.json", config.to_string());
    place
}

fn train(place: &Place, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    place.succeed(&[&["train", "run.toml", "--quiet", "--set", &dir], more].concat());
    place.json(&format!("{run}/result.json"))
}

/// Of every step, and of the last evaluation.
fn losses(place: &Place, run: &str) -> Vec<f64> {
    let events = place.events(run);
    let of = |name: &str| -> Vec<f64> {
        let events = events.iter().filter(|event| event["event"] == name);
        events.map(|event| event["loss"].as_f64().unwrap()).collect()
    };
    let evaluations = of("evaluation");
    of("step").into_iter().chain(evaluations.last().copied()).collect()
}

fn same_experiment(place: &Place, one: &str, other: &str) {
    let (one, other) = (losses(place, one), losses(place, other));
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(&other) {
        assert!((one - other).abs() <= 1e-4 * one.abs(), "{one} and {other}");
    }
}

/// The layers at which stages begin and end, as the plan that a run ended with says.
fn stages(place: &Place, run: &str) -> Vec<(String, u64)> {
    let plan = place.json(&format!("{run}/plan.json"));
    let of = |member: &Value| {
        let [first, end] = [0, 1].map(|at| member["layers"][at].as_u64().unwrap());
        (member["device"].as_str().unwrap().to_owned(), end - first)
    };
    plan["team"].as_array().unwrap().iter().map(of).collect()
}

#[test]
fn a_stage_that_becomes_slow_gives_layers_to_the_others() {
    let place = place();
    let words = ["--devices", "virtual:a=86MiB@0.4::0.4gbit,virtual:b=86MiB@0.4::0.4gbit,host=1MiB"];
    // As many as are looked at before anything is done, and some more for which that pays.
    let words = [&words[..], &["--set", "train.steps=28", "--set", "train.save_every=0"]].concat();
    let words = [&words[..], &["--set", "data.sequence=16", "--set", "train.batch_tokens=64"]].concat();
    let result = train(&place, "even", &words);
    let words = [&words[..], &["--plan", "even/plan.json"]].concat();
    assert_eq!((&result["sharing"], &result["retreats"]), (&"layers".into(), &Value::Array(vec![])));
    assert!(place.events("even").iter().all(|event| event["event"] != "warning"), "nothing drifts");
    let layers = |run: &str| stages(&place, run).into_iter().find(|(device, _)| device == "virtual:b").unwrap().1;
    let result = train(&place, "slow", &[&words[..], &["--inject-slow", "virtual:b:2:6.0"]].concat());
    assert_eq!(result["status"], "done");
    assert!(layers("slow") < layers("even"), "{:?} {:?}", stages(&place, "even"), stages(&place, "slow"));
    same_experiment(&place, "even", "slow");
}

#[test]
fn a_model_that_fits_neither_device_trains_as_a_pipeline() {
    let place = place();
    for alone in PAIR.split(',').take(2) {
        let line = format!("{alone},host=1MiB");
        place.refuse(3, &["train", "run.toml", "--quiet", "--devices", &line, "--set", "run.dir=none"]);
    }
    train(&place, "alone", &["--devices", "cpu"]);
    let result = train(&place, "pair", &["--devices", PAIR]);
    assert_eq!(result["sharing"], "layers");
    for memory in result["memory"].as_array().unwrap() {
        assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"], "{memory}");
        let bytes = |key: &str| memory[key].as_u64().unwrap();
        assert!(bytes("measured_bytes") <= bytes("budget_bytes"), "{memory}");
    }
    same_experiment(&place, "alone", "pair");
}

/// Both together do not hold the model either: state waits on the host.
const SMALL_PAIR: &str = "virtual:a=55MiB@0.6::1.5gbit,virtual:b=47MiB@0.45::1.5gbit,host=56MiB";

#[test]
fn stages_let_wait_on_the_host_what_they_have_no_room_for() {
    let place = place();
    train(&place, "alone", &["--devices", "cpu"]);
    let known = ["--plan", "pair/plan.json"];
    let again = [&known[..], &["--inject-oom", "virtual:b/2:backward:9"]].concat();
    for (run, more) in [("pair", &[][..]), ("again", &again)] {
        let result = train(&place, run, &[&["--devices", SMALL_PAIR], more].concat());
        assert_eq!(result["sharing"], "layers");
        let memory = result["memory"].as_array().unwrap();
        for memory in memory {
            assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"], "{memory}");
            let bytes = |key: &str| memory[key].as_u64().unwrap();
            assert!(bytes("measured_bytes") <= bytes("budget_bytes"), "{memory}");
        }
        let waits = result["team"].as_array().unwrap().iter();
        let waits = waits.filter(|member| member["recipe"]["offload"]["optimizer"].as_u64().unwrap() > 0);
        assert!(waits.count() > 0, "{result}");
        same_experiment(&place, "alone", run);
    }
    // One device goes on where a pipeline was that had state on the host.
    train(&place, "cut", &[&known[..], &["--devices", SMALL_PAIR, "--set", "train.steps=3"]].concat());
    let text = place.read("cut/run.toml").replace("steps = 3", "steps = 6").replace(SMALL_PAIR, "cpu");
    place.write("cut/run.toml", text);
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    same_experiment(&place, "alone", "cut");
}

#[test]
fn one_device_goes_on_from_the_checkpoint_of_a_pipeline_and_a_pipeline_from_its_own() {
    let place = place();
    train(&place, "whole", &["--devices", PAIR]);
    for (run, devices) in [("same", PAIR), ("one", "cpu")] {
        train(&place, run, &["--devices", PAIR, "--set", "train.steps=3", "--plan", "whole/plan.json"]);
        let text = place.read(&format!("{run}/run.toml")).replace("steps = 3", "steps = 6").replace(PAIR, devices);
        place.write(&format!("{run}/run.toml"), text);
        place.succeed(&["train", "--resume", run, "--quiet"]);
        let result = place.json(&format!("{run}/result.json"));
        assert_eq!(result["sharing"] == "layers", devices == PAIR, "{result}");
        same_experiment(&place, "whole", run);
    }
    let whole = place.files("whole/model");
    assert!(whole == place.files("same/model"), "the bits of an undisturbed run");
    assert!(whole.keys().eq(place.files("one/model").keys()));
}

#[test]
fn what_one_stage_refuses_is_dropped_by_all_and_done_again() {
    let place = place();
    train(&place, "plain", &["--devices", PAIR]);
    let words = ["--devices", PAIR, "--plan", "plain/plan.json"];
    let places = [
        ("virtual:b", 0, "virtual:b/0:load"),
        ("virtual:a", 2, "virtual:a/2:backward:9"),
        ("virtual:b", 3, "virtual:b/3:forward:4"),
        ("virtual:a", 4, "virtual:a/4:norm"),
        ("virtual:b", 5, "virtual:b/5:update:3"),
    ];
    let injected = places.map(|(.., at)| ["--inject-oom", at]).concat();
    let result = train(&place, "run", &[&words[..], &injected].concat());
    assert!(result["not_rehearsed"].as_array().is_none_or(Vec::is_empty), "{result}");
    let retreats = result["retreats"].as_array().unwrap();
    for (device, step, at) in places {
        let here = |retreat: &Value| retreat["device"] == device && retreat["step"] == step;
        assert!(retreats.iter().any(here), "{at}: {retreats:?}");
    }
    same_experiment(&place, "plain", "run");
}

#[test]
fn a_stage_that_is_gone_takes_the_others_back_to_the_checkpoint_or_stops_the_run() {
    let place = place();
    train(&place, "plain", &["--devices", PAIR]);
    let trio = PAIR.replace(",host", ",virtual:c=52MiB@0.45::1.5gbit,host");
    let lost = ["--devices", &trio, "--set", "run.team=all", "--inject-loss", "virtual:c:5"];
    let result = train(&place, "trio", &lost);
    let names: Vec<&str> = result["team"].as_array().unwrap().iter().map(|m| m["device"].as_str().unwrap()).collect();
    assert_eq!((names.len(), names.contains(&"virtual:c")), (2, false), "{result}");
    assert_eq!((&result["sharing"], &result["lost"][0]["back_to"]), (&"layers".into(), &3.into()));
    let last = |run: &str| losses(&place, run).pop().unwrap();
    assert!((last("plain") - last("trio")).abs() <= 1e-4 * last("plain").abs());
    // What is left cannot hold the model.
    let lost = ["train", "run.toml", "--quiet", "--devices", PAIR, "--plan", "plain/plan.json"];
    let lost = [&lost[..], &["--inject-loss", "virtual:b:5"]].concat();
    let message = place.refuse(4, &lost);
    assert!(message.contains("no recipe of this run fits on what is left"), "{message}");
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_eq!(place.json("run/result.json")["status"], "done");
}
