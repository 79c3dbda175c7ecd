//! The smallest load line of a run before it gets slower. The runs of a sweep use it to share the memory of a device.

use super::{PlanOutcome, PlanRequest, search};
use crate::bisection;
use plimsoll_core::{Bytes, DeviceSpec, Rung};

/// Most searches for a plan while bisection narrows the load line.
const MAX_SEARCHES: u32 = 7;

/// A plan with little memory, and the time of the fastest plan for comparison.
#[derive(Clone, Debug)]
pub struct LeastMemoryPlan {
    /// The plan under the lowest load line found; the refusal if nothing fits.
    pub outcome: PlanOutcome,
    /// Predicted seconds of a step of the fastest plan, under the whole load line of the device.
    pub fastest_step_seconds: f64,
}

/// Finds by bisection the lowest load line at which a step is at most `max_slowdown` longer than under the fastest plan
/// (0.02 is 2 %). The plan takes the same lossy rungs as the fastest plan. If nothing fits, the outcome is the refusal
/// of [`search`].
pub fn least_memory_plan(request: &PlanRequest, max_slowdown: f64) -> LeastMemoryPlan {
    let fastest = search(request);
    let fastest_step_seconds = fastest.plan.predicted.step_seconds;
    if !fastest.plan.fits {
        return LeastMemoryPlan { outcome: fastest, fastest_step_seconds };
    }
    let peak = |outcome: &PlanOutcome| outcome.plan.devices[0].peak_bytes;
    let max_seconds = fastest_step_seconds * (1.0 + max_slowdown);
    let mut best = fastest;
    let (too_low, enough) = (request.device.charges.0, peak(&best).0);
    bisection::narrow(too_low, enough, MAX_SEARCHES, u64::midpoint, |line| {
        best = plan_under(request, Bytes(line), &best.plan.rungs, max_seconds)?;
        Some(peak(&best).0)
    });
    LeastMemoryPlan { outcome: best, fastest_step_seconds }
}

/// Finds the fastest plan if the device's load line is `line`. Returns `None` if no plan fits. Also returns `None` if
/// the plan takes other lossy rungs than `rungs`, or more than `max_seconds` for a step.
fn plan_under(request: &PlanRequest, line: Bytes, rungs: &[Rung], max_seconds: f64) -> Option<PlanOutcome> {
    let device = DeviceSpec { budget: line, ..request.device.clone() };
    let outcome = search(&PlanRequest { device: &device, ..request.clone() });
    let plan = &outcome.plan;
    let is_as_fast = plan.fits && plan.rungs == rungs && plan.predicted.step_seconds <= max_seconds;
    is_as_fast.then_some(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::paper;
    use crate::testing;
    use plimsoll_core::{Budget, DType};
    use plimsoll_program::models::preset;

    #[test]
    fn least_memory_plan_is_smaller_and_hardly_slower() {
        let config = preset("smollm2-135m").unwrap();
        let device = paper("rtx3090", Budget::DEVICE).unwrap();
        let request = PlanRequest { precision: DType::Bf16, ..testing::request(&config, &device, 512, 32) };
        let fastest = search(&request).plan;
        let LeastMemoryPlan { outcome, fastest_step_seconds } = least_memory_plan(&request, 0.02);
        let peak = outcome.plan.devices[0].peak_bytes;
        assert_eq!(fastest_step_seconds, fastest.predicted.step_seconds);
        assert!(outcome.plan.predicted.step_seconds <= fastest_step_seconds * 1.02);
        assert!(peak.0 < fastest.devices[0].peak_bytes.0 * 9 / 10, "{peak} of {}", fastest.devices[0].peak_bytes);
        let own = DeviceSpec { budget: peak, ..device.clone() };
        let under_own_peak = search(&PlanRequest { device: &own, ..request }).plan;
        assert!(under_own_peak.fits && under_own_peak.predicted.step_seconds <= fastest_step_seconds * 1.02);
    }
}
