//! Gated units, caps, dropout, casts, and sums and selections of rows.

use super::{AccessVisitor, Cost, Mode, OpKind, OperandTypes, not_in_family};

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::Glu { gate_up, out, rows, ffn, .. } => {
            visitor.read(*gate_up, rows * 2 * ffn);
            visitor.write(*out, rows * ffn);
        }
        OpKind::GluGrad { gate_up, dout, dgate_up, rows, ffn, .. } => {
            visitor.read(*gate_up, rows * 2 * ffn);
            visitor.read(*dout, rows * ffn);
            visitor.write(*dgate_up, rows * 2 * ffn);
        }
        OpKind::SoftCap { x, elements, .. } => visitor.update(*x, *elements),
        OpKind::SumRows { x, into, workspace, rows, columns } => {
            visitor.read(*x, rows * columns);
            visitor.update(*into, *columns);
            visitor.write_all(*workspace);
        }
        OpKind::PickRow { x, scalars, out, rows, columns } => {
            visitor.read(*x, rows * columns);
            visitor.read_all(*scalars);
            visitor.write(*out, *columns);
        }
        OpKind::Add { x, into, elements } => {
            visitor.read(*x, *elements);
            visitor.update(*into, *elements);
        }
        OpKind::Dropout { x, out, scalars, rows, columns, accumulate, .. } => {
            visitor.read(*x, rows * columns);
            visitor.read_all(*scalars);
            visitor.touch(*out, rows * columns, if *accumulate { Mode::Update } else { Mode::Write });
        }
        OpKind::Cast { from, to, elements } => {
            visitor.read(*from, *elements);
            visitor.write(*to, *elements);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::Glu { rows, ffn, .. } => Cost::other(14.0, [*rows, *ffn]),
        OpKind::GluGrad { rows, ffn, .. } => Cost::other(20.0, [*rows, *ffn]),
        OpKind::SoftCap { elements, .. } => Cost::other(14.0, [*elements]),
        OpKind::SumRows { rows, columns, .. } => Cost::other(1.0, [*rows, *columns]),
        OpKind::Add { elements, .. } => Cost::other(1.0, [*elements]),
        OpKind::Dropout { rows, columns, .. } => Cost::other(20.0, [*rows, *columns]),
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::Glu { gate_up, out, .. } => {
            types.expect(types.activation(gate_up), [gate_up, out]);
        }
        OpKind::GluGrad { gate_up, dout, dgate_up, .. } => {
            types.expect(types.activation(gate_up), [gate_up, dout, dgate_up]);
        }
        OpKind::SoftCap { x, .. } => {
            types.expect(types.activation(x), [x]);
        }
        OpKind::SumRows { x, into, workspace, .. } => {
            let real = types.activation(x);
            types.expect(real, [x]).expect(real.wide(), [into, workspace]);
        }
        OpKind::PickRow { x, scalars, out, .. } => {
            let real = types.activation(x);
            types.expect(real, [x, out]).expect(real.wide(), [scalars]);
        }
        OpKind::Add { x, into, .. } => {
            types.expect(types.activation(x), [x, into]);
        }
        OpKind::Dropout { x, out, scalars, .. } => {
            let real = types.activation(x);
            types.expect(real, [x, out]).expect(real.wide(), [scalars]);
        }
        OpKind::Cast { from, to, .. } => {
            types.expect(types.file(from), [from]);
            types.expect(types.file(to), [to]);
        }
        other => not_in_family(other),
    }
}
