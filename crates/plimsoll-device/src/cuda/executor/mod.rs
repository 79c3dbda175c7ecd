//! The executor that runs programs on a GPU. Every operand is a range of the one device arena; every op is a few
//! kernels, a matrix product or a copy.
//!
//! **Asynchrony.** Running a program enqueues its ops and returns; the host runs ahead of the device. The host waits
//! only for:
//!
//! - data that it reads ([`Device::read`]) and files that it writes,
//! - ops that run on the CPU,
//! - an [`Observer`] that requires each op to complete before the next begins.
//!
//! The host executes CPU ops itself. The streams meanwhile continue with enqueued work and get no new work. A CPU
//! update that takes longer than this work leaves the GPU idle; predicted times do not include that.
//!
//! **Order.** Ops of one queue run in order on one stream. Ops of different queues wait for each other through events,
//! derived from hazards on arena ranges (`plimsoll_program::order`). At the end of a program the compute queue joins
//! all other queues; at the start of the next, the others start after it. Inputs are written and results are read on
//! the compute queue, so programs appear to run one after another.
//!
//! **Collectives.** The host takes part in collectives, with bytes that the device copies out (`collectives`). They are
//! deferred until another op waits for them or the program has no other work, so that the device has work meanwhile.
//! Pipeline messages lie in the host arena and involve only the host.
//!
//! **Memory.** The device arena; the pinned host arena; [`STAGING_BYTES`] of pinned staging; contexts, modules and
//! libraries ([`Charges`]). Drivers load code when a kernel first starts, so charges are measured after every kernel
//! and every product has run once. These runs use an arena that is only as large as the largest op needs. The full
//! arena is allocated once all charges are known, so the load line is never exceeded.
//!
//! **Preparation.** At opening, every op of every program is resolved to functions, addresses and grids. A step then
//! costs the host a few driver calls per op. Consecutive optimizer updates share launches; this changes no bit because
//! elements are updated independently. Sums of squares do not share launches, because that would change their order of
//! summation.
//!
//! **Modules.** `open` opens a GPU and measures its charges. `operands` resolves operands to addresses. `warm_up` loads
//! kernels and runs each once, at opening and after a plan change. `prepare` turns programs into steps. This file holds
//! the device itself and enqueues steps.
//!
//! [`STAGING_BYTES`]: super::staging::STAGING_BYTES

mod open;
mod operands;
mod prepare;
mod warm_up;

pub use open::{Charges, OpenRequest, OpenedGpu, ProcessBytes, measure_charges, open};

use super::collectives::ROUND_BYTES;
use super::compile::Compiler;
use super::kernels::Real;
use super::nccl::{self, Nccl};
use super::products::Products;
use super::resources::GpuResources;
use crate::cpu;
use crate::cpu::ops::{RunOp, Site, runner};
use crate::cpu::pool::Pool;
use crate::device::{AvailableMemory, Device, FileSpace, Memory, NoMemory, Observer, ProgramCall};
use crate::error::{CudaError, DeviceError};
use crate::probe;
use crate::spaces::ResizableArenas;
use crate::transport::{self, GroupHandle};
use operands::{LoadedPlan, OperandResolver};
use plimsoll_core::{Bytes, CollectiveBackend, DType, GemmAlgorithms, Space};
use plimsoll_program::op::Queue;
use plimsoll_program::{Op, OpKind, Placement, Program, ProgramSet, TensorId};
use prepare::{CopyEndpoint, PreparedProgram, Step, Work};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::sync::Arc;
use warm_up::{LoadedKernels, WarmedUp};

/// Text that stands for this kind of device in errors about unsupported ops.
const DEVICE: &str = "a single GPU";

/// Upper bound of the number of arguments that a kernel takes.
const ARGUMENTS: usize = 32;

/// A GPU that runs the programs of a plan. Rust drops fields in this order, so fields that use device memory precede
/// `resources`, which owns it.
struct CudaDevice {
    /// NCCL state of this rank; `None` without a team, or if the team does not use NCCL.
    nccl: Option<Nccl>,
    /// Prepared programs by (program index, micro-batch). The micro-batch is 0 if the program's addresses do not depend
    /// on it.
    prepared: BTreeMap<(usize, u32), Arc<PreparedProgram>>,
    products: Products,
    kernels: LoadedKernels,
    plan: Arc<LoadedPlan>,
    resources: GpuResources,
    /// CPU threads for ops that run on the host; `None` if the plan has no such ops.
    pool: Option<Pool>,
    threads: usize,
    compiler: Arc<Compiler>,
    charges: Charges,
    process_bytes: ProcessBytes,
    warmed_up: WarmedUp,
    /// Communication group of the team; `None` for a single device.
    group: Option<GroupHandle>,
    /// The NCCL library; `None` if it is not installed.
    nccl_library: Option<Arc<nccl::Library>>,
    /// Whether a failed switch of plans destroyed the tensors that a program keeps only while it runs. An interrupted
    /// program then cannot resume in its middle.
    intermediates_lost: bool,
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Modules and libraries must be idle when they are unloaded, and need a current context.
        let _ = self.resources.context.enter();
        // Dropping the communicator aborts collectives that wait for other ranks.
        self.nccl = None;
        let _ = self.resources.context.synchronize();
    }
}

impl CudaDevice {
    fn resolver(&self, variable: i64, micro_batch: u32) -> OperandResolver<'_> {
        let (plan, base) = (&*self.plan, self.resources.base());
        OperandResolver { plan, placement: &plan.placement, base, variable, micro_batch: i64::from(micro_batch) }
    }

    /// Enqueues one piece of work on the stream of `queue`, or executes it before returning if it runs on the host.
    /// Device work of a queue without a stream goes to the compute stream.
    fn start_work(
        &mut self,
        work: &Work,
        queue: Queue,
        micro_batch: u32,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        let queues = &self.resources.queues;
        let stream = queues.stream(queue).unwrap_or_else(|| queues.compute());
        // SAFETY (of all work started here and in `copy`): addresses are ranges of the arenas as planned, and tensors
        // are as large as their ops state (`passes::check`). Concurrent work touches other ranges, because steps wait
        // for each other as hazards demand. The host waits before it touches a range itself.
        match work {
            Work::Kernel(function, launch) => {
                let mut pointers = [std::ptr::null::<c_void>(); ARGUMENTS];
                for (pointer, argument) in pointers.iter_mut().zip(&launch.arguments) {
                    *pointer = argument.pointer();
                }
                let pointers = &pointers[..launch.arguments.len()];
                // SAFETY: see above; arguments are in the order of the kernel's signature (tested against its source).
                unsafe { stream.launch(*function, launch.grid, launch.block, launch.shared_bytes, pointers) }?;
            }
            // SAFETY: see above.
            Work::Product(shape, operands) => unsafe { self.products.run(shape, operands, stream) }?,
            Work::OnHost { op, variable } => {
                let LoadedPlan { set, placement, real, .. } = &*self.plan;
                let (spaces, micro_batch) = (self.resources.spaces(), i64::from(micro_batch));
                let site = |pool| Site { spaces, pool, set, placement, variable: *variable, micro_batch };
                let (group, single_thread_pool) = (self.group.as_ref(), Pool::new(1)?);
                match &op.kind {
                    OpKind::CollectiveStart(message) => {
                        cpu::collectives::start_collective(site(&single_thread_pool), group, message, 0.0, 0.0)?;
                    }
                    OpKind::CollectiveWait(message) => {
                        cpu::collectives::wait_collective(site(&single_thread_pool), group, message, 0.0)?;
                    }
                    _ => {
                        let pool = self.pool.as_ref().expect("a plan with host ops has a pool");
                        let run: RunOp = runner(if *real == Real::Bf16 { DType::Bf16 } else { DType::F32 });
                        pool.enter(|| run(site(pool), op, files))?;
                    }
                }
            }
            Work::Copy { from, to, bytes } => self.copy(*from, *to, *bytes, queue, files)?,
            Work::Collective(collective) => {
                let no_team = DeviceError::Unsupported { op: "a collective", device: "a device without a team" };
                let group = self.group.as_ref().ok_or(no_team)?;
                // SAFETY: see above.
                unsafe { collective.run(group, self.nccl.as_mut(), stream, &mut self.resources.staging, files) }?;
            }
        }
        Ok(())
    }

    /// Enqueues a deferred step so that it starts when its gate opens, and records the step's event after it.
    fn start_deferred(
        &mut self,
        deferred_step: &DeferredStep,
        micro_batch: u32,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        self.resources.queues.wait_for_gate(deferred_step.gate)?;
        if deferred_step.runs {
            if let (true, Some(stream)) = (
                deferred_step.step.work.iter().any(Work::runs_on_host),
                self.resources.queues.stream(deferred_step.step.queue),
            ) {
                stream.synchronize()?;
            }
            for work in &deferred_step.step.work {
                self.start_work(work, deferred_step.step.queue, micro_batch, files)?;
            }
        }
        Ok(deferred_step
            .step
            .signals
            .map_or(Ok(()), |event| self.resources.queues.signal(deferred_step.step.queue, event))?)
    }

    /// Enqueues a copy, or executes it before returning if neither end is in device memory.
    fn copy(
        &mut self,
        from: CopyEndpoint,
        to: CopyEndpoint,
        bytes: u64,
        queue: Queue,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        let host = self.resources.host_range();
        let GpuResources { queues, staging, .. } = &mut self.resources;
        let stream = queues.stream(queue).unwrap_or_else(|| queues.compute());
        let name = |tensor: TensorId| &self.plan.set.tensor(tensor).name;
        let failed = |tensor| move |source| DeviceError::File { tensor: name(tensor).clone(), source };
        if matches!(from, CopyEndpoint::File(..)) {
            // A pending write may target the bytes that are read.
            staging.flush(files)?;
        }
        match (from, to) {
            // SAFETY: see `start_work`.
            (CopyEndpoint::Device(from), CopyEndpoint::Device(to)) => unsafe { stream.copy(to, from, bytes) }?,
            // SAFETY: see `start_work`.
            (CopyEndpoint::Host(from), CopyEndpoint::Device(to)) => {
                unsafe { stream.copy_in(to, host.pointer(from, bytes), bytes) }?
            }
            // SAFETY: see `start_work`.
            (CopyEndpoint::Device(from), CopyEndpoint::Host(to)) => {
                unsafe { stream.copy_out(host.pointer(to, bytes), from, bytes) }?
            }
            (CopyEndpoint::File(tensor, first), CopyEndpoint::Device(to)) => {
                let fill_part = |files: &mut dyn FileSpace, offset: u64, part: &mut [u8]| {
                    files.read(name(tensor), first + offset, part).map_err(failed(tensor))
                };
                // SAFETY: see `start_work`.
                unsafe { staging.copy_to_device(stream, to, bytes, files, fill_part) }?;
            }
            (CopyEndpoint::Device(from), CopyEndpoint::File(tensor, first)) => {
                // SAFETY: see `start_work`.
                unsafe { staging.copy_to_file(stream, from, bytes, name(tensor), first, files) }?;
            }
            (CopyEndpoint::File(tensor, first), CopyEndpoint::Host(to)) => {
                // SAFETY: see `start_work`; the range was waited for.
                let into = unsafe { std::slice::from_raw_parts_mut(host.pointer(to, bytes), bytes as usize) };
                files.read(name(tensor), first, into).map_err(failed(tensor))?;
            }
            (CopyEndpoint::Host(from), CopyEndpoint::File(tensor, first)) => {
                // SAFETY: see `start_work`; the range was waited for.
                let from = unsafe { std::slice::from_raw_parts(host.pointer(from, bytes), bytes as usize) };
                files.write(name(tensor), first, from).map_err(failed(tensor))?;
            }
            // SAFETY: see `start_work`; both ranges were waited for.
            (CopyEndpoint::Host(from), CopyEndpoint::Host(to)) => unsafe {
                std::ptr::copy(host.pointer(from, bytes), host.pointer(to, bytes), bytes as usize);
            },
            (CopyEndpoint::File(..), CopyEndpoint::File(..)) => {
                return Err(DeviceError::Unsupported { op: "copy of a file", device: DEVICE });
            }
        }
        Ok(())
    }

    /// Makes the step's queue wait for the events that the step depends on. If the step has work for the host, blocks
    /// the host until these events and all earlier work of the queue are complete.
    fn wait_before(&self, step: &Step) -> Result<(), CudaError> {
        let queues = &self.resources.queues;
        let by_host = step.work.iter().any(Work::runs_on_host);
        let waiting = if by_host { Queue::Host } else { step.queue };
        step.waits_for.iter().try_for_each(|event| queues.wait(waiting, *event))?;
        match queues.stream(step.queue) {
            Some(stream) if by_host => stream.synchronize(),
            _ => Ok(()),
        }
    }

    /// Runs the ops of a program from `call.first_op` on, in the steps of `prepared`, so that queues overlap. If the
    /// observer refuses an op, all earlier ops are started and no later one.
    fn run_steps(
        &mut self,
        prepared: &PreparedProgram,
        program: &Program,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        if prepared.uses_other_queues {
            self.resources.queues.fork()?;
        }
        if prepared.has_host_work {
            self.resources.queues.compute().synchronize()?;
        }
        let mut deferred = VecDeque::new();
        let timed = self.group.is_some();
        if timed {
            self.resources.queues.mark_compute_start()?;
        }
        let started = self.start_steps(prepared, program, call, files, observer, &mut deferred);
        if timed {
            self.resources.queues.mark_compute_end()?;
        }
        let finished =
            deferred.iter().try_for_each(|deferred_step| self.start_deferred(deferred_step, call.micro_batch, files));
        started.and(finished)?;
        if prepared.uses_other_queues {
            self.resources.queues.join()?;
        }
        Ok(())
    }

    /// Enqueues the steps of a program. Steps of the communication queue go to `deferred` instead, until another step
    /// waits for them; the caller enqueues the rest.
    fn start_steps<'a>(
        &mut self,
        prepared: &'a PreparedProgram,
        program: &Program,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
        deferred: &mut VecDeque<DeferredStep<'a>>,
    ) -> Result<(), DeviceError> {
        let mut gate = 0;
        let mut trace = (1..).zip(program.trace());
        let mut members: Vec<(u32, &Op, i64)> = Vec::new();
        for step in &prepared.steps {
            members.clear();
            members.extend(trace.by_ref().take(step.count as usize).map(|(tick, (op, variable))| (tick, op, variable)));
            members.retain(|(tick, ..)| *tick >= call.first_op);
            if members.is_empty() {
                continue;
            }
            let runs = members[0].1.runs(call.is_last_micro_batch);
            if step.queue == Queue::Communication && !runs {
                // A later step may depend on the events that this step waits for.
                self.defer(step, &mut gate, false, deferred)?;
                continue;
            }
            let mut refused = None;
            for (index, &(tick, op, _)) in members.iter().enumerate() {
                if let Err(error) = observer.before(tick, op, &mut NoMemory) {
                    refused = Some(error);
                    members.truncate(index);
                    break;
                }
            }
            if members.is_empty() {
                return refused.map_or(Ok(()), Err);
            }
            // Deferred steps that this step waits for must be enqueued first.
            let is_awaited = |deferred_step: &DeferredStep| {
                deferred_step.step.signals.is_some_and(|event| step.waits_for.contains(&event))
            };
            let for_others = deferred.iter().any(is_awaited);
            let waits = for_others || step.queue == Queue::Compute && !step.waits_for.is_empty();
            let timed = waits && self.group.is_some();
            if timed {
                self.resources.queues.mark_compute_end()?;
            }
            while deferred.iter().any(is_awaited) {
                let first = deferred.pop_front().expect("an awaited step is deferred");
                self.start_deferred(&first, call.micro_batch, files)?;
            }
            if step.queue == Queue::Communication {
                if timed {
                    self.resources.queues.mark_compute_start()?;
                }
                self.defer(step, &mut gate, true, deferred)?;
                members.iter().for_each(|&(tick, op, _)| observer.after(tick, op, &mut NoMemory));
                continue;
            }
            self.wait_before(step)?;
            if timed {
                self.resources.queues.mark_compute_start()?;
            }
            if members.len() == step.count as usize {
                for work in &step.work {
                    self.start_work(work, step.queue, call.micro_batch, files)?;
                }
            } else {
                // A partly executed update group runs op by op, with identical bits.
                for &(_, op, variable) in &members {
                    for work in self.work_for(&self.resolver(variable, call.micro_batch), op)? {
                        self.start_work(&work, step.queue, call.micro_batch, files)?;
                    }
                }
            }
            if let Some(event) = step.signals {
                self.resources.queues.signal(step.queue, event)?;
            }
            members.iter().for_each(|&(tick, op, _)| observer.after(tick, op, &mut NoMemory));
            if let Some(error) = refused {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Appends a step to `deferred` instead of enqueueing it. Records gate number `gate`, which opens once the events
    /// that the step waits for are complete. Increments `gate`.
    fn defer<'a>(
        &mut self,
        step: &'a Step,
        gate: &mut usize,
        runs: bool,
        deferred: &mut VecDeque<DeferredStep<'a>>,
    ) -> Result<(), CudaError> {
        self.resources.queues.record_gate(*gate, &step.waits_for)?;
        deferred.push_back(DeferredStep { step, gate: *gate, runs });
        *gate += 1;
        Ok(())
    }

    /// Runs the ops of a program from `call.first_op` on, on the compute queue. Each op completes before the next
    /// begins.
    fn run_one_at_a_time(
        &mut self,
        program: &Program,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        self.resources.context.synchronize()?;
        let trace = (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.first_op);
        for (tick, (op, variable)) in trace.filter(|(_, (op, _))| op.runs(call.is_last_micro_batch)) {
            observer.before(tick, op, &mut self.resources)?;
            let work = self.work_for(&self.resolver(variable, call.micro_batch), op)?;
            if work.iter().any(Work::runs_on_host) {
                self.resources.context.synchronize()?;
            }
            for work in &work {
                self.start_work(work, Queue::Compute, call.micro_batch, files)?;
            }
            self.resources.context.finish(op.name())?;
            self.resources.staging.flush(files)?;
            self.resources.check()?;
            observer.after(tick, op, &mut self.resources);
        }
        Ok(())
    }
}

/// A step of the communication queue that is not yet enqueued.
struct DeferredStep<'a> {
    step: &'a Step,
    /// Number of the gate that the step waits for ([`Queues::record_gate`](super::queues::Queues::record_gate)).
    gate: usize,
    /// Whether the step does its work in this micro-batch; otherwise it only records its event.
    runs: bool,
}

impl Device for CudaDevice {
    fn run_observed(
        &mut self,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        self.resources.check()?;
        self.resources.context.enter()?;
        self.intermediates_lost &= call.first_op > 1;
        if self.intermediates_lost {
            return Err(CudaError::Memory { what: "resume in the middle of a program".into() }.into());
        }
        let missing = || DeviceError::UnknownProgram { program: call.program.to_string() };
        let index = self.plan.set.program_index(call.program).ok_or_else(missing)?;
        let prepared = self.prepared(index, call.micro_batch)?;
        self.resources.workspace_end = self.resources.workspace_end.max(prepared.workspace_end);
        let (plan, group) = (self.plan.clone(), self.group.clone());
        let program = &plan.set.programs[index];
        let done = transport::abort_group_on_failure(group.as_ref(), || match observer.serializes_ops() {
            true => self.run_one_at_a_time(program, call, files, observer),
            false => self.run_steps(&prepared, program, call, files, observer),
        });
        let Err(error) = done else {
            self.resources.staging.flush(files)?;
            return Ok(());
        };
        // Enqueued work completes before the error is returned. File writes of completed ops are carried out, unless a
        // file operation failed.
        self.resources.context.synchronize()?;
        if matches!(error, DeviceError::File { .. }) {
            self.resources.staging.discard_pending_writes();
        } else {
            self.resources.staging.flush(files)?;
        }
        Err(error)
    }

    /// Joins a communication group. Fails if the transport does not split collectives into rounds, or its rounds are
    /// larger than a staging slot allows.
    fn join_group(&mut self, group: GroupHandle) -> Result<(), DeviceError> {
        if group.transport.round_bytes().is_none_or(|bytes| bytes > ROUND_BYTES) {
            return Err(DeviceError::CollectivesUnsupported {
                device: "a GPU that stages collectives through the host",
            });
        }
        self.resources.context.enter()?;
        let library = self.nccl_library.as_ref().filter(|_| group.nccl);
        self.nccl =
            library.map(|library| Nccl::new(library, &self.compiler, &self.resources.context, nccl::STAGING_BYTES));
        self.resources.join(group.clone());
        self.group = Some(group);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.resources.check()?;
        self.resources.context.enter()?;
        Ok(self.resources.context.synchronize()?)
    }

    fn collectives(&self) -> Option<CollectiveBackend> {
        self.nccl.as_ref()?.backend()
    }

    /// Returns the seconds that programs have computed since the device was opened, by the GPU's clock. Counts only
    /// programs that ran in a team. `None` if their work is not complete, or the device failed.
    fn compute_seconds(&mut self) -> Option<f64> {
        self.resources.context.enter().and_then(|()| self.resources.queues.compute_seconds()).ok()
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        let (known, first) = (self.plan.set.tensor(tensor), self.plan.placement.offset(tensor, slot));
        assert!(
            bytes.len() as u64 <= known.bytes(),
            "bug: {} bytes for tensor {} of {}",
            bytes.len(),
            known.name,
            known.bytes()
        );
        let written = self.resources.write(known.space, first, bytes);
        self.resources.record_failure(written);
    }

    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        self.read_from(tensor, slot, 0, bytes);
    }

    /// Fills `bytes` with NaN if the read fails, as from a lost device. [`Device::synchronize`] and the next program
    /// then return the error.
    fn read_from(&mut self, tensor: TensorId, slot: u32, from: u64, bytes: &mut [u8]) {
        let (known, first) = (self.plan.set.tensor(tensor), self.plan.placement.offset(tensor, slot));
        let end = from + bytes.len() as u64;
        assert!(end <= known.bytes(), "bug: byte {end} of tensor {} of {}", known.name, known.bytes());
        let read = self.resources.read(known.space, first + from, bytes);
        if self.resources.record_failure(read).is_none() {
            bytes.fill(0xff);
        }
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        self.resources.check()?;
        self.resources.context.enter()?;
        self.resources.context.synchronize()?;
        self.group.iter().for_each(GroupHandle::cancel_sends);
        // The next team may differ.
        self.nccl.iter_mut().for_each(Nccl::close);
        let before = self.resources.bytes(Space::Device).0;
        // Addresses of the new plan may exceed the present arena.
        if placement.arena_bytes > before {
            self.resources.resize(Space::Device, placement.arena_bytes, before)?;
        }
        let LoadedPlan { real, target, .. } = *self.plan;
        let old = std::mem::replace(&mut self.plan, Arc::new(LoadedPlan { set, placement, real, target }));
        let old_prepared = std::mem::take(&mut self.prepared);
        let done = self.switch_from(&old);
        if done.is_err() {
            (self.plan, self.prepared) = (old, old_prepared);
            self.resources.resize(Space::Device, before, before)?;
        }
        done
    }

    fn algorithms(&self) -> Option<GemmAlgorithms> {
        Some(self.products.algorithms().0)
    }

    /// Returns the GPU's free and total memory from the driver, to which other processes count, too. The held bytes are
    /// computed: arena, context, libraries and NCCL. `None` if the driver does not report its memory.
    fn available_memory(&mut self) -> Option<AvailableMemory> {
        let context = &self.resources.context;
        let (free, total) = context.enter().and_then(|()| context.memory()).ok()?;
        let bound_by = format!("cuda:{}", context.gpu().ordinal);
        let nccl = self.nccl.as_ref().map_or(Bytes::ZERO, Nccl::held_bytes);
        let held = self.resources.held_bytes() + self.charges.context + self.charges.libraries + nccl;
        Some(AvailableMemory { memory: probe::Memory { total, free, bound_by }, held_bytes: held })
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.resources
    }
}
