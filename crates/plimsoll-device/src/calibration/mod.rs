//! What is known of the devices of this machine from measurements: the rates that the planner prices with, and what GPUs
//! hold outside the arena. Measured once, and kept for the next run.
//!
//! Rates lie in `devices.json`, charges in `charges.json`, what devices fell short of in `shortfalls.json`, the algorithms of a GPU's
//! products in `algorithms.json`, rates of disks in `disks.json`, in the folder `PLIMSOLL_CACHE`, else
//! `$XDG_CACHE_HOME/plimsoll`, else `~/.cache/plimsoll`. Those of another processor or GPU, thread count, driver or version
//! of Plimsoll are not used, and rates measured while other programs took the cores are kept for some minutes only. A folder
//! that cannot be written costs the next run another measurement, and nothing else.
//!
//! Here are the rates. The other four have rooms of their own, and `store` the folder with what they share.

mod algorithms;
mod charges;
mod disks;
mod shortfalls;
mod store;

pub use algorithms::{algorithms, keep_algorithms};
pub use charges::{charges, keep_charges};
pub use disks::{disk, disk_anew};
pub use shortfalls::{Short, Shortfall, forget_line, forget_shortfalls, keep_line, keep_speed, shortfalls};
pub use store::folder;

use crate::bench::{self, Bench, BenchError, DeviceBench, Extent};
use crate::cuda;
use crate::cuda::driver::Context;
use crate::cuda::gpus::{Card, Here};
use crate::probe::Cpu;
use plimsoll_core::{Bytes, DType, Link, Rates};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use store::{load, save};

/// How long the measurement at the first use takes.
pub const SHORT: Duration = Duration::from_millis(1500);

/// So long rates are good that were measured while other programs took the cores: whoever gives several commands in a row is
/// not measured for each.
pub const DISTURBED: Duration = Duration::from_secs(300);

/// Rates and where they come from.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// What the device can do.
    pub rates: Rates,
    /// Where they come from.
    pub source: Source,
}

/// Where rates come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// An earlier measurement on this machine.
    Cached,
    /// Measured just now.
    Measured,
    /// Measured within [`DISTURBED`] while other programs took the cores: good for what is done now, and too low for later.
    Disturbed {
        /// The share of the time in which its threads had to wait for them.
        contention: f64,
    },
    /// Measured just now in less memory than it takes: good for this run, which has no more, and not kept.
    Confined,
}

/// What this process knows of the CPU by its threads: nothing is measured twice.
static HERE: Mutex<BTreeMap<u32, Calibration>> = Mutex::new(BTreeMap::new());

/// The share of the time in which others had the cores while rates were measured that this process goes by.
pub fn disturbed() -> Option<f64> {
    let here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
    let shares = here.values().filter_map(|known| match known.source {
        Source::Disturbed { contention } => Some(contention),
        Source::Cached | Source::Measured | Source::Confined => None,
    });
    shares.max_by(f64::total_cmp)
}

/// The CPU's rates with so many threads: from the cache, or measured now (in [`SHORT`]) and cached.
///
/// # Errors
/// Where it has to be measured and memory or threads are refused.
pub fn cpu(threads: u32) -> Result<Calibration, BenchError> {
    cpu_within(threads, Bytes(u64::MAX))
}

/// The same, where this process may hold so much more while it measures.
///
/// # Errors
/// As [`cpu`].
pub fn cpu_within(threads: u32, room: Bytes) -> Result<Calibration, BenchError> {
    let mut here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = here.get(&threads) {
        return Ok(known.clone());
    }
    let measured = cpu_cached(folder().as_deref(), &Cpu::read(), threads, SHORT, room)?;
    here.insert(threads, measured.clone());
    Ok(measured)
}

fn cpu_cached(
    folder: Option<&Path>,
    cpu: &Cpu,
    threads: u32,
    duration: Duration,
    room: Bytes,
) -> Result<Calibration, BenchError> {
    let key = Key::of(cpu, threads);
    let known = folder.and_then(|folder| read(folder).into_iter().find(|known| known.key == key));
    if let Some(known) = known.filter(|known| known.disturbed.is_none_or(|disturbed| disturbed.holds_at(now()))) {
        let disturbed = known.disturbed.map(|disturbed| Source::Disturbed { contention: disturbed.contention });
        return Ok(Calibration { rates: known.rates, source: disturbed.unwrap_or(Source::Cached) });
    }
    let whole = Extent::whole(cpu);
    let extent = whole.within(room, threads);
    let measured = bench::measure_cpu(cpu, threads, &[DType::F32, DType::Bf16], duration, &extent, &mut |_| {})?;
    let contention = measured.contention;
    let source = match measured.disturbed() {
        true => Source::Disturbed { contention },
        false if extent != whole => Source::Confined,
        false => Source::Measured,
    };
    let rates = rates(&measured);
    let disturbed = match source {
        Source::Disturbed { contention } => Some(Disturbed { contention, at: now() }),
        _ => None,
    };
    if let Some(folder) = folder.filter(|_| extent == whole) {
        keep(folder, vec![Known { key, rates: rates.clone(), disturbed }]);
    }
    Ok(Calibration { rates, source })
}

/// A GPU's rates: from the cache, or measured now (in about [`SHORT`], and what its kernels take to be made ready) and
/// cached.
///
/// # Errors
/// Where it has to be measured, and something is missing on this machine or the GPU refuses.
pub fn gpu(here: &'static Here, card: &Card) -> Result<Calibration, BenchError> {
    let key = Key::of_gpu(here, card);
    let folder = folder();
    if let Some(known) = folder.as_deref().and_then(|folder| read(folder).into_iter().find(|known| known.key == key)) {
        return Ok(Calibration { rates: known.rates, source: Source::Cached });
    }
    let measured = cuda::bench::measure(here, card, SHORT, &mut |_| {});
    // What was loaded for it is no charge of the run that comes now.
    Context::end(card.index);
    let rates = rates(&measured?);
    if let Some(folder) = &folder {
        keep(folder, vec![Known { key, rates: rates.clone(), disturbed: None }]);
    }
    Ok(Calibration { rates, source: Source::Measured })
}

/// Keeps what a longer measurement found, in the place of what was known.
pub fn store(bench: &Bench) {
    let Some(folder) = folder() else { return };
    keep_measured(&folder, &Cpu::read(), &bench.devices);
    let Ok(here) = cuda::gpus::here() else { return };
    let measured = |card: &Card| bench.devices.iter().find(|device| device.device == format!("cuda:{}", card.index));
    let known = |card| Some(Known { key: Key::of_gpu(here, card), rates: rates(measured(card)?), disturbed: None });
    keep(&folder, here.cards.iter().filter_map(known).collect());
}

fn keep_measured(folder: &Path, cpu: &Cpu, measured: &[DeviceBench]) {
    let good = measured.iter().filter(|device| device.device == "cpu" && !device.disturbed());
    let known =
        |device: &DeviceBench| Known { key: Key::of(cpu, device.threads), rates: rates(device), disturbed: None };
    keep(folder, good.map(known).collect());
}

/// What the planner needs of a measurement.
pub fn rates(measured: &DeviceBench) -> Rates {
    let product =
        |dtype: DType| measured.products.iter().find(|rate| rate.dtype == dtype).map_or(0.0, |rate| rate.median_flops);
    Rates {
        f32_flops: product(DType::F32),
        // 0 where the device has none: nothing can be planned on it.
        bf16_flops: product(DType::Bf16),
        memory_bytes_per_second: measured.memory.triad,
        op_seconds: measured.op_seconds,
        // The CPU is its own host: what goes there is copied in memory. Of a GPU's two ways the slower counts.
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

/// What rates hold for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    plimsoll: String,
    device: String,
    model: String,
    features: Vec<String>,
    threads: u32,
}

impl Key {
    fn of(cpu: &Cpu, threads: u32) -> Key {
        Key {
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            device: "cpu".to_owned(),
            model: cpu.model.clone(),
            features: cpu.features.clone(),
            threads,
        }
    }

    fn of_gpu(here: &Here, card: &Card) -> Key {
        let library = |found: Result<&cuda::libraries::Found, _>| found.map(|found| found.version.clone());
        let cublaslt = library(here.cublaslt()).unwrap_or_default();
        Key {
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            device: "cuda".to_owned(),
            model: card.name.clone(),
            features: vec![format!("driver {}", here.driver_version), format!("cuBLASLt {cublaslt}")],
            threads: card.multiprocessors,
        }
    }
}

/// An entry of the cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    #[serde(flatten)]
    key: Key,
    rates: Rates,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disturbed: Option<Disturbed>,
}

/// When other programs had the cores while rates were measured, and how much.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Disturbed {
    contention: f64,
    /// Seconds since the epoch.
    at: u64,
}

impl Disturbed {
    /// Whether rates are still good that were measured so.
    fn holds_at(self, now: u64) -> bool {
        now.checked_sub(self.at).is_some_and(|age| age < DISTURBED.as_secs())
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Where rates are kept.
const RATES: &str = "devices.json";

/// What the cache holds; nothing where it cannot be read or holds what no device could reach.
fn read(folder: &Path) -> Vec<Known> {
    let known: Vec<Known> = load(&folder.join(RATES));
    known.into_iter().filter(|known| plausible(&known.rates)).collect()
}

/// Whether rates can be divided by.
fn plausible(rates: &Rates) -> bool {
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
                && ops.product_flops.iter().chain(ops.others.values()).all(|&rate| positive(rate))
        })
}

/// Adds entries, replacing those of the same key; what was measured beside other programs replaces nothing that was not.
fn keep(folder: &Path, new: Vec<Known>) {
    if new.is_empty() {
        return;
    }
    let mut known = read(folder);
    let better = |new: &Known| known.iter().any(|old| old.key == new.key && old.disturbed.is_none());
    let new: Vec<Known> = new.into_iter().filter(|new| new.disturbed.is_none() || !better(new)).collect();
    known.retain(|old| new.iter().all(|new| new.key != old.key));
    known.extend(new);
    save(folder, RATES, &known);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{MemoryRate, ProductRate};
    use plimsoll_core::OpRates;
    use std::fs;

    fn example() -> Rates {
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
    fn rates_are_measured_at_the_first_use() {
        let folder = tempfile::tempdir().unwrap();
        let first =
            cpu_cached(Some(&folder.path().join("deep/cache")), &Cpu::read(), 1, Duration::ZERO, Bytes(u64::MAX))
                .unwrap();
        assert!(plausible(&first.rates) && first.source != Source::Cached);
    }

    #[test]
    fn rates_that_were_kept_are_read_from_then_on() {
        let folder = tempfile::tempdir().unwrap();
        let within = folder.path().join("deep/cache");
        keep_measured(&within, &cpu("a"), &[measured(0.01)]);
        let expected = Calibration { rates: rates(&measured(0.01)), source: Source::Cached };
        assert_eq!(cpu_cached(Some(&within), &cpu("a"), 2, SHORT, Bytes::ZERO).unwrap(), expected);
        assert_eq!(expected.rates, example());
    }

    #[test]
    fn rates_measured_beside_other_programs_are_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        keep_measured(folder.path(), &cpu("a"), &[measured(0.01)]);
        keep_measured(folder.path(), &cpu("a"), &[DeviceBench { op_seconds: 7.0, ..measured(0.3) }]);
        assert_eq!(read(folder.path())[0].rates, example());
    }

    #[test]
    fn rates_measured_beside_other_programs_hold_for_some_minutes() {
        let folder = tempfile::tempdir().unwrap();
        let read = || cpu_cached(Some(folder.path()), &cpu("a"), 1, Duration::ZERO, Bytes(u64::MAX)).unwrap();
        let kept = |age: u64| {
            let disturbed = Some(Disturbed { contention: 0.3, at: now() - age });
            keep(folder.path(), vec![Known { key: Key::of(&cpu("a"), 1), rates: example(), disturbed }]);
        };
        kept(60);
        assert_eq!(read(), Calibration { rates: example(), source: Source::Disturbed { contention: 0.3 } });
        kept(DISTURBED.as_secs());
        assert_ne!(read().rates, example());
        // Whoever was left alone meanwhile knows better.
        keep_measured(folder.path(), &cpu("a"), &[DeviceBench { threads: 1, ..measured(0.01) }]);
        kept(60);
        assert_eq!(read().source, Source::Cached);
        // A clock that was set back says nothing of their age.
        assert!(!Disturbed { contention: 0.3, at: 10 }.holds_at(9));
    }

    #[test]
    fn rates_of_another_processor_thread_count_or_version_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let known = |key: Key| Known { key, rates: example(), disturbed: None };
        let mine = Key::of(&cpu("a"), 2);
        keep(folder.path(), vec![known(mine.clone()), known(Key::of(&cpu("b"), 2)), known(Key::of(&cpu("a"), 1))]);
        keep(folder.path(), vec![known(Key { plimsoll: "0.0.0".to_owned(), ..mine.clone() })]);
        let found: Vec<Known> = read(folder.path()).into_iter().filter(|known| known.key == mine).collect();
        assert_eq!(found, [known(mine.clone())]);
        // A new measurement takes the place of the old one.
        keep(
            folder.path(),
            vec![Known { key: mine.clone(), rates: Rates { f32_flops: 5.0, ..example() }, disturbed: None }],
        );
        assert_eq!(read(folder.path()).len(), 4);
        assert_eq!(cpu_cached(Some(folder.path()), &cpu("a"), 2, SHORT, Bytes::ZERO).unwrap().rates.f32_flops, 5.0);
    }

    #[test]
    fn a_gpus_link_is_the_slower_of_its_two_ways() {
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
    fn a_damaged_cache_is_an_empty_one() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "[{\"model\": 3}]", "null", "[[[["] {
            fs::write(folder.path().join(RATES), text).unwrap();
            assert!(read(folder.path()).is_empty(), "{text}");
        }
        let zero = Rates { f32_flops: 0.0, ..example() };
        keep(folder.path(), vec![Known { key: Key::of(&cpu("a"), 1), rates: zero, disturbed: None }]);
        assert!(read(folder.path()).is_empty());
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("file");
        fs::write(&blocked, "").unwrap();
        keep(&blocked, vec![Known { key: Key::of(&cpu("a"), 1), rates: example(), disturbed: None }]);
        assert!(read(&blocked).is_empty());
    }
}
