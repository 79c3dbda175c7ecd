//! Rotary position embeddings, in the "rotate half" convention of Hugging Face: element i of a
//! head turns together with element i + E/2.

use super::simd::{Float, Real, get, put, strips, vectorised};
use super::{Heads, attention::Columns};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::op::RopeScaling;

/// Elements below which a task is not worth sharing out.
const LEAST: usize = 8192;

/// Fills `table[P, E]`: row p holds the cosines of p's E/2 angles, then their sines.
///
/// Frequencies and angles are computed in `T`, as transformers does in f32.
pub fn rope_table<T: Float>(pool: &Pool, head_dim: usize, theta: f64, scaling: &RopeScaling, table: &mut [T]) {
    let half = head_dim / 2;
    let rows = table.len() / head_dim;
    let table = Shared::new(table);
    pool.split(rows, 64, |range, _| {
        for position in range {
            // SAFETY: rows of one split are disjoint.
            let row = unsafe { table.part(position * head_dim..(position + 1) * head_dim) };
            for i in 0..half {
                let angle = T::of(position as f64) * frequency(i, head_dim, T::of(theta), scaling);
                row[i] = angle.cos();
                row[half + i] = angle.sin();
            }
        }
    });
}

/// Radians per position of pair `i`. Llama 3 keeps short waves, divides the frequency of long
/// ones, and blends in between (Llama 3.1 model card; transformers, `modeling_rope_utils`).
fn frequency<T: Float>(i: usize, head_dim: usize, theta: T, scaling: &RopeScaling) -> T {
    let plain = T::ONE / theta.powf(T::of((2 * i) as f64) / T::of(head_dim as f64));
    match *scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain / T::of(factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let context = original_max_position_embeddings as f64;
            let wave = T::of(2.0 * std::f64::consts::PI) / plain;
            let slow = plain / T::of(factor);
            if wave < T::of(context / high_freq_factor) {
                plain
            } else if wave > T::of(context / low_freq_factor) {
                slow
            } else {
                let smooth =
                    (T::of(context) / wave - T::of(low_freq_factor)) / T::of(high_freq_factor - low_freq_factor);
                (T::ONE - smooth) * slow + smooth * plain
            }
        }
    }
}

/// Rotates the query and key heads of `qkv[N, C]` in place by their `positions[N]`, or back if
/// `inverse` (which is the gradient).
pub fn rope<T: Real>(pool: &Pool, shape: Heads, table: &[T::Wide], positions: &[i32], inverse: bool, qkv: &mut [T]) {
    let c = Columns::of(shape);
    assert!(qkv.len() == positions.len() * c.all);
    let qkv = Shared::new(qkv);
    pool.split(positions.len(), LEAST.div_ceil(c.all), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let row_of = unsafe { qkv.part(row * c.all..row * c.all + c.values) };
            let turn = &table[positions[row] as usize * c.head..][..c.head];
            rotate(row_of, turn, if inverse { -T::Wide::ONE } else { T::Wide::ONE });
        }
    });
}

vectorised! {
    /// Rotates all heads in `row` by the angles of `turn` (cosines, sines), sines times `sign`.
    fn rotate<T, V>(row: &mut [T], turn: &[T::Wide], sign: T::Wide) {
        let (cos, sin) = turn.split_at(turn.len() / 2);
        for head in row.chunks_exact_mut(turn.len()) {
            let (low, high) = head.split_at_mut(cos.len());
            strips::<T, V>(cos.len(), #[inline(always)] |at, count| {
                let (a, b): (V, V) = (get(low, at, count), get(high, at, count));
                let c: V = get(cos, at, count);
                let s = get::<T::Wide, V>(sin, at, count) * V::splat(sign);
                put(low, at, count, a * c - b * s);
                put(high, at, count, b.mul_add(c, a * s));
            });
        }
    }
}
