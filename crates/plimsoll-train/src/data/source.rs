//! The user's data files: one pass over all of them, from files to documents.
//!
//! `containers` reads the records of a file, and `formats` their meaning. Tokenizers, rows and the token cache live in
//! other modules.

use super::containers::text::{TextSource, Window, read_windows};
use super::containers::{ByteCounter, Container, FileType, PlacedRecord, RecordReader, file_type, open_bytes};
use super::conversation::{Conversation, Prompt};
use super::error::{DataError, Place, SourceLocation};
use super::formats::{DataFile, Document, PreferencePair, check_reading, parse_record};
use super::record_format::RecordFormat;
use super::token_line::{RefusedKey, TokenLine};
use plimsoll_core::Bytes;
use std::ops::ControlFlow;

/// Bytes read between two calls of the progress callback.
const PROGRESS_BYTES: u64 = 1 << 20;
/// The longest prompt with its completion. They are tokenized at once, in about 100 bytes of memory per byte.
const COMPLETION_BYTES_MAX: usize = 1 << 20;

/// The place of a document: the index of its file, and its place there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DocumentOrigin {
    pub file: usize,
    pub place: Place,
}

impl DocumentOrigin {
    /// Returns the path and place of the document in `files`, for messages.
    pub fn location(self, files: &[DataFile]) -> SourceLocation {
        SourceLocation { file: files[self.file].path.clone(), place: self.place }
    }
}

/// A document, or a window of one, as the reader of the user's files yields it.
#[derive(Debug)]
pub(super) enum DocumentPart<'a> {
    /// A window of a document's text, not empty. It begins at the byte `start` of the text, before the end of the
    /// window before it. `ends` tells whether it is the last.
    Text { window: &'a str, start: usize, ends: bool },
    /// A whole document as token ids, all inside the model's vocabulary, with the label of each token; `labels` is
    /// `None` if every token is its own label.
    Tokens { ids: &'a [i32], labels: Option<&'a [i32]> },
    /// A prompt, whose tokens have no labels, and its completion, whose tokens have labels.
    Pair { prompt: String, completion: String },
    /// A conversation, at least one message long.
    Conversation(Box<Conversation>),
    /// A prompt with a chosen and a rejected answer.
    Preference(PreferencePair),
    /// A prompt whose completions are sampled.
    Prompt(Prompt),
    /// A completion with a verdict, which no objective uses.
    Verdict,
    /// A document without text.
    Empty,
}

/// A reader that passes once over all data files and yields their documents.
pub(super) struct SourceReader<'a> {
    pub files: &'a [DataFile],
    pub vocab: u64,
    /// Callback with the bytes read so far, called about every MiB. `Break` stops the reading.
    pub progress: &'a mut dyn FnMut(u64) -> ControlFlow<()>,
    /// Bytes that the last call of `progress` was told.
    pub reported_bytes: u64,
}

impl SourceReader<'_> {
    /// Calls `on_part` with every document, or with each window of a long text, file by file.
    ///
    /// # Errors
    /// The first record that cannot be read or has another format than its file, and the errors of `on_part`.
    pub fn read_all(
        &mut self,
        mut on_part: impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let counter = ByteCounter::default();
        for index in 0..self.files.len() {
            let path = &self.files[index].path;
            match file_type(path)? {
                FileType { container: Container::PlainText, compression } => {
                    let origin = DocumentOrigin { file: index, place: Place::File };
                    let mut bytes = open_bytes(path, compression, &counter)?;
                    self.read_text(&mut bytes, origin, &counter, &mut on_part)?;
                }
                _ => self.read_records(RecordReader::open(path, &counter)?, index, &counter, &mut on_part)?,
            }
        }
        Ok(())
    }

    /// Passes the documents of a file's records to `on_part`. `file` is the file's index.
    fn read_records(
        &mut self,
        mut records: RecordReader,
        file: usize,
        counter: &ByteCounter,
        on_part: &mut impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let DataFile { mut format, is_detected, .. } = self.files[file];
        while let Some(PlacedRecord { place, record }) = records.read_next()? {
            let origin = DocumentOrigin { file, place };
            if is_detected {
                format = Some(check_reading(&record, format, || self.location(origin))?);
            }
            let format = format.unwrap_or(RecordFormat::Text);
            let document = parse_record(record, format).map_err(|reason| {
                let location = self.location(origin);
                DataError::MalformedRecord { location, reason, format: Some(format) }
            })?;
            self.pass_document(document, origin, counter, on_part)?;
            self.report_progress(counter)?;
        }
        Ok(())
    }

    /// Checks a document and passes it to `on_part`.
    fn pass_document(
        &mut self,
        document: Document,
        origin: DocumentOrigin,
        counter: &ByteCounter,
        on_part: &mut impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        match document {
            Document::Text(text) => self.read_text(&mut text.as_bytes(), origin, counter, on_part),
            Document::Tokens(line) => self.read_tokens(line, origin, on_part),
            Document::Pair { prompt, completion } if prompt.len() + completion.len() > COMPLETION_BYTES_MAX => {
                let limit = Bytes(COMPLETION_BYTES_MAX as u64);
                Err(DataError::CompletionTooLong { location: self.location(origin), limit })
            }
            Document::Pair { prompt, completion } => on_part(origin, DocumentPart::Pair { prompt, completion }),
            Document::Conversation(conversation) => on_part(origin, DocumentPart::Conversation(conversation)),
            Document::Preference(PreferencePair::Texts { prompt, answers })
                if prompt.len() + answers.iter().map(String::len).max().unwrap_or(0) > COMPLETION_BYTES_MAX =>
            {
                let limit = Bytes(COMPLETION_BYTES_MAX as u64);
                Err(DataError::CompletionTooLong { location: self.location(origin), limit })
            }
            Document::Preference(pair) => on_part(origin, DocumentPart::Preference(pair)),
            Document::Prompt(Prompt::Text(prompt)) if prompt.len() > COMPLETION_BYTES_MAX => {
                let limit = Bytes(COMPLETION_BYTES_MAX as u64);
                Err(DataError::CompletionTooLong { location: self.location(origin), limit })
            }
            Document::Prompt(prompt) => on_part(origin, DocumentPart::Prompt(prompt)),
            Document::Verdict => on_part(origin, DocumentPart::Verdict),
            Document::Empty => on_part(origin, DocumentPart::Empty),
        }
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

    /// Reads the text of one document and passes it to `on_part` in windows that overlap.
    fn read_text(
        &mut self,
        text: &mut impl TextSource,
        origin: DocumentOrigin,
        counter: &ByteCounter,
        on_part: &mut impl FnMut(DocumentOrigin, DocumentPart) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let files = self.files;
        read_windows(
            text,
            || origin.location(files),
            |Window { text, start, ends }| {
                self.report_progress(counter)?;
                // A record of JSON may have them as escapes.
                if origin.place == Place::File && text.contains('\0') {
                    return Err(DataError::NulByte { location: origin.location(files) });
                }
                let part = DocumentPart::Text { window: text, start, ends };
                on_part(origin, if text.is_empty() { DocumentPart::Empty } else { part })
            },
        )
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

    /// Calls the progress callback about every MiB. Fails if the callback asks to stop.
    fn report_progress(&mut self, counter: &ByteCounter) -> Result<(), DataError> {
        let read_bytes = counter.get();
        if self.reported_bytes / PROGRESS_BYTES != read_bytes / PROGRESS_BYTES {
            self.reported_bytes = read_bytes;
            if (self.progress)(read_bytes).is_break() {
                return Err(DataError::Stopped);
            }
        }
        Ok(())
    }

    fn location(&self, origin: DocumentOrigin) -> SourceLocation {
        origin.location(self.files)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::containers::RECORD_BYTES_MAX;
    use super::super::containers::text::{WINDOW_BYTES, WINDOW_STRIDE};
    use super::super::testing::read_file;
    use super::*;
    use proptest::prelude::*;

    /// Passes the documents in `bytes`, the content of a `.jsonl` file, to `on_part`.
    fn read_json_bytes(
        bytes: &[u8],
        format: Format,
        vocab: u64,
        on_part: impl FnMut(DocumentOrigin, DocumentPart),
    ) -> Result<(), String> {
        read_file("data.jsonl", bytes, format, vocab, on_part)
    }

    fn refusal(bytes: &[u8], format: Format) -> String {
        read_json_bytes(bytes, format, 10, |_, _| ()).unwrap_err()
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
        let mut long = vec![b' '; RECORD_BYTES_MAX + 1];
        long[0] = b'"';
        assert_eq!(refusal(&long, Format::Text), "data.jsonl:1: the line is longer than 16.00 MiB");
    }

    #[test]
    fn other_keys_and_blank_lines_are_ignored() {
        let lines = "\n{\"id\": 7, \"text\": \"a\\nb\", \"meta\": {\"x\": [null]}}\r\n  \n\u{feff}{\"text\":\"\"}";
        let lines = lines.as_bytes();
        let mut seen = Vec::new();
        read_json_bytes(lines, Format::Text, 10, |at, part| seen.push((at.place, format!("{part:?}")))).unwrap();
        let text = r#"Text { window: "a\nb", start: 0, ends: true }"#.to_owned();
        assert_eq!(seen, [(Place::Line(2), text), (Place::Line(4), "Empty".to_owned())]);
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
            prop_assume!(line.len() < RECORD_BYTES_MAX);
            read_json_bytes(line.as_bytes(), Format::Text, 10, |_, part| if let DocumentPart::Text { window, start, ends } = part {
                joined += &window[joined.len() - start..];
                ends_seen += usize::from(ends);
            }).unwrap();
            prop_assert_eq!(&joined, &text);
            prop_assert_eq!(ends_seen, usize::from(!text.is_empty()));
        }
    }
}
