//! The part of an optimizer step that a device of a team computes: what the passes that share out are told.

use plimsoll_core::Sharing;

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
    /// Where layers are shared out: the first layer of each device, and at last the number of all.
    pub layers: Vec<u64>,
}

impl Share {
    /// All of it.
    pub const ALONE: Share =
        Share { sharing: None, rank: 0, ranks: 1, first_sequence: 0, state: Vec::new(), layers: Vec::new() };
}
