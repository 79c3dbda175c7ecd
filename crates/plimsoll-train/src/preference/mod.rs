//! The objective over pairs of answers (direct preference optimization), as pure functions and a file of scores.
//!
//! | module | content |
//! |---|---|
//! | `loss` | the loss of a pair, with its derivative with respect to the log-probabilities of the answers |
//! | `reference` | log-probabilities under the initial weights, in files of the run folder |

mod loss;
mod reference;

pub(crate) use loss::{PairLoss, PreferenceSums};
pub(crate) use reference::{ReferenceScores, fingerprint};

use crate::config::{DpoSection, Objective};
use crate::data::Rows;
use loss::PairScores;

/// The objective of a run over pairs of answers.
pub(crate) struct Preference {
    /// Settings of the loss.
    pub settings: DpoSection,
    /// Scores of the training data under the initial weights. `None` until they are known, and without a reference model.
    pub reference: Option<ReferenceScores>,
    /// Scores of the evaluation data under the initial weights; `None` also without evaluation data.
    pub eval_reference: Option<ReferenceScores>,
}

impl Preference {
    /// Returns the objective of a run; `None` for a run of another objective.
    pub fn of(objective: Objective, settings: &DpoSection) -> Option<Preference> {
        (objective == Objective::Dpo).then(|| Preference {
            settings: settings.clone(),
            reference: None,
            eval_reference: None,
        })
    }

    /// Computes the loss of each pair in `rows` from the log-probabilities `scores` of all labels. `reference` has those of
    /// the answers of each row under the initial weights. Returns one list for each row.
    pub fn losses(&self, rows: &Rows, scores: &[f64], reference: &[Vec<f64>]) -> Vec<Vec<PairLoss>> {
        let rows_with_reference = reference.iter().enumerate();
        rows_with_reference.map(|(row, reference)| self.losses_of_row(rows, row, scores, reference)).collect()
    }

    fn losses_of_row(&self, rows: &Rows, row: usize, scores: &[f64], reference: &[f64]) -> Vec<PairLoss> {
        let sums = rows.sum_documents(row, |at| scores[at]);
        let tokens = rows.sum_documents(row, |_| 1.0);
        let nothing = vec![0.0; sums.len()];
        let reference = if self.settings.reference_free { &nothing } else { reference };
        assert_eq!(reference.len(), sums.len(), "the reference scores are those of the same data");
        let mut losses = Vec::with_capacity(sums.len() / 2);
        for chosen in (0..sums.len()).step_by(2) {
            let answers = |values: &[f64]| [values[chosen], values[chosen + 1]];
            let scores = PairScores { policy: answers(&sums), reference: answers(reference), tokens: answers(&tokens) };
            losses.push(PairLoss::of(&self.settings, &scores));
        }
        losses
    }
}
