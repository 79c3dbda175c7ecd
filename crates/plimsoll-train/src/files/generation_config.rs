//! Rules of sampling in a model's `generation_config.json`.

use super::FilesError;
use super::model_dir::{GENERATION_CONFIG, MAX_CONFIG_BYTES};
use super::read::read_small;
use plimsoll_device::regular_file;
use serde_json::{Map, Value};
use std::path::Path;

/// Rules of sampling that a model brings along; `None` where its file has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Whether tokens are drawn; otherwise the most likely one is selected.
    pub do_sample: Option<bool>,
    /// Softmax temperature.
    pub temperature: Option<f64>,
    /// Number of the most likely tokens from which the next one is drawn; 0 means all.
    pub top_k: Option<usize>,
    /// Probability of the tokens from which the next one is drawn.
    pub top_p: Option<f64>,
    /// Least share of the probability of the most likely token.
    pub min_p: Option<f64>,
    /// Divisor of the positive logits of earlier tokens.
    pub repetition_penalty: Option<f64>,
    /// Largest number of new tokens.
    pub max_new_tokens: Option<u64>,
    /// Keys that change generation in transformers and that Plimsoll does not know.
    pub unknown: Vec<String>,
}

/// Keys that change generation in transformers, with the value that changes nothing.
const OTHER_KEYS: [(&str, f64); 11] = [
    ("num_beams", 1.0),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("length_penalty", 1.0),
    ("penalty_alpha", 0.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("guidance_scale", 1.0),
];
/// Keys with lists of tokens that change generation in transformers.
const TOKEN_KEYS: [&str; 5] =
    ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"];

impl GenerationDefaults {
    /// Reads the file in a model's folder. Without a file, there are no rules.
    ///
    /// # Errors
    /// A file that cannot be read, is no JSON object, or has a value of another type or out of its range.
    pub fn read(folder: &Path) -> Result<GenerationDefaults, FilesError> {
        let path = folder.join(GENERATION_CONFIG);
        if !regular_file::is_present(&path) {
            return Ok(GenerationDefaults::default());
        }
        let bytes = read_small(&path, MAX_CONFIG_BYTES)?;
        let keys = serde_json::from_slice(&bytes).map_err(|error| error.to_string());
        keys.and_then(|keys| read_keys(&keys)).map_err(|reason| FilesError::GenerationConfig { path, reason })
    }
}

fn read_keys(keys: &Map<String, Value>) -> Result<GenerationDefaults, String> {
    let given = |key: &str| keys.get(key).filter(|value| !value.is_null());
    let number = |key: &str, expected: &str, is_valid: fn(f64) -> bool| {
        let Some(value) = given(key) else { return Ok(None) };
        let found = value.as_f64().filter(|&number| is_valid(number));
        found.map(Some).ok_or_else(|| format!("`{key}` is {value}, expected {expected}"))
    };
    let is_share = |number| number > 0.0 && number <= 1.0;
    let do_sample = match given("do_sample") {
        Some(value) => Some(value.as_bool().ok_or_else(|| format!("`do_sample` is {value}, expected true or false"))?),
        None => None,
    };
    let is_whole = |number: f64| number >= 0.0 && number.fract() == 0.0 && number < 1e15;
    let changes = |key: &str, neutral: f64| given(key).is_some_and(|value| value.as_f64() != Some(neutral));
    let numbers = OTHER_KEYS.iter().filter(|(key, neutral)| changes(key, *neutral)).map(|(key, _)| *key);
    let tokens = TOKEN_KEYS
        .iter()
        .filter(|key| given(key).is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty())));
    Ok(GenerationDefaults {
        do_sample,
        temperature: number("temperature", "a number of 0 or more", |number| number >= 0.0)?,
        top_k: number("top_k", "a whole number", is_whole)?.map(|number| number as usize),
        top_p: number("top_p", "a number above 0 and up to 1", is_share)?,
        min_p: number("min_p", "a number from 0 to 1", |number| (0.0..=1.0).contains(&number))?,
        repetition_penalty: number("repetition_penalty", "a number above 0", |number| number > 0.0)?,
        max_new_tokens: number("max_new_tokens", "a whole number above 0", |number| number >= 1.0)?
            .map(|number| number as u64),
        unknown: numbers.chain(tokens.copied()).map(str::to_owned).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(text: &Value) -> Result<GenerationDefaults, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(GENERATION_CONFIG), text.to_string()).unwrap();
        GenerationDefaults::read(folder.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn rules_of_published_models_are_read() {
        assert_eq!(GenerationDefaults::read(Path::new("/nowhere")).unwrap(), GenerationDefaults::default());
        let qwen = json!({
            "bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], "repetition_penalty": 1.05,
            "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0", "min_p": null, "num_beams": 1,
        });
        let expected = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.7),
            top_k: Some(20),
            top_p: Some(0.8),
            repetition_penalty: Some(1.05),
            ..GenerationDefaults::default()
        };
        assert_eq!(read(&qwen).unwrap(), expected);
    }

    #[test]
    fn other_rules_are_named_and_invalid_ones_refused() {
        let other = json!({ "num_beams": 4, "min_length": 0, "suppress_tokens": [7], "bad_words_ids": [], "max_new_tokens": 9 });
        let read_other = read(&other).unwrap();
        assert_eq!(read_other.unknown, ["num_beams", "suppress_tokens"]);
        assert_eq!(read_other.max_new_tokens, Some(9));
        for (key, value, expected) in [
            ("do_sample", json!(1), "`do_sample` is 1, expected true or false"),
            ("temperature", json!(-1), "`temperature` is -1, expected a number of 0 or more"),
            ("top_k", json!(2.5), "`top_k` is 2.5, expected a whole number"),
            ("top_p", json!(0), "`top_p` is 0, expected a number above 0 and up to 1"),
            ("min_p", json!("x"), "`min_p` is \"x\", expected a number from 0 to 1"),
            ("repetition_penalty", json!(0), "`repetition_penalty` is 0, expected a number above 0"),
            ("max_new_tokens", json!(0), "`max_new_tokens` is 0, expected a whole number above 0"),
        ] {
            let refusal = read(&json!({ key: value })).unwrap_err();
            assert!(
                refusal.starts_with('/') && refusal.ends_with(&format!("generation_config.json: {expected}")),
                "{refusal}"
            );
        }
    }
}
