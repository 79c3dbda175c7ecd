//! Host-staged point-to-point messages, for devices with memory that other ranks cannot access, such as GPUs. A send
//! copies its data to host memory first, and a receive copies it in afterwards. The host buffers are planned like all
//! host tensors.
//!
//! ```text
//!   hidden ──copy out──► hidden.sent ──send──► ─ ─ receive ──► hidden.received ──copy in──► hidden
//!         this device │ host                            peer
//! ```

use crate::op::{Collective, Exchange, Op, OpKind, Queue};
use crate::program::ProgramSet;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, Space};

/// Makes all sends and receives (of a pipeline) use buffers in host memory, and adds the copies between these and the
/// device.
///
/// It must be the last pass that moves tensors: the buffers must stay in host memory.
pub fn stage_sends_through_host(mut set: ProgramSet) -> ProgramSet {
    for number in 0..set.programs.len() {
        let mut blocks = std::mem::take(&mut set.programs[number].blocks);
        let starts_copy = |op: &&Op| matches!(op.kind, OpKind::TransferStart { .. });
        let mut copies = blocks.iter().flat_map(|block| &block.ops).filter(starts_copy).count() as u64;
        for block in blocks.iter_mut().filter(|block| block.ops.iter().any(is_message)) {
            let ops = std::mem::take(&mut block.ops);
            block.ops = ops.into_iter().flat_map(|op| staged(&mut set, op, &mut copies)).collect();
        }
        set.programs[number].blocks = blocks;
    }
    set
}

/// Returns whether an op starts or awaits a send or receive.
fn is_message(op: &Op) -> bool {
    matches!(&op.kind, OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange)
        if exchange.is_point_to_point())
}

/// Returns the ops that replace an op. A send or receive becomes one on a host buffer, with the copies to or from the
/// device; any other op stays. `copies` is the sequence number of the Program's last copy; new copies increment it.
fn staged(set: &mut ProgramSet, op: Op, copies: &mut u64) -> Vec<Op> {
    let (OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange)) = &op.kind else { return vec![op] };
    if !exchange.is_point_to_point() {
        return vec![op];
    }
    let (starts, sends) = (matches!(op.kind, OpKind::CollectiveStart(_)), exchange.collective == Collective::Send);
    let (mut on_host, mut copy_ops) = (exchange.clone(), Vec::new());
    for piece in &mut on_host.pieces {
        let (at, elements) = (piece.input, piece.counts[exchange.rank as usize]);
        let buffer = host_buffer(set, at, sends, elements);
        (piece.input, piece.output) = (buffer, buffer);
        // Data is copied before a send starts, and after a receive has ended.
        if starts == sends {
            *copies += 1;
            let (from, to, queue) = if sends { (at, buffer, Queue::CopyOut) } else { (buffer, at, Queue::CopyIn) };
            let sequence = *copies;
            let kinds = [
                OpKind::TransferStart { from, to, elements, sequence },
                OpKind::TransferWait { from, to, elements, sequence },
            ];
            copy_ops.extend(kinds.map(|kind| Op { kind, queue }));
        }
    }
    let kind: fn(Exchange) -> OpKind = if starts { OpKind::CollectiveStart } else { OpKind::CollectiveWait };
    let message = Op { kind: kind(on_host), queue: op.queue };
    if sends {
        copy_ops.into_iter().chain([message]).collect()
    } else {
        [message].into_iter().chain(copy_ops).collect()
    }
}

/// Returns the host buffer for sends (`sends`) or receives of the tensor of `at`, and adds or enlarges it if needed.
/// Each slot has at least `elements` elements. There is one for each micro-batch in flight (forward pass done, backward
/// pass not).
fn host_buffer(set: &mut ProgramSet, at: Operand, sends: bool, elements: u64) -> Operand {
    let tensor = set.tensor(at.tensor);
    let slots = at.possible_slots(0, tensor.slots).count() as u32;
    let lifetime = if tensor.lifetime == Lifetime::Phase { Lifetime::Phase } else { Lifetime::Transient };
    let (name, dtype) = (format!("{}.{}", tensor.name, if sends { "sent" } else { "received" }), tensor.dtype);
    let id = set.find(&name).unwrap_or_else(|| {
        let (space, category, shape) = (Space::Host, Category::Communication, vec![elements]);
        set.tensors.push(Tensor { name, shape, dtype, space, category, lifetime, slots });
        TensorId(set.tensors.len() as u32 - 1)
    });
    let buffer = &mut set.tensors[id.0 as usize];
    buffer.shape[0] = elements.max(buffer.shape[0]);
    buffer.slots = slots.max(buffer.slots);
    Operand { slot: Index { micro_batch: i64::from(slots > 1), ..Index::fixed(0) }, ..Operand::whole(id) }
}
