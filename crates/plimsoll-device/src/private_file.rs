//! Files and folders of Plimsoll in places that other users may share: caches, logs and temporary folders.
//!
//! New caches and temporary folders are readable for this user only. No symbolic link in the place of a file is
//! followed, so that another user cannot lead a write elsewhere. A file or folder counts as planted if another user owns
//! it in a folder in which all users may write.

use crate::regular_file::{self, open_with};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, absolute};
use tempfile::{NamedTempFile, TempDir};

/// Permission of all users to write to a folder.
const WRITABLE_FOR_ALL: u32 = 0o002;

/// Creates a folder and its ancestors, as far as they are missing, for this user only.
///
/// # Errors
/// A folder that cannot be created, or that another user has planted.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    check_owner(folder)
}

/// Creates a temporary folder with a random name, for this user only. It is deleted with its contents when dropped.
///
/// # Errors
/// The system's temporary folder cannot be written.
pub fn temporary_folder() -> io::Result<TempDir> {
    tempfile::Builder::new().prefix("plimsoll-").permissions(Permissions::from_mode(0o700)).tempdir()
}

/// Creates an empty file for writing, for this user only. What has its name is removed first.
///
/// # Errors
/// A file that cannot be created or removed.
pub fn create(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Writes a file of a cache for this user only, and replaces an existing one. Creates its folder if needed. A temporary
/// file is written to disk and then renamed, so neither concurrent readers nor a power failure leave half a file.
///
/// # Errors
/// A folder or file that cannot be written, or a folder that another user has planted.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    make_folder(folder)?;
    let mut temporary = NamedTempFile::new_in(folder)?;
    temporary.write_all(bytes)?;
    temporary.as_file().sync_all()?;
    temporary.persist(path)?;
    Ok(())
}

/// Opens a log or lock file for appending and reading, and creates it if it is missing.
///
/// # Errors
/// A file that cannot be opened, is a symbolic link, or is not regular.
pub fn append(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true).append(true).create(true), libc::O_NOFOLLOW, path)
}

/// Opens a file of a cache for reading.
///
/// # Errors
/// A file that cannot be opened, is not regular, or that another user has planted.
pub fn open(path: &Path) -> io::Result<File> {
    check_owner(path)?;
    regular_file::open(path)
}

/// Reads a file of a cache whole.
///
/// # Errors
/// The errors of [`open`], a failed read, or a file above 256 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    regular_file::read_whole(open(path)?)
}

/// Checks that no other user has planted a path or a folder above it.
fn check_owner(path: &Path) -> io::Result<()> {
    // SAFETY: the call only returns a number.
    let user = unsafe { libc::geteuid() };
    let path = absolute(path)?;
    for (entry, around) in path.ancestors().zip(path.ancestors().skip(1)) {
        let owner = fs::symlink_metadata(entry)?.uid();
        if is_planted(user, owner, fs::metadata(around)?.mode()) {
            let message = format!("{} belongs to another user", entry.display());
            return Err(io::Error::new(ErrorKind::PermissionDenied, message));
        }
    }
    Ok(())
}

/// Returns whether an entry of `owner` may have been planted: `user` and root do not own it, and the `mode` of the
/// folder around it lets all users write.
fn is_planted(user: u32, owner: u32, mode: u32) -> bool {
    owner != user && owner != 0 && mode & WRITABLE_FOR_ALL != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn links_in_place_of_files_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [victim, link] = ["victim", "link"].map(|name| folder.path().join(name));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        assert!(append(&link).is_err());
        create(&link).unwrap();
        assert!(!link.is_symlink() && append(&link).is_ok());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn new_files_and_folders_are_private() {
        let folder = temporary_folder().unwrap();
        let deep = folder.path().join("deep/cache");
        make_folder(&deep).unwrap();
        replace(&deep.join("file"), b"").unwrap();
        let modes = [folder.path(), deep.parent().unwrap(), &deep, &deep.join("file")].map(mode);
        assert_eq!(modes, [0o700, 0o700, 0o700, 0o600]);
        assert!(read(&deep.join("file")).unwrap().is_empty());
    }

    #[test]
    fn only_foreign_entries_of_shared_folders_are_planted() {
        assert!(is_planted(1000, 65534, 0o41777) && is_planted(0, 1000, 0o40777));
        let shared = 0o41777;
        for (user, owner, mode) in [(1000, 1000, shared), (1000, 0, shared), (0, 1000, 0o40755), (9, 1000, 0o40775)] {
            assert!(!is_planted(user, owner, mode), "{user} {owner} {mode:o}");
        }
    }
}
