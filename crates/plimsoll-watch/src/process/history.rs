//! The history of one figure of memory: its peak, and its growth over a window of time.

use super::MemoryUse;
use plimsoll_core::Bytes;
use std::collections::VecDeque;

/// Most readings of a window that are kept, evenly spaced. The growth follows from all of their pairs.
const POINTS_MAX: usize = 120;
/// Fewest readings from which a growth is computed.
const POINTS_MIN: usize = 6;
/// Share of the window that readings must cover before the growth is known.
const COVERED_MIN: f64 = 0.5;
/// Share of the window that readings must cover before a growth can be a leak. The oldest reading is up to one interval
/// younger than the window.
const COVERED_FOR_LEAK: f64 = 0.9;
/// Least growth of a leak in bytes per minute.
const LEAK_BYTES_PER_MINUTE: f64 = 8.0 * 1024.0 * 1024.0;
/// Least share of the growth with which a leak goes on in each half of the window. A single step lies in one half.
const STEADY_SHARE: f64 = 0.25;
/// Seconds of a minute.
const MINUTE: f64 = 60.0;

/// A reading of the memory.
#[derive(Clone, Copy, Debug)]
struct Point {
    /// Seconds since the Unix epoch.
    at: f64,
    bytes: f64,
}

/// The readings of one figure.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// Seconds of readings from which the growth is computed.
    window: f64,
    /// Readings of the window, oldest first.
    points: VecDeque<Point>,
    held: Option<Bytes>,
    peak: Option<(Bytes, f64)>,
}

impl History {
    /// Returns a history without readings; its growth is computed over `window` seconds.
    pub fn new(window: f64) -> History {
        History { window, points: VecDeque::new(), held: None, peak: None }
    }

    /// Adds a reading at the time `at`, in seconds since the Unix epoch; `None` if the memory is unknown.
    pub fn push(&mut self, at: f64, bytes: Option<Bytes>) {
        self.held = bytes;
        let Some(bytes) = bytes else {
            // A growth across a gap would be a guess.
            self.points.clear();
            return;
        };
        if self.peak.is_none_or(|(peak, _)| bytes > peak) {
            self.peak = Some((bytes, at));
        }
        self.points.retain(|point| at - point.at <= self.window);
        let spacing = self.window / POINTS_MAX as f64;
        if self.points.back().is_none_or(|newest| at - newest.at >= spacing) {
            self.points.push_back(Point { at, bytes: bytes.0 as f64 });
        }
    }

    /// Returns the most bytes so far.
    pub fn peak(&self) -> Option<Bytes> {
        self.peak.map(|(bytes, _)| bytes)
    }

    /// Returns the newest reading with peak and growth.
    pub fn memory_use(&self) -> MemoryUse {
        let covered = self.covered();
        let is_known = self.points.len() >= POINTS_MIN && covered >= COVERED_MIN * self.window;
        let points: Vec<Point> = self.points.iter().copied().collect();
        let growth = is_known.then(|| slope(&points) * MINUTE);
        let is_whole = covered >= COVERED_FOR_LEAK * self.window;
        MemoryUse {
            held_bytes: self.held,
            peak_bytes: self.peak(),
            peak_at: self.peak.map(|(_, at)| at),
            growth_bytes_per_minute: growth,
            growth_seconds: growth.map(|_| covered),
            is_leak: is_whole && growth.is_some_and(|growth| is_leak(growth, &points)),
        }
    }

    /// Returns the seconds from the oldest to the newest reading of the window.
    fn covered(&self) -> f64 {
        self.points.front().zip(self.points.back()).map_or(0.0, |(oldest, newest)| newest.at - oldest.at)
    }
}

/// Returns whether a growth, in bytes per minute, is large and goes on in both halves of the readings.
fn is_leak(growth: f64, points: &[Point]) -> bool {
    let (first, second) = points.split_at(points.len() / 2);
    let is_steady = [first, second].iter().all(|half| slope(half) * MINUTE >= STEADY_SHARE * growth);
    growth >= LEAK_BYTES_PER_MINUTE && is_steady
}

/// Returns the bytes per second by which readings grow: the median of the slopes between all pairs (Theil and Sen). A
/// minority of outliers, such as a short peak, does not change it. 0 for fewer than two readings.
fn slope(points: &[Point]) -> f64 {
    let pairs = points.iter().enumerate().flat_map(|(number, early)| {
        let later = points[number + 1..].iter();
        later.map(|late| (late.bytes - early.bytes) / (late.at - early.at))
    });
    let mut slopes: Vec<f64> = pairs.filter(|slope| slope.is_finite()).collect();
    slopes.sort_by(f64::total_cmp);
    match (slopes.get(slopes.len() / 2), slopes.len() % 2) {
        (None, _) => 0.0,
        (Some(middle), 1) => *middle,
        (Some(upper), _) => (slopes[slopes.len() / 2 - 1] + upper) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = (1 << 20) as f64;

    /// Returns the memory use after a reading each second from 0 to `seconds`, with a window of 60 seconds.
    fn after(seconds: u32, mib: impl Fn(u32) -> f64) -> MemoryUse {
        let mut history = History::new(60.0);
        (0..=seconds).for_each(|second| history.push(f64::from(second), Some(Bytes((mib(second) * MIB) as u64))));
        history.memory_use()
    }

    #[test]
    fn steady_growth_is_a_leak() {
        let found = after(90, |second| 1000.0 + f64::from(second));
        assert_eq!(found.growth_bytes_per_minute, Some(60.0 * MIB));
        assert_eq!((found.growth_seconds, found.is_leak), (Some(60.0), true));
        assert_eq!((found.held_bytes, found.peak_at), (Some(Bytes::mib(1090)), Some(90.0)));
    }

    #[test]
    fn growth_needs_half_a_window() {
        let growing = |second: u32| f64::from(second);
        assert_eq!(after(29, growing).growth_bytes_per_minute, None);
        let half = after(30, growing);
        assert_eq!((half.growth_bytes_per_minute, half.growth_seconds), (Some(60.0 * MIB), Some(30.0)));
        assert!(!half.is_leak && after(54, growing).is_leak);
    }

    #[test]
    fn steps_and_swings_are_no_leak() {
        // Memory that is loaded once, in the middle of the window, and at its end.
        for step in [5, 30, 58] {
            assert!(!after(60, |second| if second < step { 100.0 } else { 9000.0 }).is_leak, "{step}");
        }
        let swings = after(120, |second| 500.0 + 300.0 * f64::from(second % 4));
        assert!(!swings.is_leak && swings.growth_bytes_per_minute.unwrap().abs() < 8.0 * MIB, "{swings:?}");
        assert_eq!((swings.peak_bytes, swings.peak_at), (Some(Bytes::mib(1400)), Some(3.0)));
        assert!(!after(60, |second| 100.0 + 0.1 * f64::from(second)).is_leak);
        assert!(!after(60, |second| 1000.0 - f64::from(second)).is_leak);
    }

    #[test]
    fn short_peaks_leave_the_growth_unchanged() {
        let found = after(60, |second| f64::from(second) + if second % 10 == 3 { 5000.0 } else { 0.0 });
        let growth = found.growth_bytes_per_minute.unwrap() / MIB;
        assert!((growth - 60.0).abs() < 5.0 && found.is_leak, "{growth}");
    }

    #[test]
    fn unknown_memory_starts_a_new_window() {
        let mut history = History::new(4.0);
        (0..8u32).for_each(|second| history.push(f64::from(second), Some(Bytes::mib(second.into()))));
        assert!(history.memory_use().growth_bytes_per_minute.is_none(), "five readings");
        (0..40).for_each(|tenth| history.push(8.0 + 0.1 * f64::from(tenth), Some(Bytes::gib(1))));
        assert!(history.memory_use().growth_bytes_per_minute.is_some());
        history.push(13.0, None);
        let found = history.memory_use();
        assert_eq!((found.held_bytes, found.growth_bytes_per_minute), (None, None));
        assert_eq!((found.peak_bytes, found.peak_at), (Some(Bytes::gib(1)), Some(8.0)));
    }

    #[test]
    fn kept_readings_are_bounded() {
        let mut history = History::new(60.0);
        (0..100_000).for_each(|number| history.push(f64::from(number) / 100.0, Some(Bytes::mib(1))));
        assert!(history.points.len() <= POINTS_MAX + 1, "{}", history.points.len());
    }
}
