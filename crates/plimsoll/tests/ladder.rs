//! Refusals and their remedies: every command of a refusal fits, the terminal prompt runs the chosen one, and a fallback
//! to the CPU is announced. Also: plans that are followed with `--plan`, and rates measured under contention.

use crate::common::{SMALL, Shape, Workspace, run_on_terminal};
use plimsoll_device::probe::Cpu;
use serde_json::{Value, json};
use std::process::Command;

/// A model with weights and optimizer state that are most of the memory of its run.
const WIDE: Shape = Shape { hidden: 256, steps: 1, ..SMALL };

/// A hint of a refusal with its command.
struct HintCommand {
    /// Predicted peak and load line, if the hint keeps the load line.
    predicted: Option<(String, String)>,
    /// Whether the hint allows more lossy rungs.
    rungs: bool,
    /// Whether the hint needs more host memory.
    host: bool,
    words: Vec<String>,
}

/// Parses the hints of a refusal that name a command.
fn hint_commands(refusal: &str) -> Vec<HintCommand> {
    let hint = |line: &str| {
        let (said, command) = line.trim().strip_prefix("hint: it fits")?.split_once(": plimsoll ")?;
        let figures = said.split_once(", predicted ").and_then(|(_, figures)| figures.split_once(" of "));
        let of = |line: &str| line.split(", ").next().unwrap().to_owned();
        Some(HintCommand {
            predicted: figures.map(|(predicted, line)| (predicted.to_owned(), of(line))),
            rungs: said.starts_with(" with "),
            host: said.ends_with(" on the host"),
            words: command.split(' ').map(str::to_owned).collect(),
        })
    };
    refusal.lines().filter_map(hint).collect()
}

/// Formats bytes as the program prints them.
fn formatted_bytes(value: &Value) -> String {
    plimsoll_core::Bytes(value.as_u64().unwrap()).to_string()
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn refusal_commands_plan_as_announced() {
    let workspace = Workspace::new(&SMALL);
    // A model of few layers keeps the search over pipelines short.
    let few = json!({
        "hidden_size": 576, "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 8192, "max_position_embeddings": 512,
    });
    let mut config = crate::common::config(SMALL.hidden);
    few.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    std::fs::create_dir(workspace.path("few")).unwrap();
    workspace.write("few/config.json", config.to_string());
    let (one, several) = ("smollm2-135m", "few/config.json");
    let (mut command_counts, mut all_device_commands) = ([0; 3], 0);
    for (model, devices) in [
        (one, &["--devices", "rtx3090", "--budget", "1GiB"][..]),
        (one, &["--devices=rtx3090=1GiB,host=300MiB", "--allow", "adam8bit"]),
        (one, &["--set", "run.devices=rtx3070", "--set", "memory.budget=900MiB"]),
        (one, &["--devices", "rtx3070=1GiB", "--set", "train.precision=f32", "--set", "memory.allow=[\"lora\"]"]),
        // A device alone needs more than in a team. Of two devices with one name, the larger one keeps its budget. With offload,
        // a pinned micro-batch keeps the search short.
        (several, &["--devices", "rtx3090=400MiB,rtx3070=380MiB,host=24MiB", "--set", "recipe.micro_batch=2"]),
        (several, &["--devices", "rtx3070=400MiB,rtx3070=300MiB"]),
        // All devices are required, and each of them is too small.
        (
            several,
            &[
                "--devices",
                "rtx3090=500MiB,rtx3070=400MiB,host=24MiB",
                "--set",
                "run.parallelism=all",
                "--set",
                "recipe.micro_batch=2",
            ],
        ),
        (
            several,
            &["--devices", "rtx3090,rtx3070=300MiB", "--set", "run.parallelism=all", "--set", "train.precision=f32"],
        ),
    ] {
        let model = ["--model", model, "--sequence", "512", "--batch-tokens", "4096"];
        let args = [&["plan"][..], &model, devices].concat();
        let refusal = workspace.run(&args);
        assert_eq!(refusal.code, Some(3), "{devices:?}: {}", refusal.stderr);
        for HintCommand { predicted, rungs, host, words } in hint_commands(&refusal.stderr) {
            let words: Vec<&str> = words.iter().map(|word| word.trim_matches('\'')).chain(["--json"]).collect();
            let done = workspace.succeed(&words);
            let plan = done.json();
            let found = plan["devices"].as_array().unwrap().iter();
            let mut found =
                found.map(|device| (formatted_bytes(&device["peak_bytes"]), formatted_bytes(&device["budget_bytes"])));
            assert!(
                predicted.is_none_or(|predicted| found.any(|found| found == predicted)),
                "{words:?}: {}",
                refusal.stderr
            );
            // A sharded team may need fewer lossy rungs than announced for a single device.
            let all = words.contains(&"run.parallelism=all");
            all_device_commands += usize::from(all);
            assert_eq!(plan["rungs"] != Value::Array(vec![]) || all && rungs, rungs, "{words:?}");
            command_counts = [
                command_counts[0] + usize::from(!rungs && !host),
                command_counts[1] + usize::from(rungs),
                command_counts[2] + usize::from(host),
            ];
        }
    }
    assert!(all_device_commands > 4, "commands that use all devices: {all_device_commands}");
    assert!(command_counts.into_iter().all(|count| count > 1), "budget, rung and host commands: {command_counts:?}");
}

#[test]
fn least_budget_counts_own_programs_only() {
    let workspace = Workspace::new(&SMALL);
    let plan = |bytes: u64| {
        let devices = format!("cpu={bytes}B");
        workspace.run(&["plan", "--devices", &devices, "--json"]).json()
    };
    // The example has Programs of thousands of ops.
    let refused = plan(20 << 20);
    let least = refused["needs"][0]["budget_bytes"].as_u64().unwrap();
    assert_eq!((&refused["fits"], &plan(least)["fits"]), (&json!(false), &json!(true)), "{least}");
    assert_eq!(plan(least - least / 50)["fits"], json!(false), "2 % less than {least} fits, too");
}

#[test]
fn plans_that_fit_also_train() {
    let workspace = Workspace::new(&WIDE);
    let text = ["--set", "data.train=train-text.jsonl", "--set", "data.format=text", "--set", "data.eval=[]"];
    let of = |command: &str, budget: &str| {
        let args = [&[command, "run.toml", "--json", "--allow", "lora,nf4", "--budget", budget][..], &text].concat();
        workspace.run(&args)
    };
    let refused: Value = serde_json::from_str(&of("plan", "1MiB").stdout).unwrap();
    let least = refused["needs"][0]["budget_bytes"].as_u64().unwrap() as f64 / f64::from(1 << 20);
    let mut fitted = 0;
    for step in -2..=4 {
        let budget = format!("{:.2}MiB", least + 0.01 + f64::from(step));
        let (planned, trained) = (of("plan", &budget), of("train", &budget));
        if planned.code == Some(0) {
            assert_eq!(trained.code, Some(0), "{budget}: {}", trained.stderr);
            let plan: Value = serde_json::from_str(&planned.stdout).unwrap();
            assert_eq!(
                plan["devices"],
                workspace.json("run/plan.json")["devices"],
                "{budget}: plan and train measure the same charges"
            );
            fitted += 1;
        }
        // The next training process has to tokenize again.
        for folder in ["run", "cache/tokens"] {
            let _ = std::fs::remove_dir_all(workspace.path(folder));
        }
    }
    assert!(fitted >= 5, "{fitted} of the lines were enough");
}

#[test]
fn refusal_commands_train() {
    let workspace = Workspace::new(&WIDE);
    let refused = workspace.run(&["train", "run.toml", "--budget", "27MiB"]);
    let refusal = refused.refusal(3);
    let ways = hint_commands(&refusal);
    assert!(ways.iter().any(|way| way.rungs) && ways.iter().any(|way| !way.rungs), "{refusal}");
    for (number, way) in ways.iter().enumerate() {
        let folder = format!("run.dir=run-{number}");
        let words: Vec<&str> = way.words.iter().map(String::as_str).chain(["--json", "--set", &folder]).collect();
        let done = workspace.succeed(&words);
        let result: Value = serde_json::from_str(done.stdout.lines().last().unwrap()).unwrap();
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &1.into()), "{words:?}");
        let memory = &result["memory"][0];
        assert_eq!(memory["arena_measured_bytes"], memory["arena_bytes"], "{words:?}");
    }
}

#[test]
fn terminal_prompt_runs_only_the_chosen_remedy() {
    let workspace = Workspace::new(&WIDE);
    let args = ["train", "run.toml", "--budget", "27MiB"];
    let (code, screen) = run_on_terminal(&workspace, &args, "", "\n");
    assert!(screen.contains("hint: 1: it fits") && screen.contains("run one of them? 1 to "), "{screen}");
    assert_eq!((code, workspace.file_names("run")), (Some(3), vec![]), "{screen}");
    let adapters = |line: &&str| line.contains(" with lora, ") || line.contains(" with lora from ");
    let lora = screen.lines().find(adapters).expect("a remedy with lora").trim();
    let number = lora.strip_prefix("hint: ").and_then(|rest| rest.split(':').next()).unwrap();
    let (code, screen) = run_on_terminal(&workspace, &args, "", &format!("{number}\n"));
    assert_eq!(code, Some(0), "{screen}");
    assert_eq!(workspace.json("run/result.json")["recipe"]["rungs"], serde_json::json!(["lora"]));
    // There is no prompt with --quiet or without a terminal.
    std::fs::remove_dir_all(workspace.path("run")).unwrap();
    let (code, screen) = run_on_terminal(&workspace, &[&args[..], &["--quiet"]].concat(), "", "1\n");
    assert_eq!((code, screen.contains("run one of them?")), (Some(3), false), "{screen}");
    assert!(!workspace.run(&args).stderr.contains("run one of them?"));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn model_larger_than_device_falls_back_to_cpu() {
    let workspace = Workspace::new(&Shape { steps: 4, ..SMALL });
    // A pinned micro-batch keeps the search for remedies short.
    workspace.write("run.toml", workspace.read("run.toml") + "[recipe]\nmicro_batch = 8\n");
    let small = ["--devices", "virtual:a=2MiB@0.5"];
    let train = |more: &[&str]| workspace.run(&[&["train", "run.toml"], more].concat());
    let refused = train(&[&small[..], &["--set", "run.fallback=none"]].concat());
    assert_eq!(refused.code, Some(3));
    let done = train(&small);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let says = "fallback to CPU: virtual:a would have to hold ";
    assert!(done.stdout.contains(says) && done.stdout.contains("tokens/s"), "{}", done.stdout);
    for file in ["run/plan.json", "run/result.json"] {
        assert_eq!(workspace.json(file)["fallback"]["device"], "virtual:a", "{file}");
    }
    assert_eq!(workspace.json("run/result.json")["memory"][0]["device"], "cpu");
    let warned = |event: &Value| event["event"] == "warning" && event["message"].as_str().unwrap().starts_with(says);
    assert_eq!(workspace.events("run").iter().filter(|event| warned(event)).count(), 1);
    // The run equals a run on the CPU.
    workspace.succeed(&["train", "run.toml", "--devices", "cpu", "--set", "run.dir=on-cpu"]);
    assert!(!workspace.read("on-cpu/result.json").contains("fallback"));
    let weights = |run: &str| std::fs::read(workspace.path(run).join("model/model.safetensors")).unwrap();
    assert!(weights("run") == weights("on-cpu"));

    let plan = |devices: [&str; 2]| workspace.succeed(&[&["plan", "run.toml", "--json"][..], &devices].concat()).json();
    assert_eq!(plan(small)["fallback"]["device"], "virtual:a");
    // The same fallback applies to several devices that are too small together, in `plan` and in `train`.
    let pair = ["--devices", "virtual:a=2MiB@0.5,virtual:b=3MiB@0.2"];
    workspace.succeed(&[&["train", "run.toml", "--set", "run.dir=pair"][..], &pair].concat());
    let fallbacks = [plan(pair)["fallback"].clone(), workspace.json("pair/result.json")["fallback"].clone()];
    assert!(fallbacks[0]["device"].is_string() && fallbacks[0] == fallbacks[1], "{fallbacks:?}");
    assert!(weights("pair") == weights("on-cpu"));
    // No fallback if the CPU is a requested device, or if all devices are required.
    for bound in [
        &["virtual:a=2MiB@0.5,cpu=20MiB"][..],
        &["virtual:a=2MiB@0.5,virtual:b=3MiB@0.2", "--set", "run.parallelism=all"],
    ] {
        for command in ["plan", "train"] {
            let done =
                workspace.run(&[&[command, "run.toml", "--set", "run.dir=bound", "--devices"][..], bound].concat());
            assert_eq!(done.code, Some(3), "{}", done.stderr);
        }
    }
    let generate = ["generate", "run/model", "--prompt", "abc", "--max-tokens", "3"];
    let done = workspace.succeed(&[&generate[..], &small].concat());
    assert!(done.stderr.starts_with(&format!("note: {says}")), "{}", done.stderr);
}

#[test]
fn stored_plan_is_followed() {
    let workspace = Workspace::new(&SMALL);
    let train = |run: &str, devices: &str, plan: &Value| {
        workspace.write("plan.json", plan.to_string());
        let dir = format!("run.dir={run}");
        let words = ["train", "run.toml", "--set", &dir, "--devices", devices, "--plan", "plan.json"];
        workspace.succeed(&[&words[..], &["--set", "train.steps=2"]].concat());
        workspace.json(&format!("{run}/result.json"))
    };
    // A recipe that the planner would not choose.
    let alone = "virtual:a=64MiB@0.4,host=1GiB";
    let mut plan = workspace.succeed(&["plan", "run.toml", "--json", "--devices", alone]).json();
    plan["recipe"]["offload"] = json!({"optimizer": 1, "gradients": 1, "inputs": 1});
    plan["recipe"]["micro_batch"] = json!(3);
    let result = train("alone", alone, &plan);
    let offload = &result["recipe"]["offload"];
    let layers = ["optimizer", "gradients", "inputs", "weights"].map(|what| offload[what].as_u64().unwrap());
    assert_eq!((layers, &result["recipe"]["micro_batch"]), ([1, 1, 1, 0], &json!(3)), "{result}");
    // Worse shares than those of the planner.
    let pair = "virtual:a=64MiB@0.4,virtual:b=64MiB@0.2";
    let asked = ["plan", "run.toml", "--json", "--devices", pair, "--set", "run.parallelism=all"];
    let mut plan = workspace.succeed(&asked).json();
    for (rank, sequences) in [(0, 3), (1, 5)] {
        plan["team"][rank]["sequences"] = json!(sequences);
        plan["team"][rank]["recipe"]["micro_batch"] = json!(1);
    }
    plan["recipe"] = plan["team"][0]["recipe"].clone();
    let result = train("pair", pair, &plan);
    let sequences = [0, 1].map(|rank| result["team"][rank]["sequences"].as_u64());
    assert_eq!(sequences, [Some(3), Some(5)], "{result}");
    // A plan for other devices is replaced by a new one, with a warning.
    plan["team"][0]["device"] = json!("virtual:elsewhere");
    let result = train("other", pair, &plan);
    assert_ne!(result["team"][0]["sequences"].as_u64(), Some(3));
    let said = |event: &Value| event["message"].as_str().is_some_and(|text| text.contains("the new plan is"));
    assert!(workspace.events("other").iter().any(said));
}

#[test]
fn foreign_or_refused_plan_is_not_followed() {
    let workspace = Workspace::new(&SMALL);
    let plan = |words: &[&str]| {
        let done = workspace.run(&[&["plan", "run.toml", "--json"], words].concat());
        workspace.write("plan.json", &done.stdout);
        done.code
    };
    let refused = |says: &[&str]| {
        let refusal = workspace.expect_refusal(2, &["train", "run.toml", "--plan", "plan.json"]);
        assert!(says.iter().all(|says| refusal.contains(says)), "{refusal}");
        assert!(!workspace.path("run/run.toml").exists());
    };
    assert_eq!(plan(&["--sequence", "16"]), Some(0));
    refused(&["plan.json: a plan of ", "in sequences of 16; this run has ", "in sequences of 32"]);
    assert_eq!(plan(&["--batch-tokens", "512"]), Some(0));
    refused(&["512 tokens a step", "256 tokens a step"]);
    assert_eq!(plan(&["--budget", "1MiB"]), Some(3));
    refused(&["plan.json: this plan does not fit"]);
    workspace.write("model/config.json", crate::common::config(64).to_string());
    assert_eq!(plan(&[]), Some(0));
    workspace.write("model/config.json", crate::common::config(SMALL.hidden).to_string());
    refused(&["plan.json: a plan of ", " parameters"]);
    assert_eq!(plan(&[]), Some(0));
    workspace.succeed(&["train", "run.toml", "--plan", "plan.json"]);
}

#[test]
fn stored_plan_that_contradicts_itself_is_refused() {
    let workspace = Workspace::new(&SMALL);
    let pair = ["--devices", "virtual:a=64MiB@0.4,virtual:b=64MiB@0.2", "--set", "run.parallelism=all"];
    let plan = workspace.succeed(&[&["plan", "run.toml", "--json"][..], &pair].concat()).json();
    let refused = |key: &str, change: fn(&mut Value)| {
        let mut plan = plan.clone();
        change(&mut plan);
        workspace.write("plan.json", plan.to_string());
        let refusal = workspace.expect_refusal(2, &[&["train", "run.toml", "--plan", "plan.json"][..], &pair].concat());
        assert!(refusal.contains(&format!("plan.json: `{key}` ")), "{refusal}");
    };
    refused("team[0].sequences", |plan| plan["team"][0]["sequences"] = json!(1_u64 << 63));
    refused("team[].sequences", |plan| plan["team"][0]["sequences"] = json!(1));
    refused("team[1].device", |plan| plan["team"][1]["device"] = plan["team"][0]["device"].clone());
    refused("team[0].layers", |plan| plan["parallelism"] = json!("pipeline"));
    refused("devices[0].charges_bytes", |plan| plan["devices"][0]["charges_bytes"] = json!(u64::MAX));
}

/// Processes that keep all CPU cores busy until dropped.
struct BusyProcesses(Vec<std::process::Child>);

impl BusyProcesses {
    fn start() -> BusyProcesses {
        let cores = std::thread::available_parallelism().unwrap().get();
        let busy = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        BusyProcesses((0..cores).map(|_| busy()).collect())
    }
}

impl Drop for BusyProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Rates measured while other programs run are not used as peak rates, and learned slowdowns stay unchanged.
#[test]
#[ignore = "slow: .ci/slow-tests"]
fn rates_under_contention_are_marked_not_learned() {
    let workspace = Workspace::new(&Shape { steps: 8, hidden: 64, batch_sequences: 32, ..SMALL });
    assert!(workspace.succeed(&["plan", "run.toml", "--json"]).json().get("contention_note").is_none());
    workspace.succeed(&["train", "run.toml", "--set", "run.dir=before", "--set", "train.steps=1"]);
    // No rates are stored, only a slowdown. Other processes use the CPU, and two programs measure it at the same time.
    std::fs::remove_file(workspace.path("cache/devices.json")).unwrap();
    let known = json!([{"device": "cpu", "model": Cpu::read().model, "slowdown": 3.0, "reason": "it was"}]);
    workspace.write("cache/shortfalls.json", known.to_string());
    let busy = BusyProcesses::start();
    let beside = workspace.start(&["generate", "before/model", "--prompt", "abc", "--max-tokens", "3"]);
    // `train` prints the same table as `plan`.
    let said = workspace.succeed(&["train", "run.toml"]).stdout;
    let table = said.replace('\n', " ").replace("  ", " ");
    assert!(table.contains("rates: other programs used ") && table.contains("plimsoll bench devices"), "{table}");
    assert!(table.contains("no share of the peak is reported"), "{table}");
    let text = beside.wait();
    assert_eq!(text.code, Some(0), "{}", text.stderr);
    // `generate` predicts nothing, so it prints no note about rates.
    assert!(!text.stderr.contains("rates: "), "{}", text.stderr);
    // A later command uses the same rates and prints the same note.
    let kept = workspace.read("cache/devices.json");
    let after = workspace.succeed(&["plan", "run.toml", "--json"]).json();
    assert!(after["contention_note"].is_string() && workspace.read("cache/devices.json") == kept, "{after}");
    drop(busy);
    assert!(said.contains("loss ") && !said.contains(" of peak"), "{said}");
    let start = workspace.events("run").into_iter().find(|event| event["event"] == "start").unwrap();
    assert_eq!(start["peak_flops"], 0.0);
    assert_eq!(workspace.json("cache/shortfalls.json"), known);
    let said = workspace.json("run/plan.json")["contention_note"].clone();
    assert!(
        said.as_str().is_some_and(|said| said.contains("the measurement is repeated after some minutes")),
        "{said}"
    );
    // With undisturbed rates there is a share of the peak.
    workspace.write_device_rates();
    assert!(workspace.succeed(&["train", "run.toml", "--set", "run.dir=alone"]).stdout.contains(" of peak"));
}
