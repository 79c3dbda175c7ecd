//! JSON files: one list of objects, or objects one after another. The second form covers a single object and JSON lines.
//!
//! A scanner finds where each value ends, without parsing it, so only one record is in memory.

use super::super::error::{DataError, Place};
use super::decompress::ByteStream;
use super::{PlacedRecord, RECORD_BYTES_MAX, Record, record_text};
use plimsoll_core::Bytes;

/// A reader of the values of a JSON file.
pub(crate) struct JsonReader {
    bytes: ByteStream,
    position: Position,
    value: Vec<u8>,
    /// Number of the last value, counted from 1.
    number: u64,
    /// Line that is being read, counted from 1.
    line: u64,
}

/// A position between the values of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    /// Before the first value.
    Start,
    /// In a list, before its first value.
    ListStart,
    /// In a list, after a value.
    AfterValue,
    /// In a list, after a comma.
    AfterComma,
    /// Between objects that follow each other.
    Sequence,
    /// After the list.
    End,
}

impl JsonReader {
    /// Begins at the first value.
    pub fn new(bytes: ByteStream) -> JsonReader {
        JsonReader { bytes, position: Position::Start, value: Vec::new(), number: 0, line: 1 }
    }

    /// Reads the next value.
    ///
    /// # Errors
    /// Text between the values that is not JSON, and a value that is too long, has NUL bytes or is not UTF-8.
    pub fn read_next(&mut self) -> Result<Option<PlacedRecord<'_>>, DataError> {
        let place = loop {
            let next = self.skip_blanks()?;
            self.position = match (self.position, next) {
                (Position::Start | Position::Sequence | Position::End, None) => return Ok(None),
                (_, None) => return Err(self.malformed("the list does not end with `]`")),
                (Position::Start, Some(b'[')) => Position::ListStart,
                (Position::AfterValue | Position::ListStart, Some(b']')) => Position::End,
                (Position::AfterValue, Some(b',')) => Position::AfterComma,
                (Position::AfterValue, _) => return Err(self.malformed("expected `,` or `]` after it")),
                (Position::AfterComma, Some(b']')) => return Err(self.malformed("expected an object after the `,`")),
                (Position::End, _) => return Err(self.malformed("expected nothing after the list")),
                (Position::Start | Position::Sequence, _) => break Place::Line(self.line),
                (Position::ListStart | Position::AfterComma, _) => break Place::Record(self.number + 1),
            };
            self.bytes.consume(1);
        };
        self.number += 1;
        self.position = if matches!(place, Place::Line(_)) { Position::Sequence } else { Position::AfterValue };
        self.read_value(place)?;
        let text = record_text(&self.value, || self.bytes.location(place))?;
        Ok(Some(PlacedRecord { place, record: Record::Json(text) }))
    }

    /// Removes white space, and returns the first byte after it.
    fn skip_blanks(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            let bytes = self.bytes.fill()?;
            if bytes.is_empty() {
                return Ok(None);
            }
            let found = bytes.iter().position(|byte| !byte.is_ascii_whitespace());
            let blanks = found.unwrap_or(bytes.len());
            let (next, lines) = (found.map(|at| bytes[at]), count_lines(&bytes[..blanks]));
            self.line += lines;
            self.bytes.consume(blanks);
            if next.is_some() {
                return Ok(next);
            }
        }
    }

    /// Reads a value up to its end into `value`.
    fn read_value(&mut self, place: Place) -> Result<(), DataError> {
        self.value.clear();
        let mut scanner = Scanner::default();
        loop {
            let bytes = self.bytes.fill()?;
            let end = scanner.find_end(bytes);
            let count = end.unwrap_or(bytes.len());
            if self.value.len() + count > RECORD_BYTES_MAX {
                let limit = Bytes(RECORD_BYTES_MAX as u64);
                return Err(DataError::RecordTooLong { location: self.bytes.location(place), limit });
            }
            self.value.extend_from_slice(&bytes[..count]);
            self.line += count_lines(&bytes[..count]);
            self.bytes.consume(count);
            // The parser reports a value that the end of the file cuts.
            if end.is_some() || count == 0 {
                return Ok(());
            }
        }
    }

    /// Returns an error in the list at or after the last value.
    fn malformed(&self, reason: &str) -> DataError {
        let location = self.bytes.location(Place::Record(self.number.max(1)));
        DataError::MalformedRecord { location, reason: format!("{reason} (line {})", self.line), format: None }
    }
}

fn count_lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&byte| byte == b'\n').count() as u64
}

/// A scanner for the end of a JSON value.
#[derive(Default)]
struct Scanner {
    /// Brackets that are open.
    depth: usize,
    in_text: bool,
    /// Whether the last byte was a backslash in a text, which keeps the next from ending it.
    is_escaped: bool,
    /// Whether a byte of the value was seen.
    has_begun: bool,
}

impl Scanner {
    /// Returns the number of bytes up to the end of the value; `None` if it goes on after `bytes`.
    fn find_end(&mut self, bytes: &[u8]) -> Option<usize> {
        for (at, &byte) in bytes.iter().enumerate() {
            let is_first = !std::mem::replace(&mut self.has_begun, true);
            if self.in_text {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => self.in_text = false,
                    _ => {}
                }
                if !self.in_text && self.depth == 0 {
                    return Some(at + 1);
                }
                continue;
            }
            match byte {
                b'"' => self.in_text = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth > 0 => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                // A number or a word ends before these.
                b'}' | b']' | b',' | b' ' | b'\t' | b'\r' | b'\n' if self.depth == 0 && !is_first => return Some(at),
                _ => {}
            }
        }
        None
    }
}
