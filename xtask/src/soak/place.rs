//! Where cases run: on the CPU, on a GPU, or on a virtual device.

use anyhow::bail;
use plimsoll_core::{Algorithms, Bytes, DType, DeviceKind, FileSpec, HostSpec, Link};
use plimsoll_device::cuda::driver::Context;
use plimsoll_device::device::{Device, DeviceError};
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_device::{cpu, cuda};
use plimsoll_program::{Placement, ProgramSet};
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// A device that runs cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The processor.
    Cpu,
    /// The GPU of this number.
    Cuda(u32),
    /// A part of the processor with a host side, as quick as it goes.
    Virtual,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(number) => write!(f, "cuda:{number}"),
            Place::Virtual => f.write_str("virtual"),
        }
    }
}

impl FromStr for Place {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Place> {
        match text.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(number)) => Ok(Place::Cuda(number)),
            None if text == "cpu" => Ok(Place::Cpu),
            None if text == "virtual" => Ok(Place::Virtual),
            _ => bail!("`{text}` is no device: cpu, virtual, or cuda:0"),
        }
    }
}

impl Place {
    /// What kind of device it is for the planner.
    pub fn kind(self) -> DeviceKind {
        match self {
            Place::Cpu => DeviceKind::Cpu,
            Place::Cuda(_) => DeviceKind::Cuda,
            Place::Virtual => DeviceKind::Virtual,
        }
    }

    /// What may wait beside it.
    pub fn host(self) -> HostSpec {
        match self {
            Place::Cpu | Place::Cuda(_) => HostSpec::NONE,
            Place::Virtual => HostSpec { budget: Bytes::gib(1), memory_bytes_per_second: 1e10, file: FileSpec::NONE },
        }
    }

    /// Whether this process can do nothing more there: a new one may.
    pub fn is_lost(self) -> bool {
        matches!(self, Place::Cuda(number) if Context::is_lost(number))
    }

    /// Opens it with the Programs of a plan.
    ///
    /// # Errors
    /// What it refuses.
    pub fn open(
        self,
        set: ProgramSet,
        placement: Placement,
        precision: DType,
        threads: u32,
    ) -> Result<Box<dyn Device>, DeviceError> {
        match self {
            Place::Cpu => cpu::executor::open(set, placement, precision, threads as usize, None),
            Place::Cuda(number) => {
                // Recipes of one case are compared bit by bit: their products are done in one way, chosen once.
                static CHOSEN: Mutex<Option<Algorithms>> = Mutex::new(None);
                let mut chosen = CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
                let opened = cuda::open::open(number, threads as usize, precision, chosen.as_ref(), set, placement)?;
                chosen.get_or_insert_with(|| opened.algorithms.clone()).chosen.extend(opened.algorithms.chosen);
                Ok(opened.device)
            }
            Place::Virtual => {
                let what = Virtual {
                    name: "virtual".into(),
                    arena_budget: Bytes(placement.arena_bytes),
                    threads: threads as usize,
                    price: Box::new(|_, _| 0.0),
                    scratch: None,
                    link: Link { bytes_per_second: 1e12, latency_seconds: 0.0 },
                };
                virtual_device::open(what, set, placement, precision)
            }
        }
    }
}
