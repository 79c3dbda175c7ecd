//! Prompts of text generation: texts and conversations, from the command line or from files, as tokens.

use super::containers::{ByteCounter, PlacedRecord, RecordReader};
use super::conversation::{Conversation, Prompt};
use super::error::{DataError, SourceLocation};
use super::formats::parse_prompt;
use super::template::{ChatSettings, ChatTemplate, ConversationTokenizer};
use super::tokenizer::Tokenizer;
use super::{NotPrefix, TrainOn, TrainOnEnd};
use plimsoll_device::regular_file;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A prompt of a file, with its record.
#[derive(Clone, Debug)]
pub(crate) struct PromptRecord {
    pub location: SourceLocation,
    pub prompt: Prompt,
    /// All keys of the record.
    pub keys: Map<String, Value>,
}

/// Turns prompts into tokens, conversations by a chat template.
pub(crate) struct PromptEncoder {
    tokenizer: Arc<Tokenizer>,
    /// `None` if only texts are expected.
    chat: Option<ConversationTokenizer>,
}

impl PromptEncoder {
    /// Opens the `tokenizer.json` in `file`.
    ///
    /// # Errors
    /// A tokenizer that cannot be used.
    pub fn for_texts(file: &Path) -> Result<PromptEncoder, DataError> {
        Ok(PromptEncoder { tokenizer: Arc::new(Tokenizer::load(file)?), chat: None })
    }

    /// Opens the `tokenizer.json` in `file` with a chat template: a file, the name of a built-in one, or the model's own.
    ///
    /// # Errors
    /// A tokenizer or template that cannot be used, or no template.
    pub fn for_conversations(file: &Path, template: Option<&str>) -> Result<PromptEncoder, DataError> {
        let failed = |source| DataError::Template { location: None, source };
        let PromptEncoder { tokenizer, .. } = PromptEncoder::for_texts(file)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let settings = ChatSettings {
            train_on: TrainOn::default(),
            train_on_end: TrainOnEnd::default(),
            not_prefix: NotPrefix::default(),
            now: now as i64,
        };
        let template = ChatTemplate::find(file.parent().unwrap_or(Path::new(".")), template).map_err(failed)?;
        let chat = ConversationTokenizer::new(Arc::clone(&tokenizer), template, settings).map_err(failed)?;
        Ok(PromptEncoder { tokenizer, chat: Some(chat) })
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the tokens of a text with the special tokens that precede every text, or those of a conversation, which has
    /// the special tokens of its template.
    ///
    /// # Errors
    /// A conversation that the template refuses, and a text that the tokenizer cannot encode.
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, DataError> {
        match prompt {
            Prompt::Text(text) => self.tokenizer.encode(text),
            Prompt::Conversation(conversation) => {
                let failed = |source| DataError::Template { location: None, source };
                let chat = self.chat.as_ref().expect("the encoder was opened for conversations");
                let text = chat.session().render_prompt(conversation).map_err(failed)?;
                let encoded = self.tokenizer.encode_whole(&text);
                encoded.map_err(|reason| DataError::Encode { location: None, reason })
            }
        }
    }
}

/// Reads a conversation from a JSON file: a list of messages, or an object with `messages` and optional `tools`.
///
/// # Errors
/// A file of another form, and a conversation whose last message is from the assistant.
pub(crate) fn read_conversation(file: &Path) -> Result<Conversation, DataError> {
    let bytes = regular_file::read(file).map_err(DataError::io("read", file))?;
    let malformed = |reason| DataError::MalformedPrompt { location: SourceLocation::whole(file), reason };
    let value: Value = serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))?;
    let keys = match value {
        Value::Array(messages) => Map::from_iter([("messages".to_owned(), Value::Array(messages))]),
        Value::Object(keys) => keys,
        _ => return Err(malformed("expected a list of messages, or an object with `messages`".to_owned())),
    };
    match parse_prompt(&keys).map_err(malformed)? {
        Prompt::Conversation(conversation) => Ok(*conversation),
        Prompt::Text(_) => Err(malformed("missing field `messages`".to_owned())),
    }
}

/// Reads the prompts of a data file: records with `messages`, or with `prompt`, a text or a list of messages.
///
/// # Errors
/// The first record that is none, and a file without records.
pub(crate) fn read_prompts(file: &Path) -> Result<Vec<PromptRecord>, DataError> {
    let mut reader = RecordReader::open(file, &ByteCounter::default())?;
    let mut prompts = Vec::new();
    while let Some(PlacedRecord { place, record }) = reader.read_next()? {
        let location = SourceLocation { file: file.to_owned(), place };
        let parsed = record.parse().and_then(|keys: Map<String, Value>| Ok((parse_prompt(&keys)?, keys)));
        match parsed {
            Ok((prompt, keys)) => prompts.push(PromptRecord { location, prompt, keys }),
            Err(reason) => return Err(DataError::MalformedPrompt { location, reason }),
        }
    }
    if prompts.is_empty() {
        let location = SourceLocation::whole(file);
        return Err(DataError::MalformedPrompt { location, reason: "it has no prompt".to_owned() });
    }
    Ok(prompts)
}
