//! The load line of a device during a run: the user's budget, and how much less other processes leave.

use super::pressure::PressureMonitor;
use plimsoll_core::{Budget, Bytes, Plan, Recipe};
use std::time::Instant;

/// Number of steps from an out-of-memory error to the first attempt to return to the preferred recipe. Each failed
/// attempt doubles it.
const RETRY_DELAY_STEPS: u64 = 32;

/// Schedule of attempts to return to the preferred recipe, which was planned under the user's budget. After an
/// out-of-memory error the run trains under a smaller recipe, and tries the preferred one again later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetrySchedule {
    /// Step for which the most recent attempt was planned, whether the run has made it or not. `None` before the first
    /// out-of-memory error.
    due_step: Option<u64>,
    /// Whether that attempt is still to be made.
    is_pending: bool,
    /// Number of steps between an out-of-memory error or failed attempt and the next attempt.
    delay_steps: u64,
}

impl Default for RetrySchedule {
    fn default() -> RetrySchedule {
        RetrySchedule { due_step: None, is_pending: false, delay_steps: RETRY_DELAY_STEPS }
    }
}

impl RetrySchedule {
    /// Plans an attempt to return to the preferred recipe, because of an out-of-memory error in `step`. Doubles
    /// `delay_steps` if `step` lies before the previously planned attempt, or fewer than `delay_steps` steps after it.
    pub fn record_fallback(&mut self, step: u64) {
        if self.due_step.is_some_and(|due_step| step < due_step + self.delay_steps) {
            self.delay_steps = self.delay_steps.saturating_mul(2);
        }
        self.plan_after(step);
    }

    /// Plans another attempt to return to the preferred recipe, after one that failed in `step`. Doubles the delay.
    pub fn record_failed_attempt(&mut self, step: u64) {
        self.delay_steps = self.delay_steps.saturating_mul(2);
        self.plan_after(step);
    }

    fn plan_after(&mut self, step: u64) {
        self.due_step = Some(step + self.delay_steps);
        self.is_pending = true;
    }

    /// Whether an attempt to return to the preferred recipe is due after `step`. Each planned attempt is reported as
    /// due only once.
    pub fn take_due(&mut self, step: u64) -> bool {
        let is_due = self.is_pending && self.due_step.is_some_and(|due_step| step >= due_step);
        self.is_pending &= !is_due;
        is_due
    }
}

/// Load lines of one device and of its host memory, with the state from which they change. A load line is the most
/// bytes that the run may hold there.
pub struct LoadLine {
    /// Budget that the user set for the device, in the run file or later. It is an amount in bytes for a device of
    /// fixed capacity.
    pub(crate) budget: Budget,
    /// Size of a virtual device, or memory that is reserved for the run on a remote host; `None` for other devices. It
    /// is the upper limit of the load line. A budget that is a share is a share of it.
    pub(crate) fixed_capacity: Option<Bytes>,
    /// Present load line of the device: the budget, or less under memory pressure.
    pub(crate) bytes: Bytes,
    /// Present load line of host memory: the budget, or less under memory pressure.
    pub(crate) host: Bytes,
    pub(crate) host_budget: Bytes,
    /// Size of the largest host arena so far.
    pub(crate) host_peak_bytes: Bytes,
    /// Charges of the device (bytes outside its arena) without the part that its Programs cause.
    pub(crate) base_charges: Bytes,
    /// Recipe that was planned under the user's budget. The run returns to it when memory allows.
    pub(crate) preferred_recipe: Recipe,
    /// Schedule of the attempts to return to the preferred recipe after an out-of-memory error.
    pub(crate) retry: RetrySchedule,
    /// State of the checks for memory pressure on the device.
    pub(crate) pressure: PressureMonitor,
    pub(crate) host_pressure: PressureMonitor,
    /// Whether the user has been warned that the run cannot use less memory.
    pub(crate) warned: bool,
}

impl LoadLine {
    /// Creates the load lines of a worker that starts with `plan`. `programs` is the part of the worker's charges
    /// (bytes outside the arena) that its Programs cause.
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
            retry: RetrySchedule::default(),
            pressure,
            host_pressure: pressure,
            warned: false,
        }
    }

    /// Returns the load line in bytes that `budget` gives the device. If `budget` is a share, it is a share of the
    /// device's fixed capacity. Without a fixed capacity, it is a share of `free`, the bytes that the run can use.
    pub(crate) fn resolve(&self, budget: Budget, free: Bytes) -> Bytes {
        budget.load_line(self.fixed_capacity.unwrap_or(free))
    }

    /// Returns `bytes`, but at most the fixed capacity of the device if it has one.
    pub(crate) fn clamp(&self, bytes: Bytes) -> Bytes {
        self.fixed_capacity.map_or(bytes, |fixed_capacity| bytes.min(fixed_capacity))
    }

    /// Records a host arena of `host` bytes. The largest size so far is kept.
    pub fn record_host_bytes(&mut self, host: Bytes) {
        self.host_peak_bytes = self.host_peak_bytes.max(host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_delay_doubles_after_failed_attempts() {
        let mut retry = RetrySchedule::default();
        assert!(!retry.take_due(1000));
        retry.record_fallback(10);
        assert!(!retry.take_due(41) && retry.take_due(42) && !retry.take_due(43));
        retry.record_failed_attempt(42);
        assert!(!retry.take_due(105) && retry.take_due(106));
        // Another error before the attempt is due.
        retry.record_fallback(200);
        retry.record_fallback(210);
        assert!(!retry.take_due(337) && retry.take_due(338));
        // Long after the last attempt the delay stays.
        retry.record_fallback(1000);
        assert!(!retry.take_due(1127) && retry.take_due(1128));
        // The attempt itself ran out of memory soon after.
        retry.record_fallback(1130);
        assert!(!retry.take_due(1385) && retry.take_due(1386));
    }
}
