//! Constants and random numbers: initial values of weights and optimizer state.

use super::{AccessVisitor, Cost, OpKind, OperandTypes, not_in_family};
use plimsoll_core::DType;

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::Fill { into, elements, .. }
        | OpKind::InitNormal { into, elements, .. }
        | OpKind::InitUniform { into, elements, .. } => {
            visitor.write(*into, *elements);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::InitUniform { elements, .. } => Cost::other(20.0, [*elements]),
        OpKind::InitNormal { elements, .. } => Cost::other(60.0, [*elements]),
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::Fill { into, .. } => {
            types.expect(types.one_of(into, &[DType::F32, DType::F64, DType::Bf16, DType::U8]), [into]);
        }
        OpKind::InitNormal { into, .. } | OpKind::InitUniform { into, .. } => {
            types.expect(types.summed(into), [into]);
        }
        other => not_in_family(other),
    }
}
