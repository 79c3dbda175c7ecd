//! Who waits, and where: which tensors get a home on the host, how many of their slots, and where an operand then is. Ops
//! are only looked at and told where they find things; what is copied when is in `rings`.

use super::units::{Region, Use};
use super::{HOME, PIECE, PIECES, WORTH};
use crate::op::{Accesses, Mode, Op, OpKind};
use crate::operands::{operands, operands_mut};
use crate::program::{Program, ProgramSet};
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, Offload, Space};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Where the slots of a tensor went: the first `on_host` of them to `tensor`, the others stay and are counted anew. Where a
/// tensor has slots for several micro-batches in flight, so it is with the `each` slots of every one.
#[derive(Clone, Copy)]
pub(super) struct Home {
    tensor: TensorId,
    on_host: u32,
    each: u32,
}

/// Inputs of layers, with the output of the last.
const INPUTS: &str = "train.hidden";

pub(super) struct Pass {
    pub(super) set: ProgramSet,
    pub(super) homes: HashMap<TensorId, Home>,
    /// The host's twin of a staging buffer.
    pub(super) staging: HashMap<TensorId, TensorId>,
    /// Gradients that the backward Program begins with zeros, so that nobody else need do it.
    pub(super) begun: HashSet<TensorId>,
    /// Elements of a piece.
    pub(super) piece: u64,
    /// Whether the host does the update of what waits there.
    pub(super) host_updates: bool,
}

impl Pass {
    /// Elements of a piece: a part of the largest matrix, so that what is on its way is small beside the model.
    pub(super) fn piece_of(&self, layers: u32) -> u64 {
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

    pub(super) fn move_homes(&mut self, layers: u32, offload: &Offload) {
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
    pub(super) fn move_inputs(&mut self) {
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
    pub(super) fn drop_scratch(&mut self) {
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
    pub(super) fn begin_in_backward(&mut self) {
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
    pub(super) fn keep(&mut self, wanted: &dyn Fn(&Program) -> bool) {
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
    pub(super) fn moves(&self, op: &Op) -> bool {
        operands(op).any(|operand| {
            self.homes.contains_key(&operand.tensor) || self.set.tensor(operand.tensor).space == Space::Host
        })
    }

    fn add(&mut self, tensor: Tensor) -> TensorId {
        self.set.tensors.push(tensor);
        TensorId(self.set.tensors.len() as u32 - 1)
    }

    /// A buffer of the device or the host that no other Program uses.
    pub(super) fn buffer(&mut self, name: String, like: TensorId, elements: u64, space: Space, slots: u32) -> TensorId {
        let dtype = self.set.tensor(like).dtype;
        let (shape, category, lifetime) = (vec![elements], Category::Staging, Lifetime::Transient);
        self.add(Tensor { name, shape, dtype, space, category, lifetime, slots })
    }

    /// The host's twin of a staging buffer.
    pub(super) fn twin(&mut self, staging: TensorId) -> TensorId {
        if let Some(&twin) = self.staging.get(&staging) {
            return twin;
        }
        let Tensor { name, .. } = self.set.tensor(staging);
        let name = format!("{name}.host");
        let twin = self.buffer(name, staging, self.set.tensor(staging).elements(), Space::Host, 1);
        self.staging.insert(staging, twin);
        twin
    }

    pub(super) fn space(&self, operand: Operand) -> Space {
        self.set.tensor(operand.tensor).space
    }

    pub(super) fn accesses(&self, op: &Op) -> Accesses {
        op.accesses(&|id| self.set.tensor(id).elements())
    }

    /// An operand in a slot that is the same in every iteration, where it is now.
    pub(super) fn at_home(&self, operand: Operand) -> Operand {
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
    pub(super) fn unrolled(&self, op: &Op, variable: i64) -> Op {
        let mut op = op.iteration(variable);
        for operand in operands_mut(&mut op.kind) {
            *operand = self.at_home(*operand);
        }
        op
    }

    /// How ops use what has its home in a space that is not theirs: each part of a slot once, by tensor.
    pub(super) fn uses(&self, ops: &[Op], home: Space) -> Vec<Use> {
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
