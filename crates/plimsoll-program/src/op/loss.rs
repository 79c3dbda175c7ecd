//! Cross entropy over blocks of the vocabulary, and its gradient.

use super::{AccessVisitor, Cost, Mode, OpKind, OperandTypes, not_in_family};
use plimsoll_core::DType;

/// Number of statistics that the loss keeps per row (token) while it processes the vocabulary block by block;
/// [`OpKind::SoftmaxStats`] lists them.
pub const SOFTMAX_STATS: u64 = 4;

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::SoftmaxStats { logits, labels, weights, stats, rows, columns, begin, .. } => {
            visitor.read(*logits, rows * columns);
            visitor.read(*labels, *rows);
            visitor.read(*weights, *rows);
            visitor.touch(*stats, rows * SOFTMAX_STATS, if *begin { Mode::Write } else { Mode::Update });
        }
        OpKind::CrossEntropy { stats, labels, weights, metrics, correct, log_probabilities, rows } => {
            visitor.read(*stats, rows * SOFTMAX_STATS);
            visitor.read(*labels, *rows);
            visitor.read(*weights, *rows);
            visitor.update_all(*metrics);
            correct.iter().chain(log_probabilities).for_each(|output| visitor.write(*output, *rows));
        }
        OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, rows, columns, .. } => {
            visitor.update(*logits, rows * columns);
            visitor.read(*labels, *rows);
            visitor.read(*weights, *rows);
            visitor.read(*stats, rows * SOFTMAX_STATS);
            visitor.read_all(*scalars);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::SoftmaxStats { rows, columns, .. } => Cost::other(12.0, [*rows, *columns]),
        OpKind::CrossEntropy { rows, .. } => Cost::other(12.0, [*rows]),
        OpKind::SoftmaxGrad { rows, columns, .. } => Cost::other(14.0, [*rows, *columns]),
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::SoftmaxStats { logits, labels, weights, stats, .. } => {
            let real = types.activation(logits);
            types.expect(real, [logits]).expect(real.wide(), [weights, stats]).expect(DType::I32, [labels]);
        }
        OpKind::CrossEntropy { stats, labels, weights, metrics, correct, log_probabilities, .. } => {
            let wide = types.summed(stats);
            types.expect(wide, [stats, weights]).expect(DType::I32, [labels]).expect(DType::F64, [metrics]);
            types.expect_all(DType::I32, correct.iter()).expect_all(wide, log_probabilities.iter());
        }
        OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, .. } => {
            let real = types.activation(logits);
            types.expect(real, [logits]).expect(real.wide(), [weights, stats, scalars]).expect(DType::I32, [labels]);
        }
        other => not_in_family(other),
    }
}
