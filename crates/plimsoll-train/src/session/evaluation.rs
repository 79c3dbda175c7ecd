//! Evaluation of the model on the evaluation data.
//!
//! The team evaluates itself, each worker on a part of the rows. Or a device outside the team does it (`Evaluator`):
//! it receives a copy of the weights and evaluates while the team continues. Its event is then logged when the result
//! arrives, at the latest before the next evaluation and before the end. If the evaluator is lost or runs out of
//! memory, the team evaluates from then on.

use crate::config::Objective;
use crate::data::Dataset;
use crate::engine::EvaluationSums;
use crate::engine::evaluation::{EvaluationSlice, evaluate_slice};
use crate::engine::failure::DeviceFailure;
use crate::events::EventLog;
use crate::planning::previous_plan::PreviousPlan;
use crate::planning::request::evaluation_schedule;
use crate::planning::team_plan::{TeamPlan, WorkerAssignment};
use crate::session::context::RunContext;
use crate::session::control::BudgetChange;
use crate::session::evaluator::weight_transfer::{TransferState, WeightSender};
use crate::session::evaluator::{EvaluationReport, Evaluator};
use crate::session::interrupt::StepInterrupt;
use crate::session::training::Session;
use crate::team::open::fixed_capacity;
use crate::team::{Team, Worker};
use plimsoll_core::{
    Budget, Bytes, DeviceSpec, EvalResult, EvaluatorPlan, Event, Failure, LostDevice, Parallelism, WorkerPlan,
};
use plimsoll_device::process;
use plimsoll_program::ProgramKind;
use std::sync::Arc;
use std::time::Instant;

/// Number of failed attempts to send the weights of one step after which the evaluator counts as lost.
const MAX_TRANSFER_ATTEMPTS: u32 = 6;

impl Team {
    /// Returns which part of the first `rows` rows each worker evaluates, in rank order. Each stage of a pipeline gets
    /// all rows.
    fn evaluation_slices(&self, rows: u64) -> Vec<EvaluationSlice> {
        let total: u64 = self.workers().iter().map(|worker| worker.sequences).sum();
        self.workers().iter().map(|worker| evaluation_slice(worker, rows, total)).collect()
    }

    /// Returns the slices of an evaluation of `rows` rows on a single device instead of the team. They are those of the
    /// workers, in the same order and with the same micro-batches, so the result is bit-identical.
    fn single_device_slices(&self, rows: u64) -> Vec<EvaluationSlice> {
        let mut slices = self.evaluation_slices(rows);
        if self.workers()[0].share.parallelism == Some(Parallelism::Pipeline) {
            slices.truncate(1);
        }
        slices
    }

    /// Evaluates a data set, each worker on its part of the rows, and returns the sums over all rows. Of a pipeline,
    /// the last stage computes the sums.
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
        let parts = self.on_all(move |rank, engine| evaluate_slice(engine, &data, &slices[rank], min_micro_batches))?;
        let mut sum = EvaluationSums::default();
        parts.into_iter().for_each(|part| sum.add(part));
        Ok(sum)
    }
}

impl Session {
    /// Opens the evaluator on the device of `part`; does nothing if `part` is `None`, because no evaluator is planned.
    /// A failure of the device is only logged, because the team can evaluate itself.
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
                self.remove_evaluator()?;
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

    /// Removes the evaluation plan of `device` (its recipe and predicted times) from the plan of the run.
    fn clear_evaluator_plan(&mut self, device: &str) {
        let mut excluded = self.plan.excluded.iter_mut();
        excluded.find(|out| out.device == device).into_iter().for_each(|out| out.evaluator_plan = None);
    }

    /// Evaluates the weights after the last finished step, unless that has been done. The evaluator does it if there is
    /// one that can, else the team. Does nothing without evaluation data.
    pub(crate) fn evaluate_current_step(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
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
        if due && !in_progress && !log.has_evaluation(step)? { self.evaluate_current_step(log) } else { Ok(()) }
    }

    /// Whether the run file asks for an evaluation after `step`.
    pub(crate) fn evaluates_after(&self, step: u64) -> bool {
        let every = self.context.run.train.eval_every;
        every > 0 && step.is_multiple_of(every)
    }

    /// Evaluates on the team. Recovers from device failures. Does nothing without evaluation data.
    fn evaluate_on_team(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let Some(data) = self.context.eval.clone() else { return Ok(()) };
        let start = Instant::now();
        let (sum, preferences) = match self.context.run.train.objective {
            Objective::Dpo => self.evaluate_pairs(&data, log).map(|(sum, figures)| (sum, Some(figures)))?,
            Objective::Grpo => return self.evaluate_rewards(log),
            Objective::Supervised => (self.run_with_recovery(log, |session| session.team.evaluate(&data))?, None),
        };
        let step = self.info.step;
        if let Some(figures) = preferences {
            log.emit(Event::Preferences { step, evaluation: true, figures })?;
        }
        self.record_evaluation(step, sum, start.elapsed().as_secs_f64(), None, log)?;
        if let Some((_, eval)) = &mut self.last_eval {
            eval.preferences = preferences;
        }
        Ok(())
    }

    /// Records and logs the result of an evaluation; `device` names the evaluator, `None` means the team.
    fn record_evaluation(
        &mut self,
        step: u64,
        sum: EvaluationSums,
        seconds: f64,
        device: Option<String>,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let exact_match = sum.exact_match();
        self.last_eval = Some((step, EvalResult { loss: sum.loss(), exact_match, preferences: None, reward: None }));
        let (loss, tokens) = (sum.loss(), sum.tokens);
        log.emit(Event::Evaluation { step, loss, reward: None, exact_match, tokens, seconds, device })
    }

    /// Sends the current weights to the evaluator, which then evaluates. Returns true if it received them. Returns
    /// false if the team must evaluate: there is no evaluator, or it did not receive the weights. Also returns false
    /// after the last step if the evaluator is predicted to be slower than the idle team.
    fn delegate_evaluation(&mut self, log: &mut EventLog) -> Result<bool, StepInterrupt> {
        let last = self.is_finished();
        let mut reason = String::new();
        for _ in 0..MAX_TRANSFER_ATTEMPTS {
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
                    self.remove_failed_evaluator(failure, log)?;
                    return Ok(false);
                }
                Some(EvaluationReport { sum: Ok(_), .. }) | None => return Ok(false),
            }
            log.emit(Event::Warning { message: format!("{reason}; sending the weights again") })?;
        }
        let failure = DeviceFailure::Lost {
            rank: 0,
            reason: format!("{reason}; {MAX_TRANSFER_ATTEMPTS} tries made no progress"),
        };
        self.remove_failed_evaluator(failure, log)?;
        Ok(false)
    }

    /// Requests an evaluation of the current step from the evaluator and sends it the weights. Returns the final state
    /// of the transfer; [`TransferState::SenderFailed`] if there is no evaluator or no evaluation data.
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

    /// Logs the result of the evaluator if it has arrived. If the evaluator failed, evaluates on the team.
    pub(crate) fn poll_evaluation(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let report = self.evaluator.as_mut().and_then(Evaluator::poll);
        self.log_report_or_evaluate_on_team(report, log)
    }

    /// Waits for the evaluation in progress and logs its result. If the evaluator failed, evaluates on the team.
    pub(crate) fn wait_for_evaluation(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let report = self.evaluator.as_mut().and_then(Evaluator::wait);
        self.log_report_or_evaluate_on_team(report, log)
    }

    /// Logs a report, if there is one. After a failure, closes the evaluator and evaluates on the team.
    fn log_report_or_evaluate_on_team(
        &mut self,
        report: Option<EvaluationReport>,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        match self.log_report(report, log)? {
            // The weights of that step are gone: evaluate the current ones instead.
            Some(failure) => {
                self.remove_failed_evaluator(failure, log)?;
                self.evaluate_on_team(log)
            }
            None => Ok(()),
        }
    }

    /// Closes the evaluator if the new plan `planned` names its device, as a worker or as an excluded device. First
    /// waits for the evaluation in progress and logs its result.
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
        if let (Some(name), Some(failure)) = (self.remove_evaluator()?, failure) {
            // Opening the device for the new plan will show whether it still works.
            log.emit(Event::Warning { message: format!("{name}: {}; this evaluation is skipped", failure.message()) })?;
        }
        Ok(())
    }

    /// Logs the report of the evaluator. Returns the failure if the report holds one instead of a result. Returns
    /// `None` after a result or without a report.
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

    /// Removes the evaluator from the run after `failure`, and logs its loss; the team evaluates from now on.
    ///
    /// # Errors
    /// The failure is fatal, or a file cannot be written.
    fn remove_failed_evaluator(&mut self, failure: DeviceFailure, log: &mut EventLog) -> Result<(), StepInterrupt> {
        if let DeviceFailure::Fatal(failure) = failure {
            return Err(failure.into());
        }
        match self.remove_evaluator()? {
            Some(device) => Ok(self.report_evaluator_loss(device, failure.message(), log)?),
            None => Ok(()),
        }
    }

    /// Removes the evaluator and its plan from the run, and frees its memory if it still responds. Returns its name;
    /// `None` if there was no evaluator.
    fn remove_evaluator(&mut self) -> Result<Option<String>, Failure> {
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

    /// Sets the load line of the evaluator at the user's request. The evaluator continues with a plan that fits. If no
    /// plan fits or saves time, closes the evaluator, and the team evaluates itself. The inner result is the new load
    /// line with a description, or the reason for refusing it. The outer error ends or restarts the run.
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
                self.remove_evaluator()?;
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
                self.remove_evaluator()?;
                "no evaluation fits or helps; the team evaluates from now on".to_owned()
            }
        };
        self.store_budget(device.name.clone(), budget, line)?;
        log.emit(Event::Warning { message: format!("{}: load line changed to {line}: {description}", device.name) })?;
        Ok(Ok(BudgetChange { budget_bytes: line, message: format!("load line {line}: {description}") }))
    }

    /// Sets the evaluation plan of `device` (its recipe and predicted times) in the plan of the run.
    fn set_evaluator_plan(&mut self, device: &str, evaluator_plan: EvaluatorPlan) {
        let mut excluded = self.plan.excluded.iter_mut();
        excluded
            .find(|out| out.device == device)
            .into_iter()
            .for_each(|out| out.evaluator_plan = Some(evaluator_plan.clone()));
    }

    /// Plans how `device` would evaluate for the present team. Returns `None` if no evaluation fits on the device or if
    /// it would save no time. Also returns `None` if the planner would then give the team other recipes.
    fn plan_evaluator(&self, device: DeviceSpec) -> Result<Option<(WorkerAssignment, EvaluatorPlan)>, Failure> {
        let name = device.name.clone();
        let devices: Vec<DeviceSpec> = self.team.specs().into_iter().chain([device]).collect();
        let mut known = PreviousPlan::from_plan(&self.plan);
        if let ([only], Some(known)) = (self.team.workers(), &mut known) {
            known.team = vec![worker_plan_alone(only)];
        }
        let evaluations = evaluation_schedule(&self.context.run, self.context.eval.as_ref().map(|eval| eval.rows()));
        let planner = self.context.planner(self.host_load_line()).with_previous(known.as_ref());
        let planned = planner.plan_team(&devices, None, evaluations)?;
        process::trim_heap();
        let now = self.team.workers().iter().map(|worker| (&worker.device.name, &worker.plan.recipe));
        let team_is_unchanged =
            planned.assignments.iter().map(|part| (&part.device.name, &part.outcome.plan.recipe)).eq(now);
        let out = planned.plan.excluded.into_iter().find(|out| out.device == name);
        Ok(planned.evaluator.zip(out.and_then(|out| out.evaluator_plan)).filter(|_| team_is_unchanged))
    }
}

/// Returns which of the first `rows` rows a worker evaluates: a part in proportion to its part of the `total` sequences
/// of a step. A worker with all sequences, or with a stage of a pipeline, gets all rows.
fn evaluation_slice(worker: &Worker, rows: u64, total: u64) -> EvaluationSlice {
    let first = worker.share.first_sequence;
    let at = |sequences: u64| (u128::from(rows) * u128::from(sequences) / u128::from(total)) as u64;
    let all = total == worker.sequences || worker.share.parallelism == Some(Parallelism::Pipeline);
    let rows = if all { 0..rows } else { at(first)..at(first + worker.sequences) };
    EvaluationSlice { rows, micro_batch: worker.plan.recipe.micro_batch }
}

/// Returns a worker of a run on one device as an entry of a team plan. The plan of such a run has no entries of
/// workers. The predicted times in the entry are 0.
fn worker_plan_alone(worker: &Worker) -> WorkerPlan {
    WorkerPlan {
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
    }
}
