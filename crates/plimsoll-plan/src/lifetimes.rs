//! The lifetime of each tensor in a phase: the phase is unrolled into a time axis of ops.
//!
//! At time 0 the host fills inputs. The ops follow, one tick each. At the last tick the host reads outputs.

use crate::packing::Buffer;
use plimsoll_core::{Space, WorkKind};
use plimsoll_program::{Lifetime, Operand, Phase, ProgramSet, TensorId};
use std::collections::HashMap;

/// A slot of a tensor: the tensor, and the index of the slot from 0.
pub type Slot = (TensorId, u32);

/// The range of ticks of one Program of a phase. Each op takes one tick. Each tick of the phase belongs to one Program.
#[derive(Clone, Copy, Debug)]
pub struct ProgramTicks {
    /// The Program, as an index into [`ProgramSet::programs`].
    pub program: usize,
    /// Kind of work of the Program.
    pub work: WorkKind,
    /// The tick of the Program's first op; for the first Program 0, at which the host fills inputs.
    pub first: u32,
    /// The tick of the Program's last op; for the last Program the one after it, at which the host reads outputs.
    pub last: u32,
}

/// The buffers of a phase in one space: all tensors there that the phase accesses and that are not persistent.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// Size and lifetime of each buffer; empty if the phase uses only persistent tensors of the space.
    pub buffers: Vec<Buffer>,
    /// Slots of each buffer, in the order of `buffers`. The input and the output of an op that works in place share a
    /// buffer.
    pub slots: Vec<Vec<Slot>>,
    /// Ticks of each Program of the phase, in the order in which they run.
    pub programs: Vec<ProgramTicks>,
}

/// The ticks at which a slot is first and last accessed.
#[derive(Clone, Copy)]
struct Span {
    first: u32,
    last: u32,
}

/// An op that may write its result in place: the slot that it reads, the slot that it writes, and its tick.
struct InPlacePair {
    read: Slot,
    written: Slot,
    tick: u32,
}

/// Computes the lifetimes of all tensors of a phase in one space. Persistent tensors are left out.
pub fn lifetimes(set: &ProgramSet, phase: &Phase, space: Space) -> Lifetimes {
    let [lifetimes] = lifetimes_in(set, phase, [space]);
    lifetimes
}

/// Computes the lifetimes of a phase in several spaces, without persistent tensors. The phase is unrolled once for all
/// of them.
pub fn lifetimes_in<const N: usize>(set: &ProgramSet, phase: &Phase, spaces: [Space; N]) -> [Lifetimes; N] {
    let unrolled = unroll(set, phase, &spaces);
    spaces.map(|space| unrolled.in_space(set, space))
}

/// A phase unrolled into ticks.
struct UnrolledPhase {
    /// Number of the first slot of each tensor; `None` for a tensor that is persistent, or in a space that was not
    /// unrolled. Slots are numbered tensor by tensor.
    first_slots: Vec<Option<usize>>,
    /// First and last access to each slot, by slot number; `None` for a slot that is never accessed.
    spans: Vec<Option<Span>>,
    /// Accessed slots with their slot numbers, in the order of their first access.
    order: Vec<(Slot, usize)>,
    pairs: Vec<InPlacePair>,
    programs: Vec<ProgramTicks>,
    /// The last tick, at which the host reads outputs.
    end: u32,
}

/// Unrolls a phase into ticks, and records the accesses to tensors in `spaces` that are not persistent.
fn unroll(set: &ProgramSet, phase: &Phase, spaces: &[Space]) -> UnrolledPhase {
    let mut slots = 0;
    let first_slots: Vec<Option<usize>> = set
        .tensors
        .iter()
        .map(|tensor| {
            let is_temporary = tensor.lifetime != Lifetime::Persistent && spaces.contains(&tensor.space);
            let first = is_temporary.then_some(slots);
            slots += if is_temporary { tensor.slots as usize } else { 0 };
            first
        })
        .collect();
    let slots_of = |operand: Operand, variable: i64| {
        // The micro-batch in flight is known only at run time: all possible slots count.
        operand.possible_slots(variable, set.tensor(operand.tensor).slots).map(move |slot| (operand.tensor, slot))
    };

    let end = 1 + phase.programs.iter().map(|&p| set.programs[p].op_count()).sum::<usize>() as u32;
    let spans = vec![None; slots];
    let mut phase_ticks =
        UnrolledPhase { first_slots, spans, order: Vec::new(), pairs: Vec::new(), programs: Vec::new(), end };
    let mut tick = 0;
    for &number in &phase.programs {
        let program = &set.programs[number];
        let start = tick;
        program.inputs.iter().for_each(|&input| phase_ticks.touch((input, 0), 0));
        for block in &program.blocks {
            // Between its first and its last iteration, a block with fixed slots accesses nothing new.
            let has_fixed_slots = block.repeat > 2 && block.touches_fixed_slots();
            for (number, variable) in (1..).zip(block.variables()) {
                if has_fixed_slots && (2..block.repeat).contains(&number) {
                    tick += block.ops.len() as u32;
                    continue;
                }
                for op in &block.ops {
                    tick += 1;
                    op.for_each_access(&|_| 0, &mut |access| {
                        if phase_ticks.first_slots[access.operand.tensor.0 as usize].is_some() {
                            slots_of(access.operand, variable).for_each(|slot| phase_ticks.touch(slot, tick));
                        }
                    });
                    if let Some((read, written)) = op.in_place() {
                        let (mut a, mut b) = (slots_of(read, variable), slots_of(written, variable));
                        if let (Some(read), Some(written), None) = (a.next(), b.next(), a.next()) {
                            phase_ticks.pairs.push(InPlacePair { read, written, tick });
                        }
                    }
                }
            }
        }
        program.outputs.iter().for_each(|&output| phase_ticks.touch((output, 0), end));
        let first = if phase_ticks.programs.is_empty() { 0 } else { start + 1 };
        phase_ticks.programs.push(ProgramTicks { program: number, work: program.work, first, last: tick });
    }
    if let Some(last) = phase_ticks.programs.last_mut() {
        last.last = end;
    }
    phase_ticks
}

impl UnrolledPhase {
    /// Returns the number of a slot; `None` if its tensor is persistent or in a space that was not unrolled.
    fn slot_number(&self, (id, slot): Slot) -> Option<usize> {
        self.first_slots[id.0 as usize].map(|first| first + slot as usize)
    }

    /// Extends the lifetime of a slot to include `tick`. Does nothing for a slot without a number.
    fn touch(&mut self, slot: Slot, tick: u32) {
        let Some(number) = self.slot_number(slot) else { return };
        let span = self.spans[number].get_or_insert_with(|| {
            self.order.push((slot, number));
            Span { first: tick, last: tick }
        });
        span.first = span.first.min(tick);
        span.last = span.last.max(tick);
    }

    /// Returns the buffers of one space. If an op may work in place and is the last to access its input, input and
    /// output share a buffer, provided that they have equal sizes.
    fn in_space(&self, set: &ProgramSet, space: Space) -> Lifetimes {
        let mut buffer_of: Vec<Option<usize>> = vec![None; self.spans.len()];
        let mut result = Lifetimes { programs: self.programs.clone(), ..Lifetimes::default() };
        for &(slot, number) in self.order.iter().filter(|((id, _), _)| set.tensor(*id).space == space) {
            let tensor = set.tensor(slot.0);
            let span = match tensor.lifetime {
                Lifetime::Phase => Span { first: 0, last: self.end },
                _ => self.spans[number].expect("`order` contains accessed slots only"),
            };
            buffer_of[number] = Some(result.buffers.len());
            result.buffers.push(Buffer { bytes: tensor.bytes(), first: span.first, last: span.last });
            result.slots.push(vec![slot]);
        }
        for &InPlacePair { read, written, tick } in &self.pairs {
            let buffer = |slot: Slot| self.slot_number(slot).and_then(|number| buffer_of[number]);
            let (Some(a), Some(b)) = (buffer(read), buffer(written)) else { continue };
            let (from, to) = (result.buffers[a], result.buffers[b]);
            if a == b || from.last != tick || to.first != tick || from.bytes != to.bytes {
                continue;
            }
            result.buffers[a].last = to.last;
            let moved = std::mem::take(&mut result.slots[b]);
            for &slot in &moved {
                buffer_of[self.slot_number(slot).expect("a slot of a buffer has a number")] = Some(a);
            }
            result.slots[a].extend(moved);
        }
        let mut keep = result.slots.iter().map(|s| !s.is_empty());
        result.buffers.retain(|_| keep.next().unwrap_or(false));
        result.slots.retain(|s| !s.is_empty());
        result
    }
}

/// Returns the transient slots of a phase, by the tick of their last access: one slot for each buffer. Tests overwrite
/// the bytes of a slot after that tick.
pub fn deaths(set: &ProgramSet, lifetimes: &Lifetimes) -> HashMap<u32, Vec<Slot>> {
    let mut deaths: HashMap<u32, Vec<Slot>> = HashMap::new();
    for (buffer, slots) in lifetimes.buffers.iter().zip(&lifetimes.slots) {
        if slots.iter().all(|s| set.tensor(s.0).lifetime == Lifetime::Transient) {
            deaths.entry(buffer.last).or_default().push(slots[0]);
        }
    }
    deaths
}
