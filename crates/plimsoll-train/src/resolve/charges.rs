//! Charges of a process: the bytes that a device of this process holds outside its arena, from measurements of the process.
//! Charges of a team and of Programs are added in `planning::charges`. Charges of a GPU are measured when it is opened.

use crate::data::Loader;
use plimsoll_core::{Bytes, DeviceSpec};
use plimsoll_device::process;

/// Bytes that a run takes in addition to its arena, rows and larger Programs: pages of code, thread stacks, lines of
/// the event log, growing tables. `cargo xtask soak --only budget` found 2.4 to 3.7 MiB, and 1.1 MiB are for the first
/// ops of the Programs.
const HEAP_BYTES: Bytes = Bytes::mib(5);

/// Lower bound of the planned charges (bytes outside the arena) of a process; those of data rows and Programs are added.
/// A process that trains on tokenized data holds less. Its planned charges are therefore this bound, both before and
/// after the data are opened. Without rows, Programs and `HEAP_BYTES`, such a process holds about
/// 15 MiB.
pub(super) const PROCESS_BYTES: Bytes = Bytes::mib(24);

/// Difference in resident memory between two starts of the same program, with a margin. It depends on which pages of
/// the binary are in memory, and on kernel counters that are updated late. Measured: 0.3 MiB.
pub(crate) const RESIDENT_VARIATION_BYTES: Bytes = Bytes::mib(2);

/// Bytes by which a plan may exceed a budget. A plan that does not fit is made again with charges (bytes outside the
/// arena) lower by this amount. The margin in `HEAP_BYTES` covers the difference.
pub(crate) const NEAR_FIT_BYTES: Bytes = Bytes::mib(1);

/// Unit of charges (bytes outside the arena): they are rounded up to a multiple of it.
pub(crate) const CHARGE_GRANULARITY: Bytes = Bytes::mib(4);

/// Returns the bytes of this process outside the arena: its present memory, the rows of two steps (each with `rows`
/// sequences of `sequence` tokens), and further heap. Call it once data and tokenizer are open.
///
/// The memory of a process varies by some hundred KiB between starts. The result is therefore rounded up and never
/// below `PROCESS_BYTES`. A run then gets the same plan each time, and a budget that a message named as sufficient
/// suffices.
pub(crate) fn process_charges(rows: u64, sequence: u64) -> Bytes {
    charges_of(process_bytes(), rows, sequence)
}

/// Returns the result that [`process_charges`] would have if this process held `less` bytes fewer.
pub(crate) fn process_charges_minus(less: Bytes, rows: u64, sequence: u64) -> Bytes {
    charges_of(process_bytes().saturating_sub(less), rows, sequence)
}

/// Returns the result that [`process_charges`] would have if this process held `held` bytes.
pub(super) fn charges_of(held: Bytes, rows: u64, sequence: u64) -> Bytes {
    round_up_charges(held + HEAP_BYTES).max(PROCESS_BYTES) + Loader::max_bytes(rows, sequence)
}

/// Returns the memory of this process in bytes, after freed memory has gone back to the system.
pub fn process_bytes() -> Bytes {
    process::trim_heap();
    process::resident().unwrap_or(Bytes::mib(16))
}

/// Rounds charges (bytes outside the arena) up to a multiple of 4 MiB. Runs that differ by a page then get the same
/// plan.
pub(crate) fn round_up_charges(charges: Bytes) -> Bytes {
    Bytes(charges.0.next_multiple_of(CHARGE_GRANULARITY.0))
}

/// Sets the charges (bytes outside the arena) of a CPU or virtual device in this process, once data and tokenizer are
/// open. Other devices stay unchanged: charges of a GPU are measured when it is opened, and those of a remote device in
/// its own process.
pub(crate) fn set_process_charges(device: &mut DeviceSpec, rows: u64, sequence: u64) {
    if device.in_process() {
        (device.charges, device.charges_measured) = (process_charges(rows, sequence), true);
    }
}
