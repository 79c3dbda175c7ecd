//! What may wait on the host: the choices that are looked at, in the order of the time that each takes about, and the
//! leanest of all.

use super::measure::{Candidate, Measurer};
use super::{Profile, choose, profile};
use plimsoll_core::{InFile, Offload, RecomputeLevel, Sharing};

/// Choices that are measured, the most promising ones.
const LOOKS: usize = 24;
/// The same of a rank that gathers what it computes with: its Programs go layer for layer, and take long to write down.
const LOOKS_IN_PARTS: usize = 6;

/// What may wait, from nothing to everything, in quarters of the layers. What the host has no room for waits in the
/// scratch file, where there is one.
fn choices(measurer: &Measurer) -> Vec<Offload> {
    let question = measurer.question;
    if let Some(pinned) = question.pins.offload {
        return vec![pinned];
    }
    let (host, file) = (question.host.budget, question.host.file.budget);
    if host.0 == 0 && file.0 == 0 {
        return vec![Offload::NOTHING];
    }
    let (layers, trained) = (question.layers() as u32, question.optimizer.is_some());
    let mut counts: Vec<u32> = (1..=4).map(|quarter| (layers * quarter).div_ceil(4)).collect();
    counts.dedup();
    let with = |optimizer, gradients, weights| Offload { optimizer, gradients, weights, ..Offload::NOTHING };
    let mut list = vec![Offload::NOTHING];
    for &count in &counts {
        match trained {
            true => list.extend([
                with(count, 0, 0),
                with(layers, count, 0),
                with(layers, 0, count),
                with(layers, layers, count),
            ]),
            false => list.push(with(0, 0, count)),
        }
    }
    let inputs = if trained { vec![0, layers.div_ceil(2), layers] } else { vec![0] };
    let wider = |base: Offload| {
        // Without any state there: a host that has room for nothing else may have it for them.
        let ends = if !trained || base.optimizer == layers || base.is_nothing() {
            vec![(false, false), (true, false), (false, true), (true, true)]
        } else {
            vec![(false, false)]
        };
        let inputs = inputs.clone();
        ends.into_iter().flat_map(move |(embedding, head)| {
            inputs.clone().into_iter().map(move |inputs| Offload { inputs, embedding, head, ..base })
        })
    };
    let mut list: Vec<Offload> = list.into_iter().flat_map(wider).collect();
    if question.config.tied {
        // The head is the embedding.
        list.retain(|choice| !choice.head);
    }
    if file.0 > 0 {
        list = list.into_iter().flat_map(|choice| spilled(measurer, choice)).collect();
    }
    let mut seen = std::collections::HashSet::new();
    list.retain(|choice| seen.insert(*choice));
    list
}

/// A choice with so much of it in the scratch file that the host has room for the rest: barely, halfway to all that can
/// be there, and all. Optimizer state goes first, which is used once a step.
fn spilled(measurer: &Measurer, choice: Offload) -> Vec<Offload> {
    let question = measurer.question;
    let part = |count: u32| {
        let optimizer = count.min(choice.optimizer);
        let gradients = (count - optimizer).min(choice.gradients);
        let weights = (count - optimizer - gradients).min(choice.weights);
        Offload { file: InFile { optimizer, gradients, weights }, ..choice }
    };
    let most = choice.optimizer + choice.gradients + choice.weights;
    if question.is_own_host() {
        // What would be given to the host has nowhere else to go.
        let all = choice.inputs == 0 && !choice.embedding && !choice.head && !choice.update;
        return if all { vec![part(most)] } else { vec![] };
    }
    let fits = |choice: Offload| measurer.persistent(choice).host <= question.host.budget.0;
    let (mut low, mut high) = (0, most);
    if !fits(part(most)) {
        return vec![];
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(part(middle)) { high = middle } else { low = middle + 1 }
    }
    let within = |choice: &Offload| measurer.persistent(*choice).file <= question.host.file.budget.0;
    [low, low.midpoint(most), most].map(part).into_iter().filter(within).collect()
}

/// Adds recipes that let something wait, where they could be faster than what is there.
pub(super) fn add(measurer: &Measurer, profiles: &[(u32, Profile)], list: &mut Vec<Candidate>) {
    let best = fastest(measurer, list).map_or(f64::INFINITY, |best| best.seconds);
    let (mut looks, own_host) = (Vec::new(), measurer.question.is_own_host());
    let choices = choices(measurer).into_iter().filter(|choice| !choice.is_nothing()).flat_map(|choice| {
        let by_host = (choice.optimizer > 0 && !own_host).then_some(Offload { update: true, ..choice });
        std::iter::once(choice).chain(by_host)
    });
    for choice in choices.filter(|choice| waits_within(measurer, *choice)) {
        for (micro_batch, profile) in profiles {
            match measurer.about(profile, *micro_batch, choice) {
                Some(seconds) if seconds < best => looks.push((seconds, *micro_batch, profile, choice)),
                _ => {}
            }
        }
    }
    looks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let most = if in_parts(measurer) { LOOKS_IN_PARTS } else { LOOKS };
    for &(_, micro_batch, profile, choice) in looks.iter().take(most) {
        list.extend(measurer.recomputed(profile, micro_batch, choice));
    }
    tune(measurer, list);
}

/// Whether host and file have room for what waits, as far as it stays for the whole run.
fn waits_within(measurer: &Measurer, choice: Offload) -> bool {
    let (stays, host) = (measurer.persistent(choice), &measurer.question.host);
    stays.host <= host.budget.0 && stays.file <= host.file.budget.0
}

fn in_parts(measurer: &Measurer) -> bool {
    measurer.question.share.sharing == Some(Sharing::State)
}

/// The fastest that fits, by its bounds.
fn fastest<'c>(measurer: &Measurer, list: &'c [Candidate]) -> Option<&'c Candidate> {
    let fitting = list.iter().filter(|candidate| measurer.fits(candidate));
    fitting.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// From quarters of the layers down to single ones (of ranks that gather, to a sixteenth): of each kind as little waits as
/// still fits.
fn tune(measurer: &Measurer, list: &mut Vec<Candidate>) {
    type Field = (fn(&mut Offload) -> &mut u32, fn(Offload) -> u32);
    let fields: [Field; 7] = [
        (|offload| &mut offload.file.weights, |_| 0),
        (|offload| &mut offload.file.gradients, |_| 0),
        (|offload| &mut offload.file.optimizer, |_| 0),
        (|offload| &mut offload.inputs, |_| 0),
        (|offload| &mut offload.weights, |_| 0),
        (|offload| &mut offload.gradients, |_| 0),
        // A trained layer's gradients and weights wait only where its state does.
        (|offload| &mut offload.optimizer, |offload| offload.gradients.max(offload.weights)),
    ];
    let coarse = if in_parts(measurer) { measurer.question.layers() as u32 / 16 } else { 0 };
    for (field, least) in fields {
        let Some(mut recipe) = fastest(measurer, list).map(|best| best.recipe.clone()) else { return };
        let (mut low, mut high) = (least(recipe.offload), *field(&mut recipe.offload));
        while high - low > coarse {
            let middle = low + (high - low) / 2;
            *field(&mut recipe.offload) = middle;
            settle(measurer, &mut recipe.offload);
            let found = measurer.candidate(recipe.clone());
            if measurer.fits(&found) {
                high = middle
            } else {
                low = middle + 1
            }
            list.push(found);
        }
    }
}

/// Makes the rest of a choice follow from how much of each kind waits.
fn settle(measurer: &Measurer, offload: &mut Offload) {
    let Offload { optimizer, gradients, weights, ref mut file, .. } = *offload;
    let own_host = measurer.question.is_own_host();
    let part = |in_file: u32, waits: u32| if own_host { waits } else { in_file.min(waits) };
    file.optimizer = part(file.optimizer, optimizer);
    file.gradients = part(file.gradients, gradients);
    file.weights = part(file.weights, weights);
    offload.update &= optimizer > 0;
}

/// The recipe that needs the least memory on the device, within the host's load line; `None` where it does not come
/// below `bound` bytes.
pub(super) fn leanest(measurer: &Measurer, bound: Option<u64>) -> Option<Candidate> {
    let question = measurer.question;
    let micro_batch = question.micro_batches()[0];
    let nothing = vec![RecomputeLevel::Nothing; question.layers()];
    let mut choices: Vec<(u64, Offload)> = choices(measurer)
        .into_iter()
        .filter(|choice| waits_within(measurer, *choice))
        .map(|choice| (measurer.least_bytes(micro_batch, choice), choice))
        .collect();
    choices.sort_by_key(|(bytes, choice)| (*bytes, choice.optimizer));
    let levels: Vec<Vec<RecomputeLevel>> = match (&question.pins.recompute, question.optimizer) {
        (Some(pinned), Some(_)) => vec![pinned.clone()],
        (_, None) => vec![nothing.clone()],
        (None, Some(_)) if bound.is_some_and(|bound| choices.iter().all(|(bytes, _)| *bytes >= bound)) => vec![],
        (None, Some(_)) => {
            let uniform = RecomputeLevel::ALL.iter().rev().map(|&level| vec![level; question.layers()]);
            uniform.chain(tightest(&profile(question, micro_batch), question.layers())).collect()
        }
    };
    let mut leanest: Option<Candidate> = None;
    for (at_least, offload) in choices {
        // Where something waits, two mixtures stand for all: the whole block again, and what the profile calls tightest.
        let all_but = if offload.is_nothing() || levels.len() < 3 { 0 } else { levels.len() - 2 };
        let least = |leanest: &Option<Candidate>| leanest.as_ref().map(|c| c.device).or(bound).unwrap_or(u64::MAX);
        if at_least >= least(&leanest) {
            continue;
        }
        // Where the host does the update, its pieces need no room on the device, but some on the host.
        let by_host = (offload.optimizer > 0 && !question.is_own_host()).then_some(Offload { update: true, ..offload });
        for recompute in levels.iter().take(1).chain(levels.iter().skip(1 + all_but)) {
            for offload in by_host.into_iter().chain([offload]) {
                let found = measurer.candidate(question.recipe(micro_batch, recompute.clone(), offload));
                let leaner = found.device < least(&leanest);
                if leaner && measurer.packs_on_host(&found) {
                    leanest = Some(found);
                }
                // The update by the device needs no less of it: only where the host is short of what its own takes.
                if !leaner || leanest.as_ref().is_some_and(|leanest| leanest.recipe.offload == offload) {
                    break;
                }
            }
        }
    }
    if leanest.is_none() && bound.is_none() {
        // Nothing within the host's load line: what is refused keeps everything on the device.
        let recompute = levels.into_iter().next().unwrap_or(nothing);
        return Some(measurer.candidate(question.recipe(micro_batch, recompute, Offload::NOTHING)));
    }
    leanest
}

/// The levels that need the least, as far as the profile sees.
fn tightest(profile: &Profile, layers: usize) -> Option<Vec<RecomputeLevel>> {
    let (mut low, mut high) = (0u64, 1u64 << 50);
    while low < high {
        let middle = low + (high - low) / 2;
        if choose(profile, layers, middle).is_some() { high = middle } else { low = middle + 1 }
    }
    choose(profile, layers, high)
}
