//! What it costs that devices add up their gradients, by the bytes that go over their links.

use crate::search::{Question, bare};
use plimsoll_core::{Category, Link};
use plimsoll_program::Tensor;

/// The exchange of a step's gradients between the devices of a team, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Exchange {
    /// Of all gradients.
    all: f64,
    /// Of those that are whole only when the last backward pass is over.
    last: f64,
}

impl Exchange {
    /// Between the devices of these questions. Each reads its own part of everybody's sum, and then everybody's parts:
    /// twice all bytes but its own. The slowest link sets the pace.
    pub fn between(questions: &[&Question]) -> Exchange {
        let [first, _, ..] = questions else { return Exchange::default() };
        let set = bare(first);
        let gradients = || set.tensors.iter().filter(|tensor| tensor.category == Category::Gradient);
        let all: u64 = gradients().map(|tensor| tensor.bytes() * u64::from(tensor.slots)).sum();
        // The embedding's and one layer's.
        let last = gradients().filter(|tensor| tensor.slots > 1 || tensor.name.starts_with("embedding"));
        let last: u64 = last.map(Tensor::bytes).sum();
        let others = 1.0 - 1.0 / questions.len() as f64;
        let over =
            |bytes: u64, link: Link| 2.0 * (link.latency_seconds + bytes as f64 * others / link.bytes_per_second);
        let links = questions.iter().map(|question| question.device.team_link);
        links.fold(Exchange::default(), |slowest, link| Exchange {
            all: slowest.all.max(over(all, link)),
            last: slowest.last.max(over(last, link)),
        })
    }

    /// What is not over when the last micro-batch's backward pass is: layers are sent while those below them are computed,
    /// which takes so many seconds.
    pub fn beyond(&self, hides_seconds: f64) -> f64 {
        self.last.max(self.all - hides_seconds)
    }
}
