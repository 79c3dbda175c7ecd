//! The scratch file: disk space for tensors that fit neither on the device nor in host memory.
//!
//! The file is allocated completely when it is created, so a full disk is noticed before anything runs. It has no name,
//! so the system frees it however the process ends. Bytes read or written are dropped from the page cache at once.
//! Otherwise the cache would use memory outside the plan and evict other files. Every access therefore runs at the
//! speed of the disk.

use crate::error::DeviceError;
use plimsoll_core::Bytes;
use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of bytes that are copied at once when a tensor moves within the scratch file.
const COPY_CHUNK_BYTES: usize = 4 << 20;

/// The scratch file of a device: a file of exactly the planned size, or no file if that size is zero.
#[derive(Debug)]
pub(crate) struct ScratchFile {
    /// Folder for the file. If the folder does not exist, its nearest existing ancestor holds the file. None for
    /// devices without a scratch file.
    folder: Option<PathBuf>,
    file: Option<File>,
    bytes: u64,
    /// Offset just past the highest byte written, at most the size of the file.
    high_water_bytes: AtomicU64,
    /// First error, since the last [`ScratchFile::check`], of methods that do not return errors.
    first_error: Mutex<Option<io::Error>>,
}

impl ScratchFile {
    /// Creates a file of `bytes` bytes in a folder; no file if `bytes` is zero. `folder` is None for devices without a
    /// scratch file.
    ///
    /// # Errors
    /// [`DeviceError::ScratchFile`] if the disk lacks the space, the file cannot be created, or `bytes` is not zero and
    /// `folder` is None.
    pub fn create(folder: Option<&Path>, bytes: u64) -> Result<ScratchFile, DeviceError> {
        let folder = folder.map(Path::to_owned);
        let (high_water_bytes, first_error) = (AtomicU64::new(0), Mutex::new(None));
        let mut scratch = ScratchFile { folder, file: None, bytes: 0, high_water_bytes, first_error };
        scratch.resize(bytes)?;
        Ok(scratch)
    }

    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    pub fn high_water(&self) -> Bytes {
        Bytes(self.high_water_bytes.load(Ordering::Relaxed))
    }

    /// Resizes the file to `bytes`; zero removes it. The bytes that lie below both the old and the new size keep their
    /// values. After an error the file keeps its old size.
    pub fn resize(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let error =
            |source| DeviceError::ScratchFile { folder: self.folder.clone().unwrap_or_default(), bytes, source };
        if bytes == 0 {
            (self.file, self.bytes) = (None, 0);
        } else {
            let folder = self.folder.as_deref().ok_or_else(|| error(io::ErrorKind::NotFound.into()))?;
            let new = if self.file.is_none() { Some(create_unnamed(folder).map_err(error)?) } else { None };
            let file = new.as_ref().or(self.file.as_ref()).expect("a file is open or was just created");
            if let Err(source) = set_size(file, self.bytes, bytes) {
                // Frees what was allocated before the failure.
                let _ = file.set_len(self.bytes);
                return Err(error(source));
            }
            self.file = new.or(self.file.take());
            self.bytes = bytes;
        }
        *self.high_water_bytes.get_mut() = (*self.high_water_bytes.get_mut()).min(bytes);
        Ok(())
    }

    /// Fills `into` with the bytes of the file from byte `first` on.
    pub fn read(&self, first: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let length = into.len();
        let read = |file: &File| {
            file.read_exact_at(into, first)?;
            drop_from_page_cache(file, first, length);
            Ok(())
        };
        self.checked_range(first, length).and_then(read).map_err(|source| self.error(source))
    }

    /// Writes the bytes `from` to the file, from byte `first` on.
    pub fn write(&self, first: u64, from: &[u8]) -> Result<(), DeviceError> {
        let file = self.checked_range(first, from.len());
        file.and_then(|file| self.write_to_disk(file, first, from)).map_err(|source| self.error(source))
    }

    /// Writes bytes to the open file, and waits until they are on the disk.
    fn write_to_disk(&self, file: &File, first: u64, from: &[u8]) -> io::Result<()> {
        file.write_all_at(from, first)?;
        self.high_water_bytes.fetch_max(first + from.len() as u64, Ordering::Relaxed);
        flush_range(file, first, from.len())?;
        drop_from_page_cache(file, first, from.len());
        Ok(())
    }

    /// Returns a copy of a byte range of the file. An error is recorded, and [`ScratchFile::check`] returns it later.
    pub fn view(&self, range: Range<u64>) -> Cow<'static, [u8]> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.record_error(self.read(range.start, &mut bytes));
        Cow::Owned(bytes)
    }

    /// Overwrites bytes of the file, from byte `first` on. An error is recorded, and [`ScratchFile::check`] returns it
    /// later.
    pub fn fill(&self, first: u64, bytes: &[u8]) {
        self.record_error(self.write(first, bytes));
    }

    /// Copies `bytes` bytes within the file, from offset `from` to offset `to`. The two ranges may overlap. An error is
    /// recorded, and [`ScratchFile::check`] returns it later.
    pub fn copy_within(&self, from: u64, to: u64, bytes: u64) {
        let step = COPY_CHUNK_BYTES as u64;
        let chunks = (0..bytes.div_ceil(step)).map(|chunk| chunk * step);
        let chunks: Vec<u64> = if to < from { chunks.collect() } else { chunks.rev().collect() };
        for start in chunks {
            let end = bytes.min(start + step);
            self.fill(to + start, &self.view(from + start..from + end));
        }
    }

    /// Returns, as `Err`, the first error that methods without a `Result` have recorded since the last call, and
    /// forgets it. `Ok` if there was none.
    pub fn check(&self) -> Result<(), DeviceError> {
        let mut first_error = self.first_error.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        first_error.take().map_or(Ok(()), |source| Err(self.error(source)))
    }

    /// Records the error of `result`, if any, for [`ScratchFile::check`]. Only the first one is kept.
    pub fn record_error(&self, result: Result<(), DeviceError>) {
        if let Err(DeviceError::ScratchFileLost { source, .. }) = result {
            let mut first_error = self.first_error.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            first_error.get_or_insert(source);
        }
    }

    /// Returns the file after checking that a range lies within it.
    ///
    /// # Errors
    /// There is no file, because its size is zero.
    ///
    /// # Panics
    /// If the range extends beyond the end of the file.
    fn checked_range(&self, first: u64, bytes: usize) -> io::Result<&File> {
        assert!(first + bytes as u64 <= self.bytes, "bug: beyond the end of the scratch file");
        self.file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Converts an error of the open file into [`DeviceError::ScratchFileLost`], which never counts as a lack of disk
    /// space. The disk space was allocated completely beforehand, so a plan with a smaller file would not help.
    fn error(&self, source: io::Error) -> DeviceError {
        DeviceError::ScratchFileLost { folder: self.folder.clone().unwrap_or_default(), source }
    }
}

/// Returns the folder itself if it exists, else its nearest existing ancestor. For a relative path without an existing
/// ancestor, returns `.`.
pub(crate) fn nearest_existing(folder: &Path) -> &Path {
    folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."))
}

/// Creates a file without a name in a folder, or in the folder's nearest ancestor that exists. Only this user can read
/// it.
fn create_unnamed(folder: &Path) -> io::Result<File> {
    let folder = nearest_existing(folder);
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
    // Some file systems cannot create unnamed files.
    options.open(folder).or_else(|_| Ok(tempfile::NamedTempFile::new_in(folder)?.into_file()))
}

/// Changes the size of a file from `from` to `to` bytes. Additional disk space is allocated at once.
fn set_size(file: &File, from: u64, to: u64) -> io::Result<()> {
    if to <= from {
        return file.set_len(to);
    }
    let offset = |bytes: u64| libc::off_t::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge));
    let (first, length) = (offset(from)?, offset(to - from)?);
    loop {
        // SAFETY: an open file of ours; nothing is mapped from it.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), first, length) } {
            0 => return Ok(()),
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Writes a byte range of the file to the disk and waits for the end. Otherwise the page cache would hold the range
/// until the system writes it back.
fn flush_range(file: &File, first: u64, bytes: usize) -> io::Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: an open file of ours; the call touches no memory of this process.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), first as i64, bytes as i64, all) };
    match (result, io::Error::last_os_error()) {
        (0, _) => Ok(()),
        // A file system without this call writes back on its own.
        (_, error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::ESPIPE)) => Ok(()),
        (_, error) => Err(error),
    }
}

/// Drops a byte range of the file from the page cache. The range must be on the disk. The call is only advice: the
/// system may keep the range.
fn drop_from_page_cache(file: &File, first: u64, bytes: usize) {
    // SAFETY: an open file of ours; the call touches no memory of this process.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), first as i64, bytes as i64, libc::POSIX_FADV_DONTNEED) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Exit, Failure};

    #[test]
    fn contents_survive_growing_and_shrinking() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = ScratchFile::create(Some(folder.path()), 3 * COPY_CHUNK_BYTES as u64).unwrap();
        let known: Vec<u8> = (0..2 * COPY_CHUNK_BYTES + 77).map(|at| (at * 7 + at / 256) as u8).collect();
        scratch.write(5, &known).unwrap();
        assert_eq!(scratch.high_water(), Bytes(5 + known.len() as u64));
        scratch.resize(4 * COPY_CHUNK_BYTES as u64).unwrap();
        // Overlapping, in both directions.
        scratch.copy_within(5, 100_000, known.len() as u64);
        assert!(*scratch.view(100_000..100_000 + known.len() as u64) == known);
        scratch.copy_within(100_000, 1, known.len() as u64);
        scratch.resize(1 + known.len() as u64).unwrap();
        let mut found = vec![0; known.len()];
        scratch.read(1, &mut found).unwrap();
        scratch.check().unwrap();
        assert!(found == known);
    }

    #[test]
    fn file_has_no_name_in_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let scratch = ScratchFile::create(Some(folder.path()), 1 << 20).unwrap();
        scratch.write(0, &[1; 100]).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(scratch.bytes(), Bytes::mib(1));
    }

    #[test]
    fn failed_resize_keeps_the_contents() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = ScratchFile::create(Some(folder.path()), 1000).unwrap();
        scratch.write(0, &[7; 1000]).unwrap();
        let refused = scratch.resize(1 << 60).unwrap_err();
        assert!(matches!(refused, DeviceError::ScratchFile { .. }), "{refused}");
        assert_eq!(scratch.bytes(), Bytes(1000));
        assert!(scratch.view(0..1000).iter().all(|&byte| byte == 7));
        assert!(ScratchFile::create(None, 1).is_err() && ScratchFile::create(None, 0).is_ok());
    }

    #[test]
    fn disk_failure_is_resumable() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = ScratchFile::create(Some(folder.path()), 1000).unwrap();
        std::fs::write(folder.path().join("other"), [1; 1000]).unwrap();
        scratch.file = Some(File::open(folder.path().join("other")).unwrap());
        let lost = scratch.write(0, &[7; 10]).unwrap_err();
        assert!(!lost.is_out_of_memory(), "{lost}");
        assert_eq!(Failure::from(lost).exit, Exit::Stopped);
        // Recorded errors are returned once by `check`.
        scratch.fill(0, &[7; 10]);
        assert!(scratch.check().is_err() && scratch.check().is_ok());
    }

    #[test]
    fn page_cache_does_not_keep_scratch_bytes() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let scratch = ScratchFile::create(Some(folder.path()), 8 << 20).unwrap();
        scratch.write(0, &vec![3; 8 << 20]).unwrap();
        scratch.view(0..8 << 20);
        let (file, page) = (scratch.file.as_ref().unwrap(), 4096);
        let length = 8 << 20;
        // SAFETY: a mapping of our own file, unmapped below, and never read.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let mut resident = vec![0u8; length / page];
        // SAFETY: the mapping is that long, and the vector has a byte for each of its pages.
        assert_eq!(unsafe { libc::mincore(start, length, resident.as_mut_ptr().cast()) }, 0);
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(start, length) };
        let cached = resident.iter().filter(|page| *page & 1 == 1).count();
        assert!(cached * 10 < resident.len(), "{cached} of {} pages are cached", resident.len());
    }
}
