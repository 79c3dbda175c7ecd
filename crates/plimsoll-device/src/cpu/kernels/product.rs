//! Matrix products: `out[m, n]` (=|+=) scale · a · b (+ bias) (+ residual), with either operand transposed, and
//! with strided rows of a and of the result.
//!
//! The right-hand side is packed, slice by slice, into panels as wide as a register tile; then
//! tasks of rows × panels run through `tile`, which keeps GROUP_ROWS × PANEL_VECTORS vectors of the result in
//! registers over a whole slice of k. Every element is summed over k in one order, whatever the
//! tasks, so the result does not depend on the number of threads.
//!
//! `small_product` is the unpacked, single-threaded core, which attention uses as well.
//!
//! This file holds the products of f32 and f64, and the unpacked products of all types. Packed products of bf16 are in `pairs.rs`.

use super::simd::{Float, Real, Vector, prefetch, transpose, vectorized};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::workspace;
use plimsoll_program::workspace::cpu::{PRODUCT_COLUMNS, PRODUCT_FEW_ROWS, PRODUCT_ROWS};
use std::ops::Range;

/// Products with at most this many rows read b unpacked.
pub(super) const FEW_ROWS: usize = PRODUCT_FEW_ROWS as usize;
/// Rows of a register tile.
pub(super) const GROUP_ROWS: usize = workspace::cpu::PRODUCT_GROUP as usize;

/// A matrix product: `out[m, n]` = scale · a · b (+ bias) (+ residual), or out += scale · a · b (…).
#[derive(Clone, Copy)]
pub struct Product<'a, T: Real> {
    /// Rows m of the result.
    pub m: usize,
    /// Columns n of the result.
    pub n: usize,
    /// Inner size k.
    pub k: usize,
    /// Left operand [m, k], or [k, m] if transposed.
    pub a: &'a [T],
    /// Whether `a` is stored as [k, m].
    pub a_transposed: bool,
    /// Right operand [k, n], or [n, k] if transposed (as weights are).
    pub b: &'a [T],
    /// Whether `b` is stored as [n, k].
    pub b_transposed: bool,
    /// Bias `[n]`, added to every row.
    pub bias: Option<&'a [T]>,
    /// Residual [m, n]. If it is the output itself, use `accumulate` instead.
    pub residual: Option<&'a [T]>,
    /// Whether to add to the output instead of overwriting it.
    pub accumulate: bool,
    /// Row stride of the stored `a`, in elements; at least the length of a row.
    pub a_row: usize,
    /// Row stride of the result, in elements; must be n if there is a residual.
    pub out_row: usize,
    /// Factor of a · b.
    pub scale: T::Wide,
}

impl<'a, T: Real> Product<'a, T> {
    /// Returns the plain product a · b of contiguous matrices.
    pub fn new(m: usize, n: usize, k: usize, a: &'a [T], b: &'a [T]) -> Product<'a, T> {
        Product {
            m,
            n,
            k,
            a,
            a_transposed: false,
            b,
            b_transposed: false,
            bias: None,
            residual: None,
            accumulate: false,
            a_row: k,
            out_row: n,
            scale: T::Wide::ONE,
        }
    }

    /// Returns the product with `a` stored as [k, m].
    pub fn a_transposed(self) -> Product<'a, T> {
        Product { a_transposed: true, a_row: self.m, ..self }
    }

    /// Returns the product with `b` stored as [n, k].
    pub fn b_transposed(self) -> Product<'a, T> {
        Product { b_transposed: true, ..self }
    }
}

/// The left-hand side as tiles read it: groups of GROUP_ROWS rows, `group` elements apart; inside a
/// group, element (i, p) lies at `i * row + p * column`. One of `row` and `column` is 1.
#[derive(Clone, Copy)]
pub(super) struct Left<T> {
    pub at: *const T,
    pub group: usize,
    pub row: usize,
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

    /// Packed groups of GROUP_ROWS rows over `depth`, each group one contiguous [depth, GROUP_ROWS].
    fn packed(at: *const T, depth: usize) -> Self {
        Left { at, group: GROUP_ROWS * depth, row: 1, column: GROUP_ROWS }
    }
}

/// The range of k that contributes to row i of the result; the rest of a's row i is zero.
#[derive(Clone, Copy)]
pub(super) enum Depth {
    /// All of k.
    Whole,
    /// The range 0 ..= i + this.
    To(usize),
    /// The range i − this .. k.
    From(usize),
}

impl Depth {
    /// Returns the range that contributes to any of rows `i..i + rows`.
    fn range(self, i: usize, rows: usize, k: usize) -> Range<usize> {
        match self {
            Depth::Whole => 0..k,
            Depth::To(shift) => 0..k.min(i + rows + shift),
            Depth::From(shift) => k.min(i.saturating_sub(shift))..k,
        }
    }
}

/// The target of tiles, and the terms added to them. Null pointers add nothing.
#[derive(Clone, Copy)]
pub struct Target<T, O = T> {
    pub at: *mut O,
    pub row: usize,
    pub accumulate: bool,
    pub bias: *const T,
    pub residual: *const T,
    pub scale: f64,
}

impl<T, O> Target<T, O> {
    /// Returns a plain result with rows of stride `row`.
    pub fn new(at: *mut O, row: usize, accumulate: bool) -> Self {
        Target { at, row, accumulate, bias: std::ptr::null(), residual: std::ptr::null(), scale: 1.0 }
    }

    /// Returns the target from (i, j) on.
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

/// Computes an M × (N vectors) tile of the result over all of `k`. `columns` of it are valid: all
/// N · LANES, or fewer if N = 1 and PART. With ROWS the left-hand rows are contiguous (stride
/// `stride`), otherwise its columns are.
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

/// Computes all rows of one panel of columns.
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
                _ => rows!(GROUP_ROWS),
            };
        }
    }
}

vectorized! {
    /// Computes `target[m, n]` = a · b on this thread without packing. b is [k, n] with row stride `b_row`;
    /// row i of the result uses only the range `depth` of k.
    ///
    /// The pointers must be valid for these shapes: a for m × k, b for k × n, the target for m × n. No
    /// other thread may write to them meanwhile.
    pub(super) fn small_product<T: Float, V, B>(m: usize, n: usize, k: usize, depth: Depth, a: Left<T>, b: *const B, b_row: usize, target: Target<T>) {
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

vectorized! {
    /// Returns the columns of a register tile.
    fn panel_columns<T: Float, V>(_of: &[T]) -> usize {
        V::PANEL_VECTORS * V::LANES
    }
}

/// Computes the product `p` into `out`. Sums are in the wide type and rounded once to the type of the result: that of the operands,
/// or the wide one, as for weight gradients. `scratch` has `workspace::cpu::product` elements.
pub fn product<T: Real, O: Real<Wide = T::Wide>>(pool: &Pool, p: Product<T>, out: &mut [O], scratch: &mut [T::Wide]) {
    let Product { m, n, k, .. } = p;
    if m == 0 || n == 0 {
        return;
    }
    let (a_rows, a_columns) = if p.a_transposed { (k, m) } else { (m, k) };
    assert!(
        p.a_row >= a_columns && p.a.len() >= a_rows.saturating_sub(1) * p.a_row + a_columns.min(a_rows * a_columns)
    );
    assert!(p.out_row >= n && out.len() >= (m - 1) * p.out_row + n, "result of a {m} x {n} x {k} product");
    assert!(p.b.len() >= k * n && p.bias.is_none_or(|bias| bias.len() >= n));
    assert!(p.residual.is_none_or(|residual| residual.len() >= m * n && p.out_row == n));
    if m <= FEW_ROWS && p.b_transposed && !p.a_transposed {
        return few_rows(pool, p, out);
    }
    T::product(pool, p, out, scratch);
}

/// Computes a product of f32 or f64 with packing.
pub(super) fn packed_product<T: Float, O: Real<Wide = T>>(
    pool: &Pool,
    p: Product<T>,
    out: &mut [O],
    scratch: &mut [T],
) {
    assert!(O::IS_WIDE, "the product of {0} is {0}", T::DTYPE);
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let Product { m, n, k, .. } = p;
    let depth = workspace::cpu::product_depth(k as u64) as usize;
    let rows = m.min(PRODUCT_ROWS as usize);
    let left_size = rows.next_multiple_of(GROUP_ROWS) * depth;
    let wide = panel_columns::<T>(&[]);
    let columns = n.min(PRODUCT_COLUMNS as usize);
    let (right, left) = scratch.split_at_mut(columns.next_multiple_of(workspace::cpu::PRODUCT_PANEL as usize) * depth);
    let left = Shared::new(&mut left[..pool.threads() * left_size]);
    let target = Target {
        at: out.as_mut_ptr(),
        row: p.out_row,
        accumulate: p.accumulate,
        bias: p.bias.map_or(std::ptr::null(), <[T]>::as_ptr),
        residual: p.residual.map_or(std::ptr::null(), <[T]>::as_ptr),
        scale: p.scale.to_f64(),
    };
    let target = SharedTarget(target);

    let row_tasks = m.div_ceil(rows);
    for first in (0..n).step_by(columns) {
        let panels = (n - first).min(columns).div_ceil(wide);
        // With few rows, the columns are distributed as well.
        let column_tasks = (4 * pool.threads()).div_ceil(row_tasks).min(panels);
        let panels_each = panels.div_ceil(column_tasks);
        // With k = 0 there is one empty slice, because the epilogue must still run.
        for from in (0..k.max(1)).step_by(depth) {
            let slice = from..k.min(from + depth);
            let part = slice.len();
            let shared = Shared::new(&mut right[..]);
            pool.split(panels, 4, |range, _| {
                for index in range {
                    let column = first + index * wide;
                    // SAFETY: each panel is packed by one task.
                    let panel = unsafe { shared.part(index * wide * depth..(index + 1) * wide * depth) };
                    pack_right(&p, slice.clone(), column..n.min(column + wide), wide, panel);
                }
            });
            let right = &right[..];
            pool.run(row_tasks * column_tasks, |task, lane| {
                let (i, j) = (task / column_tasks * rows, task % column_tasks * panels_each);
                let count = rows.min(m - i);
                let a = if p.a_transposed {
                    // SAFETY: lanes have disjoint parts.
                    let block = unsafe { left.part(lane * left_size..(lane + 1) * left_size) };
                    pack_left(&p, slice.clone(), i..i + count, block);
                    Left::packed(block.as_ptr(), part)
                } else {
                    Left::rows(p.a[i * p.a_row + slice.start..].as_ptr(), p.a_row)
                };
                for index in j..panels.min(j + panels_each) {
                    let column = first + index * wide;
                    // SAFETY: (i, column) is inside the output; tasks write disjoint tiles of it.
                    let mut to = unsafe { target.get().from(i, column) };
                    if from > 0 {
                        to = Target { scale: to.scale, ..Target::new(to.at, to.row, true) };
                    }
                    let b = right[index * wide * depth..].as_ptr();
                    small_product(count, wide.min(n - column), part, Depth::Whole, a, b, wide, to);
                }
            });
        }
    }
}

/// A target shared by tasks that write disjoint parts.
struct SharedTarget<T>(Target<T>);
// SAFETY: the pointers come from borrows that outlive the parallel region; tasks write disjoint
// parts of the target and only read the others.
unsafe impl<T: Sync> Sync for SharedTarget<T> {}
impl<T> SharedTarget<T> {
    fn get(&self) -> Target<T>
    where
        T: Copy,
    {
        self.0
    }
}

/// Packs rows `slice` × `columns` of b as [slice, wide].
fn pack_right<T: Float>(p: &Product<T>, slice: Range<usize>, columns: Range<usize>, wide: usize, panel: &mut [T]) {
    if p.b_transposed {
        transpose(&p.b[columns.start * p.k + slice.start..], p.k, columns.len(), slice.len(), T::ONE, panel, wide);
    } else {
        for (row, to) in slice.zip(panel.chunks_exact_mut(wide)) {
            to[..columns.len()].copy_from_slice(&p.b[row * p.n..][columns.clone()]);
        }
    }
}

/// Packs `rows` × `slice` of a transposed a as groups [slice, GROUP_ROWS].
fn pack_left<T: Float>(p: &Product<T>, slice: Range<usize>, rows: Range<usize>, block: &mut [T]) {
    let depth = slice.len();
    let a_row = |row: usize| &p.a[row * p.a_row..][..p.m];
    // A few rows of a at a time: their cache lines serve several groups, and they fit into one cache
    // set even if the row stride is a multiple of its size.
    for from in slice.clone().step_by(8) {
        for (group, row) in rows.clone().step_by(GROUP_ROWS).enumerate() {
            for q in from..slice.end.min(from + 8) {
                let to = &mut block[(group * depth + q - slice.start) * GROUP_ROWS..][..GROUP_ROWS];
                let values = &a_row(q)[row..];
                // Prefetches the same columns of the next few rows; the hardware does not predict strides of whole pages.
                prefetch(values.as_ptr().wrapping_add(8 * p.a_row));
                if row + GROUP_ROWS <= rows.end {
                    to.copy_from_slice(&values[..GROUP_ROWS]);
                } else {
                    to[..rows.end - row].copy_from_slice(&values[..rows.end - row]);
                }
            }
        }
    }
}

/// Computes a product with few rows. It reads b once, unpacked, with one dot product per element.
fn few_rows<T: Real, O: Real<Wide = T::Wide>>(pool: &Pool, p: Product<T>, out: &mut [O]) {
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
            /// Computes `dot_tile` for a fixed number of rows.
            pub(super) fn $name<T, V>(k: usize, a: &[T], a_row: usize, b: &[T], b_row: usize, rows: usize, sums: &mut [[T::Wide; 4]; FEW_ROWS]) {
                dot_tile::<T, V, $M>(k, a, a_row, b, b_row, rows, sums)
            }
        }
    };
}
dots!(dots_1, 1);
dots!(dots_2, 2);
dots!(dots_3, 3);
dots!(dots_4, 4);

/// Computes `sums[i][j] = a[i] · b[j]` for M rows of a (stride `a_row`) and `rows` (up to 4) rows of b (stride `b_row`), all of
/// length k.
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
    use super::simd::{get, strips};
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
