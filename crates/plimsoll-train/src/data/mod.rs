//! Training data: from the user's files to the rows of an optimizer step.
//!
//! This module reads and tokenizes files, stores token caches on disk, cuts documents into rows, shuffles rows, and
//! prepares the batch of the next step in a thread. It knows nothing of the model or of micro-batches: the executor
//! splits a batch as the plan says.
//!
//! Legend: R rows per step, T input positions per row (`sequence`), N tokens per document.
//!
//! # Documents
//! A data file has a container (`containers`: JSON lines, JSON, CSV, Parquet, plain text) and a format (`formats`: text,
//! token ids, conversations, prompts with completions). Both are independent. Each record of a file is a document.
//!
//! The format `auto` is that of the first records of each file. A record that fits two formats, or another format than
//! those before it, is refused.
//!
//! - Text: the tokens of the text, with the special tokens that the tokenizer adds. An end token follows unless the
//!   tokens already end with it.
//! - Token ids: taken as they are. Labels follow the Hugging Face convention: one per token of `input_ids`, unshifted;
//!   −100 is not predicted. Masks and other keys that change the loss are honoured or refused by name (`token_line`).
//! - Prompts with completions: the tokens of both, with labels for the completion and the end token after it.
//! - Conversations: the text that the chat template writes, with labels for the trained messages.
//! - Preferences: two documents, the prompt with the chosen answer and the prompt with the rejected one, with labels for
//!   the answers.
//! - Prompts: the tokens of the prompt and an end token, which alone has a label. The completions are sampled.
//! - Rollouts: the tokens of a prompt and its completion, with labels for the completion.
//!
//! A document without a label after its first token has nothing to predict: it is skipped and counted.
//!
//! To bound memory, text longer than 64 KiB is tokenized in windows that overlap. A text is cut where two windows have
//! the same tokens, so the tokens equal those of the whole text. A record has at most 16 MiB.
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
//! - Pairs: both documents of a preference stay in one row. Packed, each row takes as many pairs in file order as fit.
//!
//! Attention never crosses documents. At each position, `document_start` is the first index of the row that the
//! position attends to, and `positions` counts from there. Padding at the end of a row has token 0, label −100 and
//! weight 0, and attends only to itself.
//!
//! A document is *long* if it needs more than T positions. With `long = "split"` it continues in further rows, which
//! do not attend to the earlier ones. With `long = "refuse"` it is an error before training starts. No token is
//! dropped silently.
//!
//! # Mixtures
//! Training data have one or more sources, each a [`Dataset`] ([`TrainingData`]). A row belongs to one source.
//! [`MixtureOrder`] gives the source and the row at each position of the stream of rows.
//!
//! # Batches and the last partial batch
//! Rows come from one endless stream of epochs, each with its own permutation ([`RowOrder`]). Step s takes positions
//! s·R to s·R + R of that stream, so a batch may span two epochs and no row is skipped. If the stream ends (`epochs`),
//! the last batch takes the remaining rows and may be smaller ([`BatchSampler`]).

pub mod addition_example;
mod builtin_template;
mod cache;
mod cache_file;
mod containers;
mod conversation;
mod encoder;
mod error;
mod foreign_format;
mod formats;
mod globs;
mod guard;
mod inspection;
mod json_reason;
mod loader;
mod mixture;
mod order;
mod placed_token;
mod prompts;
mod record_format;
mod record_writer;
pub mod report;
mod rollouts;
mod rows;
mod source;
pub mod template;
mod template_error;
#[cfg(test)]
mod testing;
mod token_line;
mod tokenizer;
mod tokenizer_check;
mod training_data;
mod windows;
mod word_tokenizer;

pub(crate) use containers::is_data_file;
pub(crate) use conversation::{Conversation, Message, Prompt};
pub use error::{DataError, Place, SourceLocation};
pub(crate) use formats::resolve_formats;
pub(crate) use globs::list_files;
pub use inspection::{DataFiles, DataSummary, inspect, recognize};
pub use loader::{Batch, Loader};
pub use mixture::{MixtureOrder, SourceRow};
pub(crate) use order::splitmix64;
pub use order::{BatchSampler, RowOrder};
pub(crate) use prompts::{PromptEncoder, PromptRecord, read_conversation, read_prompts};
pub use record_format::RecordFormat;
pub(crate) use rollouts::{RolloutRewards, read_rollouts};
pub use rows::{Dataset, IGNORED_LABEL, Rows};

pub(crate) use tokenizer::read_pad_token;
pub use tokenizer::{Tokenizer, read_begin_token, read_end_token};
pub use training_data::TrainingData;

pub use crate::config::{Format, LongSamples, NotPrefix, Objective, Split, TrainOn, TrainOnEnd};

/// Selection of data files and the rules that turn them into rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSpec {
    /// Paths and globs of data files. The files of a glob are read in alphabetical order, each file once.
    pub patterns: Vec<String>,
    /// Format of the records in the files, or `auto`.
    pub format: Format,
    /// The split whose files are taken; `None` for all files.
    pub split: Option<Split>,
    /// T: input positions of a row.
    pub sequence: u64,
    /// Whether rows hold concatenated documents (packed); otherwise each document begins a new row (padded).
    pub pack: bool,
    /// Handling of documents that need more than T positions.
    pub long: LongSamples,
    /// V: number of tokens in the model's vocabulary. Every id must be smaller.
    pub vocab: u64,
    /// Id of the token that is appended to each document of text ([`read_end_token`]); `None` if there is none, which is
    /// refused unless all data are token ids.
    pub end_token: Option<u32>,
    /// Rules that turn conversations into text with labels.
    pub chat: ChatSpec,
    /// Objective of the training. Data of formats that it does not train on are refused.
    pub objective: Objective,
}

/// Rules that turn conversations into text with labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatSpec {
    /// The chat template: a file, or the name of a built-in one; `None` for the model's own.
    pub template: Option<String>,
    /// Messages that are trained.
    pub train_on: TrainOn,
    /// End-of-turn tokens that are trained.
    pub train_on_end: TrainOnEnd,
    /// Handling of templates that write earlier turns differently from the last one.
    pub not_prefix: NotPrefix,
}
