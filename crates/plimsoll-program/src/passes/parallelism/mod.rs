//! Parallelism: turns the Programs of one device into those of one rank of a team, with the collectives between ranks.
//!
//! Every rank of a data-parallel or sharded team computes some of the sequences of a step. Gradients are scaled by the
//! labelled tokens of the whole step, so that their sum over the ranks equals that of one device, however the sequences
//! are split. Random numbers depend on the position of a sequence in the whole step.
//!
//! | module | splits | exchanges |
//! |---|---|---|
//! | `data_parallel` | sequences | sums of gradients |
//! | `sharded` | sequences, weights, gradients and optimizer state (FSDP, ZeRO-3) | weights and gradients of each layer |
//! | `pipeline` | layers | activations and their gradients between stages |

mod data_parallel;
mod pipeline;
mod sharded;

use crate::op::{Collective, Exchange, ExchangeRange, Op, OpKind, Queue};
use crate::program::{Block, Program, ProgramSet};
use crate::scalars::{METRICS, Metric};
use crate::share::Share;
use crate::tensor::{Index, Operand, TensorId};
use plimsoll_core::{Parallelism, Recipe};

/// Returns the Programs of one rank of a team, made from those of a single device by adding collectives.
///
/// - `set` has the Programs of one device under `recipe`; for a pipeline, those of the rank's stage.
/// - `share` says which part of the step the rank computes. For a single device the set is returned unchanged.
/// - A sharded rank with micro-batch 0 computes nothing and only takes part in collectives; `set` is then built for one
///   sequence.
/// - `micro_batches` (of this rank, per step) and `tied` (the head is the embedding) matter for a pipeline only.
/// - Collectives on tensors that `recipe` offloads are awaited at once, so that the offload pass can move them.
pub fn parallelize(mut set: ProgramSet, share: &Share, recipe: &Recipe, micro_batches: u32, tied: bool) -> ProgramSet {
    let Some(parallelism) = share.parallelism.filter(|_| share.ranks > 1) else { return set };
    offset_dropout_samples(&mut set, share);
    match parallelism {
        Parallelism::Data => data_parallel::parallelize(set, share, &recipe.offload),
        Parallelism::Sharded => sharded::parallelize(set, share, recipe),
        Parallelism::Pipeline => pipeline::parallelize(set, share, micro_batches, tied),
    }
}

/// Makes dropout masks depend on the position of a sequence among all sequences of the step, not only those of the
/// rank. The masks are then those of a single device.
fn offset_dropout_samples(set: &mut ProgramSet, share: &Share) {
    let blocks = set.programs.iter_mut().flat_map(|program: &mut Program| &mut program.blocks);
    for op in blocks.flat_map(|block| &mut block.ops) {
        if let OpKind::Dropout { first_sample, .. } = &mut op.kind {
            first_sample.base += share.first_sequence as i64;
        }
    }
}

/// Returns the metrics tensor, in which ops sum up loss and gradient norm.
fn metrics(set: &ProgramSet) -> TensorId {
    set.find(METRICS).expect("every set has a metrics tensor")
}

/// Returns a block that all-reduces the loss and the squared gradient norm, of which each rank holds a partial sum.
fn loss_and_norm_sum(set: &ProgramSet, share: &Share, sequence: Index) -> Block {
    let metrics = Operand::whole(metrics(set)).starting_at(Index::fixed(Metric::LossSum as i64));
    let mut counts = vec![0; share.ranks as usize];
    counts[0] = Metric::NormSquared as u64 + 1 - Metric::LossSum as u64;
    let pieces = vec![ExchangeRange { input: metrics, output: metrics, counts }];
    let (collective, rank) = (Collective::AllReduce, share.rank);
    let exchange = Exchange { collective, pieces, rank, peer: None, sequence, last: false };
    Block::once("norm", start_and_wait(exchange).into())
}

/// Returns the ops that start and await a send or receive of `elements` elements at `at`, between this rank and `peer`.
fn message(share: &Share, collective: Collective, peer: u32, at: Operand, elements: u64, sequence: Index) -> [Op; 2] {
    let pieces = vec![ExchangeRange { input: at, output: at, counts: vec![elements; share.ranks as usize] }];
    start_and_wait(Exchange { collective, pieces, rank: share.rank, peer: Some(peer), sequence, last: false })
}

/// Returns the op that starts a collective and the one that waits for it, on the communication queue.
fn start_and_wait(exchange: Exchange) -> [Op; 2] {
    let on_queue = |kind| Op { kind, queue: Queue::Communication };
    [on_queue(OpKind::CollectiveStart(exchange.clone())), on_queue(OpKind::CollectiveWait(exchange))]
}
