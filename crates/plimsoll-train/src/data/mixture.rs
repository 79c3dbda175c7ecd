//! The order of the rows of several sources: a position of the stream of rows gives a source and a row of it.
//!
//! Without weights, the rows of all sources are numbered one after the other, and shuffled together like those of one
//! dataset.
//!
//! With weights, each source is an endless stream of its own epochs. A tree divides the positions among the streams.
//! Each branch has two sides with the shares a / W and b / W, where a + b = W. Of its first n positions, the left side
//! gets n · a / W, rounded to the nearest whole number. The number of earlier positions of a side is the index in the
//! stream of that side, so that a position is found with one division per level, and without a table.
//!
//! Rounding adds at most half a row at each level, and the share of a side scales the error of the levels above it. The
//! tree is that of Huffman (1952), in which shares shrink at least like Fibonacci numbers. Therefore the count of each
//! source differs by less than two rows from its share, after any number of rows.

use super::order::{RowOrder, splitmix64};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// The largest sum of the ticks that decimal weights become.
const DECIMAL_TICKS_MAX: f64 = (1u64 << 53) as f64;
/// The ticks of the largest weight, if the weights are no short decimal numbers.
const SCALED_TICKS: f64 = (1u64 << 40) as f64;
/// The most digits after the point of a weight that is kept exactly.
const DIGITS_MAX: i32 = 9;

/// A row of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRow {
    /// Index of the source.
    pub source: usize,
    /// Number of the row in the source, counted from 0 in file order.
    pub row: u64,
}

/// The order in which training sees the rows of several sources: a pure function of seed and position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixtureOrder {
    order: RowOrder,
    source_rows: Arc<[u64]>,
    /// The division of positions by weights; `None` without weights, and for one source.
    tree: Option<ShareTree>,
}

impl MixtureOrder {
    /// Returns the order of sources with `source_rows` rows. `order` has the seed, and the number of rows of all sources.
    /// `ticks` are weights of the sources (`ticks_of`); `None` for an order in which each row comes once per epoch.
    pub fn new(order: RowOrder, source_rows: &[u64], ticks: Option<&[u64]>) -> MixtureOrder {
        assert_eq!(order.rows, source_rows.iter().sum::<u64>(), "the order belongs to other sources");
        let tree = ticks.filter(|_| source_rows.len() > 1).map(ShareTree::new);
        MixtureOrder { order, source_rows: source_rows.into(), tree }
    }

    /// Returns the row at `position` of the stream of rows.
    pub fn row(&self, position: u64) -> SourceRow {
        let Some(tree) = &self.tree else { return self.numbered_row(self.order.row(position)) };
        let SourceRow { source, row } = tree.stream_index(position);
        // Sources of equal size have different permutations.
        let seed = splitmix64(self.order.seed ^ splitmix64(source as u64));
        let stream = RowOrder { seed, rows: self.source_rows[source], ..self.order };
        SourceRow { source, row: stream.row(row) }
    }

    /// Returns the number of times that each source is seen within the first `rows` rows of the stream.
    pub fn epochs_of_sources(&self, rows: u64) -> Vec<f64> {
        let Some(tree) = &self.tree else {
            return vec![rows as f64 / self.order.rows as f64; self.source_rows.len()];
        };
        let counts = tree.counts(rows, self.source_rows.len());
        counts.iter().zip(&*self.source_rows).map(|(&count, &size)| count as f64 / size as f64).collect()
    }

    /// Returns the row with a number that counts the rows of all sources, one source after the other.
    fn numbered_row(&self, number: u64) -> SourceRow {
        let mut row = number;
        for (source, &rows) in self.source_rows.iter().enumerate() {
            if row < rows {
                return SourceRow { source, row };
            }
            row -= rows;
        }
        unreachable!("row {number} of {}", self.order.rows)
    }
}

/// A tree that divides positions among sources by their ticks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ShareTree {
    /// The root is the last node.
    nodes: Vec<Node>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Source(usize),
    Branch(Branch),
}

/// Two nodes that share positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Branch {
    left: usize,
    right: usize,
    left_ticks: u64,
    /// Ticks of both sides.
    ticks: u64,
}

impl Branch {
    /// Returns the number of positions of the left side among the first `count`.
    fn left_count(&self, count: u64) -> u64 {
        let (left, ticks) = (u128::from(self.left_ticks), u128::from(self.ticks));
        ((2 * u128::from(count) * left + ticks) / (2 * ticks)) as u64
    }
}

impl ShareTree {
    /// Builds the Huffman tree of the ticks, of which none is 0.
    fn new(ticks: &[u64]) -> ShareTree {
        let mut nodes: Vec<Node> = (0..ticks.len()).map(Node::Source).collect();
        let mut open: BinaryHeap<Reverse<(u64, usize)>> =
            ticks.iter().enumerate().map(|(node, &ticks)| Reverse((ticks, node))).collect();
        while let (Some(Reverse((right_ticks, right))), Some(Reverse((left_ticks, left)))) = (open.pop(), open.pop()) {
            let ticks = left_ticks + right_ticks;
            nodes.push(Node::Branch(Branch { left, right, left_ticks, ticks }));
            open.push(Reverse((ticks, nodes.len() - 1)));
        }
        ShareTree { nodes }
    }

    /// Returns the source at a position, with the index in its stream as the row.
    fn stream_index(&self, position: u64) -> SourceRow {
        let (mut node, mut index) = (self.nodes.len() - 1, position);
        loop {
            let branch = match self.nodes[node] {
                Node::Source(source) => return SourceRow { source, row: index },
                Node::Branch(branch) => branch,
            };
            let before = branch.left_count(index);
            if branch.left_count(index + 1) > before {
                (node, index) = (branch.left, before);
            } else {
                (node, index) = (branch.right, index - before);
            }
        }
    }

    /// Returns the number of positions of each of `sources` sources among the first `rows`.
    fn counts(&self, rows: u64, sources: usize) -> Vec<u64> {
        let mut counts = vec![0; sources];
        let mut open = vec![(self.nodes.len() - 1, rows)];
        while let Some((node, rows)) = open.pop() {
            match self.nodes[node] {
                Node::Source(source) => counts[source] = rows,
                Node::Branch(branch) => {
                    let left = branch.left_count(rows);
                    open.extend([(branch.left, left), (branch.right, rows - left)]);
                }
            }
        }
        counts
    }
}

/// Turns weights above 0 into whole numbers above 0 with the same ratios. Ratios of decimal numbers with up to 9 digits
/// after the point are exact. Others are exact to 2⁻⁴⁰ of the largest weight.
pub(super) fn ticks_of(weights: &[f64]) -> Vec<u64> {
    let decimal = (0..=DIGITS_MAX).find_map(|digits| decimal_ticks(weights, 10f64.powi(digits)));
    let ticks = decimal.unwrap_or_else(|| {
        let largest = weights.iter().copied().fold(0.0, f64::max);
        weights.iter().map(|weight| ((weight / largest * SCALED_TICKS).round() as u64).max(1)).collect()
    });
    let divisor = ticks.iter().copied().fold(0, greatest_common_divisor);
    ticks.iter().map(|ticks| ticks / divisor).collect()
}

/// Returns the products of the weights with `scale`, if all are whole numbers but for the rounding of decimals.
fn decimal_ticks(weights: &[f64], scale: f64) -> Option<Vec<u64>> {
    let products = weights.iter().map(|weight| weight * scale);
    let is_whole = |product: f64| product >= 0.5 && (product - product.round()).abs() <= product * 4.0 * f64::EPSILON;
    let ticks: Option<Vec<f64>> = products.map(|product| is_whole(product).then(|| product.round())).collect();
    let ticks = ticks.filter(|ticks| ticks.iter().sum::<f64>() <= DECIMAL_TICKS_MAX)?;
    Some(ticks.into_iter().map(|ticks| ticks as u64).collect())
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order_of(source_rows: &[u64], ticks: Option<&[u64]>) -> MixtureOrder {
        MixtureOrder::new(row_order(source_rows), source_rows, ticks)
    }

    fn row_order(source_rows: &[u64]) -> RowOrder {
        RowOrder { seed: 7, rows: source_rows.iter().sum(), shuffle: true }
    }

    /// Generates the rows and the ticks of up to 24 sources.
    fn sources() -> impl Strategy<Value = Vec<(u64, u64)>> {
        let ticks = prop_oneof![1u64..10, 1u64..100_000, (0u32..40).prop_map(|bits| 1 << bits)];
        prop::collection::vec((1u64..40, ticks), 1..24)
    }

    proptest! {
        #[test]
        fn rows_of_a_source_come_once_before_any_comes_twice(sources in sources(), shuffle: bool) {
            let (rows, ticks): (Vec<u64>, Vec<u64>) = sources.into_iter().unzip();
            let order = MixtureOrder::new(RowOrder { shuffle, ..row_order(&rows) }, &rows, Some(&ticks));
            let mut streams = vec![Vec::new(); rows.len()];
            for SourceRow { source, row } in (0..3000).map(|position| order.row(position)) {
                prop_assert!(row < rows[source]);
                streams[source].push(row);
            }
            for (stream, &rows) in streams.iter().zip(&rows) {
                for epoch in stream.chunks(rows as usize) {
                    let mut seen = vec![false; rows as usize];
                    for &row in epoch {
                        prop_assert!(!std::mem::replace(&mut seen[row as usize], true), "row {} twice", row);
                    }
                    prop_assert!(shuffle || epoch.is_sorted());
                }
            }
        }

        #[test]
        fn counts_of_sources_stay_within_two_rows_of_shares(sources in sources(), start in 0u64..1 << 40) {
            let (rows, ticks): (Vec<u64>, Vec<u64>) = sources.into_iter().unzip();
            let tree = ShareTree::new(&ticks);
            let total: u128 = ticks.iter().map(|&ticks| u128::from(ticks)).sum();
            let mut counts = tree.counts(start, rows.len());
            for position in start..start + 200 {
                let SourceRow { source, row } = tree.stream_index(position);
                prop_assert_eq!(row, counts[source]);
                counts[source] += 1;
                prop_assert_eq!(&tree.counts(position + 1, rows.len()), &counts);
                for (&count, &ticks) in counts.iter().zip(&ticks) {
                    let share = u128::from(position + 1) * u128::from(ticks);
                    prop_assert!((u128::from(count) * total).abs_diff(share) < 2 * total);
                }
            }
        }

        #[test]
        fn sources_without_weights_are_shuffled_like_one(rows in prop::collection::vec(1u64..50, 1..8), epoch in 0u64..9) {
            let (order, joined) = (order_of(&rows, None), row_order(&rows));
            for position in epoch * joined.rows..(epoch + 1) * joined.rows {
                let SourceRow { source, row } = order.row(position);
                prop_assert!(row < rows[source]);
                prop_assert_eq!(rows[..source].iter().sum::<u64>() + row, joined.row(position));
            }
        }

        #[test]
        fn one_source_keeps_the_order_of_a_dataset(rows in 1u64..1000, ticks in 1u64..9, position in 0u64..1 << 50) {
            let expected = SourceRow { source: 0, row: row_order(&[rows]).row(position) };
            prop_assert_eq!(order_of(&[rows], Some(&[ticks])).row(position), expected);
            prop_assert_eq!(order_of(&[rows], None).row(position), expected);
        }

        #[test]
        fn any_weights_become_ticks_of_nearly_their_ratio(weights in prop::collection::vec(1e-3f64..1e6, 1..20)) {
            let ticks = ticks_of(&weights);
            let sums = (weights.iter().sum::<f64>(), ticks.iter().sum::<u64>() as f64);
            for (weight, ticks) in weights.iter().zip(&ticks) {
                prop_assert!((weight / sums.0 - *ticks as f64 / sums.1).abs() < 1e-11);
            }
        }
    }

    #[test]
    fn decimal_weights_become_small_ticks() {
        for (weights, ticks) in [
            (&[3.0, 1.0][..], &[3, 1][..]),
            (&[0.7, 0.3], &[7, 3]),
            (&[0.1, 0.2, 0.7], &[1, 2, 7]),
            (&[2.0, 2.0, 4.0], &[1, 1, 2]),
            (&[0.125, 1e6], &[1, 8_000_000]),
            (&[1e300, 1e300], &[1, 1]),
            (&[f64::MIN_POSITIVE, f64::MAX], &[1, 1 << 40]),
        ] {
            assert_eq!(ticks_of(weights), ticks, "{weights:?}");
        }
        let thirds = ticks_of(&[1.0 / 3.0, 2.0 / 3.0]);
        assert_eq!(thirds, [1, 2]);
    }

    #[test]
    fn heavy_source_repeats_and_light_one_goes_on() {
        // An epoch has 12 rows. The first source has 9 of them, and only 4 rows.
        let rows = [4, 8];
        let order = order_of(&rows, Some(&[3, 1]));
        assert_eq!(order.epochs_of_sources(12), [2.25, 0.375]);
        let of_second = |positions: std::ops::Range<u64>| -> Vec<u64> {
            positions.map(|position| order.row(position)).filter(|row| row.source == 1).map(|row| row.row).collect()
        };
        let mut seen = [of_second(0..12), of_second(12..24), of_second(24..32)].concat();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(order_of(&rows, None).epochs_of_sources(6), [0.5, 0.5]);
    }

    #[test]
    fn sources_of_equal_size_have_different_permutations() {
        let order = order_of(&[50, 50], Some(&[1, 1]));
        let of = |source| -> Vec<u64> {
            (0..100).map(|position| order.row(position)).filter(|row| row.source == source).map(|row| row.row).collect()
        };
        assert_ne!(of(0), of(1));
    }
}
