//! Dropout as defined in `plimsoll_program::op`. The dropped elements are a function of their position in the run, so nothing is
//! stored for the gradient.

use super::init::philox;
use super::simd::{Dot, Float, Real, get, put, strips, vectorized, vectorized_dot};
use crate::cpu::pool::{Pool, Shared};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 8192;
/// Number of blocks, each of four random words, that are generated at once.
const BLOCK_COUNT: usize = 16;

/// Options of a dropout op: the position of its rows in the run, which decides the dropped elements, and the
/// probability.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step, counted from 1.
    pub step: u32,
    /// Index in the step of the sample (sequence) that row 0 belongs to.
    pub first_sample: u32,
    /// Number of rows (tokens) per sample.
    pub sequence: usize,
    /// Index of the layer in the whole model, also in a pipeline stage.
    pub layer: u32,
    /// Index of the dropout op within the layer.
    pub site: u8,
    /// Probability that an element is dropped.
    pub probability: f64,
}

/// Computes `out[N, D]` = (or +=, with `accumulate`) x with dropped elements set to zero and the others divided by
/// 1 − probability.
pub fn dropout<T: Real>(pool: &Pool, at: Dropout, columns: usize, x: &[T], out: &mut [T], accumulate: bool) {
    assert!(columns > 0 && x.len().is_multiple_of(columns) && out.len() == x.len());
    let rows = x.len() / columns;
    let factor = T::Wide::from_f64(1.0 / (1.0 - at.probability));
    // ⌊probability · 2³²⌋; a probability of 1 drops everything.
    let threshold = (at.probability * 4_294_967_296.0) as u64;
    let key = [at.seed as u32, (at.seed >> 32) as u32 ^ 0x4452_4F50];
    let out = Shared::new(out);
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(columns), |range, _| {
        for row in range {
            let part = row * columns..(row + 1) * columns;
            // SAFETY: rows of one split are disjoint.
            let (x, out) = (&x[part.clone()], unsafe { out.part(part) });
            let first = row % at.sequence * columns;
            let sample = at.first_sample + (row / at.sequence) as u32;
            let counter = [0, at.layer * 256 + u32::from(at.site), sample, at.step];
            let mut done = 0;
            while done < columns {
                let element = first + done;
                let mut words = [0u32; 4 * BLOCK_COUNT];
                draw(counter, (element / 4) as u32, key, &mut words);
                let words = &words[element % 4..];
                let count = words.len().min(columns - done);
                let mut keep = [T::Wide::ZERO; 4 * BLOCK_COUNT];
                for (keep, &word) in keep.iter_mut().zip(&words[..count]) {
                    *keep = if u64::from(word) >= threshold { T::Wide::ONE } else { T::Wide::ZERO };
                }
                let range = done..done + count;
                drop_elements(&x[range.clone()], &keep[..count], factor, &mut out[range], accumulate);
                done += count;
            }
        }
    });
}

vectorized_dot! {
    /// Generates the random words of `BLOCK_COUNT` blocks, from block `first` on. `key` and the last three numbers of
    /// `counter` select the sequence.
    fn draw<D>(counter: [u32; 4], first: u32, key: [u32; 2], words: &mut [u32; 4 * BLOCK_COUNT]) {
        let mut blocks = [[0; BLOCK_COUNT]; 4];
        for lane in 0..BLOCK_COUNT {
            let drawn = philox([first.wrapping_add(lane as u32), counter[1], counter[2], counter[3]], key);
            for (block, word) in blocks.iter_mut().zip(drawn) {
                block[lane] = word;
            }
        }
        for lane in 0..BLOCK_COUNT {
            for word in 0..4 {
                words[4 * lane + word] = blocks[word][lane];
            }
        }
    }
}

vectorized! {
    fn drop_elements<T, V>(x: &[T], keep: &[T::Wide], factor: T::Wide, out: &mut [T], accumulate: bool) {
        let (zero, one, factor) = (V::splat(T::Wide::ZERO), V::splat(T::Wide::ONE), V::splat(factor));
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            // A selection instead of a product, because dropped elements may be infinite.
            let kept = one.select_le(get::<T::Wide, V>(keep, at, count), get::<T, V>(x, at, count) * factor, zero);
            put(out, at, count, if accumulate { get::<T, V>(out, at, count) + kept } else { kept });
        });
    }
}
