//! From Programs to [`Step`]s: each op becomes the [`Work`] that it is on this device, updates that may share launches are
//! put together, and events say what waits for what. Nothing is put on a queue here; the executor itself does that.

use super::frame::{AfterProduct, Frame, Plan};
use super::{CudaDevice, DEVICE};
use crate::cuda::collectives::{Ready, Stands};
use crate::cuda::driver::{Address, Function};
use crate::cuda::kernels::launch::{self, Launch, Updated};
use crate::cuda::kernels::ops::{self, Places};
use crate::cuda::products::{Operands, Shape};
use crate::cuda::queues::{self, Signals};
use crate::device::DeviceError;
use plimsoll_core::Space;
use plimsoll_program::op::{Collective, Piece, Queue};
use plimsoll_program::{Op, OpKind, Operand, TensorId, order};
use std::sync::Arc;

/// A place in one of the arenas, or in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Device(Address),
    /// Byte of the host's arena.
    Host(u64),
    /// Byte of a file-space tensor.
    File(TensorId, u64),
}

/// What is put on a queue.
pub(super) enum Work {
    Kernel(Function, Launch),
    Product(Shape, Operands),
    /// Bytes from one place to another.
    Copy {
        from: Place,
        to: Place,
        bytes: u64,
    },
    /// An op of the host's processor, or a message that stands in its arena.
    OnHost {
        op: Box<Op>,
        variable: i64,
    },
    /// This device's part in a collective.
    Collective(Box<Ready>),
}

impl Work {
    /// Whether the host does it itself, and now: all that it depends on has to be over.
    pub(super) fn is_done_by_host(&self) -> bool {
        match self {
            Work::Kernel(..) | Work::Product(..) | Work::Collective(_) => false,
            Work::OnHost { .. } => true,
            Work::Copy { from, to, .. } => !matches!((from, to), (Place::Device(_), _) | (_, Place::Device(_))),
        }
    }
}

/// Ops that are put on their queue as one.
pub(super) struct Step {
    /// Number of the first op.
    pub(super) first: u32,
    /// How many ops it is.
    pub(super) count: u32,
    pub(super) queue: Queue,
    /// Events that have to be over before.
    pub(super) awaits: Vec<usize>,
    pub(super) works: Vec<Work>,
    /// The event that is over afterwards.
    pub(super) gives: Option<usize>,
}

/// A Program, ready to be put on queues.
pub(super) struct Prepared {
    pub(super) steps: Vec<Step>,
    /// Whether operands stand elsewhere for other micro-batches.
    by_micro_batch: bool,
    /// Whether it has ops on other queues than that of computation.
    pub(super) forks: bool,
    /// Whether the host itself does something in it.
    pub(super) on_host: bool,
    /// Up to where it gives scratch to ops, in the device's arena.
    pub(super) scratch_end: u64,
}

/// Updates that may share launches: those with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Together {
    AdamW { scalars: Address, betas: [f64; 2], eps: f64 },
    AdamW8 { scalars: Address, betas: [f64; 2], eps: f64 },
    Sgd { scalars: Address, momentum: f64 },
}

impl Together {
    fn of(op: &Op, places: &impl Places) -> Option<Together> {
        match &op.kind {
            _ if op.queue != Queue::Compute => None,
            OpKind::AdamW { scalars, betas, eps, .. } => {
                Some(Together::AdamW { scalars: places.at(scalars), betas: *betas, eps: *eps })
            }
            OpKind::AdamW8 { scalars, betas, eps, .. } => {
                Some(Together::AdamW8 { scalars: places.at(scalars), betas: *betas, eps: *eps })
            }
            OpKind::Sgd { scalars, momentum, .. } => {
                Some(Together::Sgd { scalars: places.at(scalars), momentum: *momentum })
            }
            _ => None,
        }
    }

    fn launches(self, tensors: &[Updated]) -> Vec<Launch> {
        match self {
            Together::AdamW { scalars, betas, eps } => launch::adamw(tensors, scalars, betas, eps),
            Together::AdamW8 { scalars, betas, eps } => launch::adamw8(tensors, scalars, betas, eps),
            Together::Sgd { scalars, momentum } => launch::sgd(tensors, scalars, momentum),
        }
    }
}

/// By op: the number of the op that it is started with, which is its own or that of the first of its group.
fn leaders(together: &[Option<Together>]) -> Vec<u32> {
    let mut leaders: Vec<u32> = Vec::with_capacity(together.len());
    for (index, group) in together.iter().enumerate() {
        let follows = index > 0 && group.is_some() && *group == together[index - 1];
        leaders.push(if follows { leaders[index - 1] } else { index as u32 + 1 });
    }
    leaders
}

impl CudaDevice {
    /// What an op is on this device.
    pub(super) fn works(&self, frame: &Frame, op: &Op) -> Result<Vec<Work>, DeviceError> {
        if frame.is_hosts(op) {
            return Ok(vec![Work::OnHost { op: Box::new(op.clone()), variable: frame.variable }]);
        }
        let kernel = |launch: Launch| Work::Kernel(self.kernels.function(&launch), launch);
        let copy = |from: &Operand, to: &Operand, elements: u64| {
            let place = |operand: &Operand| match frame.space(operand) {
                Space::Device => Place::Device(frame.at(operand)),
                Space::Host => Place::Host(frame.offset(operand)),
                Space::File => Place::File(operand.tensor, frame.first_byte(operand)),
                Space::Scratch => panic!("bug: the host copies to and from the scratch file"),
            };
            vec![Work::Copy { from: place(from), to: place(to), bytes: elements * frame.dtype(from).bytes() }]
        };
        Ok(match &op.kind {
            kind @ OpKind::Product { .. } => {
                let (shape, operands) = frame.product(kind).expect("a product");
                let mut works = vec![Work::Product(shape, operands)];
                let after = frame.after_product(kind).into_iter();
                let needed =
                    after.filter(|(what, _)| *what == AfterProduct::Residual || self.products.bias_by_kernel(&shape));
                works.extend(needed.map(|(_, launch)| kernel(launch)));
                works
            }
            OpKind::Cast { from, to, elements } if frame.dtype(from) == frame.dtype(to) => copy(from, to, *elements),
            OpKind::TransferStart { from, to, elements, .. } => copy(from, to, *elements),
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange)
                if matches!(op.kind, OpKind::CollectiveStart(_)) != (exchange.collective == Collective::Send) =>
            {
                let stands = |piece: &Piece| Stands {
                    input: frame.at(&piece.input),
                    output: frame.at(&piece.output),
                    dtype: frame.dtype(&piece.input),
                };
                let (number, pieces) = (frame.index(exchange.sequence), exchange.pieces.iter().map(stands).collect());
                vec![Work::Collective(Box::new(Ready::new(exchange.clone(), number as u64, pieces)))]
            }
            // Its queue has come here when the copy, or the collective, is done.
            OpKind::TransferWait { .. } | OpKind::CollectiveStart(_) | OpKind::CollectiveWait(_) => Vec::new(),
            kind => {
                let unsupported = || DeviceError::Unsupported { op: op.name(), device: DEVICE };
                ops::launches(kind, frame).ok_or_else(unsupported)?.into_iter().map(kernel).collect()
            }
        })
    }

    /// A Program as steps, each with the events that it waits for and gives.
    fn prepare(&self, index: usize, micro_batch: u32) -> Result<Prepared, DeviceError> {
        let Plan { set, placement, .. } = &*self.plan;
        let program = &set.programs[index];
        let trace: Vec<(&Op, i64)> = program.trace().collect();
        let frame = |variable| self.frame(variable, micro_batch);
        let together: Vec<Option<Together>> =
            trace.iter().map(|&(op, variable)| Together::of(op, &frame(variable))).collect();
        let leaders = leaders(&together);
        // The host has done its own ops when it comes to the next one.
        let mut waits = order::waits(set, program, placement);
        waits.retain(|wait| !trace[wait.on as usize - 1].0.queue.is_hosts());
        let Signals { gives, mut awaits, .. } = queues::signals(&waits, |op| leaders[op as usize - 1]);
        let mut steps: Vec<Step> = Vec::new();
        for (number, &(op, variable)) in (1..).zip(&trace) {
            if leaders[number as usize - 1] != number {
                steps.last_mut().expect("its leader stands before it").count += 1;
                continue;
            }
            let works = self.works(&frame(variable), op)?;
            let awaits = awaits.remove(&number).unwrap_or_default();
            steps.push(Step {
                first: number,
                count: 1,
                queue: op.queue,
                awaits,
                works,
                gives: gives.get(&number).copied(),
            });
        }
        for step in steps.iter_mut().filter(|step| step.count > 1) {
            let members = step.first as usize - 1..(step.first + step.count) as usize - 1;
            let updated = |&(op, variable): &(&Op, i64)| ops::updated(&op.kind, &frame(variable)).expect("an update");
            let tensors: Vec<Updated> = trace[members.clone()].iter().map(updated).collect();
            let group = together[members.start].expect("a group");
            let kernel = |launch: Launch| Work::Kernel(self.kernels.function(&launch), launch);
            step.works = group.launches(&tensors).into_iter().map(kernel).collect();
        }
        Ok(Prepared {
            by_micro_batch: trace.iter().any(|(op, _)| op.differs_by_micro_batch()),
            forks: trace.iter().any(|(op, _)| op.queue != Queue::Compute && !op.queue.is_hosts()),
            on_host: steps.iter().flat_map(|step| &step.works).any(Work::is_done_by_host),
            scratch_end: self.scratch_end(&trace),
            steps,
        })
    }

    /// Where the topmost scratch of these ops ends.
    fn scratch_end(&self, trace: &[(&Op, i64)]) -> u64 {
        let ends = trace.iter().flat_map(|&(op, variable)| {
            let frame = self.frame(variable, 0);
            let elements_of = |id: TensorId| self.plan.set.tensor(id).elements();
            let scratch = |operand: &Operand| {
                let tensor = self.plan.set.tensor(operand.tensor);
                tensor.category == plimsoll_core::Category::Workspace && tensor.space == Space::Device
            };
            let accesses = op.accesses(&elements_of);
            let ends: Vec<u64> = accesses
                .iter()
                .filter(|access| scratch(&access.operand))
                .map(|access| frame.offset(&access.operand) + access.elements * frame.dtype(&access.operand).bytes())
                .collect();
            ends
        });
        ends.max().unwrap_or(0)
    }

    /// Prepares every Program for its first micro-batch.
    pub(super) fn prepare_all(&mut self) -> Result<(), DeviceError> {
        (0..self.plan.set.programs.len()).try_for_each(|index| self.prepared(index, 0).map(drop))
    }

    /// A Program, prepared now or before.
    pub(super) fn prepared(&mut self, index: usize, micro_batch: u32) -> Result<Arc<Prepared>, DeviceError> {
        let first = self.prepared.get(&(index, 0)).filter(|first| !first.by_micro_batch);
        let key = (index, micro_batch);
        if let Some(known) = first.or_else(|| self.prepared.get(&key)) {
            return Ok(known.clone());
        }
        let prepared = Arc::new(self.prepare(index, micro_batch)?);
        let events = prepared.steps.iter().filter_map(|step| step.gives).max().map_or(0, |most| most + 1);
        self.machine.queues.make_events(events)?;
        let communicates = |step: &&Step| step.queue == Queue::Communication;
        self.machine.queues.make_gates(prepared.steps.iter().filter(communicates).count())?;
        self.prepared.insert(key, prepared.clone());
        Ok(prepared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_neighbours_with_the_same_numbers_are_updated_together() {
        let sgd = |momentum| Some(Together::Sgd { scalars: 256, momentum });
        let (a, b) = (sgd(0.9), sgd(0.8));
        assert_eq!(leaders(&[None, a, a, b, None, b, a, a, a]), [1, 2, 2, 4, 5, 6, 7, 7, 7]);
        assert_eq!(leaders(&[]), Vec::<u32>::new());
    }

    #[test]
    fn a_copy_that_the_device_has_no_part_in_is_the_hosts() {
        let copy = |from, to| Work::Copy { from, to, bytes: 8 }.is_done_by_host();
        let (device, host, file) = (Place::Device(512), Place::Host(0), Place::File(TensorId(0), 0));
        assert!(
            [(device, host), (host, device), (device, device), (file, device), (device, file)]
                .iter()
                .all(|&(from, to)| !copy(from, to))
        );
        assert!([(host, host), (file, host), (host, file)].iter().all(|&(from, to)| copy(from, to)));
    }
}
