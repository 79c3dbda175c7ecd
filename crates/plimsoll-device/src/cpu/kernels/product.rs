//! Matrix products: `out[m, n]` (=|+=) scale · a · b (+ bias) (+ residual), with either operand transposed, and with
//! rows of a and of the result that lie apart.
//!
//! The right-hand side is packed, slice by slice, into panels as wide as a register tile; then
//! tasks of rows × panels run through `tile`, which keeps GROUP × PANEL vectors of the result in
//! registers over a whole slice of k. Every element is summed over k in one order, whatever the
//! tasks, so the result does not depend on the number of threads.
//!
//! `small_product` is the unpacked, single-threaded core, which attention uses, too.
//!
//! Here are the products of f32 and f64, and the unpacked ones of every type; those of bf16 are in
//! `pairs.rs`.

use super::simd::{Float, Real, Vector, prefetch, transpose, vectorised};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::workspace;
use plimsoll_program::workspace::cpu::{PRODUCT_COLUMNS, PRODUCT_FEW_ROWS, PRODUCT_ROWS};
use std::ops::Range;

/// Products with at most this many rows read b as it lies.
pub(super) const FEW_ROWS: usize = PRODUCT_FEW_ROWS as usize;
/// Rows of a register tile.
pub(super) const GROUP: usize = workspace::cpu::PRODUCT_GROUP as usize;

/// `out[m, n]` = scale · a · b (+ bias) (+ residual), or out += scale · a · b (…).
#[derive(Clone, Copy)]
pub struct Product<'a, T: Real> {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// The inner size.
    pub k: usize,
    /// [m, k], or [k, m] if transposed.
    pub a: &'a [T],
    /// Whether `a` is stored as [k, m].
    pub a_transposed: bool,
    /// [k, n], or [n, k] if transposed (as weights are).
    pub b: &'a [T],
    /// Whether `b` is stored as [n, k].
    pub b_transposed: bool,
    /// `[n]`, added to every row.
    pub bias: Option<&'a [T]>,
    /// [m, n]. Where the residual is the output itself, use `accumulate`.
    pub residual: Option<&'a [T]>,
    /// Adds to the output instead of overwriting it.
    pub accumulate: bool,
    /// Elements from one stored row of `a` to the next: at least as many as a row has.
    pub a_row: usize,
    /// The same of the result; n, where there is a residual.
    pub out_row: usize,
    /// What a · b is multiplied with.
    pub scale: T::Wide,
}

impl<'a, T: Real> Product<'a, T> {
    /// a · b and nothing else, of whole matrices.
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

    /// The same with `a` stored as [k, m].
    pub fn a_transposed(self) -> Product<'a, T> {
        Product { a_transposed: true, a_row: self.m, ..self }
    }

    /// The same with `b` stored as [n, k].
    pub fn b_transposed(self) -> Product<'a, T> {
        Product { b_transposed: true, ..self }
    }
}

/// The left-hand side as tiles read it: groups of GROUP rows, `group` elements apart; inside a
/// group, element (i, p) lies at `i * row + p * column`. One of `row` and `column` is 1.
#[derive(Clone, Copy)]
pub(super) struct Left<T> {
    pub at: *const T,
    pub group: usize,
    pub row: usize,
    pub column: usize,
}

impl<T> Left<T> {
    /// A matrix whose rows are contiguous, `row` elements apart.
    pub fn rows(at: *const T, row: usize) -> Self {
        Left { at, group: GROUP * row, row, column: 1 }
    }

    /// A matrix stored transposed: element (i, p) lies at `i + p * column`.
    pub fn columns(at: *const T, column: usize) -> Self {
        Left { at, group: GROUP, row: 1, column }
    }

    /// Packed groups of GROUP rows over `depth`, each group one contiguous [depth, GROUP].
    fn packed(at: *const T, depth: usize) -> Self {
        Left { at, group: GROUP * depth, row: 1, column: GROUP }
    }
}

/// Which part of k counts for row i of the result, where the rest of a's row i is zero.
#[derive(Clone, Copy)]
pub(super) enum Depth {
    /// All of it.
    Whole,
    /// 0 ..= i + this.
    To(usize),
    /// i − this .. k.
    From(usize),
}

impl Depth {
    /// The part that counts for any of rows `i..i + rows`.
    fn of(self, i: usize, rows: usize, k: usize) -> Range<usize> {
        match self {
            Depth::Whole => 0..k,
            Depth::To(shift) => 0..k.min(i + rows + shift),
            Depth::From(shift) => k.min(i.saturating_sub(shift))..k,
        }
    }
}

/// Where tiles are written, and what is added to them. Null pointers add nothing.
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
    /// A plain result whose rows are `row` elements apart.
    pub fn new(at: *mut O, row: usize, accumulate: bool) -> Self {
        Target { at, row, accumulate, bias: std::ptr::null(), residual: std::ptr::null(), scale: 1.0 }
    }

    /// The same from (i, j) on.
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

/// An M × (N vectors) tile of the result over all of `k`, `columns` of it valid: all N · LANES,
/// or, for N = 1 and PART, fewer. ROWS: the left-hand rows are contiguous (`stride` apart), else
/// its columns are.
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
    // Pass by pass, so that every loop is small enough to unroll and the sums stay in registers.
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
        let scale = V::splat(T::of(target.scale));
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

/// All rows of one panel of columns.
///
/// # Safety
/// As `tile`, for m rows.
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
            let at = a.at.add(i / GROUP * a.group + i % GROUP * a.row);
            let to = target.from(i, 0);
            macro_rules! rows {
                ($M:expr) => {{
                    let part = depth.of(i, $M, k);
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
                4..GROUP => rows!(4),
                _ => rows!(GROUP),
            };
        }
    }
}

vectorised! {
    /// `target[m, n]` = a · b on this thread, nothing packed; b is [k, n] with rows `b_row` apart;
    /// of row i of the result, only `depth` of k.
    ///
    /// The pointers must be good for these shapes: a for m × k, b for k × n, the target for m × n,
    /// and nobody else may write b, a or the target meanwhile.
    pub(super) fn small_product<T: Float, V, B>(m: usize, n: usize, k: usize, depth: Depth, a: Left<T>, b: *const B, b_row: usize, target: Target<T>) {
        let mut j = 0;
        while j < n {
            // As wide a tile as fits: PANEL vectors, two, or one in part.
            let vectors = (n - j) / V::LANES;
            // SAFETY: columns j.. of b and of the target, inside both by the contract.
            unsafe {
                let from = b.add(j);
                let to = target.from(0, j);
                if V::PANEL == 4 && vectors >= 4 {
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

vectorised! {
    /// How many columns a register tile has.
    fn panel_columns<T: Float, V>(_of: &[T]) -> usize {
        V::PANEL * V::LANES
    }
}

/// out = a · b as `product` says, the sums in the wide type, each rounded once to the result's: that of the operands,
/// or the wide one, as gradients of weights are. `scratch` has `workspace::cpu::product` elements.
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

/// `product` of f32 or f64, with packing.
pub(super) fn float<T: Float, O: Real<Wide = T>>(pool: &Pool, p: Product<T>, out: &mut [O], scratch: &mut [T]) {
    assert!(O::IS_WIDE, "the product of {0} is {0}", T::DTYPE);
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let Product { m, n, k, .. } = p;
    let depth = workspace::cpu::product_depth(k as u64) as usize;
    let rows = m.min(PRODUCT_ROWS as usize);
    let left_size = rows.next_multiple_of(GROUP) * depth;
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
        scale: p.scale.wide(),
    };
    let target = Sendable(target);

    let row_tasks = m.div_ceil(rows);
    for first in (0..n).step_by(columns) {
        let panels = (n - first).min(columns).div_ceil(wide);
        // Few rows: share out the columns, too.
        let column_tasks = (4 * pool.threads()).div_ceil(row_tasks).min(panels);
        let panels_each = panels.div_ceil(column_tasks);
        // A product over nothing is one slice of no depth: the epilogue must still be written.
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
                    // SAFETY: each lane has its own part.
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

/// Lets tasks share a target whose disjoint parts they write.
struct Sendable<T>(Target<T>);
// SAFETY: the pointers come from borrows that outlive the parallel region; tasks write disjoint
// parts of the target and only read the others.
unsafe impl<T: Sync> Sync for Sendable<T> {}
impl<T> Sendable<T> {
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

/// Packs `rows` × `slice` of a transposed a as groups [slice, GROUP].
fn pack_left<T: Float>(p: &Product<T>, slice: Range<usize>, rows: Range<usize>, block: &mut [T]) {
    let depth = slice.len();
    let a_row = |row: usize| &p.a[row * p.a_row..][..p.m];
    // A few rows of a at a time: their cache lines serve several groups, and so few fit into one
    // set of the cache even where rows are a multiple of its size apart.
    for from in slice.clone().step_by(8) {
        for (group, row) in rows.clone().step_by(GROUP).enumerate() {
            for q in from..slice.end.min(from + 8) {
                let to = &mut block[(group * depth + q - slice.start) * GROUP..][..GROUP];
                let values = &a_row(q)[row..];
                // The same place in the next few rows: strides of whole pages are nobody else's to foresee.
                prefetch(values.as_ptr().wrapping_add(8 * p.a_row));
                if row + GROUP <= rows.end {
                    to.copy_from_slice(&values[..GROUP]);
                } else {
                    to[..rows.end - row].copy_from_slice(&values[..rows.end - row]);
                }
            }
        }
    }
}

/// A product with few rows reads b once, as it lies: one dot product per element.
fn few_rows<T: Real, O: Real<Wide = T::Wide>>(pool: &Pool, p: Product<T>, out: &mut [O]) {
    let Product { m, n, k, .. } = p;
    let shared = Shared::new(out);
    // At least 64 Ki multiplications a task.
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
        vectorised! {
            /// See `dot_tile`.
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

/// `sums[i][j] = a[i] · b[j]` for M rows of a, `a_row` apart, and `rows` (up to 4) of b, `b_row` apart, all of length k.
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
