//! Collectives between devices of one process. Ranks read each other's arenas in place; no staging buffer is used.
//!
//! ```text
//!   all-reduce:  all join ─► each rank sums its own part over all ranks ─► all done ─► each copies the other parts ─► all done
//! ```
//! One rank computes each sum, in rank order, and the others copy it. All ranks therefore hold the same bits. A
//! point-to-point send is copied by its receiver, directly out of the sender's arena.
//!
//! Transfers between processes live in `wire`.

use super::{CollectiveCall, PieceBuffers, Transport};
use crate::error::DeviceError;
use plimsoll_core::DType;
use plimsoll_program::op::Collective;
use std::collections::{HashMap, VecDeque};
use std::ops::{Add, Range};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// Number of elements that are summed over all ranks at a time. The sums of such a chunk stay in the L1 cache.
const CHUNK_ELEMENTS: usize = 1024;

/// The communication group of devices in one process.
pub struct InProcessTransport {
    ranks: u32,
    round_bytes: Option<u64>,
    epoch: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    aborted: Option<(u32, String)>,
    /// Number of collectives that each rank has joined since the group was created or reset.
    joined_counts: HashMap<u32, u64>,
    /// Collectives in progress. The key counts the collectives of the group, from 1.
    rendezvous: HashMap<u64, Rendezvous>,
    /// Posted sends, by sender and receiver.
    pending_sends: HashMap<(u32, u32), VecDeque<PendingSend>>,
}

/// A posted send that the receiver has not copied, or that its sender has not yet waited for.
struct PendingSend {
    call: Arc<CollectiveCall>,
    /// Whether the receiver is copying it now.
    is_being_read: bool,
    /// Planned completion time, in seconds since the transport's epoch. None until the receiver has copied the send.
    completed_at: Option<f64>,
}

/// A collective that at least one rank has joined and not all have left.
#[derive(Default)]
struct Rendezvous {
    /// Call of each rank, by rank. None for ranks that have not joined.
    calls: Vec<Option<Arc<CollectiveCall>>>,
    /// Number of ranks that have finished the current stage.
    finished_count: usize,
    /// Index of the current stage, from 0. An all-reduce has two stages, other collectives have one.
    stage: usize,
    /// Number of ranks that are accessing other ranks' memory now.
    working_count: usize,
    /// Whether a rank panicked while it accessed other ranks' memory.
    panicked: bool,
    /// Number of ranks that have left the collective.
    left_count: usize,
}

impl InProcessTransport {
    /// Creates a group of `ranks` devices.
    pub fn new_group(ranks: u32) -> Arc<InProcessTransport> {
        InProcessTransport::new(ranks, None)
    }

    /// Creates a group of `ranks` devices whose collectives run in rounds of at most `round_bytes`. Groups need it if a
    /// device, such as a GPU, stages its bytes on the host.
    pub fn new_group_with_rounds(ranks: u32, round_bytes: u64) -> Arc<InProcessTransport> {
        InProcessTransport::new(ranks, Some(round_bytes))
    }

    fn new(ranks: u32, round_bytes: Option<u64>) -> Arc<InProcessTransport> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(InProcessTransport { ranks, round_bytes, epoch: Instant::now(), state, changed })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while the state is half changed, so a poisoned lock is still consistent.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Joins a collective and waits until all ranks have joined. Returns the joined collective with the calls of all
    /// ranks, in rank order.
    ///
    /// # Errors
    /// [`DeviceError::PeerAborted`] if a rank has aborted the group or joined another collective.
    fn join_collective(&self, call: &Arc<CollectiveCall>) -> Result<JoinedCollective<'_>, DeviceError> {
        let mut state = self.state();
        state.check_aborted()?;
        let count = state.joined_counts.entry(call.rank).or_default();
        *count += 1;
        let key = *count;
        let rendezvous = state.rendezvous.entry(key).or_default();
        rendezvous.calls.resize(self.ranks as usize, None);
        let rank_index = call.rank as usize;
        let other = rendezvous.calls.iter().flatten().find(|other| !same_collective(call, other));
        if let Some(other) = other.cloned() {
            return Err(self.abort_mismatch(state, call, &other));
        }
        rendezvous.calls[rank_index] = Some(call.clone());
        self.changed.notify_all();
        loop {
            let rendezvous = state.rendezvous.get_mut(&key).expect("a joined collective stays until its ranks leave");
            if rendezvous.calls.iter().all(Option::is_some) {
                let all = rendezvous.calls.iter().flatten().cloned().collect();
                return Ok(JoinedCollective { transport: self, key, all, stage: 0 });
            }
            if let Err(aborted) = state.check_aborted() {
                // No rank reads this rank's memory before all have joined, so leaving now is safe.
                let rendezvous =
                    state.rendezvous.get_mut(&key).expect("a joined collective stays until its ranks leave");
                rendezvous.calls[rank_index] = None;
                if rendezvous.calls.iter().all(Option::is_none) {
                    state.rendezvous.remove(&key);
                }
                return Err(aborted);
            }
            state = self.wait(state);
        }
    }
}

impl InProcessTransport {
    /// Aborts the group because two ranks called different collectives. Returns the error for this rank's caller.
    fn abort_mismatch(
        &self,
        mut state: MutexGuard<State>,
        own: &CollectiveCall,
        other: &CollectiveCall,
    ) -> DeviceError {
        let reason = format!("it called collective {} when rank {} called {}", own.number, other.rank, other.number);
        let (rank, reason) = state.aborted.get_or_insert((own.rank, reason)).clone();
        self.changed.notify_all();
        DeviceError::PeerAborted { rank, reason }
    }

    /// Waits until rank `from` has posted its next send, and copies it to the buffers of `own`, this rank's receive
    /// call. Returns the planned time at which the transfer ends, in seconds since [`Transport::epoch`].
    fn receive(&self, own: &CollectiveCall, from: u32) -> Result<f64, DeviceError> {
        let key = (from, own.rank);
        let mut state = self.state();
        let message = loop {
            state.check_aborted()?;
            let next = state.pending_sends.entry(key).or_default().iter_mut().find(|send| send.completed_at.is_none());
            if let Some(next) = next {
                if !same_collective(own, &next.call) {
                    let other = next.call.clone();
                    return Err(self.abort_mismatch(state, own, &other));
                }
                next.is_being_read = true;
                break next.call.clone();
            }
            state = self.wait(state);
        };
        drop(state);
        // SAFETY: the send is posted and marked as being read, so its buffers stay valid; see `copy_send`.
        unsafe { copy_send(own, &message) };
        let end = own.ready_seconds.max(message.ready_seconds) + own.duration_seconds.max(message.duration_seconds);
        let mut state = self.state();
        let list = state.pending_sends.entry(key).or_default();
        let send = list.iter_mut().find(|send| Arc::ptr_eq(&send.call, &message));
        let send = send.expect("a send that is being read is not cancelled");
        (send.is_being_read, send.completed_at) = (false, Some(end));
        self.changed.notify_all();
        Ok(end)
    }
}

impl State {
    /// Returns an error if a rank has aborted the group.
    fn check_aborted(&self) -> Result<(), DeviceError> {
        match &self.aborted {
            Some((rank, reason)) => Err(DeviceError::PeerAborted { rank: *rank, reason: reason.clone() }),
            None => Ok(()),
        }
    }
}

/// Whether the calls of two ranks belong to the same collective and have the same sizes. A send and a receive match if
/// their sequence numbers and bytes are equal.
fn same_collective(a: &CollectiveCall, b: &CollectiveCall) -> bool {
    let messages = |m: &CollectiveCall| m.collective.is_point_to_point();
    let counts = |m: &CollectiveCall| -> Vec<(DType, Vec<u64>)> {
        m.buffers.iter().map(|buffer| (buffer.dtype, buffer.counts.clone())).collect()
    };
    let sizes = |m: &CollectiveCall| -> Vec<u64> {
        m.buffers.iter().map(|buffer| buffer.counts[m.rank as usize] * buffer.dtype.bytes()).collect()
    };
    match messages(a) && messages(b) {
        true => a.number == b.number && sizes(a) == sizes(b),
        false => (a.number, a.collective) == (b.number, b.collective) && counts(a) == counts(b),
    }
}

/// A collective that all ranks have joined. It now runs to its end even if a rank aborts, because only bytes that are
/// already present are moved.
struct JoinedCollective<'a> {
    transport: &'a InProcessTransport,
    key: u64,
    all: Vec<Arc<CollectiveCall>>,
    stage: usize,
}

impl JoinedCollective<'_> {
    fn rendezvous<'s>(&self, state: &'s mut MutexGuard<'_, State>) -> &'s mut Rendezvous {
        state.rendezvous.get_mut(&self.key).expect("a joined collective stays until its ranks leave")
    }

    /// Runs this rank's `work` of one stage, which gets the calls of all ranks. Then waits until every rank has
    /// finished the stage.
    ///
    /// # Errors
    /// [`DeviceError::PeerAborted`] if a rank panicked.
    fn stage(&mut self, work: impl FnOnce(&[Arc<CollectiveCall>])) -> Result<(), DeviceError> {
        {
            let mut state = self.transport.state();
            let rendezvous = self.rendezvous(&mut state);
            if rendezvous.panicked {
                return self.break_up(state);
            }
            rendezvous.working_count += 1;
        }
        let guard = StageGuard(self);
        work(&self.all);
        drop(guard);
        let mut state = self.transport.state();
        self.stage += 1;
        loop {
            let rendezvous = self.rendezvous(&mut state);
            if rendezvous.panicked {
                return self.break_up(state);
            }
            if rendezvous.stage >= self.stage {
                return Ok(());
            }
            state = self.transport.wait(state);
        }
    }

    /// Waits until no rank accesses another rank's memory any more, in a collective in which a rank panicked. Always
    /// returns an error.
    fn break_up(&self, mut state: MutexGuard<'_, State>) -> Result<(), DeviceError> {
        while self.rendezvous(&mut state).working_count > 0 {
            state = self.transport.wait(state);
        }
        let reason = "a device of the group hit a bug during the transfer".into();
        Err(DeviceError::PeerAborted { rank: self.all[0].rank, reason })
    }
}

impl Drop for JoinedCollective<'_> {
    fn drop(&mut self) {
        let mut state = self.transport.state();
        let calls = self.all.len();
        let rendezvous = self.rendezvous(&mut state);
        rendezvous.left_count += 1;
        if rendezvous.left_count == calls {
            state.rendezvous.remove(&self.key);
        }
    }
}

/// A guard that exists while a rank accesses other ranks' memory in one stage. When dropped, it marks the stage as
/// finished by this rank. If the rank panics, the guard marks the collective as panicked and waits until no rank reads
/// this rank's memory.
struct StageGuard<'a, 's>(&'a JoinedCollective<'s>);

impl Drop for StageGuard<'_, '_> {
    fn drop(&mut self) {
        let JoinedCollective { transport, all, .. } = self.0;
        let mut state = transport.state();
        let rendezvous = self.0.rendezvous(&mut state);
        rendezvous.working_count -= 1;
        rendezvous.finished_count += 1;
        if rendezvous.finished_count == all.len() {
            (rendezvous.finished_count, rendezvous.stage) = (0, rendezvous.stage + 1);
        }
        rendezvous.panicked |= std::thread::panicking();
        transport.changed.notify_all();
        if std::thread::panicking() {
            while self.0.rendezvous(&mut state).working_count > 0 {
                state = transport.wait(state);
            }
        }
    }
}

impl Transport for InProcessTransport {
    fn world_size(&self) -> u32 {
        self.ranks
    }

    fn epoch(&self) -> Instant {
        self.epoch
    }

    fn round_bytes(&self) -> Option<u64> {
        self.round_bytes
    }

    fn exchange(&self, call: CollectiveCall) -> Result<f64, DeviceError> {
        if let (Collective::Receive, Some(from)) = (call.collective, call.peer) {
            return self.receive(&call, from);
        }
        let call = Arc::new(call);
        let mut joined = self.join_collective(&call)?;
        let (sums, gathers) = (call.collective.sums(), call.collective.gathers());
        assert!(sums || gathers, "bug: a send has a peer and is posted by its sender");
        if sums {
            // SAFETY: all ranks have joined, and each writes only its own memory in this stage. The stage boundary
            // separates the sums of `reduce_own_part` from the copies of `copy_reduced_parts`.
            joined.stage(|all| unsafe { reduce_own_part(&call, all) })?;
        }
        if sums && gathers {
            // SAFETY: all ranks have joined, and each writes only its own memory in this stage.
            joined.stage(|all| unsafe { copy_reduced_parts(&call, all) })?;
        } else if gathers {
            // SAFETY: all ranks have joined, and each writes only its own memory in this stage.
            joined.stage(|all| unsafe { all_gather_parts(&call, all) })?;
        }
        let ready = joined.all.iter().map(|other| other.ready_seconds).fold(0.0, f64::max);
        let seconds = joined.all.iter().map(|other| other.duration_seconds).fold(0.0, f64::max);
        Ok(ready + seconds)
    }

    fn post_send(&self, message: CollectiveCall) -> Result<(), DeviceError> {
        let mut state = self.state();
        state.check_aborted()?;
        let to = message.peer.expect("a send has a receiver");
        let send = PendingSend { is_being_read: false, completed_at: None, call: Arc::new(message) };
        state.pending_sends.entry((send.call.rank, to)).or_default().push_back(send);
        self.changed.notify_all();
        Ok(())
    }

    fn wait_send(&self, rank: u32, peer: u32, number: u64) -> Result<f64, DeviceError> {
        let mut state = self.state();
        loop {
            let list = state.pending_sends.entry((rank, peer)).or_default();
            let at = list.iter().position(|send| send.call.number == number);
            let completed_at = at.and_then(|at| list[at].completed_at);
            if let (Some(at), Some(end)) = (at, completed_at) {
                list.remove(at);
                return Ok(end);
            }
            state.check_aborted()?;
            assert!(at.is_some(), "bug: send {number} to rank {peer} has not been posted");
            state = self.wait(state);
        }
    }

    fn cancel_sends(&self, rank: u32) {
        let mut state = self.state();
        let is_read = |list: &VecDeque<PendingSend>| list.iter().any(|send| send.is_being_read);
        while state.pending_sends.iter().any(|((from, _), list)| *from == rank && is_read(list)) {
            state = self.wait(state);
        }
        state.pending_sends.retain(|(from, _), _| *from != rank);
    }

    fn is_borrowed(&self, rank: u32, bytes: Range<usize>) -> bool {
        let state = self.state();
        let lists = state.pending_sends.iter().filter(|((from, _), _)| *from == rank);
        let mut buffers =
            lists.flat_map(|(_, list)| list.iter().filter(|send| send.completed_at.is_none())).flat_map(|send| {
                let size = |buffer: &PieceBuffers| (buffer.counts[rank as usize] * buffer.dtype.bytes()) as usize;
                send.call.buffers.iter().map(move |buffer| (buffer.input as usize, size(buffer)))
            });
        buffers.any(|(first, size)| first < bytes.end && bytes.start < first + size)
    }

    fn abort(&self, rank: u32, reason: &str) {
        let mut state = self.state();
        state.aborted.get_or_insert_with(|| (rank, reason.to_owned()));
        self.changed.notify_all();
    }

    fn check_aborted(&self) -> Result<(), DeviceError> {
        self.state().check_aborted()
    }

    fn reset(&self) {
        let mut state = self.state();
        assert!(state.rendezvous.is_empty(), "bug: a rank is still in a collective");
        let is_being_read = state.pending_sends.values().flatten().any(|send| send.is_being_read);
        assert!(!is_being_read, "bug: a rank is still reading a send");
        *state = State::default();
    }
}

/// Returns the element range of a rank's part within a piece (one tensor range of a collective). `counts` holds the
/// number of elements of each rank's part.
fn part_elements(counts: &[u64], rank: usize) -> Range<usize> {
    let first: u64 = counts[..rank].iter().sum();
    first as usize..(first + counts[rank]) as usize
}

/// Sums this rank's own part of every piece (tensor range) over all ranks, in rank order. The sum is added to this
/// rank's output, or overwrites it, as the collective says.
///
/// This function and the ones below access the memory of all ranks. They are sound because:
/// - Every rank lends its buffers until `exchange` returns (the promise of `CollectiveCall::from_buffers`). It returns
///   after all ranks have ended the last stage, or after no rank accesses its memory if one panics. The lock between
///   two stages orders earlier writes before later reads.
/// - All ranks use the same parts (`same_collective`), and parts do not overlap. In each stage a rank writes only its
///   own memory. For a sum that is first its own part, which no other rank touches in that stage, and then the others'
///   parts, while its own part is read. Gathered and sent bytes are written where no rank reads, and read where no rank
///   writes.
/// - The buffers of a posted send stay valid until its sender returns from `wait_send` or `cancel_sends`, which wait
///   while the send is being read.
///
/// # Safety
/// Call it in the first stage of a collective in which all ranks do so.
unsafe fn reduce_own_part(own: &CollectiveCall, all: &[Arc<CollectiveCall>]) {
    let adds = own.collective.adds_to_output();
    for (index, buffer) in own.buffers.iter().enumerate() {
        let range = part_elements(&buffer.counts, own.rank as usize);
        let (size, first) = (buffer.dtype.bytes() as usize, if adds { 0 } else { range.start });
        // SAFETY: the part lies within every rank's piece; see above for the access rules.
        unsafe {
            let inputs: Vec<_> = all.iter().map(|rank| rank.buffers[index].input.add(range.start * size)).collect();
            sum_elements(buffer.dtype, &inputs, buffer.output.add(first * size), range.len(), adds);
        }
    }
}

/// Sums `inputs` element by element, in their order. The sums are added to `into` if `adds` is true, and overwrite it
/// otherwise.
///
/// # Safety
/// Every pointer addresses `elements` elements, which no other thread writes meanwhile. `into` is aligned, and overlaps
/// an input only if it is that input.
pub(super) unsafe fn sum_elements(dtype: DType, inputs: &[*const u8], into: *mut u8, elements: usize, adds: bool) {
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            DType::F32 => sum::<f32>(inputs, into.cast(), elements, adds),
            DType::F64 => sum::<f64>(inputs, into.cast(), elements, adds),
            other => unreachable!("sums exist for f32 and f64, not for {other}"),
        }
    }
}

/// Implements [`sum_elements`] for one element type.
///
/// # Safety
/// The promises of [`sum_elements`] hold.
unsafe fn sum<T: Copy + Default + Add<Output = T>>(inputs: &[*const u8], into: *mut T, elements: usize, adds: bool) {
    let mut chunk = [T::default(); CHUNK_ELEMENTS];
    for first in (0..elements).step_by(CHUNK_ELEMENTS) {
        let chunk = &mut chunk[..CHUNK_ELEMENTS.min(elements - first)];
        for (number, input) in inputs.iter().enumerate() {
            // SAFETY: in bounds. Bytes from another process may be unaligned in their frame.
            let at = |i: usize| unsafe { input.cast::<T>().add(first + i).read_unaligned() };
            match number {
                0 => chunk.iter_mut().enumerate().for_each(|(i, sum)| *sum = at(i)),
                _ => chunk.iter_mut().enumerate().for_each(|(i, sum)| *sum = *sum + at(i)),
            }
        }
        // SAFETY: in bounds, and no other thread touches these elements.
        let into = unsafe { std::slice::from_raw_parts_mut(into.add(first), chunk.len()) };
        match adds {
            true => into.iter_mut().zip(chunk).for_each(|(into, sum)| *into = *into + *sum),
            false => into.copy_from_slice(chunk),
        }
    }
}

/// Copies the parts that other ranks have summed into this rank's output.
///
/// # Safety
/// Call it in the stage after `reduce_own_part`, in which all ranks do so.
unsafe fn copy_reduced_parts(own: &CollectiveCall, all: &[Arc<CollectiveCall>]) {
    for (index, buffer) in own.buffers.iter().enumerate() {
        for other in all.iter().filter(|other| other.rank != own.rank) {
            let (range, size) = (part_elements(&buffer.counts, other.rank as usize), buffer.dtype.bytes() as usize);
            // SAFETY: within both pieces, which belong to different ranks; see `reduce_own_part` for the access rules.
            unsafe {
                let from = other.buffers[index].output.add(range.start * size);
                from.copy_to_nonoverlapping(buffer.output.add(range.start * size), range.len() * size);
            }
        }
    }
}

/// Copies the parts of all ranks into this rank's output of an all-gather. This rank's own part may already be in
/// place.
///
/// # Safety
/// Call it in the only stage of an all-gather, in which all ranks do so.
unsafe fn all_gather_parts(own: &CollectiveCall, all: &[Arc<CollectiveCall>]) {
    for (index, buffer) in own.buffers.iter().enumerate() {
        for rank in all {
            let (range, size) = (part_elements(&buffer.counts, rank.rank as usize), buffer.dtype.bytes() as usize);
            // SAFETY: within both pieces; only this rank touches the target, and no rank writes the source.
            unsafe {
                let (from, to) = (rank.buffers[index].input, buffer.output.add(range.start * size));
                if from != to.cast_const() {
                    from.copy_to_nonoverlapping(to, range.len() * size);
                }
            }
        }
    }
}

/// Copies the buffers of a posted send (`message`) into the buffers of this rank's receive call (`own`).
///
/// # Safety
/// The send is marked as being read.
unsafe fn copy_send(own: &CollectiveCall, message: &CollectiveCall) {
    for (from, to) in message.buffers.iter().zip(&own.buffers) {
        let bytes = to.counts[own.rank as usize] * to.dtype.bytes();
        // SAFETY: both ends have the same number of bytes (`same_collective`), and they belong to different ranks.
        unsafe { from.input.copy_to_nonoverlapping(to.output, bytes as usize) }
    }
}
