//! Recommendations as text and as commands, for `plan --advise`, `watch --advise`, `report --advise` and `doctor`.

use super::hub::with_hub_files;
use crate::command_line;
use plimsoll_core::{Budget, Bytes, Failure, Plan, Recommendation, RecomputeLevel};
use plimsoll_device::regular_file;
use plimsoll_plan::device_request::DevicesRequest;
use plimsoll_train::planning::advice::{Advice, Change, advise};
use plimsoll_train::planning::{PlannedRun, plan};
use plimsoll_train::resolve::{GpuProcess, HubNeed, RunRequest, process_bytes};
use plimsoll_watch::remedies::Setting;
use plimsoll_watch::text::excerpt;
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Returns the recommendations for a run with the plan `before`, of the changes that `is_offered` accepts. `command`
/// returns the words of the command that applies a change, from its settings.
pub fn recommendations(
    request: &RunRequest,
    before: &Plan,
    is_offered: impl Fn(&Change) -> bool,
    command: impl Fn(&Change, &[Setting]) -> Vec<String>,
) -> Vec<Recommendation> {
    let all = advise(request, before, is_offered);
    all.iter().map(|advice| recommendation(advice, before, &command)).collect()
}

/// Returns a recommendation for a run with the plan `before`, like [`recommendations`].
fn recommendation(
    advice: &Advice,
    before: &Plan,
    command: &impl Fn(&Change, &[Setting]) -> Vec<String>,
) -> Recommendation {
    let settings = advice.settings.iter().map(|(key, value)| Setting::of_key(key, value.clone()));
    let words = command(&advice.change, &settings.collect::<Vec<_>>());
    Recommendation {
        text: text(advice, before),
        command: command_line::shell_quoted(&words),
        bytes: advice.added_bytes(before),
        speedup: advice.speedup,
    }
}

/// Returns the recommendations for the run in a folder, under the load lines of its plan. Each command starts a new run
/// on the same devices and lines, because a resumed run keeps its plan as long as that fits. Load lines stay as they are,
/// also if another process were closed: the memory that is free now depends on the run itself.
///
/// # Errors
/// The run has no readable plan, or devices of other machines, or it cannot be planned anew.
pub fn recommendations_for_run(folder: &Path) -> Result<Vec<Recommendation>, Failure> {
    let mut request = request_of_run(folder)?;
    request.process_bytes = Some(process_bytes());
    let PlannedRun { outcome, .. } = plan(&request, false)?;
    let command = |change: &Change, settings: &[Setting]| command_of_new_run(&request, change, settings);
    let keeps_lines =
        |change: &Change| !matches!(change, Change::RaiseBudget | Change::RaiseHost | Change::CloseProcess(_));
    Ok(recommendations(&request, &outcome.plan, keeps_lines, command))
}

/// Returns the words of the command that trains a run anew with a change, in a folder beside that of the run.
fn command_of_new_run(request: &RunRequest, change: &Change, settings: &[Setting]) -> Vec<String> {
    // Without a slash at the end.
    let run_dir: PathBuf = Path::new(&request.run.dir).components().collect();
    let same = [
        ("run.dir", format!("{}-{}", run_dir.display(), change.word())),
        ("run.devices", request.run.devices.clone()),
        ("memory.host", request.memory.host.to_string()),
    ];
    let same = same.map(|(key, value)| Setting::of_key(key, value));
    let run_file = run_dir.join("run.toml").display().to_string();
    let words = ["plimsoll".to_owned(), "train".to_owned(), run_file];
    command_line::with_settings(words.into_iter().chain(same.iter().flat_map(Setting::words)), settings)
}

/// Returns the request of the run in a folder, with the load lines of its plan: by now the run itself holds memory, so
/// shares of free memory would give others.
fn request_of_run(folder: &Path) -> Result<RunRequest, Failure> {
    let mut request = with_hub_files(RunRequest::resume(folder, &[])?, HubNeed::Plan, true)?;
    let plan = plan_of_run(folder)?;
    let mut devices = request.devices();
    if devices.has_remote_devices() {
        return Err(Failure::input("a run on devices of other machines is not planned anew"));
    }
    let planned = plan.devices.iter().map(|device| {
        let named = devices.devices.iter().find(|requested| requested.name() == device.name);
        let mut requested = named.cloned().or_else(|| device.name.parse::<DevicesRequest>().ok()?.devices.pop())?;
        requested.set_budget(Budget::Amount(device.budget_bytes));
        Some(requested)
    });
    let planned: Option<Vec<_>> = planned.collect();
    devices.devices = planned.ok_or_else(|| Failure::input("its plan has a device with an unknown name"))?;
    // A processor that trains is its own host, and has no line for it.
    if plan.host.budget_bytes > Bytes::ZERO {
        devices.host = devices.host.map(|_| Budget::Amount(plan.host.budget_bytes));
        request.memory.host = Budget::Amount(plan.host.budget_bytes);
    }
    request.run.devices = devices.to_string();
    // The lines of the plan have them already.
    request.budget_overrides.clear();
    Ok(request)
}

/// Reads the plan in the folder of a run.
fn plan_of_run(folder: &Path) -> Result<Plan, Failure> {
    let path = folder.join("plan.json");
    let text = regular_file::read_text(&path).map_err(|error| unreadable_plan(&path, &error))?;
    serde_json::from_str(&text).map_err(|error| unreadable_plan(&path, &error))
}

fn unreadable_plan(path: &Path, error: &dyn Display) -> Failure {
    Failure::input(format!("{}: {error}", path.display()))
}

/// Describes a change, its predicted effect and the plan under it, in one line.
fn text(advice: &Advice, before: &Plan) -> String {
    let change = match &advice.change {
        Change::ChooseMicroBatch => "let the planner choose the micro-batch".to_owned(),
        Change::ChooseRecompute => "let the planner choose the recompute levels".to_owned(),
        Change::ChooseRecipe => "let the planner choose micro-batch and recompute levels".to_owned(),
        Change::ChooseParallelism => "let the planner choose the parallelism".to_owned(),
        Change::RaiseBudget => "give each device its default load line".to_owned(),
        Change::RaiseHost => "give the host its default load line".to_owned(),
        Change::UseAllGpus => "use all GPUs".to_owned(),
        Change::TakeRung(rung) => format!("take {rung} ({}; changes the results)", rung.accuracy_impact()),
        Change::CloseProcess(process) => close(process),
    };
    let added = advice.added_bytes(before);
    let bytes = match (Bytes(added.unsigned_abs()), added > 0) {
        (Bytes(0), _) => String::new(),
        (bytes, true) => format!(", {bytes} more"),
        (bytes, false) => format!(", {bytes} less"),
    };
    let differences = differences(before, advice).join(", ");
    let differences = if differences.is_empty() { differences } else { format!(": {differences}") };
    format!("{change}: {:.2} x as fast{bytes}{differences}", advice.speedup)
}

/// Describes the end of a process: `close process 4711 (python3 train.py), which holds 1.20 GiB on cuda:0`.
fn close(process: &GpuProcess) -> String {
    let name = process.name.as_deref().map_or("name not visible".to_owned(), excerpt);
    let draws = if process.draws { ", which draws" } else { "" };
    let held: Vec<String> = process.held_bytes.iter().map(|(gpu, bytes)| format!("{bytes} on {gpu}")).collect();
    format!("close process {} ({name}{draws}), which holds {}", process.pid, held.join(" and "))
}

/// Lists the differences between the plan `before` and that of a change which explain its being faster.
fn differences(before: &Plan, advice: &Advice) -> Vec<String> {
    let (after, mut list) = (&advice.plan, Vec::new());
    let rungs = |plan: &Plan| match &plan.rungs[..] {
        [] => "no rung".to_owned(),
        some => some.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "),
    };
    if before.rungs != after.rungs && !matches!(advice.change, Change::TakeRung(_)) {
        list.push(format!("{} instead of {} (changes the results)", rungs(after), rungs(before)));
    }
    if before.devices.len() != after.devices.len() && after.devices.len() > 1 {
        list.push(format!("{} devices instead of {}", after.devices.len(), before.devices.len()));
    }
    let parallelism = |plan: &Plan| plan.parallelism.map_or("one device".to_owned(), |kind| kind.to_string());
    if parallelism(before) != parallelism(after) {
        list.push(format!("{} instead of {}", parallelism(after), parallelism(before)));
    }
    let (old, new) = (&before.recipe, &after.recipe);
    if old.micro_batch != new.micro_batch {
        list.push(format!("micro-batch {} instead of {}", new.micro_batch, old.micro_batch));
    }
    let recomputed =
        |plan: &Plan| plan.recipe.recompute.iter().filter(|level| **level != RecomputeLevel::Nothing).count();
    if recomputed(before) != recomputed(after) {
        list.push(format!("recompute in {} instead of {} layers", recomputed(after), recomputed(before)));
    }
    match (old.offload.is_nothing(), new.offload.is_nothing()) {
        (false, true) => list.push("no offload".to_owned()),
        (false, false) if old.offload != new.offload => list.push("other offload".to_owned()),
        (true, false) => list.push("with offload".to_owned()),
        _ => {}
    }
    list
}
