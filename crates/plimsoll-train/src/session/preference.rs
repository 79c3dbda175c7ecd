//! Direct preference optimization: steps and evaluations over pairs of answers. Each step has three parts:
//!
//! 1. `Team::score` computes the log-probabilities of the labels under the current weights.
//! 2. `objective::pairs` computes the loss of each pair, and its derivative with respect to the log-probability of each answer.
//! 3. The ordinary passes run with minus this derivative as the loss weight of each answer's tokens. Their gradient is that of
//!    the objective.

use crate::data::{Batch, Dataset, Rows, SourceRow};
use crate::engine::EvaluationSums;
use crate::engine::ScoredWeights;
use crate::events::EventLog;
use crate::objective::{PreferenceSums, WeightedLoss, pair_losses};
use crate::session::interrupt::StepInterrupt;
use crate::session::reference::read_reference;
use crate::session::training::Session;
use plimsoll_core::{Event, PreferenceFigures};

impl Session {
    /// Sets the loss weight of each answer's tokens to minus the derivative of the pair's loss with respect to their
    /// log-probability, under the current weights. Returns the loss of the step.
    pub(crate) fn set_pair_weights(
        &mut self,
        batch: &mut Batch,
        log: &mut EventLog,
    ) -> Result<WeightedLoss, StepInterrupt> {
        // Empty rows that fill micro-batches follow.
        let (tokens, labelled_tokens) = (batch.rows.tokens.len() as u64, batch.labelled_tokens);
        let scores =
            self.run_with_recovery(log, |session| session.team.score(&mut batch.rows, ScoredWeights::Present))?;
        let reference = read_reference(self.references.train.as_ref(), &batch.sources)?;
        let losses = pair_losses(&self.context.run.dpo, &batch.rows, &scores, &reference);
        let mut sums = PreferenceSums::default();
        for (row, losses) in losses.iter().enumerate() {
            losses.iter().for_each(|loss| sums.add(loss));
            let weights: Vec<f64> = losses.iter().flat_map(|loss| loss.weights).collect();
            batch.rows.set_document_weights(row, &weights);
        }
        let event = Event::Preferences { step: self.current_step, evaluation: false, figures: sums.figures() };
        Ok(WeightedLoss {
            loss: sums.loss(),
            divisor: sums.pairs,
            tokens,
            labelled_tokens,
            sampling_seconds: 0.0,
            event,
        })
    }

    /// Evaluates pairs of answers on the team: their loss, and how often the chosen one is preferred.
    pub(crate) fn evaluate_pairs(
        &mut self,
        data: &Dataset,
        log: &mut EventLog,
    ) -> Result<(EvaluationSums, PreferenceFigures), StepInterrupt> {
        let batch = self.context.batches.rows;
        let mut rows = Rows::new(batch, data.sequence());
        let (mut sums, mut tokens) = (PreferenceSums::default(), 0);
        for first in (0..data.rows()).step_by(batch as usize) {
            let numbers = first..(first + batch).min(data.rows());
            data.read(numbers.clone(), &mut rows)?;
            tokens += rows.labelled_tokens();
            let scores =
                self.run_with_recovery(log, |session| session.team.score(&mut rows, ScoredWeights::Present))?;
            let numbered: Vec<SourceRow> = numbers.map(|row| SourceRow { source: 0, row }).collect();
            let reference = read_reference(self.references.eval.as_ref(), &numbered)?;
            let losses = pair_losses(&self.context.run.dpo, &rows, &scores, &reference);
            losses.iter().flatten().for_each(|loss| sums.add(loss));
        }
        // `EvaluationSums` divides by tokens: its loss is then the mean over pairs.
        let loss_sum = sums.loss() * tokens as f64;
        Ok((EvaluationSums { loss_sum, tokens, ..EvaluationSums::default() }, sums.figures()))
    }
}
