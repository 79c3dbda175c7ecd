//! Makes tensors and ops while a model is written down.

use crate::op::{Op, OpKind};
use crate::program::ProgramSet;
use crate::tensor::{Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, DType, Space};
use std::collections::HashMap;

/// A [`ProgramSet`] in the making.
pub struct Builder {
    /// What has been made so far.
    pub set: ProgramSet,
    /// The type that the run computes in.
    pub precision: DType,
    /// Threads that compute: some ops need scratch for each.
    pub lanes: u64,
    names: HashMap<String, TensorId>,
}

impl Builder {
    /// Nothing made yet.
    pub fn new(precision: DType, lanes: u64) -> Builder {
        Builder { set: ProgramSet::default(), precision, lanes, names: HashMap::new() }
    }

    /// A new tensor.
    pub fn tensor(&mut self, tensor: Tensor) -> TensorId {
        let id = TensorId(self.set.tensors.len() as u32);
        let before = self.names.insert(tensor.name.clone(), id);
        assert!(before.is_none(), "two tensors are called {}", tensor.name);
        self.set.tensors.push(tensor);
        id
    }

    /// A tensor by its name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.names.get(name).copied()
    }

    /// A tensor on the device for the whole run.
    pub fn persistent(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.tensor(Tensor {
            name: name.into(),
            shape: shape.into(),
            dtype,
            space: Space::Device,
            category,
            lifetime: Lifetime::Persistent,
            slots,
        })
    }

    /// A tensor on the device for as long as ops touch it.
    pub fn transient(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.tensor(Tensor {
            name: name.into(),
            shape: shape.into(),
            dtype,
            space: Space::Device,
            category,
            lifetime: Lifetime::Transient,
            slots,
        })
    }

    /// An activation in the run's precision.
    pub fn activation(&mut self, name: &str, shape: &[u64], slots: u32) -> TensorId {
        self.transient(name, shape, self.precision, Category::Activation, slots)
    }

    /// Scratch of `elements` in the run's precision. An op that needs none gets one element, so
    /// that every operand has a place.
    pub fn scratch(&mut self, name: &str, elements: u64, slots: u32) -> TensorId {
        self.transient(name, &[elements.max(1)], self.precision, Category::Workspace, slots)
    }

    /// The same tensor once more under another name.
    pub fn copy_of(&mut self, id: TensorId, name: String) -> TensorId {
        let tensor = Tensor { name, ..self.set.tensor(id).clone() };
        self.tensor(tensor)
    }

    /// out[m,n] = x[m,k] · weightᵀ[k,n]: a linear layer.
    pub fn linear(x: Operand, weight: Operand, out: Operand, rows: u64, inputs: u64, outputs: u64) -> Op {
        OpKind::Product {
            a: x,
            b: weight,
            out,
            bias: None,
            residual: None,
            m: rows,
            n: outputs,
            k: inputs,
            a_transposed: false,
            b_transposed: true,
            accumulate: false,
        }
        .into()
    }
}
