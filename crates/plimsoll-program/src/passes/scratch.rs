//! The scratch file: of what waits on the host, some waits in a file where the host's memory is short.
//!
//! It comes after `offload`, and changes only where things stand: a tensor that waits in memory and one that waits in the
//! file are used by the same ops. What is copied between the file and the device passes through *windows*, a few buffers
//! in memory, a part at a time:
//!
//! ```text
//!   file ──read──► window ──copy in──► ring on the device       file ◄──write── window ◄──copy out── ring
//! ```
//! and what the host does element by element where a tensor is, it does in windows: read, done, written back. Reading
//! and writing have queues of their own; what waits for what follows from the bytes of windows and file, so that the file
//! is read ahead as far as there are windows and room in the rings behind them.
//!
//! The same ops run on the same numbers: no bit changes.

use crate::op::{Mode, Op, OpKind, Queue};
use crate::operands::{operands, operands_mut};
use crate::passes::offload::{by_element, part_of};
use crate::program::{Block, Program, ProgramSet};
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, DType, InFile, Space};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Elements of a window, at most: enough for the full rate of a disk, and little beside a layer.
const WINDOW: u64 = 1 << 21;
/// Windows of a kind: while one is read, one is at work and one is written.
const WINDOWS: u32 = 3;

/// The name of the part of a tensor that stands in the file begins with the tensor's, and ends so.
pub(super) const IN_FILE: &str = ".file";

/// Moves what `in_file` names from the host's memory to the scratch file. `layers` is the model's. Windows are in
/// `memory`: the host's, or the device's where the device is its own host; then everything else of the host's is there,
/// too.
pub fn scratch(mut set: ProgramSet, layers: u32, in_file: InFile, memory: Space) -> ProgramSet {
    let mut pass = Pass { memory, homes: HashMap::new() };
    if !in_file.is_nothing() {
        pass.move_homes(&mut set, layers, in_file);
    }
    for number in 0..set.programs.len() {
        let touches = |operand: Operand| pass.homes.contains_key(&operand.tensor);
        let program = &set.programs[number];
        if program.blocks.iter().flat_map(|block| &block.ops).any(|op| operands(op).any(touches)) {
            let program = program.clone();
            set.programs[number].blocks = Rewrite::program(&pass, &mut set, &program);
        }
    }
    if memory == Space::Device {
        set.tensors.iter_mut().filter(|t| t.space == Space::Host).for_each(|t| t.space = Space::Device);
        let ops = set.programs.iter_mut().flat_map(|program| &mut program.blocks).flat_map(|block| &mut block.ops);
        ops.filter(|op| op.queue == Queue::Host).for_each(|op| op.queue = Queue::Compute);
    }
    set
}

/// How many slots of a tensor stand in the file.
fn slots_in_file(tensor: &Tensor, layers: u32, in_file: InFile) -> u32 {
    if tensor.lifetime != Lifetime::Persistent || tensor.space != Space::Host {
        return 0;
    }
    let base = tensor.name.split('.').next().unwrap_or_default();
    match (tensor.category, base) {
        (Category::Optimizer, "embedding" | "head") => u32::from(in_file.optimizer >= layers) * tensor.slots,
        // The host looks up rows of the table where it is; the head comes and goes whole.
        (_, "embedding" | "head") => 0,
        (Category::Optimizer, _) => in_file.optimizer.min(tensor.slots),
        (Category::Gradient, _) => in_file.gradients.min(tensor.slots),
        (Category::Weight, _) => in_file.weights.min(tensor.slots),
        _ => 0,
    }
}

/// Where the slots of a tensor went: the first so many to the file, the others stay and are counted anew.
#[derive(Clone, Copy)]
struct Home {
    tensor: TensorId,
    in_file: u32,
    slots: u32,
}

struct Pass {
    memory: Space,
    homes: HashMap<TensorId, Home>,
}

impl Pass {
    fn move_homes(&mut self, set: &mut ProgramSet, layers: u32, wanted: InFile) {
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
                let name = tensor.name.strip_suffix(super::offload::HOME).unwrap_or(&tensor.name);
                let name = format!("{name}{IN_FILE}");
                let home = Tensor { name, space: Space::Scratch, slots: in_file, ..tensor.clone() };
                set.tensors.push(home);
                TensorId(set.tensors.len() as u32 - 1)
            };
            self.homes.insert(id, Home { tensor, in_file, slots });
        }
    }

    /// An op with every operand where it is now.
    fn moved(&self, op: &Op) -> Op {
        let mut op = op.clone();
        for operand in operands_mut(&mut op.kind) {
            let Some(home) = self.homes.get(&operand.tensor) else { continue };
            assert!(operand.slot.scale == 0, "what waits is used slot by slot");
            let slot = operand.slot.base.rem_euclid(i64::from(home.slots));
            if slot < i64::from(home.in_file) {
                (operand.tensor, operand.slot) = (home.tensor, Index::fixed(slot));
            } else {
                operand.slot = Index::fixed(slot - i64::from(home.in_file));
            }
        }
        op
    }
}

/// What windows are for; each kind has its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    /// From the file to elsewhere.
    In,
    /// From elsewhere to the file.
    Out,
    /// Operand number so much of what the host does.
    At(usize),
}

/// Windows of a kind, taken in turn.
struct Ring {
    tensor: TensorId,
    next: i64,
}

/// One Program on its way to its new form.
struct Rewrite<'a> {
    pass: &'a Pass,
    set: &'a mut ProgramSet,
    program: String,
    rings: BTreeMap<(Use, DType), Ring>,
    /// Copies that are over where they were started.
    over: HashSet<u64>,
    sequence: u64,
    ops: Vec<Op>,
}

impl Rewrite<'_> {
    fn program(pass: &Pass, set: &mut ProgramSet, program: &Program) -> Vec<Block> {
        let sequences = program.blocks.iter().flat_map(|block| &block.ops).filter_map(|op| match op.kind {
            OpKind::TransferStart { sequence, .. } => Some(sequence),
            _ => None,
        });
        let sequence = sequences.max().unwrap_or(0);
        let (rings, over) = (BTreeMap::new(), HashSet::new());
        let mut rewrite = Rewrite { pass, set, program: program.name.clone(), rings, over, sequence, ops: vec![] };
        let mut blocks = Vec::new();
        for block in &program.blocks {
            let moved: Vec<Op> = block.ops.iter().map(|op| pass.moved(op)).collect();
            if !moved.iter().any(|op| rewrite.touches(op)) {
                blocks.push(Block { ops: moved, ..block.clone() });
                continue;
            }
            // What is in the file passes through one window after the other.
            for variable in block.variables() {
                let once: Vec<Op> = moved.iter().map(|op| op.iteration(variable)).collect();
                let together: Vec<&[Op]> = once.chunk_by(|a, b| rewrite.together(a, b)).collect();
                together.into_iter().for_each(|ops| rewrite.rewrite(ops));
                blocks.push(Block::once(&block.name, std::mem::take(&mut rewrite.ops)));
            }
        }
        blocks
    }

    fn space(&self, operand: Operand) -> Space {
        self.set.tensor(operand.tensor).space
    }

    fn in_file(&self, operand: Operand) -> bool {
        self.space(operand) == Space::Scratch
    }

    fn touches(&self, op: &Op) -> bool {
        operands(op).any(|operand| self.in_file(operand))
    }

    /// Whether the host does both ops to the same elements: then it does both to a part before it goes on.
    fn together(&self, a: &Op, b: &Op) -> bool {
        let done_here = |op: &Op| op.queue == Queue::Host && self.touches(op);
        let elements = |op: &Op| by_element(op).filter(|_| done_here(op));
        elements(a).is_some() && elements(a) == elements(b)
    }

    fn rewrite(&mut self, ops: &[Op]) {
        match &ops[0].kind {
            OpKind::TransferStart { from, to, elements, sequence } if self.touches(&ops[0]) => {
                self.transfer(&ops[0], *from, *to, *elements, *sequence);
            }
            OpKind::TransferWait { sequence, .. } if self.over.remove(sequence) => {}
            OpKind::TransferWait { from, to, .. } if self.touches(&ops[0]) => {
                let queue = if self.in_file(*from) { Queue::FileRead } else { Queue::FileWrite };
                debug_assert!(self.in_file(*from) != self.in_file(*to), "the file is no place to copy within");
                self.ops.push(Op { queue, ..ops[0].clone() });
            }
            _ if self.touches(&ops[0]) => self.in_windows(ops),
            _ => self.ops.extend_from_slice(ops),
        }
    }

    /// A copy that begins or ends in the file.
    fn transfer(&mut self, op: &Op, from: Operand, to: Operand, elements: u64, sequence: u64) {
        let (reads, other) = (self.in_file(from), if self.in_file(from) { to } else { from });
        let disk = if reads { Queue::FileRead } else { Queue::FileWrite };
        if self.space(other) == self.pass.memory {
            self.ops.push(Op { queue: disk, ..op.clone() });
            return;
        }
        self.over.insert(sequence);
        let dtype = self.set.tensor(from.tensor).dtype;
        for first in (0..elements).step_by(WINDOW as usize) {
            let (part, at) = (WINDOW.min(elements - first), |operand: Operand| further(operand, first));
            let window = self.window(if reads { Use::In } else { Use::Out }, dtype, part);
            let (before, after) = if reads { (disk, op.queue) } else { (op.queue, disk) };
            self.copy(at(from), window, part, before);
            self.copy(window, at(to), part, after);
        }
    }

    /// What is done element by element where tensors stand, in windows.
    fn in_windows(&mut self, ops: &[Op]) {
        let whole = by_element(&ops[0]).unwrap_or_else(|| panic!("bug: {} reaches into the file", ops[0].name()));
        for first in (0..whole).step_by(WINDOW as usize) {
            let count = WINDOW.min(whole - first);
            let mut held: Vec<(Operand, Operand, u64, bool)> = Vec::new();
            let mut parts = Vec::new();
            for op in ops {
                let mut part = part_of(op, whole, first, count, &|id| self.set.tensor(id).elements());
                for access in part.accesses(&|id| self.set.tensor(id).elements()) {
                    if !self.in_file(access.operand) {
                        continue;
                    }
                    let written = access.mode != Mode::Read;
                    if let Some(known) = held.iter_mut().find(|(home, ..)| *home == access.operand) {
                        known.3 |= written;
                        continue;
                    }
                    let dtype = self.set.tensor(access.operand.tensor).dtype;
                    let window = self.window(Use::At(held.len()), dtype, access.elements);
                    held.push((access.operand, window, access.elements, written));
                    if access.mode != Mode::Write {
                        self.copy(access.operand, window, access.elements, Queue::FileRead);
                    }
                }
                for operand in operands_mut(&mut part.kind) {
                    if let Some((_, window, ..)) = held.iter().find(|(home, ..)| home == operand) {
                        *operand = *window;
                    }
                }
                parts.push(part);
            }
            self.ops.extend(parts);
            for (home, window, elements, _) in held.into_iter().filter(|(.., written)| *written) {
                self.copy(window, home, elements, Queue::FileWrite);
            }
        }
    }

    /// The next window of a kind, with room for so much.
    fn window(&mut self, what: Use, dtype: DType, elements: u64) -> Operand {
        let set = &mut *self.set;
        let ring = self.rings.entry((what, dtype)).or_insert_with(|| {
            let what = match what {
                Use::In => "in".to_owned(),
                Use::Out => "out".to_owned(),
                Use::At(number) => format!("at{number}"),
            };
            let name = format!("{}.window.{what}.{dtype}", self.program);
            let (space, category, lifetime) = (self.pass.memory, Category::Staging, Lifetime::Transient);
            set.tensors.push(Tensor { name, shape: vec![0], dtype, space, category, lifetime, slots: WINDOWS });
            Ring { tensor: TensorId(set.tensors.len() as u32 - 1), next: 0 }
        });
        let room = &mut set.tensors[ring.tensor.0 as usize].shape[0];
        *room = elements.max(*room);
        let slot = ring.next;
        ring.next = (slot + 1) % i64::from(WINDOWS);
        Operand::slot(ring.tensor, slot)
    }

    /// A copy that is over before its queue goes on: what others wait for follows from the bytes that it touches.
    fn copy(&mut self, from: Operand, to: Operand, elements: u64, queue: Queue) {
        self.sequence += 1;
        let sequence = self.sequence;
        self.ops.push(Op { kind: OpKind::TransferStart { from, to, elements, sequence }, queue });
        self.ops.push(Op { kind: OpKind::TransferWait { from, to, elements, sequence }, queue });
    }
}

/// The same operand, so many elements further on.
fn further(operand: Operand, elements: u64) -> Operand {
    operand.from(Index { base: operand.offset.base + elements as i64, ..operand.offset })
}
