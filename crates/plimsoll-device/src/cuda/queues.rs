//! The queues of a GPU as streams. Work of one stream runs in order. Events order work of different streams, as derived
//! from hazards on arena ranges (`plimsoll_program::order`).
//!
//! The host only enqueues work. The queue of CPU ops has no stream: its ops execute when they are enqueued. Collectives
//! are enqueued later than the work that follows them on other streams (`Gates`). The host takes part in collectives,
//! and the device would otherwise have no work meanwhile.

use super::driver::{Context, CudaError, Event, Stream};
use plimsoll_program::op::Queue;
use plimsoll_program::order::Wait;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The queues that have a stream.
const STREAMED_QUEUES: [Queue; 4] = [Queue::Compute, Queue::CopyIn, Queue::CopyOut, Queue::Communication];

/// Streams, and the events between them.
pub struct Queues {
    context: Arc<Context>,
    streams: [Stream; 4],
    /// Events that order all queues at the start and the end of a program.
    join_events: [Event; 4],
    /// Events numbered by [`EventAssignment`]; as many as any program needs.
    events: Vec<Event>,
    gates: Gates,
    stopwatch: Stopwatch,
}

/// Pairs of timed events on the compute stream: computation starts, computation ends. The time between them is compute
/// time.
#[derive(Default)]
struct Stopwatch {
    /// Timed events in the order in which they are recorded.
    marks: Vec<Event>,
    recorded: usize,
    /// Compute seconds of earlier pairs; their events were reused.
    seconds: f64,
}

/// Positions that other queues must reach before a deferred collective starts.
///
/// The waits of the collective go on a separate stream when its turn comes, and an event marks them there, because
/// numbered events are reused later.
struct Gates {
    stream: Stream,
    marks: Vec<Event>,
}

impl Queues {
    /// Creates the streams.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Queues, CudaError> {
        let stream = || Stream::new(context);
        let event = || Event::new(context);
        Ok(Queues {
            context: context.clone(),
            streams: [stream()?, stream()?, stream()?, stream()?],
            join_events: [event()?, event()?, event()?, event()?],
            events: Vec::new(),
            gates: Gates { stream: stream()?, marks: Vec::new() },
            stopwatch: Stopwatch::default(),
        })
    }

    /// Creates events until there are `count`.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn make_events(&mut self, count: usize) -> Result<(), CudaError> {
        while self.events.len() < count {
            self.events.push(Event::new(&self.context)?);
        }
        Ok(())
    }

    /// Creates gates until there are `count`, one for each op on the communication queue.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn make_gates(&mut self, count: usize) -> Result<(), CudaError> {
        while self.gates.marks.len() < count {
            self.gates.marks.push(Event::new(&self.context)?);
        }
        Ok(())
    }

    /// Records gate number `gate`: it opens after these events as they are now, and after all earlier gates.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn record_gate(&self, gate: usize, events: &[usize]) -> Result<(), CudaError> {
        events.iter().try_for_each(|event| self.gates.stream.wait(&self.events[*event]))?;
        self.gates.marks[gate].record(&self.gates.stream)
    }

    /// Makes later work of the communication queue wait for a gate.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn wait_for_gate(&self, gate: usize) -> Result<(), CudaError> {
        self.stream(Queue::Communication).expect("a queue with a stream").wait(&self.gates.marks[gate])
    }

    /// Returns the stream of a queue; the queue of CPU ops has none.
    pub fn stream(&self, queue: Queue) -> Option<&Stream> {
        let index = STREAMED_QUEUES.iter().position(|streamed| *streamed == queue)?;
        Some(&self.streams[index])
    }

    /// Returns the compute stream, which all queues join at the end of a program.
    pub fn compute(&self) -> &Stream {
        &self.streams[0]
    }

    /// Records event number `event` on a queue.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    ///
    /// # Panics
    /// Panics for the queue of CPU ops: its ops complete when they are enqueued, so nothing waits for them.
    pub fn signal(&self, queue: Queue, event: usize) -> Result<(), CudaError> {
        self.events[event].record(self.stream(queue).expect("a queue with a stream"))
    }

    /// Makes later work of `queue` wait for event number `event`. For CPU ops the host waits.
    ///
    /// # Errors
    /// Returns a failure of the device.
    pub fn wait(&self, queue: Queue, event: usize) -> Result<(), CudaError> {
        match self.stream(queue) {
            Some(stream) => stream.wait(&self.events[event]),
            None => self.events[event].synchronize(),
        }
    }

    /// Marks the start of computation on the compute stream. Drops an earlier start without an end.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn mark_compute_start(&mut self) -> Result<(), CudaError> {
        self.stopwatch.recorded &= !1;
        self.mark()
    }

    /// Marks the end of computation on the compute stream.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn mark_compute_end(&mut self) -> Result<(), CudaError> {
        self.mark()
    }

    fn mark(&mut self) -> Result<(), CudaError> {
        let Stopwatch { marks, recorded, .. } = &mut self.stopwatch;
        if *recorded == marks.len() {
            marks.push(Event::timed(&self.context)?);
        }
        marks[*recorded].record(&self.streams[0])?;
        *recorded += 1;
        Ok(())
    }

    /// Returns the compute seconds of the compute stream so far. All its work must have completed.
    ///
    /// # Errors
    /// Fails if it has not.
    pub fn compute_seconds(&mut self) -> Result<f64, CudaError> {
        let Stopwatch { marks, recorded, seconds } = &mut self.stopwatch;
        for [begin, end] in marks[..*recorded].as_chunks::<2>().0 {
            *seconds += end.seconds_since(begin)?;
        }
        *recorded = 0;
        Ok(*seconds)
    }

    /// Makes the other queues start after all work now on the compute stream.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn fork(&self) -> Result<(), CudaError> {
        self.join_events[0].record(&self.streams[0])?;
        self.streams[1..].iter().try_for_each(|stream| stream.wait(&self.join_events[0]))
    }

    /// Makes the compute stream continue after all work now on the other queues.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn join(&self) -> Result<(), CudaError> {
        for (stream, mark) in self.streams[1..].iter().zip(&self.join_events[1..]) {
            mark.record(stream)?;
            self.streams[0].wait(mark)?;
        }
        Ok(())
    }
}

/// Events between the ops of a program. An event number is reused once all ops that wait for it are enqueued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventAssignment {
    /// The event that an op records when it completes, by op.
    pub signals: BTreeMap<u32, usize>,
    /// The events that an op waits for, by op.
    pub waits_for: BTreeMap<u32, Vec<usize>>,
    /// Number of events.
    pub count: usize,
}

/// Assigns events to the waits of a program. Ops with the same leader are enqueued as one in the leader's place, and
/// their waits and events belong to the leader.
pub fn assign_events(waits: &[Wait], leader_of: impl Fn(u32) -> u32) -> EventAssignment {
    let mut pairs: Vec<(u32, u32)> = waits.iter().map(|wait| (leader_of(wait.on), leader_of(wait.op))).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let mut last_waiter: BTreeMap<u32, u32> = BTreeMap::new();
    for &(on, op) in &pairs {
        let last = last_waiter.entry(on).or_default();
        *last = op.max(*last);
    }
    let mut assignment = EventAssignment::default();
    // An event is free again once its last waiter precedes the recording op.
    let mut busy_until: Vec<u32> = Vec::new();
    for (&on, &last) in &last_waiter {
        let free = busy_until.iter().position(|until| *until <= on);
        let event = free.unwrap_or(busy_until.len());
        if event == busy_until.len() {
            busy_until.push(last);
        } else {
            busy_until[event] = last;
        }
        assignment.signals.insert(on, event);
    }
    for (on, op) in pairs {
        assignment.waits_for.entry(op).or_default().push(assignment.signals[&on]);
    }
    assignment.count = busy_until.len();
    assignment
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn waits_reach_events_of_their_ops(
            pairs in prop::collection::vec((1u32..60, 1u32..60), 0..80)
        ) {
            let waits: Vec<Wait> = pairs
                .into_iter()
                .filter(|(on, op)| on != op)
                .map(|(a, b)| Wait { op: a.max(b), on: a.min(b) })
                .collect();
            let assignment = assign_events(&waits, |op| op);
            // Ops are enqueued in order: each first waits, then records.
            let mut signaled: BTreeMap<usize, u32> = BTreeMap::new();
            for op in 1..60 {
                let waited: Vec<u32> =
                    assignment.waits_for.get(&op).into_iter().flatten().map(|event| signaled[event]).collect();
                for wait in waits.iter().filter(|wait| wait.op == op) {
                    prop_assert!(waited.contains(&wait.on), "{wait:?} finds {waited:?}");
                }
                if let Some(event) = assignment.signals.get(&op) {
                    signaled.insert(*event, op);
                }
            }
        }
    }

    #[test]
    fn events_are_reused_and_groups_wait_once() {
        let waits: Vec<Wait> = (0..100).map(|i| Wait { on: 2 * i + 1, op: 2 * i + 2 }).collect();
        assert_eq!(assign_events(&waits, |op| op).count, 1);
        // Ops 3 and 4 form a group: it waits for 1 and 2, and 5 waits for it.
        let waits = [(3, 1), (4, 2), (5, 4)].map(|(op, on)| Wait { op, on });
        let found = assign_events(&waits, |op| if op == 4 { 3 } else { op });
        assert_eq!(found.waits_for[&3].len(), 2);
        assert_eq!(found.waits_for[&5], [found.signals[&3]]);
    }
}
