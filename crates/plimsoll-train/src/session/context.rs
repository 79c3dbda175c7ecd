//! State of a session, grouped by duty: [`RunContext`] holds the inputs of the run, [`Checkpointer`] the progress of
//! saving, and [`RecoveryState`] failures and lost devices. The code that uses them is in `training`, `run_folder` and
//! `recovery`.

use crate::data::{BatchSampler, Dataset, TrainingData};
use crate::planning::planner::{Charges, Planner};
use crate::recovery::failures::RefusalCounts;
use crate::resolve::{Resolved, RunRequest};
use crate::team::unavailable::UnavailableDevice;
use plimsoll_core::{Bytes, LostDevice, Recovery};
use plimsoll_device::process::SchedulerTimes;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Inputs of a run. They stay as they are while the run lasts, except for load lines that the user changes.
pub(crate) struct RunContext {
    /// Run folder.
    pub folder: PathBuf,
    /// Values of the run file with the user's overrides, and the connections to remote devices.
    pub run: RunRequest,
    /// Model and devices that the run file resolved to.
    pub resolved: Resolved,
    /// Training data.
    pub data: Arc<TrainingData>,
    /// Evaluation data; `None` if the run does not evaluate.
    pub eval: Option<Arc<Dataset>>,
    /// Order and size of the batches.
    pub batches: BatchSampler,
    /// Load line of host memory that all devices share, as it was at the start.
    pub host_budget: Bytes,
    /// Finished steps of the checkpoint that the run resumed from; 0 for a new run.
    pub resumed_step: u64,
    /// Floating-point operations of all matrix products in one step.
    pub gemm_flops_per_step: f64,
    /// Fraction of the time in which the CPU computes. Below 1, a pause follows each step; 1 if the first device is no
    /// CPU.
    pub cpu_duty: f64,
    /// Whether the run draws text samples at its end.
    pub draws_samples: bool,
    /// Peak of this process before the session opened its devices; zero if the system does not report it.
    pub peak_before: Bytes,
    /// Times of this process's threads on cores before the session opened its devices.
    pub scheduled_before: SchedulerTimes,
}

impl RunContext {
    /// Returns the planner for an active run, under the load line `host` of host memory. It plans with the charges
    /// (bytes outside the arena) that the devices have, and measures none.
    pub fn planner(&self, host: Bytes) -> Planner<'_> {
        Planner::new(&self.run, &self.resolved.model, Charges::Stated).with_host(host)
    }

    /// Returns the share of the time, from 0 to 1, in which the threads of this process have waited for a core since the
    /// session opened its devices.
    pub fn contention(&self) -> f64 {
        SchedulerTimes::read().contention_since(self.scheduled_before)
    }
}

/// State of saving: whether the run saves, and its newest checkpoint.
pub(crate) struct Checkpointer {
    /// Whether checkpoints and the model are written at all; false for a run that is only measured.
    pub enabled: bool,
    /// Step of the newest checkpoint; 0 without one.
    pub newest_step: u64,
    /// Time from which `train.save_every_minutes` counts: when this process wrote the newest checkpoint, returned to
    /// it, or started the run.
    pub newest_time: Instant,
    /// Seconds that writing the newest checkpoint took; `None` until this process has written one.
    pub write_seconds: Option<f64>,
}

impl Checkpointer {
    /// Creates the state of saving for a run that starts from the checkpoint of `step`; 0 without one. `enabled` tells
    /// whether the run saves.
    pub fn new(enabled: bool, step: u64) -> Checkpointer {
        Checkpointer { enabled, newest_step: step, newest_time: Instant::now(), write_seconds: None }
    }

    /// Records that the checkpoint of `step` is now the newest one; 0 if there is no checkpoint.
    pub fn set_newest(&mut self, step: u64) {
        (self.newest_step, self.newest_time) = (step, Instant::now());
    }
}

/// Failures of the run and their consequences.
#[derive(Default)]
pub(crate) struct RecoveryState {
    /// Recoveries, in order: changes of a worker's recipe or share during the run, and repetitions of failed work.
    pub recoveries: Vec<Recovery>,
    /// Losses of devices, in order. A device that was lost twice is listed twice.
    pub lost: Vec<LostDevice>,
    /// Whether a device was lost since the last finished step.
    pub lost_since_step: bool,
    /// Lost remote devices that are polled for their return.
    pub unavailable: Vec<UnavailableDevice>,
    /// Number of out-of-memory errors of each device since the run last made progress.
    pub refusals: RefusalCounts,
}
