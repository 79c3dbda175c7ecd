//! Rings: a few slots in which what waits elsewhere stands beside whom works. What is brought one unit ahead, and sent home
//! when it has been written; copies are begun and awaited here. Which unit uses what is known from `units`.

use super::Rewrite;
use super::units::{Region, Unit, Use};
use crate::op::{Mode, Op, OpKind, Queue};
use crate::operands::operands_mut;
use crate::program::Block;
use crate::tensor::{Index, Lifetime, Operand, TensorId};
use plimsoll_core::{Category, Space, WorkName};
use std::collections::{BTreeMap, HashSet};

/// A buffer beside whom works, and what it holds.
#[derive(Clone, Copy)]
struct Slot {
    region: Region,
    /// The last unit that needs it, as far as is known.
    used: usize,
    /// The copy into it that has been started and not awaited.
    coming: Option<u64>,
    /// The copy out of it that has been started and not awaited.
    leaving: Option<u64>,
}

/// Buffers of one kind.
pub(super) struct Ring {
    tensor: TensorId,
    slots: Vec<Option<Slot>>,
}

impl Rewrite<'_> {
    /// The name of the buffers for what has its home in a tensor: those of an update are shared by all that has the same
    /// type, but for the few numbers that every piece needs.
    fn kind(&self, home: TensorId) -> String {
        let tensor = self.pass.set.tensor(home);
        let ring = if tensor.space == Space::Host { "ring" } else { "host_ring" };
        match self.work {
            WorkName::Update if tensor.lifetime == Lifetime::Persistent && tensor.category != Category::Staging => {
                format!("{}.{ring}.{}", self.program, tensor.dtype)
            }
            _ => format!("{}.{ring}.{}", self.program, tensor.name),
        }
    }

    /// As many slots as two units after one another need.
    pub(super) fn make_rings(&mut self, units: &[Unit]) {
        let homes: HashSet<TensorId> = units.iter().flat_map(|unit| &unit.uses).map(|u| u.region.tensor).collect();
        let mut kinds: BTreeMap<String, Vec<TensorId>> = BTreeMap::new();
        homes.into_iter().for_each(|home| kinds.entry(self.kind(home)).or_default().push(home));
        let of =
            |(ring, homes): (usize, &Vec<TensorId>)| homes.iter().map(move |&home| (home, ring)).collect::<Vec<_>>();
        self.ring_of = kinds.values().enumerate().flat_map(of).collect();
        // The largest region of each, and how many there are at once.
        let mut needs: Vec<Option<(Region, usize)>> = vec![None; kinds.len()];
        for at in 0..units.len() {
            let mut regions: Vec<Region> = Vec::new();
            let mut counts: Vec<(usize, usize)> = Vec::new();
            let beside = units.get(at + 1).into_iter().flat_map(|next| &next.uses).filter(|u| units[at].goes_beside(u));
            for region in units[at].uses.iter().chain(beside).map(|u| u.region) {
                if regions.contains(&region) {
                    continue;
                }
                regions.push(region);
                let ring = self.ring_of[&region.tensor];
                let count = match counts.iter_mut().find(|(other, _)| *other == ring) {
                    Some((_, count)) => {
                        *count += 1;
                        *count
                    }
                    None => {
                        counts.push((ring, 1));
                        1
                    }
                };
                let (largest, most) = needs[ring].get_or_insert((region, 0));
                *most = count.max(*most);
                if region.elements > largest.elements {
                    *largest = region;
                }
            }
        }
        for (name, need) in kinds.into_keys().zip(needs) {
            let (largest, count) = need.expect("a ring has what stands in it");
            let elsewhere = match self.pass.set.tensor(largest.tensor).space {
                Space::Host => Space::Device,
                _ => Space::Host,
            };
            let tensor = self.pass.buffer(name, largest.tensor, largest.elements, elsewhere, count as u32);
            self.rings.push(Ring { tensor, slots: vec![None; count] });
        }
    }

    fn slots(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.rings.iter_mut().flat_map(|ring| ring.slots.iter_mut().flatten())
    }

    fn holds(&mut self, region: Region) -> Option<&mut Slot> {
        let &ring = self.ring_of.get(&region.tensor)?;
        self.rings[ring].slots.iter_mut().flatten().find(|slot| slot.region == region)
    }

    /// The place of a region in its ring.
    fn buffer_of(&self, region: Region) -> Operand {
        let ring = &self.rings[self.ring_of[&region.tensor]];
        let holds = |slot: &Option<Slot>| slot.is_some_and(|slot| slot.region == region);
        let slot = ring.slots.iter().position(holds).expect("a unit's regions are in their rings");
        Operand::slot(ring.tensor, slot as i64)
    }

    /// A slot for a region, and its content where that matters. `used` is the unit that it is for, `now` the present.
    fn bring(&mut self, wanted: Use, used: usize, now: usize) {
        let region = wanted.region;
        self.forget(|other| other.overlaps(region));
        let own = self.ring_of[&region.tensor];
        let ring = &mut self.rings[own];
        let free = |slot: &Option<Slot>| slot.is_none_or(|slot| slot.used < now);
        let slots = ring.slots.iter().enumerate().filter(|(_, slot)| free(slot));
        let (slot, _) =
            slots.min_by_key(|(_, slot)| slot.map_or(0, |slot| slot.used + 1)).expect("rings are large enough");
        let leaving = ring.slots[slot].take();
        let place = Operand::slot(ring.tensor, slot as i64);
        if let Some(before) = leaving {
            self.await_leaving(before, place);
        }
        let mut coming = None;
        if self.begins(wanted) {
            self.begun.insert(region);
            self.ops.push(OpKind::Fill { into: place, value: 0.0, elements: region.elements }.into());
        } else if wanted.read {
            self.sequence += 1;
            coming = Some(self.sequence);
            let (from_home, _) = self.queues(region);
            self.transfer(true, region.at(), place, region.elements, self.sequence, from_home);
        }
        self.rings[own].slots[slot] = Some(Slot { region, used, coming, leaving: None });
    }

    /// Whether a gradient is summed up from zero here.
    fn begins(&self, wanted: Use) -> bool {
        let here = self.work == WorkName::Backward && self.pass.begun.contains(&wanted.region.tensor);
        here && wanted.read && !self.begun.contains(&wanted.region)
    }

    /// Empties the slots whose regions are no longer what is at home.
    fn forget(&mut self, gone: impl Fn(Region) -> bool) {
        let mut emptied = Vec::new();
        for ring in &mut self.rings {
            for (number, slot) in ring.slots.iter_mut().enumerate() {
                if let Some(held) = slot.take_if(|slot| gone(slot.region)) {
                    emptied.push((held, Operand::slot(ring.tensor, number as i64)));
                }
            }
        }
        for (held, place) in emptied {
            self.await_leaving(held, place);
        }
    }

    pub(super) fn transfer(
        &mut self,
        start: bool,
        from: Operand,
        to: Operand,
        elements: u64,
        sequence: u64,
        queue: Queue,
    ) {
        let kind = match start {
            true => OpKind::TransferStart { from, to, elements, sequence },
            false => OpKind::TransferWait { from, to, elements, sequence },
        };
        self.ops.push(Op { kind, queue });
    }

    /// The queues of copies from a region's home and back.
    fn queues(&self, region: Region) -> (Queue, Queue) {
        match self.pass.set.tensor(region.tensor).space {
            Space::Host => (Queue::CopyIn, Queue::CopyOut),
            _ => (Queue::CopyOut, Queue::CopyIn),
        }
    }

    fn await_leaving(&mut self, held: Slot, place: Operand) {
        if let Some(sequence) = held.leaving {
            let (_, home) = self.queues(held.region);
            self.transfer(false, place, held.region.at(), held.region.elements, sequence, home);
        }
    }

    pub(super) fn await_all(&mut self) {
        self.forget(|_| true);
    }

    /// Work on what comes from elsewhere: one unit ahead, through rings.
    pub(super) fn with_rings(&mut self, units: &[Unit], at: usize) {
        let unit = &units[at];
        let missing: Vec<Use> = unit.uses.iter().copied().filter(|u| self.holds(u.region).is_none()).collect();
        for u in &unit.uses {
            if let Some(slot) = self.holds(u.region) {
                slot.used = at;
            }
        }
        for wanted in missing {
            self.bring(wanted, at, at);
        }
        for u in &unit.uses {
            let place = self.buffer_of(u.region);
            let slot = self.holds(u.region).expect("it has been brought");
            let (coming, leaving) = (slot.coming.take(), slot.leaving.take_if(|_| u.written));
            let (from_home, home) = self.queues(u.region);
            for (sequence, from, to, queue) in
                [(coming, u.region.at(), place, from_home), (leaving, place, u.region.at(), home)]
            {
                if let Some(sequence) = sequence {
                    self.transfer(false, from, to, u.region.elements, sequence, queue);
                }
            }
        }
        let next = units.get(at + 1).filter(|next| next.by == unit.by);
        for wanted in next.iter().flat_map(|next| &next.uses) {
            if let Some(slot) = self.holds(wanted.region) {
                slot.used = at + 1;
            } else if wanted.read && !self.begins(*wanted) && unit.goes_beside(wanted) {
                self.bring(*wanted, at + 1, at);
            }
        }
        for block in &unit.blocks {
            if block.repeat > 1 {
                self.flush(&unit.name);
            }
            for op in &block.ops {
                self.in_rings(op, unit);
            }
            if block.repeat > 1 {
                let ops = std::mem::take(&mut self.ops);
                self.blocks.push(Block { ops, ..block.clone() });
            }
        }
        for u in unit.uses.iter().filter(|u| u.written) {
            let written_on = next.is_some_and(|next| next.uses.iter().any(|n| n.region == u.region && n.written));
            if !written_on {
                self.leave(u.region);
            }
        }
    }

    /// An op on what its unit has in rings.
    fn in_rings(&mut self, op: &Op, unit: &Unit) {
        let mut op = op.clone();
        for access in self.pass.accesses(&op).iter().filter(|access| access.mode != Mode::Read) {
            self.copies.retain(|region, _| region.tensor != access.operand.tensor);
        }
        self.make_way(&op, unit);
        for operand in operands_mut(&mut op.kind) {
            let first = operand.offset.base;
            let within = |u: &&Use| {
                let region = u.region;
                (region.tensor, region.slot) == (operand.tensor, operand.slot) && region.first <= first
            };
            if let Some(u) = unit.uses.iter().find(within) {
                *operand = self.buffer_of(u.region).from(Index::fixed(first - u.region.first));
            }
        }
        self.ops.push(op);
    }

    fn leave(&mut self, region: Region) {
        let place = self.buffer_of(region);
        self.sequence += 1;
        let sequence = self.sequence;
        self.holds(region).expect("what was written is in its ring").leaving = Some(sequence);
        let (_, home) = self.queues(region);
        self.transfer(true, place, region.at(), region.elements, sequence, home);
    }

    /// Ends what the rings of others still have to do with what an op touches in its own space.
    fn make_way(&mut self, op: &Op, unit: &Unit) {
        if self.work != WorkName::Update || !self.pass.host_updates {
            return;
        }
        for access in self.pass.accesses(op) {
            let region = Region::of(access.operand, access.elements);
            if !unit.uses.iter().any(|u| u.region.overlaps(region)) {
                self.make_way_for(region, access.mode);
            }
        }
    }

    /// A slot that is only read here may stay; the copy out of it must be over.
    pub(super) fn make_way_for(&mut self, region: Region, mode: Mode) {
        let held: Vec<Region> = self.slots().map(|slot| slot.region).filter(|r| r.overlaps(region)).collect();
        for held in held {
            let place = self.buffer_of(held);
            let slot = self.holds(held).expect("it was just there");
            let before = std::mem::replace(slot, Slot { leaving: None, ..*slot });
            self.await_leaving(before, place);
            if mode != Mode::Read {
                self.forget(|r| r == held);
            }
        }
    }
}
