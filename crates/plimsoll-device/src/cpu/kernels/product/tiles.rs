//! Register tiles of f32 and f64 products, and the unpacked product on one thread that consists of them.

use super::GROUP_ROWS;
use crate::cpu::kernels::simd::{Float, Real, Vector, prefetch, vectorized};
use std::ops::Range;

/// The left operand as tiles read it: groups of GROUP_ROWS rows, `group` elements apart. Inside a group, element (i, p)
/// lies at `i * row + p * column`. One of `row` and `column` is 1.
#[derive(Clone, Copy)]
pub struct Left<T> {
    /// Address of element (0, 0).
    pub at: *const T,
    /// Number of elements from one group of rows to the next.
    pub group: usize,
    /// Number of elements from one row of a group to the next.
    pub row: usize,
    /// Number of elements from one column to the next.
    pub column: usize,
}

impl<T> Left<T> {
    /// Returns a matrix with contiguous rows of stride `row`.
    pub fn rows(at: *const T, row: usize) -> Self {
        Left { at, group: GROUP_ROWS * row, row, column: 1 }
    }

    /// Returns a matrix stored transposed: element (i, p) lies at `i + p * column`.
    pub fn columns(at: *const T, column: usize) -> Self {
        Left { at, group: GROUP_ROWS, row: 1, column }
    }

    /// Returns packed groups of GROUP_ROWS rows, each group one contiguous [depth, GROUP_ROWS].
    pub fn packed(at: *const T, depth: usize) -> Self {
        Left { at, group: GROUP_ROWS * depth, row: 1, column: GROUP_ROWS }
    }
}

/// The range of k that contributes to row i of a product. Elements of row i of the left operand outside it are taken as
/// zero.
#[derive(Clone, Copy)]
pub enum Depth {
    /// All of k.
    Whole,
    /// The range from 0 to i + this number, inclusive.
    To(usize),
    /// The range from i − this number, or 0 if that is negative, to the end.
    From(usize),
}

impl Depth {
    /// Returns the smallest range of k that contains the ranges of rows `i..i + rows`.
    fn range(self, i: usize, rows: usize, k: usize) -> Range<usize> {
        match self {
            Depth::Whole => 0..k,
            Depth::To(shift) => 0..k.min(i + rows + shift),
            Depth::From(shift) => k.min(i.saturating_sub(shift))..k,
        }
    }
}

/// The memory that a product is written to, and the terms added to it. Null pointers add nothing.
#[derive(Clone, Copy)]
pub struct Target<T, O = T> {
    /// Address of the first element.
    pub at: *mut O,
    /// Row stride of the target and of the residual, in elements.
    pub row: usize,
    /// Whether to add to the previous contents.
    pub accumulate: bool,
    /// Address of the bias of the first column; null if there is none.
    pub bias: *const T,
    /// Address of the first element of the residual; null if there is none.
    pub residual: *const T,
    /// Factor of the product, before other terms are added.
    pub scale: f64,
}

impl<T, O> Target<T, O> {
    /// Returns a target without bias and residual, with rows of stride `row`.
    pub fn new(at: *mut O, row: usize, accumulate: bool) -> Self {
        Target { at, row, accumulate, bias: std::ptr::null(), residual: std::ptr::null(), scale: 1.0 }
    }

    /// Returns the part of the target from row i and column j on.
    ///
    /// # Safety
    /// (i, j) must be inside the target.
    pub unsafe fn from(self, i: usize, j: usize) -> Self {
        let shift = i * self.row + j;
        // SAFETY: the caller's promise; bias has the target's columns, residual its shape.
        unsafe {
            Target {
                at: self.at.add(shift),
                bias: if self.bias.is_null() { self.bias } else { self.bias.add(j) },
                residual: if self.residual.is_null() { self.residual } else { self.residual.add(shift) },
                ..self
            }
        }
    }
}

/// Computes a tile of the result, M rows by N vectors, summed over all of `k`. It has `columns` columns: N · LANES, or
/// at most LANES if PART is true (N is then 1). Rows of a (if ROWS is true) or else its columns lie `stride` apart.
///
/// # Safety
/// a must be readable for M × k, b for k × columns (`b_row` apart), the target for M × columns.
#[inline(always)]
unsafe fn tile<
    T: Float,
    V: Vector<T>,
    B: Real<Wide = T>,
    const M: usize,
    const N: usize,
    const ROWS: bool,
    const PART: bool,
>(
    k: usize,
    a: *const T,
    stride: usize,
    b: *const B,
    b_row: usize,
    columns: usize,
    target: Target<T>,
) {
    let zero = V::splat(T::ZERO);
    let mut sums = [[zero; N]; M];
    if target.accumulate {
        for i in 0..M {
            for v in 0..N {
                prefetch(target.at.wrapping_add(i * target.row + v * V::LANES));
            }
        }
    }
    for p in 0..k {
        let mut right = [zero; N];
        for v in 0..N {
            // SAFETY: inside b by the contract.
            unsafe {
                let from = b.add(p * b_row + v * V::LANES);
                right[v] = if PART { B::load_part(from, columns, zero) } else { B::load(from) };
            }
        }
        for i in 0..M {
            // SAFETY: inside a by the contract.
            let left = V::splat(unsafe { *a.add(if ROWS { i * stride + p } else { p * stride + i }) });
            for v in 0..N {
                sums[i][v] = left.mul_add(right[v], sums[i][v]);
            }
        }
    }
    // Separate passes keep every loop small enough to unroll and the sums in registers.
    macro_rules! add {
        ($from:expr, $row:expr) => {
            for i in 0..M {
                for v in 0..N {
                    // SAFETY: inside the bias, the residual or the target by the contract.
                    sums[i][v] = sums[i][v]
                        + unsafe {
                            let from: *const T = $from.add(i * $row + v * V::LANES);
                            if PART { V::load_part(from, columns, zero) } else { V::load(from) }
                        };
                }
            }
        };
    }
    if target.scale != 1.0 {
        let scale = V::splat(T::from_f64(target.scale));
        for i in 0..M {
            for v in 0..N {
                sums[i][v] = sums[i][v] * scale;
            }
        }
    }
    if !target.bias.is_null() {
        add!(target.bias, 0);
    }
    if !target.residual.is_null() {
        add!(target.residual, target.row);
    }
    if target.accumulate {
        add!(target.at, target.row);
    }
    for i in 0..M {
        for v in 0..N {
            // SAFETY: inside the target by the contract.
            unsafe {
                let to = target.at.add(i * target.row + v * V::LANES);
                if PART { sums[i][v].store_part(to, columns) } else { sums[i][v].store(to) }
            }
        }
    }
}

/// Computes all m rows of one panel (group of neighbouring columns) of the result.
///
/// # Safety
/// The promises of `tile` hold for m rows.
#[inline(always)]
unsafe fn panel<T: Float, V: Vector<T>, B: Real<Wide = T>, const N: usize, const PART: bool>(
    m: usize,
    k: usize,
    depth: Depth,
    a: Left<T>,
    b: *const B,
    b_row: usize,
    columns: usize,
    target: Target<T>,
) {
    let mut i = 0;
    while i < m {
        let left = m - i;
        // SAFETY: rows i.. of a and of the target, inside both by the contract.
        unsafe {
            let at = a.at.add(i / GROUP_ROWS * a.group + i % GROUP_ROWS * a.row);
            let to = target.from(i, 0);
            macro_rules! rows {
                ($M:expr) => {{
                    let part = depth.range(i, $M, k);
                    let (at, b) = (at.add(part.start * a.column), b.add(part.start * b_row));
                    if a.column == 1 {
                        tile::<T, V, B, { $M }, N, true, PART>(part.len(), at, a.row, b, b_row, columns, to)
                    } else {
                        tile::<T, V, B, { $M }, N, false, PART>(part.len(), at, a.column, b, b_row, columns, to)
                    }
                    $M
                }};
            }
            i += match left {
                1 => rows!(1),
                2..4 => rows!(2),
                4..GROUP_ROWS => rows!(4),
                // Two rows alone would wait for their own sums. Rows of a packed operand stay in their groups.
                8 if a.column == 1 => rows!(4),
                _ => rows!(GROUP_ROWS),
            };
        }
    }
}

vectorized! {
    /// Computes `target[m, n]` = a · b on this thread without packing. b is [k, n] with row stride `b_row`. Row i of
    /// the result uses only the range `depth` of k.
    ///
    /// The pointers must be valid for these shapes: a for m × k, b for k × n, the target for m × n. No other thread may
    /// write to them meanwhile.
    pub fn small_product<T: Float, V, B>(m: usize, n: usize, k: usize, depth: Depth, a: Left<T>, b: *const B, b_row: usize, target: Target<T>) {
        let mut j = 0;
        while j < n {
            // The widest tile that fits: PANEL_VECTORS vectors, two, or a partial one.
            let vectors = (n - j) / V::LANES;
            // SAFETY: columns j.. of b and of the target, inside both by the contract.
            unsafe {
                let from = b.add(j);
                let to = target.from(0, j);
                if V::PANEL_VECTORS == 4 && vectors >= 4 {
                    panel::<T, V, B, 4, false>(m, k, depth, a, from, b_row, 4 * V::LANES, to);
                    j += 4 * V::LANES;
                } else if vectors >= 2 {
                    panel::<T, V, B, 2, false>(m, k, depth, a, from, b_row, 2 * V::LANES, to);
                    j += 2 * V::LANES;
                } else {
                    let columns = (n - j).min(V::LANES);
                    panel::<T, V, B, 1, true>(m, k, depth, a, from, b_row, columns, to);
                    j += columns;
                }
            }
        }
    }
}

/// Pointers shared by tasks that write disjoint parts.
pub(super) struct SharedPointers<P>(pub P);
// SAFETY: the pointers come from borrows that outlive the parallel region; tasks write disjoint parts and only read
// the others.
unsafe impl<P> Sync for SharedPointers<P> {}
impl<P: Copy> SharedPointers<P> {
    /// Returns the pointers.
    pub fn get(&self) -> P {
        self.0
    }
}
