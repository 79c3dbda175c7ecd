//! Rotary position embeddings, in the "rotate half" convention of Hugging Face: element i of a
//! head is rotated with element i + E/2.

use super::simd::{Float, Real, get, put, strips, vectorized};
use super::{Heads, attention::Columns};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::op::{QueryGrowth, RopeScaling};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 8192;

/// Fills `table[P, E]`, with E = `head_dim`: row p holds the cosines of the E/2 angles of position p, then their sines,
/// all times `amplitude` and the factor of `growth` for that position.
///
/// Computes frequencies and angles in `T`; the Python library transformers computes them in f32.
pub fn rope_table<T: Float>(
    pool: &Pool,
    head_dim: usize,
    theta: f64,
    scaling: &RopeScaling,
    amplitude: f64,
    growth: Option<QueryGrowth>,
    table: &mut [T],
) {
    let half = head_dim / 2;
    let rows = table.len() / head_dim;
    let table = Shared::new(table);
    pool.split(rows, 64, |range, _| {
        for position in range {
            // SAFETY: rows of one split are disjoint.
            let row = unsafe { table.part(position * head_dim..(position + 1) * head_dim) };
            let amplitude = T::from_f64(amplitude * growth.map_or(1.0, |growth| growth.factor(position as u64)));
            for i in 0..half {
                let angle = T::from_f64(position as f64) * frequency(i, head_dim, T::from_f64(theta), scaling);
                row[i] = angle.cos() * amplitude;
                row[half + i] = angle.sin() * amplitude;
            }
        }
    });
}

/// Returns the angle, in radians per position, by which pair `i` of a head is rotated. Llama 3 scaling keeps the
/// frequency of short wavelengths, divides that of long ones, and interpolates between (Llama 3.1 model card;
/// transformers, `modeling_rope_utils`).
fn frequency<T: Float>(i: usize, head_dim: usize, theta: T, scaling: &RopeScaling) -> T {
    let plain = T::ONE / theta.powf(T::from_f64((2 * i) as f64) / T::from_f64(head_dim as f64));
    match *scaling {
        RopeScaling::None | RopeScaling::Dynamic { .. } => plain,
        RopeScaling::Linear { factor } => plain / T::from_f64(factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let context = original_max_position_embeddings as f64;
            let wave = T::from_f64(2.0 * std::f64::consts::PI) / plain;
            let slow = plain / T::from_f64(factor);
            if wave < T::from_f64(context / high_freq_factor) {
                plain
            } else if wave > T::from_f64(context / low_freq_factor) {
                slow
            } else {
                let smooth = (T::from_f64(context) / wave - T::from_f64(low_freq_factor))
                    / T::from_f64(high_freq_factor - low_freq_factor);
                (T::ONE - smooth) * slow + smooth * plain
            }
        }
        RopeScaling::Yarn { factor, .. } => {
            let [low, high] = scaling.yarn_range(head_dim as u64, theta.to_f64());
            let slow = plain / T::from_f64(factor);
            let place = T::from_f64(i as f64) - T::from_f64(low);
            let divided = place / T::from_f64(high - low);
            let divided = if divided < T::ZERO { T::ZERO } else { divided };
            let divided = if divided > T::ONE { T::ONE } else { divided };
            slow * divided + plain * (T::ONE - divided)
        }
    }
}

/// Rotates the query and key heads of `qkv[N, C]` in place, by the angles in `table` for the row's position in
/// `positions[N]`. The row of keys lies `key_shift` rows behind that of queries. With `inverse`, rotates back, by which a
/// gradient of the output becomes that of the input.
pub fn rope<T: Real>(
    pool: &Pool,
    shape: Heads,
    table: &[T::Wide],
    positions: &[i32],
    key_shift: u64,
    inverse: bool,
    qkv: &mut [T],
) {
    let c = Columns::from_heads(shape);
    assert!(qkv.len() == positions.len() * c.all);
    let qkv = Shared::new(qkv);
    pool.split(positions.len(), MIN_TASK_ELEMENTS.div_ceil(c.all), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let row_of = unsafe { qkv.part(row * c.all..row * c.all + c.values) };
            let sign = if inverse { -T::Wide::ONE } else { T::Wide::ONE };
            let turn_at = |position: usize| &table[position * c.head..][..c.head];
            let position = positions[row] as usize;
            let (queries, keys) = row_of.split_at_mut(c.keys);
            rotate(queries, turn_at(position), sign);
            rotate(keys, turn_at(position + key_shift as usize), sign);
        }
    });
}

vectorized! {
    /// Rotates all heads in `row`. `turn` holds the cosines of the angles, then their sines. `sign` is 1, or −1 to
    /// rotate back.
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
