//! What NVIDIA's management library says of a GPU while it is used: who holds its memory, how warm it is, how fast it
//! may run. Each figure may be missing (WSL, containers, old cards), and nothing depends on any of them being there.

use crate::probe::Heat;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use plimsoll_core::Bytes;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The library, open.
pub struct Nvml(nvml_wrapper::Nvml);

/// The memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// All of it.
    pub total_bytes: Bytes,
    /// Held by programs.
    pub used_bytes: Bytes,
    /// Kept by the driver for itself, whoever runs.
    pub reserved_bytes: Bytes,
    /// What is left.
    pub free_bytes: Bytes,
}

/// A program that computes on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its name, where it can be seen.
    pub name: Option<String>,
    /// What it holds, where the driver says it.
    pub held_bytes: Option<Bytes>,
}

/// A link to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pcie {
    /// The generation that both ends can do.
    pub generation: u32,
    /// Lanes that are wired.
    pub lanes: u32,
    /// The generation now: cards that rest go down.
    pub generation_now: u32,
    /// Lanes now.
    pub lanes_now: u32,
}

/// How a GPU is at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// Of the chip, in degrees Celsius.
    pub temperature_celsius: Option<u32>,
    /// Of the multiprocessors, in MHz.
    pub clock_mhz: Option<u32>,
    /// The most that these may be.
    pub clock_mhz_max: Option<u32>,
    /// Of the memory, in MHz.
    pub memory_clock_mhz: Option<u32>,
    /// What keeps the clocks down; empty where nothing does.
    pub throttled_by: Vec<String>,
    /// In watts.
    pub power_watts: Option<f64>,
    /// The most that it may take, in watts.
    pub power_watts_max: Option<f64>,
    /// The share of the last moments in which a kernel ran, 0 to 1.
    pub busy: Option<f64>,
}

/// Which GPU is meant.
#[derive(Clone, Copy, Debug)]
pub struct Which<'a> {
    /// Its unique number, 16 bytes in hexadecimal with dashes, without a prefix.
    pub uuid: &'a str,
    /// Its place on the bus, `00000000:01:00.0`.
    pub bus: &'a str,
}

impl Nvml {
    /// Opens the library that lies at `path`; none where it does not work.
    pub fn open(path: &Path) -> Option<Nvml> {
        nvml_wrapper::Nvml::builder().lib_path(path.as_os_str()).init().ok().map(Nvml)
    }

    /// The driver's version, `550.54.14`.
    pub fn driver_version(&self) -> Option<String> {
        self.0.sys_driver_version().ok()
    }

    /// The GPU, by what stays the same whatever order the driver was told to number GPUs in. Where a GPU is shared
    /// out in parts, a part has a number of its own.
    fn device(&self, which: Which) -> Option<nvml_wrapper::Device<'_>> {
        let named =
            ["GPU", "MIG"].into_iter().find_map(|kind| self.0.device_by_uuid(format!("{kind}-{}", which.uuid)).ok());
        named.or_else(|| self.0.device_by_pci_bus_id(which.bus).ok())
    }

    /// Its memory.
    pub fn memory(&self, which: Which) -> Option<Memory> {
        let info = self.device(which)?.memory_info().ok()?;
        Some(Memory {
            total_bytes: Bytes(info.total),
            // Some drivers count what they keep for themselves here, too.
            used_bytes: Bytes(info.total.saturating_sub(info.free).saturating_sub(info.reserved).min(info.used)),
            reserved_bytes: Bytes(info.reserved),
            free_bytes: Bytes(info.free),
        })
    }

    /// The programs that compute on it, as far as they can be seen from here.
    pub fn processes(&self, which: Which) -> Vec<Process> {
        let running = self.device(which).and_then(|device| device.running_compute_processes().ok()).unwrap_or_default();
        let seen = running.into_iter().map(|process| Process {
            pid: process.pid,
            name: self.0.sys_process_name(process.pid, 256).ok().filter(|name| !name.is_empty()),
            held_bytes: match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
                UsedGpuMemory::Unavailable => None,
            },
        });
        seen.collect()
    }

    /// Its link to the host.
    pub fn pcie(&self, which: Which) -> Option<Pcie> {
        let device = self.device(which)?;
        let (generation_now, lanes_now) =
            (device.current_pcie_link_gen().ok()?, device.current_pcie_link_width().ok()?);
        Some(Pcie {
            generation: device.max_pcie_link_gen().unwrap_or(generation_now),
            lanes: device.max_pcie_link_width().unwrap_or(lanes_now),
            generation_now,
            lanes_now,
        })
    }

    /// How it is now.
    pub fn condition(&self, which: Which) -> Condition {
        let Some(device) = self.device(which) else { return Condition::default() };
        let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
        Condition {
            temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            clock_mhz: device.clock_info(Clock::SM).ok(),
            clock_mhz_max: device.max_clock_info(Clock::SM).ok(),
            memory_clock_mhz: device.clock_info(Clock::Memory).ok(),
            throttled_by: device.current_throttle_reasons().map(reasons).unwrap_or_default(),
            power_watts: device.power_usage().ok().map(watts),
            power_watts_max: device.enforced_power_limit().ok().map(watts),
            busy: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
        }
    }
}

/// What keeps clocks down where it is warmth; more may be said behind it.
const HEAT: &str = "heat";

/// What keeps clocks down, in words. A GPU that rests is not kept down.
fn reasons(bits: ThrottleReasons) -> Vec<String> {
    let words = [
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, HEAT),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat (hardware)"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power supply"),
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "clocks set by the user"),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display"),
        (ThrottleReasons::SYNC_BOOST, "another GPU of its group"),
    ];
    let mut said: Vec<String> =
        words.iter().filter(|(bit, _)| bits.contains(*bit)).map(|(_, word)| (*word).into()).collect();
    if said.is_empty() && bits.contains(ThrottleReasons::HW_SLOWDOWN) {
        said.push("hardware slowdown".into());
    }
    said
}

impl Condition {
    /// How warm it is, where that is known.
    pub fn heat(&self) -> Option<Heat> {
        let throttled = self.throttled_by.iter().any(|by| by.starts_with(HEAT));
        Some(Heat { celsius: f64::from(self.temperature_celsius?), throttled })
    }

    /// In words, as much as is known: `61 °C, 1695 of 1710 MHz, 348 of 350 W, held back by power limit`.
    pub fn describe(&self) -> String {
        let of = |now: Option<String>, most: Option<String>, unit: &str| match (now, most) {
            (Some(now), Some(most)) => Some(format!("{now} of {most} {unit}")),
            (Some(now), None) => Some(format!("{now} {unit}")),
            _ => None,
        };
        let mut parts = Vec::new();
        parts.extend(self.temperature_celsius.map(|degrees| format!("{degrees} °C")));
        parts.extend(of(self.clock_mhz.map(|m| m.to_string()), self.clock_mhz_max.map(|m| m.to_string()), "MHz"));
        let watts = |watts: Option<f64>| watts.map(|watts| format!("{watts:.0}"));
        parts.extend(of(watts(self.power_watts), watts(self.power_watts_max), "W"));
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
    fn a_library_that_does_not_work_is_none() {
        assert!(Nvml::open(Path::new("/nowhere/libnvidia-ml.so.1")).is_none());
        assert!(Nvml::open(Path::new("libc.so.6")).is_none());
    }

    #[test]
    fn what_keeps_clocks_down_is_said_in_words_and_rest_is_no_reason() {
        assert!(reasons(ThrottleReasons::GPU_IDLE).is_empty());
        assert_eq!(reasons(ThrottleReasons::HW_SLOWDOWN), ["hardware slowdown"]);
        let both = ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::SW_POWER_CAP;
        assert_eq!(reasons(both), ["power limit", "heat (hardware)"]);
        let condition = Condition {
            temperature_celsius: Some(61),
            clock_mhz: Some(1695),
            clock_mhz_max: Some(1710),
            power_watts: Some(348.4),
            throttled_by: reasons(ThrottleReasons::SW_POWER_CAP),
            ..Condition::default()
        };
        assert_eq!(condition.describe(), "61 °C, 1695 of 1710 MHz, 348 W, held back by power limit");
        assert_eq!(Condition::default().describe(), "");
    }

    #[test]
    fn heat_holds_a_gpu_back_and_other_reasons_are_no_heat() {
        let heat = |bits: ThrottleReasons, celsius| {
            Condition { temperature_celsius: celsius, throttled_by: reasons(bits), ..Condition::default() }.heat()
        };
        let warm = |throttled| Some(Heat { celsius: 91.0, throttled });
        assert_eq!(heat(ThrottleReasons::SW_THERMAL_SLOWDOWN, Some(91)), warm(true));
        assert_eq!(heat(ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN, Some(91)), warm(true));
        assert_eq!(heat(ThrottleReasons::SW_POWER_CAP | ThrottleReasons::GPU_IDLE, Some(91)), warm(false));
        assert_eq!(heat(ThrottleReasons::SW_THERMAL_SLOWDOWN, None), None);
    }
}
