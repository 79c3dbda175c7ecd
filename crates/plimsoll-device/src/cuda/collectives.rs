//! Collectives of a GPU: by NCCL if every device of the team has it (`nccl`), otherwise through the host.
//!
//! Through the host, bytes travel in the pinned slots of staging, one slot per round. Rounds overlap: while the ranks
//! exchange one round, the next is being copied out and the previous one is being copied in.
//!
//! A send that its sender waits for in the same program uses a slot. A slot cannot be lent longer than
//! that, so a send that completes in a later program uses the host arena, and does not come through here.

use super::driver::{Address, Stream};
use super::nccl::Nccl;
use super::staging::{SLOT_BYTES, Staging};
use crate::device::{DeviceError, FileSpace};
use crate::transport::rounds::{PieceSlice, split_into_rounds};
use crate::transport::{CollectiveCall, GroupHandle, PieceBuffers};
use plimsoll_core::DType;
use plimsoll_program::op::{Collective, Exchange};
use std::ops::Range;

/// The most bytes per round. A reduce-scatter has its input in one half of a slot and its output in the other.
pub const ROUND_BYTES: u64 = SLOT_BYTES / 2;

/// Addresses of one piece of a collective in device memory.
#[derive(Clone, Copy, Debug)]
pub struct PieceAddresses {
    /// First byte of the input.
    pub input: Address,
    /// First byte of the output.
    pub output: Address,
    /// Data type of both.
    pub dtype: DType,
}

/// A collective resolved to device addresses.
pub struct PreparedCollective {
    exchange: Exchange,
    sequence: u64,
    pieces: Vec<PieceAddresses>,
}

impl PreparedCollective {
    /// Creates a collective with this sequence number.
    pub fn new(exchange: Exchange, sequence: u64, pieces: Vec<PieceAddresses>) -> PreparedCollective {
        PreparedCollective { exchange, sequence, pieces }
    }

    /// Runs the collective in the order of `stream`. On return, copies of the result to the device are enqueued.
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

    /// Claims a slot, and enqueues copies of a round's input into it.
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
            let out = |to: *mut u8, from: Address, range: &Range<u64>| {
                let (first, bytes) =
                    (range.start * piece.dtype.bytes(), (range.end - range.start) * piece.dtype.bytes());
                match bytes {
                    0 => Ok(()),
                    // SAFETY: `place` lies within the slot, which is not touched before its event completes.
                    _ => unsafe { stream.copy_out(to, from + first, bytes) },
                }
            };
            out(place.input.cast_mut(), piece.input, &cut.reads)?;
            if self.exchange.collective == Collective::ReduceScatter {
                // The result is added to the previous output.
                out(place.output, piece.output, &cut.writes)?;
            }
        }
        staging.record(slot, stream)?;
        Ok(slot)
    }

    /// Exchanges a round with the other ranks, and enqueues copies of its output to the device.
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

    /// Returns the buffers of a slice within its slot.
    fn slot_buffers(&self, cut: &PieceSlice, slot: *mut u8) -> PieceBuffers {
        let Exchange { collective, rank, .. } = self.exchange;
        let dtype = self.pieces[cut.piece].dtype;
        let here = slot.wrapping_add(cut.first_byte as usize);
        let before: u64 = cut.counts[..rank as usize].iter().sum();
        let (input, output) = match collective {
            Collective::AllReduce | Collective::Send | Collective::Receive => (here, here),
            Collective::ReduceScatter => (here, here.wrapping_add(ROUND_BYTES as usize)),
            // The own part is at its place in the output.
            Collective::AllGather => (here.wrapping_add((before * dtype.bytes()) as usize), here),
        };
        PieceBuffers { input, output, dtype, counts: cut.counts.clone() }
    }
}
