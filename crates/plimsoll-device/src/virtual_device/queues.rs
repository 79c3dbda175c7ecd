//! How a Program runs on a virtual device: op after op where somebody looks, else each queue on a thread of its own.
//!
//! Observers are told of all ops in the order of the Program before any of them runs, as the driver of a GPU would issue
//! them: a refusal at an op means that everything before it runs to its end, and nothing from it on. So an update that was
//! refused can go on from that very op.

use super::clock::Clock;
use super::{Computed, Prepared, Takes, VirtualDevice, needs_files};
use crate::cpu::executor::{RunOp, Site};
use crate::cpu::pool::Pool;
use crate::device::{Call, DeviceError, FileSpace, NoFiles, Observer, Unseen};
use crate::spaces::Spaces;
use crate::transport::{self, Seat};
use plimsoll_program::op::Queue;
use plimsoll_program::order::Wait;
use plimsoll_program::{Op, OpKind, Placement, Program, ProgramSet};
use std::ops::RangeInclusive;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

impl VirtualDevice {
    /// One op at a time, on the caller's thread and the pool.
    pub(super) fn run_in_turn(
        &mut self,
        number: usize,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let (set, placement, run) = (&self.set, &self.placement, self.run);
        let (program, prepared) = (&set.programs[number], &self.programs[number]);
        let (spaces, pool, single, clock) = (&mut self.spaces, &self.pool, &self.single, &mut self.clock);
        let (micro_batch, looked_at) = (i64::from(call.micro_batch), observer.one_at_a_time());
        let (seat, slower) = (self.seat.as_ref(), self.slower);
        let trace = (1..).zip(program.trace().zip(prepared.taken(program)));
        let mut computed = Computed::default();
        let done = pool.enter(|| {
            let mut end = clock.begin();
            let trace = trace.skip_while(|(tick, _)| *tick < call.from);
            for (tick, ((op, variable), takes)) in trace.filter(|(_, ((op, _), _))| op.runs(call.last)) {
                if looked_at { observer.before(tick, op, spaces) } else { observer.before(tick, op, &mut Unseen) }?;
                let takes = takes.slower(op, slower);
                clock.wait_until(end + takes.latency_seconds);
                let pool = if op.queue == Queue::Compute { pool } else { single };
                let site = Site { spaces, pool, set, placement, variable, micro_batch };
                match &op.kind {
                    OpKind::CollectiveStart(exchange) => {
                        end = transport::exchange(site, seat, exchange, end, takes.seconds)?;
                    }
                    OpKind::CollectiveWait(exchange) => end = transport::ended(site, seat, exchange, end)?,
                    _ => {
                        end += takes.latency_seconds + takes.seconds;
                        let begun = Instant::now();
                        run(site, op, files)?;
                        computed.add(op, takes, begun);
                    }
                }
                clock.wait_until(end);
                clock.end(end);
                if looked_at { observer.after(tick, op, spaces) } else { observer.after(tick, op, &mut Unseen) }
            }
            Ok(())
        });
        self.computed += computed.seconds();
        done
    }

    /// Each queue by itself, in the order that the waits demand.
    pub(super) fn run_queues(
        &mut self,
        number: usize,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let (program, prepared) = (&self.set.programs[number], &self.programs[number]);
        let mut last = program.length() as u32;
        let mut refused = Ok(());
        let trace = (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.from);
        for (tick, (op, _)) in trace.filter(|(_, (op, _))| op.runs(call.last)) {
            if let Err(error) = observer.before(tick, op, &mut Unseen) {
                (last, refused) = (tick - 1, Err(error));
                break;
            }
            observer.after(tick, op, &mut Unseen);
        }
        let work = Work {
            program,
            prepared,
            set: &self.set,
            placement: &self.placement,
            spaces: &self.spaces,
            run: self.run,
            micro_batch: i64::from(call.micro_batch),
            ticks: call.from..=last,
            last: call.last,
            seat: self.seat.as_ref(),
            clock: self.clock,
            slower: self.slower,
            begin: self.clock.begin(),
            files: Mutex::new(files),
            state: Mutex::new(State {
                ends: vec![None; program.length()],
                awaited: Vec::new(),
                computed: Computed::default(),
                failed: None,
                stopped: false,
            }),
            changed: Condvar::new(),
        };
        let (pool, single) = (&self.pool, &self.single);
        std::thread::scope(|scope| {
            for &queue in prepared.queues.iter().filter(|&&queue| queue != Queue::Compute) {
                let work = &work;
                let thread = std::thread::Builder::new().name(format!("plimsoll-{queue:?}").to_lowercase());
                if thread.spawn_scoped(scope, move || work.queue(queue, single)).is_err() {
                    // The system gives no thread: what this queue should do is never done, and nobody may wait for it.
                    work.stop(Some(DeviceError::NoThread { queue: format!("{queue:?}").to_lowercase() }));
                }
            }
            pool.enter(|| work.queue(Queue::Compute, pool));
        });
        let state = work.state.into_inner().expect("a panic has passed on before");
        let end = state.ends.iter().flatten().copied().fold(work.begin, f64::max);
        self.clock.end(end);
        self.computed += state.computed.seconds();
        // What this device was refused comes before what others have told it.
        refused.and(state.failed.map_or(Ok(()), Err))
    }
}

/// A run of a Program, as its queues see it.
struct Work<'a> {
    program: &'a Program,
    prepared: &'a Prepared,
    set: &'a ProgramSet,
    placement: &'a Placement,
    spaces: &'a Spaces,
    run: RunOp,
    micro_batch: i64,
    /// The ops that run.
    ticks: RangeInclusive<u32>,
    /// Whether the call is for the last micro-batch of a step.
    last: bool,
    seat: Option<&'a Seat>,
    clock: Clock,
    /// What is computed takes so many times its price.
    slower: f64,
    /// When the run is planned to begin.
    begin: f64,
    files: Mutex<&'a mut dyn FileSpace>,
    state: Mutex<State>,
    changed: Condvar,
}

/// How far a run is.
struct State {
    /// When each op that is over was planned to end, by its number less one.
    ends: Vec<Option<f64>>,
    /// The ops that queues wait for at this moment: only their ends wake anybody.
    awaited: Vec<u32>,
    computed: Computed,
    failed: Option<DeviceError>,
    /// Nothing more begins.
    stopped: bool,
}

/// Stops the others when its queue panics: they may be waiting for it.
struct StopOnPanic<'a, 'b>(&'a Work<'b>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(None);
        }
    }
}

impl Work<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nobody panics while holding it.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn stop(&self, why: Option<DeviceError>) {
        // The queue of collectives may be waiting for others.
        if let (Some(seat), false) = (self.seat, why.as_ref().is_some_and(DeviceError::is_peers)) {
            seat.give_up(&why.as_ref().map_or("it came upon a bug".to_owned(), DeviceError::to_string));
        }
        let mut state = self.state();
        state.stopped = true;
        state.failed = state.failed.take().or(why);
        self.changed.notify_all();
    }

    /// All ops of a queue, in order.
    fn queue(&self, queue: Queue, pool: &Pool) {
        let _guard = StopOnPanic(self);
        let mut free = self.begin;
        let trace = (1..).zip(self.program.trace().zip(self.prepared.taken(self.program)));
        let mine = trace.filter(|(tick, ((op, _), _))| op.queue == queue && self.ticks.contains(tick));
        for (tick, ((op, variable), takes)) in mine {
            let Some(ready) = self.wait(tick) else { return };
            if op.runs(self.last) {
                match self.paced(op, variable, takes.slower(op, self.slower), free.max(ready), pool) {
                    Ok(end) => free = end,
                    Err(error) => return self.stop(Some(error)),
                }
            }
            let mut state = self.state();
            state.ends[tick as usize - 1] = Some(free);
            let awaited = state.awaited.contains(&tick);
            drop(state);
            if awaited {
                self.changed.notify_all();
            }
        }
    }

    /// Waits for all that an op waits for, and says when that was planned to end. Nothing where the run stops.
    fn wait(&self, tick: u32) -> Option<f64> {
        let waits = &self.prepared.waits;
        let first = waits.partition_point(|wait| wait.op < tick);
        let mut ready = self.begin;
        let mut state = self.state();
        for Wait { on, .. } in waits[first..].iter().take_while(|wait| wait.op == tick) {
            // What ran in the call before this one is over.
            if !self.ticks.contains(on) {
                continue;
            }
            loop {
                if state.stopped {
                    return None;
                }
                if let Some(end) = state.ends[*on as usize - 1] {
                    ready = ready.max(end);
                    break;
                }
                state.awaited.push(*on);
                state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
                let mine = state.awaited.iter().position(|awaited| awaited == on).expect("nobody takes another's");
                state.awaited.swap_remove(mine);
            }
        }
        (!state.stopped).then_some(ready)
    }

    /// Runs an op that was planned to be ready then. It ends at the later of now and its planned end, which is given.
    fn paced(&self, op: &Op, variable: i64, takes: Takes, ready: f64, pool: &Pool) -> Result<f64, DeviceError> {
        let (spaces, set, placement, micro_batch) = (self.spaces, self.set, self.placement, self.micro_batch);
        let site = Site { spaces, pool, set, placement, variable, micro_batch };
        let mut end = ready + takes.latency_seconds + takes.seconds;
        if takes.latency_seconds > 0.0 {
            self.clock.wait_until(end - takes.seconds);
        }
        if let OpKind::CollectiveStart(exchange) = &op.kind {
            end = transport::exchange(site, self.seat, exchange, ready, takes.seconds)?;
        } else if let OpKind::CollectiveWait(exchange) = &op.kind {
            end = transport::ended(site, self.seat, exchange, ready)?;
        } else if needs_files(set, op) {
            let mut files = self.files.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            (self.run)(site, op, &mut **files)?;
        } else {
            let begun = Instant::now();
            (self.run)(site, op, &mut NoFiles)?;
            self.state().computed.add(op, takes, begun);
        }
        self.clock.wait_until(end);
        Ok(end)
    }
}
