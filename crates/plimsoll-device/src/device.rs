//! The [`Device`] trait: everything a run needs from a device. CPU, virtual, CUDA and remote devices implement it, and
//! one test body runs on all of them.
//!
//! This module also holds the types around it: the arenas as seen by tests and tools ([`Memory`]), file access
//! ([`FileSpace`]) and hooks around ops ([`Observer`]). Errors are in [`crate::error`].

use crate::error::DeviceError;
use crate::transport::GroupHandle;
use crate::{probe, process};
use plimsoll_core::{Bytes, CollectiveBackend, GemmAlgorithms, Space};
use plimsoll_program::{Op, Placement, ProgramKind, ProgramSet, TensorId};
use std::borrow::Cow;
use std::io;
use std::ops::Range;

/// Sizes of a device's arenas and scratch file, with the measured high-water mark of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Size of the device arena.
    pub arena_bytes: Bytes,
    /// Offset just past the highest byte written in the device arena, as measured.
    pub arena_measured_bytes: Bytes,
    /// Size of the host arena.
    pub host_bytes: Bytes,
    /// Offset just past the highest byte written in the host arena, as measured.
    pub host_measured_bytes: Bytes,
    /// Size of the scratch file.
    pub file_bytes: Bytes,
    /// Offset just past the highest byte written in the scratch file, as measured.
    pub file_measured_bytes: Bytes,
}

/// State of the memory that holds a device's arena, at one moment. A run polls it to notice memory pressure from other
/// processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Total and free bytes of the memory that holds the device's arena.
    pub memory: probe::Memory,
    /// Bytes of that memory that this run holds, including bytes outside the arena (charges).
    pub held_bytes: Bytes,
}

/// Access to a device's arenas from outside, while no op runs.
///
/// `space` is [`Space::Device`], [`Space::Host`] or [`Space::Scratch`]. Ranges count from the first byte of that arena
/// or file.
pub trait Memory {
    /// Returns the size of the arena, or of the scratch file.
    fn bytes(&self, space: Space) -> Bytes;

    /// Returns bytes `range` of an arena or of the scratch file: borrowed if this processor can address them, otherwise
    /// a copy.
    fn view(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]>;

    /// Copies `bytes` into an arena or the scratch file, from byte `first` on.
    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]);

    /// Overwrites a range of an arena with bytes that are NaN in every float type. A tensor that is read after its last
    /// planned use then spoils the results visibly. Does nothing for the scratch file, whose tensors stay in use for
    /// the whole run.
    fn poison(&mut self, space: Space, range: Range<u64>);

    /// Returns the offset just past the highest byte written in an arena or the scratch file; zero if none was written.
    fn high_water(&mut self, space: Space) -> Bytes;

    /// Whether an op wrote unused bytes directly before or after an arena, which no tensor owns: a bug. Always false
    /// for the scratch file.
    fn has_stray_writes(&mut self, space: Space) -> bool;
}

/// Access to tensors that are stored in files of the run ([`Space::File`]), by the tensor's name.
pub trait FileSpace: Send {
    /// Reads bytes of the tensor into `into`, from byte `offset` of the tensor on.
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes the bytes `from` to the tensor, from byte `offset` of the tensor on.
    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()>;
}

/// The [`FileSpace`] of Programs that access no files. Each access is an error.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFiles;

impl FileSpace for NoFiles {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::NotFound, format!("this program has no file tensor `{tensor}`")))
    }

    fn write(&mut self, tensor: &str, offset: u64, _: &[u8]) -> io::Result<()> {
        self.read(tensor, offset, &mut [])
    }
}

/// Hooks around every op of a Program. Tests inspect the memory in them, and faults are injected through them.
pub trait Observer: Send {
    /// Called before op number `tick` (counted from 1 within the Program). An error stops the Program.
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        let _ = (tick, op, memory);
        Ok(())
    }

    /// Called after op number `tick` (counted from 1 within the Program) has run without error. If
    /// [`Observer::serializes_ops`] is false, a device may call it earlier, even before the op runs.
    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        let _ = (tick, op, memory);
    }

    /// Whether each op must end before the next one begins, so that the hooks can inspect the memory in between.
    ///
    /// If false, ops of different queues overlap as in normal runs. The hooks are then called in the order in which ops
    /// are issued, which may differ from the order of their numbers, and receive [`NoMemory`].
    fn serializes_ops(&self) -> bool {
        true
    }
}

/// An [`Observer`] that does nothing and lets ops overlap.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn serializes_ops(&self) -> bool {
        false
    }
}

/// A [`Memory`] without bytes, passed to an [`Observer`] while ops may be running.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMemory;

impl Memory for NoMemory {
    fn bytes(&self, _: Space) -> Bytes {
        Bytes::ZERO
    }

    fn view(&mut self, _: Space, _: Range<u64>) -> Cow<'_, [u8]> {
        Cow::Borrowed(&[])
    }

    fn fill(&mut self, _: Space, _: u64, _: &[u8]) {}

    fn poison(&mut self, _: Space, _: Range<u64>) {}

    fn high_water(&mut self, _: Space) -> Bytes {
        Bytes::ZERO
    }

    fn has_stray_writes(&mut self, _: Space) -> bool {
        false
    }
}

/// One call of a Program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramCall {
    /// The Program to run.
    pub program: ProgramKind,
    /// Index within the step, from 0, of the micro-batch that the Program processes; 0 outside a loop over
    /// micro-batches.
    pub micro_batch: u32,
    /// Number of the first op to run, counted from 1. It exceeds 1 only when an interrupted update continues.
    pub first_op: u32,
    /// Whether this is the last micro-batch of its step. Ops that run once per step, such as the reduction of
    /// accumulated gradients, run only then. True for Programs that run once per step.
    pub is_last_micro_batch: bool,
}

impl ProgramCall {
    /// Returns the call that runs a Program from its first op to its last, outside a loop over micro-batches.
    pub fn of(program: ProgramKind) -> ProgramCall {
        ProgramCall { program, micro_batch: 0, first_op: 1, is_last_micro_batch: true }
    }
}

/// An opened device: its arenas are allocated, and it holds the Programs of a run.
pub trait Device: Send {
    /// Runs the Program of `call`, and calls the hooks of `observer` around each op. Ops that access tensors in files
    /// of the run do so through `files`. The Program's inputs must have been written with [`Device::write`].
    ///
    /// # Errors
    /// Any error of an op or the observer. All started ops have then ended: every op before the failed one has run, and
    /// no later one. The device and its memory remain usable.
    fn run_observed(
        &mut self,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError>;

    /// Runs a Program that accesses no files.
    fn run(&mut self, program: ProgramKind) -> Result<(), DeviceError> {
        self.run_observed(ProgramCall::of(program), &mut NoFiles, &mut NoObserver)
    }

    /// Runs a Program that reads or writes files.
    fn run_with_files(&mut self, program: ProgramKind, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.run_observed(ProgramCall::of(program), files, &mut NoObserver)
    }

    /// Joins a communication group, with which the device's Programs run their collectives. If a Program fails on this
    /// device, the device aborts the group.
    ///
    /// # Errors
    /// The device does not support collectives.
    fn join_group(&mut self, group: GroupHandle) -> Result<(), DeviceError> {
        let _ = group;
        Err(DeviceError::CollectivesUnsupported { device: "this device" })
    }

    /// Waits until all ops of earlier calls have ended, because `run` may return before that. Call it before relying on
    /// bytes from [`Device::read`].
    ///
    /// # Errors
    /// Errors of these ops that no earlier call has returned.
    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Returns the backend that runs the device's collectives: NCCL, or staging through the host. None before the first
    /// collective, without a communication group, or on devices with only one backend.
    fn collectives(&self) -> Option<CollectiveBackend> {
        None
    }

    /// Returns the seconds spent computing since the device was opened, without waits for copies and other ranks. Call
    /// it after [`Device::synchronize`]. None if the device does not measure it.
    fn compute_seconds(&mut self) -> Option<f64> {
        None
    }

    /// Multiplies the time of all later compute ops by `factor`, for fault injection. Returns whether the device
    /// supports it; only devices with a simulated pace do.
    fn set_compute_slowdown(&mut self, factor: f64) -> bool {
        let _ = factor;
        false
    }

    /// Copies `bytes` into a tensor's slot, from its first element on.
    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]);

    /// Copies bytes out of a tensor's slot, from its first element on.
    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]);

    /// Copies bytes out of a tensor's slot, from byte `from` of the slot on. Devices that read from a first element only
    /// copy the bytes before `from` as well.
    fn read_from(&mut self, tensor: TensorId, slot: u32, from: u64, bytes: &mut [u8]) {
        let mut all = vec![0; from as usize + bytes.len()];
        self.read(tensor, slot, &mut all);
        bytes.copy_from_slice(&all[from as usize..]);
    }

    /// Switches to the Programs of another plan of the same experiment. No Program runs meanwhile.
    ///
    /// Persistent tensors of both plans keep every bit, even if they change their space. The arenas get the sizes of
    /// the new plan, and are meanwhile never larger than the larger of both. Tensors that only the new plan has are
    /// uninitialized.
    ///
    /// # Errors
    /// The device cannot switch plans, or memory or disk space is refused. The device then keeps the old plan and its
    /// persistent tensors.
    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        let _ = (set, placement);
        Err(DeviceError::Unsupported { op: "re-plan", device: "this device" })
    }

    /// Returns the state of the memory that holds the device's arena: the device's own memory, or the machine's if the
    /// device has none. None if the state is unknown.
    fn available_memory(&mut self) -> Option<AvailableMemory> {
        Some(AvailableMemory { memory: probe::Memory::read(), held_bytes: process::resident().ok()? })
    }

    /// Returns the GEMM algorithms that a library such as cuBLASLt chose; the plan and the checkpoint record them. None
    /// for devices without such a choice.
    fn algorithms(&self) -> Option<GemmAlgorithms> {
        None
    }

    /// Returns access to the device's arenas and scratch file.
    fn memory(&mut self) -> &mut dyn Memory;

    /// Returns the sizes and high-water marks of arenas and scratch file, measured independently of the plan.
    fn stats(&mut self) -> Stats {
        let memory = self.memory();
        Stats {
            arena_bytes: memory.bytes(Space::Device),
            arena_measured_bytes: memory.high_water(Space::Device),
            host_bytes: memory.bytes(Space::Host),
            host_measured_bytes: memory.high_water(Space::Host),
            file_bytes: memory.bytes(Space::Scratch),
            file_measured_bytes: memory.high_water(Space::Scratch),
        }
    }
}
