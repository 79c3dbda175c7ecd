//! Evaluator: a device outside the team that evaluates on a thread of its own.
//!
//! It has an arena for the weights and the activations of an evaluation, under its own load line. It receives the
//! weights while the team saves them ([`WeightTransfer`]), and its heartbeat is monitored like that of a worker. The
//! module `evaluation` decides when it evaluates and handles its results.

pub(crate) mod weight_transfer;

use crate::data::Dataset;
use crate::engine::arena_use::with_gaps;
use crate::engine::evaluation::{EvaluationSlice, evaluate_slice};
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::load_weights;
use crate::engine::{Engine, EvaluationSums};
use crate::fault_injection::{FaultInjection, PendingFault};
use crate::heartbeat::{HeartbeatMonitor, HeartbeatSender, Liveness, timeout_message};
use crate::planning::team_plan::WorkerAssignment;
use crate::recovery::failures::MAX_DEVICE_REFUSALS;
use crate::resolve::{Model, Resolved, RunRequest};
use crate::step_times::quantile;
use crate::team::open::{OpenedDevice, OpenedEngine, open_assignment};
use plimsoll_core::{
    Bytes, DeviceMemory, DevicePlan, DeviceSpec, EvaluatorPlan, EvaluatorResult, Failure, MeasuredBy, Recipe, Space,
};
use plimsoll_program::ProgramKind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};
use weight_transfer::{TransferState, WeightReceiver, WeightTransfer};

/// Interval at which a waiting thread checks that the device is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Request to the thread of an evaluator: evaluate `slices` of the evaluation data with the weights after `step`, which
/// arrive through `weights`.
struct EvaluationRequest {
    number: u64,
    step: u64,
    slices: Vec<EvaluationSlice>,
    weights: Arc<WeightTransfer>,
}

/// Report of an evaluation.
pub struct EvaluationReport {
    /// Step of the evaluated weights.
    pub step: u64,
    /// Sums over all requested rows, or the failure.
    pub sum: Result<EvaluationSums, DeviceFailure>,
    /// Measured seconds of the evaluation.
    pub seconds: f64,
    /// Messages of the out-of-memory errors of the tries before the one that succeeded; empty if the evaluation failed.
    pub refused: Vec<String>,
}

/// Handle of an evaluator and its thread.
pub struct Evaluator {
    device: DeviceSpec,
    plan: DevicePlan,
    evaluator_plan: EvaluatorPlan,
    requests: Sender<EvaluationRequest>,
    /// Channel with the result of loading the frozen weights: messages of out-of-memory errors that were overcome, or
    /// the failure.
    ready: Receiver<Result<Vec<String>, DeviceFailure>>,
    reports: Receiver<(u64, EvaluationReport)>,
    /// Channel that returns the engine when the thread ends.
    finished: Receiver<Engine>,
    /// Sender of the device's heartbeats; `None` if the system refused its thread.
    heartbeat: Option<HeartbeatSender>,
    _monitor: Option<HeartbeatMonitor>,
    heartbeat_timeout: Duration,
    /// Bytes of the evaluator's arenas in this process.
    arena_bytes_in_process: Bytes,
    /// Sequence number of the last request, counted from 1; 0 before the first one.
    number: u64,
    /// Step of the evaluation in progress; `None` between evaluations.
    pending: Option<u64>,
    timings: EvaluatorTimings,
}

/// Measured durations of an evaluator.
#[derive(Clone, Default)]
pub struct EvaluatorTimings {
    /// Seconds of each evaluation.
    evaluation_seconds: Vec<f64>,
    /// Seconds of each weight transfer.
    transfer_seconds: Vec<f64>,
}

impl Evaluator {
    /// Opens the device of `part` and starts its thread. The thread begins to load the frozen weights;
    /// [`Evaluator::wait_until_ready`] waits for them. `rank` stands for the device in fault injection.
    ///
    /// # Errors
    /// The device cannot be opened, or the system refuses a thread.
    pub fn open(
        run: &RunRequest,
        resolved: &Resolved,
        part: WorkerAssignment,
        evaluator_plan: EvaluatorPlan,
        data: Arc<Dataset>,
        faults: &[Arc<PendingFault>],
        rank: u64,
    ) -> Result<Evaluator, DeviceFailure> {
        let heartbeat_timeout = Duration::from_secs_f64(run.run.heartbeat_seconds);
        let OpenedDevice { assignment: part, opened, heartbeat, monitor } =
            open_assignment(run, resolved, part, faults, true)?;
        let OpenedEngine { mut engine, plan, .. } = opened;
        let (device, liveness) = (part.device, heartbeat.as_ref().map(HeartbeatSender::liveness));
        engine.inject_faults(FaultInjection::new(faults, run.train.seed, rank, &device.name, liveness));
        let memory = engine.device().memory();
        let on_device = if device.in_process() { memory.bytes(Space::Device) } else { Bytes::ZERO };
        let on_host = if device.remote_host().is_none() { memory.bytes(Space::Host) } else { Bytes::ZERO };
        let arena_bytes_in_process = on_device + on_host;
        let ((requests, incoming), (report_sender, reports)) = (channel(), channel());
        let ((ready_sender, ready), (engine_sender, finished)) = (channel(), channel());
        let thread_state = EvaluatorThread {
            run: run.clone(),
            model: Arc::clone(&resolved.model),
            engine,
            data,
            ready: ready_sender,
            requests: incoming,
            reports: report_sender,
            finished: engine_sender,
        };
        let thread = thread::Builder::new().name(format!("plimsoll-evaluates-{}", device.name));
        thread
            .spawn(move || thread_state.run())
            .map_err(|error| Failure::input(format!("cannot start a thread for the evaluator: {error}")))?;
        Ok(Evaluator {
            device,
            plan: plan.devices[0].clone(),
            evaluator_plan,
            requests,
            ready,
            reports,
            finished,
            heartbeat,
            _monitor: monitor,
            heartbeat_timeout,
            arena_bytes_in_process,
            number: 0,
            pending: None,
            timings: EvaluatorTimings::default(),
        })
    }

    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        &self.device.name
    }

    /// Returns the device with its load line.
    pub fn device(&self) -> &DeviceSpec {
        &self.device
    }

    /// Returns the recipe of the evaluation.
    pub fn recipe(&self) -> &Recipe {
        &self.evaluator_plan.recipe
    }

    /// Replaces the device and its plan by ones with another load line. The recipe must be the same, because the arena
    /// stays.
    pub fn set_plan(&mut self, device: DeviceSpec, evaluator_plan: &EvaluatorPlan) {
        (self.device, self.plan, self.evaluator_plan) = (device, evaluator_plan.device.clone(), evaluator_plan.clone());
    }

    /// Returns the measured seconds of each evaluation and of each weight transfer.
    pub fn timings(&self) -> EvaluatorTimings {
        self.timings.clone()
    }

    /// Takes over `timings`, which were measured on the same device before it was reopened.
    pub fn carry_over_timings(&mut self, timings: EvaluatorTimings) {
        self.timings = timings;
    }

    /// Returns the bytes of the evaluator's arenas in the memory of this process; 0 for a device of another machine.
    pub fn arena_bytes_in_process(&self) -> Bytes {
        self.arena_bytes_in_process
    }

    /// Returns the planned bytes of the evaluator's arena on the device.
    pub fn arena_bytes(&self) -> Bytes {
        self.plan.arena_bytes
    }

    /// Whether evaluating on this device is predicted to be faster than on the idle team.
    pub fn is_faster_than_team(&self) -> bool {
        self.evaluator_plan.saved_seconds(0.0) > 0.0
    }

    /// Waits until the frozen weights are loaded. Returns the messages of out-of-memory errors of tries before the one
    /// that succeeded.
    ///
    /// # Errors
    /// The weights cannot be loaded.
    pub fn wait_until_ready(&self) -> Result<Vec<String>, DeviceFailure> {
        self.receive(&self.ready).unwrap_or_else(|| Err(self.loss()))
    }

    /// Waits for the next message of the thread on `channel` and returns it. Returns `None` if the device is lost or
    /// the thread has ended.
    fn receive<T>(&self, channel: &Receiver<T>) -> Option<T> {
        loop {
            match channel.recv_timeout(POLL_INTERVAL) {
                Ok(message) => return Some(message),
                Err(RecvTimeoutError::Timeout) if !self.is_lost() => {}
                Err(_) => return None,
            }
        }
    }

    /// Whether the device is lost because it sent no heartbeat for the whole timeout. False if it has no monitor.
    fn is_lost(&self) -> bool {
        self.liveness().is_some_and(|liveness| liveness.is_lost())
    }

    /// Returns the loss of the device as a failure with its reason: missed heartbeats, or else the end of the thread.
    fn loss(&self) -> DeviceFailure {
        let name = &self.device.name;
        let reason = if self.is_lost() {
            timeout_message(name, self.heartbeat_timeout)
        } else {
            format!("the thread of {name} ended unexpectedly")
        };
        DeviceFailure::Lost { rank: 0, reason }
    }

    /// Requests an evaluation of these slices with the weights after `step`. The caller sends the weights through the
    /// returned transfer.
    pub fn begin(&mut self, step: u64, slices: Vec<EvaluationSlice>) -> Arc<WeightTransfer> {
        let weights = WeightTransfer::new(self.liveness());
        self.number += 1;
        let request = EvaluationRequest { number: self.number, step, slices, weights: Arc::clone(&weights) };
        self.pending = Some(step);
        if self.requests.send(request).is_err() {
            // The thread has ended: tell the sender of the weights.
            weights.finish(TransferState::ReceiverFailed);
        }
        weights
    }

    /// Whether the evaluation after this step is in progress.
    pub fn is_evaluating(&self, step: u64) -> bool {
        self.pending == Some(step)
    }

    /// Drops the evaluation in progress. A result that still arrives is ignored.
    pub fn cancel(&mut self) {
        self.pending = None;
    }

    /// Drops the evaluation in progress if it belongs to a later step.
    pub fn cancel_after(&mut self, step: u64) {
        self.pending = self.pending.filter(|pending| *pending <= step);
    }

    /// Records the seconds of a weight transfer.
    pub fn record_transfer(&mut self, seconds: f64) {
        self.timings.transfer_seconds.push(seconds);
    }

    /// Returns the report of the evaluation in progress if it has arrived, else `None`. For a lost device, returns a
    /// report of its loss.
    pub fn poll(&mut self) -> Option<EvaluationReport> {
        self.pending?;
        self.receive_report(Duration::ZERO)
    }

    /// Waits for the report of the evaluation in progress and returns it; `None` if no evaluation is in progress. For a
    /// lost device, returns a report of its loss.
    pub fn wait(&mut self) -> Option<EvaluationReport> {
        while self.pending.is_some() {
            let report = self.receive_report(POLL_INTERVAL);
            if report.is_some() {
                return report;
            }
        }
        None
    }

    /// Waits up to `timeout` for a report and returns it. For a lost device, returns a report of its loss. Returns
    /// `None` after the timeout, or if no evaluation is in progress. Also returns `None` for the result or the
    /// out-of-memory error of a cancelled request.
    fn receive_report(&mut self, timeout: Duration) -> Option<EvaluationReport> {
        let step = self.pending?;
        let loss = |evaluator: &Evaluator| {
            let sum = Err(evaluator.loss());
            EvaluationReport { step, sum, seconds: 0.0, refused: vec![] }
        };
        if self.is_lost() {
            self.pending = None;
            return Some(loss(self));
        }
        let report = match self.reports.recv_timeout(timeout) {
            // A report of a cancelled request.
            Ok((number, EvaluationReport { sum: Ok(_) | Err(DeviceFailure::OutOfMemory { .. }), .. }))
                if number != self.number =>
            {
                None
            }
            Ok((_, report)) => Some(report),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(loss(self)),
        }?;
        self.pending = None;
        if report.sum.is_ok() {
            self.timings.evaluation_seconds.push(report.seconds);
        }
        Some(report)
    }

    fn liveness(&self) -> Option<Arc<Liveness>> {
        self.heartbeat.as_ref().map(HeartbeatSender::liveness)
    }

    /// Returns the number of evaluations with their measured and predicted durations; `None` before the first
    /// evaluation.
    pub fn result(&self) -> Option<EvaluatorResult> {
        let EvaluatorPlan { seconds, weight_transfer_seconds, recipe, .. } = &self.evaluator_plan;
        let timings = &self.timings;
        (!timings.evaluation_seconds.is_empty()).then(|| EvaluatorResult {
            device: self.device.name.clone(),
            simulated: self.device.simulated(),
            recipe: recipe.clone(),
            evaluations: timings.evaluation_seconds.len() as u64,
            seconds: quantile(&timings.evaluation_seconds, 0.5),
            predicted_seconds: *seconds,
            weight_transfer_seconds: quantile(&timings.transfer_seconds, 0.5),
            predicted_weight_transfer_seconds: *weight_transfer_seconds,
        })
    }

    /// Closes the device and frees its memory. Returns whether that was possible: false if the device is lost or still
    /// evaluates.
    pub fn shut_down(self) -> bool {
        self.take_engine().is_some()
    }

    /// Closes the device and reports its memory. `held` is the measured peak of this process without the arenas of the
    /// team; `None` if it is unknown. Returns `None` if the device is lost or still evaluates.
    pub fn memory(self, held: Option<Bytes>) -> Option<DeviceMemory> {
        let plan = self.plan.clone();
        let mut engine = self.take_engine()?;
        // A remote process sends its measured peak with this reply.
        let _ = engine.memory();
        let measured = match (engine.gpu(), engine.connection()) {
            (Some(gpu), _) => gpu.measured_bytes(),
            (None, Some(connection)) => connection.measured_memory(),
            (None, None) => held.map(|held| (held, MeasuredBy::Process)),
        };
        let arena_measured_bytes = engine.stats().arena_measured_bytes;
        let tensors = engine.tensors_in_use().cloned();
        Some(DeviceMemory {
            device: plan.name,
            budget_bytes: plan.budget_bytes,
            budget_bytes_at_end: None,
            arena_bytes: plan.arena_bytes,
            arena_measured_bytes,
            arena_measured_by_category: tensors.map(|tensors| with_gaps(tensors, arena_measured_bytes)),
            predicted_bytes: plan.peak_bytes,
            measured_bytes: measured.map(|(bytes, _)| bytes),
            measured_by: measured.map(|(_, by)| by),
            over_load_line_bytes: None,
        })
    }

    /// Ends the thread and returns its engine. If the device is lost or still evaluates, leaves the thread as it is and
    /// returns `None` without waiting.
    fn take_engine(mut self) -> Option<Engine> {
        let requests = std::mem::replace(&mut self.requests, channel().0);
        if self.is_lost() || self.pending.is_some() {
            // The thread must not end: freeing its memory could block at any time.
            std::mem::forget(requests);
            return None;
        }
        drop(requests);
        self.receive(&self.finished)
    }
}

/// State of the thread of an evaluator.
struct EvaluatorThread {
    run: RunRequest,
    model: Arc<Model>,
    engine: Engine,
    data: Arc<Dataset>,
    /// Channel for the result of loading the frozen weights.
    ready: Sender<Result<Vec<String>, DeviceFailure>>,
    requests: Receiver<EvaluationRequest>,
    reports: Sender<(u64, EvaluationReport)>,
    /// Channel for the engine, which is sent when the thread ends.
    finished: Sender<Engine>,
}

impl EvaluatorThread {
    /// Loads the frozen weights, serves requests, and sends the engine back at the end.
    fn run(self) {
        let EvaluatorThread { run, model, mut engine, data, ready, requests, reports, finished } = self;
        let loaded = retry_refused(|| load_weights(&mut engine, &model, &run)).map(|((), refused)| refused);
        if ready.send(loaded).is_ok() {
            serve_requests(&mut engine, &data, &requests, &reports);
        }
        // The receiver is gone if the device missed its heartbeats.
        let _ = finished.send(engine);
    }
}

/// Runs the loop of the evaluator thread: for each request, receives the weights, evaluates and sends a report. Sends
/// no report if the team failed to send the weights. Ends when the [`Evaluator`] is dropped.
fn serve_requests(
    engine: &mut Engine,
    data: &Dataset,
    requests: &Receiver<EvaluationRequest>,
    report_sender: &Sender<(u64, EvaluationReport)>,
) {
    for EvaluationRequest { number, step, slices, weights } in requests {
        engine.begin_step(step);
        let mut receiver = WeightReceiver(&weights);
        let received = engine.move_files(ProgramKind::ReloadWeights, &mut receiver);
        weights.finish(if received.is_ok() { TransferState::Received } else { TransferState::ReceiverFailed });
        drop(receiver);
        if weights.wait_until_done() == TransferState::SenderFailed {
            continue;
        }
        let start = Instant::now();
        let result = match received {
            Err(error) => Err(DeviceFailure::from(error)),
            Ok(()) => retry_refused(|| evaluate_slices(engine, data, &slices)),
        };
        let (sum, refused) = match result {
            Ok((sum, refused)) => (Ok(sum), refused),
            Err(failure) => (Err(failure), vec![]),
        };
        let seconds = start.elapsed().as_secs_f64();
        if report_sender.send((number, EvaluationReport { step, sum, seconds, refused })).is_err() {
            break;
        }
    }
}

/// Runs `work`, and repeats it after each out-of-memory error, at most [`MAX_DEVICE_REFUSALS`] times. Returns the
/// result and the messages of these errors.
///
/// # Errors
/// Any other failure, or too many out-of-memory errors, which count as the loss of the device.
fn retry_refused<T>(mut work: impl FnMut() -> Result<T, DeviceFailure>) -> Result<(T, Vec<String>), DeviceFailure> {
    let mut refused = Vec::new();
    loop {
        match work() {
            Ok(done) => return Ok((done, refused)),
            Err(DeviceFailure::OutOfMemory { error, .. }) if refused.len() < MAX_DEVICE_REFUSALS as usize => {
                refused.push(error.to_string())
            }
            Err(DeviceFailure::OutOfMemory { error, .. }) => {
                let reason = format!("{error}; {} refusals in a row", refused.len() + 1);
                return Err(DeviceFailure::Lost { rank: 0, reason });
            }
            Err(other) => return Err(other),
        }
    }
}

/// Evaluates all slices one after the other, and returns the sums over all their rows.
fn evaluate_slices(
    engine: &mut Engine,
    data: &Dataset,
    slices: &[EvaluationSlice],
) -> Result<EvaluationSums, DeviceFailure> {
    let mut sum = EvaluationSums::default();
    for slice in slices {
        sum.add(evaluate_slice(engine, data, slice, 0)?);
    }
    Ok(sum)
}
