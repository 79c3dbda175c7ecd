//! A line of the tokens format: ids, labels, and the other keys that change which tokens are predicted.
//!
//! - `completion_mask` and `assistant_masks` are honoured: a token with 0 has no label.
//! - `attention_mask` is honoured at both ends of a document: the tokens with 0 there are padding and are removed.
//! - Each other key of [`meaning`] is refused unless its value changes nothing.
//! - All other keys are ignored.

use super::IGNORED_LABEL;
use plimsoll_core::format_count;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::ops::Range;

/// A line of the tokens format.
#[derive(Debug, PartialEq)]
pub(super) struct TokenLine {
    /// Token ids of the document.
    pub input_ids: Vec<i32>,
    /// Label of each token; `None` if every token is its own label.
    pub labels: Option<Vec<i32>>,
    /// The other keys that change the loss, with their numbers.
    columns: Vec<(String, Vec<f64>)>,
}

/// A key whose value changes the loss in a way that Plimsoll does not follow.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` {problem}")]
pub(super) struct RefusedKey {
    /// Key of the line.
    pub key: String,
    /// Description of the problem.
    pub problem: String,
}

/// The effect of a key on the loss.
enum Meaning {
    /// Tokens with 0 are padding.
    Attention,
    /// Tokens with 0 have no label.
    Labels,
    /// The index of each token in its document.
    Positions,
    /// The number of tokens of each document in the line.
    Lengths,
    /// The document of each token.
    Documents,
    /// This value, for every token, changes nothing.
    Neutral(f64),
    /// Every value changes the loss.
    Unsupported,
}

const ATTENTION_MASK: &str = "attention_mask";

/// Returns the effect of a key on the loss, and `None` if it has none.
fn meaning(key: &str) -> Option<Meaning> {
    Some(match key {
        ATTENTION_MASK => Meaning::Attention,
        "completion_mask" | "assistant_masks" => Meaning::Labels,
        "position_ids" => Meaning::Positions,
        "seq_lengths" => Meaning::Lengths,
        "document_ids" | "segment_ids" | "sequence_ids" => Meaning::Documents,
        "special_tokens_mask" | "prompt_mask" => Meaning::Neutral(0.0),
        "label_ids" | "shift_labels" | "target_ids" | "cu_seqlens" | "cu_seq_lens_q" | "cu_seq_lens_k" => {
            Meaning::Unsupported
        }
        key if ["mask", "masks", "weight", "weights"].iter().any(|ending| key.ends_with(ending)) => {
            Meaning::Neutral(1.0)
        }
        _ => return None,
    })
}

/// Returns whether the tokens format reads a list of numbers under this key.
pub(super) fn is_number_column(key: &str) -> bool {
    meaning(key).is_some()
}

impl TokenLine {
    /// Returns the line of a document without other keys.
    pub fn labelled(input_ids: Vec<i32>, labels: Vec<i32>) -> TokenLine {
        TokenLine { input_ids, labels: Some(labels), columns: Vec::new() }
    }

    /// Applies the other keys to ids and labels, of which there must be equally many.
    ///
    /// # Errors
    /// A key that changes the loss in another way, or has another number of values than there are tokens.
    pub fn apply_columns(&mut self) -> Result<(), RefusedKey> {
        let columns = std::mem::take(&mut self.columns);
        let mut kept = 0..self.input_ids.len();
        for (key, mask) in columns.iter().filter(|(key, _)| key == ATTENTION_MASK) {
            kept = self.attended(mask).map_err(|problem| RefusedKey { key: key.clone(), problem })?;
        }
        for (key, values) in columns {
            self.apply_column(&key, &values, kept.clone()).map_err(|problem| RefusedKey { key, problem })?;
        }
        self.input_ids.truncate(kept.end);
        self.input_ids.drain(..kept.start);
        if let Some(labels) = &mut self.labels {
            labels.truncate(kept.end);
            labels.drain(..kept.start);
        }
        Ok(())
    }

    /// Returns the range of the tokens that an attention mask keeps.
    fn attended(&self, mask: &[f64]) -> Result<Range<usize>, String> {
        self.check_flags(mask)?;
        let start = mask.iter().position(|&flag| flag == 1.0).unwrap_or(mask.len());
        let end = mask.iter().rposition(|&flag| flag == 1.0).map_or(start, |last| last + 1);
        match mask[start..end].contains(&0.0) {
            true => Err("hides tokens between others, which is not supported".to_owned()),
            false => Ok(start..end),
        }
    }

    /// Applies the key `key` to the labels, or checks that its `values` change nothing. The tokens outside `kept` are
    /// padding.
    fn apply_column(&mut self, key: &str, values: &[f64], kept: Range<usize>) -> Result<(), String> {
        let length = kept.len() as f64;
        // A single value stands for the whole document.
        let inside = if values.len() == self.input_ids.len() { &values[kept] } else { values };
        let is_constant = || inside.windows(2).all(|two| two[0] == two[1]);
        let (is_neutral, problem) = match meaning(key) {
            None | Some(Meaning::Attention) => (true, ""),
            Some(Meaning::Labels) => return self.remove_labels(values),
            // Attention depends on differences of positions only.
            Some(Meaning::Positions) => {
                let counts =
                    values.len() == self.input_ids.len() && inside.windows(2).all(|two| two[1] == two[0] + 1.0);
                (counts, "does not count the tokens of one document")
            }
            Some(Meaning::Lengths) => (values == [length], "does not say that the line is one document"),
            Some(Meaning::Documents) => (is_constant(), "does not say that the line is one document"),
            Some(Meaning::Neutral(neutral)) => {
                (inside.iter().all(|&value| value == neutral), "changes the loss, which is not supported")
            }
            Some(Meaning::Unsupported) => (false, "changes the loss, which is not supported"),
        };
        if is_neutral { Ok(()) } else { Err(problem.to_owned()) }
    }

    /// Removes the labels of the tokens with 0 in `mask`.
    fn remove_labels(&mut self, mask: &[f64]) -> Result<(), String> {
        self.check_flags(mask)?;
        let labels = self.labels.get_or_insert_with(|| self.input_ids.clone());
        for (label, _) in labels.iter_mut().zip(mask).filter(|(_, flag)| **flag == 0.0) {
            *label = IGNORED_LABEL;
        }
        Ok(())
    }

    /// Checks that a mask has one value per token, 0 or 1.
    fn check_flags(&self, mask: &[f64]) -> Result<(), String> {
        let (values, tokens) = (mask.len(), self.input_ids.len());
        if values != tokens {
            return Err(format!("has {} for {}", format_count(values, "value"), format_count(tokens, "token")));
        }
        match mask.iter().find(|value| ![0.0, 1.0].contains(*value)) {
            Some(value) => Err(format!("holds {value}, expected 0 or 1")),
            None => Ok(()),
        }
    }
}

impl<'de> Deserialize<'de> for TokenLine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TokenLine, D::Error> {
        deserializer.deserialize_map(LineVisitor)
    }
}

struct LineVisitor;

impl<'de> Visitor<'de> for LineVisitor {
    type Value = TokenLine;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TokenLine, A::Error> {
        let (mut input_ids, mut labels, mut columns) = (None, None, Vec::<(String, Vec<f64>)>::new());
        while let Some(key) = map.next_key::<String>()? {
            match &*key {
                "input_ids" if input_ids.is_none() => input_ids = Some(map.next_value()?),
                "labels" if labels.is_none() => labels = Some(map.next_value()?),
                "input_ids" => return Err(A::Error::duplicate_field("input_ids")),
                "labels" => return Err(A::Error::duplicate_field("labels")),
                name if meaning(name).is_some() => {
                    let values = map.next_value::<Option<Numbers>>();
                    let values = values.map_err(|error| A::Error::custom(format!("`{name}`: {error}")))?;
                    columns.extend(values.map(|Numbers(values)| (key, values)));
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        let input_ids = input_ids.ok_or_else(|| A::Error::missing_field("input_ids"))?;
        Ok(TokenLine { input_ids, labels: labels.flatten(), columns })
    }
}

/// A number or a list of numbers.
struct Numbers(Vec<f64>);

/// A number; true and false stand for 1 and 0.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number, true or false")]
enum Number {
    Flag(bool),
    Value(f64),
}

impl Number {
    fn value(self) -> f64 {
        match self {
            Number::Flag(flag) => f64::from(u8::from(flag)),
            Number::Value(value) => value,
        }
    }
}

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Numbers, D::Error> {
        deserializer.deserialize_any(NumbersVisitor)
    }
}

struct NumbersVisitor;

impl<'de> Visitor<'de> for NumbersVisitor {
    type Value = Numbers;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of numbers")
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Numbers, E> {
        Ok(Numbers(vec![value as f64]))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Numbers, E> {
        Ok(Numbers(vec![value]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Numbers, A::Error> {
        let mut values = Vec::new();
        while let Some(number) = list.next_element::<Number>()? {
            values.push(number.value());
        }
        Ok(Numbers(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Returns ids and labels of a line of four tokens that has one more key, or the refusal.
    fn line(key: &str, value: Value) -> Result<(Vec<i32>, Option<Vec<i32>>), String> {
        let text = json!({ "input_ids": [5, 6, 7, 8], key: value }).to_string();
        let mut line: TokenLine = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        line.apply_columns().map_err(|error| error.to_string())?;
        Ok((line.input_ids, line.labels))
    }

    #[test]
    fn masks_remove_labels_and_padding() {
        let ids = vec![5, 6, 7, 8];
        for key in ["completion_mask", "assistant_masks"] {
            assert_eq!(line(key, json!([0, 0, 1, true])), Ok((ids.clone(), Some(vec![-100, -100, 7, 8]))), "{key}");
        }
        assert_eq!(line("attention_mask", json!([0, 1, 1, 0])), Ok((vec![6, 7], None)));
        assert_eq!(line("attention_mask", json!([false, false, 0, 0])), Ok((vec![], None)));
        let text = json!({
            "assistant_masks": [0, 0, 0, 1], "position_ids": [0, 0, 1, 2], "labels": [5, 6, 7, 8],
            "loss_mask": [0, 1, 1, 1], "attention_mask": [0, 1, 1, 1], "completion_mask": [0, 0, 1, 1], "input_ids": [5, 6, 7, 8],
        });
        let mut line: TokenLine = serde_json::from_str(&text.to_string()).unwrap();
        assert_eq!(line.apply_columns(), Ok(()));
        assert_eq!((line.input_ids, line.labels), (vec![6, 7, 8], Some(vec![-100, -100, 8])));
    }

    #[test]
    fn neutral_and_unrelated_keys_are_accepted() {
        for (key, value) in [
            ("attention_mask", json!([1, 1, 1, 1])),
            ("attention_mask", json!(null)),
            ("position_ids", json!([3, 4, 5, 6])),
            ("seq_lengths", json!([4])),
            ("loss_mask", json!([1, 1.0, true, 1])),
            ("weight", json!(1.0)),
            ("special_tokens_mask", json!([0, 0, 0, 0])),
            ("segment_ids", json!([2, 2, 2, 2])),
            ("token_type_ids", json!([0, 0, 1, 1])),
            ("source", json!({ "mask": "x" })),
        ] {
            assert_eq!(line(key, value), Ok((vec![5, 6, 7, 8], None)), "{key}");
        }
    }

    #[test]
    fn keys_that_change_the_loss_are_refused() {
        for (key, value, problem) in [
            ("attention_mask", json!([1, 0, 1, 1]), "hides tokens between others"),
            ("attention_mask", json!([1, 1, 2, 2]), "holds 2, expected 0 or 1"),
            ("completion_mask", json!([1, 1]), "has 2 values for 4 tokens"),
            ("assistant_masks", json!([0.5, 1, 1, 1]), "holds 0.5, expected 0 or 1"),
            ("position_ids", json!([0, 1, 0, 1]), "does not count the tokens of one document"),
            ("position_ids", json!([0, 0, 1, 2]), "does not count the tokens of one document"),
            ("seq_lengths", json!([2, 2]), "does not say that the line is one document"),
            ("segment_ids", json!([1, 1, 2, 2]), "does not say that the line is one document"),
            ("special_tokens_mask", json!([0, 0, 0, 1]), "changes the loss"),
            ("loss_mask", json!([1, 1, 0, 1]), "changes the loss"),
            ("token_weights", json!([1, 1, 0.5, 1]), "changes the loss"),
            ("label_ids", json!([5, 6, 7, 8]), "changes the loss"),
            ("attention_mask", json!("1111"), "invalid type: string \"1111\", expected a list of numbers"),
            ("loss_mask", json!([[1, 1, 1, 1]]), "expected a number, true or false"),
        ] {
            let refusal = line(key, value).unwrap_err();
            assert!(refusal.contains(&format!("`{key}`")) && refusal.contains(problem), "{refusal}");
        }
    }
}
