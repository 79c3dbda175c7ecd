//! The format `prompt_completion`: a prompt and its completion, both as text or both as lists of messages.

use super::messages::{OPENAI, conversation_of, parse_messages};
use super::{Document, kind_of};
use serde_json::{Map, Value};

/// Reads a record of the format `prompt_completion`. Messages of the prompt are not trained on.
///
/// # Errors
/// The reason for which it is not of the format.
pub(super) fn parse(keys: &mut Map<String, Value>) -> Result<Document<'static>, String> {
    if keys.get("label").is_some_and(Value::is_boolean) {
        return Err("it has a `label`, true or false: the format is preference".to_owned());
    }
    let mut take = |key: &str| keys.remove(key).ok_or_else(|| format!("missing field `{key}`"));
    match (take("prompt")?, take("completion")?) {
        (Value::String(prompt), Value::String(completion)) => Ok(Document::Pair { prompt, completion }),
        (prompt @ Value::Array(_), completion @ Value::Array(_)) => {
            let mut messages = parse_messages("prompt", prompt, OPENAI)?;
            messages.iter_mut().for_each(|message| message.train = Some(false));
            messages.extend(parse_messages("completion", completion, OPENAI)?);
            conversation_of(messages, keys)
        }
        (prompt, completion) => Err(format!(
            "`prompt` is {} and `completion` is {}, expected two texts or two lists of messages",
            kind_of(&prompt),
            kind_of(&completion)
        )),
    }
}
