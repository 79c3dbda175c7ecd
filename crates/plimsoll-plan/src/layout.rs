//! The layout of a device: the offset of every tensor in the arenas of the device and of its host, and in the scratch
//! file.
//!
//! Persistent tensors are at the bottom: weights, then gradients, then optimizer state, which is offloaded first. Each
//! phase packs its own buffers above them, so all phases share the bytes there. Lifetimes come from `lifetimes`, the
//! packing itself from `packing`.

use crate::lifetimes::{Lifetimes, lifetimes, lifetimes_in};
use crate::memory_use::PhaseMemory;
use crate::packing::{self, Packing};
use plimsoll_core::{Bytes, Category, PerSpace, Space, WorkKind};
use plimsoll_program::{Lifetime, Placement, ProgramSet, TensorId};
use std::collections::BTreeMap;

/// Alignment of every buffer in bytes: enough for vector loads, also for the wide loads of GPUs.
pub const ALIGNMENT: u64 = 256;

/// The layout of one space: the arena of the device or of its host, or the scratch file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArenaLayout {
    /// Bytes of the arena: the end of the highest buffer.
    pub bytes: u64,
    /// Bytes of the persistent tensors, which are at the bottom of the arena.
    pub persistent_bytes: u64,
    /// Lower bound of `bytes`: no packing of the same tensors is smaller.
    pub lower_bound_bytes: u64,
    /// Most bytes of the arena in use during each kind of work, as `PhaseMemory` counts them. Empty for an unused
    /// space.
    pub by_program: BTreeMap<WorkKind, Bytes>,
    /// Bytes of each category at the moment with the most bytes of tensors: of equally full moments, the first one of
    /// the last such phase, as the measurement of the arena has it. Unused bytes count as workspace, so that the sum is
    /// `bytes`. Empty for an unused space.
    pub by_category: BTreeMap<Category, Bytes>,
}

/// The layout of all spaces of a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// The offset of each tensor in its space, in bytes.
    pub placement: Placement,
    /// The layout of the device's arena.
    pub device: ArenaLayout,
    /// The layout of the host's arena; of zero bytes if no tensor is on the host.
    pub host: ArenaLayout,
    /// The layout of the scratch file; of zero bytes if nothing is offloaded to it.
    pub file: ArenaLayout,
}

impl Layout {
    /// Returns the bytes of the two arenas and of the scratch file.
    pub fn bytes(&self) -> PerSpace<u64> {
        PerSpace { device: self.device.bytes, host: self.host.bytes, file: self.file.bytes }
    }
}

/// Rounds bytes up to [`ALIGNMENT`].
fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// A slot of a tensor, with its offset in bytes.
struct PlacedSlot {
    tensor: TensorId,
    slot: u32,
    offset: u64,
}

/// The persistent tensors of a space, placed one after another.
struct PersistentTensors {
    slots: Vec<PlacedSlot>,
    /// End of the last tensor in bytes, not rounded up; 0 without tensors.
    end: u64,
    /// End of the last tensor in bytes, rounded up to [`ALIGNMENT`].
    aligned_end: u64,
}

/// Places the persistent tensors of a space one after another. Weights, gradients and optimizer state come last, in
/// this order.
fn place_persistent(set: &ProgramSet, space: Space) -> PersistentTensors {
    let mut ids: Vec<TensorId> = (0..set.tensors.len() as u32)
        .map(TensorId)
        .filter(|&id| set.tensor(id).lifetime == Lifetime::Persistent && set.tensor(id).space == space)
        .collect();
    ids.sort_by_key(|&id| persistent_order(set.tensor(id).category));
    let mut placed = PersistentTensors { slots: Vec::new(), end: 0, aligned_end: 0 };
    for id in ids {
        let tensor = set.tensor(id);
        for slot in 0..tensor.slots {
            placed.slots.push(PlacedSlot { tensor: id, slot, offset: placed.aligned_end });
            placed.end = placed.aligned_end + tensor.bytes();
            placed.aligned_end = aligned(placed.end);
        }
    }
    placed
}

/// Returns a sort key of a category: persistent tensors are placed in ascending order of this key.
fn persistent_order(category: Category) -> u32 {
    match category {
        Category::Staging | Category::Communication | Category::Activation | Category::Workspace => 0,
        Category::Weight => 1,
        Category::Gradient => 2,
        Category::Optimizer => 3,
    }
}

/// Computes a lower bound of the bytes of each space for any layout of these Programs, without packing them.
pub fn lower_bounds(set: &ProgramSet) -> PerSpace<u64> {
    let spaces = PerSpace::SPACES.into_array();
    let persistent = spaces.map(|space| place_persistent(set, space));
    let mut bounds = persistent.each_ref().map(|tensors| tensors.end);
    for phase in &set.phases {
        let lifetimes = lifetimes_in(set, phase, spaces);
        for ((bound, tensors), Lifetimes { buffers, .. }) in bounds.iter_mut().zip(&persistent).zip(&lifetimes) {
            if !buffers.is_empty() {
                *bound = (*bound).max(tensors.aligned_end + packing::lower_bound(buffers, ALIGNMENT));
            }
        }
    }
    let [device, host, file] = bounds;
    PerSpace { device, host, file }
}

/// Lays out all tensors of a device's Programs: persistent tensors at the bottom of each space, and the buffers of each
/// phase above them.
pub fn lay_out(set: &ProgramSet) -> Layout {
    let mut offsets: Vec<Vec<Option<u64>>> = set.tensors.iter().map(|t| vec![None; t.slots as usize]).collect();
    let device = lay_out_space(set, Space::Device, &mut offsets);
    let [host, file] = [Space::Host, Space::Scratch].map(|space| {
        let is_used = set.tensors.iter().any(|tensor| tensor.space == space);
        if is_used { lay_out_space(set, space, &mut offsets) } else { ArenaLayout::default() }
    });
    let placement = Placement { offsets, arena_bytes: device.bytes, host_bytes: host.bytes, file_bytes: file.bytes };
    Layout { placement, device, host, file }
}

/// Lays out one space, and stores the offsets of its tensors in `offsets`, by tensor and slot.
fn lay_out_space(set: &ProgramSet, space: Space, offsets: &mut [Vec<Option<u64>>]) -> ArenaLayout {
    let PersistentTensors { slots, end, aligned_end } = place_persistent(set, space);
    for PlacedSlot { tensor, slot, offset } in slots {
        offsets[tensor.0 as usize][slot as usize] = Some(offset);
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

    let mut by_program: BTreeMap<WorkKind, Bytes> = BTreeMap::new();
    let (mut bytes, mut lower_bound_bytes) = (end, end);
    for (lifetimes, packing) in &phases {
        if !lifetimes.buffers.is_empty() {
            bytes = bytes.max(aligned_end + packing.bytes);
            lower_bound_bytes = lower_bound_bytes.max(aligned_end + packing.lower_bound);
        }
        for (slots, &offset) in lifetimes.slots.iter().zip(&packing.offsets) {
            for &(id, slot) in slots {
                offsets[id.0 as usize][slot as usize] = Some(aligned_end + offset);
            }
        }
        let memory = PhaseMemory::new(lifetimes, phase_top(end, aligned_end, packing));
        for program in &lifetimes.programs {
            let entry = by_program.entry(program.work).or_default();
            *entry = (*entry).max(Bytes(memory.most_between(program.first, program.last)));
        }
    }
    if by_program.contains_key(&WorkKind::Update) {
        // Recipes with the same offload have the same persistent tensors at the same offsets. So a change of recipe
        // between steps moves nothing, and needs the persistent tensors only.
        by_program.insert(WorkKind::Replan, Bytes(end));
    }
    let no_buffers = [Lifetimes::default()];
    let candidates = no_buffers.iter().chain(phases.iter().map(|(lifetimes, _)| lifetimes));
    let (memory, lifetimes) = candidates
        .map(|lifetimes| (PhaseMemory::new(lifetimes, bytes), lifetimes))
        .max_by_key(|(memory, _)| memory.most_live())
        .expect("there is at least the candidate without buffers");
    let by_category = memory.by_category(set, space, lifetimes, memory.fullest_tick());
    ArenaLayout { bytes, persistent_bytes: end, lower_bound_bytes, by_program, by_category }
}

/// Returns the end of the highest buffer while a phase runs, in bytes. Persistent tensors end at `end`, and the buffers
/// of the phase begin at `aligned_end`.
fn phase_top(end: u64, aligned_end: u64, packing: &Packing) -> u64 {
    if packing.offsets.is_empty() { end } else { aligned_end + packing.bytes }
}
