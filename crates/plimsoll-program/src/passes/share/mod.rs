//! Sharing out a step over the devices of a team: each rank's Programs, with the collectives that make them one run.
//!
//! Every rank computes some of the sequences. Gradients are scaled by the labelled tokens of the whole step wherever they
//! are made, so their sum over the ranks is that of one device, whatever the shares; and what is drawn at random depends
//! on a sequence's place in the whole step. `batch` and `state` say what each rank holds, and where sums are taken.

mod batch;
mod state;

use crate::op::{Exchange, Op, OpKind, Queue};
use crate::program::{Program, ProgramSet};
use crate::share::Share;
use plimsoll_core::{Offload, Sharing};

/// The Programs of one rank. `offload` is what will wait on the host: collectives that touch it are awaited at once.
///
/// # Panics
/// For ways to share out that are not written yet.
pub fn share(mut set: ProgramSet, share: &Share, offload: &Offload) -> ProgramSet {
    let Some(sharing) = share.sharing.filter(|_| share.ranks > 1) else { return set };
    draw_for_own_sequences(&mut set, share);
    match sharing {
        Sharing::Batch => batch::share(set, share, offload),
        Sharing::State => state::share(set, share, offload),
        Sharing::Layers => panic!("sharing {sharing:?} is not written yet"),
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

/// The beginning and the end of a collective.
fn exchanged(exchange: Exchange) -> [Op; 2] {
    let on_wire = |kind| Op { kind, queue: Queue::Communication };
    [on_wire(OpKind::CollectiveStart(exchange.clone())), on_wire(OpKind::CollectiveWait(exchange))]
}
