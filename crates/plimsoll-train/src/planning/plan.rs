//! The plan of a training run before it is opened: the devices of a run file asked together or one by one, and whether a plan
//! that was stored is one of this run. A run that opens its model and data plans once more (`run::prepare`).

use crate::config::{RunFile, TeamOf};
use crate::planning::charges::{charge_team, one_of, programs_bytes, with_programs};
use crate::planning::question::{question, team_question};
use crate::resolve::devices::{disturbed, learned};
use crate::resolve::model::Model;
use crate::resolve::{Resolved, Work};
use plimsoll_core::{Bytes, DeviceSpec, Failure, Plan, PlanOf, Sharing, counted};
use plimsoll_plan::search::{Answer, ladder, search};
use plimsoll_plan::team::{Only, TeamAnswer, TeamQuestion, alternatives, ladders, say_what_would_use, share_out};
use plimsoll_program::models::ModelConfig;

/// That a run can follow a stored plan, whose file has this name.
///
/// # Errors
/// A plan of something else, or one that does not fit; and what is wrong with the run's model.
pub fn check_followed(file: &RunFile, plan: &Plan, name: &str) -> Result<(), Failure> {
    if !plan.fits {
        return Err(Failure::input(format!("{name}: this plan does not fit, so there is nothing to follow"))
            .hint("its `needs` say what would do: plan once more with one of them"));
    }
    let asked = plan_of_what(file, &Model::without_adapter(file)?.config);
    match plan.of {
        Some(of) if of != asked => Err(Failure::input(format!("{name}: a plan of {of}; this run has {asked}"))
            .hint("plan this very run: plimsoll plan RUN.toml --json")),
        _ => Ok(()),
    }
}

/// What a run file plans.
pub(crate) fn plan_of_what(file: &RunFile, config: &ModelConfig) -> PlanOf {
    let RunFile { train, data, .. } = file;
    PlanOf { parameters: config.parameters(), sequence: u64::from(data.sequence), batch_tokens: train.batch_tokens }
}

/// A training run as it is planned.
#[derive(Debug)]
pub struct Planned {
    /// The model, and the first device of those that take part.
    pub resolved: Resolved,
    /// The devices that take part, in the order of ranks.
    pub devices: Vec<DeviceSpec>,
    /// The whole plan, with the Programs of the first device.
    pub answer: Answer,
}

/// Plans a training run on the devices that the run file names; where none can hold it, for the one that lacks the least,
/// or for the processor in its place. With `explain` the other ways to share out are named,
/// and what each rung frees and costs.
///
/// # Errors
/// As [`Resolved::new`].
pub fn plan(file: &RunFile, explain: bool) -> Result<Planned, Failure> {
    let mut resolved = Resolved::new(file, Model::open(file)?)?;
    let mut devices = vec![resolved.device.clone()];
    devices.append(&mut resolved.others);
    let alone: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
    if devices.len() > 1 {
        charge_team(&mut devices, file);
    }
    let mut answer = with_programs(&mut devices, |devices| {
        let answer = share_out(&team_question(file, &resolved.model, devices)?);
        let programs = || programs_bytes(answer.parts.iter().map(|part| &part.answer.set));
        let programs = answer.plan.fits.then(programs);
        Ok((answer, programs))
    })?;
    if devices.len() > 1 && !answer.plan.fits && file.run.team != TeamOf::All {
        let by_one = one_of(&mut devices, &alone, |devices| {
            let only = Some(Only::Sharing(Sharing::Batch));
            let answer =
                share_out(&TeamQuestion { only, evaluations: None, ..team_question(file, &resolved.model, devices)? });
            let [part] = &answer.parts[..] else { return Ok(None) };
            let (name, seconds) = (devices[part.device].name.clone(), answer.plan.predicted.step_seconds);
            let programs = programs_bytes([&part.answer.set]);
            Ok(answer.plan.fits.then_some((answer, name, seconds, programs)))
        })?;
        answer = by_one.unwrap_or(answer);
    }
    if devices.len() > 1 {
        say_what_would_use(&team_question(file, &resolved.model, &devices)?, &file.devices(), &mut answer.plan);
    }
    if explain && devices.len() > 1 {
        let team = team_question(file, &resolved.model, &devices)?;
        answer.plan.alternatives = alternatives(&team, &answer.plan);
        ladders(&team, &mut answer);
    }
    let TeamAnswer { parts, plan, .. } = answer;
    if file.run.team == TeamOf::All && plan.fits && parts.len() < devices.len() {
        let sequences = counted(file.batch_sequences(), "sequence");
        let message = format!(
            "run.team = \"all\": a step has {sequences}, and no way was found to share them, or the model, among all \
             {} devices",
            devices.len()
        );
        return Err(
            Failure::input(message).hint("take a larger train.batch_tokens, fewer devices, or run.team = \"auto\"")
        );
    }
    let part: Vec<usize> = parts.iter().map(|part| part.device).collect();
    let first = parts.into_iter().next().expect("somebody takes part");
    let answer = Answer { plan, ..first.answer };
    let (taken, left): (Vec<_>, Vec<_>) =
        devices.into_iter().enumerate().partition(|(device, _)| part.contains(device));
    let mut devices: Vec<DeviceSpec> = taken.into_iter().map(|(_, device)| device).collect();
    resolved.others = left.into_iter().map(|(_, device)| device).collect();
    resolved.device = devices[0].clone();
    let mut answer = resolved.or_on_cpu(file, answer, |resolved, file| {
        let device = std::slice::from_mut(&mut resolved.device);
        with_programs(device, |devices| {
            let answer = search(&question(file, &resolved.model, &devices[0], Work::Train)?);
            let programs = answer.plan.fits.then(|| programs_bytes([&answer.set]));
            Ok((answer, programs))
        })
    })?;
    if resolved.fallback.is_some() {
        devices = vec![resolved.device.clone()];
    }
    if explain && answer.plan.team.is_empty() {
        (_, _, answer.plan.ladder) = ladder(&resolved.question(file, Work::Train)?, &answer.plan.recipe);
    }
    answer.plan.learned = devices.iter().find_map(learned);
    answer.plan.disturbed = disturbed();
    answer.plan.of = Some(plan_of_what(file, &resolved.model.config));
    Ok(Planned { resolved, devices, answer })
}

/// Plans that fit come first, by time; then those that do not, by what they lack.
pub(crate) fn order(plan: &Plan) -> f64 {
    if plan.fits {
        return -1.0 / plan.predicted.step_seconds;
    }
    plan.devices.iter().map(|device| device.peak_bytes.saturating_sub(device.budget_bytes).0 as f64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::file;
    use plimsoll_core::RecomputeLevel;

    #[test]
    fn a_preset_on_paper_is_planned_without_a_device() {
        let file = file(&["model.preset=smollm2-135m", "run.devices=rtx3090=8GiB", "recipe.recompute=block"]);
        let Planned { resolved, answer, .. } = plan(&file, false).unwrap();
        assert_eq!(resolved.device.budget, Bytes::gib(8));
        assert!(answer.plan.fits);
        assert_eq!(answer.plan.recipe.recompute, vec![RecomputeLevel::Block; 30]);
    }

    #[test]
    fn several_devices_are_a_team_of_those_that_have_room() {
        let model = "model.preset=smollm2-135m";
        let used = |devices: &str| {
            let planned = plan(&file(&[model, devices]), false).unwrap();
            let names = |devices: &[DeviceSpec]| devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>();
            (names(&planned.devices), names(&planned.resolved.others))
        };
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(used("run.devices=rtx3070,rtx3090"), (names(&["rtx3070", "rtx3090"]), names(&[])));
        // A gibibyte has room for some of the layers, beside what libraries take.
        assert_eq!(used("run.devices=rtx3070,rtx3090=1GiB"), (names(&["rtx3070", "rtx3090"]), names(&[])));
        assert_eq!(used("run.devices=rtx3070,rtx3090=400MiB"), (names(&["rtx3070"]), names(&["rtx3090"])));
        assert_eq!(used("run.devices=rtx3070=400MiB,rtx3090"), (names(&["rtx3090"]), names(&["rtx3070"])));
    }
}
