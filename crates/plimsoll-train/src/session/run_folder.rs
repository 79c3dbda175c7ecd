//! Files of a run in its folder: plan, checkpoints, model and result. The training loop decides when they are written;
//! their formats are in `checkpoint` and `files`.

use crate::config::{Method, RunConfig};
use crate::data::template::read_template;
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::TensorWriter;
use crate::events::EventLog;
use crate::files::{BaseModel, MAX_SHARD_BYTES, SideFiles, WeightWriter, atomic, write_adapter_dir, write_model_dir};
use crate::inference::samples::decode_samples;
use crate::objective::Rounds;
use crate::session::checkpoint;
use crate::session::interrupt::StepInterrupt;
use crate::session::outcome::Outcome;
use crate::session::training::{Ending, Session};
use plimsoll_core::{
    Bytes, DeviceMemory, Event, Failure, LossSpan, Plan, RunResult, RunStatus, StepSeconds, format_count,
};
use plimsoll_device::regular_file;
use plimsoll_program::ProgramKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

impl Session {
    /// Replaces the run's plan by the one that its open devices follow, writes it to `plan.json`, and stores it with
    /// the next checkpoint. Does nothing if no device is open.
    pub(crate) fn store_current_plan(&mut self) -> Result<(), Failure> {
        if self.team.len() == 0 {
            // The devices are not open yet.
            return Ok(());
        }
        let Plan { planned_for, contention_note, excluded, .. } = self.plan.clone();
        self.plan = Plan { planned_for, contention_note, excluded, ..self.team.plan(&self.plan) };
        let charges = self.team.first().device.charges;
        self.info.set_plan(&self.plan, charges);
        store_plan(&self.context.folder, &self.plan)
    }

    /// Describes from which step a run that stops now can resume, and how many steps are lost.
    pub(crate) fn resume_hint(&self) -> String {
        let newest = self.checkpoints.newest_step;
        match self.info.step - newest {
            _ if !self.checkpoints.enabled => "saving is off: the run would start from step 0".to_owned(),
            _ if newest == 0 => {
                "there is no checkpoint yet (train.save_every, train.save_every_minutes): the run would \
                                 start from step 0"
                    .to_owned()
            }
            0 => format!("the newest checkpoint is of step {newest}: no step is lost"),
            lost => format!(
                "the newest checkpoint is of step {newest}: {} after it will be repeated",
                format_count(lost, "step")
            ),
        }
    }

    /// Writes the checkpoint of the last finished step, unless it exists or saving is off. Recovers from device
    /// failures.
    pub(crate) fn save(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        if self.is_saved() {
            return Ok(());
        }
        let start = Instant::now();
        self.run_with_recovery(log, Session::write_checkpoint)?;
        Ok(self.record_checkpoint(start, log)?)
    }

    /// Tries up to `tries` times to save the last finished step. If the devices fail each time, the previous checkpoint
    /// stays the newest one, which is no error.
    pub(crate) fn save_if_possible(&mut self, tries: u32, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        for _ in 0..tries {
            if self.is_saved() {
                break;
            }
            match self.write_checkpoint() {
                Ok(()) => self.record_checkpoint(start, log)?,
                Err(DeviceFailure::Fatal(failure)) => return Err(failure),
                Err(DeviceFailure::OutOfMemory { .. } | DeviceFailure::Lost { .. } | DeviceFailure::PeerAborted(_)) => {
                }
            }
        }
        Ok(())
    }

    /// Tries once to save if a device was lost since the last finished step and all remaining workers are remote. The
    /// cause of the loss, such as the end of a cluster's head node, may soon end the other workers and lose the
    /// weights.
    pub(crate) fn save_if_all_workers_remote(&mut self, log: &mut EventLog) -> Result<(), Failure> {
        let lost = std::mem::take(&mut self.recovery.lost_since_step);
        match lost && self.team.workers().iter().all(|worker| worker.device.remote_host().is_some()) {
            true => self.save_if_possible(1, log),
            false => Ok(()),
        }
    }

    /// Whether the last finished step needs no checkpoint: saving is off, no step is finished, or its checkpoint
    /// exists.
    fn is_saved(&self) -> bool {
        let step = self.info.step;
        !self.checkpoints.enabled
            || step == 0
            || self.checkpoints.newest_step == step && self.checkpoint_path().exists()
    }

    /// Returns the folder for the checkpoint of the last finished step. The folder may not exist yet.
    fn checkpoint_path(&self) -> PathBuf {
        self.context.folder.join("checkpoints").join(format!("step-{}", self.info.step))
    }

    /// Writes the checkpoint of the last finished step.
    fn write_checkpoint(&mut self) -> Result<(), DeviceFailure> {
        checkpoint::write(&self.context.folder, &self.info, &mut self.team, self.context.run.train.keep)?;
        Ok(())
    }

    /// Records and logs a checkpoint that has been written. Writing it began at `start`.
    fn record_checkpoint(&mut self, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        self.checkpoints.set_newest(self.info.step);
        let seconds = start.elapsed().as_secs_f64();
        self.checkpoints.write_seconds = Some(seconds);
        let (step, path) = (self.info.step, self.checkpoint_path().display().to_string());
        log.emit(Event::Checkpoint { step, path, seconds })
    }

    /// Writes the trained model atomically: as a Hugging Face directory, or for a LoRA run its adapters as a PEFT
    /// directory. Returns the directory.
    pub(crate) fn write_model(&mut self) -> Result<PathBuf, DeviceFailure> {
        let (model, team) = (&self.context.resolved.model, &mut self.team);
        let tensors = team.file_tensors(ProgramKind::Save);
        // A file that was removed during the run does not cost the model.
        let template = self.context.run.data.template.as_deref().and_then(|setting| read_template(setting).ok());
        let write = |writer: &mut WeightWriter| team.write_files(ProgramKind::Save, &mut TensorWriter(writer));
        let path = model_folder(&self.context.folder, &self.context.run);
        if self.context.run.train.method == Method::Lora {
            let (hub, folder) = (&self.context.run.hub, model.weights(&self.context.run).and_then(|_| model.folder()));
            // PEFT knows models of the hub by their names.
            let named = self.context.run.model.path.as_deref();
            let base = folder.map(|folder| match hub.base_model() {
                Some(name) => BaseModel { name: Path::new(name), revision: hub.base_commit() },
                // The folder of a GGUF file is in the cache.
                None => BaseModel { name: named.map_or(folder, Path::new), revision: None },
            });
            let config = model.adapter_config(&self.context.run);
            let has_base_end_tokens = model.dir.as_ref().is_none_or(|dir| dir.config.eos == model.config.eos);
            let trained = (!has_base_end_tokens).then_some(&model.config);
            write_adapter_dir(&path, &config, base, trained, template.as_deref(), &tensors, write)?;
            return Ok(path);
        }
        let config = model.config.to_json(model.dir.as_ref().map(|dir| &dir.raw_config), self.info.precision);
        let side_files = SideFiles { from: model.folder(), template: template.as_deref() };
        write_model_dir(&path, &model.config, &config, &tensors, MAX_SHARD_BYTES, side_files, write)?;
        Ok(path)
    }

    /// Stores the measured speed of slow devices for later plans, unless faults were injected.
    fn store_measured_speeds(&self) {
        if self.faults.is_empty() {
            let run = format!("the run in {}", self.context.folder.display());
            self.team.store_measured_speeds(&run, self.context.contention());
        }
    }

    /// Ends the run: writes `result.json`, closes the devices and returns the outcome.
    ///
    /// # Errors
    /// The file cannot be written, or the run was stopped by a failure, which is then returned.
    pub(crate) fn finish(mut self, ending: Ending, log: &mut EventLog) -> Result<Outcome, Failure> {
        let Ending { status, failure: stop_reason, model, drawn } = ending;
        let mut memory = self.team.memory();
        for (memory, worker) in memory.iter_mut().zip(self.team.workers()) {
            let before = if worker.device.in_process() { self.context.peak_before } else { Bytes::ZERO };
            memory.compare_with_load_line(before);
        }
        let external_peak_bytes = self.team.external_peak_bytes();
        if let Some(evaluator) = self.evaluator.take() {
            self.evaluator_result = evaluator.result();
            let of_evaluator = evaluator.memory(external_peak_bytes).map(|mut memory| {
                memory.compare_with_load_line(Bytes::ZERO);
                memory
            });
            memory.extend(of_evaluator);
        }
        for message in memory.iter().filter_map(DeviceMemory::over_load_line_note) {
            log.emit(Event::Warning { message })?;
        }
        let tokenizer = self.context.resolved.model.tokenizer().filter(|_| !drawn.is_empty());
        let has_room = tokenizer.as_ref().is_none_or(|file| self.has_room_for_tokenizer(file, external_peak_bytes));
        if !has_room {
            let message = "no samples are shown: the tokenizer needs more memory than the load line leaves".to_owned();
            log.emit(Event::Warning { message })?;
        }
        if self.context.run.is_deterministic() && !self.info.other_bits.is_empty() {
            let message = format!("the same command may give other bits: {}", self.info.other_bits.join("; "));
            log.emit(Event::Warning { message })?;
        }
        self.store_measured_speeds();
        let path = self.context.folder.join("result.json");
        let (step_seconds, tokens_per_second) = self.measured_speed(&path);
        for (recovery, seconds) in self.recovery.recoveries.iter_mut().zip(self.step_times.medians_after_plan_changes())
        {
            recovery.step_seconds = seconds;
        }
        let pending = self.faults.iter().filter(|fault| !fault.has_triggered());
        let faults_not_triggered: Vec<String> = pending.map(|fault| fault.injection.to_string()).collect();
        for fault in faults_not_triggered.iter().filter(|_| status == RunStatus::Done) {
            log.emit(Event::Warning { message: format!("{fault}: not reached, so the fault did not occur") })?;
        }
        let result = RunResult {
            status,
            steps: self.info.step,
            loss: LossSpan { first: self.info.first_loss, last: self.info.last_loss },
            unlabelled_steps: Some(self.info.unlabelled_steps).filter(|&steps| steps > 0),
            tokens_per_second,
            step_seconds,
            eval: self.last_eval.map(|(_, result)| result),
            rounds: self.rounds.take().map_or_else(Vec::new, Rounds::into_figures),
            memory,
            recipe: self.info.recipe.clone(),
            parallelism: self.plan.parallelism,
            team: self.team.worker_results(),
            evaluator: self.evaluator_result,
            recoveries: self.recovery.recoveries,
            lost: self.recovery.lost,
            faults_not_triggered,
            thermal_pause_seconds: self.thermal.seconds,
            fallback: self.context.resolved.fallback.clone(),
            reproducible: self.info.other_bits.is_empty(),
            reproducible_because: reasons_for(&self.info.other_bits),
        };
        let text = serde_json::to_vec_pretty(&result).expect("plain data has a JSON form");
        atomic::write_file(&path, &text)?;
        let word = match status {
            RunStatus::Done => "done",
            RunStatus::Stopped => "stopped",
        };
        log.emit(Event::End { status: word.into(), step: self.info.step })?;
        if let Some(failure) = stop_reason {
            return Err(failure);
        }
        // A tokenizer may take tens of megabytes: load it after the arena is freed.
        drop(self.team);
        let tokenizer = tokenizer.filter(|_| has_room);
        let samples = tokenizer.map_or(Ok(Vec::new()), |tokenizer| decode_samples(&drawn, &tokenizer))?;
        Ok(Outcome { result, samples, model, folder: self.context.folder })
    }
}

impl Session {
    /// Whether the tokenizer in `file` fits under the load lines of the devices in this process once their arenas are
    /// freed. `held` are the bytes of this process beside the arenas. While a tokenizer is read, it takes about 16
    /// times the bytes of its file.
    fn has_room_for_tokenizer(&self, file: &Path, held: Option<Bytes>) -> bool {
        const BYTES_PER_FILE_BYTE: u64 = 20;
        let file_bytes = file.metadata().map_or(0, |file| file.len());
        let needed = held.unwrap_or_default() + Bytes(file_bytes * BYTES_PER_FILE_BYTE);
        let own = self.team.workers().iter().filter(|worker| worker.device.in_process());
        own.map(|worker| worker.line.bytes).all(|line| needed <= line)
    }

    /// Returns the step times and tokens per second of the run. If this process has done no step, takes them from an
    /// earlier result in the file `path` that ended at the same step. Without such a result, computes them from the
    /// training time that the checkpoint records.
    fn measured_speed(&mut self, path: &Path) -> (StepSeconds, f64) {
        let tokens = self.context.run.train.batch_tokens as f64;
        let earlier = regular_file::read(path).ok().and_then(|text| serde_json::from_slice::<RunResult>(&text).ok());
        if let Some(earlier) = earlier.filter(|earlier| earlier.steps == self.info.step && self.step_times.is_empty()) {
            return (earlier.step_seconds, earlier.tokens_per_second);
        }
        if self.step_times.is_empty() {
            self.step_times.push(self.info.elapsed_seconds / self.info.step.max(1) as f64);
        }
        let times = &self.step_times;
        let predicted = self.plan.predicted.step_seconds;
        let seconds = StepSeconds { median: times.quantile(0.5), p95: times.quantile(0.95), predicted };
        (seconds, tokens * times.steps_per_second().unwrap_or(0.0))
    }
}

/// Returns why a run is reproducible, if there are no reasons for `other_bits`; else those reasons.
fn reasons_for(other_bits: &[String]) -> Vec<String> {
    match other_bits {
        [] => vec!["shares, micro-batches and algorithms do not depend on measurements, and stayed".to_owned()],
        reasons => reasons.to_vec(),
    }
}

/// Writes the plan that a run follows to `plan.json`, for users and for resuming.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn store_plan(folder: &Path, plan: &Plan) -> Result<(), Failure> {
    let text = serde_json::to_vec_pretty(plan).expect("plain data has a JSON form");
    Ok(atomic::write_file(&folder.join("plan.json"), &text)?)
}

/// Returns the folder of the trained model: `adapter` for a LoRA run, else `model`.
pub(crate) fn model_folder(folder: &Path, run: &RunConfig) -> PathBuf {
    folder.join(if run.train.method == Method::Lora { "adapter" } else { "model" })
}
