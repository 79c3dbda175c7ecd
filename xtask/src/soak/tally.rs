//! Counters of the soak: checks that passed and failed, their worst figures, and the kinds of cases.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Results of all checks of one kind. Some kinds measure a figure (a number), such as a distance between two losses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kind {
    /// Number of checks that passed.
    pub passed: u64,
    /// One line per failed check.
    pub failed: Vec<String>,
    /// Largest figure that the checks measured; `None` if this kind of check measures none.
    pub worst: Option<f64>,
    /// Description of the case with the largest figure; empty if this kind of check measures none.
    pub worst_of: String,
    /// Number of checks that measured a figure above zero.
    pub above_zero: u64,
}

/// Results of all checks of a soak.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// Results of each kind of check, by its name.
    pub kinds: BTreeMap<String, Kind>,
    /// Number of cases with each feature, such as `refused` or `with a lost device`. It shows which situations the soak
    /// has met.
    pub covered: BTreeMap<String, u64>,
    /// Remarks for the reader that are not failures.
    pub notes: Vec<String>,
}

impl Tally {
    /// Records one check of a kind, which passed if `held`. Otherwise `message` describes the failure.
    pub fn check(&mut self, kind: &str, held: bool, message: impl FnOnce() -> String) {
        let entry = self.kinds.entry(kind.into()).or_default();
        if held { entry.passed += 1 } else { entry.failed.push(message()) }
    }

    /// Records one check of a kind that measures a figure (a number). The check passed if `held`. `message` describes
    /// the case.
    pub fn figure(&mut self, kind: &str, figure: f64, held: bool, message: impl Fn() -> String) {
        self.check(kind, held, &message);
        let entry = self.kinds.get_mut(kind).expect("made just now");
        // NaN counts as the largest figure.
        let worse = entry.worst.is_none_or(|worst| figure.is_nan() || figure > worst);
        if worse {
            (entry.worst, entry.worst_of) = (Some(figure), message());
        }
        entry.above_zero += u64::from(figure > 0.0);
    }

    /// Counts a case that has this feature, such as `refused`.
    pub fn cover(&mut self, feature: &str) {
        *self.covered.entry(feature.into()).or_default() += 1;
    }

    /// Adds a remark for the reader, unless the tally has it already.
    pub fn note(&mut self, line: String) {
        if !self.notes.contains(&line) {
            self.notes.push(line);
        }
    }

    /// Adds the results of another tally.
    pub fn add(&mut self, other: Tally) {
        for (name, kind) in other.kinds {
            let entry = self.kinds.entry(name).or_default();
            entry.passed += kind.passed;
            entry.failed.extend(kind.failed);
            entry.above_zero += kind.above_zero;
            let worse = |worst: f64| entry.worst.is_none_or(|known| worst.is_nan() || worst > known);
            if kind.worst.is_some_and(worse) {
                (entry.worst, entry.worst_of) = (kind.worst, kind.worst_of);
            }
        }
        for (sort, count) in other.covered {
            *self.covered.entry(sort).or_default() += count;
        }
        self.notes.extend(other.notes);
    }

    /// Returns the number of checks that passed.
    pub fn passed(&self) -> u64 {
        self.kinds.values().map(|kind| kind.passed).sum()
    }

    /// Returns the number of failed checks.
    pub fn failed(&self) -> usize {
        self.kinds.values().map(|kind| kind.failed.len()).sum()
    }

    /// Formats the results as text of several lines; the last one has the totals.
    pub fn lines(&self) -> String {
        let mut text = String::new();
        let width = self.kinds.keys().map(|name| name.chars().count()).max().unwrap_or(0);
        for (name, kind) in &self.kinds {
            let _ = write!(text, "{name:width$}  {:>8} passed  {:>4} failed", kind.passed, kind.failed.len());
            if let Some(worst) = kind.worst {
                let _ = write!(text, "  worst {worst:.3e}, above zero {}", kind.above_zero);
            }
            text.push('\n');
            if kind.above_zero > 0 {
                let _ = writeln!(text, "    at {}", kind.worst_of);
            }
        }
        if !self.covered.is_empty() {
            let sorts: Vec<String> = self.covered.iter().map(|(sort, count)| format!("{count} {sort}")).collect();
            let _ = writeln!(text, "cases: {}", sorts.join(", "));
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        for (name, kind) in &self.kinds {
            for failure in &kind.failed {
                let _ = writeln!(text, "FAILED {name}: {failure}");
            }
        }
        let _ = write!(text, "{} passed, {} failed", self.passed(), self.failed());
        text
    }
}
