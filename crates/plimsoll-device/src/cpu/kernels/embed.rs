//! Rows of the embedding table, and their gradient.

use super::simd::{Real, get, put, strips, vectorised};
use crate::cpu::pool::{Pool, Shared};

/// Elements below which a task is not worth sharing out.
const LEAST: usize = 16384;
/// Columns that one task of the gradient owns.
const STRIP: usize = 64;

/// `out[N, D]` = the rows of `table[V, D]` that `tokens` name.
pub fn embed<T: Real>(pool: &Pool, tokens: &[i32], table: &[T], hidden: usize, out: &mut [T]) {
    let out = Shared::new(&mut out[..tokens.len() * hidden]);
    pool.split(tokens.len(), LEAST.div_ceil(hidden.max(1)), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let to = unsafe { out.part(row * hidden..(row + 1) * hidden) };
            to.copy_from_slice(&table[tokens[row] as usize * hidden..][..hidden]);
        }
    });
}

/// `dtable[V, D]` += the rows of `dout[N, D]`, each where its token points. A task owns columns and
/// takes the tokens in order, so that the sum never depends on the threads.
pub fn embed_grad<T: Real>(pool: &Pool, tokens: &[i32], dout: &[T], hidden: usize, dtable: &mut [T::Wide]) {
    let vocab = dtable.len() / hidden.max(1);
    let table = Shared::new(dtable);
    pool.run(hidden.div_ceil(STRIP), |task, _| {
        let columns = task * STRIP..hidden.min((task + 1) * STRIP);
        for (row, &token) in tokens.iter().enumerate() {
            let token = token as usize;
            assert!(token < vocab, "token {token} of {vocab}");
            // SAFETY: each task has columns of its own.
            let to = unsafe { table.part(token * hidden + columns.start..token * hidden + columns.end) };
            add_to(to, &dout[row * hidden..][columns.clone()]);
        }
    });
}

vectorised! {
    /// into += x
    pub(super) fn add_to<T: Real, V, X>(into: &mut [T], x: &[X]) {
        strips::<T, V>(into.len(), #[inline(always)] |at, count| {
            let sum = get::<T, V>(into, at, count) + get::<X, V>(x, at, count);
            put(into, at, count, sum);
        });
    }
}
