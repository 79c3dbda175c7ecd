//! Errors of GGUF files, with messages and hints.

use crate::block_types::BlockType;
use crate::data::DataError;
use crate::data::template::TemplateError;
use crate::files::FilesError;
use plimsoll_core::Failure;
use std::path::PathBuf;

/// The reason why a model cannot be exported to GGUF, or read from it.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// A part of the model has no form in GGUF.
    #[error("{}: {part}, which a GGUF file of architecture {architecture} cannot express", path.display())]
    Inexpressible {
        /// The file with the part.
        path: PathBuf,
        /// Key and value of the part.
        part: String,
        /// Name of the architecture in llama.cpp.
        architecture: &'static str,
    },
    /// A tensor has values beyond the largest one of its type.
    #[error("tensor `{tensor}` holds values beyond {largest}, the largest that {block_type} stores", largest = block_type.largest())]
    OutOfRange {
        /// Name of the tensor in the file.
        tensor: String,
        /// Type of the tensor in the file.
        block_type: BlockType,
    },
    /// A tensor of the model holds NaN or infinite values.
    #[error("tensor `{tensor}` holds NaN or infinite values")]
    NotFinite {
        /// Name of the tensor in the file.
        tensor: String,
    },
    /// The model has no tokenizer.
    #[error("{}: no such file; a GGUF file needs the tokenizer", path.display())]
    NoTokenizer {
        /// The path of the missing `tokenizer.json`.
        path: PathBuf,
    },
    /// A part of the tokenizer has no form in GGUF.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The part that is refused, with the supported alternatives.
        reason: String,
        /// A hint for the user; empty if there is none.
        hint: String,
    },
    /// The way in which the tokenizer splits text into words has no known name.
    #[error("{}: the pre-tokenizer is not known: {steps}", path.display())]
    UnknownPreTokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// Steps of the pre-tokenizer with their patterns.
        steps: String,
    },
    /// A file is damaged, or no GGUF file.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// A tensor of a file has a type that cannot be read.
    #[error("{}: tensor `{tensor}` is of type {type_name}, which cannot be read", path.display())]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file.
        tensor: String,
        /// Name of the type, or its number.
        type_name: String,
    },
    /// A file holds a model, or a part of one, that Plimsoll does not support.
    #[error("{}: {part}", path.display())]
    UnsupportedModel {
        /// The file.
        path: PathBuf,
        /// Description of the part.
        part: String,
    },
    /// There is no folder for the small files of a model that is read.
    #[error("{}: its tokenizer needs a folder in the cache, and there is none", path.display())]
    NoCache {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The tokenizer or a file beside it is invalid.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The chat template cannot be read.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl From<GgufError> for Failure {
    fn from(error: GgufError) -> Failure {
        let message = error.to_string();
        match error {
            GgufError::Files(error) => error.into(),
            GgufError::Data(error) => error.into(),
            GgufError::Template(error) => error.into(),
            GgufError::OutOfRange { .. } => Failure::input(message).hint("use a wider type: --type bf16 or --type f32"),
            GgufError::NotFinite { .. } => Failure::input(message)
                .hint("the model is damaged, or its training diverged: export an earlier checkpoint"),
            GgufError::NoTokenizer { .. } => {
                Failure::input(message).hint("put the model's tokenizer beside its weights")
            }
            GgufError::Tokenizer { hint, .. } if !hint.is_empty() => Failure::input(message).hint(hint),
            GgufError::UnknownPreTokenizer { .. } => Failure::input(message)
                .hint("if llama.cpp knows it, name it as there: --pre llama-bpe, --pre qwen2, --pre gpt-2, …"),
            GgufError::Malformed { .. } => Failure::input(message).hint("download or write the file again"),
            GgufError::UnsupportedType { .. } => {
                let names = BlockType::ALL.map(BlockType::name).join(", ");
                Failure::input(message).hint(format!("name a file of other types: {names}"))
            }
            GgufError::UnsupportedModel { .. } => {
                Failure::input(message).hint("name the model's Hugging Face directory or hub id, if there is one")
            }
            GgufError::NoCache { .. } => Failure::input(message).hint("set one: PLIMSOLL_CACHE=/path plimsoll ..."),
            GgufError::Inexpressible { .. } | GgufError::Tokenizer { .. } => Failure::input(message),
        }
    }
}
