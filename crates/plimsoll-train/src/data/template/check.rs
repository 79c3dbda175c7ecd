//! Rendering of single conversations from JSON lines, for comparisons with transformers (`cargo xtask render-chat`).

use super::source::ChatTemplate;
use super::{ChatSettings, ConversationTokenizer, LabelledDocument, NotPrefix, TrainOn, TrainOnEnd};
use crate::data::Tokenizer;
use crate::data::conversation::{Conversation, Message};
use plimsoll_core::Failure;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A conversation with the template and the settings of its rendering.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Folder with `tokenizer.json` and the other files of a tokenizer.
    model: PathBuf,
    /// Value of `data.template`.
    template: Option<String>,
    messages: Vec<Map<String, Value>>,
    #[serde(default)]
    tools: Vec<Value>,
    #[serde(default)]
    variables: Map<String, Value>,
    train_on: Option<TrainOn>,
    train_on_end: Option<TrainOnEnd>,
    not_prefix: Option<NotPrefix>,
    #[serde(default)]
    now: i64,
}

/// The rendered text of a request with its documents.
#[derive(Serialize)]
struct ChatRendering {
    /// Text of the whole conversation.
    text: String,
    /// Text with the generation prompt.
    prompt: Option<String>,
    /// Tokens and labels; `None` if they are refused.
    documents: Option<Vec<Document>>,
    /// Reason why the tokens and labels are refused.
    refused: Option<String>,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Document {
    ids: Vec<i32>,
    labels: Vec<i32>,
}

impl From<LabelledDocument> for Document {
    fn from(document: LabelledDocument) -> Document {
        Document { ids: document.ids, labels: document.labels }
    }
}

/// Renders the conversation of a JSON line, and returns its text, tokens and labels as JSON. Errors of the template are
/// `{"error": ...}`.
///
/// # Errors
/// A line that is no request, or a tokenizer that cannot be used.
pub fn answer_line(line: &str) -> Result<String, Failure> {
    let request: Request = serde_json::from_str(line).map_err(|error| Failure::input(error.to_string()))?;
    let tokenizer = Arc::new(Tokenizer::load(&request.model.join("tokenizer.json"))?);
    let answer = match answer(&request, tokenizer) {
        Ok(answer) => serde_json::to_string(&answer),
        Err(failure) => serde_json::to_string(&serde_json::json!({ "error": failure.message })),
    };
    answer.map_err(|error| Failure::input(error.to_string()))
}

fn answer(request: &Request, tokenizer: Arc<Tokenizer>) -> Result<ChatRendering, Failure> {
    let template = ChatTemplate::find(Path::new(&request.model), request.template.as_deref())?;
    let settings = ChatSettings {
        train_on: request.train_on.unwrap_or_default(),
        train_on_end: request.train_on_end.unwrap_or_default(),
        not_prefix: request.not_prefix.unwrap_or_default(),
        now: request.now,
    };
    let chats = ConversationTokenizer::new(tokenizer, template, settings)?;
    let conversation = Conversation {
        messages: request.messages.iter().map(read_message).collect(),
        tools: request.tools.clone(),
        template_variables: request.variables.clone(),
    };
    let mut session = chats.session();
    let text = session.render(&conversation, false)?;
    let prompt = session.render(&conversation, true).ok();
    let (documents, refused) = match session.tokenize(&conversation) {
        Ok(documents) => (Some(documents.into_iter().map(Document::from).collect()), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let warnings = chats.warnings().iter().map(ToString::to_string).collect();
    Ok(ChatRendering { text, prompt, documents, refused, warnings })
}

/// Returns a message of a request; its key `train` is not shown to the template.
fn read_message(object: &Map<String, Value>) -> Message {
    let mut object = object.clone();
    let train = object.shift_remove("train").and_then(|train| train.as_bool());
    Message { object, train }
}
