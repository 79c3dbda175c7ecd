//! Download of one file into the cache: it resumes, it is checked, and then gets its name.

use super::cache::{RepositoryCache, make_parent};
use super::client::{Client, Refusal, Reply, TRIES, header, pause_after};
use super::error::HubError;
use super::id::HubId;
use super::listing::{Checksum, RemoteFile};
use crate::files::FilesError;
use plimsoll_core::Bytes;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::thread;

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// One file to download.
pub(super) struct Download<'a> {
    pub(super) client: &'a Client<'a>,
    pub(super) cache: &'a RepositoryCache,
    pub(super) id: &'a HubId,
    pub(super) file: &'a RemoteFile,
    /// Path of the file on the hub.
    pub(super) path: String,
    /// Name of the hub's host, for messages.
    pub(super) host: String,
}

/// The end of a download that did not fail.
pub(super) enum Ending {
    /// The bytes are in the cache.
    Complete,
    /// The hub refuses the file.
    Refused(Refusal),
}

/// Checksum of bytes that arrive piece by piece.
enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    fn new(file: &RemoteFile) -> Hasher {
        match file.checksum {
            Checksum::Sha256(_) => Hasher::Sha256(Sha256::new()),
            _ => Hasher::Git(Sha1::new_with_prefix(format!("blob {}\0", file.bytes))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::Git(hasher) => hasher.update(bytes),
        }
    }

    fn digits(self) -> String {
        match self {
            Hasher::Sha256(hasher) => format!("{:x}", hasher.finalize()),
            Hasher::Git(hasher) => format!("{:x}", hasher.finalize()),
        }
    }
}

impl Download<'_> {
    /// Downloads the file unless its bytes are in the cache. `observe` gets the number of bytes after each piece.
    ///
    /// # Errors
    /// A host that cannot be reached or breaks off, a wrong checksum, or a file that cannot be written.
    pub(super) fn run(&self, observe: &mut dyn FnMut(u64)) -> Result<Ending, HubError> {
        let blob = self.cache.blob(&self.file.checksum);
        let _lock = self.cache.lock(self.file.checksum.digits())?;
        let is_complete = |blob: &Path| fs::metadata(blob).is_ok_and(|found| found.len() == self.file.bytes);
        if is_complete(&blob) {
            observe(self.file.bytes);
            return Ok(Ending::Complete);
        }
        make_parent(&blob)?;
        let partial = self.cache.partial(&self.file.checksum);
        let resumes = fs::metadata(&partial).is_ok_and(|found| found.len() > 0);
        let found = match self.receive(&partial, observe)? {
            Ok(found) => found,
            Err(refusal) => return Ok(Ending::Refused(refusal)),
        };
        let mut found = found;
        if found != self.file.checksum.digits() && resumes {
            // The part that was there may be damaged: the whole file once more.
            remove(&partial)?;
            found = match self.receive(&partial, observe)? {
                Ok(found) => found,
                Err(refusal) => return Ok(Ending::Refused(refusal)),
            };
        }
        if found != self.file.checksum.digits() {
            remove(&partial)?;
            let (file, host) = (self.file.name.clone(), self.host.clone());
            let expected = self.file.checksum.digits().to_owned();
            return Err(HubError::WrongChecksum { id: Box::new(self.id.clone()), file, host, found, expected });
        }
        fs::rename(&partial, &blob).map_err(|error| FilesError::io(&blob, "write", error))?;
        Ok(Ending::Complete)
    }

    /// Receives the bytes that `partial` lacks, in as many requests as needed. Returns the checksum of the whole.
    fn receive(&self, partial: &Path, observe: &mut dyn FnMut(u64)) -> Result<Result<String, Refusal>, HubError> {
        let failed = |error| self.write_error(partial, error);
        let mut options = File::options();
        let mut file = options.create(true).truncate(false).read(true).write(true).open(partial).map_err(failed)?;
        let (mut hasher, mut received) = self.hash_partial(&mut file).map_err(failed)?;
        let mut fruitless = 0;
        while received < self.file.bytes {
            observe(received);
            let mut response = match self.client.get(&self.path, received)? {
                Reply::Content(response) => response,
                Reply::Refused(Refusal { status: 416, .. }) if received > 0 => {
                    (hasher, received) = self.restart(&mut file).map_err(failed)?;
                    continue;
                }
                Reply::Refused(refusal) => return Ok(Err(refusal)),
            };
            let starts_there = header(response.headers(), "content-range").starts_with(&format!("bytes {received}-"));
            if received > 0 && !(response.status() == 206 && starts_there) {
                // The host sends the whole file.
                (hasher, received) = self.restart(&mut file).map_err(failed)?;
            }
            let before = received;
            let mut body = response.body_mut().as_reader().take(self.file.bytes - received);
            let reason = loop {
                match self.copy_piece(&mut body, &mut file, &mut hasher) {
                    Ok(0) => break "the connection was closed".to_owned(),
                    Ok(bytes) => received += bytes,
                    Err(Piece::Read(error)) => break error.to_string(),
                    Err(Piece::Write(error)) => return Err(failed(error)),
                }
                observe(received);
                if received == self.file.bytes {
                    break String::new();
                }
            };
            if received < self.file.bytes {
                fruitless = if received > before { 1 } else { fruitless + 1 };
                if fruitless == TRIES {
                    return Err(self.cut_off(received, reason));
                }
                thread::sleep(pause_after(fruitless));
            }
        }
        file.sync_all().map_err(failed)?;
        observe(received);
        Ok(Ok(hasher.digits()))
    }

    /// Reads what an earlier download left. More than the file has is dropped.
    fn hash_partial(&self, file: &mut File) -> io::Result<(Hasher, u64)> {
        if file.metadata()?.len() > self.file.bytes {
            return self.restart(file);
        }
        let (mut hasher, mut bytes) = (Hasher::new(self.file), 0);
        let mut piece = vec![0; PIECE];
        loop {
            match file.read(&mut piece)? {
                0 => return Ok((hasher, bytes)),
                count => {
                    hasher.update(&piece[..count]);
                    bytes += count as u64;
                }
            }
        }
    }

    fn restart(&self, file: &mut File) -> io::Result<(Hasher, u64)> {
        file.set_len(0)?;
        file.seek(SeekFrom::Start(0))?;
        Ok((Hasher::new(self.file), 0))
    }

    /// Copies some bytes of an answer into the file. Returns their number; 0 at the end.
    fn copy_piece(&self, body: &mut impl Read, file: &mut File, hasher: &mut Hasher) -> Result<u64, Piece> {
        let mut piece = vec![0; PIECE];
        let count = body.read(&mut piece).map_err(Piece::Read)?;
        file.write_all(&piece[..count]).map_err(Piece::Write)?;
        hasher.update(&piece[..count]);
        Ok(count as u64)
    }

    fn cut_off(&self, received: u64, reason: String) -> HubError {
        HubError::CutOff {
            id: Box::new(self.id.clone()),
            file: self.file.name.clone(),
            host: self.host.clone(),
            received: Bytes(received),
            size: Bytes(self.file.bytes),
            reason,
        }
    }

    fn write_error(&self, partial: &Path, error: io::Error) -> HubError {
        let is_full = plimsoll_core::is_disk_full(&error);
        let (path, needed) = (partial.to_owned(), Some(Bytes(self.file.bytes)));
        match is_full {
            true => FilesError::DiskFull { path, needed }.into(),
            false => FilesError::io(partial, "write", error).into(),
        }
    }
}

/// Side on which copying failed.
enum Piece {
    Read(io::Error),
    Write(io::Error),
}

fn remove(path: &Path) -> Result<(), FilesError> {
    fs::remove_file(path).map_err(|error| FilesError::io(path, "remove", error))
}
