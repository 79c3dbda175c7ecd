//! The system around this process: memory and swap of the whole machine, WSL, InfiniBand, and the view on processes.

use super::read_text;
use crate::process::kib_field;
use plimsoll_core::Bytes;
use std::path::Path;

/// Link of `/proc/self/ns/pid` in the first process namespace of a machine (`PROC_PID_INIT_INO` of Linux).
const FIRST_PROCESS_NAMESPACE: &str = "pid:[4026531836]";

/// Memory and swap of the whole machine, whatever part of them this process may use. Figures that the system does not
/// report are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhysicalMemory {
    /// Memory of the machine.
    pub total_bytes: Option<Bytes>,
    /// Bytes of swap that are in use.
    pub swap_used_bytes: Option<Bytes>,
}

impl PhysicalMemory {
    /// Reads memory and swap now. `root` is `/`, or a test's folder.
    pub fn read(root: &Path) -> PhysicalMemory {
        let meminfo = read_text(root.join("proc/meminfo")).unwrap_or_default();
        let [swap_total, swap_free] = ["SwapTotal", "SwapFree"].map(|field| kib_field(&meminfo, field));
        PhysicalMemory {
            total_bytes: kib_field(&meminfo, "MemTotal"),
            swap_used_bytes: swap_total.zip(swap_free).map(|(total, free)| total.saturating_sub(free)),
        }
    }
}

/// Returns whether this machine is Linux on Windows (WSL), where Windows provides the driver. `root` is `/`, or a
/// test's folder.
pub fn is_wsl(root: &Path) -> bool {
    read_text(root.join("proc/sys/kernel/osrelease")).is_some_and(|text| text.to_lowercase().contains("microsoft"))
}

/// Returns whether the machine has an InfiniBand adapter. `root` is `/`, or a test's folder.
pub fn has_infiniband(root: &Path) -> bool {
    std::fs::read_dir(root.join("sys/class/infiniband")).is_ok_and(|mut adapters| adapters.next().is_some())
}

/// Returns whether this process sees all processes of the machine. In most containers it does not. `None` if the system
/// does not tell. `root` is `/`, or a test's folder.
pub fn sees_all_processes(root: &Path) -> Option<bool> {
    let namespace = std::fs::read_link(root.join("proc/self/ns/pid")).ok()?;
    Some(namespace.as_os_str() == FIRST_PROCESS_NAMESPACE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn swap_in_use_is_read_from_meminfo() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc")).unwrap();
        assert_eq!(PhysicalMemory::read(root.path()), PhysicalMemory::default());
        let text = "MemTotal: 4096 kB\nSwapCached: 9 kB\nSwapTotal: 2048 kB\nSwapFree: 1536 kB\n";
        fs::write(root.path().join("proc/meminfo"), text).unwrap();
        let expected = PhysicalMemory { total_bytes: Some(Bytes::mib(4)), swap_used_bytes: Some(Bytes(512 << 10)) };
        assert_eq!(PhysicalMemory::read(root.path()), expected);
    }

    #[test]
    fn wsl_and_infiniband_are_seen_by_their_files() {
        let root = tempfile::tempdir().unwrap();
        let folders = ["proc/sys/kernel", "sys/class/infiniband/mlx5_0"];
        assert!(!is_wsl(root.path()) && !has_infiniband(root.path()));
        folders.iter().for_each(|folder| fs::create_dir_all(root.path().join(folder)).unwrap());
        fs::write(root.path().join("proc/sys/kernel/osrelease"), "5.15.153.1-Microsoft-standard-WSL2\n").unwrap();
        assert!(is_wsl(root.path()) && has_infiniband(root.path()));
    }

    #[test]
    fn only_first_namespace_sees_all_processes() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(sees_all_processes(root.path()), None);
        fs::create_dir_all(root.path().join("proc/self/ns")).unwrap();
        let link = root.path().join("proc/self/ns/pid");
        for (target, sees_all) in [("pid:[4026531836]", true), ("pid:[4026532281]", false)] {
            let _ = fs::remove_file(&link);
            symlink(target, &link).unwrap();
            assert_eq!(sees_all_processes(root.path()), Some(sees_all));
        }
    }
}
