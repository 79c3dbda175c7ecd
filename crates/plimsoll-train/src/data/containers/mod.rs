//! Containers of data files: from the bytes of a file to its records, one at a time.
//!
//! | module | files | a record is |
//! |---|---|---|
//! | `lines` | `.jsonl`, `.ndjson` | a line with a JSON object |
//! | `json` | `.json` | an element of the list, or one of several objects in a row |
//! | `csv` | `.csv`, `.tsv` | a row; the first row names the columns |
//! | `parquet` | `.parquet` | a row |
//! | `text` | `.txt` | the whole file, as a text in windows |
//!
//! `decompress` opens the bytes below all of them except Parquet: `.gz` and `.zst`, byte order marks, UTF-16. The
//! meaning of a record belongs to `formats`. Memory is bounded by the longest record, [`RECORD_BYTES_MAX`].

mod csv;
mod decompress;
mod json;
mod lines;
mod parquet;
#[cfg(test)]
mod tests;
pub(super) mod text;
mod utf16;

use super::error::{DataError, Place, SourceLocation};
use super::json_reason;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

pub(super) use decompress::open_bytes;

/// The longest record of a file: a line of JSON, an element of a list, a row.
pub(super) const RECORD_BYTES_MAX: usize = 16 << 20;

/// The container of a data file, by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Container {
    PlainText,
    JsonLines,
    Json,
    /// Rows whose values are separated by this byte.
    Csv(u8),
    Parquet,
}

/// The compression of a data file, by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// The type of a data file, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileType {
    pub container: Container,
    pub compression: Compression,
}

/// Returns whether the name of a file is that of a data file.
pub(crate) fn is_data_file(file: &Path) -> bool {
    file_type(file).is_ok()
}

/// Returns the type of a data file.
///
/// # Errors
/// A folder, or a name without a known extension.
pub(super) fn file_type(file: &Path) -> Result<FileType, DataError> {
    let unsupported = |expected| Err(DataError::UnsupportedFile { file: file.to_owned(), expected });
    if file.is_dir() {
        return unsupported("a file, not a folder");
    }
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let (stem, compression) = match name.rsplit_once('.') {
        Some((stem, "gz")) => (stem, Compression::Gzip),
        Some((stem, "zst")) => (stem, Compression::Zstd),
        _ => (&*name, Compression::None),
    };
    let container = match stem.rsplit_once('.').map(|(_, extension)| extension) {
        Some("jsonl" | "ndjson") => Container::JsonLines,
        Some("json") => Container::Json,
        Some("csv") => Container::Csv(b','),
        Some("tsv") => Container::Csv(b'\t'),
        Some("txt") => Container::PlainText,
        Some("parquet") if compression == Compression::None => Container::Parquet,
        Some("parquet") => return unsupported("a .parquet file that is not compressed again"),
        _ => return unsupported("a .jsonl, .json, .csv, .tsv, .parquet or .txt file"),
    };
    Ok(FileType { container, compression })
}

/// The number of bytes that were read from a file, shared by the reader of the file and the report of progress.
#[derive(Clone, Debug, Default)]
pub(super) struct ByteCounter(Rc<Cell<u64>>);

impl ByteCounter {
    /// Returns the bytes read so far.
    pub fn get(&self) -> u64 {
        self.0.get()
    }

    fn add(&self, bytes: u64) {
        self.0.set(self.0.get() + bytes);
    }

    fn set(&self, bytes: u64) {
        self.0.set(bytes);
    }
}

/// A record of a data file.
#[derive(Debug)]
pub(super) enum Record<'a> {
    /// The text of a JSON value.
    Json(&'a str),
    /// The values of a row, by the names of their columns.
    Row(Value),
}

impl<'a> Record<'a> {
    /// Parses the record into a value of type `T`.
    ///
    /// # Errors
    /// The reason for which it has another form, in words.
    pub fn parse<T: Deserialize<'a>>(self) -> Result<T, String> {
        match self {
            Record::Json(text) => serde_json::from_str(text).map_err(|error| json_reason::reason(text, &error)),
            Record::Row(row) => T::deserialize(row).map_err(|error| error.to_string()),
        }
    }

    /// Parses the record into a value of type `T` that borrows nothing, and keeps the record.
    pub fn peek<T: DeserializeOwned>(&self) -> Result<T, String> {
        match self {
            Record::Json(text) => serde_json::from_str(text).map_err(|error| json_reason::reason(text, &error)),
            Record::Row(row) => T::deserialize(row).map_err(|error| error.to_string()),
        }
    }
}

/// A record of a data file with its place.
#[derive(Debug)]
pub(super) struct PlacedRecord<'a> {
    pub place: Place,
    pub record: Record<'a>,
}

/// A reader of the records of one data file, in any container except plain text.
pub(super) enum RecordReader {
    Lines(lines::LineReader),
    Json(json::JsonReader),
    Csv(Box<csv::CsvReader>),
    Parquet(Box<parquet::ParquetReader>),
}

impl RecordReader {
    /// Opens a data file. `counter` follows the bytes of the file that were read.
    ///
    /// # Errors
    /// A file that cannot be read, is damaged at its beginning, or is plain text, which has no records.
    pub fn open(file: &Path, counter: &ByteCounter) -> Result<RecordReader, DataError> {
        let FileType { container, compression } = file_type(file)?;
        let bytes = || open_bytes(file, compression, counter);
        Ok(match container {
            Container::JsonLines => RecordReader::Lines(lines::LineReader::new(bytes()?)),
            Container::Json => RecordReader::Json(json::JsonReader::new(bytes()?)),
            Container::Csv(separator) => RecordReader::Csv(Box::new(csv::CsvReader::open(bytes()?, separator)?)),
            Container::Parquet => RecordReader::Parquet(Box::new(parquet::ParquetReader::open(file, counter)?)),
            Container::PlainText => {
                let expected = "a file with records, not plain text";
                return Err(DataError::UnsupportedFile { file: file.to_owned(), expected });
            }
        })
    }

    /// Reads the next record; `None` at the end of the file.
    ///
    /// # Errors
    /// The first record that cannot be read, with its place.
    pub fn read_next(&mut self) -> Result<Option<PlacedRecord<'_>>, DataError> {
        match self {
            RecordReader::Lines(reader) => reader.read_next(),
            RecordReader::Json(reader) => reader.read_next(),
            RecordReader::Csv(reader) => reader.read_next(),
            RecordReader::Parquet(reader) => reader.read_next(),
        }
    }
}

/// Returns the UTF-8 text of a record's bytes.
///
/// # Errors
/// NUL bytes, and bytes that are not UTF-8.
fn record_text(bytes: &[u8], location: impl FnOnce() -> SourceLocation) -> Result<&str, DataError> {
    if bytes.contains(&0) {
        return Err(DataError::NulByte { location: location() });
    }
    str::from_utf8(bytes).map_err(|_| DataError::NotUtf8 { location: location() })
}
