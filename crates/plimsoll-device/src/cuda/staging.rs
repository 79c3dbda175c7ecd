//! Staging: a ring of pinned slots for copies between the device and ordinary host memory or files.
//!
//! One side fills a slot and the other empties it. A slot is reused only when both are done, so the host never changes
//! bytes that the device still reads. File writes stay in their slot until it is needed or the program ends; the device
//! continues meanwhile.

use super::driver::{Address, Context, Event, Pinned, Stream};
use crate::device::FileSpace;
use crate::error::{CudaError, DeviceError};
use std::sync::Arc;

/// Size of one slot of the staging ring.
pub(super) const SLOT_BYTES: u64 = 8 << 20;
/// Number of slots of the staging ring.
const SLOT_COUNT: u64 = 4;
/// Pinned host memory that each GPU uses for staging, outside the arenas. The plan counts it as host bytes.
pub const STAGING_BYTES: u64 = SLOT_BYTES * SLOT_COUNT;

/// A write to a file whose bytes the device is still copying into a staging slot.
struct PendingFileWrite {
    tensor: String,
    offset: u64,
    bytes: u64,
}

struct Slot {
    /// Event behind the device's last copy from or to the slot.
    done: Event,
    /// The write of the slot's bytes to a file, due once `done` is complete; `None` if no write is due.
    pending_write: Option<PendingFileWrite>,
}

/// A ring of slots in pinned host memory, through which bytes pass between the device and ordinary memory or files.
pub struct Staging {
    memory: Pinned,
    slots: Vec<Slot>,
    next: usize,
}

impl Staging {
    /// Allocates [`STAGING_BYTES`] of pinned memory.
    ///
    /// # Errors
    /// Fails if the host cannot pin that much memory.
    pub fn new(context: &Arc<Context>) -> Result<Staging, CudaError> {
        let slot = || Ok(Slot { done: Event::new(context)?, pending_write: None });
        let slots = (0..SLOT_COUNT).map(|_| slot()).collect::<Result<_, CudaError>>()?;
        Ok(Staging { memory: Pinned::new(context, STAGING_BYTES)?, slots, next: 0 })
    }

    /// Returns a pointer to the first byte of a slot.
    pub(super) fn slot_pointer(&self, slot: usize) -> *mut u8 {
        // SAFETY: the memory holds [`SLOT_COUNT`] slots.
        unsafe { self.memory.base().add(slot * SLOT_BYTES as usize) }
    }

    /// Returns the first `bytes` bytes of a slot. The device must not be using the slot.
    ///
    /// # Safety
    /// [`Event::synchronize`] of the slot's event has returned since the device last got the slot.
    unsafe fn slot_bytes(&mut self, slot: usize, bytes: u64) -> &mut [u8] {
        assert!(bytes <= SLOT_BYTES);
        // SAFETY: inside the memory, which was zeroed; the caller promises exclusive use.
        unsafe { std::slice::from_raw_parts_mut(self.slot_pointer(slot), bytes as usize) }
    }

    /// Waits until the device has finished with a slot, then carries out the slot's pending file write, if any.
    fn drain(&mut self, slot: usize, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.slots[slot].done.synchronize()?;
        if let Some(PendingFileWrite { tensor, offset, bytes }) = self.slots[slot].pending_write.take() {
            // SAFETY: waited for just now.
            let from = unsafe { self.slot_bytes(slot, bytes) };
            files.write(&tensor, offset, from).map_err(|source| DeviceError::File { tensor, source })?;
        }
        Ok(())
    }

    /// Marks a slot as in use. The device has finished with it once all work that `stream` holds now is complete.
    pub(super) fn record(&self, slot: usize, stream: &Stream) -> Result<(), CudaError> {
        self.slots[slot].done.record(stream)
    }

    /// Waits until the device has finished with a slot.
    pub(super) fn wait(&self, slot: usize) -> Result<(), CudaError> {
        self.slots[slot].done.synchronize()
    }

    /// Returns the index of the ring's next slot, after waiting until it is free. Carries out the slot's pending file
    /// write first.
    pub(super) fn claim(&mut self, files: &mut dyn FileSpace) -> Result<usize, DeviceError> {
        let slot = self.next;
        self.drain(slot, files)?;
        self.next = (slot + 1) % self.slots.len();
        Ok(slot)
    }

    /// Copies `bytes` bytes to the device, slot by slot. `fill_part(files, offset, part)` must fill each part with the
    /// bytes that begin at `offset`. `files` first carries out the pending file write of a slot that is used again. On
    /// return, copies are enqueued but may not have completed.
    ///
    /// # Errors
    /// Returns the error of `fill_part`, of a pending file write, or of the driver.
    ///
    /// # Safety
    /// The `bytes` bytes at `to` are device memory. When the copies have their turn in `stream`, no other work accesses
    /// these bytes.
    pub unsafe fn copy_to_device(
        &mut self,
        stream: &Stream,
        to: Address,
        bytes: u64,
        files: &mut dyn FileSpace,
        mut fill_part: impl FnMut(&mut dyn FileSpace, u64, &mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        for offset in (0..bytes).step_by(SLOT_BYTES as usize) {
            let part = SLOT_BYTES.min(bytes - offset);
            let slot = self.claim(files)?;
            // SAFETY: a claimed slot was waited for.
            fill_part(files, offset, unsafe { self.slot_bytes(slot, part) })?;
            // SAFETY: the slot is not touched before its event completes; the range as the caller promises.
            unsafe { stream.copy_in(to + offset, self.slot_pointer(slot), part) }?;
            self.slots[slot].done.record(stream)?;
        }
        Ok(())
    }

    /// Copies `bytes` bytes from device address `from` to a tensor in a file, starting at byte `first` of the tensor.
    /// Some of the bytes reach the file only in [`Staging::flush`].
    ///
    /// # Errors
    /// Returns the error of a file or of the driver.
    ///
    /// # Safety
    /// The `bytes` bytes at `from` are device memory. While the copies have their turn in `stream`, no other work
    /// writes these bytes.
    pub unsafe fn copy_to_file(
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
            // SAFETY: as in `copy_to_device`.
            unsafe { stream.copy_out(self.slot_pointer(slot), from + offset, part) }?;
            self.slots[slot].done.record(stream)?;
            self.slots[slot].pending_write =
                Some(PendingFileWrite { tensor: tensor.to_owned(), offset: first + offset, bytes: part });
        }
        Ok(())
    }

    /// Fills `into` with the bytes at device address `from`, and returns when they have arrived. While the host takes
    /// one part out of its slot, the device copies the next parts into the other slots.
    ///
    /// # Errors
    /// Returns the error of the driver.
    ///
    /// # Safety
    /// The bytes at `from` are device memory. While the copies have their turn in `stream`, no other work writes these
    /// bytes. No slot holds a pending file write.
    pub unsafe fn copy_from_device(
        &mut self,
        stream: &Stream,
        from: Address,
        into: &mut [u8],
    ) -> Result<(), CudaError> {
        let parts = into.len().div_ceil(SLOT_BYTES as usize);
        let mut received = 0;
        let mut rest = into;
        for part in 0..parts + self.slots.len() - 1 {
            if part < parts {
                let slot = part % self.slots.len();
                let offset = part as u64 * SLOT_BYTES;
                let bytes = SLOT_BYTES.min(rest.len() as u64 + received - offset);
                self.slots[slot].done.synchronize()?;
                // SAFETY: as in `copy_to_device`.
                unsafe { stream.copy_out(self.slot_pointer(slot), from + offset, bytes) }?;
                self.slots[slot].done.record(stream)?;
            }
            // As many parts are in flight as there are slots.
            if part + 1 >= self.slots.len() && !rest.is_empty() {
                let slot = (part + 1 - self.slots.len()) % self.slots.len();
                self.slots[slot].done.synchronize()?;
                let bytes = SLOT_BYTES.min(rest.len() as u64);
                let (now, later) = rest.split_at_mut(bytes as usize);
                // SAFETY: waited for just now.
                now.copy_from_slice(unsafe { self.slot_bytes(slot, bytes) });
                received += bytes;
                rest = later;
            }
        }
        Ok(())
    }

    /// Carries out all pending file writes, in order. Waits for the device's copies into their slots.
    ///
    /// # Errors
    /// Returns the error of a file or of the driver.
    pub fn flush(&mut self, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        for ahead in 0..self.slots.len() {
            let slot = (self.next + ahead) % self.slots.len();
            if self.slots[slot].pending_write.is_some() {
                self.drain(slot, files)?;
            }
        }
        Ok(())
    }

    /// Discards all pending file writes, after a program has failed.
    pub fn discard_pending_writes(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.pending_write = None);
    }
}
