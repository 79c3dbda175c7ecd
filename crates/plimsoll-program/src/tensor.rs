//! Tensors as data: name, shape, dtype, memory space and lifetime, and the operands by which ops refer to them. Byte
//! offsets are in [`crate::placement`].

use plimsoll_core::{Category, DType, Space};
use serde::{Deserialize, Serialize};

/// The index of a tensor in its [`crate::ProgramSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorId(pub u32);

/// The time for which a tensor's bytes are reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lifetime {
    /// The whole run.
    Persistent,
    /// A whole phase, including the time between calls of its Programs: the key-value cache of generation.
    Phase,
    /// From the first to the last op of a phase that touches the tensor.
    Transient,
}

/// A tensor, or `slots` equal tensors under one name: one per layer, per micro-batch in flight or per staging buffer.
/// Every slot has its own place in the arena and its own lifetime.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// Name, unique within its Program set.
    pub name: String,
    /// Elements along each dimension of one slot.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// Memory space that holds it.
    pub space: Space,
    /// Purpose, by which the plan sums up bytes.
    pub category: Category,
    /// Time for which its bytes are reserved.
    pub lifetime: Lifetime,
    /// Number of equal tensors.
    pub slots: u32,
}

/// The part of the model that a tensor belongs to, as offload treats it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// The token embedding, with its gradient, master and optimizer state.
    Embedding,
    /// The output head, with its gradient, master and optimizer state.
    Head,
    /// The final norm or the rotary table: small, and needed by every micro-batch.
    Shared,
    /// A tensor with one slot per layer.
    Layer,
}

impl Tensor {
    /// Returns the elements of one slot.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the bytes of one slot.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }

    /// Returns the slot for a slot number, which counts modulo the number of slots.
    pub fn slot(&self, number: i64) -> u32 {
        number.rem_euclid(i64::from(self.slots)) as u32
    }

    /// Returns the part of the model that a persistent tensor belongs to, from the first word of its name:
    /// `head.gradient` belongs to the head.
    pub(crate) fn role(&self) -> TensorRole {
        match self.name.split('.').next().unwrap_or_default() {
            "embedding" => TensorRole::Embedding,
            "head" => TensorRole::Head,
            "rope_table" | "final_norm" => TensorRole::Shared,
            _ => TensorRole::Layer,
        }
    }
}

/// A number that is linear in the variable v of the block (a layer, a chunk) and in the micro-batch m:
/// `base + scale · v + micro_batch · m`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Index {
    /// Constant part.
    pub base: i64,
    /// Increment per unit of the block's variable.
    pub scale: i64,
    /// Increment per micro-batch of the schedule.
    pub micro_batch: i64,
}

impl Index {
    /// Creates an index with the same value in every iteration.
    pub const fn fixed(base: i64) -> Index {
        Index { base, scale: 0, micro_batch: 0 }
    }

    /// Creates the index `v + base`, where v is the block's variable.
    pub const fn layer(base: i64) -> Index {
        Index { base, scale: 1, micro_batch: 0 }
    }

    /// Creates the index `step · v`, where v is the block's variable.
    pub const fn stride(step: i64) -> Index {
        Index { base: 0, scale: step, micro_batch: 0 }
    }

    /// Returns the value for one iteration and micro-batch.
    pub fn at(self, variable: i64, micro_batch: i64) -> i64 {
        self.base + self.scale * variable + self.micro_batch * micro_batch
    }
}

/// A reference of an op to a tensor: a slot and the first element within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Operand {
    /// Tensor that is read or written.
    pub tensor: TensorId,
    /// Slot, modulo the tensor's slots.
    pub slot: Index,
    /// First element within the slot.
    pub offset: Index,
}

impl Operand {
    /// Refers to slot 0 of a tensor from its first element.
    pub const fn whole(tensor: TensorId) -> Operand {
        Operand { tensor, slot: Index::fixed(0), offset: Index::fixed(0) }
    }

    /// Refers to slot `v + base`, where v is the block's variable: the slot of a layer or of its neighbour.
    pub const fn layer(tensor: TensorId, base: i64) -> Operand {
        Operand { tensor, slot: Index::layer(base), offset: Index::fixed(0) }
    }

    /// Refers to one slot, the same in every iteration.
    pub const fn slot(tensor: TensorId, slot: i64) -> Operand {
        Operand { tensor, slot: Index::fixed(slot), offset: Index::fixed(0) }
    }

    /// Returns the first byte within the slot, for one iteration and micro-batch.
    pub fn first_byte(self, tensor: &Tensor, variable: i64, micro_batch: i64) -> u64 {
        self.offset.at(variable, micro_batch) as u64 * tensor.dtype.bytes()
    }

    /// Returns the slots, of `slots` in all, that the operand may refer to in one iteration: one slot, or one for each
    /// micro-batch in flight.
    pub fn possible_slots(self, variable: i64, slots: u32) -> impl Iterator<Item = u32> {
        let slots = i64::from(slots.max(1));
        let (first, step) = (self.slot.at(variable, 0).rem_euclid(slots), self.slot.micro_batch.rem_euclid(slots));
        let next = move |slot: &i64| Some((slot + step) % slots).filter(|next| *next != first);
        std::iter::successors(Some(first), next).map(|slot| slot as u32)
    }

    /// Returns the operand with another first element.
    #[must_use]
    pub const fn from(self, offset: Index) -> Operand {
        Operand { tensor: self.tensor, slot: self.slot, offset }
    }
}
