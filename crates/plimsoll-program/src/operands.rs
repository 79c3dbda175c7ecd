//! Every operand of an op, to be renamed by passes.

use crate::op::{Op, OpKind};
use crate::tensor::{Operand, TensorId};

impl Op {
    /// The same op on other tensors.
    #[must_use]
    pub fn with_tensors(&self, rename: &dyn Fn(TensorId) -> TensorId) -> Op {
        let mut op = self.clone();
        for operand in operands_mut(&mut op.kind) {
            operand.tensor = rename(operand.tensor);
        }
        op
    }
}

/// The operands of an op, to be changed in place.
pub(crate) fn operands_mut(kind: &mut OpKind) -> Vec<&mut Operand> {
    match kind {
        OpKind::Product { a, b, out, bias, residual, workspace, .. } => {
            let mut list = vec![a, b, out, workspace];
            list.extend(bias.as_mut());
            list.extend(residual.as_mut());
            list
        }
        OpKind::Embed { tokens, table, out, .. } => vec![tokens, table, out],
        OpKind::EmbedGrad { tokens, dout, dtable, .. } => vec![tokens, dout, dtable],
        OpKind::RmsNorm { x, weight, out, rstd, .. } => vec![x, weight, out, rstd],
        OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, .. } => {
            vec![x, weight, rstd, dout, dx, dweight, workspace]
        }
        OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, .. } => vec![x, q_weight, k_weight, out, rstd],
        OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dq_weight, dk_weight, workspace, .. } => {
            vec![x, q_weight, k_weight, rstd, dx, dq_weight, dk_weight, workspace]
        }
        OpKind::Rope { qkv, table, positions, .. } => vec![qkv, table, positions],
        OpKind::RopeTable { table, .. } => vec![table],
        OpKind::Attention { qkv, document_start, out, stats, workspace, .. } => {
            vec![qkv, document_start, out, stats, workspace]
        }
        OpKind::AttentionGrad { qkv, out, dout, stats, document_start, dqkv, workspace, .. } => {
            vec![qkv, out, dout, stats, document_start, dqkv, workspace]
        }
        OpKind::CachedAttention { qkv, keys, values, scalars, out, workspace, .. } => {
            vec![qkv, keys, values, scalars, out, workspace]
        }
        OpKind::AppendCache { qkv, keys, values, scalars, .. } => vec![qkv, keys, values, scalars],
        OpKind::SwiGlu { gate_up, out, .. } => vec![gate_up, out],
        OpKind::SwiGluGrad { gate_up, dout, dgate_up, .. } => vec![gate_up, dout, dgate_up],
        OpKind::CrossEntropy { logits, labels, weights, scalars, metrics, correct, workspace, .. } => {
            let mut list = vec![logits, labels, weights, scalars, metrics, workspace];
            list.extend(correct.as_mut());
            list
        }
        OpKind::SumRows { x, into, workspace, .. } => vec![x, into, workspace],
        OpKind::PickRow { x, scalars, out, .. } => vec![x, scalars, out],
        OpKind::Add { x, into, .. } => vec![x, into],
        OpKind::Fill { into, .. } | OpKind::InitNormal { into, .. } => vec![into],
        OpKind::SquaredNorm { x, metrics, workspace, .. } => vec![x, metrics, workspace],
        OpKind::ClipFactor { metrics, scalars } => vec![metrics, scalars],
        OpKind::AdamW { weight, gradient, first, second, scalars, .. } => {
            vec![weight, gradient, first, second, scalars]
        }
        OpKind::Sgd { weight, gradient, momentum_buffer, scalars, .. } => {
            let mut list = vec![weight, gradient, scalars];
            list.extend(momentum_buffer.as_mut());
            list
        }
        OpKind::Cast { from, to, .. } => vec![from, to],
        OpKind::TransferStart { from, to, .. } | OpKind::TransferWait { from, to, .. } => vec![from, to],
        OpKind::CollectiveStart { input, output, .. } | OpKind::CollectiveWait { input, output, .. } => {
            vec![input, output]
        }
    }
}
