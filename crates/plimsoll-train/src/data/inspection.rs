//! A look at data files before a run exists: their format and the number of their documents. Nothing is tokenized or cached.

use super::error::DataError;
use super::list_files;
use super::source::{DocumentPart, FileKind, SourceReader, file_kind};
use crate::config::Format;
use plimsoll_core::Bytes;
use plimsoll_device::regular_file;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Most bytes that are read to count documents.
const COUNTED_BYTES_MAX: u64 = 256 << 20;
/// Most bytes of the first line by which the format is recognized.
const FIRST_LINE_BYTES_MAX: u64 = 16 << 20;

/// The format and size of data files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSummary {
    /// The files.
    pub files: Vec<PathBuf>,
    /// Bytes of all files.
    pub bytes: Bytes,
    /// Format of the documents.
    pub format: Format,
    /// Number of documents that have something to predict, as far as they were read.
    pub documents: u64,
    /// Whether all files were read. Otherwise there may be more documents.
    pub is_complete: bool,
}

/// Reads the files that match `patterns` (paths and globs of `.jsonl` and `.txt` files), recognizes their format by the
/// first line, and counts their documents. Stops after 256 MiB. Token ids must be below `vocab`; `None` permits all.
///
/// # Errors
/// No file, a file of another type, or the first document that cannot be read, with its place.
pub fn inspect(patterns: &[String], vocab: Option<u64>) -> Result<DataSummary, DataError> {
    let files = list_files(patterns, Format::Text)?;
    let sizes = files.iter().map(|file| file.metadata().map_err(DataError::io("read", file)));
    let bytes = sizes.map(|size| size.map(|size| size.len())).sum::<Result<u64, _>>()?;
    let format = recognize(&files)?;
    let mut progress = |done: u64| match done < COUNTED_BYTES_MAX {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    // Ids are 32 bit numbers with a sign.
    let vocab = vocab.unwrap_or(1 << 31);
    let mut reader = SourceReader { files: &files, format, vocab, progress: &mut progress, done_bytes: 0 };
    let mut documents = 0;
    let read = reader.read_all(|_, part| {
        documents += u64::from(matches!(part, DocumentPart::Tokens { .. } | DocumentPart::Text { ends: true, .. }));
        Ok(())
    });
    let is_complete = match read {
        Ok(()) => true,
        Err(DataError::Stopped) => false,
        Err(error) => return Err(error),
    };
    Ok(DataSummary { files, bytes: Bytes(bytes), format, documents, is_complete })
}

/// Returns the format of the first line that is not blank in the `.jsonl` files; without one, all files are text.
fn recognize(files: &[PathBuf]) -> Result<Format, DataError> {
    for file in files.iter().filter(|file| matches!(file_kind(file, Format::Text), Ok(FileKind::JsonLines))) {
        match has_token_ids(file)? {
            Some(true) => return Ok(Format::Tokens),
            Some(false) => return Ok(Format::Text),
            None => {}
        }
    }
    Ok(Format::Text)
}

/// Returns whether the first line of a `.jsonl` file that is not blank has token ids; `None` if all lines are blank.
fn has_token_ids(file: &Path) -> Result<Option<bool>, DataError> {
    #[derive(Deserialize)]
    struct Line {
        input_ids: Option<IgnoredAny>,
    }
    let mut reader =
        BufReader::new(regular_file::open(file).map_err(DataError::io("read", file))?).take(FIRST_LINE_BYTES_MAX);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).map_err(DataError::io("read", file))? > 0 {
        let text = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line);
        if !text.trim_ascii().is_empty() {
            return Ok(Some(serde_json::from_slice(text).is_ok_and(|line: Line| line.input_ids.is_some())));
        }
        line.clear();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inspect_file(name: &str, content: &str) -> Result<DataSummary, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        inspect(&[path.to_string_lossy().into_owned()], Some(10)).map_err(|error| error.to_string())
    }

    #[test]
    fn format_follows_from_the_first_line() {
        let tokens = inspect_file("a.jsonl", "\n{\"input_ids\": [1, 2]}\n{\"input_ids\": [3]}\n").unwrap();
        assert_eq!((tokens.format, tokens.documents, tokens.files.len()), (Format::Tokens, 1, 1));
        let text = inspect_file("a.jsonl", "\u{feff}{\"text\": \"a\"}\n\n{\"text\": \"\"}\n{\"text\": \"b\"}").unwrap();
        assert_eq!((text.format, text.documents, text.is_complete), (Format::Text, 2, true));
        assert_eq!(inspect_file("a.txt", &"long ".repeat(50_000)).unwrap().documents, 1);
    }

    #[test]
    fn files_without_a_line_leave_format_open() {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in [("a.jsonl", ""), ("b.jsonl", "\n \n"), ("c.jsonl", "{\"input_ids\": [1, 2]}\n")] {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        let summary = inspect(&[dir.path().join("*.jsonl").to_string_lossy().into_owned()], Some(10)).unwrap();
        assert_eq!((summary.format, summary.documents, summary.files.len()), (Format::Tokens, 1, 3));
    }

    #[test]
    fn unreadable_data_are_refused_with_place() {
        assert!(inspect_file("a.jsonl", "{\"text\": \"a\"}\n{\"txt\": 1}\n").unwrap_err().contains("a.jsonl:2"));
        assert!(inspect_file("a.jsonl", "{\"input_ids\": [1, 99]}\n").unwrap_err().contains("vocabulary of 10"));
        assert!(inspect_file("a.csv", "a,b\n").unwrap_err().contains("expected a .jsonl or .txt file"));
        assert!(inspect(&["/nonexistent/*.jsonl".to_owned()], None).is_err());
    }
}
