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

/// Smallest number of head rows in a block: products with fewer columns leave a GPU idle.
const HEAD_BLOCK_MIN: u64 = 8192;

/// Returns the largest number of head blocks. GPUs get fewer and therefore larger blocks: a product that takes only a
/// few waves leaves many multiprocessors idle in the last one.
fn head_blocks_max(kernels: Kernels) -> u64 {
    match kernels {
        Kernels::Cpu { .. } => 16,
        Kernels::Cuda => 8,
    }
}

/// Returns the rows of logits that exist at once.
///
/// They depend only on the model, on the width of a trained head (`None` if the head is frozen) and on the kernels. So
/// no rung of the class `identical` changes the order of sums.
///
/// - On a CPU they fit into the last-level cache: 8 MiB in f32.
/// - On a GPU each block of rows reads the head twice and moves its gradient twice, in f32. R rows give R/4 operations
///   per byte of that traffic. By their data sheets, an RTX 3090 does 76 operations in the time of a byte, and an H100
///   does 295. With 1,024 rows the gradient of the head takes no longer to move than to compute. The product of a block
///   then fills all multiprocessors of an H100 four times. The logits take 297 MiB in bf16 with a vocabulary of
///   151,936.
/// - On a GPU without head gradient, or for models that small cards train, 512 rows suffice.
pub fn loss_rows(vocab: u64, trained_width: Option<u64>, kernels: Kernels) -> u64 {
    let (bytes, most) = match kernels {
        Kernels::Cpu { .. } => (8 << 20, 1024),
        Kernels::Cuda if trained_width.is_some_and(|hidden| hidden >= WIDE_HIDDEN_MIN) => (640 << 20, 1024),
        Kernels::Cuda => (320 << 20, 512),
    };
    let rows: u64 = bytes / (4 * vocab);
    (1 << rows.max(1).ilog2()).clamp(32, most)
}

/// Smallest hidden size of a model that an 8 GiB card cannot train in full.
const WIDE_HIDDEN_MIN: u64 = 1536;

/// Returns the row ranges of the head's blocks. They depend only on the vocabulary and the kernels; the last block may
/// be smaller.
pub fn head_blocks(vocab: u64, kernels: Kernels) -> Vec<Range<u64>> {
    let count = (vocab / HEAD_BLOCK_MIN).clamp(1, head_blocks_max(kernels));
    let rows = vocab.div_ceil(count).next_multiple_of(64);
    (0..vocab.div_ceil(rows)).map(|number| number * rows..vocab.min((number + 1) * rows)).collect()
}

/// Returns whether streaming an offloaded head in blocks saves memory. Two blocks are on the device at once, so it
/// takes at least three.
pub fn streams_head(vocab: u64, kernels: Kernels) -> bool {
    head_blocks(vocab, kernels).len() > 2
}

/// The inputs and outputs of a loss.
pub(super) struct Loss<'a> {
    pub prefix: &'a str,
    /// Output of the final norm, `[N, D]`.
    pub normed: TensorId,
    /// Head, `[V, D]`.
    pub head: TensorId,
    pub labels: TensorId,
    pub token_weights: TensorId,
    /// Gradients of `normed`, and of the head if it is trained; `None` computes the loss alone.
    pub gradients: Option<(TensorId, Option<TensorId>)>,
    /// Output `[N]` that tells whether the label had the largest logit; `None` omits it.
    pub correct: Option<TensorId>,
}

/// A block of rows of the micro-batch.
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
        Operand::whole(tensor).from(Index { base: base * columns, scale: scale * columns, micro_batch })
    }
}

/// A loss under construction. `stats` and `sums` have entries for all rows if the head is streamed, else for one block.
struct LossWriter<'a, 'b, 'l> {
    decoder: &'a mut Decoder<'b>,
    loss: Loss<'l>,
    /// Logits of a block of rows.
    logits: TensorId,
    /// Statistics of the online softmax.
    stats: TensorId,
    /// Wide sums of the gradient of `normed`, if they need to be rounded.
    sums: Option<TensorId>,
    /// Whether the head is streamed.
    streamed: bool,
}

impl Decoder<'_> {
    /// Returns the blocks of the loss over all rows.
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
    /// Returns the blocks that process the whole head for each block of rows.
    fn rows_outer(&mut self, blocks: &[Range<u64>], all: u64, block_rows: u64) -> Vec<Block> {
        for_row_blocks("loss", all, block_rows, |rows| {
            let mut ops = Vec::new();
            for block in blocks {
                ops.extend([self.make_logits(rows, block, self.logits), self.update_stats(rows, block)]);
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

    /// Returns the blocks that process all rows for each block of the head.
    fn head_outer(&mut self, blocks: &[Range<u64>], all: u64, block_rows: u64) -> Vec<Block> {
        let mut list = Vec::new();
        for block in blocks {
            list.extend(for_row_blocks("loss", all, block_rows, |rows| {
                vec![self.make_logits(rows, block, self.logits), self.update_stats(rows, block)]
            }));
        }
        list.extend(for_row_blocks("loss", all, block_rows, |rows| vec![self.cross_entropy(rows)]));
        if self.loss.gradients.is_some() {
            let name = format!("{}logits{RECOMPUTED_SUFFIX}", self.loss.prefix);
            let recomputed = self.decoder.builder.copy_of(self.logits, name);
            for block in blocks.iter().rev() {
                list.extend(for_row_blocks("loss", all, block_rows, |rows| {
                    let mut ops = vec![self.make_logits(rows, block, recomputed)];
                    ops.extend(self.derive(rows, block, block.end == self.vocab(), recomputed));
                    ops
                }));
            }
            list.extend(for_row_blocks("loss", all, block_rows, |rows| self.round_sums(rows).into_iter().collect()));
        }
        list.retain(|block| !block.ops.is_empty());
        list
    }

    fn vocab(&self) -> u64 {
        self.decoder.options.config.vocab
    }

    fn hidden(&self) -> u64 {
        self.decoder.options.config.hidden
    }

    /// Returns the operand of a block's logits `[R, columns]`, which are contiguous.
    fn place(&self, rows: Rows, block: &Range<u64>, logits: TensorId) -> Operand {
        let first = if self.streamed { 0 } else { rows.count * block.start };
        Operand::whole(logits).from(Index::fixed(first as i64))
    }

    /// Returns the operand of these rows in `stats` or `sums`.
    fn row_state(&self, rows: Rows, tensor: TensorId, each: u64) -> Operand {
        if self.streamed { rows.slice(tensor, each) } else { Operand::whole(tensor) }
    }

    /// Returns the operand of a block in the head or in its gradient.
    fn head_rows(&self, tensor: TensorId, block: &Range<u64>) -> Operand {
        Operand::whole(tensor).from(Index::fixed((block.start * self.hidden()) as i64))
    }

    /// Returns the product `logits[R, columns]` = `x[R, D]` · headᵀ.
    fn make_logits(&mut self, rows: Rows, block: &Range<u64>, logits: TensorId) -> Op {
        let (d, columns) = (self.hidden(), block.end - block.start);
        let (x, head) = (rows.slice(self.loss.normed, d), self.head_rows(self.loss.head, block));
        let logits = self.place(rows, block, logits);
        self.decoder.builder.product(Product::linear(x, head, logits, rows.count, d, columns))
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
            rows: rows.count,
        }
        .into()
    }

    /// Returns the ops that turn logits into their gradient, add dlogitsᵀ · x to `dhead[columns, D]`, and write
    /// dlogits · head to `dx[R, D]` (`begin`) or add it.
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
        };
        let mut ops = vec![gradient.into()];
        if let Some(dhead) = dhead {
            let (x, dhead) = (rows.slice(self.loss.normed, d), self.head_rows(dhead, block));
            ops.push(self.decoder.builder.product(Product::weight_gradient(dlogits, x, dhead, rows.count, d, columns)));
        }
        let head = self.head_rows(self.loss.head, block);
        let dx = self.sums.map_or(rows.slice(dnormed, d), |sums| self.row_state(rows, sums, d));
        let product = Product::plain(dlogits, head, dx, [rows.count, d, columns]);
        ops.push(self.decoder.builder.product(Product { accumulate: !begin, ..product }));
        ops
    }

    /// Returns the op that rounds the wide sums of the gradient of these rows.
    fn round_sums(&self, rows: Rows) -> Option<Op> {
        let ((dnormed, _), d) = (self.loss.gradients?, self.hidden());
        let (from, to) = (self.row_state(rows, self.sums?, d), rows.slice(dnormed, d));
        Some(OpKind::Cast { from, to, elements: rows.count * d }.into())
    }
}

/// Returns a block that repeats for every `block_rows` rows, and a block for the rest.
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
