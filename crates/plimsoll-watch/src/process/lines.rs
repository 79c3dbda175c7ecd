//! The readings of a process as lines.

use super::{CPU, DeviceUse, MemoryUse, ProcessReading, ProcessState};
use crate::text::{excerpt, seconds};
use plimsoll_core::Bytes;
use std::time::{Duration, UNIX_EPOCH};

/// Formats a reading: a line for the process, and one for each device.
pub fn lines(reading: &ProcessReading) -> String {
    let gpu = match reading.gpu.held_bytes {
        Some(_) => format!("GPU memory {}", describe(&reading.gpu)),
        None => "no GPU memory known".to_owned(),
    };
    let host = match reading.host.held_bytes {
        Some(_) => format!("host memory {}", describe(&reading.host)),
        None => "no host memory known".to_owned(),
    };
    let mut lines = format!("{}: {gpu}; {host}\n", name(reading));
    lines.extend(reading.devices.iter().map(device_line));
    lines
}

/// Formats the end of a watch: the state of the process, its peaks and their times. Ends with a line break.
pub fn summary(reading: &ProcessReading) -> String {
    let state = match reading.state {
        ProcessState::Running => "still runs",
        ProcessState::Ended => "has ended",
    };
    let mut text = format!("{} {state}\n", name(reading));
    for (place, memory) in [("GPU memory", &reading.gpu), ("host memory", &reading.host)] {
        text += &match memory.peak_bytes.zip(memory.peak_at) {
            Some((peak, at)) => format!("  peak of {place}: {peak} at {}\n", time(at)),
            None => format!("  peak of {place}: unknown\n"),
        };
    }
    let on_gpus = reading.devices.iter().filter(|device| device.name != CPU);
    let peaks = on_gpus.filter_map(|device| Some((device, device.peak_bytes?)));
    text.extend(peaks.map(|(device, peak)| format!("  peak on {}: {peak}\n", excerpt(&device.name))));
    text
}

/// Returns name and id of the process.
fn name(reading: &ProcessReading) -> String {
    format!("{} ({})", reading.name.as_deref().map_or_else(|| "process".to_owned(), excerpt), reading.pid)
}

/// Returns the held memory, its peak and its growth as one phrase; `?` if the memory is unknown.
fn describe(memory: &MemoryUse) -> String {
    let held = memory.held_bytes.map_or_else(|| "?".to_owned(), |held| held.to_string());
    let mut text = held;
    if let Some(peak) = memory.peak_bytes.filter(|peak| Some(*peak) != memory.held_bytes) {
        text += &format!(", peak {peak}");
    }
    if let Some((growth, covered)) = memory.growth_bytes_per_minute.zip(memory.growth_seconds) {
        let sign = if growth < 0.0 { "-" } else { "+" };
        text += &format!(", {sign}{} per minute over {}", Bytes(growth.abs() as u64), seconds(covered));
    }
    text
}

/// Returns what the process holds on a device, and what it leaves for a run.
fn device_line(device: &DeviceUse) -> String {
    let mut parts = vec![excerpt(&device.name)];
    parts.extend(device.held_bytes.map(|held| format!("holds {held}")));
    parts.push(match device.free_bytes {
        Some(free) => format!("{free} free of {}", device.total_bytes),
        None => format!("free memory of {} unknown", device.total_bytes),
    });
    if let Some(now) = device.run_bytes {
        let mut text = format!("a run would take {now}");
        let at_peak = device.run_bytes_at_peak.filter(|line| *line != now);
        text += &at_peak.map_or(String::new(), |line| format!(", {line} at the peak"));
        text += &device.run_bytes_without.map_or(String::new(), |line| format!(", {line} after the end"));
        parts.push(text);
    }
    format!("  {}\n", parts.join("  "))
}

/// Formats a time, in seconds since the Unix epoch, as a date and time in UTC.
fn time(at: f64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(at as u64)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::PROCESS_VERSION;

    fn reading(state: ProcessState) -> ProcessReading {
        let is_running = state == ProcessState::Running;
        let gpu = MemoryUse {
            held_bytes: Some(Bytes::gib(6)).filter(|_| is_running),
            peak_bytes: Some(Bytes::gib(7)),
            peak_at: Some(1_795_766_400.4),
            growth_bytes_per_minute: Some(-12.0 * 1024.0 * 1024.0),
            growth_seconds: Some(60.0),
            is_leak: false,
        };
        let device = DeviceUse {
            name: "cuda:0".to_owned(),
            model: "Example".to_owned(),
            total_bytes: Bytes::gib(24),
            free_bytes: Some(Bytes::gib(10)),
            held_bytes: gpu.held_bytes,
            peak_bytes: gpu.peak_bytes,
            run_bytes: Some(Bytes::gib(9)),
            run_bytes_at_peak: Some(Bytes::gib(8)),
            run_bytes_without: Some(Bytes::gib(14)),
        };
        ProcessReading {
            version: PROCESS_VERSION,
            at: 0.0,
            pid: 7,
            name: Some("a\u{1b}[2J\nb".to_owned()),
            state,
            gpu,
            host: MemoryUse::default(),
            devices: vec![device],
            warnings: vec![],
        }
    }

    #[test]
    fn lines_show_memory_growth_and_room() {
        let expected = "\
a\\u{1b}[2J\\nb (7): GPU memory 6.00 GiB, peak 7.00 GiB, -12.00 MiB per minute over 60.00 s; no host memory known
  cuda:0  holds 6.00 GiB  10.00 GiB free of 24.00 GiB  a run would take 9.00 GiB, 8.00 GiB at the peak, 14.00 GiB after the end
";
        assert_eq!(lines(&reading(ProcessState::Running)), expected);
    }

    #[test]
    fn summary_names_peaks_with_their_times() {
        let expected = "\
a\\u{1b}[2J\\nb (7) has ended
  peak of GPU memory: 7.00 GiB at 2026-11-27T08:00:00Z
  peak of host memory: unknown
  peak on cuda:0: 7.00 GiB
";
        assert_eq!(summary(&reading(ProcessState::Ended)), expected);
    }
}
