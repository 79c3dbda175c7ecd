//! Resources of one GPU: device arena, pinned host arena, scratch file, queues and staging, and the memory view that
//! tests and observers get. Running programs in them belongs to `executor`.

use super::arena::DeviceArena;
use super::driver::{Address, Context};
use super::queues::Queues;
use super::staging::Staging;
use crate::device::{Memory, NoFiles};
use crate::error::{CudaError, DeviceError};
use crate::spaces::{ResizableArenas, Spaces};
use crate::transport::GroupHandle;
use plimsoll_core::{Bytes, Space};
use plimsoll_program::Placement;
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Two-byte pattern that fills arena bytes before they are written: NaN in every float type, and out of range as an
/// index. It differs from the pattern of [`Memory::poison`].
const UNWRITTEN_PATTERN: u16 = 0x7ff5;
/// Two-byte pattern that overwrites dead tensors ([`Memory::poison`]): NaN in every float type.
const POISON: u16 = 0x7ff4;

/// The arena in host memory, pinned for copies by the GPU if possible, and the scratch file.
struct HostArena {
    context: Arc<Context>,
    /// Host arena and scratch file, with an empty device arena.
    spaces: Spaces,
    pinned: Option<*mut u8>,
}

// SAFETY: the pointer is the address of pages of the arena that `HostArena` owns; every use enters the context first.
unsafe impl Send for HostArena {}

impl HostArena {
    fn allocate(
        context: &Arc<Context>,
        placement: &Placement,
        scratch: Option<&Path>,
    ) -> Result<HostArena, DeviceError> {
        let Placement { host_bytes, file_bytes, .. } = *placement;
        let spaces = Spaces::map(&Placement { host_bytes, file_bytes, ..Placement::default() }, scratch)?;
        let mut host = HostArena { context: context.clone(), spaces, pinned: None };
        host.pin()?;
        Ok(host)
    }

    fn bytes(&self) -> u64 {
        self.spaces.bytes(Space::Host).0
    }

    /// Pins all pages that contain bytes of the arena. Leaves them unpinned if the driver refuses.
    fn pin(&mut self) -> Result<(), CudaError> {
        if self.bytes() == 0 {
            return Ok(());
        }
        let page = page_bytes();
        let base = self.spaces.arena(Space::Host).base();
        let before = base as usize % page;
        let length = (before + self.bytes() as usize).next_multiple_of(page);
        let first = base.wrapping_sub(before);
        // SAFETY: the arena's mapping consists of whole pages between its guard pages. It stays mapped until the arena
        // is resized or dropped, and both unpin first.
        self.pinned = unsafe { self.context.pin(first, length) }?.then_some(first);
        Ok(())
    }

    fn unpin(&mut self) -> Result<(), CudaError> {
        // SAFETY: pinned by `pin`; callers ensure that no copy is in progress.
        self.pinned.take().map_or(Ok(()), |first| unsafe { self.context.unpin(first) })
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        // Copies from and to these pages must complete before the pages are unmapped.
        let _ = self.context.enter().and_then(|()| self.context.synchronize()).and_then(|()| self.unpin());
    }
}

fn page_bytes() -> usize {
    // SAFETY: asks for a constant.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// The address range of the host arena, valid until the arena is resized.
#[derive(Clone, Copy, Debug)]
pub struct HostArenaRange {
    base: *mut u8,
    bytes: u64,
}

impl HostArenaRange {
    /// Returns a pointer to the range of `bytes` bytes at `offset` in the host arena.
    ///
    /// # Panics
    /// Panics if the range exceeds the host arena.
    pub fn pointer(self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(offset + bytes <= self.bytes, "bug: {bytes} bytes at {offset} do not lie in the host's arena");
        self.base.wrapping_add(offset as usize)
    }
}

/// The resources of one opened GPU: context, streams, staging, the device arena, the host arena and the scratch file.
pub struct GpuResources {
    /// The GPU's CUDA context.
    pub context: Arc<Context>,
    /// Streams of the GPU's queues, and events between them.
    pub queues: Queues,
    /// Pinned slots for copies to and from ordinary memory and files.
    pub staging: Staging,
    arena: DeviceArena,
    host: HostArena,
    /// End of the topmost workspace that executed ops used in the device arena. All of that workspace counts as
    /// written, although libraries may leave parts of it unwritten.
    pub workspace_end: u64,
    /// The first CUDA failure in a function that returns no error, reported by [`GpuResources::check`]; `None` if there
    /// was none.
    first_failure: Option<CudaError>,
}

impl GpuResources {
    /// Allocates staging, queues, the host arena and the scratch file. The device arena stays empty until
    /// [`GpuResources::resize_discarding`].
    ///
    /// # Errors
    /// Fails if the GPU or the host refuses memory.
    pub fn allocate(
        context: &Arc<Context>,
        placement: &Placement,
        scratch: Option<&Path>,
    ) -> Result<GpuResources, DeviceError> {
        let queues = Queues::new(context)?;
        let staging = Staging::new(context)?;
        let host = HostArena::allocate(context, placement, scratch)?;
        let arena = DeviceArena::allocate(context, 0)?;
        Ok(GpuResources {
            context: context.clone(),
            queues,
            staging,
            arena,
            host,
            workspace_end: 0,
            first_failure: None,
        })
    }

    /// Resizes the device arena, discards its contents and fills it with zeros, which are valid tokens, positions and
    /// lengths.
    ///
    /// # Errors
    /// Fails if the GPU refuses memory.
    pub fn resize_discarding(&mut self, bytes: u64) -> Result<(), CudaError> {
        self.context.synchronize()?;
        self.arena.resize_discarding(bytes)?;
        self.fill_all(0)
    }

    /// Returns the address of the first byte of the device arena.
    pub fn base(&self) -> Address {
        self.arena.base()
    }

    /// Returns the address of the range of `bytes` bytes at `offset` in the device arena. Panics if the range exceeds
    /// the arena.
    pub fn address(&self, offset: u64, bytes: u64) -> Address {
        self.arena.address(offset, bytes)
    }

    /// Returns the memory that the device arena holds, with bytes that are mapped beyond its size.
    pub fn held_bytes(&self) -> Bytes {
        self.arena.held_bytes()
    }

    /// Returns the address range of the host arena, for copies.
    pub fn host_range(&self) -> HostArenaRange {
        HostArenaRange { base: self.host.spaces.arena(Space::Host).base(), bytes: self.host.bytes() }
    }

    /// Joins a communication group, whose ranks may then read posted sends directly from the host arena.
    pub fn join(&mut self, group: GroupHandle) {
        self.host.spaces.join_group(group);
    }

    /// Returns the host arena and scratch file, for ops that run on the CPU.
    pub fn spaces(&self) -> &Spaces {
        &self.host.spaces
    }

    /// Checks that [`GpuResources::record_failure`] has recorded no failure.
    ///
    /// # Errors
    /// Returns the first recorded failure.
    pub fn check(&self) -> Result<(), CudaError> {
        self.first_failure.clone().map_or(Ok(()), Err)
    }

    /// Fills the device arena, and bytes that are mapped beyond it, with the two-byte pattern `value`.
    ///
    /// # Errors
    /// Returns the error of the driver.
    pub fn fill_all(&self, value: u16) -> Result<(), CudaError> {
        if self.held_bytes() == Bytes::ZERO {
            return Ok(());
        }
        // SAFETY: the range is exactly the arena; the fill is ordered on the compute stream, which all queues join.
        unsafe { self.queues.compute().fill(self.arena.base(), value, self.held_bytes().0 & !1) }
    }

    /// Fills the device arena, and bytes that are mapped beyond it, with the pattern that marks unwritten bytes.
    /// Forgets which workspaces ops have used.
    ///
    /// # Errors
    /// Returns the error of the driver.
    pub fn fill_pattern(&mut self) -> Result<(), CudaError> {
        self.workspace_end = 0;
        self.fill_all(UNWRITTEN_PATTERN)
    }

    /// Writes bytes into an arena or the scratch file, from byte `first` on. No program may be running.
    pub fn write(&mut self, space: Space, first: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        if space != Space::Device {
            self.context.synchronize()?;
            self.host.spaces.fill(space, first, bytes);
            return Ok(());
        }
        let to = self.address(first, bytes.len() as u64);
        let fill_part = |_: &mut dyn crate::device::FileSpace, offset: u64, part: &mut [u8]| {
            part.copy_from_slice(&bytes[offset as usize..][..part.len()]);
            Ok(())
        };
        // SAFETY: inside the arena; programs join the compute queue at their ends, and start after it.
        unsafe { self.staging.copy_to_device(self.queues.compute(), to, bytes.len() as u64, &mut NoFiles, fill_part) }
    }

    /// Fills `into` with bytes of an arena or the scratch file, from byte `first` on, and waits until they have
    /// arrived. No program may be running.
    pub fn read(&mut self, space: Space, first: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.context.enter()?;
        if space != Space::Device {
            self.context.synchronize()?;
            let range = first..first + into.len() as u64;
            into.copy_from_slice(&self.host.spaces.view(space, range));
            return Ok(());
        }
        let from = self.address(first, into.len() as u64);
        // SAFETY: as in `write`; between programs no staging slot holds a pending file write.
        unsafe { self.staging.copy_from_device(self.queues.compute(), from, into) }
    }

    /// Returns the value of a result. If it is a CUDA failure, records it for [`GpuResources::check`] and returns
    /// `None`; an earlier recorded failure stays.
    ///
    /// # Panics
    /// Panics for errors of other kinds, which are bugs.
    pub fn record_failure<T>(&mut self, result: Result<T, impl Into<DeviceError>>) -> Option<T> {
        match result.map_err(Into::into) {
            Ok(value) => Some(value),
            Err(DeviceError::Cuda(error)) => {
                self.first_failure.get_or_insert(error);
                None
            }
            Err(other) => panic!("bug: {other}"),
        }
    }

    /// Returns the offset just past the topmost written bytes of the device arena; 0 if none was written.
    fn device_high_water(&mut self) -> Result<u64, CudaError> {
        const PART_BYTES: u64 = 8 << 20;
        let pattern = UNWRITTEN_PATTERN.to_ne_bytes();
        let mut part = vec![0; PART_BYTES as usize];
        let mut end = self.arena.bytes();
        while end > 0 {
            let start = (end - 1) / PART_BYTES * PART_BYTES;
            let found = &mut part[..(end - start) as usize];
            self.read(Space::Device, start, found)?;
            // Parts begin at even offsets.
            if let Some(last) = found.chunks(2).rposition(|pair| *pair != pattern[..pair.len()]) {
                return Ok((start + 2 * last as u64 + 2).min(end));
            }
            end = start;
        }
        Ok(0)
    }
}

impl HostArena {
    /// Resizes the host arena; see [`ResizableArenas::resize`].
    fn resize(&mut self, bytes: u64, kept: u64) -> Result<(), DeviceError> {
        if bytes == self.bytes() {
            return self.spaces.resize(Space::Host, bytes, kept);
        }
        self.unpin()?;
        let resized = self.spaces.resize(Space::Host, bytes, kept);
        self.pin()?;
        resized
    }
}

impl ResizableArenas for GpuResources {
    fn resize(&mut self, space: Space, bytes: u64, kept: u64) -> Result<(), DeviceError> {
        self.context.synchronize()?;
        match space {
            Space::Host => return self.host.resize(bytes, kept),
            Space::Scratch => return self.host.spaces.resize(space, bytes, kept),
            _ => {}
        }
        self.arena.resize(bytes)?;
        let first = kept.next_multiple_of(2);
        if let Some(above) = self.held_bytes().0.checked_sub(first).filter(|above| *above > 0) {
            // SAFETY: the range is mapped by the arena, and no work uses it.
            unsafe { self.queues.compute().fill(self.arena.base() + first, UNWRITTEN_PATTERN, above & !1) }?;
        }
        self.workspace_end = 0;
        Ok(())
    }

    fn copy(&mut self, from: (Space, u64), to: (Space, u64), bytes: u64) {
        // Copies through the host in parts, ordered so that no byte is overwritten before it is read.
        const PART_BYTES: u64 = 8 << 20;
        let parts = bytes.div_ceil(PART_BYTES);
        for step in 0..parts {
            let part = if from.0 == to.0 && to.1 > from.1 { parts - 1 - step } else { step };
            let (first, end) = (part * PART_BYTES, bytes.min((part + 1) * PART_BYTES));
            let found = self.view(from.0, from.1 + first..from.1 + end).into_owned();
            self.fill(to.0, to.1 + first, &found);
        }
    }
}

impl Drop for GpuResources {
    fn drop(&mut self) {
        // Work in progress must complete before the fields are dropped.
        let _ = self.context.enter().and_then(|()| self.context.synchronize());
    }
}

impl Memory for GpuResources {
    fn bytes(&self, space: Space) -> Bytes {
        if space == Space::Device { Bytes(self.arena.bytes()) } else { self.host.spaces.bytes(space) }
    }

    /// Returns a copy of the bytes in `range` of an arena or the scratch file. They are NaN if the read fails.
    fn view(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]> {
        let mut bytes = vec![0xff; (range.end - range.start) as usize];
        let read = self.read(space, range.start, &mut bytes);
        self.record_failure(read);
        Cow::Owned(bytes)
    }

    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]) {
        let written = self.write(space, first, bytes);
        self.record_failure(written);
    }

    fn poison(&mut self, space: Space, range: Range<u64>) {
        let entered = self.context.enter();
        self.record_failure(entered);
        if space != Space::Device {
            let idle = self.context.synchronize();
            self.record_failure(idle);
            return self.host.spaces.poison(space, range);
        }
        // Floats begin at even offsets.
        let (first, end) = (range.start.next_multiple_of(2), range.end & !1);
        if first < end {
            let to = self.address(first, end - first);
            // SAFETY: inside the arena; no op runs.
            let filled = unsafe { self.queues.compute().fill(to, POISON, end - first) };
            self.record_failure(filled);
        }
    }

    fn high_water(&mut self, space: Space) -> Bytes {
        if space != Space::Device {
            return self.host.spaces.high_water(space);
        }
        let found = self.device_high_water();
        Bytes(self.record_failure(found).unwrap_or(0).max(self.workspace_end))
    }

    fn has_stray_writes(&mut self, space: Space) -> bool {
        if space != Space::Device {
            return self.host.spaces.has_stray_writes(space);
        }
        // Bytes mapped beyond the arena must still hold the pattern.
        let (first, end) = (self.arena.bytes().next_multiple_of(2), self.held_bytes().0);
        let mut beyond = vec![0; end.saturating_sub(first) as usize & !1];
        let from = self.arena.base() + first;
        let entered = self.context.enter();
        // SAFETY: the range is mapped, and no op runs.
        let read =
            entered.and_then(|()| unsafe { self.staging.copy_from_device(self.queues.compute(), from, &mut beyond) });
        self.record_failure(read).is_some()
            && beyond.chunks_exact(2).any(|pair| *pair != UNWRITTEN_PATTERN.to_ne_bytes())
    }
}
