//! Rows of Parquet files: texts, lists of numbers, and lists of structs.
//!
//! The crate `parquet` reads page after page, so memory is bounded by the pages of the used columns. Its panics on
//! damaged files become errors.

use super::super::error::{DataError, Place, SourceLocation};
use super::super::{foreign_format, guard, token_line};
use super::{ByteCounter, PlacedRecord, RECORD_BYTES_MAX, Record};
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{ChunkReader, FileReader, Length, SerializedFileReader};
use ::parquet::record::reader::RowIter;
use ::parquet::record::{Field, Row};
use ::parquet::schema::types::Type;
use plimsoll_core::Bytes;
use plimsoll_device::regular_file;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most bytes that are read at once: a page of a column, or the description of the file.
const PAGE_BYTES_MAX: usize = 128 << 20;
/// The most bytes that a column may have in a row group, decompressed.
const COLUMN_BYTES_MAX: u64 = 16 << 30;
/// Rows that are taken from a page at once.
const BATCH_ROWS: usize = 64;
/// Columns that a format reads. Others are not read from the disk.
const USED_COLUMNS: [&str; 18] = [
    "text",
    "input_ids",
    "labels",
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "prompt",
    "completion",
    "label",
    "chosen",
    "rejected",
    "tools",
    "chat_template_kwargs",
    "thinking",
];

/// A reader of the rows of a file.
pub(crate) struct ParquetReader {
    file: PathBuf,
    file_bytes: u64,
    rows: RowIter<'static>,
    row_count: u64,
    /// Number of the last row, counted from 1.
    number: u64,
    counter: ByteCounter,
    /// Bytes that were counted before this file.
    counted_before: u64,
}

impl ParquetReader {
    /// Opens a file. `counter` follows the share of the rows that were read.
    ///
    /// # Errors
    /// A file that is no Parquet file, is damaged, or has no column that a format reads.
    pub fn open(file: &Path, counter: &ByteCounter) -> Result<ParquetReader, DataError> {
        let pages = PageFile::open(file)?;
        let file_bytes = pages.bytes;
        let mut head = vec![0; file_bytes.min(64) as usize];
        pages.file.read_exact_at(&mut head, 0).map_err(DataError::io("read", file))?;
        if !head.starts_with(b"PAR1") {
            foreign_format::check(file, &head)?;
            let (expected, found) = ("Parquet data", "other data");
            let remedy = "give it the ending of its content, such as .jsonl";
            return Err(DataError::ForeignFormat { file: file.to_owned(), expected, found, remedy });
        }
        let open = || SerializedFileReader::new(pages);
        let reader = call_library(open).map_err(|reason| damaged(file, reason))?;
        let metadata = reader.metadata();
        let row_count = u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
        let schema = metadata.file_metadata().schema();
        let used: Vec<_> = schema.get_fields().iter().filter(|field| is_used(field.name())).cloned().collect();
        if used.is_empty() {
            let keys = schema.get_fields().iter().map(|field| field.name().to_owned()).collect();
            let location = SourceLocation { file: file.to_owned(), place: Place::File };
            return Err(DataError::NoMatchingFormat { location, keys });
        }
        for (index, group) in metadata.row_groups().iter().enumerate() {
            let columns = group
                .columns()
                .iter()
                .filter(|column| column.column_path().parts().first().is_some_and(|name| is_used(name)));
            let bytes = columns.map(|column| u64::try_from(column.uncompressed_size()).unwrap_or(u64::MAX)).max();
            if let Some(bytes) = bytes.filter(|&bytes| bytes > COLUMN_BYTES_MAX) {
                let limit = Bytes(COLUMN_BYTES_MAX);
                let reason = format!("a column of row group {} has {}; the limit is {limit}", index + 1, Bytes(bytes));
                return Err(damaged(file, reason));
            }
        }
        let name = schema.name().to_owned();
        let project = move || {
            let projection = Type::group_type_builder(&name).with_fields(used).build()?;
            RowIter::from_file_into(Box::new(reader)).with_batch_size(BATCH_ROWS).project(Some(projection))
        };
        let rows = call_library(project).map_err(|reason| damaged(file, reason))?;
        let (counter, counted_before) = (counter.clone(), counter.get());
        Ok(ParquetReader { file: file.to_owned(), file_bytes, rows, row_count, number: 0, counter, counted_before })
    }

    /// Reads the next row.
    ///
    /// # Errors
    /// A damaged file, and a value that is no text, number, list or struct.
    pub fn read_next(&mut self) -> Result<Option<PlacedRecord<'_>>, DataError> {
        let place = Place::Record(self.number + 1);
        let row = call_library(|| self.rows.next().transpose())
            .map_err(|reason| damaged(&self.file, format!("row {}: {reason}", self.number + 1)))?;
        let Some(row) = row else { return Ok(None) };
        self.number += 1;
        let done = u128::from(self.file_bytes) * u128::from(self.number) / u128::from(self.row_count.max(1));
        self.counter.set(self.counted_before + self.file_bytes.min(done as u64));
        let row = object(row).map_err(|reason| {
            let location = SourceLocation { file: self.file.clone(), place };
            DataError::MalformedRecord { location, reason, format: None }
        })?;
        if text_bytes(&row) > RECORD_BYTES_MAX {
            let location = SourceLocation { file: self.file.clone(), place };
            return Err(DataError::RecordTooLong { location, limit: Bytes(RECORD_BYTES_MAX as u64) });
        }
        Ok(Some(PlacedRecord { place, record: Record::Row(row) }))
    }
}

fn damaged(file: &Path, reason: String) -> DataError {
    DataError::DamagedFile { file: file.to_owned(), reason }
}

fn is_used(column: &str) -> bool {
    USED_COLUMNS.contains(&column) || token_line::is_number_column(column)
}

/// Calls the crate `parquet`, and returns its errors and panics as messages.
fn call_library<T>(call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    guard::catch_panic(call)
        .map_err(|panic| format!("the library `parquet` fails: {panic}"))?
        .map_err(|error| error.to_string())
}

/// Returns a row or struct as an object. Values that are null are omitted, because all structs of a column have the same
/// fields.
fn object(row: Row) -> Result<Value, String> {
    let mut object = Map::new();
    for (name, field) in row.into_columns() {
        let value = value(field).map_err(|reason| format!("column `{name}`: {reason}"))?;
        object.extend(Some(value).filter(|value| !value.is_null()).map(|value| (name, value)));
    }
    Ok(object.into())
}

/// Returns the bytes of all texts in a value, and one for each other value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(values) => values.values().map(text_bytes).sum(),
        _ => 1,
    }
}

/// Returns a field of a row as JSON.
fn value(field: Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(flag) => flag.into(),
        Field::Byte(number) => number.into(),
        Field::Short(number) => number.into(),
        Field::Int(number) => number.into(),
        Field::Long(number) => number.into(),
        Field::UByte(number) => number.into(),
        Field::UShort(number) => number.into(),
        Field::UInt(number) => number.into(),
        Field::ULong(number) => number.into(),
        Field::Float(number) => number.into(),
        Field::Double(number) => number.into(),
        Field::Str(text) => text.into(),
        // Some writers do not mark texts as such.
        Field::Bytes(bytes) => str::from_utf8(bytes.data()).map_err(|_| "the bytes are not UTF-8".to_owned())?.into(),
        Field::Group(row) => object(row)?,
        Field::ListInternal(list) => list.elements().iter().cloned().map(value).collect::<Result<_, _>>()?,
        Field::MapInternal(map) => {
            let mut object = Map::new();
            for (key, entry) in map.entries() {
                let Field::Str(key) = key else { return Err("the keys of a map are no texts".to_owned()) };
                object.insert(key.clone(), value(entry.clone())?);
            }
            object.into()
        }
        other => other.to_string().into(),
    })
}

/// A file of which the crate `parquet` reads pages.
struct PageFile {
    file: Arc<File>,
    bytes: u64,
}

impl PageFile {
    fn open(path: &Path) -> Result<PageFile, DataError> {
        let file = regular_file::open(path).map_err(DataError::io("read", path))?;
        let bytes = file.metadata().map_err(DataError::io("read", path))?.len();
        Ok(PageFile { file: Arc::new(file), bytes })
    }
}

impl Length for PageFile {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for PageFile {
    type T = BufReader<FileFrom>;

    fn get_read(&self, start: u64) -> Result<BufReader<FileFrom>, ParquetError> {
        Ok(BufReader::new(FileFrom { file: Arc::clone(&self.file), at: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<bytes::Bytes, ParquetError> {
        if length > PAGE_BYTES_MAX {
            let (length, limit) = (Bytes(length as u64), Bytes(PAGE_BYTES_MAX as u64));
            return Err(ParquetError::General(format!("a page has {length}; the limit is {limit}")));
        }
        let mut buffer = vec![0; length];
        self.file.read_exact_at(&mut buffer, start)?;
        Ok(buffer.into())
    }
}

/// The bytes of a file from a place on.
pub(crate) struct FileFrom {
    file: Arc<File>,
    at: u64,
}

impl Read for FileFrom {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}
