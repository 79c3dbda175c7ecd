//! The shorter way beside the crate `tokenizers`: the same tokens at the same places.

use super::super::placed_token::PlacedToken;
use super::*;
use proptest::prelude::*;
use serde_json::json;

/// Patterns of published tokenizers besides those of the fixture: GPT-4o, and the three of DeepSeek-V3, one after another.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// Returns the tokenizer of the fixture, in which words are split by `steps` before the byte-level step.
fn fixture(steps: &[Value]) -> Value {
    let fixture: Value = serde_json::from_str(include_str!("../../../tests/fixtures/word_patterns.json")).unwrap();
    let mut tokenizer = fixture["tokenizer"].clone();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    tokenizer["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": ([steps, &[byte_level]].concat()) });
    tokenizer
}

fn split(pattern: &str) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

fn added(id: u32, content: &str, normalized: bool) -> Value {
    json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": normalized, "special": true })
}

/// Returns the tokenizers that both ways are compared on, by name.
fn tokenizers() -> Vec<(&'static str, Value)> {
    let fixture_patterns: Value =
        serde_json::from_str(include_str!("../../../tests/fixtures/word_patterns.json")).unwrap();
    let pattern = |name: &str| split(fixture_patterns["patterns"][name].as_str().unwrap());
    let mut gpt2 = fixture(&[]);
    gpt2["pre_tokenizer"] =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    gpt2["post_processor"] =
        json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let mut llama3 = fixture(&[pattern("llama3")]);
    llama3["model"]["ignore_merges"] = json!(true);
    llama3["added_tokens"] =
        json!([added(500, "<|eot|>", false), added(501, "<|eot|><|end", false), added(502, "  ", true)]);
    llama3["post_processor"] = json!({ "type": "Sequence", "processors": [
        { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
    ] });
    let mut qwen = fixture(&[pattern("qwen2")]);
    qwen["normalizer"] = json!({ "type": "NFC" });
    qwen["added_tokens"] = json!([added(500, "<|eot|>", false)]);
    let digits = |single| json!({ "type": "Digits", "individual_digits": single });
    vec![
        ("gpt2", gpt2),
        ("llama3", llama3),
        ("qwen2", qwen),
        ("gpt4o", fixture(&[split(GPT4O)])),
        ("deepseek", fixture(&DEEPSEEK.map(split))),
        ("smollm", fixture(&[digits(true), pattern("gpt2")])),
        ("runs of digits", fixture(&[digits(false)])),
    ]
}

fn load(tokenizer: &Value) -> (Tokenizer, Option<WordTokenizer>) {
    let tokenizer = Tokenizer::from_bytes(tokenizer.to_string()).unwrap();
    let words = WordTokenizer::new(&tokenizer);
    (tokenizer, words)
}

/// Returns the tokens of the crate with their places.
fn reference(tokenizer: &Tokenizer, text: &str) -> Vec<PlacedToken> {
    let encoding = tokenizer.encode(text, false).unwrap();
    let words = encoding.get_word_ids();
    let places = encoding.get_ids().iter().zip(encoding.get_offsets()).enumerate();
    places
        .map(|(at, (&id, &(start, end)))| {
            let begins_word = at == 0 || words[at] != words[at - 1];
            PlacedToken { id, start: start as u32, end: end as u32, begins_word }
        })
        .collect()
}

/// Generates texts of pieces that patterns treat in ways of their own.
fn text() -> impl Strategy<Value = String> {
    let pieces = [
        " ",
        "  ",
        "   ",
        "\n",
        "\r\n",
        "\t",
        "\u{a0}",
        "\u{3000}",
        "\u{200b}",
        "\0",
        "\u{7f}",
        "\u{ad}",
        "the",
        "line",
        "ship",
        "Ship",
        "SHIP",
        "don't",
        "IT'S",
        "'ſ",
        "'re",
        "12",
        "1234567",
        "١٢",
        "²",
        "½",
        "Ⅷ",
        "日本語",
        "の",
        "größe",
        "é",
        "e\u{301}",
        "👩\u{200d}🚀",
        "Å",
        "...",
        "()",
        "/",
        "\\",
        "_",
        "<",
        "|",
        ">",
        "<|eot|>",
        "<|eot|><|end",
        "<|end",
        "İ",
        "ǅ",
        "ـ",
        "\u{301}",
        "q\u{323}\u{307}",
    ];
    let piece = prop_oneof![8 => prop::sample::select(pieces.to_vec()).prop_map(str::to_owned), 1 => any::<char>().prop_map(String::from)];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

#[test]
fn tokens_and_places_are_those_of_the_crate() {
    let tokenizers = tokenizers().into_iter().map(|(name, tokenizer)| (name, load(&tokenizer))).collect::<Vec<_>>();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(1500));
    let other_ways = std::cell::Cell::new(0);
    runner
        .run(&text(), |text| {
            for (name, (tokenizer, words)) in &tokenizers {
                let words = words.as_ref().unwrap_or_else(|| panic!("{name} has no shorter way"));
                let expected = reference(tokenizer, &text);
                match words.encode_placed(tokenizer, &text).unwrap() {
                    Some(tokens) => prop_assert_eq!(tokens, expected.clone(), "{} on {:?}", name, text),
                    None => {
                        prop_assert_eq!(*name, "qwen2", "only NFC changes texts");
                        other_ways.set(other_ways.get() + 1);
                    }
                }
                if let Some(ids) = words.encode(tokenizer, &text).unwrap() {
                    prop_assert_eq!(ids, expected.iter().map(|token| token.id).collect::<Vec<_>>());
                }
            }
            Ok(())
        })
        .unwrap();
    assert!((1..1400).contains(&other_ways.get()), "{} of 1500 texts take the long way", other_ways.get());
}

#[test]
fn unknown_parts_are_left_to_the_crate() {
    let [_, (_, llama3), ..] = &tokenizers()[..] else { panic!() };
    assert!(load(llama3).1.is_some());
    let other_ways: [(&str, Value); 11] = [
        ("/normalizer", json!({ "type": "NFKC" })),
        ("/pre_tokenizer", json!({ "type": "Whitespace" })),
        (
            "/pre_tokenizer/pretokenizers/0",
            json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true }),
        ),
        ("/pre_tokenizer/pretokenizers/0/behavior", json!("MergedWithNext")),
        ("/pre_tokenizer/pretokenizers/0/invert", json!(true)),
        ("/pre_tokenizer/pretokenizers/0/pattern", json!({ "String": " " })),
        ("/pre_tokenizer/pretokenizers/1/add_prefix_space", json!(true)),
        ("/post_processor", json!({ "type": "BertProcessing", "sep": ["!", 0], "cls": ["!", 0] })),
        ("/model/dropout", json!(0.5)),
        ("/model/end_of_word_suffix", json!("</w>")),
        ("/added_tokens/0/lstrip", json!(true)),
    ];
    for (pointer, value) in other_ways {
        let mut changed = llama3.clone();
        *changed.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        assert!(load(&changed).1.is_none(), "{pointer}");
    }
}

#[test]
fn patterns_with_two_meanings_are_left_to_the_crate() {
    for pattern in [
        r"\p{L}++|\s+",
        r"a?+b",
        r"[a-z]{1,3}+",
        r"(?=a)b",
        r"(?<!a)b",
        r"(?>a)b",
        r"(a)\1",
        r"a*",
        r"|\s+(?!\S)|\s+",
        r"(a|\s+(?!\S)|\s+",
    ] {
        assert!(WordPattern::new(pattern).is_none(), "{pattern}");
    }
    for pattern in [r"\p{L}+|\s+", r" ?\p{Lu}+|\s+(?!\S)|\s", GPT4O, DEEPSEEK[2]] {
        assert!(WordPattern::new(pattern).is_some(), "{pattern}");
    }
}
