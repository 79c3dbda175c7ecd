//! Builder of tensors and ops, with which the model families write their Programs.

use crate::op::{Op, OpKind};
use crate::program::ProgramSet;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use crate::workspace::Kernels;
use plimsoll_core::{Category, DType, Space};
use std::collections::HashMap;

/// A [`ProgramSet`] under construction.
pub struct Builder {
    /// Tensors and Programs so far.
    pub set: ProgramSet,
    /// Dtype that the run computes in.
    pub precision: DType,
    /// Kernels that run the ops, which determine workspaces.
    pub kernels: Kernels,
    names: HashMap<String, TensorId>,
}

impl Builder {
    /// Creates an empty builder.
    pub fn new(precision: DType, kernels: Kernels) -> Builder {
        Builder { set: ProgramSet::default(), precision, kernels, names: HashMap::new() }
    }

    /// Adds a tensor.
    ///
    /// # Panics
    /// Panics if the set has a tensor of this name.
    pub fn tensor(&mut self, tensor: Tensor) -> TensorId {
        let id = TensorId(self.set.tensors.len() as u32);
        let before = self.names.insert(tensor.name.clone(), id);
        assert!(before.is_none(), "two tensors have the name {}", tensor.name);
        self.set.tensors.push(tensor);
        id
    }

    /// Returns the id of the tensor with this name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.names.get(name).copied()
    }

    /// Adds a tensor in device memory.
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

    /// Adds a tensor in device memory that lives for the whole run.
    pub fn persistent(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.on_device(name, shape, dtype, category, Lifetime::Persistent, slots)
    }

    /// Adds a tensor in device memory that lives while ops touch it.
    pub fn transient(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.on_device(name, shape, dtype, category, Lifetime::Transient, slots)
    }

    /// Adds an activation in the run's precision.
    pub fn activation(&mut self, name: &str, shape: &[u64], slots: u32) -> TensorId {
        self.transient(name, shape, self.precision, Category::Activation, slots)
    }

    /// Adds an activation in the wide dtype: a sum or a statistic.
    pub fn statistic(&mut self, name: &str, shape: &[u64], slots: u32) -> TensorId {
        self.transient(name, shape, self.precision.wide(), Category::Activation, slots)
    }

    /// Adds a workspace of `elements` in the wide dtype. An op that needs none gets one element, because every operand
    /// needs a place.
    pub fn workspace(&mut self, name: &str, elements: u64, slots: u32) -> TensorId {
        self.transient(name, &[elements.max(1)], self.precision.wide(), Category::Workspace, slots)
    }

    /// Adds a tensor equal to `id` under another name.
    pub fn copy_of(&mut self, id: TensorId, name: String) -> TensorId {
        let tensor = Tensor { name, ..self.set.tensor(id).clone() };
        self.tensor(tensor)
    }

    /// Returns the workspace for an op that writes `like`, with one slot per slot of `like`. Ops with the same role,
    /// output tensor and size share it.
    pub fn workspace_for(&mut self, like: Operand, role: &str, elements: u64) -> Operand {
        let Tensor { name, slots, .. } = self.set.tensor(like.tensor);
        let (name, slots) = (format!("{name}.{role}_{elements}"), *slots);
        let tensor = self.find(&name).unwrap_or_else(|| self.workspace(&name, elements, slots));
        Operand { tensor, slot: like.slot, offset: Index::fixed(0) }
    }

    /// Returns a matrix product with its workspace.
    pub fn product(&mut self, product: Product) -> Op {
        let Product { a, b, out, bias, residual, m, n, k, a_transposed, b_transposed, accumulate, scale, .. } = product;
        let a_stride = product.a_stride.unwrap_or(if a_transposed { m } else { k });
        let out_stride = product.out_stride.unwrap_or(n);
        let workspace = self.workspace_for(out, "product", self.kernels.product(self.precision, m, n, k));
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

/// A matrix product without its workspace; see [`OpKind::Product`].
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Left operand, `[m,k]`, or `[k,m]` if transposed.
    pub a: Operand,
    /// Right operand, `[k,n]`, or `[n,k]` if transposed.
    pub b: Operand,
    /// Result, `[m,n]`.
    pub out: Operand,
    /// Bias `[n]`, added to every row.
    pub bias: Option<Operand>,
    /// Residual `[m,n]`, added to the result.
    pub residual: Option<Operand>,
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Inner dimension.
    pub k: u64,
    /// Whether `a` is stored `[k,m]`.
    pub a_transposed: bool,
    /// Whether `b` is stored `[n,k]`.
    pub b_transposed: bool,
    /// Elements between the starts of two stored rows of `a`, if that is more than a row's length.
    pub a_stride: Option<u64>,
    /// Elements between the starts of two rows of `out`, if that is more than a row's length.
    pub out_stride: Option<u64>,
    /// Factor of a·b.
    pub scale: f64,
    /// Whether the result is added to `out`.
    pub accumulate: bool,
}

impl Product {
    /// Creates `out[m,n]` = `a[m,k]` · `b[k,n]`.
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

    /// Creates `out[m,n]` = `x[m,k]` · `weight[n,k]`ᵀ: a linear layer.
    pub fn linear(x: Operand, weight: Operand, out: Operand, m: u64, k: u64, n: u64) -> Product {
        Product { b_transposed: true, ..Product::plain(x, weight, out, [m, n, k]) }
    }

    /// Creates `dweight[n,k]` += `gradient[m,n]`ᵀ · `x[m,k]`: the weight gradient of a linear layer.
    pub fn weight_gradient(gradient: Operand, x: Operand, dweight: Operand, m: u64, k: u64, n: u64) -> Product {
        Product { a_transposed: true, accumulate: true, ..Product::plain(gradient, x, dweight, [n, k, m]) }
    }
}
