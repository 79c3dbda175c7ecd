//! One training step, timed: the same shapes, options and figures as `torch_step.py`, so that both
//! can be run in turn.

use crate::data::Rows;
use crate::resolve::host_beside;
use crate::session::engine::{Engine, StepInput};
use plimsoll_core::{
    Budget, Bytes, DType, DeviceKind, DeviceSpec, Failure, FileSpec, HostSpec, Link, Recipe, RecomputeLevel,
};
use plimsoll_device::cuda;
use plimsoll_device::cuda::open::OnGpu;
use plimsoll_device::device::{DeviceError, Memory, Observer};
use plimsoll_device::probe::Cpu;
use plimsoll_device::{calibration, process};
use plimsoll_plan::price::needed_product_flops;
use plimsoll_plan::search::{Lossy, Pins, Question, plan_of, search};
use plimsoll_program::models::decoder::{AdamState, Base, Lora, Method, Optimizer, Source};
use plimsoll_program::models::weights::Parameter;
use plimsoll_program::models::{ModelConfig, ModelType, RopeScaling};
use plimsoll_program::{Op, Share};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The shapes and counts of a timed step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// V.
    pub vocab: u64,
    /// L.
    pub layers: u64,
    /// D.
    pub hidden: u64,
    /// H.
    pub heads: u64,
    /// K.
    pub kv_heads: u64,
    /// F.
    pub ffn: u64,
    /// T.
    pub sequence: u64,
    /// Sequences of a micro-batch.
    pub batch: u64,
    /// Micro-batches of a step.
    pub accumulate: u64,
    /// Threads that compute.
    pub threads: u32,
    /// Timed steps.
    pub steps: u64,
    /// Steps before them.
    pub warmup: u64,
    /// The arithmetic: f32, or bf16 with sums and masters in f32.
    pub dtype: DType,
    /// Whether each block is computed again in the backward pass.
    pub checkpoint: bool,
    /// The most that the arena may hold, where the recipe is then the planner's: the fastest that loses nothing.
    pub memory: Option<Bytes>,
    /// `cpu`, or a GPU by the driver's number of it: `cuda:0`.
    pub device: String,
    /// The rank of adapters on every projection (alpha is twice that), where only those are trained; 0: all is.
    pub rank: u64,
    /// How the frozen matrices beside adapters are stored.
    pub base: Base,
}

/// What was found, with the names that `torch_step.py` prints. Bytes and seconds are measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepBench {
    /// This program and its version.
    pub peer: String,
    /// The device.
    pub device: String,
    /// What its maker calls it.
    pub device_model: String,
    /// What the process held on its GPU while it ran, contexts and libraries included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_mib: Option<f64>,
    /// The arithmetic.
    pub dtype: DType,
    /// Always false: there is nothing to compile.
    pub compile: bool,
    /// Whether each block was computed again, because that was asked for.
    pub checkpoint: bool,
    /// How it was computed.
    pub recipe: Recipe,
    /// Trained parameters.
    pub parameters: u64,
    /// Tokens of an optimizer step.
    pub tokens_per_step: u64,
    /// Median of the timed steps.
    pub step_seconds_median: f64,
    /// Tokens a second at the median.
    pub tokens_per_second: f64,
    /// The most that the process held.
    pub peak_rss_mib: f64,
    /// What it held before the device was opened.
    pub import_rss_mib: f64,
    /// The difference.
    pub growth_mib: f64,
    /// The arena, as planned.
    pub arena_bytes: Bytes,
    /// The arena, as its high-water mark was measured.
    pub arena_measured_bytes: Bytes,
    /// What waits on the host beside a GPU, as planned.
    pub host_bytes: Bytes,
    /// What the planner said a step takes.
    pub predicted_step_seconds: f64,
    /// What a step can take at best: its needed products at the device's measured rate.
    pub limit_step_seconds: f64,
    /// Where the time of a step goes, by kind of op, measured in steps of their own.
    pub seconds_by_op: BTreeMap<&'static str, f64>,
}

/// Adds up the time of each kind of op.
#[derive(Clone, Default)]
struct Stopwatch {
    started: Option<Instant>,
    seconds: Arc<Mutex<BTreeMap<&'static str, f64>>>,
}

impl Observer for Stopwatch {
    fn before(&mut self, _: u32, _: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        self.started = Some(Instant::now());
        Ok(())
    }

    fn after(&mut self, _: u32, op: &Op, _: &mut dyn Memory) {
        let seconds = self.started.take().map_or(0.0, |start| start.elapsed().as_secs_f64());
        *self.seconds.lock().expect("nobody panics while adding").entry(op.name()).or_default() += seconds;
    }
}

/// Steps in which ops are timed one by one.
const OBSERVED: u64 = 3;

/// Times training steps of a model with random weights on random tokens.
///
/// # Errors
/// Shapes that make no model, or an arena that is refused.
pub fn step(shape: &StepShape) -> Result<StepBench, Failure> {
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
        qk_norm: false,
        max_positions: shape.sequence,
        bos: None,
        eos: vec![],
        init_std: 0.02,
    };
    config.validate()?;
    let (kind, device_model, rates) = match index_of(&shape.device)? {
        None => (DeviceKind::Cpu, Cpu::read().model, calibration::cpu(shape.threads)?.rates),
        Some(index) => {
            let (here, card) = cuda::open::card(index)?;
            (DeviceKind::Cuda, card.name.clone(), calibration::gpu(here, card)?.rates)
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
    // Beside a GPU whose memory is limited something may wait on the host, as in a run.
    let host = match kind {
        DeviceKind::Cuda if shape.memory.is_some() => host_beside(&device, Budget::HOST, FileSpec::NONE)?,
        _ => HostSpec::NONE,
    };
    let betas = [0.9, 0.999];
    let sequences = shape.batch * shape.accumulate;
    let mut lossy = Lossy { base: shape.base, ..Lossy::default() };
    if shape.rank > 0 {
        lossy.lora = Lora { rank: shape.rank, alpha: 2.0 * shape.rank as f64, ..lossy.lora };
        lossy.method = Method::Lora(lossy.lora.clone());
    }
    let trained = match lossy.method.lora() {
        None => config.parameters(),
        Some(lora) => lora.parameters(&config).iter().map(Parameter::elements).sum(),
    };
    let question = Question {
        config: &config,
        precision: shape.dtype,
        sequence: shape.sequence,
        sequences,
        source: Source::Random { seed: 0 },
        optimizer: Some(Optimizer::AdamW { betas, eps: 1e-8, decay: 0.01, state: AdamState::Full }),
        evaluate: false,
        generation: None,
        device: &device,
        host,
        lossy,
        pins: Pins::default(),
        rungs: vec![],
        share: Share::ALONE,
    };
    let answer = match shape.memory {
        Some(memory) => {
            let answer = search(&question);
            if !answer.plan.fits {
                let least = answer.plan.needs.first().map_or(Bytes::ZERO, |need| need.budget_bytes);
                let text = format!("no recipe holds this step in an arena of {memory}");
                let least = least.0.div_ceil(1 << 20);
                return Err(Failure::does_not_fit(text).hint(format!("--memory {least}MiB, or a smaller --batch")));
            }
            answer
        }
        None => {
            let level = if shape.checkpoint { RecomputeLevel::Block } else { RecomputeLevel::Nothing };
            plan_of(&question, &Recipe::on_device(shape.batch as u32, vec![level; shape.layers as usize]))
        }
    };
    let limit = needed_product_flops(&answer.set) * shape.accumulate as f64 / device.rates.product_flops(shape.dtype);
    let (arena_bytes, predicted) = (answer.plan.devices[0].arena_bytes, answer.plan.predicted.step_seconds);
    let (recipe, host_bytes) = (answer.plan.recipe.clone(), answer.plan.host.arena_bytes);

    let resident = |read: fn() -> std::io::Result<Bytes>| read().unwrap_or(Bytes::ZERO).as_mib();
    let _ = process::reset_peak();
    let before = resident(process::resident);
    let mut engine = Engine::open(answer, shape.dtype, &device, None, None, shape.sequence, shape.vocab)?;
    engine.run("load")?;
    engine.run("fresh")?;
    let mut seconds = Vec::new();
    let (mut peak, mut device_mib) = (0.0, None);
    let stopwatch = Stopwatch::default();
    let timed = shape.warmup + shape.steps;
    for number in 1..=timed + OBSERVED {
        if number == timed + 1 {
            peak = resident(process::peak_resident);
            device_mib = engine.gpu().and_then(OnGpu::measured).map(|(bytes, _)| bytes.as_mib());
            engine.observe(Box::new(stopwatch.clone()));
        }
        let mut rows = random_rows(shape, number);
        let start = Instant::now();
        let labelled_tokens = rows.labelled_tokens();
        let input = StepInput { step: number, learning_rate: 3e-4, betas, clip_norm: 1.0, labelled_tokens };
        engine.gradients(&mut rows, &input, 1)?;
        engine.update()?;
        if (shape.warmup + 1..=timed).contains(&number) {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let seconds_by_op = stopwatch.seconds.lock().expect("nobody panics while adding").clone();
    let stats = engine.stats();
    seconds.sort_by(f64::total_cmp);
    let middle = seconds.len() / 2;
    let median =
        if seconds.len().is_multiple_of(2) { (seconds[middle - 1] + seconds[middle]) / 2.0 } else { seconds[middle] };
    let tokens_per_step = sequences * shape.sequence;
    Ok(StepBench {
        peer: concat!("plimsoll ", env!("CARGO_PKG_VERSION")).into(),
        device: shape.device.clone(),
        device_model,
        device_mib,
        dtype: shape.dtype,
        compile: false,
        checkpoint: shape.checkpoint,
        recipe,
        parameters: trained,
        tokens_per_step,
        step_seconds_median: median,
        tokens_per_second: tokens_per_step as f64 / median,
        peak_rss_mib: peak,
        import_rss_mib: before,
        growth_mib: peak - before,
        arena_bytes,
        arena_measured_bytes: stats.arena_measured_bytes,
        host_bytes,
        predicted_step_seconds: predicted,
        limit_step_seconds: limit,
        seconds_by_op: seconds_by_op.into_iter().map(|(op, seconds)| (op, seconds / OBSERVED as f64)).collect(),
    })
}

/// The number of a GPU by its name; none for the processor.
fn index_of(device: &str) -> Result<Option<u32>, Failure> {
    match device.strip_prefix("cuda:").map(str::parse) {
        None if device == "cpu" => Ok(None),
        Some(Ok(index)) => Ok(Some(index)),
        _ => Err(Failure::input(format!("--device: `{device}` is no device to be timed")).hint("cpu, or cuda:0")),
    }
}

/// Rows of random tokens, every one of them labelled, another set for each step.
fn random_rows(shape: &StepShape, number: u64) -> Rows {
    let values = shape.batch * shape.accumulate * shape.sequence;
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut draw = || {
        // xorshift64* (Vigna 2016): nobody looks at these numbers.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as i32 % shape.vocab as i32
    };
    let mut rows = Rows::new(shape.batch * shape.accumulate, shape.sequence);
    rows.tokens = (0..values).map(|_| draw()).collect();
    rows.labels = (0..values).map(|_| draw()).collect();
    rows.positions = (0..values).map(|i| (i % shape.sequence) as i32).collect();
    rows.document_start = vec![0; values as usize];
    rows.weights = vec![1.0; values as usize];
    rows
}
