//! Between devices of one process: ranks read each other's arenas where they are. No copy is made beside them.
//!
//! ```text
//!   all come ─► each sums up its own part over all ranks ─► all have ─► each takes the other parts ─► all have
//! ```
//! A sum is taken in the order of the ranks, by one of them, and the others copy it: everybody has the same bits. A message
//! is copied by its receiver, out of the arena of its sender.

use super::{Meeting, Place, Transport};
use crate::device::DeviceError;
use plimsoll_core::DType;
use plimsoll_program::op::Collective;
use std::collections::{HashMap, VecDeque};
use std::ops::{Add, Range};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// Elements that are summed up at once: they stay in the nearest cache.
const RUN: usize = 1024;

/// Where the devices of a team in one process meet.
pub struct Memory {
    ranks: u32,
    round_bytes: Option<u64>,
    epoch: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    gave_up: Option<(u32, String)>,
    /// How many meetings each rank has come to.
    came: HashMap<u32, u64>,
    tables: HashMap<u64, Table>,
    /// What is shown, by sender and receiver.
    shown: HashMap<(u32, u32), VecDeque<Shown>>,
}

/// A message on its way.
struct Shown {
    meeting: Arc<Meeting>,
    /// Whether its receiver is reading it.
    read: bool,
    /// When it was planned to have been taken.
    taken: Option<f64>,
}

/// A meeting.
#[derive(Default)]
struct Table {
    /// Those who have come, by their place at it.
    seats: Vec<Option<Arc<Meeting>>>,
    /// How many of them have done their part of the present stage, and the number of that.
    done: usize,
    stage: usize,
    /// How many are at work on others' memory, and whether one of them has panicked at it.
    working: usize,
    broken: bool,
    left: usize,
}

impl Memory {
    /// A place for so many devices.
    pub fn between(ranks: u32) -> Arc<Memory> {
        Memory::new(ranks, None)
    }

    /// The same where some of them bring their bytes in staging of that size.
    pub fn in_rounds(ranks: u32, round_bytes: u64) -> Arc<Memory> {
        Memory::new(ranks, Some(round_bytes))
    }

    fn new(ranks: u32, round_bytes: Option<u64>) -> Arc<Memory> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(Memory { ranks, round_bytes, epoch: Instant::now(), state, changed })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nobody panics while it is half changed.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits until all have come; they are given in the order of their seats.
    fn come(&self, meeting: &Arc<Meeting>) -> Result<Seated<'_>, DeviceError> {
        let mut state = self.state();
        state.agreed()?;
        let count = state.came.entry(meeting.rank).or_default();
        *count += 1;
        let key = *count;
        let table = state.tables.entry(key).or_default();
        table.seats.resize(self.ranks as usize, None);
        let seat = meeting.rank as usize;
        let other = table.seats.iter().flatten().find(|other| !alike(meeting, other));
        if let Some(other) = other.cloned() {
            return Err(self.differ(state, meeting, &other));
        }
        table.seats[seat] = Some(meeting.clone());
        self.changed.notify_all();
        loop {
            let table = state.tables.get_mut(&key).expect("it stands while one sits at it");
            if table.seats.iter().all(Option::is_some) {
                let all = table.seats.iter().flatten().cloned().collect();
                return Ok(Seated { memory: self, key, all, stage: 0 });
            }
            if let Err(gave_up) = state.agreed() {
                // Before all have come nobody has looked at this rank's memory, and now nobody will.
                let table = state.tables.get_mut(&key).expect("it stands while one sits at it");
                table.seats[seat] = None;
                if table.seats.iter().all(Option::is_none) {
                    state.tables.remove(&key);
                }
                return Err(gave_up);
            }
            state = self.wait(state);
        }
    }
}

impl Memory {
    /// A rank has come for something else than another: all give up.
    fn differ(&self, mut state: MutexGuard<State>, own: &Meeting, other: &Meeting) -> DeviceError {
        let why = format!("it came for collective {} when rank {} was in {}", own.number, other.rank, other.number);
        let (rank, why) = state.gave_up.get_or_insert((own.rank, why)).clone();
        self.changed.notify_all();
        DeviceError::Peer { rank, why }
    }

    /// Takes the next message from a rank.
    fn receive(&self, own: &Meeting, from: u32) -> Result<f64, DeviceError> {
        let key = (from, own.rank);
        let mut state = self.state();
        let message = loop {
            state.agreed()?;
            let next = state.shown.entry(key).or_default().iter_mut().find(|shown| shown.taken.is_none());
            if let Some(next) = next {
                if !alike(own, &next.meeting) {
                    let other = next.meeting.clone();
                    return Err(self.differ(state, own, &other));
                }
                next.read = true;
                break next.meeting.clone();
            }
            state = self.wait(state);
        };
        drop(state);
        // SAFETY: it is shown, and being read, so that it stays where it is; see `take`.
        unsafe { take(own, &message) };
        let end = own.ready.max(message.ready) + own.seconds.max(message.seconds);
        let mut state = self.state();
        let list = state.shown.entry(key).or_default();
        let place = list.iter_mut().find(|shown| Arc::ptr_eq(&shown.meeting, &message));
        let shown = place.expect("nobody withdraws what is being read");
        (shown.read, shown.taken) = (false, Some(end));
        self.changed.notify_all();
        Ok(end)
    }
}

impl State {
    /// That nobody has given up.
    fn agreed(&self) -> Result<(), DeviceError> {
        match &self.gave_up {
            Some((rank, why)) => Err(DeviceError::Peer { rank: *rank, why: why.clone() }),
            None => Ok(()),
        }
    }
}

/// Whether two ranks mean the same collective.
fn alike(a: &Meeting, b: &Meeting) -> bool {
    let messages = |m: &Meeting| matches!(m.collective, Collective::Send | Collective::Receive);
    let counts = |m: &Meeting| -> Vec<(DType, Vec<u64>)> {
        m.places.iter().map(|place| (place.dtype, place.counts.clone())).collect()
    };
    let sizes = |m: &Meeting| -> Vec<u64> {
        m.places.iter().map(|place| place.counts[m.rank as usize] * place.dtype.bytes()).collect()
    };
    match messages(a) && messages(b) {
        true => a.number == b.number && sizes(a) == sizes(b),
        false => (a.number, a.collective) == (b.number, b.collective) && counts(a) == counts(b),
    }
}

/// A meeting to which all have come. From now on it goes on to its end, whoever gives up: all that is done is to move
/// bytes that are there.
struct Seated<'a> {
    memory: &'a Memory,
    key: u64,
    all: Vec<Arc<Meeting>>,
    stage: usize,
}

impl Seated<'_> {
    fn table<'s>(&self, state: &'s mut MutexGuard<'_, State>) -> &'s mut Table {
        state.tables.get_mut(&self.key).expect("it stands while one sits at it")
    }

    /// Works on the memory of all, then waits until everybody has.
    fn stage(&mut self, work: impl FnOnce(&[Arc<Meeting>])) -> Result<(), DeviceError> {
        {
            let mut state = self.memory.state();
            let table = self.table(&mut state);
            if table.broken {
                return self.break_up(state);
            }
            table.working += 1;
        }
        let at_work = AtWork(self);
        work(&self.all);
        drop(at_work);
        let mut state = self.memory.state();
        self.stage += 1;
        loop {
            let table = self.table(&mut state);
            if table.broken {
                return self.break_up(state);
            }
            if table.stage >= self.stage {
                return Ok(());
            }
            state = self.memory.wait(state);
        }
    }

    /// Leaves a meeting that somebody has panicked in, when nobody is at work any more.
    fn break_up(&self, mut state: MutexGuard<'_, State>) -> Result<(), DeviceError> {
        while self.table(&mut state).working > 0 {
            state = self.memory.wait(state);
        }
        Err(DeviceError::Peer { rank: self.all[0].rank, why: "a device came upon a bug while bytes moved".into() })
    }
}

impl Drop for Seated<'_> {
    fn drop(&mut self) {
        let mut state = self.memory.state();
        let seats = self.all.len();
        let table = self.table(&mut state);
        table.left += 1;
        if table.left == seats {
            state.tables.remove(&self.key);
        }
    }
}

/// While a rank works on the memory of all. What it leaves behind in a panic is a broken meeting, whose memory nobody
/// takes away before all have stopped reading it.
struct AtWork<'a, 's>(&'a Seated<'s>);

impl Drop for AtWork<'_, '_> {
    fn drop(&mut self) {
        let Seated { memory, all, .. } = self.0;
        let mut state = memory.state();
        let table = self.0.table(&mut state);
        table.working -= 1;
        table.done += 1;
        if table.done == all.len() {
            (table.done, table.stage) = (0, table.stage + 1);
        }
        table.broken |= std::thread::panicking();
        memory.changed.notify_all();
        if std::thread::panicking() {
            while self.0.table(&mut state).working > 0 {
                state = memory.wait(state);
            }
        }
    }
}

impl Transport for Memory {
    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn epoch(&self) -> Instant {
        self.epoch
    }

    fn round_bytes(&self) -> Option<u64> {
        self.round_bytes
    }

    fn meet(&self, meeting: Meeting) -> Result<f64, DeviceError> {
        if let (Collective::Receive, Some(from)) = (meeting.collective, meeting.peer) {
            return self.receive(&meeting, from);
        }
        let meeting = Arc::new(meeting);
        let mut seated = self.come(&meeting)?;
        match meeting.collective {
            Collective::AllReduce => {
                // SAFETY: see `sum_own_part`, `take_parts`: all have come; stages part what is summed from what is taken.
                seated.stage(|all| unsafe { sum_own_part(&meeting, all, false) })?;
                // SAFETY: as above.
                seated.stage(|all| unsafe { take_parts(&meeting, all) })?;
            }
            // SAFETY: as above.
            Collective::ReduceScatter => seated.stage(|all| unsafe { sum_own_part(&meeting, all, true) })?,
            // SAFETY: as above.
            Collective::AllGather => seated.stage(|all| unsafe { gather(&meeting, all) })?,
            Collective::Send | Collective::Receive => unreachable!("a message has a peer, and is shown by its sender"),
        }
        let ready = seated.all.iter().map(|other| other.ready).fold(0.0, f64::max);
        let seconds = seated.all.iter().map(|other| other.seconds).fold(0.0, f64::max);
        Ok(ready + seconds)
    }

    fn show(&self, message: Meeting) -> Result<(), DeviceError> {
        let mut state = self.state();
        state.agreed()?;
        let to = message.peer.expect("a message has a receiver");
        let shown = Shown { read: false, taken: None, meeting: Arc::new(message) };
        state.shown.entry((shown.meeting.rank, to)).or_default().push_back(shown);
        self.changed.notify_all();
        Ok(())
    }

    fn taken(&self, rank: u32, peer: u32, number: u64) -> Result<f64, DeviceError> {
        let mut state = self.state();
        loop {
            let list = state.shown.entry((rank, peer)).or_default();
            let at = list.iter().position(|shown| shown.meeting.number == number);
            let taken = at.and_then(|at| list[at].taken);
            if let (Some(at), Some(end)) = (at, taken) {
                list.remove(at);
                return Ok(end);
            }
            state.agreed()?;
            assert!(at.is_some(), "bug: message {number} to rank {peer} has not been shown");
            state = self.wait(state);
        }
    }

    fn withdraw(&self, rank: u32) {
        let mut state = self.state();
        while state.shown.iter().any(|((from, _), list)| *from == rank && list.iter().any(|shown| shown.read)) {
            state = self.wait(state);
        }
        state.shown.retain(|(from, _), _| *from != rank);
    }

    fn lends(&self, rank: u32, bytes: Range<usize>) -> bool {
        let state = self.state();
        let lists = state.shown.iter().filter(|((from, _), _)| *from == rank);
        let mut places =
            lists.flat_map(|(_, list)| list.iter().filter(|shown| shown.taken.is_none())).flat_map(|shown| {
                let size = |place: &Place| (place.counts[rank as usize] * place.dtype.bytes()) as usize;
                shown.meeting.places.iter().map(move |place| (place.input as usize, size(place)))
            });
        places.any(|(first, size)| first < bytes.end && bytes.start < first + size)
    }

    fn give_up(&self, rank: u32, why: &str) {
        let mut state = self.state();
        state.gave_up.get_or_insert_with(|| (rank, why.to_owned()));
        self.changed.notify_all();
    }

    fn agreed(&self) -> Result<(), DeviceError> {
        self.state().agreed()
    }

    fn clear(&self) {
        let mut state = self.state();
        assert!(state.tables.is_empty(), "bug: a rank is still in a meeting");
        let read = state.shown.values().flatten().any(|shown| shown.read);
        assert!(!read, "bug: a rank is still reading a message");
        *state = State::default();
    }
}

/// The elements of a rank's part.
fn part(counts: &[u64], rank: usize) -> Range<usize> {
    let first: u64 = counts[..rank].iter().sum();
    first as usize..(first + counts[rank]) as usize
}

/// What the functions below do with the memory of all is sound because of who does it when:
/// - Every rank has lent its pieces until it is back from `meet` (the promise of `Meeting::new`), which is not before all
///   have ended the last stage, or, where one panics, before nobody is at work any more. The lock between two stages
///   orders what was written before one with what is read after it.
/// - All ranks count the same parts (`alike`), and parts do not overlap. In a stage a rank writes only its own memory: for
///   a sum its own part, which nobody else reads or writes in that stage, and afterwards the others' parts, while its own
///   is read. What is gathered or sent is written where nobody reads; what is read is not written by anybody.
/// - A message stands where it is shown until its sender is back from `taken` or `withdraw`, which is not while it is read.
///
/// Sums up a rank's own part of every piece over all ranks, in their order; into its place, or added to what is there.
///
/// # Safety
/// In the first stage of a meeting, in which all ranks do the same.
unsafe fn sum_own_part(own: &Meeting, all: &[Arc<Meeting>], adds: bool) {
    for (number, place) in own.places.iter().enumerate() {
        let range = part(&place.counts, own.rank as usize);
        let (size, first) = (place.dtype.bytes() as usize, if adds { 0 } else { range.start });
        // SAFETY: the part lies within every rank's piece; for who touches it see above.
        unsafe {
            let inputs: Vec<_> = all.iter().map(|rank| rank.places[number].input.add(range.start * size)).collect();
            sum_elements(place.dtype, &inputs, place.output.add(first * size), range.len(), adds);
        }
    }
}

/// `into` = the sum of `inputs` in their order, or that is added to it.
///
/// # Safety
/// All have so many elements, which nobody else writes meanwhile; `into` is aligned, and overlaps an input only where it is
/// it.
pub(super) unsafe fn sum_elements(dtype: DType, inputs: &[*const u8], into: *mut u8, elements: usize, adds: bool) {
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            DType::F32 => sum::<f32>(inputs, into.cast(), elements, adds),
            DType::F64 => sum::<f64>(inputs, into.cast(), elements, adds),
            other => unreachable!("sums are not taken in {other}"),
        }
    }
}

/// See [`sum_elements`].
///
/// # Safety
/// As there.
unsafe fn sum<T: Copy + Default + Add<Output = T>>(inputs: &[*const u8], into: *mut T, elements: usize, adds: bool) {
    let mut run = [T::default(); RUN];
    for first in (0..elements).step_by(RUN) {
        let run = &mut run[..RUN.min(elements - first)];
        for (number, input) in inputs.iter().enumerate() {
            // SAFETY: in bounds. What comes from another process stands anywhere in its frame.
            let at = |i: usize| unsafe { input.cast::<T>().add(first + i).read_unaligned() };
            match number {
                0 => run.iter_mut().enumerate().for_each(|(i, sum)| *sum = at(i)),
                _ => run.iter_mut().enumerate().for_each(|(i, sum)| *sum = *sum + at(i)),
            }
        }
        // SAFETY: in bounds; and nobody else touches these elements.
        let into = unsafe { std::slice::from_raw_parts_mut(into.add(first), run.len()) };
        match adds {
            true => into.iter_mut().zip(run).for_each(|(into, sum)| *into = *into + *sum),
            false => into.copy_from_slice(run),
        }
    }
}

/// Takes the parts of the other ranks from where they have been summed up.
///
/// # Safety
/// In the stage after `sum_own_part`, in which all ranks do the same.
unsafe fn take_parts(own: &Meeting, all: &[Arc<Meeting>]) {
    for (number, place) in own.places.iter().enumerate() {
        for other in all.iter().filter(|other| other.rank != own.rank) {
            let (range, size) = (part(&place.counts, other.rank as usize), place.dtype.bytes() as usize);
            // SAFETY: within both pieces, which are of different ranks; for who touches them see above.
            unsafe {
                let from = other.places[number].output.add(range.start * size);
                from.copy_to_nonoverlapping(place.output.add(range.start * size), range.len() * size);
            }
        }
    }
}

/// Puts the parts of all ranks into the whole. A rank's own may stand in its place already.
///
/// # Safety
/// In the only stage of a meeting, in which all ranks do the same.
unsafe fn gather(own: &Meeting, all: &[Arc<Meeting>]) {
    for (number, place) in own.places.iter().enumerate() {
        for rank in all {
            let (range, size) = (part(&place.counts, rank.rank as usize), place.dtype.bytes() as usize);
            // SAFETY: within both pieces; the target is nobody's but this rank's, and the source is written by nobody.
            unsafe {
                let (from, to) = (rank.places[number].input, place.output.add(range.start * size));
                if from != to.cast_const() {
                    from.copy_to_nonoverlapping(to, range.len() * size);
                }
            }
        }
    }
}

/// Takes what the other end of a message shows.
///
/// # Safety
/// While the message is marked as being read.
unsafe fn take(own: &Meeting, message: &Meeting) {
    for (from, to) in message.places.iter().zip(&own.places) {
        let bytes = to.counts[own.rank as usize] * to.dtype.bytes();
        // SAFETY: both ends have as many bytes (`alike`), and they are of different ranks.
        unsafe { from.input.copy_to_nonoverlapping(to.output, bytes as usize) }
    }
}
