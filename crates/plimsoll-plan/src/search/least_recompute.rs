//! The least recompute with which a recipe fits, for a given micro-batch and offload choice.
//!
//! Recompute levels are those of one of a few fixed *byte budgets*, numbered from 0 to [`LEVEL_STEPS`], so that more memory
//! never leads to more recompute. Writing the Programs of a recipe is slow, so the search measures few budgets: it predicts
//! the bytes of all from the profile of one layer, corrected by those that it has measured before (`level_bytes`).

use super::level_bytes::interpolate;
use super::measure::{Candidate, Measurer};
use super::profile::{LEVEL_STEPS, Profile};
use plimsoll_core::{Offload, RecomputeLevel};
use std::sync::Arc;

/// Most byte budgets of a search that follow predictions. Further ones halve the range in question.
const MAX_PREDICTED: u32 = 5;
/// Byte budgets by which the largest that fits may exceed its prediction.
const PREDICTION_MARGIN: u32 = 2;

/// The recipes of an offload choice that a search has measured.
#[derive(Default)]
pub(super) struct LevelCandidates {
    /// All measured recipes. Possibly none fits.
    pub list: Vec<Candidate>,
    /// Predicted seconds of a step below which no recipe of the choice gets that fits. `None` if none is known to fit, nor
    /// known to be too slow where it may fit.
    pub least_seconds: Option<f64>,
}

impl LevelCandidates {
    fn add(&mut self, candidate: Candidate) {
        if self.list.iter().all(|known| known.recipe != candidate.recipe) {
            self.list.push(candidate);
        }
    }

    /// Lowers `least_seconds`, if it is larger.
    fn lower(&mut self, seconds: f64) {
        self.least_seconds = Some(self.least_seconds.map_or(seconds, |least| least.min(seconds)));
    }
}

/// The search for the largest byte budget whose levels fit.
struct LevelSearch<'m, 'r> {
    measurer: &'m Measurer<'r>,
    micro_batch: u32,
    offload: Offload,
    profile: Arc<Profile>,
    /// The levels of budget 0.
    smallest: Vec<RecomputeLevel>,
    /// Bytes on the device in addition to those of the profile, which knows neither resident bytes nor offload.
    base: f64,
    /// Whether `base` is exact, or read from Programs.
    base_known: bool,
    /// Whether full recompute was measured.
    full_measured: bool,
    /// Seconds of a step. Recipes that take as long or longer are of no use to the caller.
    bound: f64,
}

impl LevelSearch<'_, '_> {
    /// Returns the bytes of the profile under a byte budget.
    fn profile_bytes(&self, number: u32) -> f64 {
        self.profile.budget_at(&self.smallest, number) as f64
    }

    /// Returns the largest budget from `low` up to, but without, `high` that fits by its predicted bytes; `None` if none
    /// does.
    fn predict_last_fitting(&self, low: u32, high: u32) -> Option<u32> {
        let room = self.measurer.request.device.arena_budget().0 as f64 - self.base;
        let corrections = self.measurer.level_bytes.of_budgets(self.micro_batch);
        let fits = |number: &u32| self.profile_bytes(*number) + interpolate(&corrections, *number) <= room;
        (low..high).rev().find(fits)
    }

    fn set_base(&mut self, base: f64) {
        (self.base, self.base_known) = (base, true);
        let Self { measurer, micro_batch, offload, .. } = *self;
        let resident = measurer.resident(offload).spaces.device as f64;
        measurer.level_bytes.record_offload(micro_batch, measurer.representative(offload), base - resident);
    }

    /// Measures `base` with full recompute. Returns whether that fits, and adds the recipe to `found`.
    fn measure_base(&mut self, found: &mut LevelCandidates) -> bool {
        let (measurer, micro_batch) = (self.measurer, self.micro_batch);
        // The bytes freed by the offload are taken to be equal with all levels.
        let plain = measurer.micro_batch_costs(micro_batch).full_recompute_bytes;
        let full = measurer.candidate(measurer.full_recompute(micro_batch, self.offload));
        self.set_base(full.pass_bytes.device as f64 - plain as f64);
        self.full_measured = true;
        let fits = measurer.is_under_load_lines(full.bytes);
        found.add(full);
        fits
    }

    /// Learns from the bytes of a measured budget. The first one tells `base`, if that is not known.
    fn record_bytes(&mut self, number: u32, measured: &Candidate) {
        let above_profile = measured.pass_bytes.device as f64 - self.profile_bytes(number);
        let level_bytes = &self.measurer.level_bytes;
        if self.base_known {
            level_bytes.record_budget(self.micro_batch, number, above_profile - self.base);
        } else {
            let corrections = level_bytes.of_budgets(self.micro_batch);
            self.set_base(above_profile - interpolate(&corrections, number));
        }
    }

    /// Returns a lower bound of the seconds with budgets from `low` up to, but without, `high`, after `fitting` was measured
    /// below them. They recompute less, as far as they are predicted to fit.
    fn least_seconds_above(&self, fitting: &Candidate, low: u32, high: u32) -> f64 {
        if low >= high {
            return fitting.step_seconds;
        }
        let last = (self.predict_last_fitting(low, high).unwrap_or(low) + PREDICTION_MARGIN).min(high - 1);
        let Some(levels) = self.measurer.levels_at(self.micro_batch, last) else { return 0.0 };
        let saved = self.profile.seconds(&fitting.recipe.recompute) - self.profile.seconds(&levels);
        let count = self.measurer.request.micro_batch_count(&fitting.recipe);
        fitting.step_seconds - f64::from(count) * saved.max(0.0)
    }

    /// Measures budgets until the largest that fits is known, or until none of use can fit.
    fn run(mut self, found: &mut LevelCandidates) {
        let (measurer, micro_batch) = (self.measurer, self.micro_batch);
        let arena_budget = measurer.request.device.arena_budget().0;
        // The largest budget that fits is at least `low` - 1 and below `high`.
        let (mut low, mut high, mut measured) = (0, LEVEL_STEPS + 1, 0);
        while low < high {
            let predicted = self.predict_last_fitting(low, high);
            if predicted.is_none() && !self.full_measured && !self.offload.is_nothing() {
                match self.measure_base(found) {
                    true => continue,
                    false => return,
                }
            }
            let number = if measured < MAX_PREDICTED { predicted.unwrap_or(low) } else { low.midpoint(high - 1) };
            let Some(recompute) = measurer.levels_at(micro_batch, number) else { return };
            let candidate = measurer.candidate(measurer.request.recipe(micro_batch, recompute, self.offload));
            let device_bytes = candidate.known_bytes().device;
            self.record_bytes(number, &candidate);
            measured += 1;
            found.add(candidate.clone());
            if measurer.fits(&candidate) {
                low = number + 1;
                found.lower(candidate.step_seconds);
                if self.bound < f64::INFINITY {
                    let least_seconds = self.least_seconds_above(&candidate, low, high);
                    if least_seconds >= self.bound {
                        return found.lower(least_seconds);
                    }
                }
            } else if device_bytes <= arena_budget {
                // Levels change no bytes of the host.
                return;
            } else if candidate.step_seconds >= self.bound {
                // Levels that fit recompute more, and take longer.
                return found.lower(candidate.step_seconds);
            } else {
                high = number;
            }
        }
    }
}

impl Measurer<'_> {
    /// Returns recipes with different recompute levels, among them the one that recomputes least under the load lines.
    /// Possibly no recipe of the result fits.
    pub fn candidates_with_recompute(&self, micro_batch: u32, offload: Offload) -> Vec<Candidate> {
        self.candidates_faster_than(f64::INFINITY, micro_batch, offload).list
    }

    /// Returns recipes like [`Measurer::candidates_with_recompute`], but ends early where all that fit take `bound` seconds a
    /// step or more.
    pub fn candidates_faster_than(&self, bound: f64, micro_batch: u32, offload: Offload) -> LevelCandidates {
        let mut found = LevelCandidates::default();
        let full_recompute = self.full_recompute(micro_batch, offload);
        if self.request.fixed_recompute().is_none() {
            let known = if offload.is_nothing() { None } else { self.known_bytes(&full_recompute) };
            if known.is_some_and(|bytes| !self.is_under_load_lines(bytes)) {
                return found;
            }
            if let Some(smallest) = self.smallest_levels(micro_batch) {
                let resident = self.resident(offload).spaces.device as f64;
                let correction = self.level_bytes.of_offload(micro_batch, self.representative(offload));
                let (base, base_known) = (resident + correction.unwrap_or(0.0), offload.is_nothing());
                let profile = self.profile(micro_batch);
                let search = LevelSearch {
                    measurer: self,
                    micro_batch,
                    offload,
                    profile,
                    smallest,
                    base,
                    base_known,
                    full_measured: false,
                    bound,
                };
                search.run(&mut found);
            }
            if offload.is_nothing() || found.least_seconds.is_some() {
                return found;
            }
        }
        let full = self.candidate(full_recompute);
        if self.fits(&full) {
            found.lower(full.step_seconds);
        }
        found.add(full);
        found
    }
}
