//! Lookup of token embeddings, and its gradient.

use super::{AccessVisitor, Cost, OpKind, OperandTypes, not_in_family};
use plimsoll_core::DType;

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::Embed { tokens, table, out, rows, hidden, vocab, .. } => {
            visitor.read(*tokens, *rows);
            visitor.read(*table, vocab * hidden);
            visitor.write(*out, rows * hidden);
        }
        OpKind::EmbedGrad { tokens, dout, dtable, workspace, rows, hidden, vocab, .. } => {
            visitor.read(*tokens, *rows);
            visitor.read(*dout, rows * hidden);
            visitor.update(*dtable, vocab * hidden);
            visitor.write_all(*workspace);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::EmbedGrad { rows, hidden, .. } => Cost::other(1.0, [*rows, *hidden]),
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::Embed { tokens, table, out, .. } => {
            types.expect(types.activation(out), [table, out]).expect(DType::I32, [tokens]);
        }
        OpKind::EmbedGrad { tokens, dout, dtable, workspace, .. } => {
            let real = types.activation(dout);
            types.expect(real, [dout]).expect(real.wide(), [dtable, workspace]).expect(DType::I32, [tokens]);
        }
        other => not_in_family(other),
    }
}
