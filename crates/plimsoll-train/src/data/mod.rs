//! Data: from text files to the rows of a step. What lives here: reading and tokenising the user's
//! files, the token cache on disk, cutting documents into rows, the order in which rows are taken,
//! and the thread that prepares the next step. What does not: micro-batches (the executor cuts a
//! step as the plan says) and the model.
//!
//! Legend: R rows of a step, T input positions of a row (`sequence`), N tokens of a document.
//!
//! # Documents
//! - `.jsonl`, format `text`: each line `{"text": "..."}` is a document; other keys are ignored.
//! - `.jsonl`, format `tokens`: each line `{"input_ids": [..], "labels": [..]?}` is a document. Labels
//!   follow the Hugging Face convention: as long as `input_ids`, unshifted, −100 is not predicted.
//! - `.txt`, format `text`: each file is one document.
//!
//! Blank lines are skipped. In the text format a document is what the tokenizer makes of the text,
//! with the special tokens it adds itself, and an end token where it does not end with one already.
//! A document without text, or of fewer than two tokens, has nothing to predict: it is skipped and
//! counted.
//!
//! So that memory stays bounded, text longer than 64 KiB is tokenised in pieces, cut at a line end,
//! else before a space. The tokens are those of the whole, except where a tokenizer marks the
//! beginning of a text (SentencePiece does): it marks each piece. A line has at most 16 MiB.
//!
//! # Rows
//! Position t of a document predicts its token t + 1, so a document of N tokens needs N − 1 positions:
//! its last token is only ever a target. Every token but the first of its document is a target
//! exactly once in an epoch. The label of a position without a target is −100.
//!
//! - packed: documents lie back to back in file order and every T positions are a row. A document
//!   that crosses the edge of a row goes on in the next one; its target across the edge is kept.
//! - padded: each document begins a row of its own.
//!
//! Attention never crosses documents: at each position `document_start` is the first index of the
//! row that it may see, and `positions` counts from there. Unused positions at the end of a row hold
//! token 0, label −100, weight 0, and see only themselves.
//!
//! A document is *long* when it needs more than T positions. `long = "split"` lets it go on in
//! further rows (without sight of the earlier ones), `long = "refuse"` is an error before the start.
//! Nothing is ever cut off silently.
//!
//! # Steps and the last partial batch
//! Rows are taken from one endless stream, epoch after epoch, each epoch in an order of its own
//! ([`Order`]). Step s of R rows takes the places s·R to s·R + R of that stream, so a step may span
//! two epochs and no row is ever left out. Only when the stream has an end (`epochs`) can the very
//! last step be smaller: it takes what is left ([`Batches`]).

mod cache;
mod error;
mod loader;
mod order;
mod rows;
mod source;
pub mod sums;
#[cfg(test)]
mod testing;
mod tokenizer;

pub use error::{DataError, Place};
pub use loader::{Loader, Step};
pub(crate) use order::mix;
pub use order::{Batches, Order};
pub use rows::{Dataset, IGNORED, Rows};
pub(crate) use source::files;
pub use tokenizer::{Tokenizer, end_token};

pub use crate::config::{Format, Long};

/// Which data, and how it becomes rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSpec {
    /// Files and globs, `.jsonl` or `.txt`; a glob's files in alphabetical order, each file once.
    pub patterns: Vec<String>,
    /// What the files hold.
    pub format: Format,
    /// T: input positions of a row.
    pub sequence: u64,
    /// Documents back to back, or one a row.
    pub pack: bool,
    /// What to do with documents of more than T positions.
    pub long: Long,
    /// Tokens that the model knows: every id must be smaller.
    pub vocab: u64,
    /// Put after each document in the text format (see [`end_token`]).
    pub end_token: Option<u32>,
}
