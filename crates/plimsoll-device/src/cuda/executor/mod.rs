//! Runs Programs on a GPU: every operand is a range of the one arena, every op a few kernels, a product or a copy.
//!
//! **What is asynchronous.** Running a Program puts its ops on queues and comes back; the host is ahead of the device.
//! It waits only where it must: for what it reads ([`Device::read`]), for files that are written, for ops of its own
//! processor, and where an [`Observer`] wants each op to be over before the next begins. It does ops of its own
//! processor itself: meanwhile streams go on with what they were given, and get nothing new. An update by the host that
//! takes longer than that leaves the GPU idle, which predicted times do not know.
//!
//! **What orders it.** Ops of a queue are done in order (a stream). Ops of different queues wait for each other by
//! events, as hazards on arena ranges demand (`plimsoll_program::order`). At the end of a Program the queue of
//! computation joins all others, and at the begin of the next the others start after it; inputs are written, and
//! results read, on that queue. So Programs follow one another as if each had ended.
//!
//! **Collectives** are the host's to take part in, with bytes that the device brings (`collectives`). They are put off until
//! something waits for them, or the Program has nothing else: by then the device has the rest of the pass to work on.
//! Messages of a pipeline stand in the host's arena, and are the host's alone.
//!
//! **What memory there is.** The arena of the device; the pinned arena of the host; [`STAGING_BYTES`] of pinned
//! staging; what contexts, modules and libraries hold ([`Charges`]). That is measured when the device is opened, after
//! every kernel and every product was started once, because drivers load code at its first start. They are started in
//! an arena that is only as large as the largest op needs: the whole one is taken when all charges are known, so that
//! a load line is not crossed even for a moment.
//!
//! **What is prepared.** At opening every op of every Program is resolved to functions, addresses and grids, so that a
//! step costs the host a few calls an op. Updates that follow each other share launches; this changes no bit, since
//! each element is updated by itself. Sums of squares do not: their order would depend on who looks.
//!
//! **Rooms.** `open`: how a GPU is opened, and what it holds beside the arena. `frame`: where operands stand. `warm_up`: what
//! is loaded and started once before a step, and when a plan is gone over to. `prepare`: from Programs to steps. Here:
//! the device itself, and what puts steps on queues.
//!
//! [`STAGING_BYTES`]: super::staging::STAGING_BYTES

mod frame;
mod open;
mod prepare;
mod warm_up;

pub use open::{Charges, Opened, Opening, charges, open};

use super::collectives::ROUND_BYTES;
use super::compile::Compiler;
use super::driver::CudaError;
use super::kernels::Real;
use super::machine::Machine;
use super::nccl::{self, Nccl, SCRATCH_BYTES};
use super::products::Products;
use crate::cpu::executor::{RunOp, Site, runner};
use crate::cpu::pool::Pool;
use crate::device::{Call, Device, DeviceError, FileSpace, Memory, Observer, Room, Unseen};
use crate::probe;
use crate::spaces::Arenas;
use crate::transport::{self, Seat};
use frame::{Frame, Plan};
use plimsoll_core::{Algorithms, Bytes, CollectivesBy, DType, Space};
use plimsoll_program::op::Queue;
use plimsoll_program::{Op, OpKind, Placement, Program, ProgramSet, TensorId};
use prepare::{Place, Prepared, Step, Work};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::sync::Arc;
use warm_up::{Kernels, Started};

/// How messages call this device.
const DEVICE: &str = "a single gpu";

/// Arguments that a kernel has at most.
const ARGUMENTS: usize = 32;

/// A GPU with the Programs of a run. Fields are dropped in order, and what uses memory goes before it.
struct CudaDevice {
    /// Its part in the team's exchanges, where they go by NCCL.
    nccl: Option<Nccl>,
    /// By Program and, where it matters, micro-batch.
    prepared: BTreeMap<(usize, u32), Arc<Prepared>>,
    products: Products,
    kernels: Kernels,
    plan: Arc<Plan>,
    machine: Machine,
    /// For ops of the host's processor, where there are any.
    pool: Option<Pool>,
    threads: usize,
    compiler: Arc<Compiler>,
    charges: Charges,
    started: Started,
    /// Its place in a team.
    seat: Option<Seat>,
    /// NCCL, where it is here.
    library: Option<Arc<nccl::Library>>,
    /// Whether what passes between the ops of a Program is lost: then none goes on in its middle.
    torn: bool,
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Modules and libraries go only when nothing runs in them, and from a context that is current.
        let _ = self.machine.context.enter();
        // What waits for other ranks on the device ends with this.
        self.nccl = None;
        let _ = self.machine.context.synchronize();
    }
}

impl CudaDevice {
    fn frame(&self, variable: i64, micro_batch: u32) -> Frame<'_> {
        let (plan, base) = (&*self.plan, self.machine.base());
        Frame { plan, placement: &plan.placement, base, variable, micro_batch: i64::from(micro_batch) }
    }

    /// Puts a piece of work on a queue, or does it, where it is the host's. What has no stream goes where everything
    /// joins.
    fn start(
        &mut self,
        work: &Work,
        queue: Queue,
        micro_batch: u32,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        let queues = &self.machine.queues;
        let stream = queues.stream(queue).unwrap_or_else(|| queues.compute());
        // SAFETY (of all that is started here and in `copy`): addresses are ranges of the arenas as the plan has them,
        // whose tensors are as large as their ops say (`passes::check`); what is at work at the same time touches other
        // ranges, because steps wait for each other as hazards demand; the host waits for what it touches itself.
        match work {
            Work::Kernel(function, launch) => {
                let mut pointers = [std::ptr::null::<c_void>(); ARGUMENTS];
                for (pointer, argument) in pointers.iter_mut().zip(&launch.arguments) {
                    *pointer = argument.pointer();
                }
                let pointers = &pointers[..launch.arguments.len()];
                // SAFETY: as above; arguments are in the order of the kernel's signature (tested against its source).
                unsafe { stream.launch(*function, launch.grid, launch.block, launch.shared_bytes, pointers) }?;
            }
            // SAFETY: as above.
            Work::Product(shape, operands) => unsafe { self.products.run(shape, operands, stream) }?,
            Work::OnHost { op, variable } => {
                let Plan { set, placement, real } = &*self.plan;
                let (spaces, micro_batch) = (self.machine.spaces(), i64::from(micro_batch));
                let site = |pool| Site { spaces, pool, set, placement, variable: *variable, micro_batch };
                let (seat, nobody) = (self.seat.as_ref(), Pool::new(1)?);
                match &op.kind {
                    OpKind::CollectiveStart(message) => {
                        transport::exchange(site(&nobody), seat, message, 0.0, 0.0)?;
                    }
                    OpKind::CollectiveWait(message) => {
                        transport::ended(site(&nobody), seat, message, 0.0)?;
                    }
                    _ => {
                        let pool = self.pool.as_ref().expect("there is a pool where there are ops of the host");
                        let run: RunOp = runner(if *real == Real::Bf16 { DType::Bf16 } else { DType::F32 });
                        pool.enter(|| run(site(pool), op, files))?;
                    }
                }
            }
            Work::Copy { from, to, bytes } => self.copy(*from, *to, *bytes, queue, files)?,
            Work::Collective(ready) => {
                let alone = DeviceError::Unsupported { op: "a collective", device: "a device without a team" };
                let seat = self.seat.as_ref().ok_or(alone)?;
                // SAFETY: as above.
                unsafe { ready.meet(seat, self.nccl.as_mut(), stream, &mut self.machine.staging, files) }?;
            }
        }
        Ok(())
    }

    /// Puts a step on its queue whose turn has come.
    fn go_on_with(&mut self, off: &PutOff, micro_batch: u32, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.machine.queues.pass_gate(off.gate)?;
        if off.runs {
            if let (true, Some(stream)) =
                (off.step.works.iter().any(Work::is_done_by_host), self.machine.queues.stream(off.step.queue))
            {
                stream.synchronize()?;
            }
            for work in &off.step.works {
                self.start(work, off.step.queue, micro_batch, files)?;
            }
        }
        Ok(off.step.gives.map_or(Ok(()), |event| self.machine.queues.signal(off.step.queue, event))?)
    }

    /// Puts a copy on a queue, or does it, where the device has no part in it.
    fn copy(
        &mut self,
        from: Place,
        to: Place,
        bytes: u64,
        queue: Queue,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        let host = self.machine.host();
        let Machine { queues, staging, .. } = &mut self.machine;
        let stream = queues.stream(queue).unwrap_or_else(|| queues.compute());
        let name = |tensor: TensorId| &self.plan.set.tensor(tensor).name;
        let failed = |tensor| move |source| DeviceError::File { tensor: name(tensor).clone(), source };
        if matches!(from, Place::File(..)) {
            // It may be read from where something was written just now.
            staging.flush(files)?;
        }
        match (from, to) {
            // SAFETY: see `start`.
            (Place::Device(from), Place::Device(to)) => unsafe { stream.copy(to, from, bytes) }?,
            // SAFETY: see `start`.
            (Place::Host(from), Place::Device(to)) => unsafe { stream.copy_in(to, host.at(from, bytes), bytes) }?,
            // SAFETY: see `start`.
            (Place::Device(from), Place::Host(to)) => unsafe { stream.copy_out(host.at(to, bytes), from, bytes) }?,
            (Place::File(tensor, first), Place::Device(to)) => {
                let give = |files: &mut dyn FileSpace, offset: u64, part: &mut [u8]| {
                    files.read(name(tensor), first + offset, part).map_err(failed(tensor))
                };
                // SAFETY: see `start`.
                unsafe { staging.send(stream, to, bytes, files, give) }?;
            }
            (Place::Device(from), Place::File(tensor, first)) => {
                // SAFETY: see `start`.
                unsafe { staging.receive_into_file(stream, from, bytes, name(tensor), first, files) }?;
            }
            (Place::File(tensor, first), Place::Host(to)) => {
                // SAFETY: see `start`; the range was waited for.
                let into = unsafe { std::slice::from_raw_parts_mut(host.at(to, bytes), bytes as usize) };
                files.read(name(tensor), first, into).map_err(failed(tensor))?;
            }
            (Place::Host(from), Place::File(tensor, first)) => {
                // SAFETY: see `start`; the range was waited for.
                let from = unsafe { std::slice::from_raw_parts(host.at(from, bytes), bytes as usize) };
                files.write(name(tensor), first, from).map_err(failed(tensor))?;
            }
            // SAFETY: see `start`; both ranges were waited for.
            (Place::Host(from), Place::Host(to)) => unsafe {
                std::ptr::copy(host.at(from, bytes), host.at(to, bytes), bytes as usize);
            },
            (Place::File(..), Place::File(..)) => {
                return Err(DeviceError::Unsupported { op: "copy of a file", device: DEVICE });
            }
        }
        Ok(())
    }

    /// What a step waits for: its queue, or, where the host does the work, the host.
    fn wait_before(&self, step: &Step) -> Result<(), CudaError> {
        let queues = &self.machine.queues;
        let by_host = step.works.iter().any(Work::is_done_by_host);
        let waiting = if by_host { Queue::Host } else { step.queue };
        step.awaits.iter().try_for_each(|event| queues.wait(waiting, *event))?;
        match queues.stream(step.queue) {
            Some(stream) if by_host => stream.synchronize(),
            _ => Ok(()),
        }
    }

    /// Ops of a Program from `call.from` on, as steps. Where the observer refuses an op, everything before it is
    /// started, and nothing after.
    fn run_steps(
        &mut self,
        prepared: &Prepared,
        program: &Program,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        if prepared.forks {
            self.machine.queues.fork()?;
        }
        if prepared.on_host {
            self.machine.queues.compute().synchronize()?;
        }
        let mut put_off = VecDeque::new();
        let timed = self.seat.is_some();
        if timed {
            self.machine.queues.computes()?;
        }
        let started = self.start_steps(prepared, program, call, files, observer, &mut put_off);
        if timed {
            self.machine.queues.stands_still()?;
        }
        let met = put_off.iter().try_for_each(|off| self.go_on_with(off, call.micro_batch, files));
        started.and(met)?;
        if prepared.forks {
            self.machine.queues.join()?;
        }
        Ok(())
    }

    /// Puts steps on queues, or off, where others have to come for them.
    fn start_steps<'a>(
        &mut self,
        prepared: &'a Prepared,
        program: &Program,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
        put_off: &mut VecDeque<PutOff<'a>>,
    ) -> Result<(), DeviceError> {
        let mut gate = 0;
        let mut trace = (1..).zip(program.trace());
        let mut members: Vec<(u32, &Op, i64)> = Vec::new();
        for step in &prepared.steps {
            members.clear();
            members.extend(trace.by_ref().take(step.count as usize).map(|(tick, (op, variable))| (tick, op, variable)));
            members.retain(|(tick, ..)| *tick >= call.from);
            if members.is_empty() {
                continue;
            }
            let runs = members[0].1.runs(call.last);
            if step.queue == Queue::Communication && !runs {
                // What comes later may rely on what it waits for.
                self.put_off(step, &mut gate, false, put_off)?;
                continue;
            }
            let mut refused = None;
            for (index, &(tick, op, _)) in members.iter().enumerate() {
                if let Err(error) = observer.before(tick, op, &mut Unseen) {
                    refused = Some(error);
                    members.truncate(index);
                    break;
                }
            }
            if members.is_empty() {
                return refused.map_or(Ok(()), Err);
            }
            // What they wait for has to be on its queue.
            let awaited = |off: &PutOff| off.step.gives.is_some_and(|event| step.awaits.contains(&event));
            let for_others = put_off.iter().any(awaited);
            let waits = for_others || step.queue == Queue::Compute && !step.awaits.is_empty();
            let timed = waits && self.seat.is_some();
            if timed {
                self.machine.queues.stands_still()?;
            }
            while put_off.iter().any(awaited) {
                let first = put_off.pop_front().expect("there is one that is awaited");
                self.go_on_with(&first, call.micro_batch, files)?;
            }
            if step.queue == Queue::Communication {
                if timed {
                    self.machine.queues.computes()?;
                }
                self.put_off(step, &mut gate, true, put_off)?;
                members.iter().for_each(|&(tick, op, _)| observer.after(tick, op, &mut Unseen));
                continue;
            }
            self.wait_before(step)?;
            if timed {
                self.machine.queues.computes()?;
            }
            if members.len() == step.count as usize {
                for work in &step.works {
                    self.start(work, step.queue, call.micro_batch, files)?;
                }
            } else {
                // A part of a group, op by op: the same bits.
                for &(_, op, variable) in &members {
                    for work in self.works(&self.frame(variable, call.micro_batch), op)? {
                        self.start(&work, step.queue, call.micro_batch, files)?;
                    }
                }
            }
            if let Some(event) = step.gives {
                self.machine.queues.signal(step.queue, event)?;
            }
            members.iter().for_each(|&(tick, op, _)| observer.after(tick, op, &mut Unseen));
            if let Some(error) = refused {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Puts a step off: what it waits for is what has been put on queues so far.
    fn put_off<'a>(
        &mut self,
        step: &'a Step,
        gate: &mut usize,
        runs: bool,
        put_off: &mut VecDeque<PutOff<'a>>,
    ) -> Result<(), CudaError> {
        self.machine.queues.close_gate(*gate, &step.awaits)?;
        put_off.push_back(PutOff { step, gate: *gate, runs });
        *gate += 1;
        Ok(())
    }

    /// Ops of a Program from `call.from` on, each over before the next begins, all on one queue.
    fn run_singly(
        &mut self,
        program: &Program,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        self.machine.context.synchronize()?;
        let trace = (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.from);
        for (tick, (op, variable)) in trace.filter(|(_, (op, _))| op.runs(call.last)) {
            observer.before(tick, op, &mut self.machine)?;
            let works = self.works(&self.frame(variable, call.micro_batch), op)?;
            if works.iter().any(Work::is_done_by_host) {
                self.machine.context.synchronize()?;
            }
            for work in &works {
                self.start(work, Queue::Compute, call.micro_batch, files)?;
            }
            self.machine.context.finish(op.name())?;
            self.machine.staging.flush(files)?;
            self.machine.check()?;
            observer.after(tick, op, &mut self.machine);
        }
        Ok(())
    }
}

/// A step of the queue of communication, until its turn comes.
struct PutOff<'a> {
    step: &'a Step,
    /// Which gate it has to pass.
    gate: usize,
    /// Whether it does something in this call.
    runs: bool,
}

impl Device for CudaDevice {
    fn run_observed(
        &mut self,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        self.machine.check()?;
        self.machine.context.enter()?;
        self.torn &= call.from > 1;
        if self.torn {
            return Err(CudaError::Memory { what: "go on in the middle of a program".into() }.into());
        }
        let missing = || DeviceError::NoProgram { program: call.program.to_owned() };
        let index = self.plan.set.program_index(call.program).ok_or_else(missing)?;
        let prepared = self.prepared(index, call.micro_batch)?;
        self.machine.scratch_end = self.machine.scratch_end.max(prepared.scratch_end);
        let (plan, seat) = (self.plan.clone(), self.seat.clone());
        let program = &plan.set.programs[index];
        let done = transport::seated(seat.as_ref(), || match observer.one_at_a_time() {
            true => self.run_singly(program, call, files, observer),
            false => self.run_steps(&prepared, program, call, files, observer),
        });
        let Err(error) = done else {
            self.machine.staging.flush(files)?;
            return Ok(());
        };
        // What was started ends before anybody hears of it. What a refused op's predecessors gave to files is written,
        // unless files are what failed.
        self.machine.context.synchronize()?;
        if matches!(error, DeviceError::File { .. }) {
            self.machine.staging.forget();
        } else {
            self.machine.staging.flush(files)?;
        }
        Err(error)
    }

    /// A transport that does not go in rounds which staging holds cannot have its bytes.
    fn join(&mut self, seat: Seat) -> Result<(), DeviceError> {
        if seat.transport.round_bytes().is_none_or(|bytes| bytes > ROUND_BYTES) {
            return Err(DeviceError::NoTeam { device: "a GPU whose bytes go through staging" });
        }
        self.machine.context.enter()?;
        let library = self.library.as_ref().filter(|_| seat.nccl);
        self.nccl = library.map(|library| Nccl::new(library, &self.compiler, &self.machine.context, SCRATCH_BYTES));
        self.machine.join(seat.clone());
        self.seat = Some(seat);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        self.machine.check()?;
        self.machine.context.enter()?;
        Ok(self.machine.context.synchronize()?)
    }

    fn collectives(&self) -> Option<CollectivesBy> {
        self.nccl.as_ref()?.used()
    }

    /// By the GPU's own clock, of Programs that were run in a team.
    fn computed(&mut self) -> Option<f64> {
        self.machine.context.enter().and_then(|()| self.machine.queues.computed()).ok()
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        let (known, first) = (self.plan.set.tensor(tensor), self.plan.placement.offset(tensor, slot));
        assert!(bytes.len() as u64 <= known.bytes(), "{} is smaller", known.name);
        let written = self.machine.write(known.space, first, bytes);
        self.machine.keep(written);
    }

    /// A device that is lost gives NaN; [`Device::settle`] and the next Program say that it is lost.
    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        let (known, first) = (self.plan.set.tensor(tensor), self.plan.placement.offset(tensor, slot));
        assert!(bytes.len() as u64 <= known.bytes(), "{} is smaller", known.name);
        let read = self.machine.read(known.space, first, bytes);
        if self.machine.keep(read).is_none() {
            bytes.fill(0xff);
        }
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        self.machine.check()?;
        self.machine.context.enter()?;
        self.machine.context.synchronize()?;
        self.seat.iter().for_each(Seat::withdraw);
        // The next team may be another one, or none.
        self.nccl.iter_mut().for_each(Nccl::close);
        let before = self.machine.bytes(Space::Device).0;
        // Addresses of the new plan need not lie in the arena as it is.
        if placement.arena_bytes > before {
            self.machine.resize(Space::Device, placement.arena_bytes, before)?;
        }
        let real = self.plan.real;
        let old = std::mem::replace(&mut self.plan, Arc::new(Plan { set, placement, real }));
        let old_prepared = std::mem::take(&mut self.prepared);
        let done = self.go_over_from(&old);
        if done.is_err() {
            (self.plan, self.prepared) = (old, old_prepared);
            self.machine.resize(Space::Device, before, before)?;
        }
        done
    }

    fn algorithms(&self) -> Option<Algorithms> {
        Some(self.products.algorithms().0)
    }

    /// As the driver says it, others' programs included; what is held is counted, not asked for.
    fn room(&mut self) -> Option<Room> {
        let context = &self.machine.context;
        let (free, total) = context.enter().and_then(|()| context.memory()).ok()?;
        let bound_by = format!("cuda:{}", context.gpu().ordinal);
        let nccl = self.nccl.as_ref().map_or(Bytes::ZERO, Nccl::held);
        let held = self.machine.held() + self.charges.context + self.charges.libraries + nccl;
        Some(Room { memory: probe::Memory { total, free, bound_by }, held })
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.machine
    }
}
