//! The least budgets with which a refused team fits, over all kinds of parallelism, within [`PRECISION`].
//!
//! The budgets that one device needs alone are enough for the team. Bisection lowers them: a team that fits under less
//! also fits under more. A probe accepts a budget if a device fits alone under it, or else a team whose micro-batches
//! have one sequence. Cheap probes only estimate that team. The others pack it ([`single_sequence_team_with`]); the
//! search for a plan packs the same team as its last resort, so the budget is enough when the user types it.

use super::measurements::Measurements;
use super::packed::pack_fastest;
use super::pipeline::Pipeline;
use super::sharded::Sharded;
use super::{TeamOutcome, TeamRequest, best_team, data_parallel, devices_that_fit_alone, find_fitting};
use crate::search::{PinnedChoices, RecipeGoal, join, lossy_option_sets};
use plimsoll_core::{Bytes, DeviceSpec, FileSpec, HostSpec, Parallelism, Plan, Remedy, Rung};

/// Largest part by which a need is above the least that is enough, unless that is less than a MiB.
const PRECISION: f64 = 0.005;
/// Factors on the estimate of the least host memory of a team. They are tried in this order until the team fits.
const HOST_MARGINS: [f64; 6] = [1.01, 1.05, 1.2, 1.5, 2.0, 3.0];

/// Packs a team of several devices with `rungs` taken and micro-batches of one sequence, or of the size that the user
/// has fixed. The search for a plan calls this as its last resort, unless only data parallel is allowed.
///
/// Tries the allowed kinds of parallelism in this order: data parallel (only if all devices have to take part), pipeline,
/// sharded. If no kind fits with its fastest recipes, tries all of them again with the recipes that need the least memory.
/// Returns the first team that fits, or `None`.
pub(super) fn single_sequence_team(
    team: &TeamRequest,
    rungs: &[Rung],
    measurements: &Measurements,
) -> Option<TeamOutcome> {
    let with_goal = |goal| single_sequence_team_with(team, rungs, goal, measurements);
    with_goal(RecipeGoal::Fastest).or_else(|| with_goal(RecipeGoal::LeastMemory))
}

/// Packs a team like [`single_sequence_team`]. In a pipeline and a sharded team, recipes follow `goal`; a data parallel
/// team always gets the fastest recipes that fit.
fn single_sequence_team_with(
    team: &TeamRequest,
    rungs: &[Rung],
    goal: RecipeGoal,
    measurements: &Measurements,
) -> Option<TeamOutcome> {
    let small = with_single_sequences(team);
    if team.require_all
        && team.allows(Parallelism::Data)
        && let Some(outcome) = data_parallel::with_host_shares(&small, rungs, measurements, |mut search| {
            pack_fastest(&small, rungs, &mut search)
        })
    {
        return Some(outcome);
    }
    let pipeline = || pack_fastest(&small, rungs, &mut Pipeline::new(&small, rungs, measurements).with_goal(goal));
    let sharded = || pack_fastest(&small, rungs, &mut Sharded::new(&small, rungs, measurements).with_goal(goal));
    let first = if team.allows(Parallelism::Pipeline) { pipeline() } else { None };
    first.or_else(|| if team.allows(Parallelism::Sharded) { sharded() } else { None })
}

/// The way in which a probe tells whether a team fits.
#[derive(Clone, Copy)]
enum Probe {
    /// By estimates of a stage or shard, and by the recipes of devices alone. It costs little.
    Estimated,
    /// By packed recipes, as the last resort of the search for a plan.
    Packed,
}

/// Returns whether the team fits with any combination of the rungs that it allows, and of `allow`.
fn fits(team: &TeamRequest, allow: &[Rung], probe: Probe, measurements: &Measurements) -> bool {
    let first = &team.devices[0];
    let allowed: Vec<Rung> = first.lossy.allow.iter().chain(allow).copied().collect();
    // Most loss first: it usually needs the least.
    let sets = lossy_option_sets(first, &allowed).into_iter().rev();
    sets.into_iter().any(|rungs| fits_with(team, &rungs, probe, measurements))
}

/// Calls `then` with the team in which `device` has a load line of `budget`.
fn with_line<T>(team: &TeamRequest, device: usize, budget: Bytes, then: impl FnOnce(&TeamRequest) -> T) -> T {
    let spec = DeviceSpec { budget, ..team.devices[device].device.clone() };
    let mut raised = team.clone();
    raised.devices[device].device = &spec;
    then(&raised)
}

/// Returns whether a team of any kind fits, like [`fits`], but with every team that the search for a plan tries.
fn any_team_fits(team: &TeamRequest, allow: &[Rung], measurements: &Measurements) -> bool {
    let first = &team.devices[0];
    let allowed: Vec<Rung> = first.lossy.allow.iter().chain(allow).copied().collect();
    let sets = lossy_option_sets(first, &allowed).into_iter().rev();
    sets.into_iter().any(|rungs| best_team(team, &rungs, measurements).is_some())
}

/// Returns whether the search for a plan finds a team with all devices that have to take part. If that search has a last
/// resort, it is tried first: it is found much sooner than the fastest team.
pub(super) fn any_team_is_found(team: &TeamRequest, measurements: &Measurements) -> bool {
    if team.charges_take_all_room() {
        return false;
    }
    let first = &team.devices[0];
    let takes_all_required = |outcome: TeamOutcome| team.takes_all_required(&outcome);
    let last_resort = |rungs: &Vec<Rung>| {
        single_sequence_team_with(team, rungs, RecipeGoal::LeastMemory, measurements).is_some_and(takes_all_required)
    };
    let has_last_resort = team.allows(Parallelism::Sharded) || team.allows(Parallelism::Pipeline);
    // Most loss first: it usually needs the least.
    has_last_resort && lossy_option_sets(first, &first.lossy.allow).iter().rev().any(last_resort)
        || find_fitting(team, measurements).is_some_and(takes_all_required)
}

/// Returns whether one device, or a team of several, fits with `rungs` taken.
fn fits_with(team: &TeamRequest, rungs: &[Rung], probe: Probe, measurements: &Measurements) -> bool {
    let team_fits = || match probe {
        Probe::Estimated => has_sketch(&with_single_sequences(team), rungs, measurements),
        Probe::Packed => single_sequence_team_with(team, rungs, RecipeGoal::LeastMemory, measurements).is_some(),
    };
    !devices_that_fit_alone(team, rungs, measurements).is_empty() || team_fits()
}

/// Returns whether all devices form a pipeline or a sharded team that fits by its estimates.
fn has_sketch(team: &TeamRequest, rungs: &[Rung], measurements: &Measurements) -> bool {
    let pipeline = || Pipeline::new(team, rungs, measurements).least_host().is_some();
    let sharded = || Sharded::new(team, rungs, measurements).least_host().is_some();
    team.allows(Parallelism::Pipeline) && pipeline() || team.allows(Parallelism::Sharded) && sharded()
}

/// Returns the team with micro-batches of one sequence, unless the user has fixed their size.
fn with_single_sequences<'a>(team: &TeamRequest<'a>) -> TeamRequest<'a> {
    let mut small = team.clone();
    let pin_one = |pins: &mut PinnedChoices| pins.micro_batch = pins.micro_batch.or(Some(1));
    small.devices.iter_mut().for_each(|request| pin_one(&mut request.pins));
    small
}

/// Lowers a budget that is `enough` by bisection, in whole MiB; `too_low` is not enough.
fn lower(too_low: Bytes, enough: Bytes, mut is_enough: impl FnMut(Bytes) -> bool) -> Bytes {
    let (mut low, mut high) = (too_low.0 >> 20, enough.0.div_ceil(1 << 20));
    while high.saturating_sub(low) > 1 && (high - low) as f64 > PRECISION * high as f64 {
        let middle = low.midpoint(high);
        if is_enough(Bytes::mib(middle)) { high = middle } else { low = middle }
    }
    Bytes::mib(high).min(enough)
}

/// Lowers a budget that is `enough` like [`lower`]. The least is probably near `guess`, so budgets around it are tried first, in
/// steps that grow.
fn lower_near(guess: Bytes, too_low: Bytes, enough: Bytes, is_enough: impl Fn(Bytes) -> bool) -> Bytes {
    let guess = Bytes::mib(guess.0.div_ceil(1 << 20)).min(enough);
    let (mut low, mut high, mut step) = (too_low, enough, PRECISION);
    let goes_up = guess > low && guess < high && !is_enough(guess);
    match goes_up {
        true => low = guess,
        false if guess > low => high = guess,
        false => {}
    }
    loop {
        let next = if goes_up { low.0 as f64 * (1.0 + step) } else { high.0 as f64 * (1.0 - step) };
        let next = Bytes::mib(next as u64 >> 20);
        if next <= low || next >= high {
            break;
        }
        let found = is_enough(next);
        if found {
            high = next
        } else {
            low = next
        }
        if found == goes_up {
            break;
        }
        step *= 3.0;
    }
    lower(low, high, is_enough)
}

/// Lowers a budget further if another team fits under slightly less. `enough` is enough for a team with micro-batches
/// of one sequence.
fn lower_further(too_low: Bytes, enough: Bytes, is_enough: impl Fn(Bytes) -> bool) -> Bytes {
    let slightly_less = Bytes::mib(((enough.0 as f64 * (1.0 - PRECISION)) as u64).saturating_sub(1 << 20) >> 20);
    match slightly_less > too_low && is_enough(slightly_less) {
        true => lower_near(slightly_less, too_low, slightly_less, is_enough),
        false => enough,
    }
}

/// Returns the remedies of `refused`, whose load lines for `device` are lowered to the least with which the whole team fits.
/// Leaves out remedies with further rungs than one that needs no higher load line.
pub(super) fn lower_load_lines(
    team: &TeamRequest,
    device: usize,
    refused: &Plan,
    measurements: &Measurements,
) -> Vec<Remedy> {
    let mut needs = refused.needs.clone();
    let line = team.devices[device].device.budget;
    let fits_with_line = |budget: Bytes, allow: &[Rung], probe: Probe| {
        with_line(team, device, budget, |raised| fits(raised, allow, probe, measurements))
    };
    for need in needs.iter_mut().filter(|need| need.host_bytes.is_none() && need.file_bytes.is_none()) {
        if need.budget_bytes > line {
            let allow = need.allow.clone();
            need.budget_bytes = match !allow.is_empty() && fits_with_line(line, &allow, Probe::Packed) {
                true => line,
                false => {
                    let enough = need.budget_bytes;
                    let guess = lower(line, enough, |budget| fits_with_line(budget, &allow, Probe::Estimated));
                    let least = lower_near(guess, line, enough, |budget| fits_with_line(budget, &allow, Probe::Packed));
                    let fits_in = |raised: &TeamRequest| any_team_fits(raised, &allow, measurements);
                    lower_further(line, least, |budget| with_line(team, device, budget, fits_in))
                }
            };
        }
    }
    let is_enough = |need: &Remedy| need.host_bytes.is_none() && !need.allow.is_empty() && need.budget_bytes <= line;
    let enough: Vec<Vec<Rung>> = needs.iter().filter(|need| is_enough(need)).map(|need| need.allow.clone()).collect();
    let goes_further = |need: &Remedy, other: &Vec<Rung>| {
        need.allow.len() > other.len() && other.iter().all(|rung| need.allow.contains(rung))
    };
    needs.retain(|need| enough.iter().all(|other| !goes_further(need, other)));
    needs
}

/// Finds the least host memory with which the whole team fits, and returns it as a remedy. `refused` is the refused plan
/// of one device. Returns `None` if no amount is enough, or if the host cannot be used.
pub(super) fn host_memory_need(team: &TeamRequest, refused: &Plan, measurements: &Measurements) -> Option<Remedy> {
    let first = &team.devices[0];
    let has_host = |&device: &usize| HostSpec { file: FileSpec::NONE, ..team.devices[device].host } != HostSpec::NONE;
    let with_host_memory = team.machines().into_iter().filter(|machine| machine.devices.iter().any(has_host));
    // A remedy names one host: that beside the refused device.
    let name = &refused.devices.first()?.name;
    let is_refused = |device: &usize| team.devices[*device].device.name == *name;
    let [machine] = &with_host_memory.collect::<Vec<_>>()[..] else { return None };
    if !machine.devices.iter().any(is_refused) || first.pins.offload.is_some() {
        return None;
    }
    let with_host = |host: Bytes| with_host(team, &machine.devices, host);
    let alone = refused.needs.iter().filter(|need| need.allow.is_empty()).find_map(|need| need.host_bytes);
    let unlimited = with_host(Bytes::gib(1 << 20));
    for rungs in lossy_option_sets(first, &first.lossy.allow) {
        let is_enough = |host: Bytes| fits_with(&with_host(host), &rungs, Probe::Packed, measurements);
        let (pipeline, sharded) = join(
            || team.allows(Parallelism::Pipeline).then(|| Pipeline::new(&unlimited, &rungs, measurements).least_host()),
            || team.allows(Parallelism::Sharded).then(|| Sharded::new(&unlimited, &rungs, measurements).least_host()),
        );
        let estimate = pipeline.flatten().into_iter().chain(sharded.flatten()).min();
        let margins = estimate.iter().flat_map(|least| HOST_MARGINS.map(|margin| (least.0 as f64 * margin) as u64));
        let estimates = margins.map(|bytes| Bytes::mib(bytes.div_ceil(1 << 20)));
        let mut tried = estimates.filter(|host| *host > team.host && alone.is_none_or(|alone| *host < alone));
        let mut too_low = team.host;
        let enough = tried.find(|&host| {
            let found = is_enough(host);
            too_low = if found { too_low } else { host };
            found
        });
        let Some(enough) = enough.or(alone.filter(|_| rungs.is_empty())) else { continue };
        let least = lower_near(enough, too_low, enough, is_enough);
        let fits = |host: Bytes| best_team(&with_host(host), &rungs, measurements).is_some();
        let least = lower_further(team.host, least, fits);
        let budget = refused.devices.first()?.budget_bytes;
        return Some(Remedy { host_bytes: Some(least), ..Remedy::new(rungs, budget) });
    }
    None
}

/// Returns the team with a load line of `host` for the host of `machine`, the only one with memory.
fn with_host<'a>(team: &TeamRequest<'a>, machine: &[usize], host: Bytes) -> TeamRequest<'a> {
    let mut raised = TeamRequest { host, ..team.clone() };
    machine.iter().for_each(|&device| raised.devices[device].host.budget = host);
    raised
}
