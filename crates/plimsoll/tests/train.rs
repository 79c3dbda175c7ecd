//! `plimsoll train` from start to end: files and keys that other tools rely on, `--resume`, `--json`, and the use of the
//! trained model or adapters.

use crate::common::{SMALL, Shape, Workspace};
use serde_json::Value;

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}")).keys().map(String::as_str).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Environment without a folder for caches, so that each process tokenizes.
const WITHOUT_CACHE: [&str; 9] =
    ["env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "PLIMSOLL_CACHE", "-u", "PLIMSOLL_TOKENS"];

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn tokens_without_home_leave_no_files() {
    let workspace = Workspace::new(&Shape { steps: 1, ..SMALL });
    std::fs::create_dir(workspace.path("tmp")).unwrap();
    let tmp = format!("TMPDIR={}", workspace.path("tmp").display());
    let done = workspace.start_wrapped(&[&WITHOUT_CACHE[..], &[&tmp]].concat(), &["train", "run.toml"]).wait();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(workspace.file_names("tmp").is_empty(), "{:?}", workspace.file_names("tmp"));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn preparation_above_load_line_is_refused() {
    let vocab = 150_000;
    let workspace = Workspace::new(&Shape { hidden: 8, steps: 2, batch_sequences: 2, ..SMALL });
    let mut config = crate::common::config(8);
    config["vocab_size"] = vocab.into();
    workspace.write("model/config.json", config.to_string());
    workspace.write("model/tokenizer.json", crate::common::tokenizer(vocab).to_string());
    let settings = [
        "data.train=train-text.jsonl",
        "data.eval=eval-text.jsonl",
        "data.format=text",
        "train.rungs=lora",
        "run.fallback=none",
    ];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
    let command = [&["train", "run.toml", "--devices", "virtual:a=45MiB@1"], &settings[..]].concat();

    let refused = workspace.start_wrapped(&WITHOUT_CACHE, &command).wait().refusal(3);
    assert!(
        refused.contains("while they are prepared, more than the load line of 45.00 MiB of virtual:a"),
        "{refused}"
    );
    let devices = refused.split("--devices ").last().unwrap().trim();
    let with_more = [&["train", "run.toml", "--devices", devices], &settings[..]].concat();
    let done = workspace.start_wrapped(&WITHOUT_CACHE, &with_more).wait();
    assert_eq!(done.code, Some(0), "{}", done.stderr);

    // With a cache, a second process finds the tokens and keeps the load line.
    std::fs::remove_dir_all(workspace.path("run")).unwrap();
    workspace.succeed(&command);
    assert_eq!(workspace.json("run/result.json")["memory"][0].get("over_load_line_bytes"), None);
}

#[test]
fn run_writes_contract_files_and_keys() {
    let workspace = Workspace::new(&SMALL);
    let text = ["data.train=train-text.jsonl", "data.eval=eval-text.jsonl", "data.format=text", "data.pack=true"];
    let settings: Vec<&str> = text.iter().flat_map(|setting| ["--set", *setting]).collect();
    let done = workspace.succeed(&[&["train", "run.toml"], &settings[..]].concat());
    assert_eq!(done.stderr, "");
    assert_eq!(
        workspace.file_names("run"),
        ["checkpoints", "events.jsonl", "model", "plan.json", "result.json", "run.toml"]
    );
    assert_eq!(workspace.file_names("run/checkpoints"), ["step-20", "step-24"]);
    assert_eq!(workspace.file_names("run/checkpoints/step-24"), ["checkpoint.json", "state.safetensors"]);
    let model = workspace.file_names("run/model");
    assert_eq!(model, ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);

    let result = workspace.json("run/result.json");
    assert_eq!(
        keys(&result),
        [
            "status",
            "steps",
            "loss",
            "tokens_per_second",
            "step_seconds",
            "eval",
            "memory",
            "recipe",
            "recoveries",
            "thermal_pause_seconds",
            "reproducible",
            "reproducible_because"
        ]
    );
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &SMALL.steps.into()));
    assert_eq!(keys(&result["loss"]), ["first", "last"]);
    assert_eq!(keys(&result["step_seconds"]), ["median", "p95", "predicted"]);
    assert_eq!(keys(&result["eval"]), ["loss"], "prose has no exact match");
    let memory = &result["memory"][0];
    let arena = ["device", "budget_bytes", "arena_bytes", "arena_measured_bytes", "arena_measured_by_category"];
    assert_eq!(keys(memory), [&arena[..], &["predicted_bytes", "measured_bytes", "measured_by"]].concat());
    assert_eq!(memory["measured_by"], "process");
    assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"]);
    assert!(number(&result["tokens_per_second"]) > 0.0);
    let plan = workspace.json("run/plan.json");
    assert_eq!(memory["arena_measured_by_category"], plan["devices"][0]["by_category"]);
    assert_eq!(
        keys(&plan),
        [
            "fits",
            "recipe",
            "class",
            "rungs",
            "checkpoint_bytes",
            "devices",
            "host",
            "predicted",
            "needs",
            "planned_for"
        ]
    );
    assert_eq!((&plan["recipe"], &plan["devices"][0]["arena_bytes"]), (&result["recipe"], &memory["arena_bytes"]));

    check_events(&workspace, &result);

    // The stored run file has all decided values, and the run folder is sufficient to resume.
    assert!(workspace.read("run/run.toml").contains("precision = \"f32\""));
    workspace.succeed(&["plan", "run/run.toml"]);
    let before = (workspace.read_files("run/model"), workspace.read_files("run/checkpoints"));
    std::fs::rename(workspace.path("run.toml"), workspace.path("gone.toml")).unwrap();
    std::fs::remove_file(workspace.path("run/result.json")).unwrap();
    workspace.succeed(&["train", "--resume", "run"]);
    assert!(
        before == (workspace.read_files("run/model"), workspace.read_files("run/checkpoints")),
        "only the end was repeated"
    );
    assert!(number(&workspace.json("run/result.json")["tokens_per_second"]) > 0.0);
}

/// Checks the keys of `run/events.jsonl` and compares its losses with the result.
fn check_events(workspace: &Workspace, result: &Value) {
    let events = workspace.events("run");
    assert_eq!(events.len(), workspace.read("run/events.jsonl").lines().count(), "every line is an object");
    assert!(events.iter().all(|event| event["version"] == 1 && number(&event["time"]) > 0.0));
    let of = |kind: &str| events.iter().filter(|event| event["event"] == kind).collect::<Vec<_>>();
    for (step, event) in of("step").iter().enumerate() {
        assert_eq!(event["step"], step as u64 + 1);
        assert_eq!(event["tokens"], SMALL.batch_sequences * SMALL.sequence);
        for key in ["loss", "norm", "learning_rate", "labelled_tokens", "seconds", "bytes"] {
            assert!(number(&event[key]) > 0.0, "{key}: {event}");
        }
    }
    assert_eq!(of("step").len(), SMALL.steps as usize);
    let saved: Vec<&Value> = of("checkpoint").iter().map(|event| &event["step"]).collect();
    assert_eq!(saved, [4, 8, 12, 16, 20, 24]);
    let steps = of("step");
    assert_eq!((&steps[0]["loss"], &steps[23]["loss"]), (&result["loss"]["first"], &result["loss"]["last"]));
    assert!(number(&result["loss"]["last"]) < number(&result["loss"]["first"]), "it learns");
    assert_eq!(of("evaluation").last().unwrap()["loss"], result["eval"]["loss"]);
    assert_eq!(events.last().unwrap()["event"], "end");
}

#[test]
fn prose_run_shows_continuations_without_verdict() {
    let workspace = Workspace::new(&Shape { steps: 3, ..SMALL });
    let done = workspace.succeed(&["train", "run.toml"]);
    let (before, samples) = done.stdout.split_once("\nsamples\n").expect("there are samples");
    assert!(before.lines().any(|line| line.starts_with("3/3  loss ") && line.ends_with(" MiB on cpu")), "{before}");
    assert!(!done.stdout.contains("exact match"), "{}", done.stdout);
    for verdict in ["right", "wrong", "expected"] {
        assert!(!samples.contains(verdict), "{verdict}: {samples}");
    }
}

#[test]
fn finished_run_stays_unchanged_and_extends() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let before = workspace.read_files("run");
    let done = workspace.succeed(&["train", "--resume", "run"]);
    let more = done.stdout.trim_end().rsplit("for more steps: plimsoll ").next().unwrap().to_owned();
    assert!(done.stdout.starts_with("already done: 24 steps, loss "), "{}", done.stdout);
    assert!(done.stdout.contains("run/result.json\n") && done.stdout.contains("run/model\n"), "{}", done.stdout);
    let words = ["train", "--resume", "run", "--json"];
    assert_eq!(workspace.succeed(&words).json(), workspace.json("run/result.json"));
    assert_eq!(workspace.succeed(&["train", "--resume", "run", "--quiet", "--budget", "1GiB"]).stdout, "");
    let refused = workspace.expect_refusal(2, &["train", "--resume", "run", "--inject-oom", "24:save"]);
    assert!(refused.contains("is done, after 24 steps"), "{refused}");
    let shorter = workspace.expect_refusal(2, &["train", "--resume", "run", "--set", "train.steps=5"]);
    assert!(shorter.contains("train.steps: the run would end after 5 steps, but 24 steps are done"), "{shorter}");
    assert!(before == workspace.read_files("run"), "nothing was changed");

    // Twice as many steps: finished steps are not repeated, and the new length is stored.
    assert!(more.ends_with(" --set train.steps=48"), "{more}");
    workspace.succeed(&more.split(' ').collect::<Vec<_>>());
    let steps = || workspace.events("run").iter().filter(|event| event["event"] == "step").count();
    assert_eq!((steps(), workspace.json("run/result.json")["steps"].as_u64()), (48, Some(48)));
    assert!(workspace.read("run/run.toml").contains("steps = 48"), "{}", workspace.read("run/run.toml"));
    // A kill between the last checkpoint and the result leaves the result of the shorter run: only the end is repeated.
    workspace.write("run/result.json", &before[std::path::Path::new("result.json")]);
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_eq!((steps(), workspace.json("run/result.json")["steps"].as_u64()), (48, Some(48)));
    // A missing model is written again.
    let model = workspace.read_files("run/model");
    std::fs::remove_dir_all(workspace.path("run/model")).unwrap();
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert!(model == workspace.read_files("run/model"));
}

#[test]
fn json_prints_events_then_result() {
    let workspace = Workspace::new(&SMALL);
    let done = workspace.succeed(&["train", "run.toml", "--json"]);
    let lines: Vec<Value> = done.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (result, events) = lines.split_last().unwrap();
    assert_eq!(*result, workspace.json("run/result.json"));
    assert_eq!(events, workspace.events("run"));
    let quiet = workspace.succeed(&["train", "run.toml", "--quiet", "--set", "run.dir=quiet"]);
    assert_eq!((quiet.stdout, quiet.stderr), (String::new(), String::new()));
}

#[test]
fn trained_end_token_is_written_out() {
    let workspace = Workspace::new(&Shape { steps: 1, ..SMALL });
    let text = workspace.read("run.toml").replace("\"tokens\"", "\"text\"").replace(".jsonl", "-text.jsonl");
    workspace.write("run.toml", text);
    workspace.write("model/generation_config.json", r#"{"eos_token_id": [5, 6], "top_k": 7}"#);
    workspace.succeed(&["train", "run.toml"]);
    let all: Value = [0, 5, 6].into_iter().collect();
    assert_eq!(workspace.json("run/model/config.json")["eos_token_id"], all);
    let generation = workspace.json("run/model/generation_config.json");
    assert_eq!((&generation["eos_token_id"], &generation["top_k"]), (&all, &7.into()));
    // Adapters that were trained on text carry the token to a model that does not stop there.
    workspace.write("run/model/generation_config.json", r#"{"eos_token_id": 5}"#);
    let lora = ["--set", "train.method=lora", "--set", "run.dir=tuned", "--set", "model.path=run/model"];
    workspace.succeed(&[&["train", "run.toml", "--set", "model.init=pretrained"], &lora[..]].concat());
    let both: Value = [0, 5].into_iter().collect();
    assert_eq!(workspace.json("tuned/adapter/generation_config.json")["eos_token_id"], both);
    workspace.succeed(&["export", "run/model", "--adapter", "tuned/adapter", "--merged", "merged"]);
    assert_eq!(workspace.json("merged/generation_config.json")["eos_token_id"], both);
}

#[test]
fn steps_without_label_have_no_loss() {
    let workspace = Workspace::new(&Shape { steps: 10, batch_sequences: 1, ..SMALL });
    let ids: Vec<u32> = (0..SMALL.sequence * 8).map(|at| 2 + at % 20).collect();
    let labels: Vec<i32> = (0..ids.len()).map(|at| if at + 1 == ids.len() { 3 } else { -100 }).collect();
    workspace.write("train.jsonl", serde_json::json!({ "input_ids": ids, "labels": labels }).to_string());
    workspace.succeed(&["train", "run.toml", "--set", "data.long=split", "--set", "data.shuffle=false"]);
    let events = workspace.events("run");
    let losses: Vec<&Value> =
        events.iter().filter(|event| event["event"] == "step").map(|event| &event["loss"]).collect();
    let labelled: Vec<usize> = (1..).zip(&losses).filter(|(_, loss)| !loss.is_null()).map(|(step, _)| step).collect();
    assert_eq!(labelled, [8], "only the last of 8 rows has a label");
    let result = workspace.json("run/result.json");
    assert_eq!((&result["unlabelled_steps"], &result["loss"]["last"]), (&9.into(), losses[7]));
    let messages =
        events.iter().filter(|event| event["event"] == "warning").filter_map(|event| event["message"].as_str());
    assert_eq!(messages.filter(|text| text.contains("has no label")).count(), 1);
}

#[test]
fn eval_matches_final_training_evaluation() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml"]);
    // The format is recognized.
    let eval = ["eval", "run/model", "--data", "eval.jsonl", "--json"];
    let loss = workspace.succeed(&eval).json();
    assert_eq!(keys(&loss), ["loss", "perplexity", "tokens"]);
    let events = workspace.events("run");
    let last = events.iter().rfind(|event| event["event"] == "evaluation").unwrap();
    assert_eq!(loss["tokens"], last["tokens"]);
    let (found, expected) = (number(&loss["loss"]), number(&last["loss"]));
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} and {expected}");
    assert!((number(&loss["perplexity"]) / found.exp() - 1.0).abs() < 1e-12);
    // Longer rows and a load line give the same loss.
    let other = workspace.succeed(&[&eval[..], &["--sequence", "64", "--budget", "1GiB"]].concat()).json();
    assert!((number(&other["loss"]) / expected - 1.0).abs() < 1e-6);
}

#[test]
fn tight_budget_changes_recipe_not_result() {
    let workspace = Workspace::new(&Shape { batch_sequences: 128, ..SMALL });
    let refused = workspace.run(&["train", "run.toml", "--budget", "1MiB", "--json"]);
    assert_eq!(refused.code, Some(3), "{}", refused.stderr);
    assert_eq!(workspace.file_names("run"), [""; 0], "what does not fit leaves nothing");
    let error = &refused.json()["error"];
    assert_eq!(error["exit"], 3);
    let hint = error["hints"][0].as_str().unwrap();
    let (_, ready) = hint.split_once("plimsoll ").expect("a ready command");
    let ready: Vec<&str> = ready.split(' ').filter(|word| *word != "--json").collect();
    workspace.succeed(&ready);
    workspace.succeed(&["train", "run.toml", "--set", "run.dir=free"]);
    let (tight, free) = (workspace.json("run/result.json"), workspace.json("free/result.json"));
    assert_ne!(tight["recipe"], free["recipe"]);
    assert!(number(&tight["memory"][0]["arena_bytes"]) < number(&free["memory"][0]["arena_bytes"]));
    assert!(number(&tight["memory"][0]["measured_bytes"]) <= number(&tight["memory"][0]["budget_bytes"]));
    let difference = number(&tight["loss"]["last"]) / number(&free["loss"]["last"]) - 1.0;
    assert!(difference.abs() < 1e-3, "the recipe never changes the experiment: {difference}");
}

#[test]
fn adapters_save_apply_continue_and_merge() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let base = workspace.read_files("run/model");
    let lora = ["--set", "model.path=run/model", "--set", "model.init=pretrained", "--set", "train.method=lora"];
    let small = ["--set", "lora.rank=4", "--set", "lora.alpha=8", "--set", "lora.dropout=0.1"];
    let train = [&["train", "run.toml", "--quiet"], &lora[..], &small].concat();
    workspace.succeed(&[&train[..], &["--set", "run.dir=tuned"]].concat());
    assert_eq!(
        workspace.file_names("tuned"),
        ["adapter", "checkpoints", "events.jsonl", "plan.json", "result.json", "run.toml"]
    );
    assert_eq!(workspace.file_names("tuned/adapter"), ["adapter_config.json", "adapter_model.safetensors"]);
    let config = workspace.json("tuned/adapter/adapter_config.json");
    assert_eq!((&config["r"], &config["lora_alpha"], &config["lora_dropout"]), (&4.into(), &8.into(), &0.1.into()));
    assert_eq!(workspace.read_files("run/model"), base);

    // Applied or merged, the adapters give the loss of their run.
    let loss = |model: &[&str]| {
        let data = ["--data", "eval.jsonl", "--format", "tokens", "--json"];
        number(&workspace.succeed(&[&["eval"], model, &data[..]].concat()).json()["loss"])
    };
    let found = number(&workspace.json("tuned/result.json")["eval"]["loss"]);
    assert!((loss(&["run/model"]) / found - 1.0).abs() > 1e-4, "the adapters have learned something");
    assert!((loss(&["run/model", "--adapter", "tuned/adapter"]) / found - 1.0).abs() < 1e-6);
    workspace.succeed(&["export", "run/model", "--adapter", "tuned/adapter", "--merged", "merged"]);
    assert_eq!(workspace.file_names("merged"), workspace.file_names("run/model"));
    assert!((loss(&["merged"]) / found - 1.0).abs() < 1e-5);
    let generate = ["generate", "--prompt", "abc", "--max-tokens", "4", "--json"];
    let with = workspace.succeed(&[&generate[..], &["run/model", "--adapter", "tuned/adapter"]].concat());
    assert_eq!(with.stdout, workspace.succeed(&[&generate[..], &["merged"]].concat()).stdout);

    // Further training starts from the adapters, with their rank.
    let on = [&["train", "run.toml", "--quiet"], &lora[..], &["--set", "model.adapter=tuned/adapter"]].concat();
    workspace.succeed(&[&on[..], &["--set", "run.dir=on"]].concat());
    assert!(workspace.read("on/run.toml").contains("rank = 4"));
    assert!(
        number(&workspace.json("on/result.json")["loss"]["first"])
            < number(&workspace.json("tuned/result.json")["loss"]["first"])
    );
}

#[test]
fn adapters_over_random_weights_are_reported() {
    let workspace = Workspace::new(&SMALL);
    let done =
        workspace.succeed(&["train", "run.toml", "--quiet", "--set", "train.method=lora", "--set", "train.steps=1"]);
    assert!(done.stderr.contains("warning: adapters over random weights"), "{}", done.stderr);
    let eval = ["eval", "model", "--adapter", "run/adapter", "--data", "eval.jsonl", "--format", "tokens"];
    for words in [&eval[..], &["export", "model", "--adapter", "run/adapter", "--merged", "merged"]] {
        let refused = workspace.expect_refusal(2, words);
        assert!(
            refused.contains("run/adapter names no base model: ") && refused.contains("train a full model first"),
            "{refused}"
        );
    }
    // Over other weights of the same shape they work, with a note.
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "run.dir=whole", "--set", "train.steps=1"]);
    let over = [&["eval", "whole/model"], &eval[2..]].concat();
    for words in [&over[..], &["export", "whole/model", "--adapter", "run/adapter", "--merged", "merged"]] {
        let said = workspace.succeed(words).stderr;
        assert!(said.starts_with("note: ") && said.contains("run/adapter names no base model: "), "{said}");
    }
}

/// A frozen base in 4 bit and optimizer state in 8 bit. The rank is large enough for 8-bit state. The quantized base is in
/// no checkpoint and has to be quantized again to the same bits.
#[test]
fn quantized_run_resumes_to_identical_bits() {
    let workspace = Workspace::new(&SMALL);
    let quantized = ["--set", "train.method=lora", "--set", "train.rungs=nf4,adam8bit", "--set", "lora.rank=128"];
    for run in ["whole", "cut"] {
        let dir = format!("run.dir={run}");
        workspace.succeed(&[&["train", "run.toml", "--quiet", "--set", &dir], &quantized[..]].concat());
    }
    let left = |run: &str| {
        (workspace.read_files(&format!("{run}/adapter")), workspace.read_files(&format!("{run}/checkpoints")))
    };
    assert!(workspace.read("cut/run.toml").contains("rungs = [\"nf4\", \"adam8bit\"]"));
    std::fs::remove_dir_all(workspace.path("cut/checkpoints/step-24")).unwrap();
    std::fs::remove_dir_all(workspace.path("cut/adapter")).unwrap();
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert_eq!(workspace.file_names("cut/checkpoints"), ["step-20", "step-24"]);
    assert!(left("cut").0 == left("whole").0, "the adapters");
    let tensors =
        |run: &str| std::fs::read(workspace.path(&format!("{run}/checkpoints/step-24/state.safetensors"))).unwrap();
    assert!(tensors("cut") == tensors("whole"), "adapters and state");
}
