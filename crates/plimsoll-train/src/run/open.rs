//! Opening the device of a plan: which executor runs what a [`DeviceSpec`] describes.

use super::prepare::rounded;
use plimsoll_core::{Algorithms, Bytes, DType, DeviceKind, DeviceSpec, HostSpec, Link};
use plimsoll_device::cpu::executor;
use plimsoll_device::cuda;
use plimsoll_device::cuda::open::{OnGpu, Wish};
use plimsoll_device::device::{Device, DeviceError};
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::Answer;
use plimsoll_program::{Op, Placement, ProgramSet};
use std::path::Path;

/// Opens a device with the Programs of a plan; of a GPU comes what is seen of it beside them. `algorithms` are those that
/// the run's products had before, `scratch` is the folder of the scratch file, where there may be one.
///
/// # Errors
/// What the machine refuses, or a device that no executor runs.
pub fn open(
    spec: &DeviceSpec,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&Algorithms>,
    scratch: Option<&Path>,
) -> Result<(Box<dyn Device>, Option<OnGpu>), DeviceError> {
    let threads = spec.threads as usize;
    match spec.kind {
        DeviceKind::Cpu if scratch.is_none() => Ok((executor::open(set, placement, precision, threads, None)?, None)),
        DeviceKind::Cpu => Ok((virtual_device::open(processor(spec, scratch), set, placement, precision)?, None)),
        DeviceKind::Virtual => {
            let what = Virtual { scratch: scratch.map(Path::to_owned), ..virtual_of(spec, precision) };
            Ok((virtual_device::open(what, set, placement, precision)?, None))
        }
        DeviceKind::Cuda => {
            let wish = Wish { scratch, ..wish(spec, precision, algorithms) };
            let (device, gpu) = cuda::open::open_for_run(&wish, set, placement)?;
            Ok((device, Some(gpu)))
        }
        DeviceKind::Paper => Err(DeviceError::Unsupported { op: "a run", device: "a device on paper" }),
    }
}

fn wish<'a>(spec: &DeviceSpec, precision: DType, algorithms: Option<&'a Algorithms>) -> Wish<'a> {
    let index = spec.name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
    Wish {
        index: index.expect("GPUs are named by the driver's numbers"),
        threads: spec.threads as usize,
        precision,
        algorithms,
        charges: spec.charges_measured.then_some(spec.charges),
        scratch: None,
    }
}

/// Measures the charges of a GPU that nobody has measured yet, with the Programs of a plan that assumes them. Whether
/// there is something new to plan with.
///
/// # Errors
/// What the machine refuses, but for memory: then what was assumed stands.
pub fn settle_gpu(spec: &mut DeviceSpec, answer: &Answer, scratch: Option<&Path>) -> Result<bool, DeviceError> {
    if spec.kind != DeviceKind::Cuda || spec.charges_measured {
        return Ok(false);
    }
    let wish = Wish { scratch, ..wish(spec, answer.precision, None) };
    match cuda::open::measure_charges(&wish, answer.set.clone(), answer.layout.placement.clone()) {
        Ok(charges) => {
            (spec.charges, spec.charges_measured) = (rounded(charges), true);
            Ok(true)
        }
        Err(error) if error.is_refusal() => Ok(false),
        Err(error) => Err(error),
    }
}

/// The virtual device that a spec describes: its ops take what the planner says that they take.
fn virtual_of(spec: &DeviceSpec, precision: DType) -> Virtual {
    let (rates, team_link) = (spec.rates.clone(), spec.team_link);
    let price = move |set: &ProgramSet, op: &Op| {
        Prices { rates: &rates, host: &HostSpec::NONE, precision, team_link }.op_seconds(set, op)
    };
    Virtual {
        name: spec.name.clone(),
        arena_budget: spec.arena_budget(),
        threads: spec.threads as usize,
        price: Box::new(price),
        link: spec.rates.host_link,
        scratch: None,
    }
}

/// The processor itself with queues, so that it computes while the scratch file is read and written: at no pace.
fn processor(spec: &DeviceSpec, scratch: Option<&Path>) -> Virtual {
    Virtual {
        name: spec.name.clone(),
        arena_budget: Bytes(u64::MAX),
        threads: spec.threads as usize,
        price: Box::new(|_, _| 0.0),
        link: Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 },
        scratch: scratch.map(Path::to_owned),
    }
}
