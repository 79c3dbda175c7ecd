//! Collectives of Programs on devices with memory that this processor can address: from the operands of an op to a call of the
//! group's transport. CUDA devices have their own version, `cuda::collectives`.

use super::ops::Site;
use crate::error::DeviceError;
use crate::transport::rounds::split_into_rounds;
use crate::transport::{CollectiveCall, GroupHandle, PieceBuffers};
use plimsoll_program::Operand;
use plimsoll_program::op::{Collective, Exchange, ExchangeRange};

/// Starts a collective of a Program: posts a send, or runs any other collective to its end. Returns the planned end in
/// seconds since the epoch. If a rank aborts between two rounds (parts of limited size), the output may be partly
/// written. Fails without a group (`None`), as on a single device.
///
/// The caller promises that, until the collective ends, no other code writes the bytes that it touches, or touches the
/// bytes that it writes. `site` is the context of the op.
pub(crate) fn start_collective(
    site: Site,
    group: Option<&GroupHandle>,
    exchange: &Exchange,
    ready_seconds: f64,
    duration_seconds: f64,
) -> Result<f64, DeviceError> {
    let no_group = DeviceError::Unsupported { op: "a collective", device: "a device without a team" };
    let group = group.ok_or(no_group)?;
    // SAFETY: the site borrows the arenas until `exchange` returns. `passes::check` ensures that operands lie in their
    // tensors, which have disjoint bytes, and that no op of the phase writes the bytes of a send before its wait. The
    // host does not write them either (`GroupHandle::assert_not_borrowed`). Devices cancel sends before they free their
    // arenas or fail.
    let call = unsafe { call_of(site, group, exchange, ready_seconds, duration_seconds) };
    let start = |call| match exchange.collective {
        Collective::Send => group.transport.post_send(call).map(|()| ready_seconds),
        _ => group.transport.exchange(call),
    };
    match group.transport.round_bytes() {
        None => start(call),
        Some(bytes) => call.split_into_rounds(bytes).try_fold(ready_seconds, |_, round| start(round)),
    }
}

/// Waits until a send of a Program has been copied by its receiver. Returns the planned end in seconds since the epoch.
/// For other collectives, which [`start_collective`] has completed, and without a group, returns `ready_seconds` at
/// once.
pub(crate) fn wait_collective(
    site: Site,
    group: Option<&GroupHandle>,
    exchange: &Exchange,
    ready_seconds: f64,
) -> Result<f64, DeviceError> {
    let (Some(group), Collective::Send, Some(peer)) = (group, exchange.collective, exchange.peer) else {
        return Ok(ready_seconds);
    };
    let number = exchange.sequence.at(site.variable, site.micro_batch) as u64;
    let send_count = group.transport.round_bytes().map_or(1, |bytes| {
        let shape = |piece: &ExchangeRange| (site.set.tensor(piece.input.tensor).dtype, piece.counts.clone());
        let shapes: Vec<_> = exchange.pieces.iter().map(shape).collect();
        split_into_rounds(exchange.collective, group.rank as usize, &shapes, bytes).len()
    });
    (0..send_count).try_fold(ready_seconds, |end, _| Ok(group.transport.wait_send(group.rank, peer, number)?.max(end)))
}

/// Returns the call that makes the transport execute this rank's part of a collective, with the operands' addresses.
///
/// # Safety
/// The promises of [`CollectiveCall::from_buffers`] hold for the operands of `exchange`.
unsafe fn call_of(
    site: Site,
    group: &GroupHandle,
    exchange: &Exchange,
    ready_seconds: f64,
    duration_seconds: f64,
) -> CollectiveCall {
    let number = exchange.sequence.at(site.variable, site.micro_batch) as u64;
    // SAFETY: the promise of this function.
    let buffers = exchange.pieces.iter().map(|piece| unsafe { buffers_of(site, exchange, piece) }).collect();
    // SAFETY: the promise of this function.
    let mut call = unsafe { CollectiveCall::from_buffers(group, exchange, number, buffers) };
    (call.ready_seconds, call.duration_seconds) = (ready_seconds, duration_seconds);
    call
}

/// Returns the addresses, the element type and the element counts of one piece (tensor range) of a collective.
///
/// # Safety
/// As for [`call_of`].
unsafe fn buffers_of(site: Site, exchange: &Exchange, piece: &ExchangeRange) -> PieceBuffers {
    let (read, written) = exchange.elements(piece);
    let dtype = site.set.tensor(piece.input.tensor).dtype;
    let bytes = |elements: u64| (elements * dtype.bytes()) as usize;
    // SAFETY: the promise of this function.
    let input = unsafe { address_of(site, &piece.input, bytes(read)) };
    // SAFETY: the promise of this function.
    let output = unsafe { address_of(site, &piece.output, bytes(written)) };
    PieceBuffers { input, output, dtype, counts: piece.counts.clone() }
}

/// Returns the address of the operand's first byte, after checking that `bytes` bytes lie in its arena.
///
/// # Safety
/// As for [`call_of`].
unsafe fn address_of(site: Site, operand: &Operand, bytes: usize) -> *mut u8 {
    let tensor = site.set.tensor(operand.tensor);
    let offset = site.placement.first_byte(site.set, operand, site.variable, site.micro_batch);
    // SAFETY: the promise of this function. The slice is dropped at once for its address, which stays valid as long as
    // the arena.
    unsafe { site.spaces.arena(tensor.space).slice_mut::<u8>(offset, bytes).as_mut_ptr() }
}
