//! Checks of a `tokenizer.json` before the crate `tokenizers` reads it. They refuse values on which that crate panics
//! or allocates without bound, and replacements that make a text much longer.

use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;

/// The most bytes that one byte of text may become in the normalizer, and one byte of a token in the decoder.
const GROWTH_MAX: f64 = 64.0;
/// The most bytes that a character may become by a `precompiled_charsmap`. That of NFKC needs 33.
const CHARSMAP_ENTRY_BYTES_MAX: usize = 64;
/// Growth of the longest character under NFKC: U+FDFA, from 3 to 33 bytes.
const NFKC_GROWTH: f64 = 11.0;
/// Fields with the steps of a sequence.
const SEQUENCES: [&str; 4] = ["normalizers", "pretokenizers", "processors", "decoders"];

/// The parts of a `tokenizer.json` that are checked. The vocabulary is skipped, because it takes tens of megabytes.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

/// Checks the content of a `tokenizer.json`.
///
/// # Errors
/// A message that names the field with an invalid value.
pub fn check(bytes: &[u8]) -> Result<(), String> {
    let parts: Parts = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    for (name, part) in [("normalizer", &parts.normalizer), ("decoder", &parts.decoder)] {
        check_replacements(&steps(part)).map_err(|reason| format!("{name}: {reason}"))?;
    }
    for template in steps(&parts.post_processor) {
        check_template(template).map_err(|reason| format!("post_processor: {reason}"))?;
    }
    Ok(())
}

/// Returns the steps of a part in their order; a sequence may hold further sequences.
fn steps(part: &Value) -> Vec<&Value> {
    match SEQUENCES.iter().find_map(|field| part.get(field)?.as_array()) {
        Some(sequence) => sequence.iter().flat_map(steps).collect(),
        None => vec![part],
    }
}

/// Checks `steps` from the last to the first, so that each replacement is weighed by what the later steps make of it.
fn check_replacements(steps: &[&Value]) -> Result<(), String> {
    let mut growth = Growth { characters: HashMap::new(), least: 0.0, wide: 1.0 };
    for step in steps.iter().rev() {
        if let Some(charsmap) = step.get("precompiled_charsmap").and_then(Value::as_str) {
            check_charsmap(charsmap)?;
            growth.wide *= NFKC_GROWTH;
        } else if matches!(step.get("type").and_then(Value::as_str), Some("NFKC" | "NFKD")) {
            growth.wide *= NFKC_GROWTH;
        } else if let Some(prepended) = step.get("prepend").and_then(Value::as_str) {
            growth.check(growth.of(prepended), "Prepend", prepended)?;
        } else if let (Some(pattern), Some(content)) =
            (step.get("pattern"), step.get("content").and_then(Value::as_str))
        {
            growth.add_replacement(pattern, content)?;
        }
    }
    Ok(())
}

/// The bytes that a text can become by the steps of a normalizer or decoder from some step on.
struct Growth {
    /// Most bytes of characters that a replacement names.
    characters: HashMap<char, f64>,
    /// Most bytes of any character by a replacement that may match it.
    least: f64,
    /// Growth of characters outside ASCII by steps that decompose them.
    wide: f64,
}

impl Growth {
    /// Returns the most bytes that `text` can become.
    fn of(&self, text: &str) -> f64 {
        text.chars().map(|c| self.of_character(c)).sum()
    }

    fn of_character(&self, c: char) -> f64 {
        let decomposed = c.len_utf8() as f64 * if c.is_ascii() { 1.0 } else { self.wide };
        decomposed.max(self.least).max(self.characters.get(&c).copied().unwrap_or(0.0))
    }

    /// Puts a `Replace` of `pattern` by `content` before the other steps.
    fn add_replacement(&mut self, pattern: &Value, content: &str) -> Result<(), String> {
        let bytes = self.of(content);
        match (pattern.get("String"), pattern.get("Regex")) {
            (Some(Value::String(replaced)), _) => {
                if replaced.is_empty() {
                    return Err("Replace has an empty pattern".to_owned());
                }
                self.check(bytes / replaced.len() as f64, "Replace", content)?;
                let each = bytes / replaced.chars().count() as f64;
                for c in replaced.chars() {
                    let most = self.of_character(c).max(each);
                    self.characters.insert(c, most);
                }
            }
            (_, Some(Value::String(regex))) => {
                if regex.is_empty() {
                    return Err("Replace has an empty pattern".to_owned());
                }
                self.check(bytes, "Replace", content)?;
                self.least = self.least.max(bytes);
            }
            _ => {}
        }
        Ok(())
    }

    fn check(&self, growth: f64, step: &str, content: &str) -> Result<(), String> {
        if growth <= GROWTH_MAX {
            return Ok(());
        }
        let shown: String = content.chars().take(20).collect();
        Err(format!("{step} with `{shown}` makes a text up to {growth:.0} times as long; the limit is {GROWTH_MAX}"))
    }
}

/// Checks a `precompiled_charsmap`: the length of a trie in bytes (a little-endian u32), the trie, and texts that end
/// with a zero byte each.
fn check_charsmap(base64: &str) -> Result<(), String> {
    let invalid = |reason| Err(format!("precompiled_charsmap {reason}"));
    let Some(bytes) = decode_base64(base64) else { return invalid("is not base64") };
    let Some((length, rest)) = bytes.split_first_chunk() else { return invalid("is shorter than 4 bytes") };
    let trie = u32::from_le_bytes(*length) as usize;
    if trie < 4 || trie > rest.len() {
        return invalid("has no trie of the length that it names");
    }
    // The crate reads whole words, so the texts begin after the last whole word.
    let Ok(texts) = str::from_utf8(&rest[trie / 4 * 4..]) else { return invalid("has texts that are not UTF-8") };
    if texts.split('\0').any(|text| text.len() > CHARSMAP_ENTRY_BYTES_MAX) {
        return invalid("makes a character longer than 64 bytes");
    }
    Ok(())
}

/// Decodes padded base64 of the standard alphabet. Returns `None` if `text` is none.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(text.len() / 4 * 3), 0u32, 0);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, count) = (bits << 6 | u32::from(value), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

/// Checks a `TemplateProcessing`: one text in `single`, and special tokens that are defined. Other steps pass.
fn check_template(step: &Value) -> Result<(), String> {
    let Some(single) = step.get("single").and_then(Value::as_array) else { return Ok(()) };
    let sequences = single.iter().filter_map(|piece| piece.get("Sequence")?.get("id")?.as_str());
    if sequences.collect::<Vec<_>>() != ["A"] {
        return Err("`single` of the template must contain the text A once, and no other text".to_owned());
    }
    let pair = step.get("pair").and_then(Value::as_array).into_iter().flatten();
    for name in single.iter().chain(pair).filter_map(|piece| piece.get("SpecialToken")?.get("id")?.as_str()) {
        if step.get("special_tokens").is_none_or(|defined| defined.get(name).is_none()) {
            return Err(format!("the template names the token `{name}`, which `special_tokens` does not define"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refusal(tokenizer: &Value) -> String {
        check(tokenizer.to_string().as_bytes()).unwrap_err()
    }

    fn replace(pattern: &str, content: &str) -> Value {
        json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content })
    }

    #[test]
    fn steps_of_published_tokenizers_pass() {
        let blanks = json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": "▁" });
        let llama = json!([{ "type": "Prepend", "prepend": "▁" }, replace(" ", "▁")]);
        let fractions = ["½", "⅓", "¼", "⅔"].map(|c| replace(c, "1/2"));
        let lines = json!([replace("\n", "<n>"), { "type": "NFKC" }, blanks.clone(), blanks]);
        for steps in [llama, json!(vec![fractions; 20].concat()), lines] {
            let part = json!({ "type": "Sequence", "normalizers": steps });
            assert_eq!(check(json!({ "normalizer": part, "decoder": null }).to_string().as_bytes()), Ok(()));
        }
    }

    #[test]
    fn expanding_replacements_are_refused() {
        for part in ["normalizer", "decoder"] {
            let long = refusal(&json!({ part: replace("a", &"b".repeat(65)) }));
            assert!(long.ends_with("makes a text up to 65 times as long; the limit is 64"), "{long}");
            assert_eq!(refusal(&json!({ part: replace("", "b") })), format!("{part}: Replace has an empty pattern"));
        }
        let chain = json!([replace("a", "bbbbbbbbb"), { "normalizers": [replace("b", "cccccccc")] }]);
        let chain = refusal(&json!({ "normalizer": { "type": "Sequence", "normalizers": chain } }));
        assert!(chain.contains("up to 72 times"), "{chain}");
        let prepend = refusal(&json!({ "normalizer": { "type": "Prepend", "prepend": "▁".repeat(22) } }));
        assert!(prepend.contains("up to 66 times"), "{prepend}");
    }

    #[test]
    fn invalid_charsmaps_are_refused() {
        // A trie of one word, then the texts "a" and "bc".
        assert_eq!(check_charsmap("BAAAAAAAAABhAGJjAA=="), Ok(()));
        for (charsmap, reason) in [
            ("AAAA", "is shorter than 4 bytes"),
            ("AAA", "is not base64"),
            ("AA-A", "is not base64"),
            ("/////wAAAAA=", "has no trie of the length that it names"),
            ("BAAAAAAAAAD/", "has texts that are not UTF-8"),
        ] {
            assert_eq!(check_charsmap(charsmap), Err(format!("precompiled_charsmap {reason}")));
        }
        assert!(check_charsmap(&format!("BAAAAAAAAABh{}", "YWFh".repeat(30))).unwrap_err().ends_with("64 bytes"));
    }

    #[test]
    fn templates_need_their_tokens_and_one_text() {
        let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
        let begin = json!({ "SpecialToken": { "id": "<s>", "type_id": 0 } });
        let template = |single: Value, tokens: Value| {
            let step = json!({ "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens });
            check(json!({ "post_processor": { "type": "Sequence", "processors": [step] } }).to_string().as_bytes())
        };
        assert_eq!(
            template(json!([begin, text]), json!({ "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } })),
            Ok(())
        );
        assert!(template(json!([begin, text]), json!({})).unwrap_err().contains("the token `<s>`"));
        assert!(template(json!([text, text]), json!({})).unwrap_err().contains("the text A once"));
    }
}
