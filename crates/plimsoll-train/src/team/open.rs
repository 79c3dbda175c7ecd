//! Opens the devices of a plan: selects the executor for each [`DeviceSpec`], monitors the heartbeat meanwhile, and
//! plans again if a GPU holds more memory outside its arena than expected.

use super::abandoned::AbandonedMemory;
use super::run_on_all::{Job, JobOutcome, Task, run_on_all};
use super::{Team, Worker};
use crate::fault_injection::{FaultInjection, PendingFault};
use crate::planning::charges::program_charges;
use crate::planning::prepare::{TeamPlan, WorkerAssignment};
use crate::recovery::LoadLine;
use crate::remote::device::Connection;
use crate::resolve::Resolved;
use crate::resolve::RunRequest;
use crate::resolve::charges::round_up_charges;
use crate::session::engine::Engine;
use crate::session::events::EventLog;
use crate::session::failure::DeviceFailure;
use crate::team::heartbeat::{HeartbeatMonitor, HeartbeatSender, Liveness, MonitoredDevice, timeout_message};
use plimsoll_core::{
    Budget, Bytes, DType, DeviceKind, DeviceSpec, Event, Failure, GemmAlgorithms, HostSpec, Link, Plan,
};
use plimsoll_device::cpu::executor;
use plimsoll_device::cuda;
use plimsoll_device::cuda::open::{GpuMonitor, OpenOptions};
use plimsoll_device::device::{Device, DeviceError, NoFiles};
use plimsoll_device::probe::Memory;
use plimsoll_device::transport::{Transport, in_process};
use plimsoll_device::virtual_device::{self, VirtualDeviceSpec};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::{PlanOutcome, plan_recipe, search};
use plimsoll_plan::team::{evaluation_request, keep_micro_batch};
use plimsoll_program::{Op, Placement, ProgramSet};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Opens a device with the Programs of a plan, and returns the monitor of a GPU. `algorithms` fixes the matrix product
/// algorithms, `scratch` is the folder of the scratch file.
///
/// # Errors
/// The device cannot be opened, or no executor supports it.
pub fn open_device(
    spec: &DeviceSpec,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&GemmAlgorithms>,
    scratch: Option<&Path>,
) -> Result<(Box<dyn Device>, Option<GpuMonitor>), DeviceError> {
    let threads = spec.threads as usize;
    match spec.kind {
        DeviceKind::Cpu if scratch.is_none() => Ok((executor::open(set, placement, precision, threads, None)?, None)),
        DeviceKind::Cpu => Ok((virtual_device::open(cpu_with_queues(spec, scratch), set, placement, precision)?, None)),
        DeviceKind::Virtual => {
            let what =
                VirtualDeviceSpec { scratch_folder: scratch.map(Path::to_owned), ..virtual_device_of(spec, precision) };
            Ok((virtual_device::open(what, set, placement, precision)?, None))
        }
        DeviceKind::Cuda => {
            let options = OpenOptions { scratch, ..open_options(spec, precision, algorithms) };
            let (device, gpu) = cuda::open::open_for_run(&options, set, placement)?;
            Ok((device, Some(gpu)))
        }
        DeviceKind::Paper => Err(DeviceError::Unsupported { op: "a run", device: "a device on paper" }),
    }
}

/// Returns the function that asks a device for a sign of life. It works before the device is opened and during all its
/// work. A remote device is asked through its process.
pub(crate) fn liveness_probe(
    spec: &DeviceSpec,
    connection: Option<Arc<Connection>>,
) -> Arc<dyn Fn() -> bool + Send + Sync> {
    match (connection, spec.kind) {
        (Some(connection), _) => Arc::new(move || connection.is_responsive()),
        (None, DeviceKind::Cuda) => Arc::new(cuda::open::liveness_probe(gpu_index(spec))),
        // The CPU answers for as long as threads run.
        _ => Arc::new(|| true),
    }
}

/// Returns the driver's index of a GPU.
fn gpu_index(spec: &DeviceSpec) -> u32 {
    let index = spec.name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
    index.expect("GPUs are named by the driver's numbers")
}

fn open_options<'a>(spec: &DeviceSpec, precision: DType, algorithms: Option<&'a GemmAlgorithms>) -> OpenOptions<'a> {
    OpenOptions {
        index: gpu_index(spec),
        threads: spec.threads as usize,
        precision,
        algorithms,
        // NCCL allocates its memory later.
        charges: spec.charges_measured.then_some(spec.charges.saturating_sub(spec.nccl_bytes())),
        scratch: None,
    }
}

/// Measures the charges of a GPU with the Programs of a plan that assumed them, unless they have been measured. Returns
/// whether `spec` changed, so that a new plan is needed.
///
/// # Errors
/// The GPU cannot be opened. If it runs out of memory, the assumed charges stay.
pub fn measure_gpu_charges(
    spec: &mut DeviceSpec,
    answer: &PlanOutcome,
    scratch: Option<&Path>,
) -> Result<bool, DeviceError> {
    if spec.kind != DeviceKind::Cuda || spec.charges_measured || spec.remote_host().is_some() {
        return Ok(false);
    }
    let options = OpenOptions { scratch, ..open_options(spec, answer.precision, None) };
    match cuda::open::measure_charges(&options, answer.set.clone(), answer.layout.placement.clone()) {
        Ok(charges) => {
            (spec.charges, spec.charges_measured) = (round_up_charges(charges) + spec.nccl_bytes(), true);
            Ok(true)
        }
        Err(error) if error.is_out_of_memory() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the virtual device of a spec; its ops take the predicted time.
fn virtual_device_of(spec: &DeviceSpec, precision: DType) -> VirtualDeviceSpec {
    let (rates, team_link) = (spec.rates.clone(), spec.team_link);
    let price = move |set: &ProgramSet, op: &Op| {
        Prices { rates: &rates, host: &HostSpec::NONE, precision, team_link }.op_seconds(set, op)
    };
    VirtualDeviceSpec {
        name: spec.name.clone(),
        arena_budget: spec.arena_budget(),
        threads: spec.threads as usize,
        price: Box::new(price),
        link: spec.rates.host_link,
        scratch_folder: None,
    }
}

/// Returns the CPU as a device with queues and without simulated delays, so that it computes while the scratch file is
/// read and written.
fn cpu_with_queues(spec: &DeviceSpec, scratch: Option<&Path>) -> VirtualDeviceSpec {
    VirtualDeviceSpec {
        name: spec.name.clone(),
        arena_budget: Bytes(u64::MAX),
        threads: spec.threads as usize,
        price: Box::new(|_, _| 0.0),
        link: Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 },
        scratch_folder: scratch.map(Path::to_owned),
    }
}

/// Most plans for a GPU with measured charges above the planned ones.
const MAX_PLAN_ATTEMPTS: u32 = 3;

/// Opens the devices of a plan and forms their team. `under_way` is set for a run that has trained already: then any
/// failure counts as the loss of the device. Returns the team with its plan.
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

/// Opens one device with its load line; see [`OpenedDevice::monitor`].
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
    let OpenedDevice { assignment, engine, plan, programs, heartbeat, monitor } =
        open_assignment(run, resolved, assignment, faults, false)?;
    let line = LoadLine::new(budget, fixed_capacity, &plan, programs);
    Ok((Worker::new(&assignment, engine, plan, line, heartbeat), monitor))
}

/// Returns the budget of a device in the run file.
fn budget(run: &RunRequest, resolved: &Resolved, device: &DeviceSpec) -> Budget {
    match &resolved.fallback {
        Some(_) => run.host_budget(),
        None => run.budget_of(&device.name),
    }
}

/// Returns the fixed memory size of a device: the configured size of a virtual device, or the reservation on a remote
/// host. None for other devices.
pub(crate) fn fixed_capacity(run: &RunRequest, resolved: &Resolved, device: &DeviceSpec) -> Option<Bytes> {
    let here = device.remote_host().is_none();
    let free = || if here { Memory::read().free } else { device.budget };
    let fixed_capacity = || device.budget.max(budget(run, resolved, device).load_line(free()));
    (device.kind == DeviceKind::Virtual || !here).then(fixed_capacity)
}

/// An open device of a plan.
pub(crate) struct OpenedDevice {
    /// Its part of the plan, planned again if necessary.
    pub assignment: WorkerAssignment,
    /// Open device with its Programs.
    pub engine: Engine,
    /// Plan of the device.
    pub plan: Plan,
    /// Charges of its Programs.
    pub programs: Bytes,
    /// Heartbeat, which began before the device was opened.
    pub heartbeat: Option<HeartbeatSender>,
    /// Temporary monitor, until the team starts its own.
    pub monitor: Option<HeartbeatMonitor>,
}

/// Opens one device of a plan on a thread that owns it meanwhile. With `evaluates`, the device is an evaluator. Opening
/// may take any time while the device sends heartbeats; otherwise it is abandoned with all its memory.
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
        let opened = open_engine(&run, &resolved, &mut assignment, connection, &faults, task_liveness, evaluates)?;
        *engine = opened.engine;
        Ok((assignment, opened.plan, opened.programs))
    });
    let job = Job { rank: 0, engine: Engine::placeholder(&name), liveness: liveness.clone(), task };
    let no_peers: Arc<dyn Transport> = in_process::InProcessTransport::new_group(1);
    let outcome = run_on_all(vec![job], &no_peers, &mut NoFiles).pop();
    if liveness.is_some_and(|liveness| liveness.is_lost()) {
        // A thread that has returned meanwhile may block again when the device is closed.
        thread::spawn(move || drop(outcome));
        return Err(DeviceFailure::Lost { rank: 0, reason: timeout_message(&name, heartbeat_timeout) });
    }
    let Some((_, JobOutcome::Returned(engine, opened))) = outcome else { unreachable!("a responsive device returns") };
    let (assignment, plan, programs) = opened?;
    Ok(OpenedDevice { assignment, engine: *engine, plan, programs, heartbeat, monitor })
}

/// An open engine with its plan and the charges of its Programs.
struct OpenedEngine {
    engine: Engine,
    plan: Plan,
    programs: Bytes,
}

/// Opens the engine of one device, and returns its plan and the charges of its Programs. If a GPU holds more memory
/// outside the arena than planned, which is found before the arena is allocated, its part is planned again under the
/// same load line.
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
    let mut all = std::iter::once(&resolved.device).chain(&resolved.others);
    let rates = all
        .find(|device| device.name == assignment.device.name)
        .map_or(&assignment.device.rates, |device| &device.rates);
    let rates = rates.clone();
    let mut attempts = 1;
    loop {
        let (answer, plan) = (assignment.outcome.clone(), assignment.outcome.plan.clone());
        let programs = program_charges(&assignment.device, &answer.set);
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
        let held = match opened {
            Ok(engine) => {
                let plan = Plan { algorithms: engine.algorithms(), ..plan };
                return Ok(OpenedEngine { engine, plan, programs });
            }
            Err(DeviceError::ChargesExceedPlan { held, .. }) if attempts < MAX_PLAN_ATTEMPTS => held,
            Err(error) => return Err(error.into()),
        };
        attempts += 1;
        assignment.device.charges = round_up_charges(held) + assignment.device.nccl_bytes();
        let question = assignment.plan_request(run, &resolved.model)?;
        let question = if evaluates { evaluation_request(&question) } else { question };
        let mut answer = plan_recipe(&question, &plan.recipe);
        if !answer.plan.fits && !evaluates {
            // The other workers keep their number of micro-batches.
            answer = search(&keep_micro_batch(question, &plan.recipe));
        }
        if !answer.plan.fits {
            let message = format!("{} holds {held} outside its arena, more than planned", assignment.device.name);
            let least = answer.plan.needs.first().map(|need| need.budget_bytes);
            let hint = least.map(|least| format!("the smallest budget that fits: --budget {}", Budget::Amount(least)));
            return Err(hint.into_iter().fold(Failure::does_not_fit(message), Failure::hint).into());
        }
        assignment.outcome = answer;
    }
}
