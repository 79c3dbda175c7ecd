//! `plimsoll export`: a model as a GGUF file.

use super::hub::local_model;
use super::model::to_json;
use crate::args::ExportArgs;
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::inference::export::{ExportProgress, ExportRequest, ExportedFile, export};
use plimsoll_watch::download::DownloadBar;

/// Exports a model and prints the result.
///
/// # Errors
/// A model that cannot be read or that GGUF cannot express, or an output that exists.
pub fn run(args: &ExportArgs) -> Result<Exit, Failure> {
    let request = ExportRequest {
        model: local_model(&args.model, args.quiet)?,
        adapter: args.adapter.clone(),
        out: args.gguf.clone(),
        file_type: args.file_type,
        pre: args.pre.clone(),
        modelfile: args.modelfile.clone(),
        ignore_config_keys: args.ignore_config_key.clone(),
    };
    let bar = DownloadBar::new(args.quiet);
    let mut show = |progress: ExportProgress| bar.update(progress.tensor, progress.done_bytes, progress.total_bytes);
    let exported = export(&request, &mut show)?;
    drop(bar);
    if !args.quiet {
        exported.notes.iter().cloned().chain(exported.replaced_note()).for_each(|note| output::print_note(&note));
    }
    match args.json {
        true => output::print_json(&to_json(&exported)),
        false => output::print(&describe(&exported)),
    }
    Ok(Exit::Done)
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
