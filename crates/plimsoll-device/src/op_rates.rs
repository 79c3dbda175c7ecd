//! How fast each kind of op is on a device: products of many sizes, and the training step of a small reference model,
//! timed op by op on the executor itself. The same for every device, but for the sizes that fill it.

use crate::bench::{BenchError, median};
use crate::device::{Call, DeviceError, Memory, NoFiles, Observer};
use crate::trial::{Open, Trial, add, repeated, side_by_side};
use plimsoll_core::{Category, DType, OpRates, RecomputeLevel};
use plimsoll_program::builder::Builder;
use plimsoll_program::models::decoder::{AdamState, Base, Build, Lora, Method, Optimizer, Source, Training, build};
use plimsoll_program::models::{ModelConfig, ModelType, RopeScaling, Target};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Op, OpKind, Operand, ProgramSet, TensorId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// At least this long for each size of product; the median of the rounds counts.
const EACH: Duration = Duration::from_millis(1);
/// Steps of the reference model, the first of which is not counted.
const STEPS: u32 = 3;

/// Sizes that fill a device: smaller ones would show what an op costs to start, larger ones nothing new.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    /// Sizes along each dimension of the timed products: from a row of a small model to more than any blocking notices.
    pub sizes: [u64; 4],
    /// How often a product is done in a round.
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
    /// A processor.
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

    /// A GPU.
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

    /// A processor of which little memory may be held: some 10 MiB.
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

    /// Something so slow that the others would take minutes, or has next to no memory.
    pub const TINY: Scale = Scale {
        sizes: [4, 8, 16, 32],
        repeat: 1,
        hidden: 32,
        heads: 2,
        kv_heads: 1,
        // Gate and up together have the elements from which on state may be coarse.
        ffn: 64,
        vocab: 64,
        sequence: 16,
        micro_batch: 2,
    };
}

/// The device to be measured.
pub(crate) struct Subject<'a> {
    /// Whose kernels it has.
    pub kernels: Kernels,
    /// The arithmetic.
    pub precision: DType,
    /// What fills it.
    pub scale: Scale,
    /// How it is opened.
    pub open: &'a Open<'a>,
}

/// Measures all of it; a processor takes about a second.
///
/// # Errors
/// Where memory or threads are refused, or the device fails.
pub(crate) fn measure(subject: &Subject) -> Result<OpRates, BenchError> {
    let sizes = subject.scale.sizes;
    let forms: Vec<[u64; 3]> =
        sizes.iter().flat_map(|&m| sizes.iter().flat_map(move |&n| sizes.map(|k| [m, n, k]))).collect();
    let seconds = products(subject, &forms, subject.scale.repeat, EACH, &mut || {})?;
    let rate = |([m, n, k], rounds): (&[u64; 3], &Vec<f64>)| 2.0 * (m * n * k) as f64 / median(rounds);
    let product_flops = forms.iter().zip(&seconds).map(rate).collect();
    Ok(OpRates { product_sizes: sizes.to_vec(), product_flops, others: reference_step(subject)?, bf16: None })
}

/// The seconds of a product in each round, for each of the sizes `[m, n, k]`; the right-hand side is stored as weights
/// are, `[n, k]`. `ready` is called when all is prepared, right before the first is timed.
///
/// # Errors
/// As [`measure`].
pub(crate) fn products(
    subject: &Subject,
    forms: &[[u64; 3]],
    repeat: u32,
    each: Duration,
    ready: &mut dyn FnMut(),
) -> Result<Vec<Vec<f64>>, BenchError> {
    let most = |size: fn(&[u64; 3]) -> u64| forms.iter().map(size).max().unwrap_or(1);
    let sides = [most(|[m, _, k]| m * k), most(|[_, n, k]| n * k), most(|[m, n, _]| m * n)];
    let mut builder = Builder::new(subject.precision, subject.kernels);
    let [a, b, out] = [("a", sides[0]), ("b", sides[1]), ("out", sides[2])]
        .map(|(name, elements)| builder.persistent(name, &[elements], subject.precision, Category::Weight, 1));
    // One scratch for all, as large as the largest needs.
    let needs = |[m, n, k]: &[u64; 3]| subject.kernels.product(subject.precision, *m, *n, *k);
    let scratch = builder.scratch("scratch", forms.iter().map(needs).max().unwrap_or(0), 1);
    for &[m, n, k] in forms {
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
        add(&mut builder.set, repeated(&name_of([m, n, k]), vec![op.into()], repeat));
    }
    let mut trial = Trial::open(subject.open, builder.set, subject.precision, out)?;
    trial.fill(a, subject.precision, sides[0]);
    trial.fill(b, subject.precision, sides[1]);
    ready();
    let mut all = Vec::new();
    for form in forms {
        let rounds = trial.rounds(&name_of(*form), each)?;
        all.push(rounds.into_iter().map(|seconds| seconds / f64::from(repeat)).collect());
    }
    Ok(all)
}

fn name_of([m, n, k]: [u64; 3]) -> String {
    format!("{m} × {n} × {k}")
}

/// Adds up time and work of each kind of op.
#[derive(Clone)]
struct Timed {
    set: Arc<ProgramSet>,
    started: Instant,
    counting: Arc<Mutex<bool>>,
    sums: Arc<Mutex<BTreeMap<&'static str, (f64, f64)>>>,
}

impl Observer for Timed {
    fn before(&mut self, _: u32, _: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        self.started = Instant::now();
        Ok(())
    }

    fn after(&mut self, _: u32, op: &Op, _: &mut dyn Memory) {
        let seconds = self.started.elapsed().as_secs_f64();
        if !*self.counting.lock().expect("nobody panics here") {
            return;
        }
        let elements_of = |id: TensorId| self.set.tensor(id).elements();
        let dtype_of = |id: TensorId| self.set.tensor(id).dtype;
        let flops = op.cost().product_flops;
        let work = if flops > 0.0 { flops } else { op.bytes_moved(&elements_of, &dtype_of) as f64 };
        let mut sums = self.sums.lock().expect("nobody panics here");
        let sum = sums.entry(op.name()).or_default();
        *sum = (sum.0 + work, sum.1 + seconds);
    }
}

/// What is trained in a reference step, and how coarsely it is stored.
struct Form {
    method: Method,
    base: Base,
    state: AdamState,
    programs: &'static [&'static str],
}

/// All kinds of ops of a training step: everything in the run's arithmetic; moments of a byte; adapters with dropout
/// beside a coarse base.
fn forms() -> [Form; 3] {
    let step = &["begin", "forward", "backward", "norm", "update"];
    let update = &["begin", "norm", "update"];
    let targets = Target::ALL.into_iter().collect();
    let lora = Lora { rank: 8, alpha: 16.0, dropout: 0.05, targets, seed: 1, source: Source::Random { seed: 1 } };
    let full = |state, programs| Form { method: Method::Full, base: Base::Plain, state, programs };
    [
        full(AdamState::Full, step),
        full(AdamState::Blockwise8, update),
        Form { method: Method::Lora(lora), base: Base::Nf4, state: AdamState::Full, programs: step },
    ]
}

/// Work a second by kind of op, products left out. What several forms have counts as in the first of them.
fn reference_step(subject: &Subject) -> Result<BTreeMap<String, f64>, BenchError> {
    let mut rates = BTreeMap::new();
    for (number, form) in forms().into_iter().enumerate() {
        match rates_in(subject, form) {
            Ok(found) => {
                for (op, rate) in found {
                    rates.entry(op).or_insert(rate);
                }
            }
            // Ops that only some runs have are no reason to measure nothing.
            Err(BenchError::Device(error)) if number > 0 && !error.is_loss() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(rates)
}

/// The same in one form.
fn rates_in(subject: &Subject, form: Form) -> Result<BTreeMap<String, f64>, BenchError> {
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
        qk_norm: true,
        max_positions: scale.sequence,
        bos: None,
        eos: vec![],
        init_std: 0.02,
    };
    let set = build(&Build {
        config: &config,
        layers: 0..config.layers,
        precision: subject.precision,
        kernels: subject.kernels,
        sequence: scale.sequence,
        micro_batch: scale.micro_batch,
        source: Source::Random { seed: 1 },
        method: form.method,
        base: form.base,
        streamed_head: false,
        training: Some(Training {
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: form.state },
            recompute: vec![RecomputeLevel::Nothing],
        }),
        evaluate: false,
        generation: None,
        files: true,
    });
    let find = |name: &str| set.find(name).expect("a training set has its inputs");
    let (tokens, labels) = (find("train.tokens"), find("train.labels"));
    let (positions, starts) = (find("train.positions"), find("train.document_start"));
    let weights = find("train.token_weights");
    let mut device = (subject.open)(set.clone(), side_by_side(&set), subject.precision)?;
    let counting = Arc::new(Mutex::new(false));
    let sums = Arc::new(Mutex::new(BTreeMap::new()));
    let timed =
        Timed { set: Arc::new(set), started: Instant::now(), counting: Arc::clone(&counting), sums: Arc::clone(&sums) };
    let (rows, sequence, vocab) =
        ((scale.micro_batch * scale.sequence) as i32, scale.sequence as i32, scale.vocab as i32);
    let ids: Vec<i32> = (0..rows).map(|i| (i * 131) % vocab).collect();
    device.run("load")?;
    device.run("fresh")?;
    for step in 0..STEPS {
        *counting.lock().expect("nobody panics here") = step > 0;
        device.write(tokens, 0, bytemuck::cast_slice(&ids));
        device.write(labels, 0, bytemuck::cast_slice(&ids));
        device.write(positions, 0, bytemuck::cast_slice(&(0..rows).map(|i| i % sequence).collect::<Vec<_>>()));
        device.write(starts, 0, bytemuck::cast_slice(&vec![0i32; rows as usize]));
        device.write(weights, 0, bytemuck::cast_slice(&vec![1f32; rows as usize]));
        for program in form.programs {
            device.run_observed(Call::of(program), &mut NoFiles, &mut timed.clone())?;
        }
    }
    let sums = sums.lock().expect("nobody panics here");
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
    fn every_kind_of_op_of_a_training_step_has_a_rate() {
        let open = |set: ProgramSet, placement, precision| executor::open(set, placement, precision, 1, None);
        let kernels = Kernels::Cpu { threads: 1 };
        let subject = Subject { kernels, precision: DType::F32, scale: Scale::TINY, open: &open };
        let rates = reference_step(&subject).unwrap();
        for op in ["attention", "cross_entropy", "adam_w", "adam_w8", "dequantise", "dropout"] {
            assert!(rates.get(op).is_some_and(|rate| *rate > 0.0), "{op}: {rates:?}");
        }
    }
}
