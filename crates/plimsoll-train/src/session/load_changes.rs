//! Changes of a load line between two steps: budget requests of the user, memory pressure by other processes, and the
//! return to the preferred plan.

use crate::engine::failure::DeviceFailure;
use crate::events::EventLog;
use crate::planning::planner::RecipeChoice;
use crate::recovery::load_changes::{
    GrantedBudget, LoadAction, LoadEvent, LoadState, MemoryLimits, PlanFigures, decide_load_change,
};
use crate::recovery::pressure::{MemoryUsage, available};
use crate::resolve::Resolved;
use crate::session::control::BudgetChange;
use crate::session::evaluator::Evaluator;
use crate::session::interrupt::StepInterrupt;
use crate::session::training::Session;
use crate::team::Worker;
use plimsoll_core::{Budget, Bytes, Event, Failure, Plan};
use plimsoll_device::calibration;
use plimsoll_device::probe::Memory;

use std::time::Instant;

/// Bytes by which the charges (bytes outside the arena) of a later run may exceed those of this run.
const CHARGES_MARGIN: Bytes = Bytes::mib(4);

impl Session {
    /// Answers budget requests, tries again recipes that ran out of memory, and reacts to memory pressure. Called
    /// between two steps.
    pub(crate) fn poll_control_and_memory(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let pending_requests: Vec<_> = self.control.iter().flat_map(|control| control.pending_requests()).collect();
        for request in pending_requests {
            let evaluator = self.evaluator.as_ref().map(Evaluator::name);
            let answer = match self.team.rank_named(request.device.as_deref()) {
                Ok(rank) => self.set_budget(rank, request.budget, log)?,
                Err(_) if evaluator.is_some() && request.device.as_deref() == evaluator => {
                    self.set_evaluator_budget(request.budget, log)?
                }
                Err(message) => Err(Failure::input(message)),
            };
            request.answer(answer);
        }
        for rank in 0..self.team.len() {
            let step = self.info.step;
            if self.line(rank).retry.take_due(step) {
                self.restore_plan(rank, "trying the recipe again that ran out of memory", log)?;
            }
            let start = Instant::now();
            if self.worker(rank).line.pressure.is_due(start) {
                self.respond_to_device_pressure(rank, start, log)?;
                self.respond_to_host_pressure(rank, start, log)?;
                self.line(rank).pressure.schedule_next(start, Instant::now());
            }
        }
        Ok(())
    }

    /// Returns the bytes that the run holds on a device plus those that are free there, and the highest load line that
    /// its memory allows. If the device does not report its memory, none count as free, and only a fixed capacity
    /// limits the load line.
    fn memory_limits(&mut self, rank: usize) -> MemoryLimits {
        let memory = self.team.worker(rank).engine.memory();
        let held = self.team.held_bytes(rank);
        let Worker { plan, line, .. } = self.worker(rank);
        match memory {
            // The present plan has its memory already.
            Some(memory) => MemoryLimits {
                total: memory.free + held,
                largest_line: line.clamp(available(&memory, held).max(plan.devices[0].peak_bytes)),
            },
            None => MemoryLimits { total: held, largest_line: line.clamp(Bytes(u64::MAX)) },
        }
    }

    /// Changes the load line of a worker at the user's request, and its plan if needed. A request for more than the
    /// device has is reduced. The inner result is the new load line with a description of the plan, or the reason for
    /// refusing it. The outer error ends the run.
    fn set_budget(
        &mut self,
        rank: usize,
        budget: Budget,
        log: &mut EventLog,
    ) -> Result<Result<BudgetChange, Failure>, Failure> {
        let start = Instant::now();
        let limits = self.memory_limits(rank);
        let worker = self.worker(rank);
        let requested = worker.line.resolve(budget, limits.total);
        let GrantedBudget { budget, line, reduced_from } = GrantedBudget::new(budget, requested, &limits);
        let line_text = match reduced_from {
            Some(requested) => format!(
                "{line}, the most that {} may hold for this run ({requested} was requested)",
                worker.device.name
            ),
            None => line.to_string(),
        };
        let refuse = |reason: String| Ok(Err(Failure::does_not_fit(format!("{reason}; the run keeps its plan"))));
        let change = |message: String| {
            Ok(Ok(BudgetChange { budget_bytes: line, message: format!("load line {line_text}: {message}") }))
        };
        let found = self.fastest_plan_under(rank, line, worker.line.host, false);
        let fastest = found.as_ref().map(|answer| plan_figures(&answer.plan));
        let action = decide_load_change(&self.load_line_state(rank), LoadEvent::BudgetRequest { line, fastest });
        let Some(answer) = found else {
            return refuse(format!(
                "{line_text} is not enough: the smallest budget that fits is {}",
                self.smallest_budget(rank)
            ));
        };
        let worker = self.team.worker(rank);
        let before = (worker.line.budget, worker.line.bytes, worker.line.preferred_recipe.clone());
        (worker.line.budget, worker.line.bytes) = (budget, line);
        worker.line.preferred_recipe = answer.plan.recipe.clone();
        let device = worker.device.name.clone();
        if action == LoadAction::Keep {
            worker.plan.devices[0].budget_bytes = line;
            let message = format!("the plan stays the same ({})", worker.plan.recipe);
            self.store_current_plan()?;
            self.store_budget(device, budget, line)?;
            return change(message);
        }
        match self.switch_plan(rank, answer) {
            Ok(before) => {
                self.store_budget(device, budget, line)?;
                self.log_recovery(rank, before, format!("load line changed to {line}"), start, log)?;
                let Worker { plan, .. } = self.worker(rank);
                change(format!("{}, predicted peak {}", plan.recipe, plan.devices[0].peak_bytes))
            }
            Err(failure @ (DeviceFailure::OutOfMemory { .. } | DeviceFailure::Lost { .. })) => {
                let line = self.line(rank);
                (line.budget, line.bytes, line.preferred_recipe) = before;
                refuse(failure.message())
            }
            Err(other) => Err(other.into()),
        }
    }

    /// Stores `budget`, a device's load line that the user changed, in the run folder, for the rest of the run and for
    /// resuming. `line` is the same load line in bytes.
    pub(crate) fn store_budget(&mut self, device: String, budget: Budget, line: Bytes) -> Result<(), Failure> {
        let Resolved { device: first, others, .. } = &mut self.context.resolved;
        let named = std::iter::once(first).chain(others).filter(|spec| spec.name == device);
        named.for_each(|spec| spec.budget = line);
        self.context.run.budget_overrides.insert(device, budget);
        self.context.run.save_budget_overrides(&self.context.folder)
    }

    /// Returns the smallest load line under which a worker's share fits; 0 if it cannot be determined.
    fn smallest_budget(&self, rank: usize) -> Bytes {
        let host = self.worker(rank).line.host;
        let smallest = self.plan_share_under(rank, Bytes(1), host, RecipeChoice::Fastest);
        let remedies = smallest.map(|answer| answer.plan.needs).unwrap_or_default();
        remedies.first().map(|need| need.budget_bytes).unwrap_or_default()
    }

    /// Returns a worker to its preferred recipe, the one that was planned under the user's load line. If that recipe
    /// does not fit now or is in use already, takes the fastest one that fits. Keeps the present plan if the new one is
    /// not at least 2 % faster, or if the device refuses the switch.
    fn restore_plan(&mut self, rank: usize, reason: &str, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let worker = self.worker(rank);
        let (line, host) = (worker.line.bytes, worker.line.host);
        let preferred = self.plan_share_under(rank, line, host, RecipeChoice::Only(&worker.line.preferred_recipe))?;
        let is_preferred = worker.plan.recipe == worker.line.preferred_recipe;
        let best = if preferred.plan.fits && !is_preferred {
            Some(preferred)
        } else {
            self.fastest_plan_under(rank, line, host, false)
        };
        let now = self.load_line_state(rank);
        let is_taken =
            |plan: &Plan| decide_load_change(&now, LoadEvent::PlanFound(plan_figures(plan))) == LoadAction::Switch;
        let Some(answer) = best.filter(|answer| is_taken(&answer.plan)) else { return Ok(()) };
        match self.switch_plan(rank, answer) {
            Ok(before) => {
                let worker = self.team.worker(rank);
                calibration::forget_memory_shortfall(&worker.device);
                if is_preferred {
                    // There is more memory now than when the run was planned.
                    worker.line.preferred_recipe = worker.plan.recipe.clone();
                }
                self.log_recovery(rank, before, reason.to_owned(), start, log)
            }
            Err(DeviceFailure::OutOfMemory { .. } | DeviceFailure::Lost { .. }) => {
                let step = self.info.step;
                self.line(rank).retry.record_failed_attempt(step);
                Ok(())
            }
            Err(other) => Err(other.into()),
        }
    }

    /// Checks the memory of a device; the check began at `start`. Shrinks the plan if other processes need memory,
    /// restores it if they freed some.
    fn respond_to_device_pressure(&mut self, rank: usize, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let Some(memory) = self.team.worker(rank).engine.memory() else { return Ok(()) };
        let now = self.team.held_bytes(rank);
        let worker = self.team.worker(rank);
        let budget = worker.line.clamp(worker.line.resolve(worker.line.budget, memory.free + now));
        let usage = MemoryUsage { now, line: worker.line.bytes, budget, target: worker.largest_plan.peak_bytes };
        let signal = worker.line.pressure.observe(&memory, usage, start);
        let action = decide_load_change(&self.load_line_state(rank), LoadEvent::DevicePressure(signal));
        self.apply_pressure(rank, action, &memory, start, log)
    }

    /// Checks the host memory that holds offloaded tensors of a GPU, and shrinks or restores the plan. The check began
    /// at `start`. Skips other devices: the host arena of a virtual device shares its memory with the device arena,
    /// which shrinks instead.
    fn respond_to_host_pressure(&mut self, rank: usize, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let worker = self.team.worker(rank);
        if worker.engine.gpu().is_none() || worker.line.host_peak_bytes == Bytes::ZERO {
            return Ok(());
        }
        let (memory, now) = (Memory::read(), worker.plan.host.arena_bytes);
        let (line, budget, target) = (worker.line.host, worker.line.host_budget, worker.line.host_peak_bytes);
        let signal = worker.line.host_pressure.observe(&memory, MemoryUsage { now, line, budget, target }, start);
        let action = decide_load_change(&self.load_line_state(rank), LoadEvent::HostPressure(signal));
        self.apply_pressure(rank, action, &memory, start, log)
    }

    /// Returns load lines and plan of a worker, for decisions.
    fn load_line_state(&self, rank: usize) -> LoadState {
        let Worker { line, plan, .. } = self.worker(rank);
        LoadState { device_line: line.bytes, host_line: line.host, plan: plan_figures(plan) }
    }

    /// Carries out `action`, the reaction to a check of `memory` that began at `start`. Actions other than shrinking
    /// and growing change nothing.
    fn apply_pressure(
        &mut self,
        rank: usize,
        action: LoadAction,
        memory: &Memory,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        match action {
            LoadAction::Shrink { device, host } => self.shrink(rank, device, host, memory, start, log),
            LoadAction::Grow { device, host } => {
                let line = self.line(rank);
                (line.bytes, line.host, line.warned) = (device, host, false);
                self.restore_plan(rank, "other processes freed memory", log)
            }
            LoadAction::Keep | LoadAction::Refuse | LoadAction::Switch => Ok(()),
        }
    }

    /// Switches a worker to the fastest plan under the load lines `line` of its device and `host` of host memory,
    /// because other processes need `memory`. If that is not possible, keeps the plan, and warns the user once.
    fn shrink(
        &mut self,
        rank: usize,
        line: Bytes,
        host: Bytes,
        memory: &Memory,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let reason = format!("{} has {} free: other processes need memory", memory.bound_by, memory.free);
        let worker = self.worker(rank);
        let before = (worker.line.bytes, worker.line.host);
        let obstacle = match self.fastest_plan_under(rank, line, host, false) {
            None => format!("no recipe of this run holds less than {}", worker.plan.devices[0].peak_bytes),
            Some(answer) => {
                let now = self.line(rank);
                (now.bytes, now.host) = (line, host);
                match self.switch_plan(rank, answer) {
                    Ok(before) => {
                        self.store_learned_line(rank, &reason);
                        return self.log_recovery(rank, before, reason, start, log);
                    }
                    Err(failure @ (DeviceFailure::OutOfMemory { .. } | DeviceFailure::Lost { .. })) => {
                        failure.message()
                    }
                    Err(other) => return Err(other.into()),
                }
            }
        };
        let line = self.line(rank);
        (line.bytes, line.host) = before;
        if std::mem::replace(&mut line.warned, true) {
            return Ok(());
        }
        log.emit(Event::Warning { message: format!("{reason}; {obstacle}, so the run keeps its plan") })
    }

    /// Stores the peak of the worker's present plan, plus a margin, as the most that its device can hold, with the
    /// reason. Later runs on this device plan under this limit.
    pub(super) fn store_learned_line(&self, rank: usize, reason: &str) {
        let worker = self.worker(rank);
        let line = worker.plan.devices[0].peak_bytes + CHARGES_MARGIN;
        calibration::record_memory_shortfall(&worker.device, line, reason);
    }
}

/// Returns the figures of a worker's plan that decisions compare: peak, host arena and step time.
fn plan_figures(plan: &Plan) -> PlanFigures {
    PlanFigures {
        peak_bytes: plan.devices[0].peak_bytes,
        host_arena_bytes: plan.host.arena_bytes,
        step_seconds: plan.predicted.step_seconds,
    }
}
