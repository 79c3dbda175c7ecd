//! Host tensors: which tensors and slots move to the host, and what an operand refers to afterwards. The copies
//! between host and device are in `staging_rings`.

use super::work_units::{Region, RegionUse};
use super::{HOST_SUFFIX, PIECE_ELEMENTS, PIECES_PER_MATRIX, SMALL_TENSOR_FACTOR};
use crate::op::operands::{operands, operands_mut};
use crate::op::{Access, Accesses, Mode, Op, OpKind};
use crate::program::{Block, Program, ProgramKind, ProgramSet};
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId, TensorRole};
use foldhash::{HashMap, HashSet};
use plimsoll_core::{Category, Offload, Space};
use std::collections::BTreeMap;

/// The tensor in host memory to which the first slots (layers) of a device tensor have moved. The other slots stay on
/// the device, renumbered from 0.
///
/// In a pipeline, a tensor may have slots for several micro-batches in flight. Then the first `on_host` of each
/// micro-batch's `per_micro_batch` slots have moved.
#[derive(Clone, Copy)]
pub(super) struct HostPlacement {
    tensor: TensorId,
    on_host: u32,
    per_micro_batch: u32,
}

/// Name of the tensor with the inputs of all layers and the output of the last.
const LAYER_INPUTS: &str = "train.hidden";

/// The state of the offload pass over a set of Programs: which tensors it has moved to host memory.
pub(super) struct Offloader<'s> {
    /// The set before offload.
    before: &'s ProgramSet,
    /// The set with the Programs that are wanted. Their blocks are added one Program at a time.
    pub(super) set: ProgramSet,
    /// New place of each tensor with slots in host memory, by the number of the tensor; `None` for others, and no entry for
    /// tensors that the pass adds.
    placements: Vec<Option<HostPlacement>>,
    /// Buffer in host memory through which data passes between files and host tensors, by the device buffer that it
    /// replaces.
    host_staging: HashMap<TensorId, TensorId>,
    /// Host tensors of gradients that the backward Program starts from zero. No other Program zeroes them.
    pub(super) zeroed_in_backward: HashSet<TensorId>,
    /// Elements of the pieces in which the update processes a large tensor.
    pub(super) piece_elements: u64,
    /// Whether the host's CPU runs the update of parameters with offloaded optimizer state.
    pub(super) host_updates: bool,
}

impl<'s> Offloader<'s> {
    /// Creates the state for the `wanted` Programs of a set, with all tensors on the device.
    pub(super) fn new(
        before: &'s ProgramSet,
        wanted: &dyn Fn(ProgramKind) -> bool,
        host_updates: bool,
    ) -> Offloader<'s> {
        let without_blocks = |program: &Program| {
            let Program { work, kind, ref inputs, ref outputs, .. } = *program;
            Program { work, kind, inputs: inputs.clone(), outputs: outputs.clone(), blocks: Vec::new() }
        };
        let programs = before.programs.iter().map(without_blocks).collect();
        let mut set = ProgramSet { programs, phases: before.phases.clone(), tensors: before.tensors.clone() };
        set.retain_programs(|program| wanted(program.kind));
        let placements = vec![None; set.tensors.len()];
        let (host_staging, zeroed_in_backward) = (HashMap::default(), HashSet::default());
        Offloader { before, set, placements, host_staging, zeroed_in_backward, piece_elements: 0, host_updates }
    }

    /// Returns the blocks, before offload, of the Program with index `number` among the wanted ones.
    pub(super) fn blocks_before(&self, number: usize) -> &'s [Block] {
        let program = self.before.program(self.set.programs[number].kind);
        &program.expect("a wanted Program is one of those before").blocks
    }

    /// Sets the size of the pieces in which the update processes offloaded tensors: the largest matrix of a layer,
    /// divided by [`PIECES_PER_MATRIX`]. The pieces in flight are then small beside the model. `layers` is the number of
    /// layers; a tensor with that many slots has one slot per layer.
    pub(super) fn set_piece_elements(&mut self, layers: u32) {
        let layered = self.set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.slots == layers);
        let largest = layered.map(Tensor::elements).max().unwrap_or(1);
        self.piece_elements = (largest / PIECES_PER_MATRIX).clamp(*PIECE_ELEMENTS.start(), *PIECE_ELEMENTS.end());
    }

    /// Returns the number of slots (layers) of a tensor that move to the host, always the first ones. With slots for
    /// several micro-batches in flight, that many of each micro-batch move.
    fn offloaded_slots(&self, tensor: &Tensor, layers: u32, offload: &Offload) -> u32 {
        if tensor.name == LAYER_INPUTS {
            return offload.inputs.min(layers);
        }
        if tensor.lifetime != Lifetime::Persistent || tensor.space != Space::Device {
            return 0;
        }
        let (layer_slots, includes_tables) = match tensor.category {
            Category::Weight => (offload.weights, false),
            Category::Gradient => (offload.gradients, false),
            Category::Optimizer => (offload.optimizer, offload.optimizer >= layers),
            _ => return 0,
        };
        let is_state = tensor.category == Category::Optimizer;
        match tensor.role() {
            TensorRole::Embedding => u32::from(includes_tables || offload.embedding && !is_state),
            TensorRole::Head => u32::from(includes_tables || offload.head && !is_state),
            TensorRole::Shared => 0,
            TensorRole::Layer => layer_slots.min(layers),
        }
    }

    /// Moves slots (layers) to tensors in host memory as `offload` says, except those of small tensors.
    pub(super) fn place_on_host(&mut self, layers: u32, offload: &Offload) {
        let mut largest: BTreeMap<Category, u64> = BTreeMap::new();
        for tensor in self.set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.slots == layers) {
            let bytes = largest.entry(tensor.category).or_default();
            *bytes = (*bytes).max(tensor.bytes());
        }
        for number in 0..self.set.tensors.len() {
            let tensor = &self.set.tensors[number];
            let on_host = self.offloaded_slots(tensor, layers, offload);
            let largest = largest.get(&tensor.category).copied().unwrap_or(0);
            let is_small = tensor.lifetime == Lifetime::Persistent && tensor.bytes() * SMALL_TENSOR_FACTOR < largest;
            if on_host == 0 || is_small {
                continue;
            }
            let id = TensorId(number as u32);
            let per_micro_batch = if tensor.name == LAYER_INPUTS { layers + 1 } else { tensor.slots };
            let host_tensor = if on_host == per_micro_batch {
                self.set.tensors[number].space = Space::Host;
                id
            } else {
                let slots = tensor.slots / per_micro_batch * on_host;
                let name = format!("{}{HOST_SUFFIX}", tensor.name);
                let host_tensor = Tensor { name, space: Space::Host, slots, ..tensor.clone() };
                self.set.tensors[number].slots -= slots;
                self.add(host_tensor)
            };
            self.placements[number] = Some(HostPlacement { tensor: host_tensor, on_host, per_micro_batch });
        }
    }

    /// Moves Program inputs, such as token ids, to host memory if only ops that the host runs read them.
    pub(super) fn move_inputs_to_host(&mut self) {
        let inputs: HashSet<TensorId> = self.before.programs.iter().flat_map(|p| p.inputs.iter().copied()).collect();
        let ops = self.before.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
        let runs_on_device = |op: &&Op| match &op.kind {
            OpKind::Embed { table, .. } => self.placement(table.tensor).is_none(),
            OpKind::EmbedGrad { dtable, .. } => self.placement(dtable.tensor).is_none(),
            _ => true,
        };
        let mut read_on_device = vec![false; self.set.tensors.len()];
        ops.filter(runs_on_device).flat_map(operands).for_each(|read| read_on_device[read.tensor.0 as usize] = true);
        for number in inputs.iter().map(|input| input.0 as usize).filter(|number| !read_on_device[*number]) {
            self.set.tensors[number].space = Space::Host;
        }
    }

    /// Moves the workspaces of embedding gradients that the host computes to host memory, with 1 element each. The
    /// host's kernel needs no workspace.
    pub(super) fn drop_device_workspaces(&mut self) {
        let ops = self.before.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
        let workspaces: Vec<TensorId> = ops
            .filter_map(|op| match &op.kind {
                OpKind::EmbedGrad { dtable, workspace, .. } if self.placement(dtable.tensor).is_some() => {
                    Some(workspace.tensor)
                }
                _ => None,
            })
            .collect();
        for id in workspaces {
            let tensor = &mut self.set.tensors[id.0 as usize];
            (tensor.space, tensor.shape) = (Space::Host, vec![1]);
        }
    }

    /// Marks offloaded gradients that the backward pass can start from zero in a staging ring on the device, instead of
    /// fetching them. Excludes the embedding's gradient if the host adds to it before the device does.
    pub(super) fn zero_gradients_in_backward(&mut self) {
        let Some(backward) = self.before.program(ProgramKind::Backward) else { return };
        let mut seen = HashSet::default();
        for op in backward.blocks.iter().flat_map(|block| &block.ops) {
            for operand in operands(op).filter(|operand| seen.insert(operand.tensor)) {
                let is_gradient = self.set.tensor(operand.tensor).category == Category::Gradient;
                let on_host = matches!(&op.kind, OpKind::EmbedGrad { dtable, .. } if dtable.tensor == operand.tensor);
                if let (Some(placement), true, false) = (self.placement(operand.tensor), is_gradient, on_host) {
                    self.zeroed_in_backward.insert(placement.tensor);
                }
            }
        }
    }

    /// Returns the place in host memory of a tensor with slots there; `None` for others.
    fn placement(&self, tensor: TensorId) -> Option<&HostPlacement> {
        self.placements.get(tensor.0 as usize)?.as_ref()
    }

    /// Returns whether an op touches a tensor that lies on the host, at least in part.
    pub(super) fn touches_host(&self, op: &Op) -> bool {
        operands(op).any(|operand| self.is_on_host_in_part(operand))
    }

    /// Returns whether the operand's tensor has slots on the host. It has them if it is offloaded in part or as a
    /// whole, and if it is an input or a workspace that only the host uses.
    ///
    /// The slot of the operand itself may be on the device. The operand changes nevertheless, because the slots that
    /// stay there are renumbered ([`Offloader::relocated`]).
    pub(super) fn is_on_host_in_part(&self, operand: Operand) -> bool {
        self.placement(operand.tensor).is_some() || self.space(operand) == Space::Host
    }

    fn add(&mut self, tensor: Tensor) -> TensorId {
        self.set.tensors.push(tensor);
        TensorId(self.set.tensors.len() as u32 - 1)
    }

    /// Adds `slots` equal staging buffers with the dtype of `like` in memory space `space`.
    pub(super) fn add_buffer(
        &mut self,
        name: String,
        like: TensorId,
        elements: u64,
        space: Space,
        slots: u32,
    ) -> TensorId {
        let dtype = self.set.tensor(like).dtype;
        let (shape, category, lifetime) = (vec![elements], Category::Staging, Lifetime::Transient);
        self.add(Tensor { name, shape, dtype, space, category, lifetime, slots })
    }

    /// Returns the buffer in host memory that replaces the device buffer `staging`, and adds it if needed.
    pub(super) fn host_staging_for(&mut self, staging: TensorId) -> TensorId {
        if let Some(&host_staging) = self.host_staging.get(&staging) {
            return host_staging;
        }
        let name = format!("{}{HOST_SUFFIX}", self.set.tensor(staging).name);
        let elements = self.set.tensor(staging).elements();
        let host_staging = self.add_buffer(name, staging, elements, Space::Host, 1);
        self.host_staging.insert(staging, host_staging);
        host_staging
    }

    /// Returns the memory space of an operand.
    pub(super) fn space(&self, operand: Operand) -> Space {
        self.set.tensor(operand.tensor).space
    }

    /// Returns the ranges of elements that an op reads or writes.
    pub(super) fn accesses(&self, op: &Op) -> Accesses {
        op.accesses(&|id| self.set.tensor(id).elements())
    }

    /// Returns the operand for the same data after slots have moved to host memory: in the host tensor, or in a
    /// renumbered slot on the device. The slot of `operand` must not depend on the block's variable.
    pub(super) fn relocated(&self, operand: Operand) -> Operand {
        let Some(placement) = self.placement(operand.tensor) else { return operand };
        let (on_host, all) = (i64::from(placement.on_host), i64::from(placement.per_micro_batch));
        // Consecutive micro-batches are as many slots apart as each has in that tensor.
        let slot =
            |base: i64, slots: i64| Index { base, scale: 0, micro_batch: operand.slot.micro_batch.signum() * slots };
        let number = operand.slot.base.rem_euclid(all);
        if number < on_host {
            Operand { tensor: placement.tensor, slot: slot(number, on_host), ..operand }
        } else {
            Operand { slot: slot(number - on_host, all - on_host), ..operand }
        }
    }

    /// Returns an op as it runs in the iteration of its block in which the loop variable is `variable`. Operands in
    /// offloaded tensors are replaced as [`Offloader::relocated`] says.
    pub(super) fn unrolled(&self, op: &Op, variable: i64) -> Op {
        let mut op = op.iteration(variable);
        for operand in operands_mut(&mut op.kind) {
            *operand = self.relocated(*operand);
        }
        op
    }

    /// Returns the ranges of tensors in memory space `space` that ops use. Several ranges of one slot become one range
    /// that includes them all.
    pub(super) fn uses_in(&self, ops: &[Op], space: Space) -> Vec<RegionUse> {
        let mut uses: Vec<RegionUse> = Vec::new();
        let elements_of = |id| self.set.tensor(id).elements();
        for op in ops.iter().filter(|op| operands(op).any(|operand| self.space(operand) == space)) {
            op.for_each_access(&elements_of, &mut |access| {
                if self.space(access.operand) == space {
                    add_use(&mut uses, access);
                }
            });
        }
        uses
    }
}

/// Adds an access to the ranges that are used. Ranges of one slot are copied as one region, which must include the elements
/// between them.
fn add_use(uses: &mut Vec<RegionUse>, access: Access) {
    let (region, written) = (Region::of(access.operand, access.elements), access.mode != Mode::Read);
    let known = uses.iter_mut().find(|u| (u.region.tensor, u.region.slot) == (region.tensor, region.slot));
    let Some(known) = known else {
        uses.push(RegionUse { region, read: access.mode != Mode::Write, written });
        return;
    };
    let (first, end) = (known.region.first.min(region.first), known.region.end().max(region.end()));
    let hull = Region { first, elements: (end - first) as u64, ..region };
    known.read |= hull != known.region;
    known.written |= written;
    known.region = hull;
}
