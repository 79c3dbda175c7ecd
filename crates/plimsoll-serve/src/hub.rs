//! The newest snapshot, shared by all clients. One thread takes it: at most once per interval, and only while a client
//! waits for one.

use crate::metrics;
use axum::body::Bytes;
use futures_util::future::{self, Either};
use plimsoll_core::Failure;
use plimsoll_watch::snapshot::Snapshot;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Stack of the thread that takes snapshots. Reading the devices of a machine calls drivers.
const READER_STACK_BYTES: usize = 2 << 20;

/// The last event of each stream. Browsers ignore events without data.
const END: &[u8] = b"event: end\ndata: {}\n\n";

/// A snapshot in the forms in which it is served. Each form is made once, for all clients.
pub(crate) struct Reading {
    taken: Instant,
    snapshot: Result<Snapshot, Failure>,
    /// The snapshot as one line of JSON, or the failure.
    pub json: Bytes,
    /// The same as a server-sent event.
    pub event: Bytes,
    metrics: OnceLock<Bytes>,
}

impl Reading {
    fn new(taken: Instant, snapshot: Result<Snapshot, Failure>) -> Reading {
        let (name, json) = match &snapshot {
            Ok(snapshot) => ("snapshot", serde_json::to_string(snapshot).expect("plain data has a JSON form")),
            Err(failure) => ("failure", failure_json(failure)),
        };
        let event = format!("event: {name}\ndata: {json}\n\n");
        Reading { taken, snapshot, json: json.into(), event: event.into(), metrics: OnceLock::new() }
    }

    /// Returns whether a snapshot could be taken.
    pub fn is_ok(&self) -> bool {
        self.snapshot.is_ok()
    }

    /// Returns the snapshot in the text format of Prometheus; empty if there is none.
    pub fn metrics(&self) -> Bytes {
        let text = || self.snapshot.as_ref().map_or(Bytes::new(), |snapshot| metrics::text(snapshot).into());
        self.metrics.get_or_init(text).clone()
    }
}

fn failure_json(failure: &Failure) -> String {
    serde_json::json!({"error": {"message": failure.message, "hints": failure.hints}}).to_string()
}

/// The number of clients that wait for snapshots.
#[derive(Default)]
struct Demand {
    state: Mutex<DemandState>,
    changed: Condvar,
}

#[derive(Default)]
struct DemandState {
    listeners: usize,
    /// Clients that wait for the last reading alone.
    waiters: usize,
    /// Whether a reading is due now, whatever the interval.
    is_due: bool,
    is_closed: bool,
}

impl Demand {
    fn lock(&self) -> MutexGuard<'_, DemandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a client listens. Returns false once the hub is closed.
    fn wait_for_listener(&self) -> bool {
        let is_idle = |state: &mut DemandState| state.listeners == 0 && !state.is_closed;
        let mut state = self.changed.wait_while(self.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
        state.is_due = false;
        !state.is_closed
    }

    /// Waits until `time`, until a reading is due now, or until the hub is closed.
    fn wait_until(&self, time: Instant) {
        let left = time.saturating_duration_since(Instant::now());
        let waits = |state: &mut DemandState| !state.is_closed && !state.is_due;
        let _state = self.changed.wait_timeout_while(self.lock(), left, waits);
    }
}

/// The newest reading and its listeners.
pub(crate) struct Hub {
    newest: watch::Receiver<Option<Arc<Reading>>>,
    demand: Arc<Demand>,
    interval: Duration,
    /// Whether the newest reading is the last one.
    has_ended: watch::Sender<bool>,
}

impl Hub {
    /// Starts the thread that takes snapshots, at most one per `interval`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        interval: Duration,
        mut take: impl FnMut() -> Result<Snapshot, Failure> + Send + 'static,
    ) -> io::Result<Hub> {
        let (sender, newest) = watch::channel(None);
        let demand = Arc::new(Demand::default());
        let of_reader = Arc::clone(&demand);
        let reader = thread::Builder::new().name("snapshots".into()).stack_size(READER_STACK_BYTES);
        reader.spawn(move || {
            while of_reader.wait_for_listener() {
                let taken = Instant::now();
                sender.send_replace(Some(Arc::new(Reading::new(taken, take()))));
                of_reader.wait_until(taken + interval);
            }
        })?;
        Ok(Hub { newest, demand, interval, has_ended: watch::Sender::new(false) })
    }

    /// Returns a listener. Its first reading is the newest one, if that is younger than the interval.
    pub fn listen(&self) -> Listener {
        let mut newest = self.newest.clone();
        let is_fresh = |reading: &Arc<Reading>| reading.taken.elapsed() < self.interval;
        if newest.borrow().as_ref().is_some_and(is_fresh) {
            newest.mark_changed();
        } else {
            newest.mark_unchanged();
        }
        self.demand.lock().listeners += 1;
        self.demand.changed.notify_all();
        Listener { newest, demand: Arc::clone(&self.demand), end: self.end_signal(), is_over: false }
    }

    /// Returns a client that waits for the last reading alone.
    pub fn wait_for_last(&self) -> Waiter {
        self.demand.lock().waiters += 1;
        Waiter { newest: self.newest.clone(), demand: Arc::clone(&self.demand), end: self.end_signal() }
    }

    /// Returns the signal that [`Hub::end`] gives.
    pub fn end_signal(&self) -> EndSignal {
        EndSignal(self.has_ended.subscribe())
    }

    /// Ends all streams after the newest reading.
    pub fn end(&self) {
        self.has_ended.send_replace(true);
    }

    /// Waits for a reading that begins now, which all clients get. Returns whether there are clients, and it was taken.
    pub async fn take_last(&self) -> bool {
        let called = Instant::now();
        {
            let mut state = self.demand.lock();
            if state.listeners == 0 && state.waiters == 0 {
                return false;
            }
            state.is_due = true;
        }
        let mut listener = self.listen();
        while let Some(reading) = listener.next().await {
            if reading.taken >= called {
                return true;
            }
            // That reading had begun before.
            self.demand.lock().is_due = true;
            self.demand.changed.notify_all();
        }
        false
    }

    /// Returns a reading that is younger than the interval; `None` if none can be taken any more.
    pub async fn current(&self) -> Option<Arc<Reading>> {
        self.listen().next().await
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.demand.lock().is_closed = true;
        self.demand.changed.notify_all();
    }
}

/// The signal that the newest reading is the last one.
pub(crate) struct EndSignal(watch::Receiver<bool>);

impl EndSignal {
    /// Waits for the signal, or for the end of the hub.
    pub async fn wait(&mut self) {
        let _ = self.0.wait_for(|has_ended| *has_ended).await;
    }
}

/// A client that waits for the last reading. No reading is taken for it before.
pub(crate) struct Waiter {
    newest: watch::Receiver<Option<Arc<Reading>>>,
    demand: Arc<Demand>,
    end: EndSignal,
}

impl Waiter {
    /// Waits for the end, and returns the events of the last reading and of the end.
    pub async fn last_events(&mut self) -> Bytes {
        self.end.wait().await;
        let newest = self.newest.borrow();
        let last = newest.as_ref().map_or(&[][..], |reading| &reading.event[..]);
        [last, END].concat().into()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.demand.lock().waiters -= 1;
    }
}

/// A client that waits for readings. While one exists, readings are taken.
pub(crate) struct Listener {
    newest: watch::Receiver<Option<Arc<Reading>>>,
    demand: Arc<Demand>,
    end: EndSignal,
    /// Whether the event of the end has been returned.
    is_over: bool,
}

impl Listener {
    /// Waits for the next reading. Readings that a slow client misses are left out. Returns `None` once no reading can
    /// be taken any more.
    pub async fn next(&mut self) -> Option<Arc<Reading>> {
        self.newest.changed().await.ok()?;
        self.newest.borrow_and_update().clone()
    }

    /// Waits for the next server-sent event: a reading, or the end after the last reading. Returns `None` after that.
    pub async fn next_event(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        // A reading that is ready comes before the end.
        let changed = match future::select(pin!(self.newest.changed()), pin!(self.end.wait())).await {
            Either::Left((changed, _)) => Some(changed.is_ok()),
            Either::Right(_) => None,
        };
        let is_read = match changed {
            Some(is_read) => is_read,
            // The thread that sent it may not have woken this listener yet.
            None if self.newest.has_changed().unwrap_or(false) => true,
            None => {
                self.is_over = true;
                return Some(Bytes::from_static(END));
            }
        };
        self.newest.borrow_and_update().as_ref().filter(|_| is_read).map(|reading| reading.event.clone())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.demand.lock().listeners -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn failing_hub(interval: Duration) -> (Hub, Arc<AtomicUsize>) {
        let readings = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&readings);
        let take = move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Err(Failure::input("no snapshot"))
        };
        (Hub::start(interval, take).unwrap(), readings)
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
    }

    #[test]
    fn nothing_is_read_without_listeners() {
        let (hub, readings) = failing_hub(Duration::from_millis(5));
        thread::sleep(Duration::from_millis(50));
        assert_eq!(readings.load(Ordering::Relaxed), 0);
        let reading = runtime().block_on(hub.current()).unwrap();
        assert!(!reading.is_ok() && reading.json.starts_with(b"{\"error\":{\"message\":\"no snapshot\""));
        thread::sleep(Duration::from_millis(50));
        assert_eq!(readings.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn requests_within_an_interval_share_a_reading() {
        let (hub, readings) = failing_hub(Duration::from_secs(600));
        runtime().block_on(async {
            for _ in 0..100 {
                hub.current().await.unwrap();
            }
        });
        assert_eq!(readings.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn last_reading_waits_for_no_interval() {
        let (hub, readings) = failing_hub(Duration::from_secs(600));
        runtime().block_on(async {
            assert!(!hub.take_last().await, "nothing listens");
            let mut listener = hub.listen();
            listener.next().await.unwrap();
            assert!(hub.take_last().await);
            assert!(listener.next().await.is_some());
        });
        assert_eq!(readings.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn last_reading_and_end_reach_all_clients() {
        let (hub, readings) = failing_hub(Duration::from_secs(600));
        runtime().block_on(async {
            let mut waiter = hub.wait_for_last();
            let mut listener = hub.listen();
            listener.next_event().await.unwrap();
            assert!(hub.take_last().await);
            hub.end();
            assert!(listener.next_event().await.unwrap().starts_with(b"event: failure\n"));
            assert_eq!((listener.next_event().await.as_deref(), listener.next_event().await), (Some(END), None));
            let last = waiter.last_events().await;
            assert!(last.starts_with(b"event: failure\n") && last.ends_with(END));
        });
        assert_eq!(readings.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn nothing_is_read_for_waiters_before_the_end() {
        let (hub, readings) = failing_hub(Duration::from_millis(5));
        let mut waiter = hub.wait_for_last();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(readings.load(Ordering::Relaxed), 0);
        runtime().block_on(async {
            assert!(hub.take_last().await);
            hub.end();
            assert!(waiter.last_events().await.starts_with(b"event: failure\n"));
        });
    }

    #[test]
    fn end_of_the_reader_ends_listeners() {
        let hub = Hub::start(Duration::from_millis(1), || panic!("the reader ends")).unwrap();
        assert!(runtime().block_on(hub.current()).is_none());
    }
}
