//! What does not fit is told with commands that all do what they say, is asked about where somebody is there to be
//! asked, and goes to the processor at last: never silently.

mod common;

use common::{Place, SMALL, Shape};
use plimsoll_device::probe::Cpu;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A model whose weights and state are most of what a run holds.
const WIDE: Shape = Shape { hidden: 256, steps: 1, ..SMALL };

/// What a hint says and the words of its command.
struct Ready {
    /// Predicted bytes and the load line, where the present one is enough.
    predicted: Option<(String, String)>,
    rungs: bool,
    host: bool,
    words: Vec<String>,
}

fn ready(refusal: &str) -> Vec<Ready> {
    let hint = |line: &str| {
        let (said, command) = line.trim().strip_prefix("hint: it fits")?.split_once(": plimsoll ")?;
        let figures = said.split_once(", predicted ").and_then(|(_, figures)| figures.split_once(" of "));
        let of = |line: &str| line.split(", ").next().unwrap().to_owned();
        Some(Ready {
            predicted: figures.map(|(predicted, line)| (predicted.to_owned(), of(line))),
            rungs: said.starts_with(" with "),
            host: said.ends_with(" on the host"),
            words: command.split(' ').map(str::to_owned).collect(),
        })
    };
    refusal.lines().filter_map(hint).collect()
}

/// Bytes as they are printed.
fn shown(value: &Value) -> String {
    plimsoll_core::Bytes(value.as_u64().unwrap()).to_string()
}

#[test]
fn every_command_of_a_refusal_plans_what_it_says() {
    let place = Place::new(&SMALL);
    // What several share is shared in layers, too: few of them have few ways.
    let few = json!({
        "hidden_size": 576, "num_hidden_layers": 4, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 8192, "max_position_embeddings": 512,
    });
    let mut config = common::config(SMALL.hidden);
    few.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    std::fs::create_dir(place.path("few")).unwrap();
    place.write("few/config.json", config.to_string());
    let (one, several) = ("smollm2-135m", "few/config.json");
    let (mut seen, mut of_all) = ([0; 3], 0);
    for (model, devices) in [
        (one, &["--devices", "rtx3090", "--budget", "1GiB"][..]),
        (one, &["--devices=rtx3090=1GiB,host=300MiB", "--allow", "adam8bit"]),
        (one, &["--set", "run.devices=rtx3070", "--set", "memory.budget=900MiB"]),
        (one, &["--devices", "rtx3070=1GiB", "--set", "train.precision=f32", "--set", "memory.allow=[\"lora\"]"]),
        // What one of them would hold is not what it holds where all share the work; of one name, who has more keeps it.
        (several, &["--devices", "rtx3090=400MiB,rtx3070=380MiB,host=24MiB"]),
        (several, &["--devices", "rtx3070=400MiB,rtx3070=300MiB"]),
        // All of them have to take part, and each lacks something.
        (several, &["--devices", "rtx3090=500MiB,rtx3070=400MiB,host=24MiB", "--set", "run.team=all"]),
        (several, &["--devices", "rtx3090,rtx3070=300MiB", "--set", "run.team=all", "--set", "train.precision=f32"]),
    ] {
        let model = ["--model", model, "--sequence", "512", "--batch-tokens", "4096"];
        let args = [&["plan"][..], &model, devices].concat();
        let refusal = place.run(&args);
        assert_eq!(refusal.code, Some(3), "{devices:?}: {}", refusal.stderr);
        for Ready { predicted, rungs, host, words } in ready(&refusal.stderr) {
            let words: Vec<&str> = words.iter().map(|word| word.trim_matches('\'')).chain(["--json"]).collect();
            let done = place.succeed(&words);
            let plan = done.json();
            let found = plan["devices"].as_array().unwrap().iter();
            let mut found = found.map(|device| (shown(&device["peak_bytes"]), shown(&device["budget_bytes"])));
            assert!(
                predicted.is_none_or(|predicted| found.any(|found| found == predicted)),
                "{words:?}: {}",
                refusal.stderr
            );
            // In parts all together may hold it with less loss than each by itself.
            let all = words.contains(&"run.team=all");
            of_all += usize::from(all);
            assert_eq!(plan["rungs"] != Value::Array(vec![]) || all && rungs, rungs, "{words:?}");
            seen = [seen[0] + usize::from(!rungs && !host), seen[1] + usize::from(rungs), seen[2] + usize::from(host)];
        }
    }
    assert!(of_all > 4, "ways of teams that everybody is in: {of_all}");
    assert!(seen.into_iter().all(|count| count > 1), "budgets, rungs, more of the host: {seen:?}");
}

#[test]
fn what_is_planned_to_fit_is_trained_under_the_same_line() {
    let place = Place::new(&WIDE);
    let text = ["--set", "data.train=train-text.jsonl", "--set", "data.format=text", "--set", "data.eval=[]"];
    let of = |command: &str, budget: &str| {
        let args = [&[command, "run.toml", "--json", "--allow", "lora,nf4", "--budget", budget][..], &text].concat();
        place.run(&args)
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
            assert_eq!(plan["devices"], place.json("run/plan.json")["devices"], "{budget}: they are charged alike");
            fitted += 1;
        }
        // The tokens are made anew, in the process that trains.
        for folder in ["run", "cache/tokens"] {
            let _ = std::fs::remove_dir_all(place.path(folder));
        }
    }
    assert!(fitted >= 5, "{fitted} of the lines were enough");
}

#[test]
fn every_command_of_a_refusal_trains() {
    let place = Place::new(&WIDE);
    let refused = place.run(&["train", "run.toml", "--budget", "27MiB"]);
    let refusal = refused.refusal(3);
    let ways = ready(&refusal);
    assert!(ways.iter().any(|way| way.rungs) && ways.iter().any(|way| !way.rungs), "{refusal}");
    for (number, way) in ways.iter().enumerate() {
        let folder = format!("run.dir=run-{number}");
        let words: Vec<&str> = way.words.iter().map(String::as_str).chain(["--json", "--set", &folder]).collect();
        let done = place.succeed(&words);
        let result: Value = serde_json::from_str(done.stdout.lines().last().unwrap()).unwrap();
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &1.into()), "{words:?}");
        let memory = &result["memory"][0];
        assert_eq!(memory["arena_measured_bytes"], memory["arena_bytes"], "{words:?}");
    }
}

/// The binary on a terminal where somebody types an answer: exit code, and what stood on the screen.
fn on_a_terminal(place: &Place, args: &[&str], answer: &str) -> (Option<i32>, String) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let end = || Stdio::from(terminal.try_clone().unwrap());
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(args)
        .current_dir(place.path(""))
        .env("PLIMSOLL_CACHE", place.path("cache"))
        .env("NO_COLOR", "1")
        .env("TERM", "dumb")
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .unwrap();
    drop(terminal);
    let mut screen = File::from(master);
    screen.write_all(answer.as_bytes()).unwrap();
    let mut reads = screen.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut seen = Vec::new();
        let mut some = [0; 4096];
        // A terminal that nobody holds any more ends with an error.
        while let Ok(count @ 1..) = reads.read(&mut some) {
            seen.extend_from_slice(&some[..count]);
        }
        String::from_utf8_lossy(&seen).into_owned()
    });
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > Duration::from_secs(120) {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{args:?} hangs: {}", reader.join().unwrap());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    (status.code(), reader.join().unwrap())
}

#[test]
fn on_a_terminal_it_asks_and_takes_nothing_that_was_not_named() {
    let place = Place::new(&WIDE);
    let args = ["train", "run.toml", "--budget", "27MiB"];
    let (code, screen) = on_a_terminal(&place, &args, "\n");
    assert!(screen.contains("hint: 1: it fits") && screen.contains("take one? 1 to "), "{screen}");
    assert_eq!((code, place.names("run")), (Some(3), vec![]), "{screen}");
    let adapters = |line: &&str| line.contains(" with lora, ") || line.contains(" with lora from ");
    let lora = screen.lines().find(adapters).expect("adapters would do").trim();
    let number = lora.strip_prefix("hint: ").and_then(|rest| rest.split(':').next()).unwrap();
    let (code, screen) = on_a_terminal(&place, &args, &format!("{number}\n"));
    assert_eq!(code, Some(0), "{screen}");
    assert_eq!(place.json("run/result.json")["recipe"]["rungs"], serde_json::json!(["lora"]));
    // Who reads JSON, and who is not there, is not asked.
    std::fs::remove_dir_all(place.path("run")).unwrap();
    let (code, screen) = on_a_terminal(&place, &[&args[..], &["--quiet"]].concat(), "1\n");
    assert_eq!((code, screen.contains("take one?")), (Some(3), false), "{screen}");
    assert!(!place.run(&args).stderr.contains("take one?"));
}

#[test]
fn what_no_rung_brings_under_the_line_of_a_device_is_done_by_the_processor_and_says_so() {
    let place = Place::new(&Shape { steps: 4, ..SMALL });
    let small = ["--devices", "virtual:a=2MiB@0.5"];
    let train = |more: &[&str]| place.run(&[&["train", "run.toml"], more].concat());
    let refused = train(&[&small[..], &["--set", "run.fallback=none"]].concat());
    assert_eq!(refused.code, Some(3));
    let done = train(&small);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let says = "fallback to CPU: virtual:a would have to hold ";
    assert!(done.stdout.contains(says) && done.stdout.contains("tokens/s"), "{}", done.stdout);
    for file in ["run/plan.json", "run/result.json"] {
        assert_eq!(place.json(file)["fallback"]["device"], "virtual:a", "{file}");
    }
    assert_eq!(place.json("run/result.json")["memory"][0]["device"], "cpu");
    let warned = |event: &Value| event["event"] == "warning" && event["message"].as_str().unwrap().starts_with(says);
    assert_eq!(place.events("run").iter().filter(|event| warned(event)).count(), 1);
    // It is the run that the processor would have done.
    place.succeed(&["train", "run.toml", "--devices", "cpu", "--set", "run.dir=on-cpu"]);
    assert!(!place.read("on-cpu/result.json").contains("fallback"));
    let weights = |run: &str| std::fs::read(place.path(run).join("model/model.safetensors")).unwrap();
    assert!(weights("run") == weights("on-cpu"));

    let plan = |devices: [&str; 2]| place.succeed(&[&["plan", "run.toml", "--json"][..], &devices].concat()).json();
    assert_eq!(plan(small)["fallback"]["device"], "virtual:a");
    // Several that cannot hold it together are no different, in a plan as in a run.
    let pair = ["--devices", "virtual:a=2MiB@0.5,virtual:b=3MiB@0.2"];
    place.succeed(&[&["train", "run.toml", "--set", "run.dir=pair"][..], &pair].concat());
    let fallbacks = [plan(pair)["fallback"].clone(), place.json("pair/result.json")["fallback"].clone()];
    assert!(fallbacks[0]["device"].is_string() && fallbacks[0] == fallbacks[1], "{fallbacks:?}");
    assert!(weights("pair") == weights("on-cpu"));
    // A processor that is named does no more than it is asked to, and who wants everybody is not given the processor alone.
    for bound in
        [&["virtual:a=2MiB@0.5,cpu=20MiB"][..], &["virtual:a=2MiB@0.5,virtual:b=3MiB@0.2", "--set", "run.team=all"]]
    {
        for command in ["plan", "train"] {
            let done = place.run(&[&[command, "run.toml", "--set", "run.dir=bound", "--devices"][..], bound].concat());
            assert_eq!(done.code, Some(3), "{}", done.stderr);
        }
    }
    let generate = ["generate", "run/model", "--prompt", "abc", "--max-tokens", "3"];
    let done = place.succeed(&[&generate[..], &small].concat());
    assert!(done.stderr.starts_with(&format!("note: {says}")), "{}", done.stderr);
}

#[test]
fn a_stored_plan_is_followed_in_all_that_it_says() {
    let place = Place::new(&SMALL);
    let train = |run: &str, devices: &str, plan: &Value| {
        place.write("plan.json", plan.to_string());
        let dir = format!("run.dir={run}");
        let words = ["train", "run.toml", "--set", &dir, "--devices", devices, "--plan", "plan.json"];
        place.succeed(&[&words[..], &["--set", "train.steps=2"]].concat());
        place.json(&format!("{run}/result.json"))
    };
    // What the planner would not choose.
    let alone = "virtual:a=64MiB@0.4,host=1GiB";
    let mut plan = place.succeed(&["plan", "run.toml", "--json", "--devices", alone]).json();
    plan["recipe"]["offload"] = json!({"optimizer": 1, "gradients": 1, "inputs": 1});
    plan["recipe"]["micro_batch"] = json!(3);
    let result = train("alone", alone, &plan);
    let offload = &result["recipe"]["offload"];
    let layers = ["optimizer", "gradients", "inputs", "weights"].map(|what| offload[what].as_u64().unwrap());
    assert_eq!((layers, &result["recipe"]["micro_batch"]), ([1, 1, 1, 0], &json!(3)), "{result}");
    // Shares that are worse than the planner's.
    let pair = "virtual:a=64MiB@0.4,virtual:b=64MiB@0.2";
    let asked = ["plan", "run.toml", "--json", "--devices", pair, "--set", "run.team=all"];
    let mut plan = place.succeed(&asked).json();
    for (member, sequences) in [(0, 3), (1, 5)] {
        plan["team"][member]["sequences"] = json!(sequences);
        plan["team"][member]["recipe"]["micro_batch"] = json!(1);
    }
    plan["recipe"] = plan["team"][0]["recipe"].clone();
    let result = train("pair", pair, &plan);
    let sequences = [0, 1].map(|member| result["team"][member]["sequences"].as_u64());
    assert_eq!(sequences, [Some(3), Some(5)], "{result}");
    // One that does not fit here is no refusal, and it is said.
    plan["team"][0]["device"] = json!("virtual:elsewhere");
    let result = train("other", pair, &plan);
    assert_ne!(result["team"][0]["sequences"].as_u64(), Some(3));
    let said = |event: &Value| event["message"].as_str().is_some_and(|text| text.contains("planned anew"));
    assert!(place.events("other").iter().any(said));
}

#[test]
fn a_plan_of_something_else_or_one_that_does_not_fit_is_not_followed() {
    let place = Place::new(&SMALL);
    let plan = |words: &[&str]| {
        let done = place.run(&[&["plan", "run.toml", "--json"], words].concat());
        place.write("plan.json", &done.stdout);
        done.code
    };
    let refused = |says: &[&str]| {
        let refusal = place.refuse(2, &["train", "run.toml", "--plan", "plan.json"]);
        assert!(says.iter().all(|says| refusal.contains(says)), "{refusal}");
        assert!(!place.path("run/run.toml").exists());
    };
    assert_eq!(plan(&["--sequence", "16"]), Some(0));
    refused(&["plan.json: a plan of ", "in sequences of 16; this run has ", "in sequences of 32"]);
    assert_eq!(plan(&["--batch-tokens", "512"]), Some(0));
    refused(&["512 tokens a step", "256 tokens a step"]);
    assert_eq!(plan(&["--budget", "1MiB"]), Some(3));
    refused(&["plan.json: this plan does not fit"]);
    place.write("model/config.json", common::config(64).to_string());
    assert_eq!(plan(&[]), Some(0));
    place.write("model/config.json", common::config(SMALL.hidden).to_string());
    refused(&["plan.json: a plan of ", " parameters"]);
    assert_eq!(plan(&[]), Some(0));
    place.succeed(&["train", "run.toml", "--plan", "plan.json"]);
}

/// Others that take all cores, until it goes.
struct Others(Vec<std::process::Child>);

impl Others {
    fn at_work() -> Others {
        let cores = std::thread::available_parallelism().unwrap().get();
        let busy = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        Others((0..cores).map(|_| busy()).collect())
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What was measured beside other work is no peak either, and nothing that a speed is learned against: what was known stays.
#[test]
fn rates_that_were_measured_beside_other_programs_are_called_so_and_nothing_is_learned_from_them() {
    let place = Place::new(&Shape { steps: 8, hidden: 64, batch_sequences: 32, ..SMALL });
    assert!(place.succeed(&["plan", "run.toml", "--json"]).json().get("disturbed").is_none());
    place.succeed(&["train", "run.toml", "--set", "run.dir=before", "--set", "train.steps=1"]);
    // Nothing is known of this processor but that it is slow, and others have it; two programs measure it at once.
    std::fs::remove_file(place.path("cache/devices.json")).unwrap();
    let known = json!([{"device": "cpu", "model": Cpu::read().model, "slower": 3.0, "why": "it was"}]);
    place.write("cache/shortfalls.json", known.to_string());
    let others = Others::at_work();
    let beside = place.start(&["generate", "before/model", "--prompt", "abc", "--max-tokens", "3"]);
    // The table of `plan` is the one that `train` begins with.
    let said = place.succeed(&["train", "run.toml"]).stdout;
    let table = said.replace('\n', " ").replace("  ", " ");
    assert!(table.contains("rates: others took ") && table.contains("once and for all"), "{table}");
    assert!(table.contains("no share of the peak is told"), "{table}");
    let text = beside.end();
    assert_eq!(text.code, Some(0), "{}", text.stderr);
    // It predicts nothing, so nothing is said of that.
    assert!(!text.stderr.contains("rates: "), "{}", text.stderr);
    // Who comes a moment later has them, and is told alike.
    let kept = place.read("cache/devices.json");
    let after = place.succeed(&["plan", "run.toml", "--json"]).json();
    assert!(after["disturbed"].is_string() && place.read("cache/devices.json") == kept, "{after}");
    drop(others);
    assert!(said.contains("loss ") && !said.contains(" of peak"), "{said}");
    let start = place.events("run").into_iter().find(|event| event["event"] == "start").unwrap();
    assert_eq!(start["peak_flops"], 0.0);
    assert_eq!(place.json("cache/shortfalls.json"), known);
    let said = place.json("run/plan.json")["disturbed"].clone();
    assert!(said.as_str().is_some_and(|said| said.contains("it is measured again after some minutes")), "{said}");
    // With rates that are known there is a peak.
    place.know_the_rates();
    assert!(place.succeed(&["train", "run.toml", "--set", "run.dir=alone"]).stdout.contains(" of peak"));
}
