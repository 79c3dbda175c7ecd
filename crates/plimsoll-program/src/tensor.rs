//! Tensors as data: what they are called, how large they are, where they live and for how long.
//! Where in an arena they stand is the planner's business.

use plimsoll_core::{Category, DType, Space};
use serde::{Deserialize, Serialize};

/// A tensor of a [`crate::ProgramSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorId(pub u32);

/// How long a tensor's bytes mean something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lifetime {
    /// The whole run.
    Persistent,
    /// A whole phase: between calls of its Programs, too (the cache of generation).
    Phase,
    /// From the first to the last op of a phase that touches it.
    Transient,
}

/// A named, typed, shaped tensor, or a family of equal ones (`slots`): one a layer, one a
/// micro-batch in flight, one a ring slot. Every slot has a place and a lifetime of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// Unique within its program set.
    pub name: String,
    /// Elements along each dimension of one slot.
    pub shape: Vec<u64>,
    /// The type of the elements.
    pub dtype: DType,
    /// Where it lives.
    pub space: Space,
    /// What it is for.
    pub category: Category,
    /// How long it lives.
    pub lifetime: Lifetime,
    /// How many of them there are.
    pub slots: u32,
}

impl Tensor {
    /// Elements of one slot.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of one slot.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }

    /// Which of its slots a number means, modulo how many there are.
    pub fn slot(&self, number: i64) -> u32 {
        number.rem_euclid(i64::from(self.slots)) as u32
    }
}

/// A number that may depend on the block's variable (a layer, a chunk) and on the micro-batch:
/// `base + scale · variable + micro_batch · m`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Index {
    /// The constant part.
    pub base: i64,
    /// Per unit of the block's variable.
    pub scale: i64,
    /// Per micro-batch of the Schedule (ring slots are taken modulo the tensor's slots).
    pub micro_batch: i64,
}

impl Index {
    /// The same in every iteration.
    pub const fn fixed(base: i64) -> Index {
        Index { base, scale: 0, micro_batch: 0 }
    }

    /// The block's variable plus `base`.
    pub const fn layer(base: i64) -> Index {
        Index { base, scale: 1, micro_batch: 0 }
    }

    /// `step` for each unit of the block's variable.
    pub const fn stride(step: i64) -> Index {
        Index { base: 0, scale: step, micro_batch: 0 }
    }

    /// The value in one iteration.
    pub fn at(self, variable: i64, micro_batch: i64) -> i64 {
        self.base + self.scale * variable + self.micro_batch * micro_batch
    }
}

/// A place in a tensor that an op reads or writes: a slot, and the first element in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Operand {
    /// Which tensor.
    pub tensor: TensorId,
    /// Which slot, modulo the tensor's slots.
    pub slot: Index,
    /// The first element within the slot.
    pub offset: Index,
}

impl Operand {
    /// The only slot of a tensor, from its first element.
    pub const fn whole(tensor: TensorId) -> Operand {
        Operand { tensor, slot: Index::fixed(0), offset: Index::fixed(0) }
    }

    /// The slot of the block's variable plus `base` (the layer's own, or its neighbour's).
    pub const fn layer(tensor: TensorId, base: i64) -> Operand {
        Operand { tensor, slot: Index::layer(base), offset: Index::fixed(0) }
    }

    /// One slot, whatever the iteration.
    pub const fn slot(tensor: TensorId, slot: i64) -> Operand {
        Operand { tensor, slot: Index::fixed(slot), offset: Index::fixed(0) }
    }

    /// Its first byte within the slot of its tensor, in one iteration.
    pub fn first_byte(self, tensor: &Tensor, variable: i64, micro_batch: i64) -> u64 {
        self.offset.at(variable, micro_batch) as u64 * tensor.dtype.bytes()
    }

    /// The slots of a tensor of so many that it may stand in in one iteration: one, or one for each micro-batch in
    /// flight.
    pub fn slots_at(self, variable: i64, slots: u32) -> impl Iterator<Item = u32> {
        let slots = i64::from(slots.max(1));
        let (first, step) = (self.slot.at(variable, 0).rem_euclid(slots), self.slot.micro_batch.rem_euclid(slots));
        let next = move |slot: &i64| Some((slot + step) % slots).filter(|next| *next != first);
        std::iter::successors(Some(first), next).map(|slot| slot as u32)
    }

    /// The same operand, starting further on.
    #[must_use]
    pub const fn from(self, offset: Index) -> Operand {
        Operand { tensor: self.tensor, slot: self.slot, offset }
    }
}
