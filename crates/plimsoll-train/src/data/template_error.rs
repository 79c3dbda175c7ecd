//! Errors and warnings of chat templates, with their hints.

use plimsoll_core::Failure;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// An error while a chat template is found, parsed or rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model has no chat template of its own.
    #[error("{} has no chat template", folder.display())]
    NoTemplate {
        /// Folder of the model.
        folder: PathBuf,
    },
    /// `data.template` names neither a file nor a built-in template.
    #[error("data.template: `{name}` is neither a file nor a built-in chat template")]
    UnknownTemplate {
        /// The value of `data.template`.
        name: String,
    },
    /// The model has several named templates, and none that serves this conversation.
    #[error("{} names no template `default`, only {}", file.display(), names.join(", "))]
    NoDefault {
        /// File or folder of the templates.
        file: PathBuf,
        /// Names of the templates.
        names: Vec<String>,
    },
    /// Reading a file failed.
    #[error("cannot read {}: {source}", file.display())]
    Io {
        /// Path of the file.
        file: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A file is no text, or no JSON of the expected form.
    #[error("{} cannot be used: {reason}", file.display())]
    InvalidFile {
        /// Path of the file.
        file: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// A template is longer than the limit.
    #[error("the chat template {template} has {bytes} bytes; the limit is {limit}")]
    TooLong {
        /// Name or path of the template.
        template: String,
        /// Size of the template.
        bytes: usize,
        /// The largest size.
        limit: usize,
    },
    /// The template writes earlier turns of an answer differently, so that the answer is no single document.
    #[error(
        "the chat template writes earlier turns of this answer differently, which gives {documents} samples; expected one"
    )]
    SplitAnswer {
        /// Number of documents.
        documents: usize,
    },
    /// The template cannot be parsed.
    #[error("chat template {}: {reason}", place(template, *line))]
    Syntax {
        /// Name or path of the template.
        template: String,
        /// Line in the template, from 1 on; `None` if unknown.
        line: Option<usize>,
        /// The message of the parser.
        reason: String,
    },
    /// The template cannot be rendered with this conversation.
    #[error("chat template {}: {reason}", place(template, *line))]
    Render {
        /// Name or path of the template.
        template: String,
        /// Line in the template, from 1 on; `None` if unknown.
        line: Option<usize>,
        /// The message of the template or of the engine.
        reason: String,
    },
    /// The conversation has no message.
    #[error("the conversation has no message")]
    EmptyConversation,
    /// A rendering of the first messages is not the beginning of the whole rendering. `data.not_prefix = "refuse"`
    /// forbids this, or a turn has no place.
    #[error("chat template {template} writes message {message} differently {context}")]
    NotPrefix {
        /// Name or path of the template.
        template: String,
        /// Number of the message, from 1 on.
        message: usize,
        /// Circumstance in which it differs.
        context: &'static str,
    },
    /// The mask of the template's `generation` blocks differs from that of prefix rendering.
    #[error("chat template {template}: its generation blocks and the turns of the assistant differ at {text:?}")]
    MasksDiffer {
        /// Name or path of the template.
        template: String,
        /// Text from the first difference on.
        text: String,
    },
    /// The tokenizer cannot encode the rendered text.
    #[error("tokenizer error: {reason}")]
    Encode {
        /// The message of the tokenizer.
        reason: String,
    },
}

fn place(template: &str, line: Option<usize>) -> String {
    line.map_or_else(|| template.to_owned(), |line| format!("{template}:{line}"))
}

impl TemplateError {
    /// Returns what to do about the error; `None` if its message says it.
    pub(crate) fn hint(&self) -> Option<String> {
        let hint = match self {
            TemplateError::NoTemplate { .. } => {
                format!("name a file or a built-in template: data.template = \"chatml\" ({})", super::builtin_template::names())
            }
            TemplateError::UnknownTemplate { .. } => format!("built-in templates: {}", super::builtin_template::names()),
            TemplateError::NoDefault { .. } => "set data.template to the file of one template".to_owned(),
            TemplateError::NotPrefix { .. } => {
                "set data.not_prefix = \"split\" to train each turn as the end of its conversation, or another data.template"
                    .to_owned()
            }
            TemplateError::MasksDiffer { .. } => {
                "correct the generation blocks in a copy of the template, and name it in data.template".to_owned()
            }
            TemplateError::SplitAnswer { .. } => {
                "end each answer with one message of the assistant, or name another template in data.template".to_owned()
            }
            TemplateError::Syntax { .. } | TemplateError::TooLong { .. } => {
                "correct the template, or name another one in data.template".to_owned()
            }
            TemplateError::Render { .. } => {
                "correct the conversation or the template, or name another template in data.template".to_owned()
            }
            _ => return None,
        };
        Some(hint)
    }
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Failure {
        let failure = Failure::input(error.to_string());
        error.hint().into_iter().fold(failure, Failure::hint)
    }
}

/// A property of a template that changes what the model learns. Each is said once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TemplateWarning {
    /// The template is not prefix-preserving: each turn of the assistant is a sample of its own.
    SplitTurns,
    /// The template's `generation` blocks mark the turns, because it is not prefix-preserving.
    GenerationBlocks,
    /// The tokenizer would begin a text with this token, and the template does not write it.
    NoBeginToken(String),
    /// A text begins with two begin tokens.
    RepeatedBeginToken(String),
    /// A trained turn does not end with a special token.
    NoEndToken,
    /// The template writes a marker that is no token of the tokenizer.
    SplitMarker(String),
}

impl fmt::Display for TemplateWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateWarning::SplitTurns => f.write_str(
                "the chat template writes earlier turns differently from the last one: each turn of the assistant is a \
                 sample of its own (data.not_prefix = \"split\")",
            ),
            TemplateWarning::GenerationBlocks => {
                f.write_str("the chat template is not prefix-preserving: its generation blocks mark the trained turns")
            }
            TemplateWarning::NoBeginToken(token) => {
                write!(f, "the tokenizer begins texts with {token}, and the chat template does not write it")
            }
            TemplateWarning::RepeatedBeginToken(token) => write!(f, "conversations begin with {token} twice"),
            TemplateWarning::NoEndToken => {
                f.write_str("turns of the assistant do not end with a special token: the model does not learn to stop")
            }
            TemplateWarning::SplitMarker(marker) => {
                write!(f, "the chat template writes {marker}, which is no token of the tokenizer")
            }
        }
    }
}
