//! Matrix products.

use super::{AccessVisitor, Cost, Mode, OpKind, OperandTypes, not_in_family};

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::Product {
            a,
            b,
            out,
            bias,
            residual,
            workspace,
            m,
            n,
            k,
            a_transposed,
            a_stride,
            out_stride,
            accumulate,
            ..
        } => {
            let (rows, columns) = if *a_transposed { (k, m) } else { (m, k) };
            visitor.read(*a, (rows - 1) * a_stride + columns);
            visitor.read(*b, k * n);
            if let Some(bias) = bias {
                visitor.read(*bias, *n);
            }
            if let Some(residual) = residual {
                visitor.read(*residual, m * n);
            }
            let whole = !accumulate && (out_stride == n || *m == 1);
            visitor.touch(*out, (m - 1) * out_stride + n, if whole { Mode::Write } else { Mode::Update });
            visitor.write_all(*workspace);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::Product { m, n, k, .. } => Cost {
            product_flops: 2.0 * (*m as f64) * (*n as f64) * (*k as f64),
            product_shape: Some((*m, *n, *k)),
            other_flops: 0.0,
        },
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::Product { a, b, out, bias, residual, workspace, .. } => {
            let real = types.activation(a);
            // Weight gradients are sums over tokens and micro-batches, and therefore wide.
            let sum = types.one_of(out, &[real, real.wide()]);
            types.expect(real, [a, b]).expect(sum, [out]).expect(real.wide(), [workspace]);
            types.expect_all(real, bias.iter());
            types.expect_all(sum, residual.iter());
        }
        other => not_in_family(other),
    }
}
