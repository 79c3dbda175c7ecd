//! Bytes and seconds of a rank of a sharded team (FSDP, ZeRO-3), as functions of its micro-batch and its shard. The
//! planner of teams sizes shards by them, without a search for each size.

use super::measure::{Candidate, MeasurementCache, Measurer};
use super::offload::OffloadGoal;
use super::plan_request::FilePrograms;
use super::residency::resident_tensors;
use super::{PlanRequest, candidates_with_one_choice, offload};
use crate::price::MICRO_BATCH_PROGRAMS;
use plimsoll_core::{Category, Offload, Parallelism, RecomputeLevel};
use plimsoll_program::models::ModelConfig;
use plimsoll_program::{Program, ProgramSet, Share};
use std::sync::Arc;

/// Bytes of the model state that a team shards, summed over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ShardedBytes {
    /// Weights, gradients, master weights and optimizer state.
    pub all: f64,
    /// The part of `all` that only the optimizer update touches.
    pub optimizer: f64,
}

impl ShardedBytes {
    /// Computes the sharded bytes of the request's model: the tensors of a device alone, less those of a rank with an
    /// empty shard. The share of the request does not matter.
    pub fn measure(request: &PlanRequest) -> ShardedBytes {
        let empty_shard =
            Share { parallelism: Some(Parallelism::Sharded), ranks: 2, state: vec![0, 1024], ..Share::SINGLE_DEVICE };
        let bytes = |share: Share, selected: &dyn Fn(Category) -> bool| {
            let set = resident_tensors(&PlanRequest { share, ..request.clone() });
            let tensors = set.tensors.iter().filter(|tensor| selected(tensor.category));
            tensors.map(|tensor| tensor.bytes() * u64::from(tensor.slots)).sum::<u64>() as f64
        };
        let sharded = |selected: &dyn Fn(Category) -> bool| {
            bytes(Share::SINGLE_DEVICE, selected) - bytes(empty_shard.clone(), selected)
        };
        let model_state = |category| matches!(category, Category::Weight | Category::Gradient | Category::Optimizer);
        ShardedBytes { all: sharded(&model_state), optimizer: sharded(&|category| category == Category::Optimizer) }
    }
}

/// A value without recompute, and with full recompute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerRecompute<T> {
    /// The value without recompute.
    pub none: T,
    /// The value with full recompute.
    pub full: T,
}

impl PerRecompute<f64> {
    /// Interpolates linearly between no recompute (0) and full recompute (1).
    fn interpolate(self, recompute: f64) -> f64 {
        self.none + recompute * (self.full - self.none)
    }
}

impl<T> PerRecompute<T> {
    /// Borrows both values.
    fn as_ref(&self) -> PerRecompute<&T> {
        PerRecompute { none: &self.none, full: &self.full }
    }

    /// Applies `function` to both values.
    fn map<U>(self, mut function: impl FnMut(T) -> U) -> PerRecompute<U> {
        PerRecompute { none: function(self.none), full: function(self.full) }
    }
}

/// Predicted seconds and bytes of a rank of a sharded team at a given micro-batch size, without offload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankCosts {
    /// Seconds of the forward and backward pass of one micro-batch, with its communication. All ranks are assumed to
    /// have equal shards.
    micro_batch_seconds: PerRecompute<f64>,
    /// Seconds of computing in the passes of a micro-batch.
    compute_seconds: PerRecompute<f64>,
    /// Seconds in which the passes of a micro-batch keep the team link busy.
    exchange_seconds: PerRecompute<f64>,
    /// Seconds of the work done once per step.
    pub per_step_seconds: f64,
    /// Bytes on the device beside the resident bytes.
    pub transient_bytes: PerRecompute<u64>,
}

/// Layers of the two small models from whose Programs the seconds and bytes of a rank are read and extrapolated.
/// Weights are gathered two layers ahead, so fewer layers would not be representative.
const SMALL_MODEL_LAYERS: [u64; 2] = [4, 8];

impl RankCosts {
    /// Predicts seconds and bytes of the rank of a request, which has a share of a sharded team. They are read from the
    /// Programs of models with few layers, and extrapolated linearly to all layers.
    pub fn measure(request: &PlanRequest, micro_batch: u32) -> RankCosts {
        let layers = request.config.layers;
        let [few_layers, more_layers] = SMALL_MODEL_LAYERS.map(|small| small.min(layers));
        if more_layers == layers {
            return RankCosts::measure_layers(request, micro_batch, layers);
        }
        let few = RankCosts::measure_layers(request, micro_batch, few_layers);
        let more = RankCosts::measure_layers(request, micro_batch, more_layers);
        let (few_layers, more_layers) = (few_layers as f64, more_layers as f64);
        let extrapolate =
            |few: f64, more: f64| few + (more - few) * (layers as f64 - few_layers) / (more_layers - few_layers);
        let bytes = |few: u64, more: u64| extrapolate(few as f64, more as f64) as u64;
        let seconds = |few: PerRecompute<f64>, more: PerRecompute<f64>| PerRecompute {
            none: extrapolate(few.none, more.none),
            full: extrapolate(few.full, more.full),
        };
        RankCosts {
            micro_batch_seconds: seconds(few.micro_batch_seconds, more.micro_batch_seconds),
            compute_seconds: seconds(few.compute_seconds, more.compute_seconds),
            exchange_seconds: seconds(few.exchange_seconds, more.exchange_seconds),
            per_step_seconds: extrapolate(few.per_step_seconds, more.per_step_seconds),
            transient_bytes: PerRecompute {
                none: bytes(few.transient_bytes.none, more.transient_bytes.none),
                full: bytes(few.transient_bytes.full, more.transient_bytes.full),
            },
        }
    }

    /// Predicts the seconds of the passes of a micro-batch.
    ///
    /// - `recompute`: fraction of full recompute, 0 to 1.
    /// - `smallest_shard`: the smallest shard of the team as a fraction of an equal shard. The smaller it is, the
    ///   longer the collectives take, because its rank receives more.
    pub fn micro_batch_seconds(&self, recompute: f64, ranks: usize, smallest_shard: f64) -> f64 {
        let equal_shard = 1.0 / ranks as f64;
        let [passes, compute, exchange] = [self.micro_batch_seconds, self.compute_seconds, self.exchange_seconds]
            .map(|seconds| seconds.interpolate(recompute));
        let longest_exchange = exchange * (1.0 - smallest_shard * equal_shard) / (1.0 - equal_shard);
        passes + (longest_exchange - exchange.max(compute)).max(0.0)
    }

    /// Predicts seconds and bytes of the rank with a model of `layers` layers, from its Programs.
    fn measure_layers(request: &PlanRequest, micro_batch: u32, layers: u64) -> RankCosts {
        let config = ModelConfig { layers, ..request.config.clone() };
        let request = &PlanRequest { config: &config, ..request.clone().with_uniform_adapters() };
        let measurer = Measurer::new(request);
        let resident = measurer.resident(Offload::NOTHING).spaces.device;
        let with_level = |level| {
            let fixed = request.fixed_recompute().map(|levels| levels[..layers as usize].to_vec());
            let levels = fixed.unwrap_or_else(|| vec![level; layers as usize]);
            measurer.candidate(request.recipe(micro_batch, levels, Offload::NOTHING))
        };
        let candidates =
            PerRecompute { none: with_level(RecomputeLevel::Nothing), full: with_level(RecomputeLevel::Block) };
        let sets = candidates.as_ref().map(|candidate| request.compute_programs(&candidate.recipe));
        let (candidates, sets, prices) = (candidates.as_ref(), sets.as_ref(), request.prices());
        RankCosts {
            micro_batch_seconds: candidates.map(|candidate| candidate.per_micro_batch_seconds),
            compute_seconds: sets.map(|set| sum_passes(set, |program| prices.compute_seconds(set, program))),
            exchange_seconds: sets.map(|set| sum_passes(set, |program| prices.exchange_seconds(set, program))),
            per_step_seconds: candidates.none.per_step_seconds,
            transient_bytes: candidates.map(|candidate| candidate.bytes.device.saturating_sub(resident)),
        }
    }
}

/// Adds up the `seconds` of the Programs of `set` that run for each micro-batch.
fn sum_passes(set: &ProgramSet, seconds: impl Fn(&Program) -> f64) -> f64 {
    let passes = MICRO_BATCH_PROGRAMS.into_iter().filter_map(|kind| set.program(kind));
    passes.map(seconds).sum()
}

/// Predicts the seconds of the passes of a micro-batch on the device alone, without recompute.
pub(crate) fn single_device_compute_seconds(request: &PlanRequest, micro_batch: u32) -> f64 {
    let request = PlanRequest { share: Share::SINGLE_DEVICE, ..request.clone() };
    let set =
        request.build(request.config, &request.uniform(micro_batch, RecomputeLevel::Nothing), FilePrograms::Without);
    sum_passes(&set, |program| request.prices().program_seconds(&set, program, false))
}

/// The recipe that is wanted for a share of a team.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecipeGoal {
    /// The fastest that fits.
    Fastest,
    /// The one that needs the least memory of the device. It is found sooner, and tells whether any fits.
    LeastMemory,
}

/// Returns the recipe of a share that fits and meets `goal`; `None` if none fits. The search for the fastest may pass over
/// recipes with which a step of the share takes `bound` seconds or more. `cache` has measurements of requests that differ from
/// this one only in load lines.
pub(crate) fn recipe_of_share(
    request: &PlanRequest,
    goal: RecipeGoal,
    bound: f64,
    cache: Arc<MeasurementCache>,
) -> Option<Candidate> {
    match goal {
        RecipeGoal::Fastest => fastest_unpacked(request, bound, cache),
        RecipeGoal::LeastMemory => smallest_that_fits(&Measurer::with_cache(request, cache)),
    }
}

/// Returns the recipe with the least memory of the device, however slow it is; `None` if it does not fit.
fn smallest_that_fits(measurer: &Measurer) -> Option<Candidate> {
    offload::smallest(measurer, Some(measurer.request.arena_bound())).filter(|candidate| measurer.fits(candidate))
}

/// Returns the fastest recipe of a share that fits, by its packed bytes if it was packed, and otherwise by their lower
/// bounds. If the usual candidates do not fit, it is the smallest recipe. Returns `None` if that does not fit either. With a
/// `bound`, it may also return `None` if all that fit take as many seconds a step or more.
fn fastest_unpacked(request: &PlanRequest, bound: f64, cache: Arc<MeasurementCache>) -> Option<Candidate> {
    let measurer = Measurer::with_cache(request, cache);
    let fits = |candidate: &Candidate| measurer.fits(candidate);
    let micro_batches = request.micro_batch_sizes();
    let mut found = candidates_with_one_choice(&measurer, &micro_batches);
    if request.pins.offload.is_none() {
        // Offload choices are slow to measure, so the smallest recipe is found, or ruled out, before.
        if !found.iter().any(fits) && !offload::may_fit(&measurer) {
            return None;
        }
        offload::add_candidates(&measurer, &micro_batches, OffloadGoal::FasterThan(bound), &mut found);
    }
    let fastest = found.into_iter().filter(fits).min_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
    fastest.or_else(|| smallest_that_fits(&measurer).filter(|smallest| smallest.step_seconds < bound))
}
