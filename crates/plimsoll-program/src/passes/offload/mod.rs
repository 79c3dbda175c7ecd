//! Offload: tensors that wait on the host while no op needs them.
//!
//! What waits is given a *home* in the host's space. An op that computes on it finds it in a buffer on the device: a
//! *ring* of a few slots that all layers share. It is copied in one unit of work ahead (a layer; in the update a
//! piece of a tensor), and copied out as soon as it has been written, so that copies run while others compute. Work
//! that needs no arithmetic of the device (fills, draws, casts between files and homes, rows of the embedding) is
//! done by the host where the tensor is.
//!
//! Where the host does the update of what waits there, it is the other way round: gradients come to it, new weights go
//! back, through a ring on the host.
//!
//! The same ops run on the same numbers, and every sum is taken in the same order, so no bit changes; but for rows of
//! the embedding's gradient, which the host adds up in the order of its own kernel. An update is element by element: it
//! has the same bits wherever it is done by kernels that round alike.
//!
//! The pass unrolls the Programs that it changes: which slot of which tensor is where, is then plain. Blocks that only
//! move files, or take rows of the loss after each other, stay as they are.

//!
//! Here is the pass as a whole, and what takes a Program through it. What waits where is in `homes`, what is done together
//! and by whom in `units`, what it passes through in `rings`, and the host's own work in `host`.

mod homes;
mod host;
mod rings;
mod units;

use crate::formats::STATE_BLOCK;
use crate::op::{Op, OpKind};
use crate::operands::{elements_mut, operands_mut};
use crate::passes::scratch::IN_FILE;
use crate::program::{Block, Program, ProgramSet};
use crate::tensor::{Lifetime, Tensor, TensorId};
use homes::Pass;
use plimsoll_core::{Offload, WorkName};
use rings::Ring;
use std::collections::{HashMap, HashSet};
use units::{By, Region};

/// Elements of a piece of a tensor in the update, at least and at most: what is on its way at once is a few of them.
const PIECE: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 25;
/// So many pieces are the largest matrix of a layer, within those limits.
const PIECES: u64 = 4;
/// Pieces begin at multiples of this, which is one of every block of a format.
const PIECE_STEP: u64 = 1 << 12;
/// A tensor smaller than the largest of its kind by this factor stays on the device: norms, biases, small adapters.
const WORTH: u64 = 32;

/// The name of the part of a tensor that waits on the host begins with the tensor's, and ends so.
pub(super) const HOME: &str = ".host";

/// For each tensor of a set, what it is a part of: the name of the tensor that it is where nothing waits, and which slot
/// of that its first one is. So what waits can be found again in another plan, wherever it is there.
pub fn origins(set: &ProgramSet) -> Vec<(&str, u32)> {
    // Which part a tensor is: the file has the first slots, then comes the host's memory, then the device.
    let part = |tensor: &Tensor| match &tensor.name {
        _ if tensor.lifetime != Lifetime::Persistent => None,
        name if name.ends_with(IN_FILE) => Some((name.len() - IN_FILE.len(), 0)),
        name if name.ends_with(HOME) => Some((name.len() - HOME.len(), 1)),
        name => Some((name.len(), 2)),
    };
    let mut before: HashMap<&str, [u32; 3]> = HashMap::new();
    for tensor in &set.tensors {
        if let Some((whole, part)) = part(tensor) {
            before.entry(&tensor.name[..whole]).or_default().iter_mut().skip(part + 1).for_each(|n| *n += tensor.slots);
        }
    }
    let of = set.tensors.iter().map(|tensor| match part(tensor) {
        Some((whole, part)) => (&tensor.name[..whole], before[&tensor.name[..whole]][part]),
        None => (&*tensor.name, 0),
    });
    of.collect()
}

/// Gives what `offload` names its place on the host. `layers` is the model's; `one_micro_batch` says that a step has
/// no more than one, so that gradients need not come back to be added to.
pub fn offload(set: ProgramSet, layers: u32, offload: &Offload, one_micro_batch: bool) -> ProgramSet {
    offload_only(set, layers, offload, one_micro_batch, &|_| true)
}

/// The same for some of the Programs; the others are left out. For a search, which need not write them all down anew.
pub fn offload_only(
    set: ProgramSet,
    layers: u32,
    offload: &Offload,
    one_micro_batch: bool,
    wanted: &dyn Fn(&Program) -> bool,
) -> ProgramSet {
    let (homes, staging, begun) = (HashMap::new(), HashMap::new(), HashSet::new());
    let mut pass = Pass { set, homes, staging, begun, piece: 0, host_updates: offload.update };
    if !offload.is_nothing() {
        pass.piece = pass.piece_of(layers);
        pass.move_homes(layers, offload);
        pass.move_inputs();
        pass.drop_scratch();
    }
    if one_micro_batch {
        pass.begin_in_backward();
    }
    pass.keep(wanted);
    for number in 0..pass.set.programs.len() {
        if pass.set.programs[number].trace().any(|(op, _)| pass.moves(op)) {
            pass.set.programs[number].blocks = Rewrite::program(&mut pass, number);
        }
    }
    pass.set
}

/// One Program on its way to its new form.
struct Rewrite<'a> {
    pass: &'a mut Pass,
    program: String,
    work: WorkName,
    /// By the names of their buffers.
    rings: Vec<Ring>,
    /// The ring in which what has its home in a tensor stands.
    ring_of: HashMap<TensorId, usize>,
    /// What the device has, and the host a fresh copy of.
    copies: HashMap<Region, TensorId>,
    /// Gradients that have been begun.
    begun: HashSet<Region>,
    sequence: u64,
    /// What is written down already, and the ops after that.
    blocks: Vec<Block>,
    ops: Vec<Op>,
}

impl Rewrite<'_> {
    /// The blocks of a Program in their new form.
    fn program(pass: &mut Pass, number: usize) -> Vec<Block> {
        let Program { name, work, .. } = &pass.set.programs[number];
        let (program, work) = (name.clone(), *work);
        let (rings, ring_of, copies) = (Vec::new(), HashMap::new(), HashMap::new());
        let (begun, blocks, ops) = (HashSet::new(), Vec::new(), Vec::new());
        let mut rewrite = Rewrite { pass, program, work, rings, ring_of, copies, begun, sequence: 0, blocks, ops };
        let units = rewrite.units(number);
        rewrite.make_rings(&units);
        for at in 0..units.len() {
            match units[at].by {
                By::Host => rewrite.by_host(&units[at]),
                By::Device | By::HostUpdate => rewrite.with_rings(&units, at),
            }
            if at + 1 == units.len() {
                rewrite.await_all();
            }
            rewrite.flush(&units[at].name);
        }
        rewrite.blocks
    }

    /// Writes down the ops that stand there.
    fn flush(&mut self, name: &str) {
        if !self.ops.is_empty() {
            self.blocks.push(Block::once(name, std::mem::take(&mut self.ops)));
        }
    }
}

/// The elements of an op that works element by element.
pub(super) fn by_element(op: &Op) -> Option<u64> {
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

/// The same op on `count` of its `whole` elements, from `first` on, which is one of every block of a format.
pub(super) fn part_of(op: &Op, whole: u64, first: u64, count: u64, elements_of: &dyn Fn(TensorId) -> u64) -> Op {
    let (accesses, mut op) = (op.accesses(elements_of), op.clone());
    for operand in operands_mut(&mut op.kind) {
        let access = accesses.iter().find(|access| access.operand == *operand).expect("every operand is touched");
        // Beside what has an element for each, there are scales of blocks, and scalars.
        operand.offset.base += match access.elements {
            elements if elements == whole => first as i64,
            elements if elements == whole.div_ceil(STATE_BLOCK) => (first / STATE_BLOCK) as i64,
            _ => 0,
        };
    }
    if let OpKind::InitNormal { first: number, .. } | OpKind::InitUniform { first: number, .. } = &mut op.kind {
        number.base += first as i64;
    }
    *elements_mut(&mut op.kind).expect("it works element by element") = count;
    op
}
