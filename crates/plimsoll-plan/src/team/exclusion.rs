//! Devices that take no part in a planned team, and the reasons that the plan gives for them.

use super::TeamRequest;
use super::candidate::TeamCandidate;
use crate::search::{parallel_map, smallest_recipe, with_lossy};
use plimsoll_core::{Bytes, ExcludedDevice, Plan, Rung};
use plimsoll_program::Share;

/// Returns the bytes by which a plan exceeds the load line of its device.
pub(super) fn excess(plan: &Plan) -> Bytes {
    plan.devices[0].peak_bytes.saturating_sub(plan.devices[0].budget_bytes)
}

/// Returns an excluded device with a reason.
pub(super) fn exclude(team: &TeamRequest, device_index: usize, reason: String) -> ExcludedDevice {
    let device = team.devices[device_index].device.name.clone();
    ExcludedDevice { device, device_index, reason, remedy: None, tokens_per_second: None, evaluator_plan: None }
}

/// Excludes the devices that take no part in a sharded team or a pipeline. `plan_with` finds the fastest team with one more
/// device: that team is slower, or the device cannot take part at all (`no_recipe` is then the reason).
pub(super) fn exclude_others(
    team: &TeamRequest,
    candidate: &TeamCandidate,
    no_recipe: &str,
    plan_with: impl Fn(&[usize]) -> Option<TeamCandidate>,
) -> Vec<ExcludedDevice> {
    let taken = candidate.devices();
    let others = (0..team.devices.len()).filter(|device| !taken.contains(device));
    let exclude_one = |device: usize| {
        let mut devices = taken.clone();
        devices.push(device);
        devices.sort_unstable();
        match plan_with(&devices) {
            Some(with) => exclude_slower(team, device, candidate.seconds, with.seconds),
            None => exclude(team, device, no_recipe.to_owned()),
        }
    };
    others.map(exclude_one).collect()
}

/// Excludes a device because a step takes `with` seconds with it, and `without` seconds without it.
pub(super) fn exclude_slower(team: &TeamRequest, device: usize, without: f64, with: f64) -> ExcludedDevice {
    let reason = slowdown_reason(without / with);
    ExcludedDevice { tokens_per_second: Some(team.tokens_per_step() / with), ..exclude(team, device, reason) }
}

/// Returns the reason for excluding a device that lowers the throughput of the team to `ratio` of it.
pub(super) fn slowdown_reason(ratio: f64) -> String {
    format!("it would slow the team to {:.1} % of its tokens per second (predicted)", 100.0 * ratio)
}

/// Excludes devices that cannot hold the model alone with `rungs` taken, nor with any of the further rungs in `allow`.
pub(super) fn exclude_too_small(
    team: &TeamRequest,
    devices: &[usize],
    rungs: &[Rung],
    allow: &[Rung],
) -> Vec<ExcludedDevice> {
    let mut kinds: Vec<usize> = devices.iter().map(|&device| team.first_alike(device)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let reasons = parallel_map(&kinds, |&kind| too_small_reason(team, kind, rungs, allow));
    let exclude_one = |&device: &usize| {
        let kind = kinds.binary_search(&team.first_alike(device)).expect("every device is of a kind");
        exclude(team, device, reasons[kind].clone())
    };
    devices.iter().map(exclude_one).collect()
}

/// Returns the smallest peak of a device that does the whole step, next to its load line.
fn too_small_reason(team: &TeamRequest, device: usize, rungs: &[Rung], allow: &[Rung]) -> String {
    let request = team.request_for(device, &Share::SINGLE_DEVICE, 1, team.host);
    let smallest = smallest_recipe(&with_lossy(&request, rungs), allow);
    let peak = Bytes(smallest.bytes.device) + request.device.charges;
    format!("its smallest recipe holds {peak}, above its load line of {}", request.device.budget)
}
