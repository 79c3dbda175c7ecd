//! Collectives of a GPU: by NCCL if every device of the team has it (`nccl`), otherwise through the host.
//!
//! Through the host, bytes travel in the pinned slots of staging, one slot per round. Rounds overlap: while the ranks
//! exchange one round, the next is being copied out and the previous one is being copied in.
//!
//! A send that its sender waits for in the same program uses a slot. A send that completes in a later program would
//! occupy the slot for too long. It goes through the host arena instead, and does not come through here.

use super::driver::{Address, Stream};
use super::nccl::Nccl;
use super::pieces::PieceAddresses;
use super::staging::{SLOT_BYTES, Staging};
use crate::device::FileSpace;
use crate::error::{CudaError, DeviceError};
use crate::transport::rounds::{PieceSlice, split_into_rounds};
use crate::transport::{CollectiveCall, GroupHandle, PieceBuffers};
use plimsoll_program::op::{Collective, Exchange};
use std::ops::Range;

/// The most bytes of a collective that one round exchanges through the host. Each round has one slot of staging memory.
/// A reduce-scatter has its input in one half of the slot and its output in the other.
pub const ROUND_BYTES: u64 = SLOT_BYTES / 2;

/// A collective, send or receive with the device addresses of its pieces (the tensor ranges that it communicates).
pub struct PreparedCollective {
    exchange: Exchange,
    sequence: u64,
    pieces: Vec<PieceAddresses>,
}

impl PreparedCollective {
    /// Creates a collective from its op, the sequence number that all ranks use for it, and the addresses of the op's
    /// pieces in the same order.
    pub fn new(exchange: Exchange, sequence: u64, pieces: Vec<PieceAddresses>) -> PreparedCollective {
        PreparedCollective { exchange, sequence, pieces }
    }

    /// Runs the collective after the earlier work of `stream`, by `nccl` if all ranks agree on it. Otherwise, and if
    /// `nccl` is `None`, bytes go through the host. Copies of the result to the device may then be unfinished on
    /// return.
    ///
    /// # Errors
    /// Fails if this rank or another cannot continue; the output may then be partly written.
    ///
    /// # Safety
    /// The memory of the pieces is free for this use in the order of `stream`.
    pub unsafe fn run(
        &self,
        group: &GroupHandle,
        nccl: Option<&mut Nccl>,
        stream: &Stream,
        staging: &mut Staging,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        // A message may be posted long before it is received, so it waits in host memory.
        if let Some(nccl) = nccl.filter(|_| !self.exchange.is_point_to_point()) {
            // SAFETY: as the caller promises.
            if unsafe { nccl.run_collective(&self.exchange, self.sequence, &self.pieces, group, stream) }? {
                return Ok(());
            }
        }
        let piece_shapes = self.exchange.pieces.iter().zip(&self.pieces);
        let piece_shapes: Vec<_> = piece_shapes.map(|(piece, at)| (at.dtype, piece.counts.clone())).collect();
        let round_bytes = group.transport.round_bytes().map_or(ROUND_BYTES, |bytes| bytes.min(ROUND_BYTES));
        let rounds =
            split_into_rounds(self.exchange.collective, self.exchange.rank as usize, &piece_shapes, round_bytes);
        let mut staged = None;
        for round in rounds.iter().map(Some).chain([None]) {
            // SAFETY: as the caller promises.
            let next = round.map(|round| unsafe { self.stage_out(round, stream, staging, files) }).transpose()?;
            if let Some((slot, round)) = staged.replace(next.zip(round)).flatten() {
                // SAFETY: the slot was claimed for this round.
                unsafe { self.exchange_round(round, slot, group, stream, staging) }?;
            }
        }
        Ok(())
    }

    /// Claims a staging slot, and enqueues copies of a round's input from the device into it. Returns the slot's index.
    ///
    /// # Safety
    /// As for [`PreparedCollective::run`].
    unsafe fn stage_out(
        &self,
        round: &[PieceSlice],
        stream: &Stream,
        staging: &mut Staging,
        files: &mut dyn FileSpace,
    ) -> Result<usize, DeviceError> {
        let slot = staging.claim(files)?;
        for cut in round {
            let (piece, place) = (self.pieces[cut.piece], self.slot_buffers(cut, staging.slot_pointer(slot)));
            let size = piece.dtype.bytes();
            // SAFETY: `place` lies within the slot, which is not touched before its event completes.
            unsafe { copy_range_out(stream, piece.input, &cut.reads, size, place.input.cast_mut()) }?;
            if self.exchange.collective.adds_to_output() {
                // The result is added to the previous output.
                // SAFETY: as above.
                unsafe { copy_range_out(stream, piece.output, &cut.writes, size, place.output) }?;
            }
        }
        staging.record(slot, stream)?;
        Ok(slot)
    }

    /// Exchanges the bytes of a round in staging slot `slot` with the other ranks, and enqueues copies of the round's
    /// output to the device.
    ///
    /// # Safety
    /// As for [`PreparedCollective::run`]; the slot comes from [`PreparedCollective::stage_out`] for this round.
    unsafe fn exchange_round(
        &self,
        round: &[PieceSlice],
        slot: usize,
        group: &GroupHandle,
        stream: &Stream,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        staging.wait(slot)?;
        let places = round.iter().map(|cut| self.slot_buffers(cut, staging.slot_pointer(slot))).collect();
        // SAFETY: the slot belongs to this round until it is claimed again. Its event has completed, so the device does
        // not touch it before the copies below. A posted send was received or cancelled on return. Inputs and outputs
        // are disjoint, except for all-reduce and for own parts that are already in place.
        let meeting = unsafe { CollectiveCall::from_buffers(group, &self.exchange, self.sequence, places) };
        match (self.exchange.collective, self.exchange.peer) {
            (Collective::Send, Some(peer)) => {
                group.transport.post_send(meeting)?;
                group.transport.wait_send(group.rank, peer, self.sequence).inspect_err(|_| group.cancel_sends())?;
            }
            _ => drop(group.transport.exchange(meeting)?),
        }
        for cut in round {
            let (piece, place) = (self.pieces[cut.piece], self.slot_buffers(cut, staging.slot_pointer(slot)));
            let (size, elements) = (piece.dtype.bytes(), cut.writes.end - cut.writes.start);
            if elements > 0 {
                // SAFETY: as in `stage_out`.
                unsafe { stream.copy_in(piece.output + cut.writes.start * size, place.output, elements * size) }?;
            }
        }
        Ok(staging.record(slot, stream)?)
    }

    /// Returns the input and output buffers of the slice `cut`, which a round exchanges. They lie in the round's
    /// staging slot, which begins at `slot`.
    fn slot_buffers(&self, cut: &PieceSlice, slot: *mut u8) -> PieceBuffers {
        let Exchange { collective, rank, .. } = self.exchange;
        let dtype = self.pieces[cut.piece].dtype;
        let here = slot.wrapping_add(cut.first_byte as usize);
        let before: u64 = cut.counts[..rank as usize].iter().sum();
        let (input, output) = match (collective.sums(), collective.gathers()) {
            // An all-reduce, a send or a receive works in place.
            (true, true) | (false, false) => (here, here),
            (true, false) => (here, here.wrapping_add(ROUND_BYTES as usize)),
            // The own part is at its place in the output.
            (false, true) => (here.wrapping_add((before * dtype.bytes()) as usize), here),
        };
        PieceBuffers { input, output, dtype, counts: cut.counts.clone() }
    }
}

/// Enqueues a copy of a range of elements, each of `size` bytes, from device memory to the host.
///
/// # Safety
/// The memory at `from` and `to` is free for this use in the order of `stream`.
unsafe fn copy_range_out(
    stream: &Stream,
    from: Address,
    range: &Range<u64>,
    size: u64,
    to: *mut u8,
) -> Result<(), CudaError> {
    match (range.end - range.start) * size {
        0 => Ok(()),
        // SAFETY: as the caller promises.
        bytes => unsafe { stream.copy_out(to, from + range.start * size, bytes) },
    }
}
