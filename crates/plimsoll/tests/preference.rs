//! Training on pairs of answers (DPO): losses, evaluation, teams, refused memory, and runs that are killed.

use crate::common::{SMALL, Shape, Workspace};
use serde_json::{Value, json};
use std::fs;

/// A run of few and short steps.
const QUICK: Shape = Shape { steps: 12, threads: "1", ..SMALL };

/// Creates a workspace with the pairs of answers `pairs.jsonl` and `held-out.jsonl`, and the run file `dpo.toml`. The
/// chosen answer repeats the prompt, the rejected one repeats another letter.
fn workspace() -> Workspace {
    let workspace = Workspace::new(&QUICK);
    for (name, first, count) in [("pairs", 0, 120), ("held-out", 120, 30)] {
        let letter = |number: usize| char::from(b'a' + (number % 26) as u8).to_string();
        let record = |number: usize| {
            let prompt = letter(7 * number).repeat(2 + number % 3);
            let (chosen, rejected) = (prompt.repeat(1 + number % 2), letter(7 * number + 5).repeat(1 + number % 5));
            json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected })
        };
        let lines: Vec<String> = (first..first + count).map(|number| record(number).to_string()).collect();
        workspace.write(&format!("{name}.jsonl"), lines.join("\n"));
    }
    let text = workspace.read("run.toml");
    let text = text.replace("train.jsonl", "pairs.jsonl").replace("eval.jsonl", "held-out.jsonl");
    let text = text.replace("format = \"tokens\"\n", "").replace("[train]", "[train]\nobjective = \"dpo\"");
    workspace.write("dpo.toml", text.replace("pack = false", "pack = true"));
    workspace
}

/// Trains in the run folder `run` with more arguments, and returns `result.json`.
fn train(workspace: &Workspace, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    workspace.succeed(&[&["train", "dpo.toml", "--quiet", "--set", &dir], more].concat());
    workspace.json(&format!("{run}/result.json"))
}

/// Returns the losses of all steps of a run.
fn losses(workspace: &Workspace, run: &str) -> Vec<f64> {
    let events = workspace.events(run);
    events.iter().filter(|event| event["event"] == "step").map(|event| event["loss"].as_f64().unwrap()).collect()
}

/// Returns the bytes of the trained model.
fn model(workspace: &Workspace, run: &str) -> Vec<u8> {
    fs::read(workspace.path(&format!("{run}/model/model.safetensors"))).unwrap()
}

#[test]
fn held_out_preference_is_learned() {
    let workspace = workspace();
    let result = train(&workspace, "run", &[]);
    let losses = losses(&workspace, "run");
    assert!((losses[0] - 2.0_f64.ln()).abs() < 1e-5, "before the first step, no answer is preferred: {}", losses[0]);
    let preferences = &result["eval"]["preferences"];
    assert_eq!(preferences["pairs"], 30);
    assert!(preferences["accuracy"].as_f64() > Some(0.9), "{preferences}");
    assert!(result["eval"]["loss"].as_f64() < Some(0.6), "{result}");
    let events = workspace.events("run");
    let reference: Vec<&Value> = events.iter().filter(|event| event["event"] == "reference").collect();
    assert_eq!((reference.len(), &reference[0]["rows"]), (1, &reference[0]["all_rows"]), "{reference:?}");
    let of_steps = events.iter().filter(|event| event["event"] == "preferences" && event["evaluation"] == false);
    assert_eq!(of_steps.count(), 12);
    assert_eq!(result["memory"][0]["arena_bytes"], result["memory"][0]["arena_measured_bytes"]);
    // The plan of such a run shows its scores.
    let plan = workspace.json("run/plan.json");
    assert!(plan["devices"][0]["by_program"]["score"].as_u64() > Some(0), "{plan}");
    assert!(plan["devices"][0]["by_program"].get("evaluate").is_none(), "{plan}");
}

#[test]
fn packing_and_micro_batches_change_no_loss() {
    let workspace = workspace();
    // All pairs are in the one step of each run, which has fewer rows if they are packed.
    let settings = ["train.epochs=1", "train.batch_tokens=3840", "train.precision=f64"];
    let settings = settings.map(|setting| ["--set", setting]).concat();
    let one = |run: &str, rows: u64, more: &[&str]| {
        train(&workspace, run, &[&settings[..], more].concat());
        let events = workspace.events(run);
        let step = events.iter().find(|event| event["event"] == "step").unwrap();
        let pairs = events.iter().find(|event| event["event"] == "preferences").unwrap()["pairs"].clone();
        assert_eq!(pairs, 120, "{run}");
        assert_eq!(step["tokens"], 32 * rows, "{run}: empty rows that fill micro-batches do not count");
        [step["loss"].as_f64().unwrap(), step["norm"].as_f64().unwrap()]
    };
    let padded = one("padded", 120, &["--set", "data.pack=false"]);
    let files = workspace.file_names("cache/tokens");
    assert!(files.iter().any(|file| file.ends_with("-32-pairs.rows")), "{files:?}");
    for micro_batch in ["1", "7"] {
        let pinned = format!("recipe.micro_batch={micro_batch}");
        let run = format!("packed-{micro_batch}");
        let packed = one(&run, 73, &["--set", &pinned]);
        for (packed, padded) in packed.iter().zip(padded) {
            assert!((packed / padded - 1.0).abs() < 1e-9, "{run}: {packed} for {padded}");
        }
    }
}

#[test]
fn refused_memory_while_scoring_keeps_every_bit() {
    let workspace = workspace();
    let pinned = ["--set", "recipe.micro_batch=4"];
    train(&workspace, "plain", &pinned);
    for at in ["0:score", "1:score", "3:score:9", "10:score:product"] {
        let run = format!("run-{}", at.replace(':', "-"));
        let result = train(&workspace, &run, &[&pinned[..], &["--inject-oom", at]].concat());
        assert_eq!(result["recoveries"][0]["class"], "identical", "{at}: {result}");
        assert_eq!(losses(&workspace, &run), losses(&workspace, "plain"), "{at}");
        assert_eq!(model(&workspace, &run), model(&workspace, "plain"), "{at}");
    }
}

#[test]
fn killed_run_resumes_with_the_same_reference() {
    let workspace = workspace();
    train(&workspace, "plain", &[]);
    let whole = fs::read(workspace.path("plain/reference/train.scores")).unwrap();
    for lines in [1, 4, 9] {
        let run = format!("killed-{lines}");
        let dir = format!("run.dir={run}");
        let mut running = workspace.start(&["train", "dpo.toml", "--quiet", "--set", &dir]);
        running.wait_until(|| workspace.path(&run).join("run.toml").exists() && workspace.events(&run).len() >= lines);
        running.kill();
        workspace.succeed(&["train", "--resume", &run, "--quiet"]);
        assert_eq!(fs::read(workspace.path(&format!("{run}/reference/train.scores"))).unwrap(), whole, "{lines}");
        assert_eq!(model(&workspace, &run), model(&workspace, "plain"), "{lines}");
    }
}

#[test]
fn longer_run_computes_the_missing_reference_with_its_first_weights() {
    let workspace = workspace();
    let settings = ["--set", "train.schedule=constant"];
    train(&workspace, "plain", &settings);
    // The first steps read a part of the rows. In the second run, the file is lost.
    train(&workspace, "longer", &[&settings[..], &["--set", "train.steps=3"]].concat());
    train(&workspace, "lost", &[&settings[..], &["--set", "train.steps=6"]].concat());
    let whole = fs::read(workspace.path("plain/reference/train.scores")).unwrap();
    let part = fs::read(workspace.path("longer/reference/train.scores")).unwrap();
    assert!(part.len() < whole.len() / 2, "{} of {} bytes", part.len(), whole.len());
    fs::remove_file(workspace.path("lost/reference/train.scores")).unwrap();
    for run in ["longer", "lost"] {
        workspace.succeed(&["train", "--resume", run, "--quiet", "--set", "train.steps=12"]);
        assert_eq!(model(&workspace, run), model(&workspace, "plain"), "{run}");
        assert_eq!(losses(&workspace, run), losses(&workspace, "plain"), "{run}");
    }
    assert_eq!(fs::read(workspace.path("lost/reference/train.scores")).unwrap(), whole);
}

#[test]
fn teams_have_the_losses_of_one_device() {
    let workspace = workspace();
    let precise = ["--set", "train.precision=f64"];
    train(&workspace, "plain", &[&precise[..], &["--devices", "virtual:a=64MiB@1"]].concat());
    let expected = losses(&workspace, "plain");
    for parallelism in ["data", "sharded", "pipeline"] {
        let kind = format!("run.parallelism={parallelism}");
        let devices = ["--devices", "virtual:a=64MiB@1,virtual:b=64MiB@0.5", "--set", &kind];
        let result = train(&workspace, parallelism, &[&precise[..], &devices].concat());
        assert_eq!(result["parallelism"], parallelism);
        for (step, (found, expected)) in losses(&workspace, parallelism).iter().zip(&expected).enumerate() {
            assert!((found / expected - 1.0).abs() < 1e-9, "{parallelism}, step {}: {found} for {expected}", step + 1);
        }
    }
}

#[test]
fn other_data_and_settings_are_refused() {
    let workspace = workspace();
    workspace.write("verdict.jsonl", "{\"prompt\": \"ab\", \"completion\": \"c\", \"label\": true}\n");
    let long = json!({ "prompt": "a".repeat(20), "chosen": "b", "rejected": "c" }).to_string();
    workspace.write("long.jsonl", long);
    for (settings, expected) in [
        (&["data.train=train-text.jsonl"][..], "its format is text, but train.objective = \"dpo\" takes preference"),
        (&["train.objective=supervised"], "its format is preference, which only train.objective = \"dpo\" takes"),
        (&["data.train=verdict.jsonl"], "expected `chosen` and `rejected`, found one `completion` with a `label`"),
        (&["data.train=long.jsonl"], "long.jsonl:1: the pair needs 43 positions"),
        (&["data.train=long.jsonl"], "set data.sequence to 43 or more"),
        (&["train.method=lora", "lora.dropout=0.1"], "does not support dropout: its score runs without it"),
        (&["dpo.loss_type=ipo", "dpo.label_smoothing=0.1"], "only the loss \"sigmoid\" smooths labels"),
        (&["dpo.beta=0"], "dpo.beta is 0, expected a number above 0"),
    ] {
        let words: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        let refused = workspace.expect_refusal(2, &[&["train", "dpo.toml"], &words[..]].concat());
        assert!(refused.contains(expected), "{settings:?}: {refused}");
    }
    assert!(!workspace.path("run").exists());
}
