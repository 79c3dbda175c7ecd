//! `plimsoll bench step`: times training steps of a model of given shapes. Options and figures are those of
//! `peers/torch_step.py`, so that the results can be compared.

use crate::data::Rows;
use crate::engine::{Engine, StepInput};
use crate::planning::request::{check_size, host_spec_beside};
use plimsoll_core::{
    Budget, Bytes, DType, DeviceKind, DeviceSpec, Failure, FileSpec, HostSpec, Link, Recipe, RecomputeLevel,
};
use plimsoll_device::device::{Memory, Observer};
use plimsoll_device::error::DeviceError;
use plimsoll_device::gpu::{self, GpuMonitor};
use plimsoll_device::probe::Cpu;
use plimsoll_device::{calibration, process};
use plimsoll_plan::price::required_gemm_flops;
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanOutcome, PlanRequest, plan_recipe, search};
use plimsoll_program::models::decoder::{AdamState, Base, Lora, Method, Optimizer, Scores, WeightSource};
use plimsoll_program::models::weights::Parameter;
use plimsoll_program::models::{Extras, ModelConfig, ModelType, RopeScaling};
use plimsoll_program::{Op, ProgramKind, Share};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Options of a step benchmark: shapes of the model, batch, counts of steps, and the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Vocabulary size V.
    pub vocab: u64,
    /// Number of layers.
    pub layers: u64,
    /// Hidden size D.
    pub hidden: u64,
    /// Number of attention heads H.
    pub heads: u64,
    /// Number of key-value heads K.
    pub kv_heads: u64,
    /// Feed-forward size F.
    pub ffn: u64,
    /// Tokens of a sequence T.
    pub sequence: u64,
    /// Sequences of a micro-batch B. If `memory` is set, the planner chooses the micro-batch instead.
    pub batch: u64,
    /// Micro-batches of B sequences in a step (gradient accumulation). A step has `batch` · `accumulate` sequences.
    pub accumulate: u64,
    /// Number of threads that compute on the processor.
    pub threads: u32,
    /// Number of timed steps.
    pub steps: u64,
    /// Number of untimed steps before the timed ones.
    pub warmup: u64,
    /// Precision of the computation: f32, or bf16 with accumulation and master weights in f32.
    pub dtype: DType,
    /// Whether each layer is recomputed in the backward pass (activation checkpointing). If `memory` is set, the
    /// planner chooses instead.
    pub checkpoint: bool,
    /// Most bytes of the arena. If it is set, the planner chooses the fastest lossless recipe that fits; `None` takes
    /// the recipe from `batch` and `checkpoint`.
    pub memory: Option<Bytes>,
    /// Device: `cpu`, or a GPU by the driver's index, such as `cuda:0`.
    pub device: String,
    /// Rank of LoRA adapters on all projections, with alpha twice the rank; 0 trains all parameters.
    pub rank: u64,
    /// Storage format of the frozen matrices, if adapters are trained (`rank` above 0).
    pub base: Base,
}

/// Result of a step benchmark, with the field names that `torch_step.py` prints. Bytes and seconds are measured unless
/// stated otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StepBench {
    /// Name and version of this program.
    pub peer: String,
    /// Name of the device, as the caller gave it, such as `cpu` or `cuda:0`.
    pub device: String,
    /// Product name of the processor or GPU.
    pub device_model: String,
    /// MiB that the process held on its GPU, including contexts and libraries. `None` on the processor, or if the
    /// driver does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_mib: Option<f64>,
    /// Precision of the computation.
    pub dtype: DType,
    /// Always false: this program has no compile option.
    pub compile: bool,
    /// Whether the caller requested recomputation of each block.
    pub checkpoint: bool,
    /// Recipe of the timed steps: micro-batch, recompute levels, offload.
    pub recipe: Recipe,
    /// Number of trained parameters.
    pub parameters: u64,
    /// Tokens of an optimizer step.
    pub tokens_per_step: u64,
    /// Median duration of the timed steps.
    pub step_seconds_median: f64,
    /// Tokens per second at the median duration.
    pub tokens_per_second: f64,
    /// Peak resident memory of the process.
    pub peak_rss_mib: f64,
    /// Resident memory of the process before the device was opened; for PyTorch, after the imports.
    pub import_rss_mib: f64,
    /// Peak resident memory minus resident memory before the device was opened.
    pub growth_mib: f64,
    /// Planned size of the arena.
    pub arena_bytes: Bytes,
    /// Measured use of the arena: offset just past the highest byte that was written.
    pub arena_measured_bytes: Bytes,
    /// Planned host memory for tensors that a GPU offloads; 0 without offload.
    pub host_bytes: Bytes,
    /// Step duration that the planner predicted.
    pub predicted_step_seconds: f64,
    /// Lower bound of the step duration: the necessary matrix products at the device's measured rate.
    pub limit_step_seconds: f64,
    /// Seconds per step that each kind of op takes, by the name of the op. They are measured in separate steps.
    pub seconds_by_op: BTreeMap<&'static str, f64>,
}

/// An observer of Programs that adds up the run time of each kind of op.
#[derive(Clone, Default)]
struct OpTimer {
    started: Option<Instant>,
    seconds: Arc<Mutex<BTreeMap<&'static str, f64>>>,
}

impl Observer for OpTimer {
    fn before(&mut self, _: u32, _: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        self.started = Some(Instant::now());
        Ok(())
    }

    fn after(&mut self, _: u32, op: &Op, _: &mut dyn Memory) {
        let seconds = self.started.take().map_or(0.0, |start| start.elapsed().as_secs_f64());
        *self.seconds.lock().expect("no thread panics while adding").entry(op.name()).or_default() += seconds;
    }
}

/// Number of further steps, after those of `StepShape::steps`, in which each op is timed.
const OP_TIMING_STEPS: u64 = 3;

/// AdamW's decay rates in all benchmarks.
const BETAS: [f64; 2] = [0.9, 0.999];

/// Times training steps of a model with random weights on random tokens.
///
/// # Errors
/// Invalid shapes, an unknown device, an arena that does not fit, or a device that fails.
pub fn step(shape: &StepShape) -> Result<StepBench, Failure> {
    let config = model_config(shape)?;
    let sequences = shape.batch.saturating_mul(shape.accumulate);
    check_size(&config, sequences.saturating_mul(shape.sequence))?;
    let (device, device_model) = find_device(shape)?;
    // A GPU with limited memory may offload to the host, as in a run.
    let host = match device.kind {
        DeviceKind::Cuda if shape.memory.is_some() => host_spec_beside(&device, Budget::HOST, FileSpec::NONE)?,
        _ => HostSpec::NONE,
    };
    let mut lossy = LossyOptions { base: shape.base, ..LossyOptions::default() };
    if shape.rank > 0 {
        lossy.lora = Lora { rank: shape.rank, alpha: 2.0 * shape.rank as f64, ..lossy.lora };
        lossy.method = Method::Lora(lossy.lora.clone());
    }
    let parameters = match lossy.method.lora() {
        None => config.parameters(),
        Some(lora) => lora.parameters(&config).iter().map(Parameter::elements).sum(),
    };
    let request = PlanRequest {
        config: &config,
        precision: shape.dtype,
        sequence: shape.sequence,
        sequences,
        source: WeightSource::Random { seed: 0 },
        optimizer: Some(Optimizer::AdamW { betas: BETAS, eps: 1e-8, decay: 0.01, state: AdamState::Full }),
        evaluate: false,
        scores: Scores::None,
        temperature: 1.0,
        generation: None,
        device: &device,
        host,
        lossy,
        pins: PinnedChoices::default(),
        rungs: vec![],
        share: Share::SINGLE_DEVICE,
    };
    let outcome = plan_step(shape, &request)?;
    let micro_batches = outcome.plan.recipe.micro_batches(sequences);
    let gemm_flops = required_gemm_flops(&outcome.set) * micro_batches as f64;
    let limit_step_seconds = gemm_flops / device.rates.product_flops(shape.dtype);
    let plan = outcome.plan.clone();
    let timings = time_steps(shape, outcome, &device)?;
    let tokens_per_step = sequences * shape.sequence;
    let step_seconds_median = median(timings.step_seconds);
    Ok(StepBench {
        peer: concat!("plimsoll ", env!("CARGO_PKG_VERSION")).into(),
        device: shape.device.clone(),
        device_model,
        device_mib: timings.device_mib,
        dtype: shape.dtype,
        compile: false,
        checkpoint: shape.checkpoint,
        recipe: plan.recipe,
        parameters,
        tokens_per_step,
        step_seconds_median,
        tokens_per_second: tokens_per_step as f64 / step_seconds_median,
        peak_rss_mib: timings.peak_rss_mib,
        import_rss_mib: timings.import_rss_mib,
        growth_mib: timings.peak_rss_mib - timings.import_rss_mib,
        arena_bytes: plan.devices[0].arena_bytes,
        arena_measured_bytes: timings.arena_measured_bytes,
        host_bytes: plan.host.arena_bytes,
        predicted_step_seconds: plan.predicted.step_seconds,
        limit_step_seconds,
        seconds_by_op: timings.seconds_by_op,
    })
}

/// Returns the configuration of a llama model with the shapes in `shape`. Fails if they are invalid.
fn model_config(shape: &StepShape) -> Result<ModelConfig, Failure> {
    let config = ModelConfig {
        model_type: ModelType::Llama,
        hidden: shape.hidden,
        layers: shape.layers,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.hidden / shape.heads.max(1),
        ffn: shape.ffn,
        vocab: shape.vocab,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 10000.0,
        rope_scaling: RopeScaling::None,
        qkv_bias: false,
        attention_out_bias: false,
        ffn_bias: false,
        qk_norm: None,
        max_positions: shape.sequence,
        bos: None,
        eos: vec![],
        init_std: 0.02,
        extras: Extras::default(),
    };
    config.validate()?;
    Ok(config)
}

/// Returns the specification of the benchmarked device with measured rates, and the product name of the processor or
/// GPU.
fn find_device(shape: &StepShape) -> Result<(DeviceSpec, String), Failure> {
    let (kind, device_model, rates) = match gpu_index(&shape.device)? {
        None => (DeviceKind::Cpu, Cpu::read().model, calibration::cpu(shape.threads)?.rates),
        Some(index) => {
            let (installation, gpu) = gpu::find_gpu(index)?;
            (DeviceKind::Cuda, gpu.name.clone(), calibration::gpu(installation, gpu)?.rates)
        }
    };
    let device = DeviceSpec {
        name: shape.device.clone(),
        kind,
        budget: shape.memory.unwrap_or(Bytes(u64::MAX)),
        charges: Bytes::ZERO,
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads: shape.threads,
        rates,
    };
    Ok((device, device_model))
}

/// Plans the step. If `shape.memory` is set, takes the fastest recipe that fits in it, or fails if none does. Otherwise
/// takes the recipe that `shape.batch` and `shape.checkpoint` describe.
fn plan_step(shape: &StepShape, request: &PlanRequest) -> Result<PlanOutcome, Failure> {
    let Some(memory) = shape.memory else {
        let level = if shape.checkpoint { RecomputeLevel::Block } else { RecomputeLevel::Nothing };
        return Ok(plan_recipe(request, &Recipe::on_device(shape.batch as u32, vec![level; shape.layers as usize])));
    };
    let outcome = search(request);
    if outcome.plan.fits {
        return Ok(outcome);
    }
    let least = outcome.plan.needs.first().map_or(Bytes::ZERO, |remedy| remedy.budget_bytes);
    let text = format!("no recipe holds this step in an arena of {memory}");
    let least = least.0.div_ceil(1 << 20);
    Err(Failure::does_not_fit(text).hint(format!("--memory {least}MiB, or a smaller --batch")))
}

/// Step times, op times and memory that [`time_steps`] measures.
struct Timings {
    step_seconds: Vec<f64>,
    seconds_by_op: BTreeMap<&'static str, f64>,
    import_rss_mib: f64,
    peak_rss_mib: f64,
    device_mib: Option<f64>,
    arena_measured_bytes: Bytes,
}

/// Opens the device and runs warm-up steps, timed steps, and steps in which each op is timed.
fn time_steps(shape: &StepShape, outcome: PlanOutcome, device: &DeviceSpec) -> Result<Timings, Failure> {
    let rss_mib = |read: fn() -> std::io::Result<Bytes>| read().unwrap_or(Bytes::ZERO).as_mib();
    let _ = process::reset_peak();
    let import_rss_mib = rss_mib(process::resident);
    let mut engine = Engine::open(outcome, shape.dtype, device, None, None, shape.sequence, shape.vocab)?;
    engine.run(ProgramKind::Load)?;
    engine.run(ProgramKind::InitOptimizer)?;
    let mut step_seconds = Vec::new();
    let (mut peak_rss_mib, mut device_mib) = (0.0, None);
    let op_timer = OpTimer::default();
    let last_timed = shape.warmup + shape.steps;
    for number in 1..=last_timed + OP_TIMING_STEPS {
        if number == last_timed + 1 {
            peak_rss_mib = rss_mib(process::peak_resident);
            device_mib = engine.gpu().and_then(GpuMonitor::measured_bytes).map(|(bytes, _)| bytes.as_mib());
            engine.observe(Box::new(op_timer.clone()));
        }
        let mut rows = random_rows(shape, number);
        let start = Instant::now();
        let loss_divisor = rows.labelled_tokens();
        let input = StepInput { step: number, learning_rate: 3e-4, betas: BETAS, clip_norm: 1.0, loss_divisor };
        engine.gradients(&mut rows, &input, 1)?;
        engine.update()?;
        if (shape.warmup + 1..=last_timed).contains(&number) {
            step_seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let seconds_by_op = op_timer.seconds.lock().expect("no thread panics while adding").clone();
    let per_step = |(op, seconds)| (op, seconds / OP_TIMING_STEPS as f64);
    Ok(Timings {
        step_seconds,
        seconds_by_op: seconds_by_op.into_iter().map(per_step).collect(),
        import_rss_mib,
        peak_rss_mib,
        device_mib,
        arena_measured_bytes: engine.stats().arena_measured_bytes,
    })
}

/// Returns the median of at least one value.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) { (values[middle - 1] + values[middle]) / 2.0 } else { values[middle] }
}

/// Returns the index of the GPU that `device` names, such as 0 for `cuda:0`; `None` for `cpu`. Another name is an
/// error.
fn gpu_index(device: &str) -> Result<Option<u32>, Failure> {
    match device.strip_prefix("cuda:").map(str::parse) {
        None if device == "cpu" => Ok(None),
        Some(Ok(index)) => Ok(Some(index)),
        _ => Err(Failure::input(format!("--device: `{device}` is no device to be timed")).hint("cpu, or cuda:0")),
    }
}

/// Returns the sequences of step `step`, with a random token and a random label at every position. They differ from
/// step to step.
fn random_rows(shape: &StepShape, step: u64) -> Rows {
    let values = shape.batch * shape.accumulate * shape.sequence;
    let mut state = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut rows = Rows::new(shape.batch * shape.accumulate, shape.sequence);
    rows.tokens = (0..values).map(|_| next_token(&mut state, shape.vocab)).collect();
    rows.labels = (0..values).map(|_| next_token(&mut state, shape.vocab)).collect();
    rows.positions = (0..values).map(|i| (i % shape.sequence) as i32).collect();
    rows.document_start = vec![0; values as usize];
    rows.weights = vec![1.0; values as usize];
    rows
}

/// Draws a random token id below `vocab`, and advances the state of the random number generator.
fn next_token(state: &mut u64, vocab: u64) -> i32 {
    // xorshift64* (Vigna 2016); its quality suffices for timing.
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as i32 % vocab as i32
}
