//! Recovery: what a run does when a device runs out of memory, or when its load line changes. Weights, optimizer state
//! and samples stay bit-identical.
//!
//! - After an out-of-memory error the device takes the next recipe with a smaller arena, first among those that keep
//!   every bit, then among all. In a team only this device changes. If no recipe of its share is small enough, the work
//!   is rebalanced (`team::rebalance`).
//! - A changed load line selects the fastest recipe that fits under it (`load_changes`).
//! - When memory is free again, the run restores the faster plan, after a delay that grows with each failed attempt.
//! - A lost device is removed, and the others continue (`device_loss`).
//! - Recovery is bounded: after more than [`MAX_REFUSALS`] out-of-memory errors of a device without progress, the other
//!   devices continue without it. If there are none, the run stops and can be resumed.

pub(crate) mod device_loss;
mod load_changes;
mod load_line;
mod pressure;

pub use load_line::LoadLine;

use crate::planning::charges::program_charges;
use crate::planning::request::share_request;
use crate::session::events::EventLog;
use crate::session::failure::{DeviceFailure, StepInterrupt};
use crate::session::training::Session;
use crate::team::{PredictedCompute, Worker};
use plimsoll_core::{Bytes, Class, DeviceSpec, Event, Failure, Recipe, Recovery};
use plimsoll_device::device::DeviceError;
use plimsoll_device::process;
use plimsoll_plan::search::{PlanOutcome, PlanRequest, search};
use plimsoll_plan::team::keep_micro_batch;
use std::time::Instant;

/// Out-of-memory errors of a device without progress in between, after which one more excludes it.
const MAX_REFUSALS: u32 = 6;

impl Session {
    /// Runs `work` until it succeeds: falls back one rung after each out-of-memory error, and continues without lost
    /// devices. Then the refusal counts are reset.
    pub(crate) fn run_with_recovery<T>(
        &mut self,
        log: &mut EventLog,
        work: impl FnMut(&mut Session) -> Result<T, DeviceFailure>,
    ) -> Result<T, StepInterrupt> {
        let done = self.retry_with_recovery(log, work)?;
        self.reset_refusals();
        Ok(done)
    }

    /// Runs `work` like [`Session::run_with_recovery`], but keeps the refusal counts, for work that makes no progress.
    pub(crate) fn retry_with_recovery<T>(
        &mut self,
        log: &mut EventLog,
        mut work: impl FnMut(&mut Session) -> Result<T, DeviceFailure>,
    ) -> Result<T, StepInterrupt> {
        loop {
            match work(self) {
                Ok(value) => return Ok(value),
                Err(DeviceFailure::OutOfMemory { rank, error }) => self.replan_after_refusal(rank, &error, log)?,
                Err(DeviceFailure::Lost { rank, reason }) => self.continue_without(rank, &reason, log)?,
                Err(other) => return Err(other.into()),
            }
        }
    }

    /// Returns the worker of a rank.
    fn worker(&self, rank: usize) -> &Worker {
        &self.team.workers()[rank]
    }

    /// Returns the load line of a worker.
    fn line(&mut self, rank: usize) -> &mut LoadLine {
        &mut self.team.worker(rank).line
    }

    /// Replans a device one rung lower after an out-of-memory error. If no lower plan exists, the same work is tried
    /// again.
    fn replan_after_refusal(
        &mut self,
        rank: usize,
        error: &DeviceError,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        let start = Instant::now();
        if let Some(reason) = self.count_refusal(rank, error) {
            return self.exclude_worker(rank, &reason, true, log);
        }
        let Worker { device, plan, line, .. } = self.worker(rank);
        let reason = format!("{}: {error}", device.name);
        let below = plan.devices[0].arena_bytes.saturating_sub(Bytes(1)) + device.charges;
        let lower = match self.fastest_plan_under(rank, below, line.host, true) {
            Some(answer) => match self.switch_plan(rank, answer) {
                Ok(before) => Some(before),
                // The device keeps its plan, and the failure counts as one more refusal. A lost device is found when it
                // works next.
                Err(DeviceFailure::OutOfMemory { .. } | DeviceFailure::Lost { .. }) => None,
                Err(other) => return Err(other.into()),
            },
            None => None,
        };
        if lower.is_none() && self.rebalance_below(rank, below, &reason, log)? {
            return Ok(());
        }
        let step = self.current_step;
        if lower.is_some() {
            // An injected error says nothing about the real memory.
            if !matches!(error, DeviceError::OutOfMemory { .. }) {
                self.store_learned_line(rank, &reason);
            }
            let line = self.line(rank);
            if line.retry_step.is_some_and(|retry_step| step < retry_step + line.retry_delay_steps) {
                line.retry_delay_steps = line.retry_delay_steps.saturating_mul(2);
            }
            line.retry_step = Some(step + line.retry_delay_steps);
        }
        let before = lower.unwrap_or_else(|| PlanBefore::of(self.worker(rank)));
        Ok(self.log_recovery(rank, before, reason, start, log)?)
    }

    /// Resets the refusal counts, because the run made progress.
    pub(crate) fn reset_refusals(&mut self) {
        self.recovery.refusals.clear();
    }

    /// Logs that an update continues after an out-of-memory error with the same plan.
    pub(crate) fn log_retry(&mut self, rank: usize, error: &DeviceError, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let reason = format!("{}: {error}", self.worker(rank).device.name);
        self.log_recovery(rank, PlanBefore::of(self.worker(rank)), reason, start, log)
    }

    /// Counts an out-of-memory error of a device. Returns the reason to exclude it once there are too many.
    pub(crate) fn count_refusal(&mut self, rank: usize, error: &DeviceError) -> Option<String> {
        let alone = self.team.len() == 1;
        let name = self.worker(rank).device.name.clone();
        let prefix = if alone { String::new() } else { format!("{name}: ") };
        let times = self.recovery.refusals.entry(name).or_default();
        *times += 1;
        (*times > MAX_REFUSALS).then(|| format!("{prefix}{error}; {MAX_REFUSALS} tries made no progress"))
    }

    /// Whether a device has had too many out-of-memory errors without progress.
    pub(crate) fn has_refused_too_often(&self, device: &str) -> bool {
        self.recovery.refusals.get(device).is_some_and(|times| *times > MAX_REFUSALS)
    }

    /// Excludes a device with too many out-of-memory errors: the other or excluded devices continue. If there are none,
    /// the run stops. State that only this device holds is saved first, if it is intact.
    pub(crate) fn exclude_worker(
        &mut self,
        rank: usize,
        reason: &str,
        state_intact: bool,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        let alone = self.team.len() == 1;
        if alone && self.unused_devices(&self.team.specs()).is_empty() {
            let failure = Failure::stopped(format!("step {}: {reason}", self.current_step));
            return Err(StepInterrupt::Stop { failure, state_intact });
        }
        if (alone || self.team.is_partitioned()) && state_intact && self.state_loaded {
            self.save_if_possible(MAX_REFUSALS, log)?;
        }
        self.continue_without(rank, reason, log)
    }

    /// Passes `ask` a planner request for the share of a worker, with its device as given, under a host load line.
    fn with_plan_request<T>(
        &self,
        rank: usize,
        device: &DeviceSpec,
        host: Bytes,
        ask: impl FnOnce(PlanRequest) -> T,
    ) -> Result<T, Failure> {
        let Worker { share, sequences, plan, .. } = self.worker(rank);
        let question = share_request(&self.context.run, &self.context.resolved.model, device, share, *sequences)?;
        let mut question = keep_micro_batch(question, &plan.recipe);
        // The host memory of the request is what this run may use, not what is free now.
        question.host.budget = host;
        // The space of the scratch file is not free on the disk, but belongs to this run.
        let file = plan.file.as_ref().map_or(Bytes::ZERO, |file| file.budget_bytes);
        question.host.file.budget = question.host.file.budget.max(file);
        Ok(ask(question))
    }

    /// Plans the share of a worker under load lines of device and host, with the charges of the resulting Programs.
    fn plan_share_under(
        &self,
        rank: usize,
        line: Bytes,
        host: Bytes,
        plan: impl Fn(PlanRequest) -> PlanOutcome,
    ) -> Result<PlanOutcome, Failure> {
        let worker = self.worker(rank);
        let mut assumed_charges = Bytes::ZERO;
        loop {
            let charges = worker.line.base_charges + assumed_charges;
            let device = DeviceSpec { budget: line, charges, ..worker.device.clone() };
            let answer = self.with_plan_request(rank, &device, host, &plan)?;
            let programs = program_charges(&device, &answer.set);
            if !answer.plan.fits || programs <= assumed_charges {
                return Ok(answer);
            }
            // A plan with more ops has larger charges: plan again with them.
            assumed_charges = programs;
        }
    }

    /// Returns the fastest plan of a worker's share under load lines of device and host; none if nothing fits. With
    /// `same_bits`, plans that keep every bit come first.
    fn fastest_plan_under(&self, rank: usize, line: Bytes, host: Bytes, same_bits: bool) -> Option<PlanOutcome> {
        let search_with = |pin: Option<u32>| {
            let answer = self.plan_share_under(rank, line, host, |mut question| {
                question.pins.micro_batch = pin.or(question.pins.micro_batch);
                search(&question)
            });
            answer.ok().filter(|answer| answer.plan.fits)
        };
        // Workers of a partitioned team must keep the same number of micro-batches.
        let same_micro_batch = if same_bits || self.team.is_partitioned() {
            search_with(Some(self.worker(rank).plan.recipe.micro_batch))
        } else {
            None
        };
        let other_micro_batches = || if self.team.is_partitioned() { None } else { search_with(None) };
        let fastest = same_micro_batch.or_else(other_micro_batches);
        // Free the memory of planning while the arenas are full.
        process::trim_heap();
        fastest
    }

    /// Switches a worker to another plan of its share. Returns the previous plan, for the log.
    fn switch_plan(&mut self, rank: usize, mut answer: PlanOutcome) -> Result<PlanBefore, DeviceFailure> {
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

    /// Records and logs a recovery; its class follows from both recipes.
    fn log_recovery(
        &mut self,
        rank: usize,
        before: PlanBefore,
        reason: String,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let worker = self.worker(rank);
        let to = worker.plan.recipe.clone();
        let class = self.with_plan_request(rank, &worker.device, worker.line.host, |question| {
            question.class_of_change(&before.recipe, &to)
        })?;
        self.record_recovery(rank, before, class, reason, start, log)
    }

    /// Records and logs a recovery: the plan before, the plan now and the reason.
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

/// Plan of a worker before a change.
pub(crate) struct PlanBefore {
    recipe: Recipe,
    sequences: u64,
    arena_bytes: Bytes,
    /// Measured bytes before the change; none if the plan stays.
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
