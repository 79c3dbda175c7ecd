//! How the devices of a team come together: the seat that each has, and what goes between them.
//!
//! A collective is a *meeting*: every rank that takes part comes with the places of its pieces, nobody's bytes are touched
//! before all have come, and nobody goes before all have what they came for. So coming is agreeing: a rank that cannot go
//! on gives up instead, and all who wait for it, or would, are told so and leave with their memory as it was.
//!
//! A *message* has two ends that need not be there at the same time: its sender shows it and goes on, the receiver takes it
//! when it comes to it, and the sender's wait is over when it has been taken. Until then the shown bytes are lent, from one
//! Program into the next if need be: the device withdraws what nobody has taken before it fails, is closed, or goes over to
//! another plan, and refuses to overwrite it.
//!
//! Here is what every way of carrying bytes has in common; `memory` carries them between devices of one process, `wire`
//! between processes, and `rounds` cuts what goes through staging into pieces of its size.

pub mod memory;
pub(crate) mod rounds;
pub mod wire;

use crate::cpu::executor::Site;
use crate::device::DeviceError;
use plimsoll_core::DType;
use plimsoll_program::Operand;
use plimsoll_program::op::{Collective, Exchange, Piece};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// What carries bytes between the devices of a team.
pub trait Transport: Send + Sync {
    /// How many devices there are.
    fn ranks(&self) -> u32;

    /// When the clocks of simulated devices begin: what one of them waits for is planned in the time of all.
    fn epoch(&self) -> Instant;

    /// Bytes that a meeting is about at most, where some device of the team has to bring them in staging: a collective is
    /// then as many meetings as it takes (`rounds`). Else it is one.
    fn round_bytes(&self) -> Option<u64> {
        None
    }

    /// Takes part in a collective and comes back when this rank has its result and nobody reads its pieces any more.
    /// Every rank comes to the meetings of the whole team in the same order, and a receiver to messages in the order in
    /// which they have been shown. Gives the planned end: the latest of all ranks' beginnings, and the longest time that
    /// one of them plans for it.
    ///
    /// # Errors
    /// [`DeviceError::Peer`] where a rank has given up. Nothing has then been read or written.
    fn meet(&self, meeting: Meeting) -> Result<f64, DeviceError>;

    /// Shows a message to its receiver, who may take it from now on.
    ///
    /// # Errors
    /// As above.
    fn show(&self, message: Meeting) -> Result<(), DeviceError>;

    /// Waits until the message of this number has been taken, and gives the planned end of that. Nobody reads it any more.
    ///
    /// # Errors
    /// As above; the message may still be shown.
    fn taken(&self, rank: u32, peer: u32, number: u64) -> Result<f64, DeviceError>;

    /// What a rank has shown and nobody has taken is gone; comes back when nobody reads it any more.
    fn withdraw(&self, rank: u32);

    /// Whether a rank lends some of these bytes.
    fn lends(&self, rank: u32, bytes: Range<usize>) -> bool;

    /// A rank cannot go on: who waits for it fails, and so does whoever comes, until this is cleared. The first to give
    /// up is the one that is named.
    fn give_up(&self, rank: u32, why: &str);

    /// That nobody has given up: for who waits elsewhere for the others.
    ///
    /// # Errors
    /// [`DeviceError::Peer`] where a rank has.
    fn agreed(&self) -> Result<(), DeviceError>;

    /// Everything is as at the beginning. Only where no rank is in a Program.
    fn clear(&self);
}

/// A device's place in its team.
#[derive(Clone)]
pub struct Seat {
    /// Which device it is.
    pub rank: u32,
    /// How it meets the others.
    pub transport: Arc<dyn Transport>,
    /// Whether all of the team are GPUs that have the same NCCL: then its collectives go that way.
    pub nccl: bool,
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "seat {} of {}", self.rank, self.transport.ranks())
    }
}

impl Seat {
    /// The others need not wait for this rank.
    pub(crate) fn give_up(&self, why: &str) {
        self.transport.give_up(self.rank, why);
    }

    /// From here on its memory is its own.
    pub(crate) fn withdraw(&self) {
        self.transport.withdraw(self.rank);
    }

    /// That a range of its memory may be written.
    ///
    /// # Panics
    /// Where it is lent: a bug of the caller.
    pub(crate) fn may_write(&self, bytes: Range<usize>) {
        assert!(!self.transport.lends(self.rank, bytes), "bug: a message is on its way from there");
    }
}

/// Does work of a device that may have a seat. If it fails by itself, or panics, the others are told; and whyever it fails,
/// it lends nothing afterwards.
pub(crate) fn seated<R>(seat: Option<&Seat>, work: impl FnOnce() -> Result<R, DeviceError>) -> Result<R, DeviceError> {
    struct Panicking<'a>(Option<&'a Seat>);
    impl Drop for Panicking<'_> {
        fn drop(&mut self) {
            if let (true, Some(seat)) = (std::thread::panicking(), self.0) {
                seat.give_up("it came upon a bug");
                seat.withdraw();
            }
        }
    }
    let _guard = Panicking(seat);
    let result = work();
    if let (Err(error), Some(seat)) = (&result, seat) {
        if !error.is_peers() {
            seat.give_up(&error.to_string());
        }
        seat.withdraw();
    }
    result
}

/// A rank's part in a collective.
pub struct Meeting {
    /// Who comes.
    pub rank: u32,
    /// What for.
    pub collective: Collective,
    /// The other end of a message.
    pub peer: Option<u32>,
    /// The collective's number: all must mean the same one.
    pub number: u64,
    /// The planned time at which this rank is ready, in seconds since the epoch.
    pub ready: f64,
    /// How long it plans the collective to take.
    pub seconds: f64,
    places: Vec<Place>,
}

/// Where a piece of a collective stands in the memory of one rank, which lends it for as long as it is in the meeting.
pub(crate) struct Place {
    /// The first byte of what it gives.
    pub input: *const u8,
    /// The first byte of what it gets.
    pub output: *mut u8,
    /// The type of both.
    pub dtype: DType,
    /// Elements of each rank's part.
    pub counts: Vec<u64>,
}

// SAFETY: a place is lent memory, which belongs to no thread; who reads and writes which bytes of it when is the
// transport's business, under the promise of `Meeting::new`.
unsafe impl Send for Place {}
// SAFETY: as above; through a shared place safe code reads only sizes.
unsafe impl Sync for Place {}

impl Meeting {
    /// What this rank brings to a collective, wherever it stands.
    ///
    /// # Safety
    /// As for [`Meeting::new`].
    pub(crate) unsafe fn of(seat: &Seat, exchange: &Exchange, number: u64, places: Vec<Place>) -> Meeting {
        let Exchange { collective, peer, .. } = *exchange;
        Meeting { rank: seat.rank, collective, peer, number, ready: 0.0, seconds: 0.0, places }
    }

    /// What this rank brings to what all have of each other, beside the collectives of a Program.
    ///
    /// # Safety
    /// As for [`Meeting::new`].
    pub(crate) unsafe fn gather(seat: &Seat, number: u64, place: Place) -> Meeting {
        let (ready, seconds) = (0.0, 0.0);
        let Seat { rank, .. } = *seat;
        Meeting { rank, collective: Collective::AllGather, peer: None, number, ready, seconds, places: vec![place] }
    }

    /// The same in rounds; each is planned to take as long as all, since only the last one's end counts.
    fn rounds(&self, round_bytes: u64) -> impl Iterator<Item = Meeting> {
        let pieces: Vec<_> = self.places.iter().map(|place| (place.dtype, place.counts.clone())).collect();
        let rounds = rounds::rounds(self.collective, self.rank as usize, &pieces, round_bytes);
        rounds.into_iter().map(|round| {
            let part = |cut: rounds::Cut| {
                let Place { input, output, dtype, .. } = self.places[cut.piece];
                let at = |range: &Range<u64>| (range.start * dtype.bytes()) as usize;
                Place {
                    input: input.wrapping_add(at(&cut.reads)),
                    output: output.wrapping_add(at(&cut.writes)),
                    dtype,
                    counts: cut.counts,
                }
            };
            Meeting { places: round.into_iter().map(part).collect(), ..*self }
        })
    }

    /// What this rank brings to a collective.
    ///
    /// # Safety
    /// Until [`Transport::meet`] has come back, or, of a message that is shown, until [`Transport::taken`] has, or
    /// [`Transport::withdraw`], the memory of every piece stays where it is, the bytes of its input may be
    /// read and those of its output written by any thread, and nobody else writes the former or touches the latter.
    /// Inputs and outputs overlap only where they are the same range of a sum for all, or where a rank's own part stands
    /// in its place in the whole.
    unsafe fn new(site: Site, seat: &Seat, exchange: &Exchange, ready: f64, seconds: f64) -> Meeting {
        let place = |piece: &Piece| {
            let (read, written) = exchange.elements(piece);
            let dtype = site.set.tensor(piece.input.tensor).dtype;
            let at = |operand: &Operand, elements: u64| {
                let tensor = site.set.tensor(operand.tensor);
                let offset = site.placement.first_byte(site.set, operand, site.variable, site.micro_batch);
                // SAFETY: the promise of this function; the slice itself is given up at once for its address, which
                // stays good for as long as the arena does.
                unsafe {
                    site.spaces
                        .of(tensor.space)
                        .slice_mut::<u8>(offset, (elements * dtype.bytes()) as usize)
                        .as_mut_ptr()
                }
            };
            Place {
                input: at(&piece.input, read),
                output: at(&piece.output, written),
                dtype,
                counts: piece.counts.clone(),
            }
        };
        Meeting {
            rank: seat.rank,
            collective: exchange.collective,
            peer: exchange.peer,
            number: exchange.sequence.at(site.variable, site.micro_batch) as u64,
            ready,
            seconds,
            places: exchange.pieces.iter().map(place).collect(),
        }
    }
}

/// Begins a collective of a Program that is planned to be ready then and to take so long: a message is shown, everything
/// else done. Gives its planned end.
///
/// Where it goes in rounds, and a rank gives up between two of them, what this rank gets may be there in part.
///
/// The same is promised as of every op that runs at a site: while it does, nobody writes bytes that it touches, or touches
/// those that it writes.
pub(crate) fn exchange(
    site: Site,
    seat: Option<&Seat>,
    exchange: &Exchange,
    ready: f64,
    seconds: f64,
) -> Result<f64, DeviceError> {
    let alone = DeviceError::Unsupported { op: "a collective", device: "a device without a team" };
    let seat = seat.ok_or(alone)?;
    // SAFETY: the arenas are borrowed by the site until `meet` is back; the rest is what callers promise of every op, and
    // of operands `passes::check`: they lie in their tensors, which have disjoint bytes. What a message shows no op of its
    // phase writes before the wait (`passes::check`), nor does the host (`Seat::may_write`), and devices withdraw it before
    // they give up their arenas or fail, after which other Programs run.
    let meeting = unsafe { Meeting::new(site, seat, exchange, ready, seconds) };
    let begin = |meeting| match exchange.collective {
        Collective::Send => seat.transport.show(meeting).map(|()| ready),
        _ => seat.transport.meet(meeting),
    };
    match seat.transport.round_bytes() {
        None => begin(meeting),
        Some(bytes) => meeting.rounds(bytes).try_fold(ready, |_, round| begin(round)),
    }
}

/// Ends a collective of a Program: a message has been taken, everything else is over already. Gives the planned end.
pub(crate) fn ended(site: Site, seat: Option<&Seat>, exchange: &Exchange, ready: f64) -> Result<f64, DeviceError> {
    let (Some(seat), Collective::Send, Some(peer)) = (seat, exchange.collective, exchange.peer) else {
        return Ok(ready);
    };
    let number = exchange.sequence.at(site.variable, site.micro_batch) as u64;
    let shown = seat.transport.round_bytes().map_or(1, |bytes| {
        let form = |piece: &Piece| (site.set.tensor(piece.input.tensor).dtype, piece.counts.clone());
        let forms: Vec<_> = exchange.pieces.iter().map(form).collect();
        rounds::rounds(exchange.collective, seat.rank as usize, &forms, bytes).len()
    });
    (0..shown).try_fold(ready, |end, _| Ok(seat.transport.taken(seat.rank, peer, number)?.max(end)))
}
