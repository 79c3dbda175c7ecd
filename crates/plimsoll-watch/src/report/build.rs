//! Builds a [`Report`] from the folder of a run.

use super::run_file::RunSettings;
use super::{
    CategoryMemory, Commands, DeviceReport, MemoryPair, PlanSummary, ProgramMemory, REPORT_VERSION, Report, Speed,
};
use crate::snapshot::assemble::RunReadings;
use crate::snapshot::run_folder::RunFolder;
use crate::snapshot::run_notes::{Newest, RunNotes};
use crate::snapshot::{RunSnapshot, RunState};
use crate::summary::resume_command;
use crate::text::shell_word;
use plimsoll_core::{
    Bytes, Category, DeviceMemory, DevicePlan, Failure, Plan, RunEnvironment, RunResult, TimelinePoint, peak_point,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

impl Report {
    /// Reads the run in a folder, without recommendations: the caller plans them. `at` is the present time, in seconds
    /// since the Unix epoch.
    ///
    /// # Errors
    /// There is no such folder, it holds no run, or its event log cannot be read.
    pub fn read(folder: &Path, at: f64) -> Result<Report, Failure> {
        let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        // Messages name the folder as the user did.
        RunFolder::open(folder)?;
        let mut run = RunFolder::open(&absolute)?;
        run.refresh()?;
        Ok(Report::of(&run, at))
    }

    /// Returns the report of a run whose files have been read.
    pub(crate) fn of(folder: &RunFolder, at: f64) -> Report {
        let readings = folder.readings();
        let notes = &readings.events.notes;
        let run = readings.snapshot(at);
        let (settings, unreadable) = match RunSettings::read(folder.path()) {
            Ok(settings) => (settings, None),
            Err(failure) => (None, Some(failure.message)),
        };
        let newest_start = notes.starts.listed.back();
        let environment = newest_start.and_then(|start| start.environment.clone());
        let devices = devices(&readings, environment.as_ref());
        let unreadable = unreadable.into_iter().chain(missing_plan(&readings)).collect();
        Report {
            version: REPORT_VERSION,
            at,
            warnings: warnings(&readings, &run, unreadable),
            parameters: newest_start.map(|start| start.parameters),
            commands: commands(folder.path(), run.state, settings.is_some()),
            environment,
            settings,
            started_at: notes.first_time,
            newest_at: readings.events.newest_time,
            step_seconds_total: notes.step_seconds_total,
            first_loss: first_loss(readings.result, &run),
            plan: readings.plan.map(plan_summary),
            recommendations: None,
            speed: speed(&readings, &run),
            devices,
            starts: notes.starts.clone(),
            evaluations: notes.evaluations.clone(),
            recoveries: recoveries(readings.result, notes),
            team_changes: notes.team_changes.clone(),
            reproducible: readings.result.map(|result| result.reproducible),
            reproducible_because: readings.result.map_or(vec![], |result| result.reproducible_because.clone()),
            run,
        }
    }
}

/// Returns the conditions that need attention, then `unreadable` files, then the warnings of the run.
fn warnings(readings: &RunReadings, run: &RunSnapshot, unreadable: Vec<String>) -> Newest<String> {
    let planned = readings.plan.iter().flat_map(|plan| &plan.devices);
    let devices: Vec<_> = planned.map(|plan| readings.device(plan)).collect();
    let mut warnings = readings.events.notes.warnings.clone();
    for condition in readings.warnings(run, &devices).into_iter().chain(unreadable).rev() {
        warnings.listed.push_front(condition);
    }
    warnings
}

/// Returns a warning if the run has steps and no readable plan.
fn missing_plan(readings: &RunReadings) -> Option<String> {
    let needs_plan = readings.plan.is_none() && readings.events.newest.is_some();
    needs_plan.then(|| "plan.json is missing or no plan of this version, so no prediction is shown".to_owned())
}

/// Returns the commands about the run in `folder`. `has_run_file` tells whether its run file can be read.
fn commands(folder: &Path, state: RunState, has_run_file: bool) -> Commands {
    let name = folder.to_str().filter(|name| !name.chars().any(char::is_control));
    let repeat = |name: &str| {
        let run_file = shell_word(&format!("{name}/run.toml"));
        format!("plimsoll train {run_file} --set {}", shell_word(&format!("run.dir={name}-repeat")))
    };
    let resumes = matches!(state, RunState::Stopped | RunState::Died) && has_run_file;
    Commands { repeat: name.filter(|_| has_run_file).map(repeat), resume: name.filter(|_| resumes).map(resume_command) }
}

/// Returns the loss of the first step with a label: of the result, or of the history.
fn first_loss(result: Option<&RunResult>, run: &RunSnapshot) -> Option<f64> {
    let in_result = result.map(|result| result.loss.first).filter(|loss| loss.is_finite());
    in_result.or_else(|| run.history.iter().find_map(|point| point.loss))
}

/// Returns the recoveries of the log. Those of the result, which belong to the last start, replace the newest ones: they
/// have the measured times of the steps after each recovery.
fn recoveries(result: Option<&RunResult>, notes: &RunNotes) -> Newest<plimsoll_core::Recovery> {
    let mut recoveries = notes.recoveries.clone();
    let complete = result.map_or(&[][..], |result| &result.recoveries);
    for (listed, complete) in recoveries.listed.iter_mut().rev().zip(complete.iter().rev()) {
        if (listed.step, &listed.device, &listed.to) == (complete.step, &complete.device, &complete.to) {
            *listed = complete.clone();
        }
    }
    recoveries
}

fn plan_summary(plan: &Plan) -> PlanSummary {
    PlanSummary {
        recipe: plan.recipe.clone(),
        class: plan.class,
        rungs: plan.rungs.clone(),
        parallelism: plan.parallelism,
        host_bytes: plan.host.arena_bytes,
        scratch_file_bytes: plan.file.as_ref().map(|file| file.arena_bytes),
        excluded: plan.excluded.iter().map(|excluded| format!("{}: {}", excluded.device, excluded.reason)).collect(),
        notes: plan.contention_note.iter().chain(&plan.shortfall_note).cloned().collect(),
    }
}

fn speed(readings: &RunReadings, run: &RunSnapshot) -> Speed {
    let result = readings.result;
    Speed {
        simulated: run.simulated,
        predicted_step_seconds: run.predicted_step_seconds,
        measured_step_seconds: result.map(|result| result.step_seconds.median).or(run.step_seconds),
        measured_step_seconds_p95: result.map(|result| result.step_seconds.p95),
        predicted_tokens_per_second: readings.plan.map(|plan| plan.predicted.tokens_per_second),
        measured_tokens_per_second: result.map(|result| result.tokens_per_second).or(run.tokens_per_second),
        is_plan_replaced: readings.events.notes.is_plan_replaced,
    }
}

/// Returns the devices of the newest plan, then those that only the result names, such as lost ones.
fn devices(readings: &RunReadings, environment: Option<&RunEnvironment>) -> Vec<DeviceReport> {
    let plans = readings.plan.map_or(&[][..], |plan| &plan.devices);
    let of_result = readings.result.map_or(&[][..], |result| &result.memory);
    let memory_of = |name: &str| of_result.iter().find(|memory| memory.device == name);
    let planned = plans.iter().map(|plan| planned_device(readings, environment, plan, memory_of(&plan.name)));
    let others = of_result.iter().filter(|memory| !plans.iter().any(|plan| plan.name == memory.device));
    planned.chain(others.map(unplanned_device)).collect()
}

/// Returns a device of the newest plan. `memory` is its memory in the result; `None` before the end of the run.
fn planned_device(
    readings: &RunReadings,
    environment: Option<&RunEnvironment>,
    plan: &DevicePlan,
    memory: Option<&DeviceMemory>,
) -> DeviceReport {
    let seen = readings.device(plan);
    let predicted = |bytes: Bytes| MemoryPair { predicted_bytes: Some(bytes), measured_bytes: None };
    let worker = readings.result.and_then(|result| result.team.iter().find(|worker| worker.device == plan.name));
    let in_team = readings.plan.and_then(|all| all.team.iter().find(|worker| worker.device == plan.name));
    let unended = DeviceReport {
        name: plan.name.clone(),
        hardware: readings.plan.and_then(|all| hardware(all, environment, &plan.name)),
        simulated: plan.simulated,
        load_line_bytes: Some(plan.budget_bytes),
        total: MemoryPair { measured_bytes: seen.measured_peak_bytes, ..predicted(plan.peak_bytes) },
        arena: predicted(plan.arena_bytes),
        charges: predicted(plan.charges_bytes),
        measured_by: None,
        over_load_line_bytes: None,
        newest_plan_arena_bytes: Some(plan.arena_bytes),
        by_category: by_category(Some(&plan.by_category), seen.measured_by_category.as_ref()),
        by_program: plan
            .by_program
            .iter()
            .map(|(kind, bytes)| {
                let set_by = peak_point(&plan.timeline, Some(*kind)).map(TimelinePoint::describe_place);
                ProgramMemory { program: *kind, memory: predicted(*bytes), set_by }
            })
            .collect(),
        peak_set_by: seen.peak_sentence(),
        sequences: in_team.map(|worker| worker.sequences),
        compute_slowdown: worker.map(|worker| worker.compute_slowdown).filter(|slowdown| *slowdown > 0.0),
    };
    match memory {
        Some(memory) => with_result(unended, memory),
        None => unended,
    }
}

/// Returns a device with the figures of the result in place of those of plan and events. Arena and charges are those of
/// the same plan, so that they add up to the total.
fn with_result(device: DeviceReport, memory: &DeviceMemory) -> DeviceReport {
    DeviceReport {
        load_line_bytes: Some(memory.budget_bytes),
        total: MemoryPair { predicted_bytes: Some(memory.predicted_bytes), measured_bytes: memory.measured_bytes },
        arena: MemoryPair {
            predicted_bytes: Some(memory.arena_bytes),
            measured_bytes: Some(memory.arena_measured_bytes),
        },
        charges: MemoryPair {
            predicted_bytes: Some(memory.predicted_bytes.saturating_sub(memory.arena_bytes)),
            measured_bytes: None,
        },
        measured_by: memory.measured_by,
        over_load_line_bytes: memory.over_load_line_bytes,
        ..device
    }
}

/// Returns the memory of each category that has planned or measured bytes. A category that one of the two leaves out has
/// no bytes there.
fn by_category(
    planned: Option<&BTreeMap<Category, Bytes>>,
    measured: Option<&BTreeMap<Category, Bytes>>,
) -> Vec<CategoryMemory> {
    let categories: BTreeSet<Category> =
        planned.into_iter().chain(measured).flat_map(BTreeMap::keys).copied().collect();
    let memory = |category: &Category| {
        let of = |bytes: &BTreeMap<Category, Bytes>| bytes.get(category).copied().unwrap_or_default();
        MemoryPair { predicted_bytes: planned.map(of), measured_bytes: measured.map(of) }
    };
    categories.into_iter().map(|category| CategoryMemory { category, memory: memory(&category) }).collect()
}

/// Returns a device that the result names and the newest plan does not, such as an evaluator or a lost device.
fn unplanned_device(memory: &DeviceMemory) -> DeviceReport {
    let unknown = DeviceReport {
        name: memory.device.clone(),
        hardware: None,
        simulated: memory.device.starts_with("virtual:") || memory.device.contains("/virtual:"),
        load_line_bytes: None,
        total: MemoryPair::default(),
        arena: MemoryPair::default(),
        charges: MemoryPair::default(),
        measured_by: None,
        over_load_line_bytes: None,
        newest_plan_arena_bytes: None,
        by_category: by_category(None, memory.arena_measured_by_category.as_ref()),
        by_program: vec![],
        peak_set_by: None,
        sequences: None,
        compute_slowdown: None,
    };
    with_result(unknown, memory)
}

/// Returns the model name of a device's hardware: of a GPU from the plan, of the CPU from the start of the run.
pub(crate) fn hardware(plan: &Plan, environment: Option<&RunEnvironment>, device: &str) -> Option<String> {
    if device == "cpu" {
        return environment.map(|environment| environment.processor.clone());
    }
    let worker = plan.team.iter().find(|worker| worker.device == device);
    let is_only = plan.devices.len() == 1 && plan.devices[0].name == device;
    let algorithms = worker.and_then(|worker| worker.algorithms.as_ref());
    algorithms.or(plan.algorithms.as_ref().filter(|_| is_only)).map(|algorithms| algorithms.gpu.clone())
}
