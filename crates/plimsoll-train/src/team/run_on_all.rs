//! [`run_on_all`]: runs one job on each worker in parallel.
//!
//! Each job runs on a thread of its own, which owns the engine meanwhile. So no caller has to wait for a device that
//! missed its heartbeats: its job is *abandoned*, with the engine and all its memory, until the thread returns, which
//! may be never. An abandoned thread can do no harm: its writes are discarded, and the remaining workers use another
//! transport.

use crate::engine::Engine;
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::CHUNK_BYTES;
use crate::heartbeat::Liveness;
use plimsoll_core::Failure;
use plimsoll_device::device::FileSpace;
use plimsoll_device::transport::Transport;
use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// Interval at which [`run_on_all`] checks whether devices have missed their heartbeats.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A closure that works with an engine on a thread of its own. Its second argument gives access to the files of the
/// caller of [`run_on_all`], for writing only.
pub type Task<T> = Box<dyn FnOnce(&mut Engine, &mut dyn FileSpace) -> Result<T, DeviceFailure> + Send>;

/// A task with the engine that runs it.
pub struct Job<T> {
    /// Rank of the worker.
    pub rank: usize,
    /// Engine of the worker, which [`JobOutcome::Returned`] gives back.
    pub engine: Engine,
    /// Liveness of the device, which tells whether it is lost; `None` if it has no heartbeat.
    pub liveness: Option<Arc<Liveness>>,
    /// Work to do.
    pub task: Task<T>,
}

/// Outcome of a job.
pub enum JobOutcome<T> {
    /// The thread returned its engine and the result of the task.
    Returned(Box<Engine>, Result<T, DeviceFailure>),
    /// The device missed its heartbeats. Its memory is held for as long as the reference can be upgraded.
    Abandoned(Weak<()>),
}

/// Message of a worker thread to the caller.
enum WorkerMessage<T> {
    /// Request to write these bytes of a tensor to the caller's files, from the byte `offset` of the tensor on. The
    /// caller sends the result to `reply`.
    Write { tensor: String, offset: u64, bytes: Vec<u8>, reply: Sender<io::Result<()>> },
    /// The task has ended; the outer error is a panic.
    Finished { rank: usize, engine: Box<Engine>, result: Result<Result<T, DeviceFailure>, Box<dyn Any + Send>> },
}

/// A job that has not returned yet.
struct RunningJob {
    rank: usize,
    liveness: Option<Arc<Liveness>>,
    alive: Weak<()>,
}

impl RunningJob {
    /// Returns whether the device missed its heartbeats.
    fn is_lost(&self) -> bool {
        self.liveness.as_ref().is_some_and(|liveness| liveness.is_lost())
    }
}

/// Runs all jobs in parallel and returns each outcome with the rank of its worker, in any order. Files are written on
/// the calling thread. If a worker fails or panics, the collectives of all workers are aborted. Returns when every job
/// has returned or is abandoned.
///
/// # Panics
/// If a job panics, after the others have returned.
pub fn run_on_all<T: Send + 'static>(
    jobs: Vec<Job<T>>,
    transport: &Arc<dyn Transport>,
    files: &mut dyn FileSpace,
) -> Vec<(usize, JobOutcome<T>)> {
    let (sender, receiver) = channel();
    let mut running: Vec<RunningJob> = Vec::new();
    for job in jobs {
        let alive = Arc::new(());
        running.push(RunningJob { rank: job.rank, liveness: job.liveness.clone(), alive: Arc::downgrade(&alive) });
        let (thread_sender, thread_transport) = (sender.clone(), Arc::clone(transport));
        let (hand_over, handed_over) = channel();
        let thread = thread::Builder::new().spawn(move || {
            if let Ok(job) = handed_over.recv() {
                run_job(job, &thread_sender, &*thread_transport);
            }
            drop(alive);
        });
        match thread {
            Ok(_) => drop(hand_over.send(job)),
            Err(_) => {
                let failure = Failure::no_thread("for a device of the team");
                run_job(Job { task: Box::new(move |_, _| Err(failure.into())), ..job }, &sender, &**transport);
            }
        }
    }
    let (mut outcomes, mut panicked) = (Vec::new(), None);
    while !running.iter().all(RunningJob::is_lost) {
        match receiver.recv_timeout(POLL_INTERVAL) {
            Ok(WorkerMessage::Write { tensor, offset, bytes, reply }) => {
                // An abandoned thread may be gone.
                let _ = reply.send(files.write(&tensor, offset, &bytes));
            }
            Ok(WorkerMessage::Finished { rank, engine, result }) => {
                running.retain(|job| job.rank != rank);
                match result {
                    Ok(result) => outcomes.push((rank, JobOutcome::Returned(engine, result))),
                    Err(panic) => panicked = Some(panic),
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("every thread sends its result"),
        }
    }
    if let Some(panic) = panicked {
        resume_unwind(panic);
    }
    outcomes.extend(running.into_iter().map(|job| (job.rank, JobOutcome::Abandoned(job.alive))));
    outcomes
}

/// Runs a job on its thread. On failure, aborts the collectives of the other workers, which may be waiting for this
/// one.
fn run_job<T: Send>(job: Job<T>, sender: &Sender<WorkerMessage<T>>, transport: &dyn Transport) {
    let Job { rank, mut engine, task, .. } = job;
    let mut files = MessageFiles(sender);
    let result = catch_unwind(AssertUnwindSafe(|| task(&mut engine, &mut files)));
    match &result {
        Ok(Ok(_)) => {}
        Ok(Err(failure)) => transport.abort(rank as u32, &failure.message()),
        Err(_) => transport.abort(rank as u32, "the worker panicked"),
    }
    let result = result.map(|result| result.map_err(|failure| failure.with_rank(rank)));
    // If the job is abandoned, the receiver is gone: the engine is dropped here and frees its memory.
    let _ = sender.send(WorkerMessage::Finished { rank, engine: Box::new(engine), result });
}

/// File access of a worker thread: sends all writes to the calling thread.
struct MessageFiles<'a, T>(&'a Sender<WorkerMessage<T>>);

impl<T: Send> FileSpace for MessageFiles<'_, T> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is write-only")))
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        let abandoned = || io::Error::new(io::ErrorKind::BrokenPipe, format!("`{tensor}`: the job was abandoned"));
        for (number, bytes) in from.chunks(CHUNK_BYTES).enumerate() {
            let (reply, answer): (_, Receiver<io::Result<()>>) = channel();
            let offset = offset + (number * CHUNK_BYTES) as u64;
            let (tensor, bytes) = (tensor.to_owned(), bytes.to_vec());
            self.0.send(WorkerMessage::Write { tensor, offset, bytes, reply }).map_err(|_| abandoned())?;
            answer.recv().map_err(|_| abandoned())??;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::{HeartbeatMonitor, HeartbeatSender, MonitoredDevice};
    use crate::team::abandoned::AbandonedMemory;
    use plimsoll_core::Bytes;
    use plimsoll_device::device::NoFiles;
    use plimsoll_device::transport::in_process;

    fn job<T>(rank: usize, liveness: Option<Arc<Liveness>>, task: Task<T>) -> Job<T> {
        Job { rank, engine: Engine::placeholder("a"), liveness, task }
    }

    #[test]
    fn abandoned_job_frees_memory_when_it_returns() {
        let heartbeat_timeout = Duration::from_millis(100);
        let heartbeat = HeartbeatSender::start("b", heartbeat_timeout, || false).expect("a thread");
        let device = MonitoredDevice { rank: 1, name: "b".to_owned(), liveness: heartbeat.liveness() };
        let _monitor = HeartbeatMonitor::start(vec![device], |_, _| {}, heartbeat_timeout).expect("a thread");
        let (wake, wake_signal) = channel::<()>();
        let sleep = move |_: &mut Engine, files: &mut dyn FileSpace| {
            wake_signal.recv().expect("the test sends it");
            assert!(files.write("saved:b", 0, &[1]).is_err(), "the write of an abandoned job fails");
            Ok(0)
        };
        let jobs = vec![job(0, None, Box::new(|_, _| Ok(7))), job(1, Some(heartbeat.liveness()), Box::new(sleep))];
        let transport: Arc<dyn Transport> = in_process::InProcessTransport::new_group(2);
        let outcomes = run_on_all(jobs, &transport, &mut NoFiles);
        let [(0, JobOutcome::Returned(_, Ok(7))), (1, JobOutcome::Abandoned(alive))] = &outcomes[..] else {
            panic!("one job returned, one is abandoned")
        };
        let abandoned = AbandonedMemory::default();
        abandoned.add(Bytes(5), alive.clone());
        abandoned.reset_peak();
        assert_eq!((abandoned.bytes(), abandoned.peak_bytes()), (Bytes(5), Bytes(5)));
        wake.send(()).expect("the thread listens");
        while alive.strong_count() > 0 {
            thread::yield_now();
        }
        assert_eq!((abandoned.bytes(), abandoned.peak_bytes()), (Bytes::ZERO, Bytes(5)));
        abandoned.reset_peak();
        assert_eq!(abandoned.peak_bytes(), Bytes::ZERO);
    }

    #[test]
    fn writes_arrive_in_order_and_errors_return() {
        struct Full(Vec<u8>);
        impl FileSpace for Full {
            fn read(&mut self, _: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
                unreachable!("nothing is read")
            }
            fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
                assert_eq!((tensor, offset), ("saved:a", self.0.len() as u64));
                self.0.extend_from_slice(from);
                if self.0.len() > 2 * CHUNK_BYTES { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
            }
        }
        let given: Vec<u8> = (0..3 * CHUNK_BYTES).map(|i| (i * 31 % 251) as u8).collect();
        let bytes = given.clone();
        let store = move |_: &mut Engine, files: &mut dyn FileSpace| {
            Ok(files.write("saved:a", 0, &bytes).expect_err("it is full").kind())
        };
        let transport: Arc<dyn Transport> = in_process::InProcessTransport::new_group(1);
        let mut files = Full(Vec::new());
        let outcomes = run_on_all(vec![job(0, None, Box::new(store))], &transport, &mut files);
        assert!(matches!(&outcomes[..], [(0, JobOutcome::Returned(_, Ok(io::ErrorKind::StorageFull)))]));
        assert!(files.0 == given);
    }

    #[test]
    #[should_panic(expected = "a test panic")]
    fn panic_propagates_after_other_jobs_return() {
        let transport: Arc<dyn Transport> = in_process::InProcessTransport::new_group(2);
        let panics: Task<()> = Box::new(|_, _| panic!("a test panic"));
        run_on_all(vec![job(0, None, panics), job(1, None, Box::new(|_, _| Ok(())))], &transport, &mut NoFiles);
    }
}
