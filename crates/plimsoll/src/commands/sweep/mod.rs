//! `plimsoll sweep`: trains several runs on the same devices, packed by bytes.
//!
//! Every run is a process of this program with its own folder and its own load line. This module starts, restarts and
//! ends the runs. `devices` holds the devices and the share of each worker, `folder` the files on disk, `worker` a
//! process. `plimsoll_plan::sweep` decides which run starts where and when.

mod devices;
mod folder;
mod worker;

use super::hub::with_hub_files;
use super::rates::measure_in_child;
use super::ray::{reserve_devices, with_remote_devices};
use crate::args::SweepArgs;
use crate::output;
use crate::signals::{self, Notes, OnSignal, StopFlag};
use devices::{RunDemands, SharedDevices};
use folder::{OpenedSweep, RunProgress, SweepFolder};
use plimsoll_core::{Bytes, Exit, Failure, RunDemand, RunStatus, SweepReport, SweepState, format_count};
use plimsoll_plan::sweep::{Demand, Job, SweepScheduler, makespan, makespan_lower_bound, simulate};
use plimsoll_train::config::{MemorySection, RunConfig};
use plimsoll_train::planning::demand::{DEMAND_INCREMENT, demand, run_seconds};
use plimsoll_train::resolve::{HubNeed, contention_note};
use plimsoll_watch::sweep::{ended, planning, started, table};
use plimsoll_watch::text::shell_word;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use worker::{Worker, WorkerExit, WorkerStart};

/// Path of this program. It stays valid after the file has been replaced by a newer version.
const PROGRAM: &str = "/proc/self/exe";

/// Time between two checks for training processes that have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time for which a cluster device gets no new run after a run ended early there: the device may be lost, which the
/// cluster reports only later.
const FAILED_DEVICE_COOLDOWN: Duration = Duration::from_secs(10);

/// Time that the sweep waits for a lost device to return, while no run is under way and all waiting runs need lost
/// devices.
const LOST_DEVICE_TIMEOUT: Duration = Duration::from_secs(60);

/// Time between two scheduling decisions while no training process starts or ends. A run that takes longer than
/// predicted changes the decision.
const SCHEDULE_INTERVAL: Duration = Duration::from_secs(1);

/// Plans and runs a sweep and prints a table of the results. A run that fails does not stop the others.
///
/// # Errors
/// Invalid runs or devices. After all runs were tried: some of them are not done.
pub fn run(args: &SweepArgs) -> Result<Exit, Failure> {
    if let Some(path) = &args.demand {
        return print_demand(args, path.clone());
    }
    let injections = args.injections()?;
    let before =
        args.resume.as_deref().map(|path| SweepFolder::resume(path, SweepFolder::report(path)?)).transpose()?;
    if let Some(OpenedSweep { folder, report, .. }) = &before
        && report.runs.iter().all(|run| run.state == SweepState::Done)
    {
        folder.write(report, args.json.as_deref())?;
        output::print_note("all runs are done already; nothing was changed");
        output::print(&table(report));
        return Ok(Exit::Done);
    }
    let previous = before.as_ref().map(|sweep| &sweep.report);
    let requested = if before.is_none() { folder::requested_runs(args)? } else { vec![] };
    let named = previous.iter().flat_map(|report| &report.runs).map(|run| &run.name);
    let names: Vec<&str> = named.chain(requested.iter().map(|(name, _)| name)).map(String::as_str).collect();
    if let Some((name, _)) = injections.iter().find(|(name, _)| !names.contains(&name.as_str())) {
        let failure = Failure::input(format!("--inject-oom: there is no run `{name}`"));
        return Err(failure.hint(format!("the runs are {}", names.join(", "))));
    }
    let runs = before.iter().flat_map(|sweep| &sweep.configs).chain(requested.iter().map(|(_, config)| config));
    let mut request = args.devices(previous, &runs.collect::<Vec<_>>())?;
    SharedDevices::check(&request)?;
    for (name, file) in &requested {
        if ![request.memory.load_lines(), MemorySection::default().load_lines()].contains(&file.memory.load_lines()) {
            output::print_note(&format!(
                "{name}: [memory] budget and host are ignored, because the sweep has load lines of its own"
            ));
        }
    }
    request.measure_rates = Some(measure_in_child);
    if !args.quiet {
        let done = previous.iter().flat_map(|report| &report.runs).filter(|run| run.state == SweepState::Done).count();
        output::print(&planning(names.len() - done));
    }
    let (request, reservation) = reserve_devices(request)?;
    request.remote.missing_notes().for_each(|note| output::print_note(&note));
    let workers = args.workers.or(previous.and_then(|report| report.workers));
    let devices = SharedDevices::find(&request, reservation, workers)?;
    let opened = match before {
        Some(OpenedSweep { folder, configs, mut report }) => {
            report.requested_devices = request.run.devices.clone();
            report.requested_budget = args.budget.clone().or(report.requested_budget);
            report.devices = devices.initial_report();
            report.retries = args.retries.unwrap_or(report.retries);
            report.workers = args.workers.or(report.workers);
            OpenedSweep { folder, configs, report }
        }
        None => SweepFolder::create(args, requested, &request, &devices)?,
    };
    let mut sweep = ActiveSweep::plan(args, devices, opened, injections)?;
    if let Some(note) = contention_note() {
        output::print_note(&note);
    }
    // Until here a signal ends the program immediately, because no run has started.
    let notes = if args.quiet { Notes::OnTerminal } else { Notes::Always };
    let stop = signals::install(SweepSignals { resume_hint: sweep.resume_hint() }, notes)?;
    sweep.run_to_end(&stop)?;
    output::print(&table(&sweep.report));
    outcome(&sweep, stop.load(Ordering::Relaxed))
}

/// The reaction of a sweep to signals. Its workers stop when this process ends.
struct SweepSignals {
    resume_hint: String,
}

impl OnSignal for SweepSignals {
    fn finish(&self) -> Option<String> {
        Some("the step of each run".to_owned())
    }

    fn end(&self) -> Option<String> {
        Some(self.resume_hint.clone())
    }
}

/// Prints the demand of one run as JSON, for the sweep that started this process.
fn print_demand(args: &SweepArgs, path: PathBuf) -> Result<Exit, Failure> {
    let started_at = Instant::now();
    let devices = args.devices.clone().unwrap_or_default();
    let request = RunConfig::load(Some(&path), &devices::device_settings(&devices))?.into();
    let request = with_hub_files(request, HubNeed::Run, true)?;
    let demand = demand(with_remote_devices(request)?, started_at)?;
    output::print_json(&serde_json::to_string(&demand).expect("plain data has a JSON form"));
    Ok(Exit::Done)
}

/// A sweep that is under way.
struct ActiveSweep<'a> {
    args: &'a SweepArgs,
    devices: SharedDevices,
    folder: SweepFolder,
    runs: Vec<RunConfig>,
    /// Demand of each run; `None` for runs that are done or cannot run.
    demands: Vec<Option<RunDemands>>,
    report: SweepReport,
    schedule: SweepScheduler,
    workers: Vec<Worker>,
    injections: Vec<(String, String)>,
    /// Whether each device was lost at the last check.
    lost: Vec<bool>,
    /// Time until which each device gets no run, because a run ended early there; `None` for a device without such a
    /// run.
    cooldowns: Vec<Option<Instant>>,
    started_at: Instant,
}

impl<'a> ActiveSweep<'a> {
    /// Determines the demands of all runs that are not done, and predicts the schedule.
    fn plan(
        args: &'a SweepArgs,
        devices: SharedDevices,
        opened: OpenedSweep,
        injections: Vec<(String, String)>,
    ) -> Result<ActiveSweep<'a>, Failure> {
        let OpenedSweep { folder, configs: runs, mut report } = opened;
        let open: Vec<usize> = (0..runs.len()).filter(|&run| report.runs[run].state != SweepState::Done).collect();
        let measured = devices.measure_demands(&folder, &runs, &open, &report)?;
        let mut demands: Vec<Option<RunDemands>> = (0..runs.len()).map(|_| None).collect();
        for (&run, result) in open.iter().zip(measured) {
            let row = &mut report.runs[run];
            (row.state, row.pid, row.exit) = (SweepState::Waiting, None, None);
            row.reason = None;
            match result {
                Ok(demand) if demand.fits() => demands[run] = Some(demand),
                Ok(demand) => {
                    (row.state, row.exit) = (SweepState::DoesNotFit, Some(Exit::DoesNotFit as i32));
                    row.budget_bytes = demand.smallest_budget();
                    row.reason = Some(demand.refusal(&devices));
                }
                Err(failure) => {
                    (row.state, row.exit) = (SweepState::Failed, Some(failure.exit as i32));
                    row.reason = Some(failure.message);
                }
            }
        }
        let capacities = devices.capacities();
        let mut sweep = ActiveSweep {
            lost: vec![false; capacities.len()],
            cooldowns: vec![None; capacities.len()],
            schedule: SweepScheduler::new(capacities, devices.host, vec![Job::default(); runs.len()]),
            args,
            devices,
            folder,
            runs,
            demands,
            report,
            workers: Vec::new(),
            injections,
            started_at: Instant::now(),
        };
        let mut unconstrained = Vec::new();
        for run in 0..sweep.runs.len() {
            let progress = sweep.folder.progress(&sweep.report.runs[run].name);
            if sweep.demands[run].is_some() {
                sweep.schedule.requeue(run, sweep.job(run, &progress, false));
                unconstrained.push(sweep.job(run, &progress, true));
            }
        }
        sweep.report.predicted_seconds = makespan(&simulate(sweep.schedule.clone()));
        sweep.report.lower_bound_seconds = makespan_lower_bound(sweep.devices.capacities().len(), &unconstrained);
        Ok(sweep)
    }

    /// Returns the rest of a run, from its newest checkpoint on, as a job for the scheduler. With `unconstrained`, a
    /// step takes as long as with the whole memory of the device.
    fn job(&self, run: usize, progress: &RunProgress, unconstrained: bool) -> Job {
        let demands = self.demands[run].as_ref().map_or(&[][..], |demands| &demands.per_device);
        let demand = |demand: &Option<RunDemand>| {
            let demand = demand.as_ref().filter(|demand| demand.fits)?;
            let step = if unconstrained { demand.fastest_step_seconds } else { demand.step_seconds };
            Some(self.rest_demand(run, progress, demand, step))
        };
        Job { demands: demands.iter().map(demand).collect() }
    }

    /// Returns the demand of the rest of a run on one device, on which a step takes `step_seconds`.
    fn rest_demand(&self, run: usize, progress: &RunProgress, demand: &RunDemand, step_seconds: f64) -> Demand {
        let seconds = run_seconds(&self.runs[run], demand, step_seconds, progress.saved_step);
        Demand {
            bytes: demand.bytes,
            host_bytes: demand.host_bytes,
            work_seconds: seconds.work,
            fixed_seconds: seconds.fixed,
        }
    }

    /// Starts and restarts runs until none is running or waiting, or until all have stopped after a signal.
    fn run_to_end(&mut self, stop: &StopFlag) -> Result<(), Failure> {
        self.started_at = Instant::now();
        self.write()?;
        let mut last_scheduled: Option<Instant> = None;
        let mut stopping = false;
        // Set while all waiting runs need lost devices.
        let mut stalled_since: Option<Instant> = None;
        loop {
            if stop.load(Ordering::Relaxed) && !stopping {
                stopping = true;
                self.workers.iter_mut().for_each(Worker::stop);
            }
            if !stopping && last_scheduled.is_none_or(|last_scheduled| last_scheduled.elapsed() > SCHEDULE_INTERVAL) {
                last_scheduled = Some(Instant::now());
                self.update_lost_devices();
                for assigned in self.schedule.start_ready(self.started_at.elapsed().as_secs_f64()) {
                    self.start(&assigned)?;
                }
            }
            let mut index = 0;
            while index < self.workers.len() {
                match self.workers[index].try_exit() {
                    Some(ended) => {
                        let worker = self.workers.swap_remove(index);
                        stopping |= stop.load(Ordering::Relaxed);
                        self.end(&worker, &ended, stopping)?;
                        last_scheduled = None;
                    }
                    None => index += 1,
                }
            }
            if self.workers.is_empty() && (stopping || self.schedule.waiting().is_empty()) {
                break;
            }
            let is_stalled = self.workers.is_empty() && self.schedule.is_waiting_for_lost_devices();
            stalled_since = is_stalled.then(|| stalled_since.unwrap_or_else(Instant::now));
            if stalled_since
                .is_some_and(|since| self.devices.is_cluster_lost() || since.elapsed() > LOST_DEVICE_TIMEOUT)
            {
                self.give_up();
                break;
            }
            thread::sleep(POLL_INTERVAL);
        }
        for row in self.report.runs.iter_mut().filter(|row| row.state == SweepState::Waiting) {
            row.state = SweepState::Stopped;
        }
        if !stopping {
            let demands: Vec<&RunDemands> = self.demands.iter().flatten().collect();
            // A resumed sweep may have used a device before it was interrupted.
            let used = |name: &str| self.report.runs.iter().any(|row| row.device.as_deref() == Some(name));
            let devices = self.report.devices.iter_mut().enumerate();
            let unused = devices.filter(|(_, device)| device.workers == 0 && !used(&device.name));
            unused.for_each(|(number, device)| device.reason = self.devices.unused_reason(number, &demands));
        }
        self.write()
    }

    /// Updates which devices are lost, and tells the scheduler which devices can get runs.
    fn update_lost_devices(&mut self) {
        for device in 0..self.lost.len() {
            let lost = self.devices.is_lost(device);
            if lost != self.lost[device] {
                let now = if lost { "lost; its runs wait for it or continue on other devices" } else { "back" };
                output::print_note(&format!("{} is {now}", self.devices.name(device)));
            }
            self.lost[device] = lost;
            self.schedule.set_lost(device, lost || self.cooldowns[device].is_some_and(|until| Instant::now() < until));
        }
    }

    /// Records that the waiting runs cannot start because their devices are lost.
    fn give_up(&mut self) {
        let lost = (0..self.lost.len()).filter(|&device| self.lost[device]).map(|device| self.devices.name(device));
        let reason = format!("waits for lost devices: {}", lost.collect::<Vec<_>>().join(", "));
        for row in self.report.runs.iter_mut().filter(|row| row.state == SweepState::Waiting) {
            (row.reason, row.exit) = (Some(reason.clone()), Some(Exit::Stopped as i32));
        }
    }

    /// Starts the training process of a scheduled run, and records it in the report.
    fn start(&mut self, assigned: &plimsoll_plan::sweep::ScheduledRun) -> Result<(), Failure> {
        let row = &mut self.report.runs[assigned.job];
        let share = f64::from(assigned.time_shares) / f64::from(self.devices.capacities()[assigned.device].time_shares);
        row.state = SweepState::Running;
        row.device = Some(self.devices.name(assigned.device).to_owned());
        row.budget_bytes = Some(assigned.bytes);
        row.share = Some(share);
        row.predicted_seconds = Some(row.seconds + assigned.end - assigned.start);
        row.started = Some(assigned.start);
        let is_first_start = row.retries == 0;
        let injections = self.injections.iter().filter(|(name, _)| is_first_start && *name == row.name);
        let start = WorkerStart {
            run: assigned.job,
            device: assigned.device,
            settings: self.devices.worker_settings(assigned),
            environment: self.devices.worker_environment(assigned.device),
            injections: injections.map(|(_, place)| place.clone()).collect(),
        };
        let worker = Worker::start(start, &self.folder, &row.name)?;
        row.pid = Some(worker.pid());
        if !self.args.quiet {
            output::print(&started(row));
        }
        self.workers.push(worker);
        let device = &mut self.report.devices[assigned.device];
        let here = || self.schedule.running().iter().filter(|other| other.device == assigned.device);
        device.peak_reserved_bytes = device.peak_reserved_bytes.max(here().map(|worker| worker.bytes).sum());
        device.workers = device.workers.max(here().count() as u32);
        self.write()
    }

    /// Records the end of a training process and decides whether its run is restarted. While the sweep is `stopping`
    /// after a signal, no run is.
    fn end(&mut self, worker: &Worker, exit: &WorkerExit, stopping: bool) -> Result<(), Failure> {
        let run = worker.run;
        self.schedule.finish(run);
        // The process crashed, or the run stopped by itself: the device may be lost.
        if matches!(exit.code, None | Some(1 | 4)) && self.devices.is_remote(worker.device) {
            self.cooldowns[worker.device] = Some(Instant::now() + FAILED_DEVICE_COOLDOWN);
        }
        let retries = self.report.retries;
        let row = &mut self.report.runs[run];
        let progress = self.folder.progress(&row.name);
        row.pid = None;
        row.exit = exit.code;
        row.seconds += worker.seconds();
        row.steps = progress.steps;
        (row.loss, row.eval_loss, row.recoveries) = (progress.loss, progress.eval_loss, progress.recoveries);
        let memory = progress.result.as_ref().and_then(|result| result.memory.first());
        row.measured_bytes = memory.and_then(|memory| memory.measured_bytes);
        row.predicted_bytes = memory.map(|memory| memory.predicted_bytes);
        let done = progress.result.iter().filter(|result| result.status == RunStatus::Done);
        for fault in done.flat_map(|result| &result.faults_not_triggered) {
            output::print_note(&format!("{}: {fault} was not triggered, because the run never got there", row.name));
        }
        row.reason = exit.reason.clone();
        row.state = match exit.code {
            Some(0) => SweepState::Done,
            _ if stopping => SweepState::Stopped,
            // Invalid input: a restart would fail in the same way.
            Some(2) => SweepState::Failed,
            _ if row.retries < retries => SweepState::Waiting,
            Some(3) => SweepState::DoesNotFit,
            Some(4) => SweepState::Stopped,
            _ => SweepState::Failed,
        };
        if row.state == SweepState::Waiting {
            row.retries += 1;
            let does_not_fit = exit.code == Some(Exit::DoesNotFit as i32);
            if let Some(demands) = self.demands[run].as_mut().filter(|_| does_not_fit) {
                demands.increase(worker.device, DEMAND_INCREMENT);
            }
            let job = self.job(run, &progress, false);
            if !self.schedule.requeue(run, job) {
                let row = &mut self.report.runs[run];
                row.state = if does_not_fit { SweepState::DoesNotFit } else { SweepState::Failed };
            }
        }
        if !self.args.quiet {
            output::print(&ended(&self.report.runs[run]));
        }
        self.write()
    }

    /// Returns the command that resumes the sweep.
    fn resume_command(&self) -> String {
        format!("plimsoll sweep --resume {}", shell_word(&self.folder.name()))
    }

    /// Returns the hint with the command that resumes the sweep.
    fn resume_hint(&self) -> String {
        format!("to resume: {}", self.resume_command())
    }

    /// Writes the report.
    fn write(&mut self) -> Result<(), Failure> {
        self.report.seconds = self.started_at.elapsed().as_secs_f64();
        self.folder.write(&self.report, self.args.json.as_deref())
    }
}

/// Returns [`Exit::Done`] if all runs are done. Otherwise fails with the exit code of the first run that is not done,
/// or after a signal with that of a stopped run. A run that a signal ended counts as stopped.
fn outcome(sweep: &ActiveSweep, stopped: bool) -> Result<Exit, Failure> {
    let runs = &sweep.report.runs;
    let Some(first) = runs.iter().find(|run| run.state != SweepState::Done) else { return Ok(Exit::Done) };
    let unfinished = runs.iter().filter(|run| run.state != SweepState::Done).count();
    let message = format!("{unfinished} of {} not done", format_count(runs.len(), "run"));
    let exit = match (stopped, first.exit) {
        (true, _) => Exit::Stopped,
        (_, Some(1)) => Exit::Bug,
        (_, Some(2)) => Exit::Input,
        (_, Some(3)) => Exit::DoesNotFit,
        _ => Exit::Stopped,
    };
    let hint = match exit {
        Exit::Input => format!("correct what is reported above, then: {}", sweep.resume_command()),
        Exit::DoesNotFit => format!("with more memory: {}", sweep.resume_command()),
        _ => sweep.resume_hint(),
    };
    Err(Failure { exit, message, hints: vec![hint] })
}

/// Smallest host budget of a worker: the syntax of `--devices` has no budget of zero.
const MIN_BYTES: Bytes = Bytes(1);
