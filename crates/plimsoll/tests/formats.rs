//! Runs on the files of `examples/data`: each format and container, recognized by the records.

use crate::common::{SMALL, Workspace};
use std::fs;
use std::path::PathBuf;

/// Each file of `examples/data` with the beginning of what a run says about it.
const EXAMPLES: [(&str, &str); 16] = [
    ("alpaca.json", "train: alpaca, 44 documents, "),
    ("alpaca.tsv", "train: alpaca, 44 documents, "),
    ("messages-tools.json", "train: messages, 12 documents, "),
    ("messages.jsonl", "train: messages, 36 documents, "),
    ("messages.parquet", "train: messages, 36 documents, "),
    ("preference.jsonl", "train: preference, 36 pairs, "),
    ("prompt-completion-messages.jsonl", "train: prompt_completion, 8 documents, "),
    ("prompt-completion.csv", "train: prompt_completion, 36 documents, 454 tokens (143 labelled), "),
    ("prompt-completion.jsonl.gz", "train: prompt_completion, 36 documents, 454 tokens (143 labelled), "),
    ("prompt-completion.jsonl.zst", "train: prompt_completion, 36 documents, 454 tokens (143 labelled), "),
    ("sharegpt.json", "train: sharegpt, 8 documents, "),
    ("text.csv", "train: text, 36 documents, "),
    ("text.jsonl", "train: text, 36 documents, "),
    ("text.txt", "train: text, 1 document, "),
    ("tokens.jsonl", "train: tokens, 36 documents, 238 tokens (71 labelled), "),
    ("tokens.parquet", "train: tokens, 36 documents, 238 tokens (71 labelled), "),
];

/// Returns the path of an example file.
fn example(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data")).join(name)
}

#[test]
fn every_example_file_trains() {
    let mut names: Vec<String> =
        fs::read_dir(example("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "make.py");
    names.sort();
    assert_eq!(names, EXAMPLES.map(|(name, _)| name));
    let workspace = Workspace::new(&SMALL);
    for (name, words) in EXAMPLES {
        let (train, run) = (format!("data.train={}", example(name).display()), format!("run.dir=run-{name}"));
        let settings = [
            &*train,
            &run,
            "data.eval=[]",
            "data.format=auto",
            "data.template=qwen",
            "train.steps=1",
            "train.eval_every=0",
        ];
        let objective = name.starts_with("preference").then_some("train.objective=dpo");
        let settings = settings.into_iter().chain(objective).flat_map(|setting| ["--set", setting]);
        let command: Vec<&str> = ["train", "run.toml", "--no-save"].into_iter().chain(settings).collect();
        let done = workspace.succeed(&command);
        assert!(done.stdout.contains(words), "{name}: {}", done.stdout);
    }
}

#[test]
fn conversations_without_a_template_are_refused() {
    let workspace = Workspace::new(&SMALL);
    let train = format!("data.train={}", example("messages.jsonl").display());
    let message = workspace.expect_refusal(2, &["train", "run.toml", "--set", &train, "--set", "data.format=auto"]);
    assert!(message.contains("has no chat template\n  hint: name a file or a built-in template"), "{message}");
}

#[test]
fn data_with_two_meanings_are_refused_until_a_format_is_named() {
    let workspace = Workspace::new(&SMALL);
    workspace.write("both.json", "[{\"text\": \"abcd\", \"prompt\": \"ab\", \"completion\": \"cd\"}]");
    workspace.write("mixed.csv", "text,prompt,completion\nabcd,,\n");
    workspace.write("mixed.jsonl", "{\"text\": \"abcd\"}\n{\"input_ids\": [1, 2]}\n");
    let train = |file: &str, format: &str| -> Vec<String> {
        let settings = [
            format!("data.train={file}"),
            "data.eval=[]".to_owned(),
            format!("data.format={format}"),
            format!("run.dir=run-{format}"),
            "train.steps=1".to_owned(),
        ];
        let settings = settings.into_iter().flat_map(|setting| ["--set".to_owned(), setting]);
        ["train", "run.toml", "--no-save"].map(str::to_owned).into_iter().chain(settings).collect()
    };
    for (file, words) in [
        (
            "both.json",
            "both.json, record 1: the record fits two formats, text and prompt_completion\n  hint: name one of them: data.format = \"text\" or \"prompt_completion\"",
        ),
        ("mixed.csv", "mixed.csv, record 1: the record fits two formats, text and prompt_completion"),
        ("mixed.jsonl", "mixed.jsonl:2: the format of the record is tokens, that of the records before it is text"),
    ] {
        let command = train(file, "auto");
        let message = workspace.expect_refusal(2, &command.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(message.contains(words), "{message}");
    }
    for format in ["text", "prompt_completion"] {
        let command = train("both.json", format);
        let done = workspace.succeed(&command.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(done.stdout.contains(&format!("train: {format}, 1 document, ")), "{}", done.stdout);
    }
}
