//! The cache folder of this machine, its JSON files, and the facts of GPUs that a run needs when it opens them.
//!
//! | file | contents | module |
//! |---|---|---|
//! | `charges.json` | bytes that GPUs hold outside the arena | `charges` |
//! | `algorithms.json` | GEMM algorithms of GPUs | `algorithms` |
//!
//! The files of [`crate::calibration`] lie in the same folder. If it is not writable, the next run measures again.

mod algorithms;
mod charges;

pub use algorithms::{gemm_algorithms, store_gemm_algorithms};
pub use charges::{store_charges, stored_charges};

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Returns the cache folder: `$PLIMSOLL_CACHE`, else `$XDG_CACHE_HOME/plimsoll`, else `$HOME/.cache/plimsoll`. None if
/// none of these variables is set; nothing is then cached.
pub fn folder() -> Option<PathBuf> {
    let path_from = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path_from("PLIMSOLL_CACHE")
        .or_else(|| Some(path_from("XDG_CACHE_HOME")?.join("plimsoll")))
        .or_else(|| Some(path_from("HOME")?.join(".cache/plimsoll")))
}

/// Loads the list of entries in a JSON file of the cache; empty if the file is missing or damaged.
pub(crate) fn load<T: DeserializeOwned>(file: &Path) -> Vec<T> {
    serde_json::from_slice(&fs::read(file).unwrap_or_default()).unwrap_or_default()
}

/// Saves entries as the JSON file `name` in a cache folder, which is created if needed. A temporary file is renamed, so
/// concurrent readers never see half a file. Errors are ignored: the cache only saves time.
pub(crate) fn save<T: Serialize>(folder: &Path, name: &str, entries: &[T]) {
    let temporary = folder.join(format!("{name}.{}", std::process::id()));
    let Ok(text) = serde_json::to_vec_pretty(entries) else { return };
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&temporary, text))
        .and_then(|()| fs::rename(&temporary, folder.join(name)));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
}
