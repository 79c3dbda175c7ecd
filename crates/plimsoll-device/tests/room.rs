//! Measuring holds no more than it may. Alone in its process, whose memory is what is looked at.

use plimsoll_core::{Bytes, DType};
use plimsoll_device::bench::{Extent, measure_cpu};
use plimsoll_device::probe::Cpu;
use plimsoll_device::process;
use std::time::Duration;

#[test]
fn a_processor_is_measured_in_the_room_that_there_is() {
    if process::reset_peak().is_err() {
        eprintln!("skipped: this system does not say what a process held at most since a moment");
        return;
    }
    let (cpu, dtypes) = (Cpu::read(), [DType::F32, DType::Bf16]);
    let whole = Extent::whole(&cpu);
    assert_eq!(whole.within(Bytes(u64::MAX), 2), whole);
    for (room, threads) in [(160, 2), (48, 2), (16, 2), (4, 2), (160, 24), (60, 24)] {
        let room = Bytes::mib(room);
        let extent = whole.within(room, threads);
        process::give_back();
        process::reset_peak().unwrap();
        let before = process::resident().unwrap();
        let measured = measure_cpu(&cpu, threads, &dtypes, Duration::from_millis(100), &extent, &mut |_| {}).unwrap();
        let held = process::peak_resident().unwrap().saturating_sub(before);
        println!("{room}, {threads} threads: {held} held, {extent:?}");
        assert!(held <= room, "{held} held where there is room for {room}");
        assert!(held >= Bytes(room.0 / 8), "{held} is not what was measured in {room}");
        assert!(measured.memory.triad > 0.0 && measured.products.iter().all(|product| product.median_flops > 0.0));
    }
}
