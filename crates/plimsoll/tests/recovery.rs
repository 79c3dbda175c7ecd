//! Recovery from out-of-memory errors and memory pressure during a run.
//!
//! A refused allocation costs a rung but no step and no sample; with identical rungs every bit stays the same. The load
//! line can be moved while the run is under way. A run without progress stops and can be resumed.

use crate::common::{Running, SMALL, Shape, Workspace};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A run of few and short steps.
const QUICK: Shape = Shape { steps: 8, threads: "1", ..SMALL };

/// Returns the weights and the optimizer state at the end of a run, by file name.
fn final_tensors(workspace: &Workspace, run: &str, steps: u32) -> BTreeMap<String, Vec<u8>> {
    let state = workspace.read_files(&format!("{run}/checkpoints/step-{steps}"));
    let model = workspace.read_files(&format!("{run}/model"));
    let tensors =
        state.into_iter().chain(model).filter(|(path, _)| path.extension().is_some_and(|e| e == "safetensors"));
    let tensors: BTreeMap<String, Vec<u8>> = tensors.map(|(path, bytes)| (path.display().to_string(), bytes)).collect();
    assert_eq!(tensors.len(), 2, "{:?}", tensors.keys());
    tensors
}

/// Trains in the run folder `run` with more arguments, and returns `result.json`.
fn train(workspace: &Workspace, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    let args = [&["train", "run.toml", "--quiet", "--set", &dir], more].concat();
    workspace.succeed(&args);
    workspace.json(&format!("{run}/result.json"))
}

/// Returns step, loss and number of labelled tokens of each step in the log.
fn losses(workspace: &Workspace, run: &str) -> Vec<(u64, f64, u64)> {
    let events = workspace.events(run);
    let steps = events.iter().filter(|event| event["event"] == "step");
    let number = |event: &Value, key: &str| event[key].as_u64().unwrap();
    steps
        .map(|event| (number(event, "step"), event["loss"].as_f64().unwrap(), number(event, "labelled_tokens")))
        .collect()
}

#[test]
fn identical_rungs_keep_every_bit_after_any_oom() {
    let workspace = Workspace::new(&QUICK);
    let pinned = ["--set", "recipe.micro_batch=4"];
    let plain = train(&workspace, "plain", &pinned);
    assert_eq!(plain["recoveries"], Value::Array(vec![]));
    let expected = final_tensors(&workspace, "plain", QUICK.steps);
    // Every Program, its first op and one in the middle, in both halves of the run.
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
        let result = train(&workspace, &run, &[&pinned[..], &["--inject-oom", at]].concat());
        let recoveries = result["recoveries"].as_array().unwrap();
        // Not every run reaches these: `decode` runs only for some of the sampled prompts, `save` may not allocate.
        assert!(!recoveries.is_empty() || ["8:decode", "4:save"].contains(at), "{at}: nothing was refused");
        assert!(recoveries.iter().all(|recovery| recovery["class"] == "identical"), "{at}: {recoveries:?}");
        assert_eq!(final_tensors(&workspace, &run, QUICK.steps), expected, "{at}");
        assert_eq!(losses(&workspace, &run), losses(&workspace, "plain"), "{at}");
    }
}

#[test]
fn streaming_keeps_every_bit_after_any_oom() {
    let workspace = Workspace::new(&Shape { hidden: 64, ..QUICK });
    let fixed =
        ["--devices", "virtual:a=64MiB@1.0", "--set", "recipe.micro_batch=4", "--set", "recipe.recompute=block"];
    train(&workspace, "plain", &fixed);
    let expected = final_tensors(&workspace, "plain", QUICK.steps);
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
    // The first recovery offloads everything that it can to the host. The later ones repeat the refused work.
    let words: Vec<&str> = std::iter::once("1").chain(places).flat_map(|at| ["--inject-oom", at]).collect();
    let result = train(&workspace, "refused", &[&fixed[..], &words].concat());
    let recoveries = result["recoveries"].as_array().unwrap();
    assert!(recoveries[0]["to"]["offload"]["optimizer"].as_u64() > Some(0), "{recoveries:?}");
    assert_eq!(recoveries.len(), 1 + places.len(), "{recoveries:?}");
    assert!(recoveries.iter().all(|recovery| recovery["class"] == "identical"), "{recoveries:?}");
    assert_eq!(final_tensors(&workspace, "refused", QUICK.steps), expected);
}

#[test]
fn oom_while_loading_checkpoint_is_retried() {
    let workspace = Workspace::new(&QUICK);
    train(&workspace, "run", &[]);
    let expected = final_tensors(&workspace, "run", QUICK.steps);
    std::fs::remove_file(workspace.path("run/result.json")).unwrap();
    workspace.succeed(&[
        "train",
        "--resume",
        "run",
        "--quiet",
        "--inject-oom",
        "0:restore:2",
        "--inject-oom",
        "8:save",
    ]);
    let result = workspace.json("run/result.json");
    assert!(result["recoveries"][0]["reason"].as_str().unwrap().contains("`restore`"), "{result}");
    assert_eq!(final_tensors(&workspace, "run", QUICK.steps), expected);
}

#[test]
fn oom_during_update_continues_with_remaining_tensors() {
    let workspace = Workspace::new(&QUICK);
    let expected = (train(&workspace, "plain", &[]), final_tensors(&workspace, "plain", QUICK.steps)).1;
    let all: Vec<String> = (1..=QUICK.steps).map(|step| format!("{step}:update:{}", 1 + step)).collect();
    let words: Vec<&str> = all.iter().flat_map(|at| ["--inject-oom", at]).collect();
    let result = train(&workspace, "refused", &words);
    assert_eq!(result["recoveries"].as_array().unwrap().len() as u32, QUICK.steps);
    assert!(result["recoveries"].as_array().unwrap().iter().all(|r| r["from"] == r["to"]), "an update takes no memory");
    assert_eq!(final_tensors(&workspace, "refused", QUICK.steps), expected);
}

#[test]
fn random_oom_ends_done_or_resumable() {
    let workspace = Workspace::new(&QUICK);
    train(&workspace, "plain", &[]);
    let labelled = |run: &str| losses(&workspace, run).iter().map(|step| (step.0, step.2)).collect::<Vec<_>>();
    for seed in 1..=6 {
        let run = format!("chance-{seed}");
        let (dir, set) = (format!("run.dir={run}"), format!("train.seed={seed}"));
        let mut args = vec!["train", "run.toml", "--quiet", "--set", &dir, "--set", &set, "--inject-oom", "random:0.2"];
        let mut done = workspace.run(&args);
        if done.code == Some(4) {
            args = vec!["train", "--resume", &run, "--quiet"];
            done = workspace.run(&args);
        }
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let last = losses(&workspace, &run).pop().unwrap();
        assert_eq!(last.0, u64::from(QUICK.steps));
        if seed == 1 {
            let steps = labelled(&run);
            assert!(labelled("plain").iter().all(|step| steps.contains(step)), "{steps:?}");
        }
    }
}

#[test]
fn persistent_oom_stops_run_which_can_resume() {
    let workspace = Workspace::new(&QUICK);
    train(&workspace, "plain", &[]);
    let expected = final_tensors(&workspace, "plain", QUICK.steps);
    // The place that is always refused, the step of the last checkpoint, and the message. Finished steps can only be lost
    // if the weights are partly updated.
    for (number, (at, saved_step, message)) in [
        ("6:forward", 5, "of step 5: no step is lost"),
        ("6:update", 5, "of step 5: no step is lost"),
        ("6:update:4", 4, "of step 4: 1 step after it will be repeated"),
        ("8:evaluate", 8, "of step 8: no step is lost"),
        ("8:checkpoint:3", 8, "of step 8: no step is lost"),
        ("8:save:2", 8, "of step 8: no step is lost"),
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("run-{number}");
        let dir = format!("run.dir={run}");
        // One refusal more than the run tries. The saving that follows is not refused.
        let words: Vec<&str> = [["--inject-oom", at]; 7].concat();
        let refused =
            workspace.expect_refusal(4, &[&["train", "run.toml", "--quiet", "--set", &dir], &words[..]].concat());
        let step: u64 = at.split(':').next().unwrap().parse().unwrap();
        assert!(
            refused.starts_with(&format!("stopped: step {step}: ")) && refused.contains("7 refusals in a row"),
            "{refused}"
        );
        assert!(refused.contains(message), "{at}: {refused}");
        assert!(refused.contains("plimsoll train --resume ") && refused.contains(&format!("/{run}\n")), "{refused}");
        assert_eq!(
            workspace.file_names(&format!("{run}/checkpoints")).last(),
            Some(&format!("step-{saved_step}")),
            "{at}"
        );
        let result = workspace.json(&format!("{run}/result.json"));
        assert_eq!(
            (&result["status"], &result["recoveries"].as_array().unwrap().len()),
            (&"stopped".into(), &6),
            "{at}"
        );
        assert!(result["recoveries"].as_array().unwrap().iter().all(|recovery| recovery["step"] == step), "{at}");
        workspace.succeed(&["train", "--resume", &run, "--quiet"]);
        let begun = workspace.events(&run).into_iter().filter(|event| event["event"] == "start").nth(1).unwrap();
        assert_eq!(begun["step"].as_u64(), Some(saved_step + 1), "{at}");
        // The other places may change the micro-batch, and thereby the order of sums.
        if at.contains("update") {
            assert_eq!(final_tensors(&workspace, &run, QUICK.steps), expected, "{at}");
        }
    }
}

#[test]
fn oom_during_replan_keeps_current_plan() {
    let workspace = Workspace::new(&QUICK);
    train(&workspace, "plain", &["--set", "recipe.micro_batch=4"]);
    let words = ["--set", "recipe.micro_batch=4", "--inject-oom", "3:backward:5", "--inject-oom", "3:re-plan"];
    let result = train(&workspace, "refused", &words);
    let recoveries = result["recoveries"].as_array().unwrap();
    assert_eq!(recoveries.len(), 1, "{recoveries:?}");
    assert_eq!(recoveries[0]["from"], recoveries[0]["to"]);
    assert_eq!(final_tensors(&workspace, "refused", QUICK.steps), final_tensors(&workspace, "plain", QUICK.steps));
}

#[test]
fn budget_command_moves_load_line_both_ways() {
    let long = Shape { steps: 4000, sequence: 32, batch_sequences: 32, hidden: 64, save_every: 0, threads: "1" };
    let workspace = Workspace::new(&long);
    let mut running = workspace.start(&["train", "run.toml", "--quiet"]);
    let steps = |workspace: &Workspace| losses(workspace, "run").len();
    assert!(running.wait_until(|| steps(&workspace) > 3));
    let plan = workspace.json("run/plan.json");
    let device = &plan["devices"][0];
    let bytes = |value: &Value| value.as_u64().unwrap();
    let (peak, arena) = (bytes(&device["peak_bytes"]), bytes(&device["arena_bytes"]));
    let line = peak - arena / 4;
    workspace.succeed(&["budget", "run", &line.to_string()]);
    let now = workspace.json("run/plan.json");
    assert!(bytes(&now["devices"][0]["peak_bytes"]) <= line, "{now}");
    assert_eq!(bytes(&now["devices"][0]["budget_bytes"]), line);
    // Too small: the run names the smallest budget that fits, and continues.
    let refused = workspace.expect_refusal(3, &["budget", "run", "1MiB"]);
    assert!(refused.contains("the smallest budget that fits is"), "{refused}");
    let before = steps(&workspace);
    assert!(running.wait_until(|| steps(&workspace) > before + 3));
    workspace.succeed(&["budget", "run", &(2 * peak).to_string()]);
    assert_eq!(bytes(&workspace.json("run/plan.json")["devices"][0]["arena_bytes"]), arena);
    running.signal("INT");
    let done = running.wait();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let result = workspace.json("run/result.json");
    let recoveries = result["recoveries"].as_array().unwrap();
    assert_eq!(recoveries.len(), 2, "{recoveries:?}");
    for recovery in recoveries {
        // A lowered load line is not freed memory.
        assert!(recovery["reason"].as_str().unwrap().starts_with("load line changed to"), "{recovery}");
    }
    assert!(workspace.expect_refusal(2, &["budget", "run", "1GiB"]).contains("no run is active in this folder"));
}

#[test]
fn moved_load_line_survives_resume() {
    let long = Shape { steps: 100_000, batch_sequences: 64, hidden: 64, save_every: 5, ..QUICK };
    for (run, device, asked) in [("of-the-cpu", "cpu", "40MiB"), ("of-its-own", "virtual:a=64MiB@1.0", "75%")] {
        let workspace = Workspace::new(&long);
        let dir = format!("run.dir={run}");
        let started = |words: &[&str]| {
            let before = losses(&workspace, run).len();
            let mut running = workspace.start(&[&["train", "--quiet"], words].concat());
            assert!(running.wait_until(|| losses(&workspace, run).len() > before + 5));
            running
        };
        let budget = || workspace.json(&format!("{run}/plan.json"))["devices"][0]["budget_bytes"].as_u64().unwrap();
        let stopped = |running: Running| {
            running.signal("INT");
            let done = running.wait();
            assert_eq!(done.code, Some(4), "{}", done.stderr);
            (done.stderr, workspace.json(&format!("{run}/result.json"))["memory"][0].clone())
        };
        let running = started(&["run.toml", "--set", &dir, "--devices", device]);
        let line = workspace.succeed(&["budget", run, asked, "--json"]).json()["budget_bytes"].as_u64().unwrap();
        let (_, memory) = stopped(running);
        assert!(memory["budget_bytes"].as_u64() > Some(line) && memory["budget_bytes_at_end"] == line, "{memory}");

        let running = started(&["--resume", run]);
        assert_eq!(budget(), line);
        running.kill();
        let running = started(&["--resume", run]);
        assert_eq!(budget(), line);
        // The load line can be moved again.
        let up = workspace.succeed(&["budget", run, "60MiB", "--json"]).json();
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
        assert!(!workspace.path(run).join("load-lines.json").exists());
    }
}

#[test]
fn load_line_is_capped_at_device_memory() {
    let long = Shape { steps: 100_000, batch_sequences: 64, hidden: 64, save_every: 0, ..QUICK };
    for (run, device) in [("of-the-cpu", "cpu=64MiB"), ("of-its-own", "virtual:a=64MiB@1.0")] {
        let workspace = Workspace::new(&long);
        let dir = format!("run.dir={run}");
        let mut running = workspace.start(&["train", "run.toml", "--quiet", "--set", &dir, "--devices", device]);
        assert!(running.wait_until(|| losses(&workspace, run).len() > 1));
        let line = |budget: &str| {
            let done = workspace.succeed(&["budget", run, budget, "--json"]).json();
            let plan = workspace.json(&format!("{run}/plan.json"));
            assert_eq!(plan["devices"][0]["budget_bytes"], done["budget_bytes"], "{done}");
            (done["budget_bytes"].as_u64().unwrap(), done["message"].as_str().unwrap().to_owned())
        };
        let (least, _) = line("40MiB");
        assert_eq!(least, 40 << 20);
        let (limit_bytes, expected) = line("900TiB");
        let name = device.split('=').next().unwrap();
        assert!(
            expected.contains(&format!(", the most that {name} may hold for this run (900.00 TiB was requested): ")),
            "{expected}"
        );
        match name {
            "cpu" => assert!((64 << 20..1 << 44).contains(&limit_bytes), "{limit_bytes}"),
            _ => {
                assert_eq!(limit_bytes, 64 << 20);
                // The capped line is stored for a resumed run, not the requested one.
                assert_eq!(workspace.json(&format!("{run}/load-lines.json"))[name]["to"], "64MiB");
                // A share refers to the device's own memory, not to that of the machine.
                assert_eq!(line("75%").0, 48 << 20);
            }
        }
        assert!(
            workspace
                .expect_refusal(2, &["budget", run, "1GiB", "--device", "cuda:7"])
                .contains("device `cuda:7` does not work on this run")
        );
        assert!(workspace.expect_refusal(3, &["budget", run, "1MiB"]).contains("the smallest budget that fits is"));
        running.signal("INT");
        assert_eq!(running.wait().code, Some(4));
    }
}

#[test]
fn impossible_fault_injection_is_refused() {
    let workspace = Workspace::new(&QUICK);
    let refusal_of = |flag: &str, at: &str, more: &[&str]| {
        let refused = workspace.expect_refusal(2, &[&["train", "run.toml", flag, at], more].concat());
        assert!(!workspace.path("run/run.toml").exists(), "{at}");
        refused
    };
    for (flag, at, expected) in [
        (
            "--inject-oom",
            "3:forward:nosuch",
            &["`forward` has no op `nosuch`", "its ops are ", "product", "attention"][..],
        ),
        ("--inject-oom", "3:forward:adam_w", &["`forward` has no op `adam_w`"]),
        ("--inject-oom", "3:re-plan:4", &["fails as a whole"]),
        ("--inject-oom", "9", &["the run has only 8 steps"]),
        ("--inject-oom", "virtual:x/3", &["no device `virtual:x` works on this run", "the devices are cpu"]),
        ("--inject-oom", "0:forward", &["`forward` does not run in step 0", "load, fresh, restore"]),
        ("--inject-oom", "2:load", &["`load` does not run in step 2"]),
        ("--inject-loss", "virtual:x:3", &["no device `virtual:x` works on this run", "the devices are cpu"]),
        ("--inject-loss", "cpu:9:update", &["the run has only 8 steps"]),
        ("--inject-slow", "virtual:x:3:2", &["no device `virtual:x` works on this run"]),
    ] {
        let refused = refusal_of(flag, at, &[]);
        for expected in expected.iter().chain(&[&*format!("{flag} {at}: ")]) {
            assert!(refused.contains(expected), "{at}: {refused}");
        }
    }
    let refused = refusal_of("--inject-oom", "8:evaluate", &["--set", "data.eval=[]"]);
    assert!(refused.contains("this run has no Program `evaluate`") && refused.contains("backward, "), "{refused}");
    // A run that does not fit is refused as such, before its faults are checked.
    workspace.expect_refusal(3, &["train", "run.toml", "--quiet", "--budget", "2MiB", "--inject-loss", "virtual:x:3"]);
    // A finished step cannot fail.
    train(&workspace, "run", &[]);
    std::fs::remove_file(workspace.path("run/result.json")).unwrap();
    let refused = workspace.expect_refusal(2, &["train", "--resume", "run", "--inject-oom", "3"]);
    assert!(refused.contains("the run resumes after step 8"), "{refused}");
}

#[test]
fn untriggered_fault_is_reported() {
    let workspace = Workspace::new(&QUICK);
    let untriggered = ["--inject-oom", "3:evaluate", "--inject-oom", "2:forward:9999", "--inject-oom", "random:1e-9"];
    let words = ["train", "run.toml", "--inject-oom", "3:backward"];
    let done = workspace.succeed(&[&words[..], &untriggered].concat());
    let result = workspace.json("run/result.json");
    let expected: Vec<String> =
        untriggered.chunks(2).map(|flag| flag.join(" ").replace("1e-9", "0.000000001")).collect();
    assert_eq!(result["faults_not_triggered"], json!(expected));
    for untriggered in &expected {
        let warned = format!("{untriggered}: not reached, so the fault did not occur");
        assert_eq!(
            workspace.events("run").iter().filter(|event| event["message"] == *warned).count(),
            1,
            "{untriggered}"
        );
        assert!(done.stdout.contains(&format!("warning: {warned}")), "{}", done.stdout);
        assert!(done.stdout.contains(&format!("injected fault not triggered: {untriggered}")), "{}", done.stdout);
    }
    std::fs::remove_file(workspace.path("run/result.json")).unwrap();
    let again = workspace.succeed(&["train", "--resume", "run", "--quiet", "--inject-oom", "8:checkpoint"]);
    assert!(again.stderr.contains("--inject-oom 8:checkpoint: not reached"), "{}", again.stderr);
}

#[test]
fn recovery_reports_predicted_and_measured_cost() {
    let workspace = Workspace::new(&Shape { steps: 12, batch_sequences: 64, hidden: 64, ..QUICK });
    let result = train(&workspace, "run", &["--inject-oom", "6:backward", "--inject-oom", "12:save"]);
    let recoveries = result["recoveries"].as_array().unwrap();
    assert_eq!(recoveries.iter().map(|recovery| recovery["step"].as_u64()).collect::<Vec<_>>(), [Some(6), Some(12)]);
    let number = |recovery: &Value, key: &str| recovery[key].as_f64();
    let down = &recoveries[0];
    assert!(number(down, "arena_bytes") < number(down, "arena_bytes_before"), "{down}");
    assert!(number(down, "held_bytes") < number(down, "held_bytes_before"), "{down}");
    for measured in ["step_seconds_before", "step_seconds", "seconds"] {
        assert!(number(down, measured) > Some(0.0), "{measured}: {down}");
    }
    // The first, largest arena counts, although the arenas after the recoveries were smaller.
    assert_eq!(result["memory"][0]["arena_measured_bytes"], result["memory"][0]["arena_bytes"]);
    // No step follows the last recovery.
    assert_eq!(number(&recoveries[1], "step_seconds"), None);
    assert_eq!(number(&recoveries[1], "step_seconds_before"), number(down, "step_seconds"));
}

#[test]
fn malformed_fault_injection_is_refused() {
    let workspace = Workspace::new(&QUICK);
    let refused = workspace.expect_refusal(2, &["train", "run.toml", "--inject-oom", "3:sideways"]);
    assert!(refused.contains("unknown Program `sideways`") && refused.contains("re-plan"), "{refused}");
    assert!(
        workspace.expect_refusal(2, &["train", "run.toml", "--inject-oom", "soon"]).contains("STEP[:PROGRAM[:OP]]")
    );
}

#[test]
fn recovery_offloads_and_returns_identical_bits() {
    // All other choices are pinned, so offload to the host is the only rung.
    let shape = Shape { steps: 44, hidden: 64, ..QUICK };
    let workspace = Workspace::new(&shape);
    // With this slow link, moving everything back to the device is worth its cost.
    let device = ["--devices", "virtual:a=64MiB@1.0:200MB/s"];
    let pinned = ["--set", "recipe.micro_batch=8", "--set", "recipe.recompute=block"];
    let plain = train(&workspace, "plain", &[&device[..], &pinned].concat());
    assert_eq!(plain["recoveries"], Value::Array(vec![]));
    let words = ["--inject-oom", "3:backward"];
    let result = train(&workspace, "moved", &[&device[..], &pinned, &words].concat());
    let recoveries = result["recoveries"].as_array().unwrap();
    let offload = |recovery: &Value, key: &str| recovery[key]["offload"].clone();
    assert_eq!(recoveries.len(), 2, "down, and back up: {recoveries:?}");
    assert!(recoveries.iter().all(|recovery| offload(recovery, "from") != offload(recovery, "to")), "{recoveries:?}");
    assert!(recoveries.iter().all(|recovery| recovery["class"] == "identical"), "{recoveries:?}");
    assert_eq!(offload(&recoveries[1], "to"), offload(&recoveries[0], "from"), "{recoveries:?}");
    assert_eq!(final_tensors(&workspace, "moved", shape.steps), final_tensors(&workspace, "plain", shape.steps));
    assert_eq!(losses(&workspace, "moved"), losses(&workspace, "plain"));
}

#[test]
fn hot_device_pauses_and_run_continues() {
    let workspace = Workspace::new(&Shape { steps: 100_000, save_every: 0, ..QUICK });
    let sensor = "sys/class/hwmon/hwmon0/temp1_input";
    std::fs::create_dir_all(workspace.path(sensor).parent().unwrap()).unwrap();
    workspace.write("sys/class/hwmon/hwmon0/name", "coretemp\n");
    workspace.write(sensor, "60000\n");
    let mut running = workspace.start(&["train", "run.toml", "--set", "run.max_temperature=80"]);
    let thermal_pauses =
        || workspace.events("run").into_iter().filter(|event| event["event"] == "thermal_pause").collect::<Vec<_>>();
    assert!(running.wait_until(|| losses(&workspace, "run").len() > 3));
    assert!(thermal_pauses().is_empty());
    workspace.write(sensor, "91500\n");
    // The pause has no event until it ends, so the test waits a fixed time before it lowers the temperature.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    // Atomic, like a real sensor: a file that is rewritten in place is empty for a moment.
    workspace.write("cooler", "74000\n");
    std::fs::rename(workspace.path("cooler"), workspace.path(sensor)).unwrap();
    assert!(running.wait_until(|| !thermal_pauses().is_empty()));
    let pause = &thermal_pauses()[0];
    assert_eq!((pause["celsius"].as_f64(), pause["celsius_after"].as_f64()), (Some(91.5), Some(74.0)), "{pause}");
    let before = losses(&workspace, "run").len();
    assert!(running.wait_until(|| losses(&workspace, "run").len() > before));
    running.signal("INT");
    let done = running.wait();
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    assert!(done.stdout.contains("cpu at 92 °C (limit 80 °C); 74 °C after"), "{}", done.stdout);
    assert!(workspace.json("run/result.json")["thermal_pause_seconds"].as_f64().unwrap() > 0.0);
    // Without a sensor there is one warning.
    std::fs::remove_dir_all(workspace.path("sys")).unwrap();
    let words = ["train", "run.toml", "--set", "run.dir=blind", "--set", "run.max_temperature=80"];
    workspace.succeed(&[&words[..], &["--set", "train.steps=3"]].concat());
    let warnings = workspace.events("blind").into_iter().filter(|event| event["event"] == "warning").count();
    assert_eq!(warnings, 1);
}

#[test]
fn learned_slowdown_is_planned_until_disproved() {
    let workspace = Workspace::new(&Shape { steps: 12, ..QUICK });
    let devices = workspace.succeed(&["devices", "--json"]).json();
    let plan = || workspace.succeed(&["plan", "run.toml", "--json"]).json();
    let seconds = |plan: &Value| plan["predicted"]["step_seconds"].as_f64().unwrap();
    let before = plan();
    let known = json!([{"device": "cpu", "model": devices["devices"][0]["model"], "slowdown": 400.0, "reason": "others had it"}]);
    workspace.write("cache/shortfalls.json", known.to_string());
    let slower = plan();
    assert!(slower["shortfall_note"].as_str().unwrap().contains("cpu is 400 times slower"), "{slower}");
    assert!(seconds(&slower) > 100.0 * seconds(&before), "{} {}", seconds(&before), seconds(&slower));
    // A run with injected faults teaches nothing about the device.
    train(&workspace, "rehearsed", &["--inject-oom", "3:forward"]);
    assert_eq!(workspace.json("cache/shortfalls.json"), known);
    train(&workspace, "run", &[]);
    let left = workspace.json("cache/shortfalls.json");
    let times = left.as_array().unwrap().iter().map(|short| short["slowdown"].as_f64().unwrap());
    assert!(times.clone().all(|times| times < 100.0), "{left}");
}

/// Creates memory pressure by lowering the data limit of the running process. This affects no other test.
#[test]
#[ignore = "slow: .ci/slow-tests"]
fn memory_pressure_shrinks_plan_and_recovers() {
    // Much memory, little work: the safety margin is a share of the limit. The run therefore detects pressure while some
    // MiB are free, which it needs to plan.
    let wide = Shape { steps: 100_000, sequence: 64, batch_sequences: 2048, hidden: 32, save_every: 0, threads: "1" };
    let workspace = Workspace::new(&wide);
    // With this micro-batch every remaining rung is identical.
    let pinned =
        ["train", "run.toml", "--quiet", "--set", "recipe.micro_batch=2048", "--set", "train.schedule=constant"];
    let mut running = workspace.start(&pinned);
    assert!(running.wait_until(|| losses(&workspace, "run").len() > 1));
    let limit_bytes = (running.proc_status_kib("VmData") + (4 << 10)) << 10;
    assert!(limit_bytes / 50 > 5 << 20, "the margin is larger than what is left: {limit_bytes}");
    running.set_limit("data", limit_bytes);
    let recoveries =
        || workspace.events("run").into_iter().filter(|event| event["event"] == "recovery").collect::<Vec<_>>();
    let arena = |recovery: &Value, key: &str| recovery[key].as_u64().unwrap();
    assert!(running.wait_until(|| !recoveries().is_empty()));
    let down = &recoveries()[0];
    assert!(down["reason"].as_str().unwrap().contains("other processes need memory"), "{down}");
    assert_eq!(down["class"], "identical");
    assert!(arena(down, "arena_bytes") < arena(down, "arena_bytes_before"), "{down}");
    // The next plan uses the learned load line and says so. `devices --forget` deletes it.
    let plan = || workspace.succeed(&["plan", "run.toml", "--set", "recipe.micro_batch=2048", "--json"]).json();
    let learned = plan();
    assert_eq!(learned["recipe"], down["to"], "{learned}");
    assert!(learned["shortfall_note"].as_str().unwrap().contains("other processes need memory"), "{learned}");
    let kept = workspace.read("cache/shortfalls.json");
    assert!(workspace.succeed(&["devices", "--forget"]).stdout.starts_with("forgotten: cpu was held to "));
    let forgotten = plan();
    assert_eq!((&forgotten["recipe"], forgotten.get("shortfall_note")), (&down["from"], None), "{forgotten}");
    workspace.write("cache/shortfalls.json", kept);
    running.set_limit("data", "unlimited");
    // Memory has to be free for ten seconds before the run uses it. Most of that time the run is stopped by a signal, so
    // that the plain run below has fewer steps to repeat.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    running.signal("STOP");
    std::thread::sleep(std::time::Duration::from_millis(8500));
    running.signal("CONT");
    assert!(running.wait_until(|| recoveries().len() > 1));
    let up = &recoveries()[1];
    assert_eq!(up["reason"], "other processes freed memory");
    assert_eq!(arena(up, "arena_bytes"), arena(down, "arena_bytes_before"), "{up}");
    // The run returned to its plan, so nothing is learned.
    assert_eq!(workspace.json("cache/shortfalls.json"), Value::Array(vec![]));
    running.signal("INT");
    assert_eq!(running.wait().code, Some(4));
    // Every bit equals that of a run without pressure.
    let (steps, last_loss) = losses(&workspace, "run").pop().map(|(step, loss, _)| (step, loss)).unwrap();
    let length = format!("train.steps={steps}");
    let plain = [&pinned[..], &["--set", &length, "--set", "run.dir=plain"]].concat();
    workspace.succeed(&plain);
    assert_eq!(losses(&workspace, "plain").pop().unwrap().1, last_loss);
    let tensors = |run: &str| {
        let files = workspace.read_files(&format!("{run}/checkpoints/step-{steps}")).into_iter();
        files.filter(|(path, _)| path.extension().is_some_and(|e| e == "safetensors")).collect::<Vec<_>>()
    };
    assert!(!tensors("run").is_empty() && tensors("run") == tensors("plain"));
}
