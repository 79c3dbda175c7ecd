//! Team candidates: teams that a search proposes by bounds, before their arenas are packed; and the packing of the fastest.

use super::exclusion::excess;
use super::{PlannedWorker, TeamOutcome, TeamRequest, single_device, team_plan};
use crate::search::{parallel_map, plan_recipe, plan_recipe_like, search as search_device, with_lossy};
use plimsoll_core::{Bytes, ExcludedDevice, Parallelism, Recipe, Rung, ScalingEfficiency};
use plimsoll_program::Share;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Candidates that may fail to pack before the search gives up.
const MAX_PACKING_ATTEMPTS: usize = 40;

/// A team with its predicted time. Bytes are lower bounds; nothing is packed yet.
#[derive(Clone, Debug)]
pub(super) struct TeamCandidate {
    /// The kind of parallelism; none for a device alone.
    pub parallelism: Option<Parallelism>,
    /// The workers, in the order of ranks.
    pub workers: Vec<WorkerCandidate>,
    /// Predicted seconds of a step.
    pub seconds: f64,
}

/// The share and recipe of one device of a candidate.
#[derive(Clone, Debug)]
pub(super) struct WorkerCandidate {
    /// The index of the device in the request.
    pub device: usize,
    /// The share of the step.
    pub share: Share,
    /// Sequences of a step that the device computes; 0 for a storage-only worker.
    pub sequences: u64,
    /// The recipe of the device.
    pub recipe: Recipe,
    /// The load line of the device's portion of the host.
    pub host: Bytes,
    /// A lower bound on the device arena.
    pub device_bytes: u64,
    /// A lower bound on the host arena.
    pub host_bytes: u64,
}

impl WorkerCandidate {
    /// Returns whether the worker only stores a shard and computes no sequences.
    pub fn is_storage_only(&self) -> bool {
        self.sequences == 0
    }
}

impl TeamCandidate {
    /// Returns the devices that take part, in the order of ranks.
    pub fn devices(&self) -> Vec<usize> {
        self.workers.iter().map(|worker| worker.device).collect()
    }
}

/// A search for the fastest team of one kind of parallelism, with some lossy rungs taken.
pub(super) trait TeamSearch {
    /// Returns the fastest candidate; none where nothing fits.
    fn fastest(&self) -> Option<TeamCandidate>;
    /// Rejects a candidate that did not pack: the arena of `rank` is `over` bytes above its load line. The next call of
    /// [`TeamSearch::fastest`] gives the device another recipe or another share.
    fn reject(&mut self, candidate: &TeamCandidate, rank: usize, over: Bytes);
    /// Returns the devices that take no part, with reasons.
    fn excluded(&self, candidate: &TeamCandidate) -> Vec<ExcludedDevice>;
    /// Returns the throughput of the single devices, to compare the team with; none where a device cannot work alone.
    fn scaling_efficiency(&self, candidate: &TeamCandidate) -> Option<ScalingEfficiency>;
    /// Returns, for each rank, why it only stores a shard; none for a rank that computes.
    fn storage_only_reasons(&self, candidate: &TeamCandidate) -> Vec<Option<String>> {
        vec![None; candidate.workers.len()]
    }
}

/// Packs the arenas of the fastest candidate. Rejects candidates that do not pack, and returns the first that does.
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
                // Each fits on its device, but together they exceed the host: the largest host arena is rejected.
                let host_bytes = |rank: &usize| workers[*rank].outcome.layout.host.bytes;
                PackingFailure { rank: (0..workers.len()).max_by_key(host_bytes)?, over: Bytes::ZERO }
            }
            Err(failure) => failure,
        };
        search.reject(&candidate, failure.rank, failure.over);
    }
    None
}

/// A rank with a packed arena above its load line.
pub(super) struct PackingFailure {
    rank: usize,
    /// Bytes above the load line.
    over: Bytes,
}

/// Packs the arenas of all workers of a candidate; identical workers are packed once. Fails at the first rank that does not
/// fit.
pub(super) fn pack_candidate(
    team: &TeamRequest,
    rungs: &[Rung],
    candidate: &TeamCandidate,
) -> Result<Vec<PlannedWorker>, PackingFailure> {
    let request = |worker: &WorkerCandidate| {
        let WorkerCandidate { device, ref share, sequences, host, .. } = *worker;
        with_lossy(&team.request_for(device, share, sequences, host), rungs)
    };
    let are_alike = |a: &WorkerCandidate, b: &WorkerCandidate| {
        team.first_alike(a.device) == team.first_alike(b.device)
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
        if !outcome.plan.fits {
            return Err(PackingFailure { rank, over: excess(&outcome.plan) });
        }
        let WorkerCandidate { device, ref share, sequences, .. } = *worker;
        workers.push(PlannedWorker { device, share: share.clone(), sequences, outcome });
    }
    Ok(workers)
}
