//! Charges: bytes that GPUs hold outside the arena, in `charges.json`. They are measured when a GPU is opened.

use super::{folder, load, save};
use crate::cuda::gpus::{CudaInstallation, GpuInfo};
use plimsoll_core::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Numbers of the GPUs whose charges this process does not cache.
static UNCACHED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Makes later calls of [`store_charges`] in this process ignore a GPU. Libraries may keep memory of other work that
/// this process did on it, such as a measurement of rates. The next process measures charges without that memory.
pub fn cache_no_charges(gpu: &GpuInfo) {
    UNCACHED.lock().unwrap_or_else(PoisonError::into_inner).insert(gpu.index);
}

/// Returns the cached charges (bytes outside the arena) of a GPU model. None if they were not measured with this
/// version of Plimsoll, this driver and this cuBLASLt.
pub fn stored_charges(installation: &CudaInstallation, gpu: &GpuInfo) -> Option<Bytes> {
    let (key, entries) = (ChargesKey::of(installation, gpu), load::<CachedCharges>(&folder()?.join(FILE_NAME)));
    entries.into_iter().find(|entry| entry.key == key).map(|entry| entry.bytes)
}

/// Caches the bytes outside the arena (charges) that a run measured on a GPU model. The highest value of all runs is
/// kept, because runs load different kernels.
pub fn store_charges(installation: &CudaInstallation, gpu: &GpuInfo, bytes: Bytes) {
    if UNCACHED.lock().unwrap_or_else(PoisonError::into_inner).contains(&gpu.index) {
        return;
    }
    let Some(folder) = folder() else { return };
    store_charges_in(&folder, ChargesKey::of(installation, gpu), bytes);
}

fn store_charges_in(folder: &Path, key: ChargesKey, bytes: Bytes) {
    let mut entries: Vec<CachedCharges> = load(&folder.join(FILE_NAME));
    match entries.iter_mut().find(|entry| entry.key == key) {
        Some(entry) if entry.bytes >= bytes => return,
        Some(entry) => entry.bytes = bytes,
        None => entries.push(CachedCharges { key, bytes }),
    }
    save(folder, FILE_NAME, &entries);
}

/// Name of the file in the cache folder that holds the charges.
const FILE_NAME: &str = "charges.json";

/// The GPU model, and the versions of Plimsoll, driver and cuBLASLt, with which charges were measured. Cached charges
/// are used only if all four are equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ChargesKey {
    plimsoll: String,
    gpu: String,
    driver: String,
    cublaslt: String,
}

impl ChargesKey {
    fn of(installation: &CudaInstallation, gpu: &GpuInfo) -> ChargesKey {
        ChargesKey {
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            gpu: gpu.name.clone(),
            driver: installation.driver_version.clone(),
            cublaslt: installation.cublaslt().map(|library| library.version.clone()).unwrap_or_default(),
        }
    }
}

/// An entry of `charges.json`: charges, and the conditions under which they were measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CachedCharges {
    #[serde(flatten)]
    key: ChargesKey,
    bytes: Bytes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_charges_are_kept_per_driver() {
        let folder = tempfile::tempdir().unwrap();
        let key = |driver: &str| ChargesKey {
            plimsoll: "0.1.0".to_owned(),
            gpu: "Example".to_owned(),
            driver: driver.to_owned(),
            cublaslt: "13.1".to_owned(),
        };
        let entries = |driver: &str| {
            let entries: Vec<CachedCharges> = load(&folder.path().join(FILE_NAME));
            entries.into_iter().find(|entry| entry.key == key(driver)).map(|entry| entry.bytes)
        };
        store_charges_in(folder.path(), key("550"), Bytes::mib(400));
        store_charges_in(folder.path(), key("550"), Bytes::mib(480));
        store_charges_in(folder.path(), key("550"), Bytes::mib(440));
        assert_eq!((entries("550"), entries("580")), (Some(Bytes::mib(480)), None));
        store_charges_in(folder.path(), key("580"), Bytes::mib(300));
        assert_eq!((entries("550"), entries("580")), (Some(Bytes::mib(480)), Some(Bytes::mib(300))));
    }
}
