//! The devices of a sweep: what there is, what runs need of it, and what a worker is given, in words for its process.

use super::folder::Folder;
use super::{LEAST, PROGRAM};
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Exit, Failure, RunDemand, SweepDevice, SweepReport};
use plimsoll_device::probe::Memory;
use plimsoll_plan::request::{DeviceRequest, DevicesRequest};
use plimsoll_plan::sweep::{Room, Worker};
use plimsoll_train::config::{RunFile, setting};
use plimsoll_train::planning::demand::same_demand;
use plimsoll_train::remote::ray::{KEPT, Kept};
use plimsoll_train::resolve::{check_asked, devices, write_example};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// How finely the time of a device is divided.
const PARTS: u32 = 1000;

/// The slowest virtual device that there is, in cores.
const PACE_LEAST: f64 = 0.01;

/// A device, and how the user named it.
struct Place {
    spec: DeviceSpec,
    asked: DeviceRequest,
    room: Room,
}

/// The devices, and the host beside them.
pub struct Places {
    places: Vec<Place>,
    /// What is kept of those that are a cluster's.
    kept: Option<Kept>,
    /// The load line of the host.
    pub host: Bytes,
}

/// What a run needs, device by device.
pub struct Needs {
    /// By the number of the device; none where it shall not be done.
    pub of: Vec<Option<RunDemand>>,
}

impl Needs {
    /// Whether it fits anywhere.
    pub fn fits(&self) -> bool {
        self.of.iter().flatten().any(|needs| needs.fits)
    }

    /// The least that would do on any device, where it fits on none.
    pub fn least(&self) -> Option<Bytes> {
        self.of.iter().flatten().map(|needs| needs.bytes).min()
    }

    /// Why it fits nowhere.
    pub fn refusal(&self, places: &Places) -> String {
        let pairs = self.of.iter().zip(&places.places).filter_map(|(needs, place)| Some((needs.as_ref()?, place)));
        let devices = pairs.map(|(needs, place)| {
            let DeviceSpec { name, budget, .. } = &place.spec;
            format!("{name} has {budget}, the least that would do there is {}", needs.bytes)
        });
        format!("fits on none of the devices: {}", devices.collect::<Vec<_>>().join("; "))
    }

    /// It did not do with what it was given on a device.
    pub fn ask_for_more(&mut self, device: usize, more: Bytes) {
        if let Some(needs) = &mut self.of[device] {
            needs.bytes += more;
        }
    }

    /// Keeps it from devices that it would lose more on: where it runs is no part of the experiment.
    fn where_it_loses_least(mut self) -> Needs {
        let fitting = self.of.iter().flatten().filter(|needs| needs.fits);
        if let Some(least) = fitting.map(|needs| needs.rungs.clone()).min_by_key(Vec::len) {
            let stays = |needs: &RunDemand| !needs.fits || needs.rungs == least;
            self.of.iter_mut().for_each(|needs| *needs = needs.take().filter(stays));
        }
        self
    }
}

impl Places {
    /// What can be said of the devices that are asked for before any is looked at.
    ///
    /// # Errors
    /// Devices that are not real, or more than this machine has.
    pub fn check(file: &RunFile) -> Result<(), Failure> {
        if file.devices().on_paper() {
            return Err(Failure::input("--devices: a sweep runs, and devices on paper can only be planned for")
                .hint("plimsoll plan RUN.toml --devices ... plans for them"));
        }
        check_asked(file)
    }

    /// The devices that are asked for, or found.
    ///
    /// # Errors
    /// Devices that are not here, or not free.
    pub fn find(file: &RunFile, kept: Option<Kept>, workers: Option<u32>) -> Result<Places, Failure> {
        let request = file.devices();
        // Each by itself: a run of a sweep has one, and what is between them matters to nobody.
        let alone = |asked: &DeviceRequest| {
            let mut alone = file.clone();
            alone.elsewhere = alone.elsewhere.of(DevicesRequest { devices: vec![asked.clone()], ..request.clone() });
            devices(&alone)
        };
        let specs = match &*request.devices {
            [] => devices(file)?,
            several => several.iter().map(alone).collect::<Result<Vec<_>, _>>()?.concat(),
        };
        kept.iter().try_for_each(Kept::for_runs)?;
        // Virtual devices are this machine's memory, too.
        let own = |spec: &&DeviceSpec| spec.kind == DeviceKind::Virtual && spec.host().is_none();
        let virtual_bytes: Bytes = specs.iter().filter(own).map(|spec| spec.budget).sum();
        let host = file.host().of(Memory::read().free.saturating_sub(virtual_bytes));
        let place = |spec: DeviceSpec| {
            let named = request.devices.iter().find(|asked| asked.name() == spec.name).cloned();
            let asked = named.unwrap_or_else(|| match spec.name.strip_prefix("cuda:").and_then(|n| n.parse().ok()) {
                Some(index) => DeviceRequest::Cuda { index: Some(index), budget: None },
                None => DeviceRequest::Cpu { budget: None },
            });
            let (parts, parts_least) = match asked.at_home() {
                DeviceRequest::Virtual { pace, .. } => {
                    (PARTS, ((PACE_LEAST / pace * f64::from(PARTS)).ceil() as u32).clamp(1, PARTS))
                }
                DeviceRequest::Cpu { .. } => (spec.threads, 1),
                _ => (PARTS, 1),
            };
            let room = Room { line: spec.budget, parts, parts_least, workers: workers.unwrap_or(u32::MAX) };
            Place { spec, asked, room }
        };
        Ok(Places { places: specs.into_iter().map(place).collect(), kept, host })
    }

    /// Whether a device is a cluster's.
    pub fn away(&self, device: usize) -> bool {
        self.kept.is_some() && self.places[device].spec.host().is_some()
    }

    /// Whether a device of a cluster is not there now.
    pub fn lost(&self, device: usize) -> bool {
        self.away(device) && self.kept_of(device).is_none()
    }

    /// Whether the cluster is gone, with all of its devices.
    pub fn cut_off(&self) -> bool {
        self.kept.as_ref().is_some_and(Kept::cut_off)
    }

    fn kept_of(&self, device: usize) -> Option<String> {
        self.kept.as_ref().and_then(|kept| kept.of(self.name(device)))
    }

    /// What else a process is told that works on a device. Of one that is lost it has to know that it asks for nothing itself.
    pub fn environment(&self, device: usize) -> Option<(&'static str, String)> {
        self.away(device).then(|| (KEPT, self.kept_of(device).unwrap_or_default()))
    }

    /// As the packing sees them.
    pub fn rooms(&self) -> Vec<Room> {
        self.places.iter().map(|place| place.room).collect()
    }

    /// A device's name.
    pub fn name(&self, device: usize) -> &str {
        &self.places[device].spec.name
    }

    /// Why a device got none of the runs that need this.
    pub fn unused(&self, device: usize, needs: &[&Needs]) -> Option<String> {
        if self.lost(device) {
            return Some("it was lost".to_owned());
        }
        let here = || needs.iter().filter_map(|needs| needs.of[device].as_ref());
        if self.away(device) && here().next().is_none() {
            return Some("it did not answer what the runs need there".to_owned());
        }
        let line = self.places[device].spec.budget;
        match here().map(|needs| needs.bytes).min() {
            _ if needs.is_empty() => None,
            _ if here().any(|needs| needs.fits) => Some("the runs end earlier on the others, by prediction".to_owned()),
            Some(least) if here().count() == needs.len() => {
                Some(format!("no run fits there: it has {line}, the least that would do is {least}"))
            }
            _ => Some("the runs would lose more there: on others they take fewer lossy rungs".to_owned()),
        }
    }

    /// What the first of them is: it decides what `train.precision = "auto"` means for all runs.
    pub fn first(&self) -> DeviceKind {
        self.places[0].spec.kind
    }

    /// As they are reported, before anything has run.
    pub fn reported(&self) -> Vec<SweepDevice> {
        let device = |place: &Place| SweepDevice {
            name: place.spec.name.clone(),
            simulated: place.spec.simulated(),
            budget_bytes: place.spec.budget,
            given_bytes: Bytes::ZERO,
            workers: 0,
            why: None,
        };
        self.places.iter().map(device).collect()
    }

    /// What a worker is given, as settings.
    pub fn settings(&self, worker: &Worker) -> Vec<String> {
        let place = &self.places[worker.device];
        let text = self.request(worker.device, worker.bytes, worker.host_bytes, worker.parts);
        let mut settings = settings_of(&text);
        if place.spec.kind == DeviceKind::Cpu && worker.parts < place.room.parts {
            settings.push(format!("run.threads={}", worker.parts));
        }
        settings
    }

    /// So much of a device and of the host, as `--devices` says it.
    fn request(&self, device: usize, bytes: Bytes, host: Bytes, parts: u32) -> String {
        let place = &self.places[device];
        let mut asked = place.asked.clone();
        asked.give(Budget::Amount(bytes));
        if let DeviceRequest::Virtual { pace, .. } = asked.at_home_mut() {
            *pace *= f64::from(parts) / f64::from(place.room.parts);
        }
        DevicesRequest { devices: vec![asked], host: Some(Budget::Amount(host.max(LEAST))), file: None }.to_string()
    }

    /// Asks for each of these runs what it needs of each device; runs that need the same are asked for once. Each answer
    /// comes from a process of its own, as a run is one: what is held beside an arena can only be measured there.
    ///
    /// # Errors
    /// Processes that cannot be started. What is wrong with a run is its own answer.
    pub fn ask(
        &self,
        folder: &Folder,
        runs: &[RunFile],
        open: &[usize],
        report: &SweepReport,
    ) -> Result<Vec<Result<Needs, Failure>>, Failure> {
        let keys: Vec<String> = open.iter().map(|&run| same_demand(&runs[run])).collect();
        let mut distinct: Vec<usize> = Vec::new();
        for index in 0..keys.len() {
            if !distinct.iter().any(|&other| keys[other] == keys[index]) {
                distinct.push(index);
            }
        }
        // Otherwise several of these processes would, at once.
        distinct.iter().try_for_each(|&index| write_example(&mut runs[open[index]].clone()))?;
        let devices = self.places.len();
        let next = AtomicUsize::new(0);
        let answers: Mutex<Vec<Option<Result<RunDemand, Failure>>>> = Mutex::new(vec![None; distinct.len() * devices]);
        // GPUs are measured by what is free on them: one at a time.
        let gpu = |place: &Place| place.spec.kind == DeviceKind::Cuda && place.spec.host().is_none();
        let gpus = self.places.iter().any(gpu);
        let at_once = if gpus { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
        // All of what is kept of a cluster's device is asked for by each.
        let turns: Vec<Mutex<()>> = (0..devices).map(|_| Mutex::new(())).collect();
        thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let (Some(&index), device) = (distinct.get(number / devices), number % devices) else { return };
                        let name = &report.runs[open[index]].name;
                        let turn = self.away(device).then(|| turns[device].lock().expect("nobody panics with it"));
                        let answer = self.ask_one(folder, name, device);
                        drop(turn);
                        answers.lock().expect("nobody panics with it")[number] = Some(answer);
                    }
                });
            }
        });
        let answers = answers.into_inner().expect("nobody panics with it");
        let answers: Vec<Result<RunDemand, Failure>> =
            answers.into_iter().map(|answer| answer.expect("all were asked")).collect();
        let needs = |key: &String| -> Result<Needs, Failure> {
            let index = distinct.iter().position(|&other| keys[other] == *key).expect("every key is among them");
            let mut of = Vec::new();
            for (device, answer) in answers[index * devices..(index + 1) * devices].iter().enumerate() {
                of.push(match answer {
                    Ok(demand) => Some(self.in_whole_mib(device, demand)),
                    // The others do without one that is lost meanwhile.
                    Err(_) if self.away(device) => None,
                    Err(failure) => return Err(failure.clone()),
                });
            }
            match answers[index * devices].clone() {
                Err(failure) if of.iter().all(Option::is_none) => Err(failure),
                _ => Ok(Needs { of }.where_it_loses_least()),
            }
        };
        Ok(keys.iter().map(needs).collect())
    }

    /// What is kept of a cluster's device is counted in whole MiB.
    fn in_whole_mib(&self, device: usize, demand: &RunDemand) -> RunDemand {
        let whole = Bytes::mib(demand.bytes.0.div_ceil(1 << 20));
        let bytes =
            if self.away(device) && demand.fits { whole.min(self.places[device].room.line) } else { demand.bytes };
        RunDemand { bytes, ..demand.clone() }
    }

    fn ask_one(&self, folder: &Folder, name: &str, device: usize) -> Result<RunDemand, Failure> {
        let room = self.places[device].room;
        let cannot = |error: std::io::Error| Failure::bug(format!("a process cannot be started: {error}"));
        let output = Command::new(PROGRAM)
            .args(["sweep", "--devices", &self.request(device, room.line, self.host, room.parts), "--demand"])
            .arg(folder.run_file(name))
            .envs(self.environment(device))
            .stdin(Stdio::null())
            .output()
            .map_err(cannot)?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let line = text.lines().find_map(|line| line.strip_prefix("error: "));
            let message = line.map_or_else(|| format!("planning ended with {}", output.status), str::to_owned);
            let exit = match output.status.code() {
                Some(2) => Exit::Input,
                Some(4) => Exit::Stopped,
                _ => Exit::Bug,
            };
            return Err(Failure { exit, message, hints: vec![] });
        }
        serde_json::from_slice(&output.stdout)
            .map_err(|error| Failure::bug(format!("a process answered what cannot be read: {error}")))
    }
}

/// That a run is done on these devices or not at all.
pub fn settings_of(devices: &str) -> Vec<String> {
    vec![setting("run.devices", devices), "run.fallback=none".to_owned()]
}
