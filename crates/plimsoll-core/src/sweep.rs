//! The report of a sweep: `sweep.json` in the sweep's folder, and the output of `plimsoll sweep --json`. The field
//! names are a stable interface for other tools.

use crate::{Bytes, Rung};
use serde::{Deserialize, Serialize};

/// The state of a run of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SweepState {
    /// The run waits for memory on a device.
    Waiting,
    /// The run trains in its own process.
    Running,
    /// The run completed all steps.
    Done,
    /// The run stopped early and can be resumed.
    Stopped,
    /// The run fits on none of the devices.
    DoesNotFit,
    /// The run failed for another reason.
    Failed,
}

/// The memory and time that a run needs on one device, predicted from a plan. The plan is made in a process like the
/// one that will train the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDemand {
    /// Whether the run fits on the device.
    pub fits: bool,
    /// Load line that the run gets, for arena and charges together. If the run fits, a step under it takes at most 2 %
    /// longer than with the device's whole memory. Otherwise, it is the smallest load line under which it would fit.
    pub bytes: Bytes,
    /// Bytes offloaded to the host.
    pub host_bytes: Bytes,
    /// Lossy rungs of the plan on this device; empty for a lossless plan.
    pub rungs: Vec<Rung>,
    /// Number of rows of the training data. An epoch reads each row once.
    pub rows: u64,
    /// Predicted seconds of an optimizer step under the load line `bytes`.
    pub step_seconds: f64,
    /// Predicted seconds of an optimizer step if the run has the whole memory of the device.
    pub fastest_step_seconds: f64,
    /// Predicted seconds of one evaluation; 0 without evaluation data.
    pub evaluate_seconds: f64,
    /// Predicted seconds to save one checkpoint.
    pub checkpoint_seconds: f64,
    /// Predicted seconds to load the initial weights, to initialize the optimizer state, and to write the model at the
    /// end.
    pub files_seconds: f64,
    /// Measured seconds that opening the model, opening the data and planning took.
    pub prepare_seconds: f64,
}

/// A run of a sweep. Figures are measured, except fields with `predicted` in their name. `None` is a value that is not
/// known yet; it is omitted from the JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SweepRun {
    /// Name of the run and of its folder inside the sweep's folder.
    pub name: String,
    /// The state of the run.
    pub state: SweepState,
    /// The name of the device on which the run was last started; `None` before the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Id of the process that trains the run; `None` while the run is not running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Load line of the run on its device; `None` before the first start. For a run that fits on no device, the smallest
    /// load line under which it would fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_bytes: Option<Bytes>,
    /// Predicted peak of the run on its device, by the plan that it followed; `None` before the run has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_bytes: Option<Bytes>,
    /// Most bytes that the run has held on its device; `None` before the first measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// Share of the device's computing time that the run gets, 0 to 1; `None` before the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Predicted total seconds of the run, restarts included, at its share of the device's computing time. `None`
    /// before the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// Measured seconds from start to end, summed over the first start and all restarts of the run.
    pub seconds: f64,
    /// Time of the last start in seconds after the start of the sweep; `None` before the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
    /// Number of completed optimizer steps.
    pub steps: u64,
    /// Training loss of the last step; `None` before the first step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Loss of the last evaluation; `None` before the first evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// Number of restarts after the run had ended early.
    pub retries: u32,
    /// Number of recoveries during the run: changes to a smaller recipe, or back.
    pub recoveries: u64,
    /// Reason, in one line, why the run does not fit, ended early or was restarted last; `None` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Exit code of the run's last process; `None` before that process ends, and if a signal ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
}

impl SweepRun {
    /// Creates a run that waits for its first start. Only its name is known.
    pub fn new(name: &str) -> SweepRun {
        SweepRun {
            name: name.to_owned(),
            state: SweepState::Waiting,
            device: None,
            pid: None,
            budget_bytes: None,
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SweepDevice {
    /// The device's name.
    pub name: String,
    /// Whether the device is simulated; all seconds on it are then simulated.
    pub simulated: bool,
    /// The device's load line.
    pub budget_bytes: Bytes,
    /// Largest value that the sum of the load lines of the concurrent runs on this device has reached.
    pub peak_reserved_bytes: Bytes,
    /// Largest number of runs that were on this device at the same time.
    pub workers: u32,
    /// Reason why the device got no run while runs were waiting; `None` if it got one, or if none waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The state of a sweep, running or ended, as `sweep.json` holds it: its devices and runs, with their predicted and
/// measured seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SweepReport {
    /// Version of the report ([`SweepReport::VERSION`]).
    pub version: u32,
    /// The value of `--devices`.
    pub requested_devices: String,
    /// The value of `--budget`; `None` if it was not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_budget: Option<String>,
    /// Largest permitted number of restarts per run.
    pub retries: u32,
    /// Limit of concurrent runs per device; `None` without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// The devices in the order of the request.
    pub devices: Vec<SweepDevice>,
    /// The runs in the order of the request.
    pub runs: Vec<SweepRun>,
    /// Predicted seconds from the first start to the last end of the runs that were unfinished when `plimsoll sweep`
    /// was last started.
    pub predicted_seconds: f64,
    /// Predicted seconds that no schedule can undercut, for the runs that were unfinished when `plimsoll sweep` was
    /// last started.
    pub lower_bound_seconds: f64,
    /// Measured seconds from the last start of `plimsoll sweep` to the last end of a run.
    pub seconds: f64,
}

impl SweepReport {
    /// Version of the format of `sweep.json`. It changes when a field changes its meaning or is removed.
    pub const VERSION: u32 = 1;

    /// Computes the share of runs that are done, 1 for a sweep without runs.
    pub fn success_rate(&self) -> f64 {
        let done = self.runs.iter().filter(|run| run.state == SweepState::Done).count();
        if self.runs.is_empty() { 1.0 } else { done as f64 / self.runs.len() as f64 }
    }
}
