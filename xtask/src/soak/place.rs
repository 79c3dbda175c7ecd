//! Where cases run: on the CPU, or on a GPU.

use anyhow::bail;
use plimsoll_core::{DType, DeviceKind};
use plimsoll_device::device::{Device, DeviceError};
use plimsoll_device::{cpu, cuda};
use plimsoll_program::{Placement, ProgramSet};
use std::fmt;
use std::str::FromStr;

/// A device that runs cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The processor.
    Cpu,
    /// The GPU of this number.
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl FromStr for Place {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Place> {
        match text.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(number)) => Ok(Place::Cuda(number)),
            None if text == "cpu" => Ok(Place::Cpu),
            _ => bail!("`{text}` is no device: cpu, or cuda:0"),
        }
    }
}

impl Place {
    /// What kind of device it is for the planner.
    pub fn kind(self) -> DeviceKind {
        match self {
            Place::Cpu => DeviceKind::Cpu,
            Place::Cuda(_) => DeviceKind::Cuda,
        }
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
            Place::Cpu => cpu::executor::open(set, placement, precision, threads as usize),
            Place::Cuda(number) => {
                let opened = cuda::open::open(number, threads as usize, precision, None, set, placement)?;
                Ok(opened.device)
            }
        }
    }
}
