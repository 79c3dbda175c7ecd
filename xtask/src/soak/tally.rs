//! What was shown how often, and what failed.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The figures of one kind of check.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kind {
    /// Checks that held.
    pub passed: u64,
    /// One line for each that did not.
    pub failed: Vec<String>,
    /// The worst figure.
    pub worst: Option<f64>,
    /// Where it was.
    pub worst_of: String,
    /// How many figures were above zero.
    pub above_zero: u64,
}

/// All kinds of checks, by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// In the order of their names.
    pub kinds: BTreeMap<String, Kind>,
    /// How many cases were of which sort.
    pub covered: BTreeMap<String, u64>,
    /// Things worth a line that are no failures.
    pub notes: Vec<String>,
}

impl Tally {
    /// One check.
    pub fn check(&mut self, kind: &str, held: bool, message: impl FnOnce() -> String) {
        let entry = self.kinds.entry(kind.into()).or_default();
        if held { entry.passed += 1 } else { entry.failed.push(message()) }
    }

    /// One figure of a kind, with a check on it.
    pub fn figure(&mut self, kind: &str, figure: f64, held: bool, message: impl Fn() -> String) {
        self.check(kind, held, &message);
        let entry = self.kinds.get_mut(kind).expect("made just now");
        // NaN is the worst of all.
        let worse = entry.worst.is_none_or(|worst| figure.is_nan() || figure > worst);
        if worse {
            (entry.worst, entry.worst_of) = (Some(figure), message());
        }
        entry.above_zero += u64::from(figure > 0.0);
    }

    /// A case is of a sort.
    pub fn cover(&mut self, sort: &str) {
        *self.covered.entry(sort.into()).or_default() += 1;
    }

    /// Something worth a line, once.
    pub fn note(&mut self, line: String) {
        if !self.notes.contains(&line) {
            self.notes.push(line);
        }
    }

    /// Adds what another has seen.
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

    /// Checks that held.
    pub fn passed(&self) -> u64 {
        self.kinds.values().map(|kind| kind.passed).sum()
    }

    /// Checks that did not.
    pub fn failed(&self) -> usize {
        self.kinds.values().map(|kind| kind.failed.len()).sum()
    }

    /// Lines for a person; the last one is the count.
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
