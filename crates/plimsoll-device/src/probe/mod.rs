//! The hardware of this machine: what exists, what is free for this process, and the limits that Plimsoll would choose
//! by default.
//!
//! Most facts come from `/proc` and `/sys` under a root that tests replace. The CUDA driver lists GPUs without
//! allocating memory on any. Speed is measured in [`crate::bench`].

mod cgroup;
mod cpu;
mod memory;
mod nvidia;
mod temperature;

pub use cpu::{Cache, Cpu, CpuUsage, TooManyThreads, auto_pace, auto_threads};
pub use memory::{Limit, Memory};
pub use nvidia::{Gpu, LibraryState, Nvidia};
pub use temperature::{CpuTemperature, Temperature, sysfs};

use plimsoll_core::{Budget, Bytes, DeviceKind};
use serde::Serialize;
use std::path::Path;

/// The machine as this process sees it.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor, then every GPU, those that cannot be used included.
    pub devices: Vec<DeviceInfo>,
    /// NVIDIA's driver and libraries.
    pub nvidia: Nvidia,
}

/// A device of this machine.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// Name in run files and for `--devices`.
    pub name: String,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Model name given by the maker.
    pub model: String,
    /// Memory that exists for this process: the machine's, or its container's.
    pub memory_total_bytes: Bytes,
    /// Bytes of it that are free now.
    pub memory_free_bytes: Bytes,
    /// Source of the figure for free memory.
    pub memory_bound_by: String,
    /// Physical cores that this process may use; a GPU's multiprocessors.
    pub cores: u32,
    /// Hardware threads that this process may use; 0 for a GPU.
    pub threads: u32,
    /// Instruction sets that matter to the kernels.
    pub features: Vec<String>,
    /// Its caches, nearest first.
    pub caches: Vec<Cache>,
    /// Limits that Plimsoll chooses if the run file sets none.
    pub defaults: DefaultLimits,
    /// Facts that only GPUs have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
}

/// Default limits of a device, with their reason.
#[derive(Clone, Debug, Serialize)]
pub struct DefaultLimits {
    /// Load line.
    pub budget_bytes: Bytes,
    /// Threads that compute; 0 for a GPU.
    pub threads: u32,
    /// Explanation of the limits.
    pub reason: String,
}

/// Reads the hardware of this machine.
pub fn machine() -> Machine {
    let (nvidia, gpus) = nvidia::read();
    Machine { devices: [vec![cpu_info(Cpu::read(), Memory::read())], gpus].concat(), nvidia }
}

fn cpu_info(cpu: Cpu, memory: Memory) -> DeviceInfo {
    let threads = cpu.threads_for(None).expect("the default number of threads is valid");
    let mut reason = format!("{} of {} free ({})", Budget::DEVICE, memory.free, memory.bound_by);
    reason += &match cpu.quota {
        Some(quota) if quota < f64::from(cpu.cores) => {
            format!("; 80% of the {quota} cores of the container's quota")
        }
        _ if cpu.cores == 1 => "; the only core".to_owned(),
        _ => format!("; 80% of {} physical cores", cpu.cores),
    };
    DeviceInfo {
        name: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        model: cpu.model,
        memory_total_bytes: memory.total,
        memory_free_bytes: memory.free,
        memory_bound_by: memory.bound_by,
        cores: cpu.cores,
        threads: cpu.threads,
        features: cpu.features,
        caches: cpu.caches,
        defaults: DefaultLimits { budget_bytes: Budget::DEVICE.load_line(memory.free), threads, reason },
        gpu: None,
    }
}

/// Returns a file's text. None if it is unreadable, as many files of `/proc` and `/sys` are on some kernels or in containers.
fn read_text(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_has_a_cpu_with_free_memory() {
        let machine = machine();
        let cpu = &machine.devices[0];
        assert_eq!((cpu.name.as_str(), cpu.kind), ("cpu", DeviceKind::Cpu));
        assert!(cpu.memory_free_bytes > Bytes::ZERO && cpu.memory_free_bytes <= cpu.memory_total_bytes);
        assert!(cpu.defaults.budget_bytes < cpu.memory_free_bytes);
        assert!(cpu.defaults.threads >= 1 && cpu.defaults.threads <= cpu.cores && cpu.cores <= cpu.threads);
    }

    #[test]
    fn default_limits_state_their_reason() {
        let cpu = Cpu { cores: 8, threads: 16, quota: None, ..Cpu::default() };
        let memory = Memory { total: Bytes::gib(32), free: Bytes::gib(20), bound_by: "the machine".to_owned() };
        let info = cpu_info(cpu.clone(), memory.clone());
        assert_eq!((info.defaults.budget_bytes, info.defaults.threads), (Bytes::gib(18), 6));
        assert_eq!(info.defaults.reason, "90% of 20.00 GiB free (the machine); 80% of 8 physical cores");
        let info = cpu_info(Cpu { quota: Some(2.5), ..cpu }, memory);
        assert_eq!(info.defaults.threads, 2);
        assert!(
            info.defaults.reason.ends_with("80% of the 2.5 cores of the container's quota"),
            "{}",
            info.defaults.reason
        );
    }
}
