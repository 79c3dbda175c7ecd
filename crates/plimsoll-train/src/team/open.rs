//! Opens the devices of a plan: monitors the heartbeat of each meanwhile, and plans again if a GPU holds more memory
//! outside its arena than expected.

use super::abandoned::{AbandonedMemory, drop_on_thread};
use super::run_on_all::{Job, JobOutcome, Task, run_on_all};
use super::worker::PredictedCompute;
use super::{Team, Worker};
use crate::engine::Engine;
use crate::engine::failure::DeviceFailure;
use crate::engine::open::liveness_probe;
use crate::events::EventLog;
use crate::fault_injection::{FaultInjection, PendingFault};
use crate::heartbeat::{HeartbeatMonitor, HeartbeatSender, Liveness, MonitoredDevice, timeout_message};
use crate::planning::charges::program_charges;
use crate::planning::planner::{Charges, Planner};
use crate::planning::team_plan::{TeamPlan, WorkerAssignment};
use crate::recovery::LoadLine;
use crate::remote::device::Connection;
use crate::resolve::Resolved;
use crate::resolve::RunRequest;
use crate::resolve::charges::round_up_charges;
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Event, Failure, Plan};
use plimsoll_device::device::NoFiles;
use plimsoll_device::error::DeviceError;
use plimsoll_device::probe::Memory;
use plimsoll_device::transport::{Transport, in_process};
use std::sync::Arc;
use std::time::Duration;

/// Largest number of plans to try for one GPU. A further plan is needed if the GPU holds more memory outside its arena
/// than planned.
const MAX_PLAN_ATTEMPTS: u32 = 5;

/// Opens the devices of a plan and forms their team. `under_way` says that the run has trained before: any failure then
/// counts as the loss of the device. `has_replacement` says that excluded devices could take over if the only worker is
/// lost. `abandoned` lists memory of earlier teams. Returns the team with its plan.
///
/// # Errors
/// A device cannot be opened, or is lost.
pub(crate) fn open_team(
    run: &RunRequest,
    resolved: &Resolved,
    planned: TeamPlan,
    faults: &[Arc<PendingFault>],
    abandoned: &AbandonedMemory,
    under_way: bool,
    has_replacement: bool,
    log: &mut EventLog,
) -> Result<(Team, Plan), DeviceFailure> {
    let TeamPlan { mut plan, assignments, .. } = planned;
    // The monitors of open devices run until all devices are open.
    let (mut monitors, mut workers) = (Vec::new(), Vec::new());
    for (rank, assignment) in assignments.into_iter().enumerate() {
        let before = assignment.algorithms.clone();
        let (worker, monitor) = open_worker(run, resolved, assignment, faults).map_err(|failure| match failure {
            // The other workers were at work before, and can continue.
            failure if under_way => DeviceFailure::Lost { rank, reason: failure.message() },
            failure => failure.with_rank(rank),
        })?;
        monitors.push(monitor);
        if let (Some(before), Some(now)) = (before, &worker.plan.algorithms)
            && !before.chosen.is_empty()
            && worker.engine.chose_new_algorithms()
        {
            let message = format!(
                "some matrix product algorithms were chosen again (now: {now}; before: {before}): results may differ in \
                 the last bits from an uninterrupted run"
            );
            log.emit(Event::Warning { message })?;
        }
        workers.push(worker);
    }
    drop(monitors);
    let mut team = Team::new(workers, run.remote.clone(), heartbeat_timeout(run), abandoned.clone(), has_replacement)?;
    team.inject_faults(faults, run.train.seed);
    if let [only] = team.workers() {
        let Plan { planned_for, shortfall_note, contention_note, excluded, .. } = plan;
        plan = Plan { planned_for, shortfall_note, contention_note, excluded, ..only.plan.clone() };
    }
    Ok((team, plan))
}

/// Returns the time without heartbeat after which a device is lost.
fn heartbeat_timeout(run: &RunRequest) -> Duration {
    Duration::from_secs_f64(run.run.heartbeat_seconds)
}

/// Opens one device of a plan as a worker with its load line. Returns the worker, and a monitor of its heartbeat until
/// the team starts its own; `None` if the system refused a thread.
fn open_worker(
    run: &RunRequest,
    resolved: &Resolved,
    assignment: WorkerAssignment,
    faults: &[Arc<PendingFault>],
) -> Result<(Worker, Option<HeartbeatMonitor>), DeviceFailure> {
    let fixed_capacity = fixed_capacity(run, resolved, &assignment.device);
    let budget_of_run_file =
        || fixed_capacity.map_or_else(|| budget(run, resolved, &assignment.device), Budget::Amount);
    let budget = run.budget_overrides.get(&assignment.device.name).copied().unwrap_or_else(budget_of_run_file);
    let OpenedDevice { assignment, opened, heartbeat, monitor } =
        open_assignment(run, resolved, assignment, faults, false)?;
    let OpenedEngine { engine, plan, programs, predicted_compute } = opened;
    let line = LoadLine::new(budget, fixed_capacity, &plan, programs);
    Ok((Worker::new(&assignment, engine, plan, predicted_compute, line, heartbeat), monitor))
}

/// Returns the budget that the run file gives a device. A CPU that replaces accelerators on which the run does not fit
/// has the budget of host memory.
fn budget(run: &RunRequest, resolved: &Resolved, device: &DeviceSpec) -> Budget {
    match &resolved.fallback {
        Some(_) => run.host_budget(),
        None => run.budget_of(&device.name),
    }
}

/// Returns the fixed memory size of a device: the configured size of a virtual device, or the bytes that a remote host
/// reserves for the run. `None` for other devices.
pub(crate) fn fixed_capacity(run: &RunRequest, resolved: &Resolved, device: &DeviceSpec) -> Option<Bytes> {
    let here = device.remote_host().is_none();
    let free = || if here { Memory::read().free } else { device.budget };
    let fixed_capacity = || device.budget.max(budget(run, resolved, device).load_line(free()));
    (device.kind == DeviceKind::Virtual || !here).then(fixed_capacity)
}

/// A device of a plan after it was opened, ready to run its Programs.
pub(crate) struct OpenedDevice {
    /// The device with its part of the run's plan, without Programs: the engine has them. The part is planned again if
    /// the device has higher charges than planned.
    pub assignment: WorkerAssignment,
    /// Engine of the device, with its plan.
    pub opened: OpenedEngine,
    /// Heartbeat, which began before the device was opened; `None` if the system refused a thread.
    pub heartbeat: Option<HeartbeatSender>,
    /// Monitor of the heartbeat until the team starts its own; `None` if the system refused a thread.
    pub monitor: Option<HeartbeatMonitor>,
}

/// Opens one device of a plan on a thread of its own. With `evaluates`, the device is an evaluator, which is outside
/// the team. Opening may take any time while the device sends heartbeats. A device that sends none is abandoned with
/// all its memory.
///
/// # Errors
/// The device cannot be opened, its part no longer fits, or it is lost.
pub(crate) fn open_assignment(
    run: &RunRequest,
    resolved: &Resolved,
    mut assignment: WorkerAssignment,
    faults: &[Arc<PendingFault>],
    evaluates: bool,
) -> Result<OpenedDevice, DeviceFailure> {
    let (name, heartbeat_timeout) = (assignment.device.name.clone(), heartbeat_timeout(run));
    let connection = assignment.device.remote_host().map(|_| run.remote.connection(&name)).transpose()?;
    let probe = liveness_probe(&assignment.device, connection.clone());
    let heartbeat = HeartbeatSender::start(&name, heartbeat_timeout, move || probe());
    let liveness = heartbeat.as_ref().map(HeartbeatSender::liveness);
    if let (Some(connection), Some(liveness)) = (&connection, &liveness) {
        // Callers that wait for its answers are released when it is lost.
        connection.set_liveness(Arc::clone(liveness));
    }
    let monitored = |liveness| MonitoredDevice { rank: 0, name: name.clone(), liveness: Arc::clone(liveness) };
    let monitored = liveness.iter().map(monitored).collect();
    // Nothing must be aborted on a loss; `run_on_all` polls the liveness.
    let monitor = HeartbeatMonitor::start(monitored, |_, _| {}, heartbeat_timeout);
    let (run, resolved, faults) = (run.clone(), resolved.clone(), faults.to_vec());
    let task_liveness = liveness.clone();
    let task: Task<_> = Box::new(move |engine, _| {
        let mut opened = open_engine(&run, &resolved, &mut assignment, connection, &faults, task_liveness, evaluates)?;
        std::mem::swap(engine, &mut opened.engine);
        Ok((assignment, opened))
    });
    let job = Job { rank: 0, engine: Engine::placeholder(&name), liveness: liveness.clone(), task };
    let no_peers: Arc<dyn Transport> = in_process::InProcessTransport::new_group(1);
    let outcome = run_on_all(vec![job], &no_peers, &mut NoFiles).pop();
    if liveness.is_some_and(|liveness| liveness.is_lost()) {
        // A thread that has returned meanwhile may block again when the device is closed.
        drop_on_thread(outcome);
        return Err(DeviceFailure::Lost { rank: 0, reason: timeout_message(&name, heartbeat_timeout) });
    }
    let Some((_, JobOutcome::Returned(engine, opened))) = outcome else { unreachable!("a responsive device returns") };
    let (assignment, opened) = opened?;
    Ok(OpenedDevice { assignment, opened: OpenedEngine { engine: *engine, ..opened }, heartbeat, monitor })
}

/// An open engine with its plan and figures of its Programs.
pub(crate) struct OpenedEngine {
    /// Engine that runs the Programs on the device.
    pub engine: Engine,
    /// Plan of this device alone, for its part of the run.
    pub plan: Plan,
    /// Part of the device's charges that its Programs cause.
    pub programs: Bytes,
    /// Compute time of a step that the Programs predict.
    pub predicted_compute: PredictedCompute,
}

/// Returns the charges for the next plan of a GPU that held more than planned twice: with room to grow as much again.
/// Each plan has products of other sizes, and cuBLASLt keeps the kernels of all algorithms that were timed for them: on
/// an H200, 25 MiB for each plan of llama-3.2-3b.
fn charges_after_growth(held: Bytes, planned: Bytes) -> Bytes {
    held + held.saturating_sub(planned)
}

/// Opens the engine of one device, and returns it with its plan and the charges of its Programs. If the device has
/// higher charges than planned, plans it again under the same load line and changes `assignment`. With `evaluates`, the
/// device is an evaluator, which is outside the team.
fn open_engine(
    run: &RunRequest,
    resolved: &Resolved,
    assignment: &mut WorkerAssignment,
    connection: Option<Arc<Connection>>,
    faults: &[Arc<PendingFault>],
    liveness: Option<Arc<Liveness>>,
    evaluates: bool,
) -> Result<OpenedEngine, DeviceFailure> {
    FaultInjection::check_opening(faults, &assignment.device.name, liveness)?;
    let (precision, sequence) = (run.arithmetic(assignment.device.kind), u64::from(run.data.sequence));
    let vocab = resolved.model.config.vocab;
    let fixed_capacity = fixed_capacity(run, resolved, &assignment.device);
    // A virtual device keeps its configured speed, even if the planner uses a measured one.
    let rates = resolved
        .devices()
        .find(|device| device.name == assignment.device.name)
        .map_or(&assignment.device.rates, |device| &device.rates);
    let rates = rates.clone();
    let mut attempts = 1;
    loop {
        let answer = assignment.take_outcome();
        let plan = answer.plan.clone();
        let programs = program_charges(&assignment.device, &answer.set);
        let predicted_compute = PredictedCompute::of(&assignment.device, &answer);
        let algorithms = assignment.algorithms.as_ref();
        let simulated = fixed_capacity.filter(|_| assignment.device.simulated());
        let simulated =
            simulated.map(|budget| DeviceSpec { budget, rates: rates.clone(), ..assignment.device.clone() });
        let spec = simulated.as_ref().unwrap_or(&assignment.device);
        let opened = match &connection {
            Some(connection) => {
                let connection = Arc::clone(connection);
                Engine::open_remote(
                    connection,
                    answer,
                    precision,
                    spec,
                    algorithms,
                    heartbeat_timeout(run),
                    sequence,
                    vocab,
                )
            }
            None => Engine::open(answer, precision, spec, algorithms, run.scratch_folder(), sequence, vocab),
        };
        let (held, planned) = match opened {
            Ok(engine) => {
                let plan = Plan { algorithms: engine.algorithms(), ..plan };
                return Ok(OpenedEngine { engine, plan, programs, predicted_compute });
            }
            Err(DeviceError::ChargesExceedPlan { held, planned }) if attempts < MAX_PLAN_ATTEMPTS => (held, planned),
            Err(error) => return Err(error.into()),
        };
        attempts += 1;
        let charges = if attempts == 2 { held } else { charges_after_growth(held, planned) };
        assignment.device.charges = round_up_charges(charges) + assignment.device.nccl_bytes();
        let planner = Planner::new(run, &resolved.model, Charges::Stated);
        let answer = planner.replan_assignment(assignment, evaluates)?;
        if !answer.plan.fits {
            let message = format!("{} holds {held} outside its arena, more than planned", assignment.device.name);
            let least = answer.plan.needs.first().map(|need| need.budget_bytes);
            let hint = least.map(|least| format!("the smallest budget that fits: --budget {}", Budget::Amount(least)));
            return Err(hint.into_iter().fold(Failure::does_not_fit(message), Failure::hint).into());
        }
        assignment.outcome = answer;
    }
}
