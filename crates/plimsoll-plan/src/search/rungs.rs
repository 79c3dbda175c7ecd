//! Lossy rungs: other arithmetic, taken only where the user allows it, and no more of it than is needed.
//!
//! Sets of rungs are looked at in the order of what they lose: first how the frozen matrices are stored, then whether
//! only adapters are trained, then the optimizer's state, then the arithmetic. The first set under which anything fits
//! is taken, with the fastest recipe that then fits.

use super::measure::{Candidate, Measurer};
use super::{Laid, Lossy, Question, fastest, offload};
use plimsoll_core::{Bytes, DType, HostSpec, Need, Plan, Rung};
use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer};

/// The sets of allowed rungs that change something, least loss first; the first is empty. Matrices that are trained
/// are never quantised: where all are, `int8` and `nf4` bring `lora` along.
pub(super) fn sets(question: &Question, allow: &[Rung]) -> Vec<Vec<Rung>> {
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
pub(super) fn leanest(question: &Question, allow: &[Rung]) -> Candidate {
    let mut least: Option<Candidate> = None;
    // Most loss first: it mostly is the leanest, and what cannot beat it is not looked at.
    for rungs in sets(question, allow).into_iter().rev() {
        let under = under(question, &rungs);
        let bound = least.as_ref().map(|candidate| candidate.device);
        least = offload::leanest(&Measurer::new(&under), bound).or(least);
    }
    least.expect("the first set is looked at without a bound")
}

/// The smallest budgets that would do: as allowed, with each further rung alone, with all of them; and how much of the
/// host would do where that is what is missing.
pub(super) fn needs(question: &Question, refused: &Plan) -> Vec<Need> {
    let Lossy { allow, offer, .. } = &question.lossy;
    let as_allowed = refused.devices[0].peak_bytes;
    let mut needs = vec![Need { allow: allow.clone(), budget_bytes: as_allowed, host_bytes: None }];
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
        let laid = Laid::new(&under(question, &found.rungs), found);
        let budget_bytes = Bytes(laid.layout.device.bytes) + question.device.charges;
        if budget_bytes < as_allowed {
            needs.push(Need { allow: wanted, budget_bytes, host_bytes: None });
        }
    }
    if question.host != HostSpec::NONE {
        let host = HostSpec { budget: Bytes(u64::MAX), ..question.host };
        let roomy = Question { host, ..question.clone() };
        let found = sets(&roomy, allow).iter().find_map(|rungs| fastest(&under(&roomy, rungs), &mut vec![]));
        needs.extend(found.map(|laid| Need {
            allow: allow.clone(),
            budget_bytes: question.device.budget,
            host_bytes: Some(Bytes(laid.layout.host.bytes)),
        }));
    }
    needs
}
