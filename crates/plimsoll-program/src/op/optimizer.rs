//! Gradient norm, clipping, and the optimizer updates.

use super::{AccessVisitor, Cost, OpKind, OperandTypes, not_in_family};
use crate::formats::STATE_BLOCK;
use plimsoll_core::DType;

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::SquaredNorm { x, metrics, workspace, elements } => {
            visitor.read(*x, *elements);
            visitor.update_all(*metrics);
            visitor.write_all(*workspace);
        }
        OpKind::ClipFactor { metrics, scalars } => {
            visitor.read_all(*metrics);
            visitor.update_all(*scalars);
        }
        OpKind::AdamW { weight, gradient, first, second, scalars, elements, .. } => {
            visitor.read(*gradient, *elements);
            visitor.read_all(*scalars);
            visitor.update(*first, *elements);
            visitor.update(*second, *elements);
            visitor.update(*weight, *elements);
        }
        OpKind::AdamW8 { weight, gradient, first, first_scale, second, second_scale, scalars, elements, .. } => {
            let blocks = elements.div_ceil(STATE_BLOCK);
            visitor.read(*gradient, *elements);
            visitor.read_all(*scalars);
            visitor.update(*first, *elements);
            visitor.update(*first_scale, blocks);
            visitor.update(*second, *elements);
            visitor.update(*second_scale, blocks);
            visitor.update(*weight, *elements);
        }
        OpKind::Sgd { weight, gradient, momentum_buffer, scalars, elements, .. } => {
            visitor.read(*gradient, *elements);
            visitor.read_all(*scalars);
            if let Some(buffer) = momentum_buffer {
                visitor.update(*buffer, *elements);
            }
            visitor.update(*weight, *elements);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::SquaredNorm { elements, .. } => Cost::other(2.0, [*elements]),
        OpKind::AdamW { elements, .. } => Cost::other(14.0, [*elements]),
        OpKind::AdamW8 { elements, .. } => Cost::other(40.0, [*elements]),
        OpKind::Sgd { elements, .. } => Cost::other(5.0, [*elements]),
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::SquaredNorm { x, metrics, workspace, .. } => {
            types.expect(types.summed(x), [x, workspace]).expect(DType::F64, [metrics]);
        }
        OpKind::ClipFactor { metrics, scalars } => {
            types.expect(types.summed(scalars), [scalars]).expect(DType::F64, [metrics]);
        }
        OpKind::AdamW { weight, gradient, first, second, scalars, .. } => {
            types.expect(types.summed(weight), [weight, gradient, first, second, scalars]);
        }
        OpKind::AdamW8 { weight, gradient, first, first_scale, second, second_scale, scalars, .. } => {
            types.expect(types.summed(weight), [weight, gradient, scalars]);
            types.expect(DType::U8, [first, second]).expect(DType::F32, [first_scale, second_scale]);
        }
        OpKind::Sgd { weight, gradient, momentum_buffer, scalars, .. } => {
            let sum = types.summed(weight);
            types.expect(sum, [weight, gradient, scalars]);
            types.expect_all(sum, momentum_buffer.iter());
        }
        other => not_in_family(other),
    }
}
