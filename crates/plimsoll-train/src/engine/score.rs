//! The score: log-probabilities of labels, for steps and evaluations of objectives that need them.

use super::Engine;
use crate::data::Rows;
use plimsoll_device::cpu::executor::real_values;
use plimsoll_device::error::DeviceError;
use plimsoll_program::ProgramKind;

impl Engine {
    /// Computes the log-probability of each label of `rows` under the present weights, without dropout. Returns one value
    /// for each position, `[R, T]`; 0 for positions without label. Returns `None` on a device that computes no loss: a
    /// storage-only worker, or a pipeline stage before the last.
    ///
    /// Runs at least `min_micro_batches` micro-batches, like [`Engine::gradients`].
    pub fn score(&mut self, rows: &mut Rows, min_micro_batches: u64) -> Result<Option<Vec<f64>>, DeviceError> {
        let (values, scored) = (self.recipe.micro_batch as usize * self.sequence, rows.tokens.len());
        let mut scores = Vec::with_capacity(scored);
        for micro_batch in 0..self.pad_rows(rows, min_micro_batches.max(1) as usize) {
            let range = micro_batch * values..(micro_batch + 1) * values;
            let (inputs, output) = self.tensors.score.as_ref().expect("the plan computes scores");
            let output = *output;
            Engine::write_micro_batch(&mut *self.device, self.precision, inputs, rows, range, 0);
            self.run(ProgramKind::Score)?;
            self.device.synchronize()?;
            let Some(output) = output else { continue };
            let dtype = self.precision.wide();
            let mut bytes = vec![0; values * dtype.bytes() as usize];
            self.device.read(output, 0, &mut bytes);
            scores.extend(real_values(dtype, &bytes));
            self.device.synchronize()?;
        }
        scores.truncate(scored);
        Ok(self.tensors.score.as_ref().and_then(|(_, output)| *output).map(|_| scores))
    }
}
