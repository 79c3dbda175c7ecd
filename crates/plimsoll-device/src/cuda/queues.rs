//! The queues of a GPU as streams. Work of one stream runs in order. Events order work of different streams, as derived
//! from hazards on arena ranges (`plimsoll_program::order`).
//!
//! The host only enqueues work. The queues of the host and of the scratch file have no stream: their ops execute when they
//! are enqueued. Collectives are enqueued later than the work that follows them on other streams (`Gates`). The host takes
//! part in collectives, and the device would otherwise have no work meanwhile.

use super::driver::{Context, Event, Stream};
use crate::error::CudaError;
use plimsoll_program::op::Queue;
use plimsoll_program::order::Wait;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The queues that have a CUDA stream. The CPU runs the ops of all others.
const STREAMED_QUEUES: [Queue; 4] = [Queue::Compute, Queue::CopyIn, Queue::CopyOut, Queue::Communication];

/// The streams of a GPU's queues, and the events that order work between them.
pub struct Queues {
    context: Arc<Context>,
    streams: [Stream; 4],
    /// One event per stream, for the start and the end of a program, where all streams wait for each other.
    join_events: [Event; 4],
    /// Events between ops, by their number in an [`EventAssignment`]. There are as many as the largest program needs.
    events: Vec<Event>,
    gates: Gates,
    stopwatch: Stopwatch,
}

/// Measures compute time by pairs of timed events on the compute stream: computation starts, computation ends.
#[derive(Default)]
struct Stopwatch {
    /// Timed events in recording order: start, end, start, end, …
    marks: Vec<Event>,
    recorded: usize,
    /// Compute seconds of earlier pairs, whose events may have been recorded again since.
    seconds: f64,
}

/// The gates of deferred collectives. A gate is an event that completes when its collective may start.
///
/// The numbered events that a collective waits for may be recorded again before the deferred collective is enqueued. A
/// separate stream therefore waits for them at the collective's place in the program, and the gate is recorded there.
struct Gates {
    stream: Stream,
    marks: Vec<Event>,
}

impl Queues {
    /// Creates the streams of a GPU. Events between ops come later ([`Queues::make_events`], [`Queues::make_gates`]).
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

    /// Creates events for waits between ops until there are at least `count`.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn make_events(&mut self, count: usize) -> Result<(), CudaError> {
        while self.events.len() < count {
            self.events.push(Event::new(&self.context)?);
        }
        Ok(())
    }

    /// Creates gates for deferred collectives until there are at least `count`.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn make_gates(&mut self, count: usize) -> Result<(), CudaError> {
        while self.gates.marks.len() < count {
            self.gates.marks.push(Event::new(&self.context)?);
        }
        Ok(())
    }

    /// Records gate number `gate`. It opens once all gates recorded before it are open and the numbered `events` are
    /// complete; recording these events again later does not delay it.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn record_gate(&self, gate: usize, events: &[usize]) -> Result<(), CudaError> {
        events.iter().try_for_each(|event| self.gates.stream.wait(&self.events[*event]))?;
        self.gates.marks[gate].record(&self.gates.stream)
    }

    /// Makes later work of the communication queue wait until a gate opens.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn wait_for_gate(&self, gate: usize) -> Result<(), CudaError> {
        self.stream(Queue::Communication).expect("a queue with a stream").wait(&self.gates.marks[gate])
    }

    /// Returns the stream of a queue; `None` for queues whose ops the CPU runs.
    pub fn stream(&self, queue: Queue) -> Option<&Stream> {
        let index = STREAMED_QUEUES.iter().position(|streamed| *streamed == queue)?;
        Some(&self.streams[index])
    }

    /// Returns the compute stream, which all queues join at the end of a program.
    pub fn compute(&self) -> &Stream {
        &self.streams[0]
    }

    /// Records event number `event` at the present end of a queue.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    ///
    /// # Panics
    /// Panics for queues whose ops the CPU runs. Their ops are complete when the host continues, so no event is needed.
    pub fn signal(&self, queue: Queue, event: usize) -> Result<(), CudaError> {
        self.events[event].record(self.stream(queue).expect("a queue with a stream"))
    }

    /// Makes later work of `queue` wait for event number `event`. If the CPU runs the queue's ops, blocks the host.
    ///
    /// # Errors
    /// Returns a failure of the device.
    pub fn wait(&self, queue: Queue, event: usize) -> Result<(), CudaError> {
        match self.stream(queue) {
            Some(stream) => stream.wait(&self.events[event]),
            None => self.events[event].synchronize(),
        }
    }

    /// Marks the start of computation at the present end of the compute stream, for [`Queues::compute_seconds`]. Drops
    /// an earlier start that has no end.
    ///
    /// # Errors
    /// Fails if the driver refuses.
    pub fn mark_compute_start(&mut self) -> Result<(), CudaError> {
        self.stopwatch.recorded &= !1;
        self.mark()
    }

    /// Marks the end of computation at the present end of the compute stream, for [`Queues::compute_seconds`].
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

    /// Returns the seconds between all marked starts and ends of computation so far. The work of the compute stream
    /// must be complete.
    ///
    /// # Errors
    /// Fails if it is not, or the device failed.
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

/// The numbered events through which ops of a program wait for each other. Ops are numbered from 1 in program order. A
/// later op records the same event again once all ops that wait for it are enqueued.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventAssignment {
    /// Number of the event that an op records when it completes, by the op's number.
    pub signals: BTreeMap<u32, usize>,
    /// Numbers of the events that an op waits for, by the op's number.
    pub waits_for: BTreeMap<u32, Vec<usize>>,
    /// Number of events that the program needs; the events are numbered from 0.
    pub count: usize,
}

/// Assigns events to the waits of a program. `leader_of` maps an op to the first op of the group with which it is
/// enqueued. Waits and events of the whole group belong to that leader.
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
