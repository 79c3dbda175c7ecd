//! Corrections of the bytes that are predicted for recompute levels, from recipes that a search has measured.

use plimsoll_core::Offload;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

/// Differences between measured and predicted bytes on the device. A search learns them from its own measurements only, so
/// that equal searches measure the same recipes.
#[derive(Debug, Default)]
pub(super) struct LevelBytes(Mutex<Corrections>);

/// Corrections, by micro-batch size.
#[derive(Debug, Default)]
struct Corrections {
    /// Bytes above those of the profile, by number of the byte budget.
    of_budgets: HashMap<u32, BTreeMap<u32, f64>>,
    /// Bytes above the resident bytes and those of the profile, by representative offload choice.
    of_offload: HashMap<(u32, Offload), f64>,
}

impl LevelBytes {
    /// Returns the corrections of byte budgets, by number.
    pub fn of_budgets(&self, micro_batch: u32) -> BTreeMap<u32, f64> {
        self.lock().of_budgets.get(&micro_batch).cloned().unwrap_or_default()
    }

    /// Records the correction of a byte budget.
    pub fn record_budget(&self, micro_batch: u32, number: u32, difference: f64) {
        self.lock().of_budgets.entry(micro_batch).or_default().insert(number, difference);
    }

    /// Returns the correction of an offload choice; `None` if none like it was measured.
    pub fn of_offload(&self, micro_batch: u32, representative: Offload) -> Option<f64> {
        self.lock().of_offload.get(&(micro_batch, representative)).copied()
    }

    /// Records the correction of an offload choice, and of all that have the same representative.
    pub fn record_offload(&self, micro_batch: u32, representative: Offload, difference: f64) {
        self.lock().of_offload.insert((micro_batch, representative), difference);
    }

    fn lock(&self) -> MutexGuard<'_, Corrections> {
        self.0.lock().expect("no panic occurs while the lock is held")
    }
}

/// Interpolates the correction of a byte budget linearly between its neighbors. Outside of them, the nearest one applies. It
/// is 0 if none is known.
pub(super) fn interpolate(corrections: &BTreeMap<u32, f64>, number: u32) -> f64 {
    let below = corrections.range(..=number).next_back();
    let above = corrections.range(number..).next();
    match (below, above) {
        (Some((first, low)), Some((last, high))) if first < last => {
            low + (high - low) * f64::from(number - first) / f64::from(last - first)
        }
        (Some((_, nearest)), _) | (None, Some((_, nearest))) => *nearest,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corrections_are_interpolated_between_measured_budgets() {
        assert_eq!(interpolate(&BTreeMap::new(), 3), 0.0);
        let corrections = BTreeMap::from([(2, 10.0), (6, 30.0)]);
        let at = [0, 2, 3, 6, 9].map(|number| interpolate(&corrections, number));
        assert_eq!(at, [10.0, 10.0, 15.0, 30.0, 30.0]);
    }
}
