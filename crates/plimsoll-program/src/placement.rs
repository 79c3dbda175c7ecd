//! Byte offsets of all tensors in the device arena, the host arena and the scratch file. The planner computes them, and
//! the executor uses them as they are.

use crate::program::ProgramSet;
use crate::tensor::{Operand, TensorId};
use serde::{Deserialize, Serialize};

/// The planner's packing of a [`ProgramSet`]: the byte offset of every tensor in the arena (one allocation) of its
/// memory space, and the sizes of the arenas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Byte offset in the arena or scratch file, indexed by tensor and then by slot. `None` for tensors that stand for
    /// files, and for slots that no op touches.
    pub offsets: Vec<Vec<Option<u64>>>,
    /// Size of the device arena.
    pub arena_bytes: u64,
    /// Size of the host arena, which holds offloaded tensors; 0 if it is unused.
    pub host_bytes: u64,
    /// Size of the scratch file, which holds offloaded tensors that exceed host memory; 0 if it is unused.
    pub file_bytes: u64,
}

impl Placement {
    /// Returns the byte offset of a tensor's slot in the arena of its memory space.
    ///
    /// # Panics
    /// Panics if no op touches the slot, so that the planner has placed nothing.
    pub fn offset(&self, tensor: TensorId, slot: u32) -> u64 {
        self.offsets[tensor.0 as usize][slot as usize].expect("the planner places every slot that an op touches")
    }

    /// Returns the byte offset of an operand in the arena of its memory space. `variable` is the value of the Block's
    /// loop variable, such as the layer; `micro_batch` counts from 0 within the step.
    ///
    /// # Panics
    /// Panics if no op touches the operand's slot, so that the planner has placed nothing.
    pub fn first_byte(&self, set: &ProgramSet, operand: &Operand, variable: i64, micro_batch: i64) -> u64 {
        let tensor = set.tensor(operand.tensor);
        let slot = tensor.slot(operand.slot.at(variable, micro_batch));
        self.offset(operand.tensor, slot) + operand.first_byte(tensor, variable, micro_batch)
    }
}
