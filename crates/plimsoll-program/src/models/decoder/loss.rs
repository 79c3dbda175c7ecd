//! The loss, in blocks of rows × blocks of the vocabulary: full logits never exist.
//!
//! For each block of rows, the Program computes logits block by block of the head and updates the online softmax. Then
//! each block of logits is replaced by its gradient, which is added to the gradients of the rows and of the head.
//!
//! A streamed head (`BuildOptions::streamed_head`) swaps the two loops: for each block of the head all rows, in two
//! passes. The head is fetched twice and logits are computed twice. Ops, numbers and the order of sums stay the same,
//! so no bit changes.

use super::Decoder;
use crate::builder::Product;
use crate::op::{Op, OpKind, SOFTMAX_STATS};
use crate::passes::recompute::RECOMPUTED_SUFFIX;
use crate::program::Block;
use crate::tensor::{Index, Operand, TensorId};
use crate::workspace::Kernels;
use std::ops::Range;

/// Smallest number of rows of the output head (vocabulary entries) in a block: matrix products with fewer columns leave
/// a GPU idle.
const HEAD_BLOCK_MIN: u64 = 8192;

/// Returns the largest number of blocks into which the output head is split. GPUs get fewer and therefore larger
/// blocks: a product that takes only a few waves leaves many multiprocessors idle in the last one.
fn head_blocks_max(kernels: Kernels) -> u64 {
    match kernels {
        Kernels::Cpu { .. } => 16,
        Kernels::Cuda => 8,
    }
}

/// Returns the number of rows (tokens) for which logits exist at once: a power of two, at least 32.
///
/// It depends only on the vocabulary size, on the hidden size of a trained head (`trained_width`; `None` if the head is
/// frozen) and on the kernels. Recompute and offload therefore do not change the order of sums.
///
/// - CPU: at most 1,024 rows, and as many as keep the logits within 8 MiB in f32, so that they stay in the last-level
///   cache.
/// - GPU that trains the head of a large model (hidden size from `WIDE_HIDDEN_MIN`): at most 1,024 rows. Each block
///   of rows reads and writes the f32 gradient of the head once, so R rows give R/4 operations per byte of it: 256 for
///   1,024 rows. By their data sheets, an RTX 3090 does 76 operations in the time of a byte, and an H100 does 295. The
///   product of a block then fills all multiprocessors of an H100 four times. The logits take 297 MiB in bf16 with a
///   vocabulary of 151,936.
/// - Other runs on a GPU: at most 512 rows.
pub fn loss_rows(vocab: u64, trained_width: Option<u64>, kernels: Kernels) -> u64 {
    let (bytes, most) = match kernels {
        Kernels::Cpu { .. } => (8 << 20, 1024),
        Kernels::Cuda if trained_width.is_some_and(|hidden| hidden >= WIDE_HIDDEN_MIN) => (640 << 20, 1024),
        Kernels::Cuda => (320 << 20, 512),
    };
    let rows: u64 = bytes / (4 * vocab);
    (1 << rows.max(1).ilog2()).clamp(32, most)
}

/// Smallest hidden size of a model that counts as large: an 8 GiB card cannot train all its parameters.
const WIDE_HIDDEN_MIN: u64 = 1536;

/// Returns the ranges of the vocabulary whose logits the loss computes at once, which are blocks of rows of the output
/// head. They depend only on the vocabulary and the kernels; the last one may be smaller.
pub fn head_blocks(vocab: u64, kernels: Kernels) -> Vec<Range<u64>> {
    let count = (vocab / HEAD_BLOCK_MIN).clamp(1, head_blocks_max(kernels));
    let rows = vocab.div_ceil(count).next_multiple_of(64);
    (0..vocab.div_ceil(rows)).map(|number| number * rows..vocab.min((number + 1) * rows)).collect()
}

/// Returns whether it saves memory to stream an offloaded output head, of which two blocks at a time are on the device.
/// The head must have at least three blocks ([`head_blocks`]).
pub fn streams_head(vocab: u64, kernels: Kernels) -> bool {
    head_blocks(vocab, kernels).len() > 2
}

/// The inputs and outputs of a loss over N tokens.
pub(super) struct Loss<'a> {
    /// Start of the names of tensors that the loss adds.
    pub prefix: &'a str,
    /// Output of the final norm, `[N, D]`.
    pub normed: TensorId,
    /// Weights of the output head, `[V, D]`.
    pub head: TensorId,
    /// Token ids to predict, `[N]`; −100 marks tokens without loss.
    pub labels: TensorId,
    /// Loss weight of each token, `[N]`.
    pub token_weights: TensorId,
    /// Gradient tensors of `normed`, and of the head if it is trained; `None` computes the loss alone.
    pub gradients: Option<(TensorId, Option<TensorId>)>,
    /// Output `[N]` that tells for each token whether its label had the largest logit; `None` omits it.
    pub correct: Option<TensorId>,
    /// Output `[N]` with the log-probability of each token's label; `None` omits it.
    pub log_probabilities: Option<TensorId>,
}

/// A range of rows (tokens) of the micro-batch, which may depend on the block's variable.
#[derive(Clone, Copy)]
struct Rows {
    first: Index,
    count: u64,
}

impl Rows {
    /// Returns the operand of these rows in a tensor with `columns` elements per row.
    fn slice(self, tensor: TensorId, columns: u64) -> Operand {
        let Index { base, scale, micro_batch } = self.first;
        let columns = columns as i64;
        Operand::whole(tensor).starting_at(Index { base: base * columns, scale: scale * columns, micro_batch })
    }
}

/// A loss under construction. `stats` and `sums` have entries for all rows if the head is streamed, else for one block
/// of rows.
struct LossWriter<'a, 'b, 'l> {
    decoder: &'a mut Decoder<'b>,
    loss: Loss<'l>,
    /// Logits of a block of rows and a block of the vocabulary.
    logits: TensorId,
    /// Statistics of the running softmax ([`OpKind::SoftmaxStats`]).
    stats: TensorId,
    /// Tensor with the f32 sums of the gradient of `normed`, which are rounded to bf16 at the end. `None` in other
    /// precisions, without gradients, and if the head is a single block.
    sums: Option<TensorId>,
    /// Whether the head is streamed: only two of its blocks are on the device at a time.
    streamed: bool,
}

impl Decoder<'_> {
    /// Returns the blocks (loops of ops) that compute a loss over all tokens of a micro-batch, and its gradients if
    /// `loss.gradients` names tensors for them.
    pub(super) fn loss(&mut self, loss: Loss) -> Vec<Block> {
        let (d, v) = (self.options.config.hidden, self.options.config.vocab);
        let rows = self.options.micro_batch * self.options.sequence;
        let kernels = self.options.kernels;
        let trained_width = loss.gradients.and_then(|(_, head)| head).map(|_| d);
        let (block_rows, blocks) = (loss_rows(v, trained_width, kernels).min(rows), head_blocks(v, kernels));
        let streamed = self.options.streamed_head && streams_head(v, kernels);
        let (columns, state_rows) = if streamed { (blocks[0].end, rows) } else { (v, block_rows) };
        let prefix = loss.prefix;
        let logits = self.builder.activation(&format!("{prefix}logits"), &[block_rows, columns], 1);
        let stats = self.builder.statistic(&format!("{prefix}softmax_stats"), &[state_rows, SOFTMAX_STATS], 1);
        // Sums over several blocks are rounded once, at the end.
        let needs_rounding =
            loss.gradients.is_some() && blocks.len() > 1 && self.options.precision != self.options.precision.wide();
        let sums_name = format!("{prefix}normed.gradient.sums");
        let sums = needs_rounding.then(|| self.builder.statistic(&sums_name, &[state_rows, d], 1));
        let mut writer = LossWriter { decoder: self, loss, logits, stats, sums, streamed };
        if streamed {
            writer.head_outer(&blocks, rows, block_rows)
        } else {
            writer.rows_outer(&blocks, rows, block_rows)
        }
    }
}

impl LossWriter<'_, '_, '_> {
    /// Returns the Program blocks of a loss that is not streamed: for each block of rows the whole head.
    fn rows_outer(&mut self, blocks: &[Range<u64>], all: u64, block_rows: u64) -> Vec<Block> {
        for_row_blocks("loss", all, block_rows, |rows| {
            let mut ops = Vec::new();
            for block in blocks {
                ops.extend(self.make_logits(rows, block, self.logits));
                ops.push(self.update_stats(rows, block));
            }
            ops.push(self.cross_entropy(rows));
            if self.loss.gradients.is_some() {
                // In reverse order, because a streamed head still has its last block on the device.
                for block in blocks.iter().rev() {
                    ops.extend(self.derive(rows, block, block.end == self.vocab(), self.logits));
                }
                ops.extend(self.round_sums(rows));
            }
            ops
        })
    }

    /// Returns the Program blocks of a loss with a streamed head: for each block of the head all rows.
    fn head_outer(&mut self, blocks: &[Range<u64>], all: u64, block_rows: u64) -> Vec<Block> {
        let mut list = Vec::new();
        for block in blocks {
            list.extend(for_row_blocks("loss", all, block_rows, |rows| {
                let mut ops = self.make_logits(rows, block, self.logits);
                ops.push(self.update_stats(rows, block));
                ops
            }));
        }
        list.extend(for_row_blocks("loss", all, block_rows, |rows| vec![self.cross_entropy(rows)]));
        if self.loss.gradients.is_some() {
            let name = format!("{}logits{RECOMPUTED_SUFFIX}", self.loss.prefix);
            let recomputed = self.decoder.builder.copy_of(self.logits, name);
            for block in blocks.iter().rev() {
                list.extend(for_row_blocks("loss", all, block_rows, |rows| {
                    let mut ops = self.make_logits(rows, block, recomputed);
                    ops.extend(self.derive(rows, block, block.end == self.vocab(), recomputed));
                    ops
                }));
            }
            list.extend(for_row_blocks("loss", all, block_rows, |rows| self.round_sums(rows).into_iter().collect()));
        }
        list.retain(|block| !block.ops.is_empty());
        list
    }

    /// Returns the factor of the product that gives logits, and of those that derive it.
    fn logits_scale(&self) -> f64 {
        let options = self.decoder.options;
        1.0 / (options.config.extras.logits_scaling * options.temperature)
    }

    /// Returns the cap of logits after their division by the temperature, if the model has one.
    fn softcap(&self) -> Option<f64> {
        let options = self.decoder.options;
        options.config.extras.logit_softcap.map(|cap| cap / options.temperature)
    }

    fn vocab(&self) -> u64 {
        self.decoder.options.config.vocab
    }

    fn hidden(&self) -> u64 {
        self.decoder.options.config.hidden
    }

    /// Returns the operand in `logits` for the logits `[R, columns]` of these rows and a block of the vocabulary, which
    /// are contiguous.
    fn place(&self, rows: Rows, block: &Range<u64>, logits: TensorId) -> Operand {
        let first = if self.streamed { 0 } else { rows.count * block.start };
        Operand::whole(logits).starting_at(Index::fixed(first as i64))
    }

    /// Returns the operand of these rows in `tensor` (`stats` or `sums`), which has `each` elements per row.
    fn row_state(&self, rows: Rows, tensor: TensorId, each: u64) -> Operand {
        if self.streamed { rows.slice(tensor, each) } else { Operand::whole(tensor) }
    }

    /// Returns the operand of a block of the vocabulary in `tensor`, the head or its gradient.
    fn head_rows(&self, tensor: TensorId, block: &Range<u64>) -> Operand {
        Operand::whole(tensor).starting_at(Index::fixed((block.start * self.hidden()) as i64))
    }

    /// Returns the ops that compute the logits of these rows and a block of the vocabulary: `logits[R, columns]` =
    /// `x[R, D]` · headᵀ, with a cap if the model has one.
    fn make_logits(&mut self, rows: Rows, block: &Range<u64>, logits: TensorId) -> Vec<Op> {
        let (d, columns) = (self.hidden(), block.end - block.start);
        let (x, head) = (rows.slice(self.loss.normed, d), self.head_rows(self.loss.head, block));
        let logits = self.place(rows, block, logits);
        let scale = self.logits_scale();
        let product = Product { scale, ..Product::linear(x, head, logits, rows.count, d, columns) };
        let cap = self.softcap().map(|cap| OpKind::SoftCap { x: logits, elements: rows.count * columns, cap }.into());
        [self.decoder.builder.product(product)].into_iter().chain(cap).collect()
    }

    fn update_stats(&self, rows: Rows, block: &Range<u64>) -> Op {
        OpKind::SoftmaxStats {
            logits: self.place(rows, block, self.logits),
            labels: rows.slice(self.loss.labels, 1),
            weights: rows.slice(self.loss.token_weights, 1),
            stats: self.row_state(rows, self.stats, SOFTMAX_STATS),
            rows: rows.count,
            first: block.start,
            columns: block.end - block.start,
            begin: block.start == 0,
        }
        .into()
    }

    fn cross_entropy(&self, rows: Rows) -> Op {
        OpKind::CrossEntropy {
            stats: self.row_state(rows, self.stats, SOFTMAX_STATS),
            labels: rows.slice(self.loss.labels, 1),
            weights: rows.slice(self.loss.token_weights, 1),
            metrics: Operand::whole(self.decoder.metrics),
            correct: self.loss.correct.map(|correct| rows.slice(correct, 1)),
            log_probabilities: self.loss.log_probabilities.map(|output| rows.slice(output, 1)),
            rows: rows.count,
        }
        .into()
    }

    /// Returns the ops that turn logits into their gradient and add dlogitsᵀ · x to the gradient of the head. They also
    /// write dlogits · head to the gradient of x if `begin`, or else add it.
    fn derive(&mut self, rows: Rows, block: &Range<u64>, begin: bool, logits: TensorId) -> Vec<Op> {
        let (d, columns) = (self.hidden(), block.end - block.start);
        let (dnormed, dhead) = self.loss.gradients.expect("gradients are asked for");
        let dlogits = self.place(rows, block, logits);
        let gradient = OpKind::SoftmaxGrad {
            logits: dlogits,
            labels: rows.slice(self.loss.labels, 1),
            weights: rows.slice(self.loss.token_weights, 1),
            stats: self.row_state(rows, self.stats, SOFTMAX_STATS),
            scalars: Operand::whole(self.decoder.scalars),
            rows: rows.count,
            first: block.start,
            columns,
            softcap: self.softcap(),
        };
        let mut ops = vec![gradient.into()];
        if let Some(dhead) = dhead {
            let (x, dhead) = (rows.slice(self.loss.normed, d), self.head_rows(dhead, block));
            let product = Product::weight_gradient(dlogits, x, dhead, rows.count, d, columns);
            ops.push(self.decoder.builder.product(Product { scale: self.logits_scale(), ..product }));
        }
        let head = self.head_rows(self.loss.head, block);
        let dx = self.sums.map_or(rows.slice(dnormed, d), |sums| self.row_state(rows, sums, d));
        let product = Product::plain(dlogits, head, dx, [rows.count, d, columns]);
        let (accumulate, scale) = (!begin, self.logits_scale());
        ops.push(self.decoder.builder.product(Product { accumulate, scale, ..product }));
        ops
    }

    /// Returns the op that rounds the f32 sums of the gradient of these rows to bf16; `None` if there are no such sums.
    fn round_sums(&self, rows: Rows) -> Option<Op> {
        let ((dnormed, _), d) = (self.loss.gradients?, self.hidden());
        let (from, to) = (self.row_state(rows, self.sums?, d), rows.slice(dnormed, d));
        Some(OpKind::Cast { from, to, elements: rows.count * d }.into())
    }
}

/// Returns a block that repeats for every `block_rows` of `all` rows, and a block for the rest, if there is one. `ops`
/// returns the ops for some rows.
fn for_row_blocks(name: &str, all: u64, block_rows: u64, mut ops: impl FnMut(Rows) -> Vec<Op>) -> Vec<Block> {
    let (whole, rest) = (all / block_rows, all % block_rows);
    let mut blocks = vec![Block {
        name: name.into(),
        first: 0,
        step: 1,
        repeat: whole as u32,
        ops: ops(Rows { first: Index::stride(block_rows as i64), count: block_rows }),
    }];
    if rest > 0 {
        let rows = Rows { first: Index::fixed((whole * block_rows) as i64), count: rest };
        blocks.push(Block::once(&format!("{name}_rest"), ops(rows)));
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_rows_depend_on_model_and_kernels() {
        let rows =
            |width, kernels| [8192, 49_152, 128_256, 151_936, 262_144].map(|vocab| loss_rows(vocab, width, kernels));
        assert_eq!(rows(Some(2048), Kernels::Cpu { threads: 2 }), [256, 32, 32, 32, 32]);
        assert_eq!(rows(Some(2048), Kernels::Cuda), [1024, 1024, 1024, 1024, 512]);
        for width in [None, Some(960)] {
            assert_eq!(rows(width, Kernels::Cuda), [512, 512, 512, 512, 256]);
        }
    }

    #[test]
    fn head_blocks_cover_the_vocabulary() {
        let large = [8192, 16_384, 32_000, 49_152, 128_256, 151_936, 152_064, 262_144];
        let vocabularies = (1..100_000).step_by(37).chain(large);
        let processor = Kernels::Cpu { threads: 2 };
        for (vocab, kernels) in vocabularies.flat_map(|vocab| [(vocab, processor), (vocab, Kernels::Cuda)]) {
            let blocks = head_blocks(vocab, kernels);
            assert!(blocks.len() as u64 <= head_blocks_max(kernels));
            assert_eq!((blocks[0].start, blocks[blocks.len() - 1].end), (0, vocab));
            assert!(blocks.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].start % 64 == 0));
            assert!(blocks.iter().all(|block| block.start < block.end && block.end - block.start <= blocks[0].end));
        }
        assert_eq!([128_256, 262_144].map(|vocab| head_blocks(vocab, processor).len()), [15, 16]);
        assert_eq!([32_000, 49_152, 128_256].map(|vocab| head_blocks(vocab, Kernels::Cuda).len()), [3, 6, 8]);
    }
}
