//! The memory ladder of a request (`--explain`): the predicted effect of each rung, alone and within a plan.

use super::PlanRequest;
use super::lossy::lossy_option_sets;
use super::measure::{Candidate, Measurer};
use super::plan_request::with_lossy;
use plimsoll_core::{Class, Offload, Recipe, RecomputeLevel, Rung, RungEffect, RungPrice, ScratchOffload};

/// The memory ladder of a request: bytes and seconds of each rung, compared with the plain recipe (one micro-batch per
/// step, no recompute, no offload).
#[derive(Clone, Debug)]
pub struct Ladder {
    /// Bytes of the plain recipe on the device, without charges.
    pub plain_bytes: u64,
    /// Predicted seconds of a step under the plain recipe.
    pub plain_step_seconds: f64,
    /// The rungs in the order in which `--explain` prints them.
    pub rungs: Vec<RungPrice>,
}

/// A rung that is not lossy, such as recompute: it changes one choice of the recipe.
struct RecipeRung {
    name: &'static str,
    class: Class,
    accuracy_impact: &'static str,
    /// Copies this choice from the second recipe to the first.
    copy: fn(&mut Recipe, &Recipe),
}

const RECIPE_RUNGS: [RecipeRung; 10] = [
    RecipeRung {
        name: "micro_batch",
        class: Class::Reordered,
        accuracy_impact: "the order of sums",
        copy: |to, from| to.micro_batch = from.micro_batch,
    },
    identical("recompute", |to, from| to.recompute.clone_from(&from.recompute)),
    identical("offload.optimizer", |to, from| to.offload.optimizer = from.offload.optimizer),
    identical("offload.gradients", |to, from| to.offload.gradients = from.offload.gradients),
    identical("offload.weights", |to, from| to.offload.weights = from.offload.weights),
    identical("offload.inputs", |to, from| to.offload.inputs = from.offload.inputs),
    identical("offload.update", |to, from| to.offload.update = from.offload.update),
    identical("offload.embedding", |to, from| to.offload.embedding = from.offload.embedding),
    identical("offload.head", |to, from| to.offload.head = from.offload.head),
    // Only offloaded tensors can be in the file.
    identical("offload.file", |to, from| {
        to.offload.file = from.offload.file;
        to.offload.optimizer = to.offload.optimizer.max(to.offload.file.optimizer);
    }),
];

/// Returns a rung that keeps every bit.
const fn identical(name: &'static str, copy: fn(&mut Recipe, &Recipe)) -> RecipeRung {
    RecipeRung { name, class: Class::Identical, accuracy_impact: "nothing", copy }
}

/// Returns the plain recipe of a request: one micro-batch, no recompute, no offload.
fn plain_recipe(request: &PlanRequest) -> Recipe {
    let largest = *request.micro_batch_sizes().last().expect("there is at least one size");
    request.uniform(largest, RecomputeLevel::Nothing)
}

/// Returns the recipe with all rungs that are not lossy, each taken as far as possible.
fn recipe_with_all_rungs(request: &PlanRequest) -> Recipe {
    let layers = request.layers() as u32;
    let has_host = request.host.budget.0 > 0;
    let ends = request.ends();
    let has_file = request.host.file.budget.0 > 0 && request.optimizer.is_some();
    let trained_layers = if has_host && request.optimizer.is_some() { layers } else { 0 };
    let offload = Offload {
        optimizer: trained_layers,
        gradients: trained_layers,
        weights: if has_host { layers } else { 0 },
        inputs: if request.is_storage_only() { 0 } else { trained_layers },
        embedding: has_host && ends.embedding,
        head: has_host && ends.head,
        update: false,
        file: ScratchOffload { optimizer: if has_file { layers } else { 0 }, ..ScratchOffload::NOTHING },
    };
    let has_backward = request.optimizer.is_some() && !request.is_storage_only();
    let level = if has_backward { RecomputeLevel::Block } else { RecomputeLevel::Nothing };
    Recipe { offload, ..request.uniform(request.micro_batch_sizes()[0], level) }
}

/// Computes the changes of bytes, seconds and throughput if recipe `to` replaces recipe `from`.
fn effect(request: &PlanRequest, from: &Candidate, to: &Candidate) -> RungEffect {
    let decrease = |from: u64, to: u64| from as i64 - to as i64;
    RungEffect {
        freed_bytes: decrease(from.bytes.device, to.bytes.device),
        host_bytes: -decrease(from.bytes.host, to.bytes.host),
        file_bytes: -decrease(from.bytes.file, to.bytes.file),
        added_seconds: to.step_seconds - from.step_seconds,
        tokens_per_second: (request.sequences * request.sequence) as f64 / to.step_seconds,
    }
}

/// Predicts bytes and seconds of a recipe with the given lossy rungs, from its Programs.
fn candidate_with(request: &PlanRequest, rungs: &[Rung], recipe: &Recipe) -> Candidate {
    let request = with_lossy(request, rungs);
    Measurer::new(&request).candidate(Recipe { rungs: request.rungs.clone(), ..recipe.clone() })
}

/// Computes the memory ladder of a request. `recipe` is the recipe of its plan, which [`RungPrice::in_plan`] refers to.
pub fn ladder(request: &PlanRequest, recipe: &Recipe) -> Ladder {
    let measurer = Measurer::new(request);
    let (plain, all) = (plain_recipe(request), recipe_with_all_rungs(request));
    let bare = measurer.candidate(plain.clone());
    let taken = request.rungs_in_addition(&recipe.rungs);
    let planned = candidate_with(request, &taken, recipe);
    let mut list = Vec::new();
    for RecipeRung { name, class, accuracy_impact, copy } in RECIPE_RUNGS {
        let mut alone = plain.clone();
        copy(&mut alone, &all);
        let mut without = recipe.clone();
        copy(&mut without, &plain);
        if request.is_own_host() && name == "offload.file" {
            without.offload = plain.offload;
        }
        let in_use = without != *recipe;
        if alone == plain && !in_use {
            continue;
        }
        list.push(RungPrice {
            rung: name.to_owned(),
            class,
            accuracy_impact: accuracy_impact.to_owned(),
            allowed: true,
            alone: effect(request, &bare, &measurer.candidate(alone)),
            in_plan: in_use.then(|| effect(request, &candidate_with(request, &taken, &without), &planned)),
        });
    }
    for rung in Rung::ALL.into_iter().filter(|rung| request.lossy.offer.contains(rung)) {
        // A rung may include others: trained matrices are not quantized, so `int8` and `nf4` include `lora`.
        let set = lossy_option_sets(request, &[rung]).pop().filter(|set| set.contains(&rung));
        let Some(set) = set else { continue };
        let without: Vec<Rung> = match rung {
            Rung::Lora => taken.iter().copied().filter(|other| *other < Rung::Lora).collect(),
            _ => taken.iter().copied().filter(|other| *other != rung).collect(),
        };
        list.push(RungPrice {
            rung: rung.to_string(),
            class: Class::Lossy,
            accuracy_impact: rung.accuracy_impact().to_owned(),
            allowed: request.lossy.allow.contains(&rung) || taken.contains(&rung),
            alone: effect(request, &bare, &candidate_with(request, &set, &plain)),
            in_plan: taken
                .contains(&rung)
                .then(|| effect(request, &candidate_with(request, &without, recipe), &planned)),
        });
    }
    Ladder { plain_bytes: bare.bytes.device, plain_step_seconds: bare.step_seconds, rungs: list }
}
