//! The cache folder of this machine, its JSON files, and the facts of GPUs that a run needs when it opens them.
//!
//! | file | contents | module |
//! |---|---|---|
//! | `charges.json` | bytes that GPUs hold outside the arena | `charges` |
//! | `algorithms.json` | GEMM algorithms of GPUs | `algorithms` |
//!
//! The files of [`crate::calibration`] lie in the same folder. If it is not writable, the next run measures again. Each
//! entry has a checksum ([`sealed_json`]).

mod algorithms;
mod charges;
pub mod sealed_json;

pub use algorithms::{gemm_algorithms, store_gemm_algorithms};
pub use charges::{cache_no_charges, store_charges, stored_charges};

use crate::private_file;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::env;
use std::path::{Path, PathBuf};

/// Returns the cache folder: `$PLIMSOLL_CACHE`, else `$XDG_CACHE_HOME/plimsoll`, else `$HOME/.cache/plimsoll`. None if
/// none of these variables is set; nothing is then cached.
pub fn folder() -> Option<PathBuf> {
    let path_from = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path_from("PLIMSOLL_CACHE")
        .or_else(|| Some(path_from("XDG_CACHE_HOME")?.join("plimsoll")))
        .or_else(|| Some(path_from("HOME")?.join(".cache/plimsoll")))
}

/// Loads the list of entries in a JSON file of the cache, without damaged ones. Empty if the file is missing or is no
/// list. An entry without checksum, such as one written by hand, is taken as it is.
pub(crate) fn load<T: DeserializeOwned>(file: &Path) -> Vec<T> {
    let entries: Vec<Value> = serde_json::from_slice(&private_file::read(file).unwrap_or_default()).unwrap_or_default();
    let read = |entry: Value| match sealed_json::is_sealed(&entry) {
        true => sealed_json::unseal(entry).ok(),
        false => serde_json::from_value(entry).ok(),
    };
    entries.into_iter().filter_map(read).collect()
}

/// Saves entries as the JSON file `name` in a cache folder, which is created if needed. Errors are ignored: the cache
/// only saves time.
pub(crate) fn save<T: Serialize>(folder: &Path, name: &str, entries: &[T]) {
    let Ok(entries) = entries.iter().map(sealed_json::seal).collect::<Result<Vec<_>, _>>() else { return };
    let _ = private_file::replace(&folder.join(name), format!("{:#}", Value::Array(entries)).as_bytes());
}
