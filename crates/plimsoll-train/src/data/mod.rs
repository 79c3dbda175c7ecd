//! Training data: from the user's files to the rows of an optimizer step.
//!
//! This module reads and tokenizes files, stores token caches on disk, cuts documents into rows, shuffles rows, and
//! prepares the batch of the next step in a thread. It knows nothing of the model or of micro-batches: the executor
//! splits a batch as the plan says.
//!
//! Legend: R rows per step, T input positions per row (`sequence`), N tokens per document.
//!
//! # Documents
//! - `.jsonl`, format `text`: each line `{"text": "..."}` is a document; other keys are ignored.
//! - `.jsonl`, format `tokens`: each line `{"input_ids": [..], "labels": [..]?}` is a document. Labels
//!   follow the Hugging Face convention: one per token of `input_ids`, unshifted; −100 is not predicted.
//!   Masks and other keys that change the loss are honoured or refused by name (`token_line`).
//! - `.txt`, format `text`: each file is one document.
//!
//! Blank lines are skipped. In the text format a document consists of the tokens of its text, with the special
//! tokens that the tokenizer adds. An end token follows unless the tokens already end with it. A document without a
//! label after its first token has nothing to predict: it is skipped and counted.
//!
//! To bound memory, text longer than 64 KiB is tokenized in windows that overlap. A text is cut where two windows have
//! the same tokens, so the tokens equal those of the whole text. A line has at most 16 MiB.
//!
//! # Rows
//! Position t of a document predicts its token t + 1. Every token except the first of its document is a target exactly
//! once per epoch. The label of a position without a target is −100.
//!
//! - Packed: documents are concatenated in file order, and every T positions form a row. A document of N tokens takes N
//!   positions, of which the last has no target. A document that reaches the end of a row continues in the next row,
//!   and the target across the boundary is kept.
//! - Padded: each document begins a new row. A document of N tokens takes N − 1 positions, because its last token is
//!   only a target.
//!
//! Attention never crosses documents. At each position, `document_start` is the first index of the row that the
//! position attends to, and `positions` counts from there. Padding at the end of a row has token 0, label −100 and
//! weight 0, and attends only to itself.
//!
//! A document is *long* if it needs more than T positions. With `long = "split"` it continues in further rows, which
//! do not attend to the earlier ones. With `long = "refuse"` it is an error before training starts. No token is
//! dropped silently.
//!
//! # Batches and the last partial batch
//! Rows come from one endless stream of epochs, each with its own permutation ([`RowOrder`]). Step s takes positions
//! s·R to s·R + R of that stream, so a batch may span two epochs and no row is skipped. If the stream ends (`epochs`),
//! the last batch takes the remaining rows and may be smaller ([`BatchSampler`]).

pub mod addition_example;
mod cache;
mod cache_file;
mod error;
mod foreign_format;
mod globs;
mod guard;
mod inspection;
mod json_reason;
mod loader;
mod order;
mod rows;
mod source;
#[cfg(test)]
mod testing;
mod token_line;
mod tokenizer;
mod tokenizer_check;
mod windows;

pub use error::{DataError, SourceLocation};
pub(crate) use globs::list_files;
pub use inspection::{DataSummary, inspect};
pub use loader::{Batch, Loader};
pub(crate) use order::splitmix64;
pub use order::{BatchSampler, RowOrder};
pub use rows::{Dataset, IGNORED_LABEL, Rows};

pub use tokenizer::{Tokenizer, read_end_token};

pub use crate::config::{Format, LongSamples};

/// Selection of data files and the rules that turn them into rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSpec {
    /// Paths and globs of `.jsonl` or `.txt` files. The files of a glob are read in alphabetical order, each file once.
    pub patterns: Vec<String>,
    /// Format of the documents in the files.
    pub format: Format,
    /// T: input positions of a row.
    pub sequence: u64,
    /// Whether rows hold concatenated documents (packed); otherwise each document begins a new row (padded).
    pub pack: bool,
    /// Handling of documents that need more than T positions.
    pub long: LongSamples,
    /// V: number of tokens in the model's vocabulary. Every id must be smaller.
    pub vocab: u64,
    /// Id of the token that is appended to each document in the text format ([`read_end_token`]); `None` if there is
    /// none, which the text format refuses.
    pub end_token: Option<u32>,
}
