//! Measurements that all searches for a team share. They do not depend on load lines, so they also hold for the team
//! under other budgets: a refusal plans it many times to find its remedies.

use super::stage::StageModel;
use crate::search::{MeasurementCache, Memo, PlanRequest, RankCosts, RecipeMeasurements, ShardedBytes};
use plimsoll_core::Rung;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// The measurements of a team: of recipes, and by the lossy rungs taken those of ranks and stages.
#[derive(Default)]
pub struct Measurements {
    /// Measurements of recipes.
    pub recipes: Arc<RecipeMeasurements>,
    by_rungs: Mutex<HashMap<Vec<Rung>, Arc<RungMeasurements>>>,
}

impl Measurements {
    /// Returns the measurements with these rungs taken.
    pub(super) fn with_rungs(&self, rungs: &[Rung]) -> Arc<RungMeasurements> {
        let mut known = self.by_rungs.lock().expect("no panic occurs while the lock is held");
        let empty = || RungMeasurements { recipes: Arc::clone(&self.recipes), ..RungMeasurements::default() };
        Arc::clone(known.entry(rungs.to_vec()).or_insert_with(|| Arc::new(empty())))
    }
}

/// The measurements of a team with some lossy rungs taken.
#[derive(Default)]
pub(super) struct RungMeasurements {
    recipes: Arc<RecipeMeasurements>,
    /// Predicted seconds in which a device computes a micro-batch, by the first device of its kind and by size.
    pub compute_seconds: Memo<(usize, u32), f64>,
    /// Costs of the ranks of sharded teams.
    pub rank_costs: Memo<RankKey, RankCosts>,
    /// Bytes that a sharded team divides.
    pub sharded_bytes: OnceLock<ShardedBytes>,
    /// Costs of the stages of pipelines.
    pub stage_models: Memo<StageKey, StageModel>,
}

impl RungMeasurements {
    /// Returns the measurements of the recipes of a request.
    pub fn of_request(&self, request: &PlanRequest) -> Arc<MeasurementCache> {
        self.recipes.of_request(request)
    }
}

/// The properties on which the predicted seconds and bytes of a rank depend.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RankKey {
    /// The first device of the same kind as the rank's device.
    pub device: usize,
    pub micro_batch: u32,
    pub ranks: usize,
    /// Bytes per second of the team link: the bits of the `f64`, so that the key can be hashed.
    pub link: u64,
}

/// The properties on which the predicted seconds and bytes of a stage depend.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StageKey {
    /// The first device of the same kind as the stage's device.
    pub device: usize,
    pub stage: usize,
    pub stages: usize,
    pub micro_batch: u32,
    pub can_offload: bool,
    /// Bytes per second of the team link: the bits of the `f64`.
    pub link: u64,
}
