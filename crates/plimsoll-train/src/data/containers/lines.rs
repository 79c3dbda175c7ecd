//! JSON lines: each line that is not blank is a record.

use super::super::error::{DataError, Place};
use super::decompress::ByteStream;
use super::{PlacedRecord, RECORD_BYTES_MAX, Record, record_text};
use plimsoll_core::Bytes;

const BYTE_ORDER_MARK: char = '\u{feff}';

/// A reader of the lines of a file.
pub(crate) struct LineReader {
    bytes: ByteStream,
    line: Vec<u8>,
    /// Number of the line in `line`, counted from 1.
    number: u64,
}

impl LineReader {
    /// Begins at the first line.
    pub fn new(bytes: ByteStream) -> LineReader {
        LineReader { bytes, line: Vec::new(), number: 0 }
    }

    /// Reads the next line that is not blank.
    ///
    /// # Errors
    /// A line that is too long, has NUL bytes or is not UTF-8.
    pub fn read_next(&mut self) -> Result<Option<PlacedRecord<'_>>, DataError> {
        loop {
            self.line.clear();
            let read = self.bytes.read_line(&mut self.line, RECORD_BYTES_MAX + 1)?;
            self.number += 1;
            let place = Place::Line(self.number);
            if read == 0 {
                return Ok(None);
            }
            if read > RECORD_BYTES_MAX {
                let limit = Bytes(RECORD_BYTES_MAX as u64);
                return Err(DataError::RecordTooLong { location: self.bytes.location(place), limit });
            }
            if !is_blank(&self.line) {
                let text = record_text(&self.line, || self.bytes.location(place))?;
                return Ok(Some(PlacedRecord { place, record: Record::Json(trimmed(text)) }));
            }
        }
    }
}

/// Removes white space and byte order marks around a line. Files that were joined have such marks inside.
fn trimmed(text: &str) -> &str {
    text.trim_start_matches(BYTE_ORDER_MARK).trim()
}

/// Returns whether a line has only white space and byte order marks.
fn is_blank(line: &[u8]) -> bool {
    match line.iter().find(|byte| !byte.is_ascii_whitespace()) {
        None => true,
        // Only a line that begins with another character than those of JSON needs a closer look.
        Some(first) => !first.is_ascii() && str::from_utf8(line).is_ok_and(|text| trimmed(text).is_empty()),
    }
}
