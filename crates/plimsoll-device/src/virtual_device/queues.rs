//! Execution of a Program on a virtual device: op by op if an observer needs it, otherwise each queue on a thread of
//! its own.
//!
//! With threads, the observer's hooks are called for all ops in Program order before any op runs, like the launches of
//! a GPU driver. If the observer fails an op, all earlier ops run to their end and no later one starts. An interrupted
//! update can therefore continue from exactly that op.

use super::clock::Clock;
use super::{ComputeTime, OpTime, PreparedProgram, VirtualDevice, needs_files};
use crate::cpu::collectives::{start_collective, wait_collective};
use crate::cpu::ops::{RunOp, Site};
use crate::cpu::pool::Pool;
use crate::device::{FileSpace, NoFiles, NoMemory, Observer, ProgramCall};
use crate::error::DeviceError;
use crate::spaces::Spaces;
use crate::transport::GroupHandle;
use plimsoll_program::op::Queue;
use plimsoll_program::order::Wait;
use plimsoll_program::{Op, OpKind, Placement, Program, ProgramSet};
use std::ops::RangeInclusive;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

impl VirtualDevice {
    /// Runs the Program with index `number` in the set. One op runs at a time, on the caller's thread and the pool.
    pub(super) fn run_serialized(
        &mut self,
        number: usize,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let (set, placement, run) = (&self.set, &self.placement, self.run);
        let (program, prepared) = (&set.programs[number], &self.programs[number]);
        let (spaces, pool, single_thread_pool, clock) =
            (&mut self.spaces, &self.pool, &self.single_thread_pool, &mut self.clock);
        let (micro_batch, serialized) = (i64::from(call.micro_batch), observer.serializes_ops());
        let (group, compute_slowdown) = (self.group.as_ref(), self.compute_slowdown);
        let trace = (1..).zip(program.trace().zip(prepared.op_times_in_order(program)));
        let mut computed = ComputeTime::default();
        let done = pool.enter(|| {
            let mut end = clock.next_start();
            let trace = trace.skip_while(|(tick, _)| *tick < call.first_op);
            for (tick, ((op, variable), op_time)) in trace.filter(|(_, ((op, _), _))| op.runs(call.is_last_micro_batch))
            {
                if serialized { observer.before(tick, op, spaces) } else { observer.before(tick, op, &mut NoMemory) }?;
                let op_time = op_time.slowed_down(op, compute_slowdown);
                clock.wait_until(end + op_time.latency_seconds);
                let pool = if op.queue == Queue::Compute { pool } else { single_thread_pool };
                let site = Site { spaces, pool, set, placement, variable, micro_batch };
                match &op.kind {
                    OpKind::CollectiveStart(exchange) => {
                        end = start_collective(site, group, exchange, end, op_time.seconds)?;
                    }
                    OpKind::CollectiveWait(exchange) => end = wait_collective(site, group, exchange, end)?,
                    _ => {
                        end += op_time.latency_seconds + op_time.seconds;
                        let started = Instant::now();
                        run(site, op, files)?;
                        computed.add(op, op_time, started);
                    }
                }
                clock.wait_until(end);
                clock.advance_to(end);
                if serialized { observer.after(tick, op, spaces) } else { observer.after(tick, op, &mut NoMemory) }
            }
            Ok(())
        });
        self.compute_seconds += computed.seconds();
        done
    }

    /// Runs the Program with index `number` in the set. Each queue has a thread of its own, and the compute queue has
    /// the caller's. An op starts after the previous op of its queue and all ops that it depends on have ended.
    pub(super) fn run_queues(
        &mut self,
        number: usize,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let (program, prepared) = (&self.set.programs[number], &self.programs[number]);
        let mut last = program.op_count() as u32;
        let mut refused = Ok(());
        let trace = (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.first_op);
        for (tick, (op, _)) in trace.filter(|(_, (op, _))| op.runs(call.is_last_micro_batch)) {
            if let Err(error) = observer.before(tick, op, &mut NoMemory) {
                (last, refused) = (tick - 1, Err(error));
                break;
            }
            observer.after(tick, op, &mut NoMemory);
        }
        let work = ProgramRun {
            program,
            prepared,
            set: &self.set,
            placement: &self.placement,
            spaces: &self.spaces,
            run: self.run,
            micro_batch: i64::from(call.micro_batch),
            ticks: call.first_op..=last,
            last: call.is_last_micro_batch,
            group: self.group.as_ref(),
            clock: self.clock,
            compute_slowdown: self.compute_slowdown,
            begin: self.clock.next_start(),
            files: Mutex::new(files),
            state: Mutex::new(State {
                ends: vec![None; program.op_count()],
                awaited: Vec::new(),
                computed: ComputeTime::default(),
                failed: None,
                stopped: false,
            }),
            changed: Condvar::new(),
        };
        let (pool, single_thread_pool) = (&self.pool, &self.single_thread_pool);
        std::thread::scope(|scope| {
            for &queue in prepared.queues.iter().filter(|&&queue| queue != Queue::Compute) {
                let work = &work;
                let thread = std::thread::Builder::new().name(format!("plimsoll-{queue:?}").to_lowercase());
                if thread.spawn_scoped(scope, move || work.queue(queue, single_thread_pool)).is_err() {
                    // Without this thread its ops never run, so no queue may wait for them.
                    work.stop(Some(DeviceError::NoThread { queue: format!("{queue:?}").to_lowercase() }));
                }
            }
            pool.enter(|| work.queue(Queue::Compute, pool));
        });
        let state = work.state.into_inner().expect("a panic of a queue has been propagated");
        let end = state.ends.iter().flatten().copied().fold(work.begin, f64::max);
        self.clock.advance_to(end);
        self.compute_seconds += state.computed.seconds();
        // An error of this device's observer takes precedence over errors from queues and peers.
        refused.and(state.failed.map_or(Ok(()), Err))
    }
}

/// One run of a Program, shared by the threads of its queues.
struct ProgramRun<'a> {
    program: &'a Program,
    prepared: &'a PreparedProgram,
    set: &'a ProgramSet,
    placement: &'a Placement,
    spaces: &'a Spaces,
    run: RunOp,
    micro_batch: i64,
    /// Numbers of the ops that run, counted from 1.
    ticks: RangeInclusive<u32>,
    /// Whether the call is for the last micro-batch of a step. Some ops run only then.
    last: bool,
    group: Option<&'a GroupHandle>,
    clock: Clock,
    /// Factor on the time of compute ops, set by fault injection; 1 without it.
    compute_slowdown: f64,
    /// Planned start of the run, in seconds of the clock.
    begin: f64,
    files: Mutex<&'a mut dyn FileSpace>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Progress of one run of a Program.
struct State {
    /// Planned end of each op, by its number minus one. None until the op has ended.
    ends: Vec<Option<f64>>,
    /// Numbers of the ops that queues wait for now; only the ends of these ops wake other threads.
    awaited: Vec<u32>,
    computed: ComputeTime,
    failed: Option<DeviceError>,
    /// Whether no further op may start.
    stopped: bool,
}

/// A guard that stops all queues if the thread of its queue panics, because the other queues may wait for its ops.
struct StopOnPanic<'a, 'b>(&'a ProgramRun<'b>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(None);
        }
    }
}

impl ProgramRun<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while holding the lock.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn stop(&self, reason: Option<DeviceError>) {
        // The communication queue may be waiting for peers.
        if let (Some(group), false) = (self.group, reason.as_ref().is_some_and(DeviceError::is_peer_failure)) {
            let reason = reason.as_ref().map_or("it hit a bug".to_owned(), DeviceError::to_string);
            group.abort(&reason);
        }
        let mut state = self.state();
        state.stopped = true;
        state.failed = state.failed.take().or(reason);
        self.changed.notify_all();
    }

    /// Runs all ops of one queue in order, and marks each as ended. Ends early if the run is stopped. An error of an op
    /// stops the run.
    fn queue(&self, queue: Queue, pool: &Pool) {
        let _guard = StopOnPanic(self);
        let mut free = self.begin;
        let trace = (1..).zip(self.program.trace().zip(self.prepared.op_times_in_order(self.program)));
        let own_ops = trace.filter(|(tick, ((op, _), _))| op.queue == queue && self.ticks.contains(tick));
        for (tick, ((op, variable), op_time)) in own_ops {
            let Some(ready) = self.wait(tick) else { return };
            if op.runs(self.last) {
                match self.run_paced(
                    op,
                    variable,
                    op_time.slowed_down(op, self.compute_slowdown),
                    free.max(ready),
                    pool,
                ) {
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

    /// Waits until all ops that op number `tick` depends on have ended. Returns the latest planned end among them, or
    /// the start of the run if there are none. None if the run has been stopped.
    fn wait(&self, tick: u32) -> Option<f64> {
        let waits = &self.prepared.waits;
        let first = waits.partition_point(|wait| wait.op < tick);
        let mut ready = self.begin;
        let mut state = self.state();
        for Wait { on, .. } in waits[first..].iter().take_while(|wait| wait.op == tick) {
            // Ops of the previous, interrupted call have ended.
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
                let index =
                    state.awaited.iter().position(|awaited| awaited == on).expect("only this thread removes it");
                state.awaited.swap_remove(index);
            }
        }
        (!state.stopped).then_some(ready)
    }

    /// Runs an op in the iteration `variable` of its Block, with planned start `ready`, in seconds of the clock. Waits
    /// until the planned end of the op, and returns that time.
    fn run_paced(&self, op: &Op, variable: i64, op_time: OpTime, ready: f64, pool: &Pool) -> Result<f64, DeviceError> {
        let (spaces, set, placement, micro_batch) = (self.spaces, self.set, self.placement, self.micro_batch);
        let site = Site { spaces, pool, set, placement, variable, micro_batch };
        let mut end = ready + op_time.latency_seconds + op_time.seconds;
        if op_time.latency_seconds > 0.0 {
            self.clock.wait_until(end - op_time.seconds);
        }
        if let OpKind::CollectiveStart(exchange) = &op.kind {
            end = start_collective(site, self.group, exchange, ready, op_time.seconds)?;
        } else if let OpKind::CollectiveWait(exchange) = &op.kind {
            end = wait_collective(site, self.group, exchange, ready)?;
        } else if needs_files(set, op) {
            let mut files = self.files.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            (self.run)(site, op, &mut **files)?;
        } else {
            let started = Instant::now();
            (self.run)(site, op, &mut NoFiles)?;
            self.state().computed.add(op, op_time, started);
        }
        self.clock.wait_until(end);
        Ok(end)
    }
}
