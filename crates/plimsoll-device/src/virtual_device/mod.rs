//! A *virtual* device: a part of this processor that behaves like an accelerator, with a budget, an arena, a host side,
//! a link to it and a pace of its own. Everything that it does really happens, in its own memory and in the order that
//! the plan demands, and takes the time that the device that is played would take. What is printed about it says
//! "simulated".
//!
//! ```text
//!              ┌─ compute    the caller and the pool: ops, each paced by its price
//!   Program ───┼─ copy in    a thread: host arena → device arena, at the pace of the link
//!   (in order) ├─ copy out   a thread: device arena → host arena
//!              ├─ host       a thread: ops of the host's processor, as fast as they go
//!              ├─ file read  a thread: scratch file → host arena, as fast as the disk is
//!              └─ file write a thread: host arena → scratch file
//! ```
//! What waits for what is derived from hazards on arena ranges (`plimsoll_program::order`); how the queues run is in
//! `queues`, how time is kept in `clock`. What the ops compute is the CPU executor's business, bit for bit.

mod clock;
mod queues;
#[cfg(test)]
mod tests;

use crate::arena::ArenaError;
use crate::cpu::executor::{RunOp, runner};
use crate::cpu::pool::Pool;
use crate::device::{Call, Device, DeviceError, FileSpace, Memory, Observer};
use crate::spaces::Spaces;
use crate::transport::{self, Seat};
use clock::Clock;
use plimsoll_core::{Bytes, DType, Link, Space};
use plimsoll_program::op::Queue;
use plimsoll_program::order::{Wait, waits};
use plimsoll_program::{Op, OpKind, Placement, Program, ProgramSet, TensorId};
use std::path::PathBuf;
use std::time::Instant;

/// Predicted seconds of an op at the device's pace.
pub type Price = Box<dyn Fn(&ProgramSet, &Op) -> f64 + Send>;

/// What the device is that is played.
pub struct Virtual {
    /// As in run files: `virtual:a`.
    pub name: String,
    /// The largest arena that it gives.
    pub arena_budget: Bytes,
    /// Threads that compute.
    pub threads: usize,
    /// What ops take, but for copies and what the host does.
    pub price: Price,
    /// To and from the host, each way by itself.
    pub link: Link,
    /// Where its scratch file is, where it may have one.
    pub scratch: Option<PathBuf>,
}

/// Opens a virtual device: takes its arena and its host side's, whole and at once.
///
/// # Errors
/// [`DeviceError::Arena`] where the plan is larger than the device, or the machine does not give that much.
///
/// # Panics
/// For a precision that the CPU does not compute in.
pub fn open(
    what: Virtual,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
) -> Result<Box<dyn Device>, DeviceError> {
    Ok(Box::new(VirtualDevice::open(what, set, placement, precision)?))
}

struct VirtualDevice {
    what: Virtual,
    spaces: Spaces,
    pool: Pool,
    /// What the other queues compute with: their own thread alone.
    single: Pool,
    run: RunOp,
    set: ProgramSet,
    placement: Placement,
    /// By the number of the Program.
    programs: Vec<Prepared>,
    clock: Clock,
    /// Its place in a team.
    seat: Option<Seat>,
    /// Seconds in which it has computed.
    computed: f64,
    /// What it computes takes so many times its price.
    slower: f64,
}

/// What the device knows of a Program before it runs.
#[derive(Debug)]
struct Prepared {
    /// Which op waits for which, ascending.
    waits: Vec<Wait>,
    /// What each op takes, by block and by its place in it.
    takes: Vec<Vec<Takes>>,
    /// The queues that it uses.
    queues: Vec<Queue>,
}

/// What an op takes on the device that is played.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Takes {
    /// Before it touches memory.
    latency_seconds: f64,
    /// From then on.
    seconds: f64,
}

impl Takes {
    /// The same of an op that the device computes, where that takes so many times as long.
    fn slower(self, op: &Op, factor: f64) -> Takes {
        let factor = if op.queue == Queue::Compute { factor } else { 1.0 };
        Takes { seconds: self.seconds * factor, ..self }
    }
}

/// What the ops that the device computes took.
#[derive(Clone, Copy, Debug, Default)]
struct Computed {
    /// As it is played.
    played: f64,
    /// On this processor.
    real: f64,
}

impl Computed {
    /// An op was done that takes so long and was begun then.
    fn add(&mut self, op: &Op, takes: Takes, begun: Instant) {
        if op.queue == Queue::Compute {
            self.played += takes.seconds;
            self.real += begun.elapsed().as_secs_f64();
        }
    }

    /// Seconds of all together: whoever falls behind its pace does so over a Program, not in single ops.
    fn seconds(self) -> f64 {
        self.played.max(self.real)
    }
}

impl Prepared {
    fn new(what: &Virtual, set: &ProgramSet, placement: &Placement, program: &Program) -> Prepared {
        let mut queues: Vec<Queue> =
            program.blocks.iter().flat_map(|block| block.ops.iter().map(|op| op.queue)).collect();
        queues.sort_unstable();
        queues.dedup();
        let takes = program.blocks.iter().map(|block| block.ops.iter().map(|op| takes(what, set, op)).collect());
        let takes = takes.collect();
        let waits = if queues.len() > 1 { waits(set, program, placement) } else { Vec::new() };
        Prepared { waits, takes, queues }
    }

    /// What the ops of a Program take, in the order of its trace.
    fn taken(&self, program: &Program) -> impl Iterator<Item = Takes> {
        let blocks = program.blocks.iter().zip(&self.takes);
        blocks.flat_map(|(block, takes)| (0..block.repeat).flat_map(move |_| takes.iter().copied()))
    }
}

fn takes(what: &Virtual, set: &ProgramSet, op: &Op) -> Takes {
    match &op.kind {
        // The disk is this machine's, too.
        _ if matches!(op.queue, Queue::FileRead | Queue::FileWrite) => Takes::default(),
        OpKind::TransferStart { from, elements, .. } => {
            let bytes = elements * set.tensor(from.tensor).dtype.bytes();
            Takes { latency_seconds: what.link.latency_seconds, seconds: bytes as f64 / what.link.bytes_per_second }
        }
        // What is awaited has its time where it is done.
        OpKind::TransferWait { .. } | OpKind::CollectiveWait(_) => Takes::default(),
        // The host is this machine's processor, which is not played.
        _ if op.queue == Queue::Host => Takes::default(),
        _ => Takes { latency_seconds: 0.0, seconds: (what.price)(set, op) },
    }
}

impl VirtualDevice {
    fn open(
        what: Virtual,
        set: ProgramSet,
        placement: Placement,
        precision: DType,
    ) -> Result<VirtualDevice, DeviceError> {
        within(&what, &placement)?;
        let (pool, single) = (Pool::new(what.threads)?, Pool::new(1)?);
        let spaces = Spaces::map(&placement, what.scratch.as_deref())?;
        let programs = prepare(&what, &set, &placement);
        let clock = Clock::start();
        let run = runner(precision);
        let (seat, computed, slower) = (None, 0.0, 1.0);
        Ok(VirtualDevice { what, spaces, pool, single, run, set, placement, programs, clock, seat, computed, slower })
    }
}

fn prepare(what: &Virtual, set: &ProgramSet, placement: &Placement) -> Vec<Prepared> {
    set.programs.iter().map(|program| Prepared::new(what, set, placement, program)).collect()
}

/// That an arena is not larger than the device.
fn within(what: &Virtual, placement: &Placement) -> Result<(), ArenaError> {
    let asked = Bytes(placement.arena_bytes);
    if asked <= what.arena_budget {
        return Ok(());
    }
    let bound_by = format!("what {} has under its load line, simulated", what.name);
    Err(ArenaError::Refused { asked, available: what.arena_budget, bound_by })
}

impl Device for VirtualDevice {
    fn run_observed(
        &mut self,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let seat = self.seat.clone();
        transport::seated(seat.as_ref(), || {
            let missing = || DeviceError::NoProgram { program: call.program.to_owned() };
            let number = self.set.program_index(call.program).ok_or_else(missing)?;
            if observer.one_at_a_time() || self.programs[number].queues.len() == 1 {
                self.run_in_turn(number, call, files, observer)
            } else {
                self.run_queues(number, call, files, observer)
            }
        })
    }

    fn join(&mut self, seat: Seat) -> Result<(), DeviceError> {
        self.clock = Clock::of_team(seat.transport.epoch());
        self.spaces.join(seat.clone());
        self.seat = Some(seat);
        Ok(())
    }

    /// As it is played: noise of the machine is no part of it, unless that falls behind.
    fn computed(&mut self) -> Option<f64> {
        Some(self.computed)
    }

    fn slow_down(&mut self, factor: f64) -> bool {
        self.slower = factor;
        true
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.spaces.write(&self.set, &self.placement, tensor, slot, bytes);
    }

    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        self.spaces.read(&self.set, &self.placement, tensor, slot, bytes);
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        within(&self.what, &placement)?;
        let moved = self.spaces.adopt((&self.set, &self.placement), (&set, &placement))?;
        let crossed = (moved.into + moved.out).0 as f64;
        self.clock.take(crossed / self.what.link.bytes_per_second);
        self.programs = prepare(&self.what, &set, &placement);
        (self.set, self.placement) = (set, placement);
        Ok(())
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.spaces
    }
}

/// Whether an op needs the files of the call.
fn needs_files(set: &ProgramSet, op: &Op) -> bool {
    let OpKind::TransferStart { from, to, .. } = &op.kind else { return false };
    [from, to].iter().any(|end| set.tensor(end.tensor).space == Space::File)
}
