//! The report of a sweep: `sweep.json` in the sweep's folder, and the output of `plimsoll sweep --json`. The field
//! names are a stable interface for other tools.

use crate::{Bytes, Rung};
use serde::{Deserialize, Serialize};

/// The state of a run of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SweepState {
    /// Waiting for memory on a device.
    Waiting,
    /// Running in its own process.
    Running,
    /// All steps completed.
    Done,
    /// Stopped early; the run can be resumed.
    Stopped,
    /// The run fits on none of the devices.
    DoesNotFit,
    /// The run failed for another reason.
    Failed,
}

/// The predicted demand of a run on one device, planned in a process like the one that will train it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDemand {
    /// Whether the run fits on the device.
    pub fits: bool,
    /// Load line of the run: arena and charges. If the run does not fit: the smallest load line that would.
    pub bytes: Bytes,
    /// Bytes offloaded to the host.
    pub host_bytes: Bytes,
    /// Lossy rungs of the plan on this device.
    pub rungs: Vec<Rung>,
    /// Rows of the training data, which is the length of an epoch.
    pub rows: u64,
    /// Seconds of an optimizer step under the load line `bytes`.
    pub step_seconds: f64,
    /// Seconds of an optimizer step with the whole memory of the device.
    pub fastest_step_seconds: f64,
    /// Seconds of an evaluation.
    pub evaluate_seconds: f64,
    /// Seconds of a checkpoint.
    pub checkpoint_seconds: f64,
    /// Seconds to read the initial weights and to write the model.
    pub files_seconds: f64,
    /// Measured seconds to open model and data and to plan.
    pub prepare_seconds: f64,
}

/// A run of a sweep. Figures are measured, except fields with `predicted` in their name. Unknown values are omitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepRun {
    /// Name of the run and of its folder inside the sweep's folder.
    pub name: String,
    /// The state of the run.
    pub state: SweepState,
    /// The device of the last process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The process id, while the run is running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Load line of the run on its device, as predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_bytes: Option<Bytes>,
    /// Most bytes held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// Share of the device's time, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Seconds from start to end at that share of the device's time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// Seconds from start to end, summed over all attempts.
    pub seconds: f64,
    /// Time of the last start in seconds after the start of the sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
    /// Completed optimizer steps.
    pub steps: u64,
    /// Training loss of the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Loss of the last evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// Restarts after the run had ended early.
    pub retries: u32,
    /// Recoveries during the run.
    pub recoveries: u64,
    /// Reason, in one line, for the last early end or restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Exit code of the last process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
}

impl SweepRun {
    /// Creates a waiting run.
    pub fn new(name: &str) -> SweepRun {
        SweepRun {
            name: name.to_owned(),
            state: SweepState::Waiting,
            device: None,
            pid: None,
            predicted_bytes: None,
            measured_bytes: None,
            share: None,
            predicted_seconds: None,
            seconds: 0.0,
            started: None,
            steps: 0,
            loss: None,
            eval_loss: None,
            retries: 0,
            recoveries: 0,
            reason: None,
            exit: None,
        }
    }
}

/// A device of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepDevice {
    /// The device's name.
    pub name: String,
    /// Whether the device is simulated; all seconds on it are then simulated.
    pub simulated: bool,
    /// The device's load line.
    pub budget_bytes: Bytes,
    /// Largest sum of the load lines of concurrent runs.
    pub peak_reserved_bytes: Bytes,
    /// Most concurrent runs.
    pub workers: u32,
    /// Reason why the device got no run, if runs were waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The report of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepReport {
    /// [`SweepReport::VERSION`].
    pub version: u32,
    /// The value of `--devices`.
    pub requested_devices: String,
    /// Permitted restarts of a run.
    pub retries: u32,
    /// Limit of concurrent runs per device; `None` without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// The devices.
    pub devices: Vec<SweepDevice>,
    /// The runs in the order of the request.
    pub runs: Vec<SweepRun>,
    /// Predicted seconds from the first start to the last end, for the runs that were unfinished at the last start of
    /// the sweep.
    pub predicted_seconds: f64,
    /// Predicted lower bound of the seconds of any schedule of these runs.
    pub lower_bound_seconds: f64,
    /// Measured seconds from the first start to the last end.
    pub seconds: f64,
}

impl SweepReport {
    /// Version of the file. It changes when a field changes its meaning or is removed.
    pub const VERSION: u32 = 1;

    /// Computes the share of runs that are done, 1 for a sweep without runs.
    pub fn success_rate(&self) -> f64 {
        let done = self.runs.iter().filter(|run| run.state == SweepState::Done).count();
        if self.runs.is_empty() { 1.0 } else { done as f64 / self.runs.len() as f64 }
    }
}
