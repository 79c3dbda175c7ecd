//! The hardware and its limits as this process sees them: processor, memory and temperature. GPUs are in
//! [`crate::machine`].
//!
//! The facts come from `/proc` and `/sys` under a root that tests replace.

mod cgroup;
mod cpu;
mod memory;
mod temperature;

pub use cpu::{Cache, Cpu, CpuUsage, TooManyThreads, auto_pace, auto_threads};
pub use memory::Memory;
pub use temperature::{CpuTemperature, Temperature, sysfs};

use std::path::Path;

/// Returns a file's text. None if it is unreadable, as many files of `/proc` and `/sys` are on some kernels or in
/// containers.
pub(crate) fn read_text(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}
