//! Hugging Face model and adapter directories: reading and writing of weights, configurations and tokenizer files.
//!
//! Weights are streamed in pieces of the caller's size, never mapped or read whole, so memory holds only the caller's
//! buffers. Files and directories are written under a temporary name, synced and renamed, so a failed write keeps the
//! old version. Tensors with NaN or infinite values are not written. The meaning of names and numbers lives in `plimsoll_program::models`.

mod adapter;
mod adapter_config;
pub mod atomic;
mod error;
mod generation_config;
mod header;
mod model_dir;
mod read;
mod stored_blocks;
mod values;
mod write;

pub use adapter::{AdapterDir, BaseModel, write_adapter_dir};
pub(crate) use adapter_config::ALL_LINEAR;
pub use adapter_config::{AdapterConfig, AdapterConfigError, ModuleNames};
pub use error::{FilesError, HeaderError};
pub use generation_config::GenerationDefaults;
pub(crate) use model_dir::SIDE_FILES;
pub use model_dir::{ModelDir, ModelWeights, OtherParts, ReadConfig, SideFiles, read_config, write_model_dir};
pub use read::{TensorEntry, WeightFiles};
pub use stored_blocks::StoredBlocks;
pub use values::{FileSummary, has_non_finite};
pub(crate) use values::{convert_floats, decode_floats};
pub(crate) use write::reserve_space;
pub use write::{MAX_SHARD_BYTES, StoredTensor, WeightWriter};

#[cfg(test)]
mod tests;
