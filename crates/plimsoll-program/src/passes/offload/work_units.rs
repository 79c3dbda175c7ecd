//! Work units: which ops of a Program run together, on the device or on the host, and which offloaded regions they use.
//! `staging_rings` fetches these regions, and `host_work` runs the units of the host.

use super::{PIECE_ALIGNMENT, ProgramRewriter, elementwise_count, slice_of};
use crate::op::operands::{operands, operands_mut};
use crate::op::{Op, OpKind, Queue};
use crate::program::{Block, ProgramKind};
use crate::tensor::{Index, Lifetime, Operand, TensorId};
use plimsoll_core::{Category, Space, WorkKind};

/// A range of elements in a tensor's slot, which the offload pass copies as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Region {
    pub(super) tensor: TensorId,
    /// Slot, which may depend on the micro-batch but not on the block's variable.
    pub(super) slot: Index,
    /// First element.
    pub(super) first: i64,
    pub(super) elements: u64,
}

impl Region {
    /// Returns the region of `elements` elements from an operand on. The operand must not depend on the block's
    /// variable.
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

/// The use of a region (range of a tensor) by a work unit whose processor cannot access the region in place. It is a
/// host tensor in a device unit, and a device tensor in an update that the host runs.
#[derive(Clone, Copy)]
pub(super) struct RegionUse {
    pub(super) region: Region,
    /// Whether the unit reads the content that the region has before the unit runs, so that it must be fetched.
    pub(super) read: bool,
    /// Whether the unit changes the region, so that it must be written back.
    pub(super) written: bool,
}

/// The processor that runs a work unit (ops that run together), which decides where staging rings are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Processor {
    /// The device; host tensors pass through staging rings (shared buffers) on the device.
    Device,
    /// The host, which holds all or nearly all tensors of the unit.
    Host,
    /// The host, for an optimizer update; device tensors pass through staging rings (shared buffers) on the host.
    HostUpdate,
}

/// Ops for which the offload pass fetches all offloaded data at once: those of a layer, or those on a piece of a tensor
/// in the update.
pub(super) struct WorkUnit {
    pub(super) name: String,
    /// Either one block that runs once, or one or more repeated blocks. Repeated blocks of a unit use the same ranges
    /// of offloaded tensors (`uses`).
    pub(super) blocks: Vec<Block>,
    pub(super) processor: Processor,
    /// Regions that must pass through staging rings: ranges of host tensors for a device unit, of device tensors for an
    /// update on the host. Empty for other host units.
    pub(super) uses: Vec<RegionUse>,
}

impl WorkUnit {
    /// Returns whether a region of the next unit can be fetched while this unit runs. A region that partly overlaps one
    /// of this unit cannot: the write-back of this unit must come first.
    pub(super) fn can_prefetch(&self, next: &RegionUse) -> bool {
        self.uses.iter().all(|u| u.region == next.region || !u.region.overlaps(next.region))
    }

    /// Returns whether both units use the same regions on the same processor.
    fn has_same_uses(&self, other: &WorkUnit) -> bool {
        let regions = |unit: &WorkUnit| unit.uses.iter().map(|u| u.region).collect::<Vec<_>>();
        self.processor == other.processor && regions(self) == regions(other)
    }
}

impl ProgramRewriter<'_, '_> {
    /// Splits the blocks of the Program with this index into work units, in order.
    pub(super) fn work_units(&mut self, number: usize) -> Vec<WorkUnit> {
        let mut units: Vec<WorkUnit> = Vec::new();
        for block in self.offloader.blocks_before(number) {
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
                    self.push_units(&block.name, variable, ops, &mut units);
                }
            }
        }
        units
    }

    /// Returns a block of the loss, of which each iteration processes some rows, as one work unit without unrolling it.
    /// Returns `None` for other blocks, if iterations use different offloaded regions, or if the host runs an op.
    fn rolled_loss(&self, block: &Block) -> Option<WorkUnit> {
        let is_pass = matches!(
            self.work,
            WorkKind::Forward | WorkKind::Backward | WorkKind::Evaluate | WorkKind::Score | WorkKind::Reference
        );
        let has_fixed_regions = |op: &Op| {
            operands(op).all(|operand| !self.offloader.is_on_host_in_part(operand) || operand.offset.scale == 0)
        };
        let is_loss = is_pass && block.name.starts_with("loss");
        if !is_loss || !block.touches_fixed_slots() || !block.ops.iter().all(has_fixed_regions) {
            return None;
        }
        let mut rolled = block.clone();
        for op in &mut rolled.ops {
            for operand in operands_mut(&mut op.kind) {
                if self.offloader.is_on_host_in_part(*operand) {
                    *operand = self.offloader.relocated(*operand);
                }
            }
        }
        let on_device = |op: &Op| op.queue == Queue::Compute && self.processor_of(op) == Processor::Device;
        let runs_on_device = rolled.ops.iter().all(on_device);
        let uses = self.offloader.uses_in(&rolled.ops, Space::Host);
        runs_on_device.then(|| {
            let (name, blocks) = (block.name.clone(), vec![rolled]);
            WorkUnit { name, blocks, processor: Processor::Device, uses }
        })
    }

    /// Returns a repeated block that copies between a file and host tensors as one work unit, without unrolling it. The
    /// host runs it without staging rings. Returns `None` for other blocks.
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
        if rolled.ops.iter().any(|op| self.processor_of(op) != Processor::Host) {
            return None;
        }
        rolled.ops.iter_mut().filter(|op| op.queue == Queue::Compute).for_each(|op| op.queue = Queue::Host);
        let (name, blocks) = (block.name.clone(), vec![rolled]);
        Some(WorkUnit { name, blocks, processor: Processor::Host, uses: vec![] })
    }

    /// Returns the ops with each device buffer between a host tensor and a file replaced by a buffer in host memory.
    fn with_host_staging(&mut self, ops: Vec<Op>) -> Vec<Op> {
        let replaced: Vec<TensorId> = ops.iter().filter_map(|op| self.device_staging(op)).collect();
        replaced.into_iter().fold(ops, |ops, staging| {
            let host_staging = self.offloader.host_staging_for(staging);
            let rename = |id| if id == staging { host_staging } else { id };
            ops.iter().map(|op| op.rename_tensors(&rename)).collect()
        })
    }

    /// Splits ops into pieces, and returns the ops of each piece. Only elementwise ops on a large host tensor are
    /// split; all other ops stay together as one piece.
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

    /// Appends ops to `units` as work units named `name`, one for each run of consecutive ops on the same processor.
    /// `variable` is that of the block from which the ops are. Leaves out redundant zeroing of gradients.
    fn push_units(&mut self, name: &str, variable: i64, ops: Vec<Op>, units: &mut Vec<WorkUnit>) {
        let mut ops = self.with_host_staging(ops);
        ops.retain(|op| !self.is_redundant_zeroing(op));
        while let Some(first) = ops.first() {
            let processor = self.processor_of(first);
            let end = ops.iter().position(|op| self.processor_of(op) != processor).unwrap_or(ops.len());
            let later = ops.split_off(end);
            let mut ops = std::mem::replace(&mut ops, later);
            for op in ops.iter_mut().filter(|op| processor != Processor::Device && op.queue == Queue::Compute) {
                op.queue = Queue::Host;
            }
            let uses = match processor {
                Processor::Device => self.offloader.uses_in(&ops, Space::Host),
                Processor::Host => vec![],
                Processor::HostUpdate => self.offloader.uses_in(&ops, Space::Device),
            };
            let blocks = vec![Block::iteration(name, variable, ops)];
            units.push(WorkUnit { name: name.to_owned(), blocks, processor, uses });
        }
    }

    /// Returns the device buffer through which an op moves a host tensor to or from a file, and `None` if there is
    /// none.
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

    /// Returns whether an op zeroes an offloaded gradient that the backward Program starts from zero anyway.
    fn is_redundant_zeroing(&self, op: &Op) -> bool {
        match op.kind {
            OpKind::Fill { into, .. } if self.program == ProgramKind::BeginStep => {
                self.offloader.zeroed_in_backward.contains(&into.tensor)
            }
            _ => false,
        }
    }

    /// Returns the processor that runs an op. The host runs copies and fills outside device memory, and embedding ops
    /// on a table in host memory. With `host_updates` it also runs updates of offloaded state.
    fn processor_of(&self, op: &Op) -> Processor {
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
            return Processor::Host;
        }
        let host_updates = self.work == WorkKind::Update && self.offloader.host_updates;
        if host_updates && self.has_offloaded_state(op) { Processor::HostUpdate } else { Processor::Device }
    }

    /// Returns whether an op of the update reads or writes offloaded optimizer state.
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
