//! Export to a GGUF file, for llama.cpp and Ollama. Adapters are merged while the weights are read, so memory holds the
//! adapters and a few rows of a tensor.

use super::{ExportProgress, ExportSource, Observer, check_unused};
use crate::block_types::BlockType;
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::strip_group;
use crate::files::{FilesError, GenerationDefaults, atomic};
use crate::gguf::{
    ExpressedTokenizer, Expression, FileType, GgufError, GgufWriter, Metadata, PlannedTensor, TokenizerFolder,
    TokenizerRequest, express, modelfile,
};
use crate::inference::merged_model::MergedModel;
use plimsoll_core::{Bytes, Failure, format_count};
use plimsoll_device::device::FileSpace;
use plimsoll_program::models::decoder::STAGING_BYTES;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

/// Version of the block formats, a key of every file with quantized tensors.
const QUANTIZATION_VERSION: u32 = 2;

/// A request to export a model to a GGUF file.
#[derive(Clone, Debug)]
pub struct GgufRequest {
    /// The model and its adapters, in local directories.
    pub source: ExportSource,
    /// Path of the file, which must not exist yet.
    pub out: PathBuf,
    /// Type of the file.
    pub file_type: FileType,
    /// Name of the pre-tokenizer in llama.cpp; `None` if it is to be recognized.
    pub pre: Option<String>,
    /// Path of a Modelfile of Ollama, which must not exist yet; `None` for none.
    pub modelfile: Option<PathBuf>,
}

/// A tensor whose columns the blocks of its type do not divide.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReplacedType {
    /// Name of the tensor in the file.
    pub tensor: String,
    /// Type that the file type asks for, such as `q4_k`.
    pub wanted: String,
    /// Type of the tensor in the file, such as `q5_0`.
    pub used: String,
}

/// An exported file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExportedFile {
    /// Path of the file.
    pub file: PathBuf,
    /// Size of the file.
    pub bytes: Bytes,
    /// Type of the file, such as `q4_k_m`.
    pub file_type: String,
    /// Name of the model's architecture in llama.cpp.
    pub architecture: String,
    /// Kind of the tokenizer in llama.cpp: `gpt2` or `llama`.
    pub tokenizer: String,
    /// Name of the pre-tokenizer in llama.cpp.
    pub pre_tokenizer: String,
    /// Number of tensors of each type.
    pub tensors_by_type: BTreeMap<String, u64>,
    /// Tensors that have another type than the file type asks for, because of their columns.
    pub replaced_types: Vec<ReplacedType>,
    /// Predicted peak of the buffers in host memory: adapters, rows in conversion, and the header.
    pub predicted_peak_bytes: Bytes,
    /// Path of the Modelfile; absent if none was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modelfile: Option<PathBuf>,
    /// Properties of the model that the file does not have, and that rarely matter.
    pub notes: Vec<String>,
}

/// Exports a model to a GGUF file, and calls `observe` after each piece. Everything that can be refused is checked before the file is
/// created, except for values that its types cannot store.
///
/// # Errors
/// A model that cannot be read or that GGUF cannot express, an output that exists, or a full disk.
pub fn export_gguf(request: &GgufRequest, observe: Observer) -> Result<ExportedFile, Failure> {
    for path in [Some(&request.out), request.modelfile.as_ref()].into_iter().flatten() {
        check_unused(path)?;
    }
    if request.modelfile.as_ref() == Some(&request.out) {
        return Err(Failure::input(format!("{} cannot be both the model and the Modelfile", request.out.display())));
    }
    let merged = request.source.open()?;
    let weights = merged.weights()?;
    let config = &merged.model.config;
    let Expression { architecture, metadata: settings, tensors, rope_divisors, note } =
        express(&merged.model, weights, request.file_type)?;
    let template = merged.template()?;
    let folder = TokenizerFolder::open(&merged.model.path)?;
    let tokenizer_request = TokenizerRequest {
        vocab: config.vocab,
        end_tokens: &config.eos,
        pre: request.pre.as_deref(),
        template: template.as_deref(),
    };
    let ExpressedTokenizer { metadata: tokens, kind, pre, mut notes } = folder.express(&tokenizer_request)?;
    notes.splice(..0, merged.notes().into_iter().chain(note));
    let stops = folder.token_texts(&config.eos);
    let defaults = GenerationDefaults::read(&merged.model.path)?;
    drop(folder);
    let mut metadata = general(architecture, &request.source.name, request.file_type);
    metadata.append(settings);
    metadata.append(tokens);
    let header_bytes = 2 * metadata.encode(&tensors).len() as u64;
    let conversion = tensors.iter().map(|tensor| tensor.conversion_bytes(STAGING_BYTES)).max().unwrap_or(0);
    let predicted_peak_bytes = Bytes(merged.stream_bytes()? + conversion + header_bytes);
    let bytes = atomic::fill_file(&request.out, |file| {
        let writer = GgufWriter::create(file, &request.out, &metadata, &tensors)?;
        write_tensors(&merged, writer, &rope_divisors, observe)
    })
    .map_err(ExportFailure::into_failure)?;
    if let Some(path) = &request.modelfile {
        atomic::write_file(path, modelfile(path, &request.out, &defaults, &stops).as_bytes())?;
    }
    Ok(ExportedFile {
        file: request.out.clone(),
        bytes: Bytes(bytes),
        file_type: request.file_type.name().to_owned(),
        architecture: architecture.to_owned(),
        tokenizer: kind.to_owned(),
        pre_tokenizer: pre,
        tensors_by_type: count_types(&tensors),
        replaced_types: replaced_types(&tensors),
        predicted_peak_bytes,
        modelfile: request.modelfile.clone(),
        notes,
    })
}

/// Writes all tensors and returns the size of the file.
fn write_tensors(
    merged: &MergedModel,
    mut writer: GgufWriter,
    rope_divisors: &[f32],
    observe: Observer,
) -> Result<u64, ExportFailure> {
    let mut error = None;
    let sink = GgufSink { writer: &mut writer, observe, error: &mut error };
    let streamed = merged.stream(sink);
    if let Some(error) = error {
        return Err(ExportFailure::Gguf(error));
    }
    streamed.map_err(ExportFailure::Device)?;
    if !rope_divisors.is_empty() {
        writer.write_computed(rope_divisors).map_err(ExportFailure::Gguf)?;
    }
    let bytes = writer.file_bytes();
    writer.finish();
    Ok(bytes)
}

/// The failure of an export while it writes.
enum ExportFailure {
    Files(FilesError),
    Gguf(GgufError),
    Device(DeviceFailure),
}

impl From<FilesError> for ExportFailure {
    fn from(error: FilesError) -> ExportFailure {
        ExportFailure::Files(error)
    }
}

impl From<GgufError> for ExportFailure {
    fn from(error: GgufError) -> ExportFailure {
        ExportFailure::Gguf(error)
    }
}

impl ExportFailure {
    fn into_failure(self) -> Failure {
        match self {
            ExportFailure::Files(error) => error.into(),
            ExportFailure::Gguf(error) => error.into(),
            ExportFailure::Device(failure) => failure.into(),
        }
    }
}

/// Write-only target that writes tensors to a GGUF file. It keeps the error that a Program reports as a text only.
struct GgufSink<'a, 'w> {
    writer: &'a mut GgufWriter<'w>,
    observe: Observer<'a>,
    error: &'a mut Option<GgufError>,
}

impl FileSpace for GgufSink<'_, '_> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is write-only")))
    }

    fn write(&mut self, tensor: &str, _: u64, from: &[u8]) -> io::Result<()> {
        if let Err(error) = self.writer.write(strip_group(tensor), from) {
            let described = io::Error::other(error.to_string());
            *self.error = Some(error);
            return Err(described);
        }
        let (done_bytes, total_bytes) = (self.writer.written_bytes(), self.writer.file_bytes());
        let tensor = self.writer.current().map_or("", |tensor| &tensor.name);
        (self.observe)(ExportProgress { tensor, done_bytes, total_bytes });
        Ok(())
    }
}

/// Returns the general keys of a file.
fn general(architecture: &str, name: &str, file_type: FileType) -> Metadata {
    let mut metadata = Metadata::default();
    metadata.push("general.architecture", architecture);
    metadata.push("general.type", "model");
    metadata.push("general.name", name);
    metadata.push("general.file_type", file_type.id());
    metadata.push("general.quantization_version", QUANTIZATION_VERSION);
    metadata
}

/// Returns the number of tensors of each type.
fn count_types(tensors: &[PlannedTensor]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for tensor in tensors {
        *counts.entry(tensor.block_type.name().to_owned()).or_default() += 1;
    }
    counts
}

/// Returns the tensors with another type than the file type asks for.
fn replaced_types(tensors: &[PlannedTensor]) -> Vec<ReplacedType> {
    let replaced = tensors.iter().filter_map(|tensor| Some((tensor, tensor.replaced?)));
    let names = |(tensor, wanted): (&PlannedTensor, BlockType)| ReplacedType {
        tensor: tensor.name.clone(),
        wanted: wanted.name().to_owned(),
        used: tensor.block_type.name().to_owned(),
    };
    replaced.map(names).collect()
}

impl ExportedFile {
    /// Returns a sentence about tensors that have another type than the file type asks for; `None` if all have it.
    pub fn replaced_note(&self) -> Option<String> {
        let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for ReplacedType { wanted, used, .. } in &self.replaced_types {
            *counts.entry((wanted, used)).or_default() += 1;
        }
        let parts: Vec<String> =
            counts.iter().map(|((wanted, used), count)| format!("{count} {used} instead of {wanted}")).collect();
        let tensors = format_count(self.replaced_types.len() as u64, "tensor");
        (!parts.is_empty())
            .then(|| format!("{tensors} with columns that are no multiple of the block size: {}", parts.join(", ")))
    }
}
