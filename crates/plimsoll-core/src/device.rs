//! What is known of a device before anything runs on it.

use crate::{Bytes, DType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The processor of this machine.
    Cpu,
    /// A part of the processor that behaves like an accelerator: simulated.
    Virtual,
    /// An NVIDIA GPU.
    Cuda,
    /// A published data sheet: plans only.
    Paper,
}

/// A link to the host or to another device, one way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Seconds before the first byte.
    pub latency_seconds: f64,
}

impl Link {
    /// Through the memory of one machine: what devices of this processor have between them.
    pub const MEMORY: Link = Link { bytes_per_second: 10e9, latency_seconds: 10e-6 };
}

/// What a device can do: measured by `plimsoll bench devices`, or published for paper devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Matrix products in f32, operations a second.
    pub f32_flops: f64,
    /// Matrix products in bf16 with f32 sums, operations a second.
    pub bf16_flops: f64,
    /// Memory traffic, bytes a second.
    pub memory_bytes_per_second: f64,
    /// Fixed price of one op, seconds.
    pub op_seconds: f64,
    /// The link to the host.
    pub host_link: Link,
    /// Whether these rates were measured on the device (else published or assumed).
    pub measured: bool,
    /// Finer rates, where the device was there to be measured.
    #[serde(default)]
    pub ops: OpRates,
}

/// How fast a device does each kind of op, measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpRates {
    /// Sizes at which products were timed, ascending; the same along m, n and k.
    pub product_sizes: Vec<u64>,
    /// Operations a second of f32 products, for m, n and k of `product_sizes` (k fastest).
    pub product_flops: Vec<f64>,
    /// By the name of the op: product operations a second for attention, bytes moved a second for the others.
    pub others: BTreeMap<String, f64>,
    /// The same in bf16, where it was timed by itself; else in proportion to the rates of products.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16: Option<Box<OpRates>>,
}

impl OpRates {
    /// Those that hold for a precision, and whether they were timed in it.
    pub fn of(&self, precision: DType) -> (&OpRates, bool) {
        match (precision, &self.bf16) {
            (DType::Bf16, Some(bf16)) => (bf16, true),
            _ => (self, precision == DType::F32),
        }
    }

    fn scale(&mut self, factor: f64) {
        self.product_flops.iter_mut().chain(self.others.values_mut()).for_each(|rate| *rate *= factor);
        if let Some(bf16) = &mut self.bf16 {
            bf16.scale(factor);
        }
    }
}

impl Rates {
    /// Matrix products of a precision, operations a second; f64 is not measured, and half as fast as f32.
    pub fn product_flops(&self, precision: DType) -> f64 {
        match precision {
            DType::Bf16 => self.bf16_flops,
            DType::F64 => self.f32_flops / 2.0,
            _ => self.f32_flops,
        }
    }

    /// The same device, giving `pace` of its time.
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

/// A device as the planner sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// The name in run files: `cpu`, `cuda:0`, `virtual:a`, `rtx3090`, `host1/cuda:0`.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// The load line: the most that may be held, arena and charges together.
    pub budget: Bytes,
    /// Bytes held outside the arena.
    pub charges: Bytes,
    /// Whether the charges were measured (else assumed).
    pub charges_measured: bool,
    /// Threads that compute (cpu and virtual).
    pub threads: u32,
    /// What it can do.
    pub rates: Rates,
    /// The link to the other devices of a team.
    pub team_link: Link,
    /// Whether that was measured (else assumed, or as somebody says).
    #[serde(default)]
    pub link_measured: bool,
    /// The NCCL that it has. As soon as the devices of a run are known (`Resolved` of plimsoll-train) it stands only where
    /// they exchange by it, and has its part of the charges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<NcclSpec>,
}

/// NCCL on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclSpec {
    /// Its version: `2.28.9`. Only those of one version exchange.
    pub version: String,
    /// What it is assumed to hold on the GPU at most, of the charges where the GPU exchanges by it.
    pub bytes: Bytes,
}

/// The host beside a device: where tensors wait while no op needs them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostSpec {
    /// The load line: the most that the arena on the host may hold.
    pub budget: Bytes,
    /// Memory traffic of the host's processor, bytes a second.
    pub memory_bytes_per_second: f64,
    /// The scratch file behind it.
    pub file: FileSpec,
}

impl HostSpec {
    /// No memory of its own: a device that is its own host, or a machine that nothing is known of.
    pub const NONE: HostSpec = HostSpec { budget: Bytes::ZERO, memory_bytes_per_second: 20e9, file: FileSpec::NONE };
}

/// The scratch file: where tensors wait that the host's memory has no room for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileSpec {
    /// The load line: the most that the file may hold; nothing unless the user gives it.
    pub budget: Bytes,
    /// The most that could be given: what is free on the disk.
    pub room: Bytes,
    /// Reading, while something is written too, bytes a second.
    pub read_bytes_per_second: f64,
    /// Writing, while something is read too, bytes a second.
    pub write_bytes_per_second: f64,
    /// Whether these rates were measured on the disk (else assumed).
    pub measured: bool,
}

impl FileSpec {
    /// No file. The rates are assumed: those of a slow NVMe disk that does both at once.
    pub const NONE: FileSpec = FileSpec {
        budget: Bytes::ZERO,
        room: Bytes::ZERO,
        read_bytes_per_second: 1e9,
        write_bytes_per_second: 0.5e9,
        measured: false,
    };
}

impl DeviceSpec {
    /// The host that it is on, where that is not this process's: `host1` of `host1/cuda:0`.
    pub fn host(&self) -> Option<&str> {
        self.name.split_once('/').map(|(host, _)| host)
    }

    /// The part of its charges that NCCL has.
    pub fn nccl_bytes(&self) -> Bytes {
        self.nccl.as_ref().map_or(Bytes::ZERO, |nccl| nccl.bytes)
    }

    /// Whether its arena, and what it holds beside it, are memory of this process.
    pub fn in_process(&self) -> bool {
        matches!(self.kind, DeviceKind::Cpu | DeviceKind::Virtual) && self.host().is_none()
    }

    /// Whether figures of this device come from a simulation.
    pub fn simulated(&self) -> bool {
        self.kind == DeviceKind::Virtual
    }

    /// What is left for the arena under the load line.
    pub fn arena_budget(&self) -> Bytes {
        self.budget.saturating_sub(self.charges)
    }
}
