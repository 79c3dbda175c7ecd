//! The queues of a GPU as streams: what is put on one is done in order; order between them is made of events, as
//! derived from hazards on arena ranges (`plimsoll_program::order`).
//!
//! The host only puts work on queues. The queue of the host's own processor has no stream: its ops are done while
//! they are put on it. Collectives are put on theirs later than what follows them on others (`Gates`): the host, which
//! has its part in them, would else give the device nothing to do meanwhile.

use super::driver::{Context, CudaError, Event, Stream};
use plimsoll_program::op::Queue;
use plimsoll_program::order::Wait;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The queues that have a stream.
const STREAMED: [Queue; 4] = [Queue::Compute, Queue::CopyIn, Queue::CopyOut, Queue::Communication];

/// Streams, and the events between them.
pub struct Queues {
    context: Arc<Context>,
    streams: [Stream; 4],
    /// Where each queue has come to: at the begin and at the end of a Program.
    marks: [Event; 4],
    /// Numbered by [`Signals`]; as many as any Program needs at once.
    events: Vec<Event>,
    gates: Gates,
    stopwatch: Stopwatch,
}

/// When the first queue began to have something to do, and when it had nothing more, in turn: what lies between is what it
/// computed.
#[derive(Default)]
struct Stopwatch {
    /// With the time, in the order in which they were passed.
    marks: Vec<Event>,
    passed: usize,
    /// Of marks that were used again.
    seconds: f64,
}

/// How far other queues have to be before a collective that is put off begins: what it waits for is put on a stream of its
/// own when its turn comes, and marked there, because events mean something else later.
struct Gates {
    stream: Stream,
    marks: Vec<Event>,
}

impl Queues {
    /// Makes the streams.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Queues, CudaError> {
        let stream = || Stream::new(context);
        let event = || Event::new(context);
        Ok(Queues {
            context: context.clone(),
            streams: [stream()?, stream()?, stream()?, stream()?],
            marks: [event()?, event()?, event()?, event()?],
            events: Vec::new(),
            gates: Gates { stream: stream()?, marks: Vec::new() },
            stopwatch: Stopwatch::default(),
        })
    }

    /// Makes as many events as a Program needs.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn make_events(&mut self, count: usize) -> Result<(), CudaError> {
        while self.events.len() < count {
            self.events.push(Event::new(&self.context)?);
        }
        Ok(())
    }

    /// Makes as many gates as a Program has ops on the queue of communication.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn make_gates(&mut self, count: usize) -> Result<(), CudaError> {
        while self.gates.marks.len() < count {
            self.gates.marks.push(Event::new(&self.context)?);
        }
        Ok(())
    }

    /// Gate number `gate` opens after these events, as they are now, and after the gates before it.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn close_gate(&self, gate: usize, events: &[usize]) -> Result<(), CudaError> {
        events.iter().try_for_each(|event| self.gates.stream.wait(&self.events[*event]))?;
        self.gates.marks[gate].record(&self.gates.stream)
    }

    /// What the queue of communication does from now on begins after that gate.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn pass_gate(&self, gate: usize) -> Result<(), CudaError> {
        self.stream(Queue::Communication).expect("a queue with a stream").wait(&self.gates.marks[gate])
    }

    /// The stream of a queue; the host's own has none.
    pub fn stream(&self, queue: Queue) -> Option<&Stream> {
        let index = STREAMED.iter().position(|streamed| *streamed == queue)?;
        Some(&self.streams[index])
    }

    /// The stream that everything joins at the ends of Programs.
    pub fn compute(&self) -> &Stream {
        &self.streams[0]
    }

    /// Number `event` is over when `queue` comes to here.
    ///
    /// # Errors
    /// Where the driver refuses.
    ///
    /// # Panics
    /// For the queue of the host: what it does is done when it is put on it, and nobody waits for it.
    pub fn signal(&self, queue: Queue, event: usize) -> Result<(), CudaError> {
        self.events[event].record(self.stream(queue).expect("a queue with a stream"))
    }

    /// What `queue` does from now on begins after number `event`; the host's own queue waits itself.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait(&self, queue: Queue, event: usize) -> Result<(), CudaError> {
        match self.stream(queue) {
            Some(stream) => stream.wait(&self.events[event]),
            None => self.events[event].synchronize(),
        }
    }

    /// From here on the first queue computes; an end that was not reached before is forgotten with its beginning.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn computes(&mut self) -> Result<(), CudaError> {
        self.stopwatch.passed &= !1;
        self.mark()
    }

    /// The first queue stands still when it comes to here, for some time perhaps.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn stands_still(&mut self) -> Result<(), CudaError> {
        self.mark()
    }

    fn mark(&mut self) -> Result<(), CudaError> {
        let Stopwatch { marks, passed, .. } = &mut self.stopwatch;
        if *passed == marks.len() {
            marks.push(Event::timed(&self.context)?);
        }
        marks[*passed].record(&self.streams[0])?;
        *passed += 1;
        Ok(())
    }

    /// Seconds in which the first queue has computed so far, where all that it was given is over.
    ///
    /// # Errors
    /// Where it is not.
    pub fn computed(&mut self) -> Result<f64, CudaError> {
        let Stopwatch { marks, passed, seconds } = &mut self.stopwatch;
        for [begin, end] in marks[..*passed].as_chunks::<2>().0 {
            *seconds += end.seconds_since(begin)?;
        }
        *passed = 0;
        Ok(*seconds)
    }

    /// The other queues begin after all that was put on the first one so far.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn fork(&self) -> Result<(), CudaError> {
        self.marks[0].record(&self.streams[0])?;
        self.streams[1..].iter().try_for_each(|stream| stream.wait(&self.marks[0]))
    }

    /// The first queue goes on after all that was put on the others so far.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn join(&self) -> Result<(), CudaError> {
        for (stream, mark) in self.streams[1..].iter().zip(&self.marks[1..]) {
            mark.record(stream)?;
            self.streams[0].wait(mark)?;
        }
        Ok(())
    }
}

/// Which op gives which event, and which ops wait for it. Events are used again as soon as all who wait for them
/// have been put on their queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signals {
    /// By op: the event that it gives when it is done.
    pub gives: BTreeMap<u32, usize>,
    /// By op: the events that it waits for.
    pub awaits: BTreeMap<u32, Vec<usize>>,
    /// How many events there are.
    pub count: usize,
}

/// Numbers events for the waits of a Program. Ops with the same leader are put on their queue as one, in its place:
/// what one of them waits for, or gives, is the leader's.
pub fn signals(waits: &[Wait], leader_of: impl Fn(u32) -> u32) -> Signals {
    let mut pairs: Vec<(u32, u32)> = waits.iter().map(|wait| (leader_of(wait.on), leader_of(wait.op))).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let mut last_waiter: BTreeMap<u32, u32> = BTreeMap::new();
    for &(on, op) in &pairs {
        let last = last_waiter.entry(on).or_default();
        *last = op.max(*last);
    }
    let mut signals = Signals::default();
    // Events whose last waiter is before the op that gives are free again.
    let mut busy_until: Vec<u32> = Vec::new();
    for (&on, &last) in &last_waiter {
        let free = busy_until.iter().position(|until| *until <= on);
        let event = free.unwrap_or(busy_until.len());
        if event == busy_until.len() {
            busy_until.push(last);
        } else {
            busy_until[event] = last;
        }
        signals.gives.insert(on, event);
    }
    for (on, op) in pairs {
        signals.awaits.entry(op).or_default().push(signals.gives[&on]);
    }
    signals.count = busy_until.len();
    signals
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whoever_waits_finds_the_event_of_the_op_it_waits_for(
            pairs in prop::collection::vec((1u32..60, 1u32..60), 0..80)
        ) {
            let waits: Vec<Wait> = pairs
                .into_iter()
                .filter(|(on, op)| on != op)
                .map(|(a, b)| Wait { op: a.max(b), on: a.min(b) })
                .collect();
            let signals = signals(&waits, |op| op);
            // Ops are put on their queues in order: first they wait, then they give.
            let mut given: BTreeMap<usize, u32> = BTreeMap::new();
            for op in 1..60 {
                let waited: Vec<u32> =
                    signals.awaits.get(&op).into_iter().flatten().map(|event| given[event]).collect();
                for wait in waits.iter().filter(|wait| wait.op == op) {
                    prop_assert!(waited.contains(&wait.on), "{wait:?} finds {waited:?}");
                }
                if let Some(event) = signals.gives.get(&op) {
                    given.insert(*event, op);
                }
            }
        }
    }

    #[test]
    fn events_are_used_again_and_groups_wait_as_one() {
        let waits: Vec<Wait> = (0..100).map(|i| Wait { on: 2 * i + 1, op: 2 * i + 2 }).collect();
        assert_eq!(signals(&waits, |op| op).count, 1);
        // Ops 3 and 4 are one: it waits for 1 and 2 before it begins, and 5 waits for it.
        let waits = [(3, 1), (4, 2), (5, 4)].map(|(op, on)| Wait { op, on });
        let found = signals(&waits, |op| if op == 4 { 3 } else { op });
        assert_eq!(found.awaits[&3].len(), 2);
        assert_eq!(found.awaits[&5], [found.gives[&3]]);
    }
}
