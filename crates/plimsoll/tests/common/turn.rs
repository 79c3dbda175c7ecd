//! Turns of the tests of one binary. Tests run side by side, but a test that measures the speed of devices needs the
//! processor for itself: it takes a [`Turn::alone`], and each other test shares a turn for as long as it has a workspace.

use std::cell::Cell;
use std::sync::{Condvar, Mutex};

/// A turn of the present test. Turns nest: a test that holds one gets further ones at once, and gives its turn up with the
/// last of them.
pub struct Turn(());

struct Turns {
    shared: usize,
    is_alone: bool,
    waiting_alone: usize,
}

static TURNS: Mutex<Turns> = Mutex::new(Turns { shared: 0, is_alone: false, waiting_alone: 0 });
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// Turns that the test of this thread holds.
    static HELD: Cell<usize> = const { Cell::new(0) };
    /// Whether the first of them was taken to run alone.
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };
}

impl Turn {
    /// Waits until no other test runs alone or waits for that, then runs beside others.
    pub fn shared() -> Turn {
        if HELD.get() == 0 {
            let turns = TURNS.lock().unwrap();
            let mut turns = CHANGED.wait_while(turns, |turns| turns.is_alone || turns.waiting_alone > 0).unwrap();
            turns.shared += 1;
            IS_ALONE.set(false);
        }
        HELD.set(HELD.get() + 1);
        Turn(())
    }

    /// Waits until no other test of this binary runs, and keeps others from starting.
    pub fn alone() -> Turn {
        assert_eq!(HELD.get(), 0, "a test takes this turn before it has a workspace");
        let mut turns = TURNS.lock().unwrap();
        turns.waiting_alone += 1;
        let mut turns = CHANGED.wait_while(turns, |turns| turns.is_alone || turns.shared > 0).unwrap();
        turns.waiting_alone -= 1;
        turns.is_alone = true;
        IS_ALONE.set(true);
        HELD.set(1);
        Turn(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
        if HELD.get() > 0 {
            return;
        }
        let mut turns = TURNS.lock().unwrap();
        match IS_ALONE.get() {
            true => turns.is_alone = false,
            false => turns.shared -= 1,
        }
        CHANGED.notify_all();
    }
}
