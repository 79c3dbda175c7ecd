//! Weights on their way from the devices that train them to one beside them: what `save` of the ones writes is what `renew`
//! of the other reads, some bytes at a time and in the same order, so that nobody holds them twice. Neither side waits for
//! good: who cannot go on says so, and who is silent is missed.

use crate::team::heartbeat::Pulse;
use plimsoll_device::device::FileSpace;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Bytes of a file that are under way at most.
pub(crate) const UNDER_WAY: usize = 128 << 10;
/// How often who waits looks whether the other side is still there.
const LOOK: Duration = Duration::from_millis(50);

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stand {
    /// Bytes go over.
    Open,
    /// All has been taken.
    Taken,
    /// The side that takes cannot go on: what is still given goes nowhere.
    Refused,
    /// The side that gives cannot go on.
    Dropped,
}

/// What both sides of one handing over share.
pub struct Handover {
    state: Mutex<State>,
    changed: Condvar,
    /// Of the device that takes.
    pulse: Option<Arc<Pulse>>,
}

struct State {
    stand: Stand,
    /// What the bytes are a part of, and where it begins.
    tensor: String,
    offset: u64,
    bytes: Vec<u8>,
    taken: usize,
}

impl State {
    fn is_empty(&self) -> bool {
        self.taken == self.bytes.len()
    }
}

impl Handover {
    /// Nothing has been given yet; `pulse` is the life of the device that takes.
    pub fn new(pulse: Option<Arc<Pulse>>) -> Arc<Handover> {
        let state = State { stand: Stand::Open, tensor: String::new(), offset: 0, bytes: Vec::new(), taken: 0 };
        Arc::new(Handover { state: Mutex::new(state), changed: Condvar::new(), pulse })
    }

    /// Comes to an end, if it has not before.
    pub fn end(&self, stand: Stand) {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if state.stand == Stand::Open {
            state.stand = stand;
        }
        self.changed.notify_all();
    }

    /// Waits until the other side has all, or gives up.
    pub fn settled(&self) -> Stand {
        self.after(|_| true).stand
    }

    /// Waits while this holds and both sides go on.
    fn after(&self, waits: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while state.stand == Stand::Open && waits(&state) {
            if self.pulse.as_ref().is_some_and(|pulse| pulse.is_lost()) {
                state.stand = Stand::Refused;
                self.changed.notify_all();
                break;
            }
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        state
    }
}

/// The side that gives.
pub struct Giving<'a>(pub &'a Handover);

impl FileSpace for Giving<'_> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is only given")))
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        for (number, bytes) in from.chunks(UNDER_WAY).enumerate() {
            let mut state = self.0.after(|state| !state.is_empty());
            if state.stand != Stand::Open {
                // Nobody takes it: that is no trouble of those who train.
                return Ok(());
            }
            let State { tensor: of, bytes: under_way, .. } = &mut *state;
            of.clear();
            of.push_str(tensor);
            under_way.clear();
            under_way.extend_from_slice(bytes);
            (state.offset, state.taken) = (offset + (number * UNDER_WAY) as u64, 0);
            self.0.changed.notify_all();
        }
        Ok(())
    }
}

/// The side that takes. Dropped before all was taken, it has refused the rest.
pub struct Taking<'a>(pub &'a Handover);

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.0.end(Stand::Refused);
    }
}

impl FileSpace for Taking<'_> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            let mut state = self.0.after(State::is_empty);
            if state.stand != Stand::Open {
                return Err(io::Error::new(io::ErrorKind::BrokenPipe, format!("`{tensor}` is given no more")));
            }
            let next = state.offset + state.taken as u64;
            if state.tensor != tensor || next != offset + filled as u64 {
                let message = format!("`{}` from {next} is given where `{tensor}` is taken", state.tensor);
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            let first = state.taken;
            let bytes = (into.len() - filled).min(state.bytes.len() - first);
            into[filled..filled + bytes].copy_from_slice(&state.bytes[first..first + bytes]);
            state.taken += bytes;
            filled += bytes;
            self.0.changed.notify_all();
        }
        Ok(())
    }

    fn write(&mut self, tensor: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is only taken")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn what_is_given_in_pieces_is_taken_in_others_and_in_order() {
        let given: Vec<u8> = (0..3 * UNDER_WAY + 77).map(|i| (i * 31 % 251) as u8).collect();
        let over = Handover::new(None);
        let taken = thread::scope(|scope| {
            let taker = scope.spawn(|| {
                let (mut side, mut taken) = (Taking(&over), vec![0; given.len()]);
                let mut offset = 0;
                for piece in taken.chunks_mut(1000 * 1000 + 3) {
                    side.read("saved:a", offset, piece).unwrap();
                    offset += piece.len() as u64;
                }
                over.end(Stand::Taken);
                taken
            });
            let mut offset = 0;
            for piece in given.chunks(UNDER_WAY + 5) {
                Giving(&over).write("saved:a", offset, piece).unwrap();
                offset += piece.len() as u64;
            }
            assert_eq!(over.settled(), Stand::Taken);
            taker.join().unwrap()
        });
        assert!(taken == given);
    }

    #[test]
    fn no_side_waits_for_one_that_has_given_up() {
        let over = Handover::new(None);
        drop(Taking(&over));
        Giving(&over).write("saved:a", 0, &[1; 8]).unwrap();
        Giving(&over).write("saved:b", 0, &[2; 8]).unwrap();
        assert_eq!(over.settled(), Stand::Refused);
        let over = Handover::new(None);
        over.end(Stand::Dropped);
        assert!(Taking(&over).read("saved:a", 0, &mut [0; 8]).is_err());
        assert_eq!(over.settled(), Stand::Dropped);
    }

    #[test]
    fn another_tensor_than_the_one_that_is_given_is_not_taken_for_it() {
        let over = Handover::new(None);
        Giving(&over).write("saved:a", 0, &[1; 8]).unwrap();
        assert!(Taking(&over).read("saved:b", 0, &mut [0; 8]).is_err());
    }
}
