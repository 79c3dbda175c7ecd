//! Limits of the control groups of this process (containers, batch systems, systemd slices) on memory and processor
//! time. Supports versions 1 and 2; the limits of all ancestor groups count.

use super::read_text;
use plimsoll_core::Bytes;
use std::path::{Path, PathBuf};

/// A limit on the memory of this process, in addition to the size of the machine's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Origin of the limit, such as the folder of the control group.
    pub source: String,
    /// Largest permitted usage.
    pub limit: Bytes,
    /// Current usage that counts towards the limit, without memory that the kernel would reclaim (unused page cache).
    pub used: Bytes,
}

/// A control group: the folder of its files, and the version (1 or 2) of their format.
struct Group {
    folder: PathBuf,
    version: u8,
}

/// Returns the memory limits of all control groups of this process; empty without limits. `root` is `/`, or a test's
/// folder.
pub fn memory_limits(root: &Path) -> Vec<MemoryLimit> {
    groups(root, "memory").iter().filter_map(memory_limit).collect()
}

/// Returns the smallest quota of processor time among all control groups of this process, in cores. None without a
/// quota. `root` is `/`, or a test's folder.
pub fn cpu_quota(root: &Path) -> Option<f64> {
    groups(root, "cpu").iter().filter_map(quota).min_by(f64::total_cmp)
}

fn memory_limit(group: &Group) -> Option<MemoryLimit> {
    // Above `memory.high` the kernel throttles a group until it hardly runs, so it counts as a limit.
    let (limits, used, cache): (&[&str], _, _) = match group.version {
        1 => (&["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_inactive_file"),
        _ => (&["memory.max", "memory.high"], "memory.current", "inactive_file"),
    };
    let number = |file: &str| read_text(group.folder.join(file))?.trim().parse::<u64>().ok();
    // `max` (version 2) does not parse; version 1 writes "none" as the largest whole page.
    let limit = limits.iter().filter_map(|file| number(file)).filter(|&limit| limit < 1 << 62).min()?;
    let used = number(used).unwrap_or(0);
    let reclaimable =
        read_text(group.folder.join("memory.stat")).and_then(|stat| stat_field(&stat, cache)).unwrap_or(0);
    Some(MemoryLimit {
        source: format!("control group {}", group.folder.display()),
        limit: Bytes(limit),
        used: Bytes(used.saturating_sub(reclaimable)),
    })
}

fn quota(group: &Group) -> Option<f64> {
    let (quota, period) = match group.version {
        1 => (read_text(group.folder.join("cpu.cfs_quota_us"))?, read_text(group.folder.join("cpu.cfs_period_us"))?),
        _ => {
            let max = read_text(group.folder.join("cpu.max"))?;
            let (quota, period) = max.trim().split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        }
    };
    // Without a quota version 1 has -1 and version 2 has `max`.
    let (quota, period): (f64, f64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

fn stat_field(stat: &str, field: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Returns the control groups that limit this process's use of a resource, innermost first. `controller` is the
/// kernel's name of the resource: `memory` or `cpu`.
fn groups(root: &Path, controller: &str) -> Vec<Group> {
    let memberships = read_text(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = read_text(root.join("proc/self/mountinfo")).unwrap_or_default();
    let mut groups = Vec::new();
    for Mount { mount_point, root_in_tree, version } in mounts.lines().filter_map(|line| mount(line, controller)) {
        let Some(member) = memberships.lines().find_map(|line| membership(line, controller, version)) else { continue };
        // In a container the mount shows only the container's part of the tree. Its `root_in_tree` is then a prefix of the
        // path, or the path does not exist below the mount. Missing folders are skipped when read.
        let below = Path::new(member).strip_prefix(root_in_tree).unwrap_or(Path::new(""));
        let top = root.join(mount_point.strip_prefix('/').unwrap_or(mount_point));
        let below = below.strip_prefix("/").unwrap_or(below);
        groups.extend(below.ancestors().map(|part| Group { folder: top.join(part), version }));
    }
    groups
}

/// A mount point at which the kernel shows a tree of control groups, such as `/sys/fs/cgroup`.
struct Mount<'a> {
    mount_point: &'a str,
    root_in_tree: &'a str,
    version: u8,
}

/// Parses a line of `/proc/self/mountinfo`, such as `35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory`.
/// None if the line is no mount of the control groups for `controller` (`memory` or `cpu`).
fn mount<'a>(line: &'a str, controller: &str) -> Option<Mount<'a>> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root_in_tree, mount_point) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    match kind.next()? {
        "cgroup2" => Some(Mount { mount_point, root_in_tree, version: 2 }),
        "cgroup" if kind.nth(1)?.split(',').any(|option| option == controller) => {
            Some(Mount { mount_point, root_in_tree, version: 1 })
        }
        _ => None,
    }
}

/// Returns the path of a control group from a line of `/proc/self/cgroup`, such as `4:memory:/docker/1f` (version 1) or
/// `0::/user` (version 2). None if the line is for another controller or another version.
fn membership<'a>(line: &'a str, controller: &str, version: u8) -> Option<&'a str> {
    let mut parts = line.splitn(3, ':');
    let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let is_in_tree = match version {
        1 => controllers.split(',').any(|name| name == controller),
        _ => id == "0" && controllers.is_empty(),
    };
    is_in_tree.then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    /// Creates a root folder with these files.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn v2_service_is_bound_by_its_ancestors() {
        let root = machine(&[
            ("proc/self/cgroup", "0::/user.slice/job.scope\n"),
            ("proc/self/mountinfo", V2),
            ("sys/fs/cgroup/user.slice/job.scope/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/job.scope/memory.current", "1000\n"),
            ("sys/fs/cgroup/user.slice/job.scope/cpu.max", "400000 100000\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "536870912\n"),
            ("sys/fs/cgroup/user.slice/memory.stat", "anon 5\nfile 9\ninactive_file 268435456\n"),
            ("sys/fs/cgroup/user.slice/cpu.max", "150000 100000\n"),
        ]);
        let limits = memory_limits(root.path());
        assert_eq!(limits.len(), 1);
        // Reclaimable page cache counts as free.
        assert_eq!((limits[0].limit, limits[0].used), (Bytes::gib(1), Bytes::mib(256)));
        assert!(limits[0].source.ends_with("user.slice"), "{}", limits[0].source);
        assert_eq!(cpu_quota(root.path()), Some(1.5));
    }

    #[test]
    fn v2_container_sees_its_limit() {
        let root = machine(&[
            ("proc/self/cgroup", "0::/\n"),
            ("proc/self/mountinfo", V2),
            ("sys/fs/cgroup/memory.max", "536870912\n"),
            ("sys/fs/cgroup/memory.current", "1048576\n"),
            ("sys/fs/cgroup/cpu.max", "max 100000\n"),
        ]);
        assert_eq!(memory_limits(root.path())[0].limit, Bytes::mib(512));
        assert_eq!(cpu_quota(root.path()), None);
    }

    #[test]
    fn v2_memory_high_counts_as_limit() {
        let root = machine(&[
            ("proc/self/cgroup", "0::/user.slice/job.scope\n"),
            ("proc/self/mountinfo", V2),
            ("sys/fs/cgroup/user.slice/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/user.slice/memory.high", "805306368\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "536870912\n"),
            ("sys/fs/cgroup/user.slice/job.scope/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/job.scope/memory.high", "268435456\n"),
            ("sys/fs/cgroup/user.slice/job.scope/memory.current", "1048576\n"),
        ]);
        let limits: Vec<Bytes> = memory_limits(root.path()).iter().map(|limit| limit.limit).collect();
        assert_eq!(limits, [Bytes::mib(256), Bytes::mib(768)]);
    }

    #[test]
    fn v1_container_sees_its_limit() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
             32 31 0:29 /docker/1f /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
             35 31 0:32 /docker/1f /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let root = machine(&[
            ("proc/self/cgroup", "4:memory:/docker/1f\n2:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n0::/\n"),
            ("proc/self/mountinfo", mounts),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.stat", "cache 1\ninactive_file 7\ntotal_inactive_file 1073741824\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ]);
        let limits = memory_limits(root.path());
        assert_eq!(limits.len(), 1);
        assert_eq!((limits[0].limit, limits[0].used), (Bytes::gib(2), Bytes::ZERO));
        assert_eq!(cpu_quota(root.path()), None);
    }

    #[test]
    fn v1_without_a_limit_is_unlimited() {
        let root = machine(&[
            ("proc/self/cgroup", "4:memory:/a/b\n"),
            ("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4096\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let limits = memory_limits(root.path());
        assert_eq!(limits.len(), 1);
        assert_eq!(limits[0].limit, Bytes(4096));
    }

    #[test]
    fn missing_control_groups_set_no_limits() {
        let root = machine(&[("proc/self/cgroup", "garbage\n::\n"), ("proc/self/mountinfo", " - \nx\n - cgroup\n")]);
        assert!(memory_limits(root.path()).is_empty());
        assert!(memory_limits(Path::new("/nowhere")).is_empty());
        assert_eq!(cpu_quota(root.path()), None);
    }

    proptest! {
        #[test]
        fn arbitrary_lines_do_not_panic(line in "[ -/:0-9a-z,]{0,40}( - )?(cgroup2?)?\\PC{0,20}") {
            for version in [1, 2] {
                let _ = membership(&line, "memory", version);
            }
            let _ = mount(&line, "memory");
            let _ = stat_field(&line, "inactive_file");
        }
    }
}
