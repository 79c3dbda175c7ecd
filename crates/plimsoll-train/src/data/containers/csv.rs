//! Rows of `.csv` and `.tsv` files. The first row names the columns.

use super::super::error::{DataError, Place};
use super::decompress::ByteStream;
use super::{PlacedRecord, RECORD_BYTES_MAX, Record, record_text};
use csv_core::{ReadRecordResult, Reader, ReaderBuilder};
use plimsoll_core::{Bytes, format_count};
use serde_json::{Map, Value};

/// The most columns of a file.
const COLUMNS_MAX: usize = 4096;
/// Columns that hold JSON.
const JSON_COLUMNS: [&str; 8] =
    ["input_ids", "labels", "messages", "conversations", "tools", "history", "chat_template_kwargs", "label"];
/// Columns that hold a text, or a list of messages as JSON.
const TEXT_OR_MESSAGES_COLUMNS: [&str; 4] = ["prompt", "completion", "chosen", "rejected"];
/// Columns whose empty values are texts. All other empty values count as absent.
const TEXT_COLUMNS: [&str; 7] = ["text", "instruction", "output", "prompt", "completion", "chosen", "rejected"];

/// A reader of the rows of a file.
pub(crate) struct CsvReader {
    bytes: ByteStream,
    parser: Reader,
    columns: Vec<String>,
    /// The values of a row, one after another.
    values: Vec<u8>,
    /// The end of each value in `values`.
    ends: Vec<usize>,
    /// Number of the last row, counted from 1 after the names of the columns.
    number: u64,
}

impl CsvReader {
    /// Reads the names of the columns. Values are separated by `separator`.
    ///
    /// # Errors
    /// Names that are not UTF-8 or not different.
    pub fn open(bytes: ByteStream, separator: u8) -> Result<CsvReader, DataError> {
        let parser = ReaderBuilder::new().delimiter(separator).build();
        let (values, ends) = (vec![0; 4 << 10], vec![0; 64]);
        let mut reader = CsvReader { bytes, parser, columns: Vec::new(), values, ends, number: 0 };
        let Some(count) = reader.read_row(Place::File)? else { return Ok(reader) };
        for index in 0..count {
            let name = reader.value(index, Place::File)?.trim().to_owned();
            if reader.columns.contains(&name) {
                return Err(reader.malformed(Place::File, format!("two columns have the name `{name}`")));
            }
            reader.columns.push(name);
        }
        if let [name] = &reader.columns[..]
            && name.contains([';', '\t', '|'])
        {
            let reason = format!("the only column is `{name}`; expected commas (.csv) or tabs (.tsv) between columns");
            return Err(reader.malformed(Place::File, reason));
        }
        Ok(reader)
    }

    /// Reads the next row that is not blank.
    ///
    /// # Errors
    /// A row that is too long, is not UTF-8 or has another number of values than there are columns.
    pub fn read_next(&mut self) -> Result<Option<PlacedRecord<'_>>, DataError> {
        let place = Place::Record(self.number + 1);
        let Some(count) = self.read_row(place)? else { return Ok(None) };
        self.number += 1;
        if count != self.columns.len() {
            let (values, columns) = (format_count(count, "value"), format_count(self.columns.len(), "column"));
            return Err(self.malformed(place, format!("{values} for {columns}")));
        }
        let mut row = Map::new();
        for (index, column) in self.columns.iter().enumerate() {
            let text = self.value(index, place)?;
            let value = parse_value(column, text).map_err(|reason| self.malformed(place, reason))?;
            row.extend(value.map(|value| (column.clone(), value)));
        }
        Ok(Some(PlacedRecord { place, record: Record::Row(row.into()) }))
    }

    /// Reads a row into `values` and `ends`. Returns the number of its values; `None` at the end of the file.
    fn read_row(&mut self, place: Place) -> Result<Option<usize>, DataError> {
        let (mut written, mut count) = (0, 0);
        // After the file comes a line break, which does not end a value whose quote is never closed.
        let mut breaks_left = 1;
        loop {
            let bytes = self.bytes.fill()?;
            let is_end = bytes.is_empty();
            let input = if is_end && breaks_left > 0 { b"\n" } else { bytes };
            let (result, read, values, ends) =
                self.parser.read_record(input, &mut self.values[written..], &mut self.ends[count..]);
            (written, count) = (written + values, count + ends);
            if is_end {
                breaks_left -= read.min(breaks_left);
            } else {
                self.bytes.consume(read);
            }
            match result {
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull if self.values.len() < RECORD_BYTES_MAX => {
                    self.values.resize(2 * self.values.len(), 0);
                }
                ReadRecordResult::OutputFull => {
                    let limit = Bytes(RECORD_BYTES_MAX as u64);
                    return Err(DataError::RecordTooLong { location: self.bytes.location(place), limit });
                }
                ReadRecordResult::OutputEndsFull if self.ends.len() < COLUMNS_MAX => {
                    self.ends.resize(2 * self.ends.len(), 0);
                }
                ReadRecordResult::OutputEndsFull => {
                    return Err(self.malformed(place, format!("more than {COLUMNS_MAX} values")));
                }
                ReadRecordResult::Record if is_end && read == 0 => {
                    return Err(self.malformed(place, "a quote is never closed".to_owned()));
                }
                ReadRecordResult::Record => return Ok(Some(count)),
                ReadRecordResult::End => return Ok(None),
            }
        }
    }

    /// Returns a value of the last row.
    fn value(&self, index: usize, place: Place) -> Result<&str, DataError> {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        record_text(&self.values[start..self.ends[index]], || self.bytes.location(place))
    }

    fn malformed(&self, place: Place, reason: String) -> DataError {
        DataError::MalformedRecord { location: self.bytes.location(place), reason, format: None }
    }
}

/// Returns the meaning of a value in a column; `None` if it counts as absent.
///
/// # Errors
/// A column that holds JSON, and a value that is not JSON.
fn parse_value(column: &str, text: &str) -> Result<Option<Value>, String> {
    let has_json = JSON_COLUMNS.contains(&column) || super::super::token_line::is_number_column(column);
    if text.is_empty() && !TEXT_COLUMNS.contains(&column) {
        return Ok(None);
    }
    if let ("label", "True" | "False") = (column, text) {
        return Ok(Some(Value::Bool(text == "True")));
    }
    if has_json {
        let parsed = serde_json::from_str(text);
        return parsed.map(Some).map_err(|error| format!("column `{column}` is not JSON: {error}"));
    }
    // A text may begin with a bracket, too.
    if TEXT_OR_MESSAGES_COLUMNS.contains(&column) && text.trim_start().starts_with('[') {
        let messages: Option<Vec<Map<String, Value>>> = serde_json::from_str(text).ok();
        if let Some(messages) = messages.filter(|messages| !messages.is_empty()) {
            return Ok(Some(messages.into_iter().map(Value::Object).collect()));
        }
    }
    Ok(Some(text.into()))
}
