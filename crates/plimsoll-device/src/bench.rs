//! Measured speed of devices: matrix products, memory traffic and the fixed cost of an op. The planner's prices come
//! only from these measurements, through [`crate::calibration`].
//!
//! The measurements run the executor's own kernels and thread pool, in the shapes of a training step.

pub use crate::timing::BenchError;

use crate::arena::Arena;
use crate::cpu::executor;
use crate::cpu::kernels::{Product, Real, product};
use crate::cpu::pool::{Pool, Shared};
use crate::cuda::nvml::Condition;
use crate::cuda::{self, gpus};
use crate::op_rates::{self, OpRateSubject, Scale};
use crate::probe::{self, Cpu};
use crate::process::SchedulerTimes;
use crate::timing::median;
use half::bf16;
use plimsoll_core::{Bytes, DType, Link, OpRates};
use plimsoll_program::workspace::Kernels;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// The output of `plimsoll bench devices --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bench {
    /// Version of Plimsoll that was measured.
    pub plimsoll: String,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Each device alone; the CPU with one thread and with the default number of threads.
    pub devices: Vec<DeviceBench>,
    /// All devices at the same time.
    pub all: CombinedRates,
}

/// Measured figures of one device with a given number of threads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceBench {
    /// Name of the device in run files.
    pub device: String,
    /// Whether the device is simulated.
    pub simulated: bool,
    /// Model name given by the maker.
    pub model: String,
    /// Threads that computed.
    pub threads: u32,
    /// Matrix products, with one entry for each type that the device computes in.
    pub products: Vec<ProductRate>,
    /// Memory traffic beyond the caches.
    pub memory: MemoryRate,
    /// Fixed cost of an op in seconds: waking all threads for no work and waiting for them.
    pub op_seconds: f64,
    /// Rates of products of many sizes and of the other ops of a training step, the base of the planner's prices.
    pub ops: OpRates,
    /// Share of the time in which runnable threads waited for a core, from 0 to 1.
    pub contention: f64,
    /// Figures that only GPUs have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuBench>,
}

/// Figures that only GPUs have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuBench {
    /// Version of the driver.
    pub driver: String,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Link from pinned host memory to the device.
    pub to_device: Link,
    /// Link from the device to pinned host memory.
    pub to_host: Link,
    /// Condition before the measurement.
    pub before: Condition,
    /// Condition after the measurement.
    pub after: Condition,
}

impl DeviceBench {
    /// Whether other programs used so much of the processor that the figures are unreliable.
    pub fn disturbed(&self) -> bool {
        self.contention > 0.1
    }
}

/// Rate of matrix products in one type, in operations per second. A multiplication and an addition count as two.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProductRate {
    /// Type of the operands.
    pub dtype: DType,
    /// Rate of the median round.
    pub median_flops: f64,
    /// Rate of the fastest round.
    pub best_flops: f64,
    /// Rate over the second half of the measurement, when the processor is warm.
    pub sustained_flops: f64,
}

/// Memory traffic in bytes per second. Medians; each byte read and each byte written counts once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryRate {
    /// Size of each of the three arrays, several times the last-level cache.
    pub array_bytes: Bytes,
    /// Rate of reading one array.
    pub read: f64,
    /// Rate of writing one array.
    pub write: f64,
    /// Rate of reading one array and writing another.
    pub copy: f64,
    /// Rate of `a = b + s c`: reading two arrays and writing a third, as most ops of a step do.
    pub triad: f64,
}

/// Rates of all devices running at the same time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CombinedRates {
    /// Names of the devices.
    pub devices: Vec<String>,
    /// Sum of sustained product rates, for each type that all devices compute in.
    pub products: Vec<CombinedRate>,
    /// Sum of memory traffic, in bytes per second.
    pub memory_bytes_per_second: f64,
    /// Condition of each GPU at the end of the products, by device name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub conditions: BTreeMap<String, Condition>,
}

/// A sum of product rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CombinedRate {
    /// Type of the operands.
    pub dtype: DType,
    /// Operations per second.
    pub sustained_flops: f64,
}

/// Measures all devices of this machine in about `duration`. `stage` receives a description of each measurement.
///
/// # Errors
/// Memory or threads are refused, or a device fails.
pub fn measure_devices(duration: Duration, mut stage: impl FnMut(&str)) -> Result<Bench, BenchError> {
    let start = Instant::now();
    let cpu = Cpu::read();
    let threads = cpu.threads_for(None).expect("the default number of threads is valid");
    let mut counts = vec![1, threads];
    counts.dedup();
    let usable = usable_gpus();
    // One turn for each device, and one for all together.
    let turns = counts.len() + usable.len() + usize::from(!usable.is_empty());
    let each = duration / turns as u32;
    let mut devices: Vec<DeviceBench> = counts
        .iter()
        .map(|&threads| {
            measure_cpu(
                &cpu,
                threads,
                &[DType::F32, DType::Bf16, DType::F64],
                each,
                &MeasurementExtent::full(&cpu),
                &mut stage,
            )
        })
        .collect::<Result<_, _>>()?;
    let full = devices.last().cloned().expect("at least one thread");
    for &(here, card) in &usable {
        devices.push(cuda::bench::measure(here, card, each, &mut stage)?);
    }
    let all = if usable.is_empty() {
        combine_rates(vec![(full.device, full.products, full.memory)])
    } else {
        stage("all devices at once");
        measure_concurrently(&cpu, threads, &usable, each)?
    };
    Ok(Bench { plimsoll: env!("CARGO_PKG_VERSION").to_owned(), seconds: start.elapsed().as_secs_f64(), devices, all })
}

/// Returns the GPUs that a run could use.
fn usable_gpus() -> Vec<(&'static gpus::CudaInstallation, &'static gpus::GpuInfo)> {
    let Ok(here) = gpus::installation() else { return Vec::new() };
    if here.nvrtc().is_err() || here.cublaslt().is_err() {
        return Vec::new();
    }
    here.gpus.iter().filter(|card| card.architecture.check().is_ok()).map(|card| (here, card)).collect()
}

/// Types in which all devices are measured at the same time.
pub(crate) const CONCURRENT_DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// A barrier at which devices wait for each other before a common measurement.
pub(crate) struct StartBarrier(Barrier);

impl StartBarrier {
    /// Runs `work`, which calls its argument when it is ready to measure; that call returns when all devices are ready.
    /// A device that fails earlier does not block the others.
    pub fn run_when_all_ready<T>(
        &self,
        work: impl FnOnce(&mut dyn FnMut()) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let mut has_waited = false;
        let result = work(&mut || {
            self.0.wait();
            has_waited = true;
        });
        if !has_waited {
            self.0.wait();
        }
        result
    }
}

/// Measures the processor and all GPUs at the same time, all fully busy, since they share power, cooling and links.
fn measure_concurrently(
    cpu: &Cpu,
    threads: u32,
    gpus: &[(&'static gpus::CudaInstallation, &'static gpus::GpuInfo)],
    duration: Duration,
) -> Result<CombinedRates, BenchError> {
    let barrier = StartBarrier(Barrier::new(gpus.len() + 1));
    let (cpu_share, shares) = std::thread::scope(|scope| {
        let barrier = &barrier;
        let others: Vec<_> = gpus
            .iter()
            .map(|&(here, card)| scope.spawn(move || cuda::bench::measure_concurrently(here, card, duration, barrier)))
            .collect();
        let cpu_share = measure_cpu_share(cpu, threads, duration, barrier);
        let shares: Vec<_> = others.into_iter().map(|other| other.join().expect("no measurement panics")).collect();
        (cpu_share, shares)
    });
    let (products, memory) = cpu_share?;
    let (mut parts, mut conditions) = (vec![("cpu".to_owned(), products, memory)], BTreeMap::new());
    for ((_, card), share) in gpus.iter().zip(shares) {
        let (name, share) = (format!("cuda:{}", card.index), share?);
        conditions.insert(name.clone(), share.condition);
        parts.push((name, share.products, share.memory));
    }
    Ok(CombinedRates { conditions, ..combine_rates(parts) })
}

/// Measures the processor while all GPUs are busy.
fn measure_cpu_share(
    cpu: &Cpu,
    threads: u32,
    duration: Duration,
    barrier: &StartBarrier,
) -> Result<(Vec<ProductRate>, MemoryRate), BenchError> {
    let third = duration / 3;
    // A failed part still waits at each barrier, so that the GPUs are not blocked.
    let pool = || Pool::new(threads as usize);
    let full = MeasurementExtent::full(cpu);
    let f32 = barrier.run_when_all_ready(|ready| product_rate::<f32>(&pool()?, DType::F32, third, &full, ready));
    let bf16 = barrier.run_when_all_ready(|ready| product_rate::<bf16>(&pool()?, DType::Bf16, third, &full, ready));
    let memory = barrier.run_when_all_ready(|ready| memory_rate(&pool()?, full.array, third, ready));
    Ok((vec![f32?, bf16?], memory?))
}

/// Adds up the sustained rates of devices.
fn combine_rates(parts: Vec<(String, Vec<ProductRate>, MemoryRate)>) -> CombinedRates {
    let sustained_flops = |products: &[ProductRate], dtype: DType| {
        products.iter().find(|rate| rate.dtype == dtype).map(|rate| rate.sustained_flops)
    };
    let product = |dtype: DType| {
        let rates: Option<Vec<f64>> = parts.iter().map(|(_, products, _)| sustained_flops(products, dtype)).collect();
        rates.map(|rates| CombinedRate { dtype, sustained_flops: rates.iter().sum() })
    };
    let dtypes: Vec<DType> = parts.first().into_iter().flat_map(|(_, products, _)| products).map(|p| p.dtype).collect();
    CombinedRates {
        products: dtypes.into_iter().filter_map(product).collect(),
        memory_bytes_per_second: parts.iter().map(|(_, _, memory)| memory.triad).sum(),
        devices: parts.into_iter().map(|(name, ..)| name).collect(),
        conditions: BTreeMap::new(),
    }
}

/// Measures f32 matrix products on `threads` threads of the processor for about `duration`.
///
/// # Errors
/// Memory or threads are refused.
pub fn cpu_products(threads: u32, duration: Duration) -> Result<ProductRate, BenchError> {
    product_rate::<f32>(
        &Pool::new(threads as usize)?,
        DType::F32,
        duration,
        &MeasurementExtent::full(&Cpu::read()),
        &mut || {},
    )
}

/// The memory used by a measurement of the processor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasurementExtent {
    /// Size of each of the three arrays that are read and written.
    array: Bytes,
    /// Divisor of the product sizes.
    shrink: usize,
    /// Sizes of the ops of a step.
    scale: Scale,
}

impl MeasurementExtent {
    /// Returns the extent of measurements that are cached: arrays of twice the last-level cache, so that three exceed
    /// it by far, but at most a sixteenth of the free memory each.
    pub fn full(cpu: &Cpu) -> MeasurementExtent {
        let wanted = (cpu.last_cache().0 * 2).max(16 << 20);
        let affordable = probe::Memory::read().free.0 / 16;
        let array = Bytes(wanted.min(affordable).max(1 << 20).next_multiple_of(4096));
        MeasurementExtent { array, shrink: 1, scale: Scale::PROCESSOR }
    }

    /// Returns an extent that uses at most `memory_limit`, from some 4 MiB on. Measured with two threads, including
    /// everything that the system counts: f32 products 24 MiB, the ops of a step 114 MiB, and 12 MiB at the small
    /// scale. Each further thread needs its workspace and stack.
    pub fn within_memory(self, memory_limit: Bytes, threads: u32) -> MeasurementExtent {
        let memory_limit = memory_limit.saturating_sub(Bytes::mib(u64::from(threads.saturating_sub(2))));
        let (shrink, scale) = match memory_limit {
            memory_limit if memory_limit >= Bytes::mib(128) => (1, Scale::PROCESSOR),
            memory_limit if memory_limit >= Bytes::mib(32) => (1, Scale::SMALL),
            _ => (8, Scale::TINY),
        };
        // An eighth is reserved for threads and other allocations.
        let third = (memory_limit.0 / 24 * 7).max(64 << 10) & !4095;
        MeasurementExtent { array: self.array.min(Bytes(third)), shrink, scale }
    }
}

/// Measures the CPU with `threads` threads in about `duration`, with products in each of `dtypes`. Types other than
/// f32, bf16 and f64 are skipped.
///
/// # Errors
/// Memory or threads are refused.
pub fn measure_cpu(
    cpu: &Cpu,
    threads: u32,
    dtypes: &[DType],
    duration: Duration,
    extent: &MeasurementExtent,
    stage: &mut dyn FnMut(&str),
) -> Result<DeviceBench, BenchError> {
    let pool = Pool::new(threads as usize)?;
    let scheduled = SchedulerTimes::read();
    let plural = if threads == 1 { "" } else { "s" };
    // Products get 60 % of the time, half of that for the first type; memory and ops get the rest.
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
    // The pool would compete with the executor's for the cores.
    drop(pool);
    let open = |set, placement, precision| executor::open(set, placement, precision, threads as usize, None);
    let kernels = Kernels::Cpu { threads: u64::from(threads) };
    let subject = |precision| OpRateSubject { kernels, precision, scale: extent.scale, open: &open };
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
        contention: SchedulerTimes::read().contention_since(scheduled),
        gpu: None,
    })
}

/// A matrix product of a training step: sizes, and which operands are stored transposed.
struct ProductShape {
    m: usize,
    n: usize,
    k: usize,
    a_transposed: bool,
    b_transposed: bool,
}

impl ProductShape {
    fn shrink_by(self, by: usize) -> ProductShape {
        ProductShape { m: self.m / by, n: self.n / by, k: self.k / by, ..self }
    }
}

/// One round: the three products of a projection between 384 and 1024 columns over 2048 tokens (forward, gradient of
/// the input, gradient of the weight), and a square one.
const ROUND_SHAPES: [ProductShape; 4] = [
    ProductShape { m: 2048, n: 1024, k: 384, a_transposed: false, b_transposed: true },
    ProductShape { m: 2048, n: 384, k: 1024, a_transposed: false, b_transposed: false },
    ProductShape { m: 1024, n: 384, k: 2048, a_transposed: true, b_transposed: false },
    ProductShape { m: 1024, n: 1024, k: 1024, a_transposed: false, b_transposed: true },
];

fn product_rate<T: Real>(
    pool: &Pool,
    dtype: DType,
    duration: Duration,
    extent: &MeasurementExtent,
    ready: &mut dyn FnMut(),
) -> Result<ProductRate, BenchError> {
    let round = ROUND_SHAPES.map(|shape| shape.shrink_by(extent.shrink));
    let largest = |size: fn(&ProductShape) -> usize| round.iter().map(size).max().unwrap_or(0);
    let (a, b, out) = (largest(|f| f.m * f.k), largest(|f| f.k * f.n), largest(|f| f.m * f.n));
    let lanes = pool.threads() as u64;
    let kernels = Kernels::Cpu { threads: lanes };
    let scratch = round.iter().map(|f| kernels.product(dtype, f.m as u64, f.n as u64, f.k as u64)).max().unwrap_or(0);
    let at = |elements: usize| (elements * size_of::<T>()).next_multiple_of(64) as u64;
    let arena = Arena::map(at(a + b + out) + scratch * size_of::<T::Wide>() as u64)?;
    // SAFETY: four disjoint ranges, and no other slices of this arena exist.
    let (left, right, result, scratch) = unsafe {
        (
            arena.slice_mut::<T>(0, a),
            arena.slice_mut::<T>((a * size_of::<T>()) as u64, b),
            arena.slice_mut::<T>(((a + b) * size_of::<T>()) as u64, out),
            arena.slice_mut::<T::Wide>(at(a + b + out), scratch as usize),
        )
    };
    // Positive and negative values without zeros. Some processors are faster on zeros, which would distort the
    // measurement.
    for (index, x) in left.iter_mut().chain(right.iter_mut()).enumerate() {
        *x = T::from_f64(((index * 37) % 101) as f64 / 101.0 - 0.4951);
    }
    ready();
    let operations: f64 = round.iter().map(|f| 2.0 * (f.m * f.n * f.k) as f64).sum();
    let seconds = pool_rounds(pool, duration, || {
        for &ProductShape { m, n, k, a_transposed, b_transposed } in &round {
            let mut shape = Product::new(m, n, k, &*left, &*right);
            shape = if a_transposed { shape.a_transposed() } else { shape };
            shape = if b_transposed { shape.b_transposed() } else { shape };
            product(pool, shape, black_box(&mut *result), scratch);
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
    // SAFETY: three disjoint arrays, and no other slices of this arena exist.
    let (a, b, c) = unsafe {
        (arena.slice_mut::<f32>(0, len), arena.slice_mut::<f32>(array.0, len), arena.slice_mut::<f32>(array.0 * 2, len))
    };
    a.fill(1.0);
    b.fill(2.0);
    c.fill(3.0);
    ready();
    let each = duration / 4;
    let bytes = array.0 as f64;
    // Tasks of at least 256 KiB: long enough to stream, and few enough that their overhead is negligible.
    let min_task = 1 << 16;
    let read = pool_rounds(pool, each, || {
        // Summing whole words, which the compiler may vectorize, so that memory and not the addition is the limit.
        let words: &[u64] = bytemuck::cast_slice(b);
        pool.split(words.len(), min_task / 2, |range, _| {
            black_box(words[range].iter().fold(0u64, |sum, &word| sum.wrapping_add(word)));
        });
    });
    let write = pool_rounds_over(pool, each, a, min_task, |_, part| part.fill(black_box(4.0)));
    let copy =
        pool_rounds_over(pool, each, a, min_task, |from, part| part.copy_from_slice(&b[from..from + part.len()]));
    let triad = pool_rounds_over(pool, each, a, min_task, |from, part| {
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

/// Times rounds of `work(start, part)` over all parts of `array`.
fn pool_rounds_over(
    pool: &Pool,
    duration: Duration,
    array: &mut [f32],
    min_task: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) -> Vec<f64> {
    pool_rounds(pool, duration, || {
        let len = array.len();
        let shared = Shared::new(array);
        pool.split(len, min_task, |range, _| {
            // SAFETY: the ranges of one split are disjoint.
            work(range.start, unsafe { shared.part(range) });
        });
    })
}

/// Returns the seconds to wake all threads for no work and wait for them, as each op of an executor does.
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

/// Returns the seconds of each round of `work`, for about `duration` and at least three rounds, after an uncounted
/// first round. Runs on the pool like an executor.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_measurements_are_plausible() {
        let cpu = Cpu::read();
        let mut stages = Vec::new();
        let types = [DType::F32, DType::Bf16, DType::F16];
        let measured =
            measure_cpu(&cpu, 1, &types, Duration::from_millis(20), &MeasurementExtent::full(&cpu), &mut |stage| {
                stages.push(stage.to_owned())
            })
            .unwrap();
        assert_eq!(stages.last().unwrap(), "cpu, 1 thread: the ops of a step");
        // There are no f16 products, so there is no figure for them.
        assert_eq!(measured.products.iter().map(|rate| rate.dtype).collect::<Vec<_>>(), [DType::F32, DType::Bf16]);
        for rate in &measured.products {
            assert!(rate.best_flops >= rate.median_flops && rate.best_flops >= rate.sustained_flops);
            // A range that includes any current processor.
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
    fn combined_rates_cover_common_types() {
        let rate = |dtype, sustained_flops| ProductRate { dtype, median_flops: 0.0, best_flops: 0.0, sustained_flops };
        let device = |name: &str, products: Vec<ProductRate>, triad: f64| {
            let memory = MemoryRate { array_bytes: Bytes::mib(1), read: 0.0, write: 0.0, copy: 0.0, triad };
            (name.to_owned(), products, memory)
        };
        let cpu = device("cpu", vec![rate(DType::F32, 1.0), rate(DType::F64, 2.0)], 4.0);
        let gpu = device("cuda:0", vec![rate(DType::F32, 16.0), rate(DType::Bf16, 32.0)], 64.0);
        let all = combine_rates(vec![cpu, gpu]);
        assert_eq!(all.devices, ["cpu", "cuda:0"]);
        assert_eq!(all.products, [CombinedRate { dtype: DType::F32, sustained_flops: 17.0 }]);
        assert_eq!(all.memory_bytes_per_second, 68.0);
    }

    #[test]
    fn median_is_the_middle_value() {
        assert_eq!(median(&[3.0, 1.0, 100.0]), 3.0);
    }
}
