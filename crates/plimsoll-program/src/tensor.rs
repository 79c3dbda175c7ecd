//! Tensors as data: name, shape, dtype, memory space and lifetime, and the operands by which ops refer to them. Byte
//! offsets are in [`crate::placement`].

use plimsoll_core::{Category, DType, Space};
use serde::{Deserialize, Serialize};

/// The index of a tensor in [`crate::ProgramSet::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorId(pub u32);

/// The time for which the planner reserves a tensor's bytes in the arena. Tensors with disjoint times may share bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lifetime {
    /// The whole run: weights, gradients, optimizer state.
    Persistent,
    /// A whole [`crate::Phase`] (Programs that run in sequence, such as prefill and decode), including the time between
    /// their calls: the key-value cache of generation.
    Phase,
    /// From the first to the last op of a [`crate::Phase`] that touches the tensor: activations and workspaces.
    Transient,
}

/// A tensor without data: name, shape, dtype, place and lifetime.
///
/// It stands for `slots` equal tensors under one name: one per layer, per micro-batch in flight (forward pass done,
/// backward pass not) or per staging buffer. Every slot has its own byte offset in the arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// Name, unique within its Program set.
    pub name: String,
    /// Elements along each dimension of one slot.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// Memory space that holds the tensor: device, host, scratch file, or a file of a model or checkpoint.
    pub space: Space,
    /// Purpose (weight, gradient, activation, …), by which the plan reports bytes.
    pub category: Category,
    /// Time for which its bytes are reserved.
    pub lifetime: Lifetime,
    /// Number of equal tensors under this name, at least 1; a slot is one of them.
    pub slots: u32,
}

/// The part of the model that a persistent tensor belongs to. Offload treats the parts differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// The token embedding, or its gradient, master weight or optimizer state.
    Embedding,
    /// The output head, or its gradient, master weight or optimizer state.
    Head,
    /// The final norm or the rotary table: small, and needed by every micro-batch.
    Shared,
    /// Any other tensor, which has one slot per layer.
    Layer,
}

impl Tensor {
    /// Returns the number of elements of one slot.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the number of bytes of one slot.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }

    /// Returns `number` modulo the number of slots, also for a negative `number`. Operands thus use the slots of a
    /// tensor as a ring buffer.
    pub fn slot(&self, number: i64) -> u32 {
        number.rem_euclid(i64::from(self.slots)) as u32
    }

    /// Returns the part of the model that a persistent tensor belongs to, from the first word of its name:
    /// `head.gradient` belongs to the head.
    pub fn role(&self) -> TensorRole {
        match self.name.split('.').next().unwrap_or_default() {
            "embedding" => TensorRole::Embedding,
            "head" => TensorRole::Head,
            "rope_table" | "final_norm" => TensorRole::Shared,
            _ => TensorRole::Layer,
        }
    }
}

/// An integer (slot, element offset, sample or sequence number) that may differ between iterations of a
/// [`crate::Block`] and between micro-batches.
///
/// With the block's variable v (the layer or the piece) and the micro-batch m of the step, the value is
/// `base + scale · v + micro_batch · m`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Index {
    /// Constant part of the value.
    pub base: i64,
    /// Increment per unit of the block's variable.
    pub scale: i64,
    /// Increment per micro-batch of the step. Sample numbers of dropout use it, and in a pipeline the slots of
    /// activations and the sequence numbers of messages. All other indices have 0.
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

    /// Returns the value for the block's variable `variable` and micro-batch `micro_batch` of the step, from 0.
    pub fn at(self, variable: i64, micro_batch: i64) -> i64 {
        self.base + self.scale * variable + self.micro_batch * micro_batch
    }
}

/// A reference of an op to a tensor: one of its slots, and the first element within that slot. The op knows the number
/// of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Operand {
    /// Tensor that is read or written.
    pub tensor: TensorId,
    /// Slot; values beyond the number of slots count modulo that number.
    pub slot: Index,
    /// First element within the slot, in elements.
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

    /// Refers to slot `slot` from its first element, the same in every iteration of the block.
    pub const fn slot(tensor: TensorId, slot: i64) -> Operand {
        Operand { tensor, slot: Index::fixed(slot), offset: Index::fixed(0) }
    }

    /// Returns the byte offset of the first element within the slot. `variable` is the value of the Block's loop
    /// variable, such as the layer; `micro_batch` counts from 0 within the step.
    pub fn first_byte(self, tensor: &Tensor, variable: i64, micro_batch: i64) -> u64 {
        self.offset.at(variable, micro_batch) as u64 * tensor.dtype.bytes()
    }

    /// Returns the slots that the operand may refer to when the block's variable is `variable`. That is one slot, or in
    /// a pipeline one for each micro-batch in flight. `slots` is the tensor's number of slots.
    pub fn possible_slots(self, variable: i64, slots: u32) -> impl Iterator<Item = u32> {
        let slots = i64::from(slots.max(1));
        let (first, step) = match slots {
            1 => (0, 0),
            _ => (self.slot.at(variable, 0).rem_euclid(slots), self.slot.micro_batch.rem_euclid(slots)),
        };
        let next = move |slot: &i64| Some((slot + step) % slots).filter(|next| *next != first);
        std::iter::successors(Some(first), next).map(|slot| slot as u32)
    }

    /// Returns this operand with its first element moved by `elements` elements within the same slot.
    #[must_use]
    pub const fn offset_by(self, elements: Index) -> Operand {
        let Index { base, scale, micro_batch } = self.offset;
        self.starting_at(Index {
            base: base + elements.base,
            scale: scale + elements.scale,
            micro_batch: micro_batch + elements.micro_batch,
        })
    }

    /// Returns this operand with its first element at `offset` in the same slot.
    #[must_use]
    pub const fn starting_at(self, offset: Index) -> Operand {
        Operand { tensor: self.tensor, slot: self.slot, offset }
    }
}
