//! Sharded teams (FSDP, ZeRO-3): weights, gradients and optimizer state are split over all devices.
//!
//! - **Shards** have the size that each device's memory allows, in 1024ths. Each layer is gathered for
//!   each pass over it, so no device has to hold the model.
//! - **Sequences** of each micro-batch go to the devices by speed. Devices wait for each other at each layer, so all
//!   have the same number of micro-batches.
//! - **Storage-only workers** hold a shard and compute nothing but its update: devices without room for one sequence,
//!   and devices that would slow the others even with one.
//!
//! The search tries numbers of micro-batches, fewest first. More micro-batches repeat the collectives more often; fewer
//! need more activation memory, and so more recompute. Each number is first sketched ([`Sketch`]) from two measurements
//! per rank: without recompute, and with full recompute. The most promising sketches are searched for recipes.

use super::candidate::{TeamCandidate, TeamSearch, WorkerCandidate};
use super::exclusion::exclude_others;
use super::measurements::{Measurements, RankKey, RungMeasurements};
use super::{TeamConstraint, TeamRequest, bandwidth_tiers, slowest_link};
use crate::search::{
    Candidate, PlanRequest, RankCosts, RecipeGoal, ShardedBytes, parallel_map, recipe_of_share,
    single_device_compute_seconds, with_lossy,
};
use plimsoll_core::{Bytes, DeviceSpec, ExcludedDevice, Parallelism, Rung, ScalingEfficiency, format_count};
use plimsoll_program::Share;
use sizing::{ShardSizing, SizedShards};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

mod neighbors;
mod sizing;

/// Number of parts in which shards are counted: the shards of all ranks add up to it.
const ALL_PARTS: u64 = 1024;
/// Factor on the time of the fastest candidate. Sketches (teams with estimated times) above the product are not searched
/// for recipes.
const SKETCH_ERROR: f64 = 1.01;
/// Most numbers of micro-batches in a row that may be slower than the best; with one more, the search skips the rest.
const MAX_SLOWER_IN_A_ROW: usize = 2;
/// The reason given for a device that has no recipe to compute with.
const NO_RECIPE: &str = "no recipe fits on it that computes a sequence of each micro-batch";
/// Most times that a sketch (a team with estimated times) is made anew because it does not fit a rank.
const MAX_REDRAWS: usize = 4;

/// The search for sharded teams, with some lossy rungs taken.
pub(super) struct Sharded<'t, 'q> {
    team: &'t TeamRequest<'q>,
    rungs: &'t [Rung],
    /// The load line of the host beside each device.
    hosts: Vec<Bytes>,
    /// The number of each device's machine.
    machine_numbers: Vec<usize>,
    measured: Arc<RungMeasurements>,
    /// For each device, the first of its kind.
    kinds: Vec<usize>,
    /// The recipes that the ranks get.
    goal: RecipeGoal,
    /// The search ends where no team with fewer seconds a step is in sight.
    bound: f64,
}

/// A sharded team with estimated times, before recipes are searched.
#[derive(Clone, Debug)]
struct Sketch {
    /// Number of micro-batches of a step.
    micro_batch_count: u64,
    /// Number of sequences of a micro-batch on each rank.
    micro_batches: Vec<u64>,
    /// The shard of each rank, in 1024ths of the whole.
    shards: Vec<u64>,
    /// Most bytes of host memory that each rank may use.
    hosts: Vec<Bytes>,
    /// Bytes of the shards that are offloaded to the host, of all ranks together.
    offloaded: f64,
    /// Predicted seconds of a step.
    seconds: f64,
}

/// The devices of a team in the order of ranks, and which of them only store a shard.
#[derive(Clone, Debug)]
struct Roles {
    devices: Vec<usize>,
    storage_only: Vec<bool>,
}

impl Roles {
    /// Assigns roles to `devices`: those that `storage_only` selects only store a shard, the others compute, too.
    fn new(devices: Vec<usize>, storage_only: impl Fn(usize) -> bool) -> Roles {
        Roles { storage_only: devices.iter().map(|&device| storage_only(device)).collect(), devices }
    }

    /// Assigns computing roles to all devices.
    fn all_compute(devices: Vec<usize>) -> Roles {
        Roles::new(devices, |_| false)
    }

    /// Returns the number of devices that compute.
    fn computing_count(&self) -> u64 {
        self.storage_only.iter().filter(|storage_only| !**storage_only).count() as u64
    }
}

impl<'t, 'q> Sharded<'t, 'q> {
    pub fn new(team: &'t TeamRequest<'q>, rungs: &'t [Rung], measurements: &Measurements) -> Sharded<'t, 'q> {
        Sharded {
            team,
            rungs,
            hosts: team.hosts(),
            machine_numbers: team.machine_numbers(),
            measured: measurements.with_rungs(rungs),
            kinds: team.first_of_kinds(),
            goal: RecipeGoal::Fastest,
            bound: f64::INFINITY,
        }
    }

    /// Gives the ranks recipes for this goal.
    pub fn with_goal(self, goal: RecipeGoal) -> Sharded<'t, 'q> {
        Sharded { goal, ..self }
    }

    /// Lets the search for the fastest team pass over those that take `bound` seconds a step or more.
    pub fn with_bound(self, bound: f64) -> Sharded<'t, 'q> {
        Sharded { bound, ..self }
    }

    /// Returns an upper bound on the tokens per second of a sharded team: all devices compute all the time, without
    /// recompute.
    pub fn max_tokens_per_second(&self) -> f64 {
        self.max_tokens_per_second_of(0..self.team.devices.len())
    }

    /// Returns an upper bound on the tokens per second of a team in which only `devices` compute.
    fn max_tokens_per_second_of(&self, devices: impl Iterator<Item = usize>) -> f64 {
        self.max_rate(devices, None)
    }

    /// Estimates the most tokens per second of a team of `devices`. Besides powers of two, the estimate tries a
    /// micro-batch of the whole step, because the largest is mostly the fastest.
    pub fn approximate_max_tokens_per_second(&self, devices: &[usize]) -> f64 {
        self.max_rate(devices.iter().copied(), Some(self.team.sequences_per_step()))
    }

    /// Adds up the best tokens per second of each device, over micro-batches that are powers of two and `extra_size`.
    fn max_rate(&self, devices: impl Iterator<Item = usize>, extra_size: Option<u64>) -> f64 {
        let total = self.team.sequences_per_step();
        let sequences_per_second: f64 = devices.map(|device| self.max_rate_of_device(device, extra_size)).sum();
        sequences_per_second * self.team.tokens_per_step() / total as f64
    }

    /// Returns the best sequences per second of a device, over micro-batches that are powers of two and `extra_size`.
    fn max_rate_of_device(&self, device: usize, extra_size: Option<u64>) -> f64 {
        let total = self.team.sequences_per_step();
        let sizes = (0..32).map(|power| 1u64 << power).take_while(|&size| size <= total).chain(extra_size);
        let pinned = self.team.devices[device].pins.micro_batch.map(u64::from);
        let rate = |size: u64| size as f64 / self.micro_batch_seconds(device, size);
        sizes.filter(|size| pinned.is_none_or(|pin| pin == *size)).chain(pinned).map(rate).fold(0.0, f64::max)
    }

    /// Estimates the least host memory that is enough: every device computes one sequence at a time with full
    /// recompute. `None` if such a team does not fit with any host memory.
    pub fn least_host(&self) -> Option<Bytes> {
        let roles = Roles::all_compute((0..self.team.devices.len()).collect());
        let ranks = roles.devices.len();
        let sketch = self.sketch(&roles, ranks as u64, &vec![0; ranks])?;
        Some(Bytes(sketch.offloaded as u64))
    }

    /// Predicts the seconds in which a device computes a micro-batch. For powers of two, they are read from Programs;
    /// between them they are interpolated.
    fn micro_batch_seconds(&self, device: usize, micro_batch: u64) -> f64 {
        if micro_batch == 0 {
            return 0.0;
        }
        let kind = self.kinds[device];
        let measured = |size: u64| self.measured_seconds(kind, size as u32);
        let below = 1 << micro_batch.ilog2();
        match micro_batch - below {
            0 => measured(below),
            more => measured(below) + (measured(2 * below) - measured(below)) * more as f64 / below as f64,
        }
    }

    /// Predicts the seconds in which a device computes a micro-batch, from Programs. The result is cached for each size
    /// and kind of device; `kind` is the first device of the kind.
    fn measured_seconds(&self, kind: usize, micro_batch: u32) -> f64 {
        let request = || with_lossy(&self.team.devices[kind], self.rungs);
        let measure = || single_device_compute_seconds(&request(), micro_batch);
        self.measured.compute_seconds.get_or_compute((kind, micro_batch), measure)
    }

    /// Returns the request for the share of one worker, with the rungs of the team taken and the worker's micro-batch
    /// pinned. `spec` is the specification of its device in the team, as [`Sharded::spec_in_team`] returns it.
    fn request<'s>(&self, spec: &'s DeviceSpec, worker: &WorkerCandidate) -> PlanRequest<'s>
    where
        'q: 's,
    {
        let request = self.team.request_for(worker.device, &worker.share, worker.sequences, worker.host);
        let request = PlanRequest { device: spec, ..with_lossy(&request, self.rungs) };
        let pins =
            crate::search::PinnedChoices { micro_batch: Some(worker.recipe.micro_batch), ..request.pins.clone() };
        PlanRequest { pins, ..request }
    }

    /// Returns the specification of a device in a team of `devices`, which has the team's slowest link.
    fn spec_in_team(&self, device: usize, devices: &[usize]) -> DeviceSpec {
        let spec = self.team.devices[device].device;
        let team_link = slowest_link(devices.iter().map(|&device| self.team.devices[device].device.team_link));
        DeviceSpec { team_link, ..spec.clone() }
    }

    /// Predicts seconds and bytes of a device as a rank of a team of `devices`, with even shards.
    fn rank_cost(&self, device: usize, micro_batch: u64, devices: &[usize]) -> RankCosts {
        let spec = self.spec_in_team(device, devices);
        let key = RankKey {
            device: self.kinds[device],
            micro_batch: micro_batch as u32,
            ranks: devices.len(),
            link: spec.team_link.bytes_per_second.to_bits(),
        };
        self.measured.rank_costs.get_or_compute(key, || {
            let ranks = devices.len() as u64;
            let (parallelism, state) = (Some(Parallelism::Sharded), even_shards(ranks));
            let share = Share { parallelism, ranks: ranks as u32, state, ..Share::SINGLE_DEVICE };
            let request = self.team.request_for(device, &share, micro_batch, Bytes::ZERO);
            let request = PlanRequest { device: &spec, ..with_lossy(&request, self.rungs) };
            RankCosts::measure(&request, micro_batch as u32)
        })
    }

    /// Returns the shard sizes that the request fixes; `None` if it leaves them open.
    fn fixed_shards(&self) -> Option<&'t [u64]> {
        match &self.team.constraint {
            Some(TeamConstraint::ShardSizes(shards)) => Some(shards),
            _ => None,
        }
    }

    /// Returns the bytes of a device's arena that a fixed shard leaves free, if the host holds as much of the shard as
    /// it can. Without fixed shards, these are all bytes of the arena.
    fn room_beside_fixed_shard(&self, device: usize, devices: &[usize]) -> u64 {
        let shard_bytes = |shards: &[u64]| (self.sharded_bytes().all * shards[device] as f64 / ALL_PARTS as f64) as u64;
        let resident = self.fixed_shards().map_or(0, |shards| shard_bytes(shards).saturating_sub(self.hosts[device].0));
        self.spec_in_team(device, devices).arena_budget().0.saturating_sub(resident)
    }

    fn sharded_bytes(&self) -> ShardedBytes {
        let measure = || ShardedBytes::measure(&with_lossy(&self.team.devices[0], self.rungs));
        *self.measured.sharded_bytes.get_or_init(measure)
    }

    /// Distributes the sequences of a micro-batch, and returns the number of each rank. Each computing rank gets one,
    /// and each further sequence goes to the rank that ends first with it. No rank gets more than its cap. Returns
    /// `None` if the caps are too low, or if there are fewer sequences than computing ranks.
    fn split_micro_batch(&self, roles: &Roles, sequences: u64, caps: &[u64]) -> Option<Vec<u64>> {
        let Roles { devices, storage_only } = roles;
        let mut own: Vec<u64> = storage_only.iter().map(|&storage_only| u64::from(!storage_only)).collect();
        let least: u64 = own.iter().sum();
        if sequences < least || own.iter().zip(caps).any(|(own, cap)| own > cap) {
            return None;
        }
        for _ in least..sequences {
            let seconds_with_one_more = |rank: &usize| self.micro_batch_seconds(devices[*rank], own[*rank] + 1);
            let open = (0..devices.len()).filter(|&rank| !storage_only[rank] && own[rank] < caps[rank]);
            let rank = open.min_by(|a, b| seconds_with_one_more(a).total_cmp(&seconds_with_one_more(b)))?;
            own[rank] += 1;
        }
        Some(own)
    }

    /// Sketches a team with micro-batches of `micro_batch` sequences over all ranks. `unused` bytes of each rank stay
    /// free. Returns `None` if no split of the micro-batch fits.
    fn sketch(&self, roles: &Roles, micro_batch: u64, unused: &[u64]) -> Option<Sketch> {
        let Roles { devices, storage_only } = roles;
        let total = self.team.sequences_per_step();
        if total < roles.computing_count() {
            return None;
        }
        let room = |rank: usize| self.room_beside_fixed_shard(devices[rank], devices).saturating_sub(unused[rank]);
        let pinned = self.team.devices[0].pins.micro_batch.map(u64::from);
        let mut caps = vec![u64::MAX; devices.len()];
        for _ in 0..MAX_REDRAWS {
            let micro_batches = match pinned {
                Some(pin) => storage_only.iter().map(|&storage_only| if storage_only { 0 } else { pin }).collect(),
                None => self.split_micro_batch(roles, micro_batch, &caps)?,
            };
            let costs: Vec<RankCosts> = devices
                .iter()
                .zip(&micro_batches)
                .map(|(&device, &own)| self.rank_cost(device, own, devices))
                .collect();
            // Ranks that do not fit even with full recompute.
            let over =
                (0..devices.len()).filter(|&rank| costs[rank].transient_bytes.full > room(rank)).collect::<Vec<_>>();
            if over.is_empty() {
                let count = total.div_ceil(micro_batches.iter().sum());
                return self.size_shards(devices, count, micro_batches, &costs, unused);
            }
            if pinned.is_some() || over.iter().any(|&rank| storage_only[rank]) {
                return None;
            }
            for rank in over {
                let fitting =
                    micro_batches[rank] as u128 * u128::from(room(rank)) / u128::from(costs[rank].transient_bytes.full);
                caps[rank] = (fitting as u64).min(micro_batches[rank] - 1);
            }
        }
        None
    }

    /// Sizes the shards for given micro-batches, and for the predicted seconds and bytes of each rank. Returns `None`
    /// if the host is too small for the bytes that have to be offloaded.
    fn size_shards(
        &self,
        devices: &[usize],
        micro_batch_count: u64,
        micro_batches: Vec<u64>,
        costs: &[RankCosts],
        unused: &[u64],
    ) -> Option<Sketch> {
        let budget =
            |rank: usize| self.spec_in_team(devices[rank], devices).arena_budget().0.saturating_sub(unused[rank]);
        let host_link = |&device: &usize| self.team.devices[device].device.rates.host_link.bytes_per_second;
        let (offload_fractions, hosts) = self.divide_hosts(devices, host_link);
        let sizing = ShardSizing {
            sharded: self.sharded_bytes(),
            costs,
            budgets: (0..devices.len()).map(budget).collect(),
            host_links: devices.iter().map(host_link).collect(),
            offload_fractions,
            micro_batch_count,
        };
        let SizedShards { shards, recompute, offloaded } = match self.fixed_shards() {
            Some(shards) => sizing.with_fixed_shards(shards),
            None => sizing.with_fastest_shards(),
        };
        if offloaded > self.team.host.0 as f64 {
            return None;
        }
        Some(Sketch {
            seconds: sizing.step_seconds(&shards, &recompute),
            hosts,
            offloaded,
            micro_batch_count,
            micro_batches,
            shards,
        })
    }

    /// Divides the hosts between `devices`, in proportion to their links. Returns the fraction of all offloaded bytes of
    /// each, and the bytes of its part of the host of its machine. A device without a host offloads nothing, unless none
    /// has one.
    fn divide_hosts(&self, devices: &[usize], host_link: impl Fn(&usize) -> f64) -> (Vec<f64>, Vec<Bytes>) {
        let no_hosts = devices.iter().all(|&device| self.hosts[device] == Bytes::ZERO);
        let weight =
            |device: &usize| if no_hosts || self.hosts[*device] > Bytes::ZERO { host_link(device) } else { 0.0 };
        let total: f64 = devices.iter().map(weight).sum();
        let part_of_host = |device: &usize| {
            let is_beside = |other: &&usize| self.machine_numbers[**other] == self.machine_numbers[*device];
            let beside: f64 = devices.iter().filter(is_beside).map(&host_link).sum();
            Bytes((self.hosts[*device].0 as f64 * (host_link(device) / beside)) as u64)
        };
        (devices.iter().map(|device| weight(device) / total).collect(), devices.iter().map(part_of_host).collect())
    }

    /// Returns a sketch (a sharded team with estimated times, without recipes) for each number of micro-batches that is
    /// worth trying, fastest first.
    fn sketches(&self, roles: &Roles) -> Vec<Sketch> {
        let (total, least) = (self.team.sequences_per_step(), roles.computing_count());
        let mut sizes: Vec<u64> = match self.team.devices[0].pins.micro_batch {
            Some(pin) => vec![u64::from(pin) * least],
            None => {
                let counts = (0..32).flat_map(|power| [1 << power, 3 << power]).take_while(|&count| count <= 2 * total);
                // The smallest micro-batch has one sequence for each computing device.
                counts.map(|count| total.div_ceil(count)).filter(|&size| size >= least).chain([least]).collect()
            }
        };
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        let mut sketches: Vec<Sketch> = Vec::new();
        let (mut best, mut slower_in_a_row) = (f64::INFINITY, 0);
        for size in sizes {
            let Some(sketch) = self.sketch(roles, size, &vec![0; roles.devices.len()]) else { continue };
            slower_in_a_row = if sketch.seconds < best { 0 } else { slower_in_a_row + 1 };
            best = best.min(sketch.seconds);
            sketches.push(sketch);
            if slower_in_a_row > MAX_SLOWER_IN_A_ROW {
                break;
            }
        }
        sketches.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        sketches
    }

    /// Returns the fastest candidate in which exactly these devices take part, in these roles; `None` if none fits.
    fn fastest_with_roles(&self, roles: &Roles) -> Option<TeamCandidate> {
        self.faster_with_roles(roles, f64::INFINITY)
    }

    /// Returns the fastest candidate like [`Sharded::fastest_with_roles`], of those that take less than `bound` seconds a
    /// step. Sketches are searched for recipes until none can be faster, by its estimate.
    fn faster_with_roles(&self, roles: &Roles, bound: f64) -> Option<TeamCandidate> {
        let mut best: Option<(Sketch, TeamCandidate)> = None;
        for sketch in self.sketches(roles) {
            let seconds = best.as_ref().map_or(bound, |(_, best)| best.seconds);
            if sketch.seconds > SKETCH_ERROR * seconds {
                break;
            }
            best = self.with_recipes(roles, &sketch).filter(|(_, found)| found.seconds < seconds).or(best);
        }
        best.map(|(sketch, best)| self.improve(&roles.devices, sketch, best))
    }

    /// Searches a recipe for each rank of a sketch. If a rank has none, the sketch is made anew with less of its
    /// memory. Also returns the sketch of the candidate. Returns `None` if that does not help.
    fn with_recipes(&self, roles: &Roles, sketch: &Sketch) -> Option<(Sketch, TeamCandidate)> {
        let devices = &roles.devices;
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec_in_team(device, devices)).collect();
        let mut unused = vec![0; devices.len()];
        let mut sketch = sketch.clone();
        for _ in 0..MAX_REDRAWS {
            let without = match self.rank_recipes(devices, &specs, &sketch, f64::INFINITY) {
                Ok(candidate) => return Some((sketch, candidate)),
                Err(without) => without,
            };
            for rank in without {
                unused[rank] += specs[rank].arena_budget().0 / 48;
            }
            sketch = self.sketch(roles, sketch.micro_batches.iter().sum(), &unused)?;
        }
        None
    }

    /// Searches a recipe for each rank of a sketch. Fails with the ranks for which no recipe fits that may make a team of
    /// less than `bound` seconds a step. `specs` are the specifications of the devices in the team.
    fn rank_recipes(
        &self,
        devices: &[usize],
        specs: &[DeviceSpec],
        sketch: &Sketch,
        bound: f64,
    ) -> Result<TeamCandidate, Vec<usize>> {
        let mut workers = self.workers_without_recipes(devices, sketch);
        let representative = self.representatives(&workers, &sketch.shards);
        let distinct = (0..devices.len()).filter(|&rank| representative[rank] == rank);
        let requests: Vec<(usize, PlanRequest)> =
            distinct.map(|rank| (rank, self.request(&specs[rank], &workers[rank]))).collect();
        let recipes = parallel_map(&requests, |(_, request)| {
            recipe_of_share(request, self.goal, bound, self.measured.of_request(request))
        });
        let recipes: HashMap<usize, Option<Candidate>> = requests.iter().map(|(rank, _)| *rank).zip(recipes).collect();
        let has_no_recipe = |rank: &usize| recipes[&representative[*rank]].is_none();
        let without: Vec<usize> = (0..devices.len()).filter(has_no_recipe).collect();
        if !without.is_empty() {
            return Err(without);
        }
        let (mut once, mut passes) = (0.0f64, 0.0f64);
        for (rank, worker) in workers.iter_mut().enumerate() {
            let recipe = recipes[&representative[rank]].as_ref().expect("all ranks have one");
            worker.recipe = recipe.recipe.clone();
            (worker.device_bytes, worker.host_bytes) = (recipe.bytes.device, recipe.bytes.host);
            worker.measured = Some(recipe.clone());
            (once, passes) = (once.max(recipe.per_step_seconds), passes.max(recipe.per_micro_batch_seconds));
        }
        let seconds = once + sketch.micro_batch_count as f64 * passes;
        Ok(TeamCandidate { parallelism: Some(Parallelism::Sharded), workers, seconds })
    }

    /// Returns, for each rank, the rank with the largest shard among those identical to it. All of them get its recipe.
    fn representatives(&self, workers: &[WorkerCandidate], shards: &[u64]) -> Vec<usize> {
        let are_alike = |a: &WorkerCandidate, b: &WorkerCandidate| {
            self.team.are_alike(a.device, b.device) && a.recipe.micro_batch == b.recipe.micro_batch
        };
        let largest = |rank: usize| {
            let alike = (0..workers.len()).filter(|&other| are_alike(&workers[other], &workers[rank]));
            alike.max_by_key(|&other| (shards[other], Reverse(other))).expect("it is like itself")
        };
        (0..workers.len()).map(largest).collect()
    }

    /// Returns the workers of a sketch. Only the micro-batch is set in their recipes.
    fn workers_without_recipes(&self, devices: &[usize], sketch: &Sketch) -> Vec<WorkerCandidate> {
        let mut sequences: Vec<u64> = sketch.micro_batches.iter().map(|own| own * sketch.micro_batch_count).collect();
        for _ in self.team.sequences_per_step()..sequences.iter().sum() {
            let most = (0..sequences.len()).max_by_key(|&rank| (sequences[rank], Reverse(rank)));
            sequences[most.expect("a team has a device")] -= 1;
        }
        let shares = shares(&sequences, &sketch.shards, sketch.micro_batch_count);
        let worker = |(rank, share): (usize, Share)| {
            let (micro_batch, host) = (sketch.micro_batches[rank] as u32, sketch.hosts[rank]);
            WorkerCandidate::without_recipe(devices[rank], share, sequences[rank], micro_batch, host)
        };
        shares.into_iter().enumerate().map(worker).collect()
    }

    /// Finds the fastest candidate over `devices`; `None` if none fits. Devices without room for a sequence only store
    /// a shard. For the slowest of the others, the search also tries this or, with `may_exclude`, leaving them out.
    fn fastest_among(&self, mut devices: Vec<usize>, may_exclude: bool) -> Option<TeamCandidate> {
        let all = devices.clone();
        let has_room_for = |device: usize, sequences: u64| {
            let least = self.rank_cost(device, sequences, &all).transient_bytes.full;
            least <= self.room_beside_fixed_shard(device, &all)
        };
        devices.retain(|&device| !may_exclude || has_room_for(device, 0));
        if devices.len() < 2 {
            return None;
        }
        let smallest = self.team.devices[0].pins.micro_batch.map_or(1, u64::from);
        let (mut able, unable): (Vec<usize>, Vec<usize>) =
            devices.iter().partition(|&&device| has_room_for(device, smallest));
        able.sort_by(|&a, &b| self.micro_batch_seconds(b, 1).total_cmp(&self.micro_batch_seconds(a, 1)));
        let mut best: Option<TeamCandidate> = None;
        for slow_count in 0..able.len() {
            let (slow, computing) = able.split_at(slow_count);
            // Equally slow devices are mostly in the same role: other candidates have to be faster by their estimate.
            let splits_equals = slow
                .last()
                .is_some_and(|&last| self.micro_batch_seconds(last, 1) <= self.micro_batch_seconds(computing[0], 1));
            let bound = best.as_ref().filter(|_| splits_equals).map_or(self.bound, |best| best.seconds);
            // Fewer computing devices cannot be faster, even at their upper bound.
            let least_seconds = self.team.tokens_per_step() / self.max_tokens_per_second_of(computing.iter().copied());
            if best.as_ref().is_some_and(|best| best.seconds <= least_seconds) {
                break;
            }
            let storage_only = [&unable, slow].concat();
            let with_storage =
                self.faster_with_roles(&Roles::new(devices.clone(), |device| storage_only.contains(&device)), bound);
            let mut only_computing = computing.to_vec();
            only_computing.sort_unstable();
            let may_drop = may_exclude && only_computing.len() > 1 && only_computing.len() < devices.len();
            let without_storage =
                may_drop.then(|| self.faster_with_roles(&Roles::all_compute(only_computing), bound)).flatten();
            best = fastest(best.into_iter().chain(with_storage).chain(without_storage));
        }
        while let Some(better) =
            best.as_ref().filter(|_| may_exclude).and_then(|best| self.without_one_storage_worker(best))
        {
            best = Some(better);
        }
        best
    }

    /// Returns the fastest candidate without one of the storage-only workers; `None` if none is faster than
    /// `candidate`. A shard may take more time in collectives than its memory saves.
    fn without_one_storage_worker(&self, candidate: &TeamCandidate) -> Option<TeamCandidate> {
        let devices = candidate.devices();
        let mut seen = HashSet::new();
        let mut is_new_kind = |device: usize| seen.insert(self.team.first_alike(device));
        let storage_workers =
            devices.iter().copied().filter(|&device| is_storage_only(candidate, device) && is_new_kind(device));
        let roles_without = |removed: usize| {
            let others = devices.iter().copied().filter(|&device| device != removed).collect();
            Roles::new(others, |device| is_storage_only(candidate, device))
        };
        let candidates = storage_workers
            .filter(|_| devices.len() > 2)
            .filter_map(|removed| self.fastest_with_roles(&roles_without(removed)));
        fastest(candidates).filter(|without| without.seconds < candidate.seconds)
    }

    /// Returns a candidate with other roles, for comparison. If `candidate` has storage-only workers, all devices
    /// compute in the returned one. Otherwise the slowest devices only store a shard in it, if they have one sequence
    /// of each micro-batch. Returns `None` if there is no such candidate.
    pub fn with_other_roles(&self, candidate: &TeamCandidate) -> Option<TeamCandidate> {
        let all_compute = Roles::all_compute(candidate.devices());
        if candidate.workers.iter().any(WorkerCandidate::is_storage_only) {
            return self.fastest_with_roles(&all_compute);
        }
        let seconds =
            |worker: &WorkerCandidate| self.micro_batch_seconds(worker.device, u64::from(worker.recipe.micro_batch));
        let slowest = candidate.workers.iter().map(seconds).fold(0.0, f64::max);
        let is_slow = |worker: &&WorkerCandidate| worker.recipe.micro_batch == 1 && seconds(worker) >= slowest;
        let slow: Vec<usize> = candidate.workers.iter().filter(is_slow).map(|worker| worker.device).collect();
        let roles = Roles::new(all_compute.devices, |device| slow.contains(&device));
        if slow.is_empty() || roles.computing_count() == 0 { None } else { self.fastest_with_roles(&roles) }
    }

    /// Returns why a storage-only worker computes nothing. Identical workers get one reason, about all of them.
    fn reason_of_storage_worker(&self, candidate: &TeamCandidate, device: usize) -> String {
        let is_alike = |other: usize| self.team.are_alike(other, device);
        let alike = candidate.workers.iter().filter(|other| other.is_storage_only() && is_alike(other.device));
        let others = alike.count() as u64 - 1;
        let about_all = || {
            let subject = format!("with sequences of their own it and {} like it", format_count(others, "other"));
            self.storage_only_reason(candidate, &subject, &is_alike)
        };
        let about_one = || {
            let subject = "with sequences of its own it";
            self.storage_only_reason(candidate, subject, &|other| other == device)
        };
        let about_all = if others > 0 { about_all() } else { None };
        about_all.or_else(about_one).unwrap_or_else(|| NO_RECIPE.to_owned())
    }

    /// Returns why the devices that `computes` selects only store a shard: the throughput of the team if they computed,
    /// too. Returns `None` if they cannot compute.
    fn storage_only_reason(
        &self,
        candidate: &TeamCandidate,
        subject: &str,
        computes: &dyn Fn(usize) -> bool,
    ) -> Option<String> {
        let roles = Roles::new(candidate.devices(), |device| is_storage_only(candidate, device) && !computes(device));
        let with = self.fastest_with_roles(&roles)?;
        let percent = 100.0 * candidate.seconds / with.seconds;
        Some(format!("{subject} would slow the team to {percent:.1} % of its tokens per second (predicted)"))
    }
}

/// Returns the fastest of some candidates; `None` without candidates.
fn fastest(candidates: impl Iterator<Item = TeamCandidate>) -> Option<TeamCandidate> {
    candidates.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// Returns whether a device takes part in a candidate and only stores a shard.
fn is_storage_only(candidate: &TeamCandidate, device: usize) -> bool {
    candidate.workers.iter().any(|worker| worker.device == device && worker.is_storage_only())
}

impl TeamSearch for Sharded<'_, '_> {
    fn fastest(&self) -> Option<TeamCandidate> {
        let devices: Vec<usize> = (0..self.team.devices.len()).collect();
        if self.team.require_all || self.fixed_shards().is_some() {
            return self.fastest_among(devices, false);
        }
        let tiers = bandwidth_tiers(&devices, |device| self.team.devices[device].device.team_link);
        fastest(tiers.into_iter().filter_map(|tier| self.fastest_among(tier, true)))
    }

    fn reject(&mut self, _: &TeamCandidate, _: usize) {
        // The packed bytes are in the measurements.
    }

    fn excluded(&self, candidate: &TeamCandidate) -> Vec<ExcludedDevice> {
        exclude_others(self.team, candidate, NO_RECIPE, |devices: &[usize]| {
            let roles = Roles::new(devices.to_vec(), |device| is_storage_only(candidate, device));
            self.fastest_with_roles(&roles)
        })
    }

    fn storage_only_reasons(&self, candidate: &TeamCandidate) -> Vec<Option<String>> {
        let reason = |worker: &WorkerCandidate| self.reason_of_storage_worker(candidate, worker.device);
        candidate.workers.iter().map(|worker| worker.is_storage_only().then(|| reason(worker))).collect()
    }

    fn scaling_efficiency(&self, _: &TeamCandidate) -> Option<ScalingEfficiency> {
        None
    }
}

/// Returns the shares of a sharded team in the order of ranks, for `micro_batch_count` micro-batches per step.
pub(super) fn shares(sequences: &[u64], shards: &[u64], micro_batch_count: u64) -> Vec<Share> {
    (0..sequences.len()).map(|rank| share_of_rank(sequences, shards, micro_batch_count, rank)).collect()
}

/// Returns the share of one rank of a sharded team.
fn share_of_rank(sequences: &[u64], shards: &[u64], micro_batch_count: u64, rank: usize) -> Share {
    Share {
        parallelism: Some(Parallelism::Sharded),
        rank: rank as u32,
        ranks: sequences.len() as u32,
        first_sequence: sequences[..rank].iter().sum(),
        state: shards.to_vec(),
        micro_batches: micro_batch_count,
        ..Share::SINGLE_DEVICE
    }
}

/// Returns shards that are equal, or differ by one part if 1024 is no multiple of `ranks`.
fn even_shards(ranks: u64) -> Vec<u64> {
    (0..ranks).map(|rank| ALL_PARTS * (rank + 1) / ranks - ALL_PARTS * rank / ranks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{device, request};
    use plimsoll_core::{HostSpec, Link};
    use plimsoll_program::models::{ModelConfig, preset};

    /// Returns the request for a team of `devices` that trains a model with `config`.
    fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64, host: Bytes) -> TeamRequest<'a> {
        let host_spec = HostSpec { budget: host, memory_bytes_per_second: 30e9, ..HostSpec::NONE };
        let request =
            |device| PlanRequest { evaluate: true, host: host_spec, ..request(config, device, 256, sequences) };
        TeamRequest {
            devices: devices.iter().map(request).collect(),
            host,
            require_all: false,
            constraint: None,
            evaluations: None,
        }
    }

    fn model() -> ModelConfig {
        ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") }
    }

    /// Returns the candidates of every assignment of roles (computes, storage-only, excluded) that could be faster than
    /// `seconds`, with their numbers of storage-only workers.
    fn every_candidate(sharded: &Sharded, may_exclude: bool, mut seconds: f64) -> Vec<(usize, TeamCandidate)> {
        let device_count = sharded.team.devices.len();
        let mut candidates = Vec::new();
        for code in 0..3usize.pow(device_count as u32) {
            let role = |device: usize| code / 3usize.pow(device as u32) % 3;
            let included: Vec<usize> = (0..device_count).filter(|&device| role(device) < 2).collect();
            let computing = included.iter().copied().filter(|&device| role(device) == 0);
            let could_be_faster =
                sharded.team.tokens_per_step() / sharded.max_tokens_per_second_of(computing.clone()) < seconds;
            if included.len() < 2
                || computing.count() == 0
                || !(may_exclude || included.len() == device_count)
                || !could_be_faster
            {
                continue;
            }
            let storage_count = included.iter().filter(|&&device| role(device) == 1).count();
            let candidate = sharded.fastest_with_roles(&Roles::new(included, |device| role(device) == 1));
            seconds = candidate.iter().map(|candidate| candidate.seconds).fold(seconds, f64::min);
            candidates.extend(candidate.map(|candidate| (storage_count, candidate)));
        }
        candidates
    }

    #[test]
    fn several_slow_devices_become_storage_only_together() {
        let config = model();
        for slow in [[(0.02, 190), (0.02, 190)], [(0.015, 208), (0.02, 170)]] {
            let mut devices = vec![device(1.0, Bytes::mib(102), Link::MEMORY)];
            devices.extend(slow.map(|(pace, mib)| device(pace, Bytes::mib(mib), Link::MEMORY)));
            let team = team(&config, &devices, 3, Bytes::ZERO);
            let sharded = Sharded::new(&team, &[], &Measurements::default());
            let candidate = sharded.fastest().expect("together they hold the model");
            assert_eq!(candidate.devices(), [0, 1, 2]);
            assert!((1..3).all(|device| is_storage_only(&candidate, device)), "{candidate:?}");
            let all = every_candidate(&sharded, true, f64::INFINITY);
            let with_fewer =
                all.iter().filter(|(storage_count, _)| *storage_count < 2).map(|(_, candidate)| candidate.seconds);
            let with_fewer = with_fewer.fold(f64::INFINITY, f64::min);
            println!("{slow:?}: {} s, {with_fewer} s with at most one storage-only worker", candidate.seconds);
            assert!(
                with_fewer.is_finite() && candidate.seconds < 0.5 * with_fewer,
                "{} s and {with_fewer} s",
                candidate.seconds
            );
            let whose = if slow[0] == slow[1] { "their own it and 1 other like it" } else { "its own it" };
            for reason in sharded.storage_only_reasons(&candidate).into_iter().skip(1) {
                let reason = reason.expect("it is storage-only");
                let percent = reason.strip_prefix(&format!("with sequences of {whose} would slow the team to "));
                let percent: f64 = percent
                    .and_then(|percent| percent.split_once(' ')?.0.parse().ok())
                    .unwrap_or_else(|| panic!("{reason}"));
                assert!(percent < 50.0, "{reason}");
            }
        }
    }

    #[test]
    #[ignore = "slow: .ci/slow-tests"]
    fn no_other_roles_are_much_faster() {
        let config = model();
        let mut seed = 1u64;
        // The upper bits of a linear congruential generator.
        let mut random = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 40) as f64 / (1u64 << 24) as f64
        };
        let (mut planned, mut storage_workers) = (0, 0);
        for case in 0..16 {
            let link = Link { bytes_per_second: [1e10, 4e8][case % 2], latency_seconds: 1e-5 };
            let mut devices = vec![device(1.0, Bytes::mib((80.0 * 4f64.powf(random())) as u64), link)];
            while devices.len() < 3 + case / 15 {
                let pace = 10f64.powf(-2.0 * random());
                let slow = device(pace, Bytes::mib((80.0 * 4f64.powf(random())) as u64), link);
                let same_again = devices[1..].last().filter(|_| random() < 0.4).cloned();
                devices.push(same_again.unwrap_or(slow));
            }
            let team = team(&config, &devices, [6, 12, 24][case % 3], Bytes::mib(40 * u64::from(case % 4 == 3)));
            let sharded = Sharded::new(&team, &[], &Measurements::default());
            let may_exclude = random() < 0.6;
            let candidate = sharded.fastest_among((0..devices.len()).collect(), may_exclude);
            let found = candidate.as_ref().map_or(f64::INFINITY, |candidate| candidate.seconds);
            let candidates = every_candidate(&sharded, may_exclude, found);
            let best = candidates.iter().map(|(_, candidate)| candidate.seconds).fold(f64::INFINITY, f64::min);
            assert!(found < 1.05 * best || best == f64::INFINITY, "{case}: {found} s and {best} s, {devices:?}");
            planned += usize::from(candidate.is_some());
            storage_workers += candidate
                .map_or(0, |candidate| candidate.workers.iter().filter(|worker| worker.is_storage_only()).count());
        }
        println!("{planned} planned, {storage_workers} storage-only");
        assert!(planned >= 8 && storage_workers >= 6, "{planned} planned, {storage_workers} storage-only");
    }
}
