//! What a recipe holds and costs, before it is packed: measured on its Programs, each thing once. What stays is in `stays`,
//! and what is only estimated in `estimate`.

use super::stays::{Stays, StaysOfAll};
use super::{Laid, Profile, Question, Tried, choose, profile};
use crate::layout::{ALIGNMENT, lower_bounds};
use plimsoll_core::{Bytes, InFile, Offload, Recipe, RecomputeLevel, Sharing, WorkName};
use plimsoll_program::models::decoder::{STAGING_BYTES, head_blocks, streams_head};
use plimsoll_program::passes::offload::offload_only;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Block, Op, OpKind, Program, ProgramSet};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, OnceLock};

/// What files pass through, at most: a few buffers of the device and of the host at once.
const ALL_STAGING_BYTES: u64 = 8 * STAGING_BYTES;

/// A recipe with its bounds and its time.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub recipe: Recipe,
    /// No packing of the device's arena is smaller.
    pub device: u64,
    /// The same of the host's.
    pub host: u64,
    /// The same of the scratch file.
    pub file: u64,
    /// Of a step.
    pub seconds: f64,
    /// Of what happens once a step.
    pub once: f64,
    /// Of the passes of one micro-batch.
    pub passes: f64,
    /// Of these, those in which gradients of layers that are whole can already be exchanged.
    pub hides: f64,
    /// The whole of it, where it has been packed.
    laid: Arc<OnceLock<Arc<Laid>>>,
}

impl Candidate {
    /// As a recipe that was looked at, on a device with these charges.
    pub fn tried(&self, charges: Bytes, fits: bool) -> Tried {
        Tried {
            recipe: self.recipe.clone(),
            peak_bytes: Bytes(self.device) + charges,
            host_bytes: Bytes(self.host),
            file_bytes: Bytes(self.file),
            step_seconds: self.seconds,
            fits,
        }
    }

    /// The recipe with its Programs, packed. That takes long where much waits, so it is done once.
    pub fn laid(&self, question: &Question) -> Arc<Laid> {
        Arc::clone(self.laid.get_or_init(|| Arc::new(Laid::new(question, self.recipe.clone()))))
    }
}

/// Bounds of all spaces, and seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    device: u64,
    host: u64,
    file: u64,
    pub(super) seconds: f64,
    /// The same for a step's last micro-batch.
    last_seconds: f64,
    /// Of the seconds, those after the first layer's gradients are whole.
    hides: f64,
}

/// Measures recipes. What happens once a step depends on what waits and on nothing else of a recipe: it is measured once.
pub(super) struct Measurer<'q> {
    pub question: &'q Question<'q>,
    pub(super) known: Arc<Known>,
}

/// What has been measured. It does not depend on load lines, so questions that differ in nothing else share it.
#[derive(Debug, Default)]
pub(crate) struct Known {
    candidates: Mutex<HashMap<Recipe, Candidate>>,
    once_a_step: Mutex<HashMap<(Offload, bool), Measured>>,
    /// Bytes of all spaces above what stays while files are read and written, by kind of choice.
    files: Mutex<HashMap<Offload, [u64; 3]>>,
    plain: Mutex<HashMap<u32, Plain>>,
    profiles: Mutex<HashMap<u32, Arc<Profile>>>,
    pub(super) stays: OnceLock<StaysOfAll>,
    /// Bytes of all spaces above what stays, by recipes whose choice stands for its kind.
    above: Mutex<HashMap<Recipe, [u64; 3]>>,
    tightest: Mutex<HashMap<u32, Option<Vec<RecomputeLevel>>>>,
    /// Tensors without Programs.
    pub(super) bare: OnceLock<ProgramSet>,
}

/// What choices have in common that need the same above what stays: rings have room for two layers, however many wait.
fn kind(offload: Offload, layers: u32) -> Offload {
    let few = |count: u32| count.min(2);
    let state = |count: u32| if count >= layers { 3 } else { few(count) };
    let InFile { optimizer, gradients, weights } = offload.file;
    let file = InFile { optimizer: state(optimizer), gradients: few(gradients), weights: few(weights) };
    let Offload { optimizer, gradients, weights, .. } = offload;
    Offload { optimizer: state(optimizer), gradients: few(gradients), weights: few(weights), file, ..offload }
}

/// What is known of a key, or found out now.
fn known<K: Eq + Hash, V: Clone>(map: &Mutex<HashMap<K, V>>, key: K, find: impl FnOnce() -> V) -> V {
    let lock = || map.lock().expect("nobody panics while holding it");
    if let Some(value) = lock().get(&key) {
        return value.clone();
    }
    let value = find();
    lock().insert(key, value.clone());
    value
}

/// A micro-batch while everything stays on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain {
    /// Seconds of its passes where nothing is recomputed.
    pub(super) pass_seconds: f64,
    /// Bytes above what stays where everything is recomputed.
    pub(super) least_above: u64,
    /// Bytes of a layer's input.
    pub(super) input_bytes: u64,
    /// Bytes of the logits that stand at once.
    pub(super) logits_bytes: u64,
    /// Seconds of the product that makes all logits once.
    pub(super) logits_seconds: f64,
    /// The part of the head that is one block.
    pub(super) head_block: f64,
}

/// The recipe with another choice of what waits.
fn recipe_of(recipe: &Recipe, offload: Offload) -> Recipe {
    Recipe { offload, ..recipe.clone() }
}

/// Programs that run for every micro-batch, or beside the steps: recipes differ in them.
fn depends_on_all(program: &Program) -> bool {
    matches!(program.name.as_str(), "forward" | "backward" | "evaluate" | "prefill" | "decode")
}

/// Tensors that stay, without Programs.
pub(crate) fn bare(question: &Question) -> ProgramSet {
    let recipe = question.uniform(1, RecomputeLevel::Nothing);
    let set = question.build(question.config, &recipe, false);
    ProgramSet { programs: vec![], phases: vec![], ..set }
}

impl<'q> Measurer<'q> {
    pub fn new(question: &'q Question<'q>) -> Measurer<'q> {
        Measurer::knowing(question, Arc::default())
    }

    /// One that shares what is known with others, whose questions differ in load lines alone.
    pub fn knowing(question: &'q Question<'q>, known: Arc<Known>) -> Measurer<'q> {
        Measurer { question, known }
    }

    /// Whether a candidate is under both load lines, as far as its bounds say.
    pub fn fits(&self, candidate: &Candidate) -> bool {
        let Candidate { device, host, file, .. } = *candidate;
        self.holds([device, host, file]) && self.moves_files(&candidate.recipe, &|bytes| self.holds(bytes))
    }

    /// Whether a candidate is under the load lines of host and file once it is packed.
    pub fn packs_on_host(&self, candidate: &Candidate) -> bool {
        let host = &self.question.host;
        let fits = |on_host: u64, in_file: u64| on_host <= host.budget.0 && in_file <= host.file.budget.0;
        let within = || {
            let laid = candidate.laid(self.question);
            fits(laid.layout.host.bytes, laid.layout.file.bytes)
        };
        fits(candidate.host, candidate.file) && (candidate.recipe.offload.is_nothing() || within())
    }

    /// Measures a recipe.
    pub fn candidate(&self, recipe: Recipe) -> Candidate {
        known(&self.known.candidates, recipe.clone(), || {
            let Stays { device, host, file, .. } = self.persistent(recipe.offload);
            let found = self.measure(recipe);
            let above = [(found.device, device), (found.host, host), (found.file, file)];
            let above = above.map(|(all, stays)| all.saturating_sub(stays));
            let mut known = self.known.above.lock().expect("nobody panics while holding it");
            known.insert(self.of_kind(&found.recipe), above);
            found
        })
    }

    /// The recipe whose choice stands for all of its kind.
    fn of_kind(&self, recipe: &Recipe) -> Recipe {
        recipe_of(recipe, self.kind(recipe.offload))
    }

    /// Bytes of all spaces that a recipe takes, if it or one of its kind has been measured: of others of its kind at least
    /// so many, and more by what rounding up to [`ALIGNMENT`] comes to.
    pub fn known_bytes(&self, recipe: &Recipe) -> Option<[u64; 3]> {
        let measured = self.known.candidates.lock().expect("nobody panics while holding it");
        if let Some(Candidate { device, host, file, .. }) = measured.get(recipe) {
            return Some([*device, *host, *file]);
        }
        drop(measured);
        let known = self.known.above.lock().expect("nobody panics while holding it");
        let [device, host, file] = *known.get(&self.of_kind(recipe))?;
        let stays = self.persistent(recipe.offload);
        let bytes = [stays.device + device, stays.host + host, stays.file + file];
        Some(bytes.map(|bytes| bytes.saturating_sub(ALIGNMENT)))
    }

    /// What choices have in common that need the same above what stays.
    pub fn kind(&self, offload: Offload) -> Offload {
        kind(offload, self.layers())
    }

    /// The recipe where every layer is computed again, if that is open.
    pub fn made_again(&self, micro_batch: u32, offload: Offload) -> Recipe {
        let question = self.question;
        let all = || vec![RecomputeLevel::Block; question.layers()];
        question.recipe(micro_batch, question.fixed_levels().unwrap_or_else(all), offload)
    }

    /// Whether so many bytes of all spaces are under the load lines.
    pub fn holds(&self, [device, host, file]: [u64; 3]) -> bool {
        let lines = &self.question.host;
        let waits = host <= lines.budget.0 && file <= lines.file.budget.0;
        device <= self.question.device.arena_budget().0 && waits
    }

    /// Whether a choice can come under the load lines, as far as is known.
    pub fn may_fit(&self, micro_batch: u32, offload: Offload) -> bool {
        self.holds(self.at_least(&self.made_again(micro_batch, offload)))
    }

    /// Bytes of all spaces that a recipe takes at least, as far as is known.
    pub fn at_least(&self, recipe: &Recipe) -> [u64; 3] {
        self.known_bytes(recipe).unwrap_or_else(|| {
            let Recipe { micro_batch, offload, .. } = *recipe;
            let inputs = u64::from(offload.inputs) * self.plain(micro_batch).input_bytes;
            let stays = self.persistent(offload);
            // All of them are there when the backward pass begins.
            [0, stays.host + self.in_flight(micro_batch) * inputs, stays.file]
        })
    }

    /// The wanted Programs of a recipe, of which nothing waits yet.
    fn part(&self, plain: ProgramSet, recipe: &Recipe, wanted: &dyn Fn(&Program) -> bool) -> ProgramSet {
        let question = self.question;
        let one_micro_batch = question.micro_batches_of(recipe) == 1;
        let set = offload_only(plain, self.layers(), &recipe.offload, one_micro_batch, wanted);
        question.mailed(question.with_file(set, recipe.offload))
    }

    /// What happens once a step. Inputs of layers do not come into it.
    pub(super) fn once_a_step(&self, recipe: &Recipe, plain: &dyn Fn() -> ProgramSet) -> Measured {
        let one_micro_batch = self.question.micro_batches_of(recipe) == 1;
        let key = (Offload { inputs: 0, ..recipe.offload }, one_micro_batch);
        known(&self.known.once_a_step, key, || {
            let set = self.part(plain(), recipe, &|program| !depends_on_all(program));
            self.measured(&set, &["begin", "norm", "update"])
        })
    }

    fn measure(&self, recipe: Recipe) -> Candidate {
        let question = self.question;
        let plain = question.build(question.config, &recipe, false);
        let update = self.once_a_step(&recipe, &|| plain.clone());
        let set = self.part(plain, &recipe, &depends_on_all);
        let passes = match question.optimizer {
            Some(_) => self.measured(&set, &["forward", "backward"]),
            None => self.measured(&set, &["evaluate"]),
        };
        Candidate {
            device: update.device.max(passes.device),
            host: update.host.max(passes.host),
            file: update.file.max(passes.file),
            seconds: update.seconds
                + f64::from(question.micro_batches_of(&recipe).saturating_sub(1)) * passes.seconds
                + passes.last_seconds,
            once: update.seconds,
            passes: passes.seconds,
            hides: passes.hides,
            laid: Arc::default(),
            recipe,
        }
    }

    /// Whether what is needed while files are read and written is held: little passes through memory then, so that it is
    /// seldom looked at closely.
    pub fn moves_files(&self, recipe: &Recipe, holds: &dyn Fn([u64; 3]) -> bool) -> bool {
        let bytes = |stays: Stays| [stays.device, stays.host, stays.file];
        let stays = bytes(self.persistent(recipe.offload));
        let [device, host, file] = stays;
        let on_host = if recipe.offload.is_nothing() { 0 } else { ALL_STAGING_BYTES };
        if holds([device + ALL_STAGING_BYTES, host + on_host, file]) {
            return true;
        }
        let offload = Offload { inputs: 0, update: false, ..self.kind(recipe.offload) };
        let above: [u64; 3] = known(&self.known.files, offload, || {
            let question = self.question;
            let set = question.build(question.config, &recipe_of(recipe, offload), true);
            let moves = |program: &Program| matches!(program.work, WorkName::Load | WorkName::Save);
            let set = offload_only(set, self.layers(), &offload, false, &moves);
            let (all, stays) = (lower_bounds(&question.with_file(set, offload)), bytes(self.persistent(offload)));
            std::array::from_fn(|at| all[at].saturating_sub(stays[at]))
        });
        holds(std::array::from_fn(|at| (stays[at] + above[at]).saturating_sub(ALIGNMENT)))
    }

    fn measured(&self, set: &ProgramSet, timed: &[&str]) -> Measured {
        let prices = self.question.prices();
        let seconds = |last: bool| {
            let programs = timed.iter().filter_map(|name| set.program(name));
            programs.map(|program| prices.program_seconds(set, program, last)).sum()
        };
        let every = seconds(false);
        // By what is computed: where copies take longer, they do so all along.
        let computing = |program: &Program| prices.computing_seconds(set, program);
        let all: f64 = timed.iter().filter_map(|name| set.program(name)).map(computing).sum();
        let hides = set.program("backward").filter(|_| timed.contains(&"backward")).map_or(0.0, |program| {
            let first_layer = program.blocks.iter().position(|block| block.name == "layer");
            let first_layer = first_layer.unwrap_or(program.blocks.len());
            let before: f64 = program.blocks[..first_layer].iter().map(|block| prices.block_seconds(set, block)).sum();
            let first = program.blocks.get(first_layer);
            let first = first.map_or(0.0, |block| prices.block_seconds(set, block) / f64::from(block.repeat));
            computing(program) - before - first
        });
        let [device, host, file] = lower_bounds(set);
        Measured {
            device,
            host,
            file,
            seconds: every,
            last_seconds: if self.question.share.sharing == Some(Sharing::Batch) { seconds(true) } else { every },
            hides: if all > 0.0 { every * (hides / all).max(0.0) } else { 0.0 },
        }
    }

    /// Bytes on the device above what stays, while nothing waits.
    pub fn plain_above(&self, micro_batch: u32, levels: &[RecomputeLevel]) -> u64 {
        let plain = self.candidate(self.question.recipe(micro_batch, levels.to_vec(), Offload::NOTHING));
        plain.device.saturating_sub(self.persistent(Offload::NOTHING).device)
    }

    /// The least bytes on the device under a choice, of levels that need so many above what stays while nothing waits; found
    /// without writing Programs down, as far as is known.
    pub fn least_bytes(&self, micro_batch: u32, plain_above: u64, offload: Offload) -> u64 {
        let plain = self.plain(micro_batch);
        let inputs = self.in_flight(micro_batch) * u64::from(offload.inputs) * plain.input_bytes;
        // Where the head comes in blocks, so do the logits.
        let logits = if self.streams_head(offload) { plain.logits_bytes } else { 0 };
        (self.persistent(offload).device + plain_above).saturating_sub(inputs + logits + ALIGNMENT)
    }

    /// Micro-batches whose inputs of layers are there at once.
    pub(super) fn in_flight(&self, micro_batch: u32) -> u64 {
        let share = &self.question.share;
        u64::from(share.in_flight(share.micro_batches_of(self.question.sequences, micro_batch) as u32))
    }

    pub(super) fn streams_head(&self, offload: Offload) -> bool {
        let kernels = Kernels::of(self.question.device);
        offload.streams_head(self.question.config.tied) && streams_head(self.question.config.vocab, kernels)
    }

    pub(super) fn layers(&self) -> u32 {
        self.question.layers() as u32
    }

    /// What a micro-batch takes while everything stays on the device.
    pub(super) fn plain(&self, micro_batch: u32) -> Plain {
        known(&self.known.plain, micro_batch, || self.measure_plain(micro_batch))
    }

    /// What recompute frees and costs in a layer.
    pub fn profile(&self, micro_batch: u32) -> Arc<Profile> {
        known(&self.known.profiles, micro_batch, || Arc::new(profile(self.question, micro_batch)))
    }

    fn measure_plain(&self, micro_batch: u32) -> Plain {
        let question = self.question;
        let set = question.build(question.config, &question.uniform(micro_batch, RecomputeLevel::Nothing), false);
        let prices = question.prices();
        let passes = if question.optimizer.is_some() { &["forward", "backward"][..] } else { &["evaluate"][..] };
        let programs = passes.iter().filter_map(|name| set.program(name));
        let again = self.made_again(micro_batch, Offload::NOTHING);
        let logits = ["train.logits", "evaluate.logits"].iter().find_map(|name| set.find(name));
        let makes = |op: &Op| matches!(&op.kind, OpKind::Product { out, .. } if Some(out.tensor) == logits);
        let last = passes.last().and_then(|name| set.program(name));
        let loss = last.into_iter().flat_map(|program| &program.blocks);
        let seconds = |block: &Block| {
            let ops = block.ops.iter().filter(|op| makes(op));
            f64::from(block.repeat) * ops.map(|op| prices.op_seconds(&set, op)).sum::<f64>()
        };
        let vocab = question.config.vocab;
        let head_block = &head_blocks(vocab, Kernels::of(question.device))[0];
        Plain {
            pass_seconds: programs.map(|program| prices.program_seconds(&set, program, false)).sum(),
            least_above: self.plain_above(micro_batch, &again.recompute),
            logits_bytes: logits.map_or(0, |logits| set.tensor(logits).bytes()),
            logits_seconds: loss.map(seconds).sum(),
            head_block: head_block.end as f64 / vocab as f64,
            input_bytes: set.find("train.hidden").map_or(0, |hidden| set.tensor(hidden).bytes()),
        }
    }

    /// The levels that need the least, as far as the profile sees.
    pub fn tightest(&self, micro_batch: u32) -> Option<Vec<RecomputeLevel>> {
        let find = || self.profile(micro_batch).tightest(self.question.layers());
        known(&self.known.tightest, micro_batch, find)
    }

    /// Recipes that recompute as little as the load lines allow, tightened until one fits or none can.
    pub fn recomputed(&self, micro_batch: u32, offload: Offload) -> Vec<Candidate> {
        let question = self.question;
        let arena_budget = question.device.arena_budget().0;
        let block = || self.candidate(self.made_again(micro_batch, offload));
        if question.fixed_levels().is_some() {
            return vec![block()];
        }
        let profile = self.profile(micro_batch);
        let mut list = Vec::new();
        let mut budget = if offload.is_nothing() {
            arena_budget.saturating_sub(self.persistent(offload).device)
        } else {
            // What waiting frees is measured where everything is recomputed, and is as much elsewhere.
            let plain = self.plain(micro_batch).least_above;
            let waiting = self.known_bytes(&self.made_again(micro_batch, offload)).unwrap_or_else(|| {
                let waiting = block();
                list.push(waiting.clone());
                [waiting.device, waiting.host, waiting.file]
            });
            if !self.holds(waiting) {
                return list;
            }
            (arena_budget + plain).saturating_sub(waiting[0])
        };
        // The profile sees three layers of one device; where the whole is larger, by what a team gathers for example, aim so
        // much lower than what the profile made of these levels.
        for _ in 0..4 {
            let Some(recompute) = choose(&profile, question.layers(), budget) else { break };
            let seen = profile.need(&recompute);
            let recipe = question.recipe(micro_batch, recompute, offload);
            if list.iter().any(|candidate| candidate.recipe == recipe) {
                break;
            }
            let found = self.candidate(recipe);
            let over = found.device.saturating_sub(arena_budget);
            list.push(found);
            if over == 0 {
                break;
            }
            budget = seen.saturating_sub(over);
        }
        if !offload.is_nothing() && list.iter().all(|candidate| !self.fits(candidate)) {
            list.push(block());
        }
        list
    }
}
