//! Pipelines: each device has a run of layers (a stage), and micro-batches pass through the stages (1F1B schedule).
//!
//! Only hidden states cross the links, so slow links matter little. A step loses the time in which the pipeline fills
//! and empties, and the time by which its slowest stage is slower than the others. A stage may offload to the host what
//! its device has no room for. Stages on GPUs also stage their transfers in host memory: without a host they form no
//! pipeline.
//!
//! The search tries sets and orders of devices and sizes of micro-batches. For each it cuts the layers by dynamic
//! programming over (stage, layers below), from interpolated costs (`team::stage`). The most promising cuts are searched for
//! recipes. The predicted time of a step comes from a simulation of the schedule (`schedule`).

mod cuts;
mod schedule;

use super::candidate::{TeamCandidate, TeamSearch, WorkerCandidate};
use super::exclusion::exclude_others;
use super::measurements::{Measurements, RungMeasurements, StageKey};
use super::stage::{MeasuredStage, StageLimits, StageModel, StageOption, StageSeconds, can_offload};
use super::{TeamRequest, bandwidth_tiers, limit_host, slowest_link};
use crate::search::{Candidate, PinnedChoices, PlanRequest, RecipeGoal, parallel_map, recipe_of_share, with_lossy};
use cuts::{Cut, CutTable};
use plimsoll_core::{Bytes, DeviceSpec, ExcludedDevice, Offload, Parallelism, Rung, ScalingEfficiency, micro_batches};
use plimsoll_program::Share;
use plimsoll_program::workspace::Kernels;
pub(super) use schedule::step_seconds;

use std::cell::OnceCell;
use std::collections::HashSet;
use std::sync::Arc;

/// Most devices for which every order of stages is tried, and the neighbors of the fastest pipeline.
const MAX_PERMUTED_DEVICES: usize = 4;
/// Number of micro-batch sizes in a row, all slower than the best, after which larger sizes are skipped.
const MAX_SLOWER_IN_A_ROW: usize = 2;
/// Factor on the time of the fastest candidate. Sketches (stages with estimated times) above the product are not searched
/// for recipes.
const SKETCH_ERROR: f64 = 1.01;
/// Number of smaller amounts of host memory with which a stage is searched for other recipes.
const LOWER_HOSTS: usize = 2;
/// Number of the fastest sketches (stages with estimated times) that are searched for recipes. After them, only
/// sketches with the smallest micro-batch are searched.
const MAX_SEARCHED: usize = 6;
/// Most neighbors of the fastest pipeline, and of the faster ones found, that are searched for recipes.
const MAX_NEIGHBORS: usize = 20;
/// Most times that the layers are cut anew, with less memory, because a stage has no recipe for its layers.
const MAX_REDRAWS: usize = 6;
/// Layers of the larger of two stages from which the seconds and bytes of any stage are interpolated. The smaller has
/// one layer.
const MEASURED_LAYERS: u64 = 2;

/// The search for pipelines, with some lossy rungs taken.
pub(super) struct Pipeline<'t, 'q> {
    team: &'t TeamRequest<'q>,
    rungs: &'t [Rung],
    /// The load line of the host beside each device.
    hosts: Vec<Bytes>,
    measured: Arc<RungMeasurements>,
    /// For each device, the first of its kind.
    kinds: Vec<usize>,
    /// The recipes that the stages get.
    goal: RecipeGoal,
    /// The search ends where no pipeline with fewer seconds a step is in sight.
    bound: f64,
    /// The fastest candidate, until one is rejected.
    fastest: OnceCell<Option<TeamCandidate>>,
}

/// The stages of a pipeline with estimated times, before recipes are searched.
#[derive(Clone, Debug)]
struct Sketch {
    micro_batch: u32,
    /// The first layer of each stage, and then the number of layers of the model.
    boundaries: Vec<u64>,
    /// Bytes of the host that all stages use together.
    host_bytes: Bytes,
    /// Most bytes of host memory that each stage may use.
    hosts: Vec<Bytes>,
    /// Whether each stage offloads anything to the host.
    offloads: Vec<bool>,
    /// Predicted seconds of a step.
    seconds: f64,
}

impl<'t, 'q> Pipeline<'t, 'q> {
    pub fn new(team: &'t TeamRequest<'q>, rungs: &'t [Rung], measurements: &Measurements) -> Pipeline<'t, 'q> {
        Pipeline {
            team,
            rungs,
            hosts: team.hosts(),
            measured: measurements.with_rungs(rungs),
            kinds: team.first_of_kinds(),
            goal: RecipeGoal::Fastest,
            bound: f64::INFINITY,
            fastest: OnceCell::new(),
        }
    }

    /// Gives the stages recipes for this goal.
    pub fn with_goal(self, goal: RecipeGoal) -> Pipeline<'t, 'q> {
        Pipeline { goal, ..self }
    }

    /// Lets the search for the fastest pipeline pass over those that take `bound` seconds a step or more.
    pub fn with_bound(self, bound: f64) -> Pipeline<'t, 'q> {
        Pipeline { bound, ..self }
    }

    /// Returns the number of layers of the model.
    fn depth(&self) -> u64 {
        self.team.devices[0].config.layers
    }

    /// Returns the specification of a device in a team of `devices`, which has the team's slowest link.
    fn spec_in_team(&self, device: usize, devices: &[usize]) -> DeviceSpec {
        let spec = self.team.devices[device].device;
        let team_link = slowest_link(devices.iter().map(|&device| self.team.devices[device].device.team_link));
        DeviceSpec { team_link, ..spec.clone() }
    }

    /// Returns whether point-to-point transfers of a device are staged in host memory.
    fn is_host_staged(&self, device: usize) -> bool {
        Kernels::for_device(self.team.devices[device].device) == Kernels::Cuda
    }

    /// Returns the request for one stage. `spec` is the specification of its device in the team, as `spec_in_team`
    /// returns it.
    fn request<'s>(
        &self,
        spec: &'s DeviceSpec,
        device: usize,
        share: &Share,
        micro_batch: u32,
        host: Bytes,
    ) -> PlanRequest<'s>
    where
        'q: 's,
    {
        let request = self.team.request_for(device, share, self.team.sequences_per_step(), host);
        let request = with_lossy(&request, self.rungs);
        let pins = PinnedChoices { micro_batch: Some(micro_batch), ..request.pins.clone() };
        PlanRequest { device: spec, pins, ..request }
    }

    /// Returns a model of each stage of a pipeline over `devices`: its predicted seconds and bytes with any number of
    /// layers. Models that are not cached are built from Programs.
    fn models_of(&self, devices: &[usize], micro_batch: u32) -> Vec<StageModel> {
        let count = devices.len();
        let key = |stage: usize| self.stage_key(devices, stage, micro_batch);
        let known = &self.measured.stage_models;
        let unknown: Vec<usize> = (0..count).filter(|&stage| known.get(&key(stage)).is_none()).collect();
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec_in_team(device, devices)).collect();
        let request = |stage: usize, layers: u64| {
            let share = shares(&boundaries_around(stage, count, layers, self.depth())).swap_remove(stage);
            self.request(&specs[stage], devices[stage], &share, micro_batch, self.hosts[devices[stage]])
        };
        let most = (self.depth() + 1 - count as u64).min(MEASURED_LAYERS);
        let requests: Vec<[PlanRequest; 2]> =
            unknown.iter().map(|&stage| [request(stage, 1), request(stage, most)]).collect();
        let measured = parallel_map(&requests, |[one, two]| {
            let can_offload = can_offload(one, one.host.budget);
            StageModel { one: MeasuredStage::measure(one, can_offload), two: MeasuredStage::measure(two, can_offload) }
        });
        unknown.iter().zip(measured).for_each(|(&stage, model)| known.insert(key(stage), model));
        (0..count).map(|stage| known.get(&key(stage)).expect("it was measured")).collect()
    }

    /// Returns the key under which the model of a stage is cached.
    fn stage_key(&self, devices: &[usize], stage: usize, micro_batch: u32) -> StageKey {
        let device = self.kinds[devices[stage]];
        let can_offload = can_offload(&self.team.devices[devices[stage]], self.hosts[devices[stage]]);
        let link = self.spec_in_team(devices[stage], devices).team_link.bytes_per_second.to_bits();
        StageKey { device, stage, stages: devices.len(), micro_batch, can_offload, link }
    }

    /// Returns the number of micro-batches of a step, each with `micro_batch` sequences.
    fn micro_batch_count(&self, micro_batch: u32) -> u32 {
        micro_batches(self.team.sequences_per_step(), micro_batch) as u32
    }

    /// Returns the memory limits of one stage; `unused` bytes of its device stay free.
    fn stage_limits(&self, devices: &[usize], stage: usize, micro_batch: u32, unused: u64) -> StageLimits {
        let request = with_lossy(&self.team.devices[devices[stage]], self.rungs);
        let spec = self.spec_in_team(devices[stage], devices);
        let (host, micro_batches) = (self.hosts[devices[stage]], self.micro_batch_count(micro_batch));
        StageLimits {
            budget: spec.arena_budget().0.saturating_sub(unused) as f64,
            host: if can_offload(&request, host) { host.0 as f64 } else { 0.0 },
            micro_batches,
            in_flight: ((devices.len() - stage) as u32).min(micro_batches).max(1),
        }
    }

    /// Estimates the least host memory that is enough for a pipeline of all devices, with the smallest micro-batch.
    /// Returns `None` if they form no pipeline.
    pub fn least_host(&self) -> Option<Bytes> {
        let micro_batch = self.team.devices[0].pins.micro_batch.unwrap_or(1);
        let devices = self.limit_to_depth(self.all_devices())?;
        let orders = self.stage_orders(&devices);
        let sketches = orders.iter().flat_map(|order| self.sketches(order, micro_batch, &vec![0; order.len()]));
        sketches.map(|sketch| sketch.host_bytes).min()
    }

    /// Returns the fastest cut of the layers for devices in this order; `None` if none fits. `unused` bytes of each
    /// device stay free.
    fn sketch(&self, devices: &[usize], micro_batch: u32, unused: &[u64]) -> Option<Sketch> {
        let sketches = self.sketches(devices, micro_batch, unused).into_iter();
        sketches.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// Returns the Pareto-optimal cuts of the layers, by time and host memory, for devices in this order. `unused`
    /// bytes of each device stay free.
    fn sketches(&self, devices: &[usize], micro_batch: u32, unused: &[u64]) -> Vec<Sketch> {
        let models = self.models_of(devices, micro_batch);
        let (count, depth) = (devices.len(), self.depth());
        let limits: Vec<StageLimits> =
            (0..count).map(|stage| self.stage_limits(devices, stage, micro_batch, unused[stage])).collect();
        let micro_batches = limits[0].micro_batches;
        // Host buffers for the transfers of GPUs: one for each micro-batch in flight, and two on their way.
        let staging_bytes = |stage: usize| match self.is_host_staged(devices[stage]) {
            true => f64::from(limits[stage].in_flight + 2) * models[stage].one.hidden_bytes,
            false => 0.0,
        };
        let staging: Vec<f64> = (0..count).map(staging_bytes).collect();
        let host = self.team.host.0 as f64 - staging.iter().sum::<f64>();
        let options = |stage: usize, layers: u64| models[stage].options(layers, &limits[stage]);
        let table = CutTable::build(count, depth, micro_batches, host, options);
        let to_sketch = |last| self.to_sketch(&table, last, devices, &staging, micro_batch);
        table.complete_cuts().iter().map(to_sketch).collect()
    }

    /// Converts a complete cut to a sketch for `devices`. `staging` holds the bytes of the host buffers of each stage.
    fn to_sketch(&self, table: &CutTable, last: &Cut, devices: &[usize], staging: &[f64], micro_batch: u32) -> Sketch {
        let (options, boundaries) = table.trace(last);
        let seconds: Vec<StageSeconds> = options.iter().map(|option| option.seconds).collect();
        let total_staging = staging.iter().sum::<f64>();
        let host = self.team.host.0 as f64 - total_staging;
        let spare = (host - last.totals.host_bytes).max(0.0) / staging.len() as f64;
        let host_of = |(stage, option): (usize, &StageOption)| {
            Bytes((option.offloaded + staging[stage] + spare) as u64).min(self.hosts[devices[stage]])
        };
        Sketch {
            micro_batch,
            boundaries,
            host_bytes: Bytes((last.totals.host_bytes + total_staging) as u64),
            hosts: options.iter().enumerate().map(host_of).collect(),
            offloads: options.iter().map(|option| option.offloaded > 0.0).collect(),
            seconds: step_seconds(&seconds, self.micro_batch_count(micro_batch)),
        }
    }

    /// Returns the orders of devices that are worth trying. Few devices are tried in every order. More are tried in the
    /// given order and by memory, both also reversed. Orders that differ only in identical devices count once.
    fn stage_orders(&self, devices: &[usize]) -> Vec<Vec<usize>> {
        let mut by_memory = devices.to_vec();
        by_memory.sort_by_key(|&device| self.team.devices[device].device.arena_budget());
        let both_ways = |order: Vec<usize>| [order.iter().rev().copied().collect(), order];
        let mut orders: Vec<Vec<usize>> = match devices.len() {
            ..=MAX_PERMUTED_DEVICES => permutations(devices),
            _ => both_ways(devices.to_vec()).into_iter().chain(both_ways(by_memory)).collect(),
        };
        orders.sort_by_key(|order| order != devices);
        let kinds = |order: &Vec<usize>| order.iter().map(|&d| self.team.first_alike(d)).collect::<Vec<_>>();
        let mut seen = Vec::new();
        orders.retain(|order| {
            let is_new = !seen.contains(&kinds(order));
            seen.push(kinds(order));
            is_new
        });
        orders
    }

    /// Returns the fastest candidate in which exactly these devices take part; `None` if none fits.
    fn fastest_over(&self, devices: &[usize]) -> Option<TeamCandidate> {
        self.faster_over(devices, f64::INFINITY)
    }

    /// Returns the fastest candidate like [`Pipeline::fastest_over`], of those that take less than `bound` seconds a step.
    fn faster_over(&self, devices: &[usize], bound: f64) -> Option<TeamCandidate> {
        let total = self.team.sequences_per_step();
        let sizes: Vec<u32> = match self.team.devices[0].pins.micro_batch {
            Some(pinned) => vec![pinned],
            None => (0..16).map(|power| 1 << power).take_while(|&size| u64::from(size) <= total).collect(),
        };
        let mut sketches: Vec<(Vec<usize>, Sketch)> = Vec::new();
        for order in self.stage_orders(devices) {
            let (mut best, mut slower_in_a_row) = (f64::INFINITY, 0);
            for &size in &sizes {
                let Some(sketch) = self.sketch(&order, size, &vec![0; order.len()]) else { continue };
                slower_in_a_row = if sketch.seconds < best { 0 } else { slower_in_a_row + 1 };
                best = best.min(sketch.seconds);
                sketches.push((order.clone(), sketch));
                if slower_in_a_row >= MAX_SLOWER_IN_A_ROW {
                    break;
                }
            }
        }
        sketches.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
        // The fastest are searched until none can be faster, by its estimate, and then those that need the least memory.
        let smallest = sketches.iter().map(|(_, sketch)| sketch.micro_batch).min();
        let smallest = sketches.iter().skip(MAX_SEARCHED).filter(|(_, sketch)| Some(sketch.micro_batch) == smallest);
        let mut best: Option<(&[usize], Sketch, TeamCandidate)> = None;
        for (number, (order, sketch)) in sketches.iter().take(MAX_SEARCHED).chain(smallest).enumerate() {
            let seconds = best.as_ref().map_or(bound, |(_, _, best)| best.seconds);
            if sketch.seconds > SKETCH_ERROR * seconds || best.is_some() && number >= MAX_SEARCHED {
                break;
            }
            let found = self.with_recipes(order, sketch).filter(|(_, found)| found.seconds < seconds);
            best = found.map(|(sketch, found)| (order.as_slice(), sketch, found)).or(best);
        }
        let (order, sketch, best) = best?;
        Some(self.improve(order, sketch, best))
    }

    /// Changes the micro-batch of a pipeline that offloads, or the boundary between two of its stages, as long as that
    /// makes it faster. The estimated times of stages that offload are inexact, so that the fastest sketch need not be the
    /// fastest pipeline.
    fn improve(&self, devices: &[usize], mut sketch: Sketch, mut best: TeamCandidate) -> TeamCandidate {
        let is_slow_to_search = devices.len() > MAX_PERMUTED_DEVICES;
        if is_slow_to_search || self.goal == RecipeGoal::LeastMemory || !sketch.offloads.contains(&true) {
            return best;
        }
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec_in_team(device, devices)).collect();
        let key = |sketch: &Sketch| (sketch.micro_batch, sketch.boundaries.clone());
        let mut tried = HashSet::from([key(&sketch)]);
        while let Some(neighbor) =
            self.neighbors(devices, &sketch).into_iter().find(|neighbor| !tried.contains(&key(neighbor)))
        {
            if tried.len() > MAX_NEIGHBORS {
                break;
            }
            tried.insert(key(&neighbor));
            let found = self.stage_recipes(devices, &specs, &neighbor).ok().flatten();
            if let Some(faster) = found.filter(|found| found.seconds < best.seconds) {
                (sketch, best) = (neighbor, faster);
            }
        }
        best
    }

    /// Returns sketches with half or twice the micro-batch, and with a layer of one stage moved to another, neighbors in
    /// the pipeline first.
    fn neighbors(&self, devices: &[usize], sketch: &Sketch) -> Vec<Sketch> {
        let pinned = self.team.devices[0].pins.micro_batch.is_some();
        let sizes = [sketch.micro_batch / 2, sketch.micro_batch * 2];
        let is_allowed = |size: &u32| !pinned && (1..=self.team.sequences_per_step()).contains(&u64::from(*size));
        let with_size = |micro_batch: u32| Sketch { micro_batch, ..sketch.clone() };
        // The stages of the sketch had other needs of host memory. Together they must fit all the same.
        let hosts: Vec<Bytes> = devices.iter().map(|&device| self.hosts[device]).collect();
        let moved = |(from, to): (usize, usize)| {
            let boundaries = move_layer(&sketch.boundaries, from, to)?;
            Some(Sketch { boundaries, hosts: hosts.clone(), ..sketch.clone() })
        };
        let stages = sketch.boundaries.len() - 1;
        let mut moves: Vec<(usize, usize)> =
            (0..stages).flat_map(|from| (0..stages).map(move |to| (from, to))).collect();
        moves.retain(|(from, to)| from != to);
        moves.sort_by_key(|(from, to)| from.abs_diff(*to));
        sizes.into_iter().filter(is_allowed).map(with_size).chain(moves.into_iter().filter_map(moved)).collect()
    }

    /// Searches a recipe for each stage of a sketch. If a stage has none, the layers are cut anew with less of its
    /// memory. Also returns the sketch of the candidate. Returns `None` if no cut has recipes.
    fn with_recipes(&self, devices: &[usize], sketch: &Sketch) -> Option<(Sketch, TeamCandidate)> {
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec_in_team(device, devices)).collect();
        let mut unused = vec![0; devices.len()];
        let mut sketch = sketch.clone();
        for _ in 0..MAX_REDRAWS {
            let without = match self.stage_recipes(devices, &specs, &sketch) {
                Ok(found) => return found.map(|candidate| (sketch, candidate)),
                Err(without) => without,
            };
            for stage in without {
                unused[stage] += specs[stage].arena_budget().0 / 32;
            }
            sketch = self.sketch(devices, sketch.micro_batch, &unused)?;
        }
        None
    }

    /// Searches a recipe for each stage of a sketch. Returns `None` if the stages do not fit on their hosts together, and
    /// fails with the stages for which no recipe fits. `specs` are the specifications of the devices in the team.
    fn stage_recipes(
        &self,
        devices: &[usize],
        specs: &[DeviceSpec],
        sketch: &Sketch,
    ) -> Result<Option<TeamCandidate>, Vec<usize>> {
        let shares = shares(&sketch.boundaries);
        let request = |stage: usize| {
            let (spec, share) = (&specs[stage], &shares[stage]);
            let request = self.request(spec, devices[stage], share, sketch.micro_batch, sketch.hosts[stage]);
            if sketch.offloads[stage] { request } else { without_offload(request) }
        };
        let requests: Vec<PlanRequest> = (0..devices.len()).map(request).collect();
        let (goal, measured) = (self.goal, &self.measured);
        let recipe_of = |request: &PlanRequest| {
            let recipe = recipe_of_share(request, goal, f64::INFINITY, measured.of_request(request))?;
            let seconds = StageSeconds::of(&request.compute_programs(&recipe.recipe), &request.prices());
            Some(StageRecipe { recipe, seconds })
        };
        let recipes = parallel_map(&requests, recipe_of);
        let without: Vec<usize> = (0..devices.len()).filter(|&stage| recipes[stage].is_none()).collect();
        if !without.is_empty() {
            return Err(without);
        }
        let mut recipes: Vec<StageRecipe> = recipes.into_iter().flatten().collect();
        let offloads = |&stage: &usize| !recipes[stage].recipe.recipe.offload.is_nothing();
        let offloading: Vec<usize> = (0..devices.len()).filter(offloads).collect();
        let with_less = |&stage: &usize| with_less_host(&requests[stage]).map(move |request| (stage, request));
        let with_less: Vec<(usize, PlanRequest)> = offloading.iter().flat_map(with_less).collect();
        let others = parallel_map(&with_less, |(stage, request)| Some((*stage, recipe_of(request)?)));
        let micro_batches = self.micro_batch_count(sketch.micro_batch);
        let mut others: Vec<(usize, StageRecipe)> = others.into_iter().flatten().collect();
        choose_together(&mut recipes, &mut others, micro_batches);
        let fits = self.fit_on_hosts(devices, &mut recipes, &mut others);
        Ok(fits.then(|| self.to_candidate(devices, sketch, &shares, &recipes)))
    }

    /// Gives stages other recipes with less host memory until all stages fit on their hosts together, those first that
    /// save most. Returns whether they fit then, by the known bytes.
    fn fit_on_hosts(
        &self,
        devices: &[usize],
        recipes: &mut [StageRecipe],
        others: &mut [(usize, StageRecipe)],
    ) -> bool {
        loop {
            let used = recipes.iter().zip(devices).map(|(stage, &device)| (device, Bytes(stage.host_bytes())));
            let crowded = self.team.crowded_devices(&used.collect::<Vec<_>>());
            if crowded.is_empty() {
                return true;
            }
            let saved = |(stage, other): &(usize, StageRecipe)| {
                let saved = recipes[*stage].host_bytes().saturating_sub(other.host_bytes());
                if crowded.contains(&devices[*stage]) { saved } else { 0 }
            };
            let saves_most = (0..others.len()).max_by_key(|&number| saved(&others[number]));
            let Some(number) = saves_most.filter(|&number| saved(&others[number]) > 0) else { return false };
            let (stage, other) = &mut others[number];
            std::mem::swap(&mut recipes[*stage], other);
        }
    }

    /// Builds a team candidate from a sketch and the recipe of each stage.
    fn to_candidate(
        &self,
        devices: &[usize],
        sketch: &Sketch,
        shares: &[Share],
        recipes: &[StageRecipe],
    ) -> TeamCandidate {
        let total = self.team.sequences_per_step();
        let micro_batches = self.micro_batch_count(sketch.micro_batch);
        let worker = |(stage, StageRecipe { recipe, .. }): (usize, &StageRecipe)| {
            WorkerCandidate::new(devices[stage], shares[stage].clone(), total, recipe, sketch.hosts[stage])
        };
        let workers = recipes.iter().enumerate().map(worker).collect();
        let seconds = seconds_of_recipes(recipes, micro_batches);
        TeamCandidate { parallelism: Some(Parallelism::Pipeline), workers, seconds }
    }

    fn slowest_device(&self, devices: &[usize]) -> Option<usize> {
        let speed = |device: usize| self.team.devices[device].device.rates.f32_flops;
        devices.iter().copied().min_by(|&a, &b| speed(a).total_cmp(&speed(b)))
    }

    /// Drops the slowest devices until there are no more devices than layers; drops none if the request requires all.
    /// Returns `None` if the remaining devices form no pipeline: fewer than two, or more than the layers. Also returns
    /// `None` without training, with pinned offload, or if all devices are required and a GPU has no host memory.
    fn limit_to_depth(&self, mut devices: Vec<usize>) -> Option<Vec<usize>> {
        let pinned = &self.team.devices[0].pins;
        if self.team.devices[0].optimizer.is_none() || pinned.offload.is_some_and(|offload| !offload.is_nothing()) {
            return None;
        }
        let lacks_host = |&device: &usize| self.hosts[device] == Bytes::ZERO && self.is_host_staged(device);
        if (self.team.host == Bytes::ZERO || self.team.require_all) && devices.iter().any(lacks_host) {
            return None;
        }
        devices.retain(|device| !lacks_host(device));
        while devices.len() as u64 > self.depth() && !self.team.require_all {
            let slowest = self.slowest_device(&devices)?;
            devices.retain(|device| *device != slowest);
        }
        (2..=self.depth()).contains(&(devices.len() as u64)).then_some(devices)
    }

    fn all_devices(&self) -> Vec<usize> {
        (0..self.team.devices.len()).collect()
    }

    /// Finds the fastest candidate: over all devices if the request requires them, else over any of them. Returns
    /// `None` if none fits.
    fn find_fastest(&self) -> Option<TeamCandidate> {
        let devices = self.all_devices();
        if self.team.require_all {
            return self.faster_over(&self.limit_to_depth(devices)?, self.bound);
        }
        let tiers = bandwidth_tiers(&devices, |device| self.team.devices[device].device.team_link);
        let candidates = tiers.into_iter().filter_map(|tier| self.fastest_among(self.limit_to_depth(tier)?));
        candidates.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// Finds the fastest candidate over some of `devices`; `None` if none fits. Single devices are dropped as long as
    /// the candidate gets faster.
    fn fastest_among(&self, mut devices: Vec<usize>) -> Option<TeamCandidate> {
        let mut best = self.faster_over(&devices, self.bound);
        while devices.len() > 2 {
            let mut droppable = match devices.len() {
                ..=MAX_PERMUTED_DEVICES => devices.clone(),
                _ => self.slowest_device(&devices).into_iter().collect(),
            };
            droppable.dedup_by_key(|device| self.team.first_alike(*device));
            let with_one_dropped = droppable.into_iter().filter_map(|dropped| {
                let devices: Vec<usize> = devices.iter().copied().filter(|&device| device != dropped).collect();
                self.faster_over(&devices, self.bound).map(|candidate| (devices, candidate))
            });
            match with_one_dropped.min_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds)) {
                Some((fewer, candidate)) if best.as_ref().is_none_or(|best| candidate.seconds < best.seconds) => {
                    (devices, best) = (fewer, Some(candidate));
                }
                _ => break,
            }
        }
        best
    }
}

impl TeamSearch for Pipeline<'_, '_> {
    fn fastest(&self) -> Option<TeamCandidate> {
        self.fastest.get_or_init(|| self.find_fastest()).clone()
    }

    fn reject(&mut self, _: &TeamCandidate, _: usize) {
        // The packed bytes are in the measurements.
        self.fastest.take();
    }

    fn excluded(&self, candidate: &TeamCandidate) -> Vec<ExcludedDevice> {
        exclude_others(self.team, candidate, "no recipe fits on it with a layer of its own", |devices| {
            (devices.len() as u64 <= self.depth()).then(|| self.fastest_over(devices)).flatten()
        })
    }

    fn scaling_efficiency(&self, _: &TeamCandidate) -> Option<ScalingEfficiency> {
        None
    }
}

/// Returns the boundaries of a pipeline in which `stage` has `layers` layers, and the other stages share the rest
/// evenly. They are the first layer of each stage, and then `depth`, the number of layers of the model.
fn boundaries_around(stage: usize, stages: usize, layers: u64, depth: u64) -> Vec<u64> {
    let (stages_below, stages_above) = (stage as u64, (stages - stage - 1) as u64);
    let others = depth - layers;
    let below = others * stages_below / (stages as u64 - 1);
    let first = (0..=stages_below).map(|number| below * number / stages_below.max(1));
    let rest = (0..=stages_above).map(|number| below + layers + (others - below) * number / stages_above.max(1));
    first.chain(rest).collect()
}

/// Moves one layer between two stages, and with it the boundaries of all stages between them. Returns `None` if a stage
/// is left without a layer.
fn move_layer(boundaries: &[u64], from: usize, to: usize) -> Option<Vec<u64>> {
    let mut moved = boundaries.to_vec();
    match from < to {
        true => moved[from + 1..=to].iter_mut().for_each(|boundary| *boundary -= 1),
        false => moved[to + 1..=from].iter_mut().for_each(|boundary| *boundary += 1),
    }
    moved.is_sorted_by(|a, b| a < b).then_some(moved)
}

/// The recipe of a stage, with its predicted seconds.
struct StageRecipe {
    recipe: Candidate,
    seconds: StageSeconds,
}

impl StageRecipe {
    /// Returns the bytes of the host arena: of the packed recipe if it was packed, otherwise a lower bound.
    fn host_bytes(&self) -> u64 {
        self.recipe.known_bytes().host
    }
}

/// Predicts the seconds of a step in which each stage has its recipe.
fn seconds_of_recipes(recipes: &[StageRecipe], micro_batches: u32) -> f64 {
    let seconds: Vec<StageSeconds> = recipes.iter().map(|recipe| recipe.seconds).collect();
    step_seconds(&seconds, micro_batches)
}

/// Chooses between the recipe of each stage and its other one in `others`, such that the step is fastest. A stage that
/// takes less time in all may still delay the others by a longer forward pass. The search begins with all recipes of one
/// kind, then with all of the other, and changes single stages as long as the step gets faster.
fn choose_together(recipes: &mut [StageRecipe], others: &mut [(usize, StageRecipe)], micro_batches: u32) {
    let first = descend(recipes, others, micro_batches);
    let found: Vec<Candidate> = recipes.iter().map(|stage| stage.recipe.clone()).collect();
    for (stage, other) in others.iter_mut().filter(|(_, other)| other.recipe.recipe.offload.is_nothing()) {
        std::mem::swap(&mut recipes[*stage], other);
    }
    if descend(recipes, others, micro_batches) < first {
        return;
    }
    for (stage, other) in others.iter_mut() {
        if recipes[*stage].recipe.recipe != found[*stage].recipe {
            std::mem::swap(&mut recipes[*stage], other);
        }
    }
}

/// Swaps recipes of single stages with `others` as long as the step gets faster, and returns its seconds.
fn descend(recipes: &mut [StageRecipe], others: &mut [(usize, StageRecipe)], micro_batches: u32) -> f64 {
    let mut best = seconds_of_recipes(recipes, micro_batches);
    loop {
        let before = best;
        for (stage, other) in others.iter_mut() {
            std::mem::swap(&mut recipes[*stage], other);
            match seconds_of_recipes(recipes, micro_batches) {
                seconds if seconds < best => best = seconds,
                _ => std::mem::swap(&mut recipes[*stage], other),
            }
        }
        if best >= before {
            return best;
        }
    }
}

/// Returns the request of a stage without offload, and with the next lower powers of two of host memory. The amounts do not
/// depend on the load line of the host.
fn with_less_host<'a>(request: &PlanRequest<'a>) -> impl Iterator<Item = PlanRequest<'a>> {
    let powers = (0..64).rev().map(|power| Bytes(1 << power)).filter(|bytes| *bytes < request.host.budget);
    let with_host = |host: Bytes| PlanRequest { host: limit_host(request.host, host), ..request.clone() };
    let with_host: Vec<PlanRequest> = powers.take(LOWER_HOSTS).map(with_host).collect();
    with_host.into_iter().chain([without_offload(request.clone())])
}

/// Pins a request to no offload, unless its offload is already pinned.
fn without_offload(mut request: PlanRequest) -> PlanRequest {
    request.pins.offload.get_or_insert(Offload::NOTHING);
    request
}

/// Returns all orders of some devices.
fn permutations(devices: &[usize]) -> Vec<Vec<usize>> {
    if devices.is_empty() {
        return vec![vec![]];
    }
    let starting_with = |&first: &usize| {
        let others: Vec<usize> = devices.iter().copied().filter(|&device| device != first).collect();
        permutations(&others).into_iter().map(move |order| [vec![first], order].concat()).collect::<Vec<_>>()
    };
    devices.iter().flat_map(starting_with).collect()
}

/// Returns the shares of a pipeline in the order of ranks. `boundaries` has the first layer of each stage, and then the
/// number of layers of the model.
pub(super) fn shares(boundaries: &[u64]) -> Vec<Share> {
    (0..boundaries.len() - 1).map(|rank| share_of_rank(boundaries, rank)).collect()
}

/// Returns the share of one rank of a pipeline.
fn share_of_rank(boundaries: &[u64], rank: usize) -> Share {
    Share {
        parallelism: Some(Parallelism::Pipeline),
        rank: rank as u32,
        ranks: boundaries.len() as u32 - 1,
        layers: boundaries.to_vec(),
        ..Share::SINGLE_DEVICE
    }
}
