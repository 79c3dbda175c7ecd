//! What a recipe holds and costs, before it is packed.

use super::{Profile, Question, choose};
use crate::layout::{ALIGNMENT, lay_out, lower_bound};
use plimsoll_core::{Category, Offload, Recipe, RecomputeLevel, Sharing, Space};
use plimsoll_program::models::decoder::{Method, head_blocks, streams_head};
use plimsoll_program::passes::offload::offload_only;
use plimsoll_program::{Block, Op, OpKind, Program, ProgramSet};
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;

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
    /// Bytes of all spaces, where it has been packed.
    packed: OnceCell<Packed>,
}

/// Bytes of all spaces, with the Programs that move files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    pub device: u64,
    pub host: u64,
    pub file: u64,
}

impl Candidate {
    /// Packs the recipe. That takes long where much waits, so it is done once.
    pub fn packed(&self, question: &Question) -> Packed {
        *self.packed.get_or_init(|| {
            let layout = lay_out(&question.programs(&self.recipe));
            Packed { device: layout.device.bytes, host: layout.host.bytes, file: layout.file.bytes }
        })
    }
}

/// Bounds of all spaces, and seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    device: u64,
    host: u64,
    file: u64,
    seconds: f64,
    /// The same for a step's last micro-batch.
    last_seconds: f64,
}

/// Measures recipes. What happens once a step depends on what waits and on nothing else of a recipe: it is measured once.
pub(super) struct Measurer<'q> {
    pub question: &'q Question<'q>,
    once_a_step: RefCell<HashMap<(Offload, bool), Measured>>,
    plain: RefCell<HashMap<u32, Plain>>,
    /// Tensors without Programs.
    bare: OnceCell<ProgramSet>,
}

/// What stays for the whole run, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stays {
    /// On the device.
    pub device: u64,
    /// On the host.
    pub host: u64,
    /// In the scratch file.
    pub file: u64,
    /// What waits, in either, by what it is.
    waits: Waiting,
    /// Of that, what waits in the file.
    in_file: Waiting,
}

/// Bytes of what waits, by what it is.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    weights: f64,
    gradients: f64,
    state: f64,
}

/// A micro-batch while everything stays on the device.
#[derive(Clone, Copy, Debug)]
struct Plain {
    /// Seconds of its passes where nothing is recomputed.
    pass_seconds: f64,
    /// Bytes above what stays where everything is recomputed.
    least_above: u64,
    /// Bytes of a layer's input.
    input_bytes: u64,
    /// Bytes of the logits that stand at once.
    logits_bytes: u64,
    /// Seconds of the product that makes all logits once.
    logits_seconds: f64,
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
        Measurer { question, once_a_step: RefCell::default(), plain: RefCell::default(), bare: OnceCell::new() }
    }

    /// Whether a candidate is under both load lines, as far as its bounds say.
    pub fn fits(&self, candidate: &Candidate) -> bool {
        let host = &self.question.host;
        let waits = candidate.host <= host.budget.0 && candidate.file <= host.file.budget.0;
        candidate.device <= self.question.device.arena_budget().0 && waits
    }

    /// Whether a candidate is under the load lines of host and file once it is packed.
    pub fn packs_on_host(&self, candidate: &Candidate) -> bool {
        let host = &self.question.host;
        let fits = |on_host: u64, in_file: u64| on_host <= host.budget.0 && in_file <= host.file.budget.0;
        let within = || {
            let packed = candidate.packed(self.question);
            fits(packed.host, packed.file)
        };
        fits(candidate.host, candidate.file) && (candidate.recipe.offload.is_nothing() || within())
    }

    /// Measures a recipe.
    pub fn candidate(&self, recipe: Recipe) -> Candidate {
        let question = self.question;
        let plain = question.build(question.config, &recipe, false);
        let one_micro_batch = question.micro_batches_of(&recipe) == 1;
        let part = |set: ProgramSet, wanted: &dyn Fn(&Program) -> bool| {
            let set = offload_only(set, self.layers(), &recipe.offload, one_micro_batch, wanted);
            question.mailed(question.with_file(set, recipe.offload))
        };
        // Inputs of layers do not come into it.
        let key = (Offload { inputs: 0, ..recipe.offload }, one_micro_batch);
        let known = self.once_a_step.borrow().get(&key).copied();
        let update = known.unwrap_or_else(|| {
            let set = part(plain.clone(), &|program| !depends_on_all(program));
            let measured = self.measured(&set, &["begin", "norm", "update"]);
            self.once_a_step.borrow_mut().insert(key, measured);
            measured
        });
        let set = part(plain, &depends_on_all);
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
            packed: OnceCell::new(),
            recipe,
        }
    }

    fn measured(&self, set: &ProgramSet, timed: &[&str]) -> Measured {
        let prices = self.question.prices();
        let seconds = |last: bool| {
            let programs = timed.iter().filter_map(|name| set.program(name));
            programs.map(|program| prices.program_seconds(set, program, last)).sum()
        };
        let every = seconds(false);
        Measured {
            device: lower_bound(set, Space::Device),
            host: lower_bound(set, Space::Host),
            file: lower_bound(set, Space::Scratch),
            seconds: every,
            last_seconds: if self.question.share.sharing == Some(Sharing::Batch) { seconds(true) } else { every },
        }
    }

    /// What stays for the whole run, and where.
    pub fn persistent(&self, offload: Offload) -> Stays {
        let set = self.bare.get_or_init(|| bare(self.question));
        let bare = offload_only(set.clone(), self.layers(), &offload, false, &|_| false);
        let bare = self.question.with_file(bare, offload);
        let bytes = |spaces: &[Space], category: Category| {
            let of = bare.tensors.iter().filter(|t| spaces.contains(&t.space) && t.category == category);
            of.map(|t| t.bytes() * u64::from(t.slots)).sum::<u64>() as f64
        };
        let waiting = |spaces: &[Space]| Waiting {
            weights: bytes(spaces, Category::Weight),
            gradients: bytes(spaces, Category::Gradient),
            state: bytes(spaces, Category::Optimizer),
        };
        Stays {
            device: lower_bound(&bare, Space::Device).next_multiple_of(ALIGNMENT),
            host: lower_bound(&bare, Space::Host),
            file: lower_bound(&bare, Space::Scratch),
            waits: waiting(&[Space::Host, Space::Scratch]),
            in_file: waiting(&[Space::Scratch]),
        }
    }

    /// The least bytes on the device that a choice can come to, found without writing Programs down.
    pub fn least_bytes(&self, micro_batch: u32, offload: Offload) -> u64 {
        let plain = self.plain(micro_batch);
        let inputs = u64::from(offload.inputs) * plain.input_bytes;
        // Where the head comes in blocks, so do the logits.
        let logits = if self.streams_head(offload) { plain.logits_bytes } else { 0 };
        (self.persistent(offload).device + plain.least_above).saturating_sub(inputs + logits)
    }

    /// About how many seconds a step takes under a choice, with the lightest level of recompute that about fits;
    /// `None` where none does. Found without writing Programs down: what has to be computed, what has to be copied,
    /// what stays.
    pub fn about(&self, profile: &Profile, micro_batch: u32, offload: Offload) -> Option<f64> {
        let question = self.question;
        let plain = self.plain(micro_batch);
        let stays = self.persistent(offload);
        let count = question.share.micro_batches_of(question.sequences, micro_batch) as f64;
        let rate = question.device.rates.host_link.bytes_per_second;
        let inputs = u64::from(offload.inputs) * plain.input_bytes;
        // Rows of the embedding are looked up and added to where they are; the head comes in blocks, twice.
        let ends = [offload.embedding, offload.head].iter().filter(|waits| **waits).count() as u64;
        let end_elements = (ends * question.config.vocab * question.config.hidden) as f64;
        let (waits, in_file, file) = (stays.waits, stays.in_file, &question.host.file);
        let weights = (waits.weights - end_elements * question.precision.bytes() as f64).max(0.0);
        let gradients = (waits.gradients - end_elements * question.precision.wide().bytes() as f64).max(0.0);
        let table = (question.config.vocab * question.config.hidden) as f64;
        let streamed = self.streams_head(offload);
        let head = if streamed { table * question.precision.bytes() as f64 } else { 0.0 };
        let trained = question.optimizer.is_some() && question.lossy.method == Method::Full;
        let head_gradient = if streamed && trained { table * question.precision.wide().bytes() as f64 } else { 0.0 };
        let again = if count > 1.0 { gradients + head_gradient } else { 0.0 };
        let copied_in = count * (2.0 * (weights + head) + again + inputs as f64);
        let copied_out = count * (gradients + head_gradient + inputs as f64);
        let update = if offload.update {
            // Masters and moments are read and written, gradients read, weights written; what is not there is copied.
            let weight = question.precision.bytes() as f64;
            let trained = waits.state / if question.precision == question.precision.wide() { 8.0 } else { 12.0 };
            let over_link = ((trained * 4.0 - gradients).max(0.0)).max((trained * weight - weights).max(0.0));
            let moved = 2.0 * waits.state + trained * (4.0 + 2.0 * weight);
            (over_link / rate).max(moved / question.host.memory_bytes_per_second)
        } else {
            ((gradients + waits.state) / rate).max((waits.state + weights) / rate)
        };
        // What the disk takes, which reads and writes at once.
        let disk =
            |read: f64, written: f64| (read / file.read_bytes_per_second).max(written / file.write_bytes_per_second);
        let of_passes = disk(
            count * (2.0 * in_file.weights + if count > 1.0 { in_file.gradients } else { 0.0 }),
            count * in_file.gradients,
        );
        let update = update.max(disk(in_file.gradients + in_file.state, in_file.state + in_file.weights));
        let normed = disk(in_file.gradients, 0.0);
        let once = if question.optimizer.is_some() { (gradients / rate).max(normed) + update } else { 0.0 };
        // Two slots in each ring, of a layer each.
        let of_layer = |bytes: f64, layers: u32| if layers > 0 { 2.0 * bytes / f64::from(layers) } else { 0.0 };
        let block = head_blocks(question.config.vocab)[0].end as f64 / question.config.vocab as f64;
        let rings = of_layer(weights, offload.weights)
            + of_layer(gradients, offload.gradients)
            + 2.0 * block * (head + head_gradient);
        let budget = (question.device.arena_budget().0 + inputs).checked_sub(stays.device + rings as u64)?;
        let more = profile.lightest(question.layers(), budget)?;
        let logits = if streamed { plain.logits_seconds } else { 0.0 };
        let computed = count * (plain.pass_seconds + logits + more);
        Some(computed.max(copied_in / rate).max(copied_out / rate).max(of_passes) + once)
    }

    fn streams_head(&self, offload: Offload) -> bool {
        offload.streams_head(self.question.config.tied) && streams_head(self.question.config.vocab)
    }

    fn layers(&self) -> u32 {
        self.question.config.layers as u32
    }

    /// What a micro-batch takes while everything stays on the device.
    fn plain(&self, micro_batch: u32) -> Plain {
        if let Some(plain) = self.plain.borrow().get(&micro_batch) {
            return *plain;
        }
        let question = self.question;
        let set = question.build(question.config, &question.uniform(micro_batch, RecomputeLevel::Nothing), false);
        let prices = question.prices();
        let passes = if question.optimizer.is_some() { &["forward", "backward"][..] } else { &["evaluate"][..] };
        let programs = passes.iter().filter_map(|name| set.program(name));
        let block = self.candidate(question.uniform(micro_batch, RecomputeLevel::Block));
        let logits = ["train.logits", "evaluate.logits"].iter().find_map(|name| set.find(name));
        let makes = |op: &Op| matches!(&op.kind, OpKind::Product { out, .. } if Some(out.tensor) == logits);
        let last = passes.last().and_then(|name| set.program(name));
        let loss = last.into_iter().flat_map(|program| &program.blocks);
        let seconds = |block: &Block| {
            let ops = block.ops.iter().filter(|op| makes(op));
            f64::from(block.repeat) * ops.map(|op| prices.op_seconds(&set, op)).sum::<f64>()
        };
        let plain = Plain {
            pass_seconds: programs.map(|program| prices.program_seconds(&set, program, false)).sum(),
            least_above: block.device.saturating_sub(self.persistent(Offload::NOTHING).device),
            logits_bytes: logits.map_or(0, |logits| set.tensor(logits).bytes()),
            logits_seconds: loss.map(seconds).sum(),
            input_bytes: set.find("train.hidden").map_or(0, |hidden| set.tensor(hidden).bytes()),
        };
        self.plain.borrow_mut().insert(micro_batch, plain);
        plain
    }

    /// Recipes that recompute as little as the load lines allow, tightened until one fits or none can.
    pub fn recomputed(&self, profile: &Profile, micro_batch: u32, offload: Offload) -> Vec<Candidate> {
        let question = self.question;
        let arena_budget = question.device.arena_budget().0;
        let block = |offload: Offload| {
            let recipe = Recipe { offload, ..question.uniform(micro_batch, RecomputeLevel::Block) };
            self.candidate(recipe)
        };
        let mut list = Vec::new();
        let mut budget = if offload.is_nothing() {
            arena_budget.saturating_sub(self.persistent(offload).device)
        } else {
            // What waiting frees is measured where everything is recomputed, and is as much elsewhere.
            let (plain, waiting) = (self.plain(micro_batch).least_above, block(offload));
            let budget = (arena_budget + plain).saturating_sub(waiting.device);
            let too_much = !self.fits(&waiting);
            list.push(waiting);
            if too_much {
                return list;
            }
            budget
        };
        // The profile sees three layers; where the whole is a little larger, aim lower.
        for _ in 0..4 {
            let Some(recompute) = choose(profile, question.layers(), budget) else { break };
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
            budget = budget.saturating_sub(over);
        }
        list
    }
}
