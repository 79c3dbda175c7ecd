//! Opening the device of a plan: which executor runs what a [`DeviceSpec`] describes.

use plimsoll_core::{DType, DeviceKind, DeviceSpec, HostSpec};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Device, DeviceError};
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_plan::price::Prices;
use plimsoll_program::{Op, Placement, ProgramSet};

/// Opens a device with the Programs of a plan.
///
/// # Errors
/// What the machine refuses, or a device that no executor runs.
pub fn open(
    spec: &DeviceSpec,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
) -> Result<Box<dyn Device>, DeviceError> {
    match spec.kind {
        DeviceKind::Cpu => executor::open(set, placement, precision, spec.threads as usize),
        DeviceKind::Virtual => virtual_device::open(virtual_of(spec, precision), set, placement, precision),
        DeviceKind::Cuda => Err(DeviceError::Unsupported { op: "a run", device: "a GPU" }),
        DeviceKind::Paper => Err(DeviceError::Unsupported { op: "a run", device: "a device on paper" }),
    }
}

/// The virtual device that a spec describes: its ops take what the planner says that they take.
fn virtual_of(spec: &DeviceSpec, precision: DType) -> Virtual {
    let rates = spec.rates.clone();
    let price =
        move |set: &ProgramSet, op: &Op| Prices { rates: &rates, host: &HostSpec::NONE, precision }.op_seconds(set, op);
    Virtual {
        name: spec.name.clone(),
        arena_budget: spec.arena_budget(),
        threads: spec.threads as usize,
        price: Box::new(price),
        link: spec.rates.host_link,
    }
}
