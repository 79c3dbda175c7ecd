//! All devices of this machine: what exists, what is free for this process, and the limits that Plimsoll would choose
//! by default.
//!
//! The CUDA driver lists GPUs without allocating memory on any. Speed is measured in
//! [`crate::bench`](mod@crate::bench).

mod environment;
mod nvidia;

pub use environment::{environment, name_commit};
pub use nvidia::{DriverFailure, Gpu, LibraryState, Nvidia};

use crate::probe::{Cache, Cpu, Memory};
use plimsoll_core::{Budget, Bytes, DeviceKind};
use serde::Serialize;

/// The machine as this process sees it.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Machine {
    /// The processor, then every GPU that NVIDIA's driver lists, usable or not.
    pub devices: Vec<DeviceInfo>,
    /// NVIDIA's driver and libraries.
    pub nvidia: Nvidia,
}

/// A device of this machine.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceInfo {
    /// Name in run files and for `--devices`.
    pub name: String,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Model name given by the maker.
    pub model: String,
    /// Total memory of a GPU. For the processor: the machine's memory, or a smaller limit on this process, such as the
    /// container's.
    pub memory_total_bytes: Bytes,
    /// Free bytes of that memory now. If NVML does not report it for a GPU, all of its memory is assumed to be free.
    pub memory_free_bytes: Bytes,
    /// Source of the figure for free memory. For the processor: the limit that determines it. For a GPU: NVML, or the
    /// note that the figure is assumed.
    pub memory_bound_by: String,
    /// Number of physical cores that this process may use; for a GPU, the number of its multiprocessors.
    pub cores: u32,
    /// Number of hardware threads that this process may use; 0 for a GPU.
    pub threads: u32,
    /// Instruction sets of the processor by which kernels are selected, such as `avx2`; empty for a GPU.
    pub features: Vec<String>,
    /// Caches of the processor, nearest to the core first; empty for a GPU, or if the system does not report them.
    pub caches: Vec<Cache>,
    /// Limits that Plimsoll chooses if the run file sets none.
    pub defaults: DefaultLimits,
    /// Facts that only GPUs have. None for a processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
}

/// Default limits of a device, with their reason.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DefaultLimits {
    /// Load line; zero for a GPU that cannot be used.
    pub budget_bytes: Bytes,
    /// Number of threads that compute; 0 for a GPU.
    pub threads: u32,
    /// Explanation of the limits, or the reason why a GPU cannot be used.
    pub reason: String,
}

impl Machine {
    /// Reads the hardware of this machine.
    pub fn read() -> Machine {
        let (nvidia, gpus) = nvidia::read();
        Machine { devices: [vec![cpu_info(Cpu::read(), Memory::read())], gpus].concat(), nvidia }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_has_a_cpu_with_free_memory() {
        let machine = Machine::read();
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
