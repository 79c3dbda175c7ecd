//! Scratch file: moves some of the offloaded tensors from host memory on to a file.
//!
//! The pass runs after [`super::offload`] and changes only where tensors are: the same ops use them. Data between file
//! and device passes through *windows*, a few buffers in memory:
//!
//! ```text
//!   file ──read──► window ──copy in──► ring on the device       file ◄──write── window ◄──copy out── ring
//! ```
//!
//! Elementwise host ops on a file tensor run in windows too: read, compute, write back. Reads and writes have their own
//! queues. Waits follow from the bytes of windows and file, so that the file is read ahead as far as windows and rings
//! allow.
//!
//! The same ops run on the same numbers: no bit changes.

use crate::op::operands::{operands, operands_mut};
use crate::op::{Mode, Op, OpKind, Queue};
use crate::passes::offload::{HOST_SUFFIX, elementwise_count, slice_of};
use crate::program::{Block, ProgramKind, ProgramSet};
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId, TensorRole};
use foldhash::{HashMap, HashSet};
use plimsoll_core::{Category, DType, ScratchOffload, Space};
use std::collections::BTreeMap;

/// Largest number of elements of a window (a buffer between file and device): enough for the full rate of a disk, and
/// small beside a layer.
const WINDOW_ELEMENTS: u64 = 1 << 21;
/// Number of windows (buffers) of a ring: while one is read from the file, one is in use and one is written to the
/// file.
const WINDOWS: u32 = 3;

/// Name suffix of the tensor in the scratch file that holds some slots (layers) of an offloaded tensor.
pub(super) const FILE_SUFFIX: &str = ".file";

/// Moves the offloaded tensors that `in_file` names from host memory on to the scratch file, and adds the copies. It
/// runs after the offload pass.
///
/// `layers` is the number of layers that the device computes. Data between file and device passes through windows, a
/// few buffers in memory space `memory`: the host, or the device if it is a CPU. In the second case all other host
/// tensors move to the device space as well.
pub fn move_to_scratch_file(mut set: ProgramSet, layers: u32, in_file: ScratchOffload, memory: Space) -> ProgramSet {
    let mut scratch = ScratchFile { memory, placements: HashMap::default() };
    if !in_file.is_nothing() {
        scratch.place_in_file(&mut set, layers, in_file);
    }
    for number in 0..set.programs.len() {
        let is_moved = |operand: Operand| scratch.placements.contains_key(&operand.tensor);
        let program = &set.programs[number];
        if program.blocks.iter().flat_map(|block| &block.ops).any(|op| operands(op).any(is_moved)) {
            let (kind, blocks) = (program.kind, std::mem::take(&mut set.programs[number].blocks));
            set.programs[number].blocks = ProgramRewriter::rewrite_blocks(&scratch, &mut set, kind, &blocks);
        }
    }
    if memory == Space::Device {
        set.tensors.iter_mut().filter(|t| t.space == Space::Host).for_each(|t| t.space = Space::Device);
        let ops = set.programs.iter_mut().flat_map(|program| &mut program.blocks).flat_map(|block| &mut block.ops);
        ops.filter(|op| op.queue == Queue::Host).for_each(|op| op.queue = Queue::Compute);
    }
    set
}

/// Returns the number of slots (layers) of a tensor that move to the scratch file, its first ones.
fn slots_in_file(tensor: &Tensor, layers: u32, in_file: ScratchOffload) -> u32 {
    if tensor.lifetime != Lifetime::Persistent || tensor.space != Space::Host {
        return 0;
    }
    match (tensor.category, tensor.role()) {
        (Category::Optimizer, TensorRole::Embedding | TensorRole::Head) => {
            u32::from(in_file.optimizer >= layers) * tensor.slots
        }
        // The host looks up embedding rows in memory, and the device fetches the whole head.
        (_, TensorRole::Embedding | TensorRole::Head) => 0,
        (Category::Optimizer, _) => in_file.optimizer.min(tensor.slots),
        (Category::Gradient, _) => in_file.gradients.min(tensor.slots),
        (Category::Weight, _) => in_file.weights.min(tensor.slots),
        _ => 0,
    }
}

/// The tensor in the scratch file to which the first `in_file` slots (layers) of a host tensor have moved. The other
/// slots stay in host memory, renumbered from 0.
#[derive(Clone, Copy)]
struct FilePlacement {
    tensor: TensorId,
    in_file: u32,
    /// Slots of the host tensor before the move.
    slots: u32,
}

/// The tensors that the pass has moved to the scratch file, and the memory space of the windows (the buffers through
/// which their data passes).
struct ScratchFile {
    memory: Space,
    placements: HashMap<TensorId, FilePlacement>,
}

impl ScratchFile {
    fn place_in_file(&mut self, set: &mut ProgramSet, layers: u32, wanted: ScratchOffload) {
        for number in 0..set.tensors.len() {
            let slots = set.tensors[number].slots;
            let in_file = slots_in_file(&set.tensors[number], layers, wanted);
            if in_file == 0 {
                continue;
            }
            let id = TensorId(number as u32);
            let tensor = if in_file == slots {
                set.tensors[number].space = Space::Scratch;
                id
            } else {
                let tensor = &mut set.tensors[number];
                tensor.slots -= in_file;
                let name = tensor.name.strip_suffix(HOST_SUFFIX).unwrap_or(&tensor.name);
                let name = format!("{name}{FILE_SUFFIX}");
                let file_tensor = Tensor { name, space: Space::Scratch, slots: in_file, ..tensor.clone() };
                set.tensors.push(file_tensor);
                TensorId(set.tensors.len() as u32 - 1)
            };
            self.placements.insert(id, FilePlacement { tensor, in_file, slots });
        }
    }

    /// Returns an op with each operand replaced by its place after the move: in the file, or in a renumbered slot.
    fn relocated(&self, op: &Op) -> Op {
        let mut op = op.clone();
        for operand in operands_mut(&mut op.kind) {
            let Some(placement) = self.placements.get(&operand.tensor) else { continue };
            assert!(operand.slot.scale == 0, "ops on offloaded tensors are unrolled");
            let slot = operand.slot.base.rem_euclid(i64::from(placement.slots));
            if slot < i64::from(placement.in_file) {
                (operand.tensor, operand.slot) = (placement.tensor, Index::fixed(slot));
            } else {
                operand.slot = Index::fixed(slot - i64::from(placement.in_file));
            }
        }
        op
    }
}

/// The purpose of a window (a buffer between the scratch file and a device or host op). Each purpose and dtype has its
/// own ring of windows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WindowUse {
    /// Data on its way from the file to another memory space.
    Read,
    /// Data on its way from another memory space to the file.
    Write,
    /// Range of a file tensor on which the host runs ops, by its number among the ranges that these ops use.
    Operand(usize),
}

/// A ring of windows (buffers of one purpose and dtype) that are used in turn, as slots of one tensor.
struct WindowRing {
    tensor: TensorId,
    next: i64,
}

/// A range of a tensor in the scratch file, and the window in memory through which host ops access it.
struct OpenWindow {
    file: Operand,
    window: Operand,
    elements: u64,
    written: bool,
}

/// The state of the scratch-file pass while it rewrites one Program.
struct ProgramRewriter<'a> {
    scratch: &'a ScratchFile,
    set: &'a mut ProgramSet,
    program: ProgramKind,
    rings: BTreeMap<(WindowUse, DType), WindowRing>,
    /// Sequence numbers of the original copies that are replaced by copies through windows. As the new copies have
    /// waits of their own, the wait of each original copy is dropped.
    completed: HashSet<u64>,
    /// Sequence number of the last copy.
    sequence: u64,
    /// Ops of the block under construction.
    ops: Vec<Op>,
}

impl ProgramRewriter<'_> {
    /// Returns the blocks of a Program after tensors moved to the scratch file. Its ops use the new places, and copies
    /// between windows and file are added. Blocks that touch the file are unrolled.
    fn rewrite_blocks(
        scratch: &ScratchFile,
        set: &mut ProgramSet,
        program: ProgramKind,
        rolled: &[Block],
    ) -> Vec<Block> {
        let sequences = rolled.iter().flat_map(|block| &block.ops).filter_map(|op| match op.kind {
            OpKind::TransferStart { sequence, .. } => Some(sequence),
            _ => None,
        });
        let sequence = sequences.max().unwrap_or(0);
        let (rings, completed) = (BTreeMap::new(), HashSet::default());
        let mut rewriter = ProgramRewriter { scratch, set, program, rings, completed, sequence, ops: vec![] };
        let mut blocks = Vec::new();
        for block in rolled {
            let relocated: Vec<Op> = block.ops.iter().map(|op| scratch.relocated(op)).collect();
            if !relocated.iter().any(|op| rewriter.touches_file(op)) {
                blocks.push(Block { ops: relocated, ..block.clone() });
                continue;
            }
            // Iterations use different windows, so the block is unrolled.
            for variable in block.variables() {
                let unrolled: Vec<Op> = relocated.iter().map(|op| op.iteration(variable)).collect();
                let groups: Vec<&[Op]> = unrolled.chunk_by(|a, b| rewriter.share_windows(a, b)).collect();
                groups.into_iter().for_each(|ops| rewriter.rewrite_ops(ops));
                blocks.push(Block::iteration(&block.name, variable, rewriter.ops.drain(..).collect()));
            }
        }
        blocks
    }

    fn space(&self, operand: Operand) -> Space {
        self.set.tensor(operand.tensor).space
    }

    fn is_in_file(&self, operand: Operand) -> bool {
        self.space(operand) == Space::Scratch
    }

    fn touches_file(&self, op: &Op) -> bool {
        operands(op).any(|operand| self.is_in_file(operand))
    }

    /// Returns whether two ops are both elementwise host ops on file tensors, with equal element counts. Both then run
    /// on the same windows (buffers) before these are written back to the file.
    fn share_windows(&self, a: &Op, b: &Op) -> bool {
        let runs_in_windows = |op: &Op| op.queue == Queue::Host && self.touches_file(op);
        let elements = |op: &Op| elementwise_count(op).filter(|_| runs_in_windows(op));
        elements(a).is_some() && elements(a) == elements(b)
    }

    /// Appends one op, or several that share windows (buffers), with the copies to and from the file.
    fn rewrite_ops(&mut self, ops: &[Op]) {
        match &ops[0].kind {
            OpKind::TransferStart { from, to, elements, sequence } if self.touches_file(&ops[0]) => {
                self.rewrite_copy(&ops[0], *from, *to, *elements, *sequence);
            }
            OpKind::TransferWait { sequence, .. } if self.completed.remove(sequence) => {}
            OpKind::TransferWait { from, to, .. } if self.touches_file(&ops[0]) => {
                let queue = if self.is_in_file(*from) { Queue::FileRead } else { Queue::FileWrite };
                debug_assert!(self.is_in_file(*from) != self.is_in_file(*to), "no copy goes from the file to the file");
                self.ops.push(Op { queue, ..ops[0].clone() });
            }
            _ if self.touches_file(&ops[0]) => self.run_in_windows(ops),
            _ => self.ops.extend_from_slice(ops),
        }
    }

    /// Appends a copy that starts or ends in the file: directly if its other end is in the memory of the windows, else
    /// through windows.
    fn rewrite_copy(&mut self, op: &Op, from: Operand, to: Operand, elements: u64, sequence: u64) {
        let reads = self.is_in_file(from);
        let other_end = if reads { to } else { from };
        let file_queue = if reads { Queue::FileRead } else { Queue::FileWrite };
        if self.space(other_end) == self.scratch.memory {
            self.ops.push(Op { queue: file_queue, ..op.clone() });
            return;
        }
        self.completed.insert(sequence);
        let dtype = self.set.tensor(from.tensor).dtype;
        for first in (0..elements).step_by(WINDOW_ELEMENTS as usize) {
            let count = WINDOW_ELEMENTS.min(elements - first);
            let window = self.next_window(if reads { WindowUse::Read } else { WindowUse::Write }, dtype, count);
            let (into_window, out_of_window) = if reads { (file_queue, op.queue) } else { (op.queue, file_queue) };
            let first = Index::fixed(first as i64);
            self.copy(from.offset_by(first), window, count, into_window);
            self.copy(window, to.offset_by(first), count, out_of_window);
        }
    }

    /// Appends elementwise host ops on file tensors, window by window: read, compute, write back.
    fn run_in_windows(&mut self, ops: &[Op]) {
        let total = elementwise_count(&ops[0])
            .unwrap_or_else(|| panic!("bug: {} accesses the scratch file but is not elementwise", ops[0].name()));
        for first in (0..total).step_by(WINDOW_ELEMENTS as usize) {
            let count = WINDOW_ELEMENTS.min(total - first);
            let mut open: Vec<OpenWindow> = Vec::new();
            let mut slices = Vec::new();
            for op in ops {
                let slice = slice_of(op, total, first, count, &|id| self.set.tensor(id).elements());
                slices.push(self.with_windows(slice, &mut open));
            }
            self.ops.extend(slices);
            for OpenWindow { file, window, elements, .. } in open.into_iter().filter(|open| open.written) {
                self.copy(window, file, elements, Queue::FileWrite);
            }
        }
    }

    /// Returns an op with file operands replaced by windows (buffers in memory). Adds new windows to `open`, and
    /// appends their read from the file unless the op only writes them.
    fn with_windows(&mut self, mut op: Op, open: &mut Vec<OpenWindow>) -> Op {
        for access in op.accesses(&|id| self.set.tensor(id).elements()) {
            if !self.is_in_file(access.operand) {
                continue;
            }
            let written = access.mode != Mode::Read;
            if let Some(known) = open.iter_mut().find(|known| known.file == access.operand) {
                known.written |= written;
                continue;
            }
            let dtype = self.set.tensor(access.operand.tensor).dtype;
            let window = self.next_window(WindowUse::Operand(open.len()), dtype, access.elements);
            open.push(OpenWindow { file: access.operand, window, elements: access.elements, written });
            if access.mode != Mode::Write {
                self.copy(access.operand, window, access.elements, Queue::FileRead);
            }
        }
        for operand in operands_mut(&mut op.kind) {
            if let Some(known) = open.iter().find(|known| known.file == *operand) {
                *operand = known.window;
            }
        }
        op
    }

    /// Returns the next window (buffer) of the ring for a purpose. The ring is created, or enlarged to `elements`, if
    /// needed.
    fn next_window(&mut self, purpose: WindowUse, dtype: DType, elements: u64) -> Operand {
        let set = &mut *self.set;
        let ring = self.rings.entry((purpose, dtype)).or_insert_with(|| {
            let purpose = match purpose {
                WindowUse::Read => "in".to_owned(),
                WindowUse::Write => "out".to_owned(),
                WindowUse::Operand(number) => format!("at{number}"),
            };
            let name = format!("{}.window.{purpose}.{dtype}", self.program);
            let (space, category, lifetime) = (self.scratch.memory, Category::Staging, Lifetime::Transient);
            set.tensors.push(Tensor { name, shape: vec![0], dtype, space, category, lifetime, slots: WINDOWS });
            WindowRing { tensor: TensorId(set.tensors.len() as u32 - 1), next: 0 }
        });
        let capacity = &mut set.tensors[ring.tensor.0 as usize].shape[0];
        *capacity = elements.max(*capacity);
        let slot = ring.next;
        ring.next = (slot + 1) % i64::from(WINDOWS);
        Operand::slot(ring.tensor, slot)
    }

    /// Appends a copy and its wait on the same queue. Ops of other queues that touch the same bytes wait for it
    /// ([`crate::order`]).
    fn copy(&mut self, from: Operand, to: Operand, elements: u64, queue: Queue) {
        self.sequence += 1;
        let sequence = self.sequence;
        self.ops.push(Op { kind: OpKind::TransferStart { from, to, elements, sequence }, queue });
        self.ops.push(Op { kind: OpKind::TransferWait { from, to, elements, sequence }, queue });
    }
}
