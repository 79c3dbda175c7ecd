//! The share of an optimizer step that one worker (a device of a team) computes. The planner chooses it, and
//! [`crate::passes::parallelism`] builds the worker's Programs from it.

use crate::formats::STATE_BLOCK;
use crate::schedule::Schedule;
use plimsoll_core::{Parallelism, micro_batches};
use std::ops::Range;

/// The share of an optimizer step that one worker (a device of a team) computes, and of the state that it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Kind of parallelism (data, sharded or pipeline); `None` for a single device.
    pub parallelism: Option<Parallelism>,
    /// Rank of the worker, from 0.
    pub rank: u32,
    /// Number of workers.
    pub ranks: u32,
    /// Index of the worker's first sequence among all sequences of the step. Dropout depends on it, so that the mask of
    /// a sequence is the same on any number of workers.
    pub first_sequence: u64,
    /// Sharded (FSDP): part of weights, gradients and optimizer state that each rank holds, in units of 1/1024 that sum
    /// up to 1024. Empty otherwise.
    pub state: Vec<u64>,
    /// Sharded (FSDP): micro-batches of a step, equal on all ranks because all take part in every all-gather; some may
    /// have no sequence on this rank. 0 otherwise.
    pub micro_batches: u64,
    /// Pipeline: first layer of each stage, then the layer count as last entry. Empty otherwise.
    pub layers: Vec<u64>,
}

impl Share {
    /// The whole step, as a single device computes it.
    pub const SINGLE_DEVICE: Share = Share {
        parallelism: None,
        rank: 0,
        ranks: 1,
        first_sequence: 0,
        state: Vec::new(),
        micro_batches: 0,
        layers: Vec::new(),
    };

    /// Returns the part of weights, gradients and optimizer state that this rank holds, in units of 1/1024; `None` if
    /// they are not sharded.
    pub fn own_state_share(&self) -> Option<u64> {
        self.state.get(self.rank as usize).copied()
    }

    /// Returns the number of micro-batches that this rank runs in a step: enough for its `sequences` sequences,
    /// `micro_batch` at a time. All ranks of a sharded team run equally many, some of them without sequences.
    pub fn micro_batches_of(&self, sequences: u64, micro_batch: u32) -> u64 {
        micro_batches(sequences, micro_batch).max(self.micro_batches)
    }

    /// Returns the range of layers that this rank computes: those of its pipeline stage, or else all `layers` layers of
    /// the model.
    pub fn own_layers(&self, layers: u64) -> Range<u64> {
        match self.parallelism {
            Some(Parallelism::Pipeline) => self.layers[self.rank as usize]..self.layers[self.rank as usize + 1],
            _ => 0..layers,
        }
    }

    /// Returns the index of this rank's pipeline stage and the number of stages; (0, 1) without a pipeline.
    pub fn stage(&self) -> (u32, u32) {
        match self.parallelism {
            Some(Parallelism::Pipeline) => (self.rank, self.ranks),
            _ => (0, 1),
        }
    }

    /// Returns the order in which this rank calls its Programs in a step of `micro_batches` micro-batches.
    pub fn schedule(&self, micro_batches: u32) -> Schedule {
        let (stage, stages) = self.stage();
        Schedule::one_forward_one_backward(stages, stage, micro_batches)
    }

    /// Returns the largest number of micro-batches in flight (forward pass done, backward pass not) in a step of
    /// `micro_batches`; 1 if that is 0. This rank holds the activations of that many micro-batches at once.
    pub fn in_flight(&self, micro_batches: u32) -> u32 {
        let (stage, stages) = self.stage();
        (stages - stage).min(micro_batches).max(1)
    }

    /// Splits `elements` elements of a sharded tensor over the ranks. Returns the range of each rank, which may be
    /// empty; no ranges if nothing is sharded.
    ///
    /// Ranges start at multiples of 256 elements, the block of 8-bit optimizer state, so that every block has one
    /// owner. A small tensor may belong to one rank alone.
    pub fn parts(&self, elements: u64) -> Vec<Range<u64>> {
        let all: u64 = self.state.iter().sum();
        let (mut before, mut end) = (0, 0);
        let parts = self.state.iter().enumerate().map(|(rank, own)| {
            before += own;
            let first = end;
            let cut = u128::from(elements) * u128::from(before) / u128::from(all.max(1));
            let is_last = rank + 1 == self.state.len();
            end = if is_last { elements } else { (cut as u64).next_multiple_of(STATE_BLOCK).min(elements) };
            first..end
        });
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_elements_in_whole_blocks() {
        for state in [vec![512, 512], vec![1000, 24], vec![0, 700, 324], vec![1, 1, 1022]] {
            let share = Share { ranks: state.len() as u32, state, ..Share::SINGLE_DEVICE };
            for elements in [1, 255, 256, 257, 1000, 123_456] {
                let parts = share.parts(elements);
                assert_eq!((parts.len(), parts[0].start), (share.ranks as usize, 0));
                assert_eq!(parts.last().map(|part| part.end), Some(elements));
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(parts.iter().all(|part| part.start == elements || part.start.is_multiple_of(STATE_BLOCK)));
            }
        }
    }
}
