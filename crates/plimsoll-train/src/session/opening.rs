//! Opening a session: opens the devices of a plan, loads weights and optimizer state, and restarts from a checkpoint
//! when the team changes.

use crate::config::{Format, Method};
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::load_weights;
use crate::events::EventLog;
use crate::fault_injection::PendingFault;
use crate::objective::{References, Rounds};
use crate::planning::prepare::PreparedRun;
use crate::planning::team_plan::{TeamPlan, WorkerAssignment};
use crate::recovery::stragglers::StragglerDetector;
use crate::resolve::cpu_duty;
use crate::session::checkpoint::{self, Checkpoint, CheckpointInfo};
use crate::session::context::{Checkpointer, RecoveryState, RunContext};
use crate::session::control::ControlSocket;
use crate::session::evaluator::Evaluator;
use crate::session::interrupt::StepInterrupt;
use crate::session::length::batches_and_steps;
use crate::session::thermal::ThermalGuard;
use crate::session::training::Session;
use crate::step_times::StepTimes;
use crate::team::Team;
use crate::team::abandoned::AbandonedMemory;
use crate::team::open::open_team;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Event, Exit, Failure};
use plimsoll_device::process::{self, SchedulerTimes};
use plimsoll_plan::price::required_gemm_flops;
use plimsoll_program::ProgramKind;
use plimsoll_program::models::decoder::Scores;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Inputs of [`Session::open`].
pub(crate) struct SessionRequest {
    /// Run folder, which the caller has locked.
    pub folder: PathBuf,
    /// Run file, model, data and plan.
    pub prepared: PreparedRun,
    /// Checkpoint to resume from; `None` to start from step 0.
    pub checkpoint: Option<Checkpoint>,
    /// Faults that the user asked to inject.
    pub faults: Vec<Arc<PendingFault>>,
    /// Whether checkpoints and the model are written.
    pub saves: bool,
    /// Control socket; `None` if the system refuses it.
    pub control: Option<ControlSocket>,
}

impl Session {
    /// Opens the devices and loads weights and optimizer state. Returns the session with `None` if it is ready for its
    /// first step. If device failures stop the run before, returns the session with that failure, and the caller still
    /// writes a result.
    ///
    /// # Errors
    /// Any failure without a result to write, such as a device that cannot be opened or invalid weights.
    pub(crate) fn open(request: SessionRequest, log: &mut EventLog) -> Result<(Session, Option<Failure>), Failure> {
        let SessionRequest { folder, prepared, checkpoint, faults, saves, control } = request;
        let checkpoint = checkpoint.map(Arc::new);
        let info = info_at_start(&prepared, checkpoint.as_deref());
        let PreparedRun { run, resolved, train, eval, mut planned, completions, .. } = prepared;
        let rounds = completions.map(|source| Rounds::new(&run, source, &folder));
        // The memory peak of the run starts here: data and planning released their memory, or it is part of the charges.
        let peak_before = process::peak_resident().unwrap_or(Bytes::ZERO);
        process::trim_heap();
        let _ = process::reset_peak();
        let start = Instant::now();
        let evaluator = planned.evaluator.take();
        let abandoned = AbandonedMemory::default();
        let plan = planned.plan.clone();
        let first = &planned.assignments[0].device;
        let mut batches = batches_and_steps(&run, train.rows()).0;
        // Completions of a prompt follow each other.
        batches.order.shuffle &= run.data.format != Format::Rollouts;
        let context = RunContext {
            folder,
            peak_before,
            scheduled_before: SchedulerTimes::read(),
            draws_samples: rounds.is_none()
                && planned.assignments[0].outcome.set.program(ProgramKind::Prefill).is_some(),
            gemm_flops_per_step: planned.assignments.iter().map(gemm_flops_per_step).sum(),
            // A virtual device keeps its own pace, and a GPU leaves the CPU usable.
            cpu_duty: if first.kind == DeviceKind::Cpu { cpu_duty(&run, first.threads) } else { 1.0 },
            resumed_step: info.step,
            host_budget: planned.host,
            batches,
            data: Arc::new(train),
            eval: eval.map(Arc::new),
            run,
            resolved,
        };
        let mut session = Session {
            team: Team::empty(context.run.remote.clone(), abandoned.clone()),
            plan,
            current_step: info.step,
            references: References::default(),
            rounds,
            state_loaded: false,
            checkpoints: Checkpointer::new(saves, info.step),
            recovery: RecoveryState::default(),
            evaluator: None,
            evaluator_result: None,
            last_eval: None,
            stragglers: StragglerDetector::default(),
            thermal: ThermalGuard::new(context.run.run.max_temperature),
            control,
            faults,
            abandoned,
            step_times: StepTimes::default(),
            memory_measured: None,
            peak_flops: 0.0,
            setup_seconds: 0.0,
            info,
            context,
        };
        let opened = session.open_devices(planned, false, log);
        let loaded = opened.and_then(|()| session.initialize_state(checkpoint.as_ref(), log));
        session.setup_seconds = start.elapsed().as_secs_f64();
        match loaded {
            Ok(()) => session.reset_refusals(),
            Err(StepInterrupt::RolledBack) => {}
            Err(StepInterrupt::Stop { failure, .. }) => return Ok((session, Some(failure))),
            Err(StepInterrupt::Fatal(failure)) if failure.exit == Exit::Stopped => return Ok((session, Some(failure))),
            Err(StepInterrupt::Fatal(failure)) => return Err(failure.hint(session.resume_hint())),
        }
        session.open_evaluator(evaluator, log)?;
        Ok((session, None))
    }

    /// Opens the devices of a plan. If a device is lost meanwhile, plans the run again for the remaining ones and opens
    /// those. `under_way` says that the run has trained already: any failure to open a device then counts as its loss.
    fn open_devices(
        &mut self,
        mut planned: TeamPlan,
        under_way: bool,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        loop {
            let mut devices: Vec<DeviceSpec> = planned.assignments.iter().map(|part| part.device.clone()).collect();
            let host = planned.host;
            self.release_evaluator_for(&planned, log)?;
            let has_replacement = !self.unused_devices(&devices).is_empty();
            let (run, resolved, faults, abandoned) =
                (&self.context.run, &self.context.resolved, &self.faults, &self.abandoned);
            let opened = open_team(run, resolved, planned, faults, abandoned, under_way, has_replacement, log);
            match opened {
                Ok((team, plan)) => {
                    self.team = team;
                    self.recovery.unavailable.retain(|unavailable| self.team.rank_of(&unavailable.spec.name).is_none());
                    for out in self.plan.excluded.iter().filter(|out| self.team.rank_of(&out.device).is_some()) {
                        let message = format!("the run continues with {}, which was excluded before", out.device);
                        log.emit(Event::Warning { message })?;
                    }
                    self.set_plan(plan);
                    self.peak_flops = self.team.peak_flops(self.info.precision);
                    let charges = self.team.first().device.charges;
                    self.info.set_plan(&self.plan, charges);
                    return Ok(());
                }
                Err(DeviceFailure::Lost { rank, reason }) => {
                    let device = devices.remove(rank);
                    planned = self.replan_without(device, &devices, host, &reason, None, log)?;
                }
                Err(other) => return Err(other.into()),
            }
        }
    }

    /// Closes all devices, opens those of another plan and continues from the newest checkpoint, or from step 0 without
    /// one. Returns [`StepInterrupt::RolledBack`] after success, else the reason to end the run.
    pub(crate) fn restart_from_checkpoint(&mut self, planned: TeamPlan, log: &mut EventLog) -> StepInterrupt {
        self.reopen_from_checkpoint(planned, log).map_or_else(|interrupt| interrupt, |()| StepInterrupt::RolledBack)
    }

    /// Closes all devices, opens those of another plan and loads the newest checkpoint, or the initial state without
    /// one.
    fn reopen_from_checkpoint(&mut self, planned: TeamPlan, log: &mut EventLog) -> Result<(), StepInterrupt> {
        self.team.record_peaks(None);
        let external_peak_bytes = self.team.external_peak_bytes().unwrap_or(Bytes::ZERO);
        self.team.disband();
        self.team.reset_peak();
        let (checkpoint, warnings) = checkpoint::newest(&self.context.folder)?;
        let checkpoint = checkpoint.map(Arc::new);
        for message in warnings {
            log.emit(Event::Warning { message })?;
        }
        self.open_devices(planned, true, log)?;
        let arenas = self.evaluator.as_ref().map_or(Bytes::ZERO, Evaluator::arena_bytes_in_process);
        self.team.set_external_arenas(arenas, external_peak_bytes);
        self.info = self.info.clone().with_progress_of(checkpoint.as_deref());
        let step = self.info.step;
        self.step_times.truncate(step.saturating_sub(self.context.resumed_step) as usize);
        self.last_eval = self.last_eval.filter(|(eval_step, _)| *eval_step <= step);
        if let Some(rounds) = &mut self.rounds {
            rounds.figures.retain(|(round_step, _)| *round_step <= step);
            rounds.alarms.forget_steps();
        }
        self.evaluator.iter_mut().for_each(|evaluator| evaluator.cancel_after(step));
        self.current_step = step;
        self.checkpoints.set_newest(step);
        self.stragglers.restart(step);
        self.state_loaded = false;
        self.store_current_plan()?;
        self.initialize_state(checkpoint.as_ref(), log)
    }

    /// Fills weights and optimizer state from `checkpoint`, or with initial values if it is `None`. Recovers from
    /// out-of-memory errors and lost devices, as in a step. Faults that the user injects into step 0 occur here.
    fn initialize_state(
        &mut self,
        checkpoint: Option<&Arc<Checkpoint>>,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        self.retry_with_recovery(log, |session| session.load_state(checkpoint))?;
        self.state_loaded = true;
        self.team.begin_step(self.info.step);
        Ok(())
    }

    /// Loads weights and optimizer state from a checkpoint, or initializes them without one. The frozen weights of a LoRA run
    /// and copies of initial weights always come from the model.
    pub(crate) fn load_state(&mut self, checkpoint: Option<&Arc<Checkpoint>>) -> Result<(), DeviceFailure> {
        let (model, run) = (Arc::clone(&self.context.resolved.model), self.context.run.clone());
        let has_frozen = run.train.method == Method::Lora || run.scores() == Scores::PresentAndInitial;
        let checkpoint = checkpoint.cloned();
        self.team.on_all(move |_, engine| {
            if checkpoint.is_none() || has_frozen {
                load_weights(engine, &model, &run)?;
            }
            match &checkpoint {
                Some(checkpoint) => checkpoint::restore(checkpoint, engine),
                None => Ok(engine.run(ProgramKind::InitOptimizer)?),
            }
        })?;
        Ok(())
    }
}

/// Returns the `checkpoint.json` of a run before its next step: its inputs and plan, with the progress of the
/// checkpoint that it resumes from. Without a checkpoint, the run is at step 0.
fn info_at_start(prepared: &PreparedRun, checkpoint: Option<&Checkpoint>) -> CheckpointInfo {
    let PreparedRun { run, resolved, train, planned, .. } = prepared;
    let (plan, first) = (&planned.plan, &planned.assignments[0].device);
    let by_clock = run.train.hours.map(|_| "train.hours ends the run by the clock".to_owned());
    let info = CheckpointInfo {
        other_bits: prepared.other_bits.iter().cloned().chain(by_clock).collect(),
        version: CheckpointInfo::VERSION,
        step: 0,
        steps: batches_and_steps(run, train.rows()).1,
        elapsed_seconds: 0.0,
        first_loss: f64::NAN,
        last_loss: f64::NAN,
        unlabelled_steps: 0,
        recipe: plan.recipe.clone(),
        parallelism: plan.parallelism,
        team: plan.team.clone(),
        threads: first.threads,
        charges_bytes: first.charges,
        algorithms: plan.algorithms.clone(),
        precision: run.arithmetic(resolved.device.kind),
        rows: train.rows(),
        labelled_tokens: train.labelled_tokens(),
        data: train.content_sha256().to_owned(),
        files: BTreeMap::new(),
    };
    info.with_progress_of(checkpoint)
}

/// Returns the number of floating-point operations of all matrix products that one worker runs in a step, without
/// recompute.
fn gemm_flops_per_step(part: &WorkerAssignment) -> f64 {
    required_gemm_flops(&part.outcome.set) * part.outcome.plan.recipe.micro_batches(part.sequences) as f64
}
