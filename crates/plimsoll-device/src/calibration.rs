//! What is known of the devices of this machine from measurements: the rates that the planner prices with, and what GPUs
//! hold outside the arena. Measured once, and kept for the next run.
//!
//! Rates lie in `devices.json`, charges in `charges.json`, what devices fell short of in `shortfalls.json`, the algorithms of a GPU's
//! products in `algorithms.json`, rates of disks in `disks.json`, in the folder `PLIMSOLL_CACHE`, else
//! `$XDG_CACHE_HOME/plimsoll`, else `~/.cache/plimsoll`. Those of another processor or GPU, thread count, driver or version
//! of Plimsoll are not used, and rates measured while other programs took the cores are not kept. A folder that cannot
//! be written costs the next run another measurement, and nothing else.

use crate::bench::{self, Bench, BenchError, DeviceBench, Extent};
use crate::cuda;
use crate::cuda::gpus::{Card, Here};
use crate::disk::{self, DiskRates};
use crate::probe::Cpu;
use plimsoll_core::{Algorithms, Bytes, DType, DeviceKind, DeviceSpec, Link, Rates};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{env, fs};

/// How long the measurement at the first use takes.
pub const SHORT: Duration = Duration::from_millis(1500);

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
    /// Measured just now while other programs took the cores: good for this run, too low for others, so not kept.
    Disturbed {
        /// The share of the time in which its threads had to wait for them.
        contention: f64,
    },
    /// Measured just now in less memory than it takes: good for this run, which has no more, and not kept.
    Confined,
}

/// What this process knows of the CPU by its threads: what was measured while others took the cores is not kept on disk, but
/// measured once.
static HERE: Mutex<BTreeMap<u32, Calibration>> = Mutex::new(BTreeMap::new());

/// The share of the time in which others had the cores while this process measured rates that are not kept because of it.
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
    if let Some(known) = folder.and_then(|folder| read(folder).into_iter().find(|known| known.key == key)) {
        return Ok(Calibration { rates: known.rates, source: Source::Cached });
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
    if let (Some(folder), Source::Measured) = (folder, source) {
        keep_measured(folder, cpu, std::slice::from_ref(&measured));
    }
    Ok(Calibration { rates: rates(&measured), source })
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
    let rates = rates(&cuda::bench::measure(here, card, SHORT, &mut |_| {})?);
    if let Some(folder) = &folder {
        keep(folder, vec![Known { key, rates: rates.clone() }]);
    }
    Ok(Calibration { rates, source: Source::Measured })
}

/// How fast the disk of a folder is: from the cache, or measured now (in about a second) and cached; none where there is
/// no room to measure with.
pub fn disk(in_folder: &Path) -> Option<DiskRates> {
    let number = disk::number(in_folder)?;
    let known: Vec<KnownDisk> = folder().map(|folder| load(&folder.join(DISKS))).unwrap_or_default();
    known.iter().find(|known| known.disk == number).map(|known| known.rates).or_else(|| disk_anew(in_folder))
}

/// The same, measured now.
pub fn disk_anew(in_folder: &Path) -> Option<DiskRates> {
    let (disk, rates) = (disk::number(in_folder)?, disk::measure(in_folder)?);
    if let Some(folder) = folder() {
        let mut known: Vec<KnownDisk> = load(&folder.join(DISKS));
        known.retain(|known| known.disk != disk);
        known.push(KnownDisk { disk, rates });
        save(&folder, DISKS, &known);
    }
    Some(rates)
}

/// Where rates of disks are kept.
const DISKS: &str = "disks.json";

/// An entry of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct KnownDisk {
    /// As the system numbers it.
    disk: u64,
    #[serde(flatten)]
    rates: DiskRates,
}

/// Keeps what a longer measurement found, in the place of what was known.
pub fn store(bench: &Bench) {
    let Some(folder) = folder() else { return };
    keep_measured(&folder, &Cpu::read(), &bench.devices);
    let Ok(here) = cuda::gpus::here() else { return };
    let measured = |card: &Card| bench.devices.iter().find(|device| device.device == format!("cuda:{}", card.index));
    let known = |card| Some(Known { key: Key::of_gpu(here, card), rates: rates(measured(card)?) });
    keep(&folder, here.cards.iter().filter_map(known).collect());
}

/// What was held outside the arena on such a GPU with these libraries, where a run has measured it.
pub fn charges(here: &Here, card: &Card) -> Option<Bytes> {
    let (key, known) = (ChargesKey::of(here, card), load::<KnownCharges>(&folder()?.join(CHARGES)));
    known.into_iter().find(|known| known.key == key).map(|known| known.bytes)
}

/// Keeps what a run has measured. Runs differ in the kernels that they load: the most that was seen is what the next
/// one is planned with.
pub fn keep_charges(here: &Here, card: &Card, bytes: Bytes) {
    let Some(folder) = folder() else { return };
    keep_charges_in(&folder, ChargesKey::of(here, card), bytes);
}

fn keep_charges_in(folder: &Path, key: ChargesKey, bytes: Bytes) {
    let mut known: Vec<KnownCharges> = load(&folder.join(CHARGES));
    match known.iter_mut().find(|known| known.key == key) {
        Some(known) if known.bytes >= bytes => return,
        Some(known) => known.bytes = bytes,
        None => known.push(KnownCharges { key, bytes }),
    }
    save(folder, CHARGES, &known);
}

/// A device that was less than it was planned to be, in a run, until that run's end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shortfall {
    /// The device, as run files name it.
    pub device: String,
    /// What it is: the processor's or the GPU's name.
    model: String,
    /// What it was short of.
    #[serde(flatten)]
    pub of: Short,
    /// What happened.
    pub why: String,
}

/// What a device is short of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Short {
    /// Memory: it refused some, or others pressed it. The load line under which the run went on.
    LineBytes(Bytes),
    /// Speed: its work took so many times what its rates say.
    Slower(f64),
}

impl Short {
    fn of_the_same(self, other: Short) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// A device is called slower than its rates from here on: single recipes are predicted with errors of up to a fifth.
const SLOWER_LEAST: f64 = 1.25;

/// What a device has fallen short of, where a run has found it out and none has found otherwise since.
pub fn shortfalls(device: &DeviceSpec) -> Vec<Shortfall> {
    let (Some(folder), Some(model)) = (folder(), model_of(device)) else { return vec![] };
    let mut known: Vec<Shortfall> = load(&folder.join(SHORTFALLS));
    known.retain(|known| known.device == device.name && known.model == model);
    known
}

/// Keeps that a device had less memory than planned, for the next plan.
pub fn keep_line(device: &DeviceSpec, line_bytes: Bytes, why: &str) {
    keep_shortfall(device, Short::LineBytes(line_bytes), why.to_owned());
}

/// A run found memory again that this device was known to be short of.
pub fn forget_line(device: &DeviceSpec) {
    forget_shortfalls(|known| known.device == device.name && matches!(known.of, Short::LineBytes(_)));
}

/// A run's work took so many times what was predicted from the rates and what is known of the device's speed. Kept for the
/// next plan where that is far too slow; else what was known is forgotten.
pub fn keep_speed(device: &DeviceSpec, times: f64, run: &str) {
    let slower = |short: &Shortfall| if let Short::Slower(times) = short.of { Some(times) } else { None };
    let times = times * shortfalls(device).iter().find_map(slower).unwrap_or(1.0);
    if times < SLOWER_LEAST {
        forget_shortfalls(|known| known.device == device.name && slower(known).is_some());
    } else if times.is_finite() {
        let times = (100.0 * times).round() / 100.0;
        keep_shortfall(device, Short::Slower(times), format!("{run} took {times} times what its measured rates say"));
    }
}

fn keep_shortfall(device: &DeviceSpec, of: Short, why: String) {
    let (Some(folder), Some(model)) = (folder(), model_of(device)) else { return };
    keep_shortfall_in(&folder, Shortfall { device: device.name.clone(), model, of, why });
}

fn keep_shortfall_in(folder: &Path, new: Shortfall) {
    let mut known: Vec<Shortfall> = load(&folder.join(SHORTFALLS));
    let replaced =
        |old: &Shortfall| (&old.device, &old.model) == (&new.device, &new.model) && old.of.of_the_same(new.of);
    known.retain(|old| !replaced(old));
    known.push(new);
    save(folder, SHORTFALLS, &known);
}

/// Forgets such shortfalls. Answers what they were.
pub fn forget_shortfalls(which: impl Fn(&Shortfall) -> bool) -> Vec<Shortfall> {
    folder().map(|folder| forget_shortfalls_in(&folder, which)).unwrap_or_default()
}

fn forget_shortfalls_in(folder: &Path, which: impl Fn(&Shortfall) -> bool) -> Vec<Shortfall> {
    let known: Vec<Shortfall> = load(&folder.join(SHORTFALLS));
    let (gone, kept): (Vec<_>, Vec<_>) = known.into_iter().partition(which);
    if !gone.is_empty() {
        save(folder, SHORTFALLS, &kept);
    }
    gone
}

/// What a device is; none for one on paper.
fn model_of(device: &DeviceSpec) -> Option<String> {
    match device.kind {
        DeviceKind::Paper => None,
        DeviceKind::Cpu | DeviceKind::Virtual => Some(Cpu::read().model),
        DeviceKind::Cuda => {
            let index = device.name.strip_prefix("cuda:")?.parse().ok()?;
            Some(cuda::open::card(index).ok()?.1.name.clone())
        }
    }
}

/// Where shortfalls are kept.
const SHORTFALLS: &str = "shortfalls.json";

/// The algorithms of products that were chosen on such a GPU: the same again give the same bits.
pub fn algorithms(card: &Card) -> Option<Algorithms> {
    load(&folder()?.join(ALGORITHMS)).into_iter().find(|known: &Algorithms| known.gpu == card.name)
}

/// Keeps the algorithms of a run's products for the next run. What was chosen first stays, as long as the library does.
pub fn keep_algorithms(new: &Algorithms) {
    if let Some(folder) = folder() {
        keep_algorithms_in(&folder, new);
    }
}

fn keep_algorithms_in(folder: &Path, new: &Algorithms) {
    let mut known: Vec<Algorithms> = load(&folder.join(ALGORITHMS));
    match known.iter_mut().find(|known| known.gpu == new.gpu) {
        Some(known) if known.of_the_same(new) => {
            for (product, algorithm) in &new.chosen {
                known.chosen.entry(product.clone()).or_insert_with(|| algorithm.clone());
            }
        }
        Some(known) => known.clone_from(new),
        None => known.push(new.clone()),
    }
    save(folder, ALGORITHMS, &known);
}

/// Where the algorithms of products are kept.
const ALGORITHMS: &str = "algorithms.json";

/// Where charges are kept.
const CHARGES: &str = "charges.json";

/// What charges hold for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ChargesKey {
    plimsoll: String,
    gpu: String,
    driver: String,
    cublaslt: String,
}

impl ChargesKey {
    fn of(here: &Here, card: &Card) -> ChargesKey {
        ChargesKey {
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            gpu: card.name.clone(),
            driver: here.driver_version.clone(),
            cublaslt: here.cublaslt().map(|found| found.version.clone()).unwrap_or_default(),
        }
    }
}

/// An entry of the charges.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KnownCharges {
    #[serde(flatten)]
    key: ChargesKey,
    bytes: Bytes,
}

fn keep_measured(folder: &Path, cpu: &Cpu, measured: &[DeviceBench]) {
    let good = measured.iter().filter(|device| device.device == "cpu" && !device.disturbed());
    keep(folder, good.map(|device| Known { key: Key::of(cpu, device.threads), rates: rates(device) }).collect());
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
}

/// Where what is known of this machine is kept: `PLIMSOLL_CACHE`, or `plimsoll` in the caches of the user.
pub fn folder() -> Option<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("PLIMSOLL_CACHE")
        .or_else(|| Some(named("XDG_CACHE_HOME")?.join("plimsoll")))
        .or_else(|| Some(named("HOME")?.join(".cache/plimsoll")))
}

/// Where rates are kept.
const RATES: &str = "devices.json";

/// What the cache holds; nothing where it cannot be read or holds what no device could reach.
fn read(folder: &Path) -> Vec<Known> {
    let known: Vec<Known> = load(&folder.join(RATES));
    known.into_iter().filter(|known| plausible(&known.rates)).collect()
}

fn load<T: DeserializeOwned>(file: &Path) -> Vec<T> {
    serde_json::from_slice(&fs::read(file).unwrap_or_default()).unwrap_or_default()
}

/// Written aside and renamed, so that a reader beside us never sees half a file. Failures are let go: the cache only
/// saves time.
fn save<T: Serialize>(folder: &Path, name: &str, known: &[T]) {
    let aside = folder.join(format!("{name}.{}", std::process::id()));
    let Ok(text) = serde_json::to_vec_pretty(known) else { return };
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&aside, text))
        .and_then(|()| fs::rename(&aside, folder.join(name)));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
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

/// Adds entries, replacing those of the same key.
fn keep(folder: &Path, new: Vec<Known>) {
    if new.is_empty() {
        return;
    }
    let mut known = read(folder);
    known.retain(|old| new.iter().all(|new| new.key != old.key));
    known.extend(new);
    save(folder, RATES, &known);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{MemoryRate, ProductRate};
    use plimsoll_core::OpRates;

    #[test]
    fn what_a_device_fell_short_of_is_kept_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let short = |device: &str, of| Shortfall { device: device.into(), model: "x".into(), of, why: "so".into() };
        let line = |device, mib| short(device, Short::LineBytes(Bytes::mib(mib)));
        let slower = |device, times| short(device, Short::Slower(times));
        let known = || load::<Shortfall>(&folder.path().join(SHORTFALLS));
        assert_eq!(forget_shortfalls_in(folder.path(), |_| true), []);
        for short in [line("cpu", 5), slower("cpu", 2.0), line("cuda:0", 7), line("cpu", 4), slower("cpu", 1.5)] {
            keep_shortfall_in(folder.path(), short);
        }
        assert_eq!(known(), [line("cuda:0", 7), line("cpu", 4), slower("cpu", 1.5)]);
        assert_eq!(forget_shortfalls_in(folder.path(), |known| known.device == "cuda:0"), [line("cuda:0", 7)]);
        assert_eq!(forget_shortfalls_in(folder.path(), |_| true), [line("cpu", 4), slower("cpu", 1.5)]);
        assert_eq!(known(), []);
    }

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
    fn rates_of_another_processor_thread_count_or_version_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let known = |key: Key| Known { key, rates: example() };
        let mine = Key::of(&cpu("a"), 2);
        keep(folder.path(), vec![known(mine.clone()), known(Key::of(&cpu("b"), 2)), known(Key::of(&cpu("a"), 1))]);
        keep(folder.path(), vec![known(Key { plimsoll: "0.0.0".to_owned(), ..mine.clone() })]);
        let found: Vec<Known> = read(folder.path()).into_iter().filter(|known| known.key == mine).collect();
        assert_eq!(found, [known(mine.clone())]);
        // A new measurement takes the place of the old one.
        keep(folder.path(), vec![Known { key: mine.clone(), rates: Rates { f32_flops: 5.0, ..example() } }]);
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
    fn of_charges_the_most_that_a_run_saw_is_kept_for_each_gpu_and_driver() {
        let folder = tempfile::tempdir().unwrap();
        let key = |driver: &str| ChargesKey {
            plimsoll: "0.1.0".to_owned(),
            gpu: "Example".to_owned(),
            driver: driver.to_owned(),
            cublaslt: "13.1".to_owned(),
        };
        let known = |driver: &str| {
            let known: Vec<KnownCharges> = load(&folder.path().join(CHARGES));
            known.into_iter().find(|known| known.key == key(driver)).map(|known| known.bytes)
        };
        keep_charges_in(folder.path(), key("550"), Bytes::mib(400));
        keep_charges_in(folder.path(), key("550"), Bytes::mib(480));
        keep_charges_in(folder.path(), key("550"), Bytes::mib(440));
        assert_eq!((known("550"), known("580")), (Some(Bytes::mib(480)), None));
        keep_charges_in(folder.path(), key("580"), Bytes::mib(300));
        assert_eq!((known("550"), known("580")), (Some(Bytes::mib(480)), Some(Bytes::mib(300))));
    }

    #[test]
    fn the_algorithms_that_were_chosen_first_stay_as_long_as_the_library_does() {
        let folder = tempfile::tempdir().unwrap();
        let algorithms = |library, chosen: &[(&str, &str)]| Algorithms {
            library,
            gpu: "Example".to_owned(),
            driver: 13_000,
            chosen: chosen.iter().map(|(product, which)| ((*product).to_owned(), (*which).to_owned())).collect(),
        };
        let kept = || load::<Algorithms>(&folder.path().join(ALGORITHMS));
        keep_algorithms_in(folder.path(), &algorithms(13, &[("a", "1")]));
        keep_algorithms_in(folder.path(), &algorithms(13, &[("a", "2"), ("b", "3")]));
        assert_eq!(kept(), [algorithms(13, &[("a", "1"), ("b", "3")])]);
        keep_algorithms_in(folder.path(), &algorithms(14, &[("a", "4")]));
        assert_eq!(kept(), [algorithms(14, &[("a", "4")])]);
    }

    #[test]
    fn a_damaged_cache_is_an_empty_one() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "[{\"model\": 3}]", "null", "[[[["] {
            fs::write(folder.path().join(RATES), text).unwrap();
            assert!(read(folder.path()).is_empty(), "{text}");
        }
        let zero = Rates { f32_flops: 0.0, ..example() };
        keep(folder.path(), vec![Known { key: Key::of(&cpu("a"), 1), rates: zero }]);
        assert!(read(folder.path()).is_empty());
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("file");
        fs::write(&blocked, "").unwrap();
        keep(&blocked, vec![Known { key: Key::of(&cpu("a"), 1), rates: example() }]);
        assert!(read(&blocked).is_empty());
    }
}
