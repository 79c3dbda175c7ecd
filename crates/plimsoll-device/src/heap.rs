//! An allocator that counts: the soak and the tests install it, to show that nothing but the arena grows while a
//! Program runs. Programs that are shipped run on the system's allocator alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counting over all threads. To be installed with `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

fn given(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
    LARGEST.fetch_max(bytes, Relaxed);
}

fn taken_back(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

// SAFETY: every call is handed to the system's allocator with the arguments it came with, and its answer is handed
// back; the counting beside it allocates nothing and cannot unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the one that is asked for.
        let address = unsafe { System.alloc(layout) };
        if !address.is_null() {
            given(layout.size());
        }
        address
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let address = unsafe { System.alloc_zeroed(layout) };
        if !address.is_null() {
            given(layout.size());
        }
        address
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(address, layout) };
        taken_back(layout.size());
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let moved = unsafe { System.realloc(address, layout, size) };
        if !moved.is_null() {
            given(size);
            taken_back(layout.size());
        }
        moved
    }
}

/// What the heap gave while something ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grown {
    /// The largest single piece.
    pub largest_bytes: u64,
    /// The most that was held at once beyond what was held before.
    pub peak_bytes: u64,
    /// What is still held.
    pub kept_bytes: i64,
}

/// Runs `work` and says what the heap gave meanwhile, to all threads of the process together: one at a time. All zero
/// where [`Counting`] is not installed.
pub fn grown<R>(work: impl FnOnce() -> R) -> (R, Grown) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    LARGEST.store(0, Relaxed);
    let result = work();
    let grown = Grown {
        largest_bytes: LARGEST.load(Relaxed) as u64,
        peak_bytes: PEAK.load(Relaxed).saturating_sub(before) as u64,
        kept_bytes: LIVE.load(Relaxed) as i64 - before as i64,
    };
    (result, grown)
}
