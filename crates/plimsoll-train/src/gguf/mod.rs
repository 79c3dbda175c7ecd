//! GGUF, the file format of llama.cpp and Ollama: one file with the weights, the model's settings and its tokenizer.
//!
//! | module | content |
//! |---|---|
//! | `mix` | [`FileType`]: the type of each tensor in a file |
//! | `metadata` | key-value pairs, and the header of a file |
//! | `architecture` | names and settings of a model, as llama.cpp knows them |
//! | `frequencies`, `family_settings` | scaling of rotary frequencies, and what only some families have |
//! | `tokenizer`, `pre_tokenizer` | a `tokenizer.json` as metadata |
//! | `planned_tensor` | `PlannedTensor`: name, shape and type of a tensor that is to be written |
//! | `writer` | `GgufWriter`: tensors that arrive in pieces, converted and written |
//! | `modelfile` | the Modelfile of Ollama |
//! | `file` | the header of a file that is read |
//! | `import` | a file as a model |
//!
//! The types of elements are in [`crate::block_types`].
//!
//! A file begins with a header: key-value pairs, then name, shape, type and offset of each tensor. The data of the tensors
//! follow, each aligned to 32 bytes. All numbers are little-endian. Shapes are written with the columns first.
//!
//! This module reads no weights. [`crate::inference::export`] streams them to the writer.

mod architecture;
mod error;
mod family_settings;
mod file;
mod frequencies;
mod import;
mod metadata;
mod mix;
mod modelfile;
mod planned_tensor;
mod pre_tokenizer;
#[cfg(test)]
mod testing;
mod tokenizer;
mod writer;

pub(crate) use architecture::{Expression, express};
pub use error::GgufError;
pub(crate) use import::open_directory_or_file;
pub(crate) use metadata::Metadata;
pub use mix::FileType;
pub(crate) use modelfile::modelfile;
pub(crate) use planned_tensor::PlannedTensor;
pub(crate) use tokenizer::{ExpressedTokenizer, TokenizerFolder, TokenizerRequest};
pub(crate) use writer::GgufWriter;
