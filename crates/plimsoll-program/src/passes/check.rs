//! Checks a set of Programs: every operand lies within its tensor, in a space that the op's queue reaches, and has the
//! type that its op needs; nothing is read before it is written; every start has its wait, and nobody disturbs a copy
//! that is under way. A message may be awaited in a later Program of its phase, for the same micro-batch.

use super::types::mistyped;
use crate::op::{Access, Collective, Mode, Op, OpKind, Queue};
use crate::program::ProgramSet;
use crate::tensor::{Lifetime, Operand, TensorId};
use plimsoll_core::{DType, Space};
use std::collections::HashSet;

/// A Program that must not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// An operand reaches beyond its tensor.
    #[error("{program}: {op} touches elements {first}..{end} of `{tensor}`, which has {elements}")]
    OutOfRange {
        /// The Program.
        program: String,
        /// The op.
        op: String,
        /// The tensor.
        tensor: String,
        /// First element touched.
        first: i64,
        /// Just past the last one.
        end: i64,
        /// How many there are.
        elements: u64,
    },
    /// An operand has not the type that its op needs.
    #[error("{program}: {op} needs `{tensor}` as {expected}, and it is {found}")]
    Type {
        /// The Program.
        program: String,
        /// The op.
        op: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: DType,
        /// The type that it must have.
        expected: DType,
    },
    /// An op reads what nobody has written in this phase.
    #[error("{program}: {op} reads `{tensor}` (slot {slot}) before anything wrote it")]
    ReadBeforeWrite {
        /// The Program.
        program: String,
        /// The op.
        op: String,
        /// The tensor.
        tensor: String,
        /// Its slot.
        slot: u32,
    },
    /// A transfer or collective that starts and is not awaited in the same Program (a message: in the same phase), or the
    /// other way.
    #[error("{program}: sequence number {sequence} is not both started and awaited")]
    Unpaired {
        /// The Program.
        program: String,
        /// The number.
        sequence: u64,
    },
    /// An op's queue does not reach a tensor's space: the device computes on its own tensors, the host on its own.
    #[error("{program}: {op} on queue {queue:?} touches `{tensor}` in space {space:?}")]
    OutOfReach {
        /// The Program.
        program: String,
        /// The op.
        op: String,
        /// Its queue.
        queue: Queue,
        /// The tensor.
        tensor: String,
        /// Where it is.
        space: Space,
    },
    /// An op writes what is being copied, or touches what a copy is being written to.
    #[error("{program}: {op} disturbs the copy {sequence} at `{tensor}`")]
    Disturbed {
        /// The Program.
        program: String,
        /// The op.
        op: String,
        /// The copy's number.
        sequence: u64,
        /// The tensor.
        tensor: String,
    },
    /// A Program stands in no phase, or in two.
    #[error("program {program} stands in {phases} phases")]
    Phases {
        /// The Program.
        program: String,
        /// In how many.
        phases: usize,
    },
}

/// Checks all Programs of a set.
pub fn check(set: &ProgramSet) -> Result<(), Malformed> {
    for (i, program) in set.programs.iter().enumerate() {
        let phases = set.phases.iter().filter(|p| p.programs.contains(&i)).count();
        if phases != 1 {
            return Err(Malformed::Phases { program: program.name.clone(), phases });
        }
    }
    let elements_of = |id: TensorId| set.tensor(id).elements();
    let dtype_of = |operand: &Operand| set.tensor(operand.tensor).dtype;
    for phase in &set.phases {
        let mut written: HashSet<(TensorId, u32)> = HashSet::new();
        let mut open: Vec<Number> = Vec::new();
        let mut copies: Vec<(Number, Vec<Place>)> = Vec::new();
        for &number in &phase.programs {
            let program = &set.programs[number];
            written.extend(program.inputs.iter().map(|&id| (id, 0)));
            for op in program.blocks.iter().flat_map(|block| &block.ops) {
                if let Some((operand, expected)) = mistyped(&op.kind, &dtype_of) {
                    return Err(Malformed::Type {
                        program: program.name.clone(),
                        op: op.name().into(),
                        tensor: set.tensor(operand.tensor).name.clone(),
                        found: dtype_of(&operand),
                        expected,
                    });
                }
            }
            for (op, variable) in program.trace() {
                let start = Number::of(op, variable);
                match start {
                    Some((true, number)) => open.push(number),
                    Some((false, number)) => match open.iter().position(|other| *other == number) {
                        Some(at) => {
                            open.swap_remove(at);
                        }
                        None => {
                            let (program, sequence) = (program.name.clone(), number.sequence);
                            return Err(Malformed::Unpaired { program, sequence });
                        }
                    },
                    None => {}
                }
                let accesses = op.accesses(&elements_of);
                let places: Vec<Place> = accesses.iter().map(|access| Place::of(set, access, variable)).collect();
                if let Some((true, number)) = start {
                    undisturbed(set, &program.name, op, &places, &copies)?;
                    copies.push((number, places));
                } else {
                    copies.retain(|(number, _)| start != Some((false, *number)));
                    undisturbed(set, &program.name, op, &places, &copies)?;
                }
                for access in &accesses {
                    let tensor = set.tensor(access.operand.tensor);
                    if !reaches(op, tensor.space) {
                        return Err(Malformed::OutOfReach {
                            program: program.name.clone(),
                            op: op.name().into(),
                            queue: op.queue,
                            tensor: tensor.name.clone(),
                            space: tensor.space,
                        });
                    }
                    let slot = tensor.slot(access.operand.slot.at(variable, 0));
                    let first = access.operand.offset.at(variable, 0);
                    let end = first + access.elements as i64;
                    if first < 0 || end > tensor.elements() as i64 {
                        return Err(Malformed::OutOfRange {
                            program: program.name.clone(),
                            op: op.name().into(),
                            tensor: tensor.name.clone(),
                            first,
                            end,
                            elements: tensor.elements(),
                        });
                    }
                    let alive = tensor.lifetime != Lifetime::Transient || tensor.space == Space::File;
                    if access.mode != Mode::Write && !alive && !written.contains(&(access.operand.tensor, slot)) {
                        return Err(Malformed::ReadBeforeWrite {
                            program: program.name.clone(),
                            op: op.name().into(),
                            tensor: tensor.name.clone(),
                            slot,
                        });
                    }
                }
                for access in accesses.iter().filter(|a| a.mode != Mode::Read) {
                    let slot = set.tensor(access.operand.tensor).slot(access.operand.slot.at(variable, 0));
                    written.insert((access.operand.tensor, slot));
                }
            }
            let last = phase.programs.last() == Some(&number);
            let awaited_late = |open: &&Number| !last && open.sent;
            if let Some(Number { sequence, .. }) = open.iter().find(|open| !awaited_late(open)).copied() {
                return Err(Malformed::Unpaired { program: program.name.clone(), sequence });
            }
        }
    }
    Ok(())
}

/// Whether an op's queue reaches a space. Copies go between any two.
fn reaches(op: &Op, space: Space) -> bool {
    match &op.kind {
        OpKind::TransferStart { .. } | OpKind::TransferWait { .. } => {
            let disk = matches!(op.queue, Queue::FileRead | Queue::FileWrite);
            disk || matches!(op.queue, Queue::CopyIn | Queue::CopyOut) && space != Space::Scratch
        }
        OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
            let shown = exchange.is_message() && space == Space::Host;
            op.queue == Queue::Communication && (space == Space::Device || shown)
        }
        _ => match op.queue {
            Queue::Host => space == Space::Host,
            _ => space == Space::Device,
        },
    }
}

/// What tells a copy or a collective apart in a Program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number {
    collective: bool,
    /// Whether it is a message on its way out.
    sent: bool,
    sequence: u64,
}

impl Number {
    /// Whether an op starts something (else it awaits it), and what.
    fn of(op: &Op, variable: i64) -> Option<(bool, Number)> {
        let starts = matches!(op.kind, OpKind::TransferStart { .. } | OpKind::CollectiveStart(_));
        match &op.kind {
            OpKind::TransferStart { sequence, .. } | OpKind::TransferWait { sequence, .. } => {
                Some((starts, Number { collective: false, sent: false, sequence: *sequence }))
            }
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                let sequence = exchange.sequence.at(variable, 0) as u64;
                let sent = exchange.collective == Collective::Send;
                Some((starts, Number { collective: true, sent, sequence }))
            }
            _ => None,
        }
    }
}

/// What an access touches in one iteration.
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

    fn conflicts(&self, other: &Place) -> bool {
        (self.writes || other.writes)
            && (self.tensor, self.slot) == (other.tensor, other.slot)
            && self.first < other.end
            && other.first < self.end
    }
}

/// That an op leaves alone what is being copied.
fn undisturbed(
    set: &ProgramSet,
    program: &str,
    op: &Op,
    places: &[Place],
    copies: &[(Number, Vec<Place>)],
) -> Result<(), Malformed> {
    for (number, copied) in copies {
        if let Some(place) = places.iter().find(|place| copied.iter().any(|copied| copied.conflicts(place))) {
            return Err(Malformed::Disturbed {
                program: program.into(),
                op: op.name().into(),
                sequence: number.sequence,
                tensor: set.tensor(place.tensor).name.clone(),
            });
        }
    }
    Ok(())
}
