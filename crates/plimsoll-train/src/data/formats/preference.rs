//! The format `preference`: a prompt with two answers of which one is preferred, or a completion with a verdict.

use super::super::conversation::{Conversation, Message};
use super::messages::{OPENAI, conversation_of, parse_messages};
use super::{Document, kind_of};
use serde_json::{Map, Value};

/// A prompt with two answers, the preferred one first.
#[derive(Debug)]
pub(in crate::data) enum PreferencePair {
    /// Texts.
    Texts {
        /// Text before both answers; may be empty.
        prompt: String,
        /// The chosen and the rejected answer.
        answers: [String; 2],
    },
    /// The conversation with the chosen answer, and that with the rejected one. Only messages of the answers are trained.
    Conversations([Box<Conversation>; 2]),
}

/// The value of an answer or a prompt.
enum Part {
    Text(String),
    Messages(Vec<Message>),
}

/// Reads a record of the format `preference`. A completion with a verdict has no other answer: it is checked, and no
/// objective uses it.
///
/// # Errors
/// The reason for which it is not of the format.
pub(super) fn parse(keys: &mut Map<String, Value>) -> Result<Document<'static>, String> {
    let answers: &[&str] = match keys.get("label") {
        Some(Value::Bool(_)) if !keys.contains_key("chosen") => &["completion"],
        _ => &["chosen", "rejected"],
    };
    let mut parts = Vec::new();
    for &key in answers {
        let answer = keys.remove(key).ok_or_else(|| format!("missing field `{key}`"))?;
        parts.push((key, parse_part(key, answer)?));
    }
    if let Some(prompt) = keys.remove("prompt") {
        parts.push(("prompt", parse_part("prompt", prompt)?));
    }
    let (first, kind) = (parts[0].0, parts[0].1.kind());
    if let Some((key, other)) = parts.iter().find(|(_, part)| part.kind() != kind) {
        let other = other.kind();
        return Err(format!(
            "`{first}` is {kind} and `{key}` is {other}, expected both as texts or both as lists of messages"
        ));
    }
    let [chosen, rejected] = answers else { return Ok(Document::Verdict) };
    let mut take = |key: &str| {
        let at = parts.iter().position(|(name, _)| *name == key)?;
        Some(parts.swap_remove(at).1)
    };
    let (chosen, rejected, prompt) = (take(chosen), take(rejected), take("prompt"));
    Ok(Document::Preference(match (chosen, rejected, prompt) {
        (Some(Part::Messages(chosen)), Some(Part::Messages(rejected)), prompt) => {
            let prompt = if let Some(Part::Messages(messages)) = prompt { Some(messages) } else { None };
            return pair_conversations(chosen, rejected, prompt, keys);
        }
        (Some(Part::Text(chosen)), Some(Part::Text(rejected)), prompt) => {
            let prompt = if let Some(Part::Text(text)) = prompt { text } else { String::new() };
            PreferencePair::Texts { prompt, answers: [chosen, rejected] }
        }
        _ => unreachable!("all parts are of the same kind"),
    }))
}

/// Joins a prompt with each of two answers. Without a prompt, it is the messages with which both answers begin.
fn pair_conversations(
    mut chosen: Vec<Message>,
    mut rejected: Vec<Message>,
    prompt: Option<Vec<Message>>,
    keys: &mut Map<String, Value>,
) -> Result<Document<'static>, String> {
    let has_prompt = prompt.is_some();
    let mut prompt = prompt.unwrap_or_else(|| {
        let shared = chosen.iter().zip(&rejected).take_while(|(one, other)| one == other).count();
        rejected.drain(..shared);
        chosen.drain(..shared).collect()
    });
    prompt.iter_mut().for_each(|message| message.train = Some(false));
    let mut conversations = Vec::new();
    for (key, answer) in [("chosen", chosen), ("rejected", rejected)] {
        if !answer.iter().any(Message::is_from_assistant) {
            return Err(match has_prompt {
                true => format!("`{key}` has no message of the assistant"),
                false => format!("`{key}` has no message of the assistant after those that both answers share"),
            });
        }
        let trained = |mut message: Message| {
            message.train = Some(message.is_from_assistant());
            message
        };
        let messages = prompt.iter().cloned().chain(answer.into_iter().map(trained)).collect();
        match conversation_of(messages, &mut keys.clone())? {
            Document::Conversation(conversation) => conversations.push(conversation),
            _ => return Err(format!("`{key}` has no messages")),
        }
    }
    let pair = conversations.try_into().expect("there are two answers");
    Ok(Document::Preference(PreferencePair::Conversations(pair)))
}

/// Reads a prompt or an answer.
fn parse_part(key: &str, value: Value) -> Result<Part, String> {
    match value {
        Value::String(text) => Ok(Part::Text(text)),
        Value::Array(_) => parse_messages(key, value, OPENAI).map(Part::Messages),
        other => Err(format!("`{key}` is {}, expected a text or a list of messages", kind_of(&other))),
    }
}

impl Part {
    /// Returns the kind of the part, in words.
    fn kind(&self) -> &'static str {
        match self {
            Part::Text(_) => "a text",
            Part::Messages(_) => "a list of messages",
        }
    }
}
