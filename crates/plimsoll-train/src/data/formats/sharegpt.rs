//! The format `sharegpt`: lists of messages with `from` and `value`.

use super::Document;
use super::messages::{SHAREGPT, parse_conversation};
use serde_json::{Map, Value};

/// Authors that ShareGPT files name, with the aliases of other formats.
const AUTHORS: [&str; 12] = [
    "human",
    "gpt",
    "system",
    "observation",
    "function_call",
    "tool",
    "user",
    "assistant",
    "input",
    "output",
    "model",
    "developer",
];

/// Reads a record of the format `sharegpt`.
///
/// # Errors
/// The reason for which it is not of the format.
pub(super) fn parse(keys: &mut Map<String, Value>) -> Result<Document<'static>, String> {
    for key in ["conversations", "messages"] {
        let messages = keys.get(key).and_then(Value::as_array).into_iter().flatten();
        let authors = messages.map(|message| message.get("from").and_then(Value::as_str)).enumerate();
        for (index, author) in authors {
            if let Some(author) = author.filter(|author| !AUTHORS.contains(author)) {
                return Err(format!("`{key}[{index}].from` is `{author}`, expected one of {}", AUTHORS.join(", ")));
            }
        }
    }
    parse_conversation(keys, SHAREGPT)
}
