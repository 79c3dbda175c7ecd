//! *State*: weights, gradients, masters and the optimizer's state are held in parts, each rank its own run of elements of
//! every tensor, as long as the rank's memory allows. The parts are the ranks' alone, so the update is, too.
//!
//! - Where something is computed, the pass goes from unit to unit (an iteration of a block, or all where they need the
//!   same): what a unit needs is gathered
//!   into buffers, one unit ahead; gradients are summed in buffers from zero, and when a unit has made them whole they are
//!   scattered, which adds to each rank's part. So all ranks take part in every micro-batch, each with as many sequences
//!   as it likes.
//! - What goes element by element (fills, updates, norms, what is loaded) is done to the own part alone.
//! - Files are as one device would write them: rank 0 does, and the others send it their parts.
//! - A rank without sequences takes part in all that, and computes nothing: it gathers what others need of it, and gives
//!   zeros where they give gradients.
//!
//! Matrices in a coarse format stay whole on every rank: they are a quarter already, and are made whole piece by piece.

use super::{exchanged, message, sum_of_norms};
use crate::formats::STATE_BLOCK;
use crate::op::{Collective, Exchange, Mode, Op, OpKind, Piece};
use crate::operands::{elements_mut, operands_mut};
use crate::program::{Block, Program, ProgramSet};
use crate::share::Share;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, Offload, Recipe, Space, WorkName};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;

/// Slots of a buffer for what each layer has: one for the layer at work, one for that whose turn is next.
const AHEAD: u32 = 2;

/// What is kept beside a weight is named after it.
const BESIDE: [&str; 6] = [".gradient", ".master", ".first_scale", ".second_scale", ".first", ".second"];

/// The number of the collective that sums up loss and norm.
const NORM: i64 = 1;

/// The Programs of one rank.
pub(super) fn share(set: ProgramSet, share: &Share, recipe: &Recipe) -> ProgramSet {
    assert_eq!(share.state.len(), share.ranks as usize, "every rank has its part of the state");
    let shards = shards(&set, share);
    let layered = layered(&set, &shards);
    let (offload, computes) = (&recipe.offload, recipe.micro_batch > 0);
    let mut pass = Pass { share, offload, computes, whole: set.tensors.clone(), set, shards, layered };
    for (&id, shard) in &pass.shards {
        let own = &shard.parts[share.rank as usize];
        // Nothing is no tensor: what is another rank's as a whole keeps one element.
        pass.set.tensors[id.0 as usize].shape = vec![(own.end - own.start).max(1)];
    }
    for number in 0..pass.set.programs.len() {
        let program = pass.set.programs[number].clone();
        let shared = match program.work {
            WorkName::Load | WorkName::Update => Program { blocks: pass.own_parts(&program), ..program },
            WorkName::Save => Program { blocks: pass.collected(&program), ..program },
            _ if pass.computes => Program { blocks: pass.computed(&program), ..program },
            _ => Program { blocks: pass.computed(&program), inputs: vec![], outputs: vec![], ..program },
        };
        pass.set.programs[number] = shared;
    }
    pass.set
}

/// How a tensor is held.
struct Shard {
    /// Each rank's elements of a slot.
    parts: Vec<Range<u64>>,
    /// Elements of the weight for one of this tensor.
    block: u64,
}

/// What is held in parts, by tensor.
fn shards(set: &ProgramSet, share: &Share) -> HashMap<TensorId, Shard> {
    let ops = set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
    let mut whole: HashSet<TensorId> = HashSet::new();
    for op in ops {
        match &op.kind {
            OpKind::Rope { table, .. } | OpKind::RopeTable { table, .. } => whole.extend([table.tensor]),
            OpKind::Dequantise { from: coarse, .. } | OpKind::Quantise { into: coarse, .. } => {
                whole.extend(coarse.parts(1, 1).into_iter().map(|(part, _)| part.tensor));
            }
            _ => {}
        }
    }
    let state =
        |tensor: &Tensor| matches!(tensor.category, Category::Weight | Category::Gradient | Category::Optimizer);
    let held = set.tensors.iter().enumerate().filter(|(number, tensor)| {
        let stays = tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device;
        stays && state(tensor) && !whole.contains(&TensorId(*number as u32))
    });
    held.map(|(number, tensor)| {
        let suffix = BESIDE.into_iter().find(|suffix| tensor.name.ends_with(suffix)).unwrap_or("");
        let weight = set.find(tensor.name.strip_suffix(suffix).unwrap_or(&tensor.name));
        let elements = set.tensor(weight.expect("state stands beside a weight")).elements();
        let block = if suffix.ends_with("_scale") { STATE_BLOCK } else { 1 };
        let parts = share.parts(elements).into_iter();
        let parts = parts.map(|part| part.start.div_ceil(block)..part.end.div_ceil(block)).collect();
        (TensorId(number as u32), Shard { parts, block })
    })
    .collect()
}

/// The weights that each layer has.
fn layered(set: &ProgramSet, shards: &HashMap<TensorId, Shard>) -> BTreeSet<TensorId> {
    let computed = set.programs.iter().filter(|program| !matches!(program.work, WorkName::Update | WorkName::Load));
    let mut ops: Vec<Op> = computed.flat_map(|program| &program.blocks).flat_map(|block| block.ops.clone()).collect();
    let operands = ops.iter_mut().flat_map(|op| operands_mut(&mut op.kind));
    let of_layers = operands.filter(|operand| operand.slot.scale != 0).map(|operand| operand.tensor);
    let weight = |id: &TensorId| shards.contains_key(id) && set.tensor(*id).category == Category::Weight;
    of_layers.filter(weight).collect()
}

struct Pass<'a> {
    share: &'a Share,
    offload: &'a Offload,
    /// Whether there are sequences to compute.
    computes: bool,
    set: ProgramSet,
    /// The tensors as one device has them.
    whole: Vec<Tensor>,
    shards: HashMap<TensorId, Shard>,
    layered: BTreeSet<TensorId>,
}

/// A tensor's slot.
type Held = (TensorId, i64);

/// An iteration of a block, or all of them where they touch the same slots.
struct Unit {
    block: Block,
    /// The weights that it reads.
    needs: BTreeSet<Held>,
    /// The gradients that it adds to.
    gives: BTreeSet<Held>,
}

impl Pass<'_> {
    fn exchange(&self, collective: Collective, pieces: Vec<Piece>, sequence: Index) -> Exchange {
        Exchange { collective, pieces, rank: self.share.rank, peer: None, sequence, last: false }
    }

    // ---- what is computed ----

    fn units(&self, program: &Program) -> Vec<Unit> {
        let mut units = Vec::new();
        for block in &program.blocks {
            let iteration =
                |variable: i64| Block::once(&block.name, block.ops.iter().map(|op| op.iteration(variable)).collect());
            let iterations: Vec<Block> = match block.repeat > 1 && block.keeps_its_slots() {
                true => vec![block.clone()],
                false => block.variables().map(iteration).collect(),
            };
            for block in iterations {
                let (mut needs, mut gives) = (BTreeSet::new(), BTreeSet::new());
                for access in block.ops.iter().flat_map(|op| op.accesses(&|id| self.whole[id.0 as usize].elements())) {
                    let tensor = &self.whole[access.operand.tensor.0 as usize];
                    if self.shards.contains_key(&access.operand.tensor) {
                        let slot = access.operand.slot.base.rem_euclid(i64::from(tensor.slots));
                        let list = if access.mode == Mode::Read { &mut needs } else { &mut gives };
                        list.insert((access.operand.tensor, slot));
                    }
                }
                // What a layer computes again is each rank's own choice; what it gathers for that is not.
                let layers: BTreeSet<i64> =
                    needs.iter().filter(|(id, _)| self.layered.contains(id)).map(|(_, slot)| *slot).collect();
                needs.extend(layers.iter().flat_map(|&slot| self.layered.iter().map(move |&id| (id, slot))));
                units.push(Unit { block, needs, gives });
            }
        }
        units
    }

    /// A Program that goes from unit to unit, with what it gathers and scatters.
    fn computed(&mut self, program: &Program) -> Vec<Block> {
        let units = self.units(program);
        let mut buffers: HashMap<TensorId, TensorId> = HashMap::new();
        for (id, _) in units.iter().flat_map(|unit| unit.needs.iter().chain(&unit.gives)) {
            buffers.entry(*id).or_insert_with(|| {
                let like = &self.whole[id.0 as usize];
                self.set.tensors.push(Tensor {
                    name: format!("{}.{}.whole", program.name, like.name),
                    category: Category::Communication,
                    lifetime: Lifetime::Transient,
                    slots: like.slots.min(AHEAD),
                    ..like.clone()
                });
                TensorId(self.set.tensors.len() as u32 - 1)
            });
        }
        let zeros = HashSet::new();
        let mut walk = Walk { pass: self, buffers, zeros, number: 0, coming: None, leaving: None };
        let mut blocks = Vec::new();
        let nothing = BTreeSet::new();
        for (at, unit) in units.iter().enumerate() {
            let before = at.checked_sub(1).map(|before| &units[before]);
            let after = units.get(at + 1);
            let mut ops = Vec::new();
            if before.is_none() {
                walk.gather(&unit.needs, &nothing, &mut ops);
            }
            ops.extend(walk.coming.take());
            if let Some(after) = after {
                walk.gather(&after.needs, &unit.needs, &mut ops);
            }
            for held in unit.gives.difference(before.map_or(&nothing, |before| &before.gives)) {
                let (into, elements) = (walk.buffer(*held), walk.pass.whole[held.0.0 as usize].elements());
                // Zeros to which nothing is added stay zeros.
                if walk.pass.computes || walk.zeros.insert(into) {
                    ops.push(OpKind::Fill { into, value: 0.0, elements }.into());
                }
            }
            let computed = unit.block.ops.iter().filter(|_| walk.pass.computes);
            let computed: Vec<Op> = computed.map(|op| walk.in_buffers(op)).collect();
            if unit.block.repeat == 1 {
                ops.extend(computed);
            } else {
                let computed = Block { ops: computed, ..unit.block.clone() };
                blocks.push(Block::once(&unit.block.name, std::mem::take(&mut ops)));
                blocks.push(computed);
            }
            let whole: Vec<Held> =
                unit.gives.difference(after.map_or(&nothing, |after| &after.gives)).copied().collect();
            walk.scatter(&whole, &mut ops);
            if after.is_none() {
                ops.extend(walk.leaving.take());
            }
            blocks.push(Block::once(&unit.block.name, ops));
        }
        blocks.retain(|block| !block.ops.is_empty());
        blocks
    }

    // ---- what goes element by element ----

    /// A Program that works on own parts alone.
    fn own_parts(&self, program: &Program) -> Vec<Block> {
        let mut blocks = Vec::new();
        for block in &program.blocks {
            if block.ops.iter().any(|op| matches!(op.kind, OpKind::ClipFactor { .. })) {
                blocks.push(sum_of_norms(&self.set, self.share, Index::fixed(NORM)));
            }
            match self.run(block) {
                None => blocks.push(block.clone()),
                Some(run) => {
                    let own = self.shards[&run.tensor].parts[self.share.rank as usize].clone();
                    blocks.extend(run.spans(own).iter().map(|span| self.cut(block, &run, span, None)));
                }
            }
        }
        blocks
    }

    /// The elements of what is held in parts that a block goes over; nothing where it touches none of that.
    fn run(&self, block: &Block) -> Option<Run> {
        let accesses = block.ops.iter().flat_map(|op| op.accesses(&|id| self.whole[id.0 as usize].elements()));
        let held = accesses.filter(|access| self.shards.contains_key(&access.operand.tensor));
        let longest = held.max_by_key(|access| access.elements)?;
        let Operand { tensor, slot, offset } = longest.operand;
        let strides = offset.scale != 0;
        assert!(!strides || offset.scale * block.step == longest.elements as i64, "pieces follow each other");
        let first = offset.at(block.first, 0);
        Some(Run { tensor, slot, first, elements: longest.elements, strides, repeat: block.repeat })
    }

    /// A block's ops on a part of what they go over. What is held in parts stands in this rank's part, or has come from
    /// another into `elsewhere`.
    fn cut(&self, block: &Block, run: &Run, span: &Span, elsewhere: Option<TensorId>) -> Block {
        let rank = self.share.rank as usize;
        let whole = self.shards[&run.tensor].block;
        let moved = |index: Index| Index {
            base: index.at(if run.strides { block.first } else { 0 }, 0) + span.after,
            scale: if run.strides { run.elements as i64 } else { index.scale },
            ..index
        };
        let mut ops = block.ops.clone();
        for op in &mut ops {
            *elements_mut(&mut op.kind).expect("what goes over parts goes element by element") = span.elements;
            for operand in operands_mut(&mut op.kind) {
                match (self.shards.get(&operand.tensor), elsewhere) {
                    (Some(_), Some(buffer)) => *operand = Operand::whole(buffer),
                    (Some(shard), None) => {
                        // Scales of blocks have an element for many.
                        let each = (shard.block / whole) as i64;
                        let place = run.first + span.after;
                        operand.offset = Index {
                            base: place / each - shard.parts[rank].start as i64,
                            scale: if run.strides { run.elements as i64 / each } else { 0 },
                            micro_batch: 0,
                        };
                    }
                    (None, _) if self.set.tensor(operand.tensor).space == Space::File => {
                        operand.offset = moved(operand.offset);
                    }
                    (None, _) => {}
                }
            }
            if let OpKind::AdamW8 { elements, .. } = &op.kind {
                assert!(run.first == 0 && *elements > 0, "blocks of state are updated whole");
            }
            if let OpKind::InitNormal { first, .. } | OpKind::InitUniform { first, .. } = &mut op.kind {
                *first = moved(*first);
            }
        }
        match run.strides {
            true => Block { name: block.name.clone(), first: 0, step: 1, repeat: span.repeat, ops },
            false => Block { ops, ..block.clone() },
        }
    }

    // ---- what goes to files ----

    /// A Program whose files rank 0 writes: the others send it what is theirs, piece by piece.
    fn collected(&mut self, program: &Program) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut number = 0;
        for block in &program.blocks {
            let Some(run) = self.run(block) else {
                blocks.extend((self.share.rank == 0).then(|| block.clone()));
                continue;
            };
            for (owner, part) in self.shards[&run.tensor].parts.clone().into_iter().enumerate() {
                for span in run.spans(part) {
                    let sequence = Index { base: number, scale: 1, micro_batch: 0 };
                    number += i64::from(span.repeat);
                    match (owner as u32, self.share.rank) {
                        (0, 0) => blocks.push(self.cut(block, &run, &span, None)),
                        (_, 0) => blocks.push(self.received(program, block, &run, &span, owner as u32, sequence)),
                        (owner, rank) if owner == rank => blocks.push(self.sent(block, &run, &span, sequence)),
                        _ => {}
                    }
                }
            }
        }
        blocks
    }

    fn sent(&self, block: &Block, run: &Run, span: &Span, sequence: Index) -> Block {
        let own = &self.shards[&run.tensor].parts[self.share.rank as usize];
        let offset = Index {
            base: run.first + span.after - own.start as i64,
            scale: if run.strides { run.elements as i64 } else { 0 },
            micro_batch: 0,
        };
        let at = Operand { tensor: run.tensor, slot: run.slot, offset };
        let ops = message(self.share, Collective::Send, 0, at, span.elements, sequence).into();
        Block { name: block.name.clone(), first: 0, step: 1, repeat: span.repeat, ops }
    }

    fn received(
        &mut self,
        program: &Program,
        block: &Block,
        run: &Run,
        span: &Span,
        owner: u32,
        sequence: Index,
    ) -> Block {
        let like = &self.whole[run.tensor.0 as usize];
        let name = format!("{}.received.{}", program.name, like.dtype);
        let buffer = self.set.find(&name).unwrap_or_else(|| {
            let (shape, dtype) = (vec![1], like.dtype);
            let (space, category, lifetime) = (Space::Device, Category::Communication, Lifetime::Transient);
            self.set.tensors.push(Tensor { name, shape, dtype, space, category, lifetime, slots: 1 });
            TensorId(self.set.tensors.len() as u32 - 1)
        });
        let room = &mut self.set.tensors[buffer.0 as usize].shape[0];
        *room = (*room).max(span.elements);
        let into = Operand::whole(buffer);
        let mut ops = Vec::from(message(self.share, Collective::Receive, owner, into, span.elements, sequence));
        let cut = self.cut(block, run, span, Some(buffer));
        ops.extend(cut.ops);
        Block { ops, ..cut }
    }
}

/// What a block goes over, in elements of a tensor's slot: in pieces that follow each other, or in the same place of
/// each slot.
struct Run {
    tensor: TensorId,
    slot: Index,
    first: i64,
    /// Of an iteration.
    elements: u64,
    strides: bool,
    repeat: u32,
}

/// A part of a run: iterations of one size.
struct Span {
    /// How far after the first element of the run it begins.
    after: i64,
    /// Of an iteration.
    elements: u64,
    repeat: u32,
}

impl Run {
    /// What of a run lies in a part of the slot.
    fn spans(&self, part: Range<u64>) -> Vec<Span> {
        let repeat = if self.strides { u64::from(self.repeat) } else { 1 };
        let first = (part.start as i64).max(self.first);
        let end = (part.end as i64).min(self.first + (repeat * self.elements) as i64);
        let (after, Ok(count)) = (first - self.first, u64::try_from(end - first)) else { return vec![] };
        if !self.strides {
            return Vec::from_iter((count > 0).then_some(Span { after, elements: count, repeat: self.repeat }));
        }
        let (whole, rest) = (count / self.elements, count % self.elements);
        let whole_span = Span { after, elements: self.elements, repeat: whole as u32 };
        let rest_span = Span { after: after + (whole * self.elements) as i64, elements: rest, repeat: 1 };
        [(whole > 0, whole_span), (rest > 0, rest_span)].into_iter().filter(|(is, _)| *is).map(|(_, s)| s).collect()
    }
}

/// A Program on its way from unit to unit.
struct Walk<'p, 'a> {
    pass: &'p mut Pass<'a>,
    /// The buffers of what is held in parts.
    buffers: HashMap<TensorId, TensorId>,
    /// Of who computes nothing: buffers that are filled.
    zeros: HashSet<Operand>,
    number: i64,
    /// The wait for what has been gathered, and for what has been scattered.
    coming: Option<Op>,
    leaving: Option<Op>,
}

impl Walk<'_, '_> {
    /// Where a slot stands as a whole.
    fn buffer(&self, (tensor, slot): Held) -> Operand {
        let buffer = self.buffers[&tensor];
        Operand::slot(buffer, slot.rem_euclid(i64::from(self.pass.set.tensor(buffer).slots)))
    }

    fn piece(&self, held: Held, gathers: bool) -> Piece {
        let own = Operand::slot(held.0, held.1);
        let counts = self.pass.shards[&held.0].parts.iter().map(|part| part.end - part.start).collect();
        match gathers {
            true => Piece { input: own, output: self.buffer(held), counts },
            false => Piece { input: self.buffer(held), output: own, counts },
        }
    }

    fn numbered(&mut self, collective: Collective, pieces: Vec<Piece>) -> [Op; 2] {
        self.number += 1;
        exchanged(self.pass.exchange(collective, pieces, Index::fixed(self.number)))
    }

    /// Starts to gather what is needed and not there.
    fn gather(&mut self, needed: &BTreeSet<Held>, there: &BTreeSet<Held>, ops: &mut Vec<Op>) {
        let pieces: Vec<Piece> = needed.difference(there).map(|held| self.piece(*held, true)).collect();
        if pieces.is_empty() {
            return;
        }
        let [start, wait] = self.numbered(Collective::AllGather, pieces);
        ops.push(start);
        let Offload { weights, embedding, head, .. } = *self.pass.offload;
        match weights > 0 || embedding || head {
            true => ops.push(wait),
            false => self.coming = Some(wait),
        }
    }

    /// Starts to scatter gradients that are whole.
    fn scatter(&mut self, whole: &[Held], ops: &mut Vec<Op>) {
        if whole.is_empty() {
            return;
        }
        ops.extend(self.leaving.take());
        let pieces = whole.iter().map(|held| self.piece(*held, false)).collect();
        let [start, wait] = self.numbered(Collective::ReduceScatter, pieces);
        ops.push(start);
        let Offload { gradients, embedding, head, .. } = *self.pass.offload;
        match gradients > 0 || embedding || head {
            true => ops.push(wait),
            false => self.leaving = Some(wait),
        }
    }

    /// An op on the buffers instead of what is held in parts.
    fn in_buffers(&self, op: &Op) -> Op {
        let mut op = op.clone();
        for operand in operands_mut(&mut op.kind) {
            if self.buffers.contains_key(&operand.tensor) {
                let slots = i64::from(self.pass.whole[operand.tensor.0 as usize].slots);
                let place = self.buffer((operand.tensor, operand.slot.base.rem_euclid(slots)));
                *operand = place.from(operand.offset);
            }
        }
        op
    }
}
