//! What a run writes into its folder while it is under way and when it ends: the plan, checkpoints, the model, the result, and
//! in words what it could go on from. When that is done is for `training` to say; what is in a checkpoint is `checkpoint`'s.

use crate::config::{Method, RunFile};
use crate::files::{WeightWriter, atomic, write_adapter_dir, write_model_dir};
use crate::inference::samples::readable;
use crate::resolve::lora;
use crate::session::checkpoint;
use crate::session::events::EventLog;
use crate::session::spaces::Storing;
use crate::session::start::Outcome;
use crate::session::training::{Ending, Trainer};
use crate::session::trouble::{Halt, Trouble};
use plimsoll_core::{Event, Failure, LossSpan, Plan, RunResult, RunStatus, StepSeconds};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

impl Trainer {
    /// The plan as it is by now: on disk, and for the next checkpoint.
    pub(crate) fn write_plan(&mut self) -> Result<(), Failure> {
        if self.team.len() == 0 {
            // Who is to follow it is not there yet.
            return Ok(());
        }
        let Plan { of, disturbed, left_out, .. } = self.plan.clone();
        self.plan = Plan { of, disturbed, left_out, ..self.team.plan(&self.plan) };
        let charges = self.team.first().device.charges;
        self.info.goes_by(&self.plan, charges);
        store_plan(&self.folder, &self.plan)
    }

    /// What a run that stops now can go on from, in words.
    pub(crate) fn standing(&self) -> String {
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

    pub(crate) fn save(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        if self.has_saved() {
            return Ok(());
        }
        let start = Instant::now();
        self.insist(log, Trainer::write_checkpoint)?;
        Ok(self.saved(start, log)?)
    }

    /// Saves where devices let it be done in so many tries: else the checkpoint before stands.
    pub(crate) fn save_if_possible(&mut self, tries: u32, log: &mut EventLog) -> Result<(), Failure> {
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
    pub(crate) fn save_what_others_hold(&mut self, log: &mut EventLog) -> Result<(), Failure> {
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
    pub(crate) fn write_model(&mut self) -> Result<PathBuf, Trouble> {
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

    pub(crate) fn finish(mut self, ending: Ending, log: &mut EventLog) -> Result<Outcome, Failure> {
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
        let (step_seconds, tokens_per_second) = match before.filter(|before| before.steps == self.info.step) {
            // Nothing was left to do, and those who did it have said how long it took.
            Some(before) if self.pace.is_empty() => (before.step_seconds, before.tokens_per_second),
            _ => {
                if self.pace.is_empty() {
                    self.pace.push(self.info.elapsed_seconds / self.info.step.max(1) as f64);
                }
                let seconds = StepSeconds { median: self.pace.quantile(0.5), p95: self.pace.quantile(0.95), predicted };
                (seconds, tokens * self.pace.steps_per_second().unwrap_or(0.0))
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
        let result = RunResult {
            status,
            steps: self.info.step,
            loss: LossSpan { first: self.info.first_loss, last: self.info.last_loss },
            tokens_per_second,
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

/// The plan that a run follows by now, for whoever reads or resumes it.
///
/// # Errors
/// It cannot be written.
pub(crate) fn store_plan(folder: &Path, plan: &Plan) -> Result<(), Failure> {
    let text = serde_json::to_vec_pretty(plan).expect("plain data has a JSON form");
    Ok(atomic::write_file(&folder.join("plan.json"), &text)?)
}

/// Where what was trained lies when a run is done.
pub(crate) fn model_folder(folder: &Path, run: &RunFile) -> PathBuf {
    folder.join(if run.train.method == Method::Lora { "adapter" } else { "model" })
}
