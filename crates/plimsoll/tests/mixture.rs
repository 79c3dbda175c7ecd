//! Mixtures of training data (`[[data.source]]`): training, resume, splits, and the report of `plimsoll data`.

use crate::common::{SMALL, Shape, Workspace};
use serde_json::{Value, json};
use std::fs;

/// Returns a workspace with the run file `mix.toml` in place of `run.toml`: token ids with the weight 3, and texts with
/// the weight 1. `set/` has files of three splits.
fn workspace(shape: &Shape) -> Workspace {
    let workspace = Workspace::new(shape);
    let run_file = workspace.read("run.toml").replace("train = \"train.jsonl\"\n", "");
    let source =
        |path: &str, weight: u32, more: &str| format!("[[data.source]]\npath = \"{path}\"\nweight = {weight}\n{more}");
    let sources = source("train.jsonl", 3, "") + &source("train-text.jsonl", 1, "format = \"text\"\n");
    workspace.write("mix.toml", run_file + &sources);
    fs::create_dir(workspace.path("set")).unwrap();
    for (name, documents) in [("train-0", 8), ("train-1", 9), ("dev", 5), ("part", 3)] {
        let lines: String = (0..documents).map(|id| format!("{}\n", json!({"input_ids": [2, 3 + id]}))).collect();
        workspace.write(&format!("set/{name}.jsonl"), lines);
    }
    workspace
}

/// Returns the arguments that set the sources to these TOML tables.
fn with_sources(tables: &str) -> [String; 2] {
    ["--set".to_owned(), format!("data.source=[{tables}]")]
}

/// Returns the report of `plimsoll data`. Data that a run takes are expected.
fn report(workspace: &Workspace, more: &[String]) -> Value {
    let args: Vec<&str> = ["data", "mix.toml", "--json"].into_iter().chain(more.iter().map(String::as_str)).collect();
    workspace.succeed(&args).json()
}

#[test]
fn killed_mixture_resumes_to_same_bits() {
    let workspace = workspace(&Shape { steps: 300, save_every: 20, threads: "1", ..SMALL });
    let train = |dir: &'static str| ["train", "mix.toml", "--quiet", "--set", dir, "--set", "train.eval_every=0"];
    workspace.succeed(&train("run.dir=whole"));
    let mut run = workspace.start(&train("run.dir=cut"));
    let is_saved = || workspace.events("cut").iter().any(|event| event["event"] == "checkpoint");
    run.wait_until(is_saved);
    run.kill();
    if workspace.path("cut/result.json").exists() {
        // On a busy machine the run may end before it is killed. Then its last steps are repeated.
        fs::remove_dir_all(workspace.path("cut/checkpoints/step-300")).unwrap();
        fs::remove_dir_all(workspace.path("cut/model")).unwrap();
    }
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    let state = |run: &str| fs::read(workspace.path(&format!("{run}/checkpoints/step-300/state.safetensors"))).unwrap();
    assert!(state("cut") == state("whole"), "weights and optimizer state");
    assert!(workspace.read_files("cut/model") == workspace.read_files("whole/model"), "the models");
    let losses = |run: &str| -> Vec<Value> {
        let last = |step: u64| workspace.events(run).into_iter().rfind(|event| event["step"] == step).unwrap();
        [1, 150, 300].map(|step| last(step)["loss"].clone()).to_vec()
    };
    assert_eq!(losses("cut"), losses("whole"));
    // Weights change the run.
    let other = [&train("run.dir=other")[..], &["--set", "train.steps=1"]].concat();
    let sources = with_sources("{path=\"train.jsonl\"}, {path=\"train-text.jsonl\", format=\"text\"}");
    workspace.succeed(&[&other[..], &sources.each_ref().map(String::as_str)].concat());
    assert_ne!(losses_of_first_step(&workspace, "other"), losses_of_first_step(&workspace, "whole"));
}

fn losses_of_first_step(workspace: &Workspace, run: &str) -> Value {
    let events = workspace.events(run);
    events.iter().find(|event| event["event"] == "step").unwrap()["loss"].clone()
}

#[test]
fn resume_refuses_changed_sources() {
    let workspace = workspace(&SMALL);
    workspace.succeed(&["train", "mix.toml", "--quiet"]);
    fs::remove_dir_all(workspace.path("run/checkpoints/step-24")).unwrap();
    let stored = workspace.read("run/run.toml");
    let path = workspace.path("train.jsonl").display().to_string();
    assert!(stored.contains(&format!("[[data.source]]\npath = [\"{path}\"]\nweight = 3.0\n")), "{stored}");
    let resume = ["train", "--resume", "run", "--quiet"];
    let changed = "data.source: tokens, labels, weights or the order of sources differ from those of ";
    let texts = path.replace("train.jsonl", "train-text.jsonl");
    let swapped = stored.replace(&path, "PATH").replace(&texts, &path).replace("PATH", &texts);
    let swapped =
        swapped.replace("format = \"tokens\"", "format = \"auto\"").replace("format = \"text\"", "format = \"auto\"");
    for other in [stored.replace("weight = 3.0", "weight = 2.0"), swapped] {
        assert_ne!(other, stored);
        workspace.write("run/run.toml", other);
        let refusal = workspace.expect_refusal(2, &resume);
        assert!(refusal.contains(changed), "{refusal}");
    }
    workspace.write("run/run.toml", stored.replace(&path, &workspace.path("set/dev.jsonl").display().to_string()));
    let refusal = workspace.expect_refusal(2, &resume);
    assert!(refusal.contains("data.source: ") && refusal.contains(" differ from the data of "), "{refusal}");
    workspace.write("run/run.toml", &stored);

    let sources = with_sources("{path=\"train.jsonl\"}");
    let refusal = workspace.expect_refusal(2, &[&resume[..], &sources.each_ref().map(String::as_str)].concat());
    assert!(refusal.contains("data.source belongs to the experiment"), "{refusal}");
    let data = workspace.read("train-text.jsonl");
    workspace.write("train-text.jsonl", data.replace('a', "b"));
    let refusal = workspace.expect_refusal(2, &resume);
    assert!(refusal.contains(changed), "{refusal}");
    workspace.write("train-text.jsonl", data);
    workspace.succeed(&resume);
}

#[test]
fn report_has_a_line_for_each_source() {
    let workspace = workspace(&SMALL);
    let found = report(&workspace, &[]);
    let sources = found["sources"].as_array().unwrap();
    assert_eq!(sources.len(), 2);
    assert_eq!(sources[0]["path"], json!([workspace.path("train.jsonl")]));
    assert_eq!((&sources[0]["format"], &sources[1]["format"]), (&json!("tokens"), &json!("text")));
    assert_eq!((&sources[0]["share"], &sources[1]["share"]), (&json!(0.75), &json!(0.25)));
    // 24 steps of 8 rows: 144 of the 200 rows of the first source, and 48 of the second.
    assert_eq!((&sources[0]["rows"], &sources[0]["epochs"]), (&json!(200), &json!(0.72)));
    let epochs = 48.0 / sources[1]["rows"].as_f64().unwrap();
    assert_eq!(sources[1]["epochs"].as_f64().unwrap(), epochs);
    let total = |key: &str| sources.iter().map(|source| source[key].as_u64().unwrap()).sum::<u64>();
    for key in ["documents", "tokens", "rows"] {
        assert_eq!(found[key], total(key), "{key}");
    }
    assert_eq!((&found["format"], found["files"].as_array().unwrap().len()), (&json!("tokens and text"), 2));
    assert_eq!(report(&workspace, &["--set", "data.train=train.jsonl"].map(str::to_owned))["sources"], json!([]));

    let many = with_sources("{path=\"train.jsonl\", weight=1}, {path=\"set/part.jsonl\", weight=1}");
    let warnings = report(&workspace, &many)["warnings"].clone();
    let warning = warnings.as_array().unwrap().iter().find(|warning| warning["id"] == "source-repeated").unwrap();
    assert!(warning["text"].as_str().unwrap().starts_with("data.source[2] is seen 32.0 times within the run; "));
    let by_clock = report(&workspace, &[&many[..], &["--set", "train.hours=1"].map(str::to_owned)].concat());
    assert!(by_clock["sources"][1]["epochs"].is_null());
    assert!(by_clock["warnings"].as_array().unwrap().iter().all(|warning| warning["id"] != "source-repeated"));

    let text = workspace.succeed(&["data", "mix.toml"]).stdout;
    let lines: Vec<&str> = text.lines().filter(|line| line.contains(" times ")).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with("1       75.0 %  0.7 times   200 ") && lines[0].ends_with("/train.jsonl"), "{text}");
}

#[test]
fn splits_choose_files() {
    let workspace = workspace(&SMALL);
    let documents = |table: &str| report(&workspace, &with_sources(table))["documents"].clone();
    assert_eq!(documents("{path=\"set/*.jsonl\"}"), 25);
    assert_eq!(documents("{path=\"set/*.jsonl\", split=\"train\"}"), 17);
    assert_eq!(documents("{path=\"set/*.jsonl\", split=\"validation\"}"), 5);
    let test = with_sources("{path=\"set/*.jsonl\", split=\"test\"}");
    for command in ["data", "train"] {
        let args = [&[command, "mix.toml"], &test.each_ref().map(String::as_str)[..]].concat();
        let refusal = workspace.expect_refusal(2, &args);
        assert!(refusal.contains("no name tells that a file has the split \"test\"; the files are "), "{refusal}");
        assert!(refusal.contains("/set/dev.jsonl, ") && refusal.contains(" and 1 more file"), "{refusal}");
    }
}

#[test]
fn errors_name_the_source() {
    let workspace = workspace(&SMALL);
    workspace.write("masked.jsonl", json!({"input_ids": [2, 3], "labels": [-100, -100]}).to_string());
    let sources = with_sources("{path=\"train.jsonl\"}, {path=\"masked.jsonl\"}");
    for command in ["data", "train"] {
        let args = [&[command, "mix.toml"], &sources.each_ref().map(String::as_str)[..]].concat();
        let refusal = workspace.expect_refusal(2, &args);
        assert!(refusal.starts_with("error: data.source[2]: no data: nothing to predict in "), "{refusal}");
    }
    let doctor = workspace.run(&["doctor", "mix.toml", "--json", "--set", "data.source=[{path=\"nowhere.jsonl\"}]"]);
    assert!(doctor.stdout.contains("no file matches"), "{}", doctor.stdout);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn sources_may_be_the_example_or_absent_for_a_plan() {
    let workspace = workspace(&SMALL);
    // Like data.train, sources need not exist for a plan.
    let nowhere = with_sources("{path=\"nowhere.jsonl\"}");
    workspace.succeed(&[&["plan", "mix.toml"], &nowhere.each_ref().map(String::as_str)[..]].concat());
    let sums = with_sources("{path=\"example:sums\", weight=1}, {path=\"set/part.jsonl\", weight=0.25}");
    let args = [&["data", "--json"], &sums.each_ref().map(String::as_str)[..]].concat();
    let found = workspace.succeed(&args).json();
    assert_eq!((&found["sources"][0]["share"], &found["sources"][1]["share"]), (&json!(0.8), &json!(0.2)));
    let dir = ["train", "--quiet", "--set", "run.dir=sums", "--set", "train.steps=2"];
    workspace.succeed(&[&dir, &sums.each_ref().map(String::as_str)[..]].concat());
    assert!(workspace.read("sums/run.toml").contains("/sums/example/train.jsonl"));
}
