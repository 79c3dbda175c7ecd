//! Products with few rows, as one dot product per element. Neither operand is packed.

use super::{FEW_ROWS, Product};
use crate::cpu::kernels::simd::{Real, Vector, get, strips, vectorized};
use crate::cpu::pool::{Pool, Shared};

/// Computes a product with at most [`FEW_ROWS`] rows, as one dot product per element. Reads the right operand once,
/// unpacked.
pub fn few_rows<T: Real, O: Real<Wide = T::Wide>>(pool: &Pool, p: Product<T>, out: &mut [O]) {
    let Product { m, n, k, .. } = p;
    let shared = Shared::new(out);
    // At least 64 Ki multiplications per task.
    pool.split(n, (65536 / (m * k).max(1)).max(4), |range, _| {
        for j in range.clone().step_by(4) {
            let rows = j..range.end.min(j + 4);
            let mut sums = [[T::Wide::ZERO; 4]; FEW_ROWS];
            let b = &p.b[j * k..rows.end * k];
            match m {
                1 => dots_1(k, p.a, p.a_row, b, k, rows.len(), &mut sums),
                2 => dots_2(k, p.a, p.a_row, b, k, rows.len(), &mut sums),
                3 => dots_3(k, p.a, p.a_row, b, k, rows.len(), &mut sums),
                _ => dots_4(k, p.a, p.a_row, b, k, rows.len(), &mut sums),
            }
            for i in 0..m {
                // SAFETY: columns of one split are disjoint.
                let to = unsafe { shared.part(i * p.out_row + rows.start..i * p.out_row + rows.end) };
                for (column, to) in to.iter_mut().enumerate() {
                    let mut sum = sums[i][column] * p.scale;
                    if let Some(bias) = p.bias {
                        sum += bias[j + column].widen();
                    }
                    if let Some(residual) = p.residual {
                        sum += residual[i * n + j + column].widen();
                    }
                    *to = O::narrow(if p.accumulate { to.widen() + sum } else { sum });
                }
            }
        }
    });
}

macro_rules! dots {
    ($name:ident, $M:literal) => {
        vectorized! {
            /// Calls `dot_tile` for a number of rows of a that is fixed at compile time; `rows` counts rows of b.
            pub fn $name<T, V>(k: usize, a: &[T], a_row: usize, b: &[T], b_row: usize, rows: usize, sums: &mut [[T::Wide; 4]; FEW_ROWS]) {
                dot_tile::<T, V, $M>(k, a, a_row, b, b_row, rows, sums)
            }
        }
    };
}
dots!(dots_1, 1);
dots!(dots_2, 2);
dots!(dots_3, 3);
dots!(dots_4, 4);

/// Computes `sums[i][j] = a[i] · b[j]` for M rows of a (stride `a_row`) and `rows` (up to 4) rows of b (stride
/// `b_row`), all of length k.
#[inline(always)]
fn dot_tile<T: Real, V: Vector<T::Wide>, const M: usize>(
    k: usize,
    a: &[T],
    a_row: usize,
    b: &[T],
    b_row: usize,
    rows: usize,
    sums: &mut [[T::Wide; 4]; FEW_ROWS],
) {
    let zero = V::splat(T::Wide::ZERO);
    let mut totals = [[zero; 4]; M];
    if rows == 4 {
        strips::<T, V>(
            k,
            #[inline(always)]
            |at, count| {
                let mut right: [V; 4] = [zero; 4];
                for j in 0..4 {
                    right[j] = get::<T, V>(b, j * b_row + at, count);
                }
                for i in 0..M {
                    let left = get::<T, V>(a, i * a_row + at, count);
                    for j in 0..4 {
                        totals[i][j] = left.mul_add(right[j], totals[i][j]);
                    }
                }
            },
        );
    } else {
        for j in 0..rows {
            strips::<T, V>(
                k,
                #[inline(always)]
                |at, count| {
                    let right = get::<T, V>(b, j * b_row + at, count);
                    for i in 0..M {
                        totals[i][j] = get::<T, V>(a, i * a_row + at, count).mul_add(right, totals[i][j]);
                    }
                },
            );
        }
    }
    for i in 0..M {
        for j in 0..rows {
            sums[i][j] = totals[i][j].sum();
        }
    }
}
