//! Between processes: each rank has its own memory, and a wire to every other rank that carries bytes in order.
//!
//! ```text
//!   each sends what others need of it ─► has come where all have ─► each sums up its own part ─► sends it to all
//! ```
//! What is sent is copied first, so nobody's memory is touched from outside, and a rank that leaves leaves nothing behind.
//! Frames of all ranks are there before one of them is looked at: so coming is agreeing, as in one process, and a sum is
//! taken in the order of the ranks by the rank whose part it is, so everybody has the same bits as there. Each byte of a sum
//! goes out and comes in once, whatever the number of ranks.
//!
//! A wire has a thread that writes and one that reads, and neither ever waits for the device: who gives up is heard of
//! while a rank waits, and a wire that ends wakes all. How much is on its way is bounded: collectives go in rounds, none of
//! which ends for a rank before the others' frames of it are here, and of messages a receiver has a few ahead of it.
//!
//! Where a wire ends after all have come to the meeting for a sum, what this rank gets may be there in part.

use super::memory::sum_elements;
use super::{Meeting, Transport};
use crate::device::DeviceError;
use plimsoll_core::{Bytes, DType};
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

#[cfg(test)]
mod tests;

/// Bytes of a round at most.
pub const ROUND_BYTES: u64 = 1 << 20;
/// Messages of a round's size that are sent before their receiver has come for them.
const AHEAD: u32 = 2;

/// What a rank holds at most of frames that are on their way, beside its arenas, where rounds are of [`ROUND_BYTES`] and
/// messages come from two sides: two rounds that go out, three that come in, and messages ahead, as many each way.
pub const STAGED_BYTES: Bytes = Bytes((2 + 3 + 4 * AHEAD as u64) * ROUND_BYTES);

/// What lies between two ranks: bytes, whole and in order, both ways at once. Every `receive` asks for as many bytes as one
/// `send` at the other end gave, in the same order; so what carries messages instead of a stream serves as well.
pub trait Wire: Send + Sync {
    /// Sends all of these. May wait for the other end to receive.
    ///
    /// # Errors
    /// The other end cannot be reached any more, or this one is closed.
    fn send(&self, bytes: &[u8]) -> io::Result<()>;

    /// Waits for as many.
    ///
    /// # Errors
    /// As above.
    fn receive(&self, into: &mut [u8]) -> io::Result<()>;

    /// Nothing more is sent or received: who waits for it at either end fails.
    fn close(&self);
}

macro_rules! streams {
    ($($stream:ty),*) => {$(
        impl Wire for $stream {
            fn send(&self, bytes: &[u8]) -> io::Result<()> {
                (&mut &*self).write_all(bytes)
            }

            fn receive(&self, into: &mut [u8]) -> io::Result<()> {
                (&mut &*self).read_exact(into)
            }

            fn close(&self) {
                // One that has ended already is closed.
                let _ = self.shutdown(Shutdown::Both);
            }
        }
    )*};
}

streams!(TcpStream, UnixStream);

/// How one rank of a team meets the others, each of them at the other end of a wire.
pub struct Wired {
    shared: Arc<Shared>,
}

struct Shared {
    rank: u32,
    ranks: u32,
    round_bytes: u64,
    epoch: Instant,
    /// By rank; none to itself.
    wires: Vec<Option<Arc<dyn Wire>>>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// How often this was cleared: what others sent before that is nothing any more, and what they sent after it waits.
    attempt: u64,
    /// Who gave up first, as this rank has heard of it, in this attempt or in later ones.
    gave_up: BTreeMap<u64, (u32, String)>,
    /// Whose wire has ended.
    cut_off: Option<(u32, String)>,
    /// Meetings that this rank has come to.
    came: u64,
    /// What is on its way from and to each rank.
    ways: Vec<Way>,
}

/// What is on its way between this rank and another.
struct Way {
    /// To the thread that writes.
    post: Option<Sender<Arc<Frame>>>,
    meetings: VecDeque<Frame>,
    messages: VecDeque<Frame>,
    /// Messages that may be sent before one more has been taken.
    ahead: u32,
    shown: VecDeque<Shown>,
}

/// A message that is lent until it is sent.
struct Shown {
    message: Meeting,
    sent: bool,
    /// When it was planned to have been taken.
    taken: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A rank has come to a meeting; with what the receiver needs of it.
    Come,
    /// Its part, summed up over all.
    Part,
    Message,
    /// A message was taken, at its planned time.
    Taken,
    /// The rank of this number gave up; the body says why.
    GaveUp,
}

const KINDS: [Kind; 5] = [Kind::Come, Kind::Part, Kind::Message, Kind::Taken, Kind::GaveUp];

/// What stands in front of a frame's body: numbers in the order of their bytes, lowest first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Head {
    kind: Kind,
    attempt: u64,
    /// Of meetings: the how manieth.
    meeting: u64,
    /// The number of a collective; of a rank that gave up its own.
    number: u64,
    /// Planned times, see [`Meeting`].
    ready: f64,
    seconds: f64,
    /// Bytes of the body that say what the collective is.
    form_bytes: u32,
    body_bytes: u32,
}

/// Bytes of a head.
const HEAD: usize = 56;
/// More than this stands in no body beside a round.
const FORM_BYTES_MOST: u64 = 1 << 24;

impl Head {
    fn bytes(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        let kind = KINDS.iter().position(|kind| *kind == self.kind).expect("it is one of them");
        let numbers = [
            kind as u64,
            self.attempt,
            self.meeting,
            self.number,
            self.ready.to_bits(),
            self.seconds.to_bits(),
            u64::from(self.form_bytes) << 32 | u64::from(self.body_bytes),
        ];
        bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(bytes, number)| *bytes = number.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8; HEAD]) -> Option<Head> {
        let at = |place: usize| u64::from_le_bytes(bytes.as_chunks().0[place]);
        let (form_bytes, body_bytes) = ((at(6) >> 32) as u32, at(6) as u32);
        Some(Head {
            kind: *KINDS.get(usize::try_from(at(0)).ok()?)?,
            attempt: at(1),
            meeting: at(2),
            number: at(3),
            ready: f64::from_bits(at(4)),
            seconds: f64::from_bits(at(5)),
            form_bytes: (form_bytes <= body_bytes).then_some(form_bytes)?,
            body_bytes,
        })
    }
}

struct Frame {
    head: Head,
    body: Vec<u8>,
}

impl Frame {
    fn form(&self) -> &[u8] {
        &self.body[..self.head.form_bytes as usize]
    }

    fn payload(&self) -> &[u8] {
        &self.body[self.head.form_bytes as usize..]
    }
}

/// What the ranks of a meeting, or both ends of a message, must agree on.
fn form(meeting: &Meeting) -> Vec<u8> {
    let mut form = Vec::new();
    let mut number = |number: u64| form.extend_from_slice(&number.to_le_bytes());
    match meeting.collective {
        Collective::Send | Collective::Receive => {
            meeting.places.iter().for_each(|place| number(place.counts[meeting.rank as usize] * place.dtype.bytes()));
        }
        collective => {
            number(collective as u64);
            for place in &meeting.places {
                number(place.dtype as u64);
                place.counts.iter().for_each(|&count| number(count));
            }
        }
    }
    form
}

/// The bytes of a rank's part of a piece, from its first on.
fn part(counts: &[u64], dtype: DType, rank: u32) -> Range<usize> {
    let first: u64 = counts[..rank as usize].iter().sum();
    let of = |elements: u64| (elements * dtype.bytes()) as usize;
    of(first)..of(first + counts[rank as usize])
}

/// Appends lent bytes.
///
/// # Safety
/// They are lent, and nobody writes them now.
unsafe fn append(from: *const u8, range: Range<usize>, to: &mut Vec<u8>) {
    // SAFETY: as the caller promises.
    to.extend_from_slice(unsafe { std::slice::from_raw_parts(from.add(range.start), range.len()) });
}

impl Wired {
    /// The seat of `rank` at these wires, in the order of ranks, with none to itself. Clocks of simulated devices begin at
    /// `epoch`: the same moment on all ranks.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn new(rank: u32, wires: Vec<Option<Arc<dyn Wire>>>, epoch: Instant) -> io::Result<Arc<Wired>> {
        Wired::in_rounds(rank, wires, epoch, ROUND_BYTES)
    }

    /// The same in rounds of another size, which must be that of all ranks.
    ///
    /// # Errors
    /// As above.
    pub fn in_rounds(
        rank: u32,
        wires: Vec<Option<Arc<dyn Wire>>>,
        epoch: Instant,
        round_bytes: u64,
    ) -> io::Result<Arc<Wired>> {
        assert!(wires.iter().enumerate().all(|(to, wire)| wire.is_none() == (to == rank as usize)), "a wire to each");
        let mut posts = Vec::new();
        let way = |wire: &Option<Arc<dyn Wire>>| {
            let (post, posted) = channel();
            posts.push(posted);
            let post = wire.is_some().then_some(post);
            Way { post, meetings: VecDeque::new(), messages: VecDeque::new(), ahead: AHEAD, shown: VecDeque::new() }
        };
        let ways = wires.iter().map(way).collect();
        let state = State { attempt: 0, gave_up: BTreeMap::new(), cut_off: None, came: 0, ways };
        let (ranks, state, changed) = (wires.len() as u32, Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { rank, ranks, round_bytes, epoch, wires, state, changed });
        // Dropped where a thread is refused, it ends those that there are.
        let wired = Arc::new(Wired { shared: Arc::clone(&shared) });
        for ((peer, wire), posted) in (0..).zip(&shared.wires).zip(posts) {
            let Some(wire) = wire else { continue };
            let thread = |what: &str| thread::Builder::new().name(format!("plimsoll-{what}-{peer}"));
            let (of, wires) = (Arc::clone(&shared), Arc::clone(wire));
            thread("read").spawn(move || of.reads(peer, &*wires))?;
            let (of, wire) = (Arc::clone(&shared), Arc::clone(wire));
            thread("write").spawn(move || of.writes(peer, &*wire, &posted))?;
        }
        Ok(wired)
    }

    /// Whose seat this is.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// A rank gives up in an attempt; in one that is over by now it was of no use any more.
    pub fn give_up_in(&self, attempt: u64, rank: u32, why: &str) {
        let mut state = self.shared.state();
        if attempt == state.attempt {
            state.give_up(rank, why);
        } else if attempt > state.attempt {
            state.gave_up.entry(attempt).or_insert((rank, why.to_owned()));
        }
        self.shared.changed.notify_all();
    }

    /// Everything is as at the beginning of the attempt of this number: the same on all ranks, and higher than any before.
    /// Only where this rank is in no Program; the others may have begun.
    pub fn begin(&self, attempt: u64) {
        let mut state = self.shared.state();
        state.attempt = attempt;
        state.came = 0;
        state.gave_up.retain(|of, _| *of >= attempt);
        for way in &mut state.ways {
            way.meetings.retain(|frame| frame.head.attempt >= attempt);
            way.messages.retain(|frame| frame.head.attempt >= attempt);
            way.shown.clear();
            way.ahead = AHEAD;
        }
    }
}

impl Drop for Wired {
    fn drop(&mut self) {
        // Ends the threads.
        self.shared.state().ways.iter_mut().for_each(|way| way.post = None);
        self.shared.wires.iter().flatten().for_each(|wire| wire.close());
    }
}

impl State {
    /// That nobody has given up, or is gone.
    fn agreed(&self) -> Result<(), DeviceError> {
        match (self.gave_up.get(&self.attempt), &self.cut_off) {
            // It did not give up by itself, but was said to.
            (gave_up, Some(cut_off)) if gave_up.is_none_or(|gave_up| gave_up == cut_off) => {
                Err(DeviceError::CutOff { rank: cut_off.0, why: cut_off.1.clone() })
            }
            (Some((rank, why)), _) => Err(DeviceError::Peer { rank: *rank, why: why.clone() }),
            (None, _) => Ok(()),
        }
    }

    /// Hands a frame to the thread that writes to a rank; where that has ended, the reading one says so.
    fn post(&self, to: usize, frame: &Arc<Frame>) {
        if let Some(post) = &self.ways[to].post {
            let _ = post.send(Arc::clone(frame));
        }
    }

    fn post_to_all(&self, frame: Frame) {
        let frame = Arc::new(frame);
        (0..self.ways.len()).for_each(|to| self.post(to, &frame));
    }

    /// A rank gives up in this attempt, where nobody has before; all are told. Gives who was first.
    fn give_up(&mut self, rank: u32, why: &str) -> (u32, String) {
        if let Some(first) = self.gave_up.get(&self.attempt) {
            return first.clone();
        }
        let first = (rank, why.to_owned());
        self.gave_up.insert(self.attempt, first.clone());
        let head = Head { number: u64::from(rank), ..self.head(Kind::GaveUp) };
        self.post_to_all(Frame::new(head, vec![], why.as_bytes().to_vec()));
        first
    }

    fn head(&self, kind: Kind) -> Head {
        let (attempt, meeting) = (self.attempt, self.came);
        Head { kind, attempt, meeting, number: 0, ready: 0.0, seconds: 0.0, form_bytes: 0, body_bytes: 0 }
    }

    /// Sends of what is shown to a rank as much as may be on its way.
    fn send_ahead(&mut self, to: usize) {
        let head = self.head(Kind::Message);
        while self.ways[to].ahead > 0 {
            let Some(shown) = self.ways[to].shown.iter_mut().find(|shown| !shown.sent) else { return };
            let message = &shown.message;
            let mut payload = Vec::new();
            for place in &message.places {
                let bytes = (place.counts[message.rank as usize] * place.dtype.bytes()) as usize;
                // SAFETY: what is shown is lent until it is withdrawn, for which the state's lock is needed.
                unsafe { append(place.input, 0..bytes, &mut payload) };
            }
            let Meeting { number, ready, seconds, .. } = *message;
            let frame = Frame::new(Head { number, ready, seconds, ..head }, form(message), payload);
            shown.sent = true;
            self.ways[to].ahead -= 1;
            self.post(to, &Arc::new(frame));
        }
    }
}

impl Frame {
    fn new(head: Head, form: Vec<u8>, payload: Vec<u8>) -> Frame {
        let (form_bytes, mut body) = (form.len() as u32, form);
        body.extend(payload);
        Frame { head: Head { form_bytes, body_bytes: body.len() as u32, ..head }, body }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nobody panics while it is half changed.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The thread that writes to a rank.
    fn writes(&self, peer: u32, wire: &dyn Wire, posted: &Receiver<Arc<Frame>>) {
        for frame in posted {
            let sent = wire.send(&frame.head.bytes()).and_then(|()| match &*frame.body {
                [] => Ok(()),
                body => wire.send(body),
            });
            if let Err(error) = sent {
                return self.cut_off(peer, &error);
            }
        }
    }

    /// The thread that reads what a rank sends.
    fn reads(&self, peer: u32, wire: &dyn Wire) {
        loop {
            if let Err(error) = self.read(wire).and_then(|frame| self.takes_in(peer, frame)) {
                return self.cut_off(peer, &error);
            }
        }
    }

    fn read(&self, wire: &dyn Wire) -> io::Result<Frame> {
        let mut head = [0; HEAD];
        wire.receive(&mut head)?;
        let head = Head::read(&head).filter(|head| u64::from(head.body_bytes) <= self.round_bytes + FORM_BYTES_MOST);
        let head = head.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "what came is no frame"))?;
        let mut body = vec![0; head.body_bytes as usize];
        if !body.is_empty() {
            wire.receive(&mut body)?;
        }
        Ok(Frame { head, body })
    }

    fn takes_in(&self, peer: u32, frame: Frame) -> io::Result<()> {
        let mut state = self.state();
        let Head { kind, attempt, number, ready, .. } = frame.head;
        if attempt < state.attempt {
            return Ok(());
        }
        let way = &mut state.ways[peer as usize];
        match kind {
            Kind::Come | Kind::Part => way.meetings.push_back(frame),
            Kind::Message => way.messages.push_back(frame),
            Kind::GaveUp => {
                let why = String::from_utf8_lossy(&frame.body).into_owned();
                state.gave_up.entry(attempt).or_insert((number as u32, why));
            }
            Kind::Taken => {
                way.ahead += 1;
                if let Some(shown) = way.shown.iter_mut().find(|shown| shown.sent && shown.taken.is_none()) {
                    shown.taken = Some(ready);
                }
                state.send_ahead(peer as usize);
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    /// The wire to a rank has ended. The others may be able to reach it, but not to go on.
    fn cut_off(&self, peer: u32, error: &io::Error) {
        let mut state = self.state();
        let why = match error.kind() {
            io::ErrorKind::UnexpectedEof => "its end of the wire is closed".to_owned(),
            _ => error.to_string(),
        };
        if state.cut_off.is_none() {
            state.cut_off = Some((peer, why.clone()));
            state.give_up(peer, &why);
        }
        self.changed.notify_all();
    }

    /// A rank has come for something else than this one: all give up.
    fn differ(&self, mut state: MutexGuard<State>, own: &Meeting, other: u32, number: u64) -> DeviceError {
        let why = format!("it came for collective {} when rank {other} was in {number}", own.number);
        let (rank, why) = state.give_up(own.rank, &why);
        self.changed.notify_all();
        DeviceError::Peer { rank, why }
    }

    /// Waits for a frame of each of the others. `alike` tells whether it is the one that is waited for.
    fn all(&self, own: &Meeting, alike: impl Fn(u32, &Frame) -> bool) -> Result<Vec<Option<Frame>>, DeviceError> {
        let mut state = self.state();
        loop {
            let attempt = state.attempt;
            let mut missing = false;
            for (peer, way) in (0..).zip(&state.ways).filter(|(peer, _)| *peer != self.rank) {
                match way.meetings.front().filter(|frame| frame.head.attempt == attempt) {
                    None => missing = true,
                    Some(frame) if !alike(peer, frame) => {
                        let number = frame.head.number;
                        return Err(self.differ(state, own, peer, number));
                    }
                    Some(_) => {}
                }
            }
            if !missing {
                let others = state.ways.iter_mut().enumerate();
                let take = |(peer, way): (usize, &mut Way)| {
                    if peer == self.rank as usize { None } else { way.meetings.pop_front() }
                };
                return Ok(others.map(take).collect());
            }
            state.agreed()?;
            state = self.wait(state);
        }
    }

    /// Tells all that this rank has come to a meeting, and waits for all; gives what they bring for it.
    fn come(&self, own: &Meeting) -> Result<Vec<Option<Frame>>, DeviceError> {
        let form = form(own);
        let scatters = own.collective != Collective::AllGather;
        let head = {
            let mut state = self.state();
            state.agreed()?;
            state.came += 1;
            let Meeting { number, ready, seconds, .. } = *own;
            Head { number, ready, seconds, ..state.head(Kind::Come) }
        };
        let brings = |of: Option<u32>| {
            let mut payload = Vec::new();
            for place in &own.places {
                let range = match of {
                    Some(peer) => part(&place.counts, place.dtype, peer),
                    None => 0..part(&place.counts, place.dtype, self.rank).len(),
                };
                // SAFETY: this rank is in the meeting, which lends it, and nobody writes it before `all` below is back.
                unsafe { append(place.input, range, &mut payload) };
            }
            Frame::new(head, form.clone(), payload)
        };
        if scatters {
            for peer in (0..self.ranks).filter(|peer| *peer != self.rank) {
                let frame = Arc::new(brings(Some(peer)));
                self.state().post(peer as usize, &frame);
            }
        } else {
            let frame = brings(None);
            self.state().post_to_all(frame);
        }
        let bytes_of =
            |rank| own.places.iter().map(|place| part(&place.counts, place.dtype, rank).len()).sum::<usize>();
        self.all(own, |peer, frame| {
            let same =
                (Kind::Come, head.meeting, head.number) == (frame.head.kind, frame.head.meeting, frame.head.number);
            let bytes = bytes_of(if scatters { self.rank } else { peer });
            same && frame.form() == form && frame.payload().len() == bytes
        })
    }

    /// Sums up this rank's own part of every piece over all, in their order; into its place, or added to what is there.
    ///
    /// # Safety
    /// In a meeting, with what the others brought to it.
    unsafe fn sum_own_part(&self, own: &Meeting, brought: &[Option<Frame>], adds: bool) {
        let mut before = 0;
        for place in &own.places {
            let range = part(&place.counts, place.dtype, self.rank);
            let elements = range.len() / place.dtype.bytes() as usize;
            let input = |frame: &Option<Frame>| match frame {
                Some(frame) => frame.payload()[before..].as_ptr(),
                // SAFETY: within what this rank lends.
                None => unsafe { place.input.add(range.start) },
            };
            let inputs: Vec<*const u8> = brought.iter().map(input).collect();
            // SAFETY: every frame has as many bytes (`come`); the place is this rank's own, and written by nobody else.
            unsafe {
                let into = if adds { place.output } else { place.output.add(range.start) };
                sum_elements(place.dtype, &inputs, into, elements, adds);
            }
            before += range.len();
        }
    }

    /// Puts others' parts into the whole.
    ///
    /// # Safety
    /// In a meeting to which all have come; the frames have the bytes of their ranks' parts.
    unsafe fn put_parts(&self, own: &Meeting, parts: &[Option<Frame>]) {
        for (rank, frame) in (0..).zip(parts) {
            let Some(frame) = frame else { continue };
            let mut payload = frame.payload();
            for place in &own.places {
                let range = part(&place.counts, place.dtype, rank);
                let (bytes, rest) = payload.split_at(range.len());
                // SAFETY: within what this rank lends, which nobody else touches.
                unsafe { place.output.add(range.start).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                payload = rest;
            }
        }
    }

    /// Takes the next message from a rank.
    fn receive(&self, own: &Meeting, from: u32) -> Result<f64, DeviceError> {
        let mut state = self.state();
        let frame = loop {
            state.agreed()?;
            let attempt = state.attempt;
            let messages = &mut state.ways[from as usize].messages;
            if messages.front().is_some_and(|frame| frame.head.attempt == attempt) {
                break messages.pop_front().expect("it is there");
            }
            state = self.wait(state);
        };
        let bytes = own.places.iter().map(|place| part(&place.counts, place.dtype, own.rank).len());
        if frame.head.number != own.number || frame.form() != form(own) || frame.payload().len() != bytes.sum::<usize>()
        {
            return Err(self.differ(state, own, from, frame.head.number));
        }
        let end = own.ready.max(frame.head.ready) + own.seconds.max(frame.head.seconds);
        let head = Head { number: own.number, ready: end, ..state.head(Kind::Taken) };
        state.post(from as usize, &Arc::new(Frame::new(head, vec![], vec![])));
        drop(state);
        let mut payload = frame.payload();
        for place in &own.places {
            let (bytes, rest) = payload.split_at(part(&place.counts, place.dtype, own.rank).len());
            // SAFETY: this rank lends its place, which nobody else touches, and it has as many bytes.
            unsafe { place.output.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            payload = rest;
        }
        Ok(end)
    }
}

impl Transport for Wired {
    fn ranks(&self) -> u32 {
        self.shared.ranks
    }

    fn epoch(&self) -> Instant {
        self.shared.epoch
    }

    fn round_bytes(&self) -> Option<u64> {
        Some(self.shared.round_bytes)
    }

    fn meet(&self, meeting: Meeting) -> Result<f64, DeviceError> {
        let shared = &*self.shared;
        if let (Collective::Receive, Some(from)) = (meeting.collective, meeting.peer) {
            return shared.receive(&meeting, from);
        }
        let brought = shared.come(&meeting)?;
        let heads = || brought.iter().flatten().map(|frame| frame.head);
        let ready = heads().map(|head| head.ready).fold(meeting.ready, f64::max);
        let seconds = heads().map(|head| head.seconds).fold(meeting.seconds, f64::max);
        match meeting.collective {
            Collective::AllReduce => {
                // SAFETY: all have come, with as many bytes each.
                unsafe { shared.sum_own_part(&meeting, &brought, false) };
                drop(brought);
                let mut payload = Vec::new();
                for place in &meeting.places {
                    let range = part(&place.counts, place.dtype, shared.rank);
                    // SAFETY: this rank's own part, which is written by now.
                    unsafe { append(place.output, range, &mut payload) };
                }
                let state = shared.state();
                let head = Head { number: meeting.number, ..state.head(Kind::Part) };
                let came = state.came;
                state.post_to_all(Frame::new(head, vec![], payload));
                drop(state);
                let parts = shared.all(&meeting, |peer, frame| {
                    let bytes = meeting.places.iter().map(|place| part(&place.counts, place.dtype, peer).len());
                    (frame.head.kind, frame.head.meeting) == (Kind::Part, came)
                        && frame.payload().len() == bytes.sum::<usize>()
                })?;
                // SAFETY: as above.
                unsafe { shared.put_parts(&meeting, &parts) };
            }
            // SAFETY: as above.
            Collective::ReduceScatter => unsafe { shared.sum_own_part(&meeting, &brought, true) },
            Collective::AllGather => {
                for place in &meeting.places {
                    let range = part(&place.counts, place.dtype, shared.rank);
                    let to = place.output.wrapping_add(range.start);
                    if place.input != to.cast_const() {
                        // SAFETY: both are this rank's, and overlap only where they are the same.
                        unsafe { place.input.copy_to_nonoverlapping(to, range.len()) };
                    }
                }
                // SAFETY: as above.
                unsafe { shared.put_parts(&meeting, &brought) };
            }
            Collective::Send | Collective::Receive => unreachable!("a message has a peer, and is shown by its sender"),
        }
        Ok(ready + seconds)
    }

    fn show(&self, message: Meeting) -> Result<(), DeviceError> {
        let mut state = self.shared.state();
        state.agreed()?;
        let to = message.peer.expect("a message has a receiver") as usize;
        state.ways[to].shown.push_back(Shown { message, sent: false, taken: None });
        state.send_ahead(to);
        Ok(())
    }

    fn taken(&self, _: u32, peer: u32, number: u64) -> Result<f64, DeviceError> {
        let mut state = self.shared.state();
        loop {
            let shown = &mut state.ways[peer as usize].shown;
            let at = shown.iter().position(|shown| shown.message.number == number);
            if let Some((at, end)) = at.and_then(|at| Some((at, shown[at].taken?))) {
                shown.remove(at);
                return Ok(end);
            }
            state.agreed()?;
            assert!(at.is_some(), "bug: message {number} to rank {peer} has not been shown");
            state = self.shared.wait(state);
        }
    }

    fn withdraw(&self, _: u32) {
        self.shared.state().ways.iter_mut().for_each(|way| way.shown.clear());
    }

    fn lends(&self, rank: u32, bytes: Range<usize>) -> bool {
        let state = self.shared.state();
        let waiting = state.ways.iter().flat_map(|way| &way.shown).filter(|shown| !shown.sent);
        let mut places = waiting.flat_map(|shown| &shown.message.places);
        places.any(|place| {
            let first = place.input as usize;
            first < bytes.end && bytes.start < first + part(&place.counts, place.dtype, rank).len()
        })
    }

    fn give_up(&self, rank: u32, why: &str) {
        self.shared.state().give_up(rank, why);
        self.shared.changed.notify_all();
    }

    fn agreed(&self) -> Result<(), DeviceError> {
        self.shared.state().agreed()
    }

    fn clear(&self) {
        let attempt = self.shared.state().attempt;
        self.begin(attempt + 1);
    }
}
