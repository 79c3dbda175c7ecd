//! *Batch*: every rank has the whole model. Gradients are summed in the backward pass of a rank's last micro-batch, each
//! bucket as soon as it is whole: what lies above the layers, each layer, what lies below. The sums run beside the rest of
//! the pass; nobody waits for them before its end. The update is every rank's own, on the same bits.

use super::exchanged;
use crate::op::{Collective, Exchange, Mode, Piece};
use crate::program::{Block, ProgramSet};
use crate::scalars::{METRICS, Metric};
use crate::share::Share;
use crate::tensor::{Index, Operand, TensorId};
use plimsoll_core::{Category, Offload};
use std::collections::{BTreeMap, BTreeSet};

/// Parts begin at multiples of so many elements: a cache line and more.
const PART_STEP: u64 = 64;

/// The number of the collective that sums up the loss.
const LOSS: i64 = 1;
/// The numbers of those of gradients: above the layers, below them, and from here on upwards each layer's.
const ABOVE: i64 = 2;
const BELOW: i64 = 3;
const LAYERS: i64 = 16;

/// The Programs of one rank.
pub(super) fn share(mut set: ProgramSet, share: &Share, offload: &Offload) -> ProgramSet {
    if let Some(number) = set.program_index("backward") {
        let blocks = std::mem::take(&mut set.programs[number].blocks);
        let reduce = Reduce { set: &set, share, offload, blocks: vec![], waits: vec![] };
        set.programs[number].blocks = reduce.backward(blocks);
    }
    if let Some(number) = set.program_index("norm") {
        let loss = sum_of_losses(&set, share);
        set.programs[number].blocks.insert(0, loss);
    }
    set
}

/// The loss of the whole step on every rank. Its norm follows from gradients that all have.
fn sum_of_losses(set: &ProgramSet, share: &Share) -> Block {
    let metrics = set.find(METRICS).expect("every set has its metrics");
    let loss = Operand::whole(metrics).from(Index::fixed(Metric::LossSum as i64));
    let piece = Piece { input: loss, output: loss, counts: even_parts(1, share.ranks) };
    let exchange = all_reduce(share, vec![piece], Index::fixed(LOSS), false);
    Block::once("loss", exchanged(exchange).into())
}

/// Elements, about evenly.
fn even_parts(elements: u64, ranks: u32) -> Vec<u64> {
    let part = elements.div_ceil(u64::from(ranks)).next_multiple_of(PART_STEP);
    (0..u64::from(ranks)).map(|rank| elements.saturating_sub(rank * part).min(part)).collect()
}

fn all_reduce(share: &Share, pieces: Vec<Piece>, sequence: Index, last: bool) -> Exchange {
    Exchange { collective: Collective::AllReduce, pieces, rank: share.rank, peer: None, sequence, last }
}

/// Puts sums of gradients into a backward pass.
struct Reduce<'a> {
    set: &'a ProgramSet,
    share: &'a Share,
    offload: &'a Offload,
    blocks: Vec<Block>,
    /// What is awaited when everything else is done.
    waits: Vec<Block>,
}

impl Reduce<'_> {
    fn backward(mut self, blocks: Vec<Block>) -> Vec<Block> {
        let first_layer = blocks.iter().position(|block| !self.gradients(block, true).is_empty());
        let first_layer = first_layer.unwrap_or(blocks.len());
        // After which block a gradient that is no layer's is whole.
        let mut whole: BTreeMap<TensorId, usize> = BTreeMap::new();
        for (number, block) in blocks.iter().enumerate() {
            whole.extend(self.gradients(block, false).into_iter().map(|id| (id, number)));
        }
        let (above, below): (Vec<_>, Vec<_>) = whole.into_iter().partition(|(_, block)| *block < first_layer);
        for (number, block) in blocks.into_iter().enumerate() {
            if number == first_layer {
                self.sum(&above, ABOVE);
            }
            self.layer(block);
        }
        self.sum(&below, BELOW);
        self.blocks.extend(self.waits);
        self.blocks
    }

    /// The gradients that a block adds to: those of layers, or the others.
    fn gradients(&self, block: &Block, of_layers: bool) -> BTreeSet<TensorId> {
        let accesses = block.ops.iter().flat_map(|op| op.accesses(&|id| self.set.tensor(id).elements()));
        let gradients = accesses.filter(|access| {
            let gradient = self.set.tensor(access.operand.tensor).category == Category::Gradient;
            gradient && access.mode != Mode::Read && (access.operand.slot.scale != 0) == of_layers
        });
        gradients.map(|access| access.operand.tensor).collect()
    }

    fn piece(&self, at: Operand) -> Piece {
        Piece { input: at, output: at, counts: even_parts(self.set.tensor(at.tensor).elements(), self.share.ranks) }
    }

    /// Sums up gradients that are no layer's.
    fn sum(&mut self, gradients: &[(TensorId, usize)], number: i64) {
        if gradients.is_empty() {
            return;
        }
        let pieces = gradients.iter().map(|(id, _)| self.piece(Operand::whole(*id))).collect();
        let exchange = all_reduce(self.share, pieces, Index::fixed(number), true);
        let [start, wait] = exchanged(exchange).map(|op| Block::once("sums", vec![op]));
        self.blocks.push(start);
        // What waits on the host comes to the device for its sum alone.
        match self.offload.embedding || self.offload.head {
            true => self.blocks.push(wait),
            false => self.waits.push(wait),
        }
    }

    /// A block, and the sums of the layers' gradients that are whole after it.
    fn layer(&mut self, mut block: Block) {
        let gradients = self.gradients(&block, true);
        if !gradients.is_empty() {
            let pieces = gradients.into_iter().map(|id| self.piece(Operand::layer(id, 0))).collect();
            let exchange = all_reduce(self.share, pieces, Index::layer(LAYERS), true);
            let [start, wait] = exchanged(exchange);
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
    fn parts_are_even_and_cover_everything() {
        for (elements, ranks) in [(1, 2), (64, 3), (1000, 3), (100_000, 8)] {
            let parts = even_parts(elements, ranks);
            assert_eq!((parts.len(), parts.iter().sum::<u64>()), (ranks as usize, elements));
            assert!(parts.iter().all(|&part| part <= elements.div_ceil(u64::from(ranks)) + PART_STEP), "{parts:?}");
        }
    }
}
