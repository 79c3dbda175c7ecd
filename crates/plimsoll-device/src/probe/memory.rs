//! Memory available to this process: what the machine has, bounded by the container's control groups and by limits of the
//! process.

use super::{cgroup, read_text};
use crate::process;
use plimsoll_core::Bytes;
use serde::Serialize;
use std::path::Path;

/// Memory of this machine that is available to this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Total memory: the machine's, or the smallest limit of a control group.
    pub total: Bytes,
    /// Free memory now: the least of what the machine has available and what each limit leaves.
    pub free: Bytes,
    /// Name of the limit that determines `free`.
    pub bound_by: String,
}

/// A memory limit in addition to the machine's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Origin of the limit.
    pub source: String,
    /// Largest permitted usage.
    pub limit: Bytes,
    /// Current usage, without memory that the kernel would reclaim (unused page cache).
    pub used: Bytes,
}

impl Memory {
    /// Reads the state now.
    pub fn read() -> Memory {
        let root = Path::new("/");
        let mut limits = cgroup::memory_limits(root);
        limits.extend(process_limits());
        Memory::bounded(&read_text(root.join("proc/meminfo")).unwrap_or_default(), &limits)
    }

    /// Computes it from the text of `/proc/meminfo` and the limits.
    fn bounded(meminfo: &str, limits: &[Limit]) -> Memory {
        let total = process::kib_field(meminfo, "MemTotal").unwrap_or_default();
        // Kernels before 3.14 do not report available memory; free memory is a safe substitute.
        let available = process::kib_field(meminfo, "MemAvailable").or_else(|| process::kib_field(meminfo, "MemFree"));
        let mut memory =
            Memory { total, free: available.unwrap_or_default().min(total), bound_by: "the machine".to_owned() };
        for Limit { source, limit, used } in limits {
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

/// Returns the limits of the process on its address space and on its private writable memory.
fn process_limits() -> impl Iterator<Item = Limit> {
    let soft_limit = |resource, used: std::io::Result<Bytes>, source: &str| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call only fills the struct.
        let is_limited = unsafe { libc::getrlimit(resource, &mut limit) } == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
        let limit = Bytes(limit.rlim_cur);
        is_limited.then(|| Limit { source: source.to_owned(), limit, used: used.unwrap_or_default() })
    };
    [
        soft_limit(libc::RLIMIT_AS, process::virtual_size(), "ulimit -v, the limit on address space"),
        soft_limit(libc::RLIMIT_DATA, process::data_size(), "ulimit -d, the limit on data"),
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n";

    fn limit(limit: u64, used: u64) -> Limit {
        Limit { source: format!("limit {limit}"), limit: Bytes::gib(limit), used: Bytes::gib(used) }
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
        assert_eq!(Memory::bounded("", &[]).free, Bytes::ZERO);
        assert_eq!(Memory::bounded("MemTotal: 4 kB\nMemFree: 2 kB\n", &[]).free, Bytes(2048));
    }
}
