//! Which types the operands of each op have. A is the type of activations and of the weights that are
//! computed with (f64, f32 or bf16), W = [`DType::wide`] of it: sums, statistics, gradients of weights,
//! master weights, state and scratch. The kernels of both targets rely on exactly this.

use crate::op::{Collective, OpKind, Quantised};
use crate::tensor::Operand;
use plimsoll_core::DType;

/// Pairs an op's operands with the types that they must have.
struct Types<'k> {
    expected: Vec<(&'k Operand, DType)>,
}

impl<'k> Types<'k> {
    fn are<const N: usize>(&mut self, dtype: DType, operands: [&'k Operand; N]) -> &mut Self {
        self.expected.extend(operands.map(|operand| (operand, dtype)));
        self
    }

    fn quantised(&mut self, matrix: &'k Quantised) -> &mut Self {
        match matrix {
            Quantised::Int8 { codes, scales } => self.are(DType::U8, [codes]).are(DType::F32, [scales]),
            Quantised::Nf4 { codes, scales, groups } => self.are(DType::U8, [codes, scales]).are(DType::F32, [groups]),
        }
    }
}

/// The first operand of an op whose type is wrong, and the type that it must have.
pub(super) fn mistyped(kind: &OpKind, dtype_of: &dyn Fn(&Operand) -> DType) -> Option<(Operand, DType)> {
    use DType::{Bf16, F16, F32, F64, I32, U8};
    // What decides the others' types; where it is none of these itself, it is what is wrong.
    let of = |operand: &Operand, choices: &[DType]| {
        let found = dtype_of(operand);
        if choices.contains(&found) { found } else { choices[0] }
    };
    let activation = |operand: &Operand| of(operand, &[F32, F64, Bf16]);
    let summed = |operand: &Operand| of(operand, &[F32, F64]);
    let file = |operand: &Operand| of(operand, &[F32, F64, Bf16, F16]);
    let mut types = Types { expected: Vec::with_capacity(10) };
    match kind {
        OpKind::Product { a, b, out, bias, residual, workspace, .. } => {
            let real = activation(a);
            // Gradients of weights are sums over tokens and micro-batches: wide, from products of A.
            let sum = of(out, &[real, real.wide()]);
            types.are(real, [a, b]).are(sum, [out]).are(real.wide(), [workspace]);
            types.expected.extend(bias.iter().map(|bias| (bias, real)));
            types.expected.extend(residual.iter().map(|residual| (residual, sum)));
        }
        OpKind::Embed { tokens, table, out, .. } => {
            types.are(activation(out), [table, out]).are(I32, [tokens]);
        }
        OpKind::EmbedGrad { tokens, dout, dtable, workspace, .. } => {
            let real = activation(dout);
            types.are(real, [dout]).are(real.wide(), [dtable, workspace]).are(I32, [tokens]);
        }
        OpKind::RmsNorm { x, weight, out, rstd, .. } => {
            let real = activation(x);
            types.are(real, [x, weight, out]).are(real.wide(), [rstd]);
        }
        OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, .. } => {
            let real = activation(x);
            types.are(real, [x, weight, dout, dx]).are(real.wide(), [rstd, workspace]);
            types.expected.extend(dweight.iter().map(|dweight| (dweight, real.wide())));
        }
        OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, .. } => {
            let real = activation(x);
            types.are(real, [x, q_weight, k_weight, out]).are(real.wide(), [rstd]);
        }
        OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dweights, workspace, .. } => {
            let real = activation(x);
            types.are(real, [x, q_weight, k_weight, dx]).are(real.wide(), [rstd, workspace]);
            types.expected.extend(dweights.iter().flatten().map(|dweight| (dweight, real.wide())));
        }
        OpKind::Rope { qkv, table, positions, .. } => {
            let real = activation(qkv);
            types.are(real, [qkv]).are(real.wide(), [table]).are(I32, [positions]);
        }
        OpKind::RopeTable { table, .. } => {
            types.are(summed(table), [table]);
        }
        OpKind::Attention { qkv, document_start, out, stats, workspace, .. } => {
            let real = activation(qkv);
            types.are(real, [qkv, out]).are(real.wide(), [stats, workspace]).are(I32, [document_start]);
        }
        OpKind::AttentionGrad { qkv, out, dout, stats, document_start, dqkv, workspace, .. } => {
            let real = activation(qkv);
            types.are(real, [qkv, out, dout, dqkv]).are(real.wide(), [stats, workspace]).are(I32, [document_start]);
        }
        OpKind::CachedAttention { qkv, keys, values, scalars, out, workspace, .. } => {
            let real = activation(qkv);
            types.are(real, [qkv, keys, values, out]).are(real.wide(), [scalars, workspace]);
        }
        OpKind::AppendCache { qkv, keys, values, scalars, .. } => {
            let real = activation(qkv);
            types.are(real, [qkv, keys, values]).are(real.wide(), [scalars]);
        }
        OpKind::SwiGlu { gate_up, out, .. } => {
            types.are(activation(gate_up), [gate_up, out]);
        }
        OpKind::SwiGluGrad { gate_up, dout, dgate_up, .. } => {
            types.are(activation(gate_up), [gate_up, dout, dgate_up]);
        }
        OpKind::SoftmaxStats { logits, labels, weights, stats, .. } => {
            let real = activation(logits);
            types.are(real, [logits]).are(real.wide(), [weights, stats]).are(I32, [labels]);
        }
        OpKind::CrossEntropy { stats, labels, weights, metrics, correct, .. } => {
            types.are(summed(stats), [stats, weights]).are(I32, [labels]).are(F64, [metrics]);
            types.expected.extend(correct.iter().map(|correct| (correct, I32)));
        }
        OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, .. } => {
            let real = activation(logits);
            types.are(real, [logits]).are(real.wide(), [weights, stats, scalars]).are(I32, [labels]);
        }
        OpKind::SumRows { x, into, workspace, .. } => {
            let real = activation(x);
            types.are(real, [x]).are(real.wide(), [into, workspace]);
        }
        OpKind::PickRow { x, scalars, out, .. } => {
            let real = activation(x);
            types.are(real, [x, out]).are(real.wide(), [scalars]);
        }
        OpKind::Add { x, into, .. } => {
            types.are(activation(x), [x, into]);
        }
        OpKind::Dropout { x, out, scalars, .. } => {
            let real = activation(x);
            types.are(real, [x, out]).are(real.wide(), [scalars]);
        }
        OpKind::Fill { into, .. } => {
            types.are(of(into, &[F32, F64, Bf16, U8]), [into]);
        }
        OpKind::Quantise { from, into, .. } => {
            types.are(summed(from), [from]).quantised(into);
        }
        OpKind::Dequantise { from, into, .. } => {
            types.are(activation(into), [into]).quantised(from);
        }
        OpKind::SquaredNorm { x, metrics, workspace, .. } => {
            types.are(summed(x), [x, workspace]).are(F64, [metrics]);
        }
        OpKind::ClipFactor { metrics, scalars } => {
            types.are(summed(scalars), [scalars]).are(F64, [metrics]);
        }
        OpKind::AdamW { weight, gradient, first, second, scalars, .. } => {
            types.are(summed(weight), [weight, gradient, first, second, scalars]);
        }
        OpKind::AdamW8 { weight, gradient, first, first_scale, second, second_scale, scalars, .. } => {
            types.are(summed(weight), [weight, gradient, scalars]);
            types.are(U8, [first, second]).are(F32, [first_scale, second_scale]);
        }
        OpKind::Sgd { weight, gradient, momentum_buffer, scalars, .. } => {
            let sum = summed(weight);
            types.are(sum, [weight, gradient, scalars]);
            types.expected.extend(momentum_buffer.iter().map(|buffer| (buffer, sum)));
        }
        OpKind::Cast { from, to, .. } => {
            types.are(file(from), [from]).are(file(to), [to]);
        }
        OpKind::InitNormal { into, .. } | OpKind::InitUniform { into, .. } => {
            types.are(summed(into), [into]);
        }
        // Bytes are moved as they are.
        OpKind::TransferStart { from, to, .. } | OpKind::TransferWait { from, to, .. } => {
            types.are(dtype_of(from), [to]);
        }
        OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
            for piece in &exchange.pieces {
                let sums = matches!(exchange.collective, Collective::AllReduce | Collective::ReduceScatter);
                let real = if sums { summed(&piece.input) } else { dtype_of(&piece.input) };
                types.are(real, [&piece.input, &piece.output]);
            }
        }
    }
    let wrong = types.expected.into_iter().find(|(operand, dtype)| dtype_of(operand) != *dtype);
    wrong.map(|(operand, dtype)| (*operand, dtype))
}
