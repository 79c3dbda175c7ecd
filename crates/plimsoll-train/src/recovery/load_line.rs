//! The load line of a device: what it may hold for a run, what that was said to be, and what others leave of it.

use super::pressure::Pressure;
use plimsoll_core::{Budget, Bytes, Plan, Recipe};
use std::time::Instant;

/// Steps after a refusal before the run goes back to the recipe that was refused. Doubled each time that it is
/// refused again.
const PATIENCE_STEPS: u64 = 32;

/// What a run knows about the memory that a device may hold for it.
pub struct LoadLine {
    /// As the user said, in the run file or later; of a device that was made with so much, what the run file's word came to then.
    pub(super) budget: Budget,
    /// What a virtual device was made with, or is kept of one on another host: the most that the line can come to, and what a
    /// share is one of.
    pub(super) made_with: Option<Bytes>,
    /// The load line that holds: the budget, or less while others press.
    pub(crate) bytes: Bytes,
    /// The load line of the host: what the user said came to at the start, or less while others press.
    pub(crate) host: Bytes,
    pub(super) host_budget: Bytes,
    /// The most that has waited there.
    pub(super) host_wanted: Bytes,
    /// The charges of the device without those of the Programs.
    pub(super) bare_charges: Bytes,
    /// The recipe that the planner chose under the budget: where the run goes back to.
    pub(crate) home: Recipe,
    /// When to go back up after a refusal: the step, and how many steps to wait the next time.
    pub(super) up: Option<u64>,
    pub(super) patience: u64,
    /// On the device, and on the host beside a device that has memory of its own.
    pub(super) pressure: Pressure,
    pub(super) host_pressure: Pressure,
    /// Whether the user has been told that others press in vain.
    pub(super) told: bool,
}

impl LoadLine {
    /// A run that starts with this plan, under what `budget` means for its device, which was perhaps `made_with` so much;
    /// `programs` of its charges are those of its Programs.
    pub fn new(budget: Budget, made_with: Option<Bytes>, plan: &Plan, programs: Bytes) -> LoadLine {
        let pressure = Pressure::new(Instant::now());
        LoadLine {
            budget,
            made_with,
            bytes: plan.devices[0].budget_bytes,
            host: plan.host.budget_bytes,
            host_budget: plan.host.budget_bytes,
            host_wanted: plan.host.arena_bytes,
            bare_charges: plan.devices[0].charges_bytes.saturating_sub(programs),
            home: plan.recipe.clone(),
            up: None,
            patience: PATIENCE_STEPS,
            pressure,
            host_pressure: pressure,
            told: false,
        }
    }

    /// What a budget comes to where the memory that the device is in has `free` for this run.
    pub(super) fn of(&self, budget: Budget, free: Bytes) -> Bytes {
        budget.of(self.made_with.unwrap_or(free))
    }

    /// The same, or less where the device was not made with so much.
    pub(super) fn at_most(&self, bytes: Bytes) -> Bytes {
        self.made_with.map_or(bytes, |made_with| bytes.min(made_with))
    }

    /// So much waits on the host now.
    pub fn waits(&mut self, host: Bytes) {
        self.host_wanted = self.host_wanted.max(host);
    }
}
