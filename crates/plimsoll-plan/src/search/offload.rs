//! The choice of offloaded tensors: candidates that may be faster than recompute alone, and the smallest recipe of all.
//!
//! There are too many choices to measure all of them. `estimate` orders them by estimated time, and the search stops
//! when no further choice can win.

use super::PlanRequest;
use super::measure::{Candidate, Measurer};
use crate::bisection;
use plimsoll_core::{Offload, Parallelism, PerSpace, Recipe, RecomputeLevel, ScratchOffload, Space};
use std::collections::{HashMap, HashSet};

/// Most offload choices whose Programs a search builds to read bytes and seconds, the most promising first, for models of
/// many layers. Choices that fit and choices that do not fit count apart.
const MAX_MEASURED: usize = 48;
/// Most offload choices in place of [`MAX_MEASURED`], for models of few layers.
const MAX_MEASURED_SHALLOW: usize = 256;
/// Most layers of the choices of a shallow model, together.
const MAX_LAYERS: usize = 1280;
/// Most layers of the choices that are measured for a sharded rank or a pipeline stage, in place of [`MAX_MEASURED`]. Their
/// Programs are slow to write, because they write out every layer.
const MAX_LAYERS_IN_TEAM: usize = 256;
/// Fewest choices to which [`MAX_LAYERS_IN_TEAM`] limits a search.
const MIN_MEASURED_IN_TEAM: usize = 8;
/// Most recipes that a search for the smallest recipe packs until one fits.
const MAX_PACKED: usize = 64;
/// Fraction of the arena below which the lower bound of the smallest recipe is low enough to take it that it fits.
const CLEARLY_BELOW: f64 = 0.75;
/// Smallest fraction of the best step time that a further offload choice has to save, by estimate, for its Programs to
/// be built.
const MIN_GAIN: f64 = 0.0005;
/// Fraction by which an offload choice may be faster than its estimate, for a model of many layers.
const ESTIMATE_ERROR: f64 = 0.03;
/// Additional fraction for a model of one layer; less in proportion for more layers. The estimate starts each layer after
/// the one before, but the copies of the first and the last layers overlap with the work beside the layers.
const ESTIMATE_ERROR_OF_LAYER: f64 = 0.3;
/// Fraction by which the observed ratios of similar choices may differ, for a model of one layer. It falls with the number
/// of layers, to nothing at [`DEEP_LAYERS`].
const RATIO_ERROR_OF_LAYER: f64 = 0.4;
/// Fewest layers of a model for which one observed ratio stands for all similar choices.
const DEEP_LAYERS: f64 = 20.0;

/// Returns the offload choices from nothing to everything, layer by layer (for sharded ranks: by sixteenths of the
/// layers). If the host memory is short and there is a scratch file, choices use the file for the rest. A pinned choice
/// is the only one.
fn choices(measurer: &Measurer) -> Vec<Offload> {
    let request = measurer.request;
    if let Some(pinned) = request.pins.offload {
        return vec![pinned];
    }
    let (host, file) = (request.host.budget, request.host.file.budget);
    if host.0 == 0 && file.0 == 0 {
        return vec![Offload::NOTHING];
    }
    let mut list: Vec<Offload> =
        layer_choices(measurer).into_iter().flat_map(|choice| with_inputs_and_ends(measurer, choice)).collect();
    let ends = request.ends();
    list.retain(|choice| (ends.embedding || !choice.embedding) && (ends.head || !choice.head));
    if file.0 > 0 {
        list = list.into_iter().flat_map(|choice| with_scratch_file(measurer, choice)).collect();
    }
    let mut seen = HashSet::new();
    list.retain(|choice| seen.insert(*choice));
    list
}

/// Returns the choices that offload optimizer state, gradients and weights of more and more layers; the first one
/// offloads nothing.
fn layer_choices(measurer: &Measurer) -> Vec<Offload> {
    let request = measurer.request;
    let layers = request.layers() as u32;
    let step = if is_sharded(measurer) { layers.div_ceil(16) } else { 1 };
    let with = |optimizer, gradients, weights| Offload { optimizer, gradients, weights, ..Offload::NOTHING };
    let mut list = vec![Offload::NOTHING];
    for count in (0..layers).step_by(step as usize).map(|fewer| layers - fewer) {
        match request.optimizer.is_some() {
            true => list.extend([
                with(count, 0, 0),
                with(layers, count, 0),
                with(layers, 0, count),
                with(layers, layers, count),
            ]),
            false => list.push(with(0, 0, count)),
        }
    }
    list
}

/// Returns variants of a choice that also offload layer inputs, the embedding or the head. The choice itself is one of
/// them.
fn with_inputs_and_ends(measurer: &Measurer, base: Offload) -> Vec<Offload> {
    let request = measurer.request;
    let (layers, trained) = (request.layers() as u32, request.optimizer.is_some());
    let has_backward = trained && !request.is_storage_only();
    let inputs = if has_backward { vec![0, layers.div_ceil(2), layers] } else { vec![0] };
    // Also without offloaded optimizer state: a small host may have room for the ends only.
    let ends = if !trained || base.optimizer == layers || base.is_nothing() {
        vec![(false, false), (true, false), (false, true), (true, true)]
    } else {
        vec![(false, false)]
    };
    let extend = |(embedding, head)| inputs.iter().map(move |&inputs| Offload { inputs, embedding, head, ..base });
    ends.into_iter().flat_map(extend).collect()
}

/// Returns up to three variants of a choice, which keep different numbers of its offloaded tensors in the scratch file:
/// the fewest that the host memory requires, all of them, and halfway between. Optimizer state moves to the file first,
/// because it is used once per step. Returns an empty list if host memory or file are too small.
///
/// A device that is its own host can offload to the file only. It gets the variant with all tensors in the file, or an
/// empty list if the choice has tensors that cannot lie there.
fn with_scratch_file(measurer: &Measurer, choice: Offload) -> Vec<Offload> {
    let request = measurer.request;
    let with_count = |count: u32| with_count_in_file(choice, count);
    let most = choice.optimizer + choice.gradients + choice.weights;
    if request.is_own_host() {
        // A device that is its own host can offload to the file only.
        let all_in_file = choice.inputs == 0 && !choice.embedding && !choice.head && !choice.update;
        return if all_in_file { vec![with_count(most)] } else { vec![] };
    }
    let fits_on_host = |choice: Offload| measurer.resident(choice).spaces.host <= request.host.budget.0;
    if !fits_on_host(with_count(most)) {
        return vec![];
    }
    let least = bisection::smallest(0..u64::from(most), 0, |count| fits_on_host(with_count(count as u32))) as u32;
    let fits_in_file = |choice: &Offload| measurer.resident(*choice).spaces.file <= request.host.file.budget.0;
    [least, least.midpoint(most), most].map(with_count).into_iter().filter(fits_in_file).collect()
}

/// Keeps `count` of the offloaded tensors of a choice in the scratch file: optimizer state first, weights last.
fn with_count_in_file(choice: Offload, count: u32) -> Offload {
    let optimizer = count.min(choice.optimizer);
    let gradients = (count - optimizer).min(choice.gradients);
    let weights = (count - optimizer - gradients).min(choice.weights);
    Offload { file: ScratchOffload { optimizer, gradients, weights }, ..choice }
}

/// Returns each offload choice twice: with the update on the host, if that is possible, and with the update on the
/// device.
fn choices_with_update(measurer: &Measurer) -> impl Iterator<Item = Offload> {
    let own_host = measurer.request.is_own_host();
    let pinned = measurer.request.pins.offload.is_some();
    choices(measurer).into_iter().flat_map(move |choice| {
        let on_host = (choice.optimizer > 0 && !own_host && !pinned).then_some(Offload { update: true, ..choice });
        on_host.into_iter().chain([choice])
    })
}

/// An offload choice with its estimated time.
struct EstimatedChoice {
    /// Estimated seconds of a step.
    step_seconds: f64,
    /// Resident bytes on the host.
    host_bytes: u64,
    micro_batch: u32,
    choice: Offload,
}

/// Observed ratios of seconds predicted from Programs to seconds estimated without Programs. They correct the estimates
/// of similar choices.
struct EstimateCorrections {
    /// Fraction by which a choice of a new kind may be faster than its estimate.
    error: f64,
    /// Fraction by which a choice may be faster than its estimate, corrected by the observed ratio of a similar choice.
    ratio_error: f64,
    /// The observed ratio for each micro-batch size and representative offload choice.
    by_kind: HashMap<(u32, Offload), f64>,
    /// The smallest observed ratio for each micro-batch size.
    smallest: HashMap<u32, f64>,
}

impl EstimateCorrections {
    /// Returns the corrections for a model of `layers` layers, before anything is observed.
    fn new(layers: usize) -> EstimateCorrections {
        let layers = layers.max(1) as f64;
        let error = ESTIMATE_ERROR + ESTIMATE_ERROR_OF_LAYER / layers;
        let ratio_error = RATIO_ERROR_OF_LAYER * (1.0 / layers - 1.0 / DEEP_LAYERS).max(0.0);
        EstimateCorrections { error, ratio_error, by_kind: HashMap::new(), smallest: HashMap::new() }
    }

    /// Returns the factor by which to multiply an estimate: the observed ratio of this kind. For a new kind, the factor
    /// is cautious: below the smallest ratio of this micro-batch size, or below 1 if there is none.
    fn factor(&self, micro_batch: u32, representative: Offload) -> f64 {
        let cautious = || self.smallest.get(&micro_batch).copied().unwrap_or(1.0) * (1.0 - self.error);
        self.by_kind.get(&(micro_batch, representative)).copied().unwrap_or_else(cautious)
    }

    /// Returns the corrected estimate of the fastest unmeasured choice of a kind. Returns `None` if the kind has none, or if
    /// no choice can be faster than `best`: by the observed ratio of this kind or, for a new kind, by the estimate itself,
    /// both slightly lowered.
    fn promising_seconds(&self, kind: &ChoicesOfKind, best: f64) -> Option<f64> {
        let estimated = kind.choices.last()?.step_seconds;
        let observed = self.by_kind.get(&(kind.micro_batch, kind.representative)).copied();
        let bound = estimated * observed.map_or(1.0 - self.error, |ratio| ratio * (1.0 - self.ratio_error));
        (bound < best * (1.0 - MIN_GAIN)).then(|| estimated * self.factor(kind.micro_batch, kind.representative))
    }

    /// Records an observed ratio of seconds predicted from Programs to estimated seconds.
    fn record(&mut self, micro_batch: u32, representative: Offload, factor: f64) {
        self.by_kind.insert((micro_batch, representative), factor);
        self.smallest.entry(micro_batch).and_modify(|least| *least = least.min(factor)).or_insert(factor);
    }
}

/// Returns the offload choices whose estimated step takes less than `slowest` seconds, fastest first. Choices with too
/// many resident bytes for host or scratch file are left out.
fn estimate_choices(measurer: &Measurer, micro_batches: &[u32], slowest: f64) -> Vec<EstimatedChoice> {
    let mut list = Vec::new();
    let offloads = |choice: &Offload| !choice.is_nothing() && resident_bytes_fit(measurer, *choice);
    for choice in choices_with_update(measurer).filter(offloads) {
        for &micro_batch in micro_batches {
            match measurer.estimate_step_seconds(micro_batch, choice) {
                Some(step_seconds) if step_seconds < slowest => {
                    let host_bytes = measurer.resident(choice).spaces.host;
                    list.push(EstimatedChoice { step_seconds, host_bytes, micro_batch, choice });
                }
                _ => {}
            }
        }
    }
    list.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds).then(a.host_bytes.cmp(&b.host_bytes)));
    list
}

/// The estimated choices of one kind that have not been measured, slowest first.
struct ChoicesOfKind {
    micro_batch: u32,
    representative: Offload,
    choices: Vec<EstimatedChoice>,
}

/// Groups choices by micro-batch size and representative. `estimates` are sorted, fastest first.
fn group_by_kind(measurer: &Measurer, estimates: Vec<EstimatedChoice>) -> Vec<ChoicesOfKind> {
    let mut kinds: Vec<ChoicesOfKind> = Vec::new();
    let mut place: HashMap<(u32, Offload), usize> = HashMap::new();
    for estimate in estimates.into_iter().rev() {
        let (micro_batch, representative) = (estimate.micro_batch, measurer.representative(estimate.choice));
        let number = *place.entry((micro_batch, representative)).or_insert_with(|| {
            kinds.push(ChoicesOfKind { micro_batch, representative, choices: vec![] });
            kinds.len() - 1
        });
        kinds[number].choices.push(estimate);
    }
    kinds
}

/// The recipes for which a search looks among the offload choices.
#[derive(Clone, Copy, Debug)]
pub(super) enum OffloadGoal {
    /// For each choice that is measured, the one with the least recompute: the caller compares them in steps of other
    /// lengths, too.
    AnyStep,
    /// The fastest one that takes fewer than these seconds a step. Others need not be complete.
    FasterThan(f64),
}

impl OffloadGoal {
    /// The fastest recipe.
    pub const FASTEST: OffloadGoal = OffloadGoal::FasterThan(f64::INFINITY);
}

/// Adds candidates with offload that could be faster than those in `list`.
///
/// Programs are built for the choice with the least corrected estimate of its time, until none can be faster than the
/// best that fits. The ratio of the seconds predicted from Programs to the estimate corrects the estimates of similar
/// choices.
pub(super) fn add_candidates(measurer: &Measurer, micro_batches: &[u32], goal: OffloadGoal, list: &mut Vec<Candidate>) {
    let best_of = |list: &[Candidate]| fastest(measurer, list).map(|best| best.step_seconds);
    let bound = if let OffloadGoal::FasterThan(seconds) = goal { seconds } else { f64::INFINITY };
    let mut best = best_of(list).unwrap_or(f64::INFINITY).min(bound);
    let is_pipeline = measurer.request.share.parallelism == Some(Parallelism::Pipeline);
    let layers = measurer.request.layers();
    let most = match is_sharded(measurer) || is_pipeline {
        true => (MAX_LAYERS_IN_TEAM / layers).clamp(MIN_MEASURED_IN_TEAM, MAX_MEASURED),
        false => (MAX_LAYERS / layers).clamp(MAX_MEASURED, MAX_MEASURED_SHALLOW),
    };
    let (mut fitting_left, mut misses_left) = (most, most);
    let mut corrections = EstimateCorrections::new(layers);
    let slowest = best / (1.0 - corrections.error);
    let mut kinds = group_by_kind(measurer, estimate_choices(measurer, micro_batches, slowest));
    while fitting_left > 0 && misses_left > 0 {
        let corrected = |kind: &ChoicesOfKind| corrections.promising_seconds(kind, best);
        let promising = (0..kinds.len()).filter_map(|number| Some((number, corrected(&kinds[number])?)));
        let Some((number, _)) = promising.min_by(|a, b| a.1.total_cmp(&b.1)) else { break };
        let EstimatedChoice { step_seconds, micro_batch, choice, .. } =
            kinds[number].choices.pop().expect("it has an estimate");
        if !measurer.may_fit(micro_batch, choice) {
            continue;
        }
        let level_bound = match goal {
            OffloadGoal::AnyStep => f64::INFINITY,
            OffloadGoal::FasterThan(_) => best * (1.0 - MIN_GAIN),
        };
        let found = measurer.candidates_faster_than(level_bound, micro_batch, choice);
        match found.least_seconds {
            Some(seconds) => {
                corrections.record(micro_batch, kinds[number].representative, seconds / step_seconds);
                best = best_of(&found.list).map_or(best, |seconds| seconds.min(best));
                fitting_left -= 1;
            }
            // Without a recipe, known bytes of similar choices were enough to tell, and no Programs were built.
            None => misses_left -= usize::from(!found.list.is_empty()),
        }
        list.extend(found.list);
    }
}

/// Returns the micro-batches and offload choices that differ from a recipe's in one thing: half or twice the micro-batch,
/// one kind of tensors offloaded for fewer or more layers, or the place of the embedding, the head or the update.
/// Estimates are inexact, so the fastest choice need not be among those that were measured. Empty for a recipe without
/// offload or with a scratch file, if the choice is pinned, and for devices in this process.
pub(super) fn neighbors(measurer: &Measurer, recipe: &Recipe) -> Vec<(u32, Offload)> {
    let (request, base) = (measurer.request, recipe.offload);
    // A device in this process shares its load line with the planner, so planning has to take little memory.
    let in_process = request.device.in_process();
    if base.is_nothing() || request.pins.offload.is_some() || in_process || !base.file.is_nothing() {
        return vec![];
    }
    let layers = request.layers() as u32;
    let counts = |count: u32| {
        let near = [Some(0), Some(count / 2), count.checked_sub(1), Some(count + 1), Some(layers)];
        near.into_iter().flatten().filter(move |near| *near != count && *near <= layers)
    };
    let mut choices: Vec<Offload> = counts(base.inputs).map(|inputs| Offload { inputs, ..base }).collect();
    choices.extend(counts(base.gradients).map(|gradients| Offload { gradients, ..base }));
    choices.extend(counts(base.weights).map(|weights| Offload { weights, ..base }));
    choices.extend(counts(base.optimizer).map(|optimizer| Offload { optimizer, ..base }));
    choices.extend([Offload { embedding: !base.embedding, ..base }, Offload { head: !base.head, ..base }]);
    choices.push(Offload { update: !base.update, ..base });
    let mut seen = HashSet::new();
    choices.retain(|choice| seen.insert(*choice));
    choices.retain(|choice| is_possible(request, choice) && resident_bytes_fit(measurer, *choice));
    let size = recipe.micro_batch;
    let sizes = request.micro_batch_sizes().into_iter().filter(|other| *other == size / 2 || *other == size * 2);
    sizes.map(|size| (size, base)).chain(choices.into_iter().map(|choice| (size, choice))).collect()
}

/// Returns whether a choice offloads something, only tensors that the device has, and each kind of state only for all
/// layers once the next kind is offloaded, like the choices of `layer_choices`.
fn is_possible(request: &PlanRequest, choice: &Offload) -> bool {
    let (ends, trained, layers) = (request.ends(), request.optimizer.is_some(), request.layers() as u32);
    let Offload { optimizer, gradients, weights, inputs, .. } = *choice;
    let holds_optimizer = !trained || optimizer == layers || (gradients == 0 && weights == 0);
    let holds_gradients = weights == 0 || gradients == 0 || gradients == layers;
    let trains = trained || (optimizer == 0 && gradients == 0 && inputs == 0);
    let has_ends = (ends.embedding || !choice.embedding) && (ends.head || !choice.head);
    let updates = optimizer > 0 || !choice.update;
    holds_optimizer && holds_gradients && trains && has_ends && updates && !choice.is_nothing()
}

/// Returns whether host and scratch file can hold the resident bytes of a choice.
fn resident_bytes_fit(measurer: &Measurer, choice: Offload) -> bool {
    let (resident, host) = (measurer.resident(choice).spaces, &measurer.request.host);
    resident.host <= host.budget.0 && resident.file <= host.file.budget.0
}

/// Returns whether the device is a rank of a sharded team.
fn is_sharded(measurer: &Measurer) -> bool {
    measurer.request.share.parallelism == Some(Parallelism::Sharded)
}

/// Returns the fastest candidate that fits by its lower bounds; `None` if none fits.
fn fastest<'c>(measurer: &Measurer, list: &'c [Candidate]) -> Option<&'c Candidate> {
    let fitting = list.iter().filter(|candidate| measurer.fits(candidate));
    fitting.min_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds))
}

/// Returns the recipe with the fewest device bytes that stays under the load lines of host and scratch file. Returns
/// `None` if it needs `bound` device bytes or more. Without a bound there is always a result. The result does not
/// depend on earlier measurements.
pub(super) fn smallest(measurer: &Measurer, bound: Option<u64>) -> Option<Candidate> {
    let fits_on_host = |bytes: PerSpace<u64>| measurer.is_under_host_lines(bytes);
    let packs = |found: &Candidate| {
        let is_below = |bound| found.packed_bytes(measurer.request).device < bound;
        measurer.packs_on_host(found) && bound.is_none_or(is_below)
    };
    smallest_in_space(measurer, Space::Device, &fits_on_host, bound, &packs).or_else(|| {
        // Nothing fits under the host's load line: the refusal shows a recipe without offload.
        let micro_batch = measurer.request.micro_batch_sizes()[0];
        bound.is_none().then(|| measurer.candidate(measurer.full_recompute(micro_batch, Offload::NOTHING)))
    })
}

/// Returns whether any of the small recipes probably fits by its lower bounds. None is packed. If the result is false, a
/// search that needs any recipe is taken to have none.
pub(super) fn may_fit(measurer: &Measurer) -> bool {
    let bound = measurer.request.arena_bound();
    let fits_on_host = |bytes: PerSpace<u64>| measurer.is_under_host_lines(bytes);
    let small = SmallRecipes::below(measurer, Space::Device, &fits_on_host, bound);
    let Some(first) = small.recipes.first() else { return false };
    if (first.min_bytes.device as f64) < CLEARLY_BELOW * bound as f64 {
        return true;
    }
    // If any fits, the first mostly does.
    measurer.fits(&measurer.candidate(small.recipe(measurer, first.level, first.offload)))
        || small.least(measurer, &fits_on_host, &HashSet::new()).is_some()
}

/// Returns the recipe that fits on the device with the fewest bytes of the host, or of the scratch file. Returns `None` if
/// no recipe fits, or if each needs `bound` bytes or more. The recipe is packed.
pub(super) fn least_in_space(measurer: &Measurer, space: Space, bound: u64) -> Option<Candidate> {
    let request = measurer.request;
    let packed_bytes = |found: &Candidate| found.packed_bytes(request).get(space);
    let packs =
        |found: &Candidate| measurer.is_under_load_lines(found.packed_bytes(request)) && packed_bytes(found) < bound;
    smallest_in_space(measurer, space, &|bytes| measurer.is_under_load_lines(bytes), Some(bound), &packs)
}

/// Returns the recompute levels that may need the fewest bytes: full recompute, the smallest mixture, and each level
/// for all layers.
fn small_recompute_levels(measurer: &Measurer, micro_batch: u32) -> Vec<Vec<RecomputeLevel>> {
    let request = measurer.request;
    let mut levels = vec![measurer.full_recompute(micro_batch, Offload::NOTHING).recompute];
    if request.fixed_recompute().is_none() {
        let uniform = |&level: &RecomputeLevel| vec![level; request.layers()];
        let uniform = RecomputeLevel::ALL.iter().filter(|_| !is_sharded(measurer)).map(uniform);
        for other in measurer.smallest_levels(micro_batch).into_iter().chain(uniform) {
            if !levels.contains(&other) {
                levels.push(other);
            }
        }
    }
    levels
}

/// Returns variants of a choice that need no more device bytes: with the update on the host, and with all layer inputs
/// offloaded as well.
fn smaller_variants(measurer: &Measurer, choice: Offload) -> [Offload; 2] {
    let update = Offload { update: choice.optimizer > 0 && !measurer.request.is_own_host(), ..choice };
    [update, Offload { inputs: measurer.request.layers() as u32, ..update }]
}

/// A combination of an offload choice and recompute levels, with a lower bound of its bytes.
#[derive(Clone, Copy)]
struct SmallRecipe {
    min_bytes: PerSpace<u64>,
    offload: Offload,
    /// Index in [`SmallRecipes::levels`].
    level: usize,
}

/// Recipes that may need fewer than `bound` bytes in a space, in the order of their lower bounds.
struct SmallRecipes {
    space: Space,
    bound: u64,
    micro_batch: u32,
    /// The result of [`small_recompute_levels`].
    levels: Vec<Vec<RecomputeLevel>>,
    /// For each of `levels`, the bytes on the device above the resident bytes, without offload.
    transient: Vec<u64>,
    recipes: Vec<SmallRecipe>,
}

impl SmallRecipes {
    /// Finds the recipes with lower bounds that satisfy `fits` and are below `bound` bytes in `space`.
    fn below(measurer: &Measurer, space: Space, fits: &dyn Fn(PerSpace<u64>) -> bool, bound: u64) -> SmallRecipes {
        let micro_batch = measurer.request.micro_batch_sizes()[0];
        let levels = small_recompute_levels(measurer, micro_batch);
        let transient: Vec<u64> =
            levels.iter().map(|levels| measurer.transient_bytes_without_offload(micro_batch, levels)).collect();
        let mut recipes: Vec<SmallRecipe> = Vec::new();
        for offload in choices_with_update(measurer).filter(|choice| resident_bytes_fit(measurer, *choice)) {
            let resident = measurer.resident(offload).spaces;
            recipes.extend(transient.iter().enumerate().map(|(level, transient)| {
                let device = measurer.min_device_bytes(micro_batch, *transient, offload);
                SmallRecipe { min_bytes: PerSpace { device, ..resident }, offload, level }
            }));
        }
        recipes.retain(|recipe| recipe.min_bytes.get(space) < bound && fits(recipe.min_bytes));
        // An update on the device never needs less device memory: it helps only if the host lacks memory for its own
        // update.
        recipes.sort_by_key(|SmallRecipe { min_bytes, offload, level }| {
            (min_bytes.get(space), offload.optimizer, !offload.update, *level)
        });
        SmallRecipes { space, bound, micro_batch, levels, transient, recipes }
    }

    fn recipe(&self, measurer: &Measurer, level: usize, offload: Offload) -> Recipe {
        measurer.request.recipe(self.micro_batch, self.levels[level].clone(), offload)
    }

    /// Returns the recipe with the fewest bytes whose lower bounds satisfy `fits`, apart from those in `excluded`.
    fn least(
        &self,
        measurer: &Measurer,
        fits: &dyn Fn(PerSpace<u64>) -> bool,
        excluded: &HashSet<Recipe>,
    ) -> Option<Candidate> {
        let predicted_from_full_recompute = |offload: Offload, level: usize| {
            let full = measurer.known_bytes(&self.recipe(measurer, 0, offload))?;
            Some(predict_from_full_recompute(full, self.transient[0], self.transient[level]))
        };
        let (mut least, mut found) = (self.bound, None);
        for small in &self.recipes {
            let SmallRecipe { min_bytes, offload, level } = *small;
            if min_bytes.get(self.space) >= least {
                break;
            }
            let recipe = self.recipe(measurer, level, offload);
            let is_too_large = |bytes: PerSpace<u64>| bytes.get(self.space) >= least || !fits(bytes);
            let known = measurer.known_bytes(&recipe).or_else(|| predicted_from_full_recompute(offload, level));
            if known.is_some_and(is_too_large) || excluded.contains(&recipe) {
                continue;
            }
            let variants = smaller_variants(measurer, offload).into_iter().filter(|variant| *variant != offload);
            let mut variants =
                variants.filter_map(|variant| measurer.known_bytes(&self.recipe(measurer, level, variant)));
            if self.space == Space::Device && variants.any(|bytes| bytes.device >= least) {
                continue;
            }
            let candidate = measurer.candidate(recipe);
            if !is_too_large(candidate.bytes) && measurer.file_staging_fits(&candidate.recipe, fits) {
                (least, found) = (candidate.bytes.get(self.space), Some(candidate));
            }
        }
        found
    }
}

/// Returns the recipe with the fewest bytes in a space. The lower bounds of the recipe must satisfy `fits`, and its
/// packed arenas `packs`. Returns `None` if no recipe does so with fewer than `bound` bytes. Recipes are tried in the
/// order of their lower bounds.
fn smallest_in_space(
    measurer: &Measurer,
    space: Space,
    fits: &dyn Fn(PerSpace<u64>) -> bool,
    bound: Option<u64>,
    packs: &dyn Fn(&Candidate) -> bool,
) -> Option<Candidate> {
    let small = SmallRecipes::below(measurer, space, fits, bound.unwrap_or(u64::MAX));
    let mut does_not_pack = HashSet::new();
    while does_not_pack.len() < MAX_PACKED {
        let found = small.least(measurer, fits, &does_not_pack)?;
        if packs(&found) {
            return Some(found);
        }
        does_not_pack.insert(found.recipe);
    }
    None
}

/// Predicts a lower bound of an offload choice's bytes at other recompute levels, from its bytes `full` with full
/// recompute. `full_transient` and `transient` are the bytes above the resident bytes without offload: with full
/// recompute, and at the other levels.
fn predict_from_full_recompute(full: PerSpace<u64>, full_transient: u64, transient: u64) -> PerSpace<u64> {
    let uncertainty = full_transient / 4;
    PerSpace {
        device: (full.device + transient).saturating_sub(full_transient + uncertainty),
        host: full.host.saturating_sub(uncertainty),
        file: full.file,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, HostSpec, Link};
    use plimsoll_program::models::{ModelConfig, preset};

    #[test]
    fn no_recipe_fits_where_none_may_fit() {
        let config = ModelConfig { layers: 3, ..preset("smollm2-135m").unwrap() };
        let mut counts = [0; 2];
        for mib in (60..660).step_by(20) {
            let device = testing::device(1.0, Bytes::mib(mib), Link::MEMORY);
            let device = DeviceSpec { kind: DeviceKind::Paper, ..device };
            for host in [0, 80, 600] {
                let host = HostSpec { budget: Bytes::mib(host), ..HostSpec::NONE };
                let request = PlanRequest { host, ..testing::request(&config, &device, 64, 4) };
                // Each search begins without measurements of the other.
                let may_fit = may_fit(&Measurer::new(&request));
                let found = smallest(&Measurer::new(&request), Some(request.arena_bound()));
                assert!(may_fit || found.is_none(), "{mib} MiB, {host:?}: {found:?}");
                counts[usize::from(found.is_some())] += 1;
            }
        }
        assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    }
}
