//! The choice of a recompute level for each layer.
//!
//! 1. [`measure_profile`] measures bytes and seconds of each level in one layer, on a model of three layers.
//! 2. [`choose_levels`] is a dynamic program over (layer, live bytes): the fastest levels under a byte budget.

use super::PlanRequest;
use super::plan_request::FilePrograms;
use crate::bisection;
use crate::layout::ALIGNMENT;
use crate::lifetimes::{Lifetimes, lifetimes};
use plimsoll_core::{Recipe, RecomputeLevel, Space};
use plimsoll_program::models::ModelConfig;
use plimsoll_program::{Block, Program, ProgramKind, Share};

/// Most states per layer that [`choose_levels`] keeps. A state is a choice of levels for the layers so far.
const MAX_FRONTIER: usize = 512;

/// Number of steps between the fewest and the most bytes of the levels that a search considers. The steps do not depend
/// on load lines, so more memory only adds levels.
pub(super) const LEVEL_STEPS: u32 = 128;

/// Bytes and seconds of one layer under a recompute level.
#[derive(Clone, Copy, Debug)]
struct LevelProfile {
    level: RecomputeLevel,
    /// Bytes kept for the backward pass.
    saved: u64,
    /// Peak of the layer's forward pass above the bytes kept by lower layers.
    forward: u64,
    /// Peak of the layer's backward pass above the bytes kept by lower layers.
    backward: u64,
    /// Predicted seconds of the layer's backward pass.
    seconds: f64,
}

/// Bytes and predicted seconds of one layer under each recompute level, at one micro-batch size.
#[derive(Debug)]
pub(super) struct Profile {
    levels: Vec<LevelProfile>,
    /// Bytes that are live, above the resident bytes, when the first layer begins.
    base: u64,
    /// Peak between the last layer's forward and backward pass, above the bytes kept by all layers.
    top: u64,
}

impl Profile {
    /// Estimates the seconds that recompute adds to a backward pass if the peak is at most `budget` bytes above the
    /// resident bytes. `rings` are the bytes of staging rings, which exist while layers run, but not between the last
    /// layer's forward and backward pass. The estimate gives the layers two levels, in any proportion. `None` if no level
    /// fits.
    pub(super) fn min_recompute_seconds(&self, layers: usize, budget: u64, rings: u64) -> Option<f64> {
        let plain = self.levels.first()?.seconds;
        let need = |p: &LevelProfile| {
            let saved = self.base + layers as u64 * p.saved;
            (saved - p.saved + p.forward.max(p.backward) + rings).max(saved + self.top)
        };
        let fits = |p: &&LevelProfile| need(p) <= budget;
        let mixed_seconds = |small: &LevelProfile, light: &LevelProfile| {
            let difference = need(light).saturating_sub(need(small)).max(1);
            let fraction = ((budget - need(small)) as f64 / difference as f64).min(1.0);
            small.seconds + fraction * (light.seconds - small.seconds).min(0.0)
        };
        let pairs =
            self.levels.iter().filter(fits).flat_map(|small| self.levels.iter().map(move |light| (small, light)));
        let seconds = pairs.map(|(small, light)| layers as f64 * (mixed_seconds(small, light) - plain));
        seconds.min_by(f64::total_cmp)
    }

    /// Returns the seconds of the backward passes of layers with the given levels.
    pub(super) fn seconds(&self, levels: &[RecomputeLevel]) -> f64 {
        let seconds = |level| self.levels.iter().find(|p| p.level == level).map_or(0.0, |p| p.seconds);
        levels.iter().map(|&level| seconds(level)).sum()
    }

    /// Computes the peak above the resident bytes with the given levels.
    pub(super) fn required_bytes(&self, levels: &[RecomputeLevel]) -> u64 {
        let (mut live, mut most) = (self.base, 0);
        for level in levels {
            let profile = self.levels.iter().find(|p| p.level == *level).expect("a level has a profile");
            most = most.max(live + profile.forward.max(profile.backward));
            live += profile.saved;
        }
        most.max(live + self.top)
    }

    /// Returns the byte budget at a step between the peak of `smallest` levels (0) and that without recompute
    /// ([`LEVEL_STEPS`]).
    pub(super) fn budget_at(&self, smallest: &[RecomputeLevel], step: u32) -> u64 {
        let least = self.required_bytes(smallest);
        least + self.bytes_above(smallest) * u64::from(step) / u64::from(LEVEL_STEPS)
    }

    /// Returns the bytes by which the peak without recompute exceeds that of `smallest` levels.
    fn bytes_above(&self, smallest: &[RecomputeLevel]) -> u64 {
        let plain = vec![RecomputeLevel::Nothing; smallest.len()];
        self.required_bytes(&plain).saturating_sub(self.required_bytes(smallest))
    }

    /// Finds the levels of the layers with which the peak is smallest, by bisection of the byte budget. Returns `None`
    /// if the profile has no levels.
    pub(super) fn smallest_levels(&self, layers: usize) -> Option<Vec<RecomputeLevel>> {
        let uniform_peak =
            |p: &LevelProfile| self.base + layers as u64 * p.saved + p.forward.max(p.backward).max(self.top);
        // Enough for the smallest uniform level.
        let enough = self.levels.iter().map(uniform_peak).min()?;
        let least = bisection::smallest(0..enough, 0, |budget| self.has_levels(layers, budget));
        choose_levels(self, layers, least)
    }

    /// Returns whether some levels of the layers have a peak of at most `budget` bytes above the resident bytes. Each
    /// layer takes the level that keeps least of those that fit: keeping more in one layer helps no other.
    fn has_levels(&self, layers: usize, budget: u64) -> bool {
        let keep_least = |live: u64| {
            let fitting = self.levels.iter().filter(|p| live + p.forward.max(p.backward) <= budget);
            fitting.map(|p| live + p.saved).min()
        };
        let live = (0..layers).try_fold(self.base, |live, _| keep_least(live));
        live.is_some_and(|live| live + self.top <= budget)
    }
}

/// Computes the bytes of all live buffers at each tick, the unit of time of `lifetimes`.
fn live_bytes(lifetimes: &Lifetimes) -> Vec<u64> {
    let end = lifetimes.buffers.iter().map(|b| b.last).max().unwrap_or(0) as usize;
    let mut change = vec![0i64; end + 2];
    for b in &lifetimes.buffers {
        let bytes = b.bytes.next_multiple_of(ALIGNMENT) as i64;
        change[b.first as usize] += bytes;
        change[b.last as usize + 1] -= bytes;
    }
    let mut now = 0;
    change[..=end]
        .iter()
        .map(|delta| {
            now += delta;
            now as u64
        })
        .collect()
}

/// Computes the bytes of the buffers that are live at tick `tick` and at the next one.
fn bytes_across(lifetimes: &Lifetimes, tick: u32) -> u64 {
    lifetimes
        .buffers
        .iter()
        .filter(|b| b.first <= tick && b.last > tick)
        .map(|b| b.bytes.next_multiple_of(ALIGNMENT))
        .sum()
}

/// Predicts bytes and seconds of a layer under each recompute level, from the Programs of a model of three equal
/// layers.
///
/// Bytes kept and recomputed by a layer do not depend on a team, except in a pipeline: a stage keeps them for each
/// micro-batch in flight. The communication buffers of a team are not part of the profile.
pub(super) fn measure_profile(request: &PlanRequest, micro_batch: u32) -> Profile {
    let (stage, stages) = request.share.stage();
    let [layers_before, layers_after] = [stage > 0, stage + 1 < stages].map(u64::from);
    let small = ModelConfig { layers: 3 + layers_before + layers_after, ..request.config.clone() };
    let uniform = request.uniform(micro_batch, RecomputeLevel::Nothing);
    let in_flight = u64::from(request.share.in_flight(request.micro_batch_count(&uniform)));
    let is_stage = stages > 1;
    let share =
        if is_stage { three_layer_stage(&request.share, layers_before, small.layers) } else { Share::SINGLE_DEVICE };
    let sequences = if is_stage { u64::from(micro_batch) } else { request.sequences };
    let request = &PlanRequest { share, sequences, ..request.clone().with_uniform_adapters() };
    let mut profile = Profile { levels: Vec::new(), base: 0, top: 0 };
    for level in RecomputeLevel::ALL {
        profile.add_level(request, &small, micro_batch, level);
    }
    if in_flight > 1 {
        // The kept bytes are a ring of `in_flight` slots, all resident. The peak of a pass comes on top.
        let above_ring = |p: &LevelProfile| p.forward.max(p.backward).saturating_sub(p.saved);
        profile.top = profile.levels.iter().map(above_ring).fold(profile.top, u64::max);
        profile.base *= in_flight;
        profile.levels.iter_mut().for_each(|level| level.saved *= in_flight);
    }
    profile
}

impl Profile {
    /// Adds the profile of a recompute level. Builds the Programs of the three-layer model `small` at this level, and
    /// reads bytes and predicted seconds of its middle layer from them.
    fn add_level(&mut self, request: &PlanRequest, small: &ModelConfig, micro_batch: u32, level: RecomputeLevel) {
        let prices = request.prices();
        let recipe = Recipe::on_device(micro_batch, vec![level; 3]);
        let set = request.build(small, &recipe, FilePrograms::Without);
        let phase = set
            .phases
            .iter()
            .find(|p| p.programs.len() == 2 && set.programs[p.programs[0]].kind == ProgramKind::Forward)
            .expect("a training set has a forward and a backward pass in one phase");
        let lifetimes = lifetimes(&set, phase, Space::Device);
        let live = live_bytes(&lifetimes);
        let (forward, backward) = (&set.programs[phase.programs[0]], &set.programs[phase.programs[1]]);
        let (ops_before_forward, forward_layer) = find_layers(forward);
        let (ops_before_layers, backward_layer) = find_layers(backward);
        let layer_ops = forward_layer.ops.len() as u32;
        let backward_ops = backward_layer.ops.len() as u32;
        let start = forward.op_count() as u32;
        let peak = |from: u32, to: u32| live[from as usize..=to as usize].iter().copied().max().unwrap_or(0);
        // Ticks count from 1: layer n of the forward pass covers (edge(n), edge(n + 1)].
        let edge = |n: u32| ops_before_forward + n * layer_ops;
        let kept =
            [bytes_across(&lifetimes, edge(1)), bytes_across(&lifetimes, edge(2)), bytes_across(&lifetimes, edge(3))];
        let saved = kept[1] - kept[0];
        let middle_layer = start + ops_before_layers + backward_ops;
        self.levels.push(LevelProfile {
            level,
            saved,
            forward: peak(edge(1) + 1, edge(2)) - kept[0],
            backward: peak(middle_layer + 1, middle_layer + backward_ops) - kept[0],
            seconds: backward_layer.ops.iter().filter(|op| op.runs(false)).map(|op| prices.op_seconds(&set, op)).sum(),
        });
        self.base = kept[0] - saved;
        self.top = self.top.max(peak(edge(3) + 1, start + ops_before_layers) - kept[2]);
    }
}

/// Returns the block of the layers of a pass, and the number of ops before it.
fn find_layers(pass: &Program) -> (u32, &Block) {
    let position = pass.blocks.iter().position(|block| block.name == "layer").expect("a pass has layers");
    let ops_before = pass.blocks[..position].iter().map(|block| block.repeat * block.ops.len() as u32).sum();
    (ops_before, &pass.blocks[position])
}

/// Returns the share `like` of a pipeline stage, changed so that the stage has three layers. The earlier stages then
/// have `layers_before` layers together, and the model has `all_layers`.
fn three_layer_stage(like: &Share, layers_before: u64, all_layers: u64) -> Share {
    let stage = like.rank as usize;
    let mut layers = vec![layers_before + 3; like.ranks as usize + 1];
    layers[..=stage].fill(layers_before);
    (layers[0], layers[like.ranks as usize]) = (0, all_layers);
    Share { layers, ..like.clone() }
}

/// Returns the fastest levels of all layers with a peak of at most `budget` bytes above the resident bytes, or `None`
/// if none fit.
pub(super) fn choose_levels(profile: &Profile, layers: usize, budget: u64) -> Option<Vec<RecomputeLevel>> {
    #[derive(Clone, Copy)]
    struct State {
        live: u64,
        seconds: f64,
        level: usize,
        /// Index of the state of the layer below from which this state was reached.
        from: usize,
    }
    let mut frontiers = vec![vec![State { live: profile.base, seconds: 0.0, level: 0, from: 0 }]];
    for _ in 0..layers {
        let below = frontiers.last().expect("starts with one");
        let mut next: Vec<State> = Vec::new();
        // The states below ascend by live bytes, so those of one level do, too: the sort merges a few sorted runs.
        for (level, p) in profile.levels.iter().enumerate() {
            let fitting = below.iter().enumerate().filter(|(_, s)| s.live + p.forward.max(p.backward) <= budget);
            next.extend(fitting.map(|(from, s)| State {
                live: s.live + p.saved,
                seconds: s.seconds + p.seconds,
                level,
                from,
            }));
        }
        // Keep the Pareto front of bytes and seconds.
        next.sort_by(|a, b| {
            let order = a.live.cmp(&b.live).then(a.seconds.total_cmp(&b.seconds));
            order.then((a.from, a.level).cmp(&(b.from, b.level)))
        });
        let mut best = f64::INFINITY;
        next.retain(|s| {
            let keep = s.seconds < best;
            best = best.min(s.seconds);
            keep
        });
        if next.len() > MAX_FRONTIER {
            let step = next.len() as f64 / MAX_FRONTIER as f64;
            next = (0..MAX_FRONTIER).map(|i| next[(i as f64 * step) as usize]).collect();
        }
        frontiers.push(next);
    }
    let last = frontiers.last().expect("not empty");
    let (mut at, _) = last
        .iter()
        .enumerate()
        .filter(|(_, s)| s.live + profile.top <= budget)
        .min_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds))?;
    let mut levels = Vec::with_capacity(layers);
    for frontier in frontiers[1..].iter().rev() {
        levels.push(profile.levels[frontier[at].level].level);
        at = frontier[at].from;
    }
    levels.reverse();
    Some(levels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::paper;
    use crate::testing;
    use plimsoll_core::Budget;
    use plimsoll_program::models::{Extras, preset};

    #[test]
    fn windows_hardly_change_profile() {
        let plain = preset("smollm2-135m").expect("listed");
        // The first layer sees all keys, others a window: first keys are computed before the layers.
        let extras = Extras { window: Some(256), full_layers: vec![0], ..Extras::default() };
        let windowed = ModelConfig { extras, ..plain.clone() };
        let device = paper("rtx3090", Budget::Share(0.9)).expect("listed");
        let [plain, windowed] =
            [&plain, &windowed].map(|config| measure_profile(&testing::request(config, &device, 1024, 8), 8));
        assert_eq!(plain.levels.len(), RecomputeLevel::ALL.len());
        let first_keys = 3 * 8 * 1024 * 4;
        for (plain, windowed) in plain.levels.iter().zip(&windowed.levels) {
            assert_eq!((plain.saved, plain.seconds), (windowed.saved, windowed.seconds), "{plain:?} {windowed:?}");
            for (without, with) in [(plain.forward, windowed.forward), (plain.backward, windowed.backward)] {
                assert!(with.abs_diff(without) <= first_keys, "{plain:?} {windowed:?}");
            }
        }
        assert!(windowed.base.abs_diff(plain.base) <= first_keys && windowed.top.abs_diff(plain.top) <= first_keys);
    }
}
