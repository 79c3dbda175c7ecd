//! Preparation of a training run: opens model and data, measures charges, and plans. The devices themselves are opened later.

use super::charges::{
    ProgramCharges, SingleDevicePlan, add_team_charges, plan_single_device, plan_with_program_charges,
    program_heap_bytes,
};
use super::plan::planned_workload;
use super::request::{evaluation_schedule, host_spec, plan_request, share_request, staging_bytes, team_request};
use crate::config::LoraSection;
use crate::data::{self, DataSpec, Dataset};
use crate::fault_injection::TargetDevice;
use crate::files::AdapterDir;
use crate::resolve::charges::{
    NEAR_FIT_BYTES, RESIDENT_VARIATION_BYTES, process_charges, process_charges_minus, set_process_charges,
};
use crate::resolve::devices::{contention_note, shortfall_note};
use crate::resolve::{Model, Resolved, RunRequest, Workload, write_example};
use crate::team::open::measure_gpu_charges;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure, GemmAlgorithms, Parallelism, Plan, Recipe, WorkerPlan};
use plimsoll_device::{calibration, process};
use plimsoll_plan::search::{PlanOutcome, PlanRequest, plan_recipe, search};
use plimsoll_plan::team::{
    self, EvaluationSchedule, TeamConstraint, TeamOutcome, TeamRequest, add_device_remedies, plan_fixed_team,
    plan_team_if_fits,
};
use plimsoll_program::Share;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// The plan of an earlier part of a run, or a stored plan. A run uses it again if it still fits.
#[derive(Clone, Debug, PartialEq)]
pub struct PreviousPlan {
    /// Recipe of the first device.
    pub recipe: Recipe,
    /// Charges of the first device.
    pub charges_bytes: Bytes,
    /// Matrix product algorithms of the first device, if it is a GPU.
    pub algorithms: Option<GemmAlgorithms>,
    /// Parallelism of the team; `None` for one device.
    pub parallelism: Option<Parallelism>,
    /// Plan of each worker, in rank order; empty for one device.
    pub team: Vec<WorkerPlan>,
}

impl PreviousPlan {
    /// Takes over a stored plan; `None` if it has no devices.
    pub fn from_plan(plan: &Plan) -> Option<PreviousPlan> {
        Some(PreviousPlan {
            recipe: plan.recipe.clone(),
            charges_bytes: plan.devices.first()?.charges_bytes,
            algorithms: plan.algorithms.clone(),
            parallelism: plan.parallelism,
            team: plan.team.clone(),
        })
    }
}

/// The part of a run that one device does.
#[derive(Clone, Debug)]
pub struct WorkerAssignment {
    /// The device, with the charges that the plan was made with.
    pub device: DeviceSpec,
    /// Its share of the weights, state and layers.
    pub share: Share,
    /// Number of sequences of each step that it computes.
    pub sequences: u64,
    /// The plan and Programs of its share.
    pub outcome: PlanOutcome,
    /// Matrix product algorithms of an earlier part of the run, if it is a GPU.
    pub algorithms: Option<GemmAlgorithms>,
}

impl WorkerAssignment {
    /// Returns the device with its Programs, as a target of fault injection.
    pub(crate) fn fault_target(&self) -> TargetDevice<'_> {
        TargetDevice { name: &self.device.name, programs: &self.outcome.set }
    }

    /// Returns the request to plan this share of the run.
    ///
    /// # Errors
    /// Pinned choices that do not match the model.
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
    /// Assignment of a device outside the team that evaluates.
    pub evaluator: Option<WorkerAssignment>,
    /// Load line of the host memory that all workers share.
    pub host: Bytes,
}

impl TeamPlan {
    /// Creates the plan of a run on one device.
    fn of_one_device(
        device: &DeviceSpec,
        run: &RunRequest,
        outcome: PlanOutcome,
        previous: Option<&PreviousPlan>,
    ) -> TeamPlan {
        let algorithms = previous.and_then(|previous| previous.algorithms.clone());
        let (plan, host) = (outcome.plan.clone(), outcome.plan.host.budget_bytes);
        let assignment = WorkerAssignment {
            device: device.clone(),
            share: Share::SINGLE_DEVICE,
            sequences: run.batch_sequences(),
            outcome,
            algorithms,
        };
        TeamPlan { plan, assignments: vec![assignment], evaluator: None, host }
    }

    /// Sets the load line of a device that was planned with a lower one.
    pub(crate) fn set_budget(&mut self, name: &str, budget: Bytes) {
        for assignment in self.all_assignments_mut().filter(|assignment| assignment.device.name == name) {
            assignment.device.budget = budget;
            assignment.outcome.plan.devices[0].budget_bytes = budget;
        }
        let devices = self.plan.devices.iter_mut().filter(|device| device.name == name);
        devices.for_each(|device| device.budget_bytes = budget);
    }

    /// Returns the assignments of all workers and of the evaluator.
    fn all_assignments_mut(&mut self) -> impl Iterator<Item = &mut WorkerAssignment> {
        self.assignments.iter_mut().chain(&mut self.evaluator)
    }
}

/// A run that is ready to open its devices.
pub struct PreparedRun {
    /// The request. If the run is the built-in example, it names the files that were written for it.
    pub run: RunRequest,
    /// Model and device; the charges of the device are measured.
    pub resolved: Resolved,
    /// Training data.
    pub train: Dataset,
    /// Evaluation data.
    pub eval: Option<Dataset>,
    /// The plan.
    pub planned: TeamPlan,
    /// Whether tokenizing the data has raised the charges of this process. A new process that finds the tokens cached would be
    /// charged less.
    pub process_grew: bool,
}

/// Opens model and data, and plans. The plan of an earlier part of the run is used again if it still fits. The result may hold
/// a plan that does not fit.
///
/// # Errors
/// An invalid run file, model or data.
pub fn prepare(mut run: RunRequest, previous: Option<&PreviousPlan>) -> Result<PreparedRun, Failure> {
    write_example(&mut run)?;
    // Errors that need no rates are reported before rates are measured.
    let model = Model::open(&run)?;
    model.check_weights(&run)?;
    for patterns in [&run.data.train, &run.data.eval].into_iter().filter(|patterns| !patterns.is_empty()) {
        data::list_files(patterns, run.data.format)?;
    }
    let mut resolved = Resolved::for_run(&run, model, Workload::Train)?;
    run.decide_precision(resolved.device.kind);
    let open = |patterns: &[String]| open_dataset(&run, &resolved.model, patterns, resolved.device.threads as usize);
    let charges_before = process_charges(run.batch_sequences(), u64::from(run.data.sequence));
    let train = open(&run.data.train)?;
    let eval = if run.data.eval.is_empty() { None } else { Some(open(&run.data.eval)?) };
    let process_grew = process_charges(run.batch_sequences(), u64::from(run.data.sequence)) > charges_before;
    let mut planned = if resolved.others.is_empty() {
        let outcome = plan_one_device(&mut resolved, &run, previous)?;
        TeamPlan::of_one_device(&resolved.device, &run, outcome, previous)
    } else {
        let evaluations = evaluation_schedule(&run, eval.as_ref().map(Dataset::rows));
        plan_team(&mut resolved, &run, previous, evaluations)?
    };
    if !planned.plan.fits {
        // The charges of a team do not apply to a processor alone.
        let previous = previous.filter(|previous| previous.team.is_empty());
        let on_cpu =
            resolved.fall_back_to_cpu(&run, &planned.plan, |resolved, run| plan_one_device(resolved, run, previous))?;
        planned = on_cpu.map_or(planned, |outcome| TeamPlan::of_one_device(&resolved.device, &run, outcome, previous));
    }
    planned.plan.shortfall_note = planned.assignments.iter().find_map(|assignment| shortfall_note(&assignment.device));
    planned.plan.contention_note = contention_note();
    planned.plan.planned_for = Some(planned_workload(&run, &resolved.model.config));
    if planned.plan.fits {
        run.decide_rungs(&planned.plan.rungs);
    }
    if let Some(adapter) = &resolved.model.adapter {
        run.lora = LoraSection { dropout: run.lora.dropout, ..adapter_section(adapter) };
    }
    Ok(PreparedRun { run, resolved, train, eval, planned, process_grew })
}

/// Plans for the only device, and measures its charges.
fn plan_one_device(
    resolved: &mut Resolved,
    run: &RunRequest,
    previous: Option<&PreviousPlan>,
) -> Result<PlanOutcome, Failure> {
    set_process_charges(&mut resolved.device, run.batch_sequences(), u64::from(run.data.sequence));
    let measured = resolved.device.charges;
    let near_fit = process_charges_minus(NEAR_FIT_BYTES, run.batch_sequences(), u64::from(run.data.sequence));
    let previous_charges = previous.map(|previous| previous.charges_bytes);
    let previous_charges = previous_charges.filter(|&charges| measured <= charges + RESIDENT_VARIATION_BYTES);
    match previous {
        // This GPU is unmeasured on this machine, but the run has measured it before.
        Some(previous) if resolved.device.kind == DeviceKind::Cuda && !resolved.device.charges_measured => {
            (resolved.device.charges, resolved.device.charges_measured) = (previous.charges_bytes, true);
        }
        _ => resolved.device.charges = previous_charges.unwrap_or(measured),
    }
    let plan = |resolved: &Resolved| -> Result<PlanOutcome, Failure> {
        let request = resolved.plan_request(run, Workload::Train)?;
        let recipe = previous.map(|previous| &previous.recipe).filter(|recipe| recipe.micro_batch > 0);
        let recipe = recipe.filter(|recipe| is_recipe_of_run(recipe, None, run, &resolved.model));
        let again = recipe.map(|recipe| plan_recipe(&request, recipe)).filter(|outcome| outcome.plan.fits);
        Ok(again.unwrap_or_else(|| search(&request)))
    };
    let mut outcome = plan(resolved)?;
    if measure_gpu_charges(&mut resolved.device, &outcome, run.scratch_folder())? {
        outcome = plan(resolved)?;
    }
    if resolved.device.kind == DeviceKind::Cuda || previous_charges.is_some() {
        return Ok(outcome);
    }
    let outcome = charge_programs(resolved, run, outcome)?;
    if outcome.plan.fits || near_fit >= measured || !resolved.device.in_process() {
        return Ok(outcome);
    }
    let refused_charges = resolved.device.charges;
    resolved.device.charges = near_fit;
    let near_outcome = plan(resolved)?;
    let near_outcome = charge_programs(resolved, run, near_outcome)?;
    if near_outcome.plan.fits {
        return Ok(near_outcome);
    }
    resolved.device.charges = refused_charges;
    Ok(outcome)
}

/// Charges the Programs of `outcome`, and plans again if the charges do not cover them yet.
fn charge_programs(resolved: &mut Resolved, run: &RunRequest, outcome: PlanOutcome) -> Result<PlanOutcome, Failure> {
    let Resolved { model, device, .. } = resolved;
    let mut first = Some(outcome);
    plan_with_program_charges(std::slice::from_mut(device), |devices| {
        let plan_again = || Ok::<_, Failure>(search(&plan_request(run, model, &devices[0], Workload::Train)?));
        let outcome = first.take().map_or_else(plan_again, Ok)?;
        let program_bytes = outcome.plan.fits.then(|| program_heap_bytes([&outcome.set]));
        Ok((outcome, program_bytes))
    })
}

/// Plans for several devices, and measures their charges: each device in this process is charged with the whole process.
fn plan_team(
    resolved: &mut Resolved,
    run: &RunRequest,
    previous: Option<&PreviousPlan>,
    evaluations: Option<EvaluationSchedule>,
) -> Result<TeamPlan, Failure> {
    let mut devices = vec![resolved.device.clone()];
    devices.extend(resolved.others.iter().cloned());
    for device in &mut devices {
        set_process_charges(device, run.batch_sequences(), u64::from(run.data.sequence));
    }
    let charges_alone: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
    add_team_charges(&mut devices, run);
    let previous_charges = previous.map(|previous| previous.charges_bytes);
    for device in devices.iter_mut().filter(|device| device.in_process()) {
        let usable = previous_charges.filter(|&charges| device.charges <= charges + RESIDENT_VARIATION_BYTES);
        device.charges = usable.unwrap_or(device.charges);
    }
    let mut charges = ProgramCharges::new(&devices);
    let host = host_spec(run, &resolved.device)?.budget.saturating_sub(staging_bytes(&resolved.others));
    loop {
        let mut planned = plan_assignments(run, &resolved.model, &devices, host, previous, None, evaluations)?;
        let mut measured_any = false;
        for assignment in planned.all_assignments_mut() {
            if measure_gpu_charges(&mut assignment.device, &assignment.outcome, run.scratch_folder())? {
                let device = devices.iter_mut().find(|device| device.name == assignment.device.name);
                *device.expect("the plan uses these devices") = assignment.device.clone();
                measured_any = true;
            }
        }
        // All Programs are in this process. A previous plan was made with charges that cover them.
        let may_raise = measured_any || previous_charges.is_none() && planned.plan.fits;
        let program_bytes = program_heap_bytes(planned.all_assignments_mut().map(|assignment| &assignment.outcome.set));
        let raised = may_raise && charges.raise(&mut devices, program_bytes);
        if measured_any || raised {
            continue;
        }
        if !planned.plan.fits && run.run.parallelism.allows_single_device() {
            let single = plan_one_of_team(run, &resolved.model, &mut devices, &charges_alone, host)?;
            planned = single.unwrap_or(planned);
        }
        // A resumed run keeps its team, so it needs no remarks about excluded devices.
        if previous.is_none() {
            let request = team_request_beside(run, &resolved.model, &devices, host)?;
            add_device_remedies(&request, &run.devices(), &mut planned.plan);
        }
        // Excluded devices may be needed later, so all devices are kept.
        resolved.device = devices.remove(0);
        resolved.others = devices;
        return Ok(planned);
    }
}

/// Plans a run for one of several devices that do not fit together, see [`plan_single_device`].
fn plan_one_of_team(
    run: &RunRequest,
    model: &Model,
    devices: &mut Vec<DeviceSpec>,
    charges_alone: &[Bytes],
    host: Bytes,
) -> Result<Option<TeamPlan>, Failure> {
    plan_single_device(devices, charges_alone, |devices| {
        let constraint = Some(TeamConstraint::Parallelism(Parallelism::Data));
        let outcome = plan_assignments(run, model, devices, host, None, constraint, None)?;
        let [assignment] = &outcome.assignments[..] else { return Ok(None) };
        let device = assignment.device.name.clone();
        let program_bytes = program_heap_bytes([&assignment.outcome.set]);
        let (fits, step_seconds) = (outcome.plan.fits, outcome.plan.predicted.step_seconds);
        Ok(fits.then_some(SingleDevicePlan { outcome, device, step_seconds, program_bytes }))
    })
}

/// Plans a run for a team of `devices`. The previous plan is used again if it is a plan for these devices and still fits. `constraint`
/// restricts the kind of parallelism; without it `run.parallelism` does. `evaluations` may be assigned to a device outside the
/// team.
///
/// # Errors
/// Pinned choices that do not match the model.
pub(crate) fn plan_assignments(
    run: &RunRequest,
    model: &Model,
    devices: &[DeviceSpec],
    host: Bytes,
    previous: Option<&PreviousPlan>,
    constraint: Option<TeamConstraint>,
    evaluations: Option<EvaluationSchedule>,
) -> Result<TeamPlan, Failure> {
    let request = team_request_beside(run, model, devices, host)?;
    let constraint = constraint.or(request.constraint.clone());
    let request = TeamRequest { constraint, evaluations, ..request };
    let team = previous.filter(|previous| is_team_of_run(previous, devices, run, model)).map(|previous| &previous.team);
    let again = team.map(|workers| plan_fixed_team(&request, workers)).filter(|outcome| outcome.plan.fits);
    let outcome = again.unwrap_or_else(|| team::plan_team(&request));
    Ok(assign_devices(devices, host, previous, outcome))
}

/// Plans a run that is active, while its arenas are allocated, for a team of `devices`. Returns `None` if no plan fits. Frees
/// the memory that planning took.
///
/// # Errors
/// Pinned choices that do not match the model.
pub(crate) fn plan_assignments_if_fit(
    run: &RunRequest,
    model: &Model,
    devices: &[DeviceSpec],
    host: Bytes,
    constraint: Option<TeamConstraint>,
) -> Result<Option<TeamPlan>, Failure> {
    let request = team_request_beside(run, model, devices, host)?;
    let constraint = constraint.or(request.constraint.clone());
    let outcome = plan_team_if_fits(&TeamRequest { constraint, ..request });
    let planned = outcome.map(|outcome| assign_devices(devices, host, None, outcome));
    process::trim_heap();
    Ok(planned)
}

/// Combines the plan of a team with its devices.
fn assign_devices(
    devices: &[DeviceSpec],
    host: Bytes,
    previous: Option<&PreviousPlan>,
    outcome: TeamOutcome,
) -> TeamPlan {
    let TeamOutcome { workers, plan, evaluator } = outcome;
    let assign = |worker: team::PlannedWorker| {
        let device = devices[worker.device].clone();
        let before = previous.and_then(|previous| previous.team.iter().find(|before| before.device == device.name));
        let algorithms = before.and_then(|worker| worker.algorithms.clone());
        WorkerAssignment {
            device,
            share: worker.share,
            sequences: worker.sequences,
            outcome: worker.outcome,
            algorithms,
        }
    };
    TeamPlan { assignments: workers.into_iter().map(assign).collect(), plan, evaluator: evaluator.map(assign), host }
}

/// Returns the request for a team with a host load line that was determined before. What is free on the host now is what this
/// run leaves, so it does not count.
fn team_request_beside<'a>(
    run: &RunRequest,
    model: &'a Model,
    devices: &'a [DeviceSpec],
    host: Bytes,
) -> Result<TeamRequest<'a>, Failure> {
    let mut team = TeamRequest { host, ..team_request(run, model, devices)? };
    let offloading = team.devices.iter_mut().filter(|request| request.host.budget > Bytes::ZERO);
    offloading.for_each(|request| request.host.budget = host);
    Ok(team)
}

/// Returns the `[lora]` section of adapters that are trained further: it cannot change.
fn adapter_section(adapter: &AdapterDir) -> LoraSection {
    let targets = adapter.targets.iter().map(|target| target.name().to_owned()).collect();
    LoraSection { rank: adapter.rank as u32, alpha: adapter.alpha, dropout: 0.0, targets }
}

/// Returns whether a previous plan is a plan of a team of these devices, and complies with the run file.
fn is_team_of_run(previous: &PreviousPlan, devices: &[DeviceSpec], run: &RunRequest, model: &Model) -> bool {
    let PreviousPlan { team, parallelism, .. } = previous;
    let has_device = |worker: &WorkerPlan| devices.iter().any(|device| device.name == worker.device);
    !team.is_empty()
        && run.run.parallelism.pinned().is_none_or(|pinned| *parallelism == Some(pinned))
        && team.iter().all(has_device)
        && team.iter().all(|worker| is_recipe_of_run(&worker.recipe, worker.layers, run, model))
}

/// Returns whether a recipe complies with the run file, which may have been changed since the recipe was made. `layers` are
/// those of a pipeline stage. A storage-only worker has a micro-batch of zero.
fn is_recipe_of_run(recipe: &Recipe, layers: Option<[u64; 2]>, run: &RunRequest, model: &Model) -> bool {
    let [first, end] = layers.unwrap_or([0, model.config.layers]);
    let all = &run.recipe.recompute;
    let pinned = all.get(first as usize..end as usize).unwrap_or(all);
    let as_pinned = |level| pinned.is_empty() || pinned.len() == 1 && pinned[0] == level;
    u64::from(recipe.micro_batch) <= run.batch_sequences()
        && recipe.recompute.len() as u64 == end.saturating_sub(first)
        && run.recipe.micro_batch.is_none_or(|pin| pin == recipe.micro_batch || recipe.micro_batch == 0)
        && run.train.rungs.as_ref().is_none_or(|rungs| *rungs == recipe.rungs)
        && (pinned == recipe.recompute || recipe.recompute.iter().all(|&level| as_pinned(level)))
}

/// Opens the rows of some data files, tokenizing them if they are not cached.
///
/// # Errors
/// Invalid files or an invalid tokenizer.
pub fn open_dataset(run: &RunRequest, model: &Model, patterns: &[String], threads: usize) -> Result<Dataset, Failure> {
    let end_token = model.folder().map(data::read_end_token).transpose()?.flatten();
    let spec = DataSpec {
        patterns: patterns.to_vec(),
        format: run.data.format,
        sequence: u64::from(run.data.sequence),
        pack: run.data.pack,
        long: run.data.long,
        vocab: model.config.vocab,
        end_token,
    };
    let never_stop = &mut |_, _| ControlFlow::Continue(());
    Ok(Dataset::open(&spec, model.tokenizer().as_deref(), &token_cache_folder(), threads, never_stop)?)
}

/// Returns the folder of cached tokens: `PLIMSOLL_TOKENS` if it is set, else a folder next to the calibration, else one in the
/// system's temporary folder.
pub fn token_cache_folder() -> PathBuf {
    if let Some(named) = std::env::var_os("PLIMSOLL_TOKENS").filter(|path| !path.is_empty()) {
        return PathBuf::from(named);
    }
    calibration::folder().unwrap_or_else(|| std::env::temp_dir().join("plimsoll")).join("tokens")
}
