//! What a device can do for a run. One trait for all of them, so that one test body runs on each.

use crate::arena::ArenaError;
use crate::transport::Seat;
use crate::{probe, process};
use plimsoll_core::{Algorithms, Bytes, CollectivesBy, Failure, Space};
use plimsoll_program::{Op, Placement, ProgramSet, TensorId};
use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

/// Bytes on a device and on its host side, measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The size of the arena.
    pub arena_bytes: Bytes,
    /// The topmost byte of the arena that was ever written, from its first.
    pub arena_measured_bytes: Bytes,
    /// The size of the arena on the host.
    pub host_bytes: Bytes,
    /// The topmost byte of it that was ever written.
    pub host_measured_bytes: Bytes,
    /// The size of the scratch file.
    pub file_bytes: Bytes,
    /// The topmost byte of it that was ever written.
    pub file_measured_bytes: Bytes,
}

/// The memory that an arena stands in, as it is now: what a run looks at to feel that others need some of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// All of it, and what is free.
    pub memory: probe::Memory,
    /// What this run holds of it, charges included.
    pub held: Bytes,
}

/// The arenas of a device as they are looked at from outside, while no op runs. `space` is [`Space::Device`],
/// [`Space::Host`] or [`Space::Scratch`], ranges count from its first byte; files of the run have no space.
pub trait Memory {
    /// The size of an arena.
    fn bytes(&self, space: Space) -> Bytes;

    /// Part of an arena: lent where this processor sees it, else copied.
    fn look(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]>;

    /// Overwrites an arena from byte `first` on.
    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]);

    /// Overwrites a range with what is NaN in every float type: a dead tensor that is read shows.
    fn poison(&mut self, space: Space, range: Range<u64>);

    /// The end of the topmost part that was ever written since the device was opened.
    fn high_water(&mut self, space: Space) -> Bytes;

    /// Whether something was written beside an arena.
    fn strayed(&mut self, space: Space) -> bool;
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

/// Called around every op of a Program; tests look at the memory, faults are injected here.
pub trait Observer: Send {
    /// Before op number `tick` (counted from 1 within the Program) runs. An error drops the Program.
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        let _ = (tick, op, memory);
        Ok(())
    }

    /// After it ran.
    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        let _ = (tick, op, memory);
    }

    /// Whether every op is to be over before the next begins, so that the memory can be looked at in between. Otherwise
    /// ops of different queues overlap as they do when nobody looks, are announced in the order in which they begin
    /// (which is not that of their ticks), and the memory handed over is [`Unseen`].
    fn one_at_a_time(&self) -> bool {
        true
    }
}

/// Nobody looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn one_at_a_time(&self) -> bool {
        false
    }
}

/// No memory: what an [`Observer`] is handed while ops may be at work in the real one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unseen;

impl Memory for Unseen {
    fn bytes(&self, _: Space) -> Bytes {
        Bytes::ZERO
    }

    fn look(&mut self, _: Space, _: Range<u64>) -> Cow<'_, [u8]> {
        Cow::Borrowed(&[])
    }

    fn fill(&mut self, _: Space, _: u64, _: &[u8]) {}

    fn poison(&mut self, _: Space, _: Range<u64>) {}

    fn high_water(&mut self, _: Space) -> Bytes {
        Bytes::ZERO
    }

    fn strayed(&mut self, _: Space) -> bool {
        false
    }
}

/// What a device may fail with.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena was refused.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Threads were refused.
    #[error(transparent)]
    Pool(#[from] crate::cpu::pool::PoolError),
    /// A GPU, its driver or one of its libraries refused or failed.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::driver::CudaError),
    /// A library of NVIDIA's is not here, or does not go with the driver.
    #[error(transparent)]
    Libraries(#[from] crate::cuda::libraries::LibraryError),
    /// There are no kernels for a GPU.
    #[error(transparent)]
    Kernels(#[from] crate::cuda::compile::CompileError),
    /// A file could not be read or written.
    #[error("`{tensor}`: {source}")]
    File {
        /// The file-space tensor.
        tensor: String,
        /// What the system said.
        source: io::Error,
    },
    /// The scratch file cannot be had.
    #[error("a scratch file of {} in {}: {source}", Bytes(*bytes), folder.display())]
    Scratch {
        /// Where it is.
        folder: PathBuf,
        /// Its size.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The scratch file that is there cannot be read or written: what waited in it is gone.
    #[error("the scratch file in {}: {source}", folder.display())]
    ScratchLost {
        /// Where it is.
        folder: PathBuf,
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
    /// The device cannot work with others.
    #[error("{device} cannot work in a team yet")]
    NoTeam {
        /// What it is.
        device: &'static str,
    },
    /// The system gives no thread for a queue.
    #[error("the system refuses a thread for the {queue} queue")]
    NoThread {
        /// The queue.
        queue: String,
    },
    /// A tensor that stays has another shape in the next plan: a bug of ours.
    #[error("`{tensor}` has another shape in the next plan")]
    OtherShape {
        /// The tensor.
        tensor: String,
    },
    /// A GPU holds more beside the arena than was planned with; the arena was not taken.
    #[error("{held} beside the arena instead of the {planned} that were planned with")]
    MoreCharges {
        /// Measured.
        held: Bytes,
        /// Planned with.
        planned: Bytes,
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
    /// The device is gone, with all that stood on it (injected, in rehearsals).
    #[error("{device} is gone{}", because(.why))]
    Lost {
        /// Its name.
        device: String,
        /// What is known of it, the device not named again; nothing perhaps.
        why: String,
    },
    /// A device in another process refused or failed.
    #[error("{}", failure.message)]
    Elsewhere {
        /// Whether it refused memory.
        refusal: bool,
        /// What it said.
        failure: Box<Failure>,
    },
    /// Another device of the team cannot go on, so what is under way is dropped. Its own error says why.
    #[error("rank {rank} of the team gave up: {why}")]
    Peer {
        /// Which one.
        rank: u32,
        /// What it said.
        why: String,
    },
    /// Another device of the team cannot be reached any more.
    #[error("rank {rank} of the team cannot be reached: {why}")]
    CutOff {
        /// Which one.
        rank: u32,
        /// What is known of it.
        why: String,
    },
}

fn because(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}

impl DeviceError {
    /// Whether it is another device's failure.
    pub fn is_peers(&self) -> bool {
        matches!(self, DeviceError::Peer { .. } | DeviceError::CutOff { .. })
    }

    /// Whether the device is gone, with all that stood on it.
    pub fn is_loss(&self) -> bool {
        use crate::cuda::driver::CudaError;
        matches!(self, DeviceError::Lost { .. } | DeviceError::Cuda(CudaError::Lost { .. }))
    }

    /// Whether memory was refused, which a run survives with another recipe.
    pub fn is_refusal(&self) -> bool {
        use crate::cuda::driver::CudaError;
        let on_gpu = matches!(self, DeviceError::Cuda(CudaError::Refused { .. } | CudaError::Memory { .. }));
        let full = matches!(self, DeviceError::Scratch { source, .. } if source.kind() == io::ErrorKind::StorageFull);
        use DeviceError::{Arena, Elsewhere, Refused};
        on_gpu || full || matches!(self, Refused { .. } | Arena(_) | Elsewhere { refusal: true, .. })
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        match error {
            DeviceError::Arena(error) => error.into(),
            DeviceError::Pool(error) => error.into(),
            DeviceError::Cuda(error) => error.into(),
            DeviceError::Libraries(error) => error.into(),
            DeviceError::Kernels(error) => error.into(),
            DeviceError::File { ref source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Failure::input(error.to_string()).hint("free some disk space: what was saved before is intact")
            }
            DeviceError::Scratch { .. } => Failure::input(error.to_string())
                .hint("free some disk space, give memory.file less, or name another folder: memory.file_dir")
                .hint("what was saved before is intact"),
            DeviceError::ScratchLost { .. } => Failure::stopped(error.to_string())
                .hint("the newest checkpoint stands; another folder for the file: memory.file_dir"),
            DeviceError::Elsewhere { failure, .. } => *failure,
            DeviceError::MoreCharges { .. } => Failure::does_not_fit(error.to_string())
                .hint("the same once more is planned with what was measured now"),
            DeviceError::NoTeam { .. } => Failure::input(error.to_string()).hint("name one device: --devices cuda:0"),
            DeviceError::File { .. } | DeviceError::NoThread { .. } => Failure::input(error.to_string()),
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
    /// Whether this is the last micro-batch of its step: what a team sums up is then whole. What runs once is the last.
    pub last: bool,
}

impl<'a> Call<'a> {
    /// The whole Program, once.
    pub fn of(program: &'a str) -> Call<'a> {
        Call { program, micro_batch: 0, from: 1, last: true }
    }
}

/// A device with a sealed arena and the Programs of a run.
pub trait Device: Send {
    /// Runs a Program. What it reads must have been written: inputs by [`Device::write`].
    ///
    /// # Errors
    /// Whatever an op or the observer fails with. All that was started has ended by then, nothing after the op that was
    /// refused has run, and everything before it has; the device and its memory can be used as before.
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

    /// Takes its seat in a team: collectives of its Programs meet those of the others there. Where a Program of its own
    /// fails, it gives up for all.
    ///
    /// # Errors
    /// Where the device cannot work in a team.
    fn join(&mut self, seat: Seat) -> Result<(), DeviceError> {
        let _ = seat;
        Err(DeviceError::NoTeam { device: "this device" })
    }

    /// Waits until everything that was run is over. A device may come back from a Program before it is: what it then
    /// fails with it says here, at the latest before anybody relies on what [`Device::read`] gives.
    ///
    /// # Errors
    /// What went wrong since it was last asked.
    fn settle(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// How its team's collectives go; none before the first one, without a team, and where there is only one way.
    fn collectives(&self) -> Option<CollectivesBy> {
        None
    }

    /// Seconds in which it has computed since it was opened: what it waited for, copies and other devices of its team, is left
    /// out. To be asked when it has settled; none where it does not tell.
    fn computed(&mut self) -> Option<f64> {
        None
    }

    /// From now on what it computes takes so many times as long, where its pace is simulated, which is what this says: for
    /// rehearsals.
    fn slow_down(&mut self, factor: f64) -> bool {
        let _ = factor;
        false
    }

    /// Copies elements of a tensor's slot from the host, from its first element on.
    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]);

    /// Copies elements of a tensor's slot to the host, from its first element on.
    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]);

    /// Goes over to the Programs of another plan of the same experiment, between two Programs. Persistent tensors that
    /// both have keep every bit, in whichever space they now stand; the arenas become as large as the new plan says,
    /// and are never larger than the larger of both on the way. What only the new plan has is unwritten.
    ///
    /// # Errors
    /// What is refused; the device then still has the old plan, and its persistent tensors are what they were.
    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        let _ = (set, placement);
        Err(DeviceError::Unsupported { op: "re-plan", device: "this device" })
    }

    /// The memory that its arena stands in: the machine's, unless the device has its own. None where nobody says.
    fn room(&mut self) -> Option<Room> {
        Some(Room { memory: probe::Memory::read(), held: process::resident().ok()? })
    }

    /// What its products are done with, where a library had to choose: to be kept with plan and checkpoint.
    fn algorithms(&self) -> Option<Algorithms> {
        None
    }

    /// Its arenas, to be looked at.
    fn memory(&mut self) -> &mut dyn Memory;

    /// What was used, measured independently of the plan.
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
