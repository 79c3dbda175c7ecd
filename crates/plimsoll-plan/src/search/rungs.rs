//! Lossy rungs: other arithmetic, taken only where the user allows it, and no more of it than is needed.
//!
//! Sets of rungs are looked at in the order of what they lose: first how the frozen matrices are stored, then whether
//! only adapters are trained, then the optimizer's state, then the arithmetic. The first set under which anything fits
//! is taken, with the fastest recipe that then fits.

use super::measure::{Candidate, Known, Measurer};
use super::side_by_side::side_by_side;
use super::{Laid, Lossy, Question, Tried, fastest, offload};
use plimsoll_core::{Bytes, DType, DevicePlan, FileSpec, HostSpec, Need, Plan, Rung};
use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

/// The sets of allowed rungs that change something, least loss first; the first is empty. Matrices that are trained
/// are never quantised: where all are, `int8` and `nf4` bring `lora` along, and allow it alone.
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
            let possible = base.is_none() || lora || !whole;
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

/// What is known of the sets of rungs of one question. A refusal asks for most of them several times.
#[derive(Debug)]
pub(crate) struct Sets<'q> {
    /// What is asked under each of them.
    pub question: &'q Question<'q>,
    /// What has been measured under each set, whatever the load lines.
    measured: Arc<Mutex<HashMap<Vec<Rung>, Arc<Known>>>>,
    leanest: Mutex<HashMap<Vec<Rung>, Lean>>,
    /// What the fastest recipe of a set holds on the device, charges included, where one fits.
    peaks: Mutex<HashMap<Vec<Rung>, Option<Bytes>>>,
}

impl<'q> Sets<'q> {
    pub fn new(question: &'q Question<'q>) -> Sets<'q> {
        Sets { question, measured: Arc::default(), leanest: Mutex::default(), peaks: Mutex::default() }
    }

    /// The same about a question that differs in load lines alone.
    fn beside<'a>(&self, question: &'a Question<'a>) -> Sets<'a> {
        Sets { measured: Arc::clone(&self.measured), ..Sets::new(question) }
    }

    /// What has been measured under a set.
    fn measured(&self, rungs: &[Rung]) -> Arc<Known> {
        Arc::clone(lock(&self.measured).entry(rungs.to_vec()).or_default())
    }

    /// The fastest recipe that fits under these rungs. Before more is lost, the leanest is given its chance, however
    /// slow; and the scratch file comes after all that memory can do. What is looked at is added to `tried`, fastest
    /// first.
    pub fn fastest(&self, rungs: &[Rung], tried: &mut Vec<Tried>) -> Option<Arc<Laid>> {
        let question = under(self.question, rungs);
        let bound = Some(question.device.arena_budget().0.saturating_add(1));
        let lean = |question: &Question, leanest: Option<Candidate>, tried: &mut Vec<Tried>| {
            let leanest = leanest?;
            let laid = leanest.laid(question);
            let fits = question.fits(&laid.layout);
            tried.retain(|tried| tried.recipe != leanest.recipe);
            tried.push(leanest.tried(question.device.charges, fits));
            fits.then_some(laid)
        };
        let file = question.host.file;
        let in_memory = (file.budget > Bytes::ZERO).then(|| {
            let host = HostSpec { file: FileSpec { budget: Bytes::ZERO, ..file }, ..question.host };
            Question { host, ..question.clone() }
        });
        let laid = in_memory
            .and_then(|question| {
                let measurer = Measurer::knowing(&question, self.measured(rungs));
                fastest(&measurer, tried).or_else(|| lean(&question, offload::leanest(&measurer, bound), tried))
            })
            .or_else(|| fastest(&Measurer::knowing(&question, self.measured(rungs)), tried))
            .or_else(|| lean(&question, self.leanest_under(rungs, bound), tried));
        let peak = laid.as_ref().map(|laid| Bytes(laid.layout.device.bytes) + question.device.charges);
        lock(&self.peaks).insert(rungs.to_vec(), peak);
        laid
    }

    /// What the fastest recipe of a set holds on the device, where one fits.
    fn peak(&self, rungs: &[Rung]) -> Option<Bytes> {
        let known = lock(&self.peaks).get(rungs).copied();
        known.unwrap_or_else(|| {
            self.fastest(rungs, &mut vec![]);
            lock(&self.peaks)[rungs]
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
        let question = under(self.question, rungs);
        let found = offload::leanest(&Measurer::knowing(&question, self.measured(rungs)), bound);
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
    // What is named is what is taken: of rungs that are allowed, some exclude each other, and some bring nothing.
    let taken = |rungs: &[Rung]| rungs.iter().copied().filter(|rung| !question.rungs.contains(rung)).collect();
    let found = side_by_side(&asked, |asked| {
        let allowed = match asked {
            Asked::Host => return known.with_more(Beside::Host, line),
            Asked::File => return known.with_more(Beside::File, line),
            Asked::Rungs(allowed) => allowed,
        };
        let found = known.leanest(allowed);
        let laid = found.laid(&under(question, &found.recipe.rungs));
        let budget_bytes = Bytes(laid.layout.device.bytes) + question.device.charges;
        Some(need(taken(&found.recipe.rungs), budget_bytes)).filter(|need| need.budget_bytes < as_allowed)
    });
    let mut needs = vec![need(taken(&refused.rungs), as_allowed)];
    for need in found.into_iter().flatten() {
        if !of_rungs(&need) || needs.iter().all(|before| before.allow != need.allow) {
            needs.push(need);
        }
    }
    needs
}

/// Writes down what is held where the present load line is enough, as a search finds it: where less loss is enough, it is
/// that.
pub(super) fn foresee(known: &Sets, refused: &Plan, needs: &mut [Need]) {
    let (question, line) = (known.question, refused.devices[0].budget_bytes);
    let enough = |need: &Need| of_rungs(need) && need.budget_bytes <= line;
    let less = |needs: &[Need], index: usize| {
        (1..index).find(|&less| enough(&needs[less]) && covers(&needs[index].allow, &needs[less].allow))
    };
    let first = |&index: &usize| enough(&needs[index]) && less(needs, index).is_none();
    let firsts: Vec<usize> = (1..needs.len()).filter(first).collect();
    let peaks =
        side_by_side(&firsts, |&index| sets(question, &needs[index].allow).iter().find_map(|rungs| known.peak(rungs)));
    for (&index, peak) in firsts.iter().zip(peaks) {
        needs[index].peak_bytes = peak;
    }
    for index in 1..needs.len() {
        if let Some(less) = less(needs, index) {
            needs[index].peak_bytes = needs[less].peak_bytes;
        }
    }
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
pub(crate) fn need(allow: Vec<Rung>, budget_bytes: Bytes) -> Need {
    Need { allow, budget_bytes, host_bytes: None, file_bytes: None, peak_bytes: None, others: BTreeMap::new() }
}

/// Whether rungs alone make it fit.
fn of_rungs(need: &Need) -> bool {
    need.host_bytes.is_none() && need.file_bytes.is_none()
}

/// Where more could wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Host,
    File,
}

impl Sets<'_> {
    /// How much of the host, or of a scratch file where the disk has so much, would do where that is what is missing: the
    /// least, under any rungs that are allowed.
    fn with_more(&self, beside: Beside, line: Bytes) -> Option<Need> {
        let (host, file) = (self.question.host, self.question.host.file);
        let there = match beside {
            Beside::Host => (HostSpec { file: FileSpec::NONE, ..host }) != HostSpec::NONE,
            Beside::File => file.room > file.budget,
        };
        if !there {
            return None;
        }
        let with = |most: Bytes| match beside {
            Beside::Host => HostSpec { budget: most, ..host },
            Beside::File => HostSpec { file: FileSpec { budget: most, ..file }, ..host },
        };
        let all = Question {
            host: with(if beside == Beside::Host { Bytes(u64::MAX) } else { file.room }),
            ..self.question.clone()
        };
        let mut least: Option<(Bytes, Vec<Rung>)> = None;
        // Most loss first: it mostly needs the least.
        for rungs in sets(self.question, &self.question.lossy.allow).into_iter().rev() {
            let question = under(&all, &rungs);
            let measurer = Measurer::knowing(&question, self.measured(&rungs));
            let bound = least.as_ref().map_or(u64::MAX, |(bytes, _)| bytes.0);
            let found = offload::least_beside(&measurer, beside == Beside::File, bound);
            least = found.map(|bytes| (Bytes::mib(bytes.div_ceil(1 << 20)), rungs)).or(least);
        }
        let (enough, rungs) = least?;
        let question = Question { host: with(enough), ..self.question.clone() };
        // What is planned beside just so much may be another recipe.
        let peak = self.beside(&question).peak(&rungs)?;
        let need = Need { peak_bytes: Some(peak), ..need(rungs, line) };
        Some(match beside {
            Beside::Host => Need { host_bytes: Some(enough), ..need },
            Beside::File => Need { file_bytes: Some(enough), ..need },
        })
    }
}

/// Whether all of `less` is in `more`.
fn covers(more: &[Rung], less: &[Rung]) -> bool {
    less.iter().all(|rung| more.contains(rung))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}
