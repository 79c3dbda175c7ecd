//! [`DeviceFailure`]: the error of one piece of work on a device or a team. A session resolves most of them: it falls
//! back to a smaller recipe after an out-of-memory error and continues without a lost worker.

use crate::data::DataError;
use crate::files::FilesError;
use plimsoll_core::Failure;
use plimsoll_device::error::DeviceError;

/// Reason that a device did not finish its work.
#[derive(Debug)]
pub enum DeviceFailure {
    /// The device ran out of memory. Its tensors are as they were before the op that failed.
    OutOfMemory {
        /// Rank of the device in the team.
        rank: usize,
        /// Error of the device, with the op that failed.
        error: DeviceError,
    },
    /// The device is lost, with all tensors in its arena.
    Lost {
        /// Rank of the device in the team.
        rank: usize,
        /// Description of the loss, for the log.
        reason: String,
    },
    /// The device stopped because another worker of the team failed. Holds the error that the device reports.
    PeerAborted(DeviceError),
    /// Any other failure; it ends the run.
    Fatal(Failure),
}

impl DeviceFailure {
    /// Returns a description of the failure, for the other workers and for the log.
    pub(crate) fn message(&self) -> String {
        match self {
            DeviceFailure::OutOfMemory { error, .. } | DeviceFailure::PeerAborted(error) => error.to_string(),
            DeviceFailure::Lost { reason, .. } => reason.clone(),
            DeviceFailure::Fatal(failure) => failure.message.clone(),
        }
    }

    /// Returns the failure with its rank replaced by `rank`. Variants without a rank stay the same.
    pub(crate) fn with_rank(self, rank: usize) -> DeviceFailure {
        match self {
            DeviceFailure::OutOfMemory { error, .. } => DeviceFailure::OutOfMemory { rank, error },
            DeviceFailure::Lost { reason, .. } => DeviceFailure::Lost { rank, reason },
            other => other,
        }
    }

    /// Returns the priority of the failure, from 0 to 3 (most severe). If several workers fail at once, the run handles
    /// the failure with the highest priority.
    pub(crate) fn severity(&self) -> u32 {
        match self {
            DeviceFailure::Fatal(_) => 3,
            DeviceFailure::Lost { .. } => 2,
            DeviceFailure::OutOfMemory { .. } => 1,
            DeviceFailure::PeerAborted(_) => 0,
        }
    }
}

impl From<DeviceError> for DeviceFailure {
    fn from(error: DeviceError) -> DeviceFailure {
        match error {
            error if error.is_device_lost() => DeviceFailure::Lost { rank: 0, reason: error.to_string() },
            error if error.is_peer_failure() => DeviceFailure::PeerAborted(error),
            error if error.is_out_of_memory() => DeviceFailure::OutOfMemory { rank: 0, error },
            error => DeviceFailure::Fatal(error.into()),
        }
    }
}

impl From<Failure> for DeviceFailure {
    fn from(failure: Failure) -> DeviceFailure {
        DeviceFailure::Fatal(failure)
    }
}

impl From<FilesError> for DeviceFailure {
    fn from(error: FilesError) -> DeviceFailure {
        DeviceFailure::Fatal(error.into())
    }
}

impl From<DataError> for DeviceFailure {
    fn from(error: DataError) -> DeviceFailure {
        DeviceFailure::Fatal(error.into())
    }
}

impl From<DeviceFailure> for Failure {
    fn from(failure: DeviceFailure) -> Failure {
        match failure {
            DeviceFailure::OutOfMemory { error, .. } | DeviceFailure::PeerAborted(error) => error.into(),
            DeviceFailure::Lost { reason, .. } => Failure::stopped(reason),
            DeviceFailure::Fatal(failure) => failure,
        }
    }
}
