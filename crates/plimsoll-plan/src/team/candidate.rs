//! Team candidates: teams that a search proposes by bounds, before their arenas are packed; and [`TeamSearch`], the
//! interface of the searches. Candidates are packed in `packed`.

use crate::search::Candidate;
use plimsoll_core::{Bytes, ExcludedDevice, Parallelism, Recipe, ScalingEfficiency};
use plimsoll_program::Share;

/// A team with its predicted time. Bytes are lower bounds; nothing is packed yet.
#[derive(Clone, Debug)]
pub(super) struct TeamCandidate {
    /// The kind of parallelism; `None` for a device alone.
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
    /// Most bytes of host memory that the device may use.
    pub host: Bytes,
    /// A lower bound on the bytes of the device arena.
    pub device_bytes: u64,
    /// A lower bound on the bytes of the host arena.
    pub host_bytes: u64,
    /// The measurements of the recipe; `None` if it is still to be searched.
    pub measured: Option<Candidate>,
}

impl WorkerCandidate {
    /// Creates a worker that runs the recipe of a candidate of its device.
    pub fn new(device: usize, share: Share, sequences: u64, recipe: &Candidate, host: Bytes) -> WorkerCandidate {
        WorkerCandidate {
            device,
            share,
            sequences,
            recipe: recipe.recipe.clone(),
            host,
            device_bytes: recipe.bytes.device,
            host_bytes: recipe.bytes.host,
            measured: Some(recipe.clone()),
        }
    }

    /// Creates a worker whose recipe is still to be searched: only the micro-batch is set in it.
    pub fn without_recipe(
        device: usize,
        share: Share,
        sequences: u64,
        micro_batch: u32,
        host: Bytes,
    ) -> WorkerCandidate {
        let recipe = Recipe::on_device(micro_batch, vec![]);
        WorkerCandidate { device, share, sequences, recipe, host, device_bytes: 0, host_bytes: 0, measured: None }
    }

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
    /// Returns the fastest candidate; `None` if nothing fits.
    fn fastest(&self) -> Option<TeamCandidate>;
    /// Rejects a candidate in which the recipe of `rank` does not fit after packing. The packed bytes are recorded in its
    /// measurements, so the next call of [`TeamSearch::fastest`] gives the device another recipe or another share.
    fn reject(&mut self, candidate: &TeamCandidate, rank: usize);
    /// Returns the devices that take no part in a candidate, with reasons.
    fn excluded(&self, candidate: &TeamCandidate) -> Vec<ExcludedDevice>;
    /// Returns the throughputs with which the team's is compared: summed over its devices alone, and an upper bound.
    /// `None` for a kind of parallelism in which a device may be unable to do the step alone.
    fn scaling_efficiency(&self, candidate: &TeamCandidate) -> Option<ScalingEfficiency>;
    /// Returns, for each rank, why it only stores a shard; `None` for a rank that computes.
    fn storage_only_reasons(&self, candidate: &TeamCandidate) -> Vec<Option<String>> {
        vec![None; candidate.workers.len()]
    }
}
