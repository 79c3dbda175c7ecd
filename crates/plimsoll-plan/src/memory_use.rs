//! The bytes of one space that are in use at each tick of a phase, in all and by category.
//!
//! Tensors that are live at the same moment seldom fill a space without gaps. The gaps at the fullest moment of a phase
//! are unusable in the whole phase, so they count at each of its ticks. The most bytes in use are then exactly the end of
//! the highest buffer.

use crate::lifetimes::Lifetimes;
use plimsoll_core::{Bytes, Category, Space};
use plimsoll_program::{Lifetime, ProgramSet};
use std::collections::BTreeMap;

/// The bytes of a space in use at each tick of a phase.
pub struct PhaseMemory {
    /// Bytes of live buffers at each tick; zero at later ticks.
    live: Vec<u64>,
    /// Bytes in use beside live buffers: persistent tensors, and the gaps at the fullest tick.
    base: u64,
}

impl PhaseMemory {
    /// Computes the bytes in use from the lifetimes of the phase's buffers. `top` is the end of the highest buffer in
    /// bytes; without buffers, that of the persistent tensors.
    pub fn new(lifetimes: &Lifetimes, top: u64) -> PhaseMemory {
        let ticks = lifetimes.buffers.iter().map(|buffer| buffer.last as usize + 1).max().unwrap_or(0);
        let mut live = vec![0u64; ticks + 1];
        for buffer in &lifetimes.buffers {
            let (first, after) = (buffer.first as usize, buffer.last as usize + 1);
            live[first] = live[first].wrapping_add(buffer.bytes);
            live[after] = live[after].wrapping_sub(buffer.bytes);
        }
        let mut sum = 0u64;
        for bytes in &mut live {
            sum = sum.wrapping_add(*bytes);
            *bytes = sum;
        }
        let most = live.iter().copied().max().unwrap_or(0);
        PhaseMemory { live, base: top.saturating_sub(most) }
    }

    /// Returns the most bytes of buffers that are live at one tick. Persistent tensors and gaps are not counted.
    pub fn most_live(&self) -> u64 {
        self.live.iter().copied().max().unwrap_or(0)
    }

    /// Returns the bytes in use at a tick.
    pub fn at(&self, tick: u32) -> u64 {
        self.base + self.live.get(tick as usize).copied().unwrap_or(0)
    }

    /// Returns the first tick with the most bytes in use.
    pub fn fullest_tick(&self) -> u32 {
        self.fullest_tick_between(0, self.live.len() as u32)
    }

    /// Returns the first of the ticks from `first` to `last` with the most bytes in use. Tick 0, at which no op runs, is
    /// returned only if it has more than all others.
    pub fn fullest_tick_between(&self, first: u32, last: u32) -> u32 {
        let is_fuller = |best: u32, tick: u32| (self.at(best), best > 0) < (self.at(tick), tick > 0);
        (first..=last).reduce(|best, tick| if is_fuller(best, tick) { tick } else { best }).unwrap_or(first)
    }

    /// Returns the most bytes in use at the ticks from `first` to `last`.
    pub fn most_between(&self, first: u32, last: u32) -> u64 {
        if first > last { self.base } else { self.at(self.fullest_tick_between(first, last)) }
    }

    /// Computes the bytes of each category of tensors in `space` at a tick of the phase with these lifetimes. Gaps
    /// between tensors count as workspace, so the sum is that of [`PhaseMemory::at`].
    pub fn by_category(
        &self,
        set: &ProgramSet,
        space: Space,
        lifetimes: &Lifetimes,
        tick: u32,
    ) -> BTreeMap<Category, Bytes> {
        let mut sums: BTreeMap<Category, Bytes> = BTreeMap::new();
        for tensor in set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.space == space) {
            *sums.entry(tensor.category).or_default() += Bytes(tensor.bytes() * u64::from(tensor.slots));
        }
        for (buffer, slots) in lifetimes.buffers.iter().zip(&lifetimes.slots) {
            if buffer.first <= tick && buffer.last >= tick {
                *sums.entry(set.tensor(slots[0].0).category).or_default() += Bytes(buffer.bytes);
            }
        }
        let attributed: Bytes = sums.values().copied().sum();
        *sums.entry(Category::Workspace).or_default() += Bytes(self.at(tick)).saturating_sub(attributed);
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::Buffer;

    fn buffer(bytes: u64, first: u32, last: u32) -> Buffer {
        Buffer { bytes, first, last }
    }

    #[test]
    fn gaps_of_fullest_tick_count_at_every_tick() {
        let buffers = vec![buffer(10, 0, 2), buffer(30, 1, 1), buffer(5, 3, 4)];
        let lifetimes = Lifetimes { slots: vec![vec![]; 3], buffers, programs: vec![] };
        let memory = PhaseMemory::new(&lifetimes, 100);
        assert_eq!([0, 1, 2, 3, 4, 5, 99].map(|tick| memory.at(tick)), [70, 100, 70, 65, 65, 60, 60]);
        assert_eq!((memory.fullest_tick(), memory.fullest_tick_between(2, 4)), (1, 2));
        assert_eq!((memory.most_between(3, 4), memory.most_between(4, 3)), (65, 60));
        assert_eq!(memory.most_live(), 40);
    }

    #[test]
    fn phase_without_buffers_uses_persistent_bytes() {
        let memory = PhaseMemory::new(&Lifetimes::default(), 40);
        assert_eq!((memory.at(0), memory.at(7), memory.fullest_tick()), (40, 40, 1));
    }
}
