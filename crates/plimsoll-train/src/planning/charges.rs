//! What a device of this process is charged with beside its arena: what the process holds anyway, its rows, and its Programs.
//! The plans of a run file (`resolve`) and of a run (`run::prepare`) are charged alike. What a GPU is charged with is measured
//! when it is opened (`run::team::open`); what planners make of charges is not here.

use crate::config::RunFile;
use crate::data::{Loader, Rows};
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure};
use plimsoll_device::process;
use plimsoll_device::transport::wire;
use plimsoll_program::ProgramSet;

/// Heap that a run takes beside its arena and its rows: thread stacks, event lines, growing tables.
/// Measured on runs of many sizes, with room.
const HEAP_BYTES: Bytes = Bytes::mib(5);

/// What every process is charged with at least, rows and Programs left out: more than one holds that trains on tokenised
/// data. So what a run is charged with does not depend on how its start went, and a plan made without its data is held
/// to the same as the run.
const PROCESS_BYTES: Bytes = Bytes::mib(20);

/// How far the resident memory of the same program wavers from start to start: which pages of its
/// file are in memory, and counters that the kernel brings up to date late. Measured: 0.3 MiB.
pub(crate) const WAVER_BYTES: Bytes = Bytes::mib(2);

/// So much more may a process hold than the one that said what would be enough: what is near to be charged with a step less
/// is, where it would not fit otherwise. `HEAP_BYTES` has room for that.
pub(crate) const NEAR_BYTES: Bytes = Bytes::mib(1);

/// Charges are rounded up to a multiple of this.
pub(crate) const ROUNDING_BYTES: Bytes = Bytes::mib(4);

/// Bytes of the process outside the arena, once data and tokenizer are open: what it holds now, the
/// rows of two steps, and heap.
///
/// What the process holds wavers by some hundred KiB from start to start. It is never charged with less than
/// `PROCESS_BYTES`, and rounded up beyond, so that the same run has the same plan, what was planned to fit fits when it
/// is run, and a budget that was named as enough is enough.
pub(crate) fn charges(rows: u64, sequence: u64) -> Bytes {
    charges_less(Bytes::ZERO, rows, sequence)
}

/// The same of a process that holds so much less.
pub(crate) fn charges_less(less: Bytes, rows: u64, sequence: u64) -> Bytes {
    process::give_back();
    let held = process::resident().unwrap_or(Bytes::mib(16)) + HEAP_BYTES;
    rounded(held.saturating_sub(less)).max(PROCESS_BYTES) + Loader::bytes(rows, sequence)
}

/// What a GPU was measured to hold, as it is planned with: rounded up, so that runs that differ by a page have the
/// same plan.
pub(crate) fn rounded(charges: Bytes) -> Bytes {
    Bytes(charges.0.next_multiple_of(ROUNDING_BYTES.0))
}

/// The charges of a device once data and tokenizer are open. Those of a GPU are not the process': see `settle_gpu`; those on
/// another host were measured there.
pub(crate) fn settle_charges(device: &mut DeviceSpec, rows: u64, sequence: u64) {
    if device.in_process() {
        (device.charges, device.charges_measured) = (charges(rows, sequence), true);
    }
}

/// Gives each of several devices of this process a copy of its own rows, and a thread; and where some meet others over wires, all
/// that compute on a processor what is on its way.
pub(crate) fn charge_team(devices: &mut [DeviceSpec], run: &RunFile) {
    let rows = Rows::bytes(run.batch_sequences(), u64::from(run.data.sequence));
    let by_wire = devices.iter().any(|device| device.host().is_some());
    for device in devices {
        if device.in_process() {
            device.charges = rounded(device.charges + rows);
        }
        if by_wire && device.kind != DeviceKind::Cuda {
            device.charges = rounded(device.charges + wire::STAGED_BYTES);
        }
    }
}

/// What the Programs of all devices of a process hold beyond what it is charged with anyway: about so many bytes an op, with
/// the order of its queues and the names of its tensors, as it was measured.
pub(crate) fn programs_bytes<'a>(sets: impl IntoIterator<Item = &'a ProgramSet>) -> Bytes {
    const FREE_OPS: u64 = 4096;
    const OP_BYTES: u64 = 1792;
    let blocks = sets.into_iter().flat_map(|set| &set.programs).flat_map(|program| &program.blocks);
    let ops = blocks.map(|block| block.ops.len() as u64).sum::<u64>();
    rounded(Bytes(ops.saturating_sub(FREE_OPS) * OP_BYTES))
}

/// What the Programs of a plan add to the charges: those of a GPU are measured with them.
pub(crate) fn charged_programs(device: &DeviceSpec, set: &ProgramSet) -> Bytes {
    if device.kind == DeviceKind::Cuda { Bytes::ZERO } else { programs_bytes([set]) }
}

/// Plans with Programs charged: those of thousands of ops are a part of what the process holds. `plan` says what they
/// take where its plan fits; fewer bytes for arenas may mean more ops.
///
/// # Errors
/// Those of `plan`.
pub(crate) fn with_programs<A>(
    devices: &mut [DeviceSpec],
    mut plan: impl FnMut(&[DeviceSpec]) -> Result<(A, Option<Bytes>), Failure>,
) -> Result<A, Failure> {
    let bare: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
    let mut counted = Bytes::ZERO;
    loop {
        let (answer, programs) = plan(devices)?;
        let here = |device: &DeviceSpec| matches!(device.kind, DeviceKind::Cpu | DeviceKind::Virtual);
        match programs.filter(|programs| *programs > counted && devices.iter().any(here)) {
            Some(programs) => counted = programs,
            None => return Ok(answer),
        }
        for (device, bare) in devices.iter_mut().zip(&bare).filter(|(device, _)| here(device)) {
            device.charges = *bare + counted;
        }
    }
}

/// What the fastest of several devices of this process does by itself, where they have no plan together because each was
/// charged with what a team takes: one that works alone has only what the process holds, `alone`. `plan` gives a plan that one
/// device does alone, with its name, the seconds of a step, and what its Programs take. Devices are then as they were planned.
///
/// # Errors
/// Those of `plan`.
pub(crate) fn one_of<A>(
    devices: &mut Vec<DeviceSpec>,
    alone: &[Bytes],
    mut plan: impl FnMut(&[DeviceSpec]) -> Result<Option<(A, String, f64, Bytes)>, Failure>,
) -> Result<Option<A>, Failure> {
    let mut best: Option<(A, f64, Vec<DeviceSpec>)> = None;
    let less = |&number: &usize| devices[number].in_process() && alone[number] < devices[number].charges;
    for number in (0..devices.len()).filter(less).collect::<Vec<_>>() {
        let mut one = devices.clone();
        one[number].charges = alone[number];
        while let Some((answer, name, seconds, programs)) = plan(&one)? {
            if name != one[number].name {
                break;
            }
            if alone[number] + programs > one[number].charges {
                one[number].charges = alone[number] + programs;
                continue;
            }
            if best.as_ref().is_none_or(|(_, least, _)| seconds < *least) {
                best = Some((answer, seconds, one.clone()));
            }
            break;
        }
    }
    Ok(best.map(|(answer, _, planned)| {
        *devices = planned;
        answer
    }))
}
