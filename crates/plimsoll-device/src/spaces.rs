//! The spaces of a device whose memory this processor sees: its own arena, that of its host side, and the scratch file;
//! and how what stays moves in them when the device goes over to another plan.

use crate::arena::Arena;
use crate::device::{DeviceError, Memory};
use crate::scratch::Scratch;
use crate::transport::Seat;
use plimsoll_core::{Bytes, Space};
use plimsoll_program::passes::offload::origins;
use plimsoll_program::{Lifetime, Placement, ProgramSet, TensorId};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Programs, and where their tensors stand.
pub type Plan<'a> = (&'a ProgramSet, &'a Placement);

/// An arena for each space that has one. What of them is lent to the others of a team is not written meanwhile, and
/// withdrawn before it goes.
#[derive(Debug)]
pub struct Spaces {
    device: Arena,
    host: Arena,
    scratch: Scratch,
    seat: Option<Seat>,
}

impl Drop for Spaces {
    fn drop(&mut self) {
        self.seat.iter().for_each(Seat::withdraw);
    }
}

/// All of them.
const SPACES: [Space; 3] = [Space::Device, Space::Host, Space::Scratch];

impl Spaces {
    /// Maps both arenas of a plan, and fills them with the pattern that shows what is written; and takes the scratch file,
    /// which is in `folder`.
    ///
    /// # Errors
    /// What the machine refuses.
    pub fn map(placement: &Placement, folder: Option<&Path>) -> Result<Spaces, DeviceError> {
        let mut spaces = Spaces {
            device: Arena::map(placement.arena_bytes)?,
            host: Arena::map(placement.host_bytes)?,
            scratch: Scratch::take(folder, placement.file_bytes)?,
            seat: None,
        };
        spaces.device.fill_pattern();
        spaces.host.fill_pattern();
        Ok(spaces)
    }

    /// From now on others may read what is shown to them from this seat.
    pub fn join(&mut self, seat: Seat) {
        self.seat = Some(seat);
    }

    /// Bytes of an arena that are about to be overwritten while no op runs.
    ///
    /// # Panics
    /// Where they are lent.
    fn unlent(&self, space: Space, range: &Range<u64>) {
        let Some(seat) = &self.seat else { return };
        let first = self.of(space).base() as usize;
        seat.may_write(first + range.start as usize..first + range.end as usize);
    }

    /// The arena of a space.
    ///
    /// # Panics
    /// For files, which have none.
    pub fn of(&self, space: Space) -> &Arena {
        match space {
            Space::Device => &self.device,
            Space::Host => &self.host,
            Space::Scratch | Space::File => panic!("bug: files stand in no arena"),
        }
    }

    /// The scratch file.
    pub(crate) fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// The arena of a space, to be changed.
    ///
    /// # Panics
    /// For files, which have none.
    pub fn of_mut(&mut self, space: Space) -> &mut Arena {
        match space {
            Space::Device => &mut self.device,
            Space::Host => &mut self.host,
            Space::Scratch | Space::File => panic!("bug: files stand in no arena"),
        }
    }
}

impl Spaces {
    /// Copies bytes into a tensor's slot, from its first byte on.
    ///
    /// # Panics
    /// Where the slot is smaller.
    pub fn write(&mut self, set: &ProgramSet, placement: &Placement, tensor: TensorId, slot: u32, bytes: &[u8]) {
        let known = set.tensor(tensor);
        assert!(bytes.len() as u64 <= known.bytes(), "{} is smaller", known.name);
        self.fill(known.space, placement.offset(tensor, slot), bytes);
    }

    /// Copies bytes out of a tensor's slot, from its first byte on.
    ///
    /// # Panics
    /// Where the slot is smaller.
    pub fn read(&mut self, set: &ProgramSet, placement: &Placement, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        let known = set.tensor(tensor);
        assert!(bytes.len() as u64 <= known.bytes(), "{} is smaller", known.name);
        let first = placement.offset(tensor, slot);
        bytes.copy_from_slice(&self.look(known.space, first..first + bytes.len() as u64));
    }

    /// Goes over from one plan to another; see `adopt`.
    ///
    /// # Errors
    /// What the machine refuses, or a tensor that has another shape in the new plan; all is then as it was.
    pub fn adopt(&mut self, old: Plan, new: Plan) -> Result<Moved, DeviceError> {
        self.seat.iter().for_each(Seat::withdraw);
        self.scratch.check()?;
        let moved = adopt(self, old, new)?;
        self.scratch.check()?;
        Ok(moved)
    }
}

/// Two arenas whose tensors can be moved while no op runs.
pub(crate) trait Arenas: Memory {
    /// Makes an arena as large as that. What lies below `kept` stays; above it is the pattern that shows what is written.
    fn resize(&mut self, space: Space, bytes: u64, kept: u64) -> Result<(), DeviceError>;

    /// Copies bytes from one place to another, which may overlap.
    fn copy(&mut self, from: (Space, u64), to: (Space, u64), bytes: u64);
}

impl Arenas for Spaces {
    fn resize(&mut self, space: Space, bytes: u64, kept: u64) -> Result<(), DeviceError> {
        match space {
            Space::Scratch => self.scratch.resize(bytes),
            _ => Ok(self.of_mut(space).resize(bytes, kept)?),
        }
    }

    fn copy(&mut self, from: (Space, u64), to: (Space, u64), bytes: u64) {
        let (source_range, first) = (from.1 as usize..(from.1 + bytes) as usize, to.1 as usize);
        match (from.0, to.0) {
            (Space::Scratch, Space::Scratch) => return self.scratch.copy_within(from.1, to.1, bytes),
            (Space::Scratch, space) => {
                let arena = if space == Space::Device { &mut self.device } else { &mut self.host };
                let read = self.scratch.read(from.1, &mut arena.contents()[first..first + bytes as usize]);
                return self.scratch.keep(read);
            }
            (space, Space::Scratch) => {
                let arena = if space == Space::Device { &mut self.device } else { &mut self.host };
                return self.scratch.fill(to.1, &arena.contents()[source_range]);
            }
            _ => {}
        }
        if from.0 == to.0 {
            self.of_mut(from.0).contents().copy_within(source_range, first);
            return;
        }
        let (device, host) = (self.device.contents(), self.host.contents());
        let (source, target) = if from.0 == Space::Device { (device, host) } else { (host, device) };
        target[first..first + bytes as usize].copy_from_slice(&source[source_range]);
    }
}

/// Goes over from one plan to another: persistent tensors that both have keep every bit, wherever they stand in the
/// new one; all other bytes hold the pattern that shows what is written. While it happens an arena is at most as
/// large as the larger of its two sizes; where tensors take each other's places, one of them waits beside the arenas.
///
/// # Errors
/// What the machine refuses, or a tensor that has another shape in the new plan; all is then as it was.
pub(crate) fn adopt(arenas: &mut dyn Arenas, old: Plan, new: Plan) -> Result<Moved, DeviceError> {
    let stays = carried(old, new)?;
    for space in SPACES {
        let held = arenas.bytes(space).0;
        if size(new.1, space) > held
            && let Err(error) = arenas.resize(space, size(new.1, space), held)
        {
            shrink(arenas, old.1, |_| u64::MAX)?;
            return Err(error);
        }
    }
    let moved = carry(arenas, stays.iter().filter(|stay| stay.from != stay.to).copied().collect());
    let kept = |space| stays.iter().filter(|s| s.to.0 == space).map(|s| s.to.1 + s.bytes).max().unwrap_or(0);
    shrink(arenas, new.1, kept)?;
    Ok(moved)
}

/// Makes the arenas as large as a placement says, which is not more than they are; what lies below `kept` stays.
fn shrink(arenas: &mut dyn Arenas, placement: &Placement, kept: impl Fn(Space) -> u64) -> Result<(), DeviceError> {
    for space in SPACES {
        let bytes = size(placement, space);
        arenas.resize(space, bytes, kept(space).min(bytes))?;
    }
    Ok(())
}

/// Moves slots, none of which may be overwritten before it has moved.
fn carry(arenas: &mut dyn Arenas, moves: Vec<Stay>) -> Moved {
    let mut moved = Moved::default();
    for step in &moves {
        match (step.from.0, step.to.0) {
            (Space::Device, Space::Host) => moved.out += Bytes(step.bytes),
            (Space::Host, Space::Device) => moved.into += Bytes(step.bytes),
            _ => {}
        }
    }
    // Where what has not moved yet stands, by its first byte; and what waits, some of it aside.
    let mut standing: BTreeMap<(Space, u64), u64> = moves.iter().map(|m| (m.from, m.bytes)).collect();
    let mut waiting: Vec<(Stay, Option<Vec<u8>>)> = moves.into_iter().map(|step| (step, None)).collect();
    while !waiting.is_empty() {
        let before = waiting.len();
        waiting.retain(|(step, aside)| {
            let ((space, first), end) = (step.to, step.to.1 + step.bytes);
            let own = |from: (Space, u64)| aside.is_none() && from == step.from;
            // Nothing overlaps: what reaches into the target begins in it, or is the last that begins before it.
            let inside = standing.range((space, first)..(space, end)).any(|(&from, _)| !own(from));
            let below = standing.range((space, 0)..(space, first)).next_back();
            let reaches = below.is_some_and(|(&from, bytes)| !own(from) && from.1 + bytes > first);
            if inside || reaches {
                return true;
            }
            match aside {
                Some(bytes) => arenas.fill(space, first, bytes),
                None => {
                    arenas.copy(step.from, step.to, step.bytes);
                    standing.remove(&step.from);
                }
            }
            false
        });
        if waiting.len() == before {
            // They stand in each other's way: one of them goes aside until the others have moved.
            let (step, aside) = waiting.iter_mut().find(|(_, aside)| aside.is_none()).expect("one stands in the way");
            let (space, first) = step.from;
            *aside = Some(arenas.look(space, first..first + step.bytes).into_owned());
            standing.remove(&step.from);
        }
    }
    moved
}

/// Bytes that went from one arena to the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// To the device.
    pub into: Bytes,
    /// To the host.
    pub out: Bytes,
}

/// A slot that two plans have in common: its space and first byte in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stay {
    from: (Space, u64),
    to: (Space, u64),
    bytes: u64,
}

/// What stays from one plan to the other. A tensor may be whole in one of them and in the other have some of its slots
/// on the host, as a tensor of their own.
fn carried(old: Plan, new: Plan) -> Result<Vec<Stay>, DeviceError> {
    let known = slots(old);
    let mut stays = Vec::new();
    for (name, wanted) in slots(new) {
        let Some(held) = known.get(name) else { continue };
        let shape =
            |(id, _): &(TensorId, u32), set: &ProgramSet| (set.tensor(*id).dtype, set.tensor(*id).shape.clone());
        let alike = held.iter().zip(&wanted).all(|((_, a), (_, b))| shape(a, old.0) == shape(b, new.0));
        if held.len() != wanted.len() || !alike {
            return Err(DeviceError::OtherShape { tensor: name.to_owned() });
        }
        for (from, to) in held.values().zip(wanted.values()) {
            let place = |(set, placement): Plan, (id, slot): (TensorId, u32)| {
                Some((set.tensor(id).space, placement.offsets[id.0 as usize][slot as usize]?))
            };
            let bytes = new.0.tensor(to.0).bytes();
            stays.extend(place(old, *from).zip(place(new, *to)).map(|(from, to)| Stay { from, to, bytes }));
        }
    }
    Ok(stays)
}

/// The slots of all persistent tensors: by the name that the tensor has where nothing waits, and by the slot there, which
/// slot of which tensor it is now.
fn slots<'a>((set, placement): Plan<'a>) -> BTreeMap<&'a str, BTreeMap<u32, (TensorId, u32)>> {
    let mut slots: BTreeMap<&str, BTreeMap<u32, (TensorId, u32)>> = BTreeMap::new();
    for (number, (name, first)) in origins(set).into_iter().enumerate() {
        let tensor = &set.tensors[number];
        if tensor.lifetime == Lifetime::Persistent && tensor.space != Space::File {
            let own =
                (0..placement.offsets[number].len() as u32).map(|slot| (first + slot, (TensorId(number as u32), slot)));
            slots.entry(name).or_default().extend(own);
        }
    }
    slots
}

/// The size of an arena under a placement.
fn size(placement: &Placement, space: Space) -> u64 {
    match space {
        Space::Device => placement.arena_bytes,
        Space::Host => placement.host_bytes,
        Space::Scratch => placement.file_bytes,
        Space::File => 0,
    }
}

impl Memory for Spaces {
    fn bytes(&self, space: Space) -> Bytes {
        if space == Space::Scratch { self.scratch.bytes() } else { self.of(space).bytes() }
    }

    fn look(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]> {
        if space == Space::Scratch {
            return self.scratch.look(range);
        }
        // SAFETY: `&mut self`: no op runs, and whom something is lent to only reads it.
        Cow::Borrowed(unsafe { self.of(space).slice(range.start, (range.end - range.start) as usize) })
    }

    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]) {
        if space == Space::Scratch {
            return self.scratch.fill(first, bytes);
        }
        self.unlent(space, &(first..first + bytes.len() as u64));
        // SAFETY: `&mut self`: no op runs; and nobody else reads these bytes.
        unsafe { self.of(space).slice_mut(first, bytes.len()) }.copy_from_slice(bytes);
    }

    fn poison(&mut self, space: Space, range: Range<u64>) {
        // What waits in the file is alive as long as the run is.
        if space != Space::Scratch {
            self.unlent(space, &range);
            self.of_mut(space).poison(range);
        }
    }

    fn high_water(&mut self, space: Space) -> Bytes {
        if space == Space::Scratch { self.scratch.high_water() } else { self.of_mut(space).high_water() }
    }

    fn strayed(&mut self, space: Space) -> bool {
        // Whoever reaches beyond the file is stopped.
        space != Space::Scratch && self.of_mut(space).strayed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Category, DType};
    use plimsoll_program::Tensor;
    use proptest::prelude::*;

    /// Tensors of `bytes`, each in a space, standing in the order of their keys with gaps between them.
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
        fn what_stays_keeps_every_bit_wherever_the_next_plan_has_it(
            tensors in prop::collection::vec((1u64..3000, (any::<bool>(), 0u8..4, 0u64..300), (any::<bool>(), 0u8..4, 0u64..300)), 1..12)
        ) {
            let side = |first: bool| -> Vec<(u64, bool, u8, u64)> {
                tensors.iter().map(|&(bytes, a, b)| if first { (bytes, a.0, a.1, a.2) } else { (bytes, b.0, b.1, b.2) }).collect()
            };
            let (old, new) = (plan(&side(true)), plan(&side(false)));
            let mut spaces = Spaces::map(&old.1, None).unwrap();
            for (i, &(bytes, ..)) in tensors.iter().enumerate() {
                let known: Vec<u8> = (0..bytes as usize).map(|at| value(i, at)).collect();
                spaces.write(&old.0, &old.1, TensorId(i as u32), 0, &known);
            }
            let moved = spaces.adopt((&old.0, &old.1), (&new.0, &new.1)).unwrap();
            prop_assert_eq!(spaces.bytes(Space::Device).0, new.1.arena_bytes);
            prop_assert_eq!(spaces.bytes(Space::Host).0, new.1.host_bytes);
            let crossed = |from: bool| tensors.iter().filter(|t| t.1.0 == from && t.2.0 != from).map(|t| t.0).sum::<u64>();
            prop_assert_eq!((moved.out.0, moved.into.0), (crossed(false), crossed(true)));
            for (i, &(bytes, ..)) in tensors.iter().enumerate() {
                let mut found = vec![0; bytes as usize];
                spaces.read(&new.0, &new.1, TensorId(i as u32), 0, &mut found);
                prop_assert!(found.iter().enumerate().all(|(at, &byte)| byte == value(i, at)), "t{}", i);
            }
        }
    }

    /// A tensor of four slots, the first `waiting` of which are on the host.
    fn parted(waiting: u64) -> (ProgramSet, Placement) {
        let parts = [(1000, false, 0, 0), (1000, true, 0, 0)];
        let (mut set, mut placement) = plan(&parts);
        let counts = [4 - waiting, waiting];
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
    fn slots_that_wait_on_the_host_in_one_plan_and_not_in_the_other_keep_every_bit() {
        for (before, after) in (0..=4).flat_map(|before| (0..=4).map(move |after| (before, after))) {
            let (old, new) = (parted(before), parted(after));
            let mut spaces = Spaces::map(&old.1, None).unwrap();
            // Slot `n` of the whole: those that wait come first.
            let at = |plan: &(ProgramSet, Placement), waiting: u64, slot: u64| {
                let name = if slot >= waiting || waiting == 4 { "w" } else { "w.host" };
                let within = if slot >= waiting { slot - waiting } else { slot };
                (plan.0.find(name).unwrap(), within as u32)
            };
            for slot in 0..4 {
                let (id, within) = at(&old, before, slot);
                spaces.write(&old.0, &old.1, id, within, &[slot as u8 + 1; 1000]);
            }
            let moved = spaces.adopt((&old.0, &old.1), (&new.0, &new.1)).unwrap();
            let crossed = |from: u64, to: u64| to.saturating_sub(from) * 1000;
            assert_eq!((moved.out.0, moved.into.0), (crossed(before, after), crossed(after, before)));
            for slot in 0..4 {
                let (id, within) = at(&new, after, slot);
                let mut found = [0; 1000];
                spaces.read(&new.0, &new.1, id, within, &mut found);
                assert_eq!(found, [slot as u8 + 1; 1000], "slot {slot}, {before} -> {after}");
            }
        }
    }

    #[test]
    fn a_plan_that_is_refused_leaves_the_old_one() {
        let old = plan(&[(5000, false, 0, 0), (3000, false, 1, 0)]);
        let mut new = plan(&[(5000, true, 0, 0), (3000, false, 1, 0)]);
        new.1.host_bytes = 1 << 60;
        let mut spaces = Spaces::map(&old.1, None).unwrap();
        spaces.write(&old.0, &old.1, TensorId(0), 0, &[7; 5000]);
        assert!(matches!(spaces.adopt((&old.0, &old.1), (&new.0, &new.1)), Err(DeviceError::Arena(_))));
        assert_eq!((spaces.bytes(Space::Device), spaces.bytes(Space::Host)), (Bytes(8000), Bytes(0)));
        let mut found = [0; 5000];
        spaces.read(&old.0, &old.1, TensorId(0), 0, &mut found);
        assert_eq!(found, [7; 5000]);
        new.0.tensors[0].shape = vec![4999];
        new.1.host_bytes = 5000;
        let refused = spaces.adopt((&old.0, &old.1), (&new.0, &new.1));
        assert!(matches!(refused, Err(DeviceError::OtherShape { .. })));
    }
}
