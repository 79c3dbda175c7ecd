//! Text generation on one device: prompts and new tokens go into the key-value cache, and logits come out.

use super::Engine;
use super::tensors::GenerationTensors;
use bytemuck::cast_slice;
use plimsoll_device::cpu::executor::real_values;
use plimsoll_device::error::DeviceError;
use plimsoll_program::ProgramKind;
use plimsoll_program::scalars::Scalar;
use std::ops::Range;

impl Engine {
    /// Returns the number of sequences that are generated at once; 0 if the plan generates no text.
    pub fn slots(&self) -> usize {
        self.tensors.slots
    }

    /// Returns the tokens that a slot of the key-value cache can hold; 0 if the plan generates no text.
    pub fn capacity(&self) -> usize {
        self.tensors.capacity
    }

    /// Appends `tokens` to the first slot of the key-value cache, which already holds `length` tokens. Returns the logits
    /// for the next token, one per token of the vocabulary. The list is empty on a storage-only worker, on a pipeline
    /// stage before the last.
    ///
    /// # Panics
    /// If the plan generates no text or several sequences, or if there are neither `tokens` nor cached ones.
    pub fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceError> {
        assert!(self.slots() == 1, "the plan is for {} sequences", self.slots());
        let chunk = self.tensors.prefill.expect("the plan generates").chunk;
        // A single token after whole chunks needs no chunk of its own.
        if tokens.is_empty() || !(tokens.len() - 1).is_multiple_of(chunk) {
            return self.prefill(0, tokens, length);
        }
        let (chunks, last) = tokens.split_at(tokens.len() - 1);
        self.run_chunks(0, chunks, length)?;
        self.decode(last, &[length + chunks.len()])?;
        self.logits(0)
    }

    /// Appends `tokens` of a prompt to a slot of the key-value cache, which already holds `length` tokens. Returns the
    /// logits for the next token, as [`Engine::extend`] does.
    ///
    /// # Panics
    /// If the plan generates no text, or if there are neither `tokens` nor cached ones.
    pub fn prefill(&mut self, slot: usize, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceError> {
        assert!(length + tokens.len() > 0, "generation needs at least one token");
        self.run_chunks(slot, tokens, length)?;
        self.read_logits(ProgramKind::Prefill, 0)
    }

    /// Appends one token to each slot of the key-value cache. `lengths` are the tokens that the slots hold before.
    ///
    /// # Panics
    /// If the plan generates no text, or the lists have another length than the number of slots.
    pub fn decode(&mut self, tokens: &[i32], lengths: &[usize]) -> Result<(), DeviceError> {
        let capacity = self.capacity();
        assert!(tokens.len() == self.slots() && lengths.iter().all(|&length| length < capacity));
        let positions: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        let places: Vec<i32> = (0..).zip(lengths).map(|(slot, length)| (slot * capacity + length) as i32).collect();
        self.set_scalars(&[]);
        self.write_tokens(ProgramKind::Decode, tokens, &positions, &places);
        self.run(ProgramKind::Decode)
    }

    /// Returns the logits of the next token of a slot, after [`Engine::decode`].
    pub fn logits(&mut self, slot: usize) -> Result<Vec<f64>, DeviceError> {
        self.read_logits(ProgramKind::Decode, slot)
    }

    /// Runs the prefill Program over `tokens`, chunk by chunk.
    fn run_chunks(&mut self, slot: usize, tokens: &[i32], mut length: usize) -> Result<(), DeviceError> {
        let chunk = self.tensors.prefill.expect("the plan generates").chunk;
        let capacity = self.capacity();
        let numbers = |from: usize| -> Vec<i32> { Range { start: from as i32, end: (from + chunk) as i32 }.collect() };
        for given in tokens.chunks(chunk) {
            // The padding of a chunk must not reach the next slot.
            assert!(length + chunk <= capacity, "{length} and {chunk} tokens exceed a cache of {capacity}");
            let mut padded = given.to_vec();
            padded.resize(chunk, 0);
            self.set_scalars(&[(Scalar::LastRow, (given.len() - 1) as f64)]);
            self.write_tokens(ProgramKind::Prefill, &padded, &numbers(length), &numbers(slot * capacity + length));
            self.run(ProgramKind::Prefill)?;
            length += given.len();
        }
        Ok(())
    }

    /// Writes the inputs of a Program that generates.
    fn write_tokens(&mut self, program: ProgramKind, tokens: &[i32], positions: &[i32], places: &[i32]) {
        let to = self.generation_tensors(program);
        for (tensor, values) in [(to.tokens, tokens), (to.positions, positions), (to.places, places)] {
            if let Some(tensor) = tensor {
                self.device.write(tensor, 0, cast_slice(values));
            }
        }
    }

    /// Returns a row of the logits that a Program computed; none on a device without logits.
    fn read_logits(&mut self, program: ProgramKind, row: usize) -> Result<Vec<f64>, DeviceError> {
        self.device.synchronize()?;
        let Some(logits) = self.generation_tensors(program).logits else { return Ok(Vec::new()) };
        let mut bytes = vec![0; self.vocab * self.precision.bytes() as usize];
        self.device.read_from(logits, 0, (row * bytes.len()) as u64, &mut bytes);
        self.device.synchronize()?;
        Ok(real_values(self.precision, &bytes))
    }

    fn generation_tensors(&self, program: ProgramKind) -> GenerationTensors {
        let tensors = if program == ProgramKind::Decode { self.tensors.decode } else { self.tensors.prefill };
        tensors.expect("the plan generates")
    }
}
