//! The bytes of a data file as UTF-8: decompressed, without a byte order mark, from UTF-8 or UTF-16.

use super::super::error::{DataError, Place, SourceLocation};
use super::super::foreign_format;
use super::utf16::Utf16Reader;
use super::{ByteCounter, Compression};
use flate2::bufread::MultiGzDecoder;
use plimsoll_device::regular_file;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Bytes that are read from a file at once.
const BUFFER_BYTES: usize = 64 << 10;
/// Bytes of a file by which its content is recognized.
const HEAD_BYTES: u64 = 64;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The bytes of a data file.
pub(crate) struct ByteStream {
    file: PathBuf,
    reader: Box<dyn BufRead>,
}

impl ByteStream {
    /// Returns the bytes that are buffered; none at the end of the file.
    ///
    /// # Errors
    /// A file that cannot be read, or damaged compressed data.
    pub fn fill(&mut self) -> Result<&[u8], DataError> {
        self.reader.fill_buf().map_err(|error| read_error(&self.file, error))
    }

    /// Removes the first `count` buffered bytes.
    pub fn consume(&mut self, count: usize) {
        self.reader.consume(count);
    }

    /// Appends the next line to `line`, with its end, but at most `limit` bytes. Returns the bytes read.
    ///
    /// # Errors
    /// As [`ByteStream::fill`].
    pub fn read_line(&mut self, line: &mut Vec<u8>, limit: usize) -> Result<usize, DataError> {
        let read = self.reader.by_ref().take(limit as u64).read_until(b'\n', line);
        read.map_err(|error| read_error(&self.file, error))
    }

    /// Appends up to `count` bytes to `buffer`. Returns the bytes read, fewer only at the end of the file.
    ///
    /// # Errors
    /// As [`ByteStream::fill`].
    pub fn read_bytes(&mut self, buffer: &mut Vec<u8>, count: usize) -> Result<usize, DataError> {
        let read = self.reader.by_ref().take(count as u64).read_to_end(buffer);
        read.map_err(|error| read_error(&self.file, error))
    }

    /// Returns a place in the file, for messages.
    pub fn location(&self, place: Place) -> SourceLocation {
        SourceLocation { file: self.file.clone(), place }
    }
}

/// Opens the bytes of a data file. `counter` follows the bytes of the file that were read.
///
/// # Errors
/// A file that cannot be read, or with content of another format than its name says.
pub(crate) fn open_bytes(
    file: &Path,
    compression: Compression,
    counter: &ByteCounter,
) -> Result<ByteStream, DataError> {
    let opened = regular_file::open(file).map_err(DataError::io("read", file))?;
    let counted = CountedFile { file: opened, counter: counter.clone() };
    let mut raw = BufReader::with_capacity(BUFFER_BYTES, counted);
    let found = raw.fill_buf().map_err(DataError::io("read", file))?;
    let (magic, kind): (&[u8], _) = match compression {
        Compression::None => (b"", "text"),
        Compression::Gzip => (b"\x1f\x8b", "gzip data"),
        Compression::Zstd => (b"\x28\xb5\x2f\xfd", "zstd data"),
    };
    if !found.starts_with(magic) && !found.is_empty() {
        let (file, remedy) = (file.to_owned(), "remove the ending of the compression from its name");
        return Err(DataError::ForeignFormat { file, expected: kind, found: "other data", remedy });
    }
    let decompressed: Box<dyn Read> = match compression {
        // The library takes an empty file for a truncated one.
        _ if found.is_empty() => Box::new(raw),
        Compression::None => Box::new(raw),
        Compression::Gzip => Box::new(MultiGzDecoder::new(raw)),
        Compression::Zstd => {
            let decoder = zstd::Decoder::with_buffer(raw).map_err(|error| read_error(file, error))?;
            Box::new(decoder)
        }
    };
    let reader = decode_text(file, decompressed)?;
    Ok(ByteStream { file: file.to_owned(), reader })
}

/// Removes a byte order mark, and decodes UTF-16 that begins with one.
fn decode_text(file: &Path, mut bytes: Box<dyn Read>) -> Result<Box<dyn BufRead>, DataError> {
    let mut head = Vec::new();
    bytes.by_ref().take(HEAD_BYTES).read_to_end(&mut head).map_err(|error| read_error(file, error))?;
    let is_utf16 = (head.starts_with(b"\xff\xfe") || head.starts_with(b"\xfe\xff")) && head.get(2..4) != Some(&[0, 0]);
    if !is_utf16 {
        foreign_format::check(file, &head)?;
    }
    let is_little_endian = head.starts_with(b"\xff\xfe");
    let mark = match is_utf16 {
        true => 2,
        false if head.starts_with(BYTE_ORDER_MARK) => BYTE_ORDER_MARK.len(),
        false => 0,
    };
    head.drain(..mark);
    let rest = Cursor::new(head).chain(BufReader::with_capacity(BUFFER_BYTES, bytes));
    Ok(match is_utf16 {
        true => Box::new(BufReader::with_capacity(BUFFER_BYTES, Utf16Reader::new(rest, is_little_endian))),
        false => Box::new(rest),
    })
}

/// Returns the error of a failed read: that of the operating system, or damaged content that a decoder refuses.
fn read_error(file: &Path, error: io::Error) -> DataError {
    let is_damage = matches!(
        error.kind(),
        ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof | ErrorKind::Other
    );
    match is_damage && error.raw_os_error().is_none() {
        true => DataError::DamagedFile { file: file.to_owned(), reason: error.to_string() },
        false => DataError::io("read", file)(error),
    }
}

/// A file that counts the bytes that are read from it.
struct CountedFile {
    file: File,
    counter: ByteCounter,
}

impl Read for CountedFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.counter.add(count as u64);
        Ok(count)
    }
}
