//! The layers stand one after another on the devices, each with a run of them that its memory and its speed allow, and
//! micro-batches go through them like through a pipeline. Only hidden states go from device to device, so slow links matter
//! little; what is lost is the time in which the pipeline fills and empties, and what its slowest stage takes longer than the
//! others. Messages of GPUs stand on the host: where nothing of it may be used there is no pipeline over them.
//!
//! Where stages begin is found by dynamic programming over (stage, layers below): a stage of so many layers takes and holds
//! what was measured of stages of few, where nothing is computed again and where everything is, and what lies between is in
//! proportion. How many sequences a micro-batch has, which devices take part and in which order is tried. What is most
//! promising is searched for recipes.

use super::{Given, LeftOut, ShareOut, TeamQuestion, Way, out_of_way, slowest};
use crate::layout::lower_bounds;
use crate::price::Prices;
use crate::search::{Pins, Question, fastest_by_bounds, side_by_side, under};
use plimsoll_core::{Bytes, DeviceSpec, Link, Recipe, RecomputeLevel, Rung, Sharing, Worth};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Program, ProgramSet, Schedule, Share};
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;

/// Sizes of micro-batches in a row that may be slower than the best before the rest is not looked at.
const WORSE: usize = 2;
/// Times that the stages are drawn anew because one has no recipe for its layers.
const TRIES: usize = 6;
/// Ways to cut the layers that are kept for so many stages and so many layers.
const FRONTIER: usize = 12;

/// What a stage takes for a micro-batch and in a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StageSeconds {
    forward: f64,
    backward: f64,
    /// A message to the next stage, or from it.
    message: f64,
    /// Before the first and after the last pass.
    once: f64,
}

impl StageSeconds {
    /// What Programs of a stage come to by these prices.
    pub fn of(set: &ProgramSet, prices: &Prices) -> StageSeconds {
        let no_wire = Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 };
        let alone = Prices { team_link: no_wire, ..*prices };
        let of = |prices: &Prices, name: &str| {
            set.program(name).map_or(0.0, |program: &Program| prices.program_seconds(set, program, true))
        };
        let once = |prices: &Prices| ["begin", "norm", "update"].into_iter().map(|name| of(prices, name)).sum::<f64>();
        let bytes = set.find("train.hidden").map_or(0, |hidden| set.tensor(hidden).bytes());
        StageSeconds {
            forward: of(&alone, "forward"),
            backward: of(&alone, "backward"),
            message: prices.team_link.latency_seconds + bytes as f64 / prices.team_link.bytes_per_second,
            once: once(prices),
        }
    }

    /// Seconds in which the stage computes.
    pub fn busy(&self, micro_batches: u32) -> f64 {
        f64::from(micro_batches) * (self.forward + self.backward) + self.once
    }

    fn between(self, other: StageSeconds, part: f64) -> StageSeconds {
        let mix = |a: f64, b: f64| a + part * (b - a);
        StageSeconds {
            forward: mix(self.forward, other.forward),
            backward: mix(self.backward, other.backward),
            message: mix(self.message, other.message),
            once: mix(self.once, other.once),
        }
    }
}

/// Seconds of a step of a pipeline: every stage does its calls in order. What goes down waits to be taken, what goes up is
/// handed over.
pub(super) fn step_seconds(stages: &[StageSeconds], micro_batches: u32) -> f64 {
    let count = stages.len();
    let passes = |stage: usize| {
        let schedule = Schedule::one_forward_one_backward(count as u32, stage as u32, micro_batches);
        let passes = schedule.calls.into_iter().filter(|call| ["forward", "backward"].contains(&&*call.program));
        passes.map(|call| (call.program == "forward", call.micro_batch as usize)).collect::<Vec<_>>()
    };
    let calls: Vec<Vec<(bool, usize)>> = (0..count).map(passes).collect();
    let (mut next, mut free) = (vec![0; count], vec![0.0f64; count]);
    // When what goes down and up is there to be taken; and whether a stage waits for that.
    let mut shown = vec![vec![None; micro_batches as usize]; count];
    let mut gradient = vec![vec![None; micro_batches as usize]; count];
    let mut handing = vec![false; count];
    while (0..count).any(|stage| next[stage] < calls[stage].len()) {
        for stage in 0..count {
            while let Some(&(forward, number)) = calls[stage].get(next[stage]).filter(|_| !handing[stage]) {
                let peer = if forward { stage.checked_sub(1) } else { Some(stage + 1).filter(|next| *next < count) };
                let ready: Option<f64> = match (peer, forward) {
                    (None, _) => Some(free[stage]),
                    (Some(below), true) => {
                        shown[below][number].map(|at: f64| at.max(free[stage]) + stages[below].message)
                    }
                    (Some(above), false) => {
                        gradient[above][number].map(|at: f64| at.max(free[stage]) + stages[stage].message)
                    }
                };
                let Some(ready) = ready else { break };
                if let (Some(above), false) = (peer, forward) {
                    (free[above], handing[above]) = (free[above].max(ready), false);
                }
                let StageSeconds { forward: down, backward: up, .. } = stages[stage];
                free[stage] = ready + if forward { down } else { up };
                let there = if forward { &mut shown } else { &mut gradient };
                there[stage][number] = Some(free[stage]);
                handing[stage] = !forward && stage > 0;
                next[stage] += 1;
            }
        }
    }
    let passes = free.iter().copied().fold(0.0, f64::max);
    passes + stages.iter().map(|stage| stage.once).fold(0.0, f64::max)
}

/// A stage of some layers: bytes and seconds, where nothing is computed again and where everything is.
#[derive(Clone, Copy, Debug)]
struct Measured {
    bytes: [f64; 2],
    seconds: [StageSeconds; 2],
}

impl Measured {
    /// The stage that a question is about.
    fn of(question: &Question) -> Measured {
        let (own, prices) = (question.share.own_layers(question.config.layers), question.prices());
        let of = |level: RecomputeLevel| {
            let levels = question.pins.recompute.clone();
            let levels = levels.unwrap_or_else(|| vec![level; (own.end - own.start) as usize]);
            let micro_batch = question.pins.micro_batch.unwrap_or(1);
            let recipe = Recipe { rungs: question.rungs.clone(), ..Recipe::on_device(micro_batch, levels) };
            let set = question.computing(&recipe);
            (lower_bounds(&set)[0] as f64, StageSeconds::of(&set, &prices))
        };
        let found = [RecomputeLevel::Nothing, RecomputeLevel::Block].map(of);
        Measured { bytes: found.map(|found| found.0), seconds: found.map(|found| found.1) }
    }
}

/// Stages of one layer more and more, from two that were measured.
#[derive(Clone, Copy, Debug)]
struct Stages {
    one: Measured,
    two: Measured,
}

impl Stages {
    /// A stage of so many layers within so many bytes.
    fn of(&self, layers: u64, budget: u64) -> Option<StageSeconds> {
        let more = layers as f64 - 1.0;
        let bytes = [0, 1].map(|at| self.one.bytes[at] + more * (self.two.bytes[at] - self.one.bytes[at]));
        let seconds = [0, 1].map(|at| self.one.seconds[at].between(self.two.seconds[at], more));
        let budget = budget as f64;
        if bytes[0] <= budget {
            return Some(seconds[0]);
        }
        let least = bytes[1].min(bytes[0]);
        (least <= budget).then(|| seconds[0].between(seconds[1], (bytes[0] - budget) / (bytes[0] - bytes[1]).max(1.0)))
    }
}

/// Pipelines of the devices of a team, under some lossy rungs.
pub(super) struct Layers<'t, 'q> {
    team: &'t TeamQuestion<'q>,
    rungs: &'t [Rung],
    /// Bytes of a device that are not planned with, because what packs did not.
    held_back: Vec<u64>,
    /// By kind of device, stage and number of stages, and sequences of a micro-batch.
    stages: RefCell<HashMap<(usize, usize, usize, u32), Stages>>,
    /// The fastest, until something is held back.
    fastest: OnceCell<Option<Way>>,
}

/// Where the layers are cut, before recipes are known.
#[derive(Clone, Debug)]
struct Sketch {
    micro_batch: u32,
    /// The first layer of each stage, and the number of all.
    layers: Vec<u64>,
    seconds: f64,
}

/// A way to cut off the first layers.
#[derive(Clone, Debug)]
struct Cut {
    slowest: f64,
    sum: f64,
    layers: Vec<u64>,
}

impl<'t, 'q> Layers<'t, 'q> {
    pub fn new(team: &'t TeamQuestion<'q>, rungs: &'t [Rung]) -> Layers<'t, 'q> {
        Layers {
            team,
            rungs,
            held_back: vec![0; team.devices.len()],
            stages: RefCell::default(),
            fastest: OnceCell::new(),
        }
    }

    /// The layers of the model.
    fn depth(&self) -> u64 {
        self.team.devices[0].config.layers
    }

    /// The device as it is planned with in a team of some.
    fn spec(&self, device: usize, devices: &[usize]) -> DeviceSpec {
        let spec = self.team.devices[device].device;
        let team_link = slowest(devices.iter().map(|&device| self.team.devices[device].device.team_link));
        let budget = spec.budget.saturating_sub(Bytes(self.held_back[device]));
        DeviceSpec { team_link, budget, ..spec.clone() }
    }

    /// Whether the messages of a device stand on the host.
    fn by_mail(&self, device: usize) -> bool {
        Kernels::of(self.team.devices[device].device) == Kernels::Cuda
    }

    /// What one of so many stages may have of the host.
    fn host(&self, device: usize, stages: usize) -> Bytes {
        if self.by_mail(device) { Bytes(self.team.host.0 / stages as u64) } else { Bytes::ZERO }
    }

    /// A question about a device of a team with this link, that has such layers.
    fn question<'s>(&self, spec: &'s DeviceSpec, device: usize, share: &Share, micro_batch: u32) -> Question<'s>
    where
        'q: 's,
    {
        let host = self.host(device, share.ranks as usize);
        let question = under(&self.team.of(device, share, self.team.total(), host), self.rungs);
        let pins = Pins { micro_batch: Some(micro_batch), ..question.pins.clone() };
        Question { device: spec, pins, ..question }
    }

    /// The stages that some devices can be.
    fn all_stages(&self, devices: &[usize], micro_batch: u32) -> Vec<Stages> {
        let count = devices.len();
        let key = |stage: usize| (self.team.first_alike(devices[stage]), stage, count, micro_batch);
        let unknown: Vec<usize> = (0..count).filter(|&stage| !self.stages.borrow().contains_key(&key(stage))).collect();
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec(device, devices)).collect();
        // A stage of so many layers, among others that have what is left.
        let of = |stage: usize, layers: u64| {
            let others = self.depth() - layers;
            let below = others * stage as u64 / (count as u64 - 1);
            let first = |rank: usize| match rank {
                rank if rank <= stage => below * rank as u64 / stage.max(1) as u64,
                rank => {
                    let (after, all) = ((rank - stage - 1) as u64, (count - stage - 1).max(1) as u64);
                    below + layers + (others - below) * after / all
                }
            };
            let layers: Vec<u64> = (0..=count).map(first).collect();
            let share = shares(&layers).swap_remove(stage);
            self.question(&specs[stage], devices[stage], &share, micro_batch)
        };
        let most = (self.depth() + 1 - count as u64).min(2);
        let questions: Vec<[Question; 2]> = unknown.iter().map(|&stage| [of(stage, 1), of(stage, most)]).collect();
        let found = side_by_side(&questions, |[one, two]| Stages { one: Measured::of(one), two: Measured::of(two) });
        let mut known = self.stages.borrow_mut();
        known.extend(unknown.iter().map(|&stage| key(stage)).zip(found));
        (0..count).map(|stage| known[&key(stage)]).collect()
    }

    /// The best cut for some devices in this order; `tight` bytes of each are not used.
    fn sketch(&self, devices: &[usize], micro_batch: u32, tight: &[u64]) -> Option<Sketch> {
        let micro_batches = self.team.total().div_ceil(u64::from(micro_batch)) as u32;
        let stages = self.all_stages(devices, micro_batch);
        let budgets: Vec<u64> = devices
            .iter()
            .zip(tight)
            .map(|(&device, tight)| self.spec(device, devices).arena_budget().0.saturating_sub(*tight))
            .collect();
        let (count, depth) = (devices.len(), self.depth());
        // For each number of layers, the ways to cut them off that no other beats.
        let mut cuts: Vec<Vec<Cut>> = vec![vec![]; depth as usize + 1];
        cuts[0] = vec![Cut { slowest: 0.0, sum: 0.0, layers: vec![0] }];
        for stage in 0..count {
            let mut next: Vec<Vec<Cut>> = vec![vec![]; depth as usize + 1];
            let left = (count - stage - 1) as u64;
            for below in 0..=depth {
                for end in below + 1..=depth - left.min(depth) {
                    if cuts[below as usize].is_empty() || stage + 1 == count && end < depth {
                        continue;
                    }
                    let Some(seconds) = stages[stage].of(end - below, budgets[stage]) else { break };
                    let own = seconds.forward + seconds.backward;
                    next[end as usize].extend(cuts[below as usize].iter().map(|cut| {
                        let layers = cut.layers.iter().copied().chain([end]).collect();
                        Cut { slowest: cut.slowest.max(own), sum: cut.sum + own, layers }
                    }));
                }
            }
            next.iter_mut().for_each(unbeaten);
            cuts = next;
        }
        let sketch = |cut: &Cut| {
            let of = |stage: usize| stages[stage].of(cut.layers[stage + 1] - cut.layers[stage], budgets[stage]);
            let seconds: Option<Vec<StageSeconds>> = (0..count).map(of).collect();
            let seconds = step_seconds(&seconds?, micro_batches);
            Some(Sketch { micro_batch, layers: cut.layers.clone(), seconds })
        };
        cuts[depth as usize].iter().filter_map(sketch).min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// Orders of some devices that are worth trying: as they were named, and by their memory, both ways.
    fn orders(&self, devices: &[usize]) -> Vec<Vec<usize>> {
        let mut by_memory = devices.to_vec();
        by_memory.sort_by_key(|&device| self.team.devices[device].device.arena_budget());
        let both = |order: Vec<usize>| [order.iter().rev().copied().collect(), order];
        let mut orders: Vec<Vec<usize>> = both(devices.to_vec()).into_iter().chain(both(by_memory)).collect();
        orders.sort_by_key(|order| order != devices);
        let kinds = |order: &Vec<usize>| order.iter().map(|&d| self.team.first_alike(d)).collect::<Vec<_>>();
        let mut seen = Vec::new();
        orders.retain(|order| {
            let new = !seen.contains(&kinds(order));
            seen.push(kinds(order));
            new
        });
        orders
    }

    /// The fastest way for some devices, all of which take part.
    fn way(&self, devices: &[usize]) -> Option<Way> {
        let total = self.team.total();
        let sizes: Vec<u32> = match self.team.devices[0].pins.micro_batch {
            Some(pinned) => vec![pinned],
            None => (0..16).map(|power| 1 << power).take_while(|&size| u64::from(size) <= total).collect(),
        };
        let mut found: Vec<(Vec<usize>, Sketch)> = Vec::new();
        for order in self.orders(devices) {
            let (mut best, mut worse) = (f64::INFINITY, 0);
            for &size in &sizes {
                let Some(sketch) = self.sketch(&order, size, &vec![0; order.len()]) else { continue };
                worse = if sketch.seconds < best { 0 } else { worse + 1 };
                best = best.min(sketch.seconds);
                found.push((order.clone(), sketch));
                if worse >= WORSE {
                    break;
                }
            }
        }
        found.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
        found.iter().find_map(|(order, sketch)| self.searched(order, sketch))
    }

    /// A sketch with the recipe of each stage, if all have one.
    fn searched(&self, devices: &[usize], sketch: &Sketch) -> Option<Way> {
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec(device, devices)).collect();
        let mut tight = vec![0; devices.len()];
        let mut sketch = sketch.clone();
        for _ in 0..TRIES {
            let shares = shares(&sketch.layers);
            let of = |stage: usize| self.question(&specs[stage], devices[stage], &shares[stage], sketch.micro_batch);
            let questions: Vec<Question> = (0..devices.len()).map(of).collect();
            let found = side_by_side(&questions, |question| {
                let found = fastest_by_bounds(question)?;
                let seconds = StageSeconds::of(&question.computing(&found.recipe), &question.prices());
                Some((found, seconds))
            });
            let without: Vec<usize> = (0..devices.len()).filter(|&stage| found[stage].is_none()).collect();
            if without.is_empty() {
                let found: Vec<_> = found.into_iter().flatten().collect();
                let seconds: Vec<StageSeconds> = found.iter().map(|(_, seconds)| *seconds).collect();
                let micro_batches = self.team.total().div_ceil(u64::from(sketch.micro_batch)) as u32;
                let given =
                    |((&device, share), (candidate, _)): ((&usize, Share), &(crate::search::Candidate, _))| Given {
                        device,
                        share,
                        sequences: self.team.total(),
                        recipe: candidate.recipe.clone(),
                        host: self.host(device, devices.len()),
                        device_bytes: candidate.device,
                        host_bytes: candidate.host,
                    };
                let ranks = devices.iter().zip(shares).zip(&found).map(given).collect();
                let seconds = step_seconds(&seconds, micro_batches);
                return Some(Way { sharing: Some(Sharing::Layers), ranks, seconds });
            }
            for stage in without {
                tight[stage] += specs[stage].arena_budget().0 / 32;
            }
            sketch = self.sketch(devices, sketch.micro_batch, &tight)?;
        }
        None
    }
}

impl Layers<'_, '_> {
    fn found(&self) -> Option<Way> {
        let pinned = &self.team.devices[0].pins;
        if self.team.devices[0].optimizer.is_none() || pinned.offload.is_some_and(|offload| !offload.is_nothing()) {
            return None;
        }
        let speed = |device: usize| self.team.devices[device].device.rates.f32_flops;
        let mut devices: Vec<usize> = (0..self.team.devices.len()).collect();
        if self.team.host == Bytes::ZERO && devices.iter().any(|&device| self.by_mail(device)) {
            return None;
        }
        let slowest_of = |devices: &[usize]| devices.iter().copied().min_by(|&a, &b| speed(a).total_cmp(&speed(b)));
        while devices.len() as u64 > self.depth() && !self.team.all {
            let out = slowest_of(&devices)?;
            devices.retain(|device| *device != out);
        }
        if devices.len() < 2 || devices.len() as u64 > self.depth() {
            return None;
        }
        let mut best = self.way(&devices);
        while devices.len() > 2 && !self.team.all {
            let out = slowest_of(&devices)?;
            devices.retain(|device| *device != out);
            match self.way(&devices) {
                Some(way) if best.as_ref().is_none_or(|best| way.seconds < best.seconds) => best = Some(way),
                _ => break,
            }
        }
        best
    }
}

impl ShareOut for Layers<'_, '_> {
    fn fastest(&self) -> Option<Way> {
        self.fastest.get_or_init(|| self.found()).clone()
    }

    fn strike(&mut self, way: &Way, rank: usize, over: Bytes) {
        // At least a little, so that this comes to an end.
        let Given { device, .. } = way.ranks[rank];
        self.fastest.take();
        self.held_back[device] += over.0 + self.team.devices[device].device.budget.0 / 256;
    }

    fn left_out(&self, way: &Way) -> Vec<LeftOut> {
        out_of_way(self.team, way, "it has no recipe with a layer of its own", |devices| {
            (devices.len() as u64 <= self.depth()).then(|| self.way(devices)).flatten()
        })
    }

    fn worth(&self, _: &Way) -> Option<Worth> {
        None
    }
}

/// Keeps the cuts that no other beats in both ways.
fn unbeaten(cuts: &mut Vec<Cut>) {
    cuts.sort_by(|a, b| a.slowest.total_cmp(&b.slowest).then(a.sum.total_cmp(&b.sum)));
    let mut least = f64::INFINITY;
    cuts.retain(|cut| {
        let keep = cut.sum < least;
        least = least.min(cut.sum);
        keep
    });
    cuts.truncate(FRONTIER);
}

/// Shares of layers for ranks in order.
pub(super) fn shares(layers: &[u64]) -> Vec<Share> {
    let share = |rank: usize| Share {
        sharing: Some(Sharing::Layers),
        rank: rank as u32,
        ranks: layers.len() as u32 - 1,
        layers: layers.to_vec(),
        ..Share::ALONE
    };
    (0..layers.len() - 1).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(forward: f64, backward: f64, message: f64) -> StageSeconds {
        StageSeconds { forward, backward, message, once: 0.0 }
    }

    #[test]
    fn equal_stages_lose_the_time_in_which_the_pipeline_fills_and_empties() {
        for stages in 1..6usize {
            for micro_batches in 1..9 {
                let found = step_seconds(&vec![stage(1.0, 2.0, 0.0); stages], micro_batches);
                let expected = 3.0 * (f64::from(micro_batches) + stages as f64 - 1.0);
                assert!((found - expected).abs() < 1e-9, "{stages} stages, {micro_batches}: {found}, {expected}");
            }
        }
    }

    #[test]
    fn a_step_is_as_long_as_its_slowest_stage_and_no_longer_than_all_in_turn() {
        for (one, two, three) in [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (1.0, 5.0, 1.0), (2.0, 0.1, 2.0)] {
            for message in [0.0, 0.3] {
                let stages = [one, two, three].map(|forward| stage(forward, 2.0 * forward, message));
                for micro_batches in [1, 2, 3, 10] {
                    let found = step_seconds(&stages, micro_batches);
                    let all: f64 = stages.iter().map(|stage| stage.forward + stage.backward).sum();
                    let slowest = stages.iter().map(|stage| stage.forward + stage.backward).fold(0.0, f64::max);
                    let count = f64::from(micro_batches);
                    assert!(found >= (count * slowest).max(all + 4.0 * message) - 1e-9);
                    assert!(found <= count * (all + 4.0 * message) + 1e-9);
                }
            }
        }
    }
}
