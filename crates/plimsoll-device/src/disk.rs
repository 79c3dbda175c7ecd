//! A disk as the scratch file meets it: what is free on it, and how fast it reads and writes at once, measured.

use crate::scratch::Scratch;
use plimsoll_core::Bytes;
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// What is read and written at once, as by windows of the host.
const PART: usize = 8 << 20;
/// Parts of the file that is measured with: half of them are read, the others written.
const PARTS: u64 = 16;
/// How long it is measured, about.
const SECONDS: f64 = 1.0;

/// How fast a disk is, each while the other goes on, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskRates {
    /// Reading.
    pub read_bytes_per_second: f64,
    /// Writing.
    pub write_bytes_per_second: f64,
}

/// The nearest folder that is there: the folder itself, or one above it that it will be made in.
pub(crate) fn existing(folder: &Path) -> &Path {
    folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"))
}

/// What an ordinary user may still write in a folder, or where it will be made; none where the system does not say.
pub fn free(folder: &Path) -> Option<Bytes> {
    let path = CString::new(existing(folder).as_os_str().as_bytes()).ok()?;
    // SAFETY: zeros are a valid `statvfs`, which the call fills in.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a path that ends with zero, and room for the answer.
    let result = unsafe { libc::statvfs(path.as_ptr(), &mut found) };
    (result == 0).then(|| Bytes(found.f_bavail.saturating_mul(found.f_frsize)))
}

/// Which disk a folder is on, as the system numbers them.
pub(crate) fn number(folder: &Path) -> Option<u64> {
    Some(existing(folder).metadata().ok()?.dev())
}

/// Measures the disk of a folder, in about a second; none where there is no room for the file.
pub fn measure(folder: &Path) -> Option<DiskRates> {
    let scratch = Scratch::take(Some(folder), PARTS * PART as u64).ok()?;
    let part = vec![7u8; PART];
    (0..PARTS).try_for_each(|number| scratch.write(number * PART as u64, &part)).ok()?;
    let begin = Instant::now();
    let over = || begin.elapsed() >= Duration::from_secs_f64(SECONDS);
    // Each goes over its half again and again until the time is over, and once at least.
    let go = |first: u64, each: &dyn Fn(u64) -> Option<()>| -> Option<f64> {
        let mut parts = 0;
        while parts < PARTS / 2 || !over() {
            each((first + parts % (PARTS / 2)) * PART as u64)?;
            parts += 1;
        }
        Some(parts as f64 * PART as f64 / begin.elapsed().as_secs_f64())
    };
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let mut into = vec![0; PART];
            let into = std::cell::RefCell::new(&mut into);
            go(0, &|first| scratch.read(first, &mut into.borrow_mut()).ok())
        });
        let write_bytes_per_second = go(PARTS / 2, &|first| scratch.write(first, &part).ok())?;
        let read_bytes_per_second = reads.join().ok()??;
        Some(DiskRates { read_bytes_per_second, write_bytes_per_second })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_room_and_rates_also_where_the_folder_is_not_there_yet() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("not/there");
        assert!(free(&inside).is_some_and(|free| free > Bytes::ZERO));
        assert_eq!(number(&inside), number(folder.path()));
        let rates = measure(&inside).expect("there is room for so much");
        assert!(rates.read_bytes_per_second > 1e5 && rates.write_bytes_per_second > 1e5, "{rates:?}");
        assert!(!inside.exists());
    }
}
