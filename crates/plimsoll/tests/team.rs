//! Several unequal devices work on one run: the same experiment as on one, every load line held, and none of them holds up
//! the others when it refuses, is slow or is gone.

mod common;

use common::{Place, Running, SMALL, Shape};
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

/// The same of several runs at once, named by their numbers, each with more words: what is waited for passes once.
fn train_together(place: &Place, name: &str, words: &[&str], each: &[&[&str]]) -> Vec<Value> {
    let runs: Vec<String> = (0..each.len()).map(|number| format!("{name}-{number}")).collect();
    let start = |(run, more): (&String, &&[&str])| {
        let dir = format!("run.dir={run}");
        place.start(&[&["train", "run.toml", "--quiet", "--set", &dir], words, more].concat())
    };
    let running: Vec<Running> = runs.iter().zip(each).map(start).collect();
    for (running, more) in running.into_iter().zip(each) {
        let done = running.end();
        assert_eq!(done.code, Some(0), "{more:?}: {}", done.stderr);
    }
    runs.iter().map(|run| place.json(&format!("{run}/result.json"))).collect()
}

/// Where all of them take part.
const ALL: [&str; 4] = ["--devices", TRIO, "--set", "run.team=all"];

/// A run, `plain`, that nothing happens to, and how to begin another one: by the plan of that one, which nobody looks for again. Of a device
/// that is alone the plan's recipe is then pinned.
fn plain<'a>(place: &Place, words: &[&'a str]) -> (Value, Vec<&'a str>) {
    let result = train(place, "plain", words);
    (result, [words, &["--plan", "plain/plan.json"]].concat())
}

/// A place with a run, `plain`, of all three that nothing happened to, and how to begin another one.
fn of_all(more: &[&'static str]) -> (Place, Vec<&'static str>) {
    let place = Place::new(&QUICK);
    let (_, words) = plain(&place, &[&ALL[..], more].concat());
    (place, words)
}

/// Devices refuse memory once at each of these places, all in one run.
fn refuse_at(place: &Place, run: &str, words: &[&str], places: &[&str]) -> Value {
    let injected: Vec<&str> = places.iter().flat_map(|at| ["--inject-oom", at]).collect();
    let result = train(place, run, &[words, &injected].concat());
    assert!(result["not_rehearsed"].as_array().is_none_or(Vec::is_empty), "{result}");
    result
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
    let result = train(&place, "team", &ALL);
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
    let (_, words) = plain(&place, &[&ALL[..], &["--set", "train.save_every=2"]].concat());
    train(&place, "cut", &[&words[..], &["--set", "train.steps=4"]].concat());
    let text = place.read("cut/run.toml").replace("steps = 4", "steps = 8");
    place.write("cut/run.toml", text);
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    let result = place.json("cut/result.json");
    assert_eq!(names(&result), ["virtual:a", "virtual:b", "virtual:c"]);
}

#[test]
fn what_one_device_refuses_is_dropped_by_all_and_done_again() {
    let (place, words) = of_all(&[]);
    let places = [
        ("virtual:c", 0, "virtual:c/0:load"),
        ("virtual:b", 2, "virtual:b/2:backward:9"),
        ("virtual:c", 3, "virtual:c/3:norm"),
        ("virtual:a", 4, "virtual:a/4:update:3"),
        ("virtual:b", 5, "virtual:b/5:begin"),
    ];
    let result = refuse_at(&place, "run", &words, &places.map(|(.., at)| at));
    let retreats = result["retreats"].as_array().unwrap();
    for (device, step, at) in places {
        let here = |retreat: &Value| retreat["device"] == device && retreat["step"] == step;
        assert!(retreats.iter().any(here), "{at}: {retreats:?}");
    }
    same_experiment(&place, "plain", "run", 1e-4);
}

#[test]
fn shares_that_are_drawn_anew_after_a_refusal_leave_every_line_where_it_was() {
    let (place, words) = of_all(&[]);
    let places = ["3", "3:re-plan", "virtual:b/3:re-plan"];
    let result = refuse_at(&place, "refused", &words, &places);
    let lines = |of: &Value| -> Vec<Value> {
        of["devices"].as_array().unwrap().iter().map(|device| device["budget_bytes"].clone()).collect()
    };
    assert!(!result["retreats"].as_array().unwrap().is_empty(), "{result}");
    assert_eq!(lines(&place.json("refused/plan.json")), lines(&place.json("plain/plan.json")));
    same_experiment(&place, "plain", "refused", 1e-4);
}

#[test]
fn a_device_that_is_gone_leaves_the_others_to_go_on_from_the_last_finished_step() {
    let (place, words) = of_all(&[]);
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

/// More often than a run has rungs, and tries.
fn for_ever(at: &str) -> Vec<&str> {
    [["--inject-oom", at]; 40].concat()
}

/// The one device that left, with the step that the others went back to.
fn left_out(place: &Place, run: &str) -> (String, String, Option<u64>) {
    let lost: Vec<Value> = place.events(run).into_iter().filter(|event| event["event"] == "lost").collect();
    assert_eq!(lost.len(), 1, "{lost:?}");
    let text = |key: &str| lost[0][key].as_str().unwrap().to_owned();
    (text("device"), text("why"), lost[0]["back_to"].as_u64())
}

#[test]
fn a_device_that_refuses_for_ever_is_left_out_and_the_others_go_on() {
    let (place, words) = of_all(&[]);
    for (number, at) in ["virtual:b/3:update", "virtual:c/4:update:4", "virtual:a/5:backward", "virtual:a/4:checkpoint"]
        .iter()
        .enumerate()
    {
        let run = format!("run-{number}");
        let result = train(&place, &run, &[&words[..], &for_ever(at)].concat());
        assert_eq!(result["status"], "done", "{at}");
        let (device, why, back_to) = left_out(&place, &run);
        assert_eq!((&device[..], back_to), (&at[..9], None), "{at}");
        assert!(why.contains(&device) && why.contains("made no progress"), "{at}: {why}");
        assert!(names(&result).len() == 2 && !names(&result).contains(&&at[..9]), "{at}: {result}");
        same_experiment(&place, "plain", &run, 1e-4);
    }
}

#[test]
fn a_device_that_is_lost_and_has_no_other_beside_it_stops_the_run_in_order() {
    let place = Place::new(&QUICK);
    for (run, device, named, at) in
        [("cpu", "cpu", "cpu", "cpu:6:backward"), ("virtual", "virtual:a=64MiB@1.0", "virtual:a", "virtual:a:6:update")]
    {
        let plain = format!("{run}-plain");
        train(&place, &plain, &["--devices", device]);
        let dir = format!("run.dir={run}");
        let words = ["train", "run.toml", "--quiet", "--set", &dir, "--devices", device, "--inject-loss", at];
        let said = place.refuse(4, &words);
        assert!(said.contains(&format!("step 6: {named} is gone")) && said.contains("--resume"), "{said}");
        let result = place.json(&format!("{run}/result.json"));
        assert_eq!((&result["status"], &result["steps"]), (&"stopped".into(), &5.into()), "{result}");
        let lost = serde_json::json!([{ "device": named, "step": 6, "back_to": 4 }]);
        assert_eq!((&result["lost"], &result["memory"]), (&lost, &Value::Array(vec![])), "{result}");
        assert_eq!(left_out(&place, run).2, Some(4));
        place.succeed(&["train", "--resume", run, "--quiet"]);
        assert_eq!(place.json(&format!("{run}/result.json"))["status"], "done");
        let done: Vec<u64> = steps(&place, run).iter().map(|(step, ..)| *step).collect();
        assert_eq!(done, [1, 2, 3, 4, 5, 5, 6, 7, 8]);
        let weights = |run: &str| std::fs::read(place.path(&format!("{run}/model/model.safetensors"))).unwrap();
        assert!(weights(run) == weights(&plain));
    }
}

/// The second would only slow the first.
const SPARE: &str = "virtual:a=64MiB@0.4,virtual:b=48MiB@0.1::1MB/s";

#[test]
fn who_was_left_out_takes_over_where_nobody_else_works_on_the_run() {
    let place = Place::new(&QUICK);
    let (_, words) = plain(&place, &["--devices", SPARE, "--set", "run.heartbeat_seconds=1"]);
    let plan = place.json("plain/plan.json");
    assert_eq!(plan["left_out"][0]["device"], "virtual:b", "{plan}");
    assert!(plan["team"].as_array().is_none_or(Vec::is_empty) && plan["left_out"][0]["evaluates"].is_null(), "{plan}");
    // By hand: what was saved until then goes on with the other one.
    train(&place, "by-hand", &["--devices", "virtual:a=64MiB@0.4", "--set", "train.steps=4"]);
    let text = place
        .read("by-hand/run.toml")
        .replace("steps = 4", "steps = 8")
        .replace("virtual:a=64MiB@0.4", "virtual:b=48MiB@0.1");
    place.write("by-hand/run.toml", text);
    place.succeed(&["train", "--resume", "by-hand", "--quiet"]);
    for (run, injected, step, finished, back_to) in [
        ("in-a-step", ["--inject-loss", "virtual:a:6:backward"], 6, 5, Some(4)),
        ("in-an-update", ["--inject-loss", "virtual:a:7:update"], 7, 6, Some(4)),
        ("silent", ["--inject-silence", "virtual:a:6:forever"], 6, 5, Some(4)),
        ("at-the-end", ["--inject-loss", "virtual:a:8:save"], 8, 8, Some(8)),
        ("early", ["--inject-loss", "virtual:a:2"], 2, 1, Some(0)),
        ("filled", ["--inject-loss", "virtual:a:0:load"], 0, 0, Some(0)),
        ("opened", ["--inject-loss", "virtual:a:0"], 0, 0, None),
    ] {
        let result = train(&place, run, &[&words[..], &injected].concat());
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &8.into()), "{run}: {result}");
        let (device, _, to) = left_out(&place, run);
        assert_eq!((&device[..], to, &result["lost"][0]["step"]), ("virtual:a", back_to, &step.into()), "{run}");
        let events = place.events(run);
        let at = |event: &str| events.iter().position(|found| found["event"] == event);
        let lost = at("lost").unwrap();
        assert_eq!(events[lost]["left"], serde_json::json!(["virtual:b"]), "{run}");
        let told = "the run goes on with virtual:b, which was left out";
        assert!(events[lost..].iter().any(|event| event["message"] == told), "{run}: {events:?}");
        let done: Vec<u64> = steps(&place, run).iter().map(|(step, ..)| *step).collect();
        assert_eq!(done, (1..=finished).chain(back_to.unwrap_or(0) + 1..=8).collect::<Vec<u64>>(), "{run}");
        let memory: Vec<&Value> = result["memory"].as_array().unwrap().iter().map(|memory| &memory["device"]).collect();
        assert_eq!(memory, ["virtual:b"], "{run}");
        if back_to != Some(8) {
            holds(&result);
        }
        same_weights(&place, "plain", run, 1e-3);
        if back_to == Some(4) {
            same_weights(&place, "by-hand", run, f32::MIN_POSITIVE);
        }
    }
    // One that refuses for ever is like one that is gone, but what stands on it is saved before.
    let result = train(&place, "refuses", &[&words[..], &for_ever("virtual:a/6:backward")].concat());
    assert_eq!((&result["status"], left_out(&place, "refuses").2), (&"done".into(), Some(5)), "{result}");
    same_weights(&place, "plain", "refuses", 1e-3);
}

#[test]
fn the_last_of_a_team_is_missed_where_somebody_could_take_over() {
    let place = Place::new(&QUICK);
    let words = ["--devices", "virtual:a=64MiB@0.3,virtual:b=64MiB@0.3,virtual:c=48MiB@0.1::1MB/s"];
    let (result, words) = plain(&place, &[&words[..], &["--set", "run.heartbeat_seconds=1"]].concat());
    assert_eq!((names(&result), &result["sharing"]), (vec!["virtual:a", "virtual:b"], &"batch".into()), "{result}");
    let gone = ["--inject-loss", "virtual:b:3", "--inject-silence", "virtual:a:6:forever"];
    let result = train(&place, "run", &[&words[..], &gone].concat());
    let lost: Vec<Value> = place.events("run").into_iter().filter(|event| event["event"] == "lost").collect();
    let left: Vec<&Value> = lost.iter().map(|event| &event["left"]).collect();
    assert_eq!(left, [&serde_json::json!(["virtual:a"]), &serde_json::json!(["virtual:c"])], "{result}");
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &8.into()), "{result}");
    same_weights(&place, "plain", "run", 1e-3);
}

#[test]
fn a_run_whose_last_device_is_lost_stops_where_none_that_was_left_out_can_hold_it() {
    let place = larger();
    let (_, words) = plain(&place, &["--devices", "virtual:a=128MiB@0.4,virtual:b=40MiB@0.1::1MB/s,host=1MiB"]);
    let start = ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--inject-loss", "virtual:a:5"];
    let said = place.refuse(4, &[&start[..], &words].concat());
    assert!(said.contains("step 5: virtual:a is gone") && said.contains("fits on those that were left out"), "{said}");
    let lost = place.events("run").into_iter().find(|event| event["event"] == "lost").unwrap();
    assert_eq!((&lost["left"], &lost["back_to"]), (&serde_json::json!([]), &3.into()), "{lost}");
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    same_weights(&place, "plain", "run", f32::MIN_POSITIVE);
}

#[test]
fn a_device_is_lost_when_it_gives_no_sign_of_life_and_never_because_it_is_slow() {
    let (place, words) = of_all(&["--set", "run.heartbeat_seconds=1"]);
    let result = train(&place, "silent", &[&words[..], &["--inject-silence", "virtual:b:3"]].concat());
    assert!(!names(&result).contains(&"virtual:b"), "{result}");
    let lost = place.events("silent").into_iter().find(|event| event["event"] == "lost").unwrap();
    assert_eq!(
        (&lost["device"], &lost["why"]),
        (&"virtual:b".into(), &"virtual:b gave no sign of life for 1 s".into())
    );
    same_experiment(&place, "plain", "silent", 1e-4);
    // One after the other, until one is left: that one is missed by nobody, and does the rest.
    let all = ["--inject-loss", "virtual:a:2:update", "--inject-silence", "virtual:b:3"];
    let alone = [&words[..], &all, &["--inject-silence", "virtual:c:5:forever"]].concat();
    let result = train(&place, "alone", &alone);
    assert_eq!(result["status"], "done");
    assert_eq!(result["not_rehearsed"], serde_json::json!(["--inject-silence virtual:c:5:forever"]));
    same_experiment(&place, "plain", "alone", 1e-4);
    // Passes of this device take far longer than the time in which a silent one is lost.
    let slow = [&words[..], &["--inject-slow", "virtual:b:6:300", "--set", "train.steps=6"]].concat();
    let result = train(&place, "slow", &slow);
    assert!(names(&result).contains(&"virtual:b"), "{result}");
    assert!(place.events("slow").iter().all(|event| event["event"] != "lost"));
    let slowest = result["step_seconds"]["p95"].as_f64().unwrap();
    assert!(slowest > 1.0, "{slowest} s: nothing was slow");
    // What hangs for good is left behind, before anything was done, in a step and at the end.
    let hang = [("virtual:b", 0), ("virtual:a", 0), ("virtual:b", 5), ("virtual:a", 8)];
    let at = hang.map(|(device, step)| format!("{device}:{step}:forever"));
    let at: Vec<[&str; 2]> = at.iter().map(|at| ["--inject-silence", at]).collect();
    let each: Vec<&[&str]> = at.iter().map(|at| &at[..]).collect();
    let results = train_together(&place, "hangs", &words, &each);
    for (number, ((device, step), result)) in hang.iter().zip(results).enumerate() {
        let run = format!("hangs-{number}");
        assert_eq!((&result["status"], left_out(&place, &run).0.as_str()), (&"done".into(), *device), "{result}");
        assert_eq!(result["lost"][0]["step"].as_u64(), Some(*step), "{result}");
        assert!(!names(&result).contains(device), "{result}");
        same_experiment(&place, "plain", &run, 1e-4);
    }
}

#[test]
fn devices_that_are_silent_together_stop_the_run_in_order() {
    let (place, words) = of_all(&["--set", "run.heartbeat_seconds=1"]);
    let silent = ["virtual:a:3", "virtual:b:3:forever", "virtual:c:3"].map(|at| ["--inject-silence", at]);
    let said = place.refuse(
        4,
        &[&["train", "run.toml", "--quiet", "--set", "run.dir=silent"], &words[..], &silent.concat()].concat(),
    );
    assert!(said.contains("gave no sign of life for 1 s") && said.contains("plimsoll train --resume"), "{said}");
    let result = place.json("silent/result.json");
    assert_eq!((&result["status"], result["lost"].as_array().unwrap().len()), (&"stopped".into(), 3), "{result}");
    place.succeed(&["train", "--resume", "silent", "--quiet"]);
    assert_eq!(place.json("silent/result.json")["status"], "done");
}

#[test]
fn devices_that_are_gone_while_they_are_opened_leave_the_others_or_a_run_that_can_go_on() {
    let (place, words) = of_all(&[]);
    let result = train(&place, "run", &[&words[..], &["--inject-loss", "virtual:a:0"]].concat());
    assert_eq!((&result["status"], left_out(&place, "run").0.as_str()), (&"done".into(), "virtual:a"), "{result}");
    same_experiment(&place, "plain", "run", 1e-4);
    let gone = ["virtual:a:0", "virtual:b:0:open", "virtual:c:0:load"].map(|at| ["--inject-loss", at]).concat();
    let start = ["train", "run.toml", "--quiet", "--set", "run.dir=nobody"];
    let said = place.refuse(4, &[&start[..], &words, &gone].concat());
    assert!(said.contains("virtual:c is gone") && said.contains("--resume"), "{said}");
    let result = place.json("nobody/result.json");
    assert_eq!((&result["status"], result["lost"].as_array().unwrap().len()), (&"stopped".into(), 3), "{result}");
    assert!(!place.path("nobody/control.sock").exists());
    place.succeed(&["train", "--resume", "nobody", "--quiet"]);
    same_experiment(&place, "plain", "nobody", 1e-4);
    let refused = place.refuse(2, &["train", "run.toml", "--set", "run.dir=no", "--inject-oom", "0:open"]);
    assert!(refused.contains("never refused while it is opened"), "{refused}");
    let later = ["train", "run.toml", "--set", "run.dir=no", "--devices", TRIO, "--inject-silence", "virtual:b:3:open"];
    assert!(place.refuse(2, &later).contains("devices are opened in step 0"));
}

#[test]
fn a_device_that_hangs_while_it_is_opened_is_missed_and_holds_up_nobody() {
    let beats = ["--set", "run.heartbeat_seconds=1"];
    let (place, words) = of_all(&beats);
    let hang = ["virtual:a:0:open", "virtual:b:0:open:forever"];
    let each = hang.map(|at| ["--inject-silence", at]);
    let results = train_together(&place, "run", &words, &[&each[0], &each[1]]);
    for (number, (at, result)) in hang.iter().zip(results).enumerate() {
        let run = &format!("run-{number}");
        let (device, why, _) = left_out(&place, run);
        assert_eq!((&result["status"], &device[..]), (&"done".into(), &at[..9]), "{result}");
        assert_eq!(why, format!("{device} gave no sign of life for 1 s"));
        assert!(names(&result).len() == 2 && !names(&result).contains(&&at[..9]), "{result}");
        same_experiment(&place, "plain", run, 1e-4);
    }
    // One that is alone is missed by the run itself, which can go on.
    let alone = ["train", "run.toml", "--quiet", "--set", "run.dir=alone", "--devices", "virtual:a=64MiB@0.4"];
    let said = place.refuse(4, &[&alone[..], &beats, &["--inject-silence", "virtual:a:0:open:forever"]].concat());
    assert!(said.contains("step 0: virtual:a gave no sign of life for 1 s") && said.contains("--resume"), "{said}");
    let result = place.json("alone/result.json");
    assert_eq!((&result["status"], &result["lost"][0]["device"]), (&"stopped".into(), &"virtual:a".into()));
    place.succeed(&["train", "--resume", "alone", "--quiet"]);
    same_experiment(&place, "plain", "alone", 1e-4);
}

/// A model of 2.4 million parameters: whole, with gradients and optimizer, it takes 36 MiB.
fn larger() -> Place {
    let place = Place::new(&Shape { hidden: 256, steps: 6, batch_sequences: 6, save_every: 3, ..QUICK });
    let mut config: Value = serde_json::from_str(&place.read("model/config.json")).unwrap();
    config["num_hidden_layers"] = 4.into();
    place.write("model/config.json", config.to_string());
    place
}

/// Neither can hold that model by itself, and nothing can wait on the host. Sequences go into their speeds: so the state in
/// parts is faster than a pipeline.
const PAIR: &str = "virtual:a=56MiB@1.0,virtual:b=52MiB@0.5,host=1MiB";

/// The numbers of a saved model, near to each other as other orders of sums are.
fn same_weights(place: &Place, one: &str, other: &str, apart: f32) {
    let read = |run: &str| std::fs::read(place.path(&format!("{run}/model/model.safetensors"))).unwrap();
    let (one, other) = (read(one), read(other));
    assert_eq!(one.len(), other.len());
    let header = 8 + u64::from_le_bytes(one[..8].try_into().unwrap()) as usize;
    assert_eq!(one[..header], other[..header], "the same tensors at the same places");
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes[header..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let furthest = numbers(&one).iter().zip(numbers(&other)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest < apart, "{furthest}");
}

#[test]
fn a_model_too_large_for_either_device_is_trained_by_both() {
    let place = larger();
    for device in PAIR.split(',').take(2) {
        let device = format!("{device},host=1MiB");
        let words =
            ["train", "run.toml", "--quiet", "--set", "run.dir=no", "--set", "run.fallback=none", "--devices", &device];
        assert!(place.refuse(3, &words).contains("does not fit"));
    }
    train(&place, "alone", &["--devices", "cpu"]);
    let result = train(&place, "team", &["--devices", PAIR]);
    assert_eq!(names(&result), ["virtual:a", "virtual:b"]);
    assert_eq!(result["sharing"], "state");
    holds(&result);
    same_experiment(&place, "alone", "team", 1e-4);
    same_weights(&place, "alone", "team", 1e-3);
    let loss = |run: &str| place.json(&format!("{run}/result.json"))["eval"]["loss"].as_f64().unwrap();
    assert!((loss("alone") / loss("team") - 1.0).abs() < 1e-4);

    // What one began the other goes on with.
    let cut = |run: &str, devices: &str, then: &str| {
        train(&place, run, &["--devices", devices, "--set", "train.steps=3"]);
        let text = place.read(&format!("{run}/run.toml")).replace("steps = 3", "steps = 6");
        let text = text.replace(&format!("devices = \"{devices}\""), &format!("devices = \"{then}\""));
        place.write(&format!("{run}/run.toml"), text);
        place.succeed(&["train", "--resume", run, "--quiet"]);
        let result = place.json(&format!("{run}/result.json"));
        assert_eq!(result["sharing"] == "state", then != "cpu", "{result}");
    };
    cut("one", PAIR, "cpu");
    cut("two", "cpu", PAIR);
    cut("same", PAIR, PAIR);
    assert!(steps(&place, "same") == steps(&place, "team"), "the same team, the same bits");
    for run in ["one", "two", "same"] {
        same_weights(&place, "alone", run, 1e-3);
    }
}

/// The second is in the way of the first with any sequence of its own, and the first cannot hold the model.
const HOLDS: &str = "virtual:a=56MiB@1.0,virtual:b=52MiB@0.03,host=1MiB";

#[test]
fn who_would_be_in_the_way_with_any_sequence_holds_a_part_of_the_state() {
    let place = larger();
    train(&place, "alone", &["--devices", "cpu"]);
    let said = place.succeed(&["plan", "run.toml", "--devices", HOLDS]).stdout;
    let first = said.lines().take(10).map(str::trim).collect::<Vec<_>>().join(" ");
    assert!(first.contains("virtual:b (simulated) holds "), "{said}");
    assert!(first.contains("of the state and computes no sequences: with some of its own"), "{said}");
    let explained = place.succeed(&["plan", "run.toml", "--devices", HOLDS, "--explain"]).stdout;
    let ways = explained.lines().filter(|line| line.starts_with("state over virtual:a, virtual:b ("));
    assert!(ways.clone().any(|way| way.contains("(6 : 0)") && way.ends_with("taken")), "{explained}");
    assert!(ways.clone().any(|way| !way.contains(" : 0)") && way.ends_with("fits")), "{explained}");

    let result = train(&place, "team", &["--devices", HOLDS]);
    assert_eq!((&result["sharing"], names(&result)), (&"state".into(), vec!["virtual:a", "virtual:b"]));
    assert_eq!((&result["team"][1]["sequences"], &result["team"][1]["recipe"]["micro_batch"]), (&0.into(), &0.into()));
    holds(&result);
    same_experiment(&place, "alone", "team", 1e-4);
    same_weights(&place, "alone", "team", 1e-3);
    let loss = |run: &str| place.json(&format!("{run}/result.json"))["eval"]["loss"].as_f64().unwrap();
    assert!((loss("alone") / loss("team") - 1.0).abs() < 1e-4);

    // The same goes on from a checkpoint, and whoever is the first writes the files.
    train(&place, "cut", &["--devices", HOLDS, "--set", "train.steps=3", "--plan", "team/plan.json"]);
    let text = place.read("cut/run.toml").replace("steps = 3", "steps = 6");
    place.write("cut/run.toml", text);
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert!(steps(&place, "cut") == steps(&place, "team"), "the same team, the same bits");
    let turned = "virtual:b=52MiB@0.03,virtual:a=56MiB@1.0,host=1MiB";
    let result = train(&place, "turned", &["--devices", turned, "--inject-oom", "virtual:b/3:checkpoint"]);
    assert_eq!(result["team"][0]["sequences"], 0, "{result}");
    for run in ["cut", "turned"] {
        same_weights(&place, "alone", run, 1e-3);
    }
}

#[test]
fn what_becomes_of_a_device_that_only_holds_a_part_of_the_state_is_told_and_the_run_goes_on() {
    let place = larger();
    let trio = "virtual:a=56MiB@0.75,virtual:b=52MiB@0.5,virtual:c=52MiB@0.03,host=1MiB";
    let (result, words) = plain(&place, &["--devices", trio, "--set", "run.team=all"]);
    assert_eq!(result["team"][2]["sequences"], 0, "{result}");
    holds(&result);
    let result = train(&place, "lost", &[&words[..], &["--inject-loss", "virtual:c:5:backward"]].concat());
    let lost = serde_json::json!([{ "device": "virtual:c", "step": 5, "back_to": 3 }]);
    assert_eq!((&result["status"], &result["lost"]), (&"done".into(), &lost));
    assert_eq!(names(&result), ["virtual:a", "virtual:b"]);
    let refused = ["--inject-oom", "virtual:c/2:backward:3", "--inject-oom", "virtual:c/4:update:2"];
    let result = train(&place, "refused", &[&words[..], &refused].concat());
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &6.into()));
    for run in ["lost", "refused"] {
        same_weights(&place, "plain", run, 1e-3);
    }
}

#[test]
fn what_a_device_with_a_part_of_the_state_refuses_is_done_again() {
    let place = larger();
    let (_, words) = plain(&place, &["--devices", PAIR]);
    let places = ["virtual:b/2:backward:9", "virtual:a/3:norm", "virtual:a/4:update:3", "virtual:b/3:checkpoint"];
    let result = refuse_at(&place, "run", &words, &places);
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &6.into()), "{result}");
    same_weights(&place, "plain", "run", 1e-3);
}

#[test]
fn a_part_of_the_state_that_is_lost_takes_the_others_back_to_the_checkpoint() {
    let place = larger();
    let trio = "virtual:a=56MiB@0.75,virtual:b=52MiB@0.5,virtual:c=52MiB@0.25,host=1MiB";
    let (_, words) = plain(&place, &["--devices", trio, "--set", "run.team=all"]);
    for (run, at, step, back_to) in [
        ("first", "virtual:c:2", 2, 0),
        ("later", "virtual:a:5:backward", 5, 3),
        ("update", "virtual:b:5:update", 5, 3),
    ] {
        let result = train(&place, run, &[&words[..], &["--inject-loss", at]].concat());
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &6.into()), "{at}");
        let lost = serde_json::json!([{ "device": &at[..9], "step": step, "back_to": back_to }]);
        assert_eq!(result["lost"], lost, "{at}");
        assert!(names(&result).len() == 2 && !names(&result).contains(&&at[..9]), "{at}: {result}");
        let done: Vec<u64> = steps(&place, run).iter().map(|(step, ..)| *step).collect();
        let whole: Vec<u64> = (1..step).chain(back_to + 1..=6).collect();
        assert_eq!(done, whole, "{at}");
        // What was done again counts once.
        let events = place.events(run);
        let took = |step: u64| events.iter().rfind(|event| event["event"] == "step" && event["step"] == step);
        let mut seconds: Vec<f64> = (1..=6).map(|step| took(step).unwrap()["seconds"].as_f64().unwrap()).collect();
        seconds.sort_by(f64::total_cmp);
        assert_eq!(result["step_seconds"]["median"].as_f64(), Some(seconds[3]), "{at}: {seconds:?}");
        same_weights(&place, "plain", run, 1e-3);
    }
}

#[test]
fn a_part_of_the_state_that_is_silent_for_good_ends_the_run_in_order_where_the_rest_is_too_small() {
    let place = larger();
    let (_, words) = plain(&place, &["--devices", PAIR, "--set", "run.heartbeat_seconds=1"]);
    for (run, at, left) in [("start", "virtual:b:0:forever", 0), ("step", "virtual:a:5:forever", 3)] {
        let dir = format!("run.dir={run}");
        let start = ["train", "run.toml", "--quiet", "--set", &dir, "--inject-silence", at];
        let said = place.refuse(4, &[&start[..], &words].concat());
        assert!(said.contains("gave no sign of life") && said.contains("fits on what is left"), "{said}");
        assert!(said.contains("plimsoll train --resume ") && said.contains(&format!("/{run}\n")), "{said}");
        let result = place.json(&format!("{run}/result.json"));
        assert_eq!((&result["status"], &result["lost"][0]["back_to"]), (&"stopped".into(), &left.into()), "{result}");
        assert!(!place.path(&format!("{run}/control.sock")).exists());
        place.succeed(&["train", "--resume", run, "--quiet"]);
        same_weights(&place, "plain", run, f32::MIN_POSITIVE);
    }
}

#[test]
fn a_part_of_the_state_is_saved_before_who_refuses_for_ever_is_left_out() {
    let place = larger();
    let trio = "virtual:a=56MiB@0.7,virtual:b=52MiB@0.5,virtual:c=52MiB@0.3,host=1MiB";
    let (_, words) = plain(&place, &["--devices", trio, "--set", "run.team=all"]);
    // Where the update is half done, there is nothing to save.
    for (run, at, back_to) in [("whole", "virtual:c/6:backward", 5), ("half", "virtual:b/6:update:4", 3)] {
        let result = train(&place, run, &[&words[..], &for_ever(at)].concat());
        assert_eq!(result["status"], "done", "{at}");
        let (device, _, to) = left_out(&place, run);
        assert_eq!((&device[..], to), (&at[..9], Some(back_to)), "{at}");
        let done: Vec<u64> = steps(&place, run).iter().map(|(step, ..)| *step).collect();
        assert_eq!(done, (1..=5).chain(back_to + 1..=6).collect::<Vec<u64>>(), "{at}");
        same_weights(&place, "plain", run, 1e-3);
    }
    // By itself the other cannot hold it: the run stops, with all that was finished.
    let at = for_ever("virtual:b/3:backward");
    let words = ["train", "run.toml", "--quiet", "--set", "run.dir=pair", "--devices", PAIR];
    let done = place.run(&[&words[..], &at].concat());
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let says = ["virtual:b: ", "no recipe of this run fits on what is left", "of step 2: all that was finished"];
    assert!(says.iter().all(|says| done.stderr.contains(says)), "{}", done.stderr);
    assert_eq!(place.json("pair/result.json")["status"], "stopped");
    place.succeed(&["train", "--resume", "pair", "--quiet"]);
    same_weights(&place, "plain", "pair", 1e-3);
}

#[test]
fn parts_of_the_state_that_are_shared_anew_again_and_again_come_to_an_end() {
    let place = larger();
    let trio = "virtual:a=56MiB@0.7,virtual:b=52MiB@0.5,virtual:c=52MiB@0.3,host=1MiB";
    let words = ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--set", "run.team=all", "--devices", trio];
    // No step is ever done: to be where one was before is no progress.
    let done = place.run(&[&words[..], &["--inject-oom", "random:0.3"]].concat());
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let lost = place.events("run").iter().filter(|event| event["event"] == "lost").count();
    assert!(lost > 0 && done.stderr.contains("stopped: "), "{}", done.stderr);
}

/// Of a run whose speed is looked at.
const ONLY_STEPS: [&str; 4] = ["--set", "train.save_every=0", "--set", "train.eval_every=0"];

#[test]
fn a_device_that_becomes_slow_is_given_less_to_do() {
    let place = Place::new(&Shape { steps: 24, ..QUICK });
    let words = ["--devices", "virtual:a=64MiB@0.05,virtual:b=64MiB@0.05", "--set", "run.team=all"];
    let (result, words) = plain(&place, &[&words[..], &ONLY_STEPS].concat());
    assert_eq!(result["retreats"], Value::Array(vec![]), "nothing drifts");
    let result = train(&place, "slow", &[&words[..], &["--inject-slow", "virtual:b:2:2.0"]].concat());
    let sequences = |rank: usize| result["team"][rank]["sequences"].as_u64().unwrap();
    assert!(sequences(0) > sequences(1), "{result}");
    same_experiment(&place, "plain", "slow", 1e-4);
}

/// So many sequences, as the plan that a run ended with says.
fn shares(place: &Place, run: &str) -> Vec<u64> {
    let plan = place.json(&format!("{run}/plan.json"));
    plan["team"].as_array().unwrap().iter().map(|member| member["sequences"].as_u64().unwrap()).collect()
}

#[test]
fn a_device_with_a_part_of_the_state_that_becomes_slow_is_given_less_to_do_and_keeps_its_part() {
    let place = larger();
    let words = ["--devices", "virtual:a=56MiB@0.25,virtual:b=56MiB@0.25,host=1MiB"];
    let length = ["--set", "train.steps=20", "--set", "data.sequence=24", "--set", "train.batch_tokens=96"];
    let (result, words) = plain(&place, &[&words[..], &length, &ONLY_STEPS].concat());
    assert_eq!((&result["sharing"], &result["retreats"]), (&"state".into(), &Value::Array(vec![])), "nothing drifts");
    assert!(place.events("plain").iter().all(|event| event["event"] != "warning"), "nothing drifts");
    let even = shares(&place, "plain");
    assert_eq!(even[0], even[1]);
    let result = train(&place, "slow", &[&words[..], &["--inject-slow", "virtual:b:2:3.0"]].concat());
    assert_eq!((&result["sharing"], &result["status"]), (&"state".into(), &"done".into()));
    let shares = shares(&place, "slow");
    assert!(shares[0] > shares[1], "{shares:?}");
    let parts = |run: &str| {
        let plan = place.json(&format!("{run}/plan.json"));
        plan["team"].as_array().unwrap().iter().map(|member| member["state"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(parts("plain"), parts("slow"));
    same_experiment(&place, "plain", "slow", 1e-4);
}

#[test]
fn who_only_holds_is_given_sequences_where_the_one_that_computes_becomes_slow() {
    let place = larger();
    let devices = ["--devices", "virtual:a=56MiB@0.4,virtual:b=52MiB@0.054,host=1MiB"];
    let length = ["--set", "train.steps=20", "--set", "data.sequence=16", "--set", "train.batch_tokens=96"];
    let (_, words) = plain(&place, &[&devices[..], &length, &ONLY_STEPS].concat());
    assert_eq!(shares(&place, "plain"), [6, 0]);
    assert!(place.events("plain").iter().all(|event| event["event"] != "warning"), "nothing drifts");
    let result = train(&place, "slow", &[&words[..], &["--inject-slow", "virtual:a:2:3"]].concat());
    assert_eq!((&result["sharing"], &result["status"]), (&"state".into(), &"done".into()));
    let shares = shares(&place, "slow");
    assert!(shares[0] > 0 && shares[1] > 0, "{shares:?}");
    same_experiment(&place, "plain", "slow", 1e-4);
}

#[test]
fn who_was_too_slow_for_any_sequence_has_some_again_when_it_is_not() {
    let place = larger();
    let words = ["--devices", "virtual:a=56MiB@0.4,virtual:b=56MiB@0.4,host=1MiB"];
    let length = ["--set", "train.steps=84", "--set", "data.sequence=24", "--set", "train.batch_tokens=48"];
    // Slow learning: two sequences a step throw the loss about, and other orders of sums with it.
    let (_, words) =
        plain(&place, &[&words[..], &length, &ONLY_STEPS, &["--set", "train.learning_rate=1e-5"]].concat());
    let slow = ["--inject-slow", "virtual:b:2:4", "--inject-slow", "virtual:b:30:1"];
    assert_eq!(shares(&place, "plain"), [1, 1]);
    let result = train(&place, "slow", &[&words[..], &slow].concat());
    assert!(result["status"] == "done" && result["not_rehearsed"].as_array().is_none_or(Vec::is_empty), "{result}");
    let had = |retreat: &Value| retreat["device"] == "virtual:b" && retreat["sequences"] == serde_json::json!([1, 0]);
    assert!(result["retreats"].as_array().unwrap().iter().any(had), "{result}");
    assert_eq!(shares(&place, "slow"), [1, 1]);
    same_experiment(&place, "plain", "slow", 1e-4);
}

#[test]
fn the_line_of_one_device_is_moved_by_its_name() {
    let place = Place::new(&Shape { steps: 250, ..QUICK });
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
    assert!(place.refuse(2, &["budget", "run", "40MiB"]).contains("name the device"));
    assert!(place.refuse(2, &["budget", "run", "40MiB", "--device", "virtual:x"]).contains("virtual:a, virtual:b"));
    place.succeed(&["budget", "run", "50MiB", "--device", "virtual:b"]);
    running.end();
    let result = place.json("run/result.json");
    assert_eq!(result["memory"][1]["device"], "virtual:b");
    assert_eq!(result["status"], "done");
}

/// One that the other would only slow, over a link that takes longer for the gradients of every step than for the weights of
/// an evaluation.
const BESIDE: &str = "virtual:a=64MiB@0.4,virtual:b=48MiB@0.1::30MB/s";

/// As often as not, of steps that take long enough for another device to evaluate meanwhile.
const EVALUATED: [&str; 2] = ["--set", "train.eval_every=2"];

/// Step, loss, share of exact samples and tokens of all evaluations, in the order of their steps.
fn evaluations(place: &Place, run: &str) -> Vec<(u64, String)> {
    let of = |event: &Value| {
        let said = ["loss", "exact_match", "tokens"].map(|key| event[key].to_string());
        (event["step"].as_u64().unwrap(), said.join(" "))
    };
    place.events(run).iter().filter(|event| event["event"] == "evaluation").map(of).collect()
}

fn weights(place: &Place, run: &str) -> Vec<u8> {
    std::fs::read(place.path(&format!("{run}/model/model.safetensors"))).unwrap()
}

#[test]
fn who_is_left_out_evaluates_while_the_others_go_on_and_no_bit_changes() {
    let place = Place::new(&QUICK);
    train(&place, "plain", &[&["--devices", "virtual:a=64MiB@0.4"][..], &EVALUATED].concat());
    let words = ["train", "run.toml", "--set", "run.dir=beside", "--devices", BESIDE];
    let said = place.succeed(&[&words[..], &EVALUATED].concat()).stdout;
    let named: String = said.lines().take(10).map(str::trim).collect::<Vec<_>>().join(" ");
    let named = named.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in
        ["left out: virtual:b: it would slow the team", "--set run.team=all", "it evaluates meanwhile, predicted"]
    {
        assert!(named.contains(part), "{part}: {named}");
    }
    let result = place.json("beside/result.json");
    assert_eq!((&result["status"], names(&result).len()), (&"done".into(), 0));
    holds(&result);
    let devices: Vec<&Value> = result["memory"].as_array().unwrap().iter().map(|memory| &memory["device"]).collect();
    assert_eq!(devices, ["virtual:a", "virtual:b"]);
    let evaluator = &result["evaluator"];
    assert_eq!((&evaluator["device"], &evaluator["simulated"]), (&"virtual:b".into(), &true.into()), "{result}");
    assert!(evaluator["predicted_seconds"].as_f64() > Some(0.0) && evaluator["seconds"].as_f64() > Some(0.0));
    let planned = &place.json("beside/plan.json")["left_out"][0];
    assert_eq!((&planned["device"], &planned["evaluates"]["rows"]), (&"virtual:b".into(), &24.into()), "{planned}");
    // The same run, to the last bit.
    assert_eq!(steps(&place, "plain"), steps(&place, "beside"));
    assert_eq!(evaluations(&place, "plain"), evaluations(&place, "beside"));
    assert_eq!(place.json("plain/result.json")["eval"], result["eval"]);
    assert!(weights(&place, "plain") == weights(&place, "beside"));
    // Each says whose it is, and comes behind its step.
    let mut done = 0;
    for event in place.events("beside") {
        if event["event"] == "step" {
            done = event["step"].as_u64().unwrap();
        } else if event["event"] == "evaluation" {
            let step = event["step"].as_u64().unwrap();
            assert!(step <= done && (step == 8 || event["device"] == "virtual:b"), "{event}");
        }
    }
}

#[test]
fn a_team_is_evaluated_for_with_its_own_bits() {
    let place = Place::new(&QUICK);
    // Long enough to be worth a slow link, and seldom enough for a slow device.
    place.write("eval.jsonl", place.read("eval.jsonl").repeat(4));
    let (two, evaluated) = ("virtual:a=64MiB@0.3,virtual:b=64MiB@0.2", ["--set", "train.eval_every=6"]);
    train(&place, "plain", &[&["--devices", two][..], &evaluated].concat());
    let three = format!("{two},virtual:c=48MiB@0.12::22MB/s");
    let result = train(&place, "beside", &[&["--devices", &three][..], &evaluated].concat());
    assert_eq!((names(&result), &result["sharing"]), (vec!["virtual:a", "virtual:b"], &"batch".into()), "{result}");
    assert_eq!(result["evaluator"]["device"], "virtual:c", "{result}");
    holds(&result);
    assert_eq!(steps(&place, "plain"), steps(&place, "beside"));
    assert_eq!(evaluations(&place, "plain"), evaluations(&place, "beside"));
}

#[test]
fn a_run_survives_whatever_becomes_of_the_device_that_evaluates_for_it() {
    let place = Place::new(&QUICK);
    let (_, words) =
        plain(&place, &[&["--devices", BESIDE, "--set", "run.heartbeat_seconds=1"][..], &EVALUATED].concat());
    let weights_of_all = weights(&place, "plain");
    let again = ["virtual:b/0:load", "virtual:b/2:renew:3", "virtual:a/4:save", "virtual:b/6:evaluate"];
    let cases: [(Vec<&str>, Option<&str>); 11] = [
        (again.map(|at| ["--inject-oom", at]).concat(), None),
        (for_ever("virtual:b/4:evaluate"), Some("made no progress")),
        (for_ever("virtual:b/4:renew"), Some("made no progress")),
        (for_ever("virtual:b/0:load"), Some("made no progress")),
        (vec!["--inject-loss", "virtual:b:4:renew"], Some("virtual:b is gone")),
        // Before it could do anything at all.
        (vec!["--inject-loss", "virtual:b:0:load"], Some("virtual:b is gone")),
        (vec!["--inject-loss", "virtual:b:0"], Some("virtual:b is gone")),
        (vec!["--inject-silence", "virtual:b:4"], Some("gave no sign of life for 1 s")),
        // Nobody waits for its thread, either.
        (vec!["--inject-silence", "virtual:b:4:forever"], Some("gave no sign of life for 1 s")),
        (vec!["--inject-silence", "virtual:b:0:forever"], Some("gave no sign of life for 1 s")),
        (vec!["--inject-silence", "virtual:b:0:open:forever"], Some("gave no sign of life for 1 s")),
    ];
    let each: Vec<&[&str]> = cases.iter().map(|(injected, _)| &injected[..]).collect();
    // Two at once.
    let pairs = each.chunks(2).zip(["run-0", "run-1", "run-2", "run-3", "run-4", "run-5"]);
    let results: Vec<Value> = pairs.flat_map(|(pair, name)| train_together(&place, name, &words, pair)).collect();
    for (number, ((injected, lost), result)) in cases.iter().zip(results).enumerate() {
        let run = format!("run-{}-{}", number / 2, number % 2);
        let never = result["not_rehearsed"].as_array().map_or(0, Vec::len);
        assert!(result["status"] == "done" && never < injected.len() / 2, "{injected:?}: {result}");
        assert_eq!(steps(&place, "plain"), steps(&place, &run), "{injected:?}");
        assert!(weights(&place, &run) == weights_of_all, "{injected:?}");
        let (plain, found) = (evaluations(&place, "plain"), evaluations(&place, &run));
        assert_eq!(plain.last(), found.last(), "{injected:?}");
        let gone: Vec<Value> = place.events(&run).into_iter().filter(|event| event["event"] == "lost").collect();
        match lost {
            None => {
                assert!(never == 0 && gone.is_empty() && plain == found, "{injected:?}: {gone:?}, {found:?}");
                assert_eq!(result["evaluator"]["device"], "virtual:b", "{injected:?}");
            }
            Some(why) => {
                assert_eq!((gone.len(), &gone[0]["device"]), (1, &"virtual:b".into()), "{injected:?}: {gone:?}");
                assert!(gone[0]["why"].as_str().unwrap().contains(why), "{injected:?}: {gone:?}");
                assert_eq!(result["lost"][0]["device"], "virtual:b");
                // The team evaluated in its place; where the weights were gone by then, those that it had.
                assert!(found.len() >= plain.len() - 1, "{injected:?}: {found:?}");
            }
        }
    }
    // While it evaluates, when the weights of that step are nobody's any more.
    let result = train(&place, "late", &[&words[..], &["--inject-loss", "virtual:b:4:evaluate"]].concat());
    assert_eq!((&result["status"], steps(&place, "late")), (&"done".into(), steps(&place, "plain")));
    assert_eq!(evaluations(&place, "plain").last(), evaluations(&place, "late").last());
    // A run that was stopped goes on with all of its devices.
    train(&place, "cut", &[&words[..], &["--set", "train.steps=4"]].concat());
    let text = place.read("cut/run.toml").replace("steps = 4", "steps = 8");
    place.write("cut/run.toml", text);
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert_eq!(steps(&place, "plain"), steps(&place, "cut"));
    assert_eq!(evaluations(&place, "plain").last(), evaluations(&place, "cut").last());
    assert_eq!(place.json("cut/result.json")["evaluator"]["device"], "virtual:b");
}

#[test]
fn who_evaluates_takes_over_where_nobody_else_works_on_the_run() {
    let place = Place::new(&QUICK);
    let (_, words) =
        plain(&place, &[&["--devices", BESIDE, "--set", "run.heartbeat_seconds=1"][..], &EVALUATED].concat());
    // Before an evaluation, while one is under way, and when its weights are handed over.
    for (number, at) in ["virtual:a:2", "virtual:a:7:begin", "virtual:a:6:save", "virtual:a:0:load"].iter().enumerate()
    {
        let run = format!("run-{number}");
        let result = train(&place, &run, &[&words[..], &["--inject-loss", at]].concat());
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &8.into()), "{at}: {result}");
        assert_eq!(left_out(&place, &run).0, "virtual:a", "{at}");
        assert!(place.json(&format!("{run}/plan.json"))["left_out"].as_array().is_none_or(Vec::is_empty), "{at}");
        holds(&result);
        let found = evaluations(&place, &run);
        let of = |step: u64| found.iter().rfind(|(of, _)| *of == step).is_some();
        assert!([2, 4, 6, 8].into_iter().all(of), "{at}: {found:?}");
        same_weights(&place, "plain", &run, 1e-3);
    }
}

#[test]
fn a_signal_ends_a_run_whose_devices_are_silent_for_good() {
    let place = Place::new(&Shape { steps: 100_000, ..QUICK });
    let runs = [
        ("beside", BESIDE, "virtual:b:0:forever"),
        ("team", TRIO, "virtual:a:0:forever"),
        ("opened", TRIO, "virtual:a:0:open:forever"),
        ("alone", "virtual:a=64MiB@0.4", "virtual:a:0:open:forever"),
    ];
    let started = runs.map(|(run, devices, silent)| {
        let dir = format!("run.dir={run}");
        let words = ["train", "run.toml", "--quiet", "--set", &dir, "--devices", devices, "--inject-silence", silent];
        let mut running = place.start(&[&words[..], &EVALUATED, &["--set", "run.heartbeat_seconds=1"]].concat());
        // From then on signals are caught.
        assert!(running.until(|| place.path(run).join("events.jsonl").exists()));
        running.signal("TERM");
        running.signal("TERM");
        running
    });
    for ((run, _, silent), running) in runs.into_iter().zip(started) {
        let done = running.end();
        assert_eq!(done.code, Some(4), "{}", done.stderr);
        let result = place.json(&format!("{run}/result.json"));
        assert_eq!(
            (&result["status"], &result["lost"][0]["device"]),
            (&"stopped".into(), &silent[..9].into()),
            "{result}"
        );
        assert!(!place.path(run).join("control.sock").exists());
    }
}

#[test]
fn what_never_happens_to_a_device_that_only_evaluates_is_refused_and_what_did_not_is_told() {
    let place = Place::new(&QUICK);
    // There is no evaluation after that step.
    let words = [&["--devices", BESIDE][..], &EVALUATED].concat();
    let result = train(&place, "run", &[&words[..], &["--inject-oom", "virtual:b/3:evaluate"]].concat());
    assert_eq!(result["not_rehearsed"], serde_json::json!(["--inject-oom virtual:b/3:evaluate"]));
    let words = [&words[..], &["--set", "run.dir=refused", "--plan", "run/plan.json"]].concat();
    for (flag, at, says) in [
        ("--inject-oom", "virtual:b/4:renew:100000", "has no op 100000 in `renew`"),
        ("--inject-oom", "virtual:b/4:evaluate:adam_w", "has no op `adam_w` in `evaluate`"),
        ("--inject-oom", "virtual:b/4:re-plan", "runs no `re-plan`"),
        ("--inject-oom", "virtual:b/4:backward", "runs no `backward`"),
        ("--inject-oom", "virtual:b/0:renew", "does not run `renew` in step 0"),
        ("--inject-oom", "virtual:b/4:load", "does not run `load` in step 4"),
        ("--inject-oom", "4:renew:100000", "this run has no Program `renew`"),
        ("--inject-loss", "virtual:b:4:backward", "runs no `backward`"),
        ("--inject-slow", "virtual:b:3:2", "has no passes to slow down"),
    ] {
        let said = place.refuse(2, &[&["train", "run.toml", flag, at][..], &words].concat());
        assert!(said.contains(at) && said.contains(says), "{says}: {said}");
    }
}

#[test]
fn an_evaluation_that_a_kill_cut_off_is_made_again_and_one_that_was_made_is_not() {
    let place = Place::new(&QUICK);
    let saved = ["--set", "train.save_every=2", "--set", "train.keep=4"];
    let (_, words) = plain(&place, &[&["--devices", BESIDE][..], &saved, &EVALUATED].concat());
    train(&place, "cut", &words);
    // As a kill leaves it between the checkpoint of step 4 and the end of the evaluation after that step.
    std::fs::remove_file(place.path("cut/result.json")).unwrap();
    for step in [6, 8] {
        let path = place.path(&format!("cut/checkpoints/step-{step}"));
        std::fs::remove_dir_all(path).unwrap();
    }
    let events = place.read("cut/events.jsonl");
    let after = |line: &&str| {
        let event: Value = serde_json::from_str(line).unwrap();
        event["step"].as_u64().is_none_or(|step| step < 4 || step == 4 && event["event"] != "evaluation")
    };
    let before: Vec<&str> = events.lines().filter(after).collect();
    place.write("cut/events.jsonl", before.join("\n") + "\n");
    assert_eq!(evaluations(&place, "cut").len(), 1);
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert_eq!(evaluations(&place, "cut"), evaluations(&place, "plain"));
    // Once more from there: all that is asked for has been made.
    for step in [6, 8] {
        std::fs::remove_dir_all(place.path(&format!("cut/checkpoints/step-{step}"))).unwrap();
    }
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    let steps: Vec<u64> = evaluations(&place, "cut").into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [2, 4, 6, 8, 6, 8]);
}

/// A model of one layer, which is no pipeline: to be trained it takes 86 MiB, and a quarter of that to be evaluated.
fn flat() -> Place {
    let place = Place::new(&Shape { hidden: 768, steps: 6, batch_sequences: 6, ..QUICK });
    let mut config: Value = serde_json::from_str(&place.read("model/config.json")).unwrap();
    config["num_hidden_layers"] = 1.into();
    place.write("model/config.json", config.to_string());
    place
}

#[test]
fn what_a_device_held_that_left_is_no_part_of_what_the_others_held() {
    let place = flat();
    let devices = "virtual:a=180MiB@0.8,virtual:b=180MiB@0.6,host=1MiB";
    // One that was silent gives back what it holds after it has left.
    let ways = [
        ("lost", &["--inject-loss", "virtual:b:3"][..]),
        ("silent", &["--set", "run.heartbeat_seconds=1", "--inject-silence", "virtual:b:3"]),
    ];
    for (run, how) in ways {
        let result = train(&place, run, &[&["--devices", devices], how].concat());
        assert_eq!(result["lost"][0]["device"], "virtual:b", "{result}");
        holds(&result);
        let memory = &result["memory"][0];
        let over = memory["measured_bytes"].as_f64().unwrap() / memory["predicted_bytes"].as_f64().unwrap();
        assert!(over < 1.1, "{memory}");
    }
}

#[test]
fn a_device_without_any_room_takes_none_from_the_one_that_has() {
    let place = flat();
    let words = ["run.toml", "--json", "--set", "run.fallback=none", "--set", "train.steps=1"];
    let alone = place.run(&[&["plan", "--devices", "virtual:a=1MiB@0.4,host=1MiB"][..], &words].concat());
    let plan: Value = serde_json::from_str(&alone.stdout).unwrap();
    let line = (plan["needs"][0]["budget_bytes"].as_u64().unwrap() >> 20) + 2;
    let devices = format!("virtual:a={line}MiB@0.4,virtual:b=8MiB@0.3,host=1MiB");
    for command in ["plan", "train"] {
        place.succeed(&[&[command, "--devices", &devices][..], &words].concat());
    }
    let plan = place.json("run/plan.json");
    assert_eq!(
        (&plan["devices"][0]["name"], &plan["left_out"][0]["device"]),
        (&"virtual:a".into(), &"virtual:b".into())
    );
    holds(&place.json("run/result.json"));
    let rehearsed = ["--devices", &devices, "--set", "run.dir=other", "--inject-loss", "virtual:b:1"];
    let refused = place.run(&[&["train"][..], &words, &rehearsed].concat());
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("`virtual:b` is left out of this run: "), "{}", refused.stderr);
}

#[test]
fn the_line_of_a_device_that_evaluates_is_moved_and_where_it_has_no_room_the_team_evaluates() {
    let place = Place::new(&Shape { steps: 4000, ..QUICK });
    let words = ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--devices", BESIDE];
    let mut running = place.start(&[&words[..], &EVALUATED].concat());
    let evaluated = || evaluations(&place, "run").len();
    assert!(running.until(|| evaluated() > 0));
    let planned = || place.json("run/plan.json")["left_out"][0]["evaluates"].clone();
    let moved = |line: &str| place.succeed(&["budget", "run", line, "--device", "virtual:b"]).stdout;
    let said = moved("40MiB");
    assert!(said.contains("load line 40.00 MiB: it evaluates as before"), "{said}");
    assert_eq!(planned()["device"]["budget_bytes"], 40 << 20);
    assert_eq!(place.json("run/load-lines.json")["virtual:b"]["to"], "40MiB", "for when the run goes on");
    // A byte less than what it holds: fewer rows at once.
    let (rows, peak) =
        (planned()["recipe"]["micro_batch"].clone(), planned()["device"]["peak_bytes"].as_u64().unwrap());
    let said = moved(&(peak - 1).to_string());
    assert!(said.contains("it evaluates with micro-batch"), "{said}");
    let now = planned();
    assert!(
        now["recipe"]["micro_batch"].as_u64() < rows.as_u64() && now["device"]["peak_bytes"].as_u64() < Some(peak),
        "{now}"
    );
    let before = evaluated();
    assert!(running.until(|| evaluated() > before + 1));
    let said = moved("1MiB");
    assert!(said.contains("the team evaluates itself from now on"), "{said}");
    assert!(
        planned().is_null()
            && place.refuse(2, &["budget", "run", "1MiB", "--device", "virtual:b"]).contains("virtual:a")
    );
    let before = evaluated();
    assert!(running.until(|| evaluated() > before));
    running.signal("TERM");
    assert_eq!(running.end().code, Some(4));
    let result = place.json("run/result.json");
    assert!(
        result["evaluator"]["evaluations"].as_u64() > Some(1) && result["lost"].as_array().is_none_or(Vec::is_empty),
        "{result}"
    );
    let last = place.events("run").into_iter().rfind(|event| event["event"] == "evaluation").unwrap();
    assert!(last["device"].is_null(), "{last}");
}

#[test]
fn a_device_that_is_lost_before_the_first_step_leaves_a_run_that_can_go_on() {
    let place = Place::new(&QUICK);
    let words = ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--devices", "virtual:a=64MiB@0.4"];
    let said = place.refuse(4, &[&words[..], &["--inject-loss", "virtual:a:0:load"]].concat());
    assert!(said.contains("virtual:a is gone") && said.contains("--resume"), "{said}");
    let result = place.json("run/result.json");
    assert_eq!(
        (&result["status"], &result["steps"], &result["lost"][0]["device"]),
        (&"stopped".into(), &0.into(), &"virtual:a".into())
    );
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_eq!(place.json("run/result.json")["status"], "done");
}

#[test]
fn what_would_use_a_device_that_is_left_out_does_so_when_it_is_typed() {
    for (place, devices, asked) in [
        // It would slow the others; it lacks room, and is worth more of it; it lacks room for a sequence, and would slow them
        // with a part of the state; it lacks room for that as well.
        (Place::new(&QUICK), BESIDE, "--set run.team=all"),
        (flat(), "virtual:a=180MiB@0.4,virtual:b=60MiB@0.3,host=1MiB", "--devices virtual:a=180MiB@0.4,virtual:b="),
        (flat(), "virtual:a=180MiB@0.4,virtual:b=60MiB@0.1::200MB/s,host=1MiB", "--set run.team=all"),
        (flat(), "virtual:a=180MiB@0.4,virtual:b=40MiB@0.1::200MB/s,host=1MiB", "MiB@0.1::200MB/s"),
    ] {
        let one_step = ["train", "run.toml", "--json", "--set", "train.steps=1", "--set", "data.eval=[]"];
        for command in [&["plan", "run.toml", "--json"][..], &one_step] {
            let plan = |words: &[&str]| {
                let done = place.succeed(&[command, words].concat());
                let plan = if command[0] == "plan" { done.json() } else { place.json("run/plan.json") };
                let _ = std::fs::remove_dir_all(place.path("run"));
                plan
            };
            let without = plan(&["--devices", devices]);
            let out = &without["left_out"][0];
            assert_eq!(out["device"], "virtual:b", "{without}");
            let used_by = out["used_by"].as_str().unwrap_or_else(|| panic!("{out}"));
            assert!(used_by.contains(asked), "{used_by}");
            let words: Vec<&str> = used_by.split(' ').collect();
            let named = if words.contains(&"--devices") { &[][..] } else { &["--devices", devices] };
            let with = plan(&[named, &words].concat());
            let names: Vec<&Value> = with["devices"].as_array().unwrap().iter().map(|device| &device["name"]).collect();
            assert!(with["fits"] == true && names.contains(&&Value::from("virtual:b")), "{used_by}: {with}");
        }
    }
}

#[test]
fn a_way_that_does_not_fit_is_not_called_taken() {
    let place = flat();
    let words = ["--set", "run.team=all", "--devices", "virtual:a=60MiB@0.4,virtual:b=60MiB@0.3,host=1MiB"];
    let done = place.run(&[&["plan", "run.toml", "--explain"][..], &words].concat());
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    let verdicts = |verdict: &str| done.stdout.lines().filter(|line| line.ends_with(verdict)).count();
    assert_eq!((verdicts("  does not fit"), verdicts("  taken")), (2, 0), "{}", done.stdout);
}
