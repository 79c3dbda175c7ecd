//! The load line of a device during a run: the user's budget, and how much less other processes leave.

use super::pressure::PressureMonitor;
use plimsoll_core::{Budget, Bytes, Plan, Recipe};
use std::time::Instant;

/// Steps after an out-of-memory error before the run tries the previous recipe again; doubled after each failed
/// attempt.
const RETRY_DELAY_STEPS: u64 = 32;

/// Load lines of one device and of its host memory, with the state of their changes.
pub struct LoadLine {
    /// Budget of the user, from the run file or changed later. For a device of fixed capacity, its amount in bytes.
    pub(super) budget: Budget,
    /// Size of a virtual device, or the reservation on a remote host: the upper limit of the load line, and the base of
    /// relative budgets.
    pub(super) fixed_capacity: Option<Bytes>,
    /// Load line that holds now: the budget, or less under memory pressure.
    pub(crate) bytes: Bytes,
    /// Load line of host memory that holds now: the budget, or less under memory pressure.
    pub(crate) host: Bytes,
    pub(super) host_budget: Bytes,
    /// Largest host arena so far.
    pub(super) host_peak_bytes: Bytes,
    /// Charges of the device without those of its Programs.
    pub(super) base_charges: Bytes,
    /// Recipe that was planned under the budget; the run returns to it when memory allows.
    pub(crate) preferred_recipe: Recipe,
    /// Step at which the preferred recipe is tried again after an out-of-memory error.
    pub(super) retry_step: Option<u64>,
    pub(super) retry_delay_steps: u64,
    /// Memory pressure on the device.
    pub(super) pressure: PressureMonitor,
    pub(super) host_pressure: PressureMonitor,
    /// Whether the user was told that the run cannot use less memory.
    pub(super) warned: bool,
}

impl LoadLine {
    /// Creates the load lines of a run that starts with this plan. `programs` is the part of its charges that the
    /// Programs cause.
    pub fn new(budget: Budget, fixed_capacity: Option<Bytes>, plan: &Plan, programs: Bytes) -> LoadLine {
        let pressure = PressureMonitor::new(Instant::now());
        LoadLine {
            budget,
            fixed_capacity,
            bytes: plan.devices[0].budget_bytes,
            host: plan.host.budget_bytes,
            host_budget: plan.host.budget_bytes,
            host_peak_bytes: plan.host.arena_bytes,
            base_charges: plan.devices[0].charges_bytes.saturating_sub(programs),
            preferred_recipe: plan.recipe.clone(),
            retry_step: None,
            retry_delay_steps: RETRY_DELAY_STEPS,
            pressure,
            host_pressure: pressure,
            warned: false,
        }
    }

    /// Returns the bytes of a budget if the device memory has `free` bytes for this run.
    pub(super) fn resolve(&self, budget: Budget, free: Bytes) -> Bytes {
        budget.load_line(self.fixed_capacity.unwrap_or(free))
    }

    /// Limits bytes to the fixed capacity of the device.
    pub(super) fn clamp(&self, bytes: Bytes) -> Bytes {
        self.fixed_capacity.map_or(bytes, |fixed_capacity| bytes.min(fixed_capacity))
    }

    /// Records the size of a host arena.
    pub fn record_host_bytes(&mut self, host: Bytes) {
        self.host_peak_bytes = self.host_peak_bytes.max(host);
    }
}
