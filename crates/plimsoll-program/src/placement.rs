//! Where every tensor of a set stands in its device's arena or in that of the device's host side: what the planner
//! decides and the executor obeys.

use crate::program::ProgramSet;
use crate::tensor::{Operand, TensorId};
use serde::{Deserialize, Serialize};

/// First bytes of all tensors, each in the arena of its own space, and how large the arenas are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// By tensor and slot; `None` for files and for what no op touches.
    pub offsets: Vec<Vec<Option<u64>>>,
    /// Just past the last byte of the device's arena that any Program uses.
    pub arena_bytes: u64,
    /// The same of the host's arena.
    pub host_bytes: u64,
    /// The same of the scratch file.
    pub file_bytes: u64,
}

impl Placement {
    /// The first byte of a slot.
    ///
    /// # Panics
    /// Where no op ever touches it: a bug of ours.
    pub fn offset(&self, tensor: TensorId, slot: u32) -> u64 {
        self.offsets[tensor.0 as usize][slot as usize].expect("every tensor that an op touches has its place")
    }

    /// An operand's first byte in the arena of its space, in one iteration.
    ///
    /// # Panics
    /// As above.
    pub fn first_byte(&self, set: &ProgramSet, operand: &Operand, variable: i64, micro_batch: i64) -> u64 {
        let tensor = set.tensor(operand.tensor);
        let slot = tensor.slot(operand.slot.at(variable, micro_batch));
        self.offset(operand.tensor, slot) + operand.first_byte(tensor, variable, micro_batch)
    }
}
