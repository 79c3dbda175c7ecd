//! Staging rings: a few buffers that hold ranges of offloaded tensors (*regions*) next to the processor that works on
//! them. Regions are fetched one work unit (such as a layer) ahead and written back once they are complete.
//! `work_units` knows which unit uses which regions.

use super::ProgramRewriter;
use super::work_units::{Region, RegionUse, WorkUnit};
use crate::op::operands::operands_mut;
use crate::op::{Mode, Op, OpKind, Queue};
use crate::program::Block;
use crate::tensor::{Index, Lifetime, Operand, TensorId};
use foldhash::HashSet;
use plimsoll_core::{Category, Space, WorkKind};
use std::collections::BTreeMap;

/// An occupied buffer of a staging ring: it holds a region (a range of an offloaded tensor).
#[derive(Clone, Copy)]
struct RingSlot {
    region: Region,
    /// Index of the last work unit known to need the region.
    last_use: usize,
    /// Sequence number of the copy into the buffer that is not yet awaited; `None` if there is none.
    fetching: Option<u64>,
    /// Sequence number of the copy out of the buffer that is not yet awaited; `None` if there is none.
    writing_back: Option<u64>,
}

/// A staging ring: buffers of one size and dtype, as slots of one tensor, through which offloaded tensors pass.
pub(super) struct StagingRing {
    tensor: TensorId,
    slots: Vec<Option<RingSlot>>,
}

/// The size that a staging ring needs: elements of its largest region, and the most regions that it holds at once.
#[derive(Clone, Copy)]
struct RingSize {
    largest: Region,
    slots: usize,
}

impl ProgramRewriter<'_, '_> {
    /// Returns the name of the staging ring (shared buffers) through which an offloaded tensor passes.
    ///
    /// In an update, all persistent tensors of one dtype share a ring, except the few scalars that every piece needs.
    fn ring_name(&self, host_tensor: TensorId) -> String {
        let tensor = self.offloader.set.tensor(host_tensor);
        let ring = if tensor.space == Space::Host { "ring" } else { "host_ring" };
        match self.work {
            WorkKind::Update if tensor.lifetime == Lifetime::Persistent && tensor.category != Category::Staging => {
                format!("{}.{ring}.{}", self.program, tensor.dtype)
            }
            _ => format!("{}.{ring}.{}", self.program, tensor.name),
        }
    }

    /// Creates the staging rings, each with as many buffers as two consecutive work units need.
    pub(super) fn create_rings(&mut self, units: &[WorkUnit]) {
        let tensors: HashSet<TensorId> = units.iter().flat_map(|unit| &unit.uses).map(|u| u.region.tensor).collect();
        let mut by_name: BTreeMap<String, Vec<TensorId>> = BTreeMap::new();
        tensors.into_iter().for_each(|tensor| by_name.entry(self.ring_name(tensor)).or_default().push(tensor));
        for (ring, tensors) in by_name.values().enumerate() {
            self.ring_of.extend(tensors.iter().map(|&tensor| (tensor, ring)));
        }
        let sizes = self.ring_sizes(units, by_name.len());
        for (name, size) in by_name.into_keys().zip(sizes) {
            let RingSize { largest, slots } = size.expect("every ring has a tensor that a unit uses");
            let space = match self.offloader.set.tensor(largest.tensor).space {
                Space::Host => Space::Device,
                _ => Space::Host,
            };
            let tensor = self.offloader.add_buffer(name, largest.tensor, largest.elements, space, slots as u32);
            self.rings.push(StagingRing { tensor, slots: vec![None; slots] });
        }
    }

    /// Returns the size that each of `rings` rings needs for any work unit and the prefetch for its next one; `None`
    /// for a ring that no unit uses.
    fn ring_sizes(&self, units: &[WorkUnit], rings: usize) -> Vec<Option<RingSize>> {
        let mut sizes: Vec<Option<RingSize>> = vec![None; rings];
        for at in 0..units.len() {
            let mut regions: Vec<Region> = Vec::new();
            let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
            let next_uses = units.get(at + 1).into_iter().flat_map(|next| &next.uses);
            let prefetched = next_uses.filter(|u| units[at].can_prefetch(u));
            for region in units[at].uses.iter().chain(prefetched).map(|u| u.region) {
                if regions.contains(&region) {
                    continue;
                }
                regions.push(region);
                let ring = self.ring_of[&region.tensor];
                let count = counts.entry(ring).or_default();
                *count += 1;
                let size = sizes[ring].get_or_insert(RingSize { largest: region, slots: 0 });
                size.slots = size.slots.max(*count);
                if region.elements > size.largest.elements {
                    size.largest = region;
                }
            }
        }
        sizes
    }

    /// Returns the occupied buffers of all rings.
    fn occupied(&mut self) -> impl Iterator<Item = &mut RingSlot> {
        self.rings.iter_mut().flat_map(|ring| ring.slots.iter_mut().flatten())
    }

    /// Returns the occupied buffer that holds a region, and `None` if no ring holds the region.
    fn slot_of(&mut self, region: Region) -> Option<&mut RingSlot> {
        let &ring = self.ring_of.get(&region.tensor)?;
        self.rings[ring].slots.iter_mut().flatten().find(|slot| slot.region == region)
    }

    /// Returns the buffer that holds a region, as an operand. The region must be in its ring.
    fn buffer_of(&self, region: Region) -> Operand {
        let ring = &self.rings[self.ring_of[&region.tensor]];
        let holds = |slot: &Option<RingSlot>| slot.is_some_and(|slot| slot.region == region);
        let slot = ring.slots.iter().position(holds).expect("a unit's regions are in their rings");
        Operand::slot(ring.tensor, slot as i64)
    }

    /// Assigns a buffer of its ring to a region. If the unit reads the region's content, starts the copy into the
    /// buffer. A gradient that starts from zero is zeroed in the buffer instead.
    ///
    /// `last_use` is the index of the work unit that needs the region, and `now` that of the unit in progress. Buffers
    /// that unit `now` or a later one needs are not taken.
    fn fetch(&mut self, wanted: RegionUse, last_use: usize, now: usize) {
        let region = wanted.region;
        self.evict(|other| other.overlaps(region));
        let ring_index = self.ring_of[&region.tensor];
        let ring = &mut self.rings[ring_index];
        let is_free = |slot: &Option<RingSlot>| slot.is_none_or(|slot| slot.last_use < now);
        let slots = ring.slots.iter().enumerate().filter(|(_, slot)| is_free(slot));
        let (slot, _) =
            slots.min_by_key(|(_, slot)| slot.map_or(0, |slot| slot.last_use + 1)).expect("rings are large enough");
        let previous = ring.slots[slot].take();
        let buffer = Operand::slot(ring.tensor, slot as i64);
        if let Some(previous) = previous {
            self.wait_for_write_back(previous, buffer);
        }
        let mut fetching = None;
        if self.starts_from_zero(wanted) {
            self.zeroed.insert(region);
            self.ops.push(OpKind::Fill { into: buffer, value: 0.0, elements: region.elements }.into());
        } else if wanted.read {
            self.sequence += 1;
            fetching = Some(self.sequence);
            let queue = self.fetch_queue(region);
            self.start_copy(region.at(), buffer, region.elements, self.sequence, queue);
        }
        self.rings[ring_index].slots[slot] = Some(RingSlot { region, last_use, fetching, writing_back: None });
    }

    /// Returns whether the wanted region is a gradient that this Program starts from zero instead of fetching it, and
    /// has not started yet.
    fn starts_from_zero(&self, wanted: RegionUse) -> bool {
        let is_zeroed_here =
            self.work == WorkKind::Backward && self.offloader.zeroed_in_backward.contains(&wanted.region.tensor);
        is_zeroed_here && wanted.read && !self.zeroed.contains(&wanted.region)
    }

    /// Empties the buffers of the regions for which `outdated` is true, and appends the waits for their write-backs.
    fn evict(&mut self, outdated: impl Fn(Region) -> bool) {
        let mut emptied = Vec::new();
        for ring in &mut self.rings {
            for (number, slot) in ring.slots.iter_mut().enumerate() {
                if let Some(held) = slot.take_if(|slot| outdated(slot.region)) {
                    emptied.push((held, Operand::slot(ring.tensor, number as i64)));
                }
            }
        }
        for (held, buffer) in emptied {
            self.wait_for_write_back(held, buffer);
        }
    }

    /// Empties all buffers, and appends the waits for their write-backs.
    pub(super) fn evict_all(&mut self) {
        self.evict(|_| true);
    }

    /// Appends the start of a copy.
    pub(super) fn start_copy(&mut self, from: Operand, to: Operand, elements: u64, sequence: u64, queue: Queue) {
        self.ops.push(Op { kind: OpKind::TransferStart { from, to, elements, sequence }, queue });
    }

    /// Appends the wait for a copy.
    pub(super) fn wait_for_copy(&mut self, from: Operand, to: Operand, elements: u64, sequence: u64, queue: Queue) {
        self.ops.push(Op { kind: OpKind::TransferWait { from, to, elements, sequence }, queue });
    }

    /// Returns the queue for copies of a region into its staging ring: copy-in for a host tensor, copy-out for a device
    /// tensor that the host's update uses.
    fn fetch_queue(&self, region: Region) -> Queue {
        match self.offloader.set.tensor(region.tensor).space {
            Space::Host => Queue::CopyIn,
            _ => Queue::CopyOut,
        }
    }

    /// Returns the queue for copies from a ring back to the offloaded region.
    fn write_back_queue(&self, region: Region) -> Queue {
        match self.offloader.set.tensor(region.tensor).space {
            Space::Host => Queue::CopyOut,
            _ => Queue::CopyIn,
        }
    }

    /// Appends the wait for the write-back from `buffer`, of which `held` is the state, if one is pending.
    fn wait_for_write_back(&mut self, held: RingSlot, buffer: Operand) {
        if let Some(sequence) = held.writing_back {
            let queue = self.write_back_queue(held.region);
            self.wait_for_copy(buffer, held.region.at(), held.region.elements, sequence, queue);
        }
    }

    /// Appends work unit `at`, which has these `blocks`, with its regions in ring buffers. The prefetch for the next unit
    /// comes before its ops, the start of its write-backs after them.
    pub(super) fn rewrite_unit(&mut self, units: &[WorkUnit], at: usize, blocks: Vec<Block>) {
        let unit = &units[at];
        self.fetch_missing(unit, at);
        self.wait_for_fetches(unit);
        let next = units.get(at + 1).filter(|next| next.processor == unit.processor);
        for wanted in next.iter().flat_map(|next| &next.uses) {
            if let Some(slot) = self.slot_of(wanted.region) {
                slot.last_use = at + 1;
            } else if wanted.read && !self.starts_from_zero(*wanted) && unit.can_prefetch(wanted) {
                self.fetch(*wanted, at + 1, at);
            }
        }
        for mut block in blocks {
            if block.repeat > 1 {
                self.flush(&unit.name, block.first);
            }
            for op in std::mem::take(&mut block.ops) {
                self.rewrite_op(op, unit);
            }
            if block.repeat > 1 {
                block.ops = self.take_ops();
                self.blocks.push(block);
            }
        }
        for u in unit.uses.iter().filter(|u| u.written) {
            let is_written_next = next.is_some_and(|next| next.uses.iter().any(|n| n.region == u.region && n.written));
            if !is_written_next {
                self.start_write_back(u.region);
            }
        }
    }

    /// Fetches the regions that `unit`, the work unit with index `at`, uses and that are not yet in a ring.
    fn fetch_missing(&mut self, unit: &WorkUnit, at: usize) {
        let missing: Vec<RegionUse> = unit.uses.iter().copied().filter(|u| self.slot_of(u.region).is_none()).collect();
        for u in &unit.uses {
            if let Some(slot) = self.slot_of(u.region) {
                slot.last_use = at;
            }
        }
        for wanted in missing {
            self.fetch(wanted, at, at);
        }
    }

    /// Appends the waits for the fetches of a unit's regions, and for write-backs of the regions that it overwrites.
    fn wait_for_fetches(&mut self, unit: &WorkUnit) {
        for u in &unit.uses {
            let buffer = self.buffer_of(u.region);
            let slot = self.slot_of(u.region).expect("the region has been fetched");
            let (fetching, writing_back) = (slot.fetching.take(), slot.writing_back.take_if(|_| u.written));
            let elements = u.region.elements;
            if let Some(sequence) = fetching {
                self.wait_for_copy(u.region.at(), buffer, elements, sequence, self.fetch_queue(u.region));
            }
            if let Some(sequence) = writing_back {
                self.wait_for_copy(buffer, u.region.at(), elements, sequence, self.write_back_queue(u.region));
            }
        }
    }

    /// Appends an op of `unit`. Operands that lie in regions of the unit are replaced by the ring buffers that hold
    /// these.
    fn rewrite_op(&mut self, mut op: Op, unit: &WorkUnit) {
        if !self.host_copies.is_empty() {
            for access in self.offloader.accesses(&op).iter().filter(|access| access.mode != Mode::Read) {
                self.host_copies.retain(|region, _| region.tensor != access.operand.tensor);
            }
        }
        self.release_conflicts(&op, unit);
        for operand in operands_mut(&mut op.kind) {
            let first = operand.offset.base;
            let contains_operand = |u: &&RegionUse| {
                let region = u.region;
                (region.tensor, region.slot) == (operand.tensor, operand.slot) && region.first <= first
            };
            if let Some(u) = unit.uses.iter().find(contains_operand) {
                *operand = self.buffer_of(u.region).starting_at(Index::fixed(first - u.region.first));
            }
        }
        self.ops.push(op);
    }

    /// Appends the start of the copy of a written region from its ring back to the offloaded tensor.
    fn start_write_back(&mut self, region: Region) {
        let buffer = self.buffer_of(region);
        self.sequence += 1;
        let sequence = self.sequence;
        self.slot_of(region).expect("a written region is in its ring").writing_back = Some(sequence);
        let queue = self.write_back_queue(region);
        self.start_copy(buffer, region.at(), region.elements, sequence, queue);
    }

    /// Appends the waits for write-backs into ranges that an op touches in place, not through a ring. Does nothing
    /// outside updates that the host runs.
    fn release_conflicts(&mut self, op: &Op, unit: &WorkUnit) {
        if self.work != WorkKind::Update || !self.offloader.host_updates {
            return;
        }
        for access in self.offloader.accesses(op) {
            let region = Region::of(access.operand, access.elements);
            if !unit.uses.iter().any(|u| u.region.overlaps(region)) {
                self.release_region(region, access.mode);
            }
        }
    }

    /// Appends the waits for write-backs into a region that an op is about to touch in place. If `mode` writes, ring
    /// buffers with the region are emptied, because they are outdated.
    pub(super) fn release_region(&mut self, region: Region, mode: Mode) {
        let held: Vec<Region> = self.occupied().map(|slot| slot.region).filter(|r| r.overlaps(region)).collect();
        for held in held {
            let buffer = self.buffer_of(held);
            let slot = self.slot_of(held).expect("the region is in its ring");
            let before = std::mem::replace(slot, RingSlot { writing_back: None, ..*slot });
            self.wait_for_write_back(before, buffer);
            if mode != Mode::Read {
                self.evict(|r| r == held);
            }
        }
    }
}
