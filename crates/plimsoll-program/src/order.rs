//! The order between queues (as between CUDA streams), derived after packing from hazards on arena bytes.
//!
//! Ops of one queue run in Program order. Two ops of different queues may run at the same time, unless their byte
//! ranges overlap and one of them writes. In that case the later op waits for the earlier one. The ranges are those of
//! the packed arena, so that the waits cover true dependencies and reused memory alike.

use crate::op::Queue;
use crate::{Mode, Op, Placement, Program, ProgramSet, TensorId};
use plimsoll_core::Space;
use std::collections::BTreeMap;
use std::ops::Range;

/// A wait between two ops of different queues, like a CUDA event wait: op `op` starts after op `on` has ended. Ops are
/// numbered in the order of [`Program::trace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wait {
    /// Number of the op that waits, counted from 1.
    pub op: u32,
    /// Number of the op that must have ended, counted from 1.
    pub on: u32,
}

/// A range of bytes in the arena of a memory space that an op reads or writes.
#[derive(Clone, Debug)]
struct Touch {
    space: Space,
    bytes: Range<u64>,
    writes: bool,
}

/// Returns the waits between ops of different queues that a Program needs under this placement of its tensors.
///
/// Waits that other waits and the order within queues already imply are left out.
pub fn waits(set: &ProgramSet, program: &Program, placement: &Placement) -> Vec<Wait> {
    let mut before: BTreeMap<Queue, Vec<(u32, Vec<Touch>)>> = BTreeMap::new();
    // The last op of each other queue that a queue has waited for, by (waiting queue, other queue).
    let mut waited: BTreeMap<(Queue, Queue), u32> = BTreeMap::new();
    let mut waits = Vec::new();
    for (number, (op, variable)) in program.trace().enumerate() {
        let tick = number as u32 + 1;
        let touches = touches(set, placement, op, variable);
        for (&queue, earlier) in before.iter().filter(|(queue, _)| **queue != op.queue) {
            let already_waited = waited.get(&(op.queue, queue)).copied().unwrap_or(0);
            let newer = earlier.iter().rev().take_while(|(tick, _)| *tick > already_waited);
            let mut conflicts = newer.filter(|(_, others)| conflict(&touches, others));
            if let Some(&(on, _)) = conflicts.next() {
                waits.push(Wait { op: tick, on });
                waited.insert((op.queue, queue), on);
            }
        }
        before.entry(op.queue).or_default().push((tick, touches));
    }
    waits
}

/// Returns the byte ranges that an op touches when the block's variable is `variable`. Ranges of file tensors are left
/// out, because they are in no arena.
fn touches(set: &ProgramSet, placement: &Placement, op: &Op, variable: i64) -> Vec<Touch> {
    let elements_of = |id: TensorId| set.tensor(id).elements();
    let accesses = op.accesses(&elements_of);
    let in_arena = accesses.iter().filter(|access| set.tensor(access.operand.tensor).space != Space::File);
    in_arena
        .flat_map(|access| {
            let tensor = set.tensor(access.operand.tensor);
            let first = access.operand.offset.at(variable, 0) as u64 * tensor.dtype.bytes();
            let length = access.elements * tensor.dtype.bytes();
            // Only the executor knows the micro-batch, so the slots of all micro-batches in flight count.
            access.operand.possible_slots(variable, tensor.slots).map(move |slot| {
                let start = placement.offset(access.operand.tensor, slot) + first;
                Touch { space: tensor.space, bytes: start..start + length, writes: access.mode != Mode::Read }
            })
        })
        .collect()
}

/// Returns whether two ops touch the same bytes and one of them writes.
fn conflict(a: &[Touch], b: &[Touch]) -> bool {
    let overlap = |a: &Touch, b: &Touch| a.bytes.start < b.bytes.end && b.bytes.start < a.bytes.end;
    a.iter().any(|a| b.iter().any(|b| (a.writes || b.writes) && a.space == b.space && overlap(a, b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;
    use crate::{Block, Index, OpKind, Operand, ProgramKind};
    use plimsoll_core::{Category, DType, WorkKind};
    use proptest::prelude::*;

    /// Builds a Program of additions: each op adds one of eight pieces of a buffer to another, on one of four queues.
    fn program(ops: &[(u8, i64, i64)]) -> (ProgramSet, Placement) {
        let mut builder = Builder::new(DType::F32, crate::workspace::Kernels::Cuda);
        let buffer = builder.persistent("buffer", &[80], DType::F32, Category::Activation, 1);
        let piece = |number: i64| Operand::whole(buffer).starting_at(Index::fixed(number * 10));
        let queues = [Queue::Compute, Queue::CopyIn, Queue::CopyOut, Queue::Communication];
        let ops = ops.iter().map(|&(queue, x, into)| Op {
            kind: OpKind::Add { x: piece(x), into: piece(into), elements: 10 },
            queue: queues[usize::from(queue)],
        });
        let block = Block::once("all", ops.collect());
        let (inputs, outputs) = (vec![], vec![]);
        let mut set = builder.set;
        set.programs.push(Program {
            work: WorkKind::Forward,
            kind: ProgramKind::Probe(0),
            inputs,
            outputs,
            blocks: vec![block],
        });
        (set, Placement { offsets: vec![vec![Some(0)]], arena_bytes: 320, ..Placement::default() })
    }

    #[test]
    fn double_buffering_overlaps_copies_with_compute() {
        // Copies into pieces 0 and 1 in turn, each read by an op that computes.
        let ops = [(1, 6, 0), (0, 0, 4), (1, 6, 1), (0, 1, 4), (1, 6, 0), (0, 0, 4)];
        let (set, placement) = program(&ops);
        let found = waits(&set, &set.programs[0], &placement);
        let expected = [(2, 1), (4, 3), (5, 2), (6, 5)].map(|(op, on)| Wait { op, on });
        assert_eq!(found, expected, "the copy of tick 3 waits for no other op");
    }

    proptest! {
        #[test]
        fn conflicting_ops_are_ordered_without_redundant_waits(
            ops in prop::collection::vec((0u8..4, 0i64..8, 0i64..8), 1..40)
        ) {
            let ops: Vec<_> = ops.into_iter().map(|(q, x, into)| (q, x, if x == into { (into + 1) % 8 } else { into })).collect();
            let (set, placement) = program(&ops);
            let found = waits(&set, &set.programs[0], &placement);
            let count = ops.len();
            // after[i][j]: op j starts after op i has ended.
            let reach = |edges: &[Wait]| {
                let mut after = vec![vec![false; count]; count];
                for j in 0..count {
                    for i in 0..j {
                        let direct = ops[i].0 == ops[j].0
                            || edges.iter().any(|w| w.op as usize == j + 1 && w.on as usize == i + 1);
                        if direct {
                            let reaches_i: Vec<usize> = (0..=i).filter(|&k| k == i || after[k][i]).collect();
                            reaches_i.into_iter().for_each(|k| after[k][j] = true);
                        }
                    }
                }
                after
            };
            let after = reach(&found);
            for j in 0..count {
                for i in 0..j {
                    let (_, x, into) = ops[i];
                    let (_, y, other) = ops[j];
                    if into == y || into == other || x == other {
                        prop_assert!(after[i][j], "ops {} and {} touch the same piece", i + 1, j + 1);
                    }
                }
            }
            for wait in &found {
                let (i, j) = (wait.on as usize - 1, wait.op as usize - 1);
                let ((_, x, into), (_, y, other)) = (ops[i], ops[j]);
                prop_assert!(into == y || into == other || x == other, "{wait:?} is redundant");
            }
        }
    }
}
