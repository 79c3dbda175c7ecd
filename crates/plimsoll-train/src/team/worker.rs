//! One worker of a team: its engine, its share of each step, its plan and its measurements.

use crate::data::Rows;
use crate::planning::prepare::WorkerAssignment;
use crate::recovery::LoadLine;
use crate::session::engine::Engine;
use crate::team::heartbeat::{HeartbeatSender, Liveness};
use plimsoll_core::{Bytes, DeviceKind, DevicePlan, DeviceSpec, HostSpec, Plan};
use plimsoll_device::calibration;
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::ProgramKind;
use plimsoll_program::Share;
use std::ops::Range;
use std::sync::Arc;

/// A device at work.
pub struct Worker {
    /// Description of the device, with the charges of its plan.
    pub device: DeviceSpec,
    /// Share of each step.
    pub share: Share,
    /// Number of sequences that it computes in each step.
    pub sequences: u64,
    /// Open device with its Programs.
    pub engine: Engine,
    /// Plan of this worker alone, for its share.
    pub plan: Plan,
    /// Device plan with the highest peak so far.
    pub largest_plan: DevicePlan,
    /// Measured arena use under `largest_plan`.
    pub(super) arena_used_bytes: Bytes,
    /// Measured peak before the present arenas existed; only for devices in this process.
    pub(super) peak_held_bytes: Bytes,
    /// Load line and its changes.
    pub line: LoadLine,
    /// Buffer for the rows of this worker in a step.
    pub(super) rows: Rows,
    pub(super) predicted_compute: PredictedCompute,
    /// Measured and predicted compute seconds of the last step; both 0 without a measurement.
    pub(super) last_compute: (f64, f64),
    /// Measured over predicted compute time, for each step.
    pub(super) slowdowns: Vec<f64>,
    /// Heartbeat, where other workers or a replacement depend on it.
    pub(super) heartbeat: Option<HeartbeatSender>,
}

impl Worker {
    /// Creates a worker for an open device.
    pub fn new(
        part: &WorkerAssignment,
        engine: Engine,
        plan: Plan,
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
            peak_held_bytes: Bytes::ZERO,
            line,
            rows: Rows::default(),
            predicted_compute: PredictedCompute::of(&part.device, &part.outcome),
            last_compute: (0.0, 0.0),
            slowdowns: Vec::new(),
            heartbeat,
        }
    }

    /// Whether the rates were measured beside other load, which happens for the CPU.
    pub(super) fn is_disturbed(&self) -> bool {
        self.device.kind == DeviceKind::Cpu && calibration::max_contention().is_some()
    }

    /// Returns the liveness of the device, if it has a heartbeat.
    pub(super) fn liveness(&self) -> Option<Arc<Liveness>> {
        self.heartbeat.as_ref().map(HeartbeatSender::liveness)
    }

    /// Whether the device missed its heartbeats.
    pub(super) fn is_missed(&self) -> bool {
        self.heartbeat.as_ref().is_some_and(|heartbeat| heartbeat.liveness().is_lost())
    }

    /// Whether the device is in another process.
    pub(super) fn is_remote(&self) -> bool {
        self.engine.connection().is_some()
    }

    /// Records the measured arena use, if the present plan is the largest.
    pub(super) fn record_arena_use(&mut self) {
        if self.plan.devices[0].peak_bytes == self.largest_plan.peak_bytes {
            self.arena_used_bytes = self.arena_used_bytes.max(self.engine.stats().arena_measured_bytes);
        }
    }

    /// Records the compute time of the last step against its prediction, if the device measures it.
    pub(super) fn record_compute_time(&mut self) {
        let Some(measured) = self.engine.compute_time() else { return };
        let PredictedCompute { micro_batch, per_step } = self.predicted_compute;
        let predicted = measured.micro_batches as f64 * micro_batch + per_step;
        self.last_compute = (measured.seconds, predicted);
        self.slowdowns.push(measured.seconds / predicted);
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
        }
    }

    /// Returns the range of this worker's rows in a step of `rows` rows; the last step may have fewer.
    pub(super) fn own_range(&self, rows: usize) -> Range<usize> {
        let first = (self.share.first_sequence as usize).min(rows);
        first..(first + self.sequences as usize).min(rows)
    }
}

/// Predicted compute seconds of a worker in a step before the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedCompute {
    /// Seconds of a forward and a backward pass.
    pub(super) micro_batch: f64,
    /// Seconds of the work before the first and after the last pass.
    pub(super) per_step: f64,
}

impl PredictedCompute {
    /// Computes the prediction from the plan of a device.
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
