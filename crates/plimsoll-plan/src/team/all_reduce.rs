//! The time of the gradient all-reduce of a data parallel team, from the bytes that cross its links.

use crate::search::{PlanRequest, resident_tensors};
use plimsoll_core::{Category, Link};
use plimsoll_program::Tensor;

/// Seconds of the all-reduce of a step's gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct AllReduceTime {
    /// Seconds for all gradients.
    total: f64,
    /// Seconds for the gradients that are complete only at the end of the last backward pass. No computing is left to
    /// overlap with them.
    tail: f64,
}

impl AllReduceTime {
    /// Computes the seconds of an all-reduce between the devices of these requests; zero for a single device. Each rank
    /// reduces its part of the gradients and then gathers the others, so all bytes except its own cross its link twice.
    /// The slowest link sets the pace.
    pub fn between(requests: &[&PlanRequest]) -> AllReduceTime {
        let [first, _, ..] = requests else { return AllReduceTime::default() };
        let set = resident_tensors(first);
        let gradients = || set.tensors.iter().filter(|tensor| tensor.category == Category::Gradient);
        let total: u64 = gradients().map(|tensor| tensor.bytes() * u64::from(tensor.slots)).sum();
        // The gradients of the embedding and of one layer.
        let tail = gradients().filter(|tensor| tensor.slots > 1 || tensor.name.starts_with("embedding"));
        let tail: u64 = tail.map(Tensor::bytes).sum();
        let fraction_of_others = 1.0 - 1.0 / requests.len() as f64;
        let seconds = |bytes: u64, link: Link| {
            2.0 * (link.latency_seconds + bytes as f64 * fraction_of_others / link.bytes_per_second)
        };
        let links = requests.iter().map(|request| request.device.team_link);
        links.fold(AllReduceTime::default(), |slowest, link| AllReduceTime {
            total: slowest.total.max(seconds(total, link)),
            tail: slowest.tail.max(seconds(tail, link)),
        })
    }

    /// Returns the seconds in which the devices wait for the all-reduce after the last backward pass. The all-reduce
    /// overlaps with `overlap_seconds` of that pass: a layer's gradients are sent while the layers below it are
    /// computed.
    pub fn exposed_seconds(&self, overlap_seconds: f64) -> f64 {
        self.tail.max(self.total - overlap_seconds)
    }
}
