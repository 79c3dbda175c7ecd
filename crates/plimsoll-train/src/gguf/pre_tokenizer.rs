//! The pre-tokenizer: how a byte-level tokenizer splits text into words. A GGUF file has only its name in llama.cpp, so
//! the steps of `tokenizer.json` are compared with those of published tokenizers.
//!
//! Pre-tokenizers with the same steps may have several names. The one given here has the same pattern in llama.cpp.

use serde_json::{Value, json};

/// Contractions, as in English.
const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|";
/// The words of GPT-2, which a `ByteLevel` step splits as well.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Line breaks and spaces, the end of many patterns.
const SPACES: &str = r"|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Upper and lower letters of the patterns of GPT-4o and of Mistral NeMo.
const CASED: [&str; 2] = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
];
/// Contractions after a word.
const ENDING: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
/// Words, numbers and punctuation of DeepSeek-V3.
const DEEPSEEK_V3: &str =
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"##;

/// A step of a pre-tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Splits at a pattern, whose matches are words.
    Split(String),
    /// Makes each digit a word.
    Digits,
    /// Encodes bytes as letters.
    Bytes,
    /// Splits the words of GPT-2 and encodes bytes as letters.
    Gpt2Bytes,
    /// Another step, as JSON.
    Other(String),
}

/// Returns the steps of a pre-tokenizer in their order; a sequence may hold further sequences.
fn steps(part: &Value) -> Vec<Step> {
    if let Some(sequence) = part["pretokenizers"].as_array() {
        return sequence.iter().flat_map(steps).collect();
    }
    let other = || Step::Other(part.to_string());
    let is = |key: &str, default: bool| part[key].as_bool().unwrap_or(default);
    let step = match part["type"].as_str() {
        Some("ByteLevel") if is("add_prefix_space", true) => other(),
        Some("ByteLevel") if is("use_regex", true) => Step::Gpt2Bytes,
        Some("ByteLevel") => Step::Bytes,
        Some("Digits") if is("individual_digits", false) => Step::Digits,
        Some("Split") => {
            let keeps_matches = match part["behavior"].as_str() {
                Some("Isolated") => !is("invert", false),
                // The patterns match all text, so nothing is removed.
                Some("Removed") => is("invert", false),
                _ => false,
            };
            let pattern = part["pattern"]["Regex"].as_str().filter(|_| keeps_matches);
            pattern.map_or_else(other, |pattern| Step::Split(pattern.to_owned()))
        }
        _ => other(),
    };
    vec![step]
}

/// Returns the names of known pre-tokenizers with their steps. `ignores_merges` says whether a word that is a token
/// stays whole, which is a property of the name in llama.cpp.
fn known(ignores_merges: bool) -> Vec<(&'static str, Vec<Step>)> {
    let split = |pattern: &str| Step::Split(pattern.to_owned());
    let words = |letters: &str, digits: &str, other: &str| {
        split(&format!(
            r"{CONTRACTIONS}[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}| ?[^\s{other}]+[\r\n]*{SPACES}"
        ))
    };
    let cased = |ending: &str, digits: &str| {
        let [lower, upper] = CASED;
        split(&format!(r"{lower}{ending}|{upper}{ending}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{SPACES}"))
    };
    let triples = vec![words(r"\p{L}", "{1,3}", r"\p{L}\p{N}"), Step::Bytes];
    if ignores_merges {
        return vec![("llama-bpe", triples)];
    }
    vec![
        ("smaug-bpe", triples),
        ("qwen2", vec![words(r"\p{L}", "", r"\p{L}\p{N}"), Step::Bytes]),
        ("qwen35", vec![words(r"[\p{L}\p{M}]", "", r"\p{L}\p{M}\p{N}"), Step::Bytes]),
        ("gpt-2", vec![Step::Gpt2Bytes]),
        ("gpt-2", vec![split(GPT2), Step::Bytes]),
        ("smollm", vec![Step::Digits, Step::Gpt2Bytes]),
        ("gpt-4o", vec![cased(ENDING, "{1,3}"), Step::Bytes]),
        ("tekken", vec![cased("", ""), Step::Bytes]),
        (
            "deepseek-v3",
            vec![
                split(r"\p{N}{1,3}"),
                split("[一-龥぀-ゟ゠-ヿ]+"),
                split(&format!("{DEEPSEEK_V3}{SPACES}")),
                Step::Bytes,
            ],
        ),
        (
            "deepseek-coder",
            vec![
                split(r"[\r\n]"),
                split(r"\s?\p{L}+"),
                split(r"\s?\p{P}+"),
                split("[一-龥ࠀ-一가-퟿]+"),
                Step::Digits,
                Step::Bytes,
            ],
        ),
    ]
}

/// Names of llama.cpp with the same steps as a name in [`known`].
const ALIASES: [(&str, &str); 9] = [
    ("llama3", "llama-bpe"),
    ("llama-v3", "llama-bpe"),
    ("falcon3", "llama-bpe"),
    ("dbrx", "smaug-bpe"),
    ("deepseek-r1-qwen", "qwen2"),
    ("refact", "smollm"),
    ("starcoder", "smollm"),
    ("command-r", "smollm"),
    ("gpt2", "gpt-2"),
];

/// Returns the key `pre_tokenizer` of a `tokenizer.json` for a name in llama.cpp, and whether a word that is a token stays
/// whole (`ignore_merges`); `None` if the name is not known.
pub fn named(name: &str) -> Option<(Value, bool)> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
    [true, false].into_iter().find_map(|ignores_merges| {
        let (_, steps) = known(ignores_merges).into_iter().find(|(known, _)| *known == name)?;
        let steps: Vec<Value> = steps.iter().map(to_json).collect();
        Some((json!({ "type": "Sequence", "pretokenizers": steps }), ignores_merges))
    })
}

/// Returns the names that [`named`] knows.
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = [true, false].into_iter().flat_map(known).map(|(name, _)| name).collect();
    names.extend(ALIASES.iter().map(|(alias, _)| alias));
    names.sort_unstable();
    names.dedup();
    names
}

/// Returns a step as an element of `pretokenizers`.
fn to_json(step: &Step) -> Value {
    let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    match step {
        Step::Split(pattern) => {
            json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
        }
        Step::Digits => json!({ "type": "Digits", "individual_digits": true }),
        Step::Bytes => bytes(false),
        Step::Gpt2Bytes => bytes(true),
        Step::Other(_) => unreachable!("known steps have a form"),
    }
}

/// Returns whether the steps are those of DeepSeek LLM. Its pattern for letters, a list of several hundred ranges, is
/// compared by its beginning.
fn is_deepseek_llm(steps: &[Step]) -> bool {
    let [
        Step::Split(lines),
        Step::Split(letters),
        Step::Split(_),
        Step::Split(end),
        Step::Split(han),
        Step::Digits,
        Step::Bytes,
    ] = steps
    else {
        return false;
    };
    lines == r"[\r\n]" && letters.starts_with(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ") && end == r"\s+$" && han == "[一-龥ࠀ-一가-퟿]+"
}

/// Returns the name in llama.cpp of the pre-tokenizer of a byte-level `tokenizer.json`, of which `part` is the key
/// `pre_tokenizer`. If it is not known, returns a description of its steps.
pub fn recognize(part: &Value, ignores_merges: bool) -> Result<&'static str, String> {
    let steps = steps(part);
    let found = known(ignores_merges).into_iter().find(|(_, known)| *known == steps);
    if let Some((name, _)) = found {
        return Ok(name);
    }
    if !ignores_merges && is_deepseek_llm(&steps) {
        return Ok("deepseek-llm");
    }
    let mut described: Vec<String> = steps.iter().map(describe).collect();
    if ignores_merges {
        described.push("`ignore_merges` is true".to_owned());
    }
    Err(described.join(", then "))
}

fn describe(step: &Step) -> String {
    match step {
        Step::Split(pattern) => format!("Split `{pattern}`"),
        Step::Digits => "Digits".to_owned(),
        Step::Bytes => "ByteLevel".to_owned(),
        Step::Gpt2Bytes => "ByteLevel with use_regex".to_owned(),
        Step::Other(json) => json.clone(),
    }
}

/// Returns whether a pre-tokenizer encodes bytes as letters.
pub fn is_byte_level(part: &Value) -> bool {
    part["type"] == "ByteLevel" || part["pretokenizers"].as_array().is_some_and(|steps| steps.iter().any(is_byte_level))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(pattern: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    }

    fn sequence(steps: &[Value]) -> Value {
        json!({"type": "Sequence", "pretokenizers": steps})
    }

    fn bytes(use_regex: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
    }

    /// The patterns of published tokenizers, which `tests/fixtures/word_patterns.py` lists.
    #[test]
    fn published_patterns_are_recognized() {
        let fixture: Value = serde_json::from_str(include_str!("../../tests/fixtures/word_patterns.json")).unwrap();
        let pattern = |name: &str| sequence(&[split(fixture["patterns"][name].as_str().unwrap()), bytes(false)]);
        for (part, ignores_merges, name) in [
            (pattern("llama3"), true, "llama-bpe"),
            (pattern("llama3"), false, "smaug-bpe"),
            (pattern("qwen2"), false, "qwen2"),
            (pattern("gpt2"), false, "gpt-2"),
            (bytes(true), false, "gpt-2"),
            (sequence(&[json!({"type": "Digits", "individual_digits": true}), bytes(true)]), false, "smollm"),
        ] {
            assert_eq!(recognize(&part, ignores_merges), Ok(name));
        }
    }

    #[test]
    fn names_lead_to_their_steps() {
        for (name, steps) in [true, false].into_iter().flat_map(known) {
            let (part, ignores_merges) = named(name).unwrap();
            assert!(super::steps(&part) == steps || name == "gpt-2", "{name}");
            assert_eq!(recognize(&part, ignores_merges), Ok(name));
        }
        for (alias, name) in ALIASES {
            assert_eq!(named(alias).unwrap(), named(name).unwrap());
        }
        assert!(named("default").is_none() && names().contains(&"qwen2"));
    }

    #[test]
    fn unknown_steps_are_described() {
        let part = sequence(&[split(r"\w+"), json!({"type": "Digits", "individual_digits": true}), bytes(false)]);
        assert_eq!(recognize(&part, false), Err(r"Split `\w+`, then Digits, then ByteLevel".to_owned()));
        assert!(recognize(&bytes(true), true).unwrap_err().ends_with("`ignore_merges` is true"));
        let spaced = json!({"type": "ByteLevel", "add_prefix_space": true, "use_regex": true});
        assert!(is_byte_level(&spaced) && recognize(&spaced, false).is_err());
    }
}
