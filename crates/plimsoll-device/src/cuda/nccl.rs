//! Collectives by NCCL, which moves data between GPUs over NVLink, PCIe or the network. They are used if every device
//! of the team is a GPU with the same NCCL. Otherwise, and if NCCL fails to open, collectives go through staging
//! (`collectives`).
//!
//! **Agreement.** No rank enters NCCL alone. Before each collective the ranks exchange over the team's transport
//! whether they have a communicator. A rank that cannot continue aborts there, so no peer blocks on the device. The
//! first collective opens and tests the communicators together; if one rank fails, all use staging from then on.
//!
//! **Sums** have the same bits as on every other transport. Each rank receives the other ranks' bytes of its own part,
//! sums in rank order with a kernel of this crate, and sends the result to all. NCCL's reductions are not used.
//!
//! **Failures.** The host waits for the end of each collective and polls for an aborted group. It then aborts the
//! communicator, which ends the work on the device before later work depends on it.
//!
//! **Memory.** The plan reserves [`CHARGES`] outside the arena for a communicator. One that holds more is closed, and
//! staging is used instead. Calls do not block; a status tells their progress.

mod chunks;

use super::collectives::PieceAddresses;
use super::compile::Compiler;
use super::driver::{Address, Context, CudaError, Event, Function, Module, Stream, library};
use super::headers::{AbiKind, HasAbiKind, Structure, numbers, structure};
use super::kernels::launch::{Launch, RankParts, sum_ranks};
use super::kernels::{Family, Real, Unit};
use crate::device::DeviceError;
use crate::transport::{CollectiveCall, GroupHandle, PieceBuffers};
use chunks::{Chunk, SLOT_ALIGNMENT, chunk_batches};
use plimsoll_core::{Bytes, CollectiveBackend, DType};
use plimsoll_program::op::{Collective, Exchange};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Return type of every NCCL function.
type Status = c_int;
/// Opaque handle of an NCCL object.
type Handle = *mut c_void;

library! {
    /// The functions of NCCL that this crate calls.
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

/// `ncclUniqueId`: identifies a communicator to its ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Id([u8; ID_BYTES]);

/// `ncclConfig_t` of NCCL 2.18. Newer versions accept it and fill in defaults for missing fields.
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

/// Field names of the structures in nccl.h.
pub(super) const STRUCTURES: &[Structure] = &[
    structure!(ncclUniqueId, Id {}),
    structure!(ncclConfig_t, Config {
        "size" => size: usize, "magic" => magic: c_uint, "version" => version: c_uint, "blocking" => blocking: c_int,
        "cgaClusterSize" => cga_cluster_size: c_int, "minCTAs" => min_ctas: c_int, "maxCTAs" => max_ctas: c_int,
        "netName" => net_name: *const c_char, "splitShare" => split_share: c_int,
    } ..),
];

impl HasAbiKind for Id {
    const ABI_KIND: AbiKind = AbiKind::Structure(ID_BYTES);
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
/// Version of [`Config`].
const CONFIG_VERSION: c_uint = 21_800;

/// The oldest supported NCCL: 2.18, the first with all fields of [`Config`].
const OLDEST_VERSION: c_int = 21_800;

/// Size of the staging buffer for all traffic. NCCL only touches plain memory, since the arena is mapped for its own
/// GPU alone.
pub const STAGING_BYTES: u64 = 64 << 20;
/// Assumed memory of a communicator outside the staging buffer; not yet measured on a GPU (docs/measured/gpu.md).
const ASSUMED_BYTES: Bytes = Bytes::mib(512);
/// The most memory that a GPU may hold for NCCL outside its arena.
pub const CHARGES: Bytes = Bytes(ASSUMED_BYTES.0 + STAGING_BYTES);

/// The most bytes sent to each other rank in the self-test.
const SELF_TEST_BYTES_MAX: u64 = 4 << 20;

/// Time limit for opening a communicator.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// Grace period for work in progress after a peer aborted: the peer may have taken part until the end.
const PEER_FAILURE_GRACE: Duration = Duration::from_secs(2);
/// Time to wait for the team to name a failed peer after an NCCL error.
const EXPLANATION_TIMEOUT: Duration = Duration::from_secs(90);
/// Pause between polls.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

impl Library {
    /// Returns the version number: 22 809 is 2.28.9.
    fn number(&self) -> Option<c_int> {
        let mut number = 0;
        // SAFETY: writes one integer.
        (unsafe { (self.ncclGetVersion)(&mut number) } == 0).then_some(number)
    }

    /// Converts a status to a result.
    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.check_communicator(ptr::null_mut(), what, status)
    }

    /// Converts a status of a communicator's function to a result.
    fn check_communicator(&self, communicator: Handle, what: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: gives a string that lives as long as the library.
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: not null, with a terminating zero, as the documentation states.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: both take any status, or a communicator that lives or none.
        let (name, last) = unsafe { ((self.ncclGetErrorString)(status), (self.ncclGetLastError)(communicator)) };
        let detail =
            [text(name), text(last)].into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join(": ");
        Err(CudaError::Nccl { what, detail })
    }
}

/// Returns the version of an NCCL library, `2.28.9`; `None` if it cannot be used.
pub fn version(path: &Path) -> Option<String> {
    let number = Library::load(path).ok()?.number().filter(|number| *number >= OLDEST_VERSION)?;
    Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

/// NCCL state of one rank.
pub struct Nccl {
    library: Arc<Library>,
    compiler: Arc<Compiler>,
    context: Arc<Context>,
    staging_bytes: u64,
    state: CommunicatorState,
}

enum CommunicatorState {
    /// Not opened yet, or closed.
    Closed,
    Open(Box<Communicator>),
    /// This rank or another cannot use NCCL; the reason, if it was this rank.
    Refused(Option<String>),
}

// Readiness values that ranks exchange.
const REFUSED: u32 = 0;
const CLOSED: u32 = 1;
const OPEN: u32 = 2;

impl CommunicatorState {
    fn readiness(&self) -> u32 {
        match self {
            CommunicatorState::Closed => CLOSED,
            CommunicatorState::Open(_) => OPEN,
            CommunicatorState::Refused(_) => REFUSED,
        }
    }
}

impl Nccl {
    /// Creates a closed state. The first collective allocates `staging_bytes`, which must be equal on all ranks.
    pub fn new(library: &Arc<Library>, compiler: &Arc<Compiler>, context: &Arc<Context>, staging_bytes: u64) -> Nccl {
        let (library, compiler, context) = (library.clone(), compiler.clone(), context.clone());
        Nccl { library, compiler, context, staging_bytes, state: CommunicatorState::Closed }
    }

    /// Returns how collectives are carried out; `None` before the first one.
    pub fn backend(&self) -> Option<CollectiveBackend> {
        match &self.state {
            CommunicatorState::Closed => None,
            CommunicatorState::Open(_) => Some(CollectiveBackend::Nccl),
            CommunicatorState::Refused(reason) => Some(CollectiveBackend::Host { reason: reason.clone() }),
        }
    }

    /// Agrees with all ranks on the collective of this sequence number: returns the communicator, or `None` for
    /// staging.
    ///
    /// # Errors
    /// Fails if another rank cannot continue.
    fn agree_on_communicator(
        &mut self,
        group: &GroupHandle,
        sequence: u64,
    ) -> Result<Option<&mut Communicator>, DeviceError> {
        loop {
            let ranks = group.transport.world_size() as usize;
            let readiness = gather_words(group, sequence, &[self.state.readiness()], vec![1; ranks])?;
            if readiness.contains(&REFUSED) {
                if !matches!(self.state, CommunicatorState::Refused(_)) {
                    self.state = CommunicatorState::Refused(None);
                }
                return Ok(None);
            }
            if readiness.iter().all(|value| *value == OPEN) {
                let CommunicatorState::Open(communicator) = &mut self.state else {
                    unreachable!("this rank reported an open communicator")
                };
                return Ok(Some(communicator));
            }
            self.state = CommunicatorState::Closed;
            self.state = match self.open(group, sequence)? {
                Ok(communicator) => CommunicatorState::Open(Box::new(communicator)),
                Err(reason) => CommunicatorState::Refused(Some(reason)),
            };
        }
    }

    /// Runs a collective by NCCL, in the order of `stream`, if all ranks agree on it, and waits for its end. Returns
    /// `false` if they do not agree.
    ///
    /// # Errors
    /// Fails if this rank or another cannot continue; the output may then be partly written.
    ///
    /// # Safety
    /// As for [`Communicator::exchange`].
    pub unsafe fn run_collective(
        &mut self,
        exchange: &Exchange,
        sequence: u64,
        pieces: &[PieceAddresses],
        group: &GroupHandle,
        stream: &Stream,
    ) -> Result<bool, DeviceError> {
        let Some(communicator) = self.agree_on_communicator(group, sequence)? else { return Ok(false) };
        // SAFETY: as the caller promises.
        let done = unsafe { communicator.exchange(exchange, pieces, group, stream) };
        done.map(|()| true).map_err(|error| {
            // Closing the communicator ends work in progress.
            self.close();
            let began = Instant::now();
            while let DeviceError::Cuda(CudaError::Nccl { .. }) = error
                && began.elapsed() < EXPLANATION_TIMEOUT
            {
                if let Err(peer) = group.transport.check_aborted() {
                    return peer;
                }
                thread::sleep(POLL_INTERVAL);
            }
            error
        })
    }

    /// Closes the communicator. The next collective opens a new one.
    pub fn close(&mut self) {
        if let CommunicatorState::Open(_) = self.state {
            self.state = CommunicatorState::Closed;
        }
    }

    /// Returns the memory that the communicator holds on the GPU, outside the arena.
    pub fn held_bytes(&self) -> Bytes {
        match &self.state {
            CommunicatorState::Open(communicator) => communicator.held_bytes,
            _ => Bytes::ZERO,
        }
    }

    /// Opens a communicator with all other ranks and tests it. The inner error is this rank's reason for not using
    /// NCCL.
    fn open(&self, group: &GroupHandle, sequence: u64) -> Result<Result<Communicator, String>, DeviceError> {
        let (free, _) = self.context.memory()?;
        // Local resources come first: if they fail, no rank enters NCCL.
        let prepared = Communicator::prepare(self, group);
        let mut own = vec![u32::from(prepared.is_ok())];
        if group.rank == 0 {
            let mut id = Id([0; ID_BYTES]);
            // SAFETY: writes one id.
            let status = self.library.check("create an id", unsafe { (self.library.ncclGetUniqueId)(&mut id) });
            own[0] &= u32::from(status.is_ok());
            own.extend(id.0.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)));
        }
        let words = |rank| if rank == 0 { 1 + ID_WORDS as u64 } else { 1 };
        let found = gather_words(group, sequence, &own, (0..group.transport.world_size()).map(words).collect())?;
        let (id_words, others) = found[1..].split_at(ID_WORDS);
        let mut communicator = match prepared {
            Ok(communicator) => communicator,
            Err(error) if error.is_device_lost() => return Err(error),
            Err(error) => return Ok(Err(error.to_string())),
        };
        if found[0] == 0 || others.contains(&0) {
            return Ok(Err("another rank could not open NCCL".to_owned()));
        }
        let mut id = Id([0; ID_BYTES]);
        id.0.as_chunks_mut::<4>().0.iter_mut().zip(id_words).for_each(|(to, word)| *to = word.to_ne_bytes());
        // A separate stream: other streams may still have much work.
        let stream = Stream::new(&self.context)?;
        match communicator.connect(group, id).and_then(|()| communicator.self_test(group, &stream)) {
            Ok(()) => {}
            Err(DeviceError::Cuda(error)) if !DeviceError::from(error.clone()).is_device_lost() => {
                return Ok(Err(error.to_string()));
            }
            Err(error) => return Err(error),
        }
        let held = free.saturating_sub(self.context.memory()?.0);
        if held > CHARGES {
            return Ok(Err(format!("it holds {held} on the gpu, more than the planned {CHARGES}")));
        }
        communicator.held_bytes = held.max(Bytes(self.staging_bytes));
        Ok(Ok(communicator))
    }
}

/// Gathers words of all ranks in rank order; `counts` has the number of words of each rank.
fn gather_words(group: &GroupHandle, sequence: u64, own: &[u32], counts: Vec<u64>) -> Result<Vec<u32>, DeviceError> {
    let first = counts[..group.rank as usize].iter().sum::<u64>() as usize;
    let mut all = vec![0u32; counts.iter().sum::<u64>() as usize];
    all[first..first + own.len()].copy_from_slice(own);
    let output = all.as_mut_ptr().cast::<u8>();
    let place = PieceBuffers { input: output.wrapping_add(4 * first), output, dtype: DType::I32, counts };
    // SAFETY: the words stay in place until the exchange completes, and nothing else touches them; this rank's part is
    // at its place in the output.
    group.transport.exchange(unsafe { CollectiveCall::all_gather(group, sequence, place) })?;
    Ok(all)
}

/// An open communicator with its staging buffer and kernels.
pub struct Communicator {
    library: Arc<Library>,
    context: Arc<Context>,
    handle: Handle,
    rank: u32,
    ranks: u32,
    staging: Address,
    staging_bytes: u64,
    held_bytes: Bytes,
    done: Event,
    sums: [(&'static str, Function); 2],
    _module: Module,
}

// SAFETY: a communicator belongs to no thread; one thread uses it at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Allocates this rank's resources, without contacting other ranks.
    fn prepare(nccl: &Nccl, group: &GroupHandle) -> Result<Communicator, DeviceError> {
        let Nccl { library, compiler, context, staging_bytes, .. } = nccl;
        let unit = Unit::new(Family::Collective, Real::F32, 0);
        let cubins = compiler.cubins(&[unit], context.gpu().architecture)?;
        let module = Module::load(context, unit, cubins.first().expect("one cubin per unit"))?;
        let function = |name| Ok::<_, CudaError>((name, module.function(name, 0)?));
        let sums = [function("sum_ranks_f32")?, function("sum_ranks_f64")?];
        let done = Event::new(context)?;
        Ok(Communicator {
            library: library.clone(),
            context: context.clone(),
            handle: ptr::null_mut(),
            rank: group.rank,
            ranks: group.transport.world_size(),
            staging: context.allocate(*staging_bytes)?,
            staging_bytes: *staging_bytes,
            held_bytes: Bytes::ZERO,
            done,
            sums,
            _module: module,
        })
    }

    /// Connects to the other ranks with the same id.
    fn connect(&mut self, group: &GroupHandle, id: Id) -> Result<(), DeviceError> {
        const WHAT: &str = "connect the ranks";
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
        // SAFETY: writes one handle; the config has the stated size, and is read before the call returns.
        let status = unsafe {
            let init = self.library.ncclCommInitRankConfig;
            init(&mut self.handle, self.ranks as c_int, id, self.rank as c_int, &mut config)
        };
        self.check(WHAT, status)?;
        self.wait_for_call(WHAT, group)
    }

    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.library.check_communicator(self.handle, what, status)
    }

    /// Returns whether the last call has completed.
    fn is_call_complete(&self, what: &'static str) -> Result<bool, CudaError> {
        let mut status = 0;
        // SAFETY: writes one status of a communicator that lives.
        self.check(what, unsafe { (self.library.ncclCommGetAsyncError)(self.handle, &mut status) })?;
        self.check(what, status)?;
        Ok(status != IN_PROGRESS)
    }

    /// Polls until `is_complete` returns true, at most for `timeout`.
    ///
    /// # Errors
    /// Fails after the timeout, or if a peer aborted and the grace period has passed; the data is then invalid.
    fn poll_until(
        &self,
        what: &'static str,
        group: &GroupHandle,
        timeout: Option<Duration>,
        mut is_complete: impl FnMut() -> Result<bool, CudaError>,
    ) -> Result<(), DeviceError> {
        let (began, mut peer_failed_at): (_, Option<Instant>) = (Instant::now(), None);
        while !is_complete()? {
            if let Err(peer) = group.transport.check_aborted()
                && peer_failed_at.get_or_insert_with(Instant::now).elapsed() > PEER_FAILURE_GRACE
            {
                return Err(peer);
            }
            if let Some(timeout) = timeout.filter(|timeout| began.elapsed() > *timeout) {
                let detail = format!("it did not complete within {} s", timeout.as_secs());
                return Err(CudaError::Nccl { what, detail }.into());
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until the last call completes.
    fn wait_for_call(&self, what: &'static str, group: &GroupHandle) -> Result<(), DeviceError> {
        self.poll_until(what, group, Some(OPEN_TIMEOUT), || self.is_call_complete(what))
    }

    /// Enqueues messages between ranks as one NCCL group.
    fn run_grouped(
        &self,
        group: &GroupHandle,
        messages: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), DeviceError> {
        const WHAT: &str = "exchange";
        // SAFETY: takes nothing.
        self.check(WHAT, unsafe { (self.library.ncclGroupStart)() })?;
        let queued = messages();
        // SAFETY: takes nothing. Every started group must be ended.
        let ended = self.check(WHAT, unsafe { (self.library.ncclGroupEnd)() });
        queued.and(ended)?;
        self.wait_for_call(WHAT, group)
    }

    /// Sends bytes to a rank.
    ///
    /// # Safety
    /// The range is device memory, and not written until the stream has sent it.
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

    /// Receives bytes from a rank.
    ///
    /// # Safety
    /// The range is device memory, and not touched by other work until the stream has received it.
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

    /// Returns a slot address of a chunk at offset `first`: outgoing to `peer`, or incoming from it.
    fn slot(&self, first: u64, stride: u64, peer: u32, incoming: bool) -> Address {
        let number = u64::from(if peer < self.rank { peer } else { peer - 1 });
        let before = if incoming { u64::from(self.ranks - 1) } else { 0 };
        self.staging + first + (before + number) * stride
    }

    /// Sends bytes between all pairs of ranks, so that connections are opened and their memory is allocated now. Runs
    /// the sum kernels once, before it waits for any other rank.
    fn self_test(&mut self, group: &GroupHandle, stream: &Stream) -> Result<(), DeviceError> {
        let slot_bytes_max = self.staging_bytes / (2 * u64::from(self.ranks - 1));
        let bytes = slot_bytes_max.min(SELF_TEST_BYTES_MAX) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
        // A different two-byte word for every ordered pair of ranks.
        let word = |from: u32, to: u32| (1 + from * 251 + to) as u16;
        // SAFETY (of all below): this communicator owns the staging buffer, and no other work uses it.
        unsafe { stream.zero(self.staging, self.staging_bytes) }?;
        for dtype in [DType::F32, DType::F64] {
            let parts =
                RankParts { own: self.staging, others: self.staging, stride: 0, rank: self.rank, ranks: self.ranks };
            for launch in sum_ranks(dtype, parts, self.staging, 1, false).into_iter().flatten() {
                // SAFETY: see above.
                unsafe { self.launch(&launch, stream) }?;
            }
        }
        stream.synchronize()?;
        for peer in self.peers() {
            // SAFETY: see above.
            unsafe { stream.fill(self.slot(0, bytes, peer, false), word(self.rank, peer), bytes) }?;
        }
        self.run_grouped(group, || {
            self.peers().try_for_each(|peer| {
                // SAFETY: see above.
                unsafe { self.send(self.slot(0, bytes, peer, false), bytes, peer, stream) }?;
                // SAFETY: see above.
                unsafe { self.receive(self.slot(0, bytes, peer, true), bytes, peer, stream) }
            })
        })?;
        self.wait_for_stream(group, stream, Some(OPEN_TIMEOUT))?;
        let mut found = vec![0u8; bytes as usize];
        for peer in self.peers() {
            // SAFETY: pageable memory is written before the stream completes.
            unsafe { stream.copy_out(found.as_mut_ptr(), self.slot(0, bytes, peer, true), bytes) }?;
            stream.synchronize()?;
            if found.as_chunks::<2>().0.iter().any(|pair| u16::from_ne_bytes(*pair) != word(peer, self.rank)) {
                let detail = format!("received data from rank {peer} differs from what that rank sent");
                return Err(CudaError::Nccl { what: "exchange", detail }.into());
            }
        }
        Ok(())
    }

    /// Waits until the device has completed the work on a stream.
    fn wait_for_stream(
        &self,
        group: &GroupHandle,
        stream: &Stream,
        timeout: Option<Duration>,
    ) -> Result<(), DeviceError> {
        const WHAT: &str = "exchange";
        self.done.record(stream)?;
        self.poll_until(WHAT, group, timeout, || {
            let complete = self.done.is_complete()?;
            // An NCCL error does not end the work on the device.
            self.is_call_complete(WHAT).map(|_| complete)
        })
    }

    /// Runs a collective in the order of `stream`, and waits for its end.
    ///
    /// # Errors
    /// Fails if this rank or another cannot continue. The output may then be partly written, and the communicator must
    /// be closed.
    ///
    /// # Panics
    /// Panics for a point-to-point message.
    ///
    /// # Safety
    /// The memory of the pieces is free for this use in the order of `stream`.
    pub unsafe fn exchange(
        &mut self,
        exchange: &Exchange,
        pieces: &[PieceAddresses],
        group: &GroupHandle,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let counts: Vec<&[u64]> = exchange.pieces.iter().map(|piece| &piece.counts[..]).collect();
        let piece_shapes: Vec<_> = pieces.iter().zip(&counts).map(|(at, counts)| (at.dtype, *counts)).collect();
        let (sums, gathers, adds) = match exchange.collective {
            Collective::AllReduce => (true, true, false),
            Collective::ReduceScatter => (true, false, true),
            Collective::AllGather => (false, true, false),
            Collective::Send | Collective::Receive => unreachable!("messages go through staging"),
        };
        // Returns address and size of a rank's elements of a chunk within a whole piece.
        let part = |chunk: &Chunk, whole: Address, rank: u32| {
            let (size, counts) = (piece_shapes[chunk.piece].0.bytes(), counts[chunk.piece]);
            let before: u64 = counts[..rank as usize].iter().sum();
            let range = chunk.range_within(counts[rank as usize]);
            (whole + (before + range.start) * size, (range.end - range.start) * size)
        };
        let copy = |to: Address, from: Address, bytes: u64| match bytes {
            0 => Ok(()),
            // SAFETY (of all below): ranges of the pieces, as the caller promises, and of the staging buffer, where
            // every chunk has its own slots, and each batch completes before the next begins.
            _ => unsafe { stream.copy(to, from, bytes) },
        };
        for batch in chunk_batches(self.ranks as usize, &piece_shapes, self.staging_bytes) {
            let slot = |chunk: &Chunk, peer: u32, incoming: bool| {
                self.slot(chunk.staging_offset, chunk.stride, peer, incoming)
            };
            let first = self.peers().next().expect("a team has other ranks");
            let chunk_peers: Vec<(&Chunk, u32)> =
                batch.iter().flat_map(|chunk| self.peers().map(move |peer| (chunk, peer))).collect();
            if sums {
                for &(chunk, peer) in &chunk_peers {
                    let (from, bytes) = part(chunk, pieces[chunk.piece].input, peer);
                    copy(slot(chunk, peer, false), from, bytes)?;
                }
                self.run_grouped(group, || {
                    for &(chunk, peer) in &chunk_peers {
                        let bytes = |rank: u32| part(chunk, 0, rank).1;
                        // SAFETY: see above.
                        unsafe { self.send(slot(chunk, peer, false), bytes(peer), peer, stream) }?;
                        // SAFETY: see above.
                        unsafe { self.receive(slot(chunk, peer, true), bytes(self.rank), peer, stream) }?;
                    }
                    Ok(())
                })?;
                for chunk in &batch {
                    let PieceAddresses { input, output, dtype } = pieces[chunk.piece];
                    let (own, bytes) = part(chunk, input, self.rank);
                    // A scattered output only holds this rank's part.
                    let scattered = output + chunk.elements.start * dtype.bytes();
                    let into = if gathers { part(chunk, output, self.rank).0 } else { scattered };
                    let (others, stride) = (slot(chunk, first, true), chunk.stride / dtype.bytes());
                    let parts = RankParts { own, others, stride, rank: self.rank, ranks: self.ranks };
                    let launches = sum_ranks(dtype, parts, into, bytes / dtype.bytes(), adds);
                    let launches = launches.unwrap_or_else(|| unreachable!("sums are not taken in {dtype}"));
                    for launch in launches.iter().filter(|_| bytes > 0) {
                        // SAFETY: see above.
                        unsafe { self.launch(launch, stream) }?;
                    }
                }
            }
            if gathers {
                for chunk in &batch {
                    let PieceAddresses { input, output, dtype } = pieces[chunk.piece];
                    let (own, bytes) = part(chunk, output, self.rank);
                    // A summed part is already in place; a part that is only gathered may have to be copied there.
                    let from = if sums { own } else { input + chunk.elements.start * dtype.bytes() };
                    if from != own {
                        copy(own, from, bytes)?;
                    }
                    copy(slot(chunk, first, false), own, bytes)?;
                }
                self.run_grouped(group, || {
                    for &(chunk, peer) in &chunk_peers {
                        let bytes = |rank: u32| part(chunk, 0, rank).1;
                        // SAFETY: see above; all peers receive the contents of one slot.
                        unsafe { self.send(slot(chunk, first, false), bytes(self.rank), peer, stream) }?;
                        // SAFETY: see above.
                        unsafe { self.receive(slot(chunk, peer, true), bytes(peer), peer, stream) }?;
                    }
                    Ok(())
                })?;
                for &(chunk, peer) in &chunk_peers {
                    let (to, bytes) = part(chunk, pieces[chunk.piece].output, peer);
                    copy(to, slot(chunk, peer, true), bytes)?;
                }
            }
            // Streams have bounded capacity: enqueue no more before the other ranks have done their part.
            self.wait_for_stream(group, stream, None)?;
        }
        Ok(())
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    unsafe fn launch(&self, launch: &Launch, stream: &Stream) -> Result<(), CudaError> {
        let (_, function) =
            self.sums.iter().find(|(name, _)| *name == launch.kernel).expect("a sum kernel of this module");
        let arguments: Vec<*const c_void> = launch.arguments.iter().map(|argument| argument.pointer()).collect();
        // SAFETY: as the caller promises; arguments are in the order of the kernel's signature (tested against its
        // source).
        unsafe { stream.launch(*function, launch.grid, launch.block, launch.shared_bytes, &arguments) }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Does not wait for other ranks, which may be lost; ends work in progress.
        if !self.handle.is_null() {
            // SAFETY: owned here, and not used after this.
            unsafe { (self.library.ncclCommAbort)(self.handle) };
        }
        let _ = self.context.synchronize();
        // SAFETY: owned by this communicator, and no work uses it.
        let _ = unsafe { self.context.free(self.staging) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_header_sizes() {
        assert_eq!((size_of::<Id>(), size_of::<Config>()), (128, 48));
    }

    #[test]
    fn unusable_library_has_no_version() {
        assert_eq!(version(Path::new("libc.so.6")), None);
        assert_eq!(version(Path::new("/nowhere/libnccl.so.2")), None);
    }
}
