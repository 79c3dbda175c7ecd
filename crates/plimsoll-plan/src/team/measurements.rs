//! Measurements that all searches for a team share. They do not depend on load lines, so they also hold for the team
//! under other budgets: a refusal plans it many times to find its remedies.

use super::stage::StageModel;
use crate::search::{MeasurementCache, Memo, PlanRequest, RankCosts, ShardedBytes};
use plimsoll_core::{Bytes, DeviceSpec, HostSpec, Rung};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// The measurements of a team, by the lossy rungs taken.
#[derive(Default)]
pub struct Measurements(Mutex<HashMap<Vec<Rung>, Arc<RungMeasurements>>>);

impl Measurements {
    /// Returns the measurements with these rungs taken.
    pub(super) fn with_rungs(&self, rungs: &[Rung]) -> Arc<RungMeasurements> {
        let mut known = self.0.lock().expect("no panic occurs while the lock is held");
        Arc::clone(known.entry(rungs.to_vec()).or_default())
    }
}

/// The measurements of a team with some lossy rungs taken.
#[derive(Default)]
pub(super) struct RungMeasurements {
    /// Measurements of recipes, by request. The load lines of these requests are zero.
    requests: Mutex<Vec<(RequestKey, Arc<MeasurementCache>)>>,
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
        let key = RequestKey::of(request);
        let mut known = self.requests.lock().expect("no panic occurs while the lock is held");
        if let Some((_, cache)) = known.iter().find(|(other, _)| *other == key) {
            return Arc::clone(cache);
        }
        let cache = Arc::default();
        known.push((key, Arc::clone(&cache)));
        cache
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

/// The part of a request of a team on which measurements depend.
#[derive(PartialEq)]
struct RequestKey {
    sequences: u64,
    pins: crate::search::PinnedChoices,
    share: plimsoll_program::Share,
    host: HostSpec,
    device: DeviceSpec,
}

impl RequestKey {
    fn of(request: &PlanRequest) -> RequestKey {
        let mut host = HostSpec { budget: Bytes::ZERO, ..request.host };
        (host.file.budget, host.file.available) = (Bytes::ZERO, Bytes::ZERO);
        let PlanRequest { sequences, pins, share, device, .. } = request;
        RequestKey { sequences: *sequences, pins: pins.clone(), share: share.clone(), host, device: kind_of(device) }
    }
}

/// Returns a device without its name, its load line and its charges: the part on which measurements depend.
pub(super) fn kind_of(device: &DeviceSpec) -> DeviceSpec {
    DeviceSpec { name: String::new(), budget: Bytes::ZERO, charges: Bytes::ZERO, nccl: None, ..device.clone() }
}
