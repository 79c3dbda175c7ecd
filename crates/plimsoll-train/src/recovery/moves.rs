//! Decision for or against a faster plan of the team: after a straggler was found, or when a lost device has returned.

use super::MAX_STEP_TIME_RATIO;

/// Smallest ratio of the time that a change of the plan saves, over all remaining steps, to the time that the change
/// takes.
const MIN_PAYBACK: f64 = 2.0;

/// Time figures of the run under its present plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoveState {
    /// Predicted seconds of a step if nothing changes.
    pub step_seconds: f64,
    /// Number of remaining steps; infinite for a run without limit.
    pub remaining_steps: f64,
    /// Seconds that saving a checkpoint and restarting from it take. `None` if the run saves no checkpoints, and so
    /// cannot restart.
    pub restart_seconds: Option<f64>,
}

/// Another plan of the team, to which the run could change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoveCandidate {
    /// Predicted seconds of a step under this plan.
    pub step_seconds: f64,
    /// Whether every worker already holds the weights and optimizer state that it needs under this plan. Otherwise the
    /// run must restart from a checkpoint to change.
    pub keeps_state: bool,
}

/// Decides whether the run changes to another plan. A step under that plan must be faster by more than 2 %. Over the
/// remaining steps, the change must save more than twice the time that it takes.
pub fn is_worth_moving(now: &MoveState, candidate: &MoveCandidate) -> bool {
    let cost_seconds = match candidate.keeps_state {
        true => 0.0,
        false => now.restart_seconds.unwrap_or(f64::INFINITY),
    };
    let saved_seconds = (now.step_seconds - candidate.step_seconds) * now.remaining_steps;
    candidate.step_seconds < now.step_seconds * MAX_STEP_TIME_RATIO && saved_seconds > MIN_PAYBACK * cost_seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_plan_must_repay_its_cost() {
        let now = MoveState { step_seconds: 1.0, remaining_steps: 100.0, restart_seconds: Some(10.0) };
        let last_steps = MoveState { remaining_steps: 20.0, ..now };
        let endless = MoveState { remaining_steps: f64::INFINITY, ..now };
        let unsaved = MoveState { restart_seconds: None, ..endless };
        let in_place = |step_seconds| MoveCandidate { step_seconds, keeps_state: true };
        let restart = |step_seconds| MoveCandidate { step_seconds, keeps_state: false };
        let rows = [
            // A straggler: the other workers take sequences, and all state stays in place.
            (now, in_place(0.97), true),
            (now, in_place(0.99), false),
            (last_steps, in_place(0.97), true),
            (unsaved, in_place(0.97), true),
            // A straggler of a pipeline, or a device that has returned: state moves through a checkpoint.
            (now, restart(0.75), true),
            (now, restart(0.85), false),
            (last_steps, restart(0.75), false),
            (endless, restart(0.97), true),
            (unsaved, restart(0.5), false),
            (now, restart(1.5), false),
            // The run is over.
            (MoveState { remaining_steps: 0.0, ..now }, in_place(0.5), false),
        ];
        for (now, candidate, moves) in rows {
            assert_eq!(is_worth_moving(&now, &candidate), moves, "{now:?}, {candidate:?}");
        }
    }
}
