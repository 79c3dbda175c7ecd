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

/// From now on the heap gives the system back what is freed, by itself or with [`give_back`] at the latest. To be called as a
/// process starts.
///
/// glibc keeps more free at the end of a thread's heap the larger the pieces were that it has given back before (`mallopt(3)`,
/// `M_TRIM_THRESHOLD`), and `malloc_trim` does not reach it there: 3 MiB that planning had freed stayed resident beside full arenas.
pub fn keep_nothing_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes no pointer and may be called at any time.
    unsafe {
        // glibc's own first limit; once named, it stays.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10);
    }
}

/// Gives the system back what the heap has freed: what tokenising took must not count as held.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim takes no pointer and may be called at any time from any thread (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Lets [`peak_resident`] begin anew from what is resident now.
///
/// # Errors
/// Where the system does not allow it (some containers mount `/proc` read-only).
pub fn reset_peak() -> io::Result<()> {
    // 5 clears the high-water mark and nothing else: proc(5), /proc/pid/clear_refs.
    fs::write("/proc/self/clear_refs", "5")
}

/// Processor time of this process's threads, in nanoseconds since each was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scheduled {
    /// Time on a core.
    ran: u64,
    /// Time ready to run while others had the cores.
    waited: u64,
}

impl Scheduled {
    /// Until now, over all threads that live; zero where the system does not say.
    pub fn read() -> Scheduled {
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        tasks
            .filter_map(|task| Scheduled::of(&fs::read_to_string(task.path().join("schedstat")).ok()?))
            .fold(Scheduled::default(), |sum, of| Scheduled { ran: sum.ran + of.ran, waited: sum.waited + of.waited })
    }

    /// From `ran waited slices`: the kernel's documentation of schedstat.
    fn of(text: &str) -> Option<Scheduled> {
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        Some(Scheduled { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
    }

    /// The share of the time since `earlier` that threads which wanted to run had to wait, from 0 to 1.
    pub fn contention_since(self, earlier: Scheduled) -> f64 {
        let (ran, waited) = (self.ran.saturating_sub(earlier.ran), self.waited.saturating_sub(earlier.waited));
        if ran + waited == 0 { 0.0 } else { waited as f64 / (ran + waited) as f64 }
    }
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
    fn contention_is_the_share_of_the_time_spent_waiting_for_a_core() {
        let earlier = Scheduled::of("1000 500 3\n").unwrap();
        let later = Scheduled::of("4000 1500 9\n").unwrap();
        assert_eq!(later.contention_since(earlier), 0.25);
        assert_eq!(later.contention_since(later), 0.0);
        assert_eq!(Scheduled::of("12"), None);
        assert!(Scheduled::read().ran > 0);
    }

    #[test]
    fn what_is_resident_is_at_most_the_peak() {
        let now = resident().unwrap();
        assert!(now > Bytes::ZERO);
        // The counters may lag by some pages.
        assert!(now <= peak_resident().unwrap() + Bytes::mib(4));
        assert!(virtual_size().unwrap() > data_size().unwrap());
    }
}
