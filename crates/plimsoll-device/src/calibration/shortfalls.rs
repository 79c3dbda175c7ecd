//! Shortfalls of devices, in `shortfalls.json`: less memory or speed than planned. Runs record them, and the planner
//! uses them.

use crate::cache::{folder, load, save};
use crate::gpu;
use crate::probe::Cpu;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A device that a run found to have less memory or speed than planned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shortfall {
    /// Name of the device in run files.
    pub device: String,
    /// Model name of the processor or GPU; the entry is not used for another model.
    model: String,
    /// The missing resource.
    #[serde(flatten)]
    pub kind: ShortfallKind,
    /// Description of what happened.
    pub reason: String,
}

/// The resource that a device lacks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShortfallKind {
    /// Memory: the device ran out of it, or other processes took it. Holds the load line (the most bytes that the
    /// device may hold) with which the run continued.
    LoadLineBytes(Bytes),
    /// Speed: the device's work took this many times as long as its rates predict.
    Slowdown(f64),
}

impl ShortfallKind {
    fn is_same_kind(self, other: ShortfallKind) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// Smallest slowdown that is recorded: actual time divided by predicted time. Predictions of single recipes have errors
/// of up to a fifth.
const MIN_SLOWDOWN: f64 = 1.25;

/// Returns the recorded shortfalls of a device that no later run has disproved; empty if there are none, or for paper
/// devices.
pub fn shortfalls(device: &DeviceSpec) -> Vec<Shortfall> {
    let (Some(folder), Some(model)) = (folder(), model_of(device)) else { return vec![] };
    let mut entries: Vec<Shortfall> = load(&folder.join(FILE_NAME));
    entries.retain(|entry| entry.device == device.name && entry.model == model);
    entries
}

/// Records for the next plan that a device had less memory than planned. `line_bytes` is the load line (the most bytes
/// that the device may hold) with which the run continued.
pub fn record_memory_shortfall(device: &DeviceSpec, line_bytes: Bytes, reason: &str) {
    store_shortfall(device, ShortfallKind::LoadLineBytes(line_bytes), reason.to_owned());
}

/// Removes the memory shortfall of a device after a run found the memory again.
pub fn forget_memory_shortfall(device: &DeviceSpec) {
    forget_shortfalls(|entry| entry.device == device.name && matches!(entry.kind, ShortfallKind::LoadLineBytes(_)));
}

/// Updates the recorded slowdown of a device. `times` is the time of its work divided by the predicted time, which
/// already includes any recorded slowdown. If the total slowdown is at least `MIN_SLOWDOWN`, it is recorded for the
/// next plan. A smaller one removes the record. `run` names the run in the record's reason.
pub fn record_slowdown(device: &DeviceSpec, times: f64, run: &str) {
    let slower = |short: &Shortfall| if let ShortfallKind::Slowdown(times) = short.kind { Some(times) } else { None };
    let times = times * shortfalls(device).iter().find_map(slower).unwrap_or(1.0);
    if times < MIN_SLOWDOWN {
        forget_shortfalls(|entry| entry.device == device.name && slower(entry).is_some());
    } else if times.is_finite() {
        let times = (100.0 * times).round() / 100.0;
        let reason = format!("{run} took {times} times as long as its measured rates predict");
        store_shortfall(device, ShortfallKind::Slowdown(times), reason);
    }
}

fn store_shortfall(device: &DeviceSpec, kind: ShortfallKind, reason: String) {
    let (Some(folder), Some(model)) = (folder(), model_of(device)) else { return };
    store_shortfall_in(&folder, Shortfall { device: device.name.clone(), model, kind, reason });
}

fn store_shortfall_in(folder: &Path, new: Shortfall) {
    let mut entries: Vec<Shortfall> = load(&folder.join(FILE_NAME));
    let replaced =
        |old: &Shortfall| (&old.device, &old.model) == (&new.device, &new.model) && old.kind.is_same_kind(new.kind);
    entries.retain(|old| !replaced(old));
    entries.push(new);
    save(folder, FILE_NAME, &entries);
}

/// Removes the shortfalls for which `which` is true, and returns them; empty if there were none.
pub fn forget_shortfalls(which: impl Fn(&Shortfall) -> bool) -> Vec<Shortfall> {
    folder().map(|folder| forget_shortfalls_in(&folder, which)).unwrap_or_default()
}

fn forget_shortfalls_in(folder: &Path, which: impl Fn(&Shortfall) -> bool) -> Vec<Shortfall> {
    let entries: Vec<Shortfall> = load(&folder.join(FILE_NAME));
    let (removed, kept): (Vec<_>, Vec<_>) = entries.into_iter().partition(which);
    if !removed.is_empty() {
        save(folder, FILE_NAME, &kept);
    }
    removed
}

/// Returns the model name of a device. None for paper devices and for GPUs that are not listed.
fn model_of(device: &DeviceSpec) -> Option<String> {
    match device.kind {
        DeviceKind::Paper => None,
        DeviceKind::Cpu | DeviceKind::Virtual => Some(Cpu::read().model),
        DeviceKind::Cuda => {
            let index = device.name.strip_prefix("cuda:")?.parse().ok()?;
            Some(gpu::find_gpu(index).ok()?.1.name.clone())
        }
    }
}

/// Name of the file in the cache folder that holds the shortfalls.
const FILE_NAME: &str = "shortfalls.json";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortfalls_are_kept_until_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let short =
            |device: &str, kind| Shortfall { device: device.into(), model: "x".into(), kind, reason: "so".into() };
        let line = |device, mib| short(device, ShortfallKind::LoadLineBytes(Bytes::mib(mib)));
        let slower = |device, times| short(device, ShortfallKind::Slowdown(times));
        let entries = || load::<Shortfall>(&folder.path().join(FILE_NAME));
        assert_eq!(forget_shortfalls_in(folder.path(), |_| true), []);
        for short in [line("cpu", 5), slower("cpu", 2.0), line("cuda:0", 7), line("cpu", 4), slower("cpu", 1.5)] {
            store_shortfall_in(folder.path(), short);
        }
        assert_eq!(entries(), [line("cuda:0", 7), line("cpu", 4), slower("cpu", 1.5)]);
        assert_eq!(forget_shortfalls_in(folder.path(), |entry| entry.device == "cuda:0"), [line("cuda:0", 7)]);
        assert_eq!(forget_shortfalls_in(folder.path(), |_| true), [line("cpu", 4), slower("cpu", 1.5)]);
        assert_eq!(entries(), []);
    }
}
