//! Memory available to this process: what the machine has, bounded by the container's control groups and by limits of
//! the process.

use super::cgroup::{self, MemoryLimit};
use super::read_text;
use crate::process;
use plimsoll_core::Bytes;
use serde::Serialize;
use std::path::Path;

/// Memory of this machine that is available to this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Total memory: the machine's, or a smaller limit of a control group or of the process (`ulimit`).
    pub total: Bytes,
    /// Free memory now: the least of what the machine has available and what each limit leaves.
    pub free: Bytes,
    /// Name of the limit that determines `free`: `the machine`, a control group, or a limit of the process.
    pub bound_by: String,
}

impl Memory {
    /// Reads how much memory this process can use, total and free now: the least of what the machine, control groups
    /// and limits of the process leave.
    pub fn read() -> Memory {
        let root = Path::new("/");
        let mut limits = cgroup::memory_limits(root);
        limits.extend(process_limits());
        Memory::bounded(&read_text(root.join("proc/meminfo")).unwrap_or_default(), &limits)
    }

    /// Returns whether the system tells how much memory there is. It does not if `/proc` is missing, or if this process
    /// has too many open files.
    pub fn is_known(&self) -> bool {
        self.total > Bytes::ZERO
    }

    /// Computes total and free memory from the text of `/proc/meminfo` and the limits.
    fn bounded(meminfo: &str, limits: &[MemoryLimit]) -> Memory {
        let total = process::kib_field(meminfo, "MemTotal").unwrap_or_default();
        // Kernels before 3.14 do not report available memory; free memory is a safe substitute.
        let available = process::kib_field(meminfo, "MemAvailable").or_else(|| process::kib_field(meminfo, "MemFree"));
        // As with too many open files.
        let bound_by = if available.is_some() { "the machine" } else { "/proc/meminfo cannot be read" };
        let mut memory =
            Memory { total, free: available.unwrap_or_default().min(total), bound_by: bound_by.to_owned() };
        for MemoryLimit { source, limit, used } in limits {
            memory.total = memory.total.min(*limit);
            let remaining = limit.saturating_sub(*used);
            if remaining < memory.free {
                memory.free = remaining;
                memory.bound_by.clone_from(source);
            }
        }
        memory
    }
}

/// Returns the limits of this process on its address space and on its private writable memory (`ulimit -v` and `-d`);
/// empty if neither is set.
fn process_limits() -> impl Iterator<Item = MemoryLimit> {
    let limits = [
        (libc::RLIMIT_AS, process::virtual_size(), "ulimit -v, the limit on address space"),
        (libc::RLIMIT_DATA, process::data_size(), "ulimit -d, the limit on data"),
    ];
    limits.into_iter().filter_map(|(resource, used, source)| {
        let limit = Bytes(process::limit(resource)?);
        Some(MemoryLimit { source: source.to_owned(), limit, used: used.unwrap_or_default() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n";

    fn limit(limit: u64, used: u64) -> MemoryLimit {
        MemoryLimit { source: format!("limit {limit}"), limit: Bytes::gib(limit), used: Bytes::gib(used) }
    }

    #[test]
    fn tightest_limit_determines_free_memory() {
        let memory = Memory::bounded(MEMINFO, &[]);
        assert_eq!((memory.total, memory.free), (Bytes::gib(16), Bytes::gib(8)));
        assert_eq!(memory.bound_by, "the machine");
        // A limit above the available memory has no effect.
        assert_eq!(Memory::bounded(MEMINFO, &[limit(12, 1)]).free, Bytes::gib(8));
        let memory = Memory::bounded(MEMINFO, &[limit(12, 5), limit(4, 3), limit(6, 1)]);
        assert_eq!((memory.total, memory.free), (Bytes::gib(4), Bytes::gib(1)));
        assert_eq!(memory.bound_by, "limit 4");
        assert_eq!(Memory::bounded(MEMINFO, &[limit(2, 3)]).free, Bytes::ZERO);
    }

    #[test]
    fn unreadable_meminfo_means_no_free_memory() {
        let unknown = Memory::bounded("", &[]);
        assert_eq!((unknown.free, unknown.bound_by.as_str()), (Bytes::ZERO, "/proc/meminfo cannot be read"));
        assert!(!unknown.is_known() && Memory::read().is_known());
        assert_eq!(Memory::bounded("MemTotal: 4 kB\nMemFree: 2 kB\n", &[]).free, Bytes(2048));
    }
}
