//! A look at data files before a run exists: their format and the number of their documents. Nothing is tokenized or cached.

use super::error::DataError;
use super::formats::resolve_formats;
use super::list_files;
use super::record_format::RecordFormat;
use super::rows::distinct_formats;
use super::source::{DocumentPart, SourceReader};
use crate::config::{Format, Split};
use plimsoll_core::Bytes;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Most bytes that are read to count documents.
const COUNTED_BYTES_MAX: u64 = 256 << 20;

/// The format and size of data files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSummary {
    /// The files.
    pub files: Vec<PathBuf>,
    /// Bytes of all files.
    pub bytes: Bytes,
    /// Formats of the files, each once; none if no file has a record.
    pub formats: Vec<RecordFormat>,
    /// Number of documents that have something to predict, as far as they were read.
    pub documents: u64,
    /// Whether all files were read. Otherwise there may be more documents.
    pub is_complete: bool,
}

/// Data files with their formats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFiles {
    /// The files.
    pub files: Vec<PathBuf>,
    /// Formats of the files, each once; none if no file has a record.
    pub formats: Vec<RecordFormat>,
}

/// Lists the files that match `patterns` (paths and globs), with their formats: `format`, or those of their first records.
/// With a `split`, only its files are taken.
///
/// # Errors
/// No file, a file of another type, or records of no format.
pub fn recognize(patterns: &[String], format: Format, split: Option<Split>) -> Result<DataFiles, DataError> {
    let files = resolve_formats(list_files(patterns, format, split)?, format)?;
    let formats = distinct_formats(&files);
    Ok(DataFiles { files: files.into_iter().map(|file| file.path).collect(), formats })
}

/// Reads the files that match `patterns` (paths and globs), recognizes their formats by the first records, and counts
/// their documents. Stops after 256 MiB. Token ids must be below `vocab`; `None` permits all.
///
/// # Errors
/// No file, a file of another type, or the first document that cannot be read, with its place.
pub fn inspect(patterns: &[String], vocab: Option<u64>) -> Result<DataSummary, DataError> {
    let files = resolve_formats(list_files(patterns, Format::Auto, None)?, Format::Auto)?;
    let sizes = files.iter().map(|file| file.path.metadata().map_err(DataError::io("read", &file.path)));
    let bytes = sizes.map(|size| size.map(|size| size.len())).sum::<Result<u64, _>>()?;
    let mut progress = |done: u64| match done < COUNTED_BYTES_MAX {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    // Ids are 32 bit numbers with a sign.
    let vocab = vocab.unwrap_or(1 << 31);
    let mut reader = SourceReader { files: &files, vocab, progress: &mut progress, reported_bytes: 0 };
    let mut documents = 0;
    let read = reader.read_all(|_, part| {
        documents += u64::from(!matches!(part, DocumentPart::Empty | DocumentPart::Text { ends: false, .. }));
        Ok(())
    });
    let is_complete = match read {
        Ok(()) => true,
        Err(DataError::Stopped) => false,
        Err(error) => return Err(error),
    };
    let formats = distinct_formats(&files);
    let files = files.into_iter().map(|file| file.path).collect();
    Ok(DataSummary { files, bytes: Bytes(bytes), formats, documents, is_complete })
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
    fn format_follows_from_the_first_records() {
        let tokens = inspect_file("a.jsonl", "\n{\"input_ids\": [1, 2]}\n{\"input_ids\": [3]}\n").unwrap();
        assert_eq!((&tokens.formats[..], tokens.documents, tokens.files.len()), (&[RecordFormat::Tokens][..], 1, 1));
        let text = inspect_file("a.jsonl", "\u{feff}{\"text\": \"a\"}\n\n{\"text\": \"\"}\n{\"text\": \"b\"}").unwrap();
        assert_eq!((&text.formats[..], text.documents, text.is_complete), (&[RecordFormat::Text][..], 2, true));
        assert_eq!(inspect_file("a.txt", &"long ".repeat(50_000)).unwrap().documents, 1);
    }

    #[test]
    fn files_without_a_line_leave_format_open() {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in [("a.jsonl", ""), ("b.jsonl", "\n \n"), ("c.jsonl", "{\"input_ids\": [1, 2]}\n")] {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        let summary = inspect(&[dir.path().join("*.jsonl").to_string_lossy().into_owned()], Some(10)).unwrap();
        assert_eq!((&summary.formats[..], summary.documents, summary.files.len()), (&[RecordFormat::Tokens][..], 1, 3));
    }

    #[test]
    fn unreadable_data_are_refused_with_place() {
        assert!(inspect_file("a.jsonl", "{\"text\": \"a\"}\n{\"txt\": 1}\n").unwrap_err().contains("a.jsonl:2"));
        assert!(inspect_file("a.jsonl", "{\"input_ids\": [1, 99]}\n").unwrap_err().contains("vocabulary of 10"));
        assert!(inspect_file("a.xlsx", "a,b\n").unwrap_err().contains("expected a .jsonl, .json, .csv"));
        assert!(inspect(&["/nonexistent/*.jsonl".to_owned()], None).is_err());
    }
}
