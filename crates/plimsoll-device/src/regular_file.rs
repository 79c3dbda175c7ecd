//! Reading of files that users and earlier runs supply: run files, data, models, results and caches; and [`write()`] for
//! files that a flag names.
//!
//! Only regular files are read. A FIFO, a socket or a device could block the process, have side effects, or never end.

use plimsoll_core::Bytes;
use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// The largest file that is read whole. Tokenizers, the largest such files, have tens of megabytes.
const WHOLE_BYTES_MAX: u64 = 256 << 20;

/// Checks that a path leads to a regular file. Follows symbolic links.
///
/// # Errors
/// A path without a file, or a file of another type, which the message names.
pub fn check(path: &Path) -> io::Result<()> {
    check_type(fs::metadata(path)?.file_type())
}

/// Returns whether a folder has this name, even as a link to a missing file. Such a link is damage, not an absent file.
pub fn is_present(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Opens a regular file for reading. Follows symbolic links.
///
/// # Errors
/// The errors of [`check`], or a file that cannot be opened.
pub fn open(path: &Path) -> io::Result<File> {
    // Opening a device may already have an effect, so the type is checked before.
    check(path)?;
    open_with(OpenOptions::new().read(true), 0, path)
}

/// Reads a regular file whole.
///
/// # Errors
/// The errors of [`open`], a failed read, or a file above 256 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_whole(open(path)?)
}

/// Reads a regular file whole, as text.
///
/// # Errors
/// The errors of [`read`], or text that is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::new(ErrorKind::InvalidData, "it is not text in UTF-8"))
}

/// Writes a file that a flag names, or writes to the device or FIFO there. A FIFO without a reader is refused, because
/// opening it would wait.
///
/// # Errors
/// A FIFO without a reader, or a file that cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let opened = OpenOptions::new().write(true).create(true).truncate(false).custom_flags(flags).open(path);
    let _open = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => io::Error::new(ErrorKind::InvalidInput, "it is a FIFO or a socket without a reader"),
        _ => error,
    })?;
    fs::write(path, bytes)
}

/// Opens a file with `options` and `flags` of `open(2)`, without waiting, and checks that it is regular.
pub(crate) fn open_with(options: &OpenOptions, flags: i32, path: &Path) -> io::Result<File> {
    let file = options.clone().custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | flags).open(path)?;
    check_type(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads an open file from its position to its end.
pub(crate) fn read_whole(file: File) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= WHOLE_BYTES_MAX {
        bytes.reserve_exact(length as usize + 1);
        // The length of a growing file, or of one in /proc, says nothing.
        file.take(WHOLE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    }
    if length.max(bytes.len() as u64) > WHOLE_BYTES_MAX {
        let message = format!("it is larger than {}", Bytes(WHOLE_BYTES_MAX));
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Checks that a type is that of a regular file.
fn check_type(kind: FileType) -> io::Result<()> {
    let name = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {name}, not a regular file")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::net::UnixListener;

    #[test]
    fn other_types_are_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let [fifo, socket, link, text] = ["fifo", "socket", "link", "text"].map(|name| folder.path().join(name));
        let name = CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let _socket = UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&fifo, &link).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("dangling")).unwrap();
        assert!(is_present(&folder.path().join("dangling")) && !is_present(&folder.path().join("nowhere")));
        for (path, says) in [
            (fifo.as_path(), "a FIFO"),
            (&link, "a FIFO"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a device"),
            (folder.path(), "directory"),
        ] {
            let refused = read(path).unwrap_err();
            assert!(refused.to_string().contains(says), "{}: {refused}", path.display());
        }
        fs::write(&text, "words").unwrap();
        assert_eq!(read_text(&text).unwrap(), "words");
        fs::write(&text, b"\xff").unwrap();
        assert_eq!(read_text(&text).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn fifo_without_reader_is_refused_for_writing() {
        let folder = tempfile::tempdir().unwrap();
        let [fifo, file] = ["fifo", "file"].map(|name| folder.path().join(name));
        let name = CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(write(&fifo, b"lost").unwrap_err().to_string().contains("a FIFO or a socket without a reader"));
        for text in ["longer text", "text"] {
            write(&file, text.as_bytes()).unwrap();
            assert_eq!(read_text(&file).unwrap(), text);
        }
        write(Path::new("/dev/null"), b"text").unwrap();
    }

    #[test]
    fn huge_file_is_refused_unread() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 40).unwrap();
        assert_eq!(read(file.path()).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }
}
