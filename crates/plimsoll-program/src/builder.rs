//! Builder of tensors and ops, with which the model families write their Programs.

use crate::op::{Op, OpKind};
use crate::program::ProgramSet;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use crate::workspace::Kernels;
use foldhash::HashMap;
use plimsoll_core::{Category, DType, Space};

/// A [`ProgramSet`] under construction. Its methods add tensors to the set. They only return ops, which the caller puts
/// into a Program.
pub struct Builder {
    /// Tensors and Programs so far.
    pub set: ProgramSet,
    /// Precision of the run: the dtype of weights and activations. Sums have its wide dtype ([`DType::wide`]: f64 for
    /// f64, else f32).
    pub precision: DType,
    /// Kernels that run the ops (CPU or CUDA); they determine the sizes of workspaces.
    pub kernels: Kernels,
    names: HashMap<String, TensorId>,
}

impl Builder {
    /// Creates a builder with an empty set.
    pub fn new(precision: DType, kernels: Kernels) -> Builder {
        Builder { set: ProgramSet::default(), precision, kernels, names: HashMap::default() }
    }

    /// Adds a tensor to the set.
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

    /// Returns the id of the tensor with this name, and `None` if there is none.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.names.get(name).copied()
    }

    /// Adds `slots` equal tensors in device memory under one name, each of shape `shape`.
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

    /// Adds `slots` equal tensors in device memory that live for the whole run, such as the weights of all layers.
    pub fn persistent(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.on_device(name, shape, dtype, category, Lifetime::Persistent, slots)
    }

    /// Adds `slots` equal tensors in device memory that live from the first to the last op that touches them.
    pub fn transient(&mut self, name: &str, shape: &[u64], dtype: DType, category: Category, slots: u32) -> TensorId {
        self.on_device(name, shape, dtype, category, Lifetime::Transient, slots)
    }

    /// Adds `slots` equal activations of shape `shape` in the run's precision.
    pub fn activation(&mut self, name: &str, shape: &[u64], slots: u32) -> TensorId {
        self.transient(name, shape, self.precision, Category::Activation, slots)
    }

    /// Adds `slots` equal sums or statistics of an activation, such as 1 / rms, in the wide dtype (f32, or f64 in an
    /// f64 run).
    pub fn statistic(&mut self, name: &str, shape: &[u64], slots: u32) -> TensorId {
        self.transient(name, shape, self.precision.wide(), Category::Activation, slots)
    }

    /// Adds `slots` equal workspaces (temporary buffers of an op) of `elements` elements in the wide dtype (f32, or f64
    /// in an f64 run). 0 elements become 1, because every operand needs an address.
    pub fn workspace(&mut self, name: &str, elements: u64, slots: u32) -> TensorId {
        self.transient(name, &[elements.max(1)], self.precision.wide(), Category::Workspace, slots)
    }

    /// Adds a tensor that equals the tensor `id` in all but its name: shape, dtype, lifetime, slots and so on. No data
    /// is copied.
    pub fn copy_of(&mut self, id: TensorId, name: String) -> TensorId {
        let tensor = Tensor { name, ..self.set.tensor(id).clone() };
        self.tensor(tensor)
    }

    /// Returns the workspace (temporary buffer) of `elements` elements for an op that writes `like`, and adds it if
    /// needed.
    ///
    /// Its name is made of the name of the tensor of `like`, `role` and `elements`. Ops for which these three are equal
    /// share the workspace. It has one slot per slot of that tensor.
    pub fn workspace_for(&mut self, like: Operand, role: &str, elements: u64) -> Operand {
        let Tensor { name, slots, .. } = self.set.tensor(like.tensor);
        let (name, slots) = (format!("{name}.{role}_{elements}"), *slots);
        let tensor = self.find(&name).unwrap_or_else(|| self.workspace(&name, elements, slots));
        Operand { tensor, slot: like.slot, offset: Index::fixed(0) }
    }

    /// Returns the op of a matrix product, and adds the workspace that its kernel needs.
    pub fn product(&mut self, product: Product) -> Op {
        self.product_for(product, product.out, "product")
    }

    /// Returns the op of a matrix product, whose workspace is that of `like` and `role` ([`Builder::workspace_for`]).
    /// Products that add to one tensor, with other ops between them, need workspaces of their own: a shared one would
    /// stay reserved from the first to the last.
    pub fn product_for(&mut self, product: Product, like: Operand, role: &str) -> Op {
        let Product { a, b, out, bias, residual, m, n, k, a_transposed, b_transposed, accumulate, scale, .. } = product;
        let a_stride = product.a_stride.unwrap_or(if a_transposed { m } else { k });
        let out_stride = product.out_stride.unwrap_or(n);
        let workspace = self.workspace_for(like, role, self.kernels.product_workspace(self.precision, m, n, k));
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

/// A matrix product `out[m,n]` = scale · `a[m,k]` · `b[k,n]` (+ bias) (+ residual), from which [`Builder::product`]
/// makes an op.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Left operand, `[m,k]`, or `[k,m]` if transposed.
    pub a: Operand,
    /// Right operand, `[k,n]`, or `[n,k]` if transposed.
    pub b: Operand,
    /// Result, `[m,n]`.
    pub out: Operand,
    /// Bias `[n]`, added to every row; `None` adds nothing.
    pub bias: Option<Operand>,
    /// Residual `[m,n]`, added to the result; `None` adds nothing.
    pub residual: Option<Operand>,
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Inner dimension, over which the product sums.
    pub k: u64,
    /// Whether `a` is stored `[k,m]`.
    pub a_transposed: bool,
    /// Whether `b` is stored `[n,k]`.
    pub b_transposed: bool,
    /// Elements between the starts of two rows of `a` as stored; `None` if rows are contiguous.
    pub a_stride: Option<u64>,
    /// Elements between the starts of two rows of `out`; `None` if rows are contiguous.
    pub out_stride: Option<u64>,
    /// Factor of a·b, usually 1.
    pub scale: f64,
    /// Whether the result is added to `out`; otherwise it overwrites `out`.
    pub accumulate: bool,
}

impl Product {
    /// Describes the product `out[m,n]` = `a[m,k]` · `b[k,n]`, without bias and residual.
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

    /// Describes a linear layer without bias: `out[m,n]` = `x[m,k]` · `weight[n,k]`ᵀ.
    pub fn linear(x: Operand, weight: Operand, out: Operand, m: u64, k: u64, n: u64) -> Product {
        Product { b_transposed: true, ..Product::plain(x, weight, out, [m, n, k]) }
    }

    /// Describes the weight gradient of a linear layer: `dweight[n,k]` += `gradient[m,n]`ᵀ · `x[m,k]`.
    pub fn weight_gradient(gradient: Operand, x: Operand, dweight: Operand, m: u64, k: u64, n: u64) -> Product {
        Product { a_transposed: true, accumulate: true, ..Product::plain(gradient, x, dweight, [n, k, m]) }
    }
}
