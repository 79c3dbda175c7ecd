//! The derivative of each op, as ops.
//!
//! Walking a block's ops backwards, [`Tape::derive`] asks each for the ops that turn the gradient of
//! its output into gradients of its inputs. Gradients of weights are persistent and summed over
//! micro-batches. The gradient of a value that is used twice is summed in place; the gradient of a
//! residual sum is one buffer that every layer adds to.

use crate::builder::{Builder, Product};
use crate::op::{Op, OpKind};
use crate::tensor::{Index, Operand, TensorId};
use std::collections::HashMap;

/// Gradients known so far within a block.
pub struct Tape<'a> {
    builder: &'a mut Builder,
    /// Gradient of a place, by tensor and slot.
    adjoints: HashMap<(TensorId, Index), Operand>,
    /// Where the first contribution to a gradient shall go.
    places: HashMap<(TensorId, Index), Operand>,
    /// Persistent gradient tensors by weight.
    weight_gradients: &'a HashMap<TensorId, TensorId>,
    ops: Vec<Op>,
}

impl<'a> Tape<'a> {
    /// A tape for one block.
    pub fn new(builder: &'a mut Builder, weight_gradients: &'a HashMap<TensorId, TensorId>) -> Tape<'a> {
        Tape { builder, adjoints: HashMap::new(), places: HashMap::new(), weight_gradients, ops: Vec::new() }
    }

    /// The first contribution to the gradient of `of` shall be written to `gradient`.
    pub fn place(&mut self, of: Operand, gradient: Operand) {
        self.places.insert((of.tensor, of.slot), gradient);
    }

    /// The gradient of `of` stands at `gradient`.
    pub fn seed(&mut self, of: Operand, gradient: Operand) {
        self.adjoints.insert((of.tensor, of.slot), gradient);
    }

    /// The gradient of `of`, where something has contributed to it.
    pub fn gradient(&self, of: Operand) -> Option<Operand> {
        self.adjoints.get(&(of.tensor, of.slot)).copied()
    }

    /// The ops so far.
    pub fn into_ops(self) -> Vec<Op> {
        self.ops
    }

    fn of_output(&self, out: Operand) -> Operand {
        self.gradient(out).unwrap_or_else(|| {
            panic!("nothing uses `{}`: it has no gradient", self.builder.set.tensor(out.tensor).name)
        })
    }

    fn weight(&self, weight: Operand) -> Operand {
        let gradient = self.weight_gradients[&weight.tensor];
        Operand { tensor: gradient, ..weight }
    }

    /// Where the gradient of `x` goes, and whether it must be added to what is there.
    fn contribute(&mut self, x: Operand) -> (Operand, bool) {
        if let Some(gradient) = self.gradient(x) {
            return (gradient, true);
        }
        if let Some(gradient) = self.places.get(&(x.tensor, x.slot)).copied() {
            self.seed(x, gradient);
            return (gradient, false);
        }
        let name = format!("{}.gradient", self.builder.set.tensor(x.tensor).name);
        let tensor = self.builder.find(&name).unwrap_or_else(|| self.builder.copy_of(x.tensor, name));
        let gradient = Operand { tensor, ..x };
        self.seed(x, gradient);
        (gradient, false)
    }

    fn product(&mut self, product: Product) {
        let op = self.builder.product(product);
        self.ops.push(op);
    }

    fn push(&mut self, kind: OpKind) {
        self.ops.push(kind.into());
    }

    /// Appends the derivative of one op. Ops must come last to first.
    ///
    /// # Panics
    /// For ops that have no derivative (they stand in no forward pass), and where nothing used the output.
    pub fn derive(&mut self, op: &OpKind) {
        match op {
            OpKind::Product {
                a,
                b,
                out,
                bias,
                residual,
                m,
                n,
                k,
                a_transposed: false,
                b_transposed: true,
                accumulate: false,
                ..
            } => {
                let g = self.of_output(*out);
                // dW[n,k] += gᵀ[n,m] · a[m,k]
                let dweight = self.weight(*b);
                self.product(Product {
                    a: g,
                    b: *a,
                    out: dweight,
                    bias: None,
                    residual: None,
                    m: *n,
                    n: *k,
                    k: *m,
                    a_transposed: true,
                    b_transposed: false,
                    accumulate: true,
                });
                if let Some(bias) = bias {
                    let into = self.weight(*bias);
                    let elements = self.builder.kernels.sum_rows(*m, *n);
                    let workspace = self.builder.scratch_beside(*out, "bias_sums", elements);
                    self.push(OpKind::SumRows { x: g, into, workspace, rows: *m, columns: *n });
                }
                // da[m,k] (+)= g[m,n] · W[n,k]
                let (da, accumulate) = self.contribute(*a);
                self.product(Product {
                    a: g,
                    b: *b,
                    out: da,
                    bias: None,
                    residual: None,
                    m: *m,
                    n: *k,
                    k: *n,
                    a_transposed: false,
                    b_transposed: false,
                    accumulate,
                });
                if let Some(residual) = residual {
                    // The sum passes its gradient on as it is; nobody reads g as g after this.
                    match self.gradient(*residual) {
                        None => self.seed(*residual, g),
                        Some(into) => self.push(OpKind::Add { x: g, into, elements: m * n }),
                    }
                }
            }
            OpKind::Embed { tokens, table, out, rows, hidden, vocab } => {
                let dout = self.of_output(*out);
                let dtable = self.weight(*table);
                self.push(OpKind::EmbedGrad {
                    tokens: *tokens,
                    dout,
                    dtable,
                    rows: *rows,
                    hidden: *hidden,
                    vocab: *vocab,
                });
            }
            OpKind::RmsNorm { x, weight, out, rstd, rows, dim, .. } => {
                let dout = self.of_output(*out);
                let dweight = self.weight(*weight);
                let elements = self.builder.kernels.rms_norm_grad(*rows, *dim);
                let scratch = self.builder.scratch_beside(*out, "norm_sums", elements);
                let (dx, accumulate) = self.contribute(*x);
                self.push(OpKind::RmsNormGrad {
                    x: *x,
                    weight: *weight,
                    rstd: *rstd,
                    dout,
                    dx,
                    dweight,
                    workspace: scratch,
                    rows: *rows,
                    dim: *dim,
                    accumulate,
                });
            }
            OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, .. } => {
                let dx = self.of_output(*out);
                let (dq_weight, dk_weight) = (self.weight(*q_weight), self.weight(*k_weight));
                let elements = self.builder.kernels.head_norm_grad(*rows, shape.head_dim);
                let scratch = self.builder.scratch_beside(*out, "norm_sums", elements);
                self.push(OpKind::HeadNormGrad {
                    x: *x,
                    q_weight: *q_weight,
                    k_weight: *k_weight,
                    rstd: *rstd,
                    dx,
                    dq_weight,
                    dk_weight,
                    workspace: scratch,
                    rows: *rows,
                    shape: *shape,
                });
                self.seed(*x, dx);
            }
            OpKind::Rope { qkv, table, positions, rows, table_rows, shape, inverse } => {
                let gradient = self.of_output(*qkv);
                self.push(OpKind::Rope {
                    qkv: gradient,
                    table: *table,
                    positions: *positions,
                    rows: *rows,
                    table_rows: *table_rows,
                    shape: *shape,
                    inverse: !inverse,
                });
            }
            OpKind::Attention { qkv, document_start, out, stats, batch, sequence, shape, .. } => {
                let dout = self.of_output(*out);
                let elements = self.builder.kernels.attention_grad(self.builder.precision, *batch, *sequence, *shape);
                let scratch = self.builder.scratch_beside(*out, "gradient", elements);
                let (dqkv, accumulate) = self.contribute(*qkv);
                assert!(!accumulate, "queries, keys and values are used by attention alone");
                self.push(OpKind::AttentionGrad {
                    qkv: *qkv,
                    out: *out,
                    dout,
                    stats: *stats,
                    document_start: *document_start,
                    dqkv,
                    workspace: scratch,
                    batch: *batch,
                    sequence: *sequence,
                    shape: *shape,
                });
            }
            OpKind::SwiGlu { gate_up, out, rows, ffn } => {
                let dout = self.of_output(*out);
                let (dgate_up, accumulate) = self.contribute(*gate_up);
                assert!(!accumulate, "gate and up are used by SwiGLU alone");
                self.push(OpKind::SwiGluGrad { gate_up: *gate_up, dout, dgate_up, rows: *rows, ffn: *ffn });
            }
            other => panic!("{other:?} stands in no forward pass"),
        }
    }
}
