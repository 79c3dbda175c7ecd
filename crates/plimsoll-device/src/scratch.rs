//! The scratch file: where tensors wait that neither device nor host have room for. It is taken whole when it is opened,
//! so that a full disk shows before anything runs, and has no name: whatever ends the process gives it back.
//!
//! What is read or written does not stay in the system's page cache: memory that a plan does not know of would be used
//! for it, and what else is cached would be driven out. So it takes what the disk takes, every time.

use crate::device::DeviceError;
use crate::disk;
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

/// Bytes that are moved at once where a tensor changes its place within the file.
const MOVED_AT_ONCE: usize = 4 << 20;

/// A file of exactly the planned size, or none.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Where it is; none for devices that have no file.
    folder: Option<PathBuf>,
    file: Option<File>,
    bytes: u64,
    /// The end of the topmost part that was ever written.
    written: AtomicU64,
    /// What went wrong where it could not be told.
    failed: Mutex<Option<io::Error>>,
}

impl Scratch {
    /// Takes a file of so many bytes in a folder; none where there are none.
    pub fn take(folder: Option<&Path>, bytes: u64) -> Result<Scratch, DeviceError> {
        let folder = folder.map(Path::to_owned);
        let mut scratch =
            Scratch { folder, file: None, bytes: 0, written: AtomicU64::new(0), failed: Mutex::new(None) };
        scratch.resize(bytes)?;
        Ok(scratch)
    }

    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    pub fn high_water(&self) -> Bytes {
        Bytes(self.written.load(Ordering::Relaxed))
    }

    /// Makes it another size. What lies below both sizes stays.
    pub fn resize(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let error = |source| DeviceError::Scratch { folder: self.folder.clone().unwrap_or_default(), bytes, source };
        if bytes == 0 {
            (self.file, self.bytes) = (None, 0);
        } else {
            let folder = self.folder.as_deref().ok_or_else(|| error(io::ErrorKind::NotFound.into()))?;
            let new = if self.file.is_none() { Some(nameless(folder).map_err(error)?) } else { None };
            let file = new.as_ref().or(self.file.as_ref()).expect("one of them is there");
            if let Err(source) = set_size(file, self.bytes, bytes) {
                // What was taken in vain is given back.
                let _ = file.set_len(self.bytes);
                return Err(error(source));
            }
            self.file = new.or(self.file.take());
            self.bytes = bytes;
        }
        *self.written.get_mut() = (*self.written.get_mut()).min(bytes);
        Ok(())
    }

    /// Reads a part.
    pub fn read(&self, first: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let length = into.len();
        let read = |file: &File| {
            file.read_exact_at(into, first)?;
            forget(file, first, length);
            Ok(())
        };
        self.part(first, length).and_then(read).map_err(|source| self.error(source))
    }

    /// Writes a part.
    pub fn write(&self, first: u64, from: &[u8]) -> Result<(), DeviceError> {
        let write = |file: &File| {
            file.write_all_at(from, first)?;
            self.written.fetch_max(first + from.len() as u64, Ordering::Relaxed);
            write_out(file, first, from.len())?;
            forget(file, first, from.len());
            Ok(())
        };
        self.part(first, from.len()).and_then(write).map_err(|source| self.error(source))
    }

    /// A part; [`Scratch::check`] tells what went wrong.
    pub fn look(&self, range: Range<u64>) -> Cow<'static, [u8]> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.keep(self.read(range.start, &mut bytes));
        Cow::Owned(bytes)
    }

    /// Overwrites a part; [`Scratch::check`] tells what went wrong.
    pub fn fill(&self, first: u64, bytes: &[u8]) {
        self.keep(self.write(first, bytes));
    }

    /// Copies within the file; parts may overlap. [`Scratch::check`] tells what went wrong.
    pub fn copy_within(&self, from: u64, to: u64, bytes: u64) {
        let step = MOVED_AT_ONCE as u64;
        let parts = (0..bytes.div_ceil(step)).map(|part| part * step);
        let parts: Vec<u64> = if to < from { parts.collect() } else { parts.rev().collect() };
        for part in parts {
            let end = bytes.min(part + step);
            self.fill(to + part, &self.look(from + part..from + end));
        }
    }

    /// What went wrong since it was last asked.
    pub fn check(&self) -> Result<(), DeviceError> {
        let mut failed = self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        failed.take().map_or(Ok(()), |source| Err(self.error(source)))
    }

    /// Keeps what went wrong for [`Scratch::check`].
    pub fn keep(&self, result: Result<(), DeviceError>) {
        if let Err(DeviceError::ScratchLost { source, .. }) = result {
            let mut failed = self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            failed.get_or_insert(source);
        }
    }

    /// The file, where it reaches that far.
    fn part(&self, first: u64, bytes: usize) -> io::Result<&File> {
        assert!(first + bytes as u64 <= self.bytes, "bug: beyond the end of the scratch file");
        self.file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// What went wrong with a file that is there: it was taken whole, so a plan that needs less of it is no way out.
    fn error(&self, source: io::Error) -> DeviceError {
        DeviceError::ScratchLost { folder: self.folder.clone().unwrap_or_default(), source }
    }
}

/// A file without a name in a folder, or in the nearest one above it.
fn nameless(folder: &Path) -> io::Result<File> {
    let folder = disk::existing(folder);
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    if let Ok(file) = options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
        return Ok(file);
    }
    // Not every file system makes them without a name from the start.
    let path = folder.join(format!(".scratch-{}", std::process::id()));
    let file = options.create(true).truncate(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// Cuts a file, or makes it longer by bytes that the disk has set aside for it.
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

/// Waits until a part is on the disk: else it would be in memory until the system finds the time.
fn write_out(file: &File, first: u64, bytes: usize) -> io::Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: an open file of ours; the call touches no memory of this process.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), first as i64, bytes as i64, all) };
    match (result, io::Error::last_os_error()) {
        (0, _) => Ok(()),
        // A file system that knows no such call writes when it likes.
        (_, error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::ESPIPE)) => Ok(()),
        (_, error) => Err(error),
    }
}

/// Takes a part that is on the disk out of the page cache. Advice: what cannot be taken out stays.
fn forget(file: &File, first: u64, bytes: usize) {
    // SAFETY: an open file of ours; the call touches no memory of this process.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), first as i64, bytes as i64, libc::POSIX_FADV_DONTNEED) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Exit, Failure};

    #[test]
    fn what_was_written_is_read_and_stays_when_the_file_grows_and_shrinks() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::take(Some(folder.path()), 3 * MOVED_AT_ONCE as u64).unwrap();
        let known: Vec<u8> = (0..2 * MOVED_AT_ONCE + 77).map(|at| (at * 7 + at / 256) as u8).collect();
        scratch.write(5, &known).unwrap();
        assert_eq!(scratch.high_water(), Bytes(5 + known.len() as u64));
        scratch.resize(4 * MOVED_AT_ONCE as u64).unwrap();
        // Both ways, overlapping.
        scratch.copy_within(5, 100_000, known.len() as u64);
        assert!(*scratch.look(100_000..100_000 + known.len() as u64) == known);
        scratch.copy_within(100_000, 1, known.len() as u64);
        scratch.resize(1 + known.len() as u64).unwrap();
        let mut found = vec![0; known.len()];
        scratch.read(1, &mut found).unwrap();
        scratch.check().unwrap();
        assert!(found == known);
    }

    #[test]
    fn nothing_is_left_in_the_folder_while_it_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let scratch = Scratch::take(Some(folder.path()), 1 << 20).unwrap();
        scratch.write(0, &[1; 100]).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(scratch.bytes(), Bytes::mib(1));
    }

    #[test]
    fn what_the_disk_has_not_is_refused_and_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::take(Some(folder.path()), 1000).unwrap();
        scratch.write(0, &[7; 1000]).unwrap();
        let refused = scratch.resize(1 << 60).unwrap_err();
        assert!(matches!(refused, DeviceError::Scratch { .. }), "{refused}");
        assert_eq!(scratch.bytes(), Bytes(1000));
        assert!(scratch.look(0..1000).iter().all(|&byte| byte == 7));
        assert!(Scratch::take(None, 1).is_err() && Scratch::take(None, 0).is_ok());
    }

    #[test]
    fn a_disk_that_fails_ends_a_run_that_can_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::take(Some(folder.path()), 1000).unwrap();
        std::fs::write(folder.path().join("other"), [1; 1000]).unwrap();
        scratch.file = Some(File::open(folder.path().join("other")).unwrap());
        let lost = scratch.write(0, &[7; 10]).unwrap_err();
        assert!(!lost.is_refusal(), "{lost}");
        assert_eq!(Failure::from(lost).exit, Exit::Stopped);
        // What is only noted where it happens is told when it is asked for.
        scratch.fill(0, &[7; 10]);
        assert!(scratch.check().is_err() && scratch.check().is_ok());
    }

    #[test]
    fn the_page_cache_does_not_grow_by_what_passes_through() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let scratch = Scratch::take(Some(folder.path()), 8 << 20).unwrap();
        scratch.write(0, &vec![3; 8 << 20]).unwrap();
        scratch.look(0..8 << 20);
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
