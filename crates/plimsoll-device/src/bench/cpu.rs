//! Measurement of the processor, on the executor's kernels and thread pool.

use super::op_rates::{self, OpRateSubject, Scale};
use super::timing::median;
use super::{BenchError, DeviceBench, MemoryRate, ProductRate, StartBarrier};
use crate::arena::Arena;
use crate::cpu::executor;
use crate::cpu::kernels::{Multiply, Product, product};
use crate::cpu::pool::{Pool, Shared};
use crate::probe::{Cpu, Memory};
use crate::process::SchedulerTimes;
use half::bf16;
use plimsoll_core::{Bytes, DType};
use plimsoll_program::workspace::Kernels;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Measures the CPU while the other devices are measured as well. All devices wait for each other at `barrier` before
/// each part: f32 products, bf16 products, and memory. Each part takes about a third of `duration`.
pub(super) fn measure_share(
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

/// Sizes of the arrays, products and ops in a measurement of the processor. They determine the memory it needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasurementExtent {
    /// Size of each of the three arrays with which memory traffic is measured.
    array: Bytes,
    /// Divisor of every dimension of the measured matrix products; 1 for full size.
    shrink: usize,
    /// Sizes of the ops that are timed one by one: further matrix products, and a small reference model.
    scale: Scale,
}

impl MeasurementExtent {
    /// Returns the full extent. Rates are cached only if they were measured with it. Each array has twice the size of
    /// the last-level cache and at least 16 MiB, but at most about a sixteenth of the free memory.
    pub fn full(cpu: &Cpu) -> MeasurementExtent {
        let wanted = (cpu.last_cache().0 * 2).max(16 << 20);
        let affordable = Memory::read().free.0 / 16;
        let array = Bytes(wanted.min(affordable).max(1 << 20).next_multiple_of(4096));
        MeasurementExtent { array, shrink: 1, scale: Scale::PROCESSOR }
    }

    /// Reduces the extent so that a measurement uses at most `memory_limit`, if that is at least about 4 MiB.
    ///
    /// At full size, two threads use 24 MiB for f32 products and 114 MiB for the ops of a training step; the ops of a
    /// smaller model use 12 MiB. Each further thread needs its workspace and stack.
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

/// Measures the CPU with `threads` threads: matrix products in each of `dtypes`, memory and the fixed time of an op in
/// about `duration`, then the rates of all ops, about a second more for each of f32 and bf16. Types other than f32, bf16
/// and f64 are skipped. `stage` receives a description of each part when it begins.
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

/// A matrix product of a training step: its sizes, and whether each operand is stored transposed.
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

/// The matrix products that one timed round runs. Three belong to a projection from 384 to 1024 columns over 2048
/// tokens (forward, gradient of the input, gradient of the weight). The fourth is square.
const ROUND_SHAPES: [ProductShape; 4] = [
    ProductShape { m: 2048, n: 1024, k: 384, a_transposed: false, b_transposed: true },
    ProductShape { m: 2048, n: 384, k: 1024, a_transposed: false, b_transposed: false },
    ProductShape { m: 1024, n: 384, k: 2048, a_transposed: true, b_transposed: false },
    ProductShape { m: 1024, n: 1024, k: 1024, a_transposed: false, b_transposed: true },
];

fn product_rate<T: Multiply>(
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
    let scratch =
        round.iter().map(|f| kernels.product_workspace(dtype, f.m as u64, f.n as u64, f.k as u64)).max().unwrap_or(0);
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

/// Runs rounds for about `duration` and returns the seconds of each. A round calls `work(start, part)` on the pool for
/// all parts of `array`; `start` is the index of the part's first element.
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

/// Measures the seconds to wake all threads of the pool for no work and wait for them, as each op of the executor does.
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

/// Runs `work` repeatedly on the pool, for about `duration` and at least three times after an untimed first run.
/// Returns the seconds of each timed run.
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
}
