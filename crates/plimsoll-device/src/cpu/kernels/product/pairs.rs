//! Matrix products of bf16 with sums in f32.
//!
//! Neighbouring numbers along k form pairs, as in AVX-512 BF16: two multiplications and two additions per 32-bit lane. Processors
//! without it split the same pairs, which is exact, and multiply in f32. The order of additions, and so the last bits of the
//! sums, differ between the two. (Intel's and AMD's manuals: VDPBF16PS adds without exceptions and flushes subnormals.)
//!
//! The blocking is that of `packed.rs`, over pairs. If k has several slices and the result is bf16, the sums of the slices are kept
//! in the workspace, so that each result is rounded once.
//!
//! A pair has the bits of an f32: the first number in the lower half.

use super::tiles::{SharedPointers, Target};
use super::{GROUP_ROWS, Product, QUERIES};
use crate::cpu::kernels::simd::{Dot, Real, Vector, transpose_bits, vectorized_dot};
use crate::cpu::pool::{Pool, Shared};
use half::bf16;
use plimsoll_program::workspace::cpu as sizes;
use std::ops::Range;

/// The left operand as tiles read it: groups of GROUP_ROWS rows, `group` elements apart. Inside a group, pair p of row
/// i begins at `i * row + 2 * p * column`. `column` is 1, or GROUP_ROWS if the operand is packed.
#[derive(Clone, Copy)]
struct Left {
    at: *const bf16,
    group: usize,
    row: usize,
    column: usize,
}

impl Left {
    /// Returns a matrix with contiguous rows of stride `row`.
    fn rows(at: *const bf16, row: usize) -> Left {
        Left { at, group: GROUP_ROWS * row, row, column: 1 }
    }

    /// Returns packed groups of GROUP_ROWS rows, each group one contiguous [pairs, GROUP_ROWS].
    fn packed(at: *const bf16, pairs: usize) -> Left {
        Left { at, group: 2 * GROUP_ROWS * pairs, row: 2, column: GROUP_ROWS }
    }
}

/// The target of a tile, and the terms added to its sums. Null pointers add nothing.
#[derive(Clone, Copy)]
struct PairTarget<O> {
    to: Target<bf16, O>,
    /// Sums of earlier slices of k, with row stride `partial_row`; null if there are none.
    partial: *const f32,
    partial_row: usize,
}

impl<O: Copy> PairTarget<O> {
    fn new(to: Target<bf16, O>) -> PairTarget<O> {
        PairTarget { to, partial: std::ptr::null(), partial_row: 0 }
    }

    /// Returns the part of the target from row i and column j on.
    ///
    /// # Safety
    /// (i, j) must be inside the target.
    unsafe fn from(self, i: usize, j: usize) -> PairTarget<O> {
        // SAFETY: the caller's promise; partial sums have the target's shape.
        unsafe {
            let partial =
                if self.partial.is_null() { self.partial } else { self.partial.add(i * self.partial_row + j) };
            PairTarget { to: self.to.from(i, j), partial, ..self }
        }
    }
}

/// Computes a tile of the result, M rows by N vectors, summed over all of `k`. It has `columns` columns: N · LANES, or
/// at most LANES if PART is true (N is then 1). If ROWS is true, rows of a lie `stride` apart; otherwise a is packed.
///
/// # Safety
/// a must be readable for M × k, b for ⌈k / 2⌉ × columns pairs (`b_row` apart), the target for M × columns.
#[inline(always)]
unsafe fn tile<D: Dot, O: Real<Wide = f32>, const M: usize, const N: usize, const ROWS: bool, const PART: bool>(
    k: usize,
    a: *const bf16,
    stride: usize,
    b: *const f32,
    b_row: usize,
    columns: usize,
    sink: PairTarget<O>,
) {
    let mut sums = [[D::V::splat(0.0); N]; M];
    for p in 0..k / 2 {
        // SAFETY: inside b by the contract.
        let right = unsafe { load_right::<D, N, PART>(b.add(p * b_row), columns) };
        for i in 0..M {
            let at = if ROWS { i * stride + 2 * p } else { 2 * (p * GROUP_ROWS + i) };
            // SAFETY: inside a by the contract.
            let left = D::V::splat(unsafe { a.add(at).cast::<f32>().read_unaligned() });
            for v in 0..N {
                sums[i][v] = D::dot(left, right[v], sums[i][v]);
            }
        }
    }
    if k % 2 == 1 {
        let p = k / 2;
        // SAFETY: inside b by the contract.
        let right = unsafe { load_right::<D, N, PART>(b.add(p * b_row), columns) };
        for i in 0..M {
            let at = if ROWS { i * stride + 2 * p } else { 2 * (p * GROUP_ROWS + i) };
            // The second number of the pair would belong to the next row or lie beyond the end.
            // SAFETY: inside a by the contract.
            let left = D::V::splat(f32::from_bits(u32::from(unsafe { *a.add(at) }.to_bits())));
            for v in 0..N {
                sums[i][v] = D::dot(left, right[v], sums[i][v]);
            }
        }
    }
    // SAFETY: the target holds M × columns by the contract.
    unsafe { write_tile::<D, O, M, N, PART>(&mut sums, columns, sink) }
}

/// Loads one row of pairs of the right operand for a tile. These are N vectors or, if PART is true, one vector with
/// `columns` pairs and zeros after them.
///
/// # Safety
/// `from` must be readable for `columns` pairs.
#[inline(always)]
unsafe fn load_right<D: Dot, const N: usize, const PART: bool>(from: *const f32, columns: usize) -> [D::V; N] {
    let zero = D::V::splat(0.0);
    let mut right = [zero; N];
    for v in 0..N {
        // SAFETY: inside the row by the contract.
        unsafe {
            let from = from.add(v * D::V::LANES);
            right[v] = if PART { D::V::load_part(from, columns, zero) } else { D::V::load(from) };
        }
    }
    right
}

/// Adds the terms of the target (partial sums, bias, residual) to the sums of a tile, and writes the results to the
/// target.
///
/// # Safety
/// The target and its terms must be valid for M × columns.
#[inline(always)]
unsafe fn write_tile<D: Dot, O: Real<Wide = f32>, const M: usize, const N: usize, const PART: bool>(
    sums: &mut [[D::V; N]; M],
    columns: usize,
    sink: PairTarget<O>,
) {
    let (zero, lanes) = (D::V::splat(0.0), D::V::LANES);
    // Separate passes keep every loop small enough to unroll and the sums in registers.
    macro_rules! add {
        ($T:ty, $from:expr, $row:expr) => {
            for i in 0..M {
                for v in 0..N {
                    // SAFETY: inside the added terms by the contract.
                    sums[i][v] = sums[i][v]
                        + unsafe {
                            let from: *const $T = $from.add(i * $row + v * lanes);
                            if PART { <$T>::load_part(from, columns, zero) } else { <$T>::load(from) }
                        };
                }
            }
        };
    }
    if !sink.partial.is_null() {
        add!(f32, sink.partial, sink.partial_row);
    }
    if sink.to.scale != 1.0 {
        let scale = D::V::splat(sink.to.scale as f32);
        for i in 0..M {
            for v in 0..N {
                sums[i][v] = sums[i][v] * scale;
            }
        }
    }
    if !sink.to.bias.is_null() {
        add!(bf16, sink.to.bias, 0);
    }
    if !sink.to.residual.is_null() {
        add!(bf16, sink.to.residual, sink.to.row);
    }
    if sink.to.accumulate {
        add!(O, sink.to.at, sink.to.row);
    }
    for i in 0..M {
        for v in 0..N {
            // SAFETY: inside the target by the contract.
            unsafe {
                let to = sink.to.at.add(i * sink.to.row + v * lanes);
                if PART { O::store_part(sums[i][v], to, columns) } else { O::store(sums[i][v], to) }
            }
        }
    }
}

/// Computes all m rows of one panel (group of neighbouring columns) of the result.
///
/// # Safety
/// The promises of `tile` hold for m rows.
#[inline(always)]
unsafe fn panel<D: Dot, O: Real<Wide = f32>, const N: usize, const PART: bool>(
    m: usize,
    k: usize,
    a: Left,
    b: *const f32,
    b_row: usize,
    columns: usize,
    sink: PairTarget<O>,
) {
    let mut i = 0;
    while i < m {
        // SAFETY: rows i.. of a and of the target, inside both by the contract.
        unsafe {
            let at = a.at.add(i / GROUP_ROWS * a.group + i % GROUP_ROWS * a.row);
            let to = sink.from(i, 0);
            macro_rules! rows {
                ($M:expr) => {{
                    if a.column == 1 {
                        tile::<D, O, { $M }, N, true, PART>(k, at, a.row, b, b_row, columns, to)
                    } else {
                        tile::<D, O, { $M }, N, false, PART>(k, at, 0, b, b_row, columns, to)
                    }
                    $M
                }};
            }
            i += match m - i {
                1 => rows!(1),
                2..4 => rows!(2),
                4..GROUP_ROWS => rows!(4),
                _ => rows!(GROUP_ROWS),
            };
        }
    }
}

vectorized_dot! {
    /// Computes `sink[m, n]` = a · b on this thread; b is [pairs, n] with a row stride of `b_row` pairs.
    ///
    /// The pointers must be valid for these shapes, and no other thread may write to them meanwhile.
    fn small<D, O>(m: usize, n: usize, k: usize, a: Left, b: *const f32, b_row: usize, sink: PairTarget<O>) {
        let lanes = D::V::LANES;
        let mut j = 0;
        while j < n {
            let vectors = (n - j) / lanes;
            // SAFETY: columns j.. of b and of the target, inside both by the contract.
            unsafe {
                let (from, to) = (b.add(j), sink.from(0, j));
                if D::V::PANEL_VECTORS == 4 && vectors >= 4 {
                    panel::<D, O, 4, false>(m, k, a, from, b_row, 4 * lanes, to);
                    j += 4 * lanes;
                } else if vectors >= 2 {
                    panel::<D, O, 2, false>(m, k, a, from, b_row, 2 * lanes, to);
                    j += 2 * lanes;
                } else {
                    let columns = (n - j).min(lanes);
                    panel::<D, O, 1, true>(m, k, a, from, b_row, columns, to);
                    j += columns;
                }
            }
        }
    }
}

vectorized_dot! {
    /// Returns the number of columns of a register tile, the part of a result that is summed in registers.
    fn panel_columns<D>() -> usize {
        D::V::PANEL_VECTORS * D::V::LANES
    }
}

vectorized_dot! {
    /// Interleaves two rows into pairs: `to[j]` = (low[j], high[j]).
    fn interleave<D>(low: &[bf16], high: &[bf16], to: &mut [f32]) {
        for ((low, high), to) in low.iter().zip(high).zip(to) {
            *to = to_pair(*low, *high);
        }
    }
}

#[inline(always)]
fn to_pair(low: bf16, high: bf16) -> f32 {
    f32::from_bits(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
}

/// Implements `Multiply::packed_product` for bf16.
pub fn packed_product<O: Real<Wide = f32>>(pool: &Pool, p: Product<bf16>, out: &mut [O], scratch: &mut [f32]) {
    let Product { m, n, k, .. } = p;
    let shape = sizes::Bf16Product::new(m as u64, n as u64, k as u64);
    let [depth, rows, columns, at_once] =
        [shape.depth, shape.rows, shape.columns, shape.rows_at_once].map(|size| size as usize);
    let left_size = shape.left_elements() as usize;
    let wide = panel_columns();
    let (right, rest) = scratch.split_at_mut(shape.right_elements() as usize);
    let (left, sums) = rest.split_at_mut(pool.threads() * left_size);
    let left = Shared::new(left);
    let target = Target {
        at: out.as_mut_ptr(),
        row: p.out_row,
        accumulate: p.accumulate,
        bias: p.bias.map_or(std::ptr::null(), <[bf16]>::as_ptr),
        residual: p.residual.map_or(std::ptr::null(), <[bf16]>::as_ptr),
        scale: f64::from(p.scale),
    };
    // An f32 result itself holds the sums of slices.
    let apart = k > depth && !O::IS_WIDE;
    let at_once = if apart { at_once } else { m };
    let sums = SharedPointers(sums.as_mut_ptr());
    let target = SharedPointers(target);

    for first_row in (0..m).step_by(at_once) {
        let part_rows = at_once.min(m - first_row);
        let row_tasks = part_rows.div_ceil(rows);
        for first in (0..n).step_by(columns) {
            let panels = (n - first).min(columns).div_ceil(wide);
            // With few rows, the columns are distributed as well.
            let column_tasks = (4 * pool.threads()).div_ceil(row_tasks).min(panels);
            let panels_each = panels.div_ceil(column_tasks);
            // With k = 0 there is one empty slice, because the epilogue must still run.
            for from in (0..k.max(1)).step_by(depth) {
                let slice = from..k.min(from + depth);
                let part = slice.len();
                let size = wide * part.div_ceil(2);
                pack_panels(pool, &p, slice.clone(), first, panels, wide, right);
                let right = &right[..];
                pool.run(row_tasks * column_tasks, |task, lane| {
                    let (i, j) = (task / column_tasks * rows, task % column_tasks * panels_each);
                    let count = rows.min(part_rows - i);
                    let row = first_row + i;
                    let a = if p.a_transposed {
                        // SAFETY: lanes have disjoint parts.
                        let block = unsafe { left.part(lane * left_size..(lane + 1) * left_size) };
                        pack_left(&p, slice.clone(), row..row + count, block);
                        Left::packed(block.as_ptr().cast(), part.div_ceil(2))
                    } else {
                        Left::rows(p.a[row * p.a_row + slice.start..].as_ptr(), p.a_row)
                    };
                    for index in j..panels.min(j + panels_each) {
                        let column = first + index * wide;
                        let valid = wide.min(n - column);
                        let b = right[index * size..].as_ptr();
                        // SAFETY: (row, column) is inside the output; tasks write disjoint tiles of it.
                        let to = unsafe { target.get().from(row, column) };
                        // SAFETY: inside the partial sums of this pass; tasks write disjoint tiles.
                        let sum = unsafe { sums.get().add(if apart { i * columns + column - first } else { 0 }) };
                        if apart && slice.end < k {
                            let to = Target::new(sum, columns, from > 0);
                            small(count, valid, part, a, b, wide, PairTarget::<f32>::new(to));
                        } else if apart {
                            let partial = PairTarget { to, partial: sum.cast_const(), partial_row: columns };
                            small(count, valid, part, a, b, wide, partial);
                        } else if from > 0 {
                            let more = Target { scale: to.scale, ..Target::new(to.at, to.row, true) };
                            small(count, valid, part, a, b, wide, PairTarget::new(more));
                        } else {
                            small(count, valid, part, a, b, wide, PairTarget::new(to));
                        }
                    }
                });
            }
        }
    }
}

/// Packs the rows `slice` of the right operand, from column `first` on, into `panels` panels of `wide` columns each.
/// `right` gets the panels one after the other.
fn pack_panels(
    pool: &Pool,
    p: &Product<bf16>,
    slice: Range<usize>,
    first: usize,
    panels: usize,
    wide: usize,
    right: &mut [f32],
) {
    let size = wide * slice.len().div_ceil(2);
    let shared = Shared::new(right);
    pool.split(panels, 4, |range, _| {
        for index in range {
            let column = first + index * wide;
            // SAFETY: each panel is packed by one task.
            let panel = unsafe { shared.part(index * size..(index + 1) * size) };
            pack_right(p, slice.clone(), column..p.n.min(column + wide), wide, panel);
        }
    });
}

/// Packs the rows `slice` and columns `columns` of the right operand into `panel`, as pairs [⌈slice / 2⌉, wide]. `wide`
/// is the row stride of the panel. An odd last row is paired with zeros.
fn pack_right(p: &Product<bf16>, slice: Range<usize>, columns: Range<usize>, wide: usize, panel: &mut [f32]) {
    if p.b_transposed {
        let rows = &p.b[columns.start * p.k + slice.start..(columns.end - 1) * p.k + slice.end];
        transpose_pairs(rows, p.k, columns.len(), slice.len(), panel, wide);
    } else {
        let b_row = |row: usize| &p.b[row * p.n..][columns.clone()];
        for (row, to) in slice.clone().step_by(2).zip(panel.chunks_exact_mut(wide)) {
            let to = &mut to[..columns.len()];
            if row + 1 < slice.end {
                interleave(b_row(row), b_row(row + 1), to);
            } else {
                to.iter_mut().zip(b_row(row)).for_each(|(to, &low)| *to = to_pair(low, bf16::ZERO));
            }
        }
    }
}

/// Joins neighbours in each row of `from[rows, columns]` (row stride `from_row`) to pairs. Writes the pairs transposed
/// to `to[⌈columns / 2⌉, rows]` (row stride `to_row`). An odd last column is paired with zeros.
fn transpose_pairs(from: &[bf16], from_row: usize, rows: usize, columns: usize, to: &mut [f32], to_row: usize) {
    // Pairs need an even stride; the last row may end after its columns.
    let even = from_row.is_multiple_of(2) && columns.is_multiple_of(2);
    match bytemuck::try_cast_slice::<bf16, f32>(&from[..from.len() & !1]) {
        Ok(pairs) if even => transpose_bits(pairs, from_row / 2, rows, columns / 2, to, to_row),
        _ => {
            for i in 0..rows {
                for (p, two) in from[i * from_row..][..columns].chunks(2).enumerate() {
                    to[p * to_row + i] = to_pair(two[0], two.get(1).copied().unwrap_or(bf16::ZERO));
                }
            }
        }
    }
}

/// Packs the part `rows` × `slice` of a left operand, which is stored transposed. `block` gets one contiguous [pairs,
/// GROUP_ROWS] per group of GROUP_ROWS rows.
fn pack_left(p: &Product<bf16>, slice: Range<usize>, rows: Range<usize>, block: &mut [f32]) {
    let pairs = slice.len().div_ceil(2);
    // A few rows of a at a time: their cache lines serve several groups, and they fit into one cache
    // set even if the row stride is a multiple of its size.
    for from in (0..pairs).step_by(8) {
        for (group, row) in rows.clone().step_by(GROUP_ROWS).enumerate() {
            let count = GROUP_ROWS.min(rows.end - row);
            for q in from..pairs.min(from + 8) {
                let to = &mut block[(group * pairs + q) * GROUP_ROWS..][..count];
                let first = slice.start + 2 * q;
                let low = &p.a[first * p.a_row + row..][..count];
                if first + 1 < slice.end {
                    let high = &p.a[(first + 1) * p.a_row + row..][..count];
                    for ((to, low), high) in to.iter_mut().zip(low).zip(high) {
                        *to = to_pair(*low, *high);
                    }
                } else {
                    to.iter_mut().zip(low).for_each(|(to, &low)| *to = to_pair(low, bf16::ZERO));
                }
            }
        }
    }
}

/// Implements `Multiply::pack_right_operand` for bf16. Each of `count` rows begins `row` elements after the one before it,
/// and has E = `head` elements. Joins neighbours to pairs, and writes them transposed to `to[⌈E / 2⌉, QUERIES]`. Columns from
/// `count` on are zero.
pub fn pack_right_operand(from: &[bf16], row: usize, count: usize, head: usize, to: &mut [f32]) {
    if count < QUERIES {
        to.fill(0.0);
    }
    transpose_pairs(&from[..(count - 1) * row + head], row, count, head, to, QUERIES);
}

/// Implements `Multiply::score` for bf16. Bias, residual and scale of `to` are not used.
pub fn score(m: usize, n: usize, k: usize, a: *const bf16, row: usize, right: *const f32, to: Target<f32>) {
    let to = Target::new(to.at, to.row, to.accumulate);
    small(m, n, k, Left::rows(a, row), right, QUERIES, PairTarget::<f32>::new(to));
}
