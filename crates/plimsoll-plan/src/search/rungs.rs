//! Lossy rungs: other arithmetic, taken only where the user allows it, and no more of it than is needed.
//!
//! Sets of rungs are looked at in the order of what they lose: first how the frozen matrices are stored, then whether
//! only adapters are trained, then the optimizer's state, then the arithmetic. The first set under which anything fits
//! is taken, with the fastest recipe that then fits.

use super::measure::{Candidate, Measurer};
use super::{Laid, Lossy, Question, fits_under, offload};
use plimsoll_core::{Bytes, DType, DevicePlan, HostSpec, Need, Plan, Rung};
use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer};

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

/// The recipe, under any set of allowed rungs, that needs the least memory on the device.
pub(crate) fn leanest(question: &Question, allow: &[Rung]) -> Candidate {
    let mut least: Option<Candidate> = None;
    // Most loss first: it mostly is the leanest, and what cannot beat it is not looked at.
    for rungs in sets(question, allow).into_iter().rev() {
        let under = under(question, &rungs);
        let bound = least.as_ref().map(|candidate| candidate.device);
        least = offload::leanest(&Measurer::new(&under), bound).or(least);
    }
    least.expect("the first set is looked at without a bound")
}

/// The smallest budgets that would do, least loss first: as allowed, as allowed with more of the host where that is
/// what is missing, with each further rung alone, with all of them.
pub(super) fn needs(question: &Question, refused: &Plan) -> Vec<Need> {
    let Lossy { allow, offer, .. } = &question.lossy;
    let DevicePlan { budget_bytes: line, peak_bytes: as_allowed, .. } = refused.devices[0];
    let mut needs = vec![Need { allow: allow.clone(), budget_bytes: as_allowed, host_bytes: None, peak_bytes: None }];
    let peak = |laid: &Laid| Bytes(laid.layout.device.bytes) + question.device.charges;
    if question.host != HostSpec::NONE {
        let with = |budget: Bytes| {
            let host = HostSpec { budget, ..question.host };
            first(&Question { host, ..question.clone() }, allow)
        };
        // What is then planned under just that much of the host may be another recipe.
        let enough = with(Bytes(u64::MAX)).map(|laid| Bytes::mib(laid.layout.host.bytes.div_ceil(1 << 20)));
        needs.extend(enough.and_then(|host| Some((host, with(host)?))).map(|(host, laid)| Need {
            allow: laid.recipe.rungs.iter().copied().filter(|rung| allow.contains(rung)).collect(),
            budget_bytes: line,
            host_bytes: Some(host),
            peak_bytes: Some(peak(&laid)),
        }));
    }
    let every: Vec<Rung> = Rung::ALL.into_iter().filter(|rung| allow.contains(rung) || offer.contains(rung)).collect();
    let further = every.iter().filter(|rung| !allow.contains(rung));
    let alone = further.map(|rung| allow.iter().chain([rung]).copied().collect::<Vec<_>>());
    for allowed in alone.chain([every.clone()]) {
        let found = leanest(question, &allowed).recipe;
        let wanted = every.iter().filter(|rung| allow.contains(rung) || found.rungs.contains(rung));
        let wanted: Vec<Rung> = wanted.copied().collect();
        if needs.iter().any(|need| need.allow == wanted) {
            continue;
        }
        let budget_bytes = peak(&Laid::new(&under(question, &found.rungs), found));
        if budget_bytes < as_allowed {
            // Where less loss is enough, a search finds that one.
            let less =
                |need: &Need| need.peak_bytes.filter(|_| need.host_bytes.is_none() && covers(&wanted, &need.allow));
            let under_the_line = match needs.iter().find_map(less) {
                None if budget_bytes <= line => first(question, &wanted).map(|laid| peak(&laid)),
                less => less,
            };
            needs.push(Need { allow: wanted, budget_bytes, host_bytes: None, peak_bytes: under_the_line });
        }
    }
    needs
}

/// Whether all of `less` is in `more`.
fn covers(more: &[Rung], less: &[Rung]) -> bool {
    less.iter().all(|rung| more.contains(rung))
}

/// What a search would find with these rungs.
fn first(question: &Question, allow: &[Rung]) -> Option<Laid> {
    sets(question, allow).iter().find_map(|rungs| fits_under(&under(question, rungs), &mut vec![]))
}
