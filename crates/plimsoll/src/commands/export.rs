//! `plimsoll export`: a model as a Hugging Face directory or a GGUF file.

use super::hub::local_model;
use super::model::to_json;
use crate::args::ExportArgs;
use crate::output;
use plimsoll_core::{DType, Exit, Failure};
use plimsoll_train::gguf::FileType;
use plimsoll_train::inference::export::{
    DirectoryRequest, ExportProgress, ExportSource, ExportedDirectory, ExportedFile, GgufRequest, Observer,
    export_directory, export_gguf,
};
use plimsoll_watch::download::DownloadBar;
use serde::Serialize;
use std::path::Path;

/// Exports a model and prints the result.
///
/// # Errors
/// A model that cannot be read or that GGUF cannot express, or an output that exists.
pub fn run(args: &ExportArgs) -> Result<Exit, Failure> {
    match (&args.merged, &args.gguf, args.file_type) {
        (Some(out), _, _) => write_directory(args, out),
        (None, Some(out), Some(file_type)) => write_gguf(args, out, file_type),
        _ => unreachable!("the parser requires --merged, or --gguf with --type"),
    }
}

fn write_directory(args: &ExportArgs, out: &Path) -> Result<Exit, Failure> {
    let request = DirectoryRequest {
        dtype: args.file_type.map(directory_type).transpose()?,
        source: find_source(args)?,
        out: out.to_owned(),
        max_shard: args.shard_size,
    };
    let exported = with_bar(args, |observe| export_directory(&request, observe))?;
    let ExportedDirectory { directory, bytes, notes, .. } = &exported;
    print_result(
        args,
        &exported,
        notes.iter().cloned(),
        &format!("model: {}\nweights: {bytes}\n", directory.display()),
    );
    Ok(Exit::Done)
}

fn write_gguf(args: &ExportArgs, out: &Path, file_type: FileType) -> Result<Exit, Failure> {
    let request = GgufRequest {
        source: find_source(args)?,
        out: out.to_owned(),
        file_type,
        pre: args.pre.clone(),
        modelfile: args.modelfile.clone(),
    };
    let exported = with_bar(args, |observe| export_gguf(&request, observe))?;
    let notes = exported.notes.iter().cloned().chain(exported.replaced_note());
    print_result(args, &exported, notes, &describe(&exported));
    Ok(Exit::Done)
}

/// Finds the model and its adapters, and fetches the model if it lies on the hub.
fn find_source(args: &ExportArgs) -> Result<ExportSource, Failure> {
    let found = ExportSource::find(&args.model, args.adapter.as_deref())?;
    let base = local_model(&found.base, args.quiet)?;
    Ok(ExportSource { base, ignore_config_keys: args.ignore_config_key.clone(), ..found })
}

/// Returns the type of all weights that a file type names.
fn directory_type(file_type: FileType) -> Result<DType, Failure> {
    match file_type {
        FileType::F32 => Ok(DType::F32),
        FileType::Bf16 => Ok(DType::Bf16),
        FileType::F16 => Ok(DType::F16),
        other => Err(Failure::input(format!("--type {} is for GGUF files only", other.name()))
            .hint("with --merged, choose f32, bf16 or f16")),
    }
}

/// Exports with a progress bar.
fn with_bar<T>(args: &ExportArgs, export: impl FnOnce(Observer) -> Result<T, Failure>) -> Result<T, Failure> {
    let bar = DownloadBar::new(args.quiet);
    export(&mut |progress: ExportProgress| bar.update(progress.tensor, progress.done_bytes, progress.total_bytes))
}

/// Prints notes and the result, as JSON or as the lines that people see.
fn print_result(args: &ExportArgs, result: &impl Serialize, notes: impl Iterator<Item = String>, text: &str) {
    if !args.quiet {
        notes.for_each(|note| output::print_note(&note));
    }
    match args.json {
        true => output::print_json(&to_json(result)),
        false => output::print(text),
    }
}

/// Returns the lines that people see.
fn describe(exported: &ExportedFile) -> String {
    let ExportedFile { file, bytes, file_type, architecture, tensors_by_type, .. } = exported;
    let counts: Vec<String> = tensors_by_type.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let mut text = format!("file: {}\n", file.display());
    text += &format!("{architecture}, {file_type}, {bytes}; tensors: {}\n", counts.join(", "));
    if let Some(modelfile) = &exported.modelfile {
        text += &format!("Modelfile: {0}\nnext: ollama create NAME -f {0}\n", modelfile.display());
    }
    text
}
