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

/// The ticks at which a slot is first and last touched.
#[derive(Clone, Copy)]
struct Span {
    first: u32,
    last: u32,
}

/// Unrolls a phase, and looks at one space.
pub fn lifetimes(set: &ProgramSet, phase: &Phase, space: Space) -> Lifetimes {
    let [lifetimes] = lifetimes_in(set, phase, [space]);
    lifetimes
}

/// Unrolls a phase once, and looks at several spaces.
pub fn lifetimes_in<const N: usize>(set: &ProgramSet, phase: &Phase, spaces: [Space; N]) -> [Lifetimes; N] {
    // Slots of what passes are numbered, tensor after tensor.
    let mut slots = 0;
    let first_slots: Vec<Option<usize>> = set
        .tensors
        .iter()
        .map(|tensor| {
            let passes = tensor.lifetime != Lifetime::Persistent && spaces.contains(&tensor.space);
            let first = passes.then_some(slots);
            slots += if passes { tensor.slots as usize } else { 0 };
            first
        })
        .collect();
    let number_of = |(id, slot): Slot| first_slots[id.0 as usize].map(|first| first + slot as usize);
    let slots_of = |operand: Operand, variable: i64| {
        // Which micro-batch is in flight is known only while running: all that may be count.
        operand.slots_at(variable, set.tensor(operand.tensor).slots).map(move |slot| (operand.tensor, slot))
    };

    let mut spans: Vec<Option<Span>> = vec![None; slots];
    let mut order: Vec<(Slot, usize)> = Vec::new();
    let mut touch = |slot: Slot, tick: u32| {
        let Some(number) = number_of(slot) else { return };
        let span = spans[number].get_or_insert_with(|| {
            order.push((slot, number));
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
        program.inputs.iter().for_each(|&input| touch((input, 0), 0));
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
                    op.each_access(&|_| 0, &mut |access| {
                        if first_slots[access.operand.tensor.0 as usize].is_some() {
                            slots_of(access.operand, variable).for_each(|slot| touch(slot, tick));
                        }
                    });
                    if let Some((read, written)) = op.in_place() {
                        let (mut a, mut b) = (slots_of(read, variable), slots_of(written, variable));
                        if let (Some(a), Some(b), None) = (a.next(), b.next(), a.next()) {
                            pairs.push((a, b, tick));
                        }
                    }
                }
            }
        }
        program.outputs.iter().for_each(|&output| touch((output, 0), end));
        programs.push((program.work, start, tick + u32::from(!program.outputs.is_empty())));
    }

    spaces.map(|space| {
        // Where an op may work in place and its input dies there, both stand in one buffer.
        let mut buffer_of: Vec<Option<usize>> = vec![None; slots];
        let mut result = Lifetimes { programs: programs.clone(), ..Lifetimes::default() };
        for &(slot, number) in order.iter().filter(|((id, _), _)| set.tensor(*id).space == space) {
            let tensor = set.tensor(slot.0);
            let span = match tensor.lifetime {
                Lifetime::Phase => Span { first: 0, last: end },
                _ => spans[number].expect("it is in the order of those that were touched"),
            };
            buffer_of[number] = Some(result.buffers.len());
            result.buffers.push(Buffer { bytes: tensor.bytes(), first: span.first, last: span.last });
            result.slots.push(vec![slot]);
        }
        for &(read, written, tick) in &pairs {
            let buffer = |slot: Slot| number_of(slot).and_then(|number| buffer_of[number]);
            let (Some(a), Some(b)) = (buffer(read), buffer(written)) else { continue };
            let (from, to) = (result.buffers[a], result.buffers[b]);
            if a == b || from.last != tick || to.first != tick || from.bytes != to.bytes {
                continue;
            }
            result.buffers[a].last = to.last;
            let moved = std::mem::take(&mut result.slots[b]);
            for &slot in &moved {
                buffer_of[number_of(slot).expect("it stands in a buffer")] = Some(a);
            }
            result.slots[a].extend(moved);
        }
        let mut keep = result.slots.iter().map(|s| !s.is_empty());
        result.buffers.retain(|_| keep.next().unwrap_or(false));
        result.slots.retain(|s| !s.is_empty());
        result
    })
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
