//! The memory of one process over time, on GPUs and on the host, and what it leaves for a run: `plimsoll watch --pid PID`.
//!
//! ```text
//! NVML ──► Machine ───────┐
//! /proc ─► ProcessStatus ─┴► source ─► ProcessReading ─► lines, JSON
//!                               │
//!                            history: peak and growth
//! ```
//!
//! Reading takes nothing from the process, and needs no right to it.

mod history;
pub mod lines;
pub mod source;

use plimsoll_core::Bytes;
use serde::Serialize;

/// Version of the JSON form of [`ProcessReading`]. It changes when a field changes its meaning or is removed.
pub const PROCESS_VERSION: u32 = 1;

/// Name of the processor among the devices.
const CPU: &str = "cpu";

/// The memory of a process, and what it leaves for a run, at one moment. Unknown values are `null`, never 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessReading {
    /// Version of this format.
    pub version: u32,
    /// Time of the reading, in seconds since the Unix epoch.
    pub at: f64,
    /// Process id.
    pub pid: u32,
    /// Name of the program, with its arguments if NVML reports it; `None` if it is not visible.
    pub name: Option<String>,
    /// Whether the process lives.
    pub state: ProcessState,
    /// Its memory on all GPUs together, for computing and drawing. `None` figures if no GPU lists the process, or a driver
    /// does not report its memory.
    pub gpu: MemoryUse,
    /// Its resident memory on the host.
    pub host: MemoryUse,
    /// All devices of this machine.
    pub devices: Vec<DeviceUse>,
    /// Conditions that need attention, most urgent first.
    pub warnings: Vec<String>,
}

/// Whether a process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProcessState {
    /// The process lives.
    Running,
    /// The process has ended. This is the last reading.
    Ended,
}

/// The memory of a process in one place, now and since the first reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemoryUse {
    /// Memory that the process holds now; `None` if it is unknown, and after the end of the process.
    pub held_bytes: Option<Bytes>,
    /// The most since the first reading.
    pub peak_bytes: Option<Bytes>,
    /// Time at which the peak was first read, in seconds since the Unix epoch.
    pub peak_at: Option<f64>,
    /// Growth per minute: the median of the slopes between all pairs of readings in the window. Negative if the memory
    /// shrinks; `None` until the readings cover half of the window.
    pub growth_bytes_per_minute: Option<f64>,
    /// Seconds of readings from which the growth is computed.
    pub growth_seconds: Option<f64>,
    /// Whether the memory grew steadily through a whole window, as with a leak.
    pub is_leak: bool,
}

/// A device of this machine with the memory of a process on it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceUse {
    /// Name of the device, such as `cuda:0`.
    pub name: String,
    /// Model name of the hardware.
    pub model: String,
    /// All memory of the device.
    pub total_bytes: Bytes,
    /// Memory that no process holds; `None` if a GPU does not report it.
    pub free_bytes: Option<Bytes>,
    /// Memory that the process holds on the device; `None` if it is unknown.
    pub held_bytes: Option<Bytes>,
    /// The most that the process held on the device since the first reading.
    pub peak_bytes: Option<Bytes>,
    /// Load line that a run would have by default now; `None` if no run can use the device, or its free memory is unknown.
    pub run_bytes: Option<Bytes>,
    /// Load line that a run would have by default while the process is at its peak.
    pub run_bytes_at_peak: Option<Bytes>,
    /// Load line that a run would have by default after the end of the process.
    pub run_bytes_without: Option<Bytes>,
}

impl ProcessReading {
    /// Formats the reading as a JSON object on one line.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("plain data has a JSON form")
    }
}
