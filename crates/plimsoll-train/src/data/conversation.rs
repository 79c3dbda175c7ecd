//! Conversations as the data files hold them, in one layout: that of the `messages` format, which chat templates expect.

use serde_json::{Map, Value};

/// A conversation of a data file.
///
/// Readers of other layouts (`sharegpt`, `alpaca`, `prompt_completion`) translate into this one. Each message is a JSON
/// object with `role` and usually `content`; further keys (`tool_calls`, `name`, `reasoning_content`) are kept as found,
/// because templates read them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Conversation {
    /// The messages in order, at least one.
    pub messages: Vec<Message>,
    /// Tools that the model may call, as JSON schemas; empty if the record has none.
    pub tools: Vec<Value>,
    /// Further variables of the template, from the key `chat_template_kwargs` of the record.
    pub template_variables: Map<String, Value>,
}

/// A message of a [`Conversation`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Message {
    /// The message as the template sees it, with the normalized role under `role`.
    pub object: Map<String, Value>,
    /// Whether the record asks to train on this message (`true`), or not to (`false`): its key `train` or `weight`.
    /// `None` leaves the choice to `data.train_on`.
    pub train: Option<bool>,
}

impl Message {
    /// Returns a message with a text.
    pub fn new(role: &str, content: String) -> Message {
        let object = [("role", role.to_owned()), ("content", content)];
        Message { object: object.map(|(key, text)| (key.to_owned(), text.into())).into_iter().collect(), train: None }
    }

    /// Returns the normalized role: `system`, `developer`, `user`, `assistant`, `tool`, or another word of the file.
    pub fn role(&self) -> &str {
        self.object.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns whether the model wrote this message.
    pub fn is_from_assistant(&self) -> bool {
        self.role() == "assistant"
    }
}

/// A prompt, before it is tokenized.
#[derive(Clone, Debug)]
pub(crate) enum Prompt {
    /// A text that the model continues.
    Text(String),
    /// A conversation in which the assistant speaks next.
    Conversation(Box<Conversation>),
}
