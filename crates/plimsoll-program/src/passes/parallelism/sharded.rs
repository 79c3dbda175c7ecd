//! Sharded (FSDP, ZeRO-3): weights, gradients, masters and optimizer state are split over the ranks. Each rank holds
//! one run of elements of every tensor, as long as its memory allows. Ranks own their parts alone, and update them
//! alone.
//!
//! - A pass runs unit by unit; a unit is one iteration of a block, or all iterations if they use the same slots. The
//!   weights of a unit are all-gathered into buffers one unit ahead. Gradients are summed in buffers from zero. When a
//!   unit has completed them, a reduce-scatter adds them to each rank's part. So all ranks take part in every
//!   micro-batch, each with its own number of sequences.
//! - Elementwise Programs (fill, update, norm, load) run on the own part only.
//! - Files equal those of a single device: rank 0 writes them, and the other ranks send it their parts.
//! - A rank without sequences computes nothing: it takes part in the gathers, and contributes zero gradients.
//!
//! Quantized matrices are not split: every rank holds them, since they are small and are dequantized piece by piece.

use super::{loss_and_norm_sum, message, start_and_wait};
use crate::formats::STATE_BLOCK;
use crate::models::decoder::INITIAL_SUFFIX;
use crate::op::operands::{elements_mut, operands, operands_mut};
use crate::op::{Collective, Exchange, ExchangeRange, Mode, Op, OpKind};
use crate::program::{Block, Program, ProgramSet};
use crate::share::Share;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use foldhash::{HashMap, HashSet};
use plimsoll_core::{Category, Offload, Recipe, Space, WorkKind};
use std::collections::BTreeSet;
use std::ops::Range;

/// Number of layers whose gathered weights are in buffers at once: the layer at work and the next one.
const GATHERED_LAYERS: u32 = 2;

/// Name suffixes of the tensors that belong to a weight.
const STATE_SUFFIXES: [&str; 6] = [".gradient", ".master", ".first_scale", ".second_scale", ".first", ".second"];

/// Sequence number of the all-reduce of loss and norm.
const LOSS_AND_NORM: i64 = 1;

/// Returns the Programs of one rank of a sharded team (FSDP, ZeRO-3), from those of a single device.
pub(super) fn parallelize(set: ProgramSet, share: &Share, recipe: &Recipe) -> ProgramSet {
    assert_eq!(share.state.len(), share.ranks as usize, "every rank has its part of the state");
    let shards = shards(&set, share);
    let layer_weights = layer_weights(&set, &shards);
    let (offload, computes) = (&recipe.offload, recipe.micro_batch > 0);
    let mut sharder = Sharder { share, offload, computes, unsharded: set.tensors.clone(), set, shards, layer_weights };
    for (&id, shard) in &sharder.shards {
        let own = &shard.parts[share.rank as usize];
        // A tensor needs at least one element, even if this rank has no part of it.
        sharder.set.tensors[id.0 as usize].shape = vec![(own.end - own.start).max(1)];
    }
    let programs = std::mem::take(&mut sharder.set.programs);
    sharder.set.programs = programs.into_iter().map(|program| sharder.shard_program(program)).collect();
    sharder.set
}

/// The split of a tensor (a weight, its gradient or its optimizer state) over the ranks.
struct Shard {
    /// Range of elements of a slot that each rank holds, by rank; may be empty.
    parts: Vec<Range<u64>>,
    /// Elements of the weight per element of this tensor: 1, or 256 for the scales of 8-bit optimizer state.
    weight_elements: u64,
}

/// Returns the tensors that are split over the ranks, each with its split: weights, gradients and optimizer state,
/// without quantized matrices and the rotary table.
fn shards(set: &ProgramSet, share: &Share) -> HashMap<TensorId, Shard> {
    let ops = set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
    let mut unsplit: HashSet<TensorId> = HashSet::default();
    for op in ops {
        match &op.kind {
            OpKind::Rope { table, .. } | OpKind::RopeTable { table, .. } => unsplit.extend([table.tensor]),
            OpKind::Dequantize { from: quantized, .. } | OpKind::Quantize { into: quantized, .. } => {
                unsplit.extend(quantized.parts(1, 1).into_iter().map(|part| part.operand.tensor));
            }
            _ => {}
        }
    }
    let is_state =
        |tensor: &Tensor| matches!(tensor.category, Category::Weight | Category::Gradient | Category::Optimizer);
    let split = set.tensors.iter().enumerate().filter(|(number, tensor)| {
        let is_resident = tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device;
        is_resident && is_state(tensor) && !unsplit.contains(&TensorId(*number as u32))
    });
    split.map(|(number, tensor)| (TensorId(number as u32), shard(set, share, tensor))).collect()
}

/// Returns the split of a tensor, aligned with that of the weight that it belongs to.
fn shard(set: &ProgramSet, share: &Share, tensor: &Tensor) -> Shard {
    let suffix = STATE_SUFFIXES.into_iter().find(|suffix| tensor.name.ends_with(suffix)).unwrap_or("");
    let weight = set.find(tensor.name.strip_suffix(suffix).unwrap_or(&tensor.name));
    let elements = set.tensor(weight.expect("state belongs to a weight")).elements();
    let weight_elements = if suffix.ends_with("_scale") { STATE_BLOCK } else { 1 };
    let parts = share.parts(elements).into_iter();
    let parts = parts.map(|part| part.start.div_ceil(weight_elements)..part.end.div_ceil(weight_elements)).collect();
    Shard { parts, weight_elements }
}

/// Returns those split weights that have one slot per layer: all except embedding, head and final norm.
fn layer_weights(set: &ProgramSet, shards: &HashMap<TensorId, Shard>) -> BTreeSet<TensorId> {
    let computing = set.programs.iter().filter(|program| !matches!(program.work, WorkKind::Update | WorkKind::Load));
    let ops = computing.flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
    let operands = ops.flat_map(operands);
    let layered = operands.filter(|operand| operand.slot.scale != 0).map(|operand| operand.tensor);
    let is_weight = |id: &TensorId| shards.contains_key(id) && set.tensor(*id).category == Category::Weight;
    layered.filter(is_weight).collect()
}

/// The state of the sharding pass over the Programs of one rank.
struct Sharder<'a> {
    share: &'a Share,
    offload: &'a Offload,
    /// Whether this rank computes sequences; a storage-only worker computes none.
    computes: bool,
    set: ProgramSet,
    /// The tensors of a single device, with unsplit shapes.
    unsharded: Vec<Tensor>,
    shards: HashMap<TensorId, Shard>,
    layer_weights: BTreeSet<TensorId>,
}

/// A slot (usually a layer) of a split tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TensorSlot {
    tensor: TensorId,
    slot: i64,
}

/// Ops for which weights are gathered together (an FSDP unit): an iteration of a block such as one layer, or all
/// iterations if they use the same weights.
struct ComputeUnit {
    block: Block,
    /// Weights that the unit reads.
    weights: BTreeSet<TensorSlot>,
    /// Gradients that the unit adds to.
    gradients: BTreeSet<TensorSlot>,
}

impl Sharder<'_> {
    fn exchange(&self, collective: Collective, pieces: Vec<ExchangeRange>, sequence: Index) -> Exchange {
        Exchange { collective, pieces, rank: self.share.rank, peer: None, sequence, last: false }
    }

    fn unsharded_elements(&self, id: TensorId) -> u64 {
        self.unsharded[id.0 as usize].elements()
    }

    /// Returns the Program of this rank, from that of a single device.
    fn shard_program(&mut self, program: Program) -> Program {
        match program.work {
            WorkKind::Load | WorkKind::Update => Program { blocks: self.elementwise_blocks(&program), ..program },
            WorkKind::Save => Program { blocks: self.saving_blocks(&program), ..program },
            _ if self.computes => Program { blocks: self.computing_blocks(&program), ..program },
            _ => Program { blocks: self.computing_blocks(&program), inputs: vec![], outputs: vec![], ..program },
        }
    }

    // ---- passes over the model ----

    /// Splits a Program into compute units (FSDP units), in order.
    fn compute_units(&self, program: &Program) -> Vec<ComputeUnit> {
        let mut units = Vec::new();
        for block in &program.blocks {
            let ops = |variable: i64| block.ops.iter().map(|op| op.iteration(variable)).collect();
            let iteration = |variable: i64| Block::iteration(&block.name, variable, ops(variable));
            let iterations: Vec<Block> = match block.repeat > 1 && block.touches_fixed_slots() {
                true => vec![block.clone()],
                false => block.variables().map(iteration).collect(),
            };
            units.extend(iterations.into_iter().map(|block| self.compute_unit(block)));
        }
        units
    }

    fn compute_unit(&self, block: Block) -> ComputeUnit {
        let (mut weights, mut gradients) = (BTreeSet::new(), BTreeSet::new());
        for access in block.ops.iter().flat_map(|op| op.accesses(&|id| self.unsharded_elements(id))) {
            let tensor = access.operand.tensor;
            if self.shards.contains_key(&tensor) {
                let slots = i64::from(self.unsharded[tensor.0 as usize].slots);
                let slot = access.operand.slot.base.rem_euclid(slots);
                let list = if access.mode == Mode::Read { &mut weights } else { &mut gradients };
                list.insert(TensorSlot { tensor, slot });
            }
        }
        // Ranks may differ in recompute levels, but all must gather the same weights: all weights of each layer, or all
        // frozen copies of its trained weights.
        let is_copy = |id: TensorId| self.unsharded[id.0 as usize].name.ends_with(INITIAL_SUFFIX);
        let layer_weight = |used: &&TensorSlot| self.layer_weights.contains(&used.tensor);
        let layers: BTreeSet<(bool, i64)> =
            weights.iter().filter(layer_weight).map(|used| (is_copy(used.tensor), used.slot)).collect();
        for (copies, slot) in layers {
            let alike = self.layer_weights.iter().filter(|tensor| is_copy(**tensor) == copies);
            weights.extend(alike.map(|&tensor| TensorSlot { tensor, slot }));
        }
        ComputeUnit { block, weights, gradients }
    }

    /// Adds a buffer for each split tensor that the units use: for gathered weights, or for gradients before their
    /// reduce-scatter. Returns the buffers by split tensor.
    fn add_buffers(&mut self, program: &Program, units: &[ComputeUnit]) -> HashMap<TensorId, TensorId> {
        let mut buffers: HashMap<TensorId, TensorId> = HashMap::default();
        for used in units.iter().flat_map(|unit| unit.weights.iter().chain(&unit.gradients)) {
            buffers.entry(used.tensor).or_insert_with(|| {
                let like = &self.unsharded[used.tensor.0 as usize];
                self.set.tensors.push(Tensor {
                    name: format!("{}.{}.gathered", program.kind, like.name),
                    category: Category::Communication,
                    lifetime: Lifetime::Transient,
                    slots: like.slots.min(GATHERED_LAYERS),
                    ..like.clone()
                });
                TensorId(self.set.tensors.len() as u32 - 1)
            });
        }
        buffers
    }

    /// Returns the blocks of a forward or backward pass, an evaluation or generation, with the all-gathers and
    /// reduce-scatters.
    fn computing_blocks(&mut self, program: &Program) -> Vec<Block> {
        let mut units = self.compute_units(program);
        let buffers = self.add_buffers(program, &units);
        let zeroed = HashSet::default();
        let mut walker =
            UnitWalker { sharder: self, buffers, zeroed, sequence: 0, pending_gather: None, pending_scatter: None };
        let mut blocks = Vec::new();
        for at in 0..units.len() {
            let ops = std::mem::take(&mut units[at].block.ops);
            walker.push_unit(&units, at, ops, &mut blocks);
        }
        blocks.retain(|block| !block.ops.is_empty());
        blocks
    }

    // ---- elementwise Programs ----

    /// Returns the blocks of a Program that treats each element by itself (load, update), restricted to the rank's own
    /// parts. Adds the all-reduce of loss and norm before the clip factor.
    fn elementwise_blocks(&self, program: &Program) -> Vec<Block> {
        let mut blocks = Vec::new();
        for block in &program.blocks {
            if block.ops.iter().any(|op| matches!(op.kind, OpKind::ClipFactor { .. })) {
                blocks.push(loss_and_norm_sum(&self.set, self.share, Index::fixed(LOSS_AND_NORM)));
            }
            match self.element_run(block) {
                None => blocks.push(block.clone()),
                Some(run) => {
                    let own = self.shards[&run.tensor].parts[self.share.rank as usize].clone();
                    blocks.extend(run.parts(own).iter().map(|part| self.restricted(block, &run, part, None)));
                }
            }
        }
        blocks
    }

    /// Returns the elements of a split tensor that an elementwise block covers, and `None` if it touches no split
    /// tensor.
    fn element_run(&self, block: &Block) -> Option<ElementRun> {
        let accesses = block.ops.iter().flat_map(|op| op.accesses(&|id| self.unsharded_elements(id)));
        let split = accesses.filter(|access| self.shards.contains_key(&access.operand.tensor));
        let longest = split.max_by_key(|access| access.elements)?;
        let Operand { tensor, slot, offset } = longest.operand;
        let strides = offset.scale != 0;
        assert!(!strides || offset.scale * block.step == longest.elements as i64, "pieces are contiguous");
        let first = offset.at(block.first, 0);
        Some(ElementRun { tensor, slot, first, elements: longest.elements, strides, repeat: block.repeat })
    }

    /// Returns an elementwise block restricted to the part `part` of `run`, the elements that the whole block covers.
    ///
    /// Operands in split tensors refer to this rank's part, or to `received`, a buffer with another rank's part.
    fn restricted(&self, block: &Block, run: &ElementRun, part: &RunPart, received: Option<TensorId>) -> Block {
        let rank = self.share.rank as usize;
        let run_weight_elements = self.shards[&run.tensor].weight_elements;
        let moved = |index: Index| Index {
            base: index.at(if run.strides { block.first } else { 0 }, 0) + part.offset,
            scale: if run.strides { run.elements as i64 } else { index.scale },
            ..index
        };
        let mut ops = block.ops.clone();
        for op in &mut ops {
            *elements_mut(&mut op.kind).expect("ops on split tensors are elementwise") = part.elements;
            for operand in operands_mut(&mut op.kind) {
                match (self.shards.get(&operand.tensor), received) {
                    (Some(_), Some(buffer)) => *operand = Operand::whole(buffer),
                    (Some(shard), None) => {
                        // A scale stands for a block of elements.
                        let elements_per_scale = (shard.weight_elements / run_weight_elements) as i64;
                        let first = run.first + part.offset;
                        let stride = if run.strides { run.elements as i64 } else { 0 };
                        operand.offset = Index {
                            base: first / elements_per_scale - shard.parts[rank].start as i64,
                            scale: stride / elements_per_scale,
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
                assert!(run.first == 0 && *elements > 0, "8-bit state is updated in whole blocks");
            }
            if let OpKind::InitNormal { first, .. } | OpKind::InitUniform { first, .. } = &mut op.kind {
                *first = moved(*first);
            }
        }
        match run.strides {
            true => Block { name: block.name.clone(), first: 0, step: 1, repeat: part.repeat, ops },
            false => Block { ops, ..block.clone() },
        }
    }

    // ---- Programs that write files ----

    /// Returns the blocks of a Program that writes files: rank 0 writes, and the other ranks send it their parts piece
    /// by piece.
    fn saving_blocks(&mut self, program: &Program) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut next_sequence = 0;
        for block in &program.blocks {
            let Some(run) = self.element_run(block) else {
                blocks.extend((self.share.rank == 0).then(|| block.clone()));
                continue;
            };
            for (owner, elements) in self.shards[&run.tensor].parts.clone().into_iter().enumerate() {
                for part in run.parts(elements) {
                    let sequence = Index { base: next_sequence, scale: 1, micro_batch: 0 };
                    next_sequence += i64::from(part.repeat);
                    match (owner as u32, self.share.rank) {
                        (0, 0) => blocks.push(self.restricted(block, &run, &part, None)),
                        (owner, 0) => {
                            let buffer = self.receive_buffer(program, &run, &part);
                            blocks.push(self.receive_part(block, &run, &part, owner, sequence, buffer));
                        }
                        (owner, rank) if owner == rank => blocks.push(self.send_part(block, &run, &part, sequence)),
                        _ => {}
                    }
                }
            }
        }
        blocks
    }

    /// Returns the block in which this rank sends a part of the elements of `block` to rank 0.
    fn send_part(&self, block: &Block, run: &ElementRun, part: &RunPart, sequence: Index) -> Block {
        let own = &self.shards[&run.tensor].parts[self.share.rank as usize];
        let offset = Index {
            base: run.first + part.offset - own.start as i64,
            scale: if run.strides { run.elements as i64 } else { 0 },
            micro_batch: 0,
        };
        let at = Operand { tensor: run.tensor, slot: run.slot, offset };
        let ops = message(self.share, Collective::Send, 0, at, part.elements, sequence).into();
        Block { name: block.name.clone(), first: 0, step: 1, repeat: part.repeat, ops }
    }

    /// Returns the buffer into which rank 0 receives parts of other ranks. It is added, or enlarged, if needed.
    fn receive_buffer(&mut self, program: &Program, run: &ElementRun, part: &RunPart) -> TensorId {
        let dtype = self.unsharded[run.tensor.0 as usize].dtype;
        let name = format!("{}.received.{dtype}", program.kind);
        let buffer = self.set.find(&name).unwrap_or_else(|| {
            let (space, category, lifetime) = (Space::Device, Category::Communication, Lifetime::Transient);
            self.set.tensors.push(Tensor { name, shape: vec![1], dtype, space, category, lifetime, slots: 1 });
            TensorId(self.set.tensors.len() as u32 - 1)
        });
        let capacity = &mut self.set.tensors[buffer.0 as usize].shape[0];
        *capacity = (*capacity).max(part.elements);
        buffer
    }

    /// Returns the block in which rank 0 receives a part from its owner and writes it to a file.
    fn receive_part(
        &self,
        block: &Block,
        run: &ElementRun,
        part: &RunPart,
        owner: u32,
        sequence: Index,
        buffer: TensorId,
    ) -> Block {
        let into = Operand::whole(buffer);
        let mut ops = Vec::from(message(self.share, Collective::Receive, owner, into, part.elements, sequence));
        let writing = self.restricted(block, run, part, Some(buffer));
        ops.extend(writing.ops);
        Block { ops, ..writing }
    }
}

/// The elements of a split tensor that the iterations of an elementwise block cover.
struct ElementRun {
    tensor: TensorId,
    slot: Index,
    /// First element of the first iteration.
    first: i64,
    /// Elements of one iteration.
    elements: u64,
    /// Whether the iterations cover consecutive ranges of one slot. Otherwise each covers the same range, of a slot
    /// (layer) of its own.
    strides: bool,
    /// Iterations of the block.
    repeat: u32,
}

/// A part of an [`ElementRun`], covered by iterations of equal size.
struct RunPart {
    /// Offset from the first element of the run.
    offset: i64,
    /// Elements of one iteration.
    elements: u64,
    repeat: u32,
}

impl ElementRun {
    /// Returns the parts of the run that lie in the element range `range` of the slot: whole iterations, then the rest.
    fn parts(&self, range: Range<u64>) -> Vec<RunPart> {
        let repeat = if self.strides { u64::from(self.repeat) } else { 1 };
        let first = (range.start as i64).max(self.first);
        let end = (range.end as i64).min(self.first + (repeat * self.elements) as i64);
        let (offset, Ok(count)) = (first - self.first, u64::try_from(end - first)) else { return vec![] };
        if !self.strides {
            return Vec::from_iter((count > 0).then_some(RunPart { offset, elements: count, repeat: self.repeat }));
        }
        let (iterations, rest) = (count / self.elements, count % self.elements);
        let rest_offset = offset + (iterations * self.elements) as i64;
        let mut parts = Vec::new();
        if iterations > 0 {
            parts.push(RunPart { offset, elements: self.elements, repeat: iterations as u32 });
        }
        if rest > 0 {
            parts.push(RunPart { offset: rest_offset, elements: rest, repeat: 1 });
        }
        parts
    }
}

/// A forward or backward pass under construction, compute unit by compute unit, with the collectives between them.
struct UnitWalker<'p, 'a> {
    sharder: &'p mut Sharder<'a>,
    /// Buffers for gathered weights and for gradients before their reduce-scatter, by split tensor.
    buffers: HashMap<TensorId, TensorId>,
    /// Buffers that a rank without sequences has already zeroed.
    zeroed: HashSet<Operand>,
    /// Sequence number of the last collective.
    sequence: i64,
    /// The op that waits for the all-gather in flight; `None` if there is none.
    pending_gather: Option<Op>,
    /// The op that waits for the reduce-scatter in flight; `None` if there is none.
    pending_scatter: Option<Op>,
}

impl UnitWalker<'_, '_> {
    /// Appends the blocks of compute unit `at`, which computes `computing`: wait for its weights, start the all-gather for
    /// the next unit, compute, start the reduce-scatter of complete gradients.
    fn push_unit(&mut self, units: &[ComputeUnit], at: usize, computing: Vec<Op>, blocks: &mut Vec<Block>) {
        let none = BTreeSet::new();
        let (unit, previous, next) = (&units[at], at.checked_sub(1).map(|before| &units[before]), units.get(at + 1));
        let mut ops = Vec::with_capacity(computing.len() + unit.gradients.len() + 4);
        if previous.is_none() {
            self.gather(&unit.weights, &none, &mut ops);
        }
        ops.extend(self.pending_gather.take());
        if let Some(next) = next {
            self.gather(&next.weights, &unit.weights, &mut ops);
        }
        for slot in unit.gradients.difference(previous.map_or(&none, |previous| &previous.gradients)) {
            let (into, elements) = (self.buffer(*slot), self.sharder.unsharded_elements(slot.tensor));
            // A rank without sequences adds nothing, so its zeros stay valid.
            if self.sharder.computes || self.zeroed.insert(into) {
                ops.push(OpKind::Fill { into, value: 0.0, elements }.into());
            }
        }
        let computing = computing.into_iter().filter(|_| self.sharder.computes).map(|op| self.on_buffers(op));
        if unit.block.repeat == 1 {
            ops.extend(computing);
        } else {
            let computing = Block { ops: computing.collect(), ..unit.block.clone() };
            blocks.push(Block::iteration(&unit.block.name, unit.block.first, std::mem::take(&mut ops)));
            blocks.push(computing);
        }
        let complete =
            unit.gradients.difference(next.map_or(&none, |next| &next.gradients)).copied().collect::<Vec<_>>();
        self.scatter(&complete, &mut ops);
        if next.is_none() {
            ops.extend(self.pending_scatter.take());
        }
        blocks.push(Block::iteration(&unit.block.name, unit.block.first, ops));
    }

    /// Returns the operand of the buffer for a slot, with gathered weights or with gradients before their
    /// reduce-scatter.
    fn buffer(&self, TensorSlot { tensor, slot }: TensorSlot) -> Operand {
        let buffer = self.buffers[&tensor];
        Operand::slot(buffer, slot.rem_euclid(i64::from(self.sharder.set.tensor(buffer).slots)))
    }

    /// Returns the operand of this rank's part of a slot.
    fn own_part(&self, TensorSlot { tensor, slot }: TensorSlot) -> Operand {
        Operand::slot(tensor, slot)
    }

    /// Returns the number of elements of a tensor's slot that each rank holds, by rank.
    fn counts(&self, tensor: TensorId) -> Vec<u64> {
        self.sharder.shards[&tensor].parts.iter().map(|part| part.end - part.start).collect()
    }

    /// Returns the ops that start and await a collective, with the next sequence number.
    fn next_collective(&mut self, collective: Collective, pieces: Vec<ExchangeRange>) -> [Op; 2] {
        self.sequence += 1;
        start_and_wait(self.sharder.exchange(collective, pieces, Index::fixed(self.sequence)))
    }

    /// Appends to `ops` the start of the all-gather of the weights in `needed` that are not in `gathered`. Its wait
    /// becomes `pending_gather`, or follows at once if weights are offloaded.
    fn gather(&mut self, needed: &BTreeSet<TensorSlot>, gathered: &BTreeSet<TensorSlot>, ops: &mut Vec<Op>) {
        let piece = |slot: &TensorSlot| ExchangeRange {
            input: self.own_part(*slot),
            output: self.buffer(*slot),
            counts: self.counts(slot.tensor),
        };
        let pieces: Vec<ExchangeRange> = needed.difference(gathered).map(piece).collect();
        if pieces.is_empty() {
            return;
        }
        let [start, wait] = self.next_collective(Collective::AllGather, pieces);
        ops.push(start);
        let Offload { weights, embedding, head, .. } = *self.sharder.offload;
        match weights > 0 || embedding || head {
            true => ops.push(wait),
            false => self.pending_gather = Some(wait),
        }
    }

    /// Appends to `ops` the start of the reduce-scatter of gradients that are complete for this micro-batch. Its wait
    /// becomes `pending_scatter`, or follows at once if gradients are offloaded.
    fn scatter(&mut self, complete: &[TensorSlot], ops: &mut Vec<Op>) {
        if complete.is_empty() {
            return;
        }
        ops.extend(self.pending_scatter.take());
        let piece = |slot: &TensorSlot| ExchangeRange {
            input: self.buffer(*slot),
            output: self.own_part(*slot),
            counts: self.counts(slot.tensor),
        };
        let pieces = complete.iter().map(piece).collect();
        let [start, wait] = self.next_collective(Collective::ReduceScatter, pieces);
        ops.push(start);
        let Offload { gradients, embedding, head, .. } = *self.sharder.offload;
        match gradients > 0 || embedding || head {
            true => ops.push(wait),
            false => self.pending_scatter = Some(wait),
        }
    }

    /// Returns an op with split tensors replaced by their buffers.
    fn on_buffers(&self, mut op: Op) -> Op {
        for operand in operands_mut(&mut op.kind) {
            let tensor = operand.tensor;
            if self.buffers.contains_key(&tensor) {
                let slots = i64::from(self.sharder.unsharded[tensor.0 as usize].slots);
                let slot = operand.slot.base.rem_euclid(slots);
                *operand = self.buffer(TensorSlot { tensor, slot }).starting_at(operand.offset);
            }
        }
        op
    }
}
