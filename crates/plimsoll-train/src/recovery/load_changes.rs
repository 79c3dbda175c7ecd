//! Changes of a load line between two steps: budget requests of the user, memory pressure by other processes, and the return to the
//! preferred plan.

use super::pressure::{MemoryUsage, PressureSignal, available};
use crate::resolve::Resolved;
use crate::session::control::BudgetChange;
use crate::session::evaluation::evaluator::Evaluator;
use crate::session::events::EventLog;
use crate::session::failure::{DeviceFailure, StepInterrupt};
use crate::session::training::Session;
use crate::team::Worker;
use plimsoll_core::{Budget, Bytes, Event, Failure, Plan};
use plimsoll_device::calibration;
use plimsoll_device::probe::Memory;
use plimsoll_plan::search::{plan_recipe, search};
use std::time::Instant;

/// Largest ratio of the new to the present step time at which a plan is worth restoring.
const MAX_STEP_TIME_RATIO: f64 = 0.98;

/// Margin by which the charges of the next start may exceed the present ones.
const CHARGES_MARGIN: Bytes = Bytes::mib(4);

/// Memory of a device that a budget refers to.
struct MemoryLimits {
    /// Bytes that are free or held by this run.
    total: Bytes,
    /// Highest load line that the memory allows.
    largest_line: Bytes,
}

impl Session {
    /// Answers budget requests and reacts to memory pressure. Called between two steps.
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
            if self.worker(rank).line.retry_step.is_some_and(|step| self.info.step >= step) {
                self.line(rank).retry_step = None;
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

    /// Returns the memory that a device has or could have for this run, and the highest load line that it allows.
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

    /// Changes the load line of a worker at the user's request, up to what the device has. Returns the new load line
    /// with the plan, or the reason for refusing it.
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
        let line = requested.min(limits.largest_line);
        let (budget, line_text) = match line < requested {
            true => {
                let text = format!(
                    "{line}, the most that {} may hold for this run ({requested} was requested)",
                    worker.device.name
                );
                (Budget::Amount(line), text)
            }
            false => (budget, line.to_string()),
        };
        let refuse = |reason: String| Ok(Err(Failure::does_not_fit(format!("{reason}; the run keeps its plan"))));
        let change = |message: String| {
            Ok(Ok(BudgetChange { budget_bytes: line, message: format!("load line {line_text}: {message}") }))
        };
        let Some(answer) = self.fastest_plan_under(rank, line, worker.line.host, false) else {
            return refuse(format!(
                "{line_text} is not enough: the smallest budget that fits is {}",
                self.smallest_budget(rank)
            ));
        };
        let worker = self.team.worker(rank);
        let faster = answer.plan.predicted.step_seconds < worker.plan.predicted.step_seconds;
        let before = (worker.line.budget, worker.line.bytes, worker.line.preferred_recipe.clone());
        (worker.line.budget, worker.line.bytes) = (budget, line);
        worker.line.preferred_recipe = answer.plan.recipe.clone();
        let device = worker.device.name.clone();
        if worker.plan.devices[0].peak_bytes <= line && !faster {
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

    /// Stores a changed load line in the run folder, for the rest of the run and for resuming.
    pub(crate) fn store_budget(&mut self, device: String, budget: Budget, line: Bytes) -> Result<(), Failure> {
        let Resolved { device: first, others, .. } = &mut self.context.resolved;
        let named = std::iter::once(first).chain(others).filter(|spec| spec.name == device);
        named.for_each(|spec| spec.budget = line);
        self.context.run.budget_overrides.insert(device, budget);
        self.context.run.save_budget_overrides(&self.context.folder)
    }

    /// Returns the smallest budget under which a worker's share fits.
    fn smallest_budget(&self, rank: usize) -> Bytes {
        let host = self.worker(rank).line.host;
        let smallest = self.plan_share_under(rank, Bytes(1), host, |question| search(&question));
        let remedies = smallest.map(|answer| answer.plan.needs).unwrap_or_default();
        remedies.first().map(|need| need.budget_bytes).unwrap_or_default()
    }

    /// Restores the recipe that was planned under the user's load line. If it does not fit now, takes the fastest that
    /// does. Keeps the present plan if neither is faster enough.
    fn restore_plan(&mut self, rank: usize, reason: &str, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let worker = self.worker(rank);
        let (line, host) = (worker.line.bytes, worker.line.host);
        let preferred =
            self.plan_share_under(rank, line, host, |question| plan_recipe(&question, &worker.line.preferred_recipe))?;
        let is_preferred = worker.plan.recipe == worker.line.preferred_recipe;
        let best = if preferred.plan.fits && !is_preferred {
            Some(preferred)
        } else {
            self.fastest_plan_under(rank, line, host, false)
        };
        let is_faster =
            |plan: &Plan| plan.predicted.step_seconds < worker.plan.predicted.step_seconds * MAX_STEP_TIME_RATIO;
        let Some(answer) = best.filter(|answer| is_faster(&answer.plan)) else { return Ok(()) };
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
                let line = self.line(rank);
                line.retry_delay_steps = line.retry_delay_steps.saturating_mul(2);
                line.retry_step = Some(step + line.retry_delay_steps);
                Ok(())
            }
            Err(other) => Err(other.into()),
        }
    }

    /// Checks the memory of a device: shrinks the plan if other processes need memory, restores it if they freed some.
    fn respond_to_device_pressure(&mut self, rank: usize, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let Some(memory) = self.team.worker(rank).engine.memory() else { return Ok(()) };
        let now = self.team.held_bytes(rank);
        let worker = self.team.worker(rank);
        let budget = worker.line.clamp(worker.line.resolve(worker.line.budget, memory.free + now));
        let usage = MemoryUsage { now, line: worker.line.bytes, budget, target: worker.largest_plan.peak_bytes };
        match worker.line.pressure.observe(&memory, usage, start) {
            PressureSignal::None => Ok(()),
            PressureSignal::Grow(available) => {
                (worker.line.bytes, worker.line.warned) = (available, false);
                self.restore_plan(rank, "other processes freed memory", log)
            }
            PressureSignal::Shrink(left) if left >= worker.plan.devices[0].peak_bytes => Ok(()),
            PressureSignal::Shrink(left) => {
                let host = worker.line.host;
                self.shrink(rank, left, host, &memory, start, log)
            }
        }
    }

    /// Checks host memory for the offloaded tensors of a GPU. The host arena of a virtual device shares its memory with
    /// the device arena, which shrinks instead.
    fn respond_to_host_pressure(&mut self, rank: usize, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let worker = self.team.worker(rank);
        if worker.engine.gpu().is_none() || worker.line.host_peak_bytes == Bytes::ZERO {
            return Ok(());
        }
        let (memory, now) = (Memory::read(), worker.plan.host.arena_bytes);
        let (line, budget, target) = (worker.line.host, worker.line.host_budget, worker.line.host_peak_bytes);
        match worker.line.host_pressure.observe(&memory, MemoryUsage { now, line, budget, target }, start) {
            PressureSignal::None => Ok(()),
            PressureSignal::Grow(available) => {
                (worker.line.host, worker.line.warned) = (available, false);
                self.restore_plan(rank, "other processes freed memory", log)
            }
            PressureSignal::Shrink(left) if left >= now => Ok(()),
            PressureSignal::Shrink(left) => {
                let line = worker.line.bytes;
                self.shrink(rank, line, left, &memory, start, log)
            }
        }
    }

    /// Switches a worker to the fastest plan under lower load lines, because other processes need memory.
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

    /// Stores the present peak as learned load line, so that the next plan on this device starts with it.
    pub(super) fn store_learned_line(&self, rank: usize, reason: &str) {
        let worker = self.worker(rank);
        let line = worker.plan.devices[0].peak_bytes + CHARGES_MARGIN;
        calibration::record_memory_shortfall(&worker.device, line, reason);
    }
}
