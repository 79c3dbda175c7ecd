//! Start of a run: plans a new run, follows a stored plan, or resumes from the newest checkpoint. Then it prepares the
//! run folder and hands over to the training loop.

use crate::config::{DataSection, EXAMPLE_PREFIX, HUB_PREFIX, HubSources, Length, RunConfig, Threads};
use crate::data::TrainingData;
use crate::events::{EventLog, ensure_not_running};
use crate::fault_injection::{Injection, InjectionTargets, PendingFault};
use crate::files::atomic;
use crate::planning::device_choice::paper_device_failure;
use crate::planning::prepare::{PreparedRun, open_checked_model, prepare};
use crate::planning::previous_plan::PreviousPlan;
use crate::planning::team_plan::WorkerAssignment;
use crate::resolve::RunRequest;
use crate::resolve::example::model_is_example;
use crate::session::checkpoint::{self, Checkpoint, CheckpointInfo};
use crate::session::control::ControlSocket;
use crate::session::length::{batches_and_steps, is_finished};
use crate::session::opening::SessionRequest;
use crate::session::outcome::Outcome;
use crate::session::run_folder::{model_folder, store_plan};
use crate::session::training::Session;
use plimsoll_core::{
    Event, Failure, Parallelism, Plan, Recipe, Record, RunResult, RunStatus, WorkerPlan, format_count,
};
use plimsoll_device::probe::Cpu;
use plimsoll_device::regular_file;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A planned run. It is ready to start if its plan fits.
pub struct Run {
    prepared: PreparedRun,
    checkpoint: Option<Checkpoint>,
    warnings: Vec<String>,
    faults: Vec<Arc<PendingFault>>,
    saves: bool,
}

/// Result of [`Run::resume`].
pub enum Resumed {
    /// The run, to be started: steps remain to be done, or its result or model is missing.
    Continue(Box<Run>),
    /// Outcome of a run that was complete before: all steps are done, and result and model are written. No device is
    /// opened.
    Done(Box<Outcome>),
}

impl Run {
    /// Plans a new run.
    ///
    /// # Errors
    /// The run file, the model or the data are invalid, or the run folder already holds a run. A plan that does not fit
    /// is no error here.
    pub fn new(run: RunRequest) -> Result<Run, Failure> {
        Run::begin(run, None)
    }

    /// Plans a new run with the recipes of a stored plan, if they fit on this machine. Otherwise plans without them,
    /// and the run warns about it when it starts.
    ///
    /// # Errors
    /// As [`Run::new`].
    pub fn with_plan(run: RunRequest, plan: &Plan) -> Result<Run, Failure> {
        let mut run = Run::begin(run, PreviousPlan::from_plan(plan).as_ref())?;
        let describe = |plan: &Plan| describe_plan(&plan.recipe, plan.parallelism, &plan.team);
        let new_plan = &run.prepared.planned.plan;
        if new_plan.fits && describe(new_plan) != describe(plan) {
            run.warnings.push(format!("the stored plan does not fit here; the new plan is: {}", describe(new_plan)));
        }
        Ok(run)
    }

    /// Checks that the run folder is free, and plans a new run. `known` is a stored plan to follow; `None` plans from
    /// scratch.
    fn begin(run: RunRequest, known: Option<&PreviousPlan>) -> Result<Run, Failure> {
        check_free(Path::new(&run.run.dir))?;
        let prepared = prepare(run, known)?;
        Ok(Run { prepared, checkpoint: None, warnings: Vec::new(), faults: Vec::new(), saves: true })
    }

    /// Plans to resume a run from its newest complete checkpoint, or from step 0 if it has no checkpoint.
    ///
    /// # Errors
    /// The run file, the model or the data are invalid, or another process trains in the run folder. Also if no
    /// checkpoint is usable, the data differ from those of the checkpoint, or the run file ends the run before it.
    pub fn resume(mut run: RunRequest) -> Result<Resumed, Failure> {
        let folder = PathBuf::from(&run.run.dir);
        ensure_not_running(&folder)?;
        let (checkpoint, mut warnings) = checkpoint::newest(&folder)?;
        if let Some(Checkpoint { info, .. }) = &checkpoint {
            check_not_shorter(&run, info)?;
        }
        if let Some(outcome) = checkpoint.as_ref().and_then(|checkpoint| completed_outcome(&run, &checkpoint.info)) {
            return Ok(Resumed::Done(Box::new(outcome)));
        }
        if let Some(Checkpoint { info, path, .. }) = &checkpoint {
            for warning in &mut warnings {
                *warning += &format!("; the run resumes from {}", path.display());
            }
            // Use as many threads as before if this machine has them, so that results stay bit-identical.
            let threads = |requested| Cpu::read().threads_for(requested).ok();
            if run.run.threads == Threads::Auto && threads(None) != threads(Some(info.threads)) {
                run.run.threads = threads(Some(info.threads)).map_or(Threads::Auto, Threads::Count);
            }
        }
        let known = match &checkpoint {
            Some(Checkpoint { info, .. }) => Some(PreviousPlan::from_checkpoint(info)),
            None => plan_before(&folder),
        };
        let mut prepared = prepare(run, known.as_ref())?;
        if checkpoint.is_none() {
            prepared.count_as_measured();
            warnings.push("the run has no checkpoint yet, so it begins at step 1".to_owned());
        }
        if let Some(checkpoint) = &checkpoint {
            check_same_data(&prepared.run.data, &prepared.train, checkpoint)?;
            let (info, plan) = (&checkpoint.info, &prepared.planned.plan);
            let now = describe_execution(
                &plan.recipe,
                plan.parallelism,
                &plan.team,
                prepared.planned.assignments[0].device.threads,
            );
            let before = describe_execution(&info.recipe, info.parallelism, &info.team, info.threads);
            if now != before {
                warnings.push(format!(
                    "the plan changed ({now}; the checkpoint used {before}): results may differ in the last bits from an \
                     uninterrupted run"
                ));
            }
        }
        let run = Run { prepared, checkpoint, warnings, faults: Vec::new(), saves: true };
        Ok(Resumed::Continue(Box::new(run)))
    }

    /// Asks for faults during the run: out-of-memory errors, slow, lost or silent devices. Does nothing if the plan
    /// does not fit.
    ///
    /// # Errors
    /// A fault cannot occur in this run, such as one of an unknown device or of a step after the last.
    pub fn inject_faults(&mut self, injections: Vec<Injection>) -> Result<(), Failure> {
        let PreparedRun { run, train, planned, .. } = &self.prepared;
        if !planned.plan.fits {
            // The run is refused anyway.
            return Ok(());
        }
        let targets = InjectionTargets {
            workers: planned.assignments.iter().map(WorkerAssignment::fault_target).collect(),
            evaluator: planned.evaluator.as_ref().map(WorkerAssignment::fault_target),
            excluded: &planned.plan.excluded,
            steps_done: self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.info.step),
            steps: batches_and_steps(run, train.rows()).1,
        };
        injections.iter().try_for_each(|injection| injection.check(&targets))?;
        self.faults = injections.into_iter().map(PendingFault::new).collect();
        Ok(())
    }

    /// Switches off all checkpoints and the model, for a run that is only measured.
    pub fn save_nothing(&mut self) {
        self.saves = false;
    }

    /// Returns the plan of the run, with its run file, model and data.
    pub fn prepared(&self) -> &PreparedRun {
        &self.prepared
    }

    /// Runs to the end, or until `stop` becomes true. When `stop` becomes true, finishes and saves the step in
    /// progress. `observer` receives each event. A device that never responds again keeps its thread until the process
    /// ends.
    ///
    /// # Errors
    /// Invalid weights, file errors, a loss that is not finite, or device failures after which no plan fits. Saved
    /// checkpoints stay. A new run whose devices cannot be opened, or whose weights are invalid, leaves nothing in the
    /// folder that would block another run.
    ///
    /// # Panics
    /// If the plan does not fit; the caller checks that first.
    pub fn start(self, observer: &mut dyn FnMut(&Record), stop: &AtomicBool) -> Result<Outcome, Failure> {
        assert!(self.prepared.planned.plan.fits, "a plan that does not fit is not started");
        let folder = PathBuf::from(&self.prepared.run.run.dir);
        create_run_folder(&folder)?;
        let mut log = EventLog::open(&folder, observer)?;
        if let Some(Checkpoint { info, .. }) = &self.checkpoint {
            checkpoint::remove_leftovers(&folder, info.step)?;
        }
        let mut warnings = self.warnings.clone();
        warnings.extend(self.prepared.run.budget_override_notes());
        warnings.extend(self.prepared.run.unsaved_base_warning().filter(|_| self.saves));
        warnings.extend(self.prepared.run.unused_budget_note());
        warnings.extend(self.prepared.run.remote.missing_notes());
        warnings.extend(self.prepared.resolved.model.other_parts_note());
        warnings.extend(self.prepared.resolved.fallback.as_ref().map(ToString::to_string));
        let control = ControlSocket::listen(&folder)
            .map_err(|error| {
                let folder = folder.display();
                warnings.push(format!("{folder}: the load line cannot be changed during the run: {error}"));
            })
            .ok();
        let Run { prepared, checkpoint, faults, saves, .. } = self;
        let request = SessionRequest { folder: folder.clone(), prepared, checkpoint, faults, saves, control };
        let (mut session, stopped) = Session::open(request, &mut log)?;
        if session.info.step == 0 {
            atomic::write_file(&folder.join("run.toml"), session.context.run.to_toml().as_bytes())?;
        } else {
            store_length(&folder, &session.context.run)?;
        }
        session.context.run.save_budget_overrides(&folder)?;
        store_plan(&folder, &session.plan)?;
        for message in warnings {
            log.emit(Event::Warning { message })?;
        }
        let ending = match stopped {
            Some(failure) => Ok(session.stop(failure, false, &mut log)),
            None => session.run(&mut log, stop),
        };
        let outcome = ending.and_then(|ending| session.finish(ending, &mut log));
        outcome.map_err(|failure| failure.hint(format!("then resume: plimsoll train --resume {}", folder.display())))
    }
}

/// Checks that the training data are those of the checkpoint. `section` names them in the run file.
///
/// # Errors
/// The data have another number of rows or labels, or other contents.
fn check_same_data(section: &DataSection, train: &TrainingData, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let Checkpoint { info, path, .. } = checkpoint;
    let (key, differing, hint) = match section.source.is_empty() {
        true => ("data.train", "tokens or labels", "restore the original files; other data need a new run"),
        false => (
            "data.source",
            "tokens, labels, weights or the order of sources",
            "restore the original files and sources; other data need a new run",
        ),
    };
    let (rows, labelled_tokens) = (train.rows(), train.labelled_tokens());
    if (rows, labelled_tokens) != (info.rows, info.labelled_tokens) {
        let message = format!(
            "{key}: {} with {} differ from the data of {}, which had {} and {}",
            format_count(rows, "row"),
            format_count(labelled_tokens, "label"),
            path.display(),
            info.rows,
            info.labelled_tokens
        );
        return Err(Failure::input(message).hint(hint));
    }
    if train.content_sha256() != info.data {
        let message = format!("{key}: {differing} differ from those of {}", path.display());
        return Err(Failure::input(message).hint(hint));
    }
    Ok(())
}

/// Writes the present length of the run (steps, epochs or hours) to its `run.toml`, so that the next `--resume` uses
/// it.
fn store_length(folder: &Path, run: &RunConfig) -> Result<(), Failure> {
    let path = folder.join("run.toml");
    let mut stored = RunConfig::load(Some(&path), &[])?;
    if stored.length() != run.length() {
        let train = &mut stored.train;
        (train.steps, train.epochs, train.hours) = (run.train.steps, run.train.epochs, run.train.hours);
        atomic::write_file(&path, stored.to_toml().as_bytes())?;
    }
    Ok(())
}

/// Checks a new run without planning it: the run file sets data and a length, weights and data files exist, the run folder
/// is free, and no device is on paper. Returns one failure for each check that fails. Writes nothing.
pub fn check_new_run(run: &RunRequest) -> Vec<Failure> {
    // The files of the built-in example exist once its run has started.
    let names_example = model_is_example(run) || run.data.training_paths().any(|path| path.starts_with(EXAMPLE_PREFIX));
    // Files of the hub are downloaded when the run starts.
    let is_on_hub = |path: &String| path.starts_with(HUB_PREFIX);
    let on_hub = run.hub != HubSources::default() || run.data.training_paths().chain(&run.data.eval).any(is_on_hub);
    let inputs = if names_example || on_hub { Ok(()) } else { open_checked_model(run).map(drop) };
    let on_paper = run.devices().devices.into_iter().find(|device| device.is_paper());
    let checks = [run.check_trainable().map_err(Failure::from), inputs, check_free(Path::new(&run.run.dir))];
    let failures = checks.into_iter().filter_map(Result::err);
    failures.chain(on_paper.map(|device| paper_device_failure(&device.name()))).collect()
}

/// Checks that no run is under way in a folder, and that it holds no results of a run.
fn check_free(folder: &Path) -> Result<(), Failure> {
    ensure_not_running(folder)?;
    if holds_results(folder) {
        let message = format!("run.dir: folder {} already holds a run", folder.display());
        return Err(Failure::input(message)
            .hint(format!("resume it: plimsoll train --resume {}", folder.display()))
            .hint("or use another folder: --set run.dir=runs/another"));
    }
    Ok(())
}

/// Whether a folder holds results of a run, which a new run must not replace. A run that ended in its first step has
/// none.
fn holds_results(folder: &Path) -> bool {
    let path = folder.join("result.json");
    let result = || regular_file::read(&path).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    ["checkpoints", "model", "adapter"].iter().any(|name| folder.join(name).exists())
        || path.exists() && result().is_none_or(|result| result["steps"] != 0)
}

fn create_run_folder(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(|e| {
        Failure::input(format!("run.dir: {}: {e}", folder.display())).hint("name a folder that can be written")
    })
}

/// Checks that the run does not end before the steps that it has done.
///
/// # Errors
/// The run file now ends the run earlier.
fn check_not_shorter(run: &RunConfig, info: &CheckpointInfo) -> Result<(), Failure> {
    let Some(steps) = batches_and_steps(run, info.rows).1.filter(|&steps| steps < info.step) else { return Ok(()) };
    let key = if matches!(run.length(), Some(Length::Epochs(_))) { "train.epochs" } else { "train.steps" };
    let done = format_count(info.step, "step");
    Err(Failure::input(format!("{key}: the run would end after {}, but {done} are done", format_count(steps, "step")))
        .hint(format!("to end it now: --set train.steps={}", info.step)))
}

/// Returns the outcome of a run that finished with the checkpoint that `info` describes. Returns `None` if steps remain
/// to be done, or if the result or the model is missing.
fn completed_outcome(run: &RunConfig, info: &CheckpointInfo) -> Option<Outcome> {
    let folder = PathBuf::from(&run.run.dir);
    let result: RunResult = serde_json::from_slice(&regular_file::read(&folder.join("result.json")).ok()?).ok()?;
    let is_of_all = result.status == RunStatus::Done && result.steps == info.step;
    let model = model_folder(&folder, run);
    let done = is_of_all && is_finished(run, batches_and_steps(run, info.rows).1, info) && model.is_dir();
    done.then(|| Outcome { result, samples: Vec::new(), model: Some(model), folder })
}

/// Returns the stored plan of a run that has no checkpoint; `None` without a readable `plan.json` that names devices.
/// If the run starts again with this plan, it gets the same results bit for bit.
fn plan_before(folder: &Path) -> Option<PreviousPlan> {
    let plan: Plan = serde_json::from_slice(&regular_file::read(&folder.join("plan.json")).ok()?).ok()?;
    PreviousPlan::from_plan(&plan)
}

/// Describes how a run computes: its plan, and on one device the number of threads. Two runs of the same run file with
/// equal descriptions have bit-identical results.
fn describe_execution(recipe: &Recipe, parallelism: Option<Parallelism>, team: &[WorkerPlan], threads: u32) -> String {
    let plan = describe_plan(recipe, parallelism, team);
    if parallelism.is_none() { format!("{plan}, {}", format_count(threads, "thread")) } else { plan }
}

/// Describes a plan in words: on one device its recipe, for a team the parallelism with the share and recipe of each
/// worker.
fn describe_plan(recipe: &Recipe, parallelism: Option<Parallelism>, team: &[WorkerPlan]) -> String {
    let Some(parallelism) = parallelism else { return recipe.to_string() };
    let worker = |plan: &WorkerPlan| format!("{} {}, {}", plan.device, describe_share(plan), plan.recipe);
    format!("{parallelism} on {}", team.iter().map(worker).collect::<Vec<_>>().join("; "))
}

/// Describes which layers or how many sequences a worker computes, or that it only stores a part of the state.
fn describe_share(plan: &WorkerPlan) -> String {
    match plan.layers {
        Some([first, end]) if end - first == 1 => format!("layer {first}"),
        Some([first, end]) => format!("layers {first} to {}", end - 1),
        None if plan.sequences == 0 => "part of the state only".to_owned(),
        None => format_count(plan.sequences, "sequence"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_without_finished_step_takes_a_new_run() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        ["run.toml", "plan.json", "events.jsonl"].into_iter().for_each(|name| write(name, ""));
        assert!(!holds_results(folder.path()));
        write("result.json", r#"{"status": "stopped", "steps": 0}"#);
        assert!(!holds_results(folder.path()));
        write("result.json", r#"{"status": "stopped", "steps": 1}"#);
        assert!(holds_results(folder.path()));
        write("result.json", "of another version");
        assert!(holds_results(folder.path()), "what cannot be read is not replaced");
        fs::remove_file(folder.path().join("result.json")).unwrap();
        fs::create_dir(folder.path().join("checkpoints")).unwrap();
        assert!(holds_results(folder.path()));
    }
}
