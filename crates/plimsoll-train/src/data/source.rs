//! The user's files: globs to files, files to documents. Memory is bounded by the longest line and
//! by [`PIECE_BYTES`]; nothing here knows tokenizers, rows or the cache.

use super::Format;
use super::error::{DataError, Place};
use plimsoll_core::Bytes;
use serde::Deserialize;
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Longer text is tokenised in pieces of at most this size: a tokenizer holds about 100 bytes for
/// each byte that it works on.
const PIECE_BYTES: usize = 64 << 10;
/// The longest line of a `.jsonl` file.
const LINE_BYTES_MAX: usize = 16 << 20;
/// How often progress is told.
const PROGRESS_BYTES: u64 = 1 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Where a document begins: a file by its number, and a line counted from 1; 0 for a whole file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct At {
    pub file: usize,
    pub line: u64,
}

impl At {
    /// The same in the user's words.
    pub fn place(self, files: &[PathBuf]) -> Place {
        Place { file: files[self.file].clone(), line: (self.line > 0).then_some(self.line) }
    }
}

/// What the files hold, in order.
#[derive(Debug)]
pub(super) enum Found<'a> {
    /// A piece of a document's text, not empty.
    Text { piece: &'a str, begins: bool, ends: bool },
    /// A whole document in ids that the model knows.
    Tokens { ids: &'a [i32], labels: Option<&'a [i32]> },
    /// A document without text.
    Nothing,
}

/// The files that patterns name: these in order, a glob's files alphabetically, each file once.
///
/// # Errors
/// There are none, or some are not of the format.
pub(crate) fn files(patterns: &[String], format: Format) -> Result<Vec<PathBuf>, DataError> {
    let mut files: Vec<PathBuf> = Vec::new();
    for pattern in patterns {
        // A file whose name happens to hold brackets is meant as it stands.
        let found = if Path::new(pattern).exists() {
            vec![PathBuf::from(pattern)]
        } else {
            let bad = |reason: String| DataError::Pattern { pattern: pattern.clone(), reason };
            let paths = glob::glob(pattern).map_err(|error| bad(error.msg.to_owned()))?;
            paths.collect::<Result<Vec<_>, _>>().map_err(|error| bad(error.to_string()))?
        };
        if found.is_empty() {
            return Err(DataError::NoFiles { pattern: pattern.clone() });
        }
        for file in found {
            kind(&file, format)?;
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    if files.is_empty() { Err(DataError::NoPatterns) } else { Ok(files) }
}

enum Kind {
    Lines,
    Plain,
}

fn kind(file: &Path, format: Format) -> Result<Kind, DataError> {
    let wrong = |expected| Err(DataError::Kind { file: file.to_owned(), expected });
    let extension = file.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    match extension.as_deref() {
        _ if file.is_dir() => wrong("a file, this is a folder"),
        Some("jsonl") => Ok(Kind::Lines),
        Some("txt") if format == Format::Text => Ok(Kind::Plain),
        Some("txt") => wrong("a .jsonl file: the tokens format has no other"),
        _ => wrong("a .jsonl or .txt file"),
    }
}

/// One pass over all files.
pub(super) struct Reading<'a> {
    pub files: &'a [PathBuf],
    pub format: Format,
    pub vocab: u64,
    /// Told how many bytes are done, about every MiB; may stop the reading.
    pub progress: &'a mut dyn FnMut(u64) -> ControlFlow<()>,
    pub done_bytes: u64,
}

impl Reading<'_> {
    /// Hands every document to `found`, file by file.
    pub fn run(&mut self, mut found: impl FnMut(At, Found) -> Result<(), DataError>) -> Result<(), DataError> {
        for (number, file) in self.files.iter().enumerate() {
            let opened = File::open(file).map_err(DataError::io("read", file))?;
            let mut reader = BufReader::with_capacity(PIECE_BYTES, opened);
            if reader.fill_buf().map_err(DataError::io("read", file))?.starts_with(BYTE_ORDER_MARK) {
                reader.consume(BYTE_ORDER_MARK.len());
            }
            match kind(file, self.format)? {
                Kind::Plain => self.text(&mut reader, At { file: number, line: 0 }, &mut found)?,
                Kind::Lines => self.lines(&mut reader, number, &mut found)?,
            }
        }
        Ok(())
    }

    fn lines(
        &mut self,
        reader: &mut impl BufRead,
        file: usize,
        found: &mut impl FnMut(At, Found) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut line = Vec::new();
        for number in 1.. {
            let at = At { file, line: number };
            line.clear();
            let taken = reader.by_ref().take(LINE_BYTES_MAX as u64 + 1).read_until(b'\n', &mut line);
            match taken.map_err(DataError::io("read", &self.files[file]))? {
                0 => return Ok(()),
                bytes if bytes > LINE_BYTES_MAX => {
                    return Err(DataError::LineTooLong { place: self.place(at), limit: Bytes(LINE_BYTES_MAX as u64) });
                }
                bytes => self.advance(bytes)?,
            }
            let text = str::from_utf8(&line).map_err(|_| DataError::NotUtf8 { place: self.place(at) })?.trim();
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
                    let line: Line = self.parse(text, at)?;
                    self.text(&mut line.text.as_bytes(), at, found)?;
                }
                Format::Tokens => {
                    #[derive(Deserialize)]
                    struct Line {
                        input_ids: Vec<i32>,
                        labels: Option<Vec<i32>>,
                    }
                    let Line { input_ids, labels } = self.parse(text, at)?;
                    self.check(at, "token", &input_ids)?;
                    if let Some(labels) = &labels {
                        if labels.len() != input_ids.len() {
                            let (tokens, labels) = (input_ids.len(), labels.len());
                            return Err(DataError::LabelCount { place: self.place(at), tokens, labels });
                        }
                        self.check(at, "label", labels)?;
                    }
                    found(at, Found::Tokens { ids: &input_ids, labels: labels.as_deref() })?;
                }
            }
        }
        Ok(())
    }

    /// One document's text, in pieces whose ends depend on the text alone.
    fn text(
        &mut self,
        reader: &mut impl Read,
        at: At,
        found: &mut impl FnMut(At, Found) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut buffer = Vec::new();
        let mut begins = true;
        loop {
            let wanted = (2 * PIECE_BYTES - buffer.len()) as u64;
            let taken = reader.by_ref().take(wanted).read_to_end(&mut buffer);
            let taken = taken.map_err(DataError::io("read", &self.files[at.file]))?;
            // The bytes of a line are counted with the line.
            if at.line == 0 {
                self.advance(taken)?;
            }
            let ended = (taken as u64) < wanted;
            let text = match str::from_utf8(&buffer) {
                Ok(text) => text,
                // A character whose other bytes are not read yet.
                Err(error) if error.error_len().is_none() && !ended => {
                    str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default()
                }
                Err(_) => return Err(DataError::NotUtf8 { place: self.place(at) }),
            };
            if text.is_empty() {
                return found(at, Found::Nothing);
            }
            if text.len() <= PIECE_BYTES {
                return found(at, Found::Text { piece: text, begins, ends: true });
            }
            let end = piece_end(text);
            found(at, Found::Text { piece: &text[..end], begins, ends: false })?;
            begins = false;
            buffer.drain(..end);
        }
    }

    fn parse<'a, T: Deserialize<'a>>(&self, text: &'a str, at: At) -> Result<T, DataError> {
        serde_json::from_str(text).map_err(|error| {
            // The reader counts lines within our line: only its column says something.
            let (full, column) = (error.to_string(), error.column());
            let told = full.strip_suffix(&format!(" at line {} column {column}", error.line())).unwrap_or(&full);
            DataError::Line { place: self.place(at), reason: format!("{told} (column {column})"), format: self.format }
        })
    }

    fn check(&self, at: At, what: &'static str, ids: &[i32]) -> Result<(), DataError> {
        let allowed = |id: i32| (id >= 0 && (id as u64) < self.vocab) || (what == "label" && id == super::IGNORED);
        match ids.iter().find(|&&id| !allowed(id)) {
            None => Ok(()),
            Some(&id) => {
                let (place, id) = (self.place(at), i64::from(id));
                Err(DataError::TokenRange { place, what, id, vocab: self.vocab })
            }
        }
    }

    fn advance(&mut self, bytes: usize) -> Result<(), DataError> {
        let before = self.done_bytes;
        self.done_bytes += bytes as u64;
        if before / PROGRESS_BYTES != self.done_bytes / PROGRESS_BYTES && (self.progress)(self.done_bytes).is_break() {
            return Err(DataError::Stopped);
        }
        Ok(())
    }

    fn place(&self, at: At) -> Place {
        at.place(self.files)
    }
}

/// Where the first piece of `text`, longer than a piece, ends: after a lone line break, else before
/// a lone space, else anywhere. The usual tokenizers split words there themselves, so that the
/// tokens are the same as for the whole text.
fn piece_end(text: &str) -> usize {
    let limit = (0..=PIECE_BYTES).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let lone = |at: usize, length: usize| {
        let before = text[..at].chars().next_back().is_some_and(|c| !c.is_whitespace());
        let after = text[at + length..].chars().next().is_some_and(|c| !c.is_whitespace());
        before && after
    };
    let last = |c: char| text[..limit].rmatch_indices(c).map(|(at, _)| at).find(|&at| lone(at, 1));
    last('\n').map(|at| at + 1).or_else(|| last(' ')).unwrap_or(limit)
}

/// Reads `bytes` as a `.jsonl` file; for tests.
#[cfg(test)]
pub(super) fn read_lines(
    bytes: &[u8],
    format: Format,
    vocab: u64,
    mut found: impl FnMut(At, Found),
) -> Result<(), DataError> {
    let files = [PathBuf::from("data.jsonl")];
    let progress = &mut |_| ControlFlow::Continue(());
    let mut reading = Reading { files: &files, format, vocab, progress, done_bytes: 0 };
    reading.lines(&mut std::io::Cursor::new(bytes), 0, &mut |at, what| {
        found(at, what);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refusal(bytes: &[u8], format: Format) -> String {
        read_lines(bytes, format, 10, |_, _| ()).unwrap_err().to_string()
    }

    #[test]
    fn bad_lines_are_named_with_file_and_line() {
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
    fn other_keys_and_blank_lines_are_passed_over() {
        let lines = b"\n{\"id\": 7, \"text\": \"a\\nb\", \"meta\": {\"x\": [null]}}\r\n  \n{\"text\":\"\"}";
        let mut seen = Vec::new();
        read_lines(lines, Format::Text, 10, |at, found| seen.push((at.line, format!("{found:?}")))).unwrap();
        let text = r#"Text { piece: "a\nb", begins: true, ends: true }"#.to_owned();
        assert_eq!(seen, [(2, text), (4, "Nothing".to_owned())]);
    }

    #[test]
    fn long_text_is_cut_at_a_lone_line_break() {
        let text = "one two\nthree\n\n".repeat(3 * PIECE_BYTES / 15) + "end";
        let mut pieces = Vec::new();
        let line = serde_json::json!({ "text": text }).to_string();
        read_lines(line.as_bytes(), Format::Text, 10, |_, found| match found {
            Found::Text { piece, begins, ends } => pieces.push((piece.to_owned(), begins, ends)),
            other => panic!("{other:?}"),
        })
        .unwrap();
        assert!(pieces.len() >= 3);
        assert_eq!(pieces.iter().map(|(piece, ..)| piece.as_str()).collect::<String>(), text);
        for (number, (piece, begins, ends)) in pieces.iter().enumerate() {
            assert!(piece.len() <= PIECE_BYTES);
            assert_eq!((*begins, *ends), (number == 0, number + 1 == pieces.len()));
            assert!(*ends || piece.ends_with("two\n"), "a cut inside a run of breaks");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), tokens: bool) {
            let format = if tokens { Format::Tokens } else { Format::Text };
            let _ = read_lines(&bytes, format, 10, |_, _| ());
        }

        /// Close to valid, so that the checks behind the JSON reader are reached.
        #[test]
        fn arbitrary_ids_are_taken_or_refused(
            ids in prop::collection::vec(prop_oneof![0i64..10, any::<i64>()], 0..4),
            labels in prop::option::of(prop::collection::vec(prop_oneof![Just(-100i64), 0i64..10, any::<i64>()], 0..4)),
        ) {
            let line = serde_json::json!({ "input_ids": ids, "labels": labels }).to_string();
            let good = ids.iter().all(|id| (0..10).contains(id)) && labels.iter().flatten().all(|id| (0..10).contains(id) || *id == -100)
                && labels.as_ref().is_none_or(|labels| labels.len() == ids.len());
            prop_assert_eq!(read_lines(line.as_bytes(), Format::Tokens, 10, |_, _| ()).is_ok(), good);
        }

        #[test]
        fn pieces_of_any_text_make_the_text(text in "(\\PC| |\n){0,40}", times in 1usize..4000) {
            let text = text.repeat(times);
            let (mut joined, mut ends_seen) = (String::new(), 0);
            let line = serde_json::json!({ "text": text }).to_string();
            prop_assume!(line.len() < LINE_BYTES_MAX);
            read_lines(line.as_bytes(), Format::Text, 10, |_, found| if let Found::Text { piece, ends, .. } = found {
                joined += piece;
                ends_seen += usize::from(ends);
            }).unwrap();
            prop_assert_eq!(&joined, &text);
            prop_assert_eq!(ends_seen, usize::from(!text.is_empty()));
        }
    }
}
