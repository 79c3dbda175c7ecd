//! Elementwise ops (add, copy, fill, round) and sums over rows.

use super::embed::add_to;
use super::simd::{Float, Real, get, put, strips, vectorized};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::workspace;
use std::ops::Range;

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 16384;

/// Computes `into += x`, element by element; both have the same length.
pub fn add<T: Real, I: Real<Wide = T::Wide>>(pool: &Pool, x: &[T], into: &mut [I]) {
    assert_eq!(x.len(), into.len());
    let shared = Shared::new(into);
    pool.split(x.len(), MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        add_to(unsafe { shared.part(range.clone()) }, &x[range]);
    });
}

/// Copies `from` to `to`, which has the same length.
pub fn copy<T: Copy + Send + Sync>(pool: &Pool, from: &[T], to: &mut [T]) {
    assert_eq!(from.len(), to.len());
    let shared = Shared::new(to);
    pool.split(from.len(), MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        unsafe { shared.part(range.clone()) }.copy_from_slice(&from[range]);
    });
}

/// Sets all elements to `value`.
pub fn fill<T: Copy + Send + Sync>(pool: &Pool, value: T, to: &mut [T]) {
    let total = to.len();
    let shared = Shared::new(to);
    pool.split(total, MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        unsafe { shared.part(range) }.fill(value);
    });
}

/// Computes `into[n]` += the sum of the rows of `x[m, n]`. `scratch` has `workspace::cpu::sum_rows` elements.
pub fn sum_rows<T: Real>(
    pool: &Pool,
    rows: usize,
    columns: usize,
    x: &[T],
    into: &mut [T::Wide],
    scratch: &mut [T::Wide],
) {
    assert!(x.len() >= rows * columns && into.len() == columns);
    let sums = partial_sums(pool, rows, columns, scratch, |range, sum| {
        for row in range {
            add_to(sum, &x[row * columns..][..columns]);
        }
    });
    for sum in scratch[..sums * columns].chunks_exact(columns.max(1)) {
        add_to(into, sum);
    }
}

/// Sums rows in portions that do not depend on the number of threads. For each portion, `work(rows, sum)` adds these
/// rows to a zeroed `sum[width]`.
///
/// The sums lie one after the other at the beginning of `scratch`, which has `workspace::cpu::sum_rows(rows, width)`
/// elements. Returns their number. The caller adds them in order.
pub(super) fn partial_sums<T: Float>(
    pool: &Pool,
    rows: usize,
    width: usize,
    scratch: &mut [T],
    work: impl Fn(Range<usize>, &mut [T]) + Sync,
) -> usize {
    let each = workspace::cpu::rows_per_sum(rows as u64) as usize;
    let portions = rows.div_ceil(each);
    let shared = Shared::new(&mut scratch[..portions * width]);
    pool.run(portions, |portion, _| {
        // SAFETY: portions have disjoint sums.
        let sum = unsafe { shared.part(portion * width..(portion + 1) * width) };
        sum.fill(T::ZERO);
        work(portion * each..rows.min((portion + 1) * each), sum);
    });
    portions
}

/// Rounds `from` to nearest even into `to`.
pub fn round<T: Real>(pool: &Pool, from: &[T::Wide], to: &mut [T]) {
    assert_eq!(from.len(), to.len());
    let shared = Shared::new(to);
    pool.split(from.len(), MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        round_to(&from[range.clone()], unsafe { shared.part(range) });
    });
}

vectorized! {
    /// Rounds `from` to nearest even into `to`, on this thread.
    pub(super) fn round_to<T, V>(from: &[T::Wide], to: &mut [T]) {
        strips::<T, V>(from.len(), #[inline(always)] |at, count| {
            put(to, at, count, get::<T::Wide, V>(from, at, count));
        });
    }
}
