//! What is asked of the planner: a device's question and a team's, with the precision, the optimizer, the adapters, the pins,
//! the host and the scratch file that a run file says or leaves open. Who asks, and what is made of the answer, is in `plan`.

use crate::config::{Length, Method, Optimizer, RunFile, TeamOf};
use crate::resolve::Work;
use crate::resolve::example::model_is_example;
use crate::resolve::model::Model;
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Failure, FileSpec, HostSpec, Rung, counted};
use plimsoll_device::calibration;
use plimsoll_device::probe::Memory;
use plimsoll_device::{cuda, disk};
use plimsoll_plan::search::{Lossy, Pins, Question, under};
use plimsoll_plan::team::{Evaluations, TeamQuestion};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{self, Base, Generation, Lora, Source};
use plimsoll_program::models::{Target, supported};
use plimsoll_program::workspace::Kernels;
use std::path::Path;

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
        DeviceKind::Virtual | DeviceKind::Cuda => host_beside(device, budget, scratch),
    }
}

/// The host of this machine beside a device, under a budget.
pub(crate) fn host_beside(device: &DeviceSpec, budget: Budget, file: FileSpec) -> Result<HostSpec, Failure> {
    // A virtual device's own bytes are this machine's, too.
    let taken = if device.kind == DeviceKind::Virtual { device.budget } else { Bytes::ZERO };
    let free = Memory::read().free.saturating_sub(taken);
    // Beside a virtual device, a thread does what the host does.
    let threads = if device.kind == DeviceKind::Virtual { 1 } else { device.threads.max(1) };
    let memory_bytes_per_second = calibration::cpu(threads)?.rates.memory_bytes_per_second;
    let budget = budget.of(free).saturating_sub(staging(std::slice::from_ref(device)));
    Ok(HostSpec { budget, memory_bytes_per_second, file })
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
