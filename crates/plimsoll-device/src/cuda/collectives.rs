//! Collectives of a GPU: by NCCL where all of its team have it (`nccl`). Else its bytes come to the others, and theirs to it,
//! through the pinned slots of staging, a slot a round. While a round is met for, the next is on its way out, and the one
//! before on its way in.
//!
//! A message is shown by its sender where that waits for it to have been taken: a slot cannot be lent any longer. A message
//! whose sender waits in another Program stands in the host's arena instead, and has no part in this.

use super::driver::{Address, Stream};
use super::nccl::Nccl;
use super::staging::{SLOT_BYTES, Staging};
use crate::device::{DeviceError, FileSpace};
use crate::transport::rounds::{Cut, rounds};
use crate::transport::{Meeting, Place, Seat};
use plimsoll_core::DType;
use plimsoll_program::op::{Collective, Exchange};
use std::ops::Range;

/// Bytes of a round at most: what is summed up and scattered has its input in one half of a slot and its output in the other.
pub const ROUND_BYTES: u64 = SLOT_BYTES / 2;

/// Where a piece stands in the memory of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Stands {
    /// The first byte of what it gives.
    pub input: Address,
    /// The first byte of what it gets.
    pub output: Address,
    /// The type of both.
    pub dtype: DType,
}

/// A collective, ready to be taken part in.
pub struct Ready {
    exchange: Exchange,
    number: u64,
    pieces: Vec<Stands>,
}

impl Ready {
    /// A collective of this number, whose pieces stand there.
    pub fn new(exchange: Exchange, number: u64, pieces: Vec<Stands>) -> Ready {
        Ready { exchange, number, pieces }
    }

    /// Takes part in it, in the order of `stream`. What the others gave is on its way to the device when this comes back.
    ///
    /// # Errors
    /// Where this device or another one cannot go on: what it gets may then be there in part.
    ///
    /// # Safety
    /// What pieces touch is free for this in the order of `stream`.
    pub unsafe fn meet(
        &self,
        seat: &Seat,
        nccl: Option<&mut Nccl>,
        stream: &Stream,
        staging: &mut Staging,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        // A message may be shown long before it is taken: it waits in the host's memory.
        if let Some(nccl) = nccl.filter(|_| !self.exchange.is_message()) {
            // SAFETY: as the caller promises.
            if unsafe { nccl.meet(&self.exchange, self.number, &self.pieces, seat, stream) }? {
                return Ok(());
            }
        }
        let forms = self.exchange.pieces.iter().zip(&self.pieces);
        let forms: Vec<_> = forms.map(|(piece, at)| (at.dtype, piece.counts.clone())).collect();
        let round_bytes = seat.transport.round_bytes().map_or(ROUND_BYTES, |bytes| bytes.min(ROUND_BYTES));
        let rounds = rounds(self.exchange.collective, self.exchange.rank as usize, &forms, round_bytes);
        let mut ahead = None;
        for round in rounds.iter().map(Some).chain([None]) {
            // SAFETY: as the caller promises.
            let next = round.map(|round| unsafe { self.give(round, stream, staging, files) }).transpose()?;
            if let Some((slot, round)) = ahead.replace(next.zip(round)).flatten() {
                // SAFETY: the slot was given for this round.
                unsafe { self.take(round, slot, seat, stream, staging) }?;
            }
        }
        Ok(())
    }

    /// Puts what the others need of a round on its way to a slot.
    ///
    /// # Safety
    /// As for [`Ready::meet`].
    unsafe fn give(
        &self,
        round: &[Cut],
        stream: &Stream,
        staging: &mut Staging,
        files: &mut dyn FileSpace,
    ) -> Result<usize, DeviceError> {
        let slot = staging.claim(files)?;
        for cut in round {
            let (piece, place) = (self.pieces[cut.piece], self.place(cut, staging.place(slot)));
            let out = |to: *mut u8, from: Address, range: &Range<u64>| {
                let (first, bytes) =
                    (range.start * piece.dtype.bytes(), (range.end - range.start) * piece.dtype.bytes());
                match bytes {
                    0 => Ok(()),
                    // SAFETY: `place` lies within the slot, which is not touched before its event is over.
                    _ => unsafe { stream.copy_out(to, from + first, bytes) },
                }
            };
            out(place.input.cast_mut(), piece.input, &cut.reads)?;
            if self.exchange.collective == Collective::ReduceScatter {
                // Added to what is there.
                out(place.output, piece.output, &cut.writes)?;
            }
        }
        staging.record(slot, stream)?;
        Ok(slot)
    }

    /// Meets the others for a round, and puts what came of it on its way to the device.
    ///
    /// # Safety
    /// As for [`Ready::meet`]; the slot is that of [`Ready::give`] for this round.
    unsafe fn take(
        &self,
        round: &[Cut],
        slot: usize,
        seat: &Seat,
        stream: &Stream,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        staging.wait(slot)?;
        let places = round.iter().map(|cut| self.place(cut, staging.place(slot))).collect();
        // SAFETY: the slot is this round's until it is claimed again; its event is over, so the device does not touch it
        // before the copies below, and what is shown was taken, or withdrawn, when this comes back. Inputs and outputs are
        // apart but for sums for all, and own parts in their place.
        let meeting = unsafe { Meeting::of(seat, &self.exchange, self.number, places) };
        match (self.exchange.collective, self.exchange.peer) {
            (Collective::Send, Some(peer)) => {
                seat.transport.show(meeting)?;
                seat.transport.taken(seat.rank, peer, self.number).inspect_err(|_| seat.withdraw())?;
            }
            _ => drop(seat.transport.meet(meeting)?),
        }
        for cut in round {
            let (piece, place) = (self.pieces[cut.piece], self.place(cut, staging.place(slot)));
            let (size, elements) = (piece.dtype.bytes(), cut.writes.end - cut.writes.start);
            if elements > 0 {
                // SAFETY: as in `give`.
                unsafe { stream.copy_in(piece.output + cut.writes.start * size, place.output, elements * size) }?;
            }
        }
        Ok(staging.record(slot, stream)?)
    }

    /// Where a part of a round stands in its slot.
    fn place(&self, cut: &Cut, slot: *mut u8) -> Place {
        let Exchange { collective, rank, .. } = self.exchange;
        let dtype = self.pieces[cut.piece].dtype;
        let here = slot.wrapping_add(cut.first_byte as usize);
        let before: u64 = cut.counts[..rank as usize].iter().sum();
        let (input, output) = match collective {
            Collective::AllReduce | Collective::Send | Collective::Receive => (here, here),
            Collective::ReduceScatter => (here, here.wrapping_add(ROUND_BYTES as usize)),
            // Its own part stands in its place.
            Collective::AllGather => (here.wrapping_add((before * dtype.bytes()) as usize), here),
        };
        Place { input, output, dtype, counts: cut.counts.clone() }
    }
}
