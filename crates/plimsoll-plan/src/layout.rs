//! Where every tensor stands: the arenas of a device and of its host side, and the scratch file, laid out byte by byte.
//!
//! Persistent tensors stand lowest, those that would leave first (optimizer state) highest among
//! them. Above, every phase packs its own buffers: phases share those bytes.

use crate::lifetimes::{Lifetimes, lifetimes, lifetimes_in};
use crate::packing::{self, Packing};
use plimsoll_core::{Bytes, Category, Space, WorkName};
use plimsoll_program::{Lifetime, Placement, ProgramSet, TensorId};
use std::collections::BTreeMap;

/// Every buffer starts at a multiple of this: enough for vector loads, and for GPUs' wide ones.
pub const ALIGNMENT: u64 = 256;

/// One space: the arena of the device, that of its host side, or the scratch file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArenaLayout {
    /// Just past the last byte that any Program uses.
    pub bytes: u64,
    /// Bytes of tensors that are there for the whole run.
    pub persistent_bytes: u64,
    /// No packing can be smaller than this.
    pub lower_bound_bytes: u64,
    /// Peak of the arena while each kind of Program runs.
    pub by_program: BTreeMap<WorkName, Bytes>,
    /// Bytes by category at the moment the arena is fullest.
    pub by_category: BTreeMap<Category, Bytes>,
}

/// All spaces of a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// Where everything stands.
    pub placement: Placement,
    /// The device's own arena.
    pub device: ArenaLayout,
    /// The arena on the host; empty where nothing waits there.
    pub host: ArenaLayout,
    /// The scratch file; empty where nothing waits there.
    pub file: ArenaLayout,
}

fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Persistent tensors of a space in the order in which they stand, with their first bytes; and where they end,
/// rounded up and not.
fn persistent(set: &ProgramSet, space: Space) -> (Vec<(TensorId, u32, u64)>, u64, u64) {
    let rank = |category: Category| match category {
        Category::Staging | Category::Communication | Category::Activation | Category::Workspace => 0,
        Category::Weight => 1,
        Category::Gradient => 2,
        Category::Optimizer => 3,
    };
    let mut ids: Vec<TensorId> = (0..set.tensors.len() as u32)
        .map(TensorId)
        .filter(|&id| set.tensor(id).lifetime == Lifetime::Persistent && set.tensor(id).space == space)
        .collect();
    ids.sort_by_key(|&id| rank(set.tensor(id).category));
    let mut places = Vec::new();
    let (mut next, mut end) = (0, 0);
    for id in ids {
        let tensor = set.tensor(id);
        for slot in 0..tensor.slots {
            places.push((id, slot, next));
            end = next + tensor.bytes();
            next = aligned(end);
        }
    }
    (places, next, end)
}

/// The least that any layout of these Programs can take in the device's arena, in that of its host side, and in the
/// scratch file, without packing them.
pub fn lower_bounds(set: &ProgramSet) -> [u64; 3] {
    let spaces = [Space::Device, Space::Host, Space::Scratch];
    let stays = spaces.map(|space| persistent(set, space));
    let mut bounds = [0, 1, 2].map(|number| stays[number].2);
    for phase in &set.phases {
        let found = lifetimes_in(set, phase, spaces);
        for ((bound, (_, start, _)), Lifetimes { buffers, .. }) in bounds.iter_mut().zip(&stays).zip(&found) {
            if !buffers.is_empty() {
                *bound = (*bound).max(start + packing::lower_bound(buffers, ALIGNMENT));
            }
        }
    }
    bounds
}

/// Lays out all Programs of a device.
pub fn lay_out(set: &ProgramSet) -> Layout {
    let mut offsets: Vec<Vec<Option<u64>>> = set.tensors.iter().map(|t| vec![None; t.slots as usize]).collect();
    let device = arena(set, Space::Device, &mut offsets);
    let [host, file] = [Space::Host, Space::Scratch].map(|space| {
        let waits = set.tensors.iter().any(|tensor| tensor.space == space);
        if waits { arena(set, space, &mut offsets) } else { ArenaLayout::default() }
    });
    let placement = Placement { offsets, arena_bytes: device.bytes, host_bytes: host.bytes, file_bytes: file.bytes };
    Layout { placement, device, host, file }
}

/// Lays out one space, and writes down where everything in it stands.
fn arena(set: &ProgramSet, space: Space, offsets: &mut [Vec<Option<u64>>]) -> ArenaLayout {
    let (places, start, end) = persistent(set, space);
    for (id, slot, offset) in places {
        offsets[id.0 as usize][slot as usize] = Some(offset);
    }
    let phases: Vec<(Lifetimes, Packing)> = set
        .phases
        .iter()
        .map(|phase| {
            let lifetimes = lifetimes(set, phase, space);
            let packing = packing::pack(&lifetimes.buffers, ALIGNMENT);
            (lifetimes, packing)
        })
        .collect();

    let mut by_program: BTreeMap<WorkName, Bytes> = BTreeMap::new();
    let (mut bytes, mut lower_bound_bytes) = (end, end);
    for (lifetimes, packing) in &phases {
        if !lifetimes.buffers.is_empty() {
            bytes = bytes.max(start + packing.bytes);
            lower_bound_bytes = lower_bound_bytes.max(start + packing.lower_bound);
        }
        for (slots, &offset) in lifetimes.slots.iter().zip(&packing.offsets) {
            for &(id, slot) in slots {
                offsets[id.0 as usize][slot as usize] = Some(start + offset);
            }
        }
        for &(work, first, last) in &lifetimes.programs {
            let peak = lifetimes
                .buffers
                .iter()
                .zip(&packing.offsets)
                .filter(|(b, _)| b.first <= last && b.last >= first)
                .map(|(b, offset)| start + offset + b.bytes)
                .fold(end, u64::max);
            let entry = by_program.entry(work).or_default();
            *entry = (*entry).max(Bytes(peak));
        }
    }
    if by_program.contains_key(&WorkName::Update) {
        // Recipes that offload the same have the same persistent tensors at the same places, so that going from one
        // to another between steps moves nothing and needs nothing but them.
        by_program.insert(WorkName::Replan, Bytes(end));
    }
    let by_category = by_category(set, space, &phases, bytes);
    ArenaLayout { bytes, persistent_bytes: end, lower_bound_bytes, by_program, by_category }
}

/// Bytes by category at the tick at which most is live, in the phase whose packing is largest.
/// What alignment and packing leave unused is counted as workspace, so that the sum is the arena.
fn by_category(
    set: &ProgramSet,
    space: Space,
    phases: &[(Lifetimes, Packing)],
    arena_bytes: u64,
) -> BTreeMap<Category, Bytes> {
    let mut sums: BTreeMap<Category, Bytes> = BTreeMap::new();
    for tensor in set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.space == space) {
        *sums.entry(tensor.category).or_default() += Bytes(tensor.bytes() * u64::from(tensor.slots));
    }
    if let Some((lifetimes, _)) = phases.iter().max_by_key(|(_, packing)| packing.bytes) {
        let mut change: BTreeMap<u32, i64> = BTreeMap::new();
        for b in &lifetimes.buffers {
            *change.entry(b.first).or_default() += b.bytes as i64;
            *change.entry(b.last + 1).or_default() -= b.bytes as i64;
        }
        let (mut live, mut peak) = (0, (0, 0));
        for (tick, delta) in change {
            live += delta;
            if live > peak.1 {
                peak = (tick, live);
            }
        }
        for (buffer, slots) in lifetimes.buffers.iter().zip(&lifetimes.slots) {
            if buffer.first <= peak.0 && buffer.last >= peak.0 {
                *sums.entry(set.tensor(slots[0].0).category).or_default() += Bytes(buffer.bytes);
            }
        }
    }
    let counted: Bytes = sums.values().copied().sum();
    *sums.entry(Category::Workspace).or_default() += Bytes(arena_bytes).saturating_sub(counted);
    sums
}
