//! SwiGLU, the gated unit of the feed-forward layer: silu(gate) · up, and its gradient.
//!
//! silu(x) = x · s with s = 1 / (1 + e^−x); its derivative is s · (1 + x · (1 − s)).

use super::simd::{Float, Real, Vector, get, put, strips, vectorized};
use crate::cpu::pool::{Pool, Shared};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 4096;

/// Computes `out[N, F]` = silu(gate) · up. Each row of `gate_up[N, 2F]` holds F values of gate, then F of up.
pub fn swiglu<T: Real>(pool: &Pool, ffn: usize, gate_up: &[T], out: &mut [T]) {
    let rows = out.len() / ffn;
    assert!(out.len() == rows * ffn && gate_up.len() == 2 * out.len());
    let out = Shared::new(out);
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(ffn), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let out = unsafe { out.part(row * ffn..(row + 1) * ffn) };
            forward(&gate_up[2 * row * ffn..2 * (row + 1) * ffn], out);
        }
    });
}

/// Computes `dgate_up[N, 2F]`, the gradient of the input of `swiglu`, from its input `gate_up[N, 2F]` and `dout[N, F]`.
pub fn swiglu_grad<T: Real>(pool: &Pool, ffn: usize, gate_up: &[T], dout: &[T], dgate_up: &mut [T]) {
    let rows = dout.len() / ffn;
    assert!(dout.len() == rows * ffn && gate_up.len() == 2 * dout.len() && dgate_up.len() == 2 * dout.len());
    let dgate_up = Shared::new(dgate_up);
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(ffn), |range, _| {
        for row in range {
            let both = 2 * row * ffn..2 * (row + 1) * ffn;
            // SAFETY: rows of one split are disjoint.
            let d = unsafe { dgate_up.part(both.clone()) };
            backward(&gate_up[both], &dout[row * ffn..(row + 1) * ffn], d);
        }
    });
}

/// Overwrites `gate_up[N, 2F]`, the input of `swiglu`, with its gradient, given `dout[N, F]`.
pub fn swiglu_grad_in_place<T: Real>(pool: &Pool, ffn: usize, gate_up: &mut [T], dout: &[T]) {
    let rows = dout.len() / ffn;
    assert!(dout.len() == rows * ffn && gate_up.len() == 2 * dout.len());
    let gate_up = Shared::new(gate_up);
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(ffn), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let d = unsafe { gate_up.part(2 * row * ffn..2 * (row + 1) * ffn) };
            backward_in_place(d, &dout[row * ffn..(row + 1) * ffn]);
        }
    });
}

#[inline(always)]
fn sigmoid<T: Float, V: Vector<T>>(x: V) -> V {
    let one = V::splat(T::ONE);
    one / (one + (V::splat(T::ZERO) - x).exp())
}

/// Returns the gradients of gate and of up for one vector of elements, from their values and the output's gradient.
#[inline(always)]
fn gradients<T: Float, V: Vector<T>>(gate: V, up: V, dout: V) -> (V, V) {
    let s = sigmoid::<T, V>(gate);
    let silu = gate * s;
    // s · (1 + x · (1 − s)) = s + silu · (1 − s)
    let slope = silu.mul_add(V::splat(T::ONE) - s, s);
    (dout * up * slope, dout * silu)
}

vectorized! {
    fn forward<T, V>(gate_up: &[T], out: &mut [T]) {
        let (gate, up) = gate_up.split_at(out.len());
        strips::<T, V>(out.len(), #[inline(always)] |at, count| {
            let gate: V = get(gate, at, count);
            put(out, at, count, gate * sigmoid::<T::Wide, V>(gate) * get::<T, V>(up, at, count));
        });
    }
}

vectorized! {
    fn backward<T, V>(gate_up: &[T], dout: &[T], dgate_up: &mut [T]) {
        let (gate, up) = gate_up.split_at(dout.len());
        let (dgate, dup) = dgate_up.split_at_mut(dout.len());
        strips::<T, V>(dout.len(), #[inline(always)] |at, count| {
            let (first, second): (V, V) = gradients::<T::Wide, V>(get(gate, at, count), get(up, at, count), get(dout, at, count));
            put(dgate, at, count, first);
            put(dup, at, count, second);
        });
    }
}

vectorized! {
    fn backward_in_place<T, V>(gate_up: &mut [T], dout: &[T]) {
        let (gate, up) = gate_up.split_at_mut(dout.len());
        strips::<T, V>(dout.len(), #[inline(always)] |at, count| {
            let (first, second): (V, V) = gradients::<T::Wide, V>(get(gate, at, count), get(up, at, count), get(dout, at, count));
            put(gate, at, count, first);
            put(up, at, count, second);
        });
    }
}
