//! [`DeviceError`], the failures of all devices, and their conversion to messages with hints.

use crate::arena::ArenaError;
use plimsoll_core::{Bytes, Failure};
use std::io;
use std::path::PathBuf;

/// A failure of a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena does not fit or could not be mapped.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The CPU threads could not be started.
    #[error(transparent)]
    Pool(#[from] crate::cpu::pool::PoolError),
    /// The CUDA driver or a CUDA library failed.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::driver::CudaError),
    /// A CUDA library is missing or does not match the driver.
    #[error(transparent)]
    Libraries(#[from] crate::cuda::libraries::LibraryError),
    /// The CUDA kernels for a GPU could not be compiled.
    #[error(transparent)]
    Kernels(#[from] crate::cuda::compile::CompileError),
    /// A file could not be read or written.
    #[error("`{tensor}`: {source}")]
    File {
        /// Name of the file-space tensor.
        tensor: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The scratch file could not be created or resized.
    #[error("cannot create a scratch file of {} in {}: {source}", Bytes(*bytes), folder.display())]
    ScratchFile {
        /// Folder of the scratch file.
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
    /// The device cannot run this op: an internal bug.
    #[error("{op} does not run on {device}")]
    Unsupported {
        /// Name of the op.
        op: &'static str,
        /// The device.
        device: &'static str,
    },
    /// The device has no collectives.
    #[error("{device} does not support collectives")]
    CollectivesUnsupported {
        /// The device.
        device: &'static str,
    },
    /// The system refused a thread for a queue.
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
    /// The measured charges of a GPU exceed the planned ones. The arena was not allocated.
    #[error("the GPU holds {held} outside the arena, more than the planned {planned}")]
    ChargesExceedPlan {
        /// Measured charges.
        held: Bytes,
        /// Planned charges.
        planned: Bytes,
    },
    /// The device ran out of memory within a Program; raised by fault injection.
    #[error("out of memory in program `{program}` at op {tick} ({op})")]
    OutOfMemory {
        /// Name of the Program.
        program: String,
        /// Number of the op, counted from 1.
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
        /// Whether it ran out of memory.
        out_of_memory: bool,
        /// Failure reported by that process.
        failure: Box<Failure>,
    },
    /// Another rank of the group aborted. The error of that rank holds the cause.
    #[error("rank {rank} of the team aborted: {reason}")]
    PeerAborted {
        /// Rank that aborted.
        rank: u32,
        /// Reason given by that rank.
        reason: String,
    },
    /// Another rank of the group is unreachable.
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
    /// Whether another rank caused the failure.
    pub fn is_peer_failure(&self) -> bool {
        matches!(self, DeviceError::PeerAborted { .. } | DeviceError::PeerUnreachable { .. })
    }

    /// Whether the device is lost, with all tensors on it.
    pub fn is_device_lost(&self) -> bool {
        use crate::cuda::driver::CudaError;
        matches!(self, DeviceError::Lost { .. } | DeviceError::Cuda(CudaError::Lost { .. }))
    }

    /// Whether the device ran out of memory or disk space, from which a run recovers with another recipe.
    pub fn is_out_of_memory(&self) -> bool {
        use crate::cuda::driver::CudaError;
        let on_gpu = matches!(self, DeviceError::Cuda(CudaError::Refused { .. } | CudaError::Memory { .. }));
        let disk_full =
            matches!(self, DeviceError::ScratchFile { source, .. } if source.kind() == io::ErrorKind::StorageFull);
        use DeviceError::{Arena, OutOfMemory, Remote};
        on_gpu || disk_full || matches!(self, OutOfMemory { .. } | Arena(_) | Remote { out_of_memory: true, .. })
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
                Failure::input(error.to_string()).hint("free some disk space; files saved earlier are intact")
            }
            DeviceError::ScratchFile { .. } => Failure::input(error.to_string())
                .hint("free some disk space, reduce memory.file, or choose another folder with memory.file_dir")
                .hint("files saved earlier are intact"),
            DeviceError::ScratchFileLost { .. } => Failure::stopped(error.to_string())
                .hint("resume from the newest checkpoint; memory.file_dir chooses another folder for the scratch file"),
            DeviceError::Remote { failure, .. } => *failure,
            DeviceError::ChargesExceedPlan { .. } => Failure::does_not_fit(error.to_string())
                .hint("run the same command again: it plans with the charges measured now"),
            DeviceError::CollectivesUnsupported { .. } => {
                Failure::input(error.to_string()).hint("use a single device: --devices cuda:0")
            }
            DeviceError::File { .. } | DeviceError::NoThread { .. } => Failure::input(error.to_string()),
            other => Failure::bug(other.to_string()),
        }
    }
}
