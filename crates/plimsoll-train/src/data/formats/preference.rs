//! The format `preference`: two answers of which one is preferred, or a completion with a verdict. Records are checked,
//! but no objective uses them yet.

use super::messages::{OPENAI, parse_messages};
use super::{Document, kind_of};
use serde_json::{Map, Value};

/// Checks a record of the format `preference`.
///
/// # Errors
/// The reason for which it is not of the format.
pub(super) fn parse(keys: &mut Map<String, Value>) -> Result<Document<'static>, String> {
    let answers: &[&str] = match keys.get("label") {
        Some(Value::Bool(_)) if !keys.contains_key("chosen") => &["completion"],
        _ => &["chosen", "rejected"],
    };
    let mut kinds = Vec::new();
    for &key in answers {
        let answer = keys.remove(key).ok_or_else(|| format!("missing field `{key}`"))?;
        kinds.push((key, check_answer(key, answer)?));
    }
    if let Some(prompt) = keys.remove("prompt") {
        kinds.push(("prompt", check_answer("prompt", prompt)?));
    }
    let (first, kind) = kinds[0];
    match kinds.iter().find(|(_, other)| *other != kind) {
        None => Ok(Document::Preference),
        Some((key, other)) => Err(format!("`{first}` is {kind} and `{key}` is {other}, expected the same")),
    }
}

/// Checks a prompt or an answer. Returns its kind, in words.
fn check_answer(key: &str, answer: Value) -> Result<&'static str, String> {
    match answer {
        Value::String(_) => Ok("a text"),
        Value::Array(_) => parse_messages(key, answer, OPENAI).map(|_| "a list of messages"),
        other => Err(format!("`{key}` is {}, expected a text or a list of messages", kind_of(&other))),
    }
}
