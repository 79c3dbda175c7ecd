//! Decisions after a device ran out of memory or was lost.
//!
//! Recovery is bounded: after more than [`MAX_DEVICE_REFUSALS`] out-of-memory errors of a device without progress, the
//! run continues without that device, or stops.

use std::collections::BTreeMap;

/// Number of out-of-memory errors of one device, without progress in between, that the run tolerates. After one more,
/// the run continues without the device or stops.
pub(crate) const MAX_DEVICE_REFUSALS: u32 = 6;

/// Number of out-of-memory errors of each device, by name, since the run last made progress. A device that is reopened
/// keeps its count.
#[derive(Debug, Default)]
pub struct RefusalCounts(BTreeMap<String, u32>);

impl RefusalCounts {
    /// Counts one more out-of-memory error of a device. Returns its number of errors since the run last made progress.
    pub fn record(&mut self, device: &str) -> u32 {
        let count = self.0.entry(device.to_owned()).or_default();
        *count += 1;
        *count
    }

    /// Whether a device had more than [`MAX_DEVICE_REFUSALS`] out-of-memory errors since the run last made progress.
    pub fn is_over_limit(&self, device: &str) -> bool {
        self.0.get(device).is_some_and(|count| *count > MAX_DEVICE_REFUSALS)
    }

    /// Sets the counts of all devices to 0. Call it when the run has made progress.
    pub fn reset(&mut self) {
        self.0.clear();
    }
}

/// State of the team when one of its workers fails. The failing worker still counts as a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TeamState {
    /// Number of workers, with the failing one.
    pub workers: usize,
    /// Whether each worker holds a part of the model that no other has, as in a sharded or pipeline team.
    pub partitioned: bool,
    /// Whether the run has devices outside the team that could take over.
    pub has_unused_devices: bool,
    /// Whether the workers have loaded weights and optimizer state.
    pub state_loaded: bool,
}

impl TeamState {
    /// Whether each worker holds all weights and the whole optimizer state, so that they can be saved. False for a team
    /// without workers.
    pub fn holds_whole_state(&self) -> bool {
        self.workers > 0 && !self.partitioned
    }

    /// Whether any single worker can leave without loss of weights or optimizer state, because another holds a copy.
    fn can_spare_worker(&self) -> bool {
        self.workers > 1 && self.holds_whole_state()
    }
}

/// Work in which a device failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Work that leaves the weights as they are and can be repeated: loading, gradients, evaluation, saving.
    Repeatable,
    /// The update of the weights. Once begun, it cannot be undone, only finished.
    Update {
        /// Whether an op of the update is done on any worker.
        begun: bool,
    },
    /// The switch of all workers to another plan of the team.
    PlanSwitch,
}

/// A failure of a device, or of an attempt to recover from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureEvent {
    /// A device ran out of memory.
    OutOfMemory {
        /// Work in which the device failed.
        work: Work,
        /// Number of out-of-memory errors of the device since the run last made progress, this one included.
        refusals: u32,
        /// Whether fault injection caused the error. An injected error comes before the op changes anything, and says
        /// nothing about the real memory.
        injected: bool,
    },
    /// A device is lost, with all tensors in its arena.
    Lost {
        /// Work in which the device was lost.
        work: Work,
    },
    /// A device ran out of memory and could not switch to a smaller plan: none fits, or the device refused it.
    NoSmallerPlan,
}

/// Reaction to a [`FailureEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureAction {
    /// Switch the device to a plan with a smaller arena, and repeat the work.
    FallBack {
        /// Whether the peak bytes of the new plan are stored as the most that the device can hold, for later runs.
        learns_line: bool,
    },
    /// Continue the update with the op that failed, under the same plan.
    ContinueUpdate,
    /// Repeat the switch of all workers to the new plan of the team.
    RepeatSwitch,
    /// Split the work anew over all workers, so that the device holds less. If there is no such plan, repeat the work
    /// unchanged.
    Rebalance,
    /// Repeat the work under the same plan.
    RepeatUnchanged,
    /// Remove the device. The other workers finish the update and share its work after the step.
    FinishStepWithout,
    /// Remove the device. The other workers share its work and repeat the step with the same samples.
    RebalanceWithout,
    /// Remove the device and restart from the newest checkpoint, on the other workers or on unused devices. If nothing
    /// fits there, the run stops.
    RestartWithout {
        /// Whether the run first tries to save the state of the last finished step, which the device still holds.
        saves_first: bool,
    },
    /// Stop the run, which can be resumed.
    Stop {
        /// Whether weights and optimizer state are still those of the last finished step.
        state_intact: bool,
    },
}

/// Decides what a run does after a failure.
pub fn decide_after_failure(team: &TeamState, event: FailureEvent) -> FailureAction {
    match event {
        FailureEvent::OutOfMemory { work, refusals, injected } if refusals <= MAX_DEVICE_REFUSALS => match work {
            Work::Repeatable => FailureAction::FallBack { learns_line: !injected },
            Work::Update { .. } => FailureAction::ContinueUpdate,
            Work::PlanSwitch => FailureAction::RepeatSwitch,
        },
        FailureEvent::OutOfMemory { work, injected, .. } => {
            let state_intact = match work {
                Work::Update { begun } => !begun && injected,
                Work::Repeatable | Work::PlanSwitch => true,
            };
            match team.workers == 1 && !team.has_unused_devices {
                true => FailureAction::Stop { state_intact },
                false => continue_without(team, work, state_intact && team.state_loaded),
            }
        }
        FailureEvent::Lost { work } => continue_without(team, work, false),
        FailureEvent::NoSmallerPlan if team.workers > 1 => FailureAction::Rebalance,
        FailureEvent::NoSmallerPlan => FailureAction::RepeatUnchanged,
    }
}

/// Decides how the run continues without the failing worker. `can_save` tells whether that worker still holds the state
/// of the last finished step, so that it can be saved first.
fn continue_without(team: &TeamState, work: Work, can_save: bool) -> FailureAction {
    match work {
        _ if !team.can_spare_worker() => FailureAction::RestartWithout { saves_first: can_save },
        Work::Update { .. } => FailureAction::FinishStepWithout,
        Work::Repeatable | Work::PlanSwitch => FailureAction::RebalanceWithout,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FailureAction::{
        ContinueUpdate, FallBack, FinishStepWithout, Rebalance, RebalanceWithout, RepeatSwitch, RepeatUnchanged,
        RestartWithout, Stop,
    };
    use FailureEvent::{Lost, NoSmallerPlan};
    use Work::{PlanSwitch, Repeatable, Update};

    const ALONE: TeamState =
        TeamState { workers: 1, partitioned: false, has_unused_devices: false, state_loaded: true };
    const ALONE_WITH_UNUSED: TeamState = TeamState { has_unused_devices: true, ..ALONE };
    const DATA_PARALLEL: TeamState = TeamState { workers: 3, ..ALONE };
    const SHARDED: TeamState = TeamState { partitioned: true, ..DATA_PARALLEL };
    const OPENING: TeamState = TeamState { state_loaded: false, ..SHARDED };

    /// A real out-of-memory error, the first since the run made progress.
    fn first(work: Work) -> FailureEvent {
        FailureEvent::OutOfMemory { work, refusals: 1, injected: false }
    }

    /// A real out-of-memory error, one more than the run tolerates.
    fn excess(work: Work) -> FailureEvent {
        FailureEvent::OutOfMemory { work, refusals: MAX_DEVICE_REFUSALS + 1, injected: false }
    }

    fn injected(event: FailureEvent) -> FailureEvent {
        match event {
            FailureEvent::OutOfMemory { work, refusals, .. } => {
                FailureEvent::OutOfMemory { work, refusals, injected: true }
            }
            other => other,
        }
    }

    const BEFORE_UPDATE: Work = Update { begun: false };
    const IN_UPDATE: Work = Update { begun: true };

    #[test]
    fn failures_have_these_actions() {
        let rows = [
            // Out of memory, within the limit.
            (ALONE, first(Repeatable), FallBack { learns_line: true }),
            (ALONE, injected(first(Repeatable)), FallBack { learns_line: false }),
            (SHARDED, first(Repeatable), FallBack { learns_line: true }),
            (ALONE, first(BEFORE_UPDATE), ContinueUpdate),
            (DATA_PARALLEL, first(IN_UPDATE), ContinueUpdate),
            (DATA_PARALLEL, first(PlanSwitch), RepeatSwitch),
            // No smaller plan.
            (ALONE, NoSmallerPlan, RepeatUnchanged),
            (ALONE_WITH_UNUSED, NoSmallerPlan, RepeatUnchanged),
            (DATA_PARALLEL, NoSmallerPlan, Rebalance),
            (SHARDED, NoSmallerPlan, Rebalance),
            // Out of memory too often: other devices take over, or the run stops.
            (ALONE, excess(Repeatable), Stop { state_intact: true }),
            (ALONE, excess(BEFORE_UPDATE), Stop { state_intact: false }),
            (ALONE, injected(excess(BEFORE_UPDATE)), Stop { state_intact: true }),
            (ALONE, injected(excess(IN_UPDATE)), Stop { state_intact: false }),
            (ALONE_WITH_UNUSED, excess(Repeatable), RestartWithout { saves_first: true }),
            (ALONE_WITH_UNUSED, excess(IN_UPDATE), RestartWithout { saves_first: false }),
            (ALONE_WITH_UNUSED, injected(excess(BEFORE_UPDATE)), RestartWithout { saves_first: true }),
            (DATA_PARALLEL, excess(Repeatable), RebalanceWithout),
            (DATA_PARALLEL, excess(PlanSwitch), RebalanceWithout),
            (DATA_PARALLEL, excess(BEFORE_UPDATE), FinishStepWithout),
            (DATA_PARALLEL, excess(IN_UPDATE), FinishStepWithout),
            (SHARDED, excess(Repeatable), RestartWithout { saves_first: true }),
            (SHARDED, excess(PlanSwitch), RestartWithout { saves_first: true }),
            (SHARDED, excess(IN_UPDATE), RestartWithout { saves_first: false }),
            (OPENING, excess(Repeatable), RestartWithout { saves_first: false }),
            // Lost devices. Their state is never saved.
            (DATA_PARALLEL, Lost { work: Repeatable }, RebalanceWithout),
            (DATA_PARALLEL, Lost { work: PlanSwitch }, RebalanceWithout),
            (DATA_PARALLEL, Lost { work: IN_UPDATE }, FinishStepWithout),
            (SHARDED, Lost { work: Repeatable }, RestartWithout { saves_first: false }),
            (SHARDED, Lost { work: IN_UPDATE }, RestartWithout { saves_first: false }),
            (ALONE_WITH_UNUSED, Lost { work: Repeatable }, RestartWithout { saves_first: false }),
            // Everything is lost: the restart finds no plan and stops.
            (ALONE, Lost { work: Repeatable }, RestartWithout { saves_first: false }),
            (ALONE, Lost { work: IN_UPDATE }, RestartWithout { saves_first: false }),
        ];
        for (team, event, action) in rows {
            assert_eq!(decide_after_failure(&team, event), action, "{team:?}, {event:?}");
        }
    }

    #[test]
    fn last_tolerated_refusal_still_recovers() {
        let refused = |refusals| FailureEvent::OutOfMemory { work: Repeatable, refusals, injected: false };
        for refusals in 1..=MAX_DEVICE_REFUSALS {
            assert_eq!(decide_after_failure(&ALONE, refused(refusals)), FallBack { learns_line: true });
        }
        let excess = refused(MAX_DEVICE_REFUSALS + 1);
        assert_eq!(decide_after_failure(&ALONE, excess), Stop { state_intact: true });
    }

    #[test]
    fn refusals_of_devices_are_counted_apart_until_progress() {
        let mut counts = RefusalCounts::default();
        let counted: Vec<u32> = (0..=MAX_DEVICE_REFUSALS).map(|_| counts.record("a")).collect();
        assert_eq!((counted.last(), counts.record("b")), (Some(&(MAX_DEVICE_REFUSALS + 1)), 1));
        assert!(counts.is_over_limit("a") && !counts.is_over_limit("b") && !counts.is_over_limit("c"));
        counts.reset();
        assert_eq!((counts.is_over_limit("a"), counts.record("a")), (false, 1));
    }

    #[test]
    fn partial_or_empty_team_lacks_state() {
        let empty = TeamState { workers: 0, ..ALONE };
        let states = [ALONE, DATA_PARALLEL, SHARDED, empty].map(|team| team.holds_whole_state());
        assert_eq!(states, [true, true, false, false]);
    }
}
