//! Copies between memory spaces.

use super::{AccessVisitor, OpKind, OperandTypes, not_in_family};

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::TransferStart { from, to, elements, .. } | OpKind::TransferWait { from, to, elements, .. } => {
            visitor.read(*from, *elements);
            visitor.write(*to, *elements);
        }
        other => not_in_family(other),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        // A copy keeps the type.
        OpKind::TransferStart { from, to, .. } | OpKind::TransferWait { from, to, .. } => {
            types.expect(types.found(from), [to]);
        }
        other => not_in_family(other),
    }
}
