//! One GPU with what it holds: its arena, the pinned arena of its host side, queues and staging; and how all that is
//! looked at from outside. What runs on it is the executor's.

use super::arena::DeviceArena;
use super::driver::{Address, Context, CudaError};
use super::queues::Queues;
use super::staging::Staging;
use crate::device::{DeviceError, Memory, NoFiles};
use crate::spaces::{Arenas, Spaces};
use crate::transport::Seat;
use plimsoll_core::{Bytes, Space};
use plimsoll_program::Placement;
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// What an arena holds before anything is written: NaN in every float type, and an index out of every range. It is
/// not what [`Memory::poison`] writes.
const PATTERN: u16 = 0x7ff5;
/// Two bytes that are NaN in every float type.
const POISON: u16 = 0x7ff4;

/// The arena on the host's side: where the processor computes and the GPU copies. And the scratch file behind it.
struct Host {
    context: Arc<Context>,
    /// The device's part of these is empty.
    spaces: Spaces,
    pinned: Option<*mut u8>,
}

// SAFETY: the pointer is the address of pages of the arena that `Host` owns; every use enters the context first.
unsafe impl Send for Host {}

impl Host {
    fn take(context: &Arc<Context>, placement: &Placement, scratch: Option<&Path>) -> Result<Host, DeviceError> {
        let Placement { host_bytes, file_bytes, .. } = *placement;
        let spaces = Spaces::map(&Placement { host_bytes, file_bytes, ..Placement::default() }, scratch)?;
        let mut host = Host { context: context.clone(), spaces, pinned: None };
        host.pin()?;
        Ok(host)
    }

    fn bytes(&self) -> u64 {
        self.spaces.bytes(Space::Host).0
    }

    /// Pins the pages that the arena's bytes lie in, all of which are its own.
    fn pin(&mut self) -> Result<(), CudaError> {
        if self.bytes() == 0 {
            return Ok(());
        }
        let page = page_bytes();
        let base = self.spaces.of(Space::Host).base();
        let before = base as usize % page;
        let length = (before + self.bytes() as usize).next_multiple_of(page);
        let first = base.wrapping_sub(before);
        // SAFETY: the arena's mapping is made of whole pages, all of them between its guard pages, and stays until
        // the arena is resized or dropped: both unpin first.
        self.pinned = unsafe { self.context.pin(first, length) }?.then_some(first);
        Ok(())
    }

    fn unpin(&mut self) -> Result<(), CudaError> {
        // SAFETY: pinned by `pin`; callers see to it that nothing is being copied.
        self.pinned.take().map_or(Ok(()), |first| unsafe { self.context.unpin(first) })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Copies from and to these pages have to end before they go.
        let _ = self.context.enter().and_then(|()| self.context.synchronize()).and_then(|()| self.unpin());
    }
}

fn page_bytes() -> usize {
    // SAFETY: asks for a constant.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Where the host's arena lies, as long as it is not resized.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    base: *mut u8,
    bytes: u64,
}

impl HostRange {
    /// A place in it.
    ///
    /// # Panics
    /// Where it does not lie in it.
    pub fn at(self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(offset + bytes <= self.bytes, "bug: {bytes} bytes at {offset} do not lie in the host's arena");
        self.base.wrapping_add(offset as usize)
    }
}

/// A GPU that is held.
pub struct Machine {
    /// First of the fields that hold memory, so that it is idle when they are dropped.
    pub context: Arc<Context>,
    /// Streams and events.
    pub queues: Queues,
    /// The way to ordinary memory and files.
    pub staging: Staging,
    arena: DeviceArena,
    host: Host,
    /// Scratch up to here was given to ops that have run: libraries need not write it to its end.
    pub scratch_end: u64,
    /// What went wrong where it could not be told: everything after says so.
    failed: Option<CudaError>,
}

impl Machine {
    /// Takes staging, queues, the arena of the host, the scratch file, and the arena of the device: the latter as large
    /// as [`Machine::retake`] then says.
    ///
    /// # Errors
    /// What GPU or host refuse.
    pub fn take(context: &Arc<Context>, placement: &Placement, scratch: Option<&Path>) -> Result<Machine, DeviceError> {
        let queues = Queues::new(context)?;
        let staging = Staging::new(context)?;
        let host = Host::take(context, placement, scratch)?;
        let arena = DeviceArena::take(context, 0)?;
        Ok(Machine { context: context.clone(), queues, staging, arena, host, scratch_end: 0, failed: None })
    }

    /// Makes the arena of the device another size, of zeros: valid tokens, positions and lengths.
    ///
    /// # Errors
    /// What the GPU refuses.
    pub fn retake(&mut self, bytes: u64) -> Result<(), CudaError> {
        self.context.synchronize()?;
        self.arena.retake(bytes)?;
        self.fill_all(0)
    }

    /// The first byte of the device's arena.
    pub fn base(&self) -> Address {
        self.arena.base()
    }

    /// The address of a place in the device's arena.
    pub fn address(&self, offset: u64, bytes: u64) -> Address {
        self.arena.address(offset, bytes)
    }

    /// What the device holds for the arena.
    pub fn held(&self) -> Bytes {
        self.arena.held()
    }

    /// The arena of the host, for copies.
    pub fn host(&self) -> HostRange {
        HostRange { base: self.host.spaces.of(Space::Host).base(), bytes: self.host.bytes() }
    }

    /// From now on others may read what is shown to them from the host's arena.
    pub fn join(&mut self, seat: Seat) {
        self.host.spaces.join(seat);
    }

    /// The arena of the host, for ops of the processor.
    pub fn spaces(&self) -> &Spaces {
        &self.host.spaces
    }

    /// What went wrong before, if anything did.
    ///
    /// # Errors
    /// That.
    pub fn check(&self) -> Result<(), CudaError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Fills the whole arena of the device with a pattern of two bytes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill_all(&self, value: u16) -> Result<(), CudaError> {
        if self.held() == Bytes::ZERO {
            return Ok(());
        }
        // SAFETY: all of the arena and nothing else, in the order of the queue that everything joins.
        unsafe { self.queues.compute().fill(self.arena.base(), value, self.held().0 & !1) }
    }

    /// Fills the arena with what shows whether it was written.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill_pattern(&mut self) -> Result<(), CudaError> {
        self.scratch_end = 0;
        self.fill_all(PATTERN)
    }

    /// Copies into the arenas between Programs.
    pub fn write(&mut self, space: Space, first: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        if space != Space::Device {
            self.context.synchronize()?;
            self.host.spaces.fill(space, first, bytes);
            return Ok(());
        }
        let to = self.address(first, bytes.len() as u64);
        let give = |_: &mut dyn crate::device::FileSpace, offset: u64, part: &mut [u8]| {
            part.copy_from_slice(&bytes[offset as usize..][..part.len()]);
            Ok(())
        };
        // SAFETY: inside the arena; Programs join the queue of computation at their ends and begin after it.
        unsafe { self.staging.send(self.queues.compute(), to, bytes.len() as u64, &mut NoFiles, give) }
    }

    /// Copies out of the arenas between Programs, and waits for it.
    pub fn read(&mut self, space: Space, first: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.context.enter()?;
        if space != Space::Device {
            self.context.synchronize()?;
            let range = first..first + into.len() as u64;
            into.copy_from_slice(&self.host.spaces.look(space, range));
            return Ok(());
        }
        let from = self.address(first, into.len() as u64);
        // SAFETY: as in `write`; between Programs nothing waits for a file.
        unsafe { self.staging.receive(self.queues.compute(), from, into) }
    }

    /// Keeps an error for whoever asks next; what a caller without a way to fail gets instead is its own business.
    pub fn keep<T>(&mut self, result: Result<T, impl Into<DeviceError>>) -> Option<T> {
        match result.map_err(Into::into) {
            Ok(value) => Some(value),
            Err(DeviceError::Cuda(error)) => {
                self.failed.get_or_insert(error);
                None
            }
            Err(other) => panic!("bug: {other}"),
        }
    }

    /// The end of the topmost part of the device's arena that was written, looked for from above.
    fn device_high_water(&mut self) -> Result<u64, CudaError> {
        const PART: u64 = 8 << 20;
        let pattern = PATTERN.to_ne_bytes();
        let mut part = vec![0; PART as usize];
        let mut end = self.arena.bytes();
        while end > 0 {
            let start = (end - 1) / PART * PART;
            let found = &mut part[..(end - start) as usize];
            self.read(Space::Device, start, found)?;
            // Parts begin at even places.
            if let Some(last) = found.chunks(2).rposition(|pair| *pair != pattern[..pair.len()]) {
                return Ok((start + 2 * last as u64 + 2).min(end));
            }
            end = start;
        }
        Ok(0)
    }
}

impl Host {
    /// Makes the arena another size; see [`Arenas::resize`].
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

impl Arenas for Machine {
    fn resize(&mut self, space: Space, bytes: u64, kept: u64) -> Result<(), DeviceError> {
        self.context.synchronize()?;
        match space {
            Space::Host => return self.host.resize(bytes, kept),
            Space::Scratch => return self.host.spaces.resize(space, bytes, kept),
            _ => {}
        }
        self.arena.resize(bytes)?;
        let first = kept.next_multiple_of(2);
        if let Some(above) = self.held().0.checked_sub(first).filter(|above| *above > 0) {
            // SAFETY: held by the arena, and nothing is at work in it.
            unsafe { self.queues.compute().fill(self.arena.base() + first, PATTERN, above & !1) }?;
        }
        self.scratch_end = 0;
        Ok(())
    }

    fn copy(&mut self, from: (Space, u64), to: (Space, u64), bytes: u64) {
        // Through the host in parts, in the order in which nothing is overwritten before it was read.
        const PART: u64 = 8 << 20;
        let parts = bytes.div_ceil(PART);
        for turn in 0..parts {
            let part = if from.0 == to.0 && to.1 > from.1 { parts - 1 - turn } else { turn };
            let (first, end) = (part * PART, bytes.min((part + 1) * PART));
            let found = self.look(from.0, from.1 + first..from.1 + end).into_owned();
            self.fill(to.0, to.1 + first, &found);
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Nothing may be at work in what is dropped now.
        let _ = self.context.enter().and_then(|()| self.context.synchronize());
    }
}

impl Memory for Machine {
    fn bytes(&self, space: Space) -> Bytes {
        if space == Space::Device { Bytes(self.arena.bytes()) } else { self.host.spaces.bytes(space) }
    }

    /// What cannot be read is NaN.
    fn look(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]> {
        let mut bytes = vec![0xff; (range.end - range.start) as usize];
        let read = self.read(space, range.start, &mut bytes);
        self.keep(read);
        Cow::Owned(bytes)
    }

    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]) {
        let written = self.write(space, first, bytes);
        self.keep(written);
    }

    fn poison(&mut self, space: Space, range: Range<u64>) {
        let entered = self.context.enter();
        self.keep(entered);
        if space != Space::Device {
            let idle = self.context.synchronize();
            self.keep(idle);
            return self.host.spaces.poison(space, range);
        }
        // Floats begin at even places.
        let (first, end) = (range.start.next_multiple_of(2), range.end & !1);
        if first < end {
            let to = self.address(first, end - first);
            // SAFETY: inside the arena, while no op runs.
            let filled = unsafe { self.queues.compute().fill(to, POISON, end - first) };
            self.keep(filled);
        }
    }

    fn high_water(&mut self, space: Space) -> Bytes {
        if space != Space::Device {
            return self.host.spaces.high_water(space);
        }
        let found = self.device_high_water();
        Bytes(self.keep(found).unwrap_or(0).max(self.scratch_end))
    }

    fn strayed(&mut self, space: Space) -> bool {
        if space != Space::Device {
            return self.host.spaces.strayed(space);
        }
        // What is held beyond the arena's bytes still has to hold the pattern.
        let (first, end) = (self.arena.bytes().next_multiple_of(2), self.held().0);
        let mut beyond = vec![0; (end - first) as usize & !1];
        let from = self.arena.base() + first;
        let entered = self.context.enter();
        // SAFETY: held, and no op runs.
        let read = entered.and_then(|()| unsafe { self.staging.receive(self.queues.compute(), from, &mut beyond) });
        self.keep(read).is_some() && beyond.chunks_exact(2).any(|pair| *pair != PATTERN.to_ne_bytes())
    }
}
