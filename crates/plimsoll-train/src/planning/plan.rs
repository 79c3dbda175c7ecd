//! The plan of a run file, made without opening weights, data or devices; and the check that a stored plan belongs to a
//! run. A run that starts is planned by `prepare`, with measured charges.

use super::completions::{decide_slots, halve_slots};
use super::nominal::NominalPlan;
use super::plan_check::{PlannedWork, check_plan};
use super::planner::{Charges, Planner, first_outcome};
use super::request::plan_request;
use crate::config::{ParallelismChoice, RunConfig};
use crate::resolve::devices::{contention_note, shortfall_note};
use crate::resolve::{Model, Resolved, RunRequest, Workload};
use plimsoll_core::{DevicePlan, DeviceSpec, Failure, Plan, PlannedWorkload, SmallestRecipe, format_count};
use plimsoll_plan::search::{PlanOutcome, ladder, plan_smallest};
use plimsoll_plan::team::{Measurements, TeamOutcome, alternatives, fill_ladders};
use plimsoll_program::models::ModelConfig;
use std::sync::Arc;

/// Checks that a run can follow a stored plan. `name` is the plan's file name, for messages.
///
/// # Errors
/// The plan does not fit, was made for another workload or contradicts itself, or the model is invalid.
pub fn check_stored_plan(config: &RunConfig, plan: &Plan, name: &str) -> Result<(), Failure> {
    if !plan.fits {
        return Err(Failure::input(format!("{name}: this plan does not fit, so there is nothing to follow"))
            .hint("its `needs` say what would do: plan once more with one of them"));
    }
    let model = Model::without_adapter(config)?.config;
    let workload = planned_workload(config, &model);
    let refuse = |reason: String| {
        Err(Failure::input(format!("{name}: {reason}")).hint("plan this very run: plimsoll plan RUN.toml --json"))
    };
    if let Some(other) = plan.planned_for.filter(|other| *other != workload) {
        return refuse(format!("a plan of {other}; this run has {workload}"));
    }
    let work = PlannedWork { sequences: config.batch_sequences(), layers: model.layers };
    check_plan(plan, work).or_else(|fault| refuse(fault.to_string()))
}

/// Returns the workload of a run file: the numbers of model parameters, of tokens per row and of tokens per step.
fn planned_workload(config: &RunConfig, model: &ModelConfig) -> PlannedWorkload {
    let RunConfig { train, data, .. } = config;
    PlannedWorkload {
        parameters: model.parameters(),
        sequence: u64::from(data.sequence),
        batch_tokens: train.batch_tokens,
    }
}

/// A training run with its plan.
#[derive(Debug)]
pub struct PlannedRun {
    /// The model, the first of `devices`, and the devices that the plan does not use.
    pub resolved: Resolved,
    /// The devices that the plan uses, in the order of the run file.
    pub devices: Vec<DeviceSpec>,
    /// The plan of the team, with the Programs of the first device.
    pub outcome: PlanOutcome,
}

/// Plans a training run on the devices that the run file names. If the run does not fit on them, the processor may take
/// their place. If it does not fit there either, returns a plan that does not fit, with settings under which it would.
/// With `explain`, the plan also lists alternatives, and the memory ladder: for each step down, the memory that it
/// frees and the time that it costs.
///
/// # Errors
/// The errors of [`Resolved::new`], or the team must use all devices and cannot.
pub fn plan(run: &RunRequest, explain: bool) -> Result<PlannedRun, Failure> {
    let mut run = run.clone();
    loop {
        let planned = plan_with_slots(&mut run, explain)?;
        if planned.outcome.plan.fits || !halve_slots(&mut run) {
            return Ok(planned);
        }
    }
}

/// Plans a training run as [`plan`] does, with the number of completions that are sampled at once in `run`, or the most.
fn plan_with_slots(run: &mut RunRequest, explain: bool) -> Result<PlannedRun, Failure> {
    let mut resolved = Resolved::new(run, Model::open(run)?)?;
    decide_slots(run, &resolved.model.config, resolved.devices());
    let run = &*run;
    let model = Arc::clone(&resolved.model);
    let nominal = NominalPlan::choose(run, &model)?;
    let known = nominal.as_ref().map(|nominal| &nominal.known);
    let planner = Planner::new(run, &model, Charges::Stated).with_previous(known);
    let mut devices = vec![resolved.device.clone()];
    devices.append(&mut resolved.others);
    let measurements = Measurements::default();
    let mut team = planner.plan_measured_run(&mut devices, None, &measurements)?;
    nominal.iter().for_each(|nominal| nominal.explain_excluded(&mut team.plan));
    if explain && devices.len() > 1 {
        explain_team(&planner, &devices, &mut team, &measurements)?;
    }
    if run.run.parallelism == ParallelismChoice::All && team.plan.fits && team.workers.len() < devices.len() {
        return Err(cannot_use_all(run, devices.len()));
    }
    let (mut devices, unused) = split_by_use(devices, &team);
    resolved.others = unused;
    resolved.device = devices[0].clone();
    let mut outcome = first_outcome(team);
    let planner = planner.with_previous(None);
    if let Some(on_cpu) = planner.fall_back_to_cpu(&mut resolved, &outcome.plan, Workload::Train)? {
        outcome = on_cpu;
        devices = vec![resolved.device.clone()];
    }
    if explain && outcome.plan.team.is_empty() {
        let request = plan_request(run, &model, &resolved.device, Workload::Train)?;
        outcome.plan.ladder = ladder(&request, &outcome.plan.recipe).rungs;
    }
    if run.samples_completions() && outcome.plan.fits && devices.len() == 1 {
        outcome.plan.smallest = Some(smallest_recipe(run, &model, &resolved.device)?);
    }
    add_notes(&mut outcome.plan, &devices, run, &model);
    Ok(PlannedRun { resolved, devices, outcome })
}

/// Plans the recipe of the smallest peak for a run that samples completions.
///
/// # Errors
/// The run file fixes choices that do not match the model.
fn smallest_recipe(run: &RunRequest, model: &Arc<Model>, device: &DeviceSpec) -> Result<SmallestRecipe, Failure> {
    let mut run = run.clone();
    let slots = run.recipe.slots.map_or(1, u64::from);
    run.slots = Some(slots);
    let Plan { recipe, devices, predicted, .. } =
        plan_smallest(&plan_request(&run, model, device, Workload::Train)?).plan;
    let DevicePlan { peak_bytes, by_program, .. } = devices.into_iter().next().expect("a plan has a device");
    Ok(SmallestRecipe { recipe, slots, peak_bytes, by_program, step_seconds: predicted.step_seconds })
}

/// Plans a training run like [`plan`], but only on the devices that it names. Returns `None` if nothing fits on them
/// together or on one of them.
/// No remedies are searched for, so a refusal takes milliseconds instead of seconds. Ignores `run.deterministic`.
///
/// # Errors
/// The errors of [`Resolved::new`], or the run file fixes choices that do not match the model.
pub fn plan_if_fits(run: &RunRequest) -> Result<Option<Plan>, Failure> {
    let mut run = run.clone();
    let resolved = Resolved::new(&run, Model::open(&run)?)?;
    decide_slots(&mut run, &resolved.model.config, resolved.devices());
    loop {
        let mut devices: Vec<DeviceSpec> = resolved.devices().cloned().collect();
        let planner = Planner::new(&run, &resolved.model, Charges::Stated);
        if let Some(outcome) = planner.plan_run_if_fits(&mut devices)? {
            let mut plan = outcome.plan;
            add_notes(&mut plan, &devices, &run, &resolved.model);
            return Ok(Some(plan));
        }
        if !halve_slots(&mut run) {
            return Ok(None);
        }
    }
}

/// Adds other parallelisms and teams to the plan of a team as alternatives, and the memory ladder of each worker.
/// `measurements` has those of the plan.
fn explain_team(
    planner: &Planner,
    devices: &[DeviceSpec],
    team: &mut TeamOutcome,
    measurements: &Measurements,
) -> Result<(), Failure> {
    let request = planner.team_request(devices, None)?;
    team.plan.alternatives = alternatives(&request, &team.plan, measurements);
    fill_ladders(&request, team);
    Ok(())
}

/// Splits devices into the workers of a team and the unused devices. Both lists keep the order of the run file.
fn split_by_use(devices: Vec<DeviceSpec>, team: &TeamOutcome) -> (Vec<DeviceSpec>, Vec<DeviceSpec>) {
    let (mut used, mut unused) = (Vec::new(), Vec::new());
    for (number, device) in devices.into_iter().enumerate() {
        let is_used = team.workers.iter().any(|worker| worker.device == number);
        if is_used { used.push(device) } else { unused.push(device) }
    }
    (used, unused)
}

/// Adds to a plan: its workload; a note if earlier runs found that one of its `devices` has less memory or speed than
/// reported; and a note if other programs used the processor while its rates were measured.
pub(super) fn add_notes<'a>(
    plan: &mut Plan,
    devices: impl IntoIterator<Item = &'a DeviceSpec>,
    run: &RunConfig,
    model: &Model,
) {
    plan.shortfall_note = devices.into_iter().find_map(shortfall_note);
    plan.contention_note = contention_note();
    plan.planned_for = Some(planned_workload(run, &model.config));
}

/// Returns the error of a run that must use all of its devices, and has no plan that does. `devices` is their number.
fn cannot_use_all(run: &RunRequest, devices: usize) -> Failure {
    let sequences = format_count(run.batch_sequences(), "sequence");
    let message = format!(
        "run.parallelism = \"all\": a step has {sequences}, and no way was found to share them, or the model, among all \
         {devices} devices"
    );
    Failure::input(message).hint("take a larger train.batch_tokens, fewer devices, or run.parallelism = \"auto\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::run_request;
    use plimsoll_core::{Bytes, Parallelism, RecomputeLevel};

    #[test]
    fn preset_is_planned_on_paper_device() {
        let run = run_request(&["model.preset=smollm2-135m", "run.devices=rtx3090=8GiB", "recipe.recompute=block"]);
        let PlannedRun { resolved, outcome, .. } = plan(&run, false).unwrap();
        assert_eq!(resolved.device.budget, Bytes::gib(8));
        assert!(outcome.plan.fits);
        assert_eq!(outcome.plan.recipe.recompute, vec![RecomputeLevel::Block; 30]);
    }

    #[test]
    fn team_has_devices_with_enough_memory() {
        let model = "model.preset=smollm2-135m";
        let used = |devices: &str| {
            let planned = plan(&run_request(&[model, devices]), false).unwrap();
            let names = |devices: &[DeviceSpec]| devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>();
            (names(&planned.devices), names(&planned.resolved.others))
        };
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(used("run.devices=rtx3070,rtx3090"), (names(&["rtx3070", "rtx3090"]), names(&[])));
        // One GiB holds some of the layers and what libraries take.
        assert_eq!(used("run.devices=rtx3070,rtx3090=1GiB"), (names(&["rtx3070", "rtx3090"]), names(&[])));
        assert_eq!(used("run.devices=rtx3070,rtx3090=400MiB"), (names(&["rtx3070"]), names(&["rtx3090"])));
        assert_eq!(used("run.devices=rtx3070=400MiB,rtx3090"), (names(&["rtx3090"]), names(&["rtx3070"])));
    }

    #[test]
    fn plan_if_fits_agrees_with_plan() {
        let model = "model.preset=smollm2-135m";
        for devices in ["rtx3090", "rtx3070=1GiB", "rtx3090=300MiB", "rtx3070,rtx3090", "rtx3070=300MiB,rtx3090=300MiB"]
        {
            for rungs in ["train.rungs=[]", "train.rungs=[\"lora\"]"] {
                let run = run_request(&[model, &format!("run.devices={devices}"), rungs]);
                let full = plan(&run, false).unwrap().outcome.plan;
                let quick = plan_if_fits(&run).unwrap();
                assert_eq!(quick.is_some(), full.fits, "{devices} {rungs}");
                assert_eq!(quick, full.fits.then_some(full), "{devices} {rungs}");
            }
        }
    }

    #[test]
    fn pinned_parallelism_restricts_the_team() {
        let parallelism = |choice: &str| {
            let devices = "run.devices=rtx3090,rtx3090";
            let run = run_request(&["model.preset=smollm2-135m", devices, &format!("run.parallelism={choice}")]);
            plan(&run, false).unwrap().outcome.plan.parallelism
        };
        assert_eq!(parallelism("data"), Some(Parallelism::Data));
        assert_eq!(parallelism("sharded"), Some(Parallelism::Sharded));
        // One device alone is faster than this pipeline.
        assert_eq!(parallelism("pipeline"), None);
    }
}
