//! The planner of one run: every plan that a run needs, before it starts and while it is active.
//!
//! A [`Planner`] states the run, its model, the source of the charges, the load line of the host and the previous plan.
//! Each method names its product. [`Planner::settle`] is the only place where charges and plan are brought into
//! agreement.

use super::charges::{
    ProgramCharges, ProgramCharging, add_team_charges, adopt_previous_charges, near_fit_charges, planned_workers,
};
use super::previous_plan::PreviousPlan;
use super::request::{evaluation_schedule, plan_request, share_request, team_request};
use super::team_plan::{TeamPlan, WorkerAssignment};
use crate::engine::open::measure_gpu_charges;
use crate::resolve::charges::set_process_charges;
use crate::resolve::{Model, RunRequest, Workload};
use plimsoll_core::{Bytes, Class, DeviceSpec, Failure, Parallelism, Plan, Recipe, Remedy};
use plimsoll_device::process;
use plimsoll_plan::search::{PlanOutcome, PlanRequest, plan_recipe, search, search_if_fits, search_measured};
use plimsoll_plan::team::{
    EvaluationSchedule, Measurements, PlannedWorker, TeamConstraint, TeamOutcome, TeamRequest, add_device_remedies,
    evaluation_request, keep_micro_batch, plan_fixed_team, plan_measured_team, plan_measured_team_if_fits,
    plan_team_if_fits,
};
use plimsoll_program::Share;
use std::collections::HashSet;
use std::slice;

/// Smallest ratio of a remedy's load line to the charges that it may not need. With a larger ratio they stay in the load
/// line, because they are less than 0.5 % of it.
const MIN_SPARE_DIVISOR: u64 = 200;

/// Source of the charges that a plan is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charges {
    /// The charges (bytes outside the arena) that the device specifications hold: assumed before a run starts, measured
    /// while it is active. Planning opens no device.
    Stated,
    /// Charges that are measured during planning, in a process with model and data open. Planning opens a GPU once if
    /// this machine has not measured its charges before.
    Measured,
}

/// The planner of one run: the inputs that all of its plans share. It is cheap to copy and holds no results.
#[derive(Clone, Copy)]
pub(crate) struct Planner<'a> {
    /// The run file with its overrides.
    pub(super) run: &'a RunRequest,
    /// The model of the run.
    pub(super) model: &'a Model,
    /// Source of the charges.
    pub(super) charges: Charges,
    /// Load line of the host memory that several devices share. With `None`, each plan derives it from the memory that
    /// is free now.
    pub(super) host: Option<Bytes>,
    /// Plan to use again if it still fits; `None` to plan from scratch.
    pub(super) previous: Option<&'a PreviousPlan>,
}

/// The work of one worker of an active run, to be planned anew.
#[derive(Clone, Copy)]
pub(crate) struct ActiveShare<'a> {
    /// The device with its present load line. Its charges exclude the part that its Programs cause.
    pub device: &'a DeviceSpec,
    /// Part of the weights, optimizer state and layers that the worker holds.
    pub share: &'a Share,
    /// Number of sequences of each step that the worker computes.
    pub sequences: u64,
    /// Present plan of the worker.
    pub plan: &'a Plan,
}

/// The recipes that may replace the present one of a worker.
#[derive(Clone, Copy)]
pub(crate) enum RecipeChoice<'a> {
    /// The fastest recipe that fits. In a sharded or pipeline team, it has the present micro-batch.
    Fastest,
    /// The fastest recipe that fits among those with this micro-batch, a number of sequences.
    MicroBatch(u32),
    /// This recipe only, even if it does not fit.
    Only(&'a Recipe),
}

impl<'a> Planner<'a> {
    /// Creates a planner without a host load line and without a previous plan.
    pub fn new(run: &'a RunRequest, model: &'a Model, charges: Charges) -> Planner<'a> {
        Planner { run, model, charges, host: None, previous: None }
    }

    /// Returns the planner with this load line for the host memory that several devices share.
    pub fn with_host(self, host: Bytes) -> Planner<'a> {
        Planner { host: Some(host), ..self }
    }

    /// Returns the planner with this plan to use again if it still fits; `None` plans from scratch.
    pub fn with_previous(self, previous: Option<&'a PreviousPlan>) -> Planner<'a> {
        Planner { previous, ..self }
    }

    /// Plans the training run on one or several devices. Stores the charges of the plan in `devices`. `evaluation_rows`
    /// is the number of rows of the evaluation data; `None` if the data are absent or not read yet. The result may not
    /// fit.
    ///
    /// Work in a team adds charges. If the run file allows one device, each CPU or virtual device of this process that
    /// has lower charges alone is therefore planned alone if no plan for all fits, and the best of these plans is
    /// taken.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model. It asks for a scratch file with several devices. A GPU
    /// cannot be opened.
    pub fn plan_run(&self, devices: &mut [DeviceSpec], evaluation_rows: Option<u64>) -> Result<TeamOutcome, Failure> {
        self.plan_measured_run(devices, evaluation_rows, &Measurements::default())
    }

    /// Plans the training run like [`Planner::plan_run`], and leaves its measurements in `measurements`.
    ///
    /// # Errors
    /// Those of [`Planner::plan_run`].
    pub fn plan_measured_run(
        &self,
        devices: &mut [DeviceSpec],
        evaluation_rows: Option<u64>,
        measurements: &Measurements,
    ) -> Result<TeamOutcome, Failure> {
        match devices {
            [device] => self.plan_alone(device, Workload::Train, measurements),
            _ => self.plan_together(devices, evaluation_rows, measurements),
        }
    }

    /// Plans the training run on one or several devices with the charges that they state, like [`Planner::plan_run`].
    /// Stores the charges of the plan in `devices`. Returns `None` if nothing fits on them together or on one of them
    /// alone. No remedies are searched for, which makes a refusal many times as fast as that of [`Planner::plan_run`].
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model, or a scratch file for several devices.
    pub fn plan_run_if_fits(&self, devices: &mut [DeviceSpec]) -> Result<Option<TeamOutcome>, Failure> {
        let evaluations = evaluation_schedule(self.run, None);
        let measurements = Measurements::default();
        if devices.len() == 1 {
            return self.settle_if_fits(devices, ProgramCharging::All, evaluations, &measurements);
        }
        let charges_alone: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
        add_team_charges(devices, self.run);
        self.settle_together_or_alone(devices, &charges_alone, evaluations, &measurements)
    }

    /// Plans the run on several devices together or, if that does not fit, on one of them; `None` if nothing fits.
    /// `charges_alone` holds the charges of each device without a team. Stores the charges of the plan in `devices`.
    fn settle_together_or_alone(
        &self,
        devices: &mut [DeviceSpec],
        charges_alone: &[Bytes],
        evaluations: Option<EvaluationSchedule>,
        measurements: &Measurements,
    ) -> Result<Option<TeamOutcome>, Failure> {
        let mut alone = devices.to_vec();
        let outcome = self.settle_if_fits(devices, ProgramCharging::All, evaluations, measurements)?;
        // Further plans would take memory of this process under its load lines.
        if outcome.is_some() {
            return Ok(outcome);
        }
        let found = self.best_alone(&mut alone, charges_alone, measurements)?;
        if found.is_some() {
            devices.clone_from_slice(&alone);
        }
        Ok(found)
    }

    /// Plans until charges and plan agree, like [`Planner::settle`], without a previous plan. Returns `None` if nothing
    /// fits, without a search for remedies.
    fn settle_if_fits(
        &self,
        devices: &mut [DeviceSpec],
        charging: ProgramCharging,
        evaluations: Option<EvaluationSchedule>,
        measurements: &Measurements,
    ) -> Result<Option<TeamOutcome>, Failure> {
        let mut programs = ProgramCharges::new(devices, charging);
        loop {
            let Some(outcome) = self.outcome_if_fits(devices, charging, evaluations, measurements)? else {
                return Ok(None);
            };
            let has_measured = self.measure_gpus(devices, &outcome)?;
            let has_raised = programs.raise(devices, &outcome);
            if !has_measured && !has_raised {
                return Ok(Some(outcome));
            }
        }
    }

    /// Plans `work` on one device. Stores the charges of the plan in `device`. The result may not fit.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model, or a GPU cannot be opened.
    pub fn plan_work(&self, device: &mut DeviceSpec, work: Workload) -> Result<PlanOutcome, Failure> {
        self.plan_alone(device, work, &Measurements::default()).map(first_outcome)
    }

    /// Plans the run for a team of `devices` with the charges that they have. `constraint` restricts the parallelism;
    /// `None` leaves that to `run.parallelism`. `evaluations` states how often the run evaluates: the plan may assign
    /// this work to a device outside the team. With `None`, no device outside the team evaluates. The result may not
    /// fit.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model, or a scratch file for several devices.
    pub fn plan_team(
        &self,
        devices: &[DeviceSpec],
        constraint: Option<TeamConstraint>,
        evaluations: Option<EvaluationSchedule>,
    ) -> Result<TeamPlan, Failure> {
        let outcome = self.team_outcome(devices, constraint, evaluations, &Measurements::default())?;
        Ok(self.assign(devices, outcome))
    }

    /// Plans an active run for a team of `devices` with the charges that they have. `constraint` restricts the
    /// parallelism; `None` leaves that to `run.parallelism`. Returns `None` if no plan fits. Frees the memory that
    /// planning took.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model, or a scratch file for several devices.
    pub fn plan_team_if_fits(
        &self,
        devices: &[DeviceSpec],
        constraint: Option<TeamConstraint>,
    ) -> Result<Option<TeamPlan>, Failure> {
        let outcome = plan_team_if_fits(&self.team_request(devices, constraint)?);
        let planned = outcome.map(|outcome| self.assign(devices, outcome));
        process::trim_heap();
        Ok(planned)
    }

    /// Plans the share of an active worker anew. The plan counts on charges that cover its Programs. The result may not
    /// fit.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model.
    pub fn replan_share(&self, worker: &ActiveShare, choice: RecipeChoice) -> Result<PlanOutcome, Failure> {
        let mut device = worker.device.clone();
        let plan = |planner: &Planner, devices: &[DeviceSpec]| {
            let outcome = plan_choice(planner.active_share_request(&devices[0], worker)?, choice);
            Ok(team_of_one(outcome, worker.share.clone(), worker.sequences))
        };
        self.settle(slice::from_mut(&mut device), ProgramCharging::All, plan).map(first_outcome)
    }

    /// Plans an assignment again after its device turned out to hold more bytes outside the arena than planned. The
    /// caller has stored these bytes as the charges of the device. The recipe stays if it fits. Otherwise a worker gets
    /// the fastest recipe; in a sharded or pipeline team, the fastest with the same micro-batch. With `evaluates` the
    /// device is an evaluator, which always keeps its recipe. The result may not fit.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model.
    pub fn replan_assignment(&self, assignment: &WorkerAssignment, evaluates: bool) -> Result<PlanOutcome, Failure> {
        let request = assignment.plan_request(self.run, self.model)?;
        let recipe = &assignment.outcome.plan.recipe;
        if evaluates {
            return Ok(plan_recipe(&evaluation_request(&request), recipe));
        }
        let kept = plan_recipe(&request, recipe);
        if kept.plan.fits {
            return Ok(kept);
        }
        // The other workers keep their number of micro-batches.
        Ok(search(&keep_micro_batch(request, recipe)))
    }

    /// Returns how the results change if an active worker switches from recipe `before` to `after`: the class
    /// identical, reordered or lossy.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model.
    pub fn class_of_change(&self, worker: &ActiveShare, before: &Recipe, after: &Recipe) -> Result<Class, Failure> {
        Ok(self.active_share_request(worker.device, worker)?.class_of_change(before, after))
    }

    /// Combines the plan of a team with its `devices` into one assignment per worker.
    pub fn assign(&self, devices: &[DeviceSpec], outcome: TeamOutcome) -> TeamPlan {
        TeamPlan::new(devices, outcome, self.host, self.previous, self.run.is_deterministic())
    }

    /// Returns the request to plan for a team of `devices`. If the planner has a host load line, the request uses it
    /// instead of the host memory that is free now. An active run already holds a part of that memory. `constraint`
    /// takes precedence over that of the run file.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model, or a scratch file for several devices.
    pub(super) fn team_request<'d>(
        &self,
        devices: &'d [DeviceSpec],
        constraint: Option<TeamConstraint>,
    ) -> Result<TeamRequest<'d>, Failure>
    where
        'a: 'd,
    {
        let mut request = team_request(self.run, self.model, devices)?;
        request.constraint = constraint.or(request.constraint);
        let Some(host) = self.host else { return Ok(request) };
        request.host = host;
        let offloading = request.devices.iter_mut().filter(|request| request.host.budget > Bytes::ZERO);
        offloading.for_each(|request| request.host.budget = host);
        Ok(request)
    }

    /// Plans `work` on one device. Stores the charges of the plan in `device`. The result may not fit.
    ///
    /// With measured charges, a training run on a CPU or virtual device that does not fit is tried once more with
    /// slightly lower charges. An earlier refusal may have named the budget as sufficient, and charges differ slightly
    /// between two starts.
    fn plan_alone(
        &self,
        device: &mut DeviceSpec,
        work: Workload,
        measurements: &Measurements,
    ) -> Result<TeamOutcome, Failure> {
        let devices = slice::from_mut(device);
        self.measure_process(devices);
        let measured = devices[0].charges;
        let tries_near_fit = self.charges == Charges::Measured && work == Workload::Train && devices[0].in_process();
        // It is measured here, before planning takes memory.
        let near_fit = tries_near_fit.then(|| near_fit_charges(self.run)).filter(|charges| *charges < measured);
        let charging = match work {
            Workload::Train => adopt_previous_charges(devices, self.previous),
            // The Programs of an evaluation or a generation are few.
            Workload::Evaluate | Workload::Generate(_) => ProgramCharging::Covered,
        };
        let plan = |planner: &Planner, devices: &[DeviceSpec]| planner.outcome_alone(&devices[0], work, measurements);
        let outcome = self.settle(devices, charging, plan)?;
        let Some(near_fit) = near_fit.filter(|_| !outcome.plan.fits && charging == ProgramCharging::All) else {
            return Ok(outcome);
        };
        let refused_charges = std::mem::replace(&mut devices[0].charges, near_fit);
        let near_outcome = self.settle(devices, charging, plan)?;
        if near_outcome.plan.fits {
            return Ok(near_outcome);
        }
        devices[0].charges = refused_charges;
        Ok(outcome)
    }

    /// Plans the run on several devices together, or on one of them, as [`Planner::plan_run`] documents. Stores the
    /// charges of the plan in `devices`. `evaluation_rows` is the number of rows of the evaluation data; `None` if the
    /// data are absent or not read yet. The result may not fit.
    fn plan_together(
        &self,
        devices: &mut [DeviceSpec],
        evaluation_rows: Option<u64>,
        measurements: &Measurements,
    ) -> Result<TeamOutcome, Failure> {
        self.measure_process(devices);
        let charges_alone: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
        add_team_charges(devices, self.run);
        let charging = adopt_previous_charges(devices, self.previous);
        let evaluations = evaluation_schedule(self.run, evaluation_rows);
        // Devices that would take part are charged as a team, also if the plan has one device.
        let mut as_team = devices.to_vec();
        // A resumed run keeps its team. All others are refused only if nothing fits, because remedies take long to find.
        let fresh = match self.previous {
            Some(_) => None,
            None => self.settle_together_or_alone(devices, &charges_alone, evaluations, measurements)?,
        };
        let mut outcome = match fresh {
            Some(outcome) => {
                let is_team = outcome.workers.len() > 1;
                as_team = if is_team { devices.to_vec() } else { as_team };
                outcome
            }
            None => {
                devices.clone_from_slice(&as_team);
                let team = |planner: &Planner, devices: &[DeviceSpec]| {
                    planner.team_outcome(devices, None, evaluations, measurements)
                };
                let kept = self.settle(devices, charging, team)?;
                as_team = devices.to_vec();
                let refused = self.previous.is_some() && !kept.plan.fits;
                let alone = if refused { self.best_alone(devices, &charges_alone, measurements)? } else { None };
                alone.unwrap_or(kept)
            }
        };
        if self.previous.is_none() {
            let team = self.team_request(&as_team, None)?;
            add_device_remedies(&team, &self.run.devices(), &mut outcome.plan, measurements);
        }
        Ok(outcome)
    }

    /// Plans the run for each device alone, and returns the best plan; `None` if the run fits on no device alone. Call it
    /// if no plan for all devices fits: work in a team adds charges, without which one device may suffice.
    ///
    /// `charges_alone` holds the charges of each device without a team. Only CPU and virtual devices in this process
    /// are tried, if these charges are lower than the present ones and the run file allows one device. On success,
    /// stores the charges of the plan in `devices`.
    fn best_alone(
        &self,
        devices: &mut [DeviceSpec],
        charges_alone: &[Bytes],
        measurements: &Measurements,
    ) -> Result<Option<TeamOutcome>, Failure> {
        let mut best: Option<(TeamOutcome, Vec<DeviceSpec>)> = None;
        for number in 0..devices.len() {
            let can_gain = devices[number].in_process() && charges_alone[number] < devices[number].charges;
            if !can_gain || !self.run.run.parallelism.allows_single_device() {
                continue;
            }
            let mut candidates = devices.to_vec();
            candidates[number].charges = charges_alone[number];
            let charging = ProgramCharging::Alone(number);
            let Some(outcome) = self.settle_if_fits(&mut candidates, charging, None, measurements)? else { continue };
            let is_best = best.as_ref().is_none_or(|(other, _)| is_better(&outcome.plan, &other.plan));
            if charging.applies_to(&outcome) && is_best {
                best = Some((outcome, candidates));
            }
        }
        let Some((outcome, candidates)) = best else { return Ok(None) };
        devices.clone_from_slice(&candidates);
        Ok(Some(outcome))
    }

    /// Plans until charges and plan agree: the GPUs of the plan are measured, and the charges cover its Programs.
    /// `plan` makes one plan with the charges that the devices have. Stores the charges of the result in `devices`.
    ///
    /// The result is a fixed point. Higher charges leave less for the arena, and a smaller arena may need Programs with
    /// more ops. The charges of a refused plan cover the Programs of any remedy; load lines in the remedies are then
    /// lowered as far as their own Programs allow.
    fn settle(
        &self,
        devices: &mut [DeviceSpec],
        charging: ProgramCharging,
        plan: impl Fn(&Planner, &[DeviceSpec]) -> Result<TeamOutcome, Failure>,
    ) -> Result<TeamOutcome, Failure> {
        let unsettled = devices.to_vec();
        let (mut outcome, programs) = self.settle_once(devices, charging, &plan)?;
        if !outcome.plan.fits {
            let spare = programs.spare(&outcome);
            for number in 0..outcome.plan.needs.len() {
                let need = &outcome.plan.needs[number];
                if spare.0 * MIN_SPARE_DIVISOR <= need.budget_bytes.0 {
                    continue;
                }
                let lowered = need.with_lower_load_lines(spare);
                if self.is_enough(&lowered, &outcome.plan, &unsettled, charging, &plan)? {
                    outcome.plan.needs[number] = lowered;
                }
            }
            let charged = outcome.plan.devices.iter_mut().filter(|device| programs.is_charged(&device.name));
            for device in charged.filter(|device| device.peak_bytes.saturating_sub(spare) > device.budget_bytes) {
                device.charges_bytes = device.charges_bytes.saturating_sub(spare);
                device.peak_bytes = device.peak_bytes.saturating_sub(spare);
            }
        }
        Ok(outcome)
    }

    /// Plans until charges and plan agree, like [`Planner::settle`], and keeps the remedies as they are. Also returns the
    /// charges for the Programs.
    fn settle_once(
        &self,
        devices: &mut [DeviceSpec],
        charging: ProgramCharging,
        plan: &impl Fn(&Planner, &[DeviceSpec]) -> Result<TeamOutcome, Failure>,
    ) -> Result<(TeamOutcome, ProgramCharges), Failure> {
        let mut programs = ProgramCharges::new(devices, charging);
        loop {
            let outcome = plan(self, devices)?;
            let has_measured = self.measure_gpus(devices, &outcome)?;
            let has_raised = programs.raise(devices, &outcome);
            if !has_measured && !has_raised {
                return Ok((outcome, programs));
            }
        }
    }

    /// Returns whether a remedy of the `refused` plan is enough, by planning with it. `devices` have the charges from
    /// which that plan started. Remedies with more host memory or a scratch file are not tried, nor those for devices
    /// that share a name.
    fn is_enough(
        &self,
        remedy: &Remedy,
        refused: &Plan,
        devices: &[DeviceSpec],
        charging: ProgramCharging,
        plan: &impl Fn(&Planner, &[DeviceSpec]) -> Result<TeamOutcome, Failure>,
    ) -> Result<bool, Failure> {
        let names: HashSet<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        if remedy.host_bytes.is_some() || remedy.file_bytes.is_some() || names.len() < devices.len() {
            return Ok(false);
        }
        let mut run = self.run.clone();
        run.config.memory.allow.extend(&remedy.allow);
        let mut devices = devices.to_vec();
        for device in &mut devices {
            let is_first = refused.devices.first().is_some_and(|first| first.name == device.name);
            let line = remedy.other_budget_bytes.get(&device.name).copied();
            device.budget = line.or(is_first.then_some(remedy.budget_bytes)).unwrap_or(device.budget);
        }
        let planner = Planner { run: &run, ..*self };
        Ok(planner.settle_once(&mut devices, charging, plan)?.0.plan.fits)
    }

    /// Charges each CPU or virtual device in this process with the bytes of the whole process outside the arena. Does
    /// nothing if the planner takes charges as the device specifications state them.
    fn measure_process(&self, devices: &mut [DeviceSpec]) {
        if self.charges == Charges::Measured {
            let (sequences, sequence) = (self.run.buffered_sequences(), u64::from(self.run.data.sequence));
            devices.iter_mut().for_each(|device| set_process_charges(device, sequences, sequence));
        }
    }

    /// Measures the charges of the GPUs that a plan uses, unless they are measured already. Does nothing if the planner
    /// takes charges as the device specifications state them. Returns whether it measured any.
    fn measure_gpus(&self, devices: &mut [DeviceSpec], outcome: &TeamOutcome) -> Result<bool, Failure> {
        let mut has_measured = false;
        if self.charges == Charges::Measured {
            for worker in planned_workers(outcome) {
                let device = &mut devices[worker.device];
                has_measured |= measure_gpu_charges(device, &worker.outcome, self.run.scratch_folder())?;
            }
        }
        Ok(has_measured)
    }

    /// Plans `work` on one device with the charges that it has. Uses the recipe of the previous plan again if it
    /// complies with the run file and still fits.
    fn outcome_alone(
        &self,
        device: &DeviceSpec,
        work: Workload,
        measurements: &Measurements,
    ) -> Result<TeamOutcome, Failure> {
        let request = plan_request(self.run, self.model, device, work)?;
        let recipe = self.previous.and_then(|previous| previous.recipe_for(self.run, self.model));
        let again = recipe.map(|recipe| plan_recipe(&request, recipe)).filter(|outcome| outcome.plan.fits);
        let outcome = again.unwrap_or_else(|| search_measured(&request, &measurements.recipes));
        Ok(team_of_one(outcome, Share::SINGLE_DEVICE, self.run.batch_sequences()))
    }

    /// Plans the training run on one or several devices with the charges that they have. With
    /// [`ProgramCharging::Alone`], one of several devices does all work. Returns `None` if nothing fits.
    fn outcome_if_fits(
        &self,
        devices: &[DeviceSpec],
        charging: ProgramCharging,
        evaluations: Option<EvaluationSchedule>,
        measurements: &Measurements,
    ) -> Result<Option<TeamOutcome>, Failure> {
        let [device] = devices else {
            let alone = matches!(charging, ProgramCharging::Alone(_));
            let constraint = alone.then_some(TeamConstraint::Parallelism(Parallelism::Data));
            let request = TeamRequest { evaluations, ..self.team_request(devices, constraint)? };
            return Ok(plan_measured_team_if_fits(&request, measurements));
        };
        let request = plan_request(self.run, self.model, device, Workload::Train)?;
        let alone = |outcome| team_of_one(outcome, Share::SINGLE_DEVICE, self.run.batch_sequences());
        Ok(search_if_fits(&request, &measurements.recipes).map(alone))
    }

    /// Plans the run for a team of `devices`, with the parameters of [`Planner::plan_team`]. Uses the previous plan
    /// again if it needs no other devices, complies with the run file, and still fits.
    fn team_outcome(
        &self,
        devices: &[DeviceSpec],
        constraint: Option<TeamConstraint>,
        evaluations: Option<EvaluationSchedule>,
        measurements: &Measurements,
    ) -> Result<TeamOutcome, Failure> {
        let request = TeamRequest { evaluations, ..self.team_request(devices, constraint)? };
        let workers = self.previous.and_then(|previous| previous.team_for(devices, self.run, self.model));
        let again = workers.map(|workers| plan_fixed_team(&request, workers)).filter(|outcome| outcome.plan.fits);
        Ok(again.unwrap_or_else(|| plan_measured_team(&request, measurements)))
    }

    /// Returns the request to plan the share of an active worker on `device`, under the planner's host load line. In a
    /// sharded or pipeline team, the request keeps the worker's micro-batch.
    fn active_share_request<'d>(&self, device: &'d DeviceSpec, worker: &ActiveShare) -> Result<PlanRequest<'d>, Failure>
    where
        'a: 'd,
    {
        let request = share_request(self.run, self.model, device, worker.share, worker.sequences)?;
        let mut request = keep_micro_batch(request, &worker.plan.recipe);
        // The host memory of the request is what this run may use, not what is free now.
        request.host.budget = self.host.unwrap_or(request.host.budget);
        // The space of the scratch file is not free on the disk, but belongs to this run.
        let file = worker.plan.file.as_ref().map_or(Bytes::ZERO, |file| file.budget_bytes);
        request.host.file.budget = request.host.file.budget.max(file);
        Ok(request)
    }
}

/// Returns whether a plan takes only some of the lossy rungs of `other`, or the same ones and less time.
fn is_better(plan: &Plan, other: &Plan) -> bool {
    let takes_only_some = plan.rungs.iter().all(|rung| other.rungs.contains(rung));
    let is_faster = plan.predicted.step_seconds < other.predicted.step_seconds;
    takes_only_some && (is_faster || plan.rungs.len() < other.rungs.len())
}

/// Plans a request with a recipe that `choice` allows.
fn plan_choice(mut request: PlanRequest, choice: RecipeChoice) -> PlanOutcome {
    match choice {
        RecipeChoice::Fastest => search(&request),
        RecipeChoice::MicroBatch(sequences) => {
            request.pins.micro_batch = Some(sequences);
            search(&request)
        }
        RecipeChoice::Only(recipe) => plan_recipe(&request, recipe),
    }
}

/// Returns the plan of one device as the plan of a team with this device as its only worker.
pub(super) fn team_of_one(outcome: PlanOutcome, share: Share, sequences: u64) -> TeamOutcome {
    let plan = outcome.plan.clone();
    TeamOutcome { workers: vec![PlannedWorker { device: 0, share, sequences, outcome }], plan, evaluator: None }
}

/// Returns the outcome of a team's first worker, with its own plan replaced by the plan of the whole team.
pub(super) fn first_outcome(team: TeamOutcome) -> PlanOutcome {
    let first = team.workers.into_iter().next().expect("a team has at least one device");
    PlanOutcome { plan: team.plan, ..first.outcome }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::charges::program_charges;
    use crate::planning::testing::device;
    use crate::resolve::tests::run_request;
    use plimsoll_core::DeviceKind;

    #[test]
    fn charges_agree_with_the_programs_of_the_plan() {
        let run = run_request(&["model.preset=smollm2-135m"]);
        let model = Model::open(&run).unwrap();
        let planner = Planner::new(&run, &model, Charges::Stated);
        for base in [Bytes::mib(20), Bytes::mib(600)] {
            let mut processor = DeviceSpec { charges: base, ..device("cpu", DeviceKind::Cpu) };
            let team = planner.plan_run(slice::from_mut(&mut processor), None).unwrap();
            let plan = &team.plan.devices[0];
            assert!(team.plan.fits);
            assert_eq!(plan.charges_bytes, processor.charges);
            let programs = program_charges(&processor, &team.workers[0].outcome.set);
            assert!(processor.charges >= base + programs, "{} for {programs}", processor.charges);
        }
    }

    #[test]
    fn measured_and_stated_charges_give_same_plan() {
        let run = run_request(&["model.preset=smollm2-135m"]);
        let model = Model::open(&run).unwrap();
        let mut measured = device("cpu", DeviceKind::Cpu);
        let planner = Planner::new(&run, &model, Charges::Measured);
        let team = planner.plan_run(slice::from_mut(&mut measured), None).unwrap();
        assert!(measured.charges_measured && team.plan.fits);
        // Plan again with the charges of the process, as `plimsoll plan` does.
        let programs = program_charges(&measured, &team.workers[0].outcome.set);
        let mut stated = DeviceSpec { charges: measured.charges.saturating_sub(programs), ..measured.clone() };
        let planner = Planner::new(&run, &model, Charges::Stated);
        let again = planner.plan_run(slice::from_mut(&mut stated), None).unwrap();
        assert_eq!((again.plan, stated), (team.plan, measured));
    }

    #[test]
    fn previous_plan_is_kept_while_it_fits() {
        let run = run_request(&["model.preset=smollm2-135m"]);
        let model = Model::open(&run).unwrap();
        let planner = Planner::new(&run, &model, Charges::Stated);
        let mut large = device("cpu", DeviceKind::Cpu);
        let fresh = planner.plan_run(slice::from_mut(&mut large.clone()), None).unwrap().plan;
        let mut small = DeviceSpec { budget: Bytes(fresh.devices[0].peak_bytes.0 - 1), ..large.clone() };
        let before = planner.plan_run(slice::from_mut(&mut small), None).unwrap().plan;
        assert!(before.fits && fresh.recipe != before.recipe, "{} and {}", before.recipe, fresh.recipe);
        let previous = PreviousPlan::from_plan(&before);
        let resumed =
            planner.with_previous(previous.as_ref()).plan_run(slice::from_mut(&mut large), None).unwrap().plan;
        assert_eq!(resumed.recipe, before.recipe);
    }

    #[test]
    fn lower_load_line_replans_a_share() {
        let run = run_request(&["model.preset=smollm2-135m"]);
        let model = Model::open(&run).unwrap();
        let planner = Planner::new(&run, &model, Charges::Stated).with_host(Bytes::ZERO);
        let mut processor = device("cpu", DeviceKind::Cpu);
        let base = processor.charges;
        let plan = planner.plan_run(slice::from_mut(&mut processor), None).unwrap().plan;
        let replan = |budget: Bytes, choice: RecipeChoice| {
            let lowered = DeviceSpec { budget, charges: base, ..processor.clone() };
            let (share, sequences) = (&Share::SINGLE_DEVICE, run.batch_sequences());
            let worker = ActiveShare { device: &lowered, share, sequences, plan: &plan };
            planner.replan_share(&worker, choice).unwrap().plan
        };
        let peak = plan.devices[0].peak_bytes;
        assert!(replan(peak, RecipeChoice::Only(&plan.recipe)).fits);
        let below = Bytes(peak.0 - 1);
        assert!(!replan(below, RecipeChoice::Only(&plan.recipe)).fits);
        let lower = replan(below, RecipeChoice::Fastest);
        assert!(lower.fits && lower.devices[0].peak_bytes < peak);
        let one = replan(below, RecipeChoice::MicroBatch(1));
        assert_eq!(one.recipe.micro_batch, 1);
    }
}
