//! The order in which rows are taken, and which of them make a step. Pure: a function of the seed
//! and the place in the stream, so that a run goes on at any step with nothing but the step number.

use std::ops::Range;

/// The endless stream of row numbers: epoch after epoch, each a permutation of all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Decides every epoch's permutation.
    pub seed: u64,
    /// Rows of an epoch, at least 1.
    pub rows: u64,
    /// Each epoch in an order of its own, or all in file order.
    pub shuffle: bool,
}

impl Order {
    /// The row at `position` of the stream; `position / rows` is the epoch.
    pub fn row(&self, position: u64) -> u64 {
        assert!(self.rows > 0, "an order over no rows");
        let (epoch, index) = (position / self.rows, position % self.rows);
        if self.shuffle { permuted(mix(mix(self.seed) ^ epoch), index, self.rows) } else { index }
    }

    /// The rows of so many epochs; the last may be a part of one.
    pub fn rows_of_epochs(&self, epochs: f64) -> u64 {
        (epochs * self.rows as f64).round() as u64
    }
}

/// Which rows make a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches {
    /// The stream they are taken from.
    pub order: Order,
    /// R: rows of a step, at least 1.
    pub rows: u64,
    /// The stream ends after so many rows ([`Order::rows_of_epochs`]); without, it has no end.
    pub end: Option<u64>,
}

impl Batches {
    /// The number of steps; none when endless.
    pub fn steps(&self) -> Option<u64> {
        self.end.map(|end| end.div_ceil(self.rows))
    }

    /// The places in the stream that `step` (counted from 0) takes: R of them, fewer in the very last step,
    /// none after it.
    pub fn positions(&self, step: u64) -> Range<u64> {
        assert!(self.rows > 0, "a step of no rows");
        let end = self.end.unwrap_or(u64::MAX);
        let first = step.saturating_mul(self.rows).min(end);
        first..first.saturating_add(self.rows).min(end)
    }
}

/// The splitmix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64 bits that mixes well.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Where `index` of `0..count` goes in the permutation `key`, without a table: a Feistel network
/// permutes the next larger 4^k numbers, and walking its cycle until a number below `count` comes
/// up makes it a permutation of `0..count` (Black and Rogaway 2002). Fewer than 4 walks on average.
pub(super) fn permuted(key: u64, index: u64, count: u64) -> u64 {
    const ROUNDS: u64 = 8;
    let bits = u64::BITS - (count - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut at = index;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for round in 0..ROUNDS {
            (left, right) =
                (right, left ^ (mix(key ^ (round << 32 | right).wrapping_mul(0xd6e8_feb8_6659_fd93)) & mask));
        }
        at = left << half | right;
        if at < count {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_epoch_takes_each_row_once(seed: u64, rows in 1u64..3000, epoch in 0u64..1000) {
            let order = Order { seed, rows, shuffle: true };
            let mut seen = vec![false; rows as usize];
            for position in epoch * rows..(epoch + 1) * rows {
                let row = order.row(position) as usize;
                prop_assert!(!std::mem::replace(&mut seen[row], true), "row {row} twice");
            }
        }

        #[test]
        fn steps_cover_the_epochs_without_gap_or_overlap(rows in 1u64..50, step_rows in 1u64..70, epochs in 0.0f64..5.0) {
            let order = Order { seed: 1, rows, shuffle: false };
            let batches = Batches { order, rows: step_rows, end: Some(order.rows_of_epochs(epochs)) };
            let steps = batches.steps().unwrap();
            let mut next = 0;
            for step in 0..steps {
                let positions = batches.positions(step);
                prop_assert_eq!(positions.start, next);
                let size = positions.end - positions.start;
                prop_assert!(size == step_rows || (step + 1 == steps && size > 0), "only the last may be smaller");
                next = positions.end;
            }
            prop_assert!((next as f64 - epochs * rows as f64).abs() <= 0.5);
            prop_assert!(batches.positions(steps).is_empty());
        }
    }

    #[test]
    fn huge_data_is_permuted_without_a_table() {
        let order = Order { seed: 7, rows: u64::MAX / 2, shuffle: true };
        let rows: Vec<u64> = (0..100).map(|position| order.row(position)).collect();
        assert!(rows.iter().all(|&row| row < order.rows));
        assert!(rows.windows(2).any(|pair| pair[1] < pair[0]), "not in file order");
    }

    #[test]
    fn epochs_and_seeds_differ_in_order() {
        let epoch = |seed, epoch: u64| -> Vec<u64> {
            let order = Order { seed, rows: 100, shuffle: true };
            (epoch * 100..(epoch + 1) * 100).map(|position| order.row(position)).collect()
        };
        assert_ne!(epoch(1, 0), epoch(1, 1));
        assert_ne!(epoch(1, 0), epoch(2, 0));
        assert_eq!(epoch(1, 3), epoch(1, 3));
    }

    /// Each row should come up at each place about equally often: 64 rows, 6400 epochs, 100 expected
    /// a cell, standard deviation 10; six of them is far beyond chance for 4096 cells.
    #[test]
    fn each_row_comes_up_at_each_place_equally_often() {
        let order = Order { seed: 3, rows: 64, shuffle: true };
        let mut counts = vec![0i32; 64 * 64];
        for position in 0..64 * 6400 {
            counts[(position % 64 * 64 + order.row(position)) as usize] += 1;
        }
        let (low, high) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(*low > 40 && *high < 160, "{low}..{high}");
    }
}
