//! Collectives by NCCL, which moves data between GPUs over NVLink, PCIe or the network. They are used if every device
//! of the team is a GPU with the same NCCL. Otherwise, and if NCCL fails to open, collectives go through staging
//! (`collectives`).
//!
//! **Agreement.** No rank enters NCCL alone. Before each collective the ranks exchange over the team's transport
//! whether they have a communicator. A rank that cannot continue aborts there, so no peer blocks on the device. The
//! first collective opens and tests the communicators together; if one rank fails, all use staging from then on.
//!
//! **Sums** have the same bits as on every other transport. Each rank receives the other ranks' bytes of its own part,
//! and a kernel of this crate sums them in rank order. The rank then sends the sum to all. NCCL's reductions are not
//! used.
//!
//! **Failures.** The host waits for the end of each collective and polls for an aborted group. It then aborts the
//! communicator, which ends the work on the device before later work depends on it.
//!
//! **Memory.** The plan reserves [`CHARGES`] outside the arena for a communicator. One that holds more is closed, and
//! staging is used instead. Calls do not block; a status tells their progress.

mod chunks;
mod communicator;
mod exchange;

use super::abi::{AbiKind, HasAbiKind, Structure, library, numbers, structure};
use super::compile::Compiler;
use super::driver::{Context, Stream};
use super::pieces::PieceAddresses;
use crate::error::{CudaError, DeviceError};
use crate::transport::{CollectiveCall, GroupHandle, PieceBuffers};
use communicator::Communicator;
use exchange::run_exchange;
use plimsoll_core::{Bytes, CollectiveBackend, DType};
use plimsoll_program::op::Exchange;
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

/// Layouts of the structures above, with the names that structures and fields have in nccl.h.
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
    /// Constants and values of enumerations in nccl.h that this crate uses.
    NUMBERS {
        NCCL_UNIQUE_ID_BYTES => ID_BYTES: usize = 128;
        NCCL_API_MAGIC => CONFIG_MAGIC: c_uint = 0xcafe_beef;
        NCCL_CONFIG_UNDEF_INT => UNDEFINED: c_int = c_int::MIN;
        ncclInProgress => IN_PROGRESS: Status = 7;
        ncclInt8 => INT8: c_int = 0;
    }
}

const ID_WORDS: usize = ID_BYTES / 4;
/// NCCL version (2.18.0) whose `ncclConfig_t` has the fields of [`Config`].
const CONFIG_VERSION: c_uint = 21_800;

/// The oldest supported NCCL: 2.18, the first with all fields of [`Config`].
const OLDEST_VERSION: c_int = 21_800;

/// Size of the buffer in device memory through which all bytes of NCCL collectives pass. NCCL does not touch the arena,
/// which is mapped for access by its own GPU alone.
pub const STAGING_BYTES: u64 = 64 << 20;
/// Assumed device memory of a communicator, without the staging buffer; not yet measured on a GPU
/// (docs/measured/gpu.md).
const ASSUMED_BYTES: Bytes = Bytes::mib(512);
/// The most memory that a GPU may hold for NCCL outside its arena.
pub const CHARGES: Bytes = Bytes(ASSUMED_BYTES.0 + STAGING_BYTES);

/// Longest time that a rank with an NCCL error waits for the team's report of the failed rank. Such a report replaces
/// the NCCL error.
const EXPLANATION_TIMEOUT: Duration = Duration::from_secs(90);
/// Pause between two checks whether NCCL or the device is done.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

impl Library {
    /// Returns NCCL's version number: 22 809 is 2.28.9. `None` if the library does not report it.
    fn number(&self) -> Option<c_int> {
        let mut number = 0;
        // SAFETY: writes one integer.
        (unsafe { (self.ncclGetVersion)(&mut number) } == 0).then_some(number)
    }

    /// Converts the status of an NCCL function that takes no communicator to a result. `what` names the action in an
    /// error.
    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.check_communicator(ptr::null_mut(), what, status)
    }

    /// Converts the status of an NCCL function on `communicator` to a result. A call in progress counts as success.
    /// `what` names the action in an error.
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

/// Returns the version of the NCCL library in a file, such as `2.28.9`; `None` if the library cannot be loaded or is
/// older than 2.18.
pub fn version(path: &Path) -> Option<String> {
    let number = Library::load(path).ok()?.number().filter(|number| *number >= OLDEST_VERSION)?;
    Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

/// One rank's use of NCCL: the library, and the communicator once it is open.
pub struct Nccl {
    library: Arc<Library>,
    compiler: Arc<Compiler>,
    context: Arc<Context>,
    staging_bytes: u64,
    state: CommunicatorState,
}

enum CommunicatorState {
    /// No communicator is open: none was opened yet, or it was closed.
    Closed,
    Open(Box<Communicator>),
    /// This rank cannot use NCCL, with the reason, or another rank cannot (`None`). Collectives go through the host.
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
    /// Creates the state without a communicator, which the first collective opens. It then allocates `staging_bytes` of
    /// device memory, an equal number on all ranks.
    pub fn new(library: &Arc<Library>, compiler: &Arc<Compiler>, context: &Arc<Context>, staging_bytes: u64) -> Nccl {
        let (library, compiler, context) = (library.clone(), compiler.clone(), context.clone());
        Nccl { library, compiler, context, staging_bytes, state: CommunicatorState::Closed }
    }

    /// Returns whether collectives run by NCCL or through the host; `None` while no communicator is open and none was
    /// refused.
    pub fn backend(&self) -> Option<CollectiveBackend> {
        match &self.state {
            CommunicatorState::Closed => None,
            CommunicatorState::Open(_) => Some(CollectiveBackend::Nccl),
            CommunicatorState::Refused(reason) => Some(CollectiveBackend::Host { reason: reason.clone() }),
        }
    }

    /// Agrees with all ranks whether NCCL carries out the collective with this sequence number. Opens a communicator if
    /// necessary. Returns the communicator, or `None` if the collective must go through the host.
    ///
    /// # Errors
    /// Fails if this rank or another cannot continue.
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

    /// Runs a collective by NCCL, in the order of `stream`, and waits for its end. Returns `false` and does nothing if
    /// some rank cannot use NCCL.
    ///
    /// # Errors
    /// Fails if this rank or another cannot continue; the output may then be partly written.
    ///
    /// # Safety
    /// The memory of the pieces is free for this use in the order of `stream`.
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
        let done = unsafe { run_exchange(communicator, exchange, pieces, group, stream) };
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

    /// Closes the communicator, if one is open. The next collective then opens a new one.
    pub fn close(&mut self) {
        if let CommunicatorState::Open(_) = self.state {
            self.state = CommunicatorState::Closed;
        }
    }

    /// Returns the device memory that the communicator holds outside the arena, with the staging buffer; zero if none
    /// is open.
    pub fn held_bytes(&self) -> Bytes {
        match &self.state {
            CommunicatorState::Open(communicator) => communicator.held_bytes,
            _ => Bytes::ZERO,
        }
    }

    /// Opens a communicator together with all other ranks, and tests it. The inner error is the reason why this rank
    /// does not use NCCL.
    ///
    /// # Errors
    /// The outer error means that this rank or another cannot continue at all.
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

/// Gathers 32-bit words of all ranks in rank order, over the team's transport. `own` are this rank's words; `counts`
/// has the number of words of each rank. `sequence` is the number of the collective that this exchange prepares.
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
