//! The folder of one repository in the cache, in the layout of `huggingface_hub`: blobs, snapshots, refs and locks.

use super::id::{HubId, RepositoryKind, is_commit};
use super::listing::{Checksum, Listing, RemoteFile};
use crate::files::{FilesError, atomic};
use plimsoll_device::regular_file;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Most files of a snapshot that are listed.
const FILES_MAX: usize = 100_000;

/// The folder of a repository in the cache.
pub(super) struct RepositoryCache {
    /// `CACHE/models--OWNER--NAME` or `CACHE/datasets--OWNER--NAME`.
    pub(super) folder: PathBuf,
    /// Folder of the lock files, which other programs use, too.
    locks: PathBuf,
}

impl RepositoryCache {
    /// Returns the place of a repository in the cache. The folder may not exist.
    pub(super) fn new(cache: &Path, kind: RepositoryKind, id: &HubId) -> RepositoryCache {
        let name = format!("{}--{}", kind.plural(), id.repository.replace('/', "--"));
        RepositoryCache { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// Returns the commit of a revision as far as the cache knows it.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = regular_file::read_text(&self.folder.join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Returns the folder of a commit, which has the files under their own names.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Returns the place of a file's bytes.
    pub(super) fn blob(&self, checksum: &Checksum) -> PathBuf {
        self.folder.join("blobs").join(checksum.digits())
    }

    /// Returns the place of a file's bytes while they arrive. `huggingface_hub` uses the same name, so each program
    /// continues what the other began.
    pub(super) fn partial(&self, checksum: &Checksum) -> PathBuf {
        self.folder.join("blobs").join(format!("{}.incomplete", checksum.digits()))
    }

    /// Returns the number of a file's bytes that are in the cache, if they are the first ones.
    pub(super) fn present_bytes(&self, file: &RemoteFile) -> u64 {
        let places = [self.blob(&file.checksum), self.partial(&file.checksum)];
        places.iter().filter_map(|place| fs::metadata(place).ok()).map(|found| found.len()).max().unwrap_or(0)
    }

    /// Returns whether a file of a commit is in the cache with its size.
    pub(super) fn has(&self, commit: &str, file: &RemoteFile) -> bool {
        let found = fs::metadata(self.snapshot(commit).join(&file.name));
        found.is_ok_and(|found| found.is_file() && (file.checksum == Checksum::Unknown || found.len() == file.bytes))
    }

    /// Returns the list of files that was stored with a commit; `None` if there is none.
    pub(super) fn stored_listing(&self, commit: &str) -> Option<Listing> {
        let listing = Listing::parse_stored(&regular_file::read(&self.listing_path(commit)).ok()?)?;
        (listing.commit == commit).then_some(listing)
    }

    /// Returns the files of a commit that are in the cache; `None` if there are none. Another program may have
    /// downloaded them, and left out others.
    pub(super) fn found_listing(&self, commit: &str) -> Option<Listing> {
        let root = self.snapshot(commit);
        let (mut files, mut open) = (Vec::new(), vec![root.clone()]);
        while let Some(folder) = open.pop().filter(|_| files.len() < FILES_MAX) {
            for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
                match fs::metadata(&path) {
                    Ok(found) if found.is_dir() && !path.is_symlink() => open.push(path),
                    Ok(found) if found.is_file() => {
                        let name = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
                        files.push(RemoteFile { name, bytes: found.len(), checksum: Checksum::Unknown });
                    }
                    _ => {}
                }
            }
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        (!files.is_empty()).then(|| Listing { commit: commit.to_owned(), files })
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.folder.join("plimsoll").join(format!("{commit}.json"))
    }

    /// Stores the list of files of a commit, and the commit of a revision.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(super) fn store(&self, listing: &Listing, revision: &str) -> Result<(), FilesError> {
        let _lock = self.lock("plimsoll")?;
        let stored = self.listing_path(&listing.commit);
        if self.stored_listing(&listing.commit).as_ref() != Some(listing) {
            make_parent(&stored)?;
            atomic::write_file(&stored, &serde_json::to_vec(listing).expect("a list of files is plain data"))?;
        }
        if !is_commit(revision) && self.commit_of(revision).as_ref() != Some(&listing.commit) {
            let path = self.folder.join("refs").join(revision);
            make_parent(&path)?;
            atomic::write_file(&path, listing.commit.as_bytes())?;
        }
        Ok(())
    }

    /// Makes a name of a commit refer to its bytes.
    ///
    /// # Errors
    /// A link that cannot be made.
    pub(super) fn link(&self, commit: &str, file: &RemoteFile) -> Result<(), FilesError> {
        let path = self.snapshot(commit).join(&file.name);
        make_parent(&path)?;
        let levels = 2 + file.name.split('/').count() - 1;
        let target = format!("{}blobs/{}", "../".repeat(levels), file.checksum.digits());
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(FilesError::io(&path, "replace", error));
            }
            _ => {}
        }
        symlink(target, &path).or_else(ignore_existing).map_err(|error| FilesError::io(&path, "link", error))
    }

    /// Waits until no other process writes what `name` stands for, and keeps others from it until the file is dropped.
    ///
    /// # Errors
    /// A lock file that cannot be made.
    pub(super) fn lock(&self, name: &str) -> Result<File, FilesError> {
        let path = self.locks.join(format!("{name}.lock"));
        make_parent(&path)?;
        let file =
            File::options().create(true).append(true).open(&path).map_err(|e| FilesError::io(&path, "open", e))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|e| FilesError::io(&path, "lock", e.into()))?;
        Ok(file)
    }
}

fn ignore_existing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
}

/// Creates the folder of a file.
pub(super) fn make_parent(path: &Path) -> Result<(), FilesError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|error| FilesError::io(folder, "create", error))
}
