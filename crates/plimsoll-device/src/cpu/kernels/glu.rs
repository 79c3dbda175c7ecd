//! The gated unit of the feed-forward layer (SwiGLU, GeGLU): activation(gate) · up, and its gradient.
//!
//! An activation is x · s(v) with s(v) = 1 / (1 + e^−v) and v = a · x + b · x³ ([`Activation::coefficients`]).

use super::Activation;
use super::simd::{Float, Real, Vector, get, put, strips, vectorized};
use crate::cpu::pool::{Pool, Shared};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 4096;

/// Computes `out[N, F]` = activation(gate) · up. Each row of `gate_up[N, 2F]` holds F values of gate, then F of up.
pub fn glu<T: Real>(pool: &Pool, activation: Activation, ffn: usize, gate_up: &[T], out: &mut [T]) {
    let (rows, coefficients) = (out.len() / ffn, activation.coefficients().map(T::Wide::from_f64));
    assert!(out.len() == rows * ffn && gate_up.len() == 2 * out.len());
    let out = Shared::new(out);
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(ffn), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let out = unsafe { out.part(row * ffn..(row + 1) * ffn) };
            forward(&gate_up[2 * row * ffn..2 * (row + 1) * ffn], coefficients, out);
        }
    });
}

/// Computes `dgate_up[N, 2F]`, the gradient of the input of `glu`, from its input `gate_up[N, 2F]` and `dout[N, F]`.
pub fn glu_grad<T: Real>(
    pool: &Pool,
    activation: Activation,
    ffn: usize,
    gate_up: &[T],
    dout: &[T],
    dgate_up: &mut [T],
) {
    let (rows, coefficients) = (dout.len() / ffn, activation.coefficients().map(T::Wide::from_f64));
    assert!(dout.len() == rows * ffn && gate_up.len() == 2 * dout.len() && dgate_up.len() == 2 * dout.len());
    let dgate_up = Shared::new(dgate_up);
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(ffn), |range, _| {
        for row in range {
            let both = 2 * row * ffn..2 * (row + 1) * ffn;
            // SAFETY: rows of one split are disjoint.
            let d = unsafe { dgate_up.part(both.clone()) };
            backward(&gate_up[both], coefficients, &dout[row * ffn..(row + 1) * ffn], d);
        }
    });
}

/// Overwrites `gate_up[N, 2F]`, the input of `glu`, with its gradient, given `dout[N, F]`.
pub fn glu_grad_in_place<T: Real>(pool: &Pool, activation: Activation, ffn: usize, gate_up: &mut [T], dout: &[T]) {
    let (rows, coefficients) = (dout.len() / ffn, activation.coefficients().map(T::Wide::from_f64));
    assert!(dout.len() == rows * ffn && gate_up.len() == 2 * dout.len());
    let gate_up = Shared::new(gate_up);
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(ffn), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let d = unsafe { gate_up.part(2 * row * ffn..2 * (row + 1) * ffn) };
            backward_in_place(d, coefficients, &dout[row * ffn..(row + 1) * ffn]);
        }
    });
}

#[inline(always)]
fn sigmoid<T: Float, V: Vector<T>>(x: V) -> V {
    let one = V::splat(T::ONE);
    one / (one + (V::splat(T::ZERO) - x).exp())
}

/// Returns the argument of the sigmoid for one vector of gates: a · x + b · x³.
#[inline(always)]
fn argument<T: Float, V: Vector<T>>(gate: V, [a, b]: [T; 2]) -> V {
    gate * (gate * gate).mul_add(V::splat(b), V::splat(a))
}

/// Returns the gradients of gate and of up for one vector of elements, from their values and the output's gradient.
#[inline(always)]
fn gradients<T: Float, V: Vector<T>>(gate: V, up: V, dout: V, [a, b]: [T; 2]) -> (V, V) {
    let s = sigmoid::<T, V>(argument(gate, [a, b]));
    let activated = gate * s;
    // The derivative of x · s(v) is s + x · s · (1 − s) · v', with v' = a + 3b · x².
    let inner = (gate * gate).mul_add(V::splat(T::from_f64(3.0) * b), V::splat(a));
    let slope = (activated * inner).mul_add(V::splat(T::ONE) - s, s);
    (dout * up * slope, dout * activated)
}

vectorized! {
    fn forward<T, V>(gate_up: &[T], coefficients: [T::Wide; 2], out: &mut [T]) {
        let (gate, up) = gate_up.split_at(out.len());
        strips::<T, V>(out.len(), #[inline(always)] |at, count| {
            let gate: V = get(gate, at, count);
            let s = sigmoid::<T::Wide, V>(argument(gate, coefficients));
            put(out, at, count, gate * s * get::<T, V>(up, at, count));
        });
    }
}

vectorized! {
    fn backward<T, V>(gate_up: &[T], coefficients: [T::Wide; 2], dout: &[T], dgate_up: &mut [T]) {
        let (gate, up) = gate_up.split_at(dout.len());
        let (dgate, dup) = dgate_up.split_at_mut(dout.len());
        strips::<T, V>(dout.len(), #[inline(always)] |at, count| {
            let (gate, up, dout): (V, V, V) = (get(gate, at, count), get(up, at, count), get(dout, at, count));
            let (first, second) = gradients::<T::Wide, V>(gate, up, dout, coefficients);
            put(dgate, at, count, first);
            put(dup, at, count, second);
        });
    }
}

vectorized! {
    fn backward_in_place<T, V>(gate_up: &mut [T], coefficients: [T::Wide; 2], dout: &[T]) {
        let (gate, up) = gate_up.split_at_mut(dout.len());
        strips::<T, V>(dout.len(), #[inline(always)] |at, count| {
            let values: (V, V, V) = (get(gate, at, count), get(up, at, count), get(dout, at, count));
            let (first, second) = gradients::<T::Wide, V>(values.0, values.1, values.2, coefficients);
            put(gate, at, count, first);
            put(up, at, count, second);
        });
    }
}
