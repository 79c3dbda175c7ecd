//! Text generation on one device: prompts and new tokens go into the key-value cache, and logits come out.

use super::Engine;
use super::tensors::{CopyTensors, GenerationTensors};
use bytemuck::cast_slice;
use plimsoll_device::cpu::executor::read_real_values;
use plimsoll_device::error::DeviceError;
use plimsoll_program::ProgramKind;
use plimsoll_program::models::decoder::PART_TOKENS;
use plimsoll_program::scalars::Scalar;
use std::iter::repeat;
use std::ops::Range;

/// Tokens of a prompt, to be appended to a slot of the key-value cache.
#[derive(Clone, Copy, Debug)]
pub struct SlotTokens<'a> {
    /// The slot.
    pub slot: usize,
    /// The tokens.
    pub tokens: &'a [i32],
    /// Number of tokens that the slot holds before.
    pub length: usize,
}

/// Tokens that are in one slot of the key-value cache, to be copied to the same positions of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// Slot that holds the tokens.
    pub from: usize,
    /// Slot that receives them.
    pub to: usize,
    /// Positions of the tokens.
    pub positions: Range<usize>,
}

impl<'a> SlotTokens<'a> {
    /// Returns parts of at most `size` tokens.
    fn parts(self, size: usize) -> impl Iterator<Item = SlotTokens<'a>> {
        let lengths = (self.length..).step_by(size);
        lengths.zip(self.tokens.chunks(size)).map(move |(length, tokens)| SlotTokens { tokens, length, ..self })
    }
}

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
            return self.prefill(tokens, length);
        }
        let (chunks, last) = tokens.split_at(tokens.len() - 1);
        self.append(&[SlotTokens { slot: 0, tokens: chunks, length }])?;
        self.decode(last, &[length + chunks.len()])?;
        self.new_logits(ProgramKind::Decode)
    }

    /// Appends `tokens` of a prompt to the first slot, as [`Engine::extend`] does, in chunks only.
    ///
    /// # Panics
    /// If the plan generates no text or several sequences, or if there are neither `tokens` nor cached ones.
    pub fn prefill(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceError> {
        assert!(self.slots() == 1, "the plan is for {} sequences", self.slots());
        assert!(length + tokens.len() > 0, "generation needs at least one token");
        self.append(&[SlotTokens { slot: 0, tokens, length }])?;
        self.new_logits(ProgramKind::Prefill)
    }

    /// Appends tokens of prompts to slots of the key-value cache, each slot at most once. With several slots, a chunk has
    /// tokens of several prompts.
    ///
    /// # Panics
    /// If the plan generates no text, or a slot has no room for the tokens and the padding of their last part.
    pub fn append(&mut self, prompts: &[SlotTokens]) -> Result<(), DeviceError> {
        let chunk = self.tensors.prefill.expect("the plan generates").chunk;
        let part = if self.slots() == 1 { chunk } else { PART_TOKENS as usize };
        let parts: Vec<SlotTokens> = prompts.iter().flat_map(|prompt| prompt.parts(part)).collect();
        parts.chunks(chunk / part).try_for_each(|parts| self.run_chunk(parts, part))
    }

    /// Copies tokens between slots of the key-value cache. No slot is copied from and copied to.
    ///
    /// # Panics
    /// If the plan generates no text, or a single sequence.
    pub fn copy_slots(&mut self, copies: &[SlotCopy]) -> Result<(), DeviceError> {
        let CopyTensors { from, to, rows } = self.tensors.copy_prefix.expect("the plan generates several sequences");
        let capacity = self.capacity();
        let place = |slot: usize, position: usize| (slot * capacity + position) as i32;
        let pairs = copies.iter().flat_map(|copy| {
            copy.positions.clone().map(|position| (place(copy.from, position), place(copy.to, position)))
        });
        let pairs: Vec<(i32, i32)> = pairs.collect();
        for pairs in pairs.chunks(rows) {
            // A negative place fills the rest.
            let filled = pairs.iter().chain(repeat(&(0, -1))).take(rows).copied();
            let (sources, targets): (Vec<i32>, Vec<i32>) = filled.unzip();
            for (tensor, values) in [(from, &sources), (to, &targets)] {
                if let Some(tensor) = tensor {
                    self.device.write(tensor, 0, cast_slice(values));
                }
            }
            self.run(ProgramKind::CopyPrefix)?;
        }
        Ok(())
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

    /// Replaces `into` by the logits of the next token of a slot, after [`Engine::decode`].
    pub fn read_logits(&mut self, slot: usize, into: &mut Vec<f64>) -> Result<(), DeviceError> {
        self.read_row(ProgramKind::Decode, slot, into)
    }

    /// Runs the prefill Program over parts of at most `size` tokens, which fit into one chunk.
    fn run_chunk(&mut self, parts: &[SlotTokens], size: usize) -> Result<(), DeviceError> {
        let (capacity, chunk) = (self.capacity(), self.tensors.prefill.expect("the plan generates").chunk);
        let last = parts[parts.len() - 1];
        let (mut tokens, mut positions, mut places) = (Vec::new(), Vec::new(), Vec::new());
        // The last part fills the chunk: its keys and values are written again.
        for part in parts.iter().chain(repeat(&last)).take(chunk / size) {
            let (first, end) = (part.length, part.length + size);
            // The padding of a part must not reach the next slot.
            assert!(end <= capacity, "{first} and {size} tokens exceed a cache of {capacity}");
            tokens.extend(part.tokens);
            tokens.resize(positions.len() + size, 0);
            positions.extend((first..end).map(|position| position as i32));
            places.extend((first..end).map(|position| (part.slot * capacity + position) as i32));
        }
        self.set_scalars(&[(Scalar::LastRow, (last.tokens.len() - 1) as f64)]);
        self.write_tokens(ProgramKind::Prefill, &tokens, &positions, &places);
        self.run(ProgramKind::Prefill)
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

    fn new_logits(&mut self, program: ProgramKind) -> Result<Vec<f64>, DeviceError> {
        let mut logits = Vec::new();
        self.read_row(program, 0, &mut logits)?;
        Ok(logits)
    }

    /// Replaces `into` by a row of the logits that a Program computed; none on a device without logits.
    fn read_row(&mut self, program: ProgramKind, row: usize, into: &mut Vec<f64>) -> Result<(), DeviceError> {
        into.clear();
        self.device.synchronize()?;
        let Some(logits) = self.generation_tensors(program).logits else { return Ok(()) };
        self.logit_bytes.resize(self.vocab * self.precision.bytes() as usize, 0);
        let offset = (row * self.logit_bytes.len()) as u64;
        self.device.read_from(logits, 0, offset, &mut self.logit_bytes);
        self.device.synchronize()?;
        read_real_values(self.precision, &self.logit_bytes, into);
        Ok(())
    }

    fn generation_tensors(&self, program: ProgramKind) -> GenerationTensors {
        let tensors = if program == ProgramKind::Decode { self.tensors.decode } else { self.tensors.prefill };
        tensors.expect("the plan generates")
    }
}
