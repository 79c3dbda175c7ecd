//! A run from the command line: what it leaves is what other tools rely on, and `--resume` needs
//! nothing but the run folder.

mod common;

use common::{Place, SMALL, Shape};
use serde_json::Value;

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}")).keys().map(String::as_str).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn a_run_leaves_what_the_contracts_say() {
    let place = Place::new(&SMALL);
    let text = ["data.train=train-text.jsonl", "data.eval=eval-text.jsonl", "data.format=text", "data.pack=true"];
    let settings: Vec<&str> = text.iter().flat_map(|setting| ["--set", *setting]).collect();
    let done = place.succeed(&[&["train", "run.toml"], &settings[..]].concat());
    assert_eq!(done.stderr, "");
    assert_eq!(place.names("run"), ["checkpoints", "events.jsonl", "model", "plan.json", "result.json", "run.toml"]);
    assert_eq!(place.names("run/checkpoints"), ["step-20", "step-24"]);
    assert_eq!(place.names("run/checkpoints/step-24"), ["checkpoint.json", "state.safetensors"]);
    let model = place.names("run/model");
    assert_eq!(model, ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);

    let result = place.json("run/result.json");
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
            "retreats",
            "rested_seconds"
        ]
    );
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &SMALL.steps.into()));
    assert_eq!(keys(&result["loss"]), ["first", "last"]);
    assert_eq!(keys(&result["step_seconds"]), ["median", "p95", "predicted"]);
    assert_eq!(keys(&result["eval"]), ["loss", "exact_match"]);
    let memory = &result["memory"][0];
    let arena = ["device", "budget_bytes", "arena_bytes", "arena_measured_bytes"];
    assert_eq!(keys(memory), [&arena[..], &["predicted_bytes", "measured_bytes", "measured_by"]].concat());
    assert_eq!(memory["measured_by"], "process");
    assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"]);
    assert!(number(&result["tokens_per_second"]) > 0.0);
    let plan = place.json("run/plan.json");
    assert_eq!(
        keys(&plan),
        ["fits", "recipe", "class", "rungs", "checkpoint_bytes", "devices", "host", "predicted", "needs", "of"]
    );
    assert_eq!((&plan["recipe"], &plan["devices"][0]["arena_bytes"]), (&result["recipe"], &memory["arena_bytes"]));

    let events = place.events("run");
    assert_eq!(events.len(), place.read("run/events.jsonl").lines().count(), "every line is an object");
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

    // What was left open is decided, and the folder is all that a run that goes on needs.
    assert!(place.read("run/run.toml").contains("precision = \"f32\""));
    place.succeed(&["plan", "run/run.toml"]);
    let before = (place.files("run/model"), place.files("run/checkpoints"));
    std::fs::rename(place.path("run.toml"), place.path("gone.toml")).unwrap();
    std::fs::remove_file(place.path("run/result.json")).unwrap();
    place.succeed(&["train", "--resume", "run"]);
    assert!(before == (place.files("run/model"), place.files("run/checkpoints")), "only the end was left to do");
    assert!(number(&place.json("run/result.json")["tokens_per_second"]) > 0.0);
}

#[test]
fn a_run_that_is_done_stays_as_it_is_and_takes_more_steps() {
    let place = Place::new(&SMALL);
    place.succeed(&["train", "run.toml", "--quiet"]);
    let before = place.files("run");
    let done = place.succeed(&["train", "--resume", "run"]);
    let more = done.stdout.trim_end().rsplit("for more steps: plimsoll ").next().unwrap().to_owned();
    assert!(done.stdout.starts_with("done already: 24 steps, loss "), "{}", done.stdout);
    assert!(done.stdout.contains("run/result.json\n") && done.stdout.contains("run/model\n"), "{}", done.stdout);
    let words = ["train", "--resume", "run", "--json"];
    assert_eq!(place.succeed(&words).json(), place.json("run/result.json"));
    assert_eq!(place.succeed(&["train", "--resume", "run", "--quiet", "--budget", "1GiB"]).stdout, "");
    let refused = place.refuse(2, &["train", "--resume", "run", "--inject-oom", "24:save"]);
    assert!(refused.contains("is done, after 24 steps"), "{refused}");
    let shorter = place.refuse(2, &["train", "--resume", "run", "--set", "train.steps=5"]);
    assert!(shorter.contains("train.steps: the run would end after 5 steps, and has done 24 steps"), "{shorter}");
    assert!(before == place.files("run"), "nothing was changed");

    // Twice as many steps: those that were done are not done again, and the length stays with the run.
    assert!(more.ends_with(" --set train.steps=48"), "{more}");
    place.succeed(&more.split(' ').collect::<Vec<_>>());
    let steps = || place.events("run").iter().filter(|event| event["event"] == "step").count();
    assert_eq!((steps(), place.json("run/result.json")["steps"].as_u64()), (48, Some(48)));
    assert!(place.read("run/run.toml").contains("steps = 48"), "{}", place.read("run/run.toml"));
    // Killed between the last checkpoint and the result, which is that of the shorter run: the end is done.
    place.write("run/result.json", &before[std::path::Path::new("result.json")]);
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    assert_eq!((steps(), place.json("run/result.json")["steps"].as_u64()), (48, Some(48)));
    // A model that is gone is written once more.
    let model = place.files("run/model");
    std::fs::remove_dir_all(place.path("run/model")).unwrap();
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    assert!(model == place.files("run/model"));
}

#[test]
fn a_program_gets_every_event_and_the_result_as_the_last_line() {
    let place = Place::new(&SMALL);
    let done = place.succeed(&["train", "run.toml", "--json"]);
    let lines: Vec<Value> = done.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (result, events) = lines.split_last().unwrap();
    assert_eq!(*result, place.json("run/result.json"));
    assert_eq!(events, place.events("run"));
    let quiet = place.succeed(&["train", "run.toml", "--quiet", "--set", "run.dir=quiet"]);
    assert_eq!((quiet.stdout, quiet.stderr), (String::new(), String::new()));
}

#[test]
fn a_finished_model_evaluates_to_the_loss_of_its_run() {
    let place = Place::new(&SMALL);
    place.succeed(&["train", "run.toml"]);
    let refused = place.refuse(2, &["eval", "run/model", "--data", "eval.jsonl"]);
    assert!(refused.contains("for {\"input_ids\": [..]} use --format tokens\n"), "{refused}");
    let eval = ["eval", "run/model", "--data", "eval.jsonl", "--format", "tokens", "--json"];
    let loss = place.succeed(&eval).json();
    assert_eq!(keys(&loss), ["loss", "perplexity", "tokens"]);
    let events = place.events("run");
    let last = events.iter().rfind(|event| event["event"] == "evaluation").unwrap();
    assert_eq!(loss["tokens"], last["tokens"]);
    let (found, expected) = (number(&loss["loss"]), number(&last["loss"]));
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} and {expected}");
    assert!((number(&loss["perplexity"]) / found.exp() - 1.0).abs() < 1e-12);
    // Longer rows, and a load line: the same loss.
    let other = place.succeed(&[&eval[..], &["--sequence", "64", "--budget", "1GiB"]].concat()).json();
    assert!((number(&other["loss"]) / expected - 1.0).abs() < 1e-6);
}

#[test]
fn a_run_under_a_load_line_that_binds_takes_another_recipe_and_learns_the_same() {
    let place = Place::new(&Shape { batch_sequences: 128, ..SMALL });
    let refused = place.run(&["train", "run.toml", "--budget", "1MiB", "--json"]);
    assert_eq!(refused.code, Some(3), "{}", refused.stderr);
    assert_eq!(place.names("run"), [""; 0], "what does not fit leaves nothing");
    let error = &refused.json()["error"];
    assert_eq!(error["exit"], 3);
    let hint = error["hints"][0].as_str().unwrap();
    let (_, ready) = hint.split_once("plimsoll ").expect("a ready command");
    let ready: Vec<&str> = ready.split(' ').filter(|word| *word != "--json").collect();
    place.succeed(&ready);
    place.succeed(&["train", "run.toml", "--set", "run.dir=free"]);
    let (tight, free) = (place.json("run/result.json"), place.json("free/result.json"));
    assert_ne!(tight["recipe"], free["recipe"]);
    assert!(number(&tight["memory"][0]["arena_bytes"]) < number(&free["memory"][0]["arena_bytes"]));
    assert!(number(&tight["memory"][0]["measured_bytes"]) <= number(&tight["memory"][0]["budget_bytes"]));
    let difference = number(&tight["loss"]["last"]) / number(&free["loss"]["last"]) - 1.0;
    assert!(difference.abs() < 1e-3, "the recipe never changes the experiment: {difference}");
}

#[test]
fn adapters_are_saved_alone_computed_with_trained_on_and_merged() {
    let place = Place::new(&SMALL);
    place.succeed(&["train", "run.toml", "--quiet"]);
    let base = place.files("run/model");
    let lora = ["--set", "model.path=run/model", "--set", "model.init=pretrained", "--set", "train.method=lora"];
    let small = ["--set", "lora.rank=4", "--set", "lora.alpha=8", "--set", "lora.dropout=0.1"];
    let train = [&["train", "run.toml", "--quiet"], &lora[..], &small].concat();
    place.succeed(&[&train[..], &["--set", "run.dir=tuned"]].concat());
    assert_eq!(
        place.names("tuned"),
        ["adapter", "checkpoints", "events.jsonl", "plan.json", "result.json", "run.toml"]
    );
    assert_eq!(place.names("tuned/adapter"), ["adapter_config.json", "adapter_model.safetensors"]);
    let config = place.json("tuned/adapter/adapter_config.json");
    assert_eq!((&config["r"], &config["lora_alpha"], &config["lora_dropout"]), (&4.into(), &8.into(), &0.1.into()));
    assert_eq!(place.files("run/model"), base);

    // Computed with, and folded in: the loss that the run found.
    let loss = |model: &[&str]| {
        let data = ["--data", "eval.jsonl", "--format", "tokens", "--json"];
        number(&place.succeed(&[&["eval"], model, &data[..]].concat()).json()["loss"])
    };
    let found = number(&place.json("tuned/result.json")["eval"]["loss"]);
    assert!((loss(&["run/model"]) / found - 1.0).abs() > 1e-4, "the adapters have learned something");
    assert!((loss(&["run/model", "--adapter", "tuned/adapter"]) / found - 1.0).abs() < 1e-6);
    place.succeed(&["merge", "run/model", "tuned/adapter", "merged"]);
    assert_eq!(place.names("merged"), place.names("run/model"));
    assert!((loss(&["merged"]) / found - 1.0).abs() < 1e-5);
    let generate = ["generate", "--prompt", "abc", "--max-tokens", "4", "--json"];
    let with = place.succeed(&[&generate[..], &["run/model", "--adapter", "tuned/adapter"]].concat());
    assert_eq!(with.stdout, place.succeed(&[&generate[..], &["merged"]].concat()).stdout);

    // Trained on: it begins where the other ended, with its rank.
    let on = [&["train", "run.toml", "--quiet"], &lora[..], &["--set", "model.adapter=tuned/adapter"]].concat();
    place.succeed(&[&on[..], &["--set", "run.dir=on"]].concat());
    assert!(place.read("on/run.toml").contains("rank = 4"));
    assert!(
        number(&place.json("on/result.json")["loss"]["first"])
            < number(&place.json("tuned/result.json")["loss"]["first"])
    );
}

#[test]
fn adapters_over_random_weights_are_said_to_have_no_model() {
    let place = Place::new(&SMALL);
    let done = place.succeed(&["train", "run.toml", "--quiet", "--set", "train.method=lora", "--set", "train.steps=1"]);
    assert!(done.stderr.contains("warning: adapters over random weights"), "{}", done.stderr);
    let eval = ["eval", "model", "--adapter", "run/adapter", "--data", "eval.jsonl", "--format", "tokens"];
    for words in [&eval[..], &["merge", "model", "run/adapter", "merged"]] {
        let refused = place.refuse(2, words);
        assert!(
            refused.contains("run/adapter names no base model: ") && refused.contains("trained whole first"),
            "{refused}"
        );
    }
    // Over other weights of the same shape they compute, and that is said.
    place.succeed(&["train", "run.toml", "--quiet", "--set", "run.dir=whole", "--set", "train.steps=1"]);
    let over = [&["eval", "whole/model"], &eval[2..]].concat();
    for words in [&over[..], &["merge", "whole/model", "run/adapter", "merged"]] {
        let said = place.succeed(words).stderr;
        assert!(said.starts_with("note: ") && said.contains("run/adapter names no base model: "), "{said}");
    }
}

/// A frozen model in 4 bit and state in 8 (of adapters that are large enough for it): what is in no checkpoint is made once more, to the same bits.
#[test]
fn a_run_with_coarse_weights_goes_on_to_the_bits_of_an_undisturbed_one() {
    let place = Place::new(&SMALL);
    let coarse = ["--set", "train.method=lora", "--set", "train.rungs=nf4,adam8bit", "--set", "lora.rank=128"];
    for run in ["whole", "cut"] {
        let dir = format!("run.dir={run}");
        place.succeed(&[&["train", "run.toml", "--quiet", "--set", &dir], &coarse[..]].concat());
    }
    let left = |run: &str| (place.files(&format!("{run}/adapter")), place.files(&format!("{run}/checkpoints")));
    assert!(place.read("cut/run.toml").contains("rungs = [\"nf4\", \"adam8bit\"]"));
    std::fs::remove_dir_all(place.path("cut/checkpoints/step-24")).unwrap();
    std::fs::remove_dir_all(place.path("cut/adapter")).unwrap();
    place.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert_eq!(place.names("cut/checkpoints"), ["step-20", "step-24"]);
    assert!(left("cut").0 == left("whole").0, "the adapters");
    let tensors =
        |run: &str| std::fs::read(place.path(&format!("{run}/checkpoints/step-24/state.safetensors"))).unwrap();
    assert!(tensors("cut") == tensors("whole"), "adapters and state");
}
