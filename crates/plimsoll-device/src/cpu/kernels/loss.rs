//! Cross entropy of rows of logits, one block of columns after another: softmax statistics of each row, the loss, and the gradient
//! in place.
//!
//! `nll = ln Σ e^(x − max) + max − x[label]`; d nll / dx = softmax(x) − onehot(label). The maximum and the sum are carried
//! from block to block (Milakov and Gimelshein, "Online normalizer calculation for softmax"). Exponentials are
//! computed twice, for the sum and for the gradient, so nothing is rounded in between.

use super::simd::{Float, Real, get, get_or, put, strips, vectorized};
use super::softcap::cap_slope;
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::op::SOFTMAX_STATS;

/// Label of rows that do not count in the loss.
pub const IGNORED: i32 = -100;
/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 8192;
/// Number of softmax statistics per row.
const STATS: usize = SOFTMAX_STATS as usize;

/// Labels and loss weights of R rows, for a block of columns of their logits. Rows with label −100 or weight 0 do not
/// count in the loss.
#[derive(Clone, Copy)]
pub struct LabelledRows<'a, T> {
    /// Label of each row, `[R]`: an id in the whole vocabulary, or −100.
    pub labels: &'a [i32],
    /// Loss weight of each row, `[R]`.
    pub weights: &'a [T],
    /// Id of the token to which the first column of the block belongs.
    pub first: usize,
    /// Number of columns of the block, one per token of the vocabulary.
    pub columns: usize,
}

impl<T: Float> LabelledRows<'_, T> {
    fn counts(&self, row: usize) -> bool {
        self.labels[row] != IGNORED && self.weights[row] != T::ZERO
    }

    /// Returns the column in the block that is the label of this row; `None` if the label is −100 or in another block.
    fn column(&self, row: usize) -> Option<usize> {
        let column = usize::try_from(self.labels[row]).ok()?.checked_sub(self.first)?;
        (column < self.columns).then_some(column)
    }

    /// Calls `work(row)` once for each row, spread over the pool.
    fn split(&self, pool: &Pool, work: impl Fn(usize) + Sync) {
        assert_eq!(self.labels.len(), self.weights.len());
        pool.split(self.labels.len(), MIN_TASK_ELEMENTS.div_ceil(self.columns.max(1)), |range, _| {
            range.for_each(&work)
        });
    }
}

/// Updates `stats[R, 4]` with `logits[R, columns]`, as defined by
/// [`SoftmaxStats`](plimsoll_program::OpKind::SoftmaxStats). `begin` marks the first block of columns, which overwrites
/// `stats`.
pub fn softmax_stats<T: Real>(
    pool: &Pool,
    of: LabelledRows<T::Wide>,
    logits: &[T],
    stats: &mut [T::Wide],
    begin: bool,
) {
    let columns = of.columns;
    assert_eq!((logits.len(), stats.len()), (of.labels.len() * columns, of.labels.len() * STATS));
    let shared = Shared::new(stats);
    of.split(pool, |row| {
        // SAFETY: `split` calls `work` once for each row.
        let stats = unsafe { shared.part(row * STATS..(row + 1) * STATS) };
        if begin {
            let (zero, one) = (T::Wide::ZERO, T::Wide::ONE);
            stats.copy_from_slice(&match of.counts(row) {
                true => [T::Wide::MINUS_INFINITY, zero, T::Wide::from_f64(f64::NAN), zero],
                false => [zero, one, zero, zero],
            });
        }
        if !of.counts(row) {
            return;
        }
        let logits = &logits[row * columns..(row + 1) * columns];
        let (label, here) = (of.column(row), largest(logits));
        let before = stats[0];
        if let Some(label) = label {
            stats[2] = logits[label].widen();
        }
        // The first of equal logits counts, and earlier blocks come first.
        if begin || here > before {
            stats[3] = T::Wide::from_f64(f64::from(u8::from(
                label.is_some_and(|label| is_first_maximum(logits, label, here)),
            )));
        }
        let most = if here > before { here } else { before };
        let sum = exp_sum(logits, most);
        stats[1] = if begin { sum } else { stats[1] * (before - most).exp() + sum };
        stats[0] = most;
    });
}

/// Returns the loss sum Σ weight · nll over all rows, where nll is the negative log-likelihood of a row's label.
/// `stats[R, 4]` are those of the whole vocabulary. Sets `correct[R]` to 1 where the label has the largest logit (the
/// first of equals), else to 0. Sets `log_probabilities[R]` to −nll, and to 0 in rows with label −100 or weight 0.
/// `None` skips an output.
pub fn cross_entropy<T: Float>(
    stats: &[T],
    labels: &[i32],
    weights: &[T],
    mut correct: Option<&mut [i32]>,
    mut log_probabilities: Option<&mut [T]>,
) -> f64 {
    let mut sum = 0.0;
    for (row, stats) in stats.chunks_exact(STATS).enumerate() {
        let counts = labels[row] != IGNORED && weights[row] != T::ZERO;
        let nll = if counts { stats[1].ln() + stats[0] - stats[2] } else { T::ZERO };
        sum += nll.to_f64() * weights[row].to_f64();
        if let Some(log_probabilities) = &mut log_probabilities {
            log_probabilities[row] = T::ZERO - nll;
        }
        if let Some(correct) = &mut correct {
            correct[row] = i32::from(counts && stats[3] != T::ZERO);
        }
    }
    sum
}

/// Replaces `logits[R, columns]` by the gradient of `scale` times the loss sum. `stats[R, 4]` are those of the whole
/// vocabulary. Rows with label −100 or weight 0 become exact zeros. Logits that `soft_cap` limited to ±`softcap` are
/// replaced by the gradient of its input.
pub fn softmax_grad<T: Real>(
    pool: &Pool,
    of: LabelledRows<T::Wide>,
    logits: &mut [T],
    stats: &[T::Wide],
    scale: T::Wide,
    softcap: Option<f64>,
) {
    let columns = of.columns;
    let inverse_cap = T::Wide::from_f64(softcap.map_or(0.0, f64::recip));
    assert_eq!((logits.len(), stats.len()), (of.labels.len() * columns, of.labels.len() * STATS));
    let shared = Shared::new(logits);
    of.split(pool, |row| {
        // SAFETY: `split` calls `work` once for each row.
        let logits = unsafe { shared.part(row * columns..(row + 1) * columns) };
        if !of.counts(row) {
            logits.fill(T::ZERO);
            return;
        }
        let stats = &stats[row * STATS..(row + 1) * STATS];
        let scale = of.weights[row] * scale;
        let (largest, factor) = (stats[0], scale / stats[1]);
        let own = of.column(row).map(|label| (label, logits[label].widen()));
        gradients(logits, largest, factor, T::Wide::ZERO, inverse_cap);
        if let Some((label, own)) = own {
            // Computed separately, so that it is rounded once.
            let mut label_alone = [own];
            gradients(&mut label_alone, largest, factor, scale, inverse_cap);
            logits[label] = T::narrow(label_alone[0]);
        }
    });
}

/// Returns whether the logit of `label` equals `largest`, the largest of the row, and no earlier one does.
fn is_first_maximum<T: Real>(logits: &[T], label: usize, largest: T::Wide) -> bool {
    logits[label].widen() == largest && !logits[..label].iter().any(|logit| logit.widen() == largest)
}

vectorized! {
    fn largest<T, V>(x: &[T]) -> T::Wide {
        let least = V::splat(T::Wide::MINUS_INFINITY);
        let mut most = [least; 4];
        let mut turn = 0;
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            most[turn % 4] = get_or(x, at, count, least).max(most[turn % 4]);
            turn += 1;
        });
        most[0].max(most[1]).max(most[2].max(most[3])).max_lane()
    }
}

vectorized! {
    /// Returns Σ e^(x − shift).
    fn exp_sum<T, V>(x: &[T], shift: T::Wide) -> T::Wide {
        let (shift, nothing) = (V::splat(shift), V::splat(T::Wide::MINUS_INFINITY));
        let mut sum = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            sum = sum + (get_or(x, at, count, nothing) - shift).exp();
        });
        sum.sum()
    }
}

vectorized! {
    /// Replaces each x by (e^(x − shift) · factor − less) · (1 − (x · inverse_cap)²).
    fn gradients<T, V>(x: &mut [T], shift: T::Wide, factor: T::Wide, less: T::Wide, inverse_cap: T::Wide) {
        let [shift, factor, less, inverse_cap] = [shift, factor, less, inverse_cap].map(V::splat);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let logit = get::<T, V>(x, at, count);
            let gradient = (logit - shift).exp() * factor - less;
            put(x, at, count, gradient * cap_slope::<T::Wide, V>(logit, inverse_cap));
        });
    }
}
