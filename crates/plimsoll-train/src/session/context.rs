//! State of a session, grouped by duty: [`RunContext`] holds the inputs of the run, [`Checkpointer`] the progress of saving,
//! and [`RecoveryState`] failures and lost devices. The code that uses them is in `training`, `run_folder` and `recovery`.

use crate::data::{BatchSampler, Dataset};
use crate::resolve::{Resolved, RunRequest};
use crate::team::unavailable::UnavailableDevice;
use plimsoll_core::{Bytes, LostDevice, Recovery};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Inputs of a run. They stay as they are while the run lasts, except for load lines that the user changes.
pub(crate) struct RunContext {
    /// Run folder.
    pub folder: PathBuf,
    /// Run file with overrides and remote connections.
    pub run: RunRequest,
    /// Model and devices that the run file resolved to.
    pub resolved: Resolved,
    /// Training data.
    pub data: Arc<Dataset>,
    /// Evaluation data.
    pub eval: Option<Arc<Dataset>>,
    /// Order and size of the batches.
    pub batches: BatchSampler,
    /// Load line of host memory that all devices share, as it was at the start.
    pub host_budget: Bytes,
    /// Finished steps of the checkpoint that the run resumed from; 0 for a new run.
    pub resumed_step: u64,
    /// Floating-point operations of all matrix products in one step.
    pub gemm_flops_per_step: f64,
    /// Fraction of the time in which the CPU computes; below 1, a pause follows each step.
    pub cpu_duty: f64,
    /// Whether the run draws text samples at its end.
    pub draws_samples: bool,
}

/// Progress of saving.
pub(crate) struct Checkpointer {
    /// Whether checkpoints and the model are written at all; false for a run that is only measured.
    pub enabled: bool,
    /// Step of the newest checkpoint; 0 without one.
    pub newest_step: u64,
    /// Time of the newest checkpoint, or of the start.
    pub newest_time: Instant,
    /// Seconds that writing the newest checkpoint took.
    pub write_seconds: Option<f64>,
}

impl Checkpointer {
    /// Creates the state of a run that starts after `step`, which is saved or 0.
    pub fn new(enabled: bool, step: u64) -> Checkpointer {
        Checkpointer { enabled, newest_step: step, newest_time: Instant::now(), write_seconds: None }
    }

    /// Records that the checkpoint of `step` is the newest one.
    pub fn set_newest(&mut self, step: u64) {
        (self.newest_step, self.newest_time) = (step, Instant::now());
    }
}

/// Failures of the run and their consequences.
#[derive(Default)]
pub(crate) struct RecoveryState {
    /// Changes of plan and retries, in order.
    pub recoveries: Vec<Recovery>,
    /// Lost devices, in order.
    pub lost: Vec<LostDevice>,
    /// Whether a device was lost since the last finished step.
    pub lost_since_step: bool,
    /// Lost remote devices that may return.
    pub unavailable: Vec<UnavailableDevice>,
    /// Refusals of each device, by name, since the run last made progress. Devices keep their count when they are reopened.
    pub refusals: BTreeMap<String, u32>,
}
