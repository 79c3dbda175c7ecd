//! Transfer of weights from the team to an evaluator. The team's Program `Save` writes into [`WeightSender`]. The
//! evaluator's Program `ReloadWeights` reads from [`WeightReceiver`], in the same order and in small chunks, so the
//! weights are not held twice. Neither side waits forever: a side that fails says so, and a receiver that misses its
//! heartbeats counts as failed.

use crate::engine::tensor_files::CHUNK_BYTES;
use crate::heartbeat::Liveness;
use plimsoll_device::device::FileSpace;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Interval at which a waiting side checks that the other one is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// State of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferState {
    /// Bytes are being transferred.
    InProgress,
    /// The receiver has all bytes.
    Received,
    /// The receiver failed; further bytes are discarded.
    ReceiverFailed,
    /// The sender failed.
    SenderFailed,
}

/// Transfer of weights from the team to an evaluator: the chunk in transit and the state, which both sides share.
pub struct WeightTransfer {
    state: Mutex<State>,
    changed: Condvar,
    /// Liveness of the receiving device; `None` if it has no heartbeat.
    liveness: Option<Arc<Liveness>>,
}

struct State {
    progress: TransferState,
    /// Name of the tensor that `bytes` belong to.
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

impl WeightTransfer {
    /// Creates a transfer in progress, without bytes. `liveness` is that of the receiving device; `None` if it has no
    /// heartbeat.
    pub fn new(liveness: Option<Arc<Liveness>>) -> Arc<WeightTransfer> {
        let state = State {
            progress: TransferState::InProgress,
            tensor: String::new(),
            offset: 0,
            bytes: Vec::new(),
            taken: 0,
        };
        Arc::new(WeightTransfer { state: Mutex::new(state), changed: Condvar::new(), liveness })
    }

    /// Ends the transfer with the state `progress`, unless it has ended before.
    pub fn finish(&self, progress: TransferState) {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if state.progress == TransferState::InProgress {
            state.progress = progress;
        }
        self.changed.notify_all();
    }

    /// Waits until the receiver has all bytes, or one side fails. Returns the final state.
    pub fn wait_until_done(&self) -> TransferState {
        self.wait_while(|_| true).progress
    }

    /// Waits while the condition `waits` holds and the transfer is in progress. Ends the transfer if the receiving
    /// device is lost meanwhile. Returns the locked state.
    fn wait_while(&self, waits: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while state.progress == TransferState::InProgress && waits(&state) {
            if self.liveness.as_ref().is_some_and(|liveness| liveness.is_lost()) {
                state.progress = TransferState::ReceiverFailed;
                self.changed.notify_all();
                break;
            }
            state = self.changed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        state
    }
}

/// Sending side of a transfer.
pub struct WeightSender<'a>(pub &'a WeightTransfer);

impl FileSpace for WeightSender<'_> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is write-only")))
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        for (number, bytes) in from.chunks(CHUNK_BYTES).enumerate() {
            let mut state = self.0.wait_while(|state| !state.is_empty());
            if state.progress != TransferState::InProgress {
                // A failed receiver must not fail the training.
                return Ok(());
            }
            let State { tensor: current_tensor, bytes: under_way, .. } = &mut *state;
            current_tensor.clear();
            current_tensor.push_str(tensor);
            under_way.clear();
            under_way.extend_from_slice(bytes);
            (state.offset, state.taken) = (offset + (number * CHUNK_BYTES) as u64, 0);
            self.0.changed.notify_all();
        }
        Ok(())
    }
}

/// Receiving side of a transfer. If it is dropped while the transfer is in progress, the receiver counts as failed.
pub struct WeightReceiver<'a>(pub &'a WeightTransfer);

impl Drop for WeightReceiver<'_> {
    fn drop(&mut self) {
        self.0.finish(TransferState::ReceiverFailed);
    }
}

impl FileSpace for WeightReceiver<'_> {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            let mut state = self.0.wait_while(State::is_empty);
            if state.progress != TransferState::InProgress {
                return Err(io::Error::new(io::ErrorKind::BrokenPipe, format!("`{tensor}` is no longer sent")));
            }
            let next = state.offset + state.taken as u64;
            if state.tensor != tensor || next != offset + filled as u64 {
                let message = format!("`{}` from {next} was sent, expected `{tensor}`", state.tensor);
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
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is read-only")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn differing_chunk_sizes_arrive_in_order() {
        let given: Vec<u8> = (0..3 * CHUNK_BYTES + 77).map(|i| (i * 31 % 251) as u8).collect();
        let over = WeightTransfer::new(None);
        let taken = thread::scope(|scope| {
            let taker = scope.spawn(|| {
                let (mut side, mut taken) = (WeightReceiver(&over), vec![0; given.len()]);
                let mut offset = 0;
                for piece in taken.chunks_mut(1000 * 1000 + 3) {
                    side.read("saved:a", offset, piece).unwrap();
                    offset += piece.len() as u64;
                }
                over.finish(TransferState::Received);
                taken
            });
            let mut offset = 0;
            for piece in given.chunks(CHUNK_BYTES + 5) {
                WeightSender(&over).write("saved:a", offset, piece).unwrap();
                offset += piece.len() as u64;
            }
            assert_eq!(over.wait_until_done(), TransferState::Received);
            taker.join().unwrap()
        });
        assert!(taken == given);
    }

    #[test]
    fn neither_side_waits_for_failed_side() {
        let over = WeightTransfer::new(None);
        drop(WeightReceiver(&over));
        WeightSender(&over).write("saved:a", 0, &[1; 8]).unwrap();
        WeightSender(&over).write("saved:b", 0, &[2; 8]).unwrap();
        assert_eq!(over.wait_until_done(), TransferState::ReceiverFailed);
        let over = WeightTransfer::new(None);
        over.finish(TransferState::SenderFailed);
        assert!(WeightReceiver(&over).read("saved:a", 0, &mut [0; 8]).is_err());
        assert_eq!(over.wait_until_done(), TransferState::SenderFailed);
    }

    #[test]
    fn receiving_another_tensor_fails() {
        let over = WeightTransfer::new(None);
        WeightSender(&over).write("saved:a", 0, &[1; 8]).unwrap();
        assert!(WeightReceiver(&over).read("saved:b", 0, &mut [0; 8]).is_err());
    }
}
