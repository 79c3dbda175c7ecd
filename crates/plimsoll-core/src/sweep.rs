//! A sweep as it is written down: `sweep.json` in its folder, and `plimsoll sweep --json`. Other tools rely on these
//! names.

use crate::{Bytes, Rung};
use serde::{Deserialize, Serialize};

/// How far a run of a sweep is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SweepState {
    /// Until there is room for it.
    Waiting,
    /// In a process of its own.
    Running,
    /// All steps are done.
    Done,
    /// Stopped early: it can go on.
    Stopped,
    /// It fits on none of the devices.
    DoesNotFit,
    /// Something else is wrong.
    Failed,
}

/// What a run needs of a device, as predicted in a process like the one that it will be trained in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDemand {
    /// Whether it fits there at all.
    pub fits: bool,
    /// The load line that it is given: arena and charges. Where it does not fit, the least that would do.
    pub bytes: Bytes,
    /// What waits on the host.
    pub host_bytes: Bytes,
    /// The lossy rungs that it takes there.
    pub rungs: Vec<Rung>,
    /// Rows of the data; an epoch has so many.
    pub rows: u64,
    /// One optimizer step.
    pub step_seconds: f64,
    /// The same with the whole device's memory to itself.
    pub fastest_step_seconds: f64,
    /// One evaluation.
    pub evaluate_seconds: f64,
    /// One checkpoint.
    pub checkpoint_seconds: f64,
    /// The first weights and the model.
    pub files_seconds: f64,
    /// Measured: opening model and data, and planning.
    pub prepare_seconds: f64,
}

/// A run of a sweep. Figures are measured unless their name says predicted; what is not known is left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepRun {
    /// Its name, and its folder in the sweep's.
    pub name: String,
    /// How far it is.
    pub state: SweepState,
    /// The device that it ran on last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The process, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its load line there: what it was predicted to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_bytes: Option<Bytes>,
    /// The most that it held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// Its part of the device's time, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// From start to end with that part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// From start to end, all tries together.
    pub seconds: f64,
    /// When it was started last, in seconds from the sweep's start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
    /// Optimizer steps done.
    pub steps: u64,
    /// The training loss of the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// The loss of the last evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// How often it was started again after it had ended early.
    pub retries: u32,
    /// Rungs that were taken while it was under way.
    pub retreats: u64,
    /// Why it is not done, or was started again: the last such reason, in a line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The exit code of its last process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
}

impl SweepRun {
    /// A run that waits.
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
            retreats: 0,
            why: None,
            exit: None,
        }
    }
}

/// A device of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepDevice {
    /// Its name.
    pub name: String,
    /// Whether it is simulated: all seconds on it are then.
    pub simulated: bool,
    /// Its load line.
    pub budget_bytes: Bytes,
    /// The most that the load lines of its workers came to at a time.
    pub given_bytes: Bytes,
    /// The most workers at a time.
    pub workers: u32,
    /// Why it got no run, where there were some to be given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepReport {
    /// [`SweepReport::VERSION`].
    pub version: u32,
    /// What was asked for with `--devices`.
    pub asked: String,
    /// How often a run is started again.
    pub retries: u32,
    /// The most workers on a device, where that was limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// The devices.
    pub devices: Vec<SweepDevice>,
    /// The runs, in the order in which they were asked for.
    pub runs: Vec<SweepRun>,
    /// From the first start to the last end, as packed; of the runs that were left when the sweep was last started.
    pub predicted_seconds: f64,
    /// What no packing of these runs can be below, predicted.
    pub bound_seconds: f64,
    /// From the first start to the last end.
    pub seconds: f64,
}

impl SweepReport {
    /// The version of the file; it changes when a field changes its meaning or goes away.
    pub const VERSION: u32 = 1;

    /// The share of the runs that are done.
    pub fn success_rate(&self) -> f64 {
        let done = self.runs.iter().filter(|run| run.state == SweepState::Done).count();
        if self.runs.is_empty() { 1.0 } else { done as f64 / self.runs.len() as f64 }
    }
}
