//! The hardware and its limits as this process sees them: processor, memory, temperature, and the kind of system. GPUs
//! are in [`crate::machine`].
//!
//! The facts come from `/proc` and `/sys` under a root that tests replace.

mod cgroup;
mod cpu;
mod memory;
mod system;
mod temperature;

pub use cgroup::{MemoryLimit, memory_limits};
pub use cpu::{Cache, Cpu, CpuUsage, TooManyThreads, auto_pace, auto_threads};
pub use memory::Memory;
pub use system::{PhysicalMemory, has_infiniband, is_wsl, sees_all_processes};
pub use temperature::{CpuTemperature, Temperature, sysfs};

use std::path::Path;

/// Returns a file's text. None if it is unreadable, as many files of `/proc` and `/sys` are on some kernels or in
/// containers.
pub(crate) fn read_text(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}
