//! A thread pool of fixed size, and the two ways in which kernels distribute work over it.
//!
//! Results never depend on the number of threads: tasks are numbered, each runs once, and the caller sums results of tasks in the
//! order of their numbers.

use crate::error::DeviceError;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A pool of worker threads. With one thread all work runs on the caller's thread.
pub struct Pool {
    workers: Option<rayon::ThreadPool>,
    threads: usize,
}

impl Pool {
    /// Starts a pool of `threads` threads (0 counts as 1).
    ///
    /// # Errors
    /// [`DeviceError::Threads`] if the system refuses a thread.
    pub fn new(threads: usize) -> Result<Pool, DeviceError> {
        let threads = threads.max(1);
        let workers = if threads == 1 { None } else { Some(start_workers(threads)?) };
        Ok(Pool { workers, threads })
    }

    /// Returns the number of threads, at least 1. The workspace of an op has one part for each of them.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work` on one of the pool's own threads, so that parallel regions inside start without waking a thread
    /// first. Executors run a whole Program inside one `enter`.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.workers {
            Some(workers) => workers.install(work),
            None => work(),
        }
    }

    /// Calls `work(task, lane)` once for each task in `0..tasks`. `lane` is the number of the thread that runs the
    /// task, less than [`Pool::threads`]. Tasks start in order, as threads become free.
    pub fn run(&self, tasks: usize, work: impl Fn(usize, usize) + Sync) {
        match &self.workers {
            Some(workers) if tasks > 1 => {
                let next = AtomicUsize::new(0);
                workers.install(|| offer_to_threads(self.threads.min(tasks), &|| run_lane(&next, tasks, &work)));
            }
            _ => (0..tasks).for_each(|task| work(task, 0)),
        }
    }

    /// Splits `0..total` into ranges of at least `min_size` (the last may be shorter) and calls `work(range, lane)` for
    /// each; `lane` is the number of the thread. The result of `work` must not depend on the split.
    pub fn split(&self, total: usize, min_size: usize, work: impl Fn(Range<usize>, usize) + Sync) {
        let size = total.div_ceil(4 * self.threads).max(min_size).max(1);
        self.run(total.div_ceil(size), |task, lane| work(task * size..total.min((task + 1) * size), lane));
    }
}

/// Starts `threads` named worker threads.
fn start_workers(threads: usize) -> Result<rayon::ThreadPool, DeviceError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("plimsoll-{index}"))
        .build()
        .map_err(|source| DeviceError::Threads { threads, source })
}

/// Runs tasks on this thread of the pool until all `tasks` tasks have started. `next` is the number of the first task
/// that no thread has started.
#[inline]
fn run_lane(next: &AtomicUsize, tasks: usize, work: &impl Fn(usize, usize)) {
    let lane = rayon::current_thread_index().expect("lanes run on the pool's threads");
    loop {
        let task = next.fetch_add(1, Ordering::Relaxed);
        if task >= tasks {
            break;
        }
        work(task, lane);
    }
}

/// Calls the function `lane` `count` times, on as many threads of the pool as are free. Returns once all calls have
/// ended: a thread that ends its call makes calls that no other thread has begun. Uses `rayon::join`, which does not
/// allocate.
fn offer_to_threads(count: usize, lane: &(impl Fn() + Sync)) {
    if count == 1 {
        lane();
    } else {
        rayon::join(|| offer_to_threads(count / 2, lane), || offer_to_threads(count - count / 2, lane));
    }
}

/// A slice with disjoint parts that several tasks write at the same time.
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Shared` is an exclusive borrow handed out in parts. `part` requires that parts in use at the same time do not
// overlap, so sending and sharing it is as sound as for `&mut [T]`.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: parts in use at the same time do not overlap, by the contract of `part`.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Borrows the slice for as long as parts of it are in use.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Returns the elements with indices in `range`; panics if they are not inside the slice.
    ///
    /// # Safety
    /// No other part that overlaps `range` may be in use until the returned borrow ends.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {} elements", self.len);
        // SAFETY: inside the borrowed slice (checked above), and by the contract not aliased.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }

    /// Returns the address of the first element, for kernels that write disjoint strided tiles.
    pub fn start(&self) -> *mut T {
        self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_run_once_and_lanes_do_not_overlap() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            let busy: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            pool.run(100, |task, lane| {
                assert_eq!(busy[lane].fetch_add(1, Ordering::SeqCst), 0);
                counts[task].fetch_add(1, Ordering::SeqCst);
                busy[lane].fetch_sub(1, Ordering::SeqCst);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::SeqCst) == 1));
        }
    }

    #[test]
    fn split_covers_everything_once() {
        let pool = Pool::new(2).unwrap();
        for (total, least) in [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 999)] {
            let mut seen = vec![0u8; total];
            let shared = Shared::new(&mut seen);
            pool.split(total, least, |range, _| {
                // SAFETY: ranges of one split are disjoint.
                unsafe { shared.part(range) }.iter_mut().for_each(|count| *count += 1);
            });
            assert!(seen.iter().all(|&count| count == 1));
        }
    }

    #[test]
    #[should_panic(expected = "from a task")]
    fn panic_in_a_task_reaches_the_caller() {
        Pool::new(2).unwrap().run(4, |task, _| assert!(task != 3, "from a task"));
    }
}
