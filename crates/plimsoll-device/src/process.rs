//! Memory and scheduling of this process as the system counts them: an independent check of the plan's figures. Also the
//! memory of any other process ([`ProcessStatus`]).

use plimsoll_core::Bytes;
use std::path::Path;
use std::{fs, io};

/// Returns the resident memory of this process (`VmRSS`). The kernel's counters lag by up to some 100 KiB per thread.
///
/// # Errors
/// `/proc` is missing or does not report it.
pub fn resident() -> io::Result<Bytes> {
    status_field("VmRSS")
}

/// Bytes by which [`resident`] and [`peak_resident`] may be too low on a machine of a few cores: each core adds its pages to
/// the count of a process 32 at a time (`percpu_counter_batch` in Linux).
pub const COUNTER_LAG_BYTES: Bytes = Bytes(256 << 10);

/// Returns the peak of this process's resident memory since its start or the last [`reset_peak`] (`VmHWM`).
///
/// # Errors
/// `/proc` is missing or does not report it.
pub fn peak_resident() -> io::Result<Bytes> {
    status_field("VmHWM")
}

/// Returns the size of this process's address space (`VmSize`), which `ulimit -v` limits.
///
/// # Errors
/// `/proc` is missing or does not report it.
pub fn virtual_size() -> io::Result<Bytes> {
    status_field("VmSize")
}

/// Returns the size of this process's private writable memory (`VmData`), which `ulimit -d` limits.
///
/// # Errors
/// `/proc` is missing or does not report it.
pub fn data_size() -> io::Result<Bytes> {
    status_field("VmData")
}

/// Fixes the trim threshold of glibc's heap at 128 KiB. Larger pieces of free memory at the heap's end then return to
/// the system at once, and smaller ones in [`trim_heap`]. Call this when the process starts. Does nothing with another
/// C library.
///
/// By default glibc raises its trim threshold after large pieces are freed (`mallopt(3)`, `M_TRIM_THRESHOLD`), and
/// `malloc_trim` does not reach the end of a thread's heap. In one run 3 MiB freed by planning stayed resident next to
/// full arenas.
pub fn set_heap_trim_threshold() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes no pointer and may be called at any time.
    unsafe {
        // The initial threshold of glibc; setting it explicitly keeps it fixed.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10);
    }
}

/// Returns the limit of the stack of the first thread (`ulimit -s`); `None` if there is none or it cannot be read.
pub fn stack_limit() -> Option<Bytes> {
    limit(libc::RLIMIT_STACK).map(Bytes)
}

/// Returns the limit of open files (`ulimit -n`); `None` if there is none or it cannot be read.
pub fn open_files_limit() -> Option<u64> {
    limit(libc::RLIMIT_NOFILE)
}

/// Soft limits of this process (`ulimit`). A limit that is not set or cannot be read is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Size of the address space (`ulimit -v`).
    pub address_space: Option<Bytes>,
    /// Private writable memory (`ulimit -d`).
    pub data: Option<Bytes>,
    /// Size of each file that the process writes (`ulimit -f`).
    pub file_size: Option<Bytes>,
    /// Memory that the process may lock against swapping (`ulimit -l`).
    pub locked_memory: Option<Bytes>,
    /// Number of open files (`ulimit -n`).
    pub open_files: Option<u64>,
    /// Number of threads of all processes of this user (`ulimit -u`).
    pub threads: Option<u64>,
}

impl Limits {
    /// Reads the limits of this process.
    pub fn read() -> Limits {
        Limits {
            address_space: limit(libc::RLIMIT_AS).map(Bytes),
            data: limit(libc::RLIMIT_DATA).map(Bytes),
            file_size: limit(libc::RLIMIT_FSIZE).map(Bytes),
            locked_memory: limit(libc::RLIMIT_MEMLOCK).map(Bytes),
            open_files: open_files_limit(),
            threads: limit(libc::RLIMIT_NPROC),
        }
    }
}

/// A user of this machine with the number of threads of its processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserThreads {
    /// Number of the user; 0 for root, which has no limit of threads.
    pub user: u32,
    /// Number of threads of all visible processes of the user.
    pub threads: u64,
}

impl UserThreads {
    /// Counts the threads of the user of this process. `None` if the system does not report them. `root` is `/`, or a
    /// test's folder.
    pub fn read(root: &Path) -> Option<UserThreads> {
        let user = user_and_threads(&root.join("proc/self/status"))?.user;
        let processes = fs::read_dir(root.join("proc")).ok()?.flatten();
        let is_process = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit());
        let counts = processes.filter(is_process).filter_map(|entry| user_and_threads(&entry.path().join("status")));
        Some(UserThreads { user, threads: counts.filter(|one| one.user == user).map(|one| one.threads).sum() })
    }
}

/// Returns the user of a process and the number of its threads, from its `status` in `/proc`; `None` if the process has
/// ended.
fn user_and_threads(status: &Path) -> Option<UserThreads> {
    let text = fs::read_to_string(status).ok()?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
    Some(UserThreads { user: field("Uid:")?.parse().ok()?, threads: field("Threads:")?.parse().ok()? })
}

/// A resource of `getrlimit`.
#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

/// Returns the soft limit of this process on a resource; `None` if there is none or it cannot be read.
pub(crate) fn limit(resource: Resource) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes only the struct.
    let is_read = unsafe { libc::getrlimit(resource, &mut limit) } == 0;
    (is_read && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// A live process of this machine as the system counts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    /// Name of the program, without its folder; at most 15 bytes.
    pub name: String,
    /// Resident memory; `None` for a thread of the kernel.
    pub resident_bytes: Option<Bytes>,
    /// Time of its start, in clock ticks since the machine started. Two processes with the same id differ in it.
    pub start_ticks: u64,
}

impl ProcessStatus {
    /// Reads the status of a process; `None` if there is none with this id, it is not visible, or it has ended. `root` is
    /// `/`, or a test's folder.
    pub fn read(root: &Path, pid: u32) -> Option<ProcessStatus> {
        let folder = root.join(format!("proc/{pid}"));
        let stat = String::from_utf8_lossy(&fs::read(folder.join("stat")).ok()?).into_owned();
        let status = String::from_utf8_lossy(&fs::read(folder.join("status")).unwrap_or_default()).into_owned();
        // The name stands in parentheses, and may hold some itself: proc(5), /proc/pid/stat.
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let has_ended = matches!(*fields.first()?, "Z" | "X" | "x");
        (!has_ended).then_some(ProcessStatus {
            name: name.to_owned(),
            resident_bytes: kib_field(&status, "VmRSS"),
            start_ticks: fields.get(START_FIELD)?.parse().ok()?,
        })
    }
}

/// Place of the time of start in `/proc/pid/stat`, counted from the state, which follows the name.
const START_FIELD: usize = 19;

/// Returns freed heap memory to the system, so that it does not count as used by the run. Does nothing with a C library
/// other than glibc.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim takes no pointer and may be called at any time from any thread (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Resets the value of [`peak_resident`] to the bytes that are resident now.
///
/// # Errors
/// The system does not allow it; some containers mount `/proc` read-only.
pub fn reset_peak() -> io::Result<()> {
    // The value 5 resets the high-water mark only: proc(5), /proc/pid/clear_refs.
    fs::write("/proc/self/clear_refs", "5")
}

/// Lets this process set the mode of its terminal also after that has passed to another process group, as to a shell
/// after the process that started this one was killed. By default the system refuses or stops it (`SIGTTOU`, `SIGTTIN`).
pub fn keep_terminal_access() {
    for signal in [libc::SIGTTOU, libc::SIGTTIN] {
        // SAFETY: ignoring a signal installs no handler, and may be done at any time.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Time that this process's threads have run on cores and waited for cores since they started, as the kernel's
/// scheduler counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerTimes {
    /// Nanoseconds in which threads ran on a core.
    running_ns: u64,
    /// Nanoseconds in which threads were ready to run but waited for a core.
    waiting_ns: u64,
}

impl SchedulerTimes {
    /// Reads the times now, summed over all live threads of this process; zero if the system does not report them.
    pub fn read() -> SchedulerTimes {
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        tasks.filter_map(|task| SchedulerTimes::parse(&fs::read_to_string(task.path().join("schedstat")).ok()?)).fold(
            SchedulerTimes::default(),
            |sum, thread| SchedulerTimes {
                running_ns: sum.running_ns + thread.running_ns,
                waiting_ns: sum.waiting_ns + thread.waiting_ns,
            },
        )
    }

    /// Parses the kernel's schedstat format, `running waiting slices`. None if `running` or `waiting` is not a number.
    fn parse(text: &str) -> Option<SchedulerTimes> {
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        Some(SchedulerTimes { running_ns: numbers.next()?.ok()?, waiting_ns: numbers.next()?.ok()? })
    }

    /// Returns the share, from 0 to 1, of the threads' runnable time since `earlier` in which they waited for a core; 0
    /// if no thread was runnable.
    pub fn contention_since(self, earlier: SchedulerTimes) -> f64 {
        let running_ns = self.running_ns.saturating_sub(earlier.running_ns);
        let waiting_ns = self.waiting_ns.saturating_sub(earlier.waiting_ns);
        if running_ns + waiting_ns == 0 { 0.0 } else { waiting_ns as f64 / (running_ns + waiting_ns) as f64 }
    }
}

fn status_field(field: &str) -> io::Result<Bytes> {
    let text = fs::read_to_string("/proc/self/status")?;
    kib_field(&text, field)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/self/status has no {field}")))
}

/// Returns the value of a `Name:   123 kB` line, the format of `/proc/self/status` and `/proc/meminfo`. None if the
/// field is missing or is not in kB.
pub(crate) fn kib_field(text: &str, field: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_match_by_full_name() {
        let text = "VmPeak:\t  100 kB\nVmRSSExtra:\t 7 kB\nVmRSS:\t     12 kB\nThreads:\t3\n";
        assert_eq!(kib_field(text, "VmRSS"), Some(Bytes(12 << 10)));
        assert_eq!(kib_field(text, "Threads"), None);
        assert_eq!(kib_field(text, "VmHWM"), None);
    }

    #[test]
    fn threads_of_other_users_do_not_count() {
        let root = tempfile::tempdir().unwrap();
        for (process, user, threads) in [("self", 7, 3), ("12", 7, 3), ("13", 7, 40), ("14", 8, 500)] {
            let folder = root.path().join("proc").join(process);
            fs::create_dir_all(&folder).unwrap();
            let text = format!("Name:\tx\nUid:\t{user}\t{user}\t{user}\t{user}\nThreads:\t{threads}\n");
            fs::write(folder.join("status"), text).unwrap();
        }
        assert_eq!(UserThreads::read(root.path()), Some(UserThreads { user: 7, threads: 43 }));
        assert_eq!(UserThreads::read(&root.path().join("missing")), None);
        assert!(UserThreads::read(Path::new("/")).is_some_and(|here| here.threads >= 1));
    }

    #[test]
    fn status_of_other_processes_is_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |pid: u32, stat: &str, status: &str| {
            let folder = root.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("stat"), stat).unwrap();
            fs::write(folder.join("status"), status).unwrap();
        };
        let rest = "1 1 1 0 -1 4194304 90 0 0 0 1 0 0 0 20 0 1 0 77777 8000 300";
        write(5, &format!("5 (a) (b) S {rest}\n"), "VmRSS:\t    12 kB\n");
        write(6, &format!("6 (ended) Z {rest}\n"), "");
        write(7, "7 (cut", "");
        let expected =
            ProcessStatus { name: "a) (b".to_owned(), resident_bytes: Some(Bytes(12 << 10)), start_ticks: 77_777 };
        assert_eq!(ProcessStatus::read(root.path(), 5), Some(expected));
        for pid in [6, 7, 8] {
            assert_eq!(ProcessStatus::read(root.path(), pid), None);
        }
        let own = ProcessStatus::read(Path::new("/"), std::process::id()).unwrap();
        assert!(own.resident_bytes > Some(Bytes::ZERO) && own.start_ticks > 0);
    }

    #[test]
    fn contention_is_the_share_of_waiting_time() {
        let earlier = SchedulerTimes::parse("1000 500 3\n").unwrap();
        let later = SchedulerTimes::parse("4000 1500 9\n").unwrap();
        assert_eq!(later.contention_since(earlier), 0.25);
        assert_eq!(later.contention_since(later), 0.0);
        assert_eq!(SchedulerTimes::parse("12"), None);
        assert!(SchedulerTimes::read().running_ns > 0);
    }

    #[test]
    fn resident_memory_is_at_most_the_peak() {
        let now = resident().unwrap();
        assert!(now > Bytes::ZERO);
        // The counters may lag by a few pages.
        assert!(now <= peak_resident().unwrap() + Bytes::mib(4));
        assert!(virtual_size().unwrap() > data_size().unwrap());
    }
}
