//! What a device can do for a run. One trait for all of them, so that one test body runs on each.

use crate::arena::{Arena, ArenaError};
use plimsoll_core::{Bytes, Failure};
use plimsoll_program::{Op, TensorId};
use std::io;

/// Bytes on a device, measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The size of the arena.
    pub arena_bytes: Bytes,
    /// The topmost byte of the arena that was ever written, from its first.
    pub arena_measured_bytes: Bytes,
}

/// Where file-space tensors are read from and written to, by the tensor's name.
pub trait FileSpace: Send {
    /// Fills `into` from byte `offset` of the tensor.
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes `from` to byte `offset` of the tensor.
    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()>;
}

/// Programs that touch no files.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFiles;

impl FileSpace for NoFiles {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::NotFound, format!("`{tensor}` is no file of this work")))
    }

    fn write(&mut self, tensor: &str, offset: u64, _: &[u8]) -> io::Result<()> {
        self.read(tensor, offset, &mut [])
    }
}

/// Called around every op of a Program; tests look at the arena, faults are injected here.
pub trait Observer: Send {
    /// Before op number `tick` (counted from 1 within the Program) runs. An error drops the Program.
    fn before(&mut self, tick: u32, op: &Op, arena: &mut Arena) -> Result<(), DeviceError> {
        let _ = (tick, op, arena);
        Ok(())
    }

    /// After it ran.
    fn after(&mut self, tick: u32, op: &Op, arena: &mut Arena) {
        let _ = (tick, op, arena);
    }
}

/// Nobody looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {}

/// What a device may fail with.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena was refused.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Threads were refused.
    #[error(transparent)]
    Pool(#[from] crate::cpu::pool::PoolError),
    /// A file could not be read or written.
    #[error("`{tensor}`: {source}")]
    File {
        /// The file-space tensor.
        tensor: String,
        /// What the system said.
        source: io::Error,
    },
    /// The set has no Program of that name: a bug of ours.
    #[error("there is no program `{program}`")]
    NoProgram {
        /// The name.
        program: String,
    },
    /// This executor cannot run that op: a bug of ours.
    #[error("{op} does not run on {device}")]
    Unsupported {
        /// The op.
        op: &'static str,
        /// The device.
        device: &'static str,
    },
    /// The device refused memory in the middle of a Program (injected, in rehearsals).
    #[error("the device refused memory in `{program}` at op {tick} ({op})")]
    Refused {
        /// The Program.
        program: String,
        /// The op's number.
        tick: u32,
        /// The op.
        op: &'static str,
    },
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        match error {
            DeviceError::Arena(error) => error.into(),
            DeviceError::Pool(error) => error.into(),
            DeviceError::File { ref source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Failure::input(error.to_string()).hint("free some disk space: what was saved before is intact")
            }
            DeviceError::File { .. } => Failure::input(error.to_string()),
            other => Failure::bug(other.to_string()),
        }
    }
}

/// A Program that is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call<'a> {
    /// Its name.
    pub program: &'a str,
    /// Which micro-batch it works on.
    pub micro_batch: u32,
    /// The number of the first op that runs, counted from 1: above 1 where a refused update goes on.
    pub from: u32,
}

impl<'a> Call<'a> {
    /// The whole Program, once.
    pub fn of(program: &'a str) -> Call<'a> {
        Call { program, micro_batch: 0, from: 1 }
    }
}

/// A device with a sealed arena and the Programs of a run.
pub trait Device {
    /// Runs a Program. What it reads must have been written: inputs by [`Device::write`].
    fn run_observed(
        &mut self,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError>;

    /// Runs a Program that touches no files.
    fn run(&mut self, program: &str) -> Result<(), DeviceError> {
        self.run_observed(Call::of(program), &mut NoFiles, &mut Unobserved)
    }

    /// Runs a Program that reads or writes files.
    fn run_with_files(&mut self, program: &str, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.run_observed(Call::of(program), files, &mut Unobserved)
    }

    /// Copies elements of a tensor's slot from the host, from its first element on.
    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]);

    /// Copies elements of a tensor's slot to the host, from its first element on.
    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]);

    /// What was used, measured independently of the plan.
    fn stats(&mut self) -> Stats;
}
