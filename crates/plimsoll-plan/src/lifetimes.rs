//! When each tensor of a phase lives: a phase unrolled into a time axis of ops.
//!
//! Time 0 is when the host fills inputs; the ops follow, one tick each; the last tick is when the
//! host reads outputs.

use crate::packing::Buffer;
use plimsoll_core::{Space, WorkName};
use plimsoll_program::{Lifetime, Operand, Phase, ProgramSet, TensorId};
use std::collections::HashMap;

/// A slot of a tensor.
pub type Slot = (TensorId, u32);

/// The buffers of a phase in one space: everything in its arena that is not there for the whole run.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// Size and lifetime of each buffer.
    pub buffers: Vec<Buffer>,
    /// The slots that stand in each buffer; several where an op works in place.
    pub slots: Vec<Vec<Slot>>,
    /// The ticks of each Program of the phase, first and last.
    pub programs: Vec<(WorkName, u32, u32)>,
}

#[derive(Clone, Copy)]
struct Span {
    first: u32,
    last: u32,
}

/// Unrolls a phase, and looks at one space.
pub fn lifetimes(set: &ProgramSet, phase: &Phase, space: Space) -> Lifetimes {
    let elements_of = |id: TensorId| set.tensor(id).elements();
    let in_arena = |id: TensorId| {
        let tensor = set.tensor(id);
        tensor.space == space && tensor.lifetime != Lifetime::Persistent
    };
    let slots_of = |operand: Operand, variable: i64| {
        // Which micro-batch is in flight is known only while running: all that may be count.
        operand.slots_at(variable, set.tensor(operand.tensor).slots).map(move |slot| (operand.tensor, slot))
    };

    let mut spans: HashMap<Slot, Span> = HashMap::new();
    let mut order: Vec<Slot> = Vec::new();
    let mut touch = |slot: Slot, tick: u32| {
        let span = spans.entry(slot).or_insert_with(|| {
            order.push(slot);
            Span { first: tick, last: tick }
        });
        span.first = span.first.min(tick);
        span.last = span.last.max(tick);
    };
    let end = 1 + phase.programs.iter().map(|&p| set.programs[p].length()).sum::<usize>() as u32;
    let mut tick = 0;
    let mut programs = Vec::new();
    let mut pairs = Vec::new();
    for &number in &phase.programs {
        let program = &set.programs[number];
        let start = tick;
        for &input in program.inputs.iter().filter(|&&id| in_arena(id)) {
            touch((input, 0), 0);
        }
        for block in &program.blocks {
            // Between its first and its last iteration, a block that keeps its slots touches nothing new.
            let skips = block.repeat > 2 && block.keeps_its_slots();
            for (number, variable) in (1..).zip(block.variables()) {
                if skips && (2..block.repeat).contains(&number) {
                    tick += block.ops.len() as u32;
                    continue;
                }
                for op in &block.ops {
                    tick += 1;
                    for access in op.accesses(&elements_of) {
                        if in_arena(access.operand.tensor) {
                            slots_of(access.operand, variable).for_each(|slot| touch(slot, tick));
                        }
                    }
                    if let Some((read, written)) = op.in_place() {
                        let (mut a, mut b) = (slots_of(read, variable), slots_of(written, variable));
                        if let (Some(a), Some(b), None) = (a.next(), b.next(), a.next()) {
                            pairs.push((a, b, tick));
                        }
                    }
                }
            }
        }
        for &output in program.outputs.iter().filter(|&&id| in_arena(id)) {
            touch((output, 0), end);
        }
        programs.push((program.work, start, tick + u32::from(!program.outputs.is_empty())));
    }
    for (slot, span) in &mut spans {
        if set.tensor(slot.0).lifetime == Lifetime::Phase {
            *span = Span { first: 0, last: end };
        }
    }

    // Where an op may work in place and its input dies there, both stand in one buffer.
    let mut buffer_of: HashMap<Slot, usize> = HashMap::new();
    let mut result = Lifetimes { programs, ..Lifetimes::default() };
    for slot in order {
        let span = spans[&slot];
        buffer_of.insert(slot, result.buffers.len());
        result.buffers.push(Buffer { bytes: set.tensor(slot.0).bytes(), first: span.first, last: span.last });
        result.slots.push(vec![slot]);
    }
    for (read, written, tick) in pairs {
        let (Some(&a), Some(&b)) = (buffer_of.get(&read), buffer_of.get(&written)) else { continue };
        let (from, to) = (result.buffers[a], result.buffers[b]);
        if a == b || from.last != tick || to.first != tick || from.bytes != to.bytes {
            continue;
        }
        result.buffers[a].last = to.last;
        let moved = std::mem::take(&mut result.slots[b]);
        for slot in &moved {
            buffer_of.insert(*slot, a);
        }
        result.slots[a].extend(moved);
    }
    let mut keep = result.slots.iter().map(|s| !s.is_empty());
    result.buffers.retain(|_| keep.next().unwrap_or(false));
    result.slots.retain(|s| !s.is_empty());
    result
}

/// For each tick of a phase, the tensors whose last use it is (they may be poisoned after it).
pub fn deaths(set: &ProgramSet, lifetimes: &Lifetimes) -> HashMap<u32, Vec<Slot>> {
    let mut deaths: HashMap<u32, Vec<Slot>> = HashMap::new();
    for (buffer, slots) in lifetimes.buffers.iter().zip(&lifetimes.slots) {
        if slots.iter().all(|s| set.tensor(s.0).lifetime == Lifetime::Transient) {
            deaths.entry(buffer.last).or_default().push(slots[0]);
        }
    }
    deaths
}
