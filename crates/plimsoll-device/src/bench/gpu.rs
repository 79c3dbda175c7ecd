//! Measurement of a GPU: matrix products through cuBLASLt with the algorithms of runs, memory bandwidth with this
//! crate's kernels, and the host link with the executor's copies; also the GPU's condition before and after.

use super::op_rates::{self, OpRateSubject, Scale};
use super::timing::{OpenDevice, TimingDevice, add_program, median, repeated_program};
use super::{BenchError, CONCURRENT_DTYPES, DeviceBench, GpuBench, MemoryRate, ProductRate, StartBarrier};
use crate::cuda::gpus::{CudaInstallation, GpuInfo};
use crate::cuda::nvml::Condition;
use crate::error::DeviceError;
use crate::gpu::{free_bytes, open};
use plimsoll_core::{Bytes, Category, DType, Link, Space};
use plimsoll_program::ProgramKind;
use plimsoll_program::builder::Builder;
use plimsoll_program::op::Queue;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, Op, OpKind, Operand, Placement, ProgramSet, Tensor};
use std::time::Duration;

/// `[m, n, k]` of three matrix products that are typical of a layer of models with 1 to 8 billion parameters, over 4096
/// tokens.
const LARGE_SHAPES: [[u64; 3]; 3] = [[4096, 11264, 2048], [4096, 2048, 5632], [4096, 4096, 4096]];
/// `[m, n, k]` of small products, for the simulated GPU of the tests, which is too slow for [`LARGE_SHAPES`].
const SMALL_SHAPES: [[u64; 3]; 3] = [[32, 48, 16], [32, 16, 48], [32, 32, 32]];

/// Number of multiprocessors from which a GPU counts as real. The simulated GPU of the tests has fewer.
const MULTIPROCESSORS_MIN: u32 = 4;

/// Measures a GPU in about `duration`. `stage` receives a description of each part when it begins. The GPU's context
/// stays open, with everything that libraries have loaded in it.
///
/// # Errors
/// Fails if a library is missing, or the GPU refuses memory.
pub(crate) fn measure_gpu(
    installation: &'static CudaInstallation,
    gpu: &GpuInfo,
    duration: Duration,
    stage: &mut dyn FnMut(&str),
) -> Result<DeviceBench, BenchError> {
    let name = format!("cuda:{}", gpu.index);
    let free = free_bytes(installation, gpu)?;
    let before = installation.condition(gpu);
    let open_gpu = |set: ProgramSet, placement: Placement, precision: DType| {
        Ok(open(gpu.index, 1, precision, None, set, placement)?.device)
    };
    let subject = |precision, scale| OpRateSubject { kernels: Kernels::Cuda, precision, scale, open: &open_gpu };
    let (scale, shapes) = workload_size(gpu);
    let mut products = Vec::new();
    for (dtype, share) in [(DType::F32, 0.15), (DType::Bf16, 0.4)] {
        stage(&format!("{name}: products in {dtype}"));
        products.push(product_rate(&subject(dtype, scale), &shapes, duration.mul_f64(share), &mut || {})?);
    }
    let after = installation.condition(gpu);
    stage(&format!("{name}: memory and link"));
    let array = array_bytes(gpu, free);
    let memory = memory_rate(&open_gpu, array, duration.mul_f64(0.1), &mut || {})?;
    let link = link(&open_gpu, Bytes(array.0.min(128 << 20)), duration.mul_f64(0.1))?;
    let op_seconds = op_seconds(&open_gpu)?;
    stage(&format!("{name}: the ops of a step"));
    let mut ops = op_rates::measure(&subject(DType::F32, scale))?;
    ops.bf16 = Some(Box::new(op_rates::measure(&subject(DType::Bf16, scale))?));
    Ok(DeviceBench {
        device: name,
        simulated: false,
        model: gpu.name.clone(),
        threads: 0,
        products,
        memory,
        op_seconds,
        ops,
        contention: 0.0,
        gpu: Some(GpuBench {
            driver: installation.driver_version.clone(),
            multiprocessors: gpu.multiprocessors,
            to_device: link.0,
            to_host: link.1,
            before,
            after,
        }),
    })
}

/// Rates of a GPU, measured while all other devices are busy as well.
pub(super) struct ConcurrentBench {
    pub products: Vec<ProductRate>,
    pub memory: MemoryRate,
    pub condition: Condition,
}

/// Measures a GPU while the other devices are measured as well. All devices wait for each other at the barrier
/// `meeting` before each part: f32 products, bf16 products, and memory. Each part takes about a third of `duration`.
///
/// # Errors
/// Fails if a library is missing, or the GPU refuses memory. The other devices do not wait for a GPU that has failed.
pub(super) fn measure_concurrently(
    installation: &'static CudaInstallation,
    gpu: &GpuInfo,
    duration: Duration,
    meeting: &StartBarrier,
) -> Result<ConcurrentBench, BenchError> {
    let open_gpu = |set: ProgramSet, placement: Placement, precision: DType| {
        Ok(open(gpu.index, 1, precision, None, set, placement)?.device)
    };
    let (scale, shapes) = workload_size(gpu);
    let rate = |precision| {
        let subject = OpRateSubject { kernels: Kernels::Cuda, precision, scale, open: &open_gpu };
        meeting.run_when_all_ready(|ready| product_rate(&subject, &shapes, duration / 3, ready))
    };
    let products = CONCURRENT_DTYPES.map(rate);
    let condition = installation.condition(gpu);
    let memory = meeting.run_when_all_ready(|ready| {
        let array = array_bytes(gpu, free_bytes(installation, gpu)?);
        Ok(memory_rate(&open_gpu, array, duration / 3, ready)?)
    });
    Ok(ConcurrentBench { products: products.into_iter().collect::<Result<_, _>>()?, memory: memory?, condition })
}

/// Returns sizes of ops that keep a GPU busy, and the shapes `[m, n, k]` of matrix products to time. Both are small for
/// the simulated GPU of the tests.
fn workload_size(gpu: &GpuInfo) -> (Scale, [[u64; 3]; 3]) {
    if gpu.multiprocessors >= MULTIPROCESSORS_MIN { (Scale::GPU, LARGE_SHAPES) } else { (Scale::TINY, SMALL_SHAPES) }
}

/// Returns the size of an array for the measurement of memory. It exceeds the caches of a GPU, but takes at most about
/// an eighth of the GPU's free memory. The simulated GPU of the tests gets a small array.
fn array_bytes(gpu: &GpuInfo, free: Bytes) -> Bytes {
    let largest = if gpu.multiprocessors >= MULTIPROCESSORS_MIN { 512 << 20 } else { 1 << 16 };
    Bytes((free.0 / 8).min(largest).max(1 << 12).next_multiple_of(4096))
}

fn product_rate(
    subject: &OpRateSubject,
    shapes: &[[u64; 3]],
    duration: Duration,
    ready: &mut dyn FnMut(),
) -> Result<ProductRate, BenchError> {
    let each = duration / shapes.len() as u32;
    let seconds = op_rates::time_products(subject, shapes, 4, each, ready)?;
    let operations: f64 = shapes.iter().map(|[m, n, k]| 2.0 * (m * n * k) as f64).sum();
    let rate = |pick: &dyn Fn(&[f64]) -> f64| operations / seconds.iter().map(|rounds| pick(rounds)).sum::<f64>();
    let second_half = |rounds: &[f64]| {
        let rounds = &rounds[rounds.len() / 2..];
        rounds.iter().sum::<f64>() / rounds.len() as f64
    };
    Ok(ProductRate {
        dtype: subject.precision,
        median_flops: rate(&median),
        best_flops: rate(&|rounds| rounds.iter().copied().fold(f64::INFINITY, f64::min)),
        sustained_flops: rate(&second_half),
    })
}

/// Number of ops in one timed round. With so many, the time to start the Program and wait for its end is negligible.
const OPS_PER_ROUND: u32 = 16;

fn memory_rate(
    open: &OpenDevice,
    array: Bytes,
    duration: Duration,
    ready: &mut dyn FnMut(),
) -> Result<MemoryRate, DeviceError> {
    let elements = array.0 / 4;
    let mut builder = Builder::new(DType::F32, Kernels::Cuda);
    let [a, b] = ["a", "b"].map(|name| builder.persistent(name, &[elements], DType::F32, Category::Weight, 1));
    let metrics = builder.persistent("metrics", &[8], DType::F64, Category::Weight, 1);
    let scratch = builder.tensor(Tensor {
        name: "scratch".into(),
        shape: vec![Kernels::Cuda.squared_norm_workspace().max(1)],
        dtype: DType::F64,
        space: Space::Device,
        category: Category::Workspace,
        lifetime: Lifetime::Persistent,
        slots: 1,
    });
    let [x, y, sums, workspace] = [a, b, metrics, scratch].map(Operand::whole);
    let ops = [
        OpKind::SquaredNorm { x, metrics: sums, workspace, elements },
        OpKind::Fill { into: x, value: 1.0, elements },
        OpKind::Cast { from: x, to: y, elements },
        OpKind::Add { x, into: y, elements },
    ];
    let programs = ops.map(|kind| add_program(&mut builder.set, repeated_program(vec![kind.into()], OPS_PER_ROUND)));
    let [read, write, copy, triad] = programs;
    let mut trial = TimingDevice::open(open, builder.set, DType::F32, a)?;
    ready();
    let mut rate = |program: ProgramKind, arrays: f64| {
        let rounds = trial.time_rounds(program, duration / 4)?;
        Ok::<f64, DeviceError>(arrays * array.0 as f64 * f64::from(OPS_PER_ROUND) / median(&rounds))
    };
    Ok(MemoryRate {
        array_bytes: array,
        write: rate(write, 1.0)?,
        read: rate(read, 1.0)?,
        copy: rate(copy, 2.0)?,
        triad: rate(triad, 3.0)?,
    })
}

/// Measures copies between pinned host memory and the device. Returns speed and latency of copies to the device, then
/// of copies to the host.
fn link(open: &OpenDevice, array: Bytes, duration: Duration) -> Result<(Link, Link), DeviceError> {
    let elements = array.0 / 4;
    let mut builder = Builder::new(DType::F32, Kernels::Cuda);
    let device = builder.persistent("device", &[elements], DType::F32, Category::Staging, 1);
    let host = builder.tensor(Tensor {
        name: "host".into(),
        shape: vec![elements],
        dtype: DType::F32,
        space: Space::Host,
        category: Category::Staging,
        lifetime: Lifetime::Persistent,
        slots: 1,
    });
    let copy = |from, to, elements, queue| {
        let (from, to) = (Operand::whole(from), Operand::whole(to));
        let start = Op { kind: OpKind::TransferStart { from, to, elements, sequence: 0 }, queue };
        vec![start, Op { kind: OpKind::TransferWait { from, to, elements, sequence: 0 }, queue: Queue::Compute }]
    };
    let mut copies = |elements| {
        let to_device = copy(host, device, elements, Queue::CopyIn);
        let to_host = copy(device, host, elements, Queue::CopyOut);
        [to_device, to_host].map(|ops| add_program(&mut builder.set, repeated_program(ops, OPS_PER_ROUND)))
    };
    let ([all_to_device, all_to_host], [one_to_device, one_to_host]) = (copies(elements), copies(1));
    let mut trial = TimingDevice::open(open, builder.set, DType::F32, device)?;
    let mut measure = |whole, one| measure_direction(&mut trial, [whole, one], array, duration / 4);
    Ok((measure(all_to_device, one_to_device)?, measure(all_to_host, one_to_host)?))
}

/// Measures one direction of the link, with a program whose ops copy `array` bytes and one whose ops copy a single
/// element. Runs each program for about `duration`.
fn measure_direction(
    trial: &mut TimingDevice,
    [whole, one]: [ProgramKind; 2],
    array: Bytes,
    duration: Duration,
) -> Result<Link, DeviceError> {
    let whole = median(&trial.time_rounds(whole, duration)?) / f64::from(OPS_PER_ROUND);
    let one = median(&trial.time_rounds(one, duration)?) / f64::from(OPS_PER_ROUND);
    Ok(Link { bytes_per_second: array.0 as f64 / (whole - one).max(whole / 2.0), latency_seconds: one })
}

/// Measures the seconds that a tiny op takes on an idle device, which is the cost of its launch.
fn op_seconds(open: &OpenDevice) -> Result<f64, DeviceError> {
    const OPS: u32 = 256;
    let mut builder = Builder::new(DType::F32, Kernels::Cuda);
    let a = builder.persistent("a", &[32], DType::F32, Category::Weight, 1);
    let fill = OpKind::Fill { into: Operand::whole(a), value: 1.0, elements: 32 };
    let fills = add_program(&mut builder.set, repeated_program(vec![fill.into()], OPS));
    let mut trial = TimingDevice::open(open, builder.set, DType::F32, a)?;
    Ok(median(&trial.time_rounds(fills, Duration::from_millis(20))?) / f64::from(OPS))
}
