//! What this process holds, as the system counts it: the measure beside the plan's figures.

use plimsoll_core::Bytes;
use std::{fs, io};

/// Resident memory now (`VmRSS`). The kernel's counters lag behind by up to some 100 KiB a thread.
///
/// # Errors
/// Where `/proc` is not there or does not say.
pub fn resident() -> io::Result<Bytes> {
    status("VmRSS")
}

/// The most that was resident since the start or the last [`reset_peak`] (`VmHWM`).
///
/// # Errors
/// Where `/proc` is not there or does not say.
pub fn peak_resident() -> io::Result<Bytes> {
    status("VmHWM")
}

/// Size of the address space (`VmSize`), which `ulimit -v` limits.
///
/// # Errors
/// Where `/proc` is not there or does not say.
pub fn virtual_size() -> io::Result<Bytes> {
    status("VmSize")
}

/// Size of the private writable memory (`VmData`), which `ulimit -d` limits.
///
/// # Errors
/// Where `/proc` is not there or does not say.
pub fn data_size() -> io::Result<Bytes> {
    status("VmData")
}

/// Lets [`peak_resident`] begin anew from what is resident now.
///
/// # Errors
/// Where the system does not allow it (some containers mount `/proc` read-only).
pub fn reset_peak() -> io::Result<()> {
    // 5 clears the high-water mark and nothing else: proc(5), /proc/pid/clear_refs.
    fs::write("/proc/self/clear_refs", "5")
}

fn status(field: &str) -> io::Result<Bytes> {
    let text = fs::read_to_string("/proc/self/status")?;
    kib_field(&text, field)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/self/status has no {field}")))
}

/// The value of a `Name:   123 kB` line, as `/proc/self/status` and `/proc/meminfo` have them.
pub(crate) fn kib_field(text: &str, field: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let text = "VmPeak:\t  100 kB\nVmRSSExtra:\t 7 kB\nVmRSS:\t     12 kB\nThreads:\t3\n";
        assert_eq!(kib_field(text, "VmRSS"), Some(Bytes(12 << 10)));
        assert_eq!(kib_field(text, "Threads"), None);
        assert_eq!(kib_field(text, "VmHWM"), None);
    }

    #[test]
    fn what_is_resident_is_at_most_the_peak() {
        let now = resident().unwrap();
        assert!(now > Bytes::ZERO);
        // The counters may lag by some pages.
        assert!(now <= peak_resident().unwrap() + Bytes::mib(4));
        assert!(now < virtual_size().unwrap());
    }
}
