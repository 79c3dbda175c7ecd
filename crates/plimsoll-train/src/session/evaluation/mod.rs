//! Evaluation of the model on the evaluation data.
//!
//! The team evaluates itself, each worker on a part of the rows. Or a device outside the team does it (`Evaluator`):
//! it receives a copy of the weights and evaluates while the team continues. Its event is then logged when the result
//! arrives, at the latest before the next evaluation and before the end. If the evaluator is lost or runs out of
//! memory, the team evaluates from then on.

pub(crate) mod evaluator;
pub(crate) mod weight_transfer;

use crate::data::{Dataset, Rows};
use crate::planning::prepare::{PreviousPlan, TeamPlan, WorkerAssignment, plan_assignments};
use crate::planning::request::evaluation_schedule;
use crate::session::context::RunContext;
use crate::session::control::BudgetChange;
use crate::session::engine::{Engine, EvaluationSums};
use crate::session::events::EventLog;
use crate::session::failure::{DeviceFailure, StepInterrupt};
use crate::session::training::Session;
use crate::team::open::fixed_capacity;
use crate::team::{Team, Worker};
use evaluator::{EvaluationReport, Evaluator};
use plimsoll_core::{
    Budget, Bytes, DeviceSpec, EvalResult, EvaluatorPlan, Event, Failure, LostDevice, Parallelism, WorkerPlan,
    micro_batches,
};
use plimsoll_device::process;
use plimsoll_program::ProgramKind;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use weight_transfer::{TransferState, WeightSender};

/// Failed weight transfers after which an evaluator is given up.
const MAX_REFUSALS: u32 = 6;

/// Rows that one device evaluates, in order, and how many it takes at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvaluationSlice {
    /// Range of rows.
    pub rows: Range<u64>,
    /// Rows of one micro-batch.
    pub micro_batch: u32,
}

impl EvaluationSlice {
    /// Returns the number of micro-batches.
    fn micro_batches(&self) -> u64 {
        micro_batches(self.rows.end - self.rows.start, self.micro_batch)
    }
}

/// Evaluates a slice of the rows, in at least `min_micro_batches` micro-batches; other workers of a sharded team may wait for
/// each of them.
///
/// # Errors
/// The data cannot be read, or the device fails.
pub fn evaluate(
    engine: &mut Engine,
    data: &Dataset,
    slice: &EvaluationSlice,
    min_micro_batches: u64,
) -> Result<EvaluationSums, DeviceFailure> {
    let EvaluationSlice { rows: all, micro_batch } = slice;
    let micro_batch = u64::from(*micro_batch);
    let mut rows = Rows::new(u64::from(engine.recipe().micro_batch).max(micro_batch), data.sequence());
    let mut sum = EvaluationSums::default();
    for first in
        (0..slice.micro_batches().max(min_micro_batches)).map(|index| (all.start + index * micro_batch).min(all.end))
    {
        data.read(first..(first + micro_batch).min(all.end), &mut rows)?;
        sum.add(engine.evaluate(&mut rows)?);
    }
    Ok(sum)
}

impl Team {
    /// Splits the rows of an evaluation over the workers. Each stage of a pipeline gets all rows.
    fn evaluation_slices(&self, rows: u64) -> Vec<EvaluationSlice> {
        let total: u64 = self.workers().iter().map(|worker| worker.sequences).sum();
        let at = |sequences: u64| (u128::from(rows) * u128::from(sequences) / u128::from(total)) as u64;
        let slice = |worker: &Worker| {
            let first = worker.share.first_sequence;
            let all = total == worker.sequences || worker.share.parallelism == Some(Parallelism::Pipeline);
            let rows = if all { 0..rows } else { at(first)..at(first + worker.sequences) };
            EvaluationSlice { rows, micro_batch: worker.plan.recipe.micro_batch }
        };
        self.workers().iter().map(slice).collect()
    }

    /// Returns the slices for a single device that evaluates instead of the team, with the same order and
    /// micro-batches, so that the result is bit-identical.
    fn single_device_slices(&self, rows: u64) -> Vec<EvaluationSlice> {
        let mut slices = self.evaluation_slices(rows);
        if self.workers()[0].share.parallelism == Some(Parallelism::Pipeline) {
            slices.truncate(1);
        }
        slices
    }

    /// Evaluates a data set, each worker on its part of the rows. Of a pipeline, the last stage computes the sums.
    ///
    /// # Errors
    /// The data cannot be read, or a device fails.
    pub fn evaluate(&mut self, data: &Arc<Dataset>) -> Result<EvaluationSums, DeviceFailure> {
        let slices = self.evaluation_slices(data.rows());
        let min_micro_batches = if self.is_partitioned() {
            slices.iter().map(EvaluationSlice::micro_batches).max().unwrap_or(0)
        } else {
            0
        };
        let data = Arc::clone(data);
        let parts = self.on_all(move |rank, engine| evaluate(engine, &data, &slices[rank], min_micro_batches))?;
        let mut sum = EvaluationSums::default();
        parts.into_iter().for_each(|part| sum.add(part));
        Ok(sum)
    }
}

impl Session {
    /// Opens the evaluator, if one is planned. A failure is only logged, because the team can evaluate itself.
    pub(crate) fn open_evaluator(&mut self, part: Option<WorkerAssignment>, log: &mut EventLog) -> Result<(), Failure> {
        let Some((part, data)) = part.zip(self.context.eval.clone()) else { return Ok(()) };
        let name = part.device.name.clone();
        let planned = self.plan.excluded.iter_mut().find(|out| out.device == name);
        let Some(evaluator_plan) = planned.and_then(|out| out.evaluator_plan.clone()) else { return Ok(()) };
        let RunContext { run, resolved, .. } = &self.context;
        let rank = self.team.len() as u64;
        let opened = match Evaluator::open(run, resolved, part, evaluator_plan, data, &self.faults, rank) {
            Ok(evaluator) => {
                self.team.set_external_arenas(evaluator.arena_bytes_in_process(), Bytes::ZERO);
                let ready = evaluator.wait_until_ready();
                self.evaluator = Some(evaluator);
                ready
            }
            Err(failure) => Err(failure),
        };
        match opened {
            Ok(refused) => {
                let warning = |refused| format!("{name}: {refused}; reading the weights again");
                refused.into_iter().try_for_each(|refused| log.emit(Event::Warning { message: warning(refused) }))
            }
            Err(failure) => {
                self.close_evaluator()?;
                self.clear_evaluator_plan(&name);
                match failure {
                    DeviceFailure::Lost { reason, .. } => self.report_evaluator_loss(name, reason, log),
                    other => {
                        let message = format!("evaluator {name}: {}; the team evaluates instead", other.message());
                        log.emit(Event::Warning { message })
                    }
                }
            }
        }
    }

    /// Records and logs the loss of the evaluator.
    fn report_evaluator_loss(&mut self, device: String, reason: String, log: &mut EventLog) -> Result<(), Failure> {
        let (step, remaining_devices, resumed_from_step) = (self.info.step, self.team.names(), None);
        self.recovery.lost.push(LostDevice {
            device: device.clone(),
            step,
            resumed_from_step,
            returned_after_step: None,
        });
        log.emit(Event::DeviceLost { step, device, reason, remaining_devices, resumed_from_step })
    }

    /// Removes the evaluation plan of a device from the plan of the run.
    fn clear_evaluator_plan(&mut self, device: &str) {
        let mut excluded = self.plan.excluded.iter_mut();
        excluded.find(|out| out.device == device).into_iter().for_each(|out| out.evaluator_plan = None);
    }

    /// Evaluates after the current step, unless that has been done.
    pub(crate) fn evaluate(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        self.wait_for_evaluation(log)?;
        if self.context.eval.is_none() || self.last_eval.is_some_and(|(step, _)| step == self.info.step) {
            return Ok(());
        }
        if self.delegate_evaluation(log)? { Ok(()) } else { self.evaluate_on_team(log) }
    }

    /// Repeats the evaluation of the step that the run resumes from, if the log shows that it was interrupted.
    pub(crate) fn redo_interrupted_evaluation(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let step = self.info.step;
        let due = step > 0 && self.evaluates_after(step) && !self.is_finished();
        let in_progress = self.evaluator.as_ref().is_some_and(|evaluator| evaluator.is_evaluating(step));
        if due && !in_progress && !log.has_evaluation(step)? { self.evaluate(log) } else { Ok(()) }
    }

    /// Whether the run file asks for an evaluation after `step`.
    pub(crate) fn evaluates_after(&self, step: u64) -> bool {
        let every = self.context.run.train.eval_every;
        every > 0 && step.is_multiple_of(every)
    }

    /// Evaluates on the team, with recovery.
    fn evaluate_on_team(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let Some(data) = self.context.eval.clone() else { return Ok(()) };
        let start = Instant::now();
        let sum = self.run_with_recovery(log, |session| session.team.evaluate(&data))?;
        Ok(self.record_evaluation(self.info.step, sum, start.elapsed().as_secs_f64(), None, log)?)
    }

    /// Records and logs the result of an evaluation; `device` names the evaluator.
    fn record_evaluation(
        &mut self,
        step: u64,
        sum: EvaluationSums,
        seconds: f64,
        device: Option<String>,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let exact_match = (sum.samples > 0).then(|| sum.exact as f64 / sum.samples as f64);
        self.last_eval = Some((step, EvalResult { loss: sum.loss(), exact_match }));
        log.emit(Event::Evaluation { step, loss: sum.loss(), exact_match, tokens: sum.tokens, seconds, device })
    }

    /// Sends the current weights to the evaluator, which then evaluates. Returns whether it received them.
    fn delegate_evaluation(&mut self, log: &mut EventLog) -> Result<bool, StepInterrupt> {
        let last = self.is_finished();
        let mut reason = String::new();
        for _ in 0..MAX_REFUSALS {
            let Some(evaluator) = self.evaluator.as_ref().filter(|evaluator| !last || evaluator.is_faster_than_team())
            else {
                return Ok(false);
            };
            let (name, start) = (evaluator.name().to_owned(), Instant::now());
            let state = self.run_with_recovery(log, Session::send_weights)?;
            let Some(evaluator) = &mut self.evaluator else { return Ok(false) };
            if state == TransferState::Received {
                evaluator.record_transfer(start.elapsed().as_secs_f64());
                return Ok(true);
            }
            match evaluator.wait() {
                Some(EvaluationReport { sum: Err(DeviceFailure::OutOfMemory { error, .. }), .. }) => {
                    reason = format!("{name}: {error}")
                }
                Some(EvaluationReport { sum: Err(failure), .. }) => {
                    self.drop_evaluator(failure, log)?;
                    return Ok(false);
                }
                Some(EvaluationReport { sum: Ok(_), .. }) | None => return Ok(false),
            }
            log.emit(Event::Warning { message: format!("{reason}; sending the weights again") })?;
        }
        let failure =
            DeviceFailure::Lost { rank: 0, reason: format!("{reason}; {MAX_REFUSALS} tries made no progress") };
        self.drop_evaluator(failure, log)?;
        Ok(false)
    }

    /// Requests an evaluation of the current step and sends the weights.
    fn send_weights(&mut self) -> Result<TransferState, DeviceFailure> {
        let Some((eval, evaluator)) = self.context.eval.as_ref().zip(self.evaluator.as_mut()) else {
            return Ok(TransferState::SenderFailed);
        };
        let weights = evaluator.begin(self.info.step, self.team.single_device_slices(eval.rows()));
        if let Err(failure) = self.team.write_files(ProgramKind::Save, &mut WeightSender(&weights)) {
            weights.finish(TransferState::SenderFailed);
            evaluator.cancel();
            return Err(failure);
        }
        Ok(weights.wait_until_done())
    }

    /// Handles the result of the evaluator, if one has arrived.
    pub(crate) fn poll_evaluation(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let report = self.evaluator.as_mut().and_then(Evaluator::poll);
        self.handle_report(report, log)
    }

    /// Waits for the evaluation in progress and handles its result.
    pub(crate) fn wait_for_evaluation(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let report = self.evaluator.as_mut().and_then(Evaluator::wait);
        self.handle_report(report, log)
    }

    /// Logs a report. After a failure, closes the evaluator and evaluates on the team.
    fn handle_report(&mut self, report: Option<EvaluationReport>, log: &mut EventLog) -> Result<(), StepInterrupt> {
        match self.log_report(report, log)? {
            // The weights of that step are gone: evaluate the current ones instead.
            Some(failure) => {
                self.drop_evaluator(failure, log)?;
                self.evaluate_on_team(log)
            }
            None => Ok(()),
        }
    }

    /// Closes the evaluator if a new plan uses its device: waits for the evaluation in progress and frees the device's
    /// memory.
    pub(crate) fn release_evaluator_for(
        &mut self,
        planned: &TeamPlan,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(()) };
        let takes_part = planned.assignments.iter().any(|part| part.device.name == evaluator.name());
        if !takes_part && planned.plan.excluded.iter().all(|out| out.device != evaluator.name()) {
            return Ok(());
        }
        let report = evaluator.wait();
        let failure = self.log_report(report, log)?;
        if let Some(DeviceFailure::Fatal(failure)) = failure {
            return Err(failure.into());
        }
        if let (Some(name), Some(failure)) = (self.close_evaluator()?, failure) {
            // Opening the device for the new plan will show whether it still works.
            log.emit(Event::Warning { message: format!("{name}: {}; this evaluation is skipped", failure.message()) })?;
        }
        Ok(())
    }

    /// Logs the report of the evaluator. Returns the failure if there is no result.
    fn log_report(
        &mut self,
        report: Option<EvaluationReport>,
        log: &mut EventLog,
    ) -> Result<Option<DeviceFailure>, Failure> {
        let Some(EvaluationReport { step, sum, seconds, refused }) = report else { return Ok(None) };
        let device = self.evaluator.as_ref().map(|evaluator| evaluator.name().to_owned());
        for refused in refused {
            let name = device.as_deref().unwrap_or_default();
            log.emit(Event::Warning { message: format!("{name}: {refused}; evaluating again") })?;
        }
        match sum {
            Ok(sum) => self.record_evaluation(step, sum, seconds, device, log).map(|()| None),
            Err(failure) => Ok(Some(failure)),
        }
    }

    /// Closes an evaluator that failed; the team evaluates from now on.
    fn drop_evaluator(&mut self, failure: DeviceFailure, log: &mut EventLog) -> Result<(), StepInterrupt> {
        if let DeviceFailure::Fatal(failure) = failure {
            return Err(failure.into());
        }
        match self.close_evaluator()? {
            Some(device) => Ok(self.report_evaluator_loss(device, failure.message(), log)?),
            None => Ok(()),
        }
    }

    /// Closes the evaluator and frees its memory, if it still responds. Returns its name.
    fn close_evaluator(&mut self) -> Result<Option<String>, Failure> {
        let Some(evaluator) = self.evaluator.take() else { return Ok(None) };
        let device = evaluator.name().to_owned();
        self.evaluator_result = evaluator.result();
        self.team.record_peaks(None);
        if evaluator.shut_down() {
            self.team.set_external_arenas(Bytes::ZERO, Bytes::ZERO);
        }
        self.team.reset_peak();
        self.clear_evaluator_plan(&device);
        self.store_current_plan()?;
        Ok(Some(device))
    }

    /// Sets the load line of the evaluator at the user's request. It continues with what fits, or is closed, and the
    /// team then evaluates itself. Returns the new load line with a description.
    pub(crate) fn set_evaluator_budget(
        &mut self,
        budget: Budget,
        log: &mut EventLog,
    ) -> Result<Result<BudgetChange, Failure>, StepInterrupt> {
        // The evaluation in progress ends under the previous load line.
        self.wait_for_evaluation(log)?;
        let Some(evaluator) = &self.evaluator else {
            return Ok(Err(Failure::input("the evaluator is lost; the team evaluates itself")));
        };
        let (device, before) = (evaluator.device().clone(), evaluator.recipe().clone());
        let fixed_capacity = fixed_capacity(&self.context.run, &self.context.resolved, &device);
        let line =
            budget.load_line(fixed_capacity.unwrap_or(device.budget)).min(fixed_capacity.unwrap_or(Bytes(u64::MAX)));
        let description = match self.plan_evaluator(DeviceSpec { budget: line, ..device.clone() })? {
            Some((part, evaluator_plan)) if evaluator_plan.recipe == before => {
                let evaluator = self.evaluator.iter_mut();
                evaluator.for_each(|evaluator| evaluator.set_plan(part.device.clone(), &evaluator_plan));
                self.set_evaluator_plan(&device.name, evaluator_plan);
                self.store_current_plan()?;
                format!("it evaluates as before ({before})")
            }
            Some((part, evaluator_plan)) => {
                let (peak, recipe) = (evaluator_plan.device.peak_bytes, evaluator_plan.recipe.clone());
                let measured = self.evaluator.as_ref().map(Evaluator::timings);
                self.close_evaluator()?;
                self.set_evaluator_plan(&device.name, evaluator_plan);
                self.open_evaluator(Some(part), log)?;
                self.store_current_plan()?;
                match (&mut self.evaluator, measured) {
                    (Some(evaluator), Some(measured)) => {
                        evaluator.carry_over_timings(measured);
                        format!("it evaluates with {recipe}, predicted peak {peak}")
                    }
                    _ => "it cannot be reopened; the team evaluates from now on".to_owned(),
                }
            }
            None => {
                self.close_evaluator()?;
                "no evaluation fits or helps; the team evaluates from now on".to_owned()
            }
        };
        self.store_budget(device.name.clone(), budget, line)?;
        log.emit(Event::Warning { message: format!("{}: load line changed to {line}: {description}", device.name) })?;
        Ok(Ok(BudgetChange { budget_bytes: line, message: format!("load line {line}: {description}") }))
    }

    /// Sets the evaluation plan of a device in the plan of the run.
    fn set_evaluator_plan(&mut self, device: &str, evaluator_plan: EvaluatorPlan) {
        let mut excluded = self.plan.excluded.iter_mut();
        excluded
            .find(|out| out.device == device)
            .into_iter()
            .for_each(|out| out.evaluator_plan = Some(evaluator_plan.clone()));
    }

    /// Plans how a device would evaluate for the present team; none if it does not fit or does not help.
    fn plan_evaluator(&self, device: DeviceSpec) -> Result<Option<(WorkerAssignment, EvaluatorPlan)>, Failure> {
        let name = device.name.clone();
        let devices: Vec<DeviceSpec> = self.team.specs().into_iter().chain([device]).collect();
        let alone = |worker: &Worker| WorkerPlan {
            device: worker.device.name.clone(),
            recipe: worker.plan.recipe.clone(),
            sequences: worker.sequences,
            layers: None,
            shard_1024ths: None,
            reason: None,
            algorithms: None,
            busy_seconds: 0.0,
            idle_seconds: 0.0,
            ladder: vec![],
        };
        let mut known = PreviousPlan::from_plan(&self.plan);
        if let ([only], Some(known)) = (self.team.workers(), &mut known) {
            known.team = vec![alone(only)];
        }
        let evaluations = evaluation_schedule(&self.context.run, self.context.eval.as_ref().map(|eval| eval.rows()));
        let (model, host) = (&self.context.resolved.model, self.host_load_line());
        let planned = plan_assignments(&self.context.run, model, &devices, host, known.as_ref(), None, evaluations)?;
        process::trim_heap();
        let now = self.team.workers().iter().map(|worker| (&worker.device.name, &worker.plan.recipe));
        let team_is_unchanged =
            planned.assignments.iter().map(|part| (&part.device.name, &part.outcome.plan.recipe)).eq(now);
        let out = planned.plan.excluded.into_iter().find(|out| out.device == name);
        Ok(planned.evaluator.zip(out.and_then(|out| out.evaluator_plan)).filter(|_| team_is_unchanged))
    }
}
