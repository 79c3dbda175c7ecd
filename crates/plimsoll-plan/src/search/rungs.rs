//! Lossy rungs: other arithmetic, taken only where the user allows it, and no more of it than is needed.
//!
//! Sets of rungs are looked at in the order of what they lose: first how the frozen matrices are stored, then whether
//! only adapters are trained, then the optimizer's state, then the arithmetic. The first set under which anything fits
//! is taken, with the fastest recipe that then fits.

use super::measure::{Candidate, Measurer};
use super::side_by_side::side_by_side;
use super::{Laid, Lossy, Question, Tried, fastest, offload};
use plimsoll_core::{Bytes, DType, DevicePlan, FileSpec, HostSpec, Need, Plan, Rung};
use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

/// The sets of allowed rungs that change something, least loss first; the first is empty. Matrices that are trained
/// are never quantised: where all are, `int8` and `nf4` bring `lora` along.
pub(crate) fn sets(question: &Question, allow: &[Rung]) -> Vec<Vec<Rung>> {
    let allowed = |rung: Rung| allow.contains(&rung);
    let trained = question.optimizer.is_some();
    let whole = trained && question.lossy.method == Method::Full;
    let full_state = matches!(question.optimizer, Some(Optimizer::AdamW { state: AdamState::Full, .. }));
    let choices = |possible: bool| if possible { &[false, true][..] } else { &[false][..] };
    let mut bases = vec![None];
    for (rung, base) in [(Rung::Int8, Base::Int8), (Rung::Nf4, Base::Nf4)] {
        if allowed(rung) && question.lossy.base < base {
            bases.push(Some(rung));
        }
    }
    let adapters = whole && (allowed(Rung::Lora) || bases.len() > 1);
    let mut sets = Vec::new();
    for base in bases {
        for &lora in choices(adapters) {
            // Frozen matrices are what is quantised; and adapters have little state.
            let possible = if base.is_some() { lora || !whole } else { !lora || allowed(Rung::Lora) };
            for &adam in choices(full_state && allowed(Rung::Adam8bit) && whole && !lora) {
                for &bf16 in choices(question.precision == DType::F32 && allowed(Rung::Bf16)) {
                    let mut set = Vec::new();
                    set.extend(bf16.then_some(Rung::Bf16));
                    set.extend(adam.then_some(Rung::Adam8bit));
                    set.extend(lora.then_some(Rung::Lora));
                    set.extend(base);
                    if possible {
                        sets.push(set);
                    }
                }
            }
        }
    }
    sets
}

/// The question under a set of rungs, beside those that are in it already.
pub fn under<'a>(question: &Question<'a>, rungs: &[Rung]) -> Question<'a> {
    let mut question = question.clone();
    let further: Vec<Rung> = rungs.iter().filter(|rung| !question.rungs.contains(rung)).copied().collect();
    question.rungs.extend(further);
    for rung in rungs {
        match rung {
            Rung::Bf16 => question.precision = DType::Bf16,
            Rung::Adam8bit => {
                if let Some(Optimizer::AdamW { state, .. }) = &mut question.optimizer {
                    *state = AdamState::Blockwise8;
                }
            }
            Rung::Lora => question.lossy.method = Method::Lora(question.lossy.lora.clone()),
            Rung::Int8 => question.lossy.base = Base::Int8,
            Rung::Nf4 => question.lossy.base = Base::Nf4,
        }
    }
    question
}

/// The leanest recipe of a set of rungs, as far as it has been asked for.
#[derive(Clone, Debug)]
enum Lean {
    /// It is this one.
    Is(Candidate),
    /// It holds at least so many bytes on the device.
    AtLeast(u64),
}

/// What a search would come to.
#[derive(Clone, Debug)]
struct Found {
    rungs: Vec<Rung>,
    /// Whole device, charges included.
    peak: Bytes,
    host: Bytes,
    file: Bytes,
}

/// What is known of the sets of rungs of one question. A refusal asks for most of them several times.
#[derive(Debug)]
pub(super) struct Sets<'q> {
    question: &'q Question<'q>,
    leanest: Mutex<HashMap<Vec<Rung>, Lean>>,
    fastest: Mutex<HashMap<Vec<Rung>, Option<Found>>>,
}

impl<'q> Sets<'q> {
    pub fn new(question: &'q Question<'q>) -> Sets<'q> {
        Sets { question, leanest: Mutex::default(), fastest: Mutex::default() }
    }

    /// The fastest recipe that fits under these rungs. Before more is lost, the leanest is given its chance, however
    /// slow; and the scratch file comes after all that memory can do. What is looked at is added to `tried`, fastest
    /// first.
    pub fn fastest(&self, rungs: &[Rung], tried: &mut Vec<Tried>) -> Option<Laid> {
        let question = under(self.question, rungs);
        let bound = Some(question.device.arena_budget().0.saturating_add(1));
        let lean = |question: &Question, leanest: Option<Candidate>| {
            let laid = Laid::new(question, leanest?.recipe);
            question.fits(&laid.layout).then_some(laid)
        };
        let file = question.host.file;
        let in_memory = (file.budget > Bytes::ZERO).then(|| {
            let host = HostSpec { file: FileSpec { budget: Bytes::ZERO, ..file }, ..question.host };
            Question { host, ..question.clone() }
        });
        let laid = in_memory
            .and_then(|question| {
                let leanest = || offload::leanest(&Measurer::new(&question), bound);
                fastest(&question, tried).or_else(|| lean(&question, leanest()))
            })
            .or_else(|| fastest(&question, tried))
            .or_else(|| lean(&question, self.leanest_under(rungs, bound)));
        let found = laid.as_ref().map(|Laid { recipe, layout, .. }| Found {
            rungs: recipe.rungs.clone(),
            peak: Bytes(layout.device.bytes) + question.device.charges,
            host: Bytes(layout.host.bytes),
            file: Bytes(layout.file.bytes),
        });
        lock(&self.fastest).insert(rungs.to_vec(), found);
        laid
    }

    /// What a search would find with these rungs.
    fn found(&self, allow: &[Rung]) -> Option<Found> {
        sets(self.question, allow).iter().find_map(|rungs| {
            let known = lock(&self.fastest).get(rungs).cloned();
            known.unwrap_or_else(|| {
                self.fastest(rungs, &mut vec![]);
                lock(&self.fastest)[rungs].clone()
            })
        })
    }

    /// The recipe that needs the least memory on the device under these rungs; `None` where it does not come below
    /// `bound` bytes.
    fn leanest_under(&self, rungs: &[Rung], bound: Option<u64>) -> Option<Candidate> {
        let below = |candidate: &Candidate| bound.is_none_or(|bound| candidate.device < bound);
        match (lock(&self.leanest).get(rungs), bound) {
            (Some(Lean::Is(candidate)), _) => return Some(candidate.clone()).filter(below),
            (Some(Lean::AtLeast(least)), Some(bound)) if bound <= *least => return None,
            _ => {}
        }
        let found = offload::leanest(&Measurer::new(&under(self.question, rungs)), bound);
        if let Some(known) = found.clone().map(Lean::Is).or(bound.map(Lean::AtLeast)) {
            lock(&self.leanest).insert(rungs.to_vec(), known);
        }
        found
    }

    /// The same under any set of allowed rungs.
    pub fn leanest(&self, allow: &[Rung]) -> Candidate {
        let mut least: Option<Candidate> = None;
        // Most loss first: it mostly is the leanest, and what cannot beat it is not looked at.
        for rungs in sets(self.question, allow).into_iter().rev() {
            let bound = least.as_ref().map(|candidate| candidate.device);
            least = self.leanest_under(&rungs, bound).or(least);
        }
        least.expect("the first set is looked at without a bound")
    }
}

/// The recipe, under any set of allowed rungs, that needs the least memory on the device.
pub(crate) fn leanest(question: &Question, allow: &[Rung]) -> Candidate {
    Sets::new(question).leanest(allow)
}

/// The smallest budgets that would do, least loss first: as allowed, as allowed with more of the host or of a
/// scratch file where that is what is missing, with each further rung alone, with all of them.
pub(super) fn needs(known: &Sets, refused: &Plan) -> Vec<Need> {
    let question = known.question;
    let Lossy { allow, offer, .. } = &question.lossy;
    let DevicePlan { budget_bytes: line, peak_bytes: as_allowed, .. } = refused.devices[0];
    let every: Vec<Rung> = Rung::ALL.into_iter().filter(|rung| allow.contains(rung) || offer.contains(rung)).collect();
    let further = every.iter().filter(|rung| !allow.contains(rung));
    let alone = further.map(|rung| allow.iter().chain([rung]).copied().collect::<Vec<_>>());
    let rungs = alone.chain([every.clone()]).map(Asked::Rungs);
    let asked: Vec<Asked> = [Asked::Host, Asked::File].into_iter().chain(rungs).collect();
    let found = side_by_side(&asked, |asked| {
        let allowed = match asked {
            Asked::Host => return with_more_of_the_host(question, line),
            Asked::File => return with_more_of_the_file(question, line),
            Asked::Rungs(allowed) => allowed,
        };
        let found = known.leanest(allowed);
        let wanted = every.iter().filter(|rung| allow.contains(rung) || found.recipe.rungs.contains(rung)).copied();
        let packed = found.packed(&under(question, &found.recipe.rungs));
        let budget_bytes = Bytes(packed.device) + question.device.charges;
        Some(need(wanted.collect(), budget_bytes)).filter(|need| need.budget_bytes < as_allowed)
    });
    let mut needs = vec![need(allow.clone(), as_allowed)];
    for need in found.into_iter().flatten() {
        if !of_rungs(&need) || needs.iter().all(|before| before.allow != need.allow) {
            needs.push(need);
        }
    }
    // What a search finds under the line: where less loss is enough, it is that.
    let enough = |need: &Need| of_rungs(need) && need.budget_bytes <= line;
    let less = |needs: &[Need], index: usize| {
        (1..index).find(|&less| enough(&needs[less]) && covers(&needs[index].allow, &needs[less].allow))
    };
    let first = |&index: &usize| enough(&needs[index]) && less(&needs, index).is_none();
    let firsts: Vec<usize> = (1..needs.len()).filter(first).collect();
    let peaks = side_by_side(&firsts, |&index| known.found(&needs[index].allow).map(|found| found.peak));
    for (&index, peak) in firsts.iter().zip(peaks) {
        needs[index].peak_bytes = peak;
    }
    for index in 1..needs.len() {
        if let Some(less) = less(&needs, index) {
            needs[index].peak_bytes = needs[less].peak_bytes;
        }
    }
    needs
}

/// What a refusal asks about.
enum Asked {
    /// More of the host.
    Host,
    /// A scratch file, or more of it.
    File,
    /// Allowed rungs.
    Rungs(Vec<Rung>),
}

/// A load line that would do.
fn need(allow: Vec<Rung>, budget_bytes: Bytes) -> Need {
    Need { allow, budget_bytes, host_bytes: None, file_bytes: None, peak_bytes: None }
}

/// Whether rungs alone make it fit.
fn of_rungs(need: &Need) -> bool {
    need.host_bytes.is_none() && need.file_bytes.is_none()
}

/// How much of the host would do where that is what is missing, as allowed.
fn with_more_of_the_host(question: &Question, line: Bytes) -> Option<Need> {
    if (HostSpec { file: FileSpec::NONE, ..question.host }) == HostSpec::NONE {
        return None;
    }
    let with = |budget: Bytes| found_beside(question, HostSpec { budget, ..question.host });
    let enough = Bytes::mib(with(Bytes(u64::MAX))?.host.0.div_ceil(1 << 20));
    // What is then planned under just that much of the host may be another recipe.
    let found = with(enough)?;
    Some(Need { host_bytes: Some(enough), ..found.need(question, line) })
}

/// How much of a scratch file would do, as allowed, where the disk has so much.
fn with_more_of_the_file(question: &Question, line: Bytes) -> Option<Need> {
    let file = question.host.file;
    if file.room <= file.budget {
        return None;
    }
    let with = |budget: Bytes| found_beside(question, HostSpec { file: FileSpec { budget, ..file }, ..question.host });
    let enough = Bytes::mib(with(file.room)?.file.0.div_ceil(1 << 20));
    let found = with(enough)?;
    Some(Need { file_bytes: Some(enough), ..found.need(question, line) })
}

/// What a search would find beside such a host, as allowed.
fn found_beside(question: &Question, host: HostSpec) -> Option<Found> {
    Sets::new(&Question { host, ..question.clone() }).found(&question.lossy.allow)
}

impl Found {
    /// The same as a need under the present load line.
    fn need(&self, question: &Question, line: Bytes) -> Need {
        let allow = self.rungs.iter().copied().filter(|rung| question.lossy.allow.contains(rung)).collect();
        Need { peak_bytes: Some(self.peak), ..need(allow, line) }
    }
}

/// Whether all of `less` is in `more`.
fn covers(more: &[Rung], less: &[Rung]) -> bool {
    less.iter().all(|rung| more.contains(rung))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}
