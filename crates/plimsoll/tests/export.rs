//! `plimsoll export`: a trained run as a GGUF file, with and without adapters, and what it refuses.

use crate::common::{SMALL, Shape, VOCAB, Workspace};
use serde_json::{Value, json};
use std::fs;

/// Returns a tokenizer on bytes: `<end>`, `<s>`, 26 letters, and two merges.
fn byte_level() -> Value {
    let letters = (b'a'..=b'z').map(|letter| char::from(letter).to_string());
    let tokens = ["<end>", "<s>"].into_iter().map(str::to_owned).chain(letters).chain(["ab", "abc"].map(str::to_owned));
    let vocab: serde_json::Map<String, Value> = tokens.zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special(0, "<end>"), special(1, "<s>")],
        "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": ["a b", "ab c"],
        },
    })
}

/// Returns a workspace with a trained model in `run`.
fn trained() -> Workspace {
    let workspace = Workspace::new(&Shape { steps: 2, ..SMALL });
    workspace.write("model/tokenizer.json", byte_level().to_string());
    workspace.write(
        "model/generation_config.json",
        json!({"eos_token_id": 0, "do_sample": true, "temperature": 0.7}).to_string(),
    );
    workspace.write("model/chat_template.jinja", "{{ messages[0].content }}");
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    workspace
}

#[test]
fn run_is_exported_with_modelfile_once() {
    let workspace = trained();
    let line = ["export", "run", "--gguf", "my.gguf", "--type", "Q8_0", "--modelfile", "Modelfile"];
    let exported = workspace.succeed(&[&line[..], &["--json", "--quiet"]].concat());
    assert_eq!(exported.stderr, "");
    let result = exported.json();
    for (key, value) in [
        ("file", json!("my.gguf")),
        ("file_type", json!("q8_0")),
        ("architecture", json!("llama")),
        ("tokenizer", json!("gpt2")),
        ("pre_tokenizer", json!("gpt-2")),
        ("modelfile", json!("Modelfile")),
        ("notes", json!([])),
    ] {
        assert_eq!(result[key], value, "{key}: {result}");
    }
    let file = fs::read(workspace.path("my.gguf")).unwrap();
    assert_eq!(result["bytes"], file.len());
    assert_eq!((&file[..4], &file[4..8]), (&b"GGUF"[..], &3u32.to_le_bytes()[..]));
    let text = String::from_utf8_lossy(&file);
    for part in
        ["general.name", "llama.context_length", "tokenizer.ggml.merges", "{{ messages[0].content }}", "[PAD31]"]
    {
        assert!(text.contains(part), "{part}");
    }
    assert_eq!(workspace.read("Modelfile"), "FROM ./my.gguf\nPARAMETER temperature 0.7\nPARAMETER stop \"<end>\"\n");
    // Neither output is replaced, and no temporary file is left.
    let refusal = workspace.expect_refusal(2, &line);
    assert!(refusal.contains("my.gguf already exists\n  hint: choose an output that"), "{refusal}");
    let refusal = workspace
        .expect_refusal(2, &["export", "run", "--gguf", "b.gguf", "--type", "f16", "--modelfile", "Modelfile"]);
    assert!(refusal.contains("Modelfile already exists"), "{refusal}");
    assert!(!workspace.file_names(".").iter().any(|name| name.contains("b.gguf") || name.ends_with(".partial")));
    assert_eq!(VOCAB, 32);
}

#[test]
fn merged_adapters_equal_merged_model() {
    let workspace = trained();
    let lora = ["--set", "model.path=run/model", "--set", "model.init=pretrained", "--set", "train.method=lora"];
    workspace.succeed(&[&["train", "run.toml", "--quiet", "--set", "run.dir=tuned"][..], &lora].concat());
    // The name of the folder becomes that of the model.
    fs::create_dir(workspace.path("merged")).unwrap();
    workspace.succeed(&["export", "run/model", "--adapter", "tuned/adapter", "--merged", "merged/tuned"]);
    for (name, model) in [("run", &["tuned"][..]), ("merged", &["merged/tuned"])] {
        let out = format!("{name}.gguf");
        workspace.succeed(&[&["export"][..], model, &["--gguf", &out, "--type", "bf16"]].concat());
    }
    workspace.succeed(&["export", "run/model", "--adapter", "tuned/adapter", "--gguf", "flag.gguf", "--type", "bf16"]);
    let bytes = |name: &str| fs::read(workspace.path(name)).unwrap();
    assert!(bytes("run.gguf") == bytes("merged.gguf"), "adapters of a run");
    // Only the name differs, here by the length of `tuned` and `model`, which is equal.
    let name = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).replacen("tuned", "model", 1);
    assert!(name(bytes("run.gguf")) == name(bytes("flag.gguf")), "--adapter");
    let refusal = workspace
        .expect_refusal(2, &["export", "tuned", "--adapter", "tuned/adapter", "--gguf", "c.gguf", "--type", "f32"]);
    assert!(refusal.contains("tuned has adapters of its own"), "{refusal}");
}

#[test]
fn merged_model_has_the_type_and_the_files_asked_for() {
    let workspace = trained();
    let line = ["export", "run", "--merged", "half", "--type", "bf16", "--shard-size", "4KiB", "--json", "--quiet"];
    let exported = workspace.succeed(&line).json();
    assert_eq!(exported["directory"], "half");
    let (full, half) = (workspace.file_names("run/model"), workspace.file_names("half"));
    assert!(half.iter().filter(|name| name.ends_with(".safetensors")).count() > 1, "{half:?}");
    assert!(half.iter().any(|name| name == "model.safetensors.index.json"));
    assert_eq!(
        half.iter().filter(|name| !name.starts_with("model")).collect::<Vec<_>>(),
        full.iter().filter(|name| !name.starts_with("model")).collect::<Vec<_>>()
    );
    let config = workspace.json("half/config.json");
    assert_eq!(config.get("dtype").or_else(|| config.get("torch_dtype")).unwrap(), "bfloat16");
    // A second conversion changes nothing, and a conversion back has the same loss.
    workspace.succeed(&["export", "half", "--merged", "back", "--type", "f32", "--quiet"]);
    let loss = |model: &str| {
        let line = ["eval", model, "--data", "eval.jsonl", "--format", "tokens", "--json"];
        workspace.succeed(&line).json()["loss"].as_f64().unwrap()
    };
    assert_eq!(loss("half"), loss("back"));
    let difference = (loss("half") / loss("run/model") - 1.0).abs();
    assert!(difference > 0.0 && difference < 1e-2, "{difference}");
    for (line, says) in [
        (&["export", "run", "--merged", "half"][..], "half already exists"),
        (&["export", "run", "--merged", "q", "--type", "q8_0"], "--type q8_0 is for GGUF files only"),
    ] {
        let refusal = workspace.expect_refusal(2, line);
        assert!(refusal.contains(says), "{line:?}: {refusal}");
    }
    for (line, says) in [
        (&["export", "run"][..], "--gguf <FILE>|--merged <DIR>"),
        (&["export", "run", "--gguf", "x.gguf"], "--type <TYPE>"),
    ] {
        let done = workspace.run(line);
        assert!(done.code == Some(2) && done.stderr.contains(says), "{line:?}: {}", done.stderr);
    }
}

#[test]
fn unusable_models_are_refused_before_writing() {
    let workspace = trained();
    let line = ["export", "run", "--gguf", "x.gguf", "--type", "q4_k_m"];
    for (file, content, says) in [
        (
            "tokenizer.json",
            crate::common::tokenizer(VOCAB).to_string(),
            "it is neither a byte-level BPE (ByteLevel) nor",
        ),
        (
            "tokenizer.json",
            byte_level().to_string().replace("\"use_regex\":true", "\"use_regex\":false"),
            "hint: if llama.cpp knows it, name it as there: --pre llama-bpe",
        ),
        (
            "tokenizer.json",
            byte_level().to_string().replace("\"abc\":29", "\"abc\":40"),
            "it has a token with id 40, but the model's vocabulary has 32 tokens",
        ),
        (
            "config.json",
            workspace.read("run/model/config.json").replace("\"model_type\": \"llama\"", "\"model_type\": \"gemma\""),
            "gemma",
        ),
    ] {
        let kept = workspace.read(&format!("run/model/{file}"));
        workspace.write(&format!("run/model/{file}"), content);
        let refusal = workspace.expect_refusal(2, &line);
        assert!(refusal.contains(says), "{says}: {refusal}");
        workspace.write(&format!("run/model/{file}"), kept);
    }
    let unknown = byte_level().to_string().replace("\"use_regex\":true", "\"use_regex\":false");
    workspace.write("run/model/tokenizer.json", unknown);
    let exported = workspace.succeed(&[&line[..], &["--pre", "qwen2", "--json"]].concat());
    assert_eq!(exported.json()["pre_tokenizer"], "qwen2");
    // Rows of 32 columns have no blocks of 256.
    assert!(exported.stderr.contains("instead of q4_k"), "{}", exported.stderr);
    fs::remove_file(workspace.path("run/model/tokenizer.json")).unwrap();
    let refusal = workspace.expect_refusal(2, &["export", "run", "--gguf", "y.gguf", "--type", "f32"]);
    assert!(refusal.contains("a GGUF file needs the tokenizer"), "{refusal}");
    let usage = workspace.run(&["export", "run", "--gguf", "y.gguf", "--type", "q3_k"]);
    assert!(usage.code == Some(2) && usage.stderr.contains("expected one of f32, bf16, f16, q8_0"), "{}", usage.stderr);
    assert!(!workspace.path("y.gguf").exists());
}

/// Returns a workspace with a trained model in `run`, and `model.gguf` of a type.
fn exported(file_type: &str) -> Workspace {
    let workspace = trained();
    workspace.succeed(&["export", "run", "--gguf", "model.gguf", "--type", file_type, "--quiet"]);
    workspace
}

#[test]
fn exported_model_is_read_back() {
    let workspace = exported("f32");
    workspace.succeed(&["export", "run", "--gguf", "blocks.gguf", "--type", "q8_0", "--quiet"]);
    let eval = |model: &str| {
        let line = ["eval", model, "--data", "eval.jsonl", "--format", "tokens", "--json"];
        workspace.succeed(&line).json()["loss"].as_f64().unwrap()
    };
    assert_eq!(eval("model.gguf"), eval("run/model"));
    let difference = (eval("blocks.gguf") / eval("run/model") - 1.0).abs();
    assert!(difference > 0.0 && difference < 1e-2, "{difference}");
    let generate = |model: &str| {
        let line = ["generate", model, "--prompt", "abcab", "--max-tokens", "12", "--temperature", "0", "--json"];
        workspace.succeed(&line).json()
    };
    assert_eq!(generate("model.gguf"), generate("run/model"));
    // A file that is read and written again is the same, apart from its name.
    workspace.succeed(&["export", "model.gguf", "--gguf", "again.gguf", "--type", "f32", "--quiet"]);
    let keys = |name: &str| fs::read(workspace.path(name)).unwrap();
    let at = |file: &[u8]| file.windows(5).position(|word| word == b"llama").unwrap();
    let (first, again) = (keys("model.gguf"), keys("again.gguf"));
    assert!(first.len().abs_diff(again.len()) < 64 && at(&first) > 0);
    // The weights are the base of adapters.
    let lora = ["--set", "model.path=blocks.gguf", "--set", "model.init=pretrained", "--set", "train.method=lora"];
    workspace.succeed(&[&["train", "run.toml", "--quiet", "--set", "run.dir=tuned"][..], &lora].concat());
    workspace.succeed(&["train", "--resume", "tuned", "--quiet"]);
    let tuned = workspace.json("tuned/adapter/adapter_config.json");
    assert!(tuned["base_model_name_or_path"].as_str().unwrap().ends_with("blocks.gguf"), "{tuned}");
}

#[test]
fn damaged_gguf_files_are_refused() {
    let workspace = exported("q8_0");
    let whole = fs::read(workspace.path("model.gguf")).unwrap();
    let eval = ["eval", "damaged.gguf", "--data", "eval.jsonl", "--format", "tokens"];
    let refusal = |bytes: &[u8]| {
        workspace.write("damaged.gguf", bytes);
        workspace.expect_refusal(2, &eval)
    };
    assert!(refusal(b"GGML").contains("damaged.gguf: no GGUF file: it does not begin with `GGUF`"));
    for length in [2, 23, 40, whole.len() / 2, whole.len() - 1] {
        let refusal = refusal(&whole[..length]);
        assert!(refusal.contains(": it is cut off or damaged\n  hint: download or write the file again"), "{refusal}");
    }
    // A number of keys, and a length of a text, that are beyond the file.
    for at in [16, 24] {
        let mut lying = whole.clone();
        lying[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        let refusal = refusal(&lying);
        assert!(refusal.contains("more than the file has: it is cut off or damaged"), "{refusal}");
    }
    let place = |text: &[u8]| whole.windows(text.len()).position(|part| part == text).unwrap();
    // The type of a tensor comes after its name, the number of sizes and the sizes.
    let mut other = whole.clone();
    let tensor = place(b"token_embd.weight") + 17 + 4 + 16;
    other[tensor] = 11;
    let refusal_of_type = refusal(&other);
    assert!(
        refusal_of_type.contains("tensor `token_embd.weight` is of type q3_k, which cannot be read"),
        "{refusal_of_type}"
    );
    for (text, instead, says) in [
        (&b"llama.block_count"[..], &b"llama.block_COUNT"[..], "`llama.block_count` is missing"),
        (b"output_norm.weight", b"output_NORM.weight", "tensor `output_norm.weight` is missing"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.TOKENS", "`tokenizer.ggml.tokens` is missing"),
    ] {
        let mut renamed = whole.clone();
        let at = place(text);
        renamed[at..at + text.len()].copy_from_slice(instead);
        let refusal = refusal(&renamed);
        assert!(refusal.contains(says), "{refusal}");
    }
}
