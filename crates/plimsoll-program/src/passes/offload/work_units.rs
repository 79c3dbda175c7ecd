//! Work units: which ops of a Program run together, on the device or on the host, and which offloaded regions they use.
//! `staging_rings` fetches these regions, and `host_work` runs the units of the host.

use super::{PIECE_ALIGNMENT, ProgramRewriter, elementwise_count, slice_of};
use crate::op::operands::{operands, operands_mut};
use crate::op::{Op, OpKind, Queue};
use crate::program::{Block, ProgramKind};
use crate::tensor::{Index, Lifetime, Operand, TensorId};
use plimsoll_core::{Category, Space, WorkKind};

/// A range of elements in a tensor's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Region {
    pub(super) tensor: TensorId,
    /// Slot, fixed within the block; only the executor knows the micro-batch.
    pub(super) slot: Index,
    pub(super) first: i64,
    pub(super) elements: u64,
}

impl Region {
    /// Returns the region of an unrolled op's access.
    pub(super) fn of(operand: Operand, elements: u64) -> Region {
        let slot = Index { scale: 0, ..operand.slot };
        Region { tensor: operand.tensor, slot, first: operand.offset.base, elements }
    }

    /// Returns the operand of the region's first element.
    pub(super) fn at(self) -> Operand {
        Operand { tensor: self.tensor, slot: self.slot, offset: Index::fixed(self.first) }
    }

    /// Returns the index after the last element.
    pub(super) fn end(self) -> i64 {
        self.first + self.elements as i64
    }

    /// Returns whether two regions share elements.
    pub(super) fn overlaps(self, other: Region) -> bool {
        (self.tensor, self.slot) == (other.tensor, other.slot) && self.first < other.end() && other.first < self.end()
    }
}

/// The use of a region, in the other memory space, by a work unit.
#[derive(Clone, Copy)]
pub(super) struct RegionUse {
    pub(super) region: Region,
    /// Whether the unit reads the content that the region has at its start.
    pub(super) read: bool,
    pub(super) written: bool,
}

/// The processor that runs a work unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Executor {
    /// The device; host tensors pass through rings on the device.
    Device,
    /// The host, which holds all or nearly all tensors of the unit.
    Host,
    /// The host, for an update; device tensors pass through rings on the host.
    HostUpdate,
}

/// Ops that run together: an iteration of a block, or a piece of a tensor.
pub(super) struct WorkUnit {
    pub(super) name: String,
    /// Either one block that runs once, or several rolled blocks that use the same regions.
    pub(super) blocks: Vec<Block>,
    pub(super) executor: Executor,
    pub(super) uses: Vec<RegionUse>,
}

impl WorkUnit {
    /// Returns the ops of all blocks.
    pub(super) fn ops(&self) -> impl Iterator<Item = &Op> {
        self.blocks.iter().flat_map(|block| &block.ops)
    }

    /// Returns whether a region of the next unit can be fetched while this unit runs: not if it partly overlaps a
    /// region of this unit.
    pub(super) fn can_prefetch(&self, next: &RegionUse) -> bool {
        self.uses.iter().all(|u| u.region == next.region || !u.region.overlaps(next.region))
    }

    /// Returns whether both units use the same regions on the same processor.
    fn has_same_uses(&self, other: &WorkUnit) -> bool {
        let regions = |unit: &WorkUnit| unit.uses.iter().map(|u| u.region).collect::<Vec<_>>();
        self.executor == other.executor && regions(self) == regions(other)
    }
}

impl ProgramRewriter<'_> {
    /// Takes the blocks of a Program and returns its work units.
    pub(super) fn work_units(&mut self, number: usize) -> Vec<WorkUnit> {
        let blocks = std::mem::take(&mut self.offloader.set.programs[number].blocks);
        let mut units: Vec<WorkUnit> = Vec::new();
        for block in &blocks {
            if let Some(rolled) = self.rolled_file_copy(block) {
                units.push(rolled);
                continue;
            }
            if let Some(rolled) = self.rolled_loss(block) {
                let mergeable = |last: &&mut WorkUnit| last.blocks[0].repeat > 1 && rolled.has_same_uses(last);
                match units.last_mut().filter(mergeable) {
                    Some(last) => last.blocks.extend(rolled.blocks),
                    None => units.push(rolled),
                }
                continue;
            }
            for variable in block.variables() {
                let ops: Vec<Op> = block.ops.iter().map(|op| self.offloader.unrolled(op, variable)).collect();
                for ops in self.split_into_pieces(ops) {
                    self.push_units(&block.name, ops, &mut units);
                }
            }
        }
        units
    }

    /// Returns a block of the loss as one unit without unrolling it. Its iterations take one block of rows after
    /// another and use the same offloaded regions.
    fn rolled_loss(&self, block: &Block) -> Option<WorkUnit> {
        let is_pass = matches!(self.work, WorkKind::Forward | WorkKind::Backward | WorkKind::Evaluate);
        let has_fixed_regions =
            |op: &Op| operands(op).all(|operand| !self.offloader.is_offloaded(operand) || operand.offset.scale == 0);
        let is_loss = is_pass && block.name.starts_with("loss");
        if !is_loss || !block.touches_fixed_slots() || !block.ops.iter().all(has_fixed_regions) {
            return None;
        }
        let mut rolled = block.clone();
        for op in &mut rolled.ops {
            for operand in operands_mut(&mut op.kind) {
                if self.offloader.is_offloaded(*operand) {
                    *operand = self.offloader.relocated(*operand);
                }
            }
        }
        let on_device = |op: &Op| op.queue == Queue::Compute && self.executor_of(op) == Executor::Device;
        let runs_on_device = rolled.ops.iter().all(on_device);
        let uses = self.offloader.uses_in(&rolled.ops, Space::Host);
        runs_on_device.then(|| {
            let (name, blocks) = (block.name.clone(), vec![rolled]);
            WorkUnit { name, blocks, executor: Executor::Device, uses }
        })
    }

    /// Returns a block that copies between a file and host tensors as one unit without unrolling it. The host runs it
    /// alone, without a ring.
    fn rolled_file_copy(&mut self, block: &Block) -> Option<WorkUnit> {
        let moves_files = matches!(self.work, WorkKind::Load | WorkKind::Save);
        if !moves_files || block.repeat == 1 || !block.touches_fixed_slots() {
            return None;
        }
        let mut rolled = block.clone();
        for operand in rolled.ops.iter_mut().flat_map(|op| operands_mut(&mut op.kind)) {
            *operand = self.offloader.relocated(*operand);
        }
        rolled.ops = self.with_host_staging(rolled.ops);
        if rolled.ops.iter().any(|op| self.executor_of(op) != Executor::Host) {
            return None;
        }
        rolled.ops.iter_mut().filter(|op| op.queue == Queue::Compute).for_each(|op| op.queue = Queue::Host);
        let (name, blocks) = (block.name.clone(), vec![rolled]);
        Some(WorkUnit { name, blocks, executor: Executor::Host, uses: vec![] })
    }

    /// Replaces the device's staging buffers by host buffers in ops that move host tensors to or from files.
    fn with_host_staging(&mut self, ops: Vec<Op>) -> Vec<Op> {
        let replaced: Vec<TensorId> = ops.iter().filter_map(|op| self.device_staging(op)).collect();
        replaced.into_iter().fold(ops, |ops, staging| {
            let host_staging = self.offloader.host_staging_for(staging);
            let rename = |id| if id == staging { host_staging } else { id };
            ops.iter().map(|op| op.rename_tensors(&rename)).collect()
        })
    }

    /// Splits elementwise ops on a large host tensor into pieces; returns all other ops as one piece.
    fn split_into_pieces(&self, ops: Vec<Op>) -> Vec<Vec<Op>> {
        let total = ops.first().and_then(elementwise_count).unwrap_or(0);
        // Ops that only write need no ring and therefore no pieces.
        let only_writes =
            |op: &Op| matches!(op.kind, OpKind::Fill { .. } | OpKind::InitNormal { .. } | OpKind::InitUniform { .. });
        let splittable = ops.iter().all(|op| elementwise_count(op) == Some(total) && !only_writes(op));
        let piece_max = self.offloader.piece_elements;
        if total <= piece_max || !splittable || self.offloader.uses_in(&ops, Space::Host).is_empty() {
            return vec![ops];
        }
        let piece = total.div_ceil(total.div_ceil(piece_max)).next_multiple_of(PIECE_ALIGNMENT);
        let elements_of = |id| self.offloader.set.tensor(id).elements();
        let slice = |first: u64| {
            let count = piece.min(total - first);
            ops.iter().map(|op| slice_of(op, total, first, count, &elements_of)).collect()
        };
        (0..total.div_ceil(piece)).map(|number| slice(number * piece)).collect()
    }

    /// Appends ops as units, one for each run of ops on the same processor.
    fn push_units(&mut self, name: &str, ops: Vec<Op>, units: &mut Vec<WorkUnit>) {
        let mut ops = self.with_host_staging(ops);
        ops.retain(|op| !self.is_redundant_zeroing(op));
        for ops in ops.chunk_by(|a, b| self.executor_of(a) == self.executor_of(b)) {
            let (mut ops, executor) = (ops.to_vec(), self.executor_of(&ops[0]));
            for op in ops.iter_mut().filter(|op| executor != Executor::Device && op.queue == Queue::Compute) {
                op.queue = Queue::Host;
            }
            let uses = match executor {
                Executor::Device => self.offloader.uses_in(&ops, Space::Host),
                Executor::Host => vec![],
                Executor::HostUpdate => self.offloader.uses_in(&ops, Space::Device),
            };
            units.push(WorkUnit { name: name.to_owned(), blocks: vec![Block::once(name, ops)], executor, uses });
        }
    }

    /// Returns the device's staging buffer through which an op moves a host tensor.
    fn device_staging(&self, op: &Op) -> Option<TensorId> {
        let OpKind::Cast { from, to, .. } = op.kind else { return None };
        let device_staging = |operand: Operand| {
            let tensor = self.offloader.set.tensor(operand.tensor);
            let is_staging = tensor.category == Category::Staging && tensor.lifetime == Lifetime::Transient;
            (is_staging && tensor.space == Space::Device).then_some(operand.tensor)
        };
        match (self.offloader.space(from), self.offloader.space(to)) {
            (Space::Host, _) => device_staging(to),
            (_, Space::Host) => device_staging(from),
            _ => None,
        }
    }

    /// Returns whether an op zeroes a gradient that the backward Program zeroes anyway.
    fn is_redundant_zeroing(&self, op: &Op) -> bool {
        match op.kind {
            OpKind::Fill { into, .. } if self.program == ProgramKind::BeginStep => {
                self.offloader.zeroed_in_backward.contains(&into.tensor)
            }
            _ => false,
        }
    }

    /// Returns the processor of an op: the host if its tensors are there, or if the host runs this update.
    fn executor_of(&self, op: &Op) -> Executor {
        let on_host = |operand: Operand| self.offloader.space(operand) == Space::Host;
        let runs_on_host = match &op.kind {
            OpKind::Embed { table, .. } => on_host(*table),
            OpKind::EmbedGrad { dtable, .. } => on_host(*dtable),
            OpKind::Fill { .. }
            | OpKind::InitNormal { .. }
            | OpKind::InitUniform { .. }
            | OpKind::Cast { .. }
            | OpKind::TransferStart { .. }
            | OpKind::TransferWait { .. } => operands(op).all(|operand| self.offloader.space(operand) != Space::Device),
            _ => false,
        };
        if runs_on_host {
            return Executor::Host;
        }
        let host_updates = self.work == WorkKind::Update && self.offloader.host_updates;
        if host_updates && self.has_offloaded_state(op) { Executor::HostUpdate } else { Executor::Device }
    }

    /// Returns whether an op of the update works on offloaded optimizer state.
    fn has_offloaded_state(&self, op: &Op) -> bool {
        let on_host = |operand: Operand| self.offloader.space(operand) == Space::Host;
        match &op.kind {
            // Weights are cast from their masters, which are optimizer state.
            OpKind::Cast { from, .. } => on_host(*from),
            OpKind::AdamW { first, .. } | OpKind::AdamW8 { first, .. } => on_host(*first),
            OpKind::Sgd { weight, momentum_buffer, .. } => on_host(momentum_buffer.unwrap_or(*weight)),
            _ => false,
        }
    }
}
