//! Rates of each kind of op on a device: matrix products of many sizes, and the training step of a small reference
//! model, timed op by op on the executor itself. Only the sizes differ between devices.

use super::BenchError;
use super::timing::{OpenDevice, TimingDevice, add_program, median, repeated_program, separate_placement};
use crate::device::{Memory, NoFiles, Observer, ProgramCall};
use crate::error::DeviceError;
use plimsoll_core::{Category, DType, OpRates, RecomputeLevel};
use plimsoll_program::builder::Builder;
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Lora, Method, Optimizer, Scores, Training, WeightSource, build,
};
use plimsoll_program::models::{Extras, ModelConfig, ModelType, QkNorm, RopeScaling, Target};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Op, OpKind, Operand, ProgramKind, ProgramSet, TensorId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Minimum time for which the matrix product of each size is repeated. The median time of the repetitions counts.
const MIN_TIME_PER_SIZE: Duration = Duration::from_millis(1);
/// Number of training steps that the reference model runs. The first one is a warm-up and is not counted.
const REFERENCE_STEPS: u32 = 3;

/// Sizes of the timed matrix products, and of the small reference model whose training step is timed op by op. They
/// should saturate a device: smaller ones would measure launch overhead, larger ones would add nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    /// The four values that each of m, n and k of the timed products takes, ascending. All 64 combinations are timed.
    pub sizes: [u64; 4],
    /// Number of times that a matrix product runs in one timed round.
    pub repeat: u32,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    ffn: u64,
    vocab: u64,
    sequence: u64,
    micro_batch: u64,
}

impl Scale {
    /// Sizes for CPUs.
    pub const PROCESSOR: Scale = Scale {
        sizes: [8, 48, 256, 1024],
        repeat: 1,
        hidden: 256,
        heads: 4,
        kv_heads: 2,
        ffn: 768,
        vocab: 4096,
        sequence: 256,
        micro_batch: 4,
    };

    /// Sizes for GPUs.
    pub const GPU: Scale = Scale {
        sizes: [16, 128, 1024, 4096],
        repeat: 8,
        hidden: 2048,
        heads: 16,
        kv_heads: 4,
        ffn: 5632,
        vocab: 8192,
        sequence: 1024,
        micro_batch: 4,
    };

    /// Sizes for CPUs with little free memory; a measurement needs some 10 MiB.
    pub const SMALL: Scale = Scale {
        sizes: [8, 48, 192, 512],
        repeat: 1,
        hidden: 128,
        heads: 2,
        kv_heads: 1,
        ffn: 384,
        vocab: 1024,
        sequence: 128,
        micro_batch: 2,
    };

    /// Sizes for devices that have almost no memory, or are so slow that the other sizes would take minutes.
    pub const TINY: Scale = Scale {
        sizes: [4, 8, 16, 32],
        repeat: 1,
        hidden: 32,
        heads: 2,
        kv_heads: 1,
        // Gate and up together have just enough elements for 8-bit optimizer state.
        ffn: 64,
        vocab: 64,
        sequence: 16,
        micro_batch: 2,
    };
}

/// The device whose ops are to be timed.
pub(super) struct OpRateSubject<'a> {
    /// Kernels of the device, which determine the workspaces of ops.
    pub kernels: Kernels,
    /// Element type of the weights and activations.
    pub precision: DType,
    /// Sizes of the timed ops, large enough to saturate the device.
    pub scale: Scale,
    /// Function that opens the device.
    pub open: &'a OpenDevice<'a>,
}

/// Measures the rates of matrix products of many sizes and of all other ops of a training step. A CPU takes about a
/// second.
///
/// # Errors
/// Memory or threads are refused, or the device fails.
pub(super) fn measure(subject: &OpRateSubject) -> Result<OpRates, BenchError> {
    let sizes = subject.scale.sizes;
    let shapes: Vec<[u64; 3]> =
        sizes.iter().flat_map(|&m| sizes.iter().flat_map(move |&n| sizes.map(|k| [m, n, k]))).collect();
    let seconds = time_products(subject, &shapes, subject.scale.repeat, MIN_TIME_PER_SIZE, &mut || {})?;
    let rate = |([m, n, k], rounds): (&[u64; 3], &Vec<f64>)| 2.0 * (m * n * k) as f64 / median(rounds);
    let product_flops = shapes.iter().zip(&seconds).map(rate).collect();
    Ok(OpRates { product_sizes: sizes.to_vec(), product_flops, other_ops: reference_step(subject)?, bf16: None })
}

/// Times matrix products of the shapes `[m, n, k]` with right operands stored `[n, k]`, like weights. Runs rounds of
/// `repeat` products for about `each` per shape, and returns by shape the seconds of one product in each round. Calls
/// `ready` right before the first measurement.
///
/// # Errors
/// The errors of [`measure`].
pub(super) fn time_products(
    subject: &OpRateSubject,
    shapes: &[[u64; 3]],
    repeat: u32,
    each: Duration,
    ready: &mut dyn FnMut(),
) -> Result<Vec<Vec<f64>>, BenchError> {
    let most = |size: fn(&[u64; 3]) -> u64| shapes.iter().map(size).max().unwrap_or(1);
    let sides = [most(|[m, _, k]| m * k), most(|[_, n, k]| n * k), most(|[m, n, _]| m * n)];
    let mut builder = Builder::new(subject.precision, subject.kernels);
    let [a, b, out] = [("a", sides[0]), ("b", sides[1]), ("out", sides[2])]
        .map(|(name, elements)| builder.persistent(name, &[elements], subject.precision, Category::Weight, 1));
    // All sizes share one workspace, as large as the largest needs.
    let needs = |[m, n, k]: &[u64; 3]| subject.kernels.product_workspace(subject.precision, *m, *n, *k);
    let scratch = builder.workspace("scratch", shapes.iter().map(needs).max().unwrap_or(0), 1);
    let mut programs = Vec::new();
    for &[m, n, k] in shapes {
        let op = OpKind::Product {
            a: Operand::whole(a),
            b: Operand::whole(b),
            out: Operand::whole(out),
            bias: None,
            residual: None,
            workspace: Operand::whole(scratch),
            m,
            n,
            k,
            a_transposed: false,
            b_transposed: true,
            a_stride: k,
            out_stride: n,
            scale: 1.0,
            accumulate: false,
        };
        programs.push(add_program(&mut builder.set, repeated_program(vec![op.into()], repeat)));
    }
    let mut trial = TimingDevice::open(subject.open, builder.set, subject.precision, out)?;
    trial.fill_with_values(a, subject.precision, sides[0]);
    trial.fill_with_values(b, subject.precision, sides[1]);
    ready();
    let mut all = Vec::new();
    for program in programs {
        let rounds = trial.time_rounds(program, each)?;
        all.push(rounds.into_iter().map(|seconds| seconds / f64::from(repeat)).collect());
    }
    Ok(all)
}

/// An observer that sums the work and the seconds of ops, by op name. The work is the operations of an op's matrix
/// products; for ops without products, the bytes moved.
#[derive(Clone)]
struct OpTimer {
    set: Arc<ProgramSet>,
    started: Instant,
    is_counting: Arc<Mutex<bool>>,
    sums: Arc<Mutex<BTreeMap<&'static str, (f64, f64)>>>,
}

impl Observer for OpTimer {
    fn before(&mut self, _: u32, _: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        self.started = Instant::now();
        Ok(())
    }

    fn after(&mut self, _: u32, op: &Op, _: &mut dyn Memory) {
        let seconds = self.started.elapsed().as_secs_f64();
        if !*self.is_counting.lock().expect("no thread panics while holding the lock") {
            return;
        }
        let elements_of = |id: TensorId| self.set.tensor(id).elements();
        let dtype_of = |id: TensorId| self.set.tensor(id).dtype;
        let flops = op.cost().product_flops;
        let work = if flops > 0.0 { flops } else { op.bytes_moved(&elements_of, &dtype_of) as f64 };
        let mut sums = self.sums.lock().expect("no thread panics while holding the lock");
        let sum = sums.entry(op.name()).or_default();
        *sum = (sum.0 + work, sum.1 + seconds);
    }
}

/// A variant of the reference training step: full or LoRA training, plain or quantized base weights, optimizer state,
/// and the Programs to run.
struct ReferenceForm {
    method: Method,
    base: Base,
    state: AdamState,
    programs: &'static [ProgramKind],
}

/// Returns variants of the reference step that together contain all kinds of training ops: full training, its update
/// with 8-bit Adam moments, and LoRA with dropout on nf4 base weights.
fn reference_forms() -> [ReferenceForm; 3] {
    let step = &[
        ProgramKind::BeginStep,
        ProgramKind::Forward,
        ProgramKind::Backward,
        ProgramKind::GradientNorm,
        ProgramKind::Update,
    ];
    let update = &[ProgramKind::BeginStep, ProgramKind::GradientNorm, ProgramKind::Update];
    let targets = Target::ALL.into_iter().collect();
    let lora = Lora {
        rank: 8,
        alpha: 16.0,
        rank_stabilized: false,
        dropout: 0.05,
        targets,
        modules: None,
        seed: 1,
        source: WeightSource::Random { seed: 1 },
    };
    let full = |state, programs| ReferenceForm { method: Method::Full, base: Base::Plain, state, programs };
    [
        full(AdamState::Full, step),
        full(AdamState::Blockwise8, update),
        ReferenceForm { method: Method::Lora(lora), base: Base::Nf4, state: AdamState::Full, programs: step },
    ]
}

/// Returns work per second by op name, without the op `product`: operations for attention, bytes moved for other ops.
/// An op in several variants of [`reference_forms`] has the rate of the first. Ops that cannot run on the device may be
/// missing.
fn reference_step(subject: &OpRateSubject) -> Result<BTreeMap<String, f64>, BenchError> {
    let mut rates = BTreeMap::new();
    for (number, form) in reference_forms().into_iter().enumerate() {
        match reference_step_rates(subject, form) {
            Ok(found) => {
                for (op, rate) in found {
                    rates.entry(op).or_insert(rate);
                }
            }
            // If an op of a special form cannot run, the rates of the other ops are still returned.
            Err(BenchError::Device(error)) if number > 0 && !error.is_device_lost() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(rates)
}

/// Runs one variant of the reference step. Returns the speed of each op except `product`, by its name: operations per
/// second for attention, bytes moved per second for other ops.
fn reference_step_rates(subject: &OpRateSubject, form: ReferenceForm) -> Result<BTreeMap<String, f64>, BenchError> {
    let scale = subject.scale;
    let config = ModelConfig {
        model_type: ModelType::Qwen3,
        hidden: scale.hidden,
        layers: 1,
        heads: scale.heads,
        kv_heads: scale.kv_heads,
        head_dim: scale.hidden / scale.heads,
        ffn: scale.ffn,
        vocab: scale.vocab,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::None,
        qkv_bias: false,
        attention_out_bias: false,
        ffn_bias: false,
        qk_norm: Some(QkNorm::PerHead),
        max_positions: scale.sequence,
        bos: None,
        eos: vec![],
        init_std: 0.02,
        extras: Extras::default(),
    };
    let set = build(&BuildOptions {
        config: &config,
        layers: 0..config.layers,
        precision: subject.precision,
        kernels: subject.kernels,
        sequence: scale.sequence,
        micro_batch: scale.micro_batch,
        source: WeightSource::Random { seed: 1 },
        method: form.method,
        base: form.base,
        streamed_head: false,
        training: Some(Training {
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: form.state },
            recompute: vec![RecomputeLevel::Nothing],
        }),
        evaluate: false,
        scores: Scores::None,
        temperature: 1.0,
        generation: None,
        files: true,
    });
    let find = |name: &str| set.find(name).expect("a training program set has this input");
    let (tokens, labels) = (find("train.tokens"), find("train.labels"));
    let (positions, starts) = (find("train.positions"), find("train.document_start"));
    let weights = find("train.token_weights");
    let mut device = (subject.open)(set.clone(), separate_placement(&set), subject.precision)?;
    let (is_counting, sums) = (Arc::new(Mutex::new(false)), Arc::new(Mutex::new(BTreeMap::new())));
    let timer = OpTimer {
        set: Arc::new(set),
        started: Instant::now(),
        is_counting: Arc::clone(&is_counting),
        sums: Arc::clone(&sums),
    };
    let (rows, sequence, vocab) =
        ((scale.micro_batch * scale.sequence) as i32, scale.sequence as i32, scale.vocab as i32);
    let ids: Vec<i32> = (0..rows).map(|i| (i * 131) % vocab).collect();
    device.run(ProgramKind::Load)?;
    device.run(ProgramKind::InitOptimizer)?;
    for step in 0..REFERENCE_STEPS {
        *is_counting.lock().expect("no thread panics while holding the lock") = step > 0;
        device.write(tokens, 0, bytemuck::cast_slice(&ids));
        device.write(labels, 0, bytemuck::cast_slice(&ids));
        device.write(positions, 0, bytemuck::cast_slice(&(0..rows).map(|i| i % sequence).collect::<Vec<_>>()));
        device.write(starts, 0, bytemuck::cast_slice(&vec![0i32; rows as usize]));
        device.write(weights, 0, bytemuck::cast_slice(&vec![1f32; rows as usize]));
        for program in form.programs {
            device.run_observed(ProgramCall::of(*program), &mut NoFiles, &mut timer.clone())?;
        }
    }
    let sums = sums.lock().expect("no thread panics while holding the lock");
    let rate = |(op, (work, seconds)): (&&'static str, &(f64, f64))| {
        (*op != "product" && *work > 0.0 && *seconds > 0.0).then(|| ((*op).to_owned(), work / seconds))
    };
    Ok(sums.iter().filter_map(rate).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::executor;

    #[test]
    fn every_training_op_has_a_rate() {
        let open = |set: ProgramSet, placement, precision| executor::open(set, placement, precision, 1, None);
        let kernels = Kernels::Cpu { threads: 1 };
        let subject = OpRateSubject { kernels, precision: DType::F32, scale: Scale::TINY, open: &open };
        let rates = reference_step(&subject).unwrap();
        for op in ["attention", "cross_entropy", "adam_w", "adam_w8", "dequantize", "dropout"] {
            assert!(rates.get(op).is_some_and(|rate| *rate > 0.0), "{op}: {rates:?}");
        }
    }
}
