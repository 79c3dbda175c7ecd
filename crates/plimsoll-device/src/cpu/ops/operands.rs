//! Operands of an op as slices of the arenas.

use super::Site;
use crate::arena::Arena;
use crate::cpu::kernels::{self, Real};
use plimsoll_core::DType;
use plimsoll_program::Operand;
use plimsoll_program::scalars::Scalar;
use std::marker::PhantomData;

/// The context in which an op runs, with the type `T` of activations.
pub struct OpContext<'a, T> {
    /// Memory, threads and plan, with the iteration of the op's block and the micro-batch.
    pub site: Site<'a>,
    /// Marker for the data type `T` of activations; holds no value.
    pub precision: PhantomData<T>,
}

impl<'a, T: Real> OpContext<'a, T> {
    /// Returns the arena that holds the operand.
    pub fn arena(&self, operand: &Operand) -> &'a Arena {
        self.site.spaces.arena(self.site.set.tensor(operand.tensor).space)
    }

    /// Returns the offset in bytes at which the operand begins in its arena.
    pub fn offset(&self, operand: &Operand) -> u64 {
        self.site.placement.first_byte(self.site.set, operand, self.site.variable, self.site.micro_batch)
    }

    /// Returns the offset in bytes at which the operand begins in its tensor.
    pub fn first_byte(&self, operand: &Operand) -> u64 {
        operand.first_byte(self.site.set.tensor(operand.tensor), self.site.variable, self.site.micro_batch)
    }

    /// Returns the first `elements` elements of the operand, for reading.
    pub fn slice_of<E: bytemuck::Pod>(&self, operand: &Operand, elements: u64) -> &'a [E] {
        // SAFETY: an op's operands are disjoint ranges of the arena, except for the in-place pairs, for which the
        // function of the op takes one slice. The layout gives tensors that live at the same time disjoint bytes, and
        // `passes::check` keeps operands inside their tensors. The arena outlives this context. While the op runs, no
        // other code writes these bytes or accesses those that it writes, by the promise of `RunOp`.
        unsafe { self.arena(operand).slice(self.offset(operand), elements as usize) }
    }

    /// Returns the first `elements` elements of the operand, for writing.
    pub fn slice_of_mut<E: bytemuck::Pod>(&self, operand: &Operand, elements: u64) -> &'a mut [E] {
        // SAFETY: the conditions of `slice_of` hold for writes as well.
        unsafe { self.arena(operand).slice_mut(self.offset(operand), elements as usize) }
    }

    /// Returns the first `elements` elements of an operand of type `T`, for reading.
    pub fn read(&self, operand: &Operand, elements: u64) -> &'a [T] {
        self.slice_of(operand, elements)
    }

    /// Returns the first `elements` elements of an operand of type `T`, for writing.
    pub fn write(&self, operand: &Operand, elements: u64) -> &'a mut [T] {
        self.slice_of_mut(operand, elements)
    }

    /// Returns the first `elements` elements of an operand of the wide type, for reading. Sums, statistics and master
    /// weights have this type.
    pub fn read_wide(&self, operand: &Operand, elements: u64) -> &'a [T::Wide] {
        self.slice_of(operand, elements)
    }

    /// Returns the first `elements` elements of an operand of the wide type (of sums and statistics), for writing.
    pub fn write_wide(&self, operand: &Operand, elements: u64) -> &'a mut [T::Wide] {
        self.slice_of_mut(operand, elements)
    }

    /// Returns whether the operand has this data type.
    pub fn has_dtype(&self, operand: &Operand, dtype: DType) -> bool {
        self.site.set.tensor(operand.tensor).dtype == dtype
    }

    /// Returns whether the operand has the wide type, in which sums and statistics are stored.
    pub fn is_wide(&self, operand: &Operand) -> bool {
        self.has_dtype(operand, T::Wide::DTYPE)
    }

    /// Returns the first `elements` elements of an operand of 32-bit integers, for reading.
    pub fn read_integers(&self, operand: &Operand, elements: u64) -> &'a [i32] {
        self.slice_of(operand, elements)
    }

    /// Returns the first `elements` elements of an operand of 32-bit integers, for writing.
    pub fn write_integers(&self, operand: &Operand, elements: u64) -> &'a mut [i32] {
        self.slice_of_mut(operand, elements)
    }

    /// Returns the whole tensor of an operand in the wide type, for writing.
    pub fn write_all_wide(&self, operand: &Operand) -> &'a mut [T::Wide] {
        self.write_wide(operand, self.site.set.tensor(operand.tensor).elements())
    }

    /// Returns the workspace of an op, and writes zero to its last element. Its threads may leave parts of it
    /// unwritten; with that write, the measured high-water mark includes the whole workspace in every run.
    pub fn workspace_of(&self, operand: &Operand) -> &'a mut [T::Wide] {
        let workspace = self.write_all_wide(operand);
        if let Some(last) = workspace.last_mut() {
            *last = T::Wide::ZERO;
        }
        workspace
    }

    /// Returns the labels and loss weights of `rows` rows, with the range of the vocabulary to which a block of logits
    /// belongs: `columns` tokens from token `first` on.
    pub fn labelled_rows(
        &self,
        labels: &Operand,
        weights: &Operand,
        rows: u64,
        first: u64,
        columns: u64,
    ) -> kernels::LabelledRows<'a, T::Wide> {
        let (labels, weights) = (self.read_integers(labels, rows), self.read_wide(weights, rows));
        kernels::LabelledRows { labels, weights, first: first as usize, columns: columns as usize }
    }

    /// Returns the whole tensor of metrics, for writing. A [`Metric`](plimsoll_program::scalars::Metric) is the index
    /// of its value.
    pub fn metrics(&self, operand: &Operand) -> &'a mut [f64] {
        self.slice_of_mut(operand, self.site.set.tensor(operand.tensor).elements())
    }

    /// Returns the scalar `which` of a step, such as its learning rate. `operand` is the tensor of all scalars.
    pub fn scalar(&self, operand: &Operand, which: Scalar) -> T::Wide {
        self.read_wide(operand, which as u64 + 1)[which as usize]
    }

    /// Returns the scalar `which` of a step as a whole number, such as the step number. `operand` is the tensor of all
    /// scalars.
    pub fn count(&self, operand: &Operand, which: Scalar) -> usize {
        self.scalar(operand, which).to_f64() as usize
    }
}
