//! Evaluation on one device: sums over rows of the evaluation data.

use super::Engine;
use super::failure::DeviceFailure;
use crate::data::{Dataset, Rows};
use plimsoll_core::micro_batches;
use plimsoll_device::error::DeviceError;
use plimsoll_program::ProgramKind;
use plimsoll_program::scalars::{METRIC_COUNT, Metric};
use std::ops::Range;

/// Most labelled tokens of a document that counts as a prompt with one right answer. Longer texts have many right forms.
pub const ANSWER_TOKENS_MAX: usize = 32;

/// Sums over evaluated rows: losses, labelled tokens and documents.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EvaluationSums {
    /// Sum of the negative log-likelihoods of the labelled tokens.
    pub loss_sum: f64,
    /// Number of labelled tokens.
    pub tokens: u64,
    /// Number of documents that are a prompt without labels and an answer of at most `ANSWER_TOKENS_MAX` labelled
    /// tokens. The rest of a document in its next row does not count.
    pub answers: u64,
    /// Number of answers of which the model predicts all tokens: each is the most likely token at its position.
    pub exact: u64,
    /// Number of documents with labels and without a single right answer: prose, or a long answer.
    pub open_ended: u64,
}

impl EvaluationSums {
    /// Adds `other`, the sums over other rows.
    pub fn add(&mut self, other: EvaluationSums) {
        self.loss_sum += other.loss_sum;
        self.tokens += other.tokens;
        self.answers += other.answers;
        self.exact += other.exact;
        self.open_ended += other.open_ended;
    }

    /// Counts the part of a document in one row, by its labels and hits. `begins_row` tells that the row begins with
    /// it: it may then continue a document of the row before, whose prompt is there.
    fn count_document(&mut self, begins_row: bool, labels: &[i32], hits: &[i32]) {
        let labelled = || (0..labels.len()).filter(|&at| labels[at] >= 0);
        let tokens = labelled().count();
        self.tokens += tokens as u64;
        let has_prompt = labels[0] < 0;
        match tokens {
            0 => {}
            1..=ANSWER_TOKENS_MAX if has_prompt => {
                self.answers += 1;
                self.exact += u64::from(labelled().all(|at| hits[at] == 1));
            }
            _ => self.open_ended += u64::from(has_prompt || !begins_row),
        }
    }

    /// Returns the share of exact answers; `None` if there are none, or if any document has no single right answer.
    pub fn exact_match(&self) -> Option<f64> {
        (self.answers > 0 && self.open_ended == 0).then(|| self.exact as f64 / self.answers as f64)
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
                ..count_documents(&rows.labels[range.clone()], &rows.document_start[range], &hits, self.sequence)
            });
            self.device.synchronize()?;
        }
        Ok(sum)
    }
}

/// Counts labelled tokens, answers, exact answers, and documents without a single right answer. All three lists have
/// one entry per token, for whole rows of `sequence` tokens. `labels` is negative for a token without a label. `hits` is
/// 1 where the most likely token is the label. The loss sum of the result is 0.
fn count_documents(labels: &[i32], document_start: &[i32], hits: &[i32], sequence: usize) -> EvaluationSums {
    let mut sum = EvaluationSums::default();
    let mut at = 0;
    while at < labels.len() {
        let row_end = (at / sequence + 1) * sequence;
        let is_same = |start: &&i32| **start == document_start[at];
        let end = at + document_start[at..row_end].iter().take_while(is_same).count();
        sum.count_document(at.is_multiple_of(sequence), &labels[at..end], &hits[at..end]);
        at = end;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_exact_when_all_labels_are_predicted() {
        // Two prompts with answers, and padding.
        let labels = [-100, 5, 6, -100, -100, 8, 9, 4];
        let starts = [0, 0, 0, 3, 0, 0, 0, 0];
        let hits = [0, 1, 1, 0, 1, 1, 0, 1];
        let sum = count_documents(&labels, &starts, &hits, 4);
        assert_eq!((sum.answers, sum.exact, sum.open_ended, sum.tokens), (2, 1, 0, 5));
        assert_eq!(sum.exact_match(), Some(0.5));
    }

    #[test]
    fn prose_and_long_answers_have_no_exact_match() {
        let prose = count_documents(&[5, 6, 7, 8], &[0, 0, 2, 2], &[1; 4], 4);
        assert_eq!((prose.answers, prose.open_ended, prose.tokens, prose.exact_match()), (0, 1, 4, None));
        let mut labels = vec![7; ANSWER_TOKENS_MAX + 2];
        labels[0] = -100;
        let (starts, hits) = (vec![0; labels.len()], vec![1; labels.len()]);
        assert_eq!(count_documents(&labels, &starts, &hits, labels.len()).exact_match(), None);
        // The row begins with the rest of an answer.
        let rest = count_documents(&[7, 8, -100, 9], &[0, 0, 2, 2], &[1; 4], 4);
        assert_eq!((rest.answers, rest.exact_match()), (1, Some(1.0)));
    }
}
