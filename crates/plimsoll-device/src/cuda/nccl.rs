//! NCCL: the GPUs of a team exchange out of their own memory, over NVLink, the bus or the network, as the library finds
//! them. Where every device of a team is a GPU that has the same NCCL, its collectives go this way; else, and where NCCL
//! refuses, they go through staging (`collectives`).
//!
//! **Agreement.** Nobody enters NCCL alone: before each collective the ranks meet at the team's transport, where each says
//! whether it has a communicator. So a rank that cannot go on gives up there, as everywhere, and nobody waits for it on the
//! device. The first time all make one together, and try it; if one of them cannot, all go through staging from then on.
//!
//! **Sums** have the bits of every other transport: each rank gets the others' bytes of its own part, sums up in the order
//! of ranks with a kernel of ours, and gives its result to all. No reduction of NCCL's is used.
//!
//! **Loss.** The host waits for the end of each collective, and looks meanwhile whether somebody has given up: then the
//! communicator is aborted, which ends what is under way on the device, before anything relies on it.
//!
//! **Memory** that a communicator holds beside the arena is planned with [`CHARGES`]; one that turns out to hold more is
//! closed again, and staging takes its place. Calls do not block: a status says how far they are.

use super::collectives::Stands;
use super::compile::Compiler;
use super::driver::{Address, Context, CudaError, Event, Function, Module, Stream, library};
use super::headers::{Passed, Structure, Word, numbers, structure};
use super::kernels::launch::{Launch, Parts, sum_ranks};
use super::kernels::{Family, Real, Unit};
use crate::device::DeviceError;
use crate::transport::{Meeting, Place, Seat};
use plimsoll_core::{Bytes, CollectivesBy, DType};
use plimsoll_program::op::{Collective, Exchange};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What every function of NCCL returns.
type Status = c_int;
/// Something of NCCL's that is only passed on.
type Handle = *mut c_void;

library! {
    /// The functions of NCCL that are called, and no others.
    Library {
        fn ncclGetVersion(version: *mut c_int) -> Status;
        fn ncclGetErrorString(status: Status) -> *const c_char;
        fn ncclGetLastError(communicator: Handle) -> *const c_char;
        fn ncclGetUniqueId(id: *mut Id) -> Status;
        fn ncclCommInitRankConfig(
            communicator: *mut Handle, ranks: c_int, id: Id, rank: c_int, config: *mut Config,
        ) -> Status;
        fn ncclCommGetAsyncError(communicator: Handle, status: *mut Status) -> Status;
        fn ncclCommAbort(communicator: Handle) -> Status;
        fn ncclGroupStart() -> Status;
        fn ncclGroupEnd() -> Status;
        fn ncclSend(
            from: *const c_void, count: usize, dtype: c_int, peer: c_int, communicator: Handle, stream: Handle,
        ) -> Status;
        fn ncclRecv(
            to: *mut c_void, count: usize, dtype: c_int, peer: c_int, communicator: Handle, stream: Handle,
        ) -> Status;
    }
}

/// `ncclUniqueId`: what the ranks of a communicator find each other by.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Id([u8; ID_BYTES]);

/// `ncclConfig_t` of NCCL 2.18: newer ones take it, and set what it lacks as they would.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// What nccl.h calls their fields.
pub(super) const STRUCTURES: &[Structure] = &[
    structure!(ncclUniqueId, Id {}),
    structure!(ncclConfig_t, Config {
        "size" => size: usize, "magic" => magic: c_uint, "version" => version: c_uint, "blocking" => blocking: c_int,
        "cgaClusterSize" => cga_cluster_size: c_int, "minCTAs" => min_ctas: c_int, "maxCTAs" => max_ctas: c_int,
        "netName" => net_name: *const c_char, "splitShare" => split_share: c_int,
    } ..),
];

impl Passed for Id {
    const AS: Word = Word::Structure(ID_BYTES);
}

numbers! {
    /// Values of the enumerations and constants in nccl.h.
    NUMBERS {
        NCCL_UNIQUE_ID_BYTES => ID_BYTES: usize = 128;
        NCCL_API_MAGIC => CONFIG_MAGIC: c_uint = 0xcafe_beef;
        NCCL_CONFIG_UNDEF_INT => UNDEFINED: c_int = c_int::MIN;
        ncclInProgress => IN_PROGRESS: Status = 7;
        ncclInt8 => INT8: c_int = 0;
    }
}

const ID_WORDS: usize = ID_BYTES / 4;
/// What [`Config`] is of.
const CONFIG_VERSION: c_uint = 21_800;

/// The oldest NCCL that is used: 2.18, the first with all that is in [`Config`].
const OLDEST: c_int = 21_800;

/// Scratch that everything goes through: NCCL touches plain memory alone, since the arena is mapped for its own GPU only.
pub const SCRATCH_BYTES: u64 = 64 << 20;
/// What a communicator is assumed to hold beside it: no GPU has said it yet (docs/measured/gpu.md).
const ASSUMED_BYTES: Bytes = Bytes::mib(512);
/// What a GPU holds for NCCL beside its arena, at most.
pub const CHARGES: Bytes = Bytes(ASSUMED_BYTES.0 + SCRATCH_BYTES);

/// Cuts that go at once at most: a group of NCCL's holds so many messages for each pair of ranks.
const CUTS: usize = 64;
/// Bytes that are sent to each other rank for a trial, at most.
const TRIED_BYTES: u64 = 4 << 20;
/// Where slots begin in scratch.
const STEP_BYTES: u64 = 256;

/// After so long a communicator that does not come about is given up.
const OPENS: Duration = Duration::from_secs(60);
/// How long what is under way may take to end when somebody has given up: who did may have been in it to the end.
const GRACE: Duration = Duration::from_secs(2);
/// How long an error of NCCL's waits for the team to say who is gone.
const EXPLAINED: Duration = Duration::from_secs(90);
/// How long the host looks elsewhere while it waits.
const LOOK: Duration = Duration::from_micros(50);

impl Library {
    /// The version in one number: 22 809 is 2.28.9.
    fn number(&self) -> Option<c_int> {
        let mut number = 0;
        // SAFETY: writes one integer.
        (unsafe { (self.ncclGetVersion)(&mut number) } == 0).then_some(number)
    }

    /// A status as a result.
    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.check_of(ptr::null_mut(), what, status)
    }

    /// The same of what belongs to a communicator.
    fn check_of(&self, communicator: Handle, what: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: gives a string that lives as long as the library.
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: not null, with a zero at its end, as the documentation says.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: both take any status, or a communicator that lives or none.
        let (name, last) = unsafe { ((self.ncclGetErrorString)(status), (self.ncclGetLastError)(communicator)) };
        let says =
            [text(name), text(last)].into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join(": ");
        Err(CudaError::Nccl { what, says })
    }
}

/// The version of a library of NCCL's, `2.28.9`; none where it cannot be used.
pub fn version(path: &Path) -> Option<String> {
    let number = Library::load(path).ok()?.number().filter(|number| *number >= OLDEST)?;
    Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

/// One GPU's part in the exchanges of its team by NCCL.
pub struct Nccl {
    library: Arc<Library>,
    compiler: Arc<Compiler>,
    context: Arc<Context>,
    scratch_bytes: u64,
    state: State,
}

enum State {
    /// There is none yet, or no more.
    Closed,
    Open(Box<Communicator>),
    /// This rank, or another one, cannot: why, where it was this one.
    Refused(Option<String>),
}

// What the ranks tell each other.
const REFUSED: u32 = 0;
const CLOSED: u32 = 1;
const OPEN: u32 = 2;

impl State {
    fn word(&self) -> u32 {
        match self {
            State::Closed => CLOSED,
            State::Open(_) => OPEN,
            State::Refused(_) => REFUSED,
        }
    }
}

impl Nccl {
    /// Nothing is taken before the first collective; then `scratch_bytes` are, as many on every rank.
    pub fn new(library: &Arc<Library>, compiler: &Arc<Compiler>, context: &Arc<Context>, scratch_bytes: u64) -> Nccl {
        let (library, compiler, context) = (library.clone(), compiler.clone(), context.clone());
        Nccl { library, compiler, context, scratch_bytes, state: State::Closed }
    }

    /// Whether collectives go this way now; none before the first one.
    pub fn used(&self) -> Option<CollectivesBy> {
        match &self.state {
            State::Closed => None,
            State::Open(_) => Some(CollectivesBy::Nccl),
            State::Refused(why) => Some(CollectivesBy::Host { why: why.clone() }),
        }
    }

    /// What all ranks agree on for a collective of this number: NCCL, or none of it.
    ///
    /// # Errors
    /// Where another rank cannot go on.
    fn agreed(&mut self, seat: &Seat, number: u64) -> Result<Option<&mut Communicator>, DeviceError> {
        loop {
            let ranks = seat.transport.ranks() as usize;
            let words = gathered(seat, number, &[self.state.word()], vec![1; ranks])?;
            if words.contains(&REFUSED) {
                if !matches!(self.state, State::Refused(_)) {
                    self.state = State::Refused(None);
                }
                return Ok(None);
            }
            if words.iter().all(|word| *word == OPEN) {
                let State::Open(communicator) = &mut self.state else { unreachable!("it has said so") };
                return Ok(Some(communicator));
            }
            self.state = State::Closed;
            self.state = match self.open(seat, number)? {
                Ok(communicator) => State::Open(Box::new(communicator)),
                Err(why) => State::Refused(Some(why)),
            };
        }
    }

    /// Takes part in a collective of this number, in the order of `stream`, where all agree on NCCL for it: then it is over
    /// when this comes back. Whether they do.
    ///
    /// # Errors
    /// Where this rank or another one cannot go on: what it gets may then be there in part.
    ///
    /// # Safety
    /// As for [`Communicator::exchange`].
    pub unsafe fn meet(
        &mut self,
        exchange: &Exchange,
        number: u64,
        pieces: &[Stands],
        seat: &Seat,
        stream: &Stream,
    ) -> Result<bool, DeviceError> {
        let Some(communicator) = self.agreed(seat, number)? else { return Ok(false) };
        // SAFETY: as the caller promises.
        let done = unsafe { communicator.exchange(exchange, pieces, seat, stream) };
        done.map(|()| true).map_err(|error| {
            // What is under way ends with it.
            self.close();
            let began = Instant::now();
            while let DeviceError::Cuda(CudaError::Nccl { .. }) = error
                && began.elapsed() < EXPLAINED
            {
                if let Err(peer) = seat.transport.agreed() {
                    return peer;
                }
                thread::sleep(LOOK);
            }
            error
        })
    }

    /// Gives the communicator back; the next collective begins with a new one.
    pub fn close(&mut self) {
        if let State::Open(_) = self.state {
            self.state = State::Closed;
        }
    }

    /// What the communicator holds on the GPU, beside the arena.
    pub fn held(&self) -> Bytes {
        match &self.state {
            State::Open(communicator) => communicator.held,
            _ => Bytes::ZERO,
        }
    }

    /// Makes a communicator with all others, and tries it. Says why this rank could not.
    fn open(&self, seat: &Seat, number: u64) -> Result<Result<Communicator, String>, DeviceError> {
        let (free, _) = self.context.memory()?;
        // What this rank needs for itself comes first: where that fails, nobody begins to look for it.
        let prepared = Communicator::prepare(self, seat);
        let mut own = vec![u32::from(prepared.is_ok())];
        if seat.rank == 0 {
            let mut id = Id([0; ID_BYTES]);
            // SAFETY: writes one id.
            let made = self.library.check("make an id", unsafe { (self.library.ncclGetUniqueId)(&mut id) });
            own[0] &= u32::from(made.is_ok());
            own.extend(id.0.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)));
        }
        let words = |rank| if rank == 0 { 1 + ID_WORDS as u64 } else { 1 };
        let found = gathered(seat, number, &own, (0..seat.transport.ranks()).map(words).collect())?;
        let (id_words, others) = found[1..].split_at(ID_WORDS);
        let mut communicator = match prepared {
            Ok(communicator) => communicator,
            Err(error) if error.is_loss() => return Err(error),
            Err(error) => return Ok(Err(error.to_string())),
        };
        if found[0] == 0 || others.contains(&0) {
            return Ok(Err("another rank cannot".to_owned()));
        }
        let mut id = Id([0; ID_BYTES]);
        id.0.as_chunks_mut::<4>().0.iter_mut().zip(id_words).for_each(|(to, word)| *to = word.to_ne_bytes());
        // In a stream of its own: others may be far from what they wait for.
        let stream = Stream::new(&self.context)?;
        match communicator.joins(seat, id).and_then(|()| communicator.tries(seat, &stream)) {
            Ok(()) => {}
            Err(DeviceError::Cuda(error)) if !DeviceError::from(error.clone()).is_loss() => {
                return Ok(Err(error.to_string()));
            }
            Err(error) => return Err(error),
        }
        let held = free.saturating_sub(self.context.memory()?.0);
        if held > CHARGES {
            return Ok(Err(format!("it holds {held} on the gpu, more than the {CHARGES} that were planned with")));
        }
        communicator.held = held.max(Bytes(self.scratch_bytes));
        Ok(Ok(communicator))
    }
}

/// Brings together the words of all ranks, so many of each, in their order.
fn gathered(seat: &Seat, number: u64, own: &[u32], counts: Vec<u64>) -> Result<Vec<u32>, DeviceError> {
    let first = counts[..seat.rank as usize].iter().sum::<u64>() as usize;
    let mut all = vec![0u32; counts.iter().sum::<u64>() as usize];
    all[first..first + own.len()].copy_from_slice(own);
    let output = all.as_mut_ptr().cast::<u8>();
    let place = Place { input: output.wrapping_add(4 * first), output, dtype: DType::I32, counts };
    // SAFETY: the words stay where they are until the meeting is over, and nobody else touches them; the own part stands
    // in its place.
    seat.transport.meet(unsafe { Meeting::gather(seat, number, place) })?;
    Ok(all)
}

/// The same elements of every rank's part of a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cut {
    piece: usize,
    /// Elements of each part, counted from its first.
    elements: Range<u64>,
    /// Where its slots stand in scratch: one for what goes to each other rank, then one for what comes of each.
    scratch: u64,
    /// Bytes from one slot to the next.
    stride: u64,
}

impl Cut {
    /// Which elements of a rank's part these are, where it has so many.
    fn of(&self, count: u64) -> Range<u64> {
        self.elements.start.min(count)..self.elements.end.min(count)
    }
}

/// Collectives in batches, each of which scratch has room for: alike on all ranks.
fn batches(ranks: usize, pieces: &[(DType, &[u64])], scratch_bytes: u64) -> Vec<Vec<Cut>> {
    let slots = 2 * (ranks as u64 - 1);
    let most = scratch_bytes / slots / STEP_BYTES * STEP_BYTES;
    assert!(most > 0, "bug: scratch of {scratch_bytes} bytes for {ranks} ranks");
    let mut batches: Vec<Vec<Cut>> = Vec::new();
    let mut used = scratch_bytes;
    for (piece, (dtype, counts)) in pieces.iter().enumerate() {
        let longest = counts.iter().copied().max().unwrap_or(0);
        let mut first = 0;
        while first < longest {
            let elements = first..longest.min(first + most / dtype.bytes());
            let stride = ((elements.end - elements.start) * dtype.bytes()).next_multiple_of(STEP_BYTES);
            if used + slots * stride > scratch_bytes || batches.last().is_none_or(|batch| batch.len() == CUTS) {
                batches.push(Vec::new());
                used = 0;
            }
            first = elements.end;
            batches.last_mut().expect("there is one").push(Cut { piece, elements, scratch: used, stride });
            used += slots * stride;
        }
    }
    batches
}

/// What ranks exchange by.
pub struct Communicator {
    library: Arc<Library>,
    context: Arc<Context>,
    handle: Handle,
    rank: u32,
    ranks: u32,
    scratch: Address,
    scratch_bytes: u64,
    held: Bytes,
    done: Event,
    sums: [(&'static str, Function); 2],
    _module: Module,
}

// SAFETY: a communicator belongs to no thread; it is used by one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// What it takes of this rank alone.
    fn prepare(of: &Nccl, seat: &Seat) -> Result<Communicator, DeviceError> {
        let Nccl { library, compiler, context, scratch_bytes, .. } = of;
        let unit = Unit::new(Family::Collective, Real::F32, 0);
        let cubins = compiler.cubins(&[unit], context.gpu().architecture)?;
        let module = Module::load(context, unit, cubins.first().expect("as many as units"))?;
        let function = |name| Ok::<_, CudaError>((name, module.function(name, 0)?));
        let sums = [function("sum_ranks_f32")?, function("sum_ranks_f64")?];
        let done = Event::new(context)?;
        Ok(Communicator {
            library: library.clone(),
            context: context.clone(),
            handle: ptr::null_mut(),
            rank: seat.rank,
            ranks: seat.transport.ranks(),
            scratch: context.allocate(*scratch_bytes)?,
            scratch_bytes: *scratch_bytes,
            held: Bytes::ZERO,
            done,
            sums,
            _module: module,
        })
    }

    /// Comes together with the others who have this id.
    fn joins(&mut self, seat: &Seat, id: Id) -> Result<(), DeviceError> {
        const WHAT: &str = "bring the ranks together";
        let mut config = Config {
            size: size_of::<Config>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        };
        // SAFETY: writes one handle; the config is what its size says, and is read before the call returns.
        let made = unsafe {
            let init = self.library.ncclCommInitRankConfig;
            init(&mut self.handle, self.ranks as c_int, id, self.rank as c_int, &mut config)
        };
        self.check(WHAT, made)?;
        self.proceeds(WHAT, seat)
    }

    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.library.check_of(self.handle, what, status)
    }

    /// How far the last call is: whether it is over.
    fn is_through(&self, what: &'static str) -> Result<bool, CudaError> {
        let mut status = 0;
        // SAFETY: writes one status of a communicator that lives.
        self.check(what, unsafe { (self.library.ncclCommGetAsyncError)(self.handle, &mut status) })?;
        self.check(what, status)?;
        Ok(status != IN_PROGRESS)
    }

    /// Looks again and again whether something is over, for so long `most`.
    ///
    /// # Errors
    /// Where it is not, though somebody has given up some time ago: nothing of it can be relied on.
    fn until(
        &self,
        what: &'static str,
        seat: &Seat,
        most: Option<Duration>,
        mut is_over: impl FnMut() -> Result<bool, CudaError>,
    ) -> Result<(), DeviceError> {
        let (began, mut gone): (_, Option<Instant>) = (Instant::now(), None);
        while !is_over()? {
            if let Err(peer) = seat.transport.agreed()
                && gone.get_or_insert_with(Instant::now).elapsed() > GRACE
            {
                return Err(peer);
            }
            if let Some(most) = most.filter(|most| began.elapsed() > *most) {
                let says = format!("it is not over after {} s", most.as_secs());
                return Err(CudaError::Nccl { what, says }.into());
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Waits until the last call is over.
    fn proceeds(&self, what: &'static str, seat: &Seat) -> Result<(), DeviceError> {
        self.until(what, seat, Some(OPENS), || self.is_through(what))
    }

    /// Messages between ranks, all at once.
    fn group(&self, seat: &Seat, messages: impl FnOnce() -> Result<(), CudaError>) -> Result<(), DeviceError> {
        const WHAT: &str = "exchange";
        // SAFETY: takes nothing.
        self.check(WHAT, unsafe { (self.library.ncclGroupStart)() })?;
        let said = messages();
        // SAFETY: takes nothing. A group that was begun has to be ended.
        let ended = self.check(WHAT, unsafe { (self.library.ncclGroupEnd)() });
        said.and(ended)?;
        self.proceeds(WHAT, seat)
    }

    /// Gives bytes to a rank.
    ///
    /// # Safety
    /// The range is memory of the device, and not written until the stream has done it.
    unsafe fn send(&self, from: Address, bytes: u64, peer: u32, stream: &Stream) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let from = from as *const c_void;
        // SAFETY: as the caller promises.
        let sent =
            unsafe { (self.library.ncclSend)(from, bytes as usize, INT8, peer as c_int, self.handle, stream.handle()) };
        self.check("send", sent)
    }

    /// Takes bytes from a rank.
    ///
    /// # Safety
    /// The range is memory of the device, and not touched by others until the stream has done it.
    unsafe fn receive(&self, to: Address, bytes: u64, peer: u32, stream: &Stream) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let to = to as *mut c_void;
        // SAFETY: as the caller promises.
        let received =
            unsafe { (self.library.ncclRecv)(to, bytes as usize, INT8, peer as c_int, self.handle, stream.handle()) };
        self.check("receive", received)
    }

    fn peers(&self) -> impl Iterator<Item = u32> {
        let own = self.rank;
        (0..self.ranks).filter(move |peer| *peer != own)
    }

    /// The slot in scratch, from `first` on, for what goes to a rank, or with `comes` for what comes of it.
    fn slot(&self, first: u64, stride: u64, peer: u32, comes: bool) -> Address {
        let number = u64::from(if peer < self.rank { peer } else { peer - 1 });
        let before = if comes { u64::from(self.ranks - 1) } else { 0 };
        self.scratch + first + (before + number) * stride
    }

    /// Every rank sends every other some bytes: connections are made now, and what they take is taken. Kernels are started
    /// once, before any other rank is waited for.
    fn tries(&mut self, seat: &Seat, stream: &Stream) -> Result<(), DeviceError> {
        let room = self.scratch_bytes / (2 * u64::from(self.ranks - 1));
        let bytes = room.min(TRIED_BYTES) / STEP_BYTES * STEP_BYTES;
        // Words of two bytes, another one from each to each.
        let word = |from: u32, to: u32| (1 + from * 251 + to) as u16;
        // SAFETY (of all below): scratch is this communicator's, and nothing else is at work in it.
        unsafe { stream.zero(self.scratch, self.scratch_bytes) }?;
        for dtype in [DType::F32, DType::F64] {
            let parts =
                Parts { own: self.scratch, others: self.scratch, stride: 0, rank: self.rank, ranks: self.ranks };
            for launch in sum_ranks(dtype, parts, self.scratch, 1, false).into_iter().flatten() {
                // SAFETY: see above.
                unsafe { self.launch(&launch, stream) }?;
            }
        }
        stream.synchronize()?;
        for peer in self.peers() {
            // SAFETY: see above.
            unsafe { stream.fill(self.slot(0, bytes, peer, false), word(self.rank, peer), bytes) }?;
        }
        self.group(seat, || {
            self.peers().try_for_each(|peer| {
                // SAFETY: see above.
                unsafe { self.send(self.slot(0, bytes, peer, false), bytes, peer, stream) }?;
                // SAFETY: see above.
                unsafe { self.receive(self.slot(0, bytes, peer, true), bytes, peer, stream) }
            })
        })?;
        self.waits(seat, stream, Some(OPENS))?;
        let mut found = vec![0u8; bytes as usize];
        for peer in self.peers() {
            // SAFETY: pageable memory is written before the stream is over.
            unsafe { stream.copy_out(found.as_mut_ptr(), self.slot(0, bytes, peer, true), bytes) }?;
            stream.synchronize()?;
            if found.as_chunks::<2>().0.iter().any(|pair| u16::from_ne_bytes(*pair) != word(peer, self.rank)) {
                let says = format!("what came of rank {peer} is not what it has sent");
                return Err(CudaError::Nccl { what: "exchange", says }.into());
            }
        }
        Ok(())
    }

    /// Waits until the device is through with what it was given.
    fn waits(&self, seat: &Seat, stream: &Stream, most: Option<Duration>) -> Result<(), DeviceError> {
        const WHAT: &str = "exchange";
        self.done.record(stream)?;
        self.until(WHAT, seat, most, || {
            let over = self.done.is_over()?;
            // What NCCL fails with ends nothing on the device.
            self.is_through(WHAT).map(|_| over)
        })
    }

    /// Takes part in a collective, in the order of `stream`, and comes back when it is over.
    ///
    /// # Errors
    /// Where this rank or another one cannot go on: what it gets may then be there in part, and the communicator has to be
    /// closed.
    ///
    /// # Panics
    /// For a message, which is none.
    ///
    /// # Safety
    /// What pieces touch is free for this in the order of `stream`.
    pub unsafe fn exchange(
        &mut self,
        exchange: &Exchange,
        pieces: &[Stands],
        seat: &Seat,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let counts: Vec<&[u64]> = exchange.pieces.iter().map(|piece| &piece.counts[..]).collect();
        let forms: Vec<_> = pieces.iter().zip(&counts).map(|(at, counts)| (at.dtype, *counts)).collect();
        let (sums, gathers, adds) = match exchange.collective {
            Collective::AllReduce => (true, true, false),
            Collective::ReduceScatter => (true, false, true),
            Collective::AllGather => (false, true, false),
            Collective::Send | Collective::Receive => unreachable!("messages go through staging"),
        };
        // Where elements of a rank's part of the whole stand, and how many bytes they are.
        let part = |cut: &Cut, whole: Address, of: u32| {
            let (size, counts) = (forms[cut.piece].0.bytes(), counts[cut.piece]);
            let before: u64 = counts[..of as usize].iter().sum();
            let range = cut.of(counts[of as usize]);
            (whole + (before + range.start) * size, (range.end - range.start) * size)
        };
        let copy = |to: Address, from: Address, bytes: u64| match bytes {
            0 => Ok(()),
            // SAFETY (of all below): ranges of the pieces, as the caller promises, and of scratch, where every cut has slots
            // of its own, and one batch is over before the next begins.
            _ => unsafe { stream.copy(to, from, bytes) },
        };
        for batch in batches(self.ranks as usize, &forms, self.scratch_bytes) {
            let slot = |cut: &Cut, peer: u32, comes: bool| self.slot(cut.scratch, cut.stride, peer, comes);
            let first = self.peers().next().expect("a team");
            let between: Vec<(&Cut, u32)> =
                batch.iter().flat_map(|cut| self.peers().map(move |peer| (cut, peer))).collect();
            if sums {
                for &(cut, peer) in &between {
                    let (from, bytes) = part(cut, pieces[cut.piece].input, peer);
                    copy(slot(cut, peer, false), from, bytes)?;
                }
                self.group(seat, || {
                    for &(cut, peer) in &between {
                        let bytes = |of: u32| part(cut, 0, of).1;
                        // SAFETY: see above.
                        unsafe { self.send(slot(cut, peer, false), bytes(peer), peer, stream) }?;
                        // SAFETY: see above.
                        unsafe { self.receive(slot(cut, peer, true), bytes(self.rank), peer, stream) }?;
                    }
                    Ok(())
                })?;
                for cut in &batch {
                    let Stands { input, output, dtype } = pieces[cut.piece];
                    let (own, bytes) = part(cut, input, self.rank);
                    // What is scattered has a place for the own part alone.
                    let scattered = output + cut.elements.start * dtype.bytes();
                    let into = if gathers { part(cut, output, self.rank).0 } else { scattered };
                    let (others, stride) = (slot(cut, first, true), cut.stride / dtype.bytes());
                    let parts = Parts { own, others, stride, rank: self.rank, ranks: self.ranks };
                    let launches = sum_ranks(dtype, parts, into, bytes / dtype.bytes(), adds);
                    let launches = launches.unwrap_or_else(|| unreachable!("sums are not taken in {dtype}"));
                    for launch in launches.iter().filter(|_| bytes > 0) {
                        // SAFETY: see above.
                        unsafe { self.launch(launch, stream) }?;
                    }
                }
            }
            if gathers {
                for cut in &batch {
                    let Stands { input, output, dtype } = pieces[cut.piece];
                    let (own, bytes) = part(cut, output, self.rank);
                    // What is summed up stands in its place; what is only gathered may have to be brought there.
                    let from = if sums { own } else { input + cut.elements.start * dtype.bytes() };
                    if from != own {
                        copy(own, from, bytes)?;
                    }
                    copy(slot(cut, first, false), own, bytes)?;
                }
                self.group(seat, || {
                    for &(cut, peer) in &between {
                        let bytes = |of: u32| part(cut, 0, of).1;
                        // SAFETY: see above; what all get is read from one slot.
                        unsafe { self.send(slot(cut, first, false), bytes(self.rank), peer, stream) }?;
                        // SAFETY: see above.
                        unsafe { self.receive(slot(cut, peer, true), bytes(peer), peer, stream) }?;
                    }
                    Ok(())
                })?;
                for &(cut, peer) in &between {
                    let (to, bytes) = part(cut, pieces[cut.piece].output, peer);
                    copy(to, slot(cut, peer, true), bytes)?;
                }
            }
            // Queues have ends: no more is put there before others have done their part.
            self.waits(seat, stream, None)?;
        }
        Ok(())
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    unsafe fn launch(&self, launch: &Launch, stream: &Stream) -> Result<(), CudaError> {
        let (_, function) = self.sums.iter().find(|(name, _)| *name == launch.kernel).expect("one of the two");
        let arguments: Vec<*const c_void> = launch.arguments.iter().map(|argument| argument.pointer()).collect();
        // SAFETY: as the caller promises; arguments are in the order of the kernel's signature (tested against its source).
        unsafe { stream.launch(*function, launch.grid, launch.block, launch.shared_bytes, &arguments) }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // It need not wait for others, who may be gone; what is under way ends.
        if !self.handle.is_null() {
            // SAFETY: ours, and not used after this.
            unsafe { (self.library.ncclCommAbort)(self.handle) };
        }
        let _ = self.context.synchronize();
        // SAFETY: ours, and nothing is at work in it any more.
        let _ = unsafe { self.context.free(self.scratch) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn structures_have_the_sizes_of_the_header() {
        assert_eq!((size_of::<Id>(), size_of::<Config>()), (128, 48));
    }

    #[test]
    fn what_is_no_nccl_has_no_version() {
        assert_eq!(version(Path::new("libc.so.6")), None);
        assert_eq!(version(Path::new("/nowhere/libnccl.so.2")), None);
    }

    proptest! {
        #[test]
        fn every_element_is_cut_once_and_scratch_has_room_on_every_rank(
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(0u64..3000, 3)), 1..90),
            scratch_bytes in 1024u64..20_000,
        ) {
            let wide = |(wide, counts): &(bool, Vec<u64>)| (if *wide { DType::F64 } else { DType::Bf16 }, counts.clone());
            let pieces: Vec<(DType, Vec<u64>)> = pieces.iter().map(wide).collect();
            let forms: Vec<(DType, &[u64])> = pieces.iter().map(|(dtype, counts)| (*dtype, &counts[..])).collect();
            let all = batches(3, &forms, scratch_bytes);
            for rank in 0..3 {
                let mut next = vec![0; pieces.len()];
                for batch in &all {
                    prop_assert!(batch.len() <= CUTS);
                    let mut used = 0;
                    for cut in batch {
                        let (dtype, counts) = &pieces[cut.piece];
                        let range = cut.of(counts[rank]);
                        prop_assert!(cut.scratch >= used);
                        prop_assert!((range.end - range.start) * dtype.bytes() <= cut.stride);
                        // Two others, to and from each of whom it goes.
                        used = cut.scratch + 4 * cut.stride;
                        prop_assert_eq!(range.start, next[cut.piece]);
                        next[cut.piece] = range.end;
                    }
                    prop_assert!(used <= scratch_bytes);
                }
                prop_assert!(next.iter().zip(&pieces).all(|(next, (_, counts))| *next == counts[rank]));
            }
        }
    }
}
