//! Random initialization. Numbers are a function of (seed, tensor number, element), so they can be generated in any order and
//! portion.
//!
//! Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
//! (SC 2011). A block of four words gives four numbers by the Box-Muller method.

use super::simd::Real;
use crate::cpu::pool::{Pool, Shared};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 4096;

/// Fills `to` with normal numbers of mean 0 and standard deviation `std`. Element i is number `first + i` of the
/// sequence that `seed` and `number`, the number of the tensor, select.
pub fn normal<T: Real>(pool: &Pool, seed: u64, number: u64, first: u64, std: f64, to: &mut [T]) {
    fill(pool, first, to, |block| box_muller(random_words(seed, number, block)).map(|value| T::from_f64(value * std)));
}

/// Fills `to` with uniform numbers from −bound to bound. Element i is number `first + i` of the sequence that `seed`
/// and `number`, the number of the tensor, select.
pub fn uniform<T: Real>(pool: &Pool, seed: u64, number: u64, first: u64, bound: f64, to: &mut [T]) {
    fill(pool, first, to, |block| {
        random_words(seed, number, block).map(|word| T::from_f64((to_unit_interval(word) * 2.0 - 1.0) * bound))
    });
}

/// Fills `to` with the part of a number sequence that begins at number `first`. `four(i)` returns the sequence's
/// numbers 4 i to 4 i + 3.
fn fill<T: Real>(pool: &Pool, first: u64, to: &mut [T], four: impl Fn(u64) -> [T; 4] + Sync) {
    let (total, to) = (to.len(), Shared::new(to));
    pool.split(total, MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        let to = unsafe { to.part(range.clone()) };
        let mut at = first + range.start as u64;
        let mut rest = &mut *to;
        while !rest.is_empty() {
            let block = four(at / 4);
            let skip = (at % 4) as usize;
            let count = rest.len().min(4 - skip);
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&block[skip..skip + count]);
            at += count as u64;
            rest = later;
        }
    });
}

fn random_words(seed: u64, number: u64, block: u64) -> [u32; 4] {
    philox(
        [block as u32, (block >> 32) as u32, number as u32, (number >> 32) as u32],
        [seed as u32, (seed >> 32) as u32],
    )
}

/// Maps a random word to a number above 0 and below 1: the middle of one of 2^32 equal steps.
fn to_unit_interval(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

fn box_muller(random_words: [u32; 4]) -> [f64; 4] {
    let pair = |a: u32, b: u32| {
        let (radius, angle) = ((-2.0 * to_unit_interval(a).ln()).sqrt(), std::f64::consts::TAU * to_unit_interval(b));
        [radius * angle.cos(), radius * angle.sin()]
    };
    let ([a, b], [c, d]) = (pair(random_words[0], random_words[1]), pair(random_words[2], random_words[3]));
    [a, b, c, d]
}

#[inline(always)]
/// Returns a block of four random words by Philox-4x32-10. `counter` holds the number of the block in its sequence, and
/// numbers that select the sequence together with `key`.
pub(super) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_published_vectors() {
        // Random123, tests/kat_vectors, philox4x32 with 10 rounds.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn portions_match_the_whole() {
        let mut whole = vec![0.0f32; 30_000];
        normal(&Pool::new(1).unwrap(), 7, 3, 0, 0.02, &mut whole);
        for threads in [2, 3] {
            let pool = Pool::new(threads).unwrap();
            for (first, len) in [(0, 30_000), (1, 9), (4097, 20_001), (29_999, 1)] {
                let mut part = vec![0.0f32; len];
                normal(&pool, 7, 3, first as u64, 0.02, &mut part);
                assert_eq!(part, whole[first..first + len]);
            }
        }
    }

    #[test]
    fn numbers_are_normal_and_differ_by_seed() {
        let pool = Pool::new(2).unwrap();
        let draw = |seed, number| {
            let mut x = vec![0.0f64; 200_000];
            normal(&pool, seed, number, 0, 1.0, &mut x);
            x
        };
        let x = draw(1, 0);
        let n = x.len() as f64;
        let moment = |power: i32| x.iter().map(|x| x.powi(power)).sum::<f64>() / n;
        // Five standard errors of each moment.
        assert!(moment(1).abs() < 5.0 / n.sqrt());
        assert!((moment(2) - 1.0).abs() < 5.0 * (2.0 / n).sqrt());
        assert!(moment(3).abs() < 5.0 * (15.0 / n).sqrt());
        assert!((moment(4) - 3.0).abs() < 5.0 * (96.0 / n).sqrt());
        for other in [draw(2, 0), draw(1, 1)] {
            let together = x.iter().zip(&other).map(|(a, b)| a * b).sum::<f64>() / n;
            assert!(together.abs() < 5.0 / n.sqrt());
        }
    }
}
