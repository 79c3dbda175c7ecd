//! What is freed is held no longer. Alone in its process, whose memory is what is looked at.

use plimsoll_core::Bytes;
use plimsoll_device::process;
use std::hint::black_box;
use std::thread;

#[test]
#[cfg_attr(not(target_env = "gnu"), ignore = "other heaps are asked for nothing")]
fn what_a_thread_has_freed_goes_back() {
    process::keep_nothing_freed();
    let before = process::resident().unwrap();
    let frees = || {
        // Pieces of the size of a plan's, after a large one whose return raises what glibc keeps.
        drop(black_box(vec![1_u8; 4 << 20]));
        let pieces: Vec<Vec<u8>> = (0..3072).map(|_| black_box(vec![1_u8; 1000])).collect();
        let held = process::resident().unwrap();
        drop(pieces);
        held
    };
    let held = thread::spawn(frees).join().unwrap();
    process::give_back();
    let left = process::resident().unwrap();
    assert!(held > before + Bytes::mib(2), "{before}, {held}: nothing was taken");
    assert!(left < before + Bytes::mib(1), "{before}, {held}, {left}: freed, and held");
}
