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
use crate::config::HUB_PREFIX;
use crate::hub::HubId;
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
    /// Bytes that the export writes in all.
    pub total_bytes: u64,
}

/// Receives the progress of an export.
pub type Observer<'a> = &'a mut (dyn FnMut(ExportProgress<'_>) + Send);

/// Refuses an output that exists.
fn check_unused(path: &Path) -> Result<(), Failure> {
    if path.symlink_metadata().is_ok() {
        let message = format!("{} already exists", path.display());
        return Err(Failure::input(message).hint("choose an output that does not exist"));
    }
    Ok(())
}

/// The model that is exported, and its adapters.
#[derive(Clone, Debug)]
pub struct ExportSource {
    /// Directory of the model; a hub id until the caller has fetched it.
    pub base: PathBuf,
    /// PEFT directory whose adapters are merged; `None` for none.
    pub adapter: Option<PathBuf>,
    /// Name of the result.
    pub name: String,
    /// Unknown keys of the model's `config.json` that are accepted.
    pub ignore_config_keys: Vec<String>,
}

impl ExportSource {
    /// Opens the model with its adapters.
    ///
    /// # Errors
    /// Directories that cannot be read or do not match.
    fn open(&self) -> Result<MergedModel, Failure> {
        MergedModel::open(&self.base, self.adapter.as_deref(), &self.ignore_config_keys)
    }

    /// Finds the model and the adapters that a path means: a model directory or a hub id, a run folder with a trained model
    /// or adapters, or a directory of adapters.
    ///
    /// # Errors
    /// Adapters in addition to those of the path, or adapters that name no base model.
    pub fn find(path: &Path, adapter: Option<&Path>) -> Result<ExportSource, Failure> {
        let (base, own, name) = find_source(path, adapter)?;
        Ok(ExportSource { base, adapter: own.or(adapter.map(Path::to_owned)), name, ignore_config_keys: vec![] })
    }
}

/// Returns the model that a path means, the adapters that it has itself, and the name of the result.
fn find_source(path: &Path, adapter: Option<&Path>) -> Result<(PathBuf, Option<PathBuf>, String), Failure> {
    let name = std::path::absolute(path).ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let name = name.unwrap_or_else(|| "model".to_owned());
    let trained = path.join("model");
    if !path.join("config.json").is_file() && trained.join("config.json").is_file() {
        return Ok((trained, None, name));
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
            Ok((base_of(&own)?, Some(own), name))
        }
        _ => Ok((path.to_owned(), None, name)),
    }
}

/// Returns the base model that a directory of adapters names: its directory, or its hub id.
fn base_of(adapter: &Path) -> Result<PathBuf, Failure> {
    let file = adapter.join("adapter_config.json");
    let config: Value = plimsoll_device::regular_file::read(&file)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default();
    let hint = format!("name it: plimsoll export BASE --adapter {}", adapter.display());
    match config["base_model_name_or_path"].as_str() {
        None => Err(Failure::input(format!("{} names no base model", file.display())).hint(hint)),
        Some(base) if Path::new(base).exists() => Ok(base.into()),
        Some(base) => {
            let revision = config["revision"].as_str().map(|revision| format!("@{revision}")).unwrap_or_default();
            let id = format!("{HUB_PREFIX}{base}{revision}");
            if Path::new(base).is_absolute() || id.parse::<HubId>().is_err() {
                let message = format!("{}: the base model {base} is no directory here", file.display());
                return Err(Failure::input(message).hint(hint));
            }
            Ok(id.into())
        }
    }
}
