//! One worker of a team: its engine, its share of each step, its plan and its measurements.

use crate::data::Rows;
use crate::engine::Engine;
use crate::engine::arena_use::{BytesByCategory, with_gaps};
use crate::heartbeat::{HeartbeatSender, Liveness};
use crate::planning::team_plan::WorkerAssignment;
use crate::recovery::LoadLine;
use crate::recovery::stragglers::MIN_PREDICTED_SECONDS;
use crate::step_times::quantile;
use plimsoll_core::{Bytes, DeviceKind, DevicePlan, DeviceSpec, HostSpec, Plan, WorkerResult};
use plimsoll_device::calibration;
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::ProgramKind;
use plimsoll_program::Share;
use std::ops::Range;
use std::sync::Arc;

/// Fewest measured steps from which the speed of a device is stored for later plans.
const MIN_STEPS: usize = 8;

/// Returns the sum over all categories.
fn total(bytes: &BytesByCategory) -> Bytes {
    bytes.values().copied().sum()
}

/// A device of a team with its engine, its share of the work, its plan and its measurements.
pub struct Worker {
    /// Description of the device, with the charges of its plan.
    pub device: DeviceSpec,
    /// Share of the weights, the optimizer state and each step.
    pub share: Share,
    /// Number of sequences that this worker computes in each step; 0 for a storage-only worker.
    pub sequences: u64,
    /// Engine that runs the Programs on the device.
    pub engine: Engine,
    /// Plan of this worker alone, for its share.
    pub plan: Plan,
    /// Predicted memory of the device under the plan with the highest predicted peak so far.
    pub largest_plan: DevicePlan,
    /// Most bytes of the arena that were in use, as measured while `largest_plan` was the device's plan.
    pub(super) arena_used_bytes: Bytes,
    /// Most bytes of tensors in use at one moment, by category, as measured while `largest_plan` was the device's plan;
    /// `None` if they are not measured.
    pub(super) tensors_in_use: Option<BytesByCategory>,
    /// Highest measured bytes that this worker has held up to the last
    /// [`Team::record_peaks`](super::Team::record_peaks). Used only for devices in the memory of this process.
    pub(super) peak_held_bytes: Bytes,
    /// Load lines of the device and of its host memory, with the state from which they change.
    pub line: LoadLine,
    /// Rows of training data of this worker in a step; a buffer that the next step reuses.
    pub(super) rows: Rows,
    pub(super) predicted_compute: PredictedCompute,
    /// Measured and predicted compute seconds of the last step; both 0 without a measurement.
    pub(super) last_compute: (f64, f64),
    /// Measured seconds divided by predicted seconds, one entry per step. The seconds are those of computing; in a team
    /// of one, those of the whole step.
    pub(super) slowdowns: Vec<f64>,
    /// Heartbeat of the device. `None` if the run has no other device that could go on without this one, or if the
    /// system refused a thread.
    pub(super) heartbeat: Option<HeartbeatSender>,
}

impl Worker {
    /// Creates a worker from an open device (`engine`) and its part of the run's plan (`part`).
    pub fn new(
        part: &WorkerAssignment,
        engine: Engine,
        plan: Plan,
        predicted_compute: PredictedCompute,
        line: LoadLine,
        heartbeat: Option<HeartbeatSender>,
    ) -> Worker {
        Worker {
            device: part.device.clone(),
            share: part.share.clone(),
            sequences: part.sequences,
            engine,
            largest_plan: plan.devices[0].clone(),
            plan,
            arena_used_bytes: Bytes::ZERO,
            tensors_in_use: None,
            peak_held_bytes: Bytes::ZERO,
            line,
            rows: Rows::default(),
            predicted_compute,
            last_compute: (0.0, 0.0),
            slowdowns: Vec::new(),
            heartbeat,
        }
    }

    /// Returns whether the device is the CPU and its rates were measured while other programs used it.
    pub(super) fn is_disturbed(&self) -> bool {
        self.device.kind == DeviceKind::Cpu && calibration::max_contention().is_some()
    }

    /// Returns the liveness of the device; `None` if it has no heartbeat.
    pub(super) fn liveness(&self) -> Option<Arc<Liveness>> {
        self.heartbeat.as_ref().map(HeartbeatSender::liveness)
    }

    /// Returns whether the device missed its heartbeats.
    pub(super) fn is_lost(&self) -> bool {
        self.heartbeat.as_ref().is_some_and(|heartbeat| heartbeat.liveness().is_lost())
    }

    /// Returns whether the device is in another process.
    pub(super) fn is_remote(&self) -> bool {
        self.engine.connection().is_some()
    }

    /// Records the measured use of the arena, if the present plan has the highest predicted peak so far.
    pub(super) fn record_arena_use(&mut self) {
        if self.plan.devices[0].peak_bytes == self.largest_plan.peak_bytes {
            self.arena_used_bytes = self.arena_used_bytes.max(self.engine.stats().arena_measured_bytes);
            // Another plan with the same peak may have run less than a step so far.
            let is_larger =
                |new: &&BytesByCategory| self.tensors_in_use.as_ref().is_none_or(|old| total(old) <= total(new));
            if let Some(new) = self.engine.tensors_in_use().filter(is_larger) {
                self.tensors_in_use = Some(new.clone());
            }
        }
    }

    /// Returns the measured bytes of the arena by category under `largest_plan`; `None` if they are not measured.
    pub(super) fn arena_measured_by_category(&self) -> Option<BytesByCategory> {
        Some(with_gaps(self.tensors_in_use.clone()?, self.arena_used_bytes))
    }

    /// Records measured and predicted compute seconds of the last step. Does nothing if the device does not measure
    /// them.
    pub(super) fn record_compute_time(&mut self) {
        let Some(measured) = self.engine.compute_time() else { return };
        let PredictedCompute { micro_batch, per_step } = self.predicted_compute;
        let predicted = measured.micro_batches as f64 * micro_batch + per_step;
        self.last_compute = (measured.seconds, predicted);
        self.slowdowns.push(measured.seconds / predicted);
    }

    /// Returns whether the measured speed may be stored for later plans. The device must be real and undisturbed, and
    /// enough steps of sufficient length must have been measured.
    pub(super) fn has_comparable_speed(&self) -> bool {
        !self.device.simulated()
            && !self.is_disturbed()
            && self.plan.predicted.step_seconds >= MIN_PREDICTED_SECONDS
            && self.slowdowns.len() >= MIN_STEPS
    }

    /// Returns the result of this worker for the report of the run.
    pub(super) fn result(&self) -> WorkerResult {
        WorkerResult {
            device: self.device.name.clone(),
            simulated: self.device.simulated(),
            sequences: self.sequences,
            recipe: self.plan.recipe.clone(),
            compute_slowdown: quantile(&self.slowdowns, 0.5),
            collectives: self.engine.collectives(),
        }
    }

    /// Records that the device switched to another plan. `predicted_compute` is the compute time that this plan
    /// predicts.
    pub fn set_plan(&mut self, plan: Plan, predicted_compute: PredictedCompute) {
        self.predicted_compute = predicted_compute;
        // New product sizes may have new algorithms, which the next checkpoint must store.
        self.plan = Plan { algorithms: self.engine.algorithms(), ..plan };
        self.device.charges = self.plan.devices[0].charges_bytes;
        self.line.record_host_bytes(self.plan.host.arena_bytes);
        if self.plan.devices[0].peak_bytes > self.largest_plan.peak_bytes {
            (self.largest_plan, self.arena_used_bytes) = (self.plan.devices[0].clone(), Bytes::ZERO);
            self.tensors_in_use = None;
        }
    }

    /// Returns the indices of this worker's rows in a step of `rows` rows. The last step of a run may have fewer rows
    /// than planned; then the range may be shorter or empty.
    pub(super) fn own_range(&self, rows: usize) -> Range<usize> {
        let first = (self.share.first_sequence as usize).min(rows);
        first..(first + self.sequences as usize).min(rows)
    }
}

/// Predicted compute seconds of a worker in a step, without the update of the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedCompute {
    /// Seconds of one micro-batch: a forward and a backward pass.
    pub(super) micro_batch: f64,
    /// Seconds of the work before the first forward pass and after the last backward pass.
    pub(super) per_step: f64,
}

impl PredictedCompute {
    /// Predicts the compute seconds of a device from its rates and the planned Programs in `answer`. Nothing runs.
    pub fn of(device: &DeviceSpec, answer: &PlanOutcome) -> PredictedCompute {
        let (rates, team_link) = (&device.rates, device.team_link);
        let prices = Prices { rates, host: &HostSpec::NONE, precision: answer.precision, team_link };
        let of = |programs: [ProgramKind; 2]| {
            let found = programs.into_iter().filter_map(|kind| answer.set.program(kind));
            found.map(|program| prices.compute_seconds(&answer.set, program)).sum()
        };
        PredictedCompute {
            micro_batch: of([ProgramKind::Forward, ProgramKind::Backward]),
            per_step: of([ProgramKind::BeginStep, ProgramKind::GradientNorm]),
        }
    }
}
