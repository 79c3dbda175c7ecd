//! Failures of devices: carries out what [`recovery::failures`](crate::recovery::failures) decides. Weights, optimizer
//! state and samples stay bit-identical.
//!
//! - After an out-of-memory error the device takes the next recipe with a smaller arena, first among those that keep
//!   every bit, then among all. In a team only this device changes. If no recipe of its share is small enough, the work
//!   is rebalanced (`rebalance`).
//! - When memory is free again, the run restores the faster plan, after a delay that grows with each failed attempt
//!   (`load_changes`).
//! - A lost device, or one with too many out-of-memory errors, is removed, and the others continue (`device_loss`).

use crate::engine::failure::DeviceFailure;
use crate::events::EventLog;
use crate::planning::planner::{ActiveShare, RecipeChoice};
use crate::recovery::LoadLine;
use crate::recovery::failures::{
    FailureAction, FailureEvent, MAX_DEVICE_REFUSALS, TeamState, Work, decide_after_failure,
};
use crate::session::interrupt::{Continuation, StepInterrupt};
use crate::session::training::Session;
use crate::team::{PredictedCompute, Worker};
use plimsoll_core::{Bytes, Class, DeviceSpec, Event, Failure, Recipe, Recovery};
use plimsoll_device::error::DeviceError;
use plimsoll_device::process;
use plimsoll_plan::search::PlanOutcome;
use std::time::Instant;

/// A failure of a device that recovery can resolve.
struct RecoverableFailure {
    rank: usize,
    event: FailureEvent,
    /// Description for the log.
    reason: String,
}

impl Session {
    /// Runs `work` until it succeeds. After each out-of-memory error the device takes a plan with a smaller arena; lost
    /// devices are removed. After success, forgets all counted out-of-memory errors, because the run made progress.
    pub(crate) fn run_with_recovery<T>(
        &mut self,
        log: &mut EventLog,
        work: impl FnMut(&mut Session) -> Result<T, DeviceFailure>,
    ) -> Result<T, StepInterrupt> {
        let done = self.retry_with_recovery(log, work)?;
        self.reset_refusals();
        Ok(done)
    }

    /// Runs `work` like [`Session::run_with_recovery`], but keeps the counts of out-of-memory errors, for work that
    /// makes no progress.
    pub(crate) fn retry_with_recovery<T>(
        &mut self,
        log: &mut EventLog,
        mut work: impl FnMut(&mut Session) -> Result<T, DeviceFailure>,
    ) -> Result<T, StepInterrupt> {
        loop {
            match work(self) {
                Ok(value) => return Ok(value),
                Err(failure) => {
                    self.recover(failure, Work::Repeatable, log)?;
                }
            }
        }
    }

    /// Recovers from a failure of a device in `work`, and returns how the caller continues that work.
    ///
    /// # Errors
    /// The failure cannot be resolved, the run stops, or it restarted from a checkpoint.
    pub(crate) fn recover(
        &mut self,
        failure: DeviceFailure,
        work: Work,
        log: &mut EventLog,
    ) -> Result<Continuation, StepInterrupt> {
        let RecoverableFailure { rank, event, reason } = self.classify_failure(failure, work)?;
        match decide_after_failure(&self.team_state(), event) {
            FailureAction::FallBack { learns_line } => self.fall_back(rank, reason, learns_line, log)?,
            FailureAction::ContinueUpdate => self.log_unchanged_plan(rank, reason, Instant::now(), log)?,
            FailureAction::RepeatSwitch | FailureAction::Rebalance | FailureAction::RepeatUnchanged => {}
            FailureAction::FinishStepWithout => {
                self.remove_lost_worker(rank, &reason, log)?;
                return Ok(Continuation::FinishStep(reason));
            }
            FailureAction::RebalanceWithout => {
                self.remove_lost_worker(rank, &reason, log)?;
                self.rebalance(&reason, log)?;
                return Ok(Continuation::PlanChanged);
            }
            FailureAction::RestartWithout { saves_first } => {
                if saves_first {
                    self.save_if_possible(MAX_DEVICE_REFUSALS, log)?;
                }
                return Err(self.restart_without(rank, &reason, log));
            }
            FailureAction::Stop { state_intact } => {
                let failure = Failure::stopped(format!("step {}: {reason}", self.current_step));
                return Err(StepInterrupt::Stop { failure, state_intact });
            }
        }
        Ok(Continuation::Repeat)
    }

    /// Describes `failure`, which occurred in `work`, as an event for `recovery`. Counts it if it is an out-of-memory
    /// error.
    ///
    /// # Errors
    /// The failure is neither an out-of-memory error nor the loss of a device, so nothing can resolve it.
    fn classify_failure(&mut self, failure: DeviceFailure, work: Work) -> Result<RecoverableFailure, StepInterrupt> {
        match failure {
            DeviceFailure::OutOfMemory { rank, error } => {
                let alone = self.team.len() == 1;
                let name = self.worker(rank).device.name.clone();
                let refusals = self.recovery.refusals.record(&name);
                let reason = match refusals > MAX_DEVICE_REFUSALS {
                    false => format!("{name}: {error}"),
                    true if alone => format!("{error}; {refusals} refusals in a row"),
                    true => format!("{name}: {error}; {refusals} refusals in a row"),
                };
                // Devices report their own errors by other variants.
                let injected = matches!(error, DeviceError::OutOfMemory { .. });
                let event = FailureEvent::OutOfMemory { work, refusals, injected };
                Ok(RecoverableFailure { rank, event, reason })
            }
            DeviceFailure::Lost { rank, reason } => {
                Ok(RecoverableFailure { rank, event: FailureEvent::Lost { work }, reason })
            }
            other => Err(other.into()),
        }
    }

    /// Returns the state of the team, for decisions.
    pub(super) fn team_state(&self) -> TeamState {
        TeamState {
            workers: self.team.len(),
            partitioned: self.team.len() > 0 && self.team.is_partitioned(),
            has_unused_devices: !self.unused_devices(&self.team.specs()).is_empty(),
            state_loaded: self.state_loaded,
        }
    }

    /// Returns the worker with this rank.
    pub(super) fn worker(&self, rank: usize) -> &Worker {
        &self.team.workers()[rank]
    }

    /// Returns the load line of a worker, for device and host memory, to change it.
    pub(super) fn line(&mut self, rank: usize) -> &mut LoadLine {
        &mut self.team.worker(rank).line
    }

    /// Gives a device a plan with a smaller arena after an out-of-memory error. If no smaller plan fits, rebalances the
    /// team so that the device needs less than its present arena. If that is not possible either, the plan stays. With
    /// `learns_line`, stores the peak of the smaller plan as the most that the device can hold, for later runs.
    fn fall_back(
        &mut self,
        rank: usize,
        reason: String,
        learns_line: bool,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        let start = Instant::now();
        let Worker { device, plan, .. } = self.worker(rank);
        let below = plan.devices[0].arena_bytes.saturating_sub(Bytes(1)) + device.charges;
        let Some(before) = self.take_plan_below(rank, below)? else {
            return match decide_after_failure(&self.team_state(), FailureEvent::NoSmallerPlan) {
                FailureAction::Rebalance if self.rebalance_below(rank, below, &reason, log)? => Ok(()),
                _ => Ok(self.log_unchanged_plan(rank, reason, start, log)?),
            };
        };
        if learns_line {
            self.store_learned_line(rank, &reason);
        }
        let step = self.current_step;
        self.line(rank).retry.record_fallback(step);
        Ok(self.log_recovery(rank, before, reason, start, log)?)
    }

    /// Switches a device to the fastest plan with a peak of at most `below`; plans that keep every bit come first.
    /// Returns the previous plan; `None` if no plan fits, or if the device refuses the switch or is lost.
    fn take_plan_below(&mut self, rank: usize, below: Bytes) -> Result<Option<PlanBefore>, StepInterrupt> {
        let host = self.worker(rank).line.host;
        let Some(answer) = self.fastest_plan_under(rank, below, host, true) else { return Ok(None) };
        match self.switch_plan(rank, answer) {
            Ok(before) => Ok(Some(before)),
            // The device keeps its plan, and the failure counts as one more refusal. A lost device is found when it works
            // next.
            Err(DeviceFailure::OutOfMemory { .. } | DeviceFailure::Lost { .. }) => Ok(None),
            Err(other) => Err(other.into()),
        }
    }

    /// Forgets the counted out-of-memory errors of all devices, because the run made progress.
    pub(crate) fn reset_refusals(&mut self) {
        self.recovery.refusals.reset();
    }

    /// Logs that work continues after an out-of-memory error with the same plan. Recovery began at `start`.
    fn log_unchanged_plan(
        &mut self,
        rank: usize,
        reason: String,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        self.log_recovery(rank, PlanBefore::of(self.worker(rank)), reason, start, log)
    }

    /// Plans the share of a worker under the load lines `line` of its device and `host` of host memory. `choice` limits
    /// the recipes. The resulting plan may not fit.
    pub(super) fn plan_share_under(
        &self,
        rank: usize,
        line: Bytes,
        host: Bytes,
        choice: RecipeChoice,
    ) -> Result<PlanOutcome, Failure> {
        let worker = self.worker(rank);
        let device = DeviceSpec { budget: line, charges: worker.line.base_charges, ..worker.device.clone() };
        self.context.planner(host).replan_share(&active_share(worker, &device), choice)
    }

    /// Returns the fastest plan of a worker's share under the load lines `line` of the device and `host` of host
    /// memory; `None` if nothing fits. With `same_bits`, and in a deterministic run, plans that keep every bit come
    /// first. A worker of a sharded or pipeline team keeps its micro-batch.
    pub(super) fn fastest_plan_under(
        &self,
        rank: usize,
        line: Bytes,
        host: Bytes,
        same_bits: bool,
    ) -> Option<PlanOutcome> {
        let search_with = |choice: RecipeChoice| {
            self.plan_share_under(rank, line, host, choice).ok().filter(|answer| answer.plan.fits)
        };
        // Workers of a partitioned team must keep the same number of micro-batches.
        let same_bits = same_bits || self.context.run.is_deterministic();
        let same_micro_batch = if same_bits || self.team.is_partitioned() {
            search_with(RecipeChoice::MicroBatch(self.worker(rank).plan.recipe.micro_batch))
        } else {
            None
        };
        let any_micro_batch = || if self.team.is_partitioned() { None } else { search_with(RecipeChoice::Fastest) };
        let fastest = same_micro_batch.or_else(any_micro_batch);
        // Free the memory of planning while the arenas are full.
        process::trim_heap();
        fastest
    }

    /// Switches a worker to another plan of its share. Returns the previous plan, for the log.
    pub(super) fn switch_plan(&mut self, rank: usize, mut answer: PlanOutcome) -> Result<PlanBefore, DeviceFailure> {
        let before = self.plan_before(rank);
        self.team.record_peaks(None);
        let worker = self.team.worker(rank);
        answer.plan.devices[0].budget_bytes = worker.line.bytes;
        answer.plan.host.budget_bytes = worker.line.host;
        let (plan, predicted_compute) = (answer.plan.clone(), PredictedCompute::of(&worker.device, &answer));
        self.team.on_one(rank, move |engine| Ok(engine.adopt(answer)?))?;
        self.team.worker(rank).set_plan(plan, predicted_compute);
        // Free the memory of planning, which other processes may need.
        process::trim_heap();
        // During the switch, the old and new arenas existed side by side.
        self.team.reset_peak();
        self.store_current_plan()?;
        Ok(before)
    }

    /// Returns the present plan of a worker with its measured memory.
    pub(crate) fn plan_before(&mut self, rank: usize) -> PlanBefore {
        let held = self.team.held_bytes(rank);
        PlanBefore { held_bytes: Some(held), ..PlanBefore::of(self.worker(rank)) }
    }

    /// Records and logs a recovery. Its class (identical, reordered or lossy) follows from the recipes before and now.
    pub(super) fn log_recovery(
        &mut self,
        rank: usize,
        before: PlanBefore,
        reason: String,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let worker = self.worker(rank);
        let planner = self.context.planner(worker.line.host);
        let share = active_share(worker, &worker.device);
        let class = planner.class_of_change(&share, &before.recipe, &worker.plan.recipe)?;
        self.record_recovery(rank, before, class, reason, start, log)
    }

    /// Records and logs a recovery, which began at `start`: the plan before, the plan now, the class of the change and
    /// the reason.
    pub(crate) fn record_recovery(
        &mut self,
        rank: usize,
        before: PlanBefore,
        class: Class,
        reason: String,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let held_bytes = before.held_bytes.map(|_| self.team.held_bytes(rank));
        let step_seconds_before = self.step_times.record_plan_change(self.current_step > self.info.step);
        let worker = self.worker(rank);
        let recovery = Recovery {
            step: self.current_step,
            device: worker.device.name.clone(),
            reason,
            from: before.recipe,
            to: worker.plan.recipe.clone(),
            sequences: (worker.sequences != before.sequences).then_some([before.sequences, worker.sequences]),
            class,
            arena_bytes_before: before.arena_bytes,
            arena_bytes: worker.plan.devices[0].arena_bytes,
            held_bytes_before: before.held_bytes,
            held_bytes,
            seconds: start.elapsed().as_secs_f64(),
            predicted_step_seconds_before: before.step_seconds,
            predicted_step_seconds: worker.plan.predicted.step_seconds,
            step_seconds_before,
            step_seconds: None,
        };
        self.recovery.recoveries.push(recovery.clone());
        log.emit(Event::Recovery(Box::new(recovery)))
    }
}

/// Returns the share of a worker, to be planned anew for its `device` under another load line or with other charges.
fn active_share<'a>(worker: &'a Worker, device: &'a DeviceSpec) -> ActiveShare<'a> {
    ActiveShare { device, share: &worker.share, sequences: worker.sequences, plan: &worker.plan }
}

/// Plan of a worker before a change.
pub(crate) struct PlanBefore {
    recipe: Recipe,
    sequences: u64,
    arena_bytes: Bytes,
    /// Measured bytes that the device held before the change; `None` if the plan stays.
    held_bytes: Option<Bytes>,
    step_seconds: f64,
}

impl PlanBefore {
    /// Whether the worker still has the same recipe and number of sequences.
    pub(crate) fn is_unchanged(&self, worker: &Worker) -> bool {
        (self.sequences, &self.recipe) == (worker.sequences, &worker.plan.recipe)
    }

    /// Describes the present plan of a worker, without measured memory.
    pub(crate) fn of(worker: &Worker) -> PlanBefore {
        let plan = &worker.plan;
        PlanBefore {
            recipe: plan.recipe.clone(),
            sequences: worker.sequences,
            arena_bytes: plan.devices[0].arena_bytes,
            held_bytes: None,
            step_seconds: plan.predicted.step_seconds,
        }
    }
}
