//! Measurements that several searches share. They do not depend on load lines, so a run that is planned again under other
//! budgets or charges builds few Programs anew.

use super::{MeasurementCache, PinnedChoices, PlanRequest};
use plimsoll_core::{Bytes, DeviceSpec, HostSpec, Rung};
use plimsoll_program::Share;
use std::sync::{Arc, Mutex};

/// Measurements of recipes, by request. All requests must be for the same kind of work on the same model, with the same
/// length of sequences, optimizer and sources of weights.
#[derive(Debug, Default)]
pub struct RecipeMeasurements(Mutex<Vec<(RequestKey, Arc<MeasurementCache>)>>);

impl RecipeMeasurements {
    /// Returns the measurements of the recipes of a request.
    pub(crate) fn of_request(&self, request: &PlanRequest) -> Arc<MeasurementCache> {
        let key = RequestKey::of(request);
        let mut known = self.0.lock().expect("no panic occurs while the lock is held");
        if let Some((_, cache)) = known.iter().find(|(other, _)| *other == key) {
            return Arc::clone(cache);
        }
        let cache = Arc::default();
        known.push((key, Arc::clone(&cache)));
        cache
    }
}

/// The part of a request on which measurements depend, and in which the requests of a run differ. Load lines are zero.
#[derive(Debug, PartialEq)]
struct RequestKey {
    rungs: Vec<Rung>,
    sequences: u64,
    pins: PinnedChoices,
    share: Share,
    host: HostSpec,
    device: DeviceSpec,
}

impl RequestKey {
    fn of(request: &PlanRequest) -> RequestKey {
        let PlanRequest { rungs, sequences, pins, share, device, mut host, .. } = request.clone();
        host.budget = Bytes::ZERO;
        (host.file.budget, host.file.available) = (Bytes::ZERO, Bytes::ZERO);
        RequestKey { rungs, sequences, pins, share, host, device: kind_of(device) }
    }
}

/// Returns a device without its name, its load line and its charges: the part on which measurements depend.
pub(crate) fn kind_of(device: &DeviceSpec) -> DeviceSpec {
    DeviceSpec { name: String::new(), budget: Bytes::ZERO, charges: Bytes::ZERO, nccl: None, ..device.clone() }
}
