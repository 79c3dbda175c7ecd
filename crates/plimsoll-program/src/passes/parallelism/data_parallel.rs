//! Data parallel: every rank holds the whole model. Gradients are all-reduced in the backward pass of a rank's last
//! micro-batch, one bucket at a time: the tensors above the layers, each layer, the tensors below. Each all-reduce
//! starts when its bucket is complete, overlaps with the rest of the pass, and is awaited at its end. All ranks then
//! run the same update on the same bits.

use super::{metrics, start_and_wait};
use crate::op::{Collective, Exchange, ExchangeRange, Mode};
use crate::program::{Block, ProgramKind, ProgramSet};
use crate::scalars::Metric;
use crate::share::Share;
use crate::tensor::{Index, Operand, TensorId};
use plimsoll_core::{Category, Offload};
use std::collections::{BTreeMap, BTreeSet};

/// Alignment, in elements, of the part of a gradient that each rank sums up; more than a cache line.
const PART_ALIGNMENT: u64 = 64;

/// Sequence number of the all-reduce of the loss, in the norm Program.
const LOSS: i64 = 1;
/// Sequence number of the all-reduce of gradients above the layers (final norm, head), in the backward Program.
const ABOVE: i64 = 2;
/// Sequence number of the all-reduce of gradients below the layers (embedding), in the backward Program.
const BELOW: i64 = 3;
/// Sequence number of the all-reduce of the gradients of layer 0, in the backward Program; layer `n` has `LAYERS + n`.
const LAYERS: i64 = 16;

/// Returns the Programs of one rank of a data-parallel team, from those of a single device. Collectives on tensors that
/// `offload` names are awaited at once.
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

/// Returns a block that all-reduces the loss. The gradient norm needs no all-reduce: all ranks have the same gradients.
fn loss_sum(set: &ProgramSet, share: &Share) -> Block {
    let loss = Operand::whole(metrics(set)).starting_at(Index::fixed(Metric::LossSum as i64));
    let piece = ExchangeRange { input: loss, output: loss, counts: even_parts(1, share.ranks) };
    let exchange = all_reduce(share, vec![piece], Index::fixed(LOSS), false);
    Block::once("loss", start_and_wait(exchange).into())
}

/// Splits `elements` elements into about equal parts, and returns the length of each rank's part. The last parts may be
/// shorter or empty.
fn even_parts(elements: u64, ranks: u32) -> Vec<u64> {
    let part = elements.div_ceil(u64::from(ranks)).next_multiple_of(PART_ALIGNMENT);
    (0..u64::from(ranks)).map(|rank| elements.saturating_sub(rank * part).min(part)).collect()
}

fn all_reduce(share: &Share, pieces: Vec<ExchangeRange>, sequence: Index, last: bool) -> Exchange {
    Exchange { collective: Collective::AllReduce, pieces, rank: share.rank, peer: None, sequence, last }
}

/// A backward Program under construction, with the all-reduces of its gradients.
struct GradientReducer<'a> {
    set: &'a ProgramSet,
    share: &'a Share,
    offload: &'a Offload,
    /// Finished blocks.
    blocks: Vec<Block>,
    /// Blocks that wait for the all-reduces, to be appended at the end of the Program.
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

    /// Returns the gradient tensors that a block adds to. With `of_layers` only those with a slot per layer, without it
    /// only the others (embedding, head, final norm).
    fn gradients(&self, block: &Block, of_layers: bool) -> BTreeSet<TensorId> {
        let accesses = block.ops.iter().flat_map(|op| op.accesses(&|id| self.set.tensor(id).elements()));
        let gradients = accesses.filter(|access| {
            let is_gradient = self.set.tensor(access.operand.tensor).category == Category::Gradient;
            is_gradient && access.mode != Mode::Read && (access.operand.slot.scale != 0) == of_layers
        });
        gradients.map(|access| access.operand.tensor).collect()
    }

    fn piece(&self, at: Operand) -> ExchangeRange {
        let counts = even_parts(self.set.tensor(at.tensor).elements(), self.share.ranks);
        ExchangeRange { input: at, output: at, counts }
    }

    /// Appends the all-reduce of gradients outside the layers, with sequence number `number`.
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
