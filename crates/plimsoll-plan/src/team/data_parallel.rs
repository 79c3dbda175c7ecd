//! Data parallel teams: every device has the whole model and computes whole sequences. This module finds the numbers of
//! sequences that make the slowest device as fast as possible, and the devices that are worth including.
//!
//! [`BatchSplitter`] does so from a table of recipes per kind of device, without a search for each split.
//! [`DataParallel`] is the [`TeamSearch`] over it. Devices share one host: `with_host_shares` divides its memory where
//! together they would use more of it than there is.

use super::all_reduce::AllReduceTime;
use super::candidate::{TeamCandidate, TeamSearch, WorkerCandidate};
use super::exclusion::{exclude_from, exclude_too_small};
use super::hosts::Machine;
use super::measurements::{Measurements, RungMeasurements};
use super::{TeamRequest, bandwidth_tiers};
use crate::bisection;
use crate::search::{Candidate, PlanRequest, RecipeMeasurements, RecipeTable, SecondsBesidePasses};
use plimsoll_core::{Bytes, DeviceSpec, ExcludedDevice, Parallelism, Recipe, Rung, ScalingEfficiency};
use plimsoll_program::Share;
use std::collections::HashSet;
use std::sync::Arc;

/// Most times that the search adds recipes near the fastest split and then chooses the split anew.
const MAX_REFINEMENTS: usize = 4;
/// Most units in which sequences are counted while devices share a host.
const MAX_UNITS: u64 = 1024;
/// Most times that the time of the fastest device alone is doubled until the hosts are large enough for all devices.
const MAX_DOUBLINGS: u32 = 8;
/// Number of probes of the bisection that finds the time of the fastest split.
const TIME_PROBES: u32 = 100;

/// The devices of a team, among which the sequences of a step are split. Each has a table of recipes with predicted
/// seconds; identical devices share a table.
pub(super) struct BatchSplitter<'q> {
    /// The request of each device, from which its table is built.
    requests: &'q [PlanRequest<'q>],
    tables: Vec<RecipeTable<'q>>,
    /// The index in `tables` for each device.
    table_of: Vec<usize>,
    /// The machines, whose devices share a host.
    machines: Vec<Machine>,
    sequences_per_step: u64,
}

/// Sequences per device, and the predicted time of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Split {
    /// The devices that take part, in the order of ranks.
    pub devices: Vec<usize>,
    /// The number of sequences of each device, in the order of `devices`.
    pub sequences: Vec<u64>,
    /// Predicted seconds of a step, including the all-reduce.
    pub seconds: f64,
    /// Most bytes of host memory that each device uses, in the order of `devices`: [`u64::MAX`] if the hosts have enough
    /// for the fastest recipes of all.
    pub host_limits: Vec<u64>,
}

impl Split {
    /// Returns whether the hosts have too little memory for the fastest recipes of all devices.
    fn is_limited_by_hosts(&self) -> bool {
        self.host_limits.iter().any(|limit| *limit < u64::MAX)
    }
}

/// The sequences that a device computes with at most some bytes of host memory.
#[derive(Clone, Copy, Debug)]
struct LimitedSequences {
    sequences: u64,
    host_limit: u64,
}

/// The work of other ranks for which a rank waits in a step.
#[derive(Clone, Copy, Debug, Default)]
struct TeamWaits {
    all_reduce: AllReduceTime,
    /// The most seconds that a rank works once per step, with the recipe for which these are fewest. The step ends when the
    /// slowest update ends, and no update begins before the gradients of all ranks are summed.
    per_step_seconds: f64,
    /// The shortest time that a rank needs for the part of its last backward pass in which gradients are exchanged, with the
    /// recipe that is fastest in long steps. `None` if no rank is faster than the others.
    shortest_exchange: Option<f64>,
}

/// Layers whose gradients a staging ring holds.
const RING_LAYERS: u32 = 2;

impl TeamWaits {
    /// Returns the seconds of a step beside the passes of a recipe.
    fn seconds_beside_passes(&self, candidate: &Candidate) -> f64 {
        candidate.per_step_seconds.max(self.per_step_seconds)
            + self.all_reduce.exposed_seconds(candidate.overlap_seconds)
            + self.stall_seconds(candidate)
    }

    /// Returns the seconds that the last backward pass takes longer if gradients are offloaded. Their staging ring is soon
    /// full, so a rank cannot begin its exchange before all others do, however long it takes itself.
    fn stall_seconds(&self, candidate: &Candidate) -> f64 {
        let is_stalled = candidate.recipe.offload.gradients > RING_LAYERS;
        let shortest = self.shortest_exchange.filter(|_| is_stalled);
        shortest.map_or(0.0, |shortest| (candidate.overlap_seconds - shortest).max(0.0))
    }
}

/// Returns whether two devices are identical for the planner: the same but for their names, with the same request.
pub(super) fn are_alike(a: &PlanRequest, b: &PlanRequest) -> bool {
    let nameless = |device: &DeviceSpec| DeviceSpec { name: String::new(), ..device.clone() };
    nameless(a.device) == nameless(b.device) && a.host == b.host && a.sequences == b.sequences && a.pins == b.pins
}

impl<'q> BatchSplitter<'q> {
    /// Builds a table of recipes for each kind of device. Each request should ask for about as many sequences as the
    /// device will get.
    pub fn new(
        requests: &'q [PlanRequest<'q>],
        machines: Vec<Machine>,
        sequences_per_step: u64,
        measured: &RungMeasurements,
    ) -> BatchSplitter<'q> {
        let mut first_of_kind: Vec<usize> = Vec::new();
        let mut table_of = Vec::new();
        for request in requests {
            let known = first_of_kind.iter().position(|&number| are_alike(&requests[number], request));
            table_of.push(known.unwrap_or(first_of_kind.len()));
            if known.is_none() {
                first_of_kind.push(table_of.len() - 1);
            }
        }
        let cache_of = |request: &PlanRequest| measured.of_request(request);
        let table = |&number: &usize| RecipeTable::new(&requests[number], sequences_per_step, &cache_of);
        let tables = first_of_kind.iter().map(table).collect();
        BatchSplitter { requests, tables, table_of, machines, sequences_per_step }
    }

    fn table(&self, device: usize) -> &RecipeTable<'q> {
        &self.tables[self.table_of[device]]
    }

    /// Returns whether two devices are identical for the planner, and so share a table of recipes.
    pub fn are_alike(&self, one: usize, other: usize) -> bool {
        self.table_of[one] == self.table_of[other]
    }

    /// Returns the devices that can hold the model.
    pub fn able_devices(&self) -> Vec<usize> {
        (0..self.table_of.len()).filter(|&device| !self.table(device).is_empty()).collect()
    }

    /// Returns the time of the gradient all-reduce between `devices`.
    pub fn all_reduce(&self, devices: &[usize]) -> AllReduceTime {
        let requests: Vec<&PlanRequest> = devices.iter().map(|&device| &self.requests[device]).collect();
        AllReduceTime::between(&requests)
    }

    /// Returns the work of others for which each of `devices` waits.
    fn waits(&self, devices: &[usize]) -> TeamWaits {
        let tables = || devices.iter().map(|&device| self.table(device));
        let exchanges = tables().map(RecipeTable::overlap_seconds);
        let are_unequal = devices.iter().any(|&device| !self.are_alike(device, devices[0]));
        TeamWaits {
            all_reduce: self.all_reduce(devices),
            per_step_seconds: tables().map(RecipeTable::least_per_step_seconds).fold(0.0, f64::max),
            shortest_exchange: exchanges.reduce(f64::min).filter(|_| are_unequal),
        }
    }

    /// Returns the fastest split over exactly these devices; `None` if a device cannot hold the model, or would get no
    /// sequence.
    pub fn split(&self, devices: &[usize]) -> Option<Split> {
        self.split_with(devices, &self.waits(devices))
    }

    /// Returns the fastest split over exactly these devices, as if no rank waited for others. Returns `None` if a
    /// device cannot hold the model, or would get no sequence.
    pub fn split_without_all_reduce(&self, devices: &[usize]) -> Option<Split> {
        self.split_with(devices, &TeamWaits::default())
    }

    /// Returns the split that gives all devices the same number of sequences, or some of them one more. Returns `None`
    /// if a device has no sequence, or no recipe for its sequences.
    pub fn split_evenly(&self, devices: &[usize]) -> Option<Split> {
        let ranks = devices.len() as u64;
        let total = self.sequences_per_step;
        let sequences = (0..ranks).map(|rank| total * (rank + 1) / ranks - total * rank / ranks);
        self.price_split(devices, sequences.collect())
    }

    /// Predicts the time of a given split; `None` if a device has no sequence, or no recipe for its sequences.
    fn price_split(&self, devices: &[usize], sequences: Vec<u64>) -> Option<Split> {
        let waits = self.waits(devices);
        let seconds_of = |(&device, &own): (&usize, &u64)| self.seconds(device, own, u64::MAX, &waits);
        let seconds = devices.iter().zip(&sequences).map(seconds_of).fold(0.0, f64::max);
        let is_possible = seconds.is_finite() && sequences.iter().all(|&own| own > 0);
        let host_limits = vec![u64::MAX; devices.len()];
        is_possible.then(|| Split { devices: devices.to_vec(), sequences, seconds, host_limits })
    }

    /// Predicts the seconds of a step in which a device computes `sequences` sequences, with at most `host_limit` bytes of
    /// host memory. They are infinite if the device has no recipe for them.
    fn seconds(&self, device: usize, sequences: u64, host_limit: u64, waits: &TeamWaits) -> f64 {
        let beside = |candidate: &Candidate| waits.seconds_beside_passes(candidate);
        self.table(device).fastest(sequences, host_limit, &beside).map_or(f64::INFINITY, |(_, seconds)| seconds)
    }

    /// Finds the fastest split by bisection over the time of a step: in a given time, each device computes as many
    /// sequences as it can. Returns `None` if a device has no recipe, or would get no sequence.
    fn split_with(&self, devices: &[usize], waits: &TeamWaits) -> Option<Split> {
        let total = self.sequences_per_step;
        let seconds_of = |device: usize, sequences: u64, limit: u64| self.seconds(device, sequences, limit, waits);
        // The fastest device alone is an upper bound on the time.
        let alone = devices.iter().map(|&device| seconds_of(device, total, u64::MAX)).fold(f64::INFINITY, f64::min);
        // Each device gets at least one sequence.
        let one_each = devices.iter().map(|&device| seconds_of(device, 1, u64::MAX)).fold(0.0, f64::max);
        if !alone.is_finite() || !one_each.is_finite() || total < devices.len() as u64 {
            return None;
        }
        let most_within = |seconds: f64| self.most_within(devices, seconds, waits);
        let is_enough = |seconds: f64| sum_of_sequences(&most_within(seconds)) >= total;
        // Hosts may be too small for the recipes with which the devices are as fast.
        let longest = one_each.max(alone);
        let longest =
            (0..MAX_DOUBLINGS).map(|doublings| longest * f64::from(1u32 << doublings)).find(|&s| is_enough(s))?;
        let shortest = bisection::narrow(0.0, longest, TIME_PROBES, f64::midpoint, |seconds| {
            is_enough(seconds).then_some(seconds)
        });
        let mut shares = most_within(shortest.max(one_each));
        if sum_of_sequences(&shares) < total || shares.iter().any(|share| share.sequences == 0) {
            shares = most_within(longest);
        }
        // The surplus is taken from the devices that take longest, so that identical devices get the same.
        let mut seconds: Vec<f64> = devices
            .iter()
            .zip(&shares)
            .map(|(&device, share)| seconds_of(device, share.sequences, share.host_limit))
            .collect();
        for _ in total..sum_of_sequences(&shares) {
            let longest = |a: &usize, b: &usize| {
                seconds[*a].total_cmp(&seconds[*b]).then(shares[*a].sequences.cmp(&shares[*b].sequences)).then(a.cmp(b))
            };
            let from = (0..devices.len()).filter(|&rank| shares[rank].sequences > 1).max_by(longest)?;
            shares[from].sequences -= 1;
            seconds[from] = seconds_of(devices[from], shares[from].sequences, shares[from].host_limit);
        }
        let slowest = seconds.iter().copied().fold(0.0, f64::max);
        let (sequences, host_limits) = shares.iter().map(|share| (share.sequences, share.host_limit)).unzip();
        Some(Split { devices: devices.to_vec(), sequences, seconds: slowest, host_limits })
    }

    /// Returns the most sequences that each device computes in a step of at most `seconds`. The devices of a machine
    /// together use at most the memory of its host; if that is impossible, they get no sequences.
    fn most_within(&self, devices: &[usize], seconds: f64, waits: &TeamWaits) -> Vec<LimitedSequences> {
        let beside = |candidate: &Candidate| waits.seconds_beside_passes(candidate);
        let options: Vec<Vec<LimitedSequences>> =
            devices.iter().map(|&device| self.options_within(device, seconds, &beside)).collect();
        let nothing = LimitedSequences { sequences: 0, host_limit: 0 };
        let mut shares: Vec<LimitedSequences> =
            options.iter().map(|options| options.last().copied().unwrap_or(nothing)).collect();
        if sum_of_sequences(&shares) >= self.sequences_per_step {
            for machine in &self.machines {
                let ranks: Vec<usize> = (0..devices.len()).filter(|&r| machine.devices.contains(&devices[r])).collect();
                let used: u64 = ranks.iter().map(|&rank| shares[rank].host_limit).sum();
                if used > machine.host.0 {
                    let own: Vec<&[LimitedSequences]> = ranks.iter().map(|&rank| &options[rank][..]).collect();
                    let chosen = choose_under_host(&own, machine.host.0, self.sequences_per_step);
                    let chosen = chosen.unwrap_or_else(|| vec![nothing; ranks.len()]);
                    ranks.iter().zip(chosen).for_each(|(&rank, share)| shares[rank] = share);
                    continue;
                }
                ranks.iter().for_each(|&rank| shares[rank].host_limit = u64::MAX);
            }
        }
        shares
    }

    /// Returns the numbers of sequences that a device computes in a step of at most `seconds`, each with the least host
    /// memory for it, in ascending order.
    fn options_within(&self, device: usize, seconds: f64, beside: SecondsBesidePasses) -> Vec<LimitedSequences> {
        let mut options: Vec<LimitedSequences> = Vec::new();
        let most = self.sequences_per_step;
        let found = self.table(device).sequences_within(seconds, beside);
        let mut found: Vec<LimitedSequences> = found
            .map(|(sequences, host_limit)| LimitedSequences { sequences: sequences.min(most), host_limit })
            .filter(|option| option.sequences > 0)
            .collect();
        found.sort_by(|a, b| a.host_limit.cmp(&b.host_limit).then(b.sequences.cmp(&a.sequences)));
        for option in found {
            if options.last().is_none_or(|last| last.sequences < option.sequences) {
                options.push(option);
            }
        }
        options
    }

    /// Adds recipes that use less host memory than the fastest ones, for devices that share a host: those with the least,
    /// and the fastest within several fractions of the host.
    fn add_recipes_with_less_host(&mut self) {
        for machine in &self.machines {
            let count = machine.devices.len() as u64;
            let mut done = HashSet::new();
            let tables: Vec<usize> = machine.devices.iter().map(|&device| self.table_of[device]).collect();
            let least: Vec<u64> = tables.iter().map(|&table| self.tables[table].add_least_host()).collect();
            let all_least: u64 = least.iter().fold(0, |sum, least| sum.saturating_add(*least));
            for (&table, &own) in tables.iter().zip(&least) {
                if count < 2 || machine.host == Bytes::ZERO || !done.insert(table) {
                    continue;
                }
                let halves = (0..64)
                    .map(|power| 1u64 << power)
                    .filter(|bytes| (machine.host.0 / count / 2..machine.host.0).contains(bytes));
                let beside_others = machine.host.0.saturating_sub(all_least.saturating_sub(own));
                for bytes in halves.chain([machine.host.0 / count, beside_others]) {
                    self.tables[table].add_with_host(Bytes(bytes));
                }
            }
        }
    }

    /// Finds the fastest team among the devices `able`; `None` if there is none. The method tries the fastest n devices
    /// of each bandwidth tier, for each n. Then it adds or removes single devices as long as that is faster.
    pub fn fastest(&self, able: &[usize]) -> Option<Split> {
        let alone = |device: usize| self.split(&[device]).map_or(f64::INFINITY, |split| split.seconds);
        let mut by_speed: Vec<(usize, f64)> = able.iter().map(|&device| (device, alone(device))).collect();
        by_speed.sort_by(|a, b| a.1.total_cmp(&b.1));
        let by_speed: Vec<usize> = by_speed.into_iter().map(|(device, _)| device).collect();
        let split_sorted = |devices: &[usize]| {
            let mut devices = devices.to_vec();
            devices.sort_unstable();
            self.split(&devices)
        };
        let tiers = bandwidth_tiers(&by_speed, |device| self.requests[device].device.team_link);
        let fastest_n = tiers.iter().flat_map(|tier| (1..=tier.len()).map(|number| &tier[..number]));
        let mut best = fastest_n.map(split_sorted).fold(None, faster)?;
        loop {
            let with_one_changed = able.iter().filter_map(|&device| {
                let devices = toggle(&best.devices, device);
                if devices.is_empty() { None } else { self.split(&devices) }
            });
            match with_one_changed.map(Some).fold(None, faster) {
                Some(next) if next.seconds < best.seconds => best = next,
                _ => return Some(best),
            }
        }
    }

    /// Returns the fastest recipe of each device of a split.
    pub fn best_recipes(&self, split: &Split) -> Vec<&Candidate> {
        let waits = self.waits(&split.devices);
        let beside = |candidate: &Candidate| waits.seconds_beside_passes(candidate);
        let best = |rank: usize| {
            let (own, limit) = (split.sequences[rank], split.host_limits[rank]);
            self.table(split.devices[rank]).fastest(own, limit, &beside).expect("a share has a recipe").0
        };
        (0..split.devices.len()).map(best).collect()
    }

    /// Converts a split to a team candidate. Every device may use all of the `host` bytes of host memory.
    pub fn candidate(&self, split: &Split, host: Bytes) -> TeamCandidate {
        let shares = shares(&split.sequences);
        let recipes = self.best_recipes(split);
        let worker = |(rank, (recipe, share)): (usize, (&Candidate, Share))| {
            WorkerCandidate::new(split.devices[rank], share, split.sequences[rank], recipe, host)
        };
        TeamCandidate {
            parallelism: (split.devices.len() > 1).then_some(Parallelism::Data),
            workers: recipes.into_iter().zip(shares).enumerate().map(worker).collect(),
            seconds: split.seconds,
        }
    }

    /// Adds recipes to the tables, with micro-batch sizes near those of a split.
    pub fn refine(&mut self, split: &Split) {
        let waits = self.waits(&split.devices);
        for (rank, &device) in split.devices.iter().enumerate() {
            let beside = |candidate: &Candidate| waits.seconds_beside_passes(candidate);
            let (own, limit) = (split.sequences[rank], split.host_limits[rank]);
            self.tables[self.table_of[device]].refine_near(own, limit, &beside);
        }
    }

    /// Adds recipes to the tables, with micro-batch sizes near those of each device alone. Also adds those of an even
    /// split over all devices that can hold the model.
    pub fn refine_baselines(&mut self) {
        let able = self.able_devices();
        let splits = able.iter().filter_map(|&device| self.split(&[device])).chain(self.split_evenly(&able));
        for split in splits.collect::<Vec<_>>() {
            self.refine(&split);
        }
    }

    /// Adds recipes to the tables whose micro-batches divide the ideal number of sequences of a device, rounded down or
    /// up. In the ideal split, which has fractions of sequences, all devices end at the same time.
    fn refine_ideal_split(&mut self) {
        let able = self.able_devices();
        let waits = self.waits(&able);
        let speeds: Vec<f64> = able.iter().map(|&device| 1.0 / self.table(device).seconds_per_sequence()).collect();
        let total_speed: f64 = speeds.iter().sum();
        for (&device, speed) in able.iter().zip(&speeds) {
            let ideal = self.sequences_per_step as f64 * speed / total_speed;
            for sequences in [ideal.floor() as u64, ideal.ceil() as u64] {
                self.tables[self.table_of[device]]
                    .add_divisors(sequences, &|candidate| waits.seconds_beside_passes(candidate));
            }
        }
    }

    /// Removes a recipe that did not pack from the table of a device.
    pub fn reject(&mut self, device: usize, recipe: &Recipe) {
        self.tables[self.table_of[device]].reject(recipe);
    }
}

/// Adds up the sequences of some devices.
fn sum_of_sequences(shares: &[LimitedSequences]) -> u64 {
    shares.iter().map(|share| share.sequences).sum()
}

/// Chooses one of the options of each device, such that together they compute the most sequences, up to `total`, with at
/// most `host` bytes. Returns `None` if the devices need more even with the least.
fn choose_under_host(options: &[&[LimitedSequences]], host: u64, total: u64) -> Option<Vec<LimitedSequences>> {
    let unit = total.div_ceil(MAX_UNITS);
    let units = (total / unit) as usize;
    // The least bytes with which the devices so far compute at least a number of units, and the last option for that.
    let mut least: Vec<u64> = vec![u64::MAX; units + 1];
    least[0] = 0;
    let mut chosen: Vec<Vec<usize>> = Vec::new();
    for options in options {
        let mut next = vec![u64::MAX; units + 1];
        let mut option_of = vec![usize::MAX; units + 1];
        for (number, option) in options.iter().enumerate() {
            let own = (option.sequences / unit) as usize;
            for wanted in 0..=units {
                let bytes = least[wanted.saturating_sub(own)].saturating_add(option.host_limit);
                if bytes < next[wanted] {
                    (next[wanted], option_of[wanted]) = (bytes, number);
                }
            }
        }
        least = next;
        chosen.push(option_of);
    }
    let mut wanted = (0..=units).rev().find(|&wanted| least[wanted] <= host)?;
    let mut shares = Vec::new();
    for (options, option_of) in options.iter().zip(&chosen).rev() {
        let option = options[option_of[wanted]];
        wanted = wanted.saturating_sub((option.sequences / unit) as usize);
        shares.push(option);
    }
    shares.reverse();
    Some(shares)
}

/// Returns the faster of two splits; the first if both are equally fast, and `None` if there is neither.
fn faster(best: Option<Split>, other: Option<Split>) -> Option<Split> {
    match (best, other) {
        (Some(best), Some(other)) if other.seconds < best.seconds => Some(other),
        (best, other) => best.or(other),
    }
}

/// Returns the sorted list `devices` without `device` if it contains it, and otherwise with it.
fn toggle(devices: &[usize], device: usize) -> Vec<usize> {
    let mut devices = devices.to_vec();
    match devices.binary_search(&device) {
        Ok(at) => drop(devices.remove(at)),
        Err(at) => devices.insert(at, device),
    }
    devices
}

/// The search for data parallel teams, with some lossy rungs taken.
pub(super) struct DataParallel<'t, 'q> {
    team: &'t TeamRequest<'t>,
    rungs: &'t [Rung],
    recipes: Arc<RecipeMeasurements>,
    splitter: BatchSplitter<'q>,
}

/// Prepares a search and passes it to `then`. Where devices share a host that is too small for their fastest recipes
/// together, the search also has recipes that use less of it. Returns the result of `then`, or `None` if no split fits.
pub(super) fn with_host_shares<T>(
    team: &TeamRequest,
    rungs: &[Rung],
    measurements: &Measurements,
    then: impl Fn(DataParallel) -> Option<T>,
) -> Option<T> {
    let requests = team.requests_by_speed(rungs, &team.hosts());
    let measured = measurements.with_rungs(rungs);
    let splitter = BatchSplitter::new(&requests, team.machines(), team.sequences_per_step(), &measured);
    let mut search = DataParallel { team, rungs, recipes: Arc::clone(&measurements.recipes), splitter };
    if team.devices.len() > 1 {
        search.splitter.refine_ideal_split();
        search.splitter.refine_baselines();
    }
    let split = search.choose_refined();
    if split.is_none_or(|split| split.is_limited_by_hosts()) {
        search.splitter.add_recipes_with_less_host();
        search.choose_refined()?;
    }
    then(search)
}

impl DataParallel<'_, '_> {
    /// Returns the fastest split: over all devices if the request requires them, else over any of them. Returns `None`
    /// if there is no such split.
    fn choose(&self) -> Option<Split> {
        let able = self.splitter.able_devices();
        match self.team.require_all {
            true if able.len() < self.team.devices.len() => None,
            true => self.splitter.split(&able),
            false => self.splitter.fastest(&able),
        }
    }

    /// Returns the fastest split; `None` if there is none. After each choice, the method adds micro-batch sizes near
    /// each device's share to its recipe table and chooses again. It ends when the split no longer changes, or after
    /// [`MAX_REFINEMENTS`] choices.
    fn choose_refined(&mut self) -> Option<Split> {
        let mut split = self.choose()?;
        for _ in 0..MAX_REFINEMENTS {
            self.splitter.refine(&split);
            let next = self.choose()?;
            let is_stable = next == split;
            split = next;
            if is_stable {
                break;
            }
        }
        Some(split)
    }
}

impl TeamSearch for DataParallel<'_, '_> {
    fn fastest(&self) -> Option<TeamCandidate> {
        Some(self.splitter.candidate(&self.choose()?, self.team.host))
    }

    fn reject(&mut self, candidate: &TeamCandidate, rank: usize) {
        let WorkerCandidate { device, ref recipe, .. } = candidate.workers[rank];
        self.splitter.reject(device, recipe);
    }

    fn excluded(&self, candidate: &TeamCandidate) -> Vec<ExcludedDevice> {
        let DataParallel { team, rungs, recipes, splitter } = self;
        let (able, taken) = (splitter.able_devices(), candidate.devices());
        let others = (0..team.devices.len()).filter(|device| !taken.contains(device));
        let (slow, unable): (Vec<usize>, Vec<usize>) = others.partition(|device| able.contains(device));
        let seconds_with = |devices: &[usize]| splitter.split(devices).map(|with| with.seconds);
        let reason = "no sequence of a step is left for it";
        let slow = slow.into_iter().map(|device| exclude_from(team, candidate, device, reason, seconds_with));
        slow.chain(exclude_too_small(team, &unable, rungs, &[], recipes)).collect()
    }

    fn scaling_efficiency(&self, candidate: &TeamCandidate) -> Option<ScalingEfficiency> {
        let (devices, tokens) = (candidate.devices(), self.team.tokens_per_step());
        let alone = devices.iter().filter_map(|&device| self.splitter.split(&[device]));
        let upper_bound = self.splitter.split_without_all_reduce(&devices);
        Some(ScalingEfficiency {
            single_device_tokens_per_second: alone.map(|split| tokens / split.seconds).sum(),
            upper_bound_tokens_per_second: upper_bound.map_or(0.0, |split| tokens / split.seconds),
        })
    }
}

/// Returns the shares of a data parallel team, in the order of ranks.
pub(super) fn shares(sequences: &[u64]) -> Vec<Share> {
    match sequences.len() {
        1 => vec![Share::SINGLE_DEVICE],
        ranks => (0..ranks).map(|rank| share_of_rank(sequences, rank)).collect(),
    }
}

/// Returns the share of one rank of a data parallel team with several ranks.
fn share_of_rank(sequences: &[u64], rank: usize) -> Share {
    Share {
        parallelism: Some(Parallelism::Data),
        rank: rank as u32,
        ranks: sequences.len() as u32,
        first_sequence: sequences[..rank].iter().sum(),
        ..Share::SINGLE_DEVICE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::has_fitting_recipe;
    use crate::team::limit_host;
    use crate::testing;
    use plimsoll_core::{Bytes, DeviceKind, HostSpec, Link};
    use plimsoll_program::models::{ModelConfig, preset};
    use proptest::prelude::*;

    fn device(pace: f64, budget: Bytes, megabytes_per_second: f64) -> DeviceSpec {
        let team_link = Link { bytes_per_second: megabytes_per_second * 1e6, latency_seconds: 1e-5 };
        DeviceSpec { kind: DeviceKind::Paper, ..testing::device(pace, budget, team_link) }
    }

    /// Returns the only machine of a team, whose host has no memory.
    fn one_machine(requests: &[PlanRequest]) -> Vec<Machine> {
        vec![Machine { devices: (0..requests.len()).collect(), host: Bytes::ZERO }]
    }

    fn request<'a>(config: &'a ModelConfig, device: &'a DeviceSpec, sequences: u64) -> PlanRequest<'a> {
        testing::request(config, device, 64, sequences)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn fastest_split_beats_all_neighbours(
            kinds in prop::collection::vec((0.05f64..1.0, 500u64..1500, 1.0f64..4.0), 1..4),
            copies in prop::collection::vec(1usize..3, 3),
            total in 1u64..96,
        ) {
            let config = ModelConfig { layers: 2, ..preset("smollm2-135m").expect("listed") };
            let devices: Vec<DeviceSpec> = kinds
                .iter()
                .zip(&copies)
                .flat_map(|((pace, mib, decade), copies)| vec![device(*pace, Bytes::mib(*mib), 10f64.powf(*decade)); *copies])
                .collect();
            let requests: Vec<PlanRequest> =
                devices.iter().map(|device| request(&config, device, total.div_ceil(devices.len() as u64))).collect();
            let splitter = BatchSplitter::new(&requests, one_machine(&requests), total, &RungMeasurements::default());
            let able = splitter.able_devices();
            let Some(best) = splitter.fastest(&able) else {
                prop_assert!(able.is_empty());
                return Ok(());
            };
            prop_assert_eq!(best.sequences.iter().sum::<u64>(), total);
            prop_assert_eq!(splitter.price_split(&best.devices, best.sequences.clone()), Some(best.clone()));
            let ranks = best.devices.len();
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                let mut moved = best.sequences.clone();
                moved[from] -= 1;
                moved[to] += 1;
                if let Some(moved) = splitter.price_split(&best.devices, moved) {
                    prop_assert!(moved.seconds >= best.seconds, "{best:?}, {moved:?}");
                }
                if splitter.are_alike(best.devices[from], best.devices[to]) {
                    prop_assert!(best.sequences[from].abs_diff(best.sequences[to]) <= 1, "{best:?}");
                }
            }
            for &device in &able {
                let mut devices = best.devices.clone();
                match devices.binary_search(&device) {
                    Ok(at) => drop(devices.remove(at)),
                    Err(at) => devices.insert(at, device),
                }
                if let Some(other) = splitter.split(&devices).filter(|_| !devices.is_empty()) {
                    prop_assert!(other.seconds >= best.seconds, "{best:?}, {other:?}");
                }
            }
        }
    }

    #[test]
    fn predicted_all_reduce_matches_packed_plan() {
        // Half of a pass is the loss of a large vocabulary, beside which nothing can be exchanged yet.
        let config = preset("smollm2-135m").expect("listed");
        let devices = [device(1.0, Bytes::gib(8), 100.0), device(0.5, Bytes::gib(8), 100.0)];
        let requests: Vec<PlanRequest> = devices.iter().map(|device| request(&config, device, 16)).collect();
        let mut splitter = BatchSplitter::new(&requests, one_machine(&requests), 16, &RungMeasurements::default());
        splitter.refine_baselines();
        let split = splitter.split_evenly(&[0, 1]).expect("both can hold it");
        let shares = shares(&split.sequences);
        let seconds = |(rank, recipe): (usize, &&Candidate)| {
            let request = requests[rank].clone().for_share(&shares[rank], split.sequences[rank]);
            let set = request.compute_programs(&recipe.recipe);
            let count = split.sequences[rank].div_ceil(u64::from(recipe.recipe.micro_batch));
            request.prices().step_seconds(&set, count as u32, true)
        };
        let packed = splitter.best_recipes(&split).iter().enumerate().map(seconds).fold(0.0, f64::max);
        assert!((split.seconds / packed - 1.0).abs() < 0.01, "{} listed, {packed} packed", split.seconds);
    }

    /// Returns the least host memory with which a device holds the model; `None` if `most` is not enough.
    fn least_host(request: &PlanRequest, most: Bytes) -> Option<Bytes> {
        let holds = |mib: u64| {
            has_fitting_recipe(&PlanRequest { host: limit_host(request.host, Bytes::mib(mib)), ..request.clone() })
        };
        let most = most.0 >> 20;
        holds(most).then(|| Bytes::mib(bisection::smallest(0..most, 0, holds)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6))]
        #[test]
        fn all_devices_fit_in_sufficient_host(lines in prop::collection::vec(60u64..500, 2..4)) {
            let config = ModelConfig { layers: 2, vocab: 4096, ..preset("smollm2-135m").expect("listed") };
            let devices: Vec<DeviceSpec> = lines.iter().map(|line| device(0.5, Bytes::mib(*line), 1000.0)).collect();
            let most = Bytes::gib(1);
            let host = HostSpec { budget: most, ..HostSpec::NONE };
            let requests: Vec<PlanRequest> =
                devices.iter().map(|device| PlanRequest { host, ..request(&config, device, 16) }).collect();
            let needed: Option<Vec<Bytes>> = requests.iter().map(|request| least_host(request, most)).collect();
            let Some(needed) = needed else { return Ok(()) };
            let host = needed.into_iter().sum::<Bytes>() + Bytes::mib(4);
            let team = TeamRequest { devices: requests, host, require_all: true, constraint: None, evaluations: None };
            let taken = with_host_shares(&team, &[], &Measurements::default(), |search| search.choose().map(|split| split.devices.len()));
            prop_assert_eq!(taken, Some(lines.len()), "{:?} beside {}", lines, host);
        }
    }
}
