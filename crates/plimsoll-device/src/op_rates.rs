//! How fast each kind of op is here: products of many sizes, and the training step of a small
//! reference model, timed op by op on the executor itself.

use crate::arena::Arena;
use crate::bench::{BenchError, median, pool_rounds};
use crate::cpu::executor;
use crate::cpu::kernels::{Product, product};
use crate::cpu::pool::Pool;
use crate::device::{Call, DeviceError, Memory, NoFiles, Observer};
use plimsoll_core::{DType, OpRates, RecomputeLevel, Space};
use plimsoll_program::models::decoder::{AdamState, Base, Build, Method, Optimizer, Source, Training, build};
use plimsoll_program::models::{ModelConfig, ModelType, RopeScaling};
use plimsoll_program::workspace::{self, Kernels};
use plimsoll_program::{Op, Placement, ProgramSet, TensorId};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Sizes along each dimension of the timed products: from a row of a small model to more than any
/// blocking notices.
const SIZES: [u64; 4] = [8, 48, 256, 1024];
/// At least this long for each size; the fastest of the rounds counts.
const EACH: Duration = Duration::from_millis(1);
/// Steps of the reference model, the first of which is not counted.
const STEPS: u32 = 3;

/// Measures all of it, in about a second.
///
/// # Errors
/// Where memory or threads are refused.
pub(crate) fn measure(pool: &Pool, threads: u32) -> Result<OpRates, BenchError> {
    let product_flops = products(pool)?;
    Ok(OpRates { product_sizes: SIZES.to_vec(), product_flops, others: reference_step(threads)? })
}

fn products(pool: &Pool) -> Result<Vec<f64>, BenchError> {
    let most = SIZES[SIZES.len() - 1];
    let lanes = pool.threads() as u64;
    let square = most * most;
    let scratch_elements = workspace::cpu::product(lanes, most, most, most);
    let arena = Arena::map((3 * square + scratch_elements) * 4)?;
    // SAFETY: four ranges side by side, none overlapping another, and no other slices of this arena exist.
    let (a, b, out, scratch) = unsafe {
        (
            arena.slice_mut::<f32>(0, square as usize),
            arena.slice_mut::<f32>(square * 4, square as usize),
            arena.slice_mut::<f32>(square * 8, square as usize),
            arena.slice_mut::<f32>(square * 12, scratch_elements as usize),
        )
    };
    for (index, x) in a.iter_mut().chain(b.iter_mut()).enumerate() {
        *x = ((index * 37) % 101) as f32 / 101.0 - 0.4951;
    }
    let mut rates = Vec::new();
    for m in SIZES {
        for n in SIZES {
            for k in SIZES {
                let [rows, columns, depth] = [m, n, k].map(|size| size as usize);
                let rounds = pool_rounds(pool, EACH, || {
                    let form = Product {
                        m: rows,
                        n: columns,
                        k: depth,
                        a: &*a,
                        a_transposed: false,
                        b: &*b,
                        b_transposed: true,
                        bias: None,
                        residual: None,
                        accumulate: false,
                    };
                    product(pool, form, black_box(&mut *out), scratch);
                });
                rates.push(2.0 * (m * n * k) as f64 / median(&rounds));
            }
        }
    }
    Ok(rates)
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

/// Work a second by kind of op, products left out.
fn reference_step(threads: u32) -> Result<BTreeMap<String, f64>, BenchError> {
    let config = ModelConfig {
        model_type: ModelType::Qwen3,
        hidden: 256,
        layers: 1,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        ffn: 768,
        vocab: 4096,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::None,
        qkv_bias: false,
        qk_norm: true,
        max_positions: 256,
        bos: None,
        eos: vec![],
        init_std: 0.02,
    };
    let set = build(&Build {
        config: &config,
        precision: DType::F32,
        kernels: Kernels::Cpu { threads: u64::from(threads) },
        sequence: 256,
        micro_batch: 4,
        source: Source::Random { seed: 1 },
        method: Method::Full,
        base: Base::Plain,
        training: Some(Training {
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full },
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
    let mut device = executor::open(set.clone(), side_by_side(&set), DType::F32, threads as usize)?;
    let counting = Arc::new(Mutex::new(false));
    let sums = Arc::new(Mutex::new(BTreeMap::new()));
    let timed =
        Timed { set: Arc::new(set), started: Instant::now(), counting: Arc::clone(&counting), sums: Arc::clone(&sums) };
    let rows = 4 * 256i32;
    let ids: Vec<i32> = (0..rows).map(|i| (i * 131) % 4096).collect();
    device.run("load")?;
    device.run("fresh")?;
    for step in 0..STEPS {
        *counting.lock().expect("nobody panics here") = step > 0;
        device.write(tokens, 0, bytemuck::cast_slice(&ids));
        device.write(labels, 0, bytemuck::cast_slice(&ids));
        device.write(positions, 0, bytemuck::cast_slice(&(0..rows).map(|i| i % 256).collect::<Vec<_>>()));
        device.write(starts, 0, bytemuck::cast_slice(&vec![0i32; rows as usize]));
        device.write(weights, 0, bytemuck::cast_slice(&vec![1f32; rows as usize]));
        for program in ["begin", "forward", "backward", "norm", "update"] {
            device.run_observed(Call::of(program), &mut NoFiles, &mut timed.clone())?;
        }
    }
    let sums = sums.lock().expect("nobody panics here");
    let rate = |(op, (work, seconds)): (&&'static str, &(f64, f64))| {
        (*op != "product" && *work > 0.0 && *seconds > 0.0).then(|| ((*op).to_owned(), work / seconds))
    };
    Ok(sums.iter().filter_map(rate).collect())
}

/// A placement for ops that are only timed: everything has bytes of its own.
fn side_by_side(set: &ProgramSet) -> Placement {
    let mut next = 0;
    let offsets = set
        .tensors
        .iter()
        .map(|tensor| {
            let mut place = || {
                let here = next;
                next = (here + tensor.bytes()).next_multiple_of(256);
                here
            };
            (0..tensor.slots).map(|_| (tensor.space != Space::File).then(&mut place)).collect()
        })
        .collect();
    Placement { offsets, arena_bytes: next, host_bytes: 0 }
}
