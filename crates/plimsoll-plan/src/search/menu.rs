//! What a device can do with a share of a step: recipes under its load line, measured once and priced for any number
//! of sequences. A team's shares are found on such menus, without a search for each.

use super::measure::{Candidate, Measurer};
use super::{Question, candidates, candidates_of, offload};
use plimsoll_core::{Bytes, Offload, Recipe};
use std::collections::HashSet;

/// Divisors of a share that are looked at.
const LOOKED_AT: usize = 3;

/// Recipes of one device, by what they cost.
pub(crate) struct Menu<'q> {
    measurer: Measurer<'q>,
    list: Vec<Dish>,
    looked: HashSet<u32>,
}

/// A recipe that fits, by its bounds.
#[derive(Clone, Debug)]
struct Dish {
    candidate: Candidate,
    /// Whether it was measured for a step of one micro-batch, and moves less than one of several would.
    single: bool,
}

impl Dish {
    /// Those of the recipes that fit a question.
    fn of(measurer: &Measurer, found: Vec<Candidate>) -> Vec<Dish> {
        let fitting = found.into_iter().filter(|candidate| measurer.fits(candidate));
        let dish = |candidate: Candidate| {
            let one = measurer.question.micro_batches_of(&candidate.recipe) == 1;
            Dish { single: one && !candidate.recipe.offload.is_nothing(), candidate }
        };
        fitting.map(dish).collect()
    }

    /// Seconds of a step of so many sequences; what is not full costs as much as what is.
    fn seconds(&self, sequences: u64, wait: Wait) -> f64 {
        let Candidate { once, passes, hides, ref recipe, .. } = self.candidate;
        let count = sequences.div_ceil(u64::from(recipe.micro_batch));
        if self.single && count > 1 { f64::INFINITY } else { once + count as f64 * passes + wait(hides) }
    }

    /// The most sequences that it does in so many seconds.
    fn most(&self, seconds: f64, wait: Wait) -> u64 {
        let Candidate { once, passes, hides, ref recipe, .. } = self.candidate;
        let micro_batch = u64::from(recipe.micro_batch);
        let most = if self.single { 1 } else { u64::MAX / micro_batch / 2 };
        // Rounded up, and then no more than what really is in time: both are computed alike.
        let mut count = (((seconds - once - wait(hides)) / passes).max(0.0).ceil() as u64).min(most);
        while count > 0 && self.seconds(count * micro_batch, wait) > seconds {
            count -= 1;
        }
        count * micro_batch
    }
}

/// Seconds that a device waits for the others' part of a step, by those of its passes over the last micro-batch in which
/// gradients are already exchanged.
pub(crate) type Wait<'w> = &'w dyn Fn(f64) -> f64;

impl<'q> Menu<'q> {
    /// What a device can do with about as many sequences as its question has, and with all of a step.
    pub fn new(question: &'q Question<'q>, all: u64) -> Menu<'q> {
        let mut menu = Menu { measurer: Measurer::new(question), list: Vec::new(), looked: HashSet::new() };
        let up_to = |most: u64| match question.pins.micro_batch {
            Some(pinned) => vec![pinned],
            None => (0..32).map(|power| 1 << power).take_while(|&size| u64::from(size) <= most).collect(),
        };
        let micro_batches = up_to(question.sequences);
        menu.looked.extend(&micro_batches);
        let found = candidates(&menu.measurer, &micro_batches);
        menu.add(found);
        if question.host.budget > Bytes::ZERO && all > question.sequences {
            // What best waits for a share of one micro-batch is not what does for a step of several.
            let whole = Question { sequences: all, ..question.clone() };
            let measurer = Measurer::new(&whole);
            let found = candidates(&measurer, &up_to(all));
            menu.list.extend(Dish::of(&measurer, found));
        }
        if menu.list.is_empty() {
            // However slow it is.
            let bound = question.device.arena_budget().0.saturating_add(1);
            menu.add(offload::leanest(&menu.measurer, Some(bound)).into_iter().collect());
        }
        menu
    }

    fn add(&mut self, found: Vec<Candidate>) {
        self.list.extend(Dish::of(&self.measurer, found));
    }

    /// Whether nothing fits.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The recipe that does so many sequences in the shortest time, and how long it takes with what it waits for.
    pub fn best(&self, sequences: u64, wait: Wait) -> Option<(&Candidate, f64)> {
        let priced = self.list.iter().map(|dish| (&dish.candidate, dish.seconds(sequences, wait)));
        priced.filter(|(_, seconds)| seconds.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The most sequences that the device does in so many seconds.
    pub fn most(&self, seconds: f64, wait: Wait) -> u64 {
        self.list.iter().map(|dish| dish.most(seconds, wait)).max().unwrap_or(0)
    }

    /// Takes recipes in that split so many sequences evenly, near the best that is there.
    pub fn look_near(&mut self, sequences: u64, wait: Wait) {
        let Some((best, _)) = self.best(sequences, wait) else { return };
        let (waits, count) = (best.recipe.offload, sequences.div_ceil(u64::from(best.recipe.micro_batch)));
        let counts = [count.saturating_sub(1), count, count + 1, 2 * count].into_iter().filter(|&count| count > 0);
        self.look_at(counts.map(|count| sequences.div_ceil(count)).collect(), waits);
    }

    /// Seconds of a sequence, whatever else a step has: infinite where nothing fits.
    pub fn seconds_each(&self) -> f64 {
        let each = |dish: &Dish| dish.candidate.passes / f64::from(dish.candidate.recipe.micro_batch);
        self.list.iter().map(each).fold(f64::INFINITY, f64::min)
    }

    /// Takes micro-batches in that split just so many sequences evenly, near the best that is there: the largest that may
    /// fit.
    pub fn look_at_divisors(&mut self, sequences: u64, wait: Wait) {
        let Some(waits) = self.best(sequences, wait).map(|(best, _)| best.recipe.offload) else { return };
        let sizes = self.list.iter().map(|dish| u64::from(dish.candidate.recipe.micro_batch));
        // The menu has powers of two: what is between the largest and the next may fit.
        let most = (2 * sizes.max().unwrap_or(1) - 1).min(sequences);
        let even: Vec<u64> = (1..=most).rev().filter(|&size| sequences.is_multiple_of(size)).take(LOOKED_AT).collect();
        self.look_at(even, waits);
    }

    /// Takes micro-batches in, with what waits on the host as given.
    fn look_at(&mut self, micro_batches: Vec<u64>, waits: Offload) {
        if self.measurer.question.pins.micro_batch.is_some() {
            return;
        }
        for micro_batch in micro_batches.into_iter().map(|size| size as u32) {
            if self.looked.insert(micro_batch) {
                let found = candidates_of(&self.measurer, micro_batch, waits);
                self.add(found);
            }
        }
    }

    /// Takes a recipe off: packed, it does not fit.
    pub fn strike(&mut self, recipe: &Recipe) {
        self.list.retain(|dish| dish.candidate.recipe != *recipe);
    }
}
