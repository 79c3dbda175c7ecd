//! What hardware is here, what of it is free for this process, and what Plimsoll would take of it and why.
//!
//! Most is read from `/proc` and `/sys` under a root that tests replace; GPUs are listed by their driver, without taking
//! memory on any. How fast a device is, is measured in [`crate::bench`].

mod cgroup;
mod cpu;
mod heat;
mod memory;
mod nvidia;

pub use cpu::{Cache, Cpu, Load, TooManyThreads, auto_pace, auto_threads};
pub use heat::{Heat, ProcessorHeat, sysfs};
pub use memory::{Limit, Memory};
pub use nvidia::{Gpu, LibraryState, Nvidia};

use plimsoll_core::{Budget, Bytes, DeviceKind};
use serde::Serialize;
use std::path::Path;

/// The machine as this process sees it.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor, then every GPU, those that cannot be used included.
    pub devices: Vec<Found>,
    /// NVIDIA's driver and libraries.
    pub nvidia: Nvidia,
}

/// A device that is here.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// The name in run files and for `--devices`.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Maker's name of it.
    pub model: String,
    /// Memory that exists for this process: the machine's, or its container's.
    pub memory_total_bytes: Bytes,
    /// What of it is free now.
    pub memory_free_bytes: Bytes,
    /// What says how much is free.
    pub memory_bound_by: String,
    /// Physical cores that this process may use; a GPU's multiprocessors.
    pub cores: u32,
    /// Hardware threads that this process may use; 0 for a GPU.
    pub threads: u32,
    /// Instruction sets that matter to the kernels.
    pub features: Vec<String>,
    /// Its caches, nearest first.
    pub caches: Vec<Cache>,
    /// What Plimsoll would take when told nothing.
    pub takes: Takes,
    /// What only GPUs have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
}

/// What Plimsoll would take of a device, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Takes {
    /// The load line.
    pub budget_bytes: Bytes,
    /// Threads that compute; 0 for a GPU.
    pub threads: u32,
    /// Why that much.
    pub why: String,
}

/// What is on this machine.
pub fn machine() -> Machine {
    let (nvidia, gpus) = nvidia::read();
    Machine { devices: [vec![found_cpu(Cpu::read(), Memory::read())], gpus].concat(), nvidia }
}

fn found_cpu(cpu: Cpu, memory: Memory) -> Found {
    let threads = cpu.threads_for(None).expect("nothing was asked for");
    let mut why = format!("{} of the {} that are free ({})", Budget::DEVICE, memory.free, memory.bound_by);
    why += &match cpu.quota {
        Some(quota) if quota < f64::from(cpu.cores) => {
            format!("; 80% of the {quota} cores that the container may use")
        }
        _ if cpu.cores == 1 => "; the only core".to_owned(),
        _ => format!("; 80% of {} physical cores", cpu.cores),
    };
    Found {
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
        takes: Takes { budget_bytes: Budget::DEVICE.of(memory.free), threads, why },
        gpu: None,
    }
}

/// A file's text where it can be read, for the many files of `/proc` and `/sys` that a kernel or container may lack.
fn text(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_processor_with_free_memory() {
        let machine = machine();
        let cpu = &machine.devices[0];
        assert_eq!((cpu.name.as_str(), cpu.kind), ("cpu", DeviceKind::Cpu));
        assert!(cpu.memory_free_bytes > Bytes::ZERO && cpu.memory_free_bytes <= cpu.memory_total_bytes);
        assert!(cpu.takes.budget_bytes < cpu.memory_free_bytes);
        assert!(cpu.takes.threads >= 1 && cpu.takes.threads <= cpu.cores && cpu.cores <= cpu.threads);
    }

    #[test]
    fn what_would_be_taken_comes_with_its_reason() {
        let cpu = Cpu { cores: 8, threads: 16, quota: None, ..Cpu::default() };
        let memory = Memory { total: Bytes::gib(32), free: Bytes::gib(20), bound_by: "the machine".to_owned() };
        let found = found_cpu(cpu.clone(), memory.clone());
        assert_eq!((found.takes.budget_bytes, found.takes.threads), (Bytes::gib(18), 6));
        assert_eq!(found.takes.why, "90% of the 20.00 GiB that are free (the machine); 80% of 8 physical cores");
        let found = found_cpu(Cpu { quota: Some(2.5), ..cpu }, memory);
        assert_eq!(found.takes.threads, 2);
        assert!(found.takes.why.ends_with("80% of the 2.5 cores that the container may use"), "{}", found.takes.why);
    }
}
