//! Freed heap memory returns to the system. The test has its own process, because it measures the process's memory.

use plimsoll_core::Bytes;
use plimsoll_device::process;
use std::hint::black_box;
use std::thread;

#[test]
#[cfg_attr(not(target_env = "gnu"), ignore = "only glibc has a trim threshold")]
fn memory_freed_by_thread_returns_to_system() {
    process::set_heap_trim_threshold();
    let before = process::resident().unwrap();
    let allocate_and_free = || {
        // Small pieces as in a plan, after the release of a large one, which raises glibc's trim threshold.
        drop(black_box(vec![1_u8; 4 << 20]));
        let pieces: Vec<Vec<u8>> = (0..3072).map(|_| black_box(vec![1_u8; 1000])).collect();
        let held = process::resident().unwrap();
        drop(pieces);
        held
    };
    let held = thread::spawn(allocate_and_free).join().unwrap();
    process::trim_heap();
    let left = process::resident().unwrap();
    assert!(held > before + Bytes::mib(2), "{before}, {held}: nothing was allocated");
    assert!(left < before + Bytes::mib(1), "{before}, {held}, {left}: freed memory stayed resident");
}
