//! Bisection: the smallest value that is enough, where every larger value is enough, too.
//!
//! A probe is often slow here: a search for a recipe, or the plan of a team. Each value is therefore probed at most
//! once, and the upper end of an interval is never probed.

use std::ops::Range;

/// Returns the smallest number in `range` that is enough, or the end of the range if none is. Every number above one
/// that is enough must be enough, too.
///
/// With a `tolerance` above 0, the search ends early: the result is at most `tolerance` above the smallest number that
/// is enough.
pub(crate) fn smallest(range: Range<u64>, tolerance: u64, mut is_enough: impl FnMut(u64) -> bool) -> u64 {
    let Range { start: mut low, end: mut high } = range;
    while high.saturating_sub(low) > tolerance {
        let middle = low.midpoint(high);
        if is_enough(middle) { high = middle } else { low = middle + 1 }
    }
    high
}

/// Narrows the interval between `too_low` and `enough` by bisection with `probes` probes, and returns its upper end:
/// the smallest value found that is enough.
///
/// `midpoint` returns the value halfway between two values, as [`f64::midpoint`] does. `probe` tests a value and
/// returns one that is enough: the tested value, or a smaller one that it has found. It returns `None` if the tested
/// value is too low.
pub(crate) fn narrow<T: Copy>(
    mut too_low: T,
    mut enough: T,
    probes: u32,
    midpoint: fn(T, T) -> T,
    mut probe: impl FnMut(T) -> Option<T>,
) -> T {
    for _ in 0..probes {
        let middle = midpoint(too_low, enough);
        match probe(middle) {
            Some(value) => enough = value,
            None => too_low = middle,
        }
    }
    enough
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smallest_finds_threshold() {
        for (start, end) in [(0, 1), (0, 7), (3, 20), (5, 37)] {
            for threshold in start..=end {
                let mut probed = Vec::new();
                let found = smallest(start..end, 0, |number| {
                    probed.push(number);
                    number >= threshold
                });
                assert_eq!(found, threshold, "{start}..{end}");
                assert!(probed.iter().all(|number| (start..end).contains(number)), "{probed:?}");
                probed.sort_unstable();
                assert!(probed.windows(2).all(|pair| pair[0] < pair[1]), "{probed:?} has a number twice");
            }
        }
    }

    #[test]
    fn smallest_of_all_true_is_start() {
        assert_eq!(smallest(3..1000, 0, |_| true), 3);
    }

    #[test]
    fn smallest_of_all_false_is_end() {
        assert_eq!(smallest(3..1000, 0, |_| false), 1000);
        assert_eq!(smallest(0..u64::MAX, 0, |_| false), u64::MAX);
    }

    #[test]
    fn smallest_in_empty_range_probes_nothing() {
        assert_eq!(smallest(5..5, 0, |_| unreachable!("the range is empty")), 5);
        assert_eq!(smallest(0..4, 4, |_| unreachable!("the range is within the tolerance")), 4);
    }

    #[test]
    fn smallest_stays_within_tolerance() {
        for threshold in 0..=1000 {
            let found = smallest(0..1000, 10, |number| number >= threshold);
            assert!((threshold..=threshold + 10).contains(&found), "{found} for {threshold}");
        }
    }

    #[test]
    fn narrow_approaches_threshold() {
        let found = narrow(0.0, 8.0, 30, f64::midpoint, |value| (value >= 0.3).then_some(value));
        assert!((0.3..0.3 + 1e-8).contains(&found), "{found}");
        // A probe of 50 finds that 20 is enough, so that the next one is 10.
        let mut probed = Vec::new();
        let found = narrow(0, 100, 3, u64::midpoint, |value| {
            probed.push(value);
            (value >= 20).then_some(20)
        });
        assert_eq!((found, probed), (20, vec![50, 10, 15]));
    }

    #[test]
    fn narrow_with_all_true_or_all_false() {
        assert_eq!(narrow(0.0, 8.0, 3, f64::midpoint, Some), 1.0);
        assert_eq!(narrow(0.0, 8.0, 3, f64::midpoint, |_| None), 8.0);
    }

    #[test]
    fn narrow_keeps_empty_interval() {
        assert_eq!(narrow(5, 5, 3, u64::midpoint, Some), 5);
        assert_eq!(narrow(0, 8, 0, u64::midpoint, |_| unreachable!("there are no probes")), 8);
    }
}
