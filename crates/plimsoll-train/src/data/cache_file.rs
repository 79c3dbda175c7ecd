//! Files of the token cache: complete or absent, with checksums that are computed while they are written.

use super::error::DataError;
use crate::files::FileSummary;
use plimsoll_core::Bytes;
use plimsoll_device::private_file;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A file of the token cache that is being written.
pub struct CacheFile {
    path: PathBuf,
    file: BufWriter<SummedFile>,
}

/// A file with the checksums of what was written to it.
struct SummedFile {
    file: File,
    sha256: Sha256,
    crc32: crc32fast::Hasher,
    bytes: u64,
}

/// Checksums of a complete file.
pub struct Checksums {
    /// SHA-256 in hexadecimal, which identifies the content.
    pub sha256: String,
    /// Size and CRC-32, which are fast to check.
    pub summary: FileSummary,
}

impl Write for SummedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.sha256.update(&bytes[..count]);
        self.crc32.update(&bytes[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SummedFile {
    fn summary(&self) -> FileSummary {
        FileSummary { bytes: Bytes(self.bytes), crc32: self.crc32.clone().finalize() }
    }
}

impl CacheFile {
    /// Appends bytes to the file.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.file.write_all(bytes).map_err(DataError::io("write", &self.path))
    }

    /// Returns size and checksum of what was written so far.
    pub fn summary(&mut self) -> Result<FileSummary, DataError> {
        self.file.flush().map_err(DataError::io("write", &self.path))?;
        Ok(self.file.get_ref().summary())
    }
}

/// Writes `path` under a temporary name, syncs it and renames it, so that it is either complete or absent. Returns the
/// value of `write` and the checksums of the file.
pub fn write_atomically<T>(
    path: &Path,
    write: impl FnOnce(&mut CacheFile) -> Result<T, DataError>,
) -> Result<(T, Checksums), DataError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let result = (|| {
        let file = private_file::create(&partial).map_err(DataError::io("write", &partial))?;
        let summed = SummedFile { file, sha256: Sha256::new(), crc32: crc32fast::Hasher::new(), bytes: 0 };
        let mut out = CacheFile { path: partial.clone(), file: BufWriter::with_capacity(64 << 10, summed) };
        let value = write(&mut out)?;
        let summed = out.file.into_inner().map_err(|error| DataError::io("write", &partial)(error.into_error()))?;
        summed.file.sync_all().map_err(DataError::io("write", &partial))?;
        fs::rename(&partial, path).map_err(DataError::io("write", path))?;
        let summary = summed.summary();
        Ok((value, Checksums { sha256: format!("{:x}", summed.sha256.finalize()), summary }))
    })();
    if result.is_err() {
        // The unfinished file would only take disk space.
        let _ = fs::remove_file(&partial);
    }
    result
}
