//! Sharing out a step over the devices of a team: each rank's Programs, with the collectives that make them one run.
//!
//! Every rank computes some of the sequences. Gradients are scaled by the labelled tokens of the whole step wherever they
//! are made, so their sum over the ranks is that of one device, whatever the shares; and what is drawn at random depends
//! on a sequence's place in the whole step. `batch`, `state` and `layers` say what each rank holds, and what goes between
//! them.

mod batch;
mod layers;
mod state;

use crate::op::{Collective, Exchange, Op, OpKind, Piece, Queue};
use crate::program::{Block, Program, ProgramSet};
use crate::scalars::{METRICS, Metric};
use crate::share::Share;
use crate::tensor::{Index, Operand};
use plimsoll_core::{Recipe, Sharing};

/// The Programs of one rank under its recipe. Collectives that touch what will wait on the host are awaited at once. Without
/// sequences in a micro-batch, where state is shared out, they compute nothing; `set` then has those of one.
/// Where layers are shared out, `set` has those of this rank, `micro_batches` are those of a step, and `tied` says that the
/// head is the embedding.
pub fn share(mut set: ProgramSet, share: &Share, recipe: &Recipe, micro_batches: u32, tied: bool) -> ProgramSet {
    let Some(sharing) = share.sharing.filter(|_| share.ranks > 1) else { return set };
    draw_for_own_sequences(&mut set, share);
    match sharing {
        Sharing::Batch => batch::share(set, share, &recipe.offload),
        Sharing::State => state::share(set, share, recipe),
        Sharing::Layers => layers::share(set, share, micro_batches, tied),
    }
}

/// What is drawn at random depends on a sequence's place in the whole step.
fn draw_for_own_sequences(set: &mut ProgramSet, share: &Share) {
    let blocks = set.programs.iter_mut().flat_map(|program: &mut Program| &mut program.blocks);
    for op in blocks.flat_map(|block| &mut block.ops) {
        if let OpKind::Dropout { first_sample, .. } = &mut op.kind {
            first_sample.base += share.first_sequence as i64;
        }
    }
}

/// Loss and norm of the whole step on every rank, where each has a part of both.
fn sum_of_norms(set: &ProgramSet, share: &Share, sequence: Index) -> Block {
    let metrics = set.find(METRICS).expect("every set has its metrics");
    let metrics = Operand::whole(metrics).from(Index::fixed(Metric::LossSum as i64));
    let mut counts = vec![0; share.ranks as usize];
    counts[0] = Metric::NormSquared as u64 + 1 - Metric::LossSum as u64;
    let pieces = vec![Piece { input: metrics, output: metrics, counts }];
    let (collective, rank) = (Collective::AllReduce, share.rank);
    let exchange = Exchange { collective, pieces, rank, peer: None, sequence, last: false };
    Block::once("norm", exchanged(exchange).into())
}

/// The beginning and the end of a message of `elements` to a peer or from one.
fn message(share: &Share, collective: Collective, peer: u32, at: Operand, elements: u64, sequence: Index) -> [Op; 2] {
    let pieces = vec![Piece { input: at, output: at, counts: vec![elements; share.ranks as usize] }];
    exchanged(Exchange { collective, pieces, rank: share.rank, peer: Some(peer), sequence, last: false })
}

/// The beginning and the end of a collective.
fn exchanged(exchange: Exchange) -> [Op; 2] {
    let on_wire = |kind| Op { kind, queue: Queue::Communication };
    [on_wire(OpKind::CollectiveStart(exchange.clone())), on_wire(OpKind::CollectiveWait(exchange))]
}
