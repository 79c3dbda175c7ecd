//! Elements left out at random, as `plimsoll_program::op` says: which ones is a function of where they
//! stand in the run, so that nothing is kept for the gradient.

use super::init::philox;
use super::simd::{Dot, Float, Real, by_level, get, put, strips, vectorised};
use crate::cpu::pool::{Pool, Shared};

/// Elements below which a task is not worth sharing out.
const LEAST: usize = 8192;
/// Blocks of four random words that are made at once.
const BLOCKS: usize = 16;

/// Where the rows of a `Dropout` stand in the run.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Of the run.
    pub seed: u64,
    /// Of the optimizer, counted from 1.
    pub step: u32,
    /// The sample of row 0 within the step.
    pub first_sample: u32,
    /// Rows of a sample.
    pub sequence: usize,
    /// The layer.
    pub layer: u32,
    /// Which of the layer's.
    pub site: u8,
    /// Of being left out.
    pub probability: f64,
}

/// `out[N, D]` = (or +=, with `accumulate`) x with elements left out, the others divided by 1 − probability.
pub fn dropout<T: Real>(pool: &Pool, at: Dropout, columns: usize, x: &[T], out: &mut [T], accumulate: bool) {
    assert!(columns > 0 && x.len().is_multiple_of(columns) && out.len() == x.len());
    let rows = x.len() / columns;
    let factor = T::Wide::of(1.0 / (1.0 - at.probability));
    // ⌊probability · 2³²⌋; a probability of 1 leaves nothing.
    let threshold = (at.probability * 4_294_967_296.0) as u64;
    let key = [at.seed as u32, (at.seed >> 32) as u32 ^ 0x4452_4F50];
    let out = Shared::new(out);
    pool.split(rows, LEAST.div_ceil(columns), |range, _| {
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
                let mut words = [0u32; 4 * BLOCKS];
                draw(counter, (element / 4) as u32, key, &mut words);
                let words = &words[element % 4..];
                let count = words.len().min(columns - done);
                let mut keep = [T::Wide::ZERO; 4 * BLOCKS];
                for (keep, &word) in keep.iter_mut().zip(&words[..count]) {
                    *keep = if u64::from(word) >= threshold { T::Wide::ONE } else { T::Wide::ZERO };
                }
                let range = done..done + count;
                leave_out(&x[range.clone()], &keep[..count], factor, &mut out[range], accumulate);
                done += count;
            }
        }
    });
}

by_level! {
    /// The words of BLOCKS blocks from `first` on.
    fn draw<D>(counter: [u32; 4], first: u32, key: [u32; 2], words: &mut [u32; 4 * BLOCKS]) {
        let mut blocks = [[0; BLOCKS]; 4];
        for lane in 0..BLOCKS {
            let drawn = philox([first.wrapping_add(lane as u32), counter[1], counter[2], counter[3]], key);
            for (block, word) in blocks.iter_mut().zip(drawn) {
                block[lane] = word;
            }
        }
        for lane in 0..BLOCKS {
            for word in 0..4 {
                words[4 * lane + word] = blocks[word][lane];
            }
        }
    }
}

vectorised! {
    fn leave_out<T, V>(x: &[T], keep: &[T::Wide], factor: T::Wide, out: &mut [T], accumulate: bool) {
        let (zero, one, factor) = (V::splat(T::Wide::ZERO), V::splat(T::Wide::ONE), V::splat(factor));
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            // A choice, not a product: what is left out may be infinite.
            let kept = one.where_le(get::<T::Wide, V>(keep, at, count), get::<T, V>(x, at, count) * factor, zero);
            put(out, at, count, if accumulate { get::<T, V>(out, at, count) + kept } else { kept });
        });
    }
}
