//! The loss, in blocks of rows × blocks of the vocabulary: full logits never exist.
//!
//! For each block of rows, logits are made block by block of the head, and what is known of each row's softmax is carried
//! on; once it is known, each block of logits becomes its gradient, which adds to that of the rows and of the head.
//!
//! Where the head comes in blocks (`Build::streamed_head`), the two loops are exchanged: for each block of the head all
//! rows, twice, so that the head comes and goes twice and logits are made twice. These are the same ops on the same
//! numbers, and every sum is taken in the same order: no bit changes.

use super::Decoder;
use crate::builder::Product;
use crate::op::{Op, OpKind, SOFTMAX_STATS};
use crate::program::Block;
use crate::tensor::{Index, Operand, TensorId};
use crate::workspace::Kernels;
use std::ops::Range;

/// Rows of the head in a block, at least: products of fewer columns leave a GPU without work.
const HEAD_BLOCK: u64 = 8192;
/// Blocks of the head, at most. A GPU has the fewer, since products that its processors take in a few turns each leave
/// most of them idle in the last.
fn head_blocks_max(kernels: Kernels) -> u64 {
    match kernels {
        Kernels::Cpu { .. } => 16,
        Kernels::Cuda => 8,
    }
}

/// Rows of logits that stand at once: a function of the model, of whether its head is trained, and of whose kernels run, so
/// that no rung without loss changes the order of sums.
///
/// On a processor they stay in the last cache: 8 MiB in f32. On a GPU each block of rows reads the head twice and moves its
/// gradient twice, in f32: R rows are R/4 operations for a byte of that. An RTX 3090 does 76 in the time in which it moves a
/// byte, an H100 295, by their data sheets: with 1,024 rows the gradient of the head takes no longer to be moved than to be
/// made, and a product of a block has work for every processor of an H100 four times. They take 297 MiB of bf16 where the
/// vocabulary is of 151,936. Where no gradient of the head is moved, and of models that are trained on small cards, half as
/// many do.
pub fn loss_rows(vocab: u64, trained_width: Option<u64>, kernels: Kernels) -> u64 {
    let (bytes, most) = match kernels {
        Kernels::Cpu { .. } => (8 << 20, 1024),
        Kernels::Cuda if trained_width.is_some_and(|hidden| hidden >= WIDE) => (640 << 20, 1024),
        Kernels::Cuda => (320 << 20, 512),
    };
    let rows: u64 = bytes / (4 * vocab);
    (1 << rows.max(1).ilog2()).clamp(32, most)
}

/// Hidden units of a model that is not trained whole on a card of 8 GiB.
const WIDE: u64 = 1536;

/// The blocks of the head, a function of the vocabulary and of whose kernels run; the last may be smaller.
pub fn head_blocks(vocab: u64, kernels: Kernels) -> Vec<Range<u64>> {
    let count = (vocab / HEAD_BLOCK).clamp(1, head_blocks_max(kernels));
    let rows = vocab.div_ceil(count).next_multiple_of(64);
    (0..vocab.div_ceil(rows)).map(|number| number * rows..vocab.min((number + 1) * rows)).collect()
}

/// Whether a head that waits elsewhere comes in blocks: two of them are on their way or in use, so that of fewer than
/// three nothing would be won.
pub fn streams_head(vocab: u64, kernels: Kernels) -> bool {
    head_blocks(vocab, kernels).len() > 2
}

/// What the loss is of, and what is asked of it.
pub(super) struct Loss<'a> {
    pub prefix: &'a str,
    /// [N, D]
    pub normed: TensorId,
    /// [V, D]
    pub head: TensorId,
    pub labels: TensorId,
    pub token_weights: TensorId,
    /// Gradients of `normed`, and of the head where it is trained: the logits then become their gradient in place.
    pub gradients: Option<(TensorId, Option<TensorId>)>,
    /// Whether each row was hit, if that is to be written down.
    pub correct: Option<TensorId>,
}

/// Some rows of the micro-batch.
#[derive(Clone, Copy)]
struct Rows {
    first: Index,
    count: u64,
}

impl Rows {
    /// What has `each` elements for a row, from the first of these rows on.
    fn of(self, tensor: TensorId, each: u64) -> Operand {
        let Index { base, scale, micro_batch } = self.first;
        let each = each as i64;
        Operand::whole(tensor).from(Index { base: base * each, scale: scale * each, micro_batch })
    }
}

/// The loss while it is written down.
struct Writer<'a, 'b, 'l> {
    decoder: &'a mut Decoder<'b>,
    loss: Loss<'l>,
    /// Of all rows where the head comes in blocks, else of a block of them: logits, stats, wide sums of the gradient.
    logits: TensorId,
    stats: TensorId,
    sums: Option<TensorId>,
    streamed: bool,
}

impl Decoder<'_> {
    /// The loss over all rows, in blocks.
    pub(super) fn loss(&mut self, loss: Loss) -> Vec<Block> {
        let (d, v) = (self.what.config.hidden, self.what.config.vocab);
        let rows = self.what.micro_batch * self.what.sequence;
        let kernels = self.what.kernels;
        let trained_width = loss.gradients.and_then(|(_, head)| head).map(|_| d);
        let (block_rows, blocks) = (loss_rows(v, trained_width, kernels).min(rows), head_blocks(v, kernels));
        let streamed = self.what.streamed_head && streams_head(v, kernels);
        let (columns, stay) = if streamed { (blocks[0].end, rows) } else { (v, block_rows) };
        let prefix = loss.prefix;
        let logits = self.builder.activation(&format!("{prefix}logits"), &[block_rows, columns], 1);
        let stats = self.builder.statistic(&format!("{prefix}softmax_stats"), &[stay, SOFTMAX_STATS], 1);
        // Sums over several blocks are rounded once.
        let narrow = loss.gradients.is_some() && blocks.len() > 1 && self.what.precision != self.what.precision.wide();
        let sums = narrow.then(|| self.builder.statistic(&format!("{prefix}normed.gradient.sums"), &[stay, d], 1));
        let mut writer = Writer { decoder: self, loss, logits, stats, sums, streamed };
        if streamed { writer.by_block(&blocks, rows, block_rows) } else { writer.by_rows(&blocks, rows, block_rows) }
    }
}

impl Writer<'_, '_, '_> {
    /// For each block of rows all of the head.
    fn by_rows(&mut self, blocks: &[Range<u64>], all: u64, block_rows: u64) -> Vec<Block> {
        over_rows("loss", all, block_rows, |rows| {
            let mut ops = Vec::new();
            for block in blocks {
                ops.extend([self.make_logits(rows, block, self.logits), self.carry_on(rows, block)]);
            }
            ops.push(self.cross_entropy(rows));
            if self.loss.gradients.is_some() {
                // Backwards, as the last block is still there where the head comes in blocks.
                for block in blocks.iter().rev() {
                    ops.extend(self.derive(rows, block, block.end == self.vocab(), self.logits));
                }
                ops.extend(self.round(rows));
            }
            ops
        })
    }

    /// For each block of the head all rows.
    fn by_block(&mut self, blocks: &[Range<u64>], all: u64, block_rows: u64) -> Vec<Block> {
        let mut list = Vec::new();
        for block in blocks {
            list.extend(over_rows("loss", all, block_rows, |rows| {
                vec![self.make_logits(rows, block, self.logits), self.carry_on(rows, block)]
            }));
        }
        list.extend(over_rows("loss", all, block_rows, |rows| vec![self.cross_entropy(rows)]));
        if self.loss.gradients.is_some() {
            let again = self.decoder.builder.copy_of(self.logits, format!("{}logits.again", self.loss.prefix));
            for block in blocks.iter().rev() {
                list.extend(over_rows("loss", all, block_rows, |rows| {
                    let mut ops = vec![self.make_logits(rows, block, again)];
                    ops.extend(self.derive(rows, block, block.end == self.vocab(), again));
                    ops
                }));
            }
            list.extend(over_rows("loss", all, block_rows, |rows| self.round(rows).into_iter().collect()));
        }
        list.retain(|block| !block.ops.is_empty());
        list
    }

    fn vocab(&self) -> u64 {
        self.decoder.what.config.vocab
    }

    fn hidden(&self) -> u64 {
        self.decoder.what.config.hidden
    }

    /// Where the logits `[R, columns]` of a block stand: those of one block by themselves.
    fn place(&self, rows: Rows, block: &Range<u64>, logits: TensorId) -> Operand {
        let first = if self.streamed { 0 } else { rows.count * block.start };
        Operand::whole(logits).from(Index::fixed(first as i64))
    }

    /// What is kept of all rows where the head comes in blocks, else of these.
    fn kept(&self, rows: Rows, tensor: TensorId, each: u64) -> Operand {
        if self.streamed { rows.of(tensor, each) } else { Operand::whole(tensor) }
    }

    /// A block of the head, or of its gradient.
    fn of_head(&self, tensor: TensorId, block: &Range<u64>) -> Operand {
        Operand::whole(tensor).from(Index::fixed((block.start * self.hidden()) as i64))
    }

    /// `logits[R, columns]` = `x[R, D]` · headᵀ
    fn make_logits(&mut self, rows: Rows, block: &Range<u64>, logits: TensorId) -> Op {
        let (d, columns) = (self.hidden(), block.end - block.start);
        let (x, head) = (rows.of(self.loss.normed, d), self.of_head(self.loss.head, block));
        let logits = self.place(rows, block, logits);
        self.decoder.builder.product(Product::linear(x, head, logits, rows.count, d, columns))
    }

    fn carry_on(&self, rows: Rows, block: &Range<u64>) -> Op {
        OpKind::SoftmaxStats {
            logits: self.place(rows, block, self.logits),
            labels: rows.of(self.loss.labels, 1),
            weights: rows.of(self.loss.token_weights, 1),
            stats: self.kept(rows, self.stats, SOFTMAX_STATS),
            rows: rows.count,
            first: block.start,
            columns: block.end - block.start,
            begin: block.start == 0,
        }
        .into()
    }

    fn cross_entropy(&self, rows: Rows) -> Op {
        OpKind::CrossEntropy {
            stats: self.kept(rows, self.stats, SOFTMAX_STATS),
            labels: rows.of(self.loss.labels, 1),
            weights: rows.of(self.loss.token_weights, 1),
            metrics: Operand::whole(self.decoder.metrics),
            correct: self.loss.correct.map(|correct| rows.of(correct, 1)),
            rows: rows.count,
        }
        .into()
    }

    /// Logits into their gradient; `dhead[columns, D]` += dlogitsᵀ · x; `dx[R, D]` = or += dlogits · head.
    fn derive(&mut self, rows: Rows, block: &Range<u64>, begin: bool, logits: TensorId) -> Vec<Op> {
        let (d, columns) = (self.hidden(), block.end - block.start);
        let (dnormed, dhead) = self.loss.gradients.expect("gradients are asked for");
        let dlogits = self.place(rows, block, logits);
        let gradient = OpKind::SoftmaxGrad {
            logits: dlogits,
            labels: rows.of(self.loss.labels, 1),
            weights: rows.of(self.loss.token_weights, 1),
            stats: self.kept(rows, self.stats, SOFTMAX_STATS),
            scalars: Operand::whole(self.decoder.scalars),
            rows: rows.count,
            first: block.start,
            columns,
        };
        let mut ops = vec![gradient.into()];
        if let Some(dhead) = dhead {
            let (x, dhead) = (rows.of(self.loss.normed, d), self.of_head(dhead, block));
            ops.push(self.decoder.builder.product(Product::of_weight(dlogits, x, dhead, rows.count, d, columns)));
        }
        let head = self.of_head(self.loss.head, block);
        let dx = self.sums.map_or(rows.of(dnormed, d), |sums| self.kept(rows, sums, d));
        let product = Product::plain(dlogits, head, dx, [rows.count, d, columns]);
        ops.push(self.decoder.builder.product(Product { accumulate: !begin, ..product }));
        ops
    }

    /// Wide sums of the gradient of these rows, rounded.
    fn round(&self, rows: Rows) -> Option<Op> {
        let ((dnormed, _), d) = (self.loss.gradients?, self.hidden());
        let (from, to) = (self.kept(rows, self.sums?, d), rows.of(dnormed, d));
        Some(OpKind::Cast { from, to, elements: rows.count * d }.into())
    }
}

/// Blocks of so many rows, and of the rest.
fn over_rows(name: &str, all: u64, block_rows: u64, mut ops: impl FnMut(Rows) -> Vec<Op>) -> Vec<Block> {
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
    fn rows_of_a_block_depend_on_the_model_and_the_kernels() {
        let rows =
            |width, kernels| [8192, 49_152, 128_256, 151_936, 262_144].map(|vocab| loss_rows(vocab, width, kernels));
        assert_eq!(rows(Some(2048), Kernels::Cpu { threads: 2 }), [256, 32, 32, 32, 32]);
        assert_eq!(rows(Some(2048), Kernels::Cuda), [1024, 1024, 1024, 1024, 512]);
        for width in [None, Some(960)] {
            assert_eq!(rows(width, Kernels::Cuda), [512, 512, 512, 512, 256]);
        }
    }

    #[test]
    fn blocks_cover_the_vocabulary_once() {
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
