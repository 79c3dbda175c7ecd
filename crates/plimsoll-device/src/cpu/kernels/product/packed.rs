//! Products of f32 and f64 with a packed right-hand side, and operands of attention in these types.
//!
//! The right-hand side is packed, slice by slice, into panels as wide as a register tile. Then tasks of rows × panels
//! run through `small_product`.

use super::tiles::{Depth, Left, SharedPointers, Target, small_product};
use super::{GROUP_ROWS, Product, QUERIES};
use crate::cpu::kernels::simd::{Float, Real, prefetch, transpose, vectorized};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::workspace;
use plimsoll_program::workspace::cpu::{PRODUCT_COLUMNS, PRODUCT_ROWS};
use std::ops::Range;

vectorized! {
    /// Returns the number of columns of a register tile, the part of a result that is summed in registers. `_of` only
    /// gives the type.
    fn panel_columns<T: Float, V>(_of: &[T]) -> usize {
        V::PANEL_VECTORS * V::LANES
    }
}

/// Implements `Multiply::packed_product` for f32 and f64.
pub fn packed_product<T: Float, O: Real<Wide = T>>(pool: &Pool, p: Product<T>, out: &mut [O], scratch: &mut [T]) {
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
    let target = SharedPointers(target);

    if m <= rows {
        return few_panels(pool, &p, (depth, wide), right, left, &target);
    }
    let row_tasks = m.div_ceil(rows);
    for first in (0..n).step_by(columns) {
        let panels = (n - first).min(columns).div_ceil(wide);
        // With few tasks of rows, the columns are distributed as well.
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

/// Computes a product whose rows make one task. No panel of the right operand serves two tasks, so each task packs a panel
/// into its own part of `right`, and multiplies while the panel is in a cache of the core. The sums are those of the general
/// case, in the same order.
fn few_panels<T: Float>(
    pool: &Pool,
    p: &Product<T>,
    (depth, wide): (usize, usize),
    right: &mut [T],
    left: Shared<T>,
    target: &SharedPointers<Target<T>>,
) {
    let Product { m, n, k, .. } = *p;
    let panels = n.div_ceil(wide);
    let tasks = (4 * pool.threads()).min(panels).min(right.len() / (wide * depth));
    let panels_each = panels.div_ceil(tasks);
    let left_size = m.next_multiple_of(GROUP_ROWS) * depth;
    let right = Shared::new(right);
    pool.run(tasks, |task, lane| {
        // SAFETY: each task has a part.
        let panel = unsafe { right.part(task * wide * depth..(task + 1) * wide * depth) };
        let mine = task * panels_each..panels.min((task + 1) * panels_each);
        // With k = 0 there is one empty slice, because the epilogue must still run.
        let slices = || (0..k.max(1)).step_by(depth).map(|from| from..k.min(from + depth));
        if p.a_transposed {
            for slice in slices() {
                // SAFETY: lanes have disjoint parts.
                let block = unsafe { left.part(lane * left_size..(lane + 1) * left_size) };
                pack_left(p, slice.clone(), 0..m, block);
                for index in mine.clone() {
                    let a = Left::packed(block.as_ptr(), slice.len());
                    multiply_panel(p, slice.clone(), a, index * wide, wide, panel, target.get());
                }
            }
        } else {
            // All of a panel before the next one: rows of the right operand are read from their beginning to their end.
            for index in mine {
                for slice in slices() {
                    let a = Left::rows(p.a[slice.start..].as_ptr(), p.a_row);
                    multiply_panel(p, slice, a, index * wide, wide, panel, target.get());
                }
            }
        }
    });
}

/// Packs a slice of the columns from `column` on into `panel`, and multiplies all rows by it. No other task may write to
/// these columns of the target.
fn multiply_panel<T: Float>(
    p: &Product<T>,
    slice: Range<usize>,
    a: Left<T>,
    column: usize,
    wide: usize,
    panel: &mut [T],
    target: Target<T>,
) {
    let columns = column..p.n.min(column + wide);
    pack_right(p, slice.clone(), columns.clone(), wide, panel);
    // SAFETY: (0, column) is inside the output.
    let mut to = unsafe { target.from(0, column) };
    if slice.start > 0 {
        to = Target { scale: to.scale, ..Target::new(to.at, to.row, true) };
    }
    small_product(p.m, columns.len(), slice.len(), Depth::Whole, a, panel.as_ptr(), wide, to);
}

/// Copies the rows `slice` and the columns `columns` of the right operand into `panel`, row by row. A row of the panel
/// has `wide` elements; those after the last column are padding.
fn pack_right<T: Float>(p: &Product<T>, slice: Range<usize>, columns: Range<usize>, wide: usize, panel: &mut [T]) {
    if p.b_transposed {
        transpose(&p.b[columns.start * p.k + slice.start..], p.k, columns.len(), slice.len(), T::ONE, panel, wide);
    } else {
        for (row, to) in slice.zip(panel.chunks_exact_mut(wide)) {
            to[..columns.len()].copy_from_slice(&p.b[row * p.n..][columns.clone()]);
        }
    }
}

/// Packs the part `rows` × `slice` of a left operand, which is stored transposed. `block` gets one contiguous [slice,
/// GROUP_ROWS] per group of GROUP_ROWS rows.
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

/// Implements `Multiply::pack_right_operand` for f32 and f64 by a transposition.
pub fn pack_right_operand<T: Float>(from: &[T], row: usize, count: usize, head: usize, scale: T, to: &mut [T]) {
    if count < QUERIES {
        to.fill(T::ZERO);
    }
    transpose(from, row, count, head, scale, to, QUERIES);
}

/// Implements `Multiply::score` for f32 and f64.
pub fn score<T: Float>(m: usize, n: usize, k: usize, a: *const T, row: usize, right: *const T, to: Target<T>) {
    small_product(m, n, k, Depth::Whole, Left::rows(a, row), right, QUERIES, to);
}
