//! Chat templates: conversations to tokens with labels.
//!
//! A template is a program in the language Jinja2 that writes a conversation as text. It comes from a model's folder,
//! which need not be trusted. `engine` renders it as transformers does, within limits of work and memory.
//!
//! | module | content |
//! |---|---|
//! | `source` | finding a template, and its variables |
//! | `tags` | changes of its text before parsing |
//! | `engine`, `meter` | rendering, and its limits |
//! | `operators`, `methods`, `filters` | Python's meaning of operators, methods and filters |
//! | `python_text`, `json_text`, `clock` | texts, JSON and dates as Python writes them |
//! | `turns` | the rendered text with its trained turns |
//! | `labels` | tokens and their labels |
//! | `check` | rendering of single conversations, for comparisons with transformers |

pub mod check;
mod clock;
mod engine;
mod failure;
mod filters;
mod json_text;
mod labels;
mod meter;
mod methods;
mod operators;
mod python_text;
mod source;
mod tags;
#[cfg(test)]
mod tests;
mod turns;

pub use super::template_error::{TemplateError, TemplateWarning};
pub(crate) use source::{ChatTemplate, read_own_templates, read_template};

use super::IGNORED_LABEL;
use super::conversation::Conversation;
use super::guard;
use super::tokenizer::Tokenizer;
pub use crate::config::{NotPrefix, TrainOn, TrainOnEnd};
use engine::{Engine, Program};
use labels::TokenMarkers;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use turns::{MarkedText, Rendering};

/// Choices of a run about its conversations. The token cache depends on all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChatSettings {
    /// Messages that are trained.
    pub train_on: TrainOn,
    /// End-of-turn tokens that are trained.
    pub train_on_end: TrainOnEnd,
    /// Handling of templates that are not prefix-preserving.
    pub not_prefix: NotPrefix,
    /// Moment that `strftime_now` writes, in seconds from the beginning of 1970 (UTC).
    pub now: i64,
}

/// The tokens of a document with their labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LabelledDocument {
    /// Token ids.
    pub ids: Vec<i32>,
    /// The token itself where it is predicted, else −100. Not shifted.
    pub labels: Vec<i32>,
}

impl LabelledDocument {
    /// Returns whether a token after the first has a label. No position predicts the first.
    pub(crate) fn has_target(&self) -> bool {
        self.labels.iter().skip(1).any(|&label| label != IGNORED_LABEL)
    }
}

/// Turns conversations into tokens with labels, by a chat template and a tokenizer.
pub(crate) struct ConversationTokenizer {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    settings: ChatSettings,
    engine: Engine,
    markers: TokenMarkers,
    warnings: Mutex<BTreeSet<TemplateWarning>>,
    end_tokens: Mutex<BTreeSet<u32>>,
}

impl ConversationTokenizer {
    /// Checks that the templates can be parsed, and looks up the special tokens.
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        template: ChatTemplate,
        settings: ChatSettings,
    ) -> Result<ConversationTokenizer, TemplateError> {
        let engine = Engine::new(settings.now);
        let markers = TokenMarkers::new(&tokenizer, template.variables());
        let mut warnings = BTreeSet::new();
        for named in template.templates() {
            compile(&engine, named)?;
            warnings.extend(markers.split_markers(&tokenizer, &named.prepared.text));
        }
        let (warnings, end_tokens) = (Mutex::new(warnings), Mutex::default());
        Ok(ConversationTokenizer { tokenizer, template, settings, engine, markers, warnings, end_tokens })
    }

    /// Returns a session, which renders conversations one after another in one thread.
    pub(crate) fn session(&self) -> ChatSession<'_> {
        ChatSession { chat: self, programs: HashMap::new() }
    }

    /// Returns the warnings so far, each once.
    pub(crate) fn warnings(&self) -> Vec<TemplateWarning> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// Returns the trained tokens so far that end a turn of the assistant.
    pub(crate) fn end_tokens(&self) -> Vec<u32> {
        self.end_tokens.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    fn warn(&self, warning: TemplateWarning) {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).insert(warning);
    }
}

/// A thread's use of a [`ConversationTokenizer`], with the templates that it has compiled.
pub(crate) struct ChatSession<'a> {
    chat: &'a ConversationTokenizer,
    /// Compiled templates by name.
    programs: HashMap<&'a str, Program<'a>>,
}

impl ChatSession<'_> {
    /// Returns the documents of a conversation: usually one, and one for each turn of the assistant if the template is
    /// not prefix-preserving and the settings allow to split it.
    ///
    /// # Errors
    /// A template that fails on this conversation, or a text that the tokenizer cannot encode.
    pub(crate) fn tokenize(&mut self, conversation: &Conversation) -> Result<Vec<LabelledDocument>, TemplateError> {
        let texts = self.mark_turns(conversation)?;
        texts.iter().map(|text| self.label(text)).collect()
    }

    /// Renders a conversation and finds its trained turns.
    fn mark_turns(&mut self, conversation: &Conversation) -> Result<Vec<MarkedText>, TemplateError> {
        let chat = self.chat;
        self.with_rendering(conversation, |rendering| rendering.mark(&mut |warning| chat.warn(warning)))
    }

    /// Returns the text of a conversation with the beginning of the assistant's next turn.
    ///
    /// # Errors
    /// A template that fails on this conversation.
    pub(crate) fn render_prompt(&mut self, conversation: &Conversation) -> Result<String, TemplateError> {
        self.render(conversation, true)
    }

    /// Renders a conversation, with the generation prompt if `prompt`.
    fn render(&mut self, conversation: &Conversation, prompt: bool) -> Result<String, TemplateError> {
        self.with_rendering(conversation, |rendering| rendering.render_whole(prompt))
    }

    /// Prepares the rendering of a conversation for `work`. A panic of the engine becomes an error.
    fn with_rendering<T>(
        &mut self,
        conversation: &Conversation,
        work: impl FnOnce(&mut Rendering) -> Result<T, TemplateError>,
    ) -> Result<T, TemplateError> {
        let chat = self.chat;
        let named = chat.template.choose(!conversation.tools.is_empty())?;
        let mut program = match self.programs.remove(named.name.as_str()) {
            Some(program) => program,
            None => compile(&chat.engine, named)?,
        };
        let (tokens, has_generation) = (chat.template.variables(), named.prepared.has_generation);
        let rendering = || {
            let name = &named.name;
            work(&mut Rendering::new(name, &mut program, conversation, &chat.settings, tokens, has_generation))
        };
        let result = guard::catch_panic(rendering).map_err(|panic| {
            let reason = format!("the library `minijinja` fails: {panic}");
            TemplateError::Render { template: named.name.clone(), line: None, reason }
        })?;
        self.programs.insert(&named.name, program);
        result
    }

    /// Tokenizes a text and labels its tokens.
    fn label(&self, text: &MarkedText) -> Result<LabelledDocument, TemplateError> {
        let chat = self.chat;
        let tokens = chat.tokenizer.encode_placed(&text.text).map_err(|reason| TemplateError::Encode { reason })?;
        chat.markers.check(&tokens).into_iter().for_each(|warning| chat.warn(warning));
        let labelled = chat.markers.label(text, &tokens, chat.settings.train_on_end);
        if labelled.lacks_end {
            chat.warn(TemplateWarning::NoEndToken);
        }
        chat.end_tokens.lock().unwrap_or_else(PoisonError::into_inner).extend(labelled.end_tokens);
        Ok(labelled.document)
    }
}

/// Compiles a template; a panic of the parser becomes an error.
fn compile<'a>(engine: &Engine, named: &'a source::NamedTemplate) -> Result<Program<'a>, TemplateError> {
    let compiled = guard::catch_panic(|| engine.compile(&named.name, &named.prepared.text));
    let syntax = |line, reason| TemplateError::Syntax { template: named.name.clone(), line, reason };
    compiled
        .map_err(|panic| syntax(None, format!("the library `minijinja` fails: {panic}")))?
        .map_err(|error| syntax(error.line(), describe(&error)))
}

/// Returns the message of an error with that of its cause, without the place.
fn describe(error: &minijinja::Error) -> String {
    let own = match (error.kind(), error.detail()) {
        (minijinja::ErrorKind::OutOfFuel, _) => "the template takes too many steps".to_owned(),
        (minijinja::ErrorKind::InvalidOperation | minijinja::ErrorKind::SyntaxError, Some(detail)) => detail.to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    cause.map_or(own.clone(), |cause| format!("{own}: {}", describe(cause)))
}
