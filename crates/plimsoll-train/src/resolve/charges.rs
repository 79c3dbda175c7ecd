//! Charges of a process: the bytes that a device of this process holds outside its arena, from measurements of the process.
//! Charges of a team and of Programs are added in `planning::charges`. Charges of a GPU are measured when it is opened.

use crate::data::Loader;
use plimsoll_core::{Bytes, DeviceSpec};
use plimsoll_device::process;

/// Heap that a run takes in addition to its arena and rows: thread stacks, event lines, growing tables. Measured on runs of
/// many sizes, with a margin.
const HEAP_BYTES: Bytes = Bytes::mib(5);

/// Lower bound of the charges of a process, without rows and Programs. It exceeds what a process holds that trains on
/// tokenized data. So a plan made without data has the same charges as the run, whatever happened while the run started.
const PROCESS_BYTES: Bytes = Bytes::mib(20);

/// Variation of the resident memory of one program between starts, with a margin. It depends on which pages of the binary are
/// in memory and on kernel counters that are updated late. Measured: 0.3 MiB.
pub(crate) const RESIDENT_VARIATION_BYTES: Bytes = Bytes::mib(2);

/// Excess over a named budget that is tolerated: if a plan does not fit, it is tried with charges lower by this amount.
/// `HEAP_BYTES` has room for it.
pub(crate) const NEAR_FIT_BYTES: Bytes = Bytes::mib(1);

/// Multiple that charges are rounded up to.
pub(crate) const CHARGE_GRANULARITY: Bytes = Bytes::mib(4);

/// Returns the bytes of this process outside the arena: what it holds now, the rows of two steps (`rows` sequences each of
/// `sequence` tokens), and heap. Call it once data and tokenizer are open.
///
/// What a process holds varies by some hundred KiB between starts. The result is rounded up and never below
/// `PROCESS_BYTES`, so that a run gets the same plan each time and a budget that was named as sufficient is sufficient.
pub(crate) fn process_charges(rows: u64, sequence: u64) -> Bytes {
    process_charges_minus(Bytes::ZERO, rows, sequence)
}

/// Returns the [`process_charges`] of a process that holds fewer bytes by `less`.
pub(crate) fn process_charges_minus(less: Bytes, rows: u64, sequence: u64) -> Bytes {
    process::trim_heap();
    let held = process::resident().unwrap_or(Bytes::mib(16)) + HEAP_BYTES;
    round_up_charges(held.saturating_sub(less)).max(PROCESS_BYTES) + Loader::max_bytes(rows, sequence)
}

/// Rounds measured charges up, so that runs that differ by a page have the same plan.
pub(crate) fn round_up_charges(charges: Bytes) -> Bytes {
    Bytes(charges.0.next_multiple_of(CHARGE_GRANULARITY.0))
}

/// Sets the charges of a device in this process, once data and tokenizer are open. Charges of a GPU are measured when it is
/// opened, those of a remote device in its own process.
pub(crate) fn set_process_charges(device: &mut DeviceSpec, rows: u64, sequence: u64) {
    if device.in_process() {
        (device.charges, device.charges_measured) = (process_charges(rows, sequence), true);
    }
}
