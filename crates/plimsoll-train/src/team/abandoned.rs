//! Devices with a thread that does not respond: the memory that they still hold, and the placeholder that stands for them.

use crate::session::engine::Engine;
use plimsoll_core::Bytes;
use plimsoll_device::device::{Device, DeviceError, FileSpace, Memory, NoMemory, Observer, ProgramCall};
use plimsoll_program::{Placement, ProgramSet, TensorId};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

/// Memory of this process that abandoned jobs still hold. Clones share the same list.
#[derive(Clone, Default)]
pub struct AbandonedMemory(Arc<Mutex<Vec<AbandonedArena>>>);

/// Arena of an abandoned engine.
struct AbandonedArena {
    bytes: Bytes,
    /// Alive for as long as the memory is held.
    alive: Weak<()>,
}

impl AbandonedMemory {
    fn entries(&self) -> MutexGuard<'_, Vec<AbandonedArena>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds arenas of `bytes` that are held for as long as `alive` can be upgraded.
    pub fn add(&self, bytes: Bytes, alive: Weak<()>) {
        self.entries().push(AbandonedArena { bytes, alive });
    }

    /// Drops an engine on a thread of its own, because dropping it may block forever.
    pub fn drop_in_background(&self, engine: Engine, bytes: Bytes) {
        let alive = Arc::new(());
        self.add(bytes, Arc::downgrade(&alive));
        thread::spawn(move || {
            drop(engine);
            drop(alive);
        });
    }

    /// Returns the bytes that are held now.
    pub fn bytes(&self) -> Bytes {
        self.entries().iter().filter(|entry| entry.alive.strong_count() > 0).map(|entry| entry.bytes).sum()
    }

    /// Returns the bytes that were held at any time since [`AbandonedMemory::reset_peak`]. The peak of the process includes them all.
    pub fn peak_bytes(&self) -> Bytes {
        self.entries().iter().map(|entry| entry.bytes).sum()
    }

    /// Starts a new peak, without the memory that has been freed.
    pub fn reset_peak(&self) {
        self.entries().retain(|entry| entry.alive.strong_count() > 0);
    }
}

/// Device in the place of one with its engine on another thread. All its work fails with a loss.
pub struct PlaceholderDevice {
    name: String,
    memory: NoMemory,
}

impl PlaceholderDevice {
    /// Creates a placeholder for the device of this name.
    pub fn of(name: &str) -> Box<dyn Device> {
        Box::new(PlaceholderDevice { name: name.to_owned(), memory: NoMemory })
    }

    fn lost(&self) -> DeviceError {
        DeviceError::Lost { device: self.name.clone(), reason: String::new() }
    }
}

impl Device for PlaceholderDevice {
    fn run_observed(&mut self, _: ProgramCall, _: &mut dyn FileSpace, _: &mut dyn Observer) -> Result<(), DeviceError> {
        Err(self.lost())
    }

    fn adopt(&mut self, _: ProgramSet, _: Placement) -> Result<(), DeviceError> {
        Err(self.lost())
    }

    fn write(&mut self, _: TensorId, _: u32, _: &[u8]) {}

    /// Fills the result with NaN.
    fn read(&mut self, _: TensorId, _: u32, bytes: &mut [u8]) {
        bytes.fill(0xff);
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.memory
    }
}
