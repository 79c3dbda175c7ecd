//! Turns programs into [`Step`]s. Each op becomes [`Work`] for this device, updates with equal parameters share
//! launches, and events express dependencies. Nothing is enqueued here.

use super::operands::{LoadedPlan, OperandResolver, PostProduct};
use super::{CudaDevice, DEVICE};
use crate::cuda::collectives::PreparedCollective;
use crate::cuda::driver::{Address, Function};
use crate::cuda::kernels::launch::{self, Launch, OptimizerTensor};
use crate::cuda::kernels::ops::{self, OperandLookup};
use crate::cuda::pieces::PieceAddresses;
use crate::cuda::products::{Operands, Shape};
use crate::cuda::queues::{self, EventAssignment};
use crate::error::DeviceError;
use plimsoll_core::Space;
use plimsoll_program::op::{Collective, ExchangeRange, Queue};
use plimsoll_program::{Op, OpKind, Operand, TensorId, order};
use std::sync::Arc;

/// Source or destination of a copy, in an arena or a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyEndpoint {
    /// Address in device memory.
    Device(Address),
    /// Byte offset in the host arena.
    Host(u64),
    /// Byte offset in a tensor that lies in a file.
    File(TensorId, u64),
}

/// One piece of an op's work, such as a kernel or a copy. It runs on the op's queue.
pub(super) enum Work {
    /// A kernel with its launch parameters.
    Kernel(Function, Launch),
    /// A matrix product of cuBLASLt.
    Product(Shape, Operands),
    /// A copy of `bytes` bytes within device memory, or between device, host and files.
    Copy { from: CopyEndpoint, to: CopyEndpoint, bytes: u64 },
    /// An op that the CPU runs: computation on host tensors, or a message in the host arena. `variable` is the
    /// iteration of the op's block.
    OnHost { op: Box<Op>, variable: i64 },
    /// This rank's part in a collective, send or receive of tensors in device memory.
    Collective(Box<PreparedCollective>),
}

impl CopyEndpoint {
    /// Returns the place of an operand's first element.
    fn of(operand: &Operand, resolver: &OperandResolver) -> CopyEndpoint {
        match resolver.space(operand) {
            Space::Device => CopyEndpoint::Device(resolver.address_of(operand)),
            Space::Host => CopyEndpoint::Host(resolver.offset(operand)),
            Space::File => CopyEndpoint::File(operand.tensor, resolver.first_byte(operand)),
            Space::Scratch => panic!("bug: the host copies to and from the scratch file"),
        }
    }
}

impl Work {
    /// Creates the work that copies `elements` elements between two operands of the same data type.
    fn copy(from: &Operand, to: &Operand, elements: u64, resolver: &OperandResolver) -> Work {
        let bytes = elements * resolver.dtype(from).bytes();
        Work::Copy { from: CopyEndpoint::of(from, resolver), to: CopyEndpoint::of(to, resolver), bytes }
    }

    /// Returns whether the host executes the work itself when it is enqueued. Everything that the work depends on must
    /// then have completed.
    pub(super) fn runs_on_host(&self) -> bool {
        match self {
            Work::Kernel(..) | Work::Product(..) | Work::Collective(_) => false,
            Work::OnHost { .. } => true,
            Work::Copy { from, to, .. } => {
                !matches!((from, to), (CopyEndpoint::Device(_), _) | (_, CopyEndpoint::Device(_)))
            }
        }
    }
}

/// Consecutive ops that are enqueued together: one op, or several optimizer updates.
pub(super) struct Step {
    /// Number of the step's first op in the program's order, from 1.
    pub(super) first: u32,
    /// Number of ops in the step.
    pub(super) count: u32,
    /// Queue that does the step's work.
    pub(super) queue: Queue,
    /// Numbers of the events that the queue must wait for before the work.
    pub(super) waits_for: Vec<usize>,
    /// The step's work, in order. Empty for ops such as `TransferWait`, which only make queues wait.
    pub(super) work: Vec<Work>,
    /// Number of the event to record after the work; `None` if no step waits for this one.
    pub(super) signals: Option<usize>,
}

/// A program whose ops are resolved to steps with addresses, ready to be enqueued.
pub(super) struct PreparedProgram {
    /// Steps in the order in which they are enqueued.
    pub(super) steps: Vec<Step>,
    /// Whether some addresses depend on the number of the micro-batch.
    depends_on_micro_batch: bool,
    /// Whether some ops run on a device queue other than the compute queue.
    pub(super) uses_other_queues: bool,
    /// Whether some work runs on the host.
    pub(super) has_host_work: bool,
    /// End of the topmost workspace that the ops use in the device arena; 0 if they use none.
    pub(super) workspace_end: u64,
}

/// The parameters by which optimizer updates are grouped. Consecutive updates with equal parameters share launches.
#[derive(Clone, Copy, Debug, PartialEq)]
enum UpdateGroup {
    AdamW { scalars: Address, betas: [f64; 2], eps: f64 },
    AdamW8 { scalars: Address, betas: [f64; 2], eps: f64 },
    Sgd { scalars: Address, momentum: f64 },
}

impl UpdateGroup {
    fn for_op(op: &Op, lookup: &impl OperandLookup) -> Option<UpdateGroup> {
        match &op.kind {
            _ if op.queue != Queue::Compute => None,
            OpKind::AdamW { scalars, betas, eps, .. } => {
                Some(UpdateGroup::AdamW { scalars: lookup.address_of(scalars), betas: *betas, eps: *eps })
            }
            OpKind::AdamW8 { scalars, betas, eps, .. } => {
                Some(UpdateGroup::AdamW8 { scalars: lookup.address_of(scalars), betas: *betas, eps: *eps })
            }
            OpKind::Sgd { scalars, momentum, .. } => {
                Some(UpdateGroup::Sgd { scalars: lookup.address_of(scalars), momentum: *momentum })
            }
            _ => None,
        }
    }

    fn launches(self, tensors: &[OptimizerTensor]) -> Vec<Launch> {
        match self {
            UpdateGroup::AdamW { scalars, betas, eps } => launch::adamw(tensors, scalars, betas, eps),
            UpdateGroup::AdamW8 { scalars, betas, eps } => launch::adamw8(tensors, scalars, betas, eps),
            UpdateGroup::Sgd { scalars, momentum } => launch::sgd(tensors, scalars, momentum),
        }
    }
}

/// Returns for each op its leader: the number (from 1) of the op with which it is started. The leader is the first of
/// the consecutive ops with the same update group, or the op itself if it has no group (`None`).
fn group_leaders(update_groups: &[Option<UpdateGroup>]) -> Vec<u32> {
    let mut leaders: Vec<u32> = Vec::with_capacity(update_groups.len());
    for (index, group) in update_groups.iter().enumerate() {
        let follows = index > 0 && group.is_some() && *group == update_groups[index - 1];
        leaders.push(if follows { leaders[index - 1] } else { index as u32 + 1 });
    }
    leaders
}

impl CudaDevice {
    /// Returns the kernels, products, copies or host work that carry out one op, in order.
    pub(super) fn work_for(&self, resolver: &OperandResolver, op: &Op) -> Result<Vec<Work>, DeviceError> {
        if resolver.runs_on_host(op) {
            return Ok(vec![Work::OnHost { op: Box::new(op.clone()), variable: resolver.variable }]);
        }
        let kernel = |launch: Launch| Work::Kernel(self.kernels.function(&launch), launch);
        Ok(match &op.kind {
            kind @ OpKind::Product { .. } => {
                let (shape, operands) = resolver.product(kind).expect("a product");
                let mut work = vec![Work::Product(shape, operands)];
                let launches = resolver.post_product_launches(kind).into_iter();
                let required =
                    launches.filter(|(what, _)| *what == PostProduct::Residual || self.products.bias_by_kernel(&shape));
                work.extend(required.map(|(_, launch)| kernel(launch)));
                work
            }
            OpKind::Cast { from, to, elements } if resolver.dtype(from) == resolver.dtype(to) => {
                vec![Work::copy(from, to, *elements, resolver)]
            }
            OpKind::TransferStart { from, to, elements, .. } => vec![Work::copy(from, to, *elements, resolver)],
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange)
                if matches!(op.kind, OpKind::CollectiveStart(_)) != (exchange.collective == Collective::Send) =>
            {
                let addresses_of = |piece: &ExchangeRange| PieceAddresses {
                    input: resolver.address_of(&piece.input),
                    output: resolver.address_of(&piece.output),
                    dtype: resolver.dtype(&piece.input),
                };
                let (number, pieces) =
                    (resolver.index(exchange.sequence), exchange.pieces.iter().map(addresses_of).collect());
                vec![Work::Collective(Box::new(PreparedCollective::new(exchange.clone(), number as u64, pieces)))]
            }
            // The copy or collective is complete when its queue reaches this op.
            OpKind::TransferWait { .. } | OpKind::CollectiveStart(_) | OpKind::CollectiveWait(_) => Vec::new(),
            kind => {
                let unsupported = || DeviceError::Unsupported { op: op.name(), device: DEVICE };
                ops::launches(kind, resolver).ok_or_else(unsupported)?.into_iter().map(kernel).collect()
            }
        })
    }

    /// Resolves program number `index` to steps for one micro-batch, and assigns the events between them.
    fn prepare(&self, index: usize, micro_batch: u32) -> Result<PreparedProgram, DeviceError> {
        let LoadedPlan { set, placement, .. } = &*self.plan;
        let program = &set.programs[index];
        let trace: Vec<(&Op, i64)> = program.trace().collect();
        let resolver = |variable| self.resolver(variable, micro_batch);
        let update_groups: Vec<Option<UpdateGroup>> =
            trace.iter().map(|&(op, variable)| UpdateGroup::for_op(op, &resolver(variable))).collect();
        let leaders = group_leaders(&update_groups);
        // The host has completed its own ops when it reaches the next op, so nothing waits for them.
        let mut waits = order::waits(set, program, placement);
        waits.retain(|wait| !trace[wait.on as usize - 1].0.queue.runs_on_host());
        let EventAssignment { signals, mut waits_for, .. } =
            queues::assign_events(&waits, |op| leaders[op as usize - 1]);
        let mut steps: Vec<Step> = Vec::new();
        for (number, &(op, variable)) in (1..).zip(&trace) {
            if leaders[number as usize - 1] != number {
                steps.last_mut().expect("the leader precedes its members").count += 1;
                continue;
            }
            let work = self.work_for(&resolver(variable), op)?;
            let waits_for = waits_for.remove(&number).unwrap_or_default();
            steps.push(Step {
                first: number,
                count: 1,
                queue: op.queue,
                waits_for,
                work,
                signals: signals.get(&number).copied(),
            });
        }
        for step in steps.iter_mut().filter(|step| step.count > 1) {
            let members = step.first as usize - 1..(step.first + step.count) as usize - 1;
            let updated =
                |&(op, variable): &(&Op, i64)| ops::optimizer_tensor(&op.kind, &resolver(variable)).expect("an update");
            let tensors: Vec<OptimizerTensor> = trace[members.clone()].iter().map(updated).collect();
            let group = update_groups[members.start].expect("a group leader");
            let kernel = |launch: Launch| Work::Kernel(self.kernels.function(&launch), launch);
            step.work = group.launches(&tensors).into_iter().map(kernel).collect();
        }
        Ok(PreparedProgram {
            depends_on_micro_batch: trace.iter().any(|(op, _)| op.depends_on_micro_batch()),
            uses_other_queues: trace.iter().any(|(op, _)| op.queue != Queue::Compute && !op.queue.runs_on_host()),
            has_host_work: steps.iter().flat_map(|step| &step.work).any(Work::runs_on_host),
            workspace_end: self.workspace_end(&trace),
            steps,
        })
    }

    /// Returns the end of the topmost workspace that these ops (each with its block iteration) use in the device arena;
    /// 0 if they use none.
    fn workspace_end(&self, trace: &[(&Op, i64)]) -> u64 {
        let ends = trace.iter().flat_map(|&(op, variable)| {
            let resolver = self.resolver(variable, 0);
            let elements_of = |id: TensorId| self.plan.set.tensor(id).elements();
            let scratch = |operand: &Operand| {
                let tensor = self.plan.set.tensor(operand.tensor);
                tensor.category == plimsoll_core::Category::Workspace && tensor.space == Space::Device
            };
            let accesses = op.accesses(&elements_of);
            let ends: Vec<u64> = accesses
                .iter()
                .filter(|access| scratch(&access.operand))
                .map(|access| {
                    resolver.offset(&access.operand) + access.elements * resolver.dtype(&access.operand).bytes()
                })
                .collect();
            ends
        });
        ends.max().unwrap_or(0)
    }

    /// Prepares every program of the plan for micro-batch 0.
    pub(super) fn prepare_all(&mut self) -> Result<(), DeviceError> {
        (0..self.plan.set.programs.len()).try_for_each(|index| self.prepared(index, 0).map(drop))
    }

    /// Returns program number `index`, prepared for a micro-batch. Prepares it at the first call only, or once for all
    /// micro-batches if its addresses are the same in each.
    pub(super) fn prepared(&mut self, index: usize, micro_batch: u32) -> Result<Arc<PreparedProgram>, DeviceError> {
        let first = self.prepared.get(&(index, 0)).filter(|first| !first.depends_on_micro_batch);
        let key = (index, micro_batch);
        if let Some(known) = first.or_else(|| self.prepared.get(&key)) {
            return Ok(known.clone());
        }
        let prepared = Arc::new(self.prepare(index, micro_batch)?);
        let events = prepared.steps.iter().filter_map(|step| step.signals).max().map_or(0, |most| most + 1);
        self.resources.queues.make_events(events)?;
        let communicates = |step: &&Step| step.queue == Queue::Communication;
        self.resources.queues.make_gates(prepared.steps.iter().filter(communicates).count())?;
        self.prepared.insert(key, prepared.clone());
        Ok(prepared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equal_neighbours_share_update_launches() {
        let sgd = |momentum| Some(UpdateGroup::Sgd { scalars: 256, momentum });
        let (a, b) = (sgd(0.9), sgd(0.8));
        assert_eq!(group_leaders(&[None, a, a, b, None, b, a, a, a]), [1, 2, 2, 4, 5, 6, 7, 7, 7]);
        assert_eq!(group_leaders(&[]), Vec::<u32>::new());
    }

    #[test]
    fn copies_without_device_run_on_host() {
        let copy = |from, to| Work::Copy { from, to, bytes: 8 }.runs_on_host();
        let (device, host, file) =
            (CopyEndpoint::Device(512), CopyEndpoint::Host(0), CopyEndpoint::File(TensorId(0), 0));
        assert!(
            [(device, host), (host, device), (device, device), (file, device), (device, file)]
                .iter()
                .all(|&(from, to)| !copy(from, to))
        );
        assert!([(host, host), (file, host), (host, file)].iter().all(|&(from, to)| copy(from, to)));
    }
}
