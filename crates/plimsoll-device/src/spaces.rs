//! The memory spaces of a device with memory that this processor can address: the device arena, the host arena and the
//! scratch file.
//!
//! When the device switches to another plan, `adopt` moves its persistent tensors between and within these spaces.
//! CUDA devices have their arena in GPU memory; they implement `ResizableArenas` themselves and use the same algorithm.

use crate::arena::Arena;
use crate::device::Memory;
use crate::error::DeviceError;
use crate::scratch_file::ScratchFile;
use crate::transport::GroupHandle;
use plimsoll_core::{Bytes, Space};
use plimsoll_program::passes::offload::tensor_origins;
use plimsoll_program::{Lifetime, Placement, ProgramSet, TensorId};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// A program set with the placement of its tensors.
pub type PlanRef<'a> = (&'a ProgramSet, &'a Placement);

/// The arenas and the scratch file of a device. Bytes that a peer has still to copy (a pending send) are never
/// overwritten. Pending sends are cancelled before the arenas are freed.
#[derive(Debug)]
pub struct Spaces {
    device: Arena,
    host: Arena,
    scratch: ScratchFile,
    group: Option<GroupHandle>,
}

impl Drop for Spaces {
    fn drop(&mut self) {
        self.group.iter().for_each(GroupHandle::cancel_sends);
    }
}

/// The spaces that a device allocates: both arenas and the scratch file.
const SPACES: [Space; 3] = [Space::Device, Space::Host, Space::Scratch];

impl Spaces {
    /// Maps both arenas of a plan, fills them with the pattern that reveals writes, and creates the plan's scratch file
    /// in `folder`. `folder` is None for plans without a scratch file.
    ///
    /// # Errors
    /// Memory or disk space is refused.
    pub fn map(placement: &Placement, folder: Option<&Path>) -> Result<Spaces, DeviceError> {
        let mut spaces = Spaces {
            device: Arena::map(placement.arena_bytes)?,
            host: Arena::map(placement.host_bytes)?,
            scratch: ScratchFile::create(folder, placement.file_bytes)?,
            group: None,
        };
        spaces.device.fill_pattern();
        spaces.host.fill_pattern();
        Ok(spaces)
    }

    /// Stores the device's communication group. From then on, bytes of this rank's sends that peers have not yet copied
    /// are protected from overwriting.
    pub fn join_group(&mut self, group: GroupHandle) {
        self.group = Some(group);
    }

    /// Checks that a range of an arena may be overwritten. Called before each write from outside the Programs.
    ///
    /// # Panics
    /// If the bytes belong to a send that its receiver has not copied.
    fn assert_not_borrowed(&self, space: Space, range: &Range<u64>) {
        let Some(group) = &self.group else { return };
        let first = self.arena(space).base() as usize;
        group.assert_not_borrowed(first + range.start as usize..first + range.end as usize);
    }

    /// Returns the arena of a space.
    ///
    /// # Panics
    /// For [`Space::Scratch`] and [`Space::File`], which have no arena.
    pub fn arena(&self, space: Space) -> &Arena {
        match space {
            Space::Device => &self.device,
            Space::Host => &self.host,
            Space::Scratch | Space::File => panic!("bug: file spaces have no arena"),
        }
    }

    /// Returns the scratch file.
    pub(crate) fn scratch(&self) -> &ScratchFile {
        &self.scratch
    }

    /// Returns the arena of a space for modification.
    ///
    /// # Panics
    /// For [`Space::Scratch`] and [`Space::File`], which have no arena.
    pub fn arena_mut(&mut self, space: Space) -> &mut Arena {
        match space {
            Space::Device => &mut self.device,
            Space::Host => &mut self.host,
            Space::Scratch | Space::File => panic!("bug: file spaces have no arena"),
        }
    }
}

impl Spaces {
    /// Copies bytes into a tensor's slot, from its first byte on.
    ///
    /// # Panics
    /// If the slot is smaller than `bytes`.
    pub fn write(&mut self, set: &ProgramSet, placement: &Placement, tensor: TensorId, slot: u32, bytes: &[u8]) {
        let tensor_info = set.tensor(tensor);
        assert!(bytes.len() as u64 <= tensor_info.bytes(), "{} is smaller than the bytes to write", tensor_info.name);
        self.fill(tensor_info.space, placement.offset(tensor, slot), bytes);
    }

    /// Copies bytes out of a tensor's slot, from byte `from` of the slot on.
    ///
    /// # Panics
    /// If the slot ends before them.
    pub fn read(
        &mut self,
        set: &ProgramSet,
        placement: &Placement,
        tensor: TensorId,
        slot: u32,
        from: u64,
        bytes: &mut [u8],
    ) {
        let tensor_info = set.tensor(tensor);
        let end = from + bytes.len() as u64;
        assert!(end <= tensor_info.bytes(), "{} is smaller than the bytes to read", tensor_info.name);
        let first = placement.offset(tensor, slot) + from;
        bytes.copy_from_slice(&self.view(tensor_info.space, first..first + bytes.len() as u64));
    }

    /// Switches from the plan `old` to the plan `new`, after cancelling pending sends. Persistent tensors of both plans
    /// keep every bit, even if they change their place or space. Returns the bytes moved between device and host.
    ///
    /// # Errors
    /// Memory or disk space is refused, or a tensor changes its shape. The old plan then remains in place.
    pub fn adopt(&mut self, old: PlanRef, new: PlanRef) -> Result<MovedBytes, DeviceError> {
        self.group.iter().for_each(GroupHandle::cancel_sends);
        self.scratch.check()?;
        let moved = adopt(self, old, new)?;
        self.scratch.check()?;
        Ok(moved)
    }
}

/// Arenas that can be resized, with tensors that can be moved, while no op runs.
pub(crate) trait ResizableArenas: Memory {
    /// Resizes an arena or the scratch file to `bytes`. The first `kept` bytes keep their values. In an arena, all
    /// other bytes are filled with the pattern that reveals writes.
    fn resize(&mut self, space: Space, bytes: u64, kept: u64) -> Result<(), DeviceError>;

    /// Copies bytes between two places, given as space and first byte. The places may overlap.
    fn copy(&mut self, from: (Space, u64), to: (Space, u64), bytes: u64);
}

impl ResizableArenas for Spaces {
    fn resize(&mut self, space: Space, bytes: u64, kept: u64) -> Result<(), DeviceError> {
        match space {
            Space::Scratch => self.scratch.resize(bytes),
            _ => Ok(self.arena_mut(space).resize(bytes, kept)?),
        }
    }

    fn copy(&mut self, from: (Space, u64), to: (Space, u64), bytes: u64) {
        let (source_range, first) = (from.1 as usize..(from.1 + bytes) as usize, to.1 as usize);
        match (from.0, to.0) {
            (Space::Scratch, Space::Scratch) => return self.scratch.copy_within(from.1, to.1, bytes),
            (Space::Scratch, space) => {
                let arena = if space == Space::Device { &mut self.device } else { &mut self.host };
                let read = self.scratch.read(from.1, &mut arena.contents()[first..first + bytes as usize]);
                return self.scratch.record_error(read);
            }
            (space, Space::Scratch) => {
                let arena = if space == Space::Device { &mut self.device } else { &mut self.host };
                return self.scratch.fill(to.1, &arena.contents()[source_range]);
            }
            _ => {}
        }
        if from.0 == to.0 {
            self.arena_mut(from.0).contents().copy_within(source_range, first);
            return;
        }
        let (device, host) = (self.device.contents(), self.host.contents());
        let (source, target) = if from.0 == Space::Device { (device, host) } else { (host, device) };
        target[first..first + bytes as usize].copy_from_slice(&source[source_range]);
    }
}

/// Switches from the plan `old` to the plan `new`, and returns the bytes moved between device and host. Persistent
/// tensors that both plans have keep every bit.
///
/// In each arena, the bytes above the highest of these tensors are filled with the pattern that reveals writes.
/// Meanwhile an arena is never larger than the larger of its old and new size. If tensors swap places, one of them is
/// copied to temporary memory.
///
/// # Errors
/// Memory or disk space is refused, or a tensor changes its shape. The old plan then remains in place.
pub(crate) fn adopt(arenas: &mut dyn ResizableArenas, old: PlanRef, new: PlanRef) -> Result<MovedBytes, DeviceError> {
    let persistent = matching_slots(old, new)?;
    for space in SPACES {
        let old_bytes = arenas.bytes(space).0;
        if arena_size(new.1, space) > old_bytes
            && let Err(error) = arenas.resize(space, arena_size(new.1, space), old_bytes)
        {
            shrink(arenas, old.1, |_| u64::MAX)?;
            return Err(error);
        }
    }
    let moves = persistent.iter().filter(|slot_move| slot_move.from != slot_move.to).copied().collect();
    let moved = move_slots(arenas, moves);
    let kept = |space| persistent.iter().filter(|s| s.to.0 == space).map(|s| s.to.1 + s.bytes).max().unwrap_or(0);
    shrink(arenas, new.1, kept)?;
    Ok(moved)
}

/// Shrinks the arenas and the scratch file to the sizes of a placement. In each space, bytes below `kept(space)` keep
/// their values.
fn shrink(
    arenas: &mut dyn ResizableArenas,
    placement: &Placement,
    kept: impl Fn(Space) -> u64,
) -> Result<(), DeviceError> {
    for space in SPACES {
        let bytes = arena_size(placement, space);
        arenas.resize(space, bytes, kept(space).min(bytes))?;
    }
    Ok(())
}

/// Moves tensor slots to their new places, in an order that overwrites no slot before it has moved. If slots exchange
/// places in a cycle, one of them is first copied to temporary memory. Returns the bytes moved between device and host.
fn move_slots(arenas: &mut dyn ResizableArenas, moves: Vec<SlotMove>) -> MovedBytes {
    let mut moved = MovedBytes::default();
    for step in &moves {
        match (step.from.0, step.to.0) {
            (Space::Device, Space::Host) => moved.to_host += Bytes(step.bytes),
            (Space::Host, Space::Device) => moved.to_device += Bytes(step.bytes),
            _ => {}
        }
    }
    // Sizes of the slots that have not moved, by place; and the pending moves, some with a temporary copy of the slot.
    let mut unmoved: BTreeMap<(Space, u64), u64> = moves.iter().map(|m| (m.from, m.bytes)).collect();
    let mut pending: Vec<(SlotMove, Option<Vec<u8>>)> = moves.into_iter().map(|step| (step, None)).collect();
    while !pending.is_empty() {
        let before = pending.len();
        pending.retain(|(step, saved)| {
            let ((space, first), end) = (step.to, step.to.1 + step.bytes);
            let own = |from: (Space, u64)| saved.is_none() && from == step.from;
            // Slots do not overlap: one that reaches into the target begins inside it, or is the last that begins
            // before it.
            let inside = unmoved.range((space, first)..(space, end)).any(|(&from, _)| !own(from));
            let below = unmoved.range((space, 0)..(space, first)).next_back();
            let reaches = below.is_some_and(|(&from, bytes)| !own(from) && from.1 + bytes > first);
            if inside || reaches {
                return true;
            }
            match saved {
                Some(bytes) => arenas.fill(space, first, bytes),
                None => {
                    arenas.copy(step.from, step.to, step.bytes);
                    unmoved.remove(&step.from);
                }
            }
            false
        });
        if pending.len() == before {
            // The remaining moves form a cycle: one slot is copied aside until the others have moved.
            let (step, saved) = pending
                .iter_mut()
                .find(|(_, saved)| saved.is_none())
                .expect("a cycle has a slot that is not copied aside");
            let (space, first) = step.from;
            *saved = Some(arenas.view(space, first..first + step.bytes).into_owned());
            unmoved.remove(&step.from);
        }
    }
    moved
}

/// Bytes that were moved between the device arena and the host arena when a device switched to another plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBytes {
    /// Bytes moved from host to device.
    pub to_device: Bytes,
    /// Bytes moved from device to host.
    pub to_host: Bytes,
}

/// A tensor slot that two plans have in common, with its space and first byte in the old (`from`) and the new plan
/// (`to`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SlotMove {
    from: (Space, u64),
    to: (Space, u64),
    bytes: u64,
}

/// Returns the slots of all persistent tensors that both plans have, with their places in both. A plan may keep some
/// slots of a tensor on the host, as a second tensor. Slots are therefore matched by their number before that split.
///
/// # Errors
/// A tensor has another shape, type or number of slots in the new plan.
fn matching_slots(old: PlanRef, new: PlanRef) -> Result<Vec<SlotMove>, DeviceError> {
    let old_slots_by_name = persistent_slots(old);
    let mut persistent = Vec::new();
    for (name, new_slots) in persistent_slots(new) {
        let Some(old_slots) = old_slots_by_name.get(name) else { continue };
        let shape =
            |(id, _): &(TensorId, u32), set: &ProgramSet| (set.tensor(*id).dtype, set.tensor(*id).shape.clone());
        let same_shapes = old_slots.iter().zip(&new_slots).all(|((_, a), (_, b))| shape(a, old.0) == shape(b, new.0));
        if old_slots.len() != new_slots.len() || !same_shapes {
            return Err(DeviceError::ShapeChanged { tensor: name.to_owned() });
        }
        for (from, to) in old_slots.values().zip(new_slots.values()) {
            let place = |(set, placement): PlanRef, (id, slot): (TensorId, u32)| {
                Some((set.tensor(id).space, placement.offsets[id.0 as usize][slot as usize]?))
            };
            let bytes = new.0.tensor(to.0).bytes();
            persistent.extend(place(old, *from).zip(place(new, *to)).map(|(from, to)| SlotMove { from, to, bytes }));
        }
    }
    Ok(persistent)
}

/// Returns the slots of a plan's persistent tensors, except for tensors in files of the run. The keys are the tensor's
/// name and the slot's number before offload moved some slots to another tensor. The values are the tensor and the
/// slot's number in this plan.
fn persistent_slots<'a>((set, placement): PlanRef<'a>) -> BTreeMap<&'a str, BTreeMap<u32, (TensorId, u32)>> {
    let mut persistent_slots: BTreeMap<&str, BTreeMap<u32, (TensorId, u32)>> = BTreeMap::new();
    for (number, origin) in tensor_origins(set).into_iter().enumerate() {
        let tensor = &set.tensors[number];
        if tensor.lifetime == Lifetime::Persistent && tensor.space != Space::File {
            let own = (0..placement.offsets[number].len() as u32)
                .map(|slot| (origin.first_slot + slot, (TensorId(number as u32), slot)));
            persistent_slots.entry(origin.name).or_default().extend(own);
        }
    }
    persistent_slots
}

/// Returns the size of an arena or of the scratch file under a placement.
fn arena_size(placement: &Placement, space: Space) -> u64 {
    match space {
        Space::Device => placement.arena_bytes,
        Space::Host => placement.host_bytes,
        Space::Scratch => placement.file_bytes,
        Space::File => 0,
    }
}

impl Memory for Spaces {
    fn bytes(&self, space: Space) -> Bytes {
        if space == Space::Scratch { self.scratch.bytes() } else { self.arena(space).bytes() }
    }

    fn view(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]> {
        if space == Space::Scratch {
            return self.scratch.view(range);
        }
        // SAFETY: `&mut self` shows that no op runs; peers only read borrowed bytes.
        Cow::Borrowed(unsafe { self.arena(space).slice(range.start, (range.end - range.start) as usize) })
    }

    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]) {
        if space == Space::Scratch {
            return self.scratch.fill(first, bytes);
        }
        self.assert_not_borrowed(space, &(first..first + bytes.len() as u64));
        // SAFETY: `&mut self` shows that no op runs, and no peer reads these bytes.
        unsafe { self.arena(space).slice_mut(first, bytes.len()) }.copy_from_slice(bytes);
    }

    fn poison(&mut self, space: Space, range: Range<u64>) {
        // Tensors in the scratch file are live for the whole run.
        if space != Space::Scratch {
            self.assert_not_borrowed(space, &range);
            self.arena_mut(space).poison(range);
        }
    }

    fn high_water(&mut self, space: Space) -> Bytes {
        if space == Space::Scratch { self.scratch.high_water() } else { self.arena_mut(space).high_water() }
    }

    fn has_stray_writes(&mut self, space: Space) -> bool {
        // Accesses beyond the end of the scratch file panic.
        space != Space::Scratch && self.arena_mut(space).has_stray_writes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Category, DType};
    use plimsoll_program::Tensor;
    use proptest::prelude::*;

    /// Returns a plan with one tensor per entry: its bytes, whether it is on the host, the key that orders tensors in
    /// their space, and the gap in bytes before it.
    fn plan(tensors: &[(u64, bool, u8, u64)]) -> (ProgramSet, Placement) {
        let mut set = ProgramSet::default();
        let mut placement = Placement { offsets: vec![Vec::new(); tensors.len()], ..Placement::default() };
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&i| (tensors[i].2, i));
        for (i, &(bytes, host, _, _)) in tensors.iter().enumerate() {
            set.tensors.push(Tensor {
                name: format!("t{i}"),
                shape: vec![bytes],
                dtype: DType::U8,
                space: if host { Space::Host } else { Space::Device },
                category: Category::Weight,
                lifetime: Lifetime::Persistent,
                slots: 1,
            });
        }
        for i in order {
            let (bytes, host, _, gap) = tensors[i];
            let end = if host { &mut placement.host_bytes } else { &mut placement.arena_bytes };
            placement.offsets[i] = vec![Some(*end + gap)];
            *end += gap + bytes;
        }
        (set, placement)
    }

    fn value(tensor: usize, at: usize) -> u8 {
        (tensor * 37 + at * 11 + 5) as u8
    }

    proptest! {
        #[test]
        fn persistent_tensors_keep_bits_across_plans(
            tensors in prop::collection::vec((1u64..3000, (any::<bool>(), 0u8..4, 0u64..300), (any::<bool>(), 0u8..4, 0u64..300)), 1..12)
        ) {
            let side = |first: bool| -> Vec<(u64, bool, u8, u64)> {
                tensors.iter().map(|&(bytes, a, b)| if first { (bytes, a.0, a.1, a.2) } else { (bytes, b.0, b.1, b.2) }).collect()
            };
            let (old, new) = (plan(&side(true)), plan(&side(false)));
            let mut spaces = Spaces::map(&old.1, None).unwrap();
            for (i, &(bytes, ..)) in tensors.iter().enumerate() {
                let tensor_info: Vec<u8> = (0..bytes as usize).map(|at| value(i, at)).collect();
                spaces.write(&old.0, &old.1, TensorId(i as u32), 0, &tensor_info);
            }
            let moved = spaces.adopt((&old.0, &old.1), (&new.0, &new.1)).unwrap();
            prop_assert_eq!(spaces.bytes(Space::Device).0, new.1.arena_bytes);
            prop_assert_eq!(spaces.bytes(Space::Host).0, new.1.host_bytes);
            let crossed = |from: bool| tensors.iter().filter(|t| t.1.0 == from && t.2.0 != from).map(|t| t.0).sum::<u64>();
            prop_assert_eq!((moved.to_host.0, moved.to_device.0), (crossed(false), crossed(true)));
            for (i, &(bytes, ..)) in tensors.iter().enumerate() {
                let mut found = vec![0; bytes as usize];
                spaces.read(&new.0, &new.1, TensorId(i as u32), 0, 0, &mut found);
                prop_assert!(found.iter().enumerate().all(|(at, &byte)| byte == value(i, at)), "t{}", i);
            }
        }
    }

    /// Returns a plan with a tensor of four slots, the first `pending` of which are on the host.
    fn split_tensor(pending: u64) -> (ProgramSet, Placement) {
        let parts = [(1000, false, 0, 0), (1000, true, 0, 0)];
        let (mut set, mut placement) = plan(&parts);
        let counts = [4 - pending, pending];
        let (mut tensors, mut offsets) = (Vec::new(), Vec::new());
        for ((tensor, count), suffix) in set.tensors.drain(..).zip(counts).zip(["", ".host"]) {
            let name = if count == 4 { "w".to_owned() } else { format!("w{suffix}") };
            if count > 0 {
                tensors.push(Tensor { name, slots: count as u32, ..tensor });
                offsets.push((0..count).map(|slot| Some(slot * 1000)).collect());
            }
        }
        (set.tensors, placement.offsets) = (tensors, offsets);
        (placement.arena_bytes, placement.host_bytes) = (counts[0] * 1000, counts[1] * 1000);
        (set, placement)
    }

    #[test]
    fn offloaded_slots_keep_bits_across_plans() {
        for (before, after) in (0..=4).flat_map(|before| (0..=4).map(move |after| (before, after))) {
            let (old, new) = (split_tensor(before), split_tensor(after));
            let mut spaces = Spaces::map(&old.1, None).unwrap();
            // Slot `slot` of the whole tensor; offloaded slots come first.
            let at = |plan: &(ProgramSet, Placement), pending: u64, slot: u64| {
                let name = if slot >= pending || pending == 4 { "w" } else { "w.host" };
                let within = if slot >= pending { slot - pending } else { slot };
                (plan.0.find(name).unwrap(), within as u32)
            };
            for slot in 0..4 {
                let (id, within) = at(&old, before, slot);
                spaces.write(&old.0, &old.1, id, within, &[slot as u8 + 1; 1000]);
            }
            let moved = spaces.adopt((&old.0, &old.1), (&new.0, &new.1)).unwrap();
            let crossed = |from: u64, to: u64| to.saturating_sub(from) * 1000;
            assert_eq!((moved.to_host.0, moved.to_device.0), (crossed(before, after), crossed(after, before)));
            for slot in 0..4 {
                let (id, within) = at(&new, after, slot);
                let mut found = [0; 1000];
                spaces.read(&new.0, &new.1, id, within, 0, &mut found);
                assert_eq!(found, [slot as u8 + 1; 1000], "slot {slot}, {before} -> {after}");
            }
        }
    }

    #[test]
    fn refused_plan_keeps_the_old_one() {
        let old = plan(&[(5000, false, 0, 0), (3000, false, 1, 0)]);
        let mut new = plan(&[(5000, true, 0, 0), (3000, false, 1, 0)]);
        new.1.host_bytes = 1 << 60;
        let mut spaces = Spaces::map(&old.1, None).unwrap();
        spaces.write(&old.0, &old.1, TensorId(0), 0, &[7; 5000]);
        assert!(matches!(spaces.adopt((&old.0, &old.1), (&new.0, &new.1)), Err(DeviceError::Arena(_))));
        assert_eq!((spaces.bytes(Space::Device), spaces.bytes(Space::Host)), (Bytes(8000), Bytes(0)));
        let mut found = [0; 5000];
        spaces.read(&old.0, &old.1, TensorId(0), 0, 0, &mut found);
        assert_eq!(found, [7; 5000]);
        new.0.tensors[0].shape = vec![4999];
        new.1.host_bytes = 5000;
        let refused = spaces.adopt((&old.0, &old.1), (&new.0, &new.1));
        assert!(matches!(refused, Err(DeviceError::ShapeChanged { .. })));
    }
}
