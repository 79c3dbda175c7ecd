//! Communication groups: collectives and point-to-point sends between the devices of a team.
//!
//! A *collective* (all-reduce, reduce-scatter, all-gather) is called by every rank with pointers to its buffers. No
//! buffer is touched before all ranks have joined, and no rank returns before all have their results. A rank that
//! cannot continue aborts the group instead. Every rank that waits, or calls later, then gets an error and keeps its
//! memory unchanged.
//!
//! A *send* needs its two ranks at different times. The sender posts it and continues; the receiver copies it when it
//! gets there; the sender's wait ends after that copy. Until then the sent bytes are borrowed, possibly across several
//! Programs. A device refuses to overwrite borrowed bytes. It cancels its pending sends before it fails, closes or
//! adopts another plan.
//!
//! This module holds the [`Transport`] trait and the code that all transports share:
//!
//! - `in_process` connects devices of one process,
//! - `wire` connects processes,
//! - `rounds` splits collectives that pass through a staging buffer into rounds of its size.
//!
//! The step from a Program's op to a [`CollectiveCall`] is in `crate::cpu::collectives`; NCCL collectives between GPUs
//! are in `cuda::nccl`.

pub mod in_process;
pub(crate) mod rounds;
pub mod wire;

use crate::error::DeviceError;
use plimsoll_core::DType;
use plimsoll_program::op::{Collective, Exchange};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A way to exchange bytes between the ranks of a communication group.
pub trait Transport: Send + Sync {
    /// Returns the number of ranks.
    fn world_size(&self) -> u32;

    /// Returns the moment from which the planned times of all ranks count. The clocks of simulated devices start then.
    fn epoch(&self) -> Instant;

    /// Returns the largest number of bytes that one call may exchange. The caller splits larger collectives into
    /// rounds, one call each. There is a limit if ranks are in other processes, or if a device stages its bytes on the
    /// host. None if one call may exchange any number of bytes.
    fn round_bytes(&self) -> Option<u64> {
        None
    }

    /// Takes part in a collective. Returns when this rank has its result and no other rank reads its buffers any more.
    ///
    /// All ranks call collectives in the same order. A receiver takes sends in the order in which they were posted.
    /// Returns the planned end in seconds since [`Transport::epoch`]: the latest `ready_seconds` of all ranks plus the
    /// longest `duration_seconds`.
    ///
    /// # Errors
    /// [`DeviceError::PeerAborted`] if a rank has aborted the group, [`DeviceError::PeerUnreachable`] if a rank cannot
    /// be reached. If this happens before all ranks have joined, no output has been written.
    fn exchange(&self, call: CollectiveCall) -> Result<f64, DeviceError>;

    /// Posts a send and returns without waiting. Its receiver may copy the buffers from now on.
    ///
    /// # Errors
    /// [`DeviceError::PeerAborted`] if a rank has aborted the group, [`DeviceError::PeerUnreachable`] if a rank cannot
    /// be reached.
    fn post_send(&self, call: CollectiveCall) -> Result<(), DeviceError>;

    /// Waits until `peer` has copied the send of `rank` with sequence number `number`. Returns the planned end of the
    /// transfer, in seconds since [`Transport::epoch`].
    ///
    /// # Errors
    /// [`DeviceError::PeerAborted`] if a rank has aborted the group, [`DeviceError::PeerUnreachable`] if a rank cannot
    /// be reached. The peer may then still read the buffers.
    fn wait_send(&self, rank: u32, peer: u32, number: u64) -> Result<f64, DeviceError>;

    /// Cancels all sends of a rank that no receiver has copied. Returns when no other rank reads their buffers any
    /// more.
    fn cancel_sends(&self, rank: u32);

    /// Whether some of these bytes, given as an address range, belong to a posted send of `rank` and may still be read
    /// for it. They must not be overwritten.
    fn is_borrowed(&self, rank: u32, bytes: Range<usize>) -> bool;

    /// Aborts the group on behalf of `rank`, which cannot continue. Until [`Transport::reset`], waiting ranks and later
    /// calls fail with an error that names the first rank that aborted.
    fn abort(&self, rank: u32, reason: &str);

    /// Checks whether a rank has aborted the group, for code that waits for other ranks outside the transport.
    ///
    /// # Errors
    /// [`DeviceError::PeerAborted`] if a rank has aborted the group, [`DeviceError::PeerUnreachable`] if a rank cannot
    /// be reached.
    fn check_aborted(&self) -> Result<(), DeviceError>;

    /// Returns the group to its initial state, without aborts and pending sends. No rank may be inside a Program.
    fn reset(&self);
}

/// A device's membership in a communication group.
#[derive(Clone)]
pub struct GroupHandle {
    /// Rank of this device.
    pub rank: u32,
    /// Transport that connects the ranks.
    pub transport: Arc<dyn Transport>,
    /// Whether collectives use NCCL. True only if all ranks are GPUs with the same NCCL version.
    pub nccl: bool,
}

impl fmt::Debug for GroupHandle {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.transport.world_size())
    }
}

impl GroupHandle {
    /// Aborts the group on behalf of this rank.
    pub(crate) fn abort(&self, reason: &str) {
        self.transport.abort(self.rank, reason);
    }

    /// Cancels this rank's sends that no receiver has copied. Afterwards no other rank reads this rank's memory for
    /// them.
    pub(crate) fn cancel_sends(&self) {
        self.transport.cancel_sends(self.rank);
    }

    /// Checks that an address range may be overwritten, because no pending send of this rank needs its bytes.
    ///
    /// # Panics
    /// If a pending send needs some of the bytes: a bug of the caller.
    pub(crate) fn assert_not_borrowed(&self, bytes: Range<usize>) {
        assert!(!self.transport.is_borrowed(self.rank, bytes), "bug: these bytes belong to a pending send");
    }
}

/// Runs `work` of a device that may belong to a communication group. If `work` panics, or fails for a reason other than
/// another rank's failure, the group is aborted. After every failure or panic this rank's pending sends are cancelled.
pub(crate) fn abort_group_on_failure<R>(
    group: Option<&GroupHandle>,
    work: impl FnOnce() -> Result<R, DeviceError>,
) -> Result<R, DeviceError> {
    struct AbortOnPanic<'a>(Option<&'a GroupHandle>);
    impl Drop for AbortOnPanic<'_> {
        fn drop(&mut self) {
            if let (true, Some(group)) = (std::thread::panicking(), self.0) {
                group.abort("it hit a bug");
                group.cancel_sends();
            }
        }
    }
    let _guard = AbortOnPanic(group);
    let result = work();
    if let (Err(error), Some(group)) = (&result, group) {
        if !error.is_peer_failure() {
            group.abort(&error.to_string());
        }
        group.cancel_sends();
    }
    result
}

/// One rank's call of a collective, or its send or receive, with the buffers in its memory.
pub struct CollectiveCall {
    /// Rank of the caller.
    pub rank: u32,
    /// Kind of the collective.
    pub collective: Collective,
    /// Rank at the other end of a send or receive. None for collectives of the whole group.
    pub peer: Option<u32>,
    /// Sequence number of the collective, the same on all its ranks.
    pub number: u64,
    /// Planned time at which this rank is ready, in seconds since [`Transport::epoch`]; zero on devices that are not
    /// simulated.
    pub ready_seconds: f64,
    /// Planned duration of the collective on this rank, in seconds; zero on devices that are not simulated.
    pub duration_seconds: f64,
    buffers: Vec<PieceBuffers>,
}

/// The buffers of one tensor range (piece) of a collective in the memory of one rank. The rank lends them to the
/// transport for the duration of the call.
pub(crate) struct PieceBuffers {
    /// First byte of the input.
    pub input: *const u8,
    /// First byte of the output.
    pub output: *mut u8,
    /// Element type of input and output.
    pub dtype: DType,
    /// Number of elements of each rank's part of the piece, by rank.
    pub counts: Vec<u64>,
}

// SAFETY: the pointers address lent memory, which belongs to no thread. The transport decides when each byte is read
// and written, under the promise of `CollectiveCall::from_buffers`.
unsafe impl Send for PieceBuffers {}
// SAFETY: safe code can read only sizes through a shared reference.
unsafe impl Sync for PieceBuffers {}

impl CollectiveCall {
    /// Creates this rank's call for `exchange` (a collective, a send or a receive of a Program) with sequence number
    /// `number`. The planned times, which only simulated devices use, are zero.
    ///
    /// # Safety
    /// The promises below last until [`Transport::exchange`] returns, or, for a posted send, until
    /// [`Transport::wait_send`] or [`Transport::cancel_sends`] returns:
    ///
    /// - The memory of every piece stays in place.
    /// - Any thread may read the inputs and write the outputs. No other code writes the inputs or touches the outputs.
    /// - Inputs and outputs overlap only if they are the same range of an all-reduce, or if a rank's own part of an
    ///   all-gather is already in place.
    pub(crate) unsafe fn from_buffers(
        group: &GroupHandle,
        exchange: &Exchange,
        number: u64,
        buffers: Vec<PieceBuffers>,
    ) -> CollectiveCall {
        let Exchange { collective, peer, .. } = *exchange;
        let (ready_seconds, duration_seconds) = (0.0, 0.0);
        CollectiveCall { rank: group.rank, collective, peer, number, ready_seconds, duration_seconds, buffers }
    }

    /// Creates an all-gather of one buffer that does not belong to a Program, such as the exchange of NCCL ids. Both
    /// planned times are zero.
    ///
    /// # Safety
    /// The promises of [`CollectiveCall::from_buffers`] hold for the buffer.
    pub(crate) unsafe fn all_gather(group: &GroupHandle, number: u64, buffer: PieceBuffers) -> CollectiveCall {
        let (ready_seconds, duration_seconds) = (0.0, 0.0);
        let GroupHandle { rank, .. } = *group;
        let (collective, buffers) = (Collective::AllGather, vec![buffer]);
        CollectiveCall { rank, collective, peer: None, number, ready_seconds, duration_seconds, buffers }
    }

    /// Splits the call into calls of at most `round_bytes` each (rounds). Each keeps the planned duration of the whole
    /// call, since only the planned end of the last round counts.
    pub(crate) fn split_into_rounds(&self, round_bytes: u64) -> impl Iterator<Item = CollectiveCall> {
        let pieces: Vec<_> = self.buffers.iter().map(|buffer| (buffer.dtype, buffer.counts.clone())).collect();
        let rounds = rounds::split_into_rounds(self.collective, self.rank as usize, &pieces, round_bytes);
        rounds.into_iter().map(|round| {
            let buffers = round.into_iter().map(|slice| self.buffers[slice.piece].slice(slice)).collect();
            CollectiveCall { buffers, ..*self }
        })
    }
}

impl PieceBuffers {
    /// Returns the buffers of a slice of this piece.
    fn slice(&self, slice: rounds::PieceSlice) -> PieceBuffers {
        let byte_offset = |range: &Range<u64>| (range.start * self.dtype.bytes()) as usize;
        PieceBuffers {
            input: self.input.wrapping_add(byte_offset(&slice.reads)),
            output: self.output.wrapping_add(byte_offset(&slice.writes)),
            dtype: self.dtype,
            counts: slice.counts,
        }
    }
}
