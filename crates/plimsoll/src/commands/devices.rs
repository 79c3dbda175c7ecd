//! `plimsoll devices`, `plimsoll bench devices` and `plimsoll bench step`: the devices of this machine and their speed.

use super::model::to_json;
use crate::args::{BenchDevicesArgs, BenchStepArgs, DevicesArgs};
use crate::output;
use plimsoll_core::{DType, Exit, Failure};
use plimsoll_device::calibration::{self, Shortfall, ShortfallKind};
use plimsoll_device::machine::Machine;
use plimsoll_device::probe::Cpu;
use plimsoll_device::{bench, regular_file};
use plimsoll_program::models::decoder::Base;
use plimsoll_train::bench::{StepShape, step};
use plimsoll_watch::devices;
use std::path::Path;

/// Lists the devices of this machine or, with `--forget`, deletes what runs have learned about them.
///
/// # Errors
/// None so far.
pub fn show(args: &DevicesArgs) -> Result<Exit, Failure> {
    if args.forget {
        let forgotten = calibration::forget_shortfalls(|_| true);
        let text: String = forgotten.iter().map(forgotten_line).collect();
        output::print(if text.is_empty() { "nothing to forget\n" } else { &text });
    } else if args.json {
        output::print_json(&devices::json(&Machine::read()));
    } else {
        output::print(&devices::table(&Machine::read()));
    }
    Ok(Exit::Done)
}

fn forgotten_line(short: &Shortfall) -> String {
    let Shortfall { device, reason, .. } = short;
    match short.kind {
        ShortfallKind::LoadLineBytes(line) => format!("forgotten: {device} was held to {line} ({reason})\n"),
        ShortfallKind::Slowdown(times) => format!("forgotten: {device} was {times} times slower ({reason})\n"),
    }
}

/// Measures the devices and stores the rates for the planner.
///
/// # Errors
/// Memory or threads that the system refuses; a file that cannot be written.
pub fn measure(args: &BenchDevicesArgs) -> Result<Exit, Failure> {
    let measured = bench::measure_devices(args.duration, output::print_progress)?;
    calibration::store_bench(&measured);
    output::print(&devices::bench_table(&measured));
    if let Some(rates) = calibration::remeasure_disk(Path::new(".")) {
        output::print(&devices::disk_line(&rates));
    }
    if let Some(path) = &args.json {
        regular_file::write(path, devices::bench_json(&measured).as_bytes())
            .map_err(|error| Failure::input(format!("cannot write {}: {error}", path.display())))?;
    }
    Ok(Exit::Done)
}

/// Times a training step and prints one line of JSON.
///
/// # Errors
/// An invalid model shape; memory that the system refuses.
pub fn time_step(args: &BenchStepArgs) -> Result<Exit, Failure> {
    let base = match args.base.as_str() {
        "int8" => Base::Int8,
        "nf4" => Base::Nf4,
        _ => Base::Plain,
    };
    let lora = args.method == "lora";
    if base != Base::Plain && !lora {
        let text = format!("--base {}: only frozen weights can be quantized", args.base);
        return Err(Failure::input(text).hint("freeze the base weights with --method lora"));
    }
    let cpu = Cpu::read();
    let threads = cpu.threads_for(Some(args.threads.unwrap_or(2.min(cpu.threads))));
    let threads = threads.map_err(|error| Failure::input(format!("--threads: {error}")))?;
    let measured = step(&StepShape {
        vocab: u64::from(args.vocab),
        layers: u64::from(args.layers),
        hidden: u64::from(args.hidden),
        heads: u64::from(args.heads),
        kv_heads: u64::from(args.kv_heads),
        ffn: u64::from(args.ffn),
        sequence: u64::from(args.sequence),
        batch: u64::from(args.batch),
        accumulate: u64::from(args.accumulate),
        threads,
        steps: u64::from(args.steps),
        warmup: u64::from(args.warmup),
        dtype: if args.dtype == "bf16" { DType::Bf16 } else { DType::F32 },
        checkpoint: args.checkpoint,
        memory: args.memory,
        device: args.device.clone(),
        rank: if lora { u64::from(args.rank) } else { 0 },
        base,
    })?;
    output::print_json(&to_json(&measured));
    Ok(Exit::Done)
}
