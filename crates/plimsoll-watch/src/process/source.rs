//! Reads a process: its memory from NVML and `/proc`, and the devices of this machine.

use super::history::History;
use super::{CPU, DeviceUse, MemoryUse, PROCESS_VERSION, ProcessReading, ProcessState};
use crate::text::seconds;
use plimsoll_core::{Budget, Bytes, DeviceKind, Failure};
use plimsoll_device::machine::{DeviceInfo, Machine};
use plimsoll_device::probe::sees_all_processes;
use plimsoll_device::process::ProcessStatus;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds of a minute.
const MINUTE: f64 = 60.0;

/// Takes readings of one process, one after the other.
pub struct ProcessSource {
    pid: u32,
    /// Time of the process's start, by which it is told from a later one with the same id; `None` for a process of which
    /// only NVML knows, such as one outside this container.
    start_ticks: Option<u64>,
    name: Option<String>,
    window: f64,
    gpu: History,
    host: History,
    by_device: BTreeMap<String, History>,
}

impl ProcessSource {
    /// Returns a source of readings of the process `pid`. Its growth is computed over `window` seconds.
    ///
    /// # Errors
    /// There is no such process: neither this system nor NVML lists it.
    pub fn open(pid: u32, window: f64) -> Result<ProcessSource, Failure> {
        let status = ProcessStatus::read(Path::new("/"), pid);
        if status.is_none() && !is_on_gpu(&Machine::read(), pid) {
            let failure = Failure::input(format!("there is no process {pid}: neither this system nor a GPU lists it"));
            return Err(failure
                .hint("list the processes on GPUs: plimsoll devices")
                .hint("list all processes: ps -e; process ids differ between a container and its host"));
        }
        Ok(ProcessSource {
            pid,
            start_ticks: status.map(|status| status.start_ticks),
            name: None,
            window,
            gpu: History::new(window),
            host: History::new(window),
            by_device: BTreeMap::new(),
        })
    }

    /// Returns whether the process has ended, as far as this system tells without asking a driver.
    pub fn has_ended(&self) -> bool {
        self.start_ticks.is_some() && self.status().is_none()
    }

    /// Takes a reading now.
    pub fn take(&mut self) -> ProcessReading {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let (machine, status) = (Machine::read(), self.status());
        let is_running = match self.start_ticks {
            Some(_) => status.is_some(),
            None => is_on_gpu(&machine, self.pid),
        };
        let readings = Readings {
            at,
            pid: self.pid,
            status: status.filter(|_| is_running),
            is_running,
            sees_all_processes: sees_all_processes(Path::new("/")),
            machine: &machine,
        };
        self.record(&readings)
    }

    /// Returns the status of the process; `None` if it has ended, or if only NVML knows it.
    fn status(&self) -> Option<ProcessStatus> {
        let status = ProcessStatus::read(Path::new("/"), self.pid)?;
        (Some(status.start_ticks) == self.start_ticks).then_some(status)
    }

    /// Adds readings to the histories, and puts the result together.
    fn record(&mut self, readings: &Readings) -> ProcessReading {
        let Readings { at, pid, status, is_running, machine, .. } = readings;
        let resident = status.as_ref().and_then(|status| status.resident_bytes);
        self.gpu.push(*at, readings.gpu_bytes());
        self.host.push(*at, resident);
        let name = readings.name_on_gpu().or_else(|| status.as_ref().map(|status| status.name.clone()));
        self.name = name.or(self.name.take());
        let mut devices = Vec::new();
        for device in &machine.devices {
            let held = if device.kind == DeviceKind::Cpu { resident } else { readings.bytes_on(device) };
            let history = self.by_device.entry(device.name.clone()).or_insert_with(|| History::new(self.window));
            history.push(*at, held);
            devices.push(device_use(device, held, history.peak()));
        }
        let (gpu, host) = (self.gpu.memory_use(), self.host.memory_use());
        ProcessReading {
            version: PROCESS_VERSION,
            at: *at,
            pid: *pid,
            name: self.name.clone(),
            state: if *is_running { ProcessState::Running } else { ProcessState::Ended },
            warnings: readings.warnings(&gpu, &host, &devices),
            gpu,
            host,
            devices,
        }
    }
}

/// The readings of one moment.
struct Readings<'a> {
    /// Seconds since the Unix epoch.
    at: f64,
    pid: u32,
    /// The process in `/proc`; `None` after its end, or if only NVML knows it.
    status: Option<ProcessStatus>,
    is_running: bool,
    /// Whether this process sees all processes of the machine; `None` if the system does not tell.
    sees_all_processes: Option<bool>,
    machine: &'a Machine,
}

impl Readings<'_> {
    /// Returns the memory of the process on all GPUs; `None` if no GPU lists it, or one does not report its memory.
    fn gpu_bytes(&self) -> Option<Bytes> {
        let listed = self.machine.devices.iter().filter(|device| self.is_running && is_on(device, self.pid));
        let held: Vec<Option<Bytes>> = listed.map(|device| self.bytes_on(device)).collect();
        if held.is_empty() { None } else { held.into_iter().sum() }
    }

    /// Returns the memory of the process on a GPU; `None` if it is unknown.
    fn bytes_on(&self, device: &DeviceInfo) -> Option<Bytes> {
        let mut processes = device.gpu.iter().flat_map(|gpu| &gpu.processes).filter(|_| self.is_running);
        processes.find(|process| process.pid == self.pid)?.held_bytes
    }

    /// Returns the name of the process that NVML reports.
    fn name_on_gpu(&self) -> Option<String> {
        let mut processes =
            self.machine.devices.iter().filter_map(|device| device.gpu.as_ref()).flat_map(|gpu| &gpu.processes);
        processes.find(|process| self.is_running && process.pid == self.pid && process.name.is_some())?.name.clone()
    }

    /// Returns the conditions that need attention, most urgent first.
    fn warnings(&self, gpu: &MemoryUse, host: &MemoryUse, devices: &[DeviceUse]) -> Vec<String> {
        let gpus = devices.iter().filter(|device| device.name != CPU);
        let fullest = gpus.max_by_key(|device| device.held_bytes);
        let cpu = devices.iter().find(|device| device.name == CPU);
        let mut warnings: Vec<String> =
            [leak_warning("GPU memory", gpu, fullest), leak_warning("host memory", host, cpu)]
                .into_iter()
                .flatten()
                .collect();
        let is_listed = self.is_running && is_on_gpu(self.machine, self.pid);
        if is_listed && gpu.held_bytes.is_none() {
            warnings.push("the driver does not report the GPU memory of this process, as on WSL".to_owned());
        }
        let has_gpu = self.machine.devices.iter().any(|device| device.gpu.is_some());
        if self.is_running && has_gpu && self.sees_all_processes == Some(false) {
            let text = match is_listed {
                true => {
                    "this container may have other process ids than NVML: the GPU memory may be that of another process"
                }
                false => "this container may have other process ids than NVML, so the process may hold GPU memory",
            };
            warnings.push(text.to_owned());
        }
        warnings
    }
}

/// Returns whether a GPU lists the process `pid`.
fn is_on(device: &DeviceInfo, pid: u32) -> bool {
    device.gpu.as_ref().is_some_and(|gpu| gpu.processes.iter().any(|process| process.pid == pid))
}

/// Returns whether any GPU lists the process `pid`.
fn is_on_gpu(machine: &Machine, pid: u32) -> bool {
    machine.devices.iter().any(|device| is_on(device, pid))
}

/// Returns a device with the memory of the process on it, now and at its peak.
fn device_use(device: &DeviceInfo, held: Option<Bytes>, peak: Option<Bytes>) -> DeviceUse {
    let is_known = device.gpu.as_ref().is_none_or(|gpu| gpu.held_bytes.is_some());
    let free = Some(device.memory_free_bytes).filter(|_| is_known);
    let run_bytes = free.map(|_| device.defaults.budget_bytes).filter(|line| *line > Bytes::ZERO);
    // A device that no run can use has no line at any time.
    let line_with = |free: Bytes| run_bytes.map(|_| Budget::DEVICE.load_line(free));
    let now = free.zip(held);
    DeviceUse {
        name: device.name.clone(),
        model: device.model.clone(),
        total_bytes: device.memory_total_bytes,
        free_bytes: free,
        held_bytes: held,
        peak_bytes: peak,
        run_bytes,
        run_bytes_at_peak: now
            .zip(peak)
            .and_then(|((free, held), peak)| line_with(free.saturating_sub(peak.saturating_sub(held)))),
        run_bytes_without: now.and_then(|(free, held)| line_with((free + held).min(device.memory_total_bytes))),
    }
}

/// Returns a warning if memory grows steadily; `device` is the one that fills first.
fn leak_warning(place: &str, memory: &MemoryUse, device: Option<&DeviceUse>) -> Option<String> {
    let (growth, covered) = memory.growth_bytes_per_minute.zip(memory.growth_seconds).filter(|_| memory.is_leak)?;
    let mut text = format!(
        "{place} grows by {} per minute, measured over {}: perhaps a leak",
        Bytes(growth as u64),
        seconds(covered)
    );
    if let Some((device, free)) = device.and_then(|device| Some((device, device.free_bytes?))) {
        let left = free.0 as f64 / growth * MINUTE;
        text += &format!("; {free} free on {} last {} at that rate", device.name, seconds(left));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_device::cuda::nvml::{Condition, Process};
    use plimsoll_device::machine::{DefaultLimits, Gpu, Nvidia};

    /// Returns a device with 24 GiB of memory. A GPU has a list of processes.
    fn device(name: &str, free: Bytes, processes: Option<Vec<Process>>) -> DeviceInfo {
        let gpu = processes.map(|processes| Gpu {
            family: "Ampere",
            compute_capability: "8.6".to_owned(),
            uuid: name.to_owned(),
            bus: String::new(),
            held_bytes: Some(Bytes::gib(24).saturating_sub(free)),
            reserved_bytes: Some(Bytes::ZERO),
            processes,
            pcie: None,
            condition: Condition::default(),
            unusable: None,
        });
        DeviceInfo {
            name: name.to_owned(),
            kind: if gpu.is_some() { DeviceKind::Cuda } else { DeviceKind::Cpu },
            model: "Example".to_owned(),
            memory_total_bytes: Bytes::gib(24),
            memory_free_bytes: free,
            memory_bound_by: String::new(),
            cores: 8,
            threads: 8,
            features: vec![],
            caches: vec![],
            defaults: DefaultLimits { budget_bytes: Budget::DEVICE.load_line(free), threads: 8, reason: String::new() },
            gpu,
        }
    }

    /// Returns a machine with a processor and these GPUs.
    fn machine(gpus: Vec<DeviceInfo>) -> Machine {
        let nvidia = Nvidia {
            driver: None,
            cuda: None,
            error: None,
            failure: None,
            libraries: vec![],
            cards_on_bus: gpus.len(),
        };
        Machine { devices: [vec![device("cpu", Bytes::gib(20), None)], gpus].concat(), nvidia }
    }

    fn process(held: Option<Bytes>) -> Process {
        Process { pid: 7, name: Some("python3 a.py".to_owned()), held_bytes: held, draws: false }
    }

    fn readings(at: f64, machine: &Machine) -> Readings<'_> {
        let status = ProcessStatus { name: "python3".to_owned(), resident_bytes: Some(Bytes::gib(1)), start_ticks: 1 };
        Readings { at, pid: 7, status: Some(status), is_running: true, sees_all_processes: Some(true), machine }
    }

    fn source() -> ProcessSource {
        ProcessSource {
            pid: 7,
            start_ticks: Some(1),
            name: None,
            window: 60.0,
            gpu: History::new(60.0),
            host: History::new(60.0),
            by_device: BTreeMap::new(),
        }
    }

    #[test]
    fn memory_on_several_gpus_is_summed() {
        let mut source = source();
        let two = |bytes: [Option<Bytes>; 2]| {
            let gpu = |name, held| device(name, Bytes::gib(10), Some(vec![process(held)]));
            machine(vec![gpu("cuda:0", bytes[0]), gpu("cuda:1", bytes[1])])
        };
        let first = source.record(&readings(100.0, &two([Some(Bytes::gib(6)), Some(Bytes::gib(2))])));
        assert_eq!((first.gpu.held_bytes, first.name.as_deref()), (Some(Bytes::gib(8)), Some("python3 a.py")));
        let second = source.record(&readings(101.0, &two([Some(Bytes::gib(4)), Some(Bytes::gib(2))])));
        assert_eq!((second.gpu.held_bytes, second.gpu.peak_bytes), (Some(Bytes::gib(6)), Some(Bytes::gib(8))));
        assert_eq!((second.gpu.peak_at, second.host.held_bytes), (Some(100.0), Some(Bytes::gib(1))));
        let gpu = &second.devices[1];
        assert_eq!((gpu.held_bytes, gpu.peak_bytes), (Some(Bytes::gib(4)), Some(Bytes::gib(6))));
        assert_eq!(gpu.run_bytes, Some(Bytes::gib(9)));
        // At its peak the process takes 2 GiB more, after its end 4 GiB less.
        assert_eq!(gpu.run_bytes_at_peak, Some(Budget::DEVICE.load_line(Bytes::gib(8))));
        assert_eq!(gpu.run_bytes_without, Some(Budget::DEVICE.load_line(Bytes::gib(14))));
        let unknown = source.record(&readings(102.0, &two([Some(Bytes::gib(4)), None])));
        assert_eq!((unknown.gpu.held_bytes, unknown.gpu.peak_bytes), (None, Some(Bytes::gib(8))));
        assert!(unknown.warnings[0].starts_with("the driver does not report"), "{:?}", unknown.warnings);
    }

    #[test]
    fn process_without_gpu_memory_has_unknown_figures() {
        let machine = machine(vec![device("cuda:0", Bytes::gib(24), Some(vec![]))]);
        let found = source().record(&readings(1.0, &machine));
        assert_eq!((found.gpu, found.name.as_deref()), (MemoryUse::default(), Some("python3")));
        assert_eq!((found.devices[0].held_bytes, found.devices[1].held_bytes), (Some(Bytes::gib(1)), None));
        assert_eq!(found.warnings, Vec::<String>::new());
        let in_container = Readings { sees_all_processes: Some(false), ..readings(1.0, &machine) };
        let found = source().record(&in_container);
        assert!(found.warnings[0].contains("may hold GPU memory"), "{:?}", found.warnings);
    }

    #[test]
    fn unreported_free_memory_leaves_no_line() {
        let mut gpu = device("cuda:0", Bytes::gib(24), Some(vec![process(Some(Bytes::gib(2)))]));
        gpu.gpu.as_mut().unwrap().held_bytes = None;
        let found = source().record(&readings(1.0, &machine(vec![gpu])));
        let gpu = &found.devices[1];
        assert_eq!((gpu.held_bytes, gpu.free_bytes, gpu.run_bytes), (Some(Bytes::gib(2)), None, None));
        assert_eq!((gpu.run_bytes_at_peak, gpu.run_bytes_without), (None, None));
    }

    #[test]
    fn end_of_the_process_keeps_peaks() {
        let mut source = source();
        let busy = machine(vec![device("cuda:0", Bytes::gib(10), Some(vec![process(Some(Bytes::gib(6)))]))]);
        source.record(&readings(1.0, &busy));
        let ended = Readings { status: None, is_running: false, ..readings(2.0, &busy) };
        let last = source.record(&ended);
        assert_eq!((last.state, last.gpu.held_bytes), (ProcessState::Ended, None));
        assert_eq!((last.gpu.peak_bytes, last.gpu.peak_at), (Some(Bytes::gib(6)), Some(1.0)));
        assert_eq!(last.name.as_deref(), Some("python3 a.py"));
    }

    #[test]
    fn leak_warning_tells_how_long_memory_lasts() {
        let mut source = source();
        for second in 0..=60 {
            let held = Bytes::mib(1024 + 10 * second);
            let gpu = device("cuda:0", Bytes::gib(6), Some(vec![process(Some(held))]));
            let found = source.record(&readings(second as f64, &machine(vec![gpu])));
            let expected = "GPU memory grows by 600.00 MiB per minute, measured over 60.00 s: perhaps a leak; 6.00 GiB \
                            free on cuda:0 last 10 min 14 s at that rate";
            match second {
                // Before the readings cover 90 % of the window, a growth may be that of a start.
                0..=50 => assert_eq!(found.warnings, Vec::<String>::new(), "{second}"),
                60 => assert_eq!(found.warnings, [expected]),
                _ => {}
            }
        }
    }
}
