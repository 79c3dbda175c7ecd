//! The search for the fastest recipe under the load line.
//!
//! For each micro-batch a dynamic program over (layer, live bytes) chooses what to recompute: the
//! peak is the largest of *saved by the layers below + work of this layer*. The candidates are
//! ordered by predicted time, and the first whose packed arena fits is the plan.

use crate::layout::{ALIGNMENT, Layout, lay_out, lower_bound};
use crate::lifetimes::{Lifetimes, lifetimes};
use crate::price::{op_seconds, schedule_seconds};
use plimsoll_core::{
    Bytes, Class, DType, DeviceKind, DevicePlan, DeviceSpec, Need, Plan, Predicted, Recipe, RecomputeLevel,
};
use plimsoll_program::models::ModelConfig;
use plimsoll_program::models::decoder::{Build, Generation, Optimizer, Source, Training, build};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{ProgramSet, Schedule};

/// Finalists that are packed before the search gives up on packing luck.
const FINALISTS: usize = 20;
/// States of the dynamic program that are kept for a layer.
const FRONTIER: usize = 512;

/// What is asked of the planner.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// Arithmetic.
    pub precision: DType,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences of an optimizer step (of an evaluation: at most so many at once).
    pub sequences: u64,
    /// Weights.
    pub source: Source,
    /// The rule, where something is trained.
    pub optimizer: Option<Optimizer>,
    /// Whether there are evaluations.
    pub evaluate: bool,
    /// Whether tokens are generated.
    pub generation: Option<Generation>,
    /// The device.
    pub device: &'a DeviceSpec,
    /// What the user has fixed.
    pub pins: Pins,
}

/// Choices that the user has fixed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// Sequences in a micro-batch.
    pub micro_batch: Option<u32>,
    /// What each layer makes again.
    pub recompute: Option<Vec<RecomputeLevel>>,
}

/// A recipe that was looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    /// The choices.
    pub recipe: Recipe,
    /// Predicted bytes on the device, charges included (the bound; packed for finalists).
    pub peak_bytes: Bytes,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    /// Whether it is under the load line.
    pub fits: bool,
}

/// A plan with all that is needed to run it.
#[derive(Clone, Debug)]
pub struct Answer {
    /// As it is written down.
    pub plan: Plan,
    /// The Programs.
    pub set: ProgramSet,
    /// Where everything stands.
    pub layout: Layout,
    /// What else was looked at, fastest first.
    pub tried: Vec<Tried>,
}

impl Question<'_> {
    fn build(&self, config: &ModelConfig, recipe: &Recipe, files: bool) -> ProgramSet {
        build(&Build {
            config,
            precision: self.precision,
            kernels: Kernels::of(self.device),
            sequence: self.sequence,
            micro_batch: u64::from(recipe.micro_batch),
            source: self.source.clone(),
            training: self.optimizer.map(|optimizer| Training { optimizer, recompute: recipe.recompute.clone() }),
            evaluate: self.evaluate,
            generation: self.generation,
            files,
        })
    }

    /// All Programs of a recipe.
    pub fn programs(&self, recipe: &Recipe) -> ProgramSet {
        self.build(self.config, recipe, true)
    }

    fn layers(&self) -> usize {
        self.config.layers as usize
    }

    fn uniform(&self, micro_batch: u32, level: RecomputeLevel) -> Recipe {
        Recipe::on_device(micro_batch, vec![level; self.layers()])
    }

    /// Micro-batches worth trying: those that divide the step, and powers of two.
    fn micro_batches(&self) -> Vec<u32> {
        if let Some(pinned) = self.pins.micro_batch {
            return vec![pinned];
        }
        let most = self.sequences.clamp(1, 1 << 16) as u32;
        (1..=most).filter(|b| most.is_multiple_of(*b) || b.is_power_of_two()).collect()
    }

    fn seconds(&self, set: &ProgramSet, micro_batch: u32) -> f64 {
        let rates = &self.device.rates;
        if self.optimizer.is_some() {
            let count = self.sequences.div_ceil(u64::from(micro_batch)) as u32;
            schedule_seconds(set, &Schedule::accumulate(count).calls, rates, self.precision)
        } else {
            let count = self.sequences.div_ceil(u64::from(micro_batch)) as f64;
            crate::price::program_seconds(set, "evaluate", rates, self.precision) * count
        }
    }
}

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
struct Profile {
    levels: Vec<LevelProfile>,
    /// Live below the first layer.
    base: u64,
    /// Most that is live between the last layer's forward and backward pass, above what is kept.
    top: u64,
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
fn profile(question: &Question, micro_batch: u32) -> Profile {
    let small = ModelConfig { layers: 3, ..question.config.clone() };
    let mut result = Profile { levels: Vec::new(), base: 0, top: 0 };
    for level in RecomputeLevel::ALL {
        let recipe = Recipe::on_device(micro_batch, vec![level; 3]);
        let set = question.build(&small, &recipe, false);
        let phase = set
            .phases
            .iter()
            .find(|p| p.programs.len() == 2 && set.programs[p.programs[0]].name == "forward")
            .expect("a training set has a forward and a backward pass in one phase");
        let lifetimes = lifetimes(&set, phase);
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
                .map(|op| op_seconds(&set, op, &question.device.rates, question.precision))
                .sum(),
        });
        result.base = kept[0] - saved;
        result.top = result.top.max(most(edge(3) + 1, start + before) - kept[2]);
    }
    result
}

/// The fastest levels for all layers under `budget` bytes above the persistent ones, if any.
fn choose(profile: &Profile, layers: usize, budget: u64) -> Option<Vec<RecomputeLevel>> {
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

/// The recipe that needs the least memory at this micro-batch.
fn leanest(question: &Question, profile: &Profile, micro_batch: u32) -> Recipe {
    let layers = question.layers();
    let (mut low, mut high) = (0u64, 1u64 << 50);
    while low < high {
        let middle = low + (high - low) / 2;
        if choose(profile, layers, middle).is_some() { high = middle } else { low = middle + 1 }
    }
    let chosen = choose(profile, layers, high).map(|recompute| Recipe::on_device(micro_batch, recompute));
    RecomputeLevel::ALL
        .iter()
        .map(|&level| question.uniform(micro_batch, level))
        .chain(chosen)
        .min_by_key(|recipe| lower_bound(&question.build(question.config, recipe, false)))
        .expect("there are levels")
}

struct Candidate {
    recipe: Recipe,
    bound: u64,
    seconds: f64,
}

fn candidate(question: &Question, recipe: Recipe) -> Candidate {
    let set = question.build(question.config, &recipe, false);
    Candidate { bound: lower_bound(&set), seconds: question.seconds(&set, recipe.micro_batch), recipe }
}

/// All recipes worth looking at under the load line, and the leanest of all.
fn candidates(question: &Question, arena_budget: u64) -> (Vec<Candidate>, Recipe) {
    let mut list = Vec::new();
    let sizes = question.micro_batches();
    let mut leanest_recipe = None;
    for &micro_batch in &sizes {
        let smallest = micro_batch == sizes[0];
        if question.optimizer.is_none() {
            let recipe = question.uniform(micro_batch, RecomputeLevel::Nothing);
            list.push(candidate(question, recipe.clone()));
            leanest_recipe.get_or_insert(recipe);
            continue;
        }
        if let Some(recompute) = &question.pins.recompute {
            let recipe = Recipe::on_device(micro_batch, recompute.clone());
            list.push(candidate(question, recipe.clone()));
            leanest_recipe.get_or_insert(recipe);
            continue;
        }
        let profile = profile(question, micro_batch);
        let plain = candidate(question, question.uniform(micro_batch, RecomputeLevel::Nothing));
        let persistent = persistent_bytes(question, &plain.recipe);
        let mut budget = arena_budget.saturating_sub(persistent);
        let plain_fits = plain.bound <= arena_budget;
        list.push(plain);
        if !plain_fits {
            // The profile sees three layers; where the whole is a little larger, aim lower.
            for _ in 0..4 {
                let Some(recompute) = choose(&profile, question.layers(), budget) else { break };
                let found = candidate(question, Recipe::on_device(micro_batch, recompute));
                let over = found.bound.saturating_sub(arena_budget);
                list.push(found);
                if over == 0 {
                    break;
                }
                budget = budget.saturating_sub(over);
            }
        }
        if smallest {
            let recipe = leanest(question, &profile, micro_batch);
            if list.iter().all(|c| c.recipe != recipe) {
                list.push(candidate(question, recipe.clone()));
            }
            leanest_recipe = Some(recipe);
        }
    }
    (list, leanest_recipe.expect("at least one micro-batch"))
}

fn persistent_bytes(question: &Question, recipe: &Recipe) -> u64 {
    let set = question.build(question.config, recipe, false);
    let bare = ProgramSet { programs: vec![], phases: vec![], ..set };
    lower_bound(&bare).next_multiple_of(ALIGNMENT)
}

/// Finds the fastest plan that fits; where nothing fits, the leanest, with the budget it needs.
pub fn search(question: &Question) -> Answer {
    let device = question.device;
    let arena_budget = device.arena_budget().0;
    let (mut list, leanest) = candidates(question, arena_budget);
    list.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.bound.cmp(&b.bound)));
    let mut tried: Vec<Tried> = list
        .iter()
        .map(|c| Tried {
            recipe: c.recipe.clone(),
            peak_bytes: Bytes(c.bound) + device.charges,
            step_seconds: c.seconds,
            fits: c.bound <= arena_budget,
        })
        .collect();
    let mut packed = 0;
    let mut found = None;
    for (candidate, tried) in list.iter().zip(&mut tried).filter(|(c, _)| c.bound <= arena_budget) {
        // The leanest is always given its chance: what is refused must not fit.
        if packed == FINALISTS && candidate.recipe != leanest {
            continue;
        }
        packed += 1;
        let set = question.programs(&candidate.recipe);
        let layout = lay_out(&set);
        tried.peak_bytes = Bytes(layout.placement.arena_bytes) + device.charges;
        tried.fits = layout.placement.arena_bytes <= arena_budget;
        if tried.fits {
            found = Some((candidate.recipe.clone(), set, layout));
            break;
        }
    }
    let fits = found.is_some();
    let (recipe, set, layout) = found.unwrap_or_else(|| {
        let set = question.programs(&leanest);
        let layout = lay_out(&set);
        (leanest, set, layout)
    });
    let plan = write_down(question, fits, recipe, &set, &layout);
    Answer { plan, set, layout, tried }
}

/// The plan of one recipe, whatever the load line says: for a resumed run, and for pins.
pub fn plan_of(question: &Question, recipe: &Recipe) -> Answer {
    let set = question.programs(recipe);
    let layout = lay_out(&set);
    let fits = layout.placement.arena_bytes <= question.device.arena_budget().0;
    let plan = write_down(question, fits, recipe.clone(), &set, &layout);
    Answer { plan, set, layout, tried: Vec::new() }
}

fn write_down(question: &Question, fits: bool, recipe: Recipe, set: &ProgramSet, layout: &Layout) -> Plan {
    let device = question.device;
    let peak = Bytes(layout.placement.arena_bytes) + device.charges;
    let step_seconds = question.seconds(set, recipe.micro_batch);
    let needs = if fits { vec![] } else { vec![Need { allow: vec![], budget_bytes: peak }] };
    let whole = u64::from(recipe.micro_batch) >= question.sequences;
    Plan {
        fits,
        class: if whole { Class::Identical } else { Class::Reordered },
        devices: vec![DevicePlan {
            name: device.name.clone(),
            simulated: device.simulated(),
            budget_bytes: device.budget,
            arena_bytes: Bytes(layout.placement.arena_bytes),
            charges_bytes: device.charges,
            peak_bytes: peak,
            by_category: layout.by_category.clone(),
            by_program: layout.by_program.clone(),
            lower_bound_bytes: Bytes(layout.lower_bound_bytes),
        }],
        host: DevicePlan {
            name: "host".into(),
            simulated: device.kind == DeviceKind::Virtual,
            ..DevicePlan::default()
        },
        predicted: Predicted {
            step_seconds,
            tokens_per_second: (question.sequences * question.sequence) as f64 / step_seconds,
        },
        recipe,
        needs,
    }
}
