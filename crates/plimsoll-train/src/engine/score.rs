//! The score: log-probabilities of labels, for steps and evaluations of objectives that need them.

use super::Engine;
use crate::data::Rows;
use plimsoll_device::cpu::executor::real_values;
use plimsoll_device::error::DeviceError;
use plimsoll_program::ProgramKind;

/// The weights under which labels are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoredWeights {
    /// The weights that the run trains, as they are now.
    Present,
    /// The weights with which the run began.
    Initial,
}

impl Engine {
    /// Computes the log-probability of each label of `rows` under these weights, without dropout. Returns one value for
    /// each position, `[R, T]`; 0 for positions without label. Returns `None` on a device that computes no loss: a
    /// storage-only worker, or a pipeline stage before the last.
    ///
    /// Runs at least `min_micro_batches` micro-batches, like [`Engine::gradients`].
    pub fn score(
        &mut self,
        rows: &mut Rows,
        weights: ScoredWeights,
        min_micro_batches: u64,
    ) -> Result<Option<Vec<f64>>, DeviceError> {
        let (values, scored) = (self.recipe.micro_batch as usize * self.sequence, rows.tokens.len());
        let mut scores = Vec::with_capacity(scored);
        let mut computes_loss = true;
        for micro_batch in 0..self.pad_rows(rows, min_micro_batches.max(1) as usize) {
            let range = micro_batch * values..(micro_batch + 1) * values;
            let (program, tensors) = match weights {
                ScoredWeights::Present => (ProgramKind::Score, &self.tensors.score),
                ScoredWeights::Initial => (ProgramKind::Reference, &self.tensors.reference),
            };
            let (inputs, output) = tensors.as_ref().expect("the plan computes scores");
            let output = *output;
            Engine::write_micro_batch(&mut *self.device, self.precision, inputs, rows, range, 0);
            self.run(program)?;
            self.device.synchronize()?;
            computes_loss = output.is_some();
            let Some(output) = output else { continue };
            let dtype = self.precision.wide();
            let mut bytes = vec![0; values * dtype.bytes() as usize];
            self.device.read(output, 0, &mut bytes);
            scores.extend(real_values(dtype, &bytes));
            self.device.synchronize()?;
        }
        scores.truncate(scored);
        Ok(computes_loss.then_some(scores))
    }
}
