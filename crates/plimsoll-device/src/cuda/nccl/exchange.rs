//! A collective as messages of NCCL: chunk by chunk through the staging buffer, with sums by a kernel of this crate.

use super::chunks::{Chunk, chunk_batches};
use super::communicator::Communicator;
use crate::cuda::driver::{Address, Stream};
use crate::cuda::kernels::launch::{RankParts, sum_ranks};
use crate::cuda::pieces::PieceAddresses;
use crate::error::{CudaError, DeviceError};
use crate::transport::GroupHandle;
use plimsoll_program::op::Exchange;

/// Runs a collective by NCCL in the order of `stream`, and waits for its end.
///
/// # Errors
/// Fails if this rank or another cannot continue. The output may then be partly written, and the communicator must be
/// closed.
///
/// # Panics
/// Panics for a point-to-point message.
///
/// # Safety
/// The memory of the pieces is free for this use in the order of `stream`.
pub unsafe fn run_exchange(
    communicator: &mut Communicator,
    exchange: &Exchange,
    pieces: &[PieceAddresses],
    group: &GroupHandle,
    stream: &Stream,
) -> Result<(), DeviceError> {
    let collective = exchange.collective;
    assert!(!collective.is_point_to_point(), "bug: messages go through staging");
    let counts = exchange.pieces.iter().map(|piece| &piece.counts[..]);
    let piece_shapes: Vec<_> = pieces.iter().zip(counts).map(|(at, counts)| (at.dtype, counts)).collect();
    let run = RunningExchange { communicator, exchange, pieces, group, stream };
    for batch in chunk_batches(communicator.ranks as usize, &piece_shapes, communicator.staging_bytes) {
        if collective.sums() {
            // SAFETY: as the caller promises.
            unsafe { run.reduce(&batch) }?;
        }
        if collective.gathers() {
            // SAFETY: as the caller promises.
            unsafe { run.gather(&batch) }?;
        }
        // Streams have bounded capacity: enqueue no more before the other ranks have done their part.
        communicator.wait_for_stream(group, stream, None)?;
    }
    Ok(())
}

/// A collective in progress.
///
/// Its copies, messages and kernels touch only the staging buffer and the pieces. The caller of [`run_exchange`]
/// promises that the pieces are free. In the staging buffer each chunk has its own slots, and each batch completes
/// before the next begins.
struct RunningExchange<'a> {
    communicator: &'a Communicator,
    exchange: &'a Exchange,
    pieces: &'a [PieceAddresses],
    group: &'a GroupHandle,
    stream: &'a Stream,
}

impl RunningExchange<'_> {
    /// Returns address and size in bytes of the elements that a chunk has in the part of rank `rank`. `whole` is the
    /// address of the chunk's piece, which holds the parts of all ranks.
    fn part(&self, chunk: &Chunk, whole: Address, rank: u32) -> (Address, u64) {
        let (size, counts) = (self.pieces[chunk.piece].dtype.bytes(), &self.exchange.pieces[chunk.piece].counts);
        let before: u64 = counts[..rank as usize].iter().sum();
        let range = chunk.range_within(counts[rank as usize]);
        (whole + (before + range.start) * size, (range.end - range.start) * size)
    }

    /// Returns the size in bytes of the elements that a chunk has in the part of rank `rank`.
    fn part_bytes(&self, chunk: &Chunk, rank: u32) -> u64 {
        self.part(chunk, 0, rank).1
    }

    /// Returns the address of a chunk's slot in the staging buffer. The slot is for bytes from rank `peer` if
    /// `incoming`, else for bytes to it.
    fn slot(&self, chunk: &Chunk, peer: u32, incoming: bool) -> Address {
        self.communicator.slot(chunk.staging_offset, chunk.stride, peer, incoming)
    }

    /// Returns every pair of a chunk of the batch and a rank other than this one.
    fn chunk_peers<'b>(&self, batch: &'b [Chunk]) -> Vec<(&'b Chunk, u32)> {
        batch.iter().flat_map(|chunk| self.communicator.peers().map(move |peer| (chunk, peer))).collect()
    }

    /// Returns the lowest rank other than this one.
    fn first_peer(&self) -> u32 {
        self.communicator.peers().next().expect("a team has other ranks")
    }

    /// Enqueues a copy of `bytes` bytes on the device, which may be 0.
    ///
    /// # Safety
    /// As for [`Stream::copy`].
    unsafe fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError> {
        match bytes {
            0 => Ok(()),
            // SAFETY: as the caller promises.
            _ => unsafe { self.stream.copy(to, from, bytes) },
        }
    }

    /// Enqueues the summing half of a collective, for one batch. It sends each other rank its part of this rank's
    /// inputs, and sums the received parts into this rank's part of the outputs.
    ///
    /// # Safety
    /// As for [`run_exchange`].
    unsafe fn reduce(&self, batch: &[Chunk]) -> Result<(), DeviceError> {
        let (communicator, stream, rank) = (self.communicator, self.stream, self.communicator.rank);
        let chunk_peers = self.chunk_peers(batch);
        for &(chunk, peer) in &chunk_peers {
            let (from, bytes) = self.part(chunk, self.pieces[chunk.piece].input, peer);
            // SAFETY: see `RunningExchange`.
            unsafe { self.copy(self.slot(chunk, peer, false), from, bytes) }?;
        }
        communicator.run_grouped(self.group, || {
            for &(chunk, peer) in &chunk_peers {
                let (outgoing, incoming) = (self.slot(chunk, peer, false), self.slot(chunk, peer, true));
                // SAFETY: see `RunningExchange`.
                unsafe { communicator.send(outgoing, self.part_bytes(chunk, peer), peer, stream) }?;
                // SAFETY: see `RunningExchange`.
                unsafe { communicator.receive(incoming, self.part_bytes(chunk, rank), peer, stream) }?;
            }
            Ok(())
        })?;
        for chunk in batch {
            // SAFETY: see `RunningExchange`.
            unsafe { self.sum_chunk(chunk) }?;
        }
        Ok(())
    }

    /// Enqueues the sum of a chunk: adds what all ranks contribute to this rank's part, in rank order.
    ///
    /// # Safety
    /// As for [`run_exchange`].
    unsafe fn sum_chunk(&self, chunk: &Chunk) -> Result<(), DeviceError> {
        let Communicator { rank, ranks, .. } = *self.communicator;
        let collective = self.exchange.collective;
        let PieceAddresses { input, output, dtype } = self.pieces[chunk.piece];
        let (own, bytes) = self.part(chunk, input, rank);
        // A scattered output only holds this rank's part.
        let scattered = output + chunk.elements.start * dtype.bytes();
        let into = if collective.gathers() { self.part(chunk, output, rank).0 } else { scattered };
        let (others, stride) = (self.slot(chunk, self.first_peer(), true), chunk.stride / dtype.bytes());
        let parts = RankParts { own, others, stride, rank, ranks };
        let launches = sum_ranks(dtype, parts, into, bytes / dtype.bytes(), collective.adds_to_output());
        let launches = launches.unwrap_or_else(|| unreachable!("sums are not taken in {dtype}"));
        for launch in launches.iter().filter(|_| bytes > 0) {
            // SAFETY: see `RunningExchange`.
            unsafe { self.communicator.launch(launch, self.stream) }?;
        }
        Ok(())
    }

    /// Enqueues the gathering half of a collective, for one batch. It sends this rank's parts to all ranks, and
    /// receives theirs into the outputs.
    ///
    /// # Safety
    /// As for [`run_exchange`].
    unsafe fn gather(&self, batch: &[Chunk]) -> Result<(), DeviceError> {
        let (communicator, stream, rank) = (self.communicator, self.stream, self.communicator.rank);
        let (chunk_peers, first) = (self.chunk_peers(batch), self.first_peer());
        for chunk in batch {
            let PieceAddresses { input, output, dtype } = self.pieces[chunk.piece];
            let (own, bytes) = self.part(chunk, output, rank);
            // A summed part is already in place; a part that is only gathered may have to be copied there.
            let summed = self.exchange.collective.sums();
            let from = if summed { own } else { input + chunk.elements.start * dtype.bytes() };
            if from != own {
                // SAFETY: see `RunningExchange`.
                unsafe { self.copy(own, from, bytes) }?;
            }
            // SAFETY: see `RunningExchange`.
            unsafe { self.copy(self.slot(chunk, first, false), own, bytes) }?;
        }
        communicator.run_grouped(self.group, || {
            for &(chunk, peer) in &chunk_peers {
                let (outgoing, incoming) = (self.slot(chunk, first, false), self.slot(chunk, peer, true));
                // SAFETY: see `RunningExchange`; all peers receive the contents of one slot.
                unsafe { communicator.send(outgoing, self.part_bytes(chunk, rank), peer, stream) }?;
                // SAFETY: see `RunningExchange`.
                unsafe { communicator.receive(incoming, self.part_bytes(chunk, peer), peer, stream) }?;
            }
            Ok(())
        })?;
        for &(chunk, peer) in &chunk_peers {
            let (to, bytes) = self.part(chunk, self.pieces[chunk.piece].output, peer);
            // SAFETY: see `RunningExchange`.
            unsafe { self.copy(to, self.slot(chunk, peer, true), bytes) }?;
        }
        Ok(())
    }
}
