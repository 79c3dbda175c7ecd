//! Checks of a set of Programs:
//!
//! - Every operand lies within its tensor, in a memory space that the op's queue reaches, with the dtype that its op
//!   needs.
//! - No op reads a transient tensor before an op of its phase has written it.
//! - Every start has its wait. A send may be awaited in a later Program of its phase, for the same micro-batch.
//! - No op touches the ranges of a copy in flight in a way that conflicts with it.

use crate::op::{Access, Collective, Mode, Op, OpKind, Queue, mistyped_operand};
use crate::program::{Phase, Program, ProgramKind, ProgramSet};
use crate::tensor::{Lifetime, Operand, TensorId};
use foldhash::HashSet;
use plimsoll_core::{DType, Space};

/// The reason why a set of Programs is malformed and must not run: a fault of the code that built it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedProgram {
    /// An operand reaches beyond its tensor.
    #[error("{program}: {op} touches elements {first}..{end} of `{tensor}`, which has {elements}")]
    OutOfRange {
        /// Program with the op.
        program: ProgramKind,
        /// Name of the op.
        op: String,
        /// Name of the tensor.
        tensor: String,
        /// First element touched.
        first: i64,
        /// Index after the last element touched.
        end: i64,
        /// Elements that the tensor has in a slot.
        elements: u64,
    },
    /// An operand does not have the dtype that its op needs.
    #[error("{program}: {op} needs `{tensor}` as {expected}, but it is {found}")]
    Type {
        /// Program with the op.
        program: ProgramKind,
        /// Name of the op.
        op: String,
        /// Name of the tensor.
        tensor: String,
        /// Dtype of the tensor.
        found: DType,
        /// Dtype that the op needs.
        expected: DType,
    },
    /// An op reads a transient tensor that is no input and that no earlier op of its phase (Programs that run in
    /// sequence) has written.
    #[error("{program}: {op} reads `{tensor}` (slot {slot}) before any op has written it")]
    ReadBeforeWrite {
        /// Program with the op.
        program: ProgramKind,
        /// Name of the op.
        op: String,
        /// Name of the tensor.
        tensor: String,
        /// Slot of the tensor: which of the equal tensors under its name.
        slot: u32,
    },
    /// A copy or collective is started and never awaited in the same Program (a send: in the same phase), or awaited
    /// and never started.
    #[error("{program}: sequence number {sequence} has a start without a wait, or a wait without a start")]
    Unpaired {
        /// Program with the op.
        program: ProgramKind,
        /// Sequence number, by which a wait finds its start.
        sequence: u64,
    },
    /// The queue of an op cannot access the memory space of an operand. The compute queue, for example, accesses device
    /// memory only.
    #[error("{program}: {op} on queue {queue:?} cannot access `{tensor}` in space {space:?}")]
    OutOfReach {
        /// Program with the op.
        program: ProgramKind,
        /// Name of the op.
        op: String,
        /// Queue of the op.
        queue: Queue,
        /// Name of the tensor.
        tensor: String,
        /// Memory space of the tensor.
        space: Space,
    },
    /// An op writes the source of a copy or collective in flight (started, not yet awaited), or touches its target.
    #[error("{program}: {op} conflicts with copy {sequence} in flight at `{tensor}`")]
    Disturbed {
        /// Program with the op.
        program: ProgramKind,
        /// Name of the op.
        op: String,
        /// Sequence number of the copy or collective.
        sequence: u64,
        /// Name of the tensor.
        tensor: String,
    },
    /// A Program is in no phase (group of Programs that share activations), or in more than one.
    #[error("program {program} is in {phases} phases, expected 1")]
    Phases {
        /// The Program.
        program: ProgramKind,
        /// Number of phases that contain it.
        phases: usize,
    },
}

/// Checks that all Programs of a set are well-formed: ranges, dtypes, memory spaces, order of reads and writes, paired
/// starts and waits.
///
/// # Errors
/// Returns the first violation.
pub fn check(set: &ProgramSet) -> Result<(), MalformedProgram> {
    for (i, program) in set.programs.iter().enumerate() {
        let phases = set.phases.iter().filter(|p| p.programs.contains(&i)).count();
        if phases != 1 {
            return Err(MalformedProgram::Phases { program: program.kind, phases });
        }
    }
    for phase in &set.phases {
        PhaseChecker::new(set).check(phase)?;
    }
    Ok(())
}

/// A copy or collective that is started and not yet awaited, with the ranges that it touches.
struct CopyInFlight {
    number: CopyNumber,
    places: Vec<Place>,
}

/// The state of the check after some ops of a phase (Programs that run in sequence).
struct PhaseChecker<'a> {
    set: &'a ProgramSet,
    /// Slots that an op has written so far, and slots of inputs, which the host fills.
    written: HashSet<(TensorId, u32)>,
    /// Copies and collectives that are started and not yet awaited.
    open: Vec<CopyNumber>,
    /// Ranges of all copies and collectives in flight.
    in_flight: Vec<CopyInFlight>,
}

impl<'a> PhaseChecker<'a> {
    fn new(set: &'a ProgramSet) -> PhaseChecker<'a> {
        PhaseChecker { set, written: HashSet::default(), open: Vec::new(), in_flight: Vec::new() }
    }

    fn check(&mut self, phase: &Phase) -> Result<(), MalformedProgram> {
        for &number in &phase.programs {
            let program = &self.set.programs[number];
            self.written.extend(program.inputs.iter().map(|&id| (id, 0)));
            self.check_types(program)?;
            for (op, variable) in program.trace() {
                self.check_op(program.kind, op, variable)?;
            }
            let is_last = phase.programs.last() == Some(&number);
            let may_stay_open = |open: &&CopyNumber| !is_last && open.is_send;
            if let Some(CopyNumber { sequence, .. }) = self.open.iter().find(|open| !may_stay_open(open)).copied() {
                return Err(MalformedProgram::Unpaired { program: program.kind, sequence });
            }
        }
        Ok(())
    }

    fn check_types(&self, program: &Program) -> Result<(), MalformedProgram> {
        let dtype_of = |operand: &Operand| self.set.tensor(operand.tensor).dtype;
        for op in program.blocks.iter().flat_map(|block| &block.ops) {
            if let Some((operand, expected)) = mistyped_operand(&op.kind, &dtype_of) {
                return Err(MalformedProgram::Type {
                    program: program.kind,
                    op: op.name().into(),
                    tensor: self.set.tensor(operand.tensor).name.clone(),
                    found: dtype_of(&operand),
                    expected,
                });
            }
        }
        Ok(())
    }

    fn check_op(&mut self, program: ProgramKind, op: &Op, variable: i64) -> Result<(), MalformedProgram> {
        let set = self.set;
        let event = CopyEvent::of(op, variable);
        self.pair(program, event)?;
        let accesses = op.accesses(&|id: TensorId| set.tensor(id).elements());
        let places: Vec<Place> = accesses.iter().map(|access| Place::of(set, access, variable)).collect();
        match event {
            Some(CopyEvent { starts: true, number }) => {
                self.check_conflicts(program, op, &places)?;
                self.in_flight.push(CopyInFlight { number, places });
            }
            Some(CopyEvent { starts: false, number }) => {
                self.in_flight.retain(|copy| copy.number != number);
                self.check_conflicts(program, op, &places)?;
            }
            None => self.check_conflicts(program, op, &places)?,
        }
        for access in &accesses {
            self.check_access(program, op, access, variable)?;
        }
        for access in accesses.iter().filter(|access| access.mode != Mode::Read) {
            let slot = set.tensor(access.operand.tensor).slot(access.operand.slot.at(variable, 0));
            self.written.insert((access.operand.tensor, slot));
        }
        Ok(())
    }

    /// Records an event that starts a copy or collective. For a wait, removes the recorded start, and fails if there is
    /// none. Does nothing for `None`.
    fn pair(&mut self, program: ProgramKind, event: Option<CopyEvent>) -> Result<(), MalformedProgram> {
        match event {
            Some(CopyEvent { starts: true, number }) => self.open.push(number),
            Some(CopyEvent { starts: false, number }) => {
                let Some(at) = self.open.iter().position(|other| *other == number) else {
                    return Err(MalformedProgram::Unpaired { program, sequence: number.sequence });
                };
                self.open.swap_remove(at);
            }
            None => {}
        }
        Ok(())
    }

    /// Checks an access of an op: memory space, range, and that a transient tensor is written before it is read.
    fn check_access(
        &self,
        program: ProgramKind,
        op: &Op,
        access: &Access,
        variable: i64,
    ) -> Result<(), MalformedProgram> {
        let tensor = self.set.tensor(access.operand.tensor);
        let (op_name, tensor_name) = (|| op.name().to_owned(), || tensor.name.clone());
        if !reaches(op, tensor.space) {
            return Err(MalformedProgram::OutOfReach {
                program,
                op: op_name(),
                queue: op.queue,
                tensor: tensor_name(),
                space: tensor.space,
            });
        }
        let slot = tensor.slot(access.operand.slot.at(variable, 0));
        let first = access.operand.offset.at(variable, 0);
        let end = first + access.elements as i64;
        if first < 0 || end > tensor.elements() as i64 {
            let elements = tensor.elements();
            let (op, tensor) = (op_name(), tensor_name());
            return Err(MalformedProgram::OutOfRange { program, op, tensor, first, end, elements });
        }
        let has_content = tensor.lifetime != Lifetime::Transient || tensor.space == Space::File;
        if access.mode != Mode::Write && !has_content && !self.written.contains(&(access.operand.tensor, slot)) {
            return Err(MalformedProgram::ReadBeforeWrite { program, op: op_name(), tensor: tensor_name(), slot });
        }
        Ok(())
    }

    /// Checks that an op does not conflict with a copy or collective in flight. `places` are the ranges that the op
    /// touches.
    fn check_conflicts(&self, program: ProgramKind, op: &Op, places: &[Place]) -> Result<(), MalformedProgram> {
        for copy in &self.in_flight {
            let conflicts = |place: &&Place| copy.places.iter().any(|copied| copied.conflicts(place));
            if let Some(place) = places.iter().find(conflicts) {
                return Err(MalformedProgram::Disturbed {
                    program,
                    op: op.name().into(),
                    sequence: copy.number.sequence,
                    tensor: self.set.tensor(place.tensor).name.clone(),
                });
            }
        }
        Ok(())
    }
}

/// Returns whether an op can access a memory space from its queue.
///
/// The device computes on device tensors and the host on host tensors. Copies connect any two spaces; only the file
/// queues reach the scratch file.
fn reaches(op: &Op, space: Space) -> bool {
    match &op.kind {
        OpKind::TransferStart { .. } | OpKind::TransferWait { .. } => {
            let is_file_queue = matches!(op.queue, Queue::FileRead | Queue::FileWrite);
            is_file_queue || matches!(op.queue, Queue::CopyIn | Queue::CopyOut) && space != Space::Scratch
        }
        OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
            let is_host_staged = exchange.is_point_to_point() && space == Space::Host;
            op.queue == Queue::Communication && (space == Space::Device || is_host_staged)
        }
        _ => match op.queue {
            Queue::Host => space == Space::Host,
            _ => space == Space::Device,
        },
    }
}

/// The identity of a copy or collective within a Program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyNumber {
    is_collective: bool,
    is_send: bool,
    sequence: u64,
}

/// The start of a copy or collective, or the wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyEvent {
    starts: bool,
    number: CopyNumber,
}

impl CopyEvent {
    /// Returns whether the op starts a copy or collective or waits for one, with its sequence number for the value
    /// `variable` of the Block's loop variable. Returns `None` for other ops.
    fn of(op: &Op, variable: i64) -> Option<CopyEvent> {
        let starts = matches!(op.kind, OpKind::TransferStart { .. } | OpKind::CollectiveStart(_));
        let number = match &op.kind {
            OpKind::TransferStart { sequence, .. } | OpKind::TransferWait { sequence, .. } => {
                CopyNumber { is_collective: false, is_send: false, sequence: *sequence }
            }
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                let sequence = exchange.sequence.at(variable, 0) as u64;
                CopyNumber { is_collective: true, is_send: exchange.collective == Collective::Send, sequence }
            }
            _ => return None,
        };
        Some(CopyEvent { starts, number })
    }
}

/// The range of elements of a tensor's slot that an op touches in one iteration of its block.
struct Place {
    tensor: TensorId,
    slot: u32,
    first: i64,
    end: i64,
    writes: bool,
}

impl Place {
    fn of(set: &ProgramSet, access: &Access, variable: i64) -> Place {
        let first = access.operand.offset.at(variable, 0);
        Place {
            tensor: access.operand.tensor,
            slot: set.tensor(access.operand.tensor).slot(access.operand.slot.at(variable, 0)),
            first,
            end: first + access.elements as i64,
            writes: access.mode != Mode::Read,
        }
    }

    /// Returns whether both places share elements and one of them writes.
    fn conflicts(&self, other: &Place) -> bool {
        (self.writes || other.writes)
            && (self.tensor, self.slot) == (other.tensor, other.slot)
            && self.first < other.end
            && other.first < self.end
    }
}
