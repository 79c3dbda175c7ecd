//! The rates that the planner prices with: measured once on this machine, and kept for the next run.
//!
//! They lie in `devices.json` in the folder `PLIMSOLL_CACHE`, else `$XDG_CACHE_HOME/plimsoll`, else `~/.cache/plimsoll`.
//! Rates of another processor, thread count or version of Plimsoll are not used, and rates measured while other programs
//! took the cores are not kept. A folder that cannot be written costs
//! the next run another measurement, and nothing else.

use crate::bench::{self, Bench, BenchError, DeviceBench};
use crate::probe::Cpu;
use plimsoll_core::{DType, Link, Rates};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// An earlier measurement on this machine.
    Cached,
    /// Measured just now.
    Measured,
    /// Measured just now while other programs took the cores: good for this run, too low for others, so not kept.
    Disturbed,
}

/// The CPU's rates with so many threads: from the cache, or measured now (in [`SHORT`]) and cached.
///
/// # Errors
/// Where it has to be measured and memory or threads are refused.
pub fn cpu(threads: u32) -> Result<Calibration, BenchError> {
    cpu_cached(folder().as_deref(), &Cpu::read(), threads, SHORT)
}

fn cpu_cached(folder: Option<&Path>, cpu: &Cpu, threads: u32, duration: Duration) -> Result<Calibration, BenchError> {
    let key = Key::of(cpu, threads);
    if let Some(known) = folder.and_then(|folder| read(folder).into_iter().find(|known| known.key == key)) {
        return Ok(Calibration { rates: known.rates, source: Source::Cached });
    }
    let measured = bench::measure_cpu(cpu, threads, &[DType::F32, DType::Bf16], duration, &mut |_| {})?;
    if let Some(folder) = folder {
        keep_measured(folder, cpu, std::slice::from_ref(&measured));
    }
    let source = if measured.disturbed() { Source::Disturbed } else { Source::Measured };
    Ok(Calibration { rates: rates(&measured), source })
}

/// Keeps what a longer measurement found, in the place of what was known.
pub fn store(bench: &Bench) {
    if let Some(folder) = folder() {
        keep_measured(&folder, &Cpu::read(), &bench.devices);
    }
}

fn keep_measured(folder: &Path, cpu: &Cpu, measured: &[DeviceBench]) {
    let good = measured.iter().filter(|device| device.device == "cpu" && !device.disturbed());
    keep(folder, good.map(|device| Known { key: Key::of(cpu, device.threads), rates: rates(device) }).collect());
}

/// What the planner needs of a measurement of the CPU.
pub fn rates(measured: &DeviceBench) -> Rates {
    let product =
        |dtype: DType| measured.products.iter().find(|rate| rate.dtype == dtype).map_or(0.0, |rate| rate.median_flops);
    Rates {
        f32_flops: product(DType::F32),
        // 0 where the device has none: nothing can be planned on it.
        bf16_flops: product(DType::Bf16),
        memory_bytes_per_second: measured.memory.triad,
        op_seconds: measured.op_seconds,
        // The CPU is its own host: what goes there is copied in memory.
        host_link: Link { bytes_per_second: measured.memory.copy / 2.0, latency_seconds: measured.op_seconds },
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

fn file(folder: &Path) -> PathBuf {
    folder.join("devices.json")
}

/// What the cache holds; nothing where it cannot be read or holds what no device could reach.
fn read(folder: &Path) -> Vec<Known> {
    let text = fs::read(file(folder)).unwrap_or_default();
    let known: Vec<Known> = serde_json::from_slice(&text).unwrap_or_default();
    known.into_iter().filter(|known| plausible(&known.rates)).collect()
}

/// Whether rates can be divided by.
fn plausible(rates: &Rates) -> bool {
    let positive = |rate: f64| rate.is_finite() && rate > 0.0;
    positive(rates.f32_flops)
        && positive(rates.memory_bytes_per_second)
        && positive(rates.host_link.bytes_per_second)
        && rates.op_seconds.is_finite()
        && rates.op_seconds >= 0.0
        && rates.measured
        && rates.ops.product_flops.len() == rates.ops.product_sizes.len().pow(3)
        && rates.ops.product_flops.iter().chain(rates.ops.others.values()).all(|&rate| positive(rate))
}

/// Adds entries, replacing those of the same key. Written aside and renamed, so that a reader beside us never sees half
/// a file. Failures are let go: the cache only saves time.
fn keep(folder: &Path, new: Vec<Known>) {
    if new.is_empty() {
        return;
    }
    let mut known = read(folder);
    known.retain(|old| new.iter().all(|new| new.key != old.key));
    known.extend(new);
    let aside = folder.join(format!("devices.json.{}", std::process::id()));
    let Ok(text) = serde_json::to_vec_pretty(&known) else { return };
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&aside, text))
        .and_then(|()| fs::rename(&aside, file(folder)));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{MemoryRate, ProductRate};
    use plimsoll_core::{Bytes, OpRates};

    fn example() -> Rates {
        let link = Link { bytes_per_second: 1e10, latency_seconds: 1e-6 };
        Rates {
            f32_flops: 1e11,
            bf16_flops: 0.0,
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
            products: vec![rate],
            memory: MemoryRate { array_bytes: Bytes::mib(1), read: 4e10, write: 3e10, copy: 2e10, triad: 2e10 },
            op_seconds: 1e-6,
            ops: OpRates::default(),
            contention,
        }
    }

    #[test]
    fn rates_are_measured_at_the_first_use() {
        let folder = tempfile::tempdir().unwrap();
        let first = cpu_cached(Some(&folder.path().join("deep/cache")), &Cpu::read(), 1, Duration::ZERO).unwrap();
        assert!(plausible(&first.rates) && first.source != Source::Cached);
    }

    #[test]
    fn rates_that_were_kept_are_read_from_then_on() {
        let folder = tempfile::tempdir().unwrap();
        let within = folder.path().join("deep/cache");
        keep_measured(&within, &cpu("a"), &[measured(0.01)]);
        let expected = Calibration { rates: rates(&measured(0.01)), source: Source::Cached };
        assert_eq!(cpu_cached(Some(&within), &cpu("a"), 2, SHORT).unwrap(), expected);
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
        assert_eq!(cpu_cached(Some(folder.path()), &cpu("a"), 2, SHORT).unwrap().rates.f32_flops, 5.0);
    }

    #[test]
    fn a_damaged_cache_is_an_empty_one() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "[{\"model\": 3}]", "null", "[[[["] {
            fs::write(file(folder.path()), text).unwrap();
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
