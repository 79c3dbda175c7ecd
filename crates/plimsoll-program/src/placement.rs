//! Byte offsets of all tensors in the device arena, the host arena and the scratch file. The planner computes them, and
//! the executor uses them as they are.

use crate::program::ProgramSet;
use crate::tensor::{Operand, TensorId};
use serde::{Deserialize, Serialize};

/// First bytes of all tensors, each in the arena of its memory space, and the sizes of the arenas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// First byte by tensor and slot; `None` for files and for slots that no op touches.
    pub offsets: Vec<Vec<Option<u64>>>,
    /// Size of the device arena.
    pub arena_bytes: u64,
    /// Size of the host arena.
    pub host_bytes: u64,
    /// Size of the scratch file.
    pub file_bytes: u64,
}

impl Placement {
    /// Returns the first byte of a slot in the arena of its memory space.
    ///
    /// # Panics
    /// Panics if no op touches the slot, so that the planner has placed nothing.
    pub fn offset(&self, tensor: TensorId, slot: u32) -> u64 {
        self.offsets[tensor.0 as usize][slot as usize].expect("the planner places every slot that an op touches")
    }

    /// Returns the first byte of an operand in the arena of its memory space, for one iteration and micro-batch.
    ///
    /// # Panics
    /// Panics if no op touches the operand's slot, so that the planner has placed nothing.
    pub fn first_byte(&self, set: &ProgramSet, operand: &Operand, variable: i64, micro_batch: i64) -> u64 {
        let tensor = set.tensor(operand.tensor);
        let slot = tensor.slot(operand.slot.at(variable, micro_batch));
        self.offset(operand.tensor, slot) + operand.first_byte(tensor, variable, micro_batch)
    }
}
