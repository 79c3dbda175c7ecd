//! Copies between memory spaces.

use super::{AccessVisitor, OpKind, OperandTypes, not_in_family};

/// Visits the operand ranges that the op touches.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::TransferStart { from, to, elements, .. } | OpKind::TransferWait { from, to, elements, .. } => {
            visitor.read(*from, *elements);
            visitor.write(*to, *elements);
        }
        other => not_in_family(other),
    }
}

/// Adds the dtypes that the operands must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        // A copy keeps the type.
        OpKind::TransferStart { from, to, .. } | OpKind::TransferWait { from, to, .. } => {
            types.expect(types.found(from), [to]);
        }
        other => not_in_family(other),
    }
}
