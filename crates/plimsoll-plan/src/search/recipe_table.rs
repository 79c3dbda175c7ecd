//! A table of the recipes that fit on one device, priced for any number of sequences. The planner of teams divides a
//! step by such tables, without a search for each division.

use super::measure::{Candidate, MeasurementCache, Measurer};
use super::offload::OffloadGoal;
use super::{PlanRequest, candidates, candidates_with_offload, offload};
use plimsoll_core::{Bytes, HostSpec, Offload, Recipe, Space};
use std::collections::HashSet;
use std::sync::Arc;

/// Most divisors of a number of sequences that are tried as micro-batch sizes.
const MAX_DIVISORS: usize = 3;

/// A function that returns the seconds of a step beside the passes of a recipe: the work that is done once per step by this
/// worker or a slower one, and the wait for the gradients of other workers.
pub(crate) type SecondsBesidePasses<'w> = &'w dyn Fn(&Candidate) -> f64;

/// The recipes that fit on one device, with their predicted seconds.
pub(crate) struct RecipeTable<'q> {
    measurer: Measurer<'q>,
    recipes: Vec<PricedRecipe>,
    /// Micro-batch sizes whose recipes have been tried for the table.
    micro_batches: HashSet<u32>,
}

/// A recipe whose lower bounds of bytes fit on the device, with its predicted seconds.
#[derive(Clone, Debug)]
struct PricedRecipe {
    candidate: Candidate,
    /// Whether the predicted seconds hold only for a step of one micro-batch, in which offload copies less than in a
    /// step of several.
    only_one_micro_batch: bool,
}

impl PricedRecipe {
    /// Returns the candidates that fit.
    fn fitting(measurer: &Measurer, candidates: Vec<Candidate>) -> Vec<PricedRecipe> {
        let fitting = candidates.into_iter().filter(|candidate| measurer.fits(candidate));
        let priced = |candidate: Candidate| {
            let one_micro_batch = measurer.request.micro_batch_count(&candidate.recipe) == 1;
            let only_one_micro_batch = one_micro_batch && !candidate.recipe.offload.is_nothing();
            PricedRecipe { only_one_micro_batch, candidate }
        };
        fitting.map(priced).collect()
    }

    /// Predicts the seconds of a step with `sequences` sequences, including waiting. A partial micro-batch takes as
    /// long as a full one. The seconds are infinite if the recipe is for one micro-batch and the step needs more.
    fn step_seconds(&self, sequences: u64, beside: SecondsBesidePasses) -> f64 {
        let count = sequences.div_ceil(u64::from(self.candidate.recipe.micro_batch));
        if self.only_one_micro_batch && count > 1 {
            return f64::INFINITY;
        }
        count as f64 * self.candidate.per_micro_batch_seconds + beside(&self.candidate)
    }

    /// Returns the most sequences that the recipe computes in a step of at most `seconds`, including waiting. The number is
    /// a multiple of the micro-batch.
    fn max_sequences(&self, seconds: f64, beside: SecondsBesidePasses) -> u64 {
        let Candidate { per_micro_batch_seconds, ref recipe, .. } = self.candidate;
        let micro_batch = u64::from(recipe.micro_batch);
        let most = if self.only_one_micro_batch { 1 } else { u64::MAX / micro_batch / 2 };
        // Rounded up first, then reduced until `step_seconds` agrees: both must round alike.
        let available = seconds - beside(&self.candidate);
        let mut count = ((available / per_micro_batch_seconds).max(0.0).ceil() as u64).min(most);
        while count > 0 && self.step_seconds(count * micro_batch, beside) > seconds {
            count -= 1;
        }
        count * micro_batch
    }
}

impl<'q> RecipeTable<'q> {
    /// Builds the table of a device. Its recipes suit steps in which the device computes about as many sequences as the
    /// request asks for. If the device can offload to its host, further recipes suit all `step_sequences` of a step.
    ///
    /// `cache_of` returns measurements of requests that differ from the given one only in load lines.
    pub fn new(
        request: &'q PlanRequest<'q>,
        step_sequences: u64,
        cache_of: &dyn Fn(&PlanRequest) -> Arc<MeasurementCache>,
    ) -> RecipeTable<'q> {
        let measurer = Measurer::with_cache(request, cache_of(request));
        let mut table = RecipeTable { measurer, recipes: Vec::new(), micro_batches: HashSet::new() };
        let sizes_up_to = |most: u64| match request.pins.micro_batch {
            Some(pinned) => vec![pinned],
            None => (0..32).map(|power| 1 << power).take_while(|&size| u64::from(size) <= most).collect(),
        };
        let micro_batches = sizes_up_to(request.sequences);
        table.micro_batches.extend(&micro_batches);
        let found = candidates(&table.measurer, &micro_batches, OffloadGoal::AnyStep);
        table.add(found);
        if request.host.budget > Bytes::ZERO && step_sequences > request.sequences {
            // The best offload for a step of one micro-batch differs from that for a step of several.
            let whole_step = PlanRequest { sequences: step_sequences, ..request.clone() };
            let measurer = Measurer::with_cache(&whole_step, cache_of(&whole_step));
            let found = candidates(&measurer, &sizes_up_to(step_sequences), OffloadGoal::AnyStep);
            table.recipes.extend(PricedRecipe::fitting(&measurer, found));
        }
        if table.recipes.is_empty() {
            // The smallest recipe, however slow it is.
            table.add(offload::smallest(&table.measurer, Some(request.arena_bound())).into_iter().collect());
        }
        table
    }

    /// Adds the candidates that fit.
    fn add(&mut self, candidates: Vec<Candidate>) {
        self.recipes.extend(PricedRecipe::fitting(&self.measurer, candidates));
    }

    /// Returns whether no recipe fits.
    pub fn is_empty(&self) -> bool {
        self.recipes.is_empty()
    }

    /// Returns the fastest recipe for a step with `sequences` sequences that uses at most `host_limit` bytes of host
    /// memory, and the seconds of the step including waiting. Returns `None` if the table has no recipe for them.
    pub fn fastest(&self, sequences: u64, host_limit: u64, beside: SecondsBesidePasses) -> Option<(&Candidate, f64)> {
        let within = self.recipes.iter().filter(|recipe| recipe.candidate.known_bytes().host <= host_limit);
        let priced = within.map(|recipe| (&recipe.candidate, recipe.step_seconds(sequences, beside)));
        priced.filter(|(_, seconds)| seconds.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Returns, for each recipe, the most sequences that the device computes in a step of at most `seconds`, and the bytes
    /// of host memory for that.
    pub fn sequences_within(&self, seconds: f64, beside: SecondsBesidePasses) -> impl Iterator<Item = (u64, u64)> {
        self.recipes
            .iter()
            .map(move |recipe| (recipe.max_sequences(seconds, beside), recipe.candidate.known_bytes().host))
    }

    /// Adds the fastest recipes that use at most `host` bytes of host memory.
    pub fn add_with_host(&mut self, host: Bytes) {
        let request = self.measurer.request;
        let request = PlanRequest { host: HostSpec { budget: host, ..request.host }, ..request.clone() };
        let measurer = self.measurer.with_request(&request);
        let mut sizes: Vec<u32> = self.micro_batches.iter().copied().collect();
        sizes.sort_unstable();
        self.extend_new(PricedRecipe::fitting(&measurer, candidates(&measurer, &sizes, OffloadGoal::AnyStep)));
    }

    /// Adds the recipes that the table does not have.
    fn extend_new(&mut self, found: Vec<PricedRecipe>) {
        let is_new =
            |priced: &PricedRecipe| self.recipes.iter().all(|known| known.candidate.recipe != priced.candidate.recipe);
        let new: Vec<PricedRecipe> = found.into_iter().filter(is_new).collect();
        self.recipes.extend(new);
    }

    /// Adds the recipe that uses the least host memory, and returns its bytes there: 0 if a recipe without host memory is
    /// in the table, and [`u64::MAX`] if no recipe fits.
    pub fn add_least_host(&mut self) -> u64 {
        if self.recipes.iter().any(|recipe| recipe.candidate.known_bytes().host == 0) {
            return 0;
        }
        let Some(least) = offload::least_in_space(&self.measurer, Space::Host, u64::MAX) else { return u64::MAX };
        let bytes = least.known_bytes().host;
        self.extend_new(PricedRecipe::fitting(&self.measurer, vec![least]));
        bytes
    }

    /// Adds recipes for `sequences` sequences with about as many micro-batches as the fastest recipe, and with twice as
    /// many. The micro-batches are as equal as possible.
    pub fn refine_near(&mut self, sequences: u64, host_limit: u64, beside: SecondsBesidePasses) {
        let Some((fastest, _)) = self.fastest(sequences, host_limit, beside) else { return };
        let (offload, count) = (fastest.recipe.offload, sequences.div_ceil(u64::from(fastest.recipe.micro_batch)));
        let counts = [count.saturating_sub(1), count, count + 1, 2 * count].into_iter().filter(|&count| count > 0);
        self.add_micro_batches(counts.map(|count| sequences.div_ceil(count)).collect(), offload);
    }

    /// Returns the fewest seconds of work that a recipe does once per step; infinite if the table is empty.
    pub fn least_per_step_seconds(&self) -> f64 {
        self.recipes.iter().map(|recipe| recipe.candidate.per_step_seconds).fold(f64::INFINITY, f64::min)
    }

    /// Returns the recipe that takes the fewest seconds per sequence, with these seconds; `None` if the table is empty.
    fn fastest_per_sequence(&self) -> Option<(&Candidate, f64)> {
        let per_sequence = |recipe: &PricedRecipe| {
            recipe.candidate.per_micro_batch_seconds / f64::from(recipe.candidate.recipe.micro_batch)
        };
        let priced = self.recipes.iter().map(|recipe| (&recipe.candidate, per_sequence(recipe)));
        priced.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Returns the seconds per sequence of the fastest recipe in long steps; infinite if the table is empty.
    pub fn seconds_per_sequence(&self) -> f64 {
        self.fastest_per_sequence().map_or(f64::INFINITY, |(_, seconds)| seconds)
    }

    /// Returns the seconds of a backward pass in which gradients are already exchanged, with the fastest recipe in long
    /// steps; 0 if the table is empty.
    pub fn overlap_seconds(&self) -> f64 {
        self.fastest_per_sequence().map_or(0.0, |(fastest, _)| fastest.overlap_seconds)
    }

    /// Adds recipes whose micro-batch size divides `sequences`, with the offload choice of the fastest recipe. The
    /// largest few divisors are tried that may fit.
    pub fn add_divisors(&mut self, sequences: u64, beside: SecondsBesidePasses) {
        let Some(offload) = self.fastest(sequences, u64::MAX, beside).map(|(fastest, _)| fastest.recipe.offload) else {
            return;
        };
        let sizes = self.recipes.iter().map(|recipe| u64::from(recipe.candidate.recipe.micro_batch));
        // The table has powers of two: sizes between the largest and the next power may fit.
        let most = (2 * sizes.max().unwrap_or(1) - 1).min(sequences);
        let divisors = (1..=most).rev().filter(|&size| sequences.is_multiple_of(size)).take(MAX_DIVISORS);
        self.add_micro_batches(divisors.collect(), offload);
    }

    /// Adds the recipes of new micro-batch sizes with the given offload choice.
    fn add_micro_batches(&mut self, micro_batches: Vec<u64>, offload: Offload) {
        if self.measurer.request.pins.micro_batch.is_some() {
            return;
        }
        for micro_batch in micro_batches.into_iter().map(|size| size as u32) {
            if self.micro_batches.insert(micro_batch) {
                let found = candidates_with_offload(&self.measurer, micro_batch, offload);
                self.add(found);
            }
        }
    }

    /// Removes a recipe that does not fit after packing. Recipes that recompute a little more take its place, or offload
    /// choices that were left out because they are slower.
    pub fn reject(&mut self, recipe: &Recipe) {
        self.recipes.retain(|priced| priced.candidate.recipe != *recipe);
        let mut smaller = self.measurer.candidates_with_recompute(recipe.micro_batch, recipe.offload);
        if !recipe.offload.is_nothing() {
            let mut sizes: Vec<u32> = self.micro_batches.iter().copied().collect();
            sizes.sort_unstable();
            smaller.extend(candidates(&self.measurer, &sizes, OffloadGoal::AnyStep));
        }
        smaller.retain(|candidate| candidate.recipe != *recipe);
        self.extend_new(PricedRecipe::fitting(&self.measurer, smaller));
    }
}
