//! Measurements of this machine's devices that are cached between runs.
//!
//! | file | contents | module |
//! |---|---|---|
//! | `devices.json` | rates that the planner prices with | this one |
//! | `shortfalls.json` | memory or speed that devices lacked | `shortfalls` |
//! | `disks.json` | rates of disks | `disks` |
//!
//! They lie in the folder of [`crate::cache`].
//!
//! Rates of another processor or GPU, thread count, driver or version of Plimsoll are not used. Rates measured while
//! other programs used the cores expire after a few minutes. If the folder is not writable, the next run measures
//! again.

mod disks;
mod shortfalls;

pub use disks::{disk, remeasure_disk};
pub use shortfalls::{
    Shortfall, ShortfallKind, forget_memory_shortfall, forget_shortfalls, record_memory_shortfall, record_slowdown,
    shortfalls,
};

use crate::bench::{self, Bench, BenchError, DeviceBench, MeasurementExtent};
use crate::cache::{cache_no_charges, folder, load, save};
use crate::cuda;
use crate::cuda::driver::Context;
use crate::cuda::gpus::{CudaInstallation, GpuInfo};
use crate::probe::Cpu;
use plimsoll_core::{Bytes, DType, Link, Rates};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Approximate duration of the measurement of a device that has no cached rates.
pub const QUICK_MEASUREMENT: Duration = Duration::from_millis(1500);

/// Age up to which cached rates are used if they were measured while other programs used the cores. Several commands in
/// a row then measure once.
pub const DISTURBED_LIFETIME: Duration = Duration::from_secs(300);

/// Rates of a device, from which the planner predicts times, with their origin.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Rates of the device.
    pub rates: Rates,
    /// Origin of the rates.
    pub source: RateSource,
}

/// Origin of a device's rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RateSource {
    /// An earlier measurement on this machine.
    Cached,
    /// Measured just now.
    Measured,
    /// Measured just now, or less than [`DISTURBED_LIFETIME`] ago, while other programs used the cores. The rates are
    /// right for now, and too low for later.
    Disturbed {
        /// Share of the time, from 0 to 1, in which threads of the measurement waited for a core.
        contention: f64,
    },
    /// Measured by this process with smaller arrays and ops, because memory is short. The rates are right for this run,
    /// and are not written to the cache.
    MemoryLimited,
}

/// Rates of the CPU known to this process, by thread count, so that nothing is measured twice.
static CPU_RATES: Mutex<BTreeMap<u32, Calibration>> = Mutex::new(BTreeMap::new());

/// Returns the largest share of the time, from 0 to 1, in which other programs used the cores during a measurement that
/// this process uses. None if no such measurement was disturbed.
pub fn max_contention() -> Option<f64> {
    let rates_by_threads = CPU_RATES.lock().unwrap_or_else(PoisonError::into_inner);
    let shares = rates_by_threads.values().filter_map(|entry| match entry.source {
        RateSource::Disturbed { contention } => Some(contention),
        RateSource::Cached | RateSource::Measured | RateSource::MemoryLimited => None,
    });
    shares.max_by(f64::total_cmp)
}

/// Returns the CPU's rates with `threads` threads: from the cache, or measured in about [`QUICK_MEASUREMENT`] and
/// cached.
///
/// # Errors
/// A measurement is needed, and memory or threads are refused.
pub fn cpu(threads: u32) -> Result<Calibration, BenchError> {
    cpu_within_memory(threads, Bytes(u64::MAX))
}

/// Returns whether the CPU's rates with `threads` threads are known, so that [`cpu`] measures nothing.
pub fn knows_cpu(threads: u32) -> bool {
    let is_known = CPU_RATES.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&threads);
    is_known || cached_cpu(folder().as_deref(), &RatesKey::of(&Cpu::read(), threads)).is_some()
}

/// Returns the CPU's rates with `threads` threads: from the cache, or measured in about [`QUICK_MEASUREMENT`]. A
/// measurement uses at most `memory_limit` bytes more than the process holds now. Its rates are cached unless that
/// limit made it smaller.
///
/// # Errors
/// The errors of [`cpu`].
pub fn cpu_within_memory(threads: u32, memory_limit: Bytes) -> Result<Calibration, BenchError> {
    let mut rates_by_threads = CPU_RATES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(entry) = rates_by_threads.get(&threads) {
        return Ok(entry.clone());
    }
    let measured = cpu_cached(folder().as_deref(), &Cpu::read(), threads, QUICK_MEASUREMENT, memory_limit)?;
    rates_by_threads.insert(threads, measured.clone());
    Ok(measured)
}

fn cpu_cached(
    folder: Option<&Path>,
    cpu: &Cpu,
    threads: u32,
    duration: Duration,
    memory_limit: Bytes,
) -> Result<Calibration, BenchError> {
    let key = RatesKey::of(cpu, threads);
    if let Some(entry) = cached_cpu(folder, &key) {
        let disturbed = entry.disturbed.map(|disturbed| RateSource::Disturbed { contention: disturbed.contention });
        return Ok(Calibration { rates: entry.rates, source: disturbed.unwrap_or(RateSource::Cached) });
    }
    let whole = MeasurementExtent::full(cpu);
    let extent = whole.within_memory(memory_limit, threads);
    let measured = bench::measure_cpu(cpu, threads, &[DType::F32, DType::Bf16], duration, &extent, &mut |_| {})?;
    let contention = measured.contention;
    let source = match measured.disturbed() {
        true => RateSource::Disturbed { contention },
        false if extent != whole => RateSource::MemoryLimited,
        false => RateSource::Measured,
    };
    let rates = rates(&measured);
    let disturbed = match source {
        RateSource::Disturbed { contention } => Some(Disturbance { contention, at: now() }),
        _ => None,
    };
    if let Some(folder) = folder.filter(|_| extent == whole) {
        store_rates(folder, vec![CachedRates { key, rates: rates.clone(), disturbed }]);
    }
    Ok(Calibration { rates, source })
}

/// Returns the entry of the cache in `folder` with this key; `None` if there is none, or a disturbed one that expired.
fn cached_cpu(folder: Option<&Path>, key: &RatesKey) -> Option<CachedRates> {
    let entry = read(folder?).into_iter().find(|entry| entry.key == *key)?;
    entry.disturbed.is_none_or(|disturbed| disturbed.holds_at(now())).then_some(entry)
}

/// Returns a GPU's rates: from the cache, or measured and cached. A measurement takes about [`QUICK_MEASUREMENT`] plus
/// the preparation of its kernels.
///
/// # Errors
/// A measurement is needed, and a library is missing or the GPU fails.
pub fn gpu(installation: &'static CudaInstallation, gpu: &GpuInfo) -> Result<Calibration, BenchError> {
    let key = RatesKey::of_gpu(installation, gpu);
    let folder = folder();
    if let Some(entry) = folder.as_deref().and_then(|folder| read(folder).into_iter().find(|entry| entry.key == key)) {
        return Ok(Calibration { rates: entry.rates, source: RateSource::Cached });
    }
    let measured = bench::measure_gpu(installation, gpu, QUICK_MEASUREMENT, &mut |_| {});
    // Modules loaded for the measurement must not count as charges of the following run. Libraries may still hold the
    // context, so this process caches no charges.
    Context::close(gpu.index);
    cache_no_charges(gpu);
    let rates = rates(&measured?);
    if let Some(folder) = &folder {
        store_rates(folder, vec![CachedRates { key, rates: rates.clone(), disturbed: None }]);
    }
    Ok(Calibration { rates, source: RateSource::Measured })
}

/// Caches the rates in the output of `plimsoll bench devices`, in place of earlier ones. CPU figures that other
/// programs disturbed are left out.
pub fn store_bench(bench: &Bench) {
    let Some(folder) = folder() else { return };
    store_measured(&folder, &Cpu::read(), &bench.devices);
    let Ok(installation) = cuda::gpus::installation() else { return };
    let measured = |gpu: &GpuInfo| bench.devices.iter().find(|device| device.device == format!("cuda:{}", gpu.index));
    let entry_of = |gpu| {
        Some(CachedRates { key: RatesKey::of_gpu(installation, gpu), rates: rates(measured(gpu)?), disturbed: None })
    };
    store_rates(&folder, installation.gpus.iter().filter_map(entry_of).collect());
}

fn store_measured(folder: &Path, cpu: &Cpu, measured: &[DeviceBench]) {
    let good = measured.iter().filter(|device| device.device == "cpu" && !device.disturbed());
    let entry_of = |device: &DeviceBench| CachedRates {
        key: RatesKey::of(cpu, device.threads),
        rates: rates(device),
        disturbed: None,
    };
    store_rates(folder, good.map(entry_of).collect());
}

/// Converts a measurement into the rates that the planner uses.
pub fn rates(measured: &DeviceBench) -> Rates {
    let product =
        |dtype: DType| measured.products.iter().find(|rate| rate.dtype == dtype).map_or(0.0, |rate| rate.median_flops);
    Rates {
        f32_flops: product(DType::F32),
        // Zero if the device does not compute in bf16; no plan can use such a device.
        bf16_flops: product(DType::Bf16),
        memory_bytes_per_second: measured.memory.triad,
        op_seconds: measured.op_seconds,
        // The CPU is its own host, so host copies are copies in memory. For a GPU the slower direction counts.
        host_link: match &measured.gpu {
            None => Link { bytes_per_second: measured.memory.copy / 2.0, latency_seconds: measured.op_seconds },
            Some(gpu) => Link {
                bytes_per_second: gpu.to_device.bytes_per_second.min(gpu.to_host.bytes_per_second),
                latency_seconds: gpu.to_device.latency_seconds.max(gpu.to_host.latency_seconds),
            },
        },
        measured: true,
        ops: measured.ops.clone(),
    }
}

/// The conditions under which rates were measured. Cached rates are used only if all of them are equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RatesKey {
    plimsoll: String,
    device: String,
    model: String,
    features: Vec<String>,
    threads: u32,
}

impl RatesKey {
    fn of(cpu: &Cpu, threads: u32) -> RatesKey {
        RatesKey {
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            device: "cpu".to_owned(),
            model: cpu.model.clone(),
            features: cpu.features.clone(),
            threads,
        }
    }

    fn of_gpu(installation: &CudaInstallation, gpu: &GpuInfo) -> RatesKey {
        let library = |found: Result<&cuda::libraries::FoundLibrary, _>| found.map(|found| found.version.clone());
        let cublaslt = library(installation.cublaslt()).unwrap_or_default();
        RatesKey {
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            device: "cuda".to_owned(),
            model: gpu.name.clone(),
            features: vec![format!("driver {}", installation.driver_version), format!("cuBLASLt {cublaslt}")],
            threads: gpu.multiprocessors,
        }
    }
}

/// An entry of `devices.json`: rates, and the conditions under which they were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct CachedRates {
    #[serde(flatten)]
    key: RatesKey,
    rates: Rates,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disturbed: Option<Disturbance>,
}

/// Time of a measurement while other programs used the cores, and the share of the time in which threads waited.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Disturbance {
    contention: f64,
    /// Time of the measurement, in seconds since 1970.
    at: u64,
}

impl Disturbance {
    /// Whether the disturbed rates are still young enough for use at time `now`, in seconds since 1970. Also false if
    /// the clock was set back.
    fn holds_at(self, now: u64) -> bool {
        now.checked_sub(self.at).is_some_and(|age| age < DISTURBED_LIFETIME.as_secs())
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Name of the file in the cache folder that holds the rates of devices.
const FILE_NAME: &str = "devices.json";

/// Returns the entries of `devices.json` in the cache folder, without implausible ones; empty if the file is missing or
/// damaged.
fn read(folder: &Path) -> Vec<CachedRates> {
    let entries: Vec<CachedRates> = load(&folder.join(FILE_NAME));
    entries.into_iter().filter(|entry| is_plausible(&entry.rates)).collect()
}

/// Whether rates were measured, and all are positive and finite, so that the planner can divide by them. The fixed cost
/// of an op may also be zero.
fn is_plausible(rates: &Rates) -> bool {
    let positive = |rate: f64| rate.is_finite() && rate > 0.0;
    positive(rates.f32_flops)
        && positive(rates.bf16_flops)
        && positive(rates.memory_bytes_per_second)
        && positive(rates.host_link.bytes_per_second)
        && rates.op_seconds.is_finite()
        && rates.op_seconds >= 0.0
        && rates.measured
        && std::iter::once(&rates.ops).chain(rates.ops.bf16.as_deref()).all(|ops| {
            ops.product_flops.len() == ops.product_sizes.len().pow(3)
                && ops.product_flops.iter().chain(ops.other_ops.values()).all(|&rate| positive(rate))
        })
}

/// Adds entries to `devices.json` in place of those with the same key. Rates measured while other programs used the
/// cores do not replace undisturbed ones.
fn store_rates(folder: &Path, new: Vec<CachedRates>) {
    if new.is_empty() {
        return;
    }
    let mut entries = read(folder);
    let better = |new: &CachedRates| entries.iter().any(|old| old.key == new.key && old.disturbed.is_none());
    let new: Vec<CachedRates> = new.into_iter().filter(|new| new.disturbed.is_none() || !better(new)).collect();
    entries.retain(|old| new.iter().all(|new| new.key != old.key));
    entries.extend(new);
    save(folder, FILE_NAME, &entries);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{MemoryRate, ProductRate};
    use plimsoll_core::OpRates;
    use std::fs;

    fn example_rates() -> Rates {
        let link = Link { bytes_per_second: 1e10, latency_seconds: 1e-6 };
        Rates {
            f32_flops: 1e11,
            bf16_flops: 2e11,
            memory_bytes_per_second: 2e10,
            op_seconds: 1e-6,
            host_link: link,
            measured: true,
            ops: OpRates::default(),
        }
    }

    fn cpu(model: &str) -> Cpu {
        Cpu { model: model.to_owned(), ..Cpu::default() }
    }

    fn measured(contention: f64) -> DeviceBench {
        let rate = ProductRate { dtype: DType::F32, median_flops: 1e11, best_flops: 2e11, sustained_flops: 1e11 };
        DeviceBench {
            device: "cpu".to_owned(),
            simulated: false,
            model: "a".to_owned(),
            threads: 2,
            products: vec![rate, ProductRate { dtype: DType::Bf16, median_flops: 2e11, ..rate }],
            memory: MemoryRate { array_bytes: Bytes::mib(1), read: 4e10, write: 3e10, copy: 2e10, triad: 2e10 },
            op_seconds: 1e-6,
            ops: OpRates::default(),
            contention,
            gpu: None,
        }
    }

    #[test]
    fn rates_are_measured_on_first_use() {
        let folder = tempfile::tempdir().unwrap();
        let first =
            cpu_cached(Some(&folder.path().join("deep/cache")), &Cpu::read(), 1, Duration::ZERO, Bytes(u64::MAX))
                .unwrap();
        assert!(is_plausible(&first.rates) && first.source != RateSource::Cached);
    }

    #[test]
    fn cached_rates_are_reused() {
        let folder = tempfile::tempdir().unwrap();
        let within = folder.path().join("deep/cache");
        store_measured(&within, &cpu("a"), &[measured(0.01)]);
        let expected = Calibration { rates: rates(&measured(0.01)), source: RateSource::Cached };
        assert_eq!(cpu_cached(Some(&within), &cpu("a"), 2, QUICK_MEASUREMENT, Bytes::ZERO).unwrap(), expected);
        assert_eq!(expected.rates, example_rates());
    }

    #[test]
    fn disturbed_rates_do_not_replace_good_ones() {
        let folder = tempfile::tempdir().unwrap();
        store_measured(folder.path(), &cpu("a"), &[measured(0.01)]);
        store_measured(folder.path(), &cpu("a"), &[DeviceBench { op_seconds: 7.0, ..measured(0.3) }]);
        assert_eq!(read(folder.path())[0].rates, example_rates());
    }

    #[test]
    fn disturbed_rates_expire() {
        let folder = tempfile::tempdir().unwrap();
        let read = || cpu_cached(Some(folder.path()), &cpu("a"), 1, Duration::ZERO, Bytes(u64::MAX)).unwrap();
        let kept = |age: u64| {
            let disturbed = Some(Disturbance { contention: 0.3, at: now() - age });
            store_rates(
                folder.path(),
                vec![CachedRates { key: RatesKey::of(&cpu("a"), 1), rates: example_rates(), disturbed }],
            );
        };
        kept(60);
        assert_eq!(read(), Calibration { rates: example_rates(), source: RateSource::Disturbed { contention: 0.3 } });
        kept(DISTURBED_LIFETIME.as_secs());
        assert_ne!(read().rates, example_rates());
        // An undisturbed measurement replaces a disturbed one.
        store_measured(folder.path(), &cpu("a"), &[DeviceBench { threads: 1, ..measured(0.01) }]);
        kept(60);
        assert_eq!(read().source, RateSource::Cached);
        // If the clock was set back, the age is unknown and the rates are not used.
        assert!(!Disturbance { contention: 0.3, at: 10 }.holds_at(9));
    }

    #[test]
    fn rates_of_other_configurations_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let entries = |key: RatesKey| CachedRates { key, rates: example_rates(), disturbed: None };
        let mine = RatesKey::of(&cpu("a"), 2);
        store_rates(
            folder.path(),
            vec![entries(mine.clone()), entries(RatesKey::of(&cpu("b"), 2)), entries(RatesKey::of(&cpu("a"), 1))],
        );
        store_rates(folder.path(), vec![entries(RatesKey { plimsoll: "0.0.0".to_owned(), ..mine.clone() })]);
        let found: Vec<CachedRates> = read(folder.path()).into_iter().filter(|entry| entry.key == mine).collect();
        assert_eq!(found, [entries(mine.clone())]);
        // A new measurement replaces the old one.
        store_rates(
            folder.path(),
            vec![CachedRates {
                key: mine.clone(),
                rates: Rates { f32_flops: 5.0, ..example_rates() },
                disturbed: None,
            }],
        );
        assert_eq!(read(folder.path()).len(), 4);
        assert_eq!(
            cpu_cached(Some(folder.path()), &cpu("a"), 2, QUICK_MEASUREMENT, Bytes::ZERO).unwrap().rates.f32_flops,
            5.0
        );
    }

    #[test]
    fn gpu_link_is_the_slower_direction() {
        let way = |bytes_per_second, latency_seconds| Link { bytes_per_second, latency_seconds };
        let gpu = bench::GpuBench {
            driver: "580.1".to_owned(),
            multiprocessors: 82,
            to_device: way(2.5e10, 1e-5),
            to_host: way(2.6e10, 2e-5),
            before: Default::default(),
            after: Default::default(),
        };
        assert_eq!(rates(&DeviceBench { gpu: Some(gpu), ..measured(0.0) }).host_link, way(2.5e10, 2e-5));
    }

    #[test]
    fn damaged_cache_counts_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "[{\"model\": 3}]", "null", "[[[["] {
            fs::write(folder.path().join(FILE_NAME), text).unwrap();
            assert!(read(folder.path()).is_empty(), "{text}");
        }
        let zero = Rates { f32_flops: 0.0, ..example_rates() };
        store_rates(folder.path(), vec![CachedRates { key: RatesKey::of(&cpu("a"), 1), rates: zero, disturbed: None }]);
        assert!(read(folder.path()).is_empty());
    }

    #[test]
    fn unwritable_cache_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("file");
        fs::write(&blocked, "").unwrap();
        store_rates(
            &blocked,
            vec![CachedRates { key: RatesKey::of(&cpu("a"), 1), rates: example_rates(), disturbed: None }],
        );
        assert!(read(&blocked).is_empty());
    }
}
