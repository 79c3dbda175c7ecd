//! The thread that prepares the rows of the next step while the present one runs. Two sets of rows
//! go round between it and the loader, so it is never more than one step ahead.

use super::error::DataError;
use super::order::Batches;
use super::rows::{Dataset, Rows};
use plimsoll_core::Bytes;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// What one optimizer step trains on.
#[derive(Clone, Debug)]
pub struct Step {
    /// Counted from 0.
    pub step: u64,
    /// Its rows: R, or fewer in the very last step of a stream that ends.
    pub rows: Rows,
    /// Positions of all its rows that have a label; 0 when all are ignored.
    pub labelled_tokens: u64,
}

/// Steps in order, each prepared ahead. Begins at any step and gives the same rows as a loader that came there
/// from step 0. Dropping it stops its thread.
pub struct Loader {
    ready: Option<Receiver<Result<Step, DataError>>>,
    used: Option<Sender<Rows>>,
    thread: Option<JoinHandle<()>>,
    current: Option<Step>,
}

impl Loader {
    /// Starts to prepare the steps of `batches` from `first_step` on.
    pub fn start(dataset: Arc<Dataset>, batches: Batches, first_step: u64) -> Loader {
        assert_eq!(batches.order.rows, dataset.rows(), "an order of other data");
        let (ready_in, ready) = channel();
        let (used, used_out) = channel::<Rows>();
        for _ in 0..2 {
            used.send(Rows::new(batches.rows, dataset.sequence())).expect("the receiver is here");
        }
        let work = move || {
            for step in first_step.. {
                let positions = batches.positions(step);
                // The loader is gone, or all steps are done.
                let Ok(mut rows) = used_out.recv() else { return };
                if positions.is_empty() {
                    return;
                }
                let read = dataset.read(positions.map(|position| batches.order.row(position)), &mut rows);
                let labelled_tokens = rows.labelled_tokens();
                let failed = read.is_err();
                if ready_in.send(read.map(|()| Step { step, rows, labelled_tokens })).is_err() || failed {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("data".to_owned()).spawn(work).expect("a thread can be started");
        Loader { ready: Some(ready), used: Some(used), thread: Some(thread), current: None }
    }

    /// The next step; none after the last. The step before it is given up.
    pub fn next_step(&mut self) -> Result<Option<&mut Step>, DataError> {
        if let (Some(step), Some(used)) = (self.current.take(), &self.used) {
            // A thread that has ended needs no rows.
            let _ = used.send(step.rows);
        }
        let Some(ready) = &self.ready else { return Ok(None) };
        match ready.recv() {
            Ok(Ok(step)) => Ok(Some(self.current.insert(step))),
            Ok(Err(error)) => {
                self.stop();
                Err(error)
            }
            Err(_) => {
                self.stop();
                Ok(None)
            }
        }
    }

    /// The most memory that a loader of steps of `rows` rows holds.
    pub fn bytes(rows: u64, sequence: u64) -> Bytes {
        Rows::bytes(rows, sequence) + Rows::bytes(rows, sequence)
    }

    fn stop(&mut self) {
        (self.ready, self.used) = (None, None);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::super::Order;
    use super::super::testing::{Sample, seen, watched};
    use super::*;

    fn sample() -> Sample {
        let document = |first: i32| ((first..first + 10 + first % 7).collect(), None);
        Sample::tokens(&(0..40).map(document).collect::<Vec<_>>(), 8, true)
    }

    fn batches(data: &Dataset, epochs: Option<f64>) -> Batches {
        let order = Order { seed: 5, rows: data.rows(), shuffle: true };
        Batches { order, rows: 7, end: epochs.map(|epochs| order.rows_of_epochs(epochs)) }
    }

    #[test]
    fn a_loader_goes_on_at_any_step_with_the_same_rows() {
        watched(|| {
            let sample = sample();
            let data = Arc::new(sample.open().unwrap());
            let batches = batches(&data, Some(2.0));
            let steps = batches.steps().unwrap();
            assert_ne!(data.rows() * 2 % 7, 0, "the last step is to be a partial one");
            let steps_from = |first: u64| {
                let mut loader = Loader::start(data.clone(), batches, first);
                let mut taken = Vec::new();
                while let Some(step) = loader.next_step().unwrap() {
                    assert_eq!(step.labelled_tokens, step.rows.labelled_tokens());
                    taken.push((step.step, seen(&step.rows), step.labelled_tokens));
                }
                assert!(loader.next_step().unwrap().is_none(), "the end stays the end");
                taken
            };
            let whole = steps_from(0);
            assert_eq!(whole.len() as u64, steps);
            assert_eq!(whole.iter().map(|(.., labelled)| labelled).sum::<u64>(), 2 * data.labelled_tokens());
            for first in [1, 4, steps - 1, steps] {
                assert_eq!(steps_from(first), whole[first as usize..]);
            }
        });
    }

    #[test]
    fn a_dropped_loader_stops() {
        watched(|| {
            let sample = sample();
            let data = Arc::new(sample.open().unwrap());
            for taken in 0..4 {
                let mut loader = Loader::start(data.clone(), batches(&data, None), 3);
                for _ in 0..taken {
                    loader.next_step().unwrap().unwrap();
                }
                drop(loader);
                assert_eq!(Arc::strong_count(&data), 1, "its thread is gone");
            }
        });
    }

    #[test]
    fn errors_of_the_thread_reach_the_run() {
        watched(|| {
            let sample = sample();
            let data = Arc::new(sample.open().unwrap());
            std::fs::write(&sample.cached(".tokens")[0], "").unwrap();
            let mut loader = Loader::start(data.clone(), batches(&data, None), 0);
            assert!(matches!(loader.next_step(), Err(DataError::Io { doing: "read", .. })));
            assert!(loader.next_step().unwrap().is_none());
        });
    }
}
