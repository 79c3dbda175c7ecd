//! The pages of `docs/journeys`: each command of a page runs, in order, with a tiny model in place of the named one.

use crate::common::{SMALL, Shape, Workspace, config};
use serde_json::{Map, Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Models that the pages name. Each is the tiny one, in a cache of the hub.
const MODELS: [&str; 3] =
    ["HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"];
/// Special tokens of the tiny model's tokenizer, after the 256 bytes.
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const BYTES: u32 = 256;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path).canonicalize().unwrap()
}

/// Returns a tokenizer with a token for each byte, written as in GPT-2, and the special tokens of chat models.
fn tokenizer() -> Value {
    let is_shown = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let (shown, hidden): (Vec<u32>, Vec<u32>) = (0..BYTES).partition(|byte| is_shown(*byte));
    let letters = shown.into_iter().chain((0..hidden.len() as u32).map(|place| 256 + place));
    let names = letters.map(|code| char::from_u32(code).unwrap().to_string());
    let vocab: Map<String, Value> = names.zip(0..).map(|(name, id)| (name, json!(id))).collect();
    let special = |(content, id): (&str, u32)| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        })
    };
    let added: Vec<Value> = SPECIAL.into_iter().zip(BYTES..).map(special).collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

/// Returns a workspace with the examples of the repository, and with the models in the hub's cache `hf/hub`.
fn workspace() -> Workspace {
    let workspace = Workspace::new(&Shape { steps: 1, ..SMALL });
    let mut model = config(SMALL.hidden);
    for (key, value) in [
        ("vocab_size", json!(BYTES + SPECIAL.len() as u32)),
        ("max_position_embeddings", json!(2048)),
        ("eos_token_id", json!(BYTES + 2)),
    ] {
        model[key] = value;
    }
    workspace.write("model/config.json", model.to_string());
    workspace.write("model/tokenizer.json", tokenizer().to_string());
    workspace.write("model/tokenizer_config.json", json!({"eos_token": "<|im_end|>"}).to_string());
    let turn = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
                {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
    workspace.write("model/chat_template.jinja", turn);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    for id in MODELS {
        let root = format!("hf/hub/models--{}", id.replace('/', "--"));
        let snapshot = format!("{root}/snapshots/{}", "0".repeat(40));
        fs::create_dir_all(workspace.path(&snapshot)).unwrap();
        fs::create_dir_all(workspace.path(&format!("{root}/refs"))).unwrap();
        workspace.write(&format!("{root}/refs/main"), "0".repeat(40));
        for name in workspace.file_names("run/model") {
            fs::copy(workspace.path(&format!("run/model/{name}")), workspace.path(&format!("{snapshot}/{name}")))
                .unwrap();
        }
    }
    symlink(repository("examples"), workspace.path("examples")).unwrap();
    workspace
}

/// Returns the fenced blocks of a page that begin with this line.
fn blocks<'a>(page: &'a str, fence: &str) -> Vec<&'a str> {
    let opened = page.split("\n```").enumerate().filter(|(number, _)| number % 2 == 1);
    opened.filter_map(|(_, block)| block.strip_prefix(fence)?.strip_prefix('\n')).collect()
}

/// Returns the words of a command line, in which only double quotes have a meaning.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('"').enumerate();
    let mut words = Vec::new();
    for (number, part) in parts {
        match number % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    words
}

/// Runs every command of a page, after it has compared the page's run file with the example.
fn follow(name: &str) {
    let page = fs::read_to_string(repository(&format!("docs/journeys/{name}.md"))).unwrap();
    let example = fs::read_to_string(repository(&format!("examples/{name}.toml"))).unwrap();
    assert_eq!(blocks(&page, "toml"), [example.trim_end()], "docs/journeys/{name}.md");
    let workspace = workspace();
    let lines: Vec<&str> = blocks(&page, "").into_iter().flat_map(str::lines).collect();
    assert!(lines.len() >= 4, "{lines:?}");
    for line in lines {
        let mut words = words(line);
        assert_eq!(words.remove(0), "plimsoll", "{line}");
        // Planning every preset would take minutes.
        let time: &[&str] = if words[0] == "models" { &["--time", "2"] } else { &[] };
        let args: Vec<&str> = words.iter().map(String::as_str).chain(time.iter().copied()).collect();
        let done = workspace.start_wrapped(&["env", "HF_HOME=hf", "HF_HUB_OFFLINE=1"], &args).wait();
        assert_eq!(done.code, Some(0), "{line}: {}", done.stderr);
    }
}

#[test]
fn every_page_is_followed() {
    let folder = fs::read_dir(repository("docs/journeys")).unwrap();
    let mut pages: Vec<String> = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    pages.sort();
    assert_eq!(pages, ["README.md", "chat.md", "preference.md", "table.md", "texts.md"], "each page has a test");
}

#[test]
fn chat_file_and_a_small_card() {
    follow("chat");
}

#[test]
fn pairs_of_answers_and_a_small_card() {
    follow("preference");
}

#[test]
fn table_and_no_gpu() {
    follow("table");
}

#[test]
fn texts_and_two_unequal_cards() {
    follow("texts");
}
