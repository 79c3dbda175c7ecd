//! The processor: cores that this process may use, instruction sets, caches and utilisation.

use super::{cgroup, read_text};
use plimsoll_core::{Bytes, Failure};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;

/// The processor as this process sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cpu {
    /// Model name given by the maker, or `unknown processor`.
    pub model: String,
    /// Physical cores that this process may run on (affinity and cpusets honoured).
    pub cores: u32,
    /// Hardware threads that this process may run on.
    pub threads: u32,
    /// Smallest quota of processor time among the control groups of this process, in cores. None without a quota.
    pub quota: Option<f64>,
    /// Instruction sets of the processor by which kernels are selected, such as `avx2`; empty if it has none of these.
    pub features: Vec<String>,
    /// Caches of the first usable core, nearest first, without instruction caches; empty if the system does not report
    /// them.
    pub caches: Vec<Cache>,
}

/// A cache of the processor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cache {
    /// Level; 1 is nearest to the core.
    pub level: u32,
    /// Size of the cache.
    pub bytes: Bytes,
    /// Number of hardware threads that share the cache.
    pub shared_by: u32,
}

impl Cpu {
    /// Reads the facts of this machine's processor.
    pub fn read() -> Cpu {
        Cpu { features: features(), ..Cpu::from_root(Path::new("/")) }
    }

    /// Reads the facts of the processor from the files under `root`, except for `features`, which stays empty.
    fn from_root(root: &Path) -> Cpu {
        let cpus = root.join("sys/devices/system/cpu");
        let info = read_text(root.join("proc/cpuinfo")).unwrap_or_default();
        let online = read_text(cpus.join("online")).and_then(|list| cpu_list(&list));
        let status = read_text(root.join("proc/self/status")).unwrap_or_default();
        // The affinity of the process already includes cpusets.
        let allowed = field(&status, "Cpus_allowed_list").and_then(cpu_list);
        let usable: BTreeSet<u32> = match (online, allowed) {
            (Some(online), Some(allowed)) => online.intersection(&allowed).copied().collect(),
            (Some(cpus), None) | (None, Some(cpus)) => cpus,
            (None, None) => BTreeSet::from([0]),
        };
        // Threads of one core list the same siblings. Without this file each thread counts as a core.
        let siblings = |cpu: &u32| {
            read_text(cpus.join(format!("cpu{cpu}/topology/thread_siblings_list"))).unwrap_or_else(|| cpu.to_string())
        };
        let cores: BTreeSet<String> = usable.iter().map(siblings).collect();
        Cpu {
            model: field(&info, "model name").or(field(&info, "Model")).unwrap_or("unknown processor").to_owned(),
            cores: (cores.len() as u32).max(1),
            threads: (usable.len() as u32).max(1),
            quota: cgroup::cpu_quota(root),
            features: Vec::new(),
            caches: caches(&cpus.join(format!("cpu{}/cache", usable.first().unwrap_or(&0)))),
        }
    }

    /// Returns the processor time available to this process, in cores: the physical cores, or a smaller quota, which
    /// may be fractional.
    pub fn usable_cores(&self) -> f64 {
        f64::from(self.cores).min(self.quota.unwrap_or(f64::INFINITY))
    }

    /// Returns the number of compute threads: as requested, but at least one. If `requested` is None, [`auto_threads`]
    /// derives the number from the usable cores.
    ///
    /// # Errors
    /// More threads are requested than this process has hardware threads; they would only wait for each other.
    pub fn threads_for(&self, requested: Option<u32>) -> Result<u32, TooManyThreads> {
        match requested {
            None => Ok(auto_threads(self.usable_cores()).min(self.threads)),
            Some(requested) if requested > self.threads => Err(TooManyThreads { requested, usable: self.threads }),
            Some(requested) => Ok(requested.max(1)),
        }
    }

    /// Returns the size of the largest cache; 32 MiB if the system does not report it.
    pub fn last_cache(&self) -> Bytes {
        self.caches.iter().map(|cache| cache.bytes).max().unwrap_or(Bytes::mib(32))
    }
}

/// Returns the default number of compute threads: 80 % of the cores, rounded to the nearest whole number (2 cores give
/// 2, 4 give 3, 8 give 6), and at least one. The other cores keep the machine usable.
pub fn auto_threads(cores: f64) -> u32 {
    ((cores * 0.8).round() as u32).max(1)
}

/// Returns the share of the time, from 0 to 1, in which `threads` compute threads may work; they pause for the rest.
/// The share is 1 if the threads are at most 85 % of the cores. Otherwise, as on one or two cores, the share is such
/// that the threads use 80 % of the cores' time.
pub fn auto_pace(cores: f64, threads: u32) -> f64 {
    if f64::from(threads) <= 0.85 * cores { 1.0 } else { (0.8 * cores / f64::from(threads)).min(1.0) }
}

/// A request for more threads than this process may use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{requested} threads exceed the {usable} hardware threads of this process")]
pub struct TooManyThreads {
    /// Requested threads.
    pub requested: u32,
    /// Hardware threads that this process may use.
    pub usable: u32,
}

impl From<TooManyThreads> for Failure {
    fn from(error: TooManyThreads) -> Failure {
        Failure::input(error.to_string()).hint("omit run.threads to use 80% of the physical cores")
    }
}

/// Busy and total time of all cores since the system started, in ticks. The difference between two readings gives the
/// utilisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuUsage {
    busy: u64,
    all: u64,
}

impl CpuUsage {
    /// Reads the times now. None if the system does not report them.
    pub fn read() -> Option<CpuUsage> {
        CpuUsage::parse(&read_text("/proc/stat")?)
    }

    /// Parses the line `cpu user nice system idle iowait irq softirq steal ...` of `/proc/stat`, proc(5). None if the
    /// text has no such line, or the line has fewer than five numbers.
    fn parse(stat: &str) -> Option<CpuUsage> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().take(8).map(|tick| tick.parse().unwrap_or(0)).collect();
        let idle = ticks.get(3)?.saturating_add(*ticks.get(4)?);
        let all = ticks.iter().fold(0, |sum: u64, &tick| sum.saturating_add(tick));
        Some(CpuUsage { busy: all - idle, all })
    }

    /// Returns the share of all cores' time that was busy since the reading `earlier`, from 0 to 1; 0 if no time has
    /// passed.
    pub fn usage_since(self, earlier: CpuUsage) -> f64 {
        let all = self.all.saturating_sub(earlier.all);
        if all == 0 { 0.0 } else { self.busy.saturating_sub(earlier.busy) as f64 / all as f64 }
    }
}

/// Returns the value of the first line `name   : value` in a text. None without such a line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?;
    Some(value.trim())
}

/// Parses a list of processor numbers in the kernel's format, such as `0-3,8,10-11`. None if the text is not such a
/// list.
fn cpu_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // More than any machine has; an invalid file must not fill the memory.
        if last > 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

fn caches(folder: &Path) -> Vec<Cache> {
    (0..).map_while(|index| cache(folder, index)).flatten().collect()
}

/// Reads the files of one cache from `index<index>` in `folder`, a core's `cache` folder in sysfs. None if the system
/// does not report the cache; an inner None if it holds only instructions.
fn cache(folder: &Path, index: u32) -> Option<Option<Cache>> {
    let file = |name: &str| read_text(folder.join(format!("index{index}/{name}")));
    let kind = file("type")?;
    let bytes: Bytes = file("size")?.trim().parse().ok()?;
    let level = file("level")?.trim().parse().ok()?;
    let shared_by = cpu_list(&file("shared_cpu_list")?)?.len() as u32;
    Some((kind.trim() != "Instruction").then_some(Cache { level, bytes, shared_by }))
}

/// Returns the instruction sets of this processor by which kernels are selected.
fn features() -> Vec<String> {
    #[cfg(target_arch = "x86_64")]
    let detected = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    #[cfg(target_arch = "aarch64")]
    let detected = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let detected: [(&str, bool); 0] = [];
    detected.into_iter().filter(|(_, has)| *has).map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn default_load_is_70_to_85_percent() {
        for cores in 1..=128u32 {
            let cores = f64::from(cores);
            let threads = super::auto_threads(cores);
            let load = f64::from(threads) * super::auto_pace(cores, threads) / cores;
            // Three cores have no whole number of threads in that range.
            assert!((0.70..=0.85).contains(&load) || cores == 3.0, "{cores} cores: {load}");
        }
    }

    use super::*;
    use proptest::prelude::*;
    use std::fs;

    fn machine(files: &[(String, String)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    /// Creates the files of a machine with 4 cores of 2 threads, siblings n and n + 4.
    fn laptop(allowed: &str) -> tempfile::TempDir {
        let mut files = vec![
            ("proc/cpuinfo".to_owned(), "processor\t: 0\nmodel name\t: Example 4000\nflags\t\t: fpu\n".to_owned()),
            ("proc/self/status".to_owned(), format!("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n")),
            ("sys/devices/system/cpu/online".to_owned(), "0-7\n".to_owned()),
        ];
        for cpu in 0..8 {
            let siblings = format!("{},{}\n", cpu % 4, cpu % 4 + 4);
            files.push((format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), siblings));
        }
        for (index, (level, kind, size)) in
            [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("3", "Unified", "8192K")].into_iter().enumerate()
        {
            let folder = format!("sys/devices/system/cpu/cpu0/cache/index{index}");
            files.push((format!("{folder}/level"), format!("{level}\n")));
            files.push((format!("{folder}/type"), format!("{kind}\n")));
            files.push((format!("{folder}/size"), format!("{size}\n")));
            files.push((format!("{folder}/shared_cpu_list"), "0-7\n".to_owned()));
        }
        machine(&files)
    }

    #[test]
    fn sibling_threads_count_as_one_core() {
        let cpu = Cpu::from_root(laptop("0-7").path());
        assert_eq!((cpu.model.as_str(), cpu.cores, cpu.threads), ("Example 4000", 4, 8));
        assert_eq!(cpu.caches.len(), 2);
        assert_eq!((cpu.caches[1].level, cpu.caches[1].bytes, cpu.caches[1].shared_by), (3, Bytes::mib(8), 8));
        assert_eq!(cpu.last_cache(), Bytes::mib(8));
    }

    #[test]
    fn only_allowed_cores_count() {
        let cpu = Cpu::from_root(laptop("1,5,6").path());
        assert_eq!((cpu.cores, cpu.threads), (2, 3));
        // Allowed processors that are offline do not count.
        assert_eq!(Cpu::from_root(laptop("6-200").path()).threads, 2);
    }

    #[test]
    fn missing_files_mean_one_core() {
        let cpu = Cpu::from_root(Path::new("/nowhere"));
        assert_eq!((cpu.cores, cpu.threads, cpu.model.as_str()), (1, 1, "unknown processor"));
        assert_eq!(cpu.last_cache(), Bytes::mib(32));
    }

    #[test]
    fn default_threads_leave_a_fifth_of_the_cores() {
        let threads = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 64.0, 0.5, 2.5].map(auto_threads);
        assert_eq!(threads, [1, 2, 2, 3, 5, 6, 13, 51, 1, 2]);
        let cpu = Cpu { cores: 8, threads: 16, quota: Some(2.0), ..Cpu::default() };
        assert_eq!(cpu.threads_for(None), Ok(2));
        assert_eq!(cpu.threads_for(Some(16)), Ok(16));
        assert_eq!(cpu.threads_for(Some(17)), Err(TooManyThreads { requested: 17, usable: 16 }));
    }

    #[test]
    fn usage_is_the_busy_share_between_readings() {
        let earlier = CpuUsage::parse("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2\n").unwrap();
        let later = CpuUsage::parse("cpu  150 0 125 800 125 0 0 0 9 9\n").unwrap();
        assert_eq!(later.usage_since(earlier), 75.0 / 200.0);
        assert_eq!(later.usage_since(later), 0.0);
        assert_eq!(CpuUsage::parse("intr 5\n"), None);
        assert_eq!(CpuUsage::parse("cpu  1 2\n"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_cpu_lists_do_not_panic(text in "[0-9,\\- ]{0,20}") {
            let _ = cpu_list(&text);
        }

        #[test]
        fn arbitrary_stat_lines_do_not_panic(ticks in prop::collection::vec(any::<u64>(), 0..12), tail in "\\PC{0,9}") {
            let ticks: Vec<String> = ticks.iter().map(u64::to_string).collect();
            let load = CpuUsage::parse(&format!("cpu  {} {tail}", ticks.join(" ")));
            prop_assert!(load.is_none_or(|load| load.busy <= load.all));
        }
    }
}
