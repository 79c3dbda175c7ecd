//! `plimsoll models`: presets and folders, planned on devices that are present or on paper.

use crate::common::{SMALL, Workspace};
use plimsoll_core::DType;
use plimsoll_program::models::{check_supported, preset, preset_names};
use plimsoll_program::workspace::Kernels;
use serde_json::Value;

/// Lists the models in `model/` and the presets, without those of the user's own cache.
fn list(workspace: &Workspace, code: i32, more: &[&str]) -> Vec<Value> {
    let args = [&["models", "--sequence", "64", "--batch-tokens", "1024", "--json"], more].concat();
    let done = workspace.start_wrapped(&["env", "HF_HUB_CACHE=hub"], &args).wait();
    assert_eq!(done.code, Some(code), "{}{}", done.stderr, done.stdout);
    done.json()["models"].as_array().unwrap().clone()
}

/// Returns the row of a model and a method.
fn row<'a>(rows: &'a [Value], model: &str, rungs: &[&str]) -> &'a Value {
    let is_row = |row: &&Value| row["model"] == model && row["rungs"] == Value::from(rungs);
    rows.iter().find(is_row).unwrap_or_else(|| panic!("{model} {rungs:?}: {rows:?}"))
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn rows_are_plans_of_the_planner() {
    let workspace = Workspace::new(&SMALL);
    // A folder with the name of a preset does not replace it.
    std::fs::create_dir(workspace.path("smollm2-135m")).unwrap();
    let rows = list(&workspace, 0, &["--devices", "rtx3070=2GiB,host=4GiB", "--allow", "nf4", "--time", "60s"]);
    let runs_on_gpus = |name: &&str| check_supported(&preset(name).unwrap(), DType::Bf16, Kernels::Cuda).is_ok();
    let presets = preset_names().filter(runs_on_gpus).count();
    assert_eq!(rows.len(), 3 * presets, "each preset that GPUs take with three methods");
    let mut compared = 0;
    for (model, rungs) in [("smollm2-135m", &[][..]), ("llama-3.2-1b", &["lora", "nf4"]), ("llama-2-13b", &[])] {
        let row = row(&rows, model, rungs);
        let words = shlex_words(row["command"].as_str().unwrap());
        let words: Vec<&str> = words[1..].iter().map(String::as_str).chain(["--json"]).collect();
        let plan = workspace.run(&words).json();
        assert_eq!(plan["fits"], row["fit"] == "fits", "{row}");
        if row["fit"] == "fits" {
            assert_eq!(row["tokens_per_second"], plan["predicted"]["tokens_per_second"]);
            assert_eq!(row["peaks"][0]["peak_bytes"], plan["devices"][0]["peak_bytes"]);
            compared += 1;
        } else if !row["missing"].is_null() {
            // The search for what a large model lacks may end before it is done.
            assert_eq!(row["missing"]["device_bytes"], plan["needs"][0]["budget_bytes"], "{row}");
        }
    }
    assert_eq!(compared, 2);
}

/// Splits a command whose words have no quotes inside other quotes.
fn shlex_words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for letter in command.chars() {
        match letter {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            letter => words.last_mut().unwrap().push(letter),
        }
    }
    words
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn folders_and_cache_are_listed_beside_presets() {
    let workspace = Workspace::new(&SMALL);
    let cached = "hub/models--a--tiny/snapshots/0a";
    std::fs::create_dir_all(workspace.path(cached)).unwrap();
    std::fs::create_dir_all(workspace.path("hub/models--a--tiny/refs")).unwrap();
    workspace.write("hub/models--a--tiny/refs/main", "0a");
    workspace.write(&format!("{cached}/config.json"), workspace.read("model/config.json"));
    std::fs::create_dir(workspace.path("odd\u{1b}[31m")).unwrap();
    workspace.write("odd\u{1b}[31m/config.json", "{\"model_type\": \"mamba\"}");
    let devices = ["--devices", "rtx3070=600MiB", "--dir", "."];
    let rows = list(&workspace, 0, &devices);
    let origin = |model: &str| row(&rows, model, &[])["origin"].clone();
    assert_eq!((origin("./model"), origin(cached)), ("folder".into(), "hugging_face_cache".into()));
    assert_eq!(row(&rows, "./model", &[])["fit"], "fits");
    let done = workspace
        .start_wrapped(&["env", "HF_HUB_CACHE=hub"], &[&["models", "--sequence", "64"], &devices[..]].concat());
    let done = done.wait();
    assert!(done.stdout.contains("\na/tiny  "), "{}", done.stdout);
    assert!(done.stderr.contains("note: ./odd\\u{1b}[31m: "), "{}", done.stderr);
    assert!(!done.stderr.contains('\u{1b}') && !done.stdout.contains('\u{1b}'), "{}", done.stdout);
    assert!(done.stdout.starts_with("predicted for rtx3070 (600.00 MiB): sequences of 64 tokens"), "{}", done.stdout);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn useful_models_come_first_and_misfits_last() {
    let workspace = Workspace::new(&SMALL);
    let rows = list(&workspace, 0, &["--devices", "rtx3070=2GiB", "--time", "60s", "--useful-speed", "1000"]);
    let rank = |row: &Value| match (row["fit"].as_str().unwrap(), row["tokens_per_second"].as_f64()) {
        ("fits", Some(speed)) if speed >= 1000.0 => 0,
        ("fits", _) => 1,
        ("not_planned", _) => 2,
        _ => 3,
    };
    assert!(rows.is_sorted_by_key(rank), "{rows:?}");
    let useful: Vec<u64> =
        rows.iter().filter(|row| rank(row) == 0).map(|row| row["parameters"].as_u64().unwrap()).collect();
    assert!(useful.len() > 2 && useful.is_sorted_by(|one, other| one >= other), "{useful:?}");
    let lacks = |row: &&Value| row["missing"]["device_bytes"].as_u64() > Some(2 << 30);
    assert!(rows.iter().filter(lacks).any(|row| row["fit"] == "does_not_fit"), "{rows:?}");
    let none = list(&workspace, 3, &["--devices", "rtx3070=200MiB"]);
    assert!(none.iter().all(|row| row["fit"] == "does_not_fit" && row["tokens_per_second"].is_null()), "{none:?}");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn model_that_one_device_alone_holds_is_found() {
    // The small card has room for its charges and for no part of the model.
    let workspace = Workspace::new(&SMALL);
    let planned_on = |devices: &str| {
        let devices = ["--devices", devices, "--dir", ".", "--time", "60s"];
        let rows = list(&workspace, 0, &devices);
        row(&rows, "smollm2-135m", &[]).clone()
    };
    let pair = planned_on("rtx3070=600MiB,rtx3090=4GiB");
    assert_eq!(pair["fit"], "fits", "{pair}");
    let names: Vec<&Value> = pair["peaks"].as_array().unwrap().iter().map(|peak| &peak["device"]).collect();
    assert_eq!(names, ["rtx3090"], "{pair}");
    assert_eq!(planned_on("rtx3070=600MiB")["fit"], "does_not_fit");
    assert_eq!(planned_on("rtx3090=4GiB")["tokens_per_second"], pair["tokens_per_second"]);
}

#[test]
fn plans_that_take_too_long_are_named() {
    let workspace = Workspace::new(&SMALL);
    let start = std::time::Instant::now();
    let devices = "virtual:a=600MiB@1.0,virtual:b=200MiB@0.5";
    let done = workspace.succeed(&["models", "--devices", devices, "--time", "1s"]);
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    assert!(done.stdout.contains("not planned: the time ran out"), "{}", done.stdout);
    assert!(done.stderr.contains(" not planned in 1s: raise --time"), "{}", done.stderr);
}

#[test]
fn wrong_folders_and_devices_are_refused() {
    let workspace = Workspace::new(&SMALL);
    for (flags, says) in [
        (["--dir", "missing"], "--dir missing: cannot be read"),
        (["--dir", "cache"], "--dir cache: no model is in it"),
        (["--devices", "rtx9999"], "rtx9999"),
        (["--set", "model.preset=1b"], "--set model.preset: "),
        (["--set", "train.rungs=[]"], "--set train.rungs: "),
        (["--set", " train.method = lora"], "--set train.method: "),
    ] {
        let refusal = workspace.expect_refusal(2, &[&["models"], &flags[..]].concat());
        assert!(refusal.contains(says), "{refusal}");
    }
    // All presets take fewer tokens in a sequence.
    let done = workspace.start_wrapped(&["env", "HF_HUB_CACHE=hub"], &["models", "--sequence", "1000000"]).wait();
    assert_eq!(done.code, Some(2), "{}{}", done.stdout, done.stderr);
    assert!(done.stderr.contains("error: no model is left to list"), "{}", done.stderr);
}
