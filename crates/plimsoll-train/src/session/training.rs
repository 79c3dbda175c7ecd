//! The training loop: the devices are opened and filled, then come steps, evaluations, and the end. `start` is how a run comes
//! to that, `saving` what it writes down.

use crate::config::{Length, Method, RunFile};
use crate::data::{Batches, Dataset, Loader, Order, Rows};
use crate::fault_injection::Asked;
use crate::inference::samples::{Drawn, samples};
use crate::planning::prepare::{Part, Planned, Prepared, load_weights};
use crate::resolve::{Resolved, pace};
use crate::session::checkpoint::{self, Checkpoint, CheckpointInfo};
use crate::session::control::Control;
use crate::session::cooling::Cooling;
use crate::session::engine::StepInput;
use crate::session::evaluation::evaluator::Evaluator;
use crate::session::events::EventLog;
use crate::session::pace::Pace;
use crate::session::rate::learning_rate;
use crate::session::start::Run;
use crate::session::trouble::{Halt, Trouble};
use crate::team::Team;
use crate::team::abreast::Behind;
use crate::team::absent::Absent;
use crate::team::drift::Drift;
use crate::team::open::open_team;
use plimsoll_core::{
    Bytes, DeviceKind, DeviceSpec, EvalResult, EvaluatorResult, Event, Exit, Failure, LeftOut, LostDevice, Plan,
    Retreat, RunStatus,
};
use plimsoll_device::device::DeviceError;
use plimsoll_device::process;
use plimsoll_plan::price::needed_product_flops;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use std::{mem, thread};

pub(crate) struct Trainer {
    pub(crate) folder: PathBuf,
    pub(crate) run: RunFile,
    pub(crate) resolved: Resolved,
    data: Arc<Dataset>,
    pub(crate) eval: Option<Arc<Dataset>>,
    pub(crate) team: Team,
    /// Who evaluates beside the team, and what one that is gone has done.
    pub(crate) evaluator: Option<Evaluator>,
    pub(crate) evaluated_by: Option<EvaluatorResult>,
    /// What devices that are missed still hold.
    behind: Behind,
    /// The plan of all.
    pub(crate) plan: Plan,
    pub(crate) info: CheckpointInfo,
    /// The step that is being done; between two, the one that was done last.
    pub(crate) now: u64,
    pub(crate) retreats: Vec<Retreat>,
    pub(crate) lost: Vec<LostDevice>,
    /// Whether a device was lost since the last step was done.
    pub(crate) has_lost: bool,
    /// Those that may come back.
    pub(crate) absent: Vec<Absent>,
    /// The load line of the host that all devices have together, as it was at the start.
    pub(crate) host: Bytes,
    /// Where devices refuse, are slow, or are lost, because the user asked for it.
    pub(crate) rehearsed: Vec<Arc<Asked>>,
    /// Whether weights and optimizer are there.
    pub(crate) filled: bool,
    pub(crate) drift: Drift,
    /// What each device refused since the run last came further, by its name: a device that was opened anew is the same one.
    pub(crate) refused: BTreeMap<String, u32>,
    pub(crate) cooling: Cooling,
    pub(crate) control: Option<Control>,
    pub(crate) batches: Batches,
    product_flops: f64,
    peak_flops: f64,
    pub(crate) pace: Pace,
    /// Steps that were done before this start.
    done_before: u64,
    pub(crate) last_eval: Option<(u64, EvalResult)>,
    pub(crate) last_saved: (u64, Instant),
    /// What it took to open the devices and to bring weights and optimizer onto them.
    pub(crate) filling_seconds: f64,
    /// What the newest checkpoint took.
    pub(crate) saving_seconds: Option<f64>,
    generates: bool,
    pub(crate) saves: bool,
    /// The share of the time in which the processor computes.
    works: f64,
}

/// How the steps ended, with what was made of it.
pub(crate) struct Ending {
    pub(crate) status: RunStatus,
    /// Why they ended early, where nobody asked for it.
    pub(crate) why: Option<Failure>,
    pub(crate) model: Option<PathBuf>,
    pub(crate) drawn: Vec<Drawn>,
}

impl Trainer {
    /// Opens the devices and brings weights and optimizer onto them; with it comes why the run stops where these devices do
    /// not get so far.
    pub(crate) fn open(
        run: Run,
        folder: PathBuf,
        control: Option<Control>,
        log: &mut EventLog,
    ) -> Result<(Trainer, Option<Failure>), Failure> {
        let Run { prepared, checkpoint, rehearsed, saves, .. } = run;
        let checkpoint = checkpoint.map(Arc::new);
        let Prepared { run, resolved, train, eval, mut planned, .. } = prepared;
        let precision = run.arithmetic(resolved.device.kind);
        let generates = planned.parts[0].answer.set.program("prefill").is_some();
        let product_flops = planned.parts.iter().map(step_product_flops).sum();
        // From here on the peak is this run's: what data and planning took before is given back, or is a charge.
        process::give_back();
        let _ = process::reset_peak();
        let start = Instant::now();
        let evaluator = planned.evaluator.take();
        let behind = Behind::default();
        let (team, plan) = (Team::nobody(run.elsewhere.clone(), behind.clone()), planned.plan.clone());
        let recipe = plan.recipe.clone();
        let first = &planned.parts[0].device;
        let (threads, charges_bytes, kind) = (first.threads, first.charges, first.kind);
        let (batches, steps) = steps_of(&run, train.rows());
        let fresh = CheckpointInfo {
            version: CheckpointInfo::VERSION,
            step: 0,
            steps,
            elapsed_seconds: 0.0,
            first_loss: f64::NAN,
            last_loss: f64::NAN,
            recipe,
            sharing: plan.sharing,
            team: plan.team.clone(),
            threads,
            charges_bytes,
            algorithms: plan.algorithms.clone(),
            precision,
            rows: train.rows(),
            labelled_tokens: train.labelled_tokens(),
            data: train.content().to_owned(),
            files: BTreeMap::new(),
        };
        let info = match checkpoint.as_deref() {
            Some(Checkpoint { info, .. }) => CheckpointInfo {
                step: info.step,
                elapsed_seconds: info.elapsed_seconds,
                first_loss: info.first_loss,
                last_loss: info.last_loss,
                ..fresh
            },
            None => fresh,
        };
        let cooling = Cooling::new(run.run.max_temperature);
        let mut trainer = Trainer {
            folder,
            generates,
            saves,
            // A virtual device keeps its own pace, and a GPU leaves the processor usable.
            works: if kind == DeviceKind::Cpu { pace(&run, threads) } else { 1.0 },
            product_flops,
            peak_flops: 0.0,
            last_saved: (info.step, Instant::now()),
            run,
            resolved,
            data: Arc::new(train),
            eval: eval.map(Arc::new),
            team,
            evaluator: None,
            evaluated_by: None,
            behind,
            plan,
            now: info.step,
            done_before: info.step,
            info,
            batches,
            control,
            retreats: Vec::new(),
            lost: Vec::new(),
            has_lost: false,
            absent: Vec::new(),
            host: planned.host,
            rehearsed,
            filled: false,
            refused: BTreeMap::new(),
            drift: Drift::default(),
            cooling,
            pace: Pace::default(),
            last_eval: None,
            filling_seconds: 0.0,
            saving_seconds: None,
        };
        let filled = trainer.open_devices(planned, false, log).and_then(|()| trainer.fill_up(checkpoint.as_ref(), log));
        trainer.filling_seconds = start.elapsed().as_secs_f64();
        match filled {
            Ok(()) => trainer.finished(),
            Err(Halt::Back) => {}
            Err(Halt::Stop { failure, .. }) => return Ok((trainer, Some(failure))),
            Err(Halt::Failure(failure)) if failure.exit == Exit::Stopped => return Ok((trainer, Some(failure))),
            // Nothing was begun.
            Err(Halt::Failure(failure)) => return Err(failure.hint(trainer.standing())),
        }
        trainer.open_evaluator(evaluator, log)?;
        Ok((trainer, None))
    }

    /// Opens the devices of a plan. Who is lost while that is done is gone like any other: the rest plan anew. Of a run that is
    /// `under_way` so is who cannot be opened, whatever is the matter.
    fn open_devices(&mut self, mut planned: Planned, under_way: bool, log: &mut EventLog) -> Result<(), Halt> {
        loop {
            let mut devices: Vec<DeviceSpec> = planned.parts.iter().map(|part| part.device.clone()).collect();
            let host = planned.host;
            self.recall_evaluator(&planned, log)?;
            let relieved = !self.left_out(&devices).is_empty();
            let (run, resolved, asked, behind) = (&self.run, &self.resolved, &self.rehearsed, &self.behind);
            let opened = open_team(run, resolved, planned, asked, behind, under_way, relieved, log);
            match opened {
                Ok((team, plan)) => {
                    self.team = team;
                    self.absent.retain(|absent| self.team.rank_of(&absent.spec.name).is_none());
                    for out in self.plan.left_out.iter().filter(|out| self.team.rank_of(&out.device).is_some()) {
                        let message = format!("the run goes on with {}, which was left out", out.device);
                        log.emit(Event::Warning { message })?;
                    }
                    self.goes_by(plan);
                    self.peak_flops = self.team.peak_flops(self.info.precision);
                    let charges = self.team.first().device.charges;
                    self.info.goes_by(&self.plan, charges);
                    return Ok(());
                }
                Err(Trouble::Lost { rank, why }) => {
                    let device = devices.remove(rank);
                    planned = self.planned_without(device, &devices, host, &why, None, log)?;
                }
                Err(other) => return Err(other.into()),
            }
        }
    }

    /// Other devices, or the same in another way, go on from the newest checkpoint; from the beginning where there is none.
    /// What stands on the devices now is given up.
    pub(crate) fn go_back(&mut self, planned: Planned, log: &mut EventLog) -> Halt {
        self.filled_anew(planned, log).map_or_else(|halt| halt, |()| Halt::Back)
    }

    fn filled_anew(&mut self, planned: Planned, log: &mut EventLog) -> Result<(), Halt> {
        self.team.look_back(None);
        let held_beside = self.team.held_beside().unwrap_or(Bytes::ZERO);
        self.team.disband();
        self.team.reset_peak();
        let (checkpoint, warnings) = checkpoint::newest(&self.folder)?;
        let checkpoint = checkpoint.map(Arc::new);
        for message in warnings {
            log.emit(Event::Warning { message })?;
        }
        self.open_devices(planned, true, log)?;
        let arenas = self.evaluator.as_ref().map_or(Bytes::ZERO, Evaluator::arenas);
        self.team.stands_beside(arenas, held_beside);
        let (step, elapsed_seconds, first_loss, last_loss) = match checkpoint.as_deref() {
            Some(Checkpoint { info, .. }) => (info.step, info.elapsed_seconds, info.first_loss, info.last_loss),
            None => (0, 0.0, f64::NAN, f64::NAN),
        };
        self.info = CheckpointInfo { step, elapsed_seconds, first_loss, last_loss, ..self.info.clone() };
        self.pace.back_to(step.saturating_sub(self.done_before) as usize);
        self.last_eval = self.last_eval.filter(|(of, _)| *of <= step);
        self.evaluator.iter_mut().for_each(|evaluator| evaluator.forget_after(step));
        self.now = step;
        self.last_saved = (step, Instant::now());
        self.drift.begins(step);
        self.filled = false;
        self.write_plan()?;
        self.fill_up(checkpoint.as_ref(), log)
    }

    /// Weights and optimizer come onto the devices, whatever these refuse. That is step 0 of a rehearsal.
    fn fill_up(&mut self, checkpoint: Option<&Arc<Checkpoint>>, log: &mut EventLog) -> Result<(), Halt> {
        self.insist_again(log, |trainer| trainer.fill(checkpoint))?;
        self.filled = true;
        self.team.at_step(self.info.step);
        Ok(())
    }

    /// Weights and optimizer: of a checkpoint, else the first ones.
    fn fill(&mut self, checkpoint: Option<&Arc<Checkpoint>>) -> Result<(), Trouble> {
        let (model, run) = (Arc::clone(&self.resolved.model), self.run.clone());
        let (checkpoint, frozen) = (checkpoint.cloned(), run.train.method == Method::Lora);
        self.team.all(move |_, engine| {
            if checkpoint.is_none() || frozen {
                load_weights(engine, &model, &run)?;
            }
            match &checkpoint {
                Some(checkpoint) => checkpoint::restore(checkpoint, engine),
                None => Ok(engine.run("fresh")?),
            }
        })?;
        Ok(())
    }

    /// From now on the run follows this plan. Who was left out before still is.
    pub(crate) fn goes_by(&mut self, plan: Plan) {
        let before = mem::replace(&mut self.plan, plan).left_out;
        let Plan { devices, left_out, .. } = &mut self.plan;
        let named = |name: &str, left_out: &[LeftOut]| {
            devices.iter().any(|device| device.name == name) || left_out.iter().any(|out| out.device == name)
        };
        for out in before {
            if !named(&out.device, left_out) {
                left_out.push(out);
            }
        }
    }

    pub(crate) fn is_last(&self) -> bool {
        is_last(&self.run, self.info.steps, &self.info)
    }

    /// Steps that are still to be done, if each takes so many seconds.
    pub(crate) fn steps_left(&self, step_seconds: f64) -> f64 {
        match (self.info.steps, self.run.length()) {
            (Some(steps), _) => steps.saturating_sub(self.info.step) as f64,
            (None, Some(Length::Hours(hours))) => (hours * 3600.0 - self.info.elapsed_seconds).max(0.0) / step_seconds,
            _ => f64::INFINITY,
        }
    }

    /// How far the run is behind the warm-up: 0 to 1.
    fn progress(&self, step: u64) -> f64 {
        let warmup = self.run.train.warmup_steps;
        match (self.info.steps, self.run.length()) {
            (Some(steps), _) => (step - 1).saturating_sub(warmup) as f64 / steps.saturating_sub(warmup).max(1) as f64,
            (None, Some(Length::Hours(hours))) => self.info.elapsed_seconds / (hours * 3600.0),
            _ => 0.0,
        }
    }

    /// All steps, and what comes after them. A run that had to go back does again what was lost.
    pub(crate) fn run(&mut self, log: &mut EventLog, stop: &AtomicBool) -> Result<Ending, Failure> {
        self.say_start(log)?;
        loop {
            match self.steps(log, stop).and_then(|status| self.conclude(status, log)) {
                Ok(ending) => return Ok(ending),
                Err(Halt::Back) => {}
                Err(Halt::Stop { failure, whole }) => return Ok(self.stop(failure, whole, log)),
                Err(Halt::Failure(failure)) if failure.exit == Exit::Stopped => {
                    return Ok(self.stop(failure, false, log));
                }
                Err(Halt::Failure(failure)) => return Err(failure),
            }
        }
    }

    /// The run ends early. The steps that were finished are saved where weights and optimizer are whole.
    pub(crate) fn stop(&mut self, failure: Failure, whole: bool, log: &mut EventLog) -> Ending {
        let mut failure = failure;
        if self.filled && whole && self.info.step > 0 {
            self.finished();
            if let Err(Halt::Failure(unsaved) | Halt::Stop { failure: unsaved, .. }) = self.save(log) {
                failure = failure.hint(format!("the last steps cannot be saved: {}", unsaved.message));
            }
        }
        let failure = failure.hint(self.standing());
        Ending { status: RunStatus::Stopped, why: Some(failure), model: None, drawn: Vec::new() }
    }

    fn say_start(&self, log: &mut EventLog) -> Result<(), Failure> {
        log.emit(Event::Start {
            step: self.info.step + 1,
            steps: self.info.steps.unwrap_or(0),
            parameters: self.resolved.model.config.parameters(),
            arena_bytes: self.plan.devices.iter().map(|device| device.arena_bytes).sum::<Bytes>()
                + self.evaluator.as_ref().map_or(Bytes::ZERO, Evaluator::arena_bytes),
            predicted_step_seconds: self.plan.predicted.step_seconds,
            product_flops: self.product_flops,
            peak_flops: self.peak_flops,
            simulated: self.team.workers().iter().any(|worker| worker.device.simulated()),
        })
    }

    fn steps(&mut self, log: &mut EventLog, stop: &AtomicBool) -> Result<RunStatus, Halt> {
        self.evaluate_again(log)?;
        let mut loader = Loader::start(Arc::clone(&self.data), self.batches, self.info.step);
        while !self.is_last() {
            let Some(batch) = loader.next_step()? else { break };
            self.step(&mut batch.rows, batch.labelled_tokens, log)?;
            self.look_for_evaluation(log)?;
            self.save_what_others_hold(log)?;
            let step = self.info.step;
            let every = |every: u64| every > 0 && step.is_multiple_of(every);
            if self.is_evaluated_after(step) && !self.is_last() {
                self.evaluate(log)?;
            }
            let minutes = self.run.train.save_every_minutes;
            let due = minutes > 0.0 && self.last_saved.1.elapsed().as_secs_f64() > minutes * 60.0;
            if every(self.run.train.save_every) || due {
                self.save(log)?;
            }
            if stop.load(Ordering::Relaxed) && !self.is_last() {
                self.save(log)?;
                return Ok(RunStatus::Stopped);
            }
            if !self.is_last() {
                self.watch_drift(log)?;
                self.take_back(log)?;
            }
            self.look_around(log)?;
            self.cool_down(stop, log)?;
        }
        Ok(RunStatus::Done)
    }

    fn step(&mut self, rows: &mut Rows, labelled_tokens: u64, log: &mut EventLog) -> Result<(), Halt> {
        let step = self.info.step + 1;
        let start = Instant::now();
        let train = &self.run.train;
        let rate = learning_rate(train.schedule, train.learning_rate, step, train.warmup_steps, self.progress(step));
        let input =
            StepInput { step, learning_rate: rate, betas: train.betas, clip_norm: train.clip_norm, labelled_tokens };
        let tokens = rows.tokens.len() as u64;
        self.now = step;
        self.team.at_step(step);
        // Until here nothing has changed: a step that is refused is dropped and done again, with the same rows.
        let found = self.insist(log, |trainer| trainer.team.gradients(rows, &input))?;
        if !found.is_finite() {
            let message = format!("step {step}: the loss is {} and the gradient norm {}", found.loss, found.norm);
            let failure = Failure::stopped(message)
                .hint("a lower train.learning_rate or train.clip_norm, in a run of its own, is the usual cure; look at the samples of this step, too; the step itself was dropped");
            return Err(Halt::Stop { failure, whole: true });
        }
        // From here on it only rolls forward, tensor by tensor, as it is: what is refused is done again.
        let (mut gone, mut done) = (None, 0);
        while let Err(trouble) = self.team.update() {
            let before = std::mem::replace(&mut done, self.team.updated());
            if done > before {
                self.finished();
            }
            let parts = self.team.len() == 1 || self.team.holds_parts();
            match trouble {
                Trouble::Refused { rank, error } => match self.refuses_for_ever(rank, &error) {
                    None => self.do_again(rank, &error, log)?,
                    Some(why) if parts => {
                        // Only of a rehearsal it is known that nothing had begun.
                        let begun = done > 0 || !matches!(error, DeviceError::Refused { .. });
                        self.leave_out(rank, &why, !begun, log)?;
                    }
                    Some(why) => {
                        self.part_with(rank, &why, log)?;
                        gone = Some(why);
                    }
                },
                // A part of the state is gone with it.
                Trouble::Lost { rank, why } if parts => self.go_on_without(rank, &why, log)?,
                // The others finish the step before they share its work.
                Trouble::Lost { rank, why } => {
                    self.part_with(rank, &why, log)?;
                    gone = Some(why);
                }
                other => return Err(other.into()),
            }
        }
        self.finished();
        // The machine stays usable: what whole threads cannot leave free, a pause does.
        thread::sleep(start.elapsed().mul_f64(1.0 / self.works - 1.0));
        let seconds = start.elapsed().as_secs_f64();
        self.pace.push(seconds);
        self.team.took(seconds);
        self.info.step = step;
        self.info.elapsed_seconds += seconds;
        self.info.last_loss = found.loss;
        if step == 1 {
            self.info.first_loss = found.loss;
        }
        log.emit(Event::Step {
            step,
            loss: found.loss,
            norm: found.norm,
            learning_rate: rate,
            tokens,
            labelled_tokens,
            seconds,
            bytes: self.team.held_by_all(),
        })?;
        match gone {
            Some(why) => self.share_anew(&why, log),
            None => Ok(()),
        }
    }

    /// What is left to do when all steps are done.
    fn conclude(&mut self, status: RunStatus, log: &mut EventLog) -> Result<Ending, Halt> {
        let mut ending = Ending { status, why: None, model: None, drawn: Vec::new() };
        if status == RunStatus::Done {
            self.evaluate(log)?;
            self.save(log)?;
            if self.saves {
                ending.model = Some(self.insist(log, Trainer::write_model)?);
            }
            if let (true, Some(eval)) = (self.generates, self.eval.clone()) {
                ending.drawn =
                    self.insist(log, |trainer| samples(&mut trainer.team, &eval, &trainer.resolved.model.config))?;
            }
        }
        self.await_evaluation(log)?;
        Ok(ending)
    }
}

/// Whether a run of so many steps, where that is known, has come to its last one.
pub(crate) fn is_last(run: &RunFile, steps: Option<u64>, info: &CheckpointInfo) -> bool {
    let hours = match run.length() {
        Some(Length::Hours(hours)) => hours * 3600.0,
        _ => f64::INFINITY,
    };
    steps.is_some_and(|steps| info.step >= steps) || info.elapsed_seconds >= hours
}

/// Which rows make the steps of a run on so many rows, and how many steps there are, where that is known before it ends.
pub(crate) fn steps_of(run: &RunFile, rows: u64) -> (Batches, Option<u64>) {
    let order = Order { seed: run.train.seed, rows, shuffle: run.data.shuffle };
    let end = match run.length() {
        Some(Length::Epochs(epochs)) => Some(order.rows_of_epochs(epochs).max(1)),
        _ => None,
    };
    let batches = Batches { order, rows: run.batch_sequences(), end };
    let steps = match run.length() {
        Some(Length::Steps(steps)) => Some(steps),
        _ => batches.steps(),
    };
    (batches, steps)
}

/// Operations in the products of a part's sequences of a step.
fn step_product_flops(part: &Part) -> f64 {
    needed_product_flops(&part.answer.set) * part.answer.plan.recipe.micro_batches(part.sequences) as f64
}
