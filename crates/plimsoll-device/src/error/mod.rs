//! [`DeviceError`], the failures of all devices, and their conversion to messages with hints.

mod arena;
mod cuda;

pub use arena::ArenaError;
pub use cuda::CudaError;

use plimsoll_core::{Bytes, Failure, format_count, is_disk_full};
use std::io;
use std::path::PathBuf;

/// A failure of a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena could not be allocated or resized.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The CPU threads could not be started.
    #[error("cannot start {}: {source}", format_count(*threads, "thread"))]
    Threads {
        /// Requested number of threads.
        threads: usize,
        /// Error of the operating system.
        source: rayon::ThreadPoolBuildError,
    },
    /// The CUDA driver or a CUDA library failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A CUDA library is missing or does not match the driver, or the kernels for a GPU could not be compiled.
    #[error("{}", failure.message)]
    CudaSoftware {
        /// Cause and remedies.
        failure: Box<Failure>,
    },
    /// A file of the run that holds a tensor, such as a checkpoint, could not be read or written.
    #[error("`{tensor}`: {source}")]
    File {
        /// Name of the tensor in the file.
        tensor: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The scratch file could not be created or resized.
    #[error("cannot create a scratch file of {} in {}: {source}", Bytes(*bytes), folder.display())]
    ScratchFile {
        /// Folder of the scratch file; an empty path if the device was opened without such a folder.
        folder: PathBuf,
        /// Requested size, in bytes.
        bytes: u64,
        /// Error of the operating system.
        source: io::Error,
    },
    /// An open scratch file could not be read or written, so the tensors in it are lost.
    #[error("cannot access the scratch file in {}: {source}", folder.display())]
    ScratchFileLost {
        /// Folder of the scratch file.
        folder: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The program set has no such Program: an internal bug.
    #[error("there is no program `{program}`")]
    UnknownProgram {
        /// Name of the Program.
        program: String,
    },
    /// The device cannot run this op, or cannot switch to another plan: an internal bug.
    #[error("{op} does not run on {device}")]
    Unsupported {
        /// Name of the op, or `re-plan`.
        op: &'static str,
        /// Description of the device.
        device: &'static str,
    },
    /// The device does not support collectives.
    #[error("{device} does not support collectives")]
    CollectivesUnsupported {
        /// Description of the device.
        device: &'static str,
    },
    /// The system refused a thread that would run the ops of a queue (such as copy in or communication).
    #[error("the system refuses a thread for the {queue} queue")]
    NoThread {
        /// Name of the queue.
        queue: String,
    },
    /// A persistent tensor has different shapes in two plans of the same run: an internal bug.
    #[error("tensor `{tensor}` has another shape in the new plan")]
    ShapeChanged {
        /// Name of the tensor.
        tensor: String,
    },
    /// A GPU holds more bytes outside the arena (charges) than planned. The arena was not allocated.
    #[error("the GPU holds {held} outside the arena, more than the planned {planned}")]
    ChargesExceedPlan {
        /// Measured bytes outside the arena.
        held: Bytes,
        /// Planned bytes outside the arena.
        planned: Bytes,
    },
    /// The device ran out of memory within a Program; raised by fault injection.
    #[error("out of memory in program `{program}` at op {tick} ({op})")]
    OutOfMemory {
        /// Name of the Program.
        program: String,
        /// Sequence number of the op within the Program, counted from 1.
        tick: u32,
        /// Name of the op.
        op: &'static str,
    },
    /// The device is lost, with all tensors on it. Raised for unresponsive remote devices and by fault injection.
    #[error("{device} is lost{}", reason_suffix(.reason))]
    Lost {
        /// Name of the device.
        device: String,
        /// Reason without the device's name; may be empty.
        reason: String,
    },
    /// A device in another process failed.
    #[error("{}", failure.message)]
    Remote {
        /// Whether the device in the other process ran out of memory.
        out_of_memory: bool,
        /// Failure that the other process reported.
        failure: Box<Failure>,
    },
    /// Another rank aborted the communication group. The error of that rank holds the cause.
    #[error("rank {rank} of the team aborted: {reason}")]
    PeerAborted {
        /// Rank that aborted.
        rank: u32,
        /// Reason given by that rank.
        reason: String,
    },
    /// Another rank of the team is unreachable.
    #[error("rank {rank} of the team is unreachable: {reason}")]
    PeerUnreachable {
        /// Unreachable rank.
        rank: u32,
        /// Reason, as far as known.
        reason: String,
    },
}

fn reason_suffix(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(": {reason}") }
}

impl DeviceError {
    /// Whether another rank of the team caused the failure: it aborted or is unreachable.
    pub fn is_peer_failure(&self) -> bool {
        matches!(self, DeviceError::PeerAborted { .. } | DeviceError::PeerUnreachable { .. })
    }

    /// Whether the device is lost, with all tensors on it.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, DeviceError::Lost { .. } | DeviceError::Cuda(CudaError::Lost { .. }))
    }

    /// Whether the device ran out of memory, or the disk is too full for the scratch file. A run recovers from these
    /// failures with another recipe.
    pub fn is_out_of_memory(&self) -> bool {
        let on_gpu = matches!(self, DeviceError::Cuda(CudaError::Refused { .. } | CudaError::Memory { .. }));
        let disk_full = matches!(self, DeviceError::ScratchFile { source, .. } if is_disk_full(source));
        let no_arena = matches!(self, DeviceError::Arena(ArenaError::OutOfMemory { .. }));
        use DeviceError::{OutOfMemory, Remote};
        let in_program = matches!(self, OutOfMemory { .. } | Remote { out_of_memory: true, .. });
        on_gpu || disk_full || no_arena || in_program
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        match error {
            DeviceError::Arena(error) => error.into(),
            DeviceError::Cuda(error) => error.into(),
            DeviceError::Threads { .. } => {
                let hints = Failure::no_thread("").hints;
                Failure { hints, ..Failure::input(error.to_string()) }
            }
            DeviceError::File { ref source, .. } if is_disk_full(source) => {
                Failure::input(error.to_string()).hint("free some disk space; files saved earlier are intact")
            }
            DeviceError::ScratchFile { .. } => Failure::input(error.to_string())
                .hint("free some disk space, reduce memory.file, or choose another folder with memory.file_dir")
                .hint("files saved earlier are intact"),
            DeviceError::ScratchFileLost { .. } => Failure::stopped(error.to_string())
                .hint("resume from the newest checkpoint; memory.file_dir chooses another folder for the scratch file"),
            DeviceError::CudaSoftware { failure } | DeviceError::Remote { failure, .. } => *failure,
            DeviceError::ChargesExceedPlan { .. } => Failure::does_not_fit(error.to_string())
                .hint("run the same command again: it plans with the charges measured now"),
            DeviceError::CollectivesUnsupported { .. } => {
                Failure::input(error.to_string()).hint("use a single device: --devices cuda:0")
            }
            DeviceError::NoThread { queue } => Failure::no_thread(&format!("for the {queue} queue")),
            DeviceError::File { .. } => Failure::input(error.to_string()),
            other => Failure::bug(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_memory_is_out_of_memory() {
        let requested = Bytes::mib(1);
        let bound_by = String::from("the machine");
        let short = ArenaError::OutOfMemory { requested, available: Bytes::ZERO, bound_by };
        let unknown = ArenaError::MemoryUnknown { requested, reason: "unreadable".into() };
        let system = ArenaError::System { call: "mmap", source: io::ErrorKind::PermissionDenied.into() };
        let counts = [short, unknown, system].map(|error| DeviceError::from(error).is_out_of_memory());
        assert_eq!(counts, [true, false, false]);
    }
}
