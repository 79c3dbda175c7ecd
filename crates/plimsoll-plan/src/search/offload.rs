//! What may wait on the host: the choices that are looked at, in the order of the time that each takes about, and the
//! leanest of all.

use super::measure::{Candidate, Measurer};
use plimsoll_core::{InFile, Offload, RecomputeLevel, Sharing, Space};
use std::collections::{HashMap, HashSet};

/// Choices that are measured, at most: the most promising ones.
const LOOKS: usize = 48;
/// Of one micro-batch this part of them, before others have had their turn.
const EACH: usize = 6;
/// As [`LOOKS`], of a rank that gathers what it computes with, whose Programs go layer for layer and take long to write down; and
/// of each stage of a pipeline.
const LOOKS_IN_TEAM: usize = 6;
/// Of the leanest recipes by their bounds, so many are packed to find one that fits once it is packed.
const PACKED: usize = 8;
/// Nothing more is looked for that would not be faster by more than this part.
const FASTER: f64 = 0.005;
/// How much faster than estimated the first of a kind may turn out to be.
const UNSURE: f64 = 0.03;

/// What may wait, from nothing to everything, layer for layer (of ranks that gather, by sixteenths of them). What the host
/// has no room for waits in the scratch file, where there is one.
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
    let step = if in_parts(measurer) { layers.div_ceil(16) } else { 1 };
    let counts: Vec<u32> = (0..layers).step_by(step as usize).map(|fewer| layers - fewer).collect();
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
    let passes_back = trained && !question.only_holds();
    let inputs = if passes_back { vec![0, layers.div_ceil(2), layers] } else { vec![0] };
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
    let [embedding, head] = question.ends();
    list.retain(|choice| (embedding || !choice.embedding) && (head || !choice.head));
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

/// The same, by whoever does the update.
fn choices_of_update(measurer: &Measurer) -> impl Iterator<Item = Offload> {
    let own_host = measurer.question.is_own_host();
    let pinned = measurer.question.pins.offload.is_some();
    choices(measurer).into_iter().flat_map(move |choice| {
        let by_host = (choice.optimizer > 0 && !own_host && !pinned).then_some(Offload { update: true, ..choice });
        by_host.into_iter().chain([choice])
    })
}

/// A choice that could be faster than what is there.
struct Look {
    /// About what a step takes.
    seconds: f64,
    /// Bytes that stay on the host.
    host: u64,
    micro_batch: u32,
    choice: Offload,
}

/// Adds recipes that let something wait, where they could be faster than what is there. What a choice takes is first only
/// known about; they are measured in that order, until none can be faster than the best that fits. How much longer one
/// really takes tells of the others of its kind, and of other kinds at the same micro-batch, that they will take no less
/// above what was estimated.
pub(super) fn add(measurer: &Measurer, micro_batches: &[u32], list: &mut Vec<Candidate>) {
    let best_of = |list: &[Candidate]| fastest(measurer, list).map(|best| best.seconds);
    let mut best = best_of(list).unwrap_or(f64::INFINITY);
    let mut looks = Vec::new();
    for choice in choices_of_update(measurer).filter(|choice| !choice.is_nothing() && waits_within(measurer, *choice)) {
        for &micro_batch in micro_batches {
            match measurer.about(micro_batch, choice) {
                Some(seconds) if seconds < best => {
                    let host = measurer.persistent(choice).host;
                    looks.push(Look { seconds, host, micro_batch, choice });
                }
                _ => {}
            }
        }
    }
    looks.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.host.cmp(&b.host)));
    let staged = measurer.question.share.sharing == Some(Sharing::Layers);
    let most = if in_parts(measurer) || staged { LOOKS_IN_TEAM } else { LOOKS };
    let (mut left, mut misses) = (most, most);
    let mut slower: HashMap<(u32, Offload), f64> = HashMap::new();
    let mut least_slower: HashMap<u32, f64> = HashMap::new();
    let mut looked = vec![false; looks.len()];
    // First a few of each micro-batch: of one that promises too much there are many.
    for most_of_each in [most.div_ceil(EACH), most] {
        let mut taken: HashMap<u32, usize> = HashMap::new();
        for (Look { seconds, micro_batch, choice, .. }, looked) in looks.iter().zip(&mut looked) {
            let (seconds, micro_batch, choice) = (*seconds, *micro_batch, *choice);
            let enough = best * (1.0 - FASTER);
            if left == 0 || misses == 0 || seconds * (1.0 - UNSURE) >= enough {
                break;
            }
            let kind = (micro_batch, measurer.kind(choice));
            let of_others = || least_slower.get(&micro_batch).copied().unwrap_or(1.0) * (1.0 - UNSURE);
            let factor = slower.get(&kind).copied().unwrap_or_else(of_others);
            let taken = taken.entry(micro_batch).or_default();
            let hopeless = seconds * factor >= enough || !measurer.may_fit(micro_batch, choice);
            if *looked || hopeless || *taken == most_of_each {
                continue;
            }
            (*looked, *taken) = (true, *taken + 1);
            let found = measurer.recomputed(micro_batch, choice);
            match best_of(&found) {
                Some(measured) => {
                    let factor = measured / seconds;
                    slower.insert(kind, factor);
                    least_slower.entry(micro_batch).and_modify(|least| *least = least.min(factor)).or_insert(factor);
                    best = best.min(measured);
                    left -= 1;
                }
                None => misses -= 1,
            }
            list.extend(found);
        }
    }
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

/// What needs the least memory on the device, within the load lines of host and file; `None` where it does not come below
/// `bound` bytes. It is the same whatever has been looked at before.
pub(super) fn leanest(measurer: &Measurer, bound: Option<u64>) -> Option<Candidate> {
    let beside = |[_, host, file]: [u64; 3]| measurer.holds([0, host, file]);
    let packs = |found: &Candidate| {
        let below = |bound| found.laid(measurer.question).layout.device.bytes < bound;
        measurer.packs_on_host(found) && bound.is_none_or(below)
    };
    least(measurer, Space::Device, &beside, bound, &packs).or_else(|| {
        // Nothing within the host's load line: what is refused keeps everything on the device.
        let micro_batch = measurer.question.micro_batches()[0];
        bound.is_none().then(|| measurer.candidate(measurer.made_again(micro_batch, Offload::NOTHING)))
    })
}

/// The least bytes of the host, or of the scratch file, beside which the device holds something; `None` where that is not
/// less than `bound`.
pub(super) fn least_beside(measurer: &Measurer, in_file: bool, bound: u64) -> Option<u64> {
    let question = measurer.question;
    let space = if in_file { Space::Scratch } else { Space::Host };
    let packed = |found: &Candidate| {
        let laid = found.laid(question);
        if in_file { laid.layout.file.bytes } else { laid.layout.host.bytes }
    };
    let packs = |found: &Candidate| question.fits(&found.laid(question).layout) && packed(found) < bound;
    least(measurer, space, &|bytes| measurer.holds(bytes), Some(bound), &packs).as_ref().map(packed)
}

/// Levels that may need the least: every layer computed again, the tightest mixture, and the others alone.
fn lean_levels(measurer: &Measurer, micro_batch: u32) -> Vec<Vec<RecomputeLevel>> {
    let question = measurer.question;
    let mut levels = vec![measurer.made_again(micro_batch, Offload::NOTHING).recompute];
    if question.fixed_levels().is_none() {
        let uniform = |&level: &RecomputeLevel| vec![level; question.layers()];
        let alone = RecomputeLevel::ALL.iter().filter(|_| !in_parts(measurer)).map(uniform);
        for others in measurer.tightest(micro_batch).into_iter().chain(alone) {
            if !levels.contains(&others) {
                levels.push(others);
            }
        }
    }
    levels
}

/// The same choice with the update by the host, and with all inputs of layers there as well: it takes no more of the device.
fn lighter(measurer: &Measurer, choice: Offload) -> [Offload; 2] {
    let update = Offload { update: choice.optimizer > 0 && !measurer.question.is_own_host(), ..choice };
    [update, Offload { inputs: measurer.question.layers() as u32, ..update }]
}

/// What has the least bytes in a space, of all that comes `beside` the load lines and, packed, is what was wanted;
/// `None` where that is not less than `bound`. Recipes come in the order of their bounds.
fn least(
    measurer: &Measurer,
    space: Space,
    beside: &dyn Fn([u64; 3]) -> bool,
    bound: Option<u64>,
    packs: &dyn Fn(&Candidate) -> bool,
) -> Option<Candidate> {
    let question = measurer.question;
    let of = |[device, host, file]: [u64; 3]| match space {
        Space::Device => device,
        Space::Host => host,
        _ => file,
    };
    let micro_batch = question.micro_batches()[0];
    let levels = lean_levels(measurer, micro_batch);
    let above: Vec<u64> = levels.iter().map(|levels| measurer.plain_above(micro_batch, levels)).collect();
    let recipe_of = |level: usize, offload: Offload| question.recipe(micro_batch, levels[level].clone(), offload);
    let bound = bound.unwrap_or(u64::MAX);
    let mut looks: Vec<([u64; 3], Offload, usize)> = Vec::new();
    for choice in choices_of_update(measurer).filter(|choice| waits_within(measurer, *choice)) {
        let stays = measurer.persistent(choice);
        let at_least = |level| [measurer.least_bytes(micro_batch, above[level], choice), stays.host, stays.file];
        looks.extend((0..levels.len()).map(|level| (at_least(level), choice, level)));
    }
    looks.retain(|(bytes, ..)| of(*bytes) < bound && beside(*bytes));
    // The update by the device needs no less of it: only where the host is short of what its own takes.
    looks.sort_by_key(|(bytes, choice, level)| (of(*bytes), choice.optimizer, !choice.update, *level));
    // What a choice takes with every layer computed again tells about what it takes with other levels.
    let by_others = |offload: Offload, level: usize| {
        let [device, host, file] = measurer.known_bytes(&recipe_of(0, offload))?;
        let unsure = above[0] / 4;
        Some([(device + above[level]).saturating_sub(above[0] + unsure), host.saturating_sub(unsure), file])
    };
    let mut too_large = HashSet::new();
    while too_large.len() < PACKED {
        let (mut least, mut found) = (bound, None);
        for &(bytes, offload, level) in &looks {
            if of(bytes) >= least {
                break;
            }
            let recipe = recipe_of(level, offload);
            let too_much = |bytes: [u64; 3]| of(bytes) >= least || !beside(bytes);
            let known = measurer.known_bytes(&recipe).or_else(|| by_others(offload, level));
            if known.is_some_and(too_much) || too_large.contains(&recipe) {
                continue;
            }
            let lighter = lighter(measurer, offload).into_iter().filter(|lighter| *lighter != offload);
            let mut lighter = lighter.filter_map(|lighter| measurer.known_bytes(&recipe_of(level, lighter)));
            if space == Space::Device && lighter.any(|bytes| of(bytes) >= least) {
                continue;
            }
            let candidate = measurer.candidate(recipe);
            let bytes = [candidate.device, candidate.host, candidate.file];
            if !too_much(bytes) && measurer.moves_files(&candidate.recipe, beside) {
                (least, found) = (of(bytes), Some(candidate));
            }
        }
        let found = found?;
        if packs(&found) {
            return Some(found);
        }
        too_large.insert(found.recipe);
    }
    None
}
