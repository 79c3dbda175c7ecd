//! `plimsoll sweep`: several runs on one set of devices, packed by bytes. Every run is a process of this program with a
//! folder of its own, under a load line of its own. Here is the order of things; `places` knows devices and what workers
//! are given of them, `folder` what lies on the disk, `worker` a process.

mod folder;
mod places;
mod worker;

use super::ray::{kept, reached};
use crate::args::SweepArgs;
use crate::{say, signals};
use folder::{Folder, Known};
use places::{Needs, Places};
use plimsoll_core::{Bytes, Exit, Failure, RunStatus, SweepReport, SweepState, counted};
use plimsoll_plan::sweep::{Job, Sweep, bound, makespan, simulate};
use plimsoll_train::config::{MemorySection, RunFile};
use plimsoll_train::planning::demand::{MORE_BYTES, demand, run_seconds};
use plimsoll_train::resolve::disturbed;
use plimsoll_watch::sweep::{ended, planning, started, table};
use plimsoll_watch::text::shell_word;
use signals::StopFlag;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use worker::{Ended, Start, Worker};

/// This very program, also after its file has been replaced by a newer one.
const PROGRAM: &str = "/proc/self/exe";

/// How often it is looked whether a worker has ended.
const LOOK: Duration = Duration::from_millis(20);

/// A device of a cluster on which a run ended early gets no other for so long: that it is lost is said later.
const RESTS: Duration = Duration::from_secs(10);

/// Where all that wait do so for devices that are lost, one of these has so long to come back.
const COMES_BACK: Duration = Duration::from_secs(60);

/// How often room is looked at where nothing has happened: a worker that is late makes waiting for it less worth.
const LOOK_AROUND: Duration = Duration::from_secs(1);

/// Packs the runs, sees them through, and says what came of each. One that fails does not keep the others from ending.
///
/// # Errors
/// What is wrong with the runs or the devices; after all have been tried, that some are not done.
pub fn run(args: &SweepArgs) -> Result<Exit, Failure> {
    if let Some(path) = &args.demand {
        return tell_demand(args, path.clone());
    }
    let injections = args.injections()?;
    let before = args.resume.as_deref().map(|path| Folder::again(path, Folder::report(path)?)).transpose()?;
    if let Some((folder, _, report)) = &before
        && report.runs.iter().all(|run| run.state == SweepState::Done)
    {
        folder.write(report, args.json.as_deref())?;
        say::note("all runs are done already; nothing was changed");
        say::answer(&table(report));
        return Ok(Exit::Done);
    }
    let known = before.as_ref().map(|(_, _, report)| report);
    let asked = if before.is_none() { folder::asked(args)? } else { vec![] };
    let named = known.iter().flat_map(|report| &report.runs).map(|run| &run.name);
    let names: Vec<&str> = named.chain(asked.iter().map(|(name, _)| name)).map(String::as_str).collect();
    if let Some((name, _)) = injections.iter().find(|(name, _)| !names.contains(&name.as_str())) {
        let failure = Failure::input(format!("--inject-oom: there is no run `{name}`"));
        return Err(failure.hint(format!("the runs are {}", names.join(", "))));
    }
    for (name, file) in &asked {
        let (said, own) = (&file.memory, MemorySection::default());
        if (said.line(), said.host) != (own.line(), own.host) {
            say::note(&format!(
                "{name}: its load lines are the sweep's to give, [memory] budget and host are not used"
            ));
        }
    }
    let devices = args.devices(known.map(|report| &*report.asked))?;
    Places::check(&devices)?;
    if !args.quiet {
        let done = known.iter().flat_map(|report| &report.runs).filter(|run| run.state == SweepState::Done).count();
        say::answer(&planning(names.len() - done));
    }
    let (devices, kept) = kept(devices)?;
    devices.elsewhere.missed().for_each(|missed| say::note(&missed));
    let places = Places::find(&devices, kept, args.workers.or(known.and_then(|report| report.workers)))?;
    let (folder, runs, report) = match before {
        Some((folder, runs, mut report)) => {
            report.asked = devices.run.devices.clone();
            report.devices = places.reported();
            report.retries = args.retries.unwrap_or(report.retries);
            report.workers = args.workers.or(report.workers);
            (folder, runs, report)
        }
        None => Folder::make(args, asked, &devices, &places)?,
    };
    let mut going = Going::plan(args, places, folder, runs, report, injections)?;
    if let Some(disturbed) = disturbed() {
        say::note(&disturbed);
    }
    // Not earlier: until here nothing is lost when a signal ends the program at once.
    let stop = signals::install().map_err(|error| Failure::bug(format!("signals cannot be caught: {error}")))?;
    going.see_through(&stop)?;
    say::answer(&table(&going.report));
    outcome(&going, stop.load(Ordering::Relaxed))
}

/// What a sweep asks a process of its own.
fn tell_demand(args: &SweepArgs, path: PathBuf) -> Result<Exit, Failure> {
    let began = Instant::now();
    let devices = args.devices.clone().unwrap_or_default();
    let needs = demand(reached(RunFile::load(Some(&path), &places::settings_of(&devices))?)?, began)?;
    say::answer(&(serde_json::to_string(&needs).expect("plain data has a JSON form") + "\n"));
    Ok(Exit::Done)
}

/// A sweep that is under way.
struct Going<'a> {
    args: &'a SweepArgs,
    places: Places,
    folder: Folder,
    runs: Vec<RunFile>,
    /// By the number of the run; none of those that are done or cannot be.
    needs: Vec<Option<Needs>>,
    report: SweepReport,
    sweep: Sweep,
    workers: Vec<Worker>,
    injections: Vec<(String, String)>,
    /// By the number of the device: whether it was lost when it was last looked at, and until when it gets no run.
    lost: Vec<bool>,
    rests: Vec<Option<Instant>>,
    began: Instant,
}

impl<'a> Going<'a> {
    /// Asks what each run needs of each device, and packs.
    fn plan(
        args: &'a SweepArgs,
        places: Places,
        folder: Folder,
        runs: Vec<RunFile>,
        mut report: SweepReport,
        injections: Vec<(String, String)>,
    ) -> Result<Going<'a>, Failure> {
        let open: Vec<usize> = (0..runs.len()).filter(|&run| report.runs[run].state != SweepState::Done).collect();
        let asked = places.ask(&folder, &runs, &open, &report)?;
        let mut needs: Vec<Option<Needs>> = (0..runs.len()).map(|_| None).collect();
        for (&run, answer) in open.iter().zip(asked) {
            let row = &mut report.runs[run];
            (row.state, row.pid, row.exit) = (SweepState::Waiting, None, None);
            row.why = None;
            match answer {
                Ok(found) if found.fits() => needs[run] = Some(found),
                Ok(found) => {
                    (row.state, row.exit) = (SweepState::DoesNotFit, Some(Exit::DoesNotFit as i32));
                    row.predicted_bytes = found.least();
                    row.why = Some(found.refusal(&places));
                }
                Err(failure) => {
                    (row.state, row.exit) = (SweepState::Failed, Some(failure.exit as i32));
                    row.why = Some(failure.message);
                }
            }
        }
        let rooms = places.rooms();
        let mut going = Going {
            lost: vec![false; rooms.len()],
            rests: vec![None; rooms.len()],
            sweep: Sweep::new(rooms, places.host, vec![Job::default(); runs.len()]),
            args,
            places,
            folder,
            runs,
            needs,
            report,
            workers: Vec::new(),
            injections,
            began: Instant::now(),
        };
        let mut fastest = Vec::new();
        for run in 0..going.runs.len() {
            let known = going.folder.known(&going.report.runs[run].name);
            if going.needs[run].is_some() {
                going.sweep.again(run, going.job(run, &known, false));
                fastest.push(going.job(run, &known, true));
            }
        }
        going.report.predicted_seconds = makespan(&simulate(going.sweep.clone()));
        going.report.bound_seconds = bound(going.places.rooms().len(), &fastest);
        Ok(going)
    }

    /// A run as it is packed, after what it has done already; with the whole memory of a device to itself where it is to
    /// be the fastest.
    fn job(&self, run: usize, known: &Known, fastest: bool) -> Job {
        let needs = self.needs[run].as_ref().map_or(&[][..], |needs| &needs.of);
        let demand = |needs: &Option<plimsoll_core::RunDemand>| {
            let needs = needs.as_ref().filter(|needs| needs.fits)?;
            let step = if fastest { needs.fastest_step_seconds } else { needs.step_seconds };
            let seconds = run_seconds(&self.runs[run], needs, step, known.saved);
            Some(plimsoll_plan::sweep::Demand {
                bytes: needs.bytes,
                host_bytes: needs.host_bytes,
                work_seconds: seconds.work,
                fixed_seconds: seconds.fixed,
            })
        };
        Job { demands: needs.iter().map(demand).collect() }
    }

    /// Until nothing runs and nothing waits, or until all have stopped.
    fn see_through(&mut self, stop: &StopFlag) -> Result<(), Failure> {
        self.began = Instant::now();
        self.write()?;
        let mut looked: Option<Instant> = None;
        let mut stopping = false;
        // Since when all that wait do so for devices that are lost.
        let mut waited: Option<Instant> = None;
        loop {
            if stop.load(Ordering::Relaxed) && !stopping {
                stopping = true;
                self.workers.iter_mut().for_each(Worker::stop);
            }
            if !stopping && looked.is_none_or(|looked| looked.elapsed() > LOOK_AROUND) {
                looked = Some(Instant::now());
                self.look_at_devices();
                for given in self.sweep.start(self.began.elapsed().as_secs_f64()) {
                    self.start(&given)?;
                }
            }
            let mut index = 0;
            while index < self.workers.len() {
                match self.workers[index].ended() {
                    Some(ended) => {
                        let worker = self.workers.swap_remove(index);
                        stopping |= stop.load(Ordering::Relaxed);
                        self.end(&worker, &ended, stopping)?;
                        looked = None;
                    }
                    None => index += 1,
                }
            }
            if self.workers.is_empty() && (stopping || self.sweep.waiting().is_empty()) {
                break;
            }
            let in_vain = self.workers.is_empty() && self.sweep.waits_for_lost();
            waited = in_vain.then(|| waited.unwrap_or_else(Instant::now));
            if waited.is_some_and(|since| self.places.cut_off() || since.elapsed() > COMES_BACK) {
                self.give_up();
                break;
            }
            thread::sleep(LOOK);
        }
        for row in self.report.runs.iter_mut().filter(|row| row.state == SweepState::Waiting) {
            row.state = SweepState::Stopped;
        }
        if !stopping {
            let needs: Vec<&Needs> = self.needs.iter().flatten().collect();
            // Before this start one may have been used.
            let used = |name: &str| self.report.runs.iter().any(|row| row.device.as_deref() == Some(name));
            let devices = self.report.devices.iter_mut().enumerate();
            let unused = devices.filter(|(_, device)| device.workers == 0 && !used(&device.name));
            unused.for_each(|(number, device)| device.why = self.places.unused(number, &needs));
        }
        self.write()
    }

    /// What starts now finds these there.
    fn look_at_devices(&mut self) {
        for device in 0..self.lost.len() {
            let lost = self.places.lost(device);
            if lost != self.lost[device] {
                let now = if lost { "lost: what ran there is done elsewhere, or waits for it" } else { "there again" };
                say::note(&format!("{} is {now}", self.places.name(device)));
            }
            self.lost[device] = lost;
            self.sweep.set_lost(device, lost || self.rests[device].is_some_and(|until| Instant::now() < until));
        }
    }

    /// What waits for devices that do not come back is left for another time.
    fn give_up(&mut self) {
        let lost = (0..self.lost.len()).filter(|&device| self.lost[device]).map(|device| self.places.name(device));
        let why = format!("it waits for devices that are lost: {}", lost.collect::<Vec<_>>().join(", "));
        for row in self.report.runs.iter_mut().filter(|row| row.state == SweepState::Waiting) {
            (row.why, row.exit) = (Some(why.clone()), Some(Exit::Stopped as i32));
        }
    }

    fn start(&mut self, given: &plimsoll_plan::sweep::Worker) -> Result<(), Failure> {
        let row = &mut self.report.runs[given.job];
        let share = f64::from(given.parts) / f64::from(self.places.rooms()[given.device].parts);
        row.state = SweepState::Running;
        row.device = Some(self.places.name(given.device).to_owned());
        row.predicted_bytes = Some(given.bytes);
        row.share = Some(share);
        row.predicted_seconds = Some(row.seconds + given.end - given.start);
        row.started = Some(given.start);
        let first = row.retries == 0;
        let places = self.injections.iter().filter(|(name, _)| first && *name == row.name);
        let start = Start {
            run: given.job,
            device: given.device,
            settings: self.places.settings(given),
            environment: self.places.environment(given.device),
            injections: places.map(|(_, place)| place.clone()).collect(),
        };
        let worker = Worker::start(start, &self.folder, &row.name)?;
        row.pid = Some(worker.pid());
        if !self.args.quiet {
            say::answer(&started(row));
        }
        self.workers.push(worker);
        let device = &mut self.report.devices[given.device];
        let here = || self.sweep.running().iter().filter(|other| other.device == given.device);
        device.given_bytes = device.given_bytes.max(here().map(|worker| worker.bytes).sum());
        device.workers = device.workers.max(here().count() as u32);
        self.write()
    }

    /// What is done about a run whose process has ended.
    fn end(&mut self, worker: &Worker, ended_how: &Ended, stopping: bool) -> Result<(), Failure> {
        let run = worker.run;
        self.sweep.end(run);
        // It crashed, or stopped by itself.
        if matches!(ended_how.code, None | Some(1 | 4)) && self.places.away(worker.device) {
            self.rests[worker.device] = Some(Instant::now() + RESTS);
        }
        let retries = self.report.retries;
        let row = &mut self.report.runs[run];
        let known = self.folder.known(&row.name);
        row.pid = None;
        row.exit = ended_how.code;
        row.seconds += worker.seconds();
        row.steps = known.steps;
        (row.loss, row.eval_loss, row.retreats) = (known.loss, known.eval_loss, known.retreats);
        row.measured_bytes =
            known.result.as_ref().and_then(|result| result.memory.first()).and_then(|m| m.measured_bytes);
        let done = known.result.iter().filter(|result| result.status == RunStatus::Done);
        for never in done.flat_map(|result| &result.not_rehearsed) {
            say::note(&format!("{}: {never} was never reached, so nothing was rehearsed", row.name));
        }
        row.why = ended_how.why.clone();
        row.state = match ended_how.code {
            Some(0) => SweepState::Done,
            _ if stopping => SweepState::Stopped,
            // What was wrong will be wrong again.
            Some(2) => SweepState::Failed,
            _ if row.retries < retries => SweepState::Waiting,
            Some(3) => SweepState::DoesNotFit,
            Some(4) => SweepState::Stopped,
            _ => SweepState::Failed,
        };
        if row.state == SweepState::Waiting {
            row.retries += 1;
            let refused = ended_how.code == Some(Exit::DoesNotFit as i32);
            if let Some(needs) = self.needs[run].as_mut().filter(|_| refused) {
                needs.ask_for_more(worker.device, MORE_BYTES);
            }
            let job = self.job(run, &known, false);
            if !self.sweep.again(run, job) {
                let row = &mut self.report.runs[run];
                row.state = if refused { SweepState::DoesNotFit } else { SweepState::Failed };
            }
        }
        if !self.args.quiet {
            say::answer(&ended(&self.report.runs[run]));
        }
        self.write()
    }

    fn write(&mut self) -> Result<(), Failure> {
        self.report.seconds = self.began.elapsed().as_secs_f64();
        self.folder.write(&self.report, self.args.json.as_deref())
    }
}

/// How a sweep is told to have ended.
fn outcome(going: &Going, stopped: bool) -> Result<Exit, Failure> {
    let runs = &going.report.runs;
    let Some(first) = runs.iter().find(|run| run.state != SweepState::Done) else { return Ok(Exit::Done) };
    let left = runs.iter().filter(|run| run.state != SweepState::Done).count();
    let hint = format!("what is not done goes on with: plimsoll sweep --resume {}", shell_word(&going.folder.name()));
    let message = format!("{left} of {} not done", counted(runs.len(), "run"));
    let exit = match (stopped, first.exit) {
        (true, _) => Exit::Stopped,
        (_, Some(1)) => Exit::Bug,
        (_, Some(2)) => Exit::Input,
        (_, Some(3)) => Exit::DoesNotFit,
        _ => Exit::Stopped,
    };
    Err(Failure { exit, message, hints: vec![hint] })
}

/// Bytes that no worker can do without: a line of zero cannot be written down.
const LEAST: Bytes = Bytes(1);
