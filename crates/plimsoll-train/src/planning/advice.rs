//! Recommendations for a run that fits: changes of its settings or of the machine, each planned like the run itself. A
//! change is recommended only if the planner predicts a faster step with it.

use super::plan::{plan, plan_if_fits};
use crate::config::{ParallelismChoice, RunConfig};
use crate::resolve::gpu_processes::processes_on_gpus;
use crate::resolve::{GpuProcess, RunRequest};
use plimsoll_core::{Budget, Plan, Rung};
use plimsoll_plan::device_request::{DeviceRequest, DevicesRequest};

/// Least predicted speedup of a change that is recommended.
pub const MIN_SPEEDUP: f64 = 1.02;

/// Most processes whose end is planned: those that hold the most memory.
const MAX_PROCESSES: usize = 4;

/// A change of a run's settings, or of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The planner chooses the micro-batch size, which the run file fixes.
    ChooseMicroBatch,
    /// The planner chooses the recompute levels, which the run file fixes.
    ChooseRecompute,
    /// The planner chooses micro-batch size and recompute levels, which the run file fixes.
    ChooseRecipe,
    /// The planner chooses the parallelism, which the run file fixes.
    ChooseParallelism,
    /// Each device gets the default load line instead of a lower `memory.budget`.
    RaiseBudget,
    /// The host may hold the default share of its memory instead of a lower `memory.host`.
    RaiseHost,
    /// The run uses all GPUs of this machine.
    UseAllGpus,
    /// The run takes a lossy rung, which changes its results.
    TakeRung(Rung),
    /// The user closes another process, which holds memory of GPUs of the run. Their load lines, shares of the free
    /// memory, are then higher.
    CloseProcess(GpuProcess),
}

impl Change {
    /// Returns a word for the change, for the name of a folder.
    pub fn word(&self) -> String {
        match self {
            Change::ChooseMicroBatch => "micro-batch".to_owned(),
            Change::ChooseRecompute => "recompute".to_owned(),
            Change::ChooseRecipe => "recipe".to_owned(),
            Change::ChooseParallelism => "parallelism".to_owned(),
            Change::RaiseBudget => "budget".to_owned(),
            Change::RaiseHost => "host".to_owned(),
            Change::UseAllGpus => "all-gpus".to_owned(),
            Change::TakeRung(rung) => rung.to_string(),
            Change::CloseProcess(process) => format!("without-{}", process.pid),
        }
    }
}

/// A recommended change, with the plan under it.
#[derive(Clone, Debug)]
pub struct Advice {
    /// The change.
    pub change: Change,
    /// The keys of the run file that change, with their new values as `--set` takes them. Empty if the machine changes.
    pub settings: Vec<(&'static str, String)>,
    /// The plan with the change.
    pub plan: Plan,
    /// Predicted seconds of a step before the change divided by those after it.
    pub speedup: f64,
}

impl Advice {
    /// Returns by how many bytes the predicted peaks of all devices together grow with the change; negative if they
    /// shrink. `before` is the plan without it.
    pub fn added_bytes(&self, before: &Plan) -> i64 {
        let peak = |plan: &Plan| plan.devices.iter().map(|device| device.peak_bytes.0 as i64).sum::<i64>();
        peak(&self.plan) - peak(before)
    }
}

/// Plans each change that applies to a run, and returns those that make its step faster: changes that keep the results
/// first, and among equals the fastest first. `before` is the run's plan without a change. Returns nothing if that does
/// not fit: its remedies say what to do. The request states [`RunRequest::process_bytes`], so that all plans have the
/// same charges.
///
/// Speeds of simulated and paper devices are compared like real ones. A change that cannot be planned is left out, and
/// so is one that `is_offered` refuses, without a plan.
pub fn advise(run: &RunRequest, before: &Plan, is_offered: impl Fn(&Change) -> bool) -> Vec<Advice> {
    if !before.fits {
        return Vec::new();
    }
    let changes = changes(run, before).into_iter().filter(|(change, _)| is_offered(change));
    let mut advice: Vec<Advice> =
        changes.filter_map(|(change, settings)| try_change(run, before, change, settings)).collect();
    let changes_results = |advice: &Advice| advice.plan.rungs != before.rungs;
    advice.sort_by(|a, b| changes_results(a).cmp(&changes_results(b)).then(b.speedup.total_cmp(&a.speedup)));
    advice
}

/// Plans a run with one change. Returns `None` if the change is invalid, does not fit, or is not faster.
fn try_change(
    run: &RunRequest,
    before: &Plan,
    change: Change,
    settings: Vec<(&'static str, String)>,
) -> Option<Advice> {
    let texts: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let config = RunConfig::parse("the run", &run.config.to_toml(), &texts).ok()?;
    let freed_bytes = match &change {
        Change::CloseProcess(process) => process.held_bytes.clone(),
        _ => run.freed_bytes.clone(),
    };
    let changed = RunRequest { config, freed_bytes, ..run.clone() };
    // Such plans are for nominal speeds, or for the processor in place of the run's devices.
    let after = match run.is_deterministic() || before.fallback.is_some() {
        true => plan(&changed, false).ok()?.outcome.plan,
        false => plan_if_fits(&changed).ok()??,
    };
    let speedup = before.predicted.step_seconds / after.predicted.step_seconds;
    // Such a plan leaves the devices of the run, because it does not fit there.
    let moves_to_cpu = after.fallback.is_some() && before.fallback.is_none();
    (after.fits && !moves_to_cpu && speedup >= MIN_SPEEDUP).then_some(Advice { change, settings, plan: after, speedup })
}

/// Returns the changes that the settings of a run and the machine leave open, with the settings of each.
fn changes(run: &RunRequest, before: &Plan) -> Vec<(Change, Vec<(&'static str, String)>)> {
    let micro_batch = || ("recipe.micro_batch", "auto".to_owned());
    let recompute = || ("recipe.recompute", "[]".to_owned());
    let fixed = (run.recipe.micro_batch.is_some(), !run.recipe.recompute.is_empty());
    let mut changes = Vec::new();
    if fixed.0 {
        changes.push((Change::ChooseMicroBatch, vec![micro_batch()]));
    }
    if fixed.1 {
        changes.push((Change::ChooseRecompute, vec![recompute()]));
    }
    if fixed == (true, true) {
        changes.push((Change::ChooseRecipe, vec![micro_batch(), recompute()]));
    }
    if run.run.parallelism != ParallelismChoice::Auto {
        changes.push((Change::ChooseParallelism, vec![("run.parallelism", "auto".to_owned())]));
    }
    changes.extend(memory_changes(run));
    if uses_some_gpus(run) {
        let all = DeviceRequest::Cuda { index: None, budget: None };
        let devices = DevicesRequest { devices: vec![all], ..run.devices() };
        changes.push((Change::UseAllGpus, vec![("run.devices", devices.to_string())]));
    }
    let possible = Rung::ALL.into_iter().filter(|rung| !before.rungs.contains(rung));
    changes.extend(possible.map(|rung| (Change::TakeRung(rung), vec![("train.rungs", rung_list(before, rung))])));
    let closed = processes_on_gpus(run).into_iter().take(MAX_PROCESSES);
    changes.extend(closed.map(|process| (Change::CloseProcess(process), vec![])));
    changes
}

/// Returns the changes that raise load lines to their defaults.
fn memory_changes(run: &RunRequest) -> Vec<(Change, Vec<(&'static str, String)>)> {
    let mut changes = Vec::new();
    let mut raised = run.devices();
    for device in raised.devices.iter_mut().filter(|device| has_liftable_line(device)) {
        device.set_budget(Budget::DEVICE);
    }
    let mut settings = Vec::new();
    if raised != run.devices() {
        settings.push(("run.devices", raised.to_string()));
    }
    if run.memory.budget.is_some_and(|budget| budget != Budget::DEVICE) {
        settings.push(("memory.budget", Budget::DEVICE.to_string()));
    }
    if !settings.is_empty() {
        changes.push((Change::RaiseBudget, settings));
    }
    // A host of paper devices has any size, and one that the devices name is part of them.
    if run.memory.host != Budget::HOST && raised.host.is_none() && !raised.has_paper_devices() {
        changes.push((Change::RaiseHost, vec![("memory.host", Budget::HOST.to_string())]));
    }
    changes
}

/// Returns whether a device has a load line of its own that may be lower than its memory. That of a simulated device, or
/// of a card with the user's figures, is its memory.
fn has_liftable_line(device: &DeviceRequest) -> bool {
    let local = device.local_device();
    let is_memory = matches!(local, DeviceRequest::Virtual { .. } | DeviceRequest::Paper { figures: Some(_), .. });
    device.budget().is_some() && !is_memory
}

/// Returns whether the run names some GPUs of this machine by their number, without load lines of their own.
fn uses_some_gpus(run: &RunRequest) -> bool {
    let is_one_gpu = |device: &DeviceRequest| {
        matches!(device, DeviceRequest::Cuda { index: Some(_), .. }) && device.budget().is_none()
    };
    let devices = run.devices().devices;
    !devices.is_empty() && devices.iter().all(is_one_gpu)
}

/// Formats the rungs of a plan and one more as a value of `train.rungs`.
fn rung_list(before: &Plan, rung: Rung) -> String {
    let rungs: Vec<String> = before.rungs.iter().chain([&rung]).map(|rung| format!("\"{rung}\"")).collect();
    format!("[{}]", rungs.join(", "))
}
