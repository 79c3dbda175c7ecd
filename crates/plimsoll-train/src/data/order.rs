//! Shuffling and batching of rows. Both are pure functions of the seed and of the position in the stream of rows, so
//! a run resumes at any step from the step number alone.

use std::ops::Range;

/// The order in which training sees the rows (sequences) of a dataset: an endless stream of row numbers, epoch after
/// epoch, each epoch a permutation of all rows. It is computed from the seed, without a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOrder {
    /// Seed of the permutations.
    pub seed: u64,
    /// Number of rows of the dataset, which is the length of an epoch. Must not be 0.
    pub rows: u64,
    /// Whether rows are shuffled, with a permutation for each epoch; otherwise every epoch is in file order.
    pub shuffle: bool,
}

impl RowOrder {
    /// Returns the number of the row at `position` of the stream, both counted from 0. The epoch is `position / rows`.
    pub fn row(&self, position: u64) -> u64 {
        assert!(self.rows > 0, "an order needs at least one row");
        let (epoch, index) = (position / self.rows, position % self.rows);
        if self.shuffle { permute_index(splitmix64(splitmix64(self.seed) ^ epoch), index, self.rows) } else { index }
    }

    /// Returns the number of rows in `epochs` epochs, rounded to a whole row. The last epoch may be partial.
    pub fn rows_of_epochs(&self, epochs: f64) -> u64 {
        (epochs * self.rows as f64).round() as u64
    }
}

/// The rows of each optimizer step: consecutive slices of the stream of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSampler {
    /// Order in which training sees the rows.
    pub order: RowOrder,
    /// R: number of rows (sequences) per step. Must not be 0.
    pub rows: u64,
    /// Number of rows after which training ends ([`RowOrder::rows_of_epochs`]); `None` if it may go on for ever.
    pub row_limit: Option<u64>,
    /// Number of consecutive steps that have the same rows. Must not be 0.
    pub steps_per_batch: u64,
}

impl BatchSampler {
    /// Returns the number of steps, and `None` if there is no [`BatchSampler::row_limit`].
    pub fn steps(&self) -> Option<u64> {
        self.row_limit.map(|end| end.div_ceil(self.rows).saturating_mul(self.steps_per_batch))
    }

    /// Returns the positions in the stream of rows ([`RowOrder::row`]) that belong to step `step`, counted from 0.
    /// There are R of them, fewer in the last step of a limited stream, and none after it.
    pub fn positions(&self, step: u64) -> Range<u64> {
        assert!(self.rows > 0, "a step needs at least one row");
        let end = self.row_limit.unwrap_or(u64::MAX);
        let first = (step / self.steps_per_batch).saturating_mul(self.rows).min(end);
        first..first.saturating_add(self.rows).min(end)
    }
}

/// Hashes 64 bits with splitmix64 (Steele, Lea, Flood 2014), a bijection.
pub(crate) fn splitmix64(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Shuffles without a table: returns the image of `index` under the permutation of `0..count` that `key` selects.
///
/// A Feistel network permutes the 4^k numbers of the next larger power of four. Applying it until the result is below
/// `count` makes it a permutation of `0..count` (cycle walking, Black and Rogaway 2002). It takes fewer than four
/// applications on average.
pub(super) fn permute_index(key: u64, index: u64, count: u64) -> u64 {
    const ROUNDS: u64 = 8;
    let bits = u64::BITS - (count - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..ROUNDS {
            (left, right) =
                (right, left ^ (splitmix64(key ^ (round << 32 | right).wrapping_mul(0xd6e8_feb8_6659_fd93)) & mask));
        }
        value = left << half | right;
        if value < count {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_epoch_yields_each_row_once(seed: u64, rows in 1u64..3000, epoch in 0u64..1000) {
            let order = RowOrder { seed, rows, shuffle: true };
            let mut seen = vec![false; rows as usize];
            for position in epoch * rows..(epoch + 1) * rows {
                let row = order.row(position) as usize;
                prop_assert!(!std::mem::replace(&mut seen[row], true), "row {row} twice");
            }
        }

        #[test]
        fn steps_cover_epochs_without_gap_or_overlap(rows in 1u64..50, step_rows in 1u64..70, epochs in 0.0f64..5.0) {
            let order = RowOrder { seed: 1, rows, shuffle: false };
            let batches = BatchSampler { order, rows: step_rows, row_limit: Some(order.rows_of_epochs(epochs)), steps_per_batch: 1 };
            let steps = batches.steps().unwrap();
            let mut next = 0;
            for step in 0..steps {
                let positions = batches.positions(step);
                prop_assert_eq!(positions.start, next);
                let size = positions.end - positions.start;
                prop_assert!(size == step_rows || (step + 1 == steps && size > 0), "only the last step may be smaller");
                next = positions.end;
            }
            prop_assert!((next as f64 - epochs * rows as f64).abs() <= 0.5);
            prop_assert!(batches.positions(steps).is_empty());
        }
    }

    #[test]
    fn large_row_counts_are_permuted_without_table() {
        let order = RowOrder { seed: 7, rows: u64::MAX / 2, shuffle: true };
        let rows: Vec<u64> = (0..100).map(|position| order.row(position)).collect();
        assert!(rows.iter().all(|&row| row < order.rows));
        assert!(rows.windows(2).any(|pair| pair[1] < pair[0]), "not in file order");
    }

    #[test]
    fn epochs_and_seeds_change_row_order() {
        let epoch = |seed, epoch: u64| -> Vec<u64> {
            let order = RowOrder { seed, rows: 100, shuffle: true };
            (epoch * 100..(epoch + 1) * 100).map(|position| order.row(position)).collect()
        };
        assert_ne!(epoch(1, 0), epoch(1, 1));
        assert_ne!(epoch(1, 0), epoch(2, 0));
        assert_eq!(epoch(1, 3), epoch(1, 3));
    }

    /// Counts each row at each position of an epoch: 64 rows and 6400 epochs give 100 expected per cell, with a
    /// standard deviation of 10. Six standard deviations are far beyond chance for 4096 cells.
    #[test]
    fn shuffling_is_uniform() {
        let order = RowOrder { seed: 3, rows: 64, shuffle: true };
        let mut counts = vec![0i32; 64 * 64];
        for position in 0..64 * 6400 {
            counts[(position % 64 * 64 + order.row(position)) as usize] += 1;
        }
        let (low, high) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(*low > 40 && *high < 160, "{low}..{high}");
    }
}
