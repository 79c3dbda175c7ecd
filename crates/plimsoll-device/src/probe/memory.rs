//! How much memory this process could really have: what the machine has available, bounded by the container's control
//! groups and by the limits of the process.

use super::{cgroup, text};
use crate::process;
use plimsoll_core::Bytes;
use serde::Serialize;
use std::path::Path;

/// The memory of this machine as far as it is for this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// What there is: the machine's memory, or the smallest limit of a control group.
    pub total: Bytes,
    /// What is free for this process now: the least of what the machine has available and what each limit leaves.
    pub free: Bytes,
    /// Which of them that is.
    pub bound_by: String,
}

/// A limit beside the machine's own size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Who sets it.
    pub by: String,
    /// The most that may be held.
    pub limit: Bytes,
    /// What is held under it already, without what the kernel would give up (page cache that is not in use).
    pub used: Bytes,
}

impl Memory {
    /// As it is now.
    pub fn read() -> Memory {
        let root = Path::new("/");
        let mut limits = cgroup::memory_limits(root);
        limits.extend(process_limits());
        Memory::bounded(&text(root.join("proc/meminfo")).unwrap_or_default(), &limits)
    }

    /// From the text of `/proc/meminfo` and the limits that hold.
    fn bounded(meminfo: &str, limits: &[Limit]) -> Memory {
        let total = process::kib_field(meminfo, "MemTotal").unwrap_or_default();
        // Kernels before 3.14 do not say what is available; what is free is the safe answer.
        let available = process::kib_field(meminfo, "MemAvailable").or_else(|| process::kib_field(meminfo, "MemFree"));
        let mut memory =
            Memory { total, free: available.unwrap_or_default().min(total), bound_by: "the machine".to_owned() };
        for Limit { by, limit, used } in limits {
            memory.total = memory.total.min(*limit);
            let left = limit.saturating_sub(*used);
            if left < memory.free {
                memory.free = left;
                memory.bound_by.clone_from(by);
            }
        }
        memory
    }
}

/// The limits of the process on its address space and on its private writable memory.
fn process_limits() -> impl Iterator<Item = Limit> {
    let soft = |resource, used: std::io::Result<Bytes>, by: &str| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call fills the struct it is given and nothing else.
        let known = unsafe { libc::getrlimit(resource, &mut limit) } == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
        let limit = Bytes(limit.rlim_cur);
        known.then(|| Limit { by: by.to_owned(), limit, used: used.unwrap_or_default() })
    };
    [
        soft(libc::RLIMIT_AS, process::virtual_size(), "ulimit -v, the limit on address space"),
        soft(libc::RLIMIT_DATA, process::data_size(), "ulimit -d, the limit on data"),
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n";

    fn limit(limit: u64, used: u64) -> Limit {
        Limit { by: format!("limit {limit}"), limit: Bytes::gib(limit), used: Bytes::gib(used) }
    }

    #[test]
    fn the_tightest_bound_says_what_is_free() {
        let memory = Memory::bounded(MEMINFO, &[]);
        assert_eq!((memory.total, memory.free), (Bytes::gib(16), Bytes::gib(8)));
        assert_eq!(memory.bound_by, "the machine");
        // A limit larger than what the machine has available does not bind.
        assert_eq!(Memory::bounded(MEMINFO, &[limit(12, 1)]).free, Bytes::gib(8));
        let memory = Memory::bounded(MEMINFO, &[limit(12, 5), limit(4, 3), limit(6, 1)]);
        assert_eq!((memory.total, memory.free), (Bytes::gib(4), Bytes::gib(1)));
        assert_eq!(memory.bound_by, "limit 4");
        assert_eq!(Memory::bounded(MEMINFO, &[limit(2, 3)]).free, Bytes::ZERO);
    }

    #[test]
    fn an_unreadable_meminfo_frees_nothing() {
        assert_eq!(Memory::bounded("", &[]).free, Bytes::ZERO);
        assert_eq!(Memory::bounded("MemTotal: 4 kB\nMemFree: 2 kB\n", &[]).free, Bytes(2048));
    }
}
