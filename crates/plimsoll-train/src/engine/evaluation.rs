//! Evaluation on one device: sums over rows of the evaluation data.

use super::Engine;
use super::failure::DeviceFailure;
use crate::data::{Dataset, Rows};
use plimsoll_core::micro_batches;
use plimsoll_device::error::DeviceError;
use plimsoll_program::ProgramKind;
use plimsoll_program::scalars::{METRIC_COUNT, Metric};
use std::ops::Range;

/// Sums over evaluated rows: losses, labelled tokens and documents.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EvaluationSums {
    /// Sum of the negative log-likelihoods of the labelled tokens.
    pub loss_sum: f64,
    /// Number of labelled tokens.
    pub tokens: u64,
    /// Number of documents with at least one labelled token. A document that spans several rows counts once per row.
    pub samples: u64,
    /// Number of documents with labelled tokens in which the model predicts all of them: each is the most likely token
    /// at its position.
    pub exact: u64,
}

impl EvaluationSums {
    /// Adds `other`, the sums over other rows.
    pub fn add(&mut self, other: EvaluationSums) {
        self.loss_sum += other.loss_sum;
        self.tokens += other.tokens;
        self.samples += other.samples;
        self.exact += other.exact;
    }

    /// Counts a document with labelled tokens; `exact` tells whether the model predicts all of them.
    fn count_sample(&mut self, exact: bool) {
        self.samples += 1;
        self.exact += u64::from(exact);
    }

    /// Returns the mean loss over the labelled tokens; NaN without any.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.tokens as f64
    }
}

/// Rows that one device evaluates in order, and the size of its micro-batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvaluationSlice {
    /// Range of row numbers in the dataset, counted from 0.
    pub rows: Range<u64>,
    /// Number of rows that one forward pass evaluates together.
    pub micro_batch: u32,
}

impl EvaluationSlice {
    /// Returns the number of micro-batches that cover all rows.
    pub(crate) fn micro_batches(&self) -> u64 {
        micro_batches(self.rows.end - self.rows.start, self.micro_batch)
    }
}

/// Evaluates the rows of `slice` and returns their sums. Runs at least `min_micro_batches` micro-batches; the last ones
/// have no rows if `slice` has too few. In a sharded or pipeline team, other workers wait for this one in each
/// micro-batch.
///
/// # Errors
/// The data cannot be read, or the device fails.
pub fn evaluate_slice(
    engine: &mut Engine,
    data: &Dataset,
    slice: &EvaluationSlice,
    min_micro_batches: u64,
) -> Result<EvaluationSums, DeviceFailure> {
    let EvaluationSlice { rows: all, micro_batch } = slice;
    let micro_batch = u64::from(*micro_batch);
    let mut rows = Rows::new(u64::from(engine.recipe().micro_batch).max(micro_batch), data.sequence());
    let mut sum = EvaluationSums::default();
    for first in
        (0..slice.micro_batches().max(min_micro_batches)).map(|index| (all.start + index * micro_batch).min(all.end))
    {
        data.read(first..(first + micro_batch).min(all.end), &mut rows)?;
        sum.add(engine.evaluate(&mut rows)?);
    }
    Ok(sum)
}

impl Engine {
    /// Evaluates `rows` and returns their sums. First appends empty rows until `rows` fills whole micro-batches, at
    /// least one; a storage-only worker needs none. The sums are 0 on a device that computes no loss: a storage-only
    /// worker, or a pipeline stage before the last.
    pub fn evaluate(&mut self, rows: &mut Rows) -> Result<EvaluationSums, DeviceError> {
        let mut sum = EvaluationSums::default();
        let values = self.recipe.micro_batch as usize * self.sequence;
        for micro_batch in 0..self.pad_rows(rows, 1) {
            let range = micro_batch * values..(micro_batch + 1) * values;
            let zeros = [0; 8 * METRIC_COUNT as usize];
            self.device.write(self.tensors.metrics, 0, &zeros);
            let (inputs, correct) = self.tensors.evaluate.as_ref().expect("the plan evaluates");
            let correct = *correct;
            Engine::write_micro_batch(&mut *self.device, self.precision, inputs, rows, range.clone(), 0);
            self.run(ProgramKind::Evaluate)?;
            self.device.synchronize()?;
            // The other stages of a pipeline only pass activations on, and storage-only workers have no results.
            let Some(correct) = correct else { continue };
            let mut hits = vec![0i32; values];
            self.device.read(correct, 0, bytemuck::cast_slice_mut(&mut hits));
            sum.add(EvaluationSums {
                loss_sum: self.metric(Metric::LossSum),
                ..count_samples(&rows.labels[range.clone()], &rows.document_start[range], &hits, self.sequence)
            });
            self.device.synchronize()?;
        }
        Ok(sum)
    }
}

/// Counts labelled tokens, documents with labelled tokens, and documents in which the model predicts all labelled
/// tokens. All three lists have one entry per token, for whole rows of `sequence` tokens. `labels` is negative for a
/// token without a label. `hits` is 1 where the most likely token is the label. The loss sum of the result is 0.
fn count_samples(labels: &[i32], document_start: &[i32], hits: &[i32], sequence: usize) -> EvaluationSums {
    let mut sum = EvaluationSums::default();
    let mut current: Option<((usize, i32), bool)> = None;
    for (i, _) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
        sum.tokens += 1;
        let document = (i / sequence, document_start[i]);
        let hit = hits[i] == 1;
        match &mut current {
            Some((current_document, exact)) if *current_document == document => *exact &= hit,
            other => {
                if let Some((_, exact)) = other.replace((document, hit)) {
                    sum.count_sample(exact);
                }
            }
        }
    }
    if let Some((_, exact)) = current {
        sum.count_sample(exact);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_is_exact_when_all_labels_are_predicted() {
        let labels = [-100, 5, 6, 7, -100, 8, 9, 9];
        let starts = [0, 0, 0, 3, 0, 0, 0, 3];
        let hits = [0, 1, 1, 1, 0, 1, 0, 1];
        let sum = count_samples(&labels, &starts, &hits, 4);
        assert_eq!((sum.samples, sum.exact, sum.tokens), (4, 3, 6));
    }
}
