//! Charges that depend on the plan: those of a team, and those of Programs.
//!
//! Programs of thousands of ops take a noticeable part of the memory of a process, so they are charged. This is a fixed point:
//! higher charges leave less for the arena, and a smaller arena may need Programs with more ops. [`ProgramCharges`] raises the
//! charges until they cover the Programs of the plan that they lead to. Every planning driver uses it.

use crate::data::Rows;
use crate::resolve::RunRequest;
use crate::resolve::charges::round_up_charges;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure};
use plimsoll_device::transport::wire;
use plimsoll_program::ProgramSet;

/// Adds the charges of working in a team: a copy of the step's rows for each device in this process, and for devices that
/// compute on a processor the bytes in flight if any device of the team is remote.
pub(crate) fn add_team_charges(devices: &mut [DeviceSpec], run: &RunRequest) {
    let rows = Rows::max_bytes(run.batch_sequences(), u64::from(run.data.sequence));
    let any_remote = devices.iter().any(|device| device.remote_host().is_some());
    for device in devices {
        if device.in_process() {
            device.charges = round_up_charges(device.charges + rows);
        }
        if any_remote && device.kind != DeviceKind::Cuda {
            device.charges = round_up_charges(device.charges + wire::MAX_IN_FLIGHT_BYTES);
        }
    }
}

/// Returns the bytes that the Programs of all devices of a process hold beyond what every process is charged with. Measured
/// bytes per op: its place in the order of the queues, and the names of its tensors.
pub(crate) fn program_heap_bytes<'a>(sets: impl IntoIterator<Item = &'a ProgramSet>) -> Bytes {
    const FREE_OPS: u64 = 4096;
    const OP_BYTES: u64 = 1792;
    let blocks = sets.into_iter().flat_map(|set| &set.programs).flat_map(|program| &program.blocks);
    let ops = blocks.map(|block| block.ops.len() as u64).sum::<u64>();
    round_up_charges(Bytes(ops.saturating_sub(FREE_OPS) * OP_BYTES))
}

/// Returns the part of a device's charges that its Programs cause. It is zero for a GPU: its charges are measured with them.
pub(crate) fn program_charges(device: &DeviceSpec, set: &ProgramSet) -> Bytes {
    if device.kind == DeviceKind::Cuda { Bytes::ZERO } else { program_heap_bytes([set]) }
}

/// The fixed point of Program charges for some devices: their charges without Programs, and the bytes of Programs that are
/// charged so far.
pub(crate) struct ProgramCharges {
    base: Vec<Bytes>,
    program_bytes: Bytes,
}

impl ProgramCharges {
    /// Starts from the present charges of the devices, without Programs.
    pub fn new(devices: &[DeviceSpec]) -> ProgramCharges {
        ProgramCharges { base: devices.iter().map(|device| device.charges).collect(), program_bytes: Bytes::ZERO }
    }

    /// Raises the charges of all devices that compute on a processor to cover `program_bytes`, and returns true. Returns false
    /// if the charges cover them already: then the plan that has these Programs is consistent.
    pub fn raise(&mut self, devices: &mut [DeviceSpec], program_bytes: Bytes) -> bool {
        let on_processor = |device: &DeviceSpec| matches!(device.kind, DeviceKind::Cpu | DeviceKind::Virtual);
        if program_bytes <= self.program_bytes || !devices.iter().any(on_processor) {
            return false;
        }
        self.program_bytes = program_bytes;
        for (device, base) in devices.iter_mut().zip(&self.base).filter(|(device, _)| on_processor(device)) {
            device.charges = *base + program_bytes;
        }
        true
    }
}

/// Plans until the charges cover the Programs of the plan. `plan` returns its result with the bytes of its Programs, or `None`
/// in place of these if the plan does not fit.
///
/// # Errors
/// Those of `plan`.
pub(crate) fn plan_with_program_charges<A>(
    devices: &mut [DeviceSpec],
    mut plan: impl FnMut(&[DeviceSpec]) -> Result<(A, Option<Bytes>), Failure>,
) -> Result<A, Failure> {
    let mut charges = ProgramCharges::new(devices);
    loop {
        let (outcome, program_bytes) = plan(devices)?;
        let raised = program_bytes.is_some_and(|bytes| charges.raise(devices, bytes));
        if !raised {
            return Ok(outcome);
        }
    }
}

/// A plan in which one device does all work, for [`plan_single_device`].
pub(crate) struct SingleDevicePlan<A> {
    /// The result of the plan.
    pub outcome: A,
    /// Name of the device that the plan uses.
    pub device: String,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    /// Bytes of the device's Programs.
    pub program_bytes: Bytes,
}

/// Finds the fastest plan in which one of several devices works alone. Use it if they have no plan together: a team charges
/// each device more, so a device may fit alone that does not fit in the team. `charges_alone` are the charges of each device
/// without a team. `plan` returns a plan on one device, or `None` if it finds none that fits. On success `devices` have the
/// charges that the plan was made with.
///
/// # Errors
/// Those of `plan`.
pub(crate) fn plan_single_device<A>(
    devices: &mut Vec<DeviceSpec>,
    charges_alone: &[Bytes],
    mut plan: impl FnMut(&[DeviceSpec]) -> Result<Option<SingleDevicePlan<A>>, Failure>,
) -> Result<Option<A>, Failure> {
    let mut best: Option<(SingleDevicePlan<A>, Vec<DeviceSpec>)> = None;
    let has_lower_charges =
        |&number: &usize| devices[number].in_process() && charges_alone[number] < devices[number].charges;
    for number in (0..devices.len()).filter(has_lower_charges).collect::<Vec<_>>() {
        let mut candidates = devices.clone();
        candidates[number].charges = charges_alone[number];
        let mut charges = ProgramCharges::new(&candidates[number..=number]);
        while let Some(single) = plan(&candidates)? {
            if single.device != candidates[number].name {
                break;
            }
            if charges.raise(&mut candidates[number..=number], single.program_bytes) {
                continue;
            }
            if best.as_ref().is_none_or(|(least, _)| single.step_seconds < least.step_seconds) {
                best = Some((single, candidates.clone()));
            }
            break;
        }
    }
    Ok(best.map(|(single, planned)| {
        *devices = planned;
        single.outcome
    }))
}
