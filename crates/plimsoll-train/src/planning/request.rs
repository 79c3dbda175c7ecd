//! Requests to the planner: for one device and for a team. They state the precision, optimizer, adapters, pinned
//! choices, host and scratch file that a run file sets or leaves open. [`Planner`](super::planner::Planner) makes plans
//! of them.

use crate::config::{Length, MAX_BATCH_TOKENS, Method, Objective, Optimizer, ParallelismChoice, RunConfig};
use crate::resolve::example::model_is_example;
use crate::resolve::model::Model;
use crate::resolve::nominal::{self, plannable_memory};
use crate::resolve::{RunRequest, Workload};
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Failure, FileSpec, HostSpec, Rung, format_count};
use plimsoll_device::calibration;
use plimsoll_device::probe::Memory;
use plimsoll_device::{cuda, disk};
use plimsoll_plan::device_request::DevicesRequest;
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest, with_lossy};
use plimsoll_plan::team::{EvaluationSchedule, TeamConstraint, TeamRequest};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{self, Base, Generation, Lora, Scores, WeightSource};
use plimsoll_program::models::{ModelConfig, check_supported};
use plimsoll_program::workspace::Kernels;
use std::collections::BTreeMap;
use std::path::Path;

/// Number of prompt tokens that one run of the prefill Program processes.
const CHUNK_TOKENS: u64 = 64;
/// The most bytes of activations that a step may have if nothing is saved. Sums of several such sizes fit in 64 bits.
const MAX_ACTIVATION_BYTES: u128 = 1 << 62;

/// Returns the request to plan `work` on one device.
///
/// # Errors
/// The run file fixes choices that do not match the model, or the device has no kernels for the model.
pub(crate) fn plan_request<'a>(
    run: &RunRequest,
    model: &'a Model,
    device: &'a DeviceSpec,
    work: Workload,
) -> Result<PlanRequest<'a>, Failure> {
    let precision = run.arithmetic(device.kind);
    check_supported(&model.config, precision, Kernels::for_device(device))?;
    check_size(&model.config, run.batch_sequences() * u64::from(run.data.sequence))?;
    let train = work == Workload::Train;
    // Other objectives evaluate by scores or samples.
    let evaluates = run.train.objective == Objective::Supervised && !run.data.eval.is_empty();
    let rungs = run.train.rungs.as_deref().unwrap_or_default();
    let request = PlanRequest {
        config: &model.config,
        precision,
        sequence: u64::from(run.data.sequence),
        sequences: run.batch_sequences(),
        source: model.source(run),
        optimizer: train.then(|| optimizer(run)),
        evaluate: work == Workload::Evaluate || train && evaluates,
        scores: if train { run.scores() } else { Scores::None },
        temperature: if run.train.objective == Objective::Grpo { run.grpo.temperature } else { 1.0 },
        generation: match work {
            Workload::Train => sample_generation(run, model),
            Workload::Evaluate => None,
            Workload::Generate(generation) => Some(generation),
        },
        device,
        host: host_spec(run, device)?,
        lossy: lossy_options(run, model, work),
        pins: pinned_choices(run, model.config.layers as usize)?,
        rungs: vec![],
        share: Share::SINGLE_DEVICE,
    };
    Ok(with_lossy(&request, rungs))
}

/// Checks that a step of `tokens` tokens is so small that no size in planning overflows. Planning adds and multiplies sizes
/// without further checks.
///
/// # Errors
/// A step has too many tokens for the model.
pub(crate) fn check_size(config: &ModelConfig, tokens: u64) -> Result<(), Failure> {
    // A generous count of f64 values for each token, with their gradients.
    let layer = 16 * config.hidden + 8 * config.ffn + 16 * config.heads * config.head_dim;
    let token_bytes = 16 * (u128::from(config.layers) * u128::from(layer) + u128::from(config.vocab));
    if tokens <= MAX_BATCH_TOKENS && token_bytes * u128::from(tokens) < MAX_ACTIVATION_BYTES {
        return Ok(());
    }
    let message = format!("a step of {} is too large for this model", format_count(tokens, "token"));
    Err(Failure::input(message).hint("take fewer tokens in a step (train.batch_tokens)"))
}

/// Returns the request to plan a share of a training run on one device. `share` is the part of the model that the
/// device holds, `sequences` the number of sequences of each step that it computes.
///
/// # Errors
/// Those of [`plan_request`].
pub(crate) fn share_request<'a>(
    run: &RunRequest,
    model: &'a Model,
    device: &'a DeviceSpec,
    share: &Share,
    sequences: u64,
) -> Result<PlanRequest<'a>, Failure> {
    Ok(plan_request(run, model, device, Workload::Train)?.for_share(share, sequences))
}

/// Removes the scratch file from the requests if there are several, because each device would count on the whole file.
///
/// # Errors
/// The user asked for a scratch file.
fn forbid_shared_scratch(run: &RunRequest, requests: &mut [PlanRequest]) -> Result<(), Failure> {
    if requests.len() > 1 {
        if run.scratch_budget().is_some() {
            let message = "several devices cannot share one scratch file";
            return Err(Failure::input(message).hint("name one device, or leave out memory.file and `file=`"));
        }
        requests.iter_mut().for_each(|request| request.host.file = FileSpec::NONE);
    }
    Ok(())
}

/// Returns the request to plan a training run on several devices together.
///
/// # Errors
/// Those of `plan_request`, or the user asks for a scratch file for several devices.
pub(crate) fn team_request<'a>(
    run: &RunRequest,
    model: &'a Model,
    devices: &'a [DeviceSpec],
) -> Result<TeamRequest<'a>, Failure> {
    let mut requests: Vec<PlanRequest> =
        devices.iter().map(|device| plan_request(run, model, device, Workload::Train)).collect::<Result<_, _>>()?;
    // The precision belongs to the experiment, so all devices have the same.
    let precision = requests[0].precision;
    requests.iter_mut().for_each(|request| request.precision = precision);
    forbid_shared_scratch(run, &mut requests)?;
    for (number, request) in requests.iter_mut().enumerate().filter(|(_, request)| request.host != HostSpec::NONE) {
        if request.device.kind != DeviceKind::Paper {
            // The budgets of the other devices in this process are not free for offloaded tensors.
            let others = devices.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, device)| device);
            let others: Bytes = others.filter(|device| device.in_process()).map(|device| device.budget).sum();
            let free = plannable_memory(run).saturating_sub(others);
            request.host.budget = request.host.budget.min(free);
        }
    }
    // Each request has subtracted the staging buffers of its own device only.
    let mut hosts: BTreeMap<Option<&str>, Bytes> = BTreeMap::new();
    for PlanRequest { device, host, .. } in &requests {
        let line = hosts.entry(device.remote_host()).or_default();
        *line = (*line).max(host.budget + staging_bytes(std::slice::from_ref(*device)));
    }
    let host = hosts.into_values().sum::<Bytes>().saturating_sub(staging_bytes(devices));
    let all = run.run.parallelism == ParallelismChoice::All;
    let pinned = run.run.parallelism.pinned().filter(|_| devices.len() > 1);
    let constraint = pinned.map(TeamConstraint::Parallelism);
    Ok(TeamRequest {
        devices: requests,
        host,
        require_all: all,
        constraint,
        evaluations: evaluation_schedule(run, None),
    })
}

/// Returns how often a run evaluates by a Program of its own, and on how many rows. Returns `None` without evaluation data,
/// and for an objective that evaluates by scores, which only the training devices do. The interval is 0 for a run
/// that evaluates only at its end. `rows` is `None` until the evaluation data have been read.
pub(crate) fn evaluation_schedule(run: &RunConfig, rows: Option<u64>) -> Option<EvaluationSchedule> {
    let ends_before = matches!(run.length(), Some(Length::Steps(steps)) if run.train.eval_every >= steps);
    let every = if ends_before { 0 } else { run.train.eval_every };
    let evaluates = run.train.objective == Objective::Supervised && !run.data.eval.is_empty();
    evaluates.then_some(EvaluationSchedule { every, rows })
}

/// Returns the training method and the adapters of a run, and the lossy rungs (steps of the memory ladder that change
/// results) that the planner may take or propose. If the run file fixes the rungs (`train.rungs`), it may do neither.
fn lossy_options(run: &RunConfig, model: &Model, work: Workload) -> LossyOptions {
    let lora = adapters(run, model);
    let adapters = match work {
        Workload::Train => run.train.method == Method::Lora,
        Workload::Evaluate | Workload::Generate(_) => model.adapter.is_some(),
    };
    let method = if adapters { decoder::Method::Lora(lora.clone()) } else { decoder::Method::Full };
    let undecided = run.train.rungs.is_none();
    let offer = Rung::ALL.into_iter().filter(|_| undecided).collect::<Vec<_>>();
    let allow = run.memory.allow.iter().copied().filter(|rung| offer.contains(rung)).collect();
    LossyOptions { method, base: Base::Plain, allow, offer, lora }
}

/// Returns the adapters that the run trains, or would train if the planner chose LoRA.
fn adapters(run: &RunConfig, model: &Model) -> Lora {
    let RunConfig { lora, train, .. } = run;
    if let Some(adapter) = &model.adapter {
        return adapter.lora(lora.dropout, train.seed);
    }
    let source = WeightSource::Random { seed: train.seed };
    let adapters = model.adapter_config(run).lora(&model.config, train.seed, source);
    adapters.expect("the settings of new adapters are checked when the model is opened")
}

/// Returns the sizes for the text samples of a training run, or for the completions that it samples: the capacity of the key-value cache, and the length of one
/// chunk of the prompt, both in tokens. Returns `None` without a tokenizer or without evaluation data.
fn sample_generation(run: &RunRequest, model: &Model) -> Option<Generation> {
    if run.train.objective == Objective::Grpo {
        // With tokens of an earlier prompt in the cache, the last chunk of a prompt may begin at any place.
        let capacity = (u64::from(run.data.sequence) + CHUNK_TOKENS).next_multiple_of(CHUNK_TOKENS);
        let slots = run.recipe.slots.map(u64::from).or(run.slots).unwrap_or(1);
        return run.samples_completions().then_some(Generation { slots, capacity, chunk: CHUNK_TOKENS });
    }
    let has_tokenizer = model.tokenizer().is_some() || model_is_example(run);
    let sequence = u64::from(run.data.sequence);
    let chunk = sequence.min(CHUNK_TOKENS);
    let generation = Generation { slots: 1, capacity: sequence.min(512).next_multiple_of(chunk), chunk };
    (has_tokenizer && !run.data.eval.is_empty()).then_some(generation)
}

/// Returns the optimizer of a run file in the form that Programs are built from.
fn optimizer(run: &RunConfig) -> decoder::Optimizer {
    let train = &run.train;
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

/// Returns the choices that the section `[recipe]` of the run file fixes for the planner. The model has `layers`
/// layers.
///
/// # Errors
/// The section names another number of recompute levels than 1 or `layers`.
fn pinned_choices(run: &RunConfig, layers: usize) -> Result<PinnedChoices, Failure> {
    let levels = &run.recipe.recompute;
    let recompute = match levels.len() {
        0 => None,
        1 => Some(vec![levels[0]; layers]),
        given if given == layers => Some(levels.clone()),
        given => {
            let message = format!("recipe.recompute names {}, the model has {layers}", format_count(given, "layer"));
            return Err(Failure::input(message).hint("name one level for all layers, or one for each"));
        }
    };
    Ok(PinnedChoices { micro_batch: run.recipe.micro_batch, recompute, offload: None })
}

/// Assumed bandwidth of host memory beside a paper device: two channels of DDR5 at less than half their rate.
const PAPER_HOST_BYTES_PER_SECOND: f64 = 30e9;

/// Returns the host memory and scratch file to which a device may offload tensors. A remote device has neither. A CPU
/// device has only the scratch file. A paper device has as much of both as the user names.
pub(crate) fn host_spec(run: &RunRequest, device: &DeviceSpec) -> Result<HostSpec, Failure> {
    let budget = run.host_budget();
    if device.remote_host().is_some() && device.kind != DeviceKind::Paper {
        // Remote devices do not offload.
        return Ok(HostSpec::NONE);
    }
    let scratch = scratch_spec(run, device.kind)?;
    match device.kind {
        DeviceKind::Cpu => Ok(HostSpec { file: scratch, ..HostSpec::NONE }),
        DeviceKind::Paper => Ok(paper_host(&run.devices(), device, scratch)),
        DeviceKind::Virtual | DeviceKind::Cuda if run.nominal => {
            let rate = nominal::HOST_BYTES_PER_SECOND;
            Ok(host_spec_of(device, budget, scratch, plannable_memory(run), rate))
        }
        DeviceKind::Virtual | DeviceKind::Cuda => host_spec_beside(device, budget, scratch),
    }
}

/// Returns the host memory for the offloaded tensors of a paper device: the amount that the device list states for its
/// machine, else none. If none is stated, a remedy may propose host memory on the machine of the first device only:
/// over Ray, that machine starts the run, and the others do not offload.
fn paper_host(requested: &DevicesRequest, device: &DeviceSpec, file: FileSpec) -> HostSpec {
    let machine = device.remote_host();
    let is_of_run = requested.devices.first().is_none_or(|first| first.machine() == machine);
    match requested.host_of(machine) {
        None if !is_of_run => HostSpec { file, ..HostSpec::NONE },
        given => HostSpec {
            budget: given.map_or(Bytes::ZERO, |budget| budget.load_line(Bytes::ZERO)),
            memory_bytes_per_second: PAPER_HOST_BYTES_PER_SECOND,
            file,
        },
    }
}

/// Returns the host memory of this machine that an accelerator may use under `budget`, with its measured bandwidth. The
/// result also holds the scratch file `file`.
pub(crate) fn host_spec_beside(device: &DeviceSpec, budget: Budget, file: FileSpec) -> Result<HostSpec, Failure> {
    // For a virtual device, one thread does the work of the host.
    let threads = if device.kind == DeviceKind::Virtual { 1 } else { device.threads.max(1) };
    let memory_bytes_per_second = calibration::cpu(threads)?.rates.memory_bytes_per_second;
    Ok(host_spec_of(device, budget, file, Memory::read().free, memory_bytes_per_second))
}

/// Returns the host memory that an accelerator may use under `budget`, on a machine with `memory` to plan with.
fn host_spec_of(
    device: &DeviceSpec,
    budget: Budget,
    file: FileSpec,
    memory: Bytes,
    memory_bytes_per_second: f64,
) -> HostSpec {
    // The memory of a virtual device is memory of this machine, too.
    let taken = if device.kind == DeviceKind::Virtual { device.budget } else { Bytes::ZERO };
    let line = budget.load_line(memory.saturating_sub(taken));
    let budget = line.saturating_sub(staging_bytes(std::slice::from_ref(device)));
    HostSpec { budget, memory_bytes_per_second, file }
}

/// Largest fraction of the free disk space that the planner proposes for the scratch file. The rest is for checkpoints
/// and other programs.
const DISK_SHARE: f64 = 0.8;

/// Returns the space and speed of the scratch file on a device of this kind. Disk rates are measured only if the user
/// asked for a scratch file. For a paper device, the space is the one that the user names, or none.
fn scratch_spec(run: &RunRequest, kind: DeviceKind) -> Result<FileSpec, Failure> {
    let given = run.scratch_budget();
    if kind == DeviceKind::Paper {
        let budget = given.map_or(Bytes::ZERO, |budget| budget.load_line(Bytes::ZERO));
        return Ok(FileSpec { budget, available: Bytes(u64::MAX), ..FileSpec::NONE });
    }
    if let Some(folder) = run.memory.file_dir.as_ref().filter(|folder| given.is_some() && !Path::new(folder).is_dir()) {
        return Err(Failure::input(format!("memory.file_dir: {folder} is no folder"))
            .hint("create it, or mount the disk that it is on: the scratch file is created nowhere else"));
    }
    let folder = run.scratch_file_folder();
    let free = disk::free(folder).unwrap_or(Bytes::ZERO);
    let (budget, available) =
        (given.map_or(Bytes::ZERO, |budget| budget.load_line(free)), Budget::Share(DISK_SHARE).load_line(free));
    let measured = given.filter(|_| !run.nominal).and_then(|_| calibration::disk(folder));
    let spec = FileSpec { budget, available, ..FileSpec::NONE };
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

/// Returns the bytes of pinned host memory that the GPUs of this machine among `devices` use outside the host arena.
/// The load line of the host covers both.
pub(crate) fn staging_bytes(devices: &[DeviceSpec]) -> Bytes {
    let gpus = devices.iter().filter(|device| device.kind == DeviceKind::Cuda && device.remote_host().is_none());
    gpus.map(|_| Bytes(cuda::staging::STAGING_BYTES)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::Resolved;
    use crate::resolve::tests::run_request;

    #[test]
    fn step_too_large_for_a_model_is_refused() {
        let config = plimsoll_program::models::preset("llama-3.1-8b").expect("listed");
        assert_eq!(check_size(&config, 1 << 31), Ok(()));
        let huge = ModelConfig { ffn: 1 << 22, hidden: 1 << 6, layers: 1 << 12, ..config.clone() };
        let failure = check_size(&huge, 1 << 31).unwrap_err();
        assert!(failure.to_string().starts_with("a step of 2147483648 tokens is too large"));
        assert!(check_size(&config, u64::MAX).is_err());
    }

    #[test]
    fn each_machine_on_paper_has_its_own_host() {
        let hosts = |devices: &str| {
            let run = run_request(&["model.preset=smollm2-135m", &format!("run.devices={devices}")]);
            let (model, devices) = (Model::open(&run).unwrap(), crate::resolve::resolve_devices(&run).unwrap());
            let team = team_request(&run, &model, &devices).unwrap();
            (team.devices.iter().map(|request| request.host.budget).collect::<Vec<_>>(), team.host)
        };
        let gib = |each: &[u64], all| (each.iter().map(|gib| Bytes::gib(*gib)).collect(), Bytes::gib(all));
        let named = "pc1/2xrtx3090,pc1/host=64GiB,pc2/rtx3070,pc2/host=32GiB";
        assert_eq!(hosts(named), gib(&[64, 64, 32], 96));
        assert_eq!(hosts("pc1/rtx3090,pc1/host=64GiB,pc2/rtx3070"), gib(&[64, 0], 64));
        assert_eq!(hosts("2xrtx3090,host=64GiB"), gib(&[64, 64], 64));
    }

    #[test]
    fn recompute_levels_must_match_layer_count() {
        let run = run_request(&[
            "model.preset=smollm2-135m",
            "run.devices=rtx3090",
            "recipe.recompute=[\"block\", \"norms\"]",
        ]);
        let resolved = Resolved::new(&run, Model::open(&run).unwrap()).unwrap();
        let failure = plan_request(&run, &resolved.model, &resolved.device, Workload::Train).map(|_| ()).unwrap_err();
        assert_eq!(failure.exit as i32, 2);
        assert!(failure.to_string().starts_with("recipe.recompute names 2 layers, the model has 30\n"));
    }
}
