//! The user's data files: parsing of files into documents.
//!
//! Memory is bounded by the longest line and by [`WINDOW_BYTES`]. Tokenizers, rows and the token cache live in other
//! modules.

use super::error::{DataError, SourceLocation};
use super::token_line::{RefusedKey, TokenLine};
use super::{Format, foreign_format, json_reason};
use plimsoll_core::Bytes;
use plimsoll_device::regular_file;
use serde::Deserialize;
use std::borrow::Cow;

use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The longest text that is tokenized at once. A tokenizer needs about 100 bytes of memory per byte of text.
const WINDOW_BYTES: usize = 64 << 10;
/// Bytes between the beginnings of two windows. It is a prime, so that groups of a few characters that a tokenizer
/// counts from the end of a window differ between two windows, and are seen where their tokens are compared.
const WINDOW_STRIDE: usize = 57_397;
/// The longest line of a `.jsonl` file.
const LINE_BYTES_MAX: usize = 16 << 20;
/// Bytes read between two calls of the progress callback.
const PROGRESS_BYTES: u64 = 1 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const BYTE_ORDER_MARK_CHARACTER: char = '\u{feff}';

/// The place of a document: the index of its file, and its line, counted from 1. Line 0 means that the document is the
/// whole file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DocumentOrigin {
    pub file: usize,
    pub line: u64,
}

impl DocumentOrigin {
    /// Returns the path and line of the document in `files`, for messages.
    pub fn location(self, files: &[PathBuf]) -> SourceLocation {
        SourceLocation { file: files[self.file].clone(), line: (self.line > 0).then_some(self.line) }
    }
}

/// A document (a text or a list of tokens), or a window of one, as the reader of the user's files yields it.
#[derive(Debug)]
pub(super) enum DocumentPart<'a> {
    /// A window of a document's text, not empty. It begins at the byte `start` of the text, before the end of the
    /// window before it. `ends` tells whether it is the last.
    Text { window: &'a str, start: usize, ends: bool },
    /// A whole document as token ids, all inside the model's vocabulary, with the label of each token; `labels` is
    /// `None` if every token is its own label.
    Tokens { ids: &'a [i32], labels: Option<&'a [i32]> },
    /// A document without text.
    Empty,
}

/// The type of a data file, by its extension.
pub(super) enum FileKind {
    JsonLines,
    PlainText,
}

/// Returns the type of a data file. Fails if `format` does not allow it.
pub(super) fn file_kind(file: &Path, format: Format) -> Result<FileKind, DataError> {
    let unsupported = |expected| Err(DataError::UnsupportedFile { file: file.to_owned(), expected });
    let extension = file.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    match extension.as_deref() {
        _ if file.is_dir() => unsupported("a file, not a folder"),
        Some("jsonl") => Ok(FileKind::JsonLines),
        Some("txt") if format == Format::Text => Ok(FileKind::PlainText),
        Some("txt") => unsupported("a .jsonl file, the only type of the tokens format"),
        _ => unsupported("a .jsonl or .txt file"),
    }
}

/// A reader that passes once over all data files and yields their documents.
pub(super) struct SourceReader<'a> {
    pub files: &'a [PathBuf],
    pub format: Format,
    pub vocab: u64,
    /// Callback with the bytes read so far, called about every MiB. `Break` stops the reading.
    pub progress: &'a mut dyn FnMut(u64) -> ControlFlow<()>,
    pub done_bytes: u64,
}

impl SourceReader<'_> {
    /// Calls `on_part` with every document, or with each window of a long text, file by file.
    pub fn read_all(
        &mut self,
        mut on_part: impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        for (index, file) in self.files.iter().enumerate() {
            let opened = regular_file::open(file).map_err(DataError::io("read", file))?;
            let mut reader = BufReader::with_capacity(WINDOW_BYTES, opened);
            let first_bytes = reader.fill_buf().map_err(DataError::io("read", file))?;
            foreign_format::check(file, first_bytes)?;
            if first_bytes.starts_with(BYTE_ORDER_MARK) {
                reader.consume(BYTE_ORDER_MARK.len());
            }
            match file_kind(file, self.format)? {
                FileKind::PlainText => {
                    self.read_text(&mut reader, DocumentOrigin { file: index, line: 0 }, &mut on_part)?
                }
                FileKind::JsonLines => self.read_json_lines(&mut reader, index, &mut on_part)?,
            }
        }
        Ok(())
    }

    /// Parses each line of a `.jsonl` file as a document and passes it to `on_part`. `file` is the file's index.
    fn read_json_lines(
        &mut self,
        reader: &mut impl BufRead,
        file: usize,
        on_part: &mut impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut line = Vec::new();
        for number in 1.. {
            let origin = DocumentOrigin { file, line: number };
            line.clear();
            let read = reader.by_ref().take(LINE_BYTES_MAX as u64 + 1).read_until(b'\n', &mut line);
            match read.map_err(DataError::io("read", &self.files[file]))? {
                0 => return Ok(()),
                bytes if bytes > LINE_BYTES_MAX => {
                    return Err(DataError::LineTooLong {
                        location: self.location(origin),
                        limit: Bytes(LINE_BYTES_MAX as u64),
                    });
                }
                bytes => self.report_progress(bytes)?,
            }
            let text = str::from_utf8(&line).map_err(|_| DataError::NotUtf8 { location: self.location(origin) })?;
            // Files that were joined have byte order marks inside.
            let text = text.trim_start_matches(BYTE_ORDER_MARK_CHARACTER).trim();
            if text.is_empty() {
                continue;
            }
            match self.format {
                Format::Text => {
                    #[derive(Deserialize)]
                    struct Line<'a> {
                        #[serde(borrow)]
                        text: Cow<'a, str>,
                    }
                    let line: Line = self.parse_line(text, origin)?;
                    self.read_text(&mut line.text.as_bytes(), origin, on_part)?;
                }
                Format::Tokens => {
                    let line: TokenLine = self.parse_line(text, origin)?;
                    self.read_tokens(line, origin, on_part)?;
                }
            }
        }
        Ok(())
    }

    /// Checks a document of tokens and passes it to `on_part`. Without a label after its first token it is empty.
    fn read_tokens(
        &self,
        mut line: TokenLine,
        origin: DocumentOrigin,
        on_part: &mut impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        if let Some(labels) = line.labels.as_ref().map(Vec::len).filter(|&labels| labels != line.input_ids.len()) {
            let tokens = line.input_ids.len();
            return Err(DataError::LabelCount { location: self.location(origin), tokens, labels });
        }
        line.apply_columns().map_err(|RefusedKey { key, problem }| {
            let location = self.location(origin);
            DataError::TokenKey { location, key, problem }
        })?;
        let TokenLine { input_ids: ids, labels, .. } = &line;
        self.check_ids(origin, "token", ids)?;
        self.check_ids(origin, "label", labels.as_deref().unwrap_or_default())?;
        let has_label = labels.as_ref().unwrap_or(ids).iter().skip(1).any(|&label| label != super::IGNORED_LABEL);
        let document = DocumentPart::Tokens { ids, labels: labels.as_deref() };
        on_part(origin, if has_label { document } else { DocumentPart::Empty })
    }

    /// Reads the text of one document and passes it to `on_part` in windows that overlap. Where a window ends depends
    /// only on the text.
    fn read_text(
        &mut self,
        reader: &mut impl Read,
        origin: DocumentOrigin,
        on_part: &mut impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut buffer = Vec::new();
        let mut start = 0;
        loop {
            let wanted = (2 * WINDOW_BYTES - buffer.len()) as u64;
            let read = reader.by_ref().take(wanted).read_to_end(&mut buffer);
            let read_bytes = read.map_err(DataError::io("read", &self.files[origin.file]))?;
            // The bytes of a line were counted when the line was read.
            if origin.line == 0 {
                self.report_progress(read_bytes)?;
            }
            let ended = (read_bytes as u64) < wanted;
            let text = match str::from_utf8(&buffer) {
                Ok(text) => text,
                // The last character is incomplete: its other bytes are not read yet.
                Err(error) if error.error_len().is_none() && !ended => {
                    str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default()
                }
                Err(_) => return Err(DataError::NotUtf8 { location: self.location(origin) }),
            };
            if text.is_empty() {
                return on_part(origin, DocumentPart::Empty);
            }
            if text.len() <= WINDOW_BYTES {
                return on_part(origin, DocumentPart::Text { window: text, start, ends: true });
            }
            let window = &text[..floor_char_boundary(text, WINDOW_BYTES)];
            let next = floor_char_boundary(text, WINDOW_STRIDE);
            on_part(origin, DocumentPart::Text { window, start, ends: false })?;
            start += next;
            buffer.drain(..next);
        }
    }

    /// Parses the JSON line `text` into a value of type `T`. Errors name `origin`, the place of the line.
    fn parse_line<'a, T: Deserialize<'a>>(&self, text: &'a str, origin: DocumentOrigin) -> Result<T, DataError> {
        serde_json::from_str(text).map_err(|error| DataError::MalformedLine {
            location: self.location(origin),
            reason: json_reason::reason(text, &error),
            format: self.format,
        })
    }

    /// Checks that every id is inside the vocabulary; a label may also be −100. `id_kind` is "token" or "label". Errors
    /// name `origin`, the document's place in the files.
    fn check_ids(&self, origin: DocumentOrigin, id_kind: &'static str, ids: &[i32]) -> Result<(), DataError> {
        let allowed =
            |id: i32| (id >= 0 && (id as u64) < self.vocab) || (id_kind == "label" && id == super::IGNORED_LABEL);
        match ids.iter().find(|&&id| !allowed(id)) {
            None => Ok(()),
            Some(&id) => {
                let (location, id) = (self.location(origin), i64::from(id));
                Err(DataError::IdOutOfRange { location, id_kind, id, vocab: self.vocab })
            }
        }
    }

    /// Counts bytes read, and calls the progress callback about every MiB. Fails if the callback asks to stop.
    fn report_progress(&mut self, bytes: usize) -> Result<(), DataError> {
        let before = self.done_bytes;
        self.done_bytes += bytes as u64;
        if before / PROGRESS_BYTES != self.done_bytes / PROGRESS_BYTES && (self.progress)(self.done_bytes).is_break() {
            return Err(DataError::Stopped);
        }
        Ok(())
    }

    fn location(&self, origin: DocumentOrigin) -> SourceLocation {
        origin.location(self.files)
    }
}

/// Returns the beginning of the character of `text` at the byte `at`, or `at` if a character begins there.
fn floor_char_boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// Passes the documents in `bytes`, the content of a `.jsonl` file, to `on_part` (for tests).
#[cfg(test)]
pub(super) fn read_json_bytes(
    bytes: &[u8],
    format: Format,
    vocab: u64,
    mut on_part: impl FnMut(DocumentOrigin, DocumentPart),
) -> Result<(), DataError> {
    let files = [PathBuf::from("data.jsonl")];
    let progress = &mut |_| ControlFlow::Continue(());
    let mut reading = SourceReader { files: &files, format, vocab, progress, done_bytes: 0 };
    reading.read_json_lines(&mut std::io::Cursor::new(bytes), 0, &mut |origin, part| {
        on_part(origin, part);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refusal(bytes: &[u8], format: Format) -> String {
        read_json_bytes(bytes, format, 10, |_, _| ()).unwrap_err().to_string()
    }

    #[test]
    fn malformed_lines_are_reported_with_file_and_line() {
        let cases: [(&[u8], Format, &str); 14] = [
            (
                b"{\"text\": \"a\"}\n{\"text\": 5}",
                Format::Text,
                "data.jsonl:2: invalid type: integer `5`, expected a string (column 10)",
            ),
            (b"\n\nnonsense", Format::Text, "data.jsonl:3: expected ident (column 2)"),
            (b"{\"text\": \"a\"", Format::Text, "data.jsonl:1: EOF while parsing an object (column 12)"),
            (b"{\"txt\": \"a\"}", Format::Text, "data.jsonl:1: missing field `text` (column 12)"),
            (b"[1, 2]", Format::Text, "data.jsonl:1: expected an object, found a list (column 2)"),
            (b"{\"text\": \"\xff\"}", Format::Text, "data.jsonl:1: not UTF-8"),
            (
                b"{\"input_ids\": [1, 2.5]}",
                Format::Tokens,
                "data.jsonl:1: invalid type: floating point `2.5`, expected i32 (column 21)",
            ),
            (
                b"{\"input_ids\": [1, -2]}",
                Format::Tokens,
                "data.jsonl:1: token -2 is outside the model's vocabulary of 10 tokens",
            ),
            (
                b"{\"input_ids\": [1, 10]}",
                Format::Tokens,
                "data.jsonl:1: token 10 is outside the model's vocabulary of 10 tokens",
            ),
            (
                b"{\"input_ids\": [-100]}",
                Format::Tokens,
                "data.jsonl:1: token -100 is outside the model's vocabulary of 10 tokens",
            ),
            (
                b"{\"input_ids\": [1, 5000000000]}",
                Format::Tokens,
                "data.jsonl:1: invalid value: integer `5000000000`, expected i32 (column 28)",
            ),
            (b"{\"input_ids\": [1, 2], \"labels\": [1]}", Format::Tokens, "data.jsonl:1: 1 label for 2 tokens"),
            (
                b"{\"input_ids\": [1, 2], \"labels\": [1, 11]}",
                Format::Tokens,
                "data.jsonl:1: label 11 is outside the model's vocabulary of 10 tokens",
            ),
            (
                b"{\"input_ids\": \"1 2\"}",
                Format::Tokens,
                "data.jsonl:1: invalid type: string \"1 2\", expected a sequence (column 19)",
            ),
        ];
        for (bytes, format, message) in cases {
            assert_eq!(refusal(bytes, format), message);
        }
        let mut long = vec![b' '; LINE_BYTES_MAX + 1];
        long[0] = b'"';
        assert_eq!(refusal(&long, Format::Text), "data.jsonl:1: the line is longer than 16.00 MiB");
    }

    #[test]
    fn other_keys_and_blank_lines_are_ignored() {
        let lines = "\n{\"id\": 7, \"text\": \"a\\nb\", \"meta\": {\"x\": [null]}}\r\n  \n\u{feff}{\"text\":\"\"}";
        let lines = lines.as_bytes();
        let mut seen = Vec::new();
        read_json_bytes(lines, Format::Text, 10, |at, part| seen.push((at.line, format!("{part:?}")))).unwrap();
        let text = r#"Text { window: "a\nb", start: 0, ends: true }"#.to_owned();
        assert_eq!(seen, [(2, text), (4, "Empty".to_owned())]);
    }

    #[test]
    fn windows_of_long_text_overlap() {
        let text = "añ one two\nthree\n\n".repeat(3 * WINDOW_BYTES / 15) + "end";
        let mut ends = vec![0];
        let line = serde_json::json!({ "text": text }).to_string();
        read_json_bytes(line.as_bytes(), Format::Text, 10, |_, part| match part {
            DocumentPart::Text { window, start, ends: last } => {
                assert_eq!(window, &text[start..start + window.len()]);
                assert!(window.len() <= WINDOW_BYTES);
                assert!(start == 0 || start + (WINDOW_BYTES - WINDOW_STRIDE) <= ends[ends.len() - 1] + 4);
                ends.push(start + window.len());
                assert_eq!(last, ends[ends.len() - 1] == text.len());
            }
            other => panic!("{other:?}"),
        })
        .unwrap();
        assert!(ends.len() > 3);
        assert_eq!(ends.last(), Some(&text.len()));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), tokens: bool) {
            let format = if tokens { Format::Tokens } else { Format::Text };
            let _ = read_json_bytes(&bytes, format, 10, |_, _| ());
        }

        /// Generates nearly valid lines, so that the checks after JSON parsing are reached.
        #[test]
        fn only_valid_ids_and_labels_are_accepted(
            ids in prop::collection::vec(prop_oneof![0i64..10, any::<i64>()], 0..4),
            labels in prop::option::of(prop::collection::vec(prop_oneof![Just(-100i64), 0i64..10, any::<i64>()], 0..4)),
        ) {
            let line = serde_json::json!({ "input_ids": ids, "labels": labels }).to_string();
            let valid = ids.iter().all(|id| (0..10).contains(id)) && labels.iter().flatten().all(|id| (0..10).contains(id) || *id == -100)
                && labels.as_ref().is_none_or(|labels| labels.len() == ids.len());
            prop_assert_eq!(read_json_bytes(line.as_bytes(), Format::Tokens, 10, |_, _| ()).is_ok(), valid);
        }

        #[test]
        fn windows_cover_the_text(text in "(\\PC| |\n){0,40}", times in 1usize..4000) {
            let text = text.repeat(times);
            let (mut joined, mut ends_seen) = (String::new(), 0);
            let line = serde_json::json!({ "text": text }).to_string();
            prop_assume!(line.len() < LINE_BYTES_MAX);
            read_json_bytes(line.as_bytes(), Format::Text, 10, |_, part| if let DocumentPart::Text { window, start, ends } = part {
                joined += &window[joined.len() - start..];
                ends_seen += usize::from(ends);
            }).unwrap();
            prop_assert_eq!(&joined, &text);
            prop_assert_eq!(ends_seen, usize::from(!text.is_empty()));
        }
    }
}
