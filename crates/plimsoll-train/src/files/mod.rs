//! Hugging Face directories on disk: reading and writing weights, configurations and what lies
//! beside them.
//!
//! Nothing is mapped and nothing is read whole: weights stream in pieces of the caller's choice, so
//! what is in memory is what the caller's buffers hold. Nothing that was good is lost: files and
//! directories are written aside, synced, and renamed. What the names and numbers mean is
//! `plimsoll_program::models`.

mod adapter;
pub mod atomic;
mod error;
mod header;
mod model_dir;
mod read;
mod write;

pub use adapter::{AdapterDir, write_adapter_dir};
pub use error::{FilesError, HeaderError};
pub use model_dir::{ModelDir, ModelWeights, copy_side_files, read_config, write_model_dir};
pub use read::{Entry, WeightFiles};
pub use write::{MAX_SHARD_BYTES, StoredTensor, WeightWriter};

#[cfg(test)]
mod tests;
