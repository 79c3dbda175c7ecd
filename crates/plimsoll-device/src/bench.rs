//! How fast the devices are: matrix products, memory, and the fixed price of an op. The planner's prices come from
//! here (through [`crate::calibration`]) and from nowhere else.
//!
//! What is timed is what runs: the kernel and the pool of the executor, in the forms that a training step has.

use crate::arena::{Arena, ArenaError};
use crate::cpu::executor;
use crate::cpu::kernels::{Product, Real, product};
use crate::cpu::pool::{Pool, PoolError, Shared};
use crate::cuda::nvml::Condition;
use crate::cuda::{self, gpus};
use crate::device::DeviceError;
use crate::op_rates::{self, Scale, Subject};
use crate::probe::{self, Cpu};
use crate::process::Scheduled;
use half::bf16;
use plimsoll_core::{Bytes, DType, Failure, Link, OpRates};
use plimsoll_program::workspace::Kernels;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// What `plimsoll bench devices --json` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bench {
    /// The version of Plimsoll whose kernels were measured.
    pub plimsoll: String,
    /// How long it took.
    pub seconds: f64,
    /// Each device by itself; the CPU with one thread and with those that Plimsoll would take.
    pub devices: Vec<DeviceBench>,
    /// All devices at once.
    pub all: Sum,
}

/// What one device reached with so many threads. All figures are measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceBench {
    /// The device's name in run files.
    pub device: String,
    /// Whether it is a simulated one.
    pub simulated: bool,
    /// The maker's name for it.
    pub model: String,
    /// Threads that computed.
    pub threads: u32,
    /// Matrix products, one entry for each type the device computes in. A type that is missing here does not exist on
    /// this device.
    pub products: Vec<ProductRate>,
    /// Traffic to memory beyond the caches.
    pub memory: MemoryRate,
    /// The fixed price of an op: starting all threads on nothing and waiting for them, seconds.
    pub op_seconds: f64,
    /// Products of many sizes, and the other ops of a training step: what the planner's prices are made of.
    pub ops: OpRates,
    /// The share of the time in which the threads wanted to compute and had to wait for others to leave a core.
    pub contention: f64,
    /// What only GPUs have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuBench>,
}

/// What is measured of a GPU beside what every device has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuBench {
    /// The driver's version.
    pub driver: String,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// From pinned memory of the host to the device.
    pub to_device: Link,
    /// From the device to pinned memory of the host.
    pub to_host: Link,
    /// How it was before.
    pub before: Condition,
    /// How it was at the end.
    pub after: Condition,
}

impl DeviceBench {
    /// Whether other programs took so much of the processor that the figures are theirs as much as the device's.
    pub fn disturbed(&self) -> bool {
        self.contention > 0.1
    }
}

/// Rate of matrix products in one type, in operations a second (a multiplication and an addition are two).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProductRate {
    /// The type of the operands.
    pub dtype: DType,
    /// Of the median round.
    pub median_flops: f64,
    /// Of the fastest round.
    pub best_flops: f64,
    /// Over the whole second half of the measurement, after the processor has warmed up and slowed down.
    pub sustained_flops: f64,
}

/// Memory traffic in bytes a second: medians, counting each byte read and each byte written once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryRate {
    /// Size of each of the three arrays, several times the last cache.
    pub array_bytes: Bytes,
    /// Reading one array.
    pub read: f64,
    /// Writing one array.
    pub write: f64,
    /// Reading one array and writing another.
    pub copy: f64,
    /// `a = b + s c`: reading two arrays and writing a third, as most ops of a step do.
    pub triad: f64,
}

/// What all devices reach at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sum {
    /// Who took part.
    pub devices: Vec<String>,
    /// Sustained rates of products, added up, for each type that all of them compute in.
    pub products: Vec<SumRate>,
    /// Memory traffic, added up.
    pub memory_bytes_per_second: f64,
    /// How each GPU was, by its name, at the end of the products.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub conditions: BTreeMap<String, Condition>,
}

/// A sum of product rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SumRate {
    /// The type of the operands.
    pub dtype: DType,
    /// Operations a second.
    pub sustained_flops: f64,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// No memory for the arrays.
    #[error("cannot measure: {0}")]
    Arena(#[from] ArenaError),
    /// No threads.
    #[error("cannot measure: {0}")]
    Pool(#[from] PoolError),
    /// The executor could not run the ops to be timed.
    #[error("cannot measure: {0}")]
    Device(#[from] DeviceError),
}

impl From<BenchError> for Failure {
    fn from(error: BenchError) -> Failure {
        let message = error.to_string();
        let cause = match error {
            BenchError::Arena(error) => Failure::from(error),
            BenchError::Pool(error) => Failure::from(error),
            BenchError::Device(error) => Failure::from(error),
        };
        Failure { message, ..cause }
    }
}

/// Measures all devices of this machine in about `duration`. `stage` is told what is measured next.
///
/// # Errors
/// Where memory or threads are refused.
pub fn devices(duration: Duration, mut stage: impl FnMut(&str)) -> Result<Bench, BenchError> {
    let start = Instant::now();
    let cpu = Cpu::read();
    let taken = cpu.threads_for(None).expect("nothing was asked for");
    let mut counts = vec![1, taken];
    counts.dedup();
    let usable = usable_gpus();
    // Each by itself, and once all of them.
    let turns = counts.len() + usable.len() + usize::from(!usable.is_empty());
    let each = duration / turns as u32;
    let mut devices: Vec<DeviceBench> = counts
        .iter()
        .map(|&threads| {
            measure_cpu(&cpu, threads, &[DType::F32, DType::Bf16, DType::F64], each, &Extent::whole(&cpu), &mut stage)
        })
        .collect::<Result<_, _>>()?;
    let whole = devices.last().cloned().expect("at least one thread");
    for &(here, card) in &usable {
        devices.push(cuda::bench::measure(here, card, each, &mut stage)?);
    }
    let all = if usable.is_empty() {
        sum(vec![(whole.device, whole.products, whole.memory)])
    } else {
        stage("all devices at once");
        at_once(&cpu, taken, &usable, each)?
    };
    Ok(Bench { plimsoll: env!("CARGO_PKG_VERSION").to_owned(), seconds: start.elapsed().as_secs_f64(), devices, all })
}

/// The GPUs that a run could be given.
fn usable_gpus() -> Vec<(&'static gpus::Here, &'static gpus::Card)> {
    let Ok(here) = gpus::here() else { return Vec::new() };
    if here.nvrtc().is_err() || here.cublaslt().is_err() {
        return Vec::new();
    }
    here.cards.iter().filter(|card| card.architecture.check().is_ok()).map(|card| (here, card)).collect()
}

/// What every device computes in while all are measured at once.
pub(crate) const AT_ONCE: [DType; 2] = [DType::F32, DType::Bf16];

/// Where devices wait for each other before they are measured at once.
pub(crate) struct Meeting(Barrier);

impl Meeting {
    /// Does some work that calls its argument once it is ready, and goes on when all are. Who fails before is not waited
    /// for.
    pub fn attend<T>(&self, work: impl FnOnce(&mut dyn FnMut()) -> Result<T, BenchError>) -> Result<T, BenchError> {
        let mut has_met = false;
        let result = work(&mut || {
            self.0.wait();
            has_met = true;
        });
        if !has_met {
            self.0.wait();
        }
        result
    }
}

/// The processor and all GPUs at the same time, each as busy as it can be: they share the machine's power, its cooling
/// and the links.
fn at_once(
    cpu: &Cpu,
    threads: u32,
    gpus: &[(&'static gpus::Here, &'static gpus::Card)],
    duration: Duration,
) -> Result<Sum, BenchError> {
    let meeting = Meeting(Barrier::new(gpus.len() + 1));
    let (mine, shares) = std::thread::scope(|scope| {
        let meeting = &meeting;
        let others: Vec<_> = gpus
            .iter()
            .map(|&(here, card)| scope.spawn(move || cuda::bench::share(here, card, duration, meeting)))
            .collect();
        let mine = cpu_share(cpu, threads, duration, meeting);
        let shares: Vec<_> = others.into_iter().map(|other| other.join().expect("no measurement panics")).collect();
        (mine, shares)
    });
    let (products, memory) = mine?;
    let (mut parts, mut conditions) = (vec![("cpu".to_owned(), products, memory)], BTreeMap::new());
    for ((_, card), share) in gpus.iter().zip(shares) {
        let (name, share) = (format!("cuda:{}", card.index), share?);
        conditions.insert(name.clone(), share.condition);
        parts.push((name, share.products, share.memory));
    }
    Ok(Sum { conditions, ..sum(parts) })
}

/// What the processor reaches while all GPUs work, too.
fn cpu_share(
    cpu: &Cpu,
    threads: u32,
    duration: Duration,
    meeting: &Meeting,
) -> Result<(Vec<ProductRate>, MemoryRate), BenchError> {
    let third = duration / 3;
    // Whoever cannot take part comes to every meeting all the same.
    let pool = || Pool::new(threads as usize);
    let whole = Extent::whole(cpu);
    let f32 = meeting.attend(|ready| product_rate::<f32>(&pool()?, DType::F32, third, &whole, ready));
    let bf16 = meeting.attend(|ready| product_rate::<bf16>(&pool()?, DType::Bf16, third, &whole, ready));
    let memory = meeting.attend(|ready| memory_rate(&pool()?, whole.array, third, ready));
    Ok((vec![f32?, bf16?], memory?))
}

/// The sustained rates of devices, added up.
fn sum(parts: Vec<(String, Vec<ProductRate>, MemoryRate)>) -> Sum {
    let of = |products: &[ProductRate], dtype: DType| {
        products.iter().find(|rate| rate.dtype == dtype).map(|rate| rate.sustained_flops)
    };
    let product = |dtype: DType| {
        let rates: Option<Vec<f64>> = parts.iter().map(|(_, products, _)| of(products, dtype)).collect();
        rates.map(|rates| SumRate { dtype, sustained_flops: rates.iter().sum() })
    };
    let dtypes: Vec<DType> = parts.first().into_iter().flat_map(|(_, products, _)| products).map(|p| p.dtype).collect();
    Sum {
        products: dtypes.into_iter().filter_map(product).collect(),
        memory_bytes_per_second: parts.iter().map(|(_, _, memory)| memory.triad).sum(),
        devices: parts.into_iter().map(|(name, ..)| name).collect(),
        conditions: BTreeMap::new(),
    }
}

/// Matrix products in f32 alone, on so many threads of the processor, for about `duration`.
///
/// # Errors
/// Where memory or threads are refused.
pub fn cpu_products(threads: u32, duration: Duration) -> Result<ProductRate, BenchError> {
    product_rate::<f32>(&Pool::new(threads as usize)?, DType::F32, duration, &Extent::whole(&Cpu::read()), &mut || {})
}

/// How much a measurement of the processor holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extent {
    /// Each of three arrays whose memory is read and written.
    array: Bytes,
    /// The sizes of products are divided by this.
    shrink: usize,
    /// The ops of a step.
    scale: Scale,
}

impl Extent {
    /// All that rates which are kept are measured with: arrays of twice the last cache, so that three are far beyond it, but
    /// never much of what is free.
    pub fn whole(cpu: &Cpu) -> Extent {
        let wanted = (cpu.last_cache().0 * 2).max(16 << 20);
        let bearable = probe::Memory::read().free.0 / 16;
        let array = Bytes(wanted.min(bearable).max(1 << 20).next_multiple_of(4096));
        Extent { array, shrink: 1, scale: Scale::PROCESSOR }
    }

    /// What holds no more than `room`, from some 4 MiB on: a run that has no more works in as little. Measured, with all that
    /// the system counts, on two threads: products in f32 24 MiB, the ops of a step 114 MiB, those of a small one 12 MiB. Each
    /// further thread has scratch and a stack.
    pub fn within(self, room: Bytes, threads: u32) -> Extent {
        let room = room.saturating_sub(Bytes::mib(u64::from(threads.saturating_sub(2))));
        let (shrink, scale) = match room {
            room if room >= Bytes::mib(128) => (1, Scale::PROCESSOR),
            room if room >= Bytes::mib(32) => (1, Scale::SMALL),
            _ => (8, Scale::TINY),
        };
        // An eighth is for threads and what else there is.
        let third = (room.0 / 24 * 7).max(64 << 10) & !4095;
        Extent { array: self.array.min(Bytes(third)), shrink, scale }
    }
}

/// Measures the CPU with `threads` threads in about `duration`, products in each of `dtypes` (f32, bf16 and f64
/// exist here; others are left out).
///
/// # Errors
/// Where memory or threads are refused.
pub fn measure_cpu(
    cpu: &Cpu,
    threads: u32,
    dtypes: &[DType],
    duration: Duration,
    extent: &Extent,
    stage: &mut dyn FnMut(&str),
) -> Result<DeviceBench, BenchError> {
    let pool = Pool::new(threads as usize)?;
    let scheduled = Scheduled::read();
    let plural = if threads == 1 { "" } else { "s" };
    // 60 % of the time for products, the first type getting half of it; the rest for memory and ops.
    let mut products = Vec::new();
    for (index, &dtype) in dtypes.iter().enumerate() {
        let share = duration.mul_f64(match (dtypes.len(), index) {
            (1, _) => 0.6,
            (_, 0) => 0.3,
            (types, _) => 0.3 / (types - 1) as f64,
        });
        stage(&format!("cpu, {threads} thread{plural}: products in {dtype}"));
        match dtype {
            DType::F32 => products.push(product_rate::<f32>(&pool, dtype, share, extent, &mut || {})?),
            DType::F64 => products.push(product_rate::<f64>(&pool, dtype, share, extent, &mut || {})?),
            DType::Bf16 => products.push(product_rate::<bf16>(&pool, dtype, share, extent, &mut || {})?),
            DType::F16 | DType::I32 | DType::U8 => {}
        }
    }
    stage(&format!("cpu, {threads} thread{plural}: memory"));
    let memory = memory_rate(&pool, extent.array, duration.mul_f64(0.35), &mut || {})?;
    let op_seconds = op_seconds(&pool, duration.mul_f64(0.05));
    stage(&format!("cpu, {threads} thread{plural}: the ops of a step"));
    // Its pool would hold the cores beside the executor's.
    drop(pool);
    let open = |set, placement, precision| executor::open(set, placement, precision, threads as usize, None);
    let kernels = Kernels::Cpu { threads: u64::from(threads) };
    let subject = |precision| Subject { kernels, precision, scale: extent.scale, open: &open };
    let mut ops = op_rates::measure(&subject(DType::F32))?;
    if dtypes.contains(&DType::Bf16) {
        ops.bf16 = Some(Box::new(op_rates::measure(&subject(DType::Bf16))?));
    }
    Ok(DeviceBench {
        device: "cpu".to_owned(),
        simulated: false,
        model: cpu.model.clone(),
        threads,
        products,
        memory,
        op_seconds,
        ops,
        contention: Scheduled::read().contention_since(scheduled),
        gpu: None,
    })
}

/// A product as a training step has it: sizes and which operands are stored transposed.
struct Form {
    m: usize,
    n: usize,
    k: usize,
    a_transposed: bool,
    b_transposed: bool,
}

impl Form {
    fn shrunk(self, by: usize) -> Form {
        Form { m: self.m / by, n: self.n / by, k: self.k / by, ..self }
    }
}

/// The three products of a projection between 384 and 1024 columns over 2048 tokens (forward, gradient of the input,
/// gradient of the weight) and a square one: one round.
const ROUND: [Form; 4] = [
    Form { m: 2048, n: 1024, k: 384, a_transposed: false, b_transposed: true },
    Form { m: 2048, n: 384, k: 1024, a_transposed: false, b_transposed: false },
    Form { m: 1024, n: 384, k: 2048, a_transposed: true, b_transposed: false },
    Form { m: 1024, n: 1024, k: 1024, a_transposed: false, b_transposed: true },
];

fn product_rate<T: Real>(
    pool: &Pool,
    dtype: DType,
    duration: Duration,
    extent: &Extent,
    ready: &mut dyn FnMut(),
) -> Result<ProductRate, BenchError> {
    let round = ROUND.map(|form| form.shrunk(extent.shrink));
    let largest = |size: fn(&Form) -> usize| round.iter().map(size).max().unwrap_or(0);
    let (a, b, out) = (largest(|f| f.m * f.k), largest(|f| f.k * f.n), largest(|f| f.m * f.n));
    let lanes = pool.threads() as u64;
    let kernels = Kernels::Cpu { threads: lanes };
    let scratch = round.iter().map(|f| kernels.product(dtype, f.m as u64, f.n as u64, f.k as u64)).max().unwrap_or(0);
    let at = |elements: usize| (elements * size_of::<T>()).next_multiple_of(64) as u64;
    let arena = Arena::map(at(a + b + out) + scratch * size_of::<T::Wide>() as u64)?;
    // SAFETY: four ranges side by side, none overlapping another, and no other slices of this arena exist.
    let (left, right, result, scratch) = unsafe {
        (
            arena.slice_mut::<T>(0, a),
            arena.slice_mut::<T>((a * size_of::<T>()) as u64, b),
            arena.slice_mut::<T>(((a + b) * size_of::<T>()) as u64, out),
            arena.slice_mut::<T::Wide>(at(a + b + out), scratch as usize),
        )
    };
    // Numbers of both signs and no zeros: some processors are faster on zeros, which would be a lie.
    for (index, x) in left.iter_mut().chain(right.iter_mut()).enumerate() {
        *x = T::of(((index * 37) % 101) as f64 / 101.0 - 0.4951);
    }
    ready();
    let operations: f64 = round.iter().map(|f| 2.0 * (f.m * f.n * f.k) as f64).sum();
    let seconds = pool_rounds(pool, duration, || {
        for &Form { m, n, k, a_transposed, b_transposed } in &round {
            let mut form = Product::new(m, n, k, &*left, &*right);
            form = if a_transposed { form.a_transposed() } else { form };
            form = if b_transposed { form.b_transposed() } else { form };
            product(pool, form, black_box(&mut *result), scratch);
        }
    });
    let half = &seconds[seconds.len() / 2..];
    Ok(ProductRate {
        dtype,
        median_flops: operations / median(&seconds),
        best_flops: operations / seconds.iter().copied().fold(f64::INFINITY, f64::min),
        sustained_flops: operations * half.len() as f64 / half.iter().sum::<f64>(),
    })
}

fn memory_rate(
    pool: &Pool,
    array: Bytes,
    duration: Duration,
    ready: &mut dyn FnMut(),
) -> Result<MemoryRate, BenchError> {
    let arena = Arena::map(array.0 * 3)?;
    let len = array.0 as usize / 4;
    // SAFETY: three arrays side by side, none overlapping another, and no other slices of this arena exist.
    let (a, b, c) = unsafe {
        (arena.slice_mut::<f32>(0, len), arena.slice_mut::<f32>(array.0, len), arena.slice_mut::<f32>(array.0 * 2, len))
    };
    a.fill(1.0);
    b.fill(2.0);
    c.fill(3.0);
    ready();
    let each = duration / 4;
    let bytes = array.0 as f64;
    // Many tasks of at least 256 KiB each: enough for a thread to stream, and few enough to cost nothing.
    let least = 1 << 16;
    let read = pool_rounds(pool, each, || {
        // As whole words, whose sum the compiler may vectorise: the memory is the limit, not the addition.
        let words: &[u64] = bytemuck::cast_slice(b);
        pool.split(words.len(), least / 2, |range, _| {
            black_box(words[range].iter().fold(0u64, |sum, &word| sum.wrapping_add(word)));
        });
    });
    let write = over(pool, each, a, least, |_, part| part.fill(black_box(4.0)));
    let copy = over(pool, each, a, least, |from, part| part.copy_from_slice(&b[from..from + part.len()]));
    let triad = over(pool, each, a, least, |from, part| {
        let (b, c, s) = (&b[from..from + part.len()], &c[from..from + part.len()], black_box(0.5f32));
        for ((a, b), c) in part.iter_mut().zip(b).zip(c) {
            *a = b + s * c;
        }
    });
    Ok(MemoryRate {
        array_bytes: array,
        read: bytes / median(&read),
        write: bytes / median(&write),
        copy: 2.0 * bytes / median(&copy),
        triad: 3.0 * bytes / median(&triad),
    })
}

/// Rounds of `work(start, part)` over all parts of `array`.
fn over(
    pool: &Pool,
    duration: Duration,
    array: &mut [f32],
    least: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) -> Vec<f64> {
    pool_rounds(pool, duration, || {
        let len = array.len();
        let shared = Shared::new(array);
        pool.split(len, least, |range, _| {
            // SAFETY: the ranges of one split are disjoint.
            work(range.start, unsafe { shared.part(range) });
        });
    })
}

/// Seconds to start all threads on nothing and wait for them, as each op of an executor does.
fn op_seconds(pool: &Pool, duration: Duration) -> f64 {
    const OPS: u32 = 100;
    let seconds = pool_rounds(pool, duration, || {
        for _ in 0..OPS {
            pool.run(pool.threads(), |task, _| {
                black_box(task);
            });
        }
    });
    median(&seconds) / f64::from(OPS)
}

/// The seconds of each round of `work`, for about `duration` and at least three rounds, after one that is not counted.
/// Runs on the pool as executors do.
fn pool_rounds(pool: &Pool, duration: Duration, mut work: impl FnMut() + Send) -> Vec<f64> {
    pool.enter(|| {
        work();
        let start = Instant::now();
        let mut seconds = Vec::new();
        while seconds.len() < 3 || start.elapsed() < duration {
            let round = Instant::now();
            work();
            seconds.push(round.elapsed().as_secs_f64());
        }
        seconds
    })
}

pub(crate) fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_measured_and_of_a_plausible_size() {
        let cpu = Cpu::read();
        let mut stages = Vec::new();
        let types = [DType::F32, DType::Bf16, DType::F16];
        let measured = measure_cpu(&cpu, 1, &types, Duration::from_millis(20), &Extent::whole(&cpu), &mut |stage| {
            stages.push(stage.to_owned())
        })
        .unwrap();
        assert_eq!(stages.last().unwrap(), "cpu, 1 thread: the ops of a step");
        // There are no f16 products here, so there is no figure for them.
        assert_eq!(measured.products.iter().map(|rate| rate.dtype).collect::<Vec<_>>(), [DType::F32, DType::Bf16]);
        for rate in &measured.products {
            assert!(rate.best_flops >= rate.median_flops && rate.best_flops >= rate.sustained_flops);
            // Any processor of this century, and none of it.
            assert!((1e8..1e15).contains(&rate.median_flops), "{rate:?}");
        }
        let memory = measured.memory;
        for rate in [memory.read, memory.write, memory.copy, memory.triad] {
            assert!((1e7..1e14).contains(&rate), "{memory:?}");
        }
        assert!(measured.op_seconds > 0.0 && measured.op_seconds < 1.0);
        assert!((0.0..1.0).contains(&measured.contention));
        let text = serde_json::to_string(&measured).unwrap();
        assert_eq!(serde_json::from_str::<DeviceBench>(&text).unwrap(), measured);
    }

    #[test]
    fn rates_of_all_devices_are_added_up_in_the_types_that_all_compute_in() {
        let rate = |dtype, sustained_flops| ProductRate { dtype, median_flops: 0.0, best_flops: 0.0, sustained_flops };
        let device = |name: &str, products: Vec<ProductRate>, triad: f64| {
            let memory = MemoryRate { array_bytes: Bytes::mib(1), read: 0.0, write: 0.0, copy: 0.0, triad };
            (name.to_owned(), products, memory)
        };
        let cpu = device("cpu", vec![rate(DType::F32, 1.0), rate(DType::F64, 2.0)], 4.0);
        let gpu = device("cuda:0", vec![rate(DType::F32, 16.0), rate(DType::Bf16, 32.0)], 64.0);
        let all = sum(vec![cpu, gpu]);
        assert_eq!(all.devices, ["cpu", "cuda:0"]);
        assert_eq!(all.products, [SumRate { dtype: DType::F32, sustained_flops: 17.0 }]);
        assert_eq!(all.memory_bytes_per_second, 68.0);
    }

    #[test]
    fn the_median_is_the_one_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 100.0]), 3.0);
    }
}
