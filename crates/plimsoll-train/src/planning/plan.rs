//! The plan of a run file, made without opening weights, data or devices; and the check that a stored plan belongs to a run.
//! A run that starts is planned by `prepare`, with measured charges.

use super::charges::{
    SingleDevicePlan, add_team_charges, plan_single_device, plan_with_program_charges, program_heap_bytes,
};
use super::request::{plan_request, team_request};
use crate::config::{ParallelismChoice, RunConfig};
use crate::resolve::devices::{contention_note, shortfall_note};
use crate::resolve::{Model, Resolved, RunRequest, Workload};
use plimsoll_core::{Bytes, DeviceSpec, Failure, Parallelism, Plan, PlannedWorkload, format_count};
use plimsoll_plan::search::{PlanOutcome, ladder, search};
use plimsoll_plan::team::{
    TeamConstraint, TeamOutcome, TeamRequest, add_device_remedies, alternatives, fill_ladders, plan_team,
};
use plimsoll_program::models::ModelConfig;

/// Checks that a run can follow a stored plan. `name` is the plan's file name, for messages.
///
/// # Errors
/// A plan that does not fit or was made for another workload, or an invalid model.
pub fn check_stored_plan(config: &RunConfig, plan: &Plan, name: &str) -> Result<(), Failure> {
    if !plan.fits {
        return Err(Failure::input(format!("{name}: this plan does not fit, so there is nothing to follow"))
            .hint("its `needs` say what would do: plan once more with one of them"));
    }
    let workload = planned_workload(config, &Model::without_adapter(config)?.config);
    match plan.planned_for {
        Some(other) if other != workload => {
            Err(Failure::input(format!("{name}: a plan of {other}; this run has {workload}"))
                .hint("plan this very run: plimsoll plan RUN.toml --json"))
        }
        _ => Ok(()),
    }
}

/// Returns the workload that a run file plans.
pub(crate) fn planned_workload(config: &RunConfig, model: &ModelConfig) -> PlannedWorkload {
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
    /// The model, and the first device of the team.
    pub resolved: Resolved,
    /// The devices of the team, in rank order.
    pub devices: Vec<DeviceSpec>,
    /// The plan of the team, with the Programs of the first device.
    pub outcome: PlanOutcome,
}

/// Plans a training run on the devices that it names. If it fits on none, returns the plan for the device that lacks the least
/// memory, or a plan for the processor in its place. With `explain`, the plan also lists alternatives, and what each rung
/// frees and costs.
///
/// # Errors
/// The errors of [`Resolved::new`], or a team that must use all devices and cannot.
pub fn plan(run: &RunRequest, explain: bool) -> Result<PlannedRun, Failure> {
    let mut resolved = Resolved::new(run, Model::open(run)?)?;
    let mut devices = vec![resolved.device.clone()];
    devices.append(&mut resolved.others);
    let mut team = plan_devices(run, &resolved.model, &mut devices)?;
    if devices.len() > 1 {
        let request = team_request(run, &resolved.model, &devices)?;
        add_device_remedies(&request, &run.devices(), &mut team.plan);
        if explain {
            team.plan.alternatives = alternatives(&request, &team.plan);
            fill_ladders(&request, &mut team);
        }
    }
    let TeamOutcome { workers, plan, .. } = team;
    if run.run.parallelism == ParallelismChoice::All && plan.fits && workers.len() < devices.len() {
        return Err(cannot_use_all(run, devices.len()));
    }
    let used: Vec<usize> = workers.iter().map(|worker| worker.device).collect();
    let first = workers.into_iter().next().expect("a team has at least one device");
    let outcome = PlanOutcome { plan, ..first.outcome };
    let (used, unused): (Vec<_>, Vec<_>) =
        devices.into_iter().enumerate().partition(|(device, _)| used.contains(device));
    let mut devices: Vec<DeviceSpec> = used.into_iter().map(|(_, device)| device).collect();
    resolved.others = unused.into_iter().map(|(_, device)| device).collect();
    resolved.device = devices[0].clone();
    let mut outcome = resolved.or_fall_back_to_cpu(run, outcome, plan_device)?;
    if resolved.fallback.is_some() {
        devices = vec![resolved.device.clone()];
    }
    if explain && outcome.plan.team.is_empty() {
        outcome.plan.ladder = ladder(&resolved.plan_request(run, Workload::Train)?, &outcome.plan.recipe).rungs;
    }
    outcome.plan.shortfall_note = devices.iter().find_map(shortfall_note);
    outcome.plan.contention_note = contention_note();
    outcome.plan.planned_for = Some(planned_workload(run, &resolved.model.config));
    Ok(PlannedRun { resolved, devices, outcome })
}

/// Plans for the devices together, and if that does not fit, for each of them alone. `devices` get the charges of the plan.
fn plan_devices(run: &RunRequest, model: &Model, devices: &mut Vec<DeviceSpec>) -> Result<TeamOutcome, Failure> {
    let charges_alone: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
    if devices.len() > 1 {
        add_team_charges(devices, run);
    }
    let team = plan_with_program_charges(devices, |devices| {
        let team = plan_team(&team_request(run, model, devices)?);
        let program_bytes = || program_heap_bytes(team.workers.iter().map(|worker| &worker.outcome.set));
        let program_bytes = team.plan.fits.then(program_bytes);
        Ok((team, program_bytes))
    })?;
    if team.plan.fits || devices.len() == 1 || !run.run.parallelism.allows_single_device() {
        return Ok(team);
    }
    let single = plan_single_device(devices, &charges_alone, |devices| {
        let constraint = Some(TeamConstraint::Parallelism(Parallelism::Data));
        let outcome = plan_team(&TeamRequest { constraint, evaluations: None, ..team_request(run, model, devices)? });
        let [worker] = &outcome.workers[..] else { return Ok(None) };
        let device = devices[worker.device].name.clone();
        let (step_seconds, program_bytes) =
            (outcome.plan.predicted.step_seconds, program_heap_bytes([&worker.outcome.set]));
        let fits = outcome.plan.fits;
        Ok(fits.then_some(SingleDevicePlan { outcome, device, step_seconds, program_bytes }))
    })?;
    Ok(single.unwrap_or(team))
}

/// Plans for the chosen device alone, with its Programs charged.
fn plan_device(resolved: &mut Resolved, run: &RunRequest) -> Result<PlanOutcome, Failure> {
    let Resolved { model, device, .. } = resolved;
    plan_with_program_charges(std::slice::from_mut(device), |devices| {
        let outcome = search(&plan_request(run, model, &devices[0], Workload::Train)?);
        let program_bytes = outcome.plan.fits.then(|| program_heap_bytes([&outcome.set]));
        Ok((outcome, program_bytes))
    })
}

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
    use plimsoll_core::RecomputeLevel;

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
