//! A communicator of NCCL: opening, messages between ranks, waiting, and the self-test.
//!
//! The module `exchange` builds collectives from such messages.

use super::chunks::SLOT_ALIGNMENT;
use super::{
    CONFIG_MAGIC, CONFIG_VERSION, Config, Handle, IN_PROGRESS, INT8, Id, Library, Nccl, POLL_INTERVAL, Status,
    UNDEFINED,
};
use crate::cuda::driver::{Address, Context, Event, Function, Module, Stream};
use crate::cuda::kernels::launch::{Launch, RankParts, sum_ranks};
use crate::cuda::kernels::{Family, Real, Unit};
use crate::error::{CudaError, DeviceError};
use crate::transport::GroupHandle;
use plimsoll_core::{Bytes, DType};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The most bytes that the self-test of a new communicator sends to each other rank.
const SELF_TEST_BYTES_MAX: u64 = 4 << 20;

/// Time limit for an NCCL call to complete, and for the self-test of a new communicator.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time that work in progress gets to complete after another rank aborted. The other rank may already have done its
/// part of the work.
const PEER_FAILURE_GRACE: Duration = Duration::from_secs(2);

/// One rank's end of an NCCL communicator, with its staging buffer and the kernels that sum.
pub struct Communicator {
    /// Functions of NCCL.
    library: Arc<Library>,
    /// Context of this rank's GPU.
    context: Arc<Context>,
    /// NCCL's handle of the communicator; null before [`Communicator::connect`].
    handle: Handle,
    /// Number of this rank in the team, from 0.
    pub rank: u32,
    /// Number of ranks in the team.
    pub ranks: u32,
    /// Address of the staging buffer in device memory.
    staging: Address,
    /// Size of the staging buffer in bytes.
    pub staging_bytes: u64,
    /// Device memory that the communicator holds, with the staging buffer; zero until it has been measured.
    pub held_bytes: Bytes,
    /// Event that [`Communicator::wait_for_stream`] records behind the work that the host waits for.
    done: Event,
    /// The two kernels that sum over ranks (f32 and f64), with their names.
    sums: [(&'static str, Function); 2],
    /// Module that contains the sum kernels; they are valid as long as it is loaded.
    _module: Module,
}

// SAFETY: a communicator belongs to no thread; one thread uses it at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Creates an unconnected communicator: loads the sum kernels and allocates the staging buffer. Does not contact
    /// other ranks.
    pub fn prepare(nccl: &Nccl, group: &GroupHandle) -> Result<Communicator, DeviceError> {
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

    /// Connects to the other ranks of the group. All ranks call this with the same NCCL id, and wait for each other.
    pub fn connect(&mut self, group: &GroupHandle, id: Id) -> Result<(), DeviceError> {
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

    /// Converts the status of an NCCL function on this communicator to a result. `what` names the action in an error.
    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.library.check_communicator(self.handle, what, status)
    }

    /// Returns whether the last NCCL call on this communicator has completed. `what` names the call in an error.
    ///
    /// # Errors
    /// Fails if the call failed.
    fn is_call_complete(&self, what: &'static str) -> Result<bool, CudaError> {
        let mut status = 0;
        // SAFETY: writes one status of a communicator that lives.
        self.check(what, unsafe { (self.library.ncclCommGetAsyncError)(self.handle, &mut status) })?;
        self.check(what, status)?;
        Ok(status != IN_PROGRESS)
    }

    /// Waits until `is_complete` returns true, at most for `timeout`, or without limit if `timeout` is `None`. `what`
    /// names the work in a timeout error.
    ///
    /// # Errors
    /// Fails after the timeout, or [`PEER_FAILURE_GRACE`] after another rank aborted, or with an error of
    /// `is_complete`. Data that the work should have written is then invalid.
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

    /// Waits until the last NCCL call on this communicator completes, at most for [`OPEN_TIMEOUT`]. `what` names the
    /// call in an error.
    fn wait_for_call(&self, what: &'static str, group: &GroupHandle) -> Result<(), DeviceError> {
        self.poll_until(what, group, Some(OPEN_TIMEOUT), || self.is_call_complete(what))
    }

    /// Enqueues the sends and receives that `messages` issues as one NCCL group. Waits until NCCL has enqueued them,
    /// not until the device has carried them out.
    pub fn run_grouped(
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

    /// Enqueues a send of `bytes` bytes of device memory at `from` to rank `peer`. Belongs in
    /// [`Communicator::run_grouped`].
    ///
    /// # Safety
    /// The range is device memory, and not written until the stream has sent it.
    pub unsafe fn send(&self, from: Address, bytes: u64, peer: u32, stream: &Stream) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let from = from as *const c_void;
        // SAFETY: as the caller promises.
        let sent =
            unsafe { (self.library.ncclSend)(from, bytes as usize, INT8, peer as c_int, self.handle, stream.handle()) };
        self.check("send", sent)
    }

    /// Enqueues a receive of `bytes` bytes from rank `peer` into device memory at `to`. Belongs in
    /// [`Communicator::run_grouped`].
    ///
    /// # Safety
    /// The range is device memory, and not touched by other work until the stream has received it.
    pub unsafe fn receive(&self, to: Address, bytes: u64, peer: u32, stream: &Stream) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let to = to as *mut c_void;
        // SAFETY: as the caller promises.
        let received =
            unsafe { (self.library.ncclRecv)(to, bytes as usize, INT8, peer as c_int, self.handle, stream.handle()) };
        self.check("receive", received)
    }

    /// Returns the numbers of all ranks except this one, in ascending order.
    pub fn peers(&self) -> impl Iterator<Item = u32> {
        let own = self.rank;
        (0..self.ranks).filter(move |peer| *peer != own)
    }

    /// Returns the address of a slot in the staging buffer. The slot is for bytes from rank `peer` if `incoming`, else
    /// for bytes to it. The slots begin at offset `first` and are `stride` bytes apart.
    pub fn slot(&self, first: u64, stride: u64, peer: u32, incoming: bool) -> Address {
        let number = u64::from(if peer < self.rank { peer } else { peer - 1 });
        let before = if incoming { u64::from(self.ranks - 1) } else { 0 };
        self.staging + first + (before + number) * stride
    }

    /// Tests a new communicator: runs the sum kernels once, sends bytes between all pairs of ranks, and checks what
    /// this rank receives. NCCL thereby opens all connections and allocates their memory now.
    pub fn self_test(&mut self, group: &GroupHandle, stream: &Stream) -> Result<(), DeviceError> {
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

    /// Waits until the device has completed all work now on a stream, at most for `timeout`, or without limit if
    /// `timeout` is `None`.
    pub fn wait_for_stream(
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

    /// Enqueues one of the sum kernels on a stream.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub unsafe fn launch(&self, launch: &Launch, stream: &Stream) -> Result<(), CudaError> {
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
