//! Smooth limits of scores and logits: c · tanh(x / c).

use super::simd::{Float, Real, Vector, get, put, strips, vectorized};
use crate::cpu::pool::{Pool, Shared};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 8192;

/// Limits all elements of `x` to ±`cap`: x = cap · tanh(x / cap).
pub fn soft_cap<T: Real>(pool: &Pool, cap: f64, x: &mut [T]) {
    let elements = x.len();
    let x = Shared::new(x);
    pool.split(elements, MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        cap_scaled(unsafe { x.part(range) }, T::Wide::ONE, T::Wide::from_f64(cap));
    });
}

vectorized! {
    /// Replaces each x by cap · tanh(scale · x / cap).
    pub(super) fn cap_scaled<T, V>(x: &mut [T], scale: T::Wide, cap: T::Wide) {
        let (factor, cap) = (V::splat(scale / cap), V::splat(cap));
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            put(x, at, count, cap * tanh::<T::Wide, V>(get::<T, V>(x, at, count) * factor));
        });
    }
}

/// Returns the derivative of a cap, from `capped`, the limited number: 1 − (capped / cap)². It is 0 for −∞, which stands
/// for a hidden score.
#[inline(always)]
pub(super) fn cap_slope<T: Float, V: Vector<T>>(capped: V, inverse_cap: V) -> V {
    let ratio = capped * inverse_cap;
    (V::splat(T::ONE) - ratio * ratio).max(V::splat(T::ZERO))
}

/// Returns the hyperbolic tangent of each lane. Up to ½, where 1 − 2 / (e^2x + 1) cancels, it is Lambert's continued
/// fraction with seven terms, whose error is below 1e-15.
#[inline(always)]
fn tanh<T: Float, V: Vector<T>>(x: V) -> V {
    let number = |value: f64| V::splat(T::from_f64(value));
    let (one, square) = (number(1.0), x * x);
    let numerator = (square + number(378.0)).mul_add(square, number(17_325.0)).mul_add(square, number(135_135.0));
    let denominator = square.mul_add(number(28.0), number(3150.0)).mul_add(square, number(62_370.0));
    let near = x * numerator / denominator.mul_add(square, number(135_135.0));
    let far = one - number(2.0) / ((x + x).exp() + one);
    square.select_le(number(0.25), near, far)
}
