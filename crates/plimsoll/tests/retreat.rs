//! Memory that is refused while a run is under way costs a rung and nothing else: no step, no sample, no bit
//! where the rung is an identical one. The load line can be moved. What goes on for ever ends, resumable.

mod common;

use common::{Place, Running, SMALL, Shape};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Few steps, each as quick as it can be.
const QUICK: Shape = Shape { steps: 8, threads: "1", ..SMALL };

/// The weights and the optimizer's state at the end of a run.
fn outcome(place: &Place, run: &str, steps: u32) -> BTreeMap<String, Vec<u8>> {
    let state = place.files(&format!("{run}/checkpoints/step-{steps}"));
    let model = place.files(&format!("{run}/model"));
    let tensors =
        state.into_iter().chain(model).filter(|(path, _)| path.extension().is_some_and(|e| e == "safetensors"));
    let tensors: BTreeMap<String, Vec<u8>> = tensors.map(|(path, bytes)| (path.display().to_string(), bytes)).collect();
    assert_eq!(tensors.len(), 2, "{:?}", tensors.keys());
    tensors
}

/// A run in a folder of its own, with more words on its command line.
fn train(place: &Place, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    let args = [&["train", "run.toml", "--quiet", "--set", &dir], more].concat();
    place.succeed(&args);
    place.json(&format!("{run}/result.json"))
}

/// Steps, losses and counts of tokens, in order: what was trained on.
fn losses(place: &Place, run: &str) -> Vec<(u64, f64, u64)> {
    let events = place.events(run);
    let steps = events.iter().filter(|event| event["event"] == "step");
    let number = |event: &Value, key: &str| event[key].as_u64().unwrap();
    steps
        .map(|event| (number(event, "step"), event["loss"].as_f64().unwrap(), number(event, "labelled_tokens")))
        .collect()
}

#[test]
fn a_refusal_at_any_program_leaves_every_bit_where_the_rung_is_identical() {
    let place = Place::new(&QUICK);
    let pinned = ["--set", "recipe.micro_batch=4"];
    let plain = train(&place, "plain", &pinned);
    assert_eq!(plain["retreats"], Value::Array(vec![]));
    let expected = outcome(&place, "plain", QUICK.steps);
    // Both halves of the run, every Program, its first op and one in its middle.
    let places = [
        "0:load",
        "0:load:3",
        "0:fresh",
        "1",
        "2:begin",
        "3:forward",
        "3:forward:product",
        "3:backward",
        "3:backward:20",
        "3:norm",
        "3:norm:2",
        "3:update",
        "3:update:5",
        "4:save",
        "4:checkpoint",
        "4:checkpoint:9",
        "8:evaluate",
        "8:evaluate:7",
        "8:save:4",
        "8:prefill",
        "8:decode",
    ];
    for (number, at) in places.iter().enumerate() {
        let run = format!("run-{number}");
        let result = train(&place, &run, &[&pinned[..], &["--inject-oom", at]].concat());
        let retreats = result["retreats"].as_array().unwrap();
        // Samples are drawn by whole prompts: whether one token is decoded alone depends on them.
        assert!(!retreats.is_empty() || ["8:decode", "4:save"].contains(at), "{at}: nothing was refused");
        assert!(retreats.iter().all(|retreat| retreat["class"] == "identical"), "{at}: {retreats:?}");
        assert_eq!(outcome(&place, &run, QUICK.steps), expected, "{at}");
        assert_eq!(losses(&place, &run), losses(&place, "plain"), "{at}");
    }
}

#[test]
fn a_refusal_at_any_program_leaves_every_bit_while_tensors_stream_from_the_host_and_back() {
    let place = Place::new(&Shape { hidden: 64, ..QUICK });
    let fixed =
        ["--devices", "virtual:a=64MiB@1.0", "--set", "recipe.micro_batch=4", "--set", "recipe.recompute=block"];
    train(&place, "plain", &fixed);
    let expected = outcome(&place, "plain", QUICK.steps);
    let places = [
        "2:begin",
        "2:forward:9",
        "3:backward:20",
        "3:norm:2",
        "3:update",
        "3:update:12",
        "4:checkpoint:9",
        "8:evaluate:7",
        "8:save:4",
        "8:prefill",
    ];
    // The first refusal sends everything that can wait to the host; what is refused then is done again.
    let words: Vec<&str> = std::iter::once("1").chain(places).flat_map(|at| ["--inject-oom", at]).collect();
    let result = train(&place, "refused", &[&fixed[..], &words].concat());
    let retreats = result["retreats"].as_array().unwrap();
    assert!(retreats[0]["to"]["offload"]["optimizer"].as_u64() > Some(0), "{retreats:?}");
    assert_eq!(retreats.len(), 1 + places.len(), "{retreats:?}");
    assert!(retreats.iter().all(|retreat| retreat["class"] == "identical"), "{retreats:?}");
    assert_eq!(outcome(&place, "refused", QUICK.steps), expected);
}

#[test]
fn a_checkpoint_whose_reading_is_refused_is_read_again() {
    let place = Place::new(&QUICK);
    train(&place, "run", &[]);
    let expected = outcome(&place, "run", QUICK.steps);
    std::fs::remove_file(place.path("run/result.json")).unwrap();
    place.succeed(&["train", "--resume", "run", "--quiet", "--inject-oom", "0:restore:2", "--inject-oom", "8:save"]);
    let result = place.json("run/result.json");
    assert!(result["retreats"][0]["why"].as_str().unwrap().contains("`restore`"), "{result}");
    assert_eq!(outcome(&place, "run", QUICK.steps), expected);
}

#[test]
fn an_update_that_is_refused_in_its_middle_goes_on_with_the_tensors_that_are_left() {
    let place = Place::new(&QUICK);
    let expected = (train(&place, "plain", &[]), outcome(&place, "plain", QUICK.steps)).1;
    let all: Vec<String> = (1..=QUICK.steps).map(|step| format!("{step}:update:{}", 1 + step)).collect();
    let words: Vec<&str> = all.iter().flat_map(|at| ["--inject-oom", at]).collect();
    let result = train(&place, "refused", &words);
    assert_eq!(result["retreats"].as_array().unwrap().len() as u32, QUICK.steps);
    assert!(result["retreats"].as_array().unwrap().iter().all(|r| r["from"] == r["to"]), "an update takes no memory");
    assert_eq!(outcome(&place, "refused", QUICK.steps), expected);
}

#[test]
fn refusals_by_chance_end_done_or_resumable_with_the_same_samples() {
    let place = Place::new(&QUICK);
    train(&place, "plain", &[]);
    let labelled = |run: &str| losses(&place, run).iter().map(|step| (step.0, step.2)).collect::<Vec<_>>();
    for seed in 1..=6 {
        let run = format!("chance-{seed}");
        let (dir, set) = (format!("run.dir={run}"), format!("train.seed={seed}"));
        let mut args = vec!["train", "run.toml", "--quiet", "--set", &dir, "--set", &set, "--inject-oom", "random:0.2"];
        let mut done = place.run(&args);
        if done.code == Some(4) {
            args = vec!["train", "--resume", &run, "--quiet"];
            done = place.run(&args);
        }
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let last = losses(&place, &run).pop().unwrap();
        assert_eq!(last.0, u64::from(QUICK.steps));
        if seed == 1 {
            let steps = labelled(&run);
            assert!(labelled("plain").iter().all(|step| steps.contains(step)), "{steps:?}");
        }
    }
}

#[test]
fn a_device_that_refuses_for_ever_ends_the_run_and_it_goes_on_later() {
    let place = Place::new(&QUICK);
    train(&place, "plain", &[]);
    let expected = outcome(&place, "plain", QUICK.steps);
    // What is refused for ever, the step of the checkpoint from which the run goes on, and what is said of it. Only where
    // weights have changed in part the finished steps cannot be saved.
    for (number, (at, left, says)) in [
        ("6:forward", 5, "of step 5: all that was finished"),
        ("6:update", 5, "of step 5: all that was finished"),
        ("6:update:4", 4, "of step 4: 1 finished after it is done again"),
        ("8:evaluate", 8, "of step 8: all that was finished"),
        ("8:checkpoint:3", 8, "of step 8: all that was finished"),
        ("8:save:2", 8, "of step 8: all that was finished"),
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("run-{number}");
        let dir = format!("run.dir={run}");
        // As often as a run tries, and then once more; what is left of it does not disturb the saving.
        let words: Vec<&str> = [["--inject-oom", at]; 7].concat();
        let refused = place.refuse(4, &[&["train", "run.toml", "--quiet", "--set", &dir], &words[..]].concat());
        let step: u64 = at.split(':').next().unwrap().parse().unwrap();
        assert!(
            refused.starts_with(&format!("stopped: step {step}: ")) && refused.contains("made no progress"),
            "{refused}"
        );
        assert!(refused.contains(says), "{at}: {refused}");
        assert!(refused.contains("plimsoll train --resume ") && refused.contains(&format!("/{run}\n")), "{refused}");
        assert_eq!(place.names(&format!("{run}/checkpoints")).last(), Some(&format!("step-{left}")), "{at}");
        let result = place.json(&format!("{run}/result.json"));
        assert_eq!((&result["status"], &result["retreats"].as_array().unwrap().len()), (&"stopped".into(), &6), "{at}");
        assert!(result["retreats"].as_array().unwrap().iter().all(|retreat| retreat["step"] == step), "{at}");
        place.succeed(&["train", "--resume", &run, "--quiet"]);
        let begun = place.events(&run).into_iter().filter(|event| event["event"] == "start").nth(1).unwrap();
        assert_eq!(begun["step"].as_u64(), Some(left + 1), "{at}");
        // Another micro-batch adds up in another order: of the rungs taken, these two are always identical ones.
        if at.contains("update") {
            assert_eq!(outcome(&place, &run, QUICK.steps), expected, "{at}");
        }
    }
}

#[test]
fn a_refused_move_to_another_plan_leaves_the_present_one() {
    let place = Place::new(&QUICK);
    train(&place, "plain", &["--set", "recipe.micro_batch=4"]);
    let words = ["--set", "recipe.micro_batch=4", "--inject-oom", "3:backward:5", "--inject-oom", "3:re-plan"];
    let result = train(&place, "refused", &words);
    let retreats = result["retreats"].as_array().unwrap();
    assert_eq!(retreats.len(), 1, "{retreats:?}");
    assert_eq!(retreats[0]["from"], retreats[0]["to"]);
    assert_eq!(outcome(&place, "refused", QUICK.steps), outcome(&place, "plain", QUICK.steps));
}

#[test]
fn the_load_line_of_a_run_moves_down_and_up_while_it_is_under_way() {
    let long = Shape { steps: 4000, sequence: 32, batch_sequences: 32, hidden: 64, save_every: 0, threads: "1" };
    let place = Place::new(&long);
    let mut running = place.start(&["train", "run.toml", "--quiet"]);
    let steps = |place: &Place| losses(place, "run").len();
    assert!(running.until(|| steps(&place) > 3));
    let plan = place.json("run/plan.json");
    let device = &plan["devices"][0];
    let bytes = |value: &Value| value.as_u64().unwrap();
    let (peak, arena) = (bytes(&device["peak_bytes"]), bytes(&device["arena_bytes"]));
    let line = peak - arena / 4;
    place.succeed(&["budget", "run", &line.to_string()]);
    let now = place.json("run/plan.json");
    assert!(bytes(&now["devices"][0]["peak_bytes"]) <= line, "{now}");
    assert_eq!(bytes(&now["devices"][0]["budget_bytes"]), line);
    // Too little: the run says what would do, and goes on.
    let refused = place.refuse(3, &["budget", "run", "1MiB"]);
    assert!(refused.contains("the least that would do is"), "{refused}");
    let before = steps(&place);
    assert!(running.until(|| steps(&place) > before + 3));
    place.succeed(&["budget", "run", &(2 * peak).to_string()]);
    assert_eq!(bytes(&place.json("run/plan.json")["devices"][0]["arena_bytes"]), arena);
    running.signal("INT");
    let done = running.end();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let result = place.json("run/result.json");
    let retreats = result["retreats"].as_array().unwrap();
    assert_eq!(retreats.len(), 2, "{retreats:?}");
    assert!(retreats[0]["why"].as_str().unwrap().starts_with("the load line was moved to"));
    assert!(place.refuse(2, &["budget", "run", "1GiB"]).contains("no run is under way here"));
}

#[test]
fn a_line_that_was_moved_holds_when_the_run_goes_on_until_the_user_says_otherwise() {
    let long = Shape { steps: 100_000, batch_sequences: 64, hidden: 64, save_every: 5, ..QUICK };
    for (run, device, asked) in [("of-the-cpu", "cpu", "40MiB"), ("of-its-own", "virtual:a=64MiB@1.0", "75%")] {
        let place = Place::new(&long);
        let dir = format!("run.dir={run}");
        let started = |words: &[&str]| {
            let before = losses(&place, run).len();
            let mut running = place.start(&[&["train", "--quiet"], words].concat());
            assert!(running.until(|| losses(&place, run).len() > before + 5));
            running
        };
        let budget = || place.json(&format!("{run}/plan.json"))["devices"][0]["budget_bytes"].as_u64().unwrap();
        let stopped = |running: Running| {
            running.signal("INT");
            let done = running.end();
            assert_eq!(done.code, Some(4), "{}", done.stderr);
            (done.stderr, place.json(&format!("{run}/result.json"))["memory"][0].clone())
        };
        let running = started(&["run.toml", "--set", &dir, "--devices", device]);
        let line = place.succeed(&["budget", run, asked, "--json"]).json()["budget_bytes"].as_u64().unwrap();
        let (_, memory) = stopped(running);
        assert!(memory["budget_bytes"].as_u64() > Some(line) && memory["budget_bytes_at_end"] == line, "{memory}");

        let running = started(&["--resume", run]);
        assert_eq!(budget(), line);
        running.kill();
        let running = started(&["--resume", run]);
        assert_eq!(budget(), line);
        // It moves on from there.
        let up = place.succeed(&["budget", run, "60MiB", "--json"]).json();
        assert_eq!(up["budget_bytes"], 60 << 20);
        let (said, memory) = stopped(running);
        let name = device.split('=').next().unwrap();
        assert!(said.contains(&format!("the load line of {name} is ")), "{said}");
        assert!(memory["budget_bytes_at_end"].is_null() || memory["budget_bytes_at_end"] == 60 << 20, "{memory}");

        let other = device.replace("64MiB", "62MiB");
        let words = if name == "cpu" { ["--budget", "62MiB"] } else { ["--devices", &other] };
        let (said, _) = stopped(started(&[&["--resume", run][..], &words].concat()));
        assert!(!said.contains("the load line of"), "{said}");
        assert_eq!(budget(), 62 << 20);
        assert!(!place.path(run).join("load-lines.json").exists());
    }
}

#[test]
fn a_line_goes_no_higher_than_what_the_device_has() {
    let long = Shape { steps: 100_000, batch_sequences: 64, hidden: 64, save_every: 0, ..QUICK };
    for (run, device) in [("of-the-cpu", "cpu=64MiB"), ("of-its-own", "virtual:a=64MiB@1.0")] {
        let place = Place::new(&long);
        let dir = format!("run.dir={run}");
        let mut running = place.start(&["train", "run.toml", "--quiet", "--set", &dir, "--devices", device]);
        assert!(running.until(|| losses(&place, run).len() > 1));
        let line = |budget: &str| {
            let done = place.succeed(&["budget", run, budget, "--json"]).json();
            let plan = place.json(&format!("{run}/plan.json"));
            assert_eq!(plan["devices"][0]["budget_bytes"], done["budget_bytes"], "{done}");
            (done["budget_bytes"].as_u64().unwrap(), done["message"].as_str().unwrap().to_owned())
        };
        let (least, _) = line("40MiB");
        assert_eq!(least, 40 << 20);
        let (most, says) = line("900TiB");
        let name = device.split('=').next().unwrap();
        assert!(
            says.contains(&format!(", the most that {name} may hold for this run (900.00 TiB was asked for): ")),
            "{says}"
        );
        match name {
            "cpu" => assert!((64 << 20..1 << 44).contains(&most), "{most}"),
            _ => {
                assert_eq!(most, 64 << 20);
                // What it was given is kept for when the run goes on, not what was asked for.
                assert_eq!(place.json(&format!("{run}/load-lines.json"))[name]["to"], "64MiB");
                // A share is one of the device's own memory, not of the machine's.
                assert_eq!(line("75%").0, 48 << 20);
            }
        }
        assert!(
            place.refuse(2, &["budget", run, "1GiB", "--device", "cuda:7"]).contains("no `cuda:7` works on this run")
        );
        assert!(place.refuse(3, &["budget", run, "1MiB"]).contains("the least that would do is"));
        running.signal("INT");
        assert_eq!(running.end().code, Some(4));
    }
}

#[test]
fn a_rehearsal_that_cannot_be_is_refused_with_what_there_is() {
    let place = Place::new(&QUICK);
    let told = |flag: &str, at: &str, more: &[&str]| {
        let refused = place.refuse(2, &[&["train", "run.toml", flag, at], more].concat());
        assert!(!place.path("run/run.toml").exists(), "{at}");
        refused
    };
    for (flag, at, says) in [
        (
            "--inject-oom",
            "3:forward:nosuch",
            &["`forward` has no op `nosuch`", "its ops are ", "product", "attention"][..],
        ),
        ("--inject-oom", "3:forward:adam_w", &["`forward` has no op `adam_w`"]),
        ("--inject-oom", "3:re-plan:4", &["is refused as a whole"]),
        ("--inject-oom", "9", &["the run has 8 steps"]),
        ("--inject-oom", "virtual:x/3", &["no device `virtual:x` works on this run", "the devices are cpu"]),
        ("--inject-oom", "0:forward", &["`forward` does not run in step 0", "load, fresh, restore"]),
        ("--inject-oom", "2:load", &["`load` does not run in step 2"]),
        ("--inject-loss", "virtual:x:3", &["no device `virtual:x` works on this run", "the devices are cpu"]),
        ("--inject-loss", "cpu:9:update", &["the run has 8 steps"]),
        ("--inject-slow", "virtual:x:3:2", &["no device `virtual:x` works on this run"]),
    ] {
        let refused = told(flag, at, &[]);
        for says in says.iter().chain(&[&*format!("{flag} {at}: ")]) {
            assert!(refused.contains(says), "{at}: {refused}");
        }
    }
    let refused = told("--inject-oom", "8:evaluate", &["--set", "data.eval=[]"]);
    assert!(refused.contains("this run has no Program `evaluate`") && refused.contains("backward, "), "{refused}");
    // What does not fit is refused as such, whatever is rehearsed.
    place.refuse(3, &["train", "run.toml", "--quiet", "--budget", "2MiB", "--inject-loss", "virtual:x:3"]);
    // What is done already does not come again.
    train(&place, "run", &[]);
    std::fs::remove_file(place.path("run/result.json")).unwrap();
    let refused = place.refuse(2, &["train", "--resume", "run", "--inject-oom", "3"]);
    assert!(refused.contains("the run goes on after step 8"), "{refused}");
}

#[test]
fn a_rehearsal_that_did_not_happen_is_told() {
    let place = Place::new(&QUICK);
    let never = ["--inject-oom", "3:evaluate", "--inject-oom", "2:forward:9999", "--inject-oom", "random:1e-9"];
    let words = ["train", "run.toml", "--inject-oom", "3:backward"];
    let done = place.succeed(&[&words[..], &never].concat());
    let result = place.json("run/result.json");
    let expected: Vec<String> = never.chunks(2).map(|flag| flag.join(" ").replace("1e-9", "0.000000001")).collect();
    assert_eq!(result["not_rehearsed"], json!(expected));
    for never in &expected {
        let warned = format!("{never}: never reached, so nothing was rehearsed");
        assert_eq!(place.events("run").iter().filter(|event| event["message"] == *warned).count(), 1, "{never}");
        assert!(done.stdout.contains(&format!("warning: {warned}")), "{}", done.stdout);
        assert!(done.stdout.contains(&format!("not rehearsed: {never} was never reached")), "{}", done.stdout);
    }
    std::fs::remove_file(place.path("run/result.json")).unwrap();
    let again = place.succeed(&["train", "--resume", "run", "--quiet", "--inject-oom", "8:checkpoint"]);
    assert!(again.stderr.contains("--inject-oom 8:checkpoint: never reached"), "{}", again.stderr);
}

#[test]
fn what_a_retreat_freed_and_costs_is_said_as_predicted_and_as_measured() {
    let place = Place::new(&Shape { steps: 12, batch_sequences: 64, hidden: 64, ..QUICK });
    let result = train(&place, "run", &["--inject-oom", "6:backward", "--inject-oom", "12:save"]);
    let retreats = result["retreats"].as_array().unwrap();
    assert_eq!(retreats.iter().map(|retreat| retreat["step"].as_u64()).collect::<Vec<_>>(), [Some(6), Some(12)]);
    let number = |retreat: &Value, key: &str| retreat[key].as_f64();
    let down = &retreats[0];
    assert!(number(down, "arena_bytes") < number(down, "arena_bytes_before"), "{down}");
    assert!(number(down, "held_bytes") < number(down, "held_bytes_before"), "{down}");
    for measured in ["step_seconds_before", "step_seconds", "seconds"] {
        assert!(number(down, measured) > Some(0.0), "{measured}: {down}");
    }
    // The largest arena was used as planned, though what came after the retreats used less.
    assert_eq!(result["memory"][0]["arena_measured_bytes"], result["memory"][0]["arena_bytes"]);
    // At the last one no step follows.
    assert_eq!(number(&retreats[1], "step_seconds"), None);
    assert_eq!(number(&retreats[1], "step_seconds_before"), number(down, "step_seconds"));
}

#[test]
fn a_place_that_is_none_is_told() {
    let place = Place::new(&QUICK);
    let refused = place.refuse(2, &["train", "run.toml", "--inject-oom", "3:sideways"]);
    assert!(refused.contains("there is no Program `sideways`") && refused.contains("re-plan"), "{refused}");
    assert!(place.refuse(2, &["train", "run.toml", "--inject-oom", "soon"]).contains("STEP[:PROGRAM[:OP]]"));
}

#[test]
fn a_retreat_moves_what_waits_to_the_host_and_back_bit_for_bit() {
    // All other choices are pinned: what waits on the host is the one rung that is left.
    let shape = Shape { steps: 44, hidden: 64, ..QUICK };
    let place = Place::new(&shape);
    // Over a link this slow it is worth a move to have everything on the device again.
    let device = ["--devices", "virtual:a=64MiB@1.0:200MB/s"];
    let pinned = ["--set", "recipe.micro_batch=8", "--set", "recipe.recompute=block"];
    let plain = train(&place, "plain", &[&device[..], &pinned].concat());
    assert_eq!(plain["retreats"], Value::Array(vec![]));
    let words = ["--inject-oom", "3:backward"];
    let result = train(&place, "moved", &[&device[..], &pinned, &words].concat());
    let retreats = result["retreats"].as_array().unwrap();
    let offload = |retreat: &Value, key: &str| retreat[key]["offload"].clone();
    assert_eq!(retreats.len(), 2, "down, and back up: {retreats:?}");
    assert!(retreats.iter().all(|retreat| offload(retreat, "from") != offload(retreat, "to")), "{retreats:?}");
    assert!(retreats.iter().all(|retreat| retreat["class"] == "identical"), "{retreats:?}");
    assert_eq!(offload(&retreats[1], "to"), offload(&retreats[0], "from"), "{retreats:?}");
    assert_eq!(outcome(&place, "moved", shape.steps), outcome(&place, "plain", shape.steps));
    assert_eq!(losses(&place, "moved"), losses(&place, "plain"));
}

#[test]
fn a_device_that_is_too_warm_rests_and_the_run_goes_on() {
    let place = Place::new(&Shape { steps: 100_000, save_every: 0, ..QUICK });
    let sensor = "sys/class/hwmon/hwmon0/temp1_input";
    std::fs::create_dir_all(place.path(sensor).parent().unwrap()).unwrap();
    place.write("sys/class/hwmon/hwmon0/name", "coretemp\n");
    place.write(sensor, "60000\n");
    let mut running = place.start(&["train", "run.toml", "--set", "run.max_temperature=80"]);
    let rests = || place.events("run").into_iter().filter(|event| event["event"] == "rest").collect::<Vec<_>>();
    assert!(running.until(|| losses(&place, "run").len() > 3));
    assert!(rests().is_empty());
    place.write(sensor, "91500\n");
    // It rests when its events no longer come: nothing but time tells that, so it is only let cool down.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    // At once, as a sensor does it: a file that is written in place is empty for a moment.
    place.write("cooler", "74000\n");
    std::fs::rename(place.path("cooler"), place.path(sensor)).unwrap();
    assert!(running.until(|| !rests().is_empty()));
    let rest = &rests()[0];
    assert_eq!((rest["celsius"].as_f64(), rest["celsius_after"].as_f64()), (Some(91.5), Some(74.0)), "{rest}");
    let before = losses(&place, "run").len();
    assert!(running.until(|| losses(&place, "run").len() > before));
    running.signal("INT");
    let done = running.end();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    assert!(done.stdout.contains("cpu at 92 of 80 °C allowed; 74 °C after"), "{}", done.stdout);
    assert!(place.json("run/result.json")["rested_seconds"].as_f64().unwrap() > 0.0);
    // Without a sensor it says so once.
    std::fs::remove_dir_all(place.path("sys")).unwrap();
    let words = ["train", "run.toml", "--set", "run.dir=blind", "--set", "run.max_temperature=80"];
    place.succeed(&[&words[..], &["--set", "train.steps=3"]].concat());
    let warnings = place.events("blind").into_iter().filter(|event| event["event"] == "warning").count();
    assert_eq!(warnings, 1);
}

#[test]
fn a_device_known_to_be_slower_is_planned_so_until_a_run_finds_otherwise() {
    let place = Place::new(&Shape { steps: 12, ..QUICK });
    let devices = place.succeed(&["devices", "--json"]).json();
    let plan = || place.succeed(&["plan", "run.toml", "--json"]).json();
    let seconds = |plan: &Value| plan["predicted"]["step_seconds"].as_f64().unwrap();
    let before = plan();
    let known =
        json!([{"device": "cpu", "model": devices["devices"][0]["model"], "slower": 400.0, "why": "others had it"}]);
    place.write("cache/shortfalls.json", known.to_string());
    let slower = plan();
    assert!(slower["learned"].as_str().unwrap().contains("cpu is 400 times slower"), "{slower}");
    assert!(seconds(&slower) > 100.0 * seconds(&before), "{} {}", seconds(&before), seconds(&slower));
    // A run that others interrupt on purpose says nothing of the device.
    train(&place, "rehearsed", &["--inject-oom", "3:forward"]);
    assert_eq!(place.json("cache/shortfalls.json"), known);
    train(&place, "run", &[]);
    let left = place.json("cache/shortfalls.json");
    let times = left.as_array().unwrap().iter().map(|short| short["slower"].as_f64().unwrap());
    assert!(times.clone().all(|times| times < 100.0), "{left}");
}

/// The limit on private memory of a running process can be moved from outside: pressure that is real, and that no
/// other test feels.
#[test]
fn pressure_from_outside_is_given_way_to_and_room_is_used_again() {
    // Much memory, little work: the margin that others are left is a share of what there is, and the run feels it with
    // some MiB free, which its planning needs.
    let wide = Shape { steps: 100_000, sequence: 64, batch_sequences: 2048, hidden: 32, save_every: 0, threads: "1" };
    let place = Place::new(&wide);
    // With this micro-batch every rung is an identical one.
    let pinned =
        ["train", "run.toml", "--quiet", "--set", "recipe.micro_batch=2048", "--set", "train.schedule=constant"];
    let mut running = place.start(&pinned);
    assert!(running.until(|| losses(&place, "run").len() > 1));
    let most = (running.status("VmData") + (4 << 10)) << 10;
    assert!(most / 50 > 5 << 20, "the margin is larger than what is left: {most}");
    running.limit("data", most);
    let retreats = || place.events("run").into_iter().filter(|event| event["event"] == "retreat").collect::<Vec<_>>();
    let arena = |retreat: &Value, key: &str| retreat[key].as_u64().unwrap();
    assert!(running.until(|| !retreats().is_empty()));
    let down = &retreats()[0];
    assert!(down["why"].as_str().unwrap().contains("others need memory"), "{down}");
    assert_eq!(down["class"], "identical");
    assert!(arena(down, "arena_bytes") < arena(down, "arena_bytes_before"), "{down}");
    // The next plan starts where this run has ended up, says so, and can be told to forget it.
    let plan = || place.succeed(&["plan", "run.toml", "--set", "recipe.micro_batch=2048", "--json"]).json();
    let learned = plan();
    assert_eq!(learned["recipe"], down["to"], "{learned}");
    assert!(learned["learned"].as_str().unwrap().contains("others need memory"), "{learned}");
    let kept = place.read("cache/shortfalls.json");
    assert!(place.succeed(&["devices", "--forget"]).stdout.starts_with("forgotten: cpu was held to "));
    let forgotten = plan();
    assert_eq!((&forgotten["recipe"], forgotten.get("learned")), (&down["from"], None), "{forgotten}");
    place.write("cache/shortfalls.json", kept);
    running.limit("data", "unlimited");
    // Room has to be there for ten seconds until it is used. What is computed meanwhile is computed once more below: most of
    // the time the run stands still, after it has seen that there is room.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    running.signal("STOP");
    std::thread::sleep(std::time::Duration::from_millis(8500));
    running.signal("CONT");
    assert!(running.until(|| retreats().len() > 1));
    let up = &retreats()[1];
    assert_eq!(up["why"], "others gave memory back");
    assert_eq!(arena(up, "arena_bytes"), arena(down, "arena_bytes_before"), "{up}");
    // It went back up: nothing has to be remembered.
    assert_eq!(place.json("cache/shortfalls.json"), Value::Array(vec![]));
    running.signal("INT");
    assert_eq!(running.end().code, Some(4));
    // Every bit is that of a run that nobody pressed.
    let (steps, pressed) = losses(&place, "run").pop().map(|(step, loss, _)| (step, loss)).unwrap();
    let length = format!("train.steps={steps}");
    let plain = [&pinned[..], &["--set", &length, "--set", "run.dir=plain"]].concat();
    place.succeed(&plain);
    assert_eq!(losses(&place, "plain").pop().unwrap().1, pressed);
    let tensors = |run: &str| {
        let files = place.files(&format!("{run}/checkpoints/step-{steps}")).into_iter();
        files.filter(|(path, _)| path.extension().is_some_and(|e| e == "safetensors")).collect::<Vec<_>>()
    };
    assert!(!tensors("run").is_empty() && tensors("run") == tensors("plain"));
}
