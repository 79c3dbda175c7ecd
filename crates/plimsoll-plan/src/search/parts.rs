//! What a rank of a team that shares out its state takes and holds, for shares to be found without a search for each.

use super::measure::{Candidate, Measurer, bare};
use super::{Question, candidates, offload};
use plimsoll_core::{Category, Offload, RecomputeLevel, Sharing};
use plimsoll_program::models::ModelConfig;
use plimsoll_program::{Program, ProgramSet, Share};

/// Bytes that are held in parts, of all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct InParts {
    /// Weights, gradients, masters and the optimizer's state.
    pub all: f64,
    /// Of that, what only the update touches.
    pub optimizer: f64,
}

impl InParts {
    /// Of the model of a question, for whoever asks it.
    pub fn of(question: &Question) -> InParts {
        // A rank that holds nothing has what is not held in parts.
        let nothing = Share { sharing: Some(Sharing::State), ranks: 2, state: vec![0, 1024], ..Share::ALONE };
        let bytes = |share: Share, of: &dyn Fn(Category) -> bool| {
            let set = bare(&Question { share, ..question.clone() });
            let held = set.tensors.iter().filter(|tensor| of(tensor.category));
            held.map(|tensor| tensor.bytes() * u64::from(tensor.slots)).sum::<u64>() as f64
        };
        let in_parts = |of: &dyn Fn(Category) -> bool| bytes(Share::ALONE, of) - bytes(nothing.clone(), of);
        let state = |category| matches!(category, Category::Weight | Category::Gradient | Category::Optimizer);
        InParts { all: in_parts(&state), optimizer: in_parts(&|category| category == Category::Optimizer) }
    }
}

/// A rank with micro-batches of one size, while everything is on the device; first where nothing is computed again, then
/// where everything is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rank {
    /// Seconds of the passes of a micro-batch, exchange counted, where all parts are alike.
    passes: [f64; 2],
    /// Of these, how long the device computes.
    computing: [f64; 2],
    /// And how long the link is busy.
    exchange: [f64; 2],
    /// Seconds of what happens once a step.
    pub once: f64,
    /// Bytes on the device beside what it holds of the state.
    pub beside: [u64; 2],
}

/// Layers of the models that a rank is measured with: gathering goes two layers ahead, so that fewer would not do.
const SHALLOW: [u64; 2] = [4, 8];

impl Rank {
    /// The rank that a question with a share is about: measured with few layers, and as much more as the further ones are.
    pub fn of(question: &Question, micro_batch: u32) -> Rank {
        let layers = question.config.layers;
        let [few, more] = SHALLOW.map(|shallow| shallow.min(layers));
        if more == layers {
            return Rank::of_layers(question, micro_batch, layers);
        }
        let (few_layers, more_layers) = (few as f64, more as f64);
        let [few, more] = [few, more].map(|layers| Rank::of_layers(question, micro_batch, layers));
        let of = |few: f64, more: f64| few + (more - few) * (layers as f64 - few_layers) / (more_layers - few_layers);
        let bytes = |at: usize| of(few.beside[at] as f64, more.beside[at] as f64) as u64;
        let seconds = |pairs: [[f64; 2]; 2]| [0, 1].map(|at| of(pairs[0][at], pairs[1][at]));
        Rank {
            passes: seconds([few.passes, more.passes]),
            computing: seconds([few.computing, more.computing]),
            exchange: seconds([few.exchange, more.exchange]),
            once: of(few.once, more.once),
            beside: [0, 1].map(bytes),
        }
    }

    /// Seconds of the passes of a micro-batch where so much is computed again, 0 to 1, and the least part is so much of an
    /// even one: the less it is, the more its rank has to be sent. What of that takes longer than computing is waited for.
    pub fn passes(&self, again: f64, ranks: usize, least: f64) -> f64 {
        let between = |pair: [f64; 2]| pair[0] + again * (pair[1] - pair[0]);
        let even = 1.0 / ranks as f64;
        let [passes, computing, exchange] = [self.passes, self.computing, self.exchange].map(between);
        let exchanged = exchange * (1.0 - least * even) / (1.0 - even);
        passes + (exchanged - exchange.max(computing)).max(0.0)
    }

    fn of_layers(question: &Question, micro_batch: u32, layers: u64) -> Rank {
        let config = ModelConfig { layers, ..question.config.clone() };
        let question = &Question { config: &config, ..question.clone() };
        let measurer = Measurer::new(question);
        let stays = measurer.persistent(Offload::NOTHING).device;
        let of = |level| {
            let fixed = question.fixed_levels().map(|levels| levels[..layers as usize].to_vec());
            let levels = fixed.unwrap_or_else(|| vec![level; layers as usize]);
            measurer.candidate(question.recipe(micro_batch, levels, Offload::NOTHING))
        };
        let found = [RecomputeLevel::Nothing, RecomputeLevel::Block].map(of);
        let prices = question.prices();
        let sum = |candidate: &Candidate, seconds: &dyn Fn(&ProgramSet, &Program) -> f64| {
            let set = question.computing(&candidate.recipe);
            ["forward", "backward"]
                .iter()
                .filter_map(|name| set.program(name))
                .map(|program| seconds(&set, program))
                .sum()
        };
        Rank {
            passes: [found[0].passes, found[1].passes],
            computing: [0, 1].map(|at| sum(&found[at], &|set, program| prices.computing_seconds(set, program))),
            exchange: [0, 1].map(|at| sum(&found[at], &|set, program| prices.exchange_seconds(set, program))),
            once: found[0].once,
            beside: [&found[0], &found[1]].map(|candidate| candidate.device.saturating_sub(stays)),
        }
    }
}

/// Seconds in which a device computes the passes of a micro-batch by itself, where nothing is computed again.
pub(crate) fn computing_seconds(question: &Question, micro_batch: u32) -> f64 {
    let question = Question { share: Share::ALONE, ..question.clone() };
    let set = question.build(question.config, &question.uniform(micro_batch, RecomputeLevel::Nothing), false);
    let passes = ["forward", "backward"].into_iter().filter_map(|name| set.program(name));
    passes.map(|program| question.prices().program_seconds(&set, program, false)).sum()
}

/// The fastest recipe of a share with the micro-batch that is pinned, by the bounds of its arenas.
pub(crate) fn fastest_by_bounds(question: &Question) -> Option<Candidate> {
    let measurer = Measurer::new(question);
    let fitting = |candidate: &Candidate| measurer.fits(candidate);
    let found = candidates(&measurer, &question.micro_batches());
    let fastest = found.into_iter().filter(fitting).min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let bound = question.device.arena_budget().0.saturating_add(1);
    // However slow it is.
    fastest.or_else(|| offload::leanest(&measurer, Some(bound)).filter(fitting))
}
