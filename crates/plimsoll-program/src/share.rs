//! The part of an optimizer step that a device of a team computes: what the passes that share out are told.

use crate::formats::STATE_BLOCK;
use crate::schedule::Schedule;
use plimsoll_core::{Sharing, micro_batches};
use std::ops::Range;

/// The part of a step that one device computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// How the work is shared out; none for a device that works alone.
    pub sharing: Option<Sharing>,
    /// Which device of the team it is, from 0 on.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// The first sequence of the step that is its own: what is drawn at random depends on a sequence's place in the step.
    pub first_sequence: u64,
    /// Where state is shared out: the part of each device, in parts of 1024 that sum up to 1024.
    pub state: Vec<u64>,
    /// Where state is shared out: the micro-batches of a step, as many on every device, some of them perhaps without any
    /// sequence. Elsewhere 0: as many as the device's own sequences take.
    pub micro_batches: u64,
    /// Where layers are shared out: the first layer of each device, and at last the number of all.
    pub layers: Vec<u64>,
}

impl Share {
    /// All of it.
    pub const ALONE: Share = Share {
        sharing: None,
        rank: 0,
        ranks: 1,
        first_sequence: 0,
        state: Vec::new(),
        micro_batches: 0,
        layers: Vec::new(),
    };

    /// Its part of the state in parts of 1024, where state is shared out.
    pub fn own_part(&self) -> Option<u64> {
        self.state.get(self.rank as usize).copied()
    }

    /// Micro-batches of a step in which the device computes so many sequences, so many at once.
    pub fn micro_batches_of(&self, sequences: u64, micro_batch: u32) -> u64 {
        micro_batches(sequences, micro_batch).max(self.micro_batches)
    }

    /// The layers of a model of so many that this device computes.
    pub fn own_layers(&self, layers: u64) -> Range<u64> {
        match self.sharing {
            Some(Sharing::Layers) => self.layers[self.rank as usize]..self.layers[self.rank as usize + 1],
            _ => 0..layers,
        }
    }

    /// Which stage of a pipeline of how many it is; the only one where layers are not shared out.
    pub fn stage(&self) -> (u32, u32) {
        match self.sharing {
            Some(Sharing::Layers) => (self.rank, self.ranks),
            _ => (0, 1),
        }
    }

    /// The calls of this device in a step of so many micro-batches.
    pub fn schedule(&self, micro_batches: u32) -> Schedule {
        let (stage, stages) = self.stage();
        Schedule::one_forward_one_backward(stages, stage, micro_batches)
    }

    /// Micro-batches of a step of so many whose activations this device holds at once.
    pub fn in_flight(&self, micro_batches: u32) -> u32 {
        let (stage, stages) = self.stage();
        (stages - stage).min(micro_batches).max(1)
    }

    /// The elements of a tensor's slot that each rank holds where state is shared out, in order. Parts begin at whole
    /// blocks of 8-bit state, so that a block has one owner; a small tensor may be one rank's alone.
    pub fn parts(&self, elements: u64) -> Vec<Range<u64>> {
        let all: u64 = self.state.iter().sum();
        let (mut before, mut end) = (0, 0);
        let parts = self.state.iter().enumerate().map(|(rank, own)| {
            before += own;
            let first = end;
            let cut = u128::from(elements) * u128::from(before) / u128::from(all.max(1));
            let last = rank + 1 == self.state.len();
            end = if last { elements } else { (cut as u64).next_multiple_of(STATE_BLOCK).min(elements) };
            first..end
        });
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once_and_no_block_has_two_owners() {
        for state in [vec![512, 512], vec![1000, 24], vec![0, 700, 324], vec![1, 1, 1022]] {
            let share = Share { ranks: state.len() as u32, state, ..Share::ALONE };
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
