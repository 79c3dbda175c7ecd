//! The way between the host's ordinary memory, or files, and the device: a ring of pinned slots.
//!
//! A slot is filled by one side and emptied by the other, and taken again only when both are done with it: the host
//! never changes what the device still reads. What goes into files waits in its slot until the slot is needed, or the
//! Program ends: meanwhile the device goes on.

use super::driver::{Address, Context, CudaError, Event, Pinned, Stream};
use crate::device::{DeviceError, FileSpace};
use std::sync::Arc;

/// Bytes of a slot.
pub(super) const SLOT_BYTES: u64 = 8 << 20;
/// How many there are.
const SLOTS: u64 = 4;
/// Pinned memory that every device takes beside its arenas: planned as bytes of the host.
pub const STAGING_BYTES: u64 = SLOT_BYTES * SLOTS;

/// What a slot holds for a file.
struct ToFile {
    tensor: String,
    offset: u64,
    bytes: u64,
}

struct Slot {
    /// When the device is done with it.
    done: Event,
    /// What goes into a file then.
    to_file: Option<ToFile>,
}

/// The ring.
pub struct Staging {
    memory: Pinned,
    slots: Vec<Slot>,
    next: usize,
}

impl Staging {
    /// Takes [`STAGING_BYTES`].
    ///
    /// # Errors
    /// Where the host has not that much left to pin.
    pub fn new(context: &Arc<Context>) -> Result<Staging, CudaError> {
        let slot = || Ok(Slot { done: Event::new(context)?, to_file: None });
        let slots = (0..SLOTS).map(|_| slot()).collect::<Result<_, CudaError>>()?;
        Ok(Staging { memory: Pinned::new(context, STAGING_BYTES)?, slots, next: 0 })
    }

    /// The first byte of a slot.
    pub(super) fn place(&self, slot: usize) -> *mut u8 {
        // SAFETY: there are as many slots as the memory holds.
        unsafe { self.memory.base().add(slot * SLOT_BYTES as usize) }
    }

    /// A slot's first bytes, while the device has nothing to do with it.
    ///
    /// # Safety
    /// [`Event::synchronize`] of its event came back since the device was last given the slot.
    unsafe fn bytes(&mut self, slot: usize, bytes: u64) -> &mut [u8] {
        debug_assert!(bytes <= SLOT_BYTES);
        // SAFETY: inside the memory, which was made zero; nobody else looks at it, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.place(slot), bytes as usize) }
    }

    /// Waits for a slot, and writes what it holds to its file.
    fn settle(&mut self, slot: usize, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.slots[slot].done.synchronize()?;
        if let Some(ToFile { tensor, offset, bytes }) = self.slots[slot].to_file.take() {
            // SAFETY: waited for just now.
            let from = unsafe { self.bytes(slot, bytes) };
            files.write(&tensor, offset, from).map_err(|source| DeviceError::File { tensor, source })?;
        }
        Ok(())
    }

    /// From now on a slot is the device's, until all that is in the stream is over.
    pub(super) fn record(&self, slot: usize, stream: &Stream) -> Result<(), CudaError> {
        self.slots[slot].done.record(stream)
    }

    /// Waits until the device is done with a slot.
    pub(super) fn wait(&self, slot: usize) -> Result<(), CudaError> {
        self.slots[slot].done.synchronize()
    }

    /// The next slot of the ring, free.
    pub(super) fn claim(&mut self, files: &mut dyn FileSpace) -> Result<usize, DeviceError> {
        let slot = self.next;
        self.settle(slot, files)?;
        self.next = (slot + 1) % self.slots.len();
        Ok(slot)
    }

    /// Copies `bytes` to the device, a slot at a time; `give` fills each part, from the first byte on.
    ///
    /// # Errors
    /// What `give` says, or the driver.
    ///
    /// # Safety
    /// The range at `to` is memory of the device, and free for this in the order of `stream`.
    pub unsafe fn send(
        &mut self,
        stream: &Stream,
        to: Address,
        bytes: u64,
        files: &mut dyn FileSpace,
        mut give: impl FnMut(&mut dyn FileSpace, u64, &mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        for offset in (0..bytes).step_by(SLOT_BYTES as usize) {
            let part = SLOT_BYTES.min(bytes - offset);
            let slot = self.claim(files)?;
            // SAFETY: a claimed slot was waited for.
            give(files, offset, unsafe { self.bytes(slot, part) })?;
            // SAFETY: the slot is not touched before its event is over; the range as the caller promises.
            unsafe { stream.copy_in(to + offset, self.place(slot), part) }?;
            self.slots[slot].done.record(stream)?;
        }
        Ok(())
    }

    /// Copies from the device into a file, at byte `first` of the tensor; done when [`Staging::flush`] is.
    ///
    /// # Errors
    /// What the file says, or the driver.
    ///
    /// # Safety
    /// The range at `from` is memory of the device, and not written meanwhile in the order of `stream`.
    pub unsafe fn receive_into_file(
        &mut self,
        stream: &Stream,
        from: Address,
        bytes: u64,
        tensor: &str,
        first: u64,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        for offset in (0..bytes).step_by(SLOT_BYTES as usize) {
            let part = SLOT_BYTES.min(bytes - offset);
            let slot = self.claim(files)?;
            // SAFETY: as in `send`.
            unsafe { stream.copy_out(self.place(slot), from + offset, part) }?;
            self.slots[slot].done.record(stream)?;
            self.slots[slot].to_file = Some(ToFile { tensor: tensor.to_owned(), offset: first + offset, bytes: part });
        }
        Ok(())
    }

    /// Copies from the device, and comes back when all is there. Parts are on their way while earlier ones are taken.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As for [`Staging::receive_into_file`]; nothing waits for a file.
    pub unsafe fn receive(&mut self, stream: &Stream, from: Address, into: &mut [u8]) -> Result<(), CudaError> {
        let parts = into.len().div_ceil(SLOT_BYTES as usize);
        let mut taken = 0;
        let mut rest = into;
        for part in 0..parts + self.slots.len() - 1 {
            if part < parts {
                let slot = part % self.slots.len();
                let offset = part as u64 * SLOT_BYTES;
                let bytes = SLOT_BYTES.min(rest.len() as u64 + taken - offset);
                self.slots[slot].done.synchronize()?;
                // SAFETY: as in `send`.
                unsafe { stream.copy_out(self.place(slot), from + offset, bytes) }?;
                self.slots[slot].done.record(stream)?;
            }
            // As many parts are under way as there are slots.
            if part + 1 >= self.slots.len() && !rest.is_empty() {
                let slot = (part + 1 - self.slots.len()) % self.slots.len();
                self.slots[slot].done.synchronize()?;
                let bytes = SLOT_BYTES.min(rest.len() as u64);
                let (now, later) = rest.split_at_mut(bytes as usize);
                // SAFETY: waited for just now.
                now.copy_from_slice(unsafe { self.bytes(slot, bytes) });
                taken += bytes;
                rest = later;
            }
        }
        Ok(())
    }

    /// Writes everything that waits for a file, in the order in which it came. Where nothing does, nobody waits.
    ///
    /// # Errors
    /// What the file says, or the driver.
    pub fn flush(&mut self, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        for ahead in 0..self.slots.len() {
            let slot = (self.next + ahead) % self.slots.len();
            if self.slots[slot].to_file.is_some() {
                self.settle(slot, files)?;
            }
        }
        Ok(())
    }

    /// Forgets what waits for a file: the Program that wrote it has failed.
    pub fn forget(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.to_file = None);
    }
}
