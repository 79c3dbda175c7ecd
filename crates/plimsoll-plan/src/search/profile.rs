//! What recompute frees and costs in one layer, measured on a model of three, and the dynamic program over
//! (layer, live bytes) that chooses a level for each layer.

use super::Question;
use crate::layout::ALIGNMENT;
use crate::lifetimes::{Lifetimes, lifetimes};
use plimsoll_core::{Recipe, RecomputeLevel, Space};
use plimsoll_program::Share;
use plimsoll_program::models::ModelConfig;

/// States of the dynamic program that are kept for a layer.
const FRONTIER: usize = 512;

/// What a level means for one layer, in bytes and seconds.
#[derive(Clone, Copy, Debug)]
struct LevelProfile {
    level: RecomputeLevel,
    /// Kept for the backward pass.
    saved: u64,
    /// Most that is live in the layer's forward pass above what lower layers keep.
    forward: u64,
    /// The same in its backward pass.
    backward: u64,
    /// Predicted seconds of its backward pass.
    seconds: f64,
}

/// All levels at one micro-batch.
#[derive(Debug)]
pub(super) struct Profile {
    levels: Vec<LevelProfile>,
    /// Live below the first layer.
    base: u64,
    /// Most that is live between the last layer's forward and backward pass, above what is kept.
    top: u64,
}

impl Profile {
    /// About how many seconds the layers take beyond computing nothing again, with as many of a light level, and the rest of
    /// a tighter one, as fit: whatever part of a layer that comes to.
    pub(super) fn lightest(&self, layers: usize, budget: u64) -> Option<f64> {
        let plain = self.levels.first()?.seconds;
        let need = |p: &LevelProfile| {
            let saved = self.base + layers as u64 * p.saved;
            (saved - p.saved + p.forward.max(p.backward)).max(saved + self.top)
        };
        let fits = |p: &&LevelProfile| need(p) <= budget;
        let beside = |tight: &LevelProfile, light: &LevelProfile| {
            let more = need(light).saturating_sub(need(tight)).max(1);
            let part = ((budget - need(tight)) as f64 / more as f64).min(1.0);
            tight.seconds + part * (light.seconds - tight.seconds).min(0.0)
        };
        let pairs =
            self.levels.iter().filter(fits).flat_map(|tight| self.levels.iter().map(move |light| (tight, light)));
        let seconds = pairs.map(|(tight, light)| layers as f64 * (beside(tight, light) - plain));
        seconds.min_by(f64::total_cmp)
    }

    /// Most that is live above the persistent bytes with these levels.
    pub(super) fn need(&self, levels: &[RecomputeLevel]) -> u64 {
        let (mut live, mut most) = (self.base, 0);
        for level in levels {
            let profile = self.levels.iter().find(|p| p.level == *level).expect("a level has a profile");
            most = most.max(live + profile.forward.max(profile.backward));
            live += profile.saved;
        }
        most.max(live + self.top)
    }

    /// The levels that need the least, found by halving.
    pub(super) fn tightest(&self, layers: usize) -> Option<Vec<RecomputeLevel>> {
        let below = |p: &LevelProfile| self.base + layers as u64 * p.saved + p.forward.max(p.backward).max(self.top);
        // Enough for every level by itself.
        let (mut low, mut high) = (0, self.levels.iter().map(below).min()?);
        let mut found = choose(self, layers, high)?;
        while low < high {
            let middle = low + (high - low) / 2;
            match choose(self, layers, middle) {
                Some(tighter) => (found, high) = (tighter, middle),
                None => low = middle + 1,
            }
        }
        Some(found)
    }
}

fn live(lifetimes: &Lifetimes) -> Vec<u64> {
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

/// Live bytes between two ticks: buffers that are there on both sides.
fn across(lifetimes: &Lifetimes, tick: u32) -> u64 {
    lifetimes
        .buffers
        .iter()
        .filter(|b| b.first <= tick && b.last > tick)
        .map(|b| b.bytes.next_multiple_of(ALIGNMENT))
        .sum()
}

/// Measures the levels on a model of three equal layers.
pub(super) fn profile(question: &Question, micro_batch: u32) -> Profile {
    // What layers keep and compute again is the same in a team; what goes between its devices is measured whole. A stage of
    // a pipeline keeps it for each micro-batch in flight; here there is one.
    let (number, stages) = question.share.stage();
    let [below, above] = [number > 0, number + 1 < stages].map(u64::from);
    let small = ModelConfig { layers: 3 + below + above, ..question.config.clone() };
    let in_flight = u64::from(
        question.share.in_flight(question.micro_batches_of(&question.uniform(micro_batch, RecomputeLevel::Nothing))),
    );
    let share = if stages > 1 { stage_of_three(&question.share, below, small.layers) } else { Share::ALONE };
    let sequences = if stages > 1 { u64::from(micro_batch) } else { question.sequences };
    let question = &Question { share, sequences, ..question.clone() };
    let prices = question.prices();
    let mut result = Profile { levels: Vec::new(), base: 0, top: 0 };
    for level in RecomputeLevel::ALL {
        let recipe = Recipe::on_device(micro_batch, vec![level; 3]);
        let set = question.build(&small, &recipe, false);
        let phase = set
            .phases
            .iter()
            .find(|p| p.programs.len() == 2 && set.programs[p.programs[0]].name == "forward")
            .expect("a training set has a forward and a backward pass in one phase");
        let lifetimes = lifetimes(&set, phase, Space::Device);
        let live = live(&lifetimes);
        let (forward, backward) = (&set.programs[phase.programs[0]], &set.programs[phase.programs[1]]);
        let layer = forward.blocks[1].ops.len() as u32;
        let embedding = forward.blocks[0].ops.len() as u32;
        let position = backward.blocks.iter().position(|b| b.name == "layer").expect("layers have a backward pass");
        let before: u32 = backward.blocks[..position].iter().map(|b| b.repeat * b.ops.len() as u32).sum();
        let again = backward.blocks[position].ops.len() as u32;
        let start = forward.length() as u32;
        let most = |from: u32, to: u32| live[from as usize..=to as usize].iter().copied().max().unwrap_or(0);
        // Ticks count from 1: layer n of the forward pass covers (edge(n), edge(n + 1)].
        let edge = |n: u32| embedding + n * layer;
        let kept = [across(&lifetimes, edge(1)), across(&lifetimes, edge(2)), across(&lifetimes, edge(3))];
        let saved = kept[1] - kept[0];
        let second_last = start + before + again;
        result.levels.push(LevelProfile {
            level,
            saved,
            forward: most(edge(1) + 1, edge(2)) - kept[0],
            backward: most(second_last + 1, second_last + again) - kept[0],
            seconds: backward.blocks[position]
                .ops
                .iter()
                .filter(|op| op.runs(false))
                .map(|op| prices.op_seconds(&set, op))
                .sum(),
        });
        result.base = kept[0] - saved;
        result.top = result.top.max(most(edge(3) + 1, start + before) - kept[2]);
    }
    if in_flight > 1 {
        // What is kept stands in a ring, all of it all the time: what a pass needs beside it comes on top.
        let beside = |p: &LevelProfile| p.forward.max(p.backward).saturating_sub(p.saved);
        result.top = result.levels.iter().map(beside).fold(result.top, u64::max);
        result.base *= in_flight;
        result.levels.iter_mut().for_each(|level| level.saved *= in_flight);
    }
    result
}

/// The share of a stage like this one that has the three layers after so many.
fn stage_of_three(like: &Share, below: u64, all: u64) -> Share {
    let first = |rank: u32| match rank {
        0 => 0,
        rank if rank <= like.rank => below,
        rank if rank < like.ranks => below + 3,
        _ => all,
    };
    Share { layers: (0..=like.ranks).map(first).collect(), ..like.clone() }
}

/// The fastest levels for all layers under `budget` bytes above the persistent ones, if any.
pub(super) fn choose(profile: &Profile, layers: usize, budget: u64) -> Option<Vec<RecomputeLevel>> {
    #[derive(Clone, Copy)]
    struct State {
        live: u64,
        seconds: f64,
        level: usize,
        from: usize,
    }
    let mut frontiers = vec![vec![State { live: profile.base, seconds: 0.0, level: 0, from: 0 }]];
    for _ in 0..layers {
        let below = frontiers.last().expect("starts with one");
        let mut next: Vec<State> = Vec::new();
        for (from, state) in below.iter().enumerate() {
            for (level, p) in profile.levels.iter().enumerate() {
                if state.live + p.forward.max(p.backward) <= budget {
                    next.push(State { live: state.live + p.saved, seconds: state.seconds + p.seconds, level, from });
                }
            }
        }
        // Keep what no other state beats in both bytes and time.
        next.sort_by(|a, b| a.live.cmp(&b.live).then(a.seconds.total_cmp(&b.seconds)));
        let mut best = f64::INFINITY;
        next.retain(|s| {
            let keep = s.seconds < best;
            best = best.min(s.seconds);
            keep
        });
        if next.len() > FRONTIER {
            let step = next.len() as f64 / FRONTIER as f64;
            next = (0..FRONTIER).map(|i| next[(i as f64 * step) as usize]).collect();
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
