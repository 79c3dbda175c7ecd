//! How a run starts: planned anew, after a stored plan or from its newest checkpoint; what its folder is given, and what is left
//! of one that was done already. The loop is `training`, what it writes down `saving`.

use crate::config::{Length, RunFile, Threads};
use crate::fault_injection::{Asked, Injection, Stage};
use crate::files::atomic;
use crate::inference::samples::Sample;
use crate::planning::prepare::{Known, Part, Prepared, prepare};
use crate::session::checkpoint::{self, Checkpoint, CheckpointInfo};
use crate::session::control::Control;
use crate::session::events::{EventLog, check_free};
use crate::session::saving::{model_folder, store_plan};
use crate::session::training::{Trainer, is_last, steps_of};
use plimsoll_core::{Event, Failure, Member, Plan, Recipe, Record, RunResult, RunStatus, Sharing, counted};
use plimsoll_device::probe::Cpu;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A run that has been planned and can start, or go on.
pub struct Run {
    pub(crate) prepared: Prepared,
    pub(crate) checkpoint: Option<Checkpoint>,
    warnings: Vec<String>,
    pub(crate) rehearsed: Vec<Arc<Asked>>,
    pub(crate) saves: bool,
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
        warnings.extend(self.prepared.run.elsewhere.missed());
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
        store_plan(&folder, &trainer.plan)?;
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
