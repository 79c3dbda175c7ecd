//! The folder in which all of it is kept, and how a file there is read and written. What is in which file is its room's.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Where what is known of this machine is kept: `PLIMSOLL_CACHE`, or `plimsoll` in the caches of the user.
pub fn folder() -> Option<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("PLIMSOLL_CACHE")
        .or_else(|| Some(named("XDG_CACHE_HOME")?.join("plimsoll")))
        .or_else(|| Some(named("HOME")?.join(".cache/plimsoll")))
}

pub(super) fn load<T: DeserializeOwned>(file: &Path) -> Vec<T> {
    serde_json::from_slice(&fs::read(file).unwrap_or_default()).unwrap_or_default()
}

/// Written aside and renamed, so that a reader beside us never sees half a file. Failures are let go: the cache only
/// saves time.
pub(super) fn save<T: Serialize>(folder: &Path, name: &str, known: &[T]) {
    let aside = folder.join(format!("{name}.{}", std::process::id()));
    let Ok(text) = serde_json::to_vec_pretty(known) else { return };
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&aside, text))
        .and_then(|()| fs::rename(&aside, folder.join(name)));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
}
