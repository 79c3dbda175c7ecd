//! The cache folder, and reading and writing of its JSON files.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Returns the cache folder for measurements of this machine: `PLIMSOLL_CACHE`, or `plimsoll` in the caches of the user.
pub fn folder() -> Option<PathBuf> {
    let path_from = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path_from("PLIMSOLL_CACHE")
        .or_else(|| Some(path_from("XDG_CACHE_HOME")?.join("plimsoll")))
        .or_else(|| Some(path_from("HOME")?.join(".cache/plimsoll")))
}

pub(super) fn load<T: DeserializeOwned>(file: &Path) -> Vec<T> {
    serde_json::from_slice(&fs::read(file).unwrap_or_default()).unwrap_or_default()
}

/// Saves entries to a temporary file and renames it, so that concurrent readers never see half a file. Errors are ignored:
/// the cache only saves time.
pub(super) fn save<T: Serialize>(folder: &Path, name: &str, entries: &[T]) {
    let temporary = folder.join(format!("{name}.{}", std::process::id()));
    let Ok(text) = serde_json::to_vec_pretty(entries) else { return };
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&temporary, text))
        .and_then(|()| fs::rename(&temporary, folder.join(name)));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
}
