//! The format `alpaca`: an instruction with an input, and the answer. It becomes a conversation.

use super::super::conversation::Message;
use super::messages::conversation_of;
use super::{Document, kind_of, take_optional_text, take_text};
use serde_json::{Map, Value};

/// Reads a record of the format `alpaca`. The user's message is the instruction, with the input after a line break.
///
/// # Errors
/// The reason for which it is not of the format.
pub(super) fn parse(keys: &mut Map<String, Value>) -> Result<Document<'static>, String> {
    let instruction = take_text(keys, "instruction")?;
    let output = take_text(keys, "output")?;
    let mut messages = Vec::new();
    if let Some(system) = take_optional_text(keys, "system")?.filter(|system| !system.is_empty()) {
        messages.push(Message::new("system", system));
    }
    for turn in take_history(keys)? {
        let [question, answer] = turn;
        messages.push(Message::new("user", question));
        messages.push(Message::new("assistant", answer));
    }
    let question = match take_optional_text(keys, "input")?.filter(|input| !input.is_empty()) {
        Some(input) => format!("{instruction}\n{input}"),
        None => instruction,
    };
    messages.push(Message::new("user", question));
    messages.push(Message::new("assistant", output));
    conversation_of(messages, keys)
}

/// Removes the earlier turns: pairs of a question and its answer.
fn take_history(keys: &mut Map<String, Value>) -> Result<Vec<[String; 2]>, String> {
    let turns = match keys.remove("history") {
        None => return Ok(Vec::new()),
        Some(Value::Array(turns)) => turns,
        Some(other) => return Err(format!("`history` is {}, expected a list", kind_of(&other))),
    };
    let pair = |(index, turn)| {
        let is_pair = "is not a pair of texts: a question and its answer";
        serde_json::from_value(turn).map_err(|_| format!("`history[{index}]` {is_pair}"))
    };
    turns.into_iter().enumerate().map(pair).collect()
}
