//! The text of a conversation with the places that are trained, found by rendering its beginnings.
//!
//! The turn of message i is the text by which the rendering of messages 0 to i is longer than that of messages 0 to
//! i − 1 with the generation prompt. The former must be the beginning of the whole rendering.
//!
//! Otherwise the template is not *prefix-preserving*: it leaves out earlier thinking, for example. Then its `generation`
//! blocks mark the turns, or each turn is a text of its own.

use super::TemplateError;
use super::engine::Program;
use super::filters::GENERATION_MARKS;
use super::{ChatSettings, NotPrefix, TemplateWarning, TrainOn};
use crate::data::conversation::{Conversation, Message};
use minijinja::Value;
use serde_json::Map;
use std::collections::BTreeMap;
use std::ops::Range;

/// Names under which a message has its reasoning.
const REASONING_KEYS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A rendered text with the places that are trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MarkedText {
    pub text: String,
    pub turns: Vec<Turn>,
}

/// A trained place of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Bytes of the text.
    pub bytes: Range<usize>,
    /// Whether this is the last turn of the assistant in its conversation.
    pub is_last: bool,
    /// Whether the turn is that of an assistant, which ends with an end token.
    pub from_assistant: bool,
}

/// A conversation that is rendered with a template.
pub(super) struct Rendering<'a, 'p> {
    pub template: &'a str,
    pub program: &'a mut Program<'p>,
    pub conversation: &'a Conversation,
    pub settings: &'a ChatSettings,
    pub has_generation: bool,
    messages: Vec<Value>,
    variables: BTreeMap<String, Value>,
    input_bytes: usize,
}

impl<'a, 'p> Rendering<'a, 'p> {
    /// Prepares the variables of a rendering as transformers does.
    pub fn new(
        template: &'a str,
        program: &'a mut Program<'p>,
        conversation: &'a Conversation,
        settings: &'a ChatSettings,
        tokens: &Map<String, serde_json::Value>,
        has_generation: bool,
    ) -> Rendering<'a, 'p> {
        let messages: Vec<Value> = conversation.messages.iter().map(message_value).collect();
        let tools = match conversation.tools.is_empty() {
            true => Value::from(()),
            false => Value::from_serialize(&conversation.tools),
        };
        let mut variables = BTreeMap::from([("documents".to_owned(), Value::from(()))]);
        for (name, value) in tokens.iter().chain(&conversation.template_variables) {
            variables.insert(name.clone(), Value::from_serialize(value));
        }
        variables.insert("tools".to_owned(), tools);
        let sizes = conversation.messages.iter().map(|message| json_bytes(&message.object));
        let input_bytes =
            sizes.sum::<usize>() + json_bytes(&conversation.tools) + json_bytes(&conversation.template_variables);
        Rendering { template, program, conversation, settings, has_generation, messages, variables, input_bytes }
    }

    /// Renders the first `count` messages, with the generation prompt if `prompt`.
    fn render(&mut self, count: usize, prompt: bool) -> Result<String, TemplateError> {
        let messages = self.messages[..count].to_vec();
        self.render_messages(messages, prompt, false)
    }

    fn render_messages(&mut self, messages: Vec<Value>, prompt: bool, marking: bool) -> Result<String, TemplateError> {
        let mut variables = self.variables.clone();
        variables.insert("messages".to_owned(), Value::from(messages));
        variables.insert("add_generation_prompt".to_owned(), Value::from(prompt));
        let rendered = self.program.render(&Value::from(variables), self.input_bytes, marking);
        rendered.map_err(|error| TemplateError::Render {
            template: self.template.to_owned(),
            line: error.line(),
            reason: super::describe(&error),
        })
    }

    /// Renders the whole conversation without labels.
    pub fn render_whole(&mut self, prompt: bool) -> Result<String, TemplateError> {
        self.render(self.messages.len(), prompt)
    }

    /// Returns the texts of the conversation with their trained turns: one text, or one for each trained turn.
    pub fn mark(&mut self, warn: &mut dyn FnMut(TemplateWarning)) -> Result<Vec<MarkedText>, TemplateError> {
        if self.messages.is_empty() {
            return Err(TemplateError::EmptyConversation);
        }
        let text = self.render_whole(false)?;
        let generated = if self.has_generation { self.generated_spans(&text)? } else { None };
        match self.prefix_turns(&text) {
            Ok(turns) => {
                if let (Some(spans), TrainOn::Assistant) = (&generated, self.settings.train_on) {
                    self.compare(&text, &turns, spans)?;
                }
                Ok(vec![MarkedText { text, turns }])
            }
            Err(error @ TemplateError::NotPrefix { .. }) => {
                if let Some(turns) = generated.and_then(|spans| self.generated_turns(spans)) {
                    warn(TemplateWarning::GenerationBlocks);
                    return Ok(vec![MarkedText { text, turns }]);
                }
                if self.settings.not_prefix == NotPrefix::Refuse {
                    return Err(error);
                }
                warn(TemplateWarning::SplitTurns);
                self.split_turns()
            }
            Err(error) => Err(error),
        }
    }

    /// Returns whether message `at` is trained.
    fn is_trained(&self, at: usize) -> bool {
        let messages = &self.conversation.messages;
        let message = &messages[at];
        let last = messages.iter().rposition(Message::is_from_assistant);
        let prompt = messages.iter().rposition(|message| message.role() == "user");
        message.train.unwrap_or(match self.settings.train_on {
            TrainOn::All => true,
            TrainOn::Assistant => message.is_from_assistant(),
            TrainOn::Last => last == Some(at),
            TrainOn::Completion => message.is_from_assistant() && prompt.is_none_or(|prompt| at > prompt),
        })
    }

    /// Returns the trained messages.
    fn trained(&self) -> Vec<usize> {
        (0..self.messages.len()).filter(|&at| self.is_trained(at)).collect()
    }

    fn turn(&self, at: usize, bytes: Range<usize>) -> Turn {
        let messages = &self.conversation.messages;
        let last = messages.iter().rposition(Message::is_from_assistant);
        Turn { bytes, is_last: last == Some(at), from_assistant: messages[at].is_from_assistant() }
    }

    /// Returns the trained turns of the whole text.
    fn prefix_turns(&mut self, text: &str) -> Result<Vec<Turn>, TemplateError> {
        let trained = self.trained();
        if self.settings.train_on == TrainOn::All && trained.len() == self.messages.len() {
            return Ok(vec![Turn { bytes: 0..text.len(), is_last: false, from_assistant: false }]);
        }
        if self.settings.train_on == TrainOn::All {
            return self.complement_turns(text);
        }
        let mut turns = Vec::with_capacity(trained.len());
        for at in trained {
            let bytes = self.prefix_bytes(text, at)?;
            turns.push(self.turn(at, bytes));
        }
        Ok(turns)
    }

    /// Returns all places of the text but those of messages that are not trained.
    fn complement_turns(&mut self, text: &str) -> Result<Vec<Turn>, TemplateError> {
        let (mut turns, mut start) = (Vec::new(), 0);
        for at in (0..self.messages.len()).filter(|&at| !self.is_trained(at)).collect::<Vec<_>>() {
            let bytes = self.prefix_bytes(text, at)?;
            if start < bytes.start {
                turns.push(Turn { bytes: start..bytes.start, is_last: false, from_assistant: false });
            }
            start = bytes.end;
        }
        if start < text.len() {
            turns.push(Turn { bytes: start..text.len(), is_last: false, from_assistant: false });
        }
        Ok(turns)
    }

    /// Returns the bytes of message `at` in the text of the whole conversation.
    fn prefix_bytes(&mut self, text: &str, at: usize) -> Result<Range<usize>, TemplateError> {
        let is_last = at + 1 == self.messages.len();
        let with = if is_last { text.to_owned() } else { self.render(at + 1, false)? };
        // Some templates write an end token after the last message only.
        let end_token = self.variables.get("eos_token").and_then(|token| token.as_str()).unwrap_or_default();
        let shorter = with.trim_end().strip_suffix(end_token).filter(|_| !end_token.is_empty());
        let end = match (text.starts_with(&with), shorter) {
            (true, _) => with.len(),
            (false, Some(shorter)) if text.starts_with(shorter) => shorter.len(),
            _ => return Err(self.not_prefix(at, "in the middle of a conversation than at its end")),
        };
        let start = self.start_of(at, &with)?;
        match start <= end {
            true => Ok(start..end),
            false => Err(self.not_prefix(at, "in the middle of a conversation than at its end")),
        }
    }

    /// Returns the byte at which message `at` begins in `with`, the rendering that ends with it.
    fn start_of(&mut self, at: usize, with: &str) -> Result<usize, TemplateError> {
        let prompt = self.conversation.messages[at].is_from_assistant();
        match self.render(at, prompt) {
            Ok(before) if with.starts_with(&before) => Ok(before.len()),
            // Many templates cannot render an empty conversation.
            _ if at == 0 => self.probe_start(at, with),
            Ok(_) => Err(self.not_prefix(at, "after a generation prompt than in a conversation")),
            Err(error) => Err(error),
        }
    }

    /// Finds the start of a message's content as the first place that another content changes.
    fn probe_start(&mut self, at: usize, with: &str) -> Result<usize, TemplateError> {
        let mut object = self.conversation.messages[at].object.clone();
        let content = object.get("content").and_then(|content| content.as_str()).unwrap_or_default();
        let other = if content.trim_start().starts_with('x') { "y" } else { "x" };
        object.insert("content".to_owned(), other.into());
        let mut messages = self.messages[..at].to_vec();
        messages.push(message_value(&Message { object, train: None }));
        let probe = self.render_messages(messages, false, false)?;
        Ok(common_length(with, &probe))
    }

    fn not_prefix(&self, at: usize, context: &'static str) -> TemplateError {
        TemplateError::NotPrefix { template: self.template.to_owned(), message: at + 1, context }
    }

    /// Returns a text for each trained turn, which ends with it.
    fn split_turns(&mut self) -> Result<Vec<MarkedText>, TemplateError> {
        let mut texts = Vec::new();
        for at in self.trained() {
            let text = self.render(at + 1, false)?;
            let bytes = self.start_of(at, &text)?..text.len();
            texts.push(MarkedText { turns: vec![self.turn(at, bytes)], text });
        }
        Ok(texts)
    }

    /// Returns the places of the `generation` blocks in the whole text; `None` if the marks do not tell them.
    fn generated_spans(&mut self, text: &str) -> Result<Option<Vec<Range<usize>>>, TemplateError> {
        let marked = self.render_messages(self.messages.clone(), false, true)?;
        let [open, close] = GENERATION_MARKS;
        let (mut plain, mut spans, mut start) = (String::with_capacity(text.len()), Vec::new(), None);
        for c in marked.chars() {
            match (c == open, c == close, start) {
                (true, _, None) => start = Some(plain.len()),
                (_, true, Some(from)) => {
                    spans.push(from..plain.len());
                    start = None;
                }
                (false, false, _) => plain.push(c),
                _ => return Ok(None),
            }
        }
        Ok((plain == text && start.is_none() && !spans.is_empty()).then_some(spans))
    }

    /// Returns the trained turns from the `generation` blocks, if there is one for each message of the assistant.
    fn generated_turns(&self, spans: Vec<Range<usize>>) -> Option<Vec<Turn>> {
        let messages = &self.conversation.messages;
        let authors: Vec<usize> = (0..messages.len()).filter(|&at| messages[at].is_from_assistant()).collect();
        let trained = self.trained();
        if authors.len() != spans.len() || trained.iter().any(|at| !messages[*at].is_from_assistant()) {
            return None;
        }
        let turns = authors.into_iter().zip(spans).filter(|(at, _)| trained.contains(at));
        Some(turns.map(|(at, bytes)| self.turn(at, bytes)).collect())
    }

    /// Checks that both masks agree but for white space and special tokens at the ends of turns.
    fn compare(&self, text: &str, turns: &[Turn], spans: &[Range<usize>]) -> Result<(), TemplateError> {
        let Some(generated) = self.generated_turns(spans.to_vec()) else { return Ok(()) };
        for (turn, block) in turns.iter().zip(&generated) {
            let (turn, block) = (&turn.bytes, &block.bytes);
            let starts_agree = text[turn.start.min(block.start)..turn.start.max(block.start)].trim().is_empty();
            let is_inside = block.start <= turn.end && block.end <= turn.end;
            // What follows a block in its turn is an end token and white space: it has no blank between its letters.
            let ends_agree = is_inside && !text[block.end..turn.end].trim().contains(char::is_whitespace);
            if !(starts_agree && ends_agree) {
                let from = if starts_agree { block.end.min(turn.end) } else { turn.start.min(block.start) };
                let text = text[from..].chars().take(40).collect();
                return Err(TemplateError::MasksDiffer { template: self.template.to_owned(), text });
            }
        }
        Ok(())
    }
}

/// Returns the number of bytes that two texts have in common at their beginning, in whole characters.
fn common_length(left: &str, right: &str) -> usize {
    let pairs = left.char_indices().zip(right.chars());
    let different = pairs.clone().find(|((_, left), right)| left != right);
    different.map_or(left.len().min(right.len()), |((at, _), _)| at)
}

/// Returns a message as transformers shows it to a template: without keys that are null, and with its reasoning under
/// the names that templates read.
fn message_value(message: &Message) -> Value {
    let given = message.object.iter().filter(|(_, value)| !value.is_null());
    let given: Map<String, serde_json::Value> = given.map(|(key, value)| (key.clone(), value.clone())).collect();
    let Some(reasoning) = REASONING_KEYS.iter().find_map(|key| given.get(*key).cloned()) else {
        return Value::from_serialize(&given);
    };
    let mut object = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
    object.extend(given);
    object.insert("reasoning_content".to_owned(), reasoning);
    Value::from_serialize(&object)
}

fn json_bytes(value: &impl serde::Serialize) -> usize {
    serde_json::to_vec(value).map_or(0, |bytes| bytes.len())
}
