//! Failures of device work, and interruptions of a run.
//!
//! [`DeviceFailure`] is the error of one piece of work on a device or a team. The recovery code (`recovery`) resolves
//! most of them: it falls back to a smaller recipe after an out-of-memory error and continues without a lost worker.
//! [`StepInterrupt`] is the error of the training loop: what remains after recovery.

use crate::data::DataError;
use crate::files::FilesError;
use plimsoll_core::Failure;
use plimsoll_device::device::DeviceError;

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
    /// The device stopped because another worker of the team failed.
    PeerAborted(DeviceError),
    /// Any other failure; it ends the run.
    Fatal(Failure),
}

impl DeviceFailure {
    /// Returns the message that the other workers and the log receive.
    pub(crate) fn message(&self) -> String {
        match self {
            DeviceFailure::OutOfMemory { error, .. } | DeviceFailure::PeerAborted(error) => error.to_string(),
            DeviceFailure::Lost { reason, .. } => reason.clone(),
            DeviceFailure::Fatal(failure) => failure.message.clone(),
        }
    }

    /// Assigns the failure to the worker of this rank.
    pub(crate) fn with_rank(self, rank: usize) -> DeviceFailure {
        match self {
            DeviceFailure::OutOfMemory { error, .. } => DeviceFailure::OutOfMemory { rank, error },
            DeviceFailure::Lost { reason, .. } => DeviceFailure::Lost { rank, reason },
            other => other,
        }
    }

    /// Returns the priority of the failure: of several at once, the run handles the highest.
    pub(crate) fn severity(&self) -> u32 {
        match self {
            DeviceFailure::Fatal(_) => 3,
            DeviceFailure::Lost { .. } => 2,
            DeviceFailure::OutOfMemory { .. } => 1,
            DeviceFailure::PeerAborted(_) => 0,
        }
    }
}

/// Reason that the training loop was left.
#[derive(Debug)]
pub enum StepInterrupt {
    /// The run ends with an error.
    Fatal(Failure),
    /// The run stops early and can be resumed.
    Stop {
        /// Reason for the stop.
        failure: Failure,
        /// Whether weights and optimizer state are exactly those of the last finished step.
        state_intact: bool,
    },
    /// The run restarted from a checkpoint. The work in progress is dropped, and the loop continues with the step after
    /// the checkpoint.
    RolledBack,
}

impl From<Failure> for StepInterrupt {
    fn from(failure: Failure) -> StepInterrupt {
        StepInterrupt::Fatal(failure)
    }
}

impl From<DeviceFailure> for StepInterrupt {
    fn from(failure: DeviceFailure) -> StepInterrupt {
        StepInterrupt::Fatal(failure.into())
    }
}

impl From<FilesError> for StepInterrupt {
    fn from(error: FilesError) -> StepInterrupt {
        StepInterrupt::Fatal(error.into())
    }
}

impl From<DataError> for StepInterrupt {
    fn from(error: DataError) -> StepInterrupt {
        StepInterrupt::Fatal(error.into())
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
