//! Files of the Hugging Face Hub that a command needs, with the progress of their download on standard error.

use crate::output;
use plimsoll_core::Failure;
use plimsoll_train::hub::HubEvent;
use plimsoll_train::resolve::{HubNeed, RunRequest, fetch_hub_files, fetch_hub_model};
use plimsoll_watch::download::DownloadBar;
use std::path::{Path, PathBuf};

/// Fetches the files of all hub ids in a request and puts local paths in their place. With `is_quiet`, shows no progress.
///
/// # Errors
/// An invalid id, refused access, a failed download, or files that are not in the cache in offline mode.
pub fn with_hub_files(mut request: RunRequest, need: HubNeed, is_quiet: bool) -> Result<RunRequest, Failure> {
    let bar = DownloadBar::new(is_quiet);
    fetch_hub_files(&mut request.config, need, &mut |event| show(&bar, event))?;
    Ok(request)
}

/// Fetches a model with its weights if `model` is a hub id. Returns its directory, or `model` itself. With `is_quiet`,
/// shows no progress.
///
/// # Errors
/// As [`with_hub_files`].
pub fn local_model(model: &Path, is_quiet: bool) -> Result<PathBuf, Failure> {
    let bar = DownloadBar::new(is_quiet);
    fetch_hub_model(model, &mut |event| show(&bar, event))
}

fn show(bar: &DownloadBar, event: HubEvent<'_>) {
    match event {
        HubEvent::Note(note) => bar.print_above(|| output::print_note(&note)),
        HubEvent::Progress { file, done_bytes, total_bytes } => bar.update(file, done_bytes, total_bytes),
    }
}
