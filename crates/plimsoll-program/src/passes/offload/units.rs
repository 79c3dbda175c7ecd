//! Units of work: how the ops of a Program are told apart into what is done together, who does it, and which regions of
//! what waits it uses. How these come and go is in `rings`, and what the host does with its own in `host`.

use super::{PIECE_STEP, Rewrite, by_element, part_of};
use crate::op::{Op, OpKind, Queue};
use crate::operands::{operands, operands_mut};
use crate::program::Block;
use crate::tensor::{Index, Lifetime, Operand, TensorId};
use plimsoll_core::{Category, Space, WorkName};

/// Part of a tensor's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Region {
    pub(super) tensor: TensorId,
    /// The same in every iteration; of which micro-batch is known while running.
    pub(super) slot: Index,
    pub(super) first: i64,
    pub(super) elements: u64,
}

impl Region {
    pub(super) fn of(operand: Operand, elements: u64) -> Region {
        let slot = Index { scale: 0, ..operand.slot };
        Region { tensor: operand.tensor, slot, first: operand.offset.base, elements }
    }

    pub(super) fn at(self) -> Operand {
        Operand { tensor: self.tensor, slot: self.slot, offset: Index::fixed(self.first) }
    }

    pub(super) fn end(self) -> i64 {
        self.first + self.elements as i64
    }

    pub(super) fn overlaps(self, other: Region) -> bool {
        (self.tensor, self.slot) == (other.tensor, other.slot) && self.first < other.end() && other.first < self.end()
    }
}

/// How a unit of work uses a region whose home is elsewhere.
#[derive(Clone, Copy)]
pub(super) struct Use {
    pub(super) region: Region,
    /// Whether its content matters when the unit begins.
    pub(super) read: bool,
    pub(super) written: bool,
}

/// Who does a unit of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// The device: what waits on the host comes to it.
    Device,
    /// The host, where all or nearly all of it is.
    Host,
    /// The host, to which what is on the device comes.
    HostUpdate,
}

/// Ops that are done together: an iteration of a block, a piece of a tensor.
pub(super) struct Unit {
    pub(super) name: String,
    /// One that runs once; or several that run often and use the same of what waits.
    pub(super) blocks: Vec<Block>,
    pub(super) by: By,
    pub(super) uses: Vec<Use>,
}

impl Unit {
    pub(super) fn ops(&self) -> impl Iterator<Item = &Op> {
        self.blocks.iter().flat_map(|block| &block.ops)
    }

    /// Whether what a later unit uses can come while this one is at work: not where it is part of the same, or has such
    /// parts.
    pub(super) fn goes_beside(&self, later: &Use) -> bool {
        self.uses.iter().all(|u| u.region == later.region || !u.region.overlaps(later.region))
    }

    fn uses_the_same(&self, other: &Unit) -> bool {
        let regions = |unit: &Unit| unit.uses.iter().map(|u| u.region).collect::<Vec<_>>();
        self.by == other.by && regions(self) == regions(other)
    }
}

impl Rewrite<'_> {
    pub(super) fn units(&mut self, number: usize) -> Vec<Unit> {
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
}
