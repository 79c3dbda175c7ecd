//! The format `messages`: lists of messages with `role` and `content`. Other formats translate into the same messages.

use super::super::conversation::{Conversation, Message};
use super::{Document, kind_of, take_optional_text};
use serde_json::{Map, Value, json};

/// The most messages of a record.
const MESSAGES_MAX: usize = 100_000;

/// The keys that hold the author and the text of a message.
#[derive(Clone, Copy)]
pub(super) struct MessageKeys {
    pub role: &'static str,
    pub content: &'static str,
    /// Keys of the other layout, for messages.
    pub other_role: &'static str,
    pub other_format: &'static str,
}

/// The keys of the format `messages`.
pub(super) const OPENAI: MessageKeys =
    MessageKeys { role: "role", content: "content", other_role: "from", other_format: "sharegpt" };
/// The keys of the format `sharegpt`.
pub(super) const SHAREGPT: MessageKeys =
    MessageKeys { role: "from", content: "value", other_role: "role", other_format: "messages" };

/// Reads a record of the format `messages`.
///
/// # Errors
/// The reason for which it is not of the format.
pub(super) fn parse(keys: &mut Map<String, Value>) -> Result<Document<'static>, String> {
    parse_conversation(keys, OPENAI)
}

/// Reads a record with a list of messages.
pub(super) fn parse_conversation(
    keys: &mut Map<String, Value>,
    names: MessageKeys,
) -> Result<Document<'static>, String> {
    let (key, list) = match (keys.remove("messages"), keys.remove("conversations")) {
        (Some(_), Some(_)) => return Err("it has both `messages` and `conversations`; keep one".to_owned()),
        (Some(list), None) => ("messages", list),
        (None, Some(list)) => ("conversations", list),
        (None, None) => return Err("missing field `messages`".to_owned()),
    };
    let mut messages = parse_messages(key, list, names)?;
    let is_sharegpt = names.role == SHAREGPT.role;
    let system = if is_sharegpt { take_optional_text(keys, "system")? } else { None };
    if let Some(system) = system.filter(|system| !system.is_empty()) {
        if messages.iter().any(|message| message.role() == "system") {
            return Err(format!("it has a `system` beside a system message in `{key}`; keep one"));
        }
        messages.insert(0, Message::new("system", system));
    }
    conversation_of(messages, keys)
}

/// Returns the document of messages with the keys of their record that belong to the conversation as a whole.
///
/// # Errors
/// `tools` or `chat_template_kwargs` of another type.
pub(super) fn conversation_of(
    messages: Vec<Message>,
    keys: &mut Map<String, Value>,
) -> Result<Document<'static>, String> {
    if messages.is_empty() {
        return Ok(Document::Empty);
    }
    let tools = match keys.remove("tools") {
        None => Vec::new(),
        Some(Value::Array(tools)) => tools,
        // ShareGPT files and tables hold them as a text.
        Some(Value::String(text)) if text.trim().is_empty() => Vec::new(),
        Some(Value::String(text)) => {
            serde_json::from_str(&text).map_err(|error| format!("`tools` is not a list as JSON: {error}"))?
        }
        Some(other) => return Err(format!("`tools` is {}, expected a list", kind_of(&other))),
    };
    let template_variables = match keys.remove("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables,
        Some(other) => return Err(format!("`chat_template_kwargs` is {}, expected an object", kind_of(&other))),
    };
    Ok(Document::Conversation(Box::new(Conversation { messages, tools, template_variables })))
}

/// Reads a list of messages, the value of the key `key`.
///
/// # Errors
/// The first message that is not of the layout `names`.
pub(super) fn parse_messages(key: &str, list: Value, names: MessageKeys) -> Result<Vec<Message>, String> {
    let Value::Array(list) = list else {
        return Err(format!("`{key}` is {}, expected a list of messages", kind_of(&list)));
    };
    if list.len() > MESSAGES_MAX {
        return Err(format!("`{key}` has {} messages; the limit is {MESSAGES_MAX}", list.len()));
    }
    let mut messages = Vec::with_capacity(list.len());
    for (index, message) in list.into_iter().enumerate() {
        messages.push(parse_message(message, names).map_err(|reason| {
            let (part, problem) = reason.split_once(' ').unwrap_or(("", &reason));
            format!("`{key}[{index}]{part}` {problem}")
        })?);
    }
    Ok(messages)
}

/// Reads a message. An error is the part of the message, such as `.role` or none, and after a space the problem.
fn parse_message(message: Value, names: MessageKeys) -> Result<Message, String> {
    let Value::Object(mut keys) = message else {
        return Err(format!(" is {}, expected an object", kind_of(&message)));
    };
    let role = match keys.remove(names.role) {
        Some(Value::String(role)) => role,
        None | Some(Value::Null) if keys.contains_key(names.other_role) => {
            let MessageKeys { role, other_role, other_format, .. } = names;
            return Err(format!(" has `{other_role}` instead of `{role}`: the format is {other_format}"));
        }
        None | Some(Value::Null) => return Err(format!(" has no `{}`", names.role)),
        Some(other) => return Err(format!(".{} is {}, expected a text", names.role, kind_of(&other))),
    };
    let content = keys.remove(names.content).unwrap_or_default();
    let train = take_train_flag(&mut keys)?;
    keys.retain(|_, value| !value.is_null());
    if role == "function_call" && names.role == SHAREGPT.role {
        let mut object = Map::from_iter([("role".to_owned(), "assistant".into()), ("content".to_owned(), Value::Null)]);
        object.insert("tool_calls".to_owned(), parse_calls(&content)?);
        object.extend(keys);
        return Ok(Message { object, train });
    }
    let has_other_content = ["tool_calls", "function_call", "thinking", "reasoning", "reasoning_content"]
        .into_iter()
        .any(|key| keys.contains_key(key));
    let content = match content {
        Value::Null if has_other_content => Value::Null,
        Value::Null => return Err(format!(" has no `{}`", names.content)),
        content => parse_content(content).map_err(|reason| format!(".{}{reason}", names.content))?,
    };
    let mut object =
        Map::from_iter([("role".to_owned(), normalized_role(&role).into()), ("content".to_owned(), content)]);
    object.extend(keys);
    Ok(Message { object, train })
}

/// Returns the role that templates know, for an author as data files name it. Other words are kept.
fn normalized_role(role: &str) -> &str {
    match role {
        "human" | "input" => "user",
        "gpt" | "output" | "model" => "assistant",
        "observation" | "function" => "tool",
        other => other,
    }
}

/// Checks the content of a message: a text, or a list of parts with texts. A list of a single part becomes its text.
fn parse_content(content: Value) -> Result<Value, String> {
    let mut parts = match content {
        Value::String(_) => return Ok(content),
        Value::Array(parts) => parts,
        other => return Err(format!(" is {}, expected a text", kind_of(&other))),
    };
    for (index, part) in parts.iter().enumerate() {
        match (part.get("type").and_then(Value::as_str), part.get("text")) {
            (Some("text"), Some(Value::String(_))) => {}
            (Some(kind), _) if kind != "text" => {
                return Err(format!("[{index}] is of the type `{kind}`; only text is supported"));
            }
            _ => return Err(format!("[{index}] is not {{\"type\": \"text\", \"text\": \"...\"}}")),
        }
    }
    match &mut parts[..] {
        [only] => Ok(only["text"].take()),
        _ => Ok(parts.into()),
    }
}

/// Removes the keys `train` and `weight`, which say whether to train on a message.
fn take_train_flag(keys: &mut Map<String, Value>) -> Result<Option<bool>, String> {
    let mut flag = None;
    for key in ["train", "weight"] {
        let value = match keys.remove(key) {
            None | Some(Value::Null) => continue,
            Some(Value::Bool(value)) => value,
            Some(Value::Number(number)) if number.as_f64() == Some(0.0) => false,
            Some(Value::Number(number)) if number.as_f64() == Some(1.0) => true,
            Some(other) => return Err(format!(".{key} is {other}, expected true or false, or 1 or 0")),
        };
        if flag.is_some_and(|flag| flag != value) {
            return Err(" has a `train` and a `weight` that differ".to_owned());
        }
        flag = Some(value);
    }
    Ok(flag)
}

/// Reads the value of a message from `function_call`: one call as JSON, or a list of calls.
fn parse_calls(content: &Value) -> Result<Value, String> {
    let parsed: Option<Value> = match content {
        Value::String(text) => serde_json::from_str(text).ok(),
        other => Some(other.clone()),
    };
    let calls = match parsed {
        Some(Value::Array(calls)) => calls,
        Some(call) => vec![call],
        None => Vec::new(),
    };
    let is_call = |call: &Value| call.get("name").is_some_and(Value::is_string);
    if calls.is_empty() || !calls.iter().all(is_call) {
        return Err(".value of a function_call is not {\"name\": \"...\", \"arguments\": {..}} as JSON".to_owned());
    }
    Ok(calls.into_iter().map(|call| json!({ "type": "function", "function": call })).collect())
}
