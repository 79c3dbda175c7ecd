//! Cross entropy over rows of logits, with its gradient in place.
//!
//! `nll = ln Σ e^(x − max) + max − x[label]`; d nll / dx = softmax(x) − onehot(label). Exponentials are taken twice,
//! for the sum and for the gradient: nothing is rounded in between.

use super::simd::{Float, Real, get, get_or, put, strips, vectorised};
use crate::cpu::pool::{Pool, Shared};

/// The label of a row that does not count.
pub const IGNORED: i32 = -100;
/// Elements below which a task is not worth sharing out.
const LEAST: usize = 8192;

/// Σ weight · nll over the rows of `logits[R, V]`. A row with label −100 or weight 0 does not count.
/// `correct[R]`, if asked for, is 1 where the largest logit (the first of equals) is the label's.
/// `scratch` has an element for each row.
pub fn cross_entropy<T: Real>(
    pool: &Pool,
    vocab: usize,
    logits: &[T],
    labels: &[i32],
    weights: &[T::Wide],
    correct: Option<&mut [i32]>,
    scratch: &mut [T::Wide],
) -> f64 {
    assert_eq!(logits.len(), labels.len() * vocab);
    rows(pool, vocab, labels, weights, correct, scratch, |row, label, _| {
        let logits = &logits[row * vocab..(row + 1) * vocab];
        label.map_or((T::Wide::ZERO, false), |label| {
            let largest = largest(logits);
            (exp_sum(logits, largest).ln() + largest - logits[label].widen(), is_first(logits, label, largest))
        })
    })
}

/// As `cross_entropy`, turning logits into the gradient of `scale` times the sum: rows that do not
/// count become exact zeros.
pub fn cross_entropy_grad<T: Real>(
    pool: &Pool,
    vocab: usize,
    logits: &mut [T],
    labels: &[i32],
    weights: &[T::Wide],
    scale: T::Wide,
    correct: Option<&mut [i32]>,
    scratch: &mut [T::Wide],
) -> f64 {
    assert_eq!(logits.len(), labels.len() * vocab);
    let logits = Shared::new(logits);
    rows(pool, vocab, labels, weights, correct, scratch, |row, label, weight| {
        // SAFETY: `rows` calls once for each row.
        let logits = unsafe { logits.part(row * vocab..(row + 1) * vocab) };
        let Some(label) = label else {
            logits.fill(T::ZERO);
            return (T::Wide::ZERO, false);
        };
        let largest = largest(logits);
        let own = logits[label].widen();
        let correct = is_first(logits, label, largest);
        let sum = exp_sum(logits, largest);
        let scale = weight * scale;
        let factor = scale / sum;
        probabilities(logits, largest, factor);
        // By itself, so that it is rounded once.
        let mut label_alone = [own];
        probabilities(&mut label_alone, largest, factor);
        logits[label] = T::narrow(label_alone[0] - scale);
        (sum.ln() + largest - own, correct)
    })
}

/// Calls `loss(row, label, weight)` for each row (no label: does not count) and sums up.
fn rows<T: Float>(
    pool: &Pool,
    vocab: usize,
    labels: &[i32],
    weights: &[T],
    correct: Option<&mut [i32]>,
    scratch: &mut [T],
    loss: impl Fn(usize, Option<usize>, T) -> (T, bool) + Sync,
) -> f64 {
    assert_eq!(labels.len(), weights.len());
    assert!(correct.as_ref().is_none_or(|correct| correct.len() == labels.len()));
    let losses = &mut scratch[..labels.len()];
    let (shared, correct) = (Shared::new(&mut *losses), correct.map(Shared::new));
    pool.split(labels.len(), LEAST.div_ceil(vocab.max(1)), |range, _| {
        for row in range {
            let counts = labels[row] != IGNORED && weights[row] != T::ZERO;
            let (nll, hit) = loss(row, counts.then_some(labels[row] as usize), weights[row]);
            // SAFETY: rows of one split are disjoint.
            unsafe {
                shared.part(row..row + 1)[0] = nll;
                if let Some(correct) = &correct {
                    correct.part(row..row + 1)[0] = i32::from(hit);
                }
            }
        }
    });
    losses.iter().zip(weights).map(|(nll, weight)| nll.wide() * weight.wide()).sum()
}

/// Whether the logit of `label` is the largest, and no earlier one is as large.
fn is_first<T: Real>(logits: &[T], label: usize, largest: T::Wide) -> bool {
    logits[label].widen() == largest && !logits[..label].iter().any(|logit| logit.widen() == largest)
}

vectorised! {
    fn largest<T, V>(x: &[T]) -> T::Wide {
        let least = V::splat(T::Wide::MINUS_INFINITY);
        let mut most = [least; 4];
        let mut turn = 0;
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            most[turn % 4] = get_or(x, at, count, least).max(most[turn % 4]);
            turn += 1;
        });
        most[0].max(most[1]).max(most[2].max(most[3])).largest()
    }
}

vectorised! {
    /// Σ e^(x − shift)
    fn exp_sum<T, V>(x: &[T], shift: T::Wide) -> T::Wide {
        let (shift, nothing) = (V::splat(shift), V::splat(T::Wide::MINUS_INFINITY));
        let mut sum = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            sum = sum + (get_or(x, at, count, nothing) - shift).exp();
        });
        sum.sum()
    }
}

vectorised! {
    /// x = e^(x − shift) · factor
    fn probabilities<T, V>(x: &mut [T], shift: T::Wide, factor: T::Wide) {
        let (shift, factor) = (V::splat(shift), V::splat(factor));
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            put(x, at, count, (get::<T, V>(x, at, count) - shift).exp() * factor);
        });
    }
}
