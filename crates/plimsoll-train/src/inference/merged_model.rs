//! A model directory whose adapters are merged while its tensors are read: the source of
//! `plimsoll export`. The model's weights are streamed; only the adapters stay in memory.

use crate::data::template::{TemplateError, read_own_templates};
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::{MergeFiles, ModelSource};
use crate::files::{AdapterDir, FilesError, ModelDir, ModelWeights, StoredTensor};
use crate::gguf::open_directory_or_file;
use plimsoll_core::{DType, Failure};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{FileSpace, NoObserver, ProgramCall};
use plimsoll_device::probe::Cpu;
use plimsoll_plan::layout::{Layout, lay_out};
use plimsoll_program::models::decoder::{self, STAGING_BYTES};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{ProgramKind, ProgramSet};
use std::path::Path;

/// A model directory, and the adapters that are merged into it.
pub(super) struct MergedModel {
    /// The model. Its end tokens are those that apply with the adapters.
    pub model: ModelDir,
    adapter: Option<AdapterDir>,
    threads: u32,
}

impl MergedModel {
    /// Opens a model and, if given, its adapters. Unknown keys of the model's `config.json` are accepted if they are in
    /// `ignore_keys`.
    ///
    /// # Errors
    /// Directories that cannot be read or do not match.
    pub fn open(base: &Path, adapter: Option<&Path>, ignore_keys: &[String]) -> Result<MergedModel, Failure> {
        let mut model = open_directory_or_file(base, ignore_keys)?;
        let adapter = adapter.map(|adapter| AdapterDir::open(adapter, &model.config));
        let opened = adapter.as_ref().and_then(|adapter| adapter.as_ref().ok());
        let note = opened.and_then(AdapterDir::unknown_base_note);
        let with_note = |error| note.iter().cloned().fold(Failure::from(error), Failure::hint);
        model.require_weights().map_err(with_note)?;
        let adapter = adapter.transpose()?;
        if let Some(end_tokens) = adapter.as_ref().and_then(|adapter| adapter.end_tokens.as_ref())
            && *end_tokens != model.config.eos
        {
            model.config.eos.clone_from(end_tokens);
            model.raw_config["eos_token_id"] = model.config.end_tokens_to_json();
        }
        Ok(MergedModel { model, adapter, threads: Cpu::read().threads_for(None)? })
    }

    /// Returns notes: other parts of the model that are left out, and adapters that name no base model.
    pub fn notes(&self) -> Vec<String> {
        let unknown_base = self.adapter.as_ref().and_then(AdapterDir::unknown_base_note);
        self.model.other_parts_note().into_iter().chain(unknown_base).collect()
    }

    /// Returns the chat template that comes with the adapters; `None` if that of the model applies.
    ///
    /// # Errors
    /// A template that cannot be read or has another form.
    pub fn template(&self) -> Result<Option<String>, TemplateError> {
        let Some(adapter) = &self.adapter else { return Ok(None) };
        Ok(read_own_templates(&adapter.path)?.remove("default"))
    }

    /// Returns the weights of the model.
    ///
    /// # Errors
    /// The directory holds only a configuration.
    pub fn weights(&self) -> Result<&ModelWeights, FilesError> {
        self.model.require_weights()
    }

    /// Returns the tensors that [`MergedModel::stream`] writes, in its order. They have the types of the model's files.
    ///
    /// # Errors
    /// The directory holds only a configuration.
    pub fn tensors(&self) -> Result<Vec<StoredTensor>, FilesError> {
        let parameters = self.weights()?.parameters.iter();
        let stored = parameters.map(|(parameter, entry)| StoredTensor {
            name: parameter.hf_name.clone(),
            dtype: entry.dtype().expect("opened weights are floats"),
            shape: parameter.shape.clone(),
        });
        Ok(stored.collect())
    }

    /// Returns the bytes that [`MergedModel::stream`] holds in memory: the adapters and buffers of a piece.
    ///
    /// # Errors
    /// The directory holds only a configuration.
    pub fn stream_bytes(&self) -> Result<u64, FilesError> {
        match &self.adapter {
            Some(adapter) => Ok(self.program(adapter)?.1.device.bytes),
            None => Ok(STAGING_BYTES),
        }
    }

    /// Writes every tensor to `sink` in pieces, in the order of [`MergedModel::tensors`]. Tensor names have a prefix that
    /// ends with a colon.
    ///
    /// # Errors
    /// A failed read or write, or weights that are NaN or infinite.
    pub fn stream(&self, sink: impl FileSpace) -> Result<(), DeviceFailure> {
        let weights = self.weights()?;
        match &self.adapter {
            Some(adapter) => self.stream_merged(weights, adapter, sink),
            None => Ok(stream_files(weights, sink)?),
        }
    }

    /// Builds the Programs that merge the adapters, with the layout of their arena.
    fn program(&self, adapter: &AdapterDir) -> Result<(ProgramSet, Layout), FilesError> {
        let dtypes: Vec<DType> = self.tensors()?.iter().map(|tensor| tensor.dtype).collect();
        let kernels = Kernels::Cpu { threads: u64::from(self.threads) };
        let set = decoder::merge(&self.model.config, &adapter.lora(0.0, 0), kernels, &dtypes);
        let layout = lay_out(&set);
        Ok((set, layout))
    }

    fn stream_merged(
        &self,
        weights: &ModelWeights,
        adapter: &AdapterDir,
        sink: impl FileSpace,
    ) -> Result<(), DeviceFailure> {
        let (set, layout) = self.program(adapter)?;
        let threads = self.threads as usize;
        let mut device = executor::open(set, layout.placement, DType::F32, threads, None)?;
        let source = || ModelSource::new([weights, &adapter.weights]);
        device.run_observed(ProgramCall::of(ProgramKind::Load), &mut source(), &mut NoObserver)?;
        let mut files = MergeFiles(source(), sink);
        Ok(device.run_observed(ProgramCall::of(ProgramKind::Merge), &mut files, &mut NoObserver)?)
    }
}

/// Writes the tensors of a model without adapters to `sink`, in pieces.
fn stream_files(weights: &ModelWeights, mut sink: impl FileSpace) -> Result<(), Failure> {
    let mut piece = vec![0; STAGING_BYTES as usize];
    for (parameter, entry) in &weights.parameters {
        for offset in (0..entry.bytes).step_by(STAGING_BYTES as usize) {
            let piece = &mut piece[..STAGING_BYTES.min(entry.bytes - offset) as usize];
            weights.files.read_at(entry, offset, piece)?;
            let name = format!("model:{}", parameter.hf_name);
            sink.write(&name, offset, piece).map_err(|error| Failure::input(error.to_string()))?;
        }
    }
    Ok(())
}
