//! The state of a machine and of a run at one moment: [`Snapshot`]. The terminal view, the lines and the JSON of
//! `plimsoll watch` all show this one type, so the same moment has the same numbers in each.
//!
//! ```text
//! events.jsonl → run_log → run_state ┐
//! plan.json, result.json ────────────┤ run_folder → source → Snapshot
//! drivers and /proc, Ray ────────────┘
//! ```
//!
//! Reading never writes to the run folder. The JSON form can be read back, so that a view may show the snapshots of a server
//! on another machine.

pub(crate) mod assemble;
pub mod plan;
pub mod run_folder;
pub mod run_log;
pub mod run_notes;
pub mod run_state;
pub mod source;
mod step_line;

use plan::PlanSnapshot;
use plimsoll_core::{Bytes, Category, Recommendation, TimelinePoint, WorkKind, peak_point};
use plimsoll_device::cuda::nvml::Pcie;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// Version of the JSON form of [`Snapshot`]. It changes when a field changes its meaning or is removed.
pub const SNAPSHOT_VERSION: u32 = 1;

/// A machine, and a run on it, at one moment. Unknown values are `null`, never 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Snapshot {
    /// Version of this format.
    pub version: u32,
    /// Time of the snapshot, in seconds since the Unix epoch.
    pub at: f64,
    /// Devices of the run in the order of its plan, then the other devices of this machine. Without a run, then those of
    /// its cluster.
    pub devices: Vec<DeviceSnapshot>,
    /// Memory of this machine, and the part that the run may use for offload.
    pub host: HostSnapshot,
    /// Load of this machine's processor.
    pub cpu: CpuSnapshot,
    /// The reason why this machine has no GPU to list, such as `NVIDIA driver not found`; `None` if it has one.
    #[serde(default)]
    pub no_gpu: Option<String>,
    /// The run; `None` if no run is watched.
    pub run: Option<RunSnapshot>,
    /// Changes of settings that the planner predicts to make the run faster, in the order of plans. Computed with
    /// `--advise`, else empty.
    pub recommendations: Vec<Recommendation>,
    /// Conditions that need attention, most urgent first.
    pub warnings: Vec<String>,
    /// Events of the run other than steps, newest last. At most [`run_state::MAX_FEED`].
    pub feed: Vec<FeedEntry>,
}

/// A device at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceSnapshot {
    /// The device's name.
    pub name: String,
    /// Model name of the hardware; `None` if it is unknown, and for a simulated device.
    pub model: Option<String>,
    /// Whether the device is simulated.
    pub simulated: bool,
    /// Whether the run uses the device.
    pub in_run: bool,
    /// All memory of the device; `None` if it is unknown, as for a device of a run on another machine.
    pub total_bytes: Option<Bytes>,
    /// Memory that no process holds; `None` if it is unknown, as for a device of a run on another machine.
    pub free_bytes: Option<Bytes>,
    /// Memory that other processes hold, estimated as what is neither free, nor reserved by the driver, nor held by the
    /// run; `None` where the free memory is unknown.
    pub others_bytes: Option<Bytes>,
    /// Load line of the run on this device. Without a run: the load line that a run would have by default; on a device of
    /// a cluster, the memory that no run has reserved.
    pub load_line_bytes: Option<Bytes>,
    /// Predicted most bytes of the run on this device, arena and charges together.
    pub predicted_peak_bytes: Option<Bytes>,
    /// Measured most bytes of the run on this device so far.
    pub measured_peak_bytes: Option<Bytes>,
    /// Measured bytes of the run on this device at its newest measurement.
    pub held_bytes: Option<Bytes>,
    /// Planned bytes of the tensors in the arena by category, at the moment when the arena is fullest.
    pub by_category: BTreeMap<Category, Bytes>,
    /// Measured bytes of the arena under the same plan by category, at the moment when the most bytes of tensors were in
    /// use; `None` if they are not measured, as before the first step and on remote devices.
    #[serde(default)]
    pub measured_by_category: Option<BTreeMap<Category, Bytes>>,
    /// Planned peak of the arena in each kind of work.
    pub by_program: BTreeMap<WorkKind, Bytes>,
    /// Planned bytes of the arena over one step, as in the plan; empty for a device outside the run.
    #[serde(default)]
    pub timeline: Vec<TimelinePoint>,
    /// Measured bytes of the run on this device over its steps, in order: at most [`run_state::MAX_MEMORY_POINTS`].
    #[serde(default)]
    pub memory_history: Vec<MemoryPoint>,
    /// Bytes of the run outside its arena, such as a CUDA context.
    pub charges_bytes: Option<Bytes>,
    /// Fraction of the recent past, 0 to 1, in which the device worked.
    pub utilization: Option<f64>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Power draw in watts.
    pub power_w: Option<f64>,
    /// Power limit in watts.
    pub power_limit_w: Option<f64>,
    /// Clock of the multiprocessors in MHz.
    pub clock_mhz: Option<u32>,
    /// Highest clock of the multiprocessors in MHz.
    pub clock_limit_mhz: Option<u32>,
    /// Reasons for reduced clocks; empty if there are none or they are not reported.
    pub throttled_by: Vec<String>,
    /// The link to the host, now and at most.
    pub pcie: Option<Pcie>,
    /// Processes that compute or draw on a GPU; empty if there are none or they are not reported.
    pub processes: Vec<ProcessSnapshot>,
}

/// A process that computes or draws on a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessSnapshot {
    /// Process id.
    pub pid: u32,
    /// Name of the program, often with its arguments; `None` if it is not visible.
    pub name: Option<String>,
    /// Memory that the process holds on the GPU; `None` if the driver does not report it.
    pub held_bytes: Option<Bytes>,
    /// Whether it is a process of Plimsoll.
    pub is_plimsoll: bool,
}

/// The memory of this machine at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HostSnapshot {
    /// All memory that a process here may use.
    pub total_bytes: Option<Bytes>,
    /// Memory that is free now.
    pub free_bytes: Option<Bytes>,
    /// Load line of the run for offloaded tensors.
    pub load_line_bytes: Option<Bytes>,
    /// Planned bytes of the run's offloaded tensors.
    pub arena_bytes: Option<Bytes>,
}

/// The load of this machine's processor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CpuSnapshot {
    /// Fraction of the time of all cores, 0 to 1, that was busy since the last reading; `None` if that is less than 0.1 s ago.
    pub load: Option<f64>,
    /// The least and the most load that the run keeps to; `None` if it keeps to none.
    pub band: Option<[f64; 2]>,
}

/// Whether a run is under way, and how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// No event has been written yet.
    Starting,
    /// A process trains.
    Running,
    /// The run is complete.
    Done,
    /// The run stopped early, and can be resumed.
    Stopped,
    /// The process ended without a last event, as after `kill -9`. The run can be resumed from its newest checkpoint.
    Died,
}

impl RunState {
    /// Returns the state in words.
    pub fn describe(self) -> &'static str {
        match self {
            RunState::Starting => "starting",
            RunState::Running => "running",
            RunState::Done => "done",
            RunState::Stopped => "stopped",
            RunState::Died => "ended without a result",
        }
    }
}

/// A run at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunSnapshot {
    /// Folder of the run.
    pub folder: String,
    /// Whether the run is under way.
    pub state: RunState,
    /// Whether the speed is that of simulated devices.
    pub simulated: bool,
    /// Number of completed steps.
    pub step: u64,
    /// Number of all steps; `None` if the length of the run is given in hours.
    pub steps: Option<u64>,
    /// Loss of the newest step; `None` before the first step, and for a step without labels.
    pub loss: Option<f64>,
    /// Global gradient norm of the newest step.
    pub gradient_norm: Option<f64>,
    /// Learning rate of the newest step.
    pub learning_rate: Option<f64>,
    /// Seconds of a step: the running mean, and for a run that has ended the median since its last start.
    pub step_seconds: Option<f64>,
    /// Predicted seconds of a step under the present plan.
    pub predicted_step_seconds: Option<f64>,
    /// Tokens (including padding) per second: from the running mean, and for a run that has ended over all steps since its
    /// last start.
    pub tokens_per_second: Option<f64>,
    /// Part of the devices' peak rate of matrix products that is reached, 0 to 1; `None` if the peak is unknown or the
    /// devices are simulated.
    pub peak_share: Option<f64>,
    /// Predicted seconds until the last step; `None` if the run does not train, or its length is given in hours.
    pub eta_seconds: Option<f64>,
    /// Seconds since the newest event.
    pub silent_seconds: Option<f64>,
    /// Loss of the newest evaluation.
    pub eval_loss: Option<f64>,
    /// Newest checkpoint: its step.
    pub checkpoint_step: Option<u64>,
    /// The choices of the newest plan; `None` before it is written.
    #[serde(default)]
    pub plan: Option<PlanSnapshot>,
    /// Losses over the run, for a plot: at most [`run_state::MAX_POINTS`] steps, in order.
    pub history: Vec<HistoryPoint>,
}

/// One step of a run's history.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HistoryPoint {
    /// The step, counted from 1.
    pub step: u64,
    /// Time of its event, in seconds since the Unix epoch.
    pub time: f64,
    /// Loss; `None` for a step without labels.
    pub loss: Option<f64>,
    /// Global gradient norm.
    #[serde(deserialize_with = "nan_from_null")]
    pub gradient_norm: f64,
    /// Learning rate.
    #[serde(deserialize_with = "nan_from_null")]
    pub learning_rate: f64,
    /// Tokens (including padding) per second of this step.
    #[serde(deserialize_with = "nan_from_null")]
    pub tokens_per_second: f64,
}

/// Measured memory of a device at one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemoryPoint {
    /// The step, counted from 1.
    pub step: u64,
    /// Bytes that the run held on the device, arena and charges together.
    pub held_bytes: Bytes,
}

/// Reads a number that JSON holds as `null` because it is not finite.
fn nan_from_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// An event of a run as one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FeedEntry {
    /// Time of the event, in seconds since the Unix epoch.
    pub time: f64,
    /// The line.
    pub text: String,
}

impl DeviceSnapshot {
    /// Returns the bytes between the load line and what the run holds at most, measured or else predicted; `None` for a
    /// device outside the run.
    pub fn headroom_bytes(&self) -> Option<Bytes> {
        let most = self.measured_peak_bytes.max(self.predicted_peak_bytes)?;
        Some(self.load_line_bytes?.saturating_sub(most))
    }

    /// Returns the predicted peak with the op that sets it, as one phrase: `peak 46.10 MiB in the backward pass, layer 3,
    /// at matrix product of down`. `None` without a timeline.
    pub fn peak_sentence(&self) -> Option<String> {
        let point = peak_point(&self.timeline, None)?;
        let peak = self.predicted_peak_bytes.unwrap_or(point.bytes);
        Some(format!("peak {peak} {}", point.describe()))
    }
}
