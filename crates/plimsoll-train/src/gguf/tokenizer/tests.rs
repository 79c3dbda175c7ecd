use super::*;
use plimsoll_core::Failure;
use serde_json::json;
use std::fs;

/// Returns an added token.
fn added(id: u32, content: &str, special: bool, lstrip: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": false, "normalized": false,
        "special": special,
    })
}

/// Returns a byte-level tokenizer with the tokens `a`, `b`, `ab`, and special tokens with the ids 3 and 4.
fn byte_level() -> Value {
    json!({
        "added_tokens": [
            added(3, "<s>", true, false),
            added(4, "<end>", true, false),
            added(6, "<tool>", false, true),
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3, "<end>": 4}, "merges": ["a b"]},
    })
}

/// Returns a tokenizer with byte fallback: bytes from id 3 on, then `▁`, `a`, `b`, `ab`, `▁ab`.
fn sentencepiece() -> Value {
    let mut vocab: HashMap<String, u32> = (0..256).map(|byte| (byte_token(byte), byte + 3)).collect();
    vocab.extend(["<unk>", "<s>", "</s>"].into_iter().zip(0..).map(|(token, id)| (token.to_owned(), id)));
    vocab.extend(["▁", "a", "b", "ab", "▁ab"].into_iter().zip(259..).map(|(token, id)| (token.to_owned(), id)));
    json!({
        "added_tokens": [
            added(0, "<unk>", true, false),
            added(1, "<s>", true, false),
            added(2, "</s>", true, false),
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE", "vocab": vocab, "merges": ["a b", "▁ ab"], "byte_fallback": true, "unk_token": "<unk>",
            "fuse_unk": true,
        },
    })
}

/// Expresses a tokenizer beside a `tokenizer_config.json`, for a model with these end tokens.
fn express(tokenizer: &Value, config: &Value, vocab: u64, end_tokens: &[i64]) -> Result<ExpressedTokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let request = TokenizerRequest { vocab, end_tokens, pre: None, template: None };
    let expressed = TokenizerFolder::open(folder.path()).and_then(|folder| folder.express(&request));
    expressed.map_err(|error| Failure::from(error).to_string().replace(&*folder.path().display().to_string(), "DIR"))
}

fn text(texts: &[&str]) -> MetadataValue {
    MetadataValue::Strings(texts.iter().map(|text| (*text).to_owned()).collect())
}

#[test]
fn byte_level_tokenizer_has_all_keys() {
    let config = json!({"eos_token": "<end>", "bos_token": "<s>", "chat_template": "{{ messages }}"});
    let expressed = express(&byte_level(), &config, 8, &[4, 3]).unwrap();
    assert_eq!((expressed.kind, &*expressed.pre), ("gpt2", "gpt-2"));
    let get = |key: &str| expressed.metadata.get(&format!("tokenizer.ggml.{key}")).cloned();
    assert_eq!(get("tokens").unwrap(), text(&["a", "b", "ab", "<s>", "<end>", "[PAD5]", "<tool>", "[PAD7]"]));
    assert_eq!(get("token_type").unwrap(), MetadataValue::I32s(vec![1, 1, 1, 3, 3, 5, 4, 5]));
    assert_eq!(get("merges").unwrap(), text(&["a b"]));
    let number = |key: &str| match get(key) {
        Some(MetadataValue::U32(number)) => Some(number),
        _ => None,
    };
    assert_eq!((number("bos_token_id"), number("eos_token_id"), number("eot_token_id")), (Some(3), Some(4), Some(3)));
    assert_eq!(get("add_bos_token"), Some(MetadataValue::Bool(false)));
    assert_eq!(expressed.metadata.get("tokenizer.chat_template"), Some(&"{{ messages }}".into()));
    assert_eq!(expressed.notes.len(), 1, "{:?}", expressed.notes);
    assert!(expressed.notes[0].contains("`<tool>`"), "{:?}", expressed.notes);
}

#[test]
fn byte_fallback_tokenizer_has_scores_of_merges() {
    let expressed = express(&sentencepiece(), &json!({"eos_token": "</s>"}), 264, &[2]).unwrap();
    assert_eq!((expressed.kind, &*expressed.pre), ("llama", "default"));
    let get = |key: &str| expressed.metadata.get(&format!("tokenizer.ggml.{key}")).cloned();
    let Some(MetadataValue::F32s(scores)) = get("scores") else { panic!() };
    assert_eq!(scores[259..], [-3.0, -3.0, -3.0, 0.0, -1.0]);
    let Some(MetadataValue::I32s(kinds)) = get("token_type") else { panic!() };
    assert_eq!((&kinds[..4], kinds[258], kinds[262]), (&[2, 3, 3, 6][..], 6, 1));
    assert_eq!(get("add_space_prefix"), Some(MetadataValue::Bool(true)));
    assert_eq!(get("add_bos_token"), Some(MetadataValue::Bool(true)));
    assert_eq!(get("unknown_token_id"), Some(MetadataValue::U32(0)));
    assert_eq!(get("merges"), None);
}

#[test]
fn split_at_replaced_spaces_has_no_effect() {
    let mut gemma = sentencepiece();
    gemma["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    gemma["pre_tokenizer"] =
        json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    let expressed = express(&gemma, &json!({"eos_token": "</s>"}), 264, &[2]).unwrap();
    let prefix = expressed.metadata.get("tokenizer.ggml.add_space_prefix");
    assert_eq!((expressed.kind, prefix), ("llama", Some(&MetadataValue::Bool(false))));
    let mut inverted = gemma.clone();
    inverted["pre_tokenizer"]["invert"] = true.into();
    gemma["normalizer"] = Value::Null;
    for tokenizer in [gemma, inverted] {
        let refusal = express(&tokenizer, &json!({"eos_token": "</s>"}), 264, &[2]).err().unwrap();
        assert!(refusal.contains("the pre-tokenizer {") && refusal.contains("has no form in GGUF"), "{refusal}");
    }
}

#[test]
fn parts_without_a_form_are_refused_by_name() {
    let with = |base: Value, pointer: &str, value: Value| {
        let mut tokenizer = base;
        *tokenizer.pointer_mut(pointer).unwrap() = value;
        tokenizer
    };
    let affixed = with(byte_level(), "/model", {
        let mut model = byte_level()["model"].clone();
        model["end_of_word_suffix"] = "</w>".into();
        model
    });
    let mut nfkc = byte_level();
    nfkc["normalizer"] = json!({"type": "NFKC"});
    let words = with(byte_level(), "/pre_tokenizer", json!({"type": "Whitespace"}));
    let spaced = with(byte_level(), "/pre_tokenizer/add_prefix_space", true.into());
    let list = json!({"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
    let mut missing = sentencepiece();
    missing["model"]["vocab"].as_object_mut().unwrap().remove("<0x0A>");
    for (tokenizer, vocab, ends, says) in [
        (&nfkc, 8, &[4][..], "the normalizer {\"type\":\"NFKC\"} has no form in GGUF"),
        (&affixed, 8, &[4], "`end_of_word_suffix` is `</w>`, which has no form in GGUF"),
        (&words, 8, &[4], "it is neither a byte-level BPE (ByteLevel) nor a BPE with byte_fallback"),
        (&spaced, 8, &[4], "the pre-tokenizer is not known: {\"type\":\"ByteLevel\",\"add_prefix_space\":true"),
        (&list, 8, &[4], "the model is of type WordLevel, which is not supported; supported: BPE"),
        (&missing, 300, &[2], "`byte_fallback` is true, but the token `<0x0A>` is missing"),
        (&byte_level(), 6, &[4], "it has a token with id 6, but the model's vocabulary has 6 tokens"),
        (&byte_level(), 8, &[], "the model has no end token"),
    ] {
        let refusal = express(tokenizer, &json!({}), vocab, ends).err().unwrap_or_default();
        assert!(refusal.contains(says) && refusal.contains("DIR/tokenizer.json"), "{says}: {refusal}");
    }
    let refusal = express(&spaced, &json!({}), 8, &[4]).err().unwrap();
    assert!(refusal.contains("--pre llama-bpe"), "{refusal}");
}
