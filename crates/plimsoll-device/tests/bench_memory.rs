//! Measuring the CPU stays within a given memory limit. The test has its own process, because it measures the process's
//! memory.

use plimsoll_core::{Bytes, DType};
use plimsoll_device::bench::{MeasurementExtent, measure_cpu};
use plimsoll_device::probe::Cpu;
use plimsoll_device::process;
use std::time::Duration;

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn cpu_measurement_stays_within_its_memory_limit() {
    if process::reset_peak().is_err() {
        eprintln!("skipped: this system cannot reset the peak of resident memory");
        return;
    }
    let (cpu, dtypes) = (Cpu::read(), [DType::F32, DType::Bf16]);
    let whole = MeasurementExtent::full(&cpu);
    assert_eq!(whole.within_memory(Bytes(u64::MAX), 2), whole);
    for (limit, threads) in [(160, 2), (48, 2), (16, 2), (4, 2), (160, 24), (60, 24)] {
        let limit = Bytes::mib(limit);
        let extent = whole.within_memory(limit, threads);
        process::trim_heap();
        process::reset_peak().unwrap();
        let before = process::resident().unwrap();
        let measured = measure_cpu(&cpu, threads, &dtypes, Duration::from_millis(100), &extent, &mut |_| {}).unwrap();
        let held = process::peak_resident().unwrap().saturating_sub(before);
        println!("{limit}, {threads} threads: {held} held, {extent:?}");
        assert!(held <= limit, "{held} used with a limit of {limit}");
        assert!(held >= Bytes(limit.0 / 8), "{held} is too little for a measurement within {limit}");
        assert!(measured.memory.triad > 0.0 && measured.products.iter().all(|product| product.median_flops > 0.0));
    }
}
