//! The two arenas of a device whose memory this processor sees: its own, and that of its host side.

use crate::arena::{Arena, ArenaError};
use crate::device::Memory;
use plimsoll_core::{Bytes, Space};
use plimsoll_program::Placement;
use std::borrow::Cow;
use std::ops::Range;

/// An arena for each space that has one.
#[derive(Debug)]
pub struct Spaces {
    device: Arena,
    host: Arena,
}

impl Spaces {
    /// Maps both arenas of a plan, and fills them with the pattern that shows what is written.
    ///
    /// # Errors
    /// What the machine refuses.
    pub fn map(placement: &Placement) -> Result<Spaces, ArenaError> {
        let mut spaces = Spaces { device: Arena::map(placement.arena_bytes)?, host: Arena::map(placement.host_bytes)? };
        spaces.device.fill_pattern();
        spaces.host.fill_pattern();
        Ok(spaces)
    }

    /// The arena of a space.
    ///
    /// # Panics
    /// For files, which have none.
    pub fn of(&self, space: Space) -> &Arena {
        match space {
            Space::Device => &self.device,
            Space::Host => &self.host,
            Space::File => panic!("bug: files stand in no arena"),
        }
    }

    /// The arena of a space, to be changed.
    ///
    /// # Panics
    /// For files, which have none.
    pub fn of_mut(&mut self, space: Space) -> &mut Arena {
        match space {
            Space::Device => &mut self.device,
            Space::Host => &mut self.host,
            Space::File => panic!("bug: files stand in no arena"),
        }
    }
}

impl Memory for Spaces {
    fn bytes(&self, space: Space) -> Bytes {
        self.of(space).bytes()
    }

    fn look(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.of_mut(space).contents()[range.start as usize..range.end as usize])
    }

    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]) {
        self.of_mut(space).contents()[first as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn poison(&mut self, space: Space, range: Range<u64>) {
        self.of_mut(space).poison(range);
    }

    fn high_water(&mut self, space: Space) -> Bytes {
        self.of_mut(space).high_water()
    }

    fn strayed(&mut self, space: Space) -> bool {
        self.of_mut(space).strayed()
    }
}
