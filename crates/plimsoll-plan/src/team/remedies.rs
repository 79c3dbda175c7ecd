//! Remedies for a team: settings with which an excluded device would take part, and needs with which a refused team
//! would fit.
//!
//! The team is planned under each change before the change is named, so that a named remedy works when it is typed.

use super::exclusion::slowdown_reason;
use super::measurements::Measurements;
use super::needs::any_team_is_found;
use super::{TeamOutcome, TeamRequest, data_parallel, find_fitting};
use crate::bisection;
use crate::device_request::DevicesRequest;
use crate::paper;
use crate::search::{
    PlanRequest, has_fitting_recipe, lossy_option_sets, plan_recipe, search, smallest_recipe, with_lossy,
};
use plimsoll_core::{Budget, Bytes, DeviceKind, DevicePlan, DeviceSpec, Plan, Remedy, Rung};
use plimsoll_program::Share;
use std::collections::BTreeMap;

/// Room for the memory of a process outside its arenas, which varies from start to start.
const PROCESS_VARIATION: Bytes = Bytes::mib(1);
/// Number of steps between the present load lines and sufficient ones. The search for lower sufficient ones tries
/// load lines at these steps.
const LINE_STEPS: u64 = 32;

/// A change of the settings of a request.
#[derive(Clone, Debug, Default)]
struct Change {
    /// New load lines, by index of the device in [`TeamRequest::devices`].
    budgets: BTreeMap<usize, Bytes>,
    /// Lossy rungs that are allowed in addition.
    allow: Vec<Rung>,
    /// Whether every device has to take part.
    require_all: bool,
}

/// A change with the throughput of the team under it.
#[derive(Clone)]
struct RatedChange {
    change: Change,
    tokens_per_second: f64,
}

impl Change {
    /// Plans the team under the change; `None` if it does not fit.
    fn plan(&self, team: &TeamRequest, measurements: &Measurements) -> Option<TeamOutcome> {
        self.apply(team, |changed| {
            let outcome = find_fitting(changed, measurements)?;
            changed.takes_all_required(&outcome).then_some(outcome)
        })
    }

    /// Returns whether the team fits under the change. It is known sooner than the fastest plan.
    fn fits(&self, team: &TeamRequest, measurements: &Measurements) -> bool {
        self.apply(team, |changed| any_team_is_found(changed, measurements))
    }

    /// Calls `then` with the changed team.
    fn apply<T>(&self, team: &TeamRequest, then: impl FnOnce(&TeamRequest) -> T) -> T {
        let changed_spec = |(number, request): (usize, &PlanRequest)| {
            let budget = self.budgets.get(&number).copied();
            DeviceSpec { budget: budget.unwrap_or(request.device.budget), ..request.device.clone() }
        };
        let specs: Vec<DeviceSpec> = team.devices.iter().enumerate().map(changed_spec).collect();
        let changed_request = |(request, device)| {
            let PlanRequest { mut lossy, .. } = PlanRequest::clone(request);
            lossy.allow.extend(self.allow.iter().filter(|rung| !request.lossy.allow.contains(rung)));
            PlanRequest { device, lossy, ..request.clone() }
        };
        then(&TeamRequest {
            devices: team.devices.iter().zip(&specs).map(changed_request).collect(),
            host: team.host,
            require_all: team.require_all || self.require_all,
            constraint: team.constraint.clone(),
            evaluations: None,
        })
    }

    /// Plans the team under the change, and returns the change with the team's tokens per second. Returns `None` if the
    /// team does not fit, or if of the devices identical to `device` no more take part than the `before` that do without
    /// the change.
    fn rate(
        self,
        team: &TeamRequest,
        device: usize,
        before: usize,
        measurements: &Measurements,
    ) -> Option<RatedChange> {
        let outcome = self.plan(team, measurements)?;
        let is_alike = |other: usize| team.are_alike(other, device);
        let taken = outcome.workers.iter().filter(|worker| is_alike(worker.device)).count();
        let tokens_per_second = outcome.plan.predicted.tokens_per_second;
        (taken > before).then_some(RatedChange { change: self, tokens_per_second })
    }

    /// Returns the change as command-line settings, for a command that asked for its devices with `devices`.
    fn to_settings(&self, team: &TeamRequest, devices: &DevicesRequest) -> String {
        let mut settings = Vec::new();
        if !self.allow.is_empty() {
            let names: Vec<String> = self.allow.iter().map(Rung::to_string).collect();
            settings.push(format!("--allow {}", names.join(",")));
        }
        if !self.budgets.is_empty() {
            let mut devices = devices.clone();
            for (&number, budget) in &self.budgets {
                if let Some(at) = position_in_request(team, &devices, number) {
                    devices.devices[at].set_budget(Budget::Amount(*budget));
                }
            }
            settings.push(format!("--devices {devices}"));
        }
        if self.require_all {
            settings.push("--set run.parallelism=all".to_owned());
        }
        settings.join(" ")
    }
}

/// Adds to each excluded device of a plan its remedy: the settings with which it would take part, if there are any.
/// `devices` is the device list of the command, which the settings change. A refusal is left as it is. `measurements` has those of the plan.
pub fn add_device_remedies(team: &TeamRequest, devices: &DevicesRequest, plan: &mut Plan, measurements: &Measurements) {
    let without = plan.predicted.tokens_per_second;
    let mut known: Vec<(usize, Option<RatedChange>)> = Vec::new();
    let excluded: Vec<usize> = plan.excluded.iter().map(|device| device.device_index).collect();
    for (at, &device) in excluded.iter().enumerate().filter(|_| plan.fits) {
        let is_alike = |other: usize| team.are_alike(other, device);
        // A change is a remedy if more of the identical devices take part, whichever they are.
        let before = (0..team.devices.len()).filter(|number| is_alike(*number) && !excluded.contains(number)).count();
        let rate = |change: Change| change.rate(team, device, before, measurements);
        // Identical devices have the same remedy, unless it names a device.
        let found = match known.iter().find(|(other, _)| is_alike(*other)) {
            Some((_, Some(rated))) if rated.change.budgets.is_empty() => Some(rated.clone()),
            Some((_, None)) => None,
            _ => possible_changes(team, devices, device, &plan.rungs).into_iter().find_map(rate),
        };
        let excluded = &mut plan.excluded[at];
        excluded.remedy = found.as_ref().map(|rated| rated.change.to_settings(team, devices));
        // The planned throughput replaces the estimate.
        if let (Some(estimate), Some(rated)) = (&mut excluded.tokens_per_second, &found) {
            *estimate = rated.tokens_per_second;
            excluded.reason = slowdown_reason(rated.tokens_per_second / without);
        }
        known.push((device, found));
    }
}

/// Returns the index in `devices` of device `number` of the team; `None` if its name is not there. Paper devices may
/// share a name: they are in the same order in both.
fn position_in_request(team: &TeamRequest, devices: &DevicesRequest, number: usize) -> Option<usize> {
    let name = &team.devices[number].device.name;
    let before = team.devices[..number].iter().filter(|request| request.device.name == *name).count();
    let of_name = devices.devices.iter().enumerate().filter(|(_, device)| device.name() == *name);
    of_name.map(|(at, _)| at).nth(before)
}

/// Returns the changes with which an excluded device may take part, the cheapest first.
fn possible_changes(team: &TeamRequest, devices: &DevicesRequest, device: usize, rungs: &[Rung]) -> Vec<Change> {
    let all = Change { require_all: true, ..Change::default() };
    let request = team.request_for(device, &Share::SINGLE_DEVICE, 1, team.host);
    let name = request.device.name.clone();
    if has_fitting_recipe(&with_lossy(&request, rungs)) {
        return vec![all];
    }
    let named = position_in_request(team, devices, device).map(|at| &devices.devices[at]);
    let has_own_budget = named.is_some_and(|device| device.budget().is_some());
    // A device without a budget of its own already has all memory that is free.
    let may_have_more = match request.device.kind {
        DeviceKind::Cpu | DeviceKind::Cuda => has_own_budget,
        DeviceKind::Virtual | DeviceKind::Paper => named.is_some(),
    };
    let needed = may_have_more.then(|| needed_budget(&with_lossy(&request, rungs))).flatten();
    let needed = needed.filter(|budget| paper::usable_memory(&name).is_none_or(|usable| *budget <= usable));
    let with_budget = |budget: Bytes| Change { budgets: BTreeMap::from([(device, budget)]), ..Change::default() };
    let mut changes: Vec<Change> = needed.map(with_budget).into_iter().collect();
    changes.push(all.clone());
    changes.extend(needed.map(|needed| Change { require_all: true, ..with_budget(needed) }));
    // The other devices fit without further rungs, so these are only taken where all have to take part.
    let offered: Vec<Rung> = Rung::ALL.into_iter().filter(|rung| request.lossy.offer.contains(rung)).collect();
    let goes_further = |set: &Vec<Rung>| set.len() > rungs.len() && rungs.iter().all(|rung| set.contains(rung));
    let mut further = lossy_option_sets(&request, &offered).into_iter().filter(goes_further);
    let enough = further.find(|set| has_fitting_recipe(&with_lossy(&request, set)));
    changes.extend(enough.map(|allow| Change { allow, ..all }));
    changes
}

/// Returns a load line under which the request fits on its device, in whole MiB; `None` if no load line is enough.
fn needed_budget(request: &PlanRequest) -> Option<Bytes> {
    let mut request = request.clone();
    (request.lossy.allow, request.lossy.offer) = (vec![], vec![]);
    let mut needs = search(&request).plan.needs.into_iter();
    let need = needs.find(|need| need.host_bytes.is_none() && need.allow.is_empty())?;
    Some(Bytes::mib(need.budget_bytes.0.div_ceil(1 << 20)) + PROCESS_VARIATION)
}

/// Converts the remedies of one refused device to remedies of a team in which every device has to take part. Each
/// device gets an even share of the sequences and of the host, and the load line that it then needs. Remedies that are
/// not enough for all devices are dropped.
pub(super) fn needs_for_all(team: &TeamRequest, refused: &Plan, measurements: &Measurements) -> Vec<Remedy> {
    let enough_sequences = team.sequences_per_step() >= team.devices.len() as u64;
    let Some(first) = refused.devices.first().filter(|_| enough_sequences) else { return vec![] };
    let is_local = |need: &&Remedy| need.host_bytes.is_none() && need.file_bytes.is_none();
    let for_team = |need: &Remedy| need_for_all(team, first, need, measurements);
    let mut needs: Vec<Remedy> = refused.needs.iter().filter(is_local).filter_map(for_team).collect();
    if let Some(at) = needs.iter().position(|need| need.allow.is_empty()) {
        let lossless = with_lower_budgets(team, first, &needs[at], measurements);
        // A lossy need is only worth it with a lower load line.
        needs.retain(|need| need.allow.is_empty() || need.budget_bytes < lossless.budget_bytes);
        needs[at] = lossless;
    }
    needs
}

/// Converts the remedy `need` of the refused device `first` to a remedy of all devices, with the load lines that they need
/// as a data parallel team. Returns `None` if these are not enough for a team of any kind.
fn need_for_all(team: &TeamRequest, first: &DevicePlan, need: &Remedy, measurements: &Measurements) -> Option<Remedy> {
    let (total, ranks) = (team.sequences_per_step(), team.devices.len() as u64);
    let sequences: Vec<u64> = (0..ranks).map(|rank| total * (rank + 1) / ranks - total * rank / ranks).collect();
    let shares = data_parallel::shares(&sequences);
    let mut budgets: BTreeMap<String, Bytes> = BTreeMap::new();
    for (device, share) in shares.iter().enumerate() {
        let request = team.request_for(device, share, sequences[device], Bytes(team.host.0 / ranks));
        let request = with_lossy(&request, &need.allow);
        let smallest =
            plan_recipe(&request, &smallest_recipe(&request, &[], &measurements.recipes).recipe).plan.devices[0]
                .peak_bytes;
        if smallest > request.device.budget {
            let budget = budgets.entry(request.device.name.clone()).or_default();
            *budget = (*budget).max(Bytes::mib(smallest.0.div_ceil(1 << 20)) + PROCESS_VARIATION);
        }
    }
    // A load line never exceeds the memory of a paper device.
    let is_usable =
        |(name, budget): (&String, &Bytes)| paper::usable_memory(name).is_none_or(|usable| *budget <= usable);
    if !budgets.iter().all(is_usable) {
        return None;
    }
    // All devices of a name get its load line, unless they have more already.
    let raised = |(number, request): (usize, &PlanRequest)| {
        let budget = budgets.get(&request.device.name).filter(|budget| **budget > request.device.budget)?;
        Some((number, *budget))
    };
    let raised = team.devices.iter().enumerate().filter_map(raised).collect();
    let change = Change { budgets: raised, allow: need.allow.clone(), require_all: true };
    if !change.fits(team, measurements) {
        return None;
    }
    let mut others = budgets;
    let budget_bytes = others.get(&first.name).copied().unwrap_or(first.budget_bytes);
    if team.devices.iter().filter(|request| request.device.name == first.name).count() == 1 {
        others.remove(&first.name);
    }
    Some(Remedy { other_budget_bytes: others, budget_bytes, peak_bytes: None, ..need.clone() })
}

/// A device whose load line a remedy raises.
struct ShortDevice {
    number: usize,
    budget: Bytes,
    /// The load line of the remedy, which is enough for a data parallel team.
    enough: Bytes,
}

impl ShortDevice {
    /// Returns the load line at a step between the present one and the sufficient one, in whole MiB.
    fn budget_at(&self, step: u64) -> Bytes {
        let more = (self.enough.0 - self.budget.0).div_ceil(LINE_STEPS) * step;
        self.enough.min(Bytes::mib((self.budget.0 + more).div_ceil(1 << 20)))
    }
}

/// Lowers the load lines of the remedy `need` as far as all devices still fit, with any kind of parallelism. The search
/// is a bisection over steps between the present load lines and those of `need`. `first` is the device to which
/// [`Remedy::budget_bytes`] of `need` belongs.
fn with_lower_budgets(team: &TeamRequest, first: &DevicePlan, need: &Remedy, measurements: &Measurements) -> Remedy {
    let enough = |name: &String| match need.other_budget_bytes.get(name) {
        Some(budget) => Some(*budget),
        None => (*name == first.name).then_some(need.budget_bytes),
    };
    let to_short = |(number, request): (usize, &PlanRequest)| {
        let DeviceSpec { name, budget, .. } = request.device;
        let enough = enough(name).filter(|enough| enough > budget)?;
        Some(ShortDevice { number, budget: *budget, enough })
    };
    let short: Vec<ShortDevice> = team.devices.iter().enumerate().filter_map(to_short).collect();
    let budgets_at = |step: u64| -> BTreeMap<usize, Bytes> {
        short.iter().map(|device| (device.number, device.budget_at(step))).collect()
    };
    let is_enough = |step: u64| {
        let lower = |(number, budget): (usize, Bytes)| (number, budget.saturating_sub(PROCESS_VARIATION));
        let budgets = budgets_at(step).into_iter().map(lower).collect();
        Change { budgets, require_all: true, ..Change::default() }.fits(team, measurements)
    };
    // The lines of the need itself are enough.
    let budgets = budgets_at(bisection::smallest(1..LINE_STEPS, 0, is_enough));
    let of_name = |name: &String| budgets.iter().find(|(number, _)| team.devices[**number].device.name == *name);
    let budget = |name: &String, before: Bytes| of_name(name).map_or(before, |(_, budget)| *budget);
    let others = need.other_budget_bytes.iter().map(|(name, before)| (name.clone(), budget(name, *before))).collect();
    Remedy { budget_bytes: budget(&first.name, need.budget_bytes), other_budget_bytes: others, ..need.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::LossyOptions;
    use crate::team::plan_team;
    use crate::testing;
    use plimsoll_core::{Link, Parallelism};
    use plimsoll_program::models::{ModelConfig, preset};

    #[test]
    fn single_rung_for_team_replaces_two_for_device() {
        let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
        let device = testing::device(1.0, Bytes::mib(50), Link::MEMORY);
        let lossy = LossyOptions { offer: vec![Rung::Adam8bit, Rung::Lora, Rung::Nf4], ..LossyOptions::default() };
        let needs = |devices: usize| {
            let request = PlanRequest { lossy: lossy.clone(), ..testing::request(&config, &device, 64, 6) };
            let devices = vec![request; devices];
            let team =
                TeamRequest { devices, host: Bytes::ZERO, require_all: false, constraint: None, evaluations: None };
            let plan = plan_team(&team).plan;
            assert!(!plan.fits);
            let summary = |need: Remedy| (need.allow, need.budget_bytes <= device.budget);
            plan.needs.into_iter().map(summary).collect::<Vec<_>>()
        };
        let (lora, both) = (vec![Rung::Lora], vec![Rung::Lora, Rung::Nf4]);
        let (nothing, adam) = ((vec![], false), (vec![Rung::Adam8bit], false));
        assert_eq!(needs(1), [nothing.clone(), adam.clone(), (lora.clone(), false), (both, true)]);
        assert_eq!(needs(3), [nothing, adam, (lora, true)]);
    }

    #[test]
    fn needs_for_all_suffice_and_lossless_dominates() {
        let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
        let with_budget = |(name, line)| DeviceSpec {
            name: String::from(name),
            ..testing::device(1.0, Bytes::mib(line), Link::MEMORY)
        };
        let devices = [("large", 400), ("small", 60)].map(with_budget);
        let lossy = LossyOptions { offer: vec![Rung::Adam8bit, Rung::Lora], ..LossyOptions::default() };
        let plan = |devices: &[DeviceSpec]| {
            let request = |device| PlanRequest { lossy: lossy.clone(), ..testing::request(&config, device, 64, 6) };
            let devices = devices.iter().map(request).collect();
            plan_team(&TeamRequest {
                devices,
                host: Bytes::ZERO,
                require_all: true,
                constraint: None,
                evaluations: None,
            })
            .plan
        };
        let refused = plan(&devices);
        assert!(!refused.fits);
        let least = &refused.needs[0];
        assert_eq!((&least.allow, least.other_budget_bytes.len()), (&vec![], 0), "{refused:?}");
        let mut enough = devices;
        enough[1].budget = least.budget_bytes;
        let plan = plan(&enough);
        assert!(plan.fits && plan.team.len() == 2 && plan.parallelism != Some(Parallelism::Data), "{least:?}");
        assert!(refused.needs[1..].iter().all(|need| need.budget_bytes < least.budget_bytes), "{:?}", refused.needs);
    }
}
