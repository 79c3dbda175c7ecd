//! What each rung of the ladder frees and costs: alone, as far as it goes, and as far as a plan takes it.

use super::measure::{Candidate, Measurer};
use super::{Question, rungs};
use plimsoll_core::{Class, Effect, InFile, Offload, Recipe, RecomputeLevel, Rung, RungPrice};

/// A choice of a recipe that changes no arithmetic.
struct Knob {
    name: &'static str,
    class: Class,
    loses: &'static str,
    /// Takes over what another recipe says of it.
    take: fn(&mut Recipe, &Recipe),
}

const KNOBS: [Knob; 10] = [
    Knob {
        name: "micro_batch",
        class: Class::Reordered,
        loses: "the order of sums",
        take: |to, from| to.micro_batch = from.micro_batch,
    },
    identical("recompute", |to, from| to.recompute.clone_from(&from.recompute)),
    identical("offload.optimizer", |to, from| to.offload.optimizer = from.offload.optimizer),
    identical("offload.gradients", |to, from| to.offload.gradients = from.offload.gradients),
    identical("offload.weights", |to, from| to.offload.weights = from.offload.weights),
    identical("offload.inputs", |to, from| to.offload.inputs = from.offload.inputs),
    identical("offload.update", |to, from| to.offload.update = from.offload.update),
    identical("offload.embedding", |to, from| to.offload.embedding = from.offload.embedding),
    identical("offload.head", |to, from| to.offload.head = from.offload.head),
    // What is in the file is what else would wait on the host.
    identical("offload.file", |to, from| {
        to.offload.file = from.offload.file;
        to.offload.optimizer = to.offload.optimizer.max(to.offload.file.optimizer);
    }),
];

const fn identical(name: &'static str, take: fn(&mut Recipe, &Recipe)) -> Knob {
    Knob { name, class: Class::Identical, loses: "nothing", take }
}

/// The plain recipe, which keeps everything on the device and computes nothing again; and all that the rungs can make
/// of it.
fn ends(question: &Question) -> (Recipe, Recipe) {
    let micro_batches = question.micro_batches();
    let (least, most) = (micro_batches[0], *micro_batches.last().expect("there is one at least"));
    let layers = question.layers() as u32;
    let waits = question.host.budget.0 > 0;
    let [embedding, head] = question.ends();
    let has_file = question.host.file.budget.0 > 0 && question.optimizer.is_some();
    let trained = if waits && question.optimizer.is_some() { layers } else { 0 };
    let offload = Offload {
        optimizer: trained,
        gradients: trained,
        weights: if waits { layers } else { 0 },
        inputs: if question.only_holds() { 0 } else { trained },
        embedding: waits && embedding,
        head: waits && head,
        update: false,
        file: InFile { optimizer: if has_file { layers } else { 0 }, ..InFile::NOTHING },
    };
    let passes_back = question.optimizer.is_some() && !question.only_holds();
    let level = if passes_back { RecomputeLevel::Block } else { RecomputeLevel::Nothing };
    let all = Recipe { offload, ..question.uniform(least, level) };
    (question.uniform(most, RecomputeLevel::Nothing), all)
}

/// What `to` does, where `from` is what it stands instead of.
fn effect(question: &Question, from: &Candidate, to: &Candidate) -> Effect {
    let less = |from: u64, to: u64| from as i64 - to as i64;
    Effect {
        freed_bytes: less(from.device, to.device),
        host_bytes: -less(from.host, to.host),
        file_bytes: -less(from.file, to.file),
        costs_seconds: to.seconds - from.seconds,
        tokens_per_second: (question.sequences * question.sequence) as f64 / to.seconds,
    }
}

/// The plain recipe's bytes on the device (without charges) and seconds, and each rung that this question has, in the
/// order in which they are taken. `recipe` is the plan's.
pub fn ladder(question: &Question, recipe: &Recipe) -> (u64, f64, Vec<RungPrice>) {
    let here = Measurer::new(question);
    let (plain, all) = ends(question);
    let bare = here.candidate(plain.clone());
    let taken: Vec<Rung> = recipe.rungs.iter().copied().filter(|rung| !question.rungs.contains(rung)).collect();
    // What a recipe with some of the lossy rungs comes to.
    let under = |rungs: &[Rung], recipe: &Recipe| {
        let under = rungs::under(question, rungs);
        Measurer::new(&under).candidate(Recipe { rungs: under.rungs.clone(), ..recipe.clone() })
    };
    let whole = under(&taken, recipe);
    let mut list = Vec::new();
    for Knob { name, class, loses, take } in KNOBS {
        let mut alone = plain.clone();
        take(&mut alone, &all);
        let mut without = recipe.clone();
        take(&mut without, &plain);
        if question.is_own_host() && name == "offload.file" {
            without.offload = plain.offload;
        }
        let used = without != *recipe;
        if alone == plain && !used {
            continue;
        }
        list.push(RungPrice {
            rung: name.to_owned(),
            class,
            loses: loses.to_owned(),
            allowed: true,
            alone: effect(question, &bare, &here.candidate(alone)),
            in_plan: used.then(|| effect(question, &under(&taken, &without), &whole)),
        });
    }
    for rung in Rung::ALL.into_iter().filter(|rung| question.lossy.offer.contains(rung)) {
        // With what it brings along: matrices that are trained are not quantised.
        let Some(set) = rungs::sets(question, &[rung]).pop().filter(|set| set.contains(&rung)) else { continue };
        let without: Vec<Rung> = match rung {
            Rung::Lora => taken.iter().copied().filter(|other| *other < Rung::Lora).collect(),
            _ => taken.iter().copied().filter(|other| *other != rung).collect(),
        };
        list.push(RungPrice {
            rung: rung.to_string(),
            class: Class::Lossy,
            loses: rung.loses().to_owned(),
            allowed: question.lossy.allow.contains(&rung) || taken.contains(&rung),
            alone: effect(question, &bare, &under(&set, &plain)),
            in_plan: taken.contains(&rung).then(|| effect(question, &under(&without, recipe), &whole)),
        });
    }
    (bare.device, bare.seconds, list)
}
