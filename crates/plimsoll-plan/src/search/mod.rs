//! The search for the fastest recipe under the load lines of a device, its host and the scratch file.
//!
//! 1. `profile`: for each micro-batch size, a dynamic program over (layer, live bytes) chooses the recompute levels.
//! 2. `offload`: if recompute is not enough, or slower than copies, tensors are offloaded. `estimate` orders the
//!    choices.
//! 3. `measure`: each recipe is measured by its Programs: a lower bound of its bytes, and its predicted seconds.
//!    `residency` predicts the resident bytes of any offload choice, and `least_recompute` finds the levels that fit,
//!    with the corrections of `level_bytes`.
//! 4. The candidates are sorted by predicted time and packed in this order. The first one that fits is the plan
//!    (`packed`), unless one of its neighbors, which differ from it in one offload choice, is faster and fits.
//! 5. `lossy`: if none fits, lossy rungs are taken as far as the user allows them. Otherwise the outcome is a refusal
//!    with its remedies.
//!
//! `recipe_table` and `sharded_costs` serve the planner of teams (`team`), which needs many shares of a step without a
//! search for each.

mod estimate;
mod ladder;
mod least_memory;
mod least_recompute;
mod level_bytes;
mod lossy;
mod measure;
mod memo;
mod offload;
mod packed;
mod parallel;
mod plan_request;
mod profile;
mod recipe_table;
mod residency;
mod sharded_costs;
mod shared;

use crate::layout::lay_out;
use measure::Measurer;
use offload::OffloadGoal;
use plimsoll_core::{DeviceKind, Offload, Parallelism, Plan, Recipe, RecomputeLevel, Remedy, WorkKind};
use plimsoll_program::{Program, ProgramSet};
use std::cmp::Ordering;
use std::sync::Arc;

pub use ladder::{Ladder, ladder};
pub use least_memory::{LeastMemoryPlan, least_memory_plan};
pub(crate) use lossy::{LossySearch, lossy_option_sets, smallest_recipe};
pub(crate) use measure::{Candidate, MeasurementCache};
pub(crate) use memo::Memo;
pub(crate) use packed::{PackedCandidate, checkpoint_bytes};
pub(crate) use parallel::{join, parallel_map};
pub use plan_request::{LossyOptions, PinnedChoices, PlanOutcome, PlanRequest, TriedRecipe, with_lossy};
pub(crate) use recipe_table::{RecipeTable, SecondsBesidePasses};
pub(crate) use residency::resident_tensors;
pub(crate) use sharded_costs::{RankCosts, RecipeGoal, ShardedBytes, recipe_of_share, single_device_compute_seconds};
pub use shared::RecipeMeasurements;
pub(crate) use shared::kind_of;

/// Fraction by which the next candidate may be slower than one that did not fit after packing, without a new search for
/// offload choices.
const MAX_LOSS_BY_PACKING: f64 = 0.002;
/// Most neighbors of the fastest recipe, and of the faster ones found, that are measured.
const MAX_NEIGHBORS: usize = 40;

/// Returns recipes with the given micro-batch sizes, with bounds on their bytes and predicted seconds, in no order:
/// recipes without offload, and recipes that offload may make faster. If the user has pinned an offload choice, all
/// have it.
fn candidates(measurer: &Measurer, micro_batches: &[u32], goal: OffloadGoal) -> Vec<Candidate> {
    let mut list = candidates_with_one_choice(measurer, micro_batches);
    if measurer.request.pins.offload.is_none() {
        offload::add_candidates(measurer, micro_batches, goal, &mut list);
    }
    list
}

/// Returns recipes with each micro-batch size and the pinned offload choice; without offload if none is pinned.
fn candidates_with_one_choice(measurer: &Measurer, micro_batches: &[u32]) -> Vec<Candidate> {
    let offload = measurer.request.pins.offload.unwrap_or_default();
    micro_batches.iter().flat_map(|&micro_batch| candidates_with_offload(measurer, micro_batch, offload)).collect()
}

/// Returns recipes with one micro-batch size and one offload choice, with bounds on their bytes and predicted seconds.
/// The first one recomputes least. If it does not fit, others follow that recompute more.
fn candidates_with_offload(measurer: &Measurer, micro_batch: u32, offload: Offload) -> Vec<Candidate> {
    let request = measurer.request;
    let lightest = request.fixed_recompute().unwrap_or_else(|| vec![RecomputeLevel::Nothing; request.layers()]);
    let lightest = measurer.candidate(request.recipe(micro_batch, lightest, offload));
    let fits = measurer.fits(&lightest);
    let mut list = vec![lightest];
    if !fits && request.fixed_recompute().is_none() {
        list.extend(measurer.candidates_with_recompute(micro_batch, offload));
    }
    list
}

/// Finds the fastest plan of one device that fits, with the least loss of accuracy. If nothing fits, the outcome is a
/// refusal: the plan of the smallest recipe, with its remedies.
pub fn search(request: &PlanRequest) -> PlanOutcome {
    search_measured(request, &Arc::default())
}

/// Finds the fastest plan like [`search`], with the measurements of earlier searches.
pub fn search_measured(request: &PlanRequest, measurements: &Arc<RecipeMeasurements>) -> PlanOutcome {
    search_with(&LossySearch::with_measurements(request, measurements), |search, refused| {
        let mut remedies = lossy::remedies(search, refused);
        lossy::predict_peaks(search, refused, &mut remedies);
        remedies
    })
}

/// Finds the fastest plan of one device like [`search`], but returns `None` if nothing fits. The remedies, which take most
/// of the time of a refusal, are left out. `measurements` has those of earlier searches.
pub fn search_if_fits(request: &PlanRequest, measurements: &Arc<RecipeMeasurements>) -> Option<PlanOutcome> {
    let search = LossySearch::with_measurements(request, measurements);
    lossy_option_sets(request, &request.lossy.allow).iter().find_map(|rungs| {
        // The smallest recipe is found, or ruled out, before all others are measured.
        let packed = if search.has_fitting_recipe(rungs) { search.fastest(rungs, &mut vec![]) } else { None };
        packed.map(|packed| packed.into_outcome(&with_lossy(request, rungs), vec![]))
    })
}

/// Finds the fastest plan in which one of several devices does the whole step. The remedies of a refusal carry no
/// predicted peak, because under a remedy all devices are planned together anew.
pub(crate) fn search_for_team(search: &LossySearch) -> PlanOutcome {
    search_with(search, lossy::remedies)
}

/// Finds the fastest plan that fits, with the least loss of accuracy. If nothing fits, `remedies` computes the remedies
/// of the refusal.
fn search_with(search: &LossySearch, remedies: impl Fn(&LossySearch, &Plan) -> Vec<Remedy>) -> PlanOutcome {
    let mut tried = Vec::new();
    let request = search.request;
    for rungs in lossy_option_sets(request, &request.lossy.allow) {
        if let Some(packed) = search.fastest(&rungs, &mut tried) {
            return packed.into_outcome(&with_lossy(request, &rungs), tried);
        }
    }
    let smallest = search.smallest(&request.lossy.allow);
    let request = with_lossy(request, &smallest.recipe.rungs);
    let mut outcome = smallest.pack(&request).into_outcome(&request, tried);
    if !outcome.plan.fits {
        outcome.plan.needs = remedies(search, &outcome.plan);
    }
    outcome
}

/// Returns whether the smallest recipe fits after packing. No further lossy rungs are taken.
pub(crate) fn has_fitting_recipe(request: &PlanRequest) -> bool {
    has_fitting_recipe_with(request, &Arc::default())
}

/// Returns whether the smallest recipe fits, like [`has_fitting_recipe`]. `cache` has measurements of requests that
/// differ from this one only in load lines.
pub(crate) fn has_fitting_recipe_with(request: &PlanRequest, cache: &Arc<MeasurementCache>) -> bool {
    offload::smallest(&Measurer::with_cache(request, Arc::clone(cache)), Some(request.arena_bound())).is_some()
}

/// Finds the fastest recipe that fits after packing. If none of the usual candidates fits, begins with the `smallest`
/// recipe, however slow. Returns `None` if that does not fit either. Adds the considered recipes to `tried`, fastest
/// first.
fn fastest(
    measurer: &Measurer,
    smallest: impl FnOnce() -> Option<Candidate>,
    tried: &mut Vec<TriedRecipe>,
) -> Option<PackedCandidate> {
    let list = candidates(measurer, &measurer.request.micro_batch_sizes(), OffloadGoal::FASTEST);
    let mut search = RecipeSearch { measurer, list, neighbors_left: MAX_NEIGHBORS };
    let found = search.pack_fastest(f64::INFINITY).or_else(|| search.pack_smallest(smallest()?));
    let found = found.map(|(candidate, packed)| search.pack_faster_neighbors(candidate, packed));
    let RecipeSearch { mut list, .. } = search;
    list.sort_by(by_time);
    let charges = measurer.request.device.charges;
    tried.extend(list.iter().map(|candidate| candidate.tried(charges, measurer.fits(candidate))));
    found
}

/// Compares candidates by their predicted time, and by their bytes if that is equal.
fn by_time(a: &Candidate, b: &Candidate) -> Ordering {
    a.step_seconds.total_cmp(&b.step_seconds).then(a.bytes.device.cmp(&b.bytes.device))
}

/// The candidates of a search, which grow as it finds what fits.
struct RecipeSearch<'m, 'r> {
    measurer: &'m Measurer<'r>,
    list: Vec<Candidate>,
    /// Number of further neighbors that may be measured.
    neighbors_left: usize,
}

impl RecipeSearch<'_, '_> {
    /// Returns the fastest candidate that fits by its known bytes; `None` if none fits.
    fn fastest_fitting(&self) -> Option<Candidate> {
        let fitting = self.list.iter().filter(|candidate| self.measurer.fits(candidate));
        fitting.min_by(|a, b| by_time(a, b)).cloned()
    }

    /// Packs the fastest candidates until one fits. Returns `None` if all others take `bound` seconds or more.
    fn pack_fastest(&mut self, bound: f64) -> Option<(Candidate, PackedCandidate)> {
        let request = self.measurer.request;
        while let Some(candidate) = self.fastest_fitting().filter(|candidate| candidate.step_seconds < bound) {
            let packed = candidate.pack(request);
            if request.fits(&packed.layout) {
                return Some((candidate, packed));
            }
            // It takes more bytes than its lower bound: a little more recompute may be enough.
            let Recipe { micro_batch, offload, .. } = candidate.recipe;
            add_new(&mut self.list, self.measurer.candidates_with_recompute(micro_batch, offload));
            // Choices that were left out because they are slower than this candidate may now be the fastest.
            let enough = candidate.step_seconds * (1.0 + MAX_LOSS_BY_PACKING);
            let is_slower = |next: Candidate| next.step_seconds > enough;
            if bound == f64::INFINITY && self.fastest_fitting().is_none_or(is_slower) {
                add_new(&mut self.list, candidates(self.measurer, &request.micro_batch_sizes(), OffloadGoal::FASTEST));
            }
        }
        None
    }

    /// Packs the smallest recipe; `None` if it does not fit.
    fn pack_smallest(&mut self, smallest: Candidate) -> Option<(Candidate, PackedCandidate)> {
        let request = self.measurer.request;
        let fits = smallest.packed_bytes(request).fits(&request.arena_limits());
        self.list.retain(|known| known.recipe != smallest.recipe);
        self.list.push(smallest.clone());
        fits.then(|| (smallest.clone(), smallest.pack(request)))
    }

    /// Replaces a packed candidate by its fastest neighbor, as long as one is faster and fits. Holds the Programs of one
    /// candidate at a time.
    fn pack_faster_neighbors(&mut self, mut found: Candidate, mut packed: PackedCandidate) -> PackedCandidate {
        while self.add_neighbors(&found) {
            if self.fastest_fitting().is_none_or(|fastest| fastest.step_seconds >= found.step_seconds) {
                return packed;
            }
            drop(packed);
            match self.pack_fastest(found.step_seconds) {
                Some(faster) => (found, packed) = faster,
                None => return found.pack(self.measurer.request),
            }
        }
        packed
    }

    /// Measures the neighbors of a candidate that are not in the list. Returns whether there was one.
    fn add_neighbors(&mut self, found: &Candidate) -> bool {
        let is_new = |(size, choice): &(u32, Offload)| !has_offload(&self.list, *size, *choice);
        let neighbors = offload::neighbors(self.measurer, &found.recipe).into_iter().filter(is_new);
        let new: Vec<(u32, Offload)> = neighbors.take(self.neighbors_left).collect();
        self.neighbors_left -= new.len();
        for &(micro_batch, choice) in &new {
            add_new(&mut self.list, candidates_with_offload(self.measurer, micro_batch, choice));
        }
        !new.is_empty()
    }
}

/// Returns whether a candidate in the list has this micro-batch and offload choice.
fn has_offload(list: &[Candidate], micro_batch: u32, choice: Offload) -> bool {
    list.iter().any(|known| (known.recipe.micro_batch, known.recipe.offload) == (micro_batch, choice))
}

/// Adds the candidates whose recipe the list does not have.
fn add_new(list: &mut Vec<Candidate>, candidates: Vec<Candidate>) {
    for candidate in candidates {
        if list.iter().all(|known| known.recipe != candidate.recipe) {
            list.push(candidate);
        }
    }
}

/// Plans a given recipe: for a resumed run and for pinned choices. If it does not fit, the outcome is a refusal with
/// the peak of this recipe as its only remedy.
pub fn plan_recipe(request: &PlanRequest, recipe: &Recipe) -> PlanOutcome {
    let request = with_lossy(request, &recipe.rungs);
    PackedCandidate::new(&request, recipe.clone()).into_outcome(&request, Vec::new())
}

/// Plans the recipe with the fewest device bytes, with any combination of the allowed rungs.
pub fn plan_smallest(request: &PlanRequest) -> PlanOutcome {
    plan_recipe(request, &smallest_recipe(request, &request.lossy.allow, &Arc::default()).recipe)
}

/// Plans a given recipe for a rank. `like` is the outcome of another rank with the same recipe: its layout is taken if
/// the tensors of both are equal. A paper device of a sharded team never runs, so it also takes the other rank's
/// Programs, without the long ones that move files.
pub(crate) fn plan_recipe_like(request: &PlanRequest, recipe: &Recipe, like: &PlanOutcome) -> PlanOutcome {
    let request = with_lossy(request, &recipe.rungs);
    let set = match request.device.kind {
        DeviceKind::Paper if request.share.parallelism == Some(Parallelism::Sharded) => {
            let computes = |program: &&Program| !matches!(program.work, WorkKind::Load | WorkKind::Save);
            let programs = like.set.programs.iter().filter(computes).cloned().collect();
            ProgramSet { programs, phases: vec![], tensors: like.set.tensors.clone() }
        }
        _ => request.programs(recipe),
    };
    let layout = if set.tensors == like.set.tensors { like.layout.clone() } else { lay_out(&set) };
    let mut outcome = PackedCandidate { recipe: recipe.clone(), set, layout }.into_outcome(&request, Vec::new());
    let device = &mut outcome.plan.devices[0];
    if device.timeline.is_empty() {
        device.timeline.clone_from(&like.plan.devices[0].timeline);
    }
    outcome
}
