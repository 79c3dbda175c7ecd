//! Tokenizers of several kinds for the tiny models, and lies that their parts may tell.

use super::super::case::Rng;
use plimsoll_program::models::ModelType;
use serde_json::{Map, Value, json};

/// Number of tokens of each model. No tokenizer has more.
pub const VOCAB: u64 = 320;

/// Words of the texts. Some are tokens of their own.
pub const WORDS: [&str; 10] = ["sea", "ship", "sails", "hull", "the", "over", "wind", "port", "a", "line"];

/// Returns `tokenizer.json` for a model of this family: each family has another kind of tokenizer.
pub fn tokenizer(family: ModelType) -> Value {
    match family {
        ModelType::Llama | ModelType::Phi3 | ModelType::Gemma2 | ModelType::Gemma3Text => byte_fallback(),
        ModelType::Mistral | ModelType::Ministral3 => unigram(),
        ModelType::Qwen2 | ModelType::SmolLm3 | ModelType::Granite | ModelType::Olmo2 | ModelType::Olmo3 => {
            byte_level()
        }
        ModelType::Qwen3 => word_pieces(),
    }
}

/// Returns a tokenizer with this model and these parts. The token `<end>` has the number 0, `<unk>` the number 1.
fn assembled(model: Value, parts: Value) -> Value {
    let mut all = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<end>"), special(1, "<unk>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
    });
    for (name, part) in parts.as_object().into_iter().flatten() {
        all[name] = part.clone();
    }
    all["model"] = model;
    all
}

/// Returns the entry of a special token.
fn special(id: u32, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    })
}

/// Numbers the tokens in order.
fn vocabulary(tokens: impl Iterator<Item = String>) -> Map<String, Value> {
    let mut vocabulary = Map::new();
    for token in ["<end>", "<unk>"].map(str::to_owned).into_iter().chain(tokens) {
        let id = vocabulary.len();
        vocabulary.entry(token).or_insert(id.into());
    }
    vocabulary
}

fn letters() -> impl Iterator<Item = String> {
    ('a'..='z').map(String::from)
}

/// Returns merges of letters that yield the first two letters of some words, and the tokens that they yield.
fn merges() -> (Vec<Value>, Vec<String>) {
    let pairs = [("t", "h"), ("th", "e"), ("s", "h"), ("s", "e"), ("se", "a"), ("o", "v"), ("l", "i")];
    let merged = pairs.map(|(left, right)| format!("{left}{right}"));
    (pairs.map(|(left, right)| json!([left, right])).to_vec(), merged.to_vec())
}

/// Returns a tokenizer as that of Llama 2: BPE with tokens for bytes, and a mark for blanks.
fn byte_fallback() -> Value {
    let (merges, merged) = merges();
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let vocab = vocabulary(bytes.chain(["▁".to_owned()]).chain(letters()).chain(merged));
    assembled(
        json!({
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        }),
        json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ]},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<unk>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<unk>": {"id": "<unk>", "ids": [1], "tokens": ["<unk>"]}},
            },
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
        }),
    )
}

/// Returns a tokenizer as that of Qwen 2: BPE over bytes, after a split by a pattern.
fn byte_level() -> Value {
    let (merges, merged) = merges();
    let vocab = vocabulary(byte_characters().into_iter().map(String::from).chain(merged));
    let pattern = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assembled(
        json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        }),
        json!({
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            ]},
            "post_processor": {
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
            },
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        }),
    )
}

/// Returns the characters that stand for the bytes 0 to 255 in tokenizers over bytes.
fn byte_characters() -> Vec<char> {
    let mut further = 256..;
    let shown = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let code = |byte: u32| if shown(byte) { Some(byte) } else { further.next() };
    (0..256).filter_map(code).filter_map(char::from_u32).collect()
}

/// Returns a tokenizer as those of SentencePiece: pieces with scores.
fn unigram() -> Value {
    let words = WORDS.map(|word| format!("▁{word}"));
    let vocab: Vec<Value> = vocabulary(["▁".to_owned()].into_iter().chain(letters()).chain(words))
        .into_iter()
        .enumerate()
        .map(|(id, (piece, _))| json!([piece, -(id as f64) / 8.0]))
        .collect();
    assembled(
        json!({"type": "Unigram", "unk_id": 1, "vocab": vocab, "byte_fallback": false}),
        json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            ]},
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        }),
    )
}

/// Returns a tokenizer as that of BERT: words, and pieces that continue them.
fn word_pieces() -> Value {
    let continued = letters().map(|letter| format!("##{letter}"));
    let vocab = vocabulary(letters().chain(continued).chain(WORDS.map(str::to_owned)));
    assembled(
        json!({
            "type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        }),
        json!({
            "normalizer": {
                "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                "lowercase": true,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        }),
    )
}

/// Text that stands for many letters in [`LIES`].
const BOMB: &str = "BOMB";
/// Number of letters for which [`BOMB`] stands.
const BOMB_LETTERS: usize = 100_000;

/// A part of `tokenizer.json` as a JSON pointer, and the JSON text that replaces it.
const LIES: &[(&str, &str)] = &[
    ("/normalizer", r#"{"type":"Replace","pattern":{"String":""},"content":"XX"}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"Regex":""},"content":"XX"}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"Regex":"(a+)+$"},"content":"b"}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"Regex":"(?=.*x)"},"content":"b"}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"Regex":"((((x{99}){99}){99}){99})"},"content":""}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"Regex":"(["},"content":""}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"String":"e"},"content":"BOMB"}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"Regex":"."},"content":"BOMB"}"#),
    ("/normalizer", r#"{"type":"Replace","pattern":{"Regex":"."},"content":""}"#),
    ("/normalizer", r#"{"type":"Prepend","prepend":"BOMB"}"#),
    ("/normalizer", r#"{"type":"Prepend","prepend":""}"#),
    ("/normalizer", r#"{"type":"Precompiled","precompiled_charsmap":"AAAA"}"#),
    ("/normalizer", r#"{"type":"Precompiled","precompiled_charsmap":""}"#),
    ("/normalizer", r#"{"type":"Precompiled","precompiled_charsmap":"BAAAAP////8AYQBiAGM="}"#),
    ("/normalizer", r#"{"type":"Precompiled","precompiled_charsmap":"/////////////w=="}"#),
    ("/normalizer", r#"{"type":"Precompiled","precompiled_charsmap":"BAAAAAEAAIBhAGIA"}"#),
    ("/normalizer", r#"{"type":"Sequence","normalizers":[]}"#),
    ("/normalizer", r#"{"type":"Strip","strip_left":true,"strip_right":true}"#),
    ("/normalizer", r#"{"type":"NFKD"}"#),
    ("/normalizer", r#"{"type":"StripAccents"}"#),
    ("/normalizer", r#"{"type":"Nmt"}"#),
    ("/normalizer", r#"{"type":"ByteLevel"}"#),
    (
        "/normalizer",
        r#"{"type":"Sequence","normalizers":[{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"},{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"},{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"},{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"},{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"},{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaaaa"}]}"#,
    ),
    ("/pre_tokenizer", r#"{"type":"Split","pattern":{"String":""},"behavior":"Isolated","invert":false}"#),
    ("/pre_tokenizer", r#"{"type":"Split","pattern":{"Regex":""},"behavior":"Removed","invert":true}"#),
    ("/pre_tokenizer", r#"{"type":"Split","pattern":{"Regex":"(a|a)*b|."},"behavior":"Isolated","invert":false}"#),
    ("/pre_tokenizer", r#"{"type":"Split","pattern":{"Regex":"(.*)*\\1x"},"behavior":"Isolated","invert":false}"#),
    ("/pre_tokenizer", r#"{"type":"Split","pattern":{"Regex":"."},"behavior":"Removed","invert":false}"#),
    ("/pre_tokenizer", r#"{"type":"Split","pattern":{"Regex":"."},"behavior":"MergedWithNext","invert":false}"#),
    ("/pre_tokenizer", r#"{"type":"Split","pattern":{"Regex":"(?<=x"},"behavior":"Isolated","invert":false}"#),
    ("/pre_tokenizer", r#"{"type":"Metaspace","replacement":"xy","prepend_scheme":"always","split":true}"#),
    ("/pre_tokenizer", r#"{"type":"Metaspace","replacement":"","prepend_scheme":"never","split":true}"#),
    ("/pre_tokenizer", r#"{"type":"CharDelimiterSplit","delimiter":"e"}"#),
    ("/pre_tokenizer", r#"{"type":"Digits","individual_digits":true}"#),
    ("/pre_tokenizer", r#"{"type":"UnicodeScripts"}"#),
    ("/pre_tokenizer", r#"{"type":"FixedLength","length":0}"#),
    ("/pre_tokenizer", r#"{"type":"FixedLength","length":18446744073709551615}"#),
    ("/pre_tokenizer", r#"{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#),
    ("/pre_tokenizer", r#"{"type":"WhitespaceSplit"}"#),
    (
        "/post_processor",
        r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"Z","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{}}"#,
    ),
    ("/post_processor", r#"{"type":"TemplateProcessing","single":[],"pair":[],"special_tokens":{}}"#),
    (
        "/post_processor",
        r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"Z","type_id":4294967295}},{"Sequence":{"id":"B","type_id":0}}],"pair":[],"special_tokens":{"Z":{"id":"Z","ids":[4294967295],"tokens":["Z"]}}}"#,
    ),
    (
        "/post_processor",
        r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"Z","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"Z":{"id":"Z","ids":[],"tokens":[]}}}"#,
    ),
    (
        "/post_processor",
        r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"Z","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"Z":{"id":"Z","ids":[1,2,3],"tokens":["a"]}}}"#,
    ),
    (
        "/post_processor",
        r#"{"type":"TemplateProcessing","single":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{}}"#,
    ),
    ("/post_processor", r#"{"type":"BertProcessing","sep":["x",99999],"cls":["y",4294967295]}"#),
    (
        "/post_processor",
        r#"{"type":"RobertaProcessing","sep":["x",0],"cls":["y",0],"trim_offsets":true,"add_prefix_space":true}"#,
    ),
    ("/decoder", r#"{"type":"Strip","content":" ","start":18446744073709551615,"stop":18446744073709551615}"#),
    ("/decoder", r#"{"type":"Strip","content":" ","start":1,"stop":99}"#),
    ("/decoder", r#"{"type":"CTC","pad_token":"","word_delimiter_token":"","cleanup":true}"#),
    ("/decoder", r#"{"type":"BPEDecoder","suffix":""}"#),
    ("/decoder", r#"{"type":"ByteFallback"}"#),
    ("/decoder", r#"{"type":"Replace","pattern":{"String":""},"content":"BOMB"}"#),
    ("/decoder", r#"{"type":"Replace","pattern":{"Regex":"(a+)+$"},"content":"BOMB"}"#),
    ("/decoder", r#"{"type":"WordPiece","prefix":"","cleanup":true}"#),
    ("/decoder", r#"{"type":"Sequence","decoders":[]}"#),
    ("/decoder", "null"),
    ("/truncation", r#"{"direction":"Right","max_length":0,"strategy":"LongestFirst","stride":0}"#),
    ("/truncation", r#"{"direction":"Left","max_length":2,"strategy":"OnlySecond","stride":5}"#),
    (
        "/truncation",
        r#"{"direction":"Right","max_length":18446744073709551615,"strategy":"OnlyFirst","stride":18446744073709551615}"#,
    ),
    (
        "/padding",
        r#"{"strategy":"BatchLongest","direction":"Right","pad_to_multiple_of":0,"pad_id":0,"pad_type_id":0,"pad_token":""}"#,
    ),
    (
        "/padding",
        r#"{"strategy":{"Fixed":4611686018427387904},"direction":"Left","pad_to_multiple_of":7,"pad_id":4294967295,"pad_type_id":0,"pad_token":"x"}"#,
    ),
    (
        "/padding",
        r#"{"strategy":{"Fixed":64},"direction":"Left","pad_to_multiple_of":9223372036854775807,"pad_id":0,"pad_type_id":0,"pad_token":"x"}"#,
    ),
    (
        "/added_tokens/0",
        r#"{"id":0,"content":"","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}"#,
    ),
    (
        "/added_tokens/0",
        r#"{"id":4294967295,"content":"<end>","single_word":false,"lstrip":true,"rstrip":true,"normalized":true,"special":true}"#,
    ),
    (
        "/added_tokens/1",
        r#"{"id":9999999,"content":"<far>","single_word":true,"lstrip":true,"rstrip":true,"normalized":true,"special":false}"#,
    ),
    (
        "/added_tokens/1",
        r#"{"id":0,"content":" ","single_word":true,"lstrip":true,"rstrip":true,"normalized":true,"special":false}"#,
    ),
    (
        "/added_tokens/1",
        r#"{"id":1,"content":"\u001b]0;x\u0007","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}"#,
    ),
    ("/added_tokens", "[]"),
    ("/model/unk_token", "\"<absent>\""),
    ("/model/unk_token", "null"),
    ("/model/unk_id", "999999"),
    ("/model/unk_id", "null"),
    ("/model/dropout", "0.5"),
    ("/model/dropout", "1.0"),
    ("/model/dropout", "-1.0"),
    ("/model/dropout", "1e30"),
    ("/model/byte_fallback", "true"),
    ("/model/fuse_unk", "true"),
    ("/model/ignore_merges", "true"),
    ("/model/continuing_subword_prefix", "\"##\""),
    ("/model/continuing_subword_prefix", "\"BOMB\""),
    ("/model/end_of_word_suffix", "\"</w>\""),
    ("/model/max_input_chars_per_word", "0"),
    ("/model/max_input_chars_per_word", "18446744073709551615"),
    ("/model/merges", r#"[["a","absent"]]"#),
    ("/model/merges", r#"["a b c"]"#),
    ("/model/merges", r#"[["",""]]"#),
    ("/model/merges", r#"[["e","a"],["e","a"]]"#),
    ("/model/merges/0", r#"["a"]"#),
    ("/model/vocab", "{}"),
    ("/model/vocab", "[]"),
    ("/model/vocab", r#"{"a":0,"b":0,"<end>":0,"<unk>":0}"#),
    ("/model/vocab", r#"{"a":4294967295,"<end>":0,"<unk>":1}"#),
    ("/model/vocab/3", r#"["x",NaN]"#),
    ("/model/vocab/3", r#"["x",1e308]"#),
    ("/model/vocab/3", r#"["x",-1e308]"#),
    ("/model/vocab/3", r#"["",0.0]"#),
    ("/model/vocab/3", r#"["BOMB",0.0]"#),
    ("/model/vocab/a", "4294967296"),
    ("/model/vocab/a", "-1"),
    ("/model/vocab/a", "319"),
    ("/model/vocab/a", "320"),
    ("/model/type", "\"Unigram\""),
    ("/model/type", "\"WordLevel\""),
    ("/model/type", "\"WordPiece\""),
    ("/model/type", "\"BPE\""),
    ("/model/type", "\"None\""),
    ("/version", "\"9.9\""),
];

/// Puts one lie into `tokenizer.json`. Returns the text of the file and a description; `None` if this tokenizer has no
/// such part.
pub fn lie(text: &str, rng: &mut Rng) -> Option<(String, String)> {
    const MARK: &str = "@LIE@";
    let mut whole: Value = serde_json::from_str(text).ok()?;
    let (pointer, lie) = rng.pick(LIES);
    let place = match whole.pointer_mut(pointer) {
        Some(place) => place,
        None => {
            let (parent, key) = pointer.rsplit_once('/')?;
            whole.pointer_mut(parent)?.as_object_mut()?.entry(key).or_insert(Value::Null)
        }
    };
    *place = MARK.into();
    let described = lie.chars().take(160).collect::<String>();
    let lie = lie.replace(BOMB, &"e".repeat(BOMB_LETTERS));
    Some((whole.to_string().replace(&format!("\"{MARK}\""), &lie), format!("{pointer} is {described}")))
}
