//! The operands (references to tensors) of each op. Passes use them to replace tensors and to move offsets.

use crate::op::{ExchangeRange, Op, OpKind, Quantized};
use crate::tensor::{Index, Operand, TensorId};
use smallvec::{SmallVec, smallvec};

impl Op {
    /// Returns the same op on other tensors: `rename` maps each tensor to its replacement. Slots and offsets stay.
    #[must_use]
    pub fn rename_tensors(&self, rename: &dyn Fn(TensorId) -> TensorId) -> Op {
        let mut op = self.clone();
        for operand in operands_mut(&mut op.kind) {
            operand.tensor = rename(operand.tensor);
        }
        op
    }

    /// Returns the op as it runs in one iteration of its block, with `variable` as the value of the block's variable:
    /// slots and offsets no longer depend on it.
    #[must_use]
    pub fn iteration(&self, variable: i64) -> Op {
        let mut op = self.clone();
        let fix = |index: &mut Index| *index = Index { base: index.at(variable, 0), scale: 0, ..*index };
        for operand in operands_mut(&mut op.kind) {
            fix(&mut operand.slot);
            fix(&mut operand.offset);
        }
        match &mut op.kind {
            OpKind::InitNormal { first, .. } | OpKind::InitUniform { first, .. } => fix(first),
            OpKind::Dropout { first_sample, layer, .. } => {
                fix(first_sample);
                fix(layer);
            }
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => fix(&mut exchange.sequence),
            _ => {}
        }
        op
    }

    /// Returns whether the op differs between the micro-batches of a step: in its slots, its offsets, its random
    /// numbers, or whether it runs at all.
    pub fn depends_on_micro_batch(&self) -> bool {
        let moved = operands(self).any(|at| at.slot.micro_batch != 0 || at.offset.micro_batch != 0);
        let draws = match &self.kind {
            OpKind::Dropout { first_sample, layer, .. } => first_sample.micro_batch != 0 || layer.micro_batch != 0,
            OpKind::InitNormal { first, .. } | OpKind::InitUniform { first, .. } => first.micro_batch != 0,
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                exchange.last || exchange.sequence.micro_batch != 0
            }
            _ => false,
        };
        moved || draws
    }
}

/// Number of operands for which a list needs no heap allocation. Only collectives may have more operands.
const OPERANDS_MAX: usize = 8;

/// Lists the operands of an [`OpKind`] as shared or mutable references, as `$kind` is borrowed; `$iter` is `iter` or
/// `iter_mut` accordingly.
macro_rules! operand_list {
    ($kind:expr, $iter:ident) => {
        match $kind {
            OpKind::Product { a, b, out, bias, residual, workspace, .. } => {
                let mut list = smallvec![a, b, out, workspace];
                list.extend(bias);
                list.extend(residual);
                list
            }
            OpKind::Embed { tokens, table, out, .. } => smallvec![tokens, table, out],
            OpKind::EmbedGrad { tokens, dout, dtable, workspace, .. } => smallvec![tokens, dout, dtable, workspace],
            OpKind::RmsNorm { x, weight, residual, out, rstd, .. } => {
                let mut list = smallvec![x, weight, out, rstd];
                list.extend(residual);
                list
            }
            OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, .. } => {
                let mut list = smallvec![x, weight, rstd, dout, dx, workspace];
                list.extend(dweight);
                list
            }
            OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, .. } => smallvec![x, q_weight, k_weight, out, rstd],
            OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dweights, workspace, .. } => {
                let mut list = smallvec![x, q_weight, k_weight, rstd, dx, workspace];
                list.extend(dweights.into_iter().flatten());
                list
            }
            OpKind::Rope { qkv, table, positions, .. } => smallvec![qkv, table, positions],
            OpKind::RopeTable { table, .. } => smallvec![table],
            OpKind::Attention { qkv, document_start, out, stats, workspace, .. } => {
                smallvec![qkv, document_start, out, stats, workspace]
            }
            OpKind::AttentionGrad { qkv, out, dout, stats, document_start, dqkv, workspace, .. } => {
                smallvec![qkv, out, dout, stats, document_start, dqkv, workspace]
            }
            OpKind::ShiftPositions { positions, document_start, out, .. } => {
                let mut list = smallvec![positions, out];
                list.extend(document_start);
                list
            }
            OpKind::CachedAttention { qkv, keys, values, places, first_keys, out, workspace, .. } => {
                let mut list = smallvec![qkv, keys, values, places, out, workspace];
                list.extend(first_keys);
                list
            }
            OpKind::AppendCache { qkv, keys, values, places, .. } => smallvec![qkv, keys, values, places],
            OpKind::CopyCache { keys, values, from, to, .. } => smallvec![keys, values, from, to],
            OpKind::Glu { gate_up, out, .. } => smallvec![gate_up, out],
            OpKind::GluGrad { gate_up, dout, dgate_up, .. } => smallvec![gate_up, dout, dgate_up],
            OpKind::SoftCap { x, .. } => smallvec![x],
            OpKind::SoftmaxStats { logits, labels, weights, stats, .. } => smallvec![logits, labels, weights, stats],
            OpKind::CrossEntropy { stats, labels, weights, metrics, correct, log_probabilities, .. } => {
                let mut list = smallvec![stats, labels, weights, metrics];
                list.extend(correct);
                list.extend(log_probabilities);
                list
            }
            OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, .. } => {
                smallvec![logits, labels, weights, stats, scalars]
            }
            OpKind::SumRows { x, into, workspace, .. } => smallvec![x, into, workspace],
            OpKind::PickRow { x, scalars, out, .. } => smallvec![x, scalars, out],
            OpKind::Add { x, into, .. } => smallvec![x, into],
            OpKind::Dropout { x, out, scalars, .. } => smallvec![x, out, scalars],
            OpKind::Fill { into, .. } | OpKind::InitNormal { into, .. } | OpKind::InitUniform { into, .. } => {
                smallvec![into]
            }
            OpKind::Quantize { from: plain, into: quantized, .. }
            | OpKind::Dequantize { into: plain, from: quantized, .. } => match quantized {
                Quantized::Int8 { codes, scales } => smallvec![plain, codes, scales],
                Quantized::Nf4 { codes, scales, groups } => smallvec![plain, codes, scales, groups],
            },
            OpKind::SquaredNorm { x, metrics, workspace, .. } => smallvec![x, metrics, workspace],
            OpKind::ClipFactor { metrics, scalars } => smallvec![metrics, scalars],
            OpKind::AdamW { weight, gradient, first, second, scalars, .. } => {
                smallvec![weight, gradient, first, second, scalars]
            }
            OpKind::AdamW8 { weight, gradient, first, first_scale, second, second_scale, scalars, .. } => {
                smallvec![weight, gradient, first, first_scale, second, second_scale, scalars]
            }
            OpKind::Sgd { weight, gradient, momentum_buffer, scalars, .. } => {
                let mut list = smallvec![weight, gradient, scalars];
                list.extend(momentum_buffer);
                list
            }
            OpKind::Cast { from, to, .. } => smallvec![from, to],
            OpKind::TransferStart { from, to, .. } | OpKind::TransferWait { from, to, .. } => smallvec![from, to],
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                exchange.pieces.$iter().flat_map(|ExchangeRange { input, output, .. }| [input, output]).collect()
            }
        }
    };
}

/// Returns the operands of an op: first the required ones, then the optional ones that are present.
pub(crate) fn operands(op: &Op) -> impl Iterator<Item = Operand> {
    let list: SmallVec<[&Operand; OPERANDS_MAX]> = operand_list!(&op.kind, iter);
    list.into_iter().copied()
}

/// Returns the operands of an op as mutable references, in the order of [`operands`].
pub(crate) fn operands_mut(kind: &mut OpKind) -> SmallVec<[&mut Operand; OPERANDS_MAX]> {
    operand_list!(kind, iter_mut)
}

/// Returns a reference to the element count of an op that can run on any range of its elements: a fill, a cast, a
/// copy, an optimizer update or a squared norm. Returns `None` for all other ops.
pub(crate) fn elements_mut(kind: &mut OpKind) -> Option<&mut u64> {
    match kind {
        OpKind::AdamW { elements, .. }
        | OpKind::AdamW8 { elements, .. }
        | OpKind::Sgd { elements, .. }
        | OpKind::Cast { elements, .. }
        | OpKind::Fill { elements, .. }
        | OpKind::SquaredNorm { elements, .. }
        | OpKind::InitNormal { elements, .. }
        | OpKind::InitUniform { elements, .. }
        | OpKind::TransferStart { elements, .. }
        | OpKind::TransferWait { elements, .. } => Some(elements),
        _ => None,
    }
}
