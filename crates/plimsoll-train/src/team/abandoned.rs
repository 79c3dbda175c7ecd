//! Memory that devices with an unresponsive thread still hold.

use crate::engine::Engine;
use plimsoll_core::Bytes;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

/// Memory of this process that abandoned engines still hold. An engine is abandoned if its device missed its heartbeats
/// during a job: a thread still owns the engine and may never return. Clones share the same list.
#[derive(Clone, Default)]
pub struct AbandonedMemory(Arc<Mutex<Vec<AbandonedArena>>>);

/// Drops a value on a thread of its own, because dropping it may block forever. If the system refuses a thread, the
/// value stays.
pub(super) fn drop_on_thread<T: Send + 'static>(value: T) {
    let (sender, receiver) = channel();
    match thread::Builder::new().spawn(move || drop(receiver.recv())) {
        Ok(_) => drop(sender.send(value)),
        Err(_) => std::mem::forget(value),
    }
}

/// Arenas of one abandoned engine.
struct AbandonedArena {
    bytes: Bytes,
    /// Reference that can be upgraded for as long as the memory is held.
    alive: Weak<()>,
}

impl AbandonedMemory {
    fn entries(&self) -> MutexGuard<'_, Vec<AbandonedArena>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `bytes` bytes of arenas. They count as held for as long as `alive` can be upgraded.
    pub fn add(&self, bytes: Bytes, alive: Weak<()>) {
        self.entries().push(AbandonedArena { bytes, alive });
    }

    /// Drops an engine on a thread of its own, because dropping it may block forever. Until then, its `bytes` bytes of
    /// arenas count as held.
    pub fn drop_in_background(&self, engine: Engine, bytes: Bytes) {
        let alive = Arc::new(());
        self.add(bytes, Arc::downgrade(&alive));
        drop_on_thread((engine, alive));
    }

    /// Returns the bytes of all arenas that abandoned engines hold now.
    pub fn bytes(&self) -> Bytes {
        self.entries().iter().filter(|entry| entry.alive.strong_count() > 0).map(|entry| entry.bytes).sum()
    }

    /// Returns the bytes of all arenas that were held at any time since [`AbandonedMemory::reset_peak`]. The peak of
    /// the process includes them.
    pub fn peak_bytes(&self) -> Bytes {
        self.entries().iter().map(|entry| entry.bytes).sum()
    }

    /// Starts a new peak for [`AbandonedMemory::peak_bytes`]: forgets the memory that has been freed.
    pub fn reset_peak(&self) {
        self.entries().retain(|entry| entry.alive.strong_count() > 0);
    }
}
