//! GPU status from NVIDIA's management library: memory per process, temperature, clocks and power. Every figure may be
//! missing (WSL, containers, old GPUs), and nothing depends on any of them.

use crate::probe::Temperature;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor, TemperatureThreshold};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use plimsoll_core::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Most bytes of the name of a process, with the terminating zero.
const PROCESS_NAME_BYTES: usize = 256;

/// NVIDIA's management library (NVML), loaded and initialized.
pub struct Nvml(nvml_wrapper::Nvml);

/// Memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Total memory.
    pub total_bytes: Bytes,
    /// Memory held by processes, without the reserved memory.
    pub used_bytes: Bytes,
    /// Memory reserved by the driver.
    pub reserved_bytes: Bytes,
    /// Free memory.
    pub free_bytes: Bytes,
}

/// A process that computes or draws on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Process name, often with its arguments; `None` if it is not visible.
    pub name: Option<String>,
    /// Memory held by the process; `None` if the driver does not report it.
    pub held_bytes: Option<Bytes>,
    /// Whether the process draws on the GPU, as a display server does. It may compute as well.
    pub draws: bool,
}

impl Process {
    /// Returns whether the process is a program with this file name. Its path must have no spaces, because arguments may
    /// follow it.
    pub fn is_program(&self, name: &str) -> bool {
        let path = self.name.as_deref().and_then(|command| command.split_whitespace().next());
        path.is_some_and(|path| path.rsplit('/').next() == Some(name))
    }
}

/// The PCIe link between a GPU and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Pcie {
    /// The highest generation that both ends support; the present one if NVML does not report it.
    pub generation: u32,
    /// The highest number of lanes; the present one if NVML does not report it.
    pub lanes: u32,
    /// The present generation; idle GPUs reduce it.
    pub generation_now: u32,
    /// The present number of lanes.
    pub lanes_now: u32,
}

/// Temperature, clocks, power and load of a GPU at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Condition {
    /// Chip temperature in degrees Celsius; `None` if it is not reported.
    pub temperature_celsius: Option<u32>,
    /// Multiprocessor clock in MHz; `None` if it is not reported.
    pub clock_mhz: Option<u32>,
    /// The highest multiprocessor clock in MHz; `None` if it is not reported.
    pub clock_mhz_max: Option<u32>,
    /// Memory clock in MHz; `None` if it is not reported.
    pub memory_clock_mhz: Option<u32>,
    /// Reasons for reduced clocks; empty if there are none or they are not reported.
    pub throttled_by: Vec<String>,
    /// Power draw in watts; `None` if it is not reported.
    pub power_watts: Option<f64>,
    /// Power limit in watts; `None` if it is not reported.
    pub power_watts_max: Option<f64>,
    /// Share of the recent sampling period in which a kernel ran, 0 to 1; `None` if it is not reported.
    pub busy: Option<f64>,
}

/// Figures of a GPU with which its present condition is compared. They do not change with its load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reference {
    /// Whether the GPU drives a display; `None` if it is not reported.
    pub drives_display: Option<bool>,
    /// Power limit in watts that the maker set; `None` if it is not reported.
    pub power_watts_default: Option<f64>,
    /// Power limit in watts that is set; the power in force may be lower. `None` if it is not reported.
    pub power_watts_set: Option<f64>,
    /// Temperature in degrees Celsius at which the hardware slows the GPU down; `None` if it is not reported.
    pub slowdown_celsius: Option<u32>,
}

/// Identifiers of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuId<'a> {
    /// UUID: 16 bytes in hexadecimal with dashes, without a prefix.
    pub uuid: &'a str,
    /// PCI bus address, such as `0000:01:00.0`.
    pub bus: &'a str,
    /// Total memory, as the driver reports it.
    pub total_bytes: Bytes,
}

impl Nvml {
    /// Loads NVML from the file `path`; `None` if it cannot be loaded or initialized.
    pub fn open(path: &Path) -> Option<Nvml> {
        nvml_wrapper::Nvml::builder().lib_path(path.as_os_str()).init().ok().map(Nvml)
    }

    /// Returns the driver version, `550.54.14`; `None` if it is not reported.
    pub fn driver_version(&self) -> Option<String> {
        self.0.sys_driver_version().ok()
    }

    /// Finds a GPU or MIG partition by its UUID, else a GPU by its bus address; `None` if NVML lists neither. GPU
    /// numbers are no key, because NVML and the driver may number GPUs differently.
    ///
    /// A MIG partition has the bus address of its whole GPU. Figures of that GPU are not those of the partition, so a
    /// GPU of another size is not taken.
    fn device(&self, id: GpuId) -> Option<nvml_wrapper::Device<'_>> {
        let named =
            ["GPU", "MIG"].into_iter().find_map(|kind| self.0.device_by_uuid(format!("{kind}-{}", id.uuid)).ok());
        named.or_else(|| {
            let at_bus = self.0.device_by_pci_bus_id(id.bus).ok()?;
            let total_bytes = Bytes(at_bus.memory_info().ok()?.total);
            is_same_size(id.total_bytes, total_bytes).then_some(at_bus)
        })
    }

    /// Finds the GPU of which temperature, clocks and PCIe link are those of `id`: for a MIG partition its whole GPU, for
    /// which alone NVML reports them.
    fn chip(&self, id: GpuId) -> Option<nvml_wrapper::Device<'_>> {
        let device = self.device(id)?;
        let is_partition = device.mig_is_mig_device_handle().unwrap_or(false);
        if is_partition { device.mig_parent_device().ok() } else { Some(device) }
    }

    /// Returns the memory of a GPU; `None` if it is not reported.
    pub fn memory(&self, id: GpuId) -> Option<Memory> {
        let info = self.device(id)?.memory_info().ok()?;
        Some(Memory {
            total_bytes: Bytes(info.total),
            // Some drivers include reserved memory in the used figure.
            used_bytes: Bytes(info.total.saturating_sub(info.free).saturating_sub(info.reserved).min(info.used)),
            reserved_bytes: Bytes(info.reserved),
            free_bytes: Bytes(info.free),
        })
    }

    /// Returns the visible processes that compute or draw on a GPU, by process id; empty if there are none or NVML does
    /// not report them.
    pub fn processes(&self, id: GpuId) -> Vec<Process> {
        let Some(device) = self.device(id) else { return vec![] };
        let computing = device.running_compute_processes().unwrap_or_default();
        let drawing = device.running_graphics_processes().unwrap_or_default();
        let mut processes = BTreeMap::new();
        for (info, draws) in computing.iter().map(|info| (info, false)).chain(drawing.iter().map(|info| (info, true))) {
            let process = processes.entry(info.pid).or_insert_with(|| self.named(info.pid));
            // A process in both lists has one figure of memory.
            process.held_bytes = process.held_bytes.max(held_bytes(info));
            process.draws |= draws;
        }
        processes.into_values().collect()
    }

    /// Returns a process with its name, of which nothing else is known.
    fn named(&self, pid: u32) -> Process {
        let name = self.0.sys_process_name(pid, PROCESS_NAME_BYTES).ok().filter(|name| !name.is_empty());
        Process { pid, name, held_bytes: None, draws: false }
    }

    /// Returns the figures with which the condition of a GPU is compared. Those that NVML does not report are `None`.
    pub fn reference(&self, id: GpuId) -> Reference {
        let (Some(device), Some(chip)) = (self.device(id), self.chip(id)) else { return Reference::default() };
        Reference {
            drives_display: device.is_display_active().ok(),
            power_watts_default: device.power_management_limit_default().ok().map(watts),
            power_watts_set: device.power_management_limit().ok().map(watts),
            slowdown_celsius: chip.temperature_threshold(TemperatureThreshold::Slowdown).ok(),
        }
    }

    /// Returns the PCIe link of a GPU; `None` if NVML does not report its present state.
    pub fn pcie(&self, id: GpuId) -> Option<Pcie> {
        let device = self.chip(id)?;
        let (generation_now, lanes_now) =
            (device.current_pcie_link_gen().ok()?, device.current_pcie_link_width().ok()?);
        Some(Pcie {
            generation: device.max_pcie_link_gen().unwrap_or(generation_now),
            lanes: device.max_pcie_link_width().unwrap_or(lanes_now),
            generation_now,
            lanes_now,
        })
    }

    /// Returns the present temperature, clocks, power and load of a GPU. Figures that NVML does not report are `None`. A
    /// MIG partition has the temperature and clocks of its whole GPU, whose power and load it shares with others: those
    /// are `None`.
    pub fn condition(&self, id: GpuId) -> Condition {
        let (Some(device), Some(chip)) = (self.device(id), self.chip(id)) else { return Condition::default() };
        Condition {
            temperature_celsius: chip.temperature(TemperatureSensor::Gpu).ok(),
            clock_mhz: chip.clock_info(Clock::SM).ok(),
            clock_mhz_max: chip.max_clock_info(Clock::SM).ok(),
            memory_clock_mhz: chip.clock_info(Clock::Memory).ok(),
            throttled_by: chip.current_throttle_reasons().map(throttle_reasons).unwrap_or_default(),
            power_watts: device.power_usage().ok().map(watts),
            power_watts_max: device.enforced_power_limit().ok().map(watts),
            busy: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
        }
    }
}

/// Returns the memory of a process; `None` if the driver does not report it, as on Windows and WSL.
fn held_bytes(process: &ProcessInfo) -> Option<Bytes> {
    match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
        UsedGpuMemory::Unavailable => None,
    }
}

/// Converts milliwatts, as NVML reports power, to watts.
fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1e3
}

/// Whether a total of the driver and one of NVML can be those of the same GPU. NVML also counts reserved memory. A MIG
/// partition that differs from its GPU has at most half of its memory.
fn is_same_size(driver_total: Bytes, nvml_total: Bytes) -> bool {
    driver_total.0.abs_diff(nvml_total.0) <= nvml_total.0 / 4
}

/// Beginning of the texts of the two throttle reasons that mean heat: `heat` and `heat (hardware)`.
const HEAT: &str = "heat";

/// Returns the throttle reasons as text. Low clocks of an idle GPU are not listed. The general bit for a hardware
/// slowdown is listed only if no bit names its cause.
fn throttle_reasons(bits: ThrottleReasons) -> Vec<String> {
    let words = [
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, HEAT),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat (hardware)"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power supply"),
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "clocks set by the user"),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display"),
        (ThrottleReasons::SYNC_BOOST, "another GPU of its group"),
    ];
    let mut reasons: Vec<String> =
        words.iter().filter(|(bit, _)| bits.contains(*bit)).map(|(_, word)| (*word).into()).collect();
    if reasons.is_empty() && bits.contains(ThrottleReasons::HW_SLOWDOWN) {
        reasons.push("hardware slowdown".into());
    }
    reasons
}

impl Condition {
    /// Returns the temperature and whether heat throttles the GPU; `None` if the temperature is unknown.
    pub fn heat(&self) -> Option<Temperature> {
        let throttled = self.throttled_by.iter().any(|by| by.starts_with(HEAT));
        Some(Temperature { celsius: f64::from(self.temperature_celsius?), throttled })
    }

    /// Returns the known figures as text, without load and memory clock; empty if none is known. Example:
    /// `61 °C, 1695 of 1710 MHz, 348 of 350 W, held back by power limit`.
    pub fn describe(&self) -> String {
        let with_limit = |now: Option<String>, most: Option<String>, unit: &str| match (now, most) {
            (Some(now), Some(most)) => Some(format!("{now} of {most} {unit}")),
            (Some(now), None) => Some(format!("{now} {unit}")),
            _ => None,
        };
        let mut parts = Vec::new();
        parts.extend(self.temperature_celsius.map(|degrees| format!("{degrees} °C")));
        parts.extend(with_limit(
            self.clock_mhz.map(|m| m.to_string()),
            self.clock_mhz_max.map(|m| m.to_string()),
            "MHz",
        ));
        let watts = |watts: Option<f64>| watts.map(|watts| format!("{watts:.0}"));
        parts.extend(with_limit(watts(self.power_watts), watts(self.power_watts_max), "W"));
        if !self.throttled_by.is_empty() {
            parts.push(format!("held back by {}", self.throttled_by.join(" and ")));
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_library_opens_as_none() {
        assert!(Nvml::open(Path::new("/nowhere/libnvidia-ml.so.1")).is_none());
        assert!(Nvml::open(Path::new("libc.so.6")).is_none());
    }

    #[test]
    fn program_is_known_by_its_file_name() {
        let is_plimsoll = |name: Option<&str>| {
            let name = name.map(str::to_owned);
            Process { pid: 1, name, held_bytes: None, draws: false }.is_program("plimsoll")
        };
        for name in ["plimsoll", "/usr/bin/plimsoll", "/usr/bin/plimsoll train runs/a.toml"] {
            assert!(is_plimsoll(Some(name)), "{name}");
        }
        for name in [None, Some(""), Some("python3 /opt/plimsoll"), Some("/opt/plimsoll/server")] {
            assert!(!is_plimsoll(name), "{name:?}");
        }
    }

    #[test]
    fn partition_is_not_taken_for_its_gpu() {
        let mib = Bytes::mib;
        // An H200 and a T4 of which ECC takes a part, as the driver and NVML report them; a partition of 3g.71gb.
        assert!(is_same_size(mib(143_156), mib(143_771)) && is_same_size(mib(14_913), mib(16_384)));
        assert!(!is_same_size(mib(71_000), mib(143_771)) && !is_same_size(mib(18_000), mib(143_771)));
    }

    #[test]
    fn throttle_reasons_are_named_and_idle_is_ignored() {
        assert!(throttle_reasons(ThrottleReasons::GPU_IDLE).is_empty());
        assert_eq!(throttle_reasons(ThrottleReasons::HW_SLOWDOWN), ["hardware slowdown"]);
        let both = ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::SW_POWER_CAP;
        assert_eq!(throttle_reasons(both), ["power limit", "heat (hardware)"]);
        let condition = Condition {
            temperature_celsius: Some(61),
            clock_mhz: Some(1695),
            clock_mhz_max: Some(1710),
            power_watts: Some(348.4),
            throttled_by: throttle_reasons(ThrottleReasons::SW_POWER_CAP),
            ..Condition::default()
        };
        assert_eq!(condition.describe(), "61 °C, 1695 of 1710 MHz, 348 W, held back by power limit");
        assert_eq!(Condition::default().describe(), "");
    }

    #[test]
    fn only_thermal_reasons_count_as_heat() {
        let heat = |bits: ThrottleReasons, celsius| {
            Condition { temperature_celsius: celsius, throttled_by: throttle_reasons(bits), ..Condition::default() }
                .heat()
        };
        let warm = |throttled| Some(Temperature { celsius: 91.0, throttled });
        assert_eq!(heat(ThrottleReasons::SW_THERMAL_SLOWDOWN, Some(91)), warm(true));
        assert_eq!(heat(ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN, Some(91)), warm(true));
        assert_eq!(heat(ThrottleReasons::SW_POWER_CAP | ThrottleReasons::GPU_IDLE, Some(91)), warm(false));
        assert_eq!(heat(ThrottleReasons::SW_THERMAL_SLOWDOWN, None), None);
    }
}
