//! Transposition of matrices in square blocks of vectors.

use super::{Float, MAX_LANES, Vector, prefetch, vectorized};

vectorized! {
    /// Writes `factor` times the transpose of the `rows` × `columns` matrix `from` to `to`. Rows start `from_row`
    /// elements apart in `from`, and `to_row` elements apart in `to`.
    pub fn transpose<T: Float, V>(from: &[T], from_row: usize, rows: usize, columns: usize, factor: T, to: &mut [T], to_row: usize) {
        let scale = V::splat(factor.widen());
        transpose_blocks::<T, V>(from, from_row, rows, columns, to, to_row, #[inline(always)] |block| block * scale, #[inline(always)] |x| x * factor);
    }
}

vectorized! {
    /// Writes the transpose of the `rows` × `columns` matrix `from` to `to`, with the bits of all elements unchanged.
    /// Rows start `from_row` elements apart in `from`, and `to_row` elements apart in `to`.
    pub fn transpose_bits<T: Float, V>(from: &[T], from_row: usize, rows: usize, columns: usize, to: &mut [T], to_row: usize) {
        transpose_blocks::<T, V>(from, from_row, rows, columns, to, to_row, #[inline(always)] |block| block, #[inline(always)] |x| x);
    }
}

#[inline(always)]
fn transpose_blocks<T: Float, V: Vector<T::Wide>>(
    from: &[T],
    from_row: usize,
    rows: usize,
    columns: usize,
    to: &mut [T],
    to_row: usize,
    adjust: impl Fn(V) -> V,
    adjust_one: impl Fn(T) -> T,
) {
    if rows == 0 || columns == 0 {
        return;
    }
    assert!(from.len() >= (rows - 1) * from_row + columns && to.len() >= (columns - 1) * to_row + rows);
    let full_blocks = (rows - rows % V::LANES, columns - columns % V::LANES);
    for i in (0..full_blocks.0).step_by(V::LANES) {
        for j in (0..full_blocks.1).step_by(V::LANES) {
            let mut block = [V::splat(T::Wide::ZERO); MAX_LANES];
            for r in 0..V::LANES {
                prefetch(from.as_ptr().wrapping_add((i + r + V::LANES) * from_row + j));
                // SAFETY: row i + r, columns j.. are inside `from`, as asserted.
                block[r] = adjust(unsafe { T::load(from.as_ptr().add((i + r) * from_row + j)) });
            }
            let mut bit = 1;
            while bit < V::LANES {
                for r in 0..V::LANES {
                    if r & bit == 0 {
                        (block[r], block[r | bit]) = block[r].swap_lanes(block[r | bit], bit);
                    }
                }
                bit *= 2;
            }
            for r in 0..V::LANES {
                // SAFETY: row j + r, columns i.. are inside `to`, as asserted.
                unsafe { T::store(block[r], to.as_mut_ptr().add((j + r) * to_row + i)) };
            }
        }
    }
    for i in 0..rows {
        let first = if i < full_blocks.0 { full_blocks.1 } else { 0 };
        for j in first..columns {
            to[j * to_row + i] = adjust_one(from[i * from_row + j]);
        }
    }
}
