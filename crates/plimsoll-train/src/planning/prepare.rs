//! Preparation of a training run: opens model and data, measures charges, and plans. The devices themselves are opened
//! later.

use super::completions::{CompletionSource, decide_slots, halve_slots, open_completions};
use super::nominal::{NominalPlan, cause_of_other_plan, is_plan_for};
use super::plan::add_notes;
use super::planner::{Charges, Planner, team_of_one};
use super::previous_plan::PreviousPlan;
use super::request::{host_spec, staging_bytes};
use super::team_plan::TeamPlan;
use crate::config::{DataSource, LoraSection};
use crate::data::{self, ChatSpec, DataError, DataSpec, Dataset, RecordFormat, TrainingData};
use crate::files::{AdapterConfig, AdapterDir};
use crate::resolve::charges::process_charges;
use crate::resolve::{Model, Resolved, RunRequest, Workload, write_example};
use plimsoll_core::{Bytes, DeviceSpec, Failure, LogRequest};
use plimsoll_device::{cache, private_file, process};
use plimsoll_program::Share;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;

/// A run that is ready to open its devices.
pub struct PreparedRun {
    /// The run file with its overrides, and with the choices that planning has made. For the built-in example, it names
    /// the files that were written for the example.
    pub run: RunRequest,
    /// Model and devices. Devices that the plan uses have measured charges (bytes outside the arena).
    pub resolved: Resolved,
    /// Training data.
    pub train: TrainingData,
    /// Evaluation data; `None` if the run does not evaluate.
    pub eval: Option<Dataset>,
    /// The plan, with the assignment of each worker. It may not fit.
    pub planned: TeamPlan,
    /// Whether tokenizing the data has raised the charges of this process. A new process that finds the tokens cached
    /// would be charged less.
    process_grew: bool,
    /// Whether data were tokenized now, and a new process finds the tokens cached.
    has_tokenized: bool,
    /// The source of completions; `None` for other objectives.
    pub(crate) completions: Option<CompletionSource>,
    /// The reason why the same command may have other bits at its next start; `None` if it has the same.
    pub(crate) other_bits: Option<String>,
}

/// Load lines that this process passed before it held arenas, while data and plan were prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedLoadLines {
    /// Peak of this process so far, with the bytes by which the system may count too few.
    pub peak: Bytes,
    /// Devices whose load line the peak passed, with that load line.
    pub devices: Vec<(String, Bytes)>,
}

impl PreparedRun {
    /// Returns the number of optimizer steps of one pass over the training data.
    pub fn steps_per_epoch(&self) -> f64 {
        self.train.rows() as f64 / self.run.batch_rows() as f64 * self.run.steps_per_batch() as f64
    }

    /// Returns the logs for other programs that the run asks for.
    pub fn log_request(&self) -> LogRequest<'_> {
        LogRequest {
            folder: Path::new(&self.run.run.dir),
            tensorboard: self.run.watch.tensorboard,
            webhook: self.run.watch.webhook.as_deref(),
            steps_per_epoch: self.steps_per_epoch(),
        }
    }

    /// Returns whether a new process, which finds the tokens cached, may have a plan that this one has no memory for,
    /// or may keep a load line that this one passed.
    pub fn needs_fresh_process(&self) -> bool {
        let is_other_plan = self.run.is_deterministic() && self.other_bits.is_some();
        self.process_grew && (self.has_tokenized || !self.planned.plan.fits || is_other_plan)
            || self.has_tokenized && self.passed_load_lines().is_some()
    }

    /// Returns the load lines that this process has passed so far, of the devices of the plan that share its memory.
    /// Returns `None` if there are none, or if the system does not report the peak.
    pub fn passed_load_lines(&self) -> Option<PassedLoadLines> {
        let devices = self.planned.assignments.iter().map(|assignment| &assignment.device);
        passed_load_lines(process::peak_resident().ok()? + process::COUNTER_LAG_BYTES, devices)
    }

    /// Counts the plan as one that follows measured figures, unless the run file fixes it. The run follows the plan of an
    /// earlier start, which was made from them.
    pub(crate) fn count_as_measured(&mut self) {
        let devices: Vec<DeviceSpec> = self.resolved.devices().cloned().collect();
        if self.other_bits.is_none() && !self.run.is_deterministic() {
            self.other_bits = cause_of_other_plan(&self.run, None, &self.planned.plan, &devices);
        }
    }
}

/// Returns the load lines of `devices` in this process that are below its `peak`; `None` if there are none.
fn passed_load_lines<'a>(peak: Bytes, devices: impl Iterator<Item = &'a DeviceSpec>) -> Option<PassedLoadLines> {
    let passed = devices.filter(|device| device.in_process() && device.budget < peak);
    let devices: Vec<(String, Bytes)> = passed.map(|device| (device.name.clone(), device.budget)).collect();
    (!devices.is_empty()).then_some(PassedLoadLines { peak, devices })
}

/// Opens model and data of a run, and plans the run. `previous` is the plan of an earlier part of the run, or a stored
/// plan; it is used again if it still fits. `None` plans from scratch. The result may hold a plan that does not fit.
///
/// # Errors
/// The run file, the model or the data are invalid, or a GPU cannot be opened.
pub fn prepare(mut run: RunRequest, previous: Option<&PreviousPlan>) -> Result<PreparedRun, Failure> {
    // The peak of earlier work of this process, such as a program that calls the library, belongs to no run.
    let _ = process::reset_peak();
    write_example(&mut run)?;
    // Errors that need no rates are reported before rates are measured.
    let model = open_checked_model(&run)?;
    let mut resolved = Resolved::for_run(&run, model, Workload::Train)?;
    run.decide_precision(resolved.device.kind);
    let known = previous.filter(|previous| is_plan_for(previous, 1 + resolved.others.len()));
    decide_slots(&mut run, &resolved.model.config, resolved.devices());
    let nominal = if known.is_none() { NominalPlan::choose(&run, &resolved.model)? } else { None };
    let known = known.or(nominal.as_ref().map(|nominal| &nominal.known));
    let previous = known.or(previous);
    let threads = resolved.device.threads as usize;
    let charges_before = process_charges(run.buffered_sequences(), u64::from(run.data.sequence));
    let train = read_training_data(&run, &resolved.model, threads)??;
    let has_eval = !run.data.eval.is_empty();
    let eval = has_eval.then(|| open_dataset(&run, &resolved.model, &run.data.eval, threads)).transpose()?;
    let model = Arc::get_mut(&mut resolved.model).expect("only `resolved` holds the model before it is planned");
    model.stop_at(&train.end_tokens());
    let completions = open_completions(&run, &resolved.model, &train, eval.as_ref())?;
    let process_grew = process_charges(run.buffered_sequences(), u64::from(run.data.sequence)) > charges_before;
    let mut planned = loop {
        let planned = plan_with_open_data(&run, &mut resolved, previous, eval.as_ref().map(Dataset::rows))?;
        if planned.plan.fits || !halve_slots(&mut run) {
            break planned;
        }
    };
    let devices = planned.assignments.iter().map(|assignment| &assignment.device);
    add_notes(&mut planned.plan, devices, &run, &resolved.model);
    nominal.iter().for_each(|nominal| nominal.explain_excluded(&mut planned.plan));
    let named: Vec<DeviceSpec> = resolved.devices().cloned().collect();
    let other_bits = cause_of_other_plan(&run, known, &planned.plan, &named);
    if planned.plan.fits {
        run.decide_rungs(&planned.plan.rungs);
    }
    if let Some(adapter) = &resolved.model.adapter {
        run.lora = LoraSection { dropout: run.lora.dropout, ..adapter_section(adapter) };
    }
    let has_tokenized =
        token_cache_folder().is_some() && (train.is_new() || eval.as_ref().is_some_and(Dataset::is_new));
    Ok(PreparedRun { run, resolved, train, eval, planned, completions, process_grew, has_tokenized, other_bits })
}

/// Opens the model of a run, and checks that its weights and data files exist. Reads no more of them than the records by
/// which the format of the data is recognized.
///
/// # Errors
/// An invalid model, or a missing file.
pub(crate) fn open_checked_model(run: &RunRequest) -> Result<Model, Failure> {
    let mut model = Model::open(run)?;
    model.check_weights(run)?;
    let mut sources = run.data.training_sources();
    if !run.data.eval.is_empty() {
        sources.push(eval_source(&run.data.eval));
    }
    let uses_default = sources.is_empty() || sources.iter().any(|source| source.format.is_none());
    let mut has_text = uses_default && run.data.format.named().is_some_and(RecordFormat::needs_tokenizer);
    for DataSource { path, format, split, .. } in sources {
        let format = format.unwrap_or(run.data.format);
        let files = data::resolve_formats(data::list_files(&path, format, split)?, format)?;
        has_text |= files.iter().filter_map(|file| file.format).any(RecordFormat::needs_tokenizer);
    }
    if has_text {
        model.stop_at_document_end()?;
    }
    // The first records are no longer needed, and plans are made under the load line.
    process::trim_heap();
    Ok(model)
}

/// Plans a run whose model and data are open. If the run does not fit on its devices, the processor may take their
/// place. Stores the measured charges in `resolved`. `evaluation_rows` is the number of rows of the evaluation data;
/// `None` without evaluation data.
fn plan_with_open_data(
    run: &RunRequest,
    resolved: &mut Resolved,
    previous: Option<&PreviousPlan>,
    evaluation_rows: Option<u64>,
) -> Result<TeamPlan, Failure> {
    let model = Arc::clone(&resolved.model);
    let mut planner = Planner::new(run, &model, Charges::Measured).with_previous(previous);
    if !resolved.others.is_empty() {
        planner = planner.with_host(shared_host_budget(run, resolved)?);
    }
    let mut devices = vec![resolved.device.clone()];
    devices.extend(resolved.others.iter().cloned());
    let outcome = planner.plan_run(&mut devices, evaluation_rows)?;
    let planned = planner.assign(&devices, outcome);
    // Excluded devices may be needed later, so all devices are kept.
    resolved.device = devices.remove(0);
    resolved.others = devices;
    // The charges of a team do not apply to a processor alone.
    let previous = previous.filter(|previous| previous.team.is_empty());
    let planner = Planner { host: None, previous, ..planner };
    let Some(on_cpu) = planner.fall_back_to_cpu(resolved, &planned.plan, Workload::Train)? else { return Ok(planned) };
    let on_cpu = team_of_one(on_cpu, Share::SINGLE_DEVICE, run.batch_sequences());
    Ok(planner.assign(slice::from_ref(&resolved.device), on_cpu))
}

/// Returns the load line of the host memory that several devices share, without the staging buffers of their GPUs.
fn shared_host_budget(run: &RunRequest, resolved: &Resolved) -> Result<Bytes, Failure> {
    // The budget of the first device excludes its own staging buffers.
    Ok(host_spec(run, &resolved.device)?.budget.saturating_sub(staging_bytes(&resolved.others)))
}

/// Returns the `[lora]` section of the run file that describes existing adapters, with a dropout of 0. A run that
/// trains the adapters further cannot change their ranks, scales and targets.
fn adapter_section(adapter: &AdapterDir) -> LoraSection {
    let AdapterConfig { rank, alpha, rank_stabilized, targets, layers, rank_pattern, alpha_pattern, .. } =
        adapter.config.clone();
    // The section has no key for exceptions, so it lists the modules that remain.
    let has_exceptions = !adapter.config.excluded.is_empty() || !adapter.config.layers_pattern.is_empty();
    let (targets, layers) = if has_exceptions { (adapter.modules(), vec![]) } else { (targets, layers) };
    LoraSection {
        rank: rank as u32,
        alpha,
        rslora: rank_stabilized,
        dropout: 0.0,
        targets,
        layers,
        rank_pattern: rank_pattern.into_iter().map(|(pattern, rank)| (pattern, rank as u32)).collect(),
        alpha_pattern: alpha_pattern.into_iter().collect(),
    }
}

/// Opens the data files that match `patterns`, as rows of tokens. Tokenizes the files on `threads` threads unless their
/// tokens are cached.
///
/// # Errors
/// The files or the tokenizer are invalid.
pub fn open_dataset(run: &RunRequest, model: &Model, patterns: &[String], threads: usize) -> Result<Dataset, Failure> {
    Ok(read_dataset(run, model, patterns, threads)??)
}

/// Opens data files as [`open_dataset`] does. An error of the data is the inner one.
///
/// # Errors
/// A file beside the tokenizer that cannot be read, or no folder for the tokens.
pub fn read_dataset(
    run: &RunRequest,
    model: &Model,
    patterns: &[String],
    threads: usize,
) -> Result<Result<Dataset, DataError>, Failure> {
    read_source(run, model, &eval_source(patterns), threads)
}

/// Returns evaluation data as a source.
fn eval_source(patterns: &[String]) -> DataSource {
    DataSource { path: patterns.to_vec(), ..DataSource::default() }
}

/// Opens the training data of a run: one source after the other. Tokenizes files on `threads` threads unless their tokens
/// are cached. An error of the data of a single source is the inner one.
///
/// # Errors
/// As [`read_dataset`], and an error of the data of one of several sources, with its key.
pub fn read_training_data(
    run: &RunRequest,
    model: &Model,
    threads: usize,
) -> Result<Result<TrainingData, DataError>, Failure> {
    let sources = run.data.training_sources();
    let mut opened = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        match read_source(run, model, source, threads)? {
            Ok(dataset) => opened.push(dataset),
            Err(error) if sources.len() == 1 => return Ok(Err(error)),
            Err(error) => {
                let failure = Failure::from(error);
                let message = format!("{}: {}", run.data.source_key(index), failure.message);
                return Err(Failure { message, ..failure });
            }
        }
    }
    if opened.is_empty() {
        return Ok(Err(DataError::NoPatterns));
    }
    let weights: Option<Vec<f64>> = sources.iter().map(|source| source.weight).collect();
    Ok(Ok(TrainingData::new(opened, weights.as_deref())))
}

/// Opens the files of a source. An error of the data is the inner one.
fn read_source(
    run: &RunRequest,
    model: &Model,
    source: &DataSource,
    threads: usize,
) -> Result<Result<Dataset, DataError>, Failure> {
    let spec = DataSpec {
        patterns: source.path.clone(),
        format: source.format.unwrap_or(run.data.format),
        split: source.split,
        sequence: u64::from(run.data.sequence),
        pack: run.data.pack,
        long: run.data.long,
        vocab: model.config.vocab,
        end_token: model.document_end_token()?,
        chat: ChatSpec {
            template: run.data.template.clone(),
            train_on: run.data.train_on,
            train_on_end: run.data.train_on_end,
            not_prefix: run.data.not_prefix,
        },
        objective: run.train.objective,
    };
    let never_stop = &mut |_, _| ControlFlow::Continue(());
    let mut open = |folder: &Path| Dataset::open(&spec, model.tokenizer().as_deref(), folder, threads, never_stop);
    if let Some(folder) = token_cache_folder() {
        return Ok(open(&folder));
    }
    // The dataset keeps its files open, so their names are not needed afterwards.
    let folder = private_file::temporary_folder().map_err(|error| {
        let message = format!("cannot make a folder for tokens in {}: {error}", std::env::temp_dir().display());
        Failure::input(message).hint("set a writable folder: PLIMSOLL_CACHE=/path plimsoll ...")
    })?;
    Ok(open(folder.path()))
}

/// Returns the folder of cached tokens: `PLIMSOLL_TOKENS` if it is set, else `tokens` in the [`cache::folder`]. None if
/// there is neither; the tokens then last as long as this process.
fn token_cache_folder() -> Option<PathBuf> {
    let named = std::env::var_os("PLIMSOLL_TOKENS").filter(|path| !path.is_empty()).map(PathBuf::from);
    named.or_else(|| Some(cache::folder()?.join("tokens")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::plan;
    use crate::resolve::tests::run_request;
    use plimsoll_core::Plan;

    /// Returns a plan without the notes that are added after planning.
    fn without_notes(plan: Plan) -> Plan {
        Plan { shortfall_note: None, contention_note: None, planned_for: None, ..plan }
    }

    #[test]
    fn only_devices_of_this_process_pass_load_lines() {
        let devices = |text: &str| -> Vec<DeviceSpec> {
            let run = run_request(&["model.preset=smollm2-135m", &format!("run.devices={text}")]);
            let resolved = Resolved::new(&run, Model::open(&run).unwrap()).unwrap();
            resolved.devices().cloned().collect()
        };
        let virtual_devices = devices("virtual:a=48MiB@1.0,virtual:b=32MiB@0.5");
        let passed = |peak| passed_load_lines(Bytes::mib(peak), virtual_devices.iter());
        assert_eq!(passed(32), None);
        let small = vec![("virtual:b".to_owned(), Bytes::mib(32))];
        assert_eq!(passed(33), Some(PassedLoadLines { peak: Bytes::mib(33), devices: small }));
        assert_eq!(passed(49).unwrap().devices.len(), 2);
        let cards = devices("rtx3090=400MiB,rtx3070");
        assert_eq!(passed_load_lines(Bytes::gib(1), cards.iter()), None);
    }

    #[test]
    fn plan_and_prepare_give_same_plan() {
        for devices in [
            "rtx3090",
            "rtx3090=2GiB,host=8GiB",
            "rtx3090=700MiB",
            "rtx3070,rtx3090",
            "rtx3070=2GiB,rtx3090=2GiB,host=8GiB",
            "rtx3070,rtx3090=400MiB",
        ] {
            let run = run_request(&["model.preset=smollm2-135m", &format!("run.devices={devices}")]);
            let planned = plan(&run, false).unwrap();
            // Charges of paper devices are assumed, so both have the same.
            let mut resolved = Resolved::new(&run, Model::open(&run).unwrap()).unwrap();
            let prepared = plan_with_open_data(&run, &mut resolved, None, None).unwrap();
            let names = |devices: &[plimsoll_core::DeviceSpec]| {
                devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>()
            };
            let assigned: Vec<_> = prepared.assignments.iter().map(|part| part.device.clone()).collect();
            assert_eq!(names(&assigned), names(&planned.devices), "{devices}");
            assert_eq!(without_notes(prepared.plan), without_notes(planned.outcome.plan), "{devices}");
        }
    }
}
