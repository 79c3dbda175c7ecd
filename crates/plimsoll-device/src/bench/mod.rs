//! Measured speed of devices: matrix products, memory traffic and the fixed cost of an op. The planner's prices for
//! devices that are present come from these measurements, through [`crate::calibration`]. It uses published rates for
//! paper devices, and nominal rates to choose the plan of a deterministic run.
//!
//! The measurements run the executors' own kernels, in the shapes of a training step.
//!
//! | module | measures |
//! |---|---|
//! | `cpu` | the processor, on the executor's thread pool |
//! | `gpu` | a GPU |
//! | `op_rates` | each kind of op, on any device |
//! | `timing` | small Programs, on any device |

mod cpu;
mod gpu;
mod op_rates;
mod timing;

pub use cpu::{MeasurementExtent, cpu_products, measure_cpu};
pub(crate) use gpu::measure_gpu;

use crate::cuda::gpus;
use crate::cuda::nvml::Condition;
use crate::error::ArenaError;
use crate::error::DeviceError;
use crate::probe::Cpu;
use plimsoll_core::{Bytes, DType, Failure, Link, OpRates};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// A failed measurement.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The memory for the arrays is not available.
    #[error("cannot measure: {0}")]
    Arena(#[from] ArenaError),
    /// The threads could not be started, or the executor could not run the ops.
    #[error("cannot measure: {0}")]
    Device(#[from] DeviceError),
}

impl From<BenchError> for Failure {
    fn from(error: BenchError) -> Failure {
        let message = error.to_string();
        let cause = match error {
            BenchError::Arena(error) => Failure::from(error),
            BenchError::Device(error) => Failure::from(error),
        };
        Failure { message, ..cause }
    }
}

/// The output of `plimsoll bench devices --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Bench {
    /// Version of Plimsoll that was measured.
    pub plimsoll: String,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Figures of each device measured alone. The CPU has one entry for one thread, and one for the default number of
    /// threads if that is larger.
    pub devices: Vec<DeviceBench>,
    /// Summed rates of all devices, measured at the same time. Without usable GPUs: the rates of the CPU alone.
    pub all: CombinedRates,
}

/// Measured figures of one device with a given number of threads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceBench {
    /// Name of the device in run files.
    pub device: String,
    /// Whether the device is simulated. Always false here: only real devices are measured.
    pub simulated: bool,
    /// Model name given by the maker.
    pub model: String,
    /// Number of threads that computed; 0 for a GPU.
    pub threads: u32,
    /// Rates of matrix products, with one entry for each measured element type.
    pub products: Vec<ProductRate>,
    /// Memory traffic beyond the caches.
    pub memory: MemoryRate,
    /// Fixed time of each op, in seconds. On a CPU: the time to wake all threads for no work and wait for them. On a
    /// GPU: the time of a launch.
    pub op_seconds: f64,
    /// Rates of products of many sizes and of the other ops of a training step. The planner predicts times from them.
    pub ops: OpRates,
    /// Share of the time in which runnable threads of this process waited for a core, from 0 to 1; 0 for a GPU.
    pub contention: f64,
    /// Figures that only GPUs have; `None` for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuBench>,
}

/// Figures that only GPUs have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GpuBench {
    /// Version of the driver.
    pub driver: String,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Link from pinned host memory to the device.
    pub to_device: Link,
    /// Link from the device to pinned host memory.
    pub to_host: Link,
    /// Temperature, clocks and power before the measurement.
    pub before: Condition,
    /// Temperature, clocks and power after the matrix products, which are measured first.
    pub after: Condition,
}

impl DeviceBench {
    /// Whether other programs used so much of the processor during the measurement that the figures are unreliable.
    pub fn disturbed(&self) -> bool {
        self.contention > 0.1
    }
}

/// Rate of matrix products in one element type, in operations per second. A multiplication and an addition count as
/// two.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProductRate {
    /// Type of the operands.
    pub dtype: DType,
    /// Operations per second in the median round.
    pub median_flops: f64,
    /// Operations per second in the fastest round.
    pub best_flops: f64,
    /// Operations per second over the second half of the rounds, when the device is warm.
    pub sustained_flops: f64,
}

/// Memory traffic in bytes per second, beyond the caches: the median round of each kind of access. Each byte read and
/// each byte written counts once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemoryRate {
    /// Size of each array that is read or written; larger than the last-level cache unless memory is short.
    pub array_bytes: Bytes,
    /// Bytes per second when reading one array.
    pub read: f64,
    /// Bytes per second when writing one array.
    pub write: f64,
    /// Bytes per second, read and written, when copying one array to another.
    pub copy: f64,
    /// Bytes per second when reading two arrays and writing one, as most ops of a step do. CPUs compute `a = b + s c`,
    /// GPUs `a = a + b`.
    pub triad: f64,
}

/// Summed rates of all devices, measured while all are busy at the same time; without usable GPUs, the rates of the CPU
/// alone. `plimsoll bench devices` reports them. No plan uses them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CombinedRates {
    /// Names of the devices that are summed.
    pub devices: Vec<String>,
    /// Sums of the sustained rates of matrix products, one for each element type that all devices compute in.
    pub products: Vec<CombinedRate>,
    /// Sum of the devices' memory traffic in bytes per second, when each reads two arrays and writes one.
    pub memory_bytes_per_second: f64,
    /// Temperature, clocks and power of each GPU at the end of the matrix products, by device name; empty without GPUs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub conditions: BTreeMap<String, Condition>,
}

/// Sum of the sustained rates of matrix products of several devices, in one element type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CombinedRate {
    /// Type of the operands.
    pub dtype: DType,
    /// Sum of the devices' operations per second when warm.
    pub sustained_flops: f64,
}

/// Measures all devices of this machine in about `duration`. `stage` receives a description of each measurement when it
/// begins.
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
        devices.push(measure_gpu(here, card, each, &mut stage)?);
    }
    let all = if usable.is_empty() {
        combine_rates(vec![(full.device, full.products, full.memory)])
    } else {
        stage("all devices at once");
        measure_concurrently(&cpu, threads, &usable, each)?
    };
    Ok(Bench { plimsoll: env!("CARGO_PKG_VERSION").to_owned(), seconds: start.elapsed().as_secs_f64(), devices, all })
}

/// Returns the GPUs that a run could use; empty without a driver or a required library.
fn usable_gpus() -> Vec<(&'static gpus::CudaInstallation, &'static gpus::GpuInfo)> {
    let Ok(here) = gpus::installation() else { return Vec::new() };
    if here.nvrtc().is_err() || here.cublaslt().is_err() {
        return Vec::new();
    }
    here.gpus.iter().filter(|card| card.architecture.check().is_ok()).map(|card| (here, card)).collect()
}

/// Element types of the matrix products that are measured on all devices at the same time.
const CONCURRENT_DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// A barrier at which devices wait for each other before a common measurement.
struct StartBarrier(Barrier);

impl StartBarrier {
    /// Runs `work` for one device. When `work` is ready to measure, it calls its argument, which returns when all
    /// devices are ready. If `work` fails before that call, the other devices do not wait for this one.
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
            .map(|&(here, card)| scope.spawn(move || gpu::measure_concurrently(here, card, duration, barrier)))
            .collect();
        let cpu_share = cpu::measure_share(cpu, threads, duration, barrier);
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

/// Adds up the sustained product rates and the memory traffic of devices. An element type counts only if all devices
/// have a rate for it.
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
