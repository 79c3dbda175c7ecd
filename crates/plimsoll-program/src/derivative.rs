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
    /// Persistent gradient tensors by weight; what is not among them is frozen.
    weight_gradients: &'a HashMap<TensorId, TensorId>,
    /// The ops that make a weight right before its product, by weight.
    makers: HashMap<TensorId, Vec<Op>>,
    ops: Vec<Op>,
}

impl<'a> Tape<'a> {
    /// A tape for one block, whose forward ops are `forward`.
    pub fn new(
        builder: &'a mut Builder,
        weight_gradients: &'a HashMap<TensorId, TensorId>,
        forward: &[Op],
    ) -> Tape<'a> {
        let mut makers: HashMap<TensorId, Vec<Op>> = HashMap::new();
        for op in forward {
            if let OpKind::Dequantise { into, .. } = &op.kind {
                makers.entry(into.tensor).or_default().push(op.clone());
            }
        }
        let (adjoints, places, ops) = (HashMap::new(), HashMap::new(), Vec::new());
        Tape { builder, adjoints, places, weight_gradients, makers, ops }
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

    /// The gradient of a weight; none where it is frozen.
    fn weight(&self, weight: Operand) -> Option<Operand> {
        let gradient = *self.weight_gradients.get(&weight.tensor)?;
        Some(Operand { tensor: gradient, ..weight })
    }

    /// A weight as the backward pass reads it: itself, or, where it is made for each product, made once more in a
    /// buffer of the backward pass, so that neither lives from one to the other.
    fn made_again(&mut self, weight: Operand) -> Operand {
        let makers: Vec<Op> = self.makers.get(&weight.tensor).cloned().unwrap_or_default();
        if makers.is_empty() {
            return weight;
        }
        let name = format!("{}.gradient", self.builder.set.tensor(weight.tensor).name);
        let copy = self.builder.find(&name).unwrap_or_else(|| self.builder.copy_of(weight.tensor, name));
        let renamed = |tensor| if tensor == weight.tensor { copy } else { tensor };
        self.ops.extend(makers.iter().map(|op| op.with_tensors(&renamed)));
        Operand { tensor: copy, ..weight }
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
                a_stride,
                out_stride,
                scale,
                ..
            } => {
                assert_eq!(a_stride, k, "layers take whole rows");
                // What an adapter adds to some columns has the gradient of these columns; what they were before keeps
                // its own.
                let g = self.of_output(*out).from(out.offset);
                let g_stride = Some(*out_stride);
                // dW[n,k] += gᵀ[n,m] · a[m,k]
                if let Some(dweight) = self.weight(*b) {
                    let product = Product::of_weight(g, *a, dweight, *m, *k, *n);
                    self.product(Product { a_stride: g_stride, scale: *scale, ..product });
                }
                if let Some(into) = bias.and_then(|bias| self.weight(bias)) {
                    let elements = self.builder.kernels.sum_rows(*m, *n);
                    let workspace = self.builder.scratch_beside(*out, "bias_sums", elements);
                    self.push(OpKind::SumRows { x: g, into, workspace, rows: *m, columns: *n });
                }
                // da[m,k] (+)= g[m,n] · W[n,k]
                let weight = self.made_again(*b);
                let (da, accumulate) = self.contribute(*a);
                let product = Product::plain(g, weight, da, [*m, *k, *n]);
                self.product(Product { a_stride: g_stride, scale: *scale, accumulate, ..product });
                if let Some(residual) = residual {
                    // The sum passes its gradient on as it is; nobody reads g as g after this.
                    match self.gradient(*residual) {
                        None => self.seed(*residual, g),
                        Some(into) => self.push(OpKind::Add { x: g, into, elements: m * n }),
                    }
                }
            }
            // Frozen weights: `made_again` has what their products need.
            OpKind::Dequantise { .. } => {}
            OpKind::Dropout { x, out, .. } => {
                let dout = self.of_output(*out);
                let (dx, accumulate) = self.contribute(*x);
                let mut gradient = op.clone();
                if let OpKind::Dropout { x, out, accumulate: adds, .. } = &mut gradient {
                    (*x, *out, *adds) = (dout, dx, accumulate);
                }
                self.push(gradient);
            }
            OpKind::Embed { tokens, table, out, rows, hidden, vocab } => {
                let dout = self.of_output(*out);
                let Some(dtable) = self.weight(*table) else { return };
                let elements = self.builder.kernels.embed_grad(*rows, *hidden);
                let workspace = self.builder.scratch_beside(*out, "embed_sums", elements);
                self.push(OpKind::EmbedGrad {
                    tokens: *tokens,
                    dout,
                    dtable,
                    workspace,
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
                let dweights = self.weight(*q_weight).zip(self.weight(*k_weight)).map(|(q, k)| [q, k]);
                let elements = self.builder.kernels.head_norm_grad(*rows, shape.head_dim);
                let scratch = self.builder.scratch_beside(*out, "norm_sums", elements);
                self.push(OpKind::HeadNormGrad {
                    x: *x,
                    q_weight: *q_weight,
                    k_weight: *k_weight,
                    rstd: *rstd,
                    dx,
                    dweights,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Quantised;
    use crate::workspace::Kernels;
    use plimsoll_core::{Category, DType};

    const ROWS: u64 = 5;
    const IN: u64 = 7;
    const OUT: u64 = 9;
    const RANK: u64 = 2;

    /// The ops of linear layers, one number after the other.
    struct Numbers<'a> {
        builder: &'a Builder,
        values: HashMap<TensorId, Vec<f64>>,
    }

    impl Numbers<'_> {
        fn of(&self, operand: Operand) -> Vec<f64> {
            let zeros = || vec![0.0; self.builder.set.tensor(operand.tensor).elements() as usize];
            self.values.get(&operand.tensor).cloned().unwrap_or_else(zeros)[operand.offset.base as usize..].to_vec()
        }

        fn add(&mut self, operand: Operand, at: usize, value: f64, accumulate: bool) {
            let elements = self.builder.set.tensor(operand.tensor).elements() as usize;
            let place = &mut self.values.entry(operand.tensor).or_insert_with(|| vec![0.0; elements])
                [operand.offset.base as usize + at];
            *place = value + if accumulate { *place } else { 0.0 };
        }

        fn run(&mut self, ops: &[Op]) {
            for op in ops {
                match &op.kind {
                    OpKind::Product {
                        a,
                        b,
                        out,
                        bias,
                        residual,
                        m,
                        n,
                        k,
                        a_transposed,
                        b_transposed,
                        a_stride,
                        out_stride,
                        scale,
                        accumulate,
                        ..
                    } => {
                        let (a, b) = (self.of(*a), self.of(*b));
                        let (bias, residual) = (bias.map(|bias| self.of(bias)), residual.map(|sum| self.of(sum)));
                        for (i, j) in (0..*m).flat_map(|i| (0..*n).map(move |j| (i, j))) {
                            let left = |p: u64| if *a_transposed { p * a_stride + i } else { i * a_stride + p };
                            let right = |p: u64| if *b_transposed { j * k + p } else { p * n + j };
                            let sum: f64 = (0..*k).map(|p| a[left(p) as usize] * b[right(p) as usize]).sum();
                            let bias = bias.as_ref().map_or(0.0, |bias| bias[j as usize]);
                            let residual = residual.as_ref().map_or(0.0, |sum| sum[(i * n + j) as usize]);
                            self.add(*out, (i * out_stride + j) as usize, scale * sum + bias + residual, *accumulate);
                        }
                    }
                    // Every third element is left out.
                    OpKind::Dropout { x, out, probability, rows, columns, accumulate, .. } => {
                        let x = self.of(*x);
                        for (i, x) in x.into_iter().enumerate().take((rows * columns) as usize) {
                            let left = if i % 3 == 1 { 0.0 } else { x / (1.0 - probability) };
                            self.add(*out, i, left, *accumulate);
                        }
                    }
                    OpKind::Dequantise { from: Quantised::Int8 { codes, .. }, into, elements, .. } => {
                        let codes = self.of(*codes);
                        (0..*elements as usize).for_each(|i| self.add(*into, i, codes[i], false));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    /// A frozen layer with a residual, adapters on two ranges of its columns, one of which sees only a part of x.
    fn layer(builder: &mut Builder) -> (Vec<Op>, HashMap<&'static str, TensorId>) {
        let mut names = HashMap::new();
        let mut made = |builder: &mut Builder, name: &'static str, dims: &[u64]| {
            let id = builder.on_device(name, dims, DType::F64, Category::Weight, crate::Lifetime::Persistent, 1);
            names.insert(name, id);
            Operand::whole(id)
        };
        let x = made(builder, "x", &[ROWS, IN]);
        let codes = made(builder, "codes", &[OUT, IN]);
        let whole = made(builder, "whole", &[OUT, IN]);
        let residual = made(builder, "residual", &[ROWS, OUT]);
        let out = made(builder, "out", &[ROWS, OUT]);
        let left = made(builder, "left", &[ROWS, IN]);
        let from = Quantised::Int8 { codes, scales: codes };
        let mut ops: Vec<Op> = vec![OpKind::Dequantise { from, into: whole, elements: OUT * IN, columns: IN }.into()];
        let base = Product::linear(x, whole, out, ROWS, IN, OUT);
        ops.push(builder.product(Product { residual: Some(residual), ..base }));
        let dropout = OpKind::Dropout {
            x,
            out: left,
            scalars: x,
            seed: 1,
            first_sample: Index::fixed(0),
            layer: Index::fixed(0),
            site: 0,
            probability: 0.25,
            rows: ROWS,
            columns: IN,
            sequence: ROWS,
            accumulate: false,
        };
        ops.push(dropout.into());
        for ([a, b, inside], seen, first, columns) in
            [(["a1", "b1", "inside1"], left, 0, 4), (["a2", "b2", "inside2"], x, 5, 3)]
        {
            let a = made(builder, a, &[RANK, IN]);
            let b = made(builder, b, &[columns, RANK]);
            let inside = made(builder, inside, &[ROWS, RANK]);
            ops.push(builder.product(Product::linear(seen, a, inside, ROWS, IN, RANK)));
            let columns_of = out.from(Index::fixed(first));
            ops.push(builder.product(Product {
                out_stride: Some(OUT),
                scale: 1.5,
                accumulate: true,
                ..Product::linear(inside, b, columns_of, ROWS, RANK, columns)
            }));
        }
        (ops, names)
    }

    #[test]
    fn adapters_have_the_gradients_that_differences_have_and_frozen_weights_none() {
        let mut builder = Builder::new(DType::F64, Kernels::Cuda);
        let (ops, names) = layer(&mut builder);
        let mut gradients = HashMap::new();
        for name in ["a1", "b1", "a2", "b2"] {
            gradients.insert(names[name], builder.copy_of(names[name], format!("{name}.sum")));
        }
        // The loss is the sum of the results, each times a number of its own: their gradient.
        let seed = builder.copy_of(names["out"], "seed".into());
        let mut tape = Tape::new(&mut builder, &gradients, &ops);
        tape.seed(Operand::whole(names["out"]), Operand::whole(seed));
        ops.iter().rev().for_each(|op| tape.derive(&op.kind));
        let dx = tape.gradient(Operand::whole(names["x"])).expect("x is used").tensor;
        let dresidual = tape.gradient(Operand::whole(names["residual"])).expect("the residual is used").tensor;
        let backward = tape.into_ops();
        assert_eq!(dresidual, seed, "a sum passes its gradient on as it is");
        assert!(builder.find("codes.gradient").is_none());

        let number = |i: usize, of: usize| ((i * 37 + of * 101) % 23) as f64 / 11.0 - 1.0;
        let mut values = HashMap::new();
        for (of, name) in ["x", "codes", "residual", "a1", "b1", "a2", "b2"].into_iter().enumerate() {
            let elements = builder.set.tensor(names[name]).elements() as usize;
            values.insert(names[name], (0..elements).map(|i| number(i, of)).collect::<Vec<_>>());
        }
        let weights: Vec<f64> = (0..(ROWS * OUT) as usize).map(|i| number(i, 9)).collect();
        let loss = |values: &HashMap<TensorId, Vec<f64>>| {
            let mut numbers = Numbers { builder: &builder, values: values.clone() };
            numbers.run(&ops);
            numbers.of(Operand::whole(names["out"])).iter().zip(&weights).map(|(y, w)| y * w).sum::<f64>()
        };
        let mut numbers = Numbers { builder: &builder, values: values.clone() };
        numbers.run(&ops);
        numbers.values.insert(seed, weights.clone());
        numbers.run(&backward);
        for (name, gradient) in [("x", dx), ("a1", gradients[&names["a1"]]), ("b1", gradients[&names["b1"]])]
            .into_iter()
            .chain(["a2", "b2"].map(|name| (name, gradients[&names[name]])))
        {
            let found = numbers.of(Operand::whole(gradient));
            for (i, found) in found.into_iter().enumerate() {
                let moved = |by: f64| {
                    let mut values = values.clone();
                    values.get_mut(&names[name]).expect("it has values")[i] += by;
                    loss(&values)
                };
                let difference = (moved(1e-4) - moved(-1e-4)) / 2e-4;
                assert!((found - difference).abs() < 1e-8, "{name}[{i}]: {found}, {difference}");
            }
        }
    }
}
