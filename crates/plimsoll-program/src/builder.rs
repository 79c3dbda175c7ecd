//! Makes tensors and ops while a model is written down.

use crate::op::{Op, OpKind};
use crate::program::ProgramSet;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use crate::workspace::Kernels;
use plimsoll_core::{Category, DType, Space};
use std::collections::HashMap;

/// A [`ProgramSet`] in the making.
pub struct Builder {
    /// What has been made so far.
    pub set: ProgramSet,
    /// The type that the run computes in.
    pub precision: DType,
    /// Whose kernels run: scratch is theirs.
    pub kernels: Kernels,
    names: HashMap<String, TensorId>,
}

impl Builder {
    /// Nothing made yet.
    pub fn new(precision: DType, kernels: Kernels) -> Builder {
        Builder { set: ProgramSet::default(), precision, kernels, names: HashMap::new() }
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

    /// A tensor on the device.
    pub fn on_device(
        &mut self,
        name: &str,
        shape: &[u64],
        dtype: DType,
        category: Category,
        lifetime: Lifetime,
        slots: u32,
    ) -> TensorId {
        let (name, shape, space) = (name.into(), shape.into(), Space::Device);
        self.tensor(Tensor { name, shape, dtype, space, category, lifetime, slots })
    }

    /// A tensor on the device for the whole run.
    pub fn persistent(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.on_device(name, shape, dtype, category, Lifetime::Persistent, slots)
    }

    /// A tensor on the device for as long as ops touch it.
    pub fn transient(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.on_device(name, shape, dtype, category, Lifetime::Transient, slots)
    }

    /// An activation in the run's precision.
    pub fn activation(&mut self, name: &str, shape: &[u64], slots: u32) -> TensorId {
        self.transient(name, shape, self.precision, Category::Activation, slots)
    }

    /// An activation in the wide type: what is a sum or a statistic.
    pub fn statistic(&mut self, name: &str, shape: &[u64], slots: u32) -> TensorId {
        self.transient(name, shape, self.precision.wide(), Category::Activation, slots)
    }

    /// Scratch of `elements` in the wide type. An op that needs none gets one element, so
    /// that every operand has a place.
    pub fn scratch(&mut self, name: &str, elements: u64, slots: u32) -> TensorId {
        self.transient(name, &[elements.max(1)], self.precision.wide(), Category::Workspace, slots)
    }

    /// The same tensor once more under another name.
    pub fn copy_of(&mut self, id: TensorId, name: String) -> TensorId {
        let tensor = Tensor { name, ..self.set.tensor(id).clone() };
        self.tensor(tensor)
    }

    /// Scratch for an op that writes `like`, one for each of its slots. Ops that need equally much for
    /// the same tensor share it.
    pub fn scratch_beside(&mut self, like: Operand, role: &str, elements: u64) -> Operand {
        let Tensor { name, slots, .. } = self.set.tensor(like.tensor);
        let (name, slots) = (format!("{name}.{role}_{elements}"), *slots);
        let tensor = self.find(&name).unwrap_or_else(|| self.scratch(&name, elements, slots));
        Operand { tensor, slot: like.slot, offset: Index::fixed(0) }
    }

    /// A matrix product with its scratch.
    pub fn product(&mut self, product: Product) -> Op {
        let Product { a, b, out, bias, residual, m, n, k, a_transposed, b_transposed, accumulate, scale, .. } = product;
        let a_stride = product.a_stride.unwrap_or(if a_transposed { m } else { k });
        let out_stride = product.out_stride.unwrap_or(n);
        let workspace = self.scratch_beside(out, "product", self.kernels.product(self.precision, m, n, k));
        OpKind::Product {
            a,
            b,
            out,
            bias,
            residual,
            workspace,
            m,
            n,
            k,
            a_transposed,
            b_transposed,
            a_stride,
            out_stride,
            scale,
            accumulate,
        }
        .into()
    }
}

/// A matrix product before it has its scratch; see [`OpKind::Product`].
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m,k]`, or `[k,m]` if transposed.
    pub a: Operand,
    /// `[k,n]`, or `[n,k]` if transposed.
    pub b: Operand,
    /// `[m,n]`.
    pub out: Operand,
    /// `[n]`, added to every row.
    pub bias: Option<Operand>,
    /// `[m,n]`, added.
    pub residual: Option<Operand>,
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Inner size.
    pub k: u64,
    /// Whether `a` is stored `[k,m]`.
    pub a_transposed: bool,
    /// Whether `b` is stored `[n,k]`.
    pub b_transposed: bool,
    /// Elements from one row of `a` as it is stored to the next, where that is more than a row has.
    pub a_stride: Option<u64>,
    /// The same of `out`.
    pub out_stride: Option<u64>,
    /// What a·b is multiplied with.
    pub scale: f64,
    /// Whether the result is added to what is there.
    pub accumulate: bool,
}

impl Product {
    /// `out[m,n]` = `a[m,k]` · `b[k,n]`.
    pub fn plain(a: Operand, b: Operand, out: Operand, [m, n, k]: [u64; 3]) -> Product {
        Product {
            a,
            b,
            out,
            bias: None,
            residual: None,
            m,
            n,
            k,
            a_transposed: false,
            b_transposed: false,
            a_stride: None,
            out_stride: None,
            scale: 1.0,
            accumulate: false,
        }
    }

    /// `out[m,n]` = `x[m,k]` · `weight[n,k]`ᵀ: a linear layer.
    pub fn linear(x: Operand, weight: Operand, out: Operand, m: u64, k: u64, n: u64) -> Product {
        Product { b_transposed: true, ..Product::plain(x, weight, out, [m, n, k]) }
    }

    /// `dweight[n,k]` += `gradient[m,n]`ᵀ · `x[m,k]`: what a linear layer adds to the gradient of its weight.
    pub fn of_weight(gradient: Operand, x: Operand, dweight: Operand, m: u64, k: u64, n: u64) -> Product {
        Product { a_transposed: true, accumulate: true, ..Product::plain(gradient, x, dweight, [n, k, m]) }
    }
}
