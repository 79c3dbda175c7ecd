//! The plan of a run together with its devices: the assignment of each worker and of the evaluator.

use super::previous_plan::PreviousPlan;
use super::request::share_request;
use crate::fault_injection::TargetDevice;
use crate::resolve::{Model, RunRequest};
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure, GemmAlgorithms, Plan};
use plimsoll_plan::layout::Layout;
use plimsoll_plan::search::{PlanOutcome, PlanRequest};
use plimsoll_plan::team::{PlannedWorker, TeamOutcome};
use plimsoll_program::{ProgramSet, Share};

/// The part of a run that one device does.
#[derive(Clone, Debug)]
pub struct WorkerAssignment {
    /// The device, with the charges (bytes outside the arena) that the plan counts on.
    pub device: DeviceSpec,
    /// Part of the weights, optimizer state and layers that the device holds.
    pub share: Share,
    /// Number of sequences of each step that the device computes.
    pub sequences: u64,
    /// Plan and Programs of this device alone.
    pub outcome: PlanOutcome,
    /// Matrix product algorithms that the device had in the previous plan of the run. `None` without a previous plan,
    /// for a device that was not in it, or for a device that is no GPU.
    pub algorithms: Option<GemmAlgorithms>,
}

impl WorkerAssignment {
    /// Returns the device's name and Programs, as a target of fault injection.
    pub(crate) fn fault_target(&self) -> TargetDevice<'_> {
        TargetDevice { name: &self.device.name, programs: &self.outcome.set }
    }

    /// Moves the outcome out, and keeps only its plan. A second copy of the Programs would lie beside a full arena.
    pub(crate) fn take_outcome(&mut self) -> PlanOutcome {
        let kept = PlanOutcome {
            plan: self.outcome.plan.clone(),
            set: ProgramSet::default(),
            layout: Layout::default(),
            tried: Vec::new(),
            precision: self.outcome.precision,
        };
        std::mem::replace(&mut self.outcome, kept)
    }

    /// Returns the request to plan this assignment again: the same share and sequences on the same device.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model.
    pub fn plan_request<'a>(&'a self, run: &RunRequest, model: &'a Model) -> Result<PlanRequest<'a>, Failure> {
        share_request(run, model, &self.device, &self.share, self.sequences)
    }
}

/// The plan of a run with the assignment of each worker.
#[derive(Clone, Debug)]
pub struct TeamPlan {
    /// The plan of the whole run, as it is written to `plan.json`.
    pub plan: Plan,
    /// Assignment of each worker, in rank order.
    pub assignments: Vec<WorkerAssignment>,
    /// Assignment of the device that evaluates outside the team. `None` if the team evaluates, or if the run does not
    /// evaluate.
    pub evaluator: Option<WorkerAssignment>,
    /// Load line of the host memory that all workers share.
    pub host: Bytes,
}

impl TeamPlan {
    /// Combines the `outcome` of planning with `devices`, into which its workers hold indices. `host` is the load line
    /// of the host memory that the workers share; `None` takes it from the plan. The workers take over the matrix
    /// product algorithms of the previous plan, if there is one. The GPUs of a `deterministic` run take no algorithm by
    /// its measured time.
    pub(super) fn new(
        devices: &[DeviceSpec],
        outcome: TeamOutcome,
        host: Option<Bytes>,
        previous: Option<&PreviousPlan>,
        deterministic: bool,
    ) -> TeamPlan {
        let TeamOutcome { workers, plan, evaluator } = outcome;
        let assign = |worker| assign_worker(devices, worker, previous, deterministic);
        TeamPlan {
            assignments: workers.into_iter().map(assign).collect(),
            evaluator: evaluator.map(assign),
            host: host.unwrap_or(plan.host.budget_bytes),
            plan,
        }
    }

    /// Sets the load line of the device `name` to `budget`, in its assignment and in the plan. Call it for a device
    /// that was planned under a lower load line.
    pub(crate) fn set_budget(&mut self, name: &str, budget: Bytes) {
        let assignments = self.assignments.iter_mut().chain(&mut self.evaluator);
        for assignment in assignments.filter(|assignment| assignment.device.name == name) {
            assignment.device.budget = budget;
            assignment.outcome.plan.devices[0].budget_bytes = budget;
        }
        let devices = self.plan.devices.iter_mut().filter(|device| device.name == name);
        devices.for_each(|device| device.budget_bytes = budget);
    }
}

/// Combines a planned worker with its device, and with the matrix product algorithms that the device had in the
/// previous plan. `worker.device` is an index into `devices`. A GPU of a `deterministic` run takes no algorithm by its
/// measured time.
fn assign_worker(
    devices: &[DeviceSpec],
    worker: PlannedWorker,
    previous: Option<&PreviousPlan>,
    deterministic: bool,
) -> WorkerAssignment {
    let device = devices[worker.device].clone();
    let algorithms = previous.and_then(|previous| match devices {
        [_] => previous.algorithms.as_ref(),
        _ => previous.algorithms_of_worker(&device.name),
    });
    let mut algorithms = algorithms.cloned();
    if deterministic && device.kind == DeviceKind::Cuda {
        algorithms.get_or_insert_default().untimed = true;
    }
    WorkerAssignment { algorithms, device, share: worker.share, sequences: worker.sequences, outcome: worker.outcome }
}
