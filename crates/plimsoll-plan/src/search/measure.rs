//! Measurements of recipes before they are packed: a lower bound of the bytes in each space, and the predicted seconds
//! of a step. They are taken from the recipe's Programs.
//!
//! Writing Programs is slow, so everything is measured once and cached ([`MeasurementCache`]). Resident bytes are in
//! `residency`, and estimates without Programs in `estimate`.

use super::level_bytes::LevelBytes;
use super::memo::Memo;
use super::plan_request::FilePrograms;
use super::profile::{Profile, choose_levels, measure_profile};
use super::residency::{ResidencyModel, ResidentBytes};
use super::{PackedCandidate, PlanRequest, TriedRecipe};
use crate::layout::{ALIGNMENT, lower_bounds};
use crate::price::MICRO_BATCH_PROGRAMS;
use plimsoll_core::{Bytes, Offload, Parallelism, PerSpace, Recipe, RecomputeLevel, ScratchOffload};
use plimsoll_program::models::decoder::{STAGING_BYTES, head_blocks, streams_head};
use plimsoll_program::passes::offload::offload_programs;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Block, Op, OpKind, Program, ProgramKind, ProgramSet};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock};

/// Most bytes of the staging buffers through which files are read and written: a few buffers on the device, and as many
/// on the host.
const MAX_STAGING_BYTES: u64 = 8 * STAGING_BYTES;

/// Most sets of Programs without offload that a measurer keeps. Recipes that differ only in their offload choice share a
/// set, and a search measures most choices with the same few levels of recompute.
const MAX_BUILT: u64 = 12;
/// Fraction of a device's arena that the ops of these sets may take, as a divisor. A search runs in the process whose
/// memory counts for CPU and virtual devices, so it keeps none for the smallest of them.
const BUILT_PART_OF_ARENA: u64 = 64;

/// A recipe with its lower bounds of bytes and its predicted time.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub recipe: Recipe,
    /// Lower bounds of the bytes: no packing of a space is smaller.
    pub bytes: PerSpace<u64>,
    /// Lower bounds of the bytes while the passes of a micro-batch run, without the work done once per step.
    pub pass_bytes: PerSpace<u64>,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    /// Predicted seconds of the work done once per step.
    pub per_step_seconds: f64,
    /// Predicted seconds of the forward and backward pass of one micro-batch.
    pub per_micro_batch_seconds: f64,
    /// Part of `per_micro_batch_seconds` in which finished gradients can already be exchanged.
    pub overlap_seconds: f64,
    /// Bytes of the packed recipe, once it was packed. Its Programs are not kept: they take far more memory.
    packed_bytes: Arc<OnceLock<PerSpace<u64>>>,
}

impl Candidate {
    /// Returns the entry for the list of tried recipes, on a device with the given charges.
    pub fn tried(&self, charges: Bytes, fits: bool) -> TriedRecipe {
        TriedRecipe {
            recipe: self.recipe.clone(),
            peak_bytes: Bytes(self.known_bytes().device) + charges,
            host_bytes: Bytes(self.known_bytes().host),
            file_bytes: Bytes(self.known_bytes().file),
            step_seconds: self.step_seconds,
            fits,
        }
    }

    /// Returns the bytes of the packed recipe if it was packed, and otherwise the lower bounds.
    pub fn known_bytes(&self) -> PerSpace<u64> {
        self.packed_bytes.get().copied().unwrap_or(self.bytes)
    }

    /// Stores the bytes of the packed recipe. Searches with the same measurements then know whether it fits.
    pub fn record_packed(&self, bytes: PerSpace<u64>) {
        self.packed_bytes.get_or_init(|| bytes);
    }

    /// Builds and packs the Programs of the recipe.
    pub fn pack(&self, request: &PlanRequest) -> PackedCandidate {
        let packed = PackedCandidate::new(request, self.recipe.clone());
        self.record_packed(packed.layout.bytes());
        packed
    }

    /// Returns the bytes of the packed recipe. Packing is slow if much is offloaded, so the bytes are computed once.
    pub fn packed_bytes(&self, request: &PlanRequest) -> PerSpace<u64> {
        *self.packed_bytes.get_or_init(|| PackedCandidate::new(request, self.recipe.clone()).layout.bytes())
    }
}

/// Lower bounds of the bytes, and predicted seconds, of a part of a step. Both are read from its Programs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    bytes: PerSpace<u64>,
    pub(super) seconds: f64,
    /// Seconds of the last micro-batch of a step, which includes the all-reduce of data parallel workers.
    last_micro_batch_seconds: f64,
    /// Part of `seconds` after the backward pass has completed the gradients of the last layer, which it reaches first.
    overlap_seconds: f64,
}

/// A request, and a cache of what was read from the Programs of its recipes: bytes and predicted seconds.
pub(super) struct Measurer<'q> {
    pub request: &'q PlanRequest<'q>,
    cache: Arc<MeasurementCache>,
    /// Programs without offload that were built last, by the choices that they depend on; oldest first.
    built: Mutex<VecDeque<(Recipe, Arc<ProgramSet>)>>,
    pub(super) level_bytes: LevelBytes,
}

/// The cache key of the work done once per step. This work depends only on the offload choice and on whether the step
/// has one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PerStepKey {
    offload: Offload,
    one_micro_batch: bool,
}

/// Cached bytes and predicted seconds, read from the Programs of recipes. They do not depend on load lines, so requests
/// that differ only in load lines share a cache.
#[derive(Debug, Default)]
pub(crate) struct MeasurementCache {
    candidates: Memo<Recipe, Candidate>,
    per_step: Memo<PerStepKey, Measured>,
    /// Bytes above the resident bytes while files are read and written. The key is a representative offload choice: it
    /// stands for all choices that need the same bytes.
    file_bytes: Memo<Offload, PerSpace<u64>>,
    micro_batches: Memo<u32, MicroBatchCosts>,
    profiles: Memo<u32, Arc<Profile>>,
    residency: OnceLock<ResidencyModel>,
    /// Bytes above the resident bytes, by recipe. Its offload choice is a representative: it stands for all choices
    /// that need the same bytes.
    transient_bytes: Memo<Recipe, PerSpace<u64>>,
    smallest_levels: Memo<u32, Option<Vec<RecomputeLevel>>>,
    /// Recompute levels by micro-batch size and by step of their byte budget.
    levels: Memo<(u32, u32), Option<Vec<RecomputeLevel>>>,
}

/// Returns the representative of all offload choices that need the same bytes above their resident bytes. Staging rings
/// hold two layers, so it does not matter which number above two of layers is offloaded.
fn representative(offload: Offload, layers: u32) -> Offload {
    let at_most_two = |count: u32| count.min(2);
    let optimizer_count = |count: u32| if count >= layers { 3 } else { at_most_two(count) };
    let ScratchOffload { optimizer, gradients, weights } = offload.file;
    let file = ScratchOffload {
        optimizer: optimizer_count(optimizer),
        gradients: at_most_two(gradients),
        weights: at_most_two(weights),
    };
    Offload {
        optimizer: optimizer_count(offload.optimizer),
        gradients: at_most_two(offload.gradients),
        weights: at_most_two(offload.weights),
        file,
        ..offload
    }
}

/// Predicted seconds and bytes of a micro-batch without offload.
#[derive(Clone, Copy, Debug)]
pub(super) struct MicroBatchCosts {
    /// Seconds of the passes of a micro-batch without recompute: score, if there is one, forward and backward.
    pub(super) pass_seconds: f64,
    /// Part of `pass_seconds` in which one layer is in its score; 0 without scores.
    pub(super) layer_score_seconds: f64,
    /// Part of `pass_seconds` in which one layer is in its forward pass.
    pub(super) layer_forward_seconds: f64,
    /// Part of `pass_seconds` in which one layer is in its backward pass; 0 without training.
    pub(super) layer_backward_seconds: f64,
    /// Bytes on the device above the resident bytes, with full recompute.
    pub(super) full_recompute_bytes: u64,
    /// Bytes of the input of one layer.
    pub(super) input_bytes: u64,
    /// Largest number of bytes of logits that are live at the same time.
    pub(super) logits_bytes: u64,
    /// Seconds of the matrix product that computes all logits once.
    pub(super) logits_seconds: f64,
    /// Fraction of the head's rows that the device fetches as one block.
    pub(super) head_block: f64,
}

/// Returns the recipe with another offload choice.
fn with_offload(recipe: &Recipe, offload: Offload) -> Recipe {
    Recipe { offload, ..recipe.clone() }
}

/// Returns whether a Program depends on all choices of a recipe: one of a micro-batch, an evaluation or a generation.
fn depends_on_whole_recipe(program: ProgramKind) -> bool {
    matches!(
        program,
        ProgramKind::Forward
            | ProgramKind::Backward
            | ProgramKind::Evaluate
            | ProgramKind::Score
            | ProgramKind::Reference
            | ProgramKind::Prefill
            | ProgramKind::CopyPrefix
            | ProgramKind::Decode
    )
}

impl<'q> Measurer<'q> {
    /// Creates a measurer with an empty cache.
    pub fn new(request: &'q PlanRequest<'q>) -> Measurer<'q> {
        Measurer::with_cache(request, Arc::default())
    }

    /// Creates a measurer that shares a cache with requests that differ only in load lines.
    pub fn with_cache(request: &'q PlanRequest<'q>, cache: Arc<MeasurementCache>) -> Measurer<'q> {
        Measurer { request, cache, built: Mutex::default(), level_bytes: LevelBytes::default() }
    }

    /// Returns a measurer with the same cache for a request that differs only in load lines.
    pub fn with_request<'a>(&self, request: &'a PlanRequest<'a>) -> Measurer<'a> {
        Measurer::with_cache(request, Arc::clone(&self.cache))
    }

    /// Predicts the resident bytes of an offload choice.
    pub fn resident(&self, offload: Offload) -> ResidentBytes {
        let model = self.cache.residency.get_or_init(|| ResidencyModel::measure(self.request));
        model.predict(&offload, self.layers())
    }

    /// Returns whether a candidate stays under the load lines: by its packed bytes if it was packed, and otherwise by its
    /// lower bounds.
    pub fn fits(&self, candidate: &Candidate) -> bool {
        self.is_under_load_lines(candidate.known_bytes())
            && self.file_staging_fits(&candidate.recipe, &|bytes| self.is_under_load_lines(bytes))
    }

    /// Returns whether a candidate, packed, stays under the load lines of host and scratch file.
    pub fn packs_on_host(&self, candidate: &Candidate) -> bool {
        let packs = || self.is_under_host_lines(candidate.packed_bytes(self.request));
        self.is_under_host_lines(candidate.bytes) && (candidate.recipe.offload.is_nothing() || packs())
    }

    /// Builds the Programs of a recipe, and reads lower bounds of its bytes and its predicted seconds from them.
    /// Further calls return the cached result.
    pub fn candidate(&self, recipe: Recipe) -> Candidate {
        self.cache.candidates.get_or_compute(recipe.clone(), || {
            let resident = self.resident(recipe.offload).spaces;
            let candidate = self.measure(recipe);
            let transient = candidate.bytes.saturating_sub(resident);
            self.cache.transient_bytes.insert(self.representative_recipe(&candidate.recipe), transient);
            candidate
        })
    }

    /// Returns the recipe with another offload choice: the representative of all choices that need the same bytes above
    /// their resident bytes.
    fn representative_recipe(&self, recipe: &Recipe) -> Recipe {
        with_offload(recipe, self.representative(recipe.offload))
    }

    /// Returns the cached bytes of a recipe, or else a lower bound from a cached recipe with an equivalent offload
    /// choice. The bound allows for different rounding up to [`ALIGNMENT`]. Returns `None` if the cache has neither.
    pub fn known_bytes(&self, recipe: &Recipe) -> Option<PerSpace<u64>> {
        if let Some(candidate) = self.cache.candidates.get(recipe) {
            return Some(candidate.bytes);
        }
        let transient = self.cache.transient_bytes.get(&self.representative_recipe(recipe))?;
        let bytes = self.resident(recipe.offload).spaces + transient;
        Some(bytes.map(|bytes| bytes.saturating_sub(ALIGNMENT)))
    }

    /// Returns the representative of all offload choices that need the same bytes above their resident bytes.
    pub fn representative(&self, offload: Offload) -> Offload {
        representative(offload, self.layers())
    }

    /// Returns the recipe with full recompute, or with the fixed recompute levels of the request.
    pub fn full_recompute(&self, micro_batch: u32, offload: Offload) -> Recipe {
        let request = self.request;
        let all = || vec![RecomputeLevel::Block; request.layers()];
        request.recipe(micro_batch, request.fixed_recompute().unwrap_or_else(all), offload)
    }

    /// Returns whether bytes per space stay under the load lines.
    pub fn is_under_load_lines(&self, bytes: PerSpace<u64>) -> bool {
        bytes.fits(&self.request.arena_limits())
    }

    /// Returns whether bytes per space stay under the load lines of host and scratch file.
    pub fn is_under_host_lines(&self, bytes: PerSpace<u64>) -> bool {
        self.is_under_load_lines(PerSpace { device: 0, ..bytes })
    }

    /// Returns false if an offload choice does not fit even with full recompute, by cached measurements and resident
    /// bytes.
    pub fn may_fit(&self, micro_batch: u32, offload: Offload) -> bool {
        self.is_under_load_lines(self.min_bytes(&self.full_recompute(micro_batch, offload)))
    }

    /// Returns a lower bound of a recipe's bytes in each space: that of [`Measurer::known_bytes`], if there is one.
    /// Otherwise it is 0 for the device, and the resident bytes for the scratch file. For the host it is the resident
    /// bytes plus the layer inputs that are offloaded when the backward pass begins.
    pub fn min_bytes(&self, recipe: &Recipe) -> PerSpace<u64> {
        self.known_bytes(recipe).unwrap_or_else(|| {
            let Recipe { micro_batch, offload, .. } = *recipe;
            let inputs = u64::from(offload.inputs) * self.micro_batch_costs(micro_batch).input_bytes;
            let resident = self.resident(offload).spaces;
            // All offloaded inputs exist when the backward pass begins.
            PerSpace { device: 0, host: resident.host + self.in_flight(micro_batch) * inputs, file: resident.file }
        })
    }

    /// Returns the Programs of a recipe without its offload and without those that move files. They are built once for
    /// recipes in a row that differ only in choices of offload on which they do not depend.
    pub(super) fn without_offload(&self, recipe: &Recipe) -> Arc<ProgramSet> {
        let key = self.request.build_key(recipe);
        let lock = || self.built.lock().expect("no panic occurs while the lock is held");
        if let Some((_, set)) = lock().iter().find(|(known, _)| *known == key) {
            return Arc::clone(set);
        }
        let set = Arc::new(self.request.build(self.request.config, recipe, FilePrograms::Without));
        let ops: usize = set.programs.iter().flat_map(|program| &program.blocks).map(|block| block.ops.len()).sum();
        let room = self.request.device.arena_budget().0 / BUILT_PART_OF_ARENA;
        let most = (room / (ops * size_of::<Op>()).max(1) as u64).min(MAX_BUILT) as usize;
        let mut built = lock();
        built.push_back((key, Arc::clone(&set)));
        while built.len() > most {
            built.pop_front();
        }
        set
    }

    /// Returns the Programs of `plain`, which was built without offload, with the offload choice of a recipe applied to
    /// those that `selected` accepts.
    fn offload_selected(
        &self,
        plain: &ProgramSet,
        recipe: &Recipe,
        selected: &dyn Fn(ProgramKind) -> bool,
    ) -> ProgramSet {
        let request = self.request;
        let one_micro_batch = request.micro_batch_count(recipe) == 1;
        let set = offload_programs(plain, self.layers(), &recipe.offload, one_micro_batch, selected);
        request.stage_messages_on_host(request.move_to_scratch_file(set, recipe.offload))
    }

    /// Reads bytes and predicted seconds of the work done once per step from its Programs, or from the cache. The
    /// number of offloaded layer inputs does not matter. `plain` returns the Programs without offload.
    pub(super) fn per_step(&self, recipe: &Recipe, plain: &dyn Fn() -> Arc<ProgramSet>) -> Measured {
        let one_micro_batch = self.request.micro_batch_count(recipe) == 1;
        let key = PerStepKey { offload: Offload { inputs: 0, ..recipe.offload }, one_micro_batch };
        self.cache.per_step.get_or_compute(key, || {
            let set = self.offload_selected(&plain(), recipe, &|program| !depends_on_whole_recipe(program));
            self.measure_programs(&set, &[ProgramKind::BeginStep, ProgramKind::GradientNorm, ProgramKind::Update])
        })
    }

    /// Builds the Programs of a recipe that is not cached, and reads its bytes and predicted seconds from them.
    fn measure(&self, recipe: Recipe) -> Candidate {
        let request = self.request;
        let plain = self.without_offload(&recipe);
        let per_step = self.per_step(&recipe, &|| Arc::clone(&plain));
        let set = self.offload_selected(&plain, &recipe, &depends_on_whole_recipe);
        // A set that is not kept is freed before the others are measured.
        drop(plain);
        let passes = match request.optimizer {
            Some(_) => self.measure_programs(&set, &MICRO_BATCH_PROGRAMS),
            None => self.measure_programs(&set, &[ProgramKind::Evaluate]),
        };
        let earlier_micro_batches = f64::from(request.micro_batch_count(&recipe).saturating_sub(1));
        Candidate {
            bytes: per_step.bytes.max(passes.bytes),
            pass_bytes: passes.bytes,
            step_seconds: per_step.seconds + earlier_micro_batches * passes.seconds + passes.last_micro_batch_seconds,
            per_step_seconds: per_step.seconds,
            per_micro_batch_seconds: passes.seconds,
            overlap_seconds: passes.overlap_seconds,
            packed_bytes: Arc::default(),
            recipe,
        }
    }

    /// Returns whether the bytes needed while files are read and written satisfy `fits`. Files pass through small
    /// staging buffers, so the Programs that move them are rarely built to answer this.
    pub fn file_staging_fits(&self, recipe: &Recipe, fits: &dyn Fn(PerSpace<u64>) -> bool) -> bool {
        let resident = self.resident(recipe.offload).spaces;
        let on_host = if recipe.offload.is_nothing() { 0 } else { MAX_STAGING_BYTES };
        if fits(resident + PerSpace { device: MAX_STAGING_BYTES, host: on_host, file: 0 }) {
            return true;
        }
        // Gradients, layer inputs and the place of the update are in no file.
        let representative = self.representative(recipe.offload);
        let file = ScratchOffload { gradients: 0, ..representative.file };
        let offload = Offload { inputs: 0, gradients: 0, update: false, file, ..representative };
        let measure = || self.measure_file_staging(&with_offload(recipe, offload));
        let staging = self.cache.file_bytes.get_or_compute(offload, measure);
        fits((resident + staging).map(|bytes| bytes.saturating_sub(ALIGNMENT)))
    }

    /// Computes the bytes above the resident bytes while files are read and written, from the Programs that move files.
    fn measure_file_staging(&self, recipe: &Recipe) -> PerSpace<u64> {
        let (request, offload) = (self.request, recipe.offload);
        let set = request.build(request.config, recipe, FilePrograms::Only);
        let set = offload_programs(&set, self.layers(), &offload, false, &|_| true);
        let all = lower_bounds(&request.move_to_scratch_file(set, offload));
        all.saturating_sub(self.resident(offload).spaces)
    }

    /// Computes lower bounds of the bytes of a set of Programs, and predicts the seconds of its Programs of the `timed`
    /// kinds.
    fn measure_programs(&self, set: &ProgramSet, timed: &[ProgramKind]) -> Measured {
        let prices = self.request.prices();
        let seconds_of = |last: bool| prices.programs_seconds(set, timed, last);
        let seconds = seconds_of(false);
        let backward = set.program(ProgramKind::Backward).filter(|_| timed.contains(&ProgramKind::Backward));
        // The overlap is scaled by compute time: if copies take longer than computing, they do so throughout the pass.
        let programs = timed.iter().filter_map(|kind| set.program(*kind));
        let compute_seconds: f64 = programs.map(|program| prices.compute_seconds(set, program)).sum();
        let overlap = backward.map_or(0.0, |program| self.overlap_compute_seconds(set, program));
        let is_data_parallel = self.request.share.parallelism == Some(Parallelism::Data);
        Measured {
            bytes: lower_bounds(set),
            seconds,
            last_micro_batch_seconds: if is_data_parallel { seconds_of(true) } else { seconds },
            overlap_seconds: if compute_seconds > 0.0 { seconds * (overlap / compute_seconds).max(0.0) } else { 0.0 },
        }
    }

    /// Predicts the compute time of a backward pass after it has completed the gradients of the topmost layer.
    fn overlap_compute_seconds(&self, set: &ProgramSet, backward: &Program) -> f64 {
        let prices = self.request.prices();
        let first_layer = backward.blocks.iter().position(|block| block.name == "layer");
        let first_layer = first_layer.unwrap_or(backward.blocks.len());
        let before: f64 = backward.blocks[..first_layer].iter().map(|block| prices.block_seconds(set, block)).sum();
        let layers = backward.blocks.get(first_layer);
        let first = layers.map_or(0.0, |block| prices.block_seconds(set, block) / f64::from(block.repeat));
        prices.compute_seconds(set, backward) - before - first
    }

    /// Returns a lower bound of the device bytes above the resident bytes, for recompute `levels` without offload.
    pub fn transient_bytes_without_offload(&self, micro_batch: u32, levels: &[RecomputeLevel]) -> u64 {
        let plain = self.candidate(self.request.recipe(micro_batch, levels.to_vec(), Offload::NOTHING));
        plain.bytes.device.saturating_sub(self.resident(Offload::NOTHING).spaces.device)
    }

    /// Returns a lower bound of the device bytes with an offload choice, for recompute levels that need
    /// `transient_bytes` above the resident bytes without offload. Builds no Programs.
    pub fn min_device_bytes(&self, micro_batch: u32, transient_bytes: u64, offload: Offload) -> u64 {
        let costs = self.micro_batch_costs(micro_batch);
        let inputs = self.in_flight(micro_batch) * u64::from(offload.inputs) * costs.input_bytes;
        // If the head is fetched in blocks, the logits exist in blocks too.
        let logits = if self.streams_head(offload) { costs.logits_bytes } else { 0 };
        (self.resident(offload).spaces.device + transient_bytes).saturating_sub(inputs + logits + ALIGNMENT)
    }

    /// Returns the number of micro-batches in flight: their layer inputs are live at the same time.
    pub(super) fn in_flight(&self, micro_batch: u32) -> u64 {
        let share = &self.request.share;
        u64::from(share.in_flight(share.micro_batches_of(self.request.sequences, micro_batch) as u32))
    }

    /// Returns whether the device fetches the head in blocks of rows.
    pub(super) fn streams_head(&self, offload: Offload) -> bool {
        let kernels = Kernels::for_device(self.request.device);
        offload.streams_head(self.request.config.tied) && streams_head(self.request.config.vocab, kernels)
    }

    /// Returns the number of layers that the device computes.
    pub(super) fn layers(&self) -> u32 {
        self.request.layers() as u32
    }

    /// Returns predicted seconds and bytes of a micro-batch without offload, which are computed once per size.
    /// Estimates of offload choices start from them.
    pub(super) fn micro_batch_costs(&self, micro_batch: u32) -> MicroBatchCosts {
        self.cache.micro_batches.get_or_compute(micro_batch, || self.measure_micro_batch(micro_batch))
    }

    /// Returns the bytes and seconds of one layer under each recompute level.
    pub fn profile(&self, micro_batch: u32) -> Arc<Profile> {
        self.cache.profiles.get_or_compute(micro_batch, || Arc::new(measure_profile(self.request, micro_batch)))
    }

    /// Builds the Programs of a micro-batch without offload, and reads seconds and bytes from them.
    fn measure_micro_batch(&self, micro_batch: u32) -> MicroBatchCosts {
        let request = self.request;
        let set = request.build(
            request.config,
            &request.uniform(micro_batch, RecomputeLevel::Nothing),
            FilePrograms::Without,
        );
        let prices = request.prices();
        let kinds = match request.optimizer {
            Some(_) => &MICRO_BATCH_PROGRAMS[..],
            None => &[ProgramKind::Evaluate][..],
        };
        let pass_seconds = prices.programs_seconds(&set, kinds, false);
        let programs = kinds.iter().filter_map(|kind| set.program(*kind));
        let compute_seconds: f64 = programs.map(|program| prices.compute_seconds(&set, program)).sum();
        // If a pass waits for communication, it does so in all layers.
        let scale = if compute_seconds > 0.0 { pass_seconds / compute_seconds } else { 0.0 };
        let layer_seconds = |kind: ProgramKind| {
            let blocks = set.program(kind).into_iter().flat_map(|program| &program.blocks);
            let layers = blocks.filter(|block| block.name == "layer");
            layers.map(|block| prices.block_seconds(&set, block)).sum::<f64>() * scale / request.layers() as f64
        };
        let full_recompute = self.full_recompute(micro_batch, Offload::NOTHING);
        let logits = ["train.logits", "evaluate.logits"].iter().find_map(|name| set.find(name));
        let is_logits_product = |op: &Op| matches!(&op.kind, OpKind::Product { out, .. } if Some(out.tensor) == logits);
        let last = kinds.last().and_then(|kind| set.program(*kind));
        let loss = last.into_iter().flat_map(|program| &program.blocks);
        let logits_seconds = |block: &Block| {
            let ops = block.ops.iter().filter(|op| is_logits_product(op));
            f64::from(block.repeat) * ops.map(|op| prices.op_seconds(&set, op)).sum::<f64>()
        };
        let vocab = request.config.vocab;
        let head_block = &head_blocks(vocab, Kernels::for_device(request.device))[0];
        MicroBatchCosts {
            pass_seconds,
            layer_score_seconds: layer_seconds(ProgramKind::Score) + layer_seconds(ProgramKind::Reference),
            layer_forward_seconds: layer_seconds(match request.optimizer {
                Some(_) => ProgramKind::Forward,
                None => ProgramKind::Evaluate,
            }),
            layer_backward_seconds: layer_seconds(ProgramKind::Backward),
            full_recompute_bytes: self.transient_bytes_without_offload(micro_batch, &full_recompute.recompute),
            logits_bytes: logits.map_or(0, |logits| set.tensor(logits).bytes()),
            logits_seconds: loss.map(logits_seconds).sum(),
            head_block: head_block.end as f64 / vocab as f64,
            input_bytes: set.find("train.hidden").map_or(0, |hidden| set.tensor(hidden).bytes()),
        }
    }

    /// Returns one recompute level per layer, such that all together need the fewest bytes according to the profile of
    /// one layer. Returns `None` if the profile is empty.
    pub fn smallest_levels(&self, micro_batch: u32) -> Option<Vec<RecomputeLevel>> {
        let find = || self.profile(micro_batch).smallest_levels(self.request.layers());
        self.cache.smallest_levels.get_or_compute(micro_batch, find)
    }

    /// Returns the levels at a step of the byte budget, from the smallest (0) to no recompute ([`LEVEL_STEPS`]). Returns
    /// `None` if the profile is empty.
    pub(super) fn levels_at(&self, micro_batch: u32, step: u32) -> Option<Vec<RecomputeLevel>> {
        let smallest = self.smallest_levels(micro_batch)?;
        let choose = || {
            let profile = self.profile(micro_batch);
            choose_levels(&profile, smallest.len(), profile.budget_at(&smallest, step))
        };
        self.cache.levels.get_or_compute((micro_batch, step), choose)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::paper;
    use crate::testing;
    use plimsoll_core::{Budget, DType, HostSpec};
    use plimsoll_program::models::decoder::Scores;
    use plimsoll_program::models::preset;

    #[test]
    fn layer_seconds_belong_to_their_passes() {
        let (device, config) = (paper("rtx3090", Budget::DEVICE).unwrap(), preset("llama-3.2-1b").unwrap());
        let supervised = PlanRequest { precision: DType::Bf16, ..testing::request(&config, &device, 512, 4) };
        let scored = PlanRequest { scores: Scores::Present, ..supervised.clone() };
        let evaluated = PlanRequest { optimizer: None, evaluate: true, ..supervised.clone() };
        let costs = |request: &PlanRequest| Measurer::new(request).micro_batch_costs(4);
        let (plain, with_score, evaluation) = (costs(&supervised), costs(&scored), costs(&evaluated));
        let forward = plain.layer_forward_seconds;
        assert!(forward > 0.0 && plain.layer_backward_seconds > 1.5 * forward, "{plain:?}");
        assert_eq!((plain.layer_score_seconds, evaluation.layer_backward_seconds), (0.0, 0.0));
        for seconds in
            [with_score.layer_forward_seconds, with_score.layer_score_seconds, evaluation.layer_forward_seconds]
        {
            assert!((seconds / forward - 1.0).abs() < 0.05, "{seconds} for {forward}");
        }
        assert!(with_score.pass_seconds > plain.pass_seconds + 16.0 * 0.95 * forward);
    }

    #[test]
    fn offloaded_weights_are_read_once_more_by_a_score() {
        let (device, config) = (paper("rtx3070", Budget::DEVICE).unwrap(), preset("llama-3.2-1b").unwrap());
        let host = HostSpec { budget: Bytes::gib(64), ..HostSpec::NONE };
        let supervised = PlanRequest { precision: DType::Bf16, host, ..testing::request(&config, &device, 256, 1) };
        let scored = PlanRequest { scores: Scores::Present, ..supervised.clone() };
        let layers = config.layers as u32;
        let choice =
            Offload { optimizer: layers, gradients: layers, weights: layers, embedding: true, ..Offload::NOTHING };
        let seconds = |request: &PlanRequest| {
            let measurer = Measurer::new(request);
            let measured = measurer.candidate(measurer.full_recompute(1, choice)).step_seconds;
            (measurer.estimate_step_seconds(1, choice).unwrap(), measured)
        };
        let ((plain, plain_measured), (estimated, measured)) = (seconds(&supervised), seconds(&scored));
        let (more_estimated, more_measured) = (estimated - plain, measured - plain_measured);
        assert!(
            more_measured > 0.0 && (more_estimated / more_measured - 1.0).abs() < 0.25,
            "{more_estimated} for {more_measured}"
        );
    }
}
