//! Record of what NVRTC made of each CUDA unit: `docs/measured/cuda-kernels.json`.
//!
//! The same source, options and compiler give the same machine code. So only units whose source changed are compiled
//! again, and a few others, drawn by the day, whose record is compared with what the compiler says now.

use anyhow::{Context, ensure};
use plimsoll_device::cuda::kernels::{OPTIONS, Unit};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Number of recorded units that are compiled again to test the record.
const SAMPLE: usize = 12;

/// Registers and memory of a kernel that is compiled for one architecture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelResources {
    /// Name of the kernel's function.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u64,
    /// Bytes of registers that a thread stores to local memory because it has too few registers.
    pub spill_store_bytes: u64,
    /// Bytes of such registers that a thread loads again.
    pub spill_load_bytes: u64,
    /// Local memory of a thread.
    pub stack_bytes: u64,
    /// Static shared memory of a block.
    pub static_shared_bytes: u64,
}

/// A unit, for one compiler and one architecture.
#[derive(Clone)]
pub struct Compilation {
    /// Version of NVRTC, such as `13.5`.
    pub compiler: &'static str,
    /// Compute capability, such as `86`.
    pub arch: &'static str,
    /// The unit.
    pub unit: Unit,
}

impl Compilation {
    /// Returns the name in the record, such as `13.5 sm_86 rope-f32`.
    pub fn name(&self) -> String {
        format!("{} sm_{} {}", self.compiler, self.arch, self.unit.name())
    }

    /// Returns the SHA-256 of the options and the source, in hexadecimal digits.
    fn digest(&self) -> String {
        let digest = Sha256::new().chain_update(OPTIONS.join(" ")).chain_update("\n").chain_update(self.unit.source());
        hexadecimal(&digest.finalize())
    }
}

/// Returns the bytes of a checksum in hexadecimal digits.
pub fn hexadecimal(checksum: &[u8]) -> String {
    checksum.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns the number of the present day, by which samples are drawn.
pub fn day() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() / 86_400)
}

/// Kernels of a unit, as one compiler compiled them for one architecture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// SHA-256 of the options and the source.
    sha256: String,
    kernels: Vec<KernelResources>,
}

/// The record: an entry for each name of a [`Compilation`].
#[derive(Default)]
pub struct Record {
    entries: BTreeMap<String, Entry>,
}

impl Record {
    /// Reads a record; that of a missing file is empty.
    ///
    /// # Errors
    /// Fails if the file is not readable, or not a record.
    pub fn read(path: &Path) -> anyhow::Result<Record> {
        if !path.exists() {
            return Ok(Record::default());
        }
        let text = std::fs::read_to_string(path)?;
        Ok(Record { entries: serde_json::from_str(&text).with_context(|| format!("{} is no record", path.display()))? })
    }

    /// Writes the record: one line for each entry.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let line = |(name, entry)| -> anyhow::Result<String> {
            Ok(format!("{}: {}", serde_json::to_string(name)?, serde_json::to_string(entry)?))
        };
        let lines = self.entries.iter().map(line).collect::<anyhow::Result<Vec<String>>>()?;
        std::fs::write(path, format!("{{\n{}\n}}\n", lines.join(",\n")))
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Returns whether the record holds an entry for the present source of a unit.
    fn is_current(&self, compilation: &Compilation) -> bool {
        self.entries.get(&compilation.name()).is_some_and(|entry| entry.sha256 == compilation.digest())
    }

    /// Selects the units to compile: those without a current entry, and a sample of the others, which differs from day
    /// to day.
    pub fn select<'a>(&self, all: &'a [Compilation]) -> Vec<&'a Compilation> {
        let (mut recorded, mut selected): (Vec<_>, Vec<_>) = all.iter().partition(|one| self.is_current(one));
        let day = day();
        recorded.sort_by_cached_key(|one| Sha256::digest(format!("{day} {}", one.name())));
        selected.extend(recorded.into_iter().take(SAMPLE));
        selected
    }

    /// Adds what the compiler says about a unit.
    ///
    /// # Errors
    /// Fails if the record says something else about the same source.
    pub fn add(&mut self, compilation: &Compilation, mut kernels: Vec<KernelResources>) -> anyhow::Result<()> {
        kernels.sort_by(|a, b| a.kernel.cmp(&b.kernel));
        let (name, entry) = (compilation.name(), Entry { sha256: compilation.digest(), kernels });
        if let Some(before) = self.entries.get(&name).filter(|before| before.sha256 == entry.sha256) {
            ensure!(
                *before == entry,
                "{name} compiles to other resources than recorded: delete the record and run again"
            );
        }
        self.entries.insert(name, entry);
        Ok(())
    }

    /// Removes all entries but those of `all`.
    pub fn retain(&mut self, all: &[Compilation]) {
        let names: Vec<String> = all.iter().map(Compilation::name).collect();
        self.entries.retain(|name, _| names.contains(name));
    }

    /// Returns the kernels of a unit, in the order of their names; none if the unit is not recorded.
    pub fn kernels(&self, compilation: &Compilation) -> &[KernelResources] {
        self.entries.get(&compilation.name()).map_or(&[], |entry| &entry.kernels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_device::cuda::architecture::Architecture;
    use plimsoll_device::cuda::kernels::Target;

    fn compilations() -> Vec<Compilation> {
        let target = Target { architecture: Architecture { major: 8, minor: 6 }, compiler: 1305 };
        let units = Unit::all(&[64], target);
        units.into_iter().map(|unit| Compilation { compiler: "13.5", arch: "86", unit }).collect()
    }

    fn kernels(registers: u64) -> Vec<KernelResources> {
        vec![KernelResources {
            kernel: "init_normal".into(),
            registers,
            spill_store_bytes: 0,
            spill_load_bytes: 0,
            stack_bytes: 0,
            static_shared_bytes: 0,
        }]
    }

    #[test]
    fn changed_units_and_sample_are_compiled() {
        let (all, mut record) = (compilations(), Record::default());
        assert_eq!(record.select(&all).len(), all.len());
        for one in &all {
            record.add(one, kernels(40)).unwrap();
        }
        assert_eq!(record.select(&all).len(), SAMPLE);
        let changed = all.last().unwrap();
        record.entries.get_mut(&changed.name()).unwrap().sha256 = "of an older source".into();
        let selected = record.select(&all);
        assert_eq!((selected.len(), selected[0].name()), (SAMPLE + 1, changed.name()));
    }

    #[test]
    fn contradicted_record_is_refused() {
        let (all, mut record) = (compilations(), Record::default());
        record.add(&all[0], kernels(40)).unwrap();
        record.add(&all[0], kernels(40)).unwrap();
        let error = record.add(&all[0], kernels(41)).unwrap_err().to_string();
        assert!(error.contains("compiles to other resources than recorded"), "{error}");
    }

    #[test]
    fn written_record_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let (all, mut record, path) = (compilations(), Record::default(), folder.path().join("record.json"));
        record.add(&all[0], kernels(40)).unwrap();
        record.write(&path).unwrap();
        let mut read = Record::read(&path).unwrap();
        assert_eq!(read.kernels(&all[0]), kernels(40));
        read.retain(&all[1..]);
        assert!(read.kernels(&all[0]).is_empty());
    }
}
