//! What devices fell short of, in `shortfalls.json`: memory that they did not have, speed that they did not reach. Runs
//! find it out, and what follows from it is the planner's.

use super::store::{folder, load, save};
use crate::cuda;
use crate::probe::Cpu;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A device that was less than it was planned to be, in a run, until that run's end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shortfall {
    /// The device, as run files name it.
    pub device: String,
    /// What it is: the processor's or the GPU's name.
    model: String,
    /// What it was short of.
    #[serde(flatten)]
    pub of: Short,
    /// What happened.
    pub why: String,
}

/// What a device is short of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Short {
    /// Memory: it refused some, or others pressed it. The load line under which the run went on.
    LineBytes(Bytes),
    /// Speed: its work took so many times what its rates say.
    Slower(f64),
}

impl Short {
    fn of_the_same(self, other: Short) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

/// A device is called slower than its rates from here on: single recipes are predicted with errors of up to a fifth.
const SLOWER_LEAST: f64 = 1.25;

/// What a device has fallen short of, where a run has found it out and none has found otherwise since.
pub fn shortfalls(device: &DeviceSpec) -> Vec<Shortfall> {
    let (Some(folder), Some(model)) = (folder(), model_of(device)) else { return vec![] };
    let mut known: Vec<Shortfall> = load(&folder.join(SHORTFALLS));
    known.retain(|known| known.device == device.name && known.model == model);
    known
}

/// Keeps that a device had less memory than planned, for the next plan.
pub fn keep_line(device: &DeviceSpec, line_bytes: Bytes, why: &str) {
    keep_shortfall(device, Short::LineBytes(line_bytes), why.to_owned());
}

/// A run found memory again that this device was known to be short of.
pub fn forget_line(device: &DeviceSpec) {
    forget_shortfalls(|known| known.device == device.name && matches!(known.of, Short::LineBytes(_)));
}

/// A run's work took so many times what was predicted from the rates and what is known of the device's speed. Kept for the
/// next plan where that is far too slow; else what was known is forgotten.
pub fn keep_speed(device: &DeviceSpec, times: f64, run: &str) {
    let slower = |short: &Shortfall| if let Short::Slower(times) = short.of { Some(times) } else { None };
    let times = times * shortfalls(device).iter().find_map(slower).unwrap_or(1.0);
    if times < SLOWER_LEAST {
        forget_shortfalls(|known| known.device == device.name && slower(known).is_some());
    } else if times.is_finite() {
        let times = (100.0 * times).round() / 100.0;
        keep_shortfall(device, Short::Slower(times), format!("{run} took {times} times what its measured rates say"));
    }
}

fn keep_shortfall(device: &DeviceSpec, of: Short, why: String) {
    let (Some(folder), Some(model)) = (folder(), model_of(device)) else { return };
    keep_shortfall_in(&folder, Shortfall { device: device.name.clone(), model, of, why });
}

fn keep_shortfall_in(folder: &Path, new: Shortfall) {
    let mut known: Vec<Shortfall> = load(&folder.join(SHORTFALLS));
    let replaced =
        |old: &Shortfall| (&old.device, &old.model) == (&new.device, &new.model) && old.of.of_the_same(new.of);
    known.retain(|old| !replaced(old));
    known.push(new);
    save(folder, SHORTFALLS, &known);
}

/// Forgets such shortfalls. Answers what they were.
pub fn forget_shortfalls(which: impl Fn(&Shortfall) -> bool) -> Vec<Shortfall> {
    folder().map(|folder| forget_shortfalls_in(&folder, which)).unwrap_or_default()
}

fn forget_shortfalls_in(folder: &Path, which: impl Fn(&Shortfall) -> bool) -> Vec<Shortfall> {
    let known: Vec<Shortfall> = load(&folder.join(SHORTFALLS));
    let (gone, kept): (Vec<_>, Vec<_>) = known.into_iter().partition(which);
    if !gone.is_empty() {
        save(folder, SHORTFALLS, &kept);
    }
    gone
}

/// What a device is; none for one on paper.
fn model_of(device: &DeviceSpec) -> Option<String> {
    match device.kind {
        DeviceKind::Paper => None,
        DeviceKind::Cpu | DeviceKind::Virtual => Some(Cpu::read().model),
        DeviceKind::Cuda => {
            let index = device.name.strip_prefix("cuda:")?.parse().ok()?;
            Some(cuda::open::card(index).ok()?.1.name.clone())
        }
    }
}

/// Where shortfalls are kept.
const SHORTFALLS: &str = "shortfalls.json";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_fell_short_of_is_kept_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let short = |device: &str, of| Shortfall { device: device.into(), model: "x".into(), of, why: "so".into() };
        let line = |device, mib| short(device, Short::LineBytes(Bytes::mib(mib)));
        let slower = |device, times| short(device, Short::Slower(times));
        let known = || load::<Shortfall>(&folder.path().join(SHORTFALLS));
        assert_eq!(forget_shortfalls_in(folder.path(), |_| true), []);
        for short in [line("cpu", 5), slower("cpu", 2.0), line("cuda:0", 7), line("cpu", 4), slower("cpu", 1.5)] {
            keep_shortfall_in(folder.path(), short);
        }
        assert_eq!(known(), [line("cuda:0", 7), line("cpu", 4), slower("cpu", 1.5)]);
        assert_eq!(forget_shortfalls_in(folder.path(), |known| known.device == "cuda:0"), [line("cuda:0", 7)]);
        assert_eq!(forget_shortfalls_in(folder.path(), |_| true), [line("cpu", 4), slower("cpu", 1.5)]);
        assert_eq!(known(), []);
    }
}
