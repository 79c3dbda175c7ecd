//! Derivatives: the ops that compute gradients, for each op of a forward pass. This is autograd at the time when
//! Programs are built; nothing is recorded at run time.
//!
//! [`Tape::derive`] takes the ops of a block (such as a layer) from last to first. For each op it appends the ops that
//! turn the gradient of the output into gradients of the inputs.
//!
//! - Gradients of weights are persistent tensors and summed over micro-batches.
//! - The gradient of a value that several ops read is summed in place.
//! - The gradient of the residual stream is one buffer to which every layer adds.

use crate::builder::{Builder, Product};
use crate::op::{Op, OpKind};
use crate::tensor::{Index, Operand, TensorId};
use foldhash::HashMap;

/// The backward pass of one block (such as a layer) under construction: the ops so far, and the tensors that hold the
/// gradients of forward values. Unlike an autograd tape, it derives ops when Programs are built.
pub struct Tape<'a> {
    builder: &'a mut Builder,
    /// Gradient of each forward value that has one so far, by tensor and slot of the value.
    gradients: HashMap<(TensorId, Index), Operand>,
    /// Operand for the first contribution to a gradient, by tensor and slot of the value; without an entry, a new
    /// tensor takes it.
    reserved: HashMap<(TensorId, Index), Operand>,
    /// Persistent gradient tensor of each trained weight; all other weights are frozen.
    weight_gradients: &'a HashMap<TensorId, TensorId>,
    /// Ops of the forward pass that dequantize frozen weights, by the buffer that they write.
    dequantizers: HashMap<TensorId, Vec<Op>>,
    ops: Vec<Op>,
}

/// The operand to which an op writes its contribution to the gradient of a value.
struct Contribution {
    gradient: Operand,
    /// Whether the op must add to the gradient, because an earlier op has written it.
    accumulate: bool,
}

impl<'a> Tape<'a> {
    /// Creates a tape without ops for a block with the forward ops `forward`.
    ///
    /// `weight_gradients` gives the gradient tensor of each trained weight; weights without an entry are frozen.
    pub fn new(
        builder: &'a mut Builder,
        weight_gradients: &'a HashMap<TensorId, TensorId>,
        forward: &[Op],
    ) -> Tape<'a> {
        let mut dequantizers: HashMap<TensorId, Vec<Op>> = HashMap::default();
        for op in forward {
            if let OpKind::Dequantize { into, .. } = &op.kind {
                dequantizers.entry(into.tensor).or_default().push(op.clone());
            }
        }
        let (gradients, reserved, ops) = (HashMap::default(), HashMap::default(), Vec::new());
        Tape { builder, gradients, reserved, weight_gradients, dequantizers, ops }
    }

    /// Makes the first op that contributes to the gradient of `value` write to `gradient` instead of a new tensor.
    pub fn reserve_gradient(&mut self, value: Operand, gradient: Operand) {
        self.reserved.insert((value.tensor, value.slot), gradient);
    }

    /// Declares that `gradient` already holds the gradient of `value`, such as that of the block's output. Later
    /// contributions are added to it.
    pub fn set_gradient(&mut self, value: Operand, gradient: Operand) {
        self.gradients.insert((value.tensor, value.slot), gradient);
    }

    /// Returns the operand that holds the gradient of `value`, and `None` if no op has contributed to it so far.
    pub fn gradient(&self, value: Operand) -> Option<Operand> {
        self.gradients.get(&(value.tensor, value.slot)).copied()
    }

    /// Returns the backward ops, in execution order.
    pub fn into_ops(self) -> Vec<Op> {
        self.ops
    }

    /// Returns the operand that holds the gradient of an op's output. Panics if the output has no gradient so far,
    /// because no later forward op reads it.
    fn output_gradient(&self, out: Operand) -> Operand {
        self.gradient(out).unwrap_or_else(|| {
            panic!("no op reads `{}`, so it has no gradient", self.builder.set.tensor(out.tensor).name)
        })
    }

    /// Returns the operand for the gradient of a weight, and `None` if the weight is frozen.
    fn weight_gradient(&self, weight: Operand) -> Option<Operand> {
        let gradient = *self.weight_gradients.get(&weight.tensor)?;
        Some(Operand { tensor: gradient, ..weight })
    }

    /// Returns the operand of a weight for the backward pass. For a weight that is not quantized it is the weight
    /// itself. For a quantized one it is a buffer into which appended ops dequantize the weight once more; the buffer
    /// of the forward pass need not be kept until then.
    fn dequantized_weight(&mut self, weight: Operand) -> Operand {
        let dequantizers: Vec<Op> = self.dequantizers.get(&weight.tensor).cloned().unwrap_or_default();
        if dequantizers.is_empty() {
            return weight;
        }
        let copy = self.gradient_tensor(weight.tensor);
        let rename = |tensor| if tensor == weight.tensor { copy } else { tensor };
        self.ops.extend(dequantizers.iter().map(|op| op.rename_tensors(&rename)));
        Operand { tensor: copy, ..weight }
    }

    /// Returns the tensor for the gradient of a tensor `NAME`: `NAME.gradient`, with the same shape. Adds it if needed.
    fn gradient_tensor(&mut self, tensor: TensorId) -> TensorId {
        let name = format!("{}.gradient", self.builder.set.tensor(tensor).name);
        self.builder.find(&name).unwrap_or_else(|| self.builder.copy_of(tensor, name))
    }

    /// Returns the operand to which the next op writes its contribution to the gradient of `x`, and whether it adds.
    /// From then on `x` has a gradient.
    fn contribute(&mut self, x: Operand) -> Contribution {
        if let Some(gradient) = self.gradient(x) {
            return Contribution { gradient, accumulate: true };
        }
        let gradient = match self.reserved.get(&(x.tensor, x.slot)).copied() {
            Some(reserved) => reserved,
            None => Operand { tensor: self.gradient_tensor(x.tensor), ..x },
        };
        self.set_gradient(x, gradient);
        Contribution { gradient, accumulate: false }
    }

    /// Returns the operand to which an op writes the gradient of `x`. Panics if an earlier op has contributed to it:
    /// the op's kernel cannot add.
    fn contribute_alone(&mut self, x: Operand) -> Operand {
        let Contribution { gradient, accumulate } = self.contribute(x);
        assert!(!accumulate, "only one op reads `{}`", self.builder.set.tensor(x.tensor).name);
        gradient
    }

    fn product(&mut self, product: Product) {
        let op = self.builder.product(product);
        self.ops.push(op);
    }

    fn push(&mut self, kind: OpKind) {
        self.ops.push(kind.into());
    }

    /// Appends the ops that compute the gradients of one forward op's inputs from the gradient of its output. The
    /// caller passes forward ops from last to first.
    ///
    /// # Panics
    /// Panics for ops that occur in no forward pass, and for ops with outputs that no later op reads.
    pub fn derive(&mut self, op: &OpKind) {
        match op {
            OpKind::Product { a_transposed: false, b_transposed: true, .. } => self.derive_linear(op),
            // Frozen weights; their products dequantize them again.
            OpKind::Dequantize { .. } => {}
            OpKind::Dropout { x, out, .. } => {
                let dout = self.output_gradient(*out);
                let dx = self.contribute(*x);
                let mut gradient = op.clone();
                if let OpKind::Dropout { x, out, accumulate, .. } = &mut gradient {
                    (*x, *out, *accumulate) = (dout, dx.gradient, dx.accumulate);
                }
                self.push(gradient);
            }
            OpKind::Embed { tokens, table, out, rows, hidden, vocab, scale } => {
                let dout = self.output_gradient(*out);
                let Some(dtable) = self.weight_gradient(*table) else { return };
                let elements = self.builder.kernels.embed_grad_workspace(*rows, *hidden);
                let workspace = self.builder.workspace_for(*out, "embed_sums", elements);
                let (tokens, rows, hidden, vocab, scale) = (*tokens, *rows, *hidden, *vocab, *scale);
                self.push(OpKind::EmbedGrad { tokens, dout, dtable, workspace, rows, hidden, vocab, scale });
            }
            OpKind::RmsNorm { .. } => self.derive_rms_norm(op),
            OpKind::HeadNorm { .. } => self.derive_head_norm(op),
            OpKind::Rope { qkv, inverse, .. } => {
                let dqkv = self.output_gradient(*qkv);
                let mut gradient = op.clone();
                if let OpKind::Rope { qkv, inverse: rotates_back, .. } = &mut gradient {
                    (*qkv, *rotates_back) = (dqkv, !inverse);
                }
                self.push(gradient);
            }
            OpKind::Attention { .. } => self.derive_attention(op),
            OpKind::Glu { gate_up, out, rows, ffn, activation } => {
                let (gate_up, rows, ffn, activation) = (*gate_up, *rows, *ffn, *activation);
                let dout = self.output_gradient(*out);
                let dgate_up = self.contribute_alone(gate_up);
                self.push(OpKind::GluGrad { gate_up, dout, dgate_up, rows, ffn, activation });
            }
            other => panic!("{other:?} has no derivative: it occurs in no forward pass"),
        }
    }

    /// Appends the ops for the gradients of a linear layer: of its weight, bias, input and residual.
    fn derive_linear(&mut self, op: &OpKind) {
        let OpKind::Product { a, b, out, bias, residual, m, n, k, a_stride, out_stride, scale, .. } = op else {
            unreachable!("the caller passes a product")
        };
        assert_eq!(a_stride, k, "linear layers read whole rows");
        // An adapter adds to some columns of `out`: its gradient is that of these columns, and `out` keeps its own.
        let g = self.output_gradient(*out).starting_at(out.offset);
        let g_stride = Some(*out_stride);
        // dW[n,k] += gᵀ[n,m] · a[m,k]
        if let Some(dweight) = self.weight_gradient(*b) {
            let product = Product::weight_gradient(g, *a, dweight, *m, *k, *n);
            self.product(Product { a_stride: g_stride, scale: *scale, ..product });
        }
        if let Some(into) = bias.and_then(|bias| self.weight_gradient(bias)) {
            let elements = self.builder.kernels.sum_rows_workspace(*m, *n);
            let workspace = self.builder.workspace_for(*out, "bias_sums", elements);
            self.push(OpKind::SumRows { x: g, into, workspace, rows: *m, columns: *n });
        }
        // da[m,k] (+)= g[m,n] · W[n,k]
        let weight = self.dequantized_weight(*b);
        let da = self.contribute(*a);
        let product = Product::plain(g, weight, da.gradient, [*m, *k, *n]);
        let product = Product { a_stride: g_stride, scale: *scale, accumulate: da.accumulate, ..product };
        let product = self.builder.product_for(product, *a, "gradient_product");
        self.ops.push(product);
        if let Some(residual) = residual {
            self.pass_on(g, *residual, m * n);
        }
    }

    /// Passes the gradient `g` of a sum of `elements` elements on to one of its terms, a residual.
    fn pass_on(&mut self, g: Operand, residual: Operand, elements: u64) {
        // The residual has the gradient of the sum. No later op reads `g` itself, so both may share the buffer.
        match self.gradient(residual) {
            None => self.set_gradient(residual, g),
            Some(into) => self.push(OpKind::Add { x: g, into, elements }),
        }
    }

    fn derive_rms_norm(&mut self, op: &OpKind) {
        let OpKind::RmsNorm { x, weight, residual, out, rstd, rows, dim, offset, .. } = *op else {
            unreachable!("the caller passes an RMS norm")
        };
        let dout = self.output_gradient(out);
        let dweight = self.weight_gradient(weight);
        let elements = self.builder.kernels.rms_norm_grad_workspace(rows, dim);
        let workspace = self.builder.workspace_for(out, "norm_sums", elements);
        let Contribution { gradient: dx, accumulate } = self.contribute(x);
        self.push(OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, rows, dim, offset, accumulate });
        if let Some(residual) = residual {
            self.pass_on(dout, residual, rows * dim);
        }
    }

    fn derive_head_norm(&mut self, op: &OpKind) {
        let OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, norm, offset, .. } = *op else {
            unreachable!("the caller passes a head norm")
        };
        let dx = self.output_gradient(out);
        let dweights = self.weight_gradient(q_weight).zip(self.weight_gradient(k_weight)).map(|(q, k)| [q, k]);
        let elements = self.builder.kernels.head_norm_grad_workspace(rows, shape.norm_widths(norm));
        let workspace = self.builder.workspace_for(out, "norm_sums", elements);
        self.push(OpKind::HeadNormGrad {
            x,
            q_weight,
            k_weight,
            rstd,
            dx,
            dweights,
            workspace,
            rows,
            shape,
            norm,
            offset,
        });
        self.set_gradient(x, dx);
    }

    fn derive_attention(&mut self, op: &OpKind) {
        let OpKind::Attention { qkv, document_start, out, stats, batch, sequence, shape, softcap, .. } = *op else {
            unreachable!("the caller passes an attention")
        };
        let dout = self.output_gradient(out);
        let elements = self.builder.kernels.attention_grad_workspace(self.builder.precision, batch, sequence, shape);
        let workspace = self.builder.workspace_for(out, "gradient", elements);
        let dqkv = self.contribute_alone(qkv);
        self.push(OpKind::AttentionGrad {
            qkv,
            out,
            dout,
            stats,
            document_start,
            dqkv,
            workspace,
            batch,
            sequence,
            shape,
            softcap,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Quantized;
    use crate::workspace::Kernels;
    use plimsoll_core::{Category, DType};

    const ROWS: u64 = 5;
    const IN: u64 = 7;
    const OUT: u64 = 9;
    const RANK: u64 = 2;

    /// A reference interpreter of linear-layer ops in f64.
    struct Interpreter<'a> {
        builder: &'a Builder,
        values: HashMap<TensorId, Vec<f64>>,
    }

    impl Interpreter<'_> {
        fn read(&self, operand: Operand) -> Vec<f64> {
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
                        let (a, b) = (self.read(*a), self.read(*b));
                        let (bias, residual) = (bias.map(|bias| self.read(bias)), residual.map(|sum| self.read(sum)));
                        for (i, j) in (0..*m).flat_map(|i| (0..*n).map(move |j| (i, j))) {
                            let left = |p: u64| if *a_transposed { p * a_stride + i } else { i * a_stride + p };
                            let right = |p: u64| if *b_transposed { j * k + p } else { p * n + j };
                            let sum: f64 = (0..*k).map(|p| a[left(p) as usize] * b[right(p) as usize]).sum();
                            let bias = bias.as_ref().map_or(0.0, |bias| bias[j as usize]);
                            let residual = residual.as_ref().map_or(0.0, |sum| sum[(i * n + j) as usize]);
                            self.add(*out, (i * out_stride + j) as usize, scale * sum + bias + residual, *accumulate);
                        }
                    }
                    // Every third element is dropped.
                    OpKind::Dropout { x, out, probability, rows, columns, accumulate, .. } => {
                        let x = self.read(*x);
                        for (i, x) in x.into_iter().enumerate().take((rows * columns) as usize) {
                            let kept = if i % 3 == 1 { 0.0 } else { x / (1.0 - probability) };
                            self.add(*out, i, kept, *accumulate);
                        }
                    }
                    OpKind::Dequantize { from: Quantized::Int8 { codes, .. }, into, elements, .. } => {
                        let codes = self.read(*codes);
                        (0..*elements as usize).for_each(|i| self.add(*into, i, codes[i], false));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    /// Builds a frozen layer with a residual and with adapters on two column ranges, one of them behind dropout.
    fn layer(builder: &mut Builder) -> (Vec<Op>, HashMap<&'static str, TensorId>) {
        let mut names = HashMap::default();
        let mut add = |builder: &mut Builder, name: &'static str, dims: &[u64]| {
            let id = builder.on_device(name, dims, DType::F64, Category::Weight, crate::Lifetime::Persistent, 1);
            names.insert(name, id);
            Operand::whole(id)
        };
        let x = add(builder, "x", &[ROWS, IN]);
        let codes = add(builder, "codes", &[OUT, IN]);
        let whole = add(builder, "whole", &[OUT, IN]);
        let residual = add(builder, "residual", &[ROWS, OUT]);
        let out = add(builder, "out", &[ROWS, OUT]);
        let left = add(builder, "left", &[ROWS, IN]);
        let from = Quantized::Int8 { codes, scales: codes };
        let mut ops: Vec<Op> = vec![OpKind::Dequantize { from, into: whole, elements: OUT * IN, columns: IN }.into()];
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
            let a = add(builder, a, &[RANK, IN]);
            let b = add(builder, b, &[columns, RANK]);
            let inside = add(builder, inside, &[ROWS, RANK]);
            ops.push(builder.product(Product::linear(seen, a, inside, ROWS, IN, RANK)));
            let columns_of = out.starting_at(Index::fixed(first));
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
    fn adapter_gradients_match_finite_differences() {
        let mut builder = Builder::new(DType::F64, Kernels::Cuda);
        let (ops, names) = layer(&mut builder);
        let mut gradients = HashMap::default();
        for name in ["a1", "b1", "a2", "b2"] {
            gradients.insert(names[name], builder.copy_of(names[name], format!("{name}.sum")));
        }
        // The loss is a weighted sum of the outputs; the weights are its gradient.
        let seed = builder.copy_of(names["out"], "seed".into());
        let mut tape = Tape::new(&mut builder, &gradients, &ops);
        tape.set_gradient(Operand::whole(names["out"]), Operand::whole(seed));
        ops.iter().rev().for_each(|op| tape.derive(&op.kind));
        let dx = tape.gradient(Operand::whole(names["x"])).expect("x is used").tensor;
        let dresidual = tape.gradient(Operand::whole(names["residual"])).expect("the residual is used").tensor;
        let backward = tape.into_ops();
        assert_eq!(dresidual, seed, "a residual has the gradient of the sum");
        assert!(builder.find("codes.gradient").is_none());

        let number = |i: usize, of: usize| ((i * 37 + of * 101) % 23) as f64 / 11.0 - 1.0;
        let mut values = HashMap::default();
        for (of, name) in ["x", "codes", "residual", "a1", "b1", "a2", "b2"].into_iter().enumerate() {
            let elements = builder.set.tensor(names[name]).elements() as usize;
            values.insert(names[name], (0..elements).map(|i| number(i, of)).collect::<Vec<_>>());
        }
        let weights: Vec<f64> = (0..(ROWS * OUT) as usize).map(|i| number(i, 9)).collect();
        let loss = |values: &HashMap<TensorId, Vec<f64>>| {
            let mut interpreter = Interpreter { builder: &builder, values: values.clone() };
            interpreter.run(&ops);
            interpreter.read(Operand::whole(names["out"])).iter().zip(&weights).map(|(y, w)| y * w).sum::<f64>()
        };
        let mut interpreter = Interpreter { builder: &builder, values: values.clone() };
        interpreter.run(&ops);
        interpreter.values.insert(seed, weights.clone());
        interpreter.run(&backward);
        for (name, gradient) in [("x", dx), ("a1", gradients[&names["a1"]]), ("b1", gradients[&names["b1"]])]
            .into_iter()
            .chain(["a2", "b2"].map(|name| (name, gradients[&names[name]])))
        {
            let found = interpreter.read(Operand::whole(gradient));
            for (i, found) in found.into_iter().enumerate() {
                let moved = |by: f64| {
                    let mut values = values.clone();
                    values.get_mut(&names[name]).expect("the tensor has values")[i] += by;
                    loss(&values)
                };
                let difference = (moved(1e-4) - moved(-1e-4)) / 2e-4;
                assert!((found - difference).abs() < 1e-8, "{name}[{i}]: {found}, {difference}");
            }
        }
    }
}
