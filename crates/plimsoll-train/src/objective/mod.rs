//! The objectives that need more than labels, as pure functions and files of the run folder.
//!
//! | module | content |
//! |---|---|
//! | `pairs` | the loss of a pair of answers (DPO), with its derivative with respect to their log-probabilities |
//! | `groups` | the loss of groups of completions (GRPO), with its derivative with respect to the log-probabilities of tokens |
//! | `rounds` | the completions of a round, with their rewards |
//! | `round_loss` | the loss of a step over them, with its figures |
//! | `alarms` | signs that a run over completions no longer learns |
//! | `reference` | log-probabilities under the initial weights |

mod alarms;
mod groups;
mod pairs;
mod reference;
mod round_loss;
mod rounds;

pub(crate) use pairs::{PairLoss, PreferenceSums};
pub(crate) use reference::{ReferenceScores, fingerprint};
pub(crate) use round_loss::{RoundLoss, RoundScores};
pub(crate) use rounds::{Rounds, Sample};

use crate::config::{DpoSection, Objective, RunConfig};
use crate::data::Rows;
use pairs::PairScores;
use plimsoll_core::Event;

/// The log-probabilities under the initial weights with which an objective compares.
#[derive(Default)]
pub(crate) struct References {
    /// Those of the training data. `None` until they are known, and for objectives that need none.
    pub train: Option<ReferenceScores>,
    /// Those of the evaluation data. `None` also without evaluation data.
    pub eval: Option<ReferenceScores>,
}

/// Returns whether a run computes the log-probabilities of its data under the initial weights before the first step.
/// Completions that it samples have theirs in the round.
pub(crate) fn needs_reference(run: &RunConfig) -> bool {
    match run.train.objective {
        Objective::Supervised => false,
        Objective::Dpo => !run.dpo.reference_free,
        Objective::Grpo => run.grpo.beta > 0.0 && !run.samples_completions(),
    }
}

/// The loss of a step of an objective that sets loss weights.
pub(crate) struct WeightedLoss {
    /// The loss.
    pub loss: f64,
    /// Divisor of the weighted cross entropy, so that its gradient is that of the loss.
    pub divisor: u64,
    /// Number of tokens of the step, including padding.
    pub tokens: u64,
    /// Number of tokens with a label.
    pub labelled_tokens: u64,
    /// Seconds in which completions were sampled and rewarded.
    pub sampling_seconds: f64,
    /// The event with the figures of the step.
    pub event: Event,
}

/// Computes the loss of each pair in `rows` from the log-probabilities `scores` of all labels. `reference` has those of the
/// answers of each row under the initial weights. Returns one list for each row.
pub(crate) fn pair_losses(
    settings: &DpoSection,
    rows: &Rows,
    scores: &[f64],
    reference: &[Vec<f64>],
) -> Vec<Vec<PairLoss>> {
    let rows_with_reference = reference.iter().enumerate();
    let losses_of = |(row, reference): (usize, &Vec<f64>)| pair_losses_of_row(settings, rows, row, scores, reference);
    rows_with_reference.map(losses_of).collect()
}

fn pair_losses_of_row(
    settings: &DpoSection,
    rows: &Rows,
    row: usize,
    scores: &[f64],
    reference: &[f64],
) -> Vec<PairLoss> {
    let sums = rows.sum_documents(row, |at| scores[at]);
    let tokens = rows.sum_documents(row, |_| 1.0);
    let nothing = vec![0.0; sums.len()];
    let reference = if settings.reference_free { &nothing } else { reference };
    assert_eq!(reference.len(), sums.len(), "the reference scores are those of the same data");
    let mut losses = Vec::with_capacity(sums.len() / 2);
    for chosen in (0..sums.len()).step_by(2) {
        let answers = |values: &[f64]| [values[chosen], values[chosen + 1]];
        let scores = PairScores { policy: answers(&sums), reference: answers(reference), tokens: answers(&tokens) };
        losses.push(PairLoss::of(settings, &scores));
    }
    losses
}
