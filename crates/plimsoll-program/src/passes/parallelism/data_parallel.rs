//! Data parallel: every rank holds the whole model. Gradients are all-reduced in the backward pass of a rank's last
//! micro-batch, one bucket at a time: the tensors above the layers, each layer, the tensors below. Each all-reduce
//! starts when its bucket is complete, overlaps with the rest of the pass, and is awaited at its end. All ranks then
//! run the same update on the same bits.

use super::{metrics, start_and_wait};
use crate::op::{Collective, Exchange, Mode, Piece};
use crate::program::{Block, ProgramKind, ProgramSet};
use crate::scalars::Metric;
use crate::share::Share;
use crate::tensor::{Index, Operand, TensorId};
use plimsoll_core::{Category, Offload};
use std::collections::{BTreeMap, BTreeSet};

/// Parts of a piece start at multiples of this many elements, which is more than a cache line.
const PART_ALIGNMENT: u64 = 64;

/// Sequence number of the all-reduce of the loss, in the norm Program.
const LOSS: i64 = 1;
/// Sequence numbers of the all-reduces in the backward Program: tensors above the layers, tensors below them, and layer
/// `n` as `LAYERS + n`.
const ABOVE: i64 = 2;
const BELOW: i64 = 3;
const LAYERS: i64 = 16;

/// Returns the Programs of one rank.
pub(super) fn parallelize(mut set: ProgramSet, share: &Share, offload: &Offload) -> ProgramSet {
    if let Some(number) = set.program_index(ProgramKind::Backward) {
        let blocks = std::mem::take(&mut set.programs[number].blocks);
        let reducer = GradientReducer { set: &set, share, offload, blocks: vec![], waits: vec![] };
        set.programs[number].blocks = reducer.backward(blocks);
    }
    if let Some(number) = set.program_index(ProgramKind::GradientNorm) {
        let loss = loss_sum(&set, share);
        set.programs[number].blocks.insert(0, loss);
    }
    set
}

/// Returns the all-reduce of the loss. The norm needs none: all ranks have the same gradients.
fn loss_sum(set: &ProgramSet, share: &Share) -> Block {
    let loss = Operand::whole(metrics(set)).from(Index::fixed(Metric::LossSum as i64));
    let piece = Piece { input: loss, output: loss, counts: even_parts(1, share.ranks) };
    let exchange = all_reduce(share, vec![piece], Index::fixed(LOSS), false);
    Block::once("loss", start_and_wait(exchange).into())
}

/// Splits elements into about equal parts, one per rank.
fn even_parts(elements: u64, ranks: u32) -> Vec<u64> {
    let part = elements.div_ceil(u64::from(ranks)).next_multiple_of(PART_ALIGNMENT);
    (0..u64::from(ranks)).map(|rank| elements.saturating_sub(rank * part).min(part)).collect()
}

fn all_reduce(share: &Share, pieces: Vec<Piece>, sequence: Index, last: bool) -> Exchange {
    Exchange { collective: Collective::AllReduce, pieces, rank: share.rank, peer: None, sequence, last }
}

/// Adds all-reduces of gradients to a backward Program.
struct GradientReducer<'a> {
    set: &'a ProgramSet,
    share: &'a Share,
    offload: &'a Offload,
    /// Finished blocks.
    blocks: Vec<Block>,
    /// Waits that move to the end of the Program.
    waits: Vec<Block>,
}

impl GradientReducer<'_> {
    fn backward(mut self, blocks: Vec<Block>) -> Vec<Block> {
        let first_layer = blocks.iter().position(|block| !self.gradients(block, true).is_empty());
        let first_layer = first_layer.unwrap_or(blocks.len());
        // The block after which each gradient outside the layers is complete.
        let mut complete_after: BTreeMap<TensorId, usize> = BTreeMap::new();
        for (number, block) in blocks.iter().enumerate() {
            complete_after.extend(self.gradients(block, false).into_iter().map(|id| (id, number)));
        }
        let (above, below): (Vec<_>, Vec<_>) = complete_after.into_iter().partition(|(_, block)| *block < first_layer);
        let tensors = |gradients: Vec<(TensorId, usize)>| gradients.into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        let (above, below) = (tensors(above), tensors(below));
        for (number, block) in blocks.into_iter().enumerate() {
            if number == first_layer {
                self.reduce(&above, ABOVE);
            }
            self.push_layer(block);
        }
        self.reduce(&below, BELOW);
        self.blocks.extend(self.waits);
        self.blocks
    }

    /// Returns the gradients that a block adds to: those with a slot per layer, or the others.
    fn gradients(&self, block: &Block, of_layers: bool) -> BTreeSet<TensorId> {
        let accesses = block.ops.iter().flat_map(|op| op.accesses(&|id| self.set.tensor(id).elements()));
        let gradients = accesses.filter(|access| {
            let is_gradient = self.set.tensor(access.operand.tensor).category == Category::Gradient;
            is_gradient && access.mode != Mode::Read && (access.operand.slot.scale != 0) == of_layers
        });
        gradients.map(|access| access.operand.tensor).collect()
    }

    fn piece(&self, at: Operand) -> Piece {
        Piece { input: at, output: at, counts: even_parts(self.set.tensor(at.tensor).elements(), self.share.ranks) }
    }

    /// Appends the all-reduce of gradients outside the layers.
    fn reduce(&mut self, gradients: &[TensorId], number: i64) {
        if gradients.is_empty() {
            return;
        }
        let pieces = gradients.iter().map(|id| self.piece(Operand::whole(*id))).collect();
        let exchange = all_reduce(self.share, pieces, Index::fixed(number), true);
        let [start, wait] = start_and_wait(exchange).map(|op| Block::once("sums", vec![op]));
        self.blocks.push(start);
        // An offloaded gradient is on the device only during its all-reduce.
        match self.offload.embedding || self.offload.head {
            true => self.blocks.push(wait),
            false => self.waits.push(wait),
        }
    }

    /// Appends a block, with the all-reduce of the layer gradients that it completes.
    fn push_layer(&mut self, mut block: Block) {
        let gradients = self.gradients(&block, true);
        if !gradients.is_empty() {
            let pieces = gradients.into_iter().map(|id| self.piece(Operand::layer(id, 0))).collect();
            let exchange = all_reduce(self.share, pieces, Index::layer(LAYERS), true);
            let [start, wait] = start_and_wait(exchange);
            block.ops.push(start);
            match self.offload.gradients > 0 {
                true => block.ops.push(wait),
                false => self.waits.push(Block { name: "sums".into(), ops: vec![wait], ..block }),
            }
        }
        self.blocks.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_parts_cover_all_elements() {
        for (elements, ranks) in [(1, 2), (64, 3), (1000, 3), (100_000, 8)] {
            let parts = even_parts(elements, ranks);
            assert_eq!((parts.len(), parts.iter().sum::<u64>()), (ranks as usize, elements));
            assert!(
                parts.iter().all(|&part| part <= elements.div_ceil(u64::from(ranks)) + PART_ALIGNMENT),
                "{parts:?}"
            );
        }
    }
}
