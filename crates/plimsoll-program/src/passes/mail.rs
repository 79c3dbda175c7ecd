//! Messages of a device whose memory is its own, a GPU: what goes to a peer is copied to the host first, and shown from
//! there, and what comes from one is received there and copied in. What stands on the host is planned, packed and budgeted
//! as everything there is.
//!
//! ```text
//!   hidden ──copy out──► hidden.sent ──show──► ─ ─ take ──► hidden.received ──copy in──► hidden
//!         this device │ host                            peer
//! ```

use crate::op::{Collective, Exchange, Op, OpKind, Queue};
use crate::program::ProgramSet;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, Space};

/// The same Programs, whose messages stand on the host: the last pass over them, since nothing of that waits there.
pub fn by_way_of_host(mut set: ProgramSet) -> ProgramSet {
    for number in 0..set.programs.len() {
        let mut blocks = std::mem::take(&mut set.programs[number].blocks);
        let starts = |op: &&Op| matches!(op.kind, OpKind::TransferStart { .. });
        let mut copies = blocks.iter().flat_map(|block| &block.ops).filter(starts).count() as u64;
        for block in &mut blocks {
            let ops = std::mem::take(&mut block.ops);
            block.ops = ops.into_iter().flat_map(|op| carried(&mut set, op, &mut copies)).collect();
        }
        set.programs[number].blocks = blocks;
    }
    set
}

/// An op, or what takes its place where it is a message. `copies` of the Program have a number so far.
fn carried(set: &mut ProgramSet, op: Op, copies: &mut u64) -> Vec<Op> {
    let (OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange)) = &op.kind else { return vec![op] };
    if !exchange.is_message() {
        return vec![op];
    }
    let (starts, sends) = (matches!(op.kind, OpKind::CollectiveStart(_)), exchange.collective == Collective::Send);
    let (mut on_host, mut around) = (exchange.clone(), Vec::new());
    for piece in &mut on_host.pieces {
        let (at, elements) = (piece.input, piece.counts[exchange.rank as usize]);
        let mail = mail(set, at, sends, elements);
        (piece.input, piece.output) = (mail, mail);
        if starts == sends {
            *copies += 1;
            let (from, to, queue) = if sends { (at, mail, Queue::CopyOut) } else { (mail, at, Queue::CopyIn) };
            let sequence = *copies;
            let kinds = [
                OpKind::TransferStart { from, to, elements, sequence },
                OpKind::TransferWait { from, to, elements, sequence },
            ];
            around.extend(kinds.map(|kind| Op { kind, queue }));
        }
    }
    let kind: fn(Exchange) -> OpKind = if starts { OpKind::CollectiveStart } else { OpKind::CollectiveWait };
    let message = Op { kind: kind(on_host), queue: op.queue };
    if sends { around.into_iter().chain([message]).collect() } else { [message].into_iter().chain(around).collect() }
}

/// Where messages about a tensor stand on the host: those that go, and those that come; of as many micro-batches at once as
/// the tensor itself.
fn mail(set: &mut ProgramSet, at: Operand, sent: bool, elements: u64) -> Operand {
    let of = set.tensor(at.tensor);
    let slots = at.slots_at(0, of.slots).count() as u32;
    let lifetime = if of.lifetime == Lifetime::Phase { Lifetime::Phase } else { Lifetime::Transient };
    let (name, dtype) = (format!("{}.{}", of.name, if sent { "sent" } else { "received" }), of.dtype);
    let id = set.find(&name).unwrap_or_else(|| {
        let (space, category, shape) = (Space::Host, Category::Communication, vec![elements]);
        set.tensors.push(Tensor { name, shape, dtype, space, category, lifetime, slots });
        TensorId(set.tensors.len() as u32 - 1)
    });
    let tensor = &mut set.tensors[id.0 as usize];
    tensor.shape[0] = elements.max(tensor.shape[0]);
    tensor.slots = slots.max(tensor.slots);
    Operand { slot: Index { micro_batch: i64::from(slots > 1), ..Index::fixed(0) }, ..Operand::whole(id) }
}
