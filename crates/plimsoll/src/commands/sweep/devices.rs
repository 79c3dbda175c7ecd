//! The devices of a sweep: their capacity, the demands of the runs on each of them, and the settings of a worker.
//!
//! Which run starts where and when is decided in `plimsoll_plan::sweep`.

use super::folder::SweepFolder;
use super::{MIN_BYTES, PROGRAM};
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Exit, Failure, RunDemand, SweepDevice, SweepReport};
use plimsoll_device::probe::Memory;
use plimsoll_plan::device_request::{DeviceRequest, DevicesRequest};
use plimsoll_plan::sweep::{DeviceCapacity, ScheduledRun};
use plimsoll_train::config::{RunConfig, setting};
use plimsoll_train::planning::demand::demand_key;
use plimsoll_train::remote::ray::{RESERVATION_ENV, Reservation};
use plimsoll_train::resolve::{RunRequest, check_requested_devices, resolve_devices, write_example};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of equal parts that the time of a device is divided into. The CPU is divided by threads instead.
const TIME_PARTS: u32 = 1000;

/// Lowest pace that a run gets on a virtual device, in CPU cores.
const MIN_PACE: f64 = 0.01;

/// A device that the runs of a sweep share.
struct SharedDevice {
    spec: DeviceSpec,
    /// The device in the notation of `--devices`, as the user named it.
    request: DeviceRequest,
    capacity: DeviceCapacity,
}

impl SharedDevice {
    /// Creates a device of a sweep. `asked` are all devices that the user requested. At most `workers` runs share the
    /// device at a time; `None` sets no limit.
    fn new(spec: DeviceSpec, asked: &[DeviceRequest], workers: Option<u32>) -> SharedDevice {
        let named = asked.iter().find(|asked| asked.name() == spec.name).cloned();
        let request = named.unwrap_or_else(|| match spec.name.strip_prefix("cuda:").and_then(|n| n.parse().ok()) {
            Some(index) => DeviceRequest::Cuda { index: Some(index), budget: None },
            None => DeviceRequest::Cpu { budget: None },
        });
        let (time_shares, min_time_shares) = match request.local_device() {
            DeviceRequest::Virtual { pace, .. } => {
                (TIME_PARTS, ((MIN_PACE / pace * f64::from(TIME_PARTS)).ceil() as u32).clamp(1, TIME_PARTS))
            }
            DeviceRequest::Cpu { .. } => (spec.threads, 1),
            _ => (TIME_PARTS, 1),
        };
        let max_workers = workers.unwrap_or(u32::MAX);
        let capacity = DeviceCapacity { line: spec.budget, time_shares, min_time_shares, max_workers };
        SharedDevice { spec, request, capacity }
    }

    /// Returns the device for the report of a sweep in which no run has started yet.
    fn initial_report(&self) -> SweepDevice {
        SweepDevice {
            name: self.spec.name.clone(),
            simulated: self.spec.simulated(),
            budget_bytes: self.spec.budget,
            peak_reserved_bytes: Bytes::ZERO,
            workers: 0,
            reason: None,
        }
    }
}

/// All devices of a sweep, with the memory of the host.
pub struct SharedDevices {
    devices: Vec<SharedDevice>,
    /// Reservation of the devices in the cluster; `None` if all devices are in this machine.
    reservation: Option<Reservation>,
    /// Load line of the host memory, which all runs share.
    pub host: Bytes,
}

/// The resources that one run needs, per device.
pub struct RunDemands {
    /// Demand on each device of the sweep. `None` where the run must not run: other devices need fewer lossy rungs, or
    /// the cluster lost the device during the measurement.
    pub per_device: Vec<Option<RunDemand>>,
}

impl RunDemands {
    /// Returns whether the run fits on at least one device.
    pub fn fits(&self) -> bool {
        self.per_device.iter().flatten().any(|demand| demand.fits)
    }

    /// Returns the smallest budget under which a run that now fits on no device would fit on one. `None` if the run
    /// must run on no device at all.
    pub fn smallest_budget(&self) -> Option<Bytes> {
        self.per_device.iter().flatten().map(|demand| demand.bytes).min()
    }

    /// Describes why the run fits on none of the devices.
    pub fn refusal(&self, shared: &SharedDevices) -> String {
        let pairs = self.per_device.iter().zip(&shared.devices);
        let pairs = pairs.filter_map(|(demand, device)| Some((demand.as_ref()?, device)));
        let devices = pairs.map(|(demand, device)| {
            let DeviceSpec { name, budget, .. } = &device.spec;
            format!("{name} has {budget}, the run needs at least {} there", demand.bytes)
        });
        format!("fits on none of the devices: {}", devices.collect::<Vec<_>>().join("; "))
    }

    /// Adds `more` bytes to the demand on a device, after the run did not fit there. Does nothing for a device without
    /// a demand.
    pub fn increase(&mut self, device: usize, more: Bytes) {
        if let Some(demand) = &mut self.per_device[device] {
            demand.bytes += more;
        }
    }

    /// Keeps, of the devices on which the run fits, those with the same lossy rungs as the device with the fewest. The
    /// choice of the device must not change the experiment.
    fn on_least_lossy_devices(mut self) -> RunDemands {
        let fitting = self.per_device.iter().flatten().filter(|demand| demand.fits);
        if let Some(fewest) = fitting.map(|demand| demand.rungs.clone()).min_by_key(Vec::len) {
            let keep = |demand: &RunDemand| !demand.fits || demand.rungs == fewest;
            self.per_device.iter_mut().for_each(|demand| *demand = demand.take().filter(keep));
        }
        self
    }
}

impl SharedDevices {
    /// Checks the requested devices without opening any.
    ///
    /// # Errors
    /// Paper devices, or a device that this machine does not have.
    pub fn check(file: &RunRequest) -> Result<(), Failure> {
        if file.devices().has_paper_devices() {
            return Err(Failure::input("--devices: a sweep cannot run on paper devices, which only exist for plans")
                .hint("to plan for them: plimsoll plan RUN.toml --devices ..."));
        }
        check_requested_devices(file)
    }

    /// Resolves the requested devices; without a request, those of this machine. Hands `reservation` over to the runs
    /// of the sweep. At most `workers` runs share a device at a time; `None` sets no limit.
    ///
    /// # Errors
    /// Devices that are not present or not free.
    pub fn find(
        file: &RunRequest,
        reservation: Option<Reservation>,
        workers: Option<u32>,
    ) -> Result<SharedDevices, Failure> {
        let request = file.devices();
        // Each device is resolved alone: a run of a sweep uses one device, so links between devices do not matter.
        let alone = |asked: &DeviceRequest| resolve_alone(file, &request, asked);
        let specs = match &*request.devices {
            [] => resolve_devices(file)?,
            several => several.iter().map(alone).collect::<Result<Vec<_>, _>>()?.concat(),
        };
        reservation.iter().try_for_each(Reservation::begin_runs)?;
        // The memory of local virtual devices is host memory.
        let is_local_virtual = |spec: &&DeviceSpec| spec.kind == DeviceKind::Virtual && spec.remote_host().is_none();
        let virtual_bytes: Bytes = specs.iter().filter(is_local_virtual).map(|spec| spec.budget).sum();
        let host = file.host_budget().load_line(Memory::read().free.saturating_sub(virtual_bytes));
        let devices = specs.into_iter().map(|spec| SharedDevice::new(spec, &request.devices, workers)).collect();
        Ok(SharedDevices { devices, reservation, host })
    }

    /// Returns whether the device with this index belongs to the cluster.
    pub fn is_remote(&self, device: usize) -> bool {
        self.reservation.is_some() && self.devices[device].spec.remote_host().is_some()
    }

    /// Returns whether the device with this index belongs to the cluster and is lost now.
    pub fn is_lost(&self, device: usize) -> bool {
        self.is_remote(device) && self.reservation_of(device).is_none()
    }

    /// Returns whether the whole cluster is lost.
    pub fn is_cluster_lost(&self) -> bool {
        self.reservation.as_ref().is_some_and(Reservation::is_lost)
    }

    fn reservation_of(&self, device: usize) -> Option<String> {
        self.reservation.as_ref().and_then(|reservation| reservation.placement_group(self.name(device)))
    }

    /// Returns the environment variable that tells the process of a run the reservation of its device in the cluster.
    /// `None` for a device of this machine. The value is empty for a lost device, so that the process does not reserve
    /// one itself.
    pub fn worker_environment(&self, device: usize) -> Option<(&'static str, String)> {
        self.is_remote(device).then(|| (RESERVATION_ENV, self.reservation_of(device).unwrap_or_default()))
    }

    /// Returns the capacity of each device.
    pub fn capacities(&self) -> Vec<DeviceCapacity> {
        self.devices.iter().map(|device| device.capacity).collect()
    }

    /// Returns the name of a device.
    pub fn name(&self, device: usize) -> &str {
        &self.devices[device].spec.name
    }

    /// Explains why a device got none of the runs, which have these demands. `None` if `demands` is empty and the
    /// device is not lost.
    pub fn unused_reason(&self, device: usize, demands: &[&RunDemands]) -> Option<String> {
        if self.is_lost(device) {
            return Some("it was lost".to_owned());
        }
        let here = || demands.iter().filter_map(|demands| demands.per_device[device].as_ref());
        if self.is_remote(device) && here().next().is_none() {
            return Some("the demands of the runs could not be measured there".to_owned());
        }
        let line = self.devices[device].spec.budget;
        match here().map(|demand| demand.bytes).min() {
            _ if demands.is_empty() => None,
            _ if here().any(|demand| demand.fits) => {
                Some("the runs are predicted to end earlier on the other devices".to_owned())
            }
            Some(least) if here().count() == demands.len() => {
                Some(format!("no run fits there: it has {line}, the smallest run needs {least}"))
            }
            _ => Some("the runs need fewer lossy rungs on the other devices".to_owned()),
        }
    }

    /// Returns the kind of the first device, which decides `train.precision = "auto"` for all runs.
    pub fn first_kind(&self) -> DeviceKind {
        self.devices[0].spec.kind
    }

    /// Returns the devices for the report of a sweep in which no run has started yet.
    pub fn initial_report(&self) -> Vec<SweepDevice> {
        self.devices.iter().map(SharedDevice::initial_report).collect()
    }

    /// Returns the `KEY=VALUE` settings that limit the process of a run to its share of the device and of the host
    /// memory.
    pub fn worker_settings(&self, worker: &ScheduledRun) -> Vec<String> {
        let device = &self.devices[worker.device];
        let text = self.worker_request(worker.device, worker.bytes, worker.host_bytes, worker.time_shares);
        let mut settings = device_settings(&text);
        if device.spec.kind == DeviceKind::Cpu && worker.time_shares < device.capacity.time_shares {
            settings.push(format!("run.threads={}", worker.time_shares));
        }
        settings
    }

    /// Formats a share of a device as a value of `--devices`. It consists of `bytes` of device memory, `host` bytes of
    /// host memory, and `parts` of the device's equal time parts (threads for a CPU).
    fn worker_request(&self, device: usize, bytes: Bytes, host: Bytes, parts: u32) -> String {
        let device = &self.devices[device];
        let mut requested = device.request.clone();
        requested.set_budget(Budget::Amount(bytes));
        if let DeviceRequest::Virtual { pace, .. } = requested.local_device_mut() {
            *pace *= f64::from(parts) / f64::from(device.capacity.time_shares);
        }
        let host = Some(Budget::Amount(host.max(MIN_BYTES)));
        DevicesRequest { devices: vec![requested], host, ..DevicesRequest::default() }.to_string()
    }

    /// Determines the demand of each open run on each device. `open` holds the indices in `runs` of the runs that are
    /// not done. Runs with equal demands are planned once.
    ///
    /// Each run is planned for each device in a process of its own, because charges outside the arena can only be
    /// measured there. With a GPU of this machine, only one such process runs at a time.
    ///
    /// # Errors
    /// The data of the built-in example cannot be written. An error of a run is in that run's entry of the result.
    pub fn measure_demands(
        &self,
        folder: &SweepFolder,
        runs: &[RunConfig],
        open: &[usize],
        report: &SweepReport,
    ) -> Result<Vec<Result<RunDemands, Failure>>, Failure> {
        let keys: Vec<String> = open.iter().map(|&run| demand_key(&runs[run])).collect();
        let mut distinct: Vec<usize> = Vec::new();
        for index in 0..keys.len() {
            if !distinct.iter().any(|&other| keys[other] == keys[index]) {
                distinct.push(index);
            }
        }
        // Written here once, because otherwise several processes would write the example at the same time.
        distinct.iter().try_for_each(|&index| write_example(&mut runs[open[index]].clone().into()))?;
        let devices = self.devices.len();
        let next = AtomicUsize::new(0);
        let answers: Mutex<Vec<Option<Result<RunDemand, Failure>>>> = Mutex::new(vec![None; distinct.len() * devices]);
        // A GPU is measured by its free memory, so only one process at a time may use it.
        let gpu = |device: &SharedDevice| device.spec.kind == DeviceKind::Cuda && device.spec.remote_host().is_none();
        let gpus = self.devices.iter().any(gpu);
        let processes = if gpus { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
        // Each measurement uses the whole reservation of a device in the cluster, so only one runs there at a time.
        let remote_locks: Vec<Mutex<()>> = (0..devices).map(|_| Mutex::new(())).collect();
        thread::scope(|scope| {
            for _ in 0..processes {
                let thread = thread::Builder::new().spawn_scoped(scope, || {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let (Some(&index), device) = (distinct.get(number / devices), number % devices) else { return };
                        let name = &report.runs[open[index]].name;
                        let remote_lock = self
                            .is_remote(device)
                            .then(|| remote_locks[device].lock().expect("no thread panics while it holds the lock"));
                        let answer = self.measure_demand(folder, name, device);
                        drop(remote_lock);
                        answers.lock().expect("no thread panics while it holds the lock")[number] = Some(answer);
                    }
                });
                // The other threads take over its measurements.
                if thread.is_err() {
                    break;
                }
            }
        });
        let answers = answers.into_inner().expect("no thread panics while it holds the lock");
        let answers: Vec<Result<RunDemand, Failure>> = answers
            .into_iter()
            .map(|answer| answer.unwrap_or_else(|| Err(Failure::no_thread("to measure a run"))))
            .collect();
        let demands_of = |key: &String| {
            let index = distinct.iter().position(|&other| keys[other] == *key).expect("every key is among them");
            self.demands_of_run(&answers[index * devices..(index + 1) * devices])
        };
        Ok(keys.iter().map(demands_of).collect())
    }

    /// Combines the measured demands of a run, one answer per device. On a device of the cluster, a failed measurement
    /// only excludes the device; on another device, the failure is returned.
    fn demands_of_run(&self, answers: &[Result<RunDemand, Failure>]) -> Result<RunDemands, Failure> {
        let mut per_device = Vec::new();
        for (device, answer) in answers.iter().enumerate() {
            per_device.push(match answer {
                Ok(demand) => Some(self.round_up_to_mib(device, demand)),
                // A device that was lost during the measurement is not used.
                Err(_) if self.is_remote(device) => None,
                Err(failure) => return Err(failure.clone()),
            });
        }
        match &answers[0] {
            Err(failure) if per_device.iter().all(Option::is_none) => Err(failure.clone()),
            _ => Ok(RunDemands { per_device }.on_least_lossy_devices()),
        }
    }

    /// Rounds the bytes of a demand up to whole MiB, the unit of reservations, but not above the device's load line. A
    /// demand that does not fit, or that is not on a device of the cluster, stays unchanged.
    fn round_up_to_mib(&self, device: usize, demand: &RunDemand) -> RunDemand {
        let whole = Bytes::mib(demand.bytes.0.div_ceil(1 << 20));
        let bytes = if self.is_remote(device) && demand.fits {
            whole.min(self.devices[device].capacity.line)
        } else {
            demand.bytes
        };
        RunDemand { bytes, ..demand.clone() }
    }

    /// Determines the demand of one run on one device in a process of its own, which measures the charges.
    fn measure_demand(&self, folder: &SweepFolder, name: &str, device: usize) -> Result<RunDemand, Failure> {
        let capacity = self.devices[device].capacity;
        let cannot_start = |error: std::io::Error| Failure::bug(format!("a process cannot be started: {error}"));
        let output = Command::new(PROGRAM)
            .args([
                "sweep",
                "--devices",
                &self.worker_request(device, capacity.line, self.host, capacity.time_shares),
                "--demand",
            ])
            .arg(folder.run_file(name))
            .envs(self.worker_environment(device))
            .stdin(Stdio::null())
            .output()
            .map_err(cannot_start)?;
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
            .map_err(|error| Failure::bug(format!("the demand that a process printed cannot be read: {error}")))
    }
}

/// Resolves one device of a request without the others.
fn resolve_alone(
    file: &RunRequest,
    request: &DevicesRequest,
    asked: &DeviceRequest,
) -> Result<Vec<DeviceSpec>, Failure> {
    let mut alone = file.clone();
    alone.remote = alone.remote.with_devices(DevicesRequest { devices: vec![asked.clone()], ..request.clone() });
    resolve_devices(&alone)
}

/// Returns `KEY=VALUE` settings with which a run uses only `devices`, without a fallback to the CPU.
pub fn device_settings(devices: &str) -> Vec<String> {
    vec![setting("run.devices", devices), "run.fallback=none".to_owned()]
}
