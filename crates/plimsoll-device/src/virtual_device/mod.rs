//! A *virtual* device: a simulated accelerator on the CPU, with its own load line, arenas, host link and pace. Its
//! Programs really run, in their own memory and in planned order, and take as long as they would on the simulated
//! device. All output about it says "simulated".
//!
//! ```text
//!              ┌─ compute    the caller and the pool: ops, each paced by its price
//!   Program ───┼─ copy in    a thread: host arena → device arena, at the pace of the link
//!   (in order) ├─ copy out   a thread: device arena → host arena
//!              ├─ host       a thread: ops of the host's processor, as fast as they go
//!              ├─ file read  a thread: scratch file → host arena, as fast as the disk is
//!              └─ file write a thread: host arena → scratch file
//! ```
//! `plimsoll_program::order` derives from hazards on arena ranges which op waits for which. `queues` runs the queues
//! and `clock` keeps the simulated time. The CPU executor computes the ops, so the results are bit-identical to the CPU
//! device.

mod clock;
mod queues;
#[cfg(test)]
mod tests;

use crate::cpu::ops::{RunOp, runner};
use crate::cpu::pool::Pool;
use crate::device::{Device, FileSpace, Memory, Observer, ProgramCall};
use crate::error::ArenaError;
use crate::error::DeviceError;
use crate::spaces::Spaces;
use crate::transport::{self, GroupHandle};
use clock::Clock;
use plimsoll_core::{Bytes, DType, Link, Space};
use plimsoll_program::op::Queue;
use plimsoll_program::order::{Wait, waits};
use plimsoll_program::{Op, OpKind, Placement, Program, ProgramSet, TensorId};
use std::path::PathBuf;
use std::time::Instant;

/// A function that predicts the seconds of an op on the simulated device.
pub type Price = Box<dyn Fn(&ProgramSet, &Op) -> f64 + Send>;

/// The properties of the simulated device.
pub struct VirtualDeviceSpec {
    /// Name in run files, such as `virtual:a`.
    pub name: String,
    /// Load line: the largest device arena that the device accepts.
    pub arena_budget: Bytes,
    /// Number of CPU threads that compute the device's ops.
    pub threads: usize,
    /// Prediction of the time that compute ops and collectives take. Other ops do not use it: copies take the time of
    /// `link`, and ops of the host and of files take their real time.
    pub price: Price,
    /// Speed of copies between device and host; both directions have this speed at the same time.
    pub link: Link,
    /// Folder of the scratch file. None if the device has no scratch file.
    pub scratch_folder: Option<PathBuf>,
}

/// Opens a virtual device and allocates its device and host arenas.
///
/// # Errors
/// [`DeviceError::Arena`] if the plan exceeds the device's load line, or the machine lacks the memory. Fails also if
/// threads or the scratch file are refused.
///
/// # Panics
/// For a precision that the CPU does not compute in.
pub fn open(
    spec: VirtualDeviceSpec,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
) -> Result<Box<dyn Device>, DeviceError> {
    Ok(Box::new(VirtualDevice::open(spec, set, placement, precision)?))
}

struct VirtualDevice {
    spec: VirtualDeviceSpec,
    spaces: Spaces,
    pool: Pool,
    /// Pool of one thread, with which ops of all queues but the compute queue run.
    single_thread_pool: Pool,
    run: RunOp,
    set: ProgramSet,
    placement: Placement,
    /// Prepared data of each Program, by the Program's index in `set`.
    programs: Vec<PreparedProgram>,
    clock: Clock,
    /// Membership in a communication group. None before the device joins one.
    group: Option<GroupHandle>,
    /// Simulated seconds spent on compute ops since the device was opened.
    compute_seconds: f64,
    /// Factor on the time of compute ops, set by fault injection.
    compute_slowdown: f64,
}

/// Data about a Program that is derived before it runs.
#[derive(Debug)]
struct PreparedProgram {
    /// Pairs of ops of which one waits for the other, in ascending order of the waiting op; empty if the Program uses a
    /// single queue.
    waits: Vec<Wait>,
    /// Simulated time of each op, by block and index in the block.
    op_times: Vec<Vec<OpTime>>,
    /// Queues that the Program uses.
    queues: Vec<Queue>,
}

/// Time that an op takes on the simulated device, without any slowdown; zero for ops that take their real time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct OpTime {
    /// Seconds before the op accesses memory: the latency of the link for copies, zero for other ops.
    latency_seconds: f64,
    /// Seconds from that moment to the end of the op.
    seconds: f64,
}

impl OpTime {
    /// Returns the time of `op`, with `seconds` multiplied by `factor` if it is a compute op.
    fn slowed_down(self, op: &Op, factor: f64) -> OpTime {
        let factor = if op.queue == Queue::Compute { factor } else { 1.0 };
        OpTime { seconds: self.seconds * factor, ..self }
    }
}

/// Total time of the compute ops that have run during one call of a Program.
#[derive(Clone, Copy, Debug, Default)]
struct ComputeTime {
    /// Simulated seconds.
    simulated: f64,
    /// Seconds that the ops really took on this processor.
    real: f64,
}

impl ComputeTime {
    /// Adds the time of an op that started at `started` and has just ended. Ignores ops of other queues than compute.
    fn add(&mut self, op: &Op, op_time: OpTime, started: Instant) {
        if op.queue == Queue::Compute {
            self.simulated += op_time.seconds;
            self.real += started.elapsed().as_secs_f64();
        }
    }

    /// Returns the larger of simulated and real seconds. Totals are compared, because an op that was slower than
    /// simulated can be made up for by later ops.
    fn seconds(self) -> f64 {
        self.simulated.max(self.real)
    }
}

impl PreparedProgram {
    fn new(spec: &VirtualDeviceSpec, set: &ProgramSet, placement: &Placement, program: &Program) -> PreparedProgram {
        let mut queues: Vec<Queue> =
            program.blocks.iter().flat_map(|block| block.ops.iter().map(|op| op.queue)).collect();
        queues.sort_unstable();
        queues.dedup();
        let op_times = program.blocks.iter().map(|block| block.ops.iter().map(|op| op_time(spec, set, op)).collect());
        let op_times = op_times.collect();
        let waits = if queues.len() > 1 { waits(set, program, placement) } else { Vec::new() };
        PreparedProgram { waits, op_times, queues }
    }

    /// Returns the times of a Program's ops in execution order.
    fn op_times_in_order(&self, program: &Program) -> impl Iterator<Item = OpTime> {
        let blocks = program.blocks.iter().zip(&self.op_times);
        blocks.flat_map(|(block, op_times)| (0..block.repeat).flat_map(move |_| op_times.iter().copied()))
    }
}

fn op_time(spec: &VirtualDeviceSpec, set: &ProgramSet, op: &Op) -> OpTime {
    match &op.kind {
        // The disk is real, so its ops are not paced.
        _ if matches!(op.queue, Queue::FileRead | Queue::FileWrite) => OpTime::default(),
        OpKind::TransferStart { from, elements, .. } => {
            let bytes = elements * set.tensor(from.tensor).dtype.bytes();
            OpTime { latency_seconds: spec.link.latency_seconds, seconds: bytes as f64 / spec.link.bytes_per_second }
        }
        // A wait costs nothing itself; the time belongs to the op it waits for.
        OpKind::TransferWait { .. } | OpKind::CollectiveWait(_) => OpTime::default(),
        // The host is the real processor, so its ops are not paced.
        _ if op.queue == Queue::Host => OpTime::default(),
        _ => OpTime { latency_seconds: 0.0, seconds: (spec.price)(set, op) },
    }
}

impl VirtualDevice {
    fn open(
        spec: VirtualDeviceSpec,
        set: ProgramSet,
        placement: Placement,
        precision: DType,
    ) -> Result<VirtualDevice, DeviceError> {
        check_arena_size(&spec, &placement)?;
        let (pool, single_thread_pool) = (Pool::new(spec.threads)?, Pool::new(1)?);
        let spaces = Spaces::map(&placement, spec.scratch_folder.as_deref())?;
        let programs = prepare(&spec, &set, &placement);
        let clock = Clock::start();
        let run = runner(precision);
        let (group, compute_seconds, compute_slowdown) = (None, 0.0, 1.0);
        Ok(VirtualDevice {
            spec,
            spaces,
            pool,
            single_thread_pool,
            run,
            set,
            placement,
            programs,
            clock,
            group,
            compute_seconds,
            compute_slowdown,
        })
    }
}

fn prepare(spec: &VirtualDeviceSpec, set: &ProgramSet, placement: &Placement) -> Vec<PreparedProgram> {
    set.programs.iter().map(|program| PreparedProgram::new(spec, set, placement, program)).collect()
}

/// Checks that a plan's arena does not exceed the device's load line.
fn check_arena_size(spec: &VirtualDeviceSpec, placement: &Placement) -> Result<(), ArenaError> {
    let requested = Bytes(placement.arena_bytes);
    if requested <= spec.arena_budget {
        return Ok(());
    }
    let bound_by = format!("load line of {}, simulated", spec.name);
    Err(ArenaError::OutOfMemory { requested, available: spec.arena_budget, bound_by })
}

impl Device for VirtualDevice {
    fn run_observed(
        &mut self,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let group = self.group.clone();
        transport::abort_group_on_failure(group.as_ref(), || {
            let missing = || DeviceError::UnknownProgram { program: call.program.to_string() };
            let number = self.set.program_index(call.program).ok_or_else(missing)?;
            if observer.serializes_ops() || self.programs[number].queues.len() == 1 {
                self.run_serialized(number, call, files, observer)
            } else {
                self.run_queues(number, call, files, observer)
            }
        })
    }

    fn join_group(&mut self, group: GroupHandle) -> Result<(), DeviceError> {
        self.clock = Clock::with_epoch(group.transport.epoch());
        self.spaces.join_group(group.clone());
        self.group = Some(group);
        Ok(())
    }

    /// Returns the simulated seconds spent on compute ops since the device was opened. For a Program whose compute ops
    /// really took longer, the real seconds count.
    fn compute_seconds(&mut self) -> Option<f64> {
        Some(self.compute_seconds)
    }

    fn set_compute_slowdown(&mut self, factor: f64) -> bool {
        self.compute_slowdown = factor;
        true
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.spaces.write(&self.set, &self.placement, tensor, slot, bytes);
    }

    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        self.read_from(tensor, slot, 0, bytes);
    }

    fn read_from(&mut self, tensor: TensorId, slot: u32, from: u64, bytes: &mut [u8]) {
        self.spaces.read(&self.set, &self.placement, tensor, slot, from, bytes);
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        check_arena_size(&self.spec, &placement)?;
        let moved = self.spaces.adopt((&self.set, &self.placement), (&set, &placement))?;
        let crossed = (moved.to_device + moved.to_host).0 as f64;
        self.clock.spend(crossed / self.spec.link.bytes_per_second);
        self.programs = prepare(&self.spec, &set, &placement);
        (self.set, self.placement) = (set, placement);
        Ok(())
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.spaces
    }
}

/// Whether an op copies from or to a tensor in a file of the run ([`Space::File`]).
fn needs_files(set: &ProgramSet, op: &Op) -> bool {
    let OpKind::TransferStart { from, to, .. } = &op.kind else { return false };
    [from, to].iter().any(|end| set.tensor(end.tensor).space == Space::File)
}
