//! Logs that a run writes beside its own files, for programs of others: TensorBoard event files, and the messages of the
//! webhook.
//!
//! ```text
//! run ─► observer ─► Background ─┬─► tensorboard ─► RUN_DIR/tensorboard/events.out.tfevents.…
//!        (no wait)   (a thread)  └─► webhook (crate plimsoll-serve) ─► HTTP
//! ```
//!
//! No log can fail or delay a run: a thread of its own writes each, and its errors become warnings.
//!
//! | module | content |
//! |---|---|
//! | [`tensorboard`] | scalars from events, and the files that hold them |
//! | `tfrecord` | the file format: records and their messages |
//! | [`message`] | the messages of the webhook |

pub mod message;
pub mod tensorboard;
mod tfrecord;

use plimsoll_core::{EVENTS_VERSION, Event, Record};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Stack of a thread that writes a log.
const STACK_BYTES: usize = 256 << 10;

/// A thread that takes items in order, and the queue before it.
pub struct Background<T> {
    /// Name of the log in warnings.
    name: &'static str,
    queue: Option<SyncSender<T>>,
    warnings: Receiver<String>,
    /// Disconnected when the thread has taken all items.
    ended: Receiver<()>,
    /// Whether an item was lost because the queue was full.
    has_lost_items: bool,
}

impl<T: Send + 'static> Background<T> {
    /// Starts a thread that gives each item to `take`. An error of `take` is a warning, and the next items follow.
    /// `items_max` items may wait. `name` names the log in warnings.
    pub fn start(
        name: &'static str,
        items_max: usize,
        take: impl FnMut(T) -> Result<(), String> + Send + 'static,
    ) -> Background<T> {
        let (queue, items) = sync_channel(items_max);
        let (warn, warnings) = channel();
        let (end, ended) = channel();
        let refused = warn.clone();
        let work = move || take_all(items, take, &warn, end);
        if let Err(error) = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES).spawn(work) {
            let _ = refused.send(format!("{name}: off, because its thread cannot be started: {error}"));
        }
        Background { name, queue: Some(queue), warnings, ended, has_lost_items: false }
    }

    /// Hands an item to the thread without waiting. If too many items wait already, the item is lost.
    pub fn send(&mut self, item: T) -> Vec<String> {
        let sent = self.queue.as_ref().map(|queue| queue.try_send(item));
        let mut warnings: Vec<String> = self.warnings.try_iter().collect();
        if matches!(sent, Some(Err(TrySendError::Full(_)))) && !self.has_lost_items {
            self.has_lost_items = true;
            warnings.push(format!("{}: slower than the run, so that some events are missing in it", self.name));
        }
        warnings
    }

    /// Waits until the thread has taken all items, at most `longest`. Returns the warnings since the last call of
    /// [`Background::send`].
    pub fn finish(mut self, longest: Duration) -> Vec<String> {
        self.queue = None;
        let ended = self.ended.recv_timeout(longest);
        let mut warnings: Vec<String> = self.warnings.try_iter().collect();
        if ended == Err(RecvTimeoutError::Timeout) {
            let seconds = longest.as_secs_f64();
            warnings
                .push(format!("{}: not complete {seconds:.0} s after the run, so its end may be missing", self.name));
        }
        warnings
    }
}

/// Gives each item to `take` until the sender of the queue is gone. `_end` is dropped then, also after a panic.
fn take_all<T>(
    items: Receiver<T>,
    mut take: impl FnMut(T) -> Result<(), String>,
    warn: &Sender<String>,
    _end: Sender<()>,
) {
    for item in items {
        if let Err(warning) = take(item) {
            let _ = warn.send(warning);
        }
    }
}

/// Returns a warning as an event of now, in the form in which observers of a run receive it.
pub fn warning_record(message: String) -> Record {
    Record { version: EVENTS_VERSION, time: now(), event: Event::Warning { message } }
}

/// Returns the time in seconds since the Unix epoch.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use std::time::Instant;

    #[test]
    fn all_items_are_taken_in_order() {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&taken);
        let mut log = Background::start("log", 100, move |item: u32| {
            kept.lock().unwrap().push(item);
            if item == 7 { Err("seven".to_owned()) } else { Ok(()) }
        });
        let mut warnings: Vec<String> = (0..100).flat_map(|item| log.send(item)).collect();
        warnings.extend(log.finish(Duration::from_secs(60)));
        assert_eq!(*taken.lock().unwrap(), (0..100).collect::<Vec<u32>>());
        assert_eq!(warnings, ["seven"]);
    }

    #[test]
    fn stuck_log_delays_nothing_and_warns_once() {
        let (release, stuck) = channel::<()>();
        let mut log = Background::start("log", 2, move |_: u32| {
            let _ = stuck.recv();
            Ok(())
        });
        let began = Instant::now();
        let warnings: Vec<String> = (0..1000).flat_map(|item| log.send(item)).collect();
        let late = log.finish(Duration::from_millis(20));
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!(warnings, ["log: slower than the run, so that some events are missing in it"]);
        assert!(late.len() == 1 && late[0].contains("not complete"), "{late:?}");
        drop(release);
    }
}
