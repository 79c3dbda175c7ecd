//! The user's data files: expansion of globs, and parsing of files into documents.
//!
//! Memory is bounded by the longest line and by [`PIECE_BYTES`]. Tokenizers, rows and the token cache live in other
//! modules.

use super::Format;
use super::error::{DataError, SourceLocation};
use plimsoll_core::Bytes;
use serde::Deserialize;
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Largest piece of text that is tokenized at once. A tokenizer needs about 100 bytes of memory per byte of text.
const PIECE_BYTES: usize = 64 << 10;
/// The longest line of a `.jsonl` file.
const LINE_BYTES_MAX: usize = 16 << 20;
/// Bytes read between two calls of the progress callback.
const PROGRESS_BYTES: u64 = 1 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

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

/// A document (a text or a list of tokens), or a piece of one, as the reader of the user's files yields it.
#[derive(Debug)]
pub(super) enum DocumentPart<'a> {
    /// A piece of a document's text, not empty. `begins` tells whether it is the first piece of its document, and
    /// `ends` whether it is the last.
    Text { piece: &'a str, begins: bool, ends: bool },
    /// A whole document as token ids, all inside the model's vocabulary, with the label of each token; `labels` is
    /// `None` if every token is its own label.
    Tokens { ids: &'a [i32], labels: Option<&'a [i32]> },
    /// A document without text.
    Empty,
}

/// Expands paths and globs into files, each file once. Files come in the order of `patterns`, those of one glob in
/// alphabetical order.
///
/// # Errors
/// An invalid pattern, a pattern without files, or a file that is not of `format`.
pub(crate) fn list_files(patterns: &[String], format: Format) -> Result<Vec<PathBuf>, DataError> {
    let mut files: Vec<PathBuf> = Vec::new();
    for pattern in patterns {
        // An existing file may have brackets in its name, so it is not expanded as a glob.
        let matches = if Path::new(pattern).exists() {
            vec![PathBuf::from(pattern)]
        } else {
            let invalid = |reason: String| DataError::InvalidPattern { pattern: pattern.clone(), reason };
            let paths = glob::glob(pattern).map_err(|error| invalid(error.msg.to_owned()))?;
            paths.collect::<Result<Vec<_>, _>>().map_err(|error| invalid(error.to_string()))?
        };
        if matches.is_empty() {
            return Err(DataError::NoFiles { pattern: pattern.clone() });
        }
        for file in matches {
            file_kind(&file, format)?;
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    if files.is_empty() { Err(DataError::NoPatterns) } else { Ok(files) }
}

/// The type of a data file, by its extension.
enum FileKind {
    JsonLines,
    PlainText,
}

fn file_kind(file: &Path, format: Format) -> Result<FileKind, DataError> {
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
    /// Calls `on_part` with every document, or with each piece of a long text, file by file.
    pub fn read_all(
        &mut self,
        mut on_part: impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        for (index, file) in self.files.iter().enumerate() {
            let opened = File::open(file).map_err(DataError::io("read", file))?;
            let mut reader = BufReader::with_capacity(PIECE_BYTES, opened);
            if reader.fill_buf().map_err(DataError::io("read", file))?.starts_with(BYTE_ORDER_MARK) {
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
            let text =
                str::from_utf8(&line).map_err(|_| DataError::NotUtf8 { location: self.location(origin) })?.trim();
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
                    #[derive(Deserialize)]
                    struct Line {
                        input_ids: Vec<i32>,
                        labels: Option<Vec<i32>>,
                    }
                    let Line { input_ids, labels } = self.parse_line(text, origin)?;
                    self.check_ids(origin, "token", &input_ids)?;
                    if let Some(labels) = &labels {
                        if labels.len() != input_ids.len() {
                            let (tokens, labels) = (input_ids.len(), labels.len());
                            return Err(DataError::LabelCount { location: self.location(origin), tokens, labels });
                        }
                        self.check_ids(origin, "label", labels)?;
                    }
                    on_part(origin, DocumentPart::Tokens { ids: &input_ids, labels: labels.as_deref() })?;
                }
            }
        }
        Ok(())
    }

    /// Reads the text of one document and passes it to `on_part` in pieces. Where a piece ends depends only on the
    /// text.
    fn read_text(
        &mut self,
        reader: &mut impl Read,
        origin: DocumentOrigin,
        on_part: &mut impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut buffer = Vec::new();
        let mut begins = true;
        loop {
            let wanted = (2 * PIECE_BYTES - buffer.len()) as u64;
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
            if text.len() <= PIECE_BYTES {
                return on_part(origin, DocumentPart::Text { piece: text, begins, ends: true });
            }
            let end = piece_end(text);
            on_part(origin, DocumentPart::Text { piece: &text[..end], begins, ends: false })?;
            begins = false;
            buffer.drain(..end);
        }
    }

    /// Parses the JSON line `text` into a value of type `T`. Errors name `origin`, the place of the line.
    fn parse_line<'a, T: Deserialize<'a>>(&self, text: &'a str, origin: DocumentOrigin) -> Result<T, DataError> {
        serde_json::from_str(text).map_err(|error| {
            // The parser sees a single line, so its line number is dropped and its column kept.
            let (message, column) = (error.to_string(), error.column());
            let suffix = format!(" at line {} column {column}", error.line());
            let message = message.strip_suffix(&suffix).unwrap_or(&message);
            DataError::MalformedLine {
                location: self.location(origin),
                reason: format!("{message} (column {column})"),
                format: self.format,
            }
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

/// Returns the end of the first piece of a `text` longer than [`PIECE_BYTES`]: after a single line break, else before
/// a single space, else at the limit. Common tokenizers split words at these places, so the pieces have the tokens of
/// the whole text.
fn piece_end(text: &str) -> usize {
    let limit = (0..=PIECE_BYTES).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let is_single = |at: usize, length: usize| {
        let before = text[..at].chars().next_back().is_some_and(|c| !c.is_whitespace());
        let after = text[at + length..].chars().next().is_some_and(|c| !c.is_whitespace());
        before && after
    };
    let last = |c: char| text[..limit].rmatch_indices(c).map(|(at, _)| at).find(|&at| is_single(at, 1));
    last('\n').map(|at| at + 1).or_else(|| last(' ')).unwrap_or(limit)
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
            (b"[1, 2]", Format::Text, "data.jsonl:1: invalid type: integer `1`, expected a string (column 2)"),
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
        let lines = b"\n{\"id\": 7, \"text\": \"a\\nb\", \"meta\": {\"x\": [null]}}\r\n  \n{\"text\":\"\"}";
        let mut seen = Vec::new();
        read_json_bytes(lines, Format::Text, 10, |at, part| seen.push((at.line, format!("{part:?}")))).unwrap();
        let text = r#"Text { piece: "a\nb", begins: true, ends: true }"#.to_owned();
        assert_eq!(seen, [(2, text), (4, "Empty".to_owned())]);
    }

    #[test]
    fn long_text_is_cut_after_single_line_break() {
        let text = "one two\nthree\n\n".repeat(3 * PIECE_BYTES / 15) + "end";
        let mut pieces = Vec::new();
        let line = serde_json::json!({ "text": text }).to_string();
        read_json_bytes(line.as_bytes(), Format::Text, 10, |_, part| match part {
            DocumentPart::Text { piece, begins, ends } => pieces.push((piece.to_owned(), begins, ends)),
            other => panic!("{other:?}"),
        })
        .unwrap();
        assert!(pieces.len() >= 3);
        assert_eq!(pieces.iter().map(|(piece, ..)| piece.as_str()).collect::<String>(), text);
        for (number, (piece, begins, ends)) in pieces.iter().enumerate() {
            assert!(piece.len() <= PIECE_BYTES);
            assert_eq!((*begins, *ends), (number == 0, number + 1 == pieces.len()));
            assert!(*ends || piece.ends_with("two\n"), "cut inside a run of line breaks");
        }
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
        fn pieces_concatenate_to_the_text(text in "(\\PC| |\n){0,40}", times in 1usize..4000) {
            let text = text.repeat(times);
            let (mut joined, mut ends_seen) = (String::new(), 0);
            let line = serde_json::json!({ "text": text }).to_string();
            prop_assume!(line.len() < LINE_BYTES_MAX);
            read_json_bytes(line.as_bytes(), Format::Text, 10, |_, part| if let DocumentPart::Text { piece, ends, .. } = part {
                joined += piece;
                ends_seen += usize::from(ends);
            }).unwrap();
            prop_assert_eq!(&joined, &text);
            prop_assert_eq!(ends_seen, usize::from(!text.is_empty()));
        }
    }
}
