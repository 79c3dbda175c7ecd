//! The JSON output and the flags of `plan`, `generate`, `eval`, `devices` and `bench step`.

use crate::common::{SMALL, Shape, ShellOnTerminal, Workspace, run_on_terminal};
use serde_json::Value;
use std::fs;
use std::process::Command;

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}")).keys().map(String::as_str).collect()
}

#[test]
fn plan_has_contract_keys_and_fits_named_budget() {
    let workspace = Workspace::new(&Shape { batch_sequences: 64, ..SMALL });
    let on_paper = |budget: &str| {
        let devices = format!("rtx3090={budget}");
        let done = workspace.run(&["plan", "run.toml", "--devices", &devices, "--json"]);
        (done.code, done.json(), done.stderr)
    };
    let (code, refused, message) = on_paper("1MiB");
    assert_eq!(code, Some(3), "{message}");
    let plan = [
        "fits",
        "recipe",
        "class",
        "rungs",
        "checkpoint_bytes",
        "devices",
        "host",
        "predicted",
        "needs",
        "planned_for",
    ];
    assert_eq!(keys(&refused), plan);
    let device = [
        "name",
        "simulated",
        "budget_bytes",
        "arena_bytes",
        "charges_bytes",
        "peak_bytes",
        "by_category",
        "by_program",
        "timeline",
        "lower_bound_bytes",
    ];
    let host: Vec<&str> = device.into_iter().filter(|key| *key != "timeline").collect();
    assert_eq!((keys(&refused["devices"][0]), keys(&refused["host"])), (device.to_vec(), host));
    assert_eq!(keys(&refused["predicted"]), ["step_seconds", "tokens_per_second"]);
    assert_eq!(refused["fits"], false);
    let need = &refused["needs"][0];
    assert_eq!((keys(need), &need["allow"]), (vec!["allow", "budget_bytes"], &Value::Array(vec![])));
    let bytes = need["budget_bytes"].as_u64().unwrap();
    assert_eq!(message.lines().next().unwrap().split(": ").next(), Some("error"));

    let (code, plan, message) = on_paper(&format!("{bytes}B"));
    assert_eq!((code, &plan["fits"], &plan["needs"]), (Some(0), &true.into(), &Value::Array(vec![])), "{message}");
    assert!(plan["devices"][0]["peak_bytes"].as_u64().unwrap() <= bytes);
    assert_eq!(on_paper(&format!("{}B", bytes - (1 << 20))).0, Some(3));
}

#[test]
fn generation_depends_on_seed_not_budget() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml"]);
    let text = |more: &[&str]| {
        let args = ["generate", "run/model", "--prompt", "abc", "--max-tokens", "20", "--json"];
        let text = workspace.succeed(&[&args[..], more].concat()).json();
        assert_eq!(keys(&text), ["prompt", "text", "tokens", "end"]);
        text
    };
    let greedy = text(&[]);
    assert_eq!(greedy, text(&["--budget", "64MiB"]));
    assert_eq!(greedy, text(&["--seed", "9"]), "greedy decoding ignores the seed");
    let drawn = |seed: &str| text(&["--temperature", "1.5", "--seed", seed]);
    assert_eq!(drawn("3"), drawn("3"));
    assert!((4..8).any(|seed| drawn(&seed.to_string()) != drawn("3")), "other seeds give other text");
    assert_eq!(greedy, text(&["--temperature", "1.5", "--top-k", "1"]), "top-k 1 is greedy");
    let tokens = greedy["tokens"].as_array().unwrap().len();
    assert!((1..=20).contains(&tokens));

    let tight = ["generate", "run/model", "--prompt", "abc", "--max-tokens", "20", "--budget", "1MiB"];
    let refusal = workspace.expect_refusal(3, &tight);
    assert!(refusal.contains("does not fit") && refusal.contains("plimsoll generate run/model"), "{refusal}");
    let refusal = workspace.expect_refusal(2, &["generate", "run/model", "--prompt", "abc", "--max-tokens", "100"]);
    assert!(refusal.contains("64 positions"), "{refusal}");
    let refusal = workspace.expect_refusal(2, &["generate", "model", "--prompt", "abc"]);
    assert!(refusal.contains("no *.safetensors file"), "{refusal}");
}

#[test]
fn eval_and_generate_name_only_their_flags() {
    let workspace = Workspace::new(&Shape { steps: 2, ..SMALL });
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let eval = ["eval", "run/model", "--data", "eval.jsonl", "--format", "tokens"];
    let generate = ["generate", "run/model", "--prompt", "abc", "--max-tokens", "8"];
    for command in [&eval[..], &generate] {
        for (allow, rung) in [("lora", "lora"), ("nf4,adam8bit", "adam8bit")] {
            let refusal = workspace.expect_refusal(2, &[command, &["--allow", allow]].concat());
            assert!(refusal.contains(&format!("--allow {rung}: this rung only applies to training")), "{refusal}");
        }
        // Hints do not offer rungs that the command rejects.
        let refusal = workspace.expect_refusal(3, &[command, &["--budget", "1MiB"]].concat());
        assert!(!refusal.contains("lora") && !refusal.contains("adam8bit"), "{refusal}");
        let refusal = workspace.expect_refusal(2, &[command, &["--threads", "4096"]].concat());
        assert!(refusal.contains("--threads") && !refusal.contains("run.threads"), "{refusal}");
    }
    let refusal = workspace.expect_refusal(2, &[&eval[..], &["--sequence", "128"]].concat());
    assert!(refusal.contains("--sequence is 128") && refusal.contains("set --sequence to 64"), "{refusal}");
    for command in [&["generate", "model", "--prompt", "abc"][..], &["export", "model", "--merged", "out"]] {
        let refusal = workspace.expect_refusal(2, command);
        assert!(refusal.contains("  hint: name a directory") && !refusal.contains("--set"), "{refusal}");
    }
}

#[test]
fn devices_and_bench_step_print_json() {
    let workspace = Workspace::new(&SMALL);
    let devices = workspace.succeed(&["devices", "--json"]).json();
    assert_eq!(devices["devices"][0]["name"], "cpu");
    let small = "bench step --vocab 64 --layers 1 --hidden 32 --heads 2 --kv-heads 1 --ffn 64 --sequence 16 --batch 2 \
                 --threads 1 --steps 2 --warmup 1";
    let args: Vec<&str> = small.split_whitespace().collect();
    let step = workspace.succeed(&args).json();
    for key in ["growth_mib", "arena_bytes", "arena_measured_bytes"] {
        assert!(step[key].as_f64().is_some(), "{key}: {step}");
    }
    assert_eq!(step["arena_bytes"], step["arena_measured_bytes"]);

    // With a memory limit the planner finds another recipe. If there is none, the limit that it names works.
    let line = (step["arena_bytes"].as_u64().unwrap() - 1).to_string();
    let under = workspace.succeed(&[&args[..], &["--memory", &line]].concat()).json();
    assert!(under["arena_bytes"].as_u64() < step["arena_bytes"].as_u64(), "{under}");
    assert_ne!(under["recipe"], step["recipe"]);
    assert_eq!(under["tokens_per_step"], step["tokens_per_step"]);
    assert_eq!(under["arena_bytes"], under["arena_measured_bytes"]);
    let said = workspace.run(&[&args[..], &["--memory", "1KiB"]].concat()).refusal(3);
    let (_, named) = said.split_once("hint: --memory ").unwrap_or_else(|| panic!("{said}"));
    workspace.succeed(&[&args[..], &["--memory", named.split(',').next().unwrap()]].concat());
}

#[test]
fn live_view_ends_with_each_named_key() {
    let workspace = Workspace::new(&SMALL);
    // The view hides the cursor once it reads keys. On a terminal without size it draws nothing.
    let is_shown = "\u{1b}[?25l";
    for key in ["q", "\u{1b}", "\u{3}"] {
        let (code, screen) = run_on_terminal(&workspace, &["watch"], is_shown, key);
        assert_eq!(code, Some(0), "{key:?}: {screen}");
    }
    let help = workspace.succeed(&["watch", "--help"]).stdout;
    assert!(help.contains("ends with q, Esc or Ctrl-C"), "{help}");
}

#[test]
fn view_of_training_run_leaves_it_alone() {
    let workspace = Workspace::new(&SMALL);
    let args = ["train", "run.toml", "--progress", "tui"];
    // The view hides the cursor once it reads keys.
    let is_shown = "\u{1b}[?25l";
    let (code, screen) = run_on_terminal(&workspace, &args, is_shown, "q");
    assert_eq!(code, Some(0), "{screen}");
    assert_eq!(workspace.json("run/result.json")["status"], "done");
    let long = ["--set", "run.dir=long", "--set", "train.steps=100000"];
    let (code, screen) = run_on_terminal(&workspace, &[&args[..], &long].concat(), is_shown, "\u{3}");
    assert_eq!(code, Some(4), "{screen}");
    let (_, after_view) = screen.rsplit_once("\u{1b}[?1049l").unwrap_or_else(|| panic!("{screen}"));
    assert!(after_view.contains("to resume: plimsoll train --resume"), "{screen}");
    let refusal = workspace.expect_refusal(2, &args);
    assert!(refusal.contains("--progress tui: standard input and output are no terminal"), "{refusal}");
}

/// Returns the process id of the program that a process has started; `None` if there is none.
fn program_of(parent: u32) -> Option<u32> {
    fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (start, fields) = stat.rsplit_once(") ")?;
        let is_child = fields.split(' ').nth(1)? == parent.to_string();
        (is_child && start.ends_with("(plimsoll")).then(|| start.split(' ').next()?.parse().ok())?
    })
}

#[test]
fn killed_run_leaves_the_terminal_as_it_was() {
    let workspace = Workspace::new(&SMALL);
    let mut shell = ShellOnTerminal::start(&workspace);
    let before = shell.modes();
    let program = env!("CARGO_BIN_EXE_plimsoll");
    let flags = "--progress tui --set run.dir=long --set train.steps=1000000";
    shell.send(&format!("{program} train run.toml {flags}\n"));
    // The view hides the cursor once it reads keys.
    shell.wait("the view", |shell| shell.screen().contains("\u{1b}[?25l"));
    assert_ne!(shell.modes(), before, "the view sets the mode of the terminal");
    let run = program_of(shell.pid()).unwrap();
    assert!(Command::new("kill").args(["-9", &run.to_string()]).status().unwrap().success());
    shell.wait("the screen", |shell| shell.screen().contains("\u{1b}[?1049l"));
    shell.wait("the modes", |shell| shell.modes() == before);
    shell.send("echo answers-$((40 + 2))\n");
    shell.wait("the shell", |shell| shell.screen().contains("answers-42"));
}

#[test]
fn recommended_run_starts_as_typed() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "recipe.micro_batch=1"]);
    let snapshot = workspace.succeed(&["watch", "run/", "--advise", "--json"]).json();
    let recommendations = snapshot["recommendations"].as_array().unwrap();
    let of_micro_batch = |recommendation: &&serde_json::Value| {
        recommendation["text"].as_str().unwrap().starts_with("let the planner choose the micro-batch")
    };
    let recommendation = recommendations.iter().find(of_micro_batch).unwrap_or_else(|| panic!("{snapshot}"));
    let command = recommendation["command"].as_str().unwrap();
    let words: Vec<&str> = command.split(' ').collect();
    assert_eq!(words[..2], ["plimsoll", "train"], "{command}");
    workspace.succeed(&[&words[1..], &["--quiet"]].concat());
    let plan = workspace.json("run-micro-batch/plan.json");
    assert!(plan["recipe"]["micro_batch"].as_u64() > Some(1), "{command}: {plan}");
}

#[test]
fn watch_shows_what_the_run_has_reached() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let result = workspace.json("run/result.json");
    let snapshot = workspace.succeed(&["watch", "run", "--json"]).json();
    let (run, device) = (&snapshot["run"], &snapshot["devices"][0]);
    assert_eq!((&run["state"], &run["step"], &run["steps"]), (&"done".into(), &result["steps"], &result["steps"]));
    assert_eq!(run["loss"], result["loss"]["last"]);
    assert_eq!(device["name"], result["memory"][0]["device"]);
    assert_eq!(device["predicted_peak_bytes"], result["memory"][0]["predicted_bytes"]);
    assert_eq!(device["measured_peak_bytes"], result["memory"][0]["measured_bytes"]);
    assert_eq!(snapshot["recommendations"], serde_json::json!([]));
    // Lines end with the run.
    let lines = workspace.succeed(&["watch", "run"]).stdout;
    assert!(lines.contains(&format!("run done: step {} of", result["steps"])), "{lines}");
    let peak = plimsoll_core::Bytes(result["memory"][0]["measured_bytes"].as_u64().unwrap());
    assert!(lines.contains(&format!("held {peak} at most")), "{lines}");
    assert!(lines.contains("plan: single device, "), "{lines}");
    // A cut-off last line is no event yet.
    let events = workspace.read("run/events.jsonl");
    workspace.write("run/events.jsonl", &events[..events.len() - 20]);
    let snapshot = workspace.succeed(&["watch", "run", "--json"]).json();
    assert_eq!(snapshot["run"]["state"], "died");
    let refusal = workspace.expect_refusal(2, &["watch", "missing"]);
    assert!(refusal.contains("missing: no such run folder"), "{refusal}");
}
