//! Devices that take no part in a planned team, and the reasons that the plan gives for them.

use super::TeamRequest;
use super::candidate::TeamCandidate;
use crate::search::{PlanRequest, RecipeMeasurements, parallel_map, smallest_recipe, with_lossy};
use plimsoll_core::{Bytes, ExcludedDevice, Rung};
use plimsoll_program::Share;
use std::sync::Arc;

/// Returns an excluded device with a reason.
pub(super) fn exclude(team: &TeamRequest, device_index: usize, reason: String) -> ExcludedDevice {
    let device = team.devices[device_index].device.name.clone();
    ExcludedDevice { device, device_index, reason, remedy: None, tokens_per_second: None, evaluator_plan: None }
}

/// Returns the devices that take no part in `candidate`, a sharded team or a pipeline, with reasons. `plan_with` finds
/// the fastest team of given devices, and is called with one more device. The reason tells how much slower that team
/// is. If there is no such team, the reason is `no_recipe`.
pub(super) fn exclude_others(
    team: &TeamRequest,
    candidate: &TeamCandidate,
    no_recipe: &str,
    plan_with: impl Fn(&[usize]) -> Option<TeamCandidate>,
) -> Vec<ExcludedDevice> {
    let taken = candidate.devices();
    let others = (0..team.devices.len()).filter(|device| !taken.contains(device));
    let seconds_with = |devices: &[usize]| plan_with(devices).map(|with| with.seconds);
    others.map(|device| exclude_from(team, candidate, device, no_recipe, seconds_with)).collect()
}

/// Excludes one device from a candidate, with a reason. `seconds_with` predicts the seconds of a step on given devices,
/// here those of the candidate and this one. The reason tells how much slower the step is. If `seconds_with` returns
/// `None`, the reason is `no_recipe`.
pub(super) fn exclude_from(
    team: &TeamRequest,
    candidate: &TeamCandidate,
    device: usize,
    no_recipe: &str,
    seconds_with: impl Fn(&[usize]) -> Option<f64>,
) -> ExcludedDevice {
    let mut devices = candidate.devices();
    devices.push(device);
    devices.sort_unstable();
    match seconds_with(&devices) {
        Some(seconds) => exclude_slower(team, device, candidate.seconds, seconds),
        None => exclude(team, device, no_recipe.to_owned()),
    }
}

/// Excludes a device because a step takes `with` seconds with it, and `without` seconds without it.
pub(super) fn exclude_slower(team: &TeamRequest, device: usize, without: f64, with: f64) -> ExcludedDevice {
    let reason = slowdown_reason(without / with);
    ExcludedDevice { tokens_per_second: Some(team.tokens_per_step() / with), ..exclude(team, device, reason) }
}

/// Returns the reason for excluding a device that would lower the throughput of the team to the fraction `ratio`.
pub(super) fn slowdown_reason(ratio: f64) -> String {
    format!("it would slow the team to {:.1} % of its tokens per second (predicted)", 100.0 * ratio)
}

/// Excludes `devices` because none can hold the model alone: neither with `rungs` taken, nor with any of the rungs in
/// `allow` in addition. The reason tells what the smallest recipe needs.
pub(super) fn exclude_too_small(
    team: &TeamRequest,
    devices: &[usize],
    rungs: &[Rung],
    allow: &[Rung],
    measurements: &Arc<RecipeMeasurements>,
) -> Vec<ExcludedDevice> {
    let mut kinds: Vec<usize> = devices.iter().map(|&device| team.first_alike(device)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let reasons = parallel_map(&kinds, |&kind| {
        let request = with_lossy(&team.request_for(kind, &Share::SINGLE_DEVICE, 1, team.host), rungs);
        too_small_reason(&request, allow, measurements)
    });
    let exclude_one = |&device: &usize| {
        let kind = kinds.binary_search(&team.first_alike(device)).expect("every device is of a kind");
        exclude(team, device, reasons[kind].clone())
    };
    devices.iter().map(exclude_one).collect()
}

/// Returns a reason in words: the smallest peak of a device that does the whole step, and the device's load line.
fn too_small_reason(request: &PlanRequest, allow: &[Rung], measurements: &Arc<RecipeMeasurements>) -> String {
    let smallest = smallest_recipe(request, allow, measurements);
    let peak = Bytes(smallest.bytes.device) + request.device.charges;
    format!("its smallest recipe holds {peak}, above its load line of {}", request.device.budget)
}
