//! The training loop: a `Session` runs steps, evaluations and saves, until the run is finished or stopped.
//!
//! Opening devices and loading state is in `opening`, files are written in `run_folder`, evaluation is in `evaluation`.
//! Device failures are handled in `recover` and `device_loss`, changes of the team in `rebalance`. These modules extend
//! `Session` with their own `impl` blocks.

use crate::config::Objective;
use crate::data::{Batch, Loader};
use crate::engine::{StepInput, StepLoss};
use crate::events::EventLog;
use crate::fault_injection::PendingFault;
use crate::inference::samples::{TokenSample, generate_samples};
use crate::objective::{References, Rounds, WeightedLoss};
use crate::recovery::failures::Work;
use crate::recovery::stragglers::StragglerDetector;
use crate::session::checkpoint::CheckpointInfo;
use crate::session::context::{Checkpointer, RecoveryState, RunContext};
use crate::session::control::ControlSocket;
use crate::session::evaluator::Evaluator;
use crate::session::interrupt::{Continuation, StepInterrupt};
use crate::session::learning_rate::learning_rate;
use crate::session::length::{self, schedule_progress};
use crate::session::thermal::ThermalGuard;
use crate::step_times::StepTimes;
use crate::team::Team;
use crate::team::abandoned::AbandonedMemory;
use plimsoll_core::{
    Bytes, EvalResult, EvaluatorResult, Event, ExcludedDevice, Exit, Failure, HeldMemory, Plan, RunStatus,
};
use plimsoll_device::machine::environment;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{mem, thread};

/// Shortest time between two events that list the memory of each device.
const MEMORY_PERIOD: Duration = Duration::from_millis(500);

/// A run in progress: its inputs, its open devices, and how far it has come.
pub(crate) struct Session {
    /// Inputs of the run.
    pub(crate) context: RunContext,
    /// Open devices.
    pub(crate) team: Team,
    /// Plan of the whole team.
    pub(crate) plan: Plan,
    /// Progress after the last finished step, as the next checkpoint stores it.
    pub(crate) info: CheckpointInfo,
    /// Step in progress; between two steps, the last finished one.
    pub(crate) current_step: u64,
    /// Log-probabilities under the initial weights, for objectives that compare with them.
    pub(crate) references: References,
    /// The rounds of completions; `None` for other objectives.
    pub(crate) rounds: Option<Rounds>,
    /// Whether weights and optimizer state are loaded.
    pub(crate) state_loaded: bool,
    /// Whether and when checkpoints are written.
    pub(crate) checkpoints: Checkpointer,
    /// Failures and lost devices.
    pub(crate) recovery: RecoveryState,
    /// Device outside the team that evaluates; `None` if the team evaluates itself.
    pub(crate) evaluator: Option<Evaluator>,
    /// Result of an evaluator that was closed; `None` if no evaluator was closed, or if it had made no evaluation.
    pub(crate) evaluator_result: Option<EvaluatorResult>,
    /// Newest evaluation with its step; `None` before the first one.
    pub(crate) last_eval: Option<(u64, EvalResult)>,
    /// Detector of workers that are slower than planned.
    pub(crate) stragglers: StragglerDetector,
    /// Temperature limit, and the time that the run paused for hot devices.
    pub(crate) thermal: ThermalGuard,
    /// Control socket; `None` if the system refuses it.
    pub(crate) control: Option<ControlSocket>,
    /// Faults that the user asked to inject.
    pub(crate) faults: Vec<Arc<PendingFault>>,
    /// Memory that lost devices still hold, because they do not respond.
    pub(crate) abandoned: AbandonedMemory,
    /// Measured step durations.
    pub(crate) step_times: StepTimes,
    /// Time at which an event last listed the memory of each device; `None` before the first.
    pub(crate) memory_measured: Option<Instant>,
    /// Sum over all devices of the measured peak rate of matrix products, in FLOP/s; 0 if it is unknown.
    pub(crate) peak_flops: f64,
    /// Seconds that opening the devices and loading the state took.
    pub(crate) setup_seconds: f64,
}

/// Products of the training loop at its end.
pub(crate) struct Ending {
    /// Whether the run is done or was stopped.
    pub(crate) status: RunStatus,
    /// Failure that stopped the run; `None` if the run is done or the user stopped it.
    pub(crate) failure: Option<Failure>,
    /// Folder of the written model; `None` if the run stopped early or saves nothing.
    pub(crate) model: Option<PathBuf>,
    /// Text samples that the model generated, as tokens; empty if the run draws none.
    pub(crate) drawn: Vec<TokenSample>,
}

impl Session {
    /// Sets the plan that the run follows. Devices that the previous plan excluded stay listed as excluded.
    pub(crate) fn set_plan(&mut self, plan: Plan) {
        let before = mem::replace(&mut self.plan, plan).excluded;
        let Plan { devices, excluded, .. } = &mut self.plan;
        let named = |name: &str, excluded: &[ExcludedDevice]| {
            devices.iter().any(|device| device.name == name) || excluded.iter().any(|out| out.device == name)
        };
        for out in before {
            if !named(&out.device, excluded) {
                excluded.push(out);
            }
        }
    }

    /// Whether the run has done its last step or reached its time limit.
    pub(crate) fn is_finished(&self) -> bool {
        length::is_finished(&self.context.run, self.info.steps, &self.info)
    }

    /// Runs all remaining steps, the final evaluation and the final saves. After a restart from a checkpoint it repeats
    /// the steps that were lost.
    pub(crate) fn run(&mut self, log: &mut EventLog, stop: &AtomicBool) -> Result<Ending, Failure> {
        self.log_start(log)?;
        loop {
            match self.train_steps(log, stop).and_then(|status| self.conclude(status, log)) {
                Ok(ending) => return Ok(ending),
                Err(StepInterrupt::RolledBack) => {}
                Err(StepInterrupt::Stop { failure, state_intact }) => return Ok(self.stop(failure, state_intact, log)),
                Err(StepInterrupt::Fatal(failure)) if failure.exit == Exit::Stopped => {
                    return Ok(self.stop(failure, false, log));
                }
                Err(StepInterrupt::Fatal(failure)) => return Err(failure),
            }
        }
    }

    /// Ends the run early, because of `failure`. Saves the finished steps if `state_intact`, that is, if weights and
    /// optimizer state are those of the last finished step.
    pub(crate) fn stop(&mut self, failure: Failure, state_intact: bool, log: &mut EventLog) -> Ending {
        let mut failure = failure;
        if self.state_loaded && state_intact && self.info.step > 0 {
            self.reset_refusals();
            if let Err(StepInterrupt::Fatal(unsaved) | StepInterrupt::Stop { failure: unsaved, .. }) = self.save(log) {
                failure = failure.hint(format!("saving the last steps failed: {}", unsaved.message));
            }
        }
        let failure = failure.hint(self.resume_hint());
        Ending { status: RunStatus::Stopped, failure: Some(failure), model: None, drawn: Vec::new() }
    }

    /// Logs the start event, and what the chat template of the data does with conversations.
    fn log_start(&self, log: &mut EventLog) -> Result<(), Failure> {
        log.emit(Event::Start {
            step: self.info.step + 1,
            steps: self.info.steps.unwrap_or(0),
            parameters: self.context.resolved.model.config.parameters(),
            arena_bytes: self.plan.devices.iter().map(|device| device.arena_bytes).sum::<Bytes>()
                + self.evaluator.as_ref().map_or(Bytes::ZERO, Evaluator::arena_bytes),
            predicted_step_seconds: self.plan.predicted.step_seconds,
            product_flops: self.context.gemm_flops_per_step,
            peak_flops: self.peak_flops,
            simulated: self.team.workers().iter().any(|worker| worker.device.simulated()),
            devices: self.team.names(),
            environment: Some(Box::new(environment())),
        })?;
        let mut warnings = self.context.data.warnings().into_iter();
        warnings.try_for_each(|message| log.emit(Event::Warning { message }))
    }

    /// Runs steps until the run is finished or `stop` becomes true. After each step it evaluates, saves and adapts as
    /// needed.
    fn train_steps(&mut self, log: &mut EventLog, stop: &AtomicBool) -> Result<RunStatus, StepInterrupt> {
        if !self.complete_reference(log, stop)? {
            return Ok(RunStatus::Stopped);
        }
        self.redo_interrupted_evaluation(log)?;
        let mut loader = Loader::start(Arc::clone(&self.context.data), self.context.batches, self.info.step);
        while !self.is_finished() {
            let Some(batch) = loader.next_batch()? else { break };
            self.step(batch, log, stop)?;
            self.poll_evaluation(log)?;
            self.save_if_all_workers_remote(log)?;
            let step = self.info.step;
            let every = |every: u64| every > 0 && step.is_multiple_of(every);
            if self.evaluates_after(step) && !self.is_finished() {
                self.evaluate_current_step(log)?;
            }
            let minutes = self.context.run.train.save_every_minutes;
            let due = minutes > 0.0 && self.checkpoints.newest_time.elapsed().as_secs_f64() > minutes * 60.0;
            if every(self.context.run.train.save_every) || due {
                self.save(log)?;
            }
            if stop.load(Ordering::Relaxed) && !self.is_finished() {
                self.save(log)?;
                return Ok(RunStatus::Stopped);
            }
            if !self.is_finished() {
                self.rebalance_stragglers(log)?;
                self.readmit_returned_devices(log)?;
            }
            self.poll_control_and_memory(log)?;
            self.thermal.pause_if_too_hot(&self.team, self.info.step, stop, log)?;
        }
        Ok(RunStatus::Done)
    }

    /// Runs one training step: gradients, update, bookkeeping.
    ///
    /// Until the update begins the weights are unchanged, so a failed step is dropped and repeated with the same rows.
    /// Once the update has begun, the step is no longer dropped: after a failure the update continues, or the run
    /// restarts from a checkpoint.
    fn step(&mut self, batch: &mut Batch, log: &mut EventLog, stop: &AtomicBool) -> Result<(), StepInterrupt> {
        let step = self.info.step + 1;
        let start = Instant::now();
        self.current_step = step;
        self.team.begin_step(step);
        let mut weighted = self.set_loss_weights(batch, log, stop)?;
        let (tokens, labelled_tokens) = match &weighted {
            Some(weighted) => (weighted.tokens, weighted.labelled_tokens),
            None => (batch.rows.tokens.len() as u64, batch.labelled_tokens),
        };
        let scored = Instant::now();
        let rows = &mut batch.rows;
        let train = &self.context.run.train;
        let progress = schedule_progress(&self.context.run, &self.info, step);
        let rate = learning_rate(train.schedule, train.learning_rate, step, train.warmup_steps, progress);
        let loss_divisor = weighted.as_ref().map_or(labelled_tokens, |weighted| weighted.divisor);
        let input =
            StepInput { step, learning_rate: rate, betas: train.betas, clip_norm: train.clip_norm, loss_divisor };
        let mut found = self.run_with_recovery(log, |session| session.team.gradients(rows, &input))?;
        if let Some(weighted) = &weighted {
            found.loss = weighted.loss;
        }
        if !found.is_finite() {
            return Err(StepInterrupt::Stop { failure: not_finite(step, found), state_intact: true });
        }
        let removed_reason = self.update_weights(log)?;
        // On a CPU with a load limit, the pause keeps the machine usable.
        let sampling_seconds = weighted.as_ref().map_or(0.0, |weighted| weighted.sampling_seconds);
        let trained = start.elapsed().saturating_sub(Duration::from_secs_f64(sampling_seconds));
        thread::sleep(trained.mul_f64(1.0 / self.context.cpu_duty - 1.0));
        let seconds = start.elapsed().as_secs_f64();
        // The plan predicts no sampling.
        self.step_times.push(seconds - sampling_seconds);
        self.team.record_step_seconds(seconds - sampling_seconds);
        self.info.step = step;
        self.info.elapsed_seconds += seconds;
        let loss = self.record_step_loss(found.loss, labelled_tokens, log)?;
        if let Some(weighted) = weighted.take() {
            self.log_weighted_loss(weighted, scored.elapsed().as_secs_f64(), found.norm, log)?;
        }
        log.emit(Event::Step {
            step,
            loss,
            norm: found.norm,
            learning_rate: rate,
            tokens,
            labelled_tokens,
            seconds,
            bytes: self.team.total_held_bytes(),
            memory: self.memory_if_due(),
        })?;
        match removed_reason {
            Some(reason) => self.rebalance(&reason, log),
            None => Ok(()),
        }
    }

    /// Sets the loss weights of an objective that needs more than labels, and returns its loss. Returns `None` for other
    /// objectives, whose labels have the weight 1.
    fn set_loss_weights(
        &mut self,
        batch: &mut Batch,
        log: &mut EventLog,
        stop: &AtomicBool,
    ) -> Result<Option<WeightedLoss>, StepInterrupt> {
        match self.context.run.train.objective {
            Objective::Supervised => Ok(None),
            Objective::Dpo => self.set_pair_weights(batch, log).map(Some),
            Objective::Grpo => self.set_completion_weights(batch, log, stop).map(Some),
        }
    }

    /// Logs the figures of a step with the gradient norm `norm`. `update_seconds` are those of gradients and update.
    fn log_weighted_loss(
        &mut self,
        WeightedLoss { mut event, .. }: WeightedLoss,
        update_seconds: f64,
        norm: f64,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let mut alarms = Vec::new();
        if let Event::Round { figures, .. } = &mut event {
            figures.seconds.update = update_seconds;
            alarms = self.record_round((**figures).clone(), norm);
        }
        log.emit(event)?;
        alarms.into_iter().try_for_each(|message| log.emit(Event::Warning { message }))
    }

    /// Returns the memory of each device, for viewers of the run; `None` if it was measured a moment ago.
    fn memory_if_due(&mut self) -> Option<Vec<HeldMemory>> {
        if self.memory_measured.is_some_and(|measured| measured.elapsed() < MEMORY_PERIOD) {
            return None;
        }
        self.memory_measured = Some(Instant::now());
        Some(self.team.held_memory())
    }

    /// Records the loss of a finished step and returns it. A step without any label has none: the result is NaN, and
    /// the first such step is logged as a warning.
    fn record_step_loss(&mut self, loss: f64, labelled_tokens: u64, log: &mut EventLog) -> Result<f64, Failure> {
        if labelled_tokens == 0 {
            self.info.unlabelled_steps += 1;
            if self.info.unlabelled_steps == 1 {
                let step = self.info.step;
                let message = format!(
                    "step {step} has no label, so it has no loss and learns nothing; result.json counts such steps \
                     (unlabelled_steps); a larger data.sequence or train.batch_tokens avoids them"
                );
                log.emit(Event::Warning { message })?;
            }
            return Ok(f64::NAN);
        }
        self.info.last_loss = loss;
        if self.info.first_loss.is_nan() {
            self.info.first_loss = loss;
        }
        Ok(loss)
    }

    /// Updates the weights on all devices. After an out-of-memory error the update continues with the op that failed.
    /// Returns the reason if a worker was removed; `None` if all workers remain.
    ///
    /// A worker of a data parallel team that is lost, or runs out of memory too often, is removed. The others finish
    /// the step, and the caller must then rebalance the team. If the worker held a part of the model that no other has,
    /// the run restarts without it.
    fn update_weights(&mut self, log: &mut EventLog) -> Result<Option<String>, StepInterrupt> {
        let (mut removed_reason, mut ops_done) = (None, 0);
        while let Err(failure) = self.team.update() {
            let ops_before = mem::replace(&mut ops_done, self.team.update_ops_done());
            if ops_done > ops_before {
                self.reset_refusals();
            }
            match self.recover(failure, Work::Update { begun: ops_done > 0 }, log)? {
                Continuation::Repeat | Continuation::PlanChanged => {}
                Continuation::FinishStep(reason) => removed_reason = Some(reason),
            }
        }
        self.reset_refusals();
        Ok(removed_reason)
    }

    /// Ends the training loop. If all steps are done, evaluates, saves, writes the model and draws samples. If the user
    /// stopped the run, only waits for an evaluation in progress.
    fn conclude(&mut self, status: RunStatus, log: &mut EventLog) -> Result<Ending, StepInterrupt> {
        let mut ending = Ending { status, failure: None, model: None, drawn: Vec::new() };
        if status == RunStatus::Done {
            self.evaluate_current_step(log)?;
            self.save(log)?;
            if self.checkpoints.enabled {
                ending.model = Some(self.run_with_recovery(log, Session::write_model)?);
            }
            if let (true, Some(eval)) = (self.context.draws_samples, self.context.eval.clone()) {
                ending.drawn = self.run_with_recovery(log, |session| {
                    generate_samples(&mut session.team, &eval, &session.context.resolved.model.config)
                })?;
            }
        }
        self.wait_for_evaluation(log)?;
        Ok(ending)
    }
}

/// Returns the failure of a step with a NaN or infinite loss or gradient norm.
fn not_finite(step: u64, found: StepLoss) -> Failure {
    let message = format!("step {step}: loss {} and gradient norm {} are not finite", found.loss, found.norm);
    Failure::stopped(message).hint(
        "the step was dropped; start a new run with a lower train.learning_rate or train.clip_norm, and check the samples \
         of this step",
    )
}
