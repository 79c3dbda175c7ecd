//! Specifications of devices, their links, the host and the scratch file: the input of the planner.
//!
//! Rates are measured by calibration (`plimsoll bench devices`), published (paper devices) or assumed. Measuring is
//! done in `plimsoll-device`; free memory and load lines are resolved in `plimsoll-train`.

use crate::{Bytes, DType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The kind of a device: CPU, simulated accelerator, GPU, or data sheet of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU of a machine.
    Cpu,
    /// A simulated accelerator that runs on the CPU.
    Virtual,
    /// An NVIDIA GPU.
    Cuda,
    /// A GPU model known only from its data sheet. Runs are planned for it and never executed on it.
    Paper,
}

/// The speed of a link to the host or to another device, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Link {
    /// Bandwidth in bytes per second.
    pub bytes_per_second: f64,
    /// Seconds before the first byte arrives.
    pub latency_seconds: f64,
}

impl Link {
    /// The assumed link between devices that share the memory of one machine, such as `cpu` and `virtual` devices.
    pub const MEMORY: Link = Link { bytes_per_second: 10e9, latency_seconds: 10e-6 };
}

/// Compute and memory rates of a device: measured by `plimsoll bench devices`, or published for paper devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Operations per second of matrix products in f32.
    pub f32_flops: f64,
    /// Operations per second of matrix products in bf16 with f32 accumulation.
    pub bf16_flops: f64,
    /// Memory bandwidth in bytes per second.
    pub memory_bytes_per_second: f64,
    /// Fixed overhead of one op in seconds.
    pub op_seconds: f64,
    /// The link to the host.
    pub host_link: Link,
    /// Whether these rates were measured on the device; otherwise they are published or assumed.
    pub measured: bool,
    /// Measured rates of single kinds of ops; empty if the device was not measured.
    #[serde(default)]
    pub ops: OpRates,
}

/// Measured rates of a device per kind of op.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct OpRates {
    /// Sizes at which matrix products were timed, ascending, for all three axes m, n and k. Empty without a
    /// measurement.
    pub product_sizes: Vec<u64>,
    /// Operations per second of f32 matrix products on the grid m × n × k of `product_sizes` (k varies fastest).
    pub product_flops: Vec<f64>,
    /// Rates of ops other than matrix products, by op name: operations per second for attention, bytes moved per second
    /// for all others. An op without an entry moves its bytes at [`Rates::memory_bytes_per_second`].
    pub other_ops: BTreeMap<String, f64>,
    /// Rates in bf16; `None` if they were not timed. The f32 rates then apply, but those of matrix products are
    /// multiplied by `bf16_flops / f32_flops`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16: Option<Box<OpRates>>,
}

impl OpRates {
    /// Returns the rates that apply to `precision`. The second value is whether they were timed in that precision.
    pub fn for_precision(&self, precision: DType) -> (&OpRates, bool) {
        match (precision, &self.bf16) {
            (DType::Bf16, Some(bf16)) => (bf16, true),
            _ => (self, precision == DType::F32),
        }
    }

    /// Multiplies all rates by `factor`.
    fn scale(&mut self, factor: f64) {
        self.product_flops.iter_mut().chain(self.other_ops.values_mut()).for_each(|rate| *rate *= factor);
        if let Some(bf16) = &mut self.bf16 {
            bf16.scale(factor);
        }
    }
}

impl Rates {
    /// Returns the operations per second of matrix products in `precision`. The rate in f64 is not measured; half of
    /// the rate in f32 is taken.
    pub fn product_flops(&self, precision: DType) -> f64 {
        match precision {
            DType::Bf16 => self.bf16_flops,
            DType::F64 => self.f32_flops / 2.0,
            _ => self.f32_flops,
        }
    }

    /// Returns the rates of a device that computes at `pace` times this speed. The rates of links stay the same.
    #[must_use]
    pub fn paced(&self, pace: f64) -> Rates {
        let mut rates = self.clone();
        for rate in [&mut rates.f32_flops, &mut rates.bf16_flops, &mut rates.memory_bytes_per_second] {
            *rate *= pace;
        }
        rates.ops.scale(pace);
        rates.op_seconds /= pace;
        rates
    }
}

/// A device as the planner sees it: kind, memory, rates and links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// The device's name in run files: `cpu`, `cuda:0`, `virtual:a`, `rtx3090`, `host1/cuda:0`.
    pub name: String,
    /// The kind of the device.
    pub kind: DeviceKind,
    /// The load line: the most bytes that arena and charges may hold together.
    pub budget: Bytes,
    /// Bytes held outside the arena: CUDA context, kernels, library workspaces, and the process itself.
    pub charges: Bytes,
    /// Whether the charges were measured; otherwise they are assumed.
    pub charges_measured: bool,
    /// Number of CPU threads. A `cpu` or `virtual` device computes on them. For a GPU, they run the ops of its host
    /// queue.
    pub threads: u32,
    /// Compute and memory rates.
    pub rates: Rates,
    /// The link to the other devices of a team.
    pub team_link: Link,
    /// Whether `team_link` was measured; otherwise it is assumed or given by the user.
    #[serde(default)]
    pub link_measured: bool,
    /// The NCCL library of the GPU; `None` if there is none, or if the planned team does not exchange by NCCL. In a
    /// team that does, its bytes are part of the charges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<NcclSpec>,
}

/// An NCCL library, and the memory that it takes on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclSpec {
    /// The version, such as `2.28.9`. Only GPUs with equal versions exchange by NCCL.
    pub version: String,
    /// Assumed upper limit of the bytes that NCCL holds on the GPU. They count as charges if the GPU exchanges by NCCL.
    pub bytes: Bytes,
}

/// The host of a device: memory for offloaded tensors, and the scratch file behind it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostSpec {
    /// The load line of the host: the most bytes that the host arena may hold.
    pub budget: Bytes,
    /// Memory bandwidth of the host CPU in bytes per second.
    pub memory_bytes_per_second: f64,
    /// The scratch file on disk.
    pub file: FileSpec,
}

impl HostSpec {
    /// A host without memory for offloaded tensors. Used for the CPU, which is its own host, for remote devices, and
    /// for an unknown host.
    pub const NONE: HostSpec = HostSpec { budget: Bytes::ZERO, memory_bytes_per_second: 20e9, file: FileSpec::NONE };
}

/// The scratch file: disk space for offloaded tensors that exceed the host memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileSpec {
    /// The load line of the file: the most bytes that it may hold. Zero unless the user sets it.
    pub budget: Bytes,
    /// Free bytes on the disk of the file. A budget cannot be larger.
    pub available: Bytes,
    /// Read bandwidth in bytes per second, with concurrent writes.
    pub read_bytes_per_second: f64,
    /// Write bandwidth in bytes per second, with concurrent reads.
    pub write_bytes_per_second: f64,
    /// Whether the rates were measured on the disk; otherwise they are assumed.
    pub measured: bool,
}

impl FileSpec {
    /// No scratch file. The rates are those assumed for a slow NVMe disk that reads and writes concurrently.
    pub const NONE: FileSpec = FileSpec {
        budget: Bytes::ZERO,
        available: Bytes::ZERO,
        read_bytes_per_second: 1e9,
        write_bytes_per_second: 0.5e9,
        measured: false,
    };
}

impl DeviceSpec {
    /// Returns the name of the remote host of the device (`host1` for `host1/cuda:0`), `None` for a local device.
    pub fn remote_host(&self) -> Option<&str> {
        self.name.split_once('/').map(|(host, _)| host)
    }

    /// Returns the part of the charges that NCCL holds; zero without NCCL.
    pub fn nccl_bytes(&self) -> Bytes {
        self.nccl.as_ref().map_or(Bytes::ZERO, |nccl| nccl.bytes)
    }

    /// Returns whether the device's arena and charges lie in the memory of this process.
    pub fn in_process(&self) -> bool {
        matches!(self.kind, DeviceKind::Cpu | DeviceKind::Virtual) && self.remote_host().is_none()
    }

    /// Returns whether the device's figures come from a simulation.
    pub fn simulated(&self) -> bool {
        self.kind == DeviceKind::Virtual
    }

    /// Computes the bytes that the load line leaves for the arena, after the charges; zero if the charges take all of
    /// it.
    pub fn arena_budget(&self) -> Bytes {
        self.budget.saturating_sub(self.charges)
    }
}
