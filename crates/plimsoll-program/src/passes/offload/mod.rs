//! Offload: moves tensors to host memory and adds the copies that bring them to the device when an op needs them.
//!
//! - An offloaded tensor gets a *host tensor*. Ops of the device access it through a *staging ring*: a few buffers on
//!   the device that all layers share.
//! - The pass splits a Program into *work units*: a layer, or a piece of a tensor in the update. The copy into the ring
//!   starts one unit ahead, and the copy back starts as soon as the unit has written. Copies overlap with compute.
//! - The host itself runs ops without device arithmetic on host tensors: fills, random numbers, casts between files and
//!   host tensors, and embedding rows.
//! - If the host updates parameters ([`Offload::update`]), the directions are swapped: gradients come to the host and
//!   new weights go back, through a ring in host memory.
//!
//! Ops, numbers and the order of sums stay the same, so no bit changes. The one exception is the gradient of an
//! offloaded embedding: the host adds its rows in the order of its own kernel. The update is elementwise: kernels that
//! round alike give the same bits on host and device.
//!
//! The pass unrolls the blocks that it changes, so that every operand has a fixed slot. Two kinds of blocks stay
//! rolled: those that only move files, and those that process rows of the loss one after another.
//!
//! | module | contents |
//! |---|---|
//! | `host_tensors` | which tensors and slots move, and where an operand then is |
//! | `work_units` | which ops run together, on device or host, and which host regions they use |
//! | `staging_rings` | the rings, with their fetches and write-backs |
//! | `host_work` | the ops that the host runs |

mod host_tensors;
mod host_work;
mod staging_rings;
mod work_units;

use self::host_tensors::Offloader;
use self::staging_rings::StagingRing;
use self::work_units::{Processor, Region};
use crate::formats::STATE_BLOCK;
use crate::op::operands::{elements_mut, operands_mut};
use crate::op::{Op, OpKind};
use crate::passes::scratch_file::FILE_SUFFIX;
use crate::program::{Block, Program, ProgramKind, ProgramSet};
use crate::tensor::{Lifetime, Tensor, TensorId};
use foldhash::{HashMap, HashSet};
use plimsoll_core::{Offload, WorkKind};
use std::ops::RangeInclusive;

/// Smallest and largest number of elements of a piece. The optimizer update moves offloaded tensors through the device
/// in pieces, of which a few are on the device at once.
const PIECE_ELEMENTS: RangeInclusive<u64> = 1 << 20..=1 << 25;
/// Number of pieces in which the update processes the largest matrix of a layer, within the limits of
/// [`PIECE_ELEMENTS`].
const PIECES_PER_MATRIX: u64 = 4;
/// Pieces of a tensor in the update start at multiples of this many elements, a multiple of every quantization block.
const PIECE_ALIGNMENT: u64 = 1 << 12;
/// Ratio that decides which tensors, such as norms and biases, are too small for offload. They have less than 1/32 of
/// the bytes of the largest layer tensor of their category.
const SMALL_TENSOR_FACTOR: u64 = 32;

/// Name suffix of the tensor in host memory that holds some slots (layers) of a device tensor.
pub(super) const HOST_SUFFIX: &str = ".host";

/// The origin of a tensor after offload, which splits the slots (layers) of a tensor into one tensor per memory space.
/// The origin tells which slots of the unsplit tensor such a part holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorOrigin<'a> {
    /// Name of the unsplit tensor, as in a plan without offload.
    pub name: &'a str,
    /// Slot of the unsplit tensor that is slot 0 here; the others follow.
    pub first_slot: u32,
}

/// Returns the origin of each tensor of a set, indexed by [`TensorId`].
///
/// Two plans may offload different layers. When a run changes its plan, origins tell which tensors and slots hold the
/// same values in both.
pub fn tensor_origins(set: &ProgramSet) -> Vec<TensorOrigin<'_>> {
    let mut slots_before: HashMap<&str, [u32; 3]> = HashMap::default();
    for tensor in &set.tensors {
        if let Some((length, part)) = part_of(tensor) {
            let counts = slots_before.entry(&tensor.name[..length]).or_default();
            counts.iter_mut().skip(part + 1).for_each(|count| *count += tensor.slots);
        }
    }
    let origins = set.tensors.iter().map(|tensor| match part_of(tensor) {
        Some((length, part)) => {
            let name = &tensor.name[..length];
            TensorOrigin { name, first_slot: slots_before[name][part] }
        }
        None => TensorOrigin { name: &tensor.name, first_slot: 0 },
    });
    origins.collect()
}

/// Returns the length of the unsplit tensor's name, and which part `tensor` is: 0 in the scratch file, 1 in host
/// memory, 2 on the device. Returns `None` for tensors that are not persistent.
fn part_of(tensor: &Tensor) -> Option<(usize, usize)> {
    // A split tensor has its first slots in the scratch file (part 0), then in host memory (1), then on the device (2).
    match &tensor.name {
        _ if tensor.lifetime != Lifetime::Persistent => None,
        name if name.ends_with(FILE_SUFFIX) => Some((name.len() - FILE_SUFFIX.len(), 0)),
        name if name.ends_with(HOST_SUFFIX) => Some((name.len() - HOST_SUFFIX.len(), 1)),
        name => Some((name.len(), 2)),
    }
}

/// Moves the tensors that `offload` names to host memory, and adds the copies to and from the device.
///
/// `layers` is the number of layers that the device computes. `one_micro_batch` says that a step has one micro-batch:
/// offloaded gradients then start from zero in the backward pass and need not be fetched.
pub fn offload(set: &ProgramSet, layers: u32, offload: &Offload, one_micro_batch: bool) -> ProgramSet {
    offload_programs(set, layers, offload, one_micro_batch, &|_| true)
}

/// Does the same as [`offload`], and leaves out the Programs for which `wanted` is false. The planner's search thus
/// rewrites only the Programs whose time it predicts.
pub fn offload_programs(
    set: &ProgramSet,
    layers: u32,
    offload: &Offload,
    one_micro_batch: bool,
    wanted: &dyn Fn(ProgramKind) -> bool,
) -> ProgramSet {
    let mut offloader = Offloader::new(set, wanted, offload.update);
    if !offload.is_nothing() {
        offloader.set_piece_elements(layers);
        offloader.place_on_host(layers, offload);
        offloader.move_inputs_to_host();
        offloader.drop_device_workspaces();
    }
    if one_micro_batch {
        offloader.zero_gradients_in_backward();
    }
    for number in 0..offloader.set.programs.len() {
        let blocks = offloader.blocks_before(number);
        let touches_host = blocks.iter().flat_map(|block| &block.ops).any(|op| offloader.touches_host(op));
        offloader.set.programs[number].blocks =
            if touches_host { ProgramRewriter::rewrite(&mut offloader, number) } else { blocks.to_vec() };
    }
    offloader.set
}

/// The state of the offload pass while it rewrites one Program.
struct ProgramRewriter<'a, 's> {
    offloader: &'a mut Offloader<'s>,
    program: ProgramKind,
    work: WorkKind,
    /// Staging rings, ordered by name.
    rings: Vec<StagingRing>,
    /// Index of the ring through which each offloaded tensor passes.
    ring_of: HashMap<TensorId, usize>,
    /// Host tensor with a current copy of a range of a device tensor, by that range.
    host_copies: HashMap<Region, TensorId>,
    /// Ranges of offloaded gradients that the backward pass has already started from zero in a staging ring.
    zeroed: HashSet<Region>,
    /// Sequence number of the last copy.
    sequence: u64,
    /// Finished blocks.
    blocks: Vec<Block>,
    /// Ops of the block under construction.
    ops: Vec<Op>,
}

impl ProgramRewriter<'_, '_> {
    /// Returns the blocks, after offload and with the copies, of the Program with index `number` in the set.
    fn rewrite(offloader: &mut Offloader<'_>, number: usize) -> Vec<Block> {
        let Program { kind: program, work, .. } = offloader.set.programs[number];
        let mut rewriter = ProgramRewriter {
            offloader,
            program,
            work,
            rings: Vec::new(),
            ring_of: HashMap::default(),
            host_copies: HashMap::default(),
            zeroed: HashSet::default(),
            sequence: 0,
            blocks: Vec::new(),
            ops: Vec::new(),
        };
        let mut units = rewriter.work_units(number);
        rewriter.create_rings(&units);
        for at in 0..units.len() {
            let blocks = std::mem::take(&mut units[at].blocks);
            let variable = blocks[0].first;
            match units[at].processor {
                Processor::Host => rewriter.rewrite_host_unit(&units[at].name, blocks),
                Processor::Device | Processor::HostUpdate => rewriter.rewrite_unit(&units, at, blocks),
            }
            if at + 1 == units.len() {
                rewriter.evict_all();
            }
            rewriter.flush(&units[at].name, variable);
        }
        rewriter.blocks.shrink_to_fit();
        rewriter.blocks
    }

    /// Takes the ops of the block under construction. The next block probably has as many.
    fn take_ops(&mut self) -> Vec<Op> {
        let next = Vec::with_capacity(self.ops.len());
        let mut ops = std::mem::replace(&mut self.ops, next);
        ops.shrink_to_fit();
        ops
    }

    /// Adds the block under construction to the finished ones, unless it has no ops. It is the iteration of the block
    /// `name` in which the variable has the value `variable`.
    fn flush(&mut self, name: &str, variable: i64) {
        if !self.ops.is_empty() {
            let ops = self.take_ops();
            self.blocks.push(Block::iteration(name, variable, ops));
        }
    }
}

/// Returns the element count of an elementwise op, which a pass may split into pieces, and `None` for all other ops.
pub(super) fn elementwise_count(op: &Op) -> Option<u64> {
    match op.kind {
        OpKind::AdamW { elements, .. }
        | OpKind::AdamW8 { elements, .. }
        | OpKind::Sgd { elements, .. }
        | OpKind::Cast { elements, .. }
        | OpKind::Fill { elements, .. }
        | OpKind::InitNormal { elements, .. }
        | OpKind::InitUniform { elements, .. } => Some(elements),
        _ => None,
    }
}

/// Returns an elementwise op restricted to `count` of its `total` elements, from element `first` on. `first` must be a
/// multiple of every quantization block. `elements_of` gives the elements of a tensor's slot.
pub(super) fn slice_of(op: &Op, total: u64, first: u64, count: u64, elements_of: &dyn Fn(TensorId) -> u64) -> Op {
    let (accesses, mut op) = (op.accesses(elements_of), op.clone());
    for operand in operands_mut(&mut op.kind) {
        let access = accesses.iter().find(|access| access.operand == *operand).expect("an op accesses all operands");
        // Operands have one element per element, or one scale per block, or are scalars.
        operand.offset.base += match access.elements {
            elements if elements == total => first as i64,
            elements if elements == total.div_ceil(STATE_BLOCK) => (first / STATE_BLOCK) as i64,
            _ => 0,
        };
    }
    if let OpKind::InitNormal { first: number, .. } | OpKind::InitUniform { first: number, .. } = &mut op.kind {
        number.base += first as i64;
    }
    *elements_mut(&mut op.kind).expect("an elementwise op has an element count") = count;
    op
}
