//! Rates of disks, in `disks.json`, measured once for each disk number of the system by [`crate::disk`].

use crate::cache::{folder, load, save};
use crate::disk::{self, DiskRates};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Returns the rates of the disk that holds a folder: from the cache, or measured now in about a second and cached.
/// None if the test file of the measurement does not fit or cannot be accessed.
pub fn disk(in_folder: &Path) -> Option<DiskRates> {
    let number = disk::device_number(in_folder)?;
    let entries: Vec<CachedDisk> = folder().map(|folder| load(&folder.join(FILE_NAME))).unwrap_or_default();
    entries.iter().find(|entry| entry.disk == number).map(|entry| entry.rates).or_else(|| remeasure_disk(in_folder))
}

/// Measures the rates of the disk that holds a folder, in about a second, and caches them in place of earlier ones.
/// None if the test file of the measurement does not fit or cannot be accessed.
pub fn remeasure_disk(in_folder: &Path) -> Option<DiskRates> {
    let (disk, rates) = (disk::device_number(in_folder)?, disk::measure(in_folder)?);
    if let Some(folder) = folder() {
        let mut entries: Vec<CachedDisk> = load(&folder.join(FILE_NAME));
        entries.retain(|entry| entry.disk != disk);
        entries.push(CachedDisk { disk, rates });
        save(&folder, FILE_NAME, &entries);
    }
    Some(rates)
}

/// Name of the file in the cache folder that holds the disk rates.
const FILE_NAME: &str = "disks.json";

/// An entry of `disks.json`: a disk, and its measured rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct CachedDisk {
    /// The system's number of the disk (`st_dev`).
    disk: u64,
    #[serde(flatten)]
    rates: DiskRates,
}
