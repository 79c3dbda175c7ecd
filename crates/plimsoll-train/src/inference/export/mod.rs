//! Export of a model for other programs. Adapters are merged while the weights are read.
//!
//! | module | content |
//! |---|---|
//! | `directory` | a Hugging Face directory, as it is or in 16 bit |
//! | `gguf` | a GGUF file for llama.cpp and Ollama |

mod directory;
mod gguf;

pub use directory::{DirectoryRequest, ExportedDirectory, export_directory};
pub use gguf::{ExportedFile, GgufRequest, ReplacedType, export_gguf};

use super::merged_model::MergedModel;
use plimsoll_core::Failure;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The bytes that an export has written so far.
#[derive(Clone, Copy, Debug)]
pub struct ExportProgress<'a> {
    /// Name of the tensor that is being written.
    pub tensor: &'a str,
    /// Bytes written.
    pub done_bytes: u64,
    /// Size of the file.
    pub total_bytes: u64,
}

/// Receives the progress of an export.
pub type Observer<'a> = &'a mut (dyn FnMut(ExportProgress<'_>) + Send);

/// Opens the model that a path means, with its adapters. Returns it with a name for the result.
///
/// # Errors
/// A path with no model, or with adapters in addition to `adapter`; directories that do not match.
fn open(path: &Path, adapter: Option<&Path>, ignore_keys: &[String]) -> Result<(MergedModel, String), Failure> {
    let source = find_source(path, adapter)?;
    Ok((MergedModel::open(&source.base, source.adapter.as_deref(), ignore_keys)?, source.name))
}

/// Refuses an output that exists.
fn check_unused(path: &Path) -> Result<(), Failure> {
    if path.symlink_metadata().is_ok() {
        let message = format!("{} already exists", path.display());
        return Err(Failure::input(message).hint("choose an output that does not exist"));
    }
    Ok(())
}

/// The directories that are exported, and the name of the result.
struct Source {
    base: PathBuf,
    adapter: Option<PathBuf>,
    name: String,
}

/// Finds the model and the adapters that a path means: a model directory, a run folder with a trained model or adapters,
/// or a directory of adapters.
fn find_source(path: &Path, adapter: Option<&Path>) -> Result<Source, Failure> {
    let name = std::path::absolute(path).ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let name = name.unwrap_or_else(|| "model".to_owned());
    let trained = path.join("model");
    if !path.join("config.json").is_file() && trained.join("config.json").is_file() {
        return Ok(Source { base: trained, adapter: adapter.map(Path::to_owned), name });
    }
    let own = [path.join("adapter"), path.to_owned()].into_iter().find(|own| own.join("adapter_config.json").is_file());
    match own {
        Some(own) if !path.join("config.json").is_file() => {
            if let Some(adapter) = adapter {
                let message = format!(
                    "{} has adapters of its own; {} cannot be merged as well",
                    path.display(),
                    adapter.display()
                );
                return Err(Failure::input(message).hint("name the base model, and one directory of adapters"));
            }
            Ok(Source { base: base_of(&own)?, adapter: Some(own), name })
        }
        _ => Ok(Source { base: path.to_owned(), adapter: adapter.map(Path::to_owned), name }),
    }
}

/// Returns the directory of the base model that a directory of adapters names.
fn base_of(adapter: &Path) -> Result<PathBuf, Failure> {
    let file = adapter.join("adapter_config.json");
    let config: Value = plimsoll_device::regular_file::read(&file)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default();
    let hint = format!("name it: plimsoll export BASE --adapter {}", adapter.display());
    match config["base_model_name_or_path"].as_str() {
        None => Err(Failure::input(format!("{} names no base model", file.display())).hint(hint)),
        Some(base) if Path::new(base).is_dir() => Ok(base.into()),
        Some(base) => {
            let message = format!("{}: the base model {base} is no directory here", file.display());
            Err(Failure::input(message).hint(hint))
        }
    }
}
