//! Pressure from outside: what other programs leave of a memory, when a run gives way to them, and when it takes room
//! back. Words and numbers only: what is then done about it is the retreat's.

use plimsoll_core::Bytes;
use plimsoll_device::probe::Memory;
use std::time::{Duration, Instant};

/// How often a memory is looked at, at most.
const LOOK: Duration = Duration::from_secs(1);
/// A look that led to nothing, or to a move, may take this share of the time until the next.
const LOOK_SHARE: u32 = 10;
/// How long room must have been there before it is used again. Doubled each time that this turned out to be too early.
const CALM: Duration = Duration::from_secs(10);
/// The longest that this becomes.
const CALM_MOST: Duration = Duration::from_secs(640);

/// What a look at a memory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Felt {
    /// Nothing has to change.
    Nothing,
    /// Others press: no more than this is to be held.
    Less(Bytes),
    /// Others have given memory back, and have not wanted it since: as much as this may be held.
    Room(Bytes),
}

/// What a run holds, and what it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Now, measured.
    pub now: Bytes,
    /// The load line that holds.
    pub line: Bytes,
    /// The load line that the user gave.
    pub budget: Bytes,
    /// What the plan needs to which the run would go back.
    pub wanted: Bytes,
}

/// What is remembered between two looks.
#[derive(Clone, Copy, Debug)]
pub struct Pressure {
    next: Instant,
    /// Since when there has been room again.
    calm: Option<Instant>,
    /// How long there must be room.
    calm_for: Duration,
    /// When room was last used again.
    grown: Option<Instant>,
}

impl Pressure {
    /// Nothing has been seen yet.
    pub fn new(now: Instant) -> Pressure {
        Pressure { next: now + LOOK, calm: None, calm_for: CALM, grown: None }
    }

    /// Whether it is time to look.
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// A look, with what follows from it, began at `start` and is over now: looking stays a small share of the time.
    pub fn looked(&mut self, start: Instant, now: Instant) {
        self.next = now + LOOK.max(now.duration_since(start) * LOOK_SHARE);
    }

    /// Looks. What is to be held less leaves others twice the margin; room is taken back when it has been there for a
    /// while, and when the run holds what it wants there is still twice the margin: else it would go up and down all
    /// the time.
    pub fn feel(&mut self, memory: &Memory, held: Held, now: Instant) -> Felt {
        let left = room(memory, held.now);
        if memory.free < margin(memory) {
            self.calm = None;
            // Room that was taken back was wanted again soon.
            if self.grown.take().is_some_and(|grown| now.duration_since(grown) < 8 * self.calm_for) {
                self.calm_for = (2 * self.calm_for).min(CALM_MOST);
            }
            return Felt::Less(left);
        }
        let room = left.min(held.budget);
        // A little more room than before is worth no move, unless it is all that is wanted.
        if held.line >= held.budget || room < held.wanted.min(held.line + Bytes(held.line.0 / 8)) {
            self.calm = None;
            return Felt::Nothing;
        }
        if now.duration_since(*self.calm.get_or_insert(now)) < self.calm_for {
            return Felt::Nothing;
        }
        (self.calm, self.grown) = (None, Some(now));
        Felt::Room(room)
    }
}

/// The most that may be held by who holds so much now: others are left twice the margin.
pub fn room(memory: &Memory, held: Bytes) -> Bytes {
    (held + memory.free).saturating_sub(Bytes(2 * margin(memory).0))
}

/// Free memory that is left to others: 2 % of all, at most 512 MiB.
fn margin(memory: &Memory) -> Bytes {
    Bytes(memory.total.0 / 50).min(Bytes::mib(512))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(free: Bytes) -> Memory {
        Memory { total: Bytes::gib(10), free, bound_by: "the machine".into() }
    }

    const MARGIN: Bytes = Bytes(Bytes::gib(10).0 / 50);

    /// A run that holds what it may, at first.
    fn held(now: Bytes, line: Bytes) -> Held {
        Held { now, line, budget: Bytes::gib(6), wanted: Bytes::gib(5) }
    }

    #[test]
    fn a_run_gives_way_when_little_is_left_and_leaves_others_twice_the_margin() {
        let start = Instant::now();
        let mut pressure = Pressure::new(start);
        let full = held(Bytes::gib(5), Bytes::gib(6));
        assert_eq!(pressure.feel(&memory(MARGIN), full, start), Felt::Nothing);
        let free = Bytes(MARGIN.0 - 1);
        assert_eq!(pressure.feel(&memory(free), full, start), Felt::Less(Bytes::gib(5) + free - Bytes(2 * MARGIN.0)));
        let nothing = held(Bytes::mib(1), Bytes::gib(6));
        assert_eq!(pressure.feel(&memory(Bytes::ZERO), nothing, start), Felt::Less(Bytes::ZERO));
    }

    #[test]
    fn room_is_used_again_once_it_has_stayed_for_a_while() {
        let mut now = Instant::now();
        let mut pressure = Pressure::new(now);
        let small = held(Bytes::gib(3), Bytes::gib(3));
        let mut feel = |free: Bytes, seconds: u64| {
            now += Duration::from_secs(seconds);
            pressure.feel(&memory(free), small, now)
        };
        let enough = Bytes::gib(2) + Bytes(2 * MARGIN.0);
        assert_eq!(feel(enough, 0), Felt::Nothing);
        assert_eq!(feel(enough, 9), Felt::Nothing);
        // Somebody takes it for a moment: the wait begins anew. A few percent are no room.
        assert_eq!(feel(Bytes::mib(600), 1), Felt::Nothing);
        assert_eq!(feel(enough, 9), Felt::Nothing);
        assert_eq!(feel(enough, 9), Felt::Nothing);
        assert_eq!(feel(enough, 1), Felt::Room(Bytes::gib(5)));
        // Never more than the user gave.
        let plenty = Bytes::gib(7);
        assert_eq!(feel(plenty, 0), Felt::Nothing);
        assert_eq!(feel(plenty, 10), Felt::Room(Bytes::gib(6)));
    }

    #[test]
    fn part_of_the_room_is_used_where_all_of_it_does_not_return() {
        let start = Instant::now();
        let mut pressure = Pressure::new(start);
        let small = held(Bytes::gib(3), Bytes::gib(3));
        let some = Bytes::gib(1) + Bytes(2 * MARGIN.0);
        assert_eq!(pressure.feel(&memory(some), small, start), Felt::Nothing);
        assert_eq!(pressure.feel(&memory(some), small, start + CALM), Felt::Room(Bytes::gib(4)));
    }

    #[test]
    fn a_neighbour_that_comes_and_goes_makes_the_run_wait_longer_each_time() {
        let mut now = Instant::now();
        let mut pressure = Pressure::new(now);
        let (small, full) = (held(Bytes::gib(3), Bytes::gib(3)), held(Bytes::gib(5), Bytes::gib(6)));
        let enough = Bytes::gib(3);
        let mut waits = Vec::new();
        for _ in 0..9 {
            let begin = now;
            while pressure.feel(&memory(enough), small, now) == Felt::Nothing {
                now += LOOK;
            }
            waits.push(now.duration_since(begin).as_secs());
            now += LOOK;
            assert!(matches!(pressure.feel(&memory(Bytes::ZERO), full, now), Felt::Less(_)));
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 640, 640]);
    }

    #[test]
    fn looking_takes_a_small_share_of_the_time() {
        let start = Instant::now();
        let mut pressure = Pressure::new(start);
        assert!(!pressure.is_due(start) && pressure.is_due(start + LOOK));
        let long = start + Duration::from_secs(3);
        pressure.looked(start, long);
        assert!(!pressure.is_due(long + Duration::from_secs(29)) && pressure.is_due(long + Duration::from_secs(30)));
    }
}
