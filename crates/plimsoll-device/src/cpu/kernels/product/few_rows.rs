//! Products with few rows, as one dot product per element. Neither operand is packed.

use super::{FEW_ROWS, Product};
use crate::cpu::kernels::simd::{Real, Vector, get, prefetch, vectorized};
use crate::cpu::pool::{Pool, Shared};

/// Number of rows of b whose dot products are in registers at once.
const COLUMNS: usize = 4;

/// Computes a product with at most [`FEW_ROWS`] rows, as one dot product per element. Reads the right operand once,
/// unpacked.
pub fn few_rows<T: Real, O: Real<Wide = T::Wide>>(pool: &Pool, p: Product<T>, out: &mut [O]) {
    let Product { m, n, k, .. } = p;
    let shared = Shared::new(out);
    // At least 64 Ki multiplications per task.
    pool.split(n, (65536 / (m * k).max(1)).max(COLUMNS), |range, _| {
        for j in range.clone().step_by(COLUMNS) {
            let columns = j..range.end.min(j + COLUMNS);
            let mut sums = [[T::Wide::ZERO; COLUMNS]; FEW_ROWS];
            add_dots(k, p.a, p.a_row, &p.b[j * k..columns.end * k], k, columns.len(), &mut sums[..m]);
            for (i, sums) in sums[..m].iter().enumerate() {
                // SAFETY: columns of one split are disjoint.
                let to = unsafe { shared.part(i * p.out_row + columns.start..i * p.out_row + columns.end) };
                for (column, to) in to.iter_mut().enumerate() {
                    let mut sum = sums[column] * p.scale;
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

vectorized! {
    /// Adds `a[i] · b[j]` to `sums[i][j]` for all rows of a (stride `a_row`) and `columns` (up to [`COLUMNS`]) rows of b
    /// (stride `b_row`), all of length k.
    fn add_dots<T, V>(k: usize, a: &[T], a_row: usize, b: &[T], b_row: usize, columns: usize, sums: &mut [[T::Wide; COLUMNS]]) {
        // With two rows of a, eight sums and six operands fit into the 16 registers of AVX2.
        for (pair, sums) in sums.chunks_mut(2).enumerate() {
            let a = &a[2 * pair * a_row..];
            match sums.len() {
                1 => tile::<T, V, 1>(k, a, a_row, b, b_row, columns, sums),
                _ => tile::<T, V, 2>(k, a, a_row, b, b_row, columns, sums),
            }
        }
    }
}

vectorized! {
    /// Adds to each element of `sums` the dot product of a and the row of b (stride `b_row`) of the same number.
    pub fn add_row_dots<T, V>(a: &[T], b: &[T], b_row: usize, sums: &mut [T::Wide]) {
        for (number, four) in sums.chunks_mut(COLUMNS).enumerate() {
            let mut totals = [[T::Wide::ZERO; COLUMNS]];
            tile::<T, V, 1>(a.len(), a, 0, &b[number * COLUMNS * b_row..], b_row, four.len(), &mut totals);
            for (sum, total) in four.iter_mut().zip(totals[0]) {
                *sum += total;
            }
        }
    }
}

/// Adds `a[i] · b[j]` to `sums[i][j]` for M rows of a (stride `a_row`) and `columns` (up to [`COLUMNS`]) rows of b (stride
/// `b_row`), all of length k.
#[inline(always)]
fn tile<T: Real, V: Vector<T::Wide>, const M: usize>(
    k: usize,
    a: &[T],
    a_row: usize,
    b: &[T],
    b_row: usize,
    columns: usize,
    sums: &mut [[T::Wide; COLUMNS]],
) {
    assert!(a.len() >= (M - 1) * a_row + k && b.len() >= (columns - 1) * b_row + k);
    let mut totals = [[V::splat(T::Wide::ZERO); COLUMNS]; M];
    let mut at = 0;
    while columns == COLUMNS && at + V::LANES <= k {
        let mut left = [totals[0][0]; M];
        for i in 0..M {
            // SAFETY: inside a by the assertion.
            left[i] = unsafe { T::load(a.as_ptr().add(i * a_row + at)) };
        }
        for j in 0..COLUMNS {
            let from = b.as_ptr().wrapping_add(j * b_row + at);
            // The rows that follow are read next; the hardware does not prefetch across pages.
            prefetch(from.wrapping_add(COLUMNS * b_row));
            // SAFETY: inside b by the assertion.
            let right: V = unsafe { T::load(from) };
            for i in 0..M {
                totals[i][j] = left[i].mul_add(right, totals[i][j]);
            }
        }
        at += V::LANES;
    }
    for j in 0..columns {
        for at in (at..k).step_by(V::LANES) {
            let count = V::LANES.min(k - at);
            let right = get::<T, V>(b, j * b_row + at, count);
            for i in 0..M {
                totals[i][j] = get::<T, V>(a, i * a_row + at, count).mul_add(right, totals[i][j]);
            }
        }
        for i in 0..M {
            sums[i][j] += totals[i][j].sum();
        }
    }
}
