//! A counting allocator. The soak and the tests install it to show that only the arena grows while a Program runs.
//! Shipped programs use the system's allocator alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with counters of the allocated bytes of all threads. Install it with `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn record_allocation(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
    LARGEST.fetch_max(bytes, Relaxed);
}

fn record_release(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

// SAFETY: every call is forwarded to the system's allocator with unchanged arguments and result; the counters allocate
// nothing and cannot unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller makes the promise that `System` requires.
        let address = unsafe { System.alloc(layout) };
        if !address.is_null() {
            record_allocation(layout.size());
        }
        address
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller makes the promise that `System` requires.
        let address = unsafe { System.alloc_zeroed(layout) };
        if !address.is_null() {
            record_allocation(layout.size());
        }
        address
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller makes the promise that `System` requires.
        unsafe { System.dealloc(address, layout) };
        record_release(layout.size());
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller makes the promise that `System` requires.
        let moved = unsafe { System.realloc(address, layout, size) };
        if !moved.is_null() {
            record_allocation(size);
            record_release(layout.size());
        }
        moved
    }
}

/// Heap growth while some work ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapGrowth {
    /// Size of the largest single allocation during the work.
    pub largest_bytes: u64,
    /// Largest number of allocated bytes at any time during the work, minus those allocated before it.
    pub peak_bytes: u64,
    /// Allocated bytes after the work, minus those allocated before it; negative if the work freed more than it
    /// allocated.
    pub kept_bytes: i64,
}

/// Runs `work` and returns the heap growth of all threads of the process meanwhile. Only one call may run at a time.
/// All figures are zero if [`CountingAllocator`] is not installed.
pub fn measure_growth<R>(work: impl FnOnce() -> R) -> (R, HeapGrowth) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    LARGEST.store(0, Relaxed);
    let result = work();
    let growth = HeapGrowth {
        largest_bytes: LARGEST.load(Relaxed) as u64,
        peak_bytes: PEAK.load(Relaxed).saturating_sub(before) as u64,
        kept_bytes: LIVE.load(Relaxed) as i64 - before as i64,
    };
    (result, growth)
}
