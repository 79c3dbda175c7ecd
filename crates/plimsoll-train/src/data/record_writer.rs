//! The records of a token cache, as they are written, and their counts.

use super::IGNORED_LABEL;
use super::cache_file::CacheFile;
use super::error::{DataError, Place};
use super::formats::DataFile;
use super::source::{DocumentOrigin, DocumentPart};
use super::template::LabelledDocument;
use serde::{Deserialize, Serialize};

/// The bit of a token id in the token cache that marks the first token of a document.
pub(super) const FIRST_TOKEN_BIT: u32 = 1 << 31;

/// Counts of tokens and documents in a token cache, known without reading its records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DatasetCounts {
    /// Tokens of all documents that are used. The cache has one record for each.
    pub tokens: u64,
    /// Documents that are used: those of at least two tokens.
    pub documents: u64,
    /// Skipped documents: those of fewer than two tokens.
    pub skipped: u64,
    /// Tokens that are targets of the loss: not the first of their document, and without the label −100.
    pub labelled: u64,
    /// Tokens of the longest document, or of the longest pair of answers with their prompts.
    pub longest: u64,
    /// Index, in the list of data files, of the file that holds the longest document.
    pub longest_file: usize,
    /// Place of the longest document in its file.
    pub longest_place: Place,
}

/// A token cache being written. It counts tokens and documents.
pub(super) struct RecordWriter<'a> {
    pub out: &'a mut CacheFile,
    pub files: &'a [DataFile],
    pub vocab: u64,
    pub record_bytes: u64,
    pub counts: DatasetCounts,
    /// Number of tokens of the current document so far.
    pub document_tokens: u64,
    /// First record of the current document, until the second is known; else `None`. Both are written together, because
    /// a document of one token is skipped.
    pub pending_first: Option<[u8; 8]>,
}

impl RecordWriter<'_> {
    /// Writes a document that needs no tokenizer. Any other is counted as skipped. `origin` is the document's place in
    /// the files.
    ///
    /// # Errors
    /// A full disk.
    pub fn write_part(&mut self, origin: DocumentOrigin, part: DocumentPart) -> Result<(), DataError> {
        if let DocumentPart::Tokens { ids, labels } = part {
            for (index, &id) in ids.iter().enumerate() {
                self.push_record(id as u32, labels.map_or(id, |labels| labels[index]))?;
            }
        }
        self.end_document(origin);
        Ok(())
    }

    /// Writes a tokenized conversation. Without a label after its first token it is counted as skipped.
    ///
    /// # Errors
    /// A full disk, and an id outside the vocabulary.
    pub fn write_document(&mut self, origin: DocumentOrigin, document: &LabelledDocument) -> Result<(), DataError> {
        if document.has_target() {
            for (&id, &label) in document.ids.iter().zip(&document.labels) {
                self.write_text_token(origin, id as u32, label != IGNORED_LABEL)?;
            }
        }
        self.end_document(origin);
        Ok(())
    }

    /// Writes the tokenized chosen and rejected answer of a pair. If one has no label after its first token, both are
    /// counted as skipped. The length of the pair counts as one document in `longest`.
    ///
    /// # Errors
    /// A full disk, and an id outside the vocabulary.
    pub fn write_pair(&mut self, origin: DocumentOrigin, pair: &[LabelledDocument; 2]) -> Result<(), DataError> {
        if !pair.iter().all(LabelledDocument::has_target) {
            self.counts.skipped += 2;
            return Ok(());
        }
        pair.iter().try_for_each(|document| self.write_document(origin, document))?;
        self.record_length(origin, pair.iter().map(|document| document.ids.len() as u64).sum());
        Ok(())
    }

    /// Writes a token of a text, with itself as label if `is_labelled`. An id outside the vocabulary is an error that
    /// names `origin`, the document's place in the files.
    pub fn write_text_token(&mut self, origin: DocumentOrigin, id: u32, is_labelled: bool) -> Result<(), DataError> {
        if u64::from(id) >= self.vocab || id >= FIRST_TOKEN_BIT {
            let location = origin.location(self.files);
            return Err(DataError::TextTokenOutOfRange { location, id, vocab: self.vocab });
        }
        self.push_record(id, if is_labelled { id as i32 } else { IGNORED_LABEL })
    }

    fn push_record(&mut self, id: u32, label: i32) -> Result<(), DataError> {
        let mut record = [0; 8];
        let id = if self.document_tokens == 0 { id | FIRST_TOKEN_BIT } else { id };
        record[..4].copy_from_slice(&id.to_le_bytes());
        record[4..].copy_from_slice(&label.to_le_bytes());
        let size = self.record_bytes as usize;
        self.document_tokens += 1;
        if self.document_tokens == 1 {
            self.pending_first = Some(record);
            return Ok(());
        }
        self.counts.labelled += u64::from(label != IGNORED_LABEL);
        if let Some(first) = self.pending_first.take() {
            self.out.write(&first[..size])?;
        }
        self.out.write(&record[..size])
    }

    /// Ends the current document, and counts it as used or skipped. `origin` is its place in the files, which is kept
    /// if the document is the longest so far.
    pub fn end_document(&mut self, origin: DocumentOrigin) {
        let tokens = std::mem::take(&mut self.document_tokens);
        if tokens < 2 {
            self.pending_first = None;
            self.counts.skipped += 1;
            return;
        }
        self.counts.documents += 1;
        self.counts.tokens += tokens;
        self.record_length(origin, tokens);
    }

    /// Keeps the place of a document of `tokens` tokens if it is the longest so far.
    fn record_length(&mut self, origin: DocumentOrigin, tokens: u64) {
        if tokens > self.counts.longest {
            self.counts.longest = tokens;
            (self.counts.longest_file, self.counts.longest_place) = (origin.file, origin.place);
        }
    }
}
