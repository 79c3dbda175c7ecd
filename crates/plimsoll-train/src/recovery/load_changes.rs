//! Decisions when a load line changes, or when other processes take or free memory.

use super::MAX_STEP_TIME_RATIO;
use super::pressure::PressureSignal;
use plimsoll_core::{Budget, Bytes};

/// Memory of a device, which limits the budget that the user can set while the run is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Bytes of the device's memory that are free, plus those that this run holds already.
    pub total: Bytes,
    /// Highest load line (most bytes that the run may hold) that the memory allows.
    pub largest_line: Bytes,
}

/// A budget that the user asked for, reduced if the memory of the device does not allow it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrantedBudget {
    /// The requested budget. If the memory allows only less, the bytes in `line` instead.
    pub budget: Budget,
    /// Load line (most bytes that the run may hold) that this budget gives the device.
    pub line: Bytes,
    /// Load line that the user asked for, if the memory allows only less; `None` if the request is granted in full.
    pub reduced_from: Option<Bytes>,
}

impl GrantedBudget {
    /// Grants `budget`, which asks for a load line of `requested` bytes. Reduces it to `limits.largest_line` if it asks
    /// for more.
    pub fn new(budget: Budget, requested: Bytes, limits: &MemoryLimits) -> GrantedBudget {
        let line = requested.min(limits.largest_line);
        match line < requested {
            true => GrantedBudget { budget: Budget::Amount(line), line, reduced_from: Some(requested) },
            false => GrantedBudget { budget, line, reduced_from: None },
        }
    }
}

/// Figures of a worker's plan, by which decisions compare plans.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanFigures {
    /// Most bytes that the plan needs on the device.
    pub peak_bytes: Bytes,
    /// Bytes of the host arena.
    pub host_arena_bytes: Bytes,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
}

/// Load lines (most bytes that the run may hold) and plan of a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadState {
    /// Present load line of the device.
    pub device_line: Bytes,
    /// Present load line of the host memory.
    pub host_line: Bytes,
    /// Figures of the present plan.
    pub plan: PlanFigures,
}

/// A change of the memory that a worker may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LoadEvent {
    /// The user asked for another load line (most bytes that the run may hold) of the device.
    BudgetRequest {
        /// The requested load line. If the memory of the device allows only a lower one, the highest that it allows.
        line: Bytes,
        /// Figures of the fastest plan under `line`; `None` if no plan fits.
        fastest: Option<PlanFigures>,
    },
    /// The device memory was checked, with this result.
    DevicePressure(PressureSignal),
    /// The host memory was checked, with this result.
    HostPressure(PressureSignal),
    /// The run has found another plan that fits now, with these figures.
    PlanFound(PlanFigures),
}

/// Reaction to a [`LoadEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadAction {
    /// Keep the plan.
    Keep,
    /// Refuse the user's request for another load line.
    Refuse,
    /// Switch to the plan whose figures the event holds.
    Switch,
    /// Use less memory: set these load lines (most bytes to hold) and switch to the fastest plan under them. If no plan
    /// fits, keep the present plan and load lines.
    Shrink {
        /// New load line of the device.
        device: Bytes,
        /// New load line of the host memory.
        host: Bytes,
    },
    /// Use more memory: set these load lines (most bytes to hold) and look for a faster plan under them.
    Grow {
        /// New load line of the device.
        device: Bytes,
        /// New load line of the host memory.
        host: Bytes,
    },
}

/// Decides how a worker reacts when the memory that it may use has changed. `now` holds its load lines and plan.
pub fn decide_load_change(now: &LoadState, event: LoadEvent) -> LoadAction {
    let LoadState { device_line, host_line, plan } = *now;
    match event {
        LoadEvent::BudgetRequest { fastest: None, .. } => LoadAction::Refuse,
        LoadEvent::BudgetRequest { line, fastest: Some(fastest) } => {
            match plan.peak_bytes <= line && fastest.step_seconds >= plan.step_seconds {
                true => LoadAction::Keep,
                false => LoadAction::Switch,
            }
        }
        LoadEvent::DevicePressure(PressureSignal::Shrink(left)) if left < plan.peak_bytes => {
            LoadAction::Shrink { device: left, host: host_line }
        }
        LoadEvent::HostPressure(PressureSignal::Shrink(left)) if left < plan.host_arena_bytes => {
            LoadAction::Shrink { device: device_line, host: left }
        }
        LoadEvent::DevicePressure(PressureSignal::Grow(available)) => {
            LoadAction::Grow { device: available, host: host_line }
        }
        LoadEvent::HostPressure(PressureSignal::Grow(available)) => {
            LoadAction::Grow { device: device_line, host: available }
        }
        LoadEvent::DevicePressure(_) | LoadEvent::HostPressure(_) => LoadAction::Keep,
        LoadEvent::PlanFound(found) => match found.step_seconds < plan.step_seconds * MAX_STEP_TIME_RATIO {
            true => LoadAction::Switch,
            false => LoadAction::Keep,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LoadAction::{Grow, Keep, Refuse, Shrink, Switch};
    use LoadEvent::{DevicePressure, HostPressure, PlanFound};

    /// A plan with a peak in MiB, a host arena of 3 MiB and a step time.
    fn plan(peak: u64, step_seconds: f64) -> PlanFigures {
        PlanFigures { peak_bytes: Bytes::mib(peak), host_arena_bytes: Bytes::mib(3), step_seconds }
    }

    fn request(line: u64, fastest: Option<PlanFigures>) -> LoadEvent {
        LoadEvent::BudgetRequest { line: Bytes::mib(line), fastest }
    }

    #[test]
    fn load_changes_have_these_actions() {
        let mib = Bytes::mib;
        let now = LoadState { device_line: mib(10), host_line: mib(5), plan: plan(8, 1.0) };
        let rows = [
            // The user changes the load line.
            (request(4, None), Refuse),
            (request(9, Some(plan(8, 1.0))), Keep),
            (request(8, Some(plan(7, 1.1))), Keep),
            (request(7, Some(plan(7, 1.1))), Switch),
            (request(20, Some(plan(15, 0.9))), Switch),
            // Other processes take or free memory.
            (DevicePressure(PressureSignal::None), Keep),
            (DevicePressure(PressureSignal::Shrink(mib(8))), Keep),
            (DevicePressure(PressureSignal::Shrink(mib(7))), Shrink { device: mib(7), host: mib(5) }),
            (DevicePressure(PressureSignal::Grow(mib(12))), Grow { device: mib(12), host: mib(5) }),
            (HostPressure(PressureSignal::None), Keep),
            (HostPressure(PressureSignal::Shrink(mib(3))), Keep),
            (HostPressure(PressureSignal::Shrink(mib(2))), Shrink { device: mib(10), host: mib(2) }),
            (HostPressure(PressureSignal::Grow(mib(6))), Grow { device: mib(10), host: mib(6) }),
            // A faster plan fits again.
            (PlanFound(plan(9, 0.97)), Switch),
            (PlanFound(plan(9, 0.99)), Keep),
            (PlanFound(plan(6, 1.2)), Keep),
        ];
        for (event, action) in rows {
            assert_eq!(decide_load_change(&now, event), action, "{event:?}");
        }
    }

    #[test]
    fn budget_is_granted_up_to_available_memory() {
        let limits = MemoryLimits { total: Bytes::gib(8), largest_line: Bytes::gib(6) };
        let share = Budget::Share(0.5);
        let granted = GrantedBudget::new(share, Bytes::gib(4), &limits);
        assert_eq!(granted, GrantedBudget { budget: share, line: Bytes::gib(4), reduced_from: None });
        let line = Bytes::gib(6);
        let reduced = GrantedBudget { budget: Budget::Amount(line), line, reduced_from: Some(Bytes::gib(8)) };
        assert_eq!(GrantedBudget::new(Budget::Share(1.0), Bytes::gib(8), &limits), reduced);
    }
}
