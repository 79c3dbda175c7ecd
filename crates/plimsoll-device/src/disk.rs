//! Disks that hold scratch files: free space, and the measured rates of simultaneous reading and writing.

use crate::scratch_file::{ScratchFile, nearest_existing};
use plimsoll_core::Bytes;
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Size of one read or write in the measurement of a disk. Typical transfers between the scratch file and memory are as
/// large.
const PART_BYTES: usize = 8 << 20;
/// Size of the test file, in parts of `PART_BYTES`. One half of the parts is read, the other half is written.
const PART_COUNT: u64 = 16;
/// Approximate duration of the measurement of a disk, in seconds. A slow disk takes longer.
const MEASURE_SECONDS: f64 = 1.0;

/// Bytes per second of a disk while it is read and written at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskRates {
    /// Bytes read per second while the disk is also written.
    pub read_bytes_per_second: f64,
    /// Bytes written per second while the disk is also read.
    pub write_bytes_per_second: f64,
}

/// Returns the free bytes, for a user without root privileges, of the disk that holds a folder. The folder need not
/// exist yet. None if the system does not report it.
pub fn free(folder: &Path) -> Option<Bytes> {
    let path = CString::new(nearest_existing(folder).as_os_str().as_bytes()).ok()?;
    // SAFETY: zeros are a valid `statvfs`, which the call fills in.
    let mut stats: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a zero-terminated path, and a struct that the call fills in.
    let result = unsafe { libc::statvfs(path.as_ptr(), &mut stats) };
    (result == 0).then(|| Bytes(stats.f_bavail.saturating_mul(stats.f_frsize)))
}

/// Returns whether this process may write into a folder, or into its nearest ancestor that exists. `None` if the path
/// cannot be passed to the system.
pub fn is_writable(folder: &Path) -> Option<bool> {
    let path = CString::new(nearest_existing(folder).as_os_str().as_bytes()).ok()?;
    // SAFETY: a zero-terminated path, which the call only reads.
    Some(unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } == 0)
}

/// Returns the system's number of the disk that holds a folder (`st_dev`); the folder need not exist yet. None if the
/// system does not report it.
pub(crate) fn device_number(folder: &Path) -> Option<u64> {
    Some(nearest_existing(folder).metadata().ok()?.dev())
}

/// Measures how fast the disk that holds a folder is read and written at the same time, in about a second. None if the
/// test file does not fit or cannot be accessed.
pub fn measure(folder: &Path) -> Option<DiskRates> {
    let scratch = ScratchFile::create(Some(folder), PART_COUNT * PART_BYTES as u64).ok()?;
    let part = vec![7u8; PART_BYTES];
    (0..PART_COUNT).try_for_each(|index| scratch.write(index * PART_BYTES as u64, &part)).ok()?;
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let reads = std::thread::Builder::new().spawn_scoped(scope, || {
            let mut into = vec![0; PART_BYTES];
            half_rate(begin, 0, |first| scratch.read(first, &mut into).ok())
        });
        let reads = reads.ok()?;
        let write_bytes_per_second = half_rate(begin, PART_COUNT / 2, |first| scratch.write(first, &part).ok())?;
        let read_bytes_per_second = reads.join().ok()??;
        Some(DiskRates { read_bytes_per_second, write_bytes_per_second })
    })
}

/// Calls `each` with the first byte of every part in one half of the test file, whose first part is number `first`.
/// Repeats this until `MEASURE_SECONDS` have passed since `begin`, and goes through the half at least once. Returns the
/// bytes per second; None if a call returns None.
fn half_rate(begin: Instant, first: u64, mut each: impl FnMut(u64) -> Option<()>) -> Option<f64> {
    let mut parts = 0;
    while parts < PART_COUNT / 2 || begin.elapsed() < Duration::from_secs_f64(MEASURE_SECONDS) {
        each((first + parts % (PART_COUNT / 2)) * PART_BYTES as u64)?;
        parts += 1;
    }
    Some(parts as f64 * PART_BYTES as f64 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn missing_folder_has_free_space_and_rates() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("not/there");
        assert!(free(&inside).is_some_and(|free| free > Bytes::ZERO));
        assert_eq!(device_number(&inside), device_number(folder.path()));
        let rates = measure(&inside).expect("the test file fits");
        assert!(rates.read_bytes_per_second > 1e5 && rates.write_bytes_per_second > 1e5, "{rates:?}");
        assert!(!inside.exists());
    }

    #[test]
    fn folder_is_writable_if_files_can_be_made_in_it() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(is_writable(&folder.path().join("not/there")), Some(true));
        fs::set_permissions(folder.path(), Permissions::from_mode(0o555)).unwrap();
        // Root may write into any folder.
        let can_write = fs::write(folder.path().join("file"), "").is_ok();
        assert_eq!(is_writable(&folder.path().join("not/there")), Some(can_write));
    }
}
