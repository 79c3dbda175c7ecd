//! Collectives between processes. Each rank has its own memory, and a [`Wire`] to every other rank that carries bytes
//! in order.
//!
//! ```text
//!   all-reduce:  each rank sends its peers their parts ─► each sums its own part, in rank order ─► sends the sum to all
//! ```
//! All sent bytes are copied first, so no rank accesses another rank's memory, and a rank can leave at any time. A rank
//! looks at the frames of a collective only after those of all ranks have arrived. The rank that owns a part sums it in
//! rank order, which gives the same bits as `in_process`. Each byte of a sum is sent once and received once, for any
//! number of ranks.
//!
//! Every wire has a thread that writes and one that reads; neither ever waits for the device. Aborts are therefore
//! noticed while a rank waits, and a closed wire wakes all waiting ranks. Bytes in flight are bounded by
//! [`MAX_IN_FLIGHT_BYTES`]: collectives run in rounds, no round ends before the frames of all ranks have arrived, and
//! sends need credits.
//!
//! If a wire fails after all ranks have joined an all-reduce, its output may be partly written.

use self::frame::{
    Frame, FrameHeader, FrameKind, HEADER_BYTES, MAX_SIGNATURE_BYTES, append, join_payload, part_bytes, signature,
};
use super::in_process::sum_elements;
use super::{CollectiveCall, Transport};
use crate::error::DeviceError;
use plimsoll_core::Bytes;
use plimsoll_program::op::Collective;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

mod frame;

#[cfg(test)]
mod tests;

/// Most bytes that one round of a collective between processes exchanges. Larger collectives are split into rounds.
pub const ROUND_BYTES: u64 = 1 << 20;
/// Number of sends to a peer, each of at most a round's size, that may be transferred before the peer takes the first.
const MAX_SENDS_AHEAD: u32 = 2;

/// The most bytes that a rank holds outside its arenas for frames in flight, with rounds of [`ROUND_BYTES`] and sends
/// from two neighbours: two outgoing rounds, three incoming ones, and `MAX_SENDS_AHEAD` sends per neighbour and
/// direction.
pub const MAX_IN_FLIGHT_BYTES: Bytes = Bytes((2 + 3 + 4 * MAX_SENDS_AHEAD as u64) * ROUND_BYTES);

/// A connection between two ranks that carries bytes in both directions, complete and in order. Each `receive` asks for
/// as many bytes as the matching `send` at the other end gave. A message queue can therefore implement the trait as
/// well as a stream.
pub trait Wire: Send + Sync {
    /// Sends all bytes. May block until the other end receives.
    ///
    /// # Errors
    /// The other end is unreachable, or this end is closed.
    fn send(&self, bytes: &[u8]) -> io::Result<()>;

    /// Waits until `into` is filled with the next bytes.
    ///
    /// # Errors
    /// The other end is unreachable, or this end is closed.
    fn receive(&self, into: &mut [u8]) -> io::Result<()>;

    /// Closes the connection. Pending calls at both ends fail.
    fn close(&self);
}

macro_rules! impl_wire_for_streams {
    ($($stream:ty),*) => {$(
        impl Wire for $stream {
            fn send(&self, bytes: &[u8]) -> io::Result<()> {
                (&mut &*self).write_all(bytes)
            }

            fn receive(&self, into: &mut [u8]) -> io::Result<()> {
                (&mut &*self).read_exact(into)
            }

            fn close(&self) {
                // A stream that has ended already is closed.
                let _ = self.shutdown(Shutdown::Both);
            }
        }
    )*};
}

impl_wire_for_streams!(TcpStream, UnixStream);

/// The transport of one rank to peers in other processes.
pub struct WireTransport {
    shared: Arc<Shared>,
}

/// The part of a rank's transport that its reading and writing threads share.
struct Shared {
    rank: u32,
    ranks: u32,
    round_bytes: u64,
    epoch: Instant,
    /// Connection to each rank, by rank. None for this rank.
    wires: Vec<Option<Arc<dyn Wire>>>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Number of the team's current attempt at its work, raised by each reset. Frames of earlier attempts are dropped.
    attempt: u64,
    /// First rank that aborted, and its reason, by attempt. Holds entries for the current attempt and later ones only.
    aborts: BTreeMap<u64, (u32, String)>,
    /// First peer whose wire failed, and the reason. None while all wires work.
    unreachable_peer: Option<(u32, String)>,
    /// Number of collectives that this rank has joined in the current attempt.
    joined_count: u64,
    /// Traffic with each rank, by rank.
    channels: Vec<PeerChannel>,
}

/// Traffic between this rank and one peer.
struct PeerChannel {
    /// Queue of frames for the thread that writes to the peer. None for this rank itself, and after shutdown.
    outgoing: Option<Sender<Arc<Frame>>>,
    collective_frames: VecDeque<Frame>,
    message_frames: VecDeque<Frame>,
    /// Number of further sends that may be transferred now. Each reported completion of a send adds one.
    send_credits: u32,
    pending_sends: VecDeque<PendingSend>,
}

impl PeerChannel {
    fn new(outgoing: Option<Sender<Arc<Frame>>>) -> PeerChannel {
        PeerChannel {
            outgoing,
            collective_frames: VecDeque::new(),
            message_frames: VecDeque::new(),
            send_credits: MAX_SENDS_AHEAD,
            pending_sends: VecDeque::new(),
        }
    }
}

/// A posted send. Its buffers must keep their bytes until these are in the queue of the writing thread.
struct PendingSend {
    message: CollectiveCall,
    sent: bool,
    /// Planned completion time, in seconds since the transport's epoch. None until the receiver reports it.
    completed_at: Option<f64>,
}

impl WireTransport {
    /// Creates the transport of `rank`. `wires` holds one wire per rank, none for `rank` itself. Clocks of simulated
    /// devices count from `epoch`, which must be the same moment on all ranks.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(rank: u32, wires: Vec<Option<Arc<dyn Wire>>>, epoch: Instant) -> io::Result<Arc<WireTransport>> {
        WireTransport::with_round_bytes(rank, wires, epoch, ROUND_BYTES)
    }

    /// Creates a transport with rounds of `round_bytes`, which must be the same on all ranks.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn with_round_bytes(
        rank: u32,
        wires: Vec<Option<Arc<dyn Wire>>>,
        epoch: Instant,
        round_bytes: u64,
    ) -> io::Result<Arc<WireTransport>> {
        let is_own = |index: usize| index == rank as usize;
        assert!(wires.iter().enumerate().all(|(peer, wire)| wire.is_none() == is_own(peer)), "one wire per peer");
        let (senders, outgoing_queues): (Vec<_>, Vec<_>) = wires.iter().map(|_| channel()).unzip();
        let open_channel = |(wire, sender): (&Option<_>, _)| PeerChannel::new(wire.is_some().then_some(sender));
        let channels = wires.iter().zip(senders).map(open_channel).collect();
        let state = State { attempt: 0, aborts: BTreeMap::new(), unreachable_peer: None, joined_count: 0, channels };
        let (ranks, state, changed) = (wires.len() as u32, Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { rank, ranks, round_bytes, epoch, wires, state, changed });
        // Dropping it after a refused thread ends the threads started so far.
        let transport = Arc::new(WireTransport { shared: Arc::clone(&shared) });
        for ((peer, wire), outgoing) in (0..).zip(&shared.wires).zip(outgoing_queues) {
            let Some(wire) = wire else { continue };
            let thread = |role: &str| thread::Builder::new().name(format!("plimsoll-{role}-{peer}"));
            let (reader, read_wire) = (Arc::clone(&shared), Arc::clone(wire));
            thread("read").spawn(move || reader.read_loop(peer, &*read_wire))?;
            let (writer, write_wire) = (Arc::clone(&shared), Arc::clone(wire));
            thread("write").spawn(move || writer.write_loop(peer, &*write_wire, &outgoing))?;
        }
        Ok(transport)
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// Records that a rank aborted in an attempt. Does nothing if a later attempt has begun.
    pub fn abort_attempt(&self, attempt: u64, rank: u32, reason: &str) {
        let mut state = self.shared.state();
        if attempt == state.attempt {
            state.abort(rank, reason);
        } else if attempt > state.attempt {
            state.aborts.entry(attempt).or_insert((rank, reason.to_owned()));
        }
        self.shared.changed.notify_all();
    }

    /// Starts attempt number `attempt` with a clean state. The number must be the same on all ranks and higher than any
    /// before. This rank must not be inside a Program. Other ranks may have begun the attempt already.
    pub fn begin_attempt(&self, attempt: u64) {
        let mut state = self.shared.state();
        state.attempt = attempt;
        state.joined_count = 0;
        state.aborts.retain(|aborted_attempt, _| *aborted_attempt >= attempt);
        for channel in &mut state.channels {
            channel.collective_frames.retain(|frame| frame.header.attempt >= attempt);
            channel.message_frames.retain(|frame| frame.header.attempt >= attempt);
            channel.pending_sends.clear();
            channel.send_credits = MAX_SENDS_AHEAD;
        }
    }
}

impl Drop for WireTransport {
    fn drop(&mut self) {
        // Ends the threads.
        self.shared.state().channels.iter_mut().for_each(|channel| channel.outgoing = None);
        self.shared.wires.iter().flatten().for_each(|wire| wire.close());
    }
}

impl State {
    /// Returns an error if a rank has aborted the current attempt or cannot be reached.
    fn check_aborted(&self) -> Result<(), DeviceError> {
        match (self.aborts.get(&self.attempt), &self.unreachable_peer) {
            // The peer did not abort itself: this rank aborted in its name when the wire failed.
            (aborts, Some(unreachable_peer)) if aborts.is_none_or(|aborts| aborts == unreachable_peer) => {
                Err(DeviceError::PeerUnreachable { rank: unreachable_peer.0, reason: unreachable_peer.1.clone() })
            }
            (Some((rank, reason)), _) => Err(DeviceError::PeerAborted { rank: *rank, reason: reason.clone() }),
            (None, _) => Ok(()),
        }
    }

    /// Queues a frame for another rank. If the writing thread for it has ended, the reading thread reports the failure.
    fn send_frame(&self, to: usize, frame: &Arc<Frame>) {
        if let Some(outgoing) = &self.channels[to].outgoing {
            let _ = outgoing.send(Arc::clone(frame));
        }
    }

    fn send_frame_to_all(&self, frame: Frame) {
        let frame = Arc::new(frame);
        (0..self.channels.len()).for_each(|to| self.send_frame(to, &frame));
    }

    /// Aborts the current attempt for `rank`, unless a rank already has, and tells all ranks. Returns the first abort.
    fn abort(&mut self, rank: u32, reason: &str) -> (u32, String) {
        if let Some(first) = self.aborts.get(&self.attempt) {
            return first.clone();
        }
        let first = (rank, reason.to_owned());
        self.aborts.insert(self.attempt, first.clone());
        let header = FrameHeader { number: u64::from(rank), ..self.header(FrameKind::Abort) };
        self.send_frame_to_all(Frame::new(header, vec![], reason.as_bytes().to_vec()));
        first
    }

    fn header(&self, kind: FrameKind) -> FrameHeader {
        let (attempt, collective_index) = (self.attempt, self.joined_count);
        let (ready_seconds, duration_seconds, signature_bytes, body_bytes) = (0.0, 0.0, 0, 0);
        FrameHeader {
            kind,
            attempt,
            collective_index,
            number: 0,
            ready_seconds,
            duration_seconds,
            signature_bytes,
            body_bytes,
        }
    }

    /// Queues pending sends to a rank, as many as `send_credits` allows.
    fn send_pending(&mut self, to: usize) {
        let header = self.header(FrameKind::Send);
        while self.channels[to].send_credits > 0 {
            let Some(send) = self.channels[to].pending_sends.iter_mut().find(|send| !send.sent) else { return };
            let message = &send.message;
            let mut payload = Vec::new();
            for buffer in &message.buffers {
                let bytes = (buffer.counts[message.rank as usize] * buffer.dtype.bytes()) as usize;
                // SAFETY: the buffers of a pending send are lent until it is cancelled, which needs the state's lock.
                unsafe { append(buffer.input, 0..bytes, &mut payload) };
            }
            let CollectiveCall { number, ready_seconds, duration_seconds, .. } = *message;
            let header = FrameHeader { number, ready_seconds, duration_seconds, ..header };
            let frame = Frame::new(header, signature(message), payload);
            send.sent = true;
            self.channels[to].send_credits -= 1;
            self.send_frame(to, &Arc::new(frame));
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while the state is half changed, so a poisoned lock is still consistent.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sends queued frames to a rank until the queue or the wire ends. Runs on the thread that writes to the rank.
    fn write_loop(&self, peer: u32, wire: &dyn Wire, outgoing: &Receiver<Arc<Frame>>) {
        for frame in outgoing {
            let sent = wire.send(&frame.header.bytes()).and_then(|()| match &*frame.body {
                [] => Ok(()),
                body => wire.send(body),
            });
            if let Err(error) = sent {
                return self.set_unreachable(peer, &error);
            }
        }
    }

    /// Receives frames from a rank until the wire ends. Runs on the thread that reads from the rank.
    fn read_loop(&self, peer: u32, wire: &dyn Wire) {
        loop {
            if let Err(error) = self.read(wire).and_then(|frame| self.handle_frame(peer, frame)) {
                return self.set_unreachable(peer, &error);
            }
        }
    }

    fn read(&self, wire: &dyn Wire) -> io::Result<Frame> {
        let mut header = [0; HEADER_BYTES];
        wire.receive(&mut header)?;
        let limit = self.round_bytes + MAX_SIGNATURE_BYTES;
        let header = FrameHeader::read(&header).filter(|header| u64::from(header.body_bytes) <= limit);
        let header =
            header.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the bytes received are not a frame"))?;
        let mut body = vec![0; header.body_bytes as usize];
        if !body.is_empty() {
            wire.receive(&mut body)?;
        }
        Ok(Frame { header, body })
    }

    fn handle_frame(&self, peer: u32, frame: Frame) -> io::Result<()> {
        let mut state = self.state();
        let FrameHeader { kind, attempt, number, ready_seconds, .. } = frame.header;
        if attempt < state.attempt {
            return Ok(());
        }
        let channel = &mut state.channels[peer as usize];
        match kind {
            FrameKind::Join | FrameKind::ReducedPart => channel.collective_frames.push_back(frame),
            FrameKind::Send => channel.message_frames.push_back(frame),
            FrameKind::Abort => {
                let reason = String::from_utf8_lossy(&frame.body).into_owned();
                state.aborts.entry(attempt).or_insert((number as u32, reason));
            }
            FrameKind::SendCompleted => {
                channel.send_credits += 1;
                let mut sends = channel.pending_sends.iter_mut();
                if let Some(send) = sends.find(|send| send.sent && send.completed_at.is_none()) {
                    send.completed_at = Some(ready_seconds);
                }
                state.send_pending(peer as usize);
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Records that the wire to a rank failed, and aborts the group, even though other ranks may still reach that rank.
    fn set_unreachable(&self, peer: u32, error: &io::Error) {
        let mut state = self.state();
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
            _ => error.to_string(),
        };
        if state.unreachable_peer.is_none() {
            state.unreachable_peer = Some((peer, reason.clone()));
            state.abort(peer, &reason);
        }
        self.changed.notify_all();
    }

    /// Aborts the group because rank `other` called another collective than this rank. Returns the resulting error.
    fn abort_mismatch(
        &self,
        mut state: MutexGuard<State>,
        own: &CollectiveCall,
        other: u32,
        number: u64,
    ) -> DeviceError {
        let reason = format!("it called collective {} when rank {other} called {number}", own.number);
        let (rank, reason) = state.abort(own.rank, &reason);
        self.changed.notify_all();
        DeviceError::PeerAborted { rank, reason }
    }

    /// Waits for the next collective frame of each peer, and returns the frames by rank; None for this rank.
    /// `is_expected` tells whether a frame from a peer belongs to this collective.
    fn receive_from_all(
        &self,
        own: &CollectiveCall,
        is_expected: impl Fn(u32, &Frame) -> bool,
    ) -> Result<Vec<Option<Frame>>, DeviceError> {
        let mut state = self.state();
        loop {
            let attempt = state.attempt;
            let mut missing = false;
            for (peer, channel) in (0..).zip(&state.channels).filter(|(peer, _)| *peer != self.rank) {
                match channel.collective_frames.front().filter(|frame| frame.header.attempt == attempt) {
                    None => missing = true,
                    Some(frame) if !is_expected(peer, frame) => {
                        let number = frame.header.number;
                        return Err(self.abort_mismatch(state, own, peer, number));
                    }
                    Some(_) => {}
                }
            }
            if !missing {
                let others = state.channels.iter_mut().enumerate();
                let take = |(peer, channel): (usize, &mut PeerChannel)| {
                    if peer == self.rank as usize { None } else { channel.collective_frames.pop_front() }
                };
                return Ok(others.map(take).collect());
            }
            state.check_aborted()?;
            state = self.wait(state);
        }
    }

    /// Joins a collective: sends this rank's input to all peers and waits for theirs. Returns the peers' frames by
    /// rank; None for this rank.
    fn join_collective(&self, own: &CollectiveCall) -> Result<Vec<Option<Frame>>, DeviceError> {
        let signature = signature(own);
        let header = {
            let mut state = self.state();
            state.check_aborted()?;
            state.joined_count += 1;
            let CollectiveCall { number, ready_seconds, duration_seconds, .. } = *own;
            FrameHeader { number, ready_seconds, duration_seconds, ..state.header(FrameKind::Join) }
        };
        // SAFETY: the call lends the buffers, and no thread writes them before `receive_from_all` returns.
        let join_frame = |receiver| Frame::new(header, signature.clone(), unsafe { join_payload(own, receiver) });
        // A rank that sums needs its part of all inputs; otherwise all ranks get this rank's whole input.
        let sends_parts = own.collective.sums();
        if sends_parts {
            for peer in (0..self.ranks).filter(|peer| *peer != self.rank) {
                let frame = Arc::new(join_frame(Some(peer)));
                self.state().send_frame(peer as usize, &frame);
            }
        } else {
            let frame = join_frame(None);
            self.state().send_frame_to_all(frame);
        }
        let sizes = |rank| own.buffers.iter().map(move |buffer| part_bytes(&buffer.counts, buffer.dtype, rank).len());
        self.receive_from_all(own, |peer, frame| {
            let FrameHeader { kind, collective_index, number, .. } = frame.header;
            let same = (kind, collective_index, number) == (FrameKind::Join, header.collective_index, header.number);
            let bytes = sizes(if sends_parts { self.rank } else { peer }).sum::<usize>();
            same && frame.signature() == signature && frame.payload().len() == bytes
        })
    }

    /// Sums this rank's own part of every piece over all ranks, in rank order. The collective says whether the sum is
    /// added to the output or overwrites it.
    ///
    /// # Safety
    /// `joins` are the frames that `join_collective` returned for this call.
    unsafe fn reduce_own_part(&self, own: &CollectiveCall, joins: &[Option<Frame>]) {
        let adds = own.collective.adds_to_output();
        let mut before = 0;
        for buffer in &own.buffers {
            let range = part_bytes(&buffer.counts, buffer.dtype, self.rank);
            let elements = range.len() / buffer.dtype.bytes() as usize;
            let input = |frame: &Option<Frame>| match frame {
                Some(frame) => frame.payload()[before..].as_ptr(),
                // SAFETY: within the buffer that this rank lends.
                None => unsafe { buffer.input.add(range.start) },
            };
            let inputs: Vec<*const u8> = joins.iter().map(input).collect();
            // SAFETY: `join_collective` checked the size of every frame; only this rank writes its own part.
            unsafe {
                let into = if adds { buffer.output } else { buffer.output.add(range.start) };
                sum_elements(buffer.dtype, &inputs, into, elements, adds);
            }
            before += range.len();
        }
    }

    /// Copies the peers' parts of every piece from their frames into this rank's output.
    ///
    /// # Safety
    /// All ranks have joined, and each frame has the size of its rank's part.
    unsafe fn copy_parts(&self, own: &CollectiveCall, parts: &[Option<Frame>]) {
        for (rank, frame) in (0..).zip(parts) {
            let Some(frame) = frame else { continue };
            let mut payload = frame.payload();
            for buffer in &own.buffers {
                let range = part_bytes(&buffer.counts, buffer.dtype, rank);
                let (bytes, rest) = payload.split_at(range.len());
                // SAFETY: within the buffer that this rank lends, which no other thread touches.
                unsafe { buffer.output.add(range.start).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                payload = rest;
            }
        }
    }

    /// Waits until the next send of rank `from` has arrived, and copies it to the buffers of `own`, this rank's receive
    /// call. Returns the planned time at which the transfer ends, in seconds since [`Transport::epoch`].
    fn receive(&self, own: &CollectiveCall, from: u32) -> Result<f64, DeviceError> {
        let mut state = self.state();
        let frame = loop {
            state.check_aborted()?;
            let attempt = state.attempt;
            let message_frames = &mut state.channels[from as usize].message_frames;
            if message_frames.front().is_some_and(|frame| frame.header.attempt == attempt) {
                break message_frames.pop_front().expect("the front frame exists");
            }
            state = self.wait(state);
        };
        let bytes = own.buffers.iter().map(|buffer| part_bytes(&buffer.counts, buffer.dtype, own.rank).len());
        let size_differs = frame.payload().len() != bytes.sum::<usize>();
        if frame.header.number != own.number || frame.signature() != signature(own) || size_differs {
            return Err(self.abort_mismatch(state, own, from, frame.header.number));
        }
        let duration_seconds = own.duration_seconds.max(frame.header.duration_seconds);
        let end = own.ready_seconds.max(frame.header.ready_seconds) + duration_seconds;
        let header = FrameHeader { number: own.number, ready_seconds: end, ..state.header(FrameKind::SendCompleted) };
        state.send_frame(from as usize, &Arc::new(Frame::new(header, vec![], vec![])));
        drop(state);
        let mut payload = frame.payload();
        for buffer in &own.buffers {
            let (bytes, rest) = payload.split_at(part_bytes(&buffer.counts, buffer.dtype, own.rank).len());
            // SAFETY: this rank lends the buffer, which no other thread touches, and the sizes were checked above.
            unsafe { buffer.output.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            payload = rest;
        }
        Ok(end)
    }
}

impl Transport for WireTransport {
    fn world_size(&self) -> u32 {
        self.shared.ranks
    }

    fn epoch(&self) -> Instant {
        self.shared.epoch
    }

    fn round_bytes(&self) -> Option<u64> {
        Some(self.shared.round_bytes)
    }

    fn exchange(&self, call: CollectiveCall) -> Result<f64, DeviceError> {
        let shared = &*self.shared;
        if let (Collective::Receive, Some(from)) = (call.collective, call.peer) {
            return shared.receive(&call, from);
        }
        let joins = shared.join_collective(&call)?;
        let headers = || joins.iter().flatten().map(|frame| frame.header);
        let ready_seconds = headers().map(|header| header.ready_seconds).fold(call.ready_seconds, f64::max);
        let duration_seconds = headers().map(|header| header.duration_seconds).fold(call.duration_seconds, f64::max);
        let (sums, gathers) = (call.collective.sums(), call.collective.gathers());
        assert!(sums || gathers, "bug: a send has a peer and is posted by its sender");
        if sums {
            // SAFETY: all ranks have joined, and `join_collective` checked the sizes.
            unsafe { shared.reduce_own_part(&call, &joins) };
        }
        if sums && gathers {
            drop(joins);
            let mut payload = Vec::new();
            for buffer in &call.buffers {
                let range = part_bytes(&buffer.counts, buffer.dtype, shared.rank);
                // SAFETY: this rank's own part, written just now.
                unsafe { append(buffer.output, range, &mut payload) };
            }
            let state = shared.state();
            let header = FrameHeader { number: call.number, ..state.header(FrameKind::ReducedPart) };
            let joined_count = state.joined_count;
            state.send_frame_to_all(Frame::new(header, vec![], payload));
            drop(state);
            let parts = shared.receive_from_all(&call, |peer, frame| {
                let bytes = call.buffers.iter().map(|buffer| part_bytes(&buffer.counts, buffer.dtype, peer).len());
                (frame.header.kind, frame.header.collective_index) == (FrameKind::ReducedPart, joined_count)
                    && frame.payload().len() == bytes.sum::<usize>()
            })?;
            // SAFETY: all ranks have joined, and the sizes were checked just now.
            unsafe { shared.copy_parts(&call, &parts) };
        } else if gathers {
            for buffer in &call.buffers {
                let range = part_bytes(&buffer.counts, buffer.dtype, shared.rank);
                let to = buffer.output.wrapping_add(range.start);
                if buffer.input != to.cast_const() {
                    // SAFETY: both buffers are this rank's; they are identical or disjoint.
                    unsafe { buffer.input.copy_to_nonoverlapping(to, range.len()) };
                }
            }
            // SAFETY: all ranks have joined, and `join_collective` checked the sizes.
            unsafe { shared.copy_parts(&call, &joins) };
        }
        Ok(ready_seconds + duration_seconds)
    }

    fn post_send(&self, message: CollectiveCall) -> Result<(), DeviceError> {
        let mut state = self.shared.state();
        state.check_aborted()?;
        let to = message.peer.expect("a send has a receiver") as usize;
        state.channels[to].pending_sends.push_back(PendingSend { message, sent: false, completed_at: None });
        state.send_pending(to);
        Ok(())
    }

    fn wait_send(&self, _: u32, peer: u32, number: u64) -> Result<f64, DeviceError> {
        let mut state = self.shared.state();
        loop {
            let pending_sends = &mut state.channels[peer as usize].pending_sends;
            let at = pending_sends.iter().position(|send| send.message.number == number);
            if let Some((at, end)) = at.and_then(|at| Some((at, pending_sends[at].completed_at?))) {
                pending_sends.remove(at);
                return Ok(end);
            }
            state.check_aborted()?;
            assert!(at.is_some(), "bug: send {number} to rank {peer} has not been posted");
            state = self.shared.wait(state);
        }
    }

    fn cancel_sends(&self, _: u32) {
        self.shared.state().channels.iter_mut().for_each(|channel| channel.pending_sends.clear());
    }

    fn is_borrowed(&self, rank: u32, bytes: Range<usize>) -> bool {
        let state = self.shared.state();
        let waiting = state.channels.iter().flat_map(|channel| &channel.pending_sends).filter(|send| !send.sent);
        let mut buffers = waiting.flat_map(|send| &send.message.buffers);
        buffers.any(|buffer| {
            let first = buffer.input as usize;
            first < bytes.end && bytes.start < first + part_bytes(&buffer.counts, buffer.dtype, rank).len()
        })
    }

    fn abort(&self, rank: u32, reason: &str) {
        self.shared.state().abort(rank, reason);
        self.shared.changed.notify_all();
    }

    fn check_aborted(&self) -> Result<(), DeviceError> {
        self.shared.state().check_aborted()
    }

    fn reset(&self) {
        let attempt = self.shared.state().attempt;
        self.begin_attempt(attempt + 1);
    }
}
