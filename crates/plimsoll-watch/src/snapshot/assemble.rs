//! Puts a [`Snapshot`] together from readings, without reading anything itself.

use super::plan::PlanSnapshot;
use super::run_state::{MeasuredMemory, RunEvents};
use super::{
    CpuSnapshot, DeviceSnapshot, HostSnapshot, ProcessSnapshot, RunSnapshot, RunState, SNAPSHOT_VERSION, Snapshot,
};
use crate::summary::resume_command;
use crate::text::{percent, seconds};
use plimsoll_core::{Bytes, DeviceKind, DevicePlan, Plan, Recommendation, RunResult};
use plimsoll_device::machine::{DeviceInfo, Machine};

/// Factor on the predicted time of a step above which a run is slower than predicted.
const SLOW: f64 = 1.15;
/// Number of steps before their mean tells whether they are slower than predicted.
const MIN_STEPS: u64 = 20;
/// Seconds without an event, and multiple of the seconds of a step, after which a run counts as silent.
const SILENT_SECONDS: f64 = 60.0;
const SILENT_STEPS: f64 = 10.0;
/// Fraction of the host's memory that is free, below which it is short.
const HOST_SHORT: f64 = 0.04;

/// The readings of one moment.
pub(super) struct Readings<'a> {
    /// Seconds since the Unix epoch.
    pub at: f64,
    pub machine: &'a Machine,
    /// Fraction of the processor's time, 0 to 1, that was busy; `None` if unknown.
    pub cpu_load: Option<f64>,
    /// Temperature of the processor in degrees Celsius; `None` if unknown.
    pub cpu_celsius: Option<f64>,
    pub run: Option<RunReadings<'a>>,
    pub recommendations: &'a [Recommendation],
}

/// The readings of a run's folder.
pub(crate) struct RunReadings<'a> {
    /// The folder, as text.
    pub folder: String,
    pub state: RunState,
    pub events: &'a RunEvents,
    pub plan: Option<&'a Plan>,
    pub result: Option<&'a RunResult>,
}

impl Readings<'_> {
    /// Puts the snapshot together.
    pub fn snapshot(&self) -> Snapshot {
        let run = self.run.as_ref();
        let planned = run.and_then(|run| run.plan).map_or(&[][..], |plan| &plan.devices);
        let is_planned = |device: &&DeviceInfo| planned.iter().any(|plan| plan.name == device.name);
        let in_run = run.iter().flat_map(|run| planned.iter().map(|plan| self.planned_device(run, plan)));
        let others = self.machine.devices.iter().filter(|device| !is_planned(device)).map(|device| self.device(device));
        let mut snapshot = Snapshot {
            version: SNAPSHOT_VERSION,
            at: self.at,
            devices: in_run.chain(others).collect(),
            host: self.host(),
            cpu: CpuSnapshot { load: self.cpu_load, band: None },
            no_gpu: self.no_gpu(),
            run: run.map(|run| run.snapshot(self.at)),
            recommendations: self.recommendations.to_vec(),
            warnings: vec![],
            feed: run.map_or(vec![], |run| run.events.feed.iter().cloned().collect()),
        };
        snapshot.warnings = warnings(&snapshot, run);
        snapshot
    }

    /// Returns a device of this machine that is in no run.
    fn device(&self, info: &DeviceInfo) -> DeviceSnapshot {
        let (total, free) = (info.memory_total_bytes, info.memory_free_bytes);
        let others = match &info.gpu {
            None => Some(total.saturating_sub(free)),
            Some(gpu) => gpu.held_bytes,
        };
        let mut device = DeviceSnapshot {
            name: info.name.clone(),
            model: Some(info.model.clone()),
            total_bytes: Some(total),
            // The free memory of a GPU is assumed if NVML does not report what is held.
            free_bytes: others.map(|_| free),
            others_bytes: others,
            load_line_bytes: Some(info.defaults.budget_bytes).filter(|line| *line > Bytes::ZERO),
            ..DeviceSnapshot::default()
        };
        let Some(gpu) = &info.gpu else {
            (device.utilization, device.temperature_c) = (self.cpu_load, self.cpu_celsius);
            return device;
        };
        let condition = &gpu.condition;
        device.utilization = condition.busy;
        device.temperature_c = condition.temperature_celsius.map(f64::from);
        (device.power_w, device.power_limit_w) = (condition.power_watts, condition.power_watts_max);
        (device.clock_mhz, device.clock_limit_mhz) = (condition.clock_mhz, condition.clock_mhz_max);
        device.throttled_by.clone_from(&condition.throttled_by);
        device.pcie = gpu.pcie;
        let processes = gpu.processes.iter().map(|process| ProcessSnapshot {
            pid: process.pid,
            name: process.name.clone(),
            held_bytes: process.held_bytes,
            is_plimsoll: process.is_program("plimsoll"),
        });
        device.processes = processes.collect();
        device
    }

    /// Returns a device of the run: its hardware, if it is on this machine, with the plan and the measured memory.
    fn planned_device(&self, run: &RunReadings, plan: &DevicePlan) -> DeviceSnapshot {
        let here = self.machine.devices.iter().find(|device| device.name == plan.name);
        let hardware = here.map_or_else(DeviceSnapshot::default, |info| self.device(info));
        let in_run = run.device(plan);
        let held = in_run.held_bytes.unwrap_or_default();
        DeviceSnapshot {
            name: in_run.name,
            simulated: in_run.simulated,
            in_run: true,
            others_bytes: hardware.others_bytes.map(|taken| taken.saturating_sub(held)),
            load_line_bytes: in_run.load_line_bytes,
            predicted_peak_bytes: in_run.predicted_peak_bytes,
            measured_peak_bytes: in_run.measured_peak_bytes,
            held_bytes: in_run.held_bytes,
            by_category: in_run.by_category,
            measured_by_category: in_run.measured_by_category,
            by_program: in_run.by_program,
            timeline: in_run.timeline,
            memory_history: in_run.memory_history,
            charges_bytes: in_run.charges_bytes,
            ..hardware
        }
    }

    /// Returns the reason why this machine has no GPU to list, as one line; `None` if it has one.
    fn no_gpu(&self) -> Option<String> {
        let has_gpu = self.machine.devices.iter().any(|device| device.gpu.is_some());
        let nvidia = &self.machine.nvidia;
        (!has_gpu).then(|| match (&nvidia.error, &nvidia.cuda) {
            (Some(error), _) => error.clone(),
            (None, Some(_)) => "the NVIDIA driver lists no GPU".to_owned(),
            (None, None) => nvidia.to_string().lines().next().unwrap_or_default().to_owned(),
        })
    }

    fn host(&self) -> HostSnapshot {
        let cpu = self.machine.devices.iter().find(|device| device.kind == DeviceKind::Cpu);
        let plan = self.run.as_ref().and_then(|run| run.plan).map(|plan| &plan.host);
        HostSnapshot {
            total_bytes: cpu.map(|cpu| cpu.memory_total_bytes),
            free_bytes: cpu.map(|cpu| cpu.memory_free_bytes),
            load_line_bytes: plan.map(|host| host.budget_bytes),
            arena_bytes: plan.map(|host| host.arena_bytes),
        }
    }
}

impl RunReadings<'_> {
    /// Returns a device of the run with its plan and its measured memory, and nothing about its hardware.
    pub fn device(&self, plan: &DevicePlan) -> DeviceSnapshot {
        let measured = self.events.memory.get(&plan.name);
        let held = measured.map(|memory| memory.held_bytes).filter(|_| self.state == RunState::Running);
        let in_result = self.result.and_then(|result| result.memory.iter().find(|memory| memory.device == plan.name));
        DeviceSnapshot {
            name: plan.name.clone(),
            simulated: plan.simulated,
            in_run: true,
            load_line_bytes: Some(plan.budget_bytes),
            predicted_peak_bytes: Some(plan.peak_bytes),
            measured_peak_bytes: in_result
                .and_then(|memory| memory.measured_bytes)
                .or_else(|| measured.and_then(|memory| memory.peak_bytes)),
            held_bytes: held,
            by_category: plan.by_category.clone(),
            measured_by_category: in_result
                .filter(|memory| memory.arena_bytes == plan.arena_bytes)
                .and_then(|memory| memory.arena_measured_by_category.clone())
                .or_else(|| measured.and_then(|memory| memory.arena_by_category.clone())),
            by_program: plan.by_program.clone(),
            timeline: plan.timeline.clone(),
            memory_history: measured.map_or(vec![], MeasuredMemory::history),
            charges_bytes: Some(plan.charges_bytes),
            ..DeviceSnapshot::default()
        }
    }

    /// Returns the run at the time `at`, in seconds since the Unix epoch.
    pub fn snapshot(&self, at: f64) -> RunSnapshot {
        let events = self.events;
        let (step, steps) = events.progress.steps_done_and_total();
        let is_running = self.state == RunState::Running;
        let has_ended = matches!(self.state, RunState::Done | RunState::Stopped);
        // The report of the run has the figures of its result, too.
        let result = self.result.filter(|result| has_ended && result.step_seconds.median > 0.0);
        RunSnapshot {
            folder: self.folder.clone(),
            state: self.state,
            simulated: events.progress.is_simulated(),
            step,
            steps: Some(steps).filter(|steps| *steps > 0),
            loss: events.newest.and_then(|newest| newest.loss),
            gradient_norm: events.newest.map(|newest| newest.gradient_norm),
            learning_rate: events.newest.map(|newest| newest.learning_rate),
            step_seconds: result.map(|result| result.step_seconds.median).or_else(|| events.progress.step_seconds()),
            predicted_step_seconds: self.plan.map(|plan| plan.predicted.step_seconds).or(events.predicted_step_seconds),
            tokens_per_second: result
                .map(|result| result.tokens_per_second)
                .or_else(|| events.progress.tokens_per_second()),
            peak_share: events.progress.peak_share(),
            eta_seconds: events.progress.seconds_left().filter(|_| is_running),
            silent_seconds: events.newest_time.map(|newest| (at - newest).max(0.0)),
            eval_loss: events.eval_loss,
            checkpoint_step: events.checkpoint_step,
            plan: self.plan.map(PlanSnapshot::of),
            history: events.history_to_newest(),
        }
    }

    /// Returns the conditions of the run that need attention, most urgent first. `run` and `devices` are what
    /// [`RunReadings::snapshot`] and [`RunReadings::device`] return.
    pub fn warnings(&self, run: &RunSnapshot, devices: &[DeviceSnapshot]) -> Vec<String> {
        let mut warnings = run_warnings(run, self.events.ended.is_some());
        warnings.extend(devices.iter().filter_map(|device| over_load_line(device, self.result)));
        let lost = self.events.lost_devices.iter();
        warnings.extend(lost.map(|device| format!("{device} was lost; the run continues without it")));
        warnings
    }
}

/// Returns the conditions that need attention, most urgent first.
fn warnings(snapshot: &Snapshot, readings: Option<&RunReadings>) -> Vec<String> {
    let mut warnings = Vec::new();
    if let (Some(run), Some(readings)) = (&snapshot.run, readings) {
        warnings.extend(readings.warnings(run, &snapshot.devices));
        warnings.extend(idle_gpus(snapshot, readings.plan));
    }
    let throttled = snapshot.devices.iter().filter(|device| !device.throttled_by.is_empty());
    warnings
        .extend(throttled.map(|device| format!("{}: clocks reduced: {}", device.name, device.throttled_by.join(", "))));
    if let HostSnapshot { total_bytes: Some(total), free_bytes: Some(free), .. } = snapshot.host
        && (free.0 as f64) < HOST_SHORT * total.0 as f64
    {
        warnings.push(format!("this machine has only {free} of {total} memory left"));
    }
    warnings
}

/// Returns the warnings about the progress of a run. `is_resuming` says that its newest event is an earlier end.
fn run_warnings(run: &RunSnapshot, is_resuming: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    if run.state == RunState::Died {
        warnings.push(match run.silent_seconds {
            Some(_) => format!("its process ended without a last event; to resume: {}", resume_command(&run.folder)),
            None => "its process ended before the first event".to_owned(),
        });
    }
    if run.state != RunState::Running || is_resuming {
        return warnings;
    }
    let usual = run.step_seconds.or(run.predicted_step_seconds).unwrap_or_default();
    if let Some(silent) = run.silent_seconds.filter(|silent| *silent > SILENT_SECONDS.max(SILENT_STEPS * usual)) {
        let usual = seconds(usual);
        warnings.push(format!("no event for {}, although a step takes about {usual}", seconds(silent)));
    }
    if let (Some(measured), Some(predicted)) = (run.step_seconds, run.predicted_step_seconds)
        && run.step >= MIN_STEPS
        && measured > SLOW * predicted
    {
        let [measured_text, predicted_text] = [measured, predicted].map(seconds);
        let more = percent(measured / predicted - 1.0, 0);
        warnings.push(format!("a step takes {measured_text}, {more} more than the predicted {predicted_text}"));
    }
    warnings
}

/// Returns a warning if a device of the run holds more than its load line, or held more according to the result.
fn over_load_line(device: &DeviceSnapshot, result: Option<&RunResult>) -> Option<String> {
    let (name, line) = (&device.name, device.load_line_bytes.filter(|_| device.in_run)?);
    let ended = result.and_then(|result| result.memory.iter().find(|memory| memory.device == *name));
    match ended.and_then(|memory| memory.over_load_line_bytes) {
        Some(over) => Some(format!("{name} held {over} more than its load line")),
        None => {
            let held = device.held_bytes.filter(|held| *held > line)?;
            Some(format!("{name} holds {held}, above its load line of {line}"))
        }
    }
}

/// Returns a warning if a run on GPUs of this machine leaves others unused.
fn idle_gpus(snapshot: &Snapshot, plan: Option<&Plan>) -> Option<String> {
    let evaluates = |name: &str| {
        let mut excluded = plan.iter().flat_map(|plan| &plan.excluded);
        excluded.any(|device| device.device == name && device.evaluator_plan.is_some())
    };
    let is_gpu = |device: &&DeviceSnapshot| device.name.starts_with("cuda:") && device.load_line_bytes.is_some();
    let (used, idle): (Vec<_>, Vec<_>) = snapshot.devices.iter().filter(is_gpu).partition(|device| device.in_run);
    let is_running = snapshot.run.as_ref().is_some_and(|run| run.state == RunState::Running);
    let names: Vec<&str> = idle.iter().map(|device| device.name.as_str()).filter(|name| !evaluates(name)).collect();
    (is_running && !used.is_empty() && !names.is_empty()).then(|| {
        format!(
            "{} of {} GPUs work for this run; it does not use {}",
            used.len(),
            used.len() + idle.len(),
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::run_state::RunEvents;

    /// Returns a run that is under way, with nothing known of it.
    fn run(state: RunState) -> RunSnapshot {
        let events = RunEvents::default();
        let readings = RunReadings { folder: "runs/a".to_owned(), state, events: &events, plan: None, result: None };
        readings.snapshot(0.0)
    }

    fn device(name: &str, in_run: bool, held: Option<u64>) -> DeviceSnapshot {
        let held_bytes = held.map(Bytes::mib);
        let load_line_bytes = Some(Bytes::mib(100));
        DeviceSnapshot { name: name.to_owned(), in_run, held_bytes, load_line_bytes, ..DeviceSnapshot::default() }
    }

    fn snapshot(run: RunSnapshot, devices: Vec<DeviceSnapshot>) -> Snapshot {
        Snapshot {
            version: SNAPSHOT_VERSION,
            at: 0.0,
            devices,
            host: HostSnapshot::default(),
            cpu: CpuSnapshot::default(),
            no_gpu: None,
            run: Some(run),
            recommendations: vec![],
            warnings: vec![],
            feed: vec![],
        }
    }

    #[test]
    fn slow_silent_and_dead_runs_are_warned_of() {
        let usual = RunSnapshot {
            step: MIN_STEPS,
            step_seconds: Some(1.1),
            predicted_step_seconds: Some(1.0),
            silent_seconds: Some(59.0),
            ..run(RunState::Running)
        };
        let warnings = |run: &RunSnapshot| run_warnings(run, false);
        assert_eq!(warnings(&usual), Vec::<String>::new());
        let slow = RunSnapshot { step_seconds: Some(1.2), ..usual.clone() };
        assert_eq!(warnings(&slow), ["a step takes 1.20 s, 20 % more than the predicted 1.00 s"]);
        assert!(warnings(&RunSnapshot { step: MIN_STEPS - 1, ..slow.clone() }).is_empty());
        let silent = RunSnapshot { silent_seconds: Some(61.0), ..usual.clone() };
        assert_eq!(warnings(&silent), ["no event for 61.00 s, although a step takes about 1.10 s"]);
        // Ten steps of a slow run are no silence.
        let long = RunSnapshot { step_seconds: Some(60.0), predicted_step_seconds: Some(60.0), ..silent.clone() };
        assert!(warnings(&RunSnapshot { silent_seconds: Some(590.0), ..long }).is_empty());
        // The newest event of a resumed run is its earlier end.
        assert!(run_warnings(&silent, true).is_empty());
        let died = RunSnapshot { state: RunState::Died, ..silent };
        assert!(warnings(&died)[0].starts_with("its process ended without a last event; to resume: plimsoll train "));
        let early = RunSnapshot { silent_seconds: None, ..died };
        assert_eq!(warnings(&early), ["its process ended before the first event"]);
    }

    #[test]
    fn devices_above_their_load_line_are_named() {
        assert_eq!(over_load_line(&device("cpu", true, Some(100)), None), None);
        let over = over_load_line(&device("cpu", true, Some(101)), None);
        assert_eq!(over.as_deref(), Some("cpu holds 101.00 MiB, above its load line of 100.00 MiB"));
        assert_eq!(over_load_line(&device("cpu", false, Some(101)), None), None);
    }

    #[test]
    fn idle_gpus_of_a_running_run_are_named() {
        let devices = ["cuda:0", "cuda:1", "cpu"].map(|name| device(name, name == "cuda:0", None)).to_vec();
        let running = snapshot(run(RunState::Running), devices.clone());
        assert_eq!(idle_gpus(&running, None).as_deref(), Some("1 of 2 GPUs work for this run; it does not use cuda:1"));
        assert_eq!(idle_gpus(&snapshot(run(RunState::Done), devices.clone()), None), None);
        let all = devices.into_iter().map(|device| DeviceSnapshot { in_run: true, ..device }).collect();
        assert_eq!(idle_gpus(&snapshot(run(RunState::Running), all), None), None);
    }

    #[test]
    fn reduced_clocks_and_short_host_memory_are_named() {
        let hot = DeviceSnapshot { throttled_by: vec!["temperature".to_owned()], ..device("cuda:0", false, None) };
        let host = |free: u64| HostSnapshot {
            total_bytes: Some(Bytes::gib(100)),
            free_bytes: Some(Bytes::gib(free)),
            ..HostSnapshot::default()
        };
        let of =
            |free: u64| Snapshot { run: None, host: host(free), ..snapshot(run(RunState::Running), vec![hot.clone()]) };
        assert_eq!(warnings(&of(5), None), ["cuda:0: clocks reduced: temperature"]);
        assert_eq!(warnings(&of(3), None)[1], "this machine has only 3.00 GiB of 100.00 GiB memory left");
    }
}
