//! How fast disks are, in `disks.json`: measured once for each, as the system numbers them. How that is measured is in
//! [`crate::disk`].

use super::store::{folder, load, save};
use crate::disk::{self, DiskRates};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How fast the disk of a folder is: from the cache, or measured now (in about a second) and cached; none where there is
/// no room to measure with.
pub fn disk(in_folder: &Path) -> Option<DiskRates> {
    let number = disk::number(in_folder)?;
    let known: Vec<KnownDisk> = folder().map(|folder| load(&folder.join(DISKS))).unwrap_or_default();
    known.iter().find(|known| known.disk == number).map(|known| known.rates).or_else(|| disk_anew(in_folder))
}

/// The same, measured now.
pub fn disk_anew(in_folder: &Path) -> Option<DiskRates> {
    let (disk, rates) = (disk::number(in_folder)?, disk::measure(in_folder)?);
    if let Some(folder) = folder() {
        let mut known: Vec<KnownDisk> = load(&folder.join(DISKS));
        known.retain(|known| known.disk != disk);
        known.push(KnownDisk { disk, rates });
        save(&folder, DISKS, &known);
    }
    Some(rates)
}

/// Where rates of disks are kept.
const DISKS: &str = "disks.json";

/// An entry of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct KnownDisk {
    /// As the system numbers it.
    disk: u64,
    #[serde(flatten)]
    rates: DiskRates,
}
