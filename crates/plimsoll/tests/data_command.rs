//! `plimsoll data`: what a model will see of the training data, for people and as JSON.

use crate::common::{CommandOutput, SMALL, Workspace};
use serde_json::{Value, json};
use std::path::PathBuf;

const BEGIN: i64 = 28;
const END: i64 = 29;
const LINE_END: i64 = 30;

/// Returns the path of an example file.
fn example(name: &str) -> String {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data")).join(name).display().to_string()
}

/// Returns a workspace whose tokenizer has the markers of the template `chatml`, and white space.
fn workspace() -> Workspace {
    let workspace = Workspace::new(&SMALL);
    let marks = [(BEGIN, "<|im_start|>"), (END, "<|im_end|>"), (LINE_END, "\n"), (31, " ")];
    workspace.add_tokens(&marks.map(|(id, word)| (id as u32, word)));
    workspace
}

/// Runs `plimsoll data` on a file with these further arguments.
fn show(workspace: &Workspace, file: &str, more: &[&str]) -> CommandOutput {
    let train = format!("data.train={file}");
    let settings = [&*train, "data.format=auto", "data.template=chatml"];
    let settings = settings.iter().flat_map(|setting| ["--set", *setting]);
    let command: Vec<&str> = ["data", "run.toml"].into_iter().chain(settings).chain(more.iter().copied()).collect();
    workspace.run(&command)
}

/// Returns the report of a file, which a run would take.
fn report(workspace: &Workspace, file: &str, more: &[&str]) -> Value {
    let done = show(workspace, file, &[&["--json"], more].concat());
    assert_eq!(done.code, Some(0), "{file}: {}", done.stderr);
    done.json()
}

fn warning_ids(report: &Value) -> Vec<&str> {
    report["warnings"].as_array().unwrap().iter().map(|warning| warning["id"].as_str().unwrap()).collect()
}

/// Returns the tokens of lower-case letters.
fn letters(text: &str) -> Vec<i64> {
    text.bytes().map(|byte| i64::from(byte - b'a') + 2).collect()
}

#[test]
fn samples_have_the_tokens_and_labels_of_a_run() {
    let workspace = workspace();
    let messages = json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]});
    workspace.write("chat.jsonl", format!("{messages}\n"));
    let report = report(&workspace, "chat.jsonl", &["--show", "3"]);
    let prompt = [
        vec![BEGIN],
        letters("user"),
        vec![LINE_END],
        letters("hi"),
        vec![END, LINE_END, BEGIN],
        letters("assistant"),
        vec![LINE_END],
    ]
    .concat();
    let answer = [letters("yo"), vec![END]].concat();
    let ids = [prompt.clone(), answer.clone(), vec![LINE_END]].concat();
    let labels = [vec![-100; prompt.len()], answer, vec![-100]].concat();
    let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n";
    assert_eq!(report["samples"], json!([{"input_ids": ids, "labels": labels, "text": text}]));
    assert_eq!(report["format"], "messages");
    assert_eq!((&report["documents"], &report["tokens"]), (&json!(1), &json!(ids.len())));
    assert_eq!(report["labelled_tokens"], 3);
    assert_eq!(report["longest"], json!({"tokens": ids.len(), "file": workspace.path("chat.jsonl"), "record": 1}));
    assert_eq!(warning_ids(&report), [""; 0], "{}", report["warnings"]);
}

#[test]
fn example_files_have_reports_that_agree_with_their_samples() {
    let workspace = workspace();
    for (name, format, documents) in [
        ("messages.jsonl", "messages", Value::Null),
        ("sharegpt.json", "sharegpt", Value::Null),
        ("alpaca.json", "alpaca", Value::Null),
        ("prompt-completion.csv", "prompt_completion", json!(36)),
        ("tokens.jsonl", "tokens", json!(36)),
        ("text.txt", "text", json!(1)),
    ] {
        let report = report(&workspace, &example(name), &["--show", "1000"]);
        assert_eq!(report["format"], format, "{name}");
        assert!(documents.is_null() || report["documents"] == documents, "{name}: {}", report["documents"]);
        let samples = report["samples"].as_array().unwrap();
        assert_eq!(report["documents"], samples.len(), "{name}");
        let length = |sample: &Value| sample["input_ids"].as_array().unwrap().len();
        assert_eq!(report["tokens"], samples.iter().map(length).sum::<usize>(), "{name}");
        assert_eq!(report["longest"]["tokens"], samples.iter().map(length).max().unwrap(), "{name}");
        assert_eq!(report["longest"]["record"].is_null(), name == "text.txt", "{name}");
        let labelled = |sample: &Value| {
            let labels = sample["labels"].as_array().unwrap();
            assert_eq!(labels.len(), length(sample), "{name}");
            labels[1..].iter().filter(|label| **label != -100).count()
        };
        assert_eq!(report["labelled_tokens"], samples.iter().map(labelled).sum::<usize>(), "{name}");
        assert!(samples.iter().all(|sample| sample["text"].is_string()), "{name}");
        assert_eq!(report["eval"]["documents"], 24, "{name}");
    }
    let without_samples = report(&workspace, &example("text.txt"), &[]);
    assert_eq!(without_samples["samples"], json!([]));
}

#[test]
fn people_get_figures_plot_and_masked_samples() {
    let workspace = workspace();
    let done = show(&workspace, &example("messages.jsonl"), &["--show", "1", "--sequence", "64"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    for words in [
        "format            messages\n",
        "evaluation data   24 documents, ",
        "document length",
        "sample 1: ",
        "[[<|im_start|>",
    ] {
        assert!(done.stdout.contains(words), "{words}: {}", done.stdout);
    }
    assert!(!done.stdout.contains("sample 2") && !done.stdout.contains('\u{1b}'), "{}", done.stdout);
    // The run finds the tokens cached, and opens no device now.
    assert!(!workspace.path("run").exists());
    assert!(!workspace.file_names("cache/tokens").is_empty());
}

#[test]
fn data_without_a_label_are_refused_like_by_a_run() {
    let workspace = workspace();
    let line = json!({"input_ids": [2, 3, 4], "labels": [-100, -100, -100]});
    workspace.write("masked.jsonl", format!("{line}\n{line}\n"));
    let done = show(&workspace, "masked.jsonl", &["--json"]);
    let report = done.json();
    assert_eq!(warning_ids(&report), ["nothing-labelled"]);
    assert_eq!((&report["documents"], &report["skipped_documents"]), (&json!(0), &json!(2)));
    assert!(report["longest"].is_null() && report["padding_share"].is_null());
    let refusal = done.refusal(2);
    assert!(refusal.contains("masked.jsonl (2 documents)"), "{refusal}");
    let train = ["train", "run.toml", "--set", "data.train=masked.jsonl"];
    assert_eq!(workspace.expect_refusal(2, &train), refusal);
}

#[test]
fn long_documents_are_refused_after_the_report() {
    let workspace = workspace();
    let settings = ["--json", "--set", "data.long=refuse", "--sequence", "8"];
    let done = show(&workspace, &example("text.jsonl"), &settings);
    let report = done.json();
    assert!(warning_ids(&report).contains(&"refused-documents"), "{}", report["warnings"]);
    assert!(report["long_documents"].as_u64().unwrap() > 0);
    assert!(done.refusal(2).contains("does not fit in a row of 8 positions"));
}

#[test]
fn built_in_example_is_shown_without_a_run_folder() {
    let workspace = workspace();
    let done = workspace.succeed(&["data", "--json", "--show", "1"]);
    assert_eq!(done.json()["format"], "tokens");
    assert!(!workspace.path("runs").exists());
}
