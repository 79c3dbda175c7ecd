//! The device that runs the cases: the CPU, a GPU, or a virtual device.

use anyhow::bail;
use plimsoll_core::{Bytes, DType, DeviceKind, FileSpec, GemmAlgorithms, HostSpec, Link};
use plimsoll_device::cuda::driver::Context;
use plimsoll_device::device::Device;
use plimsoll_device::error::DeviceError;
use plimsoll_device::virtual_device::{self, VirtualDeviceSpec};
use plimsoll_device::{cpu, gpu};
use plimsoll_program::{Placement, ProgramSet};
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// The device that runs the cases of a soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestDevice {
    /// The CPU.
    Cpu,
    /// A GPU by its index.
    Cuda(u32),
    /// A virtual device with host memory that computes as fast as it can.
    Virtual,
}

impl fmt::Display for TestDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TestDevice::Cpu => f.write_str("cpu"),
            TestDevice::Cuda(number) => write!(f, "cuda:{number}"),
            TestDevice::Virtual => f.write_str("virtual"),
        }
    }
}

impl FromStr for TestDevice {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<TestDevice> {
        match text.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(number)) => Ok(TestDevice::Cuda(number)),
            None if text == "cpu" => Ok(TestDevice::Cpu),
            None if text == "virtual" => Ok(TestDevice::Virtual),
            _ => bail!("`{text}` is no device: cpu, virtual, or cuda:0"),
        }
    }
}

impl TestDevice {
    /// Returns the kind of device for the planner.
    pub fn kind(self) -> DeviceKind {
        match self {
            TestDevice::Cpu => DeviceKind::Cpu,
            TestDevice::Cuda(_) => DeviceKind::Cuda,
            TestDevice::Virtual => DeviceKind::Virtual,
        }
    }

    /// Returns the host memory that is available for offload: 1 GiB for a virtual device, none for others.
    pub fn host(self) -> HostSpec {
        match self {
            TestDevice::Cpu | TestDevice::Cuda(_) => HostSpec::NONE,
            TestDevice::Virtual => {
                HostSpec { budget: Bytes::gib(1), memory_bytes_per_second: 1e10, file: FileSpec::NONE }
            }
        }
    }

    /// Returns whether this process has lost the device. A new process may be able to use it.
    pub fn is_lost(self) -> bool {
        matches!(self, TestDevice::Cuda(number) if Context::is_lost(number))
    }

    /// Opens the device for the Programs of a plan, with the arena that `placement` describes.
    ///
    /// # Errors
    /// Fails if the device refuses the memory or a Program.
    pub fn open(
        self,
        set: ProgramSet,
        placement: Placement,
        precision: DType,
        threads: u32,
    ) -> Result<Box<dyn Device>, DeviceError> {
        match self {
            TestDevice::Cpu => cpu::executor::open(set, placement, precision, threads as usize, None),
            TestDevice::Cuda(number) => {
                // Recipes of one case are compared bit by bit, so all of them use the same matrix product algorithms.
                static CHOSEN: Mutex<Option<GemmAlgorithms>> = Mutex::new(None);
                let mut chosen = CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
                let opened = gpu::open(number, threads as usize, precision, chosen.as_ref(), set, placement)?;
                chosen.get_or_insert_with(|| opened.algorithms.clone()).chosen.extend(opened.algorithms.chosen);
                Ok(opened.device)
            }
            TestDevice::Virtual => {
                let what = VirtualDeviceSpec {
                    name: "virtual".into(),
                    arena_budget: Bytes(placement.arena_bytes),
                    threads: threads as usize,
                    price: Box::new(|_, _| 0.0),
                    scratch_folder: None,
                    link: Link { bytes_per_second: 1e12, latency_seconds: 0.0 },
                };
                virtual_device::open(what, set, placement, precision)
            }
        }
    }
}
