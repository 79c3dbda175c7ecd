//! Embedding lookup and its gradient.

use super::simd::{Real, get, put, strips, vectorized};
use crate::cpu::pool::{Pool, Shared};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 16384;
/// Number of columns of the embedding table whose gradient one task computes.
const STRIP: usize = 64;

/// Computes `out[N, D]` = `scale` · the rows of `table[V, D]` selected by `tokens`.
pub fn embed<T: Real>(pool: &Pool, tokens: &[i32], table: &[T], hidden: usize, scale: f64, out: &mut [T]) {
    let out = Shared::new(&mut out[..tokens.len() * hidden]);
    pool.split(tokens.len(), MIN_TASK_ELEMENTS.div_ceil(hidden.max(1)), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let to = unsafe { out.part(row * hidden..(row + 1) * hidden) };
            write_scaled(&table[tokens[row] as usize * hidden..][..hidden], T::Wide::from_f64(scale), to);
        }
    });
}

/// Adds `scale` · each row of `dout[N, D]` to the row of `dtable[V, D]` of its token. A task owns columns and processes
/// the tokens in order, so the sums do not depend on the threads.
pub fn embed_grad<T: Real>(pool: &Pool, tokens: &[i32], dout: &[T], hidden: usize, scale: f64, dtable: &mut [T::Wide]) {
    let vocab = dtable.len() / hidden.max(1);
    let table = Shared::new(dtable);
    pool.run(hidden.div_ceil(STRIP), |task, _| {
        let columns = task * STRIP..hidden.min((task + 1) * STRIP);
        for (row, &token) in tokens.iter().enumerate() {
            let token = token as usize;
            assert!(token < vocab, "token {token} of {vocab}");
            // SAFETY: tasks have disjoint columns.
            let to = unsafe { table.part(token * hidden + columns.start..token * hidden + columns.end) };
            add_scaled(to, &dout[row * hidden..][columns.clone()], T::Wide::from_f64(scale));
        }
    });
}

vectorized! {
    /// Computes `to` = `scale` · `x`, element by element.
    fn write_scaled<T, V>(x: &[T], scale: T::Wide, to: &mut [T]) {
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            put(to, at, count, get::<T, V>(x, at, count) * V::splat(scale));
        });
    }
}

vectorized! {
    /// Computes `into` += `scale` · `x`, element by element.
    fn add_scaled<T, V>(into: &mut [T::Wide], x: &[T], scale: T::Wide) {
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let sum = get::<T, V>(x, at, count).mul_add(V::splat(scale), get::<T::Wide, V>(into, at, count));
            put(into, at, count, sum);
        });
    }
}

vectorized! {
    /// Computes `into` += `x`, element by element.
    pub(super) fn add_to<T: Real, V, X>(into: &mut [T], x: &[X]) {
        strips::<T, V>(into.len(), #[inline(always)] |at, count| {
            let sum = get::<T, V>(into, at, count) + get::<X, V>(x, at, count);
            put(into, at, count, sum);
        });
    }
}
