//! The data thread: it reads the batch of the next step while the current step runs.
//!
//! Two row buffers circulate between the thread and the loader, so the thread is at most one step ahead. A full
//! buffer travels to the loader in a [`Batch`]; the loader returns it when the next batch is requested.

use super::error::DataError;
use super::mixture::SourceRow;
use super::order::BatchSampler;
use super::rows::Rows;
use super::training_data::TrainingData;
use plimsoll_core::Bytes;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// The rows (training sequences) of one optimizer step, for all workers and micro-batches together.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Number of the step, counted from 0.
    pub step: u64,
    /// The step's rows. There may be fewer in the last step of a run with its length given in epochs.
    pub rows: Rows,
    /// The source and the number of each row.
    pub sources: Vec<SourceRow>,
    /// Number of positions with a label (tokens that count in the loss), over all rows; 0 if every label is ignored.
    pub labelled_tokens: u64,
}

/// An iterator over the batches of a run. A thread prepares the next batch while the current step runs.
///
/// A loader may start at any step and then yields the batches that a loader started at step 0 yields from there on.
/// Dropping it stops the thread.
pub struct Loader {
    batches: Option<Receiver<Result<Batch, DataError>>>,
    free_rows: Option<Sender<Rows>>,
    thread: Option<JoinHandle<()>>,
    current: Option<Batch>,
}

impl Loader {
    /// Starts the thread that reads the batches of `sampler`, from step `first_step` (counted from 0) on.
    pub fn start(data: Arc<TrainingData>, sampler: BatchSampler, first_step: u64) -> Loader {
        assert_eq!(sampler.order.rows, data.rows(), "the sampler belongs to other data");
        let (batch_sender, batches) = channel();
        let (free_rows, free_rows_receiver) = channel::<Rows>();
        for _ in 0..2 {
            free_rows.send(Rows::new(sampler.rows, data.sequence())).expect("the receiver is in scope");
        }
        let refusal_sender = batch_sender.clone();
        let read = move || read_batches(&data, sampler, first_step, &free_rows_receiver, &batch_sender);
        let thread = std::thread::Builder::new().name("data".to_owned()).spawn(read);
        if thread.is_err() {
            // The first batch fails with this error.
            let _ = refusal_sender.send(Err(DataError::NoThread));
        }
        Loader { batches: Some(batches), free_rows: Some(free_rows), thread: thread.ok(), current: None }
    }

    /// Returns the batch of the next step, or `None` after the last batch or an error. The buffer of the previous batch
    /// is reused.
    ///
    /// # Errors
    /// The token cache cannot be read or is damaged.
    pub fn next_batch(&mut self) -> Result<Option<&mut Batch>, DataError> {
        if let (Some(batch), Some(free_rows)) = (self.current.take(), &self.free_rows) {
            // Sending fails if the thread has ended and needs no buffers.
            let _ = free_rows.send(batch.rows);
        }
        let Some(batches) = &self.batches else { return Ok(None) };
        match batches.recv() {
            Ok(Ok(batch)) => Ok(Some(self.current.insert(batch))),
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

    /// Returns the most bytes that a loader holds: two batches, each of `rows` rows of `sequence` tokens.
    pub fn max_bytes(rows: u64, sequence: u64) -> Bytes {
        Rows::max_bytes(rows, sequence) + Rows::max_bytes(rows, sequence)
    }

    fn stop(&mut self) {
        (self.batches, self.free_rows) = (None, None);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Reads the batches of `sampler` from step `first_step` on and sends them to the loader, into buffers that it returns.
/// Ends after the last batch, after an error, or when the loader is dropped.
fn read_batches(
    data: &TrainingData,
    sampler: BatchSampler,
    first_step: u64,
    free_rows: &Receiver<Rows>,
    batches: &Sender<Result<Batch, DataError>>,
) {
    let order = data.order(sampler.order);
    for step in first_step.. {
        let positions = sampler.positions(step);
        // The loader was dropped.
        let Ok(mut rows) = free_rows.recv() else { return };
        if positions.is_empty() {
            return;
        }
        let sources: Vec<SourceRow> = positions.map(|position| order.row(position)).collect();
        let read = data.read(sources.iter().copied(), &mut rows);
        let labelled_tokens = rows.labelled_tokens();
        let failed = read.is_err();
        if batches.send(read.map(|()| Batch { step, rows, sources, labelled_tokens })).is_err() || failed {
            return;
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
    use super::super::RowOrder;
    use super::super::testing::{TestData, training_values, with_timeout};
    use super::*;

    fn sample() -> TestData {
        let document = |first: i32| ((first..first + 10 + first % 7).collect(), None);
        TestData::tokens(&(0..40).map(document).collect::<Vec<_>>(), 8, true)
    }

    fn open(samples: &[&TestData], weights: Option<&[f64]>) -> TrainingData {
        TrainingData::new(samples.iter().map(|sample| sample.open().unwrap()).collect(), weights)
    }

    fn batches(data: &TrainingData, epochs: Option<f64>) -> BatchSampler {
        let order = RowOrder { seed: 5, rows: data.rows(), shuffle: true };
        BatchSampler {
            order,
            rows: 7,
            row_limit: epochs.map(|epochs| order.rows_of_epochs(epochs)),
            steps_per_batch: 1,
        }
    }

    #[test]
    fn loader_started_at_any_step_yields_same_rows() {
        with_timeout(|| {
            let (sample, other) = (sample(), TestData::tokens(&[((0..82).collect(), None)], 8, true));
            yields_same_rows(open(&[&sample], None), true);
            yields_same_rows(open(&[&sample, &other], None), true);
            yields_same_rows(open(&[&sample, &other], Some(&[1.0, 2.0])), false);
        });
    }

    /// Compares loaders that start at several steps. If `is_whole`, an epoch has each row once.
    fn yields_same_rows(data: TrainingData, is_whole: bool) {
        let data = Arc::new(data);
        let batches = batches(&data, Some(2.0));
        let steps = batches.steps().unwrap();
        assert_ne!(data.rows() * 2 % 7, 0, "the last batch is partial");
        let steps_from = |first: u64| {
            let mut loader = Loader::start(data.clone(), batches, first);
            let mut taken = Vec::new();
            while let Some(step) = loader.next_batch().unwrap() {
                assert_eq!(step.labelled_tokens, step.rows.labelled_tokens());
                taken.push((step.step, training_values(&step.rows), step.labelled_tokens));
            }
            assert!(loader.next_batch().unwrap().is_none(), "no batch follows the end");
            taken
        };
        let whole = steps_from(0);
        assert_eq!(whole.len() as u64, steps);
        let labelled = whole.iter().map(|(.., labelled)| labelled).sum::<u64>();
        assert_eq!(labelled == 2 * data.labelled_tokens(), is_whole);
        for first in [1, 4, steps - 1, steps] {
            assert_eq!(steps_from(first), whole[first as usize..]);
        }
    }

    #[test]
    fn dropping_the_loader_stops_its_thread() {
        with_timeout(|| {
            let sample = sample();
            let data = Arc::new(open(&[&sample], None));
            for taken in 0..4 {
                let mut loader = Loader::start(data.clone(), batches(&data, None), 3);
                for _ in 0..taken {
                    loader.next_batch().unwrap().unwrap();
                }
                drop(loader);
                assert_eq!(Arc::strong_count(&data), 1, "the thread has ended");
            }
        });
    }

    #[test]
    fn thread_errors_reach_the_caller() {
        with_timeout(|| {
            let sample = sample();
            let data = Arc::new(open(&[&sample], None));
            std::fs::write(&sample.cache_files(".tokens")[0], "").unwrap();
            let mut loader = Loader::start(data.clone(), batches(&data, None), 0);
            assert!(matches!(loader.next_batch(), Err(DataError::Io { action: "read", .. })));
            assert!(loader.next_batch().unwrap().is_none());
        });
    }
}
