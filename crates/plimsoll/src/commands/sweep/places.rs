//! The devices of a sweep: what there is, what runs need of it, and what a worker is given, in words for its process.

use super::folder::Folder;
use super::{LEAST, PROGRAM};
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Exit, Failure, RunDemand, SweepDevice, SweepReport};
use plimsoll_device::probe::Memory;
use plimsoll_plan::request::{DeviceRequest, DevicesRequest};
use plimsoll_plan::sweep::{Room, Worker};
use plimsoll_train::resolve::{check_asked, devices};
use plimsoll_train::run::demand::same_demand;
use plimsoll_train::run_file::{RunFile, setting};
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
    pub fn find(file: &RunFile, workers: Option<u32>) -> Result<Places, Failure> {
        let request = file.devices();
        let specs = devices(file)?;
        // Virtual devices are this machine's memory, too.
        let virtual_bytes: Bytes =
            specs.iter().filter(|spec| spec.kind == DeviceKind::Virtual).map(|spec| spec.budget).sum();
        let host = file.host().of(Memory::read().free.saturating_sub(virtual_bytes));
        let place = |spec: DeviceSpec| {
            let named = request.devices.iter().find(|asked| asked.name() == spec.name).cloned();
            let asked = named.unwrap_or_else(|| match spec.name.strip_prefix("cuda:").and_then(|n| n.parse().ok()) {
                Some(index) => DeviceRequest::Cuda { index: Some(index), budget: None },
                None => DeviceRequest::Cpu { budget: None },
            });
            let (parts, parts_least) = match &asked {
                DeviceRequest::Virtual { pace, .. } => {
                    (PARTS, ((PACE_LEAST / pace * f64::from(PARTS)).ceil() as u32).clamp(1, PARTS))
                }
                DeviceRequest::Cpu { .. } => (spec.threads, 1),
                _ => (PARTS, 1),
            };
            let room = Room { line: spec.budget, parts, parts_least, workers: workers.unwrap_or(u32::MAX) };
            Place { spec, asked, room }
        };
        Ok(Places { places: specs.into_iter().map(place).collect(), host })
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
        let here = || needs.iter().filter_map(|needs| needs.of[device].as_ref());
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
        if let DeviceRequest::Virtual { pace, .. } = &mut asked {
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
        let devices = self.places.len();
        let next = AtomicUsize::new(0);
        let answers: Mutex<Vec<Option<Result<RunDemand, Failure>>>> = Mutex::new(vec![None; distinct.len() * devices]);
        // GPUs are measured by what is free on them: one at a time.
        let gpus = self.places.iter().any(|place| place.spec.kind == DeviceKind::Cuda);
        let at_once = if gpus { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
        thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let (Some(&index), device) = (distinct.get(number / devices), number % devices) else { return };
                        let name = &report.runs[open[index]].name;
                        let answer = self.ask_one(folder, name, device);
                        answers.lock().expect("nobody panics with it")[number] = Some(answer);
                    }
                });
            }
        });
        let answers = answers.into_inner().expect("nobody panics with it");
        let needs = |key: &String| -> Result<Needs, Failure> {
            let index = distinct.iter().position(|&other| keys[other] == *key).expect("every key is among them");
            let mine = &answers[index * devices..(index + 1) * devices];
            let mine: Result<Vec<RunDemand>, Failure> =
                mine.iter().map(|answer| answer.clone().expect("all were asked")).collect();
            Ok(Needs { of: mine?.into_iter().map(Some).collect() }.where_it_loses_least())
        };
        Ok(keys.iter().map(needs).collect())
    }

    fn ask_one(&self, folder: &Folder, name: &str, device: usize) -> Result<RunDemand, Failure> {
        let room = self.places[device].room;
        let cannot = |error: std::io::Error| Failure::bug(format!("a process cannot be started: {error}"));
        let output = Command::new(PROGRAM)
            .args(["sweep", "--devices", &self.request(device, room.line, self.host, room.parts), "--demand"])
            .arg(folder.run_file(name))
            .stdin(Stdio::null())
            .output()
            .map_err(cannot)?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let line = text.lines().find_map(|line| line.strip_prefix("error: "));
            let message = line.map_or_else(|| format!("planning ended with {}", output.status), str::to_owned);
            let exit = if output.status.code() == Some(2) { Exit::Input } else { Exit::Bug };
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
