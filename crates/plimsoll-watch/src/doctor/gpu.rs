//! Checks of each GPU: memory, display, temperature, clocks, power and PCIe link.

use super::{Finding, FindingId, GpuReadings, Readings, Severity};
use crate::text::{excerpt, percent};
use plimsoll_core::{Budget, Bytes};
use plimsoll_device::cuda::nvml::Process;
use plimsoll_device::machine::{DeviceInfo, Gpu};
use std::collections::BTreeSet;

/// Least bytes held on a GPU that count. Less is taken by the driver itself.
const HELD_MIN: Bytes = Bytes(128 << 20);
/// Fraction of a GPU's memory from which memory held by others is a warning.
const HELD_SHARE: f64 = 0.1;
/// Most processes that a finding names.
const PROCESSES_MAX: usize = 4;
/// Load of a GPU, 0 to 1, from which it is busy.
const BUSY: f64 = 0.5;
/// Load of a GPU, 0 to 1, from which its PCIe link has its full speed. An idle GPU reduces the generation.
const LINK_AWAKE: f64 = 0.2;
/// Degrees Celsius below the slowdown temperature from which a GPU is hot.
const HOT_MARGIN_CELSIUS: u32 = 5;
/// Name of the process that computes for other processes (CUDA MPS), which hold their memory without being listed.
const MPS_SERVER: &str = "nvidia-cuda-mps-server";
/// Fraction of the default power limit above which the limit counts as the default.
const FULL_POWER: f64 = 0.99;

/// A GPU with all of its figures.
struct GpuView<'a> {
    device: &'a DeviceInfo,
    gpu: &'a Gpu,
    further: GpuReadings,
    /// Whether all processes of the GPU are listed. On WSL those of Windows are not.
    lists_all_processes: bool,
}

/// Returns the findings about every GPU that the driver lists.
pub(super) fn findings(readings: &Readings) -> Vec<Finding> {
    let mut findings = Vec::new();
    for device in &readings.machine.devices {
        let Some(gpu) = &device.gpu else { continue };
        let further = readings.gpus.iter().find(|further| further.name == device.name).cloned().unwrap_or_default();
        let lists_all_processes = readings.sees_all_processes == Some(true) && !readings.is_wsl;
        let view = GpuView { device, gpu, further, lists_all_processes };
        let is_library = gpu.unusable.is_some() && gpu.unusable == readings.machine.nvidia.missing_library();
        let checks = [
            view.unusable().filter(|_| !is_library),
            view.held_memory(),
            view.leaked_memory(),
            view.display(),
            view.busy(),
            view.hot(),
            view.throttled(),
            view.power_limit(),
            view.pcie_width(),
            view.pcie_generation(),
        ];
        findings.extend(checks.into_iter().flatten());
    }
    findings.extend(wsl_spill(readings));
    findings
}

/// Returns a finding if Windows lends system memory to full GPUs.
fn wsl_spill(readings: &Readings) -> Option<Finding> {
    let names: Vec<&str> = readings.usable_gpus().map(|gpu| gpu.name.as_str()).collect();
    if !readings.is_wsl || names.is_empty() {
        return None;
    }
    let text = format!("on WSL, Windows moves memory of {} to system memory when the GPU is full", names.join(", "));
    let cost = "a step becomes many times slower without an error, if other programs take GPU memory during a run";
    let mend = "on Windows: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback Policy, Prefer No Sysmem \
                Fallback";
    Some(Finding::new(FindingId::WslSpill, Severity::Warning, text, cost, mend))
}

impl GpuView<'_> {
    fn unusable(&self) -> Option<Finding> {
        let reason = self.gpu.unusable.as_ref()?;
        let text = format!("{} ({}) cannot be used: {reason}", self.device.name, self.device.model);
        let mend = "none; runs take the other devices of this machine";
        Some(Finding::new(FindingId::GpuUnusable, Severity::Warning, text, "no run uses this GPU", mend))
    }

    /// Returns the bytes that visible processes hold; `None` if one of them does not report its bytes.
    fn attributed(&self) -> Option<Bytes> {
        self.gpu.processes.iter().map(|process| process.held_bytes).sum()
    }

    /// Returns whether one of the visible processes computes for others.
    fn has_mps_server(&self) -> bool {
        self.gpu.processes.iter().any(|process| process.is_program(MPS_SERVER))
    }

    /// Returns the bytes for which no process is listed; `None` if that is unknown, as in a container that hides
    /// processes.
    fn unattributed(&self) -> Option<Bytes> {
        let held = self.gpu.held_bytes.filter(|_| self.lists_all_processes && !self.has_mps_server())?;
        Some(held.saturating_sub(self.attributed()?)).filter(|bytes| *bytes >= HELD_MIN)
    }

    /// Describes the load line of a run, and the one that it would have if `held` were free.
    fn cost_of_held(&self, held: Bytes) -> String {
        let free = self.device.memory_free_bytes;
        let [now, then] = [free, free + held].map(|free| Budget::DEVICE.load_line(free));
        format!("the load line of a run is {now} by default, instead of {then}")
    }

    /// Returns a finding if other processes hold memory, with their names and bytes.
    fn held_memory(&self) -> Option<Finding> {
        let (held, total) = (self.gpu.held_bytes?, self.device.memory_total_bytes);
        let held = held.saturating_sub(self.unattributed().unwrap_or_default());
        if held < HELD_MIN {
            return None;
        }
        let is_much = held.0 as f64 >= HELD_SHARE * total.0 as f64;
        let severity = if is_much { Severity::Warning } else { Severity::Note };
        let mut holders: Vec<&Process> = self.gpu.processes.iter().collect();
        holders.sort_by_key(|process| std::cmp::Reverse(process.held_bytes));
        let mut names: Vec<String> = holders.iter().take(PROCESSES_MAX).map(|process| describe(process)).collect();
        if holders.len() > PROCESSES_MAX {
            names.push(format!("{} more", holders.len() - PROCESSES_MAX));
        }
        let by = if names.is_empty() { "processes that are not visible here".to_owned() } else { names.join(", ") };
        let text = format!("{held} of {total} on {} are held by {by}", self.device.name);
        Some(Finding::new(FindingId::GpuMemoryHeld, severity, text, self.cost_of_held(held), self.mend_of_held()))
    }

    /// Returns the step that frees memory held by others. Process ids of another container or of Windows are other
    /// processes here, and processes that draw belong to a desktop: neither is named in a command.
    fn mend_of_held(&self) -> String {
        if !self.lists_all_processes {
            return "see them outside of this container, or on Windows: nvidia-smi".to_owned();
        }
        let processes = self.gpu.processes.iter().filter(|process| !process.draws);
        let pids: BTreeSet<u32> = processes.map(|process| process.pid).collect();
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        match pids.is_empty() {
            false => format!("if they are yours: kill {}", pids.join(" ")),
            true => "close programs that draw on the GPU".to_owned(),
        }
    }

    /// Returns a finding if memory is held and no process is listed for it.
    fn leaked_memory(&self) -> Option<Finding> {
        let leaked = self.unattributed()?;
        let (name, bus) = (&self.device.name, &self.gpu.bus);
        let text = format!("{leaked} on {name} are held, and no process is listed for them");
        let mend = format!(
            "find the processes that have GPUs open, and end those that hang: sudo fuser -v /dev/nvidia*\n\
             if there are none: sudo nvidia-smi --gpu-reset -i {bus}, or restart the machine"
        );
        let cost = self.cost_of_held(leaked);
        Some(Finding::new(FindingId::GpuMemoryLeaked, Severity::Warning, text, cost, mend))
    }

    fn display(&self) -> Option<Finding> {
        self.further.reference.drives_display.filter(|drives| *drives)?;
        let text = format!("{} drives a display", self.device.name);
        let cost = "the desktop takes memory of this GPU, and more of it with each window; a run that meets the limit \
                    recovers with a smaller recipe";
        let mend = "connect the display to another GPU or the mainboard\n\
                    or end the desktop: sudo systemctl isolate multi-user.target\n\
                    or leave memory for it: --budget 80%";
        Some(Finding::new(FindingId::DisplayAttached, Severity::Note, text, cost, mend))
    }

    /// Returns a finding if other processes keep the GPU busy. A load without any process is left over from one that has
    /// just ended, or from this check.
    fn busy(&self) -> Option<Finding> {
        let busy = self.gpu.condition.busy.filter(|busy| *busy >= BUSY)?;
        if self.lists_all_processes && self.gpu.processes.is_empty() {
            return None;
        }
        let text = format!("{} is {} busy with other processes", self.device.name, percent(busy, 0));
        let cost = "a run shares the multiprocessors with them, and its steps are slower than predicted";
        let mend = "wait for them, or end them: nvidia-smi lists the processes";
        Some(Finding::new(FindingId::GpuBusy, Severity::Warning, text, cost, mend))
    }

    fn hot(&self) -> Option<Finding> {
        let (now, slowdown) = (self.gpu.condition.temperature_celsius?, self.further.reference.slowdown_celsius?);
        if now + HOT_MARGIN_CELSIUS < slowdown {
            return None;
        }
        let text = format!("{} has {now} °C before the work; from {slowdown} °C it slows down", self.device.name);
        let cost = "its clocks fall, and steps are slower than predicted";
        let mend = "improve the cooling: fans, dust, room\nor pause a hot run: --set run.max_temperature=80";
        Some(Finding::new(FindingId::GpuHot, Severity::Warning, text, cost, mend))
    }

    /// Returns a finding if the clocks are reduced. At its power limit a loaded GPU is as it should be.
    fn throttled(&self) -> Option<Finding> {
        let condition = &self.gpu.condition;
        let first = condition.throttled_by.first()?;
        let is_power_alone = condition.throttled_by.iter().all(|reason| reason == "power limit");
        let severity = if is_power_alone { Severity::Note } else { Severity::Warning };
        let name = &self.device.name;
        let text = format!("the clocks of {name} are reduced by {}", condition.throttled_by.join(" and "));
        let cost = match (condition.clock_mhz, condition.clock_mhz_max) {
            (Some(now), Some(most)) => format!("it runs at {now} of {most} MHz; steps are slower than predicted"),
            _ => "steps are slower than predicted".to_owned(),
        };
        let bus = &self.gpu.bus;
        let mend = match first.as_str() {
            "power limit" => format!("see its limits: nvidia-smi -q -d POWER -i {bus}"),
            "heat" | "heat (hardware)" => "improve the cooling: fans, dust, room".to_owned(),
            "power supply" => "check the power cables of the GPU and the power supply".to_owned(),
            "clocks set by the user" => format!("sudo nvidia-smi -i {bus} -rgc\nsudo nvidia-smi -i {bus} -rac"),
            _ => format!("see the cause: nvidia-smi -q -d PERFORMANCE -i {bus}"),
        };
        Some(Finding::new(FindingId::GpuThrottled, severity, text, cost, mend))
    }

    /// Returns a finding if the power limit that is set is below the default. The limit in force may be lower without a
    /// setting, such as while a laptop runs on its battery.
    fn power_limit(&self) -> Option<Finding> {
        let (now, default) = (self.further.reference.power_watts_set?, self.further.reference.power_watts_default?);
        if now >= FULL_POWER * default {
            return None;
        }
        let (name, bus) = (&self.device.name, &self.gpu.bus);
        let text = format!("the power limit of {name} is {now:.0} W, its default is {default:.0} W");
        let cost = "its clocks are lower under load; rates measured with another limit do not hold";
        let mend = format!("sudo nvidia-smi -i {bus} -pl {default:.0}");
        Some(Finding::new(FindingId::GpuPowerLimit, Severity::Note, text, cost, mend))
    }

    fn pcie_width(&self) -> Option<Finding> {
        let pcie = self.gpu.pcie.filter(|pcie| pcie.lanes_now < pcie.lanes)?;
        let (name, now, most) = (&self.device.name, pcie.lanes_now, pcie.lanes);
        let text = format!("{name} is connected by {now} of {most} PCIe lanes");
        let cost = format!(
            "offload and exchanges with other GPUs have {} of the link's speed",
            percent(f64::from(now) / f64::from(most), 0)
        );
        let mend = "switch the machine off, seat the card firmly in its slot, and check the riser cable\n\
                    the manual of the mainboard lists slots and drives that share lanes";
        Some(Finding::new(FindingId::PcieWidth, Severity::Warning, text, cost, mend))
    }

    /// Returns a finding if the link is slower than it could be while the GPU works.
    fn pcie_generation(&self) -> Option<Finding> {
        self.gpu.condition.busy.filter(|busy| *busy >= LINK_AWAKE)?;
        let pcie = self.gpu.pcie.filter(|pcie| pcie.generation_now < pcie.generation)?;
        let (name, now, most) = (&self.device.name, pcie.generation_now, pcie.generation);
        let text = format!("{name} works, and its PCIe link has generation {now} of {most}");
        let cost = "each missing generation halves the speed of offload and of exchanges with other GPUs";
        let mend = "set the PCIe generation of the slot in the firmware setup to Auto, and check the riser cable";
        Some(Finding::new(FindingId::PcieGeneration, Severity::Warning, text, cost, mend))
    }
}

/// Describes a process: `python3 (4711) 1.20 GiB`.
fn describe(process: &Process) -> String {
    let name = process.name.as_deref().map_or_else(|| "process".to_owned(), excerpt);
    let bytes = process.held_bytes.map_or(String::new(), |bytes| format!(" {bytes}"));
    format!("{name} ({}){bytes}", process.pid)
}
