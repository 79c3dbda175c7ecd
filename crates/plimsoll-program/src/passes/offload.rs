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

use crate::formats::STATE_BLOCK;
use crate::op::{Access, Accesses, Mode, Op, OpKind, Queue};
use crate::operands::{elements_mut, operands, operands_mut};
use crate::passes::scratch::IN_FILE;
use crate::program::{Block, Program, ProgramSet};
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, Offload, Space, WorkName};
use std::collections::{BTreeMap, HashMap, HashSet};

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

/// Where the slots of a tensor went: the first `on_host` of them to `tensor`, the others stay and are counted anew. Where a
/// tensor has slots for several micro-batches in flight, so it is with the `each` slots of every one.
#[derive(Clone, Copy)]
struct Home {
    tensor: TensorId,
    on_host: u32,
    each: u32,
}

/// Inputs of layers, with the output of the last.
const INPUTS: &str = "train.hidden";

struct Pass {
    set: ProgramSet,
    homes: HashMap<TensorId, Home>,
    /// The host's twin of a staging buffer.
    staging: HashMap<TensorId, TensorId>,
    /// Gradients that the backward Program begins with zeros, so that nobody else need do it.
    begun: HashSet<TensorId>,
    /// Elements of a piece.
    piece: u64,
    /// Whether the host does the update of what waits there.
    host_updates: bool,
}

impl Pass {
    /// Elements of a piece: a part of the largest matrix, so that what is on its way is small beside the model.
    fn piece_of(&self, layers: u32) -> u64 {
        let of_layers = self.set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.slots == layers);
        let largest = of_layers.map(Tensor::elements).max().unwrap_or(1);
        (largest / PIECES).clamp(*PIECE.start(), *PIECE.end())
    }

    /// How many of a tensor's slots, of one micro-batch, wait on the host.
    fn waiting(&self, tensor: &Tensor, layers: u32, offload: &Offload) -> u32 {
        if tensor.name == INPUTS {
            return offload.inputs.min(layers);
        }
        if tensor.lifetime != Lifetime::Persistent || tensor.space != Space::Device {
            return 0;
        }
        let base = tensor.name.split('.').next().unwrap_or_default();
        let (of_layers, of_the_rest) = match tensor.category {
            Category::Weight => (offload.weights, false),
            Category::Gradient => (offload.gradients, false),
            Category::Optimizer => (offload.optimizer, offload.optimizer >= layers),
            _ => return 0,
        };
        match base {
            "embedding" => u32::from(of_the_rest || offload.embedding && tensor.category != Category::Optimizer),
            "head" => u32::from(of_the_rest || offload.head && tensor.category != Category::Optimizer),
            "rope_table" | "final_norm" => 0,
            _ => of_layers.min(layers),
        }
    }

    fn move_homes(&mut self, layers: u32, offload: &Offload) {
        let mut largest: BTreeMap<Category, u64> = BTreeMap::new();
        for tensor in self.set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.slots == layers) {
            let most = largest.entry(tensor.category).or_default();
            *most = (*most).max(tensor.bytes());
        }
        for number in 0..self.set.tensors.len() {
            let tensor = &self.set.tensors[number];
            let on_host = self.waiting(tensor, layers, offload);
            let most = largest.get(&tensor.category).copied().unwrap_or(0);
            let small = tensor.lifetime == Lifetime::Persistent && tensor.bytes() * WORTH < most;
            if on_host == 0 || small {
                continue;
            }
            let id = TensorId(number as u32);
            let each = if tensor.name == INPUTS { layers + 1 } else { tensor.slots };
            let home = if on_host == each {
                self.set.tensors[number].space = Space::Host;
                id
            } else {
                let slots = tensor.slots / each * on_host;
                let name = format!("{}{HOME}", tensor.name);
                let home = Tensor { name, space: Space::Host, slots, ..tensor.clone() };
                self.set.tensors[number].slots -= slots;
                self.add(home)
            };
            self.homes.insert(id, Home { tensor: home, on_host, each });
        }
    }

    /// Inputs that only the host reads are given to it where it is.
    fn move_inputs(&mut self) {
        let inputs: HashSet<TensorId> = self.set.programs.iter().flat_map(|p| p.inputs.iter().copied()).collect();
        for input in inputs {
            let ops = self.set.programs.iter().flat_map(Program::trace).map(|(op, _)| op);
            let mut readers = ops.filter(|op| operands(op).any(|operand| operand.tensor == input));
            let by_host = readers.all(|op| match &op.kind {
                OpKind::Embed { table, .. } => self.homes.contains_key(&table.tensor),
                OpKind::EmbedGrad { dtable, .. } => self.homes.contains_key(&dtable.tensor),
                _ => false,
            });
            if by_host {
                self.set.tensors[input.0 as usize].space = Space::Host;
            }
        }
    }

    /// Scratch that kernels of the device would have needed for what the host adds up: its own needs none.
    fn drop_scratch(&mut self) {
        let ops = self.set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
        let scratch: Vec<TensorId> = ops
            .filter_map(|op| match &op.kind {
                OpKind::EmbedGrad { dtable, workspace, .. } if self.homes.contains_key(&dtable.tensor) => {
                    Some(workspace.tensor)
                }
                _ => None,
            })
            .collect();
        for id in scratch {
            let tensor = &mut self.set.tensors[id.0 as usize];
            (tensor.space, tensor.shape) = (Space::Host, vec![1]);
        }
    }

    /// Gradients that wait, and that the device is the first to add to: it begins them, and nothing is fetched.
    fn begin_in_backward(&mut self) {
        let Some(backward) = self.set.program("backward") else { return };
        let mut seen = HashSet::new();
        for op in backward.blocks.iter().flat_map(|block| &block.ops) {
            for operand in operands(op).filter(|operand| seen.insert(operand.tensor)) {
                let gradient = self.set.tensor(operand.tensor).category == Category::Gradient;
                let by_host = matches!(&op.kind, OpKind::EmbedGrad { dtable, .. } if dtable.tensor == operand.tensor);
                if let (Some(home), true, false) = (self.homes.get(&operand.tensor), gradient, by_host) {
                    self.begun.insert(home.tensor);
                }
            }
        }
    }

    /// Leaves out the Programs that nobody wants.
    fn keep(&mut self, wanted: &dyn Fn(&Program) -> bool) {
        let programs = std::mem::take(&mut self.set.programs);
        let mut numbers: HashMap<usize, usize> = HashMap::new();
        for (number, program) in programs.into_iter().enumerate().filter(|(_, program)| wanted(program)) {
            numbers.insert(number, self.set.programs.len());
            self.set.programs.push(program);
        }
        for phase in &mut self.set.phases {
            phase.programs = phase.programs.iter().filter_map(|number| numbers.get(number).copied()).collect();
        }
        self.set.phases.retain(|phase| !phase.programs.is_empty());
    }

    /// Whether an op touches what moved.
    fn moves(&self, op: &Op) -> bool {
        operands(op).any(|operand| {
            self.homes.contains_key(&operand.tensor) || self.set.tensor(operand.tensor).space == Space::Host
        })
    }

    fn add(&mut self, tensor: Tensor) -> TensorId {
        self.set.tensors.push(tensor);
        TensorId(self.set.tensors.len() as u32 - 1)
    }

    /// A buffer of the device or the host that no other Program uses.
    fn buffer(&mut self, name: String, like: TensorId, elements: u64, space: Space, slots: u32) -> TensorId {
        let dtype = self.set.tensor(like).dtype;
        let (shape, category, lifetime) = (vec![elements], Category::Staging, Lifetime::Transient);
        self.add(Tensor { name, shape, dtype, space, category, lifetime, slots })
    }

    /// The host's twin of a staging buffer.
    fn twin(&mut self, staging: TensorId) -> TensorId {
        if let Some(&twin) = self.staging.get(&staging) {
            return twin;
        }
        let Tensor { name, .. } = self.set.tensor(staging);
        let name = format!("{name}.host");
        let twin = self.buffer(name, staging, self.set.tensor(staging).elements(), Space::Host, 1);
        self.staging.insert(staging, twin);
        twin
    }

    fn space(&self, operand: Operand) -> Space {
        self.set.tensor(operand.tensor).space
    }

    fn accesses(&self, op: &Op) -> Accesses {
        op.accesses(&|id| self.set.tensor(id).elements())
    }

    /// An operand in a slot that is the same in every iteration, where it is now.
    fn at_home(&self, operand: Operand) -> Operand {
        let Some(home) = self.homes.get(&operand.tensor) else { return operand };
        let (on_host, each) = (i64::from(home.on_host), i64::from(home.each));
        // Of the next micro-batch it is as many slots further on as each one has there.
        let slot =
            |base: i64, each: i64| Index { base, scale: 0, micro_batch: operand.slot.micro_batch.signum() * each };
        match operand.slot.base.rem_euclid(each) {
            there if there < on_host => Operand { tensor: home.tensor, slot: slot(there, on_host), ..operand },
            stays => Operand { slot: slot(stays - on_host, each - on_host), ..operand },
        }
    }

    /// An op of one iteration, with every operand where it is now.
    fn unrolled(&self, op: &Op, variable: i64) -> Op {
        let mut op = op.iteration(variable);
        for operand in operands_mut(&mut op.kind) {
            *operand = self.at_home(*operand);
        }
        op
    }

    /// How ops use what has its home in a space that is not theirs: each part of a slot once, by tensor.
    fn uses(&self, ops: &[Op], home: Space) -> Vec<Use> {
        let mut uses: Vec<Use> = Vec::new();
        let accesses = ops.iter().flat_map(|op| self.accesses(op));
        for access in accesses.filter(|access| self.space(access.operand) == home) {
            let (region, written) = (Region::of(access.operand, access.elements), access.mode != Mode::Read);
            let known = uses.iter_mut().find(|u| (u.region.tensor, u.region.slot) == (region.tensor, region.slot));
            match known {
                None => uses.push(Use { region, read: access.mode != Mode::Write, written }),
                Some(known) => {
                    // Parts of one slot come and go together; what lies between them must then come, too.
                    let (first, end) = (known.region.first.min(region.first), known.region.end().max(region.end()));
                    let whole = Region { first, elements: (end - first) as u64, ..region };
                    known.read |= whole != known.region;
                    known.written |= written;
                    known.region = whole;
                }
            }
        }
        uses
    }
}

/// Part of a tensor's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Region {
    tensor: TensorId,
    /// The same in every iteration; of which micro-batch is known while running.
    slot: Index,
    first: i64,
    elements: u64,
}

impl Region {
    fn of(operand: Operand, elements: u64) -> Region {
        let slot = Index { scale: 0, ..operand.slot };
        Region { tensor: operand.tensor, slot, first: operand.offset.base, elements }
    }

    fn at(self) -> Operand {
        Operand { tensor: self.tensor, slot: self.slot, offset: Index::fixed(self.first) }
    }

    fn end(self) -> i64 {
        self.first + self.elements as i64
    }

    fn overlaps(self, other: Region) -> bool {
        (self.tensor, self.slot) == (other.tensor, other.slot) && self.first < other.end() && other.first < self.end()
    }
}

/// How a unit of work uses a region whose home is elsewhere.
#[derive(Clone, Copy)]
struct Use {
    region: Region,
    /// Whether its content matters when the unit begins.
    read: bool,
    written: bool,
}

/// Who does a unit of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The device: what waits on the host comes to it.
    Device,
    /// The host, where all or nearly all of it is.
    Host,
    /// The host, to which what is on the device comes.
    HostUpdate,
}

/// Ops that are done together: an iteration of a block, a piece of a tensor.
struct Unit {
    name: String,
    /// One that runs once; or several that run often and use the same of what waits.
    blocks: Vec<Block>,
    by: By,
    uses: Vec<Use>,
}

impl Unit {
    fn ops(&self) -> impl Iterator<Item = &Op> {
        self.blocks.iter().flat_map(|block| &block.ops)
    }

    /// Whether what a later unit uses can come while this one is at work: not where it is part of the same, or has such
    /// parts.
    fn goes_beside(&self, later: &Use) -> bool {
        self.uses.iter().all(|u| u.region == later.region || !u.region.overlaps(later.region))
    }

    fn uses_the_same(&self, other: &Unit) -> bool {
        let regions = |unit: &Unit| unit.uses.iter().map(|u| u.region).collect::<Vec<_>>();
        self.by == other.by && regions(self) == regions(other)
    }
}

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
struct Ring {
    tensor: TensorId,
    slots: Vec<Option<Slot>>,
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

    // ---- units ----

    fn units(&mut self, number: usize) -> Vec<Unit> {
        let blocks = std::mem::take(&mut self.pass.set.programs[number].blocks);
        let mut units: Vec<Unit> = Vec::new();
        for block in &blocks {
            if let Some(rolled) = self.rolled_on_host(block) {
                units.push(rolled);
                continue;
            }
            if let Some(rolled) = self.rolled(block) {
                let before =
                    units.last_mut().filter(|before| before.blocks[0].repeat > 1 && rolled.uses_the_same(before));
                match before {
                    Some(before) => before.blocks.extend(rolled.blocks),
                    None => units.push(rolled),
                }
                continue;
            }
            for variable in block.variables() {
                let ops: Vec<Op> = block.ops.iter().map(|op| self.pass.unrolled(op, variable)).collect();
                for ops in self.in_pieces(ops) {
                    self.split(&block.name, ops, &mut units);
                }
            }
        }
        units
    }

    /// A block whose iterations all use the same of what waits, and so need not be told apart: of the loss, which takes
    /// block after block of rows.
    fn rolled(&self, block: &Block) -> Option<Unit> {
        let waits = |operand: &Operand| {
            self.pass.homes.contains_key(&operand.tensor) || self.pass.space(*operand) == Space::Host
        };
        let passes = matches!(self.work, WorkName::Forward | WorkName::Backward | WorkName::Evaluate);
        let alike = |op: &Op| operands(op).all(|operand| !waits(&operand) || operand.offset.scale == 0);
        if !passes || !block.name.starts_with("loss") || !block.keeps_its_slots() || !block.ops.iter().all(alike) {
            return None;
        }
        let mut rolled = block.clone();
        for op in &mut rolled.ops {
            for operand in operands_mut(&mut op.kind).into_iter().filter(|operand| waits(operand)) {
                *operand = self.pass.at_home(*operand);
            }
        }
        let by_device = rolled.ops.iter().all(|op| op.queue == Queue::Compute && self.done_by(op) == By::Device);
        let uses = self.pass.uses(&rolled.ops, Space::Host);
        by_device.then(|| Unit { name: block.name.clone(), blocks: vec![rolled], by: By::Device, uses })
    }

    /// A block that brings a file to where a tensor waits, or back, piece after piece: the host does it alone, and no
    /// ring has to do with it.
    fn rolled_on_host(&mut self, block: &Block) -> Option<Unit> {
        let of_files = matches!(self.work, WorkName::Load | WorkName::Save);
        if !of_files || block.repeat == 1 || !block.keeps_its_slots() {
            return None;
        }
        let mut rolled = block.clone();
        for operand in rolled.ops.iter_mut().flat_map(|op| operands_mut(&mut op.kind)) {
            *operand = self.pass.at_home(*operand);
        }
        rolled.ops = self.staged_on_host(rolled.ops);
        if rolled.ops.iter().any(|op| self.done_by(op) != By::Host) {
            return None;
        }
        rolled.ops.iter_mut().filter(|op| op.queue == Queue::Compute).for_each(|op| op.queue = Queue::Host);
        Some(Unit { name: block.name.clone(), blocks: vec![rolled], by: By::Host, uses: vec![] })
    }

    /// What is moved between files and the host passes through a buffer of the host.
    fn staged_on_host(&mut self, ops: Vec<Op>) -> Vec<Op> {
        let staged: Vec<TensorId> = ops.iter().filter_map(|op| self.staging_of_host(op)).collect();
        staged.into_iter().fold(ops, |ops, staging| {
            let twin = self.pass.twin(staging);
            ops.iter().map(|op| op.with_tensors(&|id| if id == staging { twin } else { id })).collect()
        })
    }

    /// What works element by element on a large tensor that waits is done a piece at a time.
    fn in_pieces(&self, ops: Vec<Op>) -> Vec<Vec<Op>> {
        let whole = ops.first().and_then(by_element).unwrap_or(0);
        // What is written without being read needs no ring.
        let read =
            |op: &Op| !matches!(op.kind, OpKind::Fill { .. } | OpKind::InitNormal { .. } | OpKind::InitUniform { .. });
        let alike = ops.iter().all(|op| by_element(op) == Some(whole) && read(op));
        if whole <= self.pass.piece || !alike || self.pass.uses(&ops, Space::Host).is_empty() {
            return vec![ops];
        }
        let piece = whole.div_ceil(whole.div_ceil(self.pass.piece)).next_multiple_of(PIECE_STEP);
        let elements_of = |id| self.pass.set.tensor(id).elements();
        let part = |first: u64| {
            let count = piece.min(whole - first);
            ops.iter().map(|op| part_of(op, whole, first, count, &elements_of)).collect()
        };
        (0..whole.div_ceil(piece)).map(|number| part(number * piece)).collect()
    }

    /// Sorts ops, in their order, into those that the host does and those of the device.
    fn split(&mut self, name: &str, ops: Vec<Op>, units: &mut Vec<Unit>) {
        let mut ops = self.staged_on_host(ops);
        ops.retain(|op| !self.begun_elsewhere(op));
        for ops in ops.chunk_by(|a, b| self.done_by(a) == self.done_by(b)) {
            let (mut ops, by) = (ops.to_vec(), self.done_by(&ops[0]));
            for op in ops.iter_mut().filter(|op| by != By::Device && op.queue == Queue::Compute) {
                op.queue = Queue::Host;
            }
            let uses = match by {
                By::Device => self.pass.uses(&ops, Space::Host),
                By::Host => vec![],
                By::HostUpdate => self.pass.uses(&ops, Space::Device),
            };
            units.push(Unit { name: name.to_owned(), blocks: vec![Block::once(name, ops)], by, uses });
        }
    }

    /// The staging buffer through which an op moves what waits on the host.
    fn staging_of_host(&self, op: &Op) -> Option<TensorId> {
        let OpKind::Cast { from, to, .. } = op.kind else { return None };
        let staging = |operand: Operand| {
            let tensor = self.pass.set.tensor(operand.tensor);
            let passing = tensor.category == Category::Staging && tensor.lifetime == Lifetime::Transient;
            (passing && tensor.space == Space::Device).then_some(operand.tensor)
        };
        match (self.pass.space(from), self.pass.space(to)) {
            (Space::Host, _) => staging(to),
            (_, Space::Host) => staging(from),
            _ => None,
        }
    }

    /// Whether an op clears a gradient that the backward Program clears anyway.
    fn begun_elsewhere(&self, op: &Op) -> bool {
        match op.kind {
            OpKind::Fill { into, .. } if self.program == "begin" => self.pass.begun.contains(&into.tensor),
            _ => false,
        }
    }

    /// Who does an op: the host, where what it needs is there, or little of it is not, or its update is the host's.
    fn done_by(&self, op: &Op) -> By {
        let at_home = |operand: Operand| self.pass.space(operand) == Space::Host;
        let host = match &op.kind {
            OpKind::Embed { table, .. } => at_home(*table),
            OpKind::EmbedGrad { dtable, .. } => at_home(*dtable),
            OpKind::Fill { .. }
            | OpKind::InitNormal { .. }
            | OpKind::InitUniform { .. }
            | OpKind::Cast { .. }
            | OpKind::TransferStart { .. }
            | OpKind::TransferWait { .. } => operands(op).all(|operand| self.pass.space(operand) != Space::Device),
            _ => false,
        };
        match host {
            true => By::Host,
            false if self.work == WorkName::Update && self.pass.host_updates && self.state_is_there(op) => {
                By::HostUpdate
            }
            false => By::Device,
        }
    }

    /// Whether an op of the update works on state that waits on the host.
    fn state_is_there(&self, op: &Op) -> bool {
        let at_home = |operand: Operand| self.pass.space(operand) == Space::Host;
        match &op.kind {
            // Masters are state: weights are made of them where they are.
            OpKind::Cast { from, .. } => at_home(*from),
            OpKind::AdamW { first, .. } | OpKind::AdamW8 { first, .. } => at_home(*first),
            OpKind::Sgd { weight, momentum_buffer, .. } => at_home(momentum_buffer.unwrap_or(*weight)),
            _ => false,
        }
    }

    // ---- rings ----

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
    fn make_rings(&mut self, units: &[Unit]) {
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

    fn transfer(&mut self, start: bool, from: Operand, to: Operand, elements: u64, sequence: u64, queue: Queue) {
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

    fn await_all(&mut self) {
        self.forget(|_| true);
    }

    // ---- the work itself ----

    /// Work on what comes from elsewhere: one unit ahead, through rings.
    fn with_rings(&mut self, units: &[Unit], at: usize) {
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
    fn make_way_for(&mut self, region: Region, mode: Mode) {
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

    /// What the host does is done at home; the little that it shares with the device is copied for it.
    fn by_host(&mut self, unit: &Unit) {
        if unit.blocks[0].repeat > 1 {
            self.await_all();
            self.flush(&unit.name);
            self.blocks.extend(unit.blocks.iter().cloned());
            return;
        }
        for op in unit.ops() {
            let mut op = op.clone();
            let accesses = self.pass.accesses(&op);
            let at_home = |access: &&Access| self.pass.space(access.operand) == Space::Host;
            let touched: Vec<(Region, Mode)> =
                accesses.iter().filter(at_home).map(|a| (Region::of(a.operand, a.elements), a.mode)).collect();
            for (region, mode) in touched {
                self.make_way_for(region, mode);
            }
            let mut back = Vec::new();
            let on_device: Vec<Access> =
                accesses.into_iter().filter(|access| self.pass.space(access.operand) == Space::Device).collect();
            for access in &on_device {
                let copy = self.copy_for_host(access);
                for operand in operands_mut(&mut op.kind).into_iter().filter(|operand| **operand == access.operand) {
                    *operand = Operand::whole(copy);
                }
                if access.mode != Mode::Read {
                    back.push((copy, *access));
                }
            }
            self.ops.push(op);
            for (copy, access) in back {
                self.copied(Operand::whole(copy), access.operand, access.elements, Queue::CopyIn);
            }
        }
    }

    /// The host's copy of what is on the device, fresh where the host reads it.
    fn copy_for_host(&mut self, access: &Access) -> TensorId {
        let region = Region::of(access.operand, access.elements);
        if let Some(&copy) = self.copies.get(&region) {
            return copy;
        }
        let name = format!("{}.copy.{}.{}", self.program, self.pass.set.tensor(region.tensor).name, region.slot.base);
        let copy = match self.pass.set.find(&name) {
            Some(copy) => copy,
            None => self.pass.buffer(name, region.tensor, region.elements, Space::Host, 1),
        };
        if access.mode != Mode::Write {
            self.copied(access.operand, Operand::whole(copy), region.elements, Queue::CopyOut);
            self.copies.insert(region, copy);
        }
        copy
    }

    fn copied(&mut self, from: Operand, to: Operand, elements: u64, queue: Queue) {
        self.sequence += 1;
        self.transfer(true, from, to, elements, self.sequence, queue);
        self.transfer(false, from, to, elements, self.sequence, queue);
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
