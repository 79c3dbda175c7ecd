//! The training loop: steps, evaluations, checkpoints, the end.

use super::abreast::Behind;
use super::absent::Absent;
use super::checkpoint::{self, Checkpoint, CheckpointInfo};
use super::control::Control;
use super::cooling::Cooling;
use super::drift::Drift;
use super::engine::StepInput;
use super::evaluator::Evaluator;
use super::events::{EventLog, check_free};
use super::open::open_team;
use super::pace::Pace;
use super::prepare::{Known, Part, Planned, Prepared, load_weights, prepare};
use super::rate::learning_rate;
use super::rehearsal::{Asked, Injection, Stage};
use super::samples::{Drawn, Sample, readable, samples};
use super::spaces::Storing;
use super::team::Team;
use super::trouble::{Halt, Trouble};
use crate::data::{Batches, Dataset, Loader, Order, Rows};
use crate::files::{WeightWriter, atomic, write_adapter_dir, write_model_dir};
use crate::resolve::{Resolved, lora, pace};
use crate::run_file::{Length, Method, RunFile, Threads};
use plimsoll_core::{
    Bytes, DeviceKind, DeviceSpec, EvalResult, EvaluatorResult, Event, Exit, Failure, LeftOut, LossSpan, LostDevice,
    Member, Plan, Recipe, Record, Retreat, RunResult, RunStatus, Sharing, StepSeconds, counted,
};
use plimsoll_device::device::DeviceError;
use plimsoll_device::probe::Cpu;
use plimsoll_device::process;
use plimsoll_plan::price::needed_product_flops;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;
use std::{fs, mem};

/// A run that has been planned and can start, or go on.
pub struct Run {
    prepared: Prepared,
    checkpoint: Option<Checkpoint>,
    warnings: Vec<String>,
    rehearsed: Vec<Arc<Asked>>,
    saves: bool,
}

/// What becomes of a run that is to go on.
pub enum Resumed {
    /// Something is left to do.
    Goes(Box<Run>),
    /// All its steps are done, and result and model are written: they stay as they are.
    Done(Box<Outcome>),
}

/// What a run leaves.
pub struct Outcome {
    /// `result.json`.
    pub result: RunResult,
    /// Some prompts with what the model makes of them.
    pub samples: Vec<Sample>,
    /// The written model, where the run is done.
    pub model: Option<PathBuf>,
    /// The run folder.
    pub folder: PathBuf,
}

impl Run {
    /// Plans a new run.
    ///
    /// # Errors
    /// What is wrong with the run file, the model or the data. A plan that does not fit is no error here.
    pub fn new(run: RunFile) -> Result<Run, Failure> {
        Run::begin(run, None)
    }

    /// The same, done as a stored plan says, where that fits here.
    ///
    /// # Errors
    /// As [`Run::new`].
    pub fn following(run: RunFile, plan: &Plan) -> Result<Run, Failure> {
        let mut run = Run::begin(run, Known::of_plan(plan).as_ref())?;
        let way = |plan: &Plan| done_by(&plan.recipe, plan.sharing, &plan.team);
        let here = &run.prepared.planned.plan;
        if here.fits && way(here) != way(plan) {
            run.warnings.push(format!("the plan cannot be followed here, so this was planned anew: {}", way(here)));
        }
        Ok(run)
    }

    fn begin(run: RunFile, known: Option<&Known>) -> Result<Run, Failure> {
        let folder = Path::new(&run.run.dir);
        check_free(folder)?;
        if folder.join("run.toml").exists() || folder.join("checkpoints").exists() {
            let message = format!("run.dir: {} holds a run already", folder.display());
            return Err(Failure::input(message)
                .hint(format!("go on with it: plimsoll train --resume {}", folder.display()))
                .hint("or start anew elsewhere: --set run.dir=runs/another"));
        }
        let prepared = prepare(run, known)?;
        Ok(Run { prepared, checkpoint: None, warnings: Vec::new(), rehearsed: Vec::new(), saves: true })
    }

    /// Plans to go on with a run from its newest whole checkpoint; from the start, where there never was one. Of a run that
    /// is done nothing is opened: it is what it was.
    ///
    /// # Errors
    /// As [`Run::new`]; where no checkpoint is whole, and where the data are not those of the checkpoint.
    pub fn resume(mut run: RunFile) -> Result<Resumed, Failure> {
        let folder = PathBuf::from(&run.run.dir);
        check_free(&folder)?;
        let (checkpoint, mut warnings) = checkpoint::newest(&folder)?;
        if let Some(Checkpoint { info, .. }) = &checkpoint {
            is_no_shorter(&run, info)?;
        }
        if let Some(outcome) = checkpoint.as_ref().and_then(|checkpoint| left_by(&run, &checkpoint.info)) {
            return Ok(Resumed::Done(Box::new(outcome)));
        }
        if let Some(Checkpoint { info, path, .. }) = &checkpoint {
            for warning in &mut warnings {
                *warning += &format!("; the run goes on from {}", path.display());
            }
            // The work is shared out among as many threads as before, where this machine has so many.
            let threads = |asked| Cpu::read().threads_for(asked).ok();
            if run.run.threads == Threads::Auto && threads(None) != threads(Some(info.threads)) {
                run.run.threads = threads(Some(info.threads)).map_or(Threads::Auto, Threads::Count);
            }
        }
        let known = match &checkpoint {
            Some(Checkpoint { info, .. }) => Some(Known::of(info)),
            None => planned_before(&folder),
        };
        let prepared = prepare(run, known.as_ref())?;
        if let Some(Checkpoint { info, path, .. }) = &checkpoint {
            let (rows, labelled_tokens) = (prepared.train.rows(), prepared.train.labelled_tokens());
            if (rows, labelled_tokens) != (info.rows, info.labelled_tokens) {
                return Err(Failure::input(format!(
                    "data.train: {} with {} are not the data of {}, which had {} and {}",
                    counted(rows, "row"),
                    counted(labelled_tokens, "label"),
                    path.display(),
                    info.rows,
                    info.labelled_tokens
                ))
                .hint("put the files back as they were; other data are another run"));
            }
            if prepared.train.content() != info.data {
                let message = format!("data.train: tokens or labels are not those of {}", path.display());
                return Err(Failure::input(message).hint("put the files back as they were; other data are another run"));
            }
            let plan = &prepared.planned.plan;
            let now = how(&plan.recipe, plan.sharing, &plan.team, prepared.planned.parts[0].device.threads);
            let before = how(&info.recipe, info.sharing, &info.team, info.threads);
            if now != before {
                warnings.push(format!(
                    "planned anew ({now}; the checkpoint had {before}): last bits may differ from an undisturbed run"
                ));
            }
        }
        let run = Run { prepared, checkpoint, warnings, rehearsed: Vec::new(), saves: true };
        Ok(Resumed::Goes(Box::new(run)))
    }

    /// Devices shall refuse memory at these places, be slow, or be lost.
    ///
    /// # Errors
    /// What can never happen in this run.
    pub fn rehearse(&mut self, injections: Vec<Injection>) -> Result<(), Failure> {
        let Prepared { run, train, planned, .. } = &self.prepared;
        if !planned.plan.fits {
            // It is refused, whatever would happen in it.
            return Ok(());
        }
        let stage = Stage {
            devices: planned.parts.iter().map(Part::on_stage).collect(),
            evaluator: planned.evaluator.as_ref().map(Part::on_stage),
            left_out: &planned.plan.left_out,
            done: self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.info.step),
            steps: steps_of(run, train.rows()).1,
        };
        injections.iter().try_for_each(|injection| injection.check(&stage))?;
        self.rehearsed = injections.into_iter().map(Asked::new).collect();
        Ok(())
    }

    /// No checkpoint and no model shall be left: the run is only measured.
    pub fn save_nothing(&mut self) {
        self.saves = false;
    }

    /// The plan and what it is about.
    pub fn prepared(&self) -> &Prepared {
        &self.prepared
    }

    /// Runs to the end, or until `stop` is raised: then the step is finished and saved. A device that hangs for good is left
    /// behind on a thread that never ends.
    ///
    /// # Errors
    /// What stops a run: weights or a disk that are not what they should be, a loss that is no number. What was
    /// saved before stays; a new run that cannot begin leaves nothing that another one would trip over.
    ///
    /// # Panics
    /// When the plan does not fit: the caller has seen it.
    pub fn start(self, watch: &mut dyn FnMut(&Record), stop: &AtomicBool) -> Result<Outcome, Failure> {
        assert!(self.prepared.planned.plan.fits, "a plan that does not fit is not started");
        let folder = PathBuf::from(&self.prepared.run.run.dir);
        make_folder(&folder)?;
        let mut log = EventLog::open(&folder, watch)?;
        let mut warnings = self.warnings.clone();
        warnings.extend(self.prepared.run.moved_lines());
        warnings.extend(self.prepared.run.lost_base().filter(|_| self.saves));
        warnings.extend(self.prepared.run.idle_budget());
        warnings.extend(self.prepared.resolved.fallback.as_ref().map(ToString::to_string));
        let control = Control::listen(&folder)
            .map_err(|error| {
                warnings.push(format!("{}: the load line cannot be moved while it runs: {error}", folder.display()));
            })
            .ok();
        // From here on the folder holds a run: what it begins with has been read.
        let (mut trainer, stopped) = Trainer::open(self, folder.clone(), control, &mut log)?;
        if trainer.info.step == 0 {
            atomic::write_file(&folder.join("run.toml"), trainer.run.to_toml().as_bytes())?;
        } else {
            keep_length(&folder, &trainer.run)?;
        }
        trainer.run.keep_moved(&folder)?;
        let plan = serde_json::to_vec_pretty(&trainer.plan).expect("plain data has a JSON form");
        atomic::write_file(&folder.join("plan.json"), &plan)?;
        for message in warnings {
            log.emit(Event::Warning { message })?;
        }
        let ending = match stopped {
            Some(failure) => Ok(trainer.stop(failure, false, &mut log)),
            None => trainer.run(&mut log, stop),
        };
        let outcome = ending.and_then(|ending| trainer.finish(ending, &mut log));
        outcome
            .map_err(|failure| failure.hint(format!("then go on with: plimsoll train --resume {}", folder.display())))
    }
}

/// The length that a run goes on with stands in its folder: whatever ends it, the next `--resume` knows it.
fn keep_length(folder: &Path, run: &RunFile) -> Result<(), Failure> {
    let path = folder.join("run.toml");
    let mut stored = RunFile::load(Some(&path), &[])?;
    if stored.length() != run.length() {
        let train = &mut stored.train;
        (train.steps, train.epochs, train.hours) = (run.train.steps, run.train.epochs, run.train.hours);
        atomic::write_file(&path, stored.to_toml().as_bytes())?;
    }
    Ok(())
}

fn make_folder(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(|e| {
        Failure::input(format!("run.dir: {}: {e}", folder.display())).hint("name a folder that can be written")
    })
}

pub(super) struct Trainer {
    pub(super) folder: PathBuf,
    pub(super) run: RunFile,
    pub(super) resolved: Resolved,
    data: Arc<Dataset>,
    pub(super) eval: Option<Arc<Dataset>>,
    pub(super) team: Team,
    /// Who evaluates beside the team, and what one that is gone has done.
    pub(super) evaluator: Option<Evaluator>,
    pub(super) evaluated_by: Option<EvaluatorResult>,
    /// What devices that are missed still hold.
    behind: Behind,
    /// The plan of all.
    pub(super) plan: Plan,
    pub(super) info: CheckpointInfo,
    /// The step that is being done; between two, the one that was done last.
    pub(super) now: u64,
    pub(super) retreats: Vec<Retreat>,
    pub(super) lost: Vec<LostDevice>,
    /// Whether a device was lost since the last step was done.
    pub(super) has_lost: bool,
    /// Those that may come back.
    pub(super) absent: Vec<Absent>,
    /// The load line of the host that all devices have together, as it was at the start.
    pub(super) host: Bytes,
    /// Where devices refuse, are slow, or are lost, because the user asked for it.
    pub(super) rehearsed: Vec<Arc<Asked>>,
    /// Whether weights and optimizer are there.
    pub(super) filled: bool,
    pub(super) drift: Drift,
    /// What each device refused since the run last came further, by its name: a device that was opened anew is the same one.
    pub(super) refused: BTreeMap<String, u32>,
    pub(super) cooling: Cooling,
    pub(super) control: Option<Control>,
    batches: Batches,
    product_flops: f64,
    peak_flops: f64,
    pub(super) pace: Pace,
    /// Steps that were done before this start.
    done_before: u64,
    pub(super) last_eval: Option<(u64, EvalResult)>,
    last_saved: (u64, Instant),
    /// What it took to open the devices and to bring weights and optimizer onto them.
    pub(super) filling_seconds: f64,
    /// What the newest checkpoint took.
    pub(super) saving_seconds: Option<f64>,
    generates: bool,
    pub(super) saves: bool,
    /// The share of the time in which the processor computes.
    works: f64,
}

/// How the steps ended, with what was made of it.
struct Ending {
    status: RunStatus,
    /// Why they ended early, where nobody asked for it.
    why: Option<Failure>,
    model: Option<PathBuf>,
    drawn: Vec<Drawn>,
}

impl Trainer {
    /// Opens the devices and brings weights and optimizer onto them; with it comes why the run stops where these devices do
    /// not get so far.
    fn open(
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
    pub(super) fn go_back(&mut self, planned: Planned, log: &mut EventLog) -> Halt {
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
    pub(super) fn goes_by(&mut self, plan: Plan) {
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

    /// The plan as it is by now: on disk, and for the next checkpoint.
    pub(super) fn write_plan(&mut self) -> Result<(), Failure> {
        if self.team.len() == 0 {
            // Who is to follow it is not there yet.
            return Ok(());
        }
        let Plan { of, disturbed, left_out, .. } = self.plan.clone();
        self.plan = Plan { of, disturbed, left_out, ..self.team.plan(&self.plan) };
        let charges = self.team.first().device.charges;
        self.info.goes_by(&self.plan, charges);
        let text = serde_json::to_vec_pretty(&self.plan).expect("plain data has a JSON form");
        Ok(atomic::write_file(&self.folder.join("plan.json"), &text)?)
    }

    pub(super) fn is_last(&self) -> bool {
        is_last(&self.run, self.info.steps, &self.info)
    }

    /// Steps that are still to be done, if each takes so many seconds.
    pub(super) fn steps_left(&self, step_seconds: f64) -> f64 {
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
    fn run(&mut self, log: &mut EventLog, stop: &AtomicBool) -> Result<Ending, Failure> {
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
    fn stop(&mut self, failure: Failure, whole: bool, log: &mut EventLog) -> Ending {
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

    /// What a run that stops now can go on from, in words.
    pub(super) fn standing(&self) -> String {
        let of = format!("the newest checkpoint stands, of step {}", self.last_saved.0);
        match self.info.step - self.last_saved.0 {
            _ if !self.saves => "nothing was to be saved: it would begin anew".to_owned(),
            _ if self.last_saved.0 == 0 => {
                "there is no checkpoint yet (train.save_every, train.save_every_minutes): it would begin anew"
                    .to_owned()
            }
            0 => format!("{of}: all that was finished"),
            lost => format!("{of}: {lost} finished after it {} done again", if lost == 1 { "is" } else { "are" }),
        }
    }

    pub(super) fn save(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        if self.has_saved() {
            return Ok(());
        }
        let start = Instant::now();
        self.insist(log, Trainer::write_checkpoint)?;
        Ok(self.saved(start, log)?)
    }

    /// Saves where devices let it be done in so many tries: else the checkpoint before stands.
    pub(super) fn save_if_possible(&mut self, tries: u32, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        for _ in 0..tries {
            if self.has_saved() {
                break;
            }
            match self.write_checkpoint() {
                Ok(()) => self.saved(start, log)?,
                Err(Trouble::Failure(failure)) => return Err(failure),
                Err(Trouble::Refused { .. } | Trouble::Lost { .. } | Trouble::Peer(_)) => {}
            }
        }
        Ok(())
    }

    /// After a device was lost, where none of those that are left is this process's own: what took one, such as the head of a
    /// cluster, may take all some moments later, with the weights. What was done is saved while they are there.
    fn save_what_others_hold(&mut self, log: &mut EventLog) -> Result<(), Failure> {
        let lost = std::mem::take(&mut self.has_lost);
        match lost && self.team.workers().iter().all(|worker| worker.device.host().is_some()) {
            true => self.save_if_possible(1, log),
            false => Ok(()),
        }
    }

    /// Whether there is nothing to save that is not saved.
    fn has_saved(&self) -> bool {
        let step = self.info.step;
        !self.saves || step == 0 || self.last_saved.0 == step && self.checkpoint_path().exists()
    }

    /// Where the checkpoint of the present step is, or will be.
    fn checkpoint_path(&self) -> PathBuf {
        self.folder.join("checkpoints").join(format!("step-{}", self.info.step))
    }

    fn write_checkpoint(&mut self) -> Result<(), Trouble> {
        checkpoint::write(&self.folder, &self.info, &mut self.team, self.run.train.keep)?;
        Ok(())
    }

    fn saved(&mut self, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        self.last_saved = (self.info.step, Instant::now());
        let seconds = start.elapsed().as_secs_f64();
        self.saving_seconds = Some(seconds);
        let (step, path) = (self.info.step, self.checkpoint_path().display().to_string());
        log.emit(Event::Checkpoint { step, path, seconds })
    }

    /// Writes what was trained, whole or not at all: a Hugging Face directory, or adapters as a PEFT directory.
    fn write_model(&mut self) -> Result<PathBuf, Trouble> {
        let (model, team) = (&self.resolved.model, &mut self.team);
        let tensors = team.files("save");
        let write = |writer: &mut WeightWriter| team.store("save", &mut Storing(writer));
        let path = model_folder(&self.folder, &self.run);
        if self.run.train.method == Method::Lora {
            let base = model.weights(&self.run).and_then(|_| model.folder());
            write_adapter_dir(&path, &lora(&self.run, model), base, &tensors, write)?;
            return Ok(path);
        }
        let config = model.config.to_json(model.dir.as_ref().map(|dir| &dir.raw_config), self.info.precision);
        write_model_dir(&path, &config, &tensors, model.folder(), write)?;
        Ok(path)
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

    fn finish(mut self, ending: Ending, log: &mut EventLog) -> Result<Outcome, Failure> {
        let Ending { status, why, model, drawn } = ending;
        let mut memory = self.team.memory();
        let held_beside = self.team.held_beside();
        if let Some(evaluator) = self.evaluator.take() {
            self.evaluated_by = evaluator.result();
            memory.extend(evaluator.memory(held_beside));
        }
        let tokens = (self.batches.rows * u64::from(self.run.data.sequence)) as f64;
        let predicted = self.plan.predicted.step_seconds;
        let path = self.folder.join("result.json");
        let before = fs::read(&path).ok().and_then(|text| serde_json::from_slice::<RunResult>(&text).ok());
        let step_seconds = match before.filter(|before| before.steps == self.info.step) {
            // Nothing was left to do, and those who did it have said how long it took.
            Some(before) if self.pace.is_empty() => before.step_seconds,
            _ => {
                if self.pace.is_empty() {
                    self.pace.push(self.info.elapsed_seconds / self.info.step.max(1) as f64);
                }
                StepSeconds { median: self.pace.quantile(0.5), p95: self.pace.quantile(0.95), predicted }
            }
        };
        for (retreat, seconds) in self.retreats.iter_mut().zip(self.pace.after_turns()) {
            retreat.step_seconds = seconds;
        }
        let never = self.rehearsed.iter().filter(|asked| !asked.has_happened()).map(|asked| asked.what.to_string());
        let not_rehearsed: Vec<String> = never.collect();
        for what in not_rehearsed.iter().filter(|_| status == RunStatus::Done) {
            log.emit(Event::Warning { message: format!("{what}: never reached, so nothing was rehearsed") })?;
        }
        let median = step_seconds.median;
        let result = RunResult {
            status,
            steps: self.info.step,
            loss: LossSpan { first: self.info.first_loss, last: self.info.last_loss },
            tokens_per_second: if median > 0.0 { tokens / median } else { 0.0 },
            step_seconds,
            eval: self.last_eval.map(|(_, result)| result),
            memory,
            recipe: self.info.recipe.clone(),
            sharing: self.plan.sharing,
            team: self.team.results(),
            evaluator: self.evaluated_by,
            retreats: self.retreats,
            lost: self.lost,
            not_rehearsed,
            rested_seconds: self.cooling.seconds,
            fallback: self.resolved.fallback.clone(),
        };
        let text = serde_json::to_vec_pretty(&result).expect("plain data has a JSON form");
        atomic::write_file(&path, &text)?;
        let word = match status {
            RunStatus::Done => "done",
            RunStatus::Stopped => "stopped",
        };
        log.emit(Event::End { status: word.into(), step: self.info.step })?;
        if self.rehearsed.is_empty() {
            self.team.remember_speeds(&format!("the run in {}", self.folder.display()));
        }
        if let Some(failure) = why {
            return Err(failure);
        }
        // A tokenizer may take tens of megabytes: it is opened when the arena has been given back.
        drop(self.team);
        let samples = match self.resolved.model.tokenizer() {
            Some(tokenizer) if !drawn.is_empty() => readable(&drawn, &tokenizer)?,
            _ => Vec::new(),
        };
        Ok(Outcome { result, samples, model, folder: self.folder })
    }
}

/// Whether a run of so many steps, where that is known, has come to its last one.
fn is_last(run: &RunFile, steps: Option<u64>, info: &CheckpointInfo) -> bool {
    let hours = match run.length() {
        Some(Length::Hours(hours)) => hours * 3600.0,
        _ => f64::INFINITY,
    };
    steps.is_some_and(|steps| info.step >= steps) || info.elapsed_seconds >= hours
}

/// That a run is not to end before the step that it has done.
///
/// # Errors
/// It is.
fn is_no_shorter(run: &RunFile, info: &CheckpointInfo) -> Result<(), Failure> {
    let Some(steps) = steps_of(run, info.rows).1.filter(|&steps| steps < info.step) else { return Ok(()) };
    let key = if matches!(run.length(), Some(Length::Epochs(_))) { "train.epochs" } else { "train.steps" };
    let done = counted(info.step, "step");
    Err(Failure::input(format!("{key}: the run would end after {}, and has done {done}", counted(steps, "step")))
        .hint(format!("to end it where it is: --set train.steps={}", info.step)))
}

/// What a run has left that came to its end with this checkpoint; none where something of it is missing: steps, the result
/// of these steps, or the model, which is written before the result.
fn left_by(run: &RunFile, info: &CheckpointInfo) -> Option<Outcome> {
    let folder = PathBuf::from(&run.run.dir);
    let result: RunResult = serde_json::from_slice(&fs::read(folder.join("result.json")).ok()?).ok()?;
    let is_of_all = result.status == RunStatus::Done && result.steps == info.step;
    let model = model_folder(&folder, run);
    let done = is_of_all && is_last(run, steps_of(run, info.rows).1, info) && model.is_dir();
    done.then(|| Outcome { result, samples: Vec::new(), model: Some(model), folder })
}

/// Where what was trained lies when a run is done.
fn model_folder(folder: &Path, run: &RunFile) -> PathBuf {
    folder.join(if run.train.method == Method::Lora { "adapter" } else { "model" })
}

/// Which rows make the steps of a run on so many rows, and how many steps there are, where that is known before it ends.
fn steps_of(run: &RunFile, rows: u64) -> (Batches, Option<u64>) {
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

/// What a run that never reached a checkpoint was planned with: the same again gives the same bits.
fn planned_before(folder: &Path) -> Option<Known> {
    let plan: Plan = serde_json::from_slice(&fs::read(folder.join("plan.json")).ok()?).ok()?;
    Known::of_plan(&plan)
}

/// How a run does it, in words: another way, other last bits.
fn how(recipe: &Recipe, sharing: Option<Sharing>, team: &[Member], threads: u32) -> String {
    let way = done_by(recipe, sharing, team);
    if sharing.is_none() { format!("{way}, {}", counted(threads, "thread")) } else { way }
}

/// The recipe, or what each device of a team does, in words.
fn done_by(recipe: &Recipe, sharing: Option<Sharing>, team: &[Member]) -> String {
    let Some(sharing) = sharing else { return recipe.to_string() };
    let share = |member: &Member| match member.layers {
        Some([first, end]) if end - first == 1 => format!("layer {first}"),
        Some([first, end]) => format!("layers {first} to {}", end - 1),
        None if member.sequences == 0 => "a part of the state".to_owned(),
        None => counted(member.sequences, "sequence"),
    };
    let member = |member: &Member| format!("{} {}, {}", member.device, share(member), member.recipe);
    format!("{sharing} shared by {}", team.iter().map(member).collect::<Vec<_>>().join("; "))
}
