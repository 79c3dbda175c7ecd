//! Documents to rows: where each row begins in the token cache, and what stands in it. The rules are in the
//! module documentation of `data`.

use super::cache::{Record, RowStarts, TokenCache};
use super::error::{DataError, Place};
use super::{DataSpec, Long, source};
use plimsoll_core::Bytes;
use std::ops::ControlFlow;
use std::path::Path;

/// The label of a position without a target.
pub const IGNORED: i32 = -100;

/// The longest row: far beyond any model, and small enough that a row is always read at once.
const SEQUENCE_MAX: u64 = 1 << 24;

/// All rows of some files. Holds open files and a few numbers: its memory does not grow with the data.
#[derive(Debug)]
pub struct Dataset {
    cache: TokenCache,
    starts: Option<RowStarts>,
    sequence: u64,
    rows: u64,
}

impl Dataset {
    /// Opens the data of `spec`; tokenises it first, with `threads` threads, where `cache_folder`
    /// does not hold the result already. `tokenizer` is a `tokenizer.json`; the tokens format needs none.
    /// `progress` is told (bytes done, bytes in all) about every MiB while files are read, and may stop it
    /// ([`DataError::Stopped`]).
    pub fn open(
        spec: &DataSpec,
        tokenizer: Option<&Path>,
        cache_folder: &Path,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Dataset, DataError> {
        let sequence = spec.sequence;
        if !(1..=SEQUENCE_MAX).contains(&sequence) {
            return Err(DataError::Sequence { sequence, limit: SEQUENCE_MAX });
        }
        let files = source::files(spec)?;
        let cache = TokenCache::open(spec, &files, tokenizer, cache_folder, threads, progress)?;
        let counts = &cache.counts;
        if counts.documents == 0 {
            return Err(DataError::Empty { files, skipped: counts.skipped });
        }
        if counts.labelled == 0 {
            return Err(DataError::NoLabels { files, tokens: counts.tokens });
        }
        if spec.long == Long::Refuse && counts.longest - 1 > sequence {
            return Err(DataError::Long { place: cache.longest, tokens: counts.longest, sequence });
        }
        let starts = if spec.pack { None } else { Some(RowStarts::open(&cache, sequence)?) };
        let rows = match &starts {
            Some(starts) => starts.rows,
            None => (counts.tokens - 1).div_ceil(sequence),
        };
        Ok(Dataset { cache, starts, sequence, rows })
    }

    /// Rows of an epoch, at least 1.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// T: positions of a row.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Tokens of all documents, end tokens included.
    pub fn tokens(&self) -> u64 {
        self.cache.counts.tokens
    }

    /// Documents with something to predict.
    pub fn documents(&self) -> u64 {
        self.cache.counts.documents
    }

    /// Documents that were skipped, since they have nothing to predict.
    pub fn skipped_documents(&self) -> u64 {
        self.cache.counts.skipped
    }

    /// Tokens that an epoch predicts, at least 1.
    pub fn labelled_tokens(&self) -> u64 {
        self.cache.counts.labelled
    }

    /// The longest document: its tokens, and where it is.
    pub fn longest_document(&self) -> (u64, &Place) {
        (self.cache.counts.longest, &self.cache.longest)
    }

    /// Replaces what is in `into` by the rows numbered `rows`.
    pub fn read(&self, rows: impl IntoIterator<Item = u64>, into: &mut Rows) -> Result<(), DataError> {
        into.clear();
        for row in rows {
            self.read_row(row, into)?;
        }
        Ok(())
    }

    fn read_row(&self, row: u64, into: &mut Rows) -> Result<(), DataError> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(into.sequence as u64, self.sequence, "rows of another length");
        let start = match &self.starts {
            Some(starts) => starts.get(row, &self.cache)?,
            None => row * self.sequence,
        };
        let mut buffer = std::mem::take(&mut into.buffer);
        // One record more than positions: the target of the last one.
        let records = self.cache.read(start, self.sequence + 1, &mut buffer)?;
        let mut document_start = 0;
        let mut record = records.get(0)?;
        for at in 0..into.sequence {
            let next = if at + 1 < records.len() { Some(records.get(at + 1)?) } else { None };
            if record.first {
                document_start = at;
            }
            into.push(at, document_start, record, next);
            match next {
                Some(next) if !(next.first && self.starts.is_some()) => record = next,
                // The data has ended, or in padded rows the document.
                _ => {
                    into.pad_row(at + 1);
                    break;
                }
            }
        }
        into.buffer = buffer;
        Ok(())
    }
}

/// Rows to be trained on; used again and again without allocating. The vectors hold R × T values, row by row.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    sequence: usize,
    /// Token ids.
    pub tokens: Vec<i32>,
    /// The id that each position predicts, or [`IGNORED`].
    pub labels: Vec<i32>,
    /// Place in the visible part of the document, from 0.
    pub positions: Vec<i32>,
    /// The first index of the row that a position sees; the last is its own.
    pub document_start: Vec<i32>,
    /// What the loss of a position counts: 1, or 0 where there is no label.
    pub weights: Vec<f32>,
    buffer: Vec<u8>,
}

impl Rows {
    /// Room for `rows` rows of `sequence` positions.
    pub fn new(rows: u64, sequence: u64) -> Rows {
        let values = (rows * sequence) as usize;
        let ids = || Vec::with_capacity(values);
        Rows {
            sequence: sequence as usize,
            tokens: ids(),
            labels: ids(),
            positions: ids(),
            document_start: ids(),
            weights: Vec::with_capacity(values),
            buffer: Vec::with_capacity((sequence as usize + 1) * 8),
        }
    }

    /// The most memory that `rows` rows of `sequence` positions hold.
    pub fn bytes(rows: u64, sequence: u64) -> Bytes {
        Bytes(rows * sequence * 20 + (sequence + 1) * 8)
    }

    /// Rows held.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.sequence.max(1)
    }

    /// No row is held.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Positions that have a label.
    pub fn labelled_tokens(&self) -> u64 {
        self.labels.iter().filter(|&&label| label != IGNORED).count() as u64
    }

    /// Adds a row of padding only, for a micro-batch that is not full.
    pub fn push_empty(&mut self) {
        self.pad_row(0);
    }

    /// Removes all rows and keeps the room.
    pub fn clear(&mut self) {
        for ids in [&mut self.tokens, &mut self.labels, &mut self.positions, &mut self.document_start] {
            ids.clear();
        }
        self.weights.clear();
    }

    fn push(&mut self, at: usize, document_start: usize, record: Record, next: Option<Record>) {
        let label = next.filter(|next| !next.first).map_or(IGNORED, |next| next.label);
        self.tokens.push(record.token);
        self.labels.push(label);
        self.positions.push((at - document_start) as i32);
        self.document_start.push(document_start as i32);
        self.weights.push(if label == IGNORED { 0.0 } else { 1.0 });
    }

    /// Fills the rest of a row from `at` on; each position sees only itself, which costs attention least.
    fn pad_row(&mut self, at: usize) {
        for at in at..self.sequence {
            self.tokens.push(0);
            self.labels.push(IGNORED);
            self.positions.push(0);
            self.document_start.push(at as i32);
            self.weights.push(0.0);
        }
    }
}
