//! RMS norms of rows and of attention heads, with their gradients.

use super::{AccessVisitor, Cost, Mode, OpKind, OperandTypes, not_in_family};

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::RmsNorm { x, weight, residual, out, rstd, rows, dim, .. } => {
            visitor.read(*x, rows * dim);
            visitor.read(*weight, *dim);
            if let Some(residual) = residual {
                visitor.read(*residual, rows * dim);
            }
            visitor.write(*out, rows * dim);
            visitor.write(*rstd, *rows);
        }
        OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, rows, dim, accumulate, .. } => {
            visitor.read(*x, rows * dim);
            visitor.read(*weight, *dim);
            visitor.read(*rstd, *rows);
            visitor.read(*dout, rows * dim);
            visitor.touch(*dx, rows * dim, if *accumulate { Mode::Update } else { Mode::Write });
            if let Some(dweight) = dweight {
                visitor.update(*dweight, *dim);
            }
            visitor.write_all(*workspace);
        }
        OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, norm, .. } => {
            let [queries, keys] = shape.norm_widths(*norm);
            visitor.read(*x, rows * shape.columns());
            visitor.read(*q_weight, queries);
            visitor.read(*k_weight, keys);
            visitor.write(*out, rows * shape.columns());
            visitor.write(*rstd, rows * shape.norm_count(*norm));
        }
        OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dweights, workspace, rows, shape, norm, .. } => {
            let widths = shape.norm_widths(*norm);
            visitor.read(*x, rows * shape.columns());
            visitor.read(*q_weight, widths[0]);
            visitor.read(*k_weight, widths[1]);
            visitor.read(*rstd, rows * shape.norm_count(*norm));
            visitor.update(*dx, rows * shape.columns());
            for (dweight, width) in dweights.iter().flatten().zip(widths) {
                visitor.update(*dweight, width);
            }
            visitor.write_all(*workspace);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::RmsNorm { rows, dim, .. } => Cost::other(4.0, [*rows, *dim]),
        OpKind::RmsNormGrad { rows, dim, .. } => Cost::other(9.0, [*rows, *dim]),
        OpKind::HeadNorm { rows, shape, .. } => Cost::other(4.0, [*rows, shape.columns()]),
        OpKind::HeadNormGrad { rows, shape, .. } => Cost::other(9.0, [*rows, shape.columns()]),
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::RmsNorm { x, weight, residual, out, rstd, .. } => {
            let real = types.activation(x);
            types.expect(real, [x, weight, out]).expect(real.wide(), [rstd]);
            types.expect_all(real, residual.iter());
        }
        OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, .. } => {
            let real = types.activation(x);
            types.expect(real, [x, weight, dout, dx]).expect(real.wide(), [rstd, workspace]);
            types.expect_all(real.wide(), dweight.iter());
        }
        OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, .. } => {
            let real = types.activation(x);
            types.expect(real, [x, q_weight, k_weight, out]).expect(real.wide(), [rstd]);
        }
        OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dweights, workspace, .. } => {
            let real = types.activation(x);
            types.expect(real, [x, q_weight, k_weight, dx]).expect(real.wide(), [rstd, workspace]);
            types.expect_all(real.wide(), dweights.iter().flatten());
        }
        other => not_in_family(other),
    }
}
