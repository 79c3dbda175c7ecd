//! The packed arenas of a team candidate. The candidates of a search are packed, fastest first, until one fits.

use super::candidate::{TeamCandidate, TeamSearch, WorkerCandidate};
use super::{PlannedWorker, TeamOutcome, TeamRequest, single_device, team_plan};
use crate::search::{parallel_map, plan_recipe, plan_recipe_like, search as search_device, with_lossy};
use plimsoll_core::Rung;
use plimsoll_program::Share;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most candidates that are packed before the search gives up.
const MAX_PACKING_ATTEMPTS: usize = 40;

/// Packs the candidates of a search, fastest first, and returns the first that fits. Candidates that do not fit are
/// rejected. Returns `None` if no candidate is left, or after too many attempts.
pub(super) fn pack_fastest(team: &TeamRequest, rungs: &[Rung], search: &mut dyn TeamSearch) -> Option<TeamOutcome> {
    for _ in 0..MAX_PACKING_ATTEMPTS {
        let candidate = search.fastest()?;
        if let [WorkerCandidate { device, .. }] = candidate.workers[..] {
            let outcome =
                search_device(&team.request_for(device, &Share::SINGLE_DEVICE, team.sequences_per_step(), team.host));
            if outcome.plan.fits {
                return Some(single_device(team, (device, outcome), search.excluded(&candidate)));
            }
        }
        let failure = match pack_candidate(team, rungs, &candidate) {
            Ok(mut workers) => {
                let mut plan = team_plan::assemble(team, &mut workers);
                if plan.fits {
                    plan.excluded = search.excluded(&candidate);
                    plan.scaling_efficiency = search.scaling_efficiency(&candidate);
                    let reasons = search.storage_only_reasons(&candidate);
                    plan.team.iter_mut().zip(reasons).for_each(|(worker, reason)| worker.reason = reason);
                    return Some(TeamOutcome { workers, plan, evaluator: None });
                }
                // Each fits on its device, but together they exceed a host: the largest arena there is rejected.
                let host_bytes = |rank: &usize| workers[*rank].outcome.layout.host.bytes;
                let used = workers.iter().map(|worker| (worker.device, worker.outcome.plan.host.arena_bytes));
                let crowded = team.crowded_devices(&used.collect::<Vec<_>>());
                let ranks = (0..workers.len()).filter(|&rank| crowded.contains(&workers[rank].device));
                ranks.max_by_key(host_bytes)?
            }
            Err(rank) => rank,
        };
        search.reject(&candidate, failure);
    }
    None
}

/// Packs the arenas of all workers of a candidate; identical workers are packed once. Fails with the first rank that does
/// not fit, and records its packed bytes in the measurements of its recipe.
pub(super) fn pack_candidate(
    team: &TeamRequest,
    rungs: &[Rung],
    candidate: &TeamCandidate,
) -> Result<Vec<PlannedWorker>, usize> {
    let request = |worker: &WorkerCandidate| {
        let WorkerCandidate { device, ref share, sequences, host, .. } = *worker;
        with_lossy(&team.request_for(device, share, sequences, host), rungs)
    };
    let are_alike = |a: &WorkerCandidate, b: &WorkerCandidate| {
        team.are_alike(a.device, b.device)
            && (a.sequences, a.share.own_state_share()) == (b.sequences, b.share.own_state_share())
            && a.recipe == b.recipe
    };
    let first_alike = |worker: &WorkerCandidate| {
        candidate.workers.iter().position(|other| are_alike(other, worker)).expect("it is like itself")
    };
    let distinct: Vec<usize> =
        (0..candidate.workers.len()).filter(|&rank| first_alike(&candidate.workers[rank]) == rank).collect();
    // Ranks after one that does not fit are skipped.
    let first_failure = AtomicUsize::new(usize::MAX);
    let packed = parallel_map(&distinct, |&rank| {
        let worker = &candidate.workers[rank];
        let outcome =
            (rank < first_failure.load(Ordering::Relaxed)).then(|| plan_recipe(&request(worker), &worker.recipe))?;
        if !outcome.plan.fits {
            first_failure.fetch_min(rank, Ordering::Relaxed);
        }
        Some(outcome)
    });
    let mut packed = packed.into_iter();
    let mut workers: Vec<PlannedWorker> = Vec::new();
    for (rank, worker) in candidate.workers.iter().enumerate() {
        let outcome = match first_alike(worker) {
            first if first < rank => plan_recipe_like(&request(worker), &worker.recipe, &workers[first].outcome),
            _ => packed.next().flatten().expect("all ranks before this one fit"),
        };
        worker.measured.iter().for_each(|measured| measured.record_packed(outcome.layout.bytes()));
        if !outcome.plan.fits {
            return Err(rank);
        }
        let WorkerCandidate { device, ref share, sequences, .. } = *worker;
        workers.push(PlannedWorker { device, share: share.clone(), sequences, outcome });
    }
    Ok(workers)
}
