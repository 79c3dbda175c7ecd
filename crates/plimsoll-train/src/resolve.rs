//! What a run file means on this machine: which model, which device under which load line, and the
//! question that this puts to the planner. Nothing is run and no weight is read.

use crate::data::sums;
use crate::files::{AdapterDir, ModelDir, ModelWeights, read_config};
use crate::run::far;
use crate::run::prepare::{charge_team, charges, one_of, programs_bytes, rounded, with_programs};
use crate::run_file::{EXAMPLE_PREFIX, FallbackTo, Init, Length, Method, Optimizer, RunFile, TeamOf};
use plimsoll_core::{
    Budget, Bytes, DeviceKind, DeviceSpec, Failure, Fallback, FileSpec, HostSpec, Link, NcclSpec, Plan, PlanOf, Rates,
    Rung, Sharing, counted,
};
use plimsoll_device::calibration::{self, Short, Shortfall};
use plimsoll_device::cuda;
use plimsoll_device::cuda::gpus::{Card, Here};
use plimsoll_device::device::DeviceError;
use plimsoll_device::disk;
use plimsoll_device::probe::{Cpu, Memory, auto_pace};
use plimsoll_device::process;
use plimsoll_plan::paper;
use plimsoll_plan::request::{DeviceRequest, DevicesRequest, LinkRequest};
use plimsoll_plan::search::{Answer, Lossy, Pins, Question, ladder, search, under};
use plimsoll_plan::team::{
    Evaluations, Only, TeamAnswer, TeamQuestion, alternatives, ladders, say_what_would_use, share_out,
};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{self, Base, Generation, Lora, Source};
use plimsoll_program::models::{ModelConfig, Target, closest_preset, preset, preset_names, supported};
use plimsoll_program::workspace::Kernels;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model that a run file names.
#[derive(Debug)]
pub struct Model {
    /// What it is.
    pub config: ModelConfig,
    /// Its directory; none for a preset, a `config.json` alone, or an example that is not written yet.
    pub dir: Option<ModelDir>,
    /// Adapters that there are already.
    pub adapter: Option<AdapterDir>,
}

impl Model {
    /// Opens what `[model]` names.
    ///
    /// # Errors
    /// No such model, or one that Plimsoll cannot compute.
    pub fn open(file: &RunFile) -> Result<Model, Failure> {
        let model = Model::without_adapter(file)?;
        let path = file.model.adapter.as_deref().map(Path::new);
        let adapter = path.map(|path| AdapterDir::open(path, &model.config)).transpose()?;
        Ok(Model { adapter, ..model })
    }

    /// Whether it takes sequences as long as the run file has them.
    ///
    /// # Errors
    /// It does not.
    fn takes(&self, file: &RunFile) -> Result<(), Failure> {
        let (sequence, most) = (u64::from(file.data.sequence), self.config.max_positions);
        if sequence > most {
            let message = format!("data.sequence is {sequence}, but {} takes no more than {most}", file.model_name());
            return Err(Failure::input(message).hint(format!("set data.sequence to {most} or less")));
        }
        Ok(())
    }

    fn without_adapter(file: &RunFile) -> Result<Model, Failure> {
        let of = |config, dir| Model { config, dir, adapter: None };
        if let Some(name) = &file.model.preset {
            let config = preset(name).ok_or_else(|| unknown_preset(name))?;
            return Ok(of(config, None));
        }
        if model_is_example(file) {
            return Ok(of(sums::model_config(), None));
        }
        let path = Path::new(file.model.path.as_deref().unwrap_or_default());
        if path.is_file() {
            let (config, _) = read_config(path, &file.model.ignore_config_keys)?;
            return Ok(of(config, None));
        }
        let dir = ModelDir::open(path, &file.model.ignore_config_keys)?;
        Ok(of(dir.config.clone(), Some(dir)))
    }

    /// The model's directory, where it has one.
    pub fn folder(&self) -> Option<&Path> {
        self.dir.as_ref().map(|dir| &*dir.path)
    }

    /// `tokenizer.json`, where there is one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        self.dir.as_ref().and_then(|dir| dir.tokenizer_path.clone())
    }

    /// That a run which begins with trained weights has them.
    ///
    /// # Errors
    /// There are none.
    pub fn check_weights(&self, file: &RunFile) -> Result<(), Failure> {
        if file.model.init == Init::Random {
            return Ok(());
        }
        match &self.dir {
            Some(dir) => dir.need_weights().map(|_| ()).map_err(|error| self.beside_adapter(error.into())),
            None => Err(Failure::input(format!("model.path: {} is no directory with weights", file.model_name()))
                .hint("name a directory with *.safetensors")
                .hint("or start from random weights: --set model.init=random")),
        }
    }

    /// A failure with what the adapters have to do with it, where there are some.
    fn beside_adapter(&self, failure: Failure) -> Failure {
        self.adapter.as_ref().and_then(AdapterDir::of_nothing).into_iter().fold(failure, Failure::hint)
    }

    /// The weights that a run begins with; none where they are drawn.
    pub fn weights(&self, file: &RunFile) -> Option<&ModelWeights> {
        let pretrained = file.model.init == Init::Pretrained;
        self.dir.as_ref().filter(|_| pretrained).and_then(|dir| dir.weights.as_ref())
    }

    /// Where the first weights come from. A model without files is planned as if they were drawn.
    fn source(&self, file: &RunFile) -> Source {
        self.weights(file).map_or(Source::Random { seed: file.train.seed }, ModelWeights::source)
    }
}

fn unknown_preset(name: &str) -> Failure {
    let failure = Failure::input(format!("model.preset: `{name}` is no known shape"));
    match closest_preset(name) {
        Some(near) => failure.hint(format!("did you mean `{near}`?")),
        None => failure
            .hint(format!("known shapes: {}", preset_names().collect::<Vec<_>>().join(", ")))
            .hint("a directory or a config.json is named with its path, such as ./my-llama"),
    }
}

fn model_is_example(file: &RunFile) -> bool {
    file.model.path.as_deref().is_some_and(|path| path.starts_with(EXAMPLE_PREFIX))
}

/// What the planner is asked to make room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A training run, with evaluations where there is data for them, and samples where the data can be
    /// read as text.
    Train,
    /// An evaluation alone.
    Evaluate,
    /// Tokens from a prompt.
    Generate(Generation),
}

/// All that the planner's question borrows from.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The model: devices that load it share it.
    pub model: Arc<Model>,
    /// The device. Its charges are assumed until model and data are open.
    pub device: DeviceSpec,
    /// Further devices that were asked for, or could be.
    pub others: Vec<DeviceSpec>,
    /// Whether the user has left it to us which of them is used.
    pub open: bool,
    /// The device that was asked for, where the processor stands in for it.
    pub fallback: Option<Fallback>,
}

impl Resolved {
    /// Looks at the devices that the run file names for its model.
    ///
    /// # Errors
    /// What the user has to change.
    pub fn new(file: &RunFile, model: Model) -> Result<Resolved, Failure> {
        model.takes(file)?;
        let mut devices = devices(file)?;
        exchange_by_nccl(file, &mut devices);
        let others = devices.split_off(1);
        let open =
            !file.devices().devices.iter().any(|asked| !matches!(asked, DeviceRequest::Cuda { index: None, .. }));
        Ok(Resolved { model: Arc::new(model), device: devices.remove(0), others, open, fallback: None })
    }

    /// The same, with the device that a run is to use: where it is left to us, the one that the planner prefers.
    ///
    /// # Errors
    /// As [`Resolved::new`]; several devices, or one that can only be planned for.
    pub fn to_run(file: &RunFile, model: Model, work: Work) -> Result<Resolved, Failure> {
        let mut resolved = Resolved::new(file, model)?;
        resolved.only_here()?;
        if work != Work::Train && !resolved.others.is_empty() {
            // What is done once is done by one device.
            exchange_by_host(std::iter::once(&mut resolved.device).chain(&mut resolved.others));
            resolved.prefer(file, work)?;
            resolved.others.clear();
        }
        Ok(resolved)
    }

    /// Plans for every device and takes the fastest that fits; where none does, the one that lacks the least. The
    /// others are left out.
    fn prefer(&mut self, file: &RunFile, work: Work) -> Result<Answer, Failure> {
        let mut answer = search(&self.question(file, work)?);
        for number in 0..self.others.len() {
            let other = search(&question(file, &self.model, &self.others[number], work)?);
            if order(&other.plan).total_cmp(&order(&answer.plan)).is_lt() {
                answer = other;
                std::mem::swap(&mut self.device, &mut self.others[number]);
            }
        }
        Ok(answer)
    }

    /// The answer, or where it does not fit, the last rung: the processor does the work of an accelerator that cannot
    /// hold it, if that fits under the host's load line. `plan` plans for the device that there then is; its charges
    /// may be settled there. What belongs to the experiment stays what it would have been.
    ///
    /// # Errors
    /// As planning.
    pub fn or_on_cpu(
        &mut self,
        file: &RunFile,
        answer: Answer,
        plan: impl FnOnce(&mut Resolved, &RunFile) -> Result<Answer, Failure>,
    ) -> Result<Answer, Failure> {
        let accelerator = matches!(self.device.kind, DeviceKind::Cuda | DeviceKind::Virtual);
        if answer.plan.fits || !accelerator || file.run.fallback == FallbackTo::None {
            return Ok(answer);
        }
        let mut decided = file.clone();
        decided.decide_precision(self.device.kind);
        let left = std::mem::replace(&mut self.device, cpu(file, Some(file.host()))?);
        let mut on_cpu = plan(self, &decided)?;
        if !on_cpu.plan.fits {
            self.device = left;
            return Ok(answer);
        }
        let needs_bytes = answer.plan.devices[0].peak_bytes;
        let fallback = Fallback { device: left.name, budget_bytes: left.budget, needs_bytes };
        on_cpu.plan.fallback = Some(fallback.clone());
        self.fallback = Some(fallback);
        Ok(on_cpu)
    }

    /// That the devices are here.
    ///
    /// # Errors
    /// One that can only be planned for.
    fn only_here(&self) -> Result<(), Failure> {
        if self.device.kind != DeviceKind::Paper {
            return Ok(());
        }
        let message = format!("run.devices: `{}` is a device on paper: nothing runs on it", self.device.name);
        Err(Failure::input(message).hint("plan for it with `plimsoll plan`, or run on `cpu`"))
    }

    /// What to ask the planner.
    ///
    /// # Errors
    /// Pins that do not go with the model.
    pub fn question(&self, file: &RunFile, work: Work) -> Result<Question<'_>, Failure> {
        question(file, &self.model, &self.device, work)
    }
}

/// What to ask the planner about a device.
///
/// # Errors
/// Pins that do not go with the model.
pub(crate) fn question<'a>(
    file: &RunFile,
    model: &'a Model,
    device: &'a DeviceSpec,
    work: Work,
) -> Result<Question<'a>, Failure> {
    let precision = file.arithmetic(device.kind);
    supported(&model.config, precision, Kernels::of(device))?;
    let train = work == Work::Train;
    let rungs = file.train.rungs.as_deref().unwrap_or_default();
    let question = Question {
        config: &model.config,
        precision,
        sequence: u64::from(file.data.sequence),
        sequences: file.batch_sequences(),
        source: model.source(file),
        optimizer: train.then(|| optimizer(file)),
        evaluate: work == Work::Evaluate || train && !file.data.eval.is_empty(),
        generation: match work {
            Work::Train => samples(file, model),
            Work::Evaluate => None,
            Work::Generate(generation) => Some(generation),
        },
        device,
        host: host(file, device)?,
        lossy: lossy(file, model, work),
        pins: pins(file, model.config.layers as usize)?,
        rungs: vec![],
        share: Share::ALONE,
    };
    Ok(under(&question, rungs))
}

/// Several devices have no scratch file: each would count on all of it.
///
/// # Errors
/// Where one is asked for.
pub(crate) fn without_file(file: &RunFile, questions: &mut [Question]) -> Result<(), Failure> {
    if questions.len() > 1 {
        if file.file().is_some() {
            let message = "several devices cannot wait in one scratch file";
            return Err(Failure::input(message).hint("name one device, or leave out memory.file and `file=`"));
        }
        questions.iter_mut().for_each(|question| question.host.file = FileSpec::NONE);
    }
    Ok(())
}

/// What to ask the planner about several devices that train together.
///
/// # Errors
/// Pins that do not go with the model.
pub fn team_question<'a>(
    file: &RunFile,
    model: &'a Model,
    devices: &'a [DeviceSpec],
) -> Result<TeamQuestion<'a>, Failure> {
    let mut questions: Vec<Question> =
        devices.iter().map(|device| question(file, model, device, Work::Train)).collect::<Result<_, _>>()?;
    // One experiment has one precision.
    let precision = questions[0].precision;
    questions.iter_mut().for_each(|question| question.precision = precision);
    without_file(file, &mut questions)?;
    // What stands in the memory of this machine is not left for the host's side.
    let here = |device: &&DeviceSpec| device.in_process();
    let taken =
        |number: usize| devices.iter().enumerate().filter(move |(other, _)| *other != number).map(|(_, other)| other);
    for (number, question) in questions.iter_mut().enumerate().filter(|(_, question)| question.host != HostSpec::NONE) {
        if question.device.kind != DeviceKind::Paper {
            let others: Bytes = taken(number).filter(here).map(|device| device.budget).sum();
            let free = Memory::read().free.saturating_sub(others);
            question.host.budget = question.host.budget.min(free);
        }
    }
    // A question knows of its own device's staging alone.
    let budget = |question: &Question| question.host.budget + staging(std::slice::from_ref(question.device));
    let host = questions.iter().map(budget).max().unwrap_or_default().saturating_sub(staging(devices));
    let all = file.run.team == TeamOf::All;
    Ok(TeamQuestion { devices: questions, host, all, only: None, evaluations: evaluations(file, None) })
}

/// How a run evaluates, of so many rows where they have been read; none where it has nothing to evaluate on.
pub(crate) fn evaluations(file: &RunFile, rows: Option<u64>) -> Option<Evaluations> {
    // In the middle of the run, where it comes to that.
    let never = matches!(file.length(), Some(Length::Steps(steps)) if file.train.eval_every >= steps);
    let every = if never { 0 } else { file.train.eval_every };
    (!file.data.eval.is_empty()).then_some(Evaluations { every, rows })
}

/// What a run file says about adapters and coarser arithmetic. What has been decided is not open any more.
fn lossy(file: &RunFile, model: &Model, work: Work) -> Lossy {
    let lora = lora(file, model);
    let adapters = match work {
        Work::Train => file.train.method == Method::Lora,
        Work::Evaluate | Work::Generate(_) => model.adapter.is_some(),
    };
    let method = if adapters { decoder::Method::Lora(lora.clone()) } else { decoder::Method::Full };
    let open = file.train.rungs.is_none();
    let offer = Rung::ALL.into_iter().filter(|_| open).collect::<Vec<_>>();
    let allow = file.memory.allow.iter().copied().filter(|rung| offer.contains(rung)).collect();
    Lossy { method, base: Base::Plain, allow, offer, lora }
}

/// The adapters that are trained, or would be: those of the model, else as the run file says.
pub(crate) fn lora(file: &RunFile, model: &Model) -> Lora {
    let RunFile { lora, train, .. } = file;
    if let Some(adapter) = &model.adapter {
        return adapter.lora(lora.dropout, train.seed);
    }
    let named = |target: &Target| lora.targets.iter().any(|name| name == target.name());
    Lora {
        rank: u64::from(lora.rank),
        alpha: lora.alpha,
        dropout: lora.dropout,
        targets: Target::ALL.into_iter().filter(named).collect(),
        seed: train.seed,
        source: Source::Random { seed: train.seed },
    }
}

/// Room for the samples at the end of a run, where there is a tokenizer and something to start from.
fn samples(file: &RunFile, model: &Model) -> Option<Generation> {
    let readable = model.tokenizer().is_some() || model_is_example(file);
    let sequence = u64::from(file.data.sequence);
    let chunk = sequence.min(64);
    let generation = Generation { capacity: sequence.min(512).next_multiple_of(chunk), chunk };
    (readable && !file.data.eval.is_empty()).then_some(generation)
}

/// The optimizer of a run file, as the op that it becomes.
pub fn optimizer(file: &RunFile) -> decoder::Optimizer {
    let train = &file.train;
    match train.optimizer {
        Optimizer::Adamw => decoder::Optimizer::AdamW {
            betas: train.betas,
            eps: train.eps,
            decay: train.weight_decay,
            state: decoder::AdamState::Full,
        },
        Optimizer::Sgd => decoder::Optimizer::Sgd { momentum: train.betas[0], decay: train.weight_decay },
    }
}

fn pins(file: &RunFile, layers: usize) -> Result<Pins, Failure> {
    let levels = &file.recipe.recompute;
    let recompute = match levels.len() {
        0 => None,
        1 => Some(vec![levels[0]; layers]),
        given if given == layers => Some(levels.clone()),
        given => {
            let message = format!("recipe.recompute names {}, the model has {layers}", counted(given, "layer"));
            return Err(Failure::input(message).hint("name one level for all layers, or one for each"));
        }
    };
    Ok(Pins { micro_batch: file.recipe.micro_batch, recompute, offload: None })
}

/// What a machine on paper does with its memory: assumed, two channels of DDR5 at less than half their rate.
const PAPER_HOST_BYTES_PER_SECOND: f64 = 30e9;

/// The host beside a device. The processor is its own; on paper there is what the user says.
pub(crate) fn host(file: &RunFile, device: &DeviceSpec) -> Result<HostSpec, Failure> {
    let (given, budget) = (file.devices().host, file.host());
    if device.host().is_some() {
        // Nothing waits on other hosts yet.
        return Ok(HostSpec::NONE);
    }
    let scratch = scratch(file, device.kind)?;
    match device.kind {
        DeviceKind::Cpu => Ok(HostSpec { file: scratch, ..HostSpec::NONE }),
        DeviceKind::Paper => Ok(HostSpec {
            budget: given.map_or(Bytes::ZERO, |budget| budget.of(Bytes::ZERO)),
            memory_bytes_per_second: PAPER_HOST_BYTES_PER_SECOND,
            file: scratch,
        }),
        DeviceKind::Virtual | DeviceKind::Cuda => {
            // A virtual device's own bytes are this machine's, too.
            let taken = if device.kind == DeviceKind::Virtual { device.budget } else { Bytes::ZERO };
            let free = Memory::read().free.saturating_sub(taken);
            // Beside a virtual device, a thread does what the host does.
            let threads = if device.kind == DeviceKind::Virtual { 1 } else { device.threads.max(1) };
            let rates = calibration::cpu(threads)?.rates;
            let budget = budget.of(free).saturating_sub(staging(std::slice::from_ref(device)));
            let memory_bytes_per_second = rates.memory_bytes_per_second;
            Ok(HostSpec { budget, memory_bytes_per_second, file: scratch })
        }
    }
}

/// So much of what is free on a disk is offered to the scratch file where nobody has said: the rest is for checkpoints
/// and for others.
const DISK_SHARE: f64 = 0.8;

/// The scratch file, where there may be one. Rates are measured only where it was asked for; on paper there is as much
/// of it as the user says.
fn scratch(file: &RunFile, kind: DeviceKind) -> Result<FileSpec, Failure> {
    let given = file.file();
    if kind == DeviceKind::Paper {
        let budget = given.map_or(Bytes::ZERO, |budget| budget.of(Bytes::ZERO));
        return Ok(FileSpec { budget, room: Bytes(u64::MAX), ..FileSpec::NONE });
    }
    if let Some(folder) = file.memory.file_dir.as_ref().filter(|folder| given.is_some() && !Path::new(folder).is_dir())
    {
        return Err(Failure::input(format!("memory.file_dir: {folder} is no folder"))
            .hint("make it, or mount the disk that it is on: the scratch file goes nowhere else"));
    }
    let free = disk::free(file.file_folder()).unwrap_or(Bytes::ZERO);
    let (budget, room) = (given.map_or(Bytes::ZERO, |budget| budget.of(free)), Budget::Share(DISK_SHARE).of(free));
    let measured = given.and_then(|_| calibration::disk(file.file_folder()));
    let spec = FileSpec { budget, room, ..FileSpec::NONE };
    Ok(match measured {
        Some(rates) => FileSpec {
            read_bytes_per_second: rates.read_bytes_per_second,
            write_bytes_per_second: rates.write_bytes_per_second,
            measured: true,
            ..spec
        },
        None => spec,
    })
}

/// What these devices pin of the host's memory beside its arena, under the same load line.
pub(crate) fn staging(devices: &[DeviceSpec]) -> Bytes {
    let gpus = devices.iter().filter(|device| device.kind == DeviceKind::Cuda && device.host().is_none());
    gpus.map(|_| Bytes(cuda::staging::STAGING_BYTES)).sum()
}

/// The devices that a run file names, at least one, with their load lines.
///
/// # Errors
/// Devices that are not here, or cannot be used together.
pub fn devices(file: &RunFile) -> Result<Vec<DeviceSpec>, Failure> {
    let mut devices = open_devices(file)?;
    for device in &mut devices {
        // What a virtual device was made with, or one on another host has, is the most that its line comes to.
        let bounded = device.kind == DeviceKind::Virtual || device.host().is_some();
        if let Some(moved) = file.moved.get(&device.name).filter(|_| bounded) {
            device.budget = device.budget.min(moved.of(device.budget));
        }
        for short in calibration::shortfalls(device) {
            match short.of {
                Short::LineBytes(line) => device.budget = device.budget.min(line),
                Short::Slower(times) => device.rates = device.rates.paced(1.0 / times),
            }
        }
    }
    Ok(devices)
}

/// What the plan of a device follows that earlier runs have found out, in words.
pub(crate) fn learned(device: &DeviceSpec) -> Option<String> {
    let name = &device.name;
    let of = |short: &Shortfall| match short.of {
        Short::LineBytes(line) if line != device.budget => None,
        Short::LineBytes(line) => {
            Some(format!("{name} is held to {line}, because a run fell short of more ({})", short.why))
        }
        Short::Slower(times) => Some(format!("{name} is {times} times slower than it measured ({})", short.why)),
    };
    let all: Vec<String> = calibration::shortfalls(device).iter().filter_map(of).collect();
    (!all.is_empty()).then(|| format!("learned: {}; plimsoll devices --forget takes that back", all.join("; ")))
}

/// That rates were measured just now beside other programs, in words.
pub fn disturbed() -> Option<String> {
    calibration::disturbed().map(|share| {
        format!(
            "rates: others took {:.0} % of the processor's time while it was measured, so predicted times may be far off, and \
             no share of the peak is told; every start measures again until it is left alone; plimsoll bench devices does \
             so once and for all",
            100.0 * share
        )
    })
}

/// That a run can follow a stored plan, whose file has this name.
///
/// # Errors
/// A plan of something else, or one that does not fit; and what is wrong with the run's model.
pub fn check_followed(file: &RunFile, plan: &Plan, name: &str) -> Result<(), Failure> {
    if !plan.fits {
        return Err(Failure::input(format!("{name}: this plan does not fit, so there is nothing to follow"))
            .hint("its `needs` say what would do: plan once more with one of them"));
    }
    let asked = plan_of_what(file, &Model::without_adapter(file)?.config);
    match plan.of {
        Some(of) if of != asked => Err(Failure::input(format!("{name}: a plan of {of}; this run has {asked}"))
            .hint("plan this very run: plimsoll plan RUN.toml --json")),
        _ => Ok(()),
    }
}

/// What a run file plans.
pub(crate) fn plan_of_what(file: &RunFile, config: &ModelConfig) -> PlanOf {
    let RunFile { train, data, .. } = file;
    PlanOf { parameters: config.parameters(), sequence: u64::from(data.sequence), batch_tokens: train.batch_tokens }
}

/// What can be said of the devices that are asked for before any is looked at.
///
/// # Errors
/// Devices that want more of this machine's cores or memory than there is.
pub fn check_asked(file: &RunFile) -> Result<(), Failure> {
    let devices = file.devices().devices;
    check_paces(&devices, Cpu::read().usable_cores())?;
    check_lines(file, &devices, Memory::read().total)
}

/// A device of this machine that is named, with its load line: what is known of it before anything is measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Named {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Its load line.
    pub budget: Bytes,
}

/// The devices that a run file names one by one. Nothing is measured: who joins a cluster needs no rates.
///
/// # Errors
/// Devices that are not here, or cannot be used.
pub fn named(file: &RunFile) -> Result<Vec<Named>, Failure> {
    check_asked(file)?;
    let mut found = Vec::new();
    let mut add = |name: String, kind, own, free| {
        let budget = file.line_of(&name, own).of(free);
        found.push(Named { name, kind, budget });
    };
    for asked in &file.devices().devices {
        let (name, own, memory) = (asked.name(), asked.budget(), Memory::read().free);
        match asked {
            DeviceRequest::Cpu { .. } => add(name, DeviceKind::Cpu, own, memory),
            DeviceRequest::Virtual { .. } => add(name, DeviceKind::Virtual, own, memory),
            DeviceRequest::Paper { .. } => add(name, DeviceKind::Paper, own, Bytes::ZERO),
            DeviceRequest::Cuda { index, .. } => {
                for (here, card) in cards(*index)? {
                    add(format!("cuda:{}", card.index), DeviceKind::Cuda, own, free_on(here, card, file, own)?);
                }
            }
            DeviceRequest::Elsewhere { .. } | DeviceRequest::Ray { .. } => {
                return Err(Failure::input(format!("run.devices: `{name}` is a device of a cluster"))
                    .hint("name devices of this machine, such as cuda:0 or cpu; plimsoll devices lists them"));
            }
        }
    }
    Ok(found)
}

/// That amounts which are given as load lines are there. A share always is.
///
/// # Errors
/// Those in this machine's memory are more than `total`: nothing would hold the devices under them.
fn check_lines(file: &RunFile, devices: &[DeviceRequest], total: Bytes) -> Result<(), Failure> {
    let of_machine =
        |asked: &&DeviceRequest| matches!(asked, DeviceRequest::Cpu { .. } | DeviceRequest::Virtual { .. });
    // Of one that was moved while the run was under way its new place is what counts.
    let named = |asked: &DeviceRequest| {
        let budget = (!file.moved.contains_key(&asked.name())).then(|| asked.budget().unwrap_or(file.memory.budget));
        budget.and_then(Budget::amount).map(|line| (asked.name(), line))
    };
    let given: Vec<(String, Bytes)> = devices.iter().filter(of_machine).filter_map(named).collect();
    let own = devices.iter().filter(of_machine).any(|asked| asked.budget().is_some());
    above(if own { "run.devices" } else { "memory.budget" }, &given, "this machine", total)?;
    if devices.iter().any(|asked| matches!(asked, DeviceRequest::Cuda { .. } | DeviceRequest::Virtual { .. })) {
        let key = if file.devices().host.is_some() { "run.devices" } else { "memory.host" };
        let given = file.host().amount().map(|line| ("host".to_owned(), line));
        above(key, given.as_slice(), "this machine", total)?;
    }
    Ok(())
}

/// That load lines are no more than `total`, which `place` has.
fn above(key: &str, given: &[(String, Bytes)], place: &str, total: Bytes) -> Result<(), Failure> {
    let sum: Bytes = given.iter().map(|(_, line)| *line).sum();
    // Where the system does not say what there is, nobody knows better.
    if sum <= total || total == Bytes::ZERO {
        return Ok(());
    }
    let names: Vec<&str> = given.iter().map(|(name, _)| &**name).collect();
    let message = format!("{key}: {} may hold {sum}, and {place} has {total}", names.join(" and "));
    Err(Failure::input(message).hint("name amounts that are there, or shares of what is free, such as 50%"))
}

/// What a load line of a GPU may be a share of, for a device of which an amount is no more than there is.
///
/// # Errors
/// It is more, or the driver refuses.
fn free_on(here: &'static Here, card: &Card, file: &RunFile, own: Option<Budget>) -> Result<Bytes, Failure> {
    let name = format!("cuda:{}", card.index);
    let key = if own.is_some() { "run.devices" } else { "memory.budget" };
    let given = own.unwrap_or(file.memory.budget).amount().filter(|_| !file.moved.contains_key(&name));
    let given = given.map(|line| (name, line));
    above(key, given.as_slice(), &card.name, card.memory_bytes)?;
    Ok(cuda::open::free_bytes(here, card)?)
}

/// Measures what nobody has measured of this processor yet, for the one device that a run file names, in what that device's
/// load line leaves this process.
///
/// # Errors
/// As [`named`], and where memory or threads are refused.
pub(crate) fn rates_under_line(file: &RunFile) -> Result<(), Failure> {
    let threads = |kind| match kind {
        DeviceKind::Cpu => Ok(Some(Cpu::read().threads_for(file.run.threads.asked())?)),
        DeviceKind::Virtual => Ok(Some(1)),
        DeviceKind::Cuda | DeviceKind::Paper => Ok::<_, Failure>(None),
    };
    for device in named(file)? {
        if let Some(threads) = threads(device.kind)? {
            let room = device.budget.saturating_sub(process::resident().unwrap_or(Bytes::ZERO));
            calibration::cpu_within(threads, room)?;
            process::give_back();
        }
    }
    Ok(())
}

/// The same with what is free on each.
fn open_devices(file: &RunFile) -> Result<Vec<DeviceSpec>, Failure> {
    let request = file.devices();
    if request.devices.is_empty() {
        // What is there is used: the GPUs, else the processor.
        return match gpus(file, None) {
            Ok(gpus) if !gpus.is_empty() => Ok(gpus),
            _ if model_is_example(file) && !a_gpu_could_be_used() => {
                let mut pair = file.clone();
                pair.run.devices = example_pair(file);
                open_devices(&pair)
            }
            // Nobody who has a GPU shall wonder why it idles.
            Err(failure) if a_gpu_could_be_used() => Err(failure.hint("or leave it alone: --devices cpu")),
            _ => {
                check_lines(file, &[DeviceRequest::Cpu { budget: None }], Memory::read().total)?;
                Ok(vec![cpu(file, None)?])
            }
        };
    }
    check_asked(file)?;
    let mut devices = Vec::new();
    for asked in &request.devices {
        match asked {
            DeviceRequest::Cuda { index: None, budget } => devices.extend(gpus(file, *budget)?),
            asked => devices.push(device(file, asked)?),
        }
    }
    measure_links(file, &request, &mut devices)?;
    Ok(devices)
}

/// Measures how fast hosts reach each other, where devices are on several and nobody has said what their links are. The
/// devices of a host have its link together.
fn measure_links(file: &RunFile, request: &DevicesRequest, devices: &mut [DeviceSpec]) -> Result<(), Failure> {
    let unknown = |asked: &DeviceRequest| match asked {
        DeviceRequest::Elsewhere { device, team_link, .. } => {
            team_link.is_none() && !matches!(&**device, DeviceRequest::Virtual { team_link: Some(_), .. })
        }
        _ => false,
    };
    let unknown: Vec<String> = request.devices.iter().filter(|asked| unknown(asked)).map(DeviceRequest::name).collect();
    let Some(hosts) = file.elsewhere.hosts().filter(|_| devices.len() > 1 && !unknown.is_empty()) else {
        return Ok(());
    };
    let mut places: Vec<Option<&str>> = devices.iter().map(DeviceSpec::host).collect();
    places.sort_unstable();
    places.dedup();
    let several = places.len() > 1;
    // Of each host one, or of the only one all.
    let away: Vec<&DeviceSpec> = devices.iter().filter(|device| device.host().is_some()).collect();
    let first = |device: &&&DeviceSpec| away.iter().find(|other| other.host() == device.host()) == Some(*device);
    let measuring: Vec<&DeviceSpec> = away.iter().filter(|device| !several || first(device)).copied().collect();
    let lines = measuring.iter().map(|device| file.elsewhere.line(&device.name)).collect::<Result<Vec<_>, _>>()?;
    let lost = |(rank, error): (usize, DeviceError)| {
        let name = measuring.get(rank).map_or("this machine", |device| &device.name);
        let failure = Failure::from(error);
        Failure {
            message: format!("run.devices: the links of {name} cannot be measured: {}", failure.message),
            ..failure
        }
    };
    let links = far::links::slowest(&lines, places[0].is_none(), &*hosts).map_err(lost)?;
    let of_host: Vec<(String, Link)> =
        measuring.iter().zip(&links).map(|(device, link)| (device.name.clone(), *link)).collect();
    for at in 0..devices.len() {
        let (host, name) = (devices[at].host(), &devices[at].name);
        if !unknown.contains(name) {
            continue;
        }
        let own = |(measured, _): &&(String, Link)| match several {
            true => measured.split_once('/').map(|(host, _)| host) == host,
            false => measured == name,
        };
        let together = if several { devices.iter().filter(|other| other.host() == host).count() } else { 1 };
        let Some((_, link)) = of_host.iter().find(own) else { continue };
        let bytes_per_second = link.bytes_per_second / together as f64;
        devices[at].team_link = Link { bytes_per_second, ..*link };
        devices[at].link_measured = true;
    }
    Ok(())
}

/// What the built-in example shows where there is no GPU: two unequal devices at work, as fast as this machine may have
/// them beside each other, and with no more than the load line that was given. The paces are to each other as an RTX
/// 3070's to an RTX 3090's.
fn example_pair(file: &RunFile) -> String {
    const SLOWER: f64 = 0.57;
    let cores = (0.8 * Cpu::read().usable_cores()).min(1.0 + SLOWER);
    let pace = |share: f64| (100.0 * cores * share / (1.0 + SLOWER)).floor() / 100.0;
    let line = |mib| Budget::Amount(Bytes::mib(mib).min(file.memory.budget.of(Memory::read().free)));
    format!("virtual:large={}@{},virtual:small={}@{}", line(48), pace(1.0), line(32), pace(SLOWER))
}

/// The GPU of this number, or every one that Plimsoll can use.
///
/// # Errors
/// There is none, and why.
fn cards(index: Option<u32>) -> Result<Vec<(&'static Here, &'static Card)>, Failure> {
    let (here, cards) = match index {
        Some(index) => cuda::open::card(index).map(|(here, card)| (here, std::slice::from_ref(card)))?,
        None => cuda::gpus::here().map(|here| (here, &*here.cards))?,
    };
    let usable: Vec<_> =
        cards.iter().filter(|card| card.architecture.check().is_ok()).map(|card| (here, card)).collect();
    match cards.first() {
        Some(card) if usable.is_empty() => Err(unusable(card)),
        _ => Ok(usable),
    }
}

/// The same, as they are planned for.
fn gpus(file: &RunFile, budget: Option<Budget>) -> Result<Vec<DeviceSpec>, Failure> {
    cards(None)?.into_iter().map(|(here, card)| gpu(file, here, card, budget)).collect()
}

/// Whether there is a GPU that Plimsoll has kernels for, whatever else is missing.
fn a_gpu_could_be_used() -> bool {
    cuda::gpus::here().is_ok_and(|here| here.cards.iter().any(|card| card.architecture.check().is_ok()))
}

fn unusable(card: &Card) -> Failure {
    let why = card.architecture.check().err().unwrap_or_default();
    Failure::input(format!("run.devices: cuda:{} ({}) cannot be used: {why}", card.index, card.name))
        .hint("run on another device: --devices cpu; plimsoll devices lists them")
}

/// A GPU of this machine: its load line is of what others leave of it, its charges are those that a run has measured
/// on such a GPU, else assumed.
fn gpu(file: &RunFile, here: &'static Here, card: &Card, budget: Option<Budget>) -> Result<DeviceSpec, Failure> {
    if card.architecture.check().is_err() {
        return Err(unusable(card));
    }
    // What is missing is said before anything is measured.
    here.nvrtc()?;
    here.cublaslt()?;
    let name = format!("cuda:{}", card.index);
    let free = free_on(here, card, file, budget)?;
    let charges = calibration::charges(here, card).map(rounded);
    let rates = calibration::gpu(here, card)?.rates;
    Ok(DeviceSpec {
        budget: file.line_of(&name, budget).of(free),
        name,
        kind: DeviceKind::Cuda,
        charges: charges.unwrap_or(paper::ASSUMED_CHARGES),
        charges_measured: charges.is_some(),
        link_measured: false,
        nccl: here.nccl_version().map(|version| NcclSpec { version: version.to_owned(), bytes: cuda::nccl::CHARGES }),
        // To the others over the host.
        team_link: rates.host_link,
        // For what the processor does beside it.
        threads: Cpu::read().threads_for(file.run.threads.asked())?,
        rates,
    })
}

/// Decides how the devices of a run exchange: by NCCL where all are GPUs that have the same one, which then has its part of
/// their charges; else by memory of the host.
fn exchange_by_nccl(file: &RunFile, devices: &mut [DeviceSpec]) {
    let version = |device: &DeviceSpec| device.nccl.as_ref().map(|nccl| nccl.version.clone());
    let first = devices.first().and_then(version);
    let alike =
        file.run.nccl && devices.len() > 1 && first.is_some() && devices.iter().all(|device| version(device) == first);
    for device in devices.iter_mut() {
        device.charges += device.nccl_bytes();
    }
    if !alike {
        exchange_by_host(devices);
    }
}

/// Takes NCCL, and its part of their charges, from devices.
fn exchange_by_host<'a>(devices: impl IntoIterator<Item = &'a mut DeviceSpec>) {
    for device in devices {
        device.charges = device.charges.saturating_sub(device.nccl_bytes());
        device.nccl = None;
    }
}

/// That virtual devices leave this machine a fifth of its cores.
fn check_paces(devices: &[DeviceRequest], cores: f64) -> Result<(), Failure> {
    let pace = |device: &DeviceRequest| match device {
        DeviceRequest::Virtual { pace, .. } => *pace,
        _ => 0.0,
    };
    let (paces, most) = (devices.iter().map(pace).sum::<f64>(), 0.8 * cores);
    // Decimal paces that add up to the limit do not always do so in binary.
    if paces <= most * (1.0 + 1e-9) {
        return Ok(());
    }
    let message = format!("run.devices: virtual devices of {paces:.2} cores in all; this machine gives them {most:.2}");
    Err(Failure::input(message).hint(format!(
        "that is 0.8 of its {} cores: choose smaller paces behind the `@`",
        (cores * 100.0).round() / 100.0
    )))
}

/// The link to another host, where nobody has said what it is: assumed.
const ASSUMED_GBIT: f64 = 1.0;

fn device(file: &RunFile, asked: &DeviceRequest) -> Result<DeviceSpec, Failure> {
    match asked {
        DeviceRequest::Elsewhere { device, team_link, .. } => {
            let mut there = file.clone();
            there.run.devices = device.to_string();
            // Nothing waits there.
            there.memory.host = Budget::HOST;
            let spec = file.elsewhere.describe(&asked.name(), there)?;
            let given = match &**device {
                DeviceRequest::Virtual { team_link, .. } => *team_link,
                _ => *team_link,
            };
            Ok(DeviceSpec { team_link: given.map_or(paper::ethernet(ASSUMED_GBIT), LinkRequest::link), ..spec })
        }
        DeviceRequest::Ray { word } => {
            Err(Failure::input(format!("run.devices: `{word}` is for a cluster to say, and nothing here reaches one"))
                .hint("plimsoll train, plan and sweep reach the cluster that this machine has joined (docs/ray.md)"))
        }
        DeviceRequest::Cpu { budget } => cpu(file, *budget),
        DeviceRequest::Virtual { name, budget, pace, link, team_link } => {
            let device = virtual_device(file, name, *budget, *pace, link.unwrap_or(LinkRequest::DEFAULT))?;
            Ok(DeviceSpec { team_link: team_link.map_or(device.team_link, LinkRequest::link), ..device })
        }
        DeviceRequest::Paper { name, budget, team_link } => {
            let device = paper::paper(name, budget.unwrap_or(file.memory.budget));
            let device = device.expect("requests name devices of the table");
            Ok(DeviceSpec { team_link: team_link.map_or(device.team_link, LinkRequest::link), ..device })
        }
        DeviceRequest::Cuda { index, budget } => {
            let of_key = |failure: Failure| Failure {
                message: format!("run.devices: {}: {}", asked.name(), failure.message),
                ..failure
            };
            let (here, card) = cuda::open::card(index.unwrap_or(0)).map_err(|error| of_key(error.into()))?;
            gpu(file, here, card, *budget)
        }
    }
}

fn assumed_charges(file: &RunFile) -> Bytes {
    charges(file.batch_sequences(), u64::from(file.data.sequence))
}

fn cpu(file: &RunFile, budget: Option<Budget>) -> Result<DeviceSpec, Failure> {
    let threads = Cpu::read().threads_for(file.run.threads.asked())?;
    let (rates, pace) = (calibration::cpu(threads)?.rates, pace(file, threads));
    Ok(DeviceSpec {
        name: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        budget: file.line_of("cpu", budget).of(Memory::read().free),
        charges: assumed_charges(file),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads,
        rates: rates.paced(pace),
    })
}

/// The share of the time in which a training run on the processor computes: all of it where the user has said how
/// many threads, else as much as leaves the machine usable.
pub fn pace(file: &RunFile, threads: u32) -> f64 {
    if file.run.threads.asked().is_some() { 1.0 } else { auto_pace(Cpu::read().usable_cores(), threads) }
}

/// A part of this processor, as large as its pace says.
fn virtual_device(
    file: &RunFile,
    name: &str,
    budget: Budget,
    pace: f64,
    link: LinkRequest,
) -> Result<DeviceSpec, Failure> {
    let core = calibration::cpu(1)?.rates;
    Ok(DeviceSpec {
        name: format!("virtual:{name}"),
        kind: DeviceKind::Virtual,
        budget: budget.of(Memory::read().free),
        charges: assumed_charges(file),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads: pace.ceil().max(1.0) as u32,
        rates: Rates { host_link: link.link(), measured: false, ..core.paced(pace) },
    })
}

/// A training run as it is planned.
#[derive(Debug)]
pub struct Planned {
    /// The model, and the first device of those that take part.
    pub resolved: Resolved,
    /// The devices that take part, in the order of ranks.
    pub devices: Vec<DeviceSpec>,
    /// The whole plan, with the Programs of the first device.
    pub answer: Answer,
}

/// Plans a training run on the devices that the run file names; where none can hold it, for the one that lacks the least,
/// or for the processor in its place. With `explain` the other ways to share out are named,
/// and what each rung frees and costs.
///
/// # Errors
/// As [`Resolved::new`].
pub fn plan(file: &RunFile, explain: bool) -> Result<Planned, Failure> {
    let mut resolved = Resolved::new(file, Model::open(file)?)?;
    let mut devices = vec![resolved.device.clone()];
    devices.append(&mut resolved.others);
    let alone: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
    if devices.len() > 1 {
        charge_team(&mut devices, file);
    }
    let mut answer = with_programs(&mut devices, |devices| {
        let answer = share_out(&team_question(file, &resolved.model, devices)?);
        let programs = || programs_bytes(answer.parts.iter().map(|part| &part.answer.set));
        let programs = answer.plan.fits.then(programs);
        Ok((answer, programs))
    })?;
    if devices.len() > 1 && !answer.plan.fits && file.run.team != TeamOf::All {
        let by_one = one_of(&mut devices, &alone, |devices| {
            let only = Some(Only::Sharing(Sharing::Batch));
            let answer =
                share_out(&TeamQuestion { only, evaluations: None, ..team_question(file, &resolved.model, devices)? });
            let [part] = &answer.parts[..] else { return Ok(None) };
            let (name, seconds) = (devices[part.device].name.clone(), answer.plan.predicted.step_seconds);
            let programs = programs_bytes([&part.answer.set]);
            Ok(answer.plan.fits.then_some((answer, name, seconds, programs)))
        })?;
        answer = by_one.unwrap_or(answer);
    }
    if devices.len() > 1 {
        say_what_would_use(&team_question(file, &resolved.model, &devices)?, &file.devices(), &mut answer.plan);
    }
    if explain && devices.len() > 1 {
        let team = team_question(file, &resolved.model, &devices)?;
        answer.plan.alternatives = alternatives(&team, &answer.plan);
        ladders(&team, &mut answer);
    }
    let TeamAnswer { parts, plan, .. } = answer;
    if file.run.team == TeamOf::All && plan.fits && parts.len() < devices.len() {
        let sequences = counted(file.batch_sequences(), "sequence");
        let message = format!(
            "run.team = \"all\": a step has {sequences}, and no way was found to share them, or the model, among all \
             {} devices",
            devices.len()
        );
        return Err(
            Failure::input(message).hint("take a larger train.batch_tokens, fewer devices, or run.team = \"auto\"")
        );
    }
    let part: Vec<usize> = parts.iter().map(|part| part.device).collect();
    let first = parts.into_iter().next().expect("somebody takes part");
    let answer = Answer { plan, ..first.answer };
    let (taken, left): (Vec<_>, Vec<_>) =
        devices.into_iter().enumerate().partition(|(device, _)| part.contains(device));
    let mut devices: Vec<DeviceSpec> = taken.into_iter().map(|(_, device)| device).collect();
    resolved.others = left.into_iter().map(|(_, device)| device).collect();
    resolved.device = devices[0].clone();
    let mut answer = resolved.or_on_cpu(file, answer, |resolved, file| {
        let device = std::slice::from_mut(&mut resolved.device);
        with_programs(device, |devices| {
            let answer = search(&question(file, &resolved.model, &devices[0], Work::Train)?);
            let programs = answer.plan.fits.then(|| programs_bytes([&answer.set]));
            Ok((answer, programs))
        })
    })?;
    if resolved.fallback.is_some() {
        devices = vec![resolved.device.clone()];
    }
    if explain && answer.plan.team.is_empty() {
        (_, _, answer.plan.ladder) = ladder(&resolved.question(file, Work::Train)?, &answer.plan.recipe);
    }
    answer.plan.learned = devices.iter().find_map(learned);
    answer.plan.disturbed = disturbed();
    answer.plan.of = Some(plan_of_what(file, &resolved.model.config));
    Ok(Planned { resolved, devices, answer })
}

/// Plans that fit come first, by time; then those that do not, by what they lack.
fn order(plan: &Plan) -> f64 {
    if plan.fits {
        return -1.0 / plan.predicted.step_seconds;
    }
    plan.devices.iter().map(|device| device.peak_bytes.saturating_sub(device.budget_bytes).0 as f64).sum()
}

/// Writes the built-in example into the run folder, where the run file names it, and names its files
/// instead: from then on it is a run like any other.
///
/// # Errors
/// A folder that cannot be written.
pub fn write_example(file: &mut RunFile) -> Result<(), Failure> {
    let folder = Path::new(&file.run.dir).join("example");
    let inside = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let is_example = |path: &String| path.starts_with(EXAMPLE_PREFIX);
    let mut named = false;
    if let Some(path) = file.model.path.as_mut().filter(|path| is_example(path)) {
        (*path, named) = (folder.to_string_lossy().into_owned(), true);
    }
    for (sources, name) in [(&mut file.data.train, "train.jsonl"), (&mut file.data.eval, "eval.jsonl")] {
        for source in sources.iter_mut().filter(|source| is_example(source)) {
            (*source, named) = (inside(name), true);
        }
    }
    if named && file.devices().devices.is_empty() && !a_gpu_could_be_used() {
        let host = file.devices().host.map_or(String::new(), |host| format!(",host={host}"));
        file.run.devices = example_pair(file) + &host;
    }
    if named {
        sums::write(&folder, file.train.seed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_file::setting;
    use plimsoll_core::RecomputeLevel;
    use plimsoll_plan::request::DevicesRequest;

    fn file(settings: &[&str]) -> RunFile {
        let settings: Vec<String> = settings.iter().map(|setting| (*setting).to_owned()).collect();
        RunFile::parse("run.toml", "", &settings).unwrap()
    }

    fn refusal(settings: &[&str]) -> String {
        let file = file(settings);
        let refused = Model::open(&file)
            .and_then(|model| Resolved::new(&file, model))
            .and_then(|resolved| resolved.question(&file, Work::Train).map(|_| ()));
        let failure = refused.expect_err("this is refused");
        assert_eq!(failure.exit as i32, 2);
        failure.to_string()
    }

    #[test]
    fn a_preset_on_paper_is_planned_without_a_device() {
        let file = file(&["model.preset=smollm2-135m", "run.devices=rtx3090=8GiB", "recipe.recompute=block"]);
        let Planned { resolved, answer, .. } = plan(&file, false).unwrap();
        assert_eq!(resolved.device.budget, Bytes::gib(8));
        assert!(answer.plan.fits);
        assert_eq!(answer.plan.recipe.recompute, vec![RecomputeLevel::Block; 30]);
    }

    #[test]
    fn several_devices_are_a_team_of_those_that_have_room() {
        let model = "model.preset=smollm2-135m";
        let used = |devices: &str| {
            let planned = plan(&file(&[model, devices]), false).unwrap();
            let names = |devices: &[DeviceSpec]| devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>();
            (names(&planned.devices), names(&planned.resolved.others))
        };
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(used("run.devices=rtx3070,rtx3090"), (names(&["rtx3070", "rtx3090"]), names(&[])));
        // A gibibyte has room for some of the layers, beside what libraries take.
        assert_eq!(used("run.devices=rtx3070,rtx3090=1GiB"), (names(&["rtx3070", "rtx3090"]), names(&[])));
        assert_eq!(used("run.devices=rtx3070,rtx3090=400MiB"), (names(&["rtx3070"]), names(&["rtx3090"])));
        assert_eq!(used("run.devices=rtx3070=400MiB,rtx3090"), (names(&["rtx3090"]), names(&["rtx3070"])));
    }

    #[test]
    fn load_lines_above_the_memory_that_there_is_are_refused() {
        let asked = |settings: &[&str]| {
            let file = file(&[&["model.preset=smollm2-135m"], settings].concat());
            check_lines(&file, &file.devices().devices, Bytes::gib(16)).map_err(|failure| failure.message)
        };
        for (settings, said) in [
            (&["run.devices=cpu=900GiB"][..], "run.devices: cpu may hold 900.00 GiB, and this machine has 16.00 GiB"),
            (
                &["run.devices=virtual:a=10GiB@0.2,virtual:b=8GiB@0.2"],
                "run.devices: virtual:a and virtual:b may hold 18.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=cpu", "memory.budget=17GiB"],
                "memory.budget: cpu may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=virtual:a=1GiB@0.2,host=17GiB"],
                "run.devices: host may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
            (
                &["run.devices=cuda:0", "memory.host=17GiB"],
                "memory.host: host may hold 17.00 GiB, and this machine has 16.00 GiB",
            ),
        ] {
            assert_eq!(asked(settings), Err(said.to_owned()));
        }
        assert_eq!(asked(&["run.devices=cpu=16GiB", "memory.host=17GiB"]), Ok(()));
        assert_eq!(asked(&["run.devices=cpu,virtual:a=16GiB@0.2"]), Ok(()));
        assert_eq!(asked(&["run.devices=rtx3090=23GiB,host=64GiB"]), Ok(()));
        // Where a line was moved to while the run was under way is what counts.
        let mut moved = file(&["model.preset=smollm2-135m", "run.devices=cpu=900GiB"]);
        moved.moved.insert("cpu".to_owned(), "64MiB".parse().unwrap());
        assert!(check_lines(&moved, &moved.devices().devices, Bytes::gib(16)).is_ok());
        let settings = &["model.preset=smollm2-135m", "run.devices=virtual:a=64MiB@0.2,virtual:b=921600GiB@0.2"];
        assert!(refusal(settings).starts_with("run.devices: virtual:a and virtual:b may hold 900.00 TiB, and this"));
    }

    #[test]
    fn what_this_version_cannot_do_is_named() {
        let model = "model.preset=smollm2-135m";
        assert_eq!(
            refusal(&["model.preset=smolm2-135m", "run.devices=rtx3090"]),
            "model.preset: `smolm2-135m` is no known shape\n  hint: did you mean `smollm2-135m`?"
        );
        assert!(
            refusal(&[model, "data.sequence=1048576", "run.devices=rtx3090"])
                .starts_with("data.sequence is 1048576, but smollm2-135m takes no more than ")
        );
        assert!(
            refusal(&[model, "run.devices=rtx3090", "recipe.recompute=[\"block\", \"norms\"]"])
                .starts_with("recipe.recompute names 2 layers, the model has 30\n")
        );
    }

    #[test]
    fn devices_on_paper_are_planned_for_and_not_run_on() {
        let file = file(&["model.preset=smollm2-135m", "run.devices=rtx3070,rtx3090"]);
        let failure = Resolved::to_run(&file, Model::open(&file).unwrap(), Work::Train).unwrap_err();
        assert_eq!(
            failure.to_string(),
            "run.devices: `rtx3070` is a device on paper: nothing runs on it\n  hint: plan for it with `plimsoll plan`, or run on `cpu`"
        );
    }

    #[test]
    fn virtual_devices_leave_a_fifth_of_the_cores() {
        let checked = |devices: &str, cores| {
            let request: DevicesRequest = devices.parse().unwrap();
            check_paces(&request.devices, cores)
        };
        let three = "virtual:a=1GiB@0.3,virtual:b=1GiB@0.3,virtual:c=1GiB@0.2";
        assert!(checked(three, 1.0).is_ok());
        assert!(checked("cpu", 1.0).is_ok());
        assert_eq!(
            checked("virtual:a=1GiB,virtual:b=1GiB@0.7", 2.0).unwrap_err().to_string(),
            "run.devices: virtual devices of 1.70 cores in all; this machine gives them 1.60\n  \
             hint: that is 0.8 of its 2 cores: choose smaller paces behind the `@`"
        );
    }

    #[test]
    fn the_example_becomes_files_of_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = RunFile::load(None, &[setting("run.dir", folder.path().to_str().unwrap())]).unwrap();
        let planned = Model::open(&file).unwrap().config;
        write_example(&mut file).unwrap();
        assert_eq!(Model::open(&file).unwrap().config, planned);
        for source in file.data.train.iter().chain(&file.data.eval) {
            assert!(Path::new(source).starts_with(folder.path()) && Path::new(source).is_file(), "{source}");
        }
        assert_eq!(u64::from(file.data.sequence), sums::SEQUENCE);
    }
}
