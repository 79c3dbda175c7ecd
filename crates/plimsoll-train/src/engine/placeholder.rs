//! Stand-in for a device while its engine is on another thread.

use plimsoll_device::device::{Device, FileSpace, Memory, NoMemory, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_program::{Placement, ProgramSet, TensorId};

/// Stand-in for a device while its engine is on another thread. All its Programs fail as if the device were lost.
pub struct PlaceholderDevice {
    name: String,
    memory: NoMemory,
}

impl PlaceholderDevice {
    /// Creates a placeholder for the device of this name.
    pub fn of(name: &str) -> Box<dyn Device> {
        Box::new(PlaceholderDevice { name: name.to_owned(), memory: NoMemory })
    }

    fn lost(&self) -> DeviceError {
        DeviceError::Lost { device: self.name.clone(), reason: String::new() }
    }
}

impl Device for PlaceholderDevice {
    fn run_observed(&mut self, _: ProgramCall, _: &mut dyn FileSpace, _: &mut dyn Observer) -> Result<(), DeviceError> {
        Err(self.lost())
    }

    fn adopt(&mut self, _: ProgramSet, _: Placement) -> Result<(), DeviceError> {
        Err(self.lost())
    }

    fn write(&mut self, _: TensorId, _: u32, _: &[u8]) {}

    /// Fills `bytes`, the buffer for the tensor's content, with one bits, which are NaN for floats.
    fn read(&mut self, _: TensorId, _: u32, bytes: &mut [u8]) {
        bytes.fill(0xff);
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.memory
    }
}
